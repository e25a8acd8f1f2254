"""Ranks that do one thing together: either all succeed, or all raise, and nobody waits for one that is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cnr_store import CnrStoreError
from cnr_store.errors import BadShape, DoesNotApply, RankFailed, RankLost, TableNotFound
from cnr_store.runtime.ranks import OneRank, Ranks, rank_zero, together
from tests.support.ranks import ThreadRank, thread_ranks


def on_all(ranks: list[ThreadRank], work: Callable[[ThreadRank], Any]) -> list[Any]:
    """What ``work`` returned or raised on each rank."""

    def caught(rank: ThreadRank) -> Any:
        try:
            return work(rank)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(caught, ranks))


def failing(rank: Ranks, which: int, error: BaseException) -> Callable[[], int]:
    def share() -> int:
        if rank.rank == which:
            raise error
        return rank.rank

    return share


def test_every_rank_gets_what_all_returned() -> None:
    answers = on_all(thread_ranks(3), lambda rank: together(rank, lambda: {"rank": rank.rank, "of": [rank.world]}))

    assert answers == [[{"rank": k, "of": [3]} for k in range(3)]] * 3
    assert together(OneRank(), lambda: 5) == [5]


def test_only_rank_zero_acts_and_all_hear_of_it() -> None:
    acted: list[int] = []

    def act(rank: ThreadRank) -> Any:
        return rank_zero(rank, lambda: acted.append(rank.rank) or "done")

    assert on_all(thread_ranks(3), act) == ["done"] * 3
    assert acted == [0]
    assert rank_zero(OneRank(), lambda: 7) == 7


def test_the_failed_rank_raises_its_error_and_the_others_one_of_its_kind() -> None:
    own = BadShape("rows are missing", table="t", version=7)

    errors = on_all(thread_ranks(3), lambda rank: together(rank, failing(rank, 1, own)))

    assert errors[1] is own
    for other in (errors[0], errors[2]):
        assert type(other) is BadShape
        assert (other.table, other.version) == ("t", 7)
        assert str(other).startswith("rank 1: ")
        assert "rows are missing" in str(other)


def test_the_first_of_several_failures_is_heard_by_the_ranks_without_one() -> None:
    def share(rank: ThreadRank) -> Any:
        return together(
            rank, lambda: {0: lambda: 1, 1: _raise(TableNotFound("x")), 2: _raise(BadShape("y"))}[rank.rank]()
        )

    errors = on_all(thread_ranks(3), share)

    assert [type(error) for error in errors] == [TableNotFound, TableNotFound, BadShape]


def _raise(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


@pytest.mark.parametrize("error", [ZeroDivisionError("by 0"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_from_outside_the_library_is_a_failed_rank_elsewhere(error: BaseException) -> None:
    mine, other = on_all(thread_ranks(2), lambda rank: together(rank, failing(rank, 0, error)))

    assert mine is error
    assert type(other) is RankFailed
    assert type(error).__name__ in str(other)


def test_errors_of_every_kind_keep_it_on_the_other_ranks() -> None:
    kinds, todo = [], [CnrStoreError]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind.__module__ == "cnr_store.errors" and not issubclass(kind, RankLost):
            kinds.append(kind)
    ranks = thread_ranks(2)
    for kind in kinds:
        assert [type(e) for e in on_all(ranks, lambda r: together(r, failing(r, 0, kind("m"))))] == [kind, kind]  # noqa: B023


@pytest.mark.parametrize("answer", [object(), {"rows": np.int64(3)}, "\udcff"])
def test_an_answer_that_cannot_be_sent_fails_on_all_ranks(answer: Any) -> None:
    mine, other = on_all(thread_ranks(2, timeout_s=5), lambda rank: together(rank, lambda: answer if rank.rank else 1))[
        ::-1
    ]

    assert isinstance(mine, TypeError | ValueError)
    assert type(other) is RankFailed


def test_errors_with_details_that_json_lacks_reach_the_other_ranks() -> None:
    error = DoesNotApply("path /\udcff", table="\udcff", version=np.int64(3))  # type: ignore[arg-type]

    mine, other = on_all(thread_ranks(2, timeout_s=5), lambda rank: together(rank, failing(rank, 0, error)))

    assert mine is error
    assert (type(other), other.version) == (DoesNotApply, 3)


def test_a_rank_that_left_is_lost_to_all_and_its_line_stays_broken() -> None:
    def work(rank: ThreadRank) -> Any:
        if rank.rank == 2:
            rank.leave()
            return None
        return together(rank, lambda: rank.rank)

    ranks = thread_ranks(3)
    first = on_all(ranks, work)

    assert [type(error) for error in first[:2]] == [RankLost, RankLost]
    assert [type(error) for error in on_all(ranks, lambda rank: together(rank, lambda: 1))] == [RankLost] * 3


def test_a_rank_raises_its_own_error_even_if_no_other_rank_answers() -> None:
    ranks = thread_ranks(2)
    ranks[1].leave()

    with pytest.raises(BadShape):
        together(ranks[0], _raise(BadShape("mine")))


def test_a_slow_rank_is_lost_everywhere_itself_included() -> None:
    ranks, waited = thread_ranks(3, timeout_s=0.05), threading.Event()
    left: list[int] = []

    def work(rank: ThreadRank) -> Any:
        if rank.rank == 1:
            waited.wait(20)
        try:
            return together(rank, lambda: rank.rank)
        finally:
            left.append(rank.rank)
            if len(left) == 2:
                waited.set()

    assert [type(error) for error in on_all(ranks, work)] == [RankLost] * 3


def test_lines_are_independent_but_end_with_their_rank() -> None:
    ranks = thread_ranks(2)

    def crossed(rank: ThreadRank) -> Any:
        one, two = rank.another(), rank.another()
        lines = [one, two, rank] if rank.rank else [rank, two, one]
        heard: dict[int, Any] = {}

        def ask(line: ThreadRank) -> None:
            heard[[rank, one, two].index(line)] = together(line, lambda: [rank.rank, [rank, one, two].index(line)])

        threads = [threading.Thread(target=ask, args=(line,)) for line in lines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [heard[k] for k in range(3)], one

    (heard, line), (same, other) = on_all(ranks, crossed)

    assert heard == same == [[[0, k], [1, k]] for k in range(3)]
    ranks[1].leave()
    for dead in (ranks[0], line, other, ranks[0].another()):
        with pytest.raises(RankLost):
            together(dead, lambda: 1)


def test_many_rounds_keep_their_order() -> None:
    def work(rank: ThreadRank) -> Any:
        return [together(rank, lambda: [rank.rank, number]) for number in range(200)]  # noqa: B023

    assert on_all(thread_ranks(3), work) == [[[[k, number] for k in range(3)] for number in range(200)]] * 3
