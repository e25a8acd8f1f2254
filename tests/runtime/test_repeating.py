"""A thread that looks again: it ends when told and with its owner, and waits longer where looks fail."""

from __future__ import annotations

import gc
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from cnr_store.runtime.repeating import LONGEST_BACKOFF_S, Repeating, pause_s


class Owner:
    """Counts the looks on its behalf."""

    def __init__(self) -> None:
        self.looks = 0
        self.has_looked = threading.Semaphore(0)

    def look(self) -> float:
        self.looks += 1
        self.has_looked.release()
        return 3600.0


def test_a_thread_that_is_woken_looks_before_its_pause_is_over() -> None:
    owner = Owner()
    thread = Repeating(owner, Owner.look, name="looks")
    assert owner.has_looked.acquire(timeout=60)

    thread.wake()

    assert owner.has_looked.acquire(timeout=60)
    thread.stop()
    assert not thread.is_running


def test_a_thread_that_is_stopped_looks_no_more() -> None:
    owner = Owner()
    thread = Repeating(owner, Owner.look, name="looks")
    assert owner.has_looked.acquire(timeout=60)

    thread.stop()
    thread.wake()

    assert owner.looks == 1


def test_a_thread_ends_with_its_owner() -> None:
    owner = Owner()
    thread = Repeating(owner, Owner.look, name="looks")
    assert owner.has_looked.acquire(timeout=60)

    deadline = time.monotonic() + 60
    del owner
    while thread.is_running and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)

    assert not thread.is_running


@given(
    interval=st.floats(0.0, 100.0),
    failures=st.integers(0, 10**6),
    chance=st.floats(0.0, 1.0, exclude_max=True),
)
def test_pauses_grow_and_stay_bounded(interval: float, failures: int, chance: float) -> None:
    pause = pause_s(interval, failures, chance)

    assert 0 <= pause <= max(interval, LONGEST_BACKOFF_S)
    assert pause_s(interval, failures + 1, chance) >= 0.5 * pause
    if not failures:
        assert pause >= 0.75 * interval
