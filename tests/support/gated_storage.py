"""A local storage whose answers can be held up, to see what goes on without them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cnr_store.storage import CreateOutcome
from cnr_store.storage.base import Buffer, ObjectStat
from cnr_store.storage.local import LocalStorage

_PATIENCE_S = 20.0


class GatedStorage(LocalStorage):
    """Nothing is answered while the gate is `closed`: requests of all threads wait for it to open."""

    def __init__(self, root: str) -> None:
        super().__init__(root, fsync=False)
        self._gate = threading.Event()
        self._gate.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close the gate; raise AssertionError if what is done meanwhile waits for it."""
        self._gate.clear()
        rescue = threading.Timer(_PATIENCE_S, self._gate.set)
        rescue.start()
        try:
            yield
            assert not self._gate.is_set(), "waited for the storage"
        finally:
            rescue.cancel()
            self._gate.set()

    def _read(self, key: str, start: int, stop: int | None) -> bytes | None:
        self._gate.wait()
        return super()._read(key, start, stop)

    def _read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int | None:
        self._gate.wait()
        return super()._read_into(key, start, buffers)

    def _put(self, key: str, data: Sequence[Buffer]) -> None:
        self._gate.wait()
        super()._put(key, data)

    def _create(self, key: str, data: bytes) -> tuple[CreateOutcome, BaseException | None]:
        self._gate.wait()
        return super()._create(key, data)

    def _list_objects(self, folder: str) -> Iterator[ObjectStat]:
        self._gate.wait()
        return super()._list_objects(folder)

    def _list_folders(self, folder: str) -> list[str]:
        self._gate.wait()
        return super()._list_folders(folder)

    def _delete(self, keys: list[str]) -> None:
        self._gate.wait()
        super()._delete(keys)
