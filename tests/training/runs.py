"""Small trainings that are the same, bit for bit, whenever they are run: what the tests of the manager interrupt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from cnr_store import Store, TableOptions
from cnr_store.training import CheckpointManager, PrecisionPolicy, SavePolicy, StoreOptions, TrackingOptions
from cnr_store_tools.demo.adagrad import RowWiseAdagrad
from tests.support.dynamic_table import HashTable

ROWS, DIM, BATCH = 300, 4, 24


class TwoTables(nn.Module):
    """An embedding, an embedding bag, dense layers, a buffer that training moves, and dropout (draws from the RNG)."""

    def __init__(self, *, sparse: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS, DIM, sparse=sparse, dtype=dtype)
        self.item = nn.EmbeddingBag(ROWS // 2, DIM, sparse=sparse, mode="sum", dtype=dtype)
        self.norm = nn.BatchNorm1d(2 * DIM)
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(2 * DIM, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.user(users), self.item(items)], dim=1).float()
        result: torch.Tensor = self.out(self.drop(self.norm(joined)))
        return result


Optimizers = Callable[[list[nn.Parameter], list[nn.Parameter]], list[torch.optim.Optimizer]]

KINDS: dict[str, tuple[bool, Optimizers]] = {
    "sgd": (True, lambda tables, dense: [torch.optim.SGD(tables + dense, lr=0.1)]),
    "rowwise_adagrad": (True, lambda tables, dense: [RowWiseAdagrad(tables, 0.1), torch.optim.Adagrad(dense, lr=0.1)]),
    "adagrad": (True, lambda tables, dense: [torch.optim.Adagrad(tables + dense, lr=0.1)]),
    "sparse_adam": (True, lambda tables, dense: [torch.optim.SparseAdam(tables), torch.optim.Adam(dense)]),
    "adam": (False, lambda tables, dense: [torch.optim.Adam(tables + dense, lr=0.01, amsgrad=True)]),
    "sgd_momentum": (False, lambda tables, dense: [torch.optim.SGD(tables + dense, lr=0.1, momentum=0.9)]),
}  # fmt: skip
"""Name to whether gradients of the tables are sparse, and what makes the optimizers."""


class Training:
    """A model and its optimizers, trained on batches that their number alone decides. ``how``: for its manager."""

    how: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, kind: str = "rowwise_adagrad", *, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        sparse, make = KINDS[kind]
        self.model = TwoTables(sparse=sparse, dtype=dtype)
        tables = [self.model.user.weight, self.model.item.weight]
        dense = [*self.model.norm.parameters(), *self.model.out.parameters()]
        self.optimizers = make([p for p in tables if isinstance(p, nn.Parameter)], dense)

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device = self.model.user.weight.device
        generator = torch.Generator(device).manual_seed(number)
        users = torch.randint(0, ROWS, (BATCH,), generator=generator, device=device)
        items = torch.randint(0, ROWS // 2, (BATCH, 3), generator=generator, device=device)
        return users, items, torch.rand(BATCH, 1, generator=generator, device=device)

    def train(self, number: int) -> None:
        users, items, labels = self.batch(number)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (self.model(users, items) - labels).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> dict[str, Any]:
        """Everything that training depends on, copied."""
        found: dict[str, Any] = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for index, optimizer in enumerate(self.optimizers):
            for number, one in optimizer.state_dict()["state"].items():
                for key, value in one.items():
                    copied = value.clone() if isinstance(value, torch.Tensor) else value
                    found[f"{index}/{number}/{key}"] = copied
        found["rng"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            found["rng/cuda"] = torch.cuda.get_rng_state()
        return found


class KeyedTraining(Training):
    """The same beside a table that grows by key and evicts. No two rows have one score, so places do not matter."""

    def __init__(self, kind: str = "rowwise_adagrad", *, buckets: int = 10) -> None:
        super().__init__(kind)
        self.table = HashTable(buckets, DIM)
        self.how = {"dynamic_tables": {"by_key": self.table}}

    def train(self, number: int) -> None:
        super().train(number)
        keys = np.random.default_rng(number).permutation(np.arange(-60, 60))[:BATCH]
        for place, key in enumerate(keys):
            self.table.train(key[None], number * BATCH + place)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "by_key": self.table.content()}


RECORDS = {
    "save_policy": SavePolicy, "tracking": TrackingOptions, "precision": PrecisionPolicy, "store_options": StoreOptions
}  # fmt: skip


def grouped(**given: Any) -> dict[str, Any]:
    """Arguments of a manager: options that belong to one of its records are put into that record."""
    for name, record in RECORDS.items():
        own = {one.name: given.pop(one.name) for one in fields(record) if one.name in given}
        if own:
            given[name] = record(**own)
    return given


def manager_of(store: str | Path | Store, training: Training, **options: Any) -> CheckpointManager:
    """A manager of a training, whose tables are exact unless ``options`` say otherwise."""
    chosen = {"options": TableOptions.exact(), "assume": {"RowWiseAdagrad": "touched"}, **training.how, **options}
    place = store if isinstance(store, Store) else str(store)
    return CheckpointManager(place, model=training.model, optimizer=training.optimizers, **grouped(**chosen))


def go_on(training: Training, manager: CheckpointManager, start: int, stop: int, *, saves: bool = False) -> None:
    """Train the batches [start, stop), each followed by the manager's step, and by a save where ``saves`` says so."""
    for number in range(start, stop):
        training.train(number)
        manager.step()
        if saves:
            manager.save()


def uninterrupted(kind: str, steps: int, *, make: type[Training] = Training, **options: Any) -> dict[str, Any]:
    """The state of a run that nobody saved or killed."""
    training = make(kind, **options)
    for number in range(steps):
        training.train(number)
    return training.state()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit, and the same things."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype, name
        else:
            assert found[name] == value, name
