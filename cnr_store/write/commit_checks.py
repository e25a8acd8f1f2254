"""The chain of a commit, and checks that its receipts apply to the state that they name. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from operator import attrgetter

from cnr_store.errors import BadInput, DoesNotApply
from cnr_store.format.records import ChainEntry, CommitRecord, Manifest, PartPlace, Receipt, TableSchema
from cnr_store.segment.shards import check_placements, column_cuts
from cnr_store.types import MAX_CHAIN, Rectangle


def next_chain(head: CommitRecord, entry: ChainEntry, *, keep: int) -> tuple[ChainEntry, ...]:
    """Return the chain of a commit: ``entry`` alone if it is a baseline, else after the first ``keep`` segments.

    Raises
    ------
    BadInput
        If the chain would exceed its cap.
    """
    chain = (entry,) if entry.kind == "baseline" else (*head.chain[:keep], entry)
    if len(chain) > MAX_CHAIN:
        raise BadInput(f"a chain holds at most {MAX_CHAIN} segments; commit a baseline", expected=MAX_CHAIN)
    return chain


def check_receipts(receipts: Sequence[Receipt], *, txn: str, world: int, l0: int, base: Manifest | None) -> None:
    """Refuse receipts that do not start from the state the commit builds on (design, section 4, rules 1 and 2).

    Every writer must be there and name the same ``l0``. Where a part is cut as a part of the base is, it must name the
    state digest which that one ended with; where a table is cut anew, the digests of its parts must add up to those of
    the base's parts (digests of disjoint rectangles add up).

    Raises
    ------
    DoesNotApply
        A mirror that is not the head's: the writer must restore first, or commit a baseline.
    BadInput
        A receipt is missing.
    """
    ranks = sorted(receipt.rank for receipt in receipts)
    if ranks != list(range(world)):
        raise BadInput(f"receipts of ranks {ranks} are there, expected {world} ranks", expected=world, found=ranks)
    for receipt in receipts:
        if (receipt.txn, receipt.world) != (txn, world):
            raise BadInput(
                f"the receipt of rank {receipt.rank} is of transaction {receipt.txn} with {receipt.world} ranks, "
                f"expected {txn} with {world}",
                expected=txn, found=receipt.txn,
            )  # fmt: skip
        if receipt.l0 != l0:
            raise DoesNotApply(
                f"rank {receipt.rank} staged a delta from checkpoint {receipt.l0}, the commit is on {l0}: restore",
                expected=l0, found=receipt.l0,
            )  # fmt: skip
    if base is not None:
        _check_digests(receipts, base)


def _check_digests(receipts: Sequence[Receipt], base: Manifest) -> None:
    times, before_of = _times(receipts), base.parts_of
    starts: dict[str, list[tuple[int, PartPlace]]] = {}
    for receipt in receipts:
        for start in receipt.parts:
            ends = before_of.get(start.table, ())
            if times[start.table] == len(ends) == 1 and start.base_digest == ends[0].state_digest:
                continue  # nearly all tables
            starts.setdefault(start.table, []).append((receipt.rank, start))
    for table, parts in starts.items():
        ends = before_of.get(table, ())
        mine = {Rectangle(one.rows, one.columns): (rank, one) for rank, one in parts}
        wanted = {Rectangle(one.rows, one.columns): one for one in ends}
        if len(mine) < len(parts) or len(wanted) < len(ends):
            pairs = []  # several writers of hashed keys, whose parts have no rows of their own
        elif len(mine) == len(wanted) == 1:  # a table in one part, which may have been resized
            pairs = [(next(iter(mine.values())), next(iter(wanted.values())))]
        elif 1 in (len(mine), len(wanted)):
            pairs = []  # cut to the size of a part, the one part starts from the rows of all parts all the same
        else:
            pairs = [(mine[rectangle], wanted[rectangle]) for rectangle in mine.keys() & wanted.keys()]
        for (rank, part), before in pairs:
            if None not in (part.base_digest, before.state_digest) and part.base_digest != before.state_digest:
                raise _another_state(table, f"rank {rank}", before.state_digest, part.base_digest)
        if mine and wanted and len(pairs) < max(len(mine), len(wanted)):
            found = _sum_of([part.base_digest for _, part in parts])
            expected = _sum_of([part.state_digest for part in ends])
            if found is not None and expected is not None and found != expected:
                raise _another_state(table, "ranks together", expected, found)


def _sum_of(digests: Sequence[str | None]) -> str | None:
    if any(digest is None for digest in digests):
        return None
    return f"{sum(int(digest or '0', 16) for digest in digests) % (1 << 64):016x}"


def _another_state(table: str, who: str, expected: str | None, found: str | None) -> DoesNotApply:
    return DoesNotApply(
        f"the mirror of table {table!r} ({who}) starts from state digest {found}, the head's is {expected}; restore "
        "first, or commit a baseline",
        table=table, expected=expected, found=found,
    )  # fmt: skip


def check_coverage(receipts: Sequence[Receipt], tables: Mapping[str, TableSchema]) -> None:
    """Refuse receipts whose parts do not tile every table: a shard without a changed row has a part all the same.

    Raises
    ------
    BadInput
        Naming the table that a rank did not write, or that two ranks wrote.
    """
    times = _times(receipts)
    whole: set[str] = set()
    parts: list[dict[str, list[Rectangle]]] = []
    for receipt in sorted(receipts, key=lambda receipt: receipt.rank):
        mine: dict[str, list[Rectangle]] = {}
        for part in receipt.parts:
            found = tables.get(part.table)
            if found and times[part.table] == 1 and (part.rows, part.columns) == ((0, found.num_rows), (0, found.dim)):
                whole.add(part.table)  # nearly all tables
            else:
                mine.setdefault(part.table, []).append(Rectangle(part.rows, part.columns))
        parts.append(mine)
    shapes = check_placements(parts)
    cuts = column_cuts(parts)
    for table, schema in tables.items():
        if table in whole:
            continue
        if any(slot.kind == "row" for slot in schema.slots.values()):
            _check_cuts(table, cuts.get(table, set()))
        if schema.keys == "dense" and shapes.get(table) != (schema.num_rows, schema.dim):
            raise BadInput(
                f"table {table!r} has {schema.num_rows} rows and {schema.dim} columns, the ranks wrote parts of "
                f"{shapes.get(table)}; a table that no rank holds any more must be dropped",
                table=table, expected=(schema.num_rows, schema.dim), found=shapes.get(table),
            )  # fmt: skip


def _times(receipts: Sequence[Receipt]) -> Counter[str]:
    """How many parts each table has."""
    return Counter(chain.from_iterable(map(attrgetter("table"), receipt.parts) for receipt in receipts))


def _check_cuts(table: str, ranges: set[tuple[int, int]]) -> None:
    """A one-dimensional slot has a value per column range: ranges that overlap would leave rows without one."""
    for a, b in pairwise(sorted(ranges)):
        if b[0] < a[1]:
            raise BadInput(
                f"table {table!r} has one-dimensional slots, and is cut at columns {a} in some rows, at {b} in others; "
                "give all rows the same column shards",
                table=table, found=(a, b),
            )  # fmt: skip
