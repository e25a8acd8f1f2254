"""Numba kernels of fused row-wise rows: codes and their scale and bias in one run of bytes per row.

Layout, little-endian, a value being ``bias + scale * code``:

- 8 bit, ``(n, dim + 8)``: dim codes, scale float32, bias float32;
- 4 bit, ``(n, (dim + 1) // 2 + 4)``: two codes per byte (the even column in the low half), scale float16, bias float16.

Byte for byte what FBGEMM's row-wise quantizers and `torch.ops.quantized.embedding_bag_*_prepack` write on a CPU with
AVX2, except that a row which those would store as something else than finite numbers is refused, not stored: NaN
becomes 0 there, and a range beyond float32 (4 bit: beyond float16) an infinite scale.

All release the GIL and are serial; `fuse_rows` of the tests is the same in numpy. Arrays are C-contiguous, dim >= 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.affine_kernels import row_ranges
from cnr_store.runtime.jit import njit

BITS_8_EXTRA_BYTES = 8
"""Bytes of scale and bias in an 8-bit row."""

BITS_4_EXTRA_BYTES = 4
"""Bytes of scale and bias in a 4-bit row."""

_EPSILON = np.float32(1e-8)  # FBGEMM's; it keeps the inverse of a zero range finite
_LANES = 8  # floats of an AVX2 register
_INFINITE = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)


def fused_row_bytes(dim: int, bits: int) -> int:
    """Return the bytes of one fused row of `dim` values at 8 or 4 `bits`."""
    return dim + BITS_8_EXTRA_BYTES if bits == 8 else (dim + 1) // 2 + BITS_4_EXTRA_BYTES


def values_of_rows(rows: npt.NDArray[np.uint8], dim: int, bits: int) -> npt.NDArray[np.float32]:
    """Return the float32 values (n, dim) of fused rows: ``bias + scale * code``, rounded twice."""
    if bits == 8:
        codes = rows[:, :dim]
        parameters = np.ascontiguousarray(rows[:, dim:]).view("<f4")
    else:
        packed = rows[:, : (dim + 1) // 2]
        codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(rows), -1)[:, :dim]
        parameters = np.ascontiguousarray(rows[:, (dim + 1) // 2 :]).view("<f2").astype(np.float32)
    scaled = codes.astype(np.float32) * parameters[:, :1]
    return np.asarray(scaled + parameters[:, 1:], np.float32)


@njit(nogil=True)
def _zero_of_ties(row: npt.NDArray[np.float32]) -> np.float32:
    """Return the zero that AVX2's minimum keeps where -0.0 and 0.0 tie for it: the last of each lane, then the first.

    It is the sign of a zero bias, which changes no value; equal bytes are worth these lines, since they make the
    comparison with the operators exact.
    """
    dim = row.shape[0]
    whole = dim // _LANES * _LANES
    for lane in range(min(_LANES, whole)):
        for column in range(whole - _LANES + lane, -1, -_LANES):
            if row[column] == np.float32(0.0):
                return np.float32(row[column])
    for column in range(whole, dim):
        if row[column] == np.float32(0.0):
            return np.float32(row[column])
    return np.float32(0.0)


@njit(nogil=True)
def half_bits(value: np.float32) -> np.uint16:
    """Return the bits of the float16 nearest to a float32 that is not NaN (ties to even, overflow to Inf)."""
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & _MAGNITUDE)
    if magnitude >= np.uint32(0x477FF000):  # from 65520 on
        half = np.uint32(0x7C00)
    elif magnitude >= np.uint32(0x38800000):  # from 2**-14 on: normal
        odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
        half = np.uint32((magnitude - np.uint32(0x38000000) + np.uint32(0x0FFF) + odd) >> np.uint32(13))
    else:  # a multiple of 2**-24; the product is exact and rint rounds ties to even
        half = np.uint32(np.rint(np.float64(abs(value)) * 16777216.0))
    return np.uint16(sign | half)


@njit(nogil=True)
def half_value(bits: np.uint16) -> np.float32:
    """Return the value of finite float16 bits."""
    exponent = (np.int64(bits) >> 10) & 31
    fraction = np.int64(bits) & 1023
    if exponent == 0:
        value = fraction * 2.0**-24
    else:
        value = (1024 + fraction) * 2.0 ** (exponent - 25)
    return np.float32(-value if np.int64(bits) & 0x8000 else value)


@njit(nogil=True)
def fuse_rows_8bit(values: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> int:
    """Write `values` (n, dim) float32 as 8-bit fused rows into `out` (n, dim + 8).

    Returns the first row that cannot be stored as finite numbers, and leaves it and what follows unwritten; -1 if
    all are written. May read and write disjoint slices from several threads.
    """
    num_rows, dim = values.shape
    low = np.empty(1, np.float32)
    high = np.empty(1, np.float32)
    parameters = np.empty(2, np.float32)
    parameter_bytes = parameters.view(np.uint8)
    for row in range(num_rows):
        row_ranges(values[row : row + 1], low, high)
        base = low[0]
        # Inf and NaN have the largest images of their sign, so that they show in the row's ends.
        if (low.view(np.uint32)[0] & _MAGNITUDE) >= _INFINITE or (high.view(np.uint32)[0] & _MAGNITUDE) >= _INFINITE:
            return row
        span = np.float32(high[0] - base)
        scale = np.float32(span / np.float32(255.0))
        if not np.isfinite(np.float32(np.float32(scale * np.float32(255.0)) + base)):
            return row
        if base == np.float32(0.0):
            base = _zero_of_ties(values[row])
        inverse = np.float32(np.float32(255.0) / np.float32(span + _EPSILON))
        for column in range(dim):
            out[row, column] = np.uint8(np.int32(np.rint((values[row, column] - base) * inverse)))
        parameters[0] = scale
        parameters[1] = base
        for k in range(8):
            out[row, dim + k] = parameter_bytes[k]
    return -1


@njit(nogil=True)
def fuse_rows_4bit(values: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> int:
    """Write `values` (n, dim) float32 as 4-bit fused rows into `out` (n, (dim + 1) // 2 + 4).

    Returns the first row that cannot be stored as finite numbers (scale and bias are float16: values up to 65,504),
    and leaves it and what follows unwritten; -1 if all are written. An odd dim leaves the last half byte zero.
    """
    num_rows, dim = values.shape
    pairs = (dim + 1) // 2
    low = np.empty(1, np.float32)
    high = np.empty(1, np.float32)
    codes = np.zeros(2 * pairs, np.uint8)
    parameters = np.empty(2, np.uint16)
    parameter_bytes = parameters.view(np.uint8)
    for row in range(num_rows):
        row_ranges(values[row : row + 1], low, high)
        base = low[0]
        if (low.view(np.uint32)[0] & _MAGNITUDE) >= _INFINITE or (high.view(np.uint32)[0] & _MAGNITUDE) >= _INFINITE:
            return row
        if base == np.float32(0.0):
            base = _zero_of_ties(values[row])
        parameters[1] = half_bits(base)
        if (parameters[1] & np.uint16(0x7C00)) == np.uint16(0x7C00):
            return row
        base = half_value(parameters[1])
        span = np.float32(high[0] - base)  # below zero where the bias was rounded up beyond the largest value
        scale = np.float32(1.0) if span == np.float32(0.0) else np.float32(span / np.float32(15.0))
        parameters[0] = half_bits(scale)
        if (parameters[0] & np.uint16(0x7C00)) == np.uint16(0x7C00):
            return row
        if (parameters[0] & np.uint16(0x7FFF)) == np.uint16(0):
            parameters[0] = np.uint16(0x3C00)
        scale = half_value(parameters[0])
        inverse = np.float32(np.float32(1.0) / scale)
        for column in range(dim):
            q = np.rint((values[row, column] - base) * inverse)
            q = q if q > np.float32(0.0) else np.float32(0.0)
            q = q if q < np.float32(15.0) else np.float32(15.0)
            codes[column] = np.uint8(np.int32(q))
        for k in range(pairs):
            out[row, k] = codes[2 * k] | np.uint8(codes[2 * k + 1] << np.uint8(4))
        for k in range(4):
            out[row, pairs + k] = parameter_bytes[k]
    return -1
