"""What a move hands over and gives back: tables held in another way, copies on the way, rows that none can serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cnr_store import Store, TableOptions
from cnr_store.errors import NonFiniteValues
from cnr_store.format.commit_record import LogEntry
from cnr_store.serving.rows.served_table import BaseTable
from cnr_store.serving.update.update_tables import ServeAs
from cnr_store.types import RowRange
from tests.support.consumers import Consumer, TrackedMemory
from tests.support.memory import store_in_memory

OPTIONS = TableOptions(scale=0.5, nonfinite="escape")


@pytest.fixture
def store() -> Iterator[Store]:
    with store_in_memory(threads=2) as made:
        yield made


def consumer_of(holding: ServeAs) -> Consumer:
    """A consumer of which each update is checked to keep only the memory of its result."""
    return Consumer(holding, np.random.default_rng(0), TrackedMemory())


def path_from(store: Store, entry: LogEntry) -> list[LogEntry]:
    """The records after a given one."""
    path = []
    while (after := store.poll(path[-1] if path else entry)) is not None:
        path.append(after)
    return path


def test_a_copy_that_grows_on_the_way_leaves_nothing_behind(store: Store) -> None:
    consumer = consumer_of(ServeAs(kept_as="codes"))
    with store.writer() as writer:
        with writer.begin(0) as txn:
            txn.create_table("h", dim=2, options=OPTIONS)
            txn.write_rows("h", np.arange(10), np.ones((10, 2), np.float32))
        consumer.go(store, [store.head()])
        for step, count in enumerate((10, 3000, 9000), start=1):  # beyond int16, so a copy; then beyond its room
            with writer.begin(step) as txn:
                txn.write_rows("h", np.arange(count), np.full((count, 2), 90_000 / step, np.float32))
    updates = consumer.go(store, path_from(store, consumer.entry or store.head()))
    assert isinstance(updates.changes["h"], BaseTable)
    assert updates.changes["h"].rows.dtype == np.int32


def test_a_finer_unit_that_int16_cannot_hold_leaves_one_copy(store: Store) -> None:
    consumer = consumer_of(ServeAs(kept_as="codes"))
    with store.writer() as writer, writer.begin(0) as txn:
        txn.write_table("t", np.full((40, 2), 10_000, np.float32), options=OPTIONS)
    consumer.go(store, [store.head()])
    with store.writer() as writer:
        writer.restore()
        with writer.begin(1) as txn:
            txn.refine_scale("t", 2)
            txn.write_rows("t", np.array([3]), np.ones((1, 2), np.float32))
    updates = consumer.go(store, path_from(store, consumer.entry or store.head()))
    assert isinstance(updates.changes["t"], BaseTable)
    assert updates.changes["t"].rows.dtype == np.int32


@pytest.mark.parametrize("kept_as", ["auto", "codes"])
def test_a_row_without_an_int8_form_fails_the_move_and_no_lookup(store: Store, kept_as: Any) -> None:
    consumer = consumer_of(ServeAs("int8", kept_as))
    with store.writer() as writer:
        with writer.begin(0) as txn:
            txn.write_table("t", np.ones((40, 2), np.float32), options=OPTIONS)
        consumer.go(store, [store.head()])
        with writer.begin(1) as txn:
            txn.write_rows("t", np.array([7]), np.full((1, 2), np.nan, np.float32))
        late = consumer_of(consumer.holding)
        for one in (consumer, late):
            with pytest.raises(NonFiniteValues, match="row 7 of table 't'"):
                one.go(store, [store.head()])
        with writer.begin(2) as txn:
            txn.write_rows("t", np.array([7]), np.ones((1, 2), np.float32))
    for one in (consumer, late):
        one.go(store, [store.head()])


def test_a_table_that_is_no_longer_hashed_is_held_by_position(store: Store) -> None:
    consumer = consumer_of(ServeAs())
    with store.writer() as writer:
        with writer.begin(0) as txn:
            txn.create_table("t", dim=2, options=OPTIONS)
            txn.write_rows("t", np.arange(10), np.ones((10, 2), np.float32))
        consumer.go(store, [store.head()])
        with writer.begin(1, "baseline") as txn:
            txn.drop_table("t")
        with writer.begin(2, "baseline") as txn:
            txn.write_table("t", np.ones((10, 2), np.float32), options=OPTIONS)
    consumer.go(store, [store.head()])
    assert not consumer.tables["t"].base.is_keyed


def test_a_shard_that_a_longer_table_gives_no_rows_is_not_copied(store: Store) -> None:
    ranges = [RowRange(3, 8), RowRange(3, 40)]
    consumers = [consumer_of(ServeAs(shard=shard)) for shard in ranges]
    with store.writer() as writer:
        for step, num_rows in enumerate((10, 20, 9, 30)):
            with writer.begin(step) as txn:
                if step == 0:
                    txn.write_table("t", np.ones((num_rows, 2), np.float32), options=OPTIONS)
                else:
                    txn.resize_table("t", num_rows)
                    txn.write_rows("t", np.array([4]), np.full((1, 2), step, np.float32))
            changes = [one.go(store, [store.head()]).changes["t"] for one in consumers]
            assert isinstance(changes[0], BaseTable) == (step == 0)
            assert isinstance(changes[1], BaseTable)
