"""Write one segment: parts, dense tensors, documents, inventory, manifest (spec, section 4).

A writer puts every object once, under a folder that carries its attempt. If another process puts the manifest, the
writer puts a receipt last. Nothing here makes a segment visible: only a commit record does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.encodings.row_order import into_order
from cnr_store.errors import BadDtype, BadInput, CorruptStore, StorageFailure
from cnr_store.format import arrays, layout
from cnr_store.format.documents import sha256
from cnr_store.format.fields import ArrayDtype, TensorDtype
from cnr_store.format.limits import MAX_MANIFEST_BYTES
from cnr_store.format.manifest import decode_manifest
from cnr_store.format.packed import pack
from cnr_store.format.records import ArrayEntry, DenseEntry, Manifest, ObjectEntry, PartEntry, Receipt, RowListEntry
from cnr_store.runtime.threads import Throttle, Workers
from cnr_store.storage import Storage, object_digest
from cnr_store.types import JsonValue, Rectangle

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

    def __init__(self, storage: Storage, name: str, *, folder: str, workers: Workers, throttle: Throttle) -> None:
        self.name = name
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
        """Put a JSON document (reader state, RNG state) under ``<writer>/<name>.json.zst``."""
        # The ending goes through the encoding: a document named _receipt must not become the receipt.
        path = "/".join([self.folder, *(layout.encode_name(part) for part in f"{name}.json.zst".split("/"))])
        self._put(path, pack(document))
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
        data = pack(receipt)
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
    """Put the manifest durably; returns its sha256 and size. The segment is complete and still invisible.

    Raises
    ------
    BadInput
        No reader would take it: what was given cannot be stored.
    """
    data = pack(manifest)
    key = layout.segment_key(name, layout.MANIFEST)
    try:
        decode_manifest(data, key)
    except CorruptStore as error:
        raise BadInput(f"this cannot be saved, because no reader would take it: {error}", path=key) from error
    storage.put_document(key, data, MAX_MANIFEST_BYTES)
    storage.sync_folders([key])
    return sha256(data), len(data)


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


def _array_path(name: str) -> str:
    """``slots/<name>`` keeps its folder; the slot's own name becomes one node name."""
    head, _, tail = name.partition("/")
    return f"{head}/{layout.encode_name(tail)}" if tail else head
