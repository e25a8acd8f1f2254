"""Progress bars on standard error, only if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Report = Callable[[str, int, int], None]
"""Called as (stage, done, total)."""


_COUNTED = ("records", "states", "expire", "segments")
"""Stages that count things; all others count bytes."""


class _Amount(ProgressColumn):
    """How much is done: megabytes, or a count."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._count = DownloadColumn(), MofNCompleteColumn()

    def render(self, task: Task) -> Text:
        """Return the column's text."""
        return (self._count if task.description in _COUNTED else self._bytes).render(task)


class _Remaining(TimeRemainingColumn):
    """The time that is left, once a speed is known; nothing before."""

    def render(self, task: Task) -> Text:
        """Return the column's text."""
        return Text() if task.time_remaining is None else super().render(task)


@contextmanager
def progress_bars() -> Iterator[Report]:
    """Yield a function that draws one bar per stage; without a terminal it draws nothing."""
    if not sys.stderr.isatty():
        yield _silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), _Amount(), _Remaining())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def _silent(stage: str, done: int, total: int) -> None:
    """Draw nothing."""
