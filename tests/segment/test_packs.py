"""Dense tensors are written from their own memory and read into it: the bytes are those of a copy of all."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from cnr_store import Store
from cnr_store.errors import BadDtype, BadShape, CorruptObject, MissingObject
from cnr_store.format import arrays
from cnr_store.format.layout import segment_key
from cnr_store.format.records import ArrayEntry
from cnr_store.runtime.threads import Inline, Workers
from cnr_store.segment import packs
from cnr_store.segment.packs import Pack, read_tensors, tensor_digest, tensor_digests
from cnr_store.storage import object_digest

CHUNK_ROWS = 5
SIZES = {"a": (3,), "none": (0, 4), "b": (4, 4), "scalar": (), "c": (23,), "d": (1,)}


def tensors_of(dtype: str, sizes: dict[str, tuple[int, ...]] = SIZES) -> dict[str, npt.NDArray[Any]]:
    numbers = np.random.default_rng(0)
    return {name: (numbers.random(shape) * 100).astype(dtype) for name, shape in sizes.items()}


def small_pack(tensors: dict[str, npt.NDArray[Any]], shard_chunks: int) -> Pack:
    """A pack in chunks of a few elements, as no writer makes them."""
    made = Pack.of("w.dense/x", tensors, {}, {name: tensor_digest(tensor) for name, tensor in tensors.items()})
    entry = msgspec.structs.replace(made.entry, chunk_rows=CHUNK_ROWS, shards=msgspec.UNSET)
    return Pack(arrays.with_shards_of(entry, shard_chunks), made.lines, made.tensors)


def copied(entry: ArrayEntry, tensors: dict[str, npt.NDArray[Any]], number: int) -> tuple[bytes, list[bytes]]:
    """The slow reference: an object and its chunks, of one array that has all elements."""
    whole = np.concatenate([tensor.reshape(-1) for tensor in tensors.values()])
    chunks = [
        arrays.encode_chunk(entry, whole[k * CHUNK_ROWS : (k + 1) * CHUNK_ROWS])
        for k in arrays.chunks_in(entry, number)
    ]
    end = b""
    if entry.shards is not msgspec.UNSET:
        end = arrays.shard_index([len(chunk) for chunk in chunks], arrays.shard_chunks(entry))
    return b"".join((*chunks, end)), chunks


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16", "uint8", "int64"])
@pytest.mark.parametrize("shard_chunks", [1, 3, 4])
def test_objects_of_a_pack_are_those_of_a_copy_of_all_its_tensors(dtype: str, shard_chunks: int) -> None:
    tensors = tensors_of(dtype)
    pack = small_pack(tensors, shard_chunks)

    for number in range(arrays.object_count(pack.entry)):
        made = pack.encode(number)
        expected, chunks = copied(pack.entry, tensors, number)
        assert b"".join(made.buffers) == expected
        assert (made.path, made.size_bytes) == (arrays.object_path(pack.entry, number), len(expected))
        assert made.digest == object_digest(expected)
        assert list(made.inside) == [(len(chunk), object_digest(chunk)) for chunk in chunks]


@pytest.mark.parametrize("task_bytes", [0, 20, 1 << 20])
def test_digests_made_in_tasks_of_many_tensors_are_those_of_each(
    task_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "TASK_BYTES", task_bytes)
    tensors = tensors_of("float32")

    with closing(Workers(2)) as workers:
        found = tensor_digests(tensors, workers)
        assert tensor_digests({}, workers) == {}

    assert found == {name: object_digest(tensor.tobytes()) for name, tensor in tensors.items()}


def test_a_pack_of_nothing_has_no_objects() -> None:
    pack = Pack.of("w.dense/x", {"none": np.zeros((0, 2), np.float32)}, {}, {"none": object_digest(b"")})

    assert arrays.object_count(pack.entry) == 0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Dense tensors in shards: 36 MiB of one dtype, and a few of another in single chunks."""
    store = Store.create(str(tmp_path_factory.mktemp("dense") / "store"), fsync=False, threads=2)
    with store.writer() as writer, writer.begin(step=1) as txn:
        txn.put_dense({**LARGE, **tensors_of("int64", {"steps": (7,), "empty": (0,)})})
    return store


LARGE = tensors_of("float32", {"first": (5,), "wide": (3 << 20,), "last": (1 << 20, 6), "small": (3, 3)})


@pytest.mark.parametrize("names", [["first"], ["small", "wide"], ["last", "first"], [*LARGE, "steps", "empty"]])
def test_tensors_in_shards_come_back_alone_and_together(large: Store, names: list[str]) -> None:
    snapshot = large.snapshot()
    expected = {**LARGE, **tensors_of("int64", {"steps": (7,), "empty": (0,)})}
    assert any(array.shards is not msgspec.UNSET for array in snapshot.readers[0].manifest.dense_arrays)

    found = snapshot.read_many_dense(names)

    assert list(found) == names
    for name in names:
        assert found[name].dtype == expected[name].dtype
        assert np.array_equal(found[name], expected[name])
        assert np.array_equal(snapshot.read_dense(name), expected[name])


def test_a_damaged_shard_is_an_error_that_names_it(large: Store) -> None:
    snapshot = large.snapshot()
    reader, entry = snapshot.readers[0], snapshot.dense["last"]
    [array] = [one for one in reader.manifest.dense_arrays if one.path == entry.path]
    path = arrays.object_path(array, 0)
    file = Path(large.url) / segment_key(reader.name, path)
    data = file.read_bytes()

    changed = b"".join((data[:1000], bytes([data[1000] ^ 1]), data[1001:]))
    for wrong, error in ((changed, CorruptObject), (data[: 1 << 20], CorruptObject), (None, MissingObject)):
        file.unlink()
        if wrong is not None:
            file.write_bytes(wrong)
        with pytest.raises(error, match=path):
            read_tensors([reader], {"last": entry}, Inline())
    file.write_bytes(data)
    assert np.array_equal(snapshot.read_dense("last"), LARGE["last"])


def test_tensors_are_read_into_memory_that_the_caller_gives(large: Store) -> None:
    snapshot = large.snapshot()
    memory = np.zeros_like(LARGE["last"])

    found = snapshot.read_many_dense(["first", "last"], {"last": memory})

    assert np.shares_memory(found["last"], memory)
    assert np.array_equal(memory, LARGE["last"])
    for wrong, error in ((memory.T, BadShape), (memory[:, :3], BadShape), (memory.astype(np.float64), BadDtype)):
        with pytest.raises(error, match="'last'"):
            snapshot.read_many_dense(["last"], {"last": wrong})
