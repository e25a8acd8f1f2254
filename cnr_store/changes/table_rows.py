"""Reads one table of a snapshot by windows of row ids or by lists of rows, for dense and hashed tables alike.

Windows bound the memory: windows of row ids, because a chunk of a sparse list spans many rows, and of bytes of values.
Nothing is cached between reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from cnr_store.changes.arrow import RowBlock
from cnr_store.encodings.widths import carrier
from cnr_store.read.changed_rows import ALL_ROWS, Window
from cnr_store.read.plan import TablePlan, filtered, plan_table
from cnr_store.read.replay import matching
from cnr_store.read.snapshot import Snapshot
from cnr_store.read.table_reader import read_keyed, read_range, read_rows
from cnr_store.runtime.threads import blocks
from cnr_store.segment.codes import Array, array_specs
from cnr_store.types import RowIds, SlotsRule

WINDOW_BYTES = 32 * 1024 * 1024
"""Bytes of values that are read at once, about; a window of a hashed table is at least a chunk."""

LEAST_ROWS = 1024
"""Minimum number of rows that are read at once."""

Span = tuple[int, int, int]
"""First and last row id (inclusive, because 2**63 is no int64), and the number of rows between them."""


def plan_windows(spans: Iterable[Span], most_rows: int) -> list[Window]:
    """Return windows, in order and without gaps, of about ``most_rows`` rows of the spans each. Pure.

    The first begins with the smallest int64 and the last ends with the largest, so that every row is in one.

    >>> plan_windows([(0, 9, 10), (10, 19, 10), (5, 25, 3)], 10)[1:]
    [(10, 19), (20, 9223372036854775807)]
    """
    windows: list[Window] = []
    (first, end), count = ALL_ROWS, 0
    for _, last, rows in sorted(spans, key=lambda span: span[1]):
        count += rows
        if count >= most_rows and last >= first:
            windows.append((first, last))
            first, count = last + 1, 0
    if first <= end:
        windows.append((first, end))
    return windows


def rows_of(window: Window, num_rows: int) -> tuple[int, int]:
    """Return the rows [start, stop) of a dense table of ``num_rows`` that are in the window. Pure."""
    start = min(max(window[0], 0), num_rows)
    return start, max(start, min(window[1] + 1, num_rows))


class TableRows:
    """Rows of a table as of a snapshot, in the arrays ``names`` (``codes``, ``slots/<name>``). Reads block."""

    def __init__(self, snapshot: Snapshot, table: str, names: Sequence[str], slots_rule: SlotsRule = "exact") -> None:
        self.table = table
        self.schema = snapshot.tables[table]
        self._snapshot = snapshot
        self._names = tuple(names)
        self._slots_rule = slots_rule
        self._specs = array_specs(self.schema)

    @property
    def most_rows(self) -> int:
        """Rows that are read at once."""
        row_bytes = sum(self._specs[name].width * carrier(self._specs[name].dtype).itemsize for name in self._names)
        return max(LEAST_ROWS, WINDOW_BYTES // max(8, row_bytes))

    def spans(self) -> list[Span]:
        """Return where the rows are, for `plan_windows`; no I/O."""
        if self.schema.keys == "dense":
            return [(a, b - 1, b - a) for a, b in blocks(self.schema.num_rows, self.most_rows)]
        return [(step.first, step.last, step.num_rows) for batch in self._plan().batches for step in batch.steps]

    def read_window(self, window: Window) -> RowBlock:
        """Return the rows of a window that the table has."""
        if self.schema.keys == "dense":
            start, stop = rows_of(window, self.schema.num_rows)
            return RowBlock(np.arange(start, stop, dtype=np.int64), self._read_range(start, stop))
        steps_in = filtered(self._plan(), lambda step: step.last >= window[0] and step.first <= window[1])
        snapshot = self._snapshot
        keys, arrays = read_keyed(
            snapshot.readers, steps_in, self._names, snapshot.workers,
            holds=lambda keys: (keys >= window[0]) & (keys <= window[1]),
        )  # fmt: skip
        return RowBlock(keys, arrays)

    def read(self, rows: RowIds, *, since: int = 0) -> RowBlock:
        """Return the given rows (sorted, unique), with those marked that the table does not have.

        ``since`` is the place in the chain of the first segment that matters: all rows are ``set``, deleted or exact
        from there on, so that nothing before it is read.
        """
        if self.schema.keys == "hashed":
            return self._read_keys(rows, since)
        inside = int(np.searchsorted(rows, self.schema.num_rows))
        wanted = rows[:inside]
        # A few rows come through the cache even where they are neighbours; long runs would push out what others need.
        is_range = len(wanted) > LEAST_ROWS and int(wanted[-1] - wanted[0]) + 1 == len(wanted)
        if is_range and not since:
            found = self._read_range(int(wanted[0]), int(wanted[-1]) + 1)
        else:
            found = self._empty(len(wanted))
            plan = _since(plan_table(self._snapshot.manifests, self.table, rows=wanted), since)
            if len(wanted):
                readers = self._snapshot.lookup_readers
                read_rows(readers, plan, wanted, found, self._snapshot.workers, self._slots_rule)
        if inside == len(rows):
            return RowBlock(rows, found)
        arrays = self._empty(len(rows))
        for name, array in found.items():
            arrays[name][:inside] = array
        return RowBlock(rows, arrays, np.arange(len(rows)) < inside)

    def _read_keys(self, rows: RowIds, since: int) -> RowBlock:
        arrays = self._empty(len(rows))
        is_present = np.zeros(len(rows), np.bool_)
        plan = _since(plan_table(self._snapshot.manifests, self.table, rows=rows), since)
        readers, workers = self._snapshot.lookup_readers, self._snapshot.workers
        keys, found = read_keyed(readers, plan, self._names, workers, rows)
        at, places = matching(rows, keys)
        is_present[at] = True
        for name, array in found.items():
            arrays[name][at] = array[places]
        return RowBlock(rows, arrays, is_present)

    def _read_range(self, start: int, stop: int) -> dict[str, Array]:
        outputs = self._empty(stop - start)
        if stop > start and outputs:
            plan = plan_table(self._snapshot.manifests, self.table, start, stop)
            read_range(self._snapshot.readers, plan, outputs, self._snapshot.workers, self._slots_rule)
        return outputs

    def _empty(self, count: int) -> dict[str, Array]:
        return {
            name: np.zeros((count, self._specs[name].width), carrier(self._specs[name].dtype)) for name in self._names
        }

    def _plan(self) -> TablePlan:
        return plan_table(self._snapshot.manifests, self.table)


def _since(plan: TablePlan, segment: int) -> TablePlan:
    """Return the plan from a segment on; rows that are not listed there are absent."""
    if not segment:
        return plan
    batches = tuple(batch for batch in plan.batches if batch.segment >= segment)
    return replace(plan, batches=batches, tracks_status=True)


def merged(left: RowBlock, right: RowBlock) -> RowBlock:
    """Return the rows of two blocks of the same arrays that share none, in order. Pure."""
    rows = np.concatenate([left.rows, right.rows])
    order = np.argsort(rows, kind="stable")
    arrays = {name: np.concatenate([left.arrays[name], right.arrays[name]])[order] for name in left.arrays}
    present = [np.ones(len(one.rows), np.bool_) if one.is_present is None else one.is_present for one in (left, right)]
    return RowBlock(rows[order], arrays, np.concatenate(present)[order])
