"""A consumer with every fault at every storage call: it goes on, in the same process or another, and misses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet
import pytest

from cnr_store import CnrStoreError, RetentionPolicy, Store, TableOptions, collect_garbage
from cnr_store.changes import ChangeCursor, catch_up, changes, recorded_cursor, write_parquet
from cnr_store.maintenance.compaction import compact_run
from tests.support.change_copy import ChangeCopy, content_of
from tests.support.faulty import FaultKind, FaultyFileSystem
from tests.support.memory import created, opened
from tests.support.sweep import survived

FAULTS = [kind for kind in FaultKind if kind is not FaultKind.STALL]
EXACT = TableOptions.exact()
MOST_TRIES = 20


def build(fs: fsspec.AbstractFileSystem) -> None:
    """A baseline, deltas of every kind, a compaction, a rollback, another baseline."""
    rng = np.random.default_rng(3)
    with created(fs) as store:
        with store.writer() as writer:
            with writer.begin(10) as txn:
                txn.write_table("a", rng.standard_normal((12, 3)).astype(np.float32), options=EXACT)
                txn.create_table("h", dim=2, options=EXACT)
                txn.write_rows("h", np.asarray([-4, 9]), np.ones((2, 2), np.float32))
            for step in (20, 30, 40):
                rows = np.unique(rng.integers(0, 8, 3))
                with writer.begin(step) as txn:
                    txn.write_rows("a", rows, rng.standard_normal((len(rows), 3)).astype(np.float32))
                    txn.write_rows("h", np.asarray([step]), np.full((1, 2), step, np.float32))
                    txn.delete_rows("h", np.asarray([step - 10]))
        compact_run(store, run=(1, 3), force=True)
        with store.writer() as writer:
            writer.restore()
            with writer.begin(50) as txn:
                txn.resize_table("a", 9)
        store.rollback(4)
        with store.writer() as writer, writer.begin(60, "baseline") as txn:
            txn.write_table("a", rng.standard_normal((11, 3)).astype(np.float32), options=EXACT)
            txn.create_table("h", dim=2, options=EXACT)
            txn.write_rows("h", np.asarray([9]), np.ones((1, 2), np.float32))


def newest(fs: fsspec.AbstractFileSystem) -> Any:
    with opened(fs) as store:
        return content_of(store.snapshot(), slots=False)


class Consumer:
    """Applies batch by batch, keeps its cursor with what it has, and tries again after an error."""

    def __init__(self, since: int | None, *, registers: bool) -> None:
        self.since = since
        self.registers = registers
        self.first: ChangeCursor | None = None

    def prepare(self, fs: fsspec.AbstractFileSystem) -> None:
        build(fs)
        self.had = ChangeCopy()
        if self.since is not None:
            with opened(fs) as store:
                self.first = ChangeCursor.at(store, self.since)
                self.had.tables = content_of(store.snapshot(self.since), slots=False)

    def start(self) -> tuple[ChangeCopy, ChangeCursor | None]:
        return self.had.copy(), self.first

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        copy, cursor = self.start()
        for _ in range(MOST_TRIES):
            try:
                store = opened(fs)
                stream = changes(store, cursor, max_batch_rows=4, cursor="lake" if self.registers else None)
                break
            except CnrStoreError:
                continue
        for _ in range(MOST_TRIES):
            try:
                for batch in stream:
                    copy.apply(batch)
                    acknowledged.append((copy.copy(), stream.cursor))
            except CnrStoreError:
                continue
            acknowledged.append((copy.copy(), stream.cursor))
            break
        assert stream.cursor == ChangeCursor.at(store, store.latest_version())
        assert copy.tables == newest(fs.inner)

    def check(self, fs: fsspec.AbstractFileSystem, acknowledged: list[Any]) -> None:
        """Another process goes on from the last cursor that was kept."""
        copy, cursor = acknowledged[-1] if acknowledged else self.start()
        copy = copy.copy()
        if cursor is None:
            copy = ChangeCopy()
        with opened(fs) as store:
            for batch in changes(store, cursor, max_batch_rows=4, cursor="lake" if self.registers else None):
                copy.apply(batch)
        assert copy.tables == newest(fs)


@pytest.mark.parametrize(
    ("since", "registers", "calls_hit", "every"),
    [(None, True, 1, 1), (0, False, 1, 4), (0, True, 4, 12), (3, True, 1, 8)],
)
def test_a_consumer_goes_on_behind_every_fault(since: int | None, registers: bool, calls_hit: int, every: int) -> None:
    report = survived(Consumer(since, registers=registers), FAULTS, calls_hit=calls_hit, every=every)

    assert report.crashed > 10


@pytest.mark.soak
@pytest.mark.parametrize("since", [None, 0, 3])
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("calls_hit", [1, 4])
def test_a_consumer_goes_on_behind_every_fault_at_every_call(
    since: int | None, registers: bool, calls_hit: int
) -> None:
    survived(Consumer(since, registers=registers), FAULTS, calls_hit=calls_hit)


class Overtaken(Consumer):
    """A consumer whose cursor has expired, and who compares what it has."""

    def prepare(self, fs: fsspec.AbstractFileSystem) -> None:
        build(fs)
        with opened(fs) as store:
            self.had = ChangeCopy()
            self.had.tables = content_of(store.snapshot(3), slots=False)
            self.values = store.snapshot(3).table("a").read()
            self.keys = store.snapshot(3).table("h").read_all()
            collect_garbage(store, policy=RetentionPolicy(1), grace_s=0, orphan_age_s=0, dry_run=False, force=True)

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        for _ in range(MOST_TRIES):
            copy = self.had.copy()
            try:
                self.compare(opened(fs), copy)
            except CnrStoreError:
                continue
            assert copy.tables == newest(fs.inner)
            return
        raise AssertionError("never came to its end")

    def compare(self, store: Store, copy: ChangeCopy) -> None:
        keys, arrays = self.keys
        for batch in catch_up(store, {"a": self.values, "h": (keys, arrays["values"])}):
            copy.apply(batch)

    def check(self, fs: fsspec.AbstractFileSystem, acknowledged: list[Any]) -> None:
        copy = self.had.copy()
        self.compare(opened(fs), copy)
        assert copy.tables == newest(fs)


def test_catching_up_survives_every_fault_at_every_call() -> None:
    report = survived(Overtaken(None, registers=False), FAULTS)

    assert report.crashed > 3


class Recorder(Consumer):
    """Writes files, and starts again where they end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None, registers=False)
        self.folder = folder
        self.runs = 0

    def record(self, fs: fsspec.AbstractFileSystem) -> None:
        folder = self.folder / str(self.runs)
        with opened(fs) as store:
            write_parquet(changes(store, recorded_cursor(folder) or 0), folder)

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        self.runs += 1
        self.record(fs)

    def check(self, fs: fsspec.AbstractFileSystem, acknowledged: list[Any]) -> None:
        folder = self.folder / str(self.runs)
        found = recorded_cursor(folder)
        with opened(fs) as store:
            write_parquet(changes(store, 0 if found is None else found), folder)
        copy, told = ChangeCopy(), []
        for path in sorted(folder.glob("*/*.parquet"), key=lambda path: path.name):
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
                copy.apply(batch)
                told += [(batch["version"][0].as_py(), batch["table"][0].as_py(), row) for row in batch["row_id"]]
        assert copy.tables == newest(fs)
        assert len(told) == len(set(told))


def test_a_recording_has_every_version_once_whatever_fails(tmp_path: Path) -> None:
    report = survived(Recorder(tmp_path), [FaultKind.FAIL_BEFORE, FaultKind.SHORT_READ, FaultKind.CRASH], every=6)

    assert report.crashed > 5
