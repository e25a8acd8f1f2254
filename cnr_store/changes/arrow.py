"""Changed rows as Arrow record batches: the columns, their types, and how numpy arrays become them. No I/O.

Values are absolute: what a read of the row gives at that version. bfloat16, which Arrow does not have, is float32 of
the same value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cnr_store.format.records import TableSchema
from cnr_store.read.arrow_stream import SLOT_PREFIX, float_array, float_type
from cnr_store.segment.codes import Array
from cnr_store.types import RowIds, TableDtype

ChangeOperation = Literal["upsert", "delete"]
OPERATIONS: tuple[ChangeOperation, ...] = ("upsert", "delete")
_WORDS = pa.dictionary(pa.int8(), pa.string())
_TABLE = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of one table at one version: sorted, unique.

    Attributes
    ----------
    rows
        (n,) int64.
    arrays
        ``codes`` (the values) and ``slots/<name>``, (n, width) in the carrier dtype; undefined where a row is absent.
    is_present
        (n,) bool: whether the table has the row. None is all of them.
    """

    rows: RowIds
    arrays: dict[str, Array]
    is_present: npt.NDArray[np.bool_] | None = None

    def take(self, chosen: Any) -> RowBlock:
        """Return the rows at a slice, a mask or positions."""
        present = None if self.is_present is None else self.is_present[chosen]
        return RowBlock(self.rows[chosen], {name: array[chosen] for name, array in self.arrays.items()}, present)


def change_schema(table: str, schema: TableSchema, slots: Sequence[str] = ()) -> pa.Schema:
    """Return the columns of the changes of a table. Pure.

    ``table`` and ``op`` (``upsert``, ``delete``) are dictionaries; ``row_id``, ``version`` and ``step`` int64;
    ``values`` a fixed-size list of ``dim``; each slot ``slot_<name>``, a number or such a list. Values and slots of a
    deleted row are null. The metadata of float fields has the table's ``dtype``.
    """
    fields = [pa.field("table", _TABLE, nullable=False), pa.field("row_id", pa.int64(), nullable=False)]
    fields.append(_floats("values", schema.dtype, schema.dim))
    for name in slots:
        slot = schema.slots[name]
        fields.append(_floats(f"{SLOT_PREFIX}{name}", slot.dtype, None if slot.kind == "row" else schema.dim))
    fields.append(pa.field("version", pa.int64(), nullable=False))
    fields.append(pa.field("step", pa.int64(), nullable=False))
    fields.append(pa.field("op", _WORDS, nullable=False))
    return pa.schema(fields, metadata={"cnr.table": table, "cnr.keys": schema.keys})


def change_batches(
    table: str, schema: TableSchema, slots: Sequence[str], block: RowBlock, version: int, step: int, max_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a block as batches of at most ``max_rows``; values are not copied where they can be shared."""
    columns = change_schema(table, schema, slots)
    for start in range(0, len(block.rows), max_rows):
        piece = block.take(slice(start, start + max_rows))
        count = len(piece.rows)
        arrays = [
            pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([table])),
            pa.array(piece.rows),
            _float_array(columns.field("values").type, piece, "codes", schema.dtype),
            *(
                _float_array(
                    columns.field(f"{SLOT_PREFIX}{name}").type, piece, f"slots/{name}", schema.slots[name].dtype
                )
                for name in slots
            ),
            pa.array(np.full(count, version, np.int64)),
            pa.array(np.full(count, step, np.int64)),
            _operations(piece),
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=columns)


def _floats(name: str, dtype: TableDtype, dim: int | None) -> pa.Field:
    return pa.field(name, float_type(dtype, dim), metadata={"dtype": dtype})


def _float_array(kind: pa.DataType, block: RowBlock, name: str, dtype: TableDtype) -> pa.Array:
    if name not in block.arrays:
        return pa.nulls(len(block.rows), kind)
    return float_array(block.arrays[name], dtype, kind, None if block.is_present is None else ~block.is_present)


def _operations(block: RowBlock) -> pa.Array:
    if block.is_present is None:
        codes = np.zeros(len(block.rows), np.int8)
    else:
        codes = np.where(block.is_present, 0, 1).astype(np.int8)
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(OPERATIONS))
