"""A damaged log stops a collection; a branch keeps exactly the segments that it needs."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from cnr_store import CorruptStore, RetentionPolicy, Store, TableOptions, collect_garbage, repair_store, verify_store
from cnr_store.errors import BranchNotFound, CorruptRecord, ReadOnlyStore, TransactionAborted, VersionExpired
from cnr_store.format.commit_record import encode_record, is_live
from cnr_store.format.layout import MANIFEST, commit_key, segment_key, segment_name
from cnr_store.log.author import writer_info
from cnr_store.log.rebase import draft_after, rebase_fence
from cnr_store.maintenance.gc.plan import txn_of
from tests.maintenance.gc.stores import (
    DAY_MS,
    DIM,
    LAST,
    ROWS,
    again,
    armed,
    collect,
    contents,
    is_commit,
    listed,
    live,
    on,
    once,
    referenced,
    save,
    table,
    train,
)
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.snapshot_bytes import bytes_of


def test_a_missing_segment_of_a_kept_version_stops_all_until_given_up(store: Store) -> None:
    name = store.head().record.chain[0].seg
    store.storage.delete([key for key in listed(store) if name in key])
    before = contents(store)

    with pytest.raises(CorruptStore, match="missing from storage"):
        collect(store)
    assert contents(store) == before

    assert collect(store, despite_damage=True).outcome == "collected"


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_segment_that_another_collection_deletes_meanwhile_is_no_damage(
    fs: IsolatedMemoryFileSystem, store: Store, dry_run: bool
) -> None:
    """Regression: without a grace period the segment was reported as lost, and nothing was collected."""
    has_run = False

    def collects_first(call: Call) -> None:
        nonlocal has_run
        if call.operation == "list" and call.path.rstrip("/").endswith("data") and not has_run:
            has_run = True
            assert collect(again(fs)).outcome == "collected"

    view = Store.open_on(on(FaultyFileSystem(fs, on_call=collects_first)), threads=1)

    assert collect(view, keep_last=100, dry_run=dry_run).outcome == "clean"
    assert has_run
    assert listed(store) == referenced(store)


@pytest.mark.parametrize("how", ["rotten", "empty", "another"])
def test_versions_whose_records_are_lost_can_be_given_up_once_for_all(store: Store, how: str) -> None:
    lost = store.latest_version() - 1
    held = {version: bytes_of(store.snapshot(version)) for version in range(2, lost)}
    damage(store, lost, how)
    keep = RetentionPolicy(keep_last=100)
    with pytest.raises(CorruptStore):
        collect(store, policy=keep)

    report = collect(store, policy=keep, despite_damage=True)

    assert [one.reason for one in report.versions if one.version == lost] == ["its record cannot be read"]
    assert not is_live(store.head().record, lost)
    assert collect(store, policy=keep).outcome == "clean"
    assert {version: bytes_of(store.snapshot(version)) for version in held} == held
    with pytest.raises(VersionExpired):
        store.snapshot(lost)


@pytest.mark.parametrize("how", ["rotten", "empty"])
def test_a_tagged_version_without_a_record_can_be_given_up_below_the_floor(store: Store, how: str) -> None:
    store.tag("old", 3)
    collect(store, policy=RetentionPolicy(keep_last=1))
    assert store.head().record.floor > 3
    damage(store, 3, how)
    with pytest.raises(CorruptStore):
        collect(store)

    collect(store, despite_damage=True)

    assert 3 in store.head().record.expired
    assert collect(store).outcome == "clean"
    assert listed(store) == referenced(store)
    assert live(store)[-1] == store.latest_version()


def damage(store: Store, version: int, how: str) -> None:
    """Damage a commit record."""
    if how == "empty":
        store.storage.delete([commit_key(version)])
    elif how == "rotten":
        store.storage.put(commit_key(version), (store.storage.read(commit_key(version)) or b"")[:-9])
    else:
        other = msgspec.structs.replace(store.record(version), user={"from": "a backup"})
        store.storage.put(commit_key(version), encode_record(other))


def test_a_record_that_the_next_record_does_not_name_stops_everything(store: Store) -> None:
    other = msgspec.structs.replace(store.record(4), user={"from": "a backup"})
    store.storage.put(commit_key(4), encode_record(other))

    with pytest.raises(CorruptRecord, match="its successor names"):
        collect(store)


def test_a_hole_in_the_log_stops_everything(store: Store) -> None:
    store.storage.delete([commit_key(4)])

    with pytest.raises(CorruptStore, match="empty"):
        collect(store)


def test_a_record_of_another_store_does_not_say_what_is_needed(store: Store) -> None:
    """Below the floor no successor checks the record. A foreign one without a chain would free what the tag needs."""
    store.tag("kept", 3)
    collect(store)
    other = Store.create_on(on(IsolatedMemoryFileSystem()))
    while other.latest_version() < 3:
        other.writer()
    foreign = other.storage.read(commit_key(3))
    assert foreign is not None
    store.storage.put(commit_key(3), foreign)
    before = listed(store)

    with pytest.raises(CorruptStore, match="commit record 3 belongs to store"):
        collect(Store.open_on(store.storage))

    assert listed(store) == before


@pytest.mark.parametrize("is_branch", [False, True], ids=["store", "branch"])
def test_a_log_with_writer_features_of_a_newer_library_is_left_alone(store: Store, is_branch: bool) -> None:
    newer = store.fork("b", 3) if is_branch else store
    head = newer.head()
    draft = draft_after(head.record, "fence", writer_info(), writer_features=("future",), epoch=head.record.epoch + 1)
    newer.internals.log.append(head, draft, rebase_fence)
    before = contents(store)

    with pytest.raises(ReadOnlyStore):
        collect(store)

    assert contents(store) == before


def dies() -> None:
    raise KeyboardInterrupt


def test_a_branch_keeps_its_fork_point_and_what_it_wrote(store: Store) -> None:
    trial = store.fork("trial", 3)
    train(trial, 30)
    before = table(trial)

    collect(store)

    assert table(trial) == before
    assert listed(store) == referenced(store, trial)
    assert 3 in live(store)


def test_a_branch_is_collected_by_the_same_policy_from_wherever_it_is_run(store: Store) -> None:
    trial = store.fork("trial", 3)
    versions = [train(trial, step, full=True) for step in (30, 31, 32)]

    report = collect(trial)

    assert live(trial)[0] == versions[-1]
    assert listed(store) == referenced(store, trial)
    assert {version.branch for version in report.versions} == {None, "trial"}


def test_a_branch_whose_time_is_over_is_ended_and_its_segments_go_at_once(store: Store) -> None:
    trial = store.fork("trial", 3, ttl_s=3600)
    train(trial, 30)
    later = int(time.time() * 1000) + 3_601_000

    said = collect_garbage(store, policy=LAST, clock_ms=lambda: later, dry_run=True)
    done = collect_garbage(store, policy=LAST, dry_run=False, clock_ms=lambda: later)
    collect_garbage(store, policy=LAST, dry_run=False, clock_ms=lambda: later + DAY_MS)

    assert said.marked == done.marked > 3
    assert (store.branches(), live(store)[0]) == ({}, 7)
    assert listed(store) == referenced(store)
    with pytest.raises(BranchNotFound):
        train(trial, 31)


def cut(store: Store, key: str) -> None:
    data = store.storage.read(key)
    assert data is not None
    store.storage.put(key, data[: len(data) // 2])


@pytest.mark.parametrize("position", [0, 1, -1], ids=["first", "middle", "newest"])
def test_a_damaged_branch_whose_time_is_over_is_ended_and_holds_nothing_up(store: Store, position: int) -> None:
    """Regression: one unreadable record of an expired branch stopped every collection of the store."""
    trial = store.fork("trial", 3, ttl_s=3600)
    train(trial, 30)
    newest = trial.latest_version()
    cut(store, commit_key(position % (newest + 1), trial.internals.log.prefix))
    later = int(time.time() * 1000) + 3_601_000

    said = collect_garbage(store, policy=LAST, clock_ms=lambda: later, dry_run=True)
    collect(store, clock_ms=lambda: later)

    assert said.outcome == "planned"
    assert (store.branches(), listed(store)) == ({}, referenced(store))


def test_a_damaged_branch_that_lives_stops_everything_until_it_is_repaired(store: Store) -> None:
    trial = store.fork("trial", 3)
    train(trial, 30)
    cut(store, commit_key(trial.latest_version(), trial.internals.log.prefix))
    before = listed(store)

    with pytest.raises(CorruptRecord, match="branch 'trial'; repair it or drop the branch"):
        collect(store)

    assert listed(store) == before
    repair_store(trial, dry_run=False)
    assert collect(store).outcome == "collected"


def test_a_damaged_log_of_a_dropped_branch_holds_nothing_up(store: Store) -> None:
    trial = store.fork("trial", 3)
    train(trial, 30)
    store.drop_branch("trial")
    cut(store, commit_key(1, trial.internals.log.prefix))
    young = segment_key(segment_name(7, "a" * 32), MANIFEST)
    store.storage.put(young, b"{}")

    assert collect(store, orphan_age_s=86_400.0).outcome == "collected"
    collect(store)

    assert listed(store) == referenced(store)


def test_a_dropped_branch_goes_with_the_next_collection_however_young(store: Store) -> None:
    trial = store.fork("trial", 3)
    train(trial, 30)
    store.drop_branch("trial")

    collect_garbage(store, policy=LAST, dry_run=False)
    now = int(time.time() * 1000)
    collect_garbage(store, policy=LAST, dry_run=False, clock_ms=lambda: now + DAY_MS + 60_000)

    assert listed(store) == referenced(store)


def test_a_lease_on_a_branch_that_was_dropped_keeps_its_data(store: Store) -> None:
    trial = store.fork("trial", 3)
    train(trial, 30)
    needed = {entry.seg for entry in trial.head().record.chain}
    lease = trial.lease()
    store.drop_branch("trial")

    collect(store)
    collect(store)

    assert needed <= {key.split("/")[1] for key in listed(store)}
    lease.release()
    collect(store)
    assert listed(store) == referenced(store)


def test_an_orphan_is_given_up_in_the_logs_of_all_branches(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    trial = store.fork("trial", 3)
    slow = again(FaultyFileSystem(fs, on_call=once(is_commit, lambda: collect(again(fs))))).on_branch("trial")
    with slow.writer() as writer:
        writer.restore()
        armed[0] = True
        with pytest.raises(TransactionAborted):
            save(writer, 30)

    collect(store)
    assert listed(store) == referenced(store, trial)


def test_a_name_that_a_branch_has_committed_meanwhile_is_no_damage(
    store: Store, fs: IsolatedMemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after a collection was killed between two logs, verify reported that a live segment was marked."""
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 1)  # so that rows are put when they are given
    trial = store.fork("trial", 3)
    with trial.writer() as writer:
        writer.restore()
        with writer.begin(30, kind="baseline") as txn:
            txn.write_table("t", np.full((ROWS, DIM), 9, np.float32), options=TableOptions(scale=1.0))
            crash = once(lambda call: "/branches/" in call.path and is_commit(call), dies)
            armed[0] = True
            with pytest.raises(KeyboardInterrupt):
                collect(again(FaultyFileSystem(fs, on_call=crash)))
    assert txn_of(trial.head().record.chain[-1].seg) in store.head().record.aborted

    assert verify_store(store).problems == ()
    collect(store)

    assert txn_of(trial.head().record.chain[-1].seg) not in store.head().record.aborted
    assert table(trial) == [9.0] * ROWS


def test_a_new_branch_does_not_keep_what_was_given_up_before_it(store: Store) -> None:
    now = int(time.time() * 1000)
    collect(store, grace_s=3600.0, clock_ms=lambda: now)
    trial = store.fork("trial")

    collect(store, grace_s=3600.0, clock_ms=lambda: now + 3_600_000)

    assert listed(store) == referenced(store, trial)


def test_a_branch_that_lost_its_log_stops_everything(store: Store) -> None:
    """Regression: the branch was treated as an unfinished fork, and its segments as orphans."""
    branch = store.fork("trial", 3)
    with branch.writer() as writer:
        writer.restore()
        save(writer, 9)
    store.storage.delete(listed(store, "branches/"))
    before = listed(store)

    for _ in range(2):
        with pytest.raises(CorruptStore, match="'trial'"):
            collect(store)

    assert listed(store) == before


def test_a_branch_that_lost_its_log_ends_with_its_time(store: Store) -> None:
    store.fork("trial", 3, ttl_s=3600)
    store.storage.delete(listed(store, "branches/"))
    later = int(time.time() * 1000) + 3_601_000

    collect(store, clock_ms=lambda: later)

    assert store.branches() == {}
    assert listed(store) == referenced(store)
