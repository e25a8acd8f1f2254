"""Whom a log tells of the records that it appends: readers that would else find them at their next poll."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Announcers:
    """Functions that are called with the number of each new version. They change nothing of the append."""

    def __init__(self) -> None:
        self._functions: list[Callable[[int], object]] = []

    def add(self, announce: Callable[[int], object]) -> None:
        """Call ``announce(version)`` from now on, too.

        It runs on the thread that appends, must not call the store that it is told by, and should return at once. What
        it raises is logged.
        """
        self._functions.append(announce)

    def tell(self, version: int) -> None:
        """Call all of them, one after another; an error is logged. Call it when the record is durable."""
        for announce in self._functions:
            try:
                announce(version)
            except Exception:  # the record stands, and readers find it by polling
                logger.warning("version %d is committed, but announcing it failed", version, exc_info=True)
