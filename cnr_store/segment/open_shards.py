"""Collects the encoded chunks of one array until a shard is complete. No I/O.

Chunks are encoded on several threads and come in any order; a shard is put once, whole (spec, CNR-SEG-20).
"""

from __future__ import annotations

import threading
from collections import Counter

from cnr_store.format import arrays
from cnr_store.format.records import ArrayEntry, Shards
from cnr_store.storage import object_digest


class OpenShards:
    """The incomplete shards of one array. Thread-safe. Memory: the chunks of incomplete shards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, bytes] = {}
        self._arrived: Counter[int] = Counter()
        self._inside: dict[int, tuple[int, str]] = {}

    def add(self, entry: ArrayEntry, index: int, data: bytes, *, grows: bool) -> tuple[str, bytes] | None:
        """Add a chunk. Returns path and bytes of its shard if this chunk completes it, else None.

        ``grows``: the array will have more rows than ``entry``, so a shard is complete only when it is full.
        """
        room = arrays.shard_chunks(entry)
        number = index // room
        chunks = range(number * room, (number + 1) * room) if grows else arrays.chunks_in(entry, number)
        line = len(data), object_digest(data)
        with self._lock:
            self._waiting[index], self._inside[index] = data, line
            self._arrived[number] += 1
            if self._arrived[number] < len(chunks):
                return None
            whole = [self._waiting.pop(k) for k in chunks]
        index_data = arrays.shard_index([len(chunk) for chunk in whole], room)
        return arrays.object_path(entry, number), b"".join((*whole, index_data))

    def take_back(self) -> dict[int, bytes]:
        """Return the chunks that wait, by their number in the array; they may be added again, to other shards."""
        with self._lock:
            found, self._waiting = self._waiting, {}
            self._arrived.clear()
        return found

    def inside(self, entry: ArrayEntry) -> Shards:
        """Return the manifest's entry of the shards. All chunks must have been added."""
        lines = [self._inside[k] for k in range(arrays.chunk_count(entry))]
        sizes, digests = tuple(size for size, _ in lines), "".join(digest for _, digest in lines)
        return Shards(chunks=arrays.shard_chunks(entry), sizes=sizes, digests=digests)
