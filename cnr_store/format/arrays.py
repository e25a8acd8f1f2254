"""One Zarr v3 array: its metadata document and the bytes of its chunks. Pure, no I/O.

Segments are written and read through these functions rather than through a zarr-python store because a chunk is
decoded into memory that the caller sized by the *manifest*: a compressed stream that claims more elements than its
chunk is refused before anything is allocated, and nothing is copied on an event loop
(`format_spec/decisions/0002`). What they write is plain Zarr with core codecs alone: tests read it
with other libraries.
"""

from __future__ import annotations

import math
from typing import Any, cast

import google_crc32c
import numpy as np
import numpy.typing as npt

from cnr_store.errors import CorruptObject
from cnr_store.format import digit_chunks
from cnr_store.format.documents import canonical_json
from cnr_store.format.fields import ArrayDtype
from cnr_store.format.limits import CHUNK_BYTES, MAX_CHUNK_ROWS
from cnr_store.format.records import ArrayEntry, CodecName
from cnr_store.types import JsonValue

_CRC_BYTES = 4


def full_chunk_rows(row_bytes: int) -> int:
    """Return the rows of a chunk of `CHUNK_BYTES` of codes, at most."""
    return max(1, min(MAX_CHUNK_ROWS, CHUNK_BYTES // max(1, row_bytes)))


def chunk_rows_for(num_rows: int, row_bytes: int) -> int:
    """Return rows per chunk: near `CHUNK_BYTES` of codes, equalized so that no chunk is mostly padding."""
    target = full_chunk_rows(row_bytes)
    count = max(1, -(-num_rows // target))
    return max(1, -(-num_rows // count))


def codec_for(dtype: np.dtype[Any]) -> CodecName:
    """Return the codec of an array of a row list: row ids are gaps, other integers digits, anything else bytes."""
    if dtype == np.int64:
        return "gaps"
    return "digits" if dtype.kind == "i" else "bytes"


def describe(path: str, array_shape: tuple[int, ...], dtype: np.dtype[Any], chunk_rows: int) -> ArrayEntry:
    """Return the manifest's line for an array of ``array_shape`` at ``path`` (relative to the segment)."""
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
    """Return the bytes of a chunk as a Zarr reader has it: before zstd, without the checksum."""
    count, itemsize = math.prod(chunk_shape(entry)), np.dtype(entry.dtype).itemsize
    return count * itemsize if entry.codec == "bytes" else digit_chunks.chunk_bytes(count, itemsize)


def decoded_bytes(entry: ArrayEntry) -> int:
    """Return the memory that a decoded chunk of the array takes."""
    return math.prod(chunk_shape(entry)) * np.dtype(entry.dtype).itemsize


def real_rows(entry: ArrayEntry, index: int) -> int:
    """Return how many rows the stored chunk has in which the entry's chunk ``index`` is, without padding."""
    return min(entry.chunk_rows, entry.shape[0] - entry.stored_chunk(index) * entry.chunk_rows)


def chunk_path(entry: ArrayEntry, index: int) -> str:
    """Return the path of the entry's chunk ``index`` relative to the segment (Zarr's default chunk key encoding)."""
    is_vector = len(entry.shape) == 1 and entry.codec == "bytes"
    return f"{entry.path}/c/{entry.stored_chunk(index)}" + ("" if is_vector else "/0")


def array_document(entry: ArrayEntry) -> bytes:
    """Return the array's ``zarr.json``: of ``digits`` and ``gaps`` an array (chunks, bytes) of what each chunk is."""
    crc: dict[str, JsonValue] = {"name": "crc32c"}
    attributes: dict[str, JsonValue] = {}
    if entry.codec == "bytes":
        dtype, shape, chunk, names = entry.dtype, entry.shape, chunk_shape(entry), ("row", "column")
        order: dict[str, JsonValue] = {"endian": "little"}
        codecs: list[JsonValue] = [
            {"name": "bytes", "configuration": order} if np.dtype(dtype).itemsize > 1 else {"name": "bytes"}, crc
        ]  # fmt: skip
    else:
        dtype, names = "uint8", ("chunk", "byte")
        shape, chunk = (chunk_count(entry), chunk_bytes(entry)), (1, chunk_bytes(entry))
        zstd: JsonValue = {"name": "zstd", "configuration": {"level": digit_chunks.LEVEL, "checksum": False}}
        codecs = [{"name": "bytes"}, zstd, crc]
        attributes = {
            "cnr": {
                "codec": entry.codec, "dtype": entry.dtype, "shape": list(entry.shape), "chunk_rows": entry.chunk_rows
            }
        }  # fmt: skip
    return canonical_json({
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
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
    """Return the stored bytes of one chunk; the crc32c of everything before it stands last.

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
    payload: Any = flat.view(np.uint8).data if entry.codec == "bytes" else digit_chunks.encode(flat)
    return b"".join((payload, google_crc32c.value(bytes(payload)).to_bytes(_CRC_BYTES, "little")))


def decode_chunk(
    entry: ArrayEntry, data: bytes, out: npt.NDArray[Any], where: str, memory: npt.NDArray[np.uint8] | None = None
) -> None:
    """Decode one chunk into ``out`` of exactly `chunk_shape` and the array's dtype, C-contiguous.

    The caller has checked the inventory digest of ``data``, which covers the crc32c. Releases the GIL while it
    decompresses; of compressed data nothing is copied.

    Parameters
    ----------
    memory
        uint8, at least `chunk_bytes`, for what stands between; None allocates it.

    Raises
    ------
    CorruptObject
        If the stream holds another number of elements, or is no such stream; names ``where``.
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
    entry: ArrayEntry, data: bytes, where: str, memory: npt.NDArray[np.uint8] | None = None
) -> digit_chunks.DigitChunk:
    """Return a chunk of ``digits`` or ``gaps`` whose values are not unpacked yet; otherwise as `decode_chunk`."""
    count, itemsize = math.prod(chunk_shape(entry)), np.dtype(entry.dtype).itemsize
    return digit_chunks.decode(_payload(data, where), count, itemsize, where, memory)


def _payload(data: bytes, where: str) -> memoryview:
    """A chunk without its checksum."""
    if len(data) < _CRC_BYTES:
        raise CorruptObject(f"{where} has {len(data)} bytes, no room for its checksum", path=where)
    return memoryview(data)[:-_CRC_BYTES]
