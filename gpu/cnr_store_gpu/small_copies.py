"""Copies of a few rows of each of many tables in host memory: all of them by one call.

Why this module exists: a save copies while the training waits, and a call of torch per tensor takes longer than the
rows of a small table. Here Python collects addresses, and one kernel copies. What is not small, not in host memory or
not contiguous is copied by torch, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import carray  # type: ignore[attr-defined]

from cnr_store.runtime.addresses import address_of, int32s_at, int64s_at
from cnr_store.runtime.jit import njit
from cnr_store.types import RowIds
from cnr_store_gpu.delivery import Delivery, KeptMemory
from cnr_store_gpu.gather import RowRequest, check_range, index_of

SMALL_BYTES = 1 << 18
"""Copies of one table above it go through torch: there its threads count for more than the call."""

_UNIT = 4
_ALIGNMENT = 16


class _Piece(NamedTuple):
    """Where the copies of ``num_rows`` rows of a tensor of ``shape`` begin and end."""

    table: str
    name: str
    dtype: torch.dtype
    shape: torch.Size
    num_rows: int
    start: int
    stop: int


@dataclass(slots=True)
class SmallCopies:
    """The small ones among the requests of a gather: collected by `take`, copied by `copy`, described by `deliver`.

    Attributes
    ----------
    row_ids
        Of the tables that were taken.
    size_bytes
        Bytes of their copies.
    """

    quantized: Container[str]
    row_ids: dict[str, RowIds] = field(default_factory=dict)
    size_bytes: int = 0
    _end: int = 0
    _most: int = 0
    _pieces: list[_Piece] = field(default_factory=list)
    _parts: list[tuple[int, ...]] = field(default_factory=list)
    _flat: torch.Tensor | None = None

    def take(self, table: str, request: RowRequest) -> bool:
        """Return whether a request is small and plain; then its rows will be copied."""
        ids = request.row_ids
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
            return False
        if table in self.quantized or not request.tensors:
            return False
        count, end, most, size_bytes = len(ids), self._end, self._most, 0
        address = address_of(ids)
        pieces, parts, lengths = [], [], set()
        for name, tensor in request.tensors.items():
            shape = tensor.shape
            if not (shape and tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous()):
                return False
            num_rows, start = shape[0], tensor.data_ptr()
            row_bytes = tensor.nbytes // num_rows if num_rows else 0
            if not (row_bytes and start) or row_bytes % _UNIT or start % _UNIT:  # no address: storage was freed
                return False
            lengths.add(num_rows)
            begin = _aligned(end)
            end = begin + count * row_bytes
            most = _aligned(most) + num_rows * row_bytes
            size_bytes += count * row_bytes
            pieces.append(_Piece(table, name, tensor.dtype, shape, count, begin, end))
            parts.append((address, count, num_rows, start, begin, row_bytes // _UNIT))
        if len(lengths) > 1 or size_bytes > SMALL_BYTES:
            return False
        self.row_ids[table], self._end, self._most = ids, end, most
        self.size_bytes += size_bytes
        self._pieces += pieces
        self._parts += parts
        return True

    def copy(self, requests: Mapping[str, RowRequest], memory: KeptMemory) -> None:
        """Copy the rows of what was taken of ``requests``, as they are now. Blocks until it is done.

        Raises
        ------
        BadRowIds
            Ids outside of a table; nothing was written.
        """
        self._flat = memory.take(("small rows", "", ""), (self._end,), torch.uint8, at_most=self._most)
        parts = np.array(self._parts, np.int64).reshape(-1, PART_FIELDS)
        parts[:, 4] += self._flat.data_ptr()
        outside = gather_parts(parts)
        if outside >= 0:
            piece = self._pieces[outside]
            request = requests[piece.table]
            check_range(index_of(request.row_ids), request.tensors[piece.name].shape[0])

    def deliver(self) -> Delivery:
        """Return the copies, as tensors that share the memory they are in."""
        assert self._flat is not None  # copied
        tensors = {
            (one.table, one.name): self._flat[one.start : one.stop].view(one.dtype).view(one.num_rows, *one.shape[1:])
            for one in self._pieces
        }
        return Delivery(tensors, size_bytes=self.size_bytes)


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT


PART_FIELDS = 6
"""Numbers of a part of `gather_parts`."""


@njit(nogil=True)
def _part_outside(parts: Any) -> int:
    for k in range(parts.shape[0]):
        ids = carray(int64s_at(parts[k, 0]), (parts[k, 1],))
        end = np.uint64(parts[k, 2])
        for i in range(ids.size):
            if np.uint64(ids[i]) >= end:  # a negative id is a huge one
                return k
    return -1


@njit(nogil=True)
def _gather_parts(parts: Any) -> None:
    for k in range(parts.shape[0]):
        count, size = parts[k, 1], parts[k, 5]
        ids = carray(int64s_at(parts[k, 0]), (count,))
        rows = carray(int32s_at(parts[k, 3]), (parts[k, 2], size))
        out = carray(int32s_at(parts[k, 4]), (count, size))
        for i in range(count):
            row = ids[i]
            for j in range(size):
                out[i, j] = rows[row, j]


def gather_parts(parts: npt.NDArray[np.int64]) -> int:
    """Copy rows of many tensors: ``index_select`` of each, in one call. Reads and writes by address.

    Parameters
    ----------
    parts
        int64 ``(num_parts, 6)``: address of the ids (int64), how many, rows of the source, its address, that of the
        copy, and the size of a row in units of 4 bytes, to which addresses are aligned. All is contiguous, and the
        caller keeps it alive.

    Returns
    -------
    int
        -1, or the first part with an id outside of its source: then nothing was written.
    """
    outside = int(_part_outside(parts))
    if outside < 0:
        _gather_parts(parts)
    return outside
