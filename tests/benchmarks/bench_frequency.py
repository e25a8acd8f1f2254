"""How often a training can save: saves per hour that cost at most 1 % of its throughput, and a save after every step.

``python tests/benchmarks/bench_frequency.py [--model trace mlperf/adam ...] [--places disk,1] [--quick]``: models
that are trained for real. Each round, `torch.save` and `dcp.async_save` with a kept stager save once, the store after
1, 8, 16, 32, 64 and 256 steps, after as few between them as should cost 1 %, and with all rows touched. Then the same
training runs without a manager, with one that never saves, one that saves every step alone, one that saves the steps
trained while a save is written in the next one, and one with ``every_steps="auto"``, in turn.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import harness
import torch
from bench_cost import Cost, measured
from drifting import DRIFT
from frequency import SavePoint, interval_to_measure, seconds_between
from models import add_model_option, chosen_model
from peers import Cnr, DcpAsyncKept, Peer, TorchSave
from places import PLACES_HELP, Place, chosen_places
from trained import Trained, TrainedTables, TrainedTrace

from cnr_store_gpu import warmup

SHARE = 0.01
ACCOUNTS = ("cores to spare", "no core to spare", "CPU time alone")
"""What of a save counts as lost; see `points`."""
PEER_GOALS = {TorchSave.name: 50.0, DcpAsyncKept.name: 12.0}
"""How many times as many saves per hour."""
EVERY_STEP = 3.1
"""Goal: percent of a step that a save after every step takes."""
AUTO = 0.05
"""Share that saves may cost in the run with ``every_steps="auto"``: five times what is aimed at, so that it is seen."""
BITS = 8
TRACE = "trace"
ALL_ROWS = math.inf


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    intervals: tuple[int, ...]
    repeats: int
    block_s: float


FULL = Size((1, 8, 16, 32, 64, 256), 3, 5.0)
QUICK = Size((1, 8), 1, 0.3)

Rounds = dict[str, list[dict[float, Cost]]]
"""By who saves: for each round, the cost by the steps since the save before."""


def full_round(make: Callable[[], Peer], place: Place, training: Trained) -> dict[float, Cost]:
    """Save once with who writes everything at each save."""
    peer = make()
    peer.open(place, training.state)
    try:
        cost = measured(peer.save)
        return {ALL_ROWS: replace(cost, size_bytes=peer.size_bytes)}
    finally:
        peer.close()


def store_round(
    place: Place, training: Trained, intervals: Sequence[int], steps_taken: harness.Timings
) -> dict[float, Cost]:  # fmt: skip
    """Save after so many steps each, and once with all rows touched, in deltas of one chain.

    Then after the shortest interval between them that should cost at most `SHARE`, by each of `ACCOUNTS`.
    """
    store = Cnr(BITS)
    store.open(place, training.state)
    try:
        store.save()()
        run(training, store, 3)
        store.save()()  # warms up the buffers
        found: dict[float, Cost] = {}

        def save_after(steps: int) -> None:
            run(training, store, steps)
            found[steps] = _saved(store)

        for steps in intervals:
            save_after(steps)
        between = {interval_to_measure(points(found, one), step_seconds(steps_taken, one), SHARE) for one in ACCOUNTS}
        for interval in sorted(one for one in between if one is not None):
            for _ in range(2):  # the second counts: it comes after one of the same interval, as in a training
                save_after(interval)
        move_all(store)
        found[ALL_ROWS] = _saved(store)
        return found
    finally:
        store.close()


def _saved(store: Cnr) -> Cost:
    before = store.size_bytes
    cost = measured(store.save)
    return replace(cost, size_bytes=store.size_bytes - before)


def run(training: Trained, store: Cnr | None, steps: int) -> None:
    """Train, with the manager of a store or without one."""
    for _ in range(steps):
        training.step()
        if store is not None and store.manager is not None:
            store.manager.step()


@torch.no_grad()
def move_all(store: Cnr) -> None:
    """Touch every row, and move it as far as a touched row drifts."""
    assert store.manager is not None
    for table, weight in store.manager.tracker.weights.items():
        weight.add_(torch.randn_like(weight), alpha=DRIFT * float(weight.std()))
        store.manager.tracker.mark(table, torch.arange(len(weight)))


def measure_saves(place: Place, training: Trained, size: Size) -> tuple[Rounds, harness.Timings]:
    """Return what each save costs, round by round, and the seconds of some steps before each turn."""
    start = training.state.copy()
    steps = harness.Timings([], [])
    turns: dict[str, Callable[[], dict[float, Cost]]] = {
        TorchSave.name: partial(full_round, TorchSave, place, training),
        DcpAsyncKept.name: partial(full_round, DcpAsyncKept, place, training),
        "cnr_store": partial(store_round, place, training, size.intervals, steps),
    }
    rounds: Rounds = defaultdict(list)
    for number in range(size.repeats):
        for name in list(turns)[:: 1 if number % 2 == 0 else -1]:
            training.state.fill(start)
            for _ in range(10):
                cpu, wall = time.process_time(), time.perf_counter()
                training.step()
                steps.wall.append(time.perf_counter() - wall)
                steps.cpu.append(time.process_time() - cpu)
            gc.collect()
            rounds[name].append(turns[name]())
    return rounds, steps


def behind_s(cost: Cost) -> float:
    """Return the CPU seconds of a save in the background."""
    return max(0.0, cost.cpu_s - cost.stall_cpu_s)


def step_seconds(steps: harness.Timings, account: str) -> float:
    """Return what a step takes by one of `ACCOUNTS`."""
    return statistics.median(steps.cpu if account == "CPU time alone" else steps.wall)


def points(costs: Mapping[float, Cost], account: str) -> list[SavePoint]:
    """Return what saves cost by one of `ACCOUNTS`."""
    return [
        SavePoint(steps, *{
            "cores to spare": (one.stall_s, one.done_s),
            "no core to spare": (max(one.stall_s, one.stall_cpu_s) + behind_s(one), one.done_s),
            "CPU time alone": (one.cpu_s, 0.0),
        }[account])
        for steps, one in costs.items()
    ]  # fmt: skip


SAVE_COLUMNS = (
    "saved by", "steps since the save before", "kB", "stall ms", "CPU ms behind the training", "committed ms"
)  # fmt: skip
NOTE = (
    "Medians. A step takes {step:.1f} ms, {cpu:.1f} ms of CPU time. On a disk everybody fsyncs. Cores to spare: a save "
    "costs its stall. No core to spare: its threads in the stall one after the other, and its CPU time behind the "
    "training. CPU time alone: what saves and steps compute, no waiting; the steadiest figure on a busy machine. No "
    "save begins before the one before is committed. Between two measured intervals a save of the store counts as the "
    "longer one's; in each round the shortest that should do, by a straight line between its neighbours, is measured "
    "too."
)
PUBLISHED = (
    "Published: Check-N-Run's successor DECK saves 12 times as often as before at negligible cost; LowDiff saves every "
    "iteration at less than 3.1 %; CheckFreq stays below 3.5 %."
)


def report_saves(report: harness.Report, what: str, rounds: Rounds, steps: harness.Timings, size_bytes: int) -> None:
    """Add what saves cost, saves per hour, and the ratios to the peers round by round."""
    step_s, step_cpu_s = statistics.median(steps.wall), statistics.median(steps.cpu)
    rows: list[list[harness.Cell]] = []
    for name, kept in rounds.items():
        for interval in sorted({one for costs in kept for one in costs}):
            own = [costs[interval] for costs in kept if interval in costs]
            rows.append([
                name, "all rows" if interval == ALL_ROWS else int(interval), own[0].size_bytes / 1e3,
                1e3 * statistics.median(one.stall_s for one in own), 1e3 * statistics.median(map(behind_s, own)),
                1e3 * statistics.median(one.done_s for one in own),
            ])  # fmt: skip
    report.table(
        f"Saves, {what}: {size_bytes / 1e6:.0f} MB of tensors", SAVE_COLUMNS, rows,
        NOTE.format(step=1e3 * step_s, cpu=1e3 * step_cpu_s),
    )  # fmt: skip
    for account in ACCOUNTS:
        one_step_s = step_seconds(steps, account)
        hourly = {
            name: [3600 / seconds_between(points(costs, account), one_step_s, SHARE) for costs in kept]
            for name, kept in rounds.items()
        }
        for name, found in hourly.items():
            low, middle, high = harness.spread(found)
            report.add(f"{what}, {account}: {name}", middle, unit=" saves/h", low=low, high=high)
        for peer, goal in PEER_GOALS.items():
            ratios = [mine / theirs for mine, theirs in zip(hourly["cnr_store"], hourly[peer], strict=True)]
            low, middle, high = harness.spread(ratios)
            report.add(
                f"{what}, {account}: saves/h / {peer}", middle, low=low, high=high, sense="at least",
                goal=goal if account == "cores to spare" else None,
            )  # fmt: skip
    every = [costs[1] for costs in rounds["cnr_store"]]
    _, stall, _ = harness.spread([100 * one.stall_s / step_s for one in every])
    _, behind, _ = harness.spread([100 * behind_s(one) / step_cpu_s for one in every])
    report.add(f"{what}: save of one step, stall", stall, unit="% of step", goal=EVERY_STEP)
    report.add(f"{what}: save of one step, CPU behind the training", behind, unit="% of step's CPU")


# ---- whole trainings


@dataclass(slots=True)
class Side:
    """A training of its own, with or without a manager."""

    training: Trained
    store: Cnr | None

    def block(self, steps: int) -> None:
        """Train so many steps, until all is committed."""
        run(self.training, self.store, steps)
        if self.store is not None and self.store.manager is not None:
            self.store.manager.wait_until_finished()

    def saves(self) -> int:
        """How many there were so far."""
        return 0 if self.store is None or self.store.manager is None else len(self.store.manager.history)


def measure_training(
    report: harness.Report, what: str, place: Place, make: Callable[[], Trained], block: int, repeats: int
) -> None:
    """Run the sides in turn and report steps per second of each, and what saves take of them."""
    stores = {
        NEVER[0]: None,
        NEVER[1]: Cnr(BITS),
        "a save of every step": Cnr(BITS, every_steps=1),
        "every step, those that come while one is written in the next": Cnr(BITS, every_steps=1, when_busy="later"),
        AUTO_NAME: Cnr(BITS, every_steps="auto", overhead=AUTO),
    }
    sides = {name: Side(make(), store) for name, store in stores.items()}
    try:
        for side in sides.values():
            if side.store is not None:
                side.store.open(place, side.training.state)
            _warm_up(side)
        auto = sides[AUTO_NAME].store
        assert auto is not None
        assert auto.manager is not None
        interval = auto.manager.rate.interval
        assert interval is not None
        # As many of its saves in each block, if the blocks do not become much longer. They begin between two saves:
        # a training that goes on does not wait for its last save, as a block with a save at its end would.
        block = min(4 * block, interval.every_steps * math.ceil(block / interval.every_steps))
        auto.manager.save()
        run(sides[AUTO_NAME].training, auto, interval.every_steps // 2)
        before = {name: side.saves() for name, side in sides.items()}
        found = harness.alternating({name: partial(side.block, block) for name, side in sides.items()}, repeats)
        _report_training(
            report, what, block, found, {name: side.saves() - before[name] for name, side in sides.items()}
        )
        report.note(f"      auto: {auto.manager.rate.interval}")
    finally:
        for side in sides.values():
            if side.store is not None:
                side.store.close()


def _warm_up(side: Side) -> None:
    """Train past the first baseline; with "auto" until its interval rests on enough saves."""
    side.block(15)
    manager = None if side.store is None else side.store.manager
    stop = time.monotonic() + 60
    while manager is not None and manager.rate.interval is not None and time.monotonic() < stop:
        if (measure := manager.rate.interval.measure) is not None and measure.saves >= 2:
            break
        side.block(10)


NEVER = ("no manager", "never saves")
AUTO_NAME = f'every_steps="auto", {AUTO:.0%}'
TRAINING_COLUMNS = (
    "training", "steps per s", "steps per CPU s", "lost, time", "lost, CPU time", "saves per hour",
    "a crash loses at most",
)  # fmt: skip


def _report_training(
    report: harness.Report, what: str, block: int, found: Mapping[str, harness.Timings], saves: Mapping[str, int]
) -> None:
    reference = found[NEVER[1]]
    rows: list[list[harness.Cell]] = []
    for name, timings in found.items():
        lost = [
            statistics.median(100 * (a / b - 1) for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in ((timings.wall, reference.wall), (timings.cpu, reference.cpu))
        ]
        trained = block * len(timings.wall)
        loses = "everything" if name in NEVER else f"more than {trained} steps"
        rows.append([
            name, block / statistics.median(timings.wall), block / statistics.median(timings.cpu),
            f"{lost[0]:.1f}%", f"{lost[1]:.1f}%", 3600 * saves[name] / sum(timings.wall),
            f"{2 * trained / saves[name]:.0f} steps" if saves[name] else loses,
        ])  # fmt: skip
        report.timings(f"{what}: {name}", timings)
        if name == AUTO_NAME:
            report.add(f"{what}: auto, lost time", lost[0], unit="%", goal=100 * AUTO)
            report.add(f"{what}: auto, lost CPU time", lost[1], unit="%", goal=100 * AUTO)
    report.table(
        f"Training, {what}: blocks of {block} steps in turn", TRAINING_COLUMNS, rows,
        "Lost against a manager that never saves: medians of the blocks' ratios. A crash loses what was trained since "
        "the step of the last committed save: the interval until the next one, and the steps while that is written.",
    )  # fmt: skip


def main() -> None:
    """Measure."""
    parser = harness.arguments(__doc__, rows=0, repeats=FULL.repeats)
    add_model_option(parser, (TRACE, "zipf300/rowwise_adagrad"), (TRACE,))
    parser.add_argument("--places", default="disk", help=PLACES_HELP)
    options = parser.parse_args()
    size = replace(QUICK if options.quick else FULL, repeats=options.repeats)
    makers: dict[str, Callable[[], Trained]] = {
        name: partial(TrainedTrace, 2 * sum(size.intervals))
        if name == TRACE
        else partial(TrainedTables, chosen_model(options, name))
        for name in options.model
    }
    report = harness.Report(f"saves per hour at {SHARE:.0%} of throughput, {BITS}-bit quality")
    report.start()
    torch.set_num_threads(1)
    warmup()
    for place in chosen_places(options.places.split(","), options.folder):
        for model, make in makers.items():
            what = f"{model}, {place.name}"
            training = make()
            measure_saves(place, training, QUICK)  # imports, compiled code and connections are there from then on
            rounds, taken = measure_saves(place, training, size)
            report_saves(report, what, rounds, taken, training.state.size_bytes)
            del training  # memory for four others
            block = max(3, round(size.block_s / statistics.median(taken.wall)))
            measure_training(report, what, place, make, block, size.repeats)
    report.note(PUBLISHED)
    report.finish(options.json)


if __name__ == "__main__":
    main()
