"""CPU time of hooks and one-bit optimizers as a share of the step of a model as wide as people train."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import harness
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from wire_model import GENERATED, ClickModel, loss_of
from wire_ranks import WORLD, Hook, on_ranks, progress, without_tables

from cnr_store.communication import OneBitAdam, OneBitLamb, PowerSGD, QuantizedGradients, ThresholdedGradients

GOAL = 10.0
BOTTOM, TOP = (512, 256), (1024, 1024, 512, 256)
BATCHES = (128, 512)
REFRESH_EVERY, ROUNDS = 3, 9
_FIRST = 3
"""Rounds that are not counted: DDP builds its buckets anew, and one-bit optimizers send whole gradients."""

WHOLE = "whole gradients"
HOOKS: dict[str, Callable[[], Hook | None]] = {
    WHOLE: lambda: None,
    "thresholds of 0.5 %": lambda: ThresholdedGradients(keep=0.005, refresh_every=REFRESH_EVERY),
    "thresholds of 0.5 %, float16": lambda: ThresholdedGradients(
        keep=0.005, refresh_every=REFRESH_EVERY, values="float16"
    ),
    "random levels, 2": lambda: QuantizedGradients(levels=2),
    "torch's PowerSGD": lambda: PowerSGD(PowerSGDState(None, start_powerSGD_iter=2)),
}
OPTIMIZERS = {"Adam": OneBitAdam, "LAMB": OneBitLamb}
Step = Callable[[], None]


def _step(model: ClickModel, wrapped: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> Step:
    samples = GENERATED.batch(0, dist.get_rank(), batch)

    def step() -> None:
        model.zero_grad()
        loss_of(wrapped, samples).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()

    return step


def _with_sgd(batch: int, make: Callable[[], Hook | None] | None) -> Step:
    """A step of SGD with a hook, or without any message."""
    model = ClickModel(GENERATED, BOTTOM, TOP)
    optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.01)
    if make is None:
        return _step(model, model, optimizer, batch)
    wrapped = without_tables(model)
    if (hook := make()) is not None:
        hook.register(wrapped)
    return _step(model, wrapped, optimizer, batch)


def _with_optimizer(batch: int, name: str, sent: str) -> Step:
    """A step of Adam or LAMB, of which nothing is sent, whole gradients or one bit per value."""
    model = ClickModel(GENERATED, BOTTOM, TOP)
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True) if sent == "nothing" else None
    parameters, warmup_steps = model.dense_parameters(), 1 if sent == "one bit" else 10**9
    optimizer = OPTIMIZERS[name](parameters, lr=1e-4, warmup_steps=warmup_steps, group=group)
    return _step(model, model, optimizer, batch)


def measure(batch: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return CPU seconds of steps on this rank, by what averages, at refreshes of thresholds and between them.

    All kinds take turns. Seconds are those of all threads of the process, until all ranks are done.
    """
    steps = {"SGD, nothing": _with_sgd(batch, None)}
    steps |= {f"SGD, {name}": _with_sgd(batch, hook) for name, hook in HOOKS.items()}
    for name in OPTIMIZERS:
        steps |= {f"{name}, {sent}": _with_optimizer(batch, name, sent) for sent in ("nothing", WHOLE, "one bit")}
    found: dict[str, dict[str, list[float]]] = {name: {"between": [], "at": []} for name in steps}
    for number in range(_FIRST + rounds):
        for name, step in steps.items():
            dist.barrier()
            started = time.process_time()
            step()
            dist.barrier()
            if number >= _FIRST:
                found[name]["between" if number % REFRESH_EVERY else "at"].append(time.process_time() - started)
        progress(batch, number)
    return found


def cost(report: harness.Report, options: argparse.Namespace) -> None:
    """Report the share that each has of the CPU time of its step."""
    for batch in BATCHES:
        found = on_ranks(WORLD, "wire_cost", "measure", batch, REFRESH_EVERY if options.quick else ROUNDS)
        _report(report, batch, found)


def _report(report: harness.Report, batch: int, found: dict[str, dict[str, list[float]]]) -> None:
    rows, lines = [], []
    for name, seconds in found.items():
        optimizer, sent = name.split(", ", 1)
        between, at = (statistics.median(seconds[when]) for when in ("between", "at"))
        nothing, whole = (_middle(found[f"{optimizer}, {other}"]) for other in ("nothing", WHOLE))
        share, beyond = 100 * (between - nothing) / between, 100 * (between - whole) / whole
        of_refresh = f"{100 * (at - nothing) / at:.1f}" if sent.startswith("thresholds") else ""
        rows.append([optimizer, sent, f"{1e3 * between:.1f}", f"{share:.1f}", of_refresh, f"{beyond:+.1f}"])
        if sent not in ("nothing", WHOLE):
            lines.append((f"{batch} samples, {optimizer}, {sent}", share, beyond))
    title = f"CPU of one step of one of {WORLD} ranks, {batch} samples each, layers {BOTTOM} and {TOP}"
    columns = ["optimizer", "sent", "ms", "its share, %", "at refreshes", "longer than whole gradients, %"]
    note = "share: of the step, what it takes longer than the same one that sends nothing; communication included"
    report.table(title, columns, rows, note)
    for name, share, beyond in lines:
        report.add(f"{name}: share of the step", share, goal=GOAL, unit=" %")
        report.add(f"{name}: longer than with whole gradients", beyond, goal=GOAL, unit=" %")


def _middle(seconds: dict[str, list[float]]) -> float:
    return statistics.median([*seconds["between"], *seconds["at"]])
