"""Bytes and quality of the largest activations at a cut."""

from __future__ import annotations

import argparse
import statistics

import harness
import torch
import torch.distributed as dist
from wire_model import BATCH, DIM, FIELDS, GENERATED, ClickModel, Cut, loss_of, quality
from wire_ranks import WORLD, on_ranks, with_spread

from cnr_store.communication import Meter, TopKActivations

HIDDEN = 160
RATIOS = (2, 5, 10, 20, 50)
CUTS = [
    (place, width, mode, ratio)
    for place, width in (("hidden", HIDDEN), ("outputs", DIM * (FIELDS + 1)))
    for mode in ("own", "mask", "whole")
    for ratio in RATIOS
]


def kept(ratio: int) -> float:
    """The share of values that costs so many times fewer bytes: a value has 4, with its position 5."""
    return 4 / (5 * ratio)


def count_cuts() -> list[list[int]]:
    """Return of each of `CUTS` the bytes there and back."""
    meter, found = Meter(), []
    group = meter.group()
    first = dist.get_rank() == 0
    for _, width, mode, ratio in CUTS:
        layer = TopKActivations(kept(ratio), mode, group=group)
        meter.reset()
        rows = torch.randn(BATCH if first else 0, width, requires_grad=True)
        to, source = ([0, BATCH], [0, 0]) if first else ([0, 0], [BATCH, 0])
        layer.exchange(rows, to, source).sum().backward()
        found.append([meter.total.pushed_bytes, meter.total.received_bytes])
    return found


def model_parallel(report: harness.Report, options: argparse.Namespace) -> None:
    """Bytes against quality at two cuts, for all backward modes."""
    seeds, steps = options.seeds, options.steps
    torch.set_num_threads(1)
    base = [train_cut("", None, seed, steps) for seed in range(seeds)]
    losses = [run[0] for run in base]
    rows: list[list[str]] = [["none", "", "1", "1", with_spread(losses), with_spread([run[1] for run in base])]]
    for (place, width, mode, ratio), counted in zip(CUTS, on_ranks(2, "wire_cuts", "count_cuts"), strict=True):
        runs = [train_cut(place, TopKActivations(kept(ratio), mode), seed, steps) for seed in range(seeds)]
        sizes = [f"{4 * width * BATCH / size:.3g}" for size in counted]
        rows.append([place, mode, *sizes, *(with_spread([run[at] for run in runs]) for at in (0, 1))])
        print(*rows[-1], flush=True)
        if mode != "mask" and ratio == 20:
            extra = statistics.mean(run[0] for run in runs) / statistics.mean(losses) - 1
            report.add(f"loss at 20x over none, cut at {place}, {mode}", 100 * extra, goal=0.1, unit=" %")
    columns = ["cut", "backward", "fewer bytes there", "and back", "logloss", "AUC"]
    report.table(f"{seeds} seeds, {steps} steps; published: at least 20x without loss", columns, rows)


def train_cut(place: str, cut: Cut | None, seed: int, steps: int) -> tuple[float, float]:
    """Return test logloss and AUC of a model that is cut at a place, if there is a cut."""
    torch.manual_seed(seed)
    model = ClickModel(GENERATED, **({place: cut} if cut else {}))
    optimizers = [torch.optim.Adagrad([model.tables], lr=0.1), torch.optim.Adam(model.dense_parameters(), lr=2e-3)]
    for step in range(steps):
        model.zero_grad()
        loss_of(model, GENERATED.batch(seed, step, WORLD * BATCH)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return quality(model, GENERATED)
