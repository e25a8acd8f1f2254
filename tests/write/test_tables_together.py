"""Rows of many tables that are encoded, and moved into mirrors, by one call each: as one call per table does it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import RowUpdate, Store, TableOptions
from cnr_store.errors import BadInput, BadRowIds, NonFiniteValues
from cnr_store.format import arrays
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import ABSENT, TableCodes, array_specs
from cnr_store.segment.rows import check_row_ids
from cnr_store.segment.shards import Shard
from cnr_store.write.alike_shards import FoundLines, Key, ShardLines
from cnr_store.write.baseline_rows import encode_table
from cnr_store.write.delta_rows import EncodedRows, TouchedTable, encode_alone
from cnr_store.write.encode import own_row_ids
from cnr_store.write.joined_rows import JoinedRows, encode_groups, move_run, plan_rows
from cnr_store.write.mirrors import apply_alone, apply_rows
from cnr_store.write.schema_choice import table_schema
from tests.support.memory import store_in_memory

ROWS = 12


def touched_table(data: st.DataObject, number: int, workers: Workers) -> TouchedTable:
    """Rows of a table as a drawn kind has them: most can go with others, each kind has its reason not to."""
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    kind = data.draw(st.sampled_from(["plain"] * 4 + ["exact", "wide", "far", "bad", "absent", "same", "strided"]))
    dim = data.draw(st.sampled_from([1, 5]))
    values = random.standard_normal((ROWS, dim)).astype(np.float32)
    slots = {"row": np.abs(random.standard_normal(ROWS)).astype(np.float32), "element": np.abs(values)}
    encoding = "float_bits" if kind == "exact" else None
    options = TableOptions(
        encoding=encoding, scale=None if encoding else float(data.draw(st.sampled_from([0.25, 0.5])))
    )
    schema = table_schema(f"t{number}", options, num_rows=ROWS, dim=dim, dtype="float32", sample=values, slots=slots)
    arrays = {"codes": values, **{f"slots/{name}": slot for name, slot in slots.items()}}
    mirror = encode_table(
        f"t{number}", schema, arrays, allocate=np.zeros, on_bad_rows="refuse", workers=workers
    ).mirror  # fmt: skip
    assert mirror is not None
    if kind == "wide":
        mirror.widen("codes")
    if kind == "absent":
        mirror.mark(np.array([3]), ABSENT)
    rows = np.flatnonzero(random.random(ROWS) < 0.6).astype(np.int64)
    new = {
        name: np.ascontiguousarray(array.reshape(ROWS, -1)[rows] * np.float32(1 if kind == "same" else 1.7))
        for name, array in arrays.items()
    }
    if kind == "far" and len(rows):
        new["codes"][0] = 1e5  # a difference beyond int16
    if kind == "bad" and len(rows):
        new[data.draw(st.sampled_from(sorted(new)))][-1] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    if kind == "strided":
        new["codes"] = np.asfortranarray(new["codes"])
    return TouchedTable(f"t{number}", array_specs(schema), mirror, rows, new, mirror.digest(), "escape")


def lists_of(encoded: EncodedRows) -> dict[str, object]:
    return {
        operation: (item.row_ids.tolist(), {n: (a.dtype, a.shape, a.tobytes()) for n, a in item.arrays.items()})
        for operation, item in encoded.lists.items()
    }


def state_of(mirror: TableCodes) -> tuple[object, ...]:
    status = None if mirror.status is None else mirror.status.tolist()
    return {n: (a.dtype, a.tobytes()) for n, a in mirror.arrays.items()}, status, mirror.escapes.rows.tolist()


def update_of(one: TouchedTable) -> RowUpdate:
    slots = {
        name.removeprefix("slots/"): values[:, 0] if one.specs[name].is_vector else values
        for name, values in one.values.items()
        if name != "codes"
    }
    return RowUpdate(one.table, one.row_ids, one.values["codes"], slots)


class Encoded:
    """What `plan_rows` and `encode_groups` make of tables, and the rest by itself, as a transaction does."""

    def __init__(self, touched: Sequence[TouchedTable], lines: ShardLines, workers: Workers, *, joins: bool) -> None:
        by_name = {one.table: one for one in touched}
        updates = [update_of(one) for one in touched]
        schemas = {one.table: one.mirror.schema for one in touched if one.mirror is not None}

        def mirrors_of(shards: Sequence[Shard]) -> list[tuple[TableCodes | None, int | None]]:
            return [(by_name[shard.table].mirror, by_name[shard.table].base_digest) for shard in shards]

        def find(keys: Sequence[Key]) -> list[FoundLines]:
            return lines.find(keys, schemas, mirrors_of, lambda table, _schema, _rectangle: Shard(table))

        plan = plan_rows(updates, [], find)
        if joins:  # the same rows, given end to end
            given = [group.rows for group in plan.groups]
            plan = plan_rows([update for _, update in plan.rest], given, find)
        self.runs, alone = encode_groups(plan.groups, workers)
        self.alone = {
            update.table: encode_alone(by_name[update.table], absolute=False, workers=workers)
            for _, update in (*plan.rest, *alone)
        }

    def of(self, table: str) -> EncodedRows:
        found = [own for run in self.runs if (own := run.of(Shard(table))) is not None]
        found += [self.alone[table]] if table in self.alone else []
        assert len(found) == 1
        return found[0]


@settings(max_examples=120)
@given(data=st.data())
def test_tables_together_have_the_row_lists_of_each_alone(data: st.DataObject) -> None:
    lines = ShardLines()
    with Workers(2) as workers:
        touched = [touched_table(data, number, workers) for number in range(data.draw(st.integers(0, 7)))]
        touched = [one for one in touched if len(one.row_ids)]

        together = Encoded(touched, lines, workers, joins=data.draw(st.booleans()))

        expected = {one.table: encode_alone(one, absolute=False, workers=workers) for one in touched}
        for name, encoded in expected.items():
            assert lists_of(together.of(name)) == lists_of(encoded)
            assert together.of(name).digest == encoded.digest
        mirrors = {one.table: one.mirror for one in touched if one.mirror is not None}
        moved = copy.deepcopy(mirrors)
        for run in together.runs:
            move_run(run)
        apply_rows([(encoded, mirrors[name]) for name, encoded in together.alone.items()], workers)
        for name, encoded in expected.items():
            apply_alone(encoded, moved[name], workers)
            assert state_of(mirrors[name]) == state_of(moved[name])
            assert mirrors[name].digest() == encoded.digest


@settings(max_examples=60)
@given(data=st.data())
def test_kept_lines_are_those_of_the_mirrors_as_they_are_now(data: st.DataObject) -> None:
    """Between two saves a mirror got wider, lost a row, was replaced, or its table has another schema."""
    lines = ShardLines()
    with Workers(2) as workers:
        before = [touched_table(data, number, workers) for number in range(4)]
        before = [one for one in before if len(one.row_ids)]
        Encoded(before, lines, workers, joins=False)
        touched = []
        for one in before:
            what = data.draw(st.sampled_from(["same", "wider", "absent", "replaced"]))
            assert one.mirror is not None
            if what == "wider":
                one.mirror.widen("codes")
                one.mirror.arrays["codes"] += 1
            if what == "absent":
                one.mirror.mark(np.array([3]), ABSENT)
            mirror = one.mirror
            if what == "replaced":
                arrays = {name: array + (name == "codes") for name, array in one.mirror.arrays.items()}
                mirror = TableCodes(one.mirror.schema, 0, ROWS, arrays)
            touched.append(msgspec.structs.replace(one, mirror=mirror, base_digest=mirror.digest()))

        together = Encoded(touched, lines, workers, joins=False)

        for one in touched:
            encoded = encode_alone(one, absolute=False, workers=workers)
            assert lists_of(together.of(one.table)) == lists_of(encoded)
            assert together.of(one.table).digest == encoded.digest


def test_tables_of_many_rows_are_encoded_in_several_runs() -> None:
    random = np.random.default_rng(0)
    with Workers(2) as workers:
        touched = []
        for number in range(5):
            values = random.standard_normal((9_000, 2)).astype(np.float32)
            options = TableOptions(scale=0.1)
            schema = table_schema("t", options, num_rows=9_000, dim=2, dtype="float32", sample=values, slots={})
            mirror = encode_table(
                f"t{number}", schema, {"codes": values}, allocate=np.zeros, on_bad_rows="refuse", workers=workers
            ).mirror  # fmt: skip
            assert mirror is not None
            rows = np.arange(len(values), dtype=np.int64)
            new = {"codes": values + np.float32(1)}
            touched.append(
                TouchedTable(f"t{number}", array_specs(schema), mirror, rows, new, mirror.digest(), "refuse")
            )  # fmt: skip
        found = Encoded(touched, ShardLines(), workers, joins=False)
        assert len(found.runs) == 3
        assert [lists_of(found.of(one.table)) for one in touched] == [
            lists_of(encode_alone(one, absolute=False, workers=workers)) for one in touched
        ]


@settings(max_examples=200)
@given(
    ids=st.lists(st.lists(st.integers(-2, 9), max_size=4), max_size=5),
    ranges=st.lists(st.sampled_from([(0, 8), (2, 6), None]), min_size=5, max_size=5),
)
def test_row_ids_of_many_tables_are_checked_as_those_of_each(
    ids: list[list[int]], ranges: list[tuple[int, int] | None]
) -> None:
    arrays, names = [np.array(one, np.int64) for one in ids], [f"t{k}" for k in range(len(ids))]

    def message_of(work: Callable[[], object]) -> str:
        try:
            work()
        except BadRowIds as error:
            return str(error)
        return ""

    def check_each() -> None:
        for rows, held, name in zip(arrays, ranges, names, strict=False):
            first_row, stop = held or (0, None)
            check_row_ids(rows, stop, first_row=first_row, table=name)

    expected = message_of(check_each)
    assert message_of(lambda: own_row_ids(arrays, ranges[: len(arrays)], names)) == expected
    if expected:
        return
    owned = own_row_ids(arrays, ranges[: len(arrays)], names)
    assert [one.tolist() for one in owned] == ids
    assert not any(np.shares_memory(one, given_ids) for one, given_ids in zip(owned, arrays, strict=True) if len(one))


def store_with(tables: Sequence[str]) -> Store:
    store = store_in_memory(threads=None)
    with store.writer() as writer, writer.begin(0, "baseline") as txn:
        for table in tables:
            txn.write_table(table, np.zeros((4, 2), np.float32), options=TableOptions(scale=0.5))
    return store


def test_of_a_call_that_is_refused_no_table_is_written() -> None:
    rows, good = np.array([1], np.int64), np.ones((1, 2), np.float32)
    bad = np.full((1, 2), np.nan, np.float32)
    with store_with(["a", "b"]) as store, store.writer() as writer:
        writer.restore()
        with writer.begin(1) as txn:
            with pytest.raises(NonFiniteValues):
                txn.write_many([RowUpdate("a", rows, good), RowUpdate("b", rows, bad)])
            with pytest.raises(BadInput, match="twice"):
                txn.write_many([RowUpdate("a", rows, good), RowUpdate("a", rows + 1, good)])
            assert txn.write_many([RowUpdate("a", rows, good), RowUpdate("b", rows[:0], good[:0])]) == [1, 0]
        assert store.snapshot().table("a").read().tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
        assert not store.snapshot().table("b").read().any()


@pytest.mark.parametrize("ids", [[1, 1], [2, 1], [-1, 1], [1, 4]], ids=["twice", "descending", "negative", "beyond"])
@pytest.mark.parametrize("joins", [False, True], ids=["given by table", "given end to end"])
def test_row_ids_of_tables_together_are_refused_as_those_of_each(ids: list[int], joins: bool) -> None:
    good, wrong, values = np.array([0, 1], np.int64), np.array(ids, np.int64), np.ones((2, 2), np.float32)
    by_table, end_to_end = [RowUpdate("a", good, values), RowUpdate("b", wrong, values)], []
    if joins:
        rows, keys = np.concatenate([good, wrong]), [("a", None), ("b", None)]
        by_table, end_to_end = [], [JoinedRows(keys, np.array([2, 2]), rows, np.ones((4, 2), np.float32), {})]
    with store_with(["a", "b"]) as store, store.writer() as writer:
        writer.restore()
        with writer.begin(1) as txn:
            with pytest.raises(BadRowIds, match="'b'"):
                txn.write_many(by_table, joined=end_to_end)
            assert txn.write_many([RowUpdate("a", good, values), RowUpdate("b", good, values)]) == [2, 2]


@settings(max_examples=60)
@given(data=st.data())
def test_rows_of_a_run_stay_with_their_tables_in_any_transaction(data: st.DataObject) -> None:
    """Lists of one table alone, deletions, tables without rows, calls in another order, chunks of a few rows."""
    names = [f"t{number}" for number in range(data.draw(st.integers(2, 6)))]
    expected = {name: np.zeros((4, 2), np.float32) for name in names}
    with pytest.MonkeyPatch.context() as patch, store_with(names) as store, store.writer() as writer:
        patch.setattr(arrays, "CHUNK_BYTES", data.draw(st.sampled_from([8, 12, 40, 1 << 20])))
        writer.restore()
        with writer.begin(1) as txn:
            for name in data.draw(st.permutations(names))[: data.draw(st.integers(0, 2))]:
                assert txn.write_rows(name, np.empty(0, np.int64), np.empty((0, 2), np.float32)) == 0
            updates = []
            for name in data.draw(st.permutations(names)):
                rows = np.array(sorted(data.draw(st.sets(st.integers(0, 3)))), np.int64)
                values = np.full((len(rows), 2), data.draw(st.integers(0, 9)), np.float32)
                values[:, 1] = rows
                expected[name][rows] = values
                updates.append(RowUpdate(name, rows, values))
            txn.write_many(updates)
            for update in updates:
                gone = np.setdiff1d(np.arange(4), update.row_ids)
                if data.draw(st.booleans()):
                    txn.delete_rows(update.table, gone)
        assert {name: store.snapshot().table(name).read().tolist() for name in names} == {
            name: values.tolist() for name, values in expected.items()
        }
        with store.writer() as after:
            after.restore()  # recomputes the state digests


@pytest.mark.parametrize("then", ["wider", "baseline"])
def test_mirrors_that_were_replaced_leave_memory(then: str) -> None:
    with store_in_memory() as store, store.writer() as writer:
        tables = [f"t{number}" for number in range(3)]
        rows = np.arange(ROWS)
        with writer.begin(1, "baseline") as txn:
            for table in tables:
                txn.write_table(table, np.ones((ROWS, 2), np.float32), options=TableOptions(scale=0.5))
        with writer.begin(2) as txn:
            txn.write_many([RowUpdate(table, rows, np.full((ROWS, 2), 2, np.float32)) for table in tables])
        held = [weakref.ref(codes.arrays["codes"]) for codes, _ in writer.mirrors.held().values()]
        assert len(held) == len(tables)

        with writer.begin(3, "baseline" if then == "baseline" else "delta") as txn:
            values = np.full((ROWS, 2), 10_000, np.float32)  # codes beyond int16 after one more step
            for table in tables if then == "baseline" else ():
                txn.write_table(table, values)
            if then == "wider":
                txn.write_many([RowUpdate(table, rows, values) for table in tables])
        if then == "wider":
            with writer.begin(4) as txn:
                txn.write_many([RowUpdate(table, rows, 2 * values) for table in tables])
        gc.collect()

        assert all(one() is None for one in held)
