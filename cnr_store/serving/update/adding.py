"""Add differences to rows that are held: read where they are, moved, and written to where they go, in one pass.

Of rows that are held as values each element becomes its code again, moves, and is decoded. Kernels are compiled by
numba: serial, without the GIL. `add_reference` says in numpy what they do with values. One pass takes two thirds of the
time of a copy that is then added to (12 MB of random rows out of 256 MB, November 2026).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import float_bits
from cnr_store.encodings.reference import float_codes, float_patterns
from cnr_store.runtime.jit import njit
from cnr_store.segment.codes import ArraySpec
from cnr_store.serving.rows.fences import prefetch
from cnr_store.types import Lattice

Array = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]

LARGEST_CODE = (1 << 22) - 1
"""Largest |code| of a lattice that its float32 value gives back; twice what a writer may store."""

_AHEAD = 8


@njit(nogil=True, error_model="numpy")
def lattice_add(held: Array, positions: Positions, differences: Array, scale: np.float32, out: Array) -> int:
    """``out[i] = scale * (rint(held[positions[i]] / scale) + differences[i])``.

    ``held`` and ``out`` are float32 (N, d) and (n, d), ``differences`` int16 or int32. Returns -1, or the first row
    where a code or difference is beyond `LARGEST_CODE`; rows behind it are not written.
    """
    step = np.float32(scale)
    limit = np.int32(LARGEST_CODE)
    n, d = out.shape
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(held, positions[i + _AHEAD])
        at = positions[i]
        outside = np.int32(0)
        for j in range(d):
            difference = np.int32(differences[i, j])
            known = np.rint(held[at, j] / step)
            inside = (abs(known) <= np.float32(LARGEST_CODE)) & (difference <= limit) & (difference >= -limit)
            code = np.int32(np.int32(known if inside else np.float32(0)) + difference)
            inside = inside & (code <= limit) & (code >= -limit)
            outside |= np.int32(0) if inside else np.int32(1)
            out[i, j] = step * np.float32(code)
        if outside != 0:
            return i
    return -1


@njit(nogil=True)
def float_bits_add(held: Array, positions: Positions, differences: Array, shift: int, wraps: bool, out: Array) -> int:
    """Move the ordered image of each float by its difference; ``held`` and ``out`` are bits, int32 or int16.

    ``shift`` low bits are zero and no part of the image. Sums are modulo 2^32 with ``wraps``, else they fit int16.
    Returns -1, or the first row where one does not; rows behind it are not written.
    """
    s = np.int32(shift)
    mask = np.int32(0x7FFFFFFF) if held.itemsize == 4 else np.int32(0x7FFF)
    sign = np.int32(-0x80000000) if held.itemsize == 4 else np.int32(-0x8000)
    n, d = out.shape
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(held, positions[i + _AHEAD])
        at = positions[i]
        outside = np.int32(0)
        for j in range(d):
            b = np.int32(held[at, j])
            negative = np.int32(b >> np.int32(31))
            before = np.int32(np.int32((b & mask) >> s) ^ negative)
            code = np.int32(np.int64(before) + np.int64(differences[i, j]))
            outside |= np.int32(code) ^ np.int32(np.int16(code))
            negative = np.int32(code >> np.int32(31))
            out[i, j] = np.int32(np.int32((code ^ negative) << s) | (negative & sign))
        if outside != 0 and not wraps:
            return i
    return -1


@njit(nogil=True)
def codes_add(held: Array, positions: Positions, differences: Array, wraps: bool, out: Array) -> int:
    """``out[i] = held[positions[i]] + differences[i]``; ``held`` and ``out`` are int16 or int32, both the same.

    Sums are modulo the dtype's range with ``wraps``. Returns -1, or the first row where one does not fit it; rows
    behind it are not written.
    """
    n, d = out.shape
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(held, positions[i + _AHEAD])
        at = positions[i]
        lost = np.int64(0)
        for j in range(d):
            code = np.int64(held[at, j]) + np.int64(differences[i, j])
            out[i, j] = code
            lost |= code ^ np.int64(out[i, j])
        if lost != 0 and not wraps:
            return i
    return -1


def add_to_values(spec: ArraySpec, held: Array, positions: Positions, differences: Array, out: Array) -> int:
    """Write coded rows of ``held`` (N, d), floats of the array's dtype, moved by differences (n, d) to ``out`` (n, d).

    All are C-contiguous, and ``positions`` (n,) inside ``held``. Returns -1, or the first row whose codes leave their
    range; what ``out`` holds from it on is undefined.
    """
    if isinstance(spec.encoding, Lattice):
        return int(lattice_add(held, positions, differences, spec.scale, out))
    wraps = bool(spec.memory_dtype == np.int32)
    bits, into = float_bits.as_bits(held, spec.dtype), float_bits.as_bits(out, spec.dtype)
    return int(float_bits_add(bits, positions, differences, spec.bit_shift, wraps, into))


def add_to_codes(spec: ArraySpec, held: Array, positions: Positions, differences: Array, out: Array) -> int:
    """Write coded rows that are held as codes, moved by differences, to ``out``; as `add_to_values`.

    Lattice codes of int16 that leave it are no damage: the table needs int32.
    """
    wraps = not isinstance(spec.encoding, Lattice) and held.dtype == np.int32
    return int(codes_add(held, positions, differences, wraps, out))


def add_reference(spec: ArraySpec, values: Array, differences: Array) -> Array | None:
    """`add_to_values` in numpy, into a new array; None where a code leaves its range."""
    moved = differences.astype(np.int64)
    if isinstance(spec.encoding, Lattice):
        codes = np.rint(values / spec.scale).astype(np.int64) + moved
        if codes.size and (np.abs(codes).max() > LARGEST_CODE or np.abs(moved).max() > LARGEST_CODE):
            return None
        return np.float32(spec.scale) * codes.astype(np.float32)
    width = 32 if values.itemsize == 4 else 16
    bits = float_bits.as_bits(np.ascontiguousarray(values), spec.dtype)
    known, _ = float_codes(bits, spec.bit_shift)
    codes = known.astype(np.int64) + moved
    if spec.memory_dtype == np.int32:
        codes = codes.astype(np.int32)
    elif codes.size and not -32768 <= codes.min() <= codes.max() <= 32767:
        return None
    return np.ascontiguousarray(float_patterns(codes.astype(np.int32), spec.bit_shift, width)).view(values.dtype)
