"""Branches: logs of their own that go on from a version of the store's log (spec, section 7.9).

The order of every step here is what makes them safe. The store's log pins the fork point first, so the version and its
segments stay; then the branch gets its position 0, written by whoever comes first. A branch ends the other way round:
first its own log is closed, so nothing can be acknowledged there any more; then the pin goes. Nothing is deleted here.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from cnr_store.errors import BadName, BranchExists, BranchNotFound, CorruptRecord, CorruptStore, ReadOnlyStore
from cnr_store.format.commit_record import LogEntry, unknown_writer_features
from cnr_store.format.layout import branch_prefix, check_name, commit_key
from cnr_store.format.records import CommitRecord, Pin, Superseded, WriterInfo
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.rebase import draft_after, draft_branch, rebase_fence, rebase_fork


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch as the store's log knows it: the uuid that its log lies under, and its pin."""

    uuid: str
    pin: Pin

    @property
    def name(self) -> str:
        """What people call it."""
        return self.pin.name

    def is_expired(self, now_ms: int) -> bool:
        """Whether its time is over, so that maintenance may close it. Pure."""
        return self.pin.expires_ms is not None and self.pin.expires_ms <= now_ms


def find_branch(head: CommitRecord, name: str) -> Branch:
    """Return the branch of a name, by the newest record of the store's log. Pure.

    Raises
    ------
    BranchNotFound
    """
    for key, pin in head.pins.items():
        if pin.name == name:
            return Branch(key, pin)
    raise BranchNotFound(f"no branch {name!r}; there are {sorted(pin.name for pin in head.pins.values())}", found=name)


def fork(
    main: CommitLog, head: LogEntry, point: LogEntry, name: str, writer: WriterInfo, *, expires_ms: int | None = None
) -> Branch:
    """Begin the log of a new branch, then pin the version, which is known to be live, in the store's log.

    In that order a pinned branch without its position 0 has lost it. Until the pin is there the log is nobody's.

    Raises
    ------
    BadName, BranchExists, VersionExpired, CommitStateUnknown, StorageFailure
    """
    check_name(name)
    if any(pin.name == name for pin in head.record.pins.values()):
        raise BranchExists(f"branch {name!r} exists already; choose another name, or drop it first", found=name)
    branch = Branch(uuid.uuid4().hex, Pin(version=point.record.v, name=name, expires_ms=expires_ms))
    pins = {**head.record.pins, branch.uuid: branch.pin}
    draft = draft_after(head.record, "fork", writer, name=branch.uuid, target=point.record.v, pins=pins)
    log_of(main, branch).append_first(draft_branch(point.record, branch.uuid, writer), point)
    main.append(head, draft, rebase_fork)
    return branch


def log_of(main: CommitLog, branch: Branch) -> CommitLog:
    """Return the log of a branch. No I/O.

    Raises
    ------
    CorruptRecord
        What its pin calls its uuid is none.
    """
    try:
        return main.below(branch_prefix(branch.uuid))
    except BadName as error:
        raise CorruptRecord(f"the pin of branch {branch.name!r}: {error}", found=branch.uuid) from error


def has_first(log: CommitLog, branch: Branch) -> bool:
    """Return whether a pinned branch has its position 0; without it the log is lost, or its beginning. One GET.

    Raises
    ------
    CorruptRecord
        The log there is not that of this branch.
    CorruptStore, StorageFailure
    """
    first = log.read(0)
    if first is not None:
        _check_first(first, branch, log)
    return first is not None


def close_branch(main: CommitLog, branch: str, writer: WriterInfo) -> None:
    """End the branch of this uuid: close its log, then unpin its fork point. Safe to call again, or beside itself.

    After the first step no writer of the branch, open or to come, is told that something was committed; after the
    second its versions are nobody's, and garbage collection may take what only they needed. Damage of the branch's log
    does not keep it from its end: torn newest records are superseded, and one that is gone altogether is only unpinned.

    Raises
    ------
    ReadOnlyStore
        One of the logs is a newer library's.
    CorruptStore
        No record of the branch can be read, or its log is not that of this branch.
    CommitStateUnknown, StorageFailure
        Call it again; a branch that is closed and pinned stays so until then.
    """
    main.resolve()
    head = main.latest()
    pin = head.record.pins.get(branch)
    if pin is None:
        return
    _check_writable(head.record, "the store's log")
    _close_log(_log_to_close(main, Branch(branch, pin)), writer)
    pins = {key: other for key, other in head.record.pins.items() if key != branch}
    try:
        main.append(head, draft_after(head.record, "fork", writer, name=branch, pins=pins), rebase_fork)
    except BranchNotFound:
        pass  # Another process has unpinned it meanwhile.


def _log_to_close(main: CommitLog, branch: Branch) -> CommitLog:
    """The log of a pinned branch, even if its first record is damaged; not one that is known to be another's."""
    log = log_of(main, branch)
    try:
        first = log.read(0)
    except CorruptStore:
        return log
    if first is not None:
        _check_first(first, branch, log)
    return log


def _close_log(log: CommitLog, writer: WriterInfo) -> None:
    if log.is_empty():
        return  # It is lost: nobody can open it, and there is nothing to close.
    torn: tuple[str, ...] = ()
    try:
        head = log.latest()
    except CorruptStore:
        head, torn = log.tail(with_lists=False)
    if head.record.kind == "close":
        return
    _check_writable(head.record, f"the log below {log.prefix}")
    superseded = Superseded(follows=head.digest, torn=torn) if torn else None
    draft = draft_after(head.record, "close", writer, epoch=head.record.epoch + 1, supersedes=superseded)
    try:
        log.append(head, draft, rebase_fence)
    except BranchNotFound:
        pass  # Another process has closed it meanwhile.


def _check_writable(head: CommitRecord, what: str) -> None:
    unknown = unknown_writer_features(head)
    if unknown:
        raise ReadOnlyStore(
            f"{what} uses writer features {unknown} that this library does not know; it can only be read",
            version=head.v,
            found=unknown,
        )


def _check_first(first: LogEntry, branch: Branch, log: CommitLog) -> None:
    """Two branches have records that look alike: the log under this uuid must say that it is this branch's."""
    record = first.record
    expected, found = ("fork", branch.uuid, branch.pin.version), (record.kind, record.name, record.target)
    if found != expected:
        raise CorruptRecord(
            f"the log of branch {branch.name!r} begins as {found}, expected {expected}; its objects were mixed up with "
            "another log's, run `cnr verify`",
            version=0,
            path=commit_key(0, log.prefix),
            expected=list(expected),
            found=list(found),
        )
