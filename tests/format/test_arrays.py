"""What `cnr_store.format.arrays` writes is plain Zarr v3 with core codecs: other libraries read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.registry import get_pipeline_class

from cnr_store.errors import CorruptObject
from cnr_store.format import arrays
from cnr_store.segment.writer import OpenShards
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
    shards = OpenShards()
    for k in range(arrays.chunk_count(entry)):
        data = arrays.encode_chunk(entry, values[k * entry.chunk_rows : (k + 1) * entry.chunk_rows])
        if entry.shards is msgspec.UNSET:
            objects[arrays.chunk_path(entry, k)] = data
        elif (whole := shards.add(entry, k, data, grows=False)) is not None:
            objects[whole[0]] = whole[1]
    assert sorted(objects) == sorted(arrays.object_paths(entry))
    return objects


def put(folder: Path, objects: dict[str, bytes]) -> None:
    for key, data in objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)


@pytest.mark.parametrize(("dtype", "ndim"), CASES)
@pytest.mark.parametrize(
    ("rows", "chunk_rows", "in_shard"), [(1, 1, 1), (7, 7, 1), (7, 3, 1), (8, 4, 1), (8, 2, 4), (9, 2, 3), (13, 2, 3)]
)
def test_zarr_python_reads_what_we_write(
    tmp_path: Path, dtype: str, ndim: int, rows: int, chunk_rows: int, in_shard: int
) -> None:
    values = make(dtype, ndim, rows)
    entry = arrays.with_shards_of(arrays.describe("a/codes", values.shape, values.dtype, chunk_rows), in_shard)
    put(tmp_path, write(entry, values))

    opened = zarr.open_array(str(tmp_path / "a/codes"), mode="r")

    found = opened[:] if entry.codec == "bytes" else integers_of(opened)
    assert (found.dtype, found.shape) == (values.dtype, values.shape)
    assert np.array_equal(found, values)


@pytest.mark.parametrize("in_shard", [1, 2])
@pytest.mark.parametrize(("dtype", "ndim"), CASES)
def test_tensorstore_reads_the_same(tmp_path: Path, dtype: str, ndim: int, in_shard: int) -> None:
    tensorstore: Any = pytest.importorskip("tensorstore")
    values = make(dtype, ndim, 7)
    entry = arrays.with_shards_of(arrays.describe("codes", values.shape, values.dtype, 3), in_shard)
    put(tmp_path, write(entry, values))

    place = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/codes/"}}
    theirs = tensorstore.open(place, read=True).result().read().result()

    assert np.array_equal(theirs, zarr.open_array(str(tmp_path / "codes"), mode="r")[:])


@pytest.mark.parametrize("in_shard", [1, 2])
@pytest.mark.parametrize(("dtype", "ndim"), CASES)
def test_zarrs_reads_the_same(tmp_path: Path, dtype: str, ndim: int, in_shard: int) -> None:
    pytest.importorskip("zarrs")
    values = make(dtype, ndim, 7)
    entry = arrays.with_shards_of(arrays.describe("codes", values.shape, values.dtype, 3), in_shard)
    put(tmp_path, write(entry, values))
    expected = zarr.open_array(str(tmp_path / "codes"), mode="r")[:]

    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        assert get_pipeline_class().__name__ == "ZarrsCodecPipeline"
        theirs = zarr.open_array(str(tmp_path / "codes"), mode="r")[:]

    assert np.array_equal(theirs, expected)


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


@pytest.mark.parametrize(
    ("chunks", "width", "expected"),
    [
        (7, 4, 1),  # few chunks need not wait for each other
        (8, 4, 8),
        (20, 4, 16),  # what fills a shard
        (3, 16, 1),
        (4, 16, 4),  # wider ones fill it sooner
        (9, 64, 1),  # one chunk fills it
    ],
)
def test_whether_an_array_has_shards_follows_from_its_shape(
    monkeypatch: pytest.MonkeyPatch, chunks: int, width: int, expected: int
) -> None:
    monkeypatch.setattr(arrays, "SHARD_BYTES", 2 * 4 * 64)
    entry = arrays.describe("codes", (chunks * 4 - 1, width // 4), np.dtype(np.int16), 4)
    wide = arrays.describe("codes", (chunks * 4 - 1, width), np.dtype(np.int16), 4)

    assert arrays.shard_chunks(arrays.in_shards(wide)) == min(expected, arrays.most_shard_chunks(wide))
    assert arrays.most_shard_chunks(entry) == min(4 * arrays.most_shard_chunks(wide), arrays.MAX_SHARD_CHUNKS)


def test_an_index_says_where_each_chunk_is_and_which_are_not_there() -> None:
    index = arrays.shard_index([5, 7], 3)

    assert np.frombuffer(index[:-4], "<u8").tolist() == [0, 5, 5, 7, 2**64 - 1, 2**64 - 1]
    assert len(index) == arrays.index_bytes(3)
