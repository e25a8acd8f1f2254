"""Reading a commit log: the newest record, the record at a position, the way from one to another (spec, section 7).

Knows nothing about tables or segments, and writes nothing. `commit_log` adds appending.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cnr_store.errors import AccessDenied, CnrStoreError, CorruptRecord, CorruptStore, StorageFailure, VersionNotFound
from cnr_store.format.commit_record import Layer, LogEntry, decode_record, parent_of
from cnr_store.format.documents import decode_document, sha256
from cnr_store.format.layout import COMMITS, commit_key, hint_key
from cnr_store.format.limits import MAX_RECORD_BYTES, MAX_SMALL_BYTES
from cnr_store.format.records import Hint
from cnr_store.log.beginning import check_begun
from cnr_store.log.side_objects import complete
from cnr_store.storage import Storage


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
class LogEnd:
    """The end of a log: the newest record that can be read, and what stands behind it.

    Attributes
    ----------
    newest
        The newest occupied position.
    last
        The newest record that can be read; None where none can be.
    torn
        The sha256 of the bytes at each position behind ``last``, which cannot be read; oldest first.
    is_broken
        Whether a position before them, or where the log begins, is empty, so that nothing can be appended.
    lost
        The side object of ``last`` that is lost; its lists are what is left of them.
    """

    newest: int
    last: LogEntry | None
    torn: tuple[str, ...]
    is_broken: bool = False
    lost: str | None = None

    @property
    def torn_positions(self) -> range:
        """The positions that cannot be read."""
        return range(self.newest + 1 - len(self.torn), self.newest + 1)


class LogReader:
    """Reads the log of a store, or of one branch of it. Calls block; one instance may be shared by threads.

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
    """

    def __init__(self, storage: Storage, store_uuid: str, prefix: str = "", *, first: int = 0) -> None:
        self._storage = storage
        self._store_uuid = store_uuid
        self._prefix = prefix
        self._first = first
        self._layers: dict[str, Layer] = {}  # of the last record that was completed: the next has most of them

    @property
    def prefix(self) -> str:
        """What the keys of positions and hint begin with: nothing, or ``branches/<uuid>/``."""
        return self._prefix

    @property
    def first(self) -> int:
        """The position that the log begins at."""
        return self._first

    def is_empty(self) -> bool:
        """Return whether no position is there. One listing."""
        return next(iter(self._storage.list_objects(f"{self._prefix}{COMMITS}")), None) is None

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

    def newest_readable(self) -> tuple[LogEntry, CorruptRecord | None]:
        """Return the newest record that can be read, and what is wrong with those behind it; a few GETs.

        A torn last record is nobody's acknowledged state (spec, section 7.1).

        Raises
        ------
        VersionNotFound, CorruptStore, UnknownFeature, StorageFailure
            As `latest` and `tail`.
        """
        try:
            return self.latest(), None
        except CorruptRecord:
            pass  # A reply may have been cut short on its way: ask once more before calling the record torn.
        try:
            return self.latest(), None
        except CorruptRecord as torn:
            return self.tail()[0], torn

    def tail(self, *, with_lists: bool = True) -> tuple[LogEntry, tuple[str, ...]]:
        """Return the newest record that can be read, and the sha256 of the bytes at each position behind it.

        As `latest`, and a GET for each position that is damaged.

        Raises
        ------
        CorruptStore
            None can be read, or a position is empty.
        VersionNotFound, StorageFailure, UnknownFeature
        """
        newest = self._gallop(self._read_hint(), {})
        end = self.end_at(newest, with_lists=with_lists)
        if end.is_broken:
            raise self._hole(newest - len(end.torn))
        if end.last is None:
            raise CorruptStore(
                f"no record up to log position {newest} can be read; restore the log from a backup",
                version=newest,
                path=self._key(newest),
            )
        return end.last, end.torn

    def end_at(self, newest: int, *, with_lists: bool = True) -> LogEnd:
        """Return the end of the log, whose newest occupied position is known. A GET for each torn position and one.

        Parameters
        ----------
        with_lists
            Whether a record whose side objects are lost counts as torn. If not, no side object is read.

        Raises
        ------
        StorageFailure, UnknownFeature
            A record could not be read, which says nothing about what it is.
        """
        torn: list[str] = []
        for version in range(newest, self._first - 1, -1):
            data = self._bytes_at(version)
            if data is None:
                return LogEnd(newest, None, tuple(reversed(torn)), is_broken=True)
            try:
                entry = self._decode(data, version)
                return LogEnd(newest, self._complete(entry) if with_lists else entry, tuple(reversed(torn)))
            except CorruptStore:
                torn.append(sha256(data))
        return LogEnd(newest, None, tuple(reversed(torn)))

    def check_no_hole(self, after: LogEntry) -> None:
        """Refuse a log that goes on behind an empty position, where a follower would wait for ever. Some GETs.

        Raises
        ------
        CorruptStore
            A position between ``after`` and the newest record is empty: something deleted part of the log.
        VersionNotFound, StorageFailure
        """
        any(entry.record.v <= after.record.v for entry in self.walk(self.newest_readable()[0]))

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


def _rewritten(entry: LogEntry, version: int, expected: str, found: str) -> CorruptRecord:
    return CorruptRecord(
        f"commit record {entry.record.v} was written behind another record {version} than the one there now: the log "
        "was rewritten or partly restored; run `cnr verify`",
        version=entry.record.v, expected=expected, found=found,
    )  # fmt: skip
