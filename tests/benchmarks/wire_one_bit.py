"""Volume and quality of one-bit Adam and LAMB."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import harness
import torch
import torch.distributed as dist
from wire_model import BATCH, CLICKS, ClickModel, Clicks, loss_of, quality
from wire_ranks import WORLD, add_difference, on_ranks, progress, with_spread

from cnr_store.communication import Meter, OneBitAdam, OneBitLamb

WARMUP_SHARE = 0.15
PUBLISHED = {"adam": 5.0, "lamb": 4.6}
TABLE_RATES = {"generated": 0.1, "ml-100k": 0.05}


def train(clicks: Clicks, kind: str, seed: int, steps: int, warmup_steps: int) -> list[float]:
    """Return test logloss, AUC, and the bytes that a rank pushed for dense parameters."""
    meter = Meter()
    group = meter.group()
    torch.manual_seed(seed)
    model = ClickModel(clicks)
    make: dict[str, Callable[[], OneBitAdam | OneBitLamb]] = {
        "adam": lambda: OneBitAdam(model.dense_parameters(), lr=2e-3, warmup_steps=warmup_steps, group=group),
        "lamb": lambda: OneBitLamb(model.dense_parameters(), lr=1e-2, warmup_steps=warmup_steps, group=group),
    }
    optimizer = make[kind]()
    tables = torch.optim.Adagrad([model.tables], lr=TABLE_RATES[clicks.name])
    meter.reset()
    for step in range(steps):
        model.zero_grad()
        loss_of(model, clicks.batch(seed, step * WORLD + dist.get_rank(), BATCH)).backward()
        assert model.tables.grad is not None
        dist.all_reduce(model.tables.grad.div_(WORLD))
        optimizer.step()
        tables.step()
    found = [*quality(model, clicks), meter.total.pushed_bytes]
    progress(clicks.name, kind, warmup_steps, seed, found)
    return found


def train_all(name: str, kinds: list[str], seeds: int, steps: int) -> list[list[list[float]]]:
    """Return `train` of each kind, dense and with its warm-up, by seed."""
    runs = [(kind, warmup_steps) for kind in kinds for warmup_steps in (steps, round(WARMUP_SHARE * steps))]
    by_seed = [[train(CLICKS[name], kind, seed, steps, warmup) for kind, warmup in runs] for seed in range(seeds)]
    return [list(found) for found in zip(*by_seed, strict=True)]


def one_bit(report: harness.Report, options: argparse.Namespace) -> None:
    """Volume and quality of whole runs with a warm-up of 15 %."""
    for name in options.clicks:
        arguments = (name, options.optimizers, options.seeds, options.steps)
        runs = on_ranks(WORLD, "wire_one_bit", "train_all", *arguments)
        names = [f"{which}{kind}" for kind in options.optimizers for which in ("", "one-bit ")]
        _report(report, name, dict(zip(names, runs, strict=True)), options.steps)


def _report(report: harness.Report, name: str, runs: dict[str, list[list[float]]], steps: int) -> None:
    rows = []
    for optimizer, found in runs.items():
        losses, areas = ([run[at] for run in found] for at in (0, 1))
        rows.append([optimizer, with_spread(losses), with_spread(areas), f"{found[0][2]:,}"])
    columns = ["optimizer", "logloss", "AUC", "pushed bytes"]
    seeds = len(next(iter(runs.values())))
    report.table(f"{name}: {seeds} seeds, {steps} steps on {WORLD} ranks", columns, rows)
    for kind in [one for one in runs if not one.startswith("one-bit")]:
        dense, compressed = runs[kind], runs[f"one-bit {kind}"]
        volume = dense[0][2] / compressed[0][2]
        report.add(f"{name}: volume of {kind} over one-bit {kind}", volume, goal=PUBLISHED[kind], sense="at least")
        add_difference(report, f"{name}: one-bit {kind}", dense, compressed)
