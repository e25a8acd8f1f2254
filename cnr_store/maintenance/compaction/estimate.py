"""Estimates how many bytes a run merges to, from its manifests and row ids; reads no values.

A row that several deltas have becomes one. What a row costs is taken from the segments of the run: a row of a delta
from its deltas, where a sum of k differences has about log2(k) / 2 bits more than one; a row of a baseline from the old
baseline, and if deltas changed it from whichever costs more. So a slot that was constant in the old baseline, and
therefore cost nothing, is counted as what it costs since it varies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cnr_store.format.records import OPERATIONS, Manifest, RowListEntry, TableSchema
from cnr_store.format.sizes import array_bytes, segment_sizes
from cnr_store.maintenance.compaction.plan import Run
from cnr_store.read.changed_rows import change_since
from cnr_store.runtime.threads import Workers
from cnr_store.segment.reader import SegmentReader

_WINDOW_ROWS = 1 << 24
"""Row ids of a dense table that are counted at once: at most 128 MiB of them."""


def estimate_bytes(readers: Sequence[SegmentReader], run: Run, workers: Workers) -> int:
    """Return about how many bytes the merged segment of a run has. Blocks; reads the row ids of the run's deltas.

    Parameters
    ----------
    readers
        The chain's segments, the baseline first, at least to the end of the run.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject, StorageFailure
    """
    upto = readers[: run.stop]
    manifests = [reader.manifest for reader in upto]
    arrays = [array_bytes(manifest) for manifest in manifests]
    total: float = 0
    for table, schema in manifests[-1].tables.items():
        stored = [_stored(manifest, table, sizes) for manifest, sizes in zip(manifests, arrays, strict=True)]
        before = max(run.start - 1, 0)  # for a baseline: itself
        changed = _count_changed(upto[before:], table, schema, workers)
        deltas = _sum(stored[max(run.start, 1) :])
        if run.start:
            total += changed * (sum(deltas.bytes_per_row().values()) + deltas.sum_bytes(changed))
        else:
            every = schema.num_rows
            if schema.keys == "hashed":
                every = _count_changed([upto[0], *upto], table, schema, workers)
            total += _baseline_bytes(stored[0], deltas, changed, every)
    rest = [segment_sizes(manifest) for manifest in manifests[run.start :]]
    total += sum(max(getattr(sizes, kind) for sizes in rest) for kind in ("dense", "documents", "metadata"))
    return round(total)


_BREAK_BYTES = 4
"""Bytes of a changed row among constant ones, besides its values: the entropy coder stores its position (measured)."""


@dataclass(slots=True)
class _StoredRows:
    """Rows of a table in some segments, the bytes of their arrays by name, and the elements of values in a row."""

    rows: float = 0.0
    sizes: Counter[str] = field(default_factory=Counter)
    width: int = 0

    def sum_bytes(self, distinct: int) -> float:
        """Return how many bytes more the sum of the differences of a row has, if there are as many distinct rows."""
        return self.width * math.log2(max(1.0, self.rows / distinct)) / 16 if distinct else 0.0

    def bytes_per_row(self) -> dict[str, float]:
        return {name: size / self.rows for name, size in self.sizes.items()} if self.rows else {}


def _stored(manifest: Manifest, table: str, sizes: dict[str, int]) -> _StoredRows:
    """Return what a segment has of a table. Arrays that tables share count by rows, parts of columns by their width."""
    found = _StoredRows()
    for part in manifest.parts_of.get(table, ()):
        width = (part.columns[1] - part.columns[0]) / manifest.tables[table].dim
        for operation in OPERATIONS:
            row_list: RowListEntry | None = getattr(part, operation)
            if row_list is not None:
                found.rows += row_list.count * width
                values = sum(math.prod(array.shape[1:]) for name, array in row_list.group.items() if name != "rows")
                found.width = max(found.width, round(values / width))
                for name, array in row_list.arrays.items():
                    found.sizes[name] += round(sizes[array.path] * array.count / array.shape[0])
    return found


def _sum(segments: Sequence[_StoredRows]) -> _StoredRows:
    total = _StoredRows()
    for one in segments:
        total.rows += one.rows
        total.sizes.update(one.sizes)
        total.width = max(total.width, one.width)
    return total


def _baseline_bytes(old: _StoredRows, deltas: _StoredRows, changed: int, rows: int) -> float:
    """Return the bytes of a table in the new baseline. A row id costs what it did: nearly nothing if all are there."""
    first, later = old.bytes_per_row(), deltas.bytes_per_row()
    total = 0.0
    for name in first.keys() | later.keys():
        size, new = first.get(name, 0.0), later.get(name, 0.0)
        if name == "rows" and old.rows:
            new = size
        total += rows * size + changed * max(0.0, new - size)
        if size < new / 8:
            total += changed * (1 - changed / max(rows, 1)) * _BREAK_BYTES
    return total


def _count_changed(readers: Sequence[SegmentReader], table: str, schema: TableSchema, workers: Workers) -> int:
    """Return how many rows of a table the segments after the first one changed."""
    change = change_since(readers, table, schema)
    if schema.keys != "dense":
        return len(change.row_ids(workers)[0])
    starts = range(0, schema.num_rows, _WINDOW_ROWS)
    return sum(len(change.row_ids(workers, (start, start + _WINDOW_ROWS - 1))[0]) for start in starts)
