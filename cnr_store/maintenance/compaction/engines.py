"""Who folds: threads of this process, processes of this machine, or a Ray cluster. The same tasks, the same bytes.

An engine hands tasks out and says which are done, by the digest of the receipt that each has put. Nothing else comes
back from another process: what is committed is what the store shows.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal

from cnr_store.errors import BadInput, CnrStoreError, MissingDependency
from cnr_store.format.layout import writer_folder
from cnr_store.format.records import ChainEntry
from cnr_store.maintenance.compaction.fold import fold_piece
from cnr_store.maintenance.compaction.plan import Run
from cnr_store.maintenance.compaction.tasks import FoldTask
from cnr_store.runtime.threads import Throttle, Workers, default_threads
from cnr_store.segment.segment import SegmentReader, SegmentWriter, open_chain
from cnr_store.storage import Storage, StorageRecipe, reopen_storage
from cnr_store.types import Profile

Engine = Literal["threads", "processes", "ray"]
ENGINES: tuple[Engine, ...] = ("threads", "processes", "ray")


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
    profile: Profile
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
            self.storage, job.segment, profile=job.profile, folder=job.folder(index), workers=self.workers,
            throttle=self.throttle,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Done:
    """A task whose receipt is there: the sha256 of the receipt."""

    index: int
    receipt: str


def fold_task(job: Job, task: FoldTask, bench: Bench) -> Done:
    """Fold the pieces of a task and put its receipt. Blocks; memory as `fold_piece`, one piece at a time."""
    out = bench.writer(job, task.index)
    run = (job.run.start, job.run.stop)
    parts = tuple(fold_piece(bench.readers, run, piece, out, bench.workers) for piece in task.pieces)
    receipt = out.finish(
        txn=job.txn, rank=task.index, world=job.world, attempt=job.attempt, base=job.base, l0=job.l0, parts=parts
    )
    return Done(task.index, out.put_receipt(receipt))


def check_engine(engine: str, storage: Storage, workers: int | None) -> None:
    """Refuse an engine that is not one, or that could not reach the storage.

    Raises
    ------
    BadInput
    """
    if engine not in ENGINES:
        raise BadInput(f"engine is one of {', '.join(ENGINES)}; found {engine!r}", expected=ENGINES, found=engine)
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
    tasks: Sequence[FoldTask],
    bench: Bench,
    *,
    workers: int | None,
    bytes_per_s: float | None,
    is_over: Callable[[], bool],
) -> Generator[Done]:
    """Fold tasks and yield each as it gets done, in any order; the first error ends it. Blocks.

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
            yield fold_task(job, task, bench)
        return
    recipe = bench.storage.recipe
    assert recipe is not None  # see check_engine
    run = _on_processes if engine == "processes" else _on_ray
    yield from run(recipe, job, deque(tasks), workers, bytes_per_s, is_over)


def fold_elsewhere(
    recipe: StorageRecipe, job: Job, task: FoldTask, threads: int, bytes_per_s: float | None
) -> tuple[int, str]:
    """Fold a task in a process that knows nothing yet; opens the store once per compaction and process."""
    bench = _BENCHES.get(job.segment)
    if bench is None:
        for old in _BENCHES.values():
            old.workers.close()
        _BENCHES.clear()
        storage = reopen_storage(recipe)
        workers = Workers(threads, name="cnr-fold")
        readers = open_chain(storage, job.chain, workers)
        bench = _BENCHES[job.segment] = Bench(storage, readers, workers, Throttle(bytes_per_s))
    done = fold_task(job, task, bench)
    return done.index, done.receipt


_BENCHES: dict[str, Bench] = {}
"""The one compaction that this process works for, if it is a worker."""


def _on_processes(
    recipe: StorageRecipe,
    job: Job,
    tasks: deque[FoldTask],
    workers: int | None,
    bytes_per_s: float | None,
    is_over: Callable[[], bool],
) -> Generator[Done]:
    cores = default_threads()
    count = min(workers or cores, max(1, len(tasks)))
    threads, share = max(1, cores // count), None if bytes_per_s is None else bytes_per_s / count
    # Not forked: this process has threads, and a child that inherits their locks may wait for ever.
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    pending: set[Future[tuple[int, str]]] = set()
    try:
        while pending or tasks:
            while tasks and len(pending) < count and not is_over():
                pending.add(pool.submit(fold_elsewhere, recipe, job, tasks.popleft(), threads, share))
            if not pending:
                return
            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in finished:
                yield Done(*future.result())
    except BrokenProcessPool as error:
        raise CnrStoreError(
            "a worker process of the compaction died (out of memory, or killed); run it again, it goes on behind the "
            "tasks that are done"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _on_ray(
    recipe: StorageRecipe,
    job: Job,
    tasks: deque[FoldTask],
    workers: int | None,
    bytes_per_s: float | None,
    is_over: Callable[[], bool],
) -> Generator[Done]:
    ray = _connected_ray()
    count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
    share = None if bytes_per_s is None else bytes_per_s / min(count, max(1, len(tasks)))
    fold = ray.remote(fold_elsewhere)
    pending: list[Any] = []
    try:
        while pending or tasks:
            while tasks and len(pending) < count and not is_over():
                pending.append(fold.remote(recipe, job, tasks.popleft(), 1, share))
            if not pending:
                return
            finished, pending = ray.wait(pending, num_returns=1)
            for reference in finished:
                yield Done(*ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        raise getattr(error, "cause", error) from None  # the cluster's traceback is in its own logs
    except ray.exceptions.RayError as error:
        raise CnrStoreError(
            f"the Ray cluster lost a task of the compaction ({type(error).__name__}: out of memory, or a machine is "
            "gone); run it again, it goes on behind the tasks that are done"
        ) from error
    finally:
        for reference in pending:
            ray.cancel(reference)


def _connected_ray() -> Any:
    """Ray, connected to the cluster that the caller, or this machine, is part of; none is started."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            'engine "ray" needs a package that is not installed; pip install "cnr-store[ray]"', found="ray"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise BadInput(
                "no Ray cluster is running here: start one (ray start --head), or connect with ray.init(address=...) "
                "before",
                found="ray",
            ) from error
    return ray
