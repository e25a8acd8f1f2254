"""Copies of the touched rows, weights and slots alike, as they are at one instant: the only stall of a save.

Why this module exists: everything after the gather (encode, compress, put) works on these copies while
training goes on, so weights and slots must come from the same row list at the same step. Buffers are kept
and reused, because a fresh gigabyte costs more in page faults than in copying.

It must never hand out memory that somebody may still be reading: a gather before the last one was released is
refused. This is the CPU reference; nothing here uses streams.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from cnr_store.errors import BadRowIds, BadShape, SaveInProgress
from cnr_store.types import RowIds

GROWTH = 1.125
"""Spare room of a buffer that had to grow: row counts drift, and each growth pays page faults again."""


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What to copy of one table: rows (int64, on the host) of tensors with the table's first dimension."""

    row_ids: RowIds
    tensors: Mapping[str, torch.Tensor]


@dataclass(slots=True)
class Staged:
    """Copies of rows at one instant; valid until ``release``.

    Attributes
    ----------
    row_ids
        By table: int64, as they were asked for.
    tensors
        By table and tensor name: ``(n, ...)``, contiguous, row i is row ``row_ids[i]`` of the source.
        Views of buffers that the next gather overwrites.
    stall_s
        Seconds for which the caller was held up.
    size_bytes
        Bytes of the copies.
    """

    row_ids: dict[str, RowIds]
    tensors: dict[str, dict[str, torch.Tensor]]
    stall_s: float
    size_bytes: int
    _owner: StagingBuffers | None = field(repr=False, default=None)

    def release(self) -> None:
        """Let the next gather reuse the memory. A second call does nothing."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner._in_use = False


def _index_of(row_ids: RowIds | torch.Tensor) -> torch.Tensor:
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


def gather_rows(
    tensors: Mapping[str, torch.Tensor],
    row_ids: RowIds | torch.Tensor,
    *,
    out: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Return copies of the same rows of every tensor: one ``index_select`` each, no autograd.

    Parameters
    ----------
    tensors
        Weights and slots ``(num_rows, ...)``, with the same first dimension. The copy of a sparse one is
        dense.
    row_ids
        int64 ``(n,)`` in ``[0, num_rows)``, in the order in which the copies shall be.
    out
        Contiguous destinations ``(n, ...)`` by name, of the source's dtype and device; fresh memory for
        names it lacks.

    Raises
    ------
    BadShape
        Tensors of different lengths.
    BadRowIds
        Ids of a wrong shape or dtype, or outside the tensors; nothing was written.
    """
    index = _index_of(row_ids)
    lengths = {name: tensor.shape[0] if tensor.ndim else None for name, tensor in tensors.items()}
    if None in lengths.values() or len(set(lengths.values())) > 1:
        raise BadShape(
            f"weights and slots of a table must have the same number of rows, found {lengths}", found=lengths
        )
    if tensors and index.numel():
        num_rows = next(iter(lengths.values())) or 0
        smallest, largest = (int(end) for end in torch.aminmax(index))
        if smallest < 0 or largest >= num_rows:
            raise BadRowIds(
                f"rows to gather lie between {smallest} and {largest}, but the tensors have rows 0 to {num_rows - 1}",
                expected=num_rows,
                found=(smallest, largest),
            )
    copies: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            source, rows = tensor.detach(), index.to(tensor.device)
            target = None if out is None else out.get(name)
            if source.is_sparse:  # the momentum of SGD under sparse gradients
                chosen = torch.index_select(source, 0, rows).to_dense()
                copies[name] = chosen if target is None else target.copy_(chosen)
            elif target is None:
                copies[name] = torch.index_select(source, 0, rows)
            else:
                copies[name] = torch.index_select(source, 0, rows, out=target)
    return copies


class StagingBuffers:
    """Memory for one gather at a time, kept between gathers.

    Attributes
    ----------
    stall_s
        Seconds that all gathers held up their caller.
    last_stall_s
        Seconds of the last one.

    Examples
    --------
    >>> buffers = StagingBuffers()
    >>> staged = buffers.gather({"t": RowRequest(np.array([2, 0]), {"weight": torch.arange(6.0).view(3, 2)})})
    >>> staged.tensors["t"]["weight"]
    tensor([[4., 5.],
            [0., 1.]])
    >>> staged.release()
    """

    def __init__(self) -> None:
        self.stall_s = 0.0
        self.last_stall_s = 0.0
        self._flat: dict[tuple[str, str, torch.dtype, torch.device], torch.Tensor] = {}
        self._in_use = False

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())

    @property
    def in_use(self) -> bool:
        """Whether the last gather has not been released."""
        return self._in_use

    def gather(self, requests: Mapping[str, RowRequest]) -> Staged:
        """Copy the asked rows of all tables now; blocks until they are copied.

        Call it at a step boundary, from the thread that trains: nothing may write the tables meanwhile.

        Parameters
        ----------
        requests
            Rows and tensors by table. A table without rows yields tensors ``(0, ...)``.

        Raises
        ------
        SaveInProgress
            The copies of the last gather were not released.
        BadShape, BadRowIds
            As ``gather_rows``.
        """
        if self._in_use:
            raise SaveInProgress(
                "the copies of the last save are still being read; release them first, or save less often"
            )
        started = time.perf_counter()
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for table, request in requests.items():
            out = {
                name: self._buffer(table, name, tensor, len(request.row_ids))
                for name, tensor in request.tensors.items()
                if tensor.ndim
            }
            tensors[table] = gather_rows(request.tensors, request.row_ids, out=out)
        self.last_stall_s = time.perf_counter() - started
        self.stall_s += self.last_stall_s
        self._in_use = True
        size_bytes = sum(t.numel() * t.element_size() for named in tensors.values() for t in named.values())
        row_ids = {table: request.row_ids for table, request in requests.items()}
        return Staged(row_ids, tensors, self.last_stall_s, size_bytes, self)

    def free(self) -> None:
        """Give the memory back. Copies that nobody released stay valid, and are no longer reused."""
        self._flat.clear()
        self._in_use = False

    def _buffer(self, table: str, name: str, tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
        key = (table, name, tensor.dtype, tensor.device)
        row_shape = tuple(tensor.shape[1:])
        needed = num_rows * int(np.prod(row_shape, dtype=np.int64))
        flat = self._flat.get(key)
        if flat is None or flat.numel() < needed:
            self._flat.pop(key, None)
            del flat  # before the larger one is allocated, so that the peak is one buffer, not two
            whole_table = tensor.numel()
            flat = torch.empty(
                min(int(needed * GROWTH), max(whole_table, needed)), dtype=tensor.dtype, device=tensor.device
            )
            self._flat[key] = flat
        return flat[:needed].view(num_rows, *row_shape)
