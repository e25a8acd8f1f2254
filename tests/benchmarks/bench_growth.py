"""What grows with what: seconds, bytes, objects, requests and memory by rows, versions, tables and writers.

``python tests/benchmarks/bench_growth.py [--sections rows,versions,tables,places,bags,writers] [--fsync]``. One thing
grows at a time, the rows that a save touches stay the same number. Each section has a table, a plot, and the exponent b
of the fit ``a * n^b`` (least squares of the logarithms): 0 does not grow, 1 grows in proportion. Requests and objects
are counted at the storage. Files are not fsynced unless ``--fsync`` is given: a disk's flush would hide what grows.
``places`` compares many tables with one where a save is durable: on a disk that syncs, and on SeaweedFS.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import harness
import numpy as np
import torch
from counting import REQUESTS, CountingStorage
from growing import DIM, Growing, Trained, shared_saves
from places import PLACES_HELP, chosen_places

from cnr_store.storage import open_storage

SECTIONS = ("rows", "versions", "tables", "places", "bags", "writers")
TOUCHED = 100_000
SAME = 1.2
MANY_TABLES = 1.5
"""Goal of a delta of many tables, against one of as many rows of one table."""
PLACED_TABLES = 300
MANY_STALLED = 2.0
"""Goal of the stall of that delta, through a `CheckpointManager`."""
COMMAND = "python tests/benchmarks/bench_growth.py"


def _counted(folder: Path, name: str, *, fsync: bool) -> CountingStorage:
    return CountingStorage(str(folder / name), fsync=fsync)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return b of the least-squares fit ``values = a * sizes^b``; nan where a value is not positive."""
    if min(values) <= 0:
        return math.nan
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(values, float)), 1)[0])


def budget(arrays: int = 3) -> int:
    """Objects of a segment of any number of tables: rows, codes and one slot, of one chunk each, and two others."""
    return 2 + 2 * arrays


def show_growth(
    report: harness.Report, of: str, sizes: Sequence[int], measured: Mapping[str, Sequence[float]], note: str
) -> dict[str, float]:
    """Add the table, its fits, and a plot of the seconds; returns the exponents by name."""
    fits = {name: exponent(sizes, values) for name, values in measured.items()}
    columns = (of, *(f"{size:,}" for size in sizes), "grows as n^b, b =")
    rows = [(name, *map(float, values), fits[name]) for name, values in measured.items()]
    report.table(f"by {of}", columns, rows, note)
    seconds = {name: harness.Series(sizes, values) for name, values in measured.items() if name.endswith(", s")}
    report.plot(of, f"seconds by {of}", of, "seconds", seconds, log_x=True, log_y=True)
    return fits


def by_rows(report: harness.Report, folder: Path, sizes: Sequence[int], touched: int, repeats: int) -> None:
    """Tables of so many rows, the same number of them touched; each in a fresh process."""
    script = str(Path(__file__).with_name("growing.py"))
    found: list[dict[str, float]] = [
        harness.in_fresh_process(script, "large_table", folder=str(folder), rows=rows, touched=touched, repeats=repeats)
        for rows in sizes
    ]
    measured = {name: [one[name] for one in found] for name in found[0]}
    note = f"fp32 x {DIM} and a row-wise slot, {touched:,} rows touched in each save; the mirror takes 2 bytes a value"
    fits = show_growth(report, "rows", sizes, measured, note)
    largest = sizes[-1] / sizes[0]
    for name in ("save, s", "save, bytes"):
        ratio = measured[name][-1] / measured[name][0]
        report.add(f"{name}: {largest:.0f} times the rows", ratio)
    report.note(f"      a restore reads all rows: b = {fits['restore, s']:.2f}")
    for name in ("peak of saves beyond mirrors, MiB", "peak of reading beyond the target, MiB"):
        report.add(f"{name.removesuffix(', MiB')}, {sizes[-1]:,} rows", measured[name][-1], unit=" MiB")
    report.headline(
        f"a save of {touched:,} rows of {sizes[-1]:,} against one of {sizes[0]:,}",
        f"{measured['save, s'][-1] / measured['save, s'][0]:.2f}x the time, "
        f"{measured['save, bytes'][-1] / measured['save, bytes'][0]:.2f}x the bytes",
        "", COMMAND,
    )  # fmt: skip


def costs(store: Growing, seconds: float, opens: harness.Timings) -> dict[str, float]:
    """Return what the last commit of a store was, and what opening it takes."""
    counts = store.counts
    return {
        "save, s": seconds,
        "open, s": statistics.median(opens.wall),
        "save, bytes": float(store.bytes_of_last()),
        "save, objects": float(store.objects_of_last()),
        "save, requests": float(sum(counts[kind] for kind in REQUESTS)),
        "poll, requests": float(store.requests_of_poll()),
    }


def by_versions(
    report: harness.Report, folder: Path, sizes: Sequence[int], rows: int, repeats: int, *, fsync: bool
) -> None:
    """Stores of one table after so many versions, with chains of one length."""
    stores = {
        size: Growing(_counted(folder, f"versions{size}", fsync=fsync), 1, rows, touched=min(100, rows // 4))
        for size in sizes
    }
    for size, store in stores.items():
        store.grow_to(size, 10)
    found = harness.alternating({str(size): store.commit for size, store in stores.items()}, repeats)
    opens = harness.alternating({str(size): store.open for size, store in stores.items()}, repeats)
    per_size = [
        costs(store, statistics.median(found[str(size)].wall), opens[str(size)]) for size, store in stores.items()
    ]
    measured = {name: [one[name] for one in per_size] for name in per_size[0]}
    show_growth(report, "versions", sizes, measured, f"100 of {rows:,} rows in each save, chains of {10 + repeats}")
    first, last = (found[str(size)] for size in (sizes[0], sizes[-1]))
    report.add_ratio(f"a save after {sizes[-1]:,} versions / after {sizes[0]:,}", last, first, SAME)
    report.add(
        f"requests of a save: {sizes[-1]:,} versions / {sizes[0]:,}",
        measured["save, requests"][-1] / measured["save, requests"][0], goal=1.0,
    )  # fmt: skip
    report.add("requests of a poll", max(measured["poll, requests"]), goal=1.0, unit="")
    ratio, (low, _, high) = (
        statistics.median(last.wall) / statistics.median(first.wall),
        harness.spread([a / b for a, b in zip(last.wall, first.wall, strict=True)]),
    )
    report.headline(
        f"a commit of 100 rows after {sizes[-1]:,} versions against one after {sizes[0]:,}",
        f"{ratio:.2f}x ({low:.2f} to {high:.2f})", f"{SAME}x", COMMAND,
    )  # fmt: skip
    for store in stores.values():
        store.close()


def by_tables(
    report: harness.Report, folder: Path, sizes: Sequence[int], rows: int, repeats: int, *, fsync: bool
) -> None:
    """Stores of so many tables with as many rows together, the touched rows spread over all of them."""
    touched = max(sizes) * 100
    stores = {
        size: Growing(_counted(folder, f"tables{size}", fsync=fsync), size, rows // size, touched=touched)
        for size in sizes
    }
    sides: dict[str, Callable[[], object]] = {
        str(size): lambda store=store, size=size: store.commit(size)  # type: ignore[misc]
        for size, store in stores.items()
    }
    found = harness.alternating(sides, repeats)
    opens = harness.alternating({str(size): store.open for size, store in stores.items()}, repeats)
    per_size = []
    for size, store in stores.items():
        one = costs(store, statistics.median(found[str(size)].wall), opens[str(size)])
        one["save, CPU s"] = statistics.median(store.cpu_s[-repeats:])
        per_size.append(one)
        report.add(
            f"objects of a delta of {size} tables, budget {budget()}", one["save, objects"],
            goal=budget(), unit="",
        )  # fmt: skip
    alone = stores[sizes[0]].cpu_s[-repeats:]
    for size in sizes[1:] if sizes[0] == 1 else ():
        ratios = [a / b for a, b in zip(stores[size].cpu_s[-repeats:], alone, strict=True)]
        low, middle, high = harness.spread(ratios)
        report.add(f"CPU of a delta of {size} tables / of one table", middle, goal=MANY_TABLES, low=low, high=high)
    measured = {name: [one[name] for one in per_size] for name in per_size[0]}
    show_growth(
        report, "tables", sizes, measured,
        f"{touched:,} of {rows:,} rows in each save, spread over all tables, which share arrays",
    )  # fmt: skip
    for store in stores.values():
        store.close()


def by_places(report: harness.Report, names: Sequence[str], folder: Path, tables: int, rows: int, repeats: int) -> None:
    """A delta of 100 rows in each of so many tables against one of as many rows of one table, durable at each place."""
    measured = []
    for place in chosen_places(names, str(folder)):
        many, one = (
            Growing(open_storage(place.new(), storage_options=place.options), size, rows // size, touched=100 * tables)
            for size in (tables, 1)
        )
        harness.alternating({"many": lambda: many.commit(tables), "one": one.commit}, repeats)  # noqa: B023
        seconds = [store.seconds[-repeats:] for store in (many, one)]
        low, middle, high = harness.spread([a / b for a, b in zip(*seconds, strict=True)])
        report.add(
            f"seconds of a delta of 100 rows in each of {tables} tables / as many of one table, {place.name}", middle,
            goal=MANY_TABLES, low=low, high=high,
        )  # fmt: skip
        measured.append((place.name, *(statistics.median(each) for each in seconds)))
        many.close()
        one.close()
    report.table("by places", ("place", f"{tables} tables, s", "one table, s"), measured)


def by_bags(report: harness.Report, folder: Path, sizes: Sequence[int], repeats: int) -> None:
    """What a delta of as many rows of so many embedding bags holds the training up for, in CPU time of its thread."""
    touched = max(sizes) * 100
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measured: dict[str, list[float]] = {}
    for optimizer in (torch.optim.Adagrad, torch.optim.SparseAdam):
        models = {size: Trained(folder, size, touched, optimizer) for size in sizes}
        harness.alternating({str(size): model.save for size, model in models.items()}, repeats)
        alone = models[sizes[0]].stall_s[-repeats:]
        for size, model in models.items():
            stalls = model.stall_s[-repeats:]
            if size != sizes[0]:
                low, middle, high = harness.spread([a / b for a, b in zip(stalls, alone, strict=True)])
                report.add(
                    f"{optimizer.__name__}: stall of a delta of {size} tables / of {sizes[0]}", middle,
                    goal=MANY_STALLED, low=low, high=high,
                )  # fmt: skip
            measured.setdefault(f"stall with {optimizer.__name__}, s", []).append(statistics.median(stalls))
            model.close()
    torch.set_num_threads(threads)
    show_growth(report, "bags", sizes, measured, f"{touched:,} rows in each save; CPU time of the training thread")


def by_writers(
    report: harness.Report, folder: Path, sizes: Sequence[int], rows: int, touched: int, repeats: int
) -> None:
    """One table that so many writers save together, on threads of one process."""
    per_size = []
    for size in sizes:
        shared = shared_saves(folder, size, rows, touched, repeats)
        per_size.append({
            "save, s": statistics.median(shared.seconds),
            "save, objects": float(shared.objects),
            "save, requests": float(shared.requests),
        })  # fmt: skip
    measured = {name: [one[name] for one in per_size] for name in per_size[0]}
    show_growth(
        report, "writers", sizes, measured,
        f"{touched:,} of {rows:,} rows in each save, the same part of the table for each; they share this machine",
    )  # fmt: skip


def main() -> None:
    parser = harness.arguments(__doc__, rows=100_000, repeats=15)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 10_000_000, 50_000_000], help="in rows")
    parser.add_argument("--versions", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 26, 300, 1000])
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--touched", type=int, default=TOUCHED, help="rows of a save where rows or writers grow")
    parser.add_argument("--places", default="disk,1", help=PLACES_HELP)
    parser.add_argument("--fsync", action="store_true")
    options = parser.parse_args()
    chosen = options.sections.split(",")
    if not set(chosen) <= set(SECTIONS):
        parser.error(f"sections are {', '.join(SECTIONS)}")
    if options.quick:
        options.sizes, options.versions, options.tables = [100_000, 400_000], [10, 60], [1, 4]
        options.writers, options.touched = [1, 2], 10_000
    report = harness.Report(f"growth, {'with fsync' if options.fsync else 'no fsync'}")
    report.start()
    with harness.data_folder(options.folder) as folder:
        if "rows" in chosen:
            by_rows(report, folder, options.sizes, options.touched, min(7, options.repeats))
        if "versions" in chosen:
            by_versions(report, folder, options.versions, options.rows, options.repeats, fsync=options.fsync)
        if "tables" in chosen:
            by_tables(report, folder, options.tables, options.rows, options.repeats, fsync=options.fsync)
        if "places" in chosen:
            many = options.tables[-1] if options.quick else PLACED_TABLES
            by_places(report, options.places.split(","), folder, many, options.rows, options.repeats)
        if "bags" in chosen:
            by_bags(report, folder, options.tables, options.repeats)
        if "writers" in chosen:
            by_writers(report, folder, options.writers, 4 * options.touched, options.touched, options.repeats)
    report.finish(options.json)


if __name__ == "__main__":
    main()
