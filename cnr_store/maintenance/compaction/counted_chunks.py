"""Cache decoded chunks that several chunks of the result need, until their last use.

A chunk of a delta spans many chunks of a baseline. One thread decodes it at its first use; other threads that need it
wait. It is dropped after its last use. A chunk that does not fit below the limit is decoded at every use.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from cnr_store.format.arrays import decoded_bytes
from cnr_store.format.records import ArrayEntry
from cnr_store.read.plan import Step
from cnr_store.segment.decoded import Array, Decode, Scratch
from cnr_store.segment.reader import SegmentReader


class CountedChunks:
    """A cache of decoded chunks, for a known number of uses of each. Thread-safe.

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
        self._limit_bytes = limit_bytes
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._shared: dict[tuple[str, str, int], _Shared] = {}
        for step, count in uses:
            if count > 1:
                # Two row lists of a piece may have rows in one stored chunk.
                shared = self._shared.get(self._key(step, step.row_list.arrays["rows"]), _Shared())
                shared.uses += count
                for entry in step.row_list.arrays.values():
                    self._shared[self._key(step, entry)] = shared

    def release(self, step: Step) -> None:
        """Count one use of the step's chunk; drop the chunk after its last use."""
        shared = self._shared.get(self._key(step, step.row_list.arrays["rows"]))
        if shared is None:
            return
        with self._lock:
            shared.uses -= 1
            if shared.uses <= 0:
                self._kept_bytes -= shared.nbytes
                shared.nbytes = 0
                shared.arrays.clear()

    def read(self, segment: str, entry: ArrayEntry, chunk: int, scratch: Scratch, decode: Decode) -> Array:
        """See `ChunkKeeper`."""
        shared = self._shared.get((segment, entry.path, chunk))
        if shared is None:
            return decode(scratch)
        with shared.lock:
            if entry.path in shared.arrays:
                return shared.arrays[entry.path]
            if self._reserve(shared, decoded_bytes(entry)):
                shared.arrays[entry.path] = decode(Scratch())
                return shared.arrays[entry.path]
        return decode(scratch)

    def _key(self, step: Step, entry: ArrayEntry) -> tuple[str, str, int]:
        return self.readers[step.segment].name, entry.path, entry.stored_chunk(step.chunk)

    def _reserve(self, shared: _Shared, size_bytes: int) -> bool:
        with self._lock:
            if self._kept_bytes + size_bytes > self._limit_bytes:
                return False
            self._kept_bytes += size_bytes
            shared.nbytes += size_bytes
            return True


class _Shared:
    """The cached arrays of one chunk, and the number of remaining uses."""

    def __init__(self) -> None:
        self.uses = 0
        self.nbytes = 0
        self.arrays: dict[str, Array] = {}
        self.lock = threading.Lock()
