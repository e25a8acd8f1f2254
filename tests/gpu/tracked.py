"""What the tests of the tracker train, and which rows that changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cnr_store_gpu import RowTracker


def ids(*rows: int) -> torch.Tensor:
    return torch.tensor(rows)


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def taken(tracker: RowTracker) -> dict[str, list[int]]:
    return {table: rows.row_ids.tolist() for table, rows in tracker.take().items()}


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Any, **named: Any) -> None:
    optimizer.zero_grad()
    model(*inputs, **named).sum().backward()
    optimizer.step()


def changed_rows(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    return (before != after.detach()).any(dim=1).nonzero().flatten().tolist()


class Tied(nn.Module):
    def __init__(self, head: bool) -> None:
        super().__init__()
        self.query = nn.Embedding(20, 3)
        self.document = nn.Embedding(20, 3)
        self.document.weight = self.query.weight
        if head:
            self.head = nn.Linear(3, 20, bias=False)
            self.head.weight = self.query.weight

    def forward(self, query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        rows = self.query(query) * self.document(document)
        return self.head(rows) if hasattr(self, "head") else rows
