"""A `CheckpointManager` saves tables that grow by key beside a model: saved, restored, refused, nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from cnr_store import BackgroundSaveFailed, KeyShare, Store, TableOptions, verify_store
from cnr_store.errors import BadInput, DoesNotApply, TableNotFound, Unsupported
from cnr_store.training import CheckpointManager, DynamicTables, StoreOptions, TrackingOptions
from tests.support.dynamic_table import HashTable
from tests.support.ranks import ThreadRank, on_ranks, outcomes
from tests.training.faulty_runs import Backend, create
from tests.training.runs import DIM, KeyedTraining, assert_same, go_on, manager_of, uninterrupted


def stored(store: Store, name: str = "by_key") -> dict[int, Any]:
    table = HashTable(200, DIM)
    DynamicTables({name: table}).restore(store.snapshot(), KeyShare(0, 1))
    return table.content()


@pytest.mark.parametrize("how", [{}, {"first_baseline": "live"}, {"policy": "baseline"}], ids=str)
def test_a_resumed_training_is_bit_equal_to_one_that_was_not_interrupted(tmp_path: Path, how: dict[str, Any]) -> None:
    training = KeyedTraining()
    manager = manager_of(tmp_path, training, **how)
    go_on(training, manager, 0, 6, saves=True)
    with Store.open(str(tmp_path)) as store:
        assert stored(store) == training.table.content()
        assert verify_store(store, deep=True).is_sound
    assert training.table.evictions > 0
    again = KeyedTraining()
    with manager_of(tmp_path, again, **how) as resumed:
        restored = resumed.restore()
        assert restored is not None
        assert (restored.step, set(restored.tables)) == (6, {"user.weight", "item.weight", "by_key"})
        go_on(again, resumed, 6, 9, saves=True)
        assert_same(again.state(), uninterrupted("rowwise_adagrad", 9, make=KeyedTraining))
        kinds = [report.kind for report in resumed.history]
    assert kinds == ["baseline" if how.get("policy") == "baseline" else "delta"] * 3


def test_keys_that_a_failed_save_took_are_in_the_next_one(backend: Backend) -> None:
    store, training = create(backend), KeyedTraining()
    manager = manager_of(store, training)
    backend.managers.append(manager)
    go_on(training, manager, 0, 1, saves=True)
    training.train(1)
    backend.fails = True
    with pytest.raises(BackgroundSaveFailed):
        manager.save()
    backend.fails = False
    training.train(2)

    report = manager.save()

    assert report is not None
    assert report.kind == "delta"
    assert stored(store) == training.table.content()


def test_a_table_that_is_new_in_a_resumed_training_comes_whole(tmp_path: Path) -> None:
    training = KeyedTraining()
    with manager_of(tmp_path, training, dynamic_tables={}) as manager:
        go_on(training, manager, 0, 1, saves=True)
    with manager_of(tmp_path, training) as manager:
        with pytest.raises(TableNotFound):
            manager.restore()
        restored = manager.restore(strict=False)
        assert restored is not None
        assert restored.missing == ("by_key",)
        go_on(training, manager, 1, 2, saves=True)
        assert stored(manager.store) == training.table.content()


def test_a_table_that_the_training_no_longer_has_ends(tmp_path: Path) -> None:
    training = KeyedTraining()
    with manager_of(tmp_path, training) as manager:
        go_on(training, manager, 0, 1, saves=True)
    with manager_of(tmp_path, training, dynamic_tables={}) as manager:
        with pytest.raises(BadInput, match="by_key"):
            manager.restore()
        restored = manager.restore(strict=False)
        assert restored is not None
        assert restored.unexpected == ("by_key",)
        go_on(training, manager, 1, 2, saves=True)
        assert "by_key" not in manager.store.snapshot().tables


def test_a_table_of_another_form_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    training = KeyedTraining()
    with manager_of(tmp_path, training) as manager:
        go_on(training, manager, 0, 1, saves=True)
    other = KeyedTraining()
    other.table.slot_kinds = {"sum": "element"}
    before = other.state()

    with manager_of(tmp_path, other) as manager, pytest.raises(DoesNotApply, match="by_key"):
        manager.restore()

    assert_same(other.state(), before)


@pytest.mark.parametrize("policy", ["one_shot", "intermittent"])
def test_deltas_since_the_baseline_are_refused(tmp_path: Path, policy: Any) -> None:
    with pytest.raises(BadInput, match="dynamic tables"):
        manager_of(tmp_path, KeyedTraining(), policy=policy)


def test_a_name_that_the_model_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has the name of a table of the model"):
        manager_of(tmp_path, KeyedTraining(), dynamic_tables={"user.weight": HashTable(4, DIM)})


def test_a_survivor_with_dynamic_tables_is_refused(tmp_path: Path) -> None:
    training = KeyedTraining()
    manager = manager_of(tmp_path, training)
    go_on(training, manager, 0, 1, saves=True)

    with pytest.raises(Unsupported, match="dynamic tables"):
        manager.survivor()


def managed(url: Path, rank: ThreadRank, table: HashTable, **tables: HashTable) -> CheckpointManager:
    return CheckpointManager(
        str(url), model=nn.Linear(2, 2), options=TableOptions.exact(),
        tracking=TrackingOptions(dynamic_tables={"by_key": table, **tables}),
        store_options=StoreOptions(ranks=rank, key_rule="hash"),
    )  # fmt: skip


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    rows: dict[int, Any] = {}
    for world in (3, 2):

        def work(rank: ThreadRank) -> dict[int, Any]:
            table = HashTable(100, DIM)
            with managed(tmp_path, rank, table) as manager:
                mine = KeyShare(rank.rank, rank.world, "hash")
                if rows:  # noqa: B023
                    manager.restore()
                    held = {key: row for key, row in rows.items() if mine.holds(np.asarray([key]))[0]}  # noqa: B023
                    assert table.content() == held
                for step in range(3):
                    keys = np.arange(10 * step, 10 * step + 40)
                    table.train(keys[mine.holds(keys)], step)
                    manager.step()
                    manager.save()
            return table.content()

        rows = {key: row for content in on_ranks(world, work) for key, row in content.items()}
        with Store.open(str(tmp_path)) as store:
            assert stored(store) == rows
    assert len(rows) == 60


def test_ranks_with_other_tables_are_refused_on_all(tmp_path: Path) -> None:
    def work(rank: ThreadRank) -> None:
        more = {"second": HashTable(4, DIM)} if rank.rank else {}
        managed(tmp_path, rank, HashTable(4, DIM), **more)

    found = outcomes(2, work)

    assert all(isinstance(one, BadInput) and "other dynamic tables" in str(one) for one in found)
