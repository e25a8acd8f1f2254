"""The committer believes the store, not the message: a receipt that is not the one its writer named is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cnr_store.errors import CorruptObject, CorruptStore, MissingObject
from cnr_store.format.records import PartLine
from cnr_store.runtime.threads import Throttle, Workers
from cnr_store.segment.reader import read_receipt
from cnr_store.segment.writer import SegmentWriter
from cnr_store.storage import Storage, open_storage

SEGMENT, WRITER, TXN = "00000000000000000001-" + "a" * 32, "r00001-" + "b" * 8, "a" * 32


@pytest.fixture
def written(tmp_path: Path) -> tuple[Storage, str]:
    """A storage with the receipt of rank 1 of 2, and the receipt's digest."""
    storage = open_storage(str(tmp_path))
    with Workers(1) as workers:
        writer = SegmentWriter(storage, SEGMENT, writer=WRITER, workers=workers, throttle=Throttle(None))
        writer.write_document("reader/1", {"yielded": 7})
        writer.write_document("rng/1", {"words": "random" * 1000})
        receipt = writer.finish(txn=TXN, rank=1, world=2, attempt="b" * 8, base=1, l0=0, parts=())
        digest = writer.put_receipt(receipt)
    return storage, digest


def test_the_receipt_that_its_writer_named_is_read_back(written: tuple[Storage, str]) -> None:
    receipt = read_receipt(written[0], SEGMENT, WRITER, written[1])

    assert (receipt.rank, receipt.world, receipt.txn) == (1, 2, TXN)
    assert list(receipt.documents) == ["rng/1"]
    assert dict(receipt.small) == {"reader/1": msgspec.Raw(b'{"yielded":7}')}
    assert [entry.path for entry in receipt.objects] == [f"{WRITER}.document-0.json.zst"]


def test_another_receipt_than_its_writer_named_is_refused(written: tuple[Storage, str]) -> None:
    with pytest.raises(CorruptObject, match="has another sha256 than its rank reported"):
        read_receipt(written[0], SEGMENT, WRITER, "0" * 64)


def test_a_receipt_that_is_not_there_is_refused(written: tuple[Storage, str]) -> None:
    with pytest.raises(MissingObject, match=r"r00002-.*.receipt.json.zst is missing"):
        read_receipt(written[0], SEGMENT, "r00002-" + "b" * 8, written[1])


def test_a_receipt_with_a_state_digest_that_is_none_is_refused(tmp_path: Path) -> None:
    storage, part = open_storage(str(tmp_path)), PartLine(table="t", rows=(0, 1), columns=(0, 2), state_digest="7")
    with Workers(1) as workers:
        writer = SegmentWriter(storage, SEGMENT, writer=WRITER, workers=workers, throttle=Throttle(None))
        digest = writer.put_receipt(
            writer.finish(txn=TXN, rank=1, world=2, attempt="b" * 8, base=1, l0=0, parts=(part,))
        )

    with pytest.raises(CorruptStore, match="a part has state digest '7'"):
        read_receipt(storage, SEGMENT, WRITER, digest)
