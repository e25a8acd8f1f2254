"""Lattice codes on the device: rows quantized, gathered or not.

The codes are those of the CPU, bit for bit: ``rint(x / scale)`` with one correctly rounded fp32 division. 16-bit floats
are widened exactly first.
"""

from __future__ import annotations

import torch

from cnr_store_gpu.kernels import reference
from cnr_store_gpu.kernels.dispatch import (
    FLOAT_DTYPES,
    NO_FUSION,
    as_matrix,
    cdiv,
    check_dtype,
    check_same_device,
    check_shape,
    check_vector,
    is_interpreted,
    on_device,
    rows_are_contiguous,
    tile_of,
    uses_triton,
)

UNSTORABLE = 1
"""Bit of a flag: a value was NaN, Inf, or beyond what the encoding holds (lattice: 2^21 steps)."""

TOO_WIDE = 2
"""Bit of a flag: a code left [-32767, 32767]; quantize again into int32."""

_CODES = (torch.int16, torch.int32)


def lattice_quantize(values: torch.Tensor, scale: float, out: torch.Tensor, flag: torch.Tensor) -> None:
    """Write the codes of ``values``.

    Parameters
    ----------
    values
        float32, float16 or bfloat16, (n, dim) or (n,), read only; rows may lie apart.
    scale
        Step of the lattice, positive, taken as float32.
    out
        int16 or int32, the shape of ``values``, contiguous, overwritten. A value that cannot be stored gets code 0.
    flag
        int32 (1,) on the device; `UNSTORABLE` and `TOO_WIDE` are ORed into it. Zero it before, read it when the codes
        are read: the codes are valid only if it is still zero.

    Raises
    ------
    BadDtype, BadShape, BadInput

    Notes
    -----
    Does not wait for the device.
    """
    _check_codes(values, out, flag, len(values))
    if out.numel() == 0:
        return
    matrix = as_matrix("values", values)
    if uses_triton(values) and rows_are_contiguous(matrix):
        _launch_codes(matrix, None, scale, out, flag)
    else:
        reference.lattice_quantize(values.detach(), scale, out, flag)


def gather_lattice(
    source: torch.Tensor, rows: torch.Tensor, scale: float, out: torch.Tensor, flag: torch.Tensor
) -> None:
    """Write the codes of ``source[rows]`` without a copy of the rows in between.

    ``rows`` is int64 (n,), contiguous, in range (a row outside gets codes 0 from the Triton kernel); ``out`` is
    (n, dim) or (n,). Everything else as `lattice_quantize`.
    """
    check_vector("rows", rows, (torch.int64,))
    check_same_device(source, rows=rows)
    _check_codes(source, out, flag, len(rows))
    if out.numel() == 0:
        return
    matrix = as_matrix("source", source)
    if uses_triton(source) and rows_are_contiguous(matrix):
        _launch_codes(matrix, rows, scale, out, flag)
    else:
        reference.lattice_quantize(torch.index_select(source.detach(), 0, rows), scale, out, flag)


def _check_codes(source: torch.Tensor, out: torch.Tensor, flag: torch.Tensor, num_coded: int) -> None:
    check_dtype("values", source, FLOAT_DTYPES)
    check_dtype("out", out, _CODES)
    check_dtype("flag", flag, (torch.int32,))
    check_shape("out", out, (num_coded, *source.shape[1:]), contiguous=True)
    check_shape("flag", flag, (1,))
    check_same_device(source, out=out, flag=flag)


def _launch_codes(
    source: torch.Tensor, rows: torch.Tensor | None, scale: float, out: torch.Tensor, flag: torch.Tensor
) -> None:
    from cnr_store_gpu.kernels.device import lattice as device

    dim = source.shape[1]
    block_rows, block_dim = _tile(dim)
    with on_device(source):
        device.lattice_codes[(cdiv(len(out), block_rows), cdiv(dim, block_dim))](
            source.detach(),
            flag if rows is None else rows,
            out,
            flag,
            len(out),
            len(source),
            scale,
            dim=dim,
            source_stride=source.stride(0),
            gather=rows is not None,
            narrow=out.dtype == torch.int16,
            block_rows=block_rows,
            block_dim=block_dim,
            num_warps=4,
            **NO_FUSION,
        )


def _tile(dim: int) -> tuple[int, int]:
    return tile_of(dim, elements=1 << 15 if is_interpreted() else 2048)
