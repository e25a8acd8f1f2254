"""Gradients as few levels are unbiased, within the bound of their error, and as many bits as they say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from cnr_store.communication import Meter, QuantizedGradients
from cnr_store.communication.quantizing import dequantize, levels_for, pack_codes, quantize, unpack_codes
from cnr_store.errors import BadInput
from tests.communication.conftest import RunRanks
from tests.communication.models import Clicks, losses_of


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 1000))
def test_codes_come_back_from_their_words(length: int, levels: int, seed: int) -> None:
    codes = torch.randint(-levels, levels + 1, (length,), generator=torch.Generator().manual_seed(seed))

    words = pack_codes(codes, levels)

    assert torch.equal(unpack_codes(words, levels, length), codes)
    assert len(words) == math.ceil(length / int(63 / math.log2(2 * levels + 1)))


@pytest.mark.parametrize("levels", [1, 2, 4, 8])
def test_the_mean_of_many_roundings_is_the_value(levels: int) -> None:
    values = torch.randn(40, generator=torch.Generator().manual_seed(1))
    draws = torch.Generator().manual_seed(2)
    rounded = torch.stack([dequantize(*quantize(values, levels, draws), levels) for _ in range(4000)])

    spread = float(values.norm()) / levels / math.sqrt(4000)
    assert float((rounded.mean(0) - values).abs().max()) < 4.5 * spread / 2
    error = float((rounded - values).square().sum(1).mean() / values.square().sum())
    assert error <= min(40 / levels**2, math.sqrt(40) / levels)


def test_zeros_stay_zero_and_what_is_not_finite_is_not_hidden() -> None:
    draws = torch.Generator()

    assert dequantize(*quantize(torch.zeros(3), 2, draws), 2).tolist() == [0, 0, 0]
    assert dequantize(*quantize(torch.tensor([1.0, float("nan")]), 2, draws), 2).isnan().all()


@pytest.mark.parametrize(
    ("loss", "levels"), [(4.0, 2), (1.0, 4), (1.1, 4), (8.0, 2), (0.0, 2), (float("nan"), 2), (1e-30, 1 << 15)]
)
def test_levels_grow_with_the_root_of_the_fall_of_the_loss(loss: float, levels: int) -> None:
    assert levels_for(loss, 4.0, 2) == levels


def train(levels: int, steps: int) -> list[Any]:
    meter = Meter()
    torch.manual_seed(0)
    model = DistributedDataParallel(Clicks(), process_group=meter.group(), bucket_cap_mb=0.001)
    hook = QuantizedGradients(levels=levels)
    hook.register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses_of(model, optimizer, range(steps))
    weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    found = hook.metrics()
    following = [hook.report_loss(4.0), hook.report_loss(1.0 + 0.2 * dist.get_rank())]
    return [all(torch.equal(weights, one) for one in others), found["sent_bytes"] / found["dense_bytes"], following]


def test_all_ranks_average_the_same_from_few_bits(run_ranks: RunRanks) -> None:
    for same, share, following in run_ranks(2, train, 2, 4):
        assert same
        assert 2.37 / 32 < share < 3.2 / 32  # small tensors fill their last word badly
        assert following == [2, 4]


@pytest.mark.parametrize("levels", [0, 1 << 16])
def test_levels_out_of_range_are_refused(levels: int) -> None:
    with pytest.raises(BadInput):
        QuantizedGradients(levels=levels)


def levels_after(losses: list[float]) -> list[Any]:
    """The levels after each reported loss, and the first loss that is saved."""
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    hook = QuantizedGradients()
    hook.register(model)
    return [*(hook.report_loss(loss) for loss in losses), hook.rank_state().scalars["first_loss"]]


def test_levels_follow_the_first_loss_that_is_a_number(run_ranks: RunRanks) -> None:
    assert run_ranks(2, levels_after, [float("nan"), 8.0, 2.0, 0.5, 4.0]) == [[2, 2, 4, 8, 3, 8.0]] * 2


def test_a_loss_before_the_hook_has_a_model_is_refused() -> None:
    with pytest.raises(BadInput, match="register"):
        QuantizedGradients().report_loss(1.0)
