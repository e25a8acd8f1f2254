"""A hook that sends few values of each gradient loses none: the rest is sent later, or is in the residual."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from cnr_store.communication import Meter, QuantizedGradients, ThresholdedGradients
from cnr_store.communication.thresholding import kept_values, take_above
from cnr_store.errors import BadInput
from tests.communication.conftest import RunRanks
from tests.communication.models import Clicks, batch_of, losses_of

lengths = st.integers(1, 400)


def padded(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, torch.zeros(1)])


@given(lengths, st.floats(0.001, 0.9), st.integers(0, 1000), st.booleans(), st.floats(0, 3))
def test_what_is_sent_and_what_stays_are_together_what_was_there(
    length: int, keep: float, seed: int, renew: bool, threshold: float
) -> None:
    before = padded(torch.randn(length, generator=torch.Generator().manual_seed(seed)))
    residual, count = before.clone(), kept_values(length, keep)

    indices, values, _ = take_above(residual, torch.tensor(threshold), count, renew=renew)

    sent = torch.zeros(length).index_add_(0, indices, values)
    assert torch.equal(sent + residual[:-1], before[:-1])
    assert not ((sent != 0) & (residual[:-1] != 0)).any()
    assert len(indices) == count
    assert residual[-1] == 0


@given(lengths, st.floats(0.001, 0.9), st.integers(0, 1000))
def test_at_a_refresh_the_largest_values_are_sent(length: int, keep: float, seed: int) -> None:
    values = torch.randperm(length, generator=torch.Generator().manual_seed(seed)) + 1.0
    count = kept_values(length, keep)

    _, sent, _ = take_above(padded(values), torch.zeros(()), count, renew=True)

    assert sorted(sent.tolist()) == sorted(values.topk(count).values.tolist())


def test_the_threshold_follows_the_number_that_crossed_it() -> None:
    residual = padded(torch.arange(1.0, 101.0))

    _, _, fewer = take_above(residual.clone(), torch.tensor(200.0), 10, renew=False)
    _, _, right = take_above(residual.clone(), torch.tensor(91.0), 10, renew=False)
    _, _, double = take_above(residual.clone(), torch.tensor(81.0), 10, renew=False)
    _, _, most = take_above(residual.clone(), torch.tensor(1.0), 10, renew=False)

    assert float(fewer) == pytest.approx(200 * 0.67)
    assert float(right) == pytest.approx(91)
    assert float(double) == pytest.approx(81 * 2**0.2)
    assert float(most) == pytest.approx(1.5)


@pytest.mark.parametrize("first", [0.0, float("nan"), float("inf")])
def test_a_threshold_that_is_no_number_begins_at_the_largest(first: float) -> None:
    residual = padded(torch.tensor([1.0, -5.0, 2.0]))

    indices, values, _ = take_above(residual, torch.tensor(first), 1, renew=False)

    assert (indices.tolist(), values.tolist()) == ([1], [-5.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_sent_not_held_back(bad: float) -> None:
    residual = padded(torch.tensor([1.0, bad, 2.0]))

    indices, values, _ = take_above(residual, torch.tensor(10.0), 1, renew=False)

    assert indices.tolist() == [1]
    assert not values.isfinite().any()
    assert residual.tolist() == [1.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "wrong", [{"keep": 0.0}, {"keep": 1.0}, {"refresh_every": 0}, {"warmup_steps": -1}, {"values": "float64"}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        ThresholdedGradients(**wrong)


def compare_with_dense(values: str) -> list[float]:
    """Sum over 6 steps of gradients that the hook returned, plus the mean residual, against the dense gradients."""
    torch.manual_seed(0)
    model = Clicks()
    reference = Clicks()
    reference.load_state_dict(model.state_dict())
    hook = ThresholdedGradients(keep=0.01, refresh_every=4, warmup_steps=1, values=values)  # type: ignore[arg-type]
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    hook.register(ddp)
    dense = DistributedDataParallel(reference, bucket_cap_mb=0.001)
    ThresholdedGradients(warmup_steps=1000).register(dense)
    totals = [{name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(2)]
    for step in range(6):
        ids, features, labels = batch_of(step, dist.get_rank())
        for one, total in ((ddp, totals[0]), (dense, totals[1])):
            one.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(one(ids, features), labels).backward()
            for name, parameter in one.module.named_parameters():
                assert parameter.grad is not None
                total[name] += parameter.grad.to_dense()
    for key, tensor in hook.rank_state().tensors.items():
        name, _, what = key.rpartition("/")
        if what == "residual":
            mean = tensor.value.clone()
            dist.all_reduce(mean)
            totals[0][name] += mean.view_as(totals[0][name]) / dist.get_world_size()
    return [float((totals[0][name] - totals[1][name]).abs().max()) for name in totals[0]]


@pytest.mark.parametrize("values", ["float32", "float16"])
def test_all_that_was_trained_arrives_or_is_held_back(run_ranks: RunRanks, values: str) -> None:
    for rank in run_ranks(4, compare_with_dense, values):
        assert max(rank) < 1e-6


class Two(nn.Module):
    """Two layers; the second one is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.at_times = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, values: torch.Tensor, *, both: bool) -> torch.Tensor:
        result: torch.Tensor = self.always(values)
        return result + self.at_times(values) if both else result


def held_back_while_unused() -> list[bool]:
    hook, model = ThresholdedGradients(keep=0.05), DistributedDataParallel(Two(), find_unused_parameters=True)
    hook.register(model)

    def residual_after(steps: int, *, both: bool) -> torch.Tensor:
        for _ in range(steps):
            model.zero_grad()
            model(torch.randn(4, 16), both=both).square().sum().backward()
        return hook.rank_state().tensors["at_times.weight/residual"].value.clone()

    before, after = residual_after(2, both=True), residual_after(2, both=False)
    return [torch.equal(before, after), bool(before.any())]


def test_what_is_held_back_waits_while_no_rank_uses_its_parameter(run_ranks: RunRanks) -> None:
    assert run_ranks(2, held_back_while_unused) == [[True, True]] * 2


def steps_after(bad: str, values: Any) -> dict[str, Any]:
    """Whether gradients were finite in five steps; in the second one rank 1 gets what is not. What rank 1 held back."""
    hook, model = ThresholdedGradients(keep=0.05, values=values), DistributedDataParallel(Two().always)
    hook.register(model)
    finite, held = [], []
    for step in range(5):
        model.zero_grad()
        given = torch.randn(4, 16)
        if step == 1 and dist.get_rank() == 1:
            given[0] *= float(bad)
        model(given).square().sum().backward()
        assert model.module.weight.grad is not None
        finite.append(bool(model.module.weight.grad.isfinite().all()))
        held.append(hook.rank_state().tensors["weight/residual"].value.tolist())
    return {"finite": finite, "left_alone": held[1] == held[0] != held[2]}


@pytest.mark.parametrize(("bad", "values"), [("nan", "float32"), ("inf", "float16"), ("1e20", "float32")])
def test_what_is_not_finite_ends_with_its_step(run_ranks: RunRanks, bad: str, values: str) -> None:
    first, second = run_ranks(2, steps_after, bad, values)

    assert first["finite"] == second["finite"] == [True, False, True, True, True]
    assert second["left_alone"]


def rounded_last_value() -> float:
    hook, model = ThresholdedGradients(keep=0.9, values="float16"), DistributedDataParallel(nn.Linear(3, 2, bias=False))
    hook.register(model)
    (model(torch.tensor([0.0, 0.0, 1.0])) * torch.tensor([0.0, 1.0001])).sum().backward()
    return float(hook.rank_state().tensors["weight/residual"].value[-1])


def test_what_rounding_takes_from_the_last_value_is_held_back(run_ranks: RunRanks) -> None:
    assert run_ranks(1, rounded_last_value) == [pytest.approx(1e-4, rel=0.01)]


def names_of_a_compiled_model() -> list[str]:
    hook, model = ThresholdedGradients(), DistributedDataParallel(torch.compile(Two()))
    hook.register(model)
    with torch.compiler.set_stance("force_eager"):
        model(torch.randn(4, 16), both=True).sum().backward()
    return sorted(hook.rank_state().tensors)


def test_a_compiled_model_has_the_names_of_a_plain_one(run_ranks: RunRanks) -> None:
    parts = ("always.weight", "at_times.weight")

    assert run_ranks(1, names_of_a_compiled_model) == [[f"{p}/{w}" for p in parts for w in ("residual", "threshold")]]


def train_in_buckets(size_mb: float) -> list[Any]:
    """Losses with buckets of a size, which are built anew after the first step; whether all ranks hold the same."""
    meter = Meter()
    torch.manual_seed(0)
    model = DistributedDataParallel(Clicks(), process_group=meter.group(), bucket_cap_mb=size_mb)
    hook = ThresholdedGradients(keep=0.01, refresh_every=5)
    hook.register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter.reset()
    losses = losses_of(model, optimizer, range(8))
    weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    return [losses, all(torch.equal(weights, one) for one in others), *hook.metrics().values(),
            meter.total.pushed_bytes]  # fmt: skip


def test_buckets_of_any_size_and_order_give_the_same_bits(run_ranks: RunRanks) -> None:
    large, small = (run_ranks(2, train_in_buckets, size) for size in (25, 0.001))

    assert [rank[0] for rank in large] == [rank[0] for rank in small]
    assert all(rank[1] for rank in large + small)


def test_the_bytes_reported_are_those_on_the_wire(run_ranks: RunRanks) -> None:
    for _, _, sent, dense, pushed in run_ranks(2, train_in_buckets, 25):
        sparse = pushed - sent
        assert 0 < sent < dense / 10
        assert sparse > 0  # the table's rows


def bytes_of_a_norm(values: str) -> list[Any]:
    """Bytes of a step of a model of vectors alone: sent, and dense."""
    model = DistributedDataParallel(nn.LayerNorm(64))
    hook = ThresholdedGradients(values=values)  # type: ignore[arg-type]
    hook.register(model)
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, 64)).square().sum().backward()
    return [*hook.metrics().values()]


def test_vectors_go_whole_in_the_type_of_the_values(run_ranks: RunRanks) -> None:
    assert run_ranks(2, bytes_of_a_norm, "float32") == [[512, 512]] * 2
    assert run_ranks(2, bytes_of_a_norm, "float16") == [[256, 512]] * 2


def gradient_of_a_warmup(size: float) -> list[list[float]]:
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    ThresholdedGradients(warmup_steps=5).register(model)
    model(torch.full((1, 2), size)).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    found: list[list[float]] = gradient.tolist()
    return found


def test_large_gradients_do_not_overflow_in_the_warmup(run_ranks: RunRanks) -> None:
    size = 2.0**127

    assert run_ranks(2, gradient_of_a_warmup, size) == [[[size, size]]] * 2


def weights_after_a_warmup(size_mb: float) -> list[bool]:
    """Whether whole gradients of the hook train like DDP's own, with buckets of a size."""
    found = []
    for hook in (None, ThresholdedGradients(warmup_steps=1000)):
        torch.manual_seed(0)
        model = DistributedDataParallel(Clicks().layers, bucket_cap_mb=size_mb)
        if hook is not None:
            hook.register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank())
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(16, 20)).square().mean().backward()
            optimizer.step()
        found.append(torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]))
    return [torch.equal(*found), bool(found[0].isfinite().all())]


@pytest.mark.parametrize("size_mb", [25, 0.001])
@pytest.mark.parametrize("world", [2, 3])
def test_the_warmup_gives_the_bits_of_ddp(run_ranks: RunRanks, world: int, size_mb: float) -> None:
    assert run_ranks(world, weights_after_a_warmup, size_mb) == [[True, True]] * world


def gradients_of_halves() -> list[list[float]]:
    """Gradients of which two make more than float16 holds, with each hook."""
    found = []
    for hook in (ThresholdedGradients(keep=0.9), QuantizedGradients(levels=1)):
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False).half())
        hook.register(model)
        model(torch.full((1, 1), 40_000.0, dtype=torch.float16)).sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        found.append(gradient.view(-1).tolist())
    return found


def test_means_in_half_precision_do_not_overflow(run_ranks: RunRanks) -> None:
    assert run_ranks(2, gradients_of_halves) == [[[40_000.0], [40_000.0]]] * 2


class _Waits(TorchDispatchMode):
    """Lists the operators that would wait for a device: they return numbers, or shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            self.found.append(str(operator))
        return operator(*args, **(kwargs or {}))


def waits_in_steps() -> list[list[str]]:
    """The operators that would wait, of a backward pass with each hook, after the first passes, which build buckets."""
    found = []
    for hook in (ThresholdedGradients(refresh_every=3), QuantizedGradients()):
        model = DistributedDataParallel(Clicks().layers)
        hook.register(model)
        waits = _Waits()
        for step in range(6):
            loss = model(torch.randn(4, 20)).square().sum()
            with waits if step > 2 else contextlib.nullcontext():
                loss.backward()
        found.append(waits.found)
    return found


def test_no_step_waits_for_a_device(run_ranks: RunRanks) -> None:
    assert run_ranks(1, waits_in_steps) == [[[], []]]


def rates_over_a_long_refresh() -> list[float]:
    """Share of the values that a rank sent in 300 steps whose thresholds are chosen once, as nothing is held back."""
    torch.manual_seed(0)
    sent = 0
    model = DistributedDataParallel(nn.Linear(100, 50, bias=False))
    hook = ThresholdedGradients(keep=0.01, refresh_every=1000)
    hook.register(model)
    for _ in range(300):
        model.zero_grad()
        model(torch.randn(4, 100)).square().sum().backward()
        sent += int(model.module.weight.grad.count_nonzero())
    return [sent / (5000 * 300)]


def test_a_threshold_that_is_kept_for_long_holds_its_rate(run_ranks: RunRanks) -> None:
    for (rate,) in run_ranks(1, rates_over_a_long_refresh):
        assert 0.006 < rate <= 0.01
