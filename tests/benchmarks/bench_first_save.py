"""The first save of a training that continues while its tables are read: its stall, and what it takes from the steps.

``python tests/benchmarks/bench_first_save.py [--model trace zipf300/adagrad ...] [--divided-by 4] [--places disk,1]``:
models that are trained for real. Each round a new training saves for the first time with ``first_baseline="live"``,
trains until that is committed, then as many steps as the tables were read for, and saves the rows that these touched.
Beside it the first save of the same model with ``first_baseline="stall"``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import harness
import torch
from bench_cost import measured
from models import add_model_option, chosen_model
from peers import Cnr
from places import PLACES_HELP, Place, chosen_places
from trained import Trained, TrainedTables, TrainedTrace

from cnr_store_gpu import warmup

BITS = 8
TRACE = "trace"
STALL = 1.5
"""Goal: the stall of the first save, against that of a delta of the rows that changed while the tables were read."""
THROUGHPUT = 0.9
"""Goal: steps per second of the training thread's CPU time while the first save is written, against before."""


@dataclass(slots=True)
class Steps:
    """Steps in a row, and the calls of the manager between them."""

    count: int = 0
    wall_s: float = 0.0
    thread_s: float = 0.0
    """CPU time of the thread that trains."""
    calls_s: float = 0.0
    """Seconds in the manager's calls."""

    def take(self, training: Trained, store: Cnr) -> None:
        """Take one more."""
        assert store.manager is not None
        wall, thread = time.perf_counter(), time.thread_time()
        training.step()
        called = time.perf_counter()
        store.manager.step()
        self.calls_s += time.perf_counter() - called
        self.wall_s += time.perf_counter() - wall
        self.thread_s += time.thread_time() - thread
        self.count += 1


@dataclass(frozen=True, slots=True)
class Round:
    """One training's first save."""

    read_steps: int
    """From the step at which it was due until the one that it has."""
    stall_s: float
    delta_stall_s: float
    whole_stall_s: float
    """With ``first_baseline="stall"``."""
    alone: Steps
    beside: Steps


def first_save(place: Place, make: Callable[[], Trained], least_steps: int) -> Round:
    """Train and save; see the module."""
    training = make()
    store = Cnr(BITS, reads_live=True)
    store.open(place, training.state)
    assert store.manager is not None
    alone, beside = Steps(), Steps()
    try:
        for _ in range(least_steps):
            alone.take(training, store)
        due = alone.count
        first = measured(lambda: store.save() and None)
        while not store.manager.history:
            beside.take(training, store)
        read_steps = store.manager.history[0].step - due
        usual_s = alone.calls_s / alone.count * beside.count
        stall_s = first.stall_s + max(0.0, beside.calls_s - usual_s)
        delta = None
        for _ in range(2):  # the second counts: the first one compiles and warms up
            between = Steps()
            while between.count < max(1, read_steps):
                between.take(training, store)
            delta = measured(store.save)
        assert delta is not None
    finally:
        store.close()
    whole = Cnr(BITS)
    whole.open(place, training.state)
    try:
        stalled = measured(whole.save)
    finally:
        whole.close()
    return Round(read_steps, stall_s, delta.stall_s, stalled.stall_s, alone, beside)


COLUMNS = (
    "model", "MB of tensors", "step ms", "steps while tables are read", "until committed", "stall ms", "of a delta ms",
    "with stall ms",
)  # fmt: skip


def report_rounds(report: harness.Report, what: str, size_bytes: int, rounds: list[Round]) -> None:
    """Add a row of medians, and the ratios round by round."""

    def middle(value: Callable[[Round], float]) -> float:
        return statistics.median(map(value, rounds))

    report.table(f"First saves beside the training, {what}", COLUMNS, [[
        what, size_bytes / 1e6, 1e3 * middle(lambda one: one.alone.wall_s / one.alone.count),
        middle(lambda one: one.read_steps), middle(lambda one: one.beside.count), 1e3 * middle(lambda one: one.stall_s),
        1e3 * middle(lambda one: one.delta_stall_s), 1e3 * middle(lambda one: one.whole_stall_s),
    ]])  # fmt: skip
    for name, goal, sense, found in (
        ("stall / a delta's of the rows touched meanwhile", STALL, "at most",
         [one.stall_s / one.delta_stall_s for one in rounds]),
        ("stall / with first_baseline=stall", None, "at most", [one.stall_s / one.whole_stall_s for one in rounds]),
        ("steps per CPU second of the training thread, beside / alone", THROUGHPUT, "at least",
         [one.beside.count / one.beside.thread_s * one.alone.thread_s / one.alone.count for one in rounds]),
        ("steps per second, beside / alone", None, "at least",
         [one.beside.count / one.beside.wall_s * one.alone.wall_s / one.alone.count for one in rounds]),
    ):  # fmt: skip
        low, median, high = harness.spread(found)
        report.add(f"{what}: {name}", median, low=low, high=high, goal=goal, sense=sense)


def main() -> None:
    """Measure."""
    parser = harness.arguments(__doc__, rows=0, repeats=3)
    add_model_option(parser, (TRACE, "zipf300/rowwise_adagrad"), (TRACE,))
    parser.add_argument("--places", default="disk", help=PLACES_HELP)
    options = parser.parse_args()
    least_steps = 5 if options.quick else 30
    report = harness.Report(f"first saves that do not stall, {BITS}-bit quality")
    report.start()
    torch.set_num_threads(1)
    warmup()
    for place in chosen_places(options.places.split(","), options.folder):
        for model in options.model:
            make: Callable[[], Trained] = (
                partial(TrainedTrace, 400) if model == TRACE else partial(TrainedTables, chosen_model(options, model))
            )
            first_save(place, make, least_steps)  # imports and compiled code are there from then on
            rounds = [first_save(place, make, least_steps) for _ in range(options.repeats)]
            report_rounds(report, f"{model}, {place.name}", make().state.size_bytes, rounds)
    report.finish(options.json)


if __name__ == "__main__":
    main()
