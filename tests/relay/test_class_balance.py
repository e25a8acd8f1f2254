"""Users go to edges within their bandwidth, so that no move and no swap would balance the classes better."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.errors import BadInput
from cnr_store.relay import assign_users
from cnr_store.relay.class_balance import imbalance


def held(samples: Any, edges: list[int], count: int) -> Any:
    return np.stack([samples[np.array(edges) == edge].sum(axis=0) for edge in range(count)]).astype(float)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 3))
def test_every_user_has_an_edge_within_bounds_and_no_move_helps(seed: int, users: int, edges: int) -> None:
    drawn = np.random.default_rng(seed)
    samples = drawn.integers(0, 10, (users, 3)).astype(float)
    costs, bounds = drawn.uniform(0.5, 1, (users, edges)), np.full(edges, float(users))

    found = assign_users(samples, costs, bounds)

    least = imbalance(held(samples, found, edges))
    for user, edge in itertools.product(range(users), range(edges)):
        moved = [edge if other == user else own for other, own in enumerate(found)]
        assert imbalance(held(samples, moved, edges)) > least - 1e-9
    assert found == assign_users(samples, costs, bounds)


def test_users_of_one_class_each_are_mixed_at_every_edge() -> None:
    samples = np.kron(np.eye(4), np.ones((5, 1))) * 100

    found = assign_users(samples, np.ones((20, 5)), np.full(5, 4.0))

    assert imbalance(held(samples, found, 5)) == pytest.approx(0, abs=1e-12)
    assert sorted(np.bincount(found)) == [4] * 5


def test_it_is_close_to_the_best_of_all_assignments() -> None:
    drawn = np.random.default_rng(3)
    samples = drawn.integers(0, 20, (7, 4)).astype(float)
    bounds = [4.0, 4.0]

    found = assign_users(samples, np.ones((7, 2)), bounds)

    best = min(
        imbalance(held(samples, list(one), 2))
        for one in itertools.product(range(2), repeat=7)
        if max(np.bincount(one, minlength=2)) <= 4
    )
    chance = np.mean([imbalance(held(samples, list(drawn.integers(0, 2, 7)), 2)) for _ in range(200)])
    assert imbalance(held(samples, found, 2)) < best + 0.2 * (chance - best)


def test_a_user_goes_where_it_can_be_reached() -> None:
    costs = np.array([[1.0, np.inf], [1.0, np.inf], [np.inf, 1.0]])

    assert assign_users(np.ones((3, 2)), costs, [2.0, 2.0]) == [0, 0, 1]


def test_an_edge_without_bound_gets_no_user_that_cannot_reach_it() -> None:
    costs = np.array([[1.0, np.inf], [1.0, np.inf], [1.0, 1.0]])

    assert assign_users(np.eye(3), costs, [np.inf, np.inf])[:2] == [0, 0]


@pytest.mark.parametrize(
    ("samples", "costs", "bounds", "message"),
    [
        ([[1.0, 1.0]] * 2, [[1.0]] * 2, [1.0], "no edge has bandwidth left for user 1"),
        ([[1.0]], [[1.0, 1.0]], [1.0], "bounds"),
        ([[-1.0]], [[1.0]], [1.0], "0 or more"),
    ],
)
def test_what_cannot_be_assigned_is_refused(samples: Any, costs: Any, bounds: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        assign_users(samples, costs, bounds)
