"""What a step decides: is a save due, do reader and optimizer let it begin, and must the training end.

The step itself and the reader's state after it are the `TrainingPosition`. A SIGTERM ends the training (`StopSignal`).
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

from cnr_store.errors import BadInput
from cnr_store.format.limits import MAX_INTEGER
from cnr_store.runtime.arguments import checked_count
from cnr_store.runtime.caller import warn_caller
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.training.options import DEFAULT_OVERHEAD, SavePolicy
from cnr_store.training.reader import IntervalReader, Stateful, reader_document
from cnr_store.training.save_interval import IntervalControl, SaveInterval
from cnr_store_gpu import RowTracker


@dataclass(slots=True, eq=False)
class TrainingPosition:
    """The step that was trained last, and the reader's state after it.

    Attributes
    ----------
    given_state
        The state that the caller gave with this step; None where the reader is asked.
    restored_state
        The state that was restored; a save before the next step commits it again.
    """

    reader: Stateful | None
    step: int = 0
    given_state: Any = None
    restored_state: Any = None

    def check_given(self, step: int | None, reader_state: Any) -> None:
        """Return if the next step is a number, and has a reader state if earlier steps had one.

        Raises
        ------
        BadInput
        """
        if step is not None:
            checked_count("step", step, most=MAX_INTEGER)
        if reader_state is None and self.reader is None and self.given_state is not None:
            raise BadInput(
                f"the step after {self.step} has no reader_state, but an earlier one had; give it at every step, or "
                "give the manager a reader: a checkpoint would name batches that it has not seen"
            )

    def advance(self, step: int | None, reader_state: Any) -> None:
        """Count a trained step."""
        self.step = self.step + 1 if step is None else step
        self.given_state, self.restored_state = reader_state, None

    def restored(self, step: int, reader_state: Any) -> None:
        """Continue where a checkpoint was saved."""
        self.step = step
        self.given_state, self.restored_state = None, reader_state

    def document(self) -> dict[str, Any] | None:
        """Return the reader's document for a save, or None."""
        given = self.restored_state if self.given_state is None else self.given_state
        return reader_document(self.reader, given)


_STEPS_UNTIL_WARNING = 8
"""Steps that a due save may wait before a warning; micro-batches that are counted one by one also make it wait."""


@dataclass(slots=True)
class SaveSchedule:
    """Decides whether a save is due. It reads no clock: the caller passes steps and seconds. Due until `mark`.

    Attributes
    ----------
    auto
        Chooses the steps between two saves; then ``every_steps`` and ``every_seconds`` are None.
    """

    every_steps: int | None
    every_seconds: float | None
    last_s: float
    auto: IntervalControl | None = None
    last_step: int = 0
    _is_due: bool = False

    @property
    def interval(self) -> SaveInterval | None:
        """What ``auto`` has chosen, if there is one."""
        return None if self.auto is None else self.auto.interval

    @property
    def is_never_due(self) -> bool:
        """Whether only the caller saves."""
        return self.every_steps is None and self.every_seconds is None and self.auto is None

    @property
    def has_rested(self) -> bool:
        """Whether a save may begin now because a step without one was measured, which only ``auto`` asks for."""
        return self.auto is None or self.auto.has_rested

    def trained(self, step: int, now_s: float, *, is_saving: bool) -> None:
        """Count a step, at a monotonic time in seconds; ``is_saving``: a save was under way meanwhile."""
        if self.auto is not None:
            self.auto.trained(step, now_s, is_saving=is_saving)

    def saved(self, kind: Literal["baseline", "delta"], *, stall_s: float, write_s: float) -> None:
        """Count a committed save: seconds that the training waited, and from then to the commit."""
        if self.auto is not None:
            self.auto.saved(kind, stall_s=stall_s, write_s=write_s)

    def is_due(self, step: int, now_s: float) -> bool:
        """Return whether a save is due at a step, at a monotonic time in seconds."""
        if step < self.last_step:  # the caller counts anew, as in each epoch
            self.last_step = step
        every_steps = self.every_steps if self.auto is None else self.auto.interval.every_steps
        if every_steps is not None and step - self.last_step >= every_steps:
            self._is_due = True
        if self.every_seconds is not None and now_s - self.last_s >= self.every_seconds:
            self._is_due = True
        return self._is_due

    def mark(self, step: int, now_s: float) -> None:
        """Count from here: a save has begun, or a checkpoint was restored."""
        self.last_step, self.last_s, self._is_due = step, now_s, False
        if self.auto is not None:
            self.auto.resumes(step, now_s)


def new_schedule(every_steps: int | Literal["auto"] | None, policy: SavePolicy, now_s: float) -> SaveSchedule:
    """Return when a manager saves, by its options.

    Raises
    ------
    BadInput
        ``every_steps`` is no number and not ``"auto"``, or does not go together with an option of the policy.
    """
    if every_steps == "auto":
        if policy.every_seconds is not None:
            raise BadInput(
                'every_steps="auto" and every_seconds= both choose when to save; leave one of them out',
                found=policy.every_seconds,
            )
        overhead = DEFAULT_OVERHEAD if policy.overhead is None else policy.overhead
        return SaveSchedule(None, None, now_s, IntervalControl(overhead))
    if policy.overhead is not None:
        raise BadInput(
            f'overhead= is for every_steps="auto"; found every_steps={every_steps!r}', found=every_steps
        )  # fmt: skip
    if isinstance(every_steps, str):
        raise BadInput(f'every_steps is a whole number or "auto"; found {every_steps!r}', found=every_steps)
    if every_steps is not None:
        checked_count("every_steps", every_steps, least=1)
    return SaveSchedule(every_steps, policy.every_seconds, now_s)


@dataclass(slots=True, eq=False)
class SaveBoundary:
    """Whether a save that is due can begin: between optimizer steps, and where the reader's state is exact."""

    ranks: Ranks
    tracker: RowTracker
    position: TrainingPosition
    intervals: IntervalReader | None
    _steps_off: int = field(default=0, init=False)
    _steps_overtaken: int = field(default=0, init=False)
    _warns_at: int = field(default=_STEPS_UNTIL_WARNING, init=False)

    def must_wait(self) -> bool:
        """Return whether the save must wait on some rank, and so on all. All ranks call it."""
        waits = any(together(self.ranks, self._waits_here))
        if waits and self.intervals is not None:
            self.intervals.prepare()  # a reader that is ready stays ready until the other ranks' are
        return waits

    def _waits_here(self) -> bool:
        """Whether a save must wait for reader or optimizer step; warns, ever less often, if that does not seem to come.

        Where the optimizer has stepped before each of several calls, and lookups wait all the same, it waits no longer:
        they were made after it, as by an evaluation with gradients, and would put every save off.
        """
        if self.intervals is not None and self.position.given_state is None and not self.intervals.is_ready:
            self.intervals.prepare()
            if not self.intervals.is_ready:
                return True
        if self.tracker.at_step_boundary:
            self._steps_off = self._steps_overtaken = 0
            return False
        self._steps_off += 1
        self._steps_overtaken = self._steps_overtaken + 1 if self.tracker.overtaken.are_all() else 0
        is_overtaken = self._steps_overtaken >= _STEPS_UNTIL_WARNING
        if self._steps_off >= self._warns_at:
            self._warns_at = _STEPS_UNTIL_WARNING * self._steps_off  # once is overlooked, and nothing is saved
            try:
                self.tracker.check_boundary()
            except BadInput as error:
                late = f"no checkpoint for {self._steps_off} steps although one is due"
                now = "; it is made now, and so are later ones: without a batch that still waits for its update"
                warn_caller(f"{late}{now if is_overtaken else ''}: {error}")
        if is_overtaken:
            self._steps_off = 0
            self.tracker.overtaken.settle()
        return not is_overtaken


EXIT_CODE = 128 + signal.SIGTERM
_STEPS_BETWEEN_SIGNALS = 16
"""How often the ranks exchange whether one has to stop; each exchange is a message of every rank to all others."""


class StopSignal:
    """Whether SIGTERM was received. Used by the training thread; the handler only sets the flag.

    Attributes
    ----------
    should_stop
        Whether SIGTERM has come.

    Raises
    ------
    BadInput
        ``is_caught`` outside the main thread, where Python takes no handlers.
    """

    def __init__(self, ranks: Ranks, *, is_caught: bool) -> None:
        self.should_stop = False
        self._ranks, self._is_caught = ranks, is_caught
        self._steps, self._is_agreed = 0, False
        self._previous: Any = None
        if is_caught:
            self._catch()

    def asks_at_step(self) -> bool:
        """Count a step; return whether the training is to end at it. All ranks get the same answer."""
        self._steps += 1
        if self._ranks.world == 1:
            return self.should_stop
        if self._is_caught and self._steps % _STEPS_BETWEEN_SIGNALS == 0:
            self._is_agreed = any(together(self._ranks, lambda: self.should_stop))
            self.should_stop = self.should_stop or self._is_agreed
        return self.should_stop and self._is_agreed

    def close(self) -> None:
        """Put the handler back that was there before."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _catch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise BadInput("save_on_sigterm works in the main thread only; set manager.should_stop yourself")
        process = os.getpid()

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            if os.getpid() == process:
                # Only a flag: the signal may come in the middle of an optimizer step.
                self.should_stop = True
                if callable(self._previous):
                    self._previous(number, frame)
                return
            # A forked child has no training to save. None: the handler before was not Python's, and cannot be put back.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
            signal.raise_signal(signal.SIGTERM)

        self._previous = signal.signal(signal.SIGTERM, on_sigterm)
