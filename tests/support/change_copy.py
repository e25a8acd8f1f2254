"""A consumer's copy of a store, kept up with change batches alone, and what a snapshot says it must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from cnr_store import Snapshot
from cnr_store.encodings.widths import to_float32

Rows = dict[int, bytes]
Content = dict[str, Rows]


class ChangeCopy:
    """Tables as dicts of row id to the bytes of values and slots; what a replay of a stream must keep equal."""

    def __init__(self) -> None:
        self.tables: Content = {}

    def copy(self) -> ChangeCopy:
        other = ChangeCopy()
        other.tables = {name: dict(rows) for name, rows in self.tables.items()}
        return other

    def apply(self, batch: pa.RecordBatch) -> None:
        """Put a batch on; its own form is checked on the way."""
        (table,) = set(batch["table"].to_pylist())
        (version,) = set(batch["version"].to_pylist())
        assert version >= 0
        ids = batch["row_id"].to_numpy()
        assert (ids[1:] > ids[:-1]).all(), "rows are sorted and unique"
        is_upsert = np.asarray([op == "upsert" for op in batch["op"].to_pylist()])
        rows = self.tables.setdefault(table, {})
        columns = [name for name in batch.schema.names if name == "values" or name.startswith("slot_")]
        for name in columns:
            assert batch[name].is_null().to_numpy(zero_copy_only=False).tolist() == (~is_upsert).tolist()
        kept = batch.filter(pa.array(is_upsert))
        arrays = [_array(kept, name) for name in columns]
        for at, row in enumerate(ids[is_upsert].tolist()):
            rows[row] = b"".join(array[at].tobytes() for array in arrays)
        for row in ids[~is_upsert].tolist():
            rows.pop(row, None)
        if not rows:
            del self.tables[table]


def _array(batch: pa.RecordBatch, name: str) -> np.ndarray[Any, Any]:
    column = batch[name]
    if pa.types.is_fixed_size_list(column.type):
        return np.asarray(column.flatten().to_numpy(zero_copy_only=False)).reshape(len(column), column.type.list_size)
    return np.asarray(column.to_numpy(zero_copy_only=False))


def content_of(snapshot: Snapshot, *, slots: bool, only: frozenset[str] | None = None) -> Content:
    """The same of a snapshot; tables without a row are not there."""
    content: Content = {}
    for name in snapshot:
        if only is not None and name not in only:
            continue
        view = snapshot.table(name)
        names = sorted(view.schema.slots) if slots else []
        if view.schema.keys == "hashed":
            keys, found = view.read_all(slots=slots)
        else:
            keys, found = np.arange(view.schema.num_rows), {"values": view.read()}
            found |= {slot: view.read(slot=slot) for slot in names}
        if view.schema.dtype == "bfloat16":
            found["values"] = to_float32(found["values"], "bfloat16")
        arrays = [found["values"], *(found[slot] for slot in names)]
        rows = {int(key): b"".join(array[at].tobytes() for array in arrays) for at, key in enumerate(keys)}
        if rows:
            content[name] = rows
    return content
