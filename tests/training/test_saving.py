"""Saving behind the training: what fails is saved later, what is busy waits, and errors come to the surface."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.exceptions import FSTimeoutError
from torch import nn

from cnr_store import BackgroundSaveFailed, BadInput, StorageFailure, Store, TableOptions
from cnr_store.errors import CommitStateUnknown, Fenced, NonFiniteValues, SaveInProgress, TableNotFound
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.storage import storage_from_filesystem
from cnr_store.training import CheckpointManager
from cnr_store_gpu import StagingBuffers
from cnr_store_gpu.transfer import HostTransfer
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.training.runs import Training, grouped


class Backend(FaultyFileSystem):
    """A file system whose owner says when it fails, loses replies of commits, or holds writes up."""

    def __init__(self) -> None:
        super().__init__(IsolatedMemoryFileSystem(), on_call=self._meet)
        self.fails = False
        self.loses_commits = False
        self.gate = threading.Event()
        self.gate.set()
        self.is_held = threading.Event()

    def _meet(self, call: Call) -> None:
        if call.operation in ("write", "create"):
            if not self.gate.is_set():
                self.is_held.set()
            assert self.gate.wait(60)
        if self.fails or (self.loses_commits and "commits/" in call.path and call.operation == "read"):
            raise OSError(5, f"the backend is down at call {call.index}")

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode=mode, **kwargs)
        if self.loses_commits and mode == "create" and "commits/" in path:
            raise FSTimeoutError("the reply was lost")


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    made.gate.set()


def create(backend: Backend) -> Store:
    retry = RetryPolicy(deadline_s=0.05)
    return Store.create_on(storage_from_filesystem(backend, "/root"), threads=2, retry=retry)


def manager_of(store: Store, training: Training, **options: Any) -> CheckpointManager:
    chosen = {"options": TableOptions.exact(), "assume": {"RowWiseAdagrad": "touched"}, **options}
    return CheckpointManager(store, model=training.model, optimizer=training.optimizers, **grouped(**chosen))


def assert_stored(store: Store, training: Training) -> None:
    """The head holds the live values: weights, slots and dense tensors, bit for bit."""
    head = store.snapshot()
    for name in ("user.weight", "item.weight"):
        weight = dict(training.model.named_parameters())[name]
        np.testing.assert_array_equal(head.table(name).read(), weight.detach().cpu().numpy())
        slot = training.optimizers[0].state[weight]["momentum1"]
        np.testing.assert_array_equal(head.table(name).read(slot="momentum1"), slot.cpu().numpy())
    np.testing.assert_array_equal(head.read_dense("out.weight"), training.model.out.weight.detach().cpu().numpy())


@pytest.mark.parametrize("policy", ["baseline", "consecutive", "one_shot", "intermittent"])
def test_rows_of_a_failed_save_are_in_the_next_one(policy: Any, backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, policy=policy)
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
    manager.close()


def test_a_first_full_that_failed_is_tried_again(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    training.train(0)
    backend.fails = True
    with pytest.raises(StorageFailure):  # opening the writer, before anything runs in the background
        manager.save()
    backend.fails = False
    training.train(1)

    manager.save()

    assert_stored(store, training)
    manager.close()


def test_training_that_is_only_warned_goes_on_and_loses_nothing(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1, on_error="warn")
    training.train(0)
    manager.step()
    backend.fails = True
    training.train(1)
    manager.step()
    training.train(2)
    with pytest.warns(RuntimeWarning, match="its rows are saved with the next one"):
        manager.step()
    while manager.is_saving:
        pass
    backend.fails = False
    training.train(3)
    with pytest.warns(RuntimeWarning, match="was not saved"):
        manager.step()
    manager.save()

    assert_stored(store, training)
    manager.close()


def test_an_error_in_the_background_stops_the_next_step_once(backend: Backend) -> None:
    training = Training()
    manager = manager_of(create(backend), training, every_steps=1)
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
    training = Training()
    manager = manager_of(create(backend), training)
    manager.save()
    backend.fails = True
    training.train(0)
    manager.save(wait=False)

    with pytest.raises(BackgroundSaveFailed):
        manager.close()

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
    store, training = create(backend), Training()
    manager = manager_of(store, training, policy=policy)
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
    manager.close()


def test_an_unknown_outcome_that_lost_is_saved_again(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
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
    manager.close()


def test_close_finds_out_what_became_of_an_unknown_outcome(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    manager.save()
    training.train(0)
    backend.loses_commits = True
    with pytest.raises(BackgroundSaveFailed):
        manager.save()
    backend.loses_commits = False

    manager.close()

    assert len(manager.history) == 2
    assert_stored(store, training)


def test_waiting_saves_follow_each_other(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1, when_busy="wait")
    for number in range(4):
        training.train(number)
        manager.step()
    manager.close()

    assert [report.step for report in manager.history] == [1, 2, 3, 4]
    assert_stored(store, training)


def test_a_skipped_save_leaves_its_rows_to_the_next(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1, when_busy="skip")
    training.train(0)
    manager.step()
    backend.gate.clear()
    for number in (1, 2, 3):
        training.train(number)
        manager.step()
    backend.gate.set()
    manager.save()
    manager.close()

    assert [report.step for report in manager.history] == [1, 2, 4]
    assert_stored(store, training)


def test_a_busy_manager_can_refuse(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1, when_busy="refuse")
    training.train(0)
    manager.step()
    backend.gate.clear()
    training.train(1)
    manager.step()
    training.train(2)
    with pytest.raises(SaveInProgress):
        manager.step()
    backend.gate.set()

    manager.save()

    manager.close()
    assert_stored(store, training)


def test_training_goes_on_while_a_save_is_written(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    training.train(0)
    manager.save()
    training.train(1)
    expected = training.model.user.weight.detach().clone()
    backend.gate.clear()
    manager.save(wait=False)
    for number in (2, 3, 4):
        training.train(number)
        manager.step()
    backend.gate.set()
    while manager.is_saving:
        pass

    np.testing.assert_array_equal(store.snapshot().table("user.weight").read(), expected.cpu().numpy())
    manager.close()


def test_slots_that_appear_later_make_a_full(backend: Backend) -> None:
    store, training = create(backend), Training("sparse_adam")
    manager = manager_of(store, training, every_steps=1)
    manager.save()
    for number in range(2):
        training.train(number)
        manager.step()
    manager.close()

    assert [report.kind for report in manager.history] == ["baseline", "baseline", "delta"]
    head = store.snapshot().table("user.weight")
    state = training.optimizers[0].state[training.model.user.weight]
    np.testing.assert_array_equal(head.read(slot="exp_avg"), state["exp_avg"].cpu().numpy())


def test_a_later_full_reads_no_live_table(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, policy="baseline", every_steps=1)
    for number in range(3):
        training.train(number)
        manager.step()
    manager.close()

    assert [report.kind for report in manager.history] == ["baseline"] * 3
    assert manager.history[0].rows == 450
    assert manager.history[2].rows < 120
    assert_stored(store, training)


def test_a_chain_is_closed_by_a_full(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1, rng=False)
    for number in range(66):
        training.train(number)
        manager.step()
    manager.close()

    assert [report.kind for report in manager.history].count("baseline") == 2
    assert manager.history[64].kind == "baseline"
    assert_stored(store, training)


def test_a_fenced_training_stops_saving(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    manager.save()
    store.writer()
    training.train(0)
    with pytest.raises(BackgroundSaveFailed) as failed:
        manager.save()
    assert isinstance(failed.value.__cause__, Fenced)

    with pytest.raises(Fenced):
        manager.save()

    manager.close()


def test_a_fenced_training_saves_again_behind_a_restore_of_an_empty_store(backend: Backend) -> None:
    """Only a restore that found a checkpoint ended the fence; behind one of an empty store no save was possible."""
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    manager.restore()
    manager.step()
    store.writer()
    with pytest.raises(BackgroundSaveFailed):
        manager.save()

    assert manager.restore() is None
    training.train(0)
    manager.step()
    manager.save()

    assert_stored(store, training)
    manager.close()


def test_a_head_moved_by_somebody_else_is_followed_by_a_full(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    manager.save()
    training.train(0)
    manager.save()
    store.rollback(manager.history[0].version)
    training.train(1)
    with pytest.raises(BackgroundSaveFailed):
        manager.save()

    report = manager.save()

    assert report is not None
    assert report.kind == "baseline"
    assert_stored(store, training)
    manager.close()


def test_rows_that_cannot_be_stored_stay_dirty_until_they_can(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
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
    manager.close()


def test_a_due_save_waits_for_the_step_boundary(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1)
    users, items, _ = training.batch(0)
    loss = training.model(users, items).sum()
    manager.step()
    assert manager.history == []
    loss.backward()
    for optimizer in training.optimizers:
        optimizer.step()

    manager.step()

    manager.close()
    assert [report.step for report in manager.history] == [2]
    assert_stored(store, training)


def test_a_save_in_the_middle_of_a_step_is_refused(backend: Backend) -> None:
    training = Training()
    manager = manager_of(create(backend), training)
    users, items, _ = training.batch(0)
    training.model(users, items).sum().backward()

    with pytest.raises(BadInput, match="between forward and optimizer step"):
        manager.save()

    for optimizer in training.optimizers:
        optimizer.step()
    manager.save()
    manager.close()


def test_saves_are_due_by_time(backend: Backend) -> None:
    training = Training()
    manager = manager_of(create(backend), training, every_seconds=1e-6)
    for number in range(2):
        training.train(number)
        manager.step()
    manager.close()

    assert len(manager.history) == 2


def test_a_declared_parameter_is_a_table(backend: Backend) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(50, 1))
            self.tied = nn.Embedding(20, 3)
            self.head = nn.Linear(3, 20, bias=False)
            self.head.weight = self.tied.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.rows[ids].sum() + self.head(self.tied(ids)).sum()

    store, model = create(backend), Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = CheckpointManager(store, model=model, optimizer=optimizer, tables=["rows"], options=TableOptions.exact())
    manager.save()
    model(torch.tensor([3, 5])).backward()
    optimizer.step()

    report = manager.save()

    assert report is not None
    assert report.rows == 2 + 20  # the tied table moves every row through the output layer
    head = store.snapshot()
    assert set(head.tables) == {"rows", "tied.weight"}
    assert set(head.dense) == set()
    np.testing.assert_array_equal(head.table("rows").read(), model.rows.detach().cpu().numpy())
    manager.close()


def test_decaying_optimizers_are_refused_unless_accepted(backend: Backend) -> None:
    store, training = create(backend), Training("adam")
    decaying = torch.optim.AdamW(training.model.parameters(), weight_decay=0.1)
    training.optimizers = [decaying]
    with pytest.raises(BadInput, match="allow_dense"):
        manager_of(store, training)

    manager = manager_of(store, training, allow_dense=True, every_steps=1)
    for number in range(3):
        training.train(number)
        manager.step()
    manager.close()

    assert [report.rows for report in manager.history] == [450] * 3
    weight = training.model.user.weight.detach()
    np.testing.assert_array_equal(store.snapshot().table("user.weight").read(), weight.cpu().numpy())


def test_wrong_arguments_are_named(backend: Backend) -> None:
    store, training = create(backend), Training()
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)

    with pytest.raises(TableNotFound, match="no parameter 'nothing'"):
        manager_of(store, training, tables=["nothing"])
    with pytest.raises(BadInput, match="not the model's"):
        CheckpointManager(store, model=training.model, optimizer=stranger)
    with pytest.raises(BadInput, match="when_busy"):
        manager_of(store, training, when_busy="never")
    with pytest.raises(BadInput, match="policy"):
        manager_of(store, training, policy="sometimes")
    with pytest.raises(BadInput, match="state_dict"):
        manager_of(store, training, reader=iter([]))
    with pytest.raises(BadInput, match="other"):
        manager_of(store, training, options={"other": TableOptions()})


def test_a_report_says_what_a_save_cost(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    training.train(0)
    report = manager.save()
    manager.close()

    assert report is not None
    assert report == manager.last_save
    assert report.size_bytes == store.record(report.version).chain[-1].bytes
    assert report.stall_s > 0
    assert report.encode_s > 0
    assert report.commit_s > 0


def test_an_interrupted_first_full_is_no_torn_one(backend: Backend) -> None:
    """Ctrl-C left save() while the background was still reading the live tables."""
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    training.train(0)
    manager.restore()
    manager.step()  # takes the store over
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
    manager.close()


def test_a_save_that_never_meets_a_step_boundary_is_told_once(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1)
    users, items, _ = training.batch(0)
    training.model(users, items)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(40):
            manager.step()

    assert len(told) == 1
    assert "no checkpoint for 8 steps" in str(told[0].message)
    assert "between forward and optimizer step" in str(told[0].message)
    assert manager.history == []
    training.train(0)
    manager.step()
    manager.close()
    assert_stored(store, training)


def test_the_loop_ends_only_behind_its_save(backend: Backend) -> None:
    """step() said after SIGTERM that the state was saved although it had waited for a step boundary."""
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    users, items, _ = training.batch(0)
    training.model(users, items)
    manager.should_stop = True

    assert manager.step() is False
    assert manager.history == []
    training.train(0)

    assert manager.step() is True
    assert_stored(store, training)
    manager.close()


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_thread_that_does_not_start_takes_no_rows_along(
    on_error: Any, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1, on_error=on_error)
    manager.save()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(manager._saver.background._pool, "_threads", set())
    monkeypatch.setattr(manager._saver.background._pool, "_idle_semaphore", threading.Semaphore(0))
    training.train(0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        if on_error == "raise":
            with pytest.raises(BackgroundSaveFailed, match="can't start new thread"):
                manager.step()
        else:
            with pytest.warns(RuntimeWarning, match="can't start new thread"):
                manager.step()
    training.train(1)

    report = manager.save()

    assert report is not None
    assert report.kind == "delta"
    assert_stored(store, training)
    manager.close()


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_staging_thread_that_does_not_start_fails_one_save(
    on_error: Any, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by review: on an accelerator the bare RuntimeError ended the training, whatever ``on_error`` said."""
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1, on_error=on_error)
    manager.save()
    transfer = HostTransfer()
    manager._saver.stager.buffers = StagingBuffers(transfer=transfer)  # a thread stages, as on an accelerator

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    training.train(0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        if on_error == "raise":
            with pytest.raises(BackgroundSaveFailed, match="can't start new thread"):
                manager.step()
        else:
            with pytest.warns(RuntimeWarning, match="can't start new thread"):
                manager.step()
    transfer.close()
    manager._saver.stager.buffers = StagingBuffers()
    training.train(1)

    report = manager.save()

    assert report is not None
    assert report.kind == "delta"
    assert_stored(store, training)
    manager.close()


def test_rows_that_were_copied_for_a_save_that_could_not_begin_are_released(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    training.train(0)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("cnr_store.training.save_staging.SaveStager._whole_shards", fail)
        with pytest.raises(MemoryError):
            manager.save()

    manager.save()

    assert_stored(store, training)
    manager.close()


def test_a_manager_lists_the_steps_that_can_be_restored(backend: Backend) -> None:
    training = Training()
    manager = manager_of(create(backend), training, every_steps=2)
    assert (manager.latest_step(), manager.all_steps()) == (None, [])
    for number in range(5):
        training.train(number)
        manager.step()
    manager.wait_until_finished()

    assert (manager.latest_step(), manager.all_steps()) == (4, [2, 4])
    manager.close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="the system cannot fork")
@pytest.mark.parametrize("wanted", [True, "flag"])
def test_forked_helpers_can_be_terminated(wanted: Any, backend: Backend) -> None:
    """They inherited a handler that only set a flag."""
    manager = manager_of(create(backend), Training(), save_on_sigterm=wanted)
    forking = multiprocessing.get_context("fork")
    is_up = forking.Event()

    def stay() -> None:
        is_up.set()
        time.sleep(60)

    child = forking.Process(target=stay)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about forking a process that has threads
        child.start()
    assert is_up.wait(20)  # Python itself drops signals that come while it forks

    child.terminate()
    child.join(20)

    code = child.exitcode
    child.kill()
    assert code == -signal.SIGTERM
    assert not manager.should_stop
    os.kill(os.getpid(), signal.SIGTERM)
    assert manager.should_stop
    manager.close()


def test_sparse_momentum_is_not_made_dense_in_a_delta(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    store, model = create(backend), nn.Embedding(500, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = CheckpointManager(store, model=model, optimizer=optimizer, options=TableOptions.exact())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    manager.save()
    model(torch.tensor([2, 3])).sum().backward()
    optimizer.step()
    made: list[int] = []
    real = torch.Tensor.to_dense

    def count(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        made.append(tensor.shape[0])
        return real(tensor, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to_dense", count)
        report = manager.save()

    assert report is not None
    assert report.kind == "delta"
    assert made
    assert max(made) <= 3
    expected = optimizer.state[model.weight]["momentum_buffer"].to_dense()
    np.testing.assert_array_equal(store.snapshot().table("weight").read(slot="momentum_buffer"), expected.cpu().numpy())
    manager.close()


@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
def test_a_commit_that_failed_behind_its_back_is_saved_and_followed_by_a_full(
    policy: Any, backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told as "a checkpoint was not saved", which is false."""
    store, training = create(backend), Training()
    manager = manager_of(store, training, policy=policy)
    manager.save()
    training.train(0)

    def fail(*_: object) -> None:
        raise MemoryError("moving a mirror")

    with monkeypatch.context() as patch:
        patch.setattr("cnr_store.write.staged_tables.apply_tables", fail)
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
    manager.close()


def test_an_unknown_outcome_that_won_and_then_failed_is_not_taken_for_lost(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    manager.save()
    training.train(0)
    backend.loses_commits = True
    with pytest.raises(BackgroundSaveFailed):
        manager.save()
    backend.loses_commits = False
    training.train(1)

    def fail(*_: object) -> None:
        raise MemoryError("moving a mirror")

    with monkeypatch.context() as patch:
        patch.setattr("cnr_store.write.staged_tables.apply_tables", fail)
        manager.save()

    assert [report.kind for report in manager.history] == ["baseline", "delta", "baseline"]
    assert_stored(store, training)
    manager.close()
