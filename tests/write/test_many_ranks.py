"""Ranks that write together store what one writer stores, and restore as other numbers of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import Store, verify_store
from cnr_store.errors import BadInput, DoesNotApply, TransactionAborted
from cnr_store.format.layout import RECEIPT
from cnr_store.segment.codes import TableCodes
from cnr_store.segment.shards import Shard
from cnr_store.types import Rectangle
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.writer import Writer
from format_spec.reader.compare import compare
from tests.support.faulty import FaultyFileSystem
from tests.support.ranks import ThreadRank, on_ranks
from tests.support.store_oracle import TableModel, training_values
from tests.write.many_ranks import (
    DIM,
    KIND,
    ROWS,
    SAVES,
    TABLES,
    Change,
    Life,
    Placed,
    check_state,
    declare,
    digest_sums,
    draw_placement,
    give,
    new_files,
    of,
    one_table,
    open_store,
    restore_exactly,
    row_wise,
    save,
    shards_of,
    started,
    touch,
)


@settings(max_examples=12)
@given(st.data(), st.integers(0, 10**6), st.sampled_from(["memory", "mmap"]))
def test_ranks_store_what_one_writer_stores(data: st.DataObject, seed: int, mirror: Any) -> None:
    files, single = new_files(), new_files()
    life = Life(seed)
    alone = open_store(single)
    one = alone.writer()
    whole: dict[str, list[Rectangle | None]] = {table: [None] for table in TABLES}
    with one.begin(0) as txn:
        declare(txn, whole, life.models)
    is_first = True
    for world in data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3)):
        placements = draw_placement(data.draw, world)
        saves = data.draw(st.lists(SAVES, min_size=1, max_size=3))
        culprit = data.draw(st.integers(0, world - 1))
        plan: list[tuple[Change, dict[str, TableModel], dict[str, TableModel]]] = []
        initial = life.copy()
        for kind, base in saves:
            before = life.copy()
            change = life.train(*((kind, base) if kind != "abort" else ("delta", "head")))
            if kind == "abort":
                change.kind = "abort"
                plan.append((change, before, life.copy()))
                change = Change("delta", "head", change.written, change.deleted)
                before = life.copy()
            plan.append((change, before, life.copy()))

        def work(rank: ThreadRank) -> None:
            mine = placements[rank.rank]  # noqa: B023
            shards: dict[str, list[Rectangle | None]] = {table: list(tiles) for table, tiles in mine.items()}
            with open_store(files) as store, store.writer(ranks=rank, shards=mine, mirror=mirror) as writer:
                if is_first:  # noqa: B023
                    with writer.begin(0) as txn:
                        declare(txn, shards, initial)  # noqa: B023
                else:
                    restore_exactly(writer, mine, initial)  # noqa: B023
                for number, (change, _, after) in enumerate(plan):  # noqa: B023
                    if change.kind == "abort":
                        give_up(writer, shards, change, after, is_culprit=rank.rank == culprit)  # noqa: B023
                        continue
                    with writer.begin(number + 1, change.kind, base=change.base) as txn:  # type: ignore[arg-type]
                        give(txn, shards, after, change)
                    if number == len(plan) - 1:  # noqa: B023
                        restore_exactly(writer, mine, after)

        on_ranks(world, work)
        is_first = False
        for number, (change, _, after) in enumerate(plan):
            if change.kind != "abort":
                with one.begin(number + 1, change.kind, base=change.base) as txn:  # type: ignore[arg-type]
                    give(txn, whole, after, change)
                if txn.kind == "baseline":
                    life.changed = {table: set() for table in TABLES}
                    continue
                for table in TABLES:  # of saves behind a baseline too
                    life.changed[table].update(change.written[table].tolist(), change.deleted[table].tolist())
        with open_store(files) as store:
            check_state(store.snapshot(), life.models)
            check_state(alone.snapshot(), life.models)
            assert digest_sums(store.snapshot()) == digest_sums(alone.snapshot())
            report = verify_store(store, deep=True)
            assert report.is_sound, report
    alone.close()


def give_up(
    writer: Writer,
    shards: dict[str, list[Rectangle | None]],
    change: Change,
    after: dict[str, TableModel],
    *,
    is_culprit: bool,
) -> None:
    """One rank fails in the middle of a save: all of them end it, see nothing of it, and can save the next one."""
    version = writer.head.record.v
    error = ZeroDivisionError("training failed")

    def save_half() -> None:
        with writer.begin(99) as txn:
            give(txn, shards, after, change)
            if is_culprit:
                raise error

    with pytest.raises((ZeroDivisionError, TransactionAborted)) as ended:
        save_half()
    assert (ended.value is error) == is_culprit
    assert writer.head.record.v == version
    assert writer.is_synced


def test_rows_over_four_ranks_go_on_as_tables_of_two_and_then_of_one(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "s"), fsync=False, threads=1).close()
    models = one_table()
    tables: list[Placed] = [{"t": [Rectangle((0, ROWS), (0, DIM))]}, {}]
    whole: list[Placed] = [tables[0]]
    started(tmp_path / "s", row_wise(4), models)
    for step, placements in enumerate((row_wise(4), tables, whole), 1):
        before = {"t": models["t"].copy()}
        change = touch(models, step)

        def work(rank: ThreadRank) -> None:
            mine = placements[rank.rank]  # noqa: B023
            with open_store(tmp_path / "s") as store:
                writer = store.writer(ranks=rank, shards=mine)
                restore_exactly(writer, mine, before)  # noqa: B023
                save(writer, mine, models, change, step)  # noqa: B023

        on_ranks(len(placements), work)
        with open_store(tmp_path / "s") as store:
            check_state(store.snapshot(), models)

    assert compare(tmp_path / "s") > 3


def test_on_restore_each_rank_reads_the_chunks_of_its_rectangle_alone() -> None:
    # No lattice with wide codes: where a narrow mirror turns out too narrow its chunks are read a second time.
    files, models = new_files(), one_table("coarse_bits")
    started(files, row_wise(4), models)
    for placements, share in ((row_wise(4), 1 / 4), (row_wise(2), 1 / 2), (row_wise(1), 1)):
        views = [FaultyFileSystem(files) for _ in placements]

        def work(rank: ThreadRank) -> list[str]:
            mine, view = placements[rank.rank], views[rank.rank]  # noqa: B023
            with open_store(view) as store:
                writer = store.writer(ranks=rank, shards=mine)
                before = len(view.calls)
                restore_exactly(writer, mine, models)
                return [call.path for call in view.calls[before:] if call.operation == "read"]

        paths = on_ranks(len(placements), work)
        chunks = [[path for path in of_rank if "/c." in path] for of_rank in paths]
        sizes = [sum(files.size(path) for path in of_rank) for of_rank in chunks]
        others = [path for of_rank in paths for path in of_rank if "/c." not in path and "/commits/" not in path]
        assert sum(sizes) > 0
        assert all(count == 1 for count in Counter(path for of_rank in chunks for path in of_rank).values())
        assert max(sizes) <= 1.1 * share * sum(sizes)
        assert Counter(path.rsplit("/", 1)[1] for path in others).keys() <= {"_segment.json.zst"}
        assert len(others) == len(placements)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_mirror_of_another_state_is_refused_on_all_ranks_until_a_restore(culprit: int) -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    change = touch(models, 1)

    def work(rank: ThreadRank) -> tuple[type, int, int]:
        mine = placements[rank.rank]
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards=mine)
            writer.restore()
            if rank.rank == culprit:
                shard = Shard("t", mine["t"][0])
                codes = writer.mirrors.get(shard)
                assert isinstance(codes, TableCodes)
                codes.arrays["codes"][3, 2] += 1
                writer.mirrors.put(shard, codes, codes.digest(store.internals.workers))
            with pytest.raises(DoesNotApply) as refused:
                save(writer, mine, models, change, 1)
            version = store.latest_version()
            rank.exchange(b"")
            with pytest.raises(DoesNotApply):
                writer.begin(1)
            writer.restore()
            return type(refused.value), version, save(writer, mine, models, change, 1)

    outcomes = on_ranks(2, work)

    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] == outcomes[0][1] + 1
    with open_store(files) as store:
        check_state(store.snapshot(), models)


@pytest.mark.parametrize("kind", ["delta", "baseline"])
def test_a_rank_that_missed_a_commit_may_not_go_on_from_its_mirror(kind: Any) -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    first, second = touch(models, 1), touch(models, 2)

    def work(rank: ThreadRank) -> None:
        mine = placements[rank.rank]
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards=mine)
            writer.restore()
            state = writer._state
            head, snapshot = state.head, state.snapshot
            shard = Shard("t", mine["t"][0])
            mirror = writer.mirrors.get(shard)
            assert mirror is not None
            codes, digest = mirror.arrays["codes"].copy(), writer.mirrors.digest(shard)
            save(writer, mine, models, first, 1)
            if rank.rank == 1:  # as if this rank had not heard of the commit
                state.head, state.snapshot = head, snapshot
                mirror.arrays["codes"] = codes
                writer.mirrors.put(shard, mirror, digest)
            if kind == "delta":
                with pytest.raises(DoesNotApply, match="missed a commit"):
                    writer.begin(2)
                writer.restore()
            with writer.begin(2, kind) as txn:
                assert txn.needs_whole_tables == (["t"] if kind == "baseline" else [])
                if kind == "baseline":
                    tile = mine["t"][0]
                    txn.declare_tables({"t": [Declaration(of(models["t"].values, tile), {}, KIND.options)]})
                    txn.write_table("t", of(models["t"].values, tile), rectangle=tile)
                else:
                    give(txn, shards_of(mine), models, second)

    on_ranks(2, work)

    with open_store(files) as store:
        check_state(store.snapshot(), models)
        assert verify_store(store, deep=True).is_sound


def test_numbers_of_numpy_are_shards_too() -> None:
    files, models = new_files(), one_table()
    cut = np.int64(ROWS // 2)
    started(files, [{"t": [Rectangle((0, cut), (0, DIM))]}, {"t": [Rectangle((cut, ROWS), (0, DIM))]}], models)  # type: ignore[arg-type]

    with open_store(files) as store:
        check_state(store.snapshot(), models)


def test_ranks_with_one_document_or_a_table_of_nobody_are_all_refused() -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)

    def twice(rank: ThreadRank) -> None:
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards=placements[rank.rank])
            writer.restore()
            with pytest.raises(BadInput, match="both saved 'reader'"), writer.begin(1) as txn:
                txn.put_document("reader", 1)
            with pytest.raises(BadInput, match="another way than rank 0"), writer.begin(1) as txn:
                _ = [txn.drop_table(table) for table in ["t"] * rank.rank]
            with pytest.raises(BadInput, match="want to save steps"):
                writer.begin(rank.rank)

    def nobody(rank: ThreadRank) -> None:
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards={"u": [Rectangle((0, 0), (0, 1))]})
            writer.restore()
            with pytest.raises(BadInput, match="must be dropped"), writer.begin(1):
                pass

    on_ranks(2, twice)
    on_ranks(2, nobody)


def test_a_commit_of_four_ranks_costs_their_objects_and_three_receipts() -> None:
    files, models, placements = new_files(), one_table(), row_wise(4)
    started(files, placements, models)
    rows = np.arange(3, ROWS // 2, 7)  # of two ranks
    values = training_values("lattice_wide", np.random.default_rng(9), len(rows), DIM)
    models["t"].write(rows, values, {})
    change = Change("delta", "head", {"t": rows}, {"t": rows[:0]})
    views = [FaultyFileSystem(files) for _ in placements]

    def work(rank: ThreadRank) -> Iterator[Any]:
        mine, view = placements[rank.rank], views[rank.rank]
        with open_store(view) as store:
            writer = store.writer(ranks=rank, shards=mine)
            writer.restore()
            at = len(view.calls)
            save(writer, mine, models, change, 1)
            return [(call.operation, call.path.rsplit("/", 1)[1]) for call in view.calls[at:]]  # type: ignore[return-value]

    calls: list[list[tuple[str, str]]] = on_ranks(4, work)

    with open_store(files) as store:
        version = store.latest_version()
        check_state(store.snapshot(), models)
        segment = store.snapshot().manifests[-1]
    record = f"{version:020d}.json"
    puts = [[name for operation, name in of_rank if operation in ("write", "create")] for of_rank in calls]
    reads = [[name for operation, name in of_rank if operation == "read"] for of_rank in calls]
    per_writer = 2 * 2  # metadata and a chunk of the rows and of the codes
    assert [len(of_rank) for of_rank in puts] == [per_writer + 1 + 1 + 1 + 1, per_writer + 1, 1, 1]
    assert len(segment.objects) == 2 * per_writer + 1
    assert [sum(name.endswith(RECEIPT) for name in of_rank) for of_rank in puts] == [0, 1, 1, 1]
    assert {record, "_segment.json.zst", "latest.json"} <= set(puts[0])
    assert [name.endswith(RECEIPT) for name in reads[0]] == [True] * 3
    assert [sorted(of_rank) for of_rank in reads[1:]] == [sorted([record, "_segment.json.zst"])] * 3
