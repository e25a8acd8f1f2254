from __future__ import annotations

import os
import threading
import time

import pytest

from cnr_store.errors import BadInput
from cnr_store.runtime.threads import Inline, Throttle, Workers, blocks


def test_results_come_in_the_order_of_the_tasks() -> None:
    with Workers(3) as workers:
        assert workers.run(lambda k=k: (time.sleep(0.002 * (7 - k)), k)[1] for k in range(7)) == list(range(7))
        assert workers.run([]) == []


def test_a_forked_process_has_threads_of_its_own() -> None:
    """A regression: a worker of a DataLoader that read rows of a store from before the fork waited without end."""
    with Workers(2) as workers:
        workers.run([int, int, int])

        child = os.fork()
        if child == 0:
            os._exit(0 if workers.run([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3] else 1)
        assert os.waitpid(child, 0) == (child, 0)


def test_at_most_two_tasks_per_thread_are_in_flight() -> None:
    started, finished, most = 0, 0, 0
    lock = threading.Lock()

    def task() -> None:
        nonlocal finished
        time.sleep(0.001)
        with lock:
            finished += 1

    def tasks() -> object:
        nonlocal started, most
        for _ in range(40):
            with lock:
                most = max(most, started - finished)
                started += 1
            yield task

    with Workers(2) as workers:
        workers.run(tasks())  # type: ignore[arg-type]
    assert finished == 40
    assert most <= 4


def test_the_first_error_is_raised_stops_the_rest_and_waits_for_what_runs() -> None:
    ran: list[int] = []
    running = threading.Event()

    def fail() -> None:
        running.wait(5)
        raise ValueError("first")

    def slow() -> None:
        running.set()
        time.sleep(0.02)
        ran.append(1)
        raise ValueError("second")

    with Workers(2) as workers:
        with pytest.raises(ValueError, match="first"):
            workers.run([fail, slow, *[lambda: ran.append(2)] * 50])
        assert 1 in ran, "an error was raised while a task still ran"
        assert len(ran) < 20
        assert workers.run([lambda: 3]) == [3]


def test_a_task_that_is_alone_runs_on_the_calling_thread() -> None:
    with Workers(2) as workers:
        alone = workers.run([threading.get_ident])
        together = workers.run([threading.get_ident, threading.get_ident])

    assert alone == [threading.get_ident()]
    assert threading.get_ident() not in together


def test_blocks_cover_the_range() -> None:
    assert blocks(0, 4) == []
    assert blocks(8, 4) == [(0, 4), (4, 8)]
    assert blocks(9, 4) == [(0, 4), (4, 8), (8, 9)]


def test_a_throttle_spreads_bytes_over_time() -> None:
    now, slept = 100.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    throttle = Throttle(10.0, clock=lambda: now, sleep=sleep)
    for size in (20, 5, 10):
        throttle.take(size)
    assert slept == [2.0, 0.5]
    now += 60  # idle time is not saved up
    throttle.take(10)
    throttle.take(10)
    assert slept == [2.0, 0.5, 1.0]


def test_without_a_cap_nothing_waits() -> None:
    Throttle(None, clock=lambda: 1 / 0, sleep=lambda _: None).take(10**12)


def test_inline_work_is_done_on_the_calling_thread_up_to_the_first_error() -> None:
    done: list[tuple[int, int]] = []

    def task(number: int) -> int:
        done.append((number, threading.get_ident()))
        if number == 2:
            raise ValueError(number)
        return number

    with Inline() as workers:
        assert workers.run(lambda k=k: task(k) for k in range(2)) == [0, 1]
        with pytest.raises(ValueError, match="2"):
            workers.run(lambda k=k: task(k) for k in range(2, 5))

    assert done == [(k, threading.get_ident()) for k in range(3)]


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_cap_that_lets_nothing_pass_is_refused(rate: float) -> None:
    with pytest.raises(BadInput, match="above 0"):
        Throttle(rate)
