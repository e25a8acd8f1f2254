"""When a save is due, and whether it can begin at this step."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from cnr_store.errors import BadInput
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.training.position import TrainingPosition
from cnr_store.training.reader import IntervalReader
from cnr_store_gpu import RowTracker

_STEPS_UNTIL_WARNING = 8
"""Steps that a due save may wait before a warning; micro-batches that are counted one by one also make it wait."""


@dataclass(slots=True)
class SaveSchedule:
    """Decides whether a save is due. It reads no clock: the caller passes steps and seconds. Due until `mark`."""

    every_steps: int | None
    every_seconds: float | None
    last_s: float
    last_step: int = 0
    _is_due: bool = False

    def is_due(self, step: int, now_s: float) -> bool:
        """Return whether a save is due at a step, at a monotonic time in seconds."""
        if self.every_steps is not None and step - self.last_step >= self.every_steps:
            self._is_due = True
        if self.every_seconds is not None and now_s - self.last_s >= self.every_seconds:
            self._is_due = True
        return self._is_due

    def mark(self, step: int, now_s: float) -> None:
        """Count from here: a save has begun, or a checkpoint was restored."""
        self.last_step, self.last_s, self._is_due = step, now_s, False


@dataclass(slots=True, eq=False)
class SaveBoundary:
    """Whether a save that is due can begin: between optimizer steps, and where the reader's state is exact."""

    ranks: Ranks
    tracker: RowTracker
    position: TrainingPosition
    intervals: IntervalReader | None
    _steps_off: int = field(default=0, init=False)
    _has_warned: bool = field(default=False, init=False)

    def must_wait(self) -> bool:
        """Return whether the save must wait on some rank, and so on all. All ranks call it."""
        waits = any(together(self.ranks, self._waits_here))
        if waits and self.intervals is not None:
            self.intervals.prepare()  # a reader that is ready stays ready until the other ranks' are
        return waits

    def _waits_here(self) -> bool:
        """Whether a save must wait for reader or optimizer step; warns, once, if that step does not seem to come."""
        if self.intervals is not None and self.position.given_state is None and not self.intervals.is_ready:
            self.intervals.prepare()
            if not self.intervals.is_ready:
                return True
        if self.tracker.at_step_boundary:
            self._steps_off = 0
            return False
        self._steps_off += 1
        if self._steps_off >= _STEPS_UNTIL_WARNING and not self._has_warned:
            self._has_warned = True
            try:
                self.tracker.check_boundary()
            except BadInput as error:
                warnings.warn(
                    f"no checkpoint for {self._steps_off} steps although one is due: {error}",
                    RuntimeWarning, stacklevel=3,
                )  # fmt: skip
        return True
