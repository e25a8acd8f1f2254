"""Looks rows of many tables up by one compiled call.

Why this module exists: a model looks a few rows of hundreds of tables up at once. To check ids, allocate an array and
call a kernel for each takes longer than to copy its rows. Here the ids of all tables lie end to end, tables that are
served in the same form have one array, and a kernel finds and copies all rows. `lookups.lookup_in` is the definition:
what is wrong is left to it, so it raises the errors, and tables in other forms are.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from cnr_store.runtime.addresses import address_of, int64s_at, uint8s_at
from cnr_store.runtime.fences import AHEAD, prefetch
from cnr_store.runtime.jit import njit
from cnr_store.runtime.key_index import find_keys
from cnr_store.segment.codes import ABSENT, Array
from cnr_store.serving.rows.served_table import Lines, RowKind, ServedTable, lines_of
from cnr_store.serving.rows.views import View

LEAST_TABLES = 4
"""Fewer are looked up one by one."""


@njit(nogil=True)
def copy_rows(lines: Lines, counts: Any, ids: Any, places: Any, out: Any) -> int:
    """Copy rows of many tables, those of the overlay before those of the base.

    Parameters
    ----------
    counts
        int64 (n,): how many of ``ids``, which lie end to end, are of each table.
    ids, places
        int64; ``places`` is overwritten.
    out
        int64 (n,): the address where the rows of each table go.

    Returns
    -------
    int
        -1, or the first table with an id outside its rows; nothing is copied then.
    """
    at = 0
    for k in range(len(lines)):
        base, first, stop, row_bytes, fill = lines[k, 0], lines[k, 1], lines[k, 2], lines[k, 3], lines[k, 4]
        high = at + counts[k]
        for i in range(at, high):
            if ids[i] < first or ids[i] >= stop:
                return k
        if lines[k, 9] > 0:
            find_keys(carray(int64s_at(lines[k, 8]), (lines[k, 9], 2)), ids[at:high], places[at:high])
        for i in range(at, high):
            # As in `put_overlay_places`: not beyond the overlay, which may be rewritten meanwhile.
            if lines[k, 9] > 0 and places[i] >= 0 and places[i] < lines[k, 10]:
                position = places[i]
                is_absent = carray(uint8s_at(lines[k, 7] + position), (1,))[0] == ABSENT
                places[i] = fill if is_absent else lines[k, 6] + position * row_bytes
            else:
                places[i] = base + (ids[i] - first) * row_bytes
        at = high
    at = 0
    for k in range(len(lines)):
        row_bytes = lines[k, 3]
        into = out[k]
        for i in range(at, at + counts[k]):
            if i + AHEAD < len(places):
                prefetch(carray(uint8s_at(places[i + AHEAD]), (1, 1)), 0)
            if row_bytes % 8 == 0:
                words = row_bytes // 8
                row, copy = carray(int64s_at(places[i]), (words,)), carray(int64s_at(into), (words,))
                for j in range(words):
                    copy[j] = row[j]
            else:
                some, other = carray(uint8s_at(places[i]), (row_bytes,)), carray(uint8s_at(into), (row_bytes,))
                for j in range(row_bytes):
                    other[j] = some[j]
            into += row_bytes
        at += counts[k]
    return -1


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """Tables whose rows have one width and dtype: their positions among the lines, and their names."""

    width: int
    dtype: np.dtype[Any]
    at: npt.NDArray[np.int64]
    names: Sequence[str]


class JoinedLookups:
    """Rows of some tables of one view. Made for the tables of a lookup, and good for later ones of the same tables."""

    def __init__(self, view: View, tables: Sequence[str]) -> None:
        self._view = weakref.ref(view)
        self._tables = tables
        found = [(name, view.tables[name]) for name in tables if name in view.tables]
        joined = [(name, table) for name, table in found if _is_plain(table)]
        self._names = [name for name, _ in joined]
        self._lines = lines_of(table for _, table in joined)
        kinds: dict[tuple[int, np.dtype[Any]], list[int]] = {}
        for at, (_, table) in enumerate(joined):
            kinds.setdefault(_form_of(table.base.kind), []).append(at)
        self._forms = [
            _Form(width, dtype, np.array(at, np.int64), [self._names[k] for k in at])
            for (width, dtype), at in kinds.items()
        ]

    def are_of(self, view: View, tables: Sequence[str]) -> bool:
        """Whether they were made for just these."""
        return self._view() is view and self._tables == tables

    def read(self, ids: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Return the rows of those tables that can be read together, as `lookups.lookup_in` does.

        Nothing where ids are not int64 and of one dimension, or not all in their tables. The arrays of tables that
        are served in one form are pieces of one.
        """
        given: list[Any] = [*map(ids.__getitem__, self._names)]
        try:
            joined = np.concatenate(given, dtype=np.int64, casting="no")
        except (TypeError, ValueError):  # there are none, or some are none
            return {}
        if joined.ndim != 1:
            return {}
        counts = np.fromiter(map(len, given), np.int64, len(given))
        rows: dict[str, Array] = {}
        out = np.empty(len(counts), np.int64)
        for form in self._forms:
            ends = np.cumsum(counts[form.at])
            starts = ends - counts[form.at]
            memory = np.empty((int(ends[-1]), form.width), form.dtype)
            out[form.at] = address_of(memory.view(np.uint8)) + starts * (form.width * form.dtype.itemsize)
            pieces = map(memory.__getitem__, map(slice, starts.tolist(), ends.tolist()))
            rows.update(zip(form.names, pieces, strict=True))
        outside = copy_rows(self._lines, counts, joined, np.empty(len(joined), np.int64), out)
        return {} if outside >= 0 else rows


def _is_plain(table: ServedTable) -> bool:
    return table.base.index is None and table.base.kind.kept_as == "values"


def _form_of(kind: RowKind) -> tuple[int, np.dtype[Any]]:
    return kind.served_width, kind.served_dtype
