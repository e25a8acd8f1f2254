"""What garbage collection asks of storage: a store of 1,000 segments and 100,000 objects, all but the newest to go.

``python tests/benchmarks/bench_gc.py``: requests by kind, time and peak memory of a dry run, of the run that gives the
segments up, of those that explain and delete what is due, and of one that finds nothing to do. Objects are tiny local
files that are not fsynced; requests are counted at the storage, a listing of a folder as one, and deletions by object.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field

import harness
import numpy as np
from counting import REQUESTS, CountingStorage

from cnr_store import GcReport, RetentionPolicy, Store, TableOptions, collect_garbage
from cnr_store.format.layout import DATA, segment_key
from cnr_store.storage.local import LocalStorage

SEGMENTS, OBJECTS = 1000, 100_000
DAY_MS = 86_400_000


def build(storage: LocalStorage, segments: int, objects: int) -> int:
    """Make baselines, each filled up with objects as a large table would have them; returns the objects."""
    store = Store.create_on(storage)
    with store.writer() as writer:
        for step in range(segments):
            with writer.begin(step, "baseline") as txn:
                txn.write_table("t", np.full((4, 2), step, np.float32), options=TableOptions(scale=1.0))
    present = sum(1 for _ in storage.list_objects(DATA))
    more = -(-(objects - present) // segments)
    for name in storage.list_folders(DATA):
        for number in range(more):
            storage.put(segment_key(name, f"r00000-12345678/t/c/{number}"), b"x")
    return present + more * segments


@dataclass(slots=True)
class Runs:
    """Collections of one store, and what each asked for."""

    storage: CountingStorage
    rows: list[tuple[harness.Cell, ...]] = field(default_factory=list)

    def measure(self, name: str, *, dry_run: bool, now_ms: int) -> GcReport:
        """Run one collection and keep what it asked for."""
        store = Store.open_on(self.storage)
        self.storage.take()
        started = time.perf_counter()
        report = collect_garbage(store, policy=RetentionPolicy(keep_last=1), dry_run=dry_run, clock_ms=lambda: now_ms)
        found = self.storage.take()
        counts = tuple(found[kind] for kind in REQUESTS)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        self.rows.append((
            name, time.perf_counter() - started, *counts, report.outcome, report.marked, report.deleted_segments,
            report.deleted_objects, peak_mib,
        ))  # fmt: skip
        return report


def main() -> None:
    parser = harness.arguments(__doc__, rows=OBJECTS, repeats=1)
    options = parser.parse_args()
    segments = SEGMENTS // 20 if options.quick else SEGMENTS
    report = harness.Report("garbage collection: requests, by object where objects are deleted")
    report.start()
    with harness.data_folder(options.folder) as folder:
        objects = build(LocalStorage(str(folder), fsync=False), segments, options.rows // (20 if options.quick else 1))
        report.note(f"{segments:,} segments, {objects:,} objects")
        runs = Runs(CountingStorage(str(folder)))
        now_ms = time.time_ns() // 1_000_000
        later_ms = now_ms + 2 * DAY_MS
        runs.measure("dry run", dry_run=True, now_ms=now_ms)
        runs.measure("give up", dry_run=False, now_ms=now_ms)
        due = runs.measure("dry run when due", dry_run=True, now_ms=later_ms)
        assert sum(segment.state == "due" for segment in due.segments) == segments - 1
        done = runs.measure("delete", dry_run=False, now_ms=later_ms)
        assert done.deleted_segments == segments - 1
        lists = int(runs.rows[-1][2] or 0)
        assert runs.measure("nothing to do", dry_run=False, now_ms=later_ms).outcome == "clean"
    columns = ("run", "seconds", *REQUESTS, "outcome", "given up", "segments gone", "objects gone", "peak, MiB")
    report.table("requests of each run", columns, runs.rows)
    report.add("listings of the run that deletes / segments", lists / segments, goal=1.0 + 20 / segments)
    report.finish(options.json)


if __name__ == "__main__":
    main()
