"""Cache decoded chunks that several chunks of the result need, until their last use.

A chunk of a delta spans many chunks of a baseline. One thread decodes it at its first use; other threads that need it
wait. It is dropped after its last use, or earlier if others need the memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from cnr_store.format.records import ArrayEntry
from cnr_store.read.plan import Step
from cnr_store.segment.chunk_cache import ChunkCache
from cnr_store.segment.decoded import Array, Decode, Scratch
from cnr_store.segment.reader import SegmentReader


class CountedChunks:
    """A `ChunkCache` of the chunks that are used more than once, for a known number of uses of each. Thread-safe.

    Parameters
    ----------
    readers
        The segments; a step's ``segment`` is an index into them.
    uses
        Steps, and how often each is executed; every execution ends with `release`.
    limit_bytes
        Limit on the decoded bytes that are cached at once.

    Attributes
    ----------
    readers
        The segments, read through the cache.
    """

    def __init__(self, readers: Sequence[SegmentReader], uses: Iterable[tuple[Step, int]], limit_bytes: int) -> None:
        self.readers = [reader.with_cache(self) for reader in readers]
        self._cache = ChunkCache(limit_bytes)
        self._lock = threading.Lock()
        # By the chunk of each array: two row lists of a piece may have rows in one stored chunk.
        self._left: Counter[tuple[str, str, int]] = Counter()
        for step, count in uses:
            if count > 1:
                self._left.update(dict.fromkeys(self._keys(step), count))

    def release(self, step: Step) -> None:
        """Count one use of the step's chunk; drop the chunk after its last use."""
        with self._lock:
            self._left.subtract(key for key in self._keys(step) if key in self._left)
            is_over = all(self._left[key] <= 0 for key in self._keys(step))
        if is_over:
            for entry in step.row_list.arrays.values():
                self._cache.drop(self.readers[step.segment].name, entry, entry.stored_chunk(step.chunk))

    def read(self, segment: str, entry: ArrayEntry, chunk: int, scratch: Scratch, decode: Decode) -> Array:
        """See `ChunkKeeper`."""
        if (segment, entry.path, chunk) not in self._left:
            return decode(scratch)
        return self._cache.read(segment, entry, chunk, scratch, decode)

    def _keys(self, step: Step) -> list[tuple[str, str, int]]:
        name, arrays = self.readers[step.segment].name, step.row_list.arrays.values()
        return [(name, entry.path, entry.stored_chunk(step.chunk)) for entry in arrays]
