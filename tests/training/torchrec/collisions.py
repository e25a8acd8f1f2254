"""An unsharded model with managed collision, saved between evictions and resumed, against one that goes on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
import torchrec
from torch import nn
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from cnr_store import Store, TableOptions, read_id_map
from cnr_store.errors import BadInput
from cnr_store.integrations.torchrec.collisions import ManagedCollisionState
from cnr_store.serving import Loader
from cnr_store.training import CheckpointManager
from tests.training.runs import assert_same

ROWS, IDS = 20, 37
SAVED, STOP = 8, 14
"""The last save is two steps behind an eviction, of one at every third step."""


class Collided(nn.Module):
    """More ids than rows: evictions give rows to other ids."""

    def __init__(self, policy: MCHEvictionPolicy, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = torchrec.EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"])
        bags = torchrec.EmbeddingBagCollection(device=torch.device("cpu"), tables=[config])
        collisions = MCHManagedCollisionModule(
            zch_size=ROWS, device=torch.device("cpu"), eviction_interval=3, eviction_policy=policy
        )
        collection = ManagedCollisionCollection({"t": collisions}, bags.embedding_bag_configs())
        self.sparse = ManagedCollisionEmbeddingBagCollection(bags, collection)
        self.dense = nn.Linear(8, 1)
        self.optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)

    def train_to(self, start: int, stop: int, manager: CheckpointManager | None = None) -> None:
        for number in range(start, stop):
            ids = torch.randint(0, IDS, (9,), generator=torch.Generator().manual_seed(number))
            batch = KeyedJaggedTensor.from_lengths_sync(keys=["f"], values=ids, lengths=torch.tensor([3, 3, 3]))
            self.optimizer.zero_grad()
            self.dense(self.sparse(batch)[0].values()).sin().sum().backward()
            self.optimizer.step()
            if manager is not None:
                manager.step()

    def manager(self, folder: Path) -> CheckpointManager:
        return CheckpointManager(
            str(folder), model=self, optimizer=self.optimizer, options=TableOptions.exact(), every_steps=4,
            extras={"collisions": ManagedCollisionState(self)},
        )  # fmt: skip


def check_raw_ids(folder: Path) -> None:
    """Rows that are found by raw id in a version are those that the module gave when it was saved."""
    asked = torch.cat([torch.arange(-3, IDS + 3), torch.tensor([2**63 - 1, -(2**63)])])
    for policy in (DistanceLFU_EvictionPolicy, LRU_EvictionPolicy):
        place = folder / policy.__name__
        model = Collided(policy(), 0)
        [table] = [name for name in model.state_dict() if name.endswith("embedding_bags.t.weight")]
        [collisions] = [one for one in model.modules() if isinstance(one, MCHManagedCollisionModule)]
        rows_of = {}
        with closing(model.manager(place)) as manager, Store.open(str(place)) as store, Loader(store) as loader:
            for step in range(STOP):
                model.train_to(step, step + 1, manager)
                manager.wait_until_finished()
                if manager.history and manager.history[-1].step == step + 1:
                    given = {"t": JaggedTensor(asked, lengths=torch.tensor([len(asked)]))}
                    rows = collisions.remap(given)["t"].values()
                    weight = model.state_dict()[table]
                    rows_of[manager.history[-1].version] = (weight[rows].clone().numpy(), rows.numpy())
                    loader.poll()
                    batch = loader.lookup_many({table: asked.numpy()}, by_raw_id=[table])
                    assert (batch.version, batch.step) == (manager.history[-1].version, step + 1)
                    assert (batch.rows[table] == rows_of[batch.version][0]).all()
            assert len(rows_of) > 2
            assert len({rows.tobytes() for _, rows in rows_of.values()}) == len(rows_of), "every map is another one"
            for version, (values, rows) in rows_of.items():
                snapshot = store.snapshot(version)
                row_ids, is_known = read_id_map(snapshot, table).find(asked.numpy())
                assert row_ids.tolist() == rows.tolist()
                assert (snapshot.table(table).read_rows(row_ids) == values).all()
                assert (rows[~is_known] == ROWS - 1).all()
                assert 0 < is_known.sum() < len(asked)


def check(folder: Path) -> None:
    """Into a new process's model, and into one that went another way; also where rows changed their ids meanwhile."""
    for policy in (DistanceLFU_EvictionPolicy, LRU_EvictionPolicy):
        for trained in (0, 2):
            place = folder / f"{policy.__name__}-{trained}"
            first, expected, resumed = (Collided(policy(), seed) for seed in (0, 0, 1))
            manager = first.manager(place)
            first.train_to(0, SAVED + 1, manager)
            manager.wait_until_finished()
            assert [one.kind for one in manager.history] == ["baseline", "delta"]
            expected.train_to(0, STOP)

            resumed.train_to(50, 50 + trained)
            manager = resumed.manager(place)
            restored = manager.restore()
            assert restored is not None
            assert restored.step == SAVED
            resumed.train_to(SAVED, STOP, manager)
            manager.close()
            assert_same(dict(resumed.state_dict()), dict(expected.state_dict()))
    with pytest.raises(BadInput, match="no MCHManagedCollisionModule"):
        ManagedCollisionState(nn.Linear(2, 2))
    with pytest.raises(BadInput, match="the model has"):
        ManagedCollisionState(expected).load_state_dict({})
