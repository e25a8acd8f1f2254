"""Number widths: the integers that codes are stored in, 16-bit floats and fp32, and the `float_bits` encoding.

bfloat16 has no numpy dtype; it is carried as uint16 everywhere in this library.

`float_bits` stores the float's own bits as an ordered integer, rounded to m mantissa bits: for values of wide range
(optimizer slots), and for exactness. m = 23 is the identity on fp32, and 16-bit tables are exact.

Definition (normative)
    * k = the bits without the sign. For m < 23 it is rounded half to even to a multiple of 2^(23 - m) and
      shifted right by 23 - m; a finite value that would round to Inf becomes the largest finite k. Inf stays
      Inf; NaN is refused for m < 23, kept with its payload for m = 23;
    * code = k for a clear sign bit, -1 - k for a set one. For m = 23 this is ``i ^ ((i >> 31) & 0x7fffffff)``
      of the bits i; -0.0 has code -1, +0.0 code 0; codes are ordered as the floats are;
    * decode: k = code or -1 - code; bits = k << (23 - m), with the sign bit set for negative codes;
    * float16 and bfloat16: the same of the 16-bit pattern with nothing rounded (m = 10 and m = 7), codes are
      int16;
    * differences are modulo 2^32, stored as wrapped int32, or as int16 where all fit.

The magnitude is rounded, not the image, so rounding is symmetric in the sign and -Inf stays -Inf.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadDtype, BadInput
from cnr_store.types import Codes, Float32s, TableDtype

FloatBlock = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]

FloatPatterns = npt.NDArray[np.int32] | npt.NDArray[np.int16]

AnyScalar = TypeVar("AnyScalar", bound=np.generic)

_CARRIERS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
CODE_DTYPES = (np.dtype(np.int16), np.dtype(np.int32))
"""What lattice codes are given and held in; no float is carried in one of them."""

EXACT_MANTISSA_BITS: dict[str, int] = {"float32": 23, "float16": 10, "bfloat16": 7}
"""Mantissa bits at which ``float_bits`` is the identity, by dtype."""

_LARGEST_BFLOAT16 = np.uint32(0x7F7F)


def carrier(dtype: TableDtype) -> np.dtype[Any]:
    """Return the numpy dtype that carries a table of ``dtype`` (uint16 for bfloat16)."""
    return _CARRIERS[dtype]


def narrowest(max_abs: int) -> np.dtype[np.int16] | np.dtype[np.int32]:
    """Return int16 if codes up to ``max_abs`` fit it, else int32.

    >>> narrowest(32767), narrowest(32768)
    (dtype('int16'), dtype('int32'))
    """
    return np.dtype(np.int16) if max_abs <= 32767 else np.dtype(np.int32)


def narrowed(codes: Codes) -> Codes:
    """Return ``codes`` in the narrowest of int16 and int32 (the array itself if it is that already). No I/O."""
    if codes.dtype == np.int16 or codes.size == 0:
        return codes if codes.dtype == np.int16 else codes.astype(np.int16)
    fits = int(codes.min()) >= -32768 and int(codes.max()) <= 32767
    return codes.astype(np.int16) if fits else codes


def as_columns(array: npt.NDArray[AnyScalar]) -> npt.NDArray[AnyScalar]:
    """Return the array as the kernels take it: (n,) becomes (n, 1), a view; (n, d) stays."""
    return array.reshape(-1, 1) if array.ndim == 1 else array


def to_float32(block: FloatBlock, dtype: TableDtype, out: Float32s | None = None) -> Float32s:
    """Return the block widened to float32, exactly; NaN and Inf stay.

    A float32 block is returned as it is when ``out`` is None. ``out``, if given, is float32 of the same
    shape.
    """
    check_carrier(block, dtype)
    if dtype == "float32" and out is None:
        return block  # type: ignore[return-value]  # check_carrier has made it float32
    result = np.empty(block.shape, np.float32) if out is None else out
    if dtype == "bfloat16":
        np.left_shift(block, np.uint32(16), out=result.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        result[...] = block
    return result


def from_float32(values: Float32s, dtype: TableDtype, out: FloatBlock | None = None) -> FloatBlock:
    """Return float32 values rounded to the nearest ``dtype``, half to even.

    A finite value never becomes Inf: beyond the largest finite number of the 16-bit type it becomes that
    number (a lattice point can lie up to scale / 2 outside). Inf and NaN stay. A float32 array is returned as
    it is when ``out`` is None.
    """
    if dtype == "float32":
        if out is None:
            return values
        out[...] = values
        return out
    result = np.empty(values.shape, carrier(dtype)) if out is None else out
    check_carrier(result, dtype)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            result[...] = values.astype(np.float16)
        largest = np.float16(65504)
        overflowed = np.isinf(result) & np.isfinite(values)
        if overflowed.any():
            result[overflowed] = np.copysign(largest, values[overflowed]).astype(np.float16)
        return result
    bits = np.ascontiguousarray(values).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    rounded = (magnitude + np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded = np.where(magnitude < 0x7F800000, np.minimum(rounded, _LARGEST_BFLOAT16), rounded)
    # A NaN keeps the top of its payload and stays quiet: rounding could carry it into the sign.
    rounded = np.where(magnitude > 0x7F800000, (magnitude >> np.uint32(16)) | np.uint32(0x40), rounded)
    result[...] = (rounded | sign).astype(np.uint16)
    return result


def check_carrier(block: npt.NDArray[np.generic], dtype: TableDtype) -> None:
    """Raise `BadDtype` unless a block is of the numpy dtype that carries ``dtype``."""
    if block.dtype != carrier(dtype):
        raise BadDtype(
            f"a {dtype} block must be a numpy {carrier(dtype)} array, found {block.dtype}",
            expected=str(carrier(dtype)),
            found=str(block.dtype),
        )


def bit_shift(mantissa_bits: int, dtype: TableDtype = "float32") -> int:
    """Return how many low bits the encoding drops: 23 - m for float32, 0 for 16-bit floats.

    Raises
    ------
    BadInput
        If ``mantissa_bits`` is outside 0..23 (float32) or not the exact number of a 16-bit dtype.
    """
    exact = EXACT_MANTISSA_BITS[dtype]
    allowed = range(24) if dtype == "float32" else (exact,)
    if mantissa_bits not in allowed:
        expected = "0 to 23" if dtype == "float32" else str(exact)
        raise BadInput(
            f"float_bits on {dtype} takes mantissa_bits = {expected}, found {mantissa_bits}",
            expected=expected,
            found=mantissa_bits,
        )
    return exact - mantissa_bits


def code_dtype(mantissa_bits: int, dtype: TableDtype = "float32") -> np.dtype[np.int16] | np.dtype[np.int32]:
    """Return the dtype that holds every code, so the mirror's: int16 for 16-bit floats and for m <= 7, else int32."""
    bit_shift(mantissa_bits, dtype)
    return np.dtype(np.int16) if dtype != "float32" or mantissa_bits <= 7 else np.dtype(np.int32)


def as_bits(values: FloatBlock, dtype: TableDtype = "float32") -> FloatPatterns:
    """Return the floats' bits as the kernels take them: an int32 or int16 view (n, d); (n,) becomes (n, 1).

    The array must be C-contiguous; nothing is copied.
    """
    check_carrier(values, dtype)
    bits: npt.NDArray[Any] = values.view(np.int32 if dtype == "float32" else np.int16)
    return as_columns(bits)
