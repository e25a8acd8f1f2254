"""Append to the commit log, and read back after a lost answer. It alone changes what readers see (spec, 3 and 7).

A position is created exclusively and never deleted or overwritten. So plain GETs find the newest version, and an
occupied position is final. This module knows nothing about tables or segments. It must never send different bytes to a
position whose outcome is unknown, and never delete anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random
from threading import RLock

from cnr_store.errors import (
    AccessDenied,
    BadInput,
    CnrStoreError,
    CommitStateUnknown,
    CorruptRecord,
    CorruptStore,
    StorageFailure,
    TransactionAborted,
    UnsafeBackend,
)
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.documents import canonical_json, sha256
from cnr_store.format.layout import hint_key
from cnr_store.format.records import CommitRecord, Hint
from cnr_store.log.announcers import Announcers
from cnr_store.log.author import fenced_by
from cnr_store.log.clock import wall_ms
from cnr_store.log.log_reader import LogReader
from cnr_store.log.sent_record import SentRecord, prepare_record
from cnr_store.storage import CreateOutcome, Storage

logger = logging.getLogger(__name__)

Rebase = Callable[[CommitRecord, LogEntry], CommitRecord]
"""(draft, intervening record) -> the draft for the position after that record; raises if the two do not commute."""

_CORRUPT_READ_BACKS = 3
"""How often an unreadable record is read again: the read of an intact record may have been cut short."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Jittered exponential back-off: a delay is 50 to 100 % of a step that doubles up to ``max_delay_s``."""

    deadline_s: float = 60.0
    first_delay_s: float = 0.05
    max_delay_s: float = 2.0


class CommitLog(LogReader):
    """Reads the log of a store or branch, and appends by racing for the next position.

    Calls block. Thread-safe.

    Parameters
    ----------
    storage, store_uuid, prefix, first
        As for `LogReader`.
    is_exclusive
        Whether ``cnr.json`` records that the backend creates objects exclusively. Appends to a storage that was opened
        otherwise are refused (spec, CNR-STO-3).
    retry
        How long an append whose outcome is unknown is retried with the same bytes.
    clock_ms, monotonic_s, sleep, random
        Sources of time and randomness, for tests.

    Attributes
    ----------
    announcers
        Told of each record of this object, after it has become durable.
    """

    def __init__(
        self,
        storage: Storage,
        store_uuid: str,
        prefix: str = "",
        *,
        first: int = 0,
        is_exclusive: bool = True,
        retry: RetryPolicy = RetryPolicy(),
        clock_ms: Callable[[], int] = wall_ms,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        random: Random | None = None,
    ) -> None:
        super().__init__(storage, store_uuid, prefix, first=first)
        self._is_exclusive = is_exclusive
        self._retry = retry
        self._clock_ms = clock_ms
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._random = random or Random()
        self._lock = RLock()
        self._unresolved: SentRecord | None = None
        self.announcers = Announcers()

    def below(self, prefix: str) -> CommitLog:
        """Return another log of the same store, with the same retry policy and clocks. No I/O."""
        return self._with(prefix, 0)

    def _with(self, prefix: str, first: int) -> CommitLog:
        return CommitLog(
            self._storage,
            self._store_uuid,
            prefix,
            first=first,
            is_exclusive=self._is_exclusive,
            retry=self._retry,
            clock_ms=self._clock_ms,
            monotonic_s=self._monotonic_s,
            sleep=self._sleep,
            random=self._random,
        )

    def starting_at(self, first: int) -> CommitLog:
        """Return this log with ``first`` as its first position, as in a relay. No I/O."""
        return self._with(self.prefix, first)

    @property
    def unresolved(self) -> int | None:
        """The position of an append whose outcome is unknown (see `resolve`), or None."""
        attempt = self._unresolved
        return None if attempt is None else attempt.entry.record.v

    @property
    def unresolved_entry(self) -> LogEntry | None:
        """The entry of an append whose outcome is unknown, as it would be committed, or None."""
        attempt = self._unresolved
        return None if attempt is None else attempt.entry

    def exclusive(self) -> AbstractContextManager[bool]:
        """Return a lock that excludes other threads' appends, so that `unresolved` is the holder's own append.

        Without it another thread's append may settle the record before the sender has read `unresolved`.
        """
        return self._lock

    def check_exclusive(self) -> None:
        """Check that the storage was opened in the mode that ``cnr.json`` records. No I/O.

        Raises
        ------
        UnsafeBackend
        """
        if self._is_exclusive and not self._storage.is_exclusive:
            raise UnsafeBackend(
                f"the store in {self._storage.url} was created for exclusive creates, and its other writers rely on "
                "them: open it without unsafe_single_writer",
                path=self._storage.url,
            )
        if self._storage.is_exclusive and not self._is_exclusive:
            raise UnsafeBackend(
                f"the store in {self._storage.url} was created for a single writer, because its backend cannot create "
                "objects exclusively: open it with unsafe_single_writer=True, and run no other writer",
                path=self._storage.url,
            )

    def append_first(self, draft: CommitRecord, fork_point: LogEntry | None = None) -> LogEntry:
        """Write position 0 and return its entry: this record, or that of a faster process.

        Safe to repeat after a crash between the store's identity, or a branch's pin, and the first record. Like
        `append` it first settles an earlier unresolved append.

        Parameters
        ----------
        fork_point
            The record of another log from which this one continues. It acts as the parent: the draft takes its digest,
            time and unknown fields.

        Raises
        ------
        CommitStateUnknown, CorruptStore, StorageFailure
        """
        self.check_exclusive()
        with self._lock:
            self._settle_leftover()
            attempt = self._prepare(fork_point, draft, 0)
            winner = self._settle(attempt, reads_first=False)
            return winner if winner is attempt.entry else self._complete_past(winner)

    def append(self, head: LogEntry, draft: CommitRecord, rebase: Rebase) -> LogEntry:
        """Append ``draft`` after ``head``, or after newer records; return the committed entry.

        Fills in ``v``, ``commit_uuid``, ``store_uuid``, ``parent_digest``, ``ts_ms`` (unless a repair has set it) and
        the unknown fields of the parent. A draft that ``supersedes`` positions is appended after those. For every
        intervening record, in order, ``rebase`` adapts the draft or raises.

        If this raises anything but `CommitStateUnknown` or an exception that interrupts the program, nothing was
        committed. After those two, `unresolved` is set, and `resolve` or the next append settles it first, which may
        block for one more deadline. Its position is then occupied by an intervening record for an older ``head``.

        Raises
        ------
        CommitStateUnknown
            The outcome is still unknown at the deadline; keep the staged data. Or the outcome of an earlier append is:
            then nothing of this one was sent, and `unresolved_entry` is the earlier record.
        Fenced
            The head has a higher epoch than the draft.
        TransactionAborted
            The lists of an intervening record were deleted: this process was suspended for days.
        BadInput
            The record is larger than 64 KiB.
        UnsafeBackend
            The storage was opened in another mode than ``cnr.json`` records; see `check_exclusive`.
        WrongClock
            The record would be much later than its parent, and than the store's clock.
        StorageFailure
            The backend refused before anything was written.
        CorruptStore
            An intervening record is damaged.
        Exception
            Whatever ``rebase`` raises.
        """
        self.check_exclusive()
        with self._lock:
            self._settle_leftover()
            if draft.epoch < head.record.epoch:
                raise fenced_by(head.record, draft.epoch)
            parent = head
            while True:
                torn = 0 if draft.supersedes is None else len(draft.supersedes.torn)
                attempt = self._prepare(parent, draft, parent.record.v + 1 + torn)
                winner = self._settle(attempt, reads_first=False)
                if winner is attempt.entry:
                    made = winner.record
                    logger.info("%s: wrote record %d (%s, step %d)", self._storage.url, made.v, made.kind, made.step)
                    return winner
                self._check_follows(winner, parent)
                parent = self._complete_past(winner)
                if parent.record.state is not None:
                    raise _outrun(parent)
                draft = rebase(draft, parent)

    def resolve(self, sent: LogEntry | None = None) -> LogEntry | None:
        """Settle an append whose outcome is unknown; return its entry if it was committed, else None.

        Sends the same bytes again while the position is empty. Without an unresolved append: None at once.

        Parameters
        ----------
        sent
            An earlier `unresolved_entry`, which another append may have settled since: then one GET of its position
            decides. None: the append that is unresolved now.

        Raises
        ------
        CommitStateUnknown
            Still unknown at the deadline; retry later.
        CorruptStore, StorageFailure
            The position of ``sent`` cannot be read; retry later.
        """
        with self._lock:
            attempt = self._unresolved
            if sent is not None and (attempt is None or attempt.entry is not sent):
                return self._standing(sent)
            if attempt is None:
                return None
            winner = self._settle(attempt, reads_first=True)
            return winner if winner is attempt.entry else None

    def _settle_leftover(self) -> None:
        """Settle an earlier unresolved append, before anything new is sent (spec, CNR-LOG-12)."""
        attempt = self._unresolved
        if attempt is None:
            return
        try:
            self._settle(attempt, reads_first=True)
        except CommitStateUnknown as error:
            version = attempt.entry.record.v
            raise CommitStateUnknown(
                f"the outcome of the earlier append at log position {version} is still unknown, so nothing new was "
                "sent; retry later",
                version=version,
                path=self._key(version),
                expected=attempt.entry.record.commit_uuid,
            ) from error

    def _standing(self, sent: LogEntry) -> LogEntry | None:
        """Return ``sent`` if its position, which is occupied, contains it, else None."""
        version = sent.record.v
        data = self._bytes_at(version)
        if data is None:
            raise self._hole(version)
        try:
            owner = self._owner(data, sent)
        except CorruptStore:
            if self._superseding(version) is None:
                raise
            return None
        except CnrStoreError:
            return None  # A newer library wrote it, so it is not ours.
        return sent if owner is sent else None

    def _prepare(self, parent: LogEntry | None, draft: CommitRecord, version: int) -> SentRecord:
        now_ms = self._clock_ms()
        return prepare_record(
            self._storage, self._store_uuid, self.prefix, parent, draft, version=version, now_ms=now_ms
        )

    def _settle(self, attempt: SentRecord, *, reads_first: bool) -> LogEntry:
        """Send the attempt until its position is occupied; return the owner's entry, without side objects."""
        deadline = self._monotonic_s() + self._retry.deadline_s
        delay = self._retry.first_delay_s
        corrupt_reads = 0
        cause: Exception | None = None
        # Record the attempt first: an interrupt may come anywhere from here until its outcome is known.
        self._unresolved = attempt
        may_have_landed = reads_first
        while True:
            try:
                winner = self._read_back(attempt) if reads_first else None
                if winner is None:
                    if self._create(attempt, may_have_landed) is CreateOutcome.CREATED:
                        return self._won(attempt)
                    reads_first, may_have_landed = False, True
                    winner = self._read_back(attempt)
                if winner is not None:
                    return winner
            except StorageFailure as error:
                if self._unresolved is None:
                    raise
                cause, reads_first, may_have_landed = error, True, True
            except CorruptStore as error:
                cause, reads_first = error, True
                corrupt_reads += 1
            pause = delay * self._random.uniform(0.5, 1.0)
            if corrupt_reads >= _CORRUPT_READ_BACKS or self._monotonic_s() + pause > deadline:
                raise self._unknown(attempt) from cause
            found = "no answer" if cause is None else type(cause).__name__  # its text may contain options
            version = attempt.entry.record.v
            logger.info("%s: record %d: %s; trying again in %.2f s", self._storage.url, version, found, pause)
            self._sleep(pause)
            delay = min(2 * delay, self._retry.max_delay_s)

    def _create(self, attempt: SentRecord, may_have_landed: bool) -> CreateOutcome:
        key = self._key(attempt.entry.record.v)
        try:
            return self._storage.create(key, attempt.data)
        except AccessDenied:
            # The backend's client may have retried after an unseen success: the position decides.
            if may_have_landed or self._storage.read(key, stop=1) is not None:
                return CreateOutcome.UNKNOWN
            self._unresolved = None
            raise
        except (BadInput, StorageFailure):  # this request wrote nothing; an earlier one may have
            if not may_have_landed:
                self._unresolved = None
            raise

    def _read_back(self, attempt: SentRecord) -> LogEntry | None:
        """Return the entry that owns the attempt's position, or None while it is empty."""
        data = self._bytes_at(attempt.entry.record.v)
        if data is None:
            return None
        try:
            owner = self._owner(data, attempt.entry)
        except CorruptStore:
            superseding = self._superseding(attempt.entry.record.v)
            if superseding is None:
                raise  # The read may have been cut short, so the outcome is still unknown.
            owner = superseding
        except CnrStoreError:
            self._unresolved = None  # It is well-formed and not ours: another writer owns the position.
            raise
        if owner is attempt.entry:
            return self._won(attempt)
        self._unresolved = None
        return owner

    def _owner(self, data: bytes, sent: LogEntry) -> LogEntry:
        """Return ``sent`` if the bytes at its position are its own, else the other record (spec, CNR-LOG-14)."""
        version = sent.record.v
        if sha256(data) == sent.digest:
            return sent
        other = self._decode(data, version)
        if other.record.commit_uuid == sent.record.commit_uuid:
            raise CorruptRecord(
                f"commit record {version} has this commit's uuid and different bytes; it was altered",
                version=version,
                expected=sent.digest,
                found=other.digest,
            )
        return other

    def _won(self, attempt: SentRecord) -> LogEntry:
        try:
            self._storage.put(hint_key(self.prefix), canonical_json(Hint(attempt.entry.record.v)))
        except StorageFailure:
            pass  # A stale hint only costs the next reader a few GETs.
        self.announcers.tell(attempt.entry.record.v)
        # Reset last, so that after an interrupt above `resolve` can still report the commit.
        self._unresolved = None
        return attempt.entry

    def _unknown(self, attempt: SentRecord) -> CommitStateUnknown:
        version = attempt.entry.record.v
        return CommitStateUnknown(
            f"whether commit record {version} was written is unknown after {self._retry.deadline_s:g} s of retries; "
            "keep the staged data and resolve it later, or open the store again",
            version=version,
            path=self._key(version),
            expected=attempt.entry.record.commit_uuid,
        )


def _outrun(entry: LogEntry) -> TransactionAborted:
    """Return the error of a draft whose intervening record lost its lists: they may mark its transaction."""
    return TransactionAborted(
        f"commit record {entry.record.v} was written so long ago that its side objects were deleted: this process was "
        "suspended for longer than the age at which garbage collection deletes them; save again",
        version=entry.record.v,
    )
