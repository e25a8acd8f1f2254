"""Lattice codes of rows on the device.

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
    on_device,
    rows_are_contiguous,
    tile_of,
    uses_triton,
)


def lattice_quantize(values: torch.Tensor, scale: float, out: torch.Tensor, flag: torch.Tensor) -> None:
    """Write the codes of ``values``.

    Parameters
    ----------
    values
        float32, float16 or bfloat16, (n, dim) or (n,), read only; rows may lie apart.
    scale
        Step of the lattice, positive, taken as float32.
    out
        int16, the shape of ``values``, contiguous, overwritten. A value without a code gets 0.
    flag
        int32 (1,) on the device; 1 is ORed into it if a value has no code: NaN, Inf, or a code outside
        [-32767, 32767]. Zero it before, read it when the codes are read: they are valid only if it is still zero.

    Raises
    ------
    BadDtype, BadShape, BadInput

    Notes
    -----
    Does not wait for the device.
    """
    check_dtype("values", values, FLOAT_DTYPES)
    check_dtype("out", out, (torch.int16,))
    check_dtype("flag", flag, (torch.int32,))
    check_shape("out", out, tuple(values.shape), contiguous=True)
    check_shape("flag", flag, (1,))
    check_same_device(values, out=out, flag=flag)
    if out.numel() == 0:
        return
    matrix = as_matrix("values", values)
    if not (uses_triton(values) and rows_are_contiguous(matrix)):
        reference.lattice_quantize(values.detach(), scale, out, flag)
        return
    from cnr_store_gpu.kernels.device import lattice as device

    dim = matrix.shape[1]
    block_rows, block_dim = tile_of(dim)
    with on_device(values):
        device.lattice_codes[(cdiv(len(out), block_rows), cdiv(dim, block_dim))](
            matrix.detach(),
            out,
            flag,
            len(out),
            scale,
            dim=dim,
            source_stride=matrix.stride(0),
            block_rows=block_rows,
            block_dim=block_dim,
            num_warps=4,
            **NO_FUSION,
        )
