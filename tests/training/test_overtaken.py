"""A head that is compacted and deleted while it is restored is no damage: the restore goes on from what it became."""

from __future__ import annotations

from typing import Any

import pytest

from cnr_store import RetentionPolicy, Store, collect_garbage
from cnr_store.errors import VersionExpired
from cnr_store.maintenance.compaction import compact_run
from cnr_store.storage import storage_from_filesystem
from cnr_store.training import load
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.training.runs import Training, assert_same, manager_of, uninterrupted
from tests.training.test_beside import KIND, go_on

STEPS = 2


def opened(fs: Any) -> Store:
    return Store.open_on(storage_from_filesystem(fs, "/root"), threads=1)


@pytest.fixture(scope="module")
def saved() -> IsolatedMemoryFileSystem:
    """The files of a store with a baseline and a delta."""
    files = IsolatedMemoryFileSystem()
    Store.create_on(storage_from_filesystem(files, "/root"), threads=1).close()
    training = Training(KIND)
    with opened(files) as store, manager_of(store, training) as manager:
        go_on(training, manager, 0, STEPS)
    return files


def compact_and_delete(files: Any) -> None:
    with opened(files) as store:
        assert compact_run(store, run=(0, 2)).outcome == "committed"
        collect_garbage(
            store, policy=RetentionPolicy(keep_last=1), grace_s=0, orphan_age_s=0, force=True, dry_run=False
        )


class Overtaken(FaultyFileSystem):
    """Another process compacts the head, and deletes what that was made of, before the read of number ``at``."""

    def __init__(self, saved: IsolatedMemoryFileSystem, at: int | None = None) -> None:
        files = saved.fork()
        super().__init__(files, on_call=self._meet)
        self.reads, self.counts, self._at, self._files = 0, False, at, files

    def _meet(self, call: Call) -> None:
        if self.counts and call.operation == "read":
            self.reads += 1
            if self.reads == self._at:
                compact_and_delete(self._files)


def restored(files: Overtaken, wanted: dict[str, Any]) -> Training:
    training = Training(KIND)
    with opened(files) as store, manager_of(store, training) as manager:
        files.counts = True
        state = manager.restore(**wanted)
        assert state is not None
        assert (state.step, state.fallback_from) == (STEPS, None)
    return training


@pytest.mark.parametrize("wanted", [{}, {"fallback": True}])
def test_a_head_that_is_compacted_while_it_is_restored_is_no_damage(
    saved: IsolatedMemoryFileSystem, wanted: dict[str, Any]
) -> None:
    """It was called damage, and with fallback= the training went back."""
    calm = Overtaken(saved)
    restored(calm, wanted)

    for at in range(2, calm.reads + 1, 3):
        assert_same(restored(Overtaken(saved, at), wanted).state(), uninterrupted(KIND, STEPS))


def test_a_head_compacted_while_windows_of_it_are_read_is_no_damage(
    saved: IsolatedMemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables on a device are read behind the writer's own restore; there it was DoesNotApply, which is not retried."""
    monkeypatch.setattr("cnr_store.training.restoring.writable_array", lambda _: None)
    calm = Overtaken(saved)
    restored(calm, {})

    for at in range(2, calm.reads + 1, 2):
        assert_same(restored(Overtaken(saved, at), {}).state(), uninterrupted(KIND, STEPS))


def test_a_version_that_goes_while_it_is_restored_has_expired(saved: IsolatedMemoryFileSystem) -> None:
    calm = Overtaken(saved)
    restored(calm, {})
    with opened(saved) as store:
        version = store.latest_version()

    for at in range(4, calm.reads, 5):
        with pytest.raises(VersionExpired, match=f"version {version}"):
            restored(Overtaken(saved, at), {"version": version})


def test_a_head_that_is_compacted_while_it_is_loaded_is_no_damage(saved: IsolatedMemoryFileSystem) -> None:
    expected = uninterrupted(KIND, STEPS)
    calm = Overtaken(saved)
    with opened(calm) as store:
        calm.counts = True
        load(store, Training(KIND).model)

    for at in range(4, calm.reads, 5):
        training = Training(KIND)
        files = Overtaken(saved, at)
        with opened(files) as store:
            files.counts = True
            assert load(store, training.model).step == STEPS
        for name, weight in training.model.state_dict().items():
            assert weight.equal(expected[name])


def test_a_head_that_is_compacted_behind_its_restore_is_gone_on_from(saved: IsolatedMemoryFileSystem) -> None:
    files, training = saved.fork(), Training(KIND)
    with opened(files) as store, manager_of(store, training) as manager:
        manager.restore()
        compact_and_delete(files)
        go_on(training, manager, STEPS, STEPS + 2)
        assert [report.kind for report in manager.history] == ["delta", "delta"]
    again = Training(KIND)
    with opened(files) as store, manager_of(store, again) as manager:
        manager.restore()
    assert_same(again.state(), uninterrupted(KIND, STEPS + 2))
