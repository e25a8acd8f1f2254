"""Stores that several ranks write, with changing placements, compacted before, between and during saves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import Store, verify_store
from cnr_store.maintenance.compaction import compact_run, tasks
from cnr_store.types import Rectangle
from format_spec.reader.compare import compare
from tests.support.ranks import ThreadRank, on_ranks
from tests.support.snapshot_bytes import bytes_of
from tests.write.many_ranks import (
    TABLES,
    Change,
    Life,
    check_state,
    declare,
    digest_sums,
    draw_placement,
    give,
    new_files,
    open_store,
    restore_exactly,
)

SAVES = st.sampled_from([*[("delta", "head")] * 3, ("delta", "baseline"), ("baseline", "head")])
COMPACTS = st.sampled_from(["never", "before", "during", "before and during"])


def compact_some_run(store: Store, chance: Any) -> None:
    """Compact a random run of the head's chain; the values that are read stay the same."""
    head = store.head()
    length = len(head.record.chain)
    if length < 2:
        return
    start = int(chance.integers(0, length - 1))
    stop = int(chance.integers(start + 2, length + 1))
    before = store.snapshot(version=head.record.v)
    expected, digests = bytes_of(before), digest_sums(before)

    report = compact_run(store, run=(start, stop), workers=1)

    assert report.outcome == "committed"
    after = store.snapshot(version=report.version)
    assert bytes_of(after) == expected
    assert digest_sums(after) == digests


@settings(max_examples=10)
@given(st.data(), st.integers(0, 10**6))
def test_ranks_go_on_from_whatever_was_compacted(data: st.DataObject, seed: int) -> None:
    check_a_life(data, seed, new_files())


@settings(max_examples=4)
@given(st.data(), st.integers(0, 10**6))
def test_the_independent_reader_reads_what_was_compacted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int
) -> None:
    root = tmp_path_factory.mktemp("life") / "store"
    Store.create(str(root), fsync=False, threads=1).close()

    check_a_life(data, seed, root)

    assert compare(root) > 0


def check_a_life(data: st.DataObject, seed: int, files: Any) -> None:
    life = Life(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "PIECE_BYTES", data.draw(st.sampled_from([1, tasks.PIECE_BYTES])))
        is_first = True
        for world in data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3)):
            placements = draw_placement(data.draw, world)
            initial = life.copy()
            plan = []
            for kind, base in data.draw(st.lists(SAVES, min_size=1, max_size=4)):
                change = life.train(kind, base)
                plan.append((change, life.copy(), data.draw(COMPACTS)))
            run_ranks(files, placements, initial, plan, seed, is_first=is_first)
            is_first = False
            with open_store(files) as store:
                check_state(store.snapshot(), life.models)
                report = verify_store(store, deep=True)
                assert report.is_sound, report


def run_ranks(
    files: Any,
    placements: list[dict[str, list[Rectangle]]],
    initial: Any,
    plan: list[tuple[Change, Any, str]],
    seed: int,
    *,
    is_first: bool,
) -> None:
    """One training job: every rank restores, saves as planned and has the trained values; rank 0's machine compacts."""

    def work(rank: ThreadRank) -> None:
        mine = placements[rank.rank]
        shards: dict[str, list[Rectangle | None]] = {table: list(tiles) for table, tiles in mine.items()}
        chance = np.random.default_rng(seed)
        with open_store(files) as store, store.writer(ranks=rank, shards=mine) as writer:
            if is_first:
                with writer.begin(0) as txn:
                    declare(txn, shards, initial)
            else:
                restore_exactly(writer, mine, initial)
            for number, (change, after, compact) in enumerate(plan):
                if rank.rank == 0 and "before" in compact:
                    compact_some_run(store, chance)
                with writer.begin(number + 1, change.kind, base=change.base) as txn:  # type: ignore[arg-type]
                    give(txn, shards, after, change)
                    if rank.rank == 0 and "during" in compact and change.base == "head":
                        compact_some_run(store, chance)
            restore_exactly(writer, mine, plan[-1][1])

    on_ranks(len(placements), work)
    assert set(TABLES) == set(plan[-1][1])
