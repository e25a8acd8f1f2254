"""Execute compaction tasks: on threads of this process, processes of this machine, or a cluster.

All engines write the same bytes for the same tasks. An engine distributes tasks, and reports each finished one by the
digest of its receipt. A worker process returns nothing else: the result is read back from the store.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from cnr_store.errors import BadInput, CnrStoreError, StorageFailure
from cnr_store.format.layout import writer_name
from cnr_store.format.records import ChainEntry
from cnr_store.maintenance.compaction.merge import merge_pieces
from cnr_store.maintenance.compaction.plan import Run
from cnr_store.maintenance.compaction.tasks import CompactionTask
from cnr_store.runtime.arguments import checked_count
from cnr_store.runtime.threads import Throttle, Workers, default_threads
from cnr_store.segment.reader import SegmentReader, open_chain
from cnr_store.segment.writer import SegmentWriter
from cnr_store.storage import Storage, StorageRecipe, reopen_storage


@runtime_checkable
class WorkerPool(Protocol):
    """Worker processes of this machine or of a cluster (`cnr_store.integrations.ray.RayPool`).

    Attributes
    ----------
    threads
        Number of threads of each task in its process; set by `start`.
    """

    threads: int

    def start(self, workers: int | None, tasks: int) -> int:
        """Prepare for ``tasks`` tasks; return how many run at once (``workers``, None is all). Blocks."""
        ...

    def submit(self, task: Callable[..., tuple[int, str]], *arguments: Any) -> Any:
        """Start ``task(*arguments)``, pickled, in another process and return its handle."""
        ...

    def wait(self, pending: set[Any]) -> tuple[list[tuple[int, str]], set[Any]]:
        """Block until a task is done; return results and the remaining handles. Raises a task's error."""
        ...

    def stop(self, pending: set[Any]) -> None:
        """Cancel pending tasks, or wait for those that run, and release the workers. Blocks."""
        ...


EngineName = Literal["threads", "processes"]
Engine = EngineName | WorkerPool
ENGINES: tuple[EngineName, ...] = ("threads", "processes")


@dataclass(frozen=True, slots=True)
class Job:
    """The parameters that all tasks of one compaction share. Can be pickled.

    Attributes
    ----------
    segment, txn, base, l0
        Fields of the result.
    attempt
        Eight hex digits, derived from the plan: a repeated task writes the same objects again.
    world
        Number of receipts of the result.
    chain
        The chain up to the end of the run.
    """

    segment: str
    txn: str
    base: int
    l0: int
    attempt: str
    world: int
    chain: tuple[ChainEntry, ...]
    run: Run

    def writer(self, index: int) -> str:
        """Return how the paths of what task ``index`` writes begin."""
        return writer_name(index, self.attempt)


@dataclass(frozen=True, slots=True)
class Bench:
    """The storage, readers and threads that a process uses for tasks."""

    storage: Storage
    readers: Sequence[SegmentReader]
    workers: Workers
    throttle: Throttle

    def writer(self, job: Job, index: int) -> SegmentWriter:
        """Return a writer of what task ``index`` writes."""
        return SegmentWriter(
            self.storage, job.segment, writer=job.writer(index), workers=self.workers,
            throttle=self.throttle,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FinishedTask:
    """A task whose receipt is written; ``receipt`` is the receipt's sha256."""

    index: int
    receipt: str


def run_task(job: Job, task: CompactionTask, bench: Bench) -> FinishedTask:
    """Compact a task's pieces and write its receipt. Blocks; memory as `merge_pieces`."""
    out = bench.writer(job, task.index)
    run = (job.run.start, job.run.stop)
    parts = merge_pieces(bench.readers, run, task.pieces, out, bench.workers)
    receipt = out.finish(
        txn=job.txn, rank=task.index, world=job.world, attempt=job.attempt, base=job.base, l0=job.l0, parts=parts
    )
    return FinishedTask(task.index, out.put_receipt(receipt))


def check_engine(engine: Engine, storage: Storage, workers: int | None) -> None:
    """Check that the engine exists and can reach the storage.

    Raises
    ------
    BadInput
    """
    if engine not in ENGINES and not isinstance(engine, WorkerPool):
        raise BadInput(
            f"engine is {engine!r}, expected one of {', '.join(ENGINES)}, or a pool of workers", expected=ENGINES,
            found=engine,
        )  # fmt: skip
    if workers is not None:
        checked_count("workers", workers, least=1)
    if engine != "threads" and storage.recipe is None:
        raise BadInput(
            f"only this process can open {storage.url} (it is in memory, or on a given file system object), "
            f"but engine {engine!r} uses other processes; use 'threads'",
            found=engine,
        )


def run_tasks(
    engine: Engine,
    job: Job,
    tasks: Sequence[CompactionTask],
    bench: Bench,
    *,
    workers: int | None,
    bytes_per_s: float | None,
    is_over: Callable[[], bool],
) -> Generator[FinishedTask]:
    """Compact tasks and yield each when it is finished, in any order. Blocks; raises the first error.

    Parameters
    ----------
    bench
        The resources of this process; only the engine ``threads`` uses its readers and threads.
    workers
        Number of concurrent processes, or tasks of the cluster.
    is_over
        Called before each task starts. After it returns True no task starts, and started ones are waited for.
    """
    if engine == "threads":
        for task in tasks:
            if is_over():
                return
            yield run_task(job, task, bench)
        return
    recipe = bench.storage.recipe
    assert recipe is not None  # see check_engine
    pool = _Processes() if engine == "processes" else engine
    left = deque(tasks)
    count = pool.start(workers, len(tasks))
    share = None if bytes_per_s is None else bytes_per_s / min(count, max(1, len(tasks)))
    pending: set[Any] = set()
    try:
        while pending or left:
            while left and len(pending) < count and not is_over():
                pending.add(pool.submit(run_elsewhere, recipe, job, left.popleft(), pool.threads, share))
            if not pending:
                return
            finished, pending = pool.wait(pending)
            for index, receipt in finished:
                yield FinishedTask(index, receipt)
    finally:
        pool.stop(pending)


def run_elsewhere(
    recipe: StorageRecipe, job: Job, task: CompactionTask, threads: int, bytes_per_s: float | None
) -> tuple[int, str]:
    """Compact a task in a worker process, which opens the storage once per compaction."""
    bench = _BENCHES.get(job.segment)
    if bench is None:
        for old in _BENCHES.values():
            old.workers.close()
        _BENCHES.clear()
        storage = reopen_storage(recipe)
        workers = Workers(threads, name="cnr-compact")
        readers = open_chain(storage, job.chain, workers)
        bench = _BENCHES[job.segment] = Bench(storage, readers, workers, Throttle(bytes_per_s))
    done = run_task(job, task, bench)
    return done.index, done.receipt


_BENCHES: dict[str, Bench] = {}
"""In a worker process: the resources of its current compaction, by segment name. At most one entry."""


class _Processes:
    """Processes of this machine, started for one compaction."""

    threads = 1

    def start(self, workers: int | None, tasks: int) -> int:
        cores = default_threads()
        count = min(workers or cores, max(1, tasks))
        self.threads = max(1, cores // count)
        # Not forked: this process has threads, and a child that inherits their locks may deadlock.
        try:
            self._pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
        except OSError as error:
            raise StorageFailure(
                f"no worker processes can be started here ({error.strerror}): their locks need a /dev/shm that can be "
                "written; compact with threads"
            ) from error
        return count

    def submit(self, task: Callable[..., tuple[int, str]], *arguments: Any) -> Any:
        with _explained():
            return self._pool.submit(task, *arguments)

    def wait(self, pending: set[Any]) -> tuple[list[tuple[int, str]], set[Any]]:
        with _explained():
            finished, rest = wait(pending, return_when=FIRST_COMPLETED)
            return [future.result() for future in finished], rest

    def stop(self, pending: set[Any]) -> None:  # noqa: ARG002 - the pool cancels its own
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise CnrStoreError(
            "a worker process of the compaction died (out of memory, or killed); run it again, it continues after the "
            "finished tasks"
        ) from error
