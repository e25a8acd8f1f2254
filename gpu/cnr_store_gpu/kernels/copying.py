"""Copies of rows of tables and slots by number, of any dtype with elements of 1, 2, 4 or 8 bytes."""

from __future__ import annotations

import torch

from cnr_store.errors import BadDtype
from cnr_store_gpu.kernels import reference
from cnr_store_gpu.kernels.dispatch import (
    NO_FUSION,
    as_matrix,
    cdiv,
    check_dtype,
    check_same_device,
    check_shape,
    check_vector,
    on_device,
    rows_are_contiguous,
    tile_of,
    uses_triton,
)

_OPAQUE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_rows(source: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Write the rows ``source[rows]`` to ``out``.

    Parameters
    ----------
    source
        (num_rows, dim) or (num_rows,), read only; also a view of some columns of a wider table.
    rows
        int64 (n,), contiguous, in ``[0, num_rows)``, on the device of ``source``. The Triton kernel cannot raise: it
        gathers zeros for a row outside.
    out
        (n, dim) or (n,), contiguous, of the dtype and device of ``source``, overwritten. Owned by the caller.

    Raises
    ------
    BadDtype, BadShape, BadInput

    Notes
    -----
    Does not wait for the device. NaN payloads and negative zeros stay.
    """
    check_vector("rows", rows, (torch.int64,))
    check_dtype("out", out, (source.dtype,))
    check_shape("out", out, (len(rows), *source.shape[1:]), contiguous=True)
    check_same_device(source, rows=rows, out=out)
    if source.element_size() not in _OPAQUE:
        raise BadDtype(
            f"elements of 1, 2, 4 or 8 bytes can be copied by row, not {source.dtype}", found=str(source.dtype)
        )
    if out.numel() == 0:
        return
    matrix = as_matrix("source", source)
    if not (uses_triton(source) and rows_are_contiguous(matrix)):
        reference.gather_rows(source.detach(), rows, out)
        return
    from cnr_store_gpu.kernels.device import copy as device

    opaque, dim = _OPAQUE[source.element_size()], matrix.shape[1]
    block_rows, block_dim = tile_of(dim)
    with on_device(source):
        device.gather_rows[(cdiv(len(rows), block_rows), cdiv(dim, block_dim))](
            matrix.detach().view(opaque),
            rows,
            as_matrix("out", out).detach().view(opaque),
            len(rows),
            len(matrix),
            dim=dim,
            source_stride=matrix.stride(0),
            block_rows=block_rows,
            block_dim=block_dim,
            num_warps=4,
            **NO_FUSION,
        )
