"""Merges overlays into the base rows: first allocates, then writes. The caller cares for views that still read them.

`merge_target` allocates all memory and changes nothing that a reader sees; `merge_into` cannot fail. `Merge` does both
for the tables of a view: by one compiled call for those whose rows are found by position and are all coded, and of
which only rows are written; of the others each by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from cnr_store.runtime.addresses import int64s_at, uint8s_at
from cnr_store.runtime.jit import njit
from cnr_store.runtime.key_index import MISSING, KeyIndex
from cnr_store.segment.codes import ABSENT
from cnr_store.serving.rows import gather
from cnr_store.serving.rows.memory import Memory
from cnr_store.serving.rows.served_table import BaseTable, Lines, Overlay, ServedTable, index_capacity, lines_of

GROWTH = 2
"""A table found by key that has no room left for new keys is copied to one with so many times its rows."""

COPY_ROWS = 65_536
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class MergeTarget:
    """Where the rows of an overlay go.

    Attributes
    ----------
    base
        The table as it is after the merge; its arrays are those of the table before, unless it had to grow.
    positions
        int64 (n,): where each row of the overlay goes; `MISSING` for absent rows of a table found by key.
    new
        Positions in the overlay of the keys that come to the index.
    gone
        Keys that leave it.
    """

    base: BaseTable
    positions: gather.Places
    new: npt.NDArray[np.int64]
    gone: npt.NDArray[np.int64]


def merge_target(base: BaseTable, overlay: Overlay, memory: Memory) -> MergeTarget:
    """Return where an overlay's rows go, having taken the memory for it; nothing that is read is written.

    Raises
    ------
    StorageFailure
        There is no memory for more rows or their status.
    """
    if overlay.status.any() and (base.index is None or (overlay.status > ABSENT).any()):
        base = base.with_status(memory)
    if base.index is None:
        base = _with_schema(base, overlay)
        return MergeTarget(base, overlay.ids - base.start if base.start else overlay.ids, _NONE, _NONE)
    positions = base.index.find(overlay.ids)
    is_absent = overlay.status == ABSENT
    new = np.flatnonzero((positions == MISSING) & ~is_absent)
    # Readers of this view find the keys that leave in the overlay, so their rows may be given to others at once.
    spare = np.concatenate([base.spare, positions[(positions != MISSING) & is_absent]])
    fresh = max(0, len(new) - len(spare))
    if base.num_rows + fresh <= len(base.rows) and len(new) > base.index.room:
        base = replace(
            base, index=base.index.grown(index_capacity(base.index.count + len(new)), memory, f"{base.name}.index")
        )
    elif base.num_rows + fresh > len(base.rows):
        base = _grown(base, len(new), memory)
        assert base.index is not None
        positions = base.index.find(overlay.ids)
        spare = positions[(positions != MISSING) & is_absent]
        fresh = max(0, len(new) - len(spare))
    gone = np.flatnonzero((positions != MISSING) & is_absent)
    taken = len(new) - fresh
    positions[new] = np.concatenate([spare[:taken], base.num_rows + np.arange(fresh)])
    positions[gone] = MISSING
    memory.reserve(base.rows, base.num_rows + fresh)
    after = replace(base, schema=overlay.schema, num_rows=base.num_rows + fresh, spare=spare[taken:])
    return MergeTarget(after, positions, new, overlay.ids[gone])


def merge_into(target: MergeTarget, overlay: Overlay) -> None:
    """Write the rows of an overlay where they go. Releases the GIL; takes no memory that could lack."""
    base, positions = target.base, target.positions
    gather.scatter(gather.as_words(base.rows), positions, gather.as_words(overlay.rows))
    if base.index is None and base.status is not None:
        absent = positions[overlay.status == ABSENT]
        if len(absent):
            base.rows[absent] = base.kind.absent_row
    if base.status is not None:
        written = positions >= 0
        base.status[positions[written]] = overlay.status[written]
    if base.index is not None:
        base.index.remove_many(target.gone)
        duplicate = base.index.insert_many(overlay.ids[target.new], positions[target.new])
        assert duplicate < 0, "a key that was not found is not in the index"


def _with_schema(base: BaseTable, overlay: Overlay) -> BaseTable:
    return base if base.schema is overlay.schema else replace(base, schema=overlay.schema)


class Merge:
    """The overlays of tables, about to be merged.

    Attributes
    ----------
    bases
        By table, of those with an overlay: the table as it is after the merge.

    Raises
    ------
    StorageFailure
        As `merge_target`; nothing that is read was written.
    """

    def __init__(self, tables: Iterable[ServedTable], memory: Memory) -> None:
        self.bases: dict[str, BaseTable] = {}
        self._targets: list[tuple[MergeTarget, Overlay]] = []
        plain: list[ServedTable] = []
        others: list[ServedTable] = []
        for table in tables:
            if table.overlay is not None:
                (plain if table.base.index is None and table.base.status is None else others).append(table)
        lines = lines_of(plain)
        are_coded = np.empty(len(lines), np.bool_)
        find_coded(lines, are_coded)
        self._lines = lines[are_coded]
        for table, is_coded in zip(plain, are_coded.tolist(), strict=True):
            if is_coded:
                assert table.overlay is not None
                self.bases[table.base.name] = _with_schema(table.base, table.overlay)
            else:
                others.append(table)
        for table in others:
            assert table.overlay is not None
            target = merge_target(table.base, table.overlay, memory)
            self.bases[table.base.name] = target.base
            self._targets.append((target, table.overlay))

    def write(self) -> None:
        """Write all rows. Releases the GIL; takes no memory that could lack; the tables must still be there."""
        scatter_rows(self._lines)
        for target, overlay in self._targets:
            merge_into(target, overlay)


@njit(nogil=True)
def find_coded(lines: Lines, out: Any) -> None:
    """Write of each overlay whether all its rows are `CODED`: bool (n,)."""
    for k in range(len(lines)):
        status = carray(uint8s_at(lines[k, 7]), (lines[k, 10],))
        out[k] = not status.any()


@njit(nogil=True)
def scatter_rows(lines: Lines) -> None:
    """`gather.scatter` of the rows of overlays, all of them coded, into base rows that are found by position."""
    for k in range(len(lines)):
        row_bytes, stop, count = lines[k, 3], lines[k, 2], lines[k, 10]
        # As if there were rows below the first one, which no id names: so ids are positions.
        base = lines[k, 0] - lines[k, 1] * row_bytes
        ids = carray(int64s_at(lines[k, 5]), (count,))
        if row_bytes % 8 == 0:
            words = row_bytes // 8
            rows = carray(int64s_at(lines[k, 6]), (count, words))
            gather.scatter(carray(int64s_at(base), (stop, words)), ids, rows)
        else:
            some = carray(uint8s_at(lines[k, 6]), (count, row_bytes))
            gather.scatter(carray(uint8s_at(base), (stop, row_bytes)), ids, some)


def _grown(base: BaseTable, new: int, memory: Memory) -> BaseTable:
    """Return a copy with room for ``new`` keys and as many again, its rows close together."""
    assert base.index is not None
    keys, positions = base.index.entries()
    count = len(keys)
    capacity = GROWTH * (count + new)
    rows = memory.allocate(f"{base.name}.rows", (capacity, base.rows.shape[1]), base.rows.dtype, used_rows=count + new)
    for low in range(0, count, COPY_ROWS):
        at = positions[low : low + COPY_ROWS]
        np.take(base.rows, at, axis=0, out=rows[low : low + len(at)])
    index = KeyIndex.allocate(index_capacity(count + new), memory, f"{base.name}.index")
    index.insert_many(keys, np.arange(count, dtype=np.int64))
    larger = replace(base, rows=rows, index=index, num_rows=count, spare=np.empty(0, np.int64), status=None)
    if base.status is not None:
        larger = larger.with_status(memory)
        assert larger.status is not None
        larger.status[:count] = base.status[positions]
    return larger
