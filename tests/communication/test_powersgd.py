"""Torch's PowerSGD goes on after a restart: errors, factors, generator and step are those that were saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from cnr_store import TableOptions
from cnr_store.communication import Meter, PowerSGD
from cnr_store.training import CheckpointManager
from tests.communication.conftest import RunRanks
from tests.communication.models import Clicks, losses_of


def trained(store: str, stop: int) -> dict[str, Any]:
    """Losses up to a step, from the last save of a store on; then a save; the means of the errors now."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Clicks(), bucket_cap_mb=0.001)
    hook = PowerSGD(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2))
    hook.register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = CheckpointManager(
        store, model=model, optimizer=optimizer, options=TableOptions.exact(), communication=[hook]
    )
    manager.restore()
    first = manager.current_step
    losses = []
    for step in range(first, stop):
        losses += losses_of(model, optimizer, [step])
        manager.step()
    manager.save()
    means = {}
    for name, tensor in hook.rank_state().tensors.items():
        if tensor.rule == "mean":
            mean = tensor.value.double()
            dist.all_reduce(mean)
            means[name] = (mean / dist.get_world_size()).tolist()
    manager.close()
    return {"losses": losses, "errors": means, "metrics": hook.metrics()}


def test_powersgd_goes_on_bit_for_bit_on_the_same_ranks(run_ranks: RunRanks, tmp_path: Any) -> None:
    whole = run_ranks(2, trained, str(tmp_path / "whole"), 9)
    run_ranks(2, trained, str(tmp_path / "cut"), 5)

    again = run_ranks(2, trained, str(tmp_path / "cut"), 9)

    for calm, resumed in zip(whole, again, strict=True):
        assert resumed["losses"] == calm["losses"][5:]
        assert resumed["errors"] == calm["errors"]
        assert resumed["metrics"] == calm["metrics"]


def test_powersgd_keeps_the_mean_of_its_errors_on_other_ranks(run_ranks: RunRanks, tmp_path: Any) -> None:
    before = run_ranks(2, trained, str(tmp_path / "store"), 5)[0]["errors"]

    after = run_ranks(1, trained, str(tmp_path / "store"), 5)[0]["errors"]

    assert any(abs(value) > 1e-4 for values in before.values() for value in values)
    assert after.keys() == before.keys()
    for name, values in before.items():
        assert after[name] == pytest.approx(values, abs=1e-6)


def pushed(steps: int) -> list[float]:
    """Bytes that the hook counted, that all-reduces of its group pushed, and of dense gradients."""
    meter = Meter()
    torch.manual_seed(0)
    model = DistributedDataParallel(Clicks().layers, process_group=meter.group(), bucket_cap_mb=0.001)
    hook = PowerSGD(PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2))
    hook.register(model)
    meter.reset()
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 20)).square().sum().backward()
    return [hook.metrics()["sent_bytes"], meter.by_collective["all_reduce"].pushed_bytes, hook.metrics()["dense_bytes"]]


def test_powersgd_counts_the_bytes_that_it_sends(run_ranks: RunRanks) -> None:
    for counted, seen, dense in run_ranks(2, pushed, 6):
        assert counted == seen
        assert counted < dense


def finite_steps() -> list[bool]:
    """Whether gradients were finite in six steps; in the fourth one rank 1 gets what is not."""
    model = DistributedDataParallel(Clicks().layers)
    PowerSGD(PowerSGDState(None, start_powerSGD_iter=2)).register(model)
    found = []
    for step in range(6):
        model.zero_grad()
        given = torch.randn(4, 20) * (float("inf") if (step, dist.get_rank()) == (3, 1) else 1)
        model(given).square().sum().backward()
        found.append(all(bool(one.grad.isfinite().all()) for one in model.parameters() if one.grad is not None))
    return found


def test_powersgd_does_not_keep_what_is_not_finite(run_ranks: RunRanks) -> None:
    assert run_ranks(2, finite_steps) == [[True, True, True, False, True, True]] * 2
