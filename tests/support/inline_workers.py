"""Workers that do everything in the caller's thread: the order of storage calls is the order of the code."""

from __future__ import annotations

from cnr_store import Store
from cnr_store.runtime.threads import Inline


class InlineWorkers(Inline):
    """Runs each task when it is asked for, in the calling thread; for schedules, and for tests that count calls.

    Takes what `Workers` takes, so that it can stand in for it, and has no threads whatever it is told.
    """

    def __init__(self, threads: int | None = None, *, name: str = "cnr") -> None:
        super().__init__()


def inline(store: Store) -> Store:
    """Return the store, which starts no thread from here on: those of a small one cost more than what they do."""
    store.internals.workers = store.internals.read_workers = InlineWorkers()
    return store
