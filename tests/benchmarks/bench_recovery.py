"""What it costs to replace one of four ranks, and what its older rows cost in quality.

Run: ``python tests/benchmarks/bench_recovery.py``. Sections: ``cost``: four gloo processes hold a table split by rows,
with Adagrad's state per element, and a dense layer of which each has a copy. A baseline and some deltas are saved. Then
rank 1 begins anew and the others survive, and for comparison all begin anew. Bytes are those that the processes read,
wire bytes of the dense state not among them.

``peers``: the same on SeaweedFS behind a link of 1 Gbit/s; the rows of rank 1 come from a peer's memory (`PeerCopies`),
and for comparison from the store. Ranks send to each other over loopback, without a link. ``copies``: what it costs in
ordinary saves to a local disk that peers get copies of them; a training with copies and one without save in turn.

``quality``: small models are trained on clicks in time order. At 1, 3 or 20 steps, each half way between two of 20
saves, a quarter of the rows of each table and their slots become what they were at the last save, the rest goes on
(CPR, MLSys 2021). This is done in memory, in one process: an exact store gives back these bits. A full restore trains
the steps since the save again, and ends with the bits of the run that nobody interrupted.

``--model``: the tables of models are split instead, each by rows; not in ``quality``, which needs clicks.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from click_cases import Source, load, real_sources
from harness import Report, arguments, data_folder
from models import BenchModel, add_model_option, chosen_models
from places import seaweed
from restored_runs import SAVES, Quality, judge, prepared, schedule
from torch import nn
from trainee import make_optimizer
from wire_ranks import WORLD, on_ranks

from cnr_store import TableOptions
from cnr_store.communication import PartialSums
from cnr_store.training import CheckpointManager, PeerCopies, SavePolicy, StoreOptions, Survivor, TrackingOptions
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.train import predict, train_step

DIM, BATCH, DELTAS = 64, 4096, 3
GOAL, PEER_GOAL = 0.3, 0.2
RECOVERIES = (1, 3, 20)
Shape = dict[str, Any]
"""The fields of a `BenchModel`, as JSON carries them to the ranks."""


class Training:
    """One rank: its rows of the tables of a model, its copy of a layer, and their optimizers."""

    def __init__(self, shape: Shape, bits: int, threads: int | None) -> None:
        model = BenchModel(**shape)
        torch.manual_seed(dist.get_rank())
        self.tables = [PartialSums(max(WORLD, rows), dim, sparse=True) for rows, dim in model.tables]
        self.top = nn.Linear(min(DIM, sum(table.dim for table in self.tables)), 256)
        self.model = nn.ModuleDict({"tables": nn.ModuleList(self.tables), "top": self.top})
        torch.manual_seed(0)
        for parameter in self.top.parameters():
            nn.init.normal_(parameter, std=0.1)
        tables = make_optimizer(model.optimizer, [table.weight for table in self.tables])
        self.optimizers = tables, torch.optim.Adagrad(self.top.parameters(), lr=0.05)
        self.options = TableOptions(bits=bits) if bits else TableOptions.exact()
        self.threads = threads

    def manager(
        self, url: str, storage_options: Mapping[str, Any] | None = None, peers: PeerCopies | None = None
    ) -> CheckpointManager:
        """Return a new manager of this training; all ranks call it."""
        return CheckpointManager(
            url, model=self.model, optimizer=self.optimizers, options=self.options,
            save_policy=SavePolicy(rng=False), tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
            store_options=StoreOptions(threads=self.threads, storage_options=storage_options, peers=peers),
        )  # fmt: skip

    def step(self, number: int) -> None:
        """Train on a batch that is the same on all ranks."""
        generator = torch.Generator().manual_seed(number)
        drawn = torch.rand(max(1, BATCH // len(self.tables)) * 8, generator=generator) ** 4
        bags = torch.arange(0, len(drawn), 8)
        looked_up = torch.cat([table.pooled((drawn * table.num_rows).long(), bags) for table in self.tables], dim=1)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (self.top(looked_up[:, : self.top.in_features]).square().mean() + looked_up.square().mean()).backward()
        for optimizer in self.optimizers:
            optimizer.step()


def read_bytes() -> int:
    """Return the bytes that this process has read by system calls so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def sum_over_ranks(*numbers: float) -> list[float]:
    """Return the sums over all ranks."""
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    found: list[float] = sums.tolist()
    return found


def recover(folder: str, shape: Shape, bits: int, threads: int | None, repeats: int) -> dict[str, list[list[float]]]:
    """Return, by whether all ranks begin anew, the seconds, CPU seconds and bytes of each recovery of all ranks."""
    url = f"{folder}/store"
    training = Training(shape, bits, threads)
    manager = training.manager(url)
    for number in range(DELTAS + 1):
        training.step(number)
        manager.step()
        manager.save()
    training.step(DELTAS + 1)
    manager.step()
    found: dict[str, list[list[float]]] = {"partial": [], "full": []}
    for name in ["partial", "full"] * (repeats + 1):  # a first round warms up
        survivor: Survivor | None = manager.survivor()
        if name == "full" or dist.get_rank() == 1:
            training, survivor = Training(shape, bits, threads), None
        manager = training.manager(url)
        dist.barrier()
        before, cpu, started = read_bytes(), time.process_time(), time.perf_counter()
        manager.restore(survivor=survivor)
        took = time.perf_counter() - started
        found[name].append([took, *sum_over_ranks(time.process_time() - cpu, read_bytes() - before)])
        training.step(DELTAS + 2)
        manager.step()
    manager.close()
    return {name: taken[1:] for name, taken in found.items()}


def recover_from_peers(
    url: str, storage_options: dict[str, Any], shape: Shape, bits: int, threads: int | None, repeats: int
) -> dict[str, list[list[float]]]:
    """Return, by where the rows of rank 1 come from, the seconds and CPU seconds of each recovery of all ranks.

    And the bytes that came from a peer, that a rank keeps for others, and that its mirrors take.
    """
    training, peers = Training(shape, bits, threads), PeerCopies(memory_bytes=4 << 30)
    manager = training.manager(url, storage_options, peers)
    for number in range(DELTAS + 1):
        training.step(number)
        manager.step()
        manager.save()
    sizes = [float(manager.peer_bytes), float(manager.mirror_bytes)]
    training.step(DELTAS + 1)
    manager.step()
    found: dict[str, list[list[float]]] = {"peer": [], "store": []}
    kept: Any = None
    for name in ["peer", "store"] * (repeats + 1):  # a first round warms up
        survivor: Survivor | None = manager.survivor()
        assert survivor is not None
        kept = survivor.copies if kept is None else kept
        survivor = replace(survivor, copies=kept if name == "peer" else {})
        if dist.get_rank() == 1:
            training, survivor = Training(shape, bits, threads), None
        manager = training.manager(url, storage_options, peers)
        dist.barrier()
        cpu, started = time.process_time(), time.perf_counter()
        restored = manager.restore(survivor=survivor)
        took = time.perf_counter() - started
        assert restored is not None
        found[name].append([took, *sum_over_ranks(time.process_time() - cpu, restored.peer_bytes), *sizes])
        training.step(DELTAS + 2)
        manager.step()
    manager.close()
    return {name: taken[1:] for name, taken in found.items()}


def save_with_copies(
    folder: str, shape: Shape, bits: int, threads: int | None, repeats: int
) -> dict[str, list[list[float]]]:
    """Return, by whether peers get copies, what each delta cost.

    The longest stall of a rank, seconds until all ranks were done with it, CPU seconds of all ranks.
    """
    sides = {}
    for name, peers in (("copies", PeerCopies(memory_bytes=4 << 30)), ("none", None)):
        training = Training(shape, bits, threads)
        sides[name] = training, training.manager(f"{folder}/{name}", peers=peers)
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for number in range(repeats + 2):  # baselines, and deltas that warm up
        for name in list(sides)[:: 1 if number % 2 else -1]:
            training, manager = sides[name]
            training.step(number)
            manager.step()
            dist.barrier()
            cpu, started = time.process_time(), time.perf_counter()
            manager.save(wait=False)
            stall = time.perf_counter() - started
            manager.wait_until_finished()
            used = time.process_time() - cpu
            stalls: list[Any] = [None] * WORLD
            dist.all_gather_object(stalls, stall)
            found[name].append([max(stalls), time.perf_counter() - started, *sum_over_ranks(used)])
    for _, manager in sides.values():
        manager.close()
    return {name: taken[2:] for name, taken in found.items()}


def row_state(model: SmallDLRM, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tables and what an optimizer has of their rows; live."""
    found = []
    for _, weight in model.table_parameters():
        slots = optimizer.state[weight].values()
        found += [
            weight.detach(),
            *(slot for slot in slots if torch.is_tensor(slot) and slot.shape[:1] == weight.shape[:1]),
        ]
    return found


def recovered(source: Source, seed: int, recoveries: int) -> Quality:
    """Return the quality of a run in which a rank is lost so many times, a random one of four."""
    case = load(source)
    model, optimizers, batches = prepared(case, seed)
    saves, _ = schedule(len(batches), 1)
    chosen = [saves[math.ceil(SAVES * (number - 0.5) / recoveries)] for number in range(1, recoveries + 1)]
    half = (saves[2] - saves[1]) // 2
    ranks, saved = np.random.default_rng(seed), list[torch.Tensor]()
    for step, batch in enumerate(batches, start=1):
        train_step(model, optimizers, batch)
        if step in saves:
            saved = [tensor.clone() for tensor in row_state(model, optimizers[0])]
        if step - half in chosen:
            rank = int(ranks.integers(WORLD))
            for live, old in zip(row_state(model, optimizers[0]), saved, strict=True):
                lost = slice(rank * len(live) // WORLD, (rank + 1) * len(live) // WORLD)
                live[lost] = old[lost]
    predicted = predict(model, case.future)
    return judge(case, predicted, predicted)


def bench_quality(report: Report, options: argparse.Namespace) -> None:
    """The loss of a run with partial recoveries, against that of the same seed without."""
    torch.set_num_threads(1)
    table = []
    for source in [Source("generated", samples=options.samples or 400_000), *real_sources(options.samples)]:
        runs = {
            number: [recovered(source, seed, number) for seed in range(options.seeds)] for number in (0, *RECOVERIES)
        }
        spread = statistics.stdev(one.logloss for one in runs[0])
        for number in RECOVERIES:
            pairs = list(zip(runs[0], runs[number], strict=True))
            worse = [after.logloss - before.logloss for before, after in pairs]
            auc = statistics.mean(before.auc - after.auc for before, after in pairs)
            table.append(
                (source.name, number, statistics.mean(worse), auc, spread, statistics.stdev(one.auc for one in runs[0]))
            )
            report.add(
                f"logloss worse by, {source.name}, {number} recoveries", statistics.mean(worse), goal=spread, unit="",
                low=min(worse), high=max(worse),
            )  # fmt: skip
    columns = ("data", "partial recoveries", "logloss worse by", "AUC worse by", "seeds: logloss", "seeds: AUC")
    report.table(f"Quality, mean of {options.seeds} seeds", columns, table, "full restores: 0, the same bits")


def add_ratio(report: Report, name: str, sides: list[list[list[float]]], at: int, goal: float | None) -> None:
    """Report the median of the first side's measure ``at`` over the second side's, round by round."""
    pairs = [one[at] / other[at] for one, other in zip(*sides, strict=True)]
    report.add(name, statistics.median(pairs), goal=goal, low=min(pairs), high=max(pairs))


def bench_cost(report: Report, options: argparse.Namespace, model: BenchModel) -> None:
    """Time, CPU and bytes of a partial recovery against those of a full restore."""
    table = []
    for name, bits in (("8 bits", 8), ("exact", 0)):
        with data_folder(options.folder) as folder:
            found = on_ranks(
                WORLD, "bench_recovery", "recover", str(folder), asdict(model), bits, options.threads, options.repeats
            )  # fmt: skip
        for at, what in enumerate(("time", "CPU", "bytes")):
            add_ratio(report, f"{model.name}: {what}, partial / full, {name}", [*found.values()], at, GOAL)
        for way, taken in found.items():
            took, cpu, size = (statistics.median(column) for column in zip(*taken, strict=True))
            table.append((name, way, took, cpu, size / 1e6))
    report.table(f"{model.name}: one recovery of all ranks", ("stored", "way", "s", "CPU s", "MB read"), table)


def bench_peers(report: Report, options: argparse.Namespace, model: BenchModel) -> None:
    """Time and CPU of a recovery whose rows come from a peer against one from SeaweedFS at 1 Gbit/s."""
    table = []
    with data_folder(options.folder) as folder, seaweed(folder, 1.0) as place:
        for name, bits in (("8 bits", 8), ("exact", 0)):
            found = on_ranks(
                WORLD, "bench_recovery", "recover_from_peers", place.new(), dict(place.options), asdict(model), bits,
                options.threads, options.repeats,
            )  # fmt: skip
            for at, what in enumerate(("time", "CPU")):
                title = f"{model.name}: {what}, from a peer / from SeaweedFS at 1 Gbit/s, {name}"
                add_ratio(report, title, [*found.values()], at, PEER_GOAL if what == "time" else None)
            for way, taken in found.items():
                took, cpu, *sizes = (statistics.median(column) for column in zip(*taken, strict=True))
                table.append((name, way, took, cpu, *(size / 1e6 for size in sizes)))
    columns = ("stored", "rows from", "s", "CPU s", "MB from a peer", "MB kept for a peer", "MB of mirrors")
    report.table(f"{model.name}: one recovery of all ranks; rank 0's memory", columns, table)


def bench_copies(report: Report, options: argparse.Namespace, model: BenchModel) -> None:
    """Stall, time and CPU of a save whose copies peers get against one without."""
    table = []
    for name, bits in (("8 bits", 8), ("exact", 0)):
        with data_folder(options.folder) as folder:
            found = on_ranks(
                WORLD, "bench_recovery", "save_with_copies", str(folder), asdict(model), bits, options.threads,
                4 * options.repeats,
            )  # fmt: skip
        for at, what in enumerate(("stall", "time", "CPU")):
            title = f"{model.name}: {what} of a save, peers get copies / none, {name}"
            add_ratio(report, title, [*found.values()], at, None)
        for way, taken in found.items():
            stall, took, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
            table.append((name, way, 1e3 * stall, took, cpu))
    columns = ("stored", "peers get", "stall, ms", "all ranks done, s", "CPU s")
    report.table(f"{model.name}: one delta of {BATCH * 8:,} lookups", columns, table)


SPLIT = {"peers": bench_peers, "copies": bench_copies, "cost": bench_cost}
SECTIONS = (*SPLIT, "quality")


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__, rows=4_000_000, repeats=5)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, help="all by default; with a model all but quality")
    add_model_option(parser)
    parser.add_argument("--threads", type=int, help="of each rank's store; default: those of the library")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=0, help="clicks of each set; 0: all")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.samples = 2, 20_000
    one_table = BenchModel(f"{options.rows:,} x {DIM}, Adagrad", ((options.rows, DIM),), "adagrad")
    report = Report(f"Replacing one of {WORLD} ranks")
    report.start()
    for section in options.sections or (SPLIT if options.model else SECTIONS):
        if section == "quality":
            bench_quality(report, options)
            continue
        for model in chosen_models(options) or [one_table]:
            SPLIT[section](report, options, model)
    report.finish(options.json)


if __name__ == "__main__":
    main()
