"""Copies of the same rows of weights and slots: which rows, from which tensors, at one instant.

Why this module exists: a row's weight and its optimizer state belong together, so they are read by one row list,
checked once, before any of them is written. Nothing here knows of buffers, streams or saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import torch

from cnr_store.errors import BadRowIds, BadShape
from cnr_store.types import RowIds
from cnr_store_gpu import kernels

RowsOn = Callable[[torch.device], torch.Tensor]
"""The row list, on the device of a source."""


class RowRequest(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What to copy of one table: rows of tensors with the table's first dimension.

    Attributes
    ----------
    row_ids
        int64 ``(n,)``: on the host, or a tensor on the device of the sources, which is then not waited for.
    tensors
        Weights and slots by name; live, read only.
    device_rows
        The same ids, int64, where the sources are, if ``row_ids`` are on the host: those are not copied there then.
        The two are not compared.
    """

    row_ids: RowIds | torch.Tensor
    tensors: Mapping[str, torch.Tensor]
    device_rows: torch.Tensor | None = None


def index_of(row_ids: RowIds | torch.Tensor) -> torch.Tensor:
    """Return row ids as a tensor, where they are; shares their memory.

    Raises
    ------
    BadRowIds
        They are not one dimension of integers.
    """
    if isinstance(row_ids, torch.Tensor):
        index = row_ids
    else:  # torch takes no read-only memory
        index = torch.from_numpy(np.require(row_ids, requirements=["C", "W"]))
    if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        raise BadRowIds(
            f"row ids: expected one dimension of int64, found {tuple(index.shape)} of {index.dtype}",
            expected="int64",
            found=str(index.dtype),
        )
    return index


def common_rows(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the number of rows that all tensors have, 0 if there are none.

    Raises
    ------
    BadShape
        They have different numbers, or one has no dimension.
    """
    lengths = {name: tensor.shape[0] if tensor.ndim else None for name, tensor in tensors.items()}
    if None in lengths.values() or len(set(lengths.values())) > 1:
        raise BadShape(
            f"weights and slots of a table must have the same number of rows, found {lengths}", found=lengths
        )
    return next(iter(lengths.values()), 0) or 0


def check_range(index: torch.Tensor, num_rows: int) -> None:
    """Raise BadRowIds unless all ids lie in ``[0, num_rows)``; waits for the device that the ids are on."""
    if index.numel() == 0:
        return
    if index.device.type == "cpu":  # 100k ids: torch.aminmax 1 to 3 ms, numpy 0.1 ms
        ids = index.numpy()
        smallest, largest = int(ids.min()), int(ids.max())
    else:
        smallest, largest = (int(end) for end in torch.aminmax(index))
    if smallest < 0 or largest >= num_rows:
        raise BadRowIds(
            f"rows to gather lie between {smallest} and {largest}, but the tensors have rows 0 to {num_rows - 1}",
            expected=num_rows,
            found=(smallest, largest),
        )


@torch.no_grad()
def select_rows(
    tensors: Mapping[str, torch.Tensor], rows_on: RowsOn, out: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return copies of the same rows of every tensor, for ids that are known to be good; no autograd.

    Queues on the current streams. ``out``: contiguous destinations ``(n, ...)`` by name, of the source's dtype and
    device; fresh memory for names it lacks. The copy of a sparse tensor is dense.
    """
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        source = tensor.detach()
        rows, target = rows_on(source.device), out.get(name)
        if source.is_sparse:  # the momentum of SGD under sparse gradients
            chosen = torch.index_select(source, 0, rows).to_dense()
            copies[name] = chosen if target is None else target.copy_(chosen)
        elif target is None:
            copies[name] = torch.index_select(source, 0, rows)
        elif kernels.uses_triton(source) and source.ndim <= 2 and rows.dtype == torch.int64:
            kernels.gather_rows(source, rows, target)
            copies[name] = target
        else:
            copies[name] = torch.index_select(source, 0, rows, out=target)
    return copies
