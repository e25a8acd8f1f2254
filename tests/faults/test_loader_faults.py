"""Every storage call of a loader goes wrong in every way: what was served stays whole, and the next poll heals.

The oracle is what the training saved, by version. While a fault lasts a loader may stay where it is; it never serves
anything that is no version, never goes back, and never raises out of a poll.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from cnr_store import CnrStoreError, CompactionPolicy, RetentionPolicy, Store, TableOptions, collect_garbage
from cnr_store.format.commit_record import is_live
from cnr_store.maintenance.compaction import compact_run
from cnr_store.serving import Loader
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem, SimulatedCrash
from tests.support.loader_checks import opened_loader
from tests.support.memory import created, opened
from tests.support.store_oracle import same_bits

ROWS, DIM = 12, 2
KINDS = [kind for kind in FaultKind if kind is not FaultKind.STALL]
Values = dict[str, np.ndarray[Any, Any]]


class Training:
    """What happens to a store, in an order, and what each version holds."""

    def __init__(self) -> None:
        self.step = 0
        self.values: Values = {"t": np.zeros((ROWS, DIM), np.float32), "u": np.ones((ROWS, DIM), np.float32)}
        self.by_version: dict[int, Values] = {}
        self.dense: dict[int, float] = {}

    def acts(self) -> list[Callable[[Store], None]]:
        """Deltas, a compaction, a new baseline after a collection, a rollback, many saves, a table that goes."""
        return [
            self.save,
            self.compact,
            self.save,
            self.rebase_and_collect,
            self.roll_back,
            self.save,
            partial(self.save, times=10),
            self.drop_table,
        ]

    def begin(self, store: Store) -> None:
        with store.writer() as writer, writer.begin(0, "baseline") as txn:
            self.fill(txn)
        self.note(store)

    def fill(self, txn: Any) -> None:
        for name, values in self.values.items():
            txn.write_table(name, values, options=TableOptions(scale=0.25))
        txn.put_dense({"w": np.full(2, self.step, np.float32)})

    def save(self, store: Store, times: int = 1) -> None:
        with store.writer() as writer:
            writer.restore()
            for _ in range(times):
                self.step += 1
                rows = np.asarray([self.step % ROWS, ROWS + self.step % 3]) % ROWS
                rows = np.unique(rows)
                self.values = {name: values.copy() for name, values in self.values.items()}
                self.values["t"][rows] = self.step
                with writer.begin(self.step) as txn:
                    txn.write_rows("t", rows, self.values["t"][rows])
                    txn.put_dense({"w": np.full(2, self.step, np.float32)})
                self.note(store)
        self.note(store)

    def compact(self, store: Store) -> None:
        assert compact_run(store, policy=CompactionPolicy(max_chain=1), force=True).outcome == "committed"
        self.note(store)

    def rebase_and_collect(self, store: Store) -> None:
        self.step += 1
        self.values = {name: values + np.float32(self.step) for name, values in self.values.items()}
        with store.writer() as writer, writer.begin(self.step, "baseline") as txn:
            self.fill(txn)
        self.note(store)
        self.save(store, times=2)
        collect_garbage(
            store, policy=RetentionPolicy(keep_last=3), grace_s=0, orphan_age_s=0, dry_run=False, force=True
        )
        self.note(store)

    def roll_back(self, store: Store) -> None:
        head = store.head().record
        version = [v for v in sorted(self.by_version) if v < head.v and self.dense[v] < self.step and is_live(head, v)][
            -1
        ]
        store.rollback(version)
        self.values = self.by_version[version]
        self.note(store, dense=self.dense[version])

    def drop_table(self, store: Store) -> None:
        self.step += 1
        self.values = {"t": self.values["t"]}
        with store.writer() as writer:
            writer.restore()
            with writer.begin(self.step) as txn:
                txn.drop_table("u")
                txn.put_dense({"w": np.full(2, self.step, np.float32)})
        self.note(store)

    def note(self, store: Store, dense: float | None = None) -> None:
        """Every version that is not known yet, up to the newest, has this state."""
        for version in range(max(self.by_version, default=-1) + 1, store.latest_version() + 1):
            record = store.record(version)
            is_saved = record.kind in ("baseline", "delta", "rollback") or version == store.latest_version()
            before = self.by_version.get(version - 1, {})
            self.by_version[version] = self.values if is_saved else before
            last = self.dense.get(version - 1, 0.0)
            self.dense[version] = (float(self.step) if dense is None else dense) if is_saved else last


class World:
    """The files after each act, and what every version is; made once."""

    def __init__(self) -> None:
        training = Training()
        self.steps: list[IsolatedMemoryFileSystem] = []
        self.heads: list[int] = []
        files = IsolatedMemoryFileSystem()
        created(files).close()
        for act in (training.begin, *training.acts()):
            files = files.fork()
            with opened(files) as store:
                act(store)
                self.heads.append(store.latest_version())
            self.steps.append(files)
        self.by_version, self.dense = training.by_version, training.dense

    def check(self, loader: Loader) -> None:
        """What is served is what was saved as that version."""
        expected = self.by_version[loader.version]
        assert set(loader.tables) == set(expected)
        batch = loader.lookup_many(dict.fromkeys(expected, np.arange(ROWS)), dense=["w"])
        for name, values in expected.items():
            assert same_bits(batch.rows[name], values), (loader.version, name)
        assert batch.dense["w"].tolist() == [self.dense[loader.version]] * 2


@pytest.fixture(scope="module")
def world() -> World:
    return World()


class Process(FaultyFileSystem):
    """A process's view of a store that changes under it."""

    def see(self, files: IsolatedMemoryFileSystem) -> None:
        """Go on with files that others have written meanwhile; what this process wrote is kept."""
        files = files.fork()
        for path in self.inner.find("/root/leases"):
            files.pipe_file(path, self.inner.cat_file(path))
        self.inner = files


def loader_of(fs: Process, **options: Any) -> Loader:
    return opened_loader(opened(fs), **options)


def live(world: World, fault: Fault | None, options: dict[str, Any]) -> Process:
    """One life of a loader beside the training, with a fault somewhere in it."""
    fs = Process(world.steps[0].fork(), fault=fault)
    patience = 1 if fault is None else fault.calls
    loader = None
    for _ in range(patience + 1):
        try:
            loader = loader_of(fs, **options)
            break
        except (CnrStoreError, SimulatedCrash):
            if fs.is_crashed:
                fs = Process(fs.inner)
    assert loader is not None
    world.check(loader)
    # The last of them twice: a look at a store without news.
    for files, head in zip([*world.steps[1:], world.steps[-1]], [*world.heads[1:], world.heads[-1]], strict=True):
        fs.see(files)
        for _ in range(patience + 1):
            before = loader.version
            try:
                poll = loader.poll()
            except SimulatedCrash:
                loader.close()
                fs = Process(fs.inner)
                loader = loader_of(fs, **options)
                continue
            loader.apply()
            world.check(loader)
            assert loader.version >= before
            assert poll.error is None or fault is not None
            if poll.error is None:
                break
        assert loader.version == head
    loader.close()
    return fs


LIVES: list[dict[str, Any]] = [{}, {"publish": "apply", "cursor": "c", "kept_as": "codes"}]


@pytest.mark.parametrize("options", LIVES, ids=["poll", "apply"])
def test_a_calm_life_follows_everything(world: World, options: dict[str, Any]) -> None:
    fs = live(world, None, options)

    assert fs.count() > 60


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("options", LIVES, ids=["poll", "apply"])
def test_every_call_may_fail(world: World, options: dict[str, Any], calls: int) -> None:
    every = 3
    check_every(world, options, calls, every)


@pytest.mark.soak
@pytest.mark.parametrize("calls", [1, 2, 7])
@pytest.mark.parametrize("options", LIVES, ids=["poll", "apply"])
def test_every_call_may_fail_in_every_way(world: World, options: dict[str, Any], calls: int) -> None:
    check_every(world, options, calls, 1)


def check_every(world: World, options: dict[str, Any], calls: int, every: int) -> None:
    calm = live(world, None, options)
    runs = 0
    for number, call in enumerate(calm.calls[calls % every :: every]):
        kinds = [kind for kind in KINDS if kind.applies_to(call.operation)]
        for kind in kinds if every == 1 else kinds[number % len(kinds) :: len(kinds)]:
            live(world, Fault(kind, call.index, calls=calls), options)
            runs += 1
    assert runs > 20
