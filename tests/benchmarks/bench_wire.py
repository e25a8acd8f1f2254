"""What thresholds, one-bit optimizers, cuts with the largest activations and partial sums send, and what quality costs.

Sections, by ``--sections``: ``data_parallel`` and ``one_bit`` train on 4 gloo ranks and count their bytes;
``model_parallel`` trains in one process, where a cut does the same to values as between ranks, and counts the bytes of
an exchange between 2 ranks; ``des`` counts the bytes of one forward and backward on 4 ranks. The model is a small DLRM
on generated clicks with a known truth; seeds change initial weights and batches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cnr_store.communication import (
    Meter,
    OneBitAdam,
    OneBitLamb,
    PartialFirstLayer,
    PartialSums,
    RankState,
    ThresholdedGradients,
    TopKActivations,
)
from cnr_store.communication.one_bit_optimizer import OneBitOptimizer

WORLD, BATCH = 4, 64
FIELDS, ROWS, DIM, DENSE, HIDDEN = 8, 300, 16, 13, 160
WARMUP_SHARE = 0.15
RATIOS = (2, 5, 10, 20, 50)
Cut = Callable[[torch.Tensor], torch.Tensor]
Samples = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ClickModel(nn.Module):
    """A small DLRM: 8 tables, dot products; ``outputs`` and ``hidden`` are where it may be cut."""

    def __init__(self, outputs: Cut | None = None, hidden: Cut | None = None) -> None:
        super().__init__()
        self.tables = nn.Parameter(torch.randn(FIELDS, ROWS, DIM) * 0.1)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 128), nn.ReLU(), nn.Linear(128, DIM), nn.ReLU())
        width = DIM + FIELDS * (FIELDS + 1) // 2
        self.first = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.outputs, self.hidden = outputs or nn.Identity(), hidden or nn.Identity()
        self.register_buffer("pairs", torch.tril_indices(FIELDS + 1, FIELDS + 1, -1), persistent=False)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        rows = self.tables[torch.arange(FIELDS), ids]
        low = self.bottom(dense)
        both = self.outputs(torch.cat([low, rows.flatten(1)], dim=1)).view(-1, FIELDS + 1, DIM)
        products = (both @ both.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        found: torch.Tensor = self.top(self.hidden(self.first(torch.cat([both[:, 0], products], dim=1)))).squeeze(1)
        return found

    def dense_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.named_parameters() if name != "tables"]


def samples(seed: int, count: int) -> Samples:
    """Ids, dense features, clicks of a truth that is the same for every seed."""
    truth = torch.Generator().manual_seed(7)
    vectors = torch.randn(FIELDS, ROWS, 6, generator=truth) * 0.6
    weights = torch.randn(DENSE, 6, generator=truth) * 0.4
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(count, FIELDS, generator=generator) ** 3 * ROWS).long()
    dense = torch.randn(count, DENSE, generator=generator)
    of_fields = vectors[torch.arange(FIELDS), ids]
    logits = (of_fields.sum(1).square() - of_fields.square().sum(1)).sum(1) / 4 + (
        of_fields[:, 0] * (dense @ weights)
    ).sum(1)
    clicks = torch.rand(count, generator=generator) < torch.sigmoid(logits - 0.5)
    return ids, dense, clicks.float()


def quality(model: ClickModel) -> tuple[float, float]:
    """Test logloss and AUC."""
    ids, dense, clicks = samples(10**6, 16_384)
    with torch.no_grad():
        logits = model(ids, dense)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks)
    ranks = logits.argsort().argsort().double() + 1
    positive = clicks.sum().double()
    area = (ranks[clicks > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(clicks) - positive))
    return float(loss), float(area)


# ---- programs of ranks


def on_ranks(world: int, function: str, *arguments: Any) -> Any:
    """Return what a function of this file returns on rank 0 of so many gloo ranks."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--rank", f"{folder}/meeting", str(world), function, json.dumps(arguments)]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(world)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"{function} failed on a rank")
        return json.loads(outputs[0].splitlines()[-1])


def be_a_rank(meeting: str, world: str, function: str, arguments: str, rank: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world))
    found = globals()[function](*json.loads(arguments))
    dist.barrier()
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


# ---- one-bit optimizers


def train_one_bit(kind: str, seed: int, steps: int, warmup_steps: int) -> list[float]:
    """Return test logloss, AUC, and the bytes that a rank pushed for dense parameters."""
    rank = dist.get_rank()
    meter = Meter()
    group = meter.group()
    torch.manual_seed(seed)
    model = ClickModel()
    make: dict[str, Callable[[], OneBitOptimizer]] = {
        "adam": lambda: OneBitAdam(model.dense_parameters(), lr=2e-3, warmup_steps=warmup_steps, group=group),
        "lamb": lambda: OneBitLamb(model.dense_parameters(), lr=1e-2, warmup_steps=warmup_steps, group=group),
    }
    optimizer = make[kind]()
    tables = torch.optim.Adagrad([model.tables], lr=0.1)
    meter.reset()
    for step in range(steps):
        ids, dense, clicks = samples(1000 * (seed + 1) + step * WORLD + rank, BATCH)
        model.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(ids, dense), clicks).backward()
        assert model.tables.grad is not None
        dist.all_reduce(model.tables.grad.div_(WORLD))
        optimizer.step()
        tables.step()
    return [*quality(model), meter.total.pushed_bytes]


def train_all(seeds: int, steps: int) -> list[list[list[float]]]:
    """Return `train_one_bit` of Adam, one-bit Adam, LAMB, one-bit LAMB, each by seed."""
    warmups = (steps, round(WARMUP_SHARE * steps))
    return [
        [train_one_bit(kind, seed, steps, warmup_steps) for seed in range(seeds)]
        for kind in ("adam", "lamb")
        for warmup_steps in warmups
    ]


def one_bit(report: harness.Report, seeds: int, steps: int) -> None:
    """Volume and quality of whole runs with a warm-up of 15 %."""
    names = ("adam", "one-bit adam", "lamb", "one-bit lamb")
    runs = dict(zip(names, on_ranks(WORLD, "train_all", seeds, steps), strict=True))
    rows = []
    for name, found in runs.items():
        losses, areas = ([run[number] for run in found] for number in (0, 1))
        rows.append([name, _with_spread(losses), _with_spread(areas), f"{found[0][2]:,}"])
    columns = ["optimizer", "logloss", "AUC", "pushed bytes"]
    report.table(f"{seeds} seeds, {steps} steps on {WORLD} ranks", columns, rows)
    for kind, published in (("adam", 5.0), ("lamb", 4.6)):
        dense, compressed = runs[kind], runs[f"one-bit {kind}"]
        volume = dense[0][2] / compressed[0][2]
        report.add(f"volume of {kind} over one-bit {kind}", volume, goal=published, sense="at least")
        pairs = [after[0] - before[0] for before, after in zip(dense, compressed, strict=True)]
        spread = _spread_of([run[0] for run in dense])
        extra, low, high = statistics.mean(pairs), min(pairs), max(pairs)
        report.add(f"loss of one-bit {kind} minus {kind}'s", extra, goal=spread, unit="", low=low, high=high)


# ---- thresholds

THRESHOLDS: dict[str, tuple[float, bool, int]] = {
    "dense": (0.0, True, 0),
    "1 %": (0.01, True, 0),
    "0.5 %": (0.005, True, 0),
    "0.2 %": (0.002, True, 0),
    "0.5 %, no error feedback": (0.005, False, 0),
    "0.5 %, dropped every 10 steps": (0.005, True, 10),
}
"""Share of the values that is sent, whether the rest is kept, and after how many steps a save would forget it."""


def train_thresholds(name: str, seed: int, steps: int) -> list[float]:
    """Return test logloss, AUC, and the bytes that a rank pushed for dense parameters."""
    keep, feedback, dropped_every = THRESHOLDS[name]
    meter = Meter()
    torch.manual_seed(seed)
    model = ClickModel()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["tables"])
    wrapped = DistributedDataParallel(model, process_group=meter.group())
    hook = ThresholdedGradients(keep=keep, error_feedback=feedback) if keep else ThresholdedGradients(warmup=steps)
    hook.register(wrapped)
    optimizers = [torch.optim.SGD(model.dense_parameters(), lr=0.1), torch.optim.Adagrad([model.tables], lr=0.1)]
    meter.reset()
    for step in range(steps):
        ids, dense, clicks = samples(1000 * (seed + 1) + step * WORLD + dist.get_rank(), BATCH)
        model.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(wrapped(ids, dense), clicks).backward()
        assert model.tables.grad is not None
        dist.all_reduce(model.tables.grad.div_(WORLD))
        for optimizer in optimizers:
            optimizer.step()
        if dropped_every and (step + 1) % dropped_every == 0:
            hook.load_rank_state(RankState({}, hook.rank_state().scalars))
    return [*quality(model), meter.total.pushed_bytes]


def train_all_thresholds(seeds: int, steps: int) -> list[list[list[float]]]:
    """Return `train_thresholds` of each of `THRESHOLDS`, by seed."""
    return [[train_thresholds(name, seed, steps) for seed in range(seeds)] for name in THRESHOLDS]


def data_parallel(report: harness.Report, seeds: int, steps: int) -> None:
    """Bytes and quality of thresholded gradients, whose thresholds are chosen once in 1,000 steps."""
    runs = dict(zip(THRESHOLDS, on_ranks(WORLD, "train_all_thresholds", seeds, steps), strict=True))
    volume = runs["dense"][0][2]
    rows = []
    for name, found in runs.items():
        losses, areas = ([run[number] for run in found] for number in (0, 1))
        rows.append([name, _with_spread(losses), _with_spread(areas), f"{volume / found[0][2]:.1f}"])
    columns = ["values sent", "logloss", "AUC", "fewer pushed bytes, biases included"]
    report.table(f"{seeds} seeds, {steps} steps of SGD on {WORLD} ranks; published: at least 100", columns, rows)
    spread = _spread_of([run[0] for run in runs["dense"]])
    for name in list(THRESHOLDS)[1:]:
        pairs = [after[0] - before[0] for before, after in zip(runs["dense"], runs[name], strict=True)]
        ablation = "no error" in name or "dropped" in name
        report.add(
            f"loss at {name} minus dense", statistics.mean(pairs), goal=spread, unit="", low=min(pairs),
            high=max(pairs), sense="at least" if ablation else "at most",
        )  # fmt: skip


# ---- cuts


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


def model_parallel(report: harness.Report, seeds: int, steps: int) -> None:
    """Bytes against quality at two cuts, for all backward modes."""
    torch.set_num_threads(1)
    base = [train_cut("", 1.0, "own", seed, steps) for seed in range(seeds)]
    losses = [run[0] for run in base]
    rows: list[list[str]] = [["none", "", "1", "1", _with_spread(losses), _with_spread([run[1] for run in base])]]
    for (place, width, mode, ratio), counted in zip(CUTS, on_ranks(2, "count_cuts"), strict=True):
        runs = [train_cut(place, kept(ratio), mode, seed, steps) for seed in range(seeds)]
        sizes = [f"{4 * width * BATCH / size:.3g}" for size in counted]
        rows.append([place, mode, *sizes, *(_with_spread([run[at] for run in runs]) for at in (0, 1))])
        print(*rows[-1], flush=True)
        if mode == "own" and ratio == 20:
            extra = statistics.mean(run[0] for run in runs) / statistics.mean(losses) - 1
            report.add(f"loss at 20x over none, cut at {place}", 100 * extra, goal=0.1, unit=" %")
    columns = ["cut", "backward", "fewer bytes there", "and back", "logloss", "AUC"]
    report.table(f"{seeds} seeds, {steps} steps; published: at least 20x without loss", columns, rows)


def train_cut(place: str, keep: float, mode: Any, seed: int, steps: int) -> tuple[float, float]:
    torch.manual_seed(seed)
    model = ClickModel(**({place: TopKActivations(keep, mode)} if place else {}))
    optimizers = [torch.optim.Adagrad([model.tables], lr=0.1), torch.optim.Adam(model.dense_parameters(), lr=2e-3)]
    for step in range(steps):
        ids, dense, clicks = samples(1000 * (seed + 1) + step, WORLD * BATCH)
        model.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(ids, dense), clicks).backward()
        for optimizer in optimizers:
            optimizer.step()
    return quality(model)


# ---- partial sums


def count_partial_sums(batch: int, fields: int, rows: int, dim: int, hidden: int) -> dict[str, int]:
    """Return received bytes per rank of a factorization machine and a first layer, and of a parameter server's rows."""
    meter = Meter()
    group = meter.group()
    pairs = PartialSums(fields * rows, dim, group=group)
    first = PartialFirstLayer([rows] * fields, dim, hidden, group=group)
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(WORLD * batch, fields, generator=generator) ** 4 * rows).long()
    whole = (ids + torch.arange(fields) * rows).flatten()
    found = {}
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "machine": lambda: pairs.factorized(whole, torch.arange(0, len(whole), fields)),
        "first": lambda: first(ids.flatten(), torch.arange(len(whole))),
    }
    for name, call in calls.items():
        meter.reset()
        call().sum().backward()
        found[name] = meter.total.received_bytes
    own = whole.view(WORLD, -1)[dist.get_rank()].unique()
    # A worker of a parameter server pulls the rows of its share of the batch, and pushes their gradients.
    return found | {"rows": len(own) * dim * 4 * 2}


SUMS = [(batch, fields, 10_000, dim, 256) for dim in (16, 64) for fields in (26, 100) for batch in (64, 512)]


def count_all_sums() -> list[dict[str, int]]:
    """Return `count_partial_sums` of each of `SUMS`."""
    return [count_partial_sums(*one) for one in SUMS]


def des(report: harness.Report, _seeds: int, _steps: int) -> None:
    """Bytes per step of partial sums against the transfer of the touched rows."""
    rows = []
    for (batch, fields, _, dim, _), found in zip(SUMS, on_ranks(WORLD, "count_all_sums"), strict=True):
        fewer = {name: 100 * (1 - found[name] / found["rows"]) for name in ("machine", "first")}
        rows.append([dim, fields, batch, f"{found['rows']:,}", *(f"{found[n]:,} ({fewer[n]:.1f} %)" for n in fewer)])
        if (dim, fields, batch) == (16, 26, 512):
            for name, what in (("machine", "a factorization machine"), ("first", "a first layer of 256")):
                report.add(f"fewer bytes: {what}", fewer[name], goal=68.7, sense="at least", unit=" %")
    columns = ["dim", "fields", "batch per rank", "rows, bytes", "machine, bytes", "first layer of 256, bytes"]
    report.table(f"bytes that one of {WORLD} ranks receives per step", columns, rows, "published: up to 68.7 % fewer")


SECTIONS: dict[str, Callable[[harness.Report, int, int], None]] = {
    "data_parallel": data_parallel,
    "one_bit": one_bit,
    "model_parallel": model_parallel,
    "des": des,
}


def _with_spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.4f} +- {_spread_of(values):.4f}"


def _spread_of(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    """Run the sections that were asked for."""
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--quick", action="store_const", const=True, help="2 seeds, 100 steps")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds, steps = (2, 100) if options.quick else (options.seeds, options.steps)
    report = harness.Report("Bytes on the wire: thresholds, one-bit optimizers, cuts, partial sums")
    report.start()
    for name in options.sections:
        SECTIONS[name](report, seeds, steps)
    report.finish(options.json)


if __name__ == "__main__":
    main()
