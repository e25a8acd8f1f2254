"""The same memory as an array and as a tensor: numpy has no bfloat16, and carries it as uint16. Needs torch."""

from __future__ import annotations

import numpy as np
import torch

from cnr_store.errors import BadInput
from cnr_store.segment.codes import Array

_SHARED_AS: dict[torch.dtype, tuple[torch.dtype, str]] = {
    torch.bfloat16: (torch.int16, "uint16"),
    torch.bool: (torch.uint8, "uint8"),
}
_LOGICAL = {"bfloat16": torch.bfloat16, "bool": torch.bool}


def array_of(tensor: torch.Tensor) -> Array:
    """Return the memory of a CPU tensor as numpy carries it (bfloat16 as uint16): a view, nothing is copied.

    Raises
    ------
    BadInput
        The tensor is on another device.
    """
    if tensor.device.type != "cpu":
        raise BadInput(f"a lookup writes to memory of the host, found a tensor on {tensor.device}; copy it from there")
    detached = tensor.detach()
    if tensor.dtype in _SHARED_AS:
        shared, carried = _SHARED_AS[tensor.dtype]
        array: Array = detached.view(shared).numpy().view(carried)
        return array
    plain: Array = detached.numpy()
    return plain


def tensor_of(array: Array, dtype: str) -> torch.Tensor:
    """Return a tensor over an array's memory; ``dtype``: the logical one, ``bfloat16``, ``bool`` or the array's."""
    if dtype not in _LOGICAL:
        return torch.from_numpy(array)
    shared = np.int16 if dtype == "bfloat16" else np.uint8
    return torch.from_numpy(array.view(shared)).view(_LOGICAL[dtype])
