"""`repair_store`: damage is passed by, never written over, and what is repaired is a store like any other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from cnr_store import Conflict, CorruptStore, StorageFailure, Store, TableOptions, repair_store, verify_store
from cnr_store.errors import CommitStateUnknown, CorruptObject, CorruptRecord, Fenced, ReadOnlyStore, UnknownFeature
from cnr_store.format.commit_record import LogEntry, encode_record
from cnr_store.format.documents import sha256
from cnr_store.format.layout import HINT, ROOT_GROUP, commit_key, state_key
from cnr_store.format.packed import pack, unpack
from cnr_store.format.records import ChainEntry, CommitRecord, WriterInfo
from cnr_store.log.commit_log import CommitLog, RetryPolicy
from cnr_store.log.log_reader import LogEnd
from cnr_store.log.rebase import draft_after, rebase_tag
from cnr_store.maintenance.repair import plan_repair, read_end
from cnr_store.maintenance.verify import find_newest_whole
from cnr_store.storage import storage_from_filesystem
from cnr_store.store.versions import Versions
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem

ROOT = "/root"
ROWS, DIM = 12, 2
WRITER = WriterInfo(host="h", lib="l", run_id="r")
IMPATIENT = RetryPolicy(deadline_s=0.05, first_delay_s=0.001, max_delay_s=0.001)


def open_store(files: IsolatedMemoryFileSystem) -> Store:
    return Store.open_on(storage_from_filesystem(files, ROOT), threads=1, retry=IMPATIENT)


def values(step: int) -> npt.NDArray[np.float32]:
    found = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    found[: step // 10] += step
    return found


@pytest.fixture
def files() -> IsolatedMemoryFileSystem:
    """Versions: 2 full of step 10, 3 and 4 deltas of steps 20 and 30, 5 tag."""
    found = IsolatedMemoryFileSystem()
    store = Store.create_on(storage_from_filesystem(found, ROOT), threads=1)
    with store.writer() as writer:
        with writer.begin(step=10) as txn:
            txn.write_table("user", values(10), options=TableOptions(scale=1.0))
        for step in (20, 30):
            with writer.begin(step=step) as txn:
                rows = np.arange(step // 10, dtype=np.int64)
                txn.write_rows("user", rows, values(step)[: step // 10])
    store.tag("good", 3)
    store.close()
    return found


@pytest.fixture
def store(files: IsolatedMemoryFileSystem) -> Iterator[Store]:
    with open_store(files) as opened:
        yield opened


def path(key: str) -> str:
    return f"{ROOT}/{key}"


def tear(files: IsolatedMemoryFileSystem, version: int, size: int = 60) -> bytes:
    """A record of which only the beginning was written, at a position behind the newest."""
    data = files.cat_file(path(commit_key(version - 1)))[:size]
    files.pipe_file(path(commit_key(version)), data)
    return bytes(data)


def flip(files: IsolatedMemoryFileSystem, key: str) -> None:
    data = bytearray(files.cat_file(path(key)))
    data[len(data) // 2] ^= 1
    files.pipe_file(path(key), bytes(data))


def chunk_of(store: Store, version: int, name: str = "codes") -> str:
    """The key of a chunk that this version's last segment brought."""
    prefix = f"data/{store.record(version).chain[-1].seg}/"
    found: str = next(s.key for s in store.storage.list_objects(prefix) if f".{name}/c/" in s.key)
    return found


def contents(files: IsolatedMemoryFileSystem) -> dict[str, bytes]:
    return {name: file.getvalue() for name, file in files.store.items()}


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
    """A torn newest record is nobody's state; an older one is damage, which a search by time says if it meets it."""
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

    report = verify_store(store, every=True, deep=True)

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
    assert verify_store(store, every=True, deep=True).superseded == (8, 7, 6)


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
    assert verify_store(store, every=True, deep=True).restorable == (6, 3, 2)


def test_a_state_that_only_a_replay_finds_wrong_is_rolled_back(files: IsolatedMemoryFileSystem) -> None:
    """A forged segment: every object has the digest that is stated, the state has not."""
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


def test_the_writer_of_a_torn_record_learns_that_it_lost(files: IsolatedMemoryFileSystem, store: Store) -> None:
    writer = store.writer()
    writer.restore()
    torn = store.latest_version() + 1
    tear(files, torn)
    txn = writer.begin(step=40)
    txn.write_rows("user", np.arange(4, dtype=np.int64), values(40)[:4])
    with pytest.raises(CommitStateUnknown):
        txn.commit()

    with open_store(files) as other:
        repair_store(other, dry_run=False)

    assert writer.settle() is None
    with pytest.raises(Fenced):
        writer.restore()


def test_a_writer_that_sleeps_through_a_repair_is_fenced(files: IsolatedMemoryFileSystem, store: Store) -> None:
    writer = store.writer()
    writer.restore()
    tear(files, store.latest_version() + 1)
    with open_store(files) as other:
        repair_store(other, dry_run=False)

    txn = writer.begin(step=40)
    txn.write_rows("user", np.arange(4, dtype=np.int64), values(40)[:4])

    with pytest.raises(Fenced):
        txn.commit()
    assert np.array_equal(store.snapshot().table("user").read(), values(30))


def test_a_tag_that_meets_a_superseded_position_goes_behind_it(files: IsolatedMemoryFileSystem, store: Store) -> None:
    head = store.head()
    tear(files, 6)
    with open_store(files) as other:
        repair_store(other, dry_run=False)

    draft = draft_after(head.record, "tag", WRITER, name="late", target=3, tags={**head.record.tags, "late": 3})
    assert store.internals.log.append(head, draft, rebase_tag).record.v == 8
    assert store.tags() == {"good": 3, "late": 3}


def test_of_two_repairs_one_supersedes_and_the_other_is_told(
    files: IsolatedMemoryFileSystem, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tear(files, 6)
    real: Callable[..., LogEntry] = CommitLog.append

    def late(self: CommitLog, *arguments: Any) -> LogEntry:
        monkeypatch.undo()
        with open_store(files) as other:
            repair_store(other, dry_run=False)
        return real(self, *arguments)

    monkeypatch.setattr(CommitLog, "append", late)

    with pytest.raises(Conflict):
        repair_store(store, dry_run=False)

    assert store.latest_version() == 7
    assert repair_store(store, dry_run=False).actions == ()


def test_a_repair_never_goes_back_from_what_was_saved_meanwhile(
    files: IsolatedMemoryFileSystem, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback that was chosen before a save landed was committed behind it, and left the newest checkpoint."""
    with open_store(files) as other, other.writer() as writer:
        writer.restore()
        flip(files, chunk_of(store, 4))
        real = find_newest_whole

        def slow(*arguments: Any, **options: Any) -> Any:
            found = real(*arguments, **options)
            with writer.begin(step=40, kind="baseline") as txn:
                txn.write_table("user", values(40), options=TableOptions(scale=1.0))
            return found

        monkeypatch.setattr("cnr_store.maintenance.repair.find_newest_whole", slow)

        with pytest.raises(Conflict):
            repair_store(store, dry_run=False)

    monkeypatch.undo()
    assert (store.head().record.kind, store.snapshot().step) == ("baseline", 40)
    assert repair_store(store, dry_run=False).actions == ()


def test_a_torn_record_that_is_restored_meanwhile_is_not_superseded(
    files: IsolatedMemoryFileSystem, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair takes as long as reading a checkpoint; a backup may bring the record back before it appends."""
    newest = path(commit_key(5))
    record = files.cat_file(newest)
    files.pipe_file(newest, record[:60])
    real = find_newest_whole

    def slow(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        files.pipe_file(newest, record)
        return found

    monkeypatch.setattr("cnr_store.maintenance.repair.find_newest_whole", slow)

    with pytest.raises(Conflict):
        repair_store(store, dry_run=False)

    assert (store.latest_version(), store.head().record.kind) == (5, "tag")


@pytest.mark.parametrize("damage", ["torn", "chunk"])
def test_a_store_of_a_newer_library_is_not_repaired(files: IsolatedMemoryFileSystem, store: Store, damage: str) -> None:
    head = store.head()
    draft = draft_after(head.record, "expire", WRITER, writer_features=("from_the_future",))
    newest = store.internals.log.append(head, draft, rebase_tag).record.v
    if damage == "torn":
        tear(files, newest + 1)
    else:
        flip(files, chunk_of(store, 4))
    before = contents(files)

    with pytest.raises(ReadOnlyStore, match="from_the_future"):
        repair_store(store, dry_run=False)

    assert contents(files) == before


def test_a_record_that_only_a_newer_library_reads_is_not_superseded(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    head = store.head()
    newer = msgspec.structs.replace(
        head.record, v=head.record.v + 1, parent_digest=head.digest, reader_features=("from_the_future",)
    )
    files.pipe_file(path(commit_key(newer.v)), encode_record(newer))
    before = contents(files)

    with pytest.raises(UnknownFeature, match="from_the_future"):
        repair_store(store, dry_run=False)

    assert contents(files) == before


def test_a_newest_record_whose_side_object_is_gone_is_followed(files: IsolatedMemoryFileSystem) -> None:
    with open_store(files) as store:
        for number in range(12):
            store.tag(f"{number:02d}{'x' * 900}", 3)
        newest = store.latest_version()
        raw = msgspec.json.decode(files.cat_file(path(commit_key(newest))))
        files.rm_file(path(state_key(raw["state"][0])))
        store = open_store(files)
        with pytest.raises(CorruptStore):
            store.head()

        report = repair_store(store, dry_run=False)

        assert (report.torn, report.target) == ((), newest)
        assert np.array_equal(store.snapshot().table("user").read(), values(30))
        assert len(store.tags()) == 13


def test_what_a_record_without_its_side_object_committed_is_not_lost(files: IsolatedMemoryFileSystem) -> None:
    with open_store(files) as store:
        for number in range(12):
            store.tag(f"{number:02d}{'x' * 900}", 3)
        with store.writer() as writer:
            writer.restore()
            with writer.begin(step=40) as txn:
                txn.write_rows("user", np.arange(4, dtype=np.int64), values(40)[:4])
        committed = store.head().record
        raw = msgspec.json.decode(files.cat_file(path(commit_key(committed.v))))
        files.rm_file(path(state_key(raw["state"][0])))
        fence = msgspec.json.decode(files.cat_file(path(commit_key(committed.v - 1))))
        assert fence["state"] == raw["state"]
        store = open_store(files)

        report = repair_store(store, dry_run=False)

        assert (report.torn, report.target) == ((), committed.v)
        head = store.head().record
        assert (head.chain, head.step) == (committed.chain, 40)
        assert np.array_equal(store.snapshot().table("user").read(), values(40))
        assert verify_store(store, deep=True).is_sound


def test_a_record_that_supersedes_more_than_its_digests_say_is_refused(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    tear(files, 6)
    repair_store(store, dry_run=False)
    head = store.head().record
    assert head.supersedes is not None
    for torn in ((), ("0" * 64,), (head.parent_digest,) * 7):
        forged = msgspec.structs.replace(head, supersedes=msgspec.structs.replace(head.supersedes, torn=torn))
        files.pipe_file(path(commit_key(7)), encode_record(forged))
        with pytest.raises(CorruptRecord, match=r"supersedes positions that are not directly|supersedes\.torn"):
            store.head()


def test_the_next_record_supersedes_nothing(files: IsolatedMemoryFileSystem, store: Store) -> None:
    tear(files, 6)
    repair_store(store, dry_run=False)

    store.untag("good")

    assert store.head().record.supersedes is None


def entry(version: int, chain_length: int = 0, digest: str = "d") -> LogEntry:
    chain = tuple(
        ChainEntry(
            seg=f"{0:020d}-{number:032x}", sha256="0" * 64, kind="delta" if number else "baseline",
            l0=number, l1=number + 1, bytes=1, rows=1,
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
    """A repair would go back behind records that are whole, because the network failed while it looked."""
    fs = FaultyFileSystem(files)
    with Store.open_on(storage_from_filesystem(fs, ROOT), threads=1) as store:
        newest = store.latest_version()
        calls = len(fs.calls)
        assert read_end(store).newest == newest
        reads = [n for n, call in enumerate(fs.calls[calls:]) if call.path.endswith(commit_key(newest))]
        fs.arm(Fault(FaultKind.FAIL_BEFORE, at=len(fs.calls) + reads[-1]))

        with pytest.raises(StorageFailure):
            read_end(store)
