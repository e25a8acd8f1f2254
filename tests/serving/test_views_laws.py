"""Any order of publications, merges, staging and lookups equals a dict; old views are whole, or known not to be."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cnr_store.serving.rows.attached import AttachedTables
from cnr_store.serving.rows.board import Board
from cnr_store.serving.rows.lookups import Lookups, lookup_in
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.shards import HashShard, is_in_shard
from cnr_store.serving.rows.shared_memory import SharedMemory
from cnr_store.serving.rows.views import Publisher, View
from cnr_store.types import RowRange
from tests.support.served_rows import expected_rows, held_table, overlay_of, schema_of

SCHEMA = schema_of(24)
LOADS: list[dict[str, Any]] = [
    {"schema": SCHEMA},
    {"schema": SCHEMA, "kept_as": "codes"},
    {"schema": SCHEMA, "served": "bfloat16", "shard": RowRange(3, 20)},
    {"schema": SCHEMA, "shard": HashShard(1, 2)},
    {"schema": SCHEMA, "served": "int8", "shard": HashShard(0, 2)},
    {"schema": schema_of(keys="hashed")},
    {"schema": schema_of(keys="hashed"), "served": "int8"},
]
Models = list[dict[int, int]]


@dataclass
class Seen:
    """A view that a slow reader took, and what it should read in it."""

    view: View
    board: Board
    models: Models
    version: int


class ServedTables(RuleBasedStateMachine):
    """Tables of all kinds; ``models`` has the tables of the view and of the candidate as dicts."""

    shared = False

    def __init__(self) -> None:
        super().__init__()
        self.memory: Memory = ANONYMOUS
        self.publisher = Publisher(min_view_s=0.0)
        self.version = 0
        self.visible: tuple[int, Models] = (0, [])
        self.staged: list[tuple[int, Models]] = []
        self.can_unstage = False
        self.seen: list[Seen] = []

    @initialize(data=st.data())
    def load(self, data: st.DataObject) -> None:
        models = [data.draw(_models(load)) for load in LOADS]
        held = {
            f"t{at}": held_table(model, name=f"t{at}", memory=self.memory, **load)
            for at, (load, model) in enumerate(zip(LOADS, models, strict=True))
        }
        self.publisher.publish(0, 0, held, dense={"version": np.array([0])})
        self.visible = (0, models)

    def newest(self) -> Models:
        return self.staged[-1][1] if self.staged else self.visible[1]

    @rule(data=st.data(), changed=st.sets(st.integers(0, len(LOADS) - 1), min_size=1))
    def publish(self, data: st.DataObject, changed: set[int]) -> None:
        self.stage(data, changed)
        self.reveal()

    @rule(data=st.data(), changed=st.sets(st.integers(0, len(LOADS) - 1), max_size=3))
    def stage(self, data: st.DataObject, changed: set[int]) -> None:
        newest = self.publisher.newest
        assert newest is not None
        overlays, models = {}, list(self.newest())
        for at in changed:
            changes = data.draw(_changes(LOADS[at]))
            overlays[f"t{at}"] = overlay_of(changes, newest.tables[f"t{at}"].base, self.memory)
            models[at] = {row: number for row, number in (models[at] | changes).items() if number is not None}
        self.version += 1
        self.publisher.stage(self.version, 0, overlays, dense={"version": np.array([self.version])})
        self.staged.append((self.version, models))
        self.can_unstage = True

    @rule(data=st.data(), at=st.integers(0, len(LOADS) - 1))
    def stage_anew(self, data: st.DataObject, at: int) -> None:
        model = data.draw(_models(LOADS[at]))
        held = held_table(model, name=f"t{at}", memory=self.memory, **LOADS[at])
        self.version += 1
        self.publisher.stage(self.version, 0, {f"t{at}": held}, dense={"version": np.array([self.version])})
        self.staged.append((self.version, [*self.newest()[:at], model, *self.newest()[at + 1 :]]))
        self.can_unstage = True

    @precondition(lambda self: self.can_unstage)
    @rule()
    def unstage(self) -> None:
        self.publisher.unstage()
        self.staged.pop()
        self.can_unstage = False

    @precondition(lambda self: self.staged)
    @rule()
    def discard(self) -> None:
        self.publisher.discard()
        self.staged, self.can_unstage = [], False

    @rule()
    def reveal(self) -> None:
        self.publisher.reveal()
        if self.staged:
            self.visible, self.staged, self.can_unstage = self.staged[-1], [], False

    @rule()
    def merge(self) -> None:
        self.publisher.merge()

    @precondition(lambda self: len(self.seen) < 4)
    @rule()
    def take_view(self) -> None:
        view, board = self.publisher.newest_view()
        self.seen.append(Seen(view, board, self.visible[1], self.visible[0]))

    @precondition(lambda self: self.seen)
    @rule(at=st.integers(0, 3))
    def read_in_old_view(self, at: int) -> None:
        seen = self.seen.pop(at % len(self.seen))

        rows = read_all(seen.view)

        if seen.board.is_whole(seen.view.epoch):
            check(rows, seen.view, seen.version, seen.models)

    @invariant()
    def readers_see_the_visible_version(self) -> None:
        if self.visible[1]:
            view, board = self.publisher.newest_view()
            assert board.is_whole(view.epoch)
            lookups = Lookups(self.publisher)
            batch = lookups.lookup(asked(), dense=["version"])
            check(batch, view, *self.visible)
            assert lookups.retries == 0

    @invariant()
    def the_candidate_is_what_was_staged(self) -> None:
        candidate = self.publisher.candidate
        assert (candidate is not None) == bool(self.staged)
        if candidate is not None:
            check(read_all(candidate), candidate, *self.staged[-1])


class SharedTables(ServedTables):
    """The same, read through files as another process does."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.files = SharedMemory(self.folder.name)
        self.memory = self.files
        self.publisher = self.files.publisher(min_view_s=0.0)
        self.attached: AttachedTables | None = None

    @rule()
    def attach(self) -> None:
        self.attached = AttachedTables(self.folder.name)

    @precondition(lambda self: len(self.seen) < 4 and self.attached is not None)
    @rule()
    def take_attached_view(self) -> None:
        assert self.attached is not None
        view, board = self.attached.newest_view()
        self.seen.append(Seen(view, board, self.visible[1], self.visible[0]))

    @invariant()
    def the_other_process_sees_the_same(self) -> None:
        if self.attached is not None:
            view = self.attached.newest_view()[0]
            check(self.attached.lookup_many(asked(), dense=["version"]), view, *self.visible)

    @invariant()
    def no_file_is_left_over(self) -> None:
        views = [view for view in (self.publisher.view, *staged_views(self.publisher)) if view is not None]
        if views:
            blocks = {path.name for path in self.files.path.iterdir() if path.name[0].isdigit()}
            spare = [block for _, blocks in self.files._spare.values() for block in blocks]
            kept = [*(block for _, block in self.files._merged), *spare]
            assert max(Counter(block.name for block in kept).values(), default=0) <= 2
            assert all(block.name.endswith(".overlay") for block in kept)
            live = {self.files.ref_of(array).file for view in views for array in arrays_of(view)}
            assert sorted(blocks) == sorted([*live, *(block.path.name for block in kept)])
            epochs = {path.name for path in self.files.path.glob("view-*")}
            assert epochs == {f"view-{views[0].epoch}"}

    def teardown(self) -> None:
        if self.attached is not None:
            self.attached.close()
        self.publisher.close()
        self.files.close()
        self.folder.cleanup()


def staged_views(publisher: Publisher) -> list[View | None]:
    return [publisher._staged, publisher._staged_before]


def arrays_of(view: View) -> list[Any]:
    arrays: list[Any] = list(view.dense.values())
    for table in view.tables.values():
        held, overlay = table.base, table.overlay
        arrays += [array for array in (held.rows, held.status) if array is not None]
        arrays += [] if held.index is None else [held.index.slots]
        arrays += [] if overlay is None else [overlay.rows]
    return arrays


def row_choices(load: dict[str, Any]) -> list[int]:
    schema, shard = load["schema"], load.get("shard")
    ids = np.arange(24) if schema.keys == "dense" else np.array([-(2**63), -1, 0, 1, *range(1000, 1040)])
    return [int(row) for row in ids[is_in_shard(shard, ids)]]


def asked() -> dict[str, Any]:
    return {f"t{at}": np.array(row_choices(load)) for at, load in enumerate(LOADS)}


def _models(load: dict[str, Any]) -> st.SearchStrategy[dict[int, int]]:
    return st.dictionaries(st.sampled_from(row_choices(load)), st.integers(-50, 50), max_size=12)


def _changes(load: dict[str, Any]) -> st.SearchStrategy[dict[int, int | None]]:
    number = st.one_of(st.none(), st.integers(-50, 50))
    return st.dictionaries(st.sampled_from(row_choices(load)), number, max_size=12)


def read_all(view: View) -> Any:
    return lookup_in(view, asked(), dense=["version"])


def check(batch: Any, view: View, version: int, models: Models) -> None:
    assert (batch.version, int(batch.dense["version"][0])) == (version, version)
    for at, (load, model) in enumerate(zip(LOADS, models, strict=True)):
        name, ids = f"t{at}", np.array(row_choices(load))
        kind = view.tables[name].kind
        np.testing.assert_array_equal(batch.rows[name], expected_rows(kind, ids, model))
        if view.tables[name].base.is_keyed:
            missing = batch.missing[name]
            gone = [False] * len(ids) if missing is None else missing.tolist()
            assert gone == [row not in model for row in ids.tolist()]


TestServedTables = ServedTables.TestCase
TestServedTables.settings = settings(max_examples=25, stateful_step_count=15)
TestSharedTables = SharedTables.TestCase
TestSharedTables.settings = settings(max_examples=25, stateful_step_count=20)
