"""Rows of many tables that are encoded, and moved into mirrors, by one call each: as one call per table does it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

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
from cnr_store.write.baseline_rows import encode_table
from cnr_store.write.delta_rows import EncodedRows, TouchedTable, encode_alone, encode_touched
from cnr_store.write.encode import own_row_ids
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


@settings(max_examples=120)
@given(data=st.data())
def test_tables_together_have_the_row_lists_of_each_alone(data: st.DataObject) -> None:
    with Workers(2) as workers:
        touched = [touched_table(data, number, workers) for number in range(data.draw(st.integers(0, 7)))]
        touched = [one for one in touched if len(one.row_ids)]
        absolute = data.draw(st.sampled_from([False, False, True]))

        together = encode_touched(touched, absolute=absolute, workers=workers)

        expected = [encode_alone(one, absolute=absolute, workers=workers) for one in touched]
        assert [lists_of(encoded) for encoded in together] == [lists_of(encoded) for encoded in expected]
        assert [encoded.digest for encoded in together] == [encoded.digest for encoded in expected]
        moved = [copy.deepcopy(one.mirror) for one in touched if one.mirror is not None]
        mirrors = [one.mirror for one in touched if one.mirror is not None]
        apply_rows(zip(together, mirrors, strict=True), workers)
        for encoded, mirror in zip(expected, moved, strict=True):
            apply_alone(encoded, mirror, workers)
        assert [state_of(mirror) for mirror in mirrors] == [state_of(mirror) for mirror in moved]
        if not absolute:
            assert [mirror.digest() for mirror in mirrors] == [encoded.digest for encoded in together]


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
        found = encode_touched(touched, absolute=False, workers=workers)
        assert [lists_of(one) for one in found] == [
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
