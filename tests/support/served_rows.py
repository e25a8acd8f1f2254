"""Small tables for the tests of `cnr_store.serving`: a row is a whole number times the scale, or absent.

A dict of row id to number is the model of a table: what it does not have is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from cnr_store.encodings import widths
from cnr_store.format.records import TableSchema
from cnr_store.segment.codes import ABSENT, ExactRows
from cnr_store.serving.rows.memory import ANONYMOUS, Array, Memory
from cnr_store.serving.rows.served_table import BaseTable, Overlay, RowKind, Served, row_kind
from cnr_store.serving.rows.shards import Shard, dense_range
from cnr_store.types import Lattice, RowIds

DIM = 3
SCALE = 0.5
FILL = -1.0
Model = Mapping[int, int]


def schema_of(num_rows: int = 40, *, keys: Literal["dense", "hashed"] = "dense", **changes: Any) -> TableSchema:
    given = {"dim": DIM, "dtype": "float32", "encoding": Lattice(scale=SCALE), "fill": FILL, **changes}
    return TableSchema(num_rows=num_rows if keys == "dense" else 0, keys=keys, **given)


def held_rows(kind: RowKind, numbers: Array) -> Array:
    """The rows of some numbers (n,) as they are held."""
    codes = np.repeat(numbers.astype(np.int32)[:, None], kind.dim, axis=1)
    if kind.kept_as == "codes":
        return codes.astype(kind.dtype)
    return served_rows(kind, numbers)


def served_rows(kind: RowKind, numbers: Array) -> Array:
    """The rows of some numbers (n,) as a lookup returns them."""
    values = np.repeat(numbers.astype(np.float32)[:, None] * np.float32(SCALE), kind.dim, axis=1)
    out = np.empty((len(numbers), kind.served_width), kind.served_dtype)
    assert kind.serve(widths.from_float32(values, kind.table_dtype), out) < 0
    return out


def held_table(
    model: Model,
    schema: TableSchema,
    *,
    name: str = "t",
    served: Served | None = None,
    kept_as: Literal["auto", "values", "codes"] = "auto",
    shard: Shard | None = None,
    memory: Memory = ANONYMOUS,
) -> BaseTable:
    """A table loaded from a model."""
    kind = row_kind(schema, served, kept_as)
    ids = np.array(sorted(model), np.int64)
    rows = held_rows(kind, np.array([model[row] for row in ids.tolist()], np.int64))
    held = BaseTable.allocate(name, schema, kind, shard=shard, num_keys=len(ids), memory=memory)
    if held.index is not None:
        held.rows[: len(ids)] = rows
        assert held.index.insert_many(ids, np.arange(len(ids))) < 0
        return held
    if len(ids) < len(held.rows):
        held = held.with_status(memory)
        assert held.status is not None
        held.rows[:] = kind.absent_row
        held.status[:] = ABSENT
        held.status[ids - held.start] = 0
    held.rows[ids - held.start] = rows
    return held


def overlay_of(changes: Mapping[int, int | None], held: BaseTable, memory: Memory = ANONYMOUS) -> Overlay:
    """The overlay of some rows' new numbers, None for those that go."""
    ids = np.array(list(changes), np.int64)
    numbers = np.array([0 if number is None else number for number in changes.values()], np.int64)
    overlay = Overlay.allocate(held.name, held.schema, len(ids), held.kind.width, held.rows.dtype, memory)
    overlay.ids[:] = ids
    overlay.rows[:] = held_rows(held.kind, numbers)
    overlay.status[:] = [ABSENT if number is None else 0 for number in changes.values()]
    # What stands at absent rows means nothing.
    overlay.rows[overlay.status == ABSENT] = 99
    assert overlay.fill_index() < 0
    return overlay


def expected_rows(kind: RowKind, ids: RowIds, model: Model, exact_rows: ExactRows | None = None) -> Array:
    """What a lookup of ``ids`` returns when the table is the model, row by row."""
    rows = np.empty((len(ids), kind.served_width), kind.served_dtype)
    for at, row in enumerate(ids.tolist()):
        if exact_rows is not None and row in exact_rows.rows:
            exact = exact_rows.values["codes"][exact_rows.rows == row]
            assert kind.serve(exact, rows[at : at + 1]) < 0
        elif row in model:
            rows[at] = served_rows(kind, np.array([model[row]]))[0]
        else:
            rows[at] = kind.fill_row
    return rows


def ids_in(schema: TableSchema, shard: Shard | None = None) -> RowIds:
    """All row ids of a dense table, or of the range of it that is held."""
    held = dense_range(shard, schema.num_rows)
    return np.arange(held.start, held.stop, dtype=np.int64)
