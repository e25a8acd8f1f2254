"""Saves per hour that a share of throughput allows: laws of the pure function, and a small run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import bench_frequency
import harness
import numpy as np
import pytest
from drifting import DIM
from frequency import SavePoint, interval_to_measure, seconds_between
from hypothesis import given
from hypothesis import strategies as st
from models import equal_tables
from places import local_disk
from trained import TrainedTables

seconds = st.floats(1e-4, 100)
shares = st.floats(0.001, 0.5)
SMALL = equal_tables(2_000, DIM)


@st.composite
def growing_costs(draw: st.DrawFn) -> list[SavePoint]:
    """Costs that grow with the interval, up to those of all rows."""
    steps = sorted(draw(st.sets(st.integers(1, 1000), max_size=4)))
    lost, done = (sorted(draw(st.lists(seconds, min_size=len(steps) + 1, max_size=len(steps) + 1))) for _ in range(2))
    return [SavePoint(*point) for point in zip([*steps, math.inf], lost, done, strict=True)]


@given(growing_costs(), st.floats(1e-3, 1), shares)
def test_the_time_between_saves_pays_for_the_next_measured_cost(
    points: list[SavePoint], step_s: float, share: float
) -> None:
    found = seconds_between(points, step_s, share)

    paid = next(point for point in points if point.steps * step_s >= found * (1 - 1e-9))
    assert paid.lost_s <= share * found * (1 + 1e-9)
    assert paid.done_s <= found * (1 + 1e-9)
    assert found >= step_s


@given(growing_costs(), st.floats(1e-3, 1), shares, st.floats(1, 100))
def test_dearer_saves_come_no_more_often(points: list[SavePoint], step_s: float, share: float, factor: float) -> None:
    dearer = [replace(point, lost_s=factor * point.lost_s) for point in points]
    found = seconds_between(points, step_s, share)

    assert seconds_between(dearer, step_s, share) >= found
    assert seconds_between(points, step_s, min(0.5, factor * share)) <= found


@given(st.integers(1, 100), st.integers(2, 100), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_interval_to_measure_is_the_first_that_the_line_pays_for(
    shorter: int, beyond: int, dearer: float, growth: float, done: float
) -> None:
    longer = shorter + beyond
    first = 0.01 * (shorter + dearer * beyond)
    known = [
        SavePoint(shorter, first, done * longer),
        SavePoint(longer, first + growth * (0.01 * longer - first), done * longer),
    ]

    found = interval_to_measure([*known, SavePoint(math.inf, 1e3, 1e3)], 1.0, 0.01)

    lost = np.interp(np.arange(longer), [shorter, longer], [one.lost_s for one in known])

    def is_paid(steps: int, slack: float) -> bool:
        return max(float(lost[steps]) / 0.01, done * longer) <= steps * (1 + slack)

    if found is None:
        assert is_paid(shorter, 1e-9) or not any(is_paid(steps, -1e-9) for steps in range(shorter, longer))
        return
    assert is_paid(found, 1e-9)
    assert not any(is_paid(steps, -1e-9) for steps in range(shorter, found))
    points = [*known, SavePoint(math.inf, 1e3, 1e3)]
    after = seconds_between([*points, SavePoint(found, float(lost[found]), done * longer)], 1.0, 0.01)
    assert after <= min(found, seconds_between(points, 1.0, 0.01)) * (1 + 1e-9)


def test_costs_without_an_end_are_refused() -> None:
    with pytest.raises(ValueError, match="infinite"):
        seconds_between([SavePoint(1, 1.0, 1.0)], 0.1, 0.01)


def test_a_small_run_reports_saves_and_trainings(tmp_path: Path) -> None:
    report = harness.Report("frequency")
    size = bench_frequency.Size((1, 2), 1, 0.1)
    place = local_disk(tmp_path)
    training = TrainedTables(SMALL)

    rounds, steps = bench_frequency.measure_saves(place, training, size)
    bench_frequency.report_saves(report, "small", rounds, steps, training.state.size_bytes)

    assert {name: list(kept[0]) for name, kept in rounds.items()} == {
        "torch.save": [math.inf], "dcp.async_save, kept stager": [math.inf], "cnr_store": [1, 2, math.inf]
    }  # fmt: skip
    assert len([line for line in report.lines if line.unit == " saves/h"]) == 9
    assert all(line.value > 0 for line in report.lines if "stall" in line.name or line.unit == " saves/h")


def test_a_store_saves_in_its_block_as_often_as_it_is_asked_to(tmp_path: Path) -> None:
    report = harness.Report("frequency")

    bench_frequency.measure_training(report, "small", local_disk(tmp_path), lambda: TrainedTables(SMALL), 3, 1)

    (table,) = report.tables
    assert [row[0] for row in table.rows] == [
        "no manager", "never saves", "a save of every step",
        "every step, those that come while one is written in the next", 'every_steps="auto", 5%'
    ]  # fmt: skip
    assert [row[-1] for row in table.rows[:3]] == ["everything", "everything", "2 steps"]
    assert "every" in report.notes[-1]
