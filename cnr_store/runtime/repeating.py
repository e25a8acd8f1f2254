"""A thread that calls a function repeatedly for an object, with a back-off after failures."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

LONGEST_BACKOFF_S = 10.0
"""Longest pause before a retry, in seconds, unless the regular interval is longer."""

Owner = TypeVar("Owner")


class Repeating:
    """Calls ``look(owner)`` on its own thread until it is stopped or the owner is garbage-collected.

    Parameters
    ----------
    owner
        Referenced weakly between two calls, so that the thread does not keep it alive.
    look
        Returns the seconds to wait before the next call, or None to end; must not raise.
    """

    def __init__(self, owner: Owner, look: Callable[[Owner], float | None], *, name: str) -> None:
        self._is_stopped = False
        self._woken = woken = threading.Event()
        reference = weakref.ref(owner, lambda _: woken.set())
        self._thread = threading.Thread(target=self._repeat, args=(reference, look), name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive and was not stopped."""
        return self._thread.is_alive() and not self._is_stopped

    def wake(self) -> None:
        """Start the next call now; if a call is running, start another one after it."""
        self._woken.set()

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop the thread, and wait for a running call unless this is called from it. Idempotent."""
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
            del owner  # so that the owner can be garbage-collected during the pause


def pause_s(interval_s: float, failures: int, chance: float) -> float:
    """Return the seconds to wait before the next call. Pure.

    Parameters
    ----------
    interval_s
        Seconds between two calls without failures.
    failures
        Number of consecutive failures: each doubles the time, up to `LONGEST_BACKOFF_S` or the interval.
    chance
        A random number in [0, 1). The pause is 75 to 100 % of the time without failures and 50 to 100 % with failures,
        so that many processes do not call at the same moment.
    """
    if failures == 0:
        return interval_s * (0.75 + 0.25 * chance)
    longest = max(interval_s, LONGEST_BACKOFF_S)
    return min(longest, max(interval_s, 0.05) * 2.0 ** min(failures, 20)) * (0.5 + 0.5 * chance)
