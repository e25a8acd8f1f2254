"""A small store with every kind of row and object in it, and ways to damage or forge one."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store import Store, TableOptions
from cnr_store.format import arrays, layout
from cnr_store.format.commit_record import decode_record, encode_record
from cnr_store.format.documents import pack, sha256
from cnr_store.format.manifest import decode_manifest
from cnr_store.format.records import ArrayEntry, Manifest, ObjectEntry, RowListEntry
from cnr_store.storage import object_digest
from tests.support.documents import document_of

Array = npt.NDArray[Any]


def build_store(path: Path) -> Store:
    """Versions: 2 baseline, 3, 4 deltas (add rows; dense changes), 5 delta (delete, set, escape), 6 tag `good` on 3."""
    for name, data in _sample_files().items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return Store.open(str(path), fsync=False, threads=2)


@functools.cache
def _sample_files() -> dict[str, bytes]:
    """The objects by key. To write them takes a fifth of the time that a store takes to make them."""
    with tempfile.TemporaryDirectory() as folder:
        _save_all(Path(folder, "store"))
        return {key_of(Path(folder, "store"), file): file.read_bytes() for file in object_files(Path(folder, "store"))}


def _save_all(path: Path) -> None:
    random = np.random.default_rng(7)
    user = random.normal(size=(400, 8)).astype(np.float32)
    momentum = np.abs(random.normal(size=400)).astype(np.float32)
    half = random.normal(size=(90, 4)).astype(np.float16)
    with Store.create(str(path), fsync=False, threads=1) as store, store.writer() as writer:
        with writer.begin(step=10) as txn:
            txn.write_table("user", user, slots={"momentum1": momentum}, options=TableOptions(nonfinite="escape"))
            txn.write_table("half/item", half)
            txn.put_dense(
                {"mlp.weight": random.normal(size=(3, 5)), "flag": np.asarray([0, 1], np.uint8)}, {"flag": "bool"}
            )
            txn.put_scalars({"epoch": 1})
            txn.put_document("reader/0", {"position": (1, 2)})
            txn.put_document("order/0", "0123456789" * 300)  # too long for the manifest
        for step in (20, 30):
            rows = np.sort(random.choice(400, 50, replace=False)).astype(np.int64)
            user[rows] += 0.05
            with writer.begin(step=step) as txn:
                txn.write_rows("user", rows, user[rows], slots={"momentum1": momentum[rows]})
                txn.put_dense({"mlp.weight": np.full((3, 5), float(step))})
        with writer.begin(step=40) as txn:
            txn.delete_rows("user", np.asarray([3, 4, 200]))
            rows = np.asarray([7, 9], np.int64)
            txn.write_rows("user", rows, np.full((2, 8), [[np.inf]], np.float32), slots={"momentum1": momentum[rows]})
        store.tag("good", 3)


def object_files(root: Path) -> list[Path]:
    """Every object of a store on local disk."""
    return sorted(path for path in root.rglob("*") if path.is_file())


def key_of(root: Path, path: Path) -> str:
    """The key of an object."""
    return path.relative_to(root).as_posix()


def flip(data: bytes, at: int | None = None) -> bytes:
    """The bytes with one bit inverted, by default in the middle."""
    place = len(data) // 2 if at is None else at
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def forge_head(store: Store, change: Callable[[Manifest, Forgery], Manifest]) -> None:
    """Rewrite the head's own segment, inventory, manifest and record so that every digest is right again."""
    record = store.head().record
    entry = record.chain[-1]
    key = layout.segment_key(entry.seg, layout.MANIFEST)
    data = store.storage.read(key)
    assert data is not None
    before = decode_manifest(data, key)
    forgery = Forgery(store, entry.seg, [item.path for item in before.objects])
    manifest = forgery.with_new_objects(change(before, forgery))
    data = pack(document_of(manifest))
    store.storage.put(key, data)
    size = len(data) + sum(item.size for item in manifest.objects)
    forged = msgspec.structs.replace(entry, sha256=sha256(data), size_bytes=size, rows=manifest.changed_rows)
    raw = store.storage.read(layout.commit_key(record.v))
    assert raw is not None
    plain = decode_record(raw, record.v).record
    plain = msgspec.structs.replace(plain, chain=(*plain.chain[:-1], forged))
    store.storage.put(layout.commit_key(record.v), encode_record(plain))


class Forgery:
    """Replaces chunks of a segment, and keeps its inventory correct."""

    def __init__(self, store: Store, segment: str, objects: list[str]) -> None:
        self._store = store
        self._objects = objects
        self._segment = segment
        self._new: dict[str, bytes] = {}

    def read(self, array: ArrayEntry) -> Array:
        """The real rows of an array of one chunk."""
        data = self._store.storage.read(layout.segment_key(self._segment, arrays.chunk_path(array, 0)))
        assert data is not None
        out = np.empty(arrays.chunk_shape(array), array.dtype)
        arrays.decode_chunk(array, data, out, "forgery")
        return out[: array.shape[0]]

    def write(self, array: ArrayEntry, values: Array) -> None:
        """Replace an array of one chunk."""
        self._new[arrays.chunk_path(array, 0)] = arrays.encode_chunk(array, values)

    def copy_list(self, row_list: RowListEntry, operation: str) -> tuple[RowListEntry, list[ArrayEntry]]:
        """Return the same rows in another list, and its arrays: those of the list once more, in a group of its own."""
        group = row_list.arrays["rows"].path.removesuffix(".rows")
        other = f"{group.partition('.')[0]}.{operation}-9"
        for path in [path for path in self._objects if path.startswith(f"{group}.")]:
            data = self._store.storage.read(layout.segment_key(self._segment, path))
            assert data is not None
            self._new[other + path.removeprefix(group)] = data
        moved = {
            name: msgspec.structs.replace(array, path=other + array.path.removeprefix(group), order=msgspec.UNSET)
            for name, array in row_list.group.items()
        }
        return msgspec.structs.replace(row_list, group=moved), list(moved.values())

    def with_new_objects(self, manifest: Manifest) -> Manifest:
        """Put the new chunks, and return the manifest with their sizes and digests."""
        for path, data in self._new.items():
            self._store.storage.put(layout.segment_key(self._segment, path), data)
        fresh = {
            path: ObjectEntry(path=path, size=len(data), xxh3_128=object_digest(data))
            for path, data in self._new.items()
        }
        objects = {item.path: item for item in manifest.objects} | fresh
        return msgspec.structs.replace(manifest, objects=tuple(objects[path] for path in sorted(objects)))
