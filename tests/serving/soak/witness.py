"""The tables of the demonstration, and witness rows that contain the training step. Does not import torch.

Every table ends with `NUM_WITNESSES` rows that no traffic looks up. Before each save the trainer writes its step into
every column of them. A batch is torn if its witnesses have two steps, another step than the batch, or an invalid digit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

DIM = 16
SHARES = {"user": 0.6, "item": 0.3, "place": 0.1}
NUM_WITNESSES = 32
NUM_DIGITS = 5
BASE = 16
SPACING = np.float32(1 / 32)
"""Distance of two digits. Tables are stored with a much finer scale, so rounding never changes a digit."""

MAX_STEP = BASE**NUM_DIGITS - 1
GARBLED = -1


def make_tables(rows: int) -> dict[str, int]:
    """Return, by table name, the number of rows that traffic looks up; witness rows follow them.

    >>> make_tables(1000)
    {'tables.user.weight': 600, 'tables.item.weight': 300, 'tables.place.weight': 100}
    """
    return {f"tables.{name}.weight": max(1, round(rows * share)) for name, share in SHARES.items()}


def different_rows(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """Return how many rows of two float32 arrays (n, dim) differ in a bit.

    >>> different_rows(np.array([[0.0], [1.0]], np.float32), np.array([[-0.0], [1.0]], np.float32))
    1
    """
    first, second = (np.ascontiguousarray(array).view(np.uint32) for array in (one, other))
    return int((first != second).any(axis=1).sum())


def witness_row(step: int, dim: int) -> npt.NDArray[np.float32]:
    """Return the witness row of a step: float32 (dim,); column ``c`` has hexadecimal digit ``c % 5``.

    >>> read_steps(witness_row(0x1F2, 16)[None]).tolist()
    [498]
    """
    columns = np.arange(dim) % NUM_DIGITS
    digits = (step >> (4 * columns)) % BASE
    return (digits * SPACING).astype(np.float32)


def read_steps(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """Return the step of each row (n, dim), int64 (n,); `GARBLED` if its columns contradict each other.

    >>> mixed = witness_row(3, 16)
    >>> mixed[7] = witness_row(200, 16)[7]
    >>> read_steps(mixed[None]).tolist()
    [3]
    >>> mixed[6] = witness_row(200, 16)[6]
    >>> read_steps(mixed[None]).tolist()
    [-1]
    """
    scaled = rows.astype(np.float64) / SPACING
    digits = np.rint(scaled)
    is_digit = (np.abs(scaled - digits) < 0.25) & (digits >= 0) & (digits < BASE)
    whole = digits.astype(np.int64)
    first = whole[:, :NUM_DIGITS]
    repeats = first[:, np.arange(rows.shape[1]) % NUM_DIGITS]
    steps = (first * BASE ** np.arange(NUM_DIGITS)).sum(axis=1)
    return np.where(is_digit.all(axis=1) & (whole == repeats).all(axis=1), steps, GARBLED)
