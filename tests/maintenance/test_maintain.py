"""Maintenance with a time budget: its plan, its report, and that it changes no value."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store import (
    BadInput,
    CompactionPolicy,
    CorruptStore,
    MaintenanceReport,
    RetentionPolicy,
    Stage,
    StageReport,
    StorageFailure,
    Store,
    compact,
    maintain,
    read_status,
    verify_store,
)
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.maintenance.compaction import compact_run
from cnr_store.maintenance.compaction.lease import LeasePlace
from cnr_store.maintenance.maintain import plan_stages, share_s
from cnr_store.storage import Storage, open_storage, storage_from_filesystem
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.snapshot_bytes import bytes_of

SHORT = CompactionPolicy(max_chain=4)
LAST = RetentionPolicy(keep_last=1)
names = st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=6)


@given(names)
def test_every_log_is_compacted_and_garbage_is_collected_once_and_last(branches: list[str]) -> None:
    stages = plan_stages(branches)

    assert stages[0] == Stage("compact")
    assert sorted(stage.branch or "" for stage in stages[1:-1]) == sorted(branches)
    assert [stage.kind for stage in stages].count("collect") == 1
    assert stages[-1] == Stage("collect")


@given(names, st.floats(0, 1e6), st.data())
def test_shares_never_exceed_the_budget_and_deletions_are_never_starved(
    branches: list[str], budget_s: float, data: st.DataObject
) -> None:
    stages = plan_stages(branches)
    left = budget_s
    for index in range(len(stages)):
        share = share_s(stages[index:], left)
        assert share is not None
        assert 0 <= share <= left
        assert share > 0 or left == 0 or left < 1e-300
        left -= share * data.draw(st.floats(0, 1))
    assert left >= 0


def test_what_a_stage_leaves_goes_to_those_after_it() -> None:
    stages = plan_stages([])

    assert share_s(stages, 100.0) == pytest.approx(80.0)
    assert share_s(stages[1:], 99.0) == pytest.approx(99.0)
    assert share_s(stages, -5.0) == 0.0
    assert share_s(stages, None) is None


def train(log: Store, values: np.ndarray, steps: range, *, seed: int) -> None:
    random = np.random.default_rng(seed)
    with log.writer() as writer:
        writer.restore()
        for step in steps:
            rows = np.sort(random.choice(len(values), 40, replace=False))
            values[rows] += 0.1
            with writer.begin(step=step) as txn:
                txn.write_rows("user", rows, values[rows])


def build(storage: Storage) -> Store:
    """A store whose own log and branch both have more deltas than a policy of 4 segments allows."""
    store = Store.create_on(storage, threads=2)
    values = np.random.default_rng(1).normal(size=(500, 8)).astype(np.float32)
    with store.writer() as writer, writer.begin(step=0) as txn:
        txn.write_table("user", values)
    with store.fork("trial") as branch:
        train(branch, values.copy(), range(100, 106), seed=2)
    train(store, values, range(1, 9), seed=3)
    return store


@pytest.fixture
def fs() -> IsolatedMemoryFileSystem:
    return IsolatedMemoryFileSystem()


@pytest.fixture
def store(fs: IsolatedMemoryFileSystem) -> Store:
    return build(storage_from_filesystem(fs, "store"))


def files(fs: IsolatedMemoryFileSystem) -> dict[str, bytes]:
    return {path: file.getvalue() for path, file in fs.store.items()}


def at_once(store: Store, **options: Any) -> MaintenanceReport:
    """A run without grace periods, with chains of at most 4 segments."""
    return maintain(store, **{"compaction": SHORT, "retention": LAST, "grace_s": 0, "force": True, **options})


def outcomes(report: MaintenanceReport) -> list[tuple[str, str | None, str]]:
    return [(stage.stage.kind, stage.stage.branch, stage.outcome) for stage in report.stages]


def test_a_run_compacts_every_log_deletes_what_is_free_and_keeps_states(store: Store) -> None:
    before = bytes_of(store.snapshot()), bytes_of(store.on_branch("trial").snapshot())

    report = at_once(store)

    assert outcomes(report) == [("compact", None, "done"), ("compact", "trial", "done"), ("collect", None, "done")]
    assert report.outcome == "done"
    assert report.error is None
    heads = read_status(store).heads
    assert [head.chain_length <= SHORT.max_chain for head in heads] == [True, True]
    assert (bytes_of(store.snapshot()), bytes_of(store.on_branch("trial").snapshot())) == before
    needed = {entry.seg for log in (store, store.on_branch("trial")) for entry in log.head().record.chain}
    needed |= {entry.seg for entry in store.record(store.branches()["trial"].version).chain}
    assert set(store.storage.list_folders("data/")) == needed
    assert report.rewritten_bytes > 0
    assert report.deleted_bytes > 0
    assert verify_store(store, all_versions=True, deep=True).is_sound


def test_a_second_run_does_nothing(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    at_once(store)
    before = files(fs)

    report = at_once(store)

    after = files(fs)
    assert report.outcome == "done"
    assert (report.rewritten_bytes, report.deleted_bytes) == (0, 0)
    assert {path for path in before | after if before.get(path) != after.get(path)} <= {"/store/hint/maintenance.json"}


def test_a_dry_run_changes_nothing_and_says_what_would_be_done(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    before = files(fs)

    report = at_once(store, dry_run=True)

    assert files(fs) == before
    assert report.is_dry_run
    assert outcomes(report) == [("compact", None, "done"), ("compact", "trial", "done"), ("collect", None, "done")]
    assert [[compact.outcome for compact in stage.compactions] for stage in report.stages[:2]] == [
        ["planned"],
        ["planned"],
    ]
    assert report.stages[2].collection is not None
    assert report.stages[2].collection.expired > 0


def test_without_any_time_nothing_is_compacted_and_the_next_run_does_it(store: Store) -> None:
    report = at_once(store, budget_s=0)

    assert report.outcome == "stopped"
    assert [stage.outcome for stage in report.stages[:2]] == ["stopped", "stopped"]
    assert store.head().record.kind != "compact"
    assert at_once(store, budget_s=3600).outcome == "done"
    assert read_status(store).heads[0].chain_length <= SHORT.max_chain


def test_a_run_out_of_time_stops_after_the_compaction_that_was_begun(store: Store) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    # Without an end it takes two compactions: the deltas, and then what they became into the baseline.
    policy = CompactionPolicy(max_chain=1, max_restore_ratio=1000)
    reports = compact(store, policy=policy, budget_s=1.5, monotonic_s=clock)

    assert [report.outcome for report in reports] == ["committed", "planned"]


def test_a_failing_log_is_reported_and_the_others_and_the_collection_run(fs: IsolatedMemoryFileSystem) -> None:
    build(storage_from_filesystem(fs, "store"))
    head = Store.open_on(storage_from_filesystem(fs, "store")).latest_version()

    def full(call: Call) -> None:
        if call.operation in ("write", "create") and f"data/{head:020d}-" in call.path:
            raise OSError(errno.ENOSPC, "no space left on device")

    faulty = FaultyFileSystem(fs, on_call=full)
    store = Store.open_on(storage_from_filesystem(faulty, "store"), threads=1, retry=RetryPolicy(deadline_s=0.1))

    report = at_once(store)

    assert outcomes(report) == [("compact", None, "failed"), ("compact", "trial", "done"), ("collect", None, "done")]
    assert report.outcome == "failed"
    assert isinstance(report.error, StorageFailure)
    assert read_status(store).heads[1].chain_length <= SHORT.max_chain
    assert report.stages[2].collection is not None
    assert report.stages[2].collection.expired > 0


def test_nothing_is_deleted_while_data_contradicts_itself(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    segment = store.on_branch("trial").head().record.chain[-1].seg
    key = next(path for path in fs.store if segment in path and ".codes/c." in path)
    fs.pipe_file(key, b"noise")
    before = set(files(fs))

    report = at_once(store)

    assert outcomes(report) == [("compact", None, "done"), ("compact", "trial", "failed"), ("collect", None, "skipped")]
    assert report.outcome == "failed"
    assert isinstance(report.error, CorruptStore)
    assert before <= set(files(fs))
    assert store.head().record.floor == 0


def test_corruption_is_the_error_that_counts() -> None:
    stage = Stage("compact")
    full, torn = StorageFailure("disk full"), CorruptStore("torn")
    stages = (StageReport(stage, "failed", error=full), StageReport(stage, "failed", error=torn))

    assert MaintenanceReport("u", False, 1.0, None, stages).error is torn


def test_two_runs_at_once_harm_nothing(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    before = bytes_of(store.snapshot()), bytes_of(store.on_branch("trial").snapshot())
    start = threading.Barrier(2)

    def run(_: int) -> MaintenanceReport:
        with Store.open_on(storage_from_filesystem(fs, "store"), threads=1) as own:
            start.wait()
            return at_once(own, grace_s=86_400)

    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(run, range(2)))

    assert {report.outcome for report in reports} <= {"done", "stopped"}
    assert at_once(store).outcome == "done"
    assert (bytes_of(store.snapshot()), bytes_of(store.on_branch("trial").snapshot())) == before
    assert verify_store(store, all_versions=True, deep=True).is_sound


def test_a_log_that_another_process_compacts_is_left_to_it(store: Store) -> None:
    compact_run(store, policy=SHORT, budget_s=0)
    place = LeasePlace(store.storage, store.internals.log)
    lease = place.read()
    assert lease is not None
    place.put(msgspec.structs.replace(lease, holder="another"), 600.0)

    report = at_once(store)

    assert outcomes(report)[:2] == [("compact", None, "busy"), ("compact", "trial", "done")]
    assert report.outcome == "done"


def test_a_branch_whose_time_is_over_is_closed_and_not_compacted(store: Store) -> None:
    store.fork("short", ttl_s=0.001).close()
    time.sleep(0.01)

    report = at_once(store)

    assert ("compact", "short", "done") in outcomes(report)
    assert sorted(store.branches()) == ["trial"]


def test_a_run_leaves_a_note_for_monitors_and_lives_without_it(tmp_path: Path) -> None:
    store = build(open_storage(str(tmp_path / "s"), fsync=False))

    report = at_once(store)
    note = read_status(store).last_maintenance
    (tmp_path / "s" / "hint" / "maintenance.json").unlink()
    (tmp_path / "s" / "hint" / "maintenance.json").mkdir()

    assert note is not None
    assert (note.outcome, note.rewritten_bytes, note.deleted_bytes) == (
        "done", report.rewritten_bytes, report.deleted_bytes,
    )  # fmt: skip
    assert (note.pending_delete_bytes, note.orphans) == (0, 0)
    assert at_once(store).outcome == "done"


def test_what_waits_for_the_grace_is_counted_in_the_note(store: Store) -> None:
    maintain(store, compaction=SHORT, retention=LAST)
    waiting = store.storage.list_folders("data/")
    still = {entry.seg for log in (store, store.on_branch("trial")) for entry in log.head().record.chain}
    still |= {entry.seg for entry in store.record(store.branches()["trial"].version).chain}
    size = sum(
        stat.size_bytes for name in waiting if name not in still for stat in store.storage.list_objects(f"data/{name}/")
    )

    maintain(store, compaction=SHORT, retention=LAST)  # counts what is there; the first one knows chains alone

    note = read_status(store).last_maintenance
    assert note is not None
    assert note.pending_delete_bytes == size > 0


@pytest.mark.parametrize(
    "options",
    [
        {"grace_s": 10.0},
        {"orphan_age_s": 10.0},
        {"budget_s": -1.0},
        {"budget_s": float("nan")},
        {"budget_s": "1h"},
        {"engine": "magic"},
        {"engine": "processes"},
        {"workers": 0},
    ],
)
def test_a_meaningless_argument_is_refused_before_anything_is_done(
    store: Store, fs: IsolatedMemoryFileSystem, options: dict[str, Any]
) -> None:
    before = files(fs)

    with pytest.raises(BadInput):
        maintain(store, compaction=SHORT, **options)

    assert files(fs) == before


def test_a_branch_alone_is_refused(store: Store) -> None:
    with pytest.raises(BadInput, match="needs the store itself"):
        maintain(store.on_branch("trial"))
