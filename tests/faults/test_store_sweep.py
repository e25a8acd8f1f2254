"""A single writer's life with every fault at every storage call: a fresh process sees an acknowledged state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import fsspec
import numpy as np
import pytest

from cnr_store import CnrStoreError, Store, TableOptions, Transaction, Writer
from cnr_store.errors import CommitStateUnknown, NotAStore, VersionNotFound
from tests.support.faulty import FaultyFileSystem
from tests.support.memory import created, opened
from tests.support.sweep import CI_FAULTS, explained, survived

SCALE = np.float32(0.03125)
ROWS, DIM = 24, 4
State = dict[str, np.ndarray[Any, Any]]


@dataclass
class Model:
    """The training values: what a restore is compared with, never what the writer wrote."""

    exact: np.ndarray[Any, Any]
    slot: np.ndarray[Any, Any]
    coarse: np.ndarray[Any, Any]
    dense: np.ndarray[Any, Any]
    dirty: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)

    @classmethod
    def fresh(cls) -> Model:
        rng = np.random.default_rng(7)
        return cls(
            rng.standard_normal((ROWS, DIM)).astype(np.float32),
            rng.random(ROWS).astype(np.float32),
            rng.standard_normal((ROWS, DIM)).astype(np.float32),
            rng.standard_normal(5).astype(np.float32),
        )

    def train(self, step: int) -> None:
        rng = np.random.default_rng(step)
        rows = rng.choice(ROWS, 6, replace=False)
        self.exact[rows] += rng.standard_normal((6, DIM)).astype(np.float32)
        self.coarse[rows] += rng.standard_normal((6, DIM)).astype(np.float32)
        self.slot[rows] += 1
        self.dense += np.float32(1)
        self.dirty |= {int(row) for row in rows}
        self.deleted -= self.dirty
        self.absent -= self.dirty

    def state(self) -> State:
        """What a reader must see: exact tables to the bit, the lattice as the rounded training values."""
        codes = np.rint(self.coarse / SCALE) + 0.0  # the lattice has no -0.0
        expected = {
            "exact": self.exact.copy(),
            "slot": self.slot.copy(),
            "coarse": (codes * SCALE).astype(np.float32),
            "dense": self.dense.copy(),
        }
        gone = sorted(self.deleted | self.absent)
        expected["exact"][gone] = 0
        expected["slot"][gone] = 0
        return expected


def write_full(txn: Transaction, model: Model) -> None:
    txn.write_table("exact", model.exact, slots={"m": model.slot}, options=TableOptions.exact())
    txn.write_table("coarse", model.coarse, options=TableOptions(scale=float(SCALE)))


def write_delta(txn: Transaction, model: Model) -> None:
    rows = np.asarray(sorted(model.dirty), np.int64)
    txn.write_rows("exact", rows, model.exact[rows], slots={"m": model.slot[rows]})
    txn.write_rows("coarse", rows, model.coarse[rows])
    if model.deleted:
        txn.delete_rows("exact", np.asarray(sorted(model.deleted), np.int64))


def read(store: Store) -> State:
    snapshot = store.snapshot()
    exact, slot = np.empty((ROWS, DIM), np.float32), np.empty(ROWS, np.float32)
    snapshot.table("exact").read_rectangle(values=exact, slots={"m": slot})
    coarse = snapshot.table("coarse").read()
    return {"exact": exact, "slot": slot, "coarse": coarse, "dense": snapshot.read_dense("dense")}


def same(left: State, right: State) -> bool:
    return all(np.array_equal(left[name].view(np.int32), right[name].view(np.int32)) for name in left)


def is_empty(store: Store) -> bool:
    """Whether nothing was saved yet, by a creation that came to its end or by one that did not."""
    try:
        return store.snapshot().is_empty
    except VersionNotFound:
        return True


class Life:
    """Baseline, deltas, a delete, tag, rollback, restore, a baseline from the mirror; retried as a trainer would."""

    def __init__(self, *, starts_empty: bool) -> None:
        self.starts_empty = starts_empty
        self.possible: list[State] = []

    def prepare(self, fs: fsspec.AbstractFileSystem) -> None:
        if not self.starts_empty:
            self.save(created(fs).writer(), Model.fresh(), 0)

    def save(self, writer: Writer, model: Model, step: int, kind: Any = "delta") -> None:
        with writer.begin(step, kind) as txn:
            if txn.kind == "baseline" and not writer.snapshot.tables:
                write_full(txn, model)
            else:
                write_delta(txn, model)
            txn.put_dense({"dense": model.dense})
            txn.put_scalars({"step": step})
            txn.put_document("reader/0", {"position": (step, b"batch")})

    def attempt(
        self,
        fs: FaultyFileSystem,
        writer: Writer,
        model: Model,
        step: int,
        acknowledged: list[Any],
        kind: Any = "delta",
    ) -> None:
        """Save, and treat each outcome as a trainer must; a save that nothing disturbs is never refused."""
        self.possible.append(model.state())
        try:
            with explained(fs):
                self.save(writer, model, step, kind)
        except CommitStateUnknown:
            with explained(fs):
                if writer.settle() is None:
                    return
        except CnrStoreError:
            return
        acknowledged.append(len(self.possible) - 1)
        model.dirty.clear()
        model.absent |= model.deleted
        model.deleted.clear()

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        self.possible = [Model.fresh().state()]
        model = Model.fresh()
        with explained(fs):
            if self.starts_empty:
                store = created(fs)
                writer = store.writer()
            else:
                acknowledged.append(0)
                store = opened(fs)
                writer = store.writer()
                writer.restore()
        if self.starts_empty:
            self.attempt(fs, writer, model, 0, acknowledged)
            if not writer.snapshot.tables:
                return
        for step in (1, 2):
            model.train(step)
            self.attempt(fs, writer, model, step, acknowledged)
        version = writer.head.record.v
        good = acknowledged[-1]
        with explained(fs):
            if same(read(store), self.possible[good]):
                store.tag("good", version)
        model.train(3)
        gone = {0, 1, 2} - model.dirty
        model.deleted |= gone
        self.attempt(fs, writer, model, 3, acknowledged)
        self.attempt(fs, writer, model, 4, acknowledged)
        self.possible.append(self.possible[good])
        back = len(self.possible) - 1
        again = Model.fresh()
        with explained(fs):
            store.rollback(version)
            acknowledged.append(back)
            writer = store.writer()
            writer.restore({"exact": {"values": again.exact, "m": again.slot}, "coarse": {"values": again.coarse}})
            again.dense = store.snapshot().read_dense("dense")
        again.train(5)
        self.attempt(fs, writer, again, 5, acknowledged)
        again.train(6)
        self.attempt(fs, writer, again, 6, acknowledged, kind="baseline")

    def check(self, fs: fsspec.AbstractFileSystem, acknowledged: list[Any]) -> None:
        assert isinstance(fs, FaultyFileSystem)
        fs = FaultyFileSystem(fs.inner.fork())  # the check goes on training; a put still under way lands without it
        try:
            store = opened(fs)
        except NotAStore:
            assert not acknowledged
            return
        if is_empty(store):
            assert not acknowledged
            writer = store.writer()
            self.save(writer, Model.fresh(), 100)
            assert same(read(store), Model.fresh().state())
            return
        oldest = acknowledged[-1] if acknowledged else 0
        seen = read(store)
        assert any(same(seen, state) for state in self.possible[oldest:]), (
            "the head is no acknowledged or attempted state"
        )
        tags = store.tags()
        if "good" in tags:
            store.snapshot(tag="good").table("coarse").read()
        # A trainer that comes back goes on from what it finds.
        writer = store.writer()
        writer.restore()
        rows = np.arange(3, dtype=np.int64)
        with writer.begin(200) as txn:
            txn.write_rows("coarse", rows, np.full((3, DIM), 8 * SCALE, np.float32))
        after = read(store)
        assert (after["coarse"][:3] == 8 * SCALE).all()
        assert np.array_equal(after["coarse"][3:], seen["coarse"][3:])
        assert np.array_equal(after["exact"].view(np.int32), seen["exact"].view(np.int32))


@pytest.mark.parametrize("starts_empty", [True, False])
def test_calm_run_is_right(starts_empty: bool) -> None:
    report = survived(Life(starts_empty=starts_empty), (), every=1)

    assert report.calls > 100


@pytest.mark.parametrize("starts_empty", [True, False])
def test_single_writer_survives_a_fault_at_each_kind_of_storage_call(starts_empty: bool) -> None:
    survived(Life(starts_empty=starts_empty), CI_FAULTS, every=10)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("starts_empty", [True, False])
@pytest.mark.parametrize("calls_hit", [1, 40])
def test_single_writer_survives_every_fault_at_every_storage_call(starts_empty: bool, calls_hit: int) -> None:
    survived(Life(starts_empty=starts_empty), calls_hit=calls_hit)
