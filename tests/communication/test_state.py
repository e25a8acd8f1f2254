"""Ranks that resume as more or fewer keep the sums of what was held back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.communication import RankState, StateTensor, chunk, reshard
from cnr_store.communication.state import Rule
from cnr_store.errors import BadInput, CorruptStore

worlds = st.integers(1, 9)


def states_of(rule: Rule, values: list[torch.Tensor]) -> list[RankState]:
    return [RankState({"x": StateTensor(value, rule)}, {"steps": 3}) for value in values]


def resharded(states: list[RankState], world: int) -> list[torch.Tensor]:
    return [reshard(states, rank, world).tensors["x"].value for rank in range(world)]


@given(worlds, worlds, st.integers(0, 20), st.integers(0, 1000))
def test_the_mean_over_ranks_of_what_was_held_back_stays(old: int, new: int, length: int, seed: int) -> None:
    values = list(torch.randn(old, length, generator=torch.Generator().manual_seed(seed)))

    found = torch.stack(resharded(states_of("mean", values), new))

    torch.testing.assert_close(found.double().mean(0), torch.stack(values).double().mean(0), rtol=0, atol=1e-6)


@given(worlds, worlds, st.integers(0, 100))
def test_chunks_of_a_vector_are_joined_and_cut_anew(old: int, new: int, length: int) -> None:
    whole = torch.arange(float(length))
    cut = [whole[slice(*chunk(length, rank, old))] for rank in range(old)]

    found = resharded(states_of("concatenate", cut), new)

    assert torch.equal(torch.cat(found), whole)
    assert [len(one) for one in found] == [
        stop - start for start, stop in (chunk(length, rank, new) for rank in range(new))
    ]


@given(st.integers(0, 300), worlds, st.sampled_from([1, 8, 64]))
def test_chunks_cover_a_vector_and_begin_at_multiples(length: int, world: int, multiple: int) -> None:
    ranges = [chunk(length, rank, world, multiple=multiple) for rank in range(world)]

    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(length))
    assert all(start % multiple == 0 for start, stop in ranges if start < stop)


@given(worlds, st.sampled_from(["mean", "concatenate", "same"]))
def test_as_many_ranks_get_back_what_each_saved(world: int, rule: Rule) -> None:
    states = states_of(rule, list(torch.randn(world, 5)))

    assert [reshard(states, rank, world) for rank in range(world)] == states


def test_fewer_ranks_get_the_means_of_neighbours() -> None:
    states = states_of("mean", [torch.tensor([float(value)]) for value in (1, 3, 10, 20)])

    assert [float(one) for one in resharded(states, 2)] == [2.0, 15.0]


def test_what_is_the_same_everywhere_stays_so_with_its_bits() -> None:
    value = torch.tensor([0.1, float("nan"), -0.0])
    states = states_of("same", [value] * 3)

    assert all(one is value for one in resharded(states, 5))
    assert reshard(states, 4, 5).scalars == {"steps": 3}


def test_ranks_that_saved_different_tensors_are_refused() -> None:
    states = [RankState({"x": StateTensor(torch.ones(1), "mean")}), RankState({})]

    with pytest.raises(CorruptStore, match="rank 1 saved"):
        reshard(states, 0, 1)


def test_tensors_of_different_shapes_are_refused() -> None:
    with pytest.raises(CorruptStore, match=r"shape \(2,\) on rank 1, \(1,\) on rank 0"):
        reshard(states_of("mean", [torch.ones(1), torch.ones(2)]), 0, 1)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_is_refused(rank: int, world: int) -> None:
    with pytest.raises(BadInput, match="cannot get the state"):
        reshard(states_of("mean", [torch.ones(1)]), rank, world)
