"""Which rows of a table differ between two states, and what they are in the second one.

Decided from manifests where the states have a history in common: then only rows that the segments behind it list can
differ. Compared window by window where they have none, or where the other state is a consumer's own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from cnr_store.changes.arrow import RowBlock
from cnr_store.changes.table_rows import Span, TableRows, Window, merged, plan_windows
from cnr_store.format.records import OPERATIONS, Manifest, Operation, RowListEntry, TableSchema
from cnr_store.read.replay import ChunkReader
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Array
from cnr_store.segment.decoded import Scratch
from cnr_store.types import RowIds

LISTED_ROWS = 1 << 20
"""Row ids taken from lists at once, about."""


@dataclass(frozen=True, slots=True)
class ListedChunk:
    """A chunk of a row list that names rows which may differ.

    Attributes
    ----------
    segment
        The segment's name.
    settles
        Whether what the rows are follows from this segment on alone: they are set, deleted or escaped, whole, in a
        segment of the target.
    """

    segment: str
    operation: Operation
    row_list: RowListEntry
    chunk: int
    settles: bool

    @property
    def span(self) -> Span:
        """First row, last row, and how many."""
        return self.row_list.first[self.chunk], self.row_list.last[self.chunk], self.row_list.rows_in(self.chunk)


@dataclass(frozen=True, slots=True)
class Listed:
    """Only the rows of these chunks, and rows [``start``, ``stop``) that a resize cut off or brought, can differ.

    Attributes
    ----------
    num_rows
        The larger size of the two states: a dense table has no row from there on.
    since
        The place in the target's chain of the first segment behind the common state.
    """

    chunks: tuple[ListedChunk, ...]
    start: int
    stop: int
    num_rows: int
    since: int


@dataclass(frozen=True, slots=True)
class Compared:
    """Any row may differ."""


RowChange = Listed | Compared


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment as the planner sees it."""

    name: str
    manifest: Manifest


def plan_table_change(
    table: str, common: Manifest, old: Sequence[Segment], new: Sequence[Segment], *, since: int
) -> RowChange:
    """Return which rows of a table can differ between two states that go on from a common one. Pure, no I/O.

    Parameters
    ----------
    common
        The manifest of the last common segment.
    old, new
        The segments that each state goes on with; the table is in the last of both.
    since
        How many segments of the target's chain are common.
    """
    life = [common, *(segment.manifest for segment in (*old, *new))]
    schemas = [manifest.tables.get(table) for manifest in life]
    first = schemas[0]
    if first is None or any(schema is None or not _is_one_life(first, schema) for schema in schemas):
        return Compared()
    sizes = [schema.num_rows for schema in schemas if schema is not None]
    before, after = sizes[len(old)], sizes[-1] if new else sizes[0]
    chunks = [chunk for segment in old for chunk in _chunks(segment, table, is_new=False)]
    chunks += [chunk for segment in new for chunk in _chunks(segment, table, is_new=True)]
    least, most = min(sizes), max(before, after)
    return Listed(tuple(chunks), least, most, most, since)


def _is_one_life(first: TableSchema, other: TableSchema) -> bool:
    return (first.generation, first.dim, first.dtype, first.keys) == (
        other.generation, other.dim, other.dtype, other.keys,
    )  # fmt: skip


def _chunks(segment: Segment, table: str, *, is_new: bool) -> Iterator[ListedChunk]:
    dim = segment.manifest.tables[table].dim
    for part in segment.manifest.parts_of.get(table, ()):
        for operation in OPERATIONS:
            row_list: RowListEntry | None = getattr(part, operation)
            settles = is_new and operation != "add" and part.columns == (0, dim)
            for chunk in range(0 if row_list is None else len(row_list.first)):
                assert row_list is not None
                yield ListedChunk(segment.name, operation, row_list, chunk, settles)


def listed_rows(
    after: TableRows, change: Listed, readers: Callable[[str], ChunkReader], workers: Workers
) -> Iterator[RowBlock]:
    """Yield the listed rows as they are in ``after``, in order; those that it does not have are marked.

    Blocks. Memory: the ids of a window, and the values of `TableRows.most_rows` rows.
    """
    spans = [chunk.span for chunk in change.chunks]
    spans += [
        (start, min(start + LISTED_ROWS, change.stop) - 1, min(LISTED_ROWS, change.stop - start))
        for start in range(change.start, change.stop, LISTED_ROWS)
    ]
    is_dense = after.schema.keys == "dense"
    for window in plan_windows(spans, LISTED_ROWS):
        rows, settled = _ids_in(window, change, readers, workers)
        if is_dense:
            inside = int(np.searchsorted(rows, change.num_rows))
            rows, settled = rows[:inside], settled[:inside]
        for start in range(0, len(rows), after.most_rows):
            piece = slice(start, start + after.most_rows)
            yield _read_settled(after, rows[piece], settled[piece], change.since)


def _ids_in(
    window: Window, change: Listed, readers: Callable[[str], ChunkReader], workers: Workers
) -> tuple[RowIds, Array]:
    """The rows of a window, sorted, and for each whether it is settled by the segments behind the common state."""
    first, last = window
    chunks = [chunk for chunk in change.chunks if chunk.span[0] <= last and chunk.span[1] >= first]

    def read(chunk: ListedChunk) -> RowIds:
        rows = readers(chunk.segment).read_rows(chunk.row_list, chunk.chunk, Scratch())
        return rows[np.searchsorted(rows, first, side="left") : np.searchsorted(rows, last, side="right")]

    found = workers.run(partial(read, chunk) for chunk in chunks)
    resized = np.arange(max(first, change.start), max(min(last + 1, change.stop), max(first, change.start)))
    rows = np.unique(np.concatenate([np.empty(0, np.int64), *found, resized.astype(np.int64)]))
    settled, added = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
    for chunk, ids in zip(chunks, found, strict=True):
        mask = settled if chunk.settles else added if chunk.operation == "add" else None
        if mask is not None:
            mask[np.searchsorted(rows, ids)] = True
    return rows, settled & ~added


def _read_settled(after: TableRows, rows: RowIds, settled: Array, since: int) -> RowBlock:
    """Read rows; of those that later segments settle nothing older is read."""
    if settled.all():
        return after.read(rows, since=since)
    if not settled.any():
        return after.read(rows)
    return merged(after.read(rows[settled], since=since), after.read(rows[~settled]))


class Copy(Protocol):
    """The other state of a table: another snapshot's, or what a consumer holds."""

    def spans(self) -> list[Span]:
        """Where its rows are."""

    def read_window(self, window: Window) -> RowBlock:
        """Its rows in a window; without arrays where none of them can be equal."""


class Nothing:
    """A state without the table."""

    def spans(self) -> list[Span]:
        """There are none."""
        return []

    def read_window(self, window: Window) -> RowBlock:  # noqa: ARG002 - the same for every window
        """No rows."""
        return RowBlock(np.empty(0, np.int64), {})


def compared_rows(before: Copy, after: Copy) -> Iterator[RowBlock]:
    """Yield the rows that differ, by their bits, as they are in ``after``, in order; those that it lacks are marked.

    Blocks. Memory: a window of both.
    """
    spans = [*before.spans(), *after.spans()]
    most = max([1, *(count for _, _, count in spans)])
    for window in plan_windows(spans, most):
        block = _difference(before.read_window(window), after.read_window(window))
        if len(block.rows):
            yield block


def _difference(before: RowBlock, after: RowBlock) -> RowBlock:
    """What is in ``after`` and not the same in ``before``, and the rows that it lacks. Pure."""
    shared_after = np.isin(after.rows, before.rows, assume_unique=True)
    changed = ~shared_after
    lost = before.rows[~np.isin(before.rows, after.rows, assume_unique=True)]
    if before.arrays:
        shared_before = np.isin(before.rows, after.rows, assume_unique=True)
        differs = np.zeros(int(shared_after.sum()), np.bool_)
        for name, array in before.arrays.items():
            differs |= _differ(array[shared_before], after.arrays[name][shared_after])
        changed[shared_after] = differs
    else:
        changed[:] = True
    upserts = after.take(changed)
    if not len(lost):
        return upserts
    absent = {name: np.zeros((len(lost), *array.shape[1:]), array.dtype) for name, array in after.arrays.items()}
    return merged(upserts, RowBlock(lost, absent, np.zeros(len(lost), np.bool_)))


def _differ(left: Array, right: Array) -> Array:
    """Which rows are not the same to the bit."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return np.ones(len(right), np.bool_)
    unsigned = np.dtype(f"u{left.itemsize}")
    different = np.ascontiguousarray(left).view(unsigned) != np.ascontiguousarray(right).view(unsigned)
    return np.asarray(different.any(axis=1))


def are_comparable(before: TableSchema, after: TableSchema) -> bool:
    """Return whether rows of the two tables can be equal at all: same keys, dtype, width and slots. Pure."""
    kinds = [
        (schema.keys, schema.dtype, schema.dim, {name: (slot.kind, slot.dtype) for name, slot in schema.slots.items()})
        for schema in (before, after)
    ]
    return kinds[0] == kinds[1]
