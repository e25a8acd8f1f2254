"""Copies rows out of base tables and overlays, compiled by numba: serial, without the GIL, without allocations per row.

A row's *place* is one int64: a position in the base rows (from 0 on), `ABSENT_PLACE`, or ``-2 - position`` in the
overlay. Rows are copied in the widest unsigned words that divide them (`as_words`), so one kernel serves every dtype.
`gather_reference` of the tests is `gather` in numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.runtime.fences import AHEAD, prefetch
from cnr_store.runtime.jit import njit
from cnr_store.types import RowIds

ABSENT_PLACE = -1
"""The place of a row that is nowhere: it reads as the fill."""

Places = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_ABSENT = 1  # table_codes.ABSENT


def as_words(rows: Array) -> Array:
    """Return a C-contiguous (n, width) array as (n, words) of the widest unsigned integers that divide a row."""
    row_bytes = rows.shape[1] * rows.itemsize
    if row_bytes % 8 == 0:
        return rows.view(np.uint64)
    if row_bytes % 4 == 0:
        return rows.view(np.uint32)
    return rows.view(np.uint16 if row_bytes % 2 == 0 else np.uint8)


@njit(nogil=True)
def gather_range(rows: Array, start: int, ids: RowIds, out: Array) -> int:
    """``out[i] = rows[ids[i] - start]`` in words; return -1, or the index of the first id outside the rows."""
    n, words = out.shape
    size = len(rows)
    for i in range(n):
        if i + AHEAD < n:
            ahead = ids[i + AHEAD] - start
            if ahead >= 0 and ahead < size:
                prefetch(rows, ahead)
        at = ids[i] - start
        if at < 0 or at >= size:
            return i
        for j in range(words):
            out[i, j] = rows[at, j]
    return -1


@njit(nogil=True)
def places_in_range(start: int, stop: int, ids: RowIds, places: Places) -> int:
    """``places[i] = ids[i] - start``; return -1, or the index of the first id outside [start, stop)."""
    for i in range(len(ids)):
        if ids[i] < start or ids[i] >= stop:
            return i
        places[i] = ids[i] - start
    return -1


@njit(nogil=True)
def put_overlay_places(positions: Places, status: npt.NDArray[np.uint8], places: Places) -> None:
    """Set the places of rows of an overlay (``positions`` >= 0 in it), or `ABSENT_PLACE` for absent ones.

    Positions beyond it count as missing: its owner may have rewritten it meanwhile, and then the reader looks again.
    """
    for i in range(len(positions)):
        at = positions[i]
        if at >= 0 and at < len(status):
            places[i] = ABSENT_PLACE if status[at] == _ABSENT else -2 - at


@njit(nogil=True)
def drop_absent(places: Places, status: npt.NDArray[np.uint8]) -> None:
    """Set `ABSENT_PLACE` for base rows (places >= 0) with the status absent."""
    for i in range(len(places)):
        if places[i] >= 0 and status[places[i]] == _ABSENT:
            places[i] = ABSENT_PLACE


@njit(nogil=True)
def gather(base: Array, overlay: Array, fill: Array, places: Places, out: Array) -> int:
    """Copy the row of each place, in words, ``fill`` (words,) for those nowhere; return how many those are."""
    n, words = out.shape
    nowhere = 0
    for i in range(n):
        if i + AHEAD < n:
            ahead = places[i + AHEAD]
            if ahead >= 0:
                prefetch(base, ahead)
            elif ahead < -1:
                prefetch(overlay, -2 - ahead)
        at = places[i]
        if at >= 0:
            for j in range(words):
                out[i, j] = base[at, j]
        elif at == ABSENT_PLACE:
            nowhere += 1
            for j in range(words):
                out[i, j] = fill[j]
        else:
            for j in range(words):
                out[i, j] = overlay[-2 - at, j]
    return nowhere


@njit(nogil=True)
def gather_status(
    base: npt.NDArray[np.uint8], overlay: npt.NDArray[np.uint8], places: Places, out: npt.NDArray[np.uint8]
) -> int:
    """Write each place's status, `ABSENT` for nowhere; return how many are not coded. Empty ``base``: all coded."""
    others = 0
    for i in range(len(places)):
        at = places[i]
        if at >= 0:
            out[i] = base[at] if len(base) > 0 else 0
        elif at == ABSENT_PLACE:
            out[i] = _ABSENT
        else:
            out[i] = overlay[-2 - at]
        others += 1 if out[i] != 0 else 0
    return others


@njit(nogil=True)
def scatter(base: Array, positions: Places, rows: Array) -> None:
    """``base[positions[i]] = rows[i]`` in words, where the position is not negative."""
    n, words = rows.shape
    for i in range(n):
        if i + AHEAD < n and positions[i + AHEAD] >= 0:
            prefetch(base, positions[i + AHEAD])
        at = positions[i]
        if at >= 0:
            for j in range(words):
                base[at, j] = rows[i, j]


@njit(nogil=True)
def clear(array: Array) -> None:
    """Write zeros."""
    array[...] = 0
