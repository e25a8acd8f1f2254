"""Runs a function of a benchmark in every rank of a gloo world of processes on this machine; means over its seeds."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import harness
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from wire_model import BATCH, ClickModel, Clicks, Samples, loss_of

from cnr_store.communication import Meter

WORLD = 4
LEARNING_RATES = {"generated": (0.5, 0.1), "ml-100k": (0.1, 0.05)}
"""Of SGD for the dense part and of Adagrad for the tables; the same for all that is compared."""


def on_ranks(world: int, module: str, function: str, *arguments: Any) -> Any:
    """Return what a function of a module beside this one returns on rank 0 of so many ranks, of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, f"{folder}/meeting", str(world), module, function, json.dumps(arguments)]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(world)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"{function} failed on a rank")
        return json.loads(outputs[0].splitlines()[-1])


def be_a_rank(meeting: str, world: str, module: str, function: str, arguments: str, rank: str) -> None:
    """Call the function on this rank, and print what it returns as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world))
    found = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    dist.barrier()
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


class Hook(Protocol):
    """What averages the gradients of a DDP model."""

    def register(self, model: DistributedDataParallel) -> None:
        """Take over its gradients."""


def steps_of_sgd(
    clicks: Clicks,
    model: ClickModel,
    hook: Hook | None,
    meter: Meter,
    seed: int,
    steps: int,
    instead: torch.optim.Optimizer | None = None,
) -> Iterator[tuple[int, float]]:
    """Train a model on all ranks, and yield each step and its loss. Tables are averaged whole, and not counted.

    Parameters
    ----------
    hook
        Of the dense part; None is DDP's own all-reduce.
    meter
        Counts the bytes of the dense part, from the first step on.
    instead
        Another optimizer of the dense part than SGD.
    """
    wrapped = without_tables(model, meter.group())
    if hook is not None:
        hook.register(wrapped)
    of_dense, of_tables = LEARNING_RATES[clicks.name]
    dense = instead or torch.optim.SGD(model.dense_parameters(), lr=of_dense)
    tables = torch.optim.Adagrad([model.tables], lr=of_tables)
    meter.reset()
    yield from training_steps(clicks, model, wrapped, [dense, tables], seed, range(steps))


def training_steps(
    clicks: Clicks,
    model: ClickModel,
    wrapped: DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
    seed: int,
    steps: Iterable[int],
) -> Iterator[tuple[int, float]]:
    """Train such steps of a run on all ranks, however many; yields each step and this rank's loss."""
    for step in steps:
        model.zero_grad()
        loss = loss_of(wrapped, own_samples(clicks, seed, step))
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        assert model.tables.grad is not None
        dist.all_reduce(model.tables.grad.div_(dist.get_world_size()))
        for optimizer in optimizers:
            optimizer.step()
        yield step, loss.item()


def own_samples(clicks: Clicks, seed: int, step: int) -> Samples:
    """Return this rank's share of the samples of a step; those of all ranks are the same on any number of ranks."""
    every = [clicks.batch(seed, step * WORLD + number, BATCH) for number in range(WORLD)]
    shares = (torch.cat(parts).tensor_split(dist.get_world_size()) for parts in zip(*every, strict=True))
    ids, dense, labels = (share[dist.get_rank()] for share in shares)
    return ids, dense, labels


def without_tables(model: ClickModel, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """Return a model of which DDP averages the dense part only."""
    # DDP looks a parameter of the outermost module up with a dot before its name, and once without.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["tables", ".tables"])
    return DistributedDataParallel(model, process_group=group, forward_sync_buffers=False)


def progress(*found: object) -> None:
    """Print what rank 0 has found so far, for who waits."""
    if dist.get_rank() == 0:
        print("   ", *found, file=sys.stderr, flush=True)


def with_spread(values: Sequence[float]) -> str:
    """Return the mean over seeds and the standard deviation."""
    return f"{statistics.mean(values):.4f} +- {spread_of(values):.4f}"


def spread_of(values: Sequence[float]) -> float:
    """Return the standard deviation over seeds; 0 of one seed."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def add_difference(
    report: harness.Report,
    name: str,
    dense: Sequence[Sequence[float]],
    found: Sequence[Sequence[float]],
    *,
    is_ablation: bool = False,
) -> None:
    """Report by how much logloss and AUC of runs are worse than those of dense runs of the same seeds.

    The goal is to stay within the spread of the dense runs, of an ablation to leave it.
    """
    for at, what, sign in ((0, "logloss", 1), (1, "AUC", -1)):
        worse = [sign * (after[at] - before[at]) for before, after in zip(dense, found, strict=True)]
        report.add(
            f"{name}: {what} worse by", statistics.mean(worse), goal=spread_of([run[at] for run in dense]), unit="",
            low=min(worse), high=max(worse), sense="at least" if is_ablation else "at most",
        )  # fmt: skip


if __name__ == "__main__":
    be_a_rank(*sys.argv[1:])
