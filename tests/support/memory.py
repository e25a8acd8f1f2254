"""Stores whose files are in a memory of their own; those of ``memory://`` stay until the process ends."""

from __future__ import annotations

from cnr_store import Store
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import IsolatedMemoryFileSystem


def store_in_memory(*, threads: int | None = 1) -> Store:
    """Return a new store, empty; ``threads=None`` is one thread for each core."""
    return Store.create_on(storage_from_filesystem(IsolatedMemoryFileSystem(), "/root"), threads=threads)
