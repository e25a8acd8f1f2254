"""Stores whose files are in a memory of their own; those of ``memory://`` stay until the process ends."""

from __future__ import annotations

import fsspec

from cnr_store import Store
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.inline_workers import inline

QUICK = RetryPolicy(deadline_s=0.02, first_delay_s=0.001, max_delay_s=0.002)
"""For files that fail on purpose: an append whose outcome is unknown is given up soon."""


def store_in_memory(*, threads: int | None = 1) -> Store:
    """Return a new store, empty; ``threads=None`` is one thread for each core, and 1 the caller's only."""
    store = Store.create_on(storage_from_filesystem(IsolatedMemoryFileSystem(), "/root"), threads=threads)
    return inline(store) if threads == 1 else store


def created(fs: fsspec.AbstractFileSystem, root: str = "/root") -> Store:
    """Return a new store in these files."""
    return inline(Store.create_on(storage_from_filesystem(fs, root), threads=1, retry=QUICK))


def opened(fs: fsspec.AbstractFileSystem, root: str = "/root", *, branch: str | None = None) -> Store:
    """Return the store in these files, or a branch of it, as a process that starts now sees it."""
    return inline(Store.open_on(storage_from_filesystem(fs, root), branch=branch, threads=1, retry=QUICK))
