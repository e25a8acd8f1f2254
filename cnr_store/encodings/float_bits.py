"""The `float_bits` encoding: the float's own bits as an ordered integer, rounded to m mantissa bits.

For values of wide range (optimizer slots), and for exactness: m = 23 is the identity on fp32, and 16-bit
tables are exact.

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

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.widths import FloatBlock, as_columns, check_carrier
from cnr_store.errors import BadInput
from cnr_store.types import TableDtype

EXACT_MANTISSA_BITS: dict[str, int] = {"float32": 23, "float16": 10, "bfloat16": 7}
"""Mantissa bits at which ``float_bits`` is the identity, by dtype."""

FloatPatterns = npt.NDArray[np.int32] | npt.NDArray[np.int16]


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
