"""The `lattice` encoding: one step (scale) for a table and generation, so a code depends on the value alone.

Definition (normative)
    * encode: ``q = rint(x / scale)``; one fp32 division by the float32 scale, rounded half to even; ``|q| <=
      MAX_CODE`` (2^21);
    * decode: ``float32(scale) * float32(q)``; one fp32 multiplication;
    * float16 and bfloat16 tables: widened exactly to fp32 first; after decoding rounded to the nearest, half
      to even, saturating at the largest finite number (`widths.from_float32`).

Laws: the error is at most scale / 2 plus fp32 rounding, whatever the history; encoding a decoded row gives
the same codes; differences of codes add. The sign of zero is lost (-0.0 decodes to +0.0); NaN, Inf and codes
beyond MAX_CODE are refused.

Hot paths call `kernels.lattice_*` on preallocated blocks; the functions here allocate and check.
"""

from __future__ import annotations

import numpy as np

from cnr_store.encodings import kernels
from cnr_store.encodings.widths import as_columns, narrowest
from cnr_store.errors import BadDtype, BadInput, NonFiniteValues
from cnr_store.types import MAX_CODE, Codes, Float32s

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""Below this a scale is subnormal, and devices that flush subnormals would decode something else."""

LARGEST_SCALE = float(np.finfo(np.float32).max) / (2 * MAX_CODE)
"""Up to this every code decodes to a finite float32."""


def check_scale(scale: float) -> np.float32:
    """Return the scale as float32.

    Raises
    ------
    BadInput
        If it is not finite, not positive, or so small or large that codes do not decode exactly.
    """
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise BadInput(
            f"a lattice scale must be between {SMALLEST_SCALE:.3g} and {LARGEST_SCALE:.3g}, found {scale!r}",
            expected=[SMALLEST_SCALE, LARGEST_SCALE],
            found=scale,
        )
    return np.float32(scale)


def encode(values: Float32s, scale: float, *, table: str | None = None, row_start: int = 0) -> Codes:
    """Return the codes of a block in the narrowest of int16 and int32.

    Parameters
    ----------
    values
        float32 (n, d), or (n,) for a slot.
    scale
        Step of the lattice.
    table, row_start
        Named in the error: the block holds rows ``row_start ..`` of ``table``.

    Raises
    ------
    NonFiniteValues
        If a row holds NaN, Inf or a value beyond ``MAX_CODE * scale``.
    """
    step = check_scale(scale)
    if values.dtype != np.float32:
        raise BadDtype(
            f"lattice codes are made from float32, found {values.dtype}", expected="float32", found=str(values.dtype)
        )
    block = as_columns(np.ascontiguousarray(values))
    flags = np.zeros(len(block), np.uint8)
    out: Codes = np.empty(block.shape, np.int16)
    max_abs, first_bad = kernels.lattice_encode(block, step, out, flags)
    if first_bad >= 0:
        raise unstorable_row(int(row_start + first_bad), step, table)
    if narrowest(max_abs) != np.int16:
        out = np.empty(block.shape, np.int32)
        kernels.lattice_encode(block, step, out, flags)
    return out.reshape(values.shape)


def decode(codes: Codes, scale: float, out: Float32s | None = None) -> Float32s:
    """Return ``scale * codes`` as float32, into ``out`` if given (it may be the memory of an int32 ``codes``)."""
    step = check_scale(scale)
    result = np.empty(codes.shape, np.float32) if out is None else out
    kernels.lattice_decode(as_columns(codes), step, as_columns(result))
    return result


def error_bound(scale: float, max_abs_value: float = 0.0) -> float:
    """Return the largest error of a restored fp32 element: scale / 2 plus the fp32 roundings at ``max_abs_value``."""
    return scale / 2 + max_abs_value * 2.0**-23


def unstorable_row(row: int, scale: np.float32, table: str | None) -> NonFiniteValues:
    """Return the error for a row that the lattice cannot hold."""
    where = f"row {row} of table {table!r}" if table else f"row {row}"
    limit = float(scale) * MAX_CODE
    return NonFiniteValues(
        f"{where} holds NaN, Inf or a value beyond {limit:.6g} (2^21 steps of {float(scale):.6g}); "
        "clip it, choose a larger scale, or allow escape rows",
        table=table,
        expected=f"finite, at most {limit:.6g}",
        found=f"row {row}",
    )
