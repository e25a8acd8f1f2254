"""The models and clicks of the suite about bytes on the wire: a DLRM, generated clicks of a known truth, MovieLens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from real_sets import DATA_FOLDER, read_movielens
from torch import nn

BATCH = 64
FIELDS, ROWS, DIM, DENSE = 8, 300, 16, 13
ML_100K = DATA_FOLDER / "ml-100k.inter"
_TESTED = 16_384
Cut = Callable[[torch.Tensor], torch.Tensor]
Samples = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ClickModel(nn.Module):
    """A small DLRM: tables, dot products of all pairs, two MLPs; ``outputs`` and ``hidden`` are where it may be cut.

    Without dense features there is no lower MLP, and the upper one gets the rows beside their products.

    Parameters
    ----------
    clicks
        What it is trained on: how many fields and dense features.
    bottom, top
        Widths of the hidden layers below and above the products.
    """

    def __init__(
        self,
        clicks: Clicks,
        bottom: Sequence[int] = (128,),
        top: Sequence[int] = (160, 160),
        *,
        outputs: Cut | None = None,
        hidden: Cut | None = None,
    ) -> None:
        super().__init__()
        self.tables = nn.Parameter(torch.randn(clicks.fields, clicks.rows, DIM) * 0.1)
        self.bottom = _layers([clicks.dense, *bottom, DIM]) if clicks.dense else None
        count = clicks.fields + bool(clicks.dense)
        width = count * (count - 1) // 2 + (DIM if clicks.dense else clicks.fields * DIM)
        self.first = _layers([width, top[0]])
        self.top = nn.Sequential(*_layers(top), nn.Linear(top[-1], 1))
        self.outputs, self.hidden = outputs or nn.Identity(), hidden or nn.Identity()
        self.register_buffer("pairs", torch.tril_indices(count, count, -1), persistent=False)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        rows = self.tables[torch.arange(ids.shape[1]), ids].flatten(1)
        low = rows if self.bottom is None else self.bottom(dense)
        whole = rows if self.bottom is None else torch.cat([low, rows], dim=1)
        both = self.outputs(whole).view(len(ids), -1, DIM)
        low = both.flatten(1) if self.bottom is None else both[:, 0]
        products = (both @ both.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        found: torch.Tensor = self.top(self.hidden(self.first(torch.cat([low, products], dim=1)))).squeeze(1)
        return found

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return all but the tables."""
        return [parameter for name, parameter in self.named_parameters() if name != "tables"]


def _layers(widths: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(*(layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())))


@dataclass(frozen=True, slots=True)
class Clicks:
    """Where samples come from: tables of ``rows`` rows each, and so many dense features."""

    name: Literal["generated", "ml-100k"]
    fields: int
    rows: int
    dense: int

    def batch(self, seed: int, number: int, count: int) -> Samples:
        """Return ids, dense features and clicks of a batch of a run; the number tells steps and ranks apart."""
        generator = torch.Generator().manual_seed(1000 * (seed + 1) + number)
        if self.name == "generated":
            return _generated(count, generator)
        train, _ = _movielens()
        chosen = torch.randint(len(train[0]), (count,), generator=generator)
        return train[0][chosen], train[1][chosen], train[2][chosen]

    def test(self) -> Samples:
        """Return what every run is tested on."""
        if self.name == "generated":
            return _generated(_TESTED, torch.Generator().manual_seed(10**6))
        return _movielens()[1]


GENERATED = Clicks("generated", FIELDS, ROWS, DENSE)
MOVIELENS = Clicks("ml-100k", 2, 1682, 0)
"""MovieLens 100k: users and items in tables of one size, a rating of 4 and more as a click; a fifth is for tests."""
CLICKS = {clicks.name: clicks for clicks in (GENERATED, MOVIELENS)}


@lru_cache
def _truth() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    vectors = torch.randn(FIELDS, ROWS, 6, generator=generator) * 0.6
    return vectors, torch.randn(DENSE, 6, generator=generator) * 0.4


def _generated(count: int, generator: torch.Generator) -> Samples:
    vectors, weights = _truth()
    ids = (torch.rand(count, FIELDS, generator=generator) ** 3 * ROWS).long()
    dense = torch.randn(count, DENSE, generator=generator)
    of_fields = vectors[torch.arange(FIELDS), ids]
    logits = (of_fields.sum(1).square() - of_fields.square().sum(1)).sum(1) / 4 + (
        of_fields[:, 0] * (dense @ weights)
    ).sum(1)
    clicks = torch.rand(count, generator=generator) < torch.sigmoid(logits - 0.5)
    return ids, dense, clicks.float()


@lru_cache
def _movielens(path: Path = ML_100K) -> tuple[Samples, Samples]:
    log = read_movielens(path)
    every = torch.from_numpy(log.ids), torch.from_numpy(log.dense), torch.from_numpy(log.labels)
    order = torch.randperm(len(log), generator=torch.Generator().manual_seed(7))
    train, test = order[len(log) // 5 :], order[: len(log) // 5]
    return (every[0][train], every[1][train], every[2][train]), (every[0][test], every[1][test], every[2][test])


def loss_of(model: nn.Module, samples: Samples) -> torch.Tensor:
    """Return the logloss."""
    ids, dense, clicks = samples
    return nn.functional.binary_cross_entropy_with_logits(model(ids, dense), clicks)


def quality(model: nn.Module, clicks: Clicks) -> tuple[float, float]:
    """Return test logloss and AUC."""
    ids, dense, labels = clicks.test()
    with torch.no_grad():
        logits = model(ids, dense)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
    ranks = logits.argsort().argsort().double() + 1
    positive = labels.sum().double()
    area = (ranks[labels > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive))
    return float(loss), float(area)
