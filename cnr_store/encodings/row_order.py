"""Rows moved into the order of a key, and back: a counting sort of int16 keys, stable. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import kernels

Array = npt.NDArray[Any]


def into_order(block: Array, keys: Array) -> Array:
    """Return the rows of ``block`` (n, width) in the stable order of the int16 ``keys`` (n,); copied."""
    ordered = np.empty(block.shape, block.dtype)
    kernels.sort_rows(block, keys, ordered)
    return ordered


def out_of_order(ordered: Array, keys: Array, out: Array) -> None:
    """Write rows that `into_order` moved back where they were, to ``out`` (n, width), which is other memory."""
    kernels.unsort_rows(ordered, keys, out)
