"""The log with every fault at every storage call: what was acknowledged stays, and appears exactly once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import fsspec
import pytest

from cnr_store.errors import CommitStateUnknown, Conflict, CorruptStore, StorageFailure, VersionNotFound
from cnr_store.format.commit_record import LogEntry
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.rebase import draft_after, draft_init, rebase_fence, rebase_rollback
from tests.log import logs
from tests.log.logs import WRITER, append_fence, append_tag, txn
from tests.support.faulty import FaultKind, FaultyFileSystem
from tests.support.sweep import survived, sweep

open_log = partial(logs.open_log, deadline_s=0.5)


def append_delta(log: CommitLog, head: LogEntry, number: int, epoch: int) -> LogEntry:
    return logs.append_delta(log, head, number, step=number, epoch=epoch)


def append_rollback(log: CommitLog, head: LogEntry, target: LogEntry) -> LogEntry:
    record = target.record
    draft = draft_after(
        head.record,
        "rollback",
        WRITER,
        target=record.v,
        chain=record.chain,
        checkpoint=record.checkpoint,
        step=record.step,
    )
    return log.append(head, draft, rebase_rollback)


class LogScenario:
    """Common law of the scenarios: acknowledged entries stand in the log, once, on the state they were made from.

    A run notes ("try", number) before and ("ack", entry) after each append.
    """

    def prepare(self, fs: fsspec.AbstractFileSystem) -> None:
        """Start from nothing."""

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        raise NotImplementedError

    def check(self, fs: fsspec.AbstractFileSystem, acknowledged: list[Any]) -> None:
        log = open_log(fs)
        entries = acknowledged_entries(acknowledged)
        try:
            newest = log.latest()
        except (CorruptStore, VersionNotFound):
            assert not entries, "an acknowledged log is gone"
            return
        found = {entry.record.v: entry for entry in log.walk(newest)}
        for entry in entries:
            assert found.get(entry.record.v) == entry, f"acknowledged version {entry.record.v} is lost"
        tried = {value for what, value in acknowledged if what == "try"}
        committed = [entry.record.step for entry in found.values() if entry.record.kind in ("baseline", "delta")]
        assert len(committed) == len(set(committed)), "an append is in the log twice"
        assert set(committed) <= tried, "the log holds what nobody appended"
        self.can_go_on(fs)

    def can_go_on(self, fs: fsspec.AbstractFileSystem) -> None:
        """The next process fences and appends, whatever happened before."""
        log = open_log(fs.inner.fork() if isinstance(fs, FaultyFileSystem) else fs)
        head = append_fence(log, log.latest())
        entry = append_delta(log, head, 9_999, head.record.epoch)
        assert log.latest() == entry


def acknowledged_entries(acknowledged: list[Any]) -> list[LogEntry]:
    return [entry for what, entry in acknowledged if what == "ack"]


class OneWriter(LogScenario):
    """Init, fence, deltas, tag, rollback, one more delta. Goes on after a failure as a trainer would."""

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        log = open_log(fs)
        acknowledged.append(("ack", log.append_first(draft_init(WRITER))))
        head = append_fence(log, log.latest())
        acknowledged.append(("ack", head))
        epoch = head.record.epoch
        good = head
        for number in range(1, 5):
            acknowledged.append(("try", number))
            head = self.settled(log, head, partial(append_delta, log, head, number, epoch), acknowledged)
            good = head if number == 2 else good
        head = self.settled(log, head, partial(append_tag, log, head, "kept"), acknowledged)
        head = self.settled(log, head, partial(append_rollback, log, head, good), acknowledged)
        acknowledged.append(("try", 5))
        self.settled(log, head, partial(append_delta, log, head, 5, epoch), acknowledged)

    def settled(
        self, log: CommitLog, head: LogEntry, append: Callable[[], LogEntry], acknowledged: list[Any]
    ) -> LogEntry:
        """The head after an append, which is repeated until its outcome is known."""
        try:
            entry = append()
        except CommitStateUnknown:
            assert log.unresolved is not None
            resolved = log.resolve()
            assert resolved is not None, "nobody else writes here"
            entry = resolved
        except StorageFailure:
            assert log.unresolved is None
            return head
        acknowledged.append(("ack", entry))
        return entry


class LargeLists(OneWriter):
    """The same with lists that need a side object in every record."""

    def prepare(self, fs: fsspec.AbstractFileSystem) -> None:
        log = open_log(fs)
        first = log.append_first(draft_init(WRITER))
        aborted = {txn(10**6 + number): 0 for number in range(300)}
        log.append(first, draft_after(first.record, "expire", WRITER, aborted=aborted), rebase_fence)


class TwoWriters(LogScenario):
    """A process is replaced by another in mid-work; the first comes back and must find itself fenced."""

    def run(self, fs: FaultyFileSystem, acknowledged: list[Any]) -> None:
        other = open_log(FaultyFileSystem(fs.inner))
        log = open_log(fs)
        acknowledged.append(("ack", log.append_first(draft_init(WRITER))))
        mine = append_fence(log, log.latest())
        acknowledged.append(("try", 1))
        head = mine
        try:
            head = append_delta(log, mine, 1, mine.record.epoch)
            acknowledged.append(("ack", head))
        except CommitStateUnknown:
            assert log.unresolved == mine.record.v + 1  # it may land before the other's fence, or meet it there

        theirs = append_fence(other, other.latest())
        acknowledged.append(("ack", append_tag(other, theirs, "taken over")))
        acknowledged.append(("try", 2))
        newest = append_delta(other, other.latest(), 2, theirs.record.epoch)
        acknowledged.append(("ack", newest))

        acknowledged.append(("try", 3))
        with pytest.raises((Conflict, StorageFailure, CorruptStore)):
            append_delta(log, head, 3, mine.record.epoch)
        straggler = log.resolve()
        if straggler is not None:
            assert straggler.record.step == 1
            acknowledged.append(("ack", straggler))
        assert other.latest() == newest


@pytest.mark.parametrize("scenario", [OneWriter(), LargeLists(), TwoWriters()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("calls_hit", [1, 3])
def test_no_fault_at_any_call_loses_or_repeats_an_acknowledged_append(scenario: LogScenario, calls_hit: int) -> None:
    report = survived(scenario, calls_hit=calls_hit)

    assert report.crashed > report.calls  # each call can crash before its effect, some after it
    print(report)  # noqa: T201  shown with -s


LASTING = [FaultKind.FAIL_BEFORE, FaultKind.DISK_FULL, FaultKind.DELAYED_PUT]


@pytest.mark.parametrize("scenario", [OneWriter(), LargeLists(), TwoWriters()], ids=lambda s: type(s).__name__)
def test_outage_that_lasts_ends_in_an_error_and_loses_nothing(scenario: LogScenario) -> None:
    report = survived(scenario, LASTING, calls_hit=10**6, delay_calls=[10**6])

    assert report.refused > report.runs / 4  # a record with a side object fails cleanly, and the run goes on


class Forgetful(OneWriter):
    """A writer that calls its appends acknowledged before they are."""

    def settled(
        self, log: CommitLog, head: LogEntry, append: Callable[[], LogEntry], acknowledged: list[Any]
    ) -> LogEntry:
        try:
            entry = append()
        except (CommitStateUnknown, StorageFailure):
            entry = LogEntry(head.record, "f" * 64)
        acknowledged.append(("ack", entry))
        return entry


def test_the_sweep_finds_a_writer_that_acknowledges_too_early() -> None:
    report = sweep(Forgetful(), [FaultKind.FAIL_BEFORE], calls_hit=10**6)

    assert any("is lost" in failure.problem for failure in report.failures)
