"""A relay: what it copies, in which order, what its readers see, what it lets go and what it refuses."""

from __future__ import annotations

import errno
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest

from cnr_store import (
    BadInput,
    CnrStoreError,
    CompactionPolicy,
    CorruptStore,
    RetentionPolicy,
    StorageFailure,
    Store,
    TableOptions,
    collect_garbage,
    compact,
    maintain,
    read_status,
    repair_store,
    verify_store,
)
from cnr_store.changes import changes
from cnr_store.errors import (
    BranchNotFound,
    CorruptObject,
    CorruptRecord,
    CursorExpired,
    MissingObject,
    ReadOnlyStore,
    StoreExists,
    VersionExpired,
    VersionNotFound,
)
from cnr_store.format.commit_record import is_live
from cnr_store.format.documents import canonical_json, sha256
from cnr_store.format.layout import BRANCHES, COMMITS, DATA, IDENTITY, RELAY, RELAY_TRIMS, STATE, commit_key, hint_key
from cnr_store.format.records import Hint, RelayTrims
from cnr_store.log.clock import wall_ms
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.log.leases import read_cursors, read_leases
from cnr_store.relay.relay import Relay
from cnr_store.relay.report import RelayReport
from cnr_store.serving import Loader, LoaderOptions
from cnr_store.storage import Storage, open_storage, storage_from_filesystem
from cnr_store.storage.base import TEMPORARY_PREFIX
from cnr_store.write.draft import CommitKind
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.snapshot_bytes import bytes_of

FAR, NEAR = "/far", "/near"
QUICK = RetryPolicy(deadline_s=0.02, first_delay_s=0.001, max_delay_s=0.002)
ROWS, DIM = 40, 4
DAY_MS = 86_400_000


class Clock:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.ms = 10**13

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def files() -> IsolatedMemoryFileSystem:
    return IsolatedMemoryFileSystem()


@pytest.fixture
def store(files: IsolatedMemoryFileSystem) -> Iterator[Store]:
    with Store.create_on(place(files, FAR), threads=2, retry=QUICK) as store:
        yield store


def place(files: fsspec.AbstractFileSystem, root: str = NEAR) -> Storage:
    return storage_from_filesystem(files, root)


def near(files: fsspec.AbstractFileSystem, root: str = NEAR) -> Store:
    return Store.open_on(place(files, root), threads=1, retry=QUICK)


def save(store: Store, *values: float, kind: CommitKind | None = None) -> list[int]:
    """Save one version for each value, the first as a baseline; returns their numbers."""
    versions = []
    with store.writer() as writer:
        if not store.snapshot().is_empty:
            writer.restore()
        for value in values:
            step = store.head().record.step + 1
            chosen: CommitKind = kind or ("delta" if store.head().record.chain else "baseline")
            with writer.begin(step, kind=chosen) as txn:
                if chosen == "baseline":
                    table = np.full((ROWS, DIM), value, np.float32)
                    txn.write_table("t", table, options=TableOptions(scale=1.0))
                else:
                    txn.write_rows("t", np.arange(3), np.full((3, DIM), value, np.float32))
            assert txn.version is not None
            versions.append(txn.version)
    return versions


def value_of(store: Store, version: int | None = None) -> float:
    return float(store.snapshot(version).table("t").read()[0, 0])


def same_objects(store: Store, copy: Store, *folders: str) -> bool:
    """Whether every object of these folders of the copy is at the source, with the same bytes; and there are some."""
    keys = [stat.key for folder in folders for stat in copy.storage.list_objects(folder)]
    return bool(keys) and all(store.storage.read(key) == copy.storage.read(key) for key in keys)


# ---- copying


def test_the_relay_has_the_same_versions_and_bytes_from_where_it_began(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    save(store, 1, 2)
    relay = Relay(store, place(files))
    began = relay.advance()
    first = store.latest_version()
    save(store, 3, 4)
    went_on = relay.advance()

    copy = near(files)
    assert copy.uuid == store.uuid
    assert copy.storage.read(IDENTITY) == store.storage.read(IDENTITY)
    assert began.version == first
    assert (began.versions, began.segments, began.skipped) == (1, 2, 0)
    assert (went_on.version, went_on.source_version) == (store.latest_version(), store.latest_version())
    assert went_on.versions == store.latest_version() - first
    assert went_on.segments == 2
    assert went_on.bytes > 0
    assert copy.head() == store.head()
    assert same_objects(store, copy, COMMITS, DATA)
    for version in range(first, store.latest_version() + 1):
        assert bytes_of(copy.snapshot(version)) == bytes_of(store.snapshot(version))
    assert [record.v for record in copy.log()] == list(range(store.latest_version(), first - 1, -1))


def test_a_look_that_finds_nothing_new_is_one_request(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    watched, target = FaultyFileSystem(files), FaultyFileSystem(files)
    relay = Relay(near(watched, FAR), place(target))
    relay.advance()
    before = len(watched.calls), len(target.calls)

    report = relay.advance()

    assert report == RelayReport(store.latest_version(), store.latest_version(), staleness_s=0.0)
    assert [call.operation for call in watched.calls[before[0] :]] == ["read"]
    assert len(target.calls) == before[1]


def test_a_reader_of_a_relay_polls_it_with_one_request(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    relay = Relay(store, place(files))
    relay.advance()
    watched = FaultyFileSystem(files)
    reader = near(watched)
    opening = len(watched.calls)
    head = reader.head()
    asked = len(watched.calls)

    assert opening == 3  # identity, position 0, marker
    assert reader.poll(head) is None
    assert len(watched.calls) == asked + 1
    save(store, 2)
    relay.advance()
    found = reader.poll(head)
    assert found is not None
    assert found.record.v == head.record.v + 1


def test_an_empty_store_is_waited_for(store: Store, files: IsolatedMemoryFileSystem) -> None:
    relay = Relay(store, place(files))

    assert relay.advance() == RelayReport(None, 0, staleness_s=0.0)
    assert relay.version is None
    assert not list(place(files).list_objects(""))
    save(store, 1)
    assert relay.advance().version == store.latest_version()
    assert value_of(near(files)) == 1


def test_a_run_rests_between_two_looks_at_an_empty_store(store: Store, files: IsolatedMemoryFileSystem) -> None:
    class Stop(threading.Event):
        rests = 0

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout
            self.rests += 1
            if self.rests == 3:
                self.set()
            return True

    stop, reports = Stop(), list[RelayReport]()
    Relay(store, place(files)).run(5, stop=stop, on_report=reports.append)

    assert len(reports) == 3


def test_another_process_goes_on_where_one_ended(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    Relay(store, place(files)).advance()
    save(store, 2, 3)
    watched = FaultyFileSystem(files)

    report = Relay(store, place(watched)).advance()

    assert report.segments == 2
    assert value_of(near(files)) == 3
    assert not [path for path in watched.paths("write") if IDENTITY in path]


def test_a_change_stream_of_a_relay_is_that_of_its_source(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """A cursor of a relay of a branch passed for one of the main log; one from before the relay was 'no version'."""
    save(store, 1)
    trial = store.fork("trial")
    versions = save(trial, 2, 3, 4)
    Relay(trial, place(files), start=versions[1]).advance()
    copy = near(files)

    stream = changes(copy, versions[1])
    assert [batch["version"][0].as_py() for batch in stream] == [versions[2]]
    assert stream.cursor is not None
    assert stream.cursor.branch == trial.internals.branch_uuid
    with pytest.raises(BadInput):
        changes(store, stream.cursor)
    with pytest.raises(CursorExpired, match="holds no version before"):
        list(changes(copy, versions[0]))


def test_a_relay_may_begin_at_an_older_version(store: Store, files: IsolatedMemoryFileSystem) -> None:
    versions = save(store, 1, 2, 3)

    report = Relay(store, place(files), start=versions[0]).advance()

    copy = near(files)
    assert report.versions == 3
    assert [value_of(copy, version) for version in versions] == [1, 2, 3]
    with pytest.raises(VersionExpired, match="does not have version 1"):
        copy.snapshot(1)


def test_a_start_that_cannot_be_read_is_refused(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1, 2, 3)
    collect_garbage(store, policy=RetentionPolicy(keep_last=1), dry_run=False)

    with pytest.raises(VersionExpired, match="start later"):
        Relay(store, place(files), start=2).advance()
    with pytest.raises(VersionNotFound, match="no version 99 yet"):
        Relay(store, place(files), start=99).advance()
    with pytest.raises(BadInput, match="start"):
        Relay(store, place(files), start=-1)
    with pytest.raises(BadInput, match="poll_interval_s"):
        Relay(store, place(files)).run(poll_interval_s="5s")  # type: ignore[arg-type]
    assert not [stat for stat in place(files).list_objects("") if "_probe" not in stat.key]


def test_side_objects_come_before_their_records(store: Store, files: IsolatedMemoryFileSystem) -> None:
    (version,) = save(store, 1)
    for number in range(3):
        store.tag(f"{number}-" + "x" * 1000, version)
    relay = Relay(store, place(files))
    relay.advance()
    for number in range(3, 12):
        store.tag(f"{number}-" + "x" * 1000, version)
    watched = FaultyFileSystem(files)
    Relay(store, place(watched)).advance()

    copy = near(files)
    written = [path for path in watched.paths("write", "create") if f"/{STATE}" in path or f"/{COMMITS}" in path]
    assert copy.head() == store.head()
    assert len(copy.tags()) == 12
    assert same_objects(store, copy, STATE)
    assert f"/{STATE}" in written[-2]
    assert f"/{COMMITS}" in written[-1]


def test_a_branch_is_copied_as_a_log_of_its_own(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    branch = store.fork("trial")
    save(branch, 5)
    save(store, 2)

    Relay(branch, place(files)).advance()

    copy = near(files)
    assert value_of(copy) == 5
    assert copy.head() == branch.head()
    assert copy.relay is not None
    assert copy.storage.list_folders(BRANCHES) == []
    with pytest.raises(StoreExists, match="another log"):
        Relay(store, place(files)).advance()
    store.drop_branch("trial")
    Relay(branch, place(files)).advance()
    with pytest.raises(BranchNotFound, match="dropped"):
        copy.snapshot()


def test_versions_of_a_branch_are_those_of_the_branch_at_a_relay_too(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    """By uuid and version alone those of a branch were taken for the store's own."""
    save(store, 1)
    trial = store.fork("trial")
    save(trial, 2)
    Relay(trial, place(files)).advance()
    Relay(near(files), place(files, "/leaf")).advance()

    assert store.internals.branch_uuid == ""
    assert trial.internals.branch_uuid == next(iter(store.head().record.pins))
    assert (
        near(files).internals.branch_uuid == near(files, "/leaf").internals.branch_uuid == trial.internals.branch_uuid
    )


def test_a_relay_of_a_relay_is_one(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1, 2)
    region = Relay(store, place(files, "/region"), grace_s=0, policy=RetentionPolicy(keep_last=1))
    region.advance()
    rack = Relay(near(files, "/region"), place(files))
    rack.advance()
    for value in (3, 4, 5):
        save(store, value, kind="baseline")
        region.advance()  # Lets go what is older at once, so the rack's relay is too late for it.

    report = rack.advance()

    assert report.skipped > 0
    assert value_of(near(files)) == 5
    assert near(files).head() == store.head()
    assert verify_store(near(files), deep=True).is_sound


def test_compaction_and_rollback_come_through(store: Store, files: IsolatedMemoryFileSystem) -> None:
    versions = save(store, 1, 2, 3, 4)
    relay = Relay(store, place(files), start=versions[0])
    relay.advance()
    compact(store, policy=CompactionPolicy(max_chain=1))
    store.rollback(versions[1])
    save(store, 9)

    relay.advance()

    copy = near(files)
    for record in store.log(limit=5):
        assert bytes_of(copy.snapshot(record.v)) == bytes_of(store.snapshot(record.v))
    assert verify_store(copy, every=True, deep=True).is_sound


def test_superseded_positions_are_copied_as_they_are(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1, 2)
    relay = Relay(store, place(files))
    relay.advance()
    (torn,) = save(store, 3)[-1:]
    record = store.storage.read(commit_key(torn))
    assert record is not None
    store.storage.put(commit_key(torn), record[:-7])
    with pytest.raises(CorruptRecord):
        relay.advance()
    assert near(files).latest_version() == torn - 1
    repair_store(store, dry_run=False)

    report = relay.advance()

    copy = near(files)
    assert report.skipped == 1
    assert copy.head() == store.head()
    assert copy.storage.read(commit_key(torn)) == record[:-7]
    assert torn not in [one.v for one in copy.log()]
    assert value_of(copy) == 2


# ---- what is gone at the source


def expire_all_but_newest(store: Store) -> None:
    policy = RetentionPolicy(keep_last=1)
    for _ in range(2):
        collect_garbage(store, policy=policy, grace_s=0, dry_run=False, force=True)


def test_versions_that_went_before_they_were_copied_are_passed_over(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    save(store, 1)
    relay = Relay(store, place(files))
    relay.advance()
    versions = save(store, 2, 3, 4, kind="baseline")
    expire_all_but_newest(store)

    report = relay.advance()

    copy = near(files)
    assert report.skipped >= 2
    assert report.version == store.latest_version()
    assert value_of(copy) == 4
    assert copy.head() == store.head()
    assert [record.v for record in copy.log()] == [record.v for record in store.log()][: len(list(copy.log()))]
    with pytest.raises(VersionExpired):
        copy.snapshot(versions[0])
    assert verify_store(copy, deep=True).is_sound


def test_a_version_that_goes_while_it_is_copied_is_passed_over(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    watched = FaultyFileSystem(files)
    relay = Relay(near(watched, FAR), place(files))
    relay.advance()
    save(store, 2, kind="baseline")
    is_done = []

    def expire(call: Any) -> None:
        if "_segment.json.zst" in call.path and not is_done:
            is_done.append(call)
            save(store, 3, kind="baseline")
            expire_all_but_newest(store)

    watched._on_call = expire
    report = relay.advance()

    assert is_done
    assert report.skipped > 0
    assert value_of(near(files)) == 3
    assert near(files).head() == store.head()


def test_while_positions_are_filled_a_reader_sees_the_end_before_or_behind(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    """At every call of the relay, from every hint: the newest version is whole, and its state is a committed one."""
    save(store, 1)
    relay = Relay(store, place(files))
    relay.advance()
    before = store.latest_version()
    save(store, *range(2, 12), kind="baseline")
    expire_all_but_newest(store)
    alive = [record.v for record in store.log() if is_live(store.head().record, record.v)]
    seen = set()

    def look(_call: Any) -> None:
        for hint in (None, 0, before, before + 3, store.latest_version(), 10**6):
            frozen = files.fork()
            if hint is None:
                frozen.store.pop(f"{NEAR}/{hint_key()}", None)
            else:
                frozen.pipe_file(f"{NEAR}/{hint_key()}", canonical_json(Hint(hint)))
            copy = near(frozen)
            version = copy.latest_version()
            seen.add(version)
            assert value_of(copy) == (1 if version == before else 11)
            assert copy.poll(held) is None or version > before

    held = store.internals.log.read(before)
    assert held is not None
    Relay(store, place(FaultyFileSystem(files, on_call=look))).advance()

    assert min(alive) > before + 5
    assert seen == {before, *alive}


def test_a_look_ends_though_the_source_goes_on_and_makes_room_on_its_way(
    store: Store, files: IsolatedMemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that was faster kept a look, and with it all trimming and every report, from its end."""
    monkeypatch.setattr("cnr_store.relay.relay._MANY", 3)
    save(store, 1)
    watched = FaultyFileSystem(files)
    relay = Relay(near(watched, FAR), place(files), policy=RetentionPolicy(keep_last=1), grace_s=0)
    relay.advance()
    goal = save(store, 2, 3, kind="baseline")[-1]
    stop, reports = threading.Event(), list[RelayReport]()

    def go_on(call: Any) -> None:
        if "_segment.json.zst" in call.path and not stop.is_set():
            with store.writer() as writer:  # One version for each that is copied.
                writer.restore()
                with writer.begin(store.head().record.step + 1, kind="baseline") as txn:
                    txn.write_table("t", np.full((ROWS, DIM), 9, np.float32), options=TableOptions(scale=1.0))

    def on_report(report: RelayReport) -> None:
        reports.append(report)
        if len(reports) == 2:
            stop.set()
        if len(reports) == 3:
            halt.set()

    halt = threading.Event()
    watched._on_call = go_on
    relay.run(10**6, stop=halt, on_report=on_report)  # It waits for nothing while the source is ahead.

    assert [report.version == report.source_version for report in reports] == [False, False, True]
    assert all(report.trimmed_segments > 0 for report in reports[:2])
    assert reports[0].version is not None
    assert reports[0].version >= goal
    assert reports[0].staleness_s is not None
    assert near(files).head() == store.head()


def fails_within(times: int, ask: Callable[[], object], why: str) -> int:
    """The number of the call that first raises, which one of so many does."""
    for number in range(1, times + 1):
        try:
            ask()
        except CorruptStore as error:
            if why not in error.message:
                raise
            return number
    pytest.fail(f"{times} calls without an error")


def test_a_source_that_is_another_one_now_is_noticed(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """A store in the place of the source whose log is shorter looked like a source without news, for ever."""
    save(store, 1)
    backup = dict(files.store)
    save(store, 2)
    relay = Relay(store, place(files))
    relay.advance()
    for key in [key for key in files.store if key.startswith(FAR)]:
        del files.store[key]
    files.store.update(backup)

    assert fails_within(100, relay.advance, "restored from a backup") > 2
    assert fails_within(1, relay.advance, "restored from a backup") == 1


def test_a_reader_notices_that_its_relay_was_begun_anew(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """One that begins behind what a reader has seen looked like a relay without news, for ever."""
    save(store, 1)
    Relay(store, place(files)).advance()
    reader = near(files)
    seen = reader.head()
    assert all(reader.poll(seen) is None for _ in range(100))
    save(store, 2, 3)
    place(files).delete([stat.key for stat in place(files).list_objects("")])
    Relay(store, place(files)).advance()

    assert fails_within(100, lambda: reader.poll(seen), "created again") > 2
    assert fails_within(1, lambda: reader.poll(seen), "created again") == 1
    assert value_of(near(files)) == 3


def test_an_identity_that_was_altered_is_not_copied(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    right = store.storage.read(IDENTITY)
    assert right is not None
    for wrong in (
        right[:-9],
        right.replace(b"created_ms", b"created_mz"),
        right.replace(b"verified", b"unsafe_single_writer"),
    ):
        store.storage.put(IDENTITY, wrong)
        with pytest.raises(CorruptStore, match=r"cnr\.json"):
            Relay(store, place(files)).advance()
    store.storage.delete([IDENTITY])
    with pytest.raises(MissingObject):
        Relay(store, place(files)).advance()
    assert place(files).read(IDENTITY) is None


def test_damage_at_the_source_is_not_copied(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    relay = Relay(store, place(files))
    relay.advance()
    served = near(files).latest_version()
    save(store, 2)
    segment = store.head().record.chain[-1].seg
    chunk = next(stat.key for stat in store.storage.list_objects(f"{DATA}{segment}") if ".codes/c/" in stat.key)
    right = store.storage.read(chunk)
    assert right is not None
    for damaged in (right[:-1], bytes([right[0] ^ 1]) + right[1:]):
        store.storage.put(chunk, damaged)
        with pytest.raises(CorruptObject):
            relay.advance()
    store.storage.delete([chunk])
    with pytest.raises(MissingObject):
        relay.advance()

    assert near(files).latest_version() == served + 1  # The writer's fence; what it saved is not whole.
    assert value_of(near(files)) == 1
    store.storage.put(chunk, right)
    assert relay.advance().version == store.latest_version()
    assert value_of(near(files)) == 2


def test_damage_that_a_newer_version_left_behind_is_passed_over(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """A relay stood still for as long as a damaged version was live, also behind `repair_store`."""
    save(store, 1)
    relay = Relay(store, place(files))
    relay.advance()
    damaged, _ = save(store, 2, 3)
    segment = store.head().record.chain[-2].seg
    chunk = next(stat.key for stat in store.storage.list_objects(f"{DATA}{segment}") if ".codes/c/" in stat.key)
    store.storage.put(chunk, b"rot" + (store.storage.read(chunk) or b"")[3:])
    with pytest.raises(CorruptObject):
        relay.advance()
    assert value_of(near(files)) == 1

    repair_store(store, dry_run=False)
    (following,) = save(store, 4)
    report = relay.advance()

    assert report.version == store.latest_version()
    assert report.problem is not None
    assert segment in report.problem
    copy = near(files)
    assert copy.head() == store.head()
    assert value_of(copy, following) == 4
    with pytest.raises(VersionExpired):
        copy.snapshot(damaged)
    assert chunk not in [stat.key for stat in place(files).list_objects(DATA)]
    assert relay.advance().problem is None


def test_a_manifest_that_is_not_the_one_the_record_names_is_not_copied(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    save(store, 1)
    key = f"{DATA}{store.head().record.chain[0].seg}/_segment.json.zst"
    manifest = store.storage.read(key)
    assert manifest is not None
    store.storage.put(key, manifest + b" ")

    with pytest.raises(CorruptObject, match="another sha256"):
        Relay(store, place(files)).advance()
    assert place(files).read(IDENTITY) is None


def test_an_interrupted_copy_is_taken_up_and_what_is_wrong_in_it_put_anew(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    save(store, 1)
    Relay(store, place(files)).advance()
    save(store, 2, kind="baseline")
    segment = store.head().record.chain[0].seg
    objects = [stat.key for stat in store.storage.list_objects(f"{DATA}{segment}") if stat.key.count("/") > 2]
    target = place(files)
    for key in objects[:3]:
        target.put(key, store.storage.read(key) or b"")
    target.put(objects[0], b"\0" * len(store.storage.read(objects[0]) or b""))

    report = Relay(store, place(files)).advance()

    assert report.reused_objects == 2
    assert bytes_of(near(files).snapshot()) == bytes_of(store.snapshot())


def test_the_newest_version_is_mended_when_a_relay_is_started(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    Relay(store, place(files)).advance()
    target = place(files)
    target.delete([stat.key for stat in target.list_objects(DATA)])
    with pytest.raises(MissingObject):
        near(files).snapshot()

    report = Relay(store, place(files)).advance()

    assert (report.versions, report.segments) == (0, 1)
    assert value_of(near(files)) == 1


# ---- what is let go


def test_what_no_version_that_is_kept_needs_goes_after_the_grace(store: Store, files: IsolatedMemoryFileSystem) -> None:
    clock = Clock()
    versions = save(store, 1)
    policy = RetentionPolicy(keep_last=2)
    relay = Relay(store, place(files), policy=policy, clock_ms=clock)
    relay.advance()
    versions += save(store, 2, 3, 4, kind="baseline")
    kept = relay.advance()

    copy = near(files)
    assert kept.trimmed_segments == 0
    assert [value_of(copy, version) for version in versions] == [1, 2, 3, 4]
    clock.ms += DAY_MS - 1
    assert relay.advance().trimmed_segments == 0
    clock.ms += 1
    # Another process: it knows from the notes since when they are pending delete.
    report = Relay(store, place(files), policy=policy, clock_ms=clock).advance()
    assert report.trimmed_segments == 2
    assert report.trimmed_bytes > 0
    assert [value_of(copy, version) for version in versions[2:]] == [3, 4]
    for version in versions[:2]:
        with pytest.raises(VersionExpired, match="does not have version"):
            copy.snapshot(version)
        assert value_of(store, version)
    assert len(copy.storage.list_folders(DATA)) == 2
    assert verify_store(copy, every=True, deep=True).is_sound
    assert relay.advance().trimmed_segments == 0


def test_a_snapshot_that_outlives_the_grace_says_so(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    relay = Relay(store, place(files), policy=RetentionPolicy(keep_last=1), grace_s=0)
    relay.advance()
    open_snapshot = near(files).snapshot()
    save(store, 2, kind="baseline")
    relay.advance()

    with pytest.raises(VersionExpired, match="does not have version"):
        open_snapshot.table("t").read()


def test_an_object_that_is_missing_in_a_segment_that_is_held_is_damage(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    (version,) = save(store, 1)
    relay = Relay(store, place(files), start=version)
    relay.advance()
    save(store, 2)
    relay.advance()
    target = place(files)
    chunks = [stat.key for stat in target.list_objects(DATA) if ".codes/c/" in stat.key]
    target.delete(chunks)

    with pytest.raises(MissingObject):
        near(files).snapshot(version).table("t").read()


def test_leases_cursors_tags_and_channels_keep_versions_at_the_relay(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    (leased, passed, pointed) = save(store, 1, 2, 3, kind="baseline")
    relay = Relay(store, place(files), start=leased, policy=RetentionPolicy(keep_last=1), grace_s=0)
    store.set_channel("serving", pointed)
    copy = near_after(relay, files, Relay(store, place(files), start=leased))
    with copy.lease(leased):
        save(store, 4, 5, kind="baseline")
        relay.advance()
        assert [value_of(copy, version) for version in (leased, pointed)] == [1, 3]
        with pytest.raises(VersionExpired):
            copy.snapshot(passed)
        with pytest.raises(VersionExpired):
            copy.lease(passed)
        with pytest.raises(VersionExpired):
            copy.register_cursor("eu", passed)
    copy.register_cursor("eu", store.latest_version())
    held = store.latest_version()
    save(store, 6, 7, kind="baseline")
    report = relay.advance()
    assert report.trimmed_segments == 1
    assert [value_of(copy, version) for version in (pointed, held)] == [3, 5]
    with pytest.raises(VersionExpired):
        copy.snapshot(leased)
    assert copy.snapshot(channel="serving").version == pointed


def near_after(relay: Relay, files: IsolatedMemoryFileSystem, patient: Relay) -> Store:
    """The relay's readers, once ``patient`` has copied everything and nothing was let go yet."""
    patient.advance()
    assert relay.version is None
    return near(files)


def test_a_channel_that_moves_back_is_followed(store: Store, files: IsolatedMemoryFileSystem) -> None:
    versions = save(store, 1, kind="baseline")
    relay = Relay(store, place(files), policy=RetentionPolicy(keep_last=1), grace_s=0)
    relay.advance()
    versions += save(store, 2, 3, kind="baseline")
    relay.advance()
    copy = near(files)
    with pytest.raises(VersionExpired):
        copy.snapshot(versions[0])

    store.set_channel("serving", versions[0])
    report = relay.advance()

    assert report.segments == 1
    assert value_of(copy, copy.channels()["serving"]) == 1
    save(store, 4, kind="baseline")
    relay.advance()
    assert copy.snapshot(channel="serving").version == versions[0]
    Relay(store, place(files), policy=RetentionPolicy(keep_last=1), grace_s=0).advance()
    assert copy.snapshot(channel="serving").table("t").read()[0, 0] == 1


def test_a_new_relay_begins_with_what_channels_name(store: Store, files: IsolatedMemoryFileSystem) -> None:
    versions = save(store, 1, 2, 3, kind="baseline")
    store.set_channel("serving", versions[0])

    report = Relay(store, place(files), policy=RetentionPolicy(keep_last=1), grace_s=0).advance()

    copy = near(files)
    assert report.segments == 2
    assert copy.snapshot(channel="serving").table("t").read()[0, 0] == 1
    assert value_of(copy) == 3
    with pytest.raises(VersionExpired):
        copy.snapshot(versions[1])


def test_holds_that_cannot_be_read_stop_the_trimming_and_nothing_else(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    save(store, 1)
    relay = Relay(store, place(files), policy=RetentionPolicy(keep_last=1), grace_s=0)
    relay.advance()
    place(files).put("leases/readers/x.json", b"{")
    save(store, 2, kind="baseline")

    report = relay.advance()

    assert report.version == store.latest_version()
    assert report.trimmed_segments == 0
    assert report.problem is not None
    assert "x.json" in report.problem
    place(files).delete(["leases/readers/x.json"])
    save(store, 3)
    assert relay.advance().trimmed_segments == 1


def test_a_full_target_makes_room_before_it_copies(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """What was due was deleted behind a copy alone, so that a full disk stayed full."""
    clock = Clock()
    save(store, 1)
    oldest = store.head().record.chain[0].seg
    target = FaultyFileSystem(files)
    relay = Relay(store, place(target), policy=RetentionPolicy(keep_last=1), clock_ms=clock)
    relay.advance()
    save(store, 2, kind="baseline")
    relay.advance()
    clock.ms += DAY_MS
    save(store, 3, kind="baseline")

    def refuse(call: Any) -> None:
        if call.operation == "write" and DATA in call.path and oldest in place(files).list_folders(DATA):
            raise OSError(errno.ENOSPC, "no space left on device")

    target._on_call = refuse
    with pytest.raises(StorageFailure):
        relay.advance()
    report = relay.advance()

    assert report.version == store.latest_version()
    assert value_of(near(files)) == 3


def test_what_could_not_be_deleted_is_deleted_by_the_next_look(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """It waited for the next version of the source."""
    save(store, 1)
    target = FaultyFileSystem(files)
    relay = Relay(store, place(target), policy=RetentionPolicy(keep_last=1), grace_s=0)
    relay.advance()
    save(store, 2, kind="baseline")

    def refuse(call: Any) -> None:
        if call.operation == "delete":
            raise OSError(errno.EIO, "no")

    target._on_call = refuse
    assert relay.advance().problem is not None
    assert relay.advance().problem is not None
    target._on_call = None
    report = relay.advance()

    assert report.problem is None
    assert len(place(files).list_folders(DATA)) == 1
    assert relay.advance() == RelayReport(relay.version, relay.version, staleness_s=0.0)


def test_what_dead_readers_and_relays_left_goes(store: Store, tmp_path: Path) -> None:
    """Garbage collection is refused at a relay, so nothing ever deleted their leases and half-written files."""
    clock = Clock()
    clock.ms = wall_ms()
    save(store, 1)
    relay = Relay(store, str(tmp_path), fsync=False, clock_ms=clock, grace_s=0)
    relay.advance()
    place_there = open_storage(str(tmp_path))
    with Store.open(str(tmp_path)) as copy:
        copy.lease()
        copy.lease(ttl_s=10**8)
        copy.register_cursor("dead", copy.latest_version(), ttl_s=1)
        copy.register_cursor("alive", copy.latest_version())
    folder = tmp_path / DATA / store.head().record.chain[0].seg
    for name, age_s in (("old", 10**5), ("young", 0)):
        (folder / f"{TEMPORARY_PREFIX}{name}").write_bytes(b"half")
        os.utime(folder / f"{TEMPORARY_PREFIX}{name}", (time.time() - age_s,) * 2)
    clock.ms += 2 * DAY_MS
    save(store, 2)
    relay.advance()

    assert len(read_leases(place_there)) == 1
    assert read_cursors(place_there).keys() == {"alive"}
    assert [path.name for path in folder.iterdir() if path.name.startswith(TEMPORARY_PREFIX)] == [
        f"{TEMPORARY_PREFIX}young"
    ]


def test_what_another_relay_is_copying_is_left_alone(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    policy = RetentionPolicy(keep_last=1)
    Relay(store, place(files)).advance()
    save(store, 2, 3, kind="baseline")
    target = place(files)
    half = f"{0:020d}-{7:032x}"
    target.put(f"{DATA}{half}/r00000-00000000/x", b"half a copy")
    target.put(RELAY_TRIMS, canonical_json(RelayTrims(pending_delete={half: 1})))

    Relay(store, target, policy=policy, grace_s=3600).advance()
    assert target.list_folders(DATA).count(half) == 1
    Relay(store, target, policy=policy, grace_s=0).advance()
    assert target.list_folders(DATA).count(half) == 0


def test_a_relay_that_trims_nothing_keeps_everything(store: Store, files: IsolatedMemoryFileSystem) -> None:
    versions = save(store, 1)
    relay = Relay(store, place(files), trims=False, grace_s=0, policy=RetentionPolicy(keep_last=1))
    relay.advance()
    versions += save(store, 2, 3, kind="baseline")
    relay.advance()

    assert [value_of(near(files), version) for version in versions] == [1, 2, 3]
    assert place(files).read(RELAY_TRIMS) is None


def test_a_relay_that_trims_nothing_does_not_grow(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """It remembered every version that it had copied, and read all of them again when it was started."""
    versions = save(store, 1)
    store.set_channel("serving", versions[0])
    relay = Relay(store, place(files), trims=False)
    relay.advance()
    versions += save(store, *range(2, 12), kind="baseline")
    relay.advance()
    target = FaultyFileSystem(files)
    another = Relay(store, place(target), trims=False)
    another.advance()

    for one in (relay, another):
        assert set(one._copied._versions) <= {versions[0], store.latest_version()}
        assert len(one._copied._entries) <= 2
        assert len(one._copied.present) <= 2
    assert len(target.calls) < 12
    save(store, 12)
    assert another.advance().segments == 1


# ---- what a relay refuses


def test_nobody_writes_to_a_relay(store: Store, files: IsolatedMemoryFileSystem) -> None:
    (version,) = save(store, 1)
    store.tag("good", version)
    store.fork("trial")
    Relay(store, place(files)).advance()
    copy = near(files)
    before = {stat.key: stat.modified_ms for stat in copy.storage.list_objects("")}

    for refused in (
        lambda: copy.writer(),
        lambda: copy.tag("x"),
        lambda: copy.untag("good"),
        lambda: copy.set_channel("x"),
        lambda: copy.drop_channel("x"),
        lambda: copy.rollback(copy.latest_version()),
        lambda: copy.fork("x"),
        lambda: copy.on_branch("trial"),
        lambda: copy.drop_branch("trial"),
        lambda: Store.open_on(place(files), branch="trial"),
        lambda: compact(copy),
        lambda: collect_garbage(copy, dry_run=True),
        lambda: collect_garbage(copy, dry_run=False),
        lambda: maintain(copy),
        lambda: repair_store(copy, dry_run=False),
    ):
        with pytest.raises(ReadOnlyStore, match="relay"):
            refused()  # type: ignore[no-untyped-call]
    assert {stat.key: stat.modified_ms for stat in copy.storage.list_objects("")} == before


def test_monitors_and_checks_take_a_relay_for_the_one_log_that_it_is(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    (version,) = save(store, 1)
    save(store.fork("trial", version), 5)
    save(store, 2, kind="baseline")
    store.tag("good", version)
    Relay(store, place(files)).advance()
    copy = near(files)

    status = read_status(copy)
    report = verify_store(copy, every=True, deep=True)

    assert copy.branches() == {}
    assert [(head.branch, head.version) for head in status.heads] == [(None, store.latest_version())]
    assert status.segments == 1
    assert report.is_sound, report.problems
    assert version not in report.versions
    assert store.latest_version() in report.restorable
    with pytest.raises(VersionExpired, match="does not have version"):
        verify_store(copy, version=version)  # It had no problems.
    place(files).delete([stat.key for stat in place(files).list_objects(DATA)][:1])
    assert not verify_store(copy).is_sound


def test_versions_are_found_by_step_and_time_from_where_the_relay_begins(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    import datetime as dt

    versions = save(store, 1, 2, 3)
    Relay(store, place(files), start=versions[1]).advance()
    copy = near(files)
    at = [dt.datetime.fromtimestamp((store.record(v).ts_ms + 0.5) / 1000, dt.UTC) for v in versions]

    assert copy.snapshot(step=2).version == versions[1]
    assert copy.snapshot(time=at[1]).version == versions[1]
    assert copy.snapshot(time=at[2]).version == versions[2]
    with pytest.raises(VersionExpired, match="from version"):
        copy.snapshot(time=at[0])
    with pytest.raises(VersionNotFound, match="begins at version"):
        copy.snapshot(step=1)
    with pytest.raises(VersionExpired, match="at the source"):
        copy.record(versions[0])
    with pytest.raises(VersionNotFound, match="no version 99"):
        copy.record(99)


def test_a_place_that_holds_something_else_is_refused(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    other = Store.create_on(place(files, "/other"), threads=1)
    save(other, 7)

    with pytest.raises(StoreExists, match="not a relay"):
        Relay(store, place(files, "/other")).advance()
    Relay(other, place(files)).advance()
    with pytest.raises(CorruptStore, match="belongs to store"):
        Relay(store, place(files)).advance()
    with pytest.raises(BadInput, match="both"):
        Relay(store, place(files, FAR))
    with pytest.raises(BadInput, match="grace_s"):
        Relay(store, place(files), grace_s=-1)
    assert value_of(near(files)) == value_of(other) == 7


def test_a_source_whose_log_was_rewritten_is_not_followed(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    backup = files.fork()
    save(store, 2)
    Relay(store, place(files)).advance()
    with Store.open_on(place(backup, FAR), threads=1) as restored:
        with pytest.raises(CorruptStore, match="restored from a backup"):
            Relay(restored, place(files)).advance()
        save(restored, 3)
        with pytest.raises(CorruptStore, match="rewritten or restored"):
            Relay(restored, place(files)).advance()
    assert value_of(near(files)) == 2


@pytest.mark.parametrize(
    ("change", "error"),
    [({"first": 0}, r"first"), ({"store_uuid": "0" * 32}, "two stores were mixed"), ({"first": "x"}, "parsed")],
)
def test_a_marker_that_cannot_be_one_is_damage(
    store: Store, files: IsolatedMemoryFileSystem, change: dict[str, Any], error: str
) -> None:
    save(store, 1)
    Relay(store, place(files)).advance()
    target = place(files)
    marker = msgspec.json.decode(target.read(RELAY) or b"")
    target.put(RELAY, msgspec.json.encode({**marker, **change}))

    with pytest.raises(CorruptStore, match=error):
        near(files)


def test_a_store_that_lost_position_0_is_no_relay(store: Store) -> None:
    save(store, 1)
    store.storage.delete([commit_key(0)])

    assert near_of(store).relay is None


def near_of(store: Store) -> Store:
    return Store.open_on(store.storage, threads=1)


def test_the_marker_names_the_source_without_credentials(files: IsolatedMemoryFileSystem, store: Store) -> None:
    save(store, 1)
    Relay(store, place(files)).advance()
    marker = near(files).relay

    assert marker is not None
    assert marker.source == store.url
    assert (marker.store_uuid, marker.branch, marker.first) == (store.uuid, "", store.latest_version())


# ---- whoever follows a relay


def test_a_loader_follows_a_relay_through_all_that_happens_at_the_source(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    """Trimmed as hard as can be: what a loader wants next may be gone, and then it goes to what is there."""
    truth: dict[int, Any] = {}

    def note() -> None:
        head = store.head().record
        for version in range(1, head.v + 1):
            if version not in truth and is_live(head, version) and store.record(version).chain:
                truth[version] = store.snapshot(version).table("t").read()

    first = save(store, 1)[0]
    store.set_channel("serving", first)
    note()
    relay = Relay(store, place(files), policy=RetentionPolicy(keep_last=1), grace_s=0)
    relay.advance()
    newest, pointed, staged = Loader(near(files)), Loader(near(files), channel="serving"), Loader(near(files))
    loaders = [newest, pointed, Loader(near(files), publish="apply", options=LoaderOptions(holds="codes"))]
    seen: list[int] = []
    events: list[Callable[[], object]] = [
        lambda: save(store, 2, 3),
        lambda: compact(store),
        lambda: expire_all_but_newest(store),
        lambda: save(store, *range(4, 16), kind="baseline"),
        lambda: store.set_channel("serving", store.latest_version()),
        lambda: store.rollback(save(store, 20, 21, 22, kind="baseline")[0]),
        lambda: store.fork("trial"),
        lambda: (save(store, 30, 31, kind="baseline"), expire_all_but_newest(store)),
        lambda: (save(store, 32), repair_store(store, dry_run=False)),
        lambda: store.set_channel("serving"),
        lambda: save(store, 40),
    ]
    for event in events:
        event()
        note()
        relay.advance()
        for loader in loaders:
            outcome = loader.poll()
            loader.apply()
            assert outcome.error is None
            assert np.array_equal(loader.lookup("t", np.arange(ROWS)), truth[loader.version])
        assert newest.version == near(files).latest_version() == store.latest_version()
        assert pointed.version == store.channels()["serving"]
        seen.append(newest.version)
    assert seen == sorted(seen)

    let_go, _ = save(store, 50, 51, kind="baseline")
    note()
    relay.advance()
    assert newest.poll().error is None
    assert staged.poll().error is None  # It slept through everything; all that it knew is gone here.
    assert np.array_equal(staged.lookup("t", np.arange(ROWS)), truth[store.latest_version()])
    with pytest.raises(VersionExpired, match="does not have version"):
        newest.pin(let_go)
    assert newest.version == store.latest_version()
    for loader in (*loaders, staged):
        loader.close()


def test_a_loader_keeps_serving_while_its_relay_is_damaged_or_gone(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    save(store, 1)
    relay = Relay(store, place(files))
    relay.advance()
    with Loader(near(files)) as loader:
        save(store, 2)
        relay.advance()
        target = place(files)
        segment = store.head().record.chain[-1].seg
        held = {stat.key: target.read(stat.key) or b"" for stat in target.list_objects(f"{DATA}{segment}")}
        target.delete(held)
        gone = loader.poll()
        assert isinstance(gone.error, CorruptStore)
        assert loader.lookup("t", [0]).tolist() == [[1] * DIM]

        Relay(store, place(files)).advance()  # Copies again what the newest version lacks.
        assert loader.poll().error is None
        assert loader.lookup("t", [0]).tolist() == [[2] * DIM]
        assert {stat.key: target.read(stat.key) for stat in target.list_objects(f"{DATA}{segment}")} == held


# ---- two at once, and again and again


def test_two_relays_of_one_target_do_no_harm(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    policy = RetentionPolicy(keep_last=1)
    relays = [Relay(near(files, FAR), place(files), policy=policy, grace_s=0) for _ in range(2)]
    gate, errors = threading.Barrier(3), list[BaseException]()

    def work(relay: Relay) -> None:
        for _ in range(6):
            gate.wait(30)
            try:
                relay.advance()
            except BaseException as error:  # noqa: BLE001  told by the test
                errors.append(error)
            gate.wait(30)

    threads = [threading.Thread(target=work, args=(relay,)) for relay in relays]
    for thread in threads:
        thread.start()
    for value in range(2, 8):
        gate.wait(30)  # Both look, and copy, while the next version is saved.
        save(store, value, kind="baseline" if value % 2 else None)
        gate.wait(30)
    for thread in threads:
        thread.join()
    assert [str(error) for error in errors] == []
    for relay in relays:
        relay.advance()
    assert near(files).head() == store.head()
    assert same_objects(store, near(files), COMMITS, DATA)
    assert verify_store(near(files), deep=True).is_sound


def test_a_run_looks_until_it_is_stopped_and_outlives_failures(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    stop, reports = threading.Event(), list[RelayReport]()
    record = store.storage.read(commit_key(store.latest_version()))
    assert record is not None
    torn = store.latest_version() + 1
    relay = Relay(store, place(files))

    def on_report(report: RelayReport) -> None:
        reports.append(report)
        if len(reports) == 1:
            store.storage.put(commit_key(torn), b"{")
        elif len(reports) == 2:
            store.storage.delete([commit_key(torn)])
            save(store, 2)
        else:
            stop.set()

    relay.run(0.001, stop=stop, on_report=on_report)

    assert [report.problem is None for report in reports] == [True, False, True]
    assert reports[1].version == torn - 1
    assert reports[1].staleness_s is not None
    assert reports[1].staleness_s > 0
    assert reports[2].delay_s is not None
    assert value_of(near(files)) == 2
    with pytest.raises(BadInput):
        relay.run(0)


def test_a_cap_on_the_bandwidth_is_kept(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    relay = Relay(store, place(files), bytes_per_s=10**6)
    waited: list[float] = []
    relay._throttle._sleep = waited.append  # type: ignore[method-assign,assignment]

    report = relay.advance()

    assert sum(waited) >= 0.5 * (report.bytes - 20_000) / 10**6
    with pytest.raises(BadInput):
        Relay(store, place(files), bytes_per_s=0)


def test_errors_of_a_relay_name_its_source(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    Relay(store, place(files)).advance()
    with pytest.raises(CnrStoreError) as caught:
        near(files).writer()

    assert store.url in str(caught.value)
    assert sha256(place(files).read(IDENTITY) or b"") == sha256(store.storage.read(IDENTITY) or b"")


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((150_000, 64)).astype(np.float32)
    with Store.create(str(tmp_path / "far"), fsync=False, threads=2) as store:
        with store.writer() as writer, writer.begin(1) as txn:
            txn.write_table("t", values, options=TableOptions.exact())
        relay = Relay(store, str(tmp_path / "near"), fsync=False)
        tracemalloc.start()
        try:
            report = relay.advance()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert report.bytes > 30 * 2**20
    assert peak < report.bytes / 2


def test_an_identity_that_was_cut_on_its_way_is_no_other_store(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """A short reply of the target's ``cnr.json`` was told as a store that is no relay, which nobody tries again."""
    save(store, 1)
    Relay(store, place(files)).advance()
    fs = FaultyFileSystem(files)
    relay = Relay(store, place(fs))
    fs.arm(Fault(FaultKind.SHORT_READ, at=0))

    with pytest.raises(CorruptStore, match=IDENTITY):
        relay.advance()
    save(store, 2)

    assert relay.advance().version == store.latest_version()
