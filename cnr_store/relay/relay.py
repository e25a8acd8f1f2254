"""A relay: one process that keeps a copy of a store's newest versions elsewhere, for many to read (spec, section 7.11).

The same bytes at the same versions. Before a record is created at the target, all that it names is there, durable and
checked against the digests that name it; so a relay that is killed at any point leaves a copy whose newest version is
whole, and the next one goes on from there. Nothing is ever written to the source.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cnr_store.errors import (
    BadInput,
    CorruptRecord,
    CorruptStore,
    MissingObject,
    StorageFailure,
    StoreExists,
    VersionExpired,
    VersionNotFound,
)
from cnr_store.format import layout
from cnr_store.format.commit_record import LogEntry, decode_record, is_live
from cnr_store.format.documents import canonical_json, decode_document, sha256
from cnr_store.format.identity import decode_identity, decode_relay_marker
from cnr_store.format.limits import MAX_LISTS_BYTES, MAX_RECORD_BYTES, MAX_SMALL_BYTES
from cnr_store.format.records import ChainEntry, CommitRecord, Hint, RelayMarker, RelayTrims
from cnr_store.log.author import LIBRARY
from cnr_store.log.clock import check_clock, wall_ms
from cnr_store.log.leases import delete_ended_holds, is_held, read_cursors, read_leases
from cnr_store.log.log_reader import LogReader, position_bytes
from cnr_store.log.retention import Holds, LiveVersion, RetentionPolicy
from cnr_store.log.side_objects import delete_found, find_unneeded
from cnr_store.relay.copying import copy_segment, copy_side_object, delete_segment, has_segment
from cnr_store.relay.mirroring import Descent, RawRecord, first_version, next_live, segments_to_copy, versions_to_hold
from cnr_store.relay.trimming import plan_trim
from cnr_store.runtime.arguments import checked_count, checked_number
from cnr_store.runtime.threads import Throttle, blocks
from cnr_store.storage import CreateOutcome, Storage, open_storage
from cnr_store.store import Store

_BATCH = 64
"""Records read at once when many positions are copied; at most 4 MiB."""

_MANY = 64
"""Versions copied in one look between two trims, as a relay that is far behind has no room for all of them; and before
a look ends although a source that is faster has gone on."""

_LOOK_BACK = 60
"""Looks in a row without news before one asks whether the source is still the one that was copied."""

_TIDY_EVERY_MS = 86_400_000
_LEFTOVER_S = 3600.0
"""A file that is not whole after so long is nobody's any more."""

_CREATE_ATTEMPTS = 6
_FIRST_PAUSE_S = 0.05
_JITTER = 0.25


@dataclass(frozen=True, slots=True)
class RelayReport:
    """What one look at the source came to.

    Attributes
    ----------
    version, source_version
        The newest at the relay and at the source; None while there is nothing to read.
    versions
        Versions that were copied with all that they name.
    skipped
        Positions that were copied as records alone: their versions had expired at the source, were superseded, or are
        damaged there.
    segments, objects, bytes, reused_objects
        What was put, segments of versions that channels name included; objects that an interrupted copy had put.
    trimmed_segments, trimmed_bytes
        What was deleted at the relay.
    delay_s
        From the commit of the newest version copied to its record standing here, by the clocks of both machines; None
        if none was.
    staleness_s
        How long ago the relay had all that the source had: 0 at the end of a look that found it so.
    problem
        Why the look ended early, what could not be trimmed, or which damage at the source was passed over for a newer
        version. None if all went well.
    """

    version: int | None
    source_version: int | None
    versions: int = 0
    skipped: int = 0
    segments: int = 0
    objects: int = 0
    bytes: int = 0
    reused_objects: int = 0
    trimmed_segments: int = 0
    trimmed_bytes: int = 0
    delay_s: float | None = None
    staleness_s: float | None = None
    problem: str | None = None


@dataclass(slots=True)
class _Counts:
    """The numbers of a report while they grow."""

    versions: int = 0
    skipped: int = 0
    segments: int = 0
    objects: int = 0
    bytes: int = 0
    reused_objects: int = 0
    trimmed_segments: int = 0
    trimmed_bytes: int = 0
    delay_s: float | None = None
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    """What is remembered of a version that the relay holds."""

    logical: int
    ts_ms: int
    chain: tuple[ChainEntry, ...] = field(repr=False)


class Relay:
    """Copies the newest versions of a store, or of a branch, to another place. For one thread at a time.

    Two relays with one target do no harm: what they put is the same. What they cost, they cost twice.

    Parameters
    ----------
    source
        The store to copy, opened on the branch if one is meant; may be a relay itself. Its threads do the work.
    target
        Where to: an empty place, or one that a relay of this log has begun.
    start
        The first version that a new relay holds. None: the newest, and those that channels name. A relay that has
        begun goes on from where it is.
    policy
        Which of the source's live versions stay at the relay. None is ``RetentionPolicy()``. What channels, tags, and
        leases and cursors taken at the relay name, stays too.
    grace_s
        From letting a segment go to deleting it: what a reader of the relay may take.
    trims
        Whether anything is ever deleted at the relay.
    bytes_per_s
        Cap on what is copied.
    storage_options, fsync, unsafe_single_writer
        Of a target that is given as a URL; with the last, no other relay may ever write there.
    clock_ms, monotonic_s
        Time, for tests.

    Examples
    --------
    >>> import numpy as np
    >>> store = Store.create("memory://doctest-far")
    >>> with store.writer() as writer, writer.begin(step=10) as txn:
    ...     txn.write_table("user", np.ones((4, 2), np.float32))
    >>> report = Relay(store, "memory://doctest-near").advance()
    >>> report.version == store.latest_version(), report.segments
    (True, 1)
    >>> near = Store.open("memory://doctest-near")
    >>> near.uuid == store.uuid, near.snapshot().table("user").read().shape
    (True, (4, 2))
    """

    def __init__(
        self,
        source: Store,
        target: str | os.PathLike[str] | Storage,
        *,
        start: int | None = None,
        policy: RetentionPolicy | None = None,
        grace_s: float = 86_400.0,
        trims: bool = True,
        bytes_per_s: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
        unsafe_single_writer: bool = False,
        clock_ms: Callable[[], int] = wall_ms,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(source, Store):
            raise BadInput(f"a relay takes an open store, found {source!r}; give Store.open(url)", found=str(source))
        checked_number("grace_s", grace_s, least=0, most=1e9)
        if start is not None:
            checked_count("start, a version of the source,", start)
        self._source = source
        self._target = (
            target
            if isinstance(target, Storage)
            else open_storage(
                target, storage_options=storage_options, fsync=fsync, unsafe_single_writer=unsafe_single_writer
            )
        )
        if self._target.url == source.url:
            raise BadInput(f"source and target are both {source.url}; give another place", found=source.url)
        self._start = start
        self._policy = RetentionPolicy() if policy is None else policy
        self._grace_ms = int(grace_s * 1000)
        self._trims = trims
        self._throttle = Throttle(bytes_per_s)
        self._clock_ms, self._monotonic_s = clock_ms, monotonic_s
        self._log = LogReader(self._target, source.uuid)
        self._identity = b""
        self._first = 0
        self._newest: LogEntry | None = None  # of the source, as it was seen last
        self._head: LogEntry | None = None  # of the target
        self._is_open = False
        self._held: dict[int, _Held] = {}
        self._entries: dict[str, ChainEntry] = {}
        self._present: set[str] = set()
        self._next_trim_ms: int | None = 0
        self._next_tidy_ms = 0
        self._level_s: float | None = None
        self._idle_looks = 0
        self._damaged: dict[str, CorruptStore] = {}  # at the source, by segment, in this look

    @property
    def version(self) -> int | None:
        """The newest version at the relay, as it was seen last."""
        return None if self._head is None else self._head.record.v

    @property
    def staleness_s(self) -> float | None:
        """How long ago the relay had all that the source had; None if it never had."""
        return None if self._level_s is None else self._monotonic_s() - self._level_s

    def advance(self) -> RelayReport:
        """Copy every version that is new at the source, then let go what nothing needs. Blocks; one GET if none is new.

        Where the source goes on faster than it is copied, a look ends behind what was the newest when it began. May be
        called again after any error: what was copied is not copied again.

        Raises
        ------
        StoreExists
            The target holds something else.
        VersionNotFound, VersionExpired
            ``start`` is not a version that can be read.
        CorruptStore
            Of the source, or the target is no copy of it. Nothing of it becomes visible.
        AccessDenied, UnsafeBackend, StorageFailure
            Of either.
        """
        counts = _Counts()
        self._damaged.clear()
        if not self._is_open:
            self._is_open = self._open(counts)
        if not self._is_open:
            self._level_s = self._monotonic_s()
            return self._report(counts, is_level=True)
        try:
            is_level = self._catch_up(counts)
        except StorageFailure:
            self._let_go(counts)  # The target may have no room, and only this makes some.
            raise
        untrimmed = self._let_go(counts)
        return self._report(counts, counts.damage if untrimmed is None else untrimmed, is_level=is_level)

    def run(
        self,
        every_s: float = 5.0,
        *,
        stop: threading.Event | None = None,
        on_report: Callable[[RelayReport], None] | None = None,
    ) -> None:
        """Look again and again until ``stop`` is set; blocks.

        Failures of either backend and damage at the source end a look, not the run: the report says so, and the relay
        serves what it has.

        Raises
        ------
        BadInput, StoreExists, Unsupported, VersionNotFound, VersionExpired
            What another look would not mend.
        """
        checked_number("every_s", every_s, above=0, most=1e9)
        stop = threading.Event() if stop is None else stop
        while not stop.is_set():
            try:
                report = self.advance()
            except (StorageFailure, CorruptStore) as error:
                report = self._report(_Counts(), error.message)
            if on_report is not None:
                on_report(report)
            if report.problem is None and self._head is not None and report.version != report.source_version:
                continue  # The source has gone on meanwhile.
            # Several relays of one store shall not ask at once.
            stop.wait(every_s * random.uniform(1 - _JITTER, 1 + _JITTER))

    # ---- where to begin

    def _open(self, counts: _Counts) -> bool:
        """Find what the target has, or begin there; whether there is anything to read."""
        source, target = self._source, self._target
        identity, found = self._read_identity(), target.read_document(layout.IDENTITY, MAX_SMALL_BYTES)
        marker = self._read_marker()
        if found is not None and (marker is None or found != identity):
            decode_identity(found, f"{target.url}/{layout.IDENTITY}")  # a reply that was cut is no other store
            raise StoreExists(
                f"{target.url} holds a store that is no relay of {source.url}; give an empty place", path=target.url
            )
        self._identity = identity
        if found is not None:
            assert marker is not None
            self._first = marker.first
            self._head = self._find_head()
            self._check_history(self._head)
            self._load_held(self._head)
            self._mend(self._head, counts)
            return True
        return self._begin(marker, counts)

    def _begin(self, marker: RelayMarker | None, counts: _Counts) -> bool:
        """Copy the first version, and create ``cnr.json`` last: until then there is nothing to open."""
        self._newest = head = self._source.head()
        self._head = None
        if marker is None:
            first = first_version(head.record, self._start, self._source.internals.log.first)
            if first is None:
                return False
            if first > head.record.v:
                raise VersionNotFound(f"{self._source.url} has no version {first} yet to start from", version=first)
            if self._start is not None and not is_live(head.record, first):
                raise VersionExpired(f"version {first} of {self._source.url} has expired; start later", version=first)
            if self._target.is_exclusive:
                self._target.probe()
            marker = self._create_marker(first)
        self._first = marker.first
        self._copy_version(head.record.v if self._start is None else self._first, counts)
        root = self._source.storage.read_document(layout.ROOT_GROUP, MAX_SMALL_BYTES)
        if root is not None:
            decode_document(root, dict, f"{self._source.url}/{layout.ROOT_GROUP}")  # not one that was cut on its way
            self._target.put(layout.ROOT_GROUP, root)
            self._target.sync_folders([layout.ROOT_GROUP])
        self._create(layout.IDENTITY, self._identity)
        return True

    def _read_identity(self) -> bytes:
        """The source's ``cnr.json``, bound by the record that was written behind it, where that is there."""
        storage, where = self._source.storage, f"{self._source.url}/{layout.IDENTITY}"
        data = storage.read_document(layout.IDENTITY, MAX_SMALL_BYTES)
        if data is None:
            raise MissingObject(f"{where} is missing; restore it from a backup", path=layout.IDENTITY)
        first = position_bytes(storage, 0)
        expected = None if first is None else decode_record(first, 0).record.parent_digest
        if decode_identity(data, where) != self._source.identity or expected not in (None, sha256(data)):
            raise CorruptStore(
                f"{where} is not the one that the store began with; run `cnr verify` there",
                path=layout.IDENTITY, expected=expected, found=sha256(data),
            )  # fmt: skip
        return data

    def _read_marker(self) -> RelayMarker | None:
        data = self._target.read_document(layout.RELAY, MAX_SMALL_BYTES)
        if data is None:
            return None
        marker = decode_relay_marker(data, self._source.uuid, f"{self._target.url}/{layout.RELAY}")
        if marker.branch != self._source.internals.branch_uuid:
            raise StoreExists(
                f"{self._target.url} is a relay of another log of the store (branch {marker.branch or 'none'!r}); give "
                "an empty place",
                path=self._target.url, expected=self._source.internals.branch_uuid, found=marker.branch,
            )  # fmt: skip
        return marker

    def _create_marker(self, first: int) -> RelayMarker:
        marker = RelayMarker(
            store_uuid=self._source.uuid, branch=self._source.internals.branch_uuid, first=first,
            source=self._source.url, library=LIBRARY, created_ms=self._clock_ms(),
        )  # fmt: skip
        if self._target.create(layout.RELAY, canonical_json(marker)) is CreateOutcome.CREATED:
            return marker
        found = self._read_marker()  # that of another relay, or ours
        if found is None:
            raise StorageFailure(f"{self._target.url} did not take {layout.RELAY}; try again", path=layout.RELAY)
        return found

    def _find_head(self) -> LogEntry:
        """The last record of the target without a gap before it. A gallop would pass over a gap that is being filled.

        The hint is put behind a filled gap, so from there on it is a GET for each position.
        """
        version = self._first
        try:
            data = self._target.read_document(layout.hint_key(), MAX_SMALL_BYTES)
            hint = 0 if data is None else decode_document(data, Hint, layout.hint_key()).version
        except CorruptStore:
            hint = 0
        if hint > version and self._occupied(hint):
            version = hint
        if not self._occupied(version):
            raise CorruptStore(
                f"position {version} of the relay {self._target.url} is empty, where it began: part of it was deleted; "
                "begin anew in an empty place",
                version=version, path=layout.commit_key(version),
            )  # fmt: skip
        while self._occupied(version + 1):
            version += 1
        entry = self._log.read(version)
        assert entry is not None
        return entry

    def _occupied(self, version: int) -> bool:
        return version <= 10**18 and self._target.read(layout.commit_key(version), stop=1) is not None

    def _check_history(self, held: LogEntry) -> None:
        """The source must have the relay's newest record: else its log was rewritten or restored from a backup."""
        version = held.record.v
        data = self._source_bytes(version)
        if data is None or sha256(data) != held.digest:
            raise CorruptStore(
                f"the source {self._source.url} has {'no' if data is None else 'another'} record at position "
                f"{version}, which the relay {self._target.url} has copied: its log was rewritten or restored from a "
                "backup; begin a relay in an empty place",
                version=version, path=self._source_key(version), expected=held.digest,
            )  # fmt: skip

    # ---- copying

    def _catch_up(self, counts: _Counts) -> bool:
        """Copy up to what the source had when this began; returns whether nothing newer is there at the end."""
        assert self._head is not None
        goal: int | None = None
        while (entry := self._source.poll(self._head)) is not None:
            self._idle_looks = 0
            if self._newest is None or self._newest.record.v < entry.record.v:
                self._newest = self._newest_at_source(entry)
            if goal is None:
                goal = self._newest.record.v
            elif self._head.record.v >= goal and counts.versions >= _MANY:
                return False
            self._copy_version(entry.record.v, counts)
            if counts.versions % _MANY == 0:
                self._let_go(counts)
        self._idle_looks += 1
        if self._idle_looks >= _LOOK_BACK:
            # A shorter log in the place of the source's would look like a source with no news, for ever.
            self._check_history(self._head)
            self._idle_looks = 0
        self._newest = self._head
        self._level_s = self._monotonic_s()
        return True

    def _copy_version(self, version: int, counts: _Counts) -> None:
        """Copy the first version from ``version`` on that can still be had, and the records up to it."""
        entry = self._hold_next(version, counts)
        bottom = self._first if self._head is None else self._head.record.v + 1
        self._copy_records(entry, bottom)
        counts.skipped += entry.record.v - bottom
        counts.versions += 1
        counts.delay_s = (self._clock_ms() - entry.record.ts_ms) / 1000
        self._remember(entry.record.v, entry)
        if not self._trims:
            self._forget_unnamed(entry)
        self._head = entry
        self._target.put(layout.hint_key(), canonical_json(Hint(entry.record.v)))

    def _hold_next(self, version: int, counts: _Counts) -> LogEntry:
        """Copy the segments of the first version from ``version`` on that is live, and of what its channels name."""
        while True:
            newest = self._newest
            assert newest is not None
            version = next_live(newest.record, version)
            entry = newest if version >= newest.record.v else self._source_entry(version)
            try:
                if entry.record.state is not None:
                    raise MissingObject(f"the side objects of commit record {version} were collected", version=version)
                reused = self._copy_segments(entry.record.chain, counts) if newest.record.kind != "close" else []
                reused += self._copy_named(entry.record, counts)
            except CorruptStore as error:
                version = self._pass_over(entry.record.v, error, counts)
                continue
            self._check_reused(reused, counts)
            return entry

    def _copy_named(self, record: CommitRecord, counts: _Counts) -> list[ChainEntry]:
        """Copy the segments of the versions that a record's channels name, as far as these have not expired."""
        reused = []
        for named in versions_to_hold(record, self._first):
            try:
                if named not in self._held:
                    self._remember(named, self._source_entry(named))
                reused += self._copy_segments(self._held[named].chain, counts)
            except MissingObject:
                if not self._is_gone(named):
                    raise
        return reused

    def _pass_over(self, version: int, error: CorruptStore, counts: _Counts) -> int:
        """Return where to go on behind a version that cannot be had; raises ``error`` where nothing newer is there."""
        if not (isinstance(error, MissingObject) and self._is_gone(version)):
            self._newest = newest = self._source.head()
            if version >= newest.record.v or any(item.seg in self._damaged for item in newest.record.chain):
                raise error
            # Damage that a repair went back from, or a new baseline left behind, must not end the relay.
            counts.damage = error.message
        # A source that is a relay itself lets versions go that its records call live.
        return version + 1 if self._source.relay is None else self._newest_version()

    def _newest_at_source(self, seen: LogEntry) -> LogEntry:
        """The source's newest record; where that one is torn, which others will repair, the one that was seen."""
        try:
            return self._source.head()
        except CorruptRecord:
            if seen.record.state is not None:
                raise  # An old one: what is live is not known by it.
            return seen

    def _is_gone(self, version: int) -> bool:
        """Whether the source does not have the version's data any more, by its newest record."""
        self._newest = newest = self._source.head()
        if version == newest.record.v:
            return newest.record.kind == "close"
        return self._source.relay is not None or not is_live(newest.record, version)

    def _newest_version(self) -> int:
        assert self._newest is not None
        return self._newest.record.v

    def _source_entry(self, version: int) -> LogEntry:
        entry = self._source.internals.log.read_standing(version)
        if entry is None:
            raise CorruptStore(
                f"log position {version} of {self._source.url} is empty although the log goes on; run `cnr verify`",
                version=version, path=self._source_key(version),
            )  # fmt: skip
        return entry

    def _copy_segments(self, chain: tuple[ChainEntry, ...], counts: _Counts) -> list[ChainEntry]:
        """Copy what is missing of a chain; returns what another look or relay had copied."""
        reused = []
        for item in segments_to_copy([chain], self._present):
            if has_segment(self._target, item):
                reused.append(item)
            else:
                self._copy_segment(item, counts)
            self._present.add(item.seg)
        return reused

    def _copy_segment(self, item: ChainEntry, counts: _Counts) -> None:
        if item.seg in self._damaged:
            raise self._damaged[item.seg]
        try:
            copied = copy_segment(
                self._source.storage, self._target, item, self._source.internals.workers, self._throttle
            )  # fmt: skip
        except CorruptStore as error:
            self._damaged[item.seg] = error
            raise
        counts.segments += 1
        counts.objects += copied.objects
        counts.bytes += copied.size_bytes
        counts.reused_objects += copied.reused_objects

    def _check_reused(self, reused: list[ChainEntry], counts: _Counts) -> None:
        """Look once more: another relay of this target may have been about to delete what nothing needed till now."""
        for item in reused:
            if not has_segment(self._target, item):
                self._copy_segment(item, counts)

    def _mend(self, held: LogEntry, counts: _Counts) -> None:
        """Copy again what the newest version lacks, should something have deleted it here. A GET for each segment."""
        if held.record.kind == "close":
            return
        try:
            self._copy_segments(held.record.chain, counts)
        except MissingObject:
            if not self._is_gone(held.record.v):
                raise

    def _copy_records(self, newest: LogEntry, bottom: int) -> None:
        """Create the positions from that of ``newest`` down to ``bottom``, in this order, its side objects before it.

        Upwards, a reader could find a record at the end of the log whose segments are not here. Downwards it finds the
        one before ``bottom``, or ``newest``, until the last of them joins the two. Only those need their side objects.
        """
        there = () if self._head is None else self._head.side_objects
        for digest in newest.side_objects:
            if digest not in there:
                copy_side_object(self._source.storage, self._target, digest, self._throttle)
        descent = Descent(newest)
        for raw in self._raw_records(newest.record.v, bottom, descent):
            if raw.version == bottom:
                descent.check_meets(self._head)
            self._copy_position(raw)

    def _raw_records(self, top: int, bottom: int, descent: Descent) -> Iterator[RawRecord]:
        for start, stop in blocks(top + 1 - bottom, _BATCH):
            versions = range(top - start, top - stop, -1)
            found = self._source.internals.workers.run(partial(self._source_bytes, version) for version in versions)
            for version, data in zip(versions, found, strict=True):
                if data is None:
                    raise CorruptRecord(
                        f"log position {version} of {self._source.url} is empty although the log goes on; run "
                        "`cnr verify` there",
                        version=version, path=self._source_key(version),
                    )  # fmt: skip
                yield descent.take(data)

    def _copy_position(self, raw: RawRecord) -> None:
        """Create a position with the bytes of the source, which the record behind them vouches for."""
        key = layout.commit_key(raw.version)
        if len(raw.data) <= MAX_RECORD_BYTES:
            self._create(key, raw.data)
            return
        # Torn and superseded, and too long to be created: every relay puts the same bytes, in whatever order.
        found = position_bytes(self._target, raw.version)
        if found is not None and found != raw.data:
            raise self._other_bytes(key, raw.data, found)
        self._target.put(key, raw.data)
        self._target.sync_folders([key])

    def _source_bytes(self, version: int) -> bytes | None:
        return position_bytes(self._source.storage, version, self._source.internals.log.prefix)

    def _source_key(self, version: int) -> str:
        return layout.commit_key(version, self._source.internals.log.prefix)

    def _create(self, key: str, data: bytes) -> None:
        """Create an object that any relay of this log would create with these bytes."""
        pause_s, found = _FIRST_PAUSE_S, None
        for attempt in range(_CREATE_ATTEMPTS):
            if attempt:
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s *= 2
            try:
                if self._target.create(key, data) is CreateOutcome.CREATED:
                    return
            except StorageFailure:
                if attempt == _CREATE_ATTEMPTS - 1:
                    raise
            found = self._target.read(key, stop=len(data) + 1)
            if found == data:
                return
        if found is None:
            raise StorageFailure(f"{self._target.url} did not take {key}; try again", path=key)
        raise self._other_bytes(key, data, found)

    def _other_bytes(self, key: str, expected: bytes, found: bytes) -> CorruptStore:
        return CorruptStore(
            f"{key} at the relay {self._target.url} has other bytes than at its source: two stores were mixed, or it "
            "was altered; begin a relay in an empty place",
            path=key, expected=sha256(expected), found=sha256(found),
        )  # fmt: skip

    # ---- what is held, and let go

    def _let_go(self, counts: _Counts) -> str | None:
        """Trim if that is due; returns why it could not be done. What was copied stands, and the next look tries it."""
        if not self._trims or not (counts.versions or self._is_trim_due()):
            return None
        try:
            self._trim(counts)
        except (StorageFailure, CorruptStore) as error:
            self._next_trim_ms = 0
            return error.message
        return None

    def _remember(self, version: int, entry: LogEntry) -> None:
        record = entry.record
        chain = tuple(self._entries.setdefault(item.seg, item) for item in record.chain)
        self._held[version] = _Held(record.logical, record.ts_ms, chain)

    def _forget_unnamed(self, head: LogEntry) -> None:
        """Without trimming nothing else would, and a relay is to run for years."""
        named = versions_to_hold(head.record, self._first)
        self._held = {version: one for version, one in self._held.items() if version in (*named, head.record.v)}
        self._entries = {item.seg: item for one in self._held.values() for item in one.chain}
        self._present &= self._entries.keys()

    def _load_held(self, head: LogEntry) -> None:
        """What an earlier process has copied and not let go: one GET for each of its versions, to trim by."""
        versions: list[int] = []
        if self._trims:
            notes = self._read_notes()
            versions += (one for one in notes.kept if one < notes.floor)
            versions += range(max(notes.floor, self._first), head.record.v)
        for start, stop in blocks(len(versions), _BATCH):
            reads = [partial(self._read_held, version) for version in versions[start:stop]]
            for entry in self._source.internals.workers.run(reads):
                if entry is not None and is_live(head.record, entry.record.v):
                    self._remember(entry.record.v, entry)
        self._remember(head.record.v, head)

    def _read_held(self, version: int) -> LogEntry | None:
        try:
            return self._log.read(version)
        except CorruptRecord:
            return None  # A position that was superseded.

    def _read_notes(self) -> RelayTrims:
        data = self._target.read_document(layout.RELAY_TRIMS, MAX_LISTS_BYTES)
        if data is None:
            return RelayTrims()
        return decode_document(data, RelayTrims, f"{self._target.url}/{layout.RELAY_TRIMS}")

    def _is_trim_due(self) -> bool:
        return self._next_trim_ms is not None and self._next_trim_ms <= self._clock_ms()

    def _trim(self, counts: _Counts) -> None:
        """Let versions go, and delete segments that were doomed so long ago that no reader is at them."""
        assert self._head is not None
        head = self._head.record
        if head.kind == "close":
            self._next_trim_ms = None
            return
        now_ms = self._clock_ms()
        if self._next_tidy_ms <= now_ms:
            self._tidy(now_ms)
        self._held = {version: one for version, one in sorted(self._held.items()) if is_live(head, version)}
        versions = [
            LiveVersion(version, one.logical, one.ts_ms, tuple(item.seg for item in one.chain))
            for version, one in self._held.items()
        ]
        notes = self._read_notes()
        holds, leased = self._read_holds(now_ms)
        listed = [name for name in self._target.list_folders(layout.DATA) if layout.is_segment_name(name)]
        plan = plan_trim(head, versions, self._policy, holds, notes, listed, leased, now_ms, self._grace_ms)
        if plan.notes != notes:
            # Before anything is deleted: a relay that is started again has to know since when a segment is doomed.
            self._target.put_document(layout.RELAY_TRIMS, canonical_json(plan.notes), MAX_LISTS_BYTES)
            self._target.sync_folders([layout.RELAY_TRIMS])
        for version in plan.going:
            del self._held[version]
        self._present -= plan.notes.doomed.keys()
        self._entries = {item.seg: item for one in self._held.values() for item in one.chain}
        waiting = [due_ms for due_ms in plan.notes.doomed.values() if due_ms > now_ms]
        self._next_trim_ms = min(waiting, default=None)
        if plan.due:
            if self._clock_ms is wall_ms:
                check_clock(self._target, now_ms)
            self._delete(plan.due, head.v + 1, counts)

    def _tidy(self, now_ms: int) -> None:
        """Delete what readers and relays that died left: garbage collection does not come here."""
        assert self._head is not None
        head = self._head
        delete_ended_holds(self._target, now_ms)
        unneeded = find_unneeded(
            self._target, head.side_objects, age_ms=max(self._grace_ms, int(_LEFTOVER_S * 1000)),
            is_left=lambda _, version: version <= head.record.v,
        )  # fmt: skip
        delete_found(self._target, unneeded)
        for folder in (layout.DATA, layout.COMMITS, layout.STATE, layout.LEASES):
            self._target.sweep(folder, older_than_s=max(self._grace_ms / 1000, _LEFTOVER_S))
        self._next_tidy_ms = now_ms + _TIDY_EVERY_MS

    def _delete(self, due: tuple[str, ...], following: int, counts: _Counts) -> None:
        """Delete segments, unless another relay of this target is ahead: what it has copied may need them again."""
        if self._occupied(following):
            self._next_trim_ms = 0
            return
        for name in due:
            size_bytes = delete_segment(self._target, name, self._clock_ms() - self._grace_ms)
            if size_bytes is None:
                continue
            counts.trimmed_bytes += size_bytes
            counts.trimmed_segments += 1
        # It may have come between: what its records need of these is put again, whatever of it is left.
        while (entry := self._log.read_standing(following)) is not None:
            for item in entry.record.chain:
                if item.seg in due:
                    self._copy_segment(item, counts)
            following = entry.record.v + 1

    def _read_holds(self, now_ms: int) -> tuple[Holds, set[str]]:
        """What readers of the relay hold, and the segments of leased versions that it would not keep otherwise."""
        leases: dict[int, str] = {}
        leased: set[str] = set()
        for lease in read_leases(self._target).values():
            if lease.branch or not is_held(lease.expires_ms, now_ms):
                continue
            leases[lease.version] = f"leased by {lease.holder}"
            if lease.version not in self._held:
                entry = self._read_held(lease.version)
                leased |= set() if entry is None else {item.seg for item in entry.record.chain}
        cursors = {
            name: cursor.version
            for name, cursor in read_cursors(self._target).items()
            if not cursor.branch and is_held(cursor.expires_ms, now_ms)
        }
        return Holds(leases, cursors), leased

    def _report(self, counts: _Counts, problem: str | None = None, *, is_level: bool = False) -> RelayReport:
        newest = self._newest
        return RelayReport(
            version=self.version, source_version=None if newest is None else newest.record.v,
            versions=counts.versions, skipped=counts.skipped, segments=counts.segments, objects=counts.objects,
            bytes=counts.bytes, reused_objects=counts.reused_objects, trimmed_segments=counts.trimmed_segments,
            trimmed_bytes=counts.trimmed_bytes, delay_s=counts.delay_s,
            staleness_s=0.0 if is_level else self.staleness_s, problem=problem,
        )  # fmt: skip
