"""Kernels over the touched rows of many tables: one call each, whatever the number of tables.

Each does what the kernel of one table that it calls does for it (`kernels`, `row_kernels`). ``parts`` is int64
``(num_tables, PART_FIELDS)``, a line per table: where its rows begin in the arrays that all tables share, how many it
has, the addresses of its values and of its mirror, the bytes of a code in the mirror, the mirror's rows, and the global
id of the first of them. Values and mirrors are C-contiguous, ``(count, d)`` and ``(rows, d)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from cnr_store.encodings.kernels import (
    digest_block,
    float_bits_delta,
    float_bits_encode,
    lattice_delta,
    lattice_encode,
)
from cnr_store.encodings.row_kernels import add_codes
from cnr_store.runtime.addresses import float32s_at, int16s_at, int32s_at
from cnr_store.runtime.jit import njit

PART_FIELDS = 7
CODE_BYTES = 4
"""The column of ``parts`` with the bytes of a code in the mirror."""

_compiled = njit(nogil=True, error_model="numpy")
_INFINITE = np.int32(0x7F800000)


def parts_of(
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: npt.NDArray[np.int64] | int,
    places: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Return a line per table; ``values``: the addresses, 0 without. ``places``: (n, 4), what it has of each mirror."""
    parts = np.empty((len(places), PART_FIELDS), np.int64)
    parts[:, 0], parts[:, 1], parts[:, 2], parts[:, 3:] = starts, counts, values, places
    return parts


@_compiled
def lattice_deltas(parts: Any, rows: Any, scales: Any, multipliers: Any, out: Any, flags: Any, found: Any) -> None:
    """`lattice_delta` of float32 rows of each table.

    Parameters
    ----------
    parts
        A line per table.
    rows
        int64 ``(n,)``, global row ids of all tables.
    scales
        float32, one per table.
    multipliers
        uint64 ``(d,)``, the same for all tables.
    out, flags
        int16 ``(n, d)`` and uint8 ``(n,)``, written as `lattice_delta` says.
    found
        int64 ``(num_tables, 2)``, overwritten: the largest absolute difference, and the bits of the digest's change.
    """
    d = out.shape[1]
    for k in range(parts.shape[0]):
        start, count, size = parts[k, 0], parts[k, 1], parts[k, 5]
        stop = start + count
        values = carray(float32s_at(parts[k, 2]), (count, d))
        if parts[k, 4] == 2:
            most, _, _, change = lattice_delta(
                values, rows[start:stop], carray(int16s_at(parts[k, 3]), (size, d)), parts[k, 6],
                scales[k], multipliers, out[start:stop], flags[start:stop],
            )  # fmt: skip
        else:
            most, _, _, change = lattice_delta(
                values, rows[start:stop], carray(int32s_at(parts[k, 3]), (size, d)), parts[k, 6],
                scales[k], multipliers, out[start:stop], flags[start:stop],
            )  # fmt: skip
        found[k, 0], found[k, 1] = most, np.int64(change)


@_compiled
def float_bits_deltas(parts: Any, rows: Any, shift: int, multipliers: Any, out: Any, flags: Any, found: Any) -> None:
    """`float_bits_delta` of float32 rows of each table, of which those with NaN or Inf are bad; as `lattice_deltas`."""
    d = out.shape[1]
    for k in range(parts.shape[0]):
        start, count, size = parts[k, 0], parts[k, 1], parts[k, 5]
        stop = start + count
        bits = carray(int32s_at(parts[k, 2]), (count, d))
        if parts[k, 4] == 2:
            most, _, _, change = float_bits_delta(
                bits, rows[start:stop], carray(int16s_at(parts[k, 3]), (size, d)), parts[k, 6],
                shift, multipliers, out[start:stop], flags[start:stop],
            )  # fmt: skip
        else:
            most, _, _, change = float_bits_delta(
                bits, rows[start:stop], carray(int32s_at(parts[k, 3]), (size, d)), parts[k, 6],
                shift, multipliers, out[start:stop], flags[start:stop],
            )  # fmt: skip
        found[k, 0], found[k, 1] = most, np.int64(change)
        _flag_not_finite(bits, flags[start:stop])


@_compiled
def _flag_not_finite(bits: Any, flags: Any) -> None:
    for i in range(bits.shape[0]):
        beyond = np.int32(0)
        for j in range(bits.shape[1]):
            beyond |= np.int32(1) if (bits[i, j] & _INFINITE) == _INFINITE else np.int32(0)
        if beyond != 0:
            flags[i] = 255


@_compiled
def lattice_codes(parts: Any, scales: Any, multipliers: Any, presence: Any, out: Any, flags: Any, found: Any) -> None:
    """`lattice_encode` of all float32 rows of each table, into ``out`` and its mirror, and their `digest_block`.

    Parameters
    ----------
    parts
        A line per table, which has as many values as its mirror has rows; the mirror has the dtype of ``out``.
    scales, multipliers, flags
        As for `lattice_deltas`.
    presence
        uint64, of the digest.
    out
        int16 or int32 ``(n, d)``, overwritten.
    found
        int64 ``(num_tables, 2)``, overwritten: the largest absolute code, and the bits of the digest.
    """
    d = out.shape[1]
    for k in range(parts.shape[0]):
        start, stop = parts[k, 0], parts[k, 0] + parts[k, 1]
        values = carray(float32s_at(parts[k, 2]), (parts[k, 1], d))
        most, _ = lattice_encode(values, scales[k], out[start:stop], flags[start:stop])
        digest = _keep_codes(parts[k], out[start:stop], multipliers, presence)
        found[k, 0], found[k, 1] = most, np.int64(digest)


@_compiled
def float_bits_codes(parts: Any, shift: int, multipliers: Any, presence: Any, out: Any, flags: Any, found: Any) -> None:
    """`float_bits_encode` of all float32 rows of each table, NaN and Inf are bad; otherwise as `lattice_codes`."""
    d = out.shape[1]
    for k in range(parts.shape[0]):
        start, stop = parts[k, 0], parts[k, 0] + parts[k, 1]
        bits = carray(int32s_at(parts[k, 2]), (parts[k, 1], d))
        most, _ = float_bits_encode(bits, shift, out[start:stop], flags[start:stop])
        _flag_not_finite(bits, flags[start:stop])
        digest = _keep_codes(parts[k], out[start:stop], multipliers, presence)
        found[k, 0], found[k, 1] = most, np.int64(digest)


@_compiled
def _keep_codes(part: Any, codes: Any, multipliers: Any, presence: Any) -> Any:
    """Copy the codes of a table into its mirror, and return their digest."""
    if part[CODE_BYTES] == 2:
        carray(int16s_at(part[3]), codes.shape)[:] = codes
    else:
        carray(int32s_at(part[3]), codes.shape)[:] = codes
    return digest_block(codes, part[6], multipliers, presence)


@_compiled
def add_to_mirrors(parts: Any, rows: Any, codes: Any, reached: Any) -> None:
    """`add_codes` of int16 differences to the mirror of each table.

    Parameters
    ----------
    parts
        A line per table, without an address of values.
    rows, codes
        int64 ``(n,)`` and int16 ``(n, d)``, of all tables.
    reached
        int64 ``(num_tables,)``, overwritten: what `add_codes` returns.
    """
    d = codes.shape[1]
    for k in range(parts.shape[0]):
        start, size = parts[k, 0], parts[k, 5]
        stop = start + parts[k, 1]
        if parts[k, 4] == 2:
            mirror = carray(int16s_at(parts[k, 3]), (size, d))
            reached[k] = add_codes(mirror, rows[start:stop], parts[k, 6], codes[start:stop], 0)
        else:
            wide = carray(int32s_at(parts[k, 3]), (size, d))
            reached[k] = add_codes(wide, rows[start:stop], parts[k, 6], codes[start:stop], 0)
