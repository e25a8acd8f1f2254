"""Read one segment: parts, dense tensors, documents (spec, section 4).

A reader trusts the manifest only: each object is checked against the inventory's size and digest before it is decoded,
so a missing, short, swapped or stale object is an error, never a fill value.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.errors import CorruptObject, CorruptRecord, CorruptStore, MissingObject, TableNotFound
from cnr_store.format import arrays, layout
from cnr_store.format.chain_checks import chain_problems, record_problems
from cnr_store.format.documents import JSON, decode_document, loads, sha256, unpack
from cnr_store.format.limits import MAX_MANIFEST_BYTES, MAX_TREE_NESTING
from cnr_store.format.manifest import decode_segment
from cnr_store.format.manifest_checks import digest_problems
from cnr_store.format.manifest_state import with_state
from cnr_store.format.records import (
    ArrayEntry,
    ChainEntry,
    ChunkPlace,
    CommitRecord,
    Manifest,
    ObjectEntry,
    Receipt,
    RowListEntry,
)
from cnr_store.runtime.threads import Workers
from cnr_store.segment.chunk_cache import ChunkCache
from cnr_store.segment.decoded import ChunkKeeper, Decode, Scratch
from cnr_store.segment.groups import out_of_order
from cnr_store.storage import Storage, fill_inside, read_inside, read_verified, scatter
from cnr_store.types import JsonValue, RowIds


def read_receipt(storage: Storage, name: str, writer: str, digest: str) -> Receipt:
    """Read the receipt that another writer of the segment put: one GET.

    Raises
    ------
    MissingObject, CorruptObject
        It is absent, or its sha256 differs from the one that the writer reported.
    CorruptStore
        It cannot be parsed.
    """
    key = layout.segment_key(name, f"{writer}.{layout.RECEIPT}")
    data = storage.read_document(key, MAX_MANIFEST_BYTES)
    if data is None:
        raise MissingObject(f"receipt {key} is missing, although its rank has written it", path=key)
    if sha256(data) != digest:
        raise CorruptObject(
            f"receipt {key} has another sha256 than its rank reported", path=key, expected=digest, found=sha256(data)
        )
    receipt = decode_document(unpack(data, key), Receipt, key)
    for problem in digest_problems(receipt.parts):
        raise CorruptStore(f"receipt {key}: {problem}", path=key)
    return receipt


IfMissing = Callable[[MissingObject], None]


def read_manifest(
    storage: Storage, entry: ChainEntry, *, if_missing: IfMissing | None = None
) -> tuple[bytes, Manifest]:
    """Read and check the manifest that a chain entry names: one GET.

    Raises
    ------
    MissingObject, CorruptObject, CorruptStore, NewerFormat
    """
    key = layout.segment_key(entry.seg, layout.MANIFEST)
    data = storage.read_document(key, MAX_MANIFEST_BYTES)
    if data is None:
        missing = MissingObject(
            f"{key} is missing in {storage.url}, but a commit record names it; run `cnr verify`", path=key
        )
        if if_missing is not None:
            if_missing(missing)
        raise missing
    return data, decode_segment(data, entry, key)


TakeChunk = Callable[[ChunkPlace], bytes | memoryview | None]
"""Where a chunk is to its verified bytes, if they were fetched before; else None."""

SHARED_BYTES = 256 * 1024 * 1024
"""Bound on decoded chunks that wait for the other tables which have rows in them, over the segments of a chain."""


class SegmentReader:
    """One segment, read through its manifest. Thread-safe.

    Keeps the manifest. Also keeps decoded chunks that several row lists share until all their rows were read, at most
    `SHARED_BYTES`: so tables that are read one after the other decode a shared chunk once.
    ``own`` is what the segment records, ``manifest`` the same with the state of the chain after it, where the
    segment was opened with its chain (`in_chain`).
    ``if_missing`` is called with the error before a missing object is raised, and may raise the cause.
    ``checked_after`` names the segments before it in a chain that was found free of contradictions up to it.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        manifest: Manifest,
        *,
        if_missing: IfMissing | None = None,
        shared: ChunkCache | None = None,
    ) -> None:
        self.checked_after: tuple[str, ...] | None = None
        self.name = name
        self.own = manifest
        self.manifest = manifest
        self._storage = storage
        self._if_missing = if_missing
        self._objects = {entry.path: entry for entry in manifest.objects}
        self._take: TakeChunk | None = None
        self._keeper: ChunkKeeper | None = None
        self.shared = ChunkCache(SHARED_BYTES) if shared is None else shared
        self._given: Counter[tuple[str, int]] = Counter()

    @classmethod
    def open(
        cls,
        storage: Storage,
        entry: ChainEntry,
        *,
        if_missing: IfMissing | None = None,
        shared: ChunkCache | None = None,
    ) -> SegmentReader:
        """Read and check the manifest that a chain entry names, by itself: one GET.

        Raises
        ------
        MissingObject, CorruptObject, CorruptStore
        """
        _, manifest = read_manifest(storage, entry, if_missing=if_missing)
        return cls(storage, entry.seg, manifest, if_missing=if_missing, shared=shared)

    @property
    def is_remote(self) -> bool:
        """Whether every read waits for a network: not where a keeper may have the chunk."""
        return self._storage.is_remote and self._keeper is None

    def with_if_missing(self, if_missing: IfMissing | None) -> SegmentReader:
        """Return the same segment with another ``if_missing``."""
        if self._if_missing == if_missing:
            return self
        other = copy.copy(self)
        other._if_missing = if_missing
        return other

    def with_chunk_source(self, take: TakeChunk) -> SegmentReader:
        """Return the same segment, which calls ``take`` for the verified bytes of a chunk before it reads them."""
        other = copy.copy(self)
        other._take = take
        return other

    def with_cache(self, keeper: ChunkKeeper) -> SegmentReader:
        """Return the same segment, whose decoded chunks ``keeper`` caches: callers must not write to them."""
        other = copy.copy(self)
        other._keeper = keeper
        return other

    def read_object(self, path: str) -> bytes | memoryview:
        """Return an object's bytes, checked against the inventory.

        Raises
        ------
        MissingObject, CorruptObject
        """
        entry = self._entry_of(path)
        key = layout.segment_key(self.name, path)
        with self._telling():
            return read_verified(self._storage, key, size_bytes=entry.size, digest=entry.xxh3_128)

    def _entry_of(self, path: str) -> ObjectEntry:
        entry = self._objects.get(path)
        if entry is None:
            raise CorruptStore(f"segment {self.name} has no object {path} in its inventory", path=path)
        return entry

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except MissingObject as missing:
            if self._if_missing is not None:
                self._if_missing(missing)
            raise

    def place_of(self, entry: ArrayEntry, index: int) -> ChunkPlace:
        """Return where the entry's chunk ``index`` is stored, by the inventory; no I/O."""
        if entry.shards is not msgspec.UNSET:
            return arrays.place_in_shard(entry, entry.shards, index)
        path = arrays.chunk_path(entry, index)
        return ChunkPlace(path, 0, self._entry_of(path).size, self._entry_of(path).xxh3_128)

    def read_places(self, places: Sequence[ChunkPlace]) -> list[bytes | memoryview]:
        """Return adjacent stored chunks of one object, each verified, with one request.

        Raises
        ------
        MissingObject, CorruptObject
        """
        first = places[0]
        if first.start == 0 and first.size == self._entry_of(first.path).size:
            return [self.read_object(first.path)]
        key = layout.segment_key(self.name, first.path)
        with self._telling():
            return read_inside(self._storage, key, first.start, [(one.size, one.xxh3_128) for one in places])

    def fill_places(self, places: Sequence[ChunkPlace], buffers: Sequence[Sequence[memoryview]]) -> None:
        """As `read_places`, into the buffers of each chunk, one after the other; after an error they hold anything."""
        first = places[0]
        if first.size == self._entry_of(first.path).size:
            scatter(self.read_object(first.path), [buffer for filled in buffers for buffer in filled])
            return
        pieces = [(filled, place.xxh3_128) for filled, place in zip(buffers, places, strict=True)]
        with self._telling():
            fill_inside(self._storage, layout.segment_key(self.name, first.path), first.start, pieces)

    def _read_stored(self, entry: ArrayEntry, index: int) -> bytes | memoryview:
        place = self.place_of(entry, index)
        taken = None if self._take is None else self._take(place)
        return self.read_places([place])[0] if taken is None else taken

    @cached_property
    def _vectors(self) -> dict[str, ArrayEntry]:
        """One-dimensional arrays of row lists by path: what codes may lie in the order of."""
        return {array.path: array for array in self.manifest.arrays if len(array.shape) == 1}

    def chunk_bytes(self, entry: ArrayEntry, index: int) -> int:
        """Return how many bytes the rows of chunk ``index`` are stored in, 0 where the inventory lacks it; no I/O.

        Of a chunk that has rows of other lists too, it is their share of it.
        """
        low, high = entry.span(index)
        return self.place_of(entry, index).size * (high - low) // arrays.real_rows(entry, index)

    def is_cached(self, entry: ArrayEntry, index: int) -> bool:
        """Return whether a read of chunk ``index`` will most likely find it decoded; no I/O."""
        return self.shared.holds(self.name, entry, entry.stored_chunk(index))

    def read_chunk(
        self, entry: ArrayEntry, index: int, scratch: Scratch, *, asked: int | None = None
    ) -> npt.NDArray[Any]:  # fmt: skip
        """Return the entry's rows in its chunk ``index``, by ascending row id, in ``scratch``'s memory if they can be.

        ``asked``: how many of them the caller needs, if not all: a chunk is kept until all its rows were asked for.

        Codes that are stored in the order of a slot take that slot's chunk too: one object more.
        """
        low, high = entry.span(index)
        skipped = max(0, entry.start - entry.stored_chunk(index) * entry.chunk_rows)
        real = arrays.real_rows(entry, index)
        decode: Decode = partial(self._decode, entry, index)
        asked = high - low if asked is None else asked
        if asked < real and not isinstance(self._keeper, ChunkCache):  # which keeps whole chunks itself
            decode = partial(self._decode_shared, entry, index, asked, decode)
        if self._keeper is None:
            chunk = decode(scratch)
        else:
            chunk = self._keeper.read(self.name, entry, entry.stored_chunk(index), scratch, decode)
        return chunk[skipped : skipped + high - low]

    def _decode_shared(
        self, entry: ArrayEntry, index: int, asked: int, decode: Decode, scratch: Scratch
    ) -> npt.NDArray[Any]:  # fmt: skip
        """A chunk with rows of other lists: kept until all its rows were asked for, as far as there is room."""
        stored = entry.stored_chunk(index)
        chunk = self.shared.read(self.name, entry, stored, scratch, decode)
        key = entry.path, stored
        self._given[key] += asked
        if self._given[key] >= len(chunk):
            del self._given[key]
            self.shared.drop(self.name, entry, stored)
        return chunk

    def _decode(self, entry: ArrayEntry, index: int, scratch: Scratch) -> npt.NDArray[Any]:
        """All rows of a stored chunk without its padding, by ascending row id."""
        if entry.order is not msgspec.UNSET:
            # Whole: the order is one of all rows of the chunk.
            keys = self._decode(self._vectors[entry.order], entry.stored_chunk(index), Scratch())
            stored = self._decode(msgspec.structs.replace(entry, order=msgspec.UNSET), index, scratch.spare)
            if keys.dtype != np.int16 or keys.shape != stored.shape[:1]:  # the kernel checks no bounds
                raise CorruptStore(
                    f"segment {self.name}: {entry.path} of shape {stored.shape} cannot lie in the order of "
                    f"{entry.order}, which is {keys.dtype} {keys.shape}; run `cnr verify`",
                    path=entry.path,
                )
            out = scratch.take(stored.shape, stored.dtype)
            out_of_order(stored, keys, out)
            return out
        where = layout.segment_key(self.name, arrays.chunk_path(entry, index))
        out = scratch.take(arrays.chunk_shape(entry), np.dtype(entry.dtype))
        memory = scratch.spare.take((arrays.chunk_bytes(entry),), np.dtype(np.uint8))
        arrays.decode_chunk(entry, self._read_stored(entry, index), out, where, memory)
        return out[: arrays.real_rows(entry, index)]

    def open_chunk(self, entry: ArrayEntry, index: int, scratch: Scratch) -> arrays.DigitChunk | None:
        """Return the entry's chunk ``index`` of integers, decompressed into ``scratch``'s memory, not unpacked yet.

        None where `read_chunk` has to decode it whole: a keeper may have it, it is stored in the order of a slot, other
        lists have rows in it, or its codec is another than ``digits``.
        """
        low, high = entry.span(index)
        is_own = self._keeper is None and high - low == arrays.real_rows(entry, index)
        if entry.codec != "digits" or entry.order is not msgspec.UNSET or not is_own:
            return None
        where = layout.segment_key(self.name, arrays.chunk_path(entry, index))
        memory = scratch.spare.take((arrays.chunk_bytes(entry),), np.dtype(np.uint8))
        return arrays.open_chunk(entry, self._read_stored(entry, index), where, memory)

    def read_rows(self, row_list: RowListEntry, index: int, scratch: Scratch) -> RowIds:
        """Return the row ids of chunk ``index``: sorted, unique, within the manifest's range for it.

        No object is read if the range shows that the rows are contiguous.
        """
        entry = row_list.array("rows")
        first, last = row_list.first[index], row_list.last[index]
        if last - first + 1 == row_list.rows_in(index):
            return np.arange(first, last + 1, dtype=np.int64)
        rows = self.read_chunk(entry, index, scratch)
        if rows[0] != first or rows[-1] != last or np.any(rows[1:] <= rows[:-1]):
            path = layout.segment_key(self.name, arrays.chunk_path(entry, index))
            raise CorruptObject(
                f"{path}: row ids are not sorted and unique from {first} to {last}; run `cnr verify`", path=path
            )
        return rows

    def read_document(self, name: str) -> JsonValue:
        """Return a JSON document that is stored in this segment by name.

        Raises
        ------
        TableNotFound
            If the segment has none of that name.
        """
        entry = self.own.documents.get(name)
        if entry is None:
            raise TableNotFound(f"segment {self.name} has no document {name!r}", path=name)
        if entry.object is None:
            return JSON.decode(entry.text)
        key = layout.segment_key(self.name, entry.object.path)
        try:
            return loads(unpack(self.read_object(entry.object.path), key), JSON, deepest=MAX_TREE_NESTING)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptStore(f"document {key} cannot be parsed: {error}; run `cnr verify`", path=key) from error


def open_chain(
    storage: Storage,
    chain: Sequence[ChainEntry],
    workers: Workers,
    *,
    known: Mapping[str, SegmentReader] = {},
    if_missing: IfMissing | None = None,
) -> tuple[SegmentReader, ...]:
    """Open the segments of a chain, and refuse manifests that contradict each other: a GET for each that is not known.

    ``known`` may be segments of other chains: their own manifests are the same.

    Raises
    ------
    MissingObject, CorruptObject, CorruptStore, NewerFormat, StorageFailure
    """
    missing = [entry for entry in chain if entry.seg not in known]
    shared = next((reader.shared for reader in known.values()), ChunkCache(SHARED_BYTES))
    fresh = workers.run(
        partial(SegmentReader.open, storage, entry, if_missing=if_missing, shared=shared) for entry in missing
    )
    by_name = {**known, **{reader.name: reader for reader in fresh}}
    names = tuple(entry.seg for entry in chain)
    sound = 0
    while sound < len(names) and by_name[names[sound]].checked_after == names[:sound]:
        sound += 1
    readers = in_chain([by_name[name] for name in names], sound)
    for found in chain_problems([reader.manifest for reader in readers], sound):
        key = layout.segment_key(names[found.index], layout.MANIFEST)
        raise CorruptStore(f"{key}: {found.message}; run `cnr verify`", path=key, table=found.table)
    for k in range(sound, len(names)):
        readers[k].checked_after = names[:k]
    return readers


def in_chain(readers: Sequence[SegmentReader], known: int = 0) -> tuple[SegmentReader, ...]:
    """Return the segments of a chain with their states. No I/O, nothing is checked.

    ``known``: how many of the first ones have the states of this chain already.
    """
    found = list(readers[:known])
    for reader in readers[known:]:
        placed = copy.copy(reader)
        placed.manifest = with_state(found[-1].manifest if found else None, reader.own)
        found.append(placed)
    return tuple(found)


def check_record(record: CommitRecord, last: SegmentReader) -> None:
    """Refuse a record that contradicts the manifest of its last segment. No I/O.

    Raises
    ------
    CorruptRecord
    """
    for problem in record_problems(record, last.manifest):
        raise CorruptRecord(f"commit record {record.v} {problem}; run `cnr verify`", version=record.v, path=last.name)
