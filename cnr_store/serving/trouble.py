"""What goes wrong behind serving: logged once, counted, and tried again after a pause that grows."""

from __future__ import annotations

import logging
import time
from random import random

from cnr_store.errors import VersionRefused
from cnr_store.runtime.repeating import pause_s
from cnr_store.serving.metrics import LoaderMetrics

logger = logging.getLogger(__name__)

MOST_COMPLAINTS = 64
"""Distinct errors that are remembered as logged."""


class Trouble:
    """The outcome of looks, one after another. Not safe for several threads.

    Attributes
    ----------
    error
        Why the last look left things as they are; None if all is well.
    """

    def __init__(self, where: str, interval_s: float, metrics: LoaderMetrics) -> None:
        """``where`` begins every line in the log; ``metrics`` gets the counts."""
        self.error: Exception | None = None
        self._where = where
        self._interval_s = interval_s
        self._metrics = metrics
        self._said: set[str] = set()
        self._retry_at_s = 0.0

    @property
    def rests(self) -> bool:
        """Whether what failed should not be tried again yet."""
        return time.monotonic() < self._retry_at_s

    def note(self, error: Exception | None, version: int) -> None:
        """Take the outcome of a look, behind which ``version`` is served."""
        metrics = self._metrics
        if error is None:
            if self.error is not None:
                logger.info("%s: all is well again, version %d is served", self._where, version)
            self.error = None
            self._said.clear()
        else:
            # Without the frames, which would keep the arrays of a failed move alive.
            self.error = error.with_traceback(None)
            self.say(error, f"version {version} stays")
        if error is None or isinstance(error, VersionRefused):
            metrics.failures, self._retry_at_s = 0, 0.0
            return
        metrics.errors += 1
        metrics.failures += 1
        self._retry_at_s = time.monotonic() + pause_s(self._interval_s, metrics.failures, random())

    def say(self, error: Exception, so: str) -> None:
        """Log an error if it was not logged since all was well last."""
        said = f"{type(error).__name__}: {error}"
        if said in self._said:
            return
        if len(self._said) >= MOST_COMPLAINTS:
            self._said.clear()
        self._said.add(said)
        logger.warning("%s: %s; %s", self._where, said, so)
