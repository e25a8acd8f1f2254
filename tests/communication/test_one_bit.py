"""The laws of averages at one bit per value, on simulated ranks and on real ones."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.communication import Meter
from cnr_store.communication.one_bit import OneBitLayout, OneBitMean, pack_signs, unpack_signs
from tests.communication.conftest import RunRanks

SIZES = st.lists(st.integers(0, 70), min_size=1, max_size=6)
WORLDS = st.integers(1, 5)
SEEDS = st.integers(0, 2**31)


def drawn(layout: OneBitLayout, seed: int) -> list[torch.Tensor]:
    """A vector per rank; a fifth of the values is exactly 0, tensors differ in size by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(layout.world):
        values = torch.randn(layout.num_values, generator=generator)
        values[torch.rand(layout.num_values, generator=generator) < 0.2] = 0
        for number, part in enumerate(values.split(list(layout.sizes))):
            part.mul_(10.0 ** (2 * number - 4))
        found.append(values)
    return found


class SimulatedRanks:
    """All ranks of `OneBitMean` in one process, step by step."""

    def __init__(self, layout: OneBitLayout) -> None:
        self.layout = layout
        self.worker_errors = [torch.zeros(layout.num_values) for _ in range(layout.world)]
        self.server_errors = [torch.zeros(stop - start) for start, stop in layout.spans]

    def mean(self, vectors: list[torch.Tensor]) -> torch.Tensor:
        messages = []
        for rank, values in enumerate(vectors):
            message, self.worker_errors[rank] = self.layout.encode(values + self.worker_errors[rank])
            messages.append(message)
        answers = []
        for rank in range(self.layout.world):
            own = self.layout.mean(torch.stack([message[rank] for message in messages]), rank)
            answer, self.server_errors[rank] = self.layout.encode_chunk(own + self.server_errors[rank], rank)
            answers.append(answer)
        return self.layout.join(torch.stack(answers))


@given(st.lists(st.booleans(), max_size=40))
def test_signs_are_packed_as_numpy_packs_them(signs: list[bool]) -> None:
    padded = torch.tensor(signs + [False] * (-len(signs) % 8), dtype=torch.bool)

    packed = pack_signs(padded)

    assert packed.tolist() == np.packbits(padded.numpy(), bitorder="little").tolist()
    assert torch.equal(unpack_signs(packed), padded.float() * 2 - 1)


@given(SIZES, WORLDS, SEEDS)
def test_what_is_sent_and_the_error_are_exactly_what_was_given(sizes: list[int], world: int, seed: int) -> None:
    layout = OneBitLayout(tuple(sizes), world)
    values = drawn(layout, seed)[0]

    messages, error = layout.encode(values)

    sent = layout.join(messages)
    assert torch.equal(error, values - sent)
    for size, stop in zip(sizes, accumulate(sizes), strict=True):
        part, of_part = values[stop - size : stop], sent[stop - size : stop]
        scale = np.sqrt(np.mean(np.square(part.double().numpy()))) if size else 0.0
        expected = torch.where(part >= 0, scale, -scale).float()
        torch.testing.assert_close(of_part, expected, rtol=1e-6, atol=0)


@given(SIZES, SEEDS, WORLDS, WORLDS)
def test_padding_changes_no_scale_and_no_sign(sizes: list[int], seed: int, world: int, other: int) -> None:
    values = drawn(OneBitLayout(tuple(sizes), 1), seed)[0]

    sent = [
        layout.join(layout.encode(values)[0])
        for layout in (OneBitLayout(tuple(sizes), world), OneBitLayout((*sizes, 0), other))
    ]

    assert torch.equal(*sent)


@given(SIZES, WORLDS, SEEDS)
def test_nothing_is_lost_over_the_steps(sizes: list[int], world: int, seed: int) -> None:
    layout = OneBitLayout(tuple(sizes), world)
    ranks, given_sum, received = SimulatedRanks(layout), torch.zeros(layout.num_values).double(), 0.0

    for step in range(5):
        vectors = drawn(layout, seed + step)
        given_sum += torch.stack(vectors).double().mean(0)
        received = received + ranks.mean(vectors).double()

    held_back = torch.stack(ranks.worker_errors).double().mean(0) + torch.cat(ranks.server_errors).double()
    largest = float(given_sum.abs().max()) if layout.num_values else 0.0
    torch.testing.assert_close(received + held_back, given_sum, rtol=1e-5, atol=1e-5 * largest)


@given(SIZES, WORLDS)
def test_the_chunks_of_all_ranks_are_the_vector(sizes: list[int], world: int) -> None:
    layout = OneBitLayout(tuple(sizes), world)

    covered = [(tensor, count) for pieces in layout.pieces for tensor, count in pieces]

    assert [stop - start for start, stop in layout.spans] == [sum(n for _, n in of_rank) for of_rank in layout.pieces]
    assert [sum(n for tensor, n in covered if tensor == number) for number in range(len(sizes))] == sizes


def test_a_vector_of_nothing_has_a_mean() -> None:
    assert len(OneBitMean([0, 0])(torch.empty(0))) == 0


def test_a_zero_is_sent_as_positive() -> None:
    mean = OneBitMean([4])

    result = mean(torch.tensor([0.0, 0.0, -2.0, 0.0]))

    assert result.tolist() == [1.0, 1.0, -1.0, 1.0]
    assert mean.worker_error.tolist() == [-1.0, -1.0, -1.0, -1.0]


def average_on_ranks(sizes: list[int]) -> dict[str, Any]:
    meter = Meter()
    mean = OneBitMean(sizes, meter.group())
    meter.reset()
    results = [mean(drawn(mean.layout, step)[mean.rank]).tolist() for step in range(3)]
    total = meter.total
    return {
        "results": results, "worker_error": mean.worker_error.tolist(), "server_error": mean.server_error.tolist(),
        "pushed": total.pushed_bytes, "calls": sorted(meter.by_collective),
    }  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_real_ranks_do_what_simulated_ones_do(run_ranks: RunRanks, world: int) -> None:
    sizes = [1000, 0, 1, 77, 5]
    ranks = SimulatedRanks(OneBitLayout(tuple(sizes), world))

    found = run_ranks(world, average_on_ranks, sizes)

    expected = [ranks.mean(drawn(ranks.layout, step)).tolist() for step in range(3)]
    for rank, of_rank in enumerate(found):
        assert of_rank["results"] == expected
        assert of_rank["worker_error"] == ranks.worker_errors[rank].tolist()
        assert of_rank["server_error"] == ranks.server_errors[rank].tolist()


def test_a_value_costs_two_bits_on_the_wire(run_ranks: RunRanks) -> None:
    found = run_ranks(4, average_on_ranks, [100_000])

    for of_rank in found:
        of_step = of_rank["pushed"] / 3
        # An all-to-all of three foreign chunks, and one own chunk to all: 7/8 of a bit per value, plus 4 scales.
        assert of_step == pytest.approx(100_000 / 8 * (3 / 4 + 1 / 4), abs=64)
        assert of_rank["calls"] == ["all_gather", "all_to_all"]
