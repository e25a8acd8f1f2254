"""Who is killed when: decided from a seed before anything runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FIRST, LAST = 0.05, 0.85
"""Kills fall into this part of the run: what is killed at its very end would show nothing of its next life."""


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """Kill process ``name`` so many seconds after all were ready."""

    at_s: float
    name: str


def plan_kills(names: Sequence[str], *, kills: int, seconds: float, seed: int) -> tuple[PlannedKill, ...]:
    """Return the kills in order of time: at random times, and of each process as often as of any other, give or take 1.

    >>> plan = plan_kills(["a", "b"], kills=4, seconds=10.0, seed=7)
    >>> sorted(kill.name for kill in plan), all(0 < kill.at_s < 10 for kill in plan)
    (['a', 'a', 'b', 'b'], True)
    """
    random = np.random.default_rng(seed)
    times = np.sort(random.uniform(FIRST * seconds, LAST * seconds, kills))
    order: list[str] = []
    while len(order) < kills:
        order += [names[index] for index in random.permutation(len(names))]
    return tuple(PlannedKill(float(at_s), name) for at_s, name in zip(times, order[:kills], strict=True))
