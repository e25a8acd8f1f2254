"""What the scenarios of trainings on several ranks share: their registry, their folder, states to compare, a storage.

A training that is ended and resumed needs processes that end. So scenarios come in two rounds of processes: what the
first round has saved when it ends, without closing anything, the second one restores, perhaps on fewer ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cnr_store import Store
from cnr_store.errors import StorageFailure
from cnr_store.storage.base import Buffer
from cnr_store.storage.local import LocalStorage
from tests.training.runs import assert_same

State = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a scenario runs: this rank of so many, and a folder that all ranks of both rounds share."""

    rank: int
    world: int
    folder: Path

    def url(self, name: str) -> str:
        """A store of that name."""
        return str(self.folder / f"{name}.store")

    def keep(self, name: str, value: Any) -> None:
        """Keep something of this rank for the second round."""
        torch.save(value, self.folder / f"{name}.{self.rank}.pt")

    def kept(self, name: str, rank: int | None = None) -> Any:
        """What a rank, by default this one, has kept."""
        return torch.load(self.folder / f"{name}.{self.rank if rank is None else rank}.pt", weights_only=False)

    def assert_kept(self, name: str, state: State) -> None:
        """The state is, bit for bit, the one that was kept."""
        assert_same(state, self.kept(name))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found


Scenario = Callable[[Place], None]
SCENARIOS: dict[tuple[int, int], dict[str, Scenario]] = {}
"""By round and number of ranks: the scenarios in their order."""


def scenario(stage: int, world: int) -> Callable[[Scenario], Scenario]:
    """Register a scenario under its function's name."""

    def register(function: Scenario) -> Scenario:
        SCENARIOS.setdefault((stage, world), {})[function.__name__] = function
        return function

    return register


class WatchedStorage(LocalStorage):
    """A local store that counts what this rank reads, and fails or waits when it is told to."""

    def __init__(self, root: str) -> None:
        super().__init__(root, fsync=False)
        self.reads: dict[str, int] = {}
        self.fails = False
        self.unreadable: str | None = None
        """Objects with this in their name cannot be read."""
        self.may_put = threading.Event()
        self.may_put.set()

    def _read(self, key: str, start: int, stop: int | None) -> bytes | None:
        if self.unreadable is not None and self.unreadable in key:
            raise StorageFailure(f"{key}: the disk is gone")
        data = super()._read(key, start, stop)
        self.reads[key] = self.reads.get(key, 0) + len(data or b"")
        return data

    def _read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int | None:
        if self.unreadable is not None and self.unreadable in key:
            raise StorageFailure(f"{key}: the disk is gone")
        found = super()._read_into(key, start, buffers)
        self.reads[key] = self.reads.get(key, 0) + (found or 0)
        return found

    def _put(self, key: str, data: Sequence[Buffer]) -> None:
        assert self.may_put.wait(60), "nobody let it go on"
        if self.fails:
            raise OSError("the disk is gone")
        super()._put(key, data)

    def open(self) -> Store:
        """Open the store that is there."""
        return Store.open_on(self, threads=1)


def copied(state: dict[str, Any]) -> State:
    """Copies of tensors, everything else as it is."""
    return {name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def changed_rows(before: State, after: State, names: list[str]) -> set[int]:
    """Rows in which one of the named tensors, a table's weights and slots, differs."""
    rows: set[int] = set()
    for name in names:
        old = before.get(name, torch.zeros_like(after[name]))
        differs = (old != after[name]).reshape(len(old), -1).any(dim=1)
        rows |= set(differs.nonzero().flatten().tolist())
    return rows
