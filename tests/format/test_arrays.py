"""What `cnr_store.format.arrays` writes is plain Zarr v3: zarr-python reads it, and writes the same bytes."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

from cnr_store.errors import CorruptObject
from cnr_store.format import arrays

CASES = [
    ("int8", 2),
    ("int16", 2),
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


async def fill(store: MemoryStore, objects: dict[str, bytes]) -> None:
    from zarr.core.buffer import default_buffer_prototype

    for key, data in objects.items():
        await store.set(key, default_buffer_prototype().buffer.from_bytes(data))


@pytest.mark.parametrize("profile", ["compact", "portable"])
@pytest.mark.parametrize(("dtype", "ndim"), CASES)
@pytest.mark.parametrize(("rows", "chunk_rows"), [(1, 1), (7, 7), (7, 3), (8, 4)])
def test_zarr_python_reads_what_we_write_and_writes_the_same_chunks(
    profile: Any, dtype: str, ndim: int, rows: int, chunk_rows: int
) -> None:
    values = make(dtype, ndim, rows)
    entry = arrays.describe("a/codes", values.shape, values.dtype, chunk_rows, profile)
    objects = write(entry, values)
    store = MemoryStore()
    zarr.core.sync.sync(fill(store, objects))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = zarr.open_array(store, path="a/codes", mode="r", zarr_format=3)
        theirs = MemoryStore()
        other = zarr.create_array(
            theirs,
            name="a/codes",
            shape=opened.shape,
            chunks=opened.chunks,
            dtype=opened.dtype,
            fill_value=opened.fill_value,
            serializer=opened.serializer,
            compressors=opened.compressors,
            filters=None,
            zarr_format=3,
            dimension_names=opened.metadata.dimension_names,
            config={"write_empty_chunks": True},
        )
        other[:] = values

    assert np.array_equal(opened[:], values)
    for key, data in objects.items():
        if key.endswith("zarr.json"):
            written = json.loads(theirs._store_dict[key].to_bytes())
            assert written["codecs"] == json.loads(data)["codecs"]
        else:
            assert theirs._store_dict[key].to_bytes() == data, key


@pytest.mark.parametrize("profile", ["compact", "portable"])
@pytest.mark.parametrize(("dtype", "ndim"), CASES)
def test_chunks_decode_into_given_memory(profile: Any, dtype: str, ndim: int) -> None:
    values = make(dtype, ndim, 11)
    entry = arrays.describe("a", values.shape, values.dtype, 4, profile)
    objects = write(entry, values)

    parts = []
    for k in range(arrays.chunk_count(entry)):
        out = np.empty(arrays.chunk_shape(entry), values.dtype)
        arrays.decode_chunk(entry, objects[arrays.chunk_path(entry, k)], out, f"chunk {k}")
        parts.append(out)

    assert np.array_equal(np.concatenate(parts)[:11], values)


@pytest.mark.parametrize("profile", ["compact", "portable"])
@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "float32"])
@pytest.mark.parametrize("claimed", [3, 5, 4096])
def test_a_stream_with_another_element_count_is_refused(profile: Any, dtype: str, claimed: int) -> None:
    honest = arrays.describe("a", (4, 2), np.dtype(dtype), 4, profile)
    lying = arrays.describe("a", (claimed, 2), np.dtype(dtype), claimed, profile)
    data = arrays.encode_chunk(lying, np.ones((claimed, 2), dtype))

    with pytest.raises(CorruptObject, match="elements"):
        arrays.decode_chunk(honest, data, np.empty((4, 2), dtype), "chunk 0")


def test_chunks_are_equalized() -> None:
    rows = arrays.chunk_rows_for(70_000, 128)

    assert rows == 35_000
    assert arrays.chunk_rows_for(0, 128) == 1
    assert arrays.chunk_rows_for(10, 1 << 30) == 1
