"""The commit log: the only thing that changes what readers see (spec, sections 3 and 7).

A position is created exclusively and never deleted or overwritten, so the newest version is found with plain
GETs and a position that is seen occupied stays decided. This module knows nothing about tables or segments.
It must never send other bytes to a position whose fate is unknown, and never delete anything.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random
from threading import RLock

import msgspec

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
    VersionNotFound,
)
from cnr_store.format.commit_record import Layer, LogEntry, check_statements, decode_record, encode_record, parent_of
from cnr_store.format.documents import canonical_json, decode_document, sha256
from cnr_store.format.layout import COMMITS, branch_of, commit_key, hint_key, state_key
from cnr_store.format.limits import MAX_LISTS_BYTES, MAX_RECORD_BYTES, MAX_SMALL_BYTES
from cnr_store.format.records import CommitRecord, Hint
from cnr_store.log.author import fenced_by
from cnr_store.log.beginning import check_begun
from cnr_store.log.clock import MAX_SKEW_MS, check_clock, wall_ms
from cnr_store.log.layers import split_lists
from cnr_store.log.side_objects import complete
from cnr_store.storage import CreateOutcome, Storage

Rebase = Callable[[CommitRecord, LogEntry], CommitRecord]
"""(draft, intervening record) -> the draft for the position after it; raises when the two do not commute."""

_CORRUPT_READ_BACKS = 3
"""How often an unreadable record is read again: a cut connection heals, a torn record does not."""


def position_bytes(storage: Storage, version: int, prefix: str = "") -> bytes | None:
    """Return what stands at a log position, or None if it is empty. One GET.

    Of more than a record may have, which is torn, the first `MAX_RECORD_BYTES` + 1 bytes only: what is said of the
    bytes at a position, their digest too, is said of these (spec, CNR-DOC-21).

    Raises
    ------
    AccessDenied, StorageFailure
    """
    return storage.read(commit_key(version, prefix), start=0, stop=MAX_RECORD_BYTES + 1)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Jittered exponential back-off: a delay is 50 to 100 % of a step that doubles up to ``max_delay_s``."""

    deadline_s: float = 60.0
    first_delay_s: float = 0.05
    max_delay_s: float = 2.0


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What was, or may have been, sent to a log position."""

    entry: LogEntry
    data: bytes


class CommitLog:
    """The log of a store, or of one branch of it. Calls block; one instance may be shared by threads.

    Parameters
    ----------
    storage
        The store's root.
    store_uuid
        From ``cnr.json``; a record of another store is refused.
    prefix
        Where positions and hint are: nothing for the store's own log, `layout.branch_prefix` for a branch. Side objects
        are named by their digest and lie at the root for all.
    first
        Where the log begins: 0, or above in a relay, which copies the newer end of a log and is never appended to.
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
        self._storage = storage
        self._store_uuid = store_uuid
        self._prefix = prefix
        self._first = first
        self._is_exclusive = is_exclusive
        self._retry = retry
        self._clock_ms = clock_ms
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._random = random or Random()
        self._lock = RLock()
        self._unresolved: _Attempt | None = None
        self._layers: dict[str, Layer] = {}  # of the last record that was completed: the next has most of them

    @property
    def prefix(self) -> str:
        """What the keys of positions and hint begin with: nothing, or ``branches/<uuid>/``."""
        return self._prefix

    @property
    def first(self) -> int:
        """The position that the log begins at."""
        return self._first

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

    def is_empty(self) -> bool:
        """Return whether no position is there. One listing."""
        return next(iter(self._storage.list_objects(f"{self._prefix}{COMMITS}")), None) is None

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

    def read(self, version: int) -> LogEntry | None:
        """Return the record at a position, or None if the position is empty. One GET, and one per new side object.

        The lists of a record that is not the newest may be gone: then its ``state`` is set.

        Raises
        ------
        CorruptRecord, CorruptStore, UnknownFeature
            The record is damaged, or belongs to another store.
        MissingObject
            A side object of the newest record is missing.
        StorageFailure
        """
        if version < 0:
            return None
        data = self._bytes_at(version)
        return None if data is None else self._complete_past(self._decode(data, version))

    def read_standing(self, version: int) -> LogEntry | None:
        """Return the record at a position, or the one that superseded it (spec, section 7.10); None if it is empty.

        One GET for a record that can be read, and one per new side object. Raises as `read` does.
        """
        try:
            return self.read(version)
        except CorruptStore:
            superseding = self._superseding(version)
            if superseding is None:
                raise
            return superseding

    def latest(self) -> LogEntry:
        """Return the newest record, found from the hint with GETs alone: O(log distance), no listing.

        A hint that is absent, unreadable or beyond the log costs requests and nothing else.

        Raises
        ------
        VersionNotFound
            The creation of the store ended before its first record: nothing was saved yet.
        CorruptStore
            The first position is empty all the same: the log, or its beginning, was deleted.
        CorruptRecord
            The newest record is damaged (its ``version`` says which); the one before it can still be `read`.
        StorageFailure
        """
        while True:
            seen: dict[int, bytes] = {}
            newest = self._gallop(self._read_hint(), seen)
            entry = self._decode(seen[newest], newest)
            if newest - 1 in seen:
                # By the raw bytes: the record before may be a torn one that this record superseded.
                digest = sha256(seen[newest - 1])
                if entry.record.parent_digest != digest:
                    raise _rewritten(entry, newest - 1, digest, entry.record.parent_digest)
            entry = self._complete_past(entry)
            if entry.record.state is None or entry.record.kind == "close":
                return entry
            # The log went on behind it, and then its side objects were collected: look again.

    def tail(self, *, with_lists: bool = True) -> tuple[LogEntry, tuple[str, ...]]:
        """Return the newest record that can be read, and the sha256 of the bytes at each position behind it.

        ``with_lists=False``: one whose side objects are lost is that, too.
        As `latest`, and a GET for each position that is damaged.

        Raises
        ------
        CorruptStore
            None can be read, or a position is empty.
        VersionNotFound, StorageFailure, UnknownFeature
        """
        torn: list[str] = []
        newest = self._gallop(self._read_hint(), {})
        for version in range(newest, self._first - 1, -1):
            data = self._bytes_at(version)
            if data is None:
                raise self._hole(version)
            try:
                entry = self._decode(data, version)
                return self._complete(entry) if with_lists else entry, tuple(reversed(torn))
            except CorruptStore:
                torn.append(sha256(data))
        raise CorruptStore(
            f"no record up to log position {newest} can be read; restore the log from a backup",
            version=newest,
            path=self._key(newest),
        )

    def poll(self, after: LogEntry) -> LogEntry | None:
        """Return the record behind ``after``, or None if there is none yet. One GET, and one per new side object.

        Of a record that is not the newest the lists may be gone, as of `read`. Torn positions that were superseded are
        passed over.

        Raises
        ------
        CorruptRecord
            The record is damaged or was not written behind ``after``.
        CorruptStore, UnknownFeature, StorageFailure
        """
        entry = self.read_standing(after.record.v + 1)
        if entry is not None:
            self._check_follows(entry, after)
        return entry

    def walk(self, newest: LogEntry) -> Iterator[LogEntry]:
        """Yield ``newest`` and every record before it down to the first; one GET each.

        Torn positions that were superseded are passed over.

        Raises
        ------
        VersionNotFound
            A position of a relay is empty, which is still at work there.
        CorruptStore
            A position is empty: something deleted part of the log.
        CorruptRecord
            A record is damaged, or the digest chain breaks.
        """
        entry = newest
        yield entry
        while (version := parent_of(entry.record)[0]) >= self._first:
            before = self.read(version)
            if before is None:
                raise self._hole(version)
            self._check_follows(entry, before)
            entry = before
            yield entry

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
            attempt = self._prepare(fork_point, draft, version=0)
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
                attempt = self._prepare(parent, draft, version=parent.record.v + 1 + torn)
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

    def _prepare(self, parent: LogEntry | None, draft: CommitRecord, *, version: int) -> _Attempt:
        """Fill the draft for a position behind ``parent``; make its side object durable, which must come first."""
        before = None if parent is None else parent.record
        record = msgspec.structs.replace(
            draft,
            v=version,
            commit_uuid=uuid.uuid4().hex,
            store_uuid=self._store_uuid,
            parent_digest=_digest_before(parent, draft),
            ts_ms=draft.ts_ms or self._time_behind(before),
            state=None,
            removed=msgspec.UNSET,
        )
        extra = {} if parent is None else parent.extra
        # Of another log than this one, from whose fork point a branch goes on, the side objects are not its own.
        below = parent.layers if parent is not None and version > 0 else ()
        slim, layers, side_object = split_lists(record, below, branch_of(self._prefix))
        data = encode_record(slim, extra)
        if len(data) > MAX_RECORD_BYTES:
            raise BadInput(
                f"the {record.kind} record has {len(data)} bytes, at most {MAX_RECORD_BYTES} fit; "
                "make `user` smaller or compact the chain",
                version=record.v,
                expected=MAX_RECORD_BYTES,
                found=len(data),
            )
        _check_readable(record, data)
        if side_object is not None:
            key = state_key(layers[-1].digest)
            self._storage.put_document(key, side_object, MAX_LISTS_BYTES)
            self._storage.sync_folders([key])
        return _Attempt(LogEntry(record, sha256(data), dict(extra), layers), data)

    def _time_behind(self, before: CommitRecord | None) -> int:
        """The time of the next record; one that is far behind the last has to be the store's time too."""
        now_ms = self._clock_ms()
        if before is None:
            return now_ms  # Of a store, whose creator has looked.
        if now_ms > before.ts_ms + MAX_SKEW_MS:
            check_clock(self._storage, now_ms, head_ms=before.ts_ms, may_be_behind=True)
        return max(now_ms, before.ts_ms + 1)

    def _settle(self, attempt: _Attempt, *, reads_first: bool) -> LogEntry:
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

    def _create(self, attempt: _Attempt, may_have_landed: bool) -> CreateOutcome:
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

    def _read_back(self, attempt: _Attempt) -> LogEntry | None:
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

    def _won(self, attempt: _Attempt) -> LogEntry:
        try:
            self._storage.put(hint_key(self._prefix), canonical_json(Hint(attempt.entry.record.v)))
        except StorageFailure:
            pass  # Advisory: a stale hint costs the next reader a few GETs.
        # Last, so that after an interrupt during the hint `resolve` can still say that the append won.
        self._unresolved = None
        return attempt.entry

    def _unknown(self, attempt: _Attempt) -> CommitStateUnknown:
        version = attempt.entry.record.v
        return CommitStateUnknown(
            f"whether commit record {version} was written could not be learned within "
            f"{self._retry.deadline_s:g} s; keep the staged data and resolve it later, or open the store "
            "again",
            version=version,
            path=self._key(version),
            expected=attempt.entry.record.commit_uuid,
        )

    def _gallop(self, start: int, seen: dict[int, bytes]) -> int:
        """The newest occupied position; ``seen`` gets the bytes of every occupied one that was read."""

        def is_occupied(version: int) -> bool:
            data = self._bytes_at(version)
            if data is not None:
                seen[version] = data
            return data is not None

        first = self._first
        start = max(start, first)
        if start > first and not is_occupied(start):
            start = first
        if start == first and not is_occupied(first):
            check_begun(self._storage, self._prefix, first)
            is_occupied(first)  # its creator was faster than the first look
        occupied, step = start, 1
        while is_occupied(start + step):
            occupied, step = start + step, 2 * step
        empty = start + step
        while empty - occupied > 1:
            middle = (occupied + empty) // 2
            if is_occupied(middle):
                occupied = middle
            else:
                empty = middle
        return occupied

    def _read_hint(self) -> int:
        try:
            data = self._storage.read_document(hint_key(self._prefix), MAX_SMALL_BYTES)
            return 0 if data is None else decode_document(data, Hint, hint_key(self._prefix)).version
        except AccessDenied:
            raise
        except (StorageFailure, CorruptStore):
            return 0

    def _superseding(self, version: int) -> LogEntry | None:
        """The record that says of a position, which cannot be read, that it holds no version; None if none does."""
        above = version + 1
        while (data := self._bytes_at(above)) is not None:
            try:
                entry = self._decode(data, above)
            except CorruptStore:
                above += 1
                continue
            return self._complete_past(entry) if parent_of(entry.record)[0] < version else None
        return None

    def _decode(self, data: bytes, version: int) -> LogEntry:
        entry = decode_record(data, version)
        if entry.record.store_uuid != self._store_uuid:
            raise CorruptStore(
                f"commit record {version} belongs to store {entry.record.store_uuid}, this is "
                f"{self._store_uuid}; two stores were mixed",
                version=version,
                expected=self._store_uuid,
                found=entry.record.store_uuid,
            )
        return entry

    def _complete(self, entry: LogEntry) -> LogEntry:
        """The entry with the lists of its side objects."""
        if entry.record.state is None:
            return entry
        entry = complete(self._storage, entry, self._layers)
        self._layers = {layer.digest: layer for layer in entry.layers}
        return entry

    def _complete_past(self, entry: LogEntry) -> LogEntry:
        """The same; as it is where they are gone, and nobody needs them: the log goes on behind it, or ends with it."""
        try:
            return self._complete(entry)
        except CorruptStore:
            if entry.record.kind != "close" and self._bytes_at(entry.record.v + 1) is None:
                raise
            return entry

    def _check_follows(self, entry: LogEntry, before: LogEntry) -> None:
        """Refuse a record that does not carry on ``before``, which stands directly before it or what it superseded."""
        version, digest = parent_of(entry.record)
        if version != before.record.v or digest != before.digest:
            raise _rewritten(entry, version, before.digest, digest)

    def _bytes_at(self, version: int) -> bytes | None:
        return position_bytes(self._storage, version, self._prefix)

    def _key(self, version: int) -> str:
        return commit_key(version, self._prefix)

    def _hole(self, version: int) -> CnrStoreError:
        if self._first > 0:
            # A relay that leaves versions out fills their positions downwards, after the newer record.
            return VersionNotFound(
                f"log position {version} has not been copied to this relay yet, or was lost here; try again, and let "
                "the relay run",
                version=version,
                path=self._key(version),
            )
        return CorruptStore(
            f"log position {version} is empty although the log goes on behind it: part of the log was deleted (a "
            "lifecycle rule?); restore it from a backup",
            version=version,
            path=self._key(version),
        )


def _check_readable(record: CommitRecord, data: bytes) -> None:
    """Refuse to send what no reader would take."""
    try:
        decode_record(data, record.v)
        check_statements(record)
    except CorruptRecord as error:
        message = f"this cannot be committed, because no reader would take it: {error}"
        raise BadInput(message, version=record.v) from error


def _digest_before(parent: LogEntry | None, draft: CommitRecord) -> str:
    """The sha256 of the bytes at the position before the draft's."""
    if draft.supersedes is not None:
        return draft.supersedes.torn[-1]
    return draft.parent_digest if parent is None else parent.digest


def _outrun(entry: LogEntry) -> TransactionAborted:
    """What a draft becomes behind lists that were collected is not known; they may have given its transaction up."""
    return TransactionAborted(
        f"commit record {entry.record.v} was written so long ago that its side objects are gone: this process was held "
        "up for longer than collections wait; save again",
        version=entry.record.v,
    )


def _rewritten(entry: LogEntry, version: int, expected: str, found: str) -> CorruptRecord:
    return CorruptRecord(
        f"commit record {entry.record.v} was written behind another record {version} than the one there now: the log "
        "was rewritten or partly restored; run `cnr verify`",
        version=entry.record.v, expected=expected, found=found,
    )  # fmt: skip
