"""What a relay deletes, what it keeps, and for whom."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cnr_store import RetentionPolicy, StorageFailure, Store, verify_store
from cnr_store.errors import MissingObject, VersionExpired
from cnr_store.format.documents import canonical_json
from cnr_store.format.layout import DATA, RELAY_TRIMS
from cnr_store.format.records import RelayTrims
from cnr_store.log.clock import wall_ms
from cnr_store.log.leases import read_cursors, read_leases
from cnr_store.relay.relay import Relay
from cnr_store.relay.report import RelayReport
from cnr_store.storage import open_storage
from cnr_store.storage.base import TEMPORARY_PREFIX
from tests.relay.relays import DAY_MS, Clock, near, near_after, place, save, value_of
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem


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
    assert verify_store(copy, all_versions=True, deep=True).is_sound
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
    chunks = [stat.key for stat in target.list_objects(DATA) if ".codes/c." in stat.key]
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
    """Regression: due segments were deleted only after a copy, so that a full disk stayed full."""
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


def trimmed_to_one(store: Store, files: IsolatedMemoryFileSystem) -> list[int]:
    """Save twice; a relay has copied both versions, and has deleted the first."""
    versions = save(store, 1)
    policy = RetentionPolicy(keep_last=1)
    Relay(store, place(files)).advance()
    versions += save(store, 2, kind="baseline")
    Relay(store, place(files), policy=policy, grace_s=0).advance()
    with pytest.raises(VersionExpired):
        value_of(near(files), versions[0])
    return versions


def test_what_another_relay_copied_for_a_channel_is_kept(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """A relay that was started again knew only the versions of its notes, and deleted this one's segments."""
    first, _ = trimmed_to_one(store, files)
    store.set_channel("serving", first)
    Relay(store, place(files), trims=False).advance()
    assert value_of(near(files), first) == 1

    for _ in range(2):
        Relay(store, place(files), policy=RetentionPolicy(keep_last=1), grace_s=0).advance()

    assert value_of(near(files), first) == 1


def test_what_a_channel_names_while_it_is_deleted_is_copied_again(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    versions = save(store, 1)
    Relay(store, place(files)).advance()
    save(store, 2, kind="baseline")

    def name(call: Call) -> None:
        if call.operation == "delete" and DATA in call.path and not store.channels():
            store.set_channel("serving", versions[0])
            Relay(store, place(files), trims=False).advance()

    deletes = place(FaultyFileSystem(files, on_call=name))
    Relay(store, deletes, policy=RetentionPolicy(keep_last=1), grace_s=0).advance()

    assert near(files).channels() == {"serving": versions[0]}
    assert value_of(near(files), versions[0]) == 1


def test_what_another_relay_deleted_is_copied_for_a_rollback(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """A relay with a longer policy took the segments for present: its newest version lacked them."""
    versions = save(store, 1)
    relay = Relay(store, place(files))
    relay.advance()
    save(store, 2, kind="baseline")
    relay.advance()
    Relay(store, place(files), policy=RetentionPolicy(keep_last=1), grace_s=0).advance()
    store.rollback(versions[0])
    relay.advance()

    assert value_of(near(files)) == 1
