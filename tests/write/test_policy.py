"""Policies: when a checkpoint is full, and what a delta is relative to."""

from __future__ import annotations

import pytest

from cnr_store.types import MAX_CHAIN
from cnr_store.write.policy import CheckpointSize, Decision, Policy, decide, is_baseline_cheaper

FULL = CheckpointSize("baseline", 100)
PAPER_SIZES = (25, 33, 39, 44, 48, 51)


def history(*deltas: int) -> list[CheckpointSize]:
    return [FULL, *(CheckpointSize("delta", size) for size in deltas)]


@pytest.mark.parametrize("policy", ["baseline", "consecutive", "one_shot", "intermittent"])
def test_first_checkpoint_is_full(policy: Policy) -> None:
    assert decide(policy, []).kind == "baseline"


def test_full_policy_never_writes_a_delta() -> None:
    assert all(decide("baseline", history(*PAPER_SIZES[:n])).kind == "baseline" for n in range(7))


def test_consecutive_deltas_build_on_the_head() -> None:
    decision = decide("consecutive", history(60, 60, 60, 60))

    assert (decision.kind, decision.base) == ("delta", "head")


@pytest.mark.parametrize("deltas", [0, 1, 50, 5_000])
def test_one_shot_deltas_build_on_the_baseline_for_ever(deltas: int) -> None:
    decision = decide("one_shot", history(*[99] * deltas))

    assert (decision.kind, decision.base) == ("delta", "baseline")


def test_intermittent_follows_the_papers_worked_example() -> None:
    decisions = [decide("intermittent", history(*PAPER_SIZES[:count])) for count in range(1, 7)]

    # After five deltas F = 2.89 > I = 2.88: go on. After six F = 3.40 <= I = 3.57: full.
    assert [decision.kind for decision in decisions] == ["delta"] * 5 + ["baseline"]
    assert all(decision.base == "baseline" for decision in decisions)


def test_predictor_is_the_formula() -> None:
    for count in range(1, 7):
        sizes = PAPER_SIZES[:count]
        cost_of_full = 1 + sum(size / 100 for size in sizes)
        cost_of_going_on = (count + 1) * sizes[-1] / 100
        assert is_baseline_cheaper(100, sizes) == (cost_of_full <= cost_of_going_on)


def test_predictor_takes_equality_as_full() -> None:
    # F = 1 + S, I = 2 S: equal at S = 1.
    assert not is_baseline_cheaper(100, [99])
    assert is_baseline_cheaper(100, [100])


def test_only_sizes_since_the_last_full_checkpoint_count() -> None:
    old = history(*PAPER_SIZES)

    assert decide("intermittent", old).kind == "baseline"
    assert decide("intermittent", [*old, FULL, CheckpointSize("delta", 25)]).kind == "delta"


def test_chain_at_its_limit_ends_in_a_full_checkpoint() -> None:
    assert decide("consecutive", history(*[1] * (MAX_CHAIN - 2))).kind == "delta"
    assert decide("consecutive", history(*[1] * (MAX_CHAIN - 1))).kind == "baseline"


def test_compacted_chain_goes_on_and_a_longer_one_ends() -> None:
    assert decide("consecutive", history(*[1] * 500), chain_length=3).kind == "delta"
    assert decide("consecutive", history(1), chain_length=MAX_CHAIN).kind == "baseline"


def test_decision_depends_on_nothing_but_its_arguments() -> None:
    given = history(*PAPER_SIZES)

    assert decide("intermittent", given) == decide("intermittent", tuple(given))
    assert isinstance(decide("intermittent", given), Decision)
