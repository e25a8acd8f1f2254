"""A loader's sinks: what they hold is the version that it serves, and a restarted loader sends what changed alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from cnr_store import CompactionPolicy, Store, TableOptions, compact
from cnr_store.consume import Loader, RowRange
from cnr_store.consume.fused_reference import fuse_rows
from cnr_store.consume.sinks import FusedRows, SinkState, SinkTable
from cnr_store.storage import storage_from_filesystem
from cnr_store.testing.faulty import IsolatedMemoryFileSystem
from cnr_store.types import Float32s, RowIds

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
    store = Store.create_on(storage_from_filesystem(IsolatedMemoryFileSystem(), "/root"), threads=1)
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
    with Loader(store, shard=shard) as loader:
        loader.add_sink(sink, start=False).push()
    save(store, 1, [3, 7])
    version = save(store, 2, [7, 12])

    with Loader(store, shard=shard) as loader:
        loader.add_sink(sink, start=False).push()
        assert_holds(sink, store, version, rows)
        assert sink.batches[-1] == (False, 3 if shard is None else 2)
        version = save(store, 3, [8])
        loader.poll()
        loader.add_sink(sink, start=False).push()
        assert sink.batches[-1] == (False, 1)

    with Loader(store, shard=shard, version=version - 1, follow=False) as older:
        older.add_sink(sink, start=False).push()
        assert_holds(sink, store, version - 1, rows)
        assert sink.batches[-1] == (False, 1)


def test_after_a_fold_a_restarted_loader_still_makes_the_sink_the_version(store: Store) -> None:
    sink = Rows()
    with Loader(store) as loader:
        loader.add_sink(sink, start=False).push()
    save(store, 1, [3, 7])
    save(store, 2, [7, 12])
    compact(store, policy=CompactionPolicy(max_chain=1))
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
