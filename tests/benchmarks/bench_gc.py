"""What garbage collection asks of storage: a store of 1,000 segments and 100,000 objects, all but the newest to go.

``python tests/benchmarks/bench_gc.py``: requests by kind, time and peak memory of a dry run, of the run that gives the
segments up, of those that explain and delete what is due, and of one that finds nothing to do. Objects are tiny local
files that are not fsynced; requests are counted at the storage, a listing of a folder as one, and deletions by object.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import harness
import numpy as np

from cnr_store import GcReport, RetentionPolicy, Store, TableOptions, collect_garbage
from cnr_store.layout import DATA, segment_key
from cnr_store.storage import CreateOutcome
from cnr_store.storage.base import ObjectStat
from cnr_store.storage.local import LocalStorage

SEGMENTS, OBJECTS = 1000, 100_000
DAY_MS = 86_400_000


class CountingStorage(LocalStorage):
    """Local files that count requests as an object store would bill them."""

    def __init__(self, root: str) -> None:
        super().__init__(root, fsync=False)
        self.counts: Counter[str] = Counter()

    def read(self, key: str, *, start: int | None = None, stop: int | None = None) -> bytes | None:
        self.counts["get"] += 1
        return super().read(key, start=start, stop=stop)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.counts["put"] += 1
        super().put(key, data)

    def create(self, key: str, data: bytes) -> CreateOutcome:
        self.counts["create"] += 1
        return super().create(key, data)

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        self.counts["list"] += 1
        return super().list_objects(prefix)

    def list_folders(self, prefix: str) -> list[str]:
        self.counts["list"] += 1
        return super().list_folders(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        chosen = list(keys)
        self.counts["delete"] += len(chosen)
        super().delete(chosen)


def build(storage: LocalStorage) -> int:
    """Make full checkpoints, each filled up with objects as a large table would have them; returns the objects."""
    store = Store.create_on(storage)
    with store.writer() as writer:
        for step in range(SEGMENTS):
            with writer.begin(step, "full") as txn:
                txn.write_table("t", np.full((4, 2), step, np.float32), options=TableOptions(scale=1.0))
    present = sum(1 for _ in storage.list_objects(DATA))
    more = -(-(OBJECTS - present) // SEGMENTS)
    for name in storage.list_folders(DATA):
        for number in range(more):
            storage.put(segment_key(name, f"r00000-12345678/t/c/{number}"), b"x")
    return present + more * SEGMENTS


def measure(name: str, storage: CountingStorage, *, dry_run: bool, now_ms: int) -> GcReport:
    """Run one collection and print what it asked for."""
    store = Store.open_on(storage)
    storage.counts.clear()
    started = time.perf_counter()
    report = collect_garbage(store, policy=RetentionPolicy(keep_last=1), dry_run=dry_run, clock_ms=lambda: now_ms)
    elapsed_s = time.perf_counter() - started
    shown = ", ".join(f"{storage.counts[kind]} {kind}" for kind in ("list", "get", "create", "put", "delete"))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name:17}{elapsed_s:7.2f} s  {shown}; {report.outcome}: {report.named} segments given up, "
          f"{report.deleted_segments} of {report.deleted_objects} objects gone; peak {peak_mib:.0f} MiB")  # fmt: skip
    return report


def main() -> None:
    with tempfile.TemporaryDirectory(dir=harness.DATA_FOLDER) as folder:
        print(f"{SEGMENTS} segments, {build(LocalStorage(folder, fsync=False))} objects")
        storage = CountingStorage(folder)
        now_ms = time.time_ns() // 1_000_000
        later_ms = now_ms + 2 * DAY_MS
        measure("dry run", storage, dry_run=True, now_ms=now_ms)
        measure("give up", storage, dry_run=False, now_ms=now_ms)
        due = measure("dry run when due", storage, dry_run=True, now_ms=later_ms)
        assert sum(segment.state == "due" for segment in due.segments) == SEGMENTS - 1
        done = measure("delete", storage, dry_run=False, now_ms=later_ms)
        assert done.deleted_segments == SEGMENTS - 1
        assert storage.counts["list"] < SEGMENTS + 20
        assert measure("nothing to do", storage, dry_run=False, now_ms=later_ms).outcome == "clean"


if __name__ == "__main__":
    main()
