"""Read every version of a store with the library and with the independent reader, and compare bit for bit.

python -m format_spec.reader.compare STORE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from cnr_store import Snapshot, Store
from cnr_store.errors import VersionExpired
from cnr_store.format import document_tree
from cnr_store.read.table_view import TableView
from cnr_store.types import Rectangle
from format_spec.reader import cnr_read


def compare(root: str | Path, branch: str | None = None) -> int:
    """Return how many arrays of how ever many versions were compared; raises AssertionError on the first difference."""
    store = Store.open(str(root), branch=branch, threads=1)
    other = cnr_read.Store(root, branch)
    assert store.latest_version() == len(other.records) - 1, "another newest version"
    compared = 0
    for version in (number for number, record in enumerate(other.records) if record is not None):
        try:
            snapshot = store.snapshot(version=version)
        except VersionExpired:
            continue
        compared += _compare_version(snapshot, other.snapshot(version), f"version {version}")
    store.close()
    return compared


def _as_leaf(value: Any) -> document_tree.TensorLeaf | None:
    return value if isinstance(value, document_tree.TensorLeaf) else None


def _compare_version(snapshot: Snapshot, other: Any, where: str) -> int:
    compared = 0
    assert sorted(snapshot.tables) == sorted(other.tables), f"{where}: other tables"
    assert sorted(snapshot.dense) == sorted(other.dense), f"{where}: other dense tensors"
    assert snapshot.documents == sorted(other.documents), f"{where}: other documents"
    assert snapshot.scalars == other.last["scalars"], f"{where}: other scalars"
    for table in snapshot.tables:
        arrays = other.read_table(table)
        ours = _read(snapshot, table)
        assert sorted(ours) == sorted(arrays), f"{where}: other arrays of {table}"
        for name, array in ours.items():
            _same(array, arrays[name], f"{where}, table {table}, {name}")
            compared += 1
    for name in snapshot.dense:
        _same(snapshot.read_dense(name), other.read_dense(name), f"{where}, dense {name}")
        compared += 1
    for name in snapshot.documents:
        document = other.read_document(name)
        tensors_kept = snapshot.read_document(name, lambda leaf: leaf)
        assert document_tree.encode(tensors_kept, _as_leaf) == document, f"{where}, document {name}"
    return compared


def _read(snapshot: Snapshot, table: str) -> dict[str, Any]:
    view = snapshot.table(table)
    if view.schema.keys == "hashed":
        keys, arrays = view.read_all(slots=True)
        return {"keys": keys, **arrays}
    return {"values": view.read(), **{slot: _read_slot(view, slot) for slot in view.schema.slots}}


def _read_slot(view: TableView, slot: str) -> Any:
    """A slot; of a one-dimensional one that is stored per column range, a column for each range."""
    if view.schema.slots[slot].kind == "element" or len(view.column_cuts) == 1:
        return view.read(slot=slot)
    rows = (0, view.shape[0])
    pieces = [view.read_rectangle(Rectangle(rows, columns), slots={slot: None})[slot] for columns in view.column_cuts]
    return np.column_stack(pieces)


def _same(ours: Any, theirs: Any, where: str) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), f"{where}: {ours.dtype} {ours.shape}"
    assert np.ascontiguousarray(ours).tobytes() == np.ascontiguousarray(theirs).tobytes(), f"{where}: other bits"


if __name__ == "__main__":
    print(f"{compare(sys.argv[1])} arrays are the same, bit for bit")
