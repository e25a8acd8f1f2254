"""A segment read through memory that outlives a read: what is kept, and for how long, the `ChunkKeeper` decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cnr_store.format import arrays
from cnr_store.format.records import ArrayEntry, Manifest, RowListEntry
from cnr_store.segment.reader import Scratch, SegmentReader
from cnr_store.types import RowIds

Array = npt.NDArray[Any]
Decode = Callable[[Scratch], Array]


class ChunkKeeper(Protocol):
    """Keeps decoded chunks of segments."""

    def read(self, segment: str, entry: ArrayEntry, chunk: int, scratch: Scratch, decode: Decode) -> Array:
        """Return a chunk's array: one that is kept, or from ``decode``, given ``scratch`` or memory of its own."""


class CachedReader:
    """A segment whose decoded chunks ``keeper`` keeps; as `SegmentReader`, but what it returns must not be written to.

    What is kept was checked when it was decoded: the object's digest, its size, the order of row ids.
    """

    def __init__(self, reader: SegmentReader, keeper: ChunkKeeper) -> None:
        self.name = reader.name
        self.manifest: Manifest = reader.manifest
        self._reader = reader
        self._keeper = keeper

    def read_chunk(self, entry: ArrayEntry, index: int, scratch: Scratch) -> Array:
        """See `SegmentReader.read_chunk`."""

        def decode(memory: Scratch) -> Array:
            return self._reader.read_chunk(entry, index, memory)

        return self._keeper.read(self.name, entry, index, scratch, decode)

    def read_rows(self, row_list: RowListEntry, index: int, scratch: Scratch) -> RowIds:
        """See `SegmentReader.read_rows`."""
        entry = row_list.arrays["rows"]
        count = min(entry.chunk_rows, row_list.count - index * entry.chunk_rows)
        if row_list.last[index] - row_list.first[index] + 1 == count:
            return self._reader.read_rows(row_list, index, scratch)

        def decode(memory: Scratch) -> Array:
            return self._reader.read_rows(row_list, index, memory)

        return self._keeper.read(self.name, entry, index, scratch, decode)


def decoded_bytes(entry: ArrayEntry) -> int:
    """Return the memory that a decoded chunk of the array takes."""
    return math.prod(arrays.chunk_shape(entry)) * np.dtype(entry.dtype).itemsize
