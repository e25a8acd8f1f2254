"""How often a training saves with ``every_steps="auto"``: as often as a share of its time allows.

`slowdown`, `measured` and `choose_interval` decide and are pure. `IntervalControl` keeps what they need and reads no
clock. Each rank measures its own saves; with every save all ranks exchange this, and choose the same interval
(CheckFreq, FAST'21).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from cnr_store.types import MAX_CHAIN

FIRST_STEPS = 10
"""Steps before each save until a save after the first baseline is measured."""
SAVES_IN_MEDIAN = 5
"""Newest saves whose median counts: one that is unlike the others changes nothing, three in a row count fully."""
STEPS_IN_MEDIAN = 32
"""Newest steps without a save beside them whose median counts, so that a pause for an evaluation does not."""
MOST_OF_A_STEP = 10
"""How many usual steps one step beside a save counts as at most: a longer one was held up by something else."""
_LEAST_STEP_S = 1e-6


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What one committed save cost one rank.

    Attributes
    ----------
    kind
        ``baseline`` or ``delta``.
    stall_s
        Seconds for which the training waited.
    slowed_s
        Seconds by which the steps beside it took longer than others, whatever it took from them: cores, the
        interpreter, caches.
    write_s
        Seconds from the end of the stall to the commit.
    """

    kind: Literal["baseline", "delta"]
    stall_s: float
    slowed_s: float
    write_s: float

    @property
    def lost_s(self) -> float:
        """Seconds by which the save delayed the training."""
        return self.stall_s + self.slowed_s


@dataclass(frozen=True, slots=True)
class SaveMeasure:
    """What a save costs now, and a step takes: medians of the newest ones.

    Attributes
    ----------
    saves
        Number of saves that the medians are of.
    stall_s, slowed_s
        As in `SaveCost`.
    baseline_s
        What a later baseline costs beyond a delta, divided by the saves from one baseline to the next.
    write_s
        Of the slowest of these saves.
    step_s
        Seconds of one training step without a save beside it.
    """

    saves: int
    stall_s: float
    slowed_s: float
    baseline_s: float
    write_s: float
    step_s: float

    @property
    def lost_s(self) -> float:
        """Seconds by which a save delays the training."""
        return self.stall_s + self.slowed_s + self.baseline_s


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """How often a training saves, and why; ``str()`` says it in a line.

    Attributes
    ----------
    every_steps
        Steps from one save to the next.
    overhead
        Share of the training time that saves may cost.
    limit
        What the interval follows from: the ``overhead``; ``writing``, because a save begins one step after the one
        before is over; ``start`` until a save is measured.
    measure
        Of the rank whose saves cost most, with the slowest writing and the shortest step of all ranks.
    """

    every_steps: int
    overhead: float
    limit: Literal["overhead", "writing", "start"] = "start"
    measure: SaveMeasure | None = None

    @property
    def share(self) -> float | None:
        """Share of the training time that saves cost at this interval; None if that is not measured."""
        found = self.measure
        return None if found is None else found.lost_s / (self.every_steps * max(found.step_s, _LEAST_STEP_S))

    def __str__(self) -> str:
        found, share = self.measure, self.share
        if found is None or share is None:
            return f"every {self.every_steps} steps, until a save after the first baseline is measured"
        reason = {
            "overhead": f"more often would cost more than {self.overhead:.2%}",
            "writing": f"writing takes {found.write_s:.3g} s, and a save waits for the one before",
            "start": "",
        }[self.limit]
        baseline = f", and {found.baseline_s:.3g} s for baselines" if found.baseline_s else ""
        return (
            f"every {self.every_steps} steps ({reason}): a save costs {found.lost_s:.3g} s (a stall of "
            f"{found.stall_s:.3g} s, {found.slowed_s:.3g} s by which steps beside it take longer{baseline}), "
            f"{share:.2%} of the training, whose step takes {found.step_s:.3g} s; medians of "
            f"{found.saves} saves"
        )


def measured(costs: Sequence[SaveCost], steps_s: Sequence[float]) -> SaveMeasure | None:
    """Return what saves cost, given the committed ones and seconds of usual steps, oldest first; None if too few. Pure.

    Baselines before the first delta do not count, because no interval avoids them. Without any delta the policy writes
    baselines only, and all after the first count.
    """
    first = next((index for index, cost in enumerate(costs) if cost.kind == "delta"), None)
    counted = costs[1:] if first is None else costs[first:]
    newest = [cost for cost in counted if first is None or cost.kind == "delta"][-SAVES_IN_MEDIAN:]
    if not newest or not steps_s:
        return None
    found = SaveMeasure(
        saves=len(newest), stall_s=median(cost.stall_s for cost in newest),
        slowed_s=median(cost.slowed_s for cost in newest), baseline_s=0.0,
        write_s=max(cost.write_s for cost in newest), step_s=median(steps_s[-STEPS_IN_MEDIAN:]),
    )  # fmt: skip
    baselines = [-1, *(index for index, cost in enumerate(counted) if cost.kind == "baseline")]
    if first is None or len(baselines) == 1:
        return found
    apart = max(baselines[-1] - baselines[-2], len(counted) - baselines[-1])
    return replace(found, baseline_s=max(0.0, counted[baselines[-1]].lost_s - found.lost_s) / apart)


def choose_interval(overhead: float, measures: Sequence[SaveMeasure | None]) -> SaveInterval:
    """Return the shortest interval at which saves cost at most ``overhead`` and leave a step between them. Pure.

    In that step nothing is saved, so it tells how long a step takes.

    Parameters
    ----------
    measures
        Of all ranks; None where nothing is measured yet.

    Examples
    --------
    >>> save = SaveMeasure(
    ...     saves=5, stall_s=0.01, slowed_s=0.1, baseline_s=0.0, write_s=0.4, step_s=0.1
    ... )
    >>> print(choose_interval(0.01, [save]))  # doctest: +NORMALIZE_WHITESPACE
    every 110 steps (more often would cost more than 1.00%): a save costs 0.11 s (a stall of 0.01 s, 0.1 s by which
    steps beside it take longer), 1.00% of the training, whose step takes 0.1 s; medians of 5 saves
    """
    known = [one for one in measures if one is not None]
    if len(known) < len(measures):
        return SaveInterval(FIRST_STEPS, overhead)
    found = replace(
        max(known, key=lambda one: one.lost_s),
        write_s=max(one.write_s for one in known),
        step_s=min(one.step_s for one in known),
    )
    step_s = max(found.step_s, _LEAST_STEP_S)
    for_overhead, for_writing = (math.ceil(s / step_s) for s in (found.lost_s / overhead, found.write_s))
    every_steps = max(for_overhead, for_writing + 1)
    return SaveInterval(every_steps, overhead, "overhead" if for_overhead > for_writing else "writing", found)


def slowdown(beside: Sequence[tuple[int, float]], steps_s: Sequence[float]) -> float:
    """Return seconds by which the steps beside one save took longer than others; 0 where none others are known. Pure.

    Parameters
    ----------
    beside
        Numbers of steps, and the seconds of each of them.
    steps_s
        Seconds of steps without a save.

    Examples
    --------
    >>> round(slowdown([(1, 0.13), (2, 0.11)], [0.1, 0.1, 60.0]), 3)
    0.05
    """
    if not steps_s:
        return 0.0
    usual_s = median(steps_s)
    return max(0.0, sum(steps * (min(took_s, MOST_OF_A_STEP * usual_s) - usual_s) for steps, took_s in beside))


class IntervalControl:
    """Keeps what the interval is chosen from. Call it from the thread that trains, with monotonic seconds.

    Attributes
    ----------
    interval
        The one that counts now; the same on all ranks.
    has_rested
        Whether a step without a save was counted since the newest one. The next save waits for it: a training that
        saves all the time would else never measure that its steps became shorter.
    """

    def __init__(self, overhead: float) -> None:
        self.interval = choose_interval(overhead, [None])
        self._costs: deque[SaveCost] = deque(maxlen=2 * MAX_CHAIN)
        self._steps_s: deque[float] = deque(maxlen=STEPS_IN_MEDIAN)
        self._beside: list[tuple[int, float]] = []  # steps since the save began that is not over, and seconds of each
        self._since: tuple[int, float] | None = None
        self.has_rested = False

    def trained(self, step: int, now_s: float, *, is_saving: bool) -> None:
        """Count the steps since the last call of this or of `resumes`; ``is_saving``: a save was under way meanwhile.

        Call it before what became of that save is collected.
        """
        if self._since is not None and (steps := step - self._since[0]) > 0:
            took_s = (now_s - self._since[1]) / steps
            if is_saving:
                self._beside.append((steps, took_s))
            else:
                self._steps_s.append(took_s)
                self.has_rested = True
                self._beside.clear()  # of a save that was not committed
        self._since = step, now_s

    def resumes(self, step: int, now_s: float) -> None:
        """Take the time of the next step from here: a save has stalled the training, or a checkpoint was restored."""
        self._since, self.has_rested = (step, now_s), False

    def saved(self, kind: Literal["baseline", "delta"], *, stall_s: float, write_s: float) -> None:
        """Count a committed save."""
        slowed_s = slowdown(self._beside, self._steps_s)
        self._beside.clear()
        self._costs.append(SaveCost(kind, stall_s, slowed_s, write_s))

    @property
    def measure(self) -> SaveMeasure | None:
        """What this rank has measured."""
        return measured(list(self._costs), list(self._steps_s))

    def agree(self, measures: Sequence[SaveMeasure | None]) -> None:
        """Choose the interval from what all ranks have measured."""
        self.interval = choose_interval(self.interval.overhead, measures)
