"""Marks listed, and rows copied, of many tables in one call: host memory only.

Why this module exists: a save of a thousand tables must cost what its rows do, and numpy or torch take longer to begin
with a table of a hundred rows than to do it. Here Python collects addresses, and one kernel does all of the work.
Nothing is held or locked here; kernels release the GIL and trust the addresses that they get.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from cnr_store.runtime.addresses import int32s_at, int64s_at
from cnr_store.runtime.jit import njit
from cnr_store.types import RowIds
from cnr_store_gpu.words import Words, _list_rows, _mark, _popcount

PART_FIELDS = 6
"""Numbers of a part of `gather_parts`."""


@njit(nogil=True)
def _count_spans(words: Any, spans: Any, counts: Any) -> int:
    total = 0
    for k in range(spans.shape[0]):
        count = 0
        for word in words[spans[k, 0] : spans[k, 0] + spans[k, 1]]:
            if word != 0:
                count += _popcount(word)
        counts[k] = count
        total += count
    return total


@njit(nogil=True)
def _list_spans(words: Any, spans: Any, counts: Any, rows: Any) -> None:
    start = 0
    for k in range(spans.shape[0]):
        _list_rows(words[spans[k, 0] : spans[k, 0] + spans[k, 1]], rows[start : start + counts[k]])
        start += counts[k]


@njit(nogil=True)
def _part_outside(parts: Any) -> int:
    for k in range(parts.shape[0]):
        ids = carray(int64s_at(parts[k, 0]), (parts[k, 1],))
        end = np.uint64(parts[k, 2])
        for i in range(ids.size):
            if np.uint64(ids[i]) >= end:  # a negative id is a huge one
                return k
    return -1


@njit(nogil=True)
def _gather_parts(parts: Any) -> None:
    for k in range(parts.shape[0]):
        count, size = parts[k, 1], parts[k, 5]
        ids = carray(int64s_at(parts[k, 0]), (count,))
        rows = carray(int32s_at(parts[k, 3]), (parts[k, 2], size))
        out = carray(int32s_at(parts[k, 4]), (count, size))
        for i in range(count):
            row = ids[i]
            for j in range(size):
                out[i, j] = rows[row, j]


@njit(nogil=True)
def mark_at(words: Any, ids: int, count: int, first_word: int, num_rows: int, skip_row: int) -> None:
    """Set the bits of ``count`` int64 ids at an address: `words.mark_words` of an array that need not be made first."""
    _mark(words, carray(int64s_at(ids), (count,)), first_word, num_rows, skip_row)


@njit(nogil=True)
def _mark_gradients(words: Any, parts: Any) -> None:
    for k in range(parts.shape[0]):
        rows = carray(int32s_at(parts[k, 0]), (parts[k, 1], parts[k, 2]))
        for i in range(rows.shape[0]):
            bits = np.int32(0)
            for j in range(rows.shape[1]):  # without a way out of the loop, which several elements at a time go through
                bits |= rows[i, j]
            if bits != 0:
                words[parts[k, 3] + (i >> 5)] |= np.uint32(1) << np.uint32(i & 31)


def mark_gradients(words: Words, parts: npt.NDArray[np.int64]) -> None:
    """Mark rows of dense gradients that are not all zero: `tables.rows_with_gradient` and a mark of each, in one call.

    Bits are compared, not values, so a row with an element -0.0 is marked, too: a save leaves out unchanged rows.

    Parameters
    ----------
    words
        uint32, written in place; not safe against another writer of the same words.
    parts
        int64 ``(num_parts, 4)``: address of a contiguous gradient, its rows, the size of a row in units of 4 bytes, and
        the first word of the table. The caller keeps the gradients alive.
    """
    _mark_gradients(words, parts)


def rows_of_spans(words: Words, spans: npt.NDArray[np.int64]) -> tuple[RowIds, npt.NDArray[np.int64]]:
    """Return the set bits of spans of words: `words.rows_of` for each, in one call.

    Parameters
    ----------
    words
        uint32 ``(n,)``.
    spans
        int64 ``(num_spans, 2)``: first word and number of words of each.

    Returns
    -------
    tuple
        int64 rows, counted from the start of their span, sorted in each, one span after the other; and int64
        ``(num_spans,)``, how many each has.
    """
    counts = np.empty(len(spans), np.int64)
    rows: RowIds = np.empty(_count_spans(words, spans, counts), np.int64)
    _list_spans(words, spans, counts, rows)
    return rows, counts


def gather_parts(parts: npt.NDArray[np.int64]) -> int:
    """Copy rows of many tensors: ``index_select`` of each, in one call. Reads and writes by address.

    Parameters
    ----------
    parts
        int64 ``(num_parts, 6)``: address of the ids (int64), how many, rows of the source, its address, that of the
        copy, and the size of a row in units of 4 bytes, to which addresses are aligned. All is contiguous, and the
        caller keeps it alive.

    Returns
    -------
    int
        -1, or the first part with an id outside of its source: then nothing was written.
    """
    outside = int(_part_outside(parts))
    if outside < 0:
        _gather_parts(parts)
    return outside
