"""The library's own threads: bounded work in flight, first error wins, optional bandwidth cap.

Kernels and codecs release the GIL and are serial, so row blocks on these threads are the only parallelism.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from typing import Generic, TypeVar

from cnr_store.errors import BadInput
from cnr_store.runtime.arguments import checked_count, checked_number
from cnr_store.runtime.closing import Closing

Result = TypeVar("Result")


def default_threads() -> int:
    """Return the default number of threads: the CPUs that this process may use, at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def background_cpu_s() -> float:
    """Return the CPU seconds of the library's threads in this process, and of fsspec's, which sends its requests.

    Where the system does not tell (not Linux), those of the calling thread. For differences; threads may have ended.
    """
    if sys.platform != "linux":
        return time.thread_time()
    total = 0.0
    for thread in threading.enumerate():
        if thread.native_id is not None and thread.name.startswith(("cnr", "fsspecIO")):
            # The kernel's number of a thread's CPU clock. That of `time.pthread_getcpuclockid` is the same, but asking
            # for it can crash if the thread has just ended; here it is an error.
            with contextlib.suppress(OSError):
                total += time.clock_gettime((~thread.native_id << 3) | 6)
    return total


def check_rate(bytes_per_s: float | None) -> None:
    """Check that a bandwidth limit is positive.

    Raises
    ------
    BadInput
    """
    if bytes_per_s is not None:
        checked_number("bytes_per_s", bytes_per_s, above=0)


class Throttle:
    """A limit on bytes per second, shared by threads; ``None`` means no limit.

    ``clock`` and ``sleep`` are parameters for tests.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        check_rate(bytes_per_s)
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Block until ``size_bytes`` more may be sent."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = self._clock()
            wait = max(0.0, self._free_at - now)
            self._free_at = max(now, self._free_at) + size_bytes / self._bytes_per_s
        if wait:
            self._sleep(wait)


class Workers(Closing):
    """A pool of threads that runs batches of tasks; usable from several threads, not from its own tasks.

    Threads do not survive a fork: in a forked process, such as a worker of a DataLoader, the first batch starts others.

    ``is_inline``: tasks run on the calling thread, one after the other.
    """

    is_inline = False
    _is_closed = False

    def __init__(self, threads: int | None = None, *, name: str = "cnr") -> None:
        self.threads = default_threads() if threads is None else checked_count("threads", threads, least=1)
        self._name = name
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix=self._name)

    def close(self) -> None:
        """Wait for running tasks and end the threads. Idempotent."""
        self._is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, tasks: Iterable[Callable[[], Result]]) -> list[Result]:
        """Run tasks, one per thread at a time, and return their results in order. Blocks.

        The first error, in the order of the tasks, stops those that have not started, waits for those that have, and is
        raised. A single task runs on the calling thread: waking another thread costs more than a small task. Others
        are taken by the threads from ``tasks`` as they come to them, so a batch wakes each thread once.

        Raises
        ------
        BadInput
            The threads have ended: the store that they belong to is closed.
        """
        self.check_open()
        remaining = iter(tasks)
        first = list(islice(remaining, max(2, self.threads)))
        if len(first) < 2:
            return [task() for task in first]
        if self._process != os.getpid():
            self._start()
        shared = _SharedTasks(chain(first, remaining))
        working: list[Future[None]] = []
        try:
            for _ in range(min(self.threads, len(first))):
                try:
                    working.append(self._pool.submit(shared.work))
                except RuntimeError as error:
                    if self._is_closed or "shutdown" not in str(error):
                        raise
                    # The interpreter is ending, and its pools take nothing more: work on, as a loader's poll does.
                    shared.work()
                    break
            for future in working:
                future.result()
        except BaseException:
            shared.stop()
            for future in working:
                if not future.cancel():
                    future.exception()
            raise
        return shared.results()

    def check_open(self) -> None:
        """Raise `BadInput` if the threads have ended, as those of a store that was closed."""
        if self._is_closed:
            raise BadInput("the store of this is closed: open the store again, and use it within its `with` block")

    def run_blocks(self, work: Callable[[int, int], Result], count: int, size: int) -> list[Result]:
        """Call ``work(start, stop)`` for each of `blocks`, and return the results in order; blocks, errors as `run`."""
        return self.run(partial(work, start, stop) for start, stop in blocks(count, size))


class _SharedTasks(Generic[Result]):
    """Tasks that several threads take from one iterator, and what became of each."""

    def __init__(self, tasks: Iterable[Callable[[], Result]]) -> None:
        self._tasks = iter(tasks)
        self._lock = threading.Lock()
        self._taken = 0
        self._is_stopped = False
        self._found: dict[int, Result] = {}
        self._errors: dict[int, BaseException] = {}

    def stop(self) -> None:
        """Let nobody take another task."""
        self._is_stopped = True

    def work(self) -> None:
        """Run one task after the other, until there are none or one has failed, here or on another thread."""
        number = 0
        try:
            while True:
                with self._lock:
                    number = self._taken
                    task = None if self._is_stopped else next(self._tasks, None)
                    self._taken += 1
                if task is None:
                    return
                self._found[number] = task()
        except BaseException as error:  # noqa: BLE001 (raised by `results`)
            self._errors[number] = error
            self.stop()

    def results(self) -> list[Result]:
        """Return the results in the order of the tasks, or raise the first error in it."""
        if self._errors:
            error = self._errors[min(self._errors)]
            self._errors.clear()  # its traceback refers to this object
            try:
                raise error
            finally:
                del error
        return [self._found[number] for number in range(len(self._found))]


class Inline(Workers):
    """Runs tasks at once on the calling thread: for work that is itself a task of `Workers`."""

    is_inline = True

    def __init__(self) -> None:
        self.threads = 1

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def run(self, tasks: Iterable[Callable[[], Result]]) -> list[Result]:
        """Run tasks in order and return their results; raise the first error without running later tasks."""
        return [task() for task in tasks]


def blocks(count: int, size: int) -> list[tuple[int, int]]:
    """Return half-open ranges of at most ``size`` that cover ``range(count)``."""
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def windows(count: int, row_bytes: int, most_bytes: int) -> list[tuple[int, int]]:
    """Return half-open ranges that cover ``count`` rows: of at most ``most_bytes`` each, but at least one row."""
    return blocks(count, max(1, most_bytes // max(1, row_bytes)))
