"""How far two states of a table are apart: changed rows and norms, window by window."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.widths import to_float32
from cnr_store.read.snapshot import Snapshot
from cnr_store.read.table_view import TableView
from cnr_store.types import RowIds

WINDOW_BYTES = 16 * 1024 * 1024
"""Bytes of rows of one state that are compared at once, as float32. Hashed tables are read whole."""

Values = npt.NDArray[np.float32]
_Window = tuple[RowIds, Values]


@dataclass(frozen=True, slots=True)
class TableDifference:
    """How a table differs between two states. Slots are not compared.

    Attributes
    ----------
    rows_before, rows_after
        Number of rows; 0 where a state lacks the table.
    changed, added, removed
        Rows in both states with other values, and rows in one of them.
    norm_before, norm_after, norm_difference, largest_difference
        Euclidean norms of all values, and of the differences of rows in both states; the largest absolute difference.
    """

    table: str
    rows_before: int
    rows_after: int
    changed: int
    added: int
    removed: int
    norm_before: float
    norm_after: float
    norm_difference: float
    largest_difference: float


def compare_tables(before: Snapshot, after: Snapshot) -> tuple[TableDifference, ...]:
    """Return the differences of all tables of either state, by name. Blocks; reads both whole, in windows.

    Raises
    ------
    CorruptStore, AccessDenied, StorageFailure
    """
    names = sorted(before.tables.keys() | after.tables.keys())
    return tuple(_compared(name, _view(before, name), _view(after, name)) for name in names)


def _view(snapshot: Snapshot, name: str) -> TableView | None:
    return snapshot.table(name) if name in snapshot.tables else None


def _compared(name: str, before: TableView | None, after: TableView | None) -> TableDifference:
    is_alike = before is None or after is None or _kind(before) == _kind(after)
    dim = max(view.shape[1] for view in (before, after) if view is not None)
    rows, counts, squares, largest = [0, 0], [0, 0, 0], [0.0, 0.0, 0.0], 0.0
    for (ids_before, values_before), (ids_after, values_after) in zip(
        *_aligned(before, after, max(1, WINDOW_BYTES // (4 * dim))), strict=True
    ):
        rows[0] += len(ids_before)
        rows[1] += len(ids_after)
        squares[0] += _square(values_before)
        squares[1] += _square(values_after)
        _, here, there = np.intersect1d(ids_before, ids_after, assume_unique=True, return_indices=True)
        if not is_alike:
            here = there = here[:0]
        counts[1] += len(ids_after) - len(there)
        counts[2] += len(ids_before) - len(here)
        left, right = values_before[here], values_after[there]
        counts[0] += int((left.view(np.uint32) != right.view(np.uint32)).any(axis=1).sum()) if len(here) else 0
        apart = right.astype(np.float64) - left
        squares[2] += _square(apart)
        largest = max(largest, float(np.abs(apart).max(initial=0.0)))
    return TableDifference(
        table=name, rows_before=rows[0], rows_after=rows[1], changed=counts[0], added=counts[1], removed=counts[2],
        norm_before=math.sqrt(squares[0]), norm_after=math.sqrt(squares[1]), norm_difference=math.sqrt(squares[2]),
        largest_difference=largest,
    )  # fmt: skip


def _kind(view: TableView) -> tuple[str, int]:
    return view.schema.keys, view.shape[1]


def _aligned(
    before: TableView | None, after: TableView | None, step: int
) -> tuple[Iterator[_Window], Iterator[_Window]]:
    """Return the windows of both states, over the same rows."""
    views = [view for view in (before, after) if view is not None]
    is_whole = any(view.schema.keys == "hashed" for view in views)
    stop = 1 if is_whole else max(view.shape[0] for view in views)
    step = max(stop, 1) if is_whole else step
    return _windows(before, stop, step, views[0].shape[1]), _windows(after, stop, step, views[-1].shape[1])


def _windows(view: TableView | None, stop: int, step: int, dim: int) -> Iterator[_Window]:
    for start in range(0, stop, step):
        if view is None:
            yield np.empty(0, np.int64), np.empty((0, dim), np.float32)
        elif view.schema.keys == "hashed":
            keys, arrays = view.read_all()
            yield keys, to_float32(arrays["values"], view.schema.dtype)
        else:
            # Beside a hashed table of the other state there is one window, which has all rows.
            last = view.shape[0] if step == stop else min(start + step, view.shape[0])
            first = min(start, last)
            yield np.arange(first, last, dtype=np.int64), to_float32(view.read(first, last), view.schema.dtype)


def _square(values: npt.NDArray[np.float32] | npt.NDArray[np.float64]) -> float:
    return float(np.square(values, dtype=np.float64).sum())
