"""Compact one run: choose it, merge it, write the manifest, replace it in the chain (spec, annex E).

A compaction locks nothing and deletes nothing. Concurrent saves, tags and compactions continue: the result replaces
the run in the newest chain, or is abandoned if the run is no longer in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec

from cnr_store.errors import CommitStateUnknown, Conflict, CorruptStore, MissingObject, StorageFailure
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import ChainEntry, Manifest, SegmentKind
from cnr_store.log.author import writer_info
from cnr_store.log.rebase import draft_after, rebase_compact, replace_run
from cnr_store.maintenance.compaction.engines import Bench, Engine, FinishedTask, Job, check_engine, run_tasks
from cnr_store.maintenance.compaction.estimate import estimate_bytes
from cnr_store.maintenance.compaction.lease import (
    HeldLease,
    LeasePlace,
    is_open,
    libraries,
    new_lease,
    receipts_of,
    run_of,
)
from cnr_store.maintenance.compaction.plan import DEFAULT_POLICY, CompactionPolicy, Run, choose_run, run_between
from cnr_store.maintenance.compaction.result import put_manifest, verified, write_rest
from cnr_store.maintenance.compaction.tasks import CompactionTask, compactable_run, plan_digest, plan_tasks
from cnr_store.runtime.notebook import ShownReport
from cnr_store.runtime.threads import Throttle, Workers, check_rate
from cnr_store.segment.reader import SegmentReader, open_chain
from cnr_store.store import Store

logger = logging.getLogger(__name__)

Outcome = Literal["committed", "nothing", "planned", "abandoned", "busy", "unfinished"]
ProgressCallback = Callable[[str, int, int], None]
"""Called as (stage, done, total): ``compact``, in bytes of the run that is merged."""

LEASE_S = 600.0
"""Seconds after its last renewal at which the lease of a compaction expires; a task takes seconds."""


@dataclass(frozen=True, slots=True)
class CompactionReport(ShownReport):
    """The result of a compaction.

    Attributes
    ----------
    url
        The store, without credentials.
    outcome
        ``committed``; ``nothing`` to do; ``planned`` by a dry run; ``abandoned``, because the run has left the chain
        or the transaction was marked for deletion; ``busy``: another process is compacting it; ``unfinished``: the
        budget is over, and the next compaction continues.
    version
        The committed version, or None.
    kind, run, l0, l1, reason
        The kind of the result, the segments of the run, the checkpoints that it leads from and to, and why it was
        chosen or not committed. None and empty without a run.
    tasks, reused_tasks
        Number of tasks of the run, and how many of them an earlier compaction had finished.
    bytes_in, bytes_out, rows_in, rows_out
        Size of the run, and of the segment that replaced it (0 unless committed).
    estimated_bytes
        About the size of what the run would become; only of a dry run, else 0.
    duration_s
        Wall time.
    chain_before, chain_after
        Segments of the head's chain, when the run was chosen and at the end.
    """

    url: str
    outcome: Outcome
    version: int | None = None
    kind: SegmentKind | None = None
    run: tuple[str, ...] = ()
    l0: int | None = None
    l1: int | None = None
    reason: str = ""
    tasks: int = 0
    reused_tasks: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    rows_in: int = 0
    rows_out: int = 0
    estimated_bytes: int = 0
    duration_s: float = 0.0
    chain_before: int = 0
    chain_after: int = 0


def compact_run(
    store: Store,
    *,
    policy: CompactionPolicy = DEFAULT_POLICY,
    run: tuple[int, int] | None = None,
    engine: Engine = "threads",
    workers: int | None = None,
    bytes_per_s: float | None = None,
    budget_s: float | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> CompactionReport:
    """Compact one run of the head's chain into one segment that reads bit-identically; commit it. Blocks.

    Safe during saves, reads and other compactions. One call compacts one run.

    Parameters
    ----------
    run
        Positions (start, stop) of the chain to compact, instead of the policy's choice.

    Other parameters, memory and errors are those of `cnr_store.compact`.

    Examples
    --------
    >>> import numpy as np
    >>> store = Store.create("memory://doctest-compact-run")
    >>> rows = np.arange(2)
    >>> with store.writer() as writer:
    ...     with writer.begin(step=0) as txn:
    ...         txn.write_table("user", np.zeros((4, 2), np.float32))
    ...     for step in (1, 2):
    ...         with writer.begin(step=step) as txn:
    ...             _ = txn.write_rows("user", rows, np.full((2, 2), step, np.float32))
    >>> report = compact_run(store, run=(0, 3))
    >>> report.outcome, report.kind, report.chain_after
    ('committed', 'baseline', 1)
    """
    started = time.monotonic()
    check_engine(engine, store.storage, workers)
    check_rate(bytes_per_s)
    store.internals.check_not_relay()
    head = store.head()
    chosen = _choose(head, policy, run)
    if chosen is not None and not dry_run:
        head = store.internals.writable_head()
        chosen = _choose(head, policy, run)
    report = CompactionReport(
        store.url, "nothing", chain_before=len(head.record.chain), chain_after=len(head.record.chain)
    )
    if chosen is not None:
        try:
            plan = _plan(store, head, chosen)
            if dry_run:
                size_bytes = estimate_bytes(plan.readers, plan.run, store.internals.workers)
        except MissingObject:
            if store.head().record.chain == head.record.chain:
                raise
            # Another process compacted and deleted it since the head was read: nothing is damaged.
            report = replace(report, outcome="abandoned", reason="the chain was replaced while it was read")
            return replace(report, duration_s=time.monotonic() - started)
        if dry_run:
            report = replace(plan.describe(report, "planned"), estimated_bytes=size_bytes)
        else:
            options = _WorkOptions(engine, workers, bytes_per_s, _is_over(started, budget_s), progress or _say_nothing)
            report = _take_up(store, report, plan, options, force=force, is_bound=run is not None)
    return replace(report, duration_s=time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The decision: which run of which head's chain is compacted, in which tasks."""

    head: LogEntry
    readers: tuple[SegmentReader, ...]
    run: Run
    tasks: tuple[CompactionTask, ...]
    digest: str

    @property
    def entries(self) -> tuple[ChainEntry, ...]:
        """The chain entries of the run."""
        return self.head.record.chain[self.run.start : self.run.stop]

    @property
    def names(self) -> tuple[str, ...]:
        """The segments of the run."""
        return tuple(entry.seg for entry in self.entries)

    @property
    def manifests(self) -> list[Manifest]:
        """The manifests of the chain."""
        return [reader.manifest for reader in self.readers]

    def describe(self, report: CompactionReport, outcome: Outcome, reason: str | None = None) -> CompactionReport:
        """Return the report with the run's fields filled in."""
        return replace(
            report, outcome=outcome, kind=self.run.kind, run=self.names, l0=self.entries[0].l0, l1=self.entries[-1].l1,
            reason=self.run.reason if reason is None else reason, tasks=len(self.tasks),
            bytes_in=sum(entry.size_bytes for entry in self.entries), rows_in=sum(entry.rows for entry in self.entries),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _WorkOptions:
    """Options of the execution."""

    engine: Engine
    workers: int | None
    bytes_per_s: float | None
    is_over: Callable[[], bool]
    progress: ProgressCallback


def _choose(head: LogEntry, policy: CompactionPolicy, wanted: tuple[int, int] | None) -> Run | None:
    chain = head.record.chain
    return choose_run(chain, policy) if wanted is None else run_between(chain, *wanted)


def _plan(store: Store, head: LogEntry, chosen: Run) -> _Plan:
    chain = head.record.chain
    readers = open_chain(store.storage, chain, store.internals.workers)
    return _plan_of(head, readers, compactable_run([reader.manifest for reader in readers], chosen))


def _plan_of(head: LogEntry, readers: tuple[SegmentReader, ...], run: Run) -> _Plan:
    tasks = plan_tasks([reader.manifest for reader in readers], run)
    digest = plan_digest(head.record.chain[run.start : run.stop], tasks)
    return _Plan(head, readers, run, tasks, digest)


def _take_up(
    store: Store,
    report: CompactionReport,
    plan: _Plan,
    options: _WorkOptions,
    *,
    force: bool,
    is_bound: bool,
) -> CompactionReport:
    """Resume an earlier compaction or start a new one, unless another process is compacting the run.

    ``is_bound``: the caller chose the run, so no other run may be resumed.
    """
    place = LeasePlace(store.storage, store.internals.log)
    old = place.read()
    where = None if old is None else run_of(old, plan.head.record)
    note = None
    if old is not None and where is not None and is_open(old, store.internals.log, plan.head):
        if place.is_live(old) and not force:
            left = f"its lease ends in {place.left_s(old):.0f} s, unless it is renewed"
            return plan.describe(report, "busy", f"{old.holder} is compacting it; {left} (`cnr compact --force`: now)")
        kind = plan.head.record.chain[where[0]].kind
        again = _plan_of(plan.head, plan.readers, Run(*where, kind, "begun by an earlier compaction"))
        if (old.plan, old.libraries) == (again.digest, libraries()) and not (is_bound and again.names != plan.names):
            plan, note = again, msgspec.structs.replace(old, holder=writer_info().host)
    if note is None:
        note = new_lease(plan.names, plan.head.record.v, plan.digest, writer_info().host)
    described = plan.describe(report, "planned")
    logger.info(
        "%s: merging %d segments, %d bytes, into one %s: %s",
        store.url, len(described.run), described.bytes_in, described.kind, described.reason,
    )  # fmt: skip
    held = HeldLease(place, note, LEASE_S)
    try:
        return _Work(store, plan, held, options).carry_out(report)
    finally:
        held.release()


class _Work:
    """Executes one plan under one lease."""

    def __init__(self, store: Store, plan: _Plan, held: HeldLease, options: _WorkOptions) -> None:
        note = held.lease
        self._store, self._plan, self._held, self._options = store, plan, held, options
        self._job = Job(
            segment=note.segment, txn=note.txn, base=note.base, l0=plan.entries[0].l0, attempt=plan.digest[:8],
            world=len(plan.tasks) + 1,
            chain=plan.head.record.chain[: plan.run.stop], run=plan.run,
        )  # fmt: skip
        self._head = plan.head
        self._done: dict[int, FinishedTask] = {}
        self._reused = 0

    def carry_out(self, report: CompactionReport) -> CompactionReport:
        """Compact and commit; return the completed report."""
        report = self._plan.describe(report, "unfinished")
        try:
            merged = self._write()
            report = replace(report, reused_tasks=self._reused)
            if merged is None:
                return report
            entry = self._commit(merged)
        except CommitStateUnknown:
            raise
        except Conflict as error:
            return replace(report, outcome="abandoned", reason=str(error), reused_tasks=self._reused)
        return replace(
            report, outcome="committed", version=entry.record.v, bytes_out=merged.size_bytes, rows_out=merged.rows,
            chain_after=len(entry.record.chain),
        )  # fmt: skip

    def _write(self) -> ChainEntry | None:
        """Write the segment and return its chain entry; None if the budget is over first."""
        try:
            if not self._compact():
                return None
            return put_manifest(
                self._store.storage, self._job, self._plan.tasks, list(self._done.values()), self._plan.manifests
            )
        except (CorruptStore, StorageFailure):
            # If another process replaced the run or marked this transaction for deletion, the objects may be deleted.
            # Then _follow raises Conflict instead of this error.
            self._follow()
            raise

    def _compact(self) -> bool:
        """Execute all tasks and write the rest; return False if the budget is over first."""
        options, rest = self._options, len(self._plan.tasks)
        with self._workers() as workers:
            self._reuse(workers)
            self._report_progress()
            bench = Bench(self._store.storage, self._plan.readers, workers, Throttle(options.bytes_per_s))
            todo = [task for task in self._plan.tasks if task.index not in self._done]
            done = run_tasks(
                options.engine, self._job, todo, bench,
                workers=options.workers, bytes_per_s=options.bytes_per_s, is_over=options.is_over,
            )  # fmt: skip
            with closing(done):  # stops all tasks, also after an error
                for one in done:
                    self._note(one)
                    self._report_progress()
                    self._follow()
            if any(task.index not in self._done for task in todo):
                return False
            if rest not in self._done:
                self._note(write_rest(self._job, rest, bench))
        return True

    def _report_progress(self) -> None:
        """Tell the caller how many of the run's bytes are merged: the share of the codes in finished tasks."""
        total = sum(entry.size_bytes for entry in self._plan.entries)
        size = sum(task.size_bytes for task in self._plan.tasks)
        finished = sum(task.size_bytes for task in self._plan.tasks if task.index in self._done)
        self._options.progress("compact", total * finished // size if size else total, total)

    def _workers(self) -> AbstractContextManager[Workers]:
        """Return the threads to use in this process: the store's, or new ones if a number was given."""
        if self._options.engine == "threads" and self._options.workers is not None:
            return Workers(self._options.workers, name="cnr-compact")
        return nullcontext(self._store.internals.workers)

    def _reuse(self, workers: Workers) -> None:
        """Reuse the recorded tasks of an earlier compaction whose objects all match their receipts."""
        for index, digest in receipts_of(self._held.lease).items():
            one = FinishedTask(index, digest)
            if index < self._job.world and verified(self._store.storage, self._job, one, workers) is not None:
                self._done[index] = one
            self._held.keep()
        self._reused = sum(index < len(self._plan.tasks) for index in self._done)

    def _note(self, done: FinishedTask) -> None:
        self._done[done.index] = done
        self._held.note_done(done.index, done.receipt)

    def _follow(self) -> None:
        """Read newer records; raise `Conflict` if the result cannot be committed any more."""
        ends = self._plan.entries
        provisional = ChainEntry(
            seg=self._job.segment, sha256="", kind=self._plan.run.kind, l0=ends[0].l0, l1=ends[-1].l1,
            size_bytes=0, rows=0,
        )  # fmt: skip
        while (entry := self._store.poll(self._head)) is not None:
            rebase_compact(entry.record, entry, merged=provisional, run=self._plan.names)
            self._head = entry

    def _commit(self, merged: ChainEntry) -> LogEntry:
        """Append the record after the newest known one; `append` rebases it over newer ones."""
        record = self._head.record
        draft = draft_after(record, "compact", writer_info(), chain=replace_run(record, merged, self._plan.names))
        rebase = partial(rebase_compact, merged=merged, run=self._plan.names)
        return self._store.internals.log.append(self._head, draft, rebase)


def _is_over(started: float, budget_s: float | None) -> Callable[[], bool]:
    return lambda: budget_s is not None and time.monotonic() - started >= budget_s


def _say_nothing(stage: str, done: int, total: int) -> None:
    """The default progress callback."""
