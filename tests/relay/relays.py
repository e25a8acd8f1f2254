"""A store, its relays, and short ways to save and to look."""

from __future__ import annotations

from collections.abc import Callable

import fsspec
import numpy as np
import pytest

from cnr_store import CorruptStore, RetentionPolicy, Store, TableOptions, collect_garbage
from cnr_store.relay.relay import Relay
from cnr_store.storage import Storage, storage_from_filesystem
from cnr_store.write.writer_state import CommitKind
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.memory import opened

FAR, NEAR = "/far", "/near"
ROWS, DIM = 40, 4
DAY_MS = 86_400_000


class Clock:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.ms = 10**13

    def __call__(self) -> int:
        return self.ms


def place(files: fsspec.AbstractFileSystem, root: str = NEAR) -> Storage:
    return storage_from_filesystem(files, root)


def near(files: fsspec.AbstractFileSystem, root: str = NEAR) -> Store:
    return opened(files, root)


def save(store: Store, *values: float, kind: CommitKind | None = None) -> list[int]:
    """Save one version for each value, the first as a baseline; returns their numbers."""
    versions = []
    with store.writer() as writer:
        if not store.snapshot().is_empty:
            writer.restore()
        for value in values:
            step = store.head().record.step + 1
            chosen: CommitKind = kind or ("delta" if store.head().record.chain else "baseline")
            with writer.begin(step, kind=chosen) as txn:
                if chosen == "baseline":
                    table = np.full((ROWS, DIM), value, np.float32)
                    txn.write_table("t", table, options=TableOptions(scale=1.0))
                else:
                    txn.write_rows("t", np.arange(3), np.full((3, DIM), value, np.float32))
            assert txn.version is not None
            versions.append(txn.version)
    return versions


def value_of(store: Store, version: int | None = None) -> float:
    return float(store.snapshot(version).table("t").read()[0, 0])


def same_objects(store: Store, copy: Store, *folders: str) -> bool:
    """Whether every object of these folders of the copy is at the source, with the same bytes; and there are some."""
    keys = [stat.key for folder in folders for stat in copy.storage.list_objects(folder)]
    return bool(keys) and all(store.storage.read(key) == copy.storage.read(key) for key in keys)


def expire_all_but_newest(store: Store) -> None:
    policy = RetentionPolicy(keep_last=1)
    for _ in range(2):
        collect_garbage(store, policy=policy, grace_s=0, dry_run=False, force=True)


def fails_within(times: int, ask: Callable[[], object], why: str) -> int:
    """The number of the call that first raises, which one of so many does."""
    for number in range(1, times + 1):
        try:
            ask()
        except CorruptStore as error:
            if why not in error.message:
                raise
            return number
    pytest.fail(f"{times} calls without an error")


def near_after(relay: Relay, files: IsolatedMemoryFileSystem, patient: Relay) -> Store:
    """The relay's readers, once ``patient`` has copied everything and nothing was let go yet."""
    patient.advance()
    assert relay.version is None
    return near(files)
