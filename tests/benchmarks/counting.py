"""Local files that count requests as an object store would bill them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from cnr_store.storage import Content, CreateOutcome
from cnr_store.storage.base import ObjectStat
from cnr_store.storage.local import LocalStorage

REQUESTS = ("list", "get", "create", "put", "delete")


class CountingStorage(LocalStorage):
    """Counts `REQUESTS` in ``counts``; a listing of a folder is one, deletions are counted by object.

    ``reads``: key and bytes of each GET.
    """

    def __init__(self, root: str, *, fsync: bool = False) -> None:
        super().__init__(root, fsync=fsync)
        self.counts: Counter[str] = Counter()
        self.reads: list[tuple[str, int]] = []
        self._lock = threading.Lock()

    def take(self) -> Counter[str]:
        """Return the counts since the last call."""
        with self._lock:
            counts, self.counts = self.counts, Counter()
        return counts

    def take_reads(self) -> list[tuple[str, int]]:
        """Return key and bytes of each GET since the last call."""
        with self._lock:
            reads, self.reads = self.reads, []
        return reads

    def read(self, key: str, *, start: int | None = None, stop: int | None = None) -> bytes | None:
        self._count("get")
        data = super().read(key, start=start, stop=stop)
        with self._lock:
            self.reads.append((key, 0 if data is None else len(data)))
        return data

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int | None:
        self._count("get")
        return super().read_into(key, start, buffers)

    def put(self, key: str, data: Content) -> None:
        self._count("put")
        super().put(key, data)

    def create(self, key: str, data: bytes) -> CreateOutcome:
        self._count("create")
        return super().create(key, data)

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        self._count("list")
        return super().list_objects(prefix)

    def list_folders(self, prefix: str) -> list[str]:
        self._count("list")
        return super().list_folders(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        chosen = list(keys)
        self._count("delete", len(chosen))
        super().delete(chosen)

    def _count(self, kind: str, number: int = 1) -> None:
        with self._lock:
            self.counts[kind] += number
