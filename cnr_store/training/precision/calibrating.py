"""How coarsely tables may be stored, by the user's validation: round the tables, validate, put everything back.

Nothing is written. Afterwards the model is as before, bit for bit, also after an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import nn

from cnr_store.encodings.sampling import RowSample
from cnr_store.encodings.scale import ScaleChoice, measure_scale, pooled, scale_choice
from cnr_store.errors import BadInput
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.training.options import PrecisionPolicy, options_by_table
from cnr_store.training.ranks import ranks_of_this_training
from cnr_store.training.reader import capture_rng, restore_rng
from cnr_store.training.shards import LocalShard, unwrapped
from cnr_store.training.state import find_local_shards
from cnr_store.training.tensors import TensorRows, windows
from cnr_store.types import AffineBits, Precision
from cnr_store.write.rate import halvings_to
from cnr_store.write.schema_choice import encoding_name, table_dtype
from cnr_store.write.table_options import TableOptions

COARSEST: AffineBits = 2
FINEST: AffineBits = 8

_NONE_OPEN = "no table is a float32 lattice without bits=, max_error= or scale="

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trial:
    """One precision that was tried: how often the 2-bit scales were halved, the metric, and how much worse it is.

    ``loss`` is relative: 0.01 is one hundredth worse than the live model, below 0 better.
    """

    halvings: int
    metric: float
    loss: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `calibrate` found.

    Attributes
    ----------
    options
        For `CheckpointManager`: those that were given, with the scale of each table that was calibrated.
    metric
        The validation's result for the live model.
    trials
        What was tried, coarsest first; the last one was taken.
    is_met
        Whether that keeps within the loss that was allowed; else even 8-bit quality loses more.
    """

    options: Mapping[str, TableOptions]
    metric: float
    trials: tuple[Trial, ...]
    is_met: bool


def calibrate(
    model: nn.Module,
    validate: Callable[[], float],
    *,
    max_quality_loss: float,
    expected_restores: float = 1.0,
    options: TableOptions | Mapping[str, TableOptions] | None = None,
    tables: Iterable[str] = (),
    ranks: Ranks | None = None,
) -> Calibration:
    """Return the coarsest scales of a model's tables at which a validation loses no more than it may.

    Tables are rounded in place as a restore would round them, first as coarse as 2-bit Check-N-Run rows, then halving
    the scales, to 8-bit quality at most. Call it on a trained model, in evaluation mode: untrained tables give no
    useful result. Blocks for one validation more than there are trials, at most about 9.

    Memory: a copy in host memory of every table that is calibrated, given back at the end.

    Parameters
    ----------
    model
        Changed while this runs, and afterwards as it was, bit for bit, also if ``validate`` raises.
    validate
        Returns a positive number that is better when it is smaller, such as logloss or 1 - AUC; the same number for
        the same weights. Called without gradients. Each of several ranks calls it, and the worst counts.
    max_quality_loss
        How much larger that may be after all restores, as a share: 1e-4 is a hundredth of a percent.
    expected_restores
        Each restore rounds again the rows that changed since, so errors add up: one restore may lose that share.
    options, tables, ranks
        As for `CheckpointManager`. Tables whose options name ``bits=``, ``max_error=``, ``scale=`` or another encoding
        than a lattice are left alone.

    Raises
    ------
    BadInput
        A bound or a metric that is not positive, or no table to calibrate.

    Examples
    --------
    >>> _ = torch.manual_seed(1)
    >>> model = nn.Embedding(200, 8)
    >>> wanted = model.weight.detach().clone() + 0.1
    >>> found = calibrate(model, lambda: float((model.weight - wanted).square().mean()), max_quality_loss=0.02)
    >>> found.is_met, [round(trial.loss, 1) for trial in found.trials]
    (True, [4.6, 1.1, 0.3, 0.1, 0.0, 0.0])
    """
    _check_positive("max_quality_loss", max_quality_loss)
    _check_positive("expected_restores", expected_restores)
    ranks = ranks_of_this_training() if ranks is None else ranks
    _, shards = find_local_shards(unwrapped(model), [], list(tables), ranks)
    everywhere = {table for answer in together(ranks, lambda: [one.table for one in shards]) for table in answer}
    chosen = options_by_table(options, everywhere)
    mine = [one for one in shards if _is_open(one, chosen[one.table])]
    coarse, fine = (_scales(mine, bits, ranks) for bits in (COARSEST, FINEST))
    if not coarse:
        raise BadInput(f"nothing to calibrate: {_NONE_OPEN}")
    most = max(halvings_to(coarse[table], fine[table]) for table in coarse)
    allowed = max_quality_loss / max(1.0, expected_restores)
    metric = _worst(validate, ranks)
    trials: list[Trial] = []
    kept = [one.weight.detach().to("cpu", copy=True) for one in mine]
    try:
        for halvings in range(most + 1):
            with torch.no_grad():
                for shard, values in zip(mine, kept, strict=True):
                    _round_to(shard.weight, values, math.ldexp(coarse[shard.table], -halvings))
            found = _worst(validate, ranks)
            trials.append(Trial(halvings, found, found / metric - 1.0))
            logger.info("scales of 2 bits, halved %d times: %.6g, %+.4g %%", halvings, found, 100 * trials[-1].loss)
            if trials[-1].loss <= allowed:
                break
    finally:
        with torch.no_grad():
            for shard, values in zip(mine, kept, strict=True):
                shard.weight.data.copy_(values)
    is_met = trials[-1].loss <= allowed
    if not is_met:
        logger.warning(
            "no scale up to 8-bit quality loses at most %.4g %% in a restore: the finest one loses %.4g %%; take exact "
            "tables, or allow more", 100 * allowed, 100 * trials[-1].loss,
        )  # fmt: skip
    scales = {table: math.ldexp(scale, -trials[-1].halvings) for table, scale in coarse.items()}
    return Calibration(
        {table: replace(one, scale=scales[table]) if table in scales else one for table, one in chosen.items()},
        metric, tuple(trials), is_met,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QualityTarget:
    """What a manager must find out before its first save: the coarsest scales within the allowed loss.

    ``tables``: names of parameters that are tables besides the embeddings.

    Raises
    ------
    BadInput
        Only one of the two was given, other options set the precision, or no table is a float32 lattice.
    """

    max_quality_loss: float
    validate: Callable[[], float]
    tables: tuple[str, ...]

    @classmethod
    def of(
        cls,
        policy: PrecisionPolicy,
        options: Mapping[str, TableOptions],
        tables: Iterable[str],
        shards: Sequence[LocalShard],
        ranks: Ranks,
    ) -> QualityTarget | None:
        """Return the target that a policy names, if any. All ranks call it.

        ``shards``: what this rank has of the tables.
        """
        max_quality_loss, validate = policy.max_quality_loss, policy.validate
        if max_quality_loss is None and validate is None:
            return None
        if max_quality_loss is None or validate is None:
            raise BadInput("max_quality_loss= and validate= go together: the largest loss, and what measures it")
        _check_positive("max_quality_loss", max_quality_loss)
        for table, one in options.items():
            named = [name for name in ("bits", "max_error", "scale") if getattr(one, name) is not None]
            if named:
                raise BadInput(
                    f"table {table!r} has {named[0]}=, and max_quality_loss= would choose its scale; leave out one of "
                    "them", table=table,
                )  # fmt: skip
        if policy.schedule != "constant":
            raise BadInput("schedule= and max_quality_loss= would both choose the scales; leave out one of them")
        if not any(together(ranks, lambda: any(_is_open(one, options[one.table]) for one in shards))):
            raise BadInput(f"max_quality_loss= has nothing to choose: {_NONE_OPEN}; leave it out")
        return cls(max_quality_loss, validate, tuple(tables))

    def scales(self, model: nn.Module, options: Mapping[str, TableOptions], ranks: Ranks) -> dict[str, float]:
        """Return the scale of each table that is a lattice (`calibrate`). Blocks; all ranks call it.

        The model is in evaluation mode meanwhile; its modes and the random generators are put back.
        """
        modes = [(module, module.training) for module in model.modules()]
        generators = capture_rng()
        restores = max((one.expected_restores or 1.0 for one in options.values()), default=1.0)
        try:
            model.eval()
            found = calibrate(
                model, self.validate, max_quality_loss=self.max_quality_loss, expected_restores=restores,
                options=options, tables=self.tables, ranks=ranks,
            )  # fmt: skip
        finally:
            for module, is_training in modes:
                module.training = is_training
            restore_rng(generators)
        return {table: one.scale for table, one in found.options.items() if one.scale is not None}


def _check_positive(name: str, number: float) -> None:
    if not (math.isfinite(number) and number > 0):
        raise BadInput(f"{name} is a positive number, found {number!r}", found=number)


def _is_open(shard: LocalShard, options: TableOptions) -> bool:
    """Whether a table is a lattice and no precision was given for it."""
    dtype = table_dtype(TensorRows(shard.weight), shard.table)
    is_named = options.bits is not None or options.max_error is not None or options.scale is not None
    return dtype == "float32" and encoding_name(options, dtype) == "lattice" and not is_named


def _scales(shards: Sequence[LocalShard], bits: AffineBits, ranks: Ranks) -> dict[str, float]:
    """The scale of each table at a width, over all ranks."""

    def share() -> list[tuple[str, object, int]]:
        precision = Precision(bits=bits)
        return [
            (
                one.table,
                msgspec.to_builtins(measure_scale(RowSample(TensorRows(one.weight), "float32"), "float32", precision)),
                one.weight.numel(),
            )
            for one in shards
        ]

    known: dict[str, list[tuple[ScaleChoice, int]]] = {}
    for answer in together(ranks, share):
        for table, choice, elements in answer:
            known.setdefault(table, []).append((scale_choice(choice), elements))
    return {table: pooled([one for one, _ in found], [n for _, n in found]).scale for table, found in known.items()}


def _round_to(weight: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    """Fill a tensor with what a lattice restores of ``values`` (`cnr_store.encodings.lattice`), by windows of rows.

    Through ``data``, which counts no new version: the tracker must not see rows that are put back.
    """
    for start, stop in windows(weight.shape[0], values[:1].nbytes):
        block = values[start:stop].to(weight.device)
        weight.data[start:stop] = torch.round(block / scale) * scale


def _worst(validate: Callable[[], float], ranks: Ranks) -> float:
    """The largest of the ranks' metrics."""

    def measured() -> float:
        with torch.no_grad():
            found = float(validate())
        if not (math.isfinite(found) and found > 0):
            raise BadInput(f"validate() returned {found!r}; return a positive number that is better when smaller")
        return found

    return float(max(together(ranks, measured)))
