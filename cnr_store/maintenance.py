"""One run of what keeps a store fast and small: compact every log, then expire and delete, under a time budget.

What to do and how long each part may take is decided by pure functions; `maintain` carries it out. Every part is safe
beside writers, readers and another run of itself, and a run that was cut short is taken up by the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

StageKind = Literal["compact", "collect"]

WEIGHTS: dict[StageKind, int] = {"compact": 4, "collect": 1}
"""Shares of the time that is left. Without a share of its own a long compaction would starve the deletions for ever."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a run: ``compact`` one log, or ``collect`` the garbage of the whole store.

    ``branch`` is the log's branch; None is the store's own log, and all of them for ``collect``.
    """

    kind: StageKind
    branch: str | None = None


def plan_stages(branches: Sequence[str]) -> tuple[Stage, ...]:
    """Return the parts of a run, in order: the store's own log first, deletions last. Pure.

    >>> [(stage.kind, stage.branch) for stage in plan_stages(["trial"])]
    [('compact', None), ('compact', 'trial'), ('collect', None)]
    """
    compactions = (Stage("compact", branch) for branch in sorted(branches))
    return (Stage("compact"), *compactions, Stage("collect"))


def share_s(stages: Sequence[Stage], left_s: float | None) -> float | None:
    """Return the seconds that the first of the stages to come may take of those left; None is without end. Pure.

    What a stage does not use goes to those after it.

    >>> share_s(plan_stages([]), 100.0), share_s(plan_stages([])[1:], 90.0), share_s(plan_stages([]), None)
    (80.0, 90.0, None)
    """
    if left_s is None:
        return None
    weights = [WEIGHTS[stage.kind] for stage in stages]
    return max(0.0, left_s) * weights[0] / sum(weights)
