"""SIGTERM: the flag that it sets, and the step at which all ranks act on it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from cnr_store.errors import BadInput
from cnr_store.runtime.ranks import Ranks, together

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
