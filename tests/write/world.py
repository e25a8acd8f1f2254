"""A store of three tables in memory, its writer, and rows for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_store import Store, TableOptions, Transaction, Writer
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import FaultyFileSystem, IsolatedMemoryFileSystem

ROWS, DIM = 6, 3
SCALE = 0.5
ROOT = "/root"


def ids(*rows: int) -> Any:
    return np.asarray(rows, np.int64)


def ones(rows: int, dim: int = DIM, dtype: Any = np.float32) -> Any:
    return np.ones((rows, dim), dtype)


def slot(rows: int, value: float = 1) -> dict[str, Any]:
    return {"m": np.full(rows, value, np.float32)}


class World:
    """A store of one lattice table with a slot, an exact one and a hashed one, and its writer."""

    def __init__(self) -> None:
        self.inner = IsolatedMemoryFileSystem()
        self.fs = FaultyFileSystem(self.inner)
        self.store = Store.create_on(storage_from_filesystem(self.fs, ROOT), threads=1)
        self.writer = self.store.writer()
        with self.writer.begin(1) as txn:
            txn.write_table("t", ones(ROWS), slots=slot(ROWS), options=TableOptions(scale=SCALE))
            txn.write_table("exact", ones(ROWS), options=TableOptions.exact())
            txn.create_table("h", dim=DIM, options=TableOptions(scale=SCALE))
            txn.write_rows("h", ids(-7, 9), ones(2))
            txn.put_dense({"w": ones(2)})

    def open(self) -> Store:
        return Store.open_on(storage_from_filesystem(FaultyFileSystem(self.inner), ROOT), threads=1)

    def key(self, key: str) -> str:
        return f"{ROOT}/{key}"

    def read(self, key: str) -> bytes:
        data: bytes = self.inner.cat_file(self.key(key))
        return data

    def write(self, key: str, data: bytes) -> None:
        self.inner.pipe_file(self.key(key), data)


def goes_on(world: World, writer: Writer | None = None) -> None:
    """A good delta commits, and only it is seen."""
    writer = writer or world.writer
    with writer.begin(100) as txn:
        txn.write_rows("t", ids(2), 2 * ones(1), slots=slot(1, 2))
    expected = ones(ROWS)
    expected[2] = 2
    assert np.array_equal(world.open().snapshot().table("t").read(), expected)


def rows_of(txn: Transaction, row_ids: Any, values: Any = None, table: str = "t", **kwargs: Any) -> int:
    values = ones(len(row_ids)) if values is None else values
    kwargs.setdefault("slots", slot(len(row_ids)))
    return txn.write_rows(table, row_ids, values, **kwargs)
