"""Bits that gradients of few levels take to a target loss: fixed levels, and those of AdaQuantFL's schedule."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import harness
import torch
import torch.distributed as dist
from wire_model import CLICKS, ClickModel, Clicks, quality
from wire_ranks import WORLD, on_ranks, progress, spread_of, steps_of_sgd, with_spread

from cnr_store.communication import Meter, QuantizedGradients

TESTED_EVERY = 20
TARGETS = (0.2, 0.4, 0.6)
"""A target is the mean loss that dense runs have after such a share of their steps."""


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
    found: Curve = []
    losses: list[float] = []
    for step, loss in steps_of_sgd(clicks, model, hook, meter, seed, steps):
        losses.append(loss)
        if (step + 1) % TESTED_EVERY:
            continue
        tested = quality(model, clicks)[0] if dist.get_rank() == 0 else 0.0
        found.append((meter.total.pushed_bytes, tested, hook.levels if hook else 0))
        if hook and schedule.grows:
            hook.report_loss(statistics.mean(losses[-TESTED_EVERY:]))
    progress(clicks.name, schedule.name, seed, found[2::3])
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
    targets = [statistics.mean(curve[round(share * len(curve)) - 1][1] for curve in runs[0]) for share in TARGETS]
    means: dict[str, list[float | None]] = {}
    rows = []
    for schedule, curves in zip(SCHEDULES, runs, strict=True):
        cells, means[schedule.name] = [], []
        for target in targets:
            bits = [found for curve in curves if (found := bits_to(curve, target)) is not None]
            is_reached = len(bits) == len(curves)
            means[schedule.name].append(statistics.mean(bits) if is_reached else None)
            spread = f"{statistics.mean(bits) / 1e6:.1f} +- {spread_of(bits) / 1e6:.1f}" if is_reached else ""
            cells.append(spread or f"{len(bits)} of {len(curves)} runs")
        last = with_spread([curve[-1][1] for curve in curves])
        rows.append([schedule.name, max(curve[-1][2] for curve in curves), *cells, last])
    columns = ["levels", "at the end", *(f"Mbit to {target:.4f}" for target in targets), "last logloss"]
    report.table(
        f"{name}: bits that a rank pushes to a test logloss, {len(runs[0])} seeds, {steps} steps", columns, rows
    )
    for at, target in enumerate(targets):
        adaptive = means["AdaQuantFL from 2"][at]
        for fixed in SCHEDULES[1:4]:
            bits_of_fixed = means[fixed.name][at]
            if adaptive is not None and bits_of_fixed is not None:
                what = f"{name}: bits of AdaQuantFL from 2 over {fixed.name}, to {target:.4f}"
                report.add(what, adaptive / bits_of_fixed, goal=1.0)
