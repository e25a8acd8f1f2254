"""Rows compared bit for bit: equal numbers are not enough, -0.0 is not 0.0 here."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def different_rows(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """Return how many rows of two float32 arrays (n, dim) differ in a bit.

    >>> different_rows(np.array([[0.0], [1.0]], np.float32), np.array([[-0.0], [1.0]], np.float32))
    1
    """
    first, second = (np.ascontiguousarray(array).view(np.uint32) for array in (one, other))
    return int((first != second).any(axis=1).sum())
