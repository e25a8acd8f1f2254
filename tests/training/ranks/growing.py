"""Scenarios of tables that grow: each rank has the keys that it owns; another number of ranks goes on.

Four ranks save with a `CheckpointManager`, beside a model; two go on with a writer alone.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import torch

from cnr_store import KeyShare, Store, TableOptions
from cnr_store.training import CheckpointManager, DynamicTables, TrackingOptions
from cnr_store.training.ranks import ProcessRanks
from tests.support.dynamic_table import HashTable
from tests.training.ranks.scenarios import Place, scenario

STEPS = 6


def train(table: HashTable, place: Place, steps: range) -> None:
    for step in steps:
        keys = np.random.default_rng(step).integers(-60, 60, 40)
        table.train(keys[keys % place.world == place.rank], 1000 + step)


@scenario(1, 4)
def dynamic_tables_evict_while_they_are_saved(place: Place) -> None:
    table = HashTable(3, 4)
    manager = CheckpointManager(
        place.url("dynamic"), model=torch.nn.Linear(1, 1), options=TableOptions.exact(), every_steps=1,
        tracking=TrackingOptions(dynamic_tables={"user": table}),
    )  # fmt: skip
    for step in range(STEPS):
        train(table, place, range(step, step + 1))
        manager.step()
    manager.close()
    with closing(Store.open(place.url("dynamic"), fsync=False)) as store:
        assert store.head().record.step == STEPS
        assert len(store.head().record.chain) == STEPS
    assert table.evictions > 0
    place.keep("dynamic", table.content())


@scenario(2, 2)
def fewer_ranks_go_on_with_dynamic_tables(place: Place) -> None:
    table = HashTable(30, 4)
    tables = DynamicTables({"user": table}, TableOptions.exact())
    saved = {key: row for rank in range(4) for key, row in place.kept("dynamic", rank).items()}
    with closing(Store.open(place.url("dynamic"), fsync=False)) as store:
        with store.writer(ranks=ProcessRanks(), shards={}) as writer:
            tables.restore(writer.restore(), writer.keys)
            assert table.content() == {key: row for key, row in saved.items() if key % 2 == place.rank}
            train(table, place, range(STEPS, STEPS + 2))
            with tables.saving(writer, STEPS + 2):
                pass
        everything = {key: row for one in place.gather(table.content()) for key, row in one.items()}
        again = HashTable(60, 4)
        DynamicTables({"user": again}).restore(store.snapshot(), KeyShare(0, 1))
        assert again.content() == everything
