"""Change streams: what comes when, where the cursor is, what a version costs, and what becomes of those left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from cnr_store import (
    BadInput,
    CompactionPolicy,
    Conflict,
    CorruptStore,
    RetentionPolicy,
    StorageFailure,
    Store,
    TableOptions,
    Unsupported,
    collect_garbage,
    maintain,
)
from cnr_store.changes import ChangeCursor, ChangeStream, catch_up, changes, recorded_cursor, write_ipc, write_parquet
from cnr_store.errors import BadShape, BranchNotFound, CursorExpired, TableNotFound, VersionNotFound
from cnr_store.format.layout import commit_key
from cnr_store.maintenance.compaction import compact_run
from cnr_store.storage import storage_from_filesystem
from cnr_store.store import open_segment
from cnr_store.types import Rectangle
from tests.support.change_copy import ChangeCopy, content_of
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.rectangles import Model, Parts, schema_of

Array = np.ndarray[Any, Any]
Told = list[tuple[int, str, str, list[int]]]
EXACT = TableOptions.exact()


@pytest.fixture
def files() -> IsolatedMemoryFileSystem:
    return IsolatedMemoryFileSystem()


@pytest.fixture
def store(files: IsolatedMemoryFileSystem) -> Iterator[Store]:
    with Store.create_on(storage_from_filesystem(files, "/root"), threads=1) as made:
        yield made


def opened(files: IsolatedMemoryFileSystem, on_call: Callable[[Call], None] | None = None) -> tuple[Any, Store]:
    fs = FaultyFileSystem(files, on_call=on_call)
    return fs, Store.open_on(storage_from_filesystem(fs, "/root"), threads=1)


def begin(store: Store, rows: int = 8, table: str = "t", *, options: TableOptions = EXACT, step: int = 10) -> int:
    """A full; returns its version."""
    with store.writer() as writer:
        with writer.begin(step, "baseline") as txn:
            txn.write_table(table, np.zeros((rows, 2), np.float32), options=options)
        return writer.head.record.v


def save(store: Store, *saves: Any, table: str = "t", step: int = 20) -> list[int]:
    """A delta for each list of rows, or for what a function does to a transaction; returns their versions."""
    versions = []
    with store.writer() as writer:
        writer.restore()
        for number, rows in enumerate(saves):
            with writer.begin(step + number) as txn:
                if callable(rows):
                    rows(txn)
                else:
                    values = np.full((len(rows), 2), step + number, np.float32)
                    txn.write_rows(table, np.asarray(rows, np.int64), values)
            versions.append(writer.head.record.v)
    return versions


def told(batches: Iterator[pa.RecordBatch] | Sequence[pa.RecordBatch]) -> Told:
    """Version, table, kind and row ids, joined where they are cut into batches."""
    found: Told = []
    for batch in batches:
        rows = zip(batch["op"].to_pylist(), batch["row_id"].to_pylist(), strict=True)
        for op, row in rows:
            key = (batch["version"][0].as_py(), batch["table"][0].as_py(), op)
            if not found or found[-1][:3] != key:
                found.append((*key, []))
            found[-1][3].append(row)
    return found


def expire(store: Store, keep_last: int = 1) -> None:
    collect_garbage(store, policy=RetentionPolicy(keep_last), grace_s=0, orphan_age_s=0, dry_run=False, force=True)


def compact_all(store: Store) -> None:
    compact_run(store, run=(0, len(store.head().record.chain)), force=True)


# ---- what comes, and in which order


def test_every_version_behind_the_cursor_is_told_in_order(store: Store) -> None:
    first = begin(store)
    second, third = save(store, [1, 5], [2])

    assert told(changes(store, first)) == [(second, "t", "upsert", [1, 5]), (third, "t", "upsert", [2])]
    assert told(changes(store, second)) == [(third, "t", "upsert", [2])]
    assert told(changes(store, third)) == []


def test_without_a_cursor_the_newest_snapshot_comes_whole(store: Store) -> None:
    begin(store)
    save(store, [1, 5])

    stream = changes(store, max_batch_rows=3)
    batches = list(stream)

    assert [batch["row_id"].to_pylist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert stream.cursor == ChangeCursor.at(store, store.latest_version())


def test_an_empty_store_has_no_changes_and_a_cursor_all_the_same(store: Store) -> None:
    stream = changes(store)

    assert list(stream) == []
    assert stream.cursor == ChangeCursor.at(store, 0)

    version = begin(store, rows=2)
    assert told(changes(store, stream.cursor)) == [(version, "t", "upsert", [0, 1])]


def test_tables_come_in_order_and_only_those_asked_for(store: Store) -> None:
    begin(store)

    def two_more(txn: Any) -> None:
        txn.write_table("a", np.ones((1, 3), np.float32), options=EXACT)
        txn.write_table("z", np.ones((1, 1), np.float32), options=EXACT)
        txn.write_rows("t", np.asarray([4]), np.ones((1, 2), np.float32))

    (version,) = save(store, two_more)

    assert [table for _, table, _, _ in told(changes(store, version - 1))] == ["a", "t", "z"]
    assert told(changes(store, version - 1, tables=["z"])) == [(version, "z", "upsert", [0])]
    with pytest.raises(TableNotFound, match="nobody"):
        next(changes(store, version - 1, tables=["nobody"]))
    with pytest.raises(TableNotFound, match="nobody"):
        next(changes(store, tables=["nobody"]))


def test_slots_come_when_they_are_asked_for(store: Store) -> None:
    with store.writer() as writer:
        with writer.begin(10) as txn:
            txn.write_table("t", np.zeros((3, 2), np.float32), slots={"m": np.zeros(3, np.float32)}, options=EXACT)
        with writer.begin(20) as txn:
            rows = np.asarray([1])
            txn.write_rows("t", rows, np.zeros((1, 2), np.float32), slots={"m": np.ones(1, np.float32)})

    (batch,) = changes(store, 2, slots=True)

    assert batch["row_id"].to_pylist() == [1]
    assert batch["slot_m"].to_pylist() == [1.0]
    assert "slot_m" not in next(changes(store, 2)).schema.names


def test_what_leaves_the_state_alone_tells_nothing_and_the_cursor_goes_past_it(store: Store) -> None:
    begin(store)
    (version, *_) = save(store, [1], [2], [3])[-1:]
    store.tag("good")
    compact_all(store)
    store.set_channel("prod")

    stream = changes(store, version)

    assert list(stream) == []
    assert stream.cursor == ChangeCursor.at(store, store.latest_version())


def test_a_rollback_tells_the_rows_that_differ_as_they_are_at_its_target(store: Store) -> None:
    begin(store)
    target, *_, last = save(store, [1], [2, 3], [3, 4])
    store.rollback(target)

    (batch,) = changes(store, last)

    assert batch["row_id"].to_pylist() == [2, 3, 4]
    assert batch["values"].to_pylist() == [[0.0, 0.0]] * 3
    assert set(batch["step"].to_pylist()) == {20}


def test_keys_of_a_part_that_was_abandoned_are_deleted(store: Store) -> None:
    def create(txn: Any) -> None:
        txn.create_table("h", dim=2, options=EXACT)
        txn.write_rows("h", np.asarray([-5, 7]), np.ones((2, 2), np.float32))

    begin(store)
    keys = [-(2**63), 7, 2**63 - 1]
    target, last = save(store, create, lambda txn: txn.write_rows("h", np.asarray(keys), np.full((3, 2), 9.0, "f4")))
    rolled_back = store.rollback(target)

    assert told(changes(store, last)) == [
        (rolled_back, "h", "delete", [-(2**63)]),
        (rolled_back, "h", "upsert", [7]),
        (rolled_back, "h", "delete", [2**63 - 1]),
    ]


def test_a_full_tells_the_rows_that_differ(store: Store) -> None:
    begin(store)
    before = store.latest_version()
    with store.writer() as writer, writer.begin(30, "baseline") as txn:
        values = np.zeros((9, 2), np.float32)
        values[[2, 6]] = 1
        values[3] = -0.0
        txn.write_table("t", values, options=EXACT)

    assert told(changes(store, before)) == [(store.latest_version(), "t", "upsert", [2, 3, 6, 8])]


def test_resized_dropped_and_other_tables(store: Store) -> None:
    begin(store, rows=5)
    shrunk, grown, dropped = save(
        store,
        lambda txn: txn.resize_table("t", 2),
        lambda txn: txn.resize_table("t", 4),
        lambda txn: (txn.drop_table("t"), txn.write_table("u", np.ones((1, 2), np.float32), options=EXACT)),
    )
    begin(store, rows=1, table="u")
    with store.writer() as writer, writer.begin(40, "baseline") as txn:
        txn.write_table("u", np.ones((2, 3), np.float32), options=EXACT)

    assert told(changes(store, shrunk - 1))[:4] == [
        (shrunk, "t", "delete", [2, 3, 4]),
        (grown, "t", "upsert", [2, 3]),
        (dropped, "t", "delete", [0, 1, 2, 3]),
        (dropped, "u", "upsert", [0]),
    ]
    last = list(changes(store, store.latest_version() - 1))
    assert [(batch.schema.field("values").type.list_size, batch.num_rows) for batch in last] == [(3, 2)]


def test_a_row_that_is_deleted_from_a_dense_table_is_told_as_what_reading_it_gives(store: Store) -> None:
    begin(store, options=TableOptions.exact())
    _, version = save(store, [1, 2], lambda txn: txn.delete_rows("t", np.asarray([2])))

    (batch,) = changes(store, version - 1)

    assert (batch["op"].to_pylist(), batch["values"].to_pylist()) == (["upsert"], [[0.0, 0.0]])


def test_column_shards_are_read_as_whole_rows(files: IsolatedMemoryFileSystem, store: Store) -> None:
    halves = ((0, 3), (3, 8))
    parts = Parts(store, Model(schema_of(40, 8, row_slot=True), halves), 7)
    tiles = [Rectangle((0, 40), columns) for columns in halves]
    parts.save(tiles, full=True)
    first = store.latest_version()
    for _ in range(3):
        parts.save(tiles)

    copy, averaged = ChangeCopy(), ChangeCopy()
    for batch in changes(store, first - 1):
        copy.apply(batch)
    for batch in changes(store, first - 1, slots=True, slots_rule="mean"):
        averaged.apply(batch)

    assert copy.tables == content_of(store.snapshot(), slots=False)
    assert averaged.tables.keys() == copy.tables.keys()
    with pytest.raises(Unsupported, match="slots_rule"):
        list(changes(store, first - 1, slots=True))


# ---- cursors


def test_the_cursor_moves_when_the_consumer_comes_back_behind_a_versions_last_batch(store: Store) -> None:
    first = begin(store)
    second, third = save(store, [1, 5], [2])
    stream = changes(store, first, max_batch_rows=1)

    seen = []
    for batch in stream:
        assert stream.cursor is not None
        seen.append((batch["version"][0].as_py(), stream.cursor.version))

    assert seen == [(second, second - 1), (second, second - 1), (third, second)]  # behind the writer's fence
    assert stream.cursor == ChangeCursor.at(store, third)


def test_a_consumer_that_dies_anywhere_goes_on_from_its_cursor(store: Store) -> None:
    begin(store)
    save(store, [1, 5], [2, 3, 4], [5], lambda txn: txn.resize_table("t", 3))
    store.rollback(4)
    expected = content_of(store.snapshot(), slots=False)
    count = len(list(changes(store, 1, max_batch_rows=1)))

    for dies_at in range(count):
        copy = ChangeCopy()
        stream = changes(store, 1, max_batch_rows=1)
        for _ in range(dies_at):
            copy.apply(next(stream))
        assert stream.cursor is not None
        for batch in changes(store, ChangeCursor.from_json(stream.cursor.to_json())):
            copy.apply(batch)
        assert copy.tables == expected, dies_at


def test_versions_are_taken_as_a_whole_or_refused(store: Store) -> None:
    first = begin(store)
    second, third = save(store, [1, 5], [2])

    stream = changes(store, first)
    assert [(one.version, one.step, len(list(one.batches))) for one in stream.versions()] == [
        (second, 20, 1), (third, 21, 1),
    ]  # fmt: skip
    with pytest.raises(BadInput, match="not taken"):
        list(changes(store, first).versions())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"store":"x","branch":"","version":-1}', '{"version":3}', b"\xff"])
def test_what_is_no_cursor_is_refused(text: Any) -> None:
    with pytest.raises(BadInput, match="no cursor"):
        ChangeCursor.from_json(text)


def test_cursors_of_other_stores_and_branches_are_refused(store: Store) -> None:
    begin(store)
    other = Store.create_on(storage_from_filesystem(IsolatedMemoryFileSystem(), "/root"), threads=1)
    with other, pytest.raises(BadInput, match=other.uuid):
        changes(other, ChangeCursor.at(store, 2))
    with store.fork("trial") as branch:
        with pytest.raises(BadInput, match="branch"):
            changes(branch, ChangeCursor.at(store, 0))
        save(branch, [3])
        assert told(changes(branch, ChangeCursor.at(branch, 0))) == [(branch.latest_version(), "t", "upsert", [3])]
    with pytest.raises(VersionNotFound, match="99"):
        next(changes(store, 99))


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_rows": 0}, {"max_batch_rows": 2.5}, {"poll_interval_s": 0}, {"poll_interval_s": "1s"},
        {"tables": "t"}, {"slots_rule": "any"}, {"since": 1.5}, {"since": True}, {"since": "3"},
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_meant_are_refused(store: Store, options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        changes(store, **options)


# ---- what it costs


def test_rows_that_a_delta_sets_are_read_from_it_alone(files: IsolatedMemoryFileSystem, store: Store) -> None:
    raw = TableOptions(encoding="raw")
    begin(store, options=raw)
    first, second = save(store, [1, 5], [2])
    baseline = store.record(second).chain[0].seg
    fs, reader = opened(files)

    assert told(changes(reader, first)) == [(second, "t", "upsert", [2])]

    assert [path for path in fs.paths("read") if baseline in path and not path.endswith("_segment.json.zst")] == []


def test_what_the_next_versions_need_again_is_kept(files: IsolatedMemoryFileSystem, store: Store) -> None:
    first = begin(store)
    save(store, [1], [2], [3])
    fs, reader = opened(files)

    list(changes(reader, first))

    chunks = [path for path in fs.paths("read") if "/data/" in path]
    assert len(chunks) == len(set(chunks))


MEMORY = """
import resource, sys
from cnr_store import Store
from cnr_store.changes import changes
from cnr_store.changes import table_rows
table_rows.WINDOW_BYTES = 2 << 20
def consume(url):
    with Store.open(url, threads=1) as store:
        return sum(batch.nbytes for batch in changes(store))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
consume(sys.argv[1])
before = peak()
print(consume(sys.argv[2]), peak() - before)
"""


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    sizes = {"small": 1_000, "large": 400_000}
    for name, rows in sizes.items():
        with Store.create(str(tmp_path / name), fsync=False) as store:
            begin(store, options=TableOptions(scale=0.01))
            with store.writer() as writer, writer.begin(20, "baseline") as txn:
                values = np.zeros((rows, 64), np.float32)
                values[:, 0] = np.arange(rows) % 1000
                txn.write_table("t", values, options=TableOptions(scale=0.01))

    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *(str(tmp_path / name) for name in sizes)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    sys.stdout.write(done.stdout)
    told_bytes, more_bytes = map(int, done.stdout.split())

    assert told_bytes > 100e6
    assert more_bytes < 0.6 * told_bytes


def test_a_look_that_finds_nothing_is_one_request(files: IsolatedMemoryFileSystem, store: Store) -> None:
    version = begin(store)
    looks = threading.Semaphore(0)
    fs, reader = opened(files, on_call=lambda _call: looks.release())
    stream = changes(reader, version, follow=True, poll_interval_s=0.001)
    thread = threading.Thread(target=list, args=(stream,))

    thread.start()
    for _ in range(40):
        assert looks.acquire(timeout=60)
    stream.close()
    thread.join(60)

    assert not thread.is_alive()
    waiting = [call.path for call in fs.calls[-20:]]
    assert set(waiting) == {waiting[0]}
    assert waiting[0].endswith(f"commits/{version + 1:020d}.json")


def test_with_a_mirror_a_version_costs_what_it_changes(files: IsolatedMemoryFileSystem, store: Store) -> None:
    first = begin(store)
    second, third = save(store, [1, 5], [2])
    baseline = store.record(third).chain[0].seg
    fs, reader = opened(files)
    stream = changes(reader, first, mirror="memory")

    assert told([next(stream)]) == [(second, "t", "upsert", [1, 5])]
    seen = len(fs.calls)
    assert told([next(stream)]) == [(third, "t", "upsert", [2])]
    assert next(stream, None) is None

    assert [call.path for call in fs.calls[seen:] if baseline in call.path] == []


def test_a_mirror_tells_of_every_kind_of_change_what_the_store_does(store: Store) -> None:
    def hashed(txn: Any) -> None:
        txn.create_table("h", dim=2, options=EXACT)
        txn.write_rows("h", np.asarray([-5, 7]), np.ones((2, 2), np.float32))

    begin(store)
    save(
        store, [1, 5], hashed, lambda txn: txn.delete_rows("h", np.asarray([7])), lambda txn: txn.resize_table("t", 3),
        lambda txn: txn.resize_table("t", 6), lambda txn: txn.delete_rows("t", np.asarray([1])),
    )  # fmt: skip
    compact_all(store)
    store.rollback(5)
    with store.writer() as writer, writer.begin(40, "baseline") as txn:
        txn.write_table("t", np.ones((4, 2), np.float32), options=EXACT)
        txn.drop_table("h")

    plain, mirrored = (list(changes(store, 1, mirror=mirror)) for mirror in ("none", "memory"))  # type: ignore[arg-type]

    copies = []
    for batches in (plain, mirrored):
        copy = ChangeCopy()
        states = {}
        for batch in batches:
            copy.apply(batch)
            states[batch["version"][0].as_py()] = copy.copy().tables
        copies.append(states)
    assert copies[0] == copies[1]
    assert list(copies[0].values())[-1] == content_of(store.snapshot(), slots=False)
    with pytest.raises(BadInput, match="slots"):
        changes(store, mirror="memory", slots=True)


def test_a_mirror_knows_what_was_consumed_when_the_store_no_longer_does(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    begin(store)
    _, reader = opened(files)
    mirrored, plain = (
        changes(reader, follow=True, poll_interval_s=0.001, mirror=mirror)  # type: ignore[arg-type]
        for mirror in ("memory", "none")
    )
    for stream in (mirrored, plain):
        assert next(stream).num_rows == 8
    values = np.zeros((8, 2), np.float32)
    values[6] = 1
    with store.writer() as writer, writer.begin(30, "baseline") as txn:
        txn.write_table("t", values, options=EXACT)
    expire(store)

    assert told([next(mirrored)])[0][2:] == ("upsert", [6])
    with pytest.raises(CursorExpired):
        next(plain)


# ---- following


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


def test_a_stream_that_is_closed_within_a_version_ends_its_batches_and_not_a_whole_version(store: Store) -> None:
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


# ---- those left behind


def test_a_cursor_that_was_overtaken_is_told_so_and_catches_up_by_comparing(store: Store) -> None:
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


def test_deltas_that_were_compacted_on_the_way_are_told_from_what_they_were_compacted_into(store: Store) -> None:
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
def test_a_cursor_is_registered_where_the_stream_begins_before_a_version_comes(store: Store, has_since: bool) -> None:
    """What a consumer goes on from has to stay until it has gone on: a version behind it is not enough."""
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


def test_a_version_that_expires_while_it_is_told_is_said_to_be_part_of_a_state(
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


# ---- catching up


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


# ---- files


def rows_of(folder: Path) -> ChangeCopy:
    """What the Parquet files replay to, by version."""
    copy = ChangeCopy()
    for path in sorted(folder.glob("*/*.parquet"), key=lambda path: path.name):
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            copy.apply(batch)
    return copy


def test_a_recording_that_is_killed_anywhere_goes_on_without_gap_or_repetition(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store)
    save(store, [1, 5], [2], lambda txn: txn.write_table("u", np.ones((2, 3), np.float32), options=EXACT))
    whole = tmp_path / "whole"
    report = write_parquet(changes(store), whole, max_file_bytes=1)
    assert report.cursor == recorded_cursor(whole) == ChangeCursor.at(store, store.latest_version())

    rename = Path.rename
    for dies_at in range(12):
        folder = tmp_path / f"killed-{dies_at}"
        left = [dies_at]

        def dying(path: Path, target: Path, left: list[int] = left) -> Path:
            if left[0] == 0:
                raise OSError("killed")
            left[0] -= 1
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", dying)
        try:
            write_parquet(changes(store, recorded_cursor(folder)), folder, max_file_bytes=1)
        except StorageFailure:
            pass
        monkeypatch.setattr(Path, "rename", rename)
        save(store, [3])
        write_parquet(changes(store, recorded_cursor(folder)), folder)

        assert rows_of(folder).tables == content_of(store.snapshot(), slots=False)
        assert not list(folder.rglob("*.part"))
        again = write_parquet(changes(store, recorded_cursor(folder)), folder)
        assert (again.versions, again.files) == (0, 0)


def test_a_recording_whose_stream_is_closed_within_a_version_has_all_of_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store)
    stream = changes(store, max_batch_rows=3, follow=True)
    write = pyarrow.parquet.ParquetWriter.write_batch

    def closing(writer: Any, batch: pa.RecordBatch) -> None:
        stream.close()
        write(writer, batch)

    monkeypatch.setattr(pyarrow.parquet.ParquetWriter, "write_batch", closing)
    report = write_parquet(stream, tmp_path)

    assert (report.versions, report.rows) == (1, 8)
    assert report.cursor == recorded_cursor(tmp_path) == ChangeCursor.at(store, store.latest_version())
    assert rows_of(tmp_path).tables == content_of(store.snapshot(), slots=False)


def test_folders_of_something_else_are_refused(store: Store, tmp_path: Path) -> None:
    first = begin(store)
    save(store, [1])
    folder = tmp_path / "out"
    write_parquet(changes(store), folder)

    with pytest.raises(BadInput, match="recorded_cursor"):
        write_parquet(changes(store), folder)
    with pytest.raises(BadInput, match="recorded_cursor"):
        write_parquet(changes(store, first), folder)
    with pytest.raises(BadInput, match="ipc"):
        write_ipc(changes(store, recorded_cursor(folder)), folder)
    (folder / "__recording.json").unlink()
    with pytest.raises(BadInput, match="another folder"):
        write_parquet(changes(store), folder)
    (folder / "__recording.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read"):
        recorded_cursor(folder)


def test_a_recording_goes_on_with_the_tables_and_slots_that_it_has(store: Store, tmp_path: Path) -> None:
    begin(store)
    save(store, [1], [], lambda txn: txn.write_table("u", np.ones((2, 3), np.float32), options=EXACT))
    write_parquet(changes(store, tables=["t"]), tmp_path)
    save(store, [2])

    for others in ({}, {"tables": ["t", "u"]}, {"tables": ["t"], "slots": True}):
        stream = changes(store, recorded_cursor(tmp_path), **others)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="tables"):
            write_parquet(stream, tmp_path)
    assert write_parquet(changes(store, recorded_cursor(tmp_path), tables=("t",)), tmp_path).rows == 1


@pytest.mark.parametrize(
    "held", [5, np.float32(1), (np.asarray([1.5]), np.ones((1, 4))), (np.asarray([[1]]), np.ones((1, 4)))]
)
def test_what_cannot_be_a_copy_is_refused(store: Store, held: Any) -> None:
    begin(store)

    with pytest.raises(BadInput, match="copy of table 't'"):
        list(catch_up(store, {"t": held}))


def test_a_copy_without_an_end_is_refused(store: Store) -> None:
    begin(store)

    with pytest.raises(BadInput, match="no end"):
        list(catch_up(store, {"t": lambda start, stop: np.zeros((stop - start, 3), np.float32)}))


def test_a_full_disk_leaves_nothing_of_the_version_and_is_told_as_what_it_is(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store)

    def full(*_arguments: Any) -> None:
        raise OSError("no space left")

    close = pyarrow.parquet.ParquetWriter.close

    def still_full(writer: Any) -> None:
        close(writer)
        raise OSError("nor for the end of the file")

    for call in ("write_batch", "close"):
        with monkeypatch.context() as patch:
            patch.setattr(pyarrow.parquet.ParquetWriter, "close", still_full)
            if call == "write_batch":
                patch.setattr(pyarrow.parquet.ParquetWriter, "write_batch", full)
            with pytest.raises(StorageFailure, match="no space" if call == "write_batch" else "nor for"):
                write_parquet(changes(store), tmp_path)
        assert not list(tmp_path.glob("*/*"))
    write_parquet(changes(store), tmp_path)
    assert rows_of(tmp_path).tables == content_of(store.snapshot(), slots=False)


def test_two_recordings_of_one_folder_do_not_mix(store: Store, tmp_path: Path) -> None:
    begin(store)
    folder = tmp_path / "out"
    stream = changes(store)

    def meanwhile(_recorded: Any) -> None:
        with pytest.raises(Conflict, match="another process"):
            write_parquet(changes(store, recorded_cursor(folder)), folder)

    assert write_parquet(stream, folder, on_version=meanwhile).versions == 1


def test_ipc_files_can_be_mapped(store: Store, tmp_path: Path) -> None:
    begin(store)
    write_ipc(changes(store), tmp_path)

    (path,) = tmp_path.glob("t/*.arrow")
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
        assert table["row_id"].to_pylist() == list(range(8))
        del table


def test_a_stream_is_what_changes_returns(store: Store) -> None:
    with changes(store) as stream:
        assert isinstance(stream, ChangeStream)
        assert stream.store is store
    assert list(stream) == []
