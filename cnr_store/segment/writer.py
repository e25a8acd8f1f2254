"""Write one segment: parts, dense tensors, documents, inventory, manifest (spec, section 4).

A writer puts every object once, under a path that begins with its name and attempt. If another process puts the
manifest, the writer puts a receipt last. Nothing here makes a segment visible: only a commit record does.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadInput, CorruptStore, StorageFailure
from cnr_store.format import arrays, layout
from cnr_store.format.documents import compressed, nesting_of, pack, sha256, text_of
from cnr_store.format.layout import array_path
from cnr_store.format.limits import MAX_MANIFEST_BYTES, MAX_OWN_DOCUMENT_BYTES, MAX_USER_NESTING
from cnr_store.format.manifest import as_read
from cnr_store.format.manifest_state import changes_of
from cnr_store.format.records import (
    ArrayEntry,
    ArrayGroup,
    DocumentEntry,
    ListLine,
    Manifest,
    ObjectDigest,
    ObjectEntry,
    PartLine,
    Receipt,
    SegmentDocument,
    Shards,
    StoredArray,
    TableSchema,
    TensorLine,
)
from cnr_store.runtime.threads import Throttle, Workers, blocks
from cnr_store.segment.codes import Array
from cnr_store.segment.groups import GroupShape, RowList, SharedGroup
from cnr_store.segment.packs import Pack, check_dense_dtypes, tensor_digests
from cnr_store.storage import Content, Storage, object_digest
from cnr_store.types import JsonValue

logger = logging.getLogger(__name__)

Put = Callable[[], None]
"""Encodes and puts one object."""


class SegmentWriter:
    """One writer's side of a segment. Blocking; puts run on ``workers``.

    Row lists that fill a chunk are put at once. Smaller ones are buffered until `finish`, which puts them together.
    """

    def __init__(self, storage: Storage, name: str, *, writer: str, workers: Workers, throttle: Throttle) -> None:
        self.name = name
        self.writer = writer
        self._prefix = layout.segment_prefix(name)
        self._storage = storage
        self._workers = workers
        self._throttle = throttle
        self._lock = threading.Lock()
        self._objects: dict[str, ObjectEntry] = {}
        self._shards: dict[str, OpenShards] = {}
        self._waiting: list[Put] = []
        self._numbers: Counter[str] = Counter()
        self._shared: dict[GroupShape, SharedGroup] = {}
        self._groups: dict[str, dict[str, ArrayEntry]] = {}
        self._attempts: set[str] = set()
        self._dense: dict[str, TensorLine] = {}
        self._dense_arrays: dict[str, ArrayEntry] = {}
        self._documents: dict[str, str] = {}
        self._small: dict[str, msgspec.Raw] = {}
        self._kept: list[str] = []

    def write_row_list(self, operation: str, row_list: RowList) -> ListLine:
        """Write one row list, which is not empty: into arrays of its own, or into those that small ones share.

        Memory: the blocks of two chunks per thread; of small lists of each shape one chunk until `finish`; and what is
        encoded for two shards of each array (`SHARD_BYTES` before compression), and one more per thread that puts one.
        """
        if row_list.is_large:
            return self._write_large(GroupShape.of(operation, row_list), row_list)
        [written] = self.write_small_lists(operation, row_list, [row_list.count])
        return written

    def write_small_lists(self, operation: str, joined: RowList, counts: Sequence[int]) -> list[ListLine]:
        """Write row lists of many tables, end to end in ``joined``, into arrays that small ones share.

        ``counts``: the rows of each, none 0, and none so many that the list `is_large`. Memory: as `write_row_list`.
        """
        shape = GroupShape.of(operation, joined)
        if shape not in self._shared:
            self._shared[shape] = SharedGroup(self._next_group(operation), shape, joined.row_bytes)
        group = self._shared[shape]
        written = group.append(joined, counts)
        if group.is_full:
            self._workers.run(self._full_chunks_of(group))
        return written

    def _next_group(self, operation: str) -> str:
        number = self._numbers[operation]
        self._numbers[operation] += 1
        return f"{self.writer}.{operation}-{number}"

    def _write_large(self, shape: GroupShape, row_list: RowList) -> ListLine:
        """Write a list chunk by chunk into arrays of its own.

        If that fails, they remain, and the list may be written again, to other paths: another process that does the
        same work may have committed the first ones, which must not be overwritten with other bytes.
        """
        written = ListLine(group=self._next_group(shape.operation), count=row_list.count, first=(), last=())
        self._attempts.add(written.group)
        chunk_rows = row_list.chunk_rows
        planned = shape.arrays_at(written.group, row_list.count, chunk_rows)
        entries = {name: arrays.in_shards(entry) for name, entry in planned.items()}

        def put_chunk(start: int, stop: int) -> tuple[int, int]:
            produced = shape.with_classes(row_list.produce(start, stop), entries)
            for name, entry in entries.items():
                data = arrays.encode_chunk(entry, shape.stored(name, produced, entries))
                self._put_chunk(entry, start // chunk_rows, data)
            return int(produced["rows"][0]), int(produced["rows"][-1])

        try:
            spans = self._workers.run(partial(put_chunk, a, b) for a, b in blocks(row_list.count, chunk_rows))
        except BaseException:
            for entry in entries.values():
                self._shards.pop(entry.path, None)
            raise
        written.first, written.last = tuple(first for first, _ in spans), tuple(last for _, last in spans)
        self._close_group(written.group, entries)
        return written

    def _full_chunks_of(self, group: SharedGroup) -> Iterator[Put]:
        """The full chunks of a group that gets more rows, each array of one by itself."""
        if group.entries is None:
            planned = group.shape.arrays_at(group.path, group.rows, group.chunk_rows)
            group.entries = {
                name: arrays.with_shards_of(one, arrays.most_shard_chunks(one)) for name, one in planned.items()
            }
        while group.is_full:
            yield from self._next_chunk_of(group, group.entries, grows=True)

    def _rest_of(self, group: SharedGroup) -> Iterator[Put]:
        """All that is not put yet of a group that gets no more rows, and its documents."""
        planned = group.entries or group.shape.arrays_at(group.path, group.rows, group.chunk_rows)
        entries = {name: arrays.in_shards(grown(one, group.rows)) for name, one in planned.items()}
        for entry in entries.values():
            waiting = self._shards[entry.path].take_back() if entry.path in self._shards else {}
            yield from (partial(self._put_chunk, entry, index, data) for index, data in waiting.items())
        while group.waiting_rows:
            yield from self._next_chunk_of(group, entries, grows=False)
        self._close_group(group.path, entries)

    def _next_chunk_of(self, group: SharedGroup, entries: Mapping[str, ArrayEntry], *, grows: bool) -> Iterator[Put]:
        index, produced = group.take()
        blocks = group.shape.with_classes(produced, entries)
        for name, entry in entries.items():
            yield partial(self._encode, entry, index, partial(group.shape.stored, name, blocks, entries), grows=grows)

    def _close_group(self, path: str, entries: Mapping[str, ArrayEntry]) -> None:
        """Of a group whose chunks are put, or wait: name it, and put its documents with what waits."""
        self._groups[path] = dict(entries)
        self._attempts.discard(path)
        self._waiting += [self._document_of(entry) for entry in entries.values()]

    def _document_of(self, entry: ArrayEntry) -> Put:
        return partial(self._put, f"{entry.path}/zarr.json", arrays.array_document(entry))

    def _encode(self, entry: ArrayEntry, index: int, stored: Callable[[], Array], *, grows: bool) -> None:
        self._put_chunk(entry, index, arrays.encode_chunk(entry, stored()), grows=grows)

    def _put_chunk(self, entry: ArrayEntry, index: int, data: bytes, *, grows: bool = False) -> None:
        """Put a chunk, or the shard that it makes whole; ``grows`` is for `OpenShards.add`."""
        if entry.shards is msgspec.UNSET:
            self._put(arrays.chunk_path(entry, index), data)
            return
        with self._lock:
            shards = self._shards.setdefault(entry.path, OpenShards())
        whole = shards.add(entry, index, data, grows=grows)
        if whole is not None:
            self._put(*whole)

    def write_dense(
        self, tensors: Mapping[str, npt.NDArray[Any]], dtypes: Mapping[str, str],
        digests: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Write dense tensors, packed end to end into one 1-d array per stored dtype; put in `finish`, not copied.

        ``dtypes`` names the logical dtype where it differs (``bfloat16`` stored as uint16, ``bool`` as uint8);
        ``digests`` are those that the caller knows (`tensor_digests`).
        """
        check_dense_dtypes(tensors, dtypes)
        by_dtype: dict[np.dtype[Any], dict[str, npt.NDArray[Any]]] = {}
        for name, tensor in tensors.items():
            by_dtype.setdefault(tensor.dtype, {})[name] = np.asarray(tensor, order="C")
        unknown = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items() if name not in digests}
        digests = {**digests, **tensor_digests(unknown, self._workers)}
        for dtype_name, own in sorted((dtype.name, own) for dtype, own in by_dtype.items()):
            pack = Pack.of(array_path(f"{self.writer}.dense", dtype_name), own, dtypes, digests)
            self._dense |= pack.lines
            self._dense_arrays[dtype_name] = pack.entry
            self._waiting.append(self._document_of(pack.entry))
            self._waiting += [partial(self._put_pack, pack, k) for k in range(arrays.object_count(pack.entry))]

    def _put_pack(self, pack: Pack, number: int) -> None:
        """Put one object of a pack."""
        made = pack.encode(number)
        if pack.entry.shards is not msgspec.UNSET:
            with self._lock:
                shards = self._shards.setdefault(pack.entry.path, OpenShards())
            shards.record(arrays.chunks_in(pack.entry, number), made.inside)
        self._put_object(ObjectEntry(path=made.path, size=made.size_bytes, xxh3_128=made.digest), made.buffers)

    def write_document(self, name: str, document: JsonValue, before: DocumentEntry | None = None) -> None:
        """Have the receipt a document (reader state, RNG state), or `finish` put it as an object if it is not small.

        ``before``: the document of that name of the state before, which is kept if it has the same bytes.
        """
        if name in self._documents or name in self._small:
            raise CorruptStore(f"segment {self.name}: document {name!r} would be written twice", path=name)
        text = text_of(document)
        is_small = len(text) <= MAX_OWN_DOCUMENT_BYTES and nesting_of(text, MAX_USER_NESTING) <= MAX_USER_NESTING
        data = text if is_small else compressed(text)
        if before is not None and _is_same_document(before, data):
            self.keep_document(name)
        elif is_small:
            self._small[name] = msgspec.Raw(text)
        else:
            path = layout.document_path(self.writer, len(self._documents))
            self._waiting.append(partial(self._put, path, data))
            self._documents[name] = path

    def keep_document(self, name: str) -> None:
        """Record that a document is that of the state before, whose segment has its bytes. No I/O."""
        self._kept.append(name)

    def finish(
        self, *, txn: str, rank: int, world: int, attempt: str, base: int, l0: int, parts: Sequence[PartLine],
        syncs: bool = True,
    ) -> Receipt:  # fmt: skip
        """Put everything that is buffered, make all objects durable, and return the receipt. Blocks.

        ``parts`` in the order in which their lists were written; rank 0 puts the segment's group document, too. Without
        ``syncs`` the names of the objects are not durable yet: give `paths` to `write_manifest`.
        """
        for group in (one for one in self._shared.values() if one.rows):  # a list that failed may have been its first
            self._waiting += list(self._rest_of(group))
        if rank == 0:
            self._waiting.append(partial(self._put, layout.ROOT_GROUP, arrays.group_document({})))
        self._workers.run(self._waiting)
        self._waiting = []
        self._forget_attempts()
        if syncs:
            self._storage.sync_folders(f"{self._prefix}{path}" for path in self._objects)
        groups = {path: self._stored(path, entries) for path, entries in self._groups.items()}
        packs = [self._stored(f"{self.writer}.dense", {name: one}) for name, one in self._dense_arrays.items()]
        whole = (*self._groups.values(), self._dense_arrays)
        inside = {path for entries in whole for one in entries.values() for path in arrays.object_paths(one)}
        return Receipt(
            txn=txn, rank=rank, world=world, attempt=attempt, base=base, l0=l0,
            parts=tuple(parts), groups=tuple(groups[path] for path in sorted(groups)),
            dense=self._dense, dense_arrays=tuple(packs), documents=self._documents, small=self._small,
            kept_documents=tuple(sorted(self._kept)),
            objects=tuple(self._objects[path] for path in sorted(self._objects) if path not in inside),
        )  # fmt: skip

    @property
    def paths(self) -> list[str]:
        """The objects that were put, relative to the segment."""
        return [*self._objects]

    def _forget_attempts(self) -> None:
        """Delete what was put of lists that were written again. It stays where deleting is not allowed."""
        failed = tuple(f"{path}." for path in self._attempts)
        dropped = [path for path in self._objects if path.startswith(failed)] if failed else []
        for path in dropped:
            del self._objects[path]
        try:
            self._storage.delete([layout.segment_key(self.name, path) for path in dropped])
        except StorageFailure as error:
            logger.warning("segment %s: %d objects that it does not need stay: %s", self.name, len(dropped), error)

    def _stored(self, path: str, entries: Mapping[str, ArrayEntry]) -> ArrayGroup:
        """What the manifest records of arrays with as many rows, and of their objects."""
        names = {one.path: name for name, one in entries.items()}
        found = {}
        for name, entry in entries.items():
            objects = [self._objects[path] for path in arrays.object_paths(entry)]
            found[name] = StoredArray(
                dtype=entry.dtype, width=None if len(entry.shape) == 1 else entry.shape[1], codec=entry.codec,
                order=entry.order if entry.order is msgspec.UNSET else names[entry.order],
                shards=entry.shards if entry.shards is msgspec.UNSET else self._shards[entry.path].inside(entry),
                objects=tuple(ObjectDigest(size=one.size, xxh3_128=one.xxh3_128) for one in objects),
            )  # fmt: skip
        first = next(iter(entries.values()))
        return ArrayGroup(path=path, rows=first.shape[0], chunk_rows=first.chunk_rows, arrays=found)

    def put_receipt(self, receipt: Receipt) -> str:
        """Put the receipt, this writer's last object; returns its sha256. The committer reads it."""
        data = pack(receipt)
        key = layout.segment_key(self.name, f"{self.writer}.{layout.RECEIPT}")
        self._storage.put_document(key, data, MAX_MANIFEST_BYTES)
        return sha256(data)

    def _put(self, path: str, data: bytes) -> None:
        self._put_object(ObjectEntry(path=path, size=len(data), xxh3_128=object_digest(data)), data)

    def _put_object(self, entry: ObjectEntry, data: Content) -> None:
        path = entry.path
        self._throttle.take(entry.size)
        with self._lock:
            if path in self._objects:
                raise CorruptStore(f"segment {self.name}: {path} would be written twice; two names collide", path=path)
            self._objects[path] = entry
        self._storage.put(f"{self._prefix}{path}", data)


def _is_same_document(before: DocumentEntry, data: bytes) -> bool:
    """Whether a document is stored as these bytes."""
    old = before.object
    return before.text == data if old is None else (old.size, old.xxh3_128) == (len(data), object_digest(data))


def write_manifest(
    storage: Storage,
    name: str,
    document: SegmentDocument,
    beside: Iterable[str] = (),
    known: Mapping[str, TableSchema] = MappingProxyType({}),
) -> tuple[str, int, Manifest]:
    """Put the manifest durably; returns its sha256, its size, and what a reader makes of it.

    The segment is complete then, and still invisible. ``beside``: paths of its objects whose names become durable with
    that of the manifest, each folder by one sync. ``known``: schemas that were read from manifests.

    Raises
    ------
    BadInput
        No reader would take it: what was given cannot be stored.
    """
    text = text_of(document)
    key = layout.segment_key(name, layout.MANIFEST)
    try:
        manifest = as_read(document, known, key)
    except CorruptStore as error:
        raise BadInput(f"this cannot be saved, because no reader would take it: {error}", path=key) from error
    data = compressed(text)
    storage.put_document(key, data, MAX_MANIFEST_BYTES)
    prefix = layout.segment_prefix(name)
    storage.sync_folders([key, *(f"{prefix}{path}" for path in beside)])
    return sha256(data), len(data), manifest


def merge_receipts(
    receipts: Sequence[Receipt], base: Manifest | None, tables: Mapping[str, TableSchema], tensors: Iterable[str]
) -> dict[str, Any]:
    """Return the fields of the manifest over what writers put: `Written` and `ManifestChanges`. Pure.

    The receipts themselves stay out of the inventory: the manifest supersedes them.

    Parameters
    ----------
    base
        The manifest of the segment before it, with its state; None of a baseline.
    tables, tensors
        Every table, and the names of all dense tensors, of the new state.

    Raises
    ------
    BadInput
        Two writers have a document or a dense tensor of the same name.
    """
    ordered = sorted(receipts, key=lambda receipt: receipt.rank)
    for kind, fields in (("documents", ("documents", "small", "kept_documents")), ("dense", ("dense",))):
        owners: dict[str, int] = {}
        for receipt in ordered:
            for name in (name for field in fields for name in getattr(receipt, field)):
                if owners.setdefault(name, receipt.rank) != receipt.rank:
                    raise BadInput(
                        f"ranks {owners[name]} and {receipt.rank} both saved {name!r} ({kind}); give it to one rank, "
                        "or put the rank into its name",
                        found=name,
                    )
    return {
        **changes_of(base, tables, [part for receipt in ordered for part in receipt.parts], tensors)._asdict(),
        "groups": tuple(group for receipt in ordered for group in receipt.groups),
        "dense": {name: entry for receipt in ordered for name, entry in receipt.dense.items()},
        "dense_arrays": tuple(entry for receipt in ordered for entry in receipt.dense_arrays),
        "documents": {name: path for receipt in ordered for name, path in receipt.documents.items()},
        "small": {name: text for receipt in ordered for name, text in receipt.small.items()},
        "kept_documents": tuple(sorted(name for receipt in ordered for name in receipt.kept_documents)),
        "objects": tuple(entry for receipt in ordered for entry in receipt.objects),
    }


def grown(entry: ArrayEntry, rows: int) -> ArrayEntry:
    """Return a whole array with that many rows. Pure."""
    return msgspec.structs.replace(entry, shape=(rows, *entry.shape[1:]), count=rows)


class OpenShards:
    """The incomplete shards of one array. Thread-safe. Memory: the chunks of incomplete shards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, bytes] = {}
        self._arrived: Counter[int] = Counter()
        self._inside: dict[int, tuple[int, str]] = {}

    def add(self, entry: ArrayEntry, index: int, data: bytes, *, grows: bool) -> tuple[str, bytes] | None:
        """Add a chunk. Returns path and bytes of its shard if this chunk completes it, else None.

        ``grows``: the array will have more rows than ``entry``, so a shard is complete only when it is full.
        """
        room = arrays.shard_chunks(entry)
        number = index // room
        chunks = range(number * room, (number + 1) * room) if grows else arrays.chunks_in(entry, number)
        line = len(data), object_digest(data)
        with self._lock:
            self._waiting[index], self._inside[index] = data, line
            self._arrived[number] += 1
            if self._arrived[number] < len(chunks):
                return None
            whole = [self._waiting.pop(k) for k in chunks]
        index_data = arrays.shard_index([len(chunk) for chunk in whole], room)
        return arrays.object_path(entry, number), b"".join((*whole, index_data))

    def record(self, chunks: range, lines: Sequence[tuple[int, str]]) -> None:
        """Record size and digest of chunks of a shard that is complete."""
        with self._lock:
            self._inside.update(zip(chunks, lines, strict=True))

    def take_back(self) -> dict[int, bytes]:
        """Return the chunks that wait, by their number in the array; they may be added again, to other shards."""
        with self._lock:
            found, self._waiting = self._waiting, {}
            self._arrived.clear()
        return found

    def inside(self, entry: ArrayEntry) -> Shards:
        """Return the manifest's entry of the shards. All chunks must have been added."""
        lines = [self._inside[k] for k in range(arrays.chunk_count(entry))]
        sizes, digests = tuple(size for size, _ in lines), "".join(digest for _, digest in lines)
        return Shards(chunks=arrays.shard_chunks(entry), sizes=sizes, digests=digests)
