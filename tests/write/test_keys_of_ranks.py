"""Ranks that write a table of hashed keys together: each its own keys; any number of ranks reads them back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import KeyShare, Store, TableOptions, Transaction, key_owners, verify_store
from cnr_store.changes import changes
from cnr_store.errors import BadInput, BadRowIds
from cnr_store.maintenance.compaction import compact_run
from cnr_store.serving import Loader
from format_spec.reader.compare import compare
from tests.support.ranks import ThreadRank, on_ranks, outcomes
from tests.write.many_ranks import new_files, open_store

DIM = 3
OPTIONS = TableOptions(scale=0.5)
Rows = dict[int, float]
KEYS = st.one_of(st.integers(-12, 12), st.sampled_from([-(2**63), 2**63 - 1]))


def sorted_keys(keys: Any) -> Any:
    return np.asarray(sorted(keys), np.int64)


def write(txn: Transaction, rows: Rows, table: str = "h") -> None:
    keys = sorted_keys(rows)
    values = np.repeat(np.asarray([rows[int(key)] for key in keys], np.float32), DIM).reshape(-1, DIM)
    txn.write_rows(table, keys, values, slots={"m": values[:, 0].copy()})


def created(txn: Transaction, options: TableOptions = OPTIONS, sample: Any = None) -> None:
    txn.create_table("h", dim=DIM, options=options, slots={"m": "row"}, sample=sample)


def found(store: Store, share: KeyShare | None = None) -> Rows:
    keys, arrays = store.snapshot().table("h").read_all(slots=True, share=share)
    assert np.array_equal(arrays["values"][:, 0], arrays["m"])
    return dict(zip(keys.tolist(), arrays["m"].tolist(), strict=True))


SAVES = st.lists(st.tuples(st.dictionaries(KEYS, st.integers(-9, 9)), st.sets(KEYS)), min_size=1, max_size=3)
LIVES = st.lists(
    st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from(["modulo", "hash"]), SAVES), min_size=1, max_size=3
)


@settings(max_examples=15)
@given(LIVES, st.booleans())
def test_any_numbers_of_ranks_store_what_one_would(lives: Any, compacts: bool) -> None:
    """Admissions, updates and evictions, by other numbers of ranks and other rules in turn."""
    files, expected = new_files(), Rows()
    for world, rule, saves in lives:
        before, after = dict(expected), []
        for rows, gone in saves:
            expected = {key: value for key, value in (expected | rows).items() if key in rows or key not in gone}
            after.append(dict(expected))

        def work(rank: ThreadRank) -> None:
            with open_store(files) as store, store.writer(ranks=rank, shards={}, key_rule=rule) as writer:  # noqa: B023
                own = {}
                if store.head().record.chain:
                    writer.restore()
                    own = found(store, writer.keys)
                mine = {key: value for key, value in before.items() if writer.keys.holds(sorted_keys([key]))[0]}  # noqa: B023
                assert own == mine
                for step, ((rows, gone), state) in enumerate(zip(saves, after, strict=True)):  # noqa: B023
                    with writer.begin(step) as txn:
                        if "h" not in txn.tables:
                            created(txn)
                        write(txn, {key: rows[key] for key in rows if writer.keys.holds(sorted_keys([key]))[0]})
                        deleted = sorted_keys(gone - rows.keys())
                        if txn.kind == "delta":
                            txn.delete_rows("h", deleted[writer.keys.holds(deleted)])
                    assert found(store) == state

        on_ranks(world, work)
    with open_store(files) as store:
        if compacts:
            chain = len(store.head().record.chain)
            if chain > 2:
                compact_run(store, run=(1, chain))
            if len(store.head().record.chain) > 1:
                compact_run(store, run=(0, len(store.head().record.chain)))
        assert found(store) == expected
        assert verify_store(store, deep=True).is_sound
        with Loader(store) as loader:
            batch = loader.lookup_many({"h": np.append(sorted_keys(expected), 424_242)})
            assert batch.missing["h"].tolist() == [False] * len(expected) + [True]
            assert batch.rows["h"][:-1, 0].tolist() == [expected[int(key)] for key in sorted_keys(expected)]


def started(files: Any, world: int, rows: Rows) -> None:
    def work(rank: ThreadRank) -> None:
        with open_store(files) as store, store.writer(ranks=rank, shards={}) as writer, writer.begin(0) as txn:
            created(txn)
            write(txn, {key: value for key, value in rows.items() if key % world == rank.rank})

    on_ranks(world, work)


@pytest.mark.parametrize("keys", [[3, 5], [2, 3, 5, 7], []])
def test_a_rank_without_rows_takes_the_scale_of_the_others(keys: list[int]) -> None:
    """A table that one rank had no key of yet was refused on all, though the others had rows to choose a scale on."""
    files = new_files()

    def work(rank: ThreadRank) -> None:
        with open_store(files) as store, store.writer(ranks=rank, shards={}) as writer, writer.begin(0) as txn:
            own = {key: float(key) for key in keys if writer.keys.holds(sorted_keys([key]))[0]}
            sample = np.repeat(np.asarray([*own.values()], np.float32), DIM).reshape(-1, DIM)
            created(txn, TableOptions(bits=8), sample)
            write(txn, own)

    outcome = outcomes(2, work)

    with open_store(files) as store:
        if keys:
            assert store.snapshot().table("h").read_all()[0].tolist() == keys
        else:
            assert all(isinstance(one, BadInput) and "no rank has a row" in str(one) for one in outcome)
            assert store.head().record.chain == ()


def test_a_loader_and_a_stream_see_evictions_of_all_ranks() -> None:
    files = new_files()
    started(files, 2, dict.fromkeys(range(6), 1.0))
    with open_store(files) as store, Loader(store) as loader:
        since = store.latest_version()

        def work(rank: ThreadRank) -> None:
            with open_store(files) as own, own.writer(ranks=rank, shards={}) as writer:
                writer.restore()
                with writer.begin(1) as txn:
                    write(txn, {6 + rank.rank: 2.0})
                    txn.delete_rows("h", np.asarray([2 + rank.rank]))

        on_ranks(2, work)
        loader.poll()
        assert loader.lookup_many({"h": np.arange(9)}).missing["h"].tolist() == [k in (2, 3, 8) for k in range(9)]
        seen = {(row["row_id"], row["op"]) for batch in changes(store, since) for row in batch.to_pylist()}
        assert seen == {(2, "delete"), (3, "delete"), (6, "upsert"), (7, "upsert")}


GIVEN: dict[str, Callable[[Transaction], Any]] = {
    "rows": lambda txn: write(txn, {5: 1.0}),
    "deletions": lambda txn: txn.delete_rows("h", np.asarray([5])),
}


@pytest.mark.parametrize("what", sorted(GIVEN))
def test_a_key_of_another_rank_is_refused(what: str) -> None:
    files = new_files()
    started(files, 2, {4: 1.0, 5: 1.0})

    def work(rank: ThreadRank) -> None:
        with open_store(files) as store, store.writer(ranks=rank, shards={}) as writer:
            writer.restore()
            with writer.begin(1) as txn:
                GIVEN[what](txn)

    first, _ = outcomes(2, work)

    assert isinstance(first, BadRowIds)
    assert "key 5 of table 'h' (and 0 more) was given to rank 0, but rank 1 of 2 owns it" in str(first)
    with open_store(files) as store:
        assert store.head().record.checkpoint == 1
        assert found(store) == {4: 1.0, 5: 1.0}


def test_ranks_that_follow_different_rules_write_nothing() -> None:
    def work(rank: ThreadRank) -> None:
        open_store(files).writer(ranks=rank, shards={}, key_rule=("modulo", "hash")[rank.rank])

    files = new_files()

    assert [type(error) for error in outcomes(2, work)] == [BadInput, BadInput]


def test_ranks_agree_on_the_scale_of_a_new_table() -> None:
    files = new_files()
    scales: list[float] = [0.0, 0.0]

    def work(rank: ThreadRank) -> None:
        sample = np.random.default_rng(rank.rank).normal(size=(50, DIM), scale=1 + rank.rank).astype(np.float32)
        with open_store(files) as store, store.writer(ranks=rank, shards={}) as writer, writer.begin(0) as txn:
            created(txn, TableOptions(bits=4), sample)
            scales[rank.rank] = txn.tables["h"].encoding.scale  # type: ignore[union-attr]
            write(txn, {rank.rank: 1.0})

    on_ranks(2, work)

    assert scales[0] == scales[1] > 0


def test_ranks_that_create_different_tables_write_nothing() -> None:
    files = new_files()

    def work(rank: ThreadRank) -> None:
        with open_store(files) as store, store.writer(ranks=rank, shards={}) as writer, writer.begin(0) as txn:
            created(txn, TableOptions(scale=0.5 + rank.rank))

    assert [type(error) for error in outcomes(2, work)] == [BadInput, BadInput]
    with open_store(files) as store:
        assert store.head().record.chain == ()


def test_a_one_shot_delta_needs_of_each_rank_its_own_keys() -> None:
    files = new_files()
    started(files, 2, dict.fromkeys(range(4), 1.0))

    def work(rank: ThreadRank) -> None:
        with open_store(files) as store, store.writer(ranks=rank, shards={}) as writer:
            writer.restore()
            with writer.begin(1) as txn:
                write(txn, {rank.rank: 2.0})
            with writer.begin(2, base="baseline") as txn:
                write(txn, {rank.rank: 3.0})

    on_ranks(2, work)
    with open_store(files) as store:
        assert found(store) == {0: 3.0, 1: 3.0, 2: 1.0, 3: 1.0}


def test_a_table_that_no_rank_changed_is_not_recorded() -> None:
    files = new_files()
    started(files, 2, {4: 1.0, 5: 1.0})

    def work(rank: ThreadRank) -> None:
        with open_store(files) as store, store.writer(ranks=rank, shards={}) as writer:
            writer.restore()
            with writer.begin(1) as txn:
                if rank.rank == 0:
                    txn.put_scalars({"epoch": 1})

    on_ranks(2, work)
    with open_store(files) as store:
        assert not store.snapshot().manifests[-1].recorded
        assert found(store) == {4: 1.0, 5: 1.0}


def test_the_independent_reader_reads_the_parts_of_all_ranks(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "s"), fsync=False).close()
    started(tmp_path / "s", 3, {key: float(key) for key in range(-7, 20)})

    assert compare(tmp_path / "s") == 3


@pytest.mark.parametrize("rule", ["modulo", "hash"])
def test_each_key_has_one_owner(rule: Any) -> None:
    keys = np.asarray([-(2**63), -7, -1, 0, 3, 2**63 - 1])

    shares = [KeyShare(index, 3, rule).holds(keys) for index in range(3)]

    assert np.sum(shares, axis=0).tolist() == [1] * len(keys)
    assert key_owners(np.asarray([-7, 3]), 3, "modulo").tolist() == [2, 0]
