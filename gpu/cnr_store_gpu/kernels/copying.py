"""Copying rows of tables and slots by number, of any dtype with elements of 1, 2, 4 or 8 bytes."""

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
    is_interpreted,
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
    _check_copy(source, rows, "out", out)
    if out.numel() == 0:
        return
    matrix, target = as_matrix("source", source), as_matrix("out", out)
    if uses_triton(source) and rows_are_contiguous(matrix):
        _launch(matrix, rows, target, table_rows=len(matrix), scatter=False)
    else:
        reference.gather_rows(source.detach(), rows, out)


def set_rows(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` to the rows ``target[rows]``.

    Parameters
    ----------
    target
        (num_rows, dim) or (num_rows,), written in place; also a view of some columns of a wider table.
    rows
        int64 (n,), contiguous, unique, in ``[0, num_rows)``. The Triton kernel leaves a row outside out.
    values
        (n, dim) or (n,), contiguous, of the dtype and device of ``target``. Read only.

    Raises
    ------
    BadDtype, BadShape, BadInput

    Notes
    -----
    Does not wait for the device.
    """
    _check_copy(target, rows, "values", values)
    if values.numel() == 0:
        return
    matrix, source = as_matrix("target", target), as_matrix("values", values)
    if uses_triton(target) and rows_are_contiguous(matrix):
        _launch(source, rows, matrix, table_rows=len(matrix), scatter=True)
    else:
        reference.set_rows(target.detach(), rows, values.detach())


def _check_copy(table: torch.Tensor, rows: torch.Tensor, name: str, copies: torch.Tensor) -> None:
    check_vector("rows", rows, (torch.int64,))
    check_dtype(name, copies, (table.dtype,))
    check_shape(name, copies, (len(rows), *table.shape[1:]), contiguous=True)
    check_same_device(table, rows=rows, **{name: copies})
    if table.element_size() not in _OPAQUE:
        raise BadDtype(
            f"elements of 1, 2, 4 or 8 bytes can be copied by row, not {table.dtype}", found=str(table.dtype)
        )


def _launch(source: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, *, table_rows: int, scatter: bool) -> None:
    from cnr_store_gpu.kernels.device import copy as device

    opaque, dim = _OPAQUE[source.element_size()], source.shape[1]
    block_rows, block_dim = tile_of(dim, elements=1 << 15 if is_interpreted() else 2048)
    with on_device(source):
        device.copy_rows[(cdiv(len(rows), block_rows), cdiv(dim, block_dim))](
            source.detach().view(opaque),
            rows,
            target.detach().view(opaque),
            len(rows),
            table_rows,
            dim=dim,
            source_stride=source.stride(0),
            target_stride=target.stride(0),
            scatter=scatter,
            block_rows=block_rows,
            block_dim=block_dim,
            num_warps=4,
            **NO_FUSION,
        )
