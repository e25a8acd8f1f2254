"""Stores for the tests of garbage collection, and checks of their content."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cnr_store import GcReport, RetentionPolicy, Store, TableOptions, Writer, collect_garbage
from cnr_store.errors import CorruptRecord, VersionExpired
from cnr_store.format.layout import DATA, DATA_GROUP, MANIFEST, RECEIPT, segment_key, segment_name, segment_prefix
from cnr_store.storage import Storage, storage_from_filesystem
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem

ROWS, DIM = 4, 2
DAY_MS = 86_400_000
LAST = RetentionPolicy(keep_last=1)


def collect(store: Store, keep_last: int = 1, *, batch: int = 1000, **options: Any) -> GcReport:
    """A collection without a grace period, of which a record marks about ``batch`` segments."""
    options = {"policy": RetentionPolicy(keep_last=keep_last), "grace_s": 0.0, "orphan_age_s": 0.0, **options}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cnr_store.maintenance.gc.run._BATCH", batch)
        return collect_garbage(store, **{"dry_run": False, "force": True, **options})


def save(writer: Writer, step: int, *, full: bool = False) -> int:
    with writer.begin(step, kind="baseline" if full else "delta") as txn:
        if full:
            txn.write_table("t", np.full((ROWS, DIM), step, np.float32), options=TableOptions(scale=1.0))
        else:
            txn.write_rows("t", np.array([step % ROWS]), np.full((1, DIM), step, np.float32))
    return writer.head.record.v


def fill(store: Store, steps: int = 6, every: int = 3) -> list[int]:
    """Save checkpoints 1 to ``steps``, every n-th a baseline; return their versions."""
    with store.writer() as writer:
        if store.head().record.chain:
            writer.restore()
        return [save(writer, step, full=(step - 1) % every == 0) for step in range(1, steps + 1)]


def on(fs: Any) -> Storage:
    return storage_from_filesystem(fs, "store")


def again(fs: Any) -> Store:
    """The store, opened again as by another process."""
    return Store.open_on(on(fs))


def listed(store: Store, folder: str = DATA) -> set[str]:
    return {stat.key for stat in store.storage.list_objects(folder) if stat.key != DATA_GROUP}


def contents(store: Store) -> dict[str, bytes | None]:
    return {stat.key: store.storage.read(stat.key) for stat in store.storage.list_objects("")}


def referenced(*stores: Store) -> set[str]:
    """All objects that a live version of these logs needs, by the records and manifests."""
    found: set[str] = set()
    for store in stores:
        for version in range(store.latest_version() + 1):
            try:
                snapshot = store.snapshot(version)
            except (VersionExpired, CorruptRecord):
                continue
            for reader in snapshot.readers:
                paths = [MANIFEST, *(entry.path for entry in reader.manifest.objects)]
                found |= {segment_key(reader.name, path) for path in paths}
                # A writer without objects is named nowhere but in its receipt.
                prefix = segment_prefix(reader.name)
                found |= {key for key in listed(store, prefix) if key.endswith(f".{RECEIPT}") and key.count("/") == 2}
    return found


def live(store: Store) -> list[int]:
    found = []
    for version in range(store.latest_version() + 1):
        try:
            store.snapshot(version)
        except VersionExpired:
            continue
        found.append(version)
    return found


def table(store: Store, **choice: Any) -> list[float]:
    return [float(value) for value in store.snapshot(**choice).table("t").read()[:, 0]]


def states(report: GcReport) -> dict[str, int]:
    counts: dict[str, int] = {}
    for segment in report.segments:
        counts[segment.state] = counts.get(segment.state, 0) + 1
    return counts


def age(fs: IsolatedMemoryFileSystem, days: float, part: str = "") -> None:
    """Set the age of the objects whose path contains ``part``."""
    then = dt.datetime.now(tz=dt.UTC) - dt.timedelta(days=days)
    for path, file in fs.store.items():
        if part in path:
            file.created = file.modified = then


def orphan(store: Store, txn: str = "e" * 32) -> str:
    """The objects of a save that was killed before it wrote its manifest."""
    name = segment_name(store.latest_version(), txn)
    store.storage.put(segment_key(name, "r00000-12345678/t/zarr.json"), b"{}")
    return name


armed = [False]


def is_commit(call: Call) -> bool:
    return call.operation == "create" and "/commits/" in call.path and armed[0]


def once(when: Callable[[Call], bool], action: Callable[[], object]) -> Callable[[Call], None]:
    """Run ``action`` before the first matching call."""
    done: list[Call] = []

    def on_call(call: Call) -> None:
        if not done and when(call):
            done.append(call)
            armed[0] = False
            action()

    return on_call


def racing(fs: IsolatedMemoryFileSystem, action: Callable[[], object]) -> Store:
    """A store where ``action`` runs before, or with, the next record."""
    raced = again(FaultyFileSystem(fs, on_call=once(is_commit, action)))
    armed[0] = True
    return raced


def train(branch: Store, step: int, *, full: bool = False) -> int:
    with branch.writer() as writer:
        writer.restore()
        return save(writer, step, full=full)
