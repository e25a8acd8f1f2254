"""An interrupted compaction is resumed, and only verified tasks of it are reused."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cnr_store import CompactionReport, Store, verify_store
from cnr_store.format.layout import COMPACTION_LEASE, RECEIPT, segment_key
from cnr_store.log.author import writer_info
from cnr_store.log.clock import wall_ms
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.log.rebase import draft_after, rebase_expire
from cnr_store.maintenance.compaction import compact_run, tasks
from cnr_store.maintenance.compaction import lease as leases
from cnr_store.maintenance.compaction.lease import LeasePlace
from cnr_store.storage import storage_from_filesystem
from tests.support.compacted import Training, content_of, objects_in, strangers_in
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem, SimulatedCrash
from tests.support.snapshot_bytes import bytes_of

REPOSITORY = Path(__file__).resolve().parents[2]
ALL = (0, 4)
TASKS = 3
"""Tables of the training, and so tasks of a run while a piece has one byte."""


@pytest.fixture(autouse=True)
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PIECE_BYTES", 1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"), fsync=False, threads=2)


class Stopped(Exception):
    """Raised where the test stops the work."""


def stop_behind(count: int) -> Callable[[str, int, int], None]:
    """A progress callback that ends a compaction after so many tasks; the first call is before the first of them."""
    calls = itertools.count()

    def progress(stage: str, done: int, total: int) -> None:
        if next(calls) == count:
            raise Stopped

    return progress


def undisturbed(store: Store, tmp_path: Path) -> dict[str, bytes]:
    """The objects that an uninterrupted compaction of a copy writes."""
    shutil.copytree(store.url, tmp_path / "copy")
    with Store.open(str(tmp_path / "copy"), fsync=False) as copy:
        assert compact_run(copy, run=ALL).outcome == "committed"
        return content_of(copy, copy.head().record.chain[0].seg)


def lease_of(store: Store) -> leases.CompactionLease:
    lease = LeasePlace(store.storage, store.internals.log).read()
    assert lease is not None
    return lease


def finish(store: Store, training: Training, expected: dict[str, bytes] | None = None) -> CompactionReport:
    """Compact to the end, and compare all objects of the segment."""
    report = compact_run(store, run=ALL)
    assert (report.outcome, report.tasks) == ("committed", TASKS)
    segment = store.head().record.chain[0].seg
    assert strangers_in(store, segment) == set()
    if expected is not None:
        assert content_of(store, segment) == expected
    training.check()
    assert verify_store(store, deep=True).is_sound
    return report


@pytest.mark.parametrize("done", [0, 1, TASKS])
def test_a_resumed_run_keeps_what_was_done_and_equals_an_undisturbed_one(
    store: Store, training: Training, tmp_path: Path, done: int
) -> None:
    expected = undisturbed(store, tmp_path)
    with pytest.raises(Stopped):
        compact_run(store, run=ALL, progress=stop_behind(done))

    report = finish(store, training, expected)

    assert report.reused_tasks == done
    assert report.run == tuple(entry.seg for entry in store.record(report.version - 1 if report.version else 0).chain)


def test_the_time_that_is_over_leaves_the_rest_to_the_next_call(store: Store, training: Training) -> None:
    first = compact_run(store, run=ALL, budget_s=0)
    assert (first.outcome, first.tasks, first.version) == ("unfinished", TASKS, None)

    assert finish(store, training).reused_tasks == 0


def test_a_killed_process_is_taken_up(store: Store, training: Training, tmp_path: Path) -> None:
    expected = undisturbed(store, tmp_path)
    program = """
import itertools, os, signal, sys
from cnr_store import Store
from cnr_store.maintenance.compaction import compact_run
from cnr_store.maintenance.compaction import tasks

tasks.PIECE_BYTES = 1

calls = itertools.count()

def progress(stage, done, total):
    if next(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

compact_run(Store.open(sys.argv[1], fsync=False), run=(0, 4), progress=progress)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, store.url], cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=120, check=False, capture_output=True,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    training.check()

    busy = compact_run(store, run=ALL)
    report = compact_run(store, run=ALL, force=True)

    assert (busy.outcome, busy.version) == ("busy", None)
    assert (report.outcome, report.reused_tasks) == ("committed", 2)
    segment = store.head().record.chain[0].seg
    assert content_of(store, segment) == expected
    assert strangers_in(store, segment) == set()
    training.check()


@pytest.mark.parametrize("damage", ["flip", "remove", "receipt"])
def test_a_task_whose_objects_are_not_as_they_were_is_done_again(
    store: Store, training: Training, tmp_path: Path, damage: str
) -> None:
    expected = undisturbed(store, tmp_path)
    with pytest.raises(Stopped):
        compact_run(store, run=ALL, progress=stop_behind(2))
    segment = lease_of(store).segment
    written = objects_in(store, segment)
    path = next(p for p in sorted(written) if (p.endswith(RECEIPT) if damage == "receipt" else "/c." in p))
    if damage == "remove":
        store.storage.delete([segment_key(segment, path)])
    else:
        data = bytearray(written[path])
        data[len(data) // 2] ^= 1
        store.storage.put(segment_key(segment, path), bytes(data))

    assert finish(store, training, expected).reused_tasks == 1


def test_a_task_that_lost_its_receipt_is_done_again(
    store: Store, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise Stopped

    monkeypatch.setattr("cnr_store.maintenance.compaction.run.put_manifest", stop)
    with pytest.raises(Stopped):
        compact_run(store, run=ALL)
    monkeypatch.undo()
    monkeypatch.setattr(tasks, "PIECE_BYTES", 1)
    lease = lease_of(store)
    assert len(lease.done) == TASKS + 1
    store.storage.delete([segment_key(lease.segment, f"r00001-{lease.plan[:8]}.{RECEIPT}")])

    assert compact_run(store, run=ALL, budget_s=0).outcome == "unfinished"
    assert finish(store, training).reused_tasks == TASKS - 1


def test_another_plan_or_library_begins_anew(store: Store, training: Training) -> None:
    for change in ({"plan": "0" * 64}, {"libraries": {"numpy": "1.0"}}, {"base": 400}):
        with pytest.raises(Stopped):
            compact_run(store, run=(1, 3), progress=stop_behind(1))
        old = lease_of(store)
        store.storage.put(COMPACTION_LEASE, msgspec.json.encode(msgspec.structs.replace(old, **change)))  # type: ignore[arg-type]
        with pytest.raises(Stopped):
            compact_run(store, run=(1, 3), progress=stop_behind(1))
        assert lease_of(store).txn != old.txn

    assert finish(store, training).reused_tasks == 0


def test_a_run_that_the_policy_would_not_choose_any_more_is_finished_first(store: Store, training: Training) -> None:
    with pytest.raises(Stopped):
        compact_run(store, run=ALL, progress=stop_behind(2))
    with store.writer() as writer:
        writer.restore()
        for _ in range(4):
            training.delta(writer)

    report = compact_run(store)

    assert (report.outcome, len(report.run), report.reused_tasks) == ("committed", 4, 2)
    assert report.reason == "begun by an earlier compaction"
    assert report.chain_after == 5
    training.check()


def test_a_transaction_declared_dead_is_not_resumed_even_if_forgotten(store: Store, training: Training) -> None:
    with pytest.raises(Stopped):
        compact_run(store, run=ALL, progress=stop_behind(2))
    txn = lease_of(store).txn
    for aborted in ({txn: 0}, {}):
        head = store.head()
        draft = draft_after(head.record, "expire", writer_info(), aborted=aborted)
        store.internals.log.append(head, draft, rebase_expire)

    report = finish(store, training)

    assert report.reused_tasks == 0
    assert not store.head().record.chain[0].seg.endswith(txn)


def test_a_committed_transaction_is_not_committed_again_after_a_rollback(store: Store, training: Training) -> None:
    version = store.latest_version()
    first = compact_run(store, run=ALL)
    store.rollback(version)

    second = compact_run(store, run=ALL)

    assert (first.outcome, second.outcome, second.reused_tasks) == ("committed", "committed", 0)
    names = [store.record(report.version or 0).chain[0].seg for report in (first, second)]
    assert names[0] != names[1]
    training.check()


DEEP = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("data", [b"", b"{", b'{"txn": 3}', b"\xff", DEEP], ids=["", "{", "typed", "bytes", "deep"])
def test_a_lease_that_cannot_be_read_is_nobodys(store: Store, training: Training, data: bytes) -> None:
    store.storage.put(COMPACTION_LEASE, data)

    assert finish(store, training).reused_tasks == 0


@pytest.mark.parametrize(
    ("change", "reused"),
    [
        ({"done": {"9" * 5000: "0" * 64}}, 0),
        ({"done": {"-1": "0" * 64, "1e3": "x", "\u0663": "x"}}, 0),
        ({"segment": f"{0:020d}-{'0' * 32}"}, 0),
        ({"base": -1}, 0),
        ({"run": ()}, 0),
        ({"expires_ms": 2**62}, 2),
    ],
    ids=["digits", "names", "segment", "base", "run", "expires"],
)
def test_a_lease_that_says_what_no_compaction_says_costs_work_at_most(
    store: Store, training: Training, change: dict[str, Any], reused: int
) -> None:
    with pytest.raises(Stopped):
        compact_run(store, run=ALL, progress=stop_behind(2))
    old = lease_of(store)
    store.storage.put(COMPACTION_LEASE, msgspec.json.encode(msgspec.structs.replace(old, **change)))

    assert finish(store, training).reused_tasks == reused


def test_a_lease_does_not_alter_a_segment_that_was_committed_meanwhile(store: Store, training: Training) -> None:
    """The lease has a later base than the segment, so the record that committed the segment would not be read."""
    version = store.latest_version()
    first = compact_run(store, run=ALL)
    store.rollback(version)
    old = lease_of(store)
    late = msgspec.structs.replace(old, base=store.latest_version())
    store.storage.put(COMPACTION_LEASE, msgspec.json.encode(late))
    before = objects_in(store, old.segment)

    assert finish(store, training).reused_tasks == 0

    assert objects_in(store, old.segment) == before
    assert bytes_of(store.snapshot(version=first.version)) == bytes_of(store.snapshot())


def test_who_goes_on_with_a_compaction_is_who_holds_its_lease(store: Store, training: Training) -> None:
    with pytest.raises(Stopped):
        compact_run(store, run=ALL, progress=stop_behind(2))
    abandoned = msgspec.structs.replace(lease_of(store), holder="somewhere:1")
    store.storage.put(COMPACTION_LEASE, msgspec.json.encode(abandoned))

    finish(store, training)

    assert lease_of(store).txn == abandoned.txn
    assert lease_of(store).holder == writer_info().host


def test_somebody_elses_lease_on_a_run_that_is_gone_holds_nobody_up(store: Store, training: Training) -> None:
    with pytest.raises(Stopped):
        compact_run(store, run=(1, 3), progress=stop_behind(1))
    LeasePlace(store.storage, store.internals.log).put(lease_of(store), 600.0)
    assert compact_run(store, run=ALL).outcome == "busy"
    with store.writer() as writer:
        training.full(writer)
        training.delta(writer)

    assert compact_run(store, run=(0, 2)).outcome == "committed"
    training.check()


def test_a_lease_that_cannot_be_put_holds_nobody_up() -> None:
    inner = IsolatedMemoryFileSystem()

    class NoLeases(FaultyFileSystem):
        def pipe_file(self, path: str, value: object, mode: str = "overwrite", **kwargs: object) -> None:
            if COMPACTION_LEASE in path:
                raise PermissionError(path)
            super().pipe_file(path, value, mode, **kwargs)

    store = Store.create_on(storage_from_filesystem(NoLeases(inner), "/root"), threads=1)
    training = Training(store)
    with store.writer() as writer:
        training.full(writer)
        training.delta(writer)

    assert compact_run(store, run=(0, 2)).outcome == "committed"
    training.check()


def test_a_crash_at_any_call_leaves_a_whole_state_and_a_run_to_resume() -> None:
    inner = IsolatedMemoryFileSystem()
    quick = RetryPolicy(deadline_s=0.02, first_delay_s=0.001, max_delay_s=0.002)

    def open_on(files: FaultyFileSystem | IsolatedMemoryFileSystem) -> Store:
        return Store.open_on(storage_from_filesystem(files, "/root"), threads=1, retry=quick)

    Store.create_on(storage_from_filesystem(inner, "/root"), threads=1)
    training = Training(open_on(inner))
    with training.store.writer() as writer:
        training.full(writer)
        training.delta(writer)
    expected = bytes_of(training.store.snapshot())
    calm = FaultyFileSystem(inner.fork())
    compact_run(open_on(calm), run=(0, 2))
    runs = reused = 0
    for call in calm.calls:
        for kind in (FaultKind.CRASH, FaultKind.CRASH_AFTER):
            if not kind.applies_to(call.operation):
                continue
            files = inner.fork()
            crashing = FaultyFileSystem(files, fault=Fault(kind, call.index))
            with suppress(SimulatedCrash):
                compact_run(open_on(crashing), run=(0, 2))
            assert crashing.is_crashed
            store = open_on(files)
            assert bytes_of(store.snapshot()) == expected
            if len(store.head().record.chain) > 1:
                report = compact_run(store, run=(0, 2), force=True)
                assert report.outcome == "committed"
                reused += report.reused_tasks
            assert bytes_of(store.snapshot()) == expected
            assert strangers_in(store, store.head().record.chain[0].seg) == set()
            runs += 1

    assert runs > len(calm.calls) > 50
    assert reused > runs / 2


def test_a_lease_that_a_clock_ahead_released_holds_nobody_up(store: Store, training: Training) -> None:
    place = LeasePlace(store.storage, store.internals.log)
    ahead = LeasePlace(store.storage, store.internals.log, lambda: wall_ms() + 2 * 3_600_000)

    held = leases.HeldLease(ahead, leases.new_lease(["a", "b"], 3, "0" * 64, "host:1"), 60.0)
    before = place.read()
    held.release()
    after = place.read()

    assert before is not None
    assert after is not None
    assert (place.is_live(before), place.is_live(after)) == (True, False)


def test_a_lease_is_live_until_its_end_and_each_sign_of_life_moves_that(store: Store, training: Training) -> None:
    now = [1_000]
    place = LeasePlace(store.storage, store.internals.log, lambda: now[0])
    held = leases.HeldLease(place, leases.new_lease(["a", "b"], 3, "0" * 64, "host:1"), 60.0)

    def found() -> leases.CompactionLease:
        lease = place.read()
        assert lease is not None
        return lease

    assert (found().expires_ms, place.is_live(found())) == (61_000, True)
    now[0] = 60_999
    assert place.is_live(found())
    held.note_done(2, "f" * 64)
    now[0] = 120_998
    assert place.is_live(found())
    assert leases.receipts_of(found()) == {2: "f" * 64}
    held.release()
    assert not place.is_live(found())
    assert leases.receipts_of(found()) == {2: "f" * 64}
