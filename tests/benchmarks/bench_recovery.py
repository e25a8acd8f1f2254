"""What it costs to replace one of four ranks: its rows alone are read, against a restore of all ranks.

Run: ``python tests/benchmarks/bench_recovery.py``. Four gloo processes hold a table split by rows, with Adagrad's state
per element, and a dense layer of which each has a copy. A baseline and some deltas are saved. Then rank 1 begins anew
and the others survive, and for comparison all begin anew. Bytes are those that the processes read, wire bytes of the
dense state not among them.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Report, arguments, data_folder
from torch import nn
from wire_ranks import WORLD, on_ranks

from cnr_store import TableOptions
from cnr_store.communication import PartialSums
from cnr_store.training import CheckpointManager, SavePolicy, StoreOptions, Survivor

DIM, BATCH, DELTAS = 64, 4096, 3
GOAL = 0.3


class Training:
    """One rank: its rows of a table, its copy of a layer, and their optimizer."""

    def __init__(self, rows: int, bits: int) -> None:
        torch.manual_seed(dist.get_rank())
        self.model = nn.ModuleDict({"users": PartialSums(rows, DIM), "top": nn.Linear(DIM, 256)})
        torch.manual_seed(0)
        for parameter in self.model["top"].parameters():
            nn.init.normal_(parameter, std=0.1)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.05)
        self.options = TableOptions(bits=bits) if bits else TableOptions.exact()
        self.rows = rows

    def manager(self, url: str) -> CheckpointManager:
        """Return a new manager of this training; all ranks call it."""
        return CheckpointManager(
            url, model=self.model, optimizer=self.optimizer, options=self.options,
            save_policy=SavePolicy(rng=False), store_options=StoreOptions(threads=1),
        )  # fmt: skip

    def step(self, number: int) -> None:
        """Train on a batch that is the same on all ranks."""
        generator = torch.Generator().manual_seed(number)
        ids = (torch.rand(BATCH * 8, generator=generator) ** 4 * self.rows).long()
        table: Any = self.model["users"]
        self.optimizer.zero_grad()
        self.model["top"](table.pooled(ids, torch.arange(0, len(ids), 8))).square().mean().backward()
        self.optimizer.step()


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


def recover(folder: str, rows: int, bits: int, repeats: int) -> dict[str, list[list[float]]]:
    """Return, by whether all ranks begin anew, the seconds, CPU seconds and bytes of each recovery of all ranks."""
    url = f"{folder}/store"
    training = Training(rows, bits)
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
            training, survivor = Training(rows, bits), None
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


def main() -> None:
    """Run the benchmark."""
    options = arguments(__doc__, rows=4_000_000, repeats=5).parse_args()
    report = Report(f"Replacing one of {WORLD} ranks: a table of {options.rows:,} x {DIM} with Adagrad's sums")
    report.start()
    table = []
    for name, bits in (("8 bits", 8), ("exact", 0)):
        with data_folder(options.folder) as folder:
            found = on_ranks(WORLD, "bench_recovery", "recover", str(folder), options.rows, bits, options.repeats)
        for at, what in enumerate(("time", "CPU", "bytes")):
            pairs = [part[at] / whole[at] for part, whole in zip(found["partial"], found["full"], strict=True)]
            report.add(
                f"{what}, partial / full, {name}", statistics.median(pairs), goal=GOAL, low=min(pairs), high=max(pairs)
            )
        for way, taken in found.items():
            took, cpu, size = (statistics.median(column) for column in zip(*taken, strict=True))
            table.append((name, way, took, cpu, size / 1e6))
    report.table("One recovery of all ranks", ("stored", "way", "s", "CPU s", "MB read"), table)
    report.finish(options.json)


if __name__ == "__main__":
    main()
