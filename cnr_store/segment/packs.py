"""Dense tensors of one dtype, end to end in one array (spec, section 4.6): written from their memory, and read back.

Why this module exists: dense tensors can be most of a state, and their bytes are stored as they are. So they are copied
nowhere on their way: a chunk is written from the tensors that it has elements of, and read into them. Each block of
bytes is read from memory once for the checksum and all digests that have it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, cast

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from cnr_store.errors import BadDtype, BadShape, CorruptObject
from cnr_store.format import arrays, layout
from cnr_store.format.fields import ArrayDtype, TensorDtype
from cnr_store.format.records import ArrayEntry, DenseEntry, TensorLine
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.reader import SegmentReader
from cnr_store.storage import object_digest

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_DENSE_DTYPES = frozenset(
    {"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
)


_CARRIERS = {"bfloat16": "uint16", "bool": "uint8"}

TASK_BYTES = 1024 * 1024
"""Bytes of tensors that one task makes digests of, at least."""

BLOCK_BYTES = 256 * 1024
"""Bytes that are taken through checksum and digests at a time: they stay in a core's cache meanwhile."""


def flat_bytes(array: Array) -> Bytes:
    """Return a C-contiguous array's bytes, (size,), in its own memory."""
    return array.reshape(-1).view(np.uint8)


def tensor_digests(tensors: Mapping[str, Array], workers: Workers) -> dict[str, str]:
    """Return the digests that a manifest has of dense tensors, by name, computed on threads. Blocks.

    Small tensors share a task: a hand-over to a thread costs more than their digest.
    """
    tasks, size = [list[str]()], 0
    for name, tensor in tensors.items():
        if size > TASK_BYTES:
            tasks.append([])
            size = 0
        tasks[-1].append(name)
        size += tensor.nbytes
    found = workers.run(partial(lambda names: [tensor_digest(tensors[name]) for name in names], task) for task in tasks)
    return dict(zip(tensors, chain.from_iterable(found), strict=True))


def tensor_digest(array: Array) -> str:
    """Return the digest that a manifest has of a dense tensor."""
    return object_digest(flat_bytes(array).data)


class LaidOut:
    """The bytes of tensors, each from its place in an array on; other places of the array are nobody's. No I/O.

    Parameters
    ----------
    tensors
        First byte in the array, and memory; ascending, disjoint.
    """

    def __init__(self, tensors: Sequence[tuple[int, Bytes]]) -> None:
        self._tensors = [(start, memory) for start, memory in tensors if len(memory)]
        self._stops = [start + len(memory) for start, memory in self._tensors]

    def within(self, low: int, high: int) -> Iterator[tuple[int, Bytes]]:
        """Yield what lies in the bytes [low, high) of the array: first byte and memory, ascending."""
        for start, memory in self._tensors[bisect_right(self._stops, low) :]:
            if start >= high:
                return
            first = max(low, start)
            yield first, memory[first - start : high - start]


def check_dense_dtypes(tensors: Mapping[str, Array], dtypes: Mapping[str, str]) -> None:
    """Refuse dense tensors of an unsupported dtype, or of another dtype than their logical dtype is stored as.

    Raises
    ------
    BadDtype
    """
    kinds = {(tensor.dtype, dtypes.get(name)): name for name, tensor in tensors.items()}
    for (dtype, logical), name in kinds.items():
        _check_dense_dtype(name, dtype, logical)


def _check_dense_dtype(name: str, dtype: np.dtype[Any], logical: str | None) -> None:
    held = dtype.name
    if held not in _DENSE_DTYPES:
        raise BadDtype(
            f"dense tensor {name!r} has dtype {dtype}, which a store cannot hold; use one of {sorted(_DENSE_DTYPES)}",
            expected=sorted(_DENSE_DTYPES), found=held,
        )  # fmt: skip
    stored = held if logical is None else _CARRIERS.get(logical, logical)
    if stored != held:
        raise BadDtype(
            f"dense tensor {name!r} is named {logical} and held in {dtype}, expected {stored}",
            expected=stored, found=held,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class EncodedObject:
    """One object of a pack: what it is made of, in tensors' own memory, and what the manifest records of it.

    ``inside``: size and digest of each of its chunks.
    """

    path: str
    buffers: Sequence[memoryview]
    size_bytes: int
    digest: str
    inside: Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Dense tensors of one dtype as one array that is not written yet.

    Attributes
    ----------
    entry
        The array.
    lines
        Where each tensor lies in it, by name.
    tensors
        Their bytes; not copied, so nobody may change them before the objects are put.
    """

    entry: ArrayEntry
    lines: Mapping[str, TensorLine]
    tensors: LaidOut

    @classmethod
    def of(cls, path: str, tensors: Mapping[str, Array], dtypes: Mapping[str, str], digests: Mapping[str, str]) -> Pack:
        """Lay tensors of one stored dtype end to end; C-contiguous, at least one. Pure.

        ``dtypes``: logical dtypes where they differ from the stored one. ``digests``: of each, by name.
        """
        dtype = next(iter(tensors.values())).dtype
        dtype_name = dtype.name  # numpy computes it at each call
        lines, laid, offset = dict[str, TensorLine](), list[tuple[int, Bytes]](), 0
        for name, tensor in tensors.items():
            logical = cast(TensorDtype, dtypes.get(name, dtype_name))
            lines[name] = TensorLine(
                path=path, offset=offset, dtype=logical, shape=tensor.shape, digest=digests[name]
            )  # fmt: skip
            laid.append((offset * dtype.itemsize, flat_bytes(tensor)))
            offset += tensor.size
        entry = ArrayEntry(
            path=path, dtype=cast(ArrayDtype, dtype_name), shape=(offset,),
            chunk_rows=arrays.chunk_rows_for(offset, dtype.itemsize), codec="bytes", start=0, count=offset,
        )  # fmt: skip
        return cls(arrays.in_shards(entry), lines, LaidOut(laid))

    def encode(self, number: int) -> EncodedObject:
        """Return object ``number`` of the array: a shard, or a chunk if it has no shards. Reads its bytes once."""
        entry, buffers, inside = self.entry, list[memoryview](), list[tuple[int, str]]()
        whole, is_shard = xxhash.xxh3_128(), entry.shards is not msgspec.UNSET
        for chunk in arrays.chunks_in(entry, number):
            pieces = _joined(self._pieces(chunk))
            digest, checksum = xxhash.xxh3_128() if is_shard else whole, 0
            for piece in pieces:
                for start, stop in blocks(len(piece), BLOCK_BYTES):
                    block = piece[start:stop]
                    checksum = google_crc32c.extend(checksum, block)
                    digest.update(block.data)
                    if is_shard:
                        whole.update(block.data)
            end = checksum.to_bytes(arrays.CRC_BYTES, "little")
            digest.update(end)
            if is_shard:
                whole.update(end)
            inside.append((sum(map(len, pieces)) + len(end), digest.hexdigest()))
            buffers += [*(piece.data for piece in pieces), memoryview(end)]
        if is_shard:
            index = arrays.shard_index([size for size, _ in inside], arrays.shard_chunks(entry))
            whole.update(index)
            buffers.append(memoryview(index))
        size = sum(map(len, buffers))
        return EncodedObject(arrays.object_path(entry, number), buffers, size, whole.hexdigest(), inside)

    def _pieces(self, chunk: int) -> Iterator[Bytes]:
        """The bytes of a chunk, of one tensor each, and its padding."""
        size = arrays.decoded_bytes(self.entry)
        missing, dtype = size, np.dtype(self.entry.dtype)
        for _, piece in self.tensors.within(chunk * size, (chunk + 1) * size):
            yield piece
            missing -= len(piece)
        if missing:
            fill = np.nan if dtype.kind == "f" else 0
            yield flat_bytes(np.full(missing // dtype.itemsize, fill, dtype))


def _joined(pieces: Iterable[Bytes]) -> list[Bytes]:
    """Return bytes in as few pieces as blocks: small tensors are copied together, which takes less than a call each."""
    found, small, size = list[Bytes](), list[Bytes](), 0
    for piece in pieces:
        if small and size + len(piece) > BLOCK_BYTES:
            found.append(np.concatenate(small) if len(small) > 1 else small[0])
            small, size = [], 0
        small.append(piece)
        size += len(piece)
    return [*found, np.concatenate(small) if len(small) > 1 else small[0]]


def read_tensors(
    readers: Iterable[SegmentReader], wanted: Mapping[str, DenseEntry], workers: Workers,
    into: Mapping[str, Array] = MappingProxyType({}),
) -> dict[str, Array]:  # fmt: skip
    """Return dense tensors by name, in their stored dtypes; reads just their chunks, each into the tensors. Blocks.

    ``readers``: the segments that hold them, among others. ``into``: memory for some of them, C-contiguous, of their
    stored dtype and shape; after an error it holds anything.

    Raises
    ------
    BadShape, BadDtype
        Memory of another shape or dtype, or not in one piece; nothing was read.
    MissingObject, CorruptObject, CorruptStore, StorageFailure
    """
    check_dense_dtypes(into, {name: wanted[name].dtype for name in into})
    for name, array in into.items():
        entry = wanted[name]
        if array.shape != entry.shape or not array.flags.c_contiguous:
            raise BadShape(
                f"memory for dense tensor {name!r} has shape {array.shape}, expected {entry.shape} in one piece",
                expected=entry.shape, found=array.shape,
            )  # fmt: skip
    found: dict[str, Array] = {}
    for reader in readers:
        own = {name: entry for name, entry in wanted.items() if entry.segment == reader.name}
        if own:
            found |= _read_segment(reader, own, workers, into)
    return {name: found[name] for name in wanted}


def _read_segment(
    reader: SegmentReader, wanted: Mapping[str, DenseEntry], workers: Workers, into: Mapping[str, Array]
) -> dict[str, Array]:
    held = {array.path: array for array in reader.manifest.dense_arrays}
    found = {
        name: into[name].reshape(-1) if name in into else np.empty(math.prod(entry.shape), held[entry.path].dtype)
        for name, entry in wanted.items()
    }
    reads = []
    for array in held.values():
        own = {name: entry for name, entry in wanted.items() if entry.path == array.path}
        places = [(entry.offset * found[name].itemsize, flat_bytes(found[name])) for name, entry in own.items()]
        laid = LaidOut(sorted(places, key=lambda place: place[0]))
        reads += [partial(_read_run, reader, array, run, laid) for run in _runs(array, own.values(), reader.is_remote)]
    workers.run(reads)
    workers.run(partial(_check_tensor, reader, name, entry, found[name]) for name, entry in wanted.items())
    return {name: found[name].reshape(entry.shape) for name, entry in wanted.items()}


def _runs(array: ArrayEntry, wanted: Iterable[DenseEntry], whole_objects: bool) -> list[range]:
    """Neighbouring chunks that are read at a time: those of an object that hold what is wanted, or each by itself."""
    chunks: set[int] = set()
    for entry in wanted:
        size = math.prod(entry.shape)
        if size:
            chunks |= {*range(entry.offset // array.chunk_rows, -(-(entry.offset + size) // array.chunk_rows))}
    runs: list[range] = []
    room = arrays.shard_chunks(array)
    for chunk in sorted(chunks):
        if whole_objects and runs and runs[-1].stop == chunk and chunk % room:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs


def _read_run(reader: SegmentReader, array: ArrayEntry, run: range, tensors: LaidOut) -> None:
    size = arrays.decoded_bytes(array)
    places = [reader.place_of(array, chunk) for chunk in run]
    for place in places:
        if place.size != size + arrays.CRC_BYTES:
            where = layout.segment_key(reader.name, place.path)
            raise CorruptObject(
                f"{where} has a chunk of {place.size} bytes, its array's chunks have {size} and a checksum; run "
                "`cnr verify`",
                path=where, expected=size + arrays.CRC_BYTES, found=place.size,
            )  # fmt: skip
    reader.fill_places(places, [_targets(chunk * size, (chunk + 1) * size, tensors) for chunk in run])


def _targets(low: int, high: int, tensors: LaidOut) -> list[memoryview]:
    """Where the bytes [low, high) of an array go, and the checksum behind them: tensors, and memory that is dropped."""
    buffers, at = list[memoryview](), low
    for first, memory in tensors.within(low, high):
        if first > at:
            buffers.append(memoryview(bytearray(first - at)))
        buffers.append(memory.data)
        at = first + len(memory)
    buffers.append(memoryview(bytearray(high - at + arrays.CRC_BYTES)))
    return buffers


def _check_tensor(reader: SegmentReader, name: str, entry: DenseEntry, found: Array) -> None:
    if tensor_digest(found) != entry.digest:
        raise CorruptObject(
            f"dense tensor {name!r} in segment {reader.name} has another digest than the manifest names; its entry "
            "points to other bytes, run `cnr verify`",
            path=layout.segment_key(reader.name, entry.path),
        )
