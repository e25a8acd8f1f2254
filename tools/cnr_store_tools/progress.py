"""Progress bars on standard error, only if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

Report = Callable[[str, int, int], None]
"""Called as (stage, done, total)."""


class _Remaining(TimeRemainingColumn):
    """The time that is left, once a speed is known; nothing before."""

    def render(self, task: Task) -> Text:
        """Return the column's text."""
        return Text() if task.time_remaining is None else super().render(task)


@contextmanager
def progress_bars(*, in_bytes: bool = True) -> Iterator[Report]:
    """Yield a function that draws one bar per stage; without a terminal it draws nothing."""
    if not sys.stderr.isatty():
        yield _silent
        return
    amounts = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amounts, _Remaining())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def _silent(stage: str, done: int, total: int) -> None:
    """Draw nothing."""
