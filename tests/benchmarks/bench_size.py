"""How many bytes checkpoints of a trained model take on disk: by policy, encoding and share of rows touched.

``python tests/benchmarks/bench_size.py``: a small DLRM is trained once, 6,000 steps of 2,048 samples on six tables
(200k to 1k rows x 32, row-wise Adagrad) with a save every 150 steps, about 40 % of the rows touched in each; every
store saves the same rows. Then four stretches of the same training with shorter intervals, and one pass over each
public data set in ``--data-folder``. Counted is what lies on disk: file lengths of new files after each save, receipts,
manifests and records included. Dense tensors stand apart and are in no ratio; they are the same bytes in all stores.

Row ids and slots (float_bits 7; exact in ``raw`` and ``exact``) are stored alike by all encodings. Affine rows have
fp16 parameters, and no mirror, so their slots are absolute. A lattice takes the scale at which touched rows have the
error of affine rows of its width; training widens rows, so half-way through the run a baseline chooses it anew
in every store of consecutive deltas, affine ones too, and it counts in the bytes of the second half on both sides.

``--model``: of models instead, the bytes of a first save, and of deltas of rows that drift by 0.3 of the width of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import harness
import numpy as np
from dlrm_trace import Interval, trace_config, train, train_on
from measured_store import EXACT, RAW, Encoding, MeasuredStore, affine, lattice
from models import BenchModel, add_model_option, chosen_models
from peers import Cnr
from places import local_disk
from real_sets import DATA_FOLDER, DIMS, RealSet, present
from run_config import RunConfig
from size_encodings import AGAINST_AFFINE, ErrorMeter, Measured, add_goals, print_encodings, print_equal_quality
from size_policies import policy_stores, print_policies
from size_shares import ShareResult, Stretch, grown_results, measure, print_shares, stretches
from trainee import Trainee

COMMAND = "python tests/benchmarks/bench_size.py"
PARTS = ("run", "shares", "sets")
INTERVALS, QUICK_INTERVALS = 40, 12
SET_INTERVALS = 20
DELTAS = 3
MODEL_SHARES = (0.01, 0.10, 0.25)
GROWN_ROWS, QUICK_GROWN_ROWS = 1 << 21, 1 << 16
QUICK_FRACTION = 16
"""Tables and batches of a quick run are so many times smaller: intervals touch the same share of the rows."""


def main() -> None:
    parser = harness.arguments(__doc__, rows=GROWN_ROWS, repeats=1)
    parser.add_argument("--intervals", type=int, help=f"length of the run, {INTERVALS} by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-folder", type=Path, default=DATA_FOLDER, help="where public data sets lie")
    parser.add_argument(
        "--same-quality", nargs=2, action="append", default=[], metavar=("AFFINE", "OURS"),
        help="two encodings of the run that the quality suite found equal, 'affine 4 greedy' and 'lattice 3'; again "
        "for more",
    )  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    add_model_option(parser, instead=True)
    options = parser.parse_args()
    quick: bool = options.quick
    intervals = options.intervals or (QUICK_INTERVALS if quick else INTERVALS)
    report = harness.Report("size: bytes on disk by policy, encoding and share of rows touched")
    report.start()
    parts: Sequence[str] = [] if options.model else options.parts
    with harness.data_folder(options.folder) as folder:
        for model in chosen_models(options):
            measure_model(report, folder, model)
        if "run" in parts or "shares" in parts:
            every = trace_config().save_every
            plan = stretches(intervals * every, 1 if quick else DELTAS) if "shares" in parts else []
            config = configure(plan[-1].save_at[-1] if plan else intervals * every, seed=options.seed, quick=quick)
            run = LongRun(folder / "run", intervals, options.same_quality, quick=quick) if "run" in parts else None
            measure_trace(
                report, folder, config, run, plan, encodings=share_encodings(quick=quick),
                grown_rows=QUICK_GROWN_ROWS if quick else options.rows,
            )  # fmt: skip
        if "sets" in parts:
            measure_sets(report, folder, options.data_folder, quick=quick)
    report.finish(options.json)


def configure(steps: int, *, seed: int, quick: bool) -> RunConfig:
    """Return the trace of so many steps; a quick one has smaller tables and batches."""
    config = trace_config(steps=steps, seed=seed)
    if not quick:
        return config
    assert config.traffic is not None
    batch_size = config.batch_size // QUICK_FRACTION
    traffic = replace(
        config.traffic,
        table_rows=tuple(rows // QUICK_FRACTION for rows in config.traffic.table_rows),
        num_samples=config.traffic.num_samples // QUICK_FRACTION + batch_size,
        drift_every=config.traffic.drift_every // QUICK_FRACTION,
    )
    return replace(config, traffic=traffic, batch_size=batch_size)


def measure_trace(
    report: harness.Report,
    folder: Path,
    config: RunConfig,
    run: LongRun | None,
    plan: Sequence[Stretch],
    *,
    encodings: Sequence[Encoding],
    grown_rows: int,
) -> None:
    """Train once: the long run first, then a stretch for every share on the same model."""
    run_at = {config.save_every * number for number in range(1, run.intervals + 1)} if run is not None else set()
    waiting = list(plan)
    found: list[ShareResult] = []
    pairs: list[tuple[int, Interval, Interval]] = []
    kept: list[Interval] = []
    for interval in train(config, run_at | {step for stretch in plan for step in stretch.save_at}):
        if run is not None and interval.step in run_at:
            run.save(interval)
            if interval.step == max(run_at):
                run.print(report, interval.fp32_bytes)
            continue
        kept.append(interval)
        stretch = waiting[0]
        if interval.step == stretch.save_at[-1]:
            found.append(measure(folder / f"share-{stretch.share}", stretch.share, encodings, kept))
            pairs.append((stretch.share, kept[0], kept[1]))
            waiting.pop(0)
            kept = []
    if found:
        print_shares(report, "trace", found, COMMAND)
        report.note(
            f"grown table: {grown_rows:,} rows drawn from all tables of the trace, before and after one interval, with "
            "their columns shifted and signs drawn anew; one table of a realistic size, so that fixed bytes vanish"
        )
        grown = [affine(4), affine(8), lattice(4), lattice(8)]
        grown_found = list(grown_results(folder / "grown", grown, pairs, grown_rows))
        print_shares(report, "grown table", grown_found, COMMAND)


class LongRun:
    """The stores of the long run: policies crossed with some encodings, every encoding with consecutive deltas."""

    def __init__(
        self, folder: Path, intervals: int, same_quality: Sequence[tuple[str, str]] = (), *, quick: bool
    ) -> None:
        self.intervals = intervals
        self._same_quality = same_quality
        self._start = intervals // 2 + 1
        self._elements: list[int] = []
        crossed = [lattice(4)] if quick else [lattice(4), affine(4), affine(2), affine(8)]
        self._policies = list(policy_stores(folder / "policies", crossed, (self._start,)))
        consecutive = {s.encoding.name: s for s in self._policies if s.policy_name == "consecutive"}
        for encoding in run_encodings(quick=quick):
            if encoding.name not in consecutive:
                name = encoding.name.replace(" ", "-")
                consecutive[encoding.name] = MeasuredStore(folder / name, encoding, rescale_at=(self._start,))
        self._encodings = [consecutive[encoding.name] for encoding in run_encodings(quick=quick)]
        self._errors = ErrorMeter({self._start + 1, (self._start + 1 + intervals) // 2, intervals})

    def save(self, interval: Interval) -> None:
        """Save an interval into every store."""
        for store in {id(store): store for store in (*self._policies, *self._encodings)}.values():
            store.save(interval)
        self._elements.append(interval.touched_elements)
        self._errors.read(len(self._elements), self._encodings, interval)

    def print(self, report: harness.Report, fp32_bytes: int) -> None:
        """Add the tables of the whole run and of its second half."""
        first = self._start - 1
        print_policies(report, self._policies, fp32_bytes, COMMAND)
        elements = float(np.mean(self._elements[first:]))
        measured = {
            store.encoding.name: Measured(store.savings[first:], self._errors.mean(store.encoding.name), elements)
            for store in self._encodings
        }
        stretch = f"intervals {self._start} (a baseline) to {self.intervals}"
        title = f"Encodings, consecutive deltas, {stretch}"
        print_encodings(report, title, measured)
        add_goals(report, "second half", measured)
        if self._same_quality:
            print_equal_quality(report, measured, self._same_quality)
        for bits, goal in AGAINST_AFFINE.items():
            ratio = measured[f"lattice {bits}"].total / measured[f"affine {bits} greedy"].total
            what = f"bytes of a run over those of Check-N-Run's rows, same error, {bits} bit"
            report.headline(what, f"{ratio:.2f}x", f"{goal}x", COMMAND)


def measure_model(report: harness.Report, folder: Path, model: BenchModel) -> None:
    """Add the bytes of saves of one model by bits and share of its rows, against all of it in fp32."""
    trainee = Trainee(model)
    rows: list[list[harness.Cell]] = []
    for bits in (4, 8):
        trainee.start_again()
        store = Cnr(bits)
        store.open(local_disk(folder), trainee)
        store.save()()
        saved, sizes = store.size_bytes, [store.size_bytes]
        for share in MODEL_SHARES:
            store.touch(share)
            store.save()()
            sizes.append(store.size_bytes - saved)
            saved = store.size_bytes
        store.close()
        rows.append([bits, *(size / 1e6 for size in sizes), *(trainee.size_bytes / size for size in sizes)])
    shares = ("first save", *(f"{share:.0%}" for share in MODEL_SHARES))
    columns = ("bits", *(f"{share}, MB" for share in shares), *(f"{share}: fp32 / it" for share in shares))
    report.table(f"{model.name}: {len(model.tables)} tables, {trainee.size_bytes / 1e6:.1f} MB in fp32", columns, rows)


def run_encodings(*, quick: bool) -> list[Encoding]:
    """Return every encoding of the long run."""
    if quick:
        return [affine(2), affine(4), affine(8), lattice(2), lattice(4), lattice(8), RAW, EXACT]
    widths = (2, 3, 4, 8)
    return [
        RAW, EXACT, *(affine(bits) for bits in widths), *(affine(bits, "grid") for bits in widths),
        *(lattice(bits) for bits in widths),
    ]  # fmt: skip


def share_encodings(*, quick: bool) -> list[Encoding]:
    """Return the encodings whose deltas are compared with fp32 checkpoints."""
    widths = (4, 8) if quick else (2, 4, 8)
    return [*(affine(bits) for bits in widths), *(lattice(bits) for bits in widths)]


def measure_sets(report: harness.Report, folder: Path, data_folder: Path, *, quick: bool) -> None:
    """Measure each public data set that is there; a quick run takes the first one alone."""
    for real_set, path in list(present(data_folder))[: 1 if quick else None]:
        if path is None:
            report.note(f"{real_set.name}: left out, no {real_set.file} in {data_folder}")
        else:
            measure_set(report, folder, real_set, path, dims=DIMS[:1] if quick else DIMS)


def measure_set(report: harness.Report, folder: Path, real_set: RealSet, path: Path, *, dims: Sequence[int]) -> None:
    """Train on one public data set and compare encodings over the second half of the pass."""
    log = real_set.read(path)
    for dim in dims:
        config = real_set.config(log, dim=dim, intervals=SET_INTERVALS)
        start = SET_INTERVALS // 2 + 1
        name = f"{real_set.name}, dim {dim}"
        encodings = [*(affine(bits) for bits in (2, 4, 8)), *(lattice(bits) for bits in (2, 4, 8))]
        home = folder / real_set.file / str(dim)
        stores = [
            MeasuredStore(home / one.name.replace(" ", "-"), one, rescale_at=(start,), is_collected=False)
            for one in encodings
        ]
        errors = ErrorMeter({start + 1, (start + 1 + SET_INTERVALS) // 2, SET_INTERVALS})
        shares, elements = [], []
        for number, interval in enumerate(train_on(log, config), start=1):
            for store in stores:
                store.save(interval)
            errors.read(number, stores, interval)
            shares.append(interval.num_touched / interval.num_rows)
            elements.append(interval.touched_elements)
        measured = {
            store.encoding.name: Measured(
                store.savings[start - 1 :], errors.mean(store.encoding.name), float(np.mean(elements[start - 1 :]))
            )
            for store in stores
        }
        title = (
            f"{name}: {len(log.table_rows)} tables of {sum(log.table_rows):,} rows, {np.mean(shares[start - 1 :]):.0%} "
            f"touched per interval; saves {start} to {SET_INTERVALS}"
        )
        print_encodings(report, title, measured)
        add_goals(report, name, measured, with_json=False)


if __name__ == "__main__":
    main()
