"""The commit log: the only thing that changes what readers see (spec, sections 3 and 7).

A position is created exclusively and never deleted or overwritten, so the newest version is found with plain
GETs and a position that is seen occupied stays decided. This module knows nothing about tables or segments.
It must never send other bytes to a position whose fate is unknown, and never delete anything.
"""

from __future__ import annotations

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
from cnr_store.log.author import fenced_by
from cnr_store.log.clock import wall_ms
from cnr_store.log.log_reader import LogReader
from cnr_store.log.sent_record import SentRecord, prepare_record
from cnr_store.storage import CreateOutcome, Storage

Rebase = Callable[[CommitRecord, LogEntry], CommitRecord]
"""(draft, intervening record) -> the draft for the position after it; raises when the two do not commute."""

_CORRUPT_READ_BACKS = 3
"""How often an unreadable record is read again: a cut connection heals, a torn record does not."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Jittered exponential back-off: a delay is 50 to 100 % of a step that doubles up to ``max_delay_s``."""

    deadline_s: float = 60.0
    first_delay_s: float = 0.05
    max_delay_s: float = 2.0


class CommitLog(LogReader):
    """The log of a store, or of one branch of it: read, and appended to by racing for the next position.

    Calls block; one instance may be shared by threads.

    Parameters
    ----------
    storage, store_uuid, prefix, first
        As of `LogReader`.
    is_exclusive
        Whether ``cnr.json`` says that the backend creates objects exclusively; nothing is appended to a storage that
        was opened otherwise (spec, CNR-STO-3).
    retry
        How long an append whose outcome is unclear is retried with the same bytes.
    clock_ms, monotonic_s, sleep, random
        Time and chance, passed in so that tests own them.
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

    def below(self, prefix: str) -> CommitLog:
        """Return another log of the same store, with the same patience and clocks. No I/O."""
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
        """Return this log where it begins at position ``first``, as in a relay. No I/O."""
        return self._with(self._prefix, first)

    @property
    def unresolved(self) -> int | None:
        """The position of an append whose outcome is not known yet (see `resolve`), or None."""
        attempt = self._unresolved
        return None if attempt is None else attempt.entry.record.v

    @property
    def unresolved_entry(self) -> LogEntry | None:
        """The record of an append whose outcome is not known yet, as it would be committed, or None."""
        attempt = self._unresolved
        return None if attempt is None else attempt.entry

    def exclusive(self) -> AbstractContextManager[bool]:
        """Keep the appends of other threads out, so that what an append left unresolved can be told to be one's own.

        Without it another thread's append may settle that record before the one that sent it has looked.
        """
        return self._lock

    def check_exclusive(self) -> None:
        """Refuse to append where the storage was opened otherwise than ``cnr.json`` says. No I/O.

        Raises
        ------
        UnsafeBackend
        """
        if self._is_exclusive and not self._storage.is_exclusive:
            raise UnsafeBackend(
                f"the store in {self._storage.url} was created where objects can be created exclusively, and its other "
                "writers rely on that: open it without unsafe_single_writer",
                path=self._storage.url,
            )
        if self._storage.is_exclusive and not self._is_exclusive:
            raise UnsafeBackend(
                f"the store in {self._storage.url} was created for a single writer, because its backend cannot create "
                "objects exclusively: open it with unsafe_single_writer=True, and make sure that nobody else writes",
                path=self._storage.url,
            )

    def append_first(self, draft: CommitRecord, fork_point: LogEntry | None = None) -> LogEntry:
        """Write position 0 and return what stands there: this record, or that of a faster process.

        Safe to call again after a crash between the store's identity, or a branch's pin, and its first record. First
        settles what an earlier append left unresolved, as `append` does.

        Parameters
        ----------
        fork_point
            The record of another log that this one goes on from: its digest, time and unknown fields are what a
            record's parent gives.

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
        """Append ``draft`` behind ``head``, or behind the records that came first; return it as committed.

        Fills ``v``, ``commit_uuid``, ``store_uuid``, ``parent_digest``, ``ts_ms`` (unless a repair has given one) and
        the unknown fields of the record before. A draft that ``supersedes`` positions behind ``head`` goes behind
        those. For every intervening record, in order, ``rebase`` adapts the draft or raises. When this raises anything
        but `CommitStateUnknown` (or an exception that interrupts the program), nothing was committed. After those,
        `unresolved` is set and nothing else is appended before `resolve`, or the next append, has settled it.

        What an earlier append left unresolved is settled first, whoever made it: it blocks for a deadline more. Whether
        it won or lost, its position is then occupied, so a ``head`` from before it meets it as an intervening record.

        Raises
        ------
        CommitStateUnknown
            The outcome could not be learned before the deadline; leave the staged data alone. Or that of an earlier
            append could not: then nothing of this one was sent, and `unresolved_entry` is that earlier record.
        Fenced
            The head has a higher epoch than the draft.
        TransactionAborted
            The lists of a record that came first were collected: this process was held up for days.
        BadInput
            The record is larger than 64 KiB.
        UnsafeBackend
            The storage was opened otherwise than ``cnr.json`` says; see `check_exclusive`.
        WrongClock
            The record would be much later than the one before it, and than the time of the store.
        StorageFailure
            The backend refused before anything could land.
        CorruptStore
            Damage in the records that came first.
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
                    return winner
                self._check_follows(winner, parent)
                parent = self._complete_past(winner)
                if parent.record.state is not None:
                    raise _outrun(parent)
                draft = rebase(draft, parent)

    def resolve(self, sent: LogEntry | None = None) -> LogEntry | None:
        """Settle an append whose outcome is unknown: the entry if it is ours, None if another's is there.

        Sends the same bytes again while the position is empty. Without an unresolved append: None at once.

        Parameters
        ----------
        sent
            The `unresolved_entry` to learn about, if another append may have settled it since: then its position tells,
            at the cost of one GET. None: the one that is unresolved now.

        Raises
        ------
        CommitStateUnknown
            Still not learned before the deadline; call again later.
        CorruptStore, StorageFailure
            The position of ``sent`` cannot be read; call again later.
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
        """Settle what an earlier append left unresolved; nothing new may be sent before (spec, CNR-LOG-12)."""
        attempt = self._unresolved
        if attempt is None:
            return
        try:
            self._settle(attempt, reads_first=True)
        except CommitStateUnknown as error:
            version = attempt.entry.record.v
            raise CommitStateUnknown(
                f"the outcome of the earlier append at log position {version} is still not known, so nothing new was "
                "sent; try again later",
                version=version,
                path=self._key(version),
                expected=attempt.entry.record.commit_uuid,
            ) from error

    def _standing(self, sent: LogEntry) -> LogEntry | None:
        """``sent`` if it stands at its position, which was seen occupied, or None if another does."""
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
            return None  # Of a newer library, so not what we sent.
        return sent if owner is sent else None

    def _prepare(self, parent: LogEntry | None, draft: CommitRecord, version: int) -> SentRecord:
        now_ms = self._clock_ms()
        return prepare_record(
            self._storage, self._store_uuid, self._prefix, parent, draft, version=version, now_ms=now_ms
        )

    def _settle(self, attempt: SentRecord, *, reads_first: bool) -> LogEntry:
        """Return the attempt's own entry if it won, else the winner's (without its side object)."""
        deadline = self._monotonic_s() + self._retry.deadline_s
        delay = self._retry.first_delay_s
        corrupt_reads = 0
        cause: Exception | None = None
        # From here to the verdict an interrupt may strike anywhere: the attempt must be on record first.
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
            self._sleep(pause)
            delay = min(2 * delay, self._retry.max_delay_s)

    def _create(self, attempt: SentRecord, may_have_landed: bool) -> CreateOutcome:
        key = self._key(attempt.entry.record.v)
        try:
            return self._storage.create(key, attempt.data)
        except AccessDenied:
            # A retry inside the backend's client may hide an earlier success: the position itself decides.
            if may_have_landed or self._storage.read(key, stop=1) is not None:
                return CreateOutcome.UNKNOWN
            self._unresolved = None
            raise
        except (BadInput, StorageFailure):  # this attempt made nothing; one before it may have
            if not may_have_landed:
                self._unresolved = None
            raise

    def _read_back(self, attempt: SentRecord) -> LogEntry | None:
        """The entry that owns the position now, or None while it is empty."""
        data = self._bytes_at(attempt.entry.record.v)
        if data is None:
            return None
        try:
            owner = self._owner(data, attempt.entry)
        except CorruptStore:
            superseding = self._superseding(attempt.entry.record.v)
            if superseding is None:
                raise  # Perhaps a cut connection, so no verdict.
            owner = superseding
        except CnrStoreError:
            self._unresolved = None  # Well-formed, and not what we sent: another owns the position.
            raise
        if owner is attempt.entry:
            return self._won(attempt)
        self._unresolved = None
        return owner

    def _owner(self, data: bytes, sent: LogEntry) -> LogEntry:
        """``sent`` if these bytes at its position are its own, else the record of another (spec, CNR-LOG-14)."""
        version = sent.record.v
        if sha256(data) == sent.digest:
            return sent
        other = self._decode(data, version)
        if other.record.commit_uuid == sent.record.commit_uuid:
            raise CorruptRecord(
                f"commit record {version} has this commit's uuid and other bytes; its bytes were altered",
                version=version,
                expected=sent.digest,
                found=other.digest,
            )
        return other

    def _won(self, attempt: SentRecord) -> LogEntry:
        try:
            self._storage.put(hint_key(self._prefix), canonical_json(Hint(attempt.entry.record.v)))
        except StorageFailure:
            pass  # Advisory: a stale hint costs the next reader a few GETs.
        # Last, so that after an interrupt during the hint `resolve` can still say that the append won.
        self._unresolved = None
        return attempt.entry

    def _unknown(self, attempt: SentRecord) -> CommitStateUnknown:
        version = attempt.entry.record.v
        return CommitStateUnknown(
            f"whether commit record {version} was written could not be learned within "
            f"{self._retry.deadline_s:g} s; keep the staged data and resolve it later, or open the store "
            "again",
            version=version,
            path=self._key(version),
            expected=attempt.entry.record.commit_uuid,
        )


def _outrun(entry: LogEntry) -> TransactionAborted:
    """What a draft becomes behind lists that were collected is not known; they may have given its transaction up."""
    return TransactionAborted(
        f"commit record {entry.record.v} was written so long ago that its side objects are gone: this process was held "
        "up for longer than collections wait; save again",
        version=entry.record.v,
    )
