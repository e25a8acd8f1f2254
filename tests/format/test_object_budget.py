"""How many objects a save makes: 1 per segment, and 2 + 2 per array for each list of one chunk.

A part with one list, which is what a delta of existing rows has, so costs 2 group documents and 2 objects per array. A
second list (deleted or new rows besides) costs 1 group document and 2 objects per array more. Dense tensors cost 2 per
stored dtype that changed, documents 1 each; the commit itself is 1 record.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from cnr_store import Store, TableOptions
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


@pytest.mark.parametrize("tables", [1, 10])
@pytest.mark.parametrize("slots", [0, 1])
def test_a_delta_of_one_chunk_stays_within_the_budget(tmp_path: Path, tables: int, slots: int) -> None:
    store, version = saved(tmp_path, tables, slots, tables)

    arrays_per_part = 2 + slots  # rows, codes, slots

    assert len(objects_of(store, version)) == 1 + tables * (2 + 2 * arrays_per_part)


def test_untouched_tables_and_empty_deltas_cost_no_object(tmp_path: Path) -> None:
    one, version = saved(tmp_path / "a", 10, 1, 1)
    none, empty = saved(tmp_path / "b", 10, 1, 0)

    assert len(objects_of(one, version)) == 1 + 2 + 2 * 3
    assert sorted(Path(key).name for key in objects_of(none, empty)) == ["_segment.json.zst"]


def test_the_objects_of_a_commit_beside_its_segment_are_its_record_and_the_hint(tmp_path: Path) -> None:
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


def test_dense_tensors_cost_two_objects_per_dtype_and_documents_one_each(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=1)
    weights = {f"w{k}": np.ones((3, k), np.float32) for k in range(1, 9)}
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            txn.put_dense({**weights, "steps": np.asarray(1)})
            txn.put_document("reader/0", {})
            txn.put_document("rng/0", {})
            first = txn.commit()
        with writer.begin(step=2) as txn:
            txn.put_dense({**weights, "w3": weights["w3"] + 1, "steps": np.asarray(1)})
            second = txn.commit()

    assert len(objects_of(store, first)) == 1 + 2 * 2 + 2
    assert len(objects_of(store, second)) == 1 + 2


def test_a_plain_zarr_reader_opens_the_add_rows_at_the_path_of_the_manifest(tmp_path: Path) -> None:
    store, version = saved(tmp_path, 1, 1, 1)
    manifest = open_segment(store, version).manifest
    folder = tmp_path / "store" / "data" / store.record(version).chain[-1].seg
    listed = manifest.parts[0].add
    assert listed is not None

    group = zarr.open_group(str(folder / manifest.parts[0].folder), mode="r")
    arrays = {
        name: integers_of(zarr.open_array(str(folder / entry.path), mode="r")) for name, entry in listed.arrays.items()
    }

    assert group.attrs["cnr"]["table"] == "t0"
    assert group["add"].attrs["cnr"]["encoding"] == {"encoding": "lattice", "scale": 0.5}
    assert np.array_equal(arrays["rows"], [3, 4, 40])
    assert np.array_equal(arrays["codes"], np.full((3, 4), 4))  # from 2 steps of 0.5 to 6
    assert set(arrays["slots/slot0"]) == {0}


def test_a_plain_zarr_reader_opens_the_root_of_a_store(tmp_path: Path) -> None:
    saved(tmp_path, 1, 0, 1)

    root = zarr.open_group(str(tmp_path / "store"), mode="r")

    assert json.loads((tmp_path / "store" / "cnr.json").read_bytes())["format"] == root.attrs["cnr"]["format"]
