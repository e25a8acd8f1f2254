"""Converts torch tensors to the arrays of a store and back: the only module that maps torch dtypes to stored dtypes.

numpy has no bfloat16, so its bits are stored as uint16. Tables outside host memory are copied in windows of rows, so
nothing here needs memory for a whole table.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from cnr_store.errors import BadDtype, CorruptStore
from cnr_store.format.document_tree import TensorLeaf
from cnr_store.runtime import threads
from cnr_store.types import RowIds, TableDtype
from cnr_store_gpu.memory import check_held

Array = npt.NDArray[Any]

WINDOW_BYTES = 64 * 1024 * 1024
"""Largest size in bytes of one window of rows when a table is copied to or from another device."""

_CARRIERS: dict[torch.dtype, tuple[torch.dtype, str, str]] = {
    torch.bfloat16: (torch.int16, "uint16", "bfloat16"),
    torch.bool: (torch.uint8, "uint8", "bool"),
}
"""Torch dtype to (torch dtype numpy can share, numpy dtype it is stored as, logical name)."""

_PLAIN = {
    torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip
_TABLE_DTYPES: dict[torch.dtype, TableDtype] = {
    torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
}  # fmt: skip

WEIGHT = "\0weight"
"""Key of a table's weights among its staged tensors; no slot can have it."""


def table_dtype_name(tensor: torch.Tensor, name: str) -> TableDtype:
    """Return the name that the format uses for the dtype of a table or slot.

    Raises
    ------
    BadDtype
    """
    found = _TABLE_DTYPES.get(tensor.dtype)
    if found is None:
        raise BadDtype(
            f"{name} has dtype {tensor.dtype}; tables and their slots are float32, float16 or bfloat16",
            table=name, expected=sorted(_TABLE_DTYPES.values()), found=str(tensor.dtype),
        )  # fmt: skip
    return found


def dense_dtype_name(tensor: torch.Tensor, name: str) -> str:
    """Return the logical dtype that a dense tensor is stored under.

    Raises
    ------
    BadDtype
    """
    if tensor.dtype in _CARRIERS:
        return _CARRIERS[tensor.dtype][2]
    if tensor.dtype not in _PLAIN:
        raise BadDtype(f"tensor {name!r} has dtype {tensor.dtype}, which a store cannot hold", found=str(tensor.dtype))
    return str(tensor.dtype).removeprefix("torch.")


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor's elements as a numpy array, which shares the memory of a contiguous host tensor."""
    if tensor.dtype not in _CARRIERS and tensor.is_cpu and not tensor.requires_grad and tensor.is_contiguous():
        return tensor.numpy()
    host = tensor.detach().cpu().contiguous()
    if host.dtype not in _CARRIERS:
        return host.numpy()
    shared, stored, _ = _CARRIERS[host.dtype]
    return host.view(shared).numpy().view(stored)


@cache
def _array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of `as_array`."""
    return as_array(torch.empty(0, dtype=dtype, device="cpu")).dtype


def as_tensor(array: Array, dtype: str) -> torch.Tensor:
    """Return a tensor of logical ``dtype`` that shares the memory of a stored array."""
    for torch_dtype, (shared, _, logical) in _CARRIERS.items():
        if logical == dtype:
            return torch.from_numpy(array.view(str(shared).removeprefix("torch."))).view(torch_dtype)
    return torch.from_numpy(array)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory that later training does not change."""
    if tensor.is_cpu:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor.detach().to("cpu", copy=True).contiguous()


def leaf_of(value: Any) -> TensorLeaf | None:
    """Return a torch tensor as the leaf of a stored tree, None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    return TensorLeaf(as_array(value).copy(), f"torch.{dense_dtype_name(value, 'a tensor in nested state')}")


def tensor_of(leaf: TensorLeaf) -> Any:
    """Return the tensor that `leaf_of` converted; a leaf that another program wrote is returned as its array.

    Raises
    ------
    CorruptStore
        The array cannot be a tensor of that kind.
    """
    if not leaf.kind.startswith("torch."):
        return leaf.array
    try:
        return as_tensor(leaf.array, leaf.kind.removeprefix("torch."))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CorruptStore(f"a {leaf.array.dtype} array in a document cannot be a {leaf.kind}: {error}") from error


class TensorRows:
    """The rows of a strided tensor (n, width) or (n,) on any device, as an object that is sliced like an array.

    A slice copies only its rows; of a host tensor it is a view. It raises `MemoryMoved` if the tensor's memory is gone.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self.shape: tuple[int, ...] = tuple(self._tensor.shape)
        self.ndim = self._tensor.ndim
        self.dtype = _array_dtype(tensor.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | RowIds) -> Array:
        check_held(self._tensor, "a table that is saved whole")
        if isinstance(rows, slice):
            return as_array(self._tensor[rows])
        return as_array(self._tensor[torch.from_numpy(rows).to(self._tensor.device)])


def flat_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return row state in the shape of the format: (n, 1) becomes a vector (n,), a sparse tensor becomes dense."""
    strided = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return strided.squeeze(1) if strided.ndim == 2 and strided.shape[1] == 1 else strided


def slot_kind(slot: torch.Tensor) -> Literal["row", "element"]:
    """Return whether a slot has one number per row or one per element. Reads the shape only, unlike `flat_rows`."""
    shape = slot.shape
    return "row" if len(shape) == 1 or shape[1:] == (1,) else "element"


def writable_array(tensor: torch.Tensor) -> Array | None:
    """Return an array that shares a host tensor's memory, None if it has none that numpy can write to."""
    held = tensor.detach()
    if held.device.type != "cpu" or held.layout is not torch.strided or not held.is_contiguous():
        return None
    return as_array(held)


def windows(num_rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Return half-open row ranges of at most `WINDOW_BYTES`."""
    return threads.windows(num_rows, row_bytes, WINDOW_BYTES)
