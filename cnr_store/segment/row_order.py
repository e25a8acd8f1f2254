"""The rows of codes in the order of a slot: rows that moved alike lie together, and the entropy coder sees it.

A slot such as Adagrad's accumulator grows by about what its row moved, so its difference, which every delta stores,
shows how large the row's differences are. Codes in its order are several percent smaller, and no order need be stored
(`format_spec/decisions/0016`). Row ids and slots stay ascending by row id. Pure, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cnr_store.segment.codes import ArraySpec

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
