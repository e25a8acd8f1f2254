"""The log, branch or relay that a store is opened on, and its threads. Internal to the library."""

from __future__ import annotations

from cnr_store.errors import (
    BranchNotFound,
    CnrStoreError,
    MissingObject,
    VersionExpired,
    VersionNotFound,
)
from cnr_store.format import layout
from cnr_store.format.commit_record import LogEntry, check_writer_features, is_live
from cnr_store.format.identity import decode_relay_marker
from cnr_store.format.limits import MAX_SMALL_BYTES
from cnr_store.format.records import CommitRecord, Identity
from cnr_store.log import beginning, branches
from cnr_store.log.branches import Branch
from cnr_store.log.clock import check_clock, wall_ms
from cnr_store.log.commit_log import CommitLog, RetryPolicy
from cnr_store.log.expiry import expired_by, version_expired
from cnr_store.runtime.arguments import checked_count
from cnr_store.runtime.caller import warn_caller
from cnr_store.runtime.threads import Workers
from cnr_store.storage import Storage
from cnr_store.store.creation import begin_log
from cnr_store.store.relay_guard import RelayGuard

_LOOK_BACK = 60
"""Idle polls between two checks that new records can arrive: no record was deleted, and a relay was not replaced."""

READ_THREADS = 8
"""Number of threads that read from a remote store: while some wait for the network, others decode."""


class StoreInternals:
    """The log that a store was opened on, and its threads. Calls block; they raise log and storage errors.

    Attributes
    ----------
    storage, identity
        The root, and the content of its ``cnr.json``.
    main, log
        The store's own log, and the log that is read and appended to: the same, or that of ``branch``.
    branch
        The branch that was opened, or None.
    relay
        The checks of a relay; None if this is no relay.
    workers, read_workers
        Threads for writing, and for reading; a remote store may have more for reading.
    threads
        The number of threads that the caller asked for.
    """

    def __init__(
        self, storage: Storage, identity: Identity, *, threads: int | None = None, retry: RetryPolicy | None = None
    ) -> None:
        self.storage = storage
        self.identity = identity
        self.threads = threads
        self.workers = Workers(threads)
        reads_apart = threads is None and storage.is_remote and self.workers.threads < READ_THREADS
        self.read_workers = Workers(READ_THREADS, name="cnr-read") if reads_apart else self.workers
        is_exclusive = identity.exclusive_create == "verified"
        self.main = CommitLog(storage, identity.store_uuid, is_exclusive=is_exclusive, retry=retry or RetryPolicy())
        self.log = self.main
        self.branch: Branch | None = None
        self.relay: RelayGuard | None = None
        self._has_first = True
        self._idle_polls = 0

    def close(self) -> None:
        """End the threads."""
        self.workers.close()
        self.read_workers.close()

    # ---- which log this is

    def find_log(self) -> None:
        """Detect whether the root is a store or a relay. One or two GETs."""
        if beginning.has_begun(self.storage):
            return
        data = self.storage.read_document(layout.RELAY, MAX_SMALL_BYTES)
        self._has_first = data is not None
        if data is not None:
            where = f"{self.storage.url}/{layout.RELAY}"
            marker = decode_relay_marker(data, self.identity.store_uuid, where)
            self.relay = RelayGuard(self.storage, marker)
            self.main = self.log = self.main.starting_at(marker.first)

    def enter(self, main: CommitLog, branch: Branch) -> None:
        """Switch to a branch of the store whose own log is ``main``. One GET."""
        self.main, self.branch = main, branch
        self.log = branches.log_of(main, branch)
        self._has_first = branches.has_first(self.log, branch)

    def find_branch(self, name: str) -> Branch:
        """Return the branch with this name, from the store's own log."""
        if self.relay is not None:
            raise self.relay.no_branches()
        branch = branches.find_branch(_newest_or_warn(self.main).record, name)
        if branch.is_expired(wall_ms()):
            raise VersionExpired(
                f"branch {name!r} of {self.storage.url} expired at {branch.pin.expires_ms} ms; drop it and fork again",
                version=branch.pin.version,
            )
        return branch

    @property
    def place(self) -> str:
        """The URL, with the branch if one is opened, for messages."""
        url = self.storage.url
        return url if self.branch is None else f"branch {self.branch.name!r} of {url}"

    @property
    def branch_uuid(self) -> str:
        """Uuid of the branch whose log this is, or that a relay copies; empty for the store's own log.

        Together with the store's uuid it identifies what a version number refers to.
        """
        return layout.branch_of(self.log.prefix) if self.relay is None else self.relay.marker.branch

    # ---- reading the log

    def poll(self, after: LogEntry) -> LogEntry | None:
        """Return the next entry after ``after``, or None. One GET; at times some more (`_LOOK_BACK`).

        Raises
        ------
        CorruptStore
            The log was rewritten or lost a record, or another relay was created in place of this one.
        StorageFailure
        """
        entry = self.log.poll(after)
        if entry is None:
            self._idle_polls += 1
            if self._idle_polls >= _LOOK_BACK:  # else a follower may wait forever: a new relay can begin further on
                check = self.log.check_no_hole if self.relay is None else self.relay.check_same
                check(after)
                self._idle_polls = 0
        return entry

    def readable_head(self) -> LogEntry:
        """Return the newest entry that can be read; warn if torn ones follow it.

        Raises
        ------
        BadInput
            The store was closed.
        BranchNotFound
            The opened branch was dropped.
        VersionNotFound, CorruptStore, StorageFailure
        """
        self.workers.check_open()
        head = _newest_or_warn(self.log)
        self._check_open(head)
        return head

    def entry(
        self, version: int, *, or_superseding: bool = False, newest: CommitRecord | None = None
    ) -> LogEntry:  # fmt: skip
        """Return the entry of a version, or the one that superseded it. One GET, and one per new side object.

        ``newest``, of the same log, says in the error which versions there are.
        """
        version = checked_count("a version", version, least=None)
        read = self.log.read_standing if or_superseding else self.log.read
        entry = read(version) if version >= 0 else None
        if entry is None:
            if self.relay is not None and 0 <= version < self.log.first:
                raise self.relay.not_held(version)
            there_are = "" if newest is None else f"; the newest is {newest.v}"
            if newest is not None and newest.pins:
                names = ", ".join(sorted(pin.name for pin in newest.pins.values()))
                there_are += f". Its branches ({names}) have versions of their own: open the branch"
            raise VersionNotFound(f"{self.place} has no version {version}{there_are}", version=version)
        return entry

    # ---- before something is written

    def check_not_relay(self) -> None:
        """Raise `ReadOnlyStore` if this is a relay. No I/O."""
        if self.relay is not None:
            raise self.relay.read_only()

    def check_begun(self) -> None:
        """Check that the log has its first record. Call it before deletions. One request.

        Raises
        ------
        CorruptStore
            The log, or its first record, was deleted.
        VersionNotFound
            The creation of the store ended before its first record.
        """
        beginning.check_begun(self.storage, self.log.prefix, self.log.first)

    def finish_creation(self) -> None:
        """Write the first record if the store's creator died before it; otherwise no I/O.

        Writers, tags and forks call this; readers do not. A log that was started and lost is never started again.
        """
        if self._has_first:
            return
        try:
            self.check_begun()
        except VersionNotFound:
            check_clock(self.storage, wall_ms(), may_be_behind=True)
            begin_log(self.storage, self.log, self.storage.read_document(layout.IDENTITY, MAX_SMALL_BYTES) or b"")
        self._has_first = True

    def settled_head(self) -> LogEntry:
        """Settle an earlier unresolved append; return the newest entry, after which one may be appended."""
        self.check_not_relay()
        self.finish_creation()
        self.log.resolve()
        head = self.log.latest()
        self._check_open(head)
        check_writer_features(head.record, self.place)
        return head

    def writable_head(self) -> LogEntry:
        """Return the newest entry, after which segments and records may be written; probe the backend."""
        self.workers.check_open()
        self.log.check_exclusive()
        head = self.settled_head()
        if self.storage.is_exclusive:
            self.storage.probe()
        return head

    def _check_open(self, head: LogEntry) -> None:
        if head.record.kind == "close":
            name = None if self.branch is None else self.branch.name
            raise BranchNotFound(f"{self.place} was dropped; fork another", found=name)

    # ---- versions whose data was deleted

    def check_held(self, version: int) -> None:
        """Check that a relay has mirrored a version. One GET for its record, and a small one per segment.

        Raises
        ------
        VersionExpired
            The relay begins after it, or lacks one of its segments. Only a relay raises this here.
        VersionNotFound, CorruptStore, StorageFailure
        """
        if self.relay is not None and not self.relay.has_segments(self.entry(version).record.chain):
            raise self.relay.not_held(version)

    def check_live(self, head: CommitRecord, version: int) -> None:
        """Raise `VersionExpired` if a version is not live by the newest record. Pure."""
        if not is_live(head, version):
            raise self._expired(head, version)

    def tell_of_expiry(self, version: int, missing: MissingObject) -> None:
        """Raise `VersionExpired` if an object is missing because its version expired; else return. A few GETs.

        Raises
        ------
        VersionExpired
            The version has expired and its grace period is over, or this relay has deleted it.
        """
        expired = expired_by(self.log, version)
        if expired is not None:
            raise self._expired(expired, version) from missing
        if self.relay is None or version < 0:
            return
        try:
            # A relay always has its newest version completely. It may have deleted segments of older ones.
            is_gone = version != self.log.latest().record.v and self.relay.has_let_go(missing)
        except CnrStoreError:
            return  # The caller reports the missing object.
        if is_gone:
            raise self.relay.not_held(version) from missing

    def _expired(self, head: CommitRecord, version: int) -> VersionExpired:
        return version_expired(version, head, self.place)


def _newest_or_warn(log: CommitLog) -> LogEntry:
    entry, torn = log.newest_readable()
    if torn is not None:
        warn_caller(f"{torn}; serving version {entry.record.v}")
    return entry
