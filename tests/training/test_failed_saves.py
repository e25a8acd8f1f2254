"""Saves that fail: nothing is lost, what failed is saved later, and errors come to the surface."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.exceptions import FSTimeoutError

from cnr_store import BackgroundSaveFailed, StorageFailure
from cnr_store.errors import CommitStateUnknown, Fenced, NonFiniteValues
from cnr_store.training import CheckpointManager
from cnr_store_gpu import StagingBuffers
from cnr_store_gpu.transfer import HostTransfer
from tests.support.faulty import Call
from tests.training.faulty_runs import Backend, assert_stored, begun, create
from tests.training.runs import Training, manager_of


@pytest.mark.parametrize("policy", ["baseline", "consecutive", "one_shot", "intermittent"])
def test_rows_of_a_failed_save_are_in_the_next_one(policy: Any, backend: Backend) -> None:
    store, training, manager = begun(backend, policy=policy)
    training.train(0)
    manager.save()
    training.train(1)
    backend.fails = True
    with pytest.raises(BackgroundSaveFailed) as failed:
        manager.save()
    backend.fails = False
    training.train(2)

    report = manager.save()

    assert isinstance(failed.value.__cause__, StorageFailure)
    assert report is not None
    assert report.kind == ("baseline" if policy == "baseline" else "delta")
    assert_stored(store, training)


def test_a_first_full_that_failed_is_tried_again(backend: Backend) -> None:
    store, training, manager = begun(backend)
    training.train(0)
    backend.fails = True
    with pytest.raises(StorageFailure):  # opening the writer, before anything runs in the background
        manager.save()
    backend.fails = False
    training.train(1)

    manager.save()

    assert_stored(store, training)


def test_training_that_is_only_warned_goes_on_and_loses_nothing(backend: Backend) -> None:
    store, training, manager = begun(backend, every_steps=1, on_error="warn")
    training.train(0)
    manager.step()
    backend.fails = True
    training.train(1)
    manager.step()
    training.train(2)
    with pytest.warns(RuntimeWarning, match="its rows are saved with the next one") as warned:
        manager.step()
    assert warned[0].filename == __file__  # it was a line of the library
    while manager.is_saving:
        pass
    backend.fails = False
    training.train(3)
    with pytest.warns(RuntimeWarning, match="was not saved"):
        manager.step()
    manager.save()

    assert_stored(store, training)


def test_an_error_in_the_background_stops_the_next_step_once(backend: Backend) -> None:
    _, training, manager = begun(backend, every_steps=1)
    training.train(0)
    manager.step()
    backend.fails = True
    training.train(1)
    manager.step()
    training.train(2)
    with pytest.raises(BackgroundSaveFailed):
        manager.step()
    backend.fails = False

    manager.step()

    manager.save()
    manager.close()
    assert manager.current_step == 4


def test_close_tells_of_the_last_error(backend: Backend) -> None:
    _, training, manager = begun(backend)
    manager.save()
    backend.fails = True
    training.train(0)
    manager.save(wait=False)

    with pytest.raises(BackgroundSaveFailed):
        manager.close()


def test_an_error_of_the_training_is_not_hidden_by_a_failed_save(backend: Backend) -> None:
    training = Training()

    def train_badly() -> None:
        with manager_of(create(backend), training) as manager:
            manager.save()
            backend.fails = True
            training.train(0)
            manager.save(wait=False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_badly()


@pytest.mark.parametrize("policy", ["consecutive", "one_shot", "baseline"])
def test_an_unknown_outcome_that_won_is_found_out_before_the_next_save(policy: Any, backend: Backend) -> None:
    store, training, manager = begun(backend, policy=policy)
    training.train(0)
    manager.save()
    training.train(1)
    backend.loses_commits = True
    with pytest.raises(BackgroundSaveFailed) as failed:
        manager.save()
    assert isinstance(failed.value.__cause__, CommitStateUnknown)
    training.train(2)
    with pytest.raises(CommitStateUnknown):
        manager.save()
    backend.loses_commits = False

    manager.save()

    assert len(manager.history) == 3
    assert [report.version for report in manager.history] == [2, 3, 4]
    assert_stored(store, training)


def test_an_unknown_outcome_that_lost_is_saved_again(backend: Backend) -> None:
    store, training, manager = begun(backend)
    training.train(0)
    manager.save()
    training.train(1)
    lost = []

    def refuse(call: Call) -> None:
        if "commits/" in call.path and call.operation in ("create", "read"):
            lost.append(call)
            raise FSTimeoutError("injected")

    calm, backend._on_call = backend._on_call, refuse
    with pytest.raises(BackgroundSaveFailed) as failed:
        manager.save()
    assert isinstance(failed.value.__cause__, CommitStateUnknown)
    backend._on_call = calm
    training.train(2)

    manager.save()

    assert lost
    assert_stored(store, training)


def test_close_finds_out_what_became_of_an_unknown_outcome(backend: Backend) -> None:
    store, training, manager = begun(backend)
    manager.save()
    training.train(0)
    backend.loses_commits = True
    with pytest.raises(BackgroundSaveFailed):
        manager.save()
    backend.loses_commits = False

    manager.close()

    assert len(manager.history) == 2
    assert_stored(store, training)


def test_a_fenced_training_stops_saving(backend: Backend) -> None:
    store, training, manager = begun(backend)
    manager.save()
    store.writer()
    training.train(0)
    with pytest.raises(BackgroundSaveFailed) as failed:
        manager.save()
    assert isinstance(failed.value.__cause__, Fenced)

    with pytest.raises(Fenced):
        manager.save()


def test_a_fenced_training_saves_again_behind_a_restore_of_an_empty_store(backend: Backend) -> None:
    """Only a restore that found a checkpoint ended the fence; behind one of an empty store no save was possible."""
    store, training, manager = begun(backend)
    manager.restore()
    manager.step()
    manager.wait_until_finished()
    store.writer()
    with pytest.raises(BackgroundSaveFailed):
        manager.save()

    assert manager.restore() is None
    training.train(0)
    manager.step()
    manager.save()

    assert_stored(store, training)


def test_a_head_moved_by_somebody_else_is_followed_by_a_full(backend: Backend) -> None:
    store, training, manager = begun(backend)
    manager.save()
    training.train(0)
    manager.save()
    store.rollback(manager.history[0].version)
    training.train(1)
    with pytest.raises(BackgroundSaveFailed, match="its next save is a baseline of all rows"):
        manager.save()

    report = manager.save()

    assert report is not None
    assert report.kind == "baseline"
    assert_stored(store, training)


def test_rows_that_cannot_be_stored_stay_dirty_until_they_can(backend: Backend) -> None:
    store, training, manager = begun(backend)
    manager.save()
    with torch.no_grad():
        training.model.user.weight[7] = torch.nan
    manager.tracker.mark("user.weight", [7])
    with pytest.raises(BackgroundSaveFailed) as failed:
        manager.save()
    assert isinstance(failed.value.__cause__, NonFiniteValues)
    assert failed.value.__cause__.table == "user.weight"
    with torch.no_grad():
        training.model.user.weight[7] = 1.0
    manager.tracker.mark("user.weight", [])

    manager.save()

    assert_stored(store, training)


def test_an_interrupted_first_full_is_no_torn_one(backend: Backend) -> None:
    """Ctrl-C left save() while the background was still reading the live tables."""
    store, training, manager = begun(backend)
    training.train(0)
    manager.restore()
    manager.step()
    manager.wait_until_finished()  # it has taken the store over
    tables = {"user.weight": training.model.user.weight, "item.weight": training.model.item.weight}
    expected = {name: weight.detach().clone() for name, weight in tables.items()}
    backend.gate.clear()

    def interrupt_twice() -> None:
        assert backend.is_held.wait(60)  # only then save() waits for the background
        for _ in range(2):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.4)
        backend.gate.set()

    interrupts = threading.Thread(target=interrupt_twice)
    interrupts.start()
    with pytest.raises(KeyboardInterrupt):
        manager.save()
    interrupts.join()
    was_saving = manager.is_saving
    training.train(1)
    report = manager.wait_until_finished()

    assert not was_saving
    assert report is not None
    for name, weight in expected.items():
        np.testing.assert_array_equal(store.snapshot().table(name).read(), weight.cpu().numpy())
    manager.save()
    assert_stored(store, training)


def test_a_takeover_that_a_save_was_interrupted_in_is_the_next_steps(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the step after Ctrl-C opened a second writer, and nothing closed the first."""
    store, training, manager = begun(backend)
    training.train(0)
    with monkeypatch.context() as patched:
        patched.setattr("cnr_store.training.training_writer.wait", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.save()
    manager.step()
    manager.save()

    assert store.head().record.epoch == 1
    assert_stored(store, training)


def raise_interrupt(_: Any) -> None:
    raise KeyboardInterrupt


def step_without_new_threads(manager: CheckpointManager, on_error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose save fails because no thread starts; who is only warned goes on."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told: Any = pytest.raises(BackgroundSaveFailed, match="can't start") if on_error == "raise" else None
    with monkeypatch.context() as patch, told or pytest.warns(RuntimeWarning, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", refuse)
        manager.step()


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_thread_that_does_not_start_takes_no_rows_along(
    on_error: Any, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, training, manager = begun(backend, every_steps=1, on_error=on_error)
    manager.save()

    monkeypatch.setattr(manager._saver.background._pool, "_threads", set())
    monkeypatch.setattr(manager._saver.background._pool, "_idle_semaphore", threading.Semaphore(0))
    training.train(0)
    step_without_new_threads(manager, on_error, monkeypatch)
    training.train(1)

    report = manager.save()

    assert report is not None
    assert report.kind == "delta"
    assert_stored(store, training)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_staging_thread_that_does_not_start_fails_one_save(
    on_error: Any, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by review: on an accelerator the bare RuntimeError ended the training, whatever ``on_error`` said."""
    store, training, manager = begun(backend, every_steps=1, on_error=on_error)
    manager.save()
    transfer = HostTransfer()
    manager._saver.stager.buffers = StagingBuffers(transfer=transfer)  # a thread stages, as on an accelerator

    training.train(0)
    step_without_new_threads(manager, on_error, monkeypatch)
    transfer.close()
    manager._saver.stager.buffers = StagingBuffers()
    training.train(1)

    report = manager.save()

    assert report is not None
    assert report.kind == "delta"
    assert_stored(store, training)


def test_rows_copied_for_a_save_that_could_not_begin_are_released(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, training, manager = begun(backend)
    training.train(0)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("cnr_store.training.save_staging.SaveStager._whole_shards", fail)
        with pytest.raises(MemoryError):
            manager.save()

    manager.save()

    assert_stored(store, training)


@contextmanager
def mirrors_that_fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block a save commits, and then fails to move its mirrors."""

    def fail(*_: object) -> None:
        raise MemoryError("moving a mirror")

    with monkeypatch.context() as patch:
        patch.setattr("cnr_store.write.staged_tables.apply_rows", fail)
        yield


@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
def test_a_commit_that_landed_but_failed_is_followed_by_a_baseline(
    policy: Any, backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told as "a checkpoint was not saved", which is false."""
    store, training, manager = begun(backend, policy=policy)
    manager.save()
    training.train(0)
    with mirrors_that_fail(monkeypatch):
        report = manager.save()

    assert report is not None
    assert report.version == store.latest_version()
    assert "is committed, but then failed" in caplog.text
    assert_stored(store, training)
    training.train(1)
    after = manager.save()
    assert after is not None
    assert after.kind == "baseline"
    assert_stored(store, training)


def test_an_unknown_outcome_that_won_and_then_failed_is_not_taken_for_lost(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, training, manager = begun(backend)
    manager.save()
    training.train(0)
    backend.loses_commits = True
    with pytest.raises(BackgroundSaveFailed):
        manager.save()
    backend.loses_commits = False
    training.train(1)
    with mirrors_that_fail(monkeypatch):
        manager.save()

    assert [report.kind for report in manager.history] == ["baseline", "delta", "baseline"]
    assert_stored(store, training)
