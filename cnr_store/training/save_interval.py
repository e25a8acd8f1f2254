"""How often a training saves with ``every_steps="auto"``: as often as a share of its time allows.

`measured` and `choose_interval` decide and are pure. `IntervalControl` keeps what they need and reads no clock. Each
rank measures its own saves; with every save all ranks exchange this, and choose the same interval (CheckFreq, FAST'21).
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
"""Newest steps whose median counts, so that a pause for an evaluation does not."""
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
    cpu_s
        CPU seconds of the library's threads in the background.
    busy
        Share of the cores that was busy, 0 to 1: what the background computes on an idle core costs the training
        nothing.
    write_s
        Seconds from the end of the stall to the commit.
    stretch
        Seconds that a CPU second of the training takes, 1 or more: it waits where there are more threads than cores.
    """

    kind: Literal["baseline", "delta"]
    stall_s: float
    cpu_s: float
    busy: float
    write_s: float
    stretch: float = 1.0

    @property
    def lost_s(self) -> float:
        """Seconds by which the save delayed the training."""
        return self.stall_s + self.busy * self.stretch * self.cpu_s


@dataclass(frozen=True, slots=True)
class SaveMeasure:
    """What a save costs now, and a step takes: medians of the newest ones.

    Attributes
    ----------
    saves
        Number of saves that the medians are of.
    stall_s, cpu_s, busy, stretch
        As in `SaveCost`.
    baseline_s
        What a later baseline costs beyond a delta, divided by the saves from one baseline to the next.
    write_s
        Of the slowest of these saves.
    step_s
        Seconds of one training step.
    """

    saves: int
    stall_s: float
    cpu_s: float
    busy: float
    stretch: float
    baseline_s: float
    write_s: float
    step_s: float

    @property
    def lost_s(self) -> float:
        """Seconds by which a save delays the training."""
        return self.stall_s + self.busy * self.stretch * self.cpu_s + self.baseline_s


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
        What the interval follows from: the ``overhead``; ``writing``, because a save begins when the one before is
        over; ``step``, because both allow a save after every step; ``start`` until a save is measured.
    measure
        Of the rank whose saves cost most, with the slowest writing and the shortest step of all ranks.
    """

    every_steps: int
    overhead: float
    limit: Literal["overhead", "writing", "step", "start"] = "start"
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
            "step": "no limit is reached",
            "start": "",
        }[self.limit]
        baseline = f", and {found.baseline_s:.3g} s for baselines" if found.baseline_s else ""
        slow = f" that each take {found.stretch:.3g} s" if found.stretch > 1.05 else ""
        return (
            f"every {self.every_steps} steps ({reason}): a save costs {found.lost_s:.3g} s (a stall of "
            f"{found.stall_s:.3g} s, {found.cpu_s:.3g} s of CPU time{slow} with {found.busy:.0%} of the cores busy"
            f"{baseline}), {share:.2%} of the training, whose step takes {found.step_s:.3g} s; medians of "
            f"{found.saves} saves"
        )


def measured(costs: Sequence[SaveCost], steps_s: Sequence[float]) -> SaveMeasure | None:
    """Return what saves cost, given the committed ones and seconds of steps, oldest first; None if too few. Pure.

    Baselines before the first delta do not count, because no interval avoids them. Without any delta the policy writes
    baselines only, and all after the first count.
    """
    first = next((index for index, cost in enumerate(costs) if cost.kind == "delta"), None)
    counted = costs[1:] if first is None else costs[first:]
    newest = [cost for cost in counted if first is None or cost.kind == "delta"][-SAVES_IN_MEDIAN:]
    if not newest or not steps_s:
        return None
    found = SaveMeasure(
        saves=len(newest), stall_s=median(cost.stall_s for cost in newest), cpu_s=median(cost.cpu_s for cost in newest),
        busy=median(cost.busy for cost in newest), stretch=median(cost.stretch for cost in newest), baseline_s=0.0,
        write_s=max(cost.write_s for cost in newest),
        step_s=median(steps_s[-STEPS_IN_MEDIAN:]),
    )  # fmt: skip
    baselines = [-1, *(index for index, cost in enumerate(counted) if cost.kind == "baseline")]
    if first is None or len(baselines) == 1:
        return found
    apart = max(baselines[-1] - baselines[-2], len(counted) - baselines[-1])
    return replace(found, baseline_s=max(0.0, counted[baselines[-1]].lost_s - found.lost_s) / apart)


def choose_interval(overhead: float, measures: Sequence[SaveMeasure | None]) -> SaveInterval:
    """Return the shortest interval at which saves cost at most ``overhead`` and do not overlap. Pure.

    Parameters
    ----------
    measures
        Of all ranks; None where nothing is measured yet.

    Examples
    --------
    >>> save = SaveMeasure(
    ...     saves=5, stall_s=0.01, cpu_s=0.2, busy=0.5, stretch=1.0, baseline_s=0.0, write_s=0.4, step_s=0.1
    ... )
    >>> print(choose_interval(0.01, [save]))  # doctest: +NORMALIZE_WHITESPACE
    every 110 steps (more often would cost more than 1.00%): a save costs 0.11 s (a stall of 0.01 s, 0.2 s of CPU time
    with 50% of the cores busy), 1.00% of the training, whose step takes 0.1 s; medians of 5 saves
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
    every_steps = max(1, for_overhead, for_writing)
    if every_steps == 1:
        return SaveInterval(1, overhead, "step", found)
    return SaveInterval(every_steps, overhead, "overhead" if for_overhead >= for_writing else "writing", found)


class IntervalControl:
    """Keeps what the interval is chosen from. Call it from the thread that trains, with monotonic seconds.

    Attributes
    ----------
    interval
        The one that counts now; the same on all ranks.
    """

    def __init__(self, overhead: float) -> None:
        self.interval = choose_interval(overhead, [None])
        self._costs: deque[SaveCost] = deque(maxlen=2 * MAX_CHAIN)
        self._steps_s: deque[float] = deque(maxlen=STEPS_IN_MEDIAN)
        self._since: tuple[int, float] | None = None

    def trained(self, step: int, now_s: float) -> None:
        """Count the steps since the last call of this or of `resumes`."""
        if self._since is not None and step > self._since[0]:
            self._steps_s.append((now_s - self._since[1]) / (step - self._since[0]))
        self._since = step, now_s

    def resumes(self, step: int, now_s: float) -> None:
        """Take the time of the next step from here: a save has stalled the training, or a checkpoint was restored."""
        self._since = step, now_s

    def saved(self, cost: SaveCost) -> None:
        """Count a committed save."""
        self._costs.append(cost)

    @property
    def measure(self) -> SaveMeasure | None:
        """What this rank has measured."""
        return measured(list(self._costs), list(self._steps_s))

    def agree(self, measures: Sequence[SaveMeasure | None]) -> None:
        """Choose the interval from what all ranks have measured."""
        self.interval = choose_interval(self.interval.overhead, measures)
