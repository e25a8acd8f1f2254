"""Records the errors of a loader's polls: pauses after failures, and logs each error once."""

from __future__ import annotations

import logging
import time
from random import random

from cnr_store.errors import VersionRefused
from cnr_store.runtime.repeating import pause_s
from cnr_store.serving.metrics import LoaderMetrics

logger = logging.getLogger(__name__)

MOST_COMPLAINTS = 64
"""Number of distinct errors that are remembered as logged."""


class PollErrors:
    """The errors of polls, one after another. Not safe for several threads.

    Attributes
    ----------
    error
        The error of the last poll; None if it succeeded.
    """

    def __init__(self, where: str, interval_s: float, metrics: LoaderMetrics) -> None:
        """Begin every log line with ``where``; count in ``metrics``."""
        self.error: Exception | None = None
        self._where = where
        self._interval_s = interval_s
        self._metrics = metrics
        self._logged: set[str] = set()
        self._retry_at_s = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether a retry is not due yet."""
        return time.monotonic() < self._retry_at_s

    def record(self, error: Exception | None, version: int) -> None:
        """Record the result of a poll, after which ``version`` is served."""
        metrics = self._metrics
        if error is None:
            if self.error is not None:
                logger.info("%s: all is well again, version %d is served", self._where, version)
            self.error = None
            self._logged.clear()
        else:
            # Without the frames, which would keep the arrays of a failed update alive.
            self.error = error.with_traceback(None)
            self.log(error, f"version {version} stays")
        if error is None or isinstance(error, VersionRefused):
            metrics.failures, self._retry_at_s = 0, 0.0
            return
        metrics.errors += 1
        metrics.failures += 1
        self._retry_at_s = time.monotonic() + pause_s(self._interval_s, metrics.failures, random())

    def log(self, error: Exception, so: str) -> None:
        """Log an error unless it was logged since the last successful poll."""
        text = f"{type(error).__name__}: {error}"
        if text in self._logged:
            return
        if len(self._logged) >= MOST_COMPLAINTS:
            self._logged.clear()
        self._logged.add(text)
        logger.warning("%s: %s; %s", self._where, text, so)
