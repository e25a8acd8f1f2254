"""A thread that looks again and again on behalf of an object, and how long it waits where that fails."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

LONGEST_BACKOFF_S = 10.0
"""What fails is tried again this often at the least."""

Owner = TypeVar("Owner")


class Repeating:
    """Calls ``look(owner)`` on a thread of its own until it is stopped or the owner is gone.

    Parameters
    ----------
    owner
        Held weakly between two calls, so that the thread keeps nothing alive.
    look
        Returns how long to wait before the next call, in seconds, or None to end; must not raise.
    """

    def __init__(self, owner: Owner, look: Callable[[Owner], float | None], *, name: str) -> None:
        self._is_stopped = False
        self._woken = woken = threading.Event()
        reference = weakref.ref(owner, lambda _: woken.set())
        self._thread = threading.Thread(target=self._repeat, args=(reference, look), name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread is there and was not told to stop."""
        return self._thread.is_alive() and not self._is_stopped

    def wake(self) -> None:
        """Have it look at once, and again if it is looking."""
        self._woken.set()

    def stop(self, timeout_s: float | None = None) -> None:
        """End the thread and wait for a call that runs, unless that is the caller. A second call is harmless."""
        self._is_stopped = True
        self._woken.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _repeat(self, reference: weakref.ref[Owner], look: Callable[[Owner], float | None]) -> None:
        pause: float | None = 0.0
        while pause is not None:
            self._woken.wait(pause)
            self._woken.clear()
            owner = reference()
            if owner is None or self._is_stopped:
                return
            pause = look(owner)
            del owner  # while it waits, nobody is kept


def pause_s(interval_s: float, failures: int, chance: float) -> float:
    """Return how long to wait before the next look, in seconds.

    Parameters
    ----------
    interval_s
        The time between two looks where nothing fails.
    failures
        Looks in a row that failed: the time doubles with each, up to `LONGEST_BACKOFF_S` or the interval.
    chance
        A random number in [0, 1): the pause is 75 to 100 % of the time without failures, 50 to 100 % with them, so that
        many do not ask at once.
    """
    if failures == 0:
        return interval_s * (0.75 + 0.25 * chance)
    longest = max(interval_s, LONGEST_BACKOFF_S)
    return min(longest, max(interval_s, 0.05) * 2.0 ** min(failures, 20)) * (0.5 + 0.5 * chance)
