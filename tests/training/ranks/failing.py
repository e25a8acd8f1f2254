"""Scenarios of saves that fail on one rank, or that ranks must decide upon together."""

from __future__ import annotations

import os
import signal
import threading
import unittest.mock
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from cnr_store import BadInput, Store
from cnr_store.errors import BackgroundSaveFailed, StorageFailure, Unsupported
from cnr_store.training import CheckpointManager
from cnr_store.write.transaction import Transaction
from tests.support.gated_storage import GatedStorage
from tests.training.ranks.copies import EXACT, Run, spoiled
from tests.training.ranks.scenarios import Place, WatchedStorage, scenario
from tests.training.runs import assert_same


def watched(place: Place, name: str) -> WatchedStorage:
    """A store that is there, through a storage that this rank can make fail."""
    if place.rank == 0:
        Store.create(place.url(name)).close()
    place.gather(None)
    return WatchedStorage(place.url(name))


def assert_saved(place: Place, run: Run, manager: CheckpointManager) -> None:
    """What stands in the store is what the ranks train."""
    reached = run.state()
    other = spoiled(Run(place))
    manager.close()
    reading = other.manager(manager.store.url)
    reading.restore()
    assert_same(other.state(), reached)
    reading.close()


@scenario(1, 2)
def what_one_rank_cannot_write_no_rank_has_saved(place: Place) -> None:
    for failing in (0, 1):
        storage = watched(place, f"failing{failing}")
        run = Run(place)
        manager = run.manager(storage.open())
        run.train(0, manager)
        manager.save()
        version = manager.store.head().record.v
        run.train(1, manager)
        storage.fails = place.rank == failing
        with pytest.raises(BackgroundSaveFailed, match="disk is gone") as raised:
            manager.save()
        if place.rank != failing:
            assert f"rank {failing}" in str(raised.value)
        assert manager.store.head().record.v == version
        run.train(2, manager)
        storage.fails = False
        report = manager.save()
        assert report.step == 3
        assert_saved(place, run, manager)


@scenario(1, 2)
def a_failure_behind_the_training_is_told_to_all_at_the_same_step(place: Place) -> None:
    for on_error in ("raise", "warn"):
        storage = watched(place, f"behind-{on_error}")
        run = Run(place)
        manager = run.manager(storage.open(), every_steps=2, on_error=on_error)
        told: list[int] = []
        for number in range(8):
            if number == 3:
                manager.wait_until_finished()
                storage.fails = place.rank == 1
            if number == 4 and place.rank == 0:
                manager._saver.background.wait()  # it is over here before the step, elsewhere perhaps not
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", RuntimeWarning)
                try:
                    run.train(number, manager)
                except BackgroundSaveFailed:
                    told.append(number)
            if any("not saved" in str(one.message) for one in caught):
                told.append(number)
            if number == 4:
                place.gather(None)
                manager._saver.background.wait()
                storage.fails = False
        manager.wait_until_finished()
        assert place.gather(told) == [told, told]
        assert told == [5]
        assert manager.history[-1].step > 4
        assert place.gather([one.step for one in manager.history]) == 2 * [[one.step for one in manager.history]]
        manager.save()
        assert_saved(place, run, manager)


@scenario(1, 2)
def no_step_of_a_rank_waits_for_the_storage(place: Place) -> None:
    watched(place, "gated")
    for policy, first in (("consecutive", 0), ("baseline", 6)):
        storage = GatedStorage(place.url("gated"))
        run = Run(place)
        store = Store.open_on(storage, threads=1)
        manager = run.manager(store, every_steps=2, policy=policy, first_baseline="live")
        if first:
            manager.restore()
        for number in range(first, first + 6):
            with storage.closed():
                run.train(number, manager)
            manager._saver.writer.wait()
            manager._saver.background.read_error()
            manager._saver.background.wait()
            place.gather(None)
        manager.save()
        assert len(manager.history) >= 3
        assert_saved(place, run, manager)


@scenario(1, 2)
def what_one_rank_cannot_stage_no_rank_has_saved(place: Place) -> None:
    run = Run(place)
    manager = run.manager(place.url("staging"), every_steps=2)
    told: list[int] = []
    for number in range(8):
        if number == 3 and place.rank == 1:
            buffers = manager._saver.stager.buffers
            gather, buffers.gather = buffers.gather, no_memory  # type: ignore[method-assign]
        try:
            run.train(number, manager)
        except (BackgroundSaveFailed, MemoryError):
            told.append(number)
        if number == 3 and place.rank == 1:
            buffers.gather = gather  # type: ignore[method-assign]
    assert place.gather(told) == [[5], [3, 5]]
    manager.save()
    assert_saved(place, run, manager)


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("no memory for the copies")


@scenario(1, 2)
def a_rank_that_cannot_take_part_is_named(place: Place) -> None:
    run = Run(place)
    manager = run.manager(place.url("refusing"))
    run.train(0, manager)
    manager.save()
    version = manager.store.head().record.v
    loss = run.model(torch.tensor([[1, 2]])) if place.rank == 1 else None
    with pytest.raises(BadInput, match="wait") as raised:
        manager.save()
    if place.rank == 0:
        assert "rank 1" in str(raised.value)
    assert manager.store.head().record.v == version
    del loss
    if place.rank == 1:
        manager.tracker.declare_boundary()
    run.train(1, manager)
    manager.save()
    assert_saved(place, run, manager)


@scenario(1, 2)
def a_save_is_skipped_by_all_or_by_none(place: Place) -> None:
    storage = watched(place, "skipping")
    run = Run(place)
    manager = run.manager(storage.open(), every_steps=1, when_busy="skip")
    run.train(0, manager)
    if place.rank == 1:
        storage.may_put.clear()
    for number in range(1, 4):
        run.train(number, manager)
    assert manager.is_saving
    place.gather(None)
    storage.may_put.set()
    manager.wait_until_finished()
    run.train(4, manager)
    manager.wait_until_finished()
    steps = [report.step for report in manager.history]
    assert steps == [1, 2, 5]
    assert place.gather(steps) == [steps, steps]
    assert_saved(place, run, manager)


@scenario(1, 2)
def tables_are_read_on_all_ranks_while_they_train(place: Place) -> None:
    """The save goes on at the first step at which all have read, and is of that step on all of them."""
    run = Run(place)
    manager = run.manager(place.url("live"), every_steps=1, first_baseline="live")
    may_read = threading.Event()
    with unittest.mock.patch.object(Transaction, "read_live", _held(may_read)):
        if place.rank == 0:
            may_read.set()
        for number in range(3):
            run.train(number, manager)
        assert manager.is_saving
        assert manager.history == []
        may_read.set()
        manager._saver.background.read_error()
        place.gather(None)
        run.train(3, manager)
    manager.wait_until_finished()
    told = [(report.step, report.kind) for report in manager.history]
    assert place.gather(told) == [[(4, "baseline")]] * 2
    assert_saved(place, run, manager)


@scenario(1, 2)
def a_table_that_one_rank_cannot_read_is_saved_by_the_next_save(place: Place) -> None:
    run = Run(place)
    manager = run.manager(place.url("unread"), first_baseline="live")
    run.train(0, manager)
    broken = unittest.mock.Mock(side_effect=MemoryError("no room"))
    read = broken if place.rank == 1 else Transaction.read_live
    with unittest.mock.patch.object(Transaction, "read_live", read), pytest.raises(BackgroundSaveFailed):
        manager.save()
    run.train(1, manager)
    report = manager.save()
    assert report.kind == "baseline"
    assert_saved(place, run, manager)


def _held(may_read: threading.Event) -> Callable[..., bool]:
    read = Transaction.read_live

    def held(*args: Any, **kwargs: Any) -> bool:
        assert may_read.wait(60), "nobody let it go on"
        return read(*args, **kwargs)

    return held


@scenario(1, 2)
def ranks_that_are_told_to_end_save_together(place: Place) -> None:
    run = Run(place)
    with run.manager(place.url("sigterm"), save_on_sigterm="flag") as manager:
        for number in range(20):
            if number == 4 and place.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if run.train(number, manager):
                break
        assert manager.should_stop
        assert [(report.step, report.kind) for report in manager.history] == [(16, "baseline")]
    with run.manager(place.url("sigterm-exit"), save_on_sigterm=True) as manager:
        for number in range(15):
            assert not run.train(number, manager)
        if place.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            run.train(15, manager)
        assert ended.value.code == 143
        assert manager.current_step == manager.store.snapshot().step == 16


@scenario(1, 2)
def what_one_rank_cannot_read_no_rank_goes_on_with(place: Place) -> None:
    storage = watched(place, "unreadable")
    run = Run(place)
    manager = run.manager(storage.open())
    run.train(0, manager)
    manager.save()
    reached = run.state()
    run.train(1, manager)
    for unreadable in ("_segment.json.zst", ".document-", ".dense.", ".codes/"):
        storage.unreadable = unreadable if place.rank == 1 else None
        with pytest.raises(StorageFailure, match="disk is gone") as raised:
            manager.restore()
        if place.rank == 0:
            assert "rank 1" in str(raised.value)
    storage.unreadable = None
    spoiled(run)
    assert manager.restore() is not None
    assert_same(run.state(), reached)
    run.train(1, manager)
    manager.save()
    assert_saved(place, run, manager)


@scenario(1, 2)
def clocks_of_several_ranks_are_no_measure(place: Place) -> None:
    run = Run(place)
    with pytest.raises(BadInput, match="every_steps"):
        run.manager(place.url("clocks"), every_seconds=1.0)


@scenario(1, 2)
def ranks_with_different_models_are_refused(place: Place) -> None:
    model: nn.Module = nn.Embedding(5 + place.rank, 2)
    with pytest.raises(BadInput, match="same model"):
        CheckpointManager(place.url("unlike"), model=model, options=EXACT)
    for unlike in ([nn.Linear(2, 1 + place.rank)], [nn.Linear(2, 1) for _ in range(1 + place.rank)]):
        with pytest.raises(BadInput, match="rank 1 has other dense tensors"):
            CheckpointManager(place.url("unlike"), model=nn.Sequential(nn.Embedding(5, 2), *unlike), options=EXACT)
    model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1))
    kinds = (torch.optim.SGD, torch.optim.Adam)
    for optimizers in (
        [kinds[place.rank](model.parameters(), lr=0.1)],
        [torch.optim.SGD(one.parameters(), lr=0.1) for one in list(model)[: 1 + place.rank]],
    ):
        with pytest.raises(BadInput, match="rank 1 has other optimizers"):
            CheckpointManager(place.url("unlike"), model=model, optimizer=optimizers, options=EXACT)


@scenario(1, 2)
def what_is_divided_among_ranks_is_refused(place: Place) -> None:
    """Rank 0 saves dense tensors and their state for all: the parts of other ranks were lost without an error."""
    mesh = init_device_mesh("cpu", (place.world,))
    for divided, found in (
        (fully_shard(nn.Linear(8, 4), mesh=mesh), "1.weight"),
        (FullyShardedDataParallel(nn.Linear(8, 4), device_id=torch.device("cpu")), "1"),
    ):
        model = nn.Sequential(nn.Embedding(6, 8), divided)
        with pytest.raises(Unsupported, match=f"'{found}' is a .*cnr_store.integrations.dcp"):
            CheckpointManager(place.url("divided"), model=model)
    model = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adagrad, lr=0.1)
    with pytest.raises(Unsupported, match="'optimizer 0' is a ZeroRedundancyOptimizer"):
        CheckpointManager(place.url("divided"), model=model, optimizer=optimizer)


@scenario(1, 2)
def copies_of_a_table_that_differ_are_told_of(place: Place) -> None:
    """A training that divides a table by itself lost the rows of all ranks but one without a word.

    So did one whose copies differ in rows behind the first ones.
    """
    for name, ids in {"parts": [place.rank, 2], "behind": [*range(40), 40 + place.rank]}.items():
        torch.manual_seed(0)
        model = nn.EmbeddingBag(50, 4, mode="sum")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told: list[str] = []
        with CheckpointManager(place.url(name), model=model, optimizer=optimizer, options=EXACT) as manager:
            for _ in range(2):
                model(torch.tensor([ids])).sum().backward()
                optimizer.step()
                manager.step()
                with warnings.catch_warnings(record=True) as found:
                    warnings.simplefilter("always")
                    manager.save()
                told += [str(one.message) for one in found if "ranks have different rows" in str(one.message)]
        assert len(told) == (place.rank == 0)
