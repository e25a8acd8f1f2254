"""One-bit Adam and LAMB: their warm-ups, what they do after the freeze, starts that break others, and resuming."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from cnr_store.communication import (
    CommunicationState,
    OneBitAdam,
    OneBitLamb,
    RankState,
    StateTensor,
    reshard,
)
from cnr_store.communication.one_bit import OneBitMean
from cnr_store.communication.one_bit_optimizer import OneBitOptimizer
from cnr_store.communication.state import Rule
from cnr_store.errors import BadInput, BadShape
from cnr_store.training import CheckpointManager
from tests.communication.conftest import RunRanks

Make = Callable[..., OneBitOptimizer]
BOTH = pytest.mark.parametrize("make", [OneBitAdam, OneBitLamb])


def built(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 3), nn.ReLU(), nn.Linear(3, 1))


def backward(model: nn.Module, step: int, rank: int = 0) -> float:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 6, generator=generator)
    model.zero_grad()
    loss: torch.Tensor = (model(inputs).squeeze(1) - inputs[:, 0] * inputs[:, 1]).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int, rank: int = 0) -> list[float]:
    losses = []
    for step in range(start, stop):
        losses.append(backward(model, step, rank))
        optimizer.step()
    return losses


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


# ---- references, written as the papers and torch say


def lamb_step(parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], lr: float, decay: float) -> None:
    """A step of LAMB without bias correction, with the defaults of the published code."""
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * gradient**2
    update = state["m"] / (state["v"].sqrt() + 1e-8) + decay * parameter
    rate = 1.0
    if parameter.norm() > 0 and update.norm() > 0:
        rate = min(max(float(parameter.norm() / update.norm()), 0.01), 10.0)
    state["c"] = 0.9 * state.get("c", 0.0) + 0.1 * rate
    parameter -= lr * rate * update


def frozen_lamb_steps(model: nn.Module, states: list[dict[str, Any]], lr: float, decay: float, steps: range) -> None:
    """Steps of one-bit LAMB after the freeze, on one rank, with one scale for all tensors."""
    parameters = [parameter.data for parameter in model.parameters()]
    for state in states:
        least = 0.01 * state["v"][state["v"] > 0].mean()
        state["held"] = state["v"] == 0
        state["v"] = torch.where(state["held"], 0.0, state["v"].clamp(min=float(least)))
        state["m"] = torch.where(state["held"], 0.0, state["m"])
        state["least"] = 0.01 * state["v"][~state["held"]].mean()
        state["fresh"], state["f"] = state["v"].clone(), 1.0
        state["size"] = state["m"].norm() / (~state["held"]).sum() ** 0.5
    mean_size = torch.stack([state["size"] for state in states]).mean()
    mean = OneBitMean([sum(int((~state["held"]).sum()) for state in states)])
    for step in steps:
        backward(model, step)
        local = []
        for parameter, state in zip(model.parameters(), states, strict=True):
            momentum = 0.9 * state["m"] + 0.1 * parameter.grad
            local.append((momentum * mean_size / state["size"])[~state["held"]])
        sent = mean(torch.cat(local)).split([len(part) for part in local])
        for parameter, state, part in zip(parameters, states, sent, strict=True):
            momentum = torch.zeros_like(parameter)
            momentum[~state["held"]] = part * state["size"] / mean_size
            gradient = (momentum - 0.9 * state["m"]) / (1 - 0.9)
            state["m"] = momentum
            state["fresh"] = 0.999 * state["fresh"] + 0.001 * gradient**2
            adam = momentum / (state["v"].sqrt() + 1e-8)
            update = adam + decay * parameter
            present = torch.maximum(state["fresh"], state["least"])
            ratios = (state["v"].sqrt() + 1e-8) / (present.sqrt() + 1e-8)
            factor = float(ratios[~state["held"]].max())
            share = min(1.0, float(adam.norm() / update.norm()))
            factor = min(max(factor * share + 1 - share, 0.5), 4.0) if decay else min(max(factor, 0.5), 4.0)
            state["f"] = min(max(factor, state["f"] * 0.9), state["f"] * 1.1)
            parameter -= lr * state["c"] * state["f"] * update


# ---- the warm-up


@settings(max_examples=20)
@given(
    st.floats(1e-5, 1e-2), st.floats(0, 0.99), st.floats(0.9, 0.9999), st.sampled_from([0.0, 0.01]), st.booleans()
)  # fmt: skip
def test_the_warm_up_is_the_adam_of_torch_bit_for_bit(
    lr: float, beta1: float, beta2: float, decay: float, decoupled: bool
) -> None:
    options = {"lr": lr, "betas": (beta1, beta2), "weight_decay": decay}
    reference, model = built(), built()
    torch_adam = (torch.optim.AdamW if decoupled else torch.optim.Adam)(reference.parameters(), **options)
    one_bit = OneBitAdam(model.parameters(), **options, warmup_steps=9, decoupled_weight_decay=decoupled)

    losses = train(reference, torch_adam, 0, 8), train(model, one_bit, 0, 8)

    assert losses[0] == losses[1]
    assert torch.equal(weights(model), weights(reference))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(one_bit.state[ours][name], torch_adam.state[theirs][name])


def adam_on_ranks() -> dict[str, list[float]]:
    rank = torch.distributed.get_rank()
    whole, own = DistributedDataParallel(built(rank)), DistributedDataParallel(built(rank))
    adam = torch.optim.Adam(whole.parameters(), lr=0.01)
    one_bit = OneBitAdam(own.parameters(), lr=0.01, warmup_steps=100)
    one_bit.register(own)
    train(whole, adam, 0, 10, rank)
    train(own, one_bit, 0, 10, rank)
    return {"reference": weights(whole).tolist(), "found": weights(own).tolist()}


def test_the_warm_up_on_two_ranks_is_adam_behind_the_all_reduce_of_ddp(run_ranks: RunRanks) -> None:
    for of_rank in run_ranks(2, adam_on_ranks):
        assert of_rank["found"] == of_rank["reference"]


@pytest.mark.parametrize("world", [3, 4])
def test_the_warm_up_on_more_ranks_differs_by_the_order_of_sums(run_ranks: RunRanks, world: int) -> None:
    found = run_ranks(world, adam_on_ranks)

    for of_rank in found:
        assert of_rank["found"] == found[0]["found"]
        both = (torch.tensor(of_rank[name]) for name in ("found", "reference"))
        torch.testing.assert_close(*both, rtol=0, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lamb_is_the_published_one_before_and_after_the_freeze(decay: float) -> None:
    reference, model = built(), built()
    lamb = OneBitLamb(model.parameters(), lr=0.01, weight_decay=decay, warmup_steps=12)
    states: list[dict[str, Any]] = [{} for _ in reference.parameters()]

    train(model, lamb, 0, 12)
    for step in range(12):
        backward(reference, step)
        for parameter, state in zip(reference.parameters(), states, strict=True):
            assert parameter.grad is not None
            lamb_step(parameter.data, parameter.grad, state, 0.01, decay)
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-5, atol=1e-6)

    train(model, lamb, 12, 20)
    frozen_lamb_steps(reference, states, 0.01, decay, range(12, 20))
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-3, atol=1e-4)


# ---- starts that break others


def dead_relu(model: nn.Sequential) -> None:
    model[0].weight.data[3:9], model[0].bias.data[3:9] = 0, -10


def zero_layer(model: nn.Sequential) -> None:
    model[2].weight.data.zero_()
    model[2].bias.data.zero_()


def almost_dead_relu(model: nn.Sequential) -> None:
    model[2].weight.data[:, :8] *= 1e-9


def nothing_learns(model: nn.Sequential) -> None:
    model[4].weight.data.zero_()
    model[2].bias.data.fill_(-100)


def huge_weights(model: nn.Sequential) -> None:
    model[0].weight.data *= 1e4


@BOTH
@pytest.mark.parametrize("warmup_steps", [1, 5])
@pytest.mark.parametrize("spoil", [dead_relu, zero_layer, almost_dead_relu, nothing_learns, huge_weights])
def test_hostile_starts_give_finite_weights(
    make: Make, warmup_steps: int, spoil: Callable[[nn.Sequential], None]
) -> None:
    model = built()
    spoil(model)

    losses = train(model, make(model.parameters(), lr=0.01, warmup_steps=warmup_steps), 0, 60)

    assert torch.isfinite(weights(model)).all()
    assert torch.isfinite(torch.tensor(losses)).all()


def near_dead(floor: float) -> float:
    """The largest change of a weight in one step, in learning rates, where some variances are almost 0."""
    parameter = nn.Parameter(torch.zeros(100))
    optimizer = OneBitAdam([parameter], lr=1.0, warmup_steps=5, floor=floor)
    for step in range(6):
        before = parameter.detach().clone()
        parameter.grad = torch.randn(100, generator=torch.Generator().manual_seed(step))
        parameter.grad[:5] *= 1e-7
        optimizer.step()
    return float((parameter.detach() - before).abs().max())


def test_tiny_variances_do_not_explode_after_the_freeze() -> None:
    assert near_dead(floor=0.01) < 15
    assert near_dead(floor=0.0) > 1e4


@BOTH
def test_a_row_without_gradient_does_not_walk(make: Make) -> None:
    table = nn.Parameter(torch.ones(10, 4))
    optimizer = make([table], lr=0.1, warmup_steps=3)

    for step in range(20):
        table.grad = torch.randn(10, 4, generator=torch.Generator().manual_seed(step))
        table.grad[7:] = 0
        optimizer.step()

    assert torch.equal(table[7:], torch.ones(3, 4))
    assert (table[:7] != 1).all()


@BOTH
def test_elements_that_the_caller_names_are_held_after_a_resume(make: Make) -> None:
    def started(mask: torch.Tensor | None) -> tuple[nn.Parameter, OneBitOptimizer]:
        table = nn.Parameter(torch.ones(4, 2))
        return table, make([table], lr=0.1, warmup_steps=2, untouched=None if mask is None else {table: mask})

    def step(table: nn.Parameter, optimizer: OneBitOptimizer, number: int) -> None:
        table.grad = torch.randn(4, 2, generator=torch.Generator().manual_seed(number))
        optimizer.step()

    table, optimizer = started(torch.tensor([[True, False]] * 4))
    for number in range(2):
        step(table, optimizer, number)
    held = table.detach()[:, 0].clone()

    resumed, again = started(None)
    resumed.data.copy_(table)
    again.load_state_dict(optimizer.state_dict())
    for number in range(2, 8):
        step(resumed, again, number)

    assert torch.equal(resumed[:, 0], held)
    assert not torch.equal(resumed[:, 1], table[:, 1])


@BOTH
def test_empty_parameters_and_ones_without_gradients_take_part(make: Make) -> None:
    empty, idle, used = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
    optimizer = make([empty, idle, used], lr=0.1, warmup_steps=2)

    for step in range(6):
        empty.grad = torch.empty(0, 3)
        used.grad = torch.randn(5, generator=torch.Generator().manual_seed(step))
        optimizer.step()

    assert torch.equal(idle, torch.ones(3))
    assert torch.isfinite(used).all()
    assert not torch.equal(used, torch.ones(5))


@BOTH
def test_sparse_gradients_are_refused(make: Make) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = make(table.parameters(), warmup_steps=2)
    table(torch.tensor([1])).sum().backward()
    before = table.weight.detach().clone()

    with pytest.raises(BadInput, match="sparse gradient"):
        optimizer.step()

    assert torch.equal(table.weight, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"warmup_steps": 0}, "warmup_steps"), ({"warmup_steps": 1, "eps": 0.0}, "eps"),
     ({"warmup_steps": 1, "betas": (1.0, 0.9)}, "betas"), ({"warmup_steps": 1, "floor": -1.0}, "floor")],
)  # fmt: skip
@BOTH
def test_options_out_of_range_are_refused(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make([nn.Parameter(torch.ones(1))], **options)


class _Waits(TorchDispatchMode):
    """Counts the operators that need values of ``meta`` tensors, which have none, as of a device that must answer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.overloadpacket is torch.ops.aten.nonzero and args[0].is_meta:
            self.count += 1
            return torch.zeros(args[0].numel(), args[0].ndim, dtype=torch.int64, device="meta")
        return operator(*args, **(kwargs or {}))


@BOTH
def test_no_step_waits_for_a_device_but_the_first_one_after_the_freeze(make: Make) -> None:
    parameters = [nn.Parameter(torch.ones(shape, device="meta")) for shape in ((4, 3), (5,))]
    optimizer = make(parameters, lr=0.1, weight_decay=0.01, warmup_steps=3)
    counts = []

    for _ in range(6):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with _Waits() as waits:
            optimizer.step()  # other operators that need values raise an error
        counts.append(waits.count)

    assert counts == [0, 0, 0, len(parameters), 0, 0]


# ---- resuming

STOPS = {"before the freeze": 3, "at the freeze": 5, "after the freeze": 9}


def on_ranks(kind: str, stop: int) -> dict[str, Any]:
    """Train, end at a step, and go on in new objects; beside a training that did not end."""
    rank = torch.distributed.get_rank()
    make: Make = {"adam": OneBitAdam, "lamb": OneBitLamb}[kind]

    def started() -> tuple[nn.Module, OneBitOptimizer]:
        model = DistributedDataParallel(built())
        optimizer = make(model.parameters(), lr=0.01, warmup_steps=5)
        optimizer.register(model)
        return model, optimizer

    whole, always = started()
    losses = train(whole, always, 0, 14, rank)
    model, optimizer = started()
    train(model, optimizer, 0, stop, rank)
    saved = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    again, resumed = started()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    state = always.rank_state()
    return {
        "uninterrupted": losses[stop:], "resumed": train(again, resumed, stop, 14, rank),
        "weights": [weights(whole).tolist(), weights(again).tolist()],
        "worker_error": state.tensors["worker_error"].value.tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("when", STOPS)
@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_a_resumed_training_goes_on_bit_for_bit_on_the_same_ranks(run_ranks: RunRanks, kind: str, when: str) -> None:
    found = run_ranks(2, on_ranks, kind, STOPS[when])

    for of_rank in found:
        assert of_rank["resumed"] == of_rank["uninterrupted"]
        assert of_rank["weights"][0] == of_rank["weights"][1] == found[0]["weights"][0]
    assert found[0]["worker_error"] != found[1]["worker_error"]


def save_on_four(kind: str) -> None:
    rank = torch.distributed.get_rank()
    model = built()
    optimizer = ({"adam": OneBitAdam, "lamb": OneBitLamb}[kind])(model.parameters(), lr=0.01, warmup_steps=3)
    train(model, optimizer, 0, 9, rank)
    tensors = {name: one.value for name, one in optimizer.rank_state().tensors.items()}
    torch.save([model.state_dict(), optimizer.state_dict(), tensors], f"rank{rank}.pt")


def resume_on_two(kind: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    model = built()
    optimizer = ({"adam": OneBitAdam, "lamb": OneBitLamb}[kind])(model.parameters(), lr=0.01, warmup_steps=3)
    saved = [torch.load(f"rank{number}.pt", weights_only=True) for number in range(4)]
    rules: dict[str, Rule] = {"worker_error": "mean", "server_error": "concatenate"}
    values = {"values": len(weights(model)), "sent_bytes": 0, "dense_bytes": 0}
    states = [
        RankState({name: StateTensor(value, rules[name]) for name, value in tensors.items()}, values)
        for _, _, tensors in saved
    ]
    model.load_state_dict(saved[0][0])
    torch.optim.Optimizer.load_state_dict(optimizer, saved[0][1])
    optimizer.load_rank_state(reshard(states, rank, 2))
    tensors = optimizer.rank_state().tensors
    return {
        "before": [{name: value.tolist() for name, value in of_rank.items()} for _, _, of_rank in saved],
        "after": {name: one.value.tolist() for name, one in tensors.items()},
        "losses": train(model, optimizer, 9, 20, rank), "weights": weights(model).tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_two_ranks_resume_what_four_have_saved_with_the_same_errors(run_ranks: RunRanks, kind: str) -> None:
    run_ranks(4, save_on_four, kind)

    found = run_ranks(2, resume_on_two, kind)

    before = found[0]["before"]
    old, new = (torch.tensor([one["worker_error"] for one in of]) for of in (before, [one["after"] for one in found]))
    torch.testing.assert_close(new.mean(0), old.mean(0), rtol=1e-6, atol=1e-6)
    joined, anew = (
        [value for one in of for value in one["server_error"]] for of in (before, [one["after"] for one in found])
    )
    assert joined == anew
    assert found[0]["weights"] == found[1]["weights"]
    assert all(torch.isfinite(torch.tensor(one["losses"])).all() for one in found)


@BOTH
def test_errors_of_another_model_or_rank_are_refused(make: Make) -> None:
    model, other = built(), nn.Linear(2, 2)
    optimizer, another = (make(one.parameters(), warmup_steps=2) for one in (model, other))
    train(model, optimizer, 0, 3)
    assert isinstance(optimizer, CommunicationState)
    assert optimizer.name == {OneBitAdam: "one_bit_adam", OneBitLamb: "one_bit_lamb"}[make]  # type: ignore[index]

    with pytest.raises(BadInput, match="expected those of parameters with"):
        another.load_rank_state(optimizer.rank_state())

    state = optimizer.state_dict()
    state["one_bit"]["server_error"] = state["one_bit"]["server_error"][:8]
    optimizer.load_state_dict(state)
    with pytest.raises(BadShape, match="another rank or number of ranks"):
        train(model, optimizer, 3, 4)


@BOTH
@pytest.mark.parametrize("errors_first", [False, True])
def test_errors_stay_whichever_part_of_the_state_is_loaded_first(make: Make, errors_first: bool) -> None:
    model = built()
    optimizer = make(model.parameters(), lr=0.01, warmup_steps=3)
    train(model, optimizer, 0, 6)
    again = built()
    again.load_state_dict(model.state_dict())
    resumed = make(again.parameters(), lr=0.01, warmup_steps=3)
    without_errors = {name: part for name, part in optimizer.state_dict().items() if name != "one_bit"}
    parts = [(resumed.load_state_dict, without_errors), (resumed.load_rank_state, optimizer.rank_state())]
    for load, part in reversed(parts) if errors_first else parts:
        load(copy.deepcopy(part))  # type: ignore[arg-type]

    assert any(one.value.any() for one in optimizer.rank_state().tensors.values())
    assert train(again, resumed, 6, 10) == train(model, optimizer, 6, 10)
    assert torch.equal(weights(again), weights(model))


def managed(url: str) -> tuple[nn.Module, OneBitOptimizer, CheckpointManager]:
    model = DistributedDataParallel(built())
    optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup_steps=3)
    optimizer.register(model)
    return model, optimizer, CheckpointManager(url, model=model, optimizer=optimizer, communication=[optimizer])


def save_and_resume(url: str) -> list[list[float]]:
    rank = torch.distributed.get_rank()
    model, optimizer, manager = managed(url)
    train(model, optimizer, 0, 6, rank)
    manager.save()
    manager.close()
    always = train(model, optimizer, 6, 12, rank)
    model, optimizer, manager = managed(url)
    manager.restore()
    resumed = train(model, optimizer, 6, 12, rank)
    manager.close()
    return [always, resumed]


@pytest.mark.timeout(600)
def test_a_manager_brings_each_rank_its_own_errors_back(run_ranks: RunRanks, tmp_path: Path) -> None:
    found = run_ranks(2, save_and_resume, str(tmp_path / "store"))

    for always, resumed in found:
        assert resumed == always
