"""Garbage collection on real stores: what goes and what stays, races with everybody else, and restarts."""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import (
    BadInput,
    CorruptStore,
    GcReport,
    RetentionPolicy,
    StorageFailure,
    Store,
    TableOptions,
    Writer,
    collect_garbage,
    repair_store,
    verify_store,
)
from cnr_store.errors import BranchNotFound, CorruptRecord, ReadOnlyStore, TransactionAborted, VersionExpired
from cnr_store.format.commit_record import encode_record, is_live
from cnr_store.format.documents import canonical_json
from cnr_store.format.layout import (
    DATA,
    DATA_GROUP,
    MANIFEST,
    READER_LEASES,
    RECEIPT,
    commit_key,
    cursor_key,
    segment_key,
    segment_name,
    segment_prefix,
)
from cnr_store.log.author import writer_info
from cnr_store.log.leases import CLOCK_TOLERANCE_MS, HOLD_KEPT_MS
from cnr_store.log.rebase import draft_after, rebase_expire, rebase_fence
from cnr_store.maintenance.compaction import compact_run
from cnr_store.maintenance.gc.plan import CLEAN_UP_AT, txn_of
from cnr_store.storage import Storage, open_storage, storage_from_filesystem
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.snapshot_bytes import bytes_of
from tests.support.sweep import sweep

ROWS, DIM = 4, 2
DAY_MS = 86_400_000
LAST = RetentionPolicy(keep_last=1)


def collect(store: Store, keep_last: int = 1, **options: Any) -> GcReport:
    """A collection that waits for nobody."""
    options = {"policy": RetentionPolicy(keep_last=keep_last), "grace_s": 0.0, "orphan_age_s": 0.0, **options}
    return collect_garbage(store, **{"dry_run": False, "force": True, **options})


def save(writer: Writer, step: int, *, full: bool = False) -> int:
    with writer.begin(step, kind="baseline" if full else "delta") as txn:
        if full:
            txn.write_table("t", np.full((ROWS, DIM), step, np.float32), options=TableOptions(scale=1.0))
        else:
            txn.write_rows("t", np.array([step % ROWS]), np.full((1, DIM), step, np.float32))
    return writer.head.record.v


def fill(store: Store, steps: int = 6, every: int = 3) -> list[int]:
    """Checkpoints 1 to ``steps``, every so many a baseline; their versions."""
    with store.writer() as writer:
        if store.head().record.chain:
            writer.restore()
        return [save(writer, step, full=(step - 1) % every == 0) for step in range(1, steps + 1)]


@pytest.fixture
def fs() -> IsolatedMemoryFileSystem:
    return IsolatedMemoryFileSystem()


def on(fs: Any) -> Storage:
    return storage_from_filesystem(fs, "store")


@pytest.fixture
def store(fs: IsolatedMemoryFileSystem) -> Store:
    """Versions 2 to 7: full, delta, delta, full, delta, delta."""
    made = Store.create_on(on(fs))
    assert fill(made) == [2, 3, 4, 5, 6, 7]
    return made


def again(fs: Any) -> Store:
    """The store as another process sees it."""
    return Store.open_on(on(fs))


def listed(store: Store, folder: str = DATA) -> set[str]:
    return {stat.key for stat in store.storage.list_objects(folder) if stat.key != DATA_GROUP}


def contents(store: Store) -> dict[str, bytes | None]:
    return {stat.key: store.storage.read(stat.key) for stat in store.storage.list_objects("")}


def referenced(*stores: Store) -> set[str]:
    """Every object that a live version of these logs needs, from the records and manifests alone."""
    found: set[str] = set()
    for store in stores:
        for version in range(store.latest_version() + 1):
            try:
                snapshot = store.snapshot(version)
            except (VersionExpired, CorruptRecord):
                continue
            for reader in snapshot.readers:
                paths = [MANIFEST, *(entry.path for entry in reader.manifest.objects)]
                found |= {segment_key(reader.name, path) for path in paths}
                # A writer without objects is named nowhere but in its receipt.
                prefix = segment_prefix(reader.name)
                found |= {key for key in listed(store, prefix) if key.endswith(f"/{RECEIPT}") and key.count("/") == 3}
    return found


def live(store: Store) -> list[int]:
    found = []
    for version in range(store.latest_version() + 1):
        try:
            store.snapshot(version)
        except VersionExpired:
            continue
        found.append(version)
    return found


def table(store: Store, **choice: Any) -> list[float]:
    return [float(value) for value in store.snapshot(**choice).table("t").read()[:, 0]]


def states(report: GcReport) -> dict[str, int]:
    counts: dict[str, int] = {}
    for segment in report.segments:
        counts[segment.state] = counts.get(segment.state, 0) + 1
    return counts


def age(fs: IsolatedMemoryFileSystem, days: float, part: str = "") -> None:
    """Make the objects whose path has ``part`` as old as that."""
    then = dt.datetime.now(tz=dt.UTC) - dt.timedelta(days=days)
    for path, file in fs.store.items():
        if part in path:
            file.created = file.modified = then


# ---- what goes and what stays


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
    assert verify_store(store, every=True, deep=True).is_sound


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
    assert (said.is_dry_run, said.outcome, said.named) == (True, "planned", 3)
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
    assert (first.named, first.deleted_segments, listed(store)) == (3, 0, objects)
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


@pytest.mark.parametrize(
    "arguments", [{"grace_s": -1.0}, {"grace_s": "1d"}, {"orphan_age_s": float("nan")}, {"batch": 0}]
)
def test_arguments_that_cannot_be_meant_are_refused(store: Store, arguments: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        collect(store, **arguments)


@pytest.mark.parametrize("name", ["tag", "channel", "branch"])
def test_what_a_name_keeps_stays_though_no_list_has_it(store: Store, name: str) -> None:
    """CNR-LOG-22: a name is enough below the floor. Our own records list the version too; another writer's need not."""
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
    """CNR-BRA-8: the pin keeps it for the branch's whole life, whatever the branch itself has given up."""
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
    """It counted as a save that never committed, and waited as long as one."""
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
    assert (done.named, point in live(store)) == (3, False)
    assert not [segment for segment in done.segments if segment.state == "young"]


# ---- orphans


def orphan(store: Store, txn: str = "e" * 32) -> str:
    """What a save leaves that was killed before its manifest."""
    name = segment_name(store.latest_version(), txn)
    store.storage.put(segment_key(name, "r00000-12345678/t/zarr.json"), b"{}")
    return name


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

    assert (named.named, named.deleted_segments, deleted.deleted_segments) == (1, 0, 1)
    assert not [key for key in listed(store) if name in key]


def test_an_orphan_that_is_still_written_to_is_young(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    name = orphan(store)
    age(fs, 30, name)
    store.storage.put(segment_key(name, "r00000-12345678/t/c/0"), b"new")

    assert collect_garbage(store, dry_run=False).named == 0


def test_on_disk_the_times_of_files_count(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "s"), fsync=False)
    fill(store, steps=2)
    name = orphan(store)
    for folder, _, files in os.walk(tmp_path / "s" / "data" / name):
        for file in files:
            os.utime(Path(folder, file), (time.time() - 8 * 86_400,) * 2)

    assert collect_garbage(store, dry_run=False).named == 1


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


armed = [False]


def is_commit(call: Call) -> bool:
    return call.operation == "create" and "/commits/" in call.path and armed[0]


def once(when: Callable[[Call], bool], action: Callable[[], object]) -> Callable[[Call], None]:
    """Run ``action`` before the first call that is meant."""
    done: list[Call] = []

    def on_call(call: Call) -> None:
        if not done and when(call):
            done.append(call)
            armed[0] = False
            action()

    return on_call


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    armed[0] = False
    yield
    armed[0] = False


# ---- races


def racing(fs: IsolatedMemoryFileSystem, action: Callable[[], object]) -> Store:
    """A store whose next record is beaten, or accompanied, by ``action``."""
    raced = again(FaultyFileSystem(fs, on_call=once(is_commit, action)))
    armed[0] = True
    return raced


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
    """Heads are read before the listing: in the other order a segment of a new head would seem to be missing."""
    listings: list[str] = []

    def is_look_behind_listing(call: Call) -> bool:
        if call.operation == "list" and call.path.rstrip("/").endswith("/data"):
            listings.append(call.path)
        return bool(listings) and call.operation == "read" and call.path.endswith("hint/latest.json")

    looking = again(FaultyFileSystem(fs, on_call=once(is_look_behind_listing, lambda: train(store, 8, full=True))))
    report = collect_garbage(looking, policy=LAST, dry_run=False)

    assert (report.outcome, report.named) == ("collected", 3)
    assert table(store) == [8.0] * ROWS


def test_a_rollback_between_plan_and_record_brings_its_target_back_to_life(
    store: Store, fs: IsolatedMemoryFileSystem
) -> None:
    collect(racing(fs, lambda: store.rollback(3)))

    assert table(store) == [1.0, 1.0, 2.0, 1.0]
    assert listed(store) == referenced(store)


def test_a_lease_between_plan_and_record_keeps_the_data_although_the_version_expires(
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


def test_a_cursor_that_holds_expired_versions_passes_over_superseded_positions(store: Store) -> None:
    """The torn position among them stopped every collection, as long as the cursor stood."""
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
    assert verify_store(store, every=True, deep=True).is_sound


def test_an_open_snapshot_outlives_its_version_during_the_grace(store: Store) -> None:
    reading = store.snapshot(3)

    collect(store, grace_s=3600.0)

    assert reading.table("t").read()[2, 0] == 2
    with pytest.raises(VersionExpired):
        store.snapshot(3)


# ---- restarts


class Collecting:
    """Two collections by one process; a third by another one must find all well and leave it clean."""

    def prepare(self, fs: Any) -> None:
        store = Store.create_on(on(fs))
        fill(store, steps=5, every=2)
        store.tag("best", 3)
        store.lease(4, ttl_s=3600)
        with store.fork("trial", 4).writer() as writer:
            writer.restore()
            save(writer, 30)
        store.fork("gone", 4, expires_s=0.001)
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
        assert verify_store(store, every=True, deep=True).is_sound
        collect(store)
        trial = store.on_branch("trial")
        assert table(trial)[30 % ROWS] == 30
        assert listed(store) == referenced(store, trial)
        assert collect(store).outcome == "clean"
        assert verify_store(store, every=True, deep=True).is_sound


def test_a_snapshot_that_outlives_the_grace_says_that_its_version_has_expired(store: Store) -> None:
    """A reader that took longer than the grace was told that the store is damaged."""
    opened = store.snapshot(3)
    raced = again(FaultyFileSystem(store.storage._fs, on_call=once(is_manifest, lambda: collect(store))))  # type: ignore[attr-defined]  # of memory

    with pytest.raises(VersionExpired):
        raced.snapshot(3)
    with pytest.raises(VersionExpired) as found:
        opened.table("t").read()

    assert found.value.version == 3


def is_manifest(call: Call) -> bool:
    return call.path.endswith(MANIFEST)


def test_a_collection_may_stop_or_fail_at_any_storage_call() -> None:
    report = sweep(Collecting(), every=5)

    assert report.failures == [], str(report)
    assert report.runs > 100


def test_a_run_that_is_out_of_time_stops_between_records_and_the_next_goes_on(
    store: Store, fs: IsolatedMemoryFileSystem
) -> None:
    stopped = collect(store, deadline_s=0.0)

    assert (stopped.outcome, stopped.records, stopped.deleted_segments) == ("stopped", 0, 0)
    collect(store, grace_s=3600.0)
    later = int(time.time() * 1000) + 3_601_000
    assert collect(store, deadline_s=0.0, clock_ms=lambda: later).outcome == "stopped"
    assert collect(store, clock_ms=lambda: later).outcome == "collected"
    assert listed(store) == referenced(store)


def test_versions_go_in_batches_and_every_record_names_what_its_versions_leave(fs: IsolatedMemoryFileSystem) -> None:
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


def test_objects_that_a_zombie_writes_behind_a_deletion_go_with_a_later_run(store: Store) -> None:
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


# ---- damage


def test_a_missing_segment_of_a_version_that_stays_stops_everything_unless_it_is_given_up(store: Store) -> None:
    name = store.head().record.chain[0].seg
    store.storage.delete([key for key in listed(store) if name in key])
    before = contents(store)

    with pytest.raises(CorruptStore, match="missing from storage"):
        collect(store)
    assert contents(store) == before

    assert collect(store, despite_damage=True).outcome == "collected"


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_segment_that_another_collection_deletes_between_heads_and_listing_is_no_damage(
    fs: IsolatedMemoryFileSystem, store: Store, dry_run: bool
) -> None:
    """Without a grace it was called lost, and nothing was collected."""
    has_run = False

    def collects_first(call: Call) -> None:
        nonlocal has_run
        if call.operation == "list" and call.path.rstrip("/").endswith("data") and not has_run:
            has_run = True
            assert collect(again(fs)).outcome == "collected"

    view = Store.open_on(on(FaultyFileSystem(fs, on_call=collects_first)), threads=1)

    assert collect(view, keep_last=100, dry_run=dry_run).outcome == "clean"
    assert has_run
    assert listed(store) == referenced(store)


@pytest.mark.parametrize("how", ["rotten", "empty", "another"])
def test_versions_whose_records_are_lost_can_be_given_up_once_for_all(store: Store, how: str) -> None:
    lost = store.latest_version() - 1
    held = {version: bytes_of(store.snapshot(version)) for version in range(2, lost)}
    damage(store, lost, how)
    keep = RetentionPolicy(keep_last=100)
    with pytest.raises(CorruptStore):
        collect(store, policy=keep)

    report = collect(store, policy=keep, despite_damage=True)

    assert [one.reason for one in report.versions if one.version == lost] == ["its record cannot be read"]
    assert not is_live(store.head().record, lost)
    assert collect(store, policy=keep).outcome == "clean"
    assert {version: bytes_of(store.snapshot(version)) for version in held} == held
    with pytest.raises(VersionExpired):
        store.snapshot(lost)


@pytest.mark.parametrize("how", ["rotten", "empty"])
def test_a_tagged_version_whose_record_is_lost_can_be_given_up_below_the_floor(store: Store, how: str) -> None:
    store.tag("old", 3)
    collect(store, policy=RetentionPolicy(keep_last=1))
    assert store.head().record.floor > 3
    damage(store, 3, how)
    with pytest.raises(CorruptStore):
        collect(store)

    collect(store, despite_damage=True)

    assert 3 in store.head().record.expired
    assert collect(store).outcome == "clean"
    assert listed(store) == referenced(store)
    assert live(store)[-1] == store.latest_version()


def damage(store: Store, version: int, how: str) -> None:
    """Lose a commit record."""
    if how == "empty":
        store.storage.delete([commit_key(version)])
    elif how == "rotten":
        store.storage.put(commit_key(version), (store.storage.read(commit_key(version)) or b"")[:-9])
    else:
        other = msgspec.structs.replace(store.record(version), user={"from": "a backup"})
        store.storage.put(commit_key(version), encode_record(other))


def test_a_record_that_is_not_the_one_the_next_was_written_behind_stops_everything(store: Store) -> None:
    other = msgspec.structs.replace(store.record(4), user={"from": "a backup"})
    store.storage.put(commit_key(4), encode_record(other))

    with pytest.raises(CorruptRecord, match="its successor names"):
        collect(store)


def test_a_hole_in_the_log_stops_everything(store: Store) -> None:
    store.storage.delete([commit_key(4)])

    with pytest.raises(CorruptStore, match="empty"):
        collect(store)


def test_a_record_of_another_store_does_not_say_what_is_needed(store: Store) -> None:
    """Below the floor no other record vouches for it: one without a chain would have let all go that the tag keeps."""
    store.tag("kept", 3)
    collect(store)
    other = Store.create_on(on(IsolatedMemoryFileSystem()))
    while other.latest_version() < 3:
        other.writer()
    foreign = other.storage.read(commit_key(3))
    assert foreign is not None
    store.storage.put(commit_key(3), foreign)
    before = listed(store)

    with pytest.raises(CorruptStore, match="commit record 3 belongs to store"):
        collect(Store.open_on(store.storage))

    assert listed(store) == before


@pytest.mark.parametrize("is_branch", [False, True], ids=["store", "branch"])
def test_a_log_with_writer_features_of_a_newer_library_is_left_alone(store: Store, is_branch: bool) -> None:
    newer = store.fork("b", 3) if is_branch else store
    head = newer.head()
    draft = draft_after(head.record, "fence", writer_info(), writer_features=("future",), epoch=head.record.epoch + 1)
    newer.internals.log.append(head, draft, rebase_fence)
    before = contents(store)

    with pytest.raises(ReadOnlyStore):
        collect(store)

    assert contents(store) == before


# ---- branches


def dies() -> None:
    raise KeyboardInterrupt


def train(branch: Store, step: int, *, full: bool = False) -> int:
    with branch.writer() as writer:
        writer.restore()
        return save(writer, step, full=full)


def test_a_branch_keeps_its_fork_point_and_what_it_wrote(store: Store) -> None:
    trial = store.fork("trial", 3)
    train(trial, 30)
    before = table(trial)

    collect(store)

    assert table(trial) == before
    assert listed(store) == referenced(store, trial)
    assert 3 in live(store)


def test_a_branch_is_collected_by_the_same_policy_from_wherever_it_is_run(store: Store) -> None:
    trial = store.fork("trial", 3)
    versions = [train(trial, step, full=True) for step in (30, 31, 32)]

    report = collect(trial)

    assert live(trial)[0] == versions[-1]
    assert listed(store) == referenced(store, trial)
    assert {version.branch for version in report.versions} == {None, "trial"}


def test_a_branch_whose_time_is_over_is_ended_and_its_segments_go_at_once(store: Store) -> None:
    trial = store.fork("trial", 3, expires_s=3600)
    train(trial, 30)
    later = int(time.time() * 1000) + 3_601_000

    said = collect_garbage(store, policy=LAST, clock_ms=lambda: later, dry_run=True)
    done = collect_garbage(store, policy=LAST, dry_run=False, clock_ms=lambda: later)
    collect_garbage(store, policy=LAST, dry_run=False, clock_ms=lambda: later + DAY_MS)

    assert said.named == done.named > 3
    assert (store.branches(), live(store)[0]) == ({}, 7)
    assert listed(store) == referenced(store)
    with pytest.raises(BranchNotFound):
        train(trial, 31)


def cut(store: Store, key: str) -> None:
    data = store.storage.read(key)
    assert data is not None
    store.storage.put(key, data[: len(data) // 2])


@pytest.mark.parametrize("position", [0, 1, -1], ids=["first", "middle", "newest"])
def test_a_damaged_branch_whose_time_is_over_is_ended_and_holds_nothing_up(store: Store, position: int) -> None:
    """One unreadable record of an experiment that had ended kept every collection of the store from running."""
    trial = store.fork("trial", 3, expires_s=3600)
    train(trial, 30)
    newest = trial.latest_version()
    cut(store, commit_key(position % (newest + 1), trial.internals.log.prefix))
    later = int(time.time() * 1000) + 3_601_000

    said = collect_garbage(store, policy=LAST, clock_ms=lambda: later, dry_run=True)
    collect(store, clock_ms=lambda: later)

    assert said.outcome == "planned"
    assert (store.branches(), listed(store)) == ({}, referenced(store))


def test_a_damaged_branch_that_lives_stops_everything_until_it_is_repaired(store: Store) -> None:
    trial = store.fork("trial", 3)
    train(trial, 30)
    cut(store, commit_key(trial.latest_version(), trial.internals.log.prefix))
    before = listed(store)

    with pytest.raises(CorruptRecord, match="branch 'trial'; repair it or drop the branch"):
        collect(store)

    assert listed(store) == before
    repair_store(trial, dry_run=False)
    assert collect(store).outcome == "collected"


def test_a_damaged_log_of_a_dropped_branch_holds_nothing_up(store: Store) -> None:
    trial = store.fork("trial", 3)
    train(trial, 30)
    store.drop_branch("trial")
    cut(store, commit_key(1, trial.internals.log.prefix))
    young = segment_key(segment_name(7, "a" * 32), MANIFEST)
    store.storage.put(young, b"{}")

    assert collect(store, orphan_age_s=86_400.0).outcome == "collected"
    collect(store)

    assert listed(store) == referenced(store)


def test_a_branch_that_was_dropped_goes_with_the_next_collection_however_young(store: Store) -> None:
    trial = store.fork("trial", 3)
    train(trial, 30)
    store.drop_branch("trial")

    collect_garbage(store, policy=LAST, dry_run=False)
    now = int(time.time() * 1000)
    collect_garbage(store, policy=LAST, dry_run=False, clock_ms=lambda: now + DAY_MS + 60_000)

    assert listed(store) == referenced(store)


def test_a_lease_on_a_branch_that_was_dropped_keeps_its_data(store: Store) -> None:
    trial = store.fork("trial", 3)
    train(trial, 30)
    needed = {entry.seg for entry in trial.head().record.chain}
    lease = trial.lease()
    store.drop_branch("trial")

    collect(store)
    collect(store)

    assert needed <= {key.split("/")[1] for key in listed(store)}
    lease.release()
    collect(store)
    assert listed(store) == referenced(store)


def test_an_orphan_is_given_up_in_the_logs_of_all_branches(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    trial = store.fork("trial", 3)
    slow = again(FaultyFileSystem(fs, on_call=once(is_commit, lambda: collect(again(fs))))).on_branch("trial")
    with slow.writer() as writer:
        writer.restore()
        armed[0] = True
        with pytest.raises(TransactionAborted):
            save(writer, 30)

    collect(store)
    assert listed(store) == referenced(store, trial)


def test_a_name_that_a_branch_has_committed_meanwhile_is_no_damage(
    store: Store, fs: IsolatedMemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection died between the records of two logs; verify said that a live segment may be deleted."""
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 1)  # so that rows are put when they are given
    trial = store.fork("trial", 3)
    with trial.writer() as writer:
        writer.restore()
        with writer.begin(30, kind="baseline") as txn:
            txn.write_table("t", np.full((ROWS, DIM), 9, np.float32), options=TableOptions(scale=1.0))
            crash = once(lambda call: "/branches/" in call.path and is_commit(call), dies)
            armed[0] = True
            with pytest.raises(KeyboardInterrupt):
                collect(again(FaultyFileSystem(fs, on_call=crash)))
    assert txn_of(trial.head().record.chain[-1].seg) in store.head().record.aborted

    assert verify_store(store).problems == ()
    collect(store)

    assert txn_of(trial.head().record.chain[-1].seg) not in store.head().record.aborted
    assert table(trial) == [9.0] * ROWS


def test_a_new_branch_does_not_keep_what_was_given_up_before_it(store: Store) -> None:
    now = int(time.time() * 1000)
    collect(store, grace_s=3600.0, clock_ms=lambda: now)
    trial = store.fork("trial")

    collect(store, grace_s=3600.0, clock_ms=lambda: now + 3_600_000)

    assert listed(store) == referenced(store, trial)


def test_a_branch_that_lost_its_log_stops_everything(store: Store) -> None:
    """It was taken for a fork whose creator was on the way, and what the branch had saved for orphans."""
    branch = store.fork("trial", 3)
    with branch.writer() as writer:
        writer.restore()
        save(writer, 9)
    store.storage.delete(listed(store, "branches/"))
    before = listed(store)

    for _ in range(2):
        with pytest.raises(CorruptStore, match="'trial'"):
            collect(store)

    assert listed(store) == before


def test_a_branch_that_lost_its_log_ends_with_its_time(store: Store) -> None:
    store.fork("trial", 3, expires_s=3600)
    store.storage.delete(listed(store, "branches/"))
    later = int(time.time() * 1000) + 3_601_000

    collect(store, clock_ms=lambda: later)

    assert store.branches() == {}
    assert listed(store) == referenced(store)


# ---- costs


def calls_of(segments: int, objects: int) -> tuple[int, int, int]:
    """Requests of a collection that deletes so many segments of so many objects: lists, reads, deletes."""
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


def test_requests_grow_with_segments_not_with_objects_but_for_the_deletions() -> None:
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
    """What a segment refers to lies in its record's chain, so collecting reads records alone."""
    faulty = FaultyFileSystem(fs)

    collect(again(faulty))

    assert [path for path in faulty.paths("read") if DATA in path] == []


# ---- what else a collection has to leave possible


def test_a_step_is_found_in_the_version_that_compaction_made(store: Store) -> None:
    """By step only the record of the save was looked for, which expires once a compaction has made a newer version."""
    assert compact_run(store, run=(0, 3)).outcome == "committed"
    compacted = store.latest_version()

    collect(store)

    assert store.snapshot(step=6).version == compacted
    assert table(store, step=6) == [4.0, 5.0, 6.0, 4.0]


def test_a_step_whose_newest_version_has_gone_is_found_where_a_tag_keeps_it(store: Store) -> None:
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
