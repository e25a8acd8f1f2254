"""What a save stores beside rows, and how often storage is asked: by what changed, not by how many tables there are.

Metadata is the record, the manifest and receipts: at most 4 kB and 60 bytes for each table that is touched. A commit is
at most 3 sequential round trips: objects, manifest, record. A reader takes at most 12 objects of a delta.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import Store, TableOptions
from cnr_store.format.layout import MANIFEST, commit_key, segment_key
from cnr_store.format.records import ChainEntry
from cnr_store.serving import Loader
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import FaultyFileSystem, IsolatedMemoryFileSystem

ROWS, CHANGED = 12, np.asarray([3, 4, 9])


class Saves:
    """A baseline, then a delta of three rows of ``touched`` tables and of one of the dense tensors."""

    def __init__(self, store: Store, tables: int, touched: int, tensors: int = 0) -> None:
        random = np.random.default_rng(tables)
        self.store, self.touched = store, touched
        self.options = [TableOptions(scale=float(scale)) for scale in random.uniform(0.1, 0.2, tables)]
        self.values = random.standard_normal((tables, ROWS, 4)).astype(np.float32)
        self.dense: dict[str, Any] = {f"layers.{k}.weight": random.standard_normal(8) for k in range(tensors)}
        self.writer = store.writer()

    def baseline(self) -> None:
        with self.writer.begin(step=1) as txn:
            for k, values in enumerate(self.values):
                slots = {"momentum": np.ones(ROWS, np.float32)}
                txn.write_table(f"model.tables.t{k}.weight", values, slots=slots, options=self.options[k])
            txn.put_dense(self.dense)

    def delta(self) -> ChainEntry:
        with self.writer.begin(step=2) as txn:
            for k in range(self.touched):
                rows, slots = self.values[k][CHANGED] + 1, {"momentum": np.full(3, 2, np.float32)}
                txn.write_rows(f"model.tables.t{k}.weight", CHANGED, rows, slots=slots)
            txn.put_dense({name: one + (name == "layers.0.weight") for name, one in self.dense.items()})
        return self.store.head().record.chain[-1]


@pytest.mark.parametrize(
    ("tables", "touched", "tensors"),
    [(26, 26, 0), (300, 300, 0), (1000, 1000, 0), (300, 10, 0), (1000, 10, 0), (300, 0, 0), (26, 10, 400)],
)
def test_metadata_of_a_delta_grows_with_the_tables_that_it_touches(
    tmp_path: Path, tables: int, touched: int, tensors: int
) -> None:
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=1)
    saves = Saves(store, tables, touched, tensors)
    saves.baseline()
    name = saves.delta().seg

    keys = (commit_key(store.head().record.v), segment_key(name, MANIFEST))
    sizes = [len(store.storage.read(key) or b"") for key in keys]

    assert sum(sizes) <= 4000 + 60 * touched, f"record {sizes[0]}, manifest {sizes[1]} bytes"


def stage_of(path: str) -> int:
    """Which round trip of a commit an object belongs to: all of one are put at once, and then the next."""
    return 2 if "/commits/" in path else 1 if path.endswith(MANIFEST) else 0


@pytest.mark.parametrize("tables", [26, 300, 1000])
def test_a_delta_is_three_round_trips_to_write_and_twelve_objects_to_read(tables: int) -> None:
    inner = IsolatedMemoryFileSystem()
    counted = FaultyFileSystem(inner)
    saves = Saves(Store.create_on(storage_from_filesystem(counted, "/root"), threads=1), tables, tables)
    saves.baseline()
    with Loader(saves.store) as loader:
        begin = len(counted.calls)
        entry = saves.delta()
        put = [call.path for call in counted.calls[begin:] if call.operation in ("write", "create")]
        written = [path for path in put if "/hint/" not in path]

        begin = len(counted.calls)
        loader.poll()
        applied = [call.path for call in counted.calls[begin:] if call.operation == "read" and entry.seg in call.path]

        name = f"model.tables.t{tables - 1}.weight"
        assert np.array_equal(loader.lookup(name, CHANGED), saves.store.snapshot().table(name).read()[CHANGED])
    begin = len(counted.calls)
    snapshot = Store.open_on(storage_from_filesystem(counted, "/root"), threads=1).snapshot()
    for table in snapshot.tables:
        snapshot.table(table).load({"codes": None, "slots/momentum": None})
    restored = [call.path for call in counted.calls[begin:] if call.operation == "read" and entry.seg in call.path]

    assert [stage_of(path) for path in written] == sorted(stage_of(path) for path in written)
    assert [stage_of(path) for path in written].count(1) == [stage_of(path) for path in written].count(2) == 1
    assert len(written) == len(set(written)) <= 12
    assert len(applied) == len(set(applied)) <= 12
    assert len(restored) == len(set(restored)) <= 12
