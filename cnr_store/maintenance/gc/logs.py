"""Read the live versions of a store's logs, and list the segments that a version references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from cnr_store.errors import CorruptRecord, CorruptStore
from cnr_store.format.commit_record import LogEntry, decode_record, is_live, named_versions, parent_of
from cnr_store.format.layout import commit_key
from cnr_store.format.notes import metrics_of
from cnr_store.format.records import ChainEntry, CommitRecord
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.log_reader import position_bytes
from cnr_store.log.retention import LiveVersion
from cnr_store.runtime.threads import Workers
from cnr_store.storage import Storage

BATCH = 256
"""Number of records in one batch of reads; it bounds the memory for their bytes."""


@dataclass(frozen=True, slots=True)
class LogVersions:
    """One log, as a collection read it.

    Attributes
    ----------
    branch, name
        Uuid and name of the branch; both empty for the store's own log.
    entry
        The newest record.
    versions
        The live versions, ascending. For a closed log: those that were live before it was closed.
    is_closed
        Whether the branch is closed, or this run closes it. No version of a closed log is kept.
    unreadable
        Live versions whose records are damaged. Empty unless the caller passed ``despite_damage``.
    side_objects
        Version to the sha256 of each side object that its record names. Those of the newest record are in `entry`.
    """

    branch: str
    name: str
    entry: LogEntry
    versions: tuple[LiveVersion, ...]
    is_closed: bool = False
    unreadable: tuple[int, ...] = ()
    side_objects: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def head(self) -> CommitRecord:
        """The newest record."""
        return self.entry.record


def referenced_segments(versions: Iterable[LiveVersion]) -> set[str]:
    """Return every segment in the chains of these versions. Pure.

    A chain is the only reference to a segment: dense tensors are in segments of their record's chain, and a record
    holds its whole chain (spec, sections 3.3 and 4.6). A new kind of reference has to be added here.
    """
    chains = {version.chain for version in versions}
    return {segment for chain in chains for segment in chain}


class SegmentNames:
    """Interns the segment names and chains of many records; keeps the sizes in bytes that chains record."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._chains: dict[tuple[str, ...], tuple[str, ...]] = {}

    def chain_of(self, entries: Iterable[ChainEntry]) -> tuple[str, ...]:
        """Return the segment names of a chain; equal chains share one tuple."""
        chain = []
        for entry in entries:
            name = self._names.setdefault(entry.seg, entry.seg)
            self.sizes.setdefault(name, entry.size_bytes)
            chain.append(name)
        key = tuple(chain)
        return self._chains.setdefault(key, key)


@dataclass(frozen=True, slots=True)
class _KnownRecord:
    """The cached fields of one record, so that reading the log again fetches only new records."""

    state: LiveVersion
    digest: str
    follows: tuple[int, str]
    side_objects: tuple[str, ...]


class LogScan:
    """Reads one log repeatedly, and each record once.

    With ``despite_damage`` a live version with an unreadable record is listed in `LogVersions.unreadable`.
    """

    def __init__(
        self,
        storage: Storage,
        log: CommitLog,
        store_uuid: str,
        names: SegmentNames,
        workers: Workers,
        *,
        despite_damage: bool = False,
    ) -> None:
        self.log = log
        self._despite_damage = despite_damage
        self._storage = storage
        self._store_uuid = store_uuid
        self._names = names
        self._workers = workers
        self._known: dict[int, _KnownRecord] = {}

    def read(self, branch: str, name: str, progress: Callable[[int], None]) -> LogVersions:
        """Return the current state of the log. Blocks: a few GETs, and one for each new live version.

        A damaged closed log has no versions in the result: none of them has to be kept.

        Raises
        ------
        CorruptRecord
            The record of a live version is damaged, or the digest chain breaks: the needed segments are unknown.
        CorruptStore
            A position is empty.
        StorageFailure
        """
        entry = self.log.latest()
        self._known[entry.record.v] = self._remember(entry)
        is_closed = entry.record.kind == "close"
        # A closed branch has no live versions. Those that were live before are the ones whose segments are freed.
        head = msgspec.structs.replace(entry.record, kind="fence") if is_closed else entry.record
        named = named_versions(head).union(head.kept)
        below = sorted(version for version in named if version < head.floor and is_live(head, version))
        unreadable: list[int] = []
        try:
            versions = [
                *self._states(below, unreadable, progress),
                *self._walk(head, entry.digest, unreadable, progress),
            ]
        except CorruptStore:
            if not is_closed:
                raise
            versions = []  # Its segments are deleted as orphans.
        side_objects = {version.version: self._known[version.version].side_objects for version in versions}
        return LogVersions(branch, name, entry, tuple(versions), is_closed, tuple(sorted(unreadable)), side_objects)

    def states(self, versions: Iterable[int]) -> list[LiveVersion]:
        """Return the chains of given versions, live or not. Positions without a version are left out."""
        return [known.state for version in versions if (known := self._known_or_read(version)) is not None]

    def _states(
        self, versions: list[int], unreadable: list[int], progress: Callable[[int], None]
    ) -> Iterator[LiveVersion]:
        for start in range(0, len(versions), BATCH):
            batch = versions[start : start + BATCH]
            fetched = self._fetch(batch)
            for version in batch:
                try:
                    self._known[version] = self._known.get(version) or self._decode(version, fetched[version])
                except CorruptStore:
                    if not self._despite_damage:
                        raise
                    unreadable.append(version)
                else:
                    yield self._known[version].state
            progress(len(batch))

    def _walk(
        self, head: CommitRecord, digest: str | None, unreadable: list[int], progress: Callable[[int], None]
    ) -> list[LiveVersion]:
        """Return the live versions from the head down to the floor, ascending.

        Each record is checked against the digest that its successor names. A damaged one is skipped if its version is
        not live, or with ``despite_damage``; its predecessor is then not checked.
        """
        found = []
        version = head.v
        for stop in range(head.v, head.floor - 1, -BATCH):
            batch = range(stop, max(stop - BATCH, head.floor - 1), -1)
            fetched = self._fetch(batch)
            for position in batch:
                if position > version:
                    continue  # A torn position that a later record has superseded.
                try:
                    known = self._checked(position, fetched, digest)
                except CorruptStore:
                    if is_live(head, position):
                        if not self._despite_damage:
                            raise
                        unreadable.append(position)
                    version, digest = position - 1, None
                    continue
                self._known[position] = known
                version, digest = known.follows
                if is_live(head, position):
                    found.append(known.state)
            progress(len(batch))
        return found[::-1]

    def _checked(self, position: int, fetched: dict[int, bytes | None], digest: str | None) -> _KnownRecord:
        """Return the record, checked against the digest that its successor names; None skips the check."""
        known = self._known.get(position) or self._decode(position, fetched[position])
        if digest is not None and known.digest != digest:
            raise CorruptRecord(
                f"commit record {position} has digest {known.digest}, but its successor names {digest}; run "
                "`cnr verify` and repair the log before collecting garbage, or expire the version: "
                "collect with despite_damage=True (`cnr gc --despite-damage`)",
                version=position, path=self._key(position), expected=digest, found=known.digest,
            )  # fmt: skip
        return known

    def _fetch(self, versions: Iterable[int]) -> dict[int, bytes | None]:
        wanted = [version for version in versions if version not in self._known]
        bodies = self._workers.run(
            partial(position_bytes, self._storage, version, self.log.prefix) for version in wanted
        )
        return dict(zip(wanted, bodies, strict=True))

    def _known_or_read(self, version: int) -> _KnownRecord | None:
        if version not in self._known:
            data = position_bytes(self._storage, version, self.log.prefix) if version >= 0 else None
            if data is None:
                return None
            try:
                self._known[version] = self._decode(version, data)
            except CorruptStore:
                if self._despite_damage:
                    return None
                standing = self.log.read_standing(version)
                if standing is None or standing.record.v != version:
                    return None  # A later record superseded it, so it is no version that can be leased.
                self._known[version] = self._remember(standing)
        return self._known[version]

    def _decode(self, version: int, data: bytes | None) -> _KnownRecord:
        """Return the record at a position, without fetching its side objects: only the head's are needed."""
        if data is None:
            raise CorruptStore(
                f"log position {version} is empty, but later positions exist; restore the record from a backup, or "
                "expire the version: collect with despite_damage=True (`cnr gc --despite-damage`)",
                version=version, path=self._key(version),
            )  # fmt: skip
        entry = decode_record(data, version)
        if entry.record.store_uuid != self._store_uuid:
            raise CorruptStore(
                f"commit record {version} belongs to store {entry.record.store_uuid}, this one is {self._store_uuid}",
                version=version, path=self._key(version),
            )  # fmt: skip
        return self._remember(entry)

    def _remember(self, entry: LogEntry) -> _KnownRecord:
        record = entry.record
        chain = self._names.chain_of(record.chain)
        state = LiveVersion(record.v, record.checkpoint, record.ts_ms, chain, metrics_of(record))
        return _KnownRecord(state, entry.digest, parent_of(record), entry.side_objects)

    def _key(self, version: int) -> str:
        return commit_key(version, self.log.prefix)
