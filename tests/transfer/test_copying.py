"""A copy of a store: a store of its own with the same states, which a training continues; the source stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cnr_store import (
    BadInput,
    Conflict,
    CorruptStore,
    RetentionPolicy,
    Store,
    TableOptions,
    Writer,
    collect_garbage,
    copy_store,
    maintain,
    repair_store,
    verify_store,
)
from cnr_store.errors import NotAStore, ReadOnlyStore, StoreExists, TagNotFound, VersionExpired, VersionNotFound
from cnr_store.format.commit_record import decode_record, is_live
from cnr_store.format.layout import IDENTITY, commit_key
from cnr_store.log.author import writer_info
from cnr_store.log.commit_log import CommitLog, RetryPolicy
from cnr_store.log.rebase import draft_after, rebase_fence
from cnr_store.maintenance.compaction import compact_run
from cnr_store.relay.relay import Relay
from cnr_store.serving import Loader
from cnr_store.storage import Storage, storage_from_filesystem
from cnr_store.training import CheckpointManager
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.snapshot_bytes import bytes_of
from tests.tools.sample_store import build_store
from tests.training.runs import Training, assert_same, grouped, uninterrupted

FAR, NEAR = "/far", "/near"
QUICK = RetryPolicy(deadline_s=0.02, first_delay_s=0.001, max_delay_s=0.002)


@pytest.fixture
def files() -> IsolatedMemoryFileSystem:
    return IsolatedMemoryFileSystem()


@pytest.fixture
def source(files: IsolatedMemoryFileSystem) -> Iterator[Store]:
    """Versions 2 to 4 of steps 1 to 3; 5 compacts them; 6 goes back to 3; 7 tags 2, 8 points a channel at 4."""
    with Store.create_on(place(files, FAR), threads=1, retry=QUICK) as store:
        with store.writer() as writer:
            for value in (1, 2, 3):
                save(writer, value)
        compact_run(store, run=(0, 3))
        store.rollback(3)
        store.tag("first", 2)
        store.set_channel("serving", 4)
        yield store


def place(files: IsolatedMemoryFileSystem, root: str = NEAR) -> Storage:
    return storage_from_filesystem(files, root)


def near(files: IsolatedMemoryFileSystem) -> Store:
    return Store.open_on(place(files), threads=1, retry=QUICK)


def save(writer: Writer, value: int) -> int:
    """Save a version whose step and rows are the value."""
    with writer.begin(step=value, kind="baseline" if value == 1 else "delta") as txn:
        rows = np.full((4, 2), value, np.float32)
        if value == 1:
            txn.write_table("t", rows, options=TableOptions(scale=1.0))
        else:
            txn.write_rows("t", np.arange(2), rows[:2])
        txn.put_dense({"bias": np.full(3, float(value))})
        txn.put_document("reader/0", {"at": value})
        txn.note({"message": f"save {value}"})
    assert txn.version is not None
    return txn.version


def contents(files: IsolatedMemoryFileSystem, root: str) -> dict[str, bytes]:
    return {path: files.cat_file(path) for path in files.find(root)}


def test_every_live_version_is_the_same_at_the_copy(source: Store, files: IsolatedMemoryFileSystem) -> None:
    before = contents(files, FAR)

    report = copy_store(source, place(files), all_versions=True)

    copy = near(files)
    assert copy.uuid == report.store_uuid != source.uuid
    assert (report.states, report.version, report.skipped) == (5, 7, 0)
    for mine, theirs in zip(range(1, 6), (2, 3, 4, 5, 6), strict=True):
        assert bytes_of(copy.snapshot(mine)) == bytes_of(source.snapshot(theirs))
        assert copy.record(mine).ts_ms == source.record(theirs).ts_ms
        assert copy.record(mine).user == source.record(theirs).user
    assert (copy.tags(), copy.channels()) == ({"first": 1}, {"serving": 3})
    assert copy.head().record.chain == source.head().record.chain
    assert verify_store(copy, all_versions=True, deep=True).problems == ()
    assert contents(files, FAR) == before


def test_the_rows_slots_and_documents_of_a_full_store_are_copied(tmp_path: Path) -> None:
    with build_store(tmp_path / "store") as source:
        report = copy_store(source, tmp_path / "copy", all_versions=True, fsync=False)
        copy = Store.open(str(tmp_path / "copy"))

        live = [record.v for record in source.log() if record.kind in ("baseline", "delta")][::-1]
        assert report.states == len(live)
        for mine, theirs in enumerate(live, start=1):
            assert bytes_of(copy.snapshot(mine)) == bytes_of(source.snapshot(theirs))


def test_one_version_is_copied_with_the_names_of_its_state(source: Store, files: IsolatedMemoryFileSystem) -> None:
    newest = copy_store(source, place(files, "/newest"))
    tagged = copy_store(source, place(files, "/tagged"), tag="first")
    by_step = copy_store(source, place(files, "/step"), step=3)

    assert [one.states for one in (newest, tagged, by_step)] == [1, 1, 1]
    assert [one.segments for one in (newest, tagged, by_step)] == [2, 1, 1]
    for root, version in (("/newest", None), ("/tagged", 2), ("/step", 5)):
        copy = Store.open_on(place(files, root), threads=1)
        assert bytes_of(copy.snapshot()) == bytes_of(source.snapshot(version))
    assert Store.open_on(place(files, "/tagged"), threads=1).tags() == {"first": 1}
    with pytest.raises(TagNotFound):
        copy_store(source, place(files, "/none"), tag="none")
    with pytest.raises(BadInput):
        copy_store(source, place(files, "/none"), tag="first", version=2)
    assert contents(files, "/none") == {}


def test_writers_maintenance_and_readers_go_on_with_the_copy(source: Store, files: IsolatedMemoryFileSystem) -> None:
    copy_store(source, place(files), all_versions=True)
    before = contents(files, FAR)

    copy = near(files)
    with Loader(copy) as loader:
        with copy.writer() as writer:
            writer.restore()
            version = save(writer, 4)
        loader.poll()
        assert loader.version == version
        np.testing.assert_array_equal(loader.lookup("t", np.asarray([0, 3])), [[4, 4], [1, 1]])
    assert copy.record(version).kind == "delta"
    assert copy.record(version).epoch == 1
    copy.untag("first")
    maintain(copy, retention=RetentionPolicy(keep_last=1), grace_s=0, force=True)
    collect_garbage(copy, policy=RetentionPolicy(keep_last=1), grace_s=0, dry_run=False, force=True)
    assert verify_store(copy, deep=True).problems == ()
    assert repair_store(copy).actions == ()
    assert contents(files, FAR) == before
    assert is_live(source.head().record, 2)


def test_a_training_continues_on_the_copy_bit_for_bit(tmp_path: Path) -> None:
    def manager_of(training: Training, url: str) -> CheckpointManager:
        return CheckpointManager(
            url, model=training.model, optimizer=training.optimizers, options=TableOptions.exact(),
            **grouped(assume={"RowWiseAdagrad": "touched"}),
        )  # fmt: skip

    def go_on(training: Training, manager: CheckpointManager, start: int, stop: int) -> None:
        for number in range(start, stop):
            training.train(number)
            manager.step()
            manager.save()

    first = Training("rowwise_adagrad")
    with manager_of(first, str(tmp_path / "store")) as manager:
        go_on(first, manager, 0, 3)
    with Store.open(str(tmp_path / "store")) as source:
        copy_store(source, tmp_path / "copy", fsync=False)

    second = Training("rowwise_adagrad")
    with manager_of(second, str(tmp_path / "copy")) as manager:
        restored = manager.restore()
        go_on(second, manager, 3, 6)

    assert restored is not None
    kinds = [record.kind for record in Store.open(str(tmp_path / "copy")).log()][::-1]
    assert kinds[:6] == ["init", "delta", "fence", "delta", "delta", "delta"]
    assert_same(second.state(), uninterrupted("rowwise_adagrad", 6))


def test_a_relay_becomes_a_store(source: Store, files: IsolatedMemoryFileSystem) -> None:
    Relay(source, place(files, "/relay"), start=3, policy=RetentionPolicy(keep_last=9)).advance()
    relay = Store.open_on(place(files, "/relay"), threads=1)
    with pytest.raises(ReadOnlyStore, match="cnr promote"):
        relay.writer()
    files.rm(FAR, recursive=True)

    report = copy_store(relay, place(files), all_versions=True)

    copy = near(files)
    assert report.states == 4
    for mine, theirs in enumerate((3, 4, 5, 6), start=1):
        assert bytes_of(copy.snapshot(mine)) == bytes_of(relay.snapshot(theirs))
    assert copy.channels() == {"serving": 2}
    with copy.writer() as writer:
        writer.restore()
        save(writer, 9)


def test_versions_that_a_relay_no_longer_has_are_left_out(source: Store, files: IsolatedMemoryFileSystem) -> None:
    Relay(source, place(files, "/relay"), start=2).advance()
    relay = Store.open_on(place(files, "/relay"), threads=1)
    compacted = source.record(5).chain[0].seg
    files.rm(f"/relay/data/{compacted}", recursive=True)

    report = copy_store(relay, place(files), all_versions=True)

    assert (report.states, report.skipped) == (4, 1)
    assert verify_store(near(files), all_versions=True).problems == ()


def test_a_branch_is_copied_as_a_store(source: Store, files: IsolatedMemoryFileSystem) -> None:
    branch = source.fork("trial", 4)
    with branch.writer() as writer:
        writer.restore()
        save(writer, 7)

    copy_store(branch, place(files), all_versions=True)

    copy = near(files)
    assert [record.step for record in copy.log()] == [7, 3, 0]
    assert bytes_of(copy.snapshot()) == bytes_of(branch.snapshot())


@pytest.mark.parametrize("all_versions", [False, True])
def test_damage_is_named_and_leaves_nothing_that_opens(
    source: Store, files: IsolatedMemoryFileSystem, all_versions: bool
) -> None:
    segment = source.head().record.chain[-1].seg
    path = next(path for path in files.find(f"{FAR}/data/{segment}") if "/c." in path)
    intact = files.cat_file(path)
    files.pipe_file(path, intact[:-1] + bytes([intact[-1] ^ 1]))

    with pytest.raises(CorruptStore) as caught:
        copy_store(source, place(files), all_versions=all_versions)
    assert caught.value.path == path.removeprefix(f"{FAR}/")
    with pytest.raises(NotAStore):
        near(files)
    with pytest.raises(StoreExists, match="cnr copy"):
        Store.create_on(place(files))

    files.pipe_file(path, intact)
    copy_store(source, place(files), all_versions=all_versions)
    assert bytes_of(near(files).snapshot()) == bytes_of(source.snapshot())


def test_a_version_that_expires_during_the_copy_is_skipped(source: Store, files: IsolatedMemoryFileSystem) -> None:
    stop_after(source, files, 1)
    source.untag("first")
    for _ in range(2):
        collect_garbage(source, policy=RetentionPolicy(keep_last=1), grace_s=0, dry_run=False, force=True)
    assert not is_live(source.head().record, 5)

    report = copy_store(source, place(files), all_versions=True, retry=QUICK)

    assert report.skipped == 1
    assert bytes_of(near(files).snapshot()) == bytes_of(source.snapshot(6))
    assert verify_store(near(files), all_versions=True).problems == ()


def test_the_chosen_version_must_not_expire_during_the_copy(source: Store, files: IsolatedMemoryFileSystem) -> None:
    stop_after(source, files, 0, version=5)
    for _ in range(2):
        collect_garbage(source, policy=RetentionPolicy(keep_last=1), grace_s=0, dry_run=False, force=True)

    with pytest.raises(VersionExpired):
        copy_store(source, place(files), version=5)


class Stopped(Exception):
    """The copy is interrupted here."""


def stop_after(source: Store, files: IsolatedMemoryFileSystem, segments: int, *, version: int | None = None) -> None:
    """Begin a copy, and interrupt it when it writes the next segment after so many."""
    target = place(files)
    put, names = target.put, set[str]()

    def stopping(key: str, data: bytes) -> None:
        if key.startswith("data/"):
            names.add(key.split("/")[1])
            if len(names) > segments:
                raise Stopped
        put(key, data)

    target.put = stopping  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        copy_store(source, target, version=version, all_versions=version is None)


def test_a_repeated_copy_does_nothing_and_does_not_follow_its_source(
    source: Store, files: IsolatedMemoryFileSystem
) -> None:
    first = copy_store(source, place(files))
    before = contents(files, NEAR)

    again = copy_store(source, place(files))

    assert (again.version, again.store_uuid, again.objects) == (first.version, first.store_uuid, 0)
    assert contents(files, NEAR) == before
    source.tag("later")
    with pytest.raises(StoreExists, match="does not follow"):
        copy_store(source, place(files))
    assert contents(files, NEAR) == before


def test_a_copy_of_one_version_stays_the_one_that_was_asked_for(source: Store, files: IsolatedMemoryFileSystem) -> None:
    first = copy_store(source, place(files), version=3)
    source.tag("later")

    assert copy_store(source, place(files), version=3).store_uuid == first.store_uuid
    with pytest.raises(StoreExists):
        copy_store(source, place(files), version=4)


def test_a_place_with_anything_else_is_refused(source: Store, files: IsolatedMemoryFileSystem) -> None:
    with Store.create_on(place(files, "/store"), threads=1) as store, store.writer() as writer:
        save(writer, 1)
    Relay(source, place(files, "/relay")).advance()
    copy_store(source, place(files, "/copy"), version=2)
    for root in ("/store", "/relay", "/copy"):
        before = contents(files, root)
        with pytest.raises(StoreExists):
            copy_store(source, place(files, root))
        assert contents(files, root) == before
    with pytest.raises(BadInput):
        copy_store(source, place(files, FAR))


@pytest.mark.parametrize("position", [1, 8])
def test_records_of_others_in_an_unfinished_copy_are_refused(
    source: Store, files: IsolatedMemoryFileSystem, position: int
) -> None:
    stop_after(source, files, 0)
    if position > 1:
        copy_store(source, place(files), all_versions=True)
        files.rm_file(f"{NEAR}/{IDENTITY}")
    identity = decode_record(files.cat_file(f"{NEAR}/{commit_key(0)}"), 0).record.store_uuid
    log = CommitLog(place(files), identity, retry=QUICK)
    head = log.latest()
    log.append(head, draft_after(head.record, "fence", writer_info(), epoch=1), rebase_fence)
    assert log.latest().record.v == position

    with pytest.raises(StoreExists):
        copy_store(source, place(files), all_versions=True)

    with pytest.raises(NotAStore):
        near(files)


def test_an_empty_store_is_not_copied(files: IsolatedMemoryFileSystem) -> None:
    with Store.create_on(place(files, FAR), threads=1) as store, pytest.raises(VersionNotFound):
        copy_store(store, place(files))

    assert not files.exists(f"{NEAR}/{IDENTITY}")


def test_of_two_copies_at_once_one_finishes(source: Store, files: IsolatedMemoryFileSystem) -> None:
    def race(done: int, total: int) -> None:
        if done == total:
            copy_store(source, place(files), all_versions=True)

    try:
        copy_store(source, place(files), all_versions=True, progress=race)
    except Conflict:
        pass

    copy = near(files)
    assert copy.latest_version() == 7
    assert verify_store(copy, all_versions=True).problems == ()
