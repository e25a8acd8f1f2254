"""What is held back is part of a checkpoint: the same ranks go on bit for bit, others keep the sums."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from cnr_store import Store, TableOptions
from cnr_store.communication import Meter, PowerSGD, ThresholdedGradients
from cnr_store.errors import BadInput
from cnr_store.training import CheckpointManager, PrecisionPolicy
from tests.communication.conftest import RunRanks
from tests.communication.models import Clicks, losses_of


class Training:
    """A model whose gradients are thresholded, under a manager that saves every third step."""

    def __init__(self, store: str, *, bits: int | None = None, is_measured: bool = False) -> None:
        torch.manual_seed(0)
        self.meter = Meter()
        group = self.meter.group() if is_measured else None
        self.model = DistributedDataParallel(Clicks(), process_group=group, bucket_cap_mb=0.001)
        self.hook = ThresholdedGradients(keep=0.01, refresh_every=5, warmup_steps=1)
        self.hook.register(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.manager = CheckpointManager(
            store, model=self.model, optimizer=self.optimizer, every_steps=3, options=TableOptions.exact(),
            communication=[self.hook, self.meter] if is_measured else [self.hook],
            precision=PrecisionPolicy(residual_bits=bits),
        )  # fmt: skip

    def train(self, stop: int, *, killed_after: int | None = None) -> dict[str, float]:
        losses = {}
        for step in range(self.manager.current_step, stop):
            (losses[str(step)],) = losses_of(self.model, self.optimizer, [step])
            self.manager.step()
            if step == killed_after:
                self.manager.wait_until_finished()
                os._exit(9)
        return losses

    def own_residuals(self) -> dict[str, list[float]]:
        return {name: one.value.view(-1).tolist() for name, one in self.hook.rank_state().tensors.items()}

    def mean_residuals(self) -> dict[str, list[float]]:
        found = {}
        for name, tensor in self.hook.rank_state().tensors.items():
            mean = tensor.value.double()
            dist.all_reduce(mean)
            found[name] = (mean / dist.get_world_size()).view(-1).tolist()
        return found


def train(store: str, stop: int, killed_after: int | None = None) -> dict[str, float]:
    training = Training(store)
    training.manager.restore()
    losses = training.train(stop, killed_after=killed_after)
    training.manager.close()
    return losses


@pytest.mark.parametrize(("world", "killed_after"), [(2, 3), (4, 7)])
def test_killed_at_a_step_the_same_ranks_go_on_bit_for_bit(
    run_ranks: RunRanks, tmp_path: Any, world: int, killed_after: int
) -> None:
    whole = run_ranks(world, train, str(tmp_path / "whole"), 10)

    run_ranks(world, train, str(tmp_path / "killed"), 10, killed_after, codes={9})
    again = run_ranks(world, train, str(tmp_path / "killed"), 10)

    for calm, resumed in zip(whole, again, strict=True):
        assert 0 < len(resumed) < 10
        assert resumed == {step: calm[step] for step in resumed}


def save(store: str) -> dict[str, list[float]]:
    training = Training(store)
    training.train(9)
    training.manager.close()
    return training.mean_residuals()


def save_own(store: str, bits: int) -> dict[str, list[float]]:
    training = Training(store, bits=bits)
    training.train(9)
    training.manager.close()
    return training.own_residuals()


def restore_own(store: str) -> dict[str, list[float]]:
    training = Training(store)
    training.manager.restore()
    training.manager.close()
    return training.own_residuals()


def restore(store: str, save_again: bool) -> dict[str, list[float]]:
    training = Training(store)
    training.manager.restore()
    found = training.mean_residuals()
    if save_again:
        training.manager.save()
    training.manager.close()
    return found


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 3)])
def test_other_ranks_keep_the_mean_of_what_was_held_back(
    run_ranks: RunRanks, tmp_path: Any, old: int, new: int
) -> None:
    before = run_ranks(old, save, str(tmp_path / "store"))[0]

    after = run_ranks(new, restore, str(tmp_path / "store"), True)[0]

    assert any(abs(value) > 1e-3 for values in before.values() for value in values)
    assert after.keys() == before.keys()
    for name in before:
        torch.testing.assert_close(torch.tensor(after[name]), torch.tensor(before[name]), rtol=0, atol=1e-6)
    with Store.open(str(tmp_path / "store")) as store:
        snapshot = store.snapshot()
        ranks = {name.split("/")[1] for name in snapshot.dense if name.startswith("rank/")}
        documents = {name for name in snapshot.documents if name.startswith("communication/")}
    assert ranks == {str(rank) for rank in range(new)}
    assert documents == {f"communication/{rank}" for rank in range(new)}


@pytest.mark.parametrize("world", [1, 2])
def test_residuals_in_few_bits_come_back_within_half_a_step(run_ranks: RunRanks, tmp_path: Any, world: int) -> None:
    before = run_ranks(world, save_own, str(tmp_path / "store"), 8)

    after = run_ranks(world, restore_own, str(tmp_path / "store"))

    for saved, restored in zip(before, after, strict=True):
        changed = 0.0
        for name, values in saved.items():
            most = max(map(abs, values))
            differences = [abs(one - other) for one, other in zip(values, restored[name], strict=True)]
            assert max(differences) <= (0.501 * most / 127 if name.endswith("residual") else 0)
            changed += sum(differences)
        assert changed > 0
    assert world == 1 or before[0] != before[1]


def restore_without_hook(store: str) -> list[str]:
    torch.manual_seed(0)
    model = Clicks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CheckpointManager(store, model=model, optimizer=optimizer, options=TableOptions.exact()) as manager:
        try:
            manager.restore()
        except BadInput as error:
            message = str(error)
        manager.restore(strict=False)
        manager.save()
    with Store.open(store) as opened:
        left = [name for name in opened.snapshot().dense if "communication" in name]
    return [message, *left]


def test_a_manager_without_the_hook_must_say_that_it_gives_it_up(run_ranks: RunRanks, tmp_path: Any) -> None:
    run_ranks(1, save, str(tmp_path / "store"))

    ((message, *left),) = run_ranks(1, restore_without_hook, str(tmp_path / "store"))

    assert "communication state of ['thresholded_gradients'], the manager of []" in message
    assert left == []


def save_with_meter(store: str) -> dict[str, float]:
    training = Training(store, is_measured=True)
    training.manager.restore()
    training.train(training.manager.current_step + 3)
    training.manager.close()
    return training.meter.metrics()


def test_the_bytes_sent_are_metrics_of_each_save_and_count_on(run_ranks: RunRanks, tmp_path: Any) -> None:
    first, second = (run_ranks(2, save_with_meter, str(tmp_path / "store"))[0] for _ in range(2))

    with Store.open(str(tmp_path / "store")) as store:
        records = sorted(store.log(), key=lambda record: record.v)
    found: list[Any] = [record.user["metrics"] for record in records if "metrics" in record.user]
    assert [one["meter/pushed_bytes"] for one in found] == [first["pushed_bytes"], second["pushed_bytes"]]
    assert second["pushed_bytes"] > first["pushed_bytes"]
    assert found[1]["thresholded_gradients/dense_bytes"] > found[0]["thresholded_gradients/dense_bytes"]


@pytest.mark.parametrize("given", [[ThresholdedGradients(), ThresholdedGradients()], [torch.nn.Linear(1, 1)],
                                   [ThresholdedGradients(name="a/b")]])  # fmt: skip
def test_objects_that_cannot_be_told_apart_are_refused(tmp_path: Any, given: list[Any]) -> None:
    with pytest.raises(BadInput, match="communication="):
        CheckpointManager(str(tmp_path), model=torch.nn.Linear(2, 2), communication=given)


def refused_of_other_models() -> list[str]:
    """What hooks say of what was held back of a model with other parameters."""
    told = []
    kinds: list[Callable[[], ThresholdedGradients | PowerSGD]] = [
        lambda: ThresholdedGradients(keep=0.1, warmup_steps=1),
        lambda: PowerSGD(PowerSGDState(None, start_powerSGD_iter=2)),
    ]
    for make in kinds:
        hook, another = make(), make()
        model = DistributedDataParallel(nn.Linear(20, 20))
        hook.register(model)
        another.register(DistributedDataParallel(nn.Sequential(nn.Linear(20, 20))))
        for _ in range(4):
            model(torch.randn(4, 20)).square().sum().backward()
        before = another.metrics()
        with pytest.raises(BadInput) as refusal:
            another.load_rank_state(hook.rank_state())
        assert another.metrics() == before
        told.append(str(refusal.value))
    return told


def test_what_was_held_back_of_other_parameters_is_refused(run_ranks: RunRanks) -> None:
    (told,) = run_ranks(1, refused_of_other_models)

    assert all("values, the model's parameter None; build the model" in one for one in told), told
