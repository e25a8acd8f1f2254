"""A cache of decoded chunks. It evicts the least recently used chunk first.

Segments never change, so a kept chunk never becomes wrong. The snapshots of one store may share a cache: chunks that
they have in common are kept once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from cnr_store.format.arrays import decoded_bytes
from cnr_store.format.records import ArrayEntry
from cnr_store.runtime.arguments import checked_count
from cnr_store.segment.decoded import Array, Decode, Scratch

_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Reads of a `ChunkCache`: from memory (hits), decoded and cached (misses), decoded and not cached (passed)."""

    hits: int
    misses: int
    passed: int


class ChunkCache:
    """Decoded chunks of the segments of one store, bounded by bytes. Thread-safe; no I/O of its own.

    One thread decodes a missing chunk, while other readers of it block. An error is raised in the decoding thread; the
    others then decode it themselves. Pass a cache to `Store.snapshot`; snapshots of one store may share it.

    Parameters
    ----------
    limit_bytes
        Most bytes that are cached or being decoded. A chunk has about 8 MiB of codes, so allow several chunks.

    Examples
    --------
    >>> import numpy as np
    >>> from cnr_store import Store
    >>> store = Store.create("memory://doctest-lookups")
    >>> with store.writer() as writer, writer.begin(step=10) as txn:
    ...     txn.write_table("user", np.ones((4, 2), np.float32))
    >>> cache = ChunkCache(256 << 20)
    >>> view = store.snapshot(cache=cache).table("user")
    >>> [view.read_rows([row]).shape for row in (3, 1)], cache.counts.misses, cache.counts.hits
    ([(1, 2), (1, 2)], 1, 1)
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = checked_count("limit_bytes", limit_bytes, least=1)
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, Array] = OrderedDict()
        self._sizes: dict[_Key, int] = {}
        self._pending: dict[_Key, threading.Event] = {}
        self._held_bytes = 0
        self._hits = self._misses = self._passed = 0

    @property
    def nbytes(self) -> int:
        """Bytes kept and being decoded."""
        return self._held_bytes

    @property
    def counts(self) -> CacheCounts:
        """How often it was asked so far."""
        with self._lock:
            return CacheCounts(self._hits, self._misses, self._passed)

    def holds(self, segment: str, entry: ArrayEntry, chunk: int) -> bool:
        """Return whether a chunk is kept now; as a guess of what a read will fetch."""
        return (segment, entry.path, chunk) in self._kept

    def drop(self, segment: str, entry: ArrayEntry, chunk: int) -> None:
        """Evict a chunk that will not be read again."""
        key = (segment, entry.path, chunk)
        with self._lock:
            if self._kept.pop(key, None) is not None:
                self._held_bytes -= self._sizes.pop(key)

    def read(self, segment: str, entry: ArrayEntry, chunk: int, scratch: Scratch, decode: Decode) -> Array:
        """See `ChunkKeeper`. The array stays as it is for as long as the caller holds it."""
        key = (segment, entry.path, chunk)
        while True:
            with self._lock:
                kept = self._kept.get(key)
                if kept is not None:
                    self._kept.move_to_end(key)
                    self._hits += 1
                    return kept
                pending = self._pending.get(key)
                if pending is None:
                    is_mine = self._reserve(key, decoded_bytes(entry))
                    break
            pending.wait()
        if not is_mine:
            return decode(scratch)
        fresh: Array | None = None
        try:
            fresh = decode(Scratch())
            return fresh
        finally:
            self._settle(key, fresh)

    def _reserve(self, key: _Key, size_bytes: int) -> bool:
        """Evict least recently used chunks to make room; False if chunks being decoded leave too little room."""
        pending_bytes = sum(self._sizes[one] for one in self._pending)
        if pending_bytes + size_bytes > self.limit_bytes:
            self._passed += 1
            return False
        while self._held_bytes + size_bytes > self.limit_bytes:
            oldest, _ = self._kept.popitem(last=False)
            self._held_bytes -= self._sizes.pop(oldest)
        self._misses += 1
        self._sizes[key] = size_bytes
        self._held_bytes += size_bytes
        self._pending[key] = threading.Event()
        return True

    def _settle(self, key: _Key, decoded: Array | None) -> None:
        with self._lock:
            pending = self._pending.pop(key)
            if decoded is None:
                self._held_bytes -= self._sizes.pop(key)
            else:
                self._kept[key] = decoded
        pending.set()
