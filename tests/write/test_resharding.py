"""A training that goes on with other shards, on other numbers of ranks: each reads what the ranks before wrote."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cnr_store import BadInput, Store, TableOptions, Unsupported, verify_store
from cnr_store.segment.shards import Shard
from cnr_store.storage import storage_from_filesystem
from cnr_store.types import Rectangle
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.writer import Writer
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.ranks import ThreadRank, on_ranks
from tests.support.store_oracle import same_bits

ROWS, DIM, TABLE = 24, 8, "t"
Array = np.ndarray[Any, Any]


def row_wise(shards: int) -> list[Rectangle]:
    return [Rectangle(rows, (0, DIM)) for rows in pairwise(np.linspace(0, ROWS, shards + 1).astype(int).tolist())]


def column_wise(*cuts: int) -> list[Rectangle]:
    return [Rectangle((0, ROWS), columns) for columns in pairwise((0, *cuts, DIM))]


class Training:
    """The values as the training has them; a row slot has a value per column range, the others one per element."""

    def __init__(self, *, row_slot: bool, options: TableOptions) -> None:
        self.files = IsolatedMemoryFileSystem()
        self.options = options
        self.random = np.random.default_rng(5)
        self.values = self.random.standard_normal((ROWS, DIM)).astype(np.float32)
        self.element = self.random.standard_normal((ROWS, DIM)).astype(np.float32)
        self.row = self.random.random((ROWS, DIM)).astype(np.float32) if row_slot else None
        Store.create_on(storage_from_filesystem(self.files, "/root"), threads=1).close()

    def store(self) -> Store:
        return Store.open_on(storage_from_filesystem(self.files, "/root"), threads=1)

    def slots(self, box: Any) -> dict[str, Array]:
        """The row slot of a column range is the value at its first column."""
        row = {} if self.row is None else {"m": self.row[box][:, 0].copy()}
        return {"v": self.element[box], **row}

    def run(self, shards: list[Rectangle], work: Callable[[Writer, Rectangle], None]) -> None:
        """Do ``work`` on a rank for each shard, each with a store of its own."""

        def of_rank(rank: ThreadRank) -> None:
            tile = shards[rank.rank]
            with self.store() as store, store.writer(ranks=rank, shards={TABLE: [tile]}) as writer:
                work(writer, tile)

        on_ranks(len(shards), of_rank, timeout_s=20)

    def save_all(self, writer: Writer, tile: Rectangle, step: int) -> None:
        box = (slice(*tile.rows), slice(*tile.columns))
        with writer.begin(step, "baseline") as txn:
            txn.declare_tables({TABLE: [Declaration(self.values[box], self.slots(box), self.options)]})
            txn.write_table(TABLE, self.values[box], slots=self.slots(box), rectangle=tile)

    def save_rows(self, writer: Writer, tile: Rectangle, rows: Array, step: int) -> str:
        mine = rows[(rows >= tile.rows[0]) & (rows < tile.rows[1])]
        box = np.ix_(mine, np.arange(*tile.columns))
        with writer.begin(step) as txn:
            if txn.kind == "baseline":
                whole = (slice(*tile.rows), slice(*tile.columns))
                txn.write_table(TABLE, self.values[whole], slots=self.slots(whole), rectangle=tile)
            else:
                txn.write_rows(TABLE, mine, self.values[box], slots=self.slots(box), nonfinite="escape", rectangle=tile)
        return txn.kind

    def touch(self, rows: Array) -> None:
        self.values[rows] += np.float32(0.5)
        self.element[rows] *= np.float32(2)
        if self.row is not None:
            self.row[rows] += np.float32(1)

    def check_whole(self) -> None:
        with self.store() as store:
            view = store.snapshot().table(TABLE)
            assert same_bits(view.read(), self.values)
            assert same_bits(view.read(slot="v"), self.element)
            if self.row is not None:
                for columns in view.column_cuts:
                    found = view.read_rectangle(Rectangle((0, ROWS), columns), slots={"m": None})
                    assert same_bits(found["m"], self.row[:, columns[0]])
            assert verify_store(store, deep=True, threads=1).problems == ()


OPTIONS = {"exact": TableOptions.exact(nonfinite="escape"), "raw": TableOptions(encoding="raw", slot_bits="exact")}


@pytest.mark.parametrize("options", sorted(OPTIONS))
def test_any_shards_go_on_from_any_others(options: str) -> None:
    training = Training(row_slot=False, options=OPTIONS[options])
    training.run(row_wise(4), partial(training.save_all, step=1))
    plans = [row_wise(4), column_wise(3), row_wise(1), column_wise(2, 4), row_wise(3)]
    for step, shards in enumerate(plans, start=2):
        rows = np.flatnonzero(training.random.random(ROWS) < 0.4).astype(np.int64)
        before, together = training.values.copy(), threading.Barrier(len(shards), partial(training.touch, rows))
        training.run(shards, partial(restore_and_save, training, before, together, rows, step))
        training.check_whole()


def restore_and_save(
    training: Training,
    before: Array,
    together: threading.Barrier,
    rows: Array,
    step: int,
    writer: Writer,
    tile: Rectangle,
) -> None:
    box = (slice(*tile.rows), slice(*tile.columns))
    values = np.empty((tile.num_rows, tile.width), np.float32)
    writer.restore({Shard(TABLE, tile): {"values": values}})
    assert same_bits(values, before[box].copy())
    together.wait(20)
    assert training.save_rows(writer, tile, rows, step) == "delta"


def test_other_column_shards_of_a_row_wise_slot_begin_a_new_chain() -> None:
    training = Training(row_slot=True, options=OPTIONS["exact"])
    training.run(column_wise(3), partial(training.save_all, step=1))
    training.check_whole()
    slot = training.row
    assert slot is not None
    expected = (slot[:, [0, 3]].astype(np.float64) @ [3, 5] / 8).astype(np.float32)
    rows = np.arange(0, ROWS, 3)

    def refused(writer: Writer, tile: Rectangle) -> None:
        writer.restore()

    def averaged(writer: Writer, tile: Rectangle) -> None:
        values, mean = np.empty((tile.num_rows, DIM), np.float32), np.empty(tile.num_rows, np.float32)
        writer.restore({Shard(TABLE, tile): {"values": values, "m": mean}}, slots_rule="mean")
        assert same_bits(mean, expected[slice(*tile.rows)])
        slot[slice(*tile.rows)] = mean[:, None]
        assert training.save_rows(writer, tile, rows, 2) == "baseline"

    with pytest.raises(Unsupported, match="slots_rule='mean'"):
        training.run(row_wise(2), refused)
    training.run(row_wise(2), averaged)
    training.check_whole()


def test_a_row_exact_in_one_column_shard_only_is_read_by_all_others() -> None:
    training = Training(row_slot=False, options=OPTIONS["exact"])
    training.run(column_wise(3), partial(training.save_all, step=1))

    def escapes(writer: Writer, tile: Rectangle) -> None:
        writer.restore()
        touch.wait()
        training.save_rows(writer, tile, np.asarray([2, 5]), 2)

    def spoil() -> None:
        training.values[2, 0] = np.nan

    touch = threading.Barrier(2, action=spoil)
    training.run(column_wise(3), escapes)
    training.check_whole()

    def goes_on(writer: Writer, tile: Rectangle) -> None:
        writer.restore()
        training.save_rows(writer, tile, np.arange(tile.rows[0], tile.rows[1]), 3)

    training.run(row_wise(2), goes_on)
    training.check_whole()


def test_column_ranges_that_differ_by_row_are_refused_for_row_slots() -> None:
    training = Training(row_slot=True, options=OPTIONS["exact"])
    half = ROWS // 2
    shards = [Rectangle((0, half), (0, DIM)), Rectangle((half, ROWS), (0, 4)), Rectangle((half, ROWS), (4, DIM))]

    with pytest.raises(BadInput, match="column"):
        training.run(shards, partial(training.save_all, step=1))


def test_ranks_that_store_a_table_in_other_ways_commit_nothing() -> None:
    """The rows of the rank that refined alone would be read at the scale of the others."""
    training = Training(row_slot=False, options=TableOptions(scale=0.25))
    tiles = row_wise(2)

    def work(writer: Writer, tile: Rectangle) -> None:
        training.save_all(writer, tile, 1)
        txn = writer.begin(2)
        if tile is tiles[1]:
            txn.drop_table(TABLE)
        txn.commit()

    with pytest.raises(BadInput, match="schemas differ"):
        training.run(tiles, work)

    with training.store() as store:
        assert store.snapshot().step == 1
        assert verify_store(store, deep=True).is_sound
