"""The rows of a table that differ between two states, with their values in the second one.

If the states have common segments, only the rows of a plan (`cnr_store.read.changed_rows`) are read. Otherwise, and for
a consumer's own copy, both states are compared window by window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from cnr_store.changes.arrow import RowBlock
from cnr_store.changes.table_rows import Span, TableRows, merged, plan_windows
from cnr_store.encodings.widths import to_float32
from cnr_store.format.records import TableSchema
from cnr_store.read.changed_rows import RowChange, Window
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Array
from cnr_store.types import RowIds

LISTED_ROWS = 1 << 20
"""Row ids taken from lists at once, about."""


def listed_rows(after: TableRows, change: RowChange, since: int, workers: Workers) -> Iterator[RowBlock]:
    """Yield the rows of a plan as they are in ``after``, in order; rows that it does not have are marked.

    Blocks. Memory: the ids of a window, and the values of `TableRows.most_rows` rows. ``since`` is the position in the
    target's chain of the first segment after the common one.
    """
    spans = [(*chunk.window, chunk.num_rows) for chunk in change.chunks]
    spans += [
        (start, min(start + LISTED_ROWS, change.stop) - 1, min(LISTED_ROWS, change.stop - start))
        for start in range(change.start, change.stop, LISTED_ROWS)
    ]
    for window in plan_windows(spans, LISTED_ROWS):
        rows, is_final = change.row_ids(workers, window)
        for start in range(0, len(rows), after.most_rows):
            piece = slice(start, start + after.most_rows)
            yield _read_settled(after, rows[piece], is_final[piece], since)


def _read_settled(after: TableRows, rows: RowIds, settled: Array, since: int) -> RowBlock:
    """Read rows; of those that later segments settle nothing older is read."""
    if settled.all():
        return after.read(rows, since=since)
    if not settled.any():
        return after.read(rows)
    return merged(after.read(rows[settled], since=since), after.read(rows[~settled]))


class Copy(Protocol):
    """The other state of a table: another snapshot's, or a consumer's copy."""

    def spans(self) -> list[Span]:
        """Return where its rows are."""

    def read_window(self, window: Window) -> RowBlock:
        """Return its rows in a window; without arrays if none of them can be equal."""


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
    """Which rows differ in any bit. A consumer's bfloat16 (uint16) may be float32, and the other way round."""
    if left.dtype != right.dtype and np.uint16 in (left.dtype, right.dtype):
        left, right = (to_float32(one, "bfloat16") if one.dtype == np.uint16 else one for one in (left, right))
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
