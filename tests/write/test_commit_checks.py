from __future__ import annotations

from typing import Any

import pytest

from cnr_store import BadInput
from cnr_store.errors import DoesNotApply
from cnr_store.format.records import ChainEntry, CommitRecord, Manifest, PartEntry, Receipt, WriterInfo
from cnr_store.log.rebase import draft_init
from cnr_store.types import MAX_CHAIN
from cnr_store.write.commit_checks import check_receipts, next_chain

WRITER = WriterInfo(host="h", lib="l", run_id="r")


def entry(index: int, kind: Any = "delta") -> ChainEntry:
    return ChainEntry(
        seg=f"{index:020d}-{index:032x}", sha256="", kind=kind, l0=index, l1=index + 1, size_bytes=1, rows=1
    )


def head(length: int) -> CommitRecord:
    chain = tuple(entry(k, "baseline" if k == 0 else "delta") for k in range(length))
    record = draft_init(WRITER)
    return CommitRecord(**{name: getattr(record, name) for name in record.__struct_fields__} | {"chain": chain})


def part(
    table: str = "t", base: str | None = None, state: str | None = None, rows: tuple[int, int] = (0, 4)
) -> PartEntry:
    return PartEntry(table=table, rows=rows, columns=(0, 2), base_digest=base, state_digest=state)


def receipt(rank: int = 0, world: int = 1, l0: int = 3, *parts: PartEntry) -> Receipt:
    return Receipt(txn="x", rank=rank, world=world, attempt="a", base=1, l0=l0, parts=parts, objects=())


def manifest(*parts: PartEntry) -> Manifest:
    return Manifest(
        format=1, txn="x", base=0, kind="baseline", l0=0, l1=3, step=1, tables={}, parts=parts,
        objects=(),
    )  # fmt: skip


def test_a_delta_goes_behind_what_it_keeps_and_a_baseline_stands_alone() -> None:
    new = entry(9)
    assert next_chain(head(3), new, keep=3) == (*head(3).chain, new)
    assert next_chain(head(3), new, keep=1) == (head(3).chain[0], new)
    assert next_chain(head(3), entry(9, "baseline"), keep=0) == (entry(9, "baseline"),)


def test_a_chain_ends_at_its_cap() -> None:
    assert len(next_chain(head(MAX_CHAIN - 1), entry(99), keep=MAX_CHAIN - 1)) == MAX_CHAIN
    with pytest.raises(BadInput, match="commit a baseline"):
        next_chain(head(MAX_CHAIN), entry(99), keep=MAX_CHAIN)


def test_receipts_that_start_from_the_base_apply() -> None:
    base = manifest(part(state="aa"), part("u"))
    check_receipts([receipt(0, 1, 3, part(base="aa"), part("u"), part("new"))], txn="x", world=1, l0=3, base=base)
    check_receipts([receipt(0, 1, 0, part(base=None))], txn="x", world=1, l0=0, base=None)
    check_receipts([receipt(1, 2), receipt(0, 2)], txn="x", world=2, l0=3, base=base)


def test_another_digest_or_start_does_not_apply() -> None:
    base = manifest(part(state="aa"))
    with pytest.raises(DoesNotApply, match=r"table 't'.* bb, the head's is aa"):
        check_receipts([receipt(0, 1, 3, part(base="bb"))], txn="x", world=1, l0=3, base=base)
    with pytest.raises(DoesNotApply, match="rank 1 staged a delta from checkpoint 2"):
        check_receipts([receipt(0, 2), receipt(1, 2, 2)], txn="x", world=2, l0=3, base=base)
    # A resized table starts at the same row and is compared all the same.
    with pytest.raises(DoesNotApply):
        check_receipts([receipt(0, 1, 3, part(base="bb", rows=(0, 9)))], txn="x", world=1, l0=3, base=base)


def test_receipts_of_another_transaction_are_refused() -> None:
    with pytest.raises(BadInput, match="is of transaction x with 1 ranks, expected y with 1"):
        check_receipts([receipt(0, 1)], txn="y", world=1, l0=3, base=None)
    with pytest.raises(BadInput, match="is of transaction x with 3 ranks, expected x with 2"):
        check_receipts([receipt(0, 2), receipt(1, 3)], txn="x", world=2, l0=3, base=None)


@pytest.mark.parametrize("ranks", [[0], [0, 0], [1, 2], [0, 1, 2]])
def test_every_writer_must_be_there_once(ranks: list[int]) -> None:
    with pytest.raises(BadInput, match="receipts of ranks"):
        check_receipts([receipt(rank, 2) for rank in ranks], txn="x", world=2, l0=3, base=None)


def test_parts_that_are_cut_anew_must_add_up_even_beside_some_that_are_not() -> None:
    """A part that nobody had cut so before was not looked at, if another part of the table was cut as before."""
    ends = manifest(part(state="03", rows=(0, 4)), part(state="05", rows=(4, 8)))

    def starts(*digests: str) -> list[Receipt]:
        rows = [(0, 4), (4, 6), (6, 8)]
        parts = [part(base=digest, rows=range_) for digest, range_ in zip(digests, rows, strict=True)]
        return [receipt(0, 2, 3, parts[0], parts[1]), receipt(1, 2, 3, parts[2])]

    check_receipts(starts("03", "01", "04"), txn="x", world=2, l0=3, base=ends)
    for wrong in (("03", "02", "04"), ("04", "01", "03")):
        with pytest.raises(DoesNotApply):
            check_receipts(starts(*wrong), txn="x", world=2, l0=3, base=ends)
