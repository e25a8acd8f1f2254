"""Saving behind the training: what is busy waits, and what a save is and reports."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import BadInput, TableOptions
from cnr_store.errors import SaveInProgress, TableNotFound
from cnr_store.training import CheckpointManager, TrackingOptions, load
from tests.training.faulty_runs import Backend, assert_stored, begun, create
from tests.training.runs import Training, assert_same, go_on, manager_of


def test_waiting_saves_follow_each_other(backend: Backend) -> None:
    store, training, manager = begun(backend, every_steps=1, when_busy="wait")
    go_on(training, manager, 0, 4)
    manager.close()

    assert [report.step for report in manager.history] == [1, 2, 3, 4]
    assert_stored(store, training)


def test_calls_of_several_threads_take_turns(backend: Backend) -> None:
    """A regression: an AttributeError or AssertionError of one of them, from within."""
    store, training, manager = begun(backend, every_steps=1, when_busy="wait")
    training.train(0)
    with ThreadPoolExecutor(4) as threads:
        made = [threads.submit(manager.save) for _ in range(8)]
        reports = [one.result() for one in made]
    manager.close()

    assert len({report.version for report in reports if report is not None}) == 8
    assert_stored(store, training)


def test_a_forked_process_is_told_that_the_manager_is_not_its_own(tmp_path: Path) -> None:
    """A regression: it waited without end for threads that only its parent has."""
    training = Training()
    with manager_of(str(tmp_path / "store"), training) as manager:
        manager.save()
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BadInput):
                manager.close()
                manager.save()
                code = 2
            os._exit(code - 1)
        assert os.waitpid(child, 0) == (child, 0)
        manager.save()


def test_a_store_announces_the_saves_of_a_training(backend: Backend) -> None:
    store, training, manager = begun(backend, every_steps=1, when_busy="wait")
    told: list[int] = []
    store.announce_to(told.append)
    go_on(training, manager, 0, 4)
    manager.close()

    saved = [report.version for report in manager.history]
    assert [version for version in told if version in saved] == saved


def test_a_skipped_save_leaves_its_rows_to_the_next(backend: Backend) -> None:
    store, training, manager = begun(backend, every_steps=1, when_busy="skip")
    training.train(0)
    manager.step()
    backend.gate.clear()
    go_on(training, manager, 1, 4)
    backend.gate.set()
    manager.save()
    manager.close()

    assert [report.step for report in manager.history] == [1, 2, 4]
    assert_stored(store, training)


@pytest.mark.parametrize("every_steps", [1, 3])
def test_a_save_that_comes_later_has_the_rows_of_all_steps_since(backend: Backend, every_steps: int) -> None:
    store, training, manager = begun(backend, every_steps=every_steps, when_busy="later")
    go_on(training, manager, 0, every_steps)
    backend.gate.clear()
    go_on(training, manager, every_steps, 3 * every_steps)  # one save is written, and another one is due
    backend.gate.set()
    manager.wait_until_finished()
    training.train(3 * every_steps)
    manager.step()
    manager.close()

    assert [report.step for report in manager.history] == [every_steps, 2 * every_steps, 3 * every_steps + 1]
    assert_stored(store, training)


def test_a_busy_manager_can_refuse(backend: Backend) -> None:
    store, training, manager = begun(backend, every_steps=1, when_busy="refuse")
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
    store, training, manager = begun(backend)
    training.train(0)
    manager.save()
    training.train(1)
    expected = training.model.user.weight.detach().clone()
    backend.gate.clear()
    manager.save(wait=False)
    go_on(training, manager, 2, 5)
    backend.gate.set()
    while manager.is_saving:
        pass

    np.testing.assert_array_equal(store.snapshot().table("user.weight").read(), expected.cpu().numpy())


def test_slots_that_appear_later_make_a_full(backend: Backend) -> None:
    store, training = create(backend), Training("sparse_adam")
    manager = manager_of(store, training, every_steps=1)
    manager.save()
    go_on(training, manager, 0, 2)
    manager.close()

    assert [report.kind for report in manager.history] == ["baseline", "baseline", "delta"]
    head = store.snapshot().table("user.weight")
    state = training.optimizers[0].state[training.model.user.weight]
    np.testing.assert_array_equal(head.read(slot="exp_avg"), state["exp_avg"].cpu().numpy())


def test_a_later_full_reads_no_live_table(backend: Backend) -> None:
    store, training, manager = begun(backend, policy="baseline", every_steps=1)
    go_on(training, manager, 0, 3)
    manager.close()

    assert [report.kind for report in manager.history] == ["baseline"] * 3
    assert manager.history[0].rows == 450
    assert manager.history[2].rows < 120
    assert_stored(store, training)


def test_a_chain_is_closed_by_a_full(backend: Backend) -> None:
    store, training, manager = begun(backend, every_steps=1, rng=False)
    go_on(training, manager, 0, 66)
    manager.close()

    assert [report.kind for report in manager.history].count("baseline") == 2
    assert manager.history[64].kind == "baseline"
    assert_stored(store, training)


def test_a_due_save_waits_for_the_step_boundary(backend: Backend) -> None:
    store, training, manager = begun(backend, every_steps=1)
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
    _, training, manager = begun(backend)
    users, items, _ = training.batch(0)
    training.model(users, items).sum().backward()

    with pytest.raises(BadInput, match="between forward and optimizer step"):
        manager.save()

    for optimizer in training.optimizers:
        optimizer.step()
    manager.save()


def test_saves_are_due_by_time(backend: Backend) -> None:
    _, training, manager = begun(backend, every_seconds=1e-6)
    go_on(training, manager, 0, 2)
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
    manager = CheckpointManager(
        store, model=model, optimizer=optimizer, tracking=TrackingOptions(tables=["rows"]), options=TableOptions.exact()
    )
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


def test_an_embedding_that_is_added_later_needs_a_new_manager() -> None:
    """A regression: it was saved as a dense tensor, which no training that has it as a table restored."""
    model = nn.Sequential(nn.Embedding(9, 2))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def train(manager: CheckpointManager) -> None:
        sum(layer(torch.tensor([1, 2])).sum() for layer in model).backward()  # type: ignore[union-attr]
        optimizer.step()
        manager.step()

    url, exact = "memory://added-embedding", TableOptions.exact()
    with CheckpointManager(url, model=model, optimizer=optimizer, every_steps=1, options=exact) as manager:
        train(manager)
        model.append(nn.Embedding(5, 2))
        optimizer.add_param_group({"params": [*model[1].parameters()]})
        with pytest.raises(BadInput, match=r"\['1.weight'\] \(1 embeddings\) were added.*make a new one"):
            train(manager)
    with CheckpointManager(url, model=model, optimizer=optimizer, every_steps=1, options=exact) as manager:
        train(manager)
    restored = nn.Sequential(nn.Embedding(9, 2), nn.Embedding(5, 2))
    load(url, restored)
    assert_same(dict(restored.state_dict()), dict(model.state_dict()))


def test_decaying_optimizers_are_refused_unless_accepted(backend: Backend) -> None:
    store, training = create(backend), Training("adam")
    decaying = torch.optim.AdamW(training.model.parameters(), weight_decay=0.1)
    training.optimizers = [decaying]
    with pytest.raises(BadInput, match="allow_dense"):
        manager_of(store, training)

    manager = manager_of(store, training, allow_dense=True, every_steps=1)
    go_on(training, manager, 0, 3)
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
    store, training, manager = begun(backend)
    training.train(0)
    report = manager.save()
    manager.close()

    assert report is not None
    assert report == manager.last_save
    assert report.size_bytes == store.record(report.version).chain[-1].size_bytes
    assert report.stall_s > 0
    assert report.encode_s > 0
    assert report.commit_s > 0


def test_a_save_that_never_meets_a_step_boundary_is_told_ever_less_often(backend: Backend) -> None:
    store, training, manager = begun(backend, every_steps=1)
    users, items, _ = training.batch(0)
    training.model(users, items)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(500):
            manager.step()

    assert [re.findall(r"no checkpoint for (\d+) steps", str(one.message)) for one in told] == [["8"], ["64"]]
    assert "between forward and optimizer step" in str(told[0].message)
    assert manager.history == []
    training.train(0)
    manager.step()
    manager.close()
    assert_stored(store, training)


def test_lookups_with_gradients_and_no_backward_put_no_save_off_for_ever(backend: Backend) -> None:
    """An evaluation with gradients between optimizer.step() and step() meant that no save was ever made."""
    store, training, manager = begun(backend, every_steps=1)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(12):
            training.train(number)
            users, items, _ = training.batch(number + 100)
            training.model(users, items)
            manager.step()
            manager.wait_until_finished()

    assert [report.step for report in manager.history] == [8, 9, 10, 11, 12]
    (only,) = told
    assert "no checkpoint for 8 steps although one is due; it is made now" in str(only.message)
    assert "torch.no_grad()" in str(only.message)
    manager.close()
    assert_stored(store, training)


def test_an_update_of_a_lookup_that_a_save_did_not_wait_for_is_in_the_next(backend: Backend) -> None:
    store, training, manager = begun(backend, every_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(9):
            training.train(number)
            users, items, _ = training.batch(number + 100)
            loss = training.model(users, items).sum()
            manager.step()
            manager.wait_until_finished()
    assert len(manager.history) == 2

    loss.backward()
    for optimizer in training.optimizers:
        optimizer.step()
    manager.step()
    manager.close()

    assert [report.step for report in manager.history] == [8, 9, 10]
    assert_stored(store, training)


@pytest.mark.parametrize(("every_steps", "saves"), [(None, False), (None, True), (10, False)])
def test_a_manager_that_only_the_caller_saves_says_so_if_it_never_did(
    every_steps: int | None, saves: bool, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    _, training, manager = begun(backend, every_steps=every_steps)
    go_on(training, manager, 0, 3, saves=saves)

    manager.close()

    is_silent = saves or every_steps is not None
    assert is_silent or "step 3 is the last, and nothing was saved" in caplog.text
    assert not is_silent or "nothing was saved" not in caplog.text


def test_steps_that_are_counted_anew_are_saved_as_often(backend: Backend) -> None:
    """After an epoch of 100 steps no save of the next was due, where a loop gives step() its number in the epoch."""
    _, training, manager = begun(backend, every_steps=2)
    for _ in range(2):
        for number in range(5):
            training.train(number)
            manager.step(number)
            manager.wait_until_finished()

    assert [report.step for report in manager.history] == [2, 4, 2, 4]
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(BadInput, match=r"step must be a whole number .* found"):
            manager.step(wrong)  # type: ignore[arg-type]
    assert manager.current_step == 4


def test_the_loop_ends_only_behind_its_save(backend: Backend) -> None:
    """step() said after SIGTERM that the state was saved although it had waited for a step boundary."""
    store, training, manager = begun(backend)
    users, items, _ = training.batch(0)
    training.model(users, items)
    manager.should_stop = True

    assert manager.step() is False
    assert manager.history == []
    training.train(0)

    assert manager.step() is True
    assert_stored(store, training)


def test_a_manager_lists_the_steps_that_can_be_restored(backend: Backend) -> None:
    _, training, manager = begun(backend, every_steps=2)
    assert (manager.latest_step(), manager.all_steps()) == (None, [])
    go_on(training, manager, 0, 5)
    manager.wait_until_finished()

    assert (manager.latest_step(), manager.all_steps()) == (4, [2, 4])


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
