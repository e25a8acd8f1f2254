"""Every kind of damage is an error of its own kind, for the library and the independent reader; never silent data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cnr_store import CnrStoreError, Store
from format_spec import vectors
from format_spec.reader import cnr_read

GOLDEN = Path(__file__).resolve().parents[2] / "format_spec" / "golden"
VECTORS: dict[str, Any] = json.loads((GOLDEN / "negative" / "vectors.json").read_text())


def read_everything(root: Path) -> None:
    """Open the head, walk the log, and read all that every version holds."""
    store = Store.open(str(root), threads=1)
    store.head()
    for record in list(store.log()):
        snapshot = store.snapshot(version=record.v)
        for table in snapshot.tables:
            view = snapshot.table(table)
            if view.schema.keys == "hashed":
                view.read_all(slots=True)
            else:
                view.load(dict.fromkeys(["codes", *(f"slots/{s}" for s in view.schema.slots)]))
        for name in snapshot.dense:
            snapshot.read_dense(name)
        for name in snapshot.documents:
            snapshot.read_document(name)


def open_writer(root: Path) -> None:
    Store.open(str(root), threads=1).writer()


def independent_read(root: Path) -> None:
    store = cnr_read.Store(root)
    for version in range(len(store.records) - 1, -1, -1):
        snapshot = store.snapshot(version)
        for table in snapshot.tables:
            snapshot.read_table(table)
        for name in snapshot.dense:
            snapshot.read_dense(name)
        for name in snapshot.documents:
            snapshot.read_document(name)


def damaged(name: str, tmp_path: Path) -> Path:
    root = tmp_path / "store"
    shutil.copytree(GOLDEN / VECTORS[name]["store"] / "store", root)
    vectors.apply(root, VECTORS[name]["patch"])
    return root


@pytest.mark.parametrize("case", sorted({vector["store"] for vector in VECTORS.values()}))
def test_the_undamaged_stores_are_read_whole(case: str) -> None:
    read_everything(GOLDEN / case / "store")

    independent_read(GOLDEN / case / "store")


@pytest.mark.parametrize("name", sorted(VECTORS))
def test_the_library_refuses_with_the_kind_of_the_damage(name: str, tmp_path: Path) -> None:
    root = damaged(name, tmp_path)

    if VECTORS[name]["at"] == "write":
        read_everything(root)
    act = open_writer if VECTORS[name]["at"] == "write" else read_everything

    with pytest.raises(CnrStoreError) as caught:
        act(root)

    assert caught.value.kind == VECTORS[name]["kind"]


@pytest.mark.parametrize("name", sorted(VECTORS))
def test_the_independent_reader_refuses_too(name: str, tmp_path: Path) -> None:
    root = damaged(name, tmp_path)

    if VECTORS[name]["reader"] is None:
        independent_read(root)
        return
    with pytest.raises(cnr_read.Refused) as caught:
        independent_read(root)

    assert caught.value.args[0] == VECTORS[name]["reader"]


def test_a_reader_falls_back_to_the_version_before_a_torn_record(tmp_path: Path) -> None:
    root = damaged("torn_record", tmp_path)
    store = Store.open(str(root), threads=1)
    with pytest.raises(CnrStoreError) as caught:
        store.head()

    assert store.record((caught.value.version or 0) - 1).v == 8
