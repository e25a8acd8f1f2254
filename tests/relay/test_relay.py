"""A relay copies versions in order; runs of it repeat, two may share a target, and memory is bounded."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from cnr_store import (
    BadInput,
    CnrStoreError,
    CompactionPolicy,
    RetentionPolicy,
    Store,
    TableOptions,
    collect_garbage,
    compact,
    repair_store,
    verify_store,
)
from cnr_store.changes import changes
from cnr_store.errors import BranchNotFound, CorruptRecord, CursorExpired, StoreExists, VersionExpired, VersionNotFound
from cnr_store.format.documents import sha256
from cnr_store.format.layout import BRANCHES, COMMITS, DATA, IDENTITY, STATE, commit_key
from cnr_store.relay.relay import Relay
from cnr_store.relay.report import RelayReport
from tests.relay.relays import DIM, FAR, near, place, same_objects, save, value_of
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.snapshot_bytes import bytes_of


def test_the_relay_has_the_same_versions_and_bytes_from_where_it_began(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    save(store, 1, 2)
    relay = Relay(store, place(files))
    began = relay.advance()
    first = store.latest_version()
    save(store, 3, 4)
    went_on = relay.advance()

    copy = near(files)
    assert copy.uuid == store.uuid
    assert copy.storage.read(IDENTITY) == store.storage.read(IDENTITY)
    assert began.version == first
    assert (began.versions, began.segments, began.skipped) == (1, 2, 0)
    assert (went_on.version, went_on.source_version) == (store.latest_version(), store.latest_version())
    assert went_on.versions == store.latest_version() - first
    assert went_on.segments == 2
    assert went_on.size_bytes > 0
    assert copy.head() == store.head()
    assert same_objects(store, copy, COMMITS, DATA)
    for version in range(first, store.latest_version() + 1):
        assert bytes_of(copy.snapshot(version)) == bytes_of(store.snapshot(version))
    assert [record.v for record in copy.log()] == list(range(store.latest_version(), first - 1, -1))


def test_a_look_that_finds_nothing_new_is_one_request(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    watched, target = FaultyFileSystem(files), FaultyFileSystem(files)
    relay = Relay(near(watched, FAR), place(target))
    relay.advance()
    before = len(watched.calls), len(target.calls)

    report = relay.advance()

    assert report == RelayReport(store.latest_version(), store.latest_version(), staleness_s=0.0)
    assert [call.operation for call in watched.calls[before[0] :]] == ["read"]
    assert len(target.calls) == before[1]


def test_a_reader_of_a_relay_polls_it_with_one_request(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    relay = Relay(store, place(files))
    relay.advance()
    watched = FaultyFileSystem(files)
    reader = near(watched)
    opening = len(watched.calls)
    head = reader.head()
    asked = len(watched.calls)

    assert opening == 3  # identity, position 0, marker
    assert reader.poll(head) is None
    assert len(watched.calls) == asked + 1
    save(store, 2)
    relay.advance()
    found = reader.poll(head)
    assert found is not None
    assert found.record.v == head.record.v + 1


def test_an_empty_store_is_waited_for(store: Store, files: IsolatedMemoryFileSystem) -> None:
    relay = Relay(store, place(files))

    assert relay.advance() == RelayReport(None, 0, staleness_s=0.0)
    assert relay.version is None
    assert not list(place(files).list_objects(""))
    save(store, 1)
    assert relay.advance().version == store.latest_version()
    assert value_of(near(files)) == 1


def test_a_run_rests_between_two_looks_at_an_empty_store(
    store: Store, files: IsolatedMemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rest(threading.Event):
        rests = 0

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout
            self.rests += 1
            if self.rests == 3:
                relay.stop()
            return True

    relay, reports = Relay(store, place(files)), list[RelayReport]()
    monkeypatch.setattr(relay, "_woken", Rest())
    relay.run(poll_interval_s=5, on_report=reports.append)

    assert len(reports) == 3


def test_a_run_that_is_woken_copies_before_its_interval_is_over(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    relay, told, reports = Relay(store, place(files)), list[tuple[int, int]](), list[RelayReport]()
    relay.announce_to(lambda version: told.append((version, near(files).latest_version())))

    def on_report(report: RelayReport) -> None:
        reports.append(report)
        if len(reports) == 1:
            store.announce_to(lambda _: relay.wake())
            save(store, 2)
        elif report.version == store.latest_version():
            relay.stop()

    Relay(store, place(files)).advance()  # so that each version can be read when it is told
    relay.run(poll_interval_s=10**6, on_report=on_report)

    assert value_of(near(files)) == 2
    assert told[-1] == (store.latest_version(), store.latest_version())


def behind_by_one(store: Store, watched: FaultyFileSystem, files: IsolatedMemoryFileSystem) -> Relay:
    """A relay that lacks the newest version of its source, which it reads through ``watched``."""
    save(store, 1)
    relay = Relay(near(watched, FAR), place(files))
    with store.writer() as writer:
        writer.restore()
        relay.advance()
        with writer.begin(2) as txn:
            txn.write_rows("t", np.arange(3), np.full((3, DIM), 2, np.float32))
    return relay


def test_a_new_version_costs_the_source_five_requests_and_its_objects(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    watched = FaultyFileSystem(files)
    relay = behind_by_one(store, watched, files)
    before = watched.count("read")

    report = relay.advance()

    # The record, whether one follows it, the manifest, the record's bytes, and whether there is more.
    assert watched.count("read") - before == 5 + (report.objects - 1)


def test_a_record_whose_bytes_were_cut_short_is_read_again(store: Store, files: IsolatedMemoryFileSystem) -> None:
    watched = FaultyFileSystem(files)
    relay = behind_by_one(store, watched, files)
    bytes_of_record = len(watched.calls) + 2  # after the record, and the look whether one follows it
    watched.arm(Fault(FaultKind.SHORT_READ, bytes_of_record))

    relay.advance()

    record = commit_key(store.latest_version())
    assert [call.path.endswith(record) for call in watched.calls[bytes_of_record - 2 :]].count(True) == 3
    assert value_of(near(files)) == 2


def test_a_relay_that_is_stopped_before_it_runs_copies_nothing(store: Store, files: IsolatedMemoryFileSystem) -> None:
    relay = Relay(store, place(files))
    relay.stop()

    relay.run(poll_interval_s=10**6)

    assert relay.version is None


def test_another_process_goes_on_where_one_ended(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    Relay(store, place(files)).advance()
    save(store, 2, 3)
    watched = FaultyFileSystem(files)

    report = Relay(store, place(watched)).advance()

    assert report.segments == 2
    assert value_of(near(files)) == 3
    assert not [path for path in watched.paths("write") if IDENTITY in path]


def test_a_change_stream_of_a_relay_is_that_of_its_source(store: Store, files: IsolatedMemoryFileSystem) -> None:
    """A cursor of a relay of a branch passed for one of the main log; one from before the relay was 'no version'."""
    save(store, 1)
    trial = store.fork("trial")
    versions = save(trial, 2, 3, 4)
    Relay(trial, place(files), start=versions[1]).advance()
    copy = near(files)

    stream = changes(copy, versions[1])
    assert [batch["version"][0].as_py() for batch in stream] == [versions[2]]
    assert stream.cursor is not None
    assert stream.cursor.branch == trial.internals.branch_uuid
    with pytest.raises(BadInput):
        changes(store, stream.cursor)
    with pytest.raises(CursorExpired, match="holds no version before"):
        list(changes(copy, versions[0]))


def test_a_relay_may_begin_at_an_older_version(store: Store, files: IsolatedMemoryFileSystem) -> None:
    versions = save(store, 1, 2, 3)

    report = Relay(store, place(files), start=versions[0]).advance()

    copy = near(files)
    assert report.versions == 3
    assert [value_of(copy, version) for version in versions] == [1, 2, 3]
    with pytest.raises(VersionExpired, match="does not have version 1"):
        copy.snapshot(1)


def test_a_start_that_cannot_be_read_is_refused(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1, 2, 3)
    collect_garbage(store, policy=RetentionPolicy(keep_last=1), dry_run=False)

    with pytest.raises(VersionExpired, match="start later"):
        Relay(store, place(files), start=2).advance()
    with pytest.raises(VersionNotFound, match="no version 99 yet"):
        Relay(store, place(files), start=99).advance()
    with pytest.raises(BadInput, match="start"):
        Relay(store, place(files), start=-1)
    with pytest.raises(BadInput, match="poll_interval_s"):
        Relay(store, place(files)).run(poll_interval_s="5s")  # type: ignore[arg-type]
    assert not [stat for stat in place(files).list_objects("") if "_probe" not in stat.key]


def test_side_objects_come_before_their_records(store: Store, files: IsolatedMemoryFileSystem) -> None:
    (version,) = save(store, 1)
    for number in range(3):
        store.tag(f"{number}-" + "x" * 1000, version)
    relay = Relay(store, place(files))
    relay.advance()
    for number in range(3, 12):
        store.tag(f"{number}-" + "x" * 1000, version)
    watched = FaultyFileSystem(files)
    Relay(store, place(watched)).advance()

    copy = near(files)
    written = [path for path in watched.paths("write", "create") if f"/{STATE}" in path or f"/{COMMITS}" in path]
    assert copy.head() == store.head()
    assert len(copy.tags()) == 12
    assert same_objects(store, copy, STATE)
    assert f"/{STATE}" in written[-2]
    assert f"/{COMMITS}" in written[-1]


def test_a_branch_is_copied_as_a_log_of_its_own(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    branch = store.fork("trial")
    save(branch, 5)
    save(store, 2)

    Relay(branch, place(files)).advance()

    copy = near(files)
    assert value_of(copy) == 5
    assert copy.head() == branch.head()
    assert copy.relay is not None
    assert copy.storage.list_folders(BRANCHES) == []
    with pytest.raises(StoreExists, match="another log"):
        Relay(store, place(files)).advance()
    store.drop_branch("trial")
    Relay(branch, place(files)).advance()
    with pytest.raises(BranchNotFound, match="dropped"):
        copy.snapshot()


def test_versions_of_a_branch_are_those_of_the_branch_at_a_relay_too(
    store: Store, files: IsolatedMemoryFileSystem
) -> None:
    """By uuid and version alone those of a branch were taken for the store's own."""
    save(store, 1)
    trial = store.fork("trial")
    save(trial, 2)
    Relay(trial, place(files)).advance()
    Relay(near(files), place(files, "/leaf")).advance()

    assert store.internals.branch_uuid == ""
    assert trial.internals.branch_uuid == next(iter(store.head().record.pins))
    assert (
        near(files).internals.branch_uuid == near(files, "/leaf").internals.branch_uuid == trial.internals.branch_uuid
    )


def test_a_relay_of_a_relay_is_one(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1, 2)
    region = Relay(store, place(files, "/region"), grace_s=0, policy=RetentionPolicy(keep_last=1))
    region.advance()
    rack = Relay(near(files, "/region"), place(files))
    rack.advance()
    for value in (3, 4, 5):
        save(store, value, kind="baseline")
        region.advance()  # Lets go what is older at once, so the rack's relay is too late for it.

    report = rack.advance()

    assert report.skipped > 0
    assert value_of(near(files)) == 5
    assert near(files).head() == store.head()
    assert verify_store(near(files), deep=True).is_sound


def test_compaction_and_rollback_come_through(store: Store, files: IsolatedMemoryFileSystem) -> None:
    versions = save(store, 1, 2, 3, 4)
    relay = Relay(store, place(files), start=versions[0])
    relay.advance()
    compact(store, policy=CompactionPolicy(max_chain=1))
    store.rollback(versions[1])
    save(store, 9)

    relay.advance()

    copy = near(files)
    for record in store.log(limit=5):
        assert bytes_of(copy.snapshot(record.v)) == bytes_of(store.snapshot(record.v))
    assert verify_store(copy, all_versions=True, deep=True).is_sound


def test_superseded_positions_are_copied_as_they_are(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1, 2)
    relay = Relay(store, place(files))
    relay.advance()
    (torn,) = save(store, 3)[-1:]
    record = store.storage.read(commit_key(torn))
    assert record is not None
    store.storage.put(commit_key(torn), record[:-7])
    with pytest.raises(CorruptRecord):
        relay.advance()
    assert near(files).latest_version() == torn - 1
    repair_store(store, dry_run=False)

    report = relay.advance()

    copy = near(files)
    assert report.skipped == 1
    assert copy.head() == store.head()
    assert copy.storage.read(commit_key(torn)) == record[:-7]
    assert torn not in [one.v for one in copy.log()]
    assert value_of(copy) == 2


def test_two_relays_of_one_target_do_no_harm(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    policy = RetentionPolicy(keep_last=1)
    relays = [Relay(near(files, FAR), place(files), policy=policy, grace_s=0) for _ in range(2)]
    gate, errors = threading.Barrier(3), list[BaseException]()

    def work(relay: Relay) -> None:
        for _ in range(6):
            gate.wait(30)
            try:
                relay.advance()
            except BaseException as error:  # noqa: BLE001  told by the test
                errors.append(error)
            gate.wait(30)

    threads = [threading.Thread(target=work, args=(relay,)) for relay in relays]
    for thread in threads:
        thread.start()
    for value in range(2, 8):
        gate.wait(30)  # Both look, and copy, while the next version is saved.
        save(store, value, kind="baseline" if value % 2 else None)
        gate.wait(30)
    for thread in threads:
        thread.join()
    assert [str(error) for error in errors] == []
    for relay in relays:
        relay.advance()
    assert near(files).head() == store.head()
    assert same_objects(store, near(files), COMMITS, DATA)
    assert verify_store(near(files), deep=True).is_sound


def test_a_run_looks_until_it_is_stopped_and_outlives_failures(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    reports = list[RelayReport]()
    record = store.storage.read(commit_key(store.latest_version()))
    assert record is not None
    torn = store.latest_version() + 1
    relay = Relay(store, place(files))

    def on_report(report: RelayReport) -> None:
        reports.append(report)
        if len(reports) == 1:
            store.storage.put(commit_key(torn), b"{")
        elif len(reports) == 2:
            store.storage.delete([commit_key(torn)])
            save(store, 2)
        else:
            relay.stop()

    relay.run(poll_interval_s=0.001, on_report=on_report)

    assert [report.problem is None for report in reports] == [True, False, True]
    assert reports[1].version == torn - 1
    assert reports[1].staleness_s is not None
    assert reports[1].staleness_s > 0
    assert reports[2].delay_s is not None
    assert value_of(near(files)) == 2
    with pytest.raises(BadInput):
        relay.run(poll_interval_s=0)


def test_a_cap_on_the_bandwidth_is_kept(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    relay = Relay(store, place(files), bytes_per_s=10**6)
    waited: list[float] = []
    relay._throttle._sleep = waited.append  # type: ignore[method-assign,assignment]

    report = relay.advance()

    assert sum(waited) >= 0.5 * (report.size_bytes - 20_000) / 10**6
    with pytest.raises(BadInput):
        Relay(store, place(files), bytes_per_s=0)


def test_errors_of_a_relay_name_its_source(store: Store, files: IsolatedMemoryFileSystem) -> None:
    save(store, 1)
    Relay(store, place(files)).advance()
    with pytest.raises(CnrStoreError) as caught:
        near(files).writer()

    assert store.url in str(caught.value)
    assert sha256(place(files).read(IDENTITY) or b"") == sha256(store.storage.read(IDENTITY) or b"")


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((150_000, 64)).astype(np.float32)
    with Store.create(str(tmp_path / "far"), fsync=False, threads=2) as store:
        with store.writer() as writer, writer.begin(1) as txn:
            txn.write_table("t", values, options=TableOptions.exact())
        relay = Relay(store, str(tmp_path / "near"), fsync=False)
        tracemalloc.start()
        try:
            report = relay.advance()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert report.size_bytes > 30 * 2**20
    assert peak < report.size_bytes / 2
