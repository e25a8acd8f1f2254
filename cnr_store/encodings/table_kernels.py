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
    float_bits_decode,
    float_bits_delta,
    float_bits_encode,
    lattice_decode,
    lattice_decode_in_place,
    lattice_delta,
    lattice_encode,
)
from cnr_store.encodings.row_kernels import add_codes, add_codes_wrapping, put_codes
from cnr_store.runtime.addresses import float32s_at, int16s_at, int32s_at
from cnr_store.runtime.jit import njit

PART_FIELDS = 7
CODE_BYTES = 4
"""The column of ``parts`` with the bytes of a code in the mirror."""

_compiled = njit(nogil=True, error_model="numpy")
_INFINITE = np.int32(0x7F800000)
_BLOCK_ROWS = 1024


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
def are_ascending(parts: Any, ends: Any, rows: Any, found: Any) -> None:
    """Find out which tables have row ids that ascend from the first to the last that they must have.

    Parameters
    ----------
    parts
        A line per table, of which places in ``rows`` and numbers of rows count.
    ends
        int64 ``(num_tables, 2)``: the first and the last id.
    rows
        int64 ``(n,)``, row ids of all tables.
    found
        bool ``(num_tables,)``, overwritten.
    """
    for k in range(parts.shape[0]):
        own = rows[parts[k, 0] : parts[k, 0] + parts[k, 1]]
        is_sound = 0 < len(own) == parts[k, 1] and own[0] == ends[k, 0] and own[-1] == ends[k, 1]
        for i in range(1, len(own)):
            is_sound &= own[i] > own[i - 1]
        found[k] = is_sound


PUT, ADD, ADD_WRAPPING = 0, 1, 2
"""What `move_mirrors` does with codes: `put_codes`, `add_codes`, `add_codes_wrapping`."""


@_compiled
def move_mirrors(parts: Any, moves: Any, rows: Any, codes: Any, reached: Any) -> None:
    """Put or add codes in the mirror of each table.

    Parameters
    ----------
    parts
        A line per table, without an address of values.
    moves
        int8 ``(num_tables,)``: `PUT`, `ADD` or `ADD_WRAPPING`.
    rows, codes
        int64 ``(n,)``, int16 or int32 ``(n, d)``, of all tables.
    reached
        int64 ``(num_tables,)``, overwritten: what the kernel of the move returns.
    """
    d = codes.shape[1]
    for k in range(parts.shape[0]):
        start, size = parts[k, 0], parts[k, 5]
        stop = start + parts[k, 1]
        if parts[k, 4] == 2:
            narrow = carray(int16s_at(parts[k, 3]), (size, d))
            reached[k] = _move(narrow, moves[k], rows[start:stop], parts[k, 6], codes[start:stop])
        else:
            wide = carray(int32s_at(parts[k, 3]), (size, d))
            reached[k] = _move(wide, moves[k], rows[start:stop], parts[k, 6], codes[start:stop])


@_compiled
def _move(mirror: Any, move: Any, rows: Any, first: Any, codes: Any) -> Any:
    if move == PUT:
        return put_codes(mirror, rows, first, codes, 0)
    if move == ADD:
        return add_codes(mirror, rows, first, codes, 0)
    return add_codes_wrapping(mirror, rows, first, codes)


@_compiled
def finish_mirrors(parts: Any, scales: Any, shift: int, multipliers: Any, presence: Any, found: Any) -> None:
    """Decode the mirror of each table to float32, and sum its `digest_block`: both while a block is in the CPU's cache.

    Parameters
    ----------
    parts
        A line per table. The values are as many as the mirror has rows, and are overwritten; they may be the memory of
        an int32 mirror. Without their address only the digest is computed.
    scales
        float32, one per table: of a lattice.
    shift
        Of float_bits; -1 of a lattice.
    multipliers
        uint64 ``(d,)``, the same for all tables.
    presence
        uint64, of the digest.
    found
        uint64 ``(num_tables,)``, overwritten.
    """
    d = len(multipliers)
    for k in range(parts.shape[0]):
        size = parts[k, 5]
        if parts[k, 4] == 2:
            narrow = carray(int16s_at(parts[k, 3]), (size, d))
            found[k] = _finish(parts[k], narrow, scales[k], shift, multipliers, presence)
        else:
            wide = carray(int32s_at(parts[k, 3]), (size, d))
            found[k] = _finish(parts[k], wide, scales[k], shift, multipliers, presence)


@_compiled
def _finish(part: Any, codes: Any, scale: Any, shift: Any, multipliers: Any, presence: Any) -> Any:
    digest = np.uint64(0)
    for low in range(0, len(codes), _BLOCK_ROWS):
        block = codes[low : low + _BLOCK_ROWS]
        digest += digest_block(block, part[6] + low, multipliers, presence)
        if part[2] == 0:
            continue
        if shift >= 0:
            bits = carray(int32s_at(part[2]), codes.shape)
            float_bits_decode(block, shift, bits[low : low + _BLOCK_ROWS])
            continue
        values = carray(float32s_at(part[2]), codes.shape)
        if part[2] == part[3]:
            lattice_decode_in_place(values[low : low + _BLOCK_ROWS], scale)
        else:
            lattice_decode(block, scale, values[low : low + _BLOCK_ROWS])
    return digest
