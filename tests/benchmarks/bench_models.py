"""What saves and restores of realistic models cost: MLPerf's DLRM-DCNv2, and models of 300 and 1,000 tables.

``python tests/benchmarks/bench_models.py [--model mlperf/adam zipf300/adagrad ...] [--bits 8] [--divided-by 1]
[--places disk,1]``: of each model the first save, a save of 1 % touched rows, and a restore, beside `torch.save` of the
same tensors and beside as many elements in one table. The disk is synced by everybody. Metadata is everything in JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import harness
from bench_cost import Cost, measured, median
from models import BenchModel, add_model_option, chosen_models, equal_tables
from peers import Cnr, TorchSave
from places import PLACES_HELP, Place, chosen_places
from trainee import Trainee

from cnr_store.types import AffineBits

DEFAULT = ("mlperf/rowwise_adagrad", "zipf300/rowwise_adagrad", "zipf300/adagrad", "zipf1000/rowwise_adagrad")
TOUCHED = 0.01
ONE_TABLE = 1.3
"""Goal of the first save of many tables, against one table of as many elements."""
AGAINST_TORCH: dict[int, float] = {8: 1.5, 4: 1.2}
"""Goal of the first save until it is committed on a disk, against `torch.save` with fsync, by bits."""
COLUMNS = (
    "model", "tables", "M elements", "torch.save s", "first: stall s", "committed s", "CPU s", "objects", "JSON kB",
    "delta: stall ms", "committed s", "CPU s", "objects", "JSON kB", "restore: s", "CPU s",
)  # fmt: skip


@dataclass(slots=True)
class Saves:
    """What the saves of one model cost, round by round."""

    full: list[Cost] = field(default_factory=list)
    delta: list[Cost] = field(default_factory=list)
    restore: list[Cost] = field(default_factory=list)
    peer: list[Cost] = field(default_factory=list)
    objects: tuple[int, int] = (0, 0)
    """Of the first save, and of the one behind it."""
    metadata_bytes: tuple[int, int] = (0, 0)


def run_round(place: Place, trainee: Trainee, bits: AffineBits, saves: Saves) -> None:
    """Save the model once whole and twice in part, of which the second counts, and restore it."""
    trainee.start_again()
    store = Cnr(bits)
    store.open(place, trainee)
    try:
        saves.full.append(measured(store.save))
        before = place.sizes(store.url)
        store.touch(TOUCHED)  # warms up the buffers, and is not counted
        store.save()()
        store.touch(TOUCHED)
        middle = place.sizes(store.url)
        saves.delta.append(measured(store.save))
        after = place.sizes(store.url)
        saves.restore.append(measured(store.load))
    finally:
        store.close()
    saves.objects = (len(before), len(after) - len(middle))
    saves.metadata_bytes = (_json_bytes(before), _json_bytes(after) - _json_bytes(middle))


def measure(place: Place, models: Sequence[BenchModel], bits: AffineBits, repeats: int) -> dict[str, Saves]:
    """Return what saves of each model cost, in rounds."""
    found = {model.name: Saves() for model in models}
    for _ in range(repeats):
        for model in models:
            trainee = Trainee(model)
            run_round(place, trainee, bits, found[model.name])
            peer = TorchSave()
            peer.open(place, trainee)
            found[model.name].peer.append(measured(peer.save))
            peer.close()
    return found


def report_models(
    report: harness.Report, place: Place, models: Sequence[BenchModel], bits: AffineBits, found: dict[str, Saves]
) -> None:
    """Add a table of all models, and each one's ratio to one table."""
    rows: list[list[harness.Cell]] = []
    for model in models:
        saves = found[model.name]
        rows.append([
            model.name, len(model.tables), model.elements / 1e6,
            median(saves.peer, "done_s"), median(saves.full, "stall_s"), median(saves.full, "done_s"),
            median(saves.full, "cpu_s"), saves.objects[0], saves.metadata_bytes[0] / 1e3,
            1e3 * median(saves.delta, "stall_s"), median(saves.delta, "done_s"), median(saves.delta, "cpu_s"),
            saves.objects[1], saves.metadata_bytes[1] / 1e3,
            median(saves.restore, "done_s"), median(saves.restore, "cpu_s"),
        ])  # fmt: skip
    report.table(
        f"saves of realistic models, {place.name}; a delta of {TOUCHED:.0%} of the rows of each table",
        COLUMNS,
        rows,
    )  # fmt: skip
    for model in models:
        alone = found.get(model.in_one_table().name)
        if alone is None:
            continue
        mine = found[model.name]
        for what, ours, theirs, goal in (
            ("first save", mine.full, alone.full, ONE_TABLE), ("delta", mine.delta, alone.delta, None),
            ("stall of a delta", mine.delta, alone.delta, None), ("restore", mine.restore, alone.restore, None),
        ):  # fmt: skip
            column = "stall_s" if what.startswith("stall") else "cpu_s"
            unit = "seconds" if column == "stall_s" else "CPU"
            _add_ratio(report, f"{model.name}, {what} / one table, {unit}", ours, theirs, column, goal)
        goal = AGAINST_TORCH.get(bits) if place.is_local else None
        name = f"{model.name}, first save until committed / torch.save, {place.name}"
        _add_ratio(report, name, mine.full, mine.peer, "done_s", goal)


def _add_ratio(
    report: harness.Report, name: str, ours: Sequence[Cost], theirs: Sequence[Cost], column: str, goal: float | None
) -> None:
    ratios = [getattr(a, column) / getattr(b, column) for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = harness.spread(ratios)
    report.add(name, middle, low=low, high=high, goal=goal)


def _json_bytes(files: dict[str, int]) -> int:
    return sum(size for path, size in files.items() if ".json" in path)


def main() -> None:
    """Measure."""
    parser = harness.arguments(__doc__, rows=0, repeats=3)
    add_model_option(parser, DEFAULT)
    parser.add_argument("--places", default="disk", help=PLACES_HELP)
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 8), default=8)
    options = parser.parse_args()
    models = [one for model in chosen_models(options) for one in (model, model.in_one_table())]
    report = harness.Report(f"saves of realistic models, {options.bits}-bit quality, rows / {options.divided_by}")
    report.start()
    for place in chosen_places(options.places.split(","), options.folder):
        measure(place, [equal_tables(1000, 16)], options.bits, 1)  # imports and compiled code are there from then on
        report_models(report, place, models, options.bits, measure(place, models, options.bits, options.repeats))
    report.finish(options.json)


if __name__ == "__main__":
    main()
