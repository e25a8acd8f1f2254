"""Integers as planes of digits: digits that compress well are stored apart from those that do not.

``value = middle + sum of (digit_i - base_i // 2) * (product of the bases below i)``, modulo the width of the integer.
Each digit has its own plane, the highest digit first. A byte holds as many digits as fit (`per_byte`). Byte i of a
plane of m bytes has the digits of the values i, i + m, i + 2 m and so on, so packing and unpacking are loops over whole
arrays.

Codes are nearly uniform over a few neighbouring values, so the low digit does not compress. The digits above it fit
one byte, the symbol of a Huffman coder (`format_spec/decisions/0021`). Pure, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cnr_store.format import digit_kernels

Integers = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Bases = tuple[int, ...]
"""The base of each digit, the highest first: 2 to 256. Empty: every value is 0."""


class Packing(NamedTuple):
    """How integers are packed: the bases, and the integer that the digits are counted from, an int8."""

    bases: Bases
    middle: int = 0


LARGEST_BASE = 256
MOST_DIGITS = 8
_LOWEST = (256, 16, 5, 3)
"""Bases that a writer tries for the lowest digit."""

LARGEST_BEGIN = 119
"""The middle of a digit of base 16 that begins there is the largest int8."""

_RECIPROCAL_BITS = 32

_PER_BYTE = (0, 0, *(max(n for n in range(1, 9) if base**n <= LARGEST_BASE) for base in range(2, LARGEST_BASE + 1)))


def per_byte(base: int) -> int:
    """Return how many digits of ``base`` a byte holds.

    >>> [per_byte(base) for base in (256, 16, 5, 3, 2)]
    [1, 2, 3, 5, 8]
    """
    return _PER_BYTE[base]


def plane_bytes(bases: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the size in bytes of each digit's plane, for ``count`` values."""
    return tuple([-(-count // _PER_BYTE[base]) for base in bases])


def reach(bases: Sequence[int]) -> tuple[int, int]:
    """Return the smallest and the largest value that digits of these bases can represent.

    >>> reach((256,)), reach((16, 3)), reach(())
    ((-128, 127), (-25, 22), (0, 0))
    """
    low = high = 0
    for base in bases:
        low, high = low * base - base // 2, high * base + base - 1 - base // 2
    return low, high


def choices(low: int, high: int, dtype: np.dtype[Any], begin: int | None = None) -> list[Packing]:
    """Return what a writer compares for values from ``low`` to ``high`` (inclusive) of a dtype. Pure.

    One for each lowest base, with as few digits above it as the values need, and no more bytes than the dtype.
    ``begin``: where the lowest digit begins, -128 to `LARGEST_BEGIN`; None: it has 0 in its middle.
    """
    if low == high and -128 <= low < 128:
        return [Packing((), low)]
    found: list[Packing] = []
    for lowest in _LOWEST if dtype.itemsize <= 2 else (256, 16):
        middle = 0 if begin is None else min(begin + lowest // 2, 127)
        bases = _shortest(lowest, low - middle, high - middle, dtype)
        if len(bases) <= MOST_DIGITS and sum(plane_bytes(bases, 240)) <= 240 * dtype.itemsize:
            found.append(Packing(bases, middle))
    return found


def _uppers(lowest: int) -> list[Bases]:
    """Return bases with this lowest one and more and more digits above it, until they hold every integer."""
    ladder: list[Bases] = [(lowest,)]
    for whole in range(MOST_DIGITS):
        ladder += [(16, *[256] * whole, lowest), (256, *[256] * whole, lowest)]
    return ladder


_LADDERS = {lowest: [(bases, *reach(bases), math.prod(bases)) for bases in _uppers(lowest)] for lowest in _LOWEST}
"""By lowest base: `_uppers`, the `reach` of each, and how many values its digits have."""


def _shortest(lowest: int, low: int, high: int, dtype: np.dtype[Any]) -> Bases:
    """Return the first bases of a ladder that hold such values, or all of the dtype."""
    for bases, least, most, count in _LADDERS[lowest]:
        if (least <= low and high <= most) or count >= 1 << 8 * dtype.itemsize:
            return bases
    raise AssertionError("unreachable: the last ones hold every integer")


def pack(values: Integers, packing: Packing, out: Bytes) -> int:
    """Write the planes of ``values`` to the start of ``out``, and return their size in bytes.

    Parameters
    ----------
    values
        (n,) int16, int32 or int64, contiguous; minus the middle inside `reach`, unless the bases hold every value of
        the dtype.
    packing
        Its bases are powers of two. For int16 any base: there the division by a reciprocal is exact.
    out
        uint8, at least the sum of `plane_bytes`.

    Notes
    -----
    Blocks while it computes; releases the GIL.
    """
    start = 0
    for divisions, size in zip(_divisions(packing), plane_bytes(packing.bases, values.size), strict=True):
        digit_kernels.pack_plane(values, *divisions, out[start : start + size])
        start += size
    return start


@lru_cache(maxsize=256)
def _divisions(packing: Packing) -> tuple[tuple[Any, ...], ...]:
    """Return for each digit what `digit_kernels.pack_plane` divides by: between ``values`` and ``out``."""
    bases, middle = packing
    weights, weight, offset = [], 1, -middle
    for base in reversed(bases):
        weights.append(weight)
        offset += base // 2 * weight
        weight *= base
    moved = np.uint64(offset % (1 << 64))
    return tuple(
        (moved, *_reciprocal(weight), *_reciprocal(base), np.uint64(base), per_byte(base))
        for base, weight in zip(bases, reversed(weights), strict=True)
    )


def unpack(planes: Bytes, packing: Packing, count: int, start: int, out: Integers) -> None:
    """Write values [start, start + n) of ``count`` packed values to ``out`` (n,).

    ``planes`` has at least the sum of `plane_bytes`. Values are modulo the width of ``out``. Blocks while it computes;
    releases the GIL.
    """
    bases, middle = packing
    per = np.array([per_byte(base) for base in bases], np.int64)
    digit_kernels.unpack_planes(planes, np.array(bases, np.int64), per, count, start, out)
    if middle:
        out += out.dtype.type(middle)


def _reciprocal(divisor: int) -> tuple[np.uint64, np.uint64]:
    """Return the factor and shift of a division: exact for powers of two, for other divisors below 2^17."""
    if divisor & (divisor - 1) == 0:
        return np.uint64(1), np.uint64(divisor.bit_length() - 1)
    return np.uint64(-(-(1 << _RECIPROCAL_BITS) // divisor)), np.uint64(_RECIPROCAL_BITS)
