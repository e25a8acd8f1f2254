"""What a save and a load cost: the store against what people use today, on a disk and on SeaweedFS behind a link.

``python tests/benchmarks/bench_cost.py [--sections peers,chain,tracking] [--places disk,1,10,free]
[--model mlperf/adam ...] [--quick]``: four tables, 1,000,000 x 64 fp32 in all, row-wise Adagrad, or models, and a
small dense network. Every round each peer saves the same
tensors once and loads them; each quality of the store writes a baseline, restores it, writes deltas of 1, 10 and
25 % touched rows and restores the chain. Rounds run in alternating order; all ratios are between values of one round.

What is loaded is compared with what was saved, every time: bit for bit, or within half a step of the lattice.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import bench_tracking
import chains
import harness
from drifting import DIM
from models import MODELS, BenchModel, add_model_option, chosen_models, equal_tables
from peers import FULL_PEERS, Cnr, Peer, Wait, assert_same
from places import PLACES_HELP, Place, chosen_places, local_disk
from run_config import demo_config
from trainee import Trainee

from cnr_store.types import AffineBits

OF_MODELS = ("peers", "chain")
SECTIONS = (*OF_MODELS, "tracking")
PLACES = ("disk", "1", "10", "free")
"""``free`` is SeaweedFS without a link: what two cores can do when they run client and server."""
QUALITIES: tuple[AffineBits | None, ...] = (2, 4, 8, None)
SHARES = (0.01, 0.10, 0.25)
GB = 1e9


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    model: BenchModel
    repeats: int
    places: str
    qualities: tuple[AffineBits | None, ...]
    chain_deltas: tuple[int, ...]
    steps: int


FULL = Size(equal_tables(1_000_000, DIM), 3, ",".join(PLACES), QUALITIES, (1, 4, 16, 63), 1500)
QUICK = Size(equal_tables(40_000, DIM), 1, "disk,1", (8, None), (1, 8), 60)
"""The longest chain has 64 segments, the baseline included; then the writer writes a baseline by itself."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one save or load cost; a load has no stall but itself."""

    stall_s: float
    done_s: float
    stall_cpu_s: float
    cpu_s: float
    peak_bytes: int
    size_bytes: int = 0


@dataclass(slots=True)
class Costs:
    """All rounds at one place, by what was done, in the order in which it was first done."""

    trainee_bytes: int
    saves: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))
    loads: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))
    touched: dict[str, float] = field(default_factory=dict)
    """Share of the rows that a save was to bring up to date."""


def measured(work: Callable[[], Wait | None]) -> Cost:
    """Time a save or a load; the disk is synced before, so that nobody pays for another's dirty pages."""
    os.sync()
    peak = harness.PeakMemory()
    cpu, wall = time.process_time(), time.perf_counter()
    wait = work()
    stall_s, stall_cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    if wait is not None:
        wait()
    return Cost(
        stall_s, time.perf_counter() - wall, stall_cpu_s, time.process_time() - cpu, max(0, peak.beyond_bytes)
    )  # fmt: skip


# ---- the peers


def give_memory_back() -> None:
    """Return freed memory to the system: what the one before has left is no part of the next one's peak."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def run_full_peer(make: Callable[[], Peer], place: Place, trainee: Trainee, costs: Costs) -> None:
    """One round of a peer that writes everything at each save: a save, a load."""
    trainee.start_again()
    peer = make()
    peer.open(place, trainee)
    try:
        expected = trainee.copy()
        _keep(costs.saves[peer.name], measured(peer.save), peer.size_bytes)
        costs.touched[peer.name] = 1.0
        if peer.loads:
            trainee.forget()
            _keep(costs.loads[peer.name], measured(peer.load), peer.size_bytes)
            assert_same(expected, trainee.tensors)
    finally:
        peer.close()


def run_store(make: Callable[[], Cnr], place: Place, trainee: Trainee, costs: Costs, shares: Sequence[float]) -> None:
    """One round of a store: full, restored; then deltas, behind one that warms up the buffers, and restored again."""
    trainee.start_again()
    store = make()
    store.open(place, trainee)
    try:
        _save(store, costs, f"{store.name}, full", 1.0)
        if not shares:
            return
        _load(store, costs, f"{store.name}, full")
        store.touch(max(shares))
        store.save()()
        for share in shares:
            store.touch(share)
            _save(store, costs, f"{store.name}, {share:.0%} touched", share)
        _load(store, costs, f"{store.name}, full + {1 + len(shares)} deltas")
    finally:
        store.close()


def _save(store: Cnr, costs: Costs, name: str, share: float) -> None:
    before = store.size_bytes
    cost = measured(store.save)
    _keep(costs.saves[name], cost, store.size_bytes - before)
    costs.touched[name] = share


def _load(store: Cnr, costs: Costs, name: str) -> None:
    expected = store.trainee.copy()
    store.leave()
    store.trainee.forget()
    _keep(costs.loads[name], measured(store.load), store.size_bytes)
    assert_same(expected, store.trainee.tensors, store.bounds())


def _keep(kept: list[Cost], cost: Cost, size_bytes: int) -> None:
    kept.append(replace(cost, size_bytes=size_bytes))


def measure_peers(report: harness.Report, place: Place, trainee: Trainee, size: Size) -> Costs:
    """Run every peer and every quality of the store in rounds of alternating order, and report."""
    _warm_up(place)
    stores = [(partial(Cnr, bits), SHARES) for bits in size.qualities] + [(partial(Cnr, 8, reads_live=True), ())]
    costs = Costs(trainee.size_bytes)
    turns: list[Callable[[], None]] = [partial(run_full_peer, make, place, trainee, costs) for make in FULL_PEERS]
    turns += [partial(run_store, make, place, trainee, costs, shares) for make, shares in stores]
    for number in range(size.repeats):
        for turn in turns[:: 1 if number % 2 == 0 else -1]:
            give_memory_back()
            turn()
    report_place(report, place.name, costs)
    return costs


def _warm_up(place: Place) -> None:
    """Have everybody save a tiny model: imports, compiled code and connections are there from then on."""
    tiny = Trainee(1024)
    for make in FULL_PEERS:
        run_full_peer(make, place, tiny, Costs(tiny.size_bytes))
    for bits in (8, None):
        run_store(partial(Cnr, bits), place, tiny, Costs(tiny.size_bytes), SHARES[:1])


# ---- the report

SAVE_COLUMNS = (
    "saved by", "MB", "stall s", "committed s", "CPU s", "of it behind the training", "CPU s per GB of model",
    "CPU s per GB of touched rows", "peak MB",
)  # fmt: skip
LOAD_COLUMNS = ("loaded from", "MB stored", "s", "CPU s", "CPU s per GB of model", "peak MB")
NOTE = (
    "Medians (lowest to highest round); touched rows are all rows for who writes all of them. On the disk everybody "
    "fsyncs. torch.save and safetensors send a file with s3fs, in parallel parts; dcp writes through fsspec, zarr "
    "through its FsspecStore. CPU is that of the training process: servers and links have their own. Peak: resident "
    "memory beyond what there was before; a mapped file counts, but not what is kept from save to save: the copy of "
    "the kept stager, the store's buffers for the touched rows, and its mirror of 2 bytes per element (4 if exact)."
)


def report_place(report: harness.Report, where: str, costs: Costs) -> None:
    """Add the two tables of a place, its ratios and its plots."""
    gigabytes = costs.trainee_bytes / GB
    rows: list[list[harness.Cell]] = []
    for name, kept in costs.saves.items():
        cpu_s = median(kept, "cpu_s")
        rows.append([
            name, median(kept, "size_bytes") / 1e6, _spread(kept, "stall_s"), _spread(kept, "done_s"), cpu_s,
            max(0.0, cpu_s - median(kept, "stall_cpu_s")), cpu_s / gigabytes,
            cpu_s / gigabytes / costs.touched[name], max(one.peak_bytes for one in kept) / 1e6,
        ])  # fmt: skip
        report.timings(f"{where}: save, {name}", harness.Timings(*_columns(kept, "done_s", "cpu_s")))
        report.timings(f"{where}: stall, {name}", harness.Timings(*_columns(kept, "stall_s", "stall_cpu_s")))
    report.table(f"Saves, {where}: {gigabytes:.3f} GB of tensors", SAVE_COLUMNS, rows, NOTE)
    rows = []
    for name, kept in costs.loads.items():
        cpu_s = median(kept, "cpu_s")
        rows.append([
            name, median(kept, "size_bytes") / 1e6, _spread(kept, "done_s"), cpu_s, cpu_s / gigabytes,
            max(one.peak_bytes for one in kept) / 1e6,
        ])  # fmt: skip
        report.timings(f"{where}: load, {name}", harness.Timings(*_columns(kept, "done_s", "cpu_s")))
    report.table(f"Loads into the live tensors, {where}", LOAD_COLUMNS, rows)
    up, down = (_fastest(kept) for kept in (costs.saves, costs.loads))
    report.note(f"      the fastest of those who move fp32 saved {up:.0f} MB/s and loaded {down:.0f} MB/s")
    _report_ratios(report, where, costs)
    for what, title in (("done_s", "until it is committed"), ("stall_s", "for which the training waits")):
        _plot_shares(report, where, costs, what, title)


def _report_ratios(report: harness.Report, where: str, costs: Costs) -> None:
    """Add the store's ratios to peers, round by round."""
    for bits in (4, 8):
        full, delta = f"cnr_store, {bits}-bit, full", f"cnr_store, {bits}-bit, 10% touched"
        if delta not in costs.saves:
            continue
        loads = {name: kept for name, kept in costs.loads.items() if name.startswith(full)}
        found = []
        for what, mine, peer, theirs, column in (
            ("full, committed", costs.saves[full], "torch.save", costs.saves, "done_s"),
            ("10 % touched, bytes", costs.saves[delta], "torch.save", costs.saves, "size_bytes"),
            ("10 % touched, stall", costs.saves[delta], "torch.save", costs.saves, "stall_s"),
            ("10 % touched, stall", costs.saves[delta], "dcp.async_save, kept stager", costs.saves, "stall_s"),
            ("10 % touched, committed", costs.saves[delta], "torch.save", costs.saves, "done_s"),
            ("10 % touched, committed", costs.saves[delta], "dcp.async_save, kept stager", costs.saves, "done_s"),
            ("10 % touched, CPU", costs.saves[delta], "torch.save", costs.saves, "cpu_s"),
            ("restore of full", loads[full], "safetensors", costs.loads, "done_s"),
            ("restore of full + 4 deltas", loads[f"{full} + 4 deltas"], "safetensors", costs.loads, "done_s"),
        ):
            pairs = zip(mine, theirs[peer], strict=True)
            low, middle, high = harness.spread([getattr(a, column) / getattr(b, column) for a, b in pairs])
            report.add(f"{where}, {bits}-bit, {what} / {peer}", middle, low=low, high=high)
            found.append(middle)
        if bits == 4:
            _, _, stall, _, committed, _, _, restored, _ = (harness.shown(ratio) for ratio in found)
            report.headline(
                f"a save of 10 % touched rows at 4-bit quality, {where}, against `torch.save`: stall, until committed; "
                "a restore of all rows against safetensors",
                f"{stall}x, {committed}x; {restored}x", "", "python tests/benchmarks/bench_cost.py",
            )  # fmt: skip


def _plot_shares(report: harness.Report, where: str, costs: Costs, what: str, title: str) -> None:
    """Add seconds by touched rows; who writes all of them is a flat line."""
    series: dict[str, harness.Series] = {}
    stores: dict[str, list[str]] = {}
    for name, kept in costs.saves.items():
        if name in {peer.name for peer in FULL_PEERS}:
            series[name] = _series([100 * SHARES[0], 100.0], [kept, kept], what)
        else:
            stores.setdefault(name.rpartition(", ")[0], []).append(name)
    for store, names in stores.items():
        names.sort(key=costs.touched.__getitem__)
        if len(names) > 1:
            shares = [100 * costs.touched[name] for name in names]
            series[store] = _series(shares, [costs.saves[name] for name in names], what)
    report.plot(
        f"{harness.slug(where)}-{what}", f"Seconds {title}, {where}", "rows touched, %", "s", series,
        log_x=True, log_y=True,
    )  # fmt: skip


def _series(x: Sequence[float], costs: Sequence[Sequence[Cost]], what: str) -> harness.Series:
    spreads = [harness.spread([getattr(one, what) for one in kept]) for kept in costs]
    return harness.Series(x, [one[1] for one in spreads], [one[0] for one in spreads], [one[2] for one in spreads])


def _fastest(costs: dict[str, list[Cost]]) -> float:
    """Return the megabytes per second of the fastest peer's fastest round."""
    kept = [cost for peer in FULL_PEERS for cost in costs.get(peer.name, ())]
    return max(cost.size_bytes / cost.done_s for cost in kept) / 1e6


def median(kept: Sequence[Cost], what: str) -> float:
    return float(statistics.median(getattr(one, what) for one in kept))


def _spread(kept: Sequence[Cost], what: str) -> str:
    low, middle, high = harness.spread([getattr(one, what) for one in kept])
    return f"{harness.shown(middle)} ({harness.shown(low)} to {harness.shown(high)})"


def _columns(kept: Sequence[Cost], *names: str) -> list[list[float]]:
    return [[getattr(one, name) for one in kept] for name in names]


# ---- sections


def run_peers(report: harness.Report, folder: Path, size: Size) -> None:
    """Everybody, at each place."""
    trainee = Trainee(size.model)
    for place in chosen_places(size.places.split(","), str(folder)):
        measure_peers(report, _of_model(place, size), trainee, size)


def run_chain(report: harness.Report, folder: Path, size: Size) -> None:
    """Restores of ever longer chains, with and without compaction between the deltas."""
    place = _of_model(local_disk(folder), size)
    chains.measure(report, place, Trainee(size.model), size.chain_deltas, size.repeats)


def _of_model(place: Place, size: Size) -> Place:
    """Return the place under a name that says which preset is measured there."""
    return replace(place, name=f"{size.model.name}, {place.name}") if size.model.name in MODELS else place


def run_tracking(report: harness.Report, folder: Path, size: Size) -> None:
    """The share of a training step that tracking takes: the steps of `bench_tracking`."""
    bench_tracking.bench_steps(
        report, "demo's DLRM", demo_config(), size.steps, bench_tracking.SHARE_OF_STEP
    )  # fmt: skip


def main() -> None:
    """Measure."""
    parser = harness.arguments(__doc__, rows=1_000_000, repeats=FULL.repeats)
    add_model_option(parser)
    parser.add_argument("--sections", help=f"of {', '.join(SECTIONS)}; with a model {', '.join(OF_MODELS)} by default")
    parser.add_argument("--places", help=PLACES_HELP)
    options = parser.parse_args()
    sections = (options.sections or ",".join(OF_MODELS if options.model else SECTIONS)).split(",")
    size = QUICK if options.quick else replace(FULL, model=equal_tables(options.rows, DIM), repeats=options.repeats)
    size = replace(size, places=options.places or size.places)
    if not set(sections) <= set(SECTIONS) or not set(size.places.split(",")) <= set(PLACES):
        parser.error(f"sections are {', '.join(SECTIONS)}; places are {', '.join(PLACES)}")
    models = chosen_models(options) or [size.model]
    sizes = ", ".join(f"{model.name}, {model.elements:,} fp32" for model in models)
    report = harness.Report(f"cost of saves and loads: {sizes}")
    report.start()
    gc.freeze()  # what imports have made is not looked through ahead of each measurement
    for model, name in product(models, sections):
        with harness.data_folder(options.folder) as folder:
            run = {"peers": run_peers, "chain": run_chain, "tracking": run_tracking}[name]
            run(report, folder, replace(size, model=model))
    report.finish(options.json)


if __name__ == "__main__":
    main()
