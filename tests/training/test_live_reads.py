"""Tables that are read while the training goes on: the checkpoint is of one step, whatever was torn on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import BackgroundSaveFailed, Store, TableOptions, verify_store
from cnr_store.errors import BadInput, NonFiniteValues
from cnr_store.training import CheckpointManager, tensors
from cnr_store.training.saver import SaveState
from cnr_store.write.transaction import Transaction
from tests.training import runs
from tests.training.runs import KINDS, Training, go_on, grouped

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch itself, by its Adagrad

ROWS, DIM = 2048, 8
TABLES = ("user.weight", "item.weight")


class TornRows(tensors.TensorRows):
    """Reads a few rows at a time, half of their columns now and the others later, as an unlucky thread does."""

    def __getitem__(self, rows: Any) -> Any:
        found = super().__getitem__(rows)
        if not isinstance(rows, slice) or found.ndim == 1:
            return found
        torn = np.empty_like(found)
        half = found.shape[1] // 2
        for start in range(0, len(found), 128):
            block = slice(start, start + 128)
            torn[block, :half] = found[block, :half]
            time.sleep(0.0005)
            torn[block, half:] = found[block, half:]
        return torn


@pytest.fixture
def torn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.training.background.TensorRows", TornRows)


class Gate:
    """Holds reads up before each table and behind it, as long as it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.is_reading = threading.Event(), threading.Event()
        read = Transaction.read_live

        def held(*args: Any, **kwargs: Any) -> bool:
            found = read(*args, **kwargs)
            self.is_reading.set()
            assert self.is_open.wait(30)
            return found

        monkeypatch.setattr(Transaction, "read_live", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.is_open.set()


manager_of = partial(runs.manager_of, first_baseline="live", threads=2)


def values_of(training: Training) -> dict[str, np.ndarray[Any, Any]]:
    """Weights and slots of the tables, copied."""
    found = {}
    for name in TABLES:
        weight = dict(training.model.named_parameters())[name]
        found[name] = weight.detach().cpu().numpy().copy()
        for slot, value in training.optimizers[0].state.get(weight, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim:
                found[f"{name}/{slot}"] = value.cpu().numpy().copy()
    return found


def assert_version(store: Store, version: int, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    snapshot = store.snapshot(version=version)
    for name, values in expected.items():
        table, _, slot = name.partition("/")
        np.testing.assert_array_equal(snapshot.table(table).read(slot=slot or None), values, err_msg=name)


def until_read(manager: CheckpointManager) -> None:
    manager._saver.background.read_error()


def test_the_first_full_is_of_the_step_at_which_it_was_read(tmp_path: Any, gate: Gate) -> None:
    training = Training()
    manager = manager_of(str(tmp_path / "store"), training, every_steps=2)
    for number in range(5):
        training.train(number)
        manager.step()
        assert manager.is_saving == (number >= 1)
    gate.is_open.set()
    until_read(manager)
    training.train(5)
    manager.step()
    expected = values_of(training)
    training.train(6)

    report = manager.wait_until_finished()

    assert report is not None
    assert (report.kind, report.step) == ("baseline", 6)
    assert_version(manager.store, report.version, expected)
    assert manager.store.snapshot().step == 6
    manager.close()


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad", "sgd", "sparse_adam", "adam"])
@pytest.mark.parametrize("options", [TableOptions.exact(), TableOptions(bits=4)], ids=["exact", "lattice"])
@pytest.mark.usefixtures("torn")
def test_every_version_is_what_its_step_trained(tmp_path: Any, kind: str, options: TableOptions) -> None:
    training = Training(kind)
    manager = manager_of(
        str(tmp_path / "store"), training, every_steps=3, options=options, allow_dense=not KINDS[kind][0]
    )
    states: dict[int, dict[str, np.ndarray[Any, Any]]] = {}
    for number in range(400):
        training.train(number)
        states[manager.current_step + 1] = values_of(training)
        manager.step()
        if len(manager.history) > 4:
            break
    manager.close()

    with Store.open(str(tmp_path / "store")) as store:
        assert manager.history[0].kind == "baseline"
        for report in manager.history:
            expected = states[report.step]
            if options == TableOptions.exact():
                assert_version(store, report.version, expected)
                continue
            snapshot = store.snapshot(version=report.version)
            for name in TABLES:
                scale = snapshot.tables[name].encoding.scale  # type: ignore[union-attr]
                np.testing.assert_allclose(snapshot.table(name).read(), expected[name], rtol=0, atol=0.501 * scale)
        assert verify_store(store, all_versions=True, deep=True).is_sound


class Counter(nn.Module):
    """A table whose rows a test writes by itself: the number of the step, in every column."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        nn.init.zeros_(self.table.weight)


def marked(manager: CheckpointManager, weight: torch.Tensor, rows: torch.Tensor, step: int) -> None:
    manager.tracker.mark("table.weight", rows)
    weight[rows] = step


def unmarked(manager: CheckpointManager, weight: torch.Tensor, rows: torch.Tensor, step: int) -> None:
    weight.data[rows] = step


def hammered(url: str, write: Callable[[CheckpointManager, torch.Tensor, torch.Tensor, int], None]) -> bool:
    """Write rows as fast as it goes while they are read; whether the first baseline is what they were at its step."""
    model, written = Counter(), np.zeros(ROWS, np.int64)
    manager = CheckpointManager(
        url, model=model, options=TableOptions.exact(), every_steps=3, **grouped(first_baseline="live", threads=2)
    )
    weight = model.table.weight.detach()
    random = np.random.default_rng(0)
    last_written: dict[int, np.ndarray[Any, Any]] = {}
    while not manager.history:
        rows = np.unique(random.integers(0, ROWS, 200))
        step = manager.current_step + 1
        write(manager, weight, torch.from_numpy(rows).to(weight.device), step)
        written[rows] = step
        last_written[step] = written.copy()
        manager.step()
    manager.close()
    report = manager.history[0]
    with Store.open(url) as store:
        found = store.snapshot(version=report.version).table("table.weight").read()
    return bool((found == last_written[report.step][:, None]).all())


@pytest.mark.usefixtures("torn")
def test_rows_that_say_their_step_are_all_of_the_step_of_the_checkpoint(tmp_path: Any) -> None:
    assert hammered(str(tmp_path / "marked"), marked)


@pytest.mark.usefixtures("torn")
def test_a_writer_that_does_not_mark_needs_the_stall(tmp_path: Any) -> None:
    """The proof rests on the marks: without them what was torn is in the checkpoint, and this test would see it."""
    assert not hammered(str(tmp_path / "unmarked"), unmarked)


def test_optimizer_state_made_while_tables_are_read_is_in_the_checkpoint(tmp_path: Any, gate: Gate) -> None:
    training = Training("sparse_adam")
    manager = manager_of(str(tmp_path / "store"), training)
    manager.save(wait=False)
    assert gate.is_reading.wait(30)
    training.train(0)
    gate.is_open.set()

    report = manager.wait_until_finished()

    assert report is not None
    assert_version(manager.store, report.version, values_of(training))
    assert set(manager.store.snapshot().tables["user.weight"].slots) == {"exp_avg", "exp_avg_sq"}
    manager.close()


def test_a_save_that_waits_is_of_its_own_step(tmp_path: Any) -> None:
    training = Training()
    manager = manager_of(str(tmp_path / "store"), training)
    training.train(0)

    report = manager.save()

    assert report is not None
    assert_version(manager.store, report.version, values_of(training))
    training.train(1)
    second = manager.save()
    assert second is not None
    assert second.kind == "delta"
    assert_version(manager.store, second.version, values_of(training))
    manager.close()


def test_tables_without_a_mirror_stall(tmp_path: Any) -> None:
    training = Training()
    manager = manager_of(str(tmp_path / "store"), training, mirror="none")
    training.train(0)
    manager.step()
    expected = values_of(training)

    manager.save()
    training.train(1)
    manager.step()
    report = manager.save()

    assert_version(manager.store, manager.history[0].version, expected)
    assert report is not None
    assert_version(manager.store, report.version, values_of(training))
    manager.close()


def test_a_row_that_cannot_be_stored_is_refused_unless_fixed_meanwhile(tmp_path: Any, gate: Gate) -> None:
    training = Training()
    weight = training.model.user.weight.detach()
    manager = manager_of(str(tmp_path / "store"), training, options=TableOptions(bits=8))
    before = weight[[7, 11]].clone()
    weight[7] = torch.nan
    manager.tracker.mark("user.weight", [7])
    manager.save(wait=False)
    assert gate.is_reading.wait(30)
    gate.is_open.set()
    with pytest.raises(BackgroundSaveFailed) as failed:
        manager.wait_until_finished()
    assert isinstance(failed.value.__cause__, NonFiniteValues)

    gate.is_open.clear()
    gate.is_reading.clear()
    manager.save(wait=False)
    assert gate.is_reading.wait(30)
    weight[[7, 11]] = before
    manager.tracker.mark("user.weight", [7, 11])
    gate.is_open.set()

    report = manager.wait_until_finished()

    assert report is not None
    assert np.isfinite(manager.store.snapshot().table("user.weight").read()).all()
    manager.close()


def test_a_save_awaited_between_lookup_and_step_is_abandoned_and_redone(tmp_path: Any, gate: Gate) -> None:
    training = Training()
    manager = manager_of(str(tmp_path / "store"), training)
    manager.save(wait=False)
    training.model.user(torch.tensor([1, 2]))
    gate.is_open.set()

    with pytest.raises(BackgroundSaveFailed) as failed:
        manager.wait_until_finished()
    manager.tracker.declare_boundary()
    report = manager.save()

    assert isinstance(failed.value.__cause__, BadInput)
    assert report is not None
    assert report.kind == "baseline"
    assert_version(manager.store, report.version, values_of(training))
    manager.close()


def test_a_read_that_fails_is_told_at_a_step_and_nothing_is_lost(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    manager = manager_of(str(tmp_path / "store"), training, on_error="warn")
    training.train(0)

    def fail(*_: Any, **__: Any) -> bool:
        raise MemoryError("no room for a mirror")

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "read_live", fail)
        manager.save(wait=False)
        until_read(manager)
        training.train(1)
        with pytest.warns(RuntimeWarning, match="no room for a mirror"):
            manager.step()
    assert manager._saver.state is SaveState.IDLE
    report = manager.save()

    assert report is not None
    assert_version(manager.store, report.version, values_of(training))
    manager.close()


def test_a_restore_while_tables_are_read_begins_with_what_was_saved(tmp_path: Any, gate: Gate) -> None:
    training = Training()
    manager = manager_of(str(tmp_path / "store"), training)
    training.train(0)
    manager.step()
    manager.save(wait=False)
    expected = values_of(training)
    gate.is_open.set()

    restored = manager.restore()

    assert restored is not None
    found = values_of(training)
    assert all(np.array_equal(found[name], value) for name, value in expected.items())
    manager.close()


def test_a_manager_that_is_closed_while_it_reads_saves_first(tmp_path: Any, gate: Gate) -> None:
    training = Training()
    manager = manager_of(str(tmp_path / "store"), training)
    manager.save(wait=False)
    gate.is_open.set()
    manager.close()

    with Store.open(str(tmp_path / "store")) as store:
        assert_version(store, store.head().record.v, values_of(training))


def test_saves_that_come_due_while_tables_are_read_are_one(tmp_path: Any, gate: Gate) -> None:
    training = Training()
    manager = manager_of(str(tmp_path / "store"), training, every_steps=1, when_busy="refuse")
    go_on(training, manager, 0, 4)
    gate.is_open.set()
    manager.close()

    assert [(report.step, report.kind) for report in manager.history] == [(4, "baseline")]
