"""Whole tables that are encoded by one call: what is stored, and kept as mirrors, is as of one call per table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cnr_store import Store, TableOptions, TableValues
from cnr_store.errors import BadInput, NonFiniteValues
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import array_specs
from cnr_store.segment.shards import Shard, whole_of
from cnr_store.types import Rectangle
from cnr_store.write.baseline_rows import encode_table
from cnr_store.write.encode import ENCODE_ROWS
from cnr_store.write.schema_choice import table_schema
from cnr_store.write.whole_tables import WholeTable, encode_run, plan_tables
from tests.support.memory import store_in_memory

SIZES = [1, 63, 64, 5, 700, 12]


def whole_table(
    number: int, rows: int, dim: int = 4, *, scale: float = 0.25, columns: tuple[int, int] | None = None, **options: Any
) -> WholeTable:
    random = np.random.default_rng(number)
    values = random.standard_normal((rows, dim)).astype(np.float32)
    slots = {"sum": np.abs(values), "row": np.abs(values[:, 0])}
    chosen = TableOptions(**options) if options else TableOptions(scale=scale)
    schema = table_schema(f"t{number}", chosen, num_rows=rows, dim=dim, dtype="float32", sample=values, slots=slots)
    place = whole_of(schema) if columns is None else Rectangle((0, rows), columns)
    part = slice(*place.columns)
    arrays = {"codes": values[:, part], "slots/sum": slots["sum"][:, part], "slots/row": slots["row"]}
    return WholeTable(Shard(f"t{number}"), schema, place, array_specs(schema, place.columns), arrays)


def assert_encoded_as_alone(tables: list[WholeTable]) -> list[WholeTable]:
    """Encode tables together; compare rows, mirrors and digests with `encode_table`; returns those left over."""
    together, alone = encode_run(tables, np.zeros)
    assert together.joined is not None
    assert [*together.tables, *alone] == [one for one in tables if one not in alone] + alone
    start = 0
    with Workers(1) as workers:
        for one, found in zip(together.tables, together.encoded, strict=True):
            expected = encode_table(
                "t", one.schema, one.arrays, allocate=np.zeros, on_bad_rows="refuse", workers=workers,
                rectangle=one.rectangle,
            )  # fmt: skip
            assert found.mirror is not None
            assert expected.mirror is not None
            assert expected.rows is not None
            assert found.digest == expected.digest == found.mirror.digest()
            for name, held in expected.mirror.arrays.items():
                np.testing.assert_array_equal(found.mirror.arrays[name], held, strict=True)
            stop = start + expected.rows.count
            stored = together.joined.between(start, stop)
            blocks = expected.rows.produce(0, expected.rows.count)
            assert blocks.keys() == {"rows", *stored.arrays}
            for name, block in blocks.items():
                given = stored.row_ids if name == "rows" else stored.arrays[name]
                np.testing.assert_array_equal(given, block, strict=True)
            start = stop
    assert start == len(together.joined.row_ids)
    return alone


@pytest.mark.parametrize("options", [{}, {"encoding": "float_bits", "mantissa_bits": 7}, {"encoding": "float_bits"}])
def test_tables_encoded_together_are_as_each_by_itself(options: dict[str, Any]) -> None:
    tables = [whole_table(number, rows, scale=0.1 * (1 + number), **options) for number, rows in enumerate(SIZES)]
    assert plan_tables(tables) == [[*range(len(SIZES))]]
    assert assert_encoded_as_alone(tables) == []


def test_columns_of_tables_are_encoded_together() -> None:
    tables = [whole_table(number, rows, 6, columns=(2, 5)) for number, rows in enumerate(SIZES)]
    assert assert_encoded_as_alone(tables) == []


@pytest.mark.parametrize("layout", [np.asfortranarray, lambda block: np.repeat(block, 2, axis=0)[::2]])
def test_tables_that_are_not_contiguous_are_encoded_together(layout: Any) -> None:
    tables = [whole_table(number, rows) for number, rows in enumerate(SIZES)]
    strided = [
        WholeTable(one.shard, one.schema, one.rectangle, one.specs, {n: layout(a) for n, a in one.arrays.items()})
        for one in tables
    ]
    assert assert_encoded_as_alone(strided) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("codes", np.nan), ("codes", 3e4), ("codes", 1e30), ("slots/sum", np.inf), ("slots/row", np.nan)],
)
def test_a_table_with_bad_rows_or_wide_codes_goes_alone(name: str, value: float) -> None:
    tables = [whole_table(number, rows) for number, rows in enumerate(SIZES)]
    tables[2].arrays[name][-1] = value
    assert assert_encoded_as_alone(tables) == [tables[2]]


def test_only_small_tables_that_are_alike_are_encoded_together() -> None:
    small = [whole_table(number, 5) for number in range(3)]
    codes = whole_table(3, 5)
    as_codes = WholeTable(
        codes.shard, codes.schema, codes.rectangle, codes.specs,
        {**codes.arrays, "codes": np.rint(codes.arrays["codes"] / np.float32(0.25)).astype(np.int16)},
    )  # fmt: skip
    others = [
        whole_table(4, 0), whole_table(5, ENCODE_ROWS + 1), whole_table(6, 5, 8), whole_table(7, 5, encoding="affine"),
        as_codes,
    ]  # fmt: skip
    assert plan_tables([*small[:2], *others, small[2]]) == [[0, 1, 7], [2], [3], [4], [5], [6]]


def test_a_run_ends_where_it_has_enough_rows() -> None:
    tables = [whole_table(number, rows) for number, rows in enumerate([ENCODE_ROWS - 1, 5, 7, 3])]
    assert plan_tables(tables) == [[0, 1], [2, 3]]


def written(tables: list[TableValues], *, together: bool) -> Store:
    store = store_in_memory()
    with store.writer() as writer, writer.begin(0, "baseline") as txn:
        for call in [tables] if together else [[one] for one in tables]:
            txn.write_tables(call)
    return store


def test_tables_written_together_have_the_states_of_those_written_alone() -> None:
    random = np.random.default_rng(0)
    given = []
    for number, rows in enumerate([3, 100, 0, 20_000, 40, 9]):
        values = random.standard_normal((rows, 4)).astype(np.float32)
        slots = {"sum": np.abs(values)}
        given.append(TableValues(f"t{number}", values, slots, TableOptions(bits=4, nonfinite="escape")))
    given[1].values[7] = np.nan
    one, other = written(given, together=True), written(given, together=False)

    for table in given:
        found, expected = one.snapshot().table(table.table), other.snapshot().table(table.table)
        assert found.schema == expected.schema
        np.testing.assert_array_equal(found.read(), expected.read())
    digests = [
        {part.table: part.state_digest for part in store.snapshot().manifests[0].parts} for store in (one, other)
    ]
    assert digests[0] == digests[1]


def test_a_delta_builds_on_tables_that_were_written_together() -> None:
    store = store_in_memory()
    values = {f"t{number}": np.full((8, 4), number, np.float32) for number in range(3)}
    with store.writer() as writer:
        with writer.begin(0, "baseline") as txn:
            txn.write_tables(
                [TableValues(name, rows, options=TableOptions(scale=0.5)) for name, rows in values.items()]
            )
        with writer.begin(1) as txn:
            assert txn.write_rows("t1", np.array([2, 5]), np.full((2, 4), 7, np.float32)) == 2
    values["t1"][[2, 5]] = 7
    for name, rows in values.items():
        np.testing.assert_array_equal(store.snapshot().table(name).read(), rows)


def test_a_refused_table_leaves_the_transaction_open_and_is_not_written() -> None:
    store = store_in_memory()
    good, bad = np.ones((4, 2), np.float32), np.full((4, 2), np.nan, np.float32)
    options = TableOptions(scale=0.5)
    with store.writer() as writer, writer.begin(0, "baseline") as txn:
        with pytest.raises(NonFiniteValues, match="'b'"):
            txn.write_tables(
                [TableValues(name, rows, options=options) for name, rows in zip("ab", (good, bad), strict=True)]
            )
        with pytest.raises(BadInput, match="given twice in one call"):
            txn.write_tables([TableValues("b", good, options=options)] * 2)
        txn.write_table("b", good, options=options)
    assert sorted(store.snapshot().tables) == ["a", "b"]
    np.testing.assert_array_equal(store.snapshot().table("a").read(), good)
