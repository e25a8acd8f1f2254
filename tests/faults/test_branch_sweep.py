"""Fork, life and end of a branch beside a live writer, with every fault at every storage call."""

from __future__ import annotations

from typing import Any

import fsspec
import numpy as np
import pytest

from cnr_store import CnrStoreError, Store, TableOptions, Writer
from cnr_store.errors import BranchNotFound
from cnr_store.format.layout import BRANCHES, branch_prefix
from tests.support.faulty import FaultKind, FaultyFileSystem
from tests.support.memory import created, opened
from tests.support.sweep import CI_FAULTS, survived

ROWS, DIM = 5, 2
BASE, SECOND = [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]
MAIN, BRANCH = [1, 2, 0, 0, 0], [1, 0, 3, 0, 0]


def save(writer: Writer, step: int, row: int, value: float) -> None:
    with writer.begin(step) as txn:
        txn.write_rows("t", np.array([row]), np.full((1, DIM), value, np.float32))


def values(store: Store) -> list[float]:
    table = store.snapshot().table("t").read()
    assert (table[:, 0] == table[:, 1]).all()
    return [float(value) for value in table[:, 0]]


class BranchLife:
    """Fork, save on the branch and on the store, set a channel, drop; each step notes its name when it has returned."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    def prepare(self, fs: fsspec.AbstractFileSystem) -> None:
        store = created(fs)
        with store.writer() as writer:
            with writer.begin(1) as txn:
                txn.write_table("t", np.zeros((ROWS, DIM), np.float32), options=TableOptions(scale=1.0))
            save(writer, 2, 0, 1)

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        self.tried = []
        store = opened(fs)
        main = store.writer()
        main.restore()
        self.tried.append("forked")
        try:
            branch = store.fork("trial")
        except CnrStoreError:
            if "trial" not in store.branches():
                return
            branch = store.on_branch("trial")
        acknowledged.append("forked")
        writer = branch.writer()
        writer.restore()
        for name, step in (
            ("saved", lambda: save(writer, 3, 2, 3)),
            ("saved beside it", lambda: save(main, 3, 1, 2)),
            ("pointed", lambda: branch.set_channel("serving", 0)),
            ("dropped", lambda: store.drop_branch("trial")),
        ):
            self.tried.append(name)
            step()
            acknowledged.append(name)
        try:
            save(writer, 4, 4, 9)
        except CnrStoreError:
            return
        raise AssertionError("a writer of a dropped branch was told that it saved")

    def check(self, fs: fsspec.AbstractFileSystem, acknowledged: list[Any]) -> None:
        assert isinstance(fs, FaultyFileSystem)
        fs = FaultyFileSystem(fs.inner.fork())  # the check goes on; a put still under way lands without it
        store = opened(fs)
        self.check_main(store, acknowledged)
        self.check_logs(store)
        is_listed = "trial" in store.branches()
        assert is_listed or "forked" not in acknowledged or "dropped" in self.tried
        assert not (is_listed and "dropped" in acknowledged)
        if is_listed and self.check_branch(opened(fs), acknowledged):
            assert "dropped" not in acknowledged
        if is_listed:
            stale = opened(fs).on_branch("trial")
            opened(fs).drop_branch("trial")
            with pytest.raises(BranchNotFound):
                stale.writer()
        # The name is free, and the store goes on as if the branch had never been.
        again = opened(fs).fork("trial")
        assert values(again) == values(store)
        with opened(fs).writer() as writer:
            writer.restore()
            before = values(store)
            save(writer, 9, 4, 5)
        assert values(store) == [*before[:4], 5]
        assert values(again) == before

    def check_main(self, store: Store, acknowledged: list[Any]) -> None:
        seen = values(store)
        assert seen in ([SECOND, MAIN] if "saved beside it" in self.tried else [SECOND]), seen
        if "saved beside it" in acknowledged:
            assert seen == MAIN

    def check_logs(self, store: Store) -> None:
        """A log without a pin has ended or never existed: no save in it was acknowledged."""
        pins = store.head().record.pins
        found = store.storage.list_folders(BRANCHES)
        assert pins.keys() <= set(found)
        for uuid in found:
            newest = store.internals.log.below(branch_prefix(uuid)).latest().record
            assert uuid in pins or newest.kind == "close" or newest.v == 0, uuid

    def check_branch(self, store: Store, acknowledged: list[Any]) -> bool:
        """Return whether the branch is open; if it is, check that it has every acknowledged save and can continue."""
        try:
            branch = store.on_branch("trial")
            seen = values(branch)
        except BranchNotFound:
            assert "dropped" in self.tried
            return False
        assert seen in ([SECOND, BRANCH] if "saved" in self.tried else [SECOND]), seen
        if "saved" in acknowledged:
            assert seen == BRANCH
        if "pointed" in acknowledged:
            assert branch.channels() == {"serving": 0}
            assert branch.snapshot(channel="serving").table("t").read()[0, 0] == 1
        with branch.writer() as writer:
            writer.restore()
            save(writer, 8, 4, 7)
        assert values(branch) == [*seen[:4], 7]
        return True


class Fork(BranchLife):
    """The beginning of that life alone, so that each of its calls can be swept."""

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        self.tried = ["forked"]
        opened(fs).fork("trial")
        acknowledged.append("forked")


def test_calm_run_is_right() -> None:
    report = survived(BranchLife(), ())

    assert report.calls > 60


def test_branches_survive_a_fault_at_each_kind_of_storage_call() -> None:
    survived(BranchLife(), CI_FAULTS, every=5)


def test_a_fork_that_crashes_at_any_call_leaves_no_name_without_a_log() -> None:
    survived(Fork(), [FaultKind.CRASH, FaultKind.CRASH_AFTER])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("calls_hit", [1, 40])
def test_branches_survive_every_fault_at_every_storage_call(calls_hit: int) -> None:
    survived(BranchLife(), calls_hit=calls_hit)
