"""Commit logs on memory that fails on demand, and records to append to them."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest

from cnr_store.errors import CommitStateUnknown
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.layout import branch_prefix, commit_key, segment_name
from cnr_store.format.records import ChainEntry, CommitRecord, WriterInfo
from cnr_store.log.commit_log import CommitLog, RetryPolicy
from cnr_store.log.rebase import draft_after, draft_init, rebase_data, rebase_fence, rebase_tag
from cnr_store.storage import Storage, storage_from_filesystem
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem

STORE = "5" * 32
WRITER = WriterInfo(host="h", lib="0.1.0", run_id="r")
ROOT = "/root"
BRANCH = branch_prefix("b" * 32)
on_a_branch_too = pytest.mark.parametrize("prefix", ["", BRANCH], ids=["store", "branch"])


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds

    def monotonic_s(self) -> float:
        return self.now_s

    def ms(self) -> int:
        return int(self.now_s * 1000)


def open_log(fs: Any, prefix: str = "", **options: Any) -> CommitLog:
    return log_on(storage_from_filesystem(fs, ROOT), prefix, **options)


def log_on(
    storage: Storage, prefix: str = "", *, clock: Clock | None = None, deadline_s: float = 5.0, uuid: str = STORE
) -> CommitLog:
    clock = clock or Clock()
    return CommitLog(
        storage,
        uuid,
        prefix,
        retry=RetryPolicy(deadline_s=deadline_s),
        clock_ms=clock.ms,
        monotonic_s=clock.monotonic_s,
        sleep=clock.sleep,
        random=Random(0),
    )


def calm(inner: IsolatedMemoryFileSystem) -> FaultyFileSystem:
    return FaultyFileSystem(inner)


def txn(number: int) -> str:
    return f"{number:032x}"


def delta(head: LogEntry, number: int, **changes: Any) -> CommitRecord:
    chain = head.record.chain
    start = chain[-1].l1 if chain else 0
    own = ChainEntry(
        seg=segment_name(head.record.v, txn(number)),
        sha256="0" * 64,
        kind="delta" if chain else "baseline",
        l0=start,
        l1=start + 1,
        size_bytes=1,
        rows=1,
    )
    kept = {"chain": (*chain, own), "checkpoint": start + 1, "step": 10 * (start + 1), **changes}
    return draft_after(head.record, "delta" if chain else "baseline", WRITER, **kept)


def append_delta(log: CommitLog, head: LogEntry, number: int, **changes: Any) -> LogEntry:
    return log.append(head, delta(head, number, **changes), partial(rebase_data, txn=txn(number)))


def append_tag(log: CommitLog, head: LogEntry, name: str) -> LogEntry:
    tags = {**head.record.tags, name: head.record.v}
    draft = draft_after(head.record, "tag", WRITER, name=name, target=head.record.v, tags=tags)
    return log.append(head, draft, rebase_tag)


def append_fence(log: CommitLog, head: LogEntry) -> LogEntry:
    return log.append(head, draft_after(head.record, "fence", WRITER, epoch=head.record.epoch + 1), rebase_fence)


def with_versions(inner: IsolatedMemoryFileSystem, count: int, prefix: str = "") -> LogEntry:
    """A log of ``count`` versions written as fast as possible: init, then records that leave the state alone."""
    log = open_log(calm(inner), prefix)
    head = log.append_first(draft_init(WRITER))
    for number in range(1, count):
        head = log.append(head, draft_after(head.record, "expire", WRITER, step=number), no_rebase)
    return head


def unresolved_log(inner: IsolatedMemoryFileSystem, head: LogEntry) -> tuple[CommitLog, FaultyFileSystem]:
    """A log whose append of delta 1 ended without an answer: its put is still under way."""
    fault = Fault(FaultKind.DELAYED_PUT, at=0, delay_calls=10**6)
    fs = FaultyFileSystem(inner, fault=fault)
    log = open_log(fs, deadline_s=0.0)
    with pytest.raises(CommitStateUnknown):
        append_delta(log, head, 1)
    assert log.unresolved == head.record.v + 1
    return log, fs


def no_rebase(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    raise AssertionError(f"nothing should stand between: {intervening.record.v} before {draft.kind}")


def write_raw(inner: IsolatedMemoryFileSystem, version: int, data: bytes) -> None:
    inner.pipe_file(f"{ROOT}/{commit_key(version)}", data)
