"""A copy that stops at any storage call can be opened completely or not at all; the next run completes it."""

from __future__ import annotations

from typing import Any

import fsspec
import numpy as np
import pytest

from cnr_store import TableOptions, copy_store, verify_store
from cnr_store.errors import NotAStore
from cnr_store.maintenance.compaction import compact_run
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import FaultKind, FaultyFileSystem
from tests.support.memory import QUICK, created, opened
from tests.support.snapshot_bytes import bytes_of
from tests.support.sweep import survived

FAR, NEAR = "/far", "/near"


class Copied:
    """Copies all versions of a store with a baseline, two deltas, a compacted chain, a tag and a channel."""

    def __init__(self) -> None:
        self.truth: list[dict[str, bytes]] = []
        self.source: dict[str, bytes] = {}

    def prepare(self, fs: fsspec.AbstractFileSystem) -> None:
        with created(fs, FAR) as store:
            with store.writer() as writer:
                for value in (1, 2, 3):
                    with writer.begin(step=value) as txn:
                        rows = np.full((4, 2), value, np.float32)
                        if value == 1:
                            txn.write_table("t", rows, options=TableOptions(scale=1.0))
                        else:
                            txn.write_rows("t", np.arange(2), rows[:2])
            compact_run(store, run=(0, 2))
            store.tag("first", 2)
            store.set_channel("serving", 4)
            self.truth = [bytes_of(store.snapshot(version)) for version in (2, 3, 4, 5)]
        self.source = {path: fs.cat_file(path) for path in fs.find(FAR)}

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        report = copy_store(opened(fs, FAR), storage_from_filesystem(fs, NEAR), all_versions=True, retry=QUICK)
        acknowledged.append(report.store_uuid)

    def check(self, fs: fsspec.AbstractFileSystem, acknowledged: list[Any]) -> None:
        assert isinstance(fs, FaultyFileSystem)
        fs = FaultyFileSystem(fs.inner.fork())
        try:
            self.check_copy(fs)
        except NotAStore:
            assert not acknowledged

        report = copy_store(opened(fs, FAR), storage_from_filesystem(fs, NEAR), all_versions=True, retry=QUICK)

        assert acknowledged in ([], [report.store_uuid])
        assert report.version == 6
        self.check_copy(fs)
        assert {path: fs.inner.cat_file(path) for path in fs.inner.find(FAR)} == self.source

    def check_copy(self, fs: FaultyFileSystem) -> None:
        copy = opened(fs, NEAR)
        assert copy.latest_version() == 6
        assert [bytes_of(copy.snapshot(version)) for version in (1, 2, 3, 4)] == self.truth
        assert (copy.tags(), copy.channels()) == ({"first": 1}, {"serving": 3})
        assert verify_store(copy, all_versions=True).problems == ()


def test_calm_copy_is_right() -> None:
    report = survived(Copied(), ())

    assert report.calls > 60


@pytest.mark.parametrize("fault", [FaultKind.CRASH, FaultKind.CRASH_AFTER])
def test_a_copy_survives_a_kill_at_every_storage_call(fault: FaultKind) -> None:
    report = survived(Copied(), (fault,))

    assert report.crashed == report.runs


@pytest.mark.parametrize("fault", [FaultKind.FAIL_BEFORE, FaultKind.LOST_REPLY, FaultKind.SHORT_READ])
def test_a_copy_survives_a_fault_at_many_storage_calls(fault: FaultKind) -> None:
    survived(Copied(), (fault,), every=4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("calls_hit", [1, 40])
def test_a_copy_survives_every_fault_at_every_storage_call(calls_hit: int) -> None:
    survived(Copied(), calls_hit=calls_hit)
