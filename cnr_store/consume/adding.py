"""Add differences to rows that are held as values: each element becomes its code again, moves, and is decoded.

One pass over memory each, compiled by numba: serial, without the GIL, in place. `add_reference` says in numpy what they
do. Rows that are held as codes are added to by `cnr_store.encodings.kernels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from cnr_store.encodings import float_bits, kernels
from cnr_store.encodings.reference import float_codes, float_patterns
from cnr_store.table_codes import ArraySpec
from cnr_store.types import Lattice

Array = npt.NDArray[Any]

LARGEST_CODE = (1 << 22) - 1
"""Largest |code| of a lattice that its float32 value gives back; twice what a writer may store."""


@njit(nogil=True, cache=True, error_model="numpy")
def lattice_add(values: Array, differences: Array, scale: np.float32) -> int:
    """``values = scale * (rint(values / scale) + differences)``, float32 (n, d) and int16 or int32 (n, d).

    Returns -1, or the first row where a code or difference is beyond `LARGEST_CODE`; rows behind it are not moved.
    """
    step = np.float32(scale)
    limit = np.int32(LARGEST_CODE)
    n, d = values.shape
    for i in range(n):
        outside = np.int32(0)
        for j in range(d):
            difference = np.int32(differences[i, j])
            known = np.rint(values[i, j] / step)
            inside = (abs(known) <= np.float32(LARGEST_CODE)) & (difference <= limit) & (difference >= -limit)
            code = np.int32(np.int32(known if inside else np.float32(0)) + difference)
            inside = inside & (code <= limit) & (code >= -limit)
            outside |= np.int32(0) if inside else np.int32(1)
            values[i, j] = step * np.float32(code)
        if outside != 0:
            return i
    return -1


@njit(nogil=True, cache=True)
def float_bits_add(bits: Array, differences: Array, shift: int, wraps: bool) -> int:
    """Move the ordered image of each float by its difference; ``bits`` int32 or int16 (n, d), the floats' own.

    ``shift`` low bits are zero and no part of the image. Sums are modulo 2^32 with ``wraps``, else they fit int16.
    Returns -1, or the first row where one does not; rows behind it are not moved.
    """
    s = np.int32(shift)
    mask = np.int32(0x7FFFFFFF) if bits.itemsize == 4 else np.int32(0x7FFF)
    sign = np.int32(-0x80000000) if bits.itemsize == 4 else np.int32(-0x8000)
    n, d = bits.shape
    for i in range(n):
        outside = np.int32(0)
        for j in range(d):
            b = np.int32(bits[i, j])
            negative = np.int32(b >> np.int32(31))
            before = np.int32(np.int32((b & mask) >> s) ^ negative)
            code = np.int32(np.int64(before) + np.int64(differences[i, j]))
            outside |= np.int32(code) ^ np.int32(np.int16(code))
            negative = np.int32(code >> np.int32(31))
            bits[i, j] = np.int32(np.int32((code ^ negative) << s) | (negative & sign))
        if outside != 0 and not wraps:
            return i
    return -1


def add_to_values(spec: ArraySpec, values: Array, differences: Array) -> int:
    """Add differences (n, d) to coded rows (n, d) held as floats of the array's dtype, in place; C-contiguous.

    Returns -1, or the first row whose codes leave their range; what rows from it on hold is undefined.
    """
    if isinstance(spec.encoding, Lattice):
        return int(lattice_add(values, differences, spec.scale))
    wraps = spec.held_dtype == np.int32
    return int(float_bits_add(float_bits.as_bits(values, spec.dtype), differences, spec.bit_shift, wraps))


def add_to_codes(spec: ArraySpec, codes: Array, differences: Array) -> int:
    """Add differences (n, d) to coded rows (n, d) held as codes, in place; returns as `add_to_values`.

    Lattice codes of int16 that leave it are no damage: the table needs int32.
    """
    if not isinstance(spec.encoding, Lattice) and codes.dtype == np.int32:
        return int(kernels.add_codes_wrapping(codes, np.arange(len(codes), dtype=np.int64), 0, differences))
    return int(kernels.add_block(codes, differences, 0))


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
    if spec.held_dtype == np.int32:
        codes = codes.astype(np.int32)
    elif codes.size and not -32768 <= codes.min() <= codes.max() <= 32767:
        return None
    return np.ascontiguousarray(float_patterns(codes.astype(np.int32), spec.bit_shift, width)).view(values.dtype)
