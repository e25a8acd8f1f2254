"""One training that is saved to a real store and restored from it L times, judged against the run nobody interrupted.

The store, the manager and every save between are those that a user has; nothing simulates a rounding. One thread and
one seed, so a run is a function of its order alone and exact mode must end in the same bits.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from click_cases import Case, Source, load

from cnr_store import TableOptions, segment_sizes
from cnr_store.maintenance.compaction import compact_run
from cnr_store.training import CheckpointManager, StoreOptions, TrackingOptions
from cnr_store.types import AffineBits
from cnr_store.write import schema_choice
from cnr_store.write.schema_choice import SlotPrecision, choose_table_scale
from cnr_store_tools.demo import metrics
from cnr_store_tools.demo.batches import TimeOrderedBatches
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.train import make_optimizers, predict, train_step

SAVES = 20
"""Deltas before the last one, unless there are more restores; they are evenly spread over the steps after the baseline,
and one more is saved at the end."""

BASELINE_SHARE = 0.05
"""The first save, at which scales are chosen, comes after this share of the steps."""

COMPACT_AFTER = 8
"""Deltas after which the chain is compacted into a baseline, as a compaction job does: the same bits, and a
restore reads a few segments instead of up to 64."""

BIT_WIDTHS: tuple[AffineBits, ...] = (2, 3, 4, 8)
ROW_KINDS = ("rows", "codes", "scales", "slots")
"""Bytes that grow with the rows of a delta. The rest is a few kilobytes for each table and save (metadata), or belongs
to no table (dense tensors, documents): here it would drown what is compared, in a large model it is nothing."""

Family = Literal["affine", "lattice", "exact", "slots"]
Optimizer = Literal["rowwise", "adagrad", "adam"]
"""Of the tables: Adagrad with a number per row, Adagrad, SparseAdam. The dense parameters have Adagrad."""

ADAM_LR = 0.03


@dataclass(frozen=True, slots=True)
class Setting:
    """How tables are stored.

    Attributes
    ----------
    family
        ``affine``: Check-N-Run's rows (greedy search, fp16 parameters). ``lattice``: ours. ``exact``: every bit.
        ``slots``: every bit of the weights, and slots as below.
    bits
        Width of affine rows, or whose error a lattice's scale is chosen for; 0 with ``exact`` and ``slots``.
    finer
        The lattice's scale is that of ``bits`` over this.
    mantissa, step
        How slots are stored, as in `SlotPrecision`; all of them are exact in family ``exact``.
    """

    family: Family
    bits: AffineBits | Literal[0] = 0
    finer: float = 1.0
    mantissa: int = 7
    step: float = 0.0

    def __str__(self) -> str:
        if self.family == "exact":
            return "exact"
        means = f", means {self.step:g} rms" if self.step else ""
        slots = f"m = {self.mantissa}{means}" if self.mantissa < 7 or self.step or self.family == "slots" else ""
        return ", slots ".join(one for one in (self._of_weights(), slots) if one)

    def _of_weights(self) -> str:
        if self.family == "slots":
            return ""
        finer = "" if self.finer == 1.0 else f", scale x{1 / self.finer:.2g}"
        return f"{self.family} {self.bits}{finer}"


@dataclass(frozen=True, slots=True)
class Order:
    """One run: the data, the seed of the model, how tables are stored (None: never saved), how often it is restored.

    ``optimizer``: that of the tables.
    """

    source: Source
    seed: int
    setting: Setting | None
    restores: int
    optimizer: Optimizer = "rowwise"


@dataclass(frozen=True, slots=True)
class Quality:
    """A model on the held-out samples.

    Attributes
    ----------
    auc, logloss
        On the labels.
    true_logloss
        Expected over the true click probabilities; NaN where these are unknown. It has no noise of labels.
    moved
        Mean Kullback-Leibler divergence, in nats, of its predictions from those of the uninterrupted run: what the
        logloss would lose if that run were right.
    """

    auc: float
    logloss: float
    true_logloss: float
    moved: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run ended with.

    Attributes
    ----------
    trained
        The model at the end of the training.
    served
        The same after one more restore, of the last checkpoint: what a consumer has.
    deltas
        Deltas saved.
    row_bytes, slot_bytes, other_bytes
        Of a delta, mean: `ROW_KINDS`, the slots alone, and the metadata. Dense tensors and documents stand apart.
    baseline_bytes
        Of the first checkpoint, without dense tensors and documents.
    rows
        Rows that a delta was given, mean.
    """

    trained: Quality
    served: Quality
    deltas: int = 0
    row_bytes: float = 0.0
    slot_bytes: float = 0.0
    other_bytes: float = 0.0
    baseline_bytes: float = 0.0
    rows: float = 0.0


def run(order: Order, folder: str | None = None) -> Outcome:
    """Carry out an order. Blocks for seconds; writes below ``folder`` (or that of temporary files) and cleans up."""
    torch.set_num_threads(1)
    case = load(order.source)
    uninterrupted = _uninterrupted(order.source, order.seed, order.optimizer)
    if order.setting is None:
        alone = judge(case, uninterrupted, uninterrupted)
        return Outcome(alone, alone)
    model, optimizers, batches = prepared(case, order.seed, order.optimizer)
    saves, restores = schedule(len(batches), order.restores)
    chain_ends: list[int] = []
    with (
        tempfile.TemporaryDirectory(prefix="cnr-bench-", dir=folder) as made,
        slots_as_in(order.setting),
        CheckpointManager(
            f"{made}/store",
            model=model,
            optimizer=optimizers,
            reader=batches,
            options=options_of(order.source, order.seed, order.setting, order.optimizer),
            store_options=StoreOptions(threads=1),
            tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
        ) as manager,
    ):
        for step, batch in enumerate(batches, start=1):
            train_step(model, optimizers, batch)
            manager.step()
            if step in saves:
                manager.save()
                head = manager.store.head().record
                if len(head.chain) > COMPACT_AFTER:
                    chain_ends.append(head.v)
                    compact_run(manager.store, run=(0, len(head.chain)), workers=1)
            if step in restores:
                manager.restore()
        trained = judge(case, predict(model, case.future), uninterrupted)
        manager.restore()
        served = judge(case, predict(model, case.future), uninterrupted)
        chain_ends.append(manager.store.latest_version())
        return replace(_bytes_of(manager, chain_ends), trained=trained, served=served)


def schedule(steps: int, restores: int) -> tuple[list[int], list[int]]:
    """Return (steps to save at, those to restore after). Pure.

    The first save is the baseline, the last is at the end of the training. Restores are at saves, each in the middle
    of its share of the run.

    Raises
    ------
    ValueError
        The run has fewer steps than saves.
    """
    deltas = max(SAVES, restores)
    baseline = max(1, round(steps * BASELINE_SHARE))
    saves = [baseline + round((steps - baseline) * number / (deltas + 1)) for number in range(deltas + 2)]
    if len(set(saves)) != len(saves):
        raise ValueError(f"{steps} steps cannot hold {len(saves)} saves")
    chosen = [math.ceil(deltas * (number - 0.5) / restores) for number in range(1, restores + 1)]
    return saves, [saves[number] for number in chosen]


@contextmanager
def slots_as_in(setting: Setting) -> Iterator[None]:
    """Let ``slot_bits=8`` mean what a setting says of slots: the table that is measured here is what users get."""
    measured = SlotPrecision(setting.mantissa, setting.step)
    by_row = patch.object(schema_choice, "ROW_MANTISSA_BITS", setting.mantissa)
    with patch.dict(schema_choice.SLOT_PRECISION, {8: measured}), by_row:
        yield


def options_of(
    source: Source, seed: int, setting: Setting, optimizer: Optimizer = "rowwise"
) -> dict[str, TableOptions] | TableOptions:
    """Return how a setting stores the tables of a run, each by name where its scale is its own."""
    if setting.family == "exact":
        return TableOptions.exact()
    if setting.family == "slots":
        return TableOptions(encoding="float_bits", slot_bits=8)
    assert setting.bits != 0
    if setting.family == "affine":
        return TableOptions(encoding="affine", bits=setting.bits, search="greedy", slot_bits=8)
    scales = scales_at_baseline(source, seed, optimizer)[setting.bits]
    return {name: TableOptions(scale=scale / setting.finer) for name, scale in scales.items()}


@lru_cache(maxsize=2)
def scales_at_baseline(source: Source, seed: int, optimizer: Optimizer) -> dict[int, dict[str, float]]:
    """Return bits to table name to the scale that ``TableOptions(bits=...)`` chooses in the first save.

    Found once for all settings of a seed: to choose costs more than to save.
    """
    case = load(source)
    model, optimizers, batches = prepared(case, seed, optimizer)
    saves, _ = schedule(len(batches), 1)
    for step in range(saves[0]):
        train_step(model, optimizers, batches.batch(step))
    found: dict[int, dict[str, float]] = {}
    for bits in BIT_WIDTHS:
        found[bits] = {}
        for name, weight in model.table_parameters():
            choice = choose_table_scale(TableOptions(bits=bits), "float32", weight.detach().numpy())
            assert choice is not None  # it is a lattice
            found[bits][name] = choice.scale
    return found


def judge(case: Case, predicted: npt.NDArray[np.float32], uninterrupted: npt.NDArray[np.float32]) -> Quality:
    """Return the quality of predictions float32 (len(case.future),)."""
    given, reference = _inside(predicted), _inside(uninterrupted)
    moved = cross_entropy(reference, given) - cross_entropy(reference, reference)
    true = math.nan if case.truth is None else cross_entropy(case.truth, given)
    labels = case.future.labels
    return Quality(metrics.auc(labels, predicted), metrics.logloss(labels, predicted), true, moved)


def cross_entropy(truth: npt.NDArray[np.float64], given: npt.NDArray[np.float64]) -> float:
    """Return the mean logloss, in nats, of probabilities where clicks have the probabilities ``truth``."""
    return float(-(truth * np.log(given) + (1.0 - truth) * np.log1p(-given)).mean())


@lru_cache(maxsize=2)
def _uninterrupted(source: Source, seed: int, optimizer: Optimizer) -> npt.NDArray[np.float32]:
    case = load(source)
    model, optimizers, batches = prepared(case, seed, optimizer)
    for batch in batches:
        train_step(model, optimizers, batch)
    return predict(model, case.future)


def prepared(
    case: Case, seed: int, optimizer: Optimizer = "rowwise"
) -> tuple[SmallDLRM, tuple[torch.optim.Optimizer, ...], TimeOrderedBatches]:
    """Return model, optimizers and batches at the beginning of a run."""
    config = replace(case.config, seed=seed)
    model = SmallDLRM(config.model_config(case.past))
    by_row, dense = make_optimizers(model, table_lr=config.table_lr, dense_lr=config.dense_lr)
    tables = [weight for _, weight in model.table_parameters()]
    by_element: dict[Optimizer, Callable[[], torch.optim.Optimizer]] = {
        "rowwise": lambda: by_row,
        "adagrad": lambda: torch.optim.Adagrad(tables, lr=config.table_lr),
        "adam": lambda: torch.optim.SparseAdam(tables, lr=ADAM_LR),
    }
    return model, (by_element[optimizer](), dense), TimeOrderedBatches(case.past, config.batch_size)


def _bytes_of(manager: CheckpointManager, chain_ends: Sequence[int]) -> Outcome:
    """Return an outcome with the bytes of all saves: each stands in one of the chains, behind what was compacted."""
    deltas: list[tuple[int, int, int]] = []
    baselines: list[int] = []
    for version in chain_ends:
        snapshot = manager.store.snapshot(version)
        for entry, manifest in zip(snapshot.record.chain, snapshot.manifests, strict=True):
            sizes = segment_sizes(manifest, segment_bytes=entry.size_bytes).as_dict()
            of_rows = sum(sizes[kind] for kind in ROW_KINDS)
            if entry.kind == "delta":
                deltas.append((of_rows, sizes["slots"], sizes["metadata"]))
            else:
                baselines.append(of_rows + sizes["metadata"])
    given = [report.rows for report in manager.history if report.kind == "delta"]
    nothing = Quality(math.nan, math.nan, math.nan, math.nan)
    of_rows, of_slots, other = np.mean(deltas, axis=0).tolist()
    return Outcome(
        nothing, nothing, deltas=len(deltas), row_bytes=of_rows, slot_bytes=of_slots, other_bytes=other,
        baseline_bytes=float(baselines[0]), rows=float(np.mean(given)),
    )  # fmt: skip


def _inside(probabilities: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    return np.clip(probabilities.astype(np.float64), 1e-7, 1.0 - 1e-7)
