"""A training that saves into memory, and loaders that serve it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from cnr_store import CompactionPolicy, RetentionPolicy, Store, TableOptions, Writer, collect_garbage
from cnr_store.maintenance.compaction import compact_run
from cnr_store.serving import Candidate, Loader
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.loader_checks import check_is_snapshot

ROWS, DIM = 50, 4
OPTIONS = TableOptions(scale=0.25)


class Flaky(FaultyFileSystem):
    """The files as another process sees them; its calls can be made to fail."""

    def fails(self, calls: int = 10**6) -> None:
        self.arm(Fault(FaultKind.FAIL_BEFORE, len(self.calls), calls=calls))


class Training:
    """A store of two tables and a dense tensor, and who writes it."""

    def __init__(self) -> None:
        self.files = IsolatedMemoryFileSystem()
        self.store = Store.create_on(storage_from_filesystem(self.files, "/root"), threads=1)
        self.writer: Writer = self.store.writer()
        self.step = 0
        self.opened: list[Store] = []
        with self.writer.begin(0) as txn:
            txn.write_table("user", np.zeros((ROWS, DIM), np.float32), options=OPTIONS)
            txn.write_table("item", np.ones((ROWS, DIM), np.float32), options=OPTIONS)
            txn.put_dense({"w": np.zeros(3, np.float32)})

    def save(self, rows: tuple[int, ...] = (1, 7, 30), table: str = "user") -> int:
        """Save rows whose values are the step; returns the version."""
        self.step += 1
        with self.writer.begin(self.step) as txn:
            txn.write_rows(table, np.asarray(rows), np.full((len(rows), DIM), self.step, np.float32))
            txn.put_dense({"w": np.full(3, self.step, np.float32)})
        return self.writer.head.record.v

    def full(self) -> int:
        """Save a baseline with another scale."""
        self.step += 1
        with self.writer.begin(self.step, "baseline") as txn:
            for table in ("user", "item"):
                txn.write_table(
                    table, np.full((ROWS, DIM), self.step, np.float32), options=TableOptions(scale=0.5)
                )  # fmt: skip
            txn.put_dense({"w": np.full(3, self.step, np.float32)})
        return self.writer.head.record.v

    def merge(self) -> int:
        assert compact_run(self.store, policy=CompactionPolicy(max_chain=1), force=True).outcome == "committed"
        return self.store.latest_version()

    def forget(self) -> None:
        """Expire and delete all but the newest and what is named or held."""
        collect_garbage(
            self.store, policy=RetentionPolicy(keep_last=1), grace_s=0, orphan_age_s=0, dry_run=False, force=True
        )

    def open(self, fs: Any = None) -> Store:
        """The store as another process sees it."""
        self.opened.append(Store.open_on(storage_from_filesystem(self.files if fs is None else fs, "/root"), threads=1))
        return self.opened[-1]

    def value(self, loader: Loader, row: int = 1, table: str = "user") -> float:
        return float(loader.lookup(table, [row])[0, 0])


def caught_up(loader: Loader, store: Store) -> None:
    """One poll is enough, and what is served is the snapshot."""
    poll = loader.poll()
    assert poll.error is None
    check_is_snapshot(loader, store.snapshot(loader.version))


def until(loader: Loader, what: Callable[[], bool]) -> None:
    """Wait until it is so: for a thread whose pace is not the test's."""
    turn = threading.Event()
    for _ in range(6000):
        if what():
            return
        turn.wait(0.01)
    raise AssertionError(loader.metrics())


def is_even(candidate: Candidate) -> bool:
    """A check that another process can import."""
    return candidate.step % 2 == 0
