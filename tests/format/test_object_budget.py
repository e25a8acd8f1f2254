"""How many objects a save makes, and how many a read takes: neither grows with the number of tables.

A segment has its manifest and its group document, and each group of arrays 2 objects per array while its rows fit one
chunk. Dense tensors cost 2 per stored dtype that changed, documents that are too long for the manifest 1 each; the
commit itself is 1 record.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from cnr_store import Store, TableOptions
from cnr_store.maintenance.compaction import compact_run
from cnr_store.maintenance.verify import verify_store
from cnr_store.store import open_segment
from tests.support.zarr_values import integers_of

SLOTS: dict[str, Any] = {"momentum": np.ones(50, np.float32)}


def objects_of(store: Store, version: int) -> list[str]:
    name = store.record(version).chain[-1].seg
    return [item.key for item in store.storage.list_objects(f"data/{name}")]


def saved(tmp_path: Path, tables: int, slots: int, touched: int) -> tuple[Store, int]:
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=1)
    values = np.ones((50, 4), np.float32)
    given = {f"slot{k}": SLOTS["momentum"] for k in range(slots)}
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            for k in range(tables):
                txn.write_table(f"t{k}", values, slots=given, options=TableOptions(scale=0.5))
        with writer.begin(step=2) as txn:
            for k in range(touched):
                rows = np.asarray([3, 4, 40])
                txn.write_rows(
                    f"t{k}", rows, values[rows] * 3, slots={name: slot[rows] for name, slot in given.items()}
                )
            version = txn.commit()
    return store, version


SEGMENT = 2  # manifest, group document
RECORD = 1


@pytest.mark.parametrize("tables", [1, 26, 300, 1000])
@pytest.mark.parametrize("slots", [0, 1])
def test_a_delta_of_any_number_of_tables_has_the_objects_of_one(tmp_path: Path, tables: int, slots: int) -> None:
    store, version = saved(tmp_path, tables, slots, tables)

    arrays = 2 + slots  # rows, codes, slots

    assert len(objects_of(store, version)) == SEGMENT + 2 * arrays
    assert len(objects_of(store, version)) + RECORD <= 12


def test_a_further_group_costs_two_objects_per_array(tmp_path: Path) -> None:
    store, _ = saved(tmp_path, 8, 1, 8)
    with store.writer() as writer:
        writer.restore()
        with writer.begin(step=3) as txn:
            for table in range(8):
                txn.delete_rows(f"t{table}", np.asarray([5, 6]))
                rows, values = np.asarray([1, 2]), np.full((2, 4), 9, np.float32)
                txn.write_rows(f"t{table}", rows, values, slots={"slot0": np.full(2, 3, np.float32)})
            version = txn.commit()

    assert len(objects_of(store, version)) == SEGMENT + 2 * 3 + 2 * 1  # added rows with a slot, deleted rows


def test_untouched_tables_and_empty_deltas_cost_no_object(tmp_path: Path) -> None:
    one, version = saved(tmp_path / "a", 10, 1, 1)
    none, empty = saved(tmp_path / "b", 10, 1, 0)

    assert len(objects_of(one, version)) == SEGMENT + 2 * 3
    assert sorted(Path(key).name for key in objects_of(none, empty)) == ["_segment.json.zst", "zarr.json"]


@pytest.mark.parametrize("tables", [1, 26, 300])
def test_a_restore_reads_each_chunk_that_tables_share_once(tmp_path: Path, tables: int) -> None:
    saved(tmp_path, tables, 1, tables)
    with Store.open(str(tmp_path / "store"), threads=1) as store:
        snapshot = store.snapshot()
        read: list[str] = []
        for reader in snapshot.readers:
            read_object = reader.read_object
            reader.read_object = lambda path, read_object=read_object: (read.append(path), read_object(path))[1]  # type: ignore[method-assign,misc]
        for table in snapshot.tables:
            snapshot.table(table).load({"codes": None, "slots/slot0": None})

    assert len(read) == len(set(read)) <= 2 + 3  # codes and slots of the baseline, all of the delta
    assert all(reader.shared.nbytes == 0 for reader in snapshot.readers), "what was read whole is not kept"


def test_a_list_that_fills_a_chunk_has_arrays_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 2 * 4 * 10)  # ten rows
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=1)
    sizes = {"a": 4, "b": 25, "c": 9, "d": 3, "e": 10}
    values = {name: np.arange(4 * count, dtype=np.float32).reshape(count, 4) for name, count in sizes.items()}
    with store.writer() as writer, writer.begin(step=1) as txn:
        for name, given in values.items():
            txn.write_table(name, given, options=TableOptions(scale=1.0))
    manifest = open_segment(store, store.latest_version()).manifest
    lists = {part.table: part.set for part in manifest.parts if part.set is not None}

    assert {name: one.arrays["rows"].path.partition(".")[2] for name, one in lists.items()} == {
        "a": "set-0.rows", "c": "set-0.rows", "d": "set-0.rows", "b": "set-1.rows", "e": "set-2.rows"
    }  # fmt: skip
    assert {name: (one.arrays["rows"].start, one.first, one.last) for name, one in lists.items()} == {
        "a": (0, (0,), (3,)), "c": (4, (0, 6), (5, 8)), "d": (13, (0,), (2,)), "b": (0, (0, 9, 18), (8, 17, 24)),
        "e": (0, (0,), (9,)),
    }  # fmt: skip
    for name, given in values.items():
        assert np.array_equal(store.snapshot().table(name).read(), given)


def test_a_commit_puts_its_record_and_the_hint_beside_its_segment(tmp_path: Path) -> None:
    store, version = saved(tmp_path, 1, 0, 1)

    outside = {item.key for item in store.storage.list_objects("") if not item.key.startswith("data/")}

    assert outside == {
        "cnr.json",
        "zarr.json",
        "hint/latest.json",
        *(f"commits/{v:020d}.json" for v in range(version + 1)),
    }


def test_a_commit_record_does_not_grow_with_the_tables(tmp_path: Path) -> None:
    (one, of_one), (many, of_many) = (saved(tmp_path / f"{n}", n, 1, n) for n in (1, 200))

    sizes = [len(store.storage.read(f"commits/{v:020d}.json") or b"") for store, v in ((one, of_one), (many, of_many))]

    assert sizes[1] - sizes[0] < 32  # digits of the sums of bytes and rows
    assert list(many.storage.list_objects("state/")) == []


def test_dense_tensors_cost_two_objects_per_dtype_long_documents_one(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=1)
    weights = {f"w{k}": np.ones((3, k), np.float32) for k in range(1, 9)}
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            txn.put_dense({**weights, "steps": np.asarray(1)})
            txn.put_document("reader/0", {})
            txn.put_document("rng/0", {"words": "random" * 1000})
            first = txn.commit()
        with writer.begin(step=2) as txn:
            txn.put_dense({**weights, "w3": weights["w3"] + 1, "steps": np.asarray(1)})
            second = txn.commit()

    assert len(objects_of(store, first)) == SEGMENT + 2 * 2 + 1
    assert len(objects_of(store, second)) == SEGMENT + 2


def test_a_segment_has_a_folder_for_each_array_and_no_other(tmp_path: Path) -> None:
    """On a disk each folder is a mkdir, an fsync, and an open on the way to each object below it."""
    with Store.create(str(tmp_path / "store"), fsync=False, threads=1) as store:
        with store.writer() as writer, writer.begin(step=1) as txn:
            txn.write_table("t", np.ones((600_000, 32), np.float32), options=TableOptions(scale=0.5))
            txn.put_dense({"w": np.ones(3, np.float32)})
            txn.put_document("rng/0/torch", {"words": "long" * 1000})
        segment = tmp_path / "store" / "data" / store.head().record.chain[-1].seg
        manifest = store.snapshot().manifests[-1]

    entries = [*manifest.arrays, *manifest.dense_arrays]
    assert len(list(segment.rglob("c.*"))) > len(entries), "several chunks"
    assert {path.relative_to(segment).as_posix() for path in segment.rglob("*") if path.is_dir()} == {
        entry.path for entry in entries
    }
    assert sorted(path.suffix for path in segment.iterdir() if path.is_file()) == [".json", ".zst", ".zst"]


@pytest.mark.parametrize("run", [None, (1, 3), (2, 4)])
@pytest.mark.parametrize(
    ("long", "objects"), [("", [1, 1, 1, 1]), ("long" * 1000, [3, 1, 1, 2])], ids=["small", "long"]
)
def test_a_document_that_stays_costs_no_object_and_outlives_a_compaction(
    tmp_path: Path, run: tuple[int, int] | None, long: str, objects: list[int]
) -> None:
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=1)
    with store.writer() as writer:
        for step in range(4):
            with writer.begin(step=step) as txn:
                txn.put_dense({"w": np.full(3, step, np.float32)})
                txn.put_document("stays", {"of": (1, 2), "long": long})
                txn.put_document("moves", {"at": step // 3, "long": long})
    sizes = [len([key for key in objects_of(store, version) if key.endswith(".json.zst")]) for version in range(2, 6)]

    chain = len(store.head().record.chain)
    compact_run(store, run=(0, chain) if run is None else run)
    snapshot = store.snapshot()

    found = [snapshot.read_document(name) for name in snapshot.documents]

    assert sizes == objects, "a manifest each, and the long documents that are new"
    assert found == [{"at": 1, "long": long}, {"of": (1, 2), "long": long}]
    assert verify_store(store, deep=True).is_sound


def test_a_plain_zarr_reader_opens_add_rows_at_the_manifests_path(tmp_path: Path) -> None:
    store, version = saved(tmp_path, 2, 1, 2)
    manifest = open_segment(store, version).manifest
    folder = tmp_path / "store" / "data" / store.record(version).chain[-1].seg
    listed = manifest.parts[1].add
    assert listed is not None

    start, stop = listed.arrays["rows"].start, listed.arrays["rows"].start + listed.count
    whole = {
        name: integers_of(zarr.open_array(str(folder / entry.path), mode="r")) for name, entry in listed.arrays.items()
    }
    found = {name: array[start:stop] for name, array in whole.items()}

    assert whole["codes"].shape == (6, 4)
    assert (start, stop) == (3, 6)
    assert np.array_equal(found["rows"], [3, 4, 40])
    assert np.array_equal(found["codes"], np.full((3, 4), 4))  # from 2 steps of 0.5 to 6
    assert set(found["slots/slot0"].tolist()) == {0}


@pytest.mark.filterwarnings("ignore:Object at .* is not recognized as a component of a Zarr hierarchy")
def test_a_plain_zarr_reader_walks_from_the_root_to_every_array(tmp_path: Path) -> None:
    store, version = saved(tmp_path, 3, 1, 3)
    root = zarr.open_group(str(tmp_path / "store"), mode="r")

    found = {name for name, member in root.members(max_depth=None) if isinstance(member, zarr.Array)}

    assert found == {
        f"data/{entry.seg}/{array.path}"
        for entry, manifest in zip(store.record(version).chain, store.snapshot().manifests, strict=True)
        for array in manifest.arrays
    }


def test_a_plain_zarr_reader_opens_the_root_of_a_store(tmp_path: Path) -> None:
    saved(tmp_path, 1, 0, 1)

    root = zarr.open_group(str(tmp_path / "store"), mode="r")

    assert json.loads((tmp_path / "store" / "cnr.json").read_bytes())["format"] == root.attrs["cnr"]["format"]
