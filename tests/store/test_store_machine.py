"""A store against a model of the training: random lives of saves, failures, rollbacks and restarts.

The model holds training values; what a reader must see comes from them by plain numpy (`tests.support.store_oracle`),
never from what the writer wrote.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cnr_store import BadInput, Conflict, StorageFailure, Store, TableOptions, Transaction, Writer
from cnr_store.errors import DoesNotApply, Fenced
from cnr_store.segment.shards import Shard
from tests.support.faulty import Call, Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.memory import created, opened
from tests.support.store_oracle import (
    ABSENT,
    CODED,
    KINDS,
    HashedModel,
    TableModel,
    same_bits,
    training_slots,
    training_values,
)

DIM = 3
MOST_ROWS = 14
HASHED = TableOptions(scale=0.25, slot_bits="exact")
Array = np.ndarray[Any, Any]


class Flaky(FaultyFileSystem):
    """Fails on demand."""

    def meet(self, on_call: Callable[[Call], None] | None) -> None:
        self._on_call = on_call


@dataclass
class State:
    """Everything a checkpoint holds."""

    step: int = 0
    tables: dict[str, TableModel] = field(default_factory=dict)
    hashed: dict[str, HashedModel] = field(default_factory=dict)
    dense: dict[str, Array] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> State:
        return State(
            self.step,
            {name: table.copy() for name, table in self.tables.items()},
            {name: table.copy() for name, table in self.hashed.items()},
            dict(self.dense),
            dict(self.scalars),
        )


beginning = initialize(
    mirror=st.sampled_from(["memory", "memory", "mmap", "none"]),
    seed=st.integers(0, 2**32 - 1),
)
"""Decorates `create` of this machine and of those that inherit from it."""


class StoreMachine(RuleBasedStateMachine):
    """Rules change the model and the store alike; invariants compare them."""

    @beginning
    def create(self, mirror: Any, seed: int) -> None:
        self.inner = IsolatedMemoryFileSystem()
        self.fs = Flaky(self.inner)
        self.store = created(self.fs)
        self.writer = self.store.writer(mirror=mirror)
        self.rng = np.random.default_rng(seed)
        self.steps = itertools.count(1)
        self.names = itertools.count()
        self.state = State()
        self.is_fresh = False
        self.by_version: dict[int, State] = {}
        self.tagged: dict[str, State] = {}
        self.changed: dict[str, set[int]] = {}
        """Per table the rows that a one-shot delta must hold."""
        self.compared: object = None
        """The chain that was compared with the model last."""
        self.full([str(kind) for kind in self.rng.choice(sorted(KINDS), 3, replace=False)], 9)
        self.deltas(2)

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()
            self.store.close()

    # What a training does to its tables; each returns the model after a save of it.

    def new_table(self, txn: Transaction, state: State, name: str, kind: str, rows: int) -> None:
        values = training_values(kind, self.rng, rows, DIM)
        slots = training_slots(kind, self.rng, rows, DIM)
        self.spoil(kind, values)
        txn.write_table(name, values, slots=slots, options=KINDS[kind].options)
        table = TableModel(
            kind, np.zeros_like(values), {n: np.zeros_like(s) for n, s in slots.items()}, np.zeros(rows, np.uint8)
        )
        encoding: Any = txn.tables[name].encoding
        table.param_dtype = getattr(encoding, "param_dtype", "float16")
        table.write(np.arange(rows), values, slots)
        state.tables[name] = table

    def spoil(self, kind: str, values: Array) -> None:
        """A row diverges now and then."""
        if len(values) and self.rng.random() < 0.3:
            row, column = int(self.rng.integers(len(values))), int(self.rng.integers(DIM))
            beyond = [1e30] if kind in ("lattice", "lattice_wide") else []
            value = np.asarray([self.rng.choice([np.nan, np.inf, -np.inf, *beyond])], np.float32)
            bits = value.view(np.uint32) >> 16
            values[row, column] = (bits if KINDS[kind].dtype == "bfloat16" else value).astype(values.dtype)[0]

    def touch(self, txn: Transaction, name: str, table: TableModel, must: set[int] | None = None) -> set[int]:
        """Write random rows, some of them unchanged, and delete others."""
        chosen = self.rng.random(table.num_rows)
        write, delete = chosen < 0.35, (chosen > 0.85) & (self.rng.random() < 0.5)
        for row in must or ():
            if row < table.num_rows and not delete[row]:
                write[row] = True
        rows, gone = np.flatnonzero(write).astype(np.int64), np.flatnonzero(delete).astype(np.int64)
        values, slots = table.values[rows], {n: s[rows] for n, s in table.slots.items()}
        moved = self.rng.random(len(rows)) < 0.7
        fresh = training_values(table.kind, self.rng, len(rows), DIM)
        small = self.rng.random() < 0.5
        if small and table.kind in ("lattice", "exact", "exact_element", "lattice_wide"):
            with np.errstate(invalid="ignore"):
                fresh = (values + fresh * np.float32(0.05)).astype(np.float32)
        values[moved] = fresh[moved]
        for slot_name, slot in training_slots(table.kind, self.rng, len(rows), DIM).items():
            slots[slot_name][moved] = slot[moved]
        self.spoil(table.kind, values)
        calls = [
            lambda: txn.write_rows(name, rows, values, slots=slots, nonfinite="escape"),
            lambda: txn.delete_rows(name, gone),
        ]
        for call in calls if self.rng.random() < 0.5 else calls[::-1]:
            call()
        table.write(rows, values, slots)
        table.status[gone] = ABSENT
        return {int(row) for row in (*rows, *gone)}

    def touch_hashed(self, txn: Transaction, name: str, table: HashedModel, must: set[int]) -> set[int]:
        pool = np.asarray([-(2**63), -5, 0, 3, 7, 2**40, 2**63 - 1, *must], np.int64)
        chosen = np.unique(self.rng.choice(pool, int(self.rng.integers(0, 5))))
        chosen = np.unique(np.concatenate([chosen, np.asarray(sorted(must), np.int64)]))
        is_set = self.rng.random(len(chosen)) < 0.7
        keys, gone = chosen[is_set], chosen[~is_set]
        values = (self.rng.integers(-40, 40, (len(keys), DIM)) * 0.25).astype(np.float32)
        slot = self.rng.random(len(keys)).astype(np.float32)
        txn.write_rows(name, keys, values, slots={"m": slot})
        txn.delete_rows(name, gone)
        for at, key in enumerate(keys.tolist()):
            table.rows[key] = (values[at], slot[at])
        for key in gone.tolist():
            table.rows.pop(key, None)
        return {int(key) for key in chosen}

    def put_rest(self, txn: Transaction, state: State) -> None:
        """Dense tensors (new, changed, unchanged, not given, dropped) and scalars."""
        given: dict[str, Array] = {}
        for name in ("w", "b", "e"):
            fate = self.rng.integers(5)
            if name in state.dense and fate == 0:
                if self.writer.is_synced and name in self.writer.snapshot.dense:
                    txn.drop_dense(name)
                    del state.dense[name]
            elif name in state.dense and fate == 1:
                given[name] = state.dense[name]
            elif fate in (2, 3):
                shape = {"w": (3, 2), "b": (), "e": (0, 2)}[name]
                given[name] = np.asarray(self.rng.standard_normal(shape), np.float32)
        txn.put_dense(given)
        state.dense.update(given)
        state.scalars = {"step": state.step}
        txn.put_scalars(state.scalars)

    def won(self, state: State, changed: dict[str, set[int]] | None) -> None:
        """A save was acknowledged; ``changed`` is None for a baseline."""
        self.is_fresh = False
        self.state = state
        self.by_version[self.writer.head.record.v] = state.copy()
        if changed is None:
            self.changed = {}
        else:
            for name, rows in changed.items():
                self.changed.setdefault(name, set()).update(rows)

    def refine(self, txn: Transaction, state: State) -> None:
        """Halve the scales of lattices after a restore: the training continues with the restored values."""
        for name, table in state.tables.items():
            if table.kind not in ("lattice", "lattice_wide") or self.writer.mirrors.get(Shard(name)) is None:
                continue
            try:
                txn.refine_scale(name)
            except BadInput:
                continue  # some code would leave the range
            coded = table.status == CODED
            table.values[coded] = table.expected()["values"][coded]
            table.scale = table.step / 2

    # Rules.

    @rule(
        kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True),
        rows=st.integers(0, MOST_ROWS),
    )
    def full(self, kinds: list[str], rows: int) -> None:
        """A baseline of whole tables: some keep their schema, the others start a new generation."""
        state = State(next(self.steps))
        if self.writer.is_synced:
            state.dense = dict(self.state.dense)
        with self.writer.begin(state.step, "baseline") as txn:
            for kind in kinds:
                self.new_table(txn, state, f"t_{kind}", kind, rows)
            for name in set(txn.needs_whole_tables) | set(self.state.tables) | set(self.state.hashed):
                if name not in state.tables:
                    txn.drop_table(name)
            self.put_rest(txn, state)
        self.won(state, None)

    @precondition(lambda self: self.writer.is_synced)
    @rule()
    def full_from_mirrors(self) -> None:
        """A full of what changed: tables come from the mirror where there is one."""
        state = self.state.copy()
        state.step = next(self.steps)
        with self.writer.begin(state.step, "baseline") as txn:
            whole = txn.needs_whole_tables
            for name, table in state.tables.items():
                if name in whole:
                    self.rewrite(txn, name, table)
                else:
                    self.touch(txn, name, table)
            for name, hashed in state.hashed.items():
                hashed.rows.clear()
                self.touch_hashed_without_delete(txn, name, hashed)
            self.put_rest(txn, state)
        self.won(state, None)

    def touch_hashed_without_delete(self, txn: Transaction, name: str, hashed: HashedModel) -> None:
        keys = np.unique(self.rng.integers(-9, 9, 4))
        values = np.full((len(keys), DIM), 0.25, np.float32)
        txn.write_rows(name, keys, values, slots={"m": np.ones(len(keys), np.float32)})
        hashed.rows.update({int(key): (values[0], np.float32(1)) for key in keys})

    def rewrite(self, txn: Transaction, name: str, table: TableModel) -> None:
        """Every row again, at the encoding and scale that the table has."""
        values = training_values(table.kind, self.rng, table.num_rows, DIM)
        slots = training_slots(table.kind, self.rng, table.num_rows, DIM)
        txn.write_table(name, values, slots=slots)
        table.status[:] = CODED
        table.write(np.arange(table.num_rows), values, slots)

    @precondition(lambda self: self.writer.is_synced)
    @rule(saves=st.integers(1, 4))
    def deltas(self, saves: int) -> None:
        for _ in range(saves):
            self.delta()

    def delta(self) -> None:
        """Changed rows; now and then a table is new, resized or dropped."""
        # Chances are the seed's: drawn ones would lean to zero.
        resize = int(self.rng.integers(0, MOST_ROWS + 1))
        new = str(self.rng.choice(sorted(KINDS))) if self.rng.random() < 0.2 else None
        what = str(self.rng.choice(["rows", "rows", "rows", "resize", "resize", "drop", "hashed", "empty"]))
        one_shot = bool(self.rng.random() < 0.25)
        state = self.state.copy()
        state.step = next(self.steps)
        changed: dict[str, set[int]] = {}
        with self.writer.begin(state.step, base="baseline" if one_shot else "head") as txn:
            self.fill_delta(txn, state, changed, resize, new, what, one_shot)
        if one_shot:
            self.changed = {name: rows | self.changed.get(name, set()) for name, rows in self.changed.items()}
        self.won(state, changed)

    def fill_delta(
        self, txn: Transaction, state: State, changed: dict[str, set[int]], resize: int, new: str | None, what: str,
        one_shot: bool,
    ) -> None:  # fmt: skip
        if self.is_fresh and not one_shot and what == "rows":
            self.refine(txn, state)
        names = sorted(state.tables)
        if what == "drop" and names:
            txn.drop_table(names[0])
            del state.tables[names[0]]
            self.changed.pop(names[0], None)
        if what == "resize" and names:
            name = names[-1]
            before = state.tables[name].num_rows
            txn.resize_table(name, resize)
            state.tables[name].resize(resize)
            changed.setdefault(name, set()).update(range(resize, before))
        for name, table in state.tables.items():
            if what != "empty" or one_shot:
                must = self.changed.get(name, set()) if one_shot else set()
                changed.setdefault(name, set()).update(self.touch(txn, name, table, must))
        for name, hashed in state.hashed.items():
            must = self.changed.get(name, set()) if one_shot else set()
            changed.setdefault(name, set()).update(self.touch_hashed(txn, name, hashed, must))
        if what == "hashed" and "h" not in state.hashed:
            txn.create_table("h", dim=DIM, options=HASHED, slots={"m": "row"})
            state.hashed["h"] = HashedModel()
            changed["h"] = self.touch_hashed(txn, "h", state.hashed["h"], set())
        if new is not None and f"t_{new}" not in self.state.tables:
            rows = int(self.rng.integers(0, MOST_ROWS))
            self.new_table(txn, state, f"t_{new}", new, rows)
            changed[f"t_{new}"] = set(range(rows))
        self.put_rest(txn, state)

    @precondition(lambda self: self.writer.is_synced and self.state.tables and any(self.changed.values()))
    @rule()
    def one_shot_without_rows_is_refused(self) -> None:
        if len(self.writer.head.record.chain) < 2:
            return
        alive = {
            n: {r for r in rows if r < self.state.tables[n].num_rows}
            for n, rows in self.changed.items()
            if n in self.state.tables
        }
        txn = self.writer.begin(next(self.steps), base="baseline")
        try:
            if any(alive.values()) and self.segments_changed():
                with pytest.raises(BadInput, match="since the baseline"):
                    txn.commit()
        finally:
            txn.abort()

    def segments_changed(self) -> bool:
        """Whether some delta of the chain holds rows of a table that is still there (unchanged rows leave)."""
        return any(
            part.table in self.state.tables
            and (part.add or part.set or part.delete or part.escape)
            and self.state.tables[part.table].num_rows >= MOST_ROWS
            for manifest in self.writer.snapshot.manifests[1:]
            for part in manifest.parts
        )

    @precondition(lambda self: self.writer.is_synced and bool(self.writer.head.record.chain))
    @rule(fault=st.sampled_from([None, FaultKind.FAIL_BEFORE, FaultKind.DISK_FULL]), after=st.integers(0, 6))
    def failed_save(self, fault: FaultKind | None, after: int) -> None:
        """A save that is aborted, or whose storage fails before its commit, stays invisible; later saves work."""
        state = self.state.copy()
        state.step = next(self.steps)
        changed: dict[str, set[int]] = {}
        txn = self.writer.begin(state.step)
        try:
            self.fill_delta(txn, state, changed, 5, None, "rows", False)
            if fault is None:
                txn.abort()
                return
            self.fs.arm(Fault(fault, len(self.fs.calls) + after))
            txn.commit()
        except (StorageFailure, Conflict):
            # Not acknowledged; if the fault met the commit itself, the outcome is learned first.
            if self.writer.settle() is None:
                return
        finally:
            self.fs.arm(None)
        self.won(state, changed)

    @precondition(lambda self: bool(self.by_version))
    @rule(data=st.data())
    def tag(self, data: Any) -> None:
        version = data.draw(st.sampled_from(sorted(self.by_version)))
        name = f"tag{next(self.names)}"
        self.store.tag(name, version)
        self.tagged[name] = self.by_version[version].copy()

    @precondition(lambda self: len(self.by_version) > 1)
    @rule(data=st.data(), in_outputs=st.booleans())
    def rollback(self, data: Any, in_outputs: bool) -> None:
        """Another writer moves the head: the next save is refused until the writer has restored."""
        version = data.draw(st.sampled_from(sorted(self.by_version)))
        self.store.rollback(version)
        was_synced = self.writer.is_synced
        if was_synced:
            with pytest.raises(Conflict):
                self.writer.begin(next(self.steps)).commit()
        with pytest.raises(DoesNotApply):
            self.writer.begin(next(self.steps))
        self.state = self.by_version[version].copy()
        self.restored(self.writer, in_outputs)
        self.by_version[self.writer.head.record.v] = self.state.copy()

    @rule(mirror=st.sampled_from(["memory", "mmap", "none"]), in_outputs=st.booleans())
    def reopen(self, mirror: Any, in_outputs: bool) -> None:
        """A new process takes over; the old writer is fenced."""
        self.fs = Flaky(self.inner)
        store = self.open_store(self.fs)
        writer = store.writer(mirror=mirror)
        stale, old_store = self.writer, self.store
        if stale.is_synced:
            # Where its chain was compacted and collected meanwhile, it finds that before it comes to its commit.
            with pytest.raises((Fenced, DoesNotApply)):
                stale.begin(next(self.steps)).commit()
        with pytest.raises(Fenced):
            stale.restore()
        stale.close()
        old_store.close()
        self.store, self.writer = store, writer
        self.restored(writer, in_outputs)

    def open_store(self, fs: Any) -> Store:
        """The store as a process sees it whose file system that is."""
        return opened(fs)

    def restored(self, writer: Writer, in_outputs: bool) -> None:
        """Restore, optionally in place, and get the rows that a one-shot delta must have."""
        outputs = {
            name: {"values": np.empty_like(t.values), **{n: np.empty_like(s) for n, s in t.slots.items()}}
            for name, t in self.state.tables.items()
        }
        writer.restore(outputs if in_outputs else None)
        self.is_fresh = True
        if in_outputs:
            for name, arrays in outputs.items():
                expected = self.state.tables[name].expected()
                for array, values in arrays.items():
                    assert same_bits(values, expected[array]), (name, array)
        self.changed = {}
        for manifest in writer.snapshot.manifests[1:]:
            for name, schema in manifest.tables.items():
                self.changed.setdefault(name, set()).update(
                    range(max(MOST_ROWS, schema.num_rows)) if schema.keys == "dense" else ()
                )
        for name in self.state.hashed:
            self.changed[name] = {int(k) for k in (-(2**63), -5, 0, 3, 7, 2**40, 2**63 - 1, *range(-9, 9))}

    # Invariants.

    @invariant()
    def head_is_the_model(self) -> None:
        """Read where it is not what the last rule left, and now and then."""
        if not self.by_version:
            return
        snapshot = self.store.snapshot()
        if snapshot.record.chain != self.compared or self.rng.random() < 0.2:
            compare(self.store, snapshot, self.state, self.rng)
            self.compared = snapshot.record.chain

    @invariant()
    def tags_read_their_state(self) -> None:
        if self.tagged and self.rng.random() < 0.3:
            name = sorted(self.tagged)[int(self.rng.integers(len(self.tagged)))]
            compare(self.store, self.store.snapshot(tag=name), self.tagged[name], self.rng)

    @invariant()
    def mirrors_have_the_digest_of_their_codes(self) -> None:
        if not hasattr(self, "writer") or not self.writer.is_synced:
            return
        mirrors = self.writer.mirrors
        for name in self.state.tables:
            mirror = mirrors.get(Shard(name))
            if mirror is not None:
                assert mirror.digest() == mirrors.digest(Shard(name)), name
                assert len(mirror.arrays["codes"]) == self.state.tables[name].num_rows


def compare(store: Store, snapshot: Any, state: State, rng: np.random.Generator) -> None:
    assert set(snapshot.tables) == set(state.tables) | set(state.hashed)
    assert snapshot.step == state.step
    assert snapshot.scalars == state.scalars
    assert set(snapshot.dense) == set(state.dense)
    for name, tensor in state.dense.items():
        assert same_bits(snapshot.read_dense(name), tensor), name
    for name, table in state.tables.items():
        view = snapshot.table(name)
        expected = table.expected()
        assert view.shape == table.values.shape
        slots = {n: np.empty_like(s) for n, s in table.slots.items()}
        values = np.empty_like(table.values)
        view.read_rectangle(values=values, slots=slots)
        for array, found in {"values": values, **slots}.items():
            assert same_bits(found, expected[array]), (name, array, found, expected[array])
        if table.num_rows:
            # Parts of one of the arrays, since each of these is a replay of the chain.
            start, stop = sorted(int(rng.integers(table.num_rows + 1)) for _ in range(2))
            rows = rng.integers(0, table.num_rows, 5)
            slot = [None, *table.slots][rng.integers(1 + len(table.slots))]
            part = expected[slot or "values"]
            if rng.random() < 0.5:
                assert same_bits(view.read(start, stop, slot=slot), part[start:stop])
            else:
                assert same_bits(view.read_rows(rows, slot=slot), part[rows])
    for name, hashed in state.hashed.items():
        keys, arrays = snapshot.table(name).read_all(slots=True)
        assert keys.tolist() == sorted(hashed.rows)
        for at, key in enumerate(keys.tolist()):
            row, slot = hashed.rows[key]
            assert same_bits(arrays["values"][at], row + np.float32(0))
            assert arrays["m"][at] == slot
    assert store is not None


def run(examples: int, steps: int, machine: type[StoreMachine] = StoreMachine) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            database=None,
            phases=[Phase.generate],  # a life is its own explanation; shrinking one takes minutes
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_store_is_what_the_training_saved() -> None:
    run(examples=30, steps=10)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_store_is_what_the_training_saved_over_long_lives() -> None:
    run(examples=1500, steps=40)
