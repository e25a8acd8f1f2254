"""The loss after a resume on other ranks, with what the old ranks held back or without it.

A run is saved on `WORLD` ranks after half of its steps, and goes on there and, from the save, on others. The samples of
a step are the same everywhere, so only what is sent differs. A run without what was held back begins with zeros.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence

import harness
import torch
import torch.distributed as dist
from wire_model import CLICKS, ClickModel, Clicks, quality
from wire_one_bit import WARMUP_SHARE
from wire_ranks import (
    LEARNING_RATES,
    WORLD,
    add_difference,
    on_ranks,
    progress,
    spread_of,
    training_steps,
    with_spread,
    without_tables,
)

from cnr_store.communication import (
    CommunicationState,
    OneBitAdam,
    OneBitLamb,
    RankState,
    StateTensor,
    ThresholdedGradients,
)
from cnr_store.training import CheckpointManager

KINDS = ("0.4 %, float16", "one-bit Adam", "one-bit LAMB")
OTHERS = (2, 3, 8)
HOWS = ("kept", "dropped")
Found = list[list[float]]
"""Test logloss and AUC, by seed."""


class Training:
    """A model whose dense part is trained in fewer bytes, and the manager that saves it in a folder."""

    def __init__(self, clicks: Clicks, kind: str, seed: int, steps: int, folder: str) -> None:
        torch.manual_seed(seed)
        self.clicks, self.seed, self.model = clicks, seed, ClickModel(clicks)
        self.wrapped = without_tables(self.model)
        parameters, (of_dense, of_tables) = self.model.dense_parameters(), LEARNING_RATES[clicks.name]
        warmup = round(WARMUP_SHARE * steps)
        dense: torch.optim.Optimizer
        self.sender: CommunicationState
        if kind == KINDS[0]:
            hook = ThresholdedGradients(keep=0.004, values="float16")
            hook.register(self.wrapped)
            self.sender, dense = hook, torch.optim.SGD(parameters, lr=of_dense)
        else:
            make: Callable[[], OneBitAdam | OneBitLamb] = {
                KINDS[1]: lambda: OneBitAdam(parameters, lr=2e-3, warmup_steps=warmup),
                KINDS[2]: lambda: OneBitLamb(parameters, lr=1e-2, warmup_steps=warmup),
            }[kind]
            self.sender = dense = make()
            dense.register(self.wrapped)
        self.optimizers = [dense, torch.optim.Adagrad([self.model.tables], lr=of_tables)]
        self.manager = CheckpointManager(
            f"{folder}/{kind.replace(' %, ', '-').replace(' ', '-')}-{seed}", model=self.model,
            optimizer=self.optimizers, communication=[self.sender],
        )  # fmt: skip

    def train(self, start: int, stop: int) -> None:
        """Train the steps from ``start`` to below ``stop``."""
        for _ in training_steps(self.clicks, self.model, self.wrapped, self.optimizers, self.seed, range(start, stop)):
            pass

    def forget(self) -> None:
        """Set what this rank holds back to 0; thresholds stay."""
        state = self.sender.rank_state()
        tensors = {
            name: one if name.endswith("threshold") else StateTensor(torch.zeros_like(one.value), one.rule)
            for name, one in state.tensors.items()
        }
        self.sender.load_rank_state(RankState(tensors, state.scalars))


def train_and_save(name: str, folder: str, seeds: int, steps: int) -> list[Found]:
    """Return what runs on the ranks that saved find in the end, by kind."""
    return [[_saved(CLICKS[name], kind, seed, steps, folder) for seed in range(seeds)] for kind in KINDS]


def _saved(clicks: Clicks, kind: str, seed: int, steps: int, folder: str) -> list[float]:
    training = Training(clicks, kind, seed, steps, folder)
    training.train(0, steps // 2)
    training.manager.save()
    training.manager.close()
    training.train(steps // 2, steps)
    found = [*quality(training.model, clicks)]
    progress(clicks.name, kind, seed, found)
    return found


def resume(name: str, folder: str, seeds: int, steps: int) -> list[list[Found]]:
    """Return what runs find that go on from the saves, with what was held back and without it, by kind."""
    clicks = CLICKS[name]
    return [
        [[_resumed(clicks, kind, seed, steps, folder, how) for seed in range(seeds)] for kind in KINDS] for how in HOWS
    ]


def _resumed(clicks: Clicks, kind: str, seed: int, steps: int, folder: str, how: str) -> list[float]:
    training = Training(clicks, kind, seed, steps, folder)
    training.manager.restore()
    training.manager.close()
    if how == "dropped":
        training.forget()
    training.train(steps // 2, steps)
    found = [*quality(training.model, clicks)]
    progress(clicks.name, dist.get_world_size(), kind, how, seed, found)
    return found


def resumes(report: harness.Report, options: argparse.Namespace) -> None:
    """Report the loss of runs that go on on other ranks, against those that stay."""
    for name in options.clicks:
        with tempfile.TemporaryDirectory(dir=harness.DATA_FOLDER) as folder:
            arguments = (name, folder, options.seeds, options.steps)
            stayed: list[Found] = on_ranks(WORLD, "wire_resumes", "train_and_save", *arguments)
            found: dict[tuple[int, str], list[Found]] = {}
            for world in (WORLD, *OTHERS[: 1 if options.quick else None]):
                both = on_ranks(world, "wire_resumes", "resume", *arguments)
                found |= {(world, how): runs for how, runs in zip(HOWS, both, strict=True)}
        _report(report, name, stayed, found, options.steps)


def _report(
    report: harness.Report, name: str, stayed: Sequence[Found], found: dict[tuple[int, str], list[Found]], steps: int
) -> None:
    rows = []
    for at, kind in enumerate(KINDS):
        rows.append([kind, "no resume", *_cells(stayed[at]), ""])
        for (world, how), runs in found.items():
            what = f"{world} ranks, {how}"
            worse = [after[0] - before[0] for before, after in zip(stayed[at], runs[at], strict=True)]
            rows.append([kind, what, *_cells(runs[at]), f"{statistics.mean(worse):+.4f} +- {spread_of(worse):.4f}"])
            if how == "kept":
                add_difference(report, f"{name}: {kind}, {what}", stayed[at], runs[at])
    title = f"{name}: {len(stayed[0])} seeds, {steps} steps, saved after half of them on {WORLD} ranks"
    columns = ["sent", "goes on on", "logloss", "AUC", "logloss against no resume"]
    report.table(title, columns, rows, "kept: divided anew among the ranks; dropped: zeros instead")


def _cells(found: Found) -> list[str]:
    return [with_spread([run[at] for run in found]) for at in (0, 1)]
