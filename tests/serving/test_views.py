"""Publishing, merging, staging: what readers see, and when a reader reads again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest

from cnr_store.errors import BadRowIds, StorageFailure, TableNotFound, VersionNotFound
from cnr_store.runtime import key_index
from cnr_store.segment.codes import ESCAPED, ExactRows
from cnr_store.serving.rows import board as boards
from cnr_store.serving.rows.board import LONGEST_DEFERRAL_S, Board
from cnr_store.serving.rows.lookups import Lookups, lookup_in
from cnr_store.serving.rows.served_table import BaseTable, row_kind
from cnr_store.serving.rows.shards import HashShard, is_in_shard
from cnr_store.serving.rows.views import Publisher, View
from tests.support.served_rows import DIM, FILL, SCALE, expected_rows, held_table, overlay_of, schema_of

ROWS = np.arange(40)
FIRST = {row: row for row in range(0, 40, 2)}


def publisher_of(model: dict[int, int] | None = None, **options: Any) -> Publisher:
    """A publisher at version 1 that may merge at any time."""
    publisher = Publisher(**{"min_view_s": 0.0, **options})
    held = held_table(FIRST if model is None else model, schema_of())
    publisher.publish(1, 10, {"t": held}, dense={"w": np.array([1.0])})
    return publisher


def change(publisher: Publisher, version: int, changes: dict[int, int | None], **more: Any) -> View:
    held = publisher.newest_view()[0].tables["t"].base
    return publisher.publish(version, 10 * version, {"t": overlay_of(changes, held)}, **more)


def rows_of(publisher: Publisher, ids: Any = ROWS) -> Any:
    return Lookups(publisher).lookup({"t": ids}).rows["t"]


def expected(model: dict[int, int]) -> Any:
    return expected_rows(row_kind(schema_of()), ROWS, model)


class MergingLookups(Lookups):
    """Does something between the copy of the rows and the look at the board."""

    def __init__(self, source: Any, between: Callable[[], object]) -> None:
        super().__init__(source)
        self.between = between
        self.times = 0

    def _gathered(self, view: View) -> None:
        self.times += 1
        self.between()


class Time:
    """A clock that advances in `sleep`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_nothing_is_served_before_the_first_version() -> None:
    with pytest.raises(VersionNotFound, match="nothing is served yet"):
        Lookups(Publisher()).lookup({"t": [1]})


def test_a_published_version_is_seen_at_once_and_whole() -> None:
    publisher = publisher_of()

    change(publisher, 2, {0: None, 1: 7}, dense={"w": np.array([2.0])})

    batch = Lookups(publisher).lookup({"t": ROWS}, dense=["w"])
    model = {**FIRST, 1: 7}
    del model[0]
    np.testing.assert_array_equal(batch.rows["t"], expected(model))
    assert (batch.version, batch.step, batch.dense["w"].tolist(), batch.missing["t"]) == (2, 20, [2.0], None)


def test_merging_changes_no_row_and_moves_the_epoch_on() -> None:
    publisher = publisher_of()
    view = change(publisher, 2, {0: None, 1: 7, 39: 8})
    before = rows_of(publisher)

    assert publisher.merge()

    after = publisher.newest_view()[0]
    np.testing.assert_array_equal(rows_of(publisher), before)
    assert (after.version, after.epoch, after.has_overlays) == (2, view.epoch + 1, False)
    assert publisher.merge()
    assert publisher.newest_view()[0] is after


def test_the_next_version_merges_the_one_before() -> None:
    publisher = publisher_of()
    change(publisher, 2, {1: 7})

    change(publisher, 3, {3: 9})

    overlay = publisher.newest_view()[0].tables["t"].overlay
    assert overlay is not None
    assert overlay.ids.tolist() == [3]
    np.testing.assert_array_equal(rows_of(publisher), expected({**FIRST, 1: 7, 3: 9}))


def test_a_version_may_be_older_than_the_one_before() -> None:
    publisher = publisher_of()
    epochs = [change(publisher, version, {1: version}).epoch for version in (5, 2)]

    assert publisher.newest_view()[0].version == 2
    assert epochs[0] < epochs[1]


def test_tables_come_and_go_and_are_held_anew() -> None:
    publisher = publisher_of()
    other = held_table({1: 1}, schema_of(8), name="u")

    publisher.publish(2, 20, {"u": other})
    publisher.publish(3, 30, {"t": None, "u": held_table({2: 2}, schema_of(12), name="u")})

    batch = Lookups(publisher).lookup({"u": np.arange(12)})
    assert batch.rows["u"][2, 0] == 2 * SCALE
    with pytest.raises(TableNotFound, match=r"version 3 serves no table 't'; it serves \['u'\]"):
        Lookups(publisher).lookup({"t": [1]})


def test_a_version_without_changed_rows_moves_schema_and_version() -> None:
    publisher = publisher_of()
    change(publisher, 2, {1: 7})
    held = publisher.newest_view()[0].tables["t"].base
    empty = overlay_of({}, held)

    view = publisher.publish(3, 30, {"t": empty})

    assert view.version == 3
    assert view.tables["t"].overlay is None
    np.testing.assert_array_equal(rows_of(publisher), expected({**FIRST, 1: 7}))


def test_an_overlay_of_another_kind_of_row_is_refused() -> None:
    publisher = publisher_of()
    codes = held_table({}, schema_of(), kept_as="codes")

    with pytest.raises(ValueError, match="an overlay of table 't' is int16"):
        publisher.publish(2, 20, {"t": overlay_of({1: 1}, codes)})
    with pytest.raises(ValueError, match="'nothing' is not served"):
        publisher.publish(2, 20, {"nothing": overlay_of({1: 1}, codes)})
    assert publisher.newest_view()[0].version == 1


def test_dense_tensors_stay_until_others_come_and_are_not_written() -> None:
    publisher = publisher_of()
    scalar = np.array(3.0)
    change(publisher, 2, {1: 7})
    assert Lookups(publisher).lookup({}, dense=["w"]).dense["w"].tolist() == [1.0]

    change(publisher, 3, {1: 8}, dense={"s": scalar})

    assert Lookups(publisher).lookup({}, dense=["s"]).dense["s"].shape == ()
    with pytest.raises(TableNotFound, match="no dense tensor 'w'"):
        Lookups(publisher).lookup({}, dense=["w"])
    with pytest.raises(ValueError, match="read-only"):
        Lookups(publisher).lookup({}, dense=["s"]).dense["s"][...] = 5
    scalar[...] = 4  # the caller's own array stays writable


def test_missing_keys_are_told_and_read_as_the_fill() -> None:
    publisher = Publisher(min_view_s=0.0)
    publisher.publish(1, 1, {"h": held_table({7: 2, -3: 4}, schema_of(keys="hashed"), name="h")})

    batch = Lookups(publisher).lookup({"h": [7, 8, -3]})

    missing = batch.missing["h"]
    assert missing is not None
    assert missing.tolist() == [False, True, False]
    assert batch.rows["h"][:, 0].tolist() == [2 * SCALE, FILL, 4 * SCALE]
    assert Lookups(publisher).lookup({"h": [7, -3]}).missing["h"] is None


def test_rows_are_written_where_the_caller_wants_them() -> None:
    publisher = publisher_of()
    out = np.empty((3, DIM), np.float32)

    batch = Lookups(publisher).lookup({"t": [2, 4, 6]}, out={"t": out})

    assert batch.rows["t"] is out
    assert out[:, 0].tolist() == [1.0, 2.0, 3.0]


# ---- readers whose view is merged away --------------------------------------------------------------------------


def test_a_reader_whose_view_was_merged_over_reads_again() -> None:
    publisher = publisher_of()

    def merge_a_newer_version_once() -> None:
        if lookups.times == 1:
            change(publisher, 2, dict.fromkeys(range(40), 70))
            publisher.merge()

    lookups = MergingLookups(publisher, merge_a_newer_version_once)
    batch = lookups.lookup({"t": ROWS})

    assert (batch.version, lookups.retries, lookups.times) == (2, 1, 2)
    assert (batch.rows["t"] == 70 * SCALE).all()


def test_a_reader_of_the_view_that_is_merged_is_not_disturbed() -> None:
    publisher = publisher_of()
    change(publisher, 2, dict.fromkeys(range(40), 70))
    lookups = MergingLookups(publisher, publisher.merge)

    batch = lookups.lookup({"t": ROWS})

    assert (batch.version, lookups.retries) == (2, 0)


def test_a_newer_version_that_is_not_merged_disturbs_nobody() -> None:
    publisher = publisher_of()
    lookups = MergingLookups(publisher, lambda: change(publisher, 2, {1: 7}))

    batch = lookups.lookup({"t": ROWS})

    assert (batch.version, lookups.retries) == (1, 0)
    np.testing.assert_array_equal(batch.rows["t"], expected(FIRST))


def test_an_error_counts_only_if_the_view_was_whole() -> None:
    # Rows that are being merged may look like NaN, which int8 refuses.
    publisher = Publisher(min_view_s=0.0)
    held = held_table({row: row for row in range(40)}, schema_of(), served="int8").with_status()
    publisher.publish(1, 1, {"t": held})
    stale = publisher.newest_view()
    assert held.status is not None
    held.status[3] = ESCAPED
    bad = ExactRows(np.array([3], np.int64), {"codes": np.full((1, DIM), np.nan, np.float32)})
    publisher.publish(2, 2, {"t": overlay_of({5: 5}, held)}, exact_rows={"t": bad})
    torn = publisher.newest_view()
    publisher.merge()
    publisher.publish(3, 3, {"t": overlay_of({6: 6}, held)}, exact_rows={"t": ExactRows()})
    publisher.merge()

    class Source:
        def __init__(self) -> None:
            self.views = [torn, stale]

        def newest_view(self) -> tuple[View, Board]:
            return self.views.pop(0) if self.views else publisher.newest_view()

    lookups = Lookups(Source())

    assert lookups.lookup({"t": [3]}).version == 3
    assert lookups.retries == 2
    with pytest.raises(BadRowIds):
        lookups.lookup({"t": [99]})


def test_a_long_lookup_ends_since_merging_waits_for_it() -> None:
    # A reader so slow that each of its reads is merged over, until it asks for a pause.
    time = Time()
    publisher = publisher_of(clock=time.clock, sleep=time.sleep)

    def try_to_merge_a_newer_version() -> None:
        if publisher.merge(wait=False):
            change(publisher, lookups.times + 1, dict.fromkeys(range(40), 70 + lookups.times))
            publisher.merge(wait=False)

    lookups = MergingLookups(publisher, try_to_merge_a_newer_version)
    batch = lookups.lookup({"t": ROWS})

    assert lookups.retries >= 3  # more only if this machine sleeps through the pause
    assert (batch.rows["t"] == (70 + batch.version - 1) * SCALE).all()


def test_merging_waits_for_readers_but_not_for_ever() -> None:
    time = Time()
    publisher = publisher_of(clock=time.clock, sleep=time.sleep)
    change(publisher, 2, {1: 7})

    def ask_again(seconds: float) -> None:
        time.sleep(seconds)
        publisher.board.defer_merges(3600)

    publisher._sleep = ask_again
    publisher.board.defer_merges(3600)

    assert not publisher.merge(wait=False)
    assert publisher.merge()

    assert 0 < sum(time.slept) < LONGEST_DEFERRAL_S + 0.01


def test_a_view_is_not_merged_before_its_time() -> None:
    time = Time()
    publisher = publisher_of(clock=time.clock, sleep=time.sleep, min_view_s=0.01, merge_after_s=0.05)
    change(publisher, 2, {1: 7})
    time.now += 0.004

    assert publisher.merge_due_in_s() == pytest.approx(0.046)
    assert not publisher.merge(wait=False)
    assert publisher.merge()

    assert sum(time.slept) == pytest.approx(0.006)
    assert publisher.merge_due_in_s() is None


def test_the_board_says_what_was_put_on_it() -> None:
    board = Board()
    board.announce(3)
    board.begin_merge(2)
    assert (board.epoch, board.is_whole(2), board.is_whole(1), board.has_ended) == (3, True, False, False)


@pytest.mark.parametrize(
    ("kernel", "arguments", "kind", "count"),
    [
        (boards._store, (np.zeros(64, np.int64), 1, 2), "seq_cst", 2),
        (boards._load, (np.zeros(64, np.int64), 1), "seq_cst", 2),
        (key_index.insert_keys, (np.zeros((8, 2), np.int64), np.arange(2), np.arange(2)), "release", 1),
        (key_index.find_keys, (np.zeros((8, 2), np.int64), np.arange(2), np.arange(2)), "acquire", 2),
    ],
)
def test_kernels_that_meet_other_threads_are_compiled_with_fences(
    kernel: Any, arguments: tuple[Any, ...], kind: str, count: int
) -> None:
    compiled = numba.njit(nogil=True)(kernel.py_func)  # code from the cache cannot be looked at
    compiled(*arguments)

    assert compiled.inspect_llvm(compiled.signatures[0]).count(f"fence {kind}") >= count


# ---- staging ----------------------------------------------------------------------------------------------------


def test_staged_versions_are_seen_when_they_are_revealed_all_at_once() -> None:
    publisher = publisher_of()
    held = publisher.newest_view()[0].tables["t"].base
    publisher.stage(2, 20, {"t": overlay_of({1: 7, 2: 5}, held)}, dense={"w": np.array([2.0])})
    publisher.stage(3, 30, {"t": overlay_of({2: None, 5: 6}, held)})

    np.testing.assert_array_equal(rows_of(publisher), expected(FIRST))
    candidate = publisher.candidate
    assert candidate is not None
    model = {**FIRST, 1: 7, 5: 6}
    del model[2]
    np.testing.assert_array_equal(lookup_in(candidate, {"t": ROWS}).rows["t"], expected(model))

    publisher.reveal()

    batch = Lookups(publisher).lookup({"t": ROWS}, dense=["w"])
    np.testing.assert_array_equal(batch.rows["t"], expected(model))
    assert (batch.version, batch.dense["w"].tolist(), publisher.candidate) == (3, [2.0], None)
    publisher.merge()
    np.testing.assert_array_equal(rows_of(publisher), expected(model))


def test_a_refused_version_leaves_what_was_staged_before_it() -> None:
    publisher = publisher_of()
    held = publisher.newest_view()[0].tables["t"].base
    publisher.stage(2, 20, {"t": overlay_of({1: 7}, held)})
    publisher.stage(3, 30, {"t": overlay_of({1: 99, 3: 9}, held)})

    publisher.unstage()

    assert publisher.reveal().version == 2
    np.testing.assert_array_equal(rows_of(publisher), expected({**FIRST, 1: 7}))
    with pytest.raises(ValueError, match="staged last"):
        publisher.unstage()


def test_all_that_is_staged_can_be_discarded() -> None:
    publisher = publisher_of()
    held = publisher.newest_view()[0].tables["t"].base
    for version in (2, 3, 4):
        publisher.stage(version, version, {"t": overlay_of({version: 99}, held)})

    publisher.discard()

    assert publisher.candidate is None
    assert publisher.reveal().version == 1
    np.testing.assert_array_equal(rows_of(publisher), expected(FIRST))


def test_nothing_is_merged_while_a_version_is_staged() -> None:
    publisher = publisher_of()
    change(publisher, 2, {1: 7})
    held = publisher.newest_view()[0].tables["t"].base
    publisher.stage(3, 30, {"t": overlay_of({1: 8}, held)})
    epoch = publisher.newest_view()[0].epoch

    assert publisher.merge()
    assert publisher.merge_due_in_s() is None

    assert publisher.newest_view()[0].epoch == epoch
    np.testing.assert_array_equal(rows_of(publisher), expected({**FIRST, 1: 7}))


def test_a_table_that_is_staged_anew_takes_later_changes() -> None:
    publisher = publisher_of()
    anew = held_table({1: 1}, schema_of(50))
    publisher.stage(2, 20, {"t": anew})
    publisher.stage(3, 30, {"t": overlay_of({49: 5}, anew)})

    publisher.reveal()

    assert rows_of(publisher, [1, 49, 2])[:, 0].tolist() == [SCALE, 5 * SCALE, FILL]


# ---- tables held by key -----------------------------------------------------------------------------------------


def keyed_publisher(model: dict[int, int], **kind: Any) -> Publisher:
    publisher = Publisher(min_view_s=0.0)
    publisher.publish(1, 1, {"t": held_table(model, schema_of(keys="hashed"), **kind)})
    return publisher


@pytest.mark.parametrize("kind", [{}, {"kept_as": "codes"}, {"served": "int8"}])
def test_keys_come_go_and_come_again(kind: Any) -> None:
    model = {key: key % 50 for key in range(-300, 300, 3)}
    publisher = keyed_publisher(model, **kind)
    random = np.random.default_rng(0)
    asked = np.arange(-400, 400)
    for version in range(2, 30):
        keys = np.unique(random.integers(-400, 400, 60)).tolist()
        changes = {key: None if random.random() < 0.5 else int(random.integers(50)) for key in keys}
        change(publisher, version, changes)
        model = {key: number for key, number in (model | changes).items() if number is not None}
        if version % 3:
            publisher.merge()

        view = publisher.newest_view()[0]
        batch = Lookups(publisher).lookup({"t": asked})

        np.testing.assert_array_equal(batch.rows["t"], expected_rows(view.tables["t"].kind, asked, model))
        missing = batch.missing["t"]
        assert missing is not None
        assert missing.tolist() == [key not in model for key in asked.tolist()]
        assert view.tables["t"].row_ids().tolist() == sorted(model)


def test_rows_of_keys_that_left_are_used_again() -> None:
    publisher = keyed_publisher(dict.fromkeys(range(200), 1))
    for version in range(2, 60):
        change(publisher, version, {version * 100 + key: 1 for key in range(50)})
        publisher.merge()
        change(publisher, version, {version * 100 + key: None for key in range(50)})
        publisher.merge()

    held = publisher.newest_view()[0].tables["t"].base

    # 200 keys, and 50 that come and go, whatever number of versions there was.
    assert held.num_rows == 250
    assert len(held.rows) <= 600


def test_a_table_grows_beyond_its_room() -> None:
    publisher = keyed_publisher({0: 1})
    model = {0: 1}
    for version in range(2, 8):
        new = {version * 1000 + key: version for key in range(100 * version)}
        change(publisher, version, dict(new))
        publisher.merge()
        model |= new

    asked = np.array(sorted(model))
    batch = Lookups(publisher).lookup({"t": asked})
    assert batch.missing["t"] is None
    np.testing.assert_array_equal(
        batch.rows["t"], expected_rows(publisher.newest_view()[0].tables["t"].kind, asked, model)
    )


def test_a_hash_shard_of_a_dense_table_takes_rows_that_were_absent() -> None:
    shard = HashShard(0, 2)
    ids = ROWS[is_in_shard(shard, ROWS)]
    publisher = Publisher(min_view_s=0.0)
    held = held_table({int(ids[0]): 3}, schema_of(), shard=shard, served="bfloat16")
    publisher.publish(1, 1, {"t": held})

    change(publisher, 2, {int(ids[1]): 4, int(ids[0]): None})
    publisher.merge()

    batch = Lookups(publisher).lookup({"t": ids})
    np.testing.assert_array_equal(batch.rows["t"], expected_rows(held.kind, ids, {int(ids[1]): 4}))


# ---- memory -----------------------------------------------------------------------------------------------------


def test_what_was_merged_is_freed() -> None:
    publisher = publisher_of()
    view = change(publisher, 2, {1: 7})
    overlay = view.tables["t"].overlay
    assert overlay is not None
    gone = weakref.ref(overlay.rows), weakref.ref(overlay.index.slots)
    del view, overlay

    publisher.merge()
    gc.collect()

    assert [reference() for reference in gone] == [None, None]


def test_merging_keeps_the_held_rows_in_place() -> None:
    publisher = publisher_of()
    rows = publisher.newest_view()[0].tables["t"].base.rows

    change(publisher, 2, {1: 7})
    publisher.merge()

    assert publisher.newest_view()[0].tables["t"].base.rows is rows


def test_a_merge_that_gets_no_memory_leaves_the_view_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = publisher_of()
    change(publisher, 2, {1: 7})
    before = publisher.newest_view()

    def full(*_: Any) -> BaseTable:
        raise StorageFailure("there is no memory left")

    monkeypatch.setattr("cnr_store.serving.rows.merging.merge_target", full)
    with pytest.raises(StorageFailure):
        publisher.merge()

    assert publisher.newest_view()[0] is before[0]
    assert before[1].is_whole(before[0].epoch - 1)
    np.testing.assert_array_equal(rows_of(publisher), expected({**FIRST, 1: 7}))


def test_a_closed_publisher_serves_nothing() -> None:
    publisher = publisher_of()

    publisher.close()

    assert publisher.board.has_ended
    with pytest.raises(VersionNotFound):
        Lookups(publisher).lookup({"t": [1]})
