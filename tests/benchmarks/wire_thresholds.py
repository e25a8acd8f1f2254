"""Bytes and quality of thresholded gradients."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

import harness
import torch
from wire_model import CLICKS, ClickModel, Clicks, quality
from wire_ranks import WORLD, add_difference, on_ranks, progress, steps_of_sgd, with_spread

from cnr_store.communication import Meter, RankState, ThresholdedGradients

PUBLISHED = 100.0
BOTTOM, TOP = (256, 128), (512, 256)


@dataclass(frozen=True, slots=True)
class Variant:
    """What is sent: a share of the values; ``dropped_every``: steps after which a save would forget what is held back.

    A share of 0 is the dense run.
    """

    name: str
    keep: float = 0.0
    values: Literal["float32", "float16"] = "float32"
    feedback: bool = True
    dropped_every: int = 0

    @property
    def is_ablation(self) -> bool:
        """Whether the loss must be worse than without."""
        return self.dropped_every > 0 or not self.feedback


VARIANTS = (
    Variant("dense"),
    Variant("0.5 %", 0.005),
    Variant("0.4 %, float16", 0.004, "float16"),
    Variant("0.4 %, float16, no error feedback", 0.004, "float16", feedback=False),
    Variant("0.4 %, float16, dropped every 10 steps", 0.004, "float16", dropped_every=10),
)


def train(clicks: Clicks, variant: Variant, seed: int, steps: int) -> list[float]:
    """Return test logloss, AUC, and the bytes that a rank pushed for dense parameters."""
    meter = Meter()
    torch.manual_seed(seed)
    model = ClickModel(clicks, BOTTOM, TOP)
    hook = ThresholdedGradients(
        keep=variant.keep or 0.5, values=variant.values, error_feedback=variant.feedback, refresh_every=1000,
        warmup_steps=0 if variant.keep else steps,
    )  # fmt: skip
    for step, _ in steps_of_sgd(clicks, model, hook, meter, seed, steps):
        if variant.dropped_every and (step + 1) % variant.dropped_every == 0:
            hook.load_rank_state(RankState({}, hook.rank_state().scalars))
    found = [*quality(model, clicks), meter.total.pushed_bytes]
    progress(clicks.name, variant.name, seed, found)
    return found


def train_all(name: str, seeds: int, steps: int) -> list[list[list[float]]]:
    """Return `train` of each of `VARIANTS`, by seed."""
    by_seed = [[train(CLICKS[name], variant, seed, steps) for variant in VARIANTS] for seed in range(seeds)]
    return [list(found) for found in zip(*by_seed, strict=True)]


def data_parallel(report: harness.Report, options: argparse.Namespace) -> None:
    """Report bytes and quality, with thresholds that are chosen once in 1,000 steps."""
    for name in options.clicks:
        runs = on_ranks(WORLD, "wire_thresholds", "train_all", name, options.seeds, options.steps)
        _report(report, name, runs, options.steps)


def _report(report: harness.Report, name: str, runs: list[list[list[float]]], steps: int) -> None:
    dense = runs[0]
    rows = []
    for variant, found in zip(VARIANTS, runs, strict=True):
        losses, areas = ([run[at] for run in found] for at in (0, 1))
        rows.append([variant.name, with_spread(losses), with_spread(areas), f"{dense[0][2] / found[0][2]:.1f}"])
    columns = ["values sent", "logloss", "AUC", "fewer pushed bytes, biases included"]
    title = f"{name}: {len(dense)} seeds, {steps} steps of SGD on {WORLD} ranks, refresh_every=1000"
    report.table(title, columns, rows, f"published: at least {PUBLISHED:g} times, no loss of quality")
    for variant, found in zip(VARIANTS[1:], runs[1:], strict=True):
        add_difference(report, f"{name}: {variant.name}", dense, found, is_ablation=variant.is_ablation)
    for variant, found in zip(VARIANTS[1:3], runs[1:3], strict=True):
        report.add(
            f"{name}: fewer pushed bytes at {variant.name}", dense[0][2] / found[0][2], goal=PUBLISHED, sense="at least"
        )
