"""How many saves per hour a share of a training's throughput allows, given what measured saves cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class SavePoint:
    """What a save costs, so many steps after the one before.

    Attributes
    ----------
    steps
        Infinite where a longer interval costs no more: everything is saved.
    lost_s
        Seconds by which it delays the training.
    done_s
        Seconds until it is committed; the next one does not begin before.
    """

    steps: float
    lost_s: float
    done_s: float


def seconds_between(points: Sequence[SavePoint], step_s: float, share: float) -> float:
    """Return the shortest time between two saves at which they cost at most ``share`` of the training.

    Between two measured intervals a save counts as the longer one's, which is dearer, so the result is never too short.

    >>> import math
    >>> seconds_between([SavePoint(math.inf, lost_s=0.5, done_s=0.7)], step_s=0.1, share=0.01)
    50.0
    >>> seconds_between([SavePoint(1, 0.0005, 0.05), SavePoint(math.inf, 0.5, 0.7)], step_s=0.1, share=0.01)
    0.1
    """
    shorter = 0.0
    for point in sorted(points, key=lambda one: one.steps):
        least = max(point.lost_s / share / step_s, point.done_s / step_s, shorter, 1.0)
        if least <= point.steps:
            return least * step_s
        shorter = point.steps
    raise ValueError("the last point has no infinite interval, and no interval is long enough")


def interval_to_measure(points: Sequence[SavePoint], step_s: float, share: float) -> int | None:
    """Return the shortest interval between measured ones that should cost at most ``share``, by straight lines.

    None where the shortest that does is measured, or longer than all measured ones that end.

    >>> interval_to_measure([SavePoint(8, 0.009, 0.1), SavePoint(16, 0.013, 0.1)], step_s=0.1, share=0.01)
    10
    """
    ended = sorted((one for one in points if one.steps < math.inf), key=lambda one: one.steps)
    for shorter, longer in pairwise(ended):
        for steps in range(int(shorter.steps), int(longer.steps)):
            part = (steps - shorter.steps) / (longer.steps - shorter.steps)
            lost_s = shorter.lost_s + part * (longer.lost_s - shorter.lost_s)
            done_s = shorter.done_s + part * (longer.done_s - shorter.done_s)
            if max(lost_s / share, done_s) <= steps * step_s:
                return None if steps == shorter.steps else steps
    return None
