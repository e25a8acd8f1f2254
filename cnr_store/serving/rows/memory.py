"""Where a consumer's arrays live: in the process, or in files that other processes map.

Memory is given out in blocks; the arrays of a block go together. Nothing here knows what the arrays are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
ArrayShape = tuple[tuple[int, ...], npt.DTypeLike]
"""Shape and dtype of an array that is asked for."""

ALIGNMENT = 64
"""Bytes at whose multiples arrays begin: a cache line, which no two arrays share."""


class Memory(Protocol):
    """Gives out arrays."""

    def allocate(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, used_rows: int | None = None
    ) -> Array:
        """Return a C-contiguous array of zeros in a block of its own; ``name`` is for people.

        With ``used_rows`` only the first rows may be written until `reserve` says more: room to grow costs addresses,
        not memory.

        Raises
        ------
        StorageFailure
            There is not enough memory.
        """

    def allocate_together(self, name: str, arrays: Sequence[ArrayShape]) -> tuple[Array, ...]:
        """Return several arrays in one block, each from a multiple of `ALIGNMENT` bytes on; they hold anything."""

    def reserve(self, array: Array, used_rows: int) -> None:
        """Make rows [0, used_rows) of an array that was allocated with ``used_rows`` writable."""

    def block_of(self, array: Array) -> int | None:
        """Return the block that an array, or a view of one, is in; None if it is not from here."""

    def release(self, block: int) -> None:
        """Give a block back. Whoever still has an array of it may go on reading it; nobody new can."""

    def attempt(self) -> AbstractContextManager[None]:
        """Return a context that releases, when it is left by an error, what was allocated in it by any thread."""


class AnonymousMemory:
    """Memory of this process. A block goes when nobody has an array of it any more; `release` does nothing."""

    def allocate(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, used_rows: int | None = None
    ) -> Array:
        """See `Memory.allocate`; the system commits pages as they are written, so ``used_rows`` changes nothing."""
        del name, used_rows
        return np.zeros(shape, dtype)

    def allocate_together(self, name: str, arrays: Sequence[ArrayShape]) -> tuple[Array, ...]:
        """See `Memory.allocate_together`.

        Zeros would be written while the interpreter is held: a version's rows would stop lookups for a millisecond.
        """
        del name
        return tuple(np.empty(shape, dtype) for shape, dtype in arrays)

    def reserve(self, array: Array, used_rows: int) -> None:
        """Do nothing: every row is writable."""

    def block_of(self, array: Array) -> int | None:
        """Return None: there is nothing to release."""
        del array
        return None

    def release(self, block: int) -> None:
        """Do nothing."""

    def attempt(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()


ANONYMOUS = AnonymousMemory()
"""Memory of this process; it has no state, so one is enough."""


def offsets_of(arrays: Sequence[ArrayShape]) -> tuple[list[int], int]:
    """Return where in a block each array begins, and the size of the block, in bytes. Pure."""
    offsets, end = [], 0
    for shape, dtype in arrays:
        offsets.append(end)
        # An empty array takes a line too: its address tells which block it is in.
        size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
