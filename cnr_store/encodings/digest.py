"""The state digest: one 64-bit number for the codes of a rectangle, kept up to date from touched rows alone.

It is linear on purpose: digests of disjoint rectangles add up, and a save changes it by the digest of new
minus old codes of the touched rows. It catches a wrong, stale or misaligned mirror; it does not detect
forged codes (object digests and the record chain do).

Definition, all arithmetic modulo 2^64, codes sign-extended to 64 bits, rows r and columns j global::

    digest = sum over present rows r of
               P(r)                                   if the rectangle starts at column 0
             + R(r) * ( sum over columns j   of M(j)    * code[r, j]
                      + sum over slots s, j  of S(s, j) * slotcode[s][r, j] )

    splitmix64(x): x += G; z = (x ^ x>>30) * 0xBF58476D1CE4E5B9; z = (z ^ z>>27) * 0x94D049BB133111EB; z ^
    z>>31 G    = 0x9E3779B97F4A7C15 R(r) = splitmix64(r) | 1                          r as two's complement
    (hashed keys may be negative) M(j) = splitmix64(2^63 xor j) | 1 S(s, j) = splitmix64(first 8 bytes,
    little-endian, of sha256("slot:" + s) + j) | 1 P(r) = splitmix64(r xor (3 G mod 2^64)) for a coded row,
    splitmix64(r xor (5 G mod 2^64)) for an escape row

An escape row's codes, and those of its mirrored slots, are the bits of its exact values widened to float32, as int32.
Deleted and absent rows contribute 0. A one-dimensional slot has the single column j = column start of its
rectangle.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import kernels
from cnr_store.encodings.widths import as_columns

Multipliers: TypeAlias = npt.NDArray[np.uint64]
IntegerCodes: TypeAlias = npt.NDArray[np.int16] | npt.NDArray[np.int32]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

PRESENCE_CODED = np.uint64(3 * _GOLDEN & _MASK)
"""Passed to the digest kernels for rows that have codes."""

PRESENCE_ESCAPE = np.uint64(5 * _GOLDEN & _MASK)
"""Passed to the digest kernels for rows kept as exact floats."""

NO_PRESENCE = np.uint64(0)
"""Passed for slots, and for rectangles that do not start at column 0."""


def splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the splitmix64 image of each element (uint64, any shape). No I/O."""
    x = x + np.uint64(_GOLDEN)
    z = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


@lru_cache(maxsize=4096)
def column_multipliers(start: int, stop: int) -> Multipliers:
    """Return M(j) of the columns ``start .. stop`` of a table, uint64 (stop - start,); cached, do not write."""
    columns = np.arange(start, stop, dtype=np.uint64)
    return splitmix64(np.uint64(1 << 63) ^ columns) | np.uint64(1)


@lru_cache(maxsize=4096)
def slot_multipliers(name: str, start: int, stop: int) -> Multipliers:
    """Return S(name, j) of the columns ``start .. stop`` of a slot, uint64 (stop - start,); cached, do not write.

    A one-dimensional slot of a rectangle that starts at column c has ``slot_multipliers(name, c, c + 1)``.
    """
    head = hashlib.sha256(b"slot:" + name.encode()).digest()[:8]
    first = np.uint64(int.from_bytes(head, "little"))
    return splitmix64(np.arange(start, stop, dtype=np.uint64) + first) | np.uint64(1)


def presence(column_start: int, *, escape: bool = False) -> np.uint64:
    """Return the presence constant for a table rectangle that starts at ``column_start``."""
    if column_start != 0:
        return NO_PRESENCE
    return PRESENCE_ESCAPE if escape else PRESENCE_CODED


def digest_of_rows(
    codes: IntegerCodes, rows: npt.NDArray[np.int64], multipliers: Multipliers, presence: np.uint64
) -> int:
    """Return the digest of the rows ``rows`` (int64 (n,), global ids) with codes (n, d) or (n,)."""
    return int(kernels.digest_rows(as_columns(codes), rows, multipliers, presence))


def add_digests(*digests: int) -> int:
    """Return the sum of digests modulo 2^64: of disjoint rectangles, or of a digest and its changes (of any sign)."""
    return sum(digests) & _MASK
