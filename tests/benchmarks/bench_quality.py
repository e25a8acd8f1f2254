"""What restores cost in quality, and the fewest bytes that cost none: Check-N-Run's rows against the lattice.

``python tests/benchmarks/bench_quality.py``: small models are trained in time order, saved through `CheckpointManager`
20 times or more, restored L times in place, evenly over the training, and judged on later samples against the run of
the same seed that nobody interrupted. Sections: ``generated`` clicks with known truth, ``real`` sets from
``../shared/data``.

Bytes are those of a delta's rows (ids, codes, scales, slots), mean over the run; slots are float_bits 7 everywhere.
A loss is relative; "trained" is the model at the end of the training, "served" the same after one more restore, of the
last checkpoint. A setting holds where its mean loss of AUC and of logloss is within the limit, 0.01 % or the standard
deviation over the seeds of the uninterrupted runs, whichever is larger (the tables have all three), and no finer
setting of its kind is beyond it with its whole 95 % interval. Affine rows have the four widths that there are, the
lattice 13 scales; what it needs at the same four widths stands beside.

``--rows`` is the number of generated clicks, ``--repeats`` that of seeds. ``--keep FILE`` appends each run's outcome
to a file and takes from it those that are there: runs are deterministic, so a long suite may be done in pieces.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import quality_tables
from click_cases import Source, load, real_sources
from quality_points import Noise, Point, When, noise_of, point_of
from restored_runs import Optimizer, Order, Outcome, Quality, Setting, run

from cnr_store.types import AffineBits

SECTIONS = ("generated", "real", "slots")
RESTORES = (1, 3, 20, 100)
COMMAND = "python tests/benchmarks/bench_quality.py"

EXACT = Setting("exact")
AFFINE = tuple(Setting("affine", bits) for bits in (2, 3, 4, 8))
LATTICE = (
    *(Setting("lattice", 2, steps) for steps in (0.25, 0.5, 0.5**0.5, 1.0, 2**0.5)),
    *(Setting("lattice", bits, steps) for bits in (3, 4) for steps in (1.0, 2**0.5)),
    Setting("lattice", 4, 2.0), Setting("lattice", 4, 4.0), Setting("lattice", 8, 0.5), Setting("lattice", 8),
)  # fmt: skip
"""Half steps of the scale where quality begins to show, whole ones elsewhere."""

SLOT_SAMPLES = 100_000
OPTIMIZERS: tuple[Optimizer, ...] = ("rowwise", "adagrad", "adam")
MANTISSAS = (7, 4, 2, 1, 0)
FINE_STEP = 1 / 64
MEANS = (0.25, 0.5, 1.0, 2.0, 4.0)
RESTORES_OF: dict[AffineBits, int] = {2: 1, 3: 3, 4: 20, 8: 100}
"""Restores that a run with so many bits expects, at most (Check-N-Run, section 5.2)."""
BESIDE_COARSE = ((7, 0.0), (2, 0.5), (1, 0.5), (1, 1.0), (0, 1.0))
BESIDE_FINE = ((7, 0.0), (7, FINE_STEP), (4, FINE_STEP), (4, 1 / 16))
"""Mantissa bits and steps that are tried beside a lattice of 2 to 4 and of 8 bits; the first is what the others are
compared with."""

QUICK = (Setting("affine", 4), Setting("affine", 8), *(Setting("lattice", bits) for bits in (3, 4, 8)))


@dataclass(frozen=True, slots=True)
class Plan:
    """One data set: which settings are run at which numbers of restores, for how many seeds."""

    source: Source
    settings: dict[int, tuple[Setting, ...]]
    seeds: int
    optimizer: Optimizer = "rowwise"

    def orders(self) -> Iterator[Order]:
        """Yield every run, seed by seed; exact mode only at the first, where it must change nothing."""
        for seed in range(self.seeds):
            yield Order(self.source, seed, None, 0, self.optimizer)
            for restores, settings in self.settings.items():
                for setting in settings:
                    if setting is not EXACT or seed == 0:
                        yield Order(self.source, seed, setting, restores, self.optimizer)


def plan_quality(source: Source, *, seeds: int, is_quick: bool) -> Plan:
    """Return the runs of one data set."""
    is_generated = source.name == "generated"
    if is_quick:
        return Plan(source, dict.fromkeys((1, 20) if is_generated else (3,), (*QUICK, EXACT)), seeds)
    return Plan(source, dict.fromkeys(RESTORES, (*AFFINE, *LATTICE, EXACT)), seeds)


def plan_slots(source: Source, optimizer: Optimizer, *, seeds: int, is_quick: bool) -> Plan:
    """Return the runs that tell how exact slots must be: beside exact weights, and beside coarse ones."""
    has_means = optimizer == "adam"
    alone = [Setting("slots", mantissa=bits, step=FINE_STEP if has_means else 0.0) for bits in MANTISSAS]
    if has_means:
        alone += [Setting("slots", mantissa=7, step=step) for step in MEANS]
    settings: dict[int, tuple[Setting, ...]] = {}
    for bits, restores in RESTORES_OF.items():
        tried = BESIDE_FINE if bits == 8 else BESIDE_COARSE
        precisions = dict.fromkeys((mantissa, step if has_means else 0.0) for mantissa, step in tried)
        together = [Setting("lattice", bits, mantissa=mantissa, step=step) for mantissa, step in precisions]
        settings[restores] = (EXACT, *together, *(alone if bits == 4 else ()))
    if is_quick:
        return Plan(source, {3: settings[3]}, seeds, optimizer)
    return Plan(source, settings, seeds, optimizer)


class Runs:
    """Outcomes by order: made by worker processes, or taken from a file of earlier ones."""

    def __init__(self, keep: Path | None, workers: int, folder: str) -> None:
        self._keep, self._workers, self._folder = keep, workers, folder
        self._known: dict[str, Outcome] = {}
        if keep is not None and keep.exists():
            for line in keep.read_text().splitlines():
                entry = json.loads(line)
                self._known[_key_of(entry["order"])] = outcome_of(entry["outcome"])

    def __getitem__(self, order: Order) -> Outcome:
        return self._known[_key_of(asdict(order))]

    def make(self, orders: Sequence[Order]) -> None:
        """Carry out what is not known yet. Blocks; prints how far it is."""
        missing = [order for order in dict.fromkeys(orders) if _key_of(asdict(order)) not in self._known]
        if self._workers == 1 or not missing:
            for order in missing:
                self._add(order, run(order, self._folder))
            return
        # Not forked: torch has threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(self._workers, len(missing)), mp_context=context) as pool:
            coming: dict[Future[Outcome], Order] = {pool.submit(run, order, self._folder): order for order in missing}
            try:
                for count, future in enumerate(as_completed(coming), start=1):
                    self._add(coming[future], future.result())
                    if count % 50 == 0:
                        print(f"  {count} of {len(missing)} runs", flush=True)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _add(self, order: Order, outcome: Outcome) -> None:
        self._known[_key_of(asdict(order))] = outcome
        if self._keep is not None:
            with self._keep.open("a") as file:
                file.write(json.dumps({"order": asdict(order), "outcome": asdict(outcome)}) + "\n")


def outcome_of(document: dict[str, object]) -> Outcome:
    """Return the outcome that `dataclasses.asdict` made a document of."""
    qualities = {name: Quality(**document[name]) for name in ("trained", "served")}  # type: ignore[arg-type]  # JSON
    return Outcome(**{**document, **qualities})  # type: ignore[arg-type]  # JSON


def points_of(plan: Plan, runs: Runs, when: When) -> tuple[Noise, list[Point]]:
    """Return what the uninterrupted runs and the restored ones of a plan say of one model."""
    reference = {seed: runs[Order(plan.source, seed, None, 0, plan.optimizer)] for seed in range(plan.seeds)}
    points = []
    for restores, settings in plan.settings.items():
        for setting in settings:
            seeds = range(1 if setting is EXACT else plan.seeds)
            found = {seed: runs[Order(plan.source, seed, setting, restores, plan.optimizer)] for seed in seeds}
            points.append(point_of(setting, restores, found, reference, when))
    return noise_of(reference), points


def main() -> None:
    """Run the suite."""
    parser = harness.arguments(__doc__, rows=300_000, repeats=5)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which, with commas between them")
    parser.add_argument("--workers", type=int, default=2, help="processes that train at once")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="outcomes of runs: read, and appended to")
    options = parser.parse_args()
    sections = [name for name in options.sections.split(",") if name]
    if set(sections) - set(SECTIONS):
        parser.error(f"sections are {', '.join(SECTIONS)}, found {options.sections}")
    seeds, is_quick = options.repeats, options.quick
    sources = [Source("generated", samples=options.rows)] if "generated" in sections else []
    if "real" in sections:
        sources += real_sources(20_000)[:1] if is_quick else real_sources()
    plans = [plan_quality(source, seeds=seeds, is_quick=is_quick) for source in sources]
    slot_sources = [Source("generated", samples=SLOT_SAMPLES), *real_sources()] if "slots" in sections else []
    slot_plans = [
        plan_slots(source, optimizer, seeds=seeds, is_quick=is_quick)
        for source in (slot_sources[:1] if is_quick else slot_sources)
        for optimizer in OPTIMIZERS
    ]
    report = harness.Report(f"quality after restores: {', '.join(sections)}, {seeds} seeds")
    report.start()
    runs = Runs(options.keep, options.workers, options.folder)
    # One list, so that all workers have something to do until the very end; a seed of everything before the next one,
    # so that what is kept of a run that was cut off can be looked at with fewer seeds.
    orders = [order for plan in [*plans, *slot_plans] for order in plan.orders()]
    runs.make(sorted(orders, key=lambda order: order.seed))
    everything = []
    for plan in plans:
        trained, served = points_of(plan, runs, "trained"), points_of(plan, runs, "served")
        quality_tables.print_case(report, load(plan.source), trained, served)
        everything.append((plan.source.name, trained, served))
    if everything:
        quality_tables.print_smallest(report, everything, "" if is_quick else COMMAND)
        quality_tables.print_equal_quality(report, everything)
    for plan in slot_plans:
        quality_tables.print_slots(
            report, load(plan.source), plan.optimizer, points_of(plan, runs, "trained"), points_of(plan, runs, "served")
        )
    if "real" in sections and not real_sources():
        report.note("no real data beside this checkout: that section is left out")
    report.finish(options.json)


def _key_of(order: dict[str, object]) -> str:
    return json.dumps(order, sort_keys=True)


if __name__ == "__main__":
    main()
