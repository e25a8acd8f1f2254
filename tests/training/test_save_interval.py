"""How often ``every_steps="auto"`` saves: laws of the pure function, and trainings that it decides for."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cnr_store import BadInput, Store, TableOptions
from cnr_store.runtime.threads import Workers, background_cpu_s
from cnr_store.storage import storage_from_filesystem
from cnr_store.training import CheckpointManager, SaveInterval, SavePolicy, StoreOptions
from cnr_store.training.save_interval import (
    FIRST_STEPS,
    SAVES_IN_MEDIAN,
    STEPS_IN_MEDIAN,
    IntervalControl,
    SaveCost,
    SaveMeasure,
    choose_interval,
    measured,
    slowdown,
)
from cnr_store.training.schedule import SaveSchedule, new_schedule
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.ranks import ThreadRank, on_ranks
from tests.training.faulty_runs import Backend, begun
from tests.training.runs import go_on

seconds = st.floats(1e-4, 100)
shares = st.floats(0.001, 0.5)
costs = st.builds(SaveCost, kind=st.just("delta"), stall_s=seconds, slowed_s=seconds, write_s=seconds)
measures = st.builds(
    SaveMeasure, saves=st.integers(1, SAVES_IN_MEDIAN), stall_s=seconds, slowed_s=seconds,
    baseline_s=st.floats(0, 100), write_s=seconds, step_s=st.floats(1e-3, 10),
)  # fmt: skip


COSTS = ("stall_s", "slowed_s", "write_s")


def delta(lost_s: float, write_s: float = 0.0) -> SaveCost:
    """A save that costs its stall alone."""
    return SaveCost("delta", lost_s, 0.0, write_s)


def baseline(lost_s: float) -> SaveCost:
    return replace(delta(lost_s), kind="baseline")


def steps_after(found: Sequence[SaveCost], overhead: float = 0.01, step_s: float = 0.1) -> int:
    return choose_interval(overhead, [measured(found, [step_s])]).every_steps


# ---- the interval, given measurements


@given(shares, st.lists(measures, min_size=1, max_size=4))
def test_saves_cost_at_most_their_share_and_do_not_overlap(overhead: float, ranks: list[SaveMeasure]) -> None:
    found = choose_interval(overhead, ranks)

    assert found.every_steps >= 1
    for one in ranks:
        assert one.lost_s <= overhead * found.every_steps * one.step_s * (1 + 1e-9)
        assert one.write_s <= (found.every_steps - 1) * one.step_s * (1 + 1e-9), "no step without a save"


@given(shares, measures)
def test_one_step_less_would_cost_more_or_overlap(overhead: float, measure: SaveMeasure) -> None:
    found = choose_interval(overhead, [measure])
    shorter_s = (found.every_steps - 1) * measure.step_s * (1 - 1e-9)

    if found.limit == "writing":
        assert shorter_s - measure.step_s < measure.write_s
    else:
        assert found.limit == "overhead"
        assert overhead * shorter_s < measure.lost_s


@given(shares, measures, st.floats(1, 100), st.sampled_from([*COSTS, "baseline_s"]))
def test_dearer_saves_never_come_more_often(overhead: float, cheap: SaveMeasure, factor: float, what: str) -> None:
    dear = replace(cheap, **{what: getattr(cheap, what) * factor})

    assert choose_interval(overhead, [dear]).every_steps >= choose_interval(overhead, [cheap]).every_steps
    for ranks in ([cheap, dear], [dear, cheap]):
        assert choose_interval(overhead, ranks).every_steps == choose_interval(overhead, [dear]).every_steps


@given(shares, measures, st.floats(1, 100))
def test_a_larger_share_or_longer_steps_never_save_less_often(
    overhead: float, measure: SaveMeasure, factor: float
) -> None:
    found = choose_interval(overhead, [measure]).every_steps

    assert choose_interval(min(0.5, overhead * factor), [measure]).every_steps <= found
    assert choose_interval(overhead, [replace(measure, step_s=measure.step_s * factor)]).every_steps <= found


@given(st.lists(costs, min_size=1, max_size=20), shares)
def test_the_interval_is_that_of_one_save_between_the_extremes(found: list[SaveCost], overhead: float) -> None:
    least, most = (SaveCost("delta", *(f(getattr(one, what) for one in found) for what in COSTS)) for f in (min, max))

    chosen = steps_after(found, overhead)

    assert steps_after([least], overhead) <= chosen <= steps_after([most], overhead)


@given(st.lists(costs, max_size=20), costs, shares)
def test_three_equal_saves_settle_the_costs_and_five_the_writing(
    before: list[SaveCost], now: SaveCost, overhead: float
) -> None:
    three = measured([*before, *[now] * 3], [0.1])
    five = measured([*before, *[now] * SAVES_IN_MEDIAN], [0.1])

    assert three is not None
    assert (three.stall_s, three.slowed_s) == (now.stall_s, now.slowed_s)
    assert five is not None
    assert choose_interval(overhead, [five]).every_steps == steps_after([now], overhead)


@given(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=40), st.floats(0.01, 10), shares)
def test_intervals_swing_no_further_than_the_costs(noise: list[float], lost_s: float, overhead: float) -> None:
    saves = [delta(lost_s * factor) for factor in noise]

    chosen = [steps_after(saves[: index + 1], overhead) for index in range(len(saves))]

    asked = lost_s / overhead / 0.1
    assert all(0.9 * asked * (1 - 1e-9) <= steps <= 1.1 * asked * (1 + 1e-9) + 1 for steps in chosen)


@given(st.floats(1e-3, 0.1), st.floats(1e-6, 1e-2), st.floats(0.1, 0.9))
def test_where_longer_intervals_cost_more_they_settle_without_swinging(
    fixed_s: float, per_step_s: float, power: float
) -> None:
    """A longer interval touches more rows, the fewer new ones the longer: the costs of a real delta."""
    saves: list[SaveCost] = []
    chosen = [FIRST_STEPS]
    for _ in range(200):
        saves.append(delta(fixed_s + per_step_s * chosen[-1] ** power))
        chosen.append(steps_after(saves, 0.05))

    rises = [after >= before for before, after in pairwise(chosen)]
    assert all(rises) or not any(after > before for before, after in pairwise(chosen))
    last = chosen[-1]
    assert abs(steps_after([delta(fixed_s + per_step_s * last**power)], 0.05) - last) <= 1 + 0.01 * last


def test_an_outlier_among_the_saves_changes_nothing() -> None:
    usual = [delta(0.1)] * 4
    assert steps_after([*usual, delta(1000.0)]) == steps_after(usual)


def test_a_pause_of_the_training_is_no_long_step() -> None:
    found = measured([delta(0.1)], [0.1] * 20 + [600.0])
    assert found is not None
    assert found.step_s == 0.1
    older = measured([delta(0.1)], [600.0] * 100 + [0.1] * STEPS_IN_MEDIAN)
    assert older is not None
    assert older.step_s == 0.1


# ---- baselines


def test_the_first_baseline_does_not_count() -> None:
    assert measured([baseline(60.0)], [0.1]) is None
    assert steps_after([baseline(60.0), baseline(60.0), delta(0.1)]) == steps_after([delta(0.1)])


@given(st.integers(1, 60), st.integers(0, 10), st.floats(0.2, 100))
def test_a_later_baseline_is_spread_over_the_saves_between_two(before: int, after: int, lost_s: float) -> None:
    found = measured([delta(0.1)] * before + [baseline(lost_s)] + [delta(0.1)] * after, [0.1])

    assert found is not None
    assert found.baseline_s == pytest.approx((lost_s - 0.1) / max(before + 1, after + 1))


def test_a_policy_of_baselines_only_goes_by_baselines() -> None:
    assert steps_after([baseline(60.0), baseline(2.0), baseline(2.0)]) == steps_after([delta(2.0)])


# ---- what is said of it


def test_nothing_measured_on_a_rank_means_the_first_interval() -> None:
    known = measured([delta(0.1)], [0.1])
    found = choose_interval(0.02, [known, None])

    assert found == SaveInterval(FIRST_STEPS, 0.02)
    assert str(found) == "every 10 steps, until a save after the first baseline is measured"
    assert found.share is None


@pytest.mark.parametrize(
    ("cost", "limit", "said"),
    [
        (SaveCost("delta", 0.01, 0.1, 0.4), "overhead", "more often would cost more than 1.00%"),
        (SaveCost("delta", 0.001, 0.0, 4.0), "writing", "writing takes 4 s"),
    ],
)
def test_the_interval_says_what_it_follows_from(cost: SaveCost, limit: str, said: str) -> None:
    found = choose_interval(0.01, [measured([cost], [0.1])])

    assert found.limit == limit
    assert said in str(found)
    assert f"every {found.every_steps} steps" in str(found)
    assert found.share == pytest.approx(cost.lost_s / (0.1 * found.every_steps))


# ---- the schedule


def test_stalls_are_no_part_of_a_step_and_skipped_steps_share_the_time() -> None:
    control = IntervalControl(0.01)
    schedule = SaveSchedule(None, None, 0.0, control)
    control.saved("delta", stall_s=1.0, write_s=0.0)
    for step, now_s in ((1, 10.0), (2, 11.0), (4, 13.0)):
        schedule.trained(step, now_s, is_saving=False)
    schedule.mark(4, 63.0)
    schedule.trained(5, 64.0, is_saving=False)

    assert control.measure is not None
    assert control.measure.step_s == 1.0


def test_a_save_costs_what_the_steps_beside_it_take_longer() -> None:
    control = IntervalControl(0.01)
    now_s = 0.0
    for step, (took_s, is_saving) in enumerate(
        [(9.9, False), *[(1.0, False)] * 3, (1.5, True), (1.25, True), (1.0, False), (2.0, True)]
    ):
        now_s += took_s
        control.trained(step, now_s, is_saving=is_saving)
        if step == 5:
            control.saved("delta", stall_s=0.5, write_s=2.5)

    assert control.measure == SaveMeasure(1, stall_s=0.5, slowed_s=0.75, baseline_s=0.0, write_s=2.5, step_s=1.0)
    assert control.measure.lost_s == 1.25


def test_steps_beside_a_save_that_was_lost_count_for_no_other() -> None:
    control = IntervalControl(0.01)
    for step, now_s, is_saving in ((1, 1.0, False), (2, 2.0, False), (3, 5.0, True), (4, 6.0, False), (5, 7.0, True)):
        control.trained(step, now_s, is_saving=is_saving)
    control.saved("delta", stall_s=0.0, write_s=1.0)

    assert control.measure is not None
    assert control.measure.slowed_s == 0


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0.01, 100)), max_size=6), st.floats(0.01, 10))
def test_a_save_never_speeds_a_training_up_and_a_pause_counts_as_ten_steps(
    beside: list[tuple[int, float]], usual_s: float
) -> None:
    found = slowdown(beside, [usual_s] * 3)

    assert 0 <= found <= 9.001 * usual_s * sum(steps for steps, _ in beside)
    assert slowdown(beside, []) == 0


def test_an_automatic_save_is_due_after_the_steps_that_were_agreed() -> None:
    control = IntervalControl(0.5)
    schedule = SaveSchedule(None, None, 0.0, control)

    assert [schedule.is_due(step, 0.1 * step) for step in (9, 10)] == [False, True]
    schedule.mark(10, 1.0)
    control.agree([measured([delta(0.15)], [0.1])])
    assert control.interval.every_steps == 3, control.interval
    assert [schedule.is_due(step, 0.1 * step) for step in (12, 13)] == [False, True]


# ---- the readings


def test_cpu_time_of_the_librarys_threads_is_seen_by_others() -> None:
    """Work on the calling thread does not count, that of a pool does."""
    before = background_cpu_s()
    sum(range(3_000_000))
    idle = background_cpu_s() - before
    with Workers(2) as workers:
        spent = sum(workers.run([_busy] * 4))
        after = background_cpu_s()

    assert idle < spent / 10
    assert after - before == pytest.approx(spent, rel=0.2)


def _busy() -> float:
    started = time.thread_time()
    while time.thread_time() - started < 0.05:
        pass
    return time.thread_time() - started


# ---- trainings


def test_a_training_on_a_slow_disk_never_waits_for_a_save(backend: Backend) -> None:
    """The first save is held up: steps go on, the next save is due and comes when it is over."""
    _, training, manager = begun(backend, every_steps="auto", overhead=0.5, rng=False)
    assert manager.rate.interval == SaveInterval(FIRST_STEPS, 0.5)
    go_on(training, manager, 0, FIRST_STEPS)  # stalls for the first baseline
    backend.gate.clear()
    go_on(training, manager, FIRST_STEPS, 2 * FIRST_STEPS)
    assert backend.is_held.wait(60)
    go_on(training, manager, 2 * FIRST_STEPS, 4 * FIRST_STEPS + 5)

    assert [report.step for report in manager.history] == [FIRST_STEPS]
    backend.gate.set()
    manager.wait_until_finished()
    go_on(training, manager, 4 * FIRST_STEPS + 5, 4 * FIRST_STEPS + 6)
    manager.wait_until_finished()

    assert [report.step for report in manager.history] == [10, 20, 46]
    assert [report.wait_s for report in manager.history] == pytest.approx([0.0] * 3, abs=1e-2)
    assert [report.kind for report in manager.history] == ["baseline", "delta", "delta"]
    manager.close()


def test_a_step_without_a_save_is_between_two_saves(backend: Backend) -> None:
    """Regression: a save that was due before the last one was over began at the step that found it over."""
    _, training, manager = begun(backend, every_steps="auto", overhead=0.5, rng=False)
    go_on(training, manager, 0, FIRST_STEPS)  # stalls for the first baseline
    backend.gate.clear()
    go_on(training, manager, FIRST_STEPS, 3 * FIRST_STEPS)
    assert backend.is_held.wait(60)
    backend.gate.set()
    while manager.is_saving:
        time.sleep(0.001)
    go_on(training, manager, 3 * FIRST_STEPS, 3 * FIRST_STEPS + 2)
    manager.wait_until_finished()

    assert [report.step for report in manager.history] == [10, 20, 32]
    manager.close()  # threads that end during another test lower its CPU seconds


def test_shorter_steps_are_measured_although_saves_are_always_due() -> None:
    """Regression: after slow first steps, as of a compiler, a training saved all the time and never slower."""
    schedule = new_schedule("auto", SavePolicy(overhead=0.01), 0.0)
    auto = schedule.auto
    assert auto is not None
    now_s, over_s, saves = 0.0, 0.0, 0
    for step in range(1, 20_001):
        now_s += 1.0 if step <= FIRST_STEPS else 0.01
        schedule.trained(step, now_s, is_saving=over_s > 0)
        if 0 < over_s <= now_s:
            schedule.saved("delta" if saves > 1 else "baseline", stall_s=0.01, write_s=0.5)
            over_s = 0.0
        if schedule.is_due(step, now_s) and not over_s and schedule.has_rested:
            now_s, saves = now_s + 0.01, saves + 1
            over_s = now_s + 0.5
            auto.agree([auto.measure])
            schedule.mark(step, now_s)

    assert auto.interval.every_steps in (100, 101)  # the step is not quite 0.01 s
    assert saves * 0.01 < 0.015 * now_s


def test_a_training_says_what_it_measured_and_chose(backend: Backend) -> None:
    _, training, manager = begun(backend, every_steps="auto", rng=False)
    go_on(training, manager, 0, FIRST_STEPS)
    while len(manager.history) < 5:
        go_on(training, manager, 0, 5)

    found = manager.rate.interval
    deltas = manager.history[1:]
    assert found is not None
    assert found.measure is not None
    counted = [report.stall_s for report in deltas[: found.measure.saves]]
    assert found.measure.stall_s >= median(counted)
    assert found.measure.slowed_s >= 0
    assert found.measure.write_s == max(report.encode_s + report.commit_s for report in deltas[: found.measure.saves])
    assert all(report.cpu_s > 0 for report in deltas)
    assert found == choose_interval(0.01, [found.measure])
    apart = manager.history[-1].step - manager.history[-2].step
    assert apart > 1


def test_all_ranks_choose_the_interval_of_the_rank_that_loses_most() -> None:
    files = IsolatedMemoryFileSystem()
    Store.create_on(storage_from_filesystem(files, "/root"), threads=1).close()
    in_step = Barrier(2)

    def train(rank: ThreadRank) -> tuple[int, list[SaveInterval]]:
        table = nn.Embedding(40, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        with (
            Store.open_on(storage_from_filesystem(files, "/root"), threads=1) as store,
            CheckpointManager(
                store, model=table, optimizer=optimizer, options=TableOptions(scale=1.0), every_steps="auto",
                save_policy=SavePolicy(rng=False, overhead=0.5, git=False), store_options=StoreOptions(ranks=rank),
            ) as manager,
        ):  # fmt: skip
            manager.restore()
            intervals = []
            while len(intervals) < 3:
                optimizer.zero_grad()
                table(torch.tensor([manager.current_step % 40])).sum().backward()
                optimizer.step()
                if rank.rank == 1:
                    time.sleep(0.001)
                in_step.wait(60)  # as ranks that send each other gradients
                manager.step()
                interval = manager.rate.interval
                assert interval is not None
                if interval.measure is not None and interval not in intervals:
                    intervals.append(interval)
            return manager.current_step, intervals

    one, other = on_ranks(2, train)

    assert one == other


# ---- refusals


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"every_steps": "often"}, "whole number or \"auto\"; found 'often'"),
        ({"every_steps": "auto", "every_seconds": 60.0}, "both choose when to save"),
        ({"every_steps": 10, "overhead": 0.01}, 'overhead= is for every_steps="auto"; found every_steps=10'),
        ({"overhead": 0.01}, 'overhead= is for every_steps="auto"'),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    backend: Backend, given_options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        begun(backend, **given_options)


@pytest.mark.parametrize("share", [0, -0.01, 0.6, 1, math.nan, "1%", True])
def test_shares_that_are_none_are_refused(share: Any) -> None:
    with pytest.raises(BadInput, match="overhead"):
        SavePolicy(overhead=share)
