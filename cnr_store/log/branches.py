"""Branches: separate logs that continue from a version of the store's log (spec, section 7.9).

The order of the steps makes them safe. To fork: write position 0 of the branch's log, then pin the fork point in the
store's log, which keeps that version and its segments. To end: close the branch's log, so nothing can be committed
there any more, then remove the pin. Nothing is deleted here.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from cnr_store.errors import BadName, BranchExists, BranchNotFound, CorruptRecord, CorruptStore
from cnr_store.format.commit_record import LogEntry, check_writer_features
from cnr_store.format.layout import branch_prefix, check_name, commit_key
from cnr_store.format.records import CommitRecord, Pin, Superseded, WriterInfo
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.rebase import draft_after, draft_branch, rebase_fence, rebase_fork


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch in the store's log: the uuid in the key prefix of its log, and its pin."""

    uuid: str
    pin: Pin

    @property
    def name(self) -> str:
        """The branch's name."""
        return self.pin.name

    def is_expired(self, now_ms: int) -> bool:
        """Return whether the branch has expired, so that maintenance may close it. Pure."""
        return self.pin.expires_ms is not None and self.pin.expires_ms <= now_ms


def find_branch(head: CommitRecord, name: str) -> Branch:
    """Return the branch with a name, from the newest record of the store's log. Pure.

    Raises
    ------
    BranchNotFound
    """
    for key, pin in head.pins.items():
        if pin.name == name:
            return Branch(key, pin)
    raise BranchNotFound(
        f"no branch {name!r}; the branches are {sorted(pin.name for pin in head.pins.values())}", found=name
    )


def fork(
    main: CommitLog, head: LogEntry, point: LogEntry, name: str, writer: WriterInfo, *, expires_ms: int | None = None
) -> Branch:
    """Start the log of a new branch, then pin its fork point in the store's log. Blocks.

    The fork point has to be live. By this order a pinned branch without position 0 has lost it. A log without a pin is
    no branch.

    Raises
    ------
    BadName, BranchExists, VersionExpired, CommitStateUnknown, StorageFailure
    """
    check_name(name)
    if any(pin.name == name for pin in head.record.pins.values()):
        raise BranchExists(f"branch {name!r} already exists; choose another name, or drop it first", found=name)
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
        The key of its pin is not a uuid.
    """
    try:
        return main.below(branch_prefix(branch.uuid))
    except BadName as error:
        raise CorruptRecord(f"the pin of branch {branch.name!r}: {error}", found=branch.uuid) from error


def has_first(log: CommitLog, branch: Branch) -> bool:
    """Return whether a pinned branch has position 0; if not, its log or first record is lost. One GET.

    Raises
    ------
    CorruptRecord
        The log belongs to another branch.
    CorruptStore, StorageFailure
    """
    first = log.read(0)
    if first is not None:
        _check_first(first, branch, log)
    return first is not None


def close_branch(main: CommitLog, branch: str, writer: WriterInfo) -> None:
    """Close the log of the branch with this uuid, then unpin its fork point. Blocks.

    Idempotent, and safe beside itself. After the first step no writer can commit to the branch. After the second no
    version of it is live, and garbage collection may delete what only they needed. A damaged log does not prevent
    this: torn newest records are superseded, and a branch whose log is lost is only unpinned.

    Raises
    ------
    ReadOnlyStore
        A newer library wrote one of the logs.
    CorruptStore
        No record of the branch can be read, or the log belongs to another branch.
    CommitStateUnknown, StorageFailure
        Retry; until then the branch may be closed and still pinned.
    """
    main.resolve()
    head = main.latest()
    pin = head.record.pins.get(branch)
    if pin is None:
        return
    check_writer_features(head.record, "the store's log")
    _close_log(_log_to_close(main, Branch(branch, pin)), writer)
    pins = {key: other for key, other in head.record.pins.items() if key != branch}
    try:
        main.append(head, draft_after(head.record, "fork", writer, name=branch, pins=pins), rebase_fork)
    except BranchNotFound:
        pass  # Another process has unpinned it meanwhile.


def _log_to_close(main: CommitLog, branch: Branch) -> CommitLog:
    """Return a pinned branch's log, even if its first record is damaged; raise if it is another branch's."""
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
        return  # The log is lost: no process can open the branch, so there is nothing to close.
    torn: tuple[str, ...] = ()
    try:
        head = log.latest()
    except CorruptStore:
        head, torn = log.tail(with_lists=False)
    if head.record.kind == "close":
        return
    check_writer_features(head.record, f"the log below {log.prefix}")
    superseded = Superseded(follows=head.digest, torn=torn) if torn else None
    draft = draft_after(head.record, "close", writer, epoch=head.record.epoch + 1, supersedes=superseded)
    try:
        log.append(head, draft, rebase_fence)
    except BranchNotFound:
        pass  # Another process has closed it meanwhile.


def _check_first(first: LogEntry, branch: Branch, log: CommitLog) -> None:
    """Check that a log belongs to this branch: records of different branches can be similar."""
    record = first.record
    expected, found = ("fork", branch.uuid, branch.pin.version), (record.kind, record.name, record.target)
    if found != expected:
        raise CorruptRecord(
            f"the log of branch {branch.name!r} begins with {found}, expected {expected}; its objects were mixed with "
            "another log's, run `cnr verify`",
            version=0,
            path=commit_key(0, log.prefix),
            expected=list(expected),
            found=list(found),
        )
