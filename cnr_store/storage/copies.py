"""Copies of objects in host memory: what this process has put, for other ranks, and what they gave back to it.

Only reads that check a digest look here (`read_verified`, `read_inside`), so a copy is never more than the object that
a manifest names. An object of a segment is put once and never changed: its key says which bytes it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Objects = Mapping[str, npt.NDArray[np.uint8]]
"""Bytes of objects, by key."""


class ObjectCopies:
    """Objects of one storage in memory. Thread-safe.

    Parameters
    ----------
    is_kept
        Of which keys a put is recorded.
    limit_bytes
        Most bytes that are recorded; what would be more is left out.

    Attributes
    ----------
    read_bytes
        Bytes that were read from `given` instead of the storage.
    """

    def __init__(self, is_kept: Callable[[str], bool], limit_bytes: int) -> None:
        self._is_kept, self._limit_bytes = is_kept, limit_bytes
        self._lock = threading.Lock()
        self._written: dict[str, npt.NDArray[np.uint8]] = {}
        self._written_bytes = 0
        self._given: dict[str, npt.NDArray[np.uint8]] = {}
        self.read_bytes = 0

    def record(self, key: str, data: Sequence[bytes | bytearray | memoryview]) -> None:
        """Record an object that was put, if it is to be kept and there is room for it; copies it."""
        if not self._is_kept(key):
            return
        size = sum(map(len, data))
        with self._lock:
            if self._written_bytes + size > self._limit_bytes:
                return
            self._written_bytes += size
            self._written[key] = np.concatenate([np.frombuffer(piece, np.uint8) for piece in data])

    def take_written(self) -> Objects:
        """Return what was recorded since the last call, and forget it."""
        with self._lock:
            written, self._written, self._written_bytes = self._written, {}, 0
            return written

    def give(self, objects: Objects) -> None:
        """Set what is read from memory instead of the storage, in place of what was given before; not copied."""
        with self._lock:
            self._given = dict(objects)
            self.read_bytes = 0

    def read(self, key: str, start: int, stop: int) -> memoryview | None:
        """Return bytes [start, stop) of a given object, not copied, or None if there is none that has them."""
        with self._lock:
            found = self._given.get(key)
            if found is None or len(found) < stop:
                return None
            self.read_bytes += stop - start
        return found[start:stop].data

    def refuse(self, key: str, size_bytes: int) -> None:
        """Forget a given object, because so many bytes that were read of it have the wrong digest."""
        with self._lock:
            self._given.pop(key, None)
            self.read_bytes -= size_bytes
