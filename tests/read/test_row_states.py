"""Rows without codes, each kind alone in its chain: every reader sees the floats, or the fill, and no memory of others.

A reader keeps a status per row only where a chain may leave a row without codes. Each way in which that comes about
stands here by itself, so that no other one makes the reader look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import CorruptStore, Store, TableOptions, Writer
from cnr_store.read.plan import plan_table
from cnr_store.serving.rows.shards import HashShard
from cnr_store.serving.update.update_tables import ServeAs
from tests.support.consumers import Consumer
from tests.support.memory import store_in_memory

ROWS, DIM, FILL = 8, 3, 5.0
Values = np.ndarray[Any, Any]
OPTIONS = {
    "lattice": TableOptions(scale=0.5, nonfinite="escape", fill=FILL),
    "exact": TableOptions(encoding="float_bits", mantissa_bits=23, nonfinite="escape", fill=FILL),
}


def ids(*rows: int) -> Values:
    return np.asarray(rows, np.int64)


def escape(writer: Writer, values: Values) -> Values:
    values[2], values[6] = np.nan, np.inf
    with writer.begin(2) as txn:
        txn.write_rows("t", ids(2, 6), values[[2, 6]])
    return values


def delete(writer: Writer, values: Values) -> Values:
    with writer.begin(2) as txn:
        txn.delete_rows("t", ids(0, 5))
    values[[0, 5]] = FILL
    return values


def grow(writer: Writer, values: Values) -> Values:
    with writer.begin(2) as txn:
        txn.resize_table("t", ROWS + 4)
        txn.write_rows("t", ids(ROWS + 1), values[:1])
    return np.concatenate(
        [values, np.full((1, DIM), FILL, np.float32), values[:1], np.full((2, DIM), FILL, np.float32)]
    )


def shrink_and_grow(writer: Writer, values: Values) -> Values:
    for step, rows in ((2, 3), (3, ROWS)):
        with writer.begin(step) as txn:
            txn.resize_table("t", rows)
    values[3:] = FILL
    return values


def delete_and_compact(writer: Writer, values: Values) -> Values:
    """A baseline that lacks rows, and names none of them."""
    values = delete(writer, values)
    with writer.begin(3, "baseline"):
        pass
    return values


def escape_and_set(writer: Writer, values: Values) -> Values:
    before = values.copy()
    escape(writer, values)
    with writer.begin(3) as txn:
        txn.write_rows("t", ids(2), before[2:3])
    values[2] = before[2]
    return values


WAYS: list[Callable[[Writer, Values], Values]] = [
    escape, delete, grow, shrink_and_grow, delete_and_compact, escape_and_set,
]  # fmt: skip
HOLDINGS = [ServeAs(), ServeAs(kept_as="codes"), ServeAs(shard=HashShard(0, 2))]


@pytest.fixture
def store() -> Iterator[Store]:
    with store_in_memory() as made:
        yield made


def first_values() -> Values:
    return (np.arange(ROWS * DIM, dtype=np.float32) + 1).reshape(ROWS, DIM)


@pytest.mark.parametrize("encoding", sorted(OPTIONS))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_reader_sees_rows_without_codes(
    store: Store, way: Callable[[Writer, Values], Values], encoding: str
) -> None:
    values = first_values()
    with store.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("t", values, options=OPTIONS[encoding])
        consumers = [Consumer(holding, np.random.default_rng(0)) for holding in HOLDINGS]
        for consumer in consumers:
            consumer.go(store, [store.head()])
        expected = way(writer, values.copy())
    view = store.snapshot().table("t")

    np.testing.assert_array_equal(view.read(), expected)
    np.testing.assert_array_equal(view.read(1, 7), expected[1:7])
    for row in range(len(expected)):
        np.testing.assert_array_equal(view.read_rows(ids(row)), expected[row : row + 1], str(row))
    np.testing.assert_array_equal(view.read_rows(np.arange(len(expected))), expected)
    for consumer in [*consumers, *(Consumer(holding, np.random.default_rng(0)) for holding in HOLDINGS)]:
        consumer.go(store, [store.head()])  # compares every row with the snapshot


@pytest.mark.parametrize("encoding", sorted(OPTIONS))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_restored_writer_sets_rows_without_codes(
    store: Store, way: Callable[[Writer, Values], Values], encoding: str
) -> None:
    with store.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("t", first_values(), options=OPTIONS[encoding])
        expected = way(writer, first_values())
    rows = np.arange(len(expected))
    restored = np.empty_like(expected)

    with store.writer() as writer:
        writer.restore({"t": {"values": restored}})
        np.testing.assert_array_equal(restored, expected)
        with writer.begin(9) as txn:
            txn.write_rows("t", rows, np.full_like(expected, 7))

    assert (store.snapshot().table("t").read() == 7).all()


def test_a_shift_that_goes_back_within_a_generation_is_damage(store: Store) -> None:
    with store.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("t", first_values(), options=OPTIONS["lattice"])
        with writer.begin(2) as txn:
            txn.write_rows("t", ids(1), first_values()[:1])
    before, after = store.snapshot().manifests
    finer = {"t": msgspec.structs.replace(before.tables["t"], shift=1)}

    with pytest.raises(CorruptStore, match="table 't': shift goes back from 1 to 0"):
        plan_table([msgspec.structs.replace(before, tables=finer), after], "t")
