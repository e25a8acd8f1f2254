"""A store to stream from: saves of exact rows, and what a stream gave of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from cnr_store import RetentionPolicy, Store, TableOptions, collect_garbage
from cnr_store.maintenance.compaction import compact_run
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem

Array = np.ndarray[Any, Any]
Told = list[tuple[int, str, str, list[int]]]
EXACT = TableOptions.exact()


def opened(files: IsolatedMemoryFileSystem, on_call: Callable[[Call], None] | None = None) -> tuple[Any, Store]:
    fs = FaultyFileSystem(files, on_call=on_call)
    return fs, Store.open_on(storage_from_filesystem(fs, "/root"), threads=1)


def begin(store: Store, rows: int = 8, table: str = "t", *, options: TableOptions = EXACT, step: int = 10) -> int:
    """A full; returns its version."""
    with store.writer() as writer:
        with writer.begin(step, "baseline") as txn:
            txn.write_table(table, np.zeros((rows, 2), np.float32), options=options)
        return writer.head.record.v


def save(store: Store, *saves: Any, table: str = "t", step: int = 20) -> list[int]:
    """A delta for each list of rows, or for what a function does to a transaction; returns their versions."""
    versions = []
    with store.writer() as writer:
        writer.restore()
        for number, rows in enumerate(saves):
            with writer.begin(step + number) as txn:
                if callable(rows):
                    rows(txn)
                else:
                    values = np.full((len(rows), 2), step + number, np.float32)
                    txn.write_rows(table, np.asarray(rows, np.int64), values)
            versions.append(writer.head.record.v)
    return versions


def told(batches: Iterator[pa.RecordBatch] | Sequence[pa.RecordBatch]) -> Told:
    """Version, table, kind and row ids, joined where they are cut into batches."""
    found: Told = []
    for batch in batches:
        rows = zip(batch["op"].to_pylist(), batch["row_id"].to_pylist(), strict=True)
        for op, row in rows:
            key = (batch["version"][0].as_py(), batch["table"][0].as_py(), op)
            if not found or found[-1][:3] != key:
                found.append((*key, []))
            found[-1][3].append(row)
    return found


def expire(store: Store, keep_last: int = 1) -> None:
    collect_garbage(store, policy=RetentionPolicy(keep_last), grace_s=0, orphan_age_s=0, dry_run=False, force=True)


def compact_all(store: Store) -> None:
    compact_run(store, run=(0, len(store.head().record.chain)), force=True)
