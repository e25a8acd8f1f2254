"""Collections during saves, tags, leases, cursors, compactions and other collections; and killed collections."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from cnr_store import CorruptStore, StorageFailure, Store, collect_garbage, repair_store, verify_store
from cnr_store.errors import VersionExpired
from cnr_store.format.commit_record import is_live
from cnr_store.format.documents import canonical_json
from cnr_store.format.layout import DATA, MANIFEST, READER_LEASES, commit_key, cursor_key, segment_key
from cnr_store.log.leases import CLOCK_TOLERANCE_MS, HOLD_KEPT_MS
from cnr_store.maintenance.compaction import compact_run
from cnr_store.maintenance.gc.plan import CLEAN_UP_AT, txn_of
from tests.maintenance.gc.stores import (
    LAST,
    ROWS,
    again,
    collect,
    contents,
    fill,
    listed,
    live,
    on,
    once,
    orphan,
    racing,
    referenced,
    save,
    states,
    table,
    train,
)
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.sweep import survived


def test_a_tag_that_comes_first_keeps_its_version(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    report = collect(racing(fs, lambda: store.tag("best", 3)))

    assert report.outcome == "collected"
    assert 3 in live(store)
    assert listed(store) == referenced(store)


def test_a_tag_that_comes_second_is_refused(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    late = racing(fs, lambda: collect(store))

    with pytest.raises(VersionExpired):
        late.tag("best", 3)

    assert store.tags() == {}


@pytest.mark.parametrize("move", ["rollback", "set_channel", "fork"])
def test_a_version_that_has_gone_never_comes_back(store: Store, fs: IsolatedMemoryFileSystem, move: str) -> None:
    late = racing(fs, lambda: collect(store))
    moves: dict[str, Callable[[Store], object]] = {
        "rollback": lambda one: one.rollback(3),
        "set_channel": lambda one: one.set_channel("serving", 3),
        "fork": lambda one: one.fork("trial", 3),
    }

    with pytest.raises(VersionExpired):
        moves[move](late)
    with pytest.raises(VersionExpired):
        moves[move](store)

    assert listed(store) == referenced(store)


def test_an_append_between_plan_and_record_is_planned_with(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    def append() -> None:
        with again(fs).writer() as writer:
            writer.restore()
            save(writer, 8, full=True)

    collect(racing(fs, append))

    assert table(store) == [8.0] * ROWS
    assert live(store) == [9, 10]
    assert listed(store) == referenced(store)


def test_a_save_that_lands_while_a_collection_looks_lacks_no_segment(
    store: Store, fs: IsolatedMemoryFileSystem
) -> None:
    """Heads are read before the listing. In the other order the segment of a new head would seem to be missing."""
    listings: list[str] = []

    def is_look_behind_listing(call: Call) -> bool:
        if call.operation == "list" and call.path.rstrip("/").endswith("/data"):
            listings.append(call.path)
        return bool(listings) and call.operation == "read" and call.path.endswith("hint/latest.json")

    looking = again(FaultyFileSystem(fs, on_call=once(is_look_behind_listing, lambda: train(store, 8, full=True))))
    report = collect_garbage(looking, policy=LAST, dry_run=False)

    assert (report.outcome, report.marked) == ("collected", 3)
    assert table(store) == [8.0] * ROWS


def test_a_rollback_between_plan_and_record_brings_its_target_back_to_life(
    store: Store, fs: IsolatedMemoryFileSystem
) -> None:
    collect(racing(fs, lambda: store.rollback(3)))

    assert table(store) == [1.0, 1.0, 2.0, 1.0]
    assert listed(store) == referenced(store)


def test_a_lease_between_plan_and_record_keeps_the_data_not_the_version(
    store: Store, fs: IsolatedMemoryFileSystem
) -> None:
    reading = store.snapshot(3)
    leases = []

    collect(racing(fs, lambda: leases.append(store.lease(3, ttl_s=3600))))

    assert 3 not in live(store)
    assert reading.table("t").read()[2, 0] == 2
    held = collect(store)
    assert states(held)["waiting"] == 2
    leases[0].release()
    assert collect(store).deleted_segments == 2
    assert listed(store) == referenced(store)


def test_a_cursor_between_plan_and_record_keeps_the_data_of_all_behind_it(
    store: Store, fs: IsolatedMemoryFileSystem
) -> None:
    collect(racing(fs, lambda: store.register_cursor("serving", 3)))

    assert listed(store) > referenced(store)
    kept = {key.split("/")[1] for key in listed(store)}
    assert {entry.seg for version in (3, 4) for entry in store.record(version).chain} <= kept
    store.drop_cursor("serving")
    collect(store)
    assert listed(store) == referenced(store)


def test_a_cursor_that_holds_expired_versions_skips_superseded_positions(store: Store) -> None:
    """Regression: a torn position among these versions stopped every collection while the cursor existed."""
    store.storage.put(commit_key(store.latest_version() + 1), b'{"v":')
    repair_store(store, dry_run=False)
    cursor = store.register_cursor("late", 5)
    store.drop_cursor("late")
    fill(store, steps=3)
    collect_garbage(store, policy=LAST, dry_run=False)
    store.storage.put(cursor_key("late"), canonical_json(cursor))

    assert collect(store).outcome in ("clean", "collected")

    assert {entry.seg for version in (5, 6, 7) for entry in store.record(version).chain} <= {
        key.split("/")[1] for key in listed(store)
    }


def test_leases_and_cursors_keep_versions_and_ended_ones_do_not(store: Store) -> None:
    now = int(time.time() * 1000)
    with store.lease(3, ttl_s=60):
        store.register_cursor("serving", 6, ttl_s=60)
        collect(store)
        assert {3, 6, 7} <= set(live(store))

        later = now + 61_000 + CLOCK_TOLERANCE_MS
        collect(store, clock_ms=lambda: later)

        assert live(store)[0] == 7
        assert len(listed(store, READER_LEASES)) == 1
        collect(store, clock_ms=lambda: later + HOLD_KEPT_MS)
        assert (listed(store, READER_LEASES), store.cursors()) == (set(), {})
    assert listed(store) == referenced(store)


def test_what_cannot_be_read_of_the_holds_stops_everything(store: Store) -> None:
    store.storage.put(f"{READER_LEASES}{'a' * 32}.json", b"{")
    before = contents(store)

    with pytest.raises(CorruptStore, match="leases"):
        collect(store)

    assert contents(store) == before


def test_two_collections_at_once_do_no_harm(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    store.tag("best", 3)

    report = collect(racing(fs, lambda: collect(again(fs))))

    assert report.outcome in ("clean", "collected")
    assert listed(store) == referenced(store)
    assert verify_store(store, all_versions=True, deep=True).is_sound


def test_an_open_snapshot_outlives_its_version_during_the_grace(store: Store) -> None:
    reading = store.snapshot(3)

    collect(store, grace_s=3600.0)

    assert reading.table("t").read()[2, 0] == 2
    with pytest.raises(VersionExpired):
        store.snapshot(3)


class Collecting:
    """Two collections in one process. A third one, of another process, must find nothing to do."""

    def prepare(self, fs: Any) -> None:
        store = Store.create_on(on(fs))
        fill(store, steps=5, every=2)
        store.tag("best", 3)
        store.lease(4, ttl_s=3600)
        with store.fork("trial", 4).writer() as writer:
            writer.restore()
            save(writer, 30)
        store.fork("gone", 4, ttl_s=0.001)
        time.sleep(0.002)
        orphan(store)

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        store = again(fs)
        collect(store, batch=1)
        acknowledged.append("collected")
        collect(store, keep_last=2)

    def check(self, fs: Any, acknowledged: list[Any]) -> None:
        store = again(fs)
        assert table(store) == [5.0] * ROWS
        assert verify_store(store, all_versions=True, deep=True).is_sound
        collect(store)
        trial = store.on_branch("trial")
        assert table(trial)[30 % ROWS] == 30
        assert listed(store) == referenced(store, trial)
        assert collect(store).outcome == "clean"
        assert verify_store(store, all_versions=True, deep=True).is_sound


def test_a_snapshot_that_outlives_the_grace_says_its_version_has_expired(store: Store) -> None:
    """Regression: a reader that took longer than the grace period got an error about a damaged store."""
    opened = store.snapshot(3)
    raced = again(FaultyFileSystem(store.storage._fs, on_call=once(is_manifest, lambda: collect(store))))  # type: ignore[attr-defined]  # of memory

    with pytest.raises(VersionExpired):
        raced.snapshot(3)
    with pytest.raises(VersionExpired) as found:
        opened.table("t").read()

    assert found.value.version == 3


def is_manifest(call: Call) -> bool:
    return call.path.endswith(MANIFEST)


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.soak)])
def test_a_collection_may_stop_or_fail_at_any_storage_call(every: int) -> None:
    report = survived(Collecting(), every=every)

    assert report.runs > 100


def test_a_run_out_of_time_stops_between_records_and_the_next_goes_on(
    store: Store, fs: IsolatedMemoryFileSystem
) -> None:
    stopped = collect(store, budget_s=0.0)

    assert (stopped.outcome, stopped.records, stopped.deleted_segments) == ("stopped", 0, 0)
    collect(store, grace_s=3600.0)
    later = int(time.time() * 1000) + 3_601_000
    assert collect(store, budget_s=0.0, clock_ms=lambda: later).outcome == "stopped"
    assert collect(store, clock_ms=lambda: later).outcome == "collected"
    assert listed(store) == referenced(store)


def test_versions_go_in_batches_and_each_record_names_what_they_leave(fs: IsolatedMemoryFileSystem) -> None:
    store = Store.create_on(on(fs))
    fill(store, steps=7, every=2)
    store.tag("best", 4)
    before = store.latest_version()

    report = collect(store, batch=1, grace_s=3600.0)

    assert report.records == store.latest_version() - before == 3
    everything = {segment.name for segment in report.segments}
    for version in range(before + 1, store.latest_version() + 1):
        record = store.record(version)
        named = {name for name in everything if txn_of(name) in record.aborted}
        alive = [other for other in range(version + 1) if is_live(record, other)]
        needed = {entry.seg for other in alive for entry in store.record(other).chain}
        assert named | needed == everything
        assert not named & needed


def test_names_of_deleted_segments_leave_the_list_when_they_are_many(fs: IsolatedMemoryFileSystem) -> None:
    store = Store.create_on(on(fs))
    fill(store, steps=1)
    for number in range(CLEAN_UP_AT):
        orphan(store, f"{number:032x}")

    report = collect(store)

    assert report.deleted_segments == CLEAN_UP_AT
    assert store.head().record.aborted == {}
    assert collect(store).outcome == "clean"


def test_few_names_wait_for_the_next_record(store: Store) -> None:
    collect(store)
    assert len(store.head().record.aborted) == 3
    with store.writer() as writer:
        writer.restore()
        save(writer, 8, full=True)

    collect(store)

    assert len(store.head().record.aborted) == 3
    assert not {txn_of(key.split("/")[1]) for key in listed(store)} & set(store.head().record.aborted)


def test_objects_written_after_their_deletion_go_with_a_later_run(store: Store) -> None:
    name = orphan(store)
    collect(store)
    store.storage.put(segment_key(name, "r00000-12345678/_late"), b"x")

    collect(store)
    collect(store)

    assert listed(store) == referenced(store)


def test_a_segment_that_cannot_be_deleted_is_reported_and_tried_again(
    store: Store, fs: IsolatedMemoryFileSystem
) -> None:
    faulty = FaultyFileSystem(fs)
    broken = again(faulty)
    delete = broken.storage.delete
    failing = {"left": 1}

    def fail_once(keys: Any) -> None:
        chosen = list(keys)
        if failing["left"] and any(key.startswith(DATA) for key in chosen):
            failing["left"] = 0
            raise StorageFailure("deleting failed")
        delete(chosen)

    broken.storage.delete = fail_once  # type: ignore[method-assign]
    report = collect(broken)

    assert (report.outcome, len(report.failures), states(report)["failed"]) == ("incomplete", 1, 1)
    assert collect(store).deleted_segments == 1
    assert listed(store) == referenced(store)


def test_a_step_is_found_in_the_version_that_compaction_made(store: Store) -> None:
    """Regression: only the record of the save was looked up, which expires after a compaction made a newer version."""
    assert compact_run(store, run=(0, 3)).outcome == "committed"
    compacted = store.latest_version()

    collect(store)

    assert store.snapshot(step=6).version == compacted
    assert table(store, step=6) == [4.0, 5.0, 6.0, 4.0]


def test_a_step_whose_newest_version_is_gone_is_found_where_a_tag_keeps_it(store: Store) -> None:
    store.tag("best", 7)
    compact_run(store, run=(0, 3))
    with store.writer() as writer:
        writer.restore()
        save(writer, 9, full=True)
    collect(store)

    assert store.snapshot(step=6).version == 7
    with pytest.raises(VersionExpired):
        store.snapshot(step=5)


def test_a_step_of_an_abandoned_run_is_not_found_in_its_place(store: Store) -> None:
    store.tag("abandoned", 7)
    store.rollback(5)
    train(store, 6)
    train(store, 7, full=True)

    collect(store)

    with pytest.raises(VersionExpired):
        store.snapshot(step=6)


def test_a_compaction_under_way_whose_inputs_go_is_abandoned(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    def overtake() -> None:
        other = again(fs)
        train(other, 8, full=True)
        collect(other)

    report = compact_run(racing(fs, overtake), run=(0, 3))

    assert report.outcome == "abandoned"
    assert table(store) == [8.0] * ROWS
    collect(store)
    assert listed(store) == referenced(store)


def test_a_compaction_under_way_that_was_given_up_is_told(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    late = racing(fs, lambda: collect(again(fs), keep_last=9))

    assert compact_run(late, run=(0, 3)).outcome == "abandoned"

    assert table(store) == [4.0, 5.0, 6.0, 4.0]
    assert compact_run(store, run=(0, 3)).outcome == "committed"
    collect(store)
    assert listed(store) == referenced(store)
