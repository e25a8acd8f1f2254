"""Decoded chunks: the memory that chunks are decoded into, and the interface of their caches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cnr_store.format.records import ArrayEntry

Array = npt.NDArray[Any]


class Scratch:
    """Memory that chunks are decoded into, reused from chunk to chunk; one per thread and array."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._spare: Scratch | None = None

    @property
    def spare(self) -> Scratch:
        """A second memory, for intermediate arrays that must not overlap the result."""
        if self._spare is None:
            self._spare = Scratch()
        return self._spare

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array of that shape in the reused memory; the array taken before is overwritten."""
        size = math.prod(shape) * dtype.itemsize
        if self._memory.nbytes < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].view(dtype).reshape(shape)


class InPlace(Scratch):
    """A block that gets an array of its shape and dtype, so that it is not copied there; all else is in ``other``.

    ``block``: (rows, columns), or (rows, 1) for an array (rows,); contiguous.
    """

    def __init__(self, block: Array, other: Scratch) -> None:
        self._block, self._other = block, other

    @property
    def spare(self) -> Scratch:
        """As of ``other``."""
        return self._other.spare

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the block if it has that shape and dtype, else memory of ``other``."""
        is_same = dtype == self._block.dtype and self._block.shape in (shape, (*shape, 1))
        return self._block.reshape(shape) if is_same else self._other.take(shape, dtype)


Decode = Callable[[Scratch], Array]


class ChunkKeeper(Protocol):
    """A cache of decoded chunks. Callers must not write to its arrays."""

    def read(self, segment: str, entry: ArrayEntry, chunk: int, scratch: Scratch, decode: Decode) -> Array:
        """Return chunk ``chunk`` of the stored array, whole: one that is kept, or ``decode(memory)``.

        ``decode`` checks all that a read checks; it is given ``scratch``, or memory of its own where that is kept.
        """
