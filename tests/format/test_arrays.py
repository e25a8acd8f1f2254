"""What `cnr_store.format.arrays` writes is plain Zarr v3 with core codecs: other libraries read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.errors import CorruptObject
from cnr_store.format import arrays
from tests.support.zarr_values import integers_of

CASES = [
    ("int16", 2),
    ("int16", 1),
    ("int32", 2),
    ("int64", 1),
    ("uint8", 2),
    ("float16", 1),
    ("float32", 2),
    ("uint16", 2),
]


def make(dtype: str, ndim: int, rows: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(rows)
    if dtype == "int64":
        return np.sort(rng.choice(10 * rows, rows, replace=False)).astype(np.int64)
    values = rng.integers(0, 100, (rows, 5) if ndim == 2 else rows)
    return values.astype(dtype)


def write(entry: Any, values: np.ndarray[Any, Any]) -> dict[str, bytes]:
    objects = {f"{entry.path}/zarr.json": arrays.array_document(entry)}
    for k in range(arrays.chunk_count(entry)):
        block = values[k * entry.chunk_rows : (k + 1) * entry.chunk_rows]
        objects[arrays.chunk_path(entry, k)] = arrays.encode_chunk(entry, block)
    return objects


def put(folder: Path, objects: dict[str, bytes]) -> None:
    for key, data in objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)


@pytest.mark.parametrize(("dtype", "ndim"), CASES)
@pytest.mark.parametrize(("rows", "chunk_rows"), [(1, 1), (7, 7), (7, 3), (8, 4)])
def test_zarr_python_reads_what_we_write(tmp_path: Path, dtype: str, ndim: int, rows: int, chunk_rows: int) -> None:
    values = make(dtype, ndim, rows)
    entry = arrays.describe("a/codes", values.shape, values.dtype, chunk_rows)
    put(tmp_path, write(entry, values))

    opened = zarr.open_array(str(tmp_path / "a/codes"), mode="r")

    found = opened[:] if entry.codec == "bytes" else integers_of(opened)
    assert (found.dtype, found.shape) == (values.dtype, values.shape)
    assert np.array_equal(found, values)


@pytest.mark.parametrize(("dtype", "ndim"), CASES)
def test_tensorstore_reads_the_same(tmp_path: Path, dtype: str, ndim: int) -> None:
    tensorstore: Any = pytest.importorskip("tensorstore")
    values = make(dtype, ndim, 7)
    entry = arrays.describe("codes", values.shape, values.dtype, 3)
    put(tmp_path, write(entry, values))

    place = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/codes/"}}
    theirs = tensorstore.open(place, read=True).result().read().result()

    assert np.array_equal(theirs, zarr.open_array(str(tmp_path / "codes"), mode="r")[:])


@pytest.mark.parametrize(("dtype", "ndim"), CASES)
def test_chunks_decode_into_given_memory(dtype: str, ndim: int) -> None:
    values = make(dtype, ndim, 11)
    entry = arrays.describe("a", values.shape, values.dtype, 4)
    objects = write(entry, values)

    parts = []
    for k in range(arrays.chunk_count(entry)):
        out = np.empty(arrays.chunk_shape(entry), values.dtype)
        memory = np.empty(arrays.chunk_bytes(entry) + 3, np.uint8)
        arrays.decode_chunk(entry, objects[arrays.chunk_path(entry, k)], out, f"chunk {k}", memory)
        parts.append(out)

    assert np.array_equal(np.concatenate(parts)[:11], values)


@settings(deadline=None)
@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30))
def test_any_row_ids_come_back(keys: list[int]) -> None:
    rows = np.array(keys, np.int64)
    entry = arrays.describe("rows", rows.shape, rows.dtype, len(rows) + 2)
    out = np.empty(arrays.chunk_shape(entry), np.int64)

    arrays.decode_chunk(entry, arrays.encode_chunk(entry, rows), out, "chunk 0")

    assert out[: len(rows)].tolist() == keys


@pytest.mark.parametrize("dtype", ["int16", "int64", "uint8", "float32"])
@pytest.mark.parametrize("claimed", [3, 5, 4096])
def test_a_stream_with_another_element_count_is_refused(dtype: str, claimed: int) -> None:
    width = () if dtype == "int64" else (2,)
    honest = arrays.describe("a", (4, *width), np.dtype(dtype), 4)
    lying = arrays.describe("a", (claimed, *width), np.dtype(dtype), claimed)
    data = arrays.encode_chunk(lying, np.ones((claimed, *width), dtype))

    with pytest.raises(CorruptObject, match="elements"):
        arrays.decode_chunk(honest, data, np.empty((4, *width), dtype), "chunk 0")


def test_chunks_are_equalized() -> None:
    rows = arrays.chunk_rows_for(70_000, 128)

    assert rows == 35_000
    assert arrays.chunk_rows_for(0, 128) == 1
    assert arrays.chunk_rows_for(10, 1 << 30) == 1
