"""Packed row bits: one bit per row in 32-bit words, marked, counted and listed.

Why this module exists: a bit is the only mark per row that costs less than 0.05 % of a 64-dim fp32 table. torch has no
operation that ORs bits at given places, so the CPU has numba kernels here; other devices have `kernels`. A save of a
thousand tables must cost what its rows cost, and numpy needs longer to start than a small table takes. So some kernels
work on many tables in one call, by addresses that Python collects.

Row r of a table is bit ``r % 32`` of word ``first_word + r // 32``. Bits past a table's last row are
always zero. The functions take words and ids only, no lock and no state, so a torch operator can call each. The kernels
release the GIL and do not check addresses: callers hold ``LOCK`` while they read or write live words.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray  # type: ignore[attr-defined]

from cnr_store.runtime.addresses import int32s_at, int64s_at
from cnr_store.runtime.jit import njit
from cnr_store.types import RowIds

BITS = 32
TABLE_ALIGNMENT_ROWS = 1024
"""Each table starts at a multiple of this many rows: no word (or GPU cache line) belongs to two tables."""

Words = npt.NDArray[np.uint32]
NO_ROW = -1

LOCK = threading.RLock()
"""Held while live words are read or written. One for the process: an operator gets words, not their owner."""


def words_of_rows(num_rows: int) -> int:
    """Return how many words the rows need."""
    return -(-num_rows // BITS)


def aligned_words(num_rows: int) -> int:
    """Return how many words a table occupies in the linearised bitmap, alignment included."""
    return -(-num_rows // TABLE_ALIGNMENT_ROWS) * (TABLE_ALIGNMENT_ROWS // BITS)


@njit(nogil=True)
def _mark(words: Any, ids: Any, first_word: int, num_rows: int, skip_row: int) -> int:
    # Unsigned: a negative id is a huge one, so one comparison checks both bounds, and no index is taken from the end.
    end, first, skip = np.uint64(num_rows), np.uint64(first_word), np.uint64(np.int64(skip_row))
    outside = 0
    for i in range(ids.size):
        row = np.uint64(np.int64(ids[i]))
        # Bounds before anything else: an id outside would set a bit of the neighbouring table.
        if row >= end:
            outside += 1
        elif row != skip:
            words[first + (row >> np.uint64(5))] |= np.uint32(1) << np.uint32(row & np.uint64(31))
    return outside


@njit(nogil=True)
def _popcount(word: Any) -> int:
    # LLVM turns this into one popcnt; uint32 everywhere, because numba widens mixed operands to int64.
    x = np.uint32(word - ((word >> np.uint32(1)) & np.uint32(0x55555555)))
    x = np.uint32((x & np.uint32(0x33333333)) + ((x >> np.uint32(2)) & np.uint32(0x33333333)))
    x = np.uint32((x + (x >> np.uint32(4))) & np.uint32(0x0F0F0F0F))
    return np.int64(np.uint32(x * np.uint32(0x01010101)) >> np.uint32(24))  # type: ignore[return-value]


@njit(nogil=True)
def count_bits(words: Words) -> int:
    """Return how many bits are set."""
    total = 0
    for i in range(words.size):
        if words[i] != 0:
            total += _popcount(words[i])
    return total


@njit(nogil=True)
def _list_rows(words: Any, rows: Any) -> int:
    n = 0
    for i in range(words.size):
        word = words[i]
        while word != 0:
            below = np.uint32((word - np.uint32(1)) & ~word)
            rows[n] = np.int64(i) * 32 + _popcount(below)
            n += 1
            word = np.uint32(word & (word - np.uint32(1)))
    return n


def mark_words(words: Words, ids: npt.NDArray[Any], first_word: int, num_rows: int, skip_row: int = NO_ROW) -> int:
    """Set the bits of ``ids`` in ``words`` and return how many ids were outside ``[0, num_rows)``.

    Parameters
    ----------
    words
        uint32, written in place; not safe against another writer of the same words.
    ids
        int32 or int64, one-dimensional, any order, repeats allowed. Ids outside the table set nothing.
    first_word, num_rows
        Where the table starts and how many rows it has.
    skip_row
        A row that is never marked (``padding_idx``), or ``NO_ROW``.
    """
    return int(_mark(words, ids, first_word, num_rows, skip_row))


@njit(nogil=True)
def mark_slices_words(
    words: Words,
    ids: npt.NDArray[Any],
    ends: npt.NDArray[np.int64],
    first_words: npt.NDArray[np.int64],
    num_rows: npt.NDArray[np.int64],
) -> None:
    """Set the bits of slice k, ``ids[ends[k]:ends[k + 1]]``, in the table at ``first_words[k]``.

    Parameters
    ----------
    words, ids
        As for ``mark_words``; ids outside their table are not reported.
    ends
        int64 ``(num_slices + 1,)``, ascending.
    first_words, num_rows
        int64 ``(num_slices,)``; a table may have several slices.
    """
    for k in range(first_words.size):
        start, stop = max(ends[k], 0), min(ends[k + 1], ids.size)
        if start < stop:
            _mark(words, ids[start:stop], first_words[k], num_rows[k], NO_ROW)


@njit(nogil=True)
def mark_parts_words(words: Words, parts: npt.NDArray[np.int64]) -> None:
    """Set the bits of ids that lie in several places: ``mark_words`` for each, in one call.

    Parameters
    ----------
    words
        As for ``mark_words``.
    parts
        int64 ``(num_parts, 4)``: address of the first id, how many (int64, contiguous), ``first_word``, ``num_rows``.
        The caller keeps the ids alive; nothing checks the addresses.
    """
    for k in range(parts.shape[0]):
        ids = carray(int64s_at(parts[k, 0]), (parts[k, 1],))
        _mark(words, ids, parts[k, 2], parts[k, 3], NO_ROW)


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as words, int32 ``(ceil(num_rows / 32),)``, on its device; waits for nothing.

    ``mask`` is bool ``(num_rows,)``. Built byte by byte, so it needs a temporary byte per row.
    """
    num_rows = mask.numel()
    padded = torch.zeros(words_of_rows(num_rows) * BITS, dtype=torch.uint8, device=mask.device)
    padded[:num_rows] = mask
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    # Each bit is there once, so the sum is the OR; words are little-endian wherever torch runs.
    return (padded.view(-1, 8) << shifts).sum(dim=1, dtype=torch.uint8).view(torch.int32)


def rows_of(words: Words) -> RowIds:
    """Return the set bits as row ids, int64, sorted, counted from the first word; owned by the caller."""
    rows: RowIds = np.empty(count_bits(words), np.int64)
    _list_rows(words, rows)
    return rows


def words_full(num_rows: int) -> Words:
    """Return words in which every row's bit is set and every bit after the last row is clear."""
    words = np.full(words_of_rows(num_rows), 0xFFFFFFFF, np.uint32)
    if num_rows % BITS:
        words[-1] = np.uint32((1 << (num_rows % BITS)) - 1)
    return words


def warmup() -> None:
    """Compile (or load) the CPU kernels now, so that the first training step does not pay for it."""
    words = np.zeros(1, np.uint32)
    for dtype in (np.int32, np.int64):
        mark_words(words, np.zeros(1, dtype), 0, 1)
        one = np.ones(1, np.int64)
        mark_slices_words(words, np.zeros(1, dtype), np.array([0, 1]), np.zeros(1, np.int64), one)
    mark_parts_words(words, np.zeros((0, 4), np.int64))
    rows_of(words)
    rows_of_spans(words, np.array([[0, 1]]))


@njit(nogil=True)
def _count_spans(words: Any, spans: Any, counts: Any) -> int:
    total = 0
    for k in range(spans.shape[0]):
        counts[k] = count_bits(words[spans[k, 0] : spans[k, 0] + spans[k, 1]])
        total += counts[k]
    return total


@njit(nogil=True)
def _list_spans(words: Any, spans: Any, counts: Any, rows: Any) -> None:
    start = 0
    for k in range(spans.shape[0]):
        _list_rows(words[spans[k, 0] : spans[k, 0] + spans[k, 1]], rows[start : start + counts[k]])
        start += counts[k]


@njit(nogil=True)
def mark_at(words: Any, ids: int, count: int, first_word: int, num_rows: int, skip_row: int) -> None:
    """Set the bits of ``count`` int64 ids at an address: `mark_words` of an array that need not be made first."""
    _mark(words, carray(int64s_at(ids), (count,)), first_word, num_rows, skip_row)


@njit(nogil=True)
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
    for k in range(parts.shape[0]):
        rows = carray(int32s_at(parts[k, 0]), (parts[k, 1], parts[k, 2]))
        for i in range(rows.shape[0]):
            bits = np.int32(0)
            for j in range(rows.shape[1]):  # without a way out of the loop, which several elements at a time go through
                bits |= rows[i, j]
            if bits != 0:
                words[parts[k, 3] + (i >> 5)] |= np.uint32(1) << np.uint32(i & 31)


def rows_of_spans(words: Words, spans: npt.NDArray[np.int64]) -> tuple[RowIds, npt.NDArray[np.int64]]:
    """Return the set bits of spans of words: `rows_of` for each, in one call.

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
