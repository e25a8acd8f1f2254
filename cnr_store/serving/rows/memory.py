"""Allocates the arrays of a loader: in the process, or (`shared_memory`) in files that other processes map.

Memory is allocated in blocks; the arrays of a block are freed together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from cnr_store.serving.rows.views import View

Array = npt.NDArray[Any]
ArrayShape = tuple[tuple[int, ...], npt.DTypeLike]
"""Shape and dtype of an array that is asked for."""

ALIGNMENT = 64
"""Bytes at whose multiples arrays begin: a cache line, which no two arrays share."""


class Memory:
    """Memory of this process, whose pages the system commits as they are written; subclasses share theirs.

    A block is freed when no array of it is left, so here `release` and `attempt` do nothing.
    """

    is_shared = False
    """Whether other processes read it; then `put_view` and `drop_views` inform them."""

    def allocate(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, used_rows: int | None = None
    ) -> Array:
        """Return a C-contiguous array of zeros in its own block; ``name`` is for people.

        With ``used_rows`` only the first rows may be written until `reserve` allows more: room to grow costs addresses,
        not memory.

        Raises
        ------
        StorageFailure
            There is not enough memory.
        """
        del name, used_rows
        return np.zeros(shape, dtype)

    def allocate_together(self, name: str, arrays: Sequence[ArrayShape]) -> tuple[Array, ...]:
        """Return several arrays in one block, each aligned to `ALIGNMENT` bytes; their content is undefined."""
        del name
        # Zeros would be written while the interpreter lock is held: the rows of a version would stop lookups for 1 ms.
        return tuple(np.empty(shape, dtype) for shape, dtype in arrays)

    def reserve(self, array: Array, used_rows: int) -> None:
        """Make rows [0, used_rows) of an array writable that was allocated with ``used_rows``."""

    def block_of(self, array: Array) -> int | None:
        """Return the block of an array or of a view of one; None if it is not from here, or is never released."""
        del array
        return None

    def release(self, block: int) -> None:
        """Free a block. Whoever has an array of it may still read it."""

    def recycle(self, block: int) -> None:
        """As `release`, of what was just merged: `allocate_together` may return it once no reader can have it.

        Memory that goes and comes with each version is mapped and unmapped by each reader, in one of its lookups, which
        then takes ten times as long.
        """
        self.release(block)

    def attempt(self) -> AbstractContextManager[None]:
        """Return a context that, if it ends with an error, releases what any thread allocated in it."""
        return nullcontext()

    def put_view(self, view: View) -> None:
        """Record the arrays of a view for other processes, which look for it when the board has its epoch.

        Raises
        ------
        StorageFailure
        """

    def drop_views(self, before: int) -> None:
        """Delete the records of views before an epoch."""


ANONYMOUS = Memory()
"""Memory of this process; one object is enough, because it has no state."""


def offsets_of(arrays: Sequence[ArrayShape]) -> tuple[list[int], int]:
    """Return where in a block each array begins, and the size of the block, in bytes. Pure."""
    offsets, end = [], 0
    for shape, dtype in arrays:
        offsets.append(end)
        # An empty array takes a line too: its address identifies its block.
        size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
