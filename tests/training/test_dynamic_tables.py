"""Dynamic tables of another library: trained, evicted, saved as deltas, restored by any number of ranks, replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store import KeyShare, Store, TableOptions, verify_store
from cnr_store.errors import BadDtype, BadInput, BadRowIds, DoesNotApply
from cnr_store.training.dynamic_tables import DynamicTable, DynamicTables, KeyChanges, KeyedRows, _joined, _split
from tests.support.dynamic_table import NO_KEYS, HashTable
from tests.support.ranks import ThreadRank, on_ranks, outcomes
from tests.write.many_ranks import new_files, open_store

DIM = 4
EXACT = TableOptions.exact()
ALL = KeyShare(0, 1)


def batch(step: int, share: KeyShare = ALL) -> Any:
    keys = np.random.default_rng(step).integers(-50, 50, 16)
    return keys[share.holds(keys)]


def tables_of(table: DynamicTable, options: TableOptions = EXACT) -> DynamicTables:
    return DynamicTables({"user": table}, options)


def save(tables: DynamicTables, writer: Any, step: int, **how: Any) -> None:
    with tables.saving(writer, step, **how):
        pass


def restored(store: Store, buckets: int = 100) -> dict[int, Any]:
    table = HashTable(buckets, DIM)
    tables_of(table).restore(store.snapshot(), ALL)
    return table.content()


@pytest.fixture
def store() -> Any:
    with open_store(new_files()) as store:
        yield store


@pytest.mark.parametrize("rule", ["modulo", "hash"])
def test_any_number_of_ranks_goes_on(rule: Any) -> None:
    files, step = new_files(), 0
    saved: dict[int, Any] = {}
    for world in (2, 3, 1):

        def work(rank: ThreadRank) -> tuple[dict[int, Any], int]:
            table = HashTable(12 // world, DIM)  # noqa: B023
            tables = tables_of(table)
            with open_store(files) as store, store.writer(ranks=rank, shards={}, key_rule=rule) as writer:
                if saved:  # noqa: B023
                    big = HashTable(100, DIM)
                    tables_of(big).restore(writer.restore(), writer.keys)
                    own = {key: row for key, row in saved.items() if writer.keys.holds(np.asarray([key]))[0]}  # noqa: B023
                    assert big.content() == own
                    table, tables = big, tables_of(big)
                for number in range(step, step + 8):  # noqa: B023
                    table.train(batch(number, writer.keys), number)
                    save(tables, writer, number)
            return table.content(), table.evictions

        found = on_ranks(world, work)
        assert saved or all(evictions > 0 for _, evictions in found)
        saved = {key: row for content, _ in found for key, row in content.items()}
        step += 8
        with open_store(files) as store:
            assert restored(store) == saved
            assert verify_store(store, deep=True).is_sound


def test_a_replica_replays_what_changed(store: Store) -> None:
    table, replica = HashTable(4, DIM), HashTable(100, DIM)
    since = None
    with store.writer() as writer:
        for step in range(20):
            table.train(batch(step), step)
            save(tables_of(table), writer, step, kind="baseline" if step == 9 else "delta")
            if since is None:
                tables_of(replica).restore(store.snapshot(), ALL)
                since = store.latest_version()
            else:
                since = tables_of(replica).replay(store, since)
            assert replica.content() == table.content()
    assert table.evictions > 20
    assert len(replica.take_changes().touched) == 0


def test_what_a_failed_save_took_is_in_the_next_one(store: Store) -> None:
    table = HashTable(2, DIM)
    tables = tables_of(table)
    with store.writer() as writer:
        table.train(batch(0), 0)
        save(tables, writer, 0)
        before = restored(store)
        table.train(batch(1), 1)
        with pytest.raises(ZeroDivisionError), tables.saving(writer, 1):
            raise ZeroDivisionError
        assert restored(store) == before
        table.train(batch(2), 2)
        save(tables, writer, 2)

    assert restored(store) == table.content()
    assert table.evictions > 0


def test_a_key_of_another_rank_ends_the_save_on_all() -> None:
    files = new_files()

    def work(rank: ThreadRank) -> None:
        table = HashTable(4, DIM)
        with open_store(files) as store, store.writer(ranks=rank, shards={}) as writer:
            table.train(np.asarray([2 + rank.rank, 4]), 0)
            save(tables_of(table), writer, 0)

    _, second = outcomes(2, work)

    assert isinstance(second, BadRowIds)
    with open_store(files) as store:
        assert store.head().record.chain == ()


@pytest.mark.parametrize("other", [{"dim": 3}, {"slot_kinds": {"sum": "element"}}, {"slot_kinds": {}}])
def test_a_table_of_another_form_is_refused(store: Store, other: dict[str, Any]) -> None:
    table = HashTable(4, DIM)
    table.train(batch(0), 0)
    with store.writer() as writer:
        save(tables_of(table), writer, 0)
    for name, value in other.items():
        setattr(table, name, value)

    with pytest.raises(DoesNotApply, match="is stored with hashed keys, width 4"):
        tables_of(table).restore(store.snapshot(), ALL)
    with pytest.raises(DoesNotApply, match="is stored with hashed keys, width 4"):  # it put rows of another width in
        tables_of(table).replay(store, store.latest_version())

    assert len(table.keys()) > 0


class Faulty(HashTable):
    """Breaks the contract in one way, from when ``fault`` is set."""

    fault = ""

    def take_changes(self) -> KeyChanges:
        found = super().take_changes()
        if self.fault == "a key is both":  # evicted and admitted again
            return KeyChanges(found.touched, np.union1d(found.evicted, found.touched[-1:]))
        return found

    def rows(self, keys: Any) -> KeyedRows:
        found = super().rows(keys)
        if self.fault == "a row is left out":  # evicted meanwhile
            found = super().rows(keys[:-1])
        scores: Any = {
            "no scores": None, "signed scores": found.scores.astype(np.int64), "float scores": found.scores / 2
        }.get(self.fault, found.scores)  # fmt: skip
        return replace(found, scores=scores)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("a key is both", BadRowIds, "table 'user' names key 39 as touched and as evicted"),
        ("a row is left out", BadRowIds, r"'user' was asked for the rows of \d+ keys and gave rows of"),
        ("no scores", BadDtype, "scores of dynamic table 'user' are NoneType, expected a uint64 array"),
        ("signed scores", BadDtype, "are int64, expected a uint64 array"),
        ("float scores", BadDtype, "are float64, expected a uint64 array"),
    ],
)
def test_a_table_that_breaks_the_contract_is_refused_and_loses_nothing(
    store: Store, fault: str, error: type[BadInput], message: str
) -> None:
    """A key that was named as touched and as evicted was deleted, a row left out was lost, scores were cut."""
    table = Faulty(4, DIM)
    tables = tables_of(table)
    with store.writer() as writer:
        table.train(np.arange(30), 0)
        save(tables, writer, 0)
        before = restored(store)
        table.train(np.arange(20, 40), 1)
        table.fault = fault
        with pytest.raises(error, match=message):
            save(tables, writer, 1)
        assert restored(store) == before
        table.fault = ""
        save(tables, writer, 2)

    assert restored(store) == table.content()


def test_rows_that_a_smaller_table_has_no_room_for_leave_the_store(store: Store) -> None:
    """The store kept them, and a later restore brought them back beside the training's rows."""
    table, smaller = HashTable(20, DIM), HashTable(4, DIM)
    table.train(np.arange(60), 0)
    with store.writer() as writer:
        save(tables_of(table), writer, 0)
    with store.writer() as writer:
        tables_of(smaller).restore(writer.restore(), ALL)
        assert len(smaller.content()) == 16
        smaller.train(batch(1), 1)
        save(tables_of(smaller), writer, 1)

    assert restored(store) == smaller.content()


def test_rows_are_quantized_and_scores_are_exact(store: Store) -> None:
    table, again = HashTable(20, DIM), HashTable(20, DIM)
    table.train(batch(0), 2**63 + 12345)
    with store.writer() as writer:
        save(tables_of(table, TableOptions(bits=8)), writer, 0)
    tables_of(again).restore(store.snapshot(), ALL)

    found, expected = again.rows(again.keys()), table.rows(table.keys())

    assert np.array_equal(found.keys, expected.keys)
    assert np.array_equal(found.scores, expected.scores)
    assert not np.array_equal(found.values, expected.values)
    assert np.allclose(found.values, expected.values, atol=0.05)


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_every_bit_of_a_score_is_kept(scores: list[int]) -> None:
    given_scores = np.asarray(scores, np.uint64)

    assert np.array_equal(_joined(_split(given_scores)), given_scores)


def test_a_replayed_row_is_no_change() -> None:
    table = HashTable(4, DIM)

    table.replay(
        KeyedRows(
            np.asarray([3]), np.ones((1, DIM), np.float32), {"sum": np.ones(1, np.float32)}, np.ones(1, np.uint64)
        ),
        NO_KEYS,
    )

    assert [len(keys) for keys in (table.take_changes().touched, table.take_changes().evicted)] == [0, 0]
