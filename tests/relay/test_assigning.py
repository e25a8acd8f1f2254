"""Shards are given to relays evenly, the same way everywhere, and move little."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cnr_store import BadInput
from cnr_store.relay.assigning import assign_shards

NAMES = [f"relay-{number}" for number in range(12)]
sizes_of = st.lists(st.integers(0, 60), max_size=7)


def largest(assignment: Mapping[str, Sequence[int]], sizes: Mapping[int, int]) -> int:
    return max(sum(sizes[shard] for shard in shards) for shards in assignment.values())


def best(sizes: Sequence[int], count: int) -> int:
    """The smallest largest load of all assignments, by trying each."""
    return min(
        max(sum(size for size, owner in zip(sizes, owners, strict=True) if owner == one) for one in range(count))
        for owners in itertools.product(range(count), repeat=len(sizes))
    )


def moved(before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]]) -> set[int]:
    """Shards that another relay has now, or none had before."""
    owner = {shard: name for name, shards in before.items() for shard in shards}
    return {shard for name, shards in after.items() for shard in shards if owner.get(shard) != name}


def drawn(count: int, seed: int) -> dict[int, int]:
    """Sizes between 100 and 1099, scattered without a generator."""
    return {shard: 100 + (shard * 2_654_435_761 + seed * 97) % 1000 for shard in range(count)}


@given(sizes_of, st.integers(1, 3))
def test_no_relay_has_more_than_four_thirds_of_the_best_possible(sizes: list[int], count: int) -> None:
    found = assign_shards(dict(enumerate(sizes)), NAMES[:count])

    assert sorted(shard for shards in found.values() for shard in shards) == list(range(len(sizes)))
    assert list(found) == NAMES[:count]
    assert 3 * largest(found, dict(enumerate(sizes))) <= 4 * best(sizes, count)


@given(sizes_of, st.integers(1, 3), st.lists(st.integers(0, 4), min_size=8, max_size=8))
@example([1, 7, 13, 13], 2, [0, 0, 1, 1, 0, 0, 0, 0])  # assigned again, the first shard moved once more
def test_the_bound_holds_whatever_was_before(sizes: list[int], count: int, owners: list[int]) -> None:
    before = {
        name: [shard for shard, owner in enumerate(owners) if NAMES[owner] == name] for name in NAMES[:5]
    }  # fmt: skip

    found = assign_shards(dict(enumerate(sizes)), NAMES[:count], before=before)

    assert sorted(shard for shards in found.values() for shard in shards) == list(range(len(sizes)))
    assert 3 * largest(found, dict(enumerate(sizes))) <= 4 * best(sizes, count)
    assert assign_shards(dict(enumerate(sizes)), NAMES[:count], before=found) == found


@given(st.permutations(list(range(9))), st.permutations(NAMES[:4]))
def test_the_order_of_the_arguments_does_not_matter(shards: list[int], relays: list[str]) -> None:
    sizes = drawn(9, 1)

    assert assign_shards({shard: sizes[shard] for shard in shards}, relays) == assign_shards(sizes, NAMES[:4])


@pytest.mark.parametrize("seed", range(5))
def test_when_a_relay_leaves_only_its_own_shards_move(seed: int) -> None:
    sizes = drawn(200, seed)
    before = assign_shards(sizes, NAMES[:10])

    after = assign_shards(sizes, NAMES[:9], before=before)

    assert moved(before, after) == set(before[NAMES[9]])
    assert largest(after, sizes) <= 1.06 * sum(sizes.values()) / 9


@pytest.mark.parametrize("seed", range(5))
def test_when_a_relay_joins_about_what_it_takes_over_moves(seed: int) -> None:
    sizes = drawn(200, seed)
    before = assign_shards(sizes, NAMES[:10])

    after = assign_shards(sizes, NAMES[:11], before=before)

    bytes_moved = sum(sizes[shard] for shard in moved(before, after))
    assert bytes_moved <= 1.6 * sum(sizes.values()) / 11
    assert sum(sizes[shard] for shard in after[NAMES[10]]) >= 0.8 * sum(sizes.values()) / 11
    assert largest(after, sizes) <= 1.06 * sum(sizes.values()) / 11


def test_a_shard_that_grows_moves_itself_or_a_few_others() -> None:
    sizes = drawn(100, 3)
    before = assign_shards(sizes, NAMES[:5])
    grown = {**sizes, 7: 4 * sizes[7]}

    after = assign_shards(grown, NAMES[:5], before=before)

    assert len(moved(before, after)) <= 6
    assert assign_shards(sizes, NAMES[:5], before=before) == before


def test_shards_that_are_new_are_placed_and_those_that_are_gone_forgotten() -> None:
    before = assign_shards({0: 5, 1: 5, 2: 5}, NAMES[:3])

    after = assign_shards({1: 5, 2: 5, 3: 5}, NAMES[:3], before=before)

    assert moved(before, after) == {3}
    assert sorted(after.values()) == [(1,), (2,), (3,)]


def test_shards_may_be_any_names_and_sizes_nothing() -> None:
    assert assign_shards({("t", 0): 1, ("t", 1): 1}, ["a", "b"]) == {"a": (("t", 0),), "b": (("t", 1),)}
    assert assign_shards({}, ["a"]) == {"a": ()}
    assert assign_shards({"x": 0, "y": 0}, ["a"]) == {"a": ("x", "y")}


@pytest.mark.parametrize(
    ("sizes", "relays", "message"),
    [({0: 1}, [], "at least one"), ({0: 1}, ["a", "a"], "distinct names"), ({0: -1}, ["a"], "shard 0 has size -1")],
)
def test_what_cannot_be_meant_is_refused(sizes: dict[int, int], relays: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        assign_shards(sizes, relays)
