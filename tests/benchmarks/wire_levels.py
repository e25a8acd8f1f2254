"""Bits that gradients of few levels take to a target loss: fixed levels, and those of AdaQuantFL's schedule."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import harness
import torch
import torch.distributed as dist
from wire_model import CLICKS, ClickModel, Clicks, quality
from wire_ranks import WORLD, on_ranks, progress, steps_of_sgd

from cnr_store.communication import Meter, QuantizedGradients

TESTED_EVERY = 20
TARGET_SHARE = 0.6
"""The target is the mean loss that dense runs have after this share of their steps."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many levels are sent, 0: dense; ``grows``: by AdaQuantFL's rule as the training loss falls."""

    name: str
    levels: int
    grows: bool = False


SCHEDULES = (
    Schedule("dense", 0),
    Schedule("2 levels", 2),
    Schedule("4 levels", 4),
    Schedule("8 levels", 8),
    Schedule("AdaQuantFL from 2", 2, grows=True),
    Schedule("AdaQuantFL from 8", 8, grows=True),
)
Curve = list[tuple[int, float, int]]
"""Pushed bytes, test loss and levels, once in `TESTED_EVERY` steps."""


def train(clicks: Clicks, schedule: Schedule, seed: int, steps: int) -> Curve:
    """Train once and return its curve; losses are those of rank 0, whose model is that of all."""
    meter = Meter()
    torch.manual_seed(seed)
    model = ClickModel(clicks)
    hook = QuantizedGradients(levels=schedule.levels, seed=seed) if schedule.levels else None
    group = meter.group()
    meter.reset()
    found: Curve = []
    losses: list[float] = []
    for step, loss in steps_of_sgd(clicks, model, hook, group, seed, steps):
        losses.append(loss)
        if (step + 1) % TESTED_EVERY:
            continue
        tested = quality(model, clicks)[0] if dist.get_rank() == 0 else 0.0
        found.append((meter.total.pushed_bytes, tested, hook.levels if hook else 0))
        if hook and schedule.grows:
            hook.report_loss(statistics.mean(losses[-TESTED_EVERY:]))
    progress(clicks.name, schedule.name, seed, found[-1])
    return found


def train_all(name: str, seeds: int, steps: int) -> list[list[Curve]]:
    """Return `train` of each of `SCHEDULES`, by seed."""
    by_seed = [[train(CLICKS[name], schedule, seed, steps) for schedule in SCHEDULES] for seed in range(seeds)]
    return [list(found) for found in zip(*by_seed, strict=True)]


def bits_to(curve: Curve, target: float) -> float | None:
    """Return the bits that a rank pushed until the test loss was at the target, None if it never was."""
    return next((8.0 * sent for sent, loss, _ in curve if loss <= target), None)


def levels(report: harness.Report, options: argparse.Namespace) -> None:
    """Report the bits of each schedule to the loss of dense runs."""
    for name in options.clicks:
        runs = on_ranks(WORLD, "wire_levels", "train_all", name, options.seeds, options.steps)
        _report(report, name, runs, options.steps)


def _report(report: harness.Report, name: str, runs: list[list[Curve]], steps: int) -> None:
    at = max(1, round(TARGET_SHARE * len(runs[0][0]))) - 1
    target = statistics.mean(curve[at][1] for curve in runs[0])
    reached: dict[str, list[float]] = {}
    rows = []
    for schedule, curves in zip(SCHEDULES, runs, strict=True):
        bits = [found for curve in curves if (found := bits_to(curve, target)) is not None]
        reached[schedule.name] = bits if len(bits) == len(curves) else []
        last = statistics.mean(curve[-1][1] for curve in curves)
        mean, least, most = (f"{of(bits) / 1e6:.1f}" if bits else "" for of in (statistics.mean, min, max))
        count = f"{len(bits)} of {len(curves)}"
        rows.append([schedule.name, curves[0][-1][2], f"{last:.4f}", count, mean, least, most])
    columns = ["levels", "at the end", "last logloss", "runs at the target", "Mbit per rank, mean", "least", "most"]
    report.table(f"{name}: bits to a test logloss of {target:.4f}, at most {steps} steps of SGD", columns, rows)
    adaptive = reached["AdaQuantFL from 2"]
    for fixed in SCHEDULES[1:4]:
        if adaptive and reached[fixed.name]:
            ratios = [a / b for a, b in zip(adaptive, reached[fixed.name], strict=True)]
            report.add(
                f"{name}: bits of AdaQuantFL from 2 over {fixed.name}", statistics.mean(ratios), goal=1.0,
                low=min(ratios), high=max(ratios),
            )  # fmt: skip
