"""Stores to damage: a torn record, a flipped bit, and checks afterwards."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cnr_store import Store
from cnr_store.format.layout import commit_key
from cnr_store.format.records import WriterInfo
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import IsolatedMemoryFileSystem

ROOT = "/root"
ROWS, DIM = 12, 2
WRITER = WriterInfo(host="h", lib="l", run_id="r")
IMPATIENT = RetryPolicy(deadline_s=0.05, first_delay_s=0.001, max_delay_s=0.001)


def open_store(files: IsolatedMemoryFileSystem) -> Store:
    return Store.open_on(storage_from_filesystem(files, ROOT), threads=1, retry=IMPATIENT)


def values(step: int) -> npt.NDArray[np.float32]:
    found = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    found[: step // 10] += step
    return found


def path(key: str) -> str:
    return f"{ROOT}/{key}"


def tear(files: IsolatedMemoryFileSystem, version: int, size: int = 60) -> bytes:
    """Write only the beginning of a record, at the position after the newest."""
    data = files.cat_file(path(commit_key(version - 1)))[:size]
    files.pipe_file(path(commit_key(version)), data)
    return bytes(data)


def flip(files: IsolatedMemoryFileSystem, key: str) -> None:
    data = bytearray(files.cat_file(path(key)))
    data[len(data) // 2] ^= 1
    files.pipe_file(path(key), bytes(data))


def chunk_of(store: Store, version: int, name: str = "codes") -> str:
    """The key of a chunk of the last segment of this version."""
    prefix = f"data/{store.record(version).chain[-1].seg}/"
    found: str = next(s.key for s in store.storage.list_objects(prefix) if f".{name}/c." in s.key)
    return found


def contents(files: IsolatedMemoryFileSystem) -> dict[str, bytes]:
    return {name: file.getvalue() for name, file in files.store.items()}
