"""A training whose store gets compacted, and a look at what lies in a segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cnr_store import Store, TableOptions
from cnr_store.format.layout import MANIFEST, RECEIPT, segment_prefix
from cnr_store.format.manifest import decode_manifest
from cnr_store.format.records import Manifest
from cnr_store.types import Rectangle
from cnr_store.write.writer import Writer

Array = np.ndarray[Any, Any]


@dataclass
class Training:
    """Three exact tables with a slot each, dense tensors and a document; every save is kept to compare with."""

    store: Store
    seed: int = 0
    step: int = 0
    tables: dict[str, Array] = field(default_factory=dict)
    slots: dict[str, Array] = field(default_factory=dict)
    bias: Array = field(default_factory=lambda: np.arange(3.0))

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        for name, rows in (("a", 40), ("b", 9), ("c", 17)):
            self.tables[name] = self.random.standard_normal((rows, 6)).astype(np.float32)
            self.slots[name] = self.random.standard_normal(rows).astype(np.float32)

    def full(self, writer: Writer) -> int:
        with writer.begin(self.step, "baseline") as txn:
            for name, values in self.tables.items():
                txn.write_table(name, values, slots={"m": self.slots[name]}, options=TableOptions.exact())
            txn.put_dense({"bias": self.bias, "weight": np.ones((2, 2), np.float32)})
            txn.put_document("reader/0", {"at": self.step})
        assert txn.version is not None
        return txn.version

    def delta(self, writer: Writer, *, base: Any = "head", before_commit: Callable[[], Any] = lambda: None) -> int:
        self.step += 1
        with writer.begin(self.step, base=base) as txn:
            for name, values in self.tables.items():
                rows = np.flatnonzero(self.random.random(len(values)) < (1.0 if base == "baseline" else 0.3))
                values[rows] = self.random.standard_normal((len(rows), 6)).astype(np.float32)
                self.slots[name][rows] += 1
                txn.write_rows(name, rows, values[rows], slots={"m": self.slots[name][rows]})
            txn.put_document("reader/0", {"at": self.step})
            txn.put_scalars({"loss": self.step / 2})
            before_commit()
        assert txn.version is not None
        return txn.version

    def check(self, store: Store | None = None) -> None:
        """The head is this training, to the bit."""
        snapshot = (store or self.store).snapshot()
        for name, values in self.tables.items():
            assert snapshot.table(name).read().tobytes() == values.tobytes()
            assert snapshot.table(name).read(slot="m").tobytes() == self.slots[name].tobytes()
        assert snapshot.read_dense("bias").tobytes() == self.bias.tobytes()
        assert snapshot.read_document("reader/0") == {"at": self.step}


def write_in_halves_and_resize(store: Store, num_rows: int) -> Array:
    """Save a table of 6 rows, all of them from two parts, and resize it; returns the values before (6, 2)."""
    values, rows = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6)
    halves = [Rectangle((0, 4), (0, 2)), Rectangle((4, 6), (0, 2))]
    with store.writer() as writer, writer.begin(step=0) as txn:
        txn.write_table("t", values, options=TableOptions(scale=1.0))
    with store.writer(shards={"t": halves}) as writer:
        writer.restore()
        with writer.begin(step=1) as txn:
            for half in halves:
                at = rows[slice(*half.rows)]
                txn.write_rows("t", at, values[at] + 1, rectangle=half)
    with store.writer() as writer:
        writer.restore()
        with writer.begin(step=2) as txn:
            txn.resize_table("t", num_rows)
    return values + 1


def objects_in(store: Store, segment: str) -> dict[str, bytes]:
    prefix = segment_prefix(segment)
    listed = [stat.key for stat in store.storage.list_objects(prefix)]
    return {key.removeprefix(prefix): store.storage.read(key) or b"" for key in listed}


def manifest_in(store: Store, segment: str) -> Manifest:
    return decode_manifest(objects_in(store, segment)[MANIFEST], segment)


def content_of(store: Store, segment: str) -> dict[str, bytes]:
    """What the inventory lists: paths and bytes do not depend on who compacted it, or in how many attempts."""
    return {path: data for path, data in objects_in(store, segment).items() if not path.endswith((MANIFEST, RECEIPT))}


def strangers_in(store: Store, segment: str) -> set[str]:
    """Objects of a segment that are neither manifest nor receipt nor in the inventory."""
    return content_of(store, segment).keys() - {entry.path for entry in manifest_in(store, segment).objects}
