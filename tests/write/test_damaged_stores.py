"""Stores that are something else, newer or damaged: each with its own error, before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cnr_store import CorruptStore, Store, TableOptions
from cnr_store.errors import (
    CorruptObject,
    CorruptRecord,
    MissingObject,
    NewerFormat,
    NotAStore,
    ReadOnlyStore,
    TableNotFound,
    TagNotFound,
    UnknownFeature,
    VersionNotFound,
)
from cnr_store.format.commit_record import sealed
from cnr_store.format.documents import pack, sha256, unpack
from cnr_store.format.layout import IDENTITY, commit_key, segment_key
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.write.world import DIM, ROOT, ROWS, SCALE, World, ids, ones, rows_of


def test_not_a_store() -> None:
    with pytest.raises(NotAStore):
        Store.open_on(storage_from_filesystem(IsolatedMemoryFileSystem(), ROOT), threads=1)


def test_newer_format(world: World) -> None:
    world.write(IDENTITY, json.dumps({**json.loads(world.read(IDENTITY)), "major": 2}).encode())
    with pytest.raises(NewerFormat):
        world.open()


def rewrite_head(world: World, **fields: Any) -> None:
    """Give the newest record other fields, in canonical form."""
    key = commit_key(world.store.latest_version())
    world.write(key, sealed({**json.loads(world.read(key)), **fields}))


def test_unknown_reader_feature(world: World) -> None:
    rewrite_head(world, reader_features=["from_the_future"])
    with pytest.raises(UnknownFeature, match="from_the_future"):
        world.open().snapshot()


def test_unknown_writer_feature_is_read_only(world: World) -> None:
    rewrite_head(world, writer_features=["from_the_future"])
    store = world.open()
    assert store.snapshot().table("t").read().shape == (ROWS, DIM)
    with pytest.raises(ReadOnlyStore, match="from_the_future"):
        store.writer()


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.tag("good"),
        lambda store: store.rollback(1),
        lambda store: store.set_channel("serving"),
        lambda store: store.fork("trial"),
    ],
    ids=["tag", "rollback", "channel", "fork"],
)
def test_nothing_is_appended_to_a_read_only_store(world: World, change: Callable[[Store], Any]) -> None:
    """Tags and rollbacks were: only a writer looked at the features."""
    rewrite_head(world, writer_features=["from_the_future"])
    store = world.open()
    head = store.latest_version()

    with pytest.raises(ReadOnlyStore, match="from_the_future"):
        change(store)

    assert store.latest_version() == head


def test_torn_record(world: World) -> None:
    key = commit_key(world.store.latest_version())
    world.write(key, world.read(key)[:-9])
    with pytest.raises(CorruptRecord):
        world.open().head()


def test_names_and_numbers_that_do_not_exist(world: World) -> None:
    store = world.open()
    with pytest.raises(VersionNotFound):
        store.snapshot(version=99)
    with pytest.raises(VersionNotFound):
        store.snapshot(step=99)
    with pytest.raises(TagNotFound):
        store.snapshot(tag="nobody")
    with pytest.raises(TableNotFound):
        store.snapshot().table("nobody")
    with pytest.raises(TableNotFound):
        store.snapshot().read_dense("nobody")
    with pytest.raises(TableNotFound):
        store.snapshot().read_document("nobody")


def objects(world: World) -> list[str]:
    """Keys of the objects that reading every table and tensor needs: chunks, and the manifest."""
    reader = world.store.snapshot().readers[-1]
    names = [entry.path for entry in reader.manifest.objects if "/c." in entry.path]
    return [segment_key(reader.name, name) for name in ("_segment.json.zst", *names)]


def read_all(world: World) -> None:
    snapshot = world.open().snapshot()
    for name, schema in snapshot.tables.items():
        view = snapshot.table(name)
        if schema.keys == "hashed":
            view.read_all(slots=True)
        else:
            view.read_rectangle(
                values=np.empty(view.shape, np.float32), slots={s: np.empty(ROWS, np.float32) for s in schema.slots}
            )
    for name in snapshot.dense:
        snapshot.read_dense(name)


def damage_found(world: World) -> CorruptStore | None:
    try:
        read_all(world)
    except CorruptStore as error:
        return error
    return None


def scattered() -> World:
    """Rows that are no range, so that every chunk has to be read."""
    world = World()
    with world.writer.begin(2, "baseline") as txn:
        txn.write_rows("h", ids(-7, 9, 11), ones(3))
        txn.write_table("n", np.arange(12, dtype=np.float32).reshape(6, 2), options=TableOptions(scale=SCALE))
        txn.delete_rows("t", ids(1))
        txn.delete_rows("exact", ids(2))
    return world


DAMAGES: dict[str, tuple[type[Exception], Callable[[bytes], bytes | None]]] = {
    "missing": (MissingObject, lambda _: None),
    "truncated": (CorruptObject, lambda data: data[:-1]),
    "flipped": (CorruptObject, lambda data: data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]),
    "longer": (CorruptObject, lambda data: data + b"\0"),
    "empty": (CorruptObject, lambda _: b""),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_object_is_named(damage: str) -> None:
    world = scattered()
    kind, change = DAMAGES[damage]
    read_all(world)
    contiguous = 0
    for key in objects(world):
        good = world.read(key)
        bad = change(good)
        if bad is None:
            world.inner.rm_file(world.key(key))
        else:
            world.write(key, bad)
        error = damage_found(world)
        if error is None:
            assert ".rows/c.0" in key  # row ids that the manifest tells are not read
            contiguous += 1
        else:
            assert type(error) is kind
            assert key in str(error)
            assert error.path is not None
        world.write(key, good)
    assert contiguous <= 2
    read_all(world)


def test_two_swapped_chunks_of_one_size_are_found(world: World) -> None:
    with world.writer.begin(2) as txn:
        rows_of(txn, ids(0), 3 * ones(1))
    reader = world.store.snapshot().readers[-1]
    sizes: dict[int, list[str]] = {}
    for entry in reader.manifest.objects:
        if "/c." in entry.path and ".rows/" not in entry.path:
            sizes.setdefault(entry.size, []).append(segment_key(reader.name, entry.path))
    with world.writer.begin(3) as txn:
        rows_of(txn, ids(0), ones(1))
    later = world.store.snapshot().readers[-1]
    pairs = [
        (one, segment_key(later.name, other.path))
        for other in later.manifest.objects
        for one in sizes.get(other.size, [])
        if "/c." in other.path
        and ".rows/" not in other.path
        and world.read(one) != world.read(segment_key(later.name, other.path))
    ]
    for one, other in pairs[:3]:
        first, second = world.read(one), world.read(other)
        world.write(other, first)
        with pytest.raises(CorruptObject) as caught:
            read_all(world)
        assert other in str(caught.value)
        world.write(other, second)
    assert pairs, "no two chunks had one size"


def with_manifest(world: World, change: Callable[[dict[str, Any]], None]) -> None:
    """Alter the newest manifest and make the record name its new digest: what a hostile writer could do."""
    version = world.store.latest_version()
    record = json.loads(world.read(commit_key(version)))
    key = segment_key(record["chain"][-1]["seg"], "_segment.json.zst")
    manifest = json.loads(unpack(world.read(key), key))
    change(manifest)
    data = pack(manifest)
    world.write(key, data)
    lists = [part.get(name) for part in manifest.get("parts", ()) for name in ("add", "set", "delete", "escape")]
    groups = [*manifest["groups"], *manifest["dense_arrays"]]
    arrays = [item for group in groups for array in group["arrays"].values() for item in array["objects"]]
    record["chain"][-1] |= {
        "sha256": sha256(data),
        "rows": sum(row_list["count"] for row_list in lists if row_list),
        "size_bytes": len(data) + sum(item["size"] for item in [*manifest["objects"], *arrays]),
    }
    world.write(commit_key(version), sealed(record))


def first_part(manifest: dict[str, Any], table: str = "t") -> dict[str, Any]:
    part: dict[str, Any] = next(part for part in manifest["parts"] if part["table"] == table)
    return part


def codes_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The codes that table ``t`` shares with others."""
    codes: dict[str, Any] = first_group(manifest)["arrays"]["codes"]
    return codes


def first_group(manifest: dict[str, Any]) -> dict[str, Any]:
    path = first_part(manifest)["set"]["group"]
    group: dict[str, Any] = next(group for group in manifest["groups"] if group["path"] == path)
    return group


def set_path(manifest: dict[str, Any], path: str) -> None:
    manifest["objects"][0]["path"] = path


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "object outside the root": lambda m: set_path(m, "../../etc/passwd"),
    "absolute object": lambda m: set_path(m, "/etc/passwd"),
    "object with a null byte": lambda m: set_path(m, "a\0b"),
    "array outside the root": lambda m: first_group(m).update(path="../../../x"),
    "dense outside the root": lambda m: m["dense"]["w"].update(path="../w"),
    "document outside the root": lambda m: m["documents"].update({"reader/0": "../../x"}),
    "table of 2^70 elements": lambda m: m["tables"]["t"].update(num_rows=2**60, dim=2**10),
    "negative number of rows": lambda m: m["tables"]["t"].update(num_rows=-1),
    "table without columns": lambda m: m["tables"]["t"].update(dim=0),
    "array of 2^55 rows": lambda m: first_group(m).update(rows=2**55),
    "chunks of no rows": lambda m: first_group(m).update(chunk_rows=0),
    "unknown dtype": lambda m: codes_of(m).update(dtype="object"),
    "code of 64 bits": lambda m: codes_of(m).update(dtype="int64"),
    "more rows than the table": lambda m: first_part(m)["set"].update(last=[ROWS]),
    "negative first row": lambda m: first_part(m)["set"].update(first=[-1]),
    "part beyond the table": lambda m: first_part(m).update(rows=[0, 2**40]),
    "scale of zero": lambda m: m["tables"]["t"]["encoding"].update(scale=0.0),
    "shift of 200": lambda m: m["tables"]["t"].update(shift=200),
    "unknown encoding": lambda m: m["tables"]["t"]["encoding"].update(encoding="pickle"),
    "text for a number": lambda m: m["tables"]["t"].update(num_rows="6"),
    "no tables": lambda m: m.pop("tables"),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_a_hostile_manifest_is_refused_before_memory_is_taken(world: World, case: str) -> None:
    with_manifest(world, HOSTILE[case])
    with pytest.raises(CorruptStore) as caught:
        world.open().snapshot()
    assert "_segment.json.zst" in str(caught.value)


def test_a_stream_that_holds_more_than_its_chunk_is_refused(world: World) -> None:
    """A decompression bomb: the compressed stream, its digest and its size agree, its number of elements does not."""
    from cnr_store.format import arrays
    from cnr_store.format.records import ArrayEntry
    from cnr_store.storage import object_digest

    count = 2_000_000
    bomb = ArrayEntry(
        path="x", dtype="int16", shape=(count, DIM), chunk_rows=count, codec="digits", start=0, count=count
    )  # fmt: skip
    data = arrays.encode_chunk(bomb, np.zeros((2_000_000, DIM), np.int16))
    assert len(data) < 1000
    record = world.store.head().record

    def change(manifest: dict[str, Any]) -> None:
        path = first_group(manifest)["path"] + ".codes/c.0.0"
        codes_of(manifest)["objects"][1].update(size=len(data), xxh3_128=object_digest(data))
        world.write(segment_key(record.chain[-1].seg, path), data)

    with_manifest(world, change)
    with pytest.raises(CorruptObject, match="elements"):
        world.open().snapshot().table("t").read()
