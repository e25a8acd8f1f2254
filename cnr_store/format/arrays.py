"""One Zarr v3 array: its metadata document and the bytes of its chunks. Pure, no I/O.

Segments are written and read through these functions rather than through a zarr-python store because a chunk is
decoded into memory that the caller sized by the *manifest*: a compressed stream that claims more elements than its
chunk is refused before anything is allocated, and nothing is copied on an event loop
(`format_spec/decisions/0002`). They write plain Zarr with core codecs only: tests read it with other libraries.

A chunk of integers is planes of digits under zstd, with their middle and bases at the end (spec, section 4.2). zstd is
used for its Huffman coder. Codes repeat by chance only, and a match costs more bytes than it saves, so the writer sets
the match search to its minimum. Each block of a frame has its own Huffman table: a block has at most 64 KiB, of one
plane. Any zstd decoder reads the result.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import zstandard
from numcodecs.zstd import Zstd

from cnr_store.errors import CorruptObject
from cnr_store.format import digits
from cnr_store.format.documents import canonical_json, content_size
from cnr_store.format.fields import ArrayDtype
from cnr_store.format.limits import CHUNK_BYTES, MAX_CHUNK_ROWS, MAX_SHARD_CHUNKS, SHARD_BYTES, SHARD_CHUNKS
from cnr_store.format.records import ArrayEntry, ChunkPlace, CodecName, Shards
from cnr_store.types import JsonValue

Bytes = npt.NDArray[np.uint8]

CRC_BYTES = 4

ZSTD_LEVEL = 1
_PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=ZSTD_LEVEL, window_log=16, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0,
    strategy=zstandard.STRATEGY_FAST,
)  # fmt: skip
_SLACK_BYTES = 7
"""Each plane ends with a whole byte, so the planes of a few values can be a few bytes larger than the values."""

_END_BYTES = 1 + digits.MOST_DIGITS
"""At the end of a chunk: the middle of its integers, and the bases of their digits."""

_SIDES_RUN = 128
"""Values of each run of the sample that shows whether values lie on both sides of 0."""

_FIRST_RUNS, _FIRST_RUN = 8, 1024
_SECOND_RUNS, _SECOND_RUN = 4, 16_384
"""Runs of a sample, and values of each: in the first round all bases are compared, in the second those left."""

_CLOSE = 1.02
"""Bases that cost more times the least in the first round are out (`format_spec/decisions/0049`)."""

_ORDERED_BLOCKS, _LEAST_BLOCK = 4, 16_384
"""Blocks of each plane of an array that lies in an order, at least, if each has so many bytes."""

_UNPACKED_TO_STORED = 100
"""Unpacking this many bytes costs as much as storing one more byte."""

_DIVIDED = 1.005
"""Bases that are no power of two unpack at a quarter of the speed, so they must save half a percent of the bytes."""


def full_chunk_rows(row_bytes: int) -> int:
    """Return the rows of a chunk of `CHUNK_BYTES` of codes, at most."""
    return max(1, min(MAX_CHUNK_ROWS, CHUNK_BYTES // max(1, row_bytes)))


def chunk_rows_for(num_rows: int, row_bytes: int) -> int:
    """Return rows per chunk: near `CHUNK_BYTES` of codes, equalized so that no chunk is mostly padding."""
    target = full_chunk_rows(row_bytes)
    count = max(1, -(-num_rows // target))
    return max(1, -(-num_rows // count))


def codec_for(dtype: np.dtype[Any]) -> CodecName:
    """Return the codec of an array of a row list: ``gaps`` for int64 row ids, ``digits`` for codes, else ``bytes``."""
    if dtype == np.int64:
        return "gaps"
    return "digits" if dtype.kind == "i" else "bytes"


def describe(path: str, array_shape: tuple[int, ...], dtype: np.dtype[Any], chunk_rows: int) -> ArrayEntry:
    """Return the entry of a whole array of ``array_shape`` at ``path`` (relative to the segment)."""
    return ArrayEntry(
        path=path,
        dtype=cast(ArrayDtype, dtype.name),
        shape=array_shape,
        chunk_rows=chunk_rows,
        codec=codec_for(dtype),
        start=0,
        count=array_shape[0],
    )


def chunk_count(entry: ArrayEntry) -> int:
    """Return how many chunks hold rows of the entry."""
    return -(-(entry.start % entry.chunk_rows + entry.count) // entry.chunk_rows)


def chunk_shape(entry: ArrayEntry) -> tuple[int, ...]:
    """Return the shape of the values of every chunk; the last one is padded to it."""
    return (entry.chunk_rows, *entry.shape[1:])


def chunk_bytes(entry: ArrayEntry) -> int:
    """Return the bytes of a chunk before compression, without its checksum."""
    count, itemsize = math.prod(chunk_shape(entry)), np.dtype(entry.dtype).itemsize
    return count * itemsize if entry.codec == "bytes" else digit_chunk_bytes(count, itemsize)


def decoded_bytes(entry: ArrayEntry) -> int:
    """Return the memory that a decoded chunk of the array takes."""
    return math.prod(chunk_shape(entry)) * np.dtype(entry.dtype).itemsize


def real_rows(entry: ArrayEntry, index: int) -> int:
    """Return how many rows, without padding, the stored chunk has that contains the entry's chunk ``index``."""
    return min(entry.chunk_rows, entry.shape[0] - entry.stored_chunk(index) * entry.chunk_rows)


def most_shard_chunks(entry: ArrayEntry) -> int:
    """Return how many chunks a full shard of the array has; 1 if its chunks are too large for shards."""
    return max(1, min(MAX_SHARD_CHUNKS, SHARD_BYTES // max(1, decoded_bytes(entry))))


def in_shards(entry: ArrayEntry) -> ArrayEntry:
    """Return an array that is not written yet, with the shards that its shape requires, or without shards."""
    count, full = chunk_count(entry), most_shard_chunks(entry)
    if full == 1 or count < max(2, min(SHARD_CHUNKS, full)):
        return msgspec.structs.replace(entry, shards=msgspec.UNSET)
    return with_shards_of(entry, min(full, count))


def with_shards_of(entry: ArrayEntry, chunks: int) -> ArrayEntry:
    """Return an array that is not written yet, with ``chunks`` chunks per shard; unchanged if that is 1."""
    if chunks == 1:
        return entry
    return msgspec.structs.replace(entry, shards=Shards(chunks=chunks, sizes=(), digests=""))


def shard_chunks(entry: ArrayEntry) -> int:
    """Return how many chunks each object of the array has; the last object may have fewer."""
    return 1 if entry.shards is msgspec.UNSET else entry.shards.chunks


def object_count(entry: ArrayEntry) -> int:
    """Return how many shards a whole array has, or chunks if it has no shards."""
    return -(-chunk_count(entry) // shard_chunks(entry))


def object_path(entry: ArrayEntry, number: int) -> str:
    """Return the path of an object with chunks, relative to the segment (chunk key encoding ``default`` with dots)."""
    is_vector = len(entry.shape) == 1 and entry.codec == "bytes"
    return f"{entry.path}/c.{number}" + ("" if is_vector else ".0")


def chunks_in(entry: ArrayEntry, number: int) -> range:
    """Return the chunks that object ``number`` of a whole array has."""
    room = shard_chunks(entry)
    return range(number * room, min((number + 1) * room, chunk_count(entry)))


def object_paths(entry: ArrayEntry) -> list[str]:
    """Return the paths of the objects of a whole array: its document, then those with chunks."""
    return [f"{entry.path}/zarr.json", *(object_path(entry, number) for number in range(object_count(entry)))]


def chunk_path(entry: ArrayEntry, index: int) -> str:
    """Return the path of the object that has the entry's chunk ``index``."""
    return object_path(entry, entry.stored_chunk(index) // shard_chunks(entry))


def place_in_shard(entry: ArrayEntry, shards: Shards, index: int) -> ChunkPlace:
    """Return where the entry's chunk ``index`` is: a shard has its chunks in order, without gaps."""
    stored = entry.stored_chunk(index)
    start = sum(shards.sizes[stored - stored % shards.chunks : stored])
    return ChunkPlace(
        chunk_path(entry, index), start, shards.sizes[stored], shards.digests[32 * stored : 32 * stored + 32]
    )


def shard_index(sizes: Sequence[int], chunks: int) -> bytes:
    """Return the index at the end of a shard: offset and size of each chunk (2^64 - 1 if absent), then a crc32c.

    ``sizes``: bytes of each present chunk. ``chunks``: entries of the index.
    """
    index = np.full((chunks, 2), 2**64 - 1, "<u8")
    index[: len(sizes), 1] = sizes
    index[: len(sizes), 0] = np.cumsum([0, *sizes[:-1]])
    data: bytes = index.tobytes()
    return b"".join((data, google_crc32c.value(data).to_bytes(CRC_BYTES, "little")))


def index_bytes(chunks: int) -> int:
    """Return the bytes of a `shard_index`."""
    return 16 * chunks + CRC_BYTES


def array_document(entry: ArrayEntry) -> bytes:
    """Return the array's ``zarr.json``. An array of ``digits`` or ``gaps`` is described as uint8 (chunks, bytes)."""
    crc: dict[str, JsonValue] = {"name": "crc32c"}
    attributes: dict[str, JsonValue] = {}
    order: dict[str, JsonValue] = {"endian": "little"}
    if entry.codec == "bytes":
        dtype, shape, chunk, names = entry.dtype, entry.shape, chunk_shape(entry), ("row", "column")
        codecs: list[JsonValue] = [
            {"name": "bytes", "configuration": order} if np.dtype(dtype).itemsize > 1 else {"name": "bytes"}, crc
        ]  # fmt: skip
    else:
        dtype, names = "uint8", ("chunk", "byte")
        shape, chunk = (chunk_count(entry), chunk_bytes(entry)), (1, chunk_bytes(entry))
        zstd: JsonValue = {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}}
        codecs = [{"name": "bytes"}, zstd, crc]
        attributes = {
            "cnr": {
                "codec": entry.codec, "dtype": entry.dtype, "shape": list(entry.shape), "chunk_rows": entry.chunk_rows
            }
        }  # fmt: skip
    if entry.shards is not msgspec.UNSET:
        inside: dict[str, JsonValue] = {
            "chunk_shape": list(chunk), "codecs": codecs, "index_location": "end",
            "index_codecs": [{"name": "bytes", "configuration": order}, crc],
        }  # fmt: skip
        codecs = [{"name": "sharding_indexed", "configuration": inside}]
        chunk = (chunk[0] * entry.shards.chunks, *chunk[1:])
    return canonical_json({
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": "NaN" if np.dtype(dtype).kind == "f" else 0,
        "codecs": codecs,
        "attributes": attributes,
        "dimension_names": list(names[: len(shape)]),
        "storage_transformers": [],
    })  # fmt: skip


def group_document(attributes: dict[str, JsonValue]) -> bytes:
    """Return a group's ``zarr.json``."""
    return canonical_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def encode_chunk(entry: ArrayEntry, block: npt.NDArray[Any]) -> bytes:
    """Return the stored bytes of one chunk, which end with the crc32c of the bytes before it.

    Parameters
    ----------
    block
        (rows, width) or (rows,) of the array's dtype, C-contiguous, at most ``chunk_rows`` rows; a short last block
        is padded: NaN for floats, a gap or value of 0 for integers. Releases the GIL while it compresses; does not
        keep ``block``.
    """
    if entry.codec == "gaps":
        block = np.diff(block, prepend=block.dtype.type(0))
    if block.shape[0] < entry.chunk_rows:
        padded = np.full(chunk_shape(entry), np.nan if block.dtype.kind == "f" else 0, block.dtype)
        padded[: block.shape[0]] = block
        block = padded
    flat = np.ascontiguousarray(block).reshape(-1)
    if entry.codec == "bytes":
        pieces: list[Any] = [flat.view(np.uint8)]
    else:
        pieces = encode_digits(flat, is_ordered=entry.order is not msgspec.UNSET)
    crc = functools.reduce(google_crc32c.extend, pieces, 0)
    return b"".join((*pieces, crc.to_bytes(CRC_BYTES, "little")))


def decode_chunk(
    entry: ArrayEntry,
    data: bytes | memoryview,
    out: npt.NDArray[Any],
    where: str,
    memory: npt.NDArray[np.uint8] | None = None,
) -> None:
    """Decode one chunk into ``out`` of exactly `chunk_shape` and the array's dtype, C-contiguous.

    The caller has checked the inventory digest of ``data``, which covers the crc32c. Releases the GIL while it
    decompresses; does not copy compressed data.

    Parameters
    ----------
    memory
        Working memory, uint8, at least `chunk_bytes`; None allocates it.

    Raises
    ------
    CorruptObject
        The stream has another number of elements, or is not valid; names ``where``.
    """
    flat = out.reshape(-1)
    if entry.codec != "bytes":
        open_chunk(entry, data, where, memory).unpack(0, flat)
        if entry.codec == "gaps":
            np.cumsum(flat, out=flat)
        return
    payload = _payload(data, where)
    if len(payload) != flat.nbytes:
        raise CorruptObject(
            f"{where} has {len(payload)} bytes of {flat.itemsize} an element, its array's chunks have {flat.size} "
            "elements; run `cnr verify`",
            path=where, expected=flat.size, found=len(payload) // flat.itemsize,
        )  # fmt: skip
    flat.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)


def open_chunk(
    entry: ArrayEntry, data: bytes | memoryview, where: str, memory: npt.NDArray[np.uint8] | None = None
) -> DigitChunk:
    """Return a chunk of ``digits`` or ``gaps`` whose values are not unpacked yet; otherwise as `decode_chunk`."""
    count, itemsize = math.prod(chunk_shape(entry)), np.dtype(entry.dtype).itemsize
    return decode_digits(_payload(data, where), count, itemsize, where, memory)


def _payload(data: bytes | memoryview, where: str) -> memoryview:
    """A chunk without its checksum."""
    if len(data) < CRC_BYTES:
        raise CorruptObject(f"{where} has {len(data)} bytes, no room for its checksum", path=where)
    return memoryview(data)[:-CRC_BYTES]


def digit_chunk_bytes(count: int, itemsize: int) -> int:
    """Return the bytes of a chunk of ``count`` integers before zstd; independent of the bases."""
    return count * itemsize + _SLACK_BYTES + _END_BYTES


@dataclass(frozen=True, slots=True)
class DigitChunk:
    """A decompressed chunk: ``count`` values, any range of which can be unpacked."""

    planes: Bytes
    packing: digits.Packing
    count: int

    def unpack(self, start: int, out: npt.NDArray[Any]) -> None:
        """Write values [start, start + n) to ``out`` (n,)."""
        digits.unpack(self.planes, self.packing, self.count, start, out)


class _Compressor(threading.local):
    """A zstd compressor and its input memory, one per thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> Bytes:
        if self._memory.size < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]

    def compress(self, chunk: Bytes, planes: Sequence[int], *, is_ordered: bool = False) -> list[bytes]:
        """Return the zstd frame, in pieces, of a chunk that begins with planes of the given sizes in bytes.

        ``is_ordered``: what is alike stands together, so smaller blocks pay for their Huffman tables.
        """
        stream = self._zstd.compressobj(size=chunk.size)
        pieces, start = [], 0
        for size in planes:
            block = max(-(-size // _ORDERED_BLOCKS), _LEAST_BLOCK) if is_ordered else size
            for at in range(0, size, max(block, 1)):
                pieces.append(stream.compress(chunk[start + at : start + min(at + block, size)].data))
                pieces.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
            start += size
        return [*pieces, stream.compress(chunk[start:].data), stream.flush()]


_COMPRESSOR = _Compressor()


def encode_digits(values: npt.NDArray[Any], *, is_ordered: bool = False) -> list[bytes]:
    """Return the zstd frame, in pieces, of a chunk of integers, which are in an order if ``is_ordered``.

    ``values`` (n,): int16, int32 or int64, contiguous.

    Memory: `digit_chunk_bytes` per thread, kept. Releases the GIL.
    """
    packing = choose_packing(values)
    bases, middle = packing
    chunk = _COMPRESSOR.take(digit_chunk_bytes(values.size, values.itemsize))
    used = digits.pack(values, packing, chunk)
    chunk[used:] = 0
    chunk[chunk.size - _END_BYTES] = middle % 256
    chunk[chunk.size - digits.MOST_DIGITS :] = 1
    if bases:
        chunk[chunk.size - len(bases) :] = np.array(bases, np.int64).astype(np.uint8)
    return _COMPRESSOR.compress(chunk, digits.plane_bytes(bases, values.size), is_ordered=is_ordered)


def choose_packing(values: npt.NDArray[Any]) -> digits.Packing:
    """Return the packing for which a sample of the values has the lowest cost (`_cost`), in two rounds. Pure."""
    if values.size == 0:
        return digits.Packing(())
    found = digits.choices(int(values.min()), int(values.max()), values.dtype, _begin_of(values))
    if len(found) > 1 and values.size > 2 * _FIRST_RUNS * _FIRST_RUN:
        # Together: with a Huffman table for each short run the tables would count for more than they do in a chunk.
        sample = np.concatenate(_runs(values, _FIRST_RUNS, _FIRST_RUN))
        costs = [_cost(sample, packing) for packing in found]
        found = [packing for packing, cost in zip(found, costs, strict=True) if cost <= _CLOSE * min(costs)]
    if len(found) == 1:
        return found[0]
    # By themselves, as each block of a chunk is compressed: rows are in the order of a slot, so the range of their
    # codes changes along the chunk. One Huffman table for all of them would overestimate the cost of low digits.
    runs = _runs(values, _SECOND_RUNS, _SECOND_RUN)
    return min(found, key=lambda packing: sum(_cost(run, packing) for run in runs))


def _begin_of(values: npt.NDArray[Any]) -> int | None:
    """Return where the lowest digit should begin: at the low end of values that nearly all lie above 0; else None."""
    sample = np.sort(np.concatenate(_runs(values, _FIRST_RUNS, _SIDES_RUN)))
    rare = sample.size // 100
    low, high = int(sample[rare]), int(sample[-1 - rare])
    return low if -high < 4 * low and -128 <= low <= digits.LARGEST_BEGIN else None


def _runs(values: npt.NDArray[Any], count: int, length: int) -> list[npt.NDArray[Any]]:
    """Return the values, or the middle of each of ``count`` parts of the chunk.

    Not its ends: in an order they are the rows least like the others.
    """
    if values.size <= count * length:
        return [values]
    starts = (np.arange(1, 2 * count, 2) * values.size // count - length) // 2
    return [values[start : start + length] for start in starts]


def _cost(run: npt.NDArray[Any], packing: digits.Packing) -> float:
    planes, bases = _COMPRESSOR.take(digit_chunk_bytes(run.size, run.itemsize)), packing.bases
    used = digits.pack(run, packing, planes)
    stored = sum(map(len, _COMPRESSOR.compress(planes[:used], digits.plane_bytes(bases, run.size))))
    is_divided = any(base & (base - 1) for base in bases)
    return _UNPACKED_TO_STORED * stored * (_DIVIDED if is_divided else 1.0) + used


def decode_digits(frame: memoryview, count: int, itemsize: int, where: str, memory: Bytes | None = None) -> DigitChunk:
    """Return a chunk of ``count`` values in ``memory`` (`digit_chunk_bytes`), which is allocated if it is None.

    Raises
    ------
    CorruptObject
        It is no zstd frame, has another size, or its bases need more bytes than the chunk has; names ``where``.
    """
    size = digit_chunk_bytes(count, itemsize)
    chunk = np.empty(size, np.uint8) if memory is None else memory[:size]
    found = content_size(frame)
    if found != size:
        raise CorruptObject(
            f"{where} has {'an unknown number of' if found is None else found} bytes under zstd, a chunk of {count} "
            f"elements has {size}; run `cnr verify`",
            path=where, expected=size, found=found,
        )  # fmt: skip
    try:
        Zstd().decode(frame, out=chunk)
    except (RuntimeError, ValueError) as error:
        raise CorruptObject(f"{where} is no zstd frame: {error}", path=where) from error
    bases = tuple(int(base) or digits.LARGEST_BASE for base in chunk[size - digits.MOST_DIGITS :] if base != 1)
    if sum(digits.plane_bytes(bases, count)) > size - _END_BYTES:
        raise CorruptObject(
            f"{where} has digits of bases {bases}, which need more bytes than its {count} elements have; run "
            "`cnr verify`",
            path=where, found=bases,
        )  # fmt: skip
    middle = int(chunk[size - _END_BYTES].view(np.int8))
    return DigitChunk(chunk, digits.Packing(bases, middle), count)
