"""What a relay does about versions that are deleted, damaged or replaced at its source."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from cnr_store import CorruptStore, RetentionPolicy, Store, TableOptions, repair_store, verify_store
from cnr_store.errors import CorruptObject, MissingObject, VersionExpired
from cnr_store.format.commit_record import is_live
from cnr_store.format.documents import canonical_json
from cnr_store.format.layout import DATA, IDENTITY, hint_key
from cnr_store.format.records import Hint
from cnr_store.relay.relay import Relay
from cnr_store.relay.report import RelayReport
from tests.relay.relays import DIM, FAR, NEAR, ROWS, expire_all_but_newest, fails_within, near, place, save, value_of
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.snapshot_bytes import bytes_of


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
            relay.stop()

    watched._on_call = go_on
    relay.run(poll_interval_s=10**6, on_report=on_report)  # It waits for nothing while the source is ahead.

    assert [report.version == report.source_version for report in reports] == [False, False, True]
    assert all(report.trimmed_segments > 0 for report in reports[:2])
    assert reports[0].version is not None
    assert reports[0].version >= goal
    assert reports[0].staleness_s is not None
    assert near(files).head() == store.head()


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
    """Regression: a relay that begins after a reader's version seemed to have no news, forever."""
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
    chunk = next(stat.key for stat in store.storage.list_objects(f"{DATA}{segment}") if ".codes/c." in stat.key)
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
    """Regression: a relay stopped while a damaged version was live, also after `repair_store`."""
    save(store, 1)
    relay = Relay(store, place(files))
    relay.advance()
    damaged, _ = save(store, 2, 3)
    segment = store.head().record.chain[-2].seg
    chunk = next(stat.key for stat in store.storage.list_objects(f"{DATA}{segment}") if ".codes/c." in stat.key)
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


def test_an_identity_that_was_cut_on_its_way_is_no_other_store(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """Regression: a cut reply for ``cnr.json`` was reported as a store that is no relay, which is not retried."""
    save(store, 1)
    Relay(store, place(files)).advance()
    fs = FaultyFileSystem(files)
    relay = Relay(store, place(fs))
    fs.arm(Fault(FaultKind.SHORT_READ, at=0))

    with pytest.raises(CorruptStore, match=IDENTITY):
        relay.advance()
    save(store, 2)

    assert relay.advance().version == store.latest_version()
