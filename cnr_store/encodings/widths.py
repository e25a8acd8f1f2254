"""Number widths: the integer that codes are stored in, and the exact way between 16-bit floats and fp32.

bfloat16 has no numpy dtype; it is carried as uint16 everywhere in this library.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadDtype
from cnr_store.types import Codes, Float32s, TableDtype

FloatBlock = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]

AnyScalar = TypeVar("AnyScalar", bound=np.generic)

_CARRIERS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
CODE_DTYPES = (np.dtype(np.int16), np.dtype(np.int32))
"""What lattice codes are given and held in; no float is carried in one of them."""

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
