"""What paired runs say: losses with their uncertainty, the fewest bytes that keep the quality, bytes at equal quality.

Pure. A loss is relative, positive when the restored run is worse than the uninterrupted one of the same seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from restored_runs import Outcome, Quality, Setting

BUDGET = 1e-4
"""The paper's budget: 0.01 % of the quality (Check-N-Run, section 1)."""

FLOOR_MARGIN = 1.5
"""Divergences within this factor of the least one are taken for equal to it: seeds differ by about as much."""

# Student's t at 97.5 % for 1 to 15 degrees of freedom; beyond, the normal one is within 8 %.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
)  # fmt: skip

When = Literal["trained", "served"]
Rule = Literal["budget", "spread", "either"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and half the width of its 95 % interval (Student's t); 0 for one seed."""

    mean: float
    half_width: float

    @property
    def percent(self) -> str:
        """The estimate in percent, as a cell."""
        return f"{100 * self.mean:+.4f} ± {100 * self.half_width:.4f}"


@dataclass(frozen=True, slots=True)
class Point:
    """One setting at one number of restores, over all seeds.

    Attributes
    ----------
    setting, restores
        What was run.
    row_bytes, slot_bytes, other_bytes, baseline_bytes, rows
        As in `Outcome`, mean over seeds.
    auc, logloss, true_logloss
        Relative losses of the model asked for (``trained`` or ``served``); the last is NaN without a truth.
    moved
        Mean divergence of predictions, in nats.
    seeds
        How many.
    """

    setting: Setting
    restores: int
    row_bytes: float
    slot_bytes: float
    other_bytes: float
    baseline_bytes: float
    rows: float
    auc: Estimate
    logloss: Estimate
    true_logloss: Estimate
    moved: float
    seeds: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest loss of AUC and of logloss, relative."""

    auc: float
    logloss: float


@dataclass(frozen=True, slots=True)
class Noise:
    """The uninterrupted runs: mean, and standard deviation over seeds relative to it."""

    auc: float
    logloss: float
    true_logloss: float
    auc_spread: float
    logloss_spread: float

    def limits(self, rule: Rule) -> Limits:
        """Return what a loss may be: the budget, the spread of the seeds, or whichever is larger."""
        if rule == "budget":
            return Limits(BUDGET, BUDGET)
        if rule == "spread":
            return Limits(self.auc_spread, self.logloss_spread)
        return Limits(max(BUDGET, self.auc_spread), max(BUDGET, self.logloss_spread))


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value and its uncertainty; nan and no uncertainty where one is unknown."""
    mean = statistics.fmean(values)
    if len(values) < 2 or math.isnan(mean):  # statistics.stdev takes no nan
        return Estimate(mean, 0.0)
    freedom = len(values) - 1
    t = _T[freedom - 1] if freedom <= len(_T) else 1.96
    return Estimate(mean, t * statistics.stdev(values) / math.sqrt(len(values)))


def noise_of(uninterrupted: Mapping[int, Outcome]) -> Noise:
    """Return what the runs that nobody restored, by seed, say of the training itself."""
    auc = [outcome.trained.auc for outcome in uninterrupted.values()]
    logloss = [outcome.trained.logloss for outcome in uninterrupted.values()]
    true = statistics.fmean(outcome.trained.true_logloss for outcome in uninterrupted.values())
    return Noise(statistics.fmean(auc), statistics.fmean(logloss), true, _spread(auc), _spread(logloss))


def point_of(
    setting: Setting, restores: int, runs: Mapping[int, Outcome], reference: Mapping[int, Outcome], when: When
) -> Point:
    """Return a point from the runs of a setting by seed, each against the reference of the same seed."""
    pairs = [(_quality(reference[seed], when), _quality(run, when)) for seed, run in runs.items()]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(run, name) for run in runs.values())

    return Point(
        setting, restores, mean("row_bytes"), mean("slot_bytes"), mean("other_bytes"), mean("baseline_bytes"),
        mean("rows"),
        auc=estimate([(before.auc - after.auc) / before.auc for before, after in pairs]),
        logloss=estimate([(after.logloss - before.logloss) / before.logloss for before, after in pairs]),
        true_logloss=estimate(
            [(after.true_logloss - before.true_logloss) / before.true_logloss for before, after in pairs]
        ),
        moved=statistics.fmean(after.moved for _, after in pairs),
        seeds=len(pairs),
    )  # fmt: skip


def holds(point: Point, limits: Limits) -> bool:
    """Whether both mean losses stay within the limits."""
    return point.auc.mean <= limits.auc and point.logloss.mean <= limits.logloss


def fails(point: Point, limits: Limits) -> bool:
    """Whether a loss is beyond its limit with its whole 95 % interval."""
    return (
        point.auc.mean - point.auc.half_width > limits.auc
        or point.logloss.mean - point.logloss.half_width > limits.logloss
    )


def smallest(points: Sequence[Point], limits: Limits) -> Point | None:
    """Return the point with the fewest bytes that holds while no point of more bytes fails; None without one.

    A coarse point that holds while a finer one fails is luck: training is chaotic, and a loss of either sign comes of
    any change. That is also why a finer one need only not fail: the mean of a few seeds strays by more than the budget
    however fine the codes. Points of one family.
    """
    found = None
    for point in sorted(points, key=lambda one: -one.row_bytes):
        if fails(point, limits):
            break
        if holds(point, limits):
            found = point
    return found


def bytes_at(points: Sequence[Point], moved: float) -> float | None:
    """Return the row bytes from which on a family moves predictions at most so far; None if it never or always does.

    Between two points in logarithms. As in `smallest`, a point counts as what the worst of it and all finer ones is.
    """
    ordered = sorted((point for point in points if point.moved > 0.0), key=lambda one: -one.row_bytes)
    worst = np.maximum.accumulate([one.moved for one in ordered]) if ordered else np.empty(0)
    beyond = np.flatnonzero(worst > moved)
    if not len(beyond) or beyond[0] == 0:
        return None
    finer, coarser = int(beyond[0]) - 1, int(beyond[0])
    share = math.log(moved / worst[finer]) / math.log(worst[coarser] / worst[finer])
    sizes = math.log(ordered[finer].row_bytes), math.log(ordered[coarser].row_bytes)
    return math.exp(sizes[0] + share * (sizes[1] - sizes[0]))


def floor_of(points: Sequence[Point]) -> float:
    """Return how far predictions move at the least where they move: what the training makes of any change.

    Training amplifies whatever a restore changes, however little, so finer codes do not bring it to zero.
    """
    return FLOOR_MARGIN * min((point.moved for point in points if point.moved > 0.0), default=0.0)


def _quality(outcome: Outcome, when: When) -> Quality:
    return outcome.trained if when == "trained" else outcome.served


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0
