"""What a relay is to its readers: which calls it refuses, and loaders that follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import (
    BadInput,
    CorruptStore,
    RetentionPolicy,
    Store,
    collect_garbage,
    compact,
    maintain,
    read_status,
    repair_store,
    verify_store,
)
from cnr_store.errors import ReadOnlyStore, StoreExists, VersionExpired, VersionNotFound
from cnr_store.format.commit_record import is_live
from cnr_store.format.layout import DATA, RELAY, commit_key
from cnr_store.relay.relay import Relay
from cnr_store.serving import Loader, LoaderOptions
from tests.relay.relays import DIM, FAR, ROWS, expire_all_but_newest, near, place, save, value_of
from tests.support.faulty import IsolatedMemoryFileSystem


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
    report = verify_store(copy, all_versions=True, deep=True)

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


def test_a_loader_follows_a_relay_through_all_that_happens_at_the_source(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    """With the strictest trimming the next version may be deleted; then a loader continues with an existing one."""
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
    loaders = [newest, pointed, Loader(near(files), publish="apply", options=LoaderOptions(kept_as="codes"))]
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


def test_a_loader_is_told_where_a_relay_begins(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """A regression: of a channel that moved back to an older version it said only that there is none."""
    older, newer = save(store, 1, 2)
    store.set_channel("serving", newer)
    relay = Relay(store, place(files))
    relay.advance()
    with Loader(near(files), channel="serving") as loader:
        store.set_channel("serving", older)
        relay.advance()
        error = loader.poll().error

        assert isinstance(error, VersionExpired)
        assert f"from version {newer} on" in error.message
        assert loader.version == newer
