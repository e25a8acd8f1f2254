"""The rows of codes in the order of a slot: rows that moved alike lie together, and the entropy coder sees it.

A slot such as Adagrad's accumulator grows by about what its row moved, so its difference, which every delta stores,
shows how large the row's differences are. Codes in its order are several percent smaller, and no order need be stored
(`format_spec/decisions/0016`). Row ids and slots stay ascending by row id. The order is that
of a stable counting sort of int16 keys. Pure, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cnr_store.encodings import row_kernels
from cnr_store.segment.codes import Array, ArraySpec

LEAST_CODES = 1 << 16
"""Arrays with fewer stay as they are: there is little to gain, and one more object to read."""


def order_of(operation: str, specs: Mapping[str, ArraySpec], dtypes: Mapping[str, np.dtype[Any]]) -> str | None:
    """Return the name of the array in whose order the codes of a row list may be stored, or None. Pure.

    The first one-dimensional slot whose differences fit int16, for differences of codes. ``dtypes`` are those that the
    list is stored in.
    """
    codes = specs.get("codes")
    if operation != "add" or codes is None or not codes.is_additive:
        return None
    if codes.width < 2:
        return None
    slots = (name for name, spec in specs.items() if name != "codes" and spec.is_vector and spec.is_additive)
    return next((name for name in slots if dtypes[name] == np.int16), None)


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
