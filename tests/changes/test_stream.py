"""Change streams: what comes when, where the cursor is, and what a version costs."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import BadInput, Store, TableOptions, Unsupported
from cnr_store.changes import ChangeCursor, ChangeStream, changes
from cnr_store.errors import CursorExpired, TableNotFound, VersionNotFound
from cnr_store.types import Rectangle
from tests.changes.streams import EXACT, begin, compact_all, expire, opened, save, told
from tests.support.change_copy import ChangeCopy, content_of
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.memory import store_in_memory
from tests.support.rectangles import Model, Parts, schema_of


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


def test_records_that_leave_the_state_alone_only_move_the_cursor(store: Store) -> None:
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


def test_a_deleted_row_of_a_dense_table_comes_as_the_fill_that_is_read(store: Store) -> None:
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


def test_the_cursor_moves_when_the_next_batch_after_a_version_is_asked_for(store: Store) -> None:
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
    other = store_in_memory()
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


def test_a_stream_is_what_changes_returns(store: Store) -> None:
    with changes(store) as stream:
        assert isinstance(stream, ChangeStream)
        assert stream.store is store
    assert list(stream) == []
