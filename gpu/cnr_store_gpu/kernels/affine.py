"""Check-N-Run's per-row n-bit codes on the device: parameters, codes and packing in one pass over the rows.

Codes are defined by the *stored* parameters, so they are those of the CPU bit for bit wherever the parameters agree:
always for min-max, and up to the last digits of sums for the grid search.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch

from cnr_store.errors import BadInput, BadShape
from cnr_store_gpu.kernels import reference
from cnr_store_gpu.kernels.dispatch import (
    FLOAT_DTYPES,
    NO_FUSION,
    cdiv,
    check_dtype,
    check_same_device,
    check_shape,
    check_vector,
    is_interpreted,
    on_device,
    power_of_two,
    rows_are_contiguous,
    uses_triton,
)

Search = Literal["minmax", "grid"]

MOST_COLUMNS = 4096
"""A program holds whole rows in registers; wider rows go to the torch reference."""

GRIDS: dict[int, tuple[int, float, int, float]] = {
    2: (4, 0.10, 2, 1.4),
    3: (4, 0.05, 2, 1.4),
    4: (4, 0.03, 2, 1.4),
    8: (1, 0.00, 5, 1.8),
}
"""By bits: grid points per side, grid step in row widths, least-squares steps, over-relaxation. As on the CPU."""

_STORED_AS = {2: torch.int16, 3: torch.uint8, 4: torch.int32, 8: torch.uint8}


def packed_width(dim: int, bits: int) -> int:
    """Return the bytes of one packed row: rows are padded to a multiple of eight codes."""
    return (dim + 7) // 8 * bits


def affine_quantize(
    values: torch.Tensor,
    *,
    bits: int,
    search: Search,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    out_zero_point: torch.Tensor,
    flag: torch.Tensor,
) -> None:
    """Write packed codes of ``values`` with their parameters.

    Parameters
    ----------
    values
        float32, float16 or bfloat16, (n, dim), dim at least 1, read only; rows may lie apart.
    bits
        2, 3, 4 or 8.
    search
        "minmax", or "grid": a grid of ranges and least squares, within 1 % of the CPU's mean squared error.
    out
        uint8 (n, `packed_width`), contiguous, overwritten: little-endian bit stream, eight codes in ``bits`` bytes.
        For 4 and 2 bits its address must be a multiple of 4 and 2, as that of a whole tensor is.
    out_scale, out_zero_point
        float16 or float32 (both the same), (n,), contiguous, overwritten. Element i decodes to
        ``zero_point + scale * code[i]``.
    flag
        int32 (1,): `lattice.UNSTORABLE` is ORed into it if a value is NaN, Inf or beyond what the parameters hold
        (65504 for float16, 2^126 for float32); the codes are valid only if it is still zero.

    Raises
    ------
    BadInput, BadDtype, BadShape

    Notes
    -----
    Does not wait for the device, except that the first call for each ``bits`` and device copies the search's constants
    there.
    """
    _check(values, len(values), bits, search, out, out_scale, out_zero_point, flag)
    _quantize(values.detach(), None, bits, search, out, out_scale, out_zero_point, flag)


def gather_affine(
    source: torch.Tensor,
    rows: torch.Tensor,
    *,
    bits: int,
    search: Search,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    out_zero_point: torch.Tensor,
    flag: torch.Tensor,
) -> None:
    """Write packed codes of ``source[rows]`` without a copy of the rows in between.

    ``rows`` is int64 (n,), contiguous, in range (a row outside is coded as zeros by the Triton kernel). Everything
    else as `affine_quantize`.
    """
    check_vector("rows", rows, (torch.int64,))
    check_same_device(source, rows=rows)
    _check(source, len(rows), bits, search, out, out_scale, out_zero_point, flag)
    _quantize(source.detach(), rows, bits, search, out, out_scale, out_zero_point, flag)


def candidate_list(bits: int) -> list[tuple[float, float, float]]:
    """Return the candidates of the grid: (low, scale, 1 / scale) in row widths, min-max first."""
    points, step, _, _ = GRIDS[bits]
    max_code = 2**bits - 1
    found = []
    for i in range(points):
        for j in range(points):
            # Lopsided candidates at the rim cost a quarter of the time and gain nothing to speak of.
            if max(i, j) < 3 or abs(i - j) <= 1:
                width = 1.0 - (i + j) * step
                found.append((i * step, width / max_code, max_code / width))
    return found


@lru_cache(maxsize=64)
def _candidates(bits: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(candidate_list(bits), dtype=torch.float32, device=device)


def _check(
    source: torch.Tensor,
    num_coded: int,
    bits: int,
    search: str,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    out_zero_point: torch.Tensor,
    flag: torch.Tensor,
) -> None:
    if bits not in GRIDS or search not in ("minmax", "grid"):
        raise BadInput(
            f"codes have 2, 3, 4 or 8 bits, by search 'minmax' or 'grid'; found bits={bits}, search={search!r}",
            found=[bits, search],
        )
    check_dtype("values", source, FLOAT_DTYPES)
    if source.ndim != 2 or source.shape[1] == 0:
        raise BadShape(
            f"values: expected (rows, dim) with at least one column, found {tuple(source.shape)}",
            found=list(source.shape),
        )
    check_dtype("out", out, (torch.uint8,))
    check_shape("out", out, (num_coded, packed_width(source.shape[1], bits)), contiguous=True)
    check_dtype("out_scale", out_scale, (torch.float16, torch.float32))
    check_dtype("out_zero_point", out_zero_point, (out_scale.dtype,))
    check_shape("out_scale", out_scale, (num_coded,), contiguous=True)
    check_shape("out_zero_point", out_zero_point, (num_coded,), contiguous=True)
    check_dtype("flag", flag, (torch.int32,))
    check_shape("flag", flag, (1,))
    check_same_device(source, out=out, out_scale=out_scale, out_zero_point=out_zero_point, flag=flag)


def _quantize(
    source: torch.Tensor,
    rows: torch.Tensor | None,
    bits: int,
    search: str,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    out_zero_point: torch.Tensor,
    flag: torch.Tensor,
) -> None:
    if len(out) == 0:
        return
    dim, is_grid = source.shape[1], search == "grid"
    candidates = _candidates(bits, source.device)
    _, _, fit_steps, relax = GRIDS[bits]
    if not (uses_triton(source) and rows_are_contiguous(source) and dim <= MOST_COLUMNS):
        values = source if rows is None else torch.index_select(source, 0, rows)
        reference.affine_quantize(
            values,
            out,
            out_scale,
            out_zero_point,
            flag,
            bits=bits,
            candidates=candidates if is_grid else None,
            fit_steps=fit_steps,
            relax=relax,
        )
        return
    from cnr_store_gpu.kernels.device import affine as device

    block_rows, block_dim, num_warps = tile(dim)
    with on_device(source):
        device.affine_codes[(cdiv(len(out), block_rows),)](
            source,
            flag if rows is None else rows,
            candidates,
            out.view(_STORED_AS[bits]),
            out_scale,
            out_zero_point,
            flag,
            len(out),
            len(source),
            len(candidates),
            relax,
            dim=dim,
            source_stride=source.stride(0),
            bits=bits,
            fit_steps=fit_steps,
            search=is_grid,
            half=out_scale.dtype == torch.float16,
            gather=rows is not None,
            block_rows=block_rows,
            block_dim=block_dim,
            num_warps=num_warps,
            **NO_FUSION,
        )


def tile(dim: int) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a program: at most 16 elements of the rows for each thread.

    Half of that where rows are read one element at a time: with 16, three bits by 13 columns spilled (sm_90).
    """
    columns = power_of_two(max(dim, 8))
    if is_interpreted():
        return max(1, (1 << 15) // columns), columns, 4
    return max(1, (1024 if dim % 4 else 2048) // columns), columns, 4 if columns <= 2048 else 8
