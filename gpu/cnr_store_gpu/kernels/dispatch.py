"""Which of the two implementations runs, and what both demand of their arguments.

Triton runs where the tensors are on a GPU and triton can be imported; under ``TRITON_INTERPRET=1`` (how the kernels
are tested without a GPU) it also runs on CPU tensors. Everything else is the torch reference. Nothing here waits for
a device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from functools import lru_cache
from typing import Any

import torch

from cnr_store.errors import BadDtype, BadInput, BadShape

INT_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

NO_FUSION: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch option of every kernel: a fused multiply-add rounds once where the encodings round twice."""


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return whether triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return whether Triton kernels run on CPU tensors, in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(tensor: torch.Tensor) -> bool:
    """Return whether a kernel on this tensor is a Triton kernel (else the torch reference)."""
    return (tensor.is_cuda or is_interpreted()) and has_triton()


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Triton launches on the tensor's device and its current stream."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def cdiv(size: int, block: int) -> int:
    """Return how many blocks hold ``size``."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def tile_of(dim: int) -> tuple[int, int]:
    """Return (rows, columns) of a tile that covers ``dim`` columns, at most 256; larger ones in the interpreter."""
    columns = min(power_of_two(dim), 256)
    return (1 << 15 if is_interpreted() else 2048) // columns, columns


def as_matrix(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as (rows, columns): a slot ``(n,)`` becomes one column, a view."""
    if tensor.ndim not in (1, 2):
        raise BadShape(
            f"{name}: expected (rows, dim) or (rows,), found {tuple(tensor.shape)}; flatten the dimensions of a row",
            found=list(tensor.shape),
        )
    return tensor.unsqueeze(1) if tensor.ndim == 1 else tensor


def rows_are_contiguous(*matrices: torch.Tensor) -> bool:
    """Return whether the elements of each row are neighbours, as the kernels need them."""
    return all(matrix.stride(1) == 1 or matrix.shape[1] <= 1 for matrix in matrices)


def check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Raise BadDtype unless the tensor has one of the dtypes."""
    if tensor.dtype not in allowed:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise BadDtype(f"{name}: expected {expected}, found {tensor.dtype}", expected=expected, found=str(tensor.dtype))


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *, contiguous: bool = False) -> None:
    """Raise BadShape unless the tensor has the shape, and is contiguous if asked for."""
    if tuple(tensor.shape) != shape or (contiguous and not tensor.is_contiguous()):
        raise BadShape(
            f"{name}: expected {shape}{', contiguous' if contiguous else ''}, found {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}",
            expected=list(shape),
            found=list(tensor.shape),
        )


def check_vector(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...] = INT_DTYPES) -> None:
    """Raise BadDtype or BadShape unless the tensor is one-dimensional, contiguous and of one of the dtypes."""
    check_dtype(name, tensor, dtypes)
    check_shape(name, tensor, (tensor.numel(),), contiguous=True)


def check_same_device(first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise BadInput unless all tensors are on one device."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise BadInput(
                f"{name} is on {tensor.device}, but the other tensors are on {first.device}; move it first",
                expected=str(first.device),
                found=str(tensor.device),
            )
