"""Bad input, each kind with its own error: nothing is committed, and the writer goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cnr_store import BadInput, Conflict, StorageFailure, TableOptions, Transaction
from cnr_store.errors import (
    BadDtype,
    BadName,
    BadRowIds,
    BadShape,
    DoesNotApply,
    Fenced,
    NonFiniteValues,
    SaveInProgress,
    TableNotFound,
)
from cnr_store.segment.shards import Shard
from cnr_store.types import MAX_CHAIN
from tests.support.faulty import Fault, FaultKind
from tests.write.world import DIM, ROWS, SCALE, World, goes_on, ids, ones, rows_of, slot

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
    "values in lists": (BadDtype, lambda t: rows_of(t, ids(1), ones(1).tolist())),
    "values of torch": (BadDtype, lambda t: rows_of(t, ids(1), torch.ones(1, DIM))),
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
