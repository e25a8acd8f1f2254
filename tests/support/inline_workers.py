"""Workers that do everything in the caller's thread: the order of storage calls is the order of the code."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cnr_store.runtime.threads import Result, Workers


class InlineWorkers(Workers):
    """Runs each task when it is asked for, in the calling thread; for schedules, and for tests that count calls.

    Takes what `Workers` takes, so that it can stand in for it, and has no threads whatever it is told.
    """

    is_inline = True

    def __init__(self, threads: int | None = None, *, name: str = "cnr") -> None:
        super().__init__(1, name=name)

    def run(self, tasks: Iterable[Callable[[], Result]]) -> list[Result]:
        """Run tasks in order and return their results; the first error is raised at once."""
        return [task() for task in tasks]
