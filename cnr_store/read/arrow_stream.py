"""A table as Arrow: its column types, and a stream of record batches for engines with the Arrow PyCapsule interface.

Only callers that need Arrow import this module, because pyarrow is slow to import. bfloat16, which Arrow does not have,
is float32 of the same value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cnr_store.encodings.widths import to_float32
from cnr_store.format.records import TableSchema
from cnr_store.runtime.threads import windows
from cnr_store.segment.codes import Array
from cnr_store.types import RowIds

if TYPE_CHECKING:
    from cnr_store.read.table_view import TableView

WINDOW_BYTES = 16 * 1024 * 1024
"""Bytes of rows in one batch."""

SLOT_PREFIX = "slot_"
"""Begins the names of slot columns, so that no slot has the name of another column."""

_FLOATS = {"float32": pa.float32(), "float16": pa.float16(), "bfloat16": pa.float32()}


def float_type(dtype: str, dim: int | None) -> pa.DataType:
    """Return the Arrow type of values of a table or slot: a number, or with ``dim`` a fixed-size list of them. Pure."""
    return _FLOATS[dtype] if dim is None else pa.list_(_FLOATS[dtype], dim)


def float_array(values: Array, dtype: str, kind: pa.DataType, absent: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Return values (n, width) as an Arrow array of ``kind``, if possible without a copy; ``absent`` rows are null."""
    if dtype == "bfloat16" and values.dtype == np.uint16:
        values = to_float32(values, "bfloat16")
    flat = np.ascontiguousarray(values).reshape(-1)
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(flat, mask=absent)
    mask = None if absent is None else pa.array(absent)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), type=kind, mask=mask)


def table_stream(view: TableView) -> pa.RecordBatchReader:
    """Return the rows of a table as batches of about 16 MiB, read one at a time as they are asked for.

    Columns: ``row_id`` int64, ``values`` a fixed-size list of ``dim``, and ``slot_<name>``, a number or such a list.
    A dense table has every row; of a hashed table all rows are read at once, in the order of their keys.
    """
    dtypes = {"values": view.schema.dtype, **{name: slot.dtype for name, slot in sorted(view.schema.slots.items())}}
    columns = _columns(view.schema)

    def batches() -> Iterator[pa.RecordBatch]:
        for rows, arrays in _windows(view):
            kinds = zip(dtypes.items(), columns.types[1:], strict=True)
            values = [float_array(arrays[name], dtype, kind) for (name, dtype), kind in kinds]
            yield pa.RecordBatch.from_arrays([pa.array(rows), *values], schema=columns)

    return pa.RecordBatchReader.from_batches(columns, batches())


def _windows(view: TableView) -> Iterator[tuple[RowIds, Mapping[str, Any]]]:
    if view.schema.keys == "hashed":
        yield view.read_all(slots=True)
        return
    num_rows, dim = view.shape
    for start, stop in windows(num_rows, 4 * dim * (1 + len(view.schema.slots)), WINDOW_BYTES):
        arrays = {"values": view.read(start, stop)}
        arrays |= {slot: view.read(start, stop, slot=slot) for slot in view.schema.slots}
        yield np.arange(start, stop, dtype=np.int64), arrays


def _columns(schema: TableSchema) -> pa.Schema:
    kinds = {"row_id": pa.int64(), "values": float_type(schema.dtype, schema.dim)}
    for name, slot in sorted(schema.slots.items()):
        kinds[f"{SLOT_PREFIX}{name}"] = float_type(slot.dtype, None if slot.kind == "row" else schema.dim)
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])
