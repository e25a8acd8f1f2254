"""Check-N-Run's per-row asymmetric n-bit encoding: parameters by search, codes from the stored parameters, decoding.

A row is stored as packed codes with a scale and a zero_point; element i decodes to ``zero_point + scale *
code[i]`` (one multiplication and one addition, each rounded to float32). Codes are defined by the *stored*
parameters (quantization reference, section 4.1), so any search may be used without a change of format, and
equal parameters give equal bytes everywhere.

All functions are pure computation: no I/O, no threads of their own. They release the GIL inside their loops
and may run on separate row blocks from any number of threads.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import affine_kernels, packing
from cnr_store.errors import BadInput
from cnr_store.types import Affine, AffineBits, Float32s, ParamDtype

Params = npt.NDArray[np.float16] | npt.NDArray[np.float32]

LARGEST_VALUE: dict[str, float] = {"float16": 65504.0, "float32": 2.0**126}
"""Largest |value| a row may hold, by parameter dtype: the largest float16; far enough for no float32 to overflow."""

_NOT_INVERTIBLE = np.float32(2.0**-128)
"""From here down 1 / scale overflows: such a scale counts as zero."""

_BLOCK_ELEMENTS = 1 << 16
"""Elements encoded at a time, so that values and unpacked codes stay in the second-level cache."""

GRIDS: dict[int, tuple[int, float, int, float]] = {
    2: (4, 0.10, 2, 1.4),
    3: (4, 0.05, 2, 1.4),
    4: (4, 0.03, 2, 1.4),
    8: (1, 0.00, 5, 1.8),
}
"""By bits: grid points per side, grid step in row widths, least-squares steps, over-relaxation."""


def encode(
    values: Float32s,
    encoding: Affine,
    *,
    out_codes: npt.NDArray[np.uint8],
    out_scale: Params,
    out_zero_point: Params,
) -> int:
    """Encode rows into preallocated arrays.

    Parameters
    ----------
    values
        float32, C-contiguous, (n, dim). Read only. float16 and bfloat16 tables are widened by the caller.
    encoding
        Its ``search``: "grid" (a grid of ranges, then least squares), "minmax", or "greedy" (the paper's, keeping the
        best point; settings: `choose.REFERENCE_SETTINGS`). Its ``param_dtype``: see `params_fit`.
    out_codes
        uint8, (n, packing.packed_width(dim, bits)), overwritten. Owned by the caller, as are the next two.
    out_scale, out_zero_point
        ``encoding.param_dtype``, (n,), overwritten.

    Returns
    -------
    int
        Index of the first row that cannot be encoded (NaN, Inf, or a value beyond
        ``LARGEST_VALUE[encoding.param_dtype]``), or -1. If it is not -1 nothing has been written.

    Raises
    ------
    BadInput
        A greedy search without its settings.

    Notes
    -----
    Blocks for the computation alone. A scale that rounds to zero in float16 though its row is not constant
    becomes float16's smallest, 2**-24; one whose float32 reciprocal would overflow becomes 0. Parameters
    beyond float16 are clamped to +-65504. So what decodes is always finite. -0.0 decodes as +0.0.

    Examples
    --------
    >>> rows = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    >>> codes, scale, zero_point = np.empty((1, 2), np.uint8), np.empty(1, np.float16), np.empty(1, np.float16)
    >>> encode(rows, Affine(2, "minmax"), out_codes=codes, out_scale=scale, out_zero_point=zero_point)
    -1
    >>> codes[0].tolist(), scale.tolist(), zero_point.tolist()
    ([228, 0], [1.0], [0.0])
    """
    (num_rows, dim), bits = values.shape, encoding.bits
    bad_row = first_uncodable_row(values, param_dtype=encoding.param_dtype)
    if bad_row >= 0:
        return bad_row
    block_rows = max(affine_kernels.LANES, _BLOCK_ELEMENTS // dim)
    scale = np.empty(min(num_rows, block_rows), np.float32)
    zero_point = np.empty_like(scale)
    codes = np.zeros((len(scale), packing.padded_dim(dim)), np.uint8)
    for start in range(0, num_rows, block_rows):
        stop = min(num_rows, start + block_rows)
        block, count = values[start:stop], stop - start
        search_params(block, encoding, out_scale=scale[:count], out_zero_point=zero_point[:count])
        stored = {"out_scale": out_scale[start:stop], "out_zero_point": out_zero_point[start:stop]}
        store_params(scale[:count], zero_point[:count], **stored)
        quantize(block, out_scale[start:stop], out_zero_point[start:stop], bits=bits, out=codes[:count])
        packing.pack(codes[:count], bits=bits, out=out_codes[start:stop])
    return -1


def decode(
    codes: npt.NDArray[np.uint8],
    scale: Params,
    zero_point: Params,
    *,
    bits: int,
    dim: int,
    out: Float32s,
) -> None:
    """Decode packed rows into a preallocated array: ``zero_point + scale * code``, bit for bit.

    Parameters
    ----------
    codes
        uint8, C-contiguous, (n, packing.packed_width(dim, bits)). Read only.
    scale, zero_point
        float16 or float32, (n,). Read only.
    bits, dim
        Width of a code in bits (2, 3, 4, 8), and codes per row.
    out
        float32, C-contiguous, (n, dim), overwritten. Owned by the caller.

    Notes
    -----
    Blocks for the computation alone, without the GIL in its loops; safe from several threads.
    """
    num_rows = len(codes)
    block_rows = max(affine_kernels.LANES, _BLOCK_ELEMENTS // dim)
    unpacked = np.empty((min(num_rows, block_rows), packing.padded_dim(dim)), np.uint8)
    for start in range(0, num_rows, block_rows):
        stop = min(num_rows, start + block_rows)
        count = stop - start
        # Eight-bit codes are bytes already.
        block = codes[start:stop] if bits == 8 else unpacked[:count]
        if bits != 8:
            packing.unpack(codes[start:stop], bits=bits, out=block)
        affine_kernels.values_from_codes(
            block, _as_float32(scale[start:stop]), _as_float32(zero_point[start:stop]), out[start:stop]
        )


def first_uncodable_row(values: Float32s, *, param_dtype: ParamDtype) -> int:
    """Return the index of the first row of `values` (n, dim) that `encode` refuses, or -1."""
    limit = np.float32(LARGEST_VALUE[param_dtype]).view(np.uint32)
    return int(affine_kernels.first_bad_row(values.view(np.uint32), limit))


def codable_rows(values: Float32s, *, param_dtype: ParamDtype) -> npt.NDArray[np.bool_]:
    """Return, for each row of `values` (n, dim), whether `encode` accepts it: the others need an escape."""
    limit = np.float32(LARGEST_VALUE[param_dtype])
    codable: npt.NDArray[np.bool_] = np.all(np.abs(values) <= limit, axis=1)
    return codable


def codable(values: Float32s, *, param_dtype: ParamDtype) -> Float32s:
    """Return the rows of `values` (n, dim) that `encode` accepts, C-contiguous: `values` itself where it can be."""
    values = np.ascontiguousarray(values)
    if first_uncodable_row(values, param_dtype=param_dtype) < 0:
        return values
    return values[codable_rows(values, param_dtype=param_dtype)]


def params_fit(values: Float32s, param_dtype: ParamDtype, *, bits: AffineBits = 8) -> bool:
    """Return whether scale and zero_point of these rows can be stored as `param_dtype`; if not, use float32.

    True if every row can be encoded and rounding the parameters adds at most 1 % to the mean squared error of
    min-max codes. For float32 only the first counts. So tables of very small or very large values, or of rows
    far from zero, get float32. One decision per table, on a sample.

    Parameters
    ----------
    values
        float32, C-contiguous, (n, dim). Read only.
    param_dtype
        "float16" or "float32".
    bits
        Width of the codes; the default is the most demanding.
    """
    if first_uncodable_row(values, param_dtype=param_dtype) >= 0:
        return False
    if param_dtype == "float32":
        return True
    rounded = row_errors(values, Affine(bits, "minmax", "float16"))
    exact = row_errors(values, Affine(bits, "minmax", "float32"))
    return float(np.sum(rounded)) <= 1.01 * float(np.sum(exact))


def search_params(values: Float32s, encoding: Affine, *, out_scale: Float32s, out_zero_point: Float32s) -> None:
    """Write each row's float32 parameters before they are rounded to their storage dtype; `values` must be codable."""
    bits, max_code = encoding.bits, np.float32(2**encoding.bits - 1)
    if encoding.search == "minmax":
        affine_kernels.minmax_params(values, max_code, out_scale, out_zero_point)
    elif encoding.search == "grid":
        points, step, fit_steps, relax = GRIDS[bits]
        candidates = grid_candidates(bits, points, step)
        affine_kernels.grid_params(
            values, max_code, candidates, fit_steps, np.float32(relax), out_scale, out_zero_point
        )
    else:
        num_bins, ratio = encoding.num_bins, encoding.ratio
        if num_bins is None or ratio is None or num_bins < 2 or not 0.0 <= ratio <= 1.0:
            raise BadInput(
                f"the greedy search needs num_bins of at least 2 and a ratio in [0, 1], found num_bins={num_bins}, "
                f"ratio={ratio}"
            )
        path = greedy_path(bits, num_bins, ratio)
        affine_kernels.greedy_params(values, max_code, path, np.float32(1.0 / num_bins), out_scale, out_zero_point)


def row_errors(values: Float32s, encoding: Affine) -> npt.NDArray[np.float64]:
    """Return each row's squared error after `encode` and `decode`, summed over its elements: float64 (m,).

    Makes no codes. `values` is float32 (n, dim); ``m`` is less than n if the encoding refuses some rows.
    """
    values = codable(values, param_dtype=encoding.param_dtype)
    if values.size == 0:
        return np.zeros(len(values))
    errors = np.empty(len(values))
    found, stored = np.empty((2, len(values)), np.float32), np.empty((2, len(values)), encoding.param_dtype)
    search_params(values, encoding, out_scale=found[0], out_zero_point=found[1])
    store_params(found[0], found[1], out_scale=stored[0], out_zero_point=stored[1])
    affine_kernels.squared_errors(
        values, _as_float32(stored[0]), _as_float32(stored[1]), np.float32(2**encoding.bits - 1), errors
    )
    return errors


@lru_cache(maxsize=64)
def grid_candidates(bits: int, points: int, step: float) -> Float32s:
    """Return the candidates of the grid search, float32 (points**2, 3): low, scale, 1 / scale in row widths.

    Candidate (i, j) starts at ``i * step`` and has the width ``1 - (i + j) * step``; the first one is
    min-max. From the fourth point on a side, only candidates with ``|i - j| <= 1`` stay: lopsided ones at the
    rim cost a quarter of the time and gained at most 0.4 % of the error (measured, dim 16 to 512). Read-only,
    shared.
    """
    max_code = 2**bits - 1
    rows = []
    for i in range(points):
        for j in range(points):
            if max(i, j) >= 3 and abs(i - j) > 1:
                continue
            width = 1.0 - (i + j) * step
            rows.append((i * step, width / max_code, max_code / width))
    candidates = np.array(rows, np.float32)
    candidates.flags.writeable = False
    return candidates


@lru_cache(maxsize=256)
def greedy_path(bits: int, num_bins: int, ratio: float) -> Float32s:
    """Return the steps of the greedy search, float32 (steps + 1, 2): scale, 1 / scale in row widths, min-max first.

    The search goes on while the width is more than ``1 - ratio``, and stops before it is zero. Read-only, shared.
    """
    max_code = 2**bits - 1
    # 1e-9: 0.16 * 200 must be 32 steps although the product is a little more than 32.
    steps = min(num_bins - 1, int(np.ceil(ratio * num_bins - 1e-9)))
    widths = [(num_bins - k) / num_bins for k in range(steps + 1)]
    path = np.array([(width / max_code, max_code / width) for width in widths], np.float32)
    path.flags.writeable = False
    return path


def store_params(scale: Float32s, zero_point: Float32s, *, out_scale: Params, out_zero_point: Params) -> None:
    """Round searched parameters (n,) to the dtype of the outputs, by the rules in the notes of `encode`."""
    if out_scale.dtype == np.float16:
        largest = np.float32(LARGEST_VALUE["float16"])
        clamped = np.clip(scale, np.float32(2.0**-24), largest)
        clamped *= scale > 0
        np.copyto(out_scale, clamped, casting="same_kind")
        np.copyto(out_zero_point, np.clip(zero_point, -largest, largest), casting="same_kind")
    else:
        np.multiply(scale, scale > _NOT_INVERTIBLE, out=out_scale)
        np.copyto(out_zero_point, zero_point)
    # The sign of a zero minimum depends on the order in which zeros are met: make it +0.0.
    zero_bits = out_zero_point.view(f"u{out_zero_point.itemsize}")
    np.copyto(zero_bits, 0, where=zero_bits == 1 << (8 * out_zero_point.itemsize - 1))


def quantize(values: Float32s, scale: Params, zero_point: Params, *, bits: int, out: npt.NDArray[np.uint8]) -> None:
    """Write the unpacked codes that stored parameters define into ``out[:, :dim]``; the columns beyond stay."""
    affine_kernels.codes_from_params(values, _as_float32(scale), _as_float32(zero_point), np.float32(2**bits - 1), out)


def _as_float32(params: Params) -> Float32s:
    return np.ascontiguousarray(params, dtype=np.float32)
