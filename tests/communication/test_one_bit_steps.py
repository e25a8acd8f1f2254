"""Steps of one-bit optimizers among ranks: a scaler's, those of ranks without a batch, and the bytes that they send."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from cnr_store.communication import Meter, OneBitAdam, OneBitLamb
from cnr_store.communication.one_bit_optimizer import OneBitOptimizer
from cnr_store.errors import BadInput
from tests.communication.conftest import RunRanks

CLASSES: dict[str, type[OneBitAdam | OneBitLamb]] = {"adam": OneBitAdam, "lamb": OneBitLamb}
BOTH = pytest.mark.parametrize("kind", CLASSES)
WARMUP = 3


def built(kind: str, group: Any = None, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, OneBitOptimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(9, 5).to(dtype), process_group=group)
    optimizer = CLASSES[kind](model.parameters(), lr=0.01, warmup_steps=WARMUP)
    optimizer.register(model)
    return model, optimizer


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draws = torch.Generator().manual_seed(100 * step + dist.get_rank())
    found: torch.Tensor = model(torch.randn(4, 9, generator=draws).to(dtype)).square().mean()
    return found


def weights(model: nn.Module) -> list[list[float]]:
    return [parameter.tolist() for parameter in model.parameters()]


def train_scaled(kind: str, is_scaled: bool, bad_step: int) -> list[Any]:
    """Weights after each of six steps; in one of them, the gradients of rank 1 are not finite."""
    model, optimizer = built(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=is_scaled)
    found = []
    for step in range(6):
        optimizer.zero_grad()
        worse = float("inf") if step == bad_step and dist.get_rank() == 1 else 1.0
        scaler.scale(loss_of(model, step) * worse).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(weights(model))
    return found


@BOTH
def test_a_scaler_changes_no_bit(run_ranks: RunRanks, kind: str) -> None:
    assert run_ranks(2, train_scaled, kind, True, -1) == run_ranks(2, train_scaled, kind, False, -1)


@BOTH
@pytest.mark.parametrize("bad_step", [1, 4])
def test_a_scaler_of_one_rank_skips_the_step_of_all(run_ranks: RunRanks, kind: str, bad_step: int) -> None:
    first, second = run_ranks(2, train_scaled, kind, True, bad_step)

    assert first == second
    assert [before == after for before, after in pairwise(first)].index(True) == bad_step - 1
    assert torch.tensor(first[-1][0]).isfinite().all()


def train_uneven(kind: str, is_joined: bool) -> list[list[float]]:
    """Rank 0 has four batches, rank 1 six; not joined, rank 0 has two more ones without a gradient."""
    model, optimizer = built(kind)
    batches = 6 if dist.get_rank() else 4
    with Join([model, optimizer], enable=is_joined):  # type: ignore[list-item]  # typed as a module
        for step in range(batches if is_joined else 6):
            optimizer.zero_grad()
            (loss_of(model, step) * (1 if step < batches else 0)).backward()
            optimizer.step()
    return weights(model)


@BOTH
def test_a_rank_without_a_batch_has_gradients_of_zeros(run_ranks: RunRanks, kind: str) -> None:
    joined, even = (run_ranks(2, train_uneven, kind, is_joined) for is_joined in (True, False))

    assert joined[0] == joined[1] == even[0] == even[1]


def bytes_of_steps(kind: str, dtype: str) -> list[list[float]]:
    """Bytes of each step: counted by the optimizer, and on the wire; and what another one counts that took over."""
    meter = Meter()
    model, optimizer = built(kind, meter.group(), getattr(torch, dtype))
    found: list[list[float]] = []
    for step in range(WARMUP + 2):
        optimizer.zero_grad()
        loss_of(model, step, getattr(torch, dtype)).backward()
        before = optimizer.metrics()["sent_bytes"]
        meter.reset()
        optimizer.step()
        found.append([optimizer.metrics()["sent_bytes"] - before, meter.total.pushed_bytes])
    _, another = built(kind)
    another.load_rank_state(optimizer.rank_state())
    return [*found, [*optimizer.metrics().values()], [*another.metrics().values()]]


@pytest.mark.parametrize(("kind", "dtype"), [("adam", "float32"), ("lamb", "bfloat16"), ("adam", "float64")])
def test_the_bytes_of_each_step_are_those_on_the_wire(run_ranks: RunRanks, kind: str, dtype: str) -> None:
    for *steps, counted, taken_over in run_ranks(2, bytes_of_steps, kind, dtype):
        assert all(reported == pushed > 0 for reported, pushed in steps)
        assert counted == taken_over
        assert counted == [sum(reported for reported, _ in steps), 5 * 50 * getattr(torch, dtype).itemsize]


@BOTH
def test_parameters_after_the_warm_up_are_refused(kind: str) -> None:
    layers = [nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizer = CLASSES[kind](layers[0].parameters(), warmup_steps=1)
    optimizer.add_param_group({"params": layers[1].parameters()})
    optimizer.step()

    with pytest.raises(BadInput, match="no more parameters after its warm-up"):
        optimizer.add_param_group({"params": layers[2].parameters()})
