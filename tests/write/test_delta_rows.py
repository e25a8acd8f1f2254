"""Rows into row lists: what is a difference, what is absolute, what leaves, and the digest that it leads to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cnr_store import TableOptions
from cnr_store.errors import NonFiniteValues
from cnr_store.format.records import TableSchema
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import TableCodes, array_specs
from cnr_store.write.baseline_rows import encode_mirror, encode_table
from cnr_store.write.delta_rows import EncodedRows, TouchedTable, encode_alone, encode_delete
from cnr_store.write.mirrors import apply_alone
from cnr_store.write.schema_choice import table_schema

ROWS, DIM = 8, 3


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


def setting(options: TableOptions, workers: Workers, values: Any, **slots: Any) -> tuple[TableSchema, TableCodes]:
    schema = table_schema("t", options, num_rows=len(values), dim=DIM, dtype="float32", sample=values, slots=slots)
    arrays = {"codes": values, **{f"slots/{name}": slot for name, slot in slots.items()}}
    staged = encode_table("t", schema, arrays, allocate=np.zeros, on_bad_rows="refuse", workers=workers)
    assert staged.mirror is not None
    assert staged.digest == staged.mirror.digest()
    return schema, staged.mirror


def stage(
    schema: TableSchema, mirror: TableCodes | None, rows: Any, workers: Workers, *, bad: Any = "refuse",
    absolute: bool = False, **arrays: Any,
) -> EncodedRows:  # fmt: skip
    values = {
        ("codes" if name == "values" else f"slots/{name}"): array.reshape(len(array), -1)
        for name, array in arrays.items()
    }
    digest = None if mirror is None else mirror.digest()
    touched = TouchedTable("t", array_specs(schema), mirror, np.asarray(rows, np.int64), values, digest, bad)
    return encode_alone(touched, absolute=absolute, workers=workers)


def moved(staged: EncodedRows, mirror: TableCodes, workers: Workers) -> None:
    """Apply, and hold the digest to a recomputation."""
    apply_alone(staged, mirror, workers)
    assert mirror.digest() == staged.digest


def test_a_row_leaves_only_if_no_code_of_any_array_changed(workers: Workers) -> None:
    values, slot = np.ones((ROWS, DIM), np.float32), np.ones(ROWS, np.float32)
    schema, mirror = setting(TableOptions(scale=0.5), workers, values, m=slot)
    new, new_slot = values[:4].copy(), slot[:4].copy()
    new[0] += np.float32(0.1)  # rounds to the same code
    new[1, 2] += 1
    new_slot[2] *= 2
    new_slot[3] *= np.float32(1.0001)  # rounds to the same 7 bits
    staged = stage(schema, mirror, range(4), workers, values=new, m=new_slot)
    assert list(staged.lists) == ["add"]
    assert staged.lists["add"].row_ids.tolist() == [1, 2]
    assert staged.lists["add"].arrays["codes"].tolist() == [[0, 0, 2], [0, 0, 0]]
    moved(staged, mirror, workers)
    assert stage(schema, mirror, range(4), workers, values=new, m=new_slot).lists == {}


def test_absent_and_escaped_rows_come_back_as_set_rows(workers: Workers) -> None:
    values = np.ones((ROWS, DIM), np.float32)
    schema, mirror = setting(TableOptions(scale=0.5), workers, values)
    moved(encode_delete(mirror, np.asarray([1, 2]), mirror.digest()), mirror, workers)
    bad = np.full((2, DIM), np.nan, np.float32)
    escaped = stage(schema, mirror, [2, 3], workers, values=bad, bad="escape")
    assert {name: item.row_ids.tolist() for name, item in escaped.lists.items()} == {"escape": [2, 3]}
    moved(escaped, mirror, workers)
    staged = stage(schema, mirror, [0, 1, 2, 3, 4], workers, values=2 * np.ones((5, DIM), np.float32))
    assert {name: item.row_ids.tolist() for name, item in staged.lists.items()} == {"add": [0, 4], "set": [1, 2, 3]}
    moved(staged, mirror, workers)
    assert (mirror.arrays["codes"][:5] == 4).all()
    assert len(mirror.escapes.rows) == 0


def test_absolute_rows_and_rows_without_a_mirror_are_set(workers: Workers) -> None:
    values = np.ones((ROWS, DIM), np.float32)
    schema, mirror = setting(TableOptions(scale=0.5), workers, values)
    one_shot = stage(schema, mirror, [1, 3], workers, values=3 * values[:2], absolute=True)
    assert list(one_shot.lists) == ["set"]
    assert (one_shot.lists["set"].arrays["codes"] == 6).all()
    moved(one_shot, mirror, workers)
    without = stage(schema, None, [1, 3], workers, values=3 * values[:2])
    assert list(without.lists) == ["set"]
    assert without.digest is None


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.5 * (2**21 + 1)])
def test_bad_rows_are_named_or_escape_and_the_good_ones_are_staged(workers: Workers, value: float) -> None:
    values = np.ones((ROWS, DIM), np.float32)
    schema, mirror = setting(TableOptions(scale=0.5), workers, values)
    new = 2 * values[:3]
    new[1, 1] = value
    with pytest.raises(NonFiniteValues, match="row 4 of table 't'"):
        stage(schema, mirror, [2, 4, 6], workers, values=new)
    staged = stage(schema, mirror, [2, 4, 6], workers, values=new, bad="escape")
    assert {name: item.row_ids.tolist() for name, item in staged.lists.items()} == {"escape": [4], "add": [2, 6]}
    assert staged.lists["escape"].arrays["values"].tobytes() == new[1:2].tobytes()
    moved(staged, mirror, workers)


@pytest.mark.parametrize("options", [TableOptions(scale=1.0), TableOptions.exact()])
def test_differences_are_stored_as_narrow_as_they_fit_and_widen_the_mirror(workers: Workers, options: Any) -> None:
    values = np.zeros((ROWS, DIM), np.float32)
    schema, mirror = setting(options, workers, values)
    for value, lattice_dtype in ((100.0, np.int16), (32_000.0, np.int16), (40_000.0, np.int16), (-(2.0**21), np.int32)):
        new = np.full((2, DIM), value, np.float32)
        new[1, 1:] = 0
        staged = stage(schema, mirror, [3, 6], workers, values=new)
        if options.encoding is None:
            assert staged.lists["add"].arrays["codes"].dtype == lattice_dtype
        moved(staged, mirror, workers)
        if options.encoding is None:
            assert np.array_equal(mirror.arrays["codes"][[3, 6]], new)
    assert mirror.arrays["codes"].dtype == np.int32


def test_a_baseline_from_the_mirror_has_the_changes_and_leaves_it_alone(workers: Workers) -> None:
    values = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    schema, mirror = setting(TableOptions(scale=0.5), workers, values)
    moved(encode_delete(mirror, np.asarray([5]), mirror.digest()), mirror, workers)
    before = mirror.arrays["codes"].copy()
    new = values[[0, 2, 5]] + 40_000
    new[1, 0] = np.nan
    staged = stage(schema, mirror, [0, 2, 5], workers, values=new, bad="escape")
    staged.lists |= encode_delete(mirror, np.asarray([7]), mirror.digest()).lists
    whole = encode_mirror(schema, mirror, staged)
    assert whole.rows is not None
    assert whole.escape is not None
    assert whole.rows.count == 6
    assert whole.escape.row_ids.tolist() == [2]
    for start, stop in ((0, 6), (0, 1), (2, 5)):
        block = whole.rows.produce(start, stop)
        kept = np.asarray([0, 1, 3, 4, 5, 6])[start:stop]
        expected = values.copy()
        expected[[0, 5]] = new[[0, 2]]
        assert block["rows"].tolist() == kept.tolist()
        assert np.array_equal(block["codes"], 2 * expected[kept])
    assert np.array_equal(mirror.arrays["codes"], before)
