"""What serving costs: publish to served, lookups while deltas are applied, apply speed, memory, torn reads.

``python tests/benchmarks/bench_serving.py [--sections latency,news,fanout,lookups,apply,memory,torn] [--quick]``:
deltas of 1 % of 5,000,000 x 64 rows, 8-bit quality. Everything that was written is in the page cache: what is measured
is the way from there to a lookup, and no disk. Writers and readers are processes of their own on one machine with one
monotonic clock; where cores are few they take them from each other.

``--model``: models are served instead, each beside one table: a delta is applied, and rows of all tables are looked up
at once.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import harness
import many_tables
import numpy as np
import numpy.typing as npt
from drifting import DIM, TABLE, decompress, stored_bytes
from freshness import measure_fanout, measure_latency, measure_news
from many_tables import LOOKUP_ROWS, LOOKUPS, Side
from models import add_model_option
from numba import njit
from partners import Partner, Told
from serving_stores import BITS, DELTA_SHARE, FULL, QUICK, STEP_CHANGED, STEP_TABLES, Size, write_deltas

from cnr_store import Store
from cnr_store.encodings import row_kernels
from cnr_store.format import arrays
from cnr_store.format.layout import segment_key
from cnr_store.format.records import ArrayEntry, RowListEntry
from cnr_store.runtime.threads import Workers
from cnr_store.segment.reader import SegmentReader
from cnr_store.serving import AttachedTables, Loader, LoaderOptions, LoaderProcess
from cnr_store.serving.rows.served_table import KeptAs, row_kind
from cnr_store.serving.rows.views import Publisher
from cnr_store.serving.update.applying import apply_segment
from cnr_store.serving.update.loading import load_table

SECTIONS = ("latency", "news", "fanout", "lookups", "apply", "memory", "torn")
STORES = str(Path(__file__).parent / "serving_stores.py")

GOAL_LOOKUPS, GOAL_APPLY_MBS, GOAL_BARE, GOAL_SPARE_MIB = 1.5, 300.0, 0.7, 256.0

UPDATING, IDLE, BESIDE = "updating", "idle", "another program computes"
TORN_LONGEST_S = 60.0
SWITCH_S = 0.0001
TORN_THREADS, TORN_PROCESSES, TORN_IDS = 4, 2, 16


def main() -> None:
    parser = harness.arguments(__doc__, rows=FULL.rows, repeats=FULL.rounds)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    add_model_option(parser, instead=True)
    options = parser.parse_args()
    if options.model:
        works = {
            "a delta applied": (Side.stand_at_baseline, Side.apply),
            f"{LOOKUPS} lookups of {LOOKUP_ROWS} rows": (Side.nothing, Side.look_up),
        }
        many_tables.run(options, "serving", works, deltas=1, share=DELTA_SHARE, bits=BITS)
        return
    chosen = options.sections.split(",")
    if not set(chosen) <= set(SECTIONS):
        parser.error(f"sections are {', '.join(SECTIONS)}")
    size = QUICK if options.quick else replace(FULL, rows=options.rows, rounds=options.repeats)
    report = harness.Report(
        f"serving: deltas of {DELTA_SHARE:.0%} of {size.rows:,} x {DIM} fp32 at {BITS} bits, all in the page cache"
    )
    report.start()
    measures = {
        "latency": measure_latency, "news": measure_news, "fanout": measure_fanout, "lookups": measure_lookups,
        "apply": measure_apply, "memory": measure_memory, "torn": measure_torn,
    }  # fmt: skip
    for section in chosen:
        report.note(f"\n{section}")
        with harness.data_folder(options.folder) as folder:
            measures[section](report, folder, size)
    report.finish(options.json)


# ---- lookups while deltas are applied


def measure_lookups(report: harness.Report, folder: Path, size: Size) -> None:
    """Lookups in turns: idle, while deltas are applied one after the other, and while another program computes.

    By threads of the loader's process, of another process, and of the one that opened a `LoaderProcess`.
    """
    url = str(folder / "store")
    versions = write_deltas(url, size.rows, size.rounds * size.round_deltas)
    steps = Steps(url, versions)
    # A serving machine leaves a core to its lookups; without that, threads wait for cores, which is not measured here.
    core, *rest = sorted(os.sched_getaffinity(0))
    threads = max(1, len(rest))
    report.note(f"      lookups have a core of their own; the loader decodes on {threads} other(s)")
    if rest:
        os.sched_setaffinity(0, rest)  # threads and processes that are started from here on have it too
    with Partner(__file__, "compute") as neighbour:
        with steps.loader(threads=threads) as loader:
            with TimedLookups(lambda ids: loader.lookup_many({TABLE: ids}), size.rows, core) as timed:
                phases = _alternate(loader, steps, size, neighbour)
            _report_lookups(report, "in process", timed.samples, phases)
        with (
            harness.data_folder("/dev/shm") as shared,
            steps.loader(threads=threads, shared=shared) as loader,
            Partner(__file__, "look_up_attached", folder=str(shared), rows=size.rows, core=core) as reader,
        ):
            reader.hear()
            phases = _alternate(loader, steps, size, neighbour)
            reader.say()
            samples = np.array(reader.hear()["samples"])
            _report_lookups(report, "shared memory, another process", samples, phases)
        with harness.data_folder("/dev/shm") as shared, steps.apart(threads=threads, shared=shared) as apart:
            with TimedLookups(lambda ids: apart.lookup_many({TABLE: ids}), size.rows, core) as timed:
                phases = _alternate(apart, steps, size, neighbour)
            _report_lookups(report, "in the process that opened a LoaderProcess", timed.samples, phases)
    os.sched_setaffinity(0, [core, *rest])


class Steps:
    """A store whose versions a loader is taken through one by one."""

    def __init__(self, url: str, versions: Sequence[int]) -> None:
        self.url, self.versions = url, versions

    def loader(self, options: LoaderOptions = LoaderOptions(), **arguments: Any) -> Loader:  # noqa: B008 (frozen)
        """Return a loader that stands at the first version."""
        return Loader(self.url, options=options, version=self.versions[0], **arguments)

    def apart(self, **arguments: Any) -> LoaderProcess:
        """Return one in a process of its own."""
        return LoaderProcess(self.url, version=self.versions[0], **arguments)

    def move(self, loader: Loader | LoaderProcess, version: int) -> None:
        """Have the loader apply what leads to ``version``."""
        loader.pin(version)
        assert loader.version == version


@dataclass(slots=True)
class TimedLookups:
    """Looks up random rows on a thread while it is open.

    Keeps when each lookup began, and how long it took and waited for a core.
    """

    look_up: Callable[[npt.NDArray[np.int64]], object]
    rows: int
    core: int
    _found: list[tuple[float, float, float]] = field(default_factory=list)
    _ends: bool = False
    _thread: threading.Thread | None = None

    def __enter__(self) -> TimedLookups:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        os.sched_setaffinity(0, [self.core])
        chosen = np.random.default_rng(5).integers(0, self.rows, (256, LOOKUP_ROWS))
        count = 0
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as scheduled:
            while not self._ends:
                ids = chosen[count % len(chosen)]
                waited = _waited_s(scheduled.fileno())
                began = time.monotonic()
                self.look_up(ids)
                took = time.monotonic() - began
                self._found.append((began, took, _waited_s(scheduled.fileno()) - waited))
                count += 1

    @property
    def samples(self) -> npt.NDArray[np.float64]:
        """(count, 3): monotonic time at the beginning, seconds, and those of them that its thread waited for a core."""
        return np.array(self._found)


def _waited_s(schedstat: int) -> float:
    """Return how long a thread could have run and did not, because other work had the cores."""
    return int(os.pread(schedstat, 100, 0).split()[1]) / 1e9


def compute(told: Told) -> None:
    """A program that has nothing to do with lookups but the machine: computes from one order to the next."""
    sums, terms = np.zeros(1 << 21, np.float32), np.ones(1 << 21, np.float32)
    while True:
        told.order()
        while not told.has_order:
            np.add(sums, terms, out=sums)
        told.order()


def look_up_attached(told: Told, folder: str, rows: int, core: int) -> None:
    """The reader process: attach, look up until an order comes, tell the samples."""
    tables = AttachedTables(folder)
    with TimedLookups(lambda ids: tables.lookup_many({TABLE: ids}), rows, core) as timed:
        told.tell(ready=True)
        told.order()
    told.tell(samples=timed.samples.tolist())


Phase = tuple[str, float, float]
"""What is done beside the lookups, from when, until when."""


def _alternate(loader: Loader | LoaderProcess, steps: Steps, size: Size, neighbour: Partner) -> list[Phase]:
    """Apply deltas in some phases; in as long ones do nothing, or let the neighbour compute."""
    phases: list[Phase] = []
    first, *versions = steps.versions
    for version in (versions[0], first):  # loads compiled code, and the lookups meanwhile pages
        steps.move(loader, version)
    time.sleep(0.5)
    for number in range(size.rounds):
        began = time.monotonic()
        for version in versions[number * size.round_deltas :][: size.round_deltas]:
            steps.move(loader, version)
        stop = time.monotonic()
        phases.append((UPDATING, began, stop))
        time.sleep(0.2)  # the last overlay is merged when nothing else is to do
        for kind in (IDLE, BESIDE):
            if kind == BESIDE:
                neighbour.say()
                time.sleep(0.05)
            start = time.monotonic()
            time.sleep(stop - began)
            phases.append((kind, start, time.monotonic()))
        neighbour.say()
        time.sleep(0.05)
    return phases


def _report_lookups(
    report: harness.Report, where: str, samples: npt.NDArray[np.float64], phases: Sequence[Phase]
) -> None:
    found: dict[str, list[npt.NDArray[np.float64]]] = {
        kind: [
            samples[(samples[:, 0] >= start) & (samples[:, 0] < stop), 1:] for one, start, stop in phases if one == kind
        ]
        for kind in (UPDATING, IDLE, BESIDE)
    }
    if not all(len(one) for rounds in found.values() for one in rounds):
        report.note(f"      {where}: no delta took as long as a lookup; take more rows")
        return
    # Less waits: beside other work a lookup also waits for a core. The last line is about what two cores share.
    for what, share, goal, less_waits, reference in (
        ("p50, updating / idle", 0.5, None, 0, IDLE),
        ("p99, updating / idle", 0.99, GOAL_LOOKUPS, 0, IDLE),
        ("p99 less waits for a core, updating / idle", 0.99, None, 1, IDLE),
        ("p99 less waits for a core, updating / another program computes", 0.99, None, 1, BESIDE),
    ):
        sides = [[one[:, 0] - less_waits * one[:, 1] for one in found[kind]] for kind in (UPDATING, reference)]
        ratios = [float(np.quantile(a, share) / np.quantile(b, share)) for a, b in zip(*sides, strict=True)]
        both = [float(np.quantile(np.concatenate(side), share)) for side in sides]
        name = f"lookups of {LOOKUP_ROWS} rows, {where}: {what}"
        report.add(name, both[0] / both[1], goal=goal, low=min(ratios), high=max(ratios))
        report.note(f"      {1e6 * both[0]:.0f} us against {1e6 * both[1]:.0f} us")
    counts = [sum(len(one) for one in rounds) for rounds in found.values()]
    report.note(f"      {counts[0]:,} lookups while deltas were applied, {counts[1]:,} idle, {counts[2]:,} beside")


# ---- apply


def measure_apply(report: harness.Report, folder: Path, size: Size) -> None:
    """Deltas put into a loaded table, one thread, against reading, decoding and scattering the same files bare."""
    url = str(folder / "store")
    versions = write_deltas(url, size.rows, size.applied + 1)
    steps = Steps(url, versions)
    for kept_as in get_args(KeptAs):
        with steps.loader(LoaderOptions(kept_as=kept_as), threads=1) as loader, closing(Workers(1)) as workers:
            bare = Bare(url, versions[0], kept_as)
            segments = Segments(loader.store, versions[0], kept_as, workers)
            steps.move(loader, versions[1])
            segments.opened(versions[1])()
            bare.apply(versions[1])  # compiled code and pages are there from here on
            times = {name: harness.Timings([], []) for name in ("segment", "loader", "bare")}
            for version in versions[2:]:
                sides = {
                    "segment": segments.opened(version), "loader": partial(steps.move, loader, version),
                    "bare": partial(bare.apply, version),
                }  # fmt: skip
                for name, work in sides.items():
                    cpu = time.process_time()
                    times[name].wall.append(harness.timed(work))
                    times[name].cpu.append(time.process_time() - cpu)
            ids = np.arange(0, size.rows, 97)
            if not np.array_equal(loader.lookup(TABLE, ids), bare.values(ids)):
                raise SystemExit("the bare loop and the loader hold different values")
        mbs = DELTA_SHARE * size.rows * DIM * 4 / 1e6
        for name, what, goals in (
            ("loader", "loader, all of a move", (GOAL_APPLY_MBS, GOAL_BARE)),
            ("segment", "applied, shown and compacted alone", (None, None)),
        ):
            rates = sorted(mbs / seconds for seconds in times[name].wall)
            report.add(
                f"rows kept as {kept_as}, {what}: fp32 rows per core", float(np.median(rates)), goal=goals[0],
                sense="at least", unit=" MB/s", low=rates[0], high=rates[-1],
            )  # fmt: skip
            ratios = [bare / mine for bare, mine in zip(times["bare"].wall, times[name].wall, strict=True)]
            report.add(
                f"rows kept as {kept_as}, {what}: speed against bare", float(np.median(ratios)), goal=goals[1],
                sense="at least", low=min(ratios), high=max(ratios),
            )  # fmt: skip
            mine, other = (float(np.median(times[side].cpu)) for side in (name, "bare"))
            report.note(
                f"      {times[name]} against {times['bare']} for a delta of {mbs:.1f} MB; by CPU seconds "
                f"{mbs / mine:.0f} MB/s, {other / mine:.2f}x"
            )


class Segments:
    """A table whose deltas are put on it by the library's own functions, one by one, without log and loader."""

    def __init__(self, store: Store, version: int, kept_as: KeptAs, workers: Workers) -> None:
        self._store, self._workers = store, workers
        snapshot = store.snapshot(version)
        kind = row_kind(snapshot.tables[TABLE], None, kept_as)
        self._publisher = Publisher(min_view_s=0.0)
        held = load_table(snapshot.readers, TABLE, kind, workers).base
        self._publisher.publish(version, snapshot.step, {TABLE: held})

    def opened(self, version: int) -> Callable[[], None]:
        """Return what puts the delta of ``version`` on the table; its manifest is read here."""
        reader = SegmentReader.open(self._store.storage, self._store.record(version).chain[-1])
        return partial(self._put, reader, version)

    def _put(self, reader: SegmentReader, version: int) -> None:
        view = self._publisher.newest
        assert view is not None
        applied = apply_segment(reader, view.tables[TABLE], self._workers)
        self._publisher.publish(version, version, {TABLE: applied.overlay})
        self._publisher.merge()


class Bare:
    """A table in memory, and a loop that reads a delta's files, decodes them and adds; it checks nothing."""

    def __init__(self, url: str, version: int, kept_as: str) -> None:
        self._store = Store.open(url, threads=1)
        snapshot = self._store.snapshot(version)
        self._scale = np.float32(snapshot.tables[TABLE].encoding.scale)  # type: ignore[union-attr] # it is a lattice
        self._table: npt.NDArray[Any] = snapshot.table(TABLE).read()
        self._kept_as = kept_as
        if kept_as == "codes":
            self._table = np.rint(self._table / self._scale).astype(np.int16)

    def apply(self, version: int) -> None:
        """Add the delta that made ``version``."""
        reader = self._store.snapshot(version).readers[-1]
        root = (Path(self._store.url) / segment_key(reader.name, "x")).parent
        for part in reader.manifest.parts:
            assert part.add is not None
            entry = part.add.arrays["codes"]
            for index in range(arrays.chunk_count(entry)):
                self._add(root, part.add, index)

    def values(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return rows as float32."""
        rows = self._table[ids]
        return rows if self._kept_as == "values" else rows.astype(np.float32) * self._scale

    def _add(self, root: Path, row_list: RowListEntry, index: int) -> None:
        entry = row_list.arrays["codes"]
        count = min(entry.chunk_rows, row_list.count - index * entry.chunk_rows)
        block = _decode(root, entry, index)[:count]
        rows = _decode(root, row_list.arrays["rows"], index)[:count]
        if self._kept_as == "codes":
            row_kernels.add_codes(self._table, rows, 0, block, 0)
        else:
            add_scaled(self._table, rows, block, self._scale)


@njit(nogil=True, cache=True)
def add_scaled(table: Any, rows: Any, differences: Any, scale: Any) -> None:
    """Move rows held as floats by differences of codes: the least that keeps every bit of the lattice's values."""
    step = np.float32(scale)
    for i in range(len(rows)):
        row = rows[i]
        for j in range(table.shape[1]):
            table[row, j] = step * (np.rint(table[row, j] / step) + np.float32(differences[i, j]))


def _decode(root: Path, entry: ArrayEntry, index: int) -> npt.NDArray[Any]:
    data = stored_bytes(root, entry, index)
    out = np.empty(arrays.chunk_shape(entry), entry.dtype)
    decompress(entry, data, out)
    return out


# ---- memory


def measure_memory(report: harness.Report, folder: Path, size: Size) -> None:
    """Peak memory of a fresh process that loads and applies one delta, beyond the table and the changed rows."""
    url = str(folder / "store")
    versions = write_deltas(url, size.rows, 1)
    for kept_as, width in (("values", 4), ("codes", 2)):
        found = harness.in_fresh_process(__file__, "peak_memory", url=url, versions=versions, kept_as=kept_as)
        table = size.rows * DIM * width / harness.MIB
        changed = DELTA_SHARE * table
        report.add(
            f"{kept_as}: peak {found['peak'] / harness.MIB:.0f} MiB, table {table:.0f}, changed {changed:.0f}: rest",
            found["peak"] / harness.MIB - table - changed, goal=GOAL_SPARE_MIB, unit=" MiB",
        )  # fmt: skip
        report.note(f"      load alone: peak {found['loaded'] / harness.MIB:.0f} MiB")


def peak_memory(url: str, versions: list[int], kept_as: str) -> dict[str, int]:
    """Load and apply one delta in this process; returns the peaks beyond what it held before, in bytes."""
    peak = harness.PeakMemory()
    steps = Steps(url, versions)
    with steps.loader(LoaderOptions(kept_as=kept_as)) as loader:
        loaded = peak.beyond_bytes
        loader.lookup(TABLE, np.arange(1000))
        steps.move(loader, versions[1])
        loader.lookup(TABLE, np.arange(1000))
        time.sleep(0.3)  # the overlay is merged
        loader.poll()
        return {"loaded": loaded, "peak": peak.beyond_bytes}


# ---- torn reads


def measure_torn(report: harness.Report, folder: Path, size: Size) -> None:
    """Batches whose rows show their step, by threads and processes, while deltas land as fast as they are written."""
    # Threads that do nothing but look up keep the loader's from the interpreter for 5 ms at each of its steps; here
    # versions shall change as often as they can, and threads be interrupted where it hurts.
    sys.setswitchinterval(SWITCH_S)
    url = str(folder / "store")
    with harness.data_folder("/dev/shm") as shared, Partner(STORES, "write_steps", url=url) as writer:
        first = writer.hear()["version"]
        with Loader(url, shared=shared, options=LoaderOptions(poll_interval_s=0.01)) as loader:
            loader.start()
            each = size.torn_lookups // (TORN_THREADS + TORN_PROCESSES)
            readers = [
                Partner(__file__, "look_for_tears", folder=str(shared), lookups=each) for _ in range(TORN_PROCESSES)
            ]
            found: list[dict[str, Any]] = []
            threads = [
                threading.Thread(target=lambda: found.append(tears(loader.lookup_many, each)))
                for _ in range(TORN_THREADS)
            ]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            found += [reader.hear() for reader in readers]
            for thread in threads:
                thread.join()
            seconds = time.monotonic() - began
            for reader in readers:
                reader.__exit__(None, None, None)
            metrics = loader.metrics()
        writer.say()
        while "step" not in (last := writer.hear()):
            pass
    total = sum(one["lookups"] for one in found)
    report.add(f"torn of {total:,} lookups", float(sum(one["torn"] for one in found)), goal=0.0, unit="")
    retries = metrics.retries + sum(one.get("retries", 0) for one in found)
    report.note(
        f"      {total / seconds:,.0f} lookups per second of {2 * TORN_IDS} rows, {TORN_THREADS} threads and "
        f"{TORN_PROCESSES} processes; {last['step']} deltas written in {seconds:.0f} s, {metrics.updates} updates from "
        f"version {first} on, {sum(one['versions'] for one in found)} of them seen; {retries} lookups repeated; "
        f"threads switch every {1e6 * SWITCH_S:.0f} us"
    )
    if not all(one["versions"] > 1 for one in found):
        raise SystemExit(f"a reader saw no version change: {found}")


def look_for_tears(told: Told, folder: str, lookups: int) -> None:
    """A reader process of the torn reads."""
    tables = AttachedTables(folder)
    told.tell(**tears(tables.lookup_many, lookups), retries=tables.retries)


def tears(look_up: Callable[..., Any], lookups: int) -> dict[str, int]:
    """Look up batches of both tables and count those that show another step than they say."""
    chosen = np.random.default_rng().integers(0, STEP_CHANGED, (256, len(STEP_TABLES), TORN_IDS))
    torn = versions = 0
    last = -1
    number, deadline = 0, time.monotonic() + TORN_LONGEST_S
    while number < lookups or (versions < 2 and time.monotonic() < deadline):
        ids = chosen[number % len(chosen)]
        number += 1
        batch = look_up(dict(zip(STEP_TABLES, ids, strict=True)))
        torn += any((batch.rows[table] != batch.step).any() for table in STEP_TABLES)
        versions += batch.version != last
        last = batch.version
    return {"lookups": number, "torn": torn, "versions": versions}


if __name__ == "__main__":
    main()
