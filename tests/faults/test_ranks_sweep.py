"""Two ranks save one store, and one dies or fails at any storage call: never a mix, no false acknowledgement."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cnr_store import CnrStoreError, Store, TableOptions, verify_store
from cnr_store.errors import CommitStateUnknown, RankLost
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.segment.shards import Shard
from cnr_store.storage import storage_from_filesystem
from cnr_store.types import Rectangle
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.writer import Writer
from tests.faults.mortal_rank import Process
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem, SimulatedCrash
from tests.support.ranks import ThreadRank, on_ranks

QUICK = RetryPolicy(deadline_s=0.02, first_delay_s=0.001, max_delay_s=0.002)
ROWS, DIM, WORLD, SCALE = 12, 4, 2, 0.25
OPTIONS = TableOptions(scale=SCALE)
Array = np.ndarray[Any, Any]


def open_store(fs: Any) -> Store:
    return Store.open_on(storage_from_filesystem(fs, "/root"), threads=1, retry=QUICK)


def state_of(step: int) -> Array:
    """What training has at a step: multiples of the scale, so every state is stored exactly."""
    rng = np.random.default_rng(0)
    values = rng.integers(-9, 9, (ROWS, DIM))
    for later in range(1, step + 1):
        rows = rows_of(later)
        values[rows] = np.random.default_rng(later).integers(-90, 90, (len(rows), DIM)) + 100 * later
    return (values * SCALE).astype(np.float32)


def rows_of(step: int) -> Array:
    """Rows of both ranks change in every step."""
    return np.arange(step % 3, ROWS, 3)


def cuts(kind: str) -> list[Rectangle]:
    if kind == "rows":
        return [Rectangle((0, 7), (0, DIM)), Rectangle((7, ROWS), (0, DIM))]
    return [Rectangle((0, ROWS), (0, 3)), Rectangle((0, ROWS), (3, DIM))]


def of(values: Array, tile: Rectangle) -> Array:
    return values[slice(*tile.rows), slice(*tile.columns)]


def save(writer: Writer, tile: Rectangle, step: int, kind: Any = "delta") -> int:
    values = state_of(step)
    with writer.begin(step, kind) as txn:
        if txn.kind == "baseline":
            if not writer.mirrors.get(Shard("t", tile)):
                txn.declare_tables({"t": [Declaration(of(values, tile), {}, OPTIONS)]})
            txn.write_table("t", of(values, tile), rectangle=tile)
        else:
            rows = rows_of(step)
            rows = rows[(rows >= tile.rows[0]) & (rows < tile.rows[1])]
            txn.write_rows("t", rows, values[rows, slice(*tile.columns)], rectangle=tile)
        if writer.ranks.rank == 0:
            txn.put_scalars({"step": step})
        txn.put_document(f"rank/{writer.ranks.rank}", step)
        return txn.commit()


@dataclass
class Run:
    """What the ranks of one run went through."""

    files: IsolatedMemoryFileSystem
    views: list[FaultyFileSystem] = field(default_factory=list)
    acknowledged: list[list[int]] = field(default_factory=list)
    errors: list[BaseException | None] = field(default_factory=list)

    def start(
        self, work: Callable[[Process, list[int]], None], fault: tuple[int, Fault] | None = None,
        dies_at: tuple[int, int] | None = None,
    ) -> Run:  # fmt: skip
        """Run ``work`` on both ranks, the fault in the storage of one; all are gone when this returns."""
        self.views = [
            FaultyFileSystem(self.files, fault=fault[1] if fault is not None and fault[0] == k else None)
            for k in range(WORLD)
        ]
        self.acknowledged = [[] for _ in range(WORLD)]
        self.errors = [None for _ in range(WORLD)]

        def body(rank: ThreadRank) -> None:
            process = Process(self.views[rank.rank], rank)
            if dies_at is not None and dies_at[0] == rank.rank:
                process.dies_at_exchange = dies_at[1]
            try:
                work(process, self.acknowledged[rank.rank])
            except BaseException as error:  # noqa: BLE001 - a dead process among them
                self.errors[rank.rank] = error
            finally:
                rank.leave()

        on_ranks(WORLD, body, timeout_s=20)
        return self


def train(kind: str, steps: tuple[int, ...] = (2, 3, 4)) -> Callable[[Process, list[int]], None]:
    """Restore step 1 and save three more: two deltas, then a baseline from the mirrors and the values given."""

    def work(process: Process, acknowledged: list[int]) -> None:
        tile = cuts(kind)[process.rank]
        with open_store(process.fs) as store:
            writer = store.writer(ranks=process, shards={"t": [tile]})
            writer.restore()
            for step in steps:
                attempt(writer, tile, step, acknowledged, "baseline" if step == steps[-1] else "delta")

    return work


def attempt(writer: Writer, tile: Rectangle, step: int, acknowledged: list[int], kind: Any) -> None:
    """Save a step, and treat the outcomes as a trainer does: learn an unknown one, restore and try again else."""
    for _ in range(3):
        try:
            save(writer, tile, step, kind)
            break
        except RankLost:
            if writer._state.pending is not None and writer.settle() is not None:
                acknowledged.append(step)
            raise
        except CommitStateUnknown:
            if writer.settle() is not None:
                break
        except CnrStoreError:
            pass
        writer.restore()
    else:
        raise RuntimeError("three attempts failed")
    acknowledged.append(step)


def prepared() -> IsolatedMemoryFileSystem:
    files = IsolatedMemoryFileSystem()
    Store.create_on(storage_from_filesystem(files, "/root"), threads=1, retry=QUICK).close()

    def first(process: Process, acknowledged: list[int]) -> None:
        tile = cuts("rows")[process.rank]
        with open_store(process.fs) as store:
            writer = store.writer(ranks=process, shards={"t": [tile]})
            save(writer, tile, 0)
            save(writer, tile, 1)

    run = Run(files).start(first)
    assert run.errors == [None, None]
    return files


def check(run: Run, *, deep: bool) -> int:
    """Ask a fresh process what there is, and let two new ranks go on from it; returns the step that is found."""
    with open_store(run.files) as store:
        snapshot = store.snapshot()
        step = snapshot.scalars["step"]
        assert isinstance(step, int)
        assert step >= max([1, *run.acknowledged[0], *run.acknowledged[1]]), "an acknowledged save is gone"
        assert step <= max([1, *run.acknowledged[0], *run.acknowledged[1]]) + 1
        assert np.array_equal(snapshot.table("t").read(), state_of(step)), "a mix of states"
        assert [snapshot.read_document(f"rank/{k}") for k in range(WORLD)] == [step] * WORLD

    files = run.files.fork()

    def go_on(process: Process, acknowledged: list[int]) -> None:
        tile = cuts("rows")[process.rank]
        values = np.empty((tile.num_rows, tile.width), np.float32)
        with open_store(process.fs) as store:
            writer = store.writer(ranks=process, shards={"t": [tile]})
            writer.restore({"t": {"values": values}})
            assert np.array_equal(values, of(state_of(step), tile))
            save(writer, tile, step + 1)

    after = Run(files).start(go_on)
    assert after.errors == [None, None], after.errors
    with open_store(files) as store:
        assert np.array_equal(store.snapshot().table("t").read(), state_of(step + 1))
        if deep:
            report = verify_store(store, deep=True)
            assert report.is_sound, report
    return step


@dataclass
class Count:
    calls: int = 0
    runs: int = 0
    crashed: int = 0
    lost: int = 0
    moved_on: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = (
            f"{self.calls} calls of both ranks: {self.runs} runs, {self.crashed} crashed, {self.lost} left a rank "
            f"alone, {self.moved_on} saved all steps, {len(self.failures)} failures"
        )
        return "\n".join([head, *self.failures[:20]])


def sweep(kind: str, faults: tuple[FaultKind, ...], *, every: int, calls_hit: int = 1, first: int = 0) -> Count:
    files = prepared()
    calm = Run(files.fork()).start(train(kind))
    assert calm.errors == [None, None], calm.errors
    assert check(calm, deep=True) == 4
    assert calm.acknowledged == [[2, 3, 4]] * 2
    count = Count(sum(len(view.calls) for view in calm.views))
    jobs = [(rank, call) for rank in range(WORLD) for call in calm.views[rank].calls]
    for rank, call in jobs[first::every]:
        for fault in faults:
            if not fault.applies_to(call.operation):
                continue
            run = Run(files.fork()).start(train(kind), (rank, Fault(fault, call.index, calls=calls_hit)))
            count.runs += 1
            count.crashed += isinstance(run.errors[rank], SimulatedCrash)
            count.lost += isinstance(run.errors[1 - rank], RankLost)
            count.moved_on += run.acknowledged == [[2, 3, 4]] * 2
            where = f"rank {rank}, {fault.value} at call {call.index} ({call.operation} {call.path})"
            try:
                if fault in (FaultKind.CRASH, FaultKind.CRASH_AFTER):
                    assert isinstance(run.errors[rank], SimulatedCrash | None)
                    assert isinstance(run.errors[1 - rank], CnrStoreError | None), run.errors
                check(run, deep=count.runs % 10 == 0)
                if run.views[rank].deliver_delayed():
                    check(run, deep=False)
            except Exception as error:  # noqa: BLE001 - a sweep reports every failure and goes on
                count.failures.append(f"{where}: {type(error).__name__}: {error}; ranks ended with {run.errors}")
    return count


def test_a_rank_that_cannot_read_its_won_record_goes_on_with_the_others() -> None:
    files = prepared()
    calm = Run(files.fork()).start(train("rows"))
    reads = [call for call in calm.views[1].calls if call.operation == "read" and "/commits/" in call.path]

    for call in reads[-3:]:  # one for each save
        run = Run(files.fork()).start(train("rows"), (1, Fault(FaultKind.FAIL_BEFORE, call.index)))

        assert run.errors == [None, None]
        assert run.acknowledged == [[2, 3, 4]] * 2
        assert check(run, deep=True) == 4


CI_FAULTS = (FaultKind.CRASH, FaultKind.CRASH_AFTER, FaultKind.FAIL_BEFORE, FaultKind.LOST_REPLY)


@pytest.mark.parametrize(("kind", "first"), [("rows", 0), ("columns", 1)])
def test_two_ranks_survive_a_fault_at_any_fourth_storage_call(kind: str, first: int) -> None:
    count = sweep(kind, CI_FAULTS, every=4, first=first)
    sys.stdout.write(f"{count}\n")

    assert not count.failures, str(count)
    assert count.crashed > 10
    assert count.lost > 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("calls_hit", [1, 40])
@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_two_ranks_survive_every_fault_at_every_storage_call(kind: str, calls_hit: int) -> None:
    count = sweep(kind, tuple(FaultKind), every=1, calls_hit=calls_hit)
    sys.stdout.write(f"{count}\n")

    assert not count.failures, str(count)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_between_any_two_messages_leaves_a_whole_state(dead: int) -> None:
    files = prepared()
    ends = []
    at = 0
    while True:
        at += 1
        run = Run(files.fork()).start(train("rows"), dies_at=(dead, at))
        step = check(run, deep=False)
        ends.append(step)
        if run.errors[dead] is None:
            break
        assert isinstance(run.errors[dead], SimulatedCrash)
        assert isinstance(run.errors[1 - dead], RankLost | CommitStateUnknown), run.errors

    assert at > 10
    assert ends == sorted(ends)
    assert set(ends) == {1, 2, 3, 4}
