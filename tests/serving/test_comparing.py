"""A comparison with a version finds the rows that differ, or loads the table again if most rows differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cnr_store import TableOptions
from cnr_store.serving.rows.served_table import BaseTable, Overlay
from cnr_store.serving.rows.shards import HashShard, rows_in_shard
from cnr_store.serving.update.comparing import LEAST_LIMIT
from cnr_store.serving.update.update_tables import ServeAs, TableUpdates
from tests.support.consumers import Consumer
from tests.support.memory import store_in_memory

ROWS, DIM = 4 * LEAST_LIMIT, 2
Array = np.ndarray[Any, Any]


def moved_to(values: Array, then: Array, holding: ServeAs, options: TableOptions) -> TableUpdates:
    """A new baseline of the same table, which a consumer of the old one compares."""
    store = store_in_memory(threads=2)
    consumer = Consumer(holding, np.random.default_rng(0))
    with store.writer() as writer:
        for step, table in enumerate((values, then)):
            with writer.begin(step, "baseline") as txn:
                txn.write_table("t", table, options=options)
            updates = consumer.go(store, [store.head()])
    assert consumer.plans == ["Compare", "Compare"]
    store.close()
    return updates


@pytest.mark.parametrize("holding", [ServeAs(), ServeAs(kept_as="codes"), ServeAs("float16", shard=HashShard(1, 2))])
def test_rows_that_differ_become_an_overlay_and_no_others(holding: ServeAs) -> None:
    values = np.zeros((ROWS, DIM), np.float32)
    then = values.copy()
    then[5:50] = 3

    change = moved_to(values, then, holding, TableOptions(scale=0.5)).changes["t"]

    assert isinstance(change, Overlay)
    assert sorted(change.ids.tolist()) == rows_in_shard(holding.shard, np.arange(5, 50)).tolist()


@pytest.mark.parametrize("holding", [ServeAs(), ServeAs(kept_as="codes"), ServeAs(shard=HashShard(0, 1))])
def test_a_table_of_which_most_differs_is_loaded_anew(holding: ServeAs) -> None:
    values = np.zeros((ROWS, DIM), np.float32)
    change = moved_to(values, values + 1, holding, TableOptions(scale=0.5)).changes["t"]
    assert isinstance(change, BaseTable)


@pytest.mark.parametrize(("kept_as", "expected"), [("values", Overlay), ("codes", BaseTable)])
def test_another_scale_is_another_unit_for_codes_alone(kept_as: Any, expected: type) -> None:
    values = np.zeros((ROWS, DIM), np.float32)
    store = store_in_memory()
    consumer = Consumer(ServeAs(kept_as=kept_as), np.random.default_rng(0))
    with store.writer() as writer:
        for step, scale in enumerate((0.5, 0.25)):
            with writer.begin(step, "baseline") as txn:
                txn.write_table("t", values, options=TableOptions(scale=scale))
            updates = consumer.go(store, [store.head()])
    assert isinstance(updates.changes["t"], expected)
    assert updates.rows == (0 if expected is Overlay else ROWS)
    store.close()


def test_a_resized_table_is_loaded_anew_where_rows_are_held_by_position() -> None:
    options = TableOptions.exact()
    for holding, expected in ((ServeAs(), BaseTable), (ServeAs(shard=HashShard(0, 2)), Overlay)):
        change = moved_to(np.ones((40, DIM), np.float32), np.ones((30, DIM), np.float32), holding, options).changes["t"]
        assert isinstance(change, expected)


def test_a_table_that_only_got_longer_is_known_to_be() -> None:
    """By key its new rows are nowhere, and its length is all that differs."""
    store = store_in_memory()
    consumer = Consumer(ServeAs(shard=HashShard(0, 2)), np.random.default_rng(0))
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            txn.write_table("t", np.ones((4, DIM), np.float32), options=TableOptions.exact())
        consumer.go(store, [store.head()])
        with writer.begin(2, "baseline") as txn:
            txn.write_table("t", np.ones((4, DIM), np.float32), options=TableOptions.exact())
        with writer.begin(3) as txn:
            txn.resize_table("t", 9)
    updates = consumer.go(store, [store.head()])
    assert consumer.plans == ["Compare", "Compare"]
    assert updates.rows == 0
    store.close()
