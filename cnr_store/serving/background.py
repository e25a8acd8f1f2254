"""A thread that looks again and again on behalf of an object, and ends when that object does."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

Owner = TypeVar("Owner")


class Repeating:
    """Calls ``look(owner)`` on a thread of its own until it is stopped or the owner is gone.

    Parameters
    ----------
    owner
        Held weakly between two calls, so that the thread keeps nothing alive.
    look
        Returns how long to wait before the next call, in seconds; must not raise.
    """

    def __init__(self, owner: Owner, look: Callable[[Owner], float], *, name: str) -> None:
        self._stopped = stopped = threading.Event()
        reference = weakref.ref(owner, lambda _: stopped.set())
        self._thread = threading.Thread(target=_repeat, args=(reference, look, stopped), name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread is there and was not told to stop."""
        return self._thread.is_alive() and not self._stopped.is_set()

    def stop(self) -> None:
        """End the thread and wait for a call that runs, unless that is the caller. A second call is harmless."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _repeat(reference: weakref.ref[Owner], look: Callable[[Owner], float], stopped: threading.Event) -> None:
    pause = 0.0
    while not stopped.wait(pause):
        owner = reference()
        if owner is None:
            return
        pause = look(owner)
        del owner  # while it waits, nobody is kept
