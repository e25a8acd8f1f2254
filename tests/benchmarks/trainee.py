"""The model whose saving is measured: embedding tables and their optimizer, a small dense network, rows that move.

Values are normal, and a touched row drifts by 0.3 of their width, as in `drifting`. Nothing is trained: the rows of an
interval are drawn and moved in place, so that their share is exact and the same for everybody who saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from drifting import DIM, DRIFT, WIDTH
from models import BenchModel, OptimizerName, equal_tables
from torch import nn

from cnr_store_tools.demo.adagrad import RowWiseAdagrad

HIDDEN = 256
MOVE = 1e-3
"""What is added to each slot of a touched row."""


class TablesAndDense(nn.Module):
    """Embedding tables and two linear layers."""

    def __init__(self, model: BenchModel) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.utils.skip_init(nn.EmbeddingBag, rows, dim, mode="sum", sparse=True) for rows, dim in model.tables
        )
        self.dense = nn.Sequential(nn.Linear(4 * DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))


class TrainingState:
    """A model and its optimizers, whose state is in place.

    Attributes
    ----------
    model, optimizers
        What a `CheckpointManager` takes.
    tensors
        Everything that a checkpoint must hold, by name; live.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, tuple(optimizers)
        self.tensors = _named_tensors(model, optimizers)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors: what a full fp32 checkpoint must hold."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def copy(self) -> dict[str, torch.Tensor]:
        """Return a copy of every tensor."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Put values into every tensor, as a training does with what it has loaded."""
        for name, tensor in self.tensors.items():
            tensor.copy_(values[name])

    def forget(self) -> None:
        """Set every tensor to a value that no state has, so that a load that does nothing is seen."""
        for tensor in self.tensors.values():
            tensor.fill_(-77.0)


class TablesState(TrainingState):
    """A model with tables and a dense part, and its optimizers; the values are those of ``seed``.

    Attributes
    ----------
    tables
        Modules of the model.
    """

    model: TablesAndDense

    def __init__(self, shape: BenchModel, seed: int = 0) -> None:
        torch.manual_seed(seed)
        made = TablesAndDense(shape)
        self.tables = [module for module in made.tables if isinstance(module, nn.EmbeddingBag)]
        weights = [module.weight for module in self.tables]
        super().__init__(
            made, (make_optimizer(shape.optimizer, weights), torch.optim.Adagrad(made.dense.parameters(), lr=0.01))
        )
        for weight in weights:
            weight.detach().normal_(std=WIDTH)
            for slot in self.slots(weight):
                slot.uniform_(1e-6, 1e-2)

    def slots(self, weight: nn.Parameter) -> list[torch.Tensor]:
        """Return a table's optimizer state that goes by row."""
        state = self.optimizers[0].state[weight]
        return [slot for slot in state.values() if isinstance(slot, torch.Tensor) and slot.ndim]


class Trainee(TablesState):
    """A model with tables, its optimizers, and the state that they started from.

    Parameters
    ----------
    model
        Its tables; a number makes four tables of so many rows together.
    """

    def __init__(self, model: BenchModel | int, seed: int = 0) -> None:
        shape = equal_tables(model, DIM) if isinstance(model, int) else model
        super().__init__(shape, seed)
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._tables = [module.weight for module in self.tables]
        self._drift = torch.empty(max(w.shape[0] for w in self._tables), max(w.shape[1] for w in self._tables))
        self._drift.normal_(std=WIDTH * DRIFT)
        self._start = self.copy()

    @property
    def table_names(self) -> list[str]:
        """Names of the tables in the model."""
        return [f"tables.{index}.weight" for index in range(len(self._tables))]

    def start_again(self) -> None:
        """Put every tensor back as it was at first; the same rows will be touched."""
        self.fill(self._start)
        self._random = np.random.default_rng(self._seed)

    @torch.no_grad()
    def touch(self, share: float) -> dict[str, torch.Tensor]:
        """Move ``share`` of the rows of each table; returns their ids by table, sorted."""
        touched = {}
        for name, weight in zip(self.table_names, self._tables, strict=True):
            count = max(1, round(share * len(weight)))
            rows = torch.from_numpy(np.sort(self._random.choice(len(weight), count, replace=False)))
            weight.index_add_(0, rows, self._drift[:count, : weight.shape[1]])
            for slot in self.slots(weight):
                slot.index_add_(0, rows, torch.full((count, *slot.shape[1:]), MOVE))
            touched[name] = rows
        return touched


def _named_tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    found = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer.{names[id(parameter)]}.{key}"] = value
    return found


def make_optimizer(name: OptimizerName, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer with its state in place, as behind a first step."""
    if name == "rowwise_adagrad":
        return RowWiseAdagrad(weights, lr=0.05)
    if name == "adagrad":
        return torch.optim.Adagrad(weights, lr=0.05)
    optimizer = torch.optim.SparseAdam(weights, lr=0.01)
    for weight in weights:
        optimizer.state[weight] = {
            "step": 1, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)
        }  # fmt: skip
    return optimizer
