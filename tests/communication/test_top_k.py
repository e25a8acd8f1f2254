"""Activations at a cut: what travels, what comes back of the gradient, and that real ranks do what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.communication import Meter, TopKActivations
from cnr_store.communication.top_k import Backward
from cnr_store.errors import BadInput, BadShape
from tests.communication.conftest import RunRanks

MODES: tuple[Backward, ...] = ("own", "mask", "whole")
BATCH, WIDTH = 6, 20


def drawn(batch: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))


def largest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The rows with all but the largest values set to 0; values must differ in size."""
    least = rows.abs().sort(dim=1, descending=True).values[:, count - 1 : count]
    return torch.where(rows.abs() >= least, rows, 0.0)


@given(st.integers(0, 5), st.integers(1, 400), st.floats(0.001, 1), st.sampled_from([torch.float32, torch.float16]))
def test_a_message_means_the_largest_values(batch: int, width: int, keep: float, dtype: torch.dtype) -> None:
    layer = TopKActivations(keep, dtype=dtype)
    rows = drawn(batch, width, width)

    message, sent = layer.encode(rows)
    received, positions = layer.decode(message, width)

    assert message.shape == (batch, layer.row_bytes(width))
    assert layer.row_bytes(width) == layer.num_kept(width) * (dtype.itemsize + (1 if width <= 256 else 2))
    assert torch.equal(positions, sent)
    assert torch.equal(received, largest(rows, layer.num_kept(width)).to(dtype).float())


@pytest.mark.parametrize("width", [256, 257, 32_768, 32_769])
def test_positions_of_wide_rows_arrive(width: int) -> None:
    layer = TopKActivations(1e-9)
    rows = torch.zeros(2, width)
    rows[0, -1], rows[1, 0] = 3.0, -2.0

    assert torch.equal(layer(rows), rows)


@settings(max_examples=30)
@given(st.sampled_from(MODES), st.integers(1, 40), st.floats(0.01, 1), st.integers(0, 1000))
def test_backward_sends_what_its_mode_says(mode: Backward, width: int, keep: float, seed: int) -> None:
    layer = TopKActivations(keep, mode)
    rows = drawn(4, width, seed).requires_grad_()
    gradient = drawn(4, width, seed + 1)

    kept = layer(rows)
    kept.backward(gradient)

    expected = {
        "own": largest(gradient, layer.num_kept(width)),
        "mask": torch.where(kept != 0, gradient, 0.0),
        "whole": gradient,
    }
    assert rows.grad is not None
    assert torch.equal(rows.grad, expected[mode])
    assert torch.equal(kept, largest(rows.detach(), layer.num_kept(width)))


def over_a_cut(mode: Backward) -> dict[str, Any]:
    """Rank 0 has the lower half of a model, rank 1 the upper one."""
    meter = Meter()
    layer = TopKActivations(0.2, mode, group=meter.group())
    meter.reset()
    if torch.distributed.get_rank() == 0:
        rows = drawn(BATCH, WIDTH, 1).requires_grad_()
        layer.exchange(2 * rows, [0, BATCH], [0, 0]).sum().backward()
        assert rows.grad is not None
        found = rows.grad.tolist()
    else:
        received = layer.exchange(torch.empty(0, WIDTH, requires_grad=True), [0, 0], [BATCH, 0])
        (received * drawn(BATCH, WIDTH, 2)).sum().backward()
        found = received.tolist()
    return {"found": found, "pushed": meter.total.pushed_bytes, "received": meter.total.received_bytes}


@pytest.mark.parametrize("mode", MODES)
def test_values_and_positions_travel_between_two_ranks(run_ranks: RunRanks, mode: Backward) -> None:
    rows = drawn(BATCH, WIDTH, 1).requires_grad_()
    kept = TopKActivations(0.2, mode)(2 * rows)
    (kept * drawn(BATCH, WIDTH, 2)).sum().backward()
    assert rows.grad is not None

    lower, upper = run_ranks(2, over_a_cut, mode)

    assert upper["found"] == kept.tolist()
    assert lower["found"] == rows.grad.tolist()
    there, back = BATCH * 4 * 5, BATCH * {"own": 4 * 5, "mask": 4 * 4, "whole": WIDTH * 4}[mode]
    assert (lower["pushed"], lower["received"]) == (there, back)
    assert (upper["pushed"], upper["received"]) == (back, there)


def exchange_rows(mode: Backward) -> dict[str, Any]:
    """Each rank r sends r + other + 1 rows to each other rank."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    meter = Meter()
    layer = TopKActivations(0.2, mode, group=meter.group())
    meter.reset()
    counts = [rank + other + 1 for other in range(world)]
    rows = drawn(sum(counts), WIDTH, rank).requires_grad_()
    received = layer.exchange(rows, counts, counts)
    received.backward(drawn(sum(counts), WIDTH, 10 + rank))
    assert rows.grad is not None
    return {"received": received.tolist(), "gradient": rows.grad.tolist(), "pushed": meter.total.pushed_bytes}


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_all_ranks_are_exchanged(run_ranks: RunRanks, mode: Backward) -> None:
    world = 3
    counts = [[rank + other + 1 for other in range(world)] for rank in range(world)]
    layer = TopKActivations(0.2, mode)
    rows = [drawn(sum(counts[rank]), WIDTH, rank).requires_grad_() for rank in range(world)]
    parts = [layer(of_rank).split(counts[rank]) for rank, of_rank in enumerate(rows)]
    for rank in range(world):
        received = torch.cat([parts[source][rank] for source in range(world)])
        received.backward(drawn(len(received), WIDTH, 10 + rank), retain_graph=True)

    found = run_ranks(world, exchange_rows, mode)

    for rank, of_rank in enumerate(found):
        gradient = rows[rank].grad
        assert gradient is not None
        assert of_rank["received"] == torch.cat([parts[source][rank] for source in range(world)]).tolist()
        torch.testing.assert_close(torch.tensor(of_rank["gradient"]), gradient)
        others = sum(counts[rank]) - counts[rank][rank]
        assert of_rank["pushed"] == others * (4 * 5 + {"own": 4 * 5, "mask": 4 * 4, "whole": WIDTH * 4}[mode])


@pytest.mark.parametrize("keep", [0.0, 1.5, -1.0])
def test_a_share_out_of_range_is_refused(keep: float) -> None:
    with pytest.raises(BadInput, match="keep"):
        TopKActivations(keep)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(BadInput, match="backward must be one of"):
        TopKActivations(0.1, "none")  # type: ignore[arg-type]


def test_an_exchange_of_other_rows_is_refused() -> None:
    with pytest.raises(BadShape, match="expected 3 rows, found 2"):
        TopKActivations(0.1).exchange(torch.zeros(2, 4), [1, 2], [1, 2])
