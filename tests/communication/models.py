"""A small click model with a sparse table, its batches, and the loop that trains it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

ROWS, DIM, FEATURES, BATCH = 50, 8, 12, 16


class Clicks(nn.Module):
    """A bag with sparse gradients beside features, two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.layers = nn.Sequential(
            nn.Linear(DIM + FEATURES, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 1)
        )

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(torch.cat([self.table(ids), features], dim=1)).squeeze(1)
        return result


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids (batch, 3), features (batch, features), labels: of a step and rank."""
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(ROWS, (BATCH, 3), generator=drawn)
    features = torch.randn(BATCH, FEATURES, generator=drawn)
    return ids, features, (features[:, 0] + 0.2 * (ids[:, 0] % 7 - 3) > 0).float()


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    """Train steps, each rank on its own batches; returns this rank's losses."""
    losses = []
    for step in steps:
        ids, features, labels = batch_of(step, dist.get_rank())
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids, features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
