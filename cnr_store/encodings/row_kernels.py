"""Kernels that move rows of codes: restore, replay, the mirror after a commit, and the order of stored rows.

Their contract is that of `kernels`.
"""

from __future__ import annotations

import numpy as np

from cnr_store.encodings.kernels import are_far_apart
from cnr_store.runtime.fences import AHEAD, prefetch
from cnr_store.runtime.jit import njit

_compiled = njit(nogil=True, error_model="numpy")


@_compiled
def put_codes(acc, rows, row_base, codes, left_shift):  # type: ignore[no-untyped-def]
    """``acc[rows - row_base] = codes << left_shift``; return -1, or where a row does not fit.

    ``acc`` and ``codes`` are int16 or int32, (N, d) and (n, d). A row that overflows or lies outside ``acc``
    stops the loop: rows after it are not applied, and its own content in ``acc`` is undefined if it
    overflowed.
    """
    n, d = codes.shape
    size = acc.shape[0]
    k = np.int64(left_shift)
    far = are_far_apart(acc, rows)
    for i in range(n):
        if far and i + AHEAD < n:
            prefetch(acc, rows[i + AHEAD] - row_base)
        index = rows[i] - row_base
        if index < 0 or index >= size:
            return np.int64(i)
        lost = np.int64(0)
        for j in range(d):
            code = np.int64(codes[i, j]) << k
            acc[index, j] = code
            lost |= code ^ np.int64(acc[index, j])
        if lost != 0:
            return np.int64(i)
    return np.int64(-1)


@_compiled
def add_codes(acc, rows, row_base, codes, left_shift):  # type: ignore[no-untyped-def]
    """``acc[rows - row_base] += codes << left_shift``, checked; return as `put_codes`."""
    n, d = codes.shape
    size = acc.shape[0]
    k = np.int64(left_shift)
    far = are_far_apart(acc, rows)
    for i in range(n):
        if far and i + AHEAD < n:
            prefetch(acc, rows[i + AHEAD] - row_base)
        index = rows[i] - row_base
        if index < 0 or index >= size:
            return np.int64(i)
        lost = np.int64(0)
        for j in range(d):
            code = np.int64(acc[index, j]) + (np.int64(codes[i, j]) << k)
            acc[index, j] = code
            lost |= code ^ np.int64(acc[index, j])
        if lost != 0:
            return np.int64(i)
    return np.int64(-1)


@_compiled
def add_codes_wrapping(acc, rows, row_base, codes):  # type: ignore[no-untyped-def]
    """``acc[rows - row_base] += codes`` modulo 2^32 (int32) or 2^16 (int16).

    Return -1, or the position of the first row outside ``acc``.
    """
    n, d = codes.shape
    size = acc.shape[0]
    far = are_far_apart(acc, rows)
    for i in range(n):
        if far and i + AHEAD < n:
            prefetch(acc, rows[i + AHEAD] - row_base)
        index = rows[i] - row_base
        if index < 0 or index >= size:
            return np.int64(i)
        for j in range(d):
            acc[index, j] = np.int64(acc[index, j]) + np.int64(codes[i, j])
    return np.int64(-1)


@_compiled
def put_block(acc, codes, left_shift):  # type: ignore[no-untyped-def]
    """``acc[:] = codes << left_shift`` of equal shapes, checked; return as `put_codes`. Both may be one array."""
    n, d = codes.shape
    k = np.int64(left_shift)
    for i in range(n):
        lost = np.int64(0)
        for j in range(d):
            code = np.int64(codes[i, j]) << k
            acc[i, j] = code
            lost |= code ^ np.int64(acc[i, j])
        if lost != 0:
            return np.int64(i)
    return np.int64(-1)


@_compiled
def add_block(acc, codes, left_shift):  # type: ignore[no-untyped-def]
    """``acc += codes << left_shift`` of equal shapes, checked; return as `put_codes`."""
    n, d = codes.shape
    k = np.int64(left_shift)
    for i in range(n):
        lost = np.int64(0)
        for j in range(d):
            code = np.int64(acc[i, j]) + (np.int64(codes[i, j]) << k)
            acc[i, j] = code
            lost |= code ^ np.int64(acc[i, j])
        if lost != 0:
            return np.int64(i)
    return np.int64(-1)


@_compiled
def add_log_sizes(block, logs, sums):  # type: ignore[no-untyped-def]
    """``sums[i] += sum over j of logs[|block[i, j]|]``; larger values count as the last of ``logs``.

    ``block`` is int16 or int32 (n, d), ``logs`` float32, ``sums`` float32 (n,).
    """
    last = np.int64(len(logs) - 1)
    for i in range(block.shape[0]):
        total = np.float32(0)
        for j in range(block.shape[1]):
            total += logs[min(abs(np.int64(block[i, j])), last)]
        sums[i] += total


@_compiled
def _first_places(keys):  # type: ignore[no-untyped-def]
    """Return where a stable sort by ``keys`` (n,) puts the first row of each value, and the smallest value."""
    low = high = np.int64(0)
    for i in range(len(keys)):
        low = min(low, np.int64(keys[i]))
        high = max(high, np.int64(keys[i]))
    counts = np.zeros(high - low + 2, np.int64)
    for i in range(len(keys)):
        counts[np.int64(keys[i]) - low + 1] += 1
    for value in range(1, len(counts)):
        counts[value] += counts[value - 1]
    return counts, low


@_compiled
def sort_rows(block, keys, out):  # type: ignore[no-untyped-def]
    """Write the rows of ``block`` (n, d) to ``out`` (n, d) in the stable order of the int16 ``keys`` (n,).

    A counting sort (Knuth, The Art of Computer Programming, vol. 3, 5.2, algorithm D). This and `unsort_rows` are the
    kernels that allocate: a count for each value between the smallest key and the largest, 0.5 MiB at most.
    """
    places, low = _first_places(keys)
    for i in range(len(keys)):
        key = np.int64(keys[i]) - low
        to = places[key]
        places[key] += 1
        for j in range(block.shape[1]):
            out[to, j] = block[i, j]


@_compiled
def unsort_rows(ordered, keys, out):  # type: ignore[no-untyped-def]
    """Write the rows of ``ordered`` (n, d), which `sort_rows` moved, back to where they were, in ``out`` (n, d)."""
    places, low = _first_places(keys)
    for i in range(len(keys)):
        key = np.int64(keys[i]) - low
        at = places[key]
        places[key] += 1
        for j in range(ordered.shape[1]):
            out[i, j] = ordered[at, j]
