"""Dense tensors are copied while the training goes on: what is committed is always of one instant, that of the save."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from cnr_store import Store
from cnr_store.errors import BackgroundSaveFailed, BadInput
from cnr_store.storage.base import Buffer
from cnr_store.storage.local import LocalStorage
from cnr_store.training import CheckpointManager, SavePolicy, dense_staging
from cnr_store.training.dense_staging import DenseStaging, StagedDense, stepped_by

ELEMENTS = 1 << 14


class Counting(torch.optim.Optimizer):
    """Sets all elements of each parameter, and of a state of it, to the number of the step."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})
        self.steps = 0
        for parameter in params:
            self.state[parameter]["seen"] = torch.zeros(ELEMENTS)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                for tensor in (parameter, self.state[parameter]["seen"]):
                    for part in tensor.split(ELEMENTS // 16):  # not at once: others may see the tensor half written
                        part.fill_(self.steps)


class Counted(nn.Module):
    """Two parameters of an optimizer, an average of one of them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)
        self.first, self.second = (nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(2))
        self.average = nn.Parameter(torch.zeros(ELEMENTS), requires_grad=False)
        self.register_buffer("forwards", torch.zeros(ELEMENTS))


STEADY = {"first", "second"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_staging, "PIECE_BYTES", 1024)


@pytest.fixture
def model() -> Counted:
    return Counted()


@pytest.fixture
def optimizer(model: Counted) -> Counting:
    return Counting([model.first, model.second])


@pytest.fixture
def staging() -> Any:
    made = DenseStaging(is_lazy=True)
    yield made
    made.close()


def live(model: Counted) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if "table" not in name}


def stage(staging: DenseStaging, model: Counted, step: int = 0) -> StagedDense:
    return staging.stage(live(model), {"first", "second", "average"}, step)


def values(staged: StagedDense) -> dict[str, set[float]]:
    return {name: set(np.unique(array)) for name, array in staged.copies.items()}


def test_the_first_copy_is_made_at_once_and_later_ones_by_the_next_step(
    staging: DenseStaging, model: Counted, optimizer: Counting
) -> None:
    stage(staging, model)
    optimizer.step()

    staged = stage(staging, model, 1)
    assert values(staged) == {"first": {0}, "second": {0}, "average": {0}, "forwards": {0}}  # not copied yet
    optimizer.step()

    assert values(staged) == {"first": {1}, "second": {1}, "average": {0}, "forwards": {0}}
    staged.check()
    assert staged.waited_s > 0


class Own(torch.Tensor):
    """Of a class that is not torch's, as DTensor is."""


def test_a_tensor_that_takes_the_place_of_one_of_another_class_is_copied(staging: DenseStaging) -> None:
    for step, kind in enumerate((Own, torch.Tensor, torch.Tensor, Own, Own)):
        tensor = torch.full((3,), float(step)).as_subclass(kind)
        staged = staging.stage({"first": tensor}, (), step)
        assert values(staged) == {"first": {step}}


def test_copies_are_in_host_memory_whatever_the_default_device_is(staging: DenseStaging) -> None:
    tensor = torch.full((3,), 2.0)
    with torch.device("meta"):
        staged = staging.stage({"first": tensor}, (), 1)
    assert values(staged) == {"first": {2}}


def test_memory_that_is_made_in_inference_mode_takes_later_copies(staging: DenseStaging) -> None:
    tensor = torch.full((3,), 2.0)
    with torch.inference_mode():
        staging.stage({"first": tensor}, (), 1)
    tensor += 1
    assert values(staging.stage({"first": tensor}, (), 2)) == {"first": {3}}


@pytest.mark.parametrize("writes", ["in place", "through .data", "through numpy"])
def test_what_changes_between_steps_is_always_copied_at_the_stall(
    staging: DenseStaging, model: Counted, optimizer: Counting, writes: str
) -> None:
    def average(value: float) -> None:
        if writes == "in place":
            model.average.fill_(value)
        elif writes == "through .data":
            model.average.data.fill_(value)
        else:
            model.average.numpy()[...] = value
        model.forwards.fill_(value)

    for step in range(1, 5):
        optimizer.step()
        staged = stage(staging, model, step)
        average(10.0 + step)  # behind the save, before the next step
        staged.copy_rest()
        before = 10.0 + step - 1 if step > 1 else 0
        assert values(staged) == {"first": {step}, "second": {step}, "average": {before}, "forwards": {before}}
        staging.settle(is_step=True)
        staged.check()


def test_a_steady_tensor_that_is_written_all_the_same_gives_its_save_up(
    staging: DenseStaging, model: Counted, optimizer: Counting
) -> None:
    stage(staging, model)
    optimizer.step()
    staged = stage(staging, model, 7)
    with torch.no_grad():
        model.average.mul_(2.0)

    with pytest.raises(BadInput, match=r"\['average'\] \(1 in all\) were written between the save of step 7"):
        staged.check()
    optimizer.step()
    with pytest.raises(BadInput, match="average"):
        staged.check()

    with torch.no_grad():
        staged = stage(staging, model, 8)
        model.average.fill_(5.0)
    staged.copy_rest()
    staged.check()
    assert values(staged)["average"] == {0}


def test_a_step_of_an_optimizer_that_nobody_named_is_waited_for(staging: DenseStaging, model: Counted) -> None:
    other = Counting([model.average])
    stage(staging, model)
    other.step()
    staged = stage(staging, model)
    other.step()

    assert values(staged)["average"] == {1}
    staged.check()


def test_a_copy_by_several_threads_has_all_pieces(staging: DenseStaging, model: Counted, optimizer: Counting) -> None:
    stage(staging, model)
    optimizer.step()
    for step in range(1, 20):
        staged = stage(staging, model, step)
        threads = [threading.Thread(target=staged.copy_rest) for _ in range(2)]
        for thread in threads:
            thread.start()
        optimizer.step()
        for thread in threads:
            thread.join()
        staged.check()
        assert values(staged)["first"] == values(staged)["second"] == {step}


def test_nothing_is_lazy_where_the_caller_wants_none(model: Counted, optimizer: Counting) -> None:
    staging = DenseStaging(is_lazy=False)
    for step in range(3):
        assert values(stage(staging, model))["first"] == {step}
        optimizer.step()
    staging.close()


def manager_of(store: Store, model: Counted, optimizer: Counting) -> CheckpointManager:
    policy = SavePolicy(rng=False, git=False, dense_copies="lazy")
    return CheckpointManager(store, model=model, optimizer=optimizer, every_steps=1, save_policy=policy)


def test_every_committed_version_is_of_the_step_of_its_save(
    tmp_path: Path, model: Counted, optimizer: Counting
) -> None:
    """Each tensor says its step: hammered by a save of every step, while the next step overwrites them."""
    manager = manager_of(Store.create(str(tmp_path / "store"), fsync=False), model, optimizer)
    for step in range(1, 21):
        optimizer.step()
        manager.step()
        with torch.no_grad():
            model.average.fill_(step)  # an average that is taken behind the save
            model.forwards.fill_(step)
    manager.close()

    store = Store.open(str(tmp_path / "store"))
    assert store.steps() == [*range(1, 21)]
    for step in store.steps():
        snapshot = store.snapshot(step=step)
        found = {name: set(np.unique(array)) for name, array in snapshot.read_many_dense(snapshot.dense).items()}
        expected = {"average": {step - 1.0}, "forwards": {step - 1.0}}
        expected |= {name: {float(step)} for name in found if name not in expected}
        assert found == expected
        assert len(found) == 6


class HeldStorage(LocalStorage):
    """Local files that are put when the test lets them be."""

    def __init__(self, root: str) -> None:
        super().__init__(root, fsync=False)
        self.may_put = threading.Event()
        self.may_put.set()

    def _put(self, key: str, data: Sequence[Buffer]) -> None:
        assert self.may_put.wait(60), "nobody let it go on"
        super()._put(key, data)


def test_a_save_that_was_torn_is_not_committed_and_the_next_one_is_whole(
    tmp_path: Path, model: Counted, optimizer: Counting
) -> None:
    Store.create(str(tmp_path / "store"), fsync=False).close()
    storage = HeldStorage(str(tmp_path / "store"))
    manager = manager_of(Store.open_on(storage), model, optimizer)
    for _ in range(3):
        optimizer.step()
        manager.step()
    manager.wait_until_finished()
    optimizer.step()
    storage.may_put.clear()
    manager.save(wait=False)
    with torch.no_grad():
        model.first.fill_(9.0)
    storage.may_put.set()

    with pytest.raises(BackgroundSaveFailed, match="first"):
        manager.wait_until_finished()
    report = manager.save()

    assert report is not None
    snapshot = manager.store.snapshot()
    assert set(snapshot.read_dense("first")) == {9.0}
    assert set(snapshot.read_dense("second")) == {4.0}
    manager.close()


def test_only_parameters_that_an_optimizer_steps_are_copied_late(model: Counted, optimizer: Counting) -> None:
    """An average or a target network is written by others, perhaps seldom: the first save need not show it."""
    assert stepped_by([optimizer], live(model)) == STEADY

    model.first.requires_grad_(False)
    assert stepped_by([optimizer], live(model)) == {"second"}


def test_a_closed_manager_leaves_no_hook_behind(tmp_path: Path, model: Counted, optimizer: Counting) -> None:
    hooks = _global_optimizer_pre_hooks
    before = len(hooks)
    manager = manager_of(Store.create(str(tmp_path / "store"), fsync=False), model, optimizer)
    assert len(hooks) == before + 1

    manager.close()

    assert len(hooks) == before
