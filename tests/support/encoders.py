"""Blocks encoded, decoded and digested by the kernels, in arrays of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import kernels, widths
from cnr_store.encodings.affine import row_errors
from cnr_store.encodings.choose import REFERENCE_SETTINGS
from cnr_store.encodings.widths import FloatBlock, as_columns, carrier, narrowest
from cnr_store.types import Affine, AffineBits, Codes, Float32s, TableDtype


def lattice_codes(values: Float32s, scale: float) -> Codes:
    """The codes of a block that has a code for each value, (n, d) or (n,), in the narrowest of int16 and int32."""
    block, flags = as_columns(np.ascontiguousarray(values)), np.zeros(len(values), np.uint8)
    codes: Codes = np.empty(block.shape, np.int32)
    largest, first_bad = kernels.lattice_encode(block, np.float32(scale), codes, flags)
    assert first_bad < 0
    return codes.astype(narrowest(largest)).reshape(values.shape)


def lattice_floats(codes: Codes, scale: float) -> Float32s:
    out = np.empty(codes.shape, np.float32)
    kernels.lattice_decode(as_columns(codes), np.float32(scale), as_columns(out))
    return out


def float_bits_codes(values: FloatBlock, mantissa_bits: int, dtype: TableDtype = "float32") -> Codes:
    """The codes of a block without NaN, or exact, (n, d) or (n,), in `widths.code_dtype`."""
    block: npt.NDArray[Any] = np.ascontiguousarray(values)
    bits = widths.as_bits(block, dtype)
    codes: Codes = np.empty(bits.shape, widths.code_dtype(mantissa_bits, dtype))
    shift = widths.bit_shift(mantissa_bits, dtype)
    _, first_bad = kernels.float_bits_encode(bits, shift, codes, np.zeros(len(bits), np.uint8))
    assert first_bad < 0
    return codes.reshape(values.shape)


def float_bits_floats(codes: Codes, mantissa_bits: int, dtype: TableDtype = "float32") -> FloatBlock:
    out: FloatBlock = np.empty(codes.shape, carrier(dtype))
    shift = widths.bit_shift(mantissa_bits, dtype)
    kernels.float_bits_decode(as_columns(np.ascontiguousarray(codes)), shift, widths.as_bits(out, dtype))
    return out


def digest_of_block(codes: Codes, row_start: int, multipliers: npt.NDArray[np.uint64], presence: np.uint64) -> int:
    """The state digest of the rows from ``row_start`` on, with codes (n, d) or (n,)."""
    return int(kernels.digest_block(as_columns(codes), row_start, multipliers, presence))


def affine_mse(rows: Float32s, bits: AffineBits) -> float:
    """The mean squared error of b-bit Check-N-Run rows: greedy search with `REFERENCE_SETTINGS`, fp16 parameters.

    The largest value is brought to [1, 2) by a power of two first, so that fp16 parameters neither overflow nor vanish.
    """
    unit = np.float32(2.0 ** (np.frexp(np.abs(rows).max())[1] - 1))
    scaled = np.ascontiguousarray(rows / unit)
    num_bins, ratio = REFERENCE_SETTINGS[bits]
    encoding = Affine(bits, search="greedy", param_dtype="float16", num_bins=num_bins, ratio=ratio)
    return float(row_errors(scaled, encoding).sum()) * float(unit) ** 2 / rows.size
