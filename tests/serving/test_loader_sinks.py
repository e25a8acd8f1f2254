"""A loader's sinks: what they hold is the version that it serves, and a restarted loader sends what changed alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from cnr_store import CompactionPolicy, Store, TableOptions
from cnr_store.maintenance.compaction import compact_run
from cnr_store.serving import HashShard, Loader, LoaderOptions, RowRange
from cnr_store.serving.rows.lookups import Lookups
from cnr_store.serving.sinks import FusedRows, SinkState, SinkTable
from cnr_store.serving.sources import scope_of
from cnr_store.types import Float32s, RowIds
from tests.support.memory import store_in_memory
from tests.support.serving_reference import fuse_rows

ROWS, DIM = 40, 4


class Rows:
    """A sink that is a dictionary."""

    name = "rows"

    def __init__(self) -> None:
        self.shown: dict[str, dict[int, Float32s]] = {}
        self.state: SinkState | None = None
        self.batches: list[tuple[bool, int]] = []

    def open(self) -> SinkState | None:
        return self.state

    def begin(self, tables: Mapping[str, SinkTable], *, full: bool) -> None:
        self.batch = {name: {} if full else dict(self.shown[name]) for name in tables}
        self.batches.append((full, 0))

    def put(self, table: str, row_ids: RowIds, values: Float32s) -> None:
        self.batch[table].update(zip(row_ids.tolist(), values.copy(), strict=True))
        self.batches[-1] = (self.batches[-1][0], self.batches[-1][1] + len(row_ids))

    def delete(self, table: str, row_ids: RowIds) -> None:
        for row_id in row_ids.tolist():
            self.batch[table].pop(row_id, None)

    def commit(self, state: SinkState) -> None:
        self.shown, self.state = self.batch, state

    def abort(self) -> None:
        self.batch = {}


@pytest.fixture
def store() -> Store:
    store = store_in_memory()
    with store.writer() as writer, writer.begin(0) as txn:
        txn.write_table("user", np.zeros((ROWS, DIM), np.float32), options=TableOptions(scale=0.25))
    return store


def save(store: Store, step: int, rows: list[int]) -> int:
    with store.writer() as writer:
        writer.restore()
        with writer.begin(step) as txn:
            txn.write_rows("user", np.array(rows), np.full((len(rows), DIM), step, np.float32))
    return store.snapshot().version


def assert_holds(sink: Rows, store: Store, version: int, rows: range = range(ROWS)) -> None:
    assert sink.state is not None
    assert sink.state.version == version
    assert sorted(sink.shown["user"]) == list(rows)
    held = np.stack([sink.shown["user"][row] for row in rows])
    assert (held == store.snapshot(version).table("user").read()[rows.start : rows.stop]).all()


def test_each_version_and_rollback_reaches_the_sink(store: Store) -> None:
    sink = Rows()
    with Loader(store) as loader:
        feed = loader.add_sink(sink, start=False)
        first = store.snapshot().version
        feed.push()
        assert_holds(sink, store, first)
        for step in (1, 2, 3):
            version = save(store, step, [step, 10])
            loader.poll()
            feed.push()
            assert_holds(sink, store, version)
        loader.rollback(first)
        feed.push()
        assert_holds(sink, store, first)
    assert [full for full, _ in sink.batches] == [True, False, False, False, False]
    assert sum(count for _, count in sink.batches[1:4]) == 6


@pytest.mark.parametrize("shard", [None, RowRange(5, 15)])
def test_a_restarted_loader_sends_what_changed_meanwhile(store: Store, shard: RowRange | None) -> None:
    sink, rows = Rows(), range(ROWS) if shard is None else range(5, 15)
    with Loader(store, options=LoaderOptions(shard=shard)) as loader:
        loader.add_sink(sink, start=False).push()
    save(store, 1, [3, 7])
    version = save(store, 2, [7, 12])

    with Loader(store, options=LoaderOptions(shard=shard)) as loader:
        loader.add_sink(sink, start=False).push()
        assert_holds(sink, store, version, rows)
        assert sink.batches[-1] == (False, 3 if shard is None else 2)
        version = save(store, 3, [8])
        loader.poll()
        loader.add_sink(sink, start=False).push()
        assert sink.batches[-1] == (False, 1)

    with Loader(store, version=version - 1, follow=False, options=LoaderOptions(shard=shard)) as older:
        older.add_sink(sink, start=False).push()
        assert_holds(sink, store, version - 1, rows)
        assert sink.batches[-1] == (False, 1)


def test_after_a_merge_a_restarted_loader_still_makes_the_sink_the_version(store: Store) -> None:
    sink = Rows()
    with Loader(store) as loader:
        loader.add_sink(sink, start=False).push()
    save(store, 1, [3, 7])
    save(store, 2, [7, 12])
    compact_run(store, policy=CompactionPolicy(max_chain=1))
    version = save(store, 3, [1])

    with Loader(store) as loader:
        loader.add_sink(sink, start=False).push()

    assert_holds(sink, store, version)


def test_a_table_that_grew_meanwhile_is_sent_whole(store: Store) -> None:
    sink = Rows()
    with Loader(store) as loader:
        loader.add_sink(sink, start=False).push()
    with store.writer() as writer:
        writer.restore()
        with writer.begin(1) as txn:
            txn.resize_table("user", ROWS + 5)
    version = store.snapshot().version

    with Loader(store) as loader:
        loader.add_sink(sink, start=False).push()

    assert_holds(sink, store, version, range(ROWS + 5))
    assert sink.batches[-1] == (True, ROWS + 5)


def test_fused_rows_follow_a_loader(store: Store) -> None:
    pytest.importorskip("torch")
    sink = FusedRows(bits=8)
    with Loader(store) as loader:
        feed = loader.add_sink(sink, start=False)
        feed.push()
        sink.apply()
        version = save(store, 1, [3, 7])
        loader.poll()
        feed.push()
        sink.apply()

    expected, _ = fuse_rows(store.snapshot(version).table("user").read(), 8)
    assert sink.version == version
    assert (sink.tensors["user"].numpy() == expected).all()


def test_a_loader_that_serves_another_dtype_sends_everything(store: Store) -> None:
    sink = Rows()
    served: Any
    for served in ("bfloat16", None, "float32", {"user": "float16"}, {"user": None}, {}):
        with Loader(store, options=LoaderOptions(served=served)) as loader:
            loader.add_sink(sink, start=False).push()
    assert sink.batches == [(True, ROWS)] * 5  # the last two serve alike


def test_a_scope_is_the_choice_and_not_its_words() -> None:
    assert scope_of(None, None, None) == scope_of(None, {"a": None}, {}) == ""
    same = [
        (["b", "a"], {"a": RowRange(0, 5), "b": HashShard(1, 2), "c": None}, {"a": "int8", "b": "float16"}),
        (["a", "b"], {"b": HashShard(1, 2), "a": RowRange(0, 5)}, {"b": "float16", "a": "int8", "c": None}),
    ]
    assert scope_of(*same[0]) == scope_of(*same[1])
    choices = [
        (None, RowRange(0, 5), None), (None, RowRange(0, 6), None), (None, HashShard(0, 2), None),
        (None, HashShard(0, 3), None), (["a"], None, None), ([], None, None), (None, None, "int8"),
        (None, {"a": RowRange(0, 5)}, None), (None, None, {"a": "int8"}),
    ]  # fmt: skip
    assert len({scope_of(*choice) for choice in [*choices, same[0]]}) == len(choices) + 1


def test_rows_are_read_as_what_they_were_served_as(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # Between a feed's lookup and the widening of its rows a version with a wider table becomes visible.
    with Loader(store, options=LoaderOptions(served="int8")) as loader:
        feed = loader.add_sink(Rows(), start=False)
        expected = loader._source.read_rows({"user": np.arange(3)})
        with store.writer() as writer:
            writer.restore()
            with writer.begin(1) as txn:
                txn.drop_table("user")
            with writer.begin(2) as txn:
                txn.write_table("user", np.ones((ROWS, DIM + 3), np.float32))
        lookup = Lookups.lookup

        def look_up_and_move(self: Lookups, *arguments: Any) -> Any:
            batch = lookup(self, *arguments)
            loader.poll()
            return batch

        monkeypatch.setattr(Lookups, "lookup", look_up_and_move)
        found = loader._source.read_rows({"user": np.arange(3)})
        monkeypatch.undo()
        feed.push()

    assert found.version == expected.version
    assert (found.tables["user"][0] == expected.tables["user"][0]).all()


def test_tables_that_change_while_they_are_pushed_begin_the_push_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Dropped, wider, and longer, each behind the feed's back at its first read.
    def drop() -> None:
        with store.writer() as writer:
            writer.restore()
            with writer.begin(1) as txn:
                txn.drop_table("user")
                txn.write_table(f"item {store.snapshot().version}", np.ones((3, DIM), np.float32))

    def widen() -> None:
        drop()
        with store.writer() as writer:
            writer.restore()
            with writer.begin(2) as txn:
                txn.write_table("user", np.ones((ROWS, DIM + 3), np.float32))

    def grow() -> None:
        with store.writer() as writer:
            writer.restore()
            with writer.begin(3) as txn:
                txn.resize_table("user", ROWS + 5)

    for change in (grow, widen, grow, drop):
        sink = Rows()
        with Loader(store) as loader:
            feed = loader.add_sink(sink, start=False)
            waiting = [change]
            source = loader._source

            def move_first(original: Any, *arguments: Any, waiting: Any = waiting, loader: Any = loader) -> Any:
                while waiting:
                    waiting.pop()()
                    loader.poll()
                return original(*arguments)

            for name in ("read_rows", "row_ids"):
                monkeypatch.setattr(source, name, partial(move_first, getattr(source, name)), raising=False)
            feed.push()
            monkeypatch.undo()
            assert feed.metrics().failures == 0
            assert sink.shown.keys() == loader.tables.keys()
            for table, schema in loader.tables.items():
                rows = np.stack([sink.shown[table][row] for row in range(schema.num_rows)])
                assert (rows == loader.lookup(table, np.arange(schema.num_rows))).all()


@pytest.mark.parametrize("shard", [None, RowRange(5, 15), HashShard(1, 2)])
def test_deleted_rows_of_a_dense_table_have_its_fill_in_full_pushes_too(
    store: Store, shard: RowRange | HashShard | None
) -> None:
    with store.writer() as writer:
        writer.restore()
        with writer.begin(1) as txn:
            txn.write_table("filled", np.ones((ROWS, DIM), np.float32), options=TableOptions(scale=0.25, fill=7.0))
    fresh, kept = Rows(), Rows()
    with Loader(store, options=LoaderOptions(shard=shard)) as loader:
        feed = loader.add_sink(kept, start=False)
        feed.push()
        with store.writer() as writer:
            writer.restore()
            with writer.begin(2) as txn:
                txn.delete_rows("filled", np.arange(6, 12))
        loader.poll()
        feed.push()
        loader.add_sink(fresh, start=False).push()

    assert [full for full, _ in kept.batches + fresh.batches] == [True, False, True]
    assert fresh.shown["filled"].keys() == kept.shown["filled"].keys()
    for row, values in fresh.shown["filled"].items():
        assert (values == kept.shown["filled"][row]).all()
        assert (values == (7.0 if 6 <= row < 12 else 1.0)).all()
