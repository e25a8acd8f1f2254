"""What a collection deletes and keeps, what it does with orphans, and how many requests it makes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from cnr_store import BadInput, Store, collect_garbage, repair_store, verify_store
from cnr_store.errors import TransactionAborted
from cnr_store.format.layout import DATA, commit_key, segment_key
from cnr_store.log.author import writer_info
from cnr_store.log.leases import HOLD_KEPT_MS
from cnr_store.log.rebase import draft_after, rebase_expire
from cnr_store.storage import open_storage
from tests.maintenance.gc.stores import (
    DAY_MS,
    LAST,
    ROWS,
    again,
    age,
    armed,
    collect,
    contents,
    fill,
    is_commit,
    listed,
    live,
    on,
    once,
    orphan,
    referenced,
    save,
    states,
    table,
)
from tests.support.faulty import FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.snapshot_bytes import bytes_of


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_after_a_collection_exactly_what_live_versions_need_is_there(where: str, tmp_path: Path) -> None:
    storage = on(IsolatedMemoryFileSystem()) if where == "memory" else open_storage(str(tmp_path / "s"), fsync=False)
    store = Store.create_on(storage)
    fill(store, steps=9)
    store.tag("best", 3)
    before = table(store), table(store, tag="best")

    report = collect(store)

    assert report.outcome == "collected"
    assert listed(store) == referenced(store)
    assert (table(store), table(store, tag="best")) == before
    assert live(store) == [3, *range(10, store.latest_version() + 1)]
    assert report.deleted_segments == 4
    assert verify_store(store, all_versions=True, deep=True).is_sound


def test_the_report_explains_every_version_and_segment(store: Store) -> None:
    store.tag("best", 3)

    report = collect(store)

    stays = {version.version: version.reason for version in report.versions if version.stays}
    assert stays[3] == "tag 'best'"
    assert stays[7] == "the head's state"
    assert report.expired == 6
    assert states(report) == {"stays": 5, "deleted": 1}
    (gone,) = (segment for segment in report.segments if segment.state == "deleted")
    assert gone.size_bytes == report.deleted_bytes > 0


def test_a_second_run_changes_nothing(store: Store) -> None:
    collect(store)
    before = contents(store)

    report = collect(store)

    assert report.outcome == "clean"
    assert contents(store) == before


def test_a_dry_run_is_the_default_changes_nothing_and_says_the_same(store: Store) -> None:
    before = contents(store)

    said = collect_garbage(store, policy=LAST, dry_run=True)

    assert contents(store) == before
    assert (said.is_dry_run, said.outcome, said.marked) == (True, "planned", 3)
    done = collect(store, keep_last=1)
    assert [(one.version, one.stays, one.reason) for one in said.versions][:7] == [
        (one.version, one.stays, one.reason) for one in done.versions
    ][:7]
    assert said.pending_delete_bytes > 0


def test_a_dry_run_of_a_clean_store_says_so(store: Store) -> None:
    collect(store)

    assert collect_garbage(store, policy=LAST, dry_run=True).outcome == "clean"


def test_segments_are_named_first_and_deleted_when_their_time_is_over(store: Store) -> None:
    now = [int(time.time() * 1000)]
    objects = listed(store)

    first = collect(store, grace_s=3600.0, clock_ms=lambda: now[0])
    assert (first.marked, first.deleted_segments, listed(store)) == (3, 0, objects)
    now[0] += 3_599_000
    waiting = collect(store, grace_s=3600.0, clock_ms=lambda: now[0])
    assert (waiting.outcome, states(waiting)["waiting"], listed(store)) == ("clean", 3, objects)
    now[0] += 1000
    assert states(collect(store, grace_s=3600.0, clock_ms=lambda: now[0], dry_run=True))["due"] == 3
    last = collect(store, grace_s=3600.0, clock_ms=lambda: now[0])

    assert (last.deleted_segments, listed(store)) == (3, referenced(store))


def test_a_store_without_a_checkpoint_is_left_as_it_is(fs: IsolatedMemoryFileSystem) -> None:
    store = Store.create_on(on(fs))
    before = contents(store)

    report = collect(store)

    assert (report.outcome, [version.version for version in report.versions]) == ("clean", [0])
    assert contents(store) == before


def test_names_that_nobody_knows_are_never_touched(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    strange = ["README.txt", "other/data/x", "data/notes.txt", "data/not-a-segment/x", "data/.keep/x", "leases/x"]
    for key in strange:
        store.storage.put(key, b"mine")
    age(fs, days=365)

    collect(store)

    assert [store.storage.read(key) for key in strange] == [b"mine"] * len(strange)


def test_nothing_is_deleted_outside_segments_and_holds(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    store.lease(7, ttl_s=1)
    faulty = FaultyFileSystem(fs)

    collect(again(faulty), clock_ms=lambda: int(time.time() * 1000) + 2 * HOLD_KEPT_MS)

    deletes = {path.removeprefix("store/").split("/")[0] for path in faulty.paths("delete")}
    assert deletes == {"data", "leases"}


@pytest.mark.parametrize("arguments", [{"grace_s": 60.0}, {"orphan_age_s": 3600.0}])
def test_short_times_need_force(store: Store, arguments: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="force"):
        collect_garbage(store, **arguments)  # type: ignore[arg-type]

    assert collect_garbage(store, force=True, dry_run=True, **arguments).is_dry_run  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{"grace_s": -1.0}, {"grace_s": "1d"}, {"orphan_age_s": float("nan")}])
def test_arguments_that_cannot_be_meant_are_refused(store: Store, arguments: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        collect(store, **arguments)


@pytest.mark.parametrize("name", ["tag", "channel", "branch"])
def test_what_a_name_keeps_stays_though_no_list_has_it(store: Store, name: str) -> None:
    """CNR-LOG-22: below the floor a name keeps a version live.

    Other writers need not list it in ``kept``, as ours do.
    """
    act = {"tag": store.tag, "channel": store.set_channel, "branch": store.fork}[name]
    act("kept", 3)
    head = store.head()
    draft = draft_after(head.record, "expire", writer_info(), floor=head.record.v, kept=())
    store.internals.log.append(head, draft, rebase_expire)
    expected = bytes_of(store.snapshot(3))

    collect(store)
    collect(store)

    assert bytes_of(store.snapshot(3)) == expected


def test_a_fork_point_stays_although_its_branch_needs_it_no_more(store: Store) -> None:
    """CNR-BRA-8: the pin keeps the fork point until the branch ends, also when the branch does not need it."""
    expected = bytes_of(store.snapshot(3))
    trial = store.fork("trial", 3)
    with trial.writer() as writer:
        writer.restore()
        save(writer, 50, full=True)
    for one in (store, trial):
        head = one.head()
        draft = draft_after(head.record, "expire", writer_info(), floor=head.record.v, kept=())
        one.internals.log.append(head, draft, rebase_expire)

    collect(store)
    collect(store)

    assert bytes_of(store.snapshot(3)) == expected


def test_a_channel_keeps_its_version_until_it_moves(store: Store) -> None:
    store.set_channel("serving", 4)
    collect(store)
    assert table(store, channel="serving") == [1.0, 1.0, 2.0, 3.0]

    store.set_channel("serving")
    report = collect(store)

    assert 4 not in live(store)
    assert report.deleted_segments == 3
    assert listed(store) == referenced(store)


def test_a_superseded_torn_position_does_not_stop_a_collection(store: Store) -> None:
    store.storage.put(commit_key(store.latest_version() + 1), b'{"v":')
    repair_store(store, dry_run=False)

    report = collect(store)

    assert report.outcome == "collected"
    assert listed(store) == referenced(store)
    assert table(store) == [4.0, 5.0, 6.0, 4.0]


@pytest.mark.parametrize("name", ["tag", "channel", "branch"])
def test_what_lost_its_name_goes_with_the_next_collection_however_young(store: Store, name: str) -> None:
    """Regression: a version that lost its name was treated as an orphan, and kept for the orphan age."""
    point = 4
    give = {"tag": store.tag, "channel": store.set_channel, "branch": store.fork}
    take = {"tag": store.untag, "channel": store.drop_channel, "branch": store.drop_branch}
    give[name]("x", point)
    collect_garbage(store, policy=LAST, dry_run=False)
    assert live(store)[0] == point

    take[name]("x")
    assert live(store)[0] == point, "until a record says that it has gone"
    done = collect_garbage(store, policy=LAST, dry_run=False)

    assert [version.reason for version in done.versions if version.version == point] == ["no rule keeps it"]
    assert (done.marked, point in live(store)) == (3, False)
    assert not [segment for segment in done.segments if segment.state == "young"]


def test_a_young_segment_of_nobody_may_be_a_save_under_way(store: Store) -> None:
    name = orphan(store)

    report = collect_garbage(store, dry_run=False)

    (found,) = (segment for segment in report.segments if segment.name == name)
    assert found.state == "young"
    assert store.head().record.aborted == {}


def test_an_orphan_goes_once_it_is_old_by_the_clock_of_the_store(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    name = orphan(store)
    age(fs, 8, name)

    # A machine whose clock is a year behind: the store's clock counts.
    behind = int(time.time() * 1000) - 365 * DAY_MS
    named = collect_garbage(store, dry_run=False, clock_ms=lambda: behind)
    assert list(store.head().record.aborted) == ["e" * 32]
    deleted = collect_garbage(store, dry_run=False, clock_ms=lambda: behind + DAY_MS)

    assert (named.marked, named.deleted_segments, deleted.deleted_segments) == (1, 0, 1)
    assert not [key for key in listed(store) if name in key]


def test_an_orphan_that_is_still_written_to_is_young(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    name = orphan(store)
    age(fs, 30, name)
    store.storage.put(segment_key(name, "r00000-12345678/t/c.0"), b"new")

    assert collect_garbage(store, dry_run=False).marked == 0


def test_on_disk_the_times_of_files_count(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "s"), fsync=False)
    fill(store, steps=2)
    name = orphan(store)
    for folder, _, files in os.walk(tmp_path / "s" / "data" / name):
        for file in files:
            os.utime(Path(folder, file), (time.time() - 8 * 86_400,) * 2)

    assert collect_garbage(store, dry_run=False).marked == 1


def test_leftovers_of_interrupted_writes_are_swept(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "s"), fsync=False)
    fill(store, steps=2)
    old, new = tmp_path / "s" / "data" / ".tmp-old", tmp_path / "s" / "data" / ".tmp-new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 8 * 86_400,) * 2)

    collect_garbage(store, dry_run=False)

    assert (old.exists(), new.exists()) == (False, True)


def test_a_live_save_that_was_given_up_is_told_and_saves_again(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    faulty = FaultyFileSystem(fs, on_call=once(is_commit, lambda: collect(again(fs))))
    slow = again(faulty)
    with slow.writer() as writer:
        writer.restore()
        fenced = slow.latest_version()
        armed[0] = True
        with pytest.raises(TransactionAborted):
            save(writer, 20)
        assert store.latest_version() > fenced
        writer.restore()
        save(writer, 21)

    collect(store)
    assert listed(store) == referenced(store)
    assert table(store)[21 % ROWS] == 21


def calls_of(segments: int, objects: int) -> tuple[int, int, int]:
    """Count the requests of a collection of so many segments and objects: lists, reads, deletes."""
    fs = IsolatedMemoryFileSystem()
    store = Store.create_on(on(fs))
    fill(store, steps=segments + 1, every=1)
    for name in {key.split("/")[1] for key in listed(store)} - {store.head().record.chain[0].seg}:
        for number in range(objects):
            store.storage.put(segment_key(name, f"r00000-12345678/more/{number}"), b"x")
    faulty = FaultyFileSystem(fs)
    before = len(faulty.calls)
    report = collect(again(faulty))
    assert report.deleted_segments == segments
    return len(faulty.paths("list")), len(faulty.paths("read")), len(faulty.calls) - before


def test_requests_grow_with_segments_and_only_deletions_with_objects() -> None:
    lists, reads, _ = calls_of(segments=10, objects=0)
    more_lists, more_reads, _ = calls_of(segments=20, objects=0)
    lists_of_many, reads_of_many, _ = calls_of(segments=10, objects=50)

    assert (lists_of_many, reads_of_many) == (lists, reads)
    assert more_lists - lists == 10
    assert more_reads - reads <= 2 * 10


def test_records_are_read_once_however_often_a_plan_is_made(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    faulty = FaultyFileSystem(fs, on_call=once(is_commit, lambda: store.tag("best", 3)))
    raced = again(faulty)
    armed[0] = True

    collect(raced)

    reads = [path for path in faulty.paths("read") if path.endswith(f"{3:020d}.json")]
    assert len(reads) == 1


def test_progress_is_told(store: Store) -> None:
    told: dict[str, tuple[int, int]] = {}

    collect(store, progress=lambda stage, done, total: told.update({stage: (done, total)}))

    assert told["expire"] == (1, 1)
    assert told["segments"] == (3, 3)
    assert told["records"][0] > 0


def test_manifests_are_not_read(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    """A record's chain lists all segments that it needs, so a collection reads records only."""
    faulty = FaultyFileSystem(fs)

    collect(again(faulty))

    assert [path for path in faulty.paths("read") if DATA in path] == []
