"""Run a collection (spec, annex F).

The steps: read logs, leases and cursors; list segments; plan; commit records; read leases and cursors again; delete.
A run may stop after any step, and the next one continues. It deletes only the objects of segments that the logs mark,
leases and cursors that ended long ago, old side objects that no record needs, and the object that reads the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from cnr_store.errors import BadInput, CommitStateUnknown, Conflict, CorruptStore
from cnr_store.format.commit_record import LogEntry, check_writer_features, is_live
from cnr_store.format.layout import (
    BRANCHES,
    COMMITS,
    DATA,
    HINT,
    LEASES,
    STATE,
    branch_prefix,
    is_branch_name,
    is_segment_name,
    segment_prefix,
)
from cnr_store.format.records import Cursor, Pin, ReaderLease
from cnr_store.log import branches
from cnr_store.log.author import writer_info
from cnr_store.log.beginning import has_begun
from cnr_store.log.clock import check_clock, read_store_clock, wall_ms
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.leases import delete_ended_holds, holds_on, read_held
from cnr_store.log.rebase import draft_after, rebase_expire
from cnr_store.log.retention import RetentionPolicy
from cnr_store.log.side_objects import Deleted, delete_found
from cnr_store.maintenance.gc.deleting import Deletion, unneeded_lists, with_sizes
from cnr_store.maintenance.gc.logs import LogScan, LogVersions, SegmentNames, referenced_segments
from cnr_store.maintenance.gc.plan import (
    CollectionPlan,
    ExpireStep,
    FolderAge,
    Times,
    due_segments,
    missing_segments,
    plan_clean_up,
    plan_collection,
    unexplained,
)
from cnr_store.maintenance.gc.report import GcReport, Outcome, ProgressCallback, SegmentReport, VersionReport
from cnr_store.runtime.arguments import checked_number
from cnr_store.storage import ObjectStat
from cnr_store.store import Store

MIN_GRACE_S = 3600.0
"""Shortest grace period without ``force``, in seconds; a shorter one may delete what a reader without a lease reads."""

MIN_ORPHAN_AGE_S = 86_400.0
"""Lowest orphan age without ``force``, in seconds; with a lower one a save in progress may fail."""

_A_LOG = "a log of the store"

_BATCH = 1000
"""About how many segments one record marks."""

_PLANS = 50
"""Maximum number of plans of one run, if other writers commit first; the next run does the rest."""


def collect_garbage(
    store: Store,
    *,
    policy: RetentionPolicy | None = None,
    grace_s: float = 86_400.0,
    orphan_age_s: float = 7 * 86_400.0,
    dry_run: bool = False,
    force: bool = False,
    despite_damage: bool = False,
    budget_s: float | None = None,
    progress: ProgressCallback | None = None,
    clock_ms: Callable[[], int] | None = None,
) -> GcReport:
    """Expire versions that the policy does not keep, in all logs; delete what no live version needs.

    Blocks. Safe during saves, reads, compactions and other collections. Idempotent; the next run continues one
    that was killed. One run marks a segment; a run after the grace period deletes it. Memory is proportional to live
    versions plus segments. Requests: one per live version that is read, one listing of ``data/``, and one listing plus
    the deletes for each deleted segment.

    Parameters
    ----------
    store
        The store, or a branch of it: either way all logs of the store are collected, by one policy.
    policy
        Which versions are kept; None is ``RetentionPolicy()``.
    grace_s
        Seconds between the record that marks a segment and its deletion: the time that a reader without a lease has.
    orphan_age_s
        Seconds without a write, by the store's clock, after which a segment that no record names is marked for
        deletion. A save that takes longer fails with `TransactionAborted`.
    dry_run
        Change nothing and return the plan. The ages of orphans are then measured by this machine's clock.
    force
        Allow ``grace_s`` below 1 hour and ``orphan_age_s`` below 1 day.
    despite_damage
        Expire versions whose records are damaged, and delete what only they need. Continue if a kept version lacks a
        segment. Run `verify_store` first, and use this only for data that no backup can restore.
    budget_s
        Stop between two records or two deletions after so many seconds.
    progress
        Called with the stages ``records``, ``expire`` and ``segments``.
    clock_ms
        Returns the time in ms, for tests. None is this machine's clock, which has to agree with the store's.

    Raises
    ------
    BadInput
        An argument is out of range, or needs ``force``.
    CorruptStore
        A log, a lease or a cursor cannot be read, so the needed segments are unknown; or a kept version lacks a
        segment.
    ReadOnlyStore
        A log uses writer features that this library does not know, or the store is a relay.
    WrongClock
        This machine's clock differs from the store's: leases would end and deletions happen at a wrong time.
    CommitStateUnknown, AccessDenied, StorageFailure

    Examples
    --------
    >>> import numpy as np
    >>> store = Store.create("memory://doctest-gc")
    >>> with store.writer() as writer:
    ...     for step in range(3):
    ...         with writer.begin(step, kind="baseline") as txn:
    ...             txn.write_table("user", np.full((4, 2), step, np.float32))
    >>> report = collect_garbage(store, policy=RetentionPolicy(keep_last=1), dry_run=True)
    >>> report.outcome, report.expired, report.marked
    ('planned', 4, 2)
    """
    check_arguments(grace_s, orphan_age_s, force=force)
    store.internals.check_not_relay()
    store.internals.check_begun()
    started = time.monotonic()
    run = _Collection(
        store, RetentionPolicy() if policy is None else policy,
        grace_ms=int(grace_s * 1000), orphan_age_ms=int(orphan_age_s * 1000), despite_damage=despite_damage,
        is_late=lambda: budget_s is not None and time.monotonic() - started >= budget_s,
        progress=progress, clock_ms=wall_ms if clock_ms is None else clock_ms,
    )  # fmt: skip
    if dry_run:
        return run.explain()
    if clock_ms is None:
        check_clock(store.storage, wall_ms())
    return run.collect()


def check_arguments(grace_s: float, orphan_age_s: float, *, force: bool) -> None:
    """Check the arguments of `collect_garbage`. No I/O.

    Raises
    ------
    BadInput
    """
    for name, value, least in (
        ("grace_s", grace_s, MIN_GRACE_S),
        ("orphan_age_s", orphan_age_s, MIN_ORPHAN_AGE_S),
    ):
        checked_number(name, value, least=0, most=1e9)
        if value < least and not force:
            raise BadInput(
                f"{name} is {value:g} s; below {least:g} s a read or a save in progress may fail; pass a larger value "
                "or force=True (`cnr`: --force)",
                expected=least, found=value,
            )  # fmt: skip


class _Overtaken(Exception):
    """A needed segment is missing, and the logs have newer records: read and plan again."""


class _Collection:
    """One collection. Caches the records that it has read, since it may plan several times."""

    def __init__(
        self,
        store: Store,
        policy: RetentionPolicy,
        *,
        grace_ms: int,
        orphan_age_ms: int,
        despite_damage: bool,
        is_late: Callable[[], bool],
        progress: ProgressCallback | None,
        clock_ms: Callable[[], int],
    ) -> None:
        self._store, self._storage, self._policy = store, store.storage, policy
        self._grace_ms, self._orphan_age_ms = grace_ms, orphan_age_ms
        self._despite_damage = despite_damage
        self._leftover_age_ms = max(orphan_age_ms, int(MIN_GRACE_S * 1000))
        self._is_late, self._progress, self._clock_ms = is_late, progress, clock_ms
        self._main = store.internals.log if store.branch is None else store.internals.log.below("")
        self._names = SegmentNames()
        self._readers: dict[str, LogScan] = {}
        self._ended: list[LogVersions] = []
        self._ages: dict[str, FolderAge] = {}
        self._versions: dict[tuple[str, int], VersionReport] = {}
        self._segments: dict[str, SegmentReport] = {}
        self._records_read = 0
        self._records = 0
        self._warnings: tuple[str, ...] = ()

    # ---- the two ways to run

    def explain(self) -> GcReport:
        """Return what a run would do now. Writes nothing."""
        for _ in range(_PLANS):
            now_ms = self._clock_ms()
            logs, folders = self._look(ended_ms=now_ms)
            logs = _as_if_ended(logs, now_ms)
            try:
                plan = self._plan(logs, folders, now_ms, store_ms=now_ms)
                break
            except _Overtaken:
                continue
        else:
            raise Conflict(f"other writers changed {self._store.url} during each of {_PLANS} attempts to plan; retry")
        self._note(logs, plan)
        lists = list(self._unneeded_lists(_as_if_expired(logs, plan), now_ms=now_ms))
        is_clean = not plan.steps and not lists and not any(segment.state == "due" for segment in plan.segments)
        segments = with_sizes(self._storage, self._segments.values())
        return replace(
            self._report("clean" if is_clean else "planned", segments, is_dry_run=True),
            side_objects=tuple(stat.key for stat in lists),
            side_object_bytes=sum(stat.size_bytes for stat in lists),
        )

    def collect(self) -> GcReport:
        """Expire versions, then delete what is due."""
        main = self._read_log("", "", self._main)
        check_writer_features(main.head, _A_LOG)
        # Before the other logs are read: an expired branch with a damaged log must not block every collection.
        pins, now_ms = main.head.pins, self._clock_ms()
        over = {branch: pin for branch, pin in pins.items() if branches.Branch(branch, pin).is_expired(now_ms)}
        self._end_branches(over, are_closed=False)
        logs = self._read_logs()
        for log in logs:
            check_writer_features(log.head, _A_LOG)
        pins = logs[0].head.pins
        self._end_branches(
            {log.branch: pins[log.branch] for log in logs if log.is_closed and log.branch in pins}, are_closed=True
        )
        folders, is_settled = self._expire()
        deletion, lists = Deletion(self._storage), Deleted()
        was_stopped = self._is_late()
        if not was_stopped:
            # Read the heads again, then leases and cursors. A reader that put one reads our records, or is found here.
            logs = self._read_logs()
            now_ms = self._clock_ms()
            leases, cursors = read_held(self._storage, now_ms)
            held = self._held_segments(logs, leases, cursors)
            deletion.run(due_segments(logs, folders, held, now_ms), self._segments, self._is_late, self._progress)
            self._commit_all(plan_clean_up(logs, folders - deletion.deleted), logs)
            delete_ended_holds(self._storage, now_ms)
            self._sweep()
            lists = delete_found(self._storage, self._unneeded_lists(logs), self._is_late)
            was_stopped = deletion.was_stopped or lists.was_stopped
        outcome: Outcome = "collected" if self._records or deletion.deleted or lists.keys else "clean"
        if was_stopped:
            outcome = "stopped"
        elif deletion.failures or not is_settled:
            outcome = "incomplete"
        return replace(
            self._report(outcome, tuple(self._segments.values()), is_dry_run=False),
            deleted_segments=len(deletion.deleted),
            deleted_objects=deletion.objects + len(lists.keys),
            deleted_bytes=deletion.size_bytes + lists.size_bytes,
            failures=tuple(deletion.failures),
            side_objects=lists.keys,
            side_object_bytes=lists.size_bytes,
        )

    # ---- what there is

    def _read_logs(self, *, ended_ms: int | None = None) -> list[LogVersions]:
        """Return the store's own log, its branches, and the branches that this run has closed.

        A branch that cannot be read is left out if it had expired at ``ended_ms``; otherwise this raises.
        """
        main = self._read_log("", "", self._main)
        logs = [main]
        for branch, pin in sorted(main.head.pins.items()):
            log = self._main.below(branch_prefix(branch))
            try:
                logs.append(self._read_log(branch, pin.name, log))
            except CorruptStore as error:
                if ended_ms is None or not branches.Branch(branch, pin).is_expired(ended_ms):
                    error.message += f" (in the log of branch {pin.name!r}; repair it or drop the branch)"
                    raise
        return logs + self._ended

    def _read_log(self, branch: str, name: str, log: CommitLog) -> LogVersions:
        return self._reader(branch, log).read(branch, name, self._count_records)

    def _reader(self, branch: str, log: CommitLog) -> LogScan:
        if branch not in self._readers:
            self._readers[branch] = LogScan(
                self._storage, log, self._store.uuid, self._names, self._store.internals.workers,
                despite_damage=self._despite_damage,
            )  # fmt: skip
        return self._readers[branch]

    def _count_records(self, count: int) -> None:
        self._records_read += count
        self._show_progress("records", self._records_read, self._records_read)

    def _look(self, *, ended_ms: int | None = None) -> tuple[list[LogVersions], set[str]]:
        """Return the logs and the segments. Lists after reading the heads, whose segments were written before."""
        logs = self._read_logs(ended_ms=ended_ms)
        folders = {name for name in self._storage.list_folders(DATA) if is_segment_name(name)}
        if strange := unexplained(logs, folders):
            dropped = self._read_dropped(logs, set(strange))
            self._ended += dropped
            logs += dropped
        return logs, folders

    def _read_dropped(self, logs: Sequence[LogVersions], strange: set[str]) -> list[LogVersions]:
        """Return the branches that were dropped recently and name one of the ``strange`` segments.

        Segments of a branch that was dropped longer ago are already as old as orphans have to be.
        """
        known = {log.branch for log in logs} | set(logs[0].head.pins)
        since_ms = self._clock_ms() - self._orphan_age_ms
        dropped = []
        for branch in self._storage.list_folders(BRANCHES):
            if branch in known or not is_branch_name(branch):
                continue
            log = self._main.below(branch_prefix(branch))
            try:
                end = log.latest().record
            except CorruptStore:
                continue  # No reader needs a dropped branch, so its damage does not stop the run.
            if end.kind == "close" and end.ts_ms > since_ms:
                view = self._read_log(branch, f"dropped {branch}", log)
                if strange & referenced_segments(view.versions):
                    dropped.append(view)
        return dropped

    def _held_segments(
        self, logs: Sequence[LogVersions], leases: Iterable[ReaderLease], cursors: Iterable[Cursor]
    ) -> set[str]:
        """Return the segments of expired versions whose lease or cursor was put during our commit."""
        heads = {log.branch: log.head for log in logs if not log.is_closed}
        held: set[str] = set()
        holds: list[ReaderLease | Cursor] = [*leases, *cursors]
        for hold in holds:
            head = heads.get(hold.branch)
            if head is not None and is_live(head, hold.version):
                continue
            log = self._main.below(branch_prefix(hold.branch)) if hold.branch else self._main
            if head is None and not has_begun(self._storage, log.prefix):
                continue
            stop = hold.version + 1
            if isinstance(hold, Cursor):
                stop = head.floor if head is not None else log.latest().record.v + 1
            versions = range(max(hold.version, 0), stop)
            held |= referenced_segments(self._reader(hold.branch, log).states(versions))
        return held

    def _ages_of(self, names: Iterable[str], store_ms: int | None) -> dict[str, FolderAge]:
        """Return the ages of folders, each measured once per run. Empty folders are left out."""
        wanted = [name for name in names if name not in self._ages]
        if wanted and store_ms is None:
            store_ms = read_store_clock(self._storage)

        def look(name: str) -> FolderAge | None:
            found = list(self._storage.list_objects(segment_prefix(name)))
            times = [stat.modified_ms for stat in found if stat.modified_ms is not None]
            is_timed = store_ms is not None and len(times) == len(found)
            age_ms = max(0, store_ms - max(times)) if is_timed and times and store_ms is not None else None
            return FolderAge(age_ms, sum(stat.size_bytes for stat in found)) if found else None

        for name, age in zip(
            wanted, self._store.internals.workers.run(partial(look, name) for name in wanted), strict=True
        ):
            if age is not None:
                self._ages[name] = age
        return {name: self._ages[name] for name in names if name in self._ages}

    def _unneeded_lists(self, logs: Sequence[LogVersions], *, now_ms: int | None = None) -> Iterator[ObjectStat]:
        return unneeded_lists(self._storage, self._main, logs, older_than_ms=self._leftover_age_ms, now_ms=now_ms)

    # ---- what to do

    def _plan(
        self, logs: Sequence[LogVersions], folders: set[str], now_ms: int, *, store_ms: int | None
    ) -> CollectionPlan:
        leases, cursors = read_held(self._storage, now_ms)
        holds = {log.branch: holds_on(log.branch, leases, cursors) for log in logs}
        plan = plan_collection(
            logs, folders,
            ages=self._ages_of(unexplained(logs, folders), store_ms), sizes=self._names.sizes,
            policy=self._policy, holds=holds, held=self._held_segments(logs, leases, cursors),
            times=Times(self._grace_ms, self._orphan_age_ms, now_ms), batch=_BATCH,
        )  # fmt: skip
        missing = missing_segments(plan, logs, folders)
        if missing and not self._despite_damage:
            if not self._are_newest(logs):
                raise _Overtaken
            raise CorruptStore(
                f"{len(missing)} segments of kept versions are missing from storage, the first is {missing[0]}; data "
                "was lost or a record is damaged, so nothing is deleted; run `cnr verify`, then `cnr repair`, or "
                "collect with despite_damage=True (`cnr gc --despite-damage`)",
                path=segment_prefix(missing[0]), found=len(missing),
            )  # fmt: skip
        return plan

    def _are_newest(self, logs: Sequence[LogVersions]) -> bool:
        """Return whether no log has a newer record; if one has, another collection may have deleted segments."""
        return all(log.is_closed or self._readers[log.branch].log.poll(log.entry) is None for log in logs)

    def _note(self, logs: Sequence[LogVersions], plan: CollectionPlan) -> None:
        """Store a plan's decisions for the report; a segment marked earlier in this run stays marked."""
        for log in logs:
            for verdict in plan.retention[log.branch].verdicts:
                self._versions[log.branch, verdict.version] = VersionReport(
                    log.name or None, verdict.version, verdict.stays, verdict.reason
                )
            for version in log.unreadable:
                self._versions[log.branch, version] = VersionReport(
                    log.name or None, version, False, "its record cannot be read"
                )
        for segment in plan.segments:
            before = self._segments.get(segment.name)
            if before is None or before.state != "marked" or segment.state == "stays":
                self._segments[segment.name] = segment
        self._warnings = plan.warnings

    def _report(self, outcome: Outcome, segments: Sequence[SegmentReport], *, is_dry_run: bool) -> GcReport:
        versions = sorted(self._versions.items(), key=lambda item: (item[1].branch or "", item[0]))
        return GcReport(
            url=self._store.url, is_dry_run=is_dry_run, outcome=outcome,
            versions=tuple(version for _, version in versions),
            segments=tuple(sorted(segments, key=lambda segment: segment.name)), records=self._records,
            warnings=self._warnings,
        )  # fmt: skip

    # ---- doing it

    def _end_branches(self, ending: Mapping[str, Pin], *, are_closed: bool) -> None:
        """Close branches, or finish closing those that a killed process began to close."""
        for branch, pin in sorted(ending.items()):
            branches.close_branch(self._main, branch, writer_info())
            self._records += 1 if are_closed else 2
            try:  # After it is closed: the log now has its last record.
                self._ended.append(self._read_log(branch, pin.name, self._main.below(branch_prefix(branch))))
            except CorruptStore:
                pass  # Its log is lost: its segments are deleted as orphans.

    def _expire(self) -> tuple[set[str], bool]:
        """Plan and commit until no other writer interferes; return listed segments and whether all is done."""
        folders: set[str] = set()
        for _ in range(_PLANS):
            now_ms = self._clock_ms()
            logs, folders = self._look()
            try:
                plan = self._plan(logs, folders, now_ms, store_ms=None)
            except _Overtaken:
                continue
            self._note(logs, plan)
            done = self._commit_all(plan.steps, logs)
            if done == len(plan.steps):
                return folders, True
            if self._is_late():
                break
        return folders, False

    def _commit_all(self, steps: Sequence[ExpireStep], logs: Sequence[LogVersions]) -> int:
        """Commit records in order until another writer commits first or the deadline; return how many."""
        entries: dict[str, LogEntry] = {log.branch: log.entry for log in logs}
        for done, step in enumerate(steps):
            if self._is_late():
                return done
            head = entries[step.branch]
            draft = draft_after(
                head.record, "expire", writer_info(),
                floor=step.floor, kept=step.kept, expired=step.expired, aborted=dict(step.aborted),
            )  # fmt: skip
            try:
                entries[step.branch] = self._readers[step.branch].log.append(head, draft, rebase_expire)
            except CommitStateUnknown:
                raise
            except Conflict:
                return done
            self._records += 1
            self._show_progress("expire", done + 1, len(steps))
        return len(steps)

    def _sweep(self) -> None:
        """Delete leftovers of interrupted writes: local files that no listing shows."""
        for folder in (DATA, COMMITS, STATE, BRANCHES, LEASES, HINT.partition("/")[0]):
            self._storage.sweep(folder, older_than_s=self._leftover_age_ms / 1000)

    def _show_progress(self, stage: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(stage, done, total)


def _as_if_ended(logs: Sequence[LogVersions], now_ms: int) -> list[LogVersions]:
    """Return the logs as they will be when the expired branches are closed. Pure."""
    main = logs[0]
    open_pins = {
        branch: pin for branch, pin in main.head.pins.items() if not branches.Branch(branch, pin).is_expired(now_ms)
    }
    head = msgspec.structs.replace(main.head, pins=open_pins)
    rest = [replace(log, is_closed=log.is_closed or log.branch not in open_pins) for log in logs[1:]]
    return [replace(main, entry=replace(main.entry, record=head)), *rest]


def _as_if_expired(logs: Sequence[LogVersions], plan: CollectionPlan) -> list[LogVersions]:
    """Return the logs with only the side objects of versions that the plan keeps. Pure."""
    staying = {
        branch: {verdict.version for verdict in retention.verdicts if verdict.stays}
        for branch, retention in plan.retention.items()
    }
    return [
        replace(log, side_objects={v: names for v, names in log.side_objects.items() if v in staying[log.branch]})
        for log in logs
    ]
