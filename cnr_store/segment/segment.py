"""Write and read one segment: parts, dense tensors, documents, inventory (spec, section 4).

A writer puts every object once, under a folder that carries its attempt, last a receipt if another process is to put
the manifest over them; nothing here makes
a segment visible. A reader trusts the manifest only: each object is checked against the inventory's size and digest
before it is decoded, so a missing, short, swapped or stale object is an error, never a fill value.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.encodings.row_order import into_order, out_of_order
from cnr_store.errors import (
    BadDtype,
    BadInput,
    CorruptObject,
    CorruptRecord,
    CorruptStore,
    MissingObject,
    StorageFailure,
    TableNotFound,
)
from cnr_store.format import arrays, layout
from cnr_store.format.chain_checks import chain_problems, record_problems
from cnr_store.format.documents import JSON, canonical_json, decode_document, loads, sha256
from cnr_store.format.fields import ArrayDtype, TensorDtype
from cnr_store.format.limits import MAX_MANIFEST_BYTES, MAX_TREE_NESTING
from cnr_store.format.manifest import decode_manifest, decode_segment
from cnr_store.format.records import (
    ArrayEntry,
    ChainEntry,
    CommitRecord,
    DenseEntry,
    Manifest,
    ObjectEntry,
    PartEntry,
    Receipt,
    RowListEntry,
)
from cnr_store.runtime.threads import Throttle, Workers
from cnr_store.storage import Storage, object_digest, read_verified
from cnr_store.types import JsonValue, Profile, Rectangle, RowIds

logger = logging.getLogger(__name__)

Blocks = dict[str, npt.NDArray[Any]]
"""Array name (``rows``, ``codes``, ``slots/momentum1`` ...) to the block of one chunk."""

_DENSE_DTYPES = frozenset(
    {"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
)

_CARRIERS = {"bfloat16": "uint16", "bool": "uint8"}


@dataclass(frozen=True, slots=True)
class RowList:
    """What a row list will hold, produced chunk by chunk on a worker thread.

    Attributes
    ----------
    count
        Rows in the list.
    widths
        Array name to (dtype, width); width None is a 1-d array. ``rows`` is among them.
    produce
        Positions [start, stop) of the list to a block of each array: C-contiguous, owned by the caller until the
        chunk is encoded.
    order
        The array in whose order each chunk of ``codes`` is stored (`row_order`); None for that of the row ids.
    """

    count: int
    widths: Mapping[str, tuple[np.dtype[Any], int | None]]
    produce: Callable[[int, int], Blocks]
    order: str | None = None

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk: the weights, as codes or exact, give a chunk its size."""
        name = next(name for name in ("codes", "values", "rows") if name in self.widths)
        dtype, width = self.widths[name]
        return arrays.chunk_rows_for(self.count, dtype.itemsize * (width or 1))


class SegmentWriter:
    """One writer's side of a segment. Blocking; puts run on ``workers``."""

    def __init__(
        self, storage: Storage, name: str, *, profile: Profile, folder: str, workers: Workers, throttle: Throttle
    ) -> None:
        self.name = name
        self.profile = profile
        self.folder = folder
        self._storage = storage
        self._workers = workers
        self._throttle = throttle
        self._lock = threading.Lock()
        self._objects: dict[str, ObjectEntry] = {}
        self._dense: dict[str, DenseEntry] = {}
        self._dense_arrays: list[ArrayEntry] = []
        self._documents: dict[str, str] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes put so far."""
        return sum(entry.size for entry in self._objects.values())

    def part_folder(self, table: str, rectangle: Rectangle, num_rows: int, dim: int) -> str:
        """Return the folder of this writer's part of ``table``; ranges that are not whole stand in it."""
        ranges = {"r": (rectangle.rows, (0, num_rows)), "c": (rectangle.columns, (0, dim))}
        suffix = "".join(f"/{kind}{own[0]}-{own[1]}" for kind, (own, whole) in ranges.items() if own != whole)
        return f"{self.folder}/{layout.encode_name(table)}{suffix}"

    def write_group(self, path: str, attributes: dict[str, JsonValue]) -> None:
        """Put a Zarr group document whose attributes are one ``cnr`` object."""
        self._put(f"{path}/zarr.json", arrays.group_document({"cnr": attributes}))

    def write_row_list(self, path: str, row_list: RowList, attributes: dict[str, JsonValue]) -> RowListEntry:
        """Write one row list as a Zarr group of arrays chunked alike, and return the manifest's entry for it.

        Memory: the blocks of two chunks per thread. The list must not be empty.
        """
        chunk_rows = row_list.chunk_rows
        entries = {
            name: arrays.describe(
                f"{path}/{_array_path(name)}",
                (row_list.count,) if width is None else (row_list.count, width),
                dtype,
                chunk_rows,
                self.profile,
            )
            for name, (dtype, width) in row_list.widths.items()
        }
        if row_list.order is not None:
            keys = entries[row_list.order]
            entries["codes"] = msgspec.structs.replace(entries["codes"], order=keys.path)
            attributes = {**attributes, "order": row_list.order}
        self.write_group(path, attributes)
        for entry in entries.values():
            self._put(f"{entry.path}/zarr.json", arrays.array_document(entry))

        def write_chunk(index: int) -> tuple[int, int]:
            start, stop = index * chunk_rows, min((index + 1) * chunk_rows, row_list.count)
            produced = row_list.produce(start, stop)
            if row_list.order is not None:
                produced = {**produced, "codes": into_order(produced["codes"], produced[row_list.order])}
            for name, entry in entries.items():
                self._put(arrays.chunk_path(entry, index), arrays.encode_chunk(entry, produced[name]))
            return int(produced["rows"][0]), int(produced["rows"][-1])

        count = arrays.chunk_count(entries["rows"])
        spans = self._workers.run(lambda k=k: write_chunk(k) for k in range(count))  # type: ignore[misc]
        return RowListEntry(
            count=row_list.count,
            first=tuple(first for first, _ in spans),
            last=tuple(last for _, last in spans),
            arrays=entries,
        )

    def discard(self, path: str) -> None:
        """Take the objects below ``path`` off the inventory and delete them: no manifest will name them.

        They stay where deleting is not allowed, and go with the segment.
        """
        with self._lock:
            dropped = [key for key in self._objects if key.startswith(f"{path}/")]
            for key in dropped:
                del self._objects[key]
        try:
            self._storage.delete([layout.segment_key(self.name, key) for key in dropped])
        except StorageFailure as error:
            logger.warning("segment %s: %d objects that it does not need stay: %s", self.name, len(dropped), error)

    def write_dense(self, tensors: Mapping[str, npt.NDArray[Any]], dtypes: Mapping[str, str]) -> None:
        """Write dense tensors, packed end to end into one 1-d array per stored dtype.

        ``dtypes`` names the logical dtype where it differs (``bfloat16`` stored as uint16, ``bool`` as uint8).
        """
        by_dtype: dict[str, list[str]] = {}
        for name, tensor in tensors.items():
            check_dense_dtype(name, tensor.dtype, dtypes.get(name))
            by_dtype.setdefault(tensor.dtype.name, []).append(name)
        for dtype_name, names in sorted(by_dtype.items()):
            self._write_pack(dtype_name, [(name, np.asarray(tensors[name], order="C")) for name in names], dtypes)

    def reference_dense(self, name: str, entry: DenseEntry) -> None:
        """List a dense tensor whose bytes another segment of the chain holds."""
        self._dense[name] = entry

    def write_document(self, name: str, document: JsonValue) -> None:
        """Put a JSON document (reader state, RNG state) under ``<writer>/<name>.json``."""
        # The ending goes through the encoding: a document named _receipt must not become the receipt.
        path = "/".join([self.folder, *(layout.encode_name(part) for part in f"{name}.json".split("/"))])
        self._put(path, canonical_json(document))
        self._documents[name] = path

    def finish(
        self, *, txn: str, rank: int, world: int, attempt: str, base: int, l0: int, parts: tuple[PartEntry, ...]
    ) -> Receipt:
        """Make everything durable, and return what was written."""
        self._storage.sync_folders(layout.segment_key(self.name, path) for path in self._objects)
        return Receipt(
            txn=txn, rank=rank, world=world, attempt=attempt, base=base, l0=l0, parts=parts,
            dense=self._dense, dense_arrays=tuple(self._dense_arrays), documents=self._documents,
            objects=tuple(self._objects[path] for path in sorted(self._objects)),
        )  # fmt: skip

    def put_receipt(self, receipt: Receipt) -> str:
        """Put the receipt, the last object of this writer, for whoever puts the manifest; returns its sha256."""
        data = canonical_json(receipt)
        key = layout.segment_key(self.name, f"{self.folder}/{layout.RECEIPT}")
        self._storage.put_document(key, data, MAX_MANIFEST_BYTES)
        return sha256(data)

    def _write_pack(
        self, dtype_name: str, tensors: list[tuple[str, npt.NDArray[Any]]], dtypes: Mapping[str, str]
    ) -> None:
        dtype = np.dtype(dtype_name)
        path = f"{self.folder}/dense/{dtype_name}"
        offset = 0
        for name, tensor in tensors:
            logical = cast(TensorDtype, dtypes.get(name, dtype_name))
            self._dense[name] = DenseEntry(
                segment="", path=path, offset=offset, dtype=logical, shape=tensor.shape,
                digest=object_digest(tensor.reshape(-1).view(np.uint8).data),
            )  # fmt: skip
            offset += tensor.size
        pack = np.concatenate([tensor.reshape(-1) for _, tensor in tensors])
        rows = arrays.chunk_rows_for(offset, dtype.itemsize)
        # Floats are stored as bytes and model weights as integers are rare: never pcodec, so any Zarr reader opens it.
        entry = ArrayEntry(
            path=path, dtype=cast(ArrayDtype, dtype_name), shape=(offset,), chunk_rows=rows, codec="bytes"
        )
        self._put(f"{path}/zarr.json", arrays.array_document(entry))
        self._workers.run(
            lambda k=k: self._put(  # type: ignore[misc]
                arrays.chunk_path(entry, k), arrays.encode_chunk(entry, pack[k * rows : (k + 1) * rows])
            )
            for k in range(arrays.chunk_count(entry))
        )
        self._dense_arrays.append(entry)

    def _put(self, path: str, data: bytes) -> None:
        self._throttle.take(len(data))
        entry = ObjectEntry(path=path, size=len(data), xxh3_128=object_digest(data))
        with self._lock:
            if path in self._objects:
                raise CorruptStore(f"segment {self.name}: {path} would be written twice; two names collide", path=path)
            self._objects[path] = entry
        self._storage.put(layout.segment_key(self.name, path), data)


def check_dense_dtype(name: str, dtype: np.dtype[Any], logical: str | None) -> None:
    """Refuse a dense tensor that a store cannot hold, or whose logical dtype is stored as another one.

    Raises
    ------
    BadDtype
    """
    if dtype.name not in _DENSE_DTYPES:
        raise BadDtype(
            f"dense tensor {name!r} has dtype {dtype}, which a store cannot hold; use one of {sorted(_DENSE_DTYPES)}",
            expected=sorted(_DENSE_DTYPES), found=dtype.name,
        )  # fmt: skip
    stored = _CARRIERS.get(logical, logical) if logical is not None else dtype.name
    if stored != dtype.name:
        raise BadDtype(
            f"dense tensor {name!r} is named {logical} and held in {dtype}, expected {stored}",
            expected=stored, found=dtype.name,
        )  # fmt: skip


def write_manifest(storage: Storage, name: str, manifest: Manifest) -> tuple[str, int]:
    """Put ``_segment.json`` durably; returns its sha256 and size. The segment is complete and still invisible.

    Raises
    ------
    BadInput
        No reader would take it: what was given cannot be stored.
    """
    data = canonical_json(manifest)
    key = layout.segment_key(name, layout.MANIFEST)
    try:
        decode_manifest(data, key)
    except CorruptStore as error:
        raise BadInput(f"this cannot be saved, because no reader would take it: {error}", path=key) from error
    storage.put_document(key, data, MAX_MANIFEST_BYTES)
    storage.sync_folders([key])
    return sha256(data), len(data)


def read_receipt(storage: Storage, name: str, folder: str, digest: str) -> Receipt:
    """Read the receipt that another writer of the segment put: one GET.

    Raises
    ------
    MissingObject, CorruptObject
        It is not there, or is not what that writer says it put.
    CorruptStore
        It cannot be parsed.
    """
    key = layout.segment_key(name, f"{folder}/{layout.RECEIPT}")
    data = storage.read_document(key, MAX_MANIFEST_BYTES)
    if data is None:
        raise MissingObject(f"receipt {key} is missing, although its rank has written it", path=key)
    if sha256(data) != digest:
        raise CorruptObject(
            f"receipt {key} has another sha256 than its rank says", path=key, expected=digest, found=sha256(data)
        )
    return decode_document(data, Receipt, key)


def merge_receipts(receipts: list[Receipt]) -> dict[str, Any]:
    """Return the manifest fields that come from receipts: parts, dense, documents and the whole inventory. Pure.

    The receipts themselves stay out of the inventory: the manifest supersedes them.

    Raises
    ------
    BadInput
        Two writers have a document or a dense tensor of the same name.
    """
    ordered = sorted(receipts, key=lambda receipt: receipt.rank)
    for kind in ("documents", "dense"):
        owners: dict[str, int] = {}
        for receipt in ordered:
            for name in getattr(receipt, kind):
                if owners.setdefault(name, receipt.rank) != receipt.rank:
                    raise BadInput(
                        f"ranks {owners[name]} and {receipt.rank} both saved {name!r} ({kind}); give it to one rank, "
                        "or put the rank into its name",
                        found=name,
                    )
    return {
        "parts": tuple(part for receipt in ordered for part in receipt.parts),
        "dense": {name: entry for receipt in ordered for name, entry in receipt.dense.items()},
        "dense_arrays": tuple(entry for receipt in ordered for entry in receipt.dense_arrays),
        "documents": {name: path for receipt in ordered for name, path in receipt.documents.items()},
        "objects": tuple(entry for receipt in ordered for entry in receipt.objects),
    }


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


TakeObject = Callable[[str], bytes | None]
"""Path to the verified bytes of an object that was fetched before; None where it was not."""


class SegmentReader:
    """One segment, read through its manifest. Thread-safe; keeps no data but the manifest.

    ``if_missing`` is called with the error before a missing object is raised, and may raise what is behind it.
    ``sound_behind`` names the segments before it in a chain that was found free of contradictions up to it.
    """

    def __init__(self, storage: Storage, name: str, manifest: Manifest, *, if_missing: IfMissing | None = None) -> None:
        self.sound_behind: tuple[str, ...] | None = None
        self.name = name
        self.manifest = manifest
        self._storage = storage
        self._if_missing = if_missing
        self._objects = {entry.path: entry for entry in manifest.objects}
        self._take: TakeObject | None = None

    @classmethod
    def open(cls, storage: Storage, entry: ChainEntry, *, if_missing: IfMissing | None = None) -> SegmentReader:
        """Read and check the manifest that a chain entry names: one GET.

        Raises
        ------
        MissingObject, CorruptObject, CorruptStore
        """
        _, manifest = read_manifest(storage, entry, if_missing=if_missing)
        return cls(storage, entry.seg, manifest, if_missing=if_missing)

    @property
    def is_remote(self) -> bool:
        """Whether a read waits for a network."""
        return self._storage.is_remote

    def size_of(self, path: str) -> int:
        """Return the bytes of an object by the inventory; 0 if it has none of that path, which a read refuses."""
        entry = self._objects.get(path)
        return 0 if entry is None else entry.size

    def told_by(self, if_missing: IfMissing | None) -> SegmentReader:
        """Return the same segment, whose missing objects ``if_missing`` is told of."""
        other = copy.copy(self)
        other._if_missing = if_missing
        return other

    def fetched_by(self, take: TakeObject) -> SegmentReader:
        """Return the same segment, of which ``take`` is asked for the verified bytes of an object first."""
        other = copy.copy(self)
        other._take = take
        return other

    def read_object(self, path: str) -> bytes:
        """Return an object's bytes, checked against the inventory.

        Raises
        ------
        MissingObject, CorruptObject
        """
        if self._take is not None:
            taken = self._take(path)
            if taken is not None:
                return taken
        entry = self._objects.get(path)
        if entry is None:
            raise CorruptStore(f"segment {self.name} has no object {path} in its inventory", path=path)
        key = layout.segment_key(self.name, path)
        try:
            return read_verified(self._storage, key, size_bytes=entry.size, digest=entry.xxh3_128)
        except MissingObject as missing:
            if self._if_missing is not None:
                self._if_missing(missing)
            raise

    @cached_property
    def _vectors(self) -> dict[str, ArrayEntry]:
        """One-dimensional arrays of the ``add`` lists by path: what codes may lie in the order of."""
        lists = (part.add for part in self.manifest.parts if part.add is not None)
        return {vector.path: vector for one in lists for vector in one.arrays.values() if len(vector.shape) == 1}

    def chunk_bytes(self, entry: ArrayEntry, index: int) -> int:
        """Return how many bytes chunk ``index`` is stored in, 0 where the inventory lacks it; no I/O."""
        stored = self._objects.get(arrays.chunk_path(entry, index))
        return 0 if stored is None else stored.size

    def read_chunk(self, entry: ArrayEntry, index: int, scratch: Scratch) -> npt.NDArray[Any]:
        """Return chunk ``index`` (its real rows, without padding) in ``scratch``'s memory, by ascending row id.

        Codes that are stored in the order of a slot take that slot's chunk too: one object more.
        """
        if entry.order is not msgspec.UNSET:
            keys = self.read_chunk(self._vectors[entry.order], index, Scratch())
            stored = self.read_chunk(msgspec.structs.replace(entry, order=msgspec.UNSET), index, scratch.spare)
            if keys.dtype != np.int16 or keys.shape != stored.shape[:1]:  # the kernel checks no bounds
                raise CorruptStore(
                    f"segment {self.name}: {entry.path} of shape {stored.shape} cannot lie in the order of "
                    f"{entry.order}, which is {keys.dtype} {keys.shape}; run `cnr verify`",
                    path=entry.path,
                )
            out = scratch.take(stored.shape, stored.dtype)
            out_of_order(stored, keys, out)
            return out
        path = arrays.chunk_path(entry, index)
        out = scratch.take(arrays.chunk_shape(entry), np.dtype(entry.dtype))
        arrays.decode_chunk(entry, self.read_object(path), out, layout.segment_key(self.name, path))
        return out[: min(entry.chunk_rows, entry.shape[0] - index * entry.chunk_rows)]

    def read_rows(self, row_list: RowListEntry, index: int, scratch: Scratch) -> RowIds:
        """Return the row ids of chunk ``index``: sorted, unique, within the manifest's range for it.

        No object is read when the range says that the rows are contiguous.
        """
        entry = row_list.arrays["rows"]
        count = min(entry.chunk_rows, row_list.count - index * entry.chunk_rows)
        first, last = row_list.first[index], row_list.last[index]
        if last - first + 1 == count:
            return np.arange(first, last + 1, dtype=np.int64)
        rows = self.read_chunk(entry, index, scratch)
        if rows[0] != first or rows[-1] != last or np.any(rows[1:] <= rows[:-1]):
            path = layout.segment_key(self.name, arrays.chunk_path(entry, index))
            raise CorruptObject(
                f"{path}: row ids are not sorted and unique from {first} to {last}; run `cnr verify`", path=path
            )
        return rows

    def read_document(self, name: str) -> JsonValue:
        """Return a JSON document of this segment by name.

        Raises
        ------
        TableNotFound
            If the segment has none of that name.
        """
        path = self.manifest.documents.get(name)
        if path is None:
            raise TableNotFound(f"segment {self.name} has no document {name!r}", path=name)
        try:
            return loads(self.read_object(path), JSON, deepest=MAX_TREE_NESTING)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            key = layout.segment_key(self.name, path)
            raise CorruptStore(f"document {key} cannot be parsed: {error}; run `cnr verify`", path=key) from error

    def read_dense(self, name: str, entry: DenseEntry) -> npt.NDArray[Any]:
        """Return a dense tensor whose bytes are in this segment (`chain_checks.find_dense`), in its stored dtype."""
        array = next(item for item in self.manifest.dense_arrays if item.path == entry.path)
        size = math.prod(entry.shape)
        out = np.empty(size, array.dtype)
        scratch = Scratch()
        start, stop = entry.offset, entry.offset + size
        for k in range(start // array.chunk_rows, -(-stop // array.chunk_rows)):
            low = k * array.chunk_rows
            chunk = self.read_chunk(array, k, scratch)
            piece = chunk[max(start - low, 0) : stop - low]
            out[max(low - start, 0) : max(low - start, 0) + len(piece)] = piece
        if object_digest(out.view(np.uint8).data) != entry.digest:
            raise CorruptObject(
                f"dense tensor {name!r} in segment {self.name} has another digest than the manifest names; its entry "
                "points to other bytes, run `cnr verify`",
                path=layout.segment_key(self.name, entry.path),
            )
        return out.reshape(entry.shape)


def open_chain(
    storage: Storage,
    chain: Sequence[ChainEntry],
    workers: Workers,
    *,
    known: Mapping[str, SegmentReader] = {},
    if_missing: IfMissing | None = None,
) -> tuple[SegmentReader, ...]:
    """Open the segments of a chain, and refuse manifests that contradict each other: a GET for each that is not known.

    Raises
    ------
    MissingObject, CorruptObject, CorruptStore, NewerFormat, StorageFailure
    """
    missing = [entry for entry in chain if entry.seg not in known]
    fresh = workers.run(partial(SegmentReader.open, storage, entry, if_missing=if_missing) for entry in missing)
    by_name = {**known, **{reader.name: reader for reader in fresh}}
    readers = tuple(by_name[entry.seg] for entry in chain)
    names = tuple(reader.name for reader in readers)
    sound = next((k for k, one in enumerate(readers) if one.sound_behind != names[:k]), len(names))
    for found in chain_problems(names, [reader.manifest for reader in readers], sound):
        key = layout.segment_key(names[found.index], layout.MANIFEST)
        raise CorruptStore(f"{key}: {found.message}; run `cnr verify`", path=key, table=found.table)
    for k, reader in enumerate(readers):
        reader.sound_behind = names[:k]
    return readers


def check_record(record: CommitRecord, last: SegmentReader) -> None:
    """Refuse a record that says another thing of its last segment than that says of itself. No I/O.

    Raises
    ------
    CorruptRecord
    """
    for problem in record_problems(record, last.manifest):
        raise CorruptRecord(f"commit record {record.v} {problem}; run `cnr verify`", version=record.v, path=last.name)


class Scratch:
    """Memory that chunks are decoded into, reused from chunk to chunk; one per thread and array."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._spare: Scratch | None = None

    @property
    def spare(self) -> Scratch:
        """More such memory, for what must not be where the array that is returned will be."""
        if self._spare is None:
            self._spare = Scratch()
        return self._spare

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array of that shape in the reused memory; the array taken before is overwritten."""
        size = math.prod(shape) * dtype.itemsize
        if self._memory.nbytes < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].view(dtype).reshape(shape)


def _array_path(name: str) -> str:
    """``slots/<name>`` keeps its folder; the slot's own name becomes one node name."""
    head, _, tail = name.partition("/")
    return f"{head}/{layout.encode_name(tail)}" if tail else head


def _stored_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(_CARRIERS.get(dtype, dtype))
