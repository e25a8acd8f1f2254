"""Who compacts: threads of this process, processes of this machine or those of a cluster. Same tasks, same bytes.

An engine hands tasks out and says which are done, by the digest of the receipt that each has put. Nothing else comes
back from another process: what is committed is what the store shows.
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

from cnr_store.errors import BadInput, CnrStoreError
from cnr_store.format.layout import writer_folder
from cnr_store.format.records import ChainEntry
from cnr_store.maintenance.compaction.merge import merge_piece
from cnr_store.maintenance.compaction.plan import Run
from cnr_store.maintenance.compaction.tasks import CompactionTask
from cnr_store.runtime.threads import Throttle, Workers, default_threads
from cnr_store.segment.reader import SegmentReader, open_chain
from cnr_store.segment.writer import SegmentWriter
from cnr_store.storage import Storage, StorageRecipe, reopen_storage


@runtime_checkable
class WorkerPool(Protocol):
    """Processes that compact tasks: those of this machine, or of a cluster (`cnr_store.integrations.ray.RayPool`).

    Attributes
    ----------
    threads
        How many threads a task has where it is compacted; known from `start` on.
    """

    threads: int

    def start(self, workers: int | None, tasks: int) -> int:
        """Get ready for so many tasks; return how many are compacted at once: ``workers``, or what there is. Blocks."""
        ...

    def submit(self, task: Callable[..., tuple[int, str]], *arguments: Any) -> Any:
        """Begin ``task(*arguments)`` in another process and return its handle. Function and arguments are pickled."""
        ...

    def wait(self, pending: set[Any]) -> tuple[list[tuple[int, str]], set[Any]]:
        """Block until at least one is done; return results, and the handles of the rest. A task's error is raised."""
        ...

    def stop(self, pending: set[Any]) -> None:
        """Give up what is pending, and let the workers go. Blocks."""
        ...


EngineName = Literal["threads", "processes"]
Engine = EngineName | WorkerPool
ENGINES: tuple[EngineName, ...] = ("threads", "processes")


@dataclass(frozen=True, slots=True)
class Job:
    """What all tasks of one compaction have in common; plain data, so that another process can have it.

    Attributes
    ----------
    segment, txn, base, l0
        Of the result.
    attempt
        Eight hex digits; the same plan has the same, so a task that is done again meets its own objects.
    world
        How many receipts the result has.
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

    def folder(self, index: int) -> str:
        """Return the folder of task ``index`` inside the segment."""
        return writer_folder(index, self.attempt)


@dataclass(frozen=True, slots=True)
class Bench:
    """What a task is worked on with, in one process."""

    storage: Storage
    readers: Sequence[SegmentReader]
    workers: Workers
    throttle: Throttle

    def writer(self, job: Job, index: int) -> SegmentWriter:
        """Return what writes the folder of task ``index``."""
        return SegmentWriter(
            self.storage, job.segment, folder=job.folder(index), workers=self.workers,
            throttle=self.throttle,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FinishedTask:
    """A task whose receipt is there: the sha256 of the receipt."""

    index: int
    receipt: str


def run_task(job: Job, task: CompactionTask, bench: Bench) -> FinishedTask:
    """Compact the pieces of a task and put its receipt. Blocks; memory as `merge_piece`, one piece at a time."""
    out = bench.writer(job, task.index)
    run = (job.run.start, job.run.stop)
    parts = tuple(merge_piece(bench.readers, run, piece, out, bench.workers) for piece in task.pieces)
    receipt = out.finish(
        txn=job.txn, rank=task.index, world=job.world, attempt=job.attempt, base=job.base, l0=job.l0, parts=parts
    )
    return FinishedTask(task.index, out.put_receipt(receipt))


def check_engine(engine: Engine, storage: Storage, workers: int | None) -> None:
    """Refuse an engine that is not one, or that could not reach the storage.

    Raises
    ------
    BadInput
    """
    if engine not in ENGINES and not isinstance(engine, WorkerPool):
        raise BadInput(
            f"engine is one of {', '.join(ENGINES)}, or a pool of workers; found {engine!r}", expected=ENGINES,
            found=engine,
        )  # fmt: skip
    if workers is not None and workers < 1:
        raise BadInput(f"a compaction has at least one worker, found {workers}", expected=1, found=workers)
    if engine != "threads" and storage.recipe is None:
        raise BadInput(
            f"{storage.url} can be opened in this process alone (it is in memory, or on a file system object that was "
            f"given); engine {engine!r} works in others, use 'threads'",
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
    """Compact tasks and yield each as it gets done, in any order; the first error ends it. Blocks.

    Parameters
    ----------
    bench
        Of this process: what the engine ``threads`` works with.
    workers
        How many processes, or tasks of the cluster, work at once.
    is_over
        Asked before a task is begun; from True on none is, and what has been begun is waited for.
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
    """Compact a task in a process that knows nothing yet; opens the store once per compaction and process."""
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
"""The one compaction that this process works for, if it is a worker."""


class _Processes:
    """Processes of this machine, started for one compaction."""

    threads = 1

    def start(self, workers: int | None, tasks: int) -> int:
        cores = default_threads()
        count = min(workers or cores, max(1, tasks))
        self.threads = max(1, cores // count)
        # Not forked: this process has threads, and a child that inherits their locks may wait for ever.
        self._pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
        return count

    def submit(self, task: Callable[..., tuple[int, str]], *arguments: Any) -> Any:
        with _explained():
            return self._pool.submit(task, *arguments)

    def wait(self, pending: set[Any]) -> tuple[list[tuple[int, str]], set[Any]]:
        with _explained():
            finished, rest = wait(pending, return_when=FIRST_COMPLETED)
            return [future.result() for future in finished], rest

    def stop(self, pending: set[Any]) -> None:  # noqa: ARG002 - the pool knows them
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise CnrStoreError(
            "a worker process of the compaction died (out of memory, or killed); run it again, it goes on behind the "
            "tasks that are done"
        ) from error
