"""Rows moved into the order of a key, and back: a counting sort of int16 keys, stable. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import row_kernels

Array = npt.NDArray[Any]


def into_order(block: Array, keys: Array) -> Array:
    """Return the rows of ``block`` (n, width) in the stable order of the int16 ``keys`` (n,); copied."""
    ordered = np.empty(block.shape, block.dtype)
    row_kernels.sort_rows(_words(block), keys, _words(ordered))
    return ordered


def out_of_order(ordered: Array, keys: Array, out: Array) -> None:
    """Write rows that `into_order` moved back where they were, to ``out`` (n, width), which is other memory."""
    row_kernels.unsort_rows(_words(ordered), keys, _words(out))


def _words(block: Array) -> Array:
    """The same rows as 8-byte words where they are whole ones: a quarter as many elements to move."""
    is_whole = block.flags.c_contiguous and block.shape[1] * block.itemsize % 8 == 0
    return block.view(np.int64) if is_whole else block
