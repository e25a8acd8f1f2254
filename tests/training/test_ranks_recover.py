"""Managers of several ranks, as threads, whose tables are on one rank each: what one rank lost all begin anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import StorageFailure, Store, TableOptions
from cnr_store.read.snapshot import Snapshot
from cnr_store.storage import storage_from_filesystem
from cnr_store.training import CheckpointManager, SavePolicy, StoreOptions, shards
from cnr_store.training.shards import LocalShard, ShardingLibrary, whole_shard
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.ranks import ThreadRank, on_ranks


class Part(nn.Module):
    """A table that one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.0).reshape(12, 2))


def find(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[LocalShard]:
    parts = [(name, module) for name, module in model.named_modules() if isinstance(module, Part)]
    return [whole_shard(f"{name}.weight", module.weight, optimizers) for name, module in parts]


def test_a_rank_that_cannot_open_its_commit_does_not_fail_the_next_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks' tables were not declared anew although all mirrors were given up: that save was refused."""
    library = ShardingLibrary(find=find, follow=lambda _model, _tracker: [], unwrap=lambda _: None)
    monkeypatch.setitem(shards._REGISTERED, "by hand", library)
    files = IsolatedMemoryFileSystem()
    Store.create_on(storage_from_filesystem(files, "/root"), threads=1).close()

    def train(rank: ThreadRank) -> list[str]:
        storage = storage_from_filesystem(files, "/root")
        part = Part()
        model = nn.ModuleDict({f"t{rank.rank}": part})
        with (
            Store.open_on(storage, threads=1) as store,
            CheckpointManager(
                store,
                model=model,
                options=TableOptions(scale=1.0),
                save_policy=SavePolicy(rng=False),
                store_options=StoreOptions(ranks=rank),
            ) as manager,
        ):
            manager.save()
            if rank.rank == 1:
                fails.append(storage)
            for _ in range(2):
                (table,) = manager.tracker.weights
                with torch.no_grad():
                    part.weight[3] += 1
                manager.tracker.mark(table, [3])
                manager.save()
            return [report.kind for report in manager.history]

    fails: list[object] = []
    real = Snapshot.__init__

    def flaky(self: Snapshot, storage: object, *args: object, **options: object) -> None:
        if storage in fails:
            fails.remove(storage)
            raise StorageFailure("no answer")
        real(self, storage, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Snapshot, "__init__", flaky)
    kinds = on_ranks(2, train)

    assert kinds == [["baseline", "delta", "baseline"]] * 2
    assert not fails
    with Store.open_on(storage_from_filesystem(files, "/root"), threads=1) as store:
        expected = np.arange(24, dtype=np.float32).reshape(12, 2)
        expected[3] += 2
        for table in ("t0.weight", "t1.weight"):
            assert np.array_equal(store.snapshot().table(table).read(), expected)
