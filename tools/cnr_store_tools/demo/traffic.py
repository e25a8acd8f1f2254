"""Generated click traffic: popular ids drift, and a planted teacher makes the clicks learnable.

The size of a delta depends on how many distinct rows an interval touches (the Zipf exponent), and on how fast that set
changes (the drift). Labels come from a factorization machine over hidden factors of the ids. So a model that learns has
an AUC far above 0.5, and wrongly restored rows lower it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cnr_store_tools.demo.click_log import ClickLog


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficConfig:
    """Options of the generated traffic.

    Attributes
    ----------
    table_rows
        Rows of each table; each sample looks up one row per table.
    num_samples
        Length of the log.
    num_dense
        Standard normal dense features, each with a weight in the teacher.
    zipf_exponent
        Popularity of the id at rank r is proportional to ``(r + 1) ** -zipf_exponent``.
    drift_every
        Samples between two steps of the drift.
    drift_share
        Share of ranks whose ids are exchanged among each other in one step of the drift.
    factor_dim
        Length of the teacher's hidden vector of each id.
    teacher_scale
        Standard deviation of the teacher's logit over the ids of a table drawn uniformly, roughly.
    click_bias
        Constant term of the teacher's logit; negative makes clicks rarer than non-clicks.
    seed
        The same seed gives the same log on any machine with the same numpy generator stream.
    """

    table_rows: tuple[int, ...]
    num_samples: int
    num_dense: int = 4
    zipf_exponent: float = 1.05
    drift_every: int = 32_768
    drift_share: float = 0.02
    factor_dim: int = 4
    teacher_scale: float = 1.5
    click_bias: float = -1.0
    seed: int = 0


def zipf_cumulative(num_rows: int, exponent: float) -> npt.NDArray[np.float64]:
    """Return the cumulative popularity of ranks 0 .. num_rows - 1, float64 (num_rows,), last value 1."""
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    cumulative = np.cumsum(weights)
    cumulative /= cumulative[-1]
    return cumulative


def drift_popularity(order: npt.NDArray[np.int64], share: float, random: np.random.Generator) -> None:
    """Exchange the ids of a random ``share`` of ranks in place; ``order[r]`` is the id at popularity rank r."""
    moved = random.choice(order.size, size=round(order.size * share), replace=False)
    order[moved] = order[random.permutation(moved)]


@dataclass(frozen=True, slots=True)
class Teacher:
    """The hidden factorization machine that decides the labels.

    ``factors`` is per table float32 (num_rows, factor_dim + 1): the hidden vector, then the bias of each id;
    ``dense_weights`` is float32 (num_dense,), and ``click_bias`` the constant term.
    """

    factors: list[npt.NDArray[np.float32]]
    dense_weights: npt.NDArray[np.float32]
    click_bias: float

    def logits(self, ids: npt.NDArray[np.int64], dense: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the true logit of each sample, float32 (num_samples,)."""
        total = self.factors[0][ids[:, 0]]
        squares = np.square(total)
        for column in range(1, ids.shape[1]):
            rows = self.factors[column][ids[:, column]]
            total += rows
            squares += np.square(rows)
        # Sum of all pair dots = half of (square of sum - sum of squares); the last column is the bias.
        pairs = 0.5 * (np.square(total) - squares)[:, :-1].sum(axis=1)
        logits: npt.NDArray[np.float32] = pairs + total[:, -1] + dense @ self.dense_weights
        logits += np.float32(self.click_bias)
        return logits


def plant_teacher(config: TrafficConfig, random: np.random.Generator) -> Teacher:
    """Draw a teacher whose pairs, biases and dense terms have equal logit variance, in sum scale ** 2."""
    num_tables = len(config.table_rows)
    num_pairs = max(1, num_tables * (num_tables - 1) // 2)
    term = config.teacher_scale / np.sqrt(3.0)
    vector_scale = (term**2 / (num_pairs * config.factor_dim)) ** 0.25
    bias_scale = term / np.sqrt(num_tables)
    factors = []
    for num_rows in config.table_rows:
        drawn = random.standard_normal((num_rows, config.factor_dim + 1), dtype=np.float32)
        drawn[:, :-1] *= vector_scale
        drawn[:, -1] *= bias_scale
        factors.append(drawn)
    weights = random.standard_normal(config.num_dense, dtype=np.float32)
    if config.num_dense:
        weights *= term / np.linalg.norm(weights)
    return Teacher(factors=factors, dense_weights=weights, click_bias=config.click_bias)


def generate_clicks(config: TrafficConfig) -> ClickLog:
    """Return ``config.num_samples`` samples in time order, deterministic in ``config.seed``."""
    random = np.random.default_rng(config.seed)
    teacher = plant_teacher(config, random)
    cumulative = [zipf_cumulative(num_rows, config.zipf_exponent) for num_rows in config.table_rows]
    orders = [random.permutation(num_rows) for num_rows in config.table_rows]
    ids = np.empty((config.num_samples, len(config.table_rows)), dtype=np.int64)
    dense = np.empty((config.num_samples, config.num_dense), dtype=np.float32)
    labels = np.empty(config.num_samples, dtype=np.float32)
    for start in range(0, config.num_samples, config.drift_every):
        stop = min(start + config.drift_every, config.num_samples)
        count = stop - start
        for column, order in enumerate(orders):
            ranks = np.searchsorted(cumulative[column], random.random(count), side="right")
            ids[start:stop, column] = order[ranks]
            drift_popularity(order, config.drift_share, random)
        dense[start:stop] = random.standard_normal((count, config.num_dense), dtype=np.float32)
        logits = teacher.logits(ids[start:stop], dense[start:stop])
        labels[start:stop] = random.random(count) < 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
    names = [f"t{column}_{num_rows}" for column, num_rows in enumerate(config.table_rows)]
    return ClickLog(ids, dense, labels, list(config.table_rows), names)
