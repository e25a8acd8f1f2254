"""Which ranks keep copies of what a rank saves, and who gives them back."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.errors import BadInput
from cnr_store.training.peer_placement import choose_givers, fit, place_copies


def lasting(world: int, copies: int, lost: set[int]) -> bool:
    """Whether each lost rank of so many hosts has a copy elsewhere."""
    return all({*holders} - lost for rank, holders in enumerate(alone(world, copies)) if rank in lost)


def alone(world: int, copies: int) -> tuple[tuple[int, ...], ...]:
    return place_copies([str(rank) for rank in range(world)], copies)


def test_hosts_are_grouped_and_the_rest_is_a_ring() -> None:
    assert alone(4, 1) == ((1,), (0,), (3,), (2,))
    assert alone(5, 1) == ((1,), (0,), (3,), (4,), (2,))
    assert alone(4, 2) == ((1, 2), (2, 3), (3, 0), (0, 1))
    assert alone(6, 2) == ((1, 2), (2, 0), (0, 1), (4, 5), (5, 3), (3, 4))


def test_ranks_of_one_host_have_their_copies_on_others() -> None:
    assert place_copies(["a", "a", "b", "b"], 1) == ((2,), (3,), (0,), (1,))
    assert place_copies(["a", "b", "a", "b", "b"], 1) == ((1,), (0,), (3,), (2,), (0,))


def test_ranks_that_share_the_only_host_count_as_hosts() -> None:
    assert place_copies(["a"] * 4, 1) == alone(4, 1)


@pytest.mark.parametrize(("hosts", "copies"), [(["a"], 1), (["a", "a"], 2), (["a", "a", "b", "b"], 2)])
def test_too_few_hosts_are_refused(hosts: list[str], copies: int) -> None:
    with pytest.raises(BadInput, match=f"needs {copies + 1}"):
        place_copies(hosts, copies)


@given(st.integers(1, 4), st.integers(0, 12), st.data())
def test_every_host_keeps_as_much_and_no_rank_its_own(copies: int, more: int, data: st.DataObject) -> None:
    world = copies + 1 + more

    placed = alone(world, copies)

    assert all(len({*holders} - {rank}) == copies for rank, holders in enumerate(placed))
    assert Counter(itertools.chain(*placed)) == Counter(dict.fromkeys(range(world), copies))
    lost = data.draw(st.sets(st.integers(0, world - 1), max_size=copies))
    assert lasting(world, copies, lost)


@given(st.lists(st.sampled_from("abcdef"), min_size=2, max_size=16), st.integers(1, 3))
def test_copies_are_on_other_hosts(hosts: list[str], copies: int) -> None:
    if len({*hosts}) in range(2, copies + 1) or len(hosts) <= copies:
        return
    for rank, holders in enumerate(place_copies(hosts, copies)):
        places = [hosts[one] if len({*hosts}) > 1 else str(one) for one in (rank, *holders)]
        assert len({*places}) == copies + 1


@pytest.mark.parametrize(("world", "copies"), [(4, 1), (6, 1), (6, 2), (8, 3)])
def test_groups_lose_copies_only_if_a_whole_group_is_lost(world: int, copies: int) -> None:
    losses = [{*lost} for lost in itertools.combinations(range(world), copies + 1)]

    fatal = [lost for lost in losses if not lasting(world, copies, lost)]

    assert len(losses) == math.comb(world, copies + 1)
    assert len(fatal) == world // (copies + 1)  # no placement has fewer (Gemini, theorem 1)


def test_the_rank_with_most_of_a_lost_one_gives_it() -> None:
    assert choose_givers([1, 3], [{1: 5}, {}, {1: 9, 3: 1}, {}]) == {1: 2, 3: 2}
    assert choose_givers([1], [{1: 5}, {}, {1: 5}]) == {1: 0}
    assert choose_givers([1, 2], [{2: 0}, {}, {}]) == {}


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(0, 30))
def test_what_is_taken_fits_and_nothing_more_would(sizes: list[int], room: int) -> None:
    offered = {(0, str(number)): size for number, size in enumerate(sizes)}

    taken = fit(offered, room)

    left = room - sum(offered[key] for key in taken)
    assert left >= 0
    assert all(offered[key] > left for key in offered.keys() - {*taken})
