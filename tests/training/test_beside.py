"""Restoring beside a training: nothing is written, nobody is fenced; who goes on from a state takes the store over."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.exceptions import FSTimeoutError

from cnr_store import BackgroundSaveFailed, Conflict, RetentionPolicy, Store, collect_garbage
from cnr_store.errors import CommitStateUnknown, Fenced, VersionExpired
from cnr_store.format.commit_record import LogEntry
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.maintenance.compaction import compact_run
from cnr_store.storage import storage_from_filesystem
from cnr_store.store.internals import StoreInternals
from cnr_store.training import CheckpointManager
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.launcher import Launcher, Program
from tests.support.ranks import ThreadRank, on_ranks
from tests.training import runs
from tests.training.runs import Training, assert_same, manager_of, uninterrupted

KIND = "rowwise_adagrad"
PROCESS = f"host {socket.gethostname()}, process {os.getpid()}, at 20"


go_on = partial(runs.go_on, saves=True)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with checkpoints of steps 1 to 3."""
    training = Training(KIND)
    with manager_of(str(tmp_path / "store"), training) as manager:
        go_on(training, manager, 0, 3)
    return str(tmp_path / "store")


def files_of(url: str) -> dict[str, str]:
    paths = (path for path in Path(url).rglob("*") if path.is_file())
    return {path.relative_to(url).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


TRAINER = """
import sys, time, torch
from pathlib import Path
from cnr_store import TableOptions
from cnr_store.training import CheckpointManager, TrackingOptions
from tests.training.runs import Training

torch.set_num_threads(int(sys.argv[4]))  # those of this process: sums of more threads round otherwise
training = Training()
with CheckpointManager(
    sys.argv[1], model=training.model, optimizer=training.optimizers, options=TableOptions.exact(), every_steps=1,
    tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
) as manager:
    manager.restore()
    while manager.current_step < 8:
        if manager.current_step == 6:
            manager.wait_until_finished()
            Path(sys.argv[2]).touch()
            while not Path(sys.argv[3]).exists():
                time.sleep(0.01)
        training.train(manager.current_step)
        manager.step()
"""


def test_a_process_that_evaluates_beside_a_training_fences_it_not(launcher: Launcher, url: str, tmp_path: Path) -> None:
    """It made a manager and called restore(), and the training died at its next save."""
    arrived, may_go = tmp_path / "arrived", tmp_path / "may_go"
    program = Program(["-c", TRAINER, url, str(arrived), str(may_go), str(torch.get_num_threads())])
    training = Training(KIND)
    with launcher.running(program, folder=tmp_path) as trainer:
        while not arrived.exists():
            assert not trainer.has_ended, "the training ended by itself"
            time.sleep(0.01)
        with manager_of(url, training) as manager:
            restored = manager.restore()
            assert restored is not None
            assert restored.step == 6
            assert_same(training.state(), uninterrupted(KIND, 6))
            may_go.touch()

            assert trainer.wait() == 0

    with Store.open(url) as store:
        assert store.snapshot().step == 8
        kinds = [record.kind for record in store.log()]
    assert kinds.count("fence") == 2  # of the fixture, and of the training


@pytest.mark.parametrize("wanted", [{}, {"step": 2}, {"version": 2}, {"fallback": True}, {"strict": False}])
def test_a_restore_writes_nothing_into_the_store(url: str, wanted: dict[str, Any]) -> None:
    before = files_of(url)

    with manager_of(url, Training(KIND)) as manager:
        assert manager.restore(**wanted) is not None

    assert files_of(url) == before


def test_a_restore_of_an_empty_store_writes_nothing(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "store")).close()
    before = files_of(str(tmp_path / "store"))

    with manager_of(str(tmp_path / "store"), Training(KIND)) as manager:
        assert manager.restore() is None

    assert files_of(str(tmp_path / "store")) == before


def test_a_training_is_fenced_by_the_first_step_behind_a_restore(url: str) -> None:
    """And it is told by whom; it was told that the next save would have its rows, which never came."""
    first, second = Training(KIND), Training(KIND)
    with manager_of(url, first) as fenced, manager_of(url, second) as manager:
        fenced.restore()
        go_on(first, fenced, 3, 4)
        manager.restore()
        go_on(first, fenced, 4, 5)
        manager.restore()
        second.train(5)
        manager.step()
        manager.wait_until_finished()
        state, version = second.state(), manager.store.latest_version()
        first.train(5)

        with pytest.raises(BackgroundSaveFailed) as failed:
            fenced.save()
        with pytest.raises(Fenced) as again:
            fenced.save()

        assert isinstance(failed.value.__cause__, Fenced)
        for error in (failed.value, again.value):
            assert PROCESS in str(error)
            assert f"commit record {version} (fence)" in str(error)
            assert "restore here again" in str(error)
            assert "saved with the next" not in str(error)
        manager.save()
    assert_same(state, uninterrupted(KIND, 6))


def test_of_two_that_restored_one_state_the_second_is_told_of_the_first(url: str) -> None:
    first, second = Training(KIND), Training(KIND)
    with manager_of(url, first) as winner, manager_of(url, second) as loser:
        winner.restore()
        loser.restore()
        go_on(first, winner, 3, 4)
        before = files_of(url)
        second.train(3)

        loser.step()
        with pytest.raises(Conflict, match="has continued from the state that was restored here") as told:
            loser.wait_until_finished()
        with pytest.raises(Conflict, match="has continued from"):
            loser.save()

        assert PROCESS in str(told.value)
        assert files_of(url) == before
        go_on(first, winner, 4, 5)
        state = first.state()
        loser.restore()
        assert_same(second.state(), state)
        go_on(second, loser, 5, 6)


def test_a_commit_behind_a_restore_is_not_mixed_with_what_was_restored(url: str) -> None:
    """Without a look at the head the next save would be a delta of step 3 on the tables of step 7."""
    first, second = Training(KIND), Training(KIND)
    with manager_of(url, first) as trainer, manager_of(url, second) as manager:
        trainer.restore()
        go_on(first, trainer, 3, 4)
        manager.restore()
        go_on(first, trainer, 4, 7)
        second.train(4)

        with pytest.raises(Conflict, match=r"\(delta\)"):
            manager.save()

        go_on(first, trainer, 7, 8)
        state = first.state()
    again = Training(KIND)
    with manager_of(url, again) as manager:
        manager.restore()
    assert_same(again.state(), state)


def test_maintenance_behind_a_restore_is_no_conflict(url: str) -> None:
    training = Training(KIND)
    with Store.open(url) as store, manager_of(url, training) as manager:
        manager.restore()
        store.tag("kept", store.latest_version())
        compact_run(store, force=True)
        go_on(training, manager, 3, 5)
        kinds = [record.kind for record in store.log(limit=5)]
    assert kinds == ["delta", "delta", "fence", "compact", "tag"]
    again = Training(KIND)
    with manager_of(url, again) as manager:
        manager.restore()
    assert_same(again.state(), uninterrupted(KIND, 5))


def test_a_training_whose_store_was_rolled_back_stops(url: str) -> None:
    """It met the rollback before the fence, took that for its own to follow, and fenced the one who went back."""
    first, second = Training(KIND), Training(KIND)
    with manager_of(url, first) as fenced, manager_of(url, second) as manager:
        fenced.restore()
        go_on(first, fenced, 3, 4)
        manager.restore(step=2)
        second.train(2)
        state = second.state()
        manager.step()
        for number in (4, 5):
            first.train(number)
            with pytest.raises((BackgroundSaveFailed, Fenced), match=PROCESS):
                fenced.save()
        manager.save()
        kinds = [record.kind for record in manager.store.log(limit=3)]
    assert kinds == ["delta", "rollback", "fence"]
    assert_same(state, uninterrupted(KIND, 3))


def test_a_version_that_expired_behind_its_restore_is_not_gone_on_from(url: str) -> None:
    training = Training(KIND)
    with Store.open(url) as store, manager_of(url, training) as manager:
        manager.restore(step=1)
        collect_garbage(store, policy=RetentionPolicy(keep_last=1), dry_run=False)
        training.train(1)

        manager.step()
        with pytest.raises(VersionExpired, match="restore another one"):
            manager.wait_until_finished()

        manager.restore()
        go_on(training, manager, 3, 4)
    assert_same(training.state(), uninterrupted(KIND, 4))


class LosesReplies(FaultyFileSystem):
    """From the first commit behind ``is_armed`` on, as long as that is set, nobody learns what is in the log."""

    def __init__(self) -> None:
        super().__init__(IsolatedMemoryFileSystem(), on_call=self._meet)
        self.is_armed = self.is_down = self.takes = False

    def _meet(self, call: Call) -> None:
        if self.is_armed and "commits/" in call.path:
            self.is_down |= call.operation == "create"
            if self.is_down and not (self.takes and call.operation == "create"):
                raise FSTimeoutError("no answer")

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value, mode=mode, **options)
        if self.is_armed and self.is_down:
            raise FSTimeoutError("the reply was lost")


@pytest.mark.parametrize("is_rollback", [False, True])
@pytest.mark.parametrize("has_landed", [False, True])
def test_a_fence_whose_outcome_is_unknown_is_found_out(has_landed: bool, is_rollback: bool) -> None:
    backend = LosesReplies()
    retry = RetryPolicy(deadline_s=0.05)
    Store.create_on(storage_from_filesystem(backend, "/root"), threads=1, retry=retry).close()
    store = Store.open_on(storage_from_filesystem(backend, "/root"), threads=1, retry=retry)
    training = Training(KIND)
    with manager_of(store, training) as manager:
        go_on(training, manager, 0, 3)
    training = Training(KIND)
    with manager_of(store, training) as manager:
        restored = manager.restore(step=2 if is_rollback else 3)
        assert restored is not None
        training.train(restored.step)
        head = store.latest_version()
        backend.is_armed, backend.takes = True, has_landed
        manager.step()
        with pytest.raises(CommitStateUnknown):
            manager.wait_until_finished()
        backend.is_armed = False

        manager.save()

        kinds = [record.kind for record in store.log(limit=store.latest_version() - head)]
        assert kinds == (["delta", "rollback", "fence"] if is_rollback else ["delta", "fence"])
    assert_same(training.state(), uninterrupted(KIND, restored.step + 1))
    store.close()


def test_a_tag_of_unknown_outcome_is_not_taken_for_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the fence was sent: what another thread's append left open says nothing of whether it landed."""
    backend = LosesReplies()
    retry = RetryPolicy(deadline_s=0.05)
    store = Store.create_on(storage_from_filesystem(backend, "/root"), threads=1, retry=retry)
    training = Training(KIND)
    with manager_of(store, training) as manager:
        go_on(training, manager, 0, 3)
    training = Training(KIND)
    with manager_of(store, training) as manager:
        manager.restore()
        training.train(3)
        head = store.latest_version()
        look = StoreInternals.writable_head

        def tag_behind(self: StoreInternals) -> LogEntry:
            found = look(self)
            monkeypatch.setattr(StoreInternals, "writable_head", look)
            backend.is_armed = True
            with pytest.raises(CommitStateUnknown):
                store.tag("kept", head)
            backend.is_down = False  # until something is sent again
            return found

        monkeypatch.setattr(StoreInternals, "writable_head", tag_behind)
        manager.step()
        with pytest.raises(CommitStateUnknown, match="earlier append"):
            manager.wait_until_finished()
        backend.is_armed = False

        manager.save()

        kinds = [record.kind for record in store.log(limit=store.latest_version() - head)]
        assert kinds == ["delta", "fence", "tag"]
    assert_same(training.state(), uninterrupted(KIND, 4))
    store.close()


def test_all_ranks_go_on_or_are_told_who_did() -> None:
    files = IsolatedMemoryFileSystem()
    Store.create_on(storage_from_filesystem(files, "/root"), threads=1).close()

    def run(act: Callable[[Training, CheckpointManager], Any]) -> list[Any]:
        def one(rank: ThreadRank) -> Any:
            training = Training(KIND)
            store = Store.open_on(storage_from_filesystem(files, "/root"), threads=1)
            with store, manager_of(store, training, ranks=rank, rng=False) as manager:
                return act(training, manager)

        return on_ranks(2, one)

    def begin(training: Training, manager: CheckpointManager) -> None:
        go_on(training, manager, 0, 2)

    def meet(training: Training, manager: CheckpointManager) -> list[str]:
        manager.restore()
        if manager._training.ranks.rank == 0:
            with Store.open_on(storage_from_filesystem(files, "/root"), threads=1) as store:
                store.writer().close()
        manager._training.ranks.exchange(b"")
        told = []
        for act in (partial(step_until_told, manager), manager.save):
            training.train(2)
            with pytest.raises(Conflict, match="has continued from the state") as error:
                act()
            told.append(str(error.value))
        steps = manager._training.ranks.exchange(str(manager.current_step).encode())
        assert len(set(steps)) == 1
        return told

    def step_until_told(manager: CheckpointManager) -> None:
        while True:
            manager.step()

    def resume(training: Training, manager: CheckpointManager) -> list[str]:
        manager.restore(step=1)
        go_on(training, manager, 1, 3)
        return [record.kind for record in manager.store.log(limit=4)]

    run(begin)
    assert all(PROCESS in told for rank in run(meet) for told in rank)
    assert run(resume) == [["delta", "delta", "rollback", "fence"]] * 2
