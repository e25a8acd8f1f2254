"""Bad input, each kind with its own error: nothing is committed, and the writer goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cnr_store import BadInput, Conflict, CorruptStore, StorageFailure, Store, TableOptions, Transaction, Writer
from cnr_store.errors import (
    BadDtype,
    BadName,
    BadRowIds,
    BadShape,
    CorruptObject,
    CorruptRecord,
    DoesNotApply,
    Fenced,
    MissingObject,
    NewerFormat,
    NonFiniteValues,
    NotAStore,
    ReadOnlyStore,
    SaveInProgress,
    TableNotFound,
    TagNotFound,
    UnknownFeature,
    VersionNotFound,
)
from cnr_store.format.commit_record import sealed
from cnr_store.format.documents import sha256
from cnr_store.format.layout import IDENTITY, commit_key, segment_key
from cnr_store.format.packed import pack, unpack
from cnr_store.segment.shards import Shard
from cnr_store.storage import storage_from_filesystem
from cnr_store.types import MAX_CHAIN
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem

ROWS, DIM = 6, 3
SCALE = 0.5
ROOT = "/root"


def ids(*rows: int) -> Any:
    return np.asarray(rows, np.int64)


def ones(rows: int, dim: int = DIM, dtype: Any = np.float32) -> Any:
    return np.ones((rows, dim), dtype)


def slot(rows: int, value: float = 1) -> dict[str, Any]:
    return {"m": np.full(rows, value, np.float32)}


class World:
    """A store of one lattice table with a slot, an exact one and a hashed one, and its writer."""

    def __init__(self) -> None:
        self.inner = IsolatedMemoryFileSystem()
        self.fs = FaultyFileSystem(self.inner)
        self.store = Store.create_on(storage_from_filesystem(self.fs, ROOT), threads=1)
        self.writer = self.store.writer()
        with self.writer.begin(1) as txn:
            txn.write_table("t", ones(ROWS), slots=slot(ROWS), options=TableOptions(scale=SCALE))
            txn.write_table("exact", ones(ROWS), options=TableOptions.exact())
            txn.create_table("h", dim=DIM, options=TableOptions(scale=SCALE))
            txn.write_rows("h", ids(-7, 9), ones(2))
            txn.put_dense({"w": ones(2)})

    def open(self) -> Store:
        return Store.open_on(storage_from_filesystem(FaultyFileSystem(self.inner), ROOT), threads=1)

    def key(self, key: str) -> str:
        return f"{ROOT}/{key}"

    def read(self, key: str) -> bytes:
        data: bytes = self.inner.cat_file(self.key(key))
        return data

    def write(self, key: str, data: bytes) -> None:
        self.inner.pipe_file(self.key(key), data)


@pytest.fixture
def world() -> World:
    return World()


def goes_on(world: World, writer: Writer | None = None) -> None:
    """A good delta commits, and only it is seen."""
    writer = writer or world.writer
    with writer.begin(100) as txn:
        txn.write_rows("t", ids(2), 2 * ones(1), slots=slot(1, 2))
    expected = ones(ROWS)
    expected[2] = 2
    assert np.array_equal(world.open().snapshot().table("t").read(), expected)


def rows_of(txn: Transaction, row_ids: Any, values: Any = None, table: str = "t", **kwargs: Any) -> int:
    values = ones(len(row_ids)) if values is None else values
    kwargs.setdefault("slots", slot(len(row_ids)))
    return txn.write_rows(table, row_ids, values, **kwargs)


BAD_CALLS: dict[str, tuple[type[Exception], Callable[[Transaction], Any]]] = {
    "nan": (NonFiniteValues, lambda t: rows_of(t, ids(1), np.full((1, DIM), np.nan, np.float32))),
    "inf": (NonFiniteValues, lambda t: rows_of(t, ids(1), np.full((1, DIM), -np.inf, np.float32))),
    "nan in a slot": (NonFiniteValues, lambda t: rows_of(t, ids(1), slots=slot(1, np.nan))),
    "nan in an exact table": (
        NonFiniteValues,
        lambda t: t.write_rows("exact", ids(1), np.full((1, DIM), np.nan, np.float32)),
    ),
    "nan in a new key": (NonFiniteValues, lambda t: t.write_rows("h", ids(1), np.full((1, DIM), np.nan, np.float32))),
    "code beyond 2^21": (
        NonFiniteValues,
        lambda t: rows_of(t, ids(1), np.full((1, DIM), SCALE * 2**21 + 1, np.float32)),
    ),
    "wrong dim": (BadShape, lambda t: rows_of(t, ids(1), ones(1, DIM + 1))),
    "one-dimensional values": (BadShape, lambda t: rows_of(t, ids(1), ones(1)[0])),
    "more rows than ids": (BadShape, lambda t: rows_of(t, ids(1), ones(2))),
    "wrong dtype": (BadDtype, lambda t: rows_of(t, ids(1), ones(1, DIM, np.float64))),
    "big-endian values": (BadDtype, lambda t: rows_of(t, ids(1), ones(1, DIM, ">f4"))),
    "wrong dtype of a slot": (BadDtype, lambda t: rows_of(t, ids(1), slots={"m": np.ones(1)})),
    "missing slot": (BadInput, lambda t: rows_of(t, ids(1), slots={})),
    "unknown slot": (BadInput, lambda t: rows_of(t, ids(1), slots={**slot(1), "v": np.ones(1, np.float32)})),
    "slot of the wrong kind": (BadShape, lambda t: rows_of(t, ids(1), slots={"m": ones(1)})),
    "unsorted ids": (BadRowIds, lambda t: rows_of(t, ids(2, 1))),
    "duplicate ids": (BadRowIds, lambda t: rows_of(t, ids(1, 1))),
    "id out of range": (BadRowIds, lambda t: rows_of(t, ids(1, ROWS))),
    "negative id": (BadRowIds, lambda t: rows_of(t, ids(-1, 1))),
    "ids of another dtype": (BadRowIds, lambda t: rows_of(t, np.asarray([1], np.int32))),
    "ids as a list": (BadRowIds, lambda t: rows_of(t, [1])),
    "two-dimensional ids": (BadRowIds, lambda t: rows_of(t, ids(1).reshape(1, 1))),
    "unknown table": (TableNotFound, lambda t: rows_of(t, ids(1), table="nobody")),
    "delete out of range": (BadRowIds, lambda t: t.delete_rows("t", ids(ROWS))),
    "delete in an unknown table": (TableNotFound, lambda t: t.delete_rows("nobody", ids(1))),
    "whole table in a delta": (BadInput, lambda t: t.write_table("t", ones(ROWS), slots=slot(ROWS))),
    "new table of floats64": (BadDtype, lambda t: t.write_table("n", ones(2, 2, np.float64))),
    "new table without columns": (BadShape, lambda t: t.write_table("n", ones(2, 0))),
    "new table of one dimension": (BadShape, lambda t: t.write_table("n", np.ones(3, np.float32))),
    "new table with NaN": (
        NonFiniteValues,
        lambda t: t.write_table("n", np.full((2, 2), np.nan, np.float32), options=TableOptions(scale=1.0)),
    ),
    "new table without a name": (BadName, lambda t: t.write_table("", ones(2))),
    "name with a control character": (BadName, lambda t: t.write_table("a\nb", ones(2))),
    "slot without a name": (BadName, lambda t: t.write_table("n", ones(2), slots={"": np.ones(2, np.float32)})),
    "slot of three dimensions": (
        BadShape,
        lambda t: t.write_table("n", ones(2), slots={"m": np.ones((2, DIM, 1), np.float32)}),
    ),
    "slot without dimensions": (BadShape, lambda t: t.write_table("n", ones(2), slots={"m": np.ones((), np.float32)})),
    "slot shorter than its table": (
        BadShape,
        lambda t: t.write_table("n", ones(2), slots={"m": np.ones(1, np.float32)}),
    ),
    "contradicting options": (BadInput, lambda t: t.write_table("n", ones(2), options=TableOptions(bits=4, scale=1.0))),
    "hashed table of no columns": (BadShape, lambda t: t.create_table("n", dim=0, options=TableOptions(scale=1.0))),
    "hashed table that exists": (BadInput, lambda t: t.create_table("h", dim=DIM, options=TableOptions(scale=1.0))),
    "hashed table of an unknown dtype": (
        BadDtype,
        lambda t: t.create_table("n", dim=2, dtype="float64", options=TableOptions(scale=1.0)),
    ),
    "hashed table without a sample": (BadInput, lambda t: t.create_table("n", dim=2)),
    "hashed table with a wrong sample": (BadShape, lambda t: t.create_table("n", dim=2, sample=ones(4, 3))),
    "resize to less than nothing": (BadShape, lambda t: t.resize_table("t", -1)),
    "resize to a fraction": (BadShape, lambda t: t.resize_table("t", 2.0)),  # type: ignore[arg-type]
    "resize beyond any memory": (BadShape, lambda t: t.resize_table("t", 2**60)),
    "resize a hashed table": (BadInput, lambda t: t.resize_table("h", 3)),
    "resize an unknown table": (TableNotFound, lambda t: t.resize_table("nobody", 3)),
    "drop an unknown table": (TableNotFound, lambda t: t.drop_table("nobody")),
    "dense of complex numbers": (BadDtype, lambda t: t.put_dense({"x": np.ones(2, np.complex64)})),
    "dense of Python objects": (BadDtype, lambda t: t.put_dense({"x": np.asarray([object()])})),
    "dense named as another dtype": (BadDtype, lambda t: t.put_dense({"x": ones(1)}, {"x": "bfloat16"})),
    "dense without a name": (BadName, lambda t: t.put_dense({"": ones(1)})),
    "drop unknown dense": (TableNotFound, lambda t: t.drop_dense("nobody")),
    "scalar that is no number": (BadInput, lambda t: t.put_scalars({"loss": float("nan")})),
    "scalar that is no JSON": (BadInput, lambda t: t.put_scalars({"loss": object()})),
    "document of code": (BadInput, lambda t: t.put_document("reader/0", {"f": print})),
    "document without a name": (BadName, lambda t: t.put_document("reader//0", {})),
}


@pytest.mark.parametrize("case", sorted(BAD_CALLS))
def test_a_refused_call_leaves_the_transaction_and_the_writer_usable(world: World, case: str) -> None:
    kind, call = BAD_CALLS[case]
    head, puts = world.store.latest_version(), world.fs.count("write", "create")
    txn = world.writer.begin(2)

    with pytest.raises(kind) as caught:
        call(txn)

    assert type(caught.value) is kind
    assert world.fs.count("write", "create") == puts, "something was written"
    version = txn.commit()  # empty: nothing of the refused call is in it
    assert version == head + 1
    snapshot = world.open().snapshot()
    assert snapshot.manifests[-1].changed_rows == 0
    assert sorted(snapshot.tables) == ["exact", "h", "t"]
    assert sorted(snapshot.dense) == ["w"]
    goes_on(world)


def test_a_row_cannot_be_written_and_deleted_at_once(world: World) -> None:
    with world.writer.begin(2) as txn:
        rows_of(txn, ids(1, 2), 3 * ones(2))
        with pytest.raises(BadRowIds, match="row 2 of table 't' is both"):
            txn.delete_rows("t", ids(2))
    with world.writer.begin(3) as txn:
        txn.delete_rows("t", ids(1, 2))
        with pytest.raises(BadRowIds, match="row 1 of table 't' is both"):
            rows_of(txn, ids(0, 1), 4 * ones(2))

    assert world.store.snapshot().table("t").read()[:, 0].tolist() == [1, 0, 0, 1, 1, 1]


def test_rows_are_given_once(world: World) -> None:
    with world.writer.begin(2) as txn:
        rows_of(txn, ids(1), 3 * ones(1))
        with pytest.raises(BadInput, match="already"):
            rows_of(txn, ids(2), 3 * ones(1))
        with pytest.raises(BadInput, match="before writing its rows"):
            txn.resize_table("t", 3)
        with pytest.raises(BadInput, match="written in this transaction"):
            txn.drop_table("t")
        txn.write_table("n", ones(2), options=TableOptions(scale=1.0))
        with pytest.raises(BadInput, match="before writing its rows"):
            txn.resize_table("n", 5)

    assert world.open().snapshot().table("n").read().tolist() == ones(2).tolist()


def test_row_ids_may_be_reused_before_the_commit(world: World) -> None:
    """The rows of a delta were those that the caller's array held when the commit came."""
    rows = ids(1, 2)
    with world.writer.begin(2) as txn:
        rows_of(txn, rows, 5 * ones(2))
        rows[:] = [3, 4]

    assert world.open().snapshot().table("t").read()[:, 0].tolist() == [1, 5, 5, 1, 1, 1]
    world.writer.begin(3).commit()


@pytest.mark.parametrize("options", [TableOptions(encoding="raw"), TableOptions(scale=1.0)], ids=["raw", "lattice"])
def test_values_of_a_small_table_may_be_reused_before_the_commit(world: World, options: TableOptions) -> None:
    """Its rows wait for those of other tables that share a chunk with it."""
    values, slot = 5 * ones(3), np.arange(3, dtype=np.float32)
    with world.writer.begin(2) as txn:
        txn.write_table("n", values, slots={"m": slot}, options=options)
        values[:] = slot[:] = 9

    view = world.open().snapshot().table("n")
    assert view.read().tolist() == (5 * ones(3)).tolist()
    assert view.read(slot="m").tolist() == [0, 1, 2]


def test_a_transaction_ends_once(world: World) -> None:
    txn = world.writer.begin(2)
    txn.commit()
    for call in (txn.commit, lambda: rows_of(txn, ids(1)), lambda: txn.put_dense({}), lambda: txn.drop_table("t")):
        with pytest.raises(BadInput, match="has ended"):
            call()
    txn.abort()
    aborted = world.writer.begin(3)
    aborted.abort()
    with pytest.raises(BadInput, match="has ended"):
        aborted.commit()
    goes_on(world)


def test_one_transaction_at_a_time(world: World) -> None:
    """A second begin used to leave the first one's staged resize in the mirror."""
    first = world.writer.begin(2)
    first.resize_table("t", 2)
    with pytest.raises(SaveInProgress):
        world.writer.begin(3)
    first.abort()
    goes_on(world)


@pytest.mark.parametrize("step", [-1, 1.5, True, "2", None])
def test_a_step_is_a_whole_number(world: World, step: Any) -> None:
    with pytest.raises(BadInput):
        world.writer.begin(step)
    goes_on(world)


def test_numpy_integers_are_steps(world: World) -> None:
    world.writer.begin(np.int64(7)).commit()  # type: ignore[arg-type]
    assert world.open().snapshot(step=7).step == 7


@pytest.mark.parametrize("user", [{"x": float("inf")}, {"x": object()}])
def test_a_commit_of_what_is_no_json_is_refused_before_it_writes(world: World, user: Any) -> None:
    txn = world.writer.begin(2)
    puts = world.fs.count("write", "create")
    with pytest.raises(BadInput):
        txn.commit(user=user)
    assert world.fs.count("write", "create") == puts
    txn.commit(user={"x": 1})
    goes_on(world)


def test_an_exception_in_the_block_commits_nothing(world: World) -> None:
    head = world.store.latest_version()
    with pytest.raises(BadRowIds), world.writer.begin(2) as txn:
        rows_of(txn, ids(1, 1), 9 * ones(2))
    assert world.store.latest_version() == head
    goes_on(world)


def test_a_full_that_lacks_a_table_can_go_on(world: World) -> None:
    txn = world.writer.begin(2, "baseline")
    assert txn.needs_whole_tables == ["h"]
    with pytest.raises(BadInput, match="needs every row"):
        txn.commit()
    txn.write_rows("h", ids(), ones(0))
    txn.commit()
    assert len(world.store.snapshot().table("h").read_all()[0]) == 0
    goes_on(world)


def test_a_full_that_fails_at_its_end_leaves_no_open_transaction(world: World) -> None:
    with pytest.raises(BadInput, match="needs every row"), world.writer.begin(2, "baseline"):
        pass
    goes_on(world)


def test_a_full_without_a_restore_names_the_tables_it_would_lose(world: World) -> None:
    """It used to drop every table that was not given."""
    writer = world.open().writer()
    txn = writer.begin(2, "baseline")
    assert txn.needs_whole_tables == ["exact", "h", "t"]
    txn.write_table("t", ones(ROWS), slots=slot(ROWS), options=TableOptions(scale=SCALE))
    txn.drop_table("exact")
    txn.drop_table("h")
    txn.commit()
    assert sorted(world.open().snapshot().tables) == ["t"]
    goes_on(world, writer)


def test_an_emptied_hashed_table_can_be_made_anew_in_a_full(world: World) -> None:
    with world.writer.begin(2, "baseline") as txn:
        txn.drop_table("h")
        txn.create_table("h", dim=2, options=TableOptions(scale=SCALE))
    assert world.store.snapshot().tables["h"].dim == 2


# Other writers.


def test_a_second_writer_fences_the_first(world: World) -> None:
    second = world.open().writer()
    with pytest.raises(Fenced):
        world.writer.begin(2).commit()
    with pytest.raises(Fenced):
        world.writer.restore()
    with pytest.raises(Fenced):
        world.writer.begin(3, "baseline")
    second.restore()
    goes_on(world, second)


def test_a_writer_restores_the_head_that_a_rollback_made(world: World) -> None:
    """Its restore read the head it knew, so that every later save met the same conflict."""
    first = world.writer.head.record.v
    with world.writer.begin(2) as txn:
        rows_of(txn, ids(0), 7 * ones(1))
    world.open().rollback(first)
    with pytest.raises(Conflict):
        world.writer.begin(3).commit()
    with pytest.raises(DoesNotApply):
        world.writer.begin(4)
    world.writer.restore()
    goes_on(world)


def test_a_full_follows_a_rollback_without_a_restore(world: World) -> None:
    world.open().rollback(world.writer.head.record.v)
    with pytest.raises(Conflict):
        world.writer.begin(3).commit()
    txn = world.writer.begin(4, "baseline")
    txn.write_table("t", ones(ROWS), slots=slot(ROWS), options=TableOptions(scale=SCALE))
    for table in ("exact", "h"):
        txn.drop_table(table)
    txn.commit()
    goes_on(world)


def test_a_writer_that_has_not_restored_writes_no_delta(world: World) -> None:
    writer = world.open().writer()
    with pytest.raises(DoesNotApply):
        writer.begin(2)
    writer.restore()
    goes_on(world, writer)


def test_a_mirror_that_is_not_the_heads_is_refused_by_the_committer(world: World) -> None:
    mirror = world.writer.mirrors.get(Shard("t"))
    assert mirror is not None
    mirror.arrays["codes"][3, 1] += 1
    world.writer.mirrors.put(Shard("t"), mirror, mirror.digest())
    txn = world.writer.begin(2)
    rows_of(txn, ids(3), 5 * ones(1))
    head = world.store.latest_version()
    with pytest.raises(DoesNotApply, match="table 't'"):
        txn.commit()
    assert world.store.latest_version() == head
    world.writer.restore()
    goes_on(world)


def test_a_restore_checks_every_output_before_it_fills_one(world: World) -> None:
    values = np.full((ROWS, DIM), 7, np.float32)
    bad: list[tuple[type[Exception], dict[str, Any]]] = [
        (BadShape, {"exact": {"values": ones(ROWS + 1)}}),
        (BadDtype, {"exact": {"values": ones(ROWS, DIM, np.float64)}}),
        (TableNotFound, {"exact": {"v": ones(ROWS)}}),
        (TableNotFound, {"nobody": {"values": ones(ROWS)}}),
        (BadInput, {"h": {"values": ones(2)}}),
    ]
    for kind, outputs in bad:
        with pytest.raises(kind):
            world.writer.restore({"t": {"values": values}, **outputs})
        assert (values == 7).all()
        assert world.writer.is_synced
    goes_on(world)


def test_options_about_bad_rows_can_be_said_with_the_rows(world: World) -> None:
    """A writer that has restored a table forgot that its bad rows should escape."""
    values = np.asarray([[np.nan, 1, -np.inf]], np.float32)
    with world.writer.begin(2) as txn:
        assert rows_of(txn, ids(1), values, nonfinite="escape") == 1
    assert world.open().snapshot().table("t").read()[1].tobytes() == values.tobytes()


# A one-shot delta replaces the deltas since the baseline.


def test_a_one_shot_delta_needs_every_row_since_the_baseline(world: World) -> None:
    """The row fell back to the baseline's value, and the version could not be restored."""
    with world.writer.begin(2) as txn:
        rows_of(txn, ids(1, 4), 3 * ones(2))
        txn.write_rows("h", ids(5), ones(1))
    txn = world.writer.begin(3, base="baseline")
    with pytest.raises(BadInput, match="row 5 of table 'h'"):
        txn.commit()
    txn.delete_rows("h", ids(5))
    with pytest.raises(BadInput, match="row 1 of table 't'"):
        txn.commit()
    rows_of(txn, ids(0, 1, 4), 4 * ones(3))
    txn.commit()
    assert len(world.writer.head.record.chain) == 2
    world.writer.restore()
    assert world.open().snapshot().table("t").read()[:, 0].tolist() == [4, 4, 1, 1, 4, 1]


def test_a_one_shot_delta_needs_rows_that_were_cut_and_grown_again(world: World) -> None:
    with world.writer.begin(2) as txn:
        txn.resize_table("t", 3)
    with world.writer.begin(3) as txn:
        txn.resize_table("t", 5)
    txn = world.writer.begin(4, base="baseline")
    with pytest.raises(BadInput, match="row 3 of table 't'"):
        txn.commit()
    txn.delete_rows("t", ids(3, 4))
    txn.commit()
    world.writer.restore()
    assert world.open().snapshot().table("t").read()[:, 0].tolist() == [1, 1, 1, 0, 0]


def test_a_one_shot_delta_keeps_two_lives_of_a_table_apart(world: World) -> None:
    with world.writer.begin(2) as txn:
        txn.drop_table("t")
    with world.writer.begin(3) as txn:
        txn.write_table("t", ones(2, 2), options=TableOptions(scale=0.25))
    with world.writer.begin(4, base="baseline") as txn:
        txn.write_rows("t", ids(0, 1), 2 * ones(2, 2))
    assert world.open().snapshot().table("t").read().tolist() == [[2, 2], [2, 2]]


def test_the_chain_cap_makes_a_delta_a_full(world: World) -> None:
    with world.writer.begin(2) as txn:
        txn.drop_table("h")
    for step in range(3, MAX_CHAIN + 1):
        txn = world.writer.begin(step)
        assert txn.kind == "delta"
        txn.commit()
    assert len(world.writer.head.record.chain) == MAX_CHAIN
    with world.writer.begin(MAX_CHAIN + 1) as txn:
        assert txn.kind == "baseline"
        rows_of(txn, ids(0), 8 * ones(1))
    assert len(world.writer.head.record.chain) == 1
    assert world.open().snapshot().table("t").read()[:, 0].tolist() == [8, 1, 1, 1, 1, 1]


# Storage that fails.


@pytest.mark.parametrize("at", range(8))
def test_a_table_that_was_half_written_cannot_be_committed(world: World, at: int) -> None:
    """After a failed put the transaction went on, and its commit was a table without rows."""
    txn = world.writer.begin(2)
    world.fs.arm(Fault(FaultKind.DISK_FULL, len(world.fs.calls) + at))
    try:
        txn.write_table("n", ones(2), options=TableOptions(scale=1.0))
    except StorageFailure:
        world.fs.arm(None)
        with pytest.raises(BadInput, match="has ended"):
            txn.commit()
        assert "n" not in world.open().snapshot().tables
    else:
        world.fs.arm(None)
        txn.commit()
        assert world.open().snapshot().table("n").read().tolist() == ones(2).tolist()
    goes_on(world)


# Stores that are something else, or damaged.


def test_not_a_store() -> None:
    with pytest.raises(NotAStore):
        Store.open_on(storage_from_filesystem(IsolatedMemoryFileSystem(), ROOT), threads=1)


def test_newer_format(world: World) -> None:
    world.write(IDENTITY, json.dumps({**json.loads(world.read(IDENTITY)), "major": 2}).encode())
    with pytest.raises(NewerFormat):
        world.open()


def rewrite_head(world: World, **fields: Any) -> None:
    """Give the newest record other fields, in canonical form."""
    key = commit_key(world.store.latest_version())
    world.write(key, sealed({**json.loads(world.read(key)), **fields}))


def test_unknown_reader_feature(world: World) -> None:
    rewrite_head(world, reader_features=["from_the_future"])
    with pytest.raises(UnknownFeature, match="from_the_future"):
        world.open().snapshot()


def test_unknown_writer_feature_is_read_only(world: World) -> None:
    rewrite_head(world, writer_features=["from_the_future"])
    store = world.open()
    assert store.snapshot().table("t").read().shape == (ROWS, DIM)
    with pytest.raises(ReadOnlyStore, match="from_the_future"):
        store.writer()


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.tag("good"),
        lambda store: store.rollback(1),
        lambda store: store.set_channel("serving"),
        lambda store: store.fork("trial"),
    ],
    ids=["tag", "rollback", "channel", "fork"],
)
def test_nothing_is_appended_to_a_read_only_store(world: World, change: Callable[[Store], Any]) -> None:
    """Tags and rollbacks were: only a writer looked at the features."""
    rewrite_head(world, writer_features=["from_the_future"])
    store = world.open()
    head = store.latest_version()

    with pytest.raises(ReadOnlyStore, match="from_the_future"):
        change(store)

    assert store.latest_version() == head


def test_torn_record(world: World) -> None:
    key = commit_key(world.store.latest_version())
    world.write(key, world.read(key)[:-9])
    with pytest.raises(CorruptRecord):
        world.open().head()


def test_names_and_numbers_that_do_not_exist(world: World) -> None:
    store = world.open()
    with pytest.raises(VersionNotFound):
        store.snapshot(version=99)
    with pytest.raises(VersionNotFound):
        store.snapshot(step=99)
    with pytest.raises(TagNotFound):
        store.snapshot(tag="nobody")
    with pytest.raises(TableNotFound):
        store.snapshot().table("nobody")
    with pytest.raises(TableNotFound):
        store.snapshot().read_dense("nobody")
    with pytest.raises(TableNotFound):
        store.snapshot().read_document("nobody")


def objects(world: World) -> list[str]:
    """Keys of the objects that reading every table and tensor needs: chunks, and the manifest."""
    reader = world.store.snapshot().readers[-1]
    names = [entry.path for entry in reader.manifest.objects if "/c/" in entry.path]
    return [segment_key(reader.name, name) for name in ("_segment.json.zst", *names)]


def read_all(world: World) -> None:
    snapshot = world.open().snapshot()
    for name, schema in snapshot.tables.items():
        view = snapshot.table(name)
        if schema.keys == "hashed":
            view.read_all(slots=True)
        else:
            view.read_rectangle(
                values=np.empty(view.shape, np.float32), slots={s: np.empty(ROWS, np.float32) for s in schema.slots}
            )
    for name in snapshot.dense:
        snapshot.read_dense(name)


def damage_found(world: World) -> CorruptStore | None:
    try:
        read_all(world)
    except CorruptStore as error:
        return error
    return None


def scattered() -> World:
    """Rows that are no range, so that every chunk has to be read."""
    world = World()
    with world.writer.begin(2, "baseline") as txn:
        txn.write_rows("h", ids(-7, 9, 11), ones(3))
        txn.write_table("n", np.arange(12, dtype=np.float32).reshape(6, 2), options=TableOptions(scale=SCALE))
        txn.delete_rows("t", ids(1))
        txn.delete_rows("exact", ids(2))
    return world


DAMAGES: dict[str, tuple[type[Exception], Callable[[bytes], bytes | None]]] = {
    "missing": (MissingObject, lambda _: None),
    "truncated": (CorruptObject, lambda data: data[:-1]),
    "flipped": (CorruptObject, lambda data: data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]),
    "longer": (CorruptObject, lambda data: data + b"\0"),
    "empty": (CorruptObject, lambda _: b""),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_object_is_named(damage: str) -> None:
    world = scattered()
    kind, change = DAMAGES[damage]
    read_all(world)
    contiguous = 0
    for key in objects(world):
        good = world.read(key)
        bad = change(good)
        if bad is None:
            world.inner.rm_file(world.key(key))
        else:
            world.write(key, bad)
        error = damage_found(world)
        if error is None:
            assert ".rows/c/0" in key  # row ids that the manifest tells are not read
            contiguous += 1
        else:
            assert type(error) is kind
            assert key in str(error)
            assert error.path is not None
        world.write(key, good)
    assert contiguous <= 2
    read_all(world)


def test_two_swapped_chunks_of_one_size_are_found(world: World) -> None:
    with world.writer.begin(2) as txn:
        rows_of(txn, ids(0), 3 * ones(1))
    reader = world.store.snapshot().readers[-1]
    sizes: dict[int, list[str]] = {}
    for entry in reader.manifest.objects:
        if "/c/" in entry.path and ".rows/" not in entry.path:
            sizes.setdefault(entry.size, []).append(segment_key(reader.name, entry.path))
    with world.writer.begin(3) as txn:
        rows_of(txn, ids(0), ones(1))
    later = world.store.snapshot().readers[-1]
    pairs = [
        (one, segment_key(later.name, other.path))
        for other in later.manifest.objects
        for one in sizes.get(other.size, [])
        if "/c/" in other.path
        and ".rows/" not in other.path
        and world.read(one) != world.read(segment_key(later.name, other.path))
    ]
    for one, other in pairs[:3]:
        first, second = world.read(one), world.read(other)
        world.write(other, first)
        with pytest.raises(CorruptObject) as caught:
            read_all(world)
        assert other in str(caught.value)
        world.write(other, second)
    assert pairs, "no two chunks had one size"


def with_manifest(world: World, change: Callable[[dict[str, Any]], None]) -> None:
    """Alter the newest manifest and make the record name its new digest: what a hostile writer could do."""
    version = world.store.latest_version()
    record = json.loads(world.read(commit_key(version)))
    key = segment_key(record["chain"][-1]["seg"], "_segment.json.zst")
    manifest = json.loads(unpack(world.read(key), key))
    change(manifest)
    data = pack(manifest)
    world.write(key, data)
    lists = [part.get(name) for part in manifest.get("parts", ()) for name in ("add", "set", "delete", "escape")]
    groups = [*manifest["groups"], *manifest["dense_arrays"]]
    arrays = [item for group in groups for array in group["arrays"].values() for item in array["objects"]]
    record["chain"][-1] |= {
        "sha256": sha256(data),
        "rows": sum(row_list["count"] for row_list in lists if row_list),
        "bytes": len(data) + sum(item["size"] for item in [*manifest["objects"], *arrays]),
    }
    world.write(commit_key(version), sealed(record))


def first_part(manifest: dict[str, Any], table: str = "t") -> dict[str, Any]:
    part: dict[str, Any] = next(part for part in manifest["parts"] if part["table"] == table)
    return part


def codes_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The codes that table ``t`` shares with others."""
    codes: dict[str, Any] = first_group(manifest)["arrays"]["codes"]
    return codes


def first_group(manifest: dict[str, Any]) -> dict[str, Any]:
    path = first_part(manifest)["set"]["group"]
    group: dict[str, Any] = next(group for group in manifest["groups"] if group["path"] == path)
    return group


def set_path(manifest: dict[str, Any], path: str) -> None:
    manifest["objects"][0]["path"] = path


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "object outside the root": lambda m: set_path(m, "../../etc/passwd"),
    "absolute object": lambda m: set_path(m, "/etc/passwd"),
    "object with a null byte": lambda m: set_path(m, "a\0b"),
    "array outside the root": lambda m: first_group(m).update(path="../../../x"),
    "dense outside the root": lambda m: m["dense"]["w"].update(path="../w"),
    "document outside the root": lambda m: m["documents"].update({"reader/0": "../../x"}),
    "table of 2^70 elements": lambda m: m["tables"]["t"].update(num_rows=2**60, dim=2**10),
    "negative number of rows": lambda m: m["tables"]["t"].update(num_rows=-1),
    "table without columns": lambda m: m["tables"]["t"].update(dim=0),
    "array of 2^55 rows": lambda m: first_group(m).update(rows=2**55),
    "chunks of no rows": lambda m: first_group(m).update(chunk_rows=0),
    "unknown dtype": lambda m: codes_of(m).update(dtype="object"),
    "code of 64 bits": lambda m: codes_of(m).update(dtype="int64"),
    "more rows than the table": lambda m: first_part(m)["set"].update(last=[ROWS]),
    "negative first row": lambda m: first_part(m)["set"].update(first=[-1]),
    "part beyond the table": lambda m: first_part(m).update(rows=[0, 2**40]),
    "scale of zero": lambda m: m["tables"]["t"]["encoding"].update(scale=0.0),
    "shift of 200": lambda m: m["tables"]["t"].update(shift=200),
    "unknown encoding": lambda m: m["tables"]["t"]["encoding"].update(encoding="pickle"),
    "text for a number": lambda m: m["tables"]["t"].update(num_rows="6"),
    "no tables": lambda m: m.pop("tables"),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_a_hostile_manifest_is_refused_before_memory_is_taken(world: World, case: str) -> None:
    with_manifest(world, HOSTILE[case])
    with pytest.raises(CorruptStore) as caught:
        world.open().snapshot()
    assert "_segment.json.zst" in str(caught.value)


def test_a_stream_that_holds_more_than_its_chunk_is_refused(world: World) -> None:
    """A decompression bomb: the compressed stream, its digest and its size agree, its number of elements does not."""
    from cnr_store.format import arrays
    from cnr_store.format.records import ArrayEntry
    from cnr_store.storage import object_digest

    count = 2_000_000
    bomb = ArrayEntry(
        path="x", dtype="int16", shape=(count, DIM), chunk_rows=count, codec="digits", start=0, count=count
    )  # fmt: skip
    data = arrays.encode_chunk(bomb, np.zeros((2_000_000, DIM), np.int16))
    assert len(data) < 1000
    record = world.store.head().record

    def change(manifest: dict[str, Any]) -> None:
        path = first_group(manifest)["path"] + ".codes/c/0/0"
        codes_of(manifest)["objects"][1].update(size=len(data), xxh3_128=object_digest(data))
        world.write(segment_key(record.chain[-1].seg, path), data)

    with_manifest(world, change)
    with pytest.raises(CorruptObject, match="elements"):
        world.open().snapshot().table("t").read()
