"""Which run of a chain is compacted: decided from the chain's bytes alone."""

from __future__ import annotations

import pytest

from cnr_store.errors import BadInput
from cnr_store.format.records import ChainEntry
from cnr_store.maintenance.compaction.plan import CompactionPolicy, Run, choose_run, run_between

LARGE = 1_000_000


def chain_of(baseline: int, *deltas: int) -> list[ChainEntry]:
    return [
        ChainEntry(
            seg=f"{index:020d}-{index:032x}", sha256="0" * 64, kind="delta" if index else "baseline",
            l0=index, l1=index + 1, size_bytes=size, rows=size,
        )
        for index, size in enumerate((baseline, *deltas))
    ]  # fmt: skip


def positions(run: Run | None) -> tuple[int, int, str] | None:
    return None if run is None else (run.start, run.stop, run.kind)


@pytest.mark.parametrize("deltas", [(), (5,), (5, 5, 5), (400_000,), (300, 20, 1)])
def test_a_short_chain_of_few_bytes_stays(deltas: tuple[int, ...]) -> None:
    assert choose_run(chain_of(LARGE, *deltas), CompactionPolicy()) is None


def test_nothing_is_chosen_in_an_empty_store() -> None:
    assert choose_run([], CompactionPolicy()) is None


def test_deltas_of_similar_size_become_one_when_there_are_enough() -> None:
    policy = CompactionPolicy(fanout=3)

    assert choose_run(chain_of(LARGE, 100, 110), policy) is None
    assert positions(choose_run(chain_of(LARGE, 100, 110, 90), policy)) == (1, 4, "delta")


def test_a_backlog_is_compacted_at_once() -> None:
    assert positions(choose_run(chain_of(LARGE, *[100] * 40), CompactionPolicy())) == (1, 41, "delta")


def test_the_oldest_tier_goes_first_and_the_smaller_ones_behind_it_stay() -> None:
    chain = chain_of(LARGE, 1000, 1000, 1000, 1000, 10, 10, 10, 10)

    assert positions(choose_run(chain, CompactionPolicy())) == (1, 5, "delta")


def test_a_small_delta_before_a_large_one_counts_to_its_tier() -> None:
    chain = chain_of(LARGE, 1000, 1, 1000, 1, 1000, 1000, 2)

    assert positions(choose_run(chain, CompactionPolicy())) == (1, 7, "delta")


def test_deltas_that_outgrow_their_share_go_into_the_baseline() -> None:
    policy = CompactionPolicy(max_restore_ratio=1.25)

    assert choose_run(chain_of(1000, 200, 50), policy) is None
    assert positions(choose_run(chain_of(1000, 200, 51), policy)) == (0, 3, "baseline")


def test_deltas_behind_a_baseline_without_bytes_go_into_it() -> None:
    assert positions(choose_run(chain_of(0, 1), CompactionPolicy())) == (0, 2, "baseline")


def test_a_chain_that_is_too_long_is_compacted_where_the_fewest_are_needed() -> None:
    chain = chain_of(LARGE, 6400, 6400, 1600, 400, 100)

    assert choose_run(chain, CompactionPolicy(max_chain=6)) is None
    assert positions(choose_run(chain, CompactionPolicy(max_chain=5))) == (1, 3, "delta")


def test_without_similar_ones_the_newest_keep_the_chain_short() -> None:
    chain = chain_of(LARGE, 64_000, 6400, 400, 10)

    assert positions(choose_run(chain, CompactionPolicy(max_chain=3))) == (2, 5, "delta")
    assert positions(choose_run(chain, CompactionPolicy(max_chain=1))) == (0, 5, "baseline")


@pytest.mark.parametrize(
    "wrong",
    [{"max_chain": 0}, {"max_chain": 65}, {"max_chain": 2.5}, {"fanout": 1}, {"max_restore_ratio": 1.0},
     {"max_restore_ratio": float("nan")}, {"max_restore_ratio": float("inf")}],
)  # fmt: skip
def test_a_policy_that_nothing_can_meet_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        CompactionPolicy(**wrong)  # type: ignore[arg-type]


def test_a_run_that_is_asked_for_has_the_kind_of_its_first_segment() -> None:
    chain = chain_of(100, 10, 10)

    assert positions(run_between(chain, 0, 3)) == (0, 3, "baseline")
    assert positions(run_between(chain, 1, 3)) == (1, 3, "delta")


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1, 1), (2, 1), (-1, 2), (1, 4)])
def test_what_is_no_run_of_two_is_refused(start: int, stop: int) -> None:
    with pytest.raises(BadInput, match="at least two"):
        run_between(chain_of(100, 10, 10), start, stop)
