"""Compiling the kernels ahead of the first snapshot, which would otherwise pay for it (0.1 to 3 s each)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from cnr_store_gpu.kernels.copying import gather_rows
from cnr_store_gpu.kernels.dispatch import uses_triton
from cnr_store_gpu.kernels.lattice import lattice_quantize
from cnr_store_gpu.kernels.marking import mark, mark_slices
from cnr_store_gpu.kernels.taking import take_rows


def warmup(
    device: torch.device | str,
    *,
    dims: Iterable[int] = (1, 16, 32, 64, 128),
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    num_tables: Iterable[int] = (1,),
    num_slices: Iterable[int] = (),
) -> None:
    """Compile (or load from triton's cache) what a training run with these tables launches. Waits for the device.

    Parameters
    ----------
    device
        Where the tables live. Nothing is done where the torch reference runs.
    dims
        Columns of the tables, and 1 for row-wise slots. A kernel is compiled for each; rows that lie apart (column
        views) compile on their own at their first use.
    dtypes
        dtypes of the tables.
    num_tables, num_slices
        How many tables `take_rows` is given at a time, and how many slices `mark_slices` is.
    """
    device = torch.device(device)
    words = torch.zeros(64, dtype=torch.int32, device=device)
    if not uses_triton(words):
        return
    for index_dtype in (torch.int64, torch.int32):
        ids = torch.zeros(2, dtype=index_dtype, device=device)
        mark(words, ids, 0, 64)
        for count in num_slices:
            places = torch.zeros(count + 1, dtype=torch.int64, device=device)
            mark_slices(words, ids, places, places[1:], places[1:])
    for count in num_tables:
        many = torch.zeros(32 * count, dtype=torch.int32, device=device)
        take_rows(many, [(32 * table, 32) for table in range(count)])
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in dims:
        for dtype in dtypes:
            _warm_rows(torch.zeros((2, dim), dtype=dtype, device=device), rows)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _warm_rows(table: torch.Tensor, rows: torch.Tensor) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device=table.device)
    copies = torch.empty_like(table[:1])
    gather_rows(table, rows, copies)
    lattice_quantize(copies, 1.0, torch.zeros(copies.shape, dtype=torch.int16, device=table.device), flag)
