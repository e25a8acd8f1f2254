"""Read a commit log: the newest record, the record at a position, ranges of records (spec, section 7).

This module knows nothing about tables or segments, and writes nothing. `commit_log` adds appending.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from cnr_store.errors import (
    AccessDenied,
    CnrStoreError,
    CorruptRecord,
    CorruptStore,
    ReadOnlyStore,
    StorageFailure,
    VersionNotFound,
)
from cnr_store.format.commit_record import Layer, LogEntry, decode_record, parent_of
from cnr_store.format.documents import decode_document, sha256
from cnr_store.format.layout import COMMITS, commit_key, hint_key
from cnr_store.format.limits import MAX_RECORD_BYTES, MAX_SMALL_BYTES
from cnr_store.format.records import Hint
from cnr_store.log.beginning import check_begun
from cnr_store.log.side_objects import complete
from cnr_store.runtime.threads import Workers
from cnr_store.storage import Storage

READ_ALONE = 16
"""Records that a walk reads one after the other before it reads ahead: most need no more."""
READ_AHEAD = 64
"""Most records that a walk reads at once."""


def position_bytes(storage: Storage, version: int, prefix: str = "") -> bytes | None:
    """Return the bytes at a log position, or None if it is empty. One GET.

    Of an object larger than a record may be, which is torn, only the first `MAX_RECORD_BYTES` + 1 bytes are returned.
    By definition these are the bytes at the position, also for its digest (spec, CNR-DOC-21).

    Raises
    ------
    AccessDenied, StorageFailure
    """
    return storage.read(commit_key(version, prefix), start=0, stop=MAX_RECORD_BYTES + 1)


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The end of a log: the newest readable record, and the torn positions after it.

    Attributes
    ----------
    newest
        The newest occupied position.
    last
        The newest record that can be read; None if none can be read.
    torn
        The sha256 of the bytes at each unreadable position after ``last``, oldest first.
    is_broken
        Whether a position before them, or the first position of the log, is empty: then nothing can be appended.
    lost
        The key of a lost side object of ``last``; then its lists are only what could be reconstructed.
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
    """Reads the log of a store, or of one branch of it. Calls block. Thread-safe.

    Parameters
    ----------
    storage
        The store's root.
    store_uuid
        From ``cnr.json``; a record of another store is refused.
    prefix
        Key prefix of positions and hint: empty for the store's own log, `layout.branch_prefix` for a branch. Side
        objects of all logs are at the root, named by their digest.
    first
        First position of the log: 0, or more in a relay, which copies the newer end of a log and is never appended to.
    """

    def __init__(self, storage: Storage, store_uuid: str, prefix: str = "", *, first: int = 0) -> None:
        self._storage = storage
        self._store_uuid = store_uuid
        self.prefix = prefix
        self.first = first
        self._layers: dict[str, Layer] = {}  # of the last completed record: the next one shares most of them

    def is_empty(self) -> bool:
        """Return whether the log has no position. One listing."""
        return next(iter(self._storage.list_objects(f"{self.prefix}{COMMITS}")), None) is None

    def read(self, version: int) -> LogEntry | None:
        """Return the record at a position, or None if it is empty. One GET, and one per new side object.

        The side objects of a record that is not the newest may be deleted: then its ``state`` is set.

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
        """Return the record at a position, or the one that superseded it; None if it is empty.

        Spec, section 7.10. One GET for a readable record, and one per new side object. Raises as `read` does.
        """
        try:
            return self.read(version)
        except CorruptStore:
            superseding = self._superseding(version)
            if superseding is None:
                raise
            return superseding

    def latest(self) -> LogEntry:
        """Return the newest record. It is found from the hint: O(log distance) GETs, no listing.

        A hint that is absent, unreadable or beyond the log only costs more GETs.

        Raises
        ------
        VersionNotFound
            The creation of the store ended before its first record: nothing was saved yet.
        CorruptStore
            The first position is empty for another reason: the log, or its first record, was deleted.
        CorruptRecord
            The newest record is damaged (the error's ``version``); the one before it may still be `read`.
        StorageFailure
        """
        while True:
            seen: dict[int, bytes] = {}
            newest = self._gallop(self._read_hint(), seen)
            entry = self._decode(seen[newest], newest)
            if newest - 1 in seen:
                # Compare raw bytes: the position before may be a torn one that this record superseded.
                digest = sha256(seen[newest - 1])
                if entry.record.parent_digest != digest:
                    raise _rewritten(entry, newest - 1, digest, entry.record.parent_digest)
            entry = self._complete_past(entry)
            if entry.record.state is None or entry.record.kind == "close":
                return entry
            # A newer record was committed, and then this one's side objects were deleted: search again.

    def newest_readable(self) -> tuple[LogEntry, CorruptRecord | None]:
        """Return the newest record that can be read, and the error of a torn one after it. A few GETs.

        A torn last record was never acknowledged (spec, section 7.1).

        Raises
        ------
        VersionNotFound, CorruptStore, UnknownFeature, StorageFailure
            As for `latest` and `tail`.
        """
        try:
            return self.latest(), None
        except CorruptRecord:
            pass  # The reply may have been cut short: read again before treating the record as torn.
        try:
            return self.latest(), None
        except CorruptRecord as torn:
            return self.tail()[0], torn

    def tail(self, *, with_lists: bool = True) -> tuple[LogEntry, tuple[str, ...]]:
        """Return the newest record that can be read, and the sha256 of the bytes at each position after it.

        GETs as for `latest`, and one for each damaged position.

        Raises
        ------
        CorruptStore
            No record can be read, or a position is empty.
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
        """Return the end of a log whose newest occupied position is known. One GET, and one per torn position.

        Parameters
        ----------
        with_lists
            Read side objects, and treat a record that lost one as torn. If False, no side object is read.

        Raises
        ------
        StorageFailure, UnknownFeature
            A record could not be read, or not all of it; whether it is damaged is unknown.
        """
        torn: list[str] = []
        sizes: dict[str, int] | None = None
        for version in range(newest, self.first - 1, -1):
            data = self._bytes_at(version)
            if data is None:
                return LogEnd(newest, None, tuple(reversed(torn)), is_broken=True)
            try:
                entry = self._decode(data, version)
                return LogEnd(newest, self._complete(entry) if with_lists else entry, tuple(reversed(torn)))
            except CorruptStore:
                sizes = self._listed_sizes() if sizes is None else sizes
                self._check_all_was_read(version, data, sizes)
                torn.append(sha256(data))
        return LogEnd(newest, None, tuple(reversed(torn)))

    def check_no_hole(self, after: LogEntry) -> None:
        """Check that no position is empty before later ones: a follower would wait there forever. Some GETs.

        Raises
        ------
        CorruptStore
            A position between ``after`` and the newest record is empty: part of the log was deleted.
        VersionNotFound, StorageFailure
        """
        any(entry.record.v <= after.record.v for entry in self.walk(self.newest_readable()[0]))

    def poll(self, after: LogEntry) -> LogEntry | None:
        """Return the next record after ``after``, or None if there is none yet.

        One GET, and one per new side object. Skips torn positions that were superseded. The lists of a record that is
        not the newest may be missing, as for `read`.

        Raises
        ------
        CorruptRecord
            The record is damaged, or its parent is not ``after``.
        CorruptStore, UnknownFeature, StorageFailure
        """
        entry = self.read_standing(after.record.v + 1)
        if entry is not None:
            self._check_follows(entry, after)
        return entry

    def walk(self, newest: LogEntry, workers: Workers | None = None) -> Iterator[LogEntry]:
        """Yield ``newest`` and every record before it, down to the first. One GET each.

        Skips torn positions that were superseded. With ``workers`` a long walk reads ahead on these threads: beyond the
        first `READ_ALONE` records, at most as many as were read before, and `READ_AHEAD`.

        Raises
        ------
        VersionNotFound
            A position of a relay is empty: the relay has not copied it yet.
        CorruptStore
            A position is empty: part of the log was deleted.
        CorruptRecord
            A record is damaged, or the digest chain breaks.
        """
        entry = newest
        yield entry
        ahead: dict[int, bytes | None] = {}
        while (version := parent_of(entry.record)[0]) >= self.first:
            if version not in ahead:
                walked = newest.record.v - version
                count = 1 if workers is None or walked < READ_ALONE else min(walked, READ_AHEAD)
                positions = range(version, max(version - count, self.first - 1), -1)
                tasks = (partial(self._bytes_at, position) for position in positions)
                found = [task() for task in tasks] if workers is None else workers.run(tasks)
                ahead = dict(zip(positions, found, strict=True))
            data = ahead.pop(version)
            if data is None:
                raise self._hole(version)
            before = self._complete_past(self._decode(data, version))
            self._check_follows(entry, before)
            entry = before
            yield entry

    def _gallop(self, start: int, seen: dict[int, bytes]) -> int:
        """Return the newest occupied position; add the bytes of every occupied one that was read to ``seen``."""

        def is_occupied(version: int) -> bool:
            data = self._bytes_at(version)
            if data is not None:
                seen[version] = data
            return data is not None

        first = self.first
        start = max(start, first)
        if start > first and not is_occupied(start):
            start = first
        if start == first and not is_occupied(first):
            check_begun(self._storage, self.prefix, first)
            is_occupied(first)  # its creator wrote it after the first read
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
            data = self._storage.read_document(hint_key(self.prefix), MAX_SMALL_BYTES)
            return 0 if data is None else decode_document(data, Hint, hint_key(self.prefix)).version
        except AccessDenied:
            raise
        except (StorageFailure, CorruptStore):
            return 0

    def _superseding(self, version: int) -> LogEntry | None:
        """Return the record that superseded an unreadable position, or None."""
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
                f"commit record {version} belongs to store {entry.record.store_uuid}, expected "
                f"{self._store_uuid}; two stores were mixed, or another one was made in its place: open it again",
                version=version,
                expected=self._store_uuid,
                found=entry.record.store_uuid,
            )
        return entry

    def _complete(self, entry: LogEntry) -> LogEntry:
        """Return the entry with the lists of its side objects."""
        if entry.record.state is None:
            return entry
        entry = complete(self._storage, entry, self._layers)
        self._layers = {layer.digest: layer for layer in entry.layers}
        return entry

    def _complete_past(self, entry: LogEntry) -> LogEntry:
        """Complete an entry; if its side objects are lost, return a closing or non-newest one unchanged."""
        try:
            return self._complete(entry)
        except CorruptStore:
            if entry.record.kind != "close" and self._bytes_at(entry.record.v + 1) is None:
                raise
            return entry

    def _check_follows(self, entry: LogEntry, before: LogEntry) -> None:
        """Check that ``before`` is the parent of ``entry``: the one before it, or before what it superseded."""
        version, digest = parent_of(entry.record)
        if version != before.record.v or digest != before.digest:
            raise _rewritten(entry, version, before.digest, digest)

    def _bytes_at(self, version: int) -> bytes | None:
        return position_bytes(self._storage, version, self.prefix)

    def _listed_sizes(self) -> dict[str, int]:
        """Return the bytes of each position by its key: none where objects cannot be listed."""
        try:
            return {found.key: found.size_bytes for found in self._storage.list_objects(f"{self.prefix}{COMMITS}")}
        except (AccessDenied, ReadOnlyStore):
            return {}

    def _check_all_was_read(self, version: int, data: bytes, sizes: Mapping[str, int]) -> None:
        """Raise `StorageFailure` if the storage sends less than it has: the record is not torn, the read was."""
        key = self._key(version)
        expected = min(sizes.get(key, len(data)), MAX_RECORD_BYTES + 1)
        if len(data) < expected:
            raise StorageFailure(
                f"reading {key!r} gave {len(data)} of {expected} bytes and no error; try again, and check the storage",
                path=key, expected=expected, found=len(data),
            )  # fmt: skip

    def _key(self, version: int) -> str:
        return commit_key(version, self.prefix)

    def _hole(self, version: int) -> CnrStoreError:
        if self.first > 0:
            # A relay copies the positions of skipped versions later, in descending order.
            return VersionNotFound(
                f"log position {version} has not been copied to this relay yet, or was lost here; retry while the "
                "relay runs",
                version=version,
                path=self._key(version),
            )
        return CorruptStore(
            f"log position {version} is empty, but later positions exist: part of the log was deleted (by a lifecycle "
            "rule?); restore it from a backup",
            version=version,
            path=self._key(version),
        )


def _rewritten(entry: LogEntry, version: int, expected: str, found: str) -> CorruptRecord:
    return CorruptRecord(
        f"commit record {entry.record.v} follows record {version} with sha256 {found}, but the record before it has "
        f"{expected}: the log was rewritten or partly restored; run `cnr verify`",
        version=entry.record.v, expected=expected, found=found,
    )  # fmt: skip
