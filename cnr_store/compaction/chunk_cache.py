"""Chunks that several chunks of the result need: decoded once, kept until the last of them is done.

A chunk of a delta spans many chunks of a baseline. Each is decoded at its first use, by one thread while others that
want it wait, and dropped after its last. Beyond the bound nothing is kept, and what is not kept is decoded again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store import arrays
from cnr_store.records import ArrayEntry, Manifest, RowListEntry
from cnr_store.replay_plan import Step
from cnr_store.segment import Scratch, SegmentReader
from cnr_store.types import RowIds

Array = npt.NDArray[Any]


class ChunkCache:
    """Decoded chunks of some segments.

    Parameters
    ----------
    readers
        The segments that steps count.
    uses
        Steps, and how often each is carried out; every time ends with `release`.
    limit_bytes
        Bound on what is kept at once.

    Attributes
    ----------
    readers
        The segments, read through the cache.
    """

    def __init__(self, readers: Sequence[SegmentReader], uses: Iterable[tuple[Step, int]], limit_bytes: int) -> None:
        self.readers = [_CachedReader(reader, segment, self) for segment, reader in enumerate(readers)]
        self._limit_bytes = limit_bytes
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._shared: dict[tuple[int, str, int], _Shared] = {}
        for step, count in uses:
            if count > 1:
                shared = _Shared(count)
                for entry in step.row_list.arrays.values():
                    self._shared[step.segment, entry.path, step.chunk] = shared

    def release(self, step: Step) -> None:
        """A use of the step's chunk is over."""
        shared = self._shared.get((step.segment, step.row_list.arrays["rows"].path, step.chunk))
        if shared is None:
            return
        with self._lock:
            shared.uses -= 1
            if shared.uses == 0:
                self._kept_bytes -= shared.nbytes
                shared.arrays.clear()

    def read(
        self, segment: int, entry: ArrayEntry, chunk: int, scratch: Scratch, decode: Callable[[Scratch], Array]
    ) -> Array:
        """Return a chunk's array: one kept, or from ``decode``, given ``scratch`` or memory of its own."""
        shared = self._shared.get((segment, entry.path, chunk))
        if shared is None:
            return decode(scratch)
        with shared.lock:
            if entry.path in shared.arrays:
                return shared.arrays[entry.path]
            if self._reserve(shared, math.prod(arrays.chunk_shape(entry)) * np.dtype(entry.dtype).itemsize):
                shared.arrays[entry.path] = decode(Scratch())
                return shared.arrays[entry.path]
        return decode(scratch)

    def _reserve(self, shared: _Shared, size_bytes: int) -> bool:
        with self._lock:
            if self._kept_bytes + size_bytes > self._limit_bytes:
                return False
            self._kept_bytes += size_bytes
            shared.nbytes += size_bytes
            return True


class _Shared:
    """The arrays of one chunk of one row list that are kept, and how many uses are still to come."""

    def __init__(self, uses: int) -> None:
        self.uses = uses
        self.nbytes = 0
        self.arrays: dict[str, Array] = {}
        self.lock = threading.Lock()


class _CachedReader:
    """A segment read through the cache; what it returns must not be written to."""

    def __init__(self, reader: SegmentReader, segment: int, cache: ChunkCache) -> None:
        self.name = reader.name
        self.manifest: Manifest = reader.manifest
        self._reader = reader
        self._segment = segment
        self._cache = cache

    def read_chunk(self, entry: ArrayEntry, index: int, scratch: Scratch) -> Array:
        def decode(memory: Scratch) -> Array:
            return self._reader.read_chunk(entry, index, memory)

        return self._cache.read(self._segment, entry, index, scratch, decode)

    def read_rows(self, row_list: RowListEntry, index: int, scratch: Scratch) -> RowIds:
        entry = row_list.arrays["rows"]
        count = min(entry.chunk_rows, row_list.count - index * entry.chunk_rows)
        if row_list.last[index] - row_list.first[index] + 1 == count:
            return self._reader.read_rows(row_list, index, scratch)

        def decode(memory: Scratch) -> Array:
            return self._reader.read_rows(row_list, index, memory)

        return self._cache.read(self._segment, entry, index, scratch, decode)
