"""Dense parameters and Adam's state at size, beside a few tables: stall, write and read, against others and the disk.

Run: ``python tests/benchmarks/bench_dense.py [--gigabytes 1] [--shapes many few]``. ``many`` has layers of 4 MiB,
``few`` of 64 MiB; with Adam's two moments three tensors each. In every round each side saves after a step of training,
once while the training waits and once while it goes on with another step, and loads what it saved. Sides run in
alternating order. Everybody fsyncs. Before a cold load the files are dropped from the page cache. torch has one thread,
so that the CPU time of a stall is that of the thread that trains, and a core is left for what works behind it.

What is loaded is compared with what was saved by a digest of each dense tensor, every time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from bench_cost import give_memory_back
from harness import (
    MIB,
    Cell,
    PeakMemory,
    Report,
    Timings,
    arguments,
    data_folder,
    fsync_file,
    shown,
    spread,
    timed,
)
from peers import Cnr, DcpAsyncKept, Safetensors, Wait
from places import Place, local_disk
from torch import nn
from trainee import TrainingState

TABLES, DIM, BAG = 4, 32, 4
WIDTHS = {"many": 1024, "few": 4096}
GB = 1e9
BANDWIDTH_GOAL, STALL_GOAL = 0.8, 0.1
PIECE_BYTES = 64 * MIB


Times = tuple[float, float]
"""Seconds, and CPU seconds of the thread that trains."""


def now() -> Times:
    """Return the clocks."""
    return time.perf_counter(), time.thread_time()


def since(started: Times) -> Times:
    """Return what has passed."""
    return time.perf_counter() - started[0], time.thread_time() - started[1]


def added(first: Times, second: Times) -> Times:
    """Return the sums."""
    return first[0] + second[0], first[1] + second[1]


class Layers(nn.Module):
    """Four tables, and equal layers over what was looked up."""

    def __init__(self, width: int, layers: int, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for _ in range(TABLES))
        self.bottom = nn.Linear(TABLES * DIM, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return one number per sample; ``ids`` is int64 (tables, batch, bag)."""
        x = self.bottom(torch.cat([table(bag) for table, bag in zip(self.tables, ids, strict=True)], dim=1))
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * 0.01
        return x.mean(dim=1)


class DenseState(TrainingState):
    """A training whose state is mostly dense, after its first step.

    Attributes
    ----------
    dense
        The tensors of the layers and of their optimizer, by name; live.
    hooks
        Seconds, and CPU seconds, that the last step has spent in hooks before the optimizers' updates.
    """

    def __init__(self, width: int, layers: int, rows: int, batch: int) -> None:
        torch.manual_seed(0)
        made = Layers(width, layers, rows)
        sparse = torch.optim.SparseAdam([*made.tables.parameters()], lr=0.01)
        adam = torch.optim.Adam([*made.bottom.parameters(), *made.layers.parameters()], lr=1e-3, fused=True)
        self.model, self.optimizers = made, (sparse, adam)
        self._rows, self._batch, self._random = rows, batch, torch.Generator().manual_seed(0)
        self.hooks, self._entered, self._handles = (0.0, 0.0), (0.0, 0.0), list[Any]()
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._enter)
        self.train()
        super().__init__(made, self.optimizers)
        self.dense = {name: tensor for name, tensor in self.tensors.items() if "tables" not in name and tensor.ndim}

    def time_hooks(self) -> None:
        """Time all hooks that the optimizers have now."""
        for handle in self._handles:
            handle.remove()
        self._handles = [optimizer.register_step_pre_hook(self._leave) for optimizer in self.optimizers]

    def _enter(self, *_: object) -> None:
        self._entered = now()

    def _leave(self, *_: object) -> None:
        self.hooks = added(self.hooks, since(self._entered))

    def train(self) -> float:
        """Take one step, in which all dense tensors and some rows change; return its seconds."""
        started, self.hooks = time.perf_counter(), (0.0, 0.0)
        ids = torch.randint(self._rows, (TABLES, self._batch, BAG), generator=self._random)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(ids).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return time.perf_counter() - started

    @property
    def dense_bytes(self) -> int:
        """Bytes of `dense`."""
        return sum(tensor.nbytes for tensor in self.dense.values())

    def digests(self) -> dict[str, int]:
        """Return a digest of each dense tensor."""
        return {name: xxhash.xxh3_64_intdigest(tensor.numpy().data) for name, tensor in self.dense.items()}


class Side(Protocol):
    """What a round needs of those who save; they are those of `peers`."""

    name: str
    url: str

    def open(self, place: Place, trainee: TrainingState) -> None: ...
    def save(self) -> Wait | None: ...
    def load(self) -> None: ...
    def close(self) -> None: ...


class Bare:
    """The dense tensors one after the other in one file: what the disk can do."""

    name = "bare write, read"

    def open(self, place: Place, trainee: TrainingState) -> None:
        """Prepare nothing."""
        assert isinstance(trainee, DenseState)
        self.url, self._tensors = place.new(), [*trainee.dense.values()]

    def save(self) -> None:
        """Write and fsync."""
        path = Path(self.url)
        with path.open("wb", buffering=0) as file:
            for piece in self._pieces():
                written = file.write(piece)
                assert written == len(piece)
        fsync_file(path)

    def load(self) -> None:
        """Read into the live tensors."""
        with Path(self.url).open("rb", buffering=0) as file:
            for piece in self._pieces():
                read = file.readinto(piece)
                assert read == len(piece)

    def close(self) -> None:
        """Remove the file."""
        Path(self.url).unlink()

    def _pieces(self) -> list[memoryview]:
        views = [memoryview(tensor.numpy().reshape(-1).view("u1")) for tensor in self._tensors]
        return [one[at : at + PIECE_BYTES] for one in views for at in range(0, len(one), PIECE_BYTES)]


@dataclass(slots=True)
class Measured:
    """What one side took, round by round.

    Attributes
    ----------
    committed, cold, warm
        A save while the training waits, and loads; CPU seconds of the process.
    stall
        The call that saves and hooks of the next step, while the training goes on; CPU seconds of its thread.
    lost
        Seconds by which that call and the next step took longer than a step alone.
    peak
        Bytes of resident memory beyond what there was before that save.
    """

    committed: Timings = field(default_factory=lambda: Timings([], []))
    cold: Timings = field(default_factory=lambda: Timings([], []))
    warm: Timings = field(default_factory=lambda: Timings([], []))
    stall: Timings = field(default_factory=lambda: Timings([], []))
    lost: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)


def keep(kept: Timings, times: Times) -> None:
    """Add a round."""
    kept.wall.append(times[0])
    kept.cpu.append(times[1])


def measured(work: Callable[[], object]) -> Times:
    """Return what a call took, and CPU seconds of the process."""
    cpu, took = time.process_time(), timed(work)
    return took, time.process_time() - cpu


def drop_from_page_cache(url: str) -> None:
    """Make the next read of all files of a checkpoint one of the disk."""
    path = Path(url)
    for file in [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def run_round(side: Side, place: Place, state: DenseState, step_s: float, found: Measured) -> None:
    """Save while the training goes on, save while it waits, load; the first save of a side is not counted."""
    side.open(place, state)
    state.time_hooks()
    try:
        if not isinstance(side, Bare):
            save_and_go_on(side, state, step_s, Measured())
            save_and_go_on(side, state, step_s, found)
        train(side, state)
        os.sync()
        expected = state.digests()
        keep(found.committed, measured(lambda: save_and_wait(side)))
        for kept in (found.cold, found.warm):
            if isinstance(side, Cnr):
                side.leave()
            if kept is found.cold:
                drop_from_page_cache(side.url)
            for tensor in state.dense.values():
                tensor.fill_(-77.0)
            keep(kept, measured(side.load))
            if state.digests() != expected:
                raise SystemExit(f"{side.name} has not loaded what it saved")
    finally:
        side.close()
        state.time_hooks()


def train(side: Side, state: DenseState) -> float:
    """Take one step, and tell a manager of it; returns the seconds of the step alone."""
    took = state.train()
    if isinstance(side, Cnr):
        assert side.manager is not None
        side.manager.step()
    return took


def save_and_wait(side: Side) -> None:
    """Save, and return when it is durable."""
    wait = side.save()
    if wait is not None:
        wait()


def save_and_go_on(side: Side, state: DenseState, step_s: float, found: Measured) -> None:
    """Save, take a step meanwhile, and then wait until it is durable."""
    train(side, state)
    os.sync()
    peak, started = PeakMemory(), now()
    wait = side.save()
    call = since(started)
    step = train(side, state)
    if wait is not None:
        wait()
    keep(found.stall, added(call, state.hooks))
    found.lost.append(call[0] + step - step_s)
    found.peak.append(max(0, peak.beyond_bytes))


def copies(state: DenseState, repeats: int) -> Timings:
    """Return what copies of the dense tensors take into memory that is there."""
    kept = {name: tensor.clone() for name, tensor in state.dense.items()}

    def copy() -> None:
        for name, tensor in state.dense.items():
            kept[name].copy_(tensor)

    found = Timings([], [])
    for _ in range(repeats):
        keep(found, measured(copy))
    return found


SIDES: tuple[Callable[[], Side], ...] = (Bare, Safetensors, DcpAsyncKept, lambda: Cnr(8, dense_copies="lazy"))
COLUMNS = (
    "side", "committed s", "MB/s", "CPU s", "stall s", "CPU s", "training lost s", "peak MB", "cold load s", "CPU s",
    "warm load s",
)  # fmt: skip
NOTE = (
    "Medians (lowest to highest round). committed: the training waits meanwhile; its CPU seconds are those of the "
    "process. stall: the call that saves, and hooks before the next update; its CPU seconds are those of the thread "
    "that trains. training lost: the call and the next step against a step alone: what works in the background takes "
    "cores from that step. peak: resident memory beyond what there was before that save; what a side keeps from save "
    "to save was there."
)


def bench_shape(report: Report, options: argparse.Namespace, shape: str) -> None:
    """All sides on one shape of model."""
    width = WIDTHS[shape]
    layers = max(1, round(options.gigabytes * GB / (12 * width * width)))
    state = DenseState(width, layers, options.rows, options.batch)
    steps, copied = [state.train() for _ in range(3)], copies(state, 5)
    title = f"{shape}: {layers} layers of {4 * width * width / MIB:.0f} MiB, {state.dense_bytes / GB:.3f} GB"
    report.note(
        f"{title} of dense parameters and Adam's state, {(state.size_bytes - state.dense_bytes) / 1e6:.0f} MB of "
        f"tables; a step of {options.batch} samples takes {shown(statistics.median(steps))} s, a copy {copied}"
    )
    found = {make().name: Measured() for make in SIDES}
    with data_folder(options.folder) as folder:
        place = local_disk(folder)
        for number in range(options.repeats):
            for make in SIDES[:: 1 if number % 2 == 0 else -1]:
                give_memory_back()
                side = make()
                run_round(side, place, state, statistics.median(steps), found[side.name])
    report_sides(report, shape, title, state.dense_bytes, copied, found)


def report_sides(
    report: Report, shape: str, title: str, dense_bytes: int, copied: Timings, found: dict[str, Measured]
) -> None:
    """Add the table and the ratios of one shape."""

    def cells(values: Timings) -> list[Cell]:
        if not values.wall:
            return [None, None]
        low, middle, high = spread(values.wall)
        return [f"{shown(middle)} ({shown(low)} to {shown(high)})", statistics.median(values.cpu)]

    rows = [
        [
            name, cells(one.committed)[0], dense_bytes / 1e6 / statistics.median(one.committed.wall),
            cells(one.committed)[1], *cells(one.stall), statistics.median(one.lost) if one.lost else None,
            max(one.peak) / 1e6 if one.peak else None, *cells(one.cold), cells(one.warm)[0],
        ]
        for name, one in found.items()
    ]  # fmt: skip
    report.table(title, COLUMNS, rows, NOTE)
    cnr = next(one for name, one in found.items() if name.startswith("cnr_store"))
    for peer, goal in ((Safetensors.name, 1 / BANDWIDTH_GOAL), (DcpAsyncKept.name, None), (Bare.name, None)):
        theirs = found[peer]
        report.add_ratio(f"{shape}, seconds of a write / {peer}", cnr.committed, theirs.committed, goal)
        report.add_ratio(f"{shape}, seconds of a cold read / {peer}", cnr.cold, theirs.cold, goal)
        report.add_ratio(f"{shape}, seconds of a warm read / {peer}", cnr.warm, theirs.warm)
        if theirs.stall.wall:
            report.add_ratio(f"{shape}, stall / {peer}", cnr.stall, theirs.stall)
    rounds = len(cnr.stall.wall)
    middle = Timings(*([statistics.median(values)] * rounds for values in (copied.wall, copied.cpu)))
    report.add_ratio(f"{shape}, stall / a copy", cnr.stall, middle, STALL_GOAL)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__, rows=25_000, repeats=5)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of dense parameters and Adam's state")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--shapes", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    options = parser.parse_args()
    if options.quick:
        options.gigabytes, options.rows, options.batch = min(options.gigabytes, 0.05), 1_000, 8
        options.shapes = ["many"]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)  # dcp overwrites its own
    report = Report("Dense parameters and Adam's state beside tables")
    report.start()
    with data_folder(options.folder) as folder:  # imports and compiled code are there from then on
        for make in SIDES:
            run_round(make(), local_disk(folder), DenseState(WIDTHS["many"], 1, 1_000, 8), 1.0, Measured())
    for shape in options.shapes:
        bench_shape(report, options, shape)
    report.finish(options.json)


if __name__ == "__main__":
    main()
