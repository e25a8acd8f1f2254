"""Plan a collection: which versions expire, which segments they give up, and when these may be deleted. Pure.

Two rules make deletion safe (spec, annex F). First, a record in every log to which the segment could be committed
marks the segment for deletion (the field ``aborted``). Second, the segment is deleted only if no live version of any
log needs it at that moment. Neither rule depends on an age. Ages only protect saves that are in progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from cnr_store.format.commit_record import named_versions
from cnr_store.log.retention import NO_HOLDS, Holds, RetentionPlan, RetentionPolicy, VersionVerdict, plan_retention
from cnr_store.maintenance.gc.logs import LogVersions, referenced_segments
from cnr_store.maintenance.gc.report import SegmentReport

CLEAN_UP_AT = 64
"""Number of deleted segments from which a record is committed to remove their marks; fewer wait for the next record."""


@dataclass(frozen=True, slots=True)
class FolderAge:
    """Time since the last write to a folder, by the store's clock (None: unknown), and its bytes."""

    age_ms: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Times:
    """Grace period, age from which an unreferenced folder may be deleted, and current time; all in ms."""

    grace_ms: int
    orphan_age_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class ExpireStep:
    """The fields of one ``expire`` record of one log."""

    branch: str
    floor: int
    kept: tuple[int, ...]
    expired: tuple[int, ...]
    aborted: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """The records to commit, in order, and the decision for every version and segment; what the user should know."""

    retention: Mapping[str, RetentionPlan]
    steps: tuple[ExpireStep, ...]
    segments: tuple[SegmentReport, ...]
    warnings: tuple[str, ...] = ()


def unexplained(logs: Sequence[LogVersions], folders: Iterable[str]) -> list[str]:
    """Return the listed segments that no live version needs and no log marks for deletion. Pure.

    They are orphans, or saves in progress. A folder whose transaction is needed under another name is left out.
    """
    needed = {txn_of(name) for log in logs for name in referenced_segments(log.versions)}
    named = {txn for log in logs if not log.is_closed for txn in log.head.aborted}
    return sorted(name for name in folders if txn_of(name) not in needed and txn_of(name) not in named)


def missing_segments(plan: CollectionPlan, logs: Sequence[LogVersions], folders: Set[str]) -> list[str]:
    """Return the segments that kept versions need and that are not listed: evidence of damage. Pure."""
    return sorted(_staying_segments(logs, plan.retention) - folders)


def plan_collection(
    logs: Sequence[LogVersions],
    folders: Set[str],
    *,
    ages: Mapping[str, FolderAge],
    sizes: Mapping[str, int],
    policy: RetentionPolicy,
    holds: Mapping[str, Holds],
    held: Set[str],
    times: Times,
    batch: int,
) -> CollectionPlan:
    """Return what a collection does. Pure. Cost: versions times chain length, plus number of segments.

    Parameters
    ----------
    logs
        The store's own log first, then branches. The segments that only closed logs need are marked for deletion.
    folders
        The segments listed under ``data/``.
    ages
        The ages of the `unexplained` folders; one without an age was found empty.
    sizes
        Bytes of segments, where a chain records them.
    holds
        Branch uuid to its leases and cursors.
    held
        Segments of expired versions that a lease or cursor still protects: marked now, deleted later.
    batch
        Segments that one record marks at most; those of one version are not split over records.
    """
    live = [log for log in logs if not log.is_closed]
    retention = {log.branch: _retention(log, policy, holds, times.now_ms) for log in logs}
    warnings: tuple[str, ...] = ()
    if policy.keep_best is not None and any(_expire_checkpoints(log, retention[log.branch]) for log in live):
        warnings = _without_metric(policy.keep_best.metric, live)
        if warnings:
            all_kept = replace(policy, keep_last=max(len(log.versions) for log in logs))
            retention = {log.branch: _retention(log, all_kept, holds, times.now_ms) for log in logs}
    needed = _staying_segments(logs, retention)
    needed_txns = {txn_of(name) for name in needed}
    given_up = _given_up(logs, retention, needed)
    pending_delete = {name for names in given_up.values() for name in names}
    listed = {txn_of(name) for name in folders}
    old = {name for name in ages if name in folders and _is_old_enough(ages[name], times)}
    until = dict.fromkeys((txn_of(name) for name in pending_delete | old), times.now_ms + times.grace_ms)
    before = _named_until(live)
    carried = {txn: ms for txn, ms in before.items() if txn in listed and txn not in needed_txns}
    steps: list[ExpireStep] = []
    for log in live:
        steps += _log_steps(log, retention[log.branch], given_up, listed, needed_txns, carried | until, until, batch)
    reports = [
        _report(name, needed, held, until, before, ages, sizes, times.now_ms)
        for name in sorted(folders | pending_delete | needed)
    ]
    return CollectionPlan(retention, tuple(steps), tuple(reports), warnings)


def due_segments(logs: Sequence[LogVersions], folders: Iterable[str], held: Set[str], now_ms: int) -> list[str]:
    """Return the listed segments whose objects may be deleted now. Pure.

    Every open log marks it and its grace period is over in each; no live version needs it, and it is not in ``held``.
    """
    live = [log for log in logs if not log.is_closed]
    needed = {txn_of(name) for log in live for name in referenced_segments(log.versions)}
    needed |= {txn_of(name) for name in held}

    def is_due(txn: str) -> bool:
        return txn not in needed and all(log.head.aborted.get(txn, now_ms + 1) <= now_ms for log in live)

    return sorted(name for name in folders if is_due(txn_of(name)))


def plan_clean_up(logs: Sequence[LogVersions], folders: Iterable[str]) -> tuple[ExpireStep, ...]:
    """Return the records that remove the marks of deleted segments, for logs with many of them. Pure.

    A mark may be removed: a writer that still commits such a transaction has to read the record that set the mark.
    """
    listed = {txn_of(name) for name in folders}
    steps = []
    for log in (log for log in logs if not log.is_closed):
        head = log.head
        left = {txn: ms for txn, ms in head.aborted.items() if txn in listed}
        if len(head.aborted) - len(left) >= CLEAN_UP_AT:
            steps.append(ExpireStep(log.branch, head.floor, head.kept, head.expired, left))
    return tuple(steps)


def txn_of(segment: str) -> str:
    """Return the transaction that a segment is named after. Pure."""
    return segment.rpartition("-")[2]


def _retention(log: LogVersions, policy: RetentionPolicy, holds: Mapping[str, Holds], now_ms: int) -> RetentionPlan:
    if not log.is_closed:
        return plan_retention(log.head, log.versions, policy, holds.get(log.branch, NO_HOLDS), now_ms)
    ended = tuple(VersionVerdict(version.version, False, "its branch is closed") for version in log.versions)
    return RetentionPlan(log.head.floor, (), ended)


def _expire_checkpoints(log: LogVersions, retention: RetentionPlan) -> bool:
    """Return whether no version of some checkpoint stays."""
    saved = {version.version: version.checkpoint for version in log.versions if version.chain}
    staying = {saved.get(verdict.version) for verdict in retention.verdicts if verdict.stays}
    return not staying.issuperset(saved.values())


def _without_metric(metric: str, live: Sequence[LogVersions]) -> tuple[str, ...]:
    """Return a warning if no version has a metric: it is mistyped, or no save has recorded it yet."""
    found = sorted({name for log in live for version in log.versions for name in version.metrics})
    if metric in found:
        return ()
    have = ", ".join(map(repr, found)) or "none at all"
    return (
        f"keep_best is by the metric {metric!r}, which no live version has; they have {have}. All checkpoints are kept",
    )


def _staying_segments(logs: Sequence[LogVersions], retention: Mapping[str, RetentionPlan]) -> set[str]:
    staying: set[str] = set()
    for log in logs:
        verdicts = zip(log.versions, retention[log.branch].verdicts, strict=True)
        staying |= referenced_segments(version for version, verdict in verdicts if verdict.stays)
    return staying


def _given_up(
    logs: Sequence[LogVersions], retention: Mapping[str, RetentionPlan], needed: Set[str]
) -> dict[tuple[str, int], list[str]]:
    """Map (branch, version) to the segments that no version needs once that version has expired.

    Closed logs come first: no record will be added to them.
    """
    last: dict[str, tuple[str, int]] = {}
    for log in sorted(logs, key=lambda log: not log.is_closed):
        for version, verdict in zip(log.versions, retention[log.branch].verdicts, strict=True):
            if not verdict.stays:
                for name in version.chain:
                    last[name] = (log.branch, version.version)
    given_up: dict[tuple[str, int], list[str]] = {}
    for name in sorted(last.keys() - needed):
        given_up.setdefault(last[name], []).append(name)
    return given_up


def _is_old_enough(age: FolderAge, times: Times) -> bool:
    """Return whether an unreferenced folder is old enough to be marked; an unknown age counts as 0."""
    return times.orphan_age_ms == 0 if age.age_ms is None else age.age_ms >= times.orphan_age_ms


def _named_until(live: Sequence[LogVersions]) -> dict[str, int]:
    """Map each marked transaction to the latest deletion time, in ms, that an open log records for it."""
    until: dict[str, int] = {}
    for log in live:
        for txn, ms in log.head.aborted.items():
            until[txn] = max(ms, until.get(txn, ms))
    return until


def _log_steps(
    log: LogVersions,
    retention: RetentionPlan,
    given_up: Mapping[tuple[str, int], Sequence[str]],
    listed: Set[str],
    needed: Set[str],
    declared: Mapping[str, int],
    fresh: Mapping[str, int],
    batch: int,
) -> list[ExpireStep]:
    """Return the records of one log, which expire its versions oldest first.

    Each record marks the segments that it frees, so after any prefix of the records every freed segment is marked.
    ``declared`` maps all marked transactions to their deletion times, ``fresh`` only those that this run marks.
    """
    head = log.head
    named = named_versions(head)
    # This log may mark a transaction that another log committed later: such a mark is removed.
    aborted = {txn: ms for txn, ms in head.aborted.items() if txn in listed and txn not in needed}
    is_wrong = any(txn in needed for txn in head.aborted)
    steps: list[ExpireStep] = []
    new = 0

    def expired_at(floor: int) -> tuple[int, ...]:
        """Return the expired versions to list: below the floor a version is live only if it has a name."""
        listed_ones = {*head.expired, *log.unreadable}
        return tuple(sorted(version for version in listed_ones if version >= floor or version in named))

    def add(floor: int, kept: tuple[int, ...]) -> None:
        nonlocal new
        expired = expired_at(floor)
        steps.append(ExpireStep(log.branch, floor, kept, expired, dict(aborted)))
        new = 0

    going = retention.going
    staying = {verdict.version for verdict in retention.verdicts if verdict.stays}
    for index, version in enumerate(going):
        names = given_up.get((log.branch, version), ())
        aborted.update((txn_of(name), fresh[txn_of(name)]) for name in names)
        new += len(names)
        if new >= batch and index + 1 < len(going):
            floor = max(head.floor, version + 1)
            add(floor, tuple(sorted(v for v in {*staying, *going[index + 1 :]} if v < floor)))
    for txn in sorted(declared):
        if aborted.get(txn) is None or (txn in fresh and aborted[txn] < fresh[txn]):
            if new >= batch:
                add(retention.floor, retention.kept)
            aborted[txn] = declared[txn]
            new += 1
    now = (steps[-1].floor, steps[-1].kept) if steps else (head.floor, head.kept)
    is_given_up = set(expired_at(retention.floor)) - set(head.expired)
    if new or ((is_wrong or is_given_up) and not steps) or now != (retention.floor, retention.kept):
        add(retention.floor, retention.kept)
    return steps


def _report(
    name: str,
    needed: Set[str],
    held: Set[str],
    until: Mapping[str, int],
    before: Mapping[str, int],
    ages: Mapping[str, FolderAge],
    sizes: Mapping[str, int],
    now_ms: int,
) -> SegmentReport:
    txn = txn_of(name)
    size = ages[name].size_bytes if name in ages else sizes.get(name)
    if name in needed:
        return SegmentReport(name, "stays", "a kept version needs it", size)
    if name in held and txn in before:
        return SegmentReport(name, "waiting", "a lease or cursor is on an expired version", size, before[txn])
    if txn in until:
        unnamed = "no version references it: its save never committed, or its branch is closed"
        reason = unnamed if name in ages else "no kept version needs it"
        return SegmentReport(name, "marked", reason, size, until[txn])
    if txn in before:
        if before[txn] <= now_ms:
            return SegmentReport(name, "due", "its grace period is over", size, before[txn])
        return SegmentReport(name, "waiting", "its grace period is not over", size, before[txn])
    if name not in ages:
        return SegmentReport(name, "stays", "a needed transaction has this name, too", size)
    age_ms = ages[name].age_ms
    shown = "the storage reports no times" if age_ms is None else f"last written {age_ms // 1000} s ago"
    return SegmentReport(name, "young", f"its save may be in progress: {shown}", size)
