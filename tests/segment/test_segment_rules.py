"""What a reader of a segment refuses although every object is what the inventory says; names that no segment has."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from cnr_store import BadInput, CorruptStore, Store, TableOptions, verify_store
from cnr_store.errors import BadName, CorruptObject, CorruptRecord
from cnr_store.format.commit_record import encode_record
from cnr_store.format.documents import pack
from cnr_store.format.layout import check_name, commit_key, encode_name, segment_key, segment_prefix
from cnr_store.format.records import ObjectEntry, Receipt
from cnr_store.runtime.threads import Inline, Throttle, Workers
from cnr_store.segment.decoded import Scratch
from cnr_store.segment.packs import read_tensors
from cnr_store.segment.reader import SegmentReader, check_record
from cnr_store.segment.writer import SegmentWriter, merge_receipts

ROWS = np.array([1, 5, 9], np.int64)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=1)
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            txn.write_table("t", np.zeros((10, 2), np.float32), options=TableOptions(scale=1.0))
            txn.put_dense({"w": np.arange(6, dtype=np.float32), "v": np.ones(6, np.float32)})
        with writer.begin(step=2) as txn:
            txn.write_rows("t", ROWS, np.ones((3, 2), np.float32))
    return store


@pytest.fixture
def segments(store: Store) -> tuple[SegmentReader, ...]:
    return store.snapshot().readers


def test_a_tensor_whose_entry_points_to_other_bytes_is_refused(segments: tuple[SegmentReader, ...]) -> None:
    entries = segments[0].manifest.dense
    assert read_tensors(segments, {"w": entries["w"]}, Inline())["w"].tolist() == [0, 1, 2, 3, 4, 5]

    wrong = msgspec.structs.replace(entries["w"], offset=entries["v"].offset)
    with pytest.raises(CorruptObject, match="another digest"):
        read_tensors(segments, {"w": wrong}, Inline())


@pytest.mark.parametrize(("first", "last"), [(0, 9), (1, 10), (-3, 12)])
def test_row_ids_that_are_not_those_of_their_range_are_refused(
    segments: tuple[SegmentReader, ...], first: int, last: int
) -> None:
    row_list = segments[1].manifest.parts[0].add
    assert row_list is not None
    assert segments[1].read_rows(row_list, 0, Scratch()).tolist() == ROWS.tolist()

    with pytest.raises(CorruptObject, match="row ids are not sorted and unique"):
        segments[1].read_rows(msgspec.structs.replace(row_list, first=(first,), last=(last,)), 0, Scratch())


def test_a_record_of_another_step_than_its_segment_is_refused(store: Store) -> None:
    snapshot = store.snapshot()
    check_record(snapshot.record, snapshot.readers[-1])

    with pytest.raises(CorruptRecord, match="has step 3, its segment has step 2"):
        check_record(msgspec.structs.replace(snapshot.record, step=3), snapshot.readers[-1])


def test_a_check_finds_a_record_of_another_step_than_its_segment(store: Store) -> None:
    assert verify_store(store).is_sound
    head = store.head()
    wrong = encode_record(msgspec.structs.replace(head.record, step=3), head.extra)
    store.storage.put(commit_key(head.record.v), wrong)

    messages = [problem.message for problem in verify_store(store).problems]

    assert any("has step 3, its segment has step 2" in message for message in messages)


def test_an_object_of_a_segment_is_written_once(store: Store) -> None:
    name = store.snapshot().readers[-1].name
    writer = SegmentWriter(store.storage, name, writer="r00000-0123abcd", workers=Workers(1), throttle=Throttle(None))
    words = "random" * 1000
    writer.write_document("reader", words)

    with pytest.raises(CorruptStore, match="would be written twice"):
        writer.write_document("reader", {"at": 2})
    writer.finish(txn="a" * 32, rank=1, world=2, attempt="0123abcd", base=1, l0=0, parts=())

    assert store.storage.read(segment_key(name, "r00000-0123abcd.document-0.json.zst"), stop=100) == pack(words)


def test_dense_tensors_do_not_replace_those_written_before(store: Store) -> None:
    name = store.snapshot().readers[-1].name
    writer = SegmentWriter(store.storage, name, writer="r00000-0123abcd", workers=Workers(1), throttle=Throttle(None))
    writer.write_dense({"a": np.zeros(3, np.float32)}, {})
    writer.write_dense({"b": np.ones(3, np.float32)}, {})

    with pytest.raises(CorruptStore, match="would be written twice"):
        writer.finish(txn="a" * 32, rank=1, world=2, attempt="0123abcd", base=1, l0=0, parts=())


@pytest.mark.parametrize("kind", ["documents", "small", "dense"])
def test_what_two_ranks_save_under_one_name_is_refused(segments: tuple[SegmentReader, ...], kind: str) -> None:
    dense = {"x": segments[0].manifest.dense["w"]}
    named = {kind: {"documents": {"x": "r/x.json"}, "small": {"x": msgspec.Raw(b"1")}, "dense": dense}[kind]}
    receipts = [
        Receipt(
            txn="c" * 32, rank=rank, world=2, attempt="0" * 8, base=0, l0=0, parts=(), **named,
            objects=(ObjectEntry(path=f"r{rank}/x.json", size=1, xxh3_128="a" * 32),),
        )
        for rank in (0, 1)
    ]  # fmt: skip

    with pytest.raises(BadInput, match="ranks 0 and 1 both saved 'x'"):
        merge_receipts(receipts, None, {}, ())


@pytest.mark.parametrize("name", ["../x", "", "0" * 20, f"{'0' * 20}-{'g' * 32}", f"{'0' * 20}-{'a' * 32}/../x"])
def test_what_is_no_name_of_a_segment_is_no_folder(name: str) -> None:
    with pytest.raises(BadName):
        segment_prefix(name)


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "a//b", "", "a\nb", "a/."])
def test_a_path_does_not_leave_its_segment(path: str) -> None:
    with pytest.raises(BadName):
        segment_key(f"{'0' * 20}-{'a' * 32}", path)


@pytest.mark.parametrize("name", ["zarr.json", "..", ".", "__x"])
def test_a_name_that_the_format_keeps_becomes_another_node(name: str) -> None:
    assert encode_name(name) == f"%{ord(name[0]):02X}{name[1:]}"


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", "a\x7f", "x" * 1025, "\ud800"])
def test_what_cannot_be_a_name_is_refused(name: str) -> None:
    with pytest.raises(BadName):
        check_name(name)
