"""One Zarr v3 array: its metadata document and the bytes of its chunks. Pure, no I/O.

Segments are written and read through these functions rather than through a zarr-python store because a chunk is
decoded into memory that the caller sized by the *manifest*: a compressed stream that claims more elements than its
chunk is refused before anything is allocated, and nothing is copied on an event loop
(`format_spec/decisions/0002`). What they write is plain Zarr: tests hold them equal to zarr-python in both
directions, byte for byte.
"""

from __future__ import annotations

import math
from typing import Any, cast

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt
from numcodecs.pcodec import PCodec
from numcodecs.zstd import Zstd
from pcodec import standalone

from cnr_store.errors import CorruptObject
from cnr_store.format.documents import canonical_json
from cnr_store.format.fields import ArrayDtype
from cnr_store.format.limits import CHUNK_BYTES, MAX_CHUNK_ROWS
from cnr_store.format.packed import content_size
from cnr_store.format.records import ArrayEntry, CodecName
from cnr_store.types import JsonValue, Profile

_CODES_CONFIG: dict[str, JsonValue] = {"level": 8, "mode_spec": "classic", "delta_spec": "none"}
_ROWS_CONFIG: dict[str, JsonValue] = {
    "level": 8,
    "mode_spec": "classic",
    "delta_spec": "try_consecutive",
    "delta_encoding_order": 1,
}
ORDERED_PAGE, ORDERED_PAGES = 1 << 16, 4
"""Codes whose rows lie in the order of a slot: pages of at most so many codes, and at least so many pages. Each has a
histogram of its own; smaller ones follow the order more closely, and have more of them to store."""

_PCODEC_DTYPES = frozenset({"int16", "int32", "int64", "uint16", "uint32", "uint64"})
_CRC_BYTES = 4


def chunk_rows_for(num_rows: int, row_bytes: int) -> int:
    """Return rows per chunk: near `CHUNK_BYTES` of codes, equalized so that no chunk is mostly padding."""
    target = max(1, min(MAX_CHUNK_ROWS, CHUNK_BYTES // max(1, row_bytes)))
    count = max(1, -(-num_rows // target))
    return max(1, -(-num_rows // count))


def codec_for(dtype: np.dtype[Any], profile: Profile) -> CodecName:
    """Return the codec of an array: pcodec for integers of 16 bits and more in ``compact``; floats stay bytes.

    int8 is zstd in both profiles.
    """
    if dtype.kind == "f" or (dtype == np.uint8 and profile == "compact"):
        return "bytes"
    if profile == "compact" and dtype.name in _PCODEC_DTYPES:
        return "pcodec"
    return "zstd"


def describe(
    path: str, array_shape: tuple[int, ...], dtype: np.dtype[Any], chunk_rows: int, profile: Profile
) -> ArrayEntry:
    """Return the manifest's line for an array of ``array_shape`` at ``path`` (relative to the segment)."""
    return ArrayEntry(
        path=path,
        dtype=cast(ArrayDtype, dtype.name),
        shape=array_shape,
        chunk_rows=chunk_rows,
        codec=codec_for(dtype, profile),
    )


def chunk_count(entry: ArrayEntry) -> int:
    """Return how many chunks the array has."""
    return -(-entry.shape[0] // entry.chunk_rows)


def chunk_shape(entry: ArrayEntry) -> tuple[int, ...]:
    """Return the shape every chunk is stored at; the last one is padded to it."""
    return (entry.chunk_rows, *entry.shape[1:])


def chunk_path(entry: ArrayEntry, index: int) -> str:
    """Return the path of chunk ``index`` relative to the segment (Zarr's default chunk key encoding)."""
    return f"{entry.path}/c/{index}" + ("/0" if len(entry.shape) == 2 else "")


def array_document(entry: ArrayEntry, attributes: dict[str, JsonValue] | None = None) -> bytes:
    """Return the array's ``zarr.json``."""
    dtype = np.dtype(entry.dtype)
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(entry.shape),
        "data_type": entry.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape(entry))}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill_document(dtype),
        "codecs": _codec_documents(entry),
        "attributes": attributes or {},
        "dimension_names": ["row", "column"][: len(entry.shape)],
        "storage_transformers": [],
    }
    return canonical_json(document)


def group_document(attributes: dict[str, JsonValue]) -> bytes:
    """Return a group's ``zarr.json``."""
    return canonical_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def encode_chunk(entry: ArrayEntry, block: npt.NDArray[Any]) -> bytes:
    """Return the stored bytes of one chunk; the crc32c of everything before it stands last.

    Parameters
    ----------
    block
        (rows, width) or (rows,) of the array's dtype, C-contiguous, at most ``chunk_rows`` rows; a short last block
        is padded with the fill value. Releases the GIL while it compresses; does not keep ``block``.
    """
    if block.shape[0] < entry.chunk_rows:
        padded = np.full(chunk_shape(entry), _fill_value(block.dtype), block.dtype)
        padded[: block.shape[0]] = block
        block = padded
    block = np.ascontiguousarray(block)
    if entry.codec == "pcodec":
        payload: Any = _pcodec(entry).encode(block.reshape(-1))
    elif entry.codec == "zstd":
        payload = Zstd(level=_zstd_level(entry)).encode(block.reshape(-1).view(np.uint8))
    else:
        payload = block.reshape(-1).view(np.uint8).data
    return b"".join((payload, google_crc32c.value(bytes(payload)).to_bytes(_CRC_BYTES, "little")))


def decode_chunk(entry: ArrayEntry, data: bytes, out: npt.NDArray[Any], where: str) -> None:
    """Decode one chunk into ``out`` of exactly `chunk_shape` and the array's dtype, C-contiguous.

    The caller has checked the inventory digest of ``data``, which covers the crc32c. Releases the GIL while it
    decompresses; of compressed data nothing is copied.

    Raises
    ------
    CorruptObject
        If the stream holds another number of elements, or is no such stream; names ``where``.
    """
    flat = out.reshape(-1)
    if len(data) < _CRC_BYTES:
        raise CorruptObject(f"{where} has {len(data)} bytes, no room for its checksum", path=where)
    payload = memoryview(data)[:-_CRC_BYTES]
    if entry.codec == "pcodec":
        try:
            # The whole of it: pcodec takes no memoryview, and stops at the end of its stream, before the checksum.
            progress = standalone.simple_decompress_into(data, flat)
        except (RuntimeError, TypeError) as error:
            raise CorruptObject(f"{where} is no pcodec stream of {entry.dtype}: {error}", path=where) from error
        found = progress.n_processed if progress.finished else f"more than {flat.size}"
    elif entry.codec == "zstd":
        size = content_size(payload)
        found = size // flat.itemsize if size is not None else "an unknown number of"
        if size == flat.nbytes:
            try:
                Zstd().decode(payload, out=flat.view(np.uint8))
            except (RuntimeError, ValueError) as error:
                raise CorruptObject(f"{where} is no zstd frame: {error}", path=where) from error
    else:
        found = len(payload) // flat.itemsize if len(payload) % flat.itemsize == 0 else "a broken number of"
        if len(payload) == flat.nbytes:
            flat.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)
    if found != flat.size:
        raise CorruptObject(
            f"{where} holds {found} elements, its array's chunks have {flat.size}; run `cnr verify`",
            path=where,
            expected=flat.size,
            found=found,
        )


def _zstd_level(entry: ArrayEntry) -> int:
    """Codes of 8 bits repeat by chance alone: what level 3 finds makes them larger, and slower to decode."""
    return 1 if entry.dtype == "int8" else 3


def _pcodec(entry: ArrayEntry) -> PCodec:
    return PCodec(**_pcodec_config(entry))


def _pcodec_config(entry: ArrayEntry) -> dict[str, Any]:
    if entry.dtype == "int64":
        return _ROWS_CONFIG
    if entry.order is msgspec.UNSET:
        return _CODES_CONFIG
    page = min(ORDERED_PAGE, -(-math.prod(chunk_shape(entry)) // ORDERED_PAGES))
    return {**_CODES_CONFIG, "equal_pages_up_to": max(page, 1)}


def _codec_documents(entry: ArrayEntry) -> list[JsonValue]:
    bytes_codec: dict[str, JsonValue] = {"name": "bytes"}
    if np.dtype(entry.dtype).itemsize > 1:
        bytes_codec["configuration"] = {"endian": "little"}
    crc: dict[str, JsonValue] = {"name": "crc32c"}
    if entry.codec == "pcodec":
        return [{"name": "numcodecs.pcodec", "configuration": _pcodec_config(entry)}, crc]
    if entry.codec == "zstd":
        return [bytes_codec, {"name": "zstd", "configuration": {"level": _zstd_level(entry), "checksum": False}}, crc]
    return [bytes_codec, crc]


def _fill_value(dtype: np.dtype[Any]) -> Any:
    """Loud fills: a missing row id shows as -1, a missing float as NaN; integer codes have no such value."""
    if dtype.kind == "f":
        return np.nan
    return -1 if dtype == np.int64 else 0


def _fill_document(dtype: np.dtype[Any]) -> JsonValue:
    return "NaN" if dtype.kind == "f" else int(_fill_value(dtype))
