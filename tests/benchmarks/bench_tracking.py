"""What tracking costs: a share of the demo's step, marking against `unique`, bits per row, the end of an interval.

``python tests/benchmarks/bench_tracking.py``: two DLRMs of the demo, equal but for the tracker, take every batch in
turn, in changing order, on one thread. Then 200,000 ids are marked in a bitmap of ``--rows`` rows, and listed with
`torch.unique`, which is what a tracker without a bitmap would have to do to them.

``--model``: models are trained instead, with and without a tracker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import harness
import numpy as np
import numpy.typing as npt
import torch
from dlrm_trace import trace_config
from models import BenchModel, add_model_option, chosen_models
from run_config import RunConfig, demo_config
from trained import TrainedTables

from cnr_store_gpu import Movement, RowBitmap, RowTracker, warmup
from cnr_store_tools.demo.batches import ClickBatch, TimeOrderedBatches
from cnr_store_tools.demo.click_log import ClickLog, split_by_time
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.traffic import generate_clicks
from cnr_store_tools.demo.train import make_optimizers, train_step

NUM_IDS, DIM = 200_000, 64
WARM = 20
"""Steps that are not counted: allocators and caches are cold."""

SHARE_OF_STEP, UNIQUE_TO_MARK, SHARE_OF_TABLE = 1.0, 5.0, 0.05
"""Goals: percent at most, times at least, percent at most."""

MODULES, MODULE_ROWS, MODULE_DIM, MODULE_IDS = 200, 1_000, 16, 256
STEP_MS, SHARE_OF_MODULES = 50.0, 4.0
"""A step that so many modules are part of, and the goal: percent of it at most."""


class Side:
    """A model in training, with or without a tracker."""

    def __init__(self, config: RunConfig, log: ClickLog, *, is_tracked: bool) -> None:
        self.model = SmallDLRM(config.model_config(log))
        self.optimizers = make_optimizers(self.model, table_lr=config.table_lr, dense_lr=config.dense_lr)
        self.timings = harness.Timings([], [])
        self.tracker: RowTracker | None = None
        if is_tracked:
            assume = {"RowWiseAdagrad": Movement.TOUCHED}
            self.tracker = RowTracker(self.model, optimizers=self.optimizers, assume=assume, on_bypass="raise")

    def step(self, batch: ClickBatch) -> None:
        """Train on a batch and time it."""
        cpu, wall = time.process_time(), time.perf_counter()
        train_step(self.model, self.optimizers, batch)
        self.timings.wall.append(time.perf_counter() - wall)
        self.timings.cpu.append(time.process_time() - cpu)


def bench_steps(report: harness.Report, name: str, config: RunConfig, steps: int, goal: float | None) -> None:
    """Train both sides on the same batches in turn; the share is of the medians over all steps."""
    assert config.traffic is not None
    threads = torch.get_num_threads()
    torch.set_num_threads(config.num_threads)
    log, _ = split_by_time(generate_clicks(config.traffic), config.test_share)
    batches = list(TimeOrderedBatches(log, config.batch_size, max_batches=config.steps))
    bare, tracked = (Side(config, log, is_tracked=is_tracked) for is_tracked in (False, True))
    assert tracked.tracker is not None
    take_s, rows = [], 0
    for number in range(steps):
        for side in (bare, tracked) if number % 2 == 0 else (tracked, bare):
            side.step(batches[number % len(batches)])
        if number % config.save_every == config.save_every - 1:
            started = time.perf_counter()
            rows = sum(len(one) for one in tracked.tracker.take().values())
            take_s.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    _add_share(report, f"{name}: tracking, share of the step", tracked.timings.wall, bare.timings.wall, goal)
    _add_share(report, f"{name}: the same in CPU time", tracked.timings.cpu, bare.timings.cpu, None)
    step_ms = 1e3 * float(np.median(bare.timings.wall))
    report.note(
        f"      {steps} steps of {step_ms:.2f} ms without a tracker; take of {rows} rows every {config.save_every} "
        f"steps {1e3 * float(np.median(take_s)):.2f} ms; {tracked.tracker.bitmap.size_bytes} bytes of words"
    )


def _add_share(
    report: harness.Report, name: str, tracked: Sequence[float], bare: Sequence[float], goal: float | None
) -> None:
    def share(tracked: npt.NDArray[np.float64], bare: npt.NDArray[np.float64]) -> float:
        return 100 * float(np.median(tracked) / np.median(bare) - 1)

    first, second = np.array(tracked[WARM:]), np.array(bare[WARM:])
    tenths = [share(first[start::10], second[start::10]) for start in range(10)]
    report.add(name, share(first, second), goal=goal, unit="%", low=min(tenths), high=max(tenths))


def bench_model(report: harness.Report, model: BenchModel, steps: int) -> None:
    """Train a model with and without a tracker in turn, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bare, tracked = TrainedTables(model), TrainedTables(model)
    assume = {"RowWiseAdagrad": Movement.TOUCHED}
    state = tracked.state
    tracker = RowTracker(state.model, optimizers=state.optimizers, assume=assume, on_bypass="raise")
    found = harness.alternating({"bare": bare.step, "tracked": tracked.step}, WARM + steps)
    torch.set_num_threads(threads)
    _add_share(report, f"{model.name}: tracking, share of the step", found["tracked"].wall, found["bare"].wall, None)
    _add_share(report, f"{model.name}: the same in CPU time", found["tracked"].cpu, found["bare"].cpu, SHARE_OF_STEP)
    added = np.median(np.array(found["tracked"].cpu[WARM:]) - np.array(found["bare"].cpu[WARM:]))
    rows = sum(len(one) for one in tracker.take().values())
    report.note(f"      {1e6 * float(added) / len(model.tables):.2f} us per table; {rows} rows in {WARM + steps} steps")


class Modules:
    """Many embedding bags and an optimizer, with or without a tracker; only hooks differ between two of them."""

    def __init__(self, *, sparse: bool, is_tracked: bool) -> None:
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(MODULE_ROWS, MODULE_DIM, mode="sum", sparse=sparse) for _ in range(MODULES)
        )
        self.optimizer = torch.optim.SGD(self.bags.parameters(), lr=0.01)
        self.ids = torch.randint(0, MODULE_ROWS, (MODULE_IDS // 4, 4), generator=torch.Generator().manual_seed(0))
        self.tracker = RowTracker(self.bags, optimizers=[self.optimizer]) if is_tracked else None

    def step(self) -> None:
        """Look rows up in every module, and step."""
        looked_up = [bag(self.ids).sum() for bag in self.bags]
        torch.stack(looked_up).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def bench_modules(report: harness.Report, steps: int) -> None:
    """What hooks of many modules add to a step: CPU time of both sides in turn, medians over the steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, sparse in (("sparse", True), ("dense", False)):
        bare, tracked = (Modules(sparse=sparse, is_tracked=is_tracked) for is_tracked in (False, True))
        found = harness.alternating({"bare": bare.step, "tracked": tracked.step}, steps)
        added = np.array(found["tracked"].cpu) - np.array(found["bare"].cpu)
        tenths = [1e5 * float(np.median(added[start::10])) / STEP_MS for start in range(min(10, steps))]
        report.add(
            f"{MODULES} modules, {name} gradients: tracking, share of {STEP_MS:.0f} ms in CPU time",
            1e5 * float(np.median(added)) / STEP_MS, goal=SHARE_OF_MODULES, unit="%", low=min(tenths), high=max(tenths),
        )  # fmt: skip
        report.note(f"      {1e6 * float(np.median(added)) / MODULES:.2f} us per module, all hooks of a step")
    torch.set_num_threads(threads)


def bench_marks(report: harness.Report, num_rows: int, repeats: int) -> None:
    """Mark ids in a bitmap that has none of them, and in one that has all; list them with `unique`."""
    random = np.random.default_rng(0)
    for name, ids in (
        ("uniform", torch.from_numpy(random.integers(0, num_rows, NUM_IDS))),
        ("Zipf 1.2", torch.from_numpy((random.zipf(1.2, NUM_IDS) - 1) % num_rows)),
    ):
        fresh, full = RowBitmap({"t": num_rows}), RowBitmap({"t": num_rows})
        full.mark("t", ids)
        flags = torch.zeros(num_rows, dtype=torch.uint8)
        sides: dict[str, Callable[[], object]] = {
            "unique": partial(torch.unique, ids),
            "fresh": partial(fresh.mark, "t", ids),
            "baseline": partial(full.mark, "t", ids),
            "bytes": partial(flags.index_fill_, 0, ids, 1),
        }
        for work in sides.values():
            work()
        clear = partial(_clear, fresh, flags)
        found = harness.alternating(sides, repeats, before_each=clear)
        for side, against, label, goal in (
            ("unique", "fresh", "unique / mark, first time in an interval", UNIQUE_TO_MARK),
            ("unique", "baseline", "unique / mark, all marked already", None),
            ("bytes", "fresh", "one byte per row / mark", None),
        ):
            _add_speedup(report, f"{name}: {label}", found[side], found[against], goal)


def _clear(bitmap: RowBitmap, flags: torch.Tensor) -> None:
    bitmap.clear()
    flags.zero_()


def _add_speedup(
    report: harness.Report, name: str, slow: harness.Timings, fast: harness.Timings, goal: float | None
) -> None:
    ratios = [a / b for a, b in zip(slow.wall, fast.wall, strict=True)]
    value = float(np.median(slow.wall) / np.median(fast.wall))
    report.add(name, value, goal=goal, sense="at least", low=min(ratios), high=max(ratios))
    report.note(f"      {slow} against {fast}")


def bench_interval(report: harness.Report, num_rows: int, repeats: int) -> None:
    """The end of an interval, and what the words cost all along."""
    bitmap = RowBitmap({"t": num_rows})
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, num_rows, NUM_IDS))
    share = 100 * bitmap.words.untyped_storage().nbytes() / (num_rows * DIM * 4)
    report.add(f"memory: words / fp32 table of {num_rows} x {DIM}", share, goal=SHARE_OF_TABLE, unit="%")
    rows = torch.randn(num_rows // 10, DIM)
    bitmap.mark("t", ids % len(rows))
    taken = bitmap.take_all()["t"]
    index = torch.from_numpy(taken.row_ids)
    sides: dict[str, Callable[[], object]] = {
        "take": bitmap.take_all,
        "select": partial(torch.index_select, rows, 0, index),
    }
    for work in chain(sides.values(), sides.values()):
        work()
    found = harness.alternating(sides, repeats, before_each=lambda: bitmap.mark("t", ids % len(rows)))
    report.add_ratio(f"take of {len(taken)} rows / index_select of them", found["take"], found["select"])


def main() -> None:
    parser = harness.arguments(__doc__, rows=10_000_000, repeats=31)
    parser.add_argument("--steps", type=int, default=1500, help="of the demo's model; a third of it of the larger one")
    add_model_option(parser, instead=True)
    options = parser.parse_args()
    if options.quick:
        options.steps = min(options.steps, 150)
    warmup()
    report = harness.Report(f"tracking: {NUM_IDS} ids, {options.rows} rows, steps of the demo's DLRM")
    report.start()
    for model in chosen_models(options):
        bench_model(report, model, max(20, options.steps // 15))
    if options.model:
        report.finish(options.json)
        return
    bench_steps(report, "demo, 85,000 x 16", demo_config(), options.steps, SHARE_OF_STEP)
    bench_steps(report, "trace, 376,000 x 32", trace_config(steps=options.steps // 3), options.steps // 3, None)
    bench_modules(report, max(20, options.steps // 15))
    bench_marks(report, options.rows, options.repeats)
    bench_interval(report, options.rows, options.repeats)
    report.finish(options.json)


if __name__ == "__main__":
    main()
