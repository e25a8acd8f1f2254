"""A small recommender, its state dict as DCP takes it, and comparisons to the last bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

ROWS, DIM = 1500, 8


class Recommender(nn.Module):
    """Two tables, of which one is small, and a layer on top."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users = nn.Embedding(ROWS, DIM)
        self.days = nn.Embedding(7, DIM)
        self.top = nn.Linear(DIM, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return one number."""
        return self.top(self.users(rows) + self.days(rows % 7)).square().sum()  # type: ignore[no-any-return]


class Run:
    """A recommender and its optimizer, in training."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.Adagrad, seed: int = 0) -> None:
        self.model = Recommender(seed)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]

    def step(self, first: int = 0, count: int = 10) -> None:
        """Train on ``count`` rows from ``first`` on."""
        self.optimizer.zero_grad()
        self.model(torch.arange(first, first + count)).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return live tensors of model and optimizer, and values that are none."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "epoch": 3, "history": [0.5, 0.25]}


def tensors_of(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dicts and lists, by dotted name."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from tensors_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from tensors_of(value, f"{path}.{index}")


def copy_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of a state dict, by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors_of(state)}


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    """Two state dicts hold the same tensors, bit for bit."""
    tensors = dict(tensors_of(found))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
