"""Changed rows as Arrow: columns and types, exact values of every dtype, nulls of deleted rows, files and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from cnr_store.changes import change_schema
from cnr_store.changes.arrow import RowBlock, change_batches
from cnr_store.encodings.widths import to_float32
from cnr_store.format.records import SlotSchema, TableSchema
from cnr_store.types import FloatBits, Raw, TableDtype

SLOTS = {
    "m": SlotSchema(kind="row", dtype="float32", encoding=FloatBits(23)),
    "v": SlotSchema(kind="element", dtype="float16", encoding=FloatBits(10)),
}


def schema_of(dtype: TableDtype, dim: int = 3) -> TableSchema:
    return TableSchema(num_rows=10, dim=dim, dtype=dtype, encoding=Raw(), slots=SLOTS)


def block_of(dtype: TableDtype, rows: int, dim: int = 3) -> RowBlock:
    rng = np.random.default_rng(0)
    values: Any = rng.normal(size=(rows, dim)).astype(np.float32)
    if dtype == "bfloat16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    elif dtype == "float16":
        values = values.astype(np.float16)
    slots = {"slots/m": rng.random((rows, 1)).astype(np.float32), "slots/v": rng.random((rows, dim)).astype(np.float16)}
    return RowBlock(np.arange(rows, dtype=np.int64) * 3, {"codes": values, **slots})


def test_columns_are_named_and_typed_by_the_table() -> None:
    schema = change_schema("model/user", schema_of("float32"), ["m", "v"])

    assert schema.names == ["table", "row_id", "values", "slot_m", "slot_v", "version", "step", "op"]
    assert schema.field("values").type == pa.list_(pa.float32(), 3)
    assert schema.field("slot_m").type == pa.float32()
    assert schema.field("slot_v").type == pa.list_(pa.float16(), 3)
    assert pa.types.is_dictionary(schema.field("op").type)
    assert schema.metadata[b"cnr.table"] == b"model/user"
    assert change_schema("model/user", schema_of("float32")).names == [
        "table", "row_id", "values", "version", "step", "op",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_those_of_the_table_to_the_bit(dtype: TableDtype) -> None:
    block = block_of(dtype, 5)

    (batch,) = change_batches("t", schema_of(dtype), ["m", "v"], block, 7, 70, 100)
    batch.validate(full=True)

    found = batch["values"].flatten().to_numpy(zero_copy_only=False).reshape(5, 3)
    expected = to_float32(block.arrays["codes"], dtype) if dtype == "bfloat16" else block.arrays["codes"]
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()
    assert batch["slot_m"].to_numpy().tobytes() == block.arrays["slots/m"].tobytes()
    assert batch.schema.field("values").metadata == {b"dtype": dtype.encode()}
    assert (batch["version"].to_pylist(), batch["step"].to_pylist()) == ([7] * 5, [70] * 5)


def test_a_float32_block_is_not_copied() -> None:
    block = block_of("float32", 5)

    (batch,) = change_batches("t", schema_of("float32"), [], block, 7, 70, 100)

    assert batch["values"].flatten().buffers()[1].address == block.arrays["codes"].ctypes.data


def test_deleted_rows_are_null() -> None:
    block = block_of("float16", 4)
    gone = RowBlock(block.rows, block.arrays, np.asarray([True, False, True, False]))

    (batch,) = change_batches("t", schema_of("float16"), ["m"], gone, 7, 70, 100)
    batch.validate(full=True)

    assert batch["op"].to_pylist() == ["upsert", "delete", "upsert", "delete"]
    assert [value is None for value in batch["values"].to_pylist()] == [False, True, False, True]
    assert [value is None for value in batch["slot_m"].to_pylist()] == [False, True, False, True]
    assert batch["row_id"].to_pylist() == [0, 3, 6, 9]


@pytest.mark.parametrize(("rows", "sizes"), [(0, []), (1, [1]), (3, [3]), (4, [3, 1]), (7, [3, 3, 1])])
def test_blocks_are_cut_into_batches(rows: int, sizes: list[int]) -> None:
    batches = list(change_batches("t", schema_of("float32"), [], block_of("float32", rows), 7, 70, 3))

    assert [batch.num_rows for batch in batches] == sizes
    assert [row for batch in batches for row in batch["row_id"].to_pylist()] == [3 * row for row in range(rows)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["parquet", "ipc"])
def test_files_give_back_what_was_written(dtype: TableDtype, kind: str, tmp_path: Path) -> None:
    block = block_of(dtype, 4)
    given = RowBlock(block.rows, block.arrays, np.asarray([True, False, True, True]))
    (batch,) = change_batches("t", schema_of(dtype), ["m", "v"], given, 7, 70, 100)
    table = pa.Table.from_batches([batch])
    path = tmp_path / "file"

    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
        found = pyarrow.parquet.read_table(path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
        with pa.ipc.open_file(path) as reader:
            found = reader.read_all()

    assert found.schema.equals(table.schema)
    assert found.equals(table)
