"""The numpy reference of each kernel: slow, plain, and what the kernels are compared with bit for bit.

Written from the definitions in `lattice`, `float_bits` and `digest`, not from the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.types import MAX_CODE

Integers = npt.NDArray[Any]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def lattice_codes(values: npt.NDArray[np.float32], scale: float) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return ``(codes, bad)``: codes (n, d) with bad rows zero, and which rows are bad (n,)."""
    with np.errstate(all="ignore"):
        steps = np.rint(values / np.float32(scale))
    bad: npt.NDArray[np.bool_] = np.logical_not((np.abs(steps) <= MAX_CODE).all(axis=1))
    codes = np.where(bad[:, None], np.float32(0), steps).astype(np.int32)
    return codes, bad


def storable_codes(codes: Integers) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return ``(codes, bad)`` as `lattice_codes` does, of rows (n, d) that are codes already."""
    bad: npt.NDArray[np.bool_] = np.asarray((np.abs(codes.astype(np.int64)) > MAX_CODE).any(axis=1))
    return np.where(bad[:, None], 0, codes).astype(np.int32), bad


def lattice_values(codes: Integers, scale: float) -> npt.NDArray[np.float32]:
    """Return the decoded float32 values."""
    return np.float32(scale) * codes.astype(np.float32)


def float_codes(bits: Integers, shift: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return ``(codes, bad)`` of floats given by their bits (int32 or int16, (n, d))."""
    width = bits.dtype.itemsize * 8
    magnitude = bits.astype(np.int64) & ((1 << (width - 1)) - 1)
    infinity = 0x7F800000
    bad = np.zeros(len(bits), np.bool_)
    if shift:
        bad |= (magnitude > infinity).any(axis=1)
    k = magnitude
    if shift:
        below, remainder = magnitude >> shift, magnitude & ((1 << shift) - 1)
        half = 1 << (shift - 1)
        up = (remainder > half) | ((remainder == half) & (below % 2 == 1))
        k = below + up
        k = np.where(magnitude < infinity, np.minimum(k, (infinity >> shift) - 1), k)
    codes = np.where(bits < 0, -1 - k, k)
    codes[bad] = 0
    return codes.astype(np.int32), bad


def float_patterns(codes: Integers, shift: int, width_bits: int) -> Integers:
    """Return the bits of the decoded floats, int32 or int16 by ``width_bits``."""
    wide = codes.astype(np.int64)
    magnitude = np.where(wide < 0, -1 - wide, wide) << shift
    signed = np.where(wide < 0, magnitude - (1 << (width_bits - 1)), magnitude)
    return signed.astype(np.int32 if width_bits == 32 else np.int16)


@dataclass(frozen=True, slots=True)
class Delta:
    """What a delta kernel finds: true differences (bad rows zero), flags, digest change, the good rows' new codes."""

    differences: npt.NDArray[np.int64]
    flags: npt.NDArray[np.uint8]
    digest_change: int
    codes: npt.NDArray[np.int32]


def delta(
    codes: npt.NDArray[np.int32],
    bad: npt.NDArray[np.bool_],
    rows: npt.NDArray[np.int64],
    mirror: Integers,
    row_base: int,
    multipliers: npt.NDArray[np.uint64],
) -> Delta:
    """Return the difference of new codes (with their bad rows) to the mirror."""
    old = mirror[rows - row_base].astype(np.int64)
    differences = np.where(bad[:, None], 0, codes.astype(np.int64) - old)
    flags = np.where(bad, 255, differences.any(axis=1)).astype(np.uint8)
    change = digest(differences, rows, multipliers, 0)
    return Delta(differences, flags, change, codes[~bad])


def wrapped(differences: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the differences modulo 2^32, as they are stored for float_bits."""
    return (differences & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def add(acc: Integers, rows: npt.NDArray[np.int64], codes: Integers, left_shift: int) -> npt.NDArray[np.int64]:
    """Return ``acc`` as int64 with ``codes << left_shift`` added at the positions ``rows`` (unique)."""
    total = acc.astype(np.int64)
    total[rows] += codes.astype(np.int64) << left_shift
    return total


def sorted_places(keys: Integers) -> npt.NDArray[np.int64]:
    """Return where a stable sort by ``keys`` (n,) puts each row: int64 (n,)."""
    places = np.empty(len(keys), np.int64)
    places[np.argsort(keys, kind="stable")] = np.arange(len(keys))
    return places


def splitmix64(x: int) -> int:
    """Return the splitmix64 image of one 64-bit number."""
    x = (x + _GOLDEN) & _MASK
    z = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def digest(codes: Integers, rows: npt.NDArray[np.int64], multipliers: npt.NDArray[np.uint64], presence: int) -> int:
    """Return the state digest of the rows, in Python integers."""
    total = 0
    weights = [int(m) for m in multipliers]
    for row, row_codes in zip(rows.tolist(), codes.tolist(), strict=True):
        key = row & _MASK
        inner = sum(weight * code for weight, code in zip(weights, row_codes, strict=True))
        total += (splitmix64(key) | 1) * inner
        if presence:
            total += splitmix64(key ^ presence)
    return total & _MASK


def digit_planes(values: Integers, bases: tuple[int, ...], middle: int = 0) -> npt.NDArray[np.uint8]:
    """Return the planes of the digits of ``values`` (n,), joined, the highest digit first."""
    rest = [int(value) - middle for value in values]
    planes = []
    for base in reversed(bases):
        shifted = [value + base // 2 for value in rest]
        rest = [value // base for value in shifted]
        per = max(count for count in range(1, 9) if base**count <= 256)
        size = -(-len(shifted) // per)
        plane = [0] * size
        for position, value in enumerate(shifted):
            plane[position % size] += value % base * base ** (position // size)
        planes.append(plane)
    return np.array([byte for plane in reversed(planes) for byte in plane], np.uint8)


def digit_values(planes: npt.NDArray[np.uint8], bases: tuple[int, ...], values: Integers) -> Integers:
    """Return what `digit_planes` made of as many values, in the dtype of ``values``, modulo its width."""
    found, start = [0] * values.size, 0
    for base in bases:
        per = max(count for count in range(1, 9) if base**count <= 256)
        size = -(-values.size // per)
        plane = planes[start : start + size].tolist()
        start += size
        for position in range(values.size):
            digit = plane[position % size] // base ** (position // size) % base
            found[position] = found[position] * base + digit - base // 2
    width = 8 * values.itemsize
    return np.array([(v + (1 << width - 1)) % (1 << width) - (1 << width - 1) for v in found], values.dtype)
