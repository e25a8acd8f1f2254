"""How rows are held and read: every kind of table against the plain definition, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cnr_store.encodings import widths
from cnr_store.errors import BadDtype, BadInput, BadRowIds, BadShape, NonFiniteValues
from cnr_store.format.records import TableSchema
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED, ExactRows
from cnr_store.serving.rows import gather
from cnr_store.serving.rows.lookups import checked_ids, checked_out
from cnr_store.serving.rows.served_table import BaseTable, Overlay, ServedTable, row_kind
from cnr_store.serving.rows.shards import HashShard, is_in_shard
from cnr_store.types import Affine, FloatBits, Lattice, Raw, RowRange
from tests.support.encoders import float_bits_codes
from tests.support.served_rows import (
    DIM,
    FILL,
    SCALE,
    expected_rows,
    held_rows,
    held_table,
    ids_in,
    overlay_of,
    schema_of,
)
from tests.support.serving_reference import gather_reference

SHARDS = [None, RowRange(7, 31), HashShard(1, 3)]


@pytest.mark.parametrize(
    ("encoding", "dtype", "served", "expected"),
    [
        (Lattice(scale=SCALE), "float32", None, "values"),
        (Lattice(scale=SCALE), "float32", "float16", "codes"),
        (Lattice(scale=SCALE), "float32", "int8", "codes"),
        (Lattice(scale=SCALE), "bfloat16", None, "codes"),
        (FloatBits(mantissa_bits=23), "float32", None, "values"),
        (FloatBits(mantissa_bits=7), "float32", None, "values"),
        (FloatBits(mantissa_bits=7), "float32", "bfloat16", "codes"),
        (FloatBits(mantissa_bits=7), "bfloat16", None, "values"),
        (FloatBits(mantissa_bits=7), "bfloat16", "float32", "codes"),
        (Raw(), "float32", "int8", "values"),
        (Affine(bits=4), "float32", "bfloat16", "values"),
    ],
)
def test_values_are_held_where_they_are_enough(encoding: Any, dtype: Any, served: Any, expected: str) -> None:
    schema = TableSchema(num_rows=4, dim=2, dtype=dtype, encoding=encoding)

    assert row_kind(schema, served).kept_as == expected


@pytest.mark.parametrize("served", ["float32", "float16", "bfloat16", "int8"])
def test_hashed_tables_are_held_as_dense_ones(served: Any) -> None:
    """Differences are added to their rows too."""
    assert row_kind(schema_of(keys="hashed"), served).kept_as == row_kind(schema_of(), served).kept_as


def test_codes_of_a_lattice_table_may_be_asked_for() -> None:
    kind = row_kind(schema_of(), kept_as="codes")

    assert kind.kept_as == "codes"
    assert kind.dtype == np.int16
    assert kind.served == "float32"


@pytest.mark.parametrize(
    ("encoding", "served", "kept_as", "says"),
    [
        (Raw(), None, "codes", "no codes"),
        (Affine(bits=8), None, "codes", "no codes"),
        (Lattice(scale=SCALE), "float16", "values", "kept_as='codes'"),
        (Lattice(scale=SCALE), "float64", "auto", "served must be one of"),
        (Lattice(scale=SCALE), None, "both", "kept_as must be one of"),
    ],
)
def test_what_cannot_be_held_is_refused(encoding: Any, served: Any, kept_as: Any, says: str) -> None:
    schema = TableSchema(num_rows=4, dim=2, dtype="float32", encoding=encoding)

    with pytest.raises(BadInput, match=says):
        row_kind(schema, served, kept_as)


def test_a_refined_scale_changes_the_kind_of_held_codes_and_not_of_values() -> None:
    before, after = schema_of(), schema_of(shift=1)

    assert row_kind(before) == row_kind(after)
    assert row_kind(before, kept_as="codes") != row_kind(after, kept_as="codes")


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("kept_as", ["auto", "codes"])
@pytest.mark.parametrize("served", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("keys", ["dense", "hashed"])
def test_reading_is_the_plain_definition(shard: Any, kept_as: Any, served: Any, keys: Any) -> None:
    schema = schema_of(keys=keys)
    ids = ids_in(schema_of())
    ids = ids[is_in_shard(shard, ids)]
    model = {int(row): 3 * at - 20 for at, row in enumerate(ids) if at % 4}
    held = held_table(model, schema, served=served, kept_as=kept_as, shard=shard)
    changes = {int(ids[1]): 100, int(ids[3]): None, int(ids[4]): -7}
    table = ServedTable(held, overlay_of(changes, held))
    model = {row: number for row, number in (model | changes).items() if number is not None}
    wanted = np.concatenate([ids[::-1], ids[:5]])
    out = np.empty((len(wanted), held.kind.served_width), held.kind.served_dtype)
    missing = np.zeros(len(wanted), np.bool_)

    absent = table.read(wanted, out, missing)

    np.testing.assert_array_equal(out, expected_rows(held.kind, wanted, model))
    assert missing.tolist() == [row not in model for row in wanted.tolist()]
    assert absent == missing.sum()
    assert table.row_ids().tolist() == sorted(model)


@pytest.mark.parametrize("shard", SHARDS)
def test_held_rows_and_their_status_are_what_a_delta_is_put_on(shard: Any) -> None:
    ids = ids_in(schema_of())
    ids = ids[is_in_shard(shard, ids)]
    model = {int(row): at for at, row in enumerate(ids) if at % 3}
    held = held_table(model, schema_of(), kept_as="codes", shard=shard)
    table = ServedTable(held, overlay_of({int(ids[0]): 50, int(ids[1]): None}, held))
    model = {**model, int(ids[0]): 50}
    del model[int(ids[1])]
    out = np.empty((len(ids), DIM), np.int16)

    status = table.gather_stored(ids, out)

    assert status.tolist() == [CODED if row in model else ABSENT for row in ids.tolist()]
    there = status == CODED
    numbers = np.array([model[row] for row in ids[there].tolist()])
    np.testing.assert_array_equal(out[there], held_rows(held.kind, numbers))


def test_wide_codes_are_read_like_narrow_ones() -> None:
    schema, kind = schema_of(4), row_kind(schema_of(4), kept_as="codes")
    held = BaseTable.allocate("t", schema, kind, dtype=np.int32)
    held.rows[:] = np.array([[70_000], [-70_000], [5], [0]])
    out = np.empty((4, DIM), np.float32)

    ServedTable(held).read(np.arange(4), out)

    np.testing.assert_array_equal(out[:, 0], np.float32(SCALE) * np.array([70_000, -70_000, 5, 0], np.float32))


@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_escape_rows_are_exact_and_say_what_they_are(served: Any) -> None:
    held = held_table({row: row for row in range(10)}, schema_of(10), served=served, kept_as="codes")
    held = held.with_status()
    assert held.status is not None
    held.status[[2, 7]] = ESCAPED
    exact = np.array([[0.1, np.nan, 3.3], [1e30, -np.inf, 0.7]], np.float32)
    exact_rows = ExactRows(np.array([2, 7], np.int64), {"codes": exact})
    table = ServedTable(held, None, exact_rows)
    wanted = np.array([9, 7, 2, 7, 3], np.int64)
    out = np.empty((5, DIM), held.kind.served_dtype)

    table.read(wanted, out)

    model = {row: row for row in range(10)}
    np.testing.assert_array_equal(out, expected_rows(held.kind, wanted, model, exact_rows))
    assert table.gather_stored(wanted, np.empty((5, DIM), np.int16)).tolist() == [
        CODED,
        ESCAPED,
        ESCAPED,
        ESCAPED,
        CODED,
    ]


def test_a_row_that_is_not_finite_has_no_int8_form() -> None:
    held = held_table({row: row for row in range(10)}, schema_of(10), served="int8")
    exact_rows = ExactRows(np.array([4], np.int64), {"codes": np.full((1, DIM), np.nan, np.float32)})

    with pytest.raises(NonFiniteValues, match="row 4 of table 't'"):
        ServedTable(held, None, exact_rows).read(np.array([1, 4]), np.empty((2, DIM + 8), np.uint8))


def test_exact_floats_come_back_bit_for_bit() -> None:
    schema = schema_of(64, encoding=FloatBits(mantissa_bits=23))
    values = np.random.default_rng(0).standard_normal((64, DIM)).astype(np.float32)
    values[3, 1], values[9, 0] = -0.0, np.inf
    held = BaseTable.allocate("t", schema, row_kind(schema, kept_as="codes"))
    held.rows[:] = float_bits_codes(values, 23)
    out = np.empty_like(values)

    ServedTable(held).read(np.arange(64), out)

    np.testing.assert_array_equal(out.view(np.int32), values.view(np.int32))


def test_a_sixteen_bit_lattice_table_is_rounded_as_its_snapshot_is() -> None:
    schema = schema_of(8, dtype="bfloat16", encoding=Lattice(scale=0.001))
    codes = np.random.default_rng(0).integers(-30_000, 30_000, (8, DIM)).astype(np.int16)
    held = BaseTable.allocate("t", schema, row_kind(schema, "float32"))
    held.rows[:] = codes
    out = np.empty((8, DIM), np.float32)

    ServedTable(held).read(np.arange(8), out)

    snapshot = widths.from_float32(np.float32(0.001) * codes.astype(np.float32), "bfloat16")
    np.testing.assert_array_equal(out, widths.to_float32(snapshot, "bfloat16"))


@pytest.mark.parametrize(
    ("shard", "row", "says"),
    [
        (None, 40, r"row id 40 at position 1 is outside table 't' with 40 rows"),
        (None, -1, r"row id -1 "),
        (RowRange(7, 31), 6, r"of which rows \[7, 31\) are served here"),
        (HashShard(1, 3), 1, r"of which hash shard 1 of 3 is served here"),
        (HashShard(1, 3), 40, r"outside table 't' with 40 rows"),
    ],
)
@pytest.mark.parametrize("with_overlay", [False, True])
def test_rows_that_are_not_held_here_are_refused(shard: Any, row: int, says: str, with_overlay: bool) -> None:
    ids = ids_in(schema_of())
    ids = ids[is_in_shard(shard, ids)]
    if isinstance(shard, HashShard) and row < 40:
        row = next(one for one in range(40) if one not in ids)
        says = f"row id {row} .*{says}"
    held = held_table({int(one): 1 for one in ids}, schema_of(), shard=shard)
    table = ServedTable(held, overlay_of({int(ids[0]): 2}, held) if with_overlay else None)
    out = np.empty((2, DIM), np.float32)

    with pytest.raises(BadRowIds, match=says):
        table.read(np.array([ids[0], row]), out)
    with pytest.raises(BadRowIds, match=says):
        table.gather_stored(np.array([ids[0], row]), out)


def test_any_key_of_a_hashed_table_may_be_asked_for() -> None:
    held = held_table({5: 1}, schema_of(keys="hashed"))
    out = np.empty((3, DIM), np.float32)

    assert ServedTable(held).read(np.array([5, -(2**63), 2**63 - 1]), out) == 2

    np.testing.assert_array_equal(out[:, 0], [SCALE, FILL, FILL])


def test_the_newer_of_two_overlays_wins() -> None:
    held = held_table({}, schema_of(num_rows := 40))
    older = overlay_of({1: 1, 2: 2, 3: None, 4: 4}, held)
    newer = overlay_of({2: None, 3: 33, 5: 5}, held)

    merged = Overlay.merged("t", older, newer)

    out = np.empty((num_rows, DIM), np.float32)
    ServedTable(held, merged).read(np.arange(num_rows), out)
    np.testing.assert_array_equal(out, expected_rows(held.kind, np.arange(num_rows), {1: 1, 3: 33, 4: 4, 5: 5}))
    assert len(merged) == 5


def test_an_overlay_names_a_row_that_it_has_twice() -> None:
    overlay = Overlay.allocate("t", schema_of(), 3, DIM, np.float32)
    overlay.ids[:] = [4, 9, 4]

    assert overlay.fill_index() == 2


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 13])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.int32])
def test_gathering_equals_its_reference(width: int, dtype: Any) -> None:
    random = np.random.default_rng(width)
    held, overlay = (random.integers(0, 100, (size, width)).astype(dtype) for size in (50, 7))
    fill = np.full(width, 101, dtype)
    places = np.concatenate([random.integers(0, 50, 20), random.integers(-8, 0, 20), [-1, -1, 49, 0, -8]])
    random.shuffle(places)
    out, expected = np.empty((2, len(places), width), dtype)
    held_words, overlay_words, fill_words = (gather.as_words(rows) for rows in (held, overlay, fill[None]))

    nowhere = gather.gather(held_words, overlay_words, fill_words[0], places, gather.as_words(out))

    assert nowhere == gather_reference(held, overlay, fill, places, expected)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("ids", [[1.5], [[1, 2]], ["a"], 3])
def test_row_ids_are_integers_in_a_row(ids: Any) -> None:
    with pytest.raises(BadRowIds, match="one-dimensional array of integers"):
        checked_ids(ids, "t")


def test_unsigned_ids_beyond_int64_do_not_become_negative_ones() -> None:
    ids = np.array([3, 2**63], np.uint64)

    with pytest.raises(BadRowIds, match="63 bits"):
        checked_ids(ids, "t")
    assert checked_ids(ids[:1], "t").tolist() == [3]


def test_row_ids_of_other_widths_and_none_are_taken() -> None:
    assert checked_ids(np.array([3, 1], np.int32), "t").dtype == np.int64
    assert checked_ids([], "t").tolist() == []


def test_outputs_must_fit() -> None:
    kind = row_kind(schema_of())

    with pytest.raises(BadShape, match=r"shape \(4, 3\)"):
        checked_out(np.empty((5, DIM), np.float32), 4, kind, "t")
    with pytest.raises(BadShape, match="C-contiguous"):
        checked_out(np.empty((DIM, 4), np.float32).T, 4, kind, "t")
    with pytest.raises(BadDtype, match="float32"):
        checked_out(np.empty((4, DIM), np.float64), 4, kind, "t")
