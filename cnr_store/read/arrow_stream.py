"""A table as a stream of Arrow record batches, for engines that take the Arrow PyCapsule interface.

pyarrow is imported when a stream is asked for, because it is slow to import. bfloat16, which Arrow does not have, is
float32 of the same value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cnr_store.encodings.widths import to_float32
from cnr_store.format.records import TableSchema
from cnr_store.types import RowIds

if TYPE_CHECKING:
    import pyarrow as pa

    from cnr_store.read.snapshot import TableView

WINDOW_BYTES = 16 * 1024 * 1024
"""Bytes of rows in one batch."""


def table_stream(view: TableView) -> pa.RecordBatchReader:
    """Return the rows of a table as batches of about 16 MiB, read one at a time as they are asked for.

    Columns: ``row_id`` int64, ``values`` a fixed-size list of ``dim``, and ``slot_<name>``, a number or such a list.
    A dense table has every row; of a hashed table all rows are read at once, in the order of their keys.
    """
    import pyarrow as pa

    names = sorted(view.schema.slots)
    columns = _columns(pa, view.schema)

    def batches() -> Iterator[pa.RecordBatch]:
        for rows, arrays in _windows(view):
            values = [_array(pa, columns.field(1).type, arrays["values"], view.schema.dtype)]
            values += [
                _array(pa, columns.field(f"slot_{name}").type, arrays[name], view.schema.slots[name].dtype)
                for name in names
            ]
            yield pa.RecordBatch.from_arrays([pa.array(rows), *values], schema=columns)

    return pa.RecordBatchReader.from_batches(columns, batches())


def _windows(view: TableView) -> Iterator[tuple[RowIds, Mapping[str, Any]]]:
    if view.schema.keys == "hashed":
        yield view.read_all(slots=True)
        return
    num_rows, dim = view.shape
    step = max(1, WINDOW_BYTES // (4 * dim * (1 + len(view.schema.slots))))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        arrays = {"values": view.read(start, stop)}
        arrays |= {slot: view.read(start, stop, slot=slot) for slot in view.schema.slots}
        yield np.arange(start, stop, dtype=np.int64), arrays


def _columns(pa: Any, schema: TableSchema) -> Any:
    floats = {"float32": pa.float32(), "float16": pa.float16(), "bfloat16": pa.float32()}
    fields = [pa.field("row_id", pa.int64(), nullable=False)]
    fields.append(pa.field("values", pa.list_(floats[schema.dtype], schema.dim), nullable=False))
    for name, slot in sorted(schema.slots.items()):
        kind = floats[slot.dtype] if slot.kind == "row" else pa.list_(floats[slot.dtype], schema.dim)
        fields.append(pa.field(f"slot_{name}", kind, nullable=False))
    return pa.schema(fields)


def _array(pa: Any, kind: Any, values: Any, dtype: str) -> Any:
    plain = to_float32(values, "bfloat16") if dtype == "bfloat16" else values
    flat = pa.array(np.ascontiguousarray(plain).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, type=kind) if pa.types.is_fixed_size_list(kind) else flat
