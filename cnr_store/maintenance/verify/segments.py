"""Read every object of one segment: digest, size, decode, row ids, dense tensors, documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import xxhash

from cnr_store.errors import AccessDenied, CnrStoreError, CorruptObject
from cnr_store.format import arrays, document_tree, layout
from cnr_store.format.documents import JSON, decode_document, loads, unpack
from cnr_store.format.limits import MAX_MANIFEST_BYTES, MAX_TREE_NESTING
from cnr_store.format.manifest import expand
from cnr_store.format.records import (
    ArrayEntry,
    ChainEntry,
    ChunkPlace,
    DenseEntry,
    Manifest,
    ObjectEntry,
    PartEntry,
    Receipt,
    RowListEntry,
    Shards,
)
from cnr_store.maintenance.verify.report import Findings
from cnr_store.runtime.threads import Workers
from cnr_store.segment.decoded import Scratch
from cnr_store.segment.reader import SegmentReader
from cnr_store.storage import Storage, check_digest
from cnr_store.types import JsonValue, RowIds

Advance = Callable[[int], None]
"""Called with the bytes of each object after it was read."""


@dataclass(frozen=True, slots=True)
class _Role:
    """What an object is by the manifest: an array's document, its chunks ``chunks``, or a JSON document.

    ``lists``: by chunk, the row lists whose row ids it contains, each with the index of its own chunk.
    """

    array: ArrayEntry | None = None
    chunks: range | None = None
    lists: Mapping[int, Sequence[tuple[RowListEntry, int]]] = field(default_factory=dict)


def open_segment(
    storage: Storage, entry: ChainEntry, versions: tuple[int, ...], findings: Findings
) -> SegmentReader | None:
    """Read and check a manifest; report a problem and return None if it cannot be used."""
    key = layout.segment_key(entry.seg, layout.MANIFEST)
    try:
        return SegmentReader.open(storage, entry)
    except AccessDenied:
        raise
    except CnrStoreError as error:
        findings.add_error(error, key, versions)
        return None


def check_objects(
    storage: Storage,
    reader: SegmentReader,
    versions: tuple[int, ...],
    workers: Workers,
    findings: Findings,
    advance: Advance,
) -> None:
    """Read each object of the inventory once (row ids of parts with several lists twice). Blocks.

    Memory: one object (a shard, whole) and one decoded chunk per thread.
    """
    manifest = reader.own
    roles = _roles(manifest)
    dense = {array.path for array in manifest.dense_arrays}

    def check(entry: ObjectEntry) -> None:
        with _caught(findings, layout.segment_key(reader.name, entry.path), versions):
            _check_object(reader, entry, roles.get(entry.path, _Role()))
        advance(entry.size)

    def check_lists(part: PartEntry) -> None:
        for path, message in _repeated_rows(reader, part):
            key = layout.segment_key(reader.name, path)
            findings.add_error(CorruptObject(message, table=part.table), key, versions)

    loose = (entry for entry in manifest.objects if entry.path.rpartition("/c.")[0] not in dense)
    workers.run(partial(check, entry) for entry in loose)
    workers.run(partial(_check_dense, reader, array, versions, findings, advance) for array in manifest.dense_arrays)
    workers.run(partial(check_lists, part) for part in manifest.parts)
    for name in (name for name, one in manifest.documents.items() if one.object is None):
        with _caught(findings, layout.segment_key(reader.name, layout.MANIFEST), versions):
            document_tree.decode(reader.read_document(name))
    for writer in sorted({entry.path.partition(".")[0] for entry in manifest.objects}):
        key = layout.segment_key(reader.name, f"{writer}.{layout.RECEIPT}")
        with _caught(findings, key, ()):
            _check_receipt(storage, key, manifest)


def _roles(manifest: Manifest) -> dict[str, _Role]:
    rows: dict[str, dict[int, list[tuple[RowListEntry, int]]]] = {}
    for row_list in (one for part in manifest.parts for one in _lists(part)):
        entry = row_list.array("rows")
        for index in range(arrays.chunk_count(entry)):
            rows.setdefault(entry.path, {}).setdefault(entry.stored_chunk(index), []).append((row_list, index))
    roles: dict[str, _Role] = {}
    for array in (*manifest.arrays, *manifest.dense_arrays):
        roles[f"{array.path}/zarr.json"] = _Role(array)
        for number in range(arrays.object_count(array)):
            roles[arrays.object_path(array, number)] = _Role(
                array, arrays.chunks_in(array, number), rows.get(array.path, {})
            )
    return roles


def _lists(part: PartEntry) -> list[RowListEntry]:
    return [item for item in (part.add, part.set, part.delete, part.escape) if item is not None]


def _check_object(reader: SegmentReader, entry: ObjectEntry, role: _Role) -> None:
    """Read one object and check its content by its role; raise the library error that is its problem."""
    key = layout.segment_key(reader.name, entry.path)
    if role.array is not None and role.chunks is not None:
        # Read in stored order, without the object that defines the order: its damage is its own problem.
        array = msgspec.structs.replace(role.array, order=msgspec.UNSET)
        if array.shards is not msgspec.UNSET:
            reader = _shard_read(reader, array, array.shards, role.chunks)
        for number in role.chunks:
            chunk = reader.read_chunk(array, number, Scratch())
            for row_list, index in role.lists.get(number, ()):
                own = row_list.array("rows")
                low, high = (own.start + row - number * array.chunk_rows for row in own.span(index))
                _check_rows(key, chunk[low:high], row_list, index)
        return
    data = reader.read_object(entry.path)
    is_document = any(one.object is not None and one.object.path == entry.path for one in reader.own.documents.values())
    if not is_document and not entry.path.endswith(".json"):
        return
    text = unpack(data, key) if is_document else bytes(data)
    try:
        document: JsonValue = loads(text, JSON, deepest=MAX_TREE_NESTING)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptObject(f"{key} is no JSON document: {error}") from error
    if role.array is not None:
        wanted = msgspec.json.decode(arrays.array_document(role.array))
        found = document if isinstance(document, dict) else {}
        differs = sorted(name for name in wanted if found.get(name) != wanted[name])
        if differs:
            raise CorruptObject(f"{key} differs from the manifest in {differs}; other Zarr readers misread the array")
    elif is_document:
        document_tree.decode(document)


def _shard_read(reader: SegmentReader, array: ArrayEntry, shards: Shards, chunks: range) -> SegmentReader:
    """Read a shard whole and check its index; return the segment that has its chunks in memory."""
    path = arrays.chunk_path(array, chunks.start)
    key = layout.segment_key(reader.name, path)
    data = reader.read_object(path)
    wanted = arrays.shard_index(shards.sizes[chunks.start : chunks.stop], shards.chunks)
    if data[-len(wanted) :] != wanted:
        raise CorruptObject(f"{key} has another index than the manifest records; other Zarr readers see other chunks")

    def take(place: ChunkPlace) -> bytes | memoryview | None:
        if place.path != path:
            return None
        chunk = data[place.start : place.start + place.size]
        check_digest(chunk, place.xxh3_128, f"{key}, bytes {place.start} to {place.start + place.size},", key)
        return chunk

    return reader.with_chunk_source(take)


def _check_rows(key: str, rows: RowIds, row_list: RowListEntry, chunk: int) -> None:
    first, last = row_list.first[chunk], row_list.last[chunk]
    steps = rows[1:] <= rows[:-1]
    if steps.any():
        at = int(np.argmax(steps)) + 1
        what = "repeats" if rows[at] == rows[at - 1] else "is smaller than"
        raise CorruptObject(
            f"{key}: row id {rows[at]} at position {at} {what} its predecessor; row ids must be ascending and unique"
        )
    if rows[0] != first or rows[-1] != last:
        raise CorruptObject(f"{key}: rows {rows[0]} to {rows[-1]}, the manifest records {first} to {last}")


def _check_dense(
    reader: SegmentReader, array: ArrayEntry, versions: tuple[int, ...], findings: Findings, advance: Advance
) -> None:
    """Read the chunks of one pack of dense tensors in order, and hash each tensor on the way."""
    itemsize = np.dtype(array.dtype).itemsize
    waiting = [
        (name, entry.offset, entry.offset + _size(entry), entry.digest, xxhash.xxh3_128())
        for name, entry in reader.own.dense.items()
        if entry.path == array.path
    ]
    sizes = {entry.path: entry.size for entry in reader.manifest.objects}
    broken: list[tuple[int, int]] = []
    scratch = Scratch()
    for number in range(arrays.object_count(array)):
        path, chunks, held = arrays.object_path(array, number), arrays.chunks_in(array, number), reader
        key = layout.segment_key(reader.name, path)
        if array.shards is not msgspec.UNSET:
            with _caught(findings, key, versions):
                held = _shard_read(reader, array, array.shards, chunks)
        for index in chunks:
            start = index * array.chunk_rows
            stop = min(start + array.chunk_rows, array.shape[0])
            chunk: Any = None
            with _caught(findings, key, versions):
                chunk = held.read_chunk(array, index, scratch)
            if chunk is None:
                broken.append((start, stop))
                continue
            for _, low, high, _, state in waiting:
                piece = chunk[max(low - start, 0) : max(high - start, 0)]
                state.update(np.ascontiguousarray(piece).view(np.uint8).data if piece.size else b"")
        advance(sizes.get(path, 0))
    for name, low, high, digest, state in waiting:
        is_hit = any(start < high and low < stop for start, stop in broken)
        if not is_hit and (high > array.shape[0] or state.hexdigest() != digest):
            message = f"dense tensor {name!r} in {array.path} ({(high - low) * itemsize} bytes) differs from its digest"
            findings.add_error(CorruptObject(message), layout.segment_key(reader.name, array.path), versions)


def _size(entry: DenseEntry) -> int:
    return int(np.prod(entry.shape, dtype=np.int64))


def _repeated_rows(reader: SegmentReader, part: PartEntry) -> Iterator[tuple[str, str]]:
    """Yield (path, message) for rows in two lists of a part. Reads only chunks that overlap."""
    lists = [(name, item) for name in ("add", "set", "delete", "escape") if (item := getattr(part, name)) is not None]
    for position, (second, other) in enumerate(lists):
        for first, one in lists[:position]:
            for k, m in _overlaps(one, other):
                try:
                    left, right = reader.read_rows(one, k, Scratch()), reader.read_rows(other, m, Scratch())
                except CnrStoreError:
                    continue  # The check of objects reports an unreadable chunk.
                both = np.intersect1d(left, right)
                if len(both):
                    path = arrays.chunk_path(other.array("rows"), m)
                    yield path, f"row {both[0]} of table {part.table!r} is in both {first} and {second} of one part"
                    break


def _overlaps(one: RowListEntry, other: RowListEntry) -> Iterator[tuple[int, int]]:
    """Yield the pairs of chunks whose row ranges overlap. Both lists are sorted, so one merge finds them."""
    k = m = 0
    while k < len(one.first) and m < len(other.first):
        if one.first[k] <= other.last[m] and other.first[m] <= one.last[k]:
            yield k, m
        if one.last[k] < other.last[m]:
            k += 1
        else:
            m += 1


def _check_receipt(storage: Storage, key: str, manifest: Manifest) -> None:
    """Check a receipt against the manifest. It may be absent: readers use the manifest."""
    data = storage.read_document(key, MAX_MANIFEST_BYTES)
    if data is None:
        return
    receipt = decode_document(unpack(data, key), Receipt, key)
    try:
        parts, _, _, objects = expand(receipt)
    except ValueError as error:
        raise CorruptObject(f"{key} is inconsistent: {error}; no reader needs it") from error
    same = receipt.txn == manifest.txn and set(objects) <= set(manifest.objects)
    # Receipts record unchanged tables, too; the manifest does not.
    recorded = (part for part in parts if part.table in manifest.recorded or _lists(part))
    if not same or any(part not in manifest.parts for part in recorded):
        raise CorruptObject(f"{key} differs from the segment's manifest; no reader needs it")


@contextmanager
def _caught(findings: Findings, key: str, versions: tuple[int, ...]) -> Iterator[None]:
    """Report a library error of the block as one object's problem; re-raise `AccessDenied`."""
    try:
        yield
    except AccessDenied:
        raise
    except CnrStoreError as error:
        findings.add_error(error, key, versions)
