"""`repair_store` appends after damage and never overwrites it; a repaired store works like any other."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import StorageFailure, Store, repair_store, verify_store
from cnr_store.errors import CorruptObject, CorruptRecord
from cnr_store.format.commit_record import LogEntry, encode_record
from cnr_store.format.documents import pack, sha256, unpack
from cnr_store.format.layout import HINT, ROOT_GROUP, commit_key
from cnr_store.format.records import ChainEntry, CommitRecord
from cnr_store.log.log_reader import LogEnd
from cnr_store.maintenance.repair import plan_repair, read_end
from cnr_store.storage import storage_from_filesystem
from cnr_store.store.versions import Versions
from tests.maintenance.torn_stores import (
    IMPATIENT,
    ROOT,
    WRITER,
    chunk_of,
    contents,
    flip,
    open_store,
    path,
    tear,
    values,
)
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem


def test_a_sound_store_needs_nothing(files: IsolatedMemoryFileSystem, store: Store) -> None:
    before = contents(files)

    report = repair_store(store, dry_run=False)

    assert (report.actions, report.torn, report.lost, report.remaining) == ((), (), (), ())
    assert (report.target, report.newest) == (5, 5)
    assert contents(files) == before


def test_a_torn_newest_record_is_superseded_and_the_store_goes_on(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    torn = tear(files, 6)
    with pytest.raises(CorruptRecord):
        store.head()

    report = repair_store(store, dry_run=False)

    assert [(action.kind, action.version) for action in report.actions] == [("supersede", 7)]
    assert (report.torn, report.target) == ((6,), 5)
    head = store.head().record
    assert (head.v, head.kind, head.target, head.epoch) == (7, "rollback", 5, store.record(5).epoch + 1)
    assert head.parent_digest == sha256(torn)
    assert np.array_equal(store.snapshot().table("user").read(), values(30))
    assert store.tags() == {"good": 3}
    with store.writer() as writer:
        writer.restore()
        with writer.begin(step=40) as txn:
            txn.write_rows("user", np.arange(4, dtype=np.int64), values(40)[:4])
    assert np.array_equal(store.snapshot().table("user").read(), values(40))
    assert files.cat_file(path(commit_key(6))) == torn


def test_a_dry_run_says_what_would_be_done_and_does_nothing(files: IsolatedMemoryFileSystem, store: Store) -> None:
    tear(files, 6)
    before = contents(files)

    report = repair_store(store, dry_run=True)

    assert [(action.kind, action.version) for action in report.actions] == [("supersede", None)]
    assert "log position 6" in report.actions[0].message
    assert "version 5 (step 30)" in report.actions[0].message
    assert report.is_dry_run
    assert contents(files) == before


def test_a_second_repair_finds_nothing_to_do(files: IsolatedMemoryFileSystem, store: Store) -> None:
    tear(files, 6)
    flip(files, chunk_of(store, 4))
    flip(files, ROOT_GROUP)
    files.pipe_file(path(HINT), b"torn")
    first = repair_store(store, dry_run=False)
    before = contents(files)

    second = repair_store(store, dry_run=False)

    assert [action.kind for action in first.actions] == ["supersede", "hint", "root"]
    assert second.actions == ()
    assert contents(files) == before


def test_log_and_walk_leave_the_superseded_position_out(files: IsolatedMemoryFileSystem, store: Store) -> None:
    behind = store.head()
    tear(files, 6)
    repair_store(store, dry_run=False)
    store.untag("good")

    assert [record.v for record in store.log()] == [8, 7, 5, 4, 3, 2, 1, 0]
    news = store.poll(behind)
    assert news is not None
    assert news.record.v == 7
    assert store.snapshot(step=30).version == 7
    with pytest.raises(CorruptRecord):
        store.snapshot(6)


def test_a_version_is_found_by_time_past_a_superseded_position(files: IsolatedMemoryFileSystem, store: Store) -> None:
    tear(files, 6)
    repair_store(store, dry_run=False)
    for name in "ab":
        store.tag(name, 3)

    for version in (0, 1, 2, 3, 4, 5, 7, 8, 9):
        entry = store.internals.log.read(version)
        assert entry is not None
        assert Versions(store.internals).by_time(store.head(), entry.record.ts_ms).record.v == version


@pytest.mark.parametrize(("position", "newest"), [(3, 5), (5, 4), (6, 5)])
def test_no_time_finds_another_version_in_the_place_of_a_torn_one(
    files: IsolatedMemoryFileSystem, store: Store, position: int, newest: int
) -> None:
    """A torn newest record has no state.

    An older torn one is damage, which a search by time reports when it reads it.
    """
    times = {record.v: record.ts_ms for record in store.log()}
    tear(files, position)
    store = open_store(files)
    head, _ = store.internals.log.newest_readable()

    found: dict[int, int | None] = {}
    for version, ts_ms in times.items():
        try:
            found[version] = Versions(store.internals).by_time(head, ts_ms).record.v
        except CorruptRecord:
            found[version] = None

    assert (max(times), head.record.v, found[newest]) == (5, newest, newest)
    assert found.get(position) == {3: None, 5: newest, 6: None}[position]
    assert all(seen in (version, None) for version, seen in found.items() if version != position)


def test_verify_tells_of_the_superseded_position_and_finds_no_problem(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    tear(files, 6)
    assert not verify_store(store).is_sound
    repair_store(store, dry_run=False)

    report = verify_store(store, all_versions=True, deep=True)

    assert (report.problems, report.superseded) == ((), (6,))
    assert report.restorable == (7, 5, 4, 3, 2)


def test_torn_bytes_that_change_again_are_named_and_hurt_no_version(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    tear(files, 6)
    repair_store(store, dry_run=False)
    flip(files, commit_key(6))

    store.tag("next")  # a position behind, so that a reader of the two would compare
    report = verify_store(store)

    assert [(problem.path, problem.versions) for problem in report.problems] == [(commit_key(6), ())]


def test_several_torn_records_are_superseded_together(files: IsolatedMemoryFileSystem, store: Store) -> None:
    tear(files, 6)
    tear(files, 7, size=0)
    files.pipe_file(path(commit_key(8)), b"{}")

    report = repair_store(store, dry_run=False)

    assert report.torn == (6, 7, 8)
    assert store.latest_version() == 9
    assert [record.v for record in store.log(limit=2)] == [9, 5]
    assert verify_store(store, all_versions=True, deep=True).superseded == (8, 7, 6)


def test_a_good_record_that_rots_later_is_not_taken_for_a_superseded_one(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    tear(files, 6)
    repair_store(store, dry_run=False)
    flip(files, commit_key(5))

    with pytest.raises(CorruptRecord):
        list(store.log())
    report = verify_store(store)
    assert [problem.path for problem in report.problems] == [commit_key(5)]


def test_a_damaged_newest_delta_is_rolled_back(files: IsolatedMemoryFileSystem, store: Store) -> None:
    flip(files, chunk_of(store, 4))

    report = repair_store(store, dry_run=False)

    assert [(action.kind, action.version) for action in report.actions] == [("rollback", 6)]
    assert report.target == 3
    assert [(lost.version, lost.step) for lost in report.lost] == [(5, 30)]
    assert [problem.path for problem in report.remaining] == [chunk_of(store, 4)]
    assert np.array_equal(store.snapshot().table("user").read(), values(20))
    assert verify_store(store, deep=True).is_sound
    assert verify_store(store, all_versions=True, deep=True).restorable == (6, 3, 2)


def test_a_state_that_only_a_replay_finds_wrong_is_rolled_back(files: IsolatedMemoryFileSystem) -> None:
    """A forged segment: every object has its recorded digest, but the state has not."""
    with open_store(files) as store:
        entry = store.head()
        seg = entry.record.chain[-1]
        key = f"data/{seg.seg}/_segment.json.zst"
        manifest = msgspec.json.decode(unpack(files.cat_file(path(key)), key))
        manifest["parts"][0]["state_digest"] = "0" * 16
        data = pack(manifest)
        files.pipe_file(path(key), data)
        for version in (4, 5):
            read = store.internals.log.read(version)
            assert read is not None
            before = store.internals.log.read(version - 1)
            assert before is not None
            chain = (*read.record.chain[:-1], msgspec.structs.replace(read.record.chain[-1], sha256=sha256(data)))
            forged = msgspec.structs.replace(read.record, chain=chain, parent_digest=before.digest)
            files.pipe_file(path(commit_key(version)), encode_record(forged))

        report = repair_store(store, dry_run=False)

        assert (report.target, [action.kind for action in report.actions]) == (3, ["rollback"])
        assert np.array_equal(store.snapshot().table("user").read(), values(20))


def test_a_torn_record_behind_a_damaged_chain_goes_back_to_what_is_whole(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    tear(files, 6)
    flip(files, chunk_of(store, 4))

    report = repair_store(store, dry_run=False)

    assert [(action.kind, action.version) for action in report.actions] == [("supersede", 7)]
    assert store.head().record.target == 3
    assert np.array_equal(store.snapshot().table("user").read(), values(20))


def test_without_a_whole_version_nothing_is_rolled_back(files: IsolatedMemoryFileSystem, store: Store) -> None:
    flip(files, chunk_of(store, 2))

    report = repair_store(store, dry_run=False)

    assert (report.actions, report.target) == ((), None)
    assert [lost.version for lost in report.lost] == [5, 3, 2]
    assert store.latest_version() == 5


def test_a_torn_record_behind_an_empty_store_is_superseded() -> None:
    files = IsolatedMemoryFileSystem()
    store = Store.create_on(storage_from_filesystem(files, ROOT), threads=1, retry=IMPATIENT)
    tear(files, 1)

    report = repair_store(store, dry_run=False)

    assert [action.kind for action in report.actions] == ["supersede"]
    assert store.snapshot().is_empty
    with store.writer() as writer, writer.begin(step=10) as txn:
        txn.write_table("user", values(10))
    assert store.snapshot().step == 10
    store.close()


def test_hint_and_root_document_are_written_anew(files: IsolatedMemoryFileSystem, store: Store) -> None:
    root, hint = files.cat_file(path(ROOT_GROUP)), files.cat_file(path(HINT))
    files.rm_file(path(ROOT_GROUP))
    files.pipe_file(path(HINT), b'{"version":99}')

    report = repair_store(store, dry_run=False)

    assert [action.kind for action in report.actions] == ["hint", "root"]
    assert (files.cat_file(path(ROOT_GROUP)), files.cat_file(path(HINT))) == (root, hint)
    assert store.latest_version() == 5


def test_a_hole_is_told_and_nothing_is_written_into_it(files: IsolatedMemoryFileSystem, store: Store) -> None:
    files.rm_file(path(commit_key(3)))
    before = contents(files)

    report = repair_store(store, dry_run=False)

    assert report.actions == ()
    assert [(problem.kind, problem.path) for problem in report.remaining] == [("missing_object", commit_key(3))]
    assert contents(files) == before


def test_a_tail_with_a_hole_is_not_superseded(files: IsolatedMemoryFileSystem, store: Store) -> None:
    files.pipe_file(path(commit_key(7)), b"{")

    report = repair_store(store, dry_run=False)

    assert read_end(store).is_broken
    assert report.actions == ()


def entry(version: int, chain_length: int = 0, digest: str = "d") -> LogEntry:
    chain = tuple(
        ChainEntry(
            seg=f"{0:020d}-{number:032x}", sha256="0" * 64, kind="delta" if number else "baseline",
            l0=number, l1=number + 1, size_bytes=1, rows=1,
        )
        for number in range(chain_length)
    )  # fmt: skip
    record = CommitRecord(
        v=version, kind="baseline", commit_uuid="", store_uuid="", parent_digest="", epoch=1, checkpoint=chain_length,
        step=version, ts_ms=version, chain=chain, writer=WRITER,
    )  # fmt: skip
    return LogEntry(record, digest)


@pytest.mark.parametrize(
    ("tail", "whole", "kinds"),
    [
        (LogEnd(5, entry(5, 2), ()), entry(5, 2), []),
        (LogEnd(5, entry(5, 2), ()), entry(4, 2), []),
        (LogEnd(5, entry(5, 2), ()), entry(3, 1), ["rollback"]),
        (LogEnd(6, entry(5, 2), ("a",)), entry(5, 2), ["supersede"]),
        (LogEnd(7, entry(5, 2), ("a", "b")), entry(3, 1), ["supersede"]),
        (LogEnd(6, entry(5, 2), ("a",)), None, ["supersede"]),
        (LogEnd(5, entry(5, 2), ()), None, []),
        (LogEnd(5, entry(5, 0), ()), None, []),
        (LogEnd(0, None, ("a",)), None, []),
        (LogEnd(7, None, (), is_broken=True), None, []),
    ],
)
def test_the_plan_is_one_record_at_most(tail: LogEnd, whole: LogEntry | None, kinds: list[str]) -> None:
    plan = plan_repair(tail, None if whole is None else whole.record)

    assert [action.kind for action in plan] == kinds


def test_what_a_failing_backend_does_not_give_is_not_called_damaged(
    files: IsolatedMemoryFileSystem, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = path(chunk_of(store, 4))
    real = IsolatedMemoryFileSystem.cat_file

    def flaky(self: IsolatedMemoryFileSystem, name: str, **options: Any) -> bytes:
        if name == bad:
            raise OSError("no answer")
        found: bytes = real(self, name, **options)
        return found

    monkeypatch.setattr(IsolatedMemoryFileSystem, "cat_file", flaky)

    with pytest.raises(StorageFailure):
        repair_store(store, dry_run=False)
    monkeypatch.undo()
    assert store.latest_version() == 5


def test_readers_serve_the_last_whole_record_before_several_torn_ones(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    tear(files, 6)
    tear(files, 7)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert store.snapshot().version == 5

    assert any("serving version 5" in str(one.message) for one in said)


def test_an_object_of_an_old_version_that_is_damaged_is_left_as_it_is(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    flip(files, chunk_of(store, 4))
    repair_store(store, dry_run=False)

    with pytest.raises(CorruptObject):
        store.snapshot(4).table("user").read()


def test_a_record_that_cannot_be_read_now_is_not_taken_for_a_torn_one(files: IsolatedMemoryFileSystem) -> None:
    """Regression: after a network failure a repair would have rolled back intact records."""
    fs = FaultyFileSystem(files)
    with Store.open_on(storage_from_filesystem(fs, ROOT), threads=1) as store:
        newest = store.latest_version()
        calls = len(fs.calls)
        assert read_end(store).newest == newest
        reads = [n for n, call in enumerate(fs.calls[calls:]) if call.path.endswith(commit_key(newest))]
        fs.arm(Fault(FaultKind.FAIL_BEFORE, at=len(fs.calls) + reads[-1]))

        with pytest.raises(StorageFailure):
            read_end(store)
