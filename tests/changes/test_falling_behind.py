"""Streams that read more slowly than a store is compacted and deleted, and catch up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cnr_store import BadInput, CompactionPolicy, CorruptStore, RetentionPolicy, Store, collect_garbage, maintain
from cnr_store.changes import ChangeCursor, catch_up, changes
from cnr_store.errors import BadShape, BranchNotFound, CursorExpired
from cnr_store.format.layout import commit_key
from cnr_store.maintenance.compaction import compact_run
from cnr_store.store import open_segment
from tests.changes.streams import EXACT, Array, begin, compact_all, expire, opened, save, told
from tests.support.change_copy import ChangeCopy, content_of
from tests.support.faulty import IsolatedMemoryFileSystem


def test_a_stream_that_follows_tells_what_lands_and_ends_when_it_is_closed(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    first = begin(store)
    _, reader = opened(files)
    landed: list[tuple[int, int]] = []
    arrived = threading.Semaphore(0)
    stream = changes(reader, first, follow=True, poll_interval_s=0.001)

    def follow() -> None:
        for batch in stream:
            landed.append((batch["version"][0].as_py(), batch.num_rows))
            arrived.release()

    thread = threading.Thread(target=follow)
    thread.start()
    versions = []
    for rows in ([1, 2], [3], [4, 5, 6]):
        versions += save(store, rows)
        assert arrived.acquire(timeout=60)
    stream.close()
    thread.join(60)

    assert not thread.is_alive()
    assert landed == list(zip(versions, [2, 1, 3], strict=True))
    assert stream.cursor is not None
    assert stream.cursor.version >= versions[-2]
    assert list(stream) == []


def test_a_closed_stream_ends_its_batches_but_finishes_a_whole_version(store: Store) -> None:
    begin(store)
    save(store, [1])

    batches = changes(store, max_batch_rows=3)
    next(batches)
    batches.close()
    assert list(batches) == []
    assert batches.cursor is None

    stream = changes(store, max_batch_rows=3, follow=True)
    counts = []
    for version in stream.versions():
        next(version.batches)
        stream.close()
        counts.append(sum(batch.num_rows for batch in version.batches))
    assert counts == [5]
    assert stream.cursor == ChangeCursor.at(store, store.latest_version())


@pytest.mark.parametrize("follow", [False, True])
def test_a_stream_does_not_wait_for_a_record_that_was_deleted(
    files: IsolatedMemoryFileSystem, store: Store, follow: bool
) -> None:
    first = begin(store)
    *_, last = save(store, [1], [2], [3])
    files.rm_file(f"/root/{commit_key(last - 1)}")
    stream = changes(store, since=first, follow=follow)

    with pytest.raises(CorruptStore, match=f"position {last - 1} is empty"):
        told(stream)


def test_a_branch_that_is_dropped_ends_its_followers(store: Store) -> None:
    begin(store)
    with store.fork("trial") as branch:
        stream = changes(branch, 0, follow=True, poll_interval_s=0.001)
        store.drop_branch("trial")
        with pytest.raises(BranchNotFound, match="dropped"):
            next(stream)


def test_an_expired_cursor_is_refused_and_catches_up_by_comparing(store: Store) -> None:
    begin(store)
    (version,) = save(store, [1])
    copy = ChangeCopy()
    held = store.snapshot(version).table("t").read()
    for batch in changes(store):
        copy.apply(batch)
    save(store, [2], [3])
    compact_all(store)
    expire(store)

    with pytest.raises(CursorExpired, match="catch_up") as caught:
        list(changes(store, version))
    differences = catch_up(store, {"t": held})
    assert differences.cursor is None
    batches = list(differences)
    for batch in batches:
        copy.apply(batch)

    assert caught.value.version == version
    assert [batch["row_id"].to_pylist() for batch in batches] == [[2, 3]]
    assert copy.tables == content_of(store.snapshot(), slots=False)
    assert differences.cursor == ChangeCursor.at(store, store.latest_version())
    assert list(changes(store, differences.cursor)) == []


def test_a_version_that_expired_costs_nothing_while_its_chain_goes_on(store: Store) -> None:
    first = begin(store)
    save(store, [1], [2])
    (last,) = save(store, [3])
    expire(store)

    assert told(changes(store, first)) == [(last, "t", "upsert", [1, 2, 3])]


def test_deltas_that_were_compacted_are_told_from_the_compacted_segment(store: Store) -> None:
    first = begin(store)
    save(store, [1], [2], [3])
    compact_run(store, run=(1, 4), force=True)
    expire(store)
    (last,) = save(store, [4])

    stories = told(changes(store, first))

    assert sorted(row for _, _, _, rows in stories for row in rows) == [1, 2, 3, 4]
    assert stories[-1] == (last, "t", "upsert", [4])


def test_a_compacted_delta_that_goes_while_it_is_told_is_made_up_for(store: Store) -> None:
    dims = {"t": 2, "u": 3}  # of two shapes, so they share no arrays

    def both(*rows: int) -> Callable[[Any], None]:
        def write(txn: Any) -> None:
            for table, dim in dims.items():
                txn.write_rows(table, np.asarray(rows), np.full((len(rows), dim), rows[0], np.float32))

        return write

    with store.writer() as writer, writer.begin(10) as txn:
        for table, dim in dims.items():
            txn.write_table(table, np.zeros((8, dim), np.float32), options=EXACT)
    first, *compacted = save(store, both(1), both(2, 4), both(3, 6))
    store.tag("kept", first)
    compact_run(store, run=(1, 4), force=True)
    collect_garbage(store, policy=RetentionPolicy(1), dry_run=False)
    assert told(changes(store, first)) == [
        (store.latest_version() - 1, "t", "upsert", [2, 3, 4, 6]),
        (store.latest_version() - 1, "u", "upsert", [2, 3, 4, 6]),
    ]

    for version in compacted:
        reader = open_segment(store, version)
        lists = [part.add for part in reader.manifest.parts if part.table == "u" and part.add is not None]
        folders = [f"data/{reader.name}/{array.path}/" for one in lists for array in one.arrays.values()]
        store.storage.delete([stat.key for folder in folders for stat in store.storage.list_objects(folder)])

    assert told(changes(store, first)) == [
        (store.latest_version() - 1, "t", "upsert", [2, 3, 4, 6]),
        (store.latest_version() - 1, "u", "upsert", [1, 2, 3, 4, 6]),  # what the two ends alone tell
    ]


def test_registered_cursors_make_maintenance_wait(store: Store) -> None:
    begin(store)
    stream = changes(store, cursor="lake")
    list(stream)
    assert stream.cursor is not None
    held = stream.cursor.version
    save(store, [1], [2], [3], [4])
    policy = CompactionPolicy(max_chain=1)

    for _ in range(2):
        maintain(store, compaction=policy, retention=RetentionPolicy(1), grace_s=0, orphan_age_s=0, force=True)
    assert store.cursors()["lake"].version == held
    going_on = changes(store, stream.cursor, cursor="lake")
    assert sorted(row for _, _, _, rows in told(going_on) for row in rows) == [1, 2, 3, 4]
    assert store.cursors()["lake"].version == store.latest_version()

    expire(store)
    with pytest.raises(CursorExpired):
        list(changes(store, stream.cursor))


def test_a_cursor_is_renewed_while_a_version_is_taken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(store)
    save(store, [1])
    registered: list[int] = []
    register = Store.register_cursor

    def registering(self: Store, name: str, version: int, *, ttl_s: float | None = None) -> Any:
        registered.append(version)
        return register(self, name, version, ttl_s=ttl_s)

    monkeypatch.setattr(Store, "register_cursor", registering)
    stream = changes(store, cursor="slow", ttl_s=1000, max_batch_rows=1)
    next(stream)
    head = store.latest_version()
    assert registered == [head]
    for expected in (2, 3):
        stream._registered._at_s -= 400
        next(stream)
        next(stream)
        assert registered == [head] * expected
    assert len(list(stream)) == 3
    assert registered == [head] * 3


def test_a_cursor_is_registered_before_the_first_snapshot_is_read(store: Store) -> None:
    begin(store)
    stream = changes(store, cursor="lake", max_batch_rows=2)
    next(stream)
    held = store.cursors()["lake"].version
    save(store, [1], [2])
    compact_all(store)
    expire(store)

    copy = ChangeCopy()
    for batch in stream:
        copy.apply(batch)

    assert len(copy.tables["t"]) == 6
    assert stream.cursor == ChangeCursor.at(store, held)
    assert store.cursors()["lake"].version == held


@pytest.mark.parametrize("has_since", [False, True])
def test_a_cursor_is_registered_before_the_first_version_comes(store: Store, has_since: bool) -> None:
    """The version from which a consumer continues has to be kept until it has continued; a later one is not enough."""
    first = begin(store)
    (second,) = save(store, [1])

    next(changes(store, first if has_since else None, cursor="lake").versions())

    assert store.cursors()["lake"].version == (first if has_since else second)


def test_a_cursor_is_registered_where_nothing_was_saved_yet(store: Store) -> None:
    assert list(changes(store, cursor="lake")) == []
    assert store.cursors()["lake"].version == store.latest_version()


@pytest.mark.parametrize("follow", [False, True])
def test_a_first_version_that_expires_before_it_is_held_is_not_told(
    files: IsolatedMemoryFileSystem, store: Store, follow: bool
) -> None:
    first = begin(store)
    _, reader = opened(files)
    stream = changes(reader, follow=follow, poll_interval_s=0.001, cursor="lake")
    stream._begin()  # it knows the head by now
    save(store, [1], [2])
    collect_garbage(store, policy=RetentionPolicy(keep_last=1), dry_run=False)  # its segments stay for a while

    version = next(stream.versions())

    assert version.version > first
    assert store.cursors()["lake"].version == version.version
    assert told(version.batches)[0][2:] == ("upsert", list(range(8)))
    stream.close()


def test_a_version_that_expires_before_it_is_read_is_passed_by(files: IsolatedMemoryFileSystem, store: Store) -> None:
    first = begin(store)
    save(store, [1])
    _, reader = opened(files)
    stream = changes(reader, first, follow=True, poll_interval_s=0.001)
    stream._begin()  # it knows the head by now
    save(store, [2], [3])
    compact_run(store, run=(1, 4), force=True)
    expire(store)
    end = threading.Timer(10, stream.close)  # a stream that passes it by would wait for the next one
    end.start()

    batch = next(stream)

    assert batch["row_id"].to_pylist() == [1, 2, 3]
    end.cancel()
    stream.close()


def test_a_version_that_expires_while_it_is_told_is_said_to_be_partial(
    files: IsolatedMemoryFileSystem, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cnr_store.changes.table_rows.LEAST_ROWS", 2)
    monkeypatch.setattr("cnr_store.changes.table_rows.WINDOW_BYTES", 1)
    begin(store)
    _, reader = opened(files)
    stream = changes(reader, max_batch_rows=1)
    next(stream)
    save(store, [2], [3])
    compact_all(store)
    expire(store)

    with pytest.raises(CursorExpired, match="part of a state"):
        list(stream)
    with pytest.raises(CursorExpired, match="part of a state"):
        list(stream)
    assert stream.cursor is None
    assert sum(batch.num_rows for batch in changes(reader)) == 8


def test_catching_up_takes_copies_in_every_form(store: Store) -> None:
    def more(txn: Any) -> None:
        txn.create_table("h", dim=1, options=EXACT)
        txn.write_rows("h", np.asarray([-3, 5]), np.asarray([[1.0], [2.0]], np.float32))
        half = np.asarray([[1.0, 2.0], [3.0, 4.0]], np.float32).view(np.uint32)
        txn.write_table("b", (half >> 16).astype(np.uint16))

    begin(store, rows=5)
    save(store, more, [4])
    dense = np.zeros((9, 2), np.float32)
    halves = np.asarray([[1.0, 2.0], [3.0, 5.0]], np.float32)
    keys, values = np.asarray([5, -3, 8]), np.asarray([[2.0], [0.0], [1.0]], np.float32)
    expected = [
        ("b", "upsert", [1]),
        ("gone", "delete", [0, 1, 2]),
        ("h", "upsert", [-3]),
        ("h", "delete", [8]),
        ("t", "upsert", [4]),
        ("t", "delete", [5, 6, 7, 8]),
    ]

    def keyed(first: int, last: int) -> tuple[Array, Array]:
        chosen = (keys >= first) & (keys <= last)
        return keys[chosen], values[chosen]

    gone = np.zeros((3, 7), np.float32)
    arrays = {"t": dense, "b": halves, "h": (keys, values), "gone": gone}
    bits = (halves.view(np.uint32) >> 16).astype(np.uint16)
    on_demand = {"t": lambda start, stop: dense[start:stop], "b": bits, "h": keyed, "gone": lambda a, b: gone[a:b]}
    for held in (arrays, on_demand):
        assert [one[1:] for one in told(catch_up(store, held))] == expected
    assert [one[1:] for one in told(catch_up(store, {}, tables=["b"]))] == [("b", "upsert", [0, 1])]


def test_slots_of_a_copy_are_compared_too(store: Store) -> None:
    with store.writer() as writer, writer.begin(10) as txn:
        txn.write_table("t", np.zeros((3, 2), np.float32), slots={"m": np.arange(3, dtype="f4")}, options=EXACT)
    values, slot = np.zeros((3, 2), np.float32), np.asarray([0, 1, 5], np.float32)

    (batch,) = catch_up(store, {"t": {"values": values, "m": slot}})

    assert (batch["row_id"].to_pylist(), batch["slot_m"].to_pylist()) == ([2], [2.0])
    assert list(catch_up(store, {"t": values})) == []
    with pytest.raises(BadInput, match="values"):
        list(catch_up(store, {"t": {"m": slot}}))
    with pytest.raises(BadShape):
        list(catch_up(store, {"t": {"values": values, "m": slot[:2]}}))
    with pytest.raises(BadInput, match="twice"):
        list(catch_up(store, {"t": (np.asarray([1, 1]), values[:2])}))


def test_catching_up_registers_before_it_reads(store: Store) -> None:
    begin(store)

    list(catch_up(store, {}, cursor="lake"))

    assert store.cursors()["lake"].version == store.latest_version()
