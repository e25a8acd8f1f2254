"""Which chunks of a chain give a rectangle of a table: decided from manifests alone, before anything is read. Pure.

Several writers may have cut a table's columns, and differently in each save. A row can then be an escape row in
one column range and a coded row in another, so a rectangle is read one elementary column interval at a time: within
one of them every part that has the row has the same columns of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter

import numpy as np

from cnr_store.encodings import digest
from cnr_store.errors import BadInput, CorruptStore, TableNotFound, Unsupported
from cnr_store.format.chain_checks import is_one_life
from cnr_store.format.manifest import recorded_digest
from cnr_store.format.records import OPERATIONS, Manifest, Operation, PartEntry, RowListEntry, TableSchema
from cnr_store.runtime.arguments import some_of
from cnr_store.segment.codes import array_specs
from cnr_store.types import Rectangle, RowIds, SlotsRule

Columns = tuple[int, int]

UNCONFIRMED_BYTES = 256 * 1024 * 1024
"""Most bytes that are allocated for a sparse table without the caller's consent."""

MIN_SPARSE_ROWS, SPARSE_RATIO = 1 << 16, 8
"""A table is sparse if it declares more than MIN_SPARSE_ROWS rows, and more than SPARSE_RATIO times the stored rows."""


@dataclass(frozen=True, slots=True)
class Step:
    """One chunk of one row list: the unit of reading, on its own thread."""

    segment: int
    part: PartEntry
    operation: Operation
    row_list: RowListEntry
    chunk: int
    left_shift: int

    @property
    def first(self) -> int:
        """First row id of the chunk."""
        return self.row_list.first[self.chunk]

    @property
    def last(self) -> int:
        """Last row id of the chunk, inclusive."""
        return self.row_list.last[self.chunk]

    @property
    def num_rows(self) -> int:
        """Rows of the chunk."""
        return self.row_list.rows_in(self.chunk)


@dataclass(frozen=True, slots=True)
class SegmentSteps:
    """The steps of one segment: disjoint elements, any order. ``num_rows`` is the table's size from here on."""

    segment: int
    num_rows: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What to read for rows [start, stop) and columns [columns[0], columns[1]) of a table.

    ``tracks_status`` says whether some row may be absent or escaped; ``parts`` are the last segment's parts, whose
    state digests the result must match where it covers them; ``stored`` are the elementary column intervals that the
    parts of the table's life leave, in order.
    """

    table: str
    schema: TableSchema
    start: int
    stop: int
    columns: Columns
    batches: tuple[SegmentSteps, ...]
    tracks_status: bool
    parts: tuple[PartEntry, ...]
    stored: tuple[Columns, ...]

    @property
    def has_own_row_slots(self) -> bool:
        """Whether one-dimensional slots, if there are any, were saved for just these columns."""
        return self.columns in self.stored

    @property
    def row_slots(self) -> list[str]:
        """The names of the one-dimensional slots."""
        return [name for name, slot in self.schema.slots.items() if slot.kind == "row"]


def plan_table(
    manifests: Sequence[Manifest],
    table: str,
    start: int = 0,
    stop: int | None = None,
    rows: RowIds | None = None,
    columns: Columns | None = None,
) -> TablePlan:
    """Decide which chunks give rows [start, stop) of some columns of a table (or just ``rows`` of them). Pure, no I/O.

    Raises
    ------
    TableNotFound
        If the last manifest does not have the table.
    CorruptStore
        If its scale went back, or its form changed, or one-dimensional slots were cut differently within its life.
    """
    last = manifests[-1]
    if table not in last.tables:
        raise TableNotFound(
            f"no table {table!r} at checkpoint {last.l1}; there are {some_of(last.tables, table)}",
            table=table,
        )
    schema = last.tables[table]
    hashed = schema.keys == "hashed"
    stop = schema.num_rows if stop is None else stop
    columns = columns or (0, schema.dim)
    begin = _first_segment(manifests, table)
    batches, sizes, complete = [], [], True
    cutting: set[Columns] = set()
    for index in range(begin, len(manifests)):
        manifest = manifests[index]
        here = manifest.tables[table]
        parts = manifest.parts_of.get(table, ())
        cutting.update(part.columns for part in parts if part.rows[0] < part.rows[1])
        if not hashed:
            parts = tuple(part for part in parts if _meets(part.rows, (start, stop)) and _meets(part.columns, columns))
        shift = schema.shift - here.shift
        if shift < 0:
            raise CorruptStore(f"table {table!r}: shift goes back from {here.shift} to {schema.shift}", table=table)
        # A check replays chains that contradict themselves too, and no kernel looks whether codes have its widths.
        if here is not schema and not is_one_life(here, schema):
            raise CorruptStore(
                f"table {table!r} changes its shape, encoding or slots within generation {schema.generation}; run "
                "`cnr verify`",
                table=table,
            )
        steps = [
            Step(index, part, operation, row_list, chunk, shift)
            for part in parts
            for operation in OPERATIONS
            if (row_list := getattr(part, operation)) is not None
            for chunk in range(len(row_list.first))
        ]
        complete = complete and not any(part.delete or part.escape for part in parts)
        sizes.append(here.num_rows)
        if index == begin:
            full = [part for part in parts if part.set and part.set.count == part.rows[1] - part.rows[0]]
            covered = sum(_overlap(part.rows, (start, stop)) * _overlap(part.columns, columns) for part in full)
            complete = complete and covered == (stop - start) * (columns[1] - columns[0])
        if not hashed:
            steps = [step for step in steps if step.last >= start and step.first < stop]
        if rows is not None:
            steps = [step for step in steps if _may_hold(step, rows)]
        batches.append(SegmentSteps(index, here.num_rows, tuple(steps)))
    tracks = hashed or not complete or len(set(sizes)) > 1
    ends = last.parts_of.get(table, ())
    stored = ((0, schema.dim),) if hashed else _intervals(table, schema, cutting)
    return TablePlan(table, schema, start, stop, columns, tuple(batches), tracks, ends, stored)


def stored_rows(plan: TablePlan) -> int:
    """Return how many rows the chunks of the plan hold, each as often as a chunk has it. Pure."""
    return sum(step.num_rows for batch in plan.batches for step in batch.steps)


def is_sparse(plan: TablePlan) -> bool:
    """Return whether by far most of the plan's rows are in no chunk. Pure."""
    return plan.stop - plan.start > max(MIN_SPARSE_ROWS, SPARSE_RATIO * stored_rows(plan))


def check_stored(plan: TablePlan, size_bytes: int, consent: str) -> None:
    """Refuse to allocate much memory for a sparse table unless the caller consented.

    Any store can declare any number of rows, in a few bytes. Pure.

    Parameters
    ----------
    size_bytes
        What would be taken for the plan's rows; up to `UNCONFIRMED_BYTES` nothing is asked.
    consent
        How the caller can consent, for the message.

    Raises
    ------
    BadInput
    """
    if size_bytes > UNCONFIRMED_BYTES and is_sparse(plan):
        raise BadInput(
            f"rows [{plan.start}, {plan.stop}) of table {plan.table!r} take {size_bytes} bytes, and the store has "
            f"{stored_rows(plan)} of them, the others are fill; if that is meant, {consent}",
            table=plan.table, expected=UNCONFIRMED_BYTES, found=size_bytes,
        )  # fmt: skip


def by_columns(plan: TablePlan) -> tuple[TablePlan, ...]:
    """Return the plan of each elementary column interval, in order; the plan itself where there is one. Pure."""
    low, high = plan.columns
    begin, end = bisect_right(plan.stored, low, key=_stop), bisect_left(plan.stored, high, key=_start)
    pieces = [(max(a, low), min(b, high)) for a, b in plan.stored[begin:end]]
    if len(pieces) == 1:
        return (plan,)
    batches: list[list[SegmentSteps]] = [[] for _ in pieces]
    for batch in plan.batches:
        steps: list[list[Step]] = [[] for _ in pieces]
        for step in batch.steps:
            left, right = step.part.columns
            for k in range(bisect_right(pieces, left, key=_stop), bisect_left(pieces, right, key=_start)):
                steps[k].append(step)
        for k, own in enumerate(steps):
            batches[k].append(replace(batch, steps=tuple(own)))
    return tuple(replace(plan, columns=piece, batches=tuple(own)) for piece, own in zip(pieces, batches, strict=True))


def clip(plan: TablePlan, start: int, stop: int) -> TablePlan:
    """Return the plan of fewer rows. Pure."""
    return replace(filtered(plan, lambda step: step.last >= start and step.first < stop), start=start, stop=stop)


def holding(plan: TablePlan, rows: RowIds) -> TablePlan:
    """Return the plan of the chunks that may hold one of ``rows`` (sorted). Pure."""
    return filtered(plan, lambda step: _may_hold(step, rows))


def check_row_slots(plan: TablePlan, names: Iterable[str], rule: SlotsRule) -> list[str]:
    """Return those of the arrays ``names`` that are read under ``rule``. Pure.

    Raises
    ------
    Unsupported
        One-dimensional slots of columns that were not saved together, and the rule is ``exact``.
    """
    vectors = {f"slots/{slot}" for slot in plan.row_slots}
    lost = [] if plan.has_own_row_slots else [name for name in names if name in vectors]
    if lost and rule == "exact":
        slot = lost[0].removeprefix("slots/")
        raise Unsupported(
            f"slot {slot!r} of table {plan.table!r} has one value per row and column range, stored for columns "
            f"{list(plan.stored)}; columns {plan.columns} are none of them: read those, or pass "
            "slots_rule='mean' or 'drop'",
            table=plan.table, expected=plan.stored, found=plan.columns,
        )  # fmt: skip
    return [name for name in names if rule != "drop" or name not in lost]


def expected_digest(plan: TablePlan, names: set[str]) -> int | None:
    """Return the state digest that the plan's rectangle must have, or None when it cannot be known. Pure.

    It is known when the rectangle is a union of whole parts that state one and ``names`` holds every mirrored array.
    """
    specs = array_specs(plan.schema)
    if not specs.are_additive or not names.issuperset(specs):
        return None
    return recorded_digest(plan.parts, Rectangle((plan.start, plan.stop), plan.columns))


def check_digest(plan: TablePlan, found: Sequence[tuple[Columns, int]], names: set[str]) -> None:
    """Compare recomputed state digests of the plan's column intervals with the version's. Pure.

    Raises
    ------
    CorruptStore
        A delta is wrong or missing, or codes are damaged.
    """
    for span, total, wanted in digests_of_whole_parts(plan, found, names):
        compare_digest(span, total, wanted)


def digests_of_whole_parts(
    plan: TablePlan, found: Sequence[tuple[Columns, int]], names: set[str]
) -> Iterator[tuple[TablePlan, int, int]]:
    """Yield what can be compared: the plan of some columns, their digest by ``found``, and that of the version. Pure.

    The digests of neighbouring intervals add up; each span has the fewest that are a union of whole parts.
    """
    parts = [part for part in plan.parts if _meets(part.rows, (plan.start, plan.stop))]
    spans: list[Columns] = []
    for start, stop in sorted([*(part.columns for part in parts), *(columns for columns, _ in found)]):
        if spans and start < spans[-1][1]:  # beside what is in the span already
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    own: list[list[PartEntry]] = [[] for _ in spans]
    for part in parts:
        own[bisect_right(spans, part.columns[0], key=_start) - 1].append(part)
    digests: list[list[int]] = [[] for _ in spans]
    for columns, one in found:
        digests[bisect_right(spans, columns[0], key=_start) - 1].append(one)
    for columns, inside, ours in zip(spans, own, digests, strict=True):
        if ours and plan.columns[0] <= columns[0] and columns[1] <= plan.columns[1]:
            span = replace(plan, columns=columns, parts=tuple(inside))
            wanted = expected_digest(span, names)
            if wanted is not None:
                yield span, digest.add_digests(*ours), wanted


def compare_digest(plan: TablePlan, found: int, wanted: int) -> None:
    """Refuse a recomputed state digest that is not the version's. Pure. Raises `CorruptStore`."""
    if found != wanted:
        whole = plan.columns == (0, plan.schema.dim)
        where = repr(plan.table) if whole else f"{plan.table!r}, columns {plan.columns},"
        raise CorruptStore(
            f"table {where} decodes to state digest {found:016x}, the version names {wanted:016x}; "
            "a delta is wrong or missing, run `cnr verify`",
            table=plan.table, expected=f"{wanted:016x}", found=f"{found:016x}",
        )  # fmt: skip


def _first_segment(manifests: Sequence[Manifest], table: str) -> int:
    """The segment in which this life of the table begins: after its last absence or change of generation."""
    begin = len(manifests) - 1
    generation = manifests[begin].tables[table].generation
    while begin > 0:
        before = manifests[begin - 1].tables.get(table)
        if before is None or before.generation != generation:
            break
        begin -= 1
    return begin


def _intervals(table: str, schema: TableSchema, ranges: set[Columns]) -> tuple[Columns, ...]:
    """The elementary intervals; ranges that overlap would leave one-dimensional slots without a value."""
    if any(slot.kind == "row" for slot in schema.slots.values()):
        for a, b in pairwise(sorted(ranges)):
            if b[0] < a[1]:
                raise CorruptStore(
                    f"table {table!r} has one-dimensional slots, and its columns are cut at {a} and at {b} within one "
                    "chain; run `cnr verify`",
                    table=table, found=(a, b),
                )  # fmt: skip
    return tuple(pairwise(sorted({0, schema.dim, *(cut for columns in ranges for cut in columns)})))


def filtered(plan: TablePlan, keeps: Callable[[Step], bool]) -> TablePlan:
    """Return a plan with the steps that are kept. Pure."""
    batches = (replace(batch, steps=tuple(step for step in batch.steps if keeps(step))) for batch in plan.batches)
    return replace(plan, batches=tuple(batches))


def _may_hold(step: Step, rows: RowIds) -> bool:
    """Whether one of ``rows`` (sorted) lies in the chunk's range."""
    low, high = np.searchsorted(rows, [step.first, step.last])
    return bool(low < high or (low < len(rows) and rows[low] == step.last))


_start, _stop = itemgetter(0), itemgetter(1)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _meets(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]
