"""A store's whole life with a fault at every storage call: two ranks that train, and the jobs that maintain the store.

After each run a fresh process sees exactly an acknowledged state, every live version is what was trained, and calm
maintenance leaves no object that nothing refers to.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cnr_store import CnrStoreError, Store, TableOptions, verify_store
from cnr_store.errors import CommitStateUnknown, RankLost, StorageFailure
from cnr_store.format.commit_record import is_live
from cnr_store.log.retention import RetentionPolicy
from cnr_store.maintenance.compaction import CompactionPolicy, compact_run
from cnr_store.maintenance.gc import collect_garbage
from cnr_store.read.snapshot import Snapshot
from cnr_store.types import Rectangle
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.writer import Writer
from tests.faults.mortal_rank import Process
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem, SimulatedCrash
from tests.support.life import end_leases, listed, referenced
from tests.support.memory import created, opened
from tests.support.ranks import ThreadRank, on_ranks
from tests.support.sweep import CI_FAULTS, kind_of

ROWS, DIM, WORLD, SCALE = 12, 4, 2, 0.25
OPTIONS = TableOptions(scale=SCALE)
CUTS = {
    "rows": [Rectangle((0, 7), (0, DIM)), Rectangle((7, ROWS), (0, DIM))],
    "columns": [Rectangle((0, ROWS), (0, 3)), Rectangle((0, ROWS), (3, DIM))],
}
"""The part of the table that each rank has."""
Array = np.ndarray[Any, Any]
Steps = tuple[int, ...]
"""A state by what it was trained from: the steps, in order. The same step on another state is another state."""


# ---- the training, as its oracle knows it


def values_of(steps: Steps) -> Array:
    """The table after these steps: multiples of the scale, so every state is stored exactly."""
    values = np.random.default_rng(0).integers(-9, 9, (ROWS, DIM))
    for step in steps[1:]:
        rows = rows_of(step)
        values[rows] += np.random.default_rng(step).integers(-90, 90, (len(rows), DIM)) + 100
    return (values * SCALE).astype(np.float32)


def rows_of(step: int) -> Array:
    """Rows of both ranks change in every step."""
    return np.arange(step % 3, ROWS, 3)


def dense_of(steps: Steps) -> Array:
    """A tensor that seldom changes, so that later segments refer to the bytes of earlier ones."""
    return np.asarray([max(step for step in steps if step % 4 == 0), 7], np.float32)


# ---- one run of the life


@dataclass
class Run:
    """What the processes of one life went through.

    ``events`` are the states that rank 0 tried to save, and those that anybody was told are there, in order.
    ``dies_at``: a rank, and the message before which it dies.
    """

    files: IsolatedMemoryFileSystem
    fault: tuple[str, Fault] | None = None
    cut: str = "rows"
    dies_at: tuple[int, int] | None = None
    views: dict[str, FaultyFileSystem] = field(default_factory=dict)
    events: list[tuple[str, Steps]] = field(default_factory=list)
    tagged: dict[str, int] = field(default_factory=dict)
    ends: dict[str, BaseException | None] = field(default_factory=dict)

    def view(self, process: str) -> FaultyFileSystem:
        fault = self.fault[1] if self.fault is not None and self.fault[0] == process else None
        self.views[process] = FaultyFileSystem(self.files, fault=fault)
        return self.views[process]

    def job(self, name: str, work: Callable[[Run, Store], None]) -> None:
        """Run a job of the store's maintenance in a process of its own; the life goes on whatever becomes of it."""
        self.ends[name] = None
        try:
            with opened(self.view(name)) as store:
                work(self, store)
        except (SimulatedCrash, CnrStoreError) as error:
            self.ends[name] = error

    def start(self, program: Callable[[Run, Process], None]) -> Run:
        """Run the program on both ranks; all are gone when this returns."""
        names = [f"rank {number}" for number in range(WORLD)]
        views = [self.view(name) for name in names]

        def body(rank: ThreadRank) -> None:
            name = names[rank.rank]
            process = Process(views[rank.rank], rank)
            if self.dies_at is not None and self.dies_at[0] == rank.rank:
                process.dies_at_exchange = self.dies_at[1]
            self.ends[name] = None
            try:
                program(self, process)
            except BaseException as error:  # noqa: BLE001 - a dead process among them
                self.ends[name] = error
            finally:
                rank.leave()

        on_ranks(WORLD, body, timeout_s=20)
        return self

    def deliver_delayed(self) -> int:
        return sum(view.deliver_delayed() for view in self.views.values())

    def acknowledge(self, steps: Steps) -> None:
        """Note that a save is there, once: the slower of the ranks may say so when the next one is tried already."""
        if ("acknowledged", steps) not in self.events:
            self.events.append(("acknowledged", steps))

    def known(self) -> dict[int, set[Steps]]:
        """The states that were ever tried, by their last step."""
        found: dict[int, set[Steps]] = {}
        for _, steps in self.events:
            found.setdefault(steps[-1], set()).add(steps)
        return found

    def allowed(self) -> set[Steps]:
        """What the head may be: the last acknowledged state, or one that was tried since."""
        last = max(index for index, (kind, _) in enumerate(self.events) if kind == "acknowledged")
        return {steps for _, steps in self.events[last:]}


class Trainer:
    """One rank's training."""

    def __init__(self, run: Run, process: Process, store: Store) -> None:
        self.run, self.rank, self.tile = run, process.rank, CUTS[run.cut][process.rank]
        self.values = np.empty((self.tile.num_rows, self.tile.width), np.float32)
        self.steps: Steps = ()
        self.writer: Writer = store.writer(ranks=process, shards={"t": [self.tile]})

    def restore(self) -> None:
        """Take the head's state; which one that is the saved counter of steps tells."""
        snapshot = self.writer.restore({"t": {"values": self.values}})
        steps = snapshot.scalars["steps"]
        assert isinstance(steps, list)
        self.steps = tuple(int(step) for step in steps if isinstance(step, int))
        assert np.array_equal(self.values, self.own(values_of(self.steps))), "restored another state"

    def own(self, values: Array) -> Array:
        """The part of the table that this rank has."""
        return values[slice(*self.tile.rows), slice(*self.tile.columns)]

    def train(self, step: int, kind: Any = "delta", base: Any = "head") -> None:
        """Train a step and save it; treat the outcomes as a trainer does: restore and try again."""
        for _ in range(3):
            steps = (*self.steps, step)
            if self.rank == 0:
                self.run.events.append(("tried", steps))
            try:
                self.save(steps, kind, base)
                break
            except RankLost:
                if self.writer._state.pending is not None and self.writer.settle() is not None:
                    self.run.acknowledge(steps)
                raise
            except CommitStateUnknown:
                if self.writer.settle() is not None:
                    break
            except CnrStoreError:
                pass
            self.restore()
        else:
            raise StorageFailure("three attempts failed")
        self.steps = steps
        self.run.acknowledge(steps)

    def save(self, steps: Steps, kind: Any, base: Any) -> None:
        values, tile = values_of(steps), self.tile
        with self.writer.begin(steps[-1], kind, base=base) as txn:
            if txn.kind == "baseline":
                if "t" not in txn.tables:
                    txn.declare_tables({"t": [Declaration(self.own(values), {}, OPTIONS)]})
                txn.write_table("t", self.own(values), rectangle=tile)
            else:
                rows = rows_of(steps[-1]) if base == "head" else np.arange(ROWS)
                rows = rows[(rows >= tile.rows[0]) & (rows < tile.rows[1])]
                txn.write_rows("t", rows, values[rows, slice(*tile.columns)], rectangle=tile)
            if self.rank == 0:
                txn.put_scalars({"steps": list(steps)})
                txn.put_dense({"d": dense_of(steps)})
            txn.put_document(f"rank/{self.rank}", steps[-1])


def begin(run: Run, process: Process) -> None:
    """What every run starts from: a baseline and three deltas."""
    with opened(process.fs) as store:
        trainer = Trainer(run, process, store)
        for step in range(4):
            trainer.train(step)


def life(run: Run, process: Process) -> None:
    """Restore, train and save, while jobs come and go between the steps of rank 0."""
    with opened(process.fs) as store:
        trainer = Trainer(run, process, store)
        trainer.restore()
        trainer.train(4)
        for step, job in enumerate(JOBS, 5):
            if process.rank == 0:
                run.job(job.__name__, job)
            trainer.train(step, *KINDS.get(step, ()))


KINDS = {6: ("delta", "baseline"), 8: ("baseline",)}


def saves(run: Run, process: Process) -> None:
    """Restore and save: two deltas, then a baseline from the mirrors and the values given."""
    with opened(process.fs) as store:
        trainer = Trainer(run, process, store)
        trainer.restore()
        for step, kind in ((4, "delta"), (5, "delta"), (6, "baseline")):
            trainer.train(step, kind)


def first_job(run: Run, store: Store) -> None:
    """Name versions, and compact two deltas."""
    store.set_channel("serving")
    tag(run, store, "early")
    compact(store, (1, 3))


def second_job(run: Run, store: Store) -> None:
    """Read under a lease, compact the baseline and a delta, and delete what nobody needs any more."""
    with store.lease() as lease:
        read(run, store.snapshot(version=lease.version))
        compact(store, (0, 2))
        collect(store, keep_last=2)


def third_job(run: Run, store: Store) -> None:
    """Go back to a tagged version."""
    target = store.snapshot(tag="early") if "early" in store.tags() else store.snapshot()
    steps = read(run, target)
    run.events.append(("tried", steps))
    store.rollback(target.version)
    run.events.append(("acknowledged", steps))


def fourth_job(run: Run, store: Store) -> None:
    """Move names again, compact by the policy, and collect all but the newest."""
    store.set_channel("serving")
    tag(run, store, "late")
    compact_run(store, policy=CompactionPolicy(max_chain=2), force=True)
    collect(store, keep_last=1)


def compact(store: Store, run: tuple[int, int]) -> None:
    if len(store.head().record.chain) >= run[1]:
        compact_run(store, run=run, force=True)


def collect(store: Store, *, keep_last: int) -> None:
    """Delete at once what is not kept: no grace, and whatever is under way counts as left behind."""
    policy = RetentionPolicy(keep_last=keep_last)
    collect_garbage(store, policy=policy, grace_s=0, orphan_age_s=0, dry_run=False, force=True)


JOBS = (first_job, second_job, third_job, fourth_job)


def tag(run: Run, store: Store, name: str) -> None:
    version = store.head().record.v
    store.tag(name, version)
    run.tagged[name] = version


# ---- what a fresh process finds


def read(run: Run, snapshot: Snapshot) -> Steps:
    """Read a state whole, and say which one of those that were tried it is."""
    values, dense = snapshot.table("t").read(), snapshot.read_dense("d")
    for steps in run.known().get(snapshot.step, ()):
        if np.array_equal(values, values_of(steps)):
            assert np.array_equal(dense, dense_of(steps)), f"version {snapshot.version} has another dense tensor"
            assert [snapshot.read_document(f"rank/{k}") for k in range(WORLD)] == [steps[-1]] * WORLD
            return steps
    raise AssertionError(f"version {snapshot.version} (step {snapshot.step}) is no state that was trained")


def check(run: Run) -> Steps:
    """Every live version is what was trained, and the head an acknowledged state; returns which."""
    with opened(run.files) as store:
        head = store.head().record
        found = read(run, store.snapshot())
        assert found in run.allowed(), f"the head is {found}, acknowledged or tried since is {run.allowed()}"
        seen = set()
        for record in store.log():
            if record.chain and is_live(head, record.v) and record.chain not in seen:
                seen.add(record.chain)
                read(run, store.snapshot(version=record.v))
        assert run.tagged.items() <= head.tags.items(), "a tag is lost"
        for name, version in (*head.tags.items(), *head.channels.items()):
            assert is_live(head, version), f"{name} points to version {version}, which is not live"
    return found


def go_on(run: Run, process: Process) -> None:
    """Both ranks come back, restore and save once more."""
    with opened(process.fs) as store:
        trainer = Trainer(run, process, store)
        trainer.restore()
        trainer.train(100)


@dataclass
class Count:
    calls: int
    faults: int
    runs: int = 0
    left_alone: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {name}" for name, count in sorted(self.ends.items()))
        head = (
            f"{self.calls} calls of all processes x {self.faults} faults: {self.runs} runs in "
            f"{time.perf_counter() - self.began:.0f} s ({ends}), {len(self.failures)} failures"
        )
        return "\n".join([head, *self.failures[:20]])


def prepared() -> Run:
    files = IsolatedMemoryFileSystem()
    created(files).close()
    run = Run(files).start(begin)
    assert set(run.ends.values()) == {None}, run.ends
    return run


def copied(run: Run, fault: tuple[str, Fault] | None = None, **changes: Any) -> Run:
    """A run of its own that goes on where another one ended."""
    return Run(run.files.fork(), fault, events=list(run.events), tagged=dict(run.tagged), **changes)


def aftermath(run: Run, *, goes_on: bool) -> None:
    """What must hold after any life, and after the calm maintenance behind it."""
    check(run)
    if run.deliver_delayed():
        check(run)
    end_leases(run.files)
    with opened(run.files) as store:
        while compact_run(store, policy=CompactionPolicy(max_chain=2), force=True).outcome == "committed":
            pass
        for _ in range(2):
            collect(store, keep_last=1)
        there, needed = listed(run.files), referenced(store)
    assert there == needed, f"orphans: {sorted(there - needed)[:3]}, missing: {sorted(needed - there)[:3]}"
    check(run)
    if goes_on:
        after = copied(run).start(go_on)
        assert set(after.ends.values()) == {None}, after.ends
        check(after)
        with opened(after.files) as store:
            report = verify_store(store, deep=True)
        assert report.is_sound, report


Job = tuple[str, Fault, str]
"""A process, the fault that it meets, and where."""


def jobs(calm: Run, faults: tuple[FaultKind, ...], calls_hit: int) -> Iterator[tuple[str, Job]]:
    """Every call of every process with every fault that can happen to it, and what the call does to which object."""
    for process, view in calm.views.items():
        for call in view.calls:
            for kind in faults:
                if kind.applies_to(call.operation):
                    where = f"{process}, {kind.value} at call {call.index} ({call.operation} {call.path})"
                    job = process, Fault(kind, call.index, calls=calls_hit), where
                    yield f"{call.operation} {kind_of(call.path)}", job


def one_of_each(every: Iterable[tuple[str, Job]]) -> list[Job]:
    """A job for each operation on each kind of object: its first call, with one fault after the other in turn."""
    kinds: dict[str, list[Job]] = {}
    for kind, job in every:
        found = kinds.setdefault(kind, [])
        if not found or (job[0], job[1].at) == (found[0][0], found[0][1].at):
            found.append(job)
    return [found[number % len(found)] for number, found in enumerate(kinds.values())]


def sweep(
    faults: tuple[FaultKind, ...], *, cut: str, part: tuple[int, int], is_small: bool = False, calls_hit: int = 1
) -> Count:
    """Live once for each fault at each call, or `one_of_each`; of these the ``part``: which one, of how many."""
    start = prepared()
    calm = copied(start, cut=cut).start(life)
    assert set(calm.ends.values()) == {None}, calm.ends
    with opened(calm.files) as store:
        kinds = Counter(record.kind for record in store.log())
    assert kinds["compact"] > 2, kinds
    assert {"baseline", "delta", "rollback", "tag", "channel", "expire"} <= kinds.keys()
    aftermath(calm, goes_on=True)
    count = Count(sum(len(view.calls) for view in calm.views.values()), len(faults))
    every = jobs(calm, faults, calls_hit)
    for process, fault, where in (one_of_each(every) if is_small else [job for _, job in every])[part[0] :: part[1]]:
        run = copied(start, (process, fault), cut=cut)
        count.runs += 1
        try:
            run.start(life)
            end = run.ends.get(process)
            count.ends["unharmed" if end is None else type(end).__name__] += 1
            unexpected = [
                error for error in run.ends.values() if not isinstance(error, SimulatedCrash | CnrStoreError | None)
            ]
            assert not unexpected, unexpected
            if process.startswith("rank") and isinstance(end, SimulatedCrash):
                count.left_alone += any(isinstance(error, RankLost) for error in run.ends.values())
            aftermath(run, goes_on=count.runs % 3 == 0)
        except Exception as error:  # noqa: BLE001 - a sweep reports every failure and goes on
            count.failures.append(f"{where}: {type(error).__name__}: {error}; ended with {run.ends}")
    return count


SHARES = 8
"""Tests that the full count is divided into, so that several can run at once."""


def test_a_life_survives_a_fault_at_some_storage_calls_of_each_process() -> None:
    counts = [sweep(CI_FAULTS, cut=cut, part=(number, 2), is_small=True) for number, cut in enumerate(CUTS)]
    sys.stdout.write("\n".join(map(str, counts)))

    assert not any(count.failures for count in counts), "\n".join(map(str, counts))
    assert sum(count.ends["SimulatedCrash"] for count in counts) > 10
    assert sum(count.left_alone for count in counts) > 3


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("calls_hit", [1, 40])
def test_a_life_survives_every_fault_at_every_storage_call(
    calls_hit: int, cut: str, share: int, capsys: pytest.CaptureFixture[str]
) -> None:
    count = sweep(tuple(FaultKind), cut=cut, part=(share, SHARES), calls_hit=calls_hit)
    with capsys.disabled():
        sys.stdout.write(f"share {share + 1} of {SHARES}, {cut}, {calls_hit} calls hit: {count}\n")

    assert not count.failures, str(count)


SAVED = [tuple(range(stop)) for stop in range(4, 8)]
"""The states before and after each save of `saves`."""


def test_a_rank_that_cannot_read_its_won_record_goes_on_with_the_others() -> None:
    start = prepared()
    calm = copied(start).start(saves)
    reads = [call for call in calm.views["rank 1"].calls if call.operation == "read" and "/commits/" in call.path]

    for call in reads[-3:]:  # one for each save
        run = copied(start, ("rank 1", Fault(FaultKind.FAIL_BEFORE, call.index))).start(saves)

        assert set(run.ends.values()) == {None}
        assert check(run) == SAVED[-1]


@pytest.mark.parametrize("dead", range(WORLD))
def test_a_rank_that_dies_between_any_two_messages_leaves_a_whole_state(dead: int) -> None:
    start = prepared()
    found = []
    for at in itertools.count(1):
        run = copied(start, dies_at=(dead, at)).start(saves)
        found.append(check(run))
        end, other = run.ends[f"rank {dead}"], run.ends[f"rank {1 - dead}"]
        if end is None:
            break
        assert isinstance(end, SimulatedCrash)
        assert isinstance(other, RankLost | CommitStateUnknown), run.ends

    assert len(found) > 10
    assert found == sorted(found)
    assert sorted(set(found)) == SAVED
