"""Read what the logs of a store keep alive: one record per live version, and one place that says what it refers to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from cnr_store.errors import CorruptRecord, CorruptStore
from cnr_store.format.commit_record import LogEntry, decode_record, is_live, parent_of
from cnr_store.format.layout import commit_key
from cnr_store.format.records import ChainEntry, CommitRecord
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.log_reader import position_bytes
from cnr_store.log.retention import LiveVersion
from cnr_store.runtime.threads import Workers
from cnr_store.storage import Storage

BATCH = 256
"""Records read at once, so that memory does not grow with their bytes."""


@dataclass(frozen=True, slots=True)
class LogVersions:
    """One log as a collection sees it.

    Attributes
    ----------
    branch, name
        Uuid and name of the branch; both empty for the store's own log.
    entry
        The newest record.
    versions
        What is live, ascending; of a closed log, what was live before.
    is_closed
        Whether the branch has ended, or is about to, so that nothing of it stays.
    unreadable
        Live versions whose records are damaged, where the caller gives them up.
    side_objects
        By version: the sha256 of those that its record names. Those of the newest record are in `entry`.
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
    """Return every segment that these versions need: those of their chains, and there is no other reference. Pure.

    Dense tensors lie in their record's own chain or are looked for there, and a chain is complete in one record
    (spec, sections 3.3 and 4.6). Whatever else comes to refer to a segment has to be counted here.
    """
    chains = {version.chain for version in versions}
    return {segment for chain in chains for segment in chain}


class SegmentNames:
    """Shares the names and chains of many records, and keeps the sizes that chains state."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._chains: dict[tuple[str, ...], tuple[str, ...]] = {}

    def chain_of(self, entries: Iterable[ChainEntry]) -> tuple[str, ...]:
        """Return the names of a chain, the same object for the same chain."""
        chain = []
        for entry in entries:
            name = self._names.setdefault(entry.seg, entry.seg)
            self.sizes.setdefault(name, entry.bytes)
            chain.append(name)
        key = tuple(chain)
        return self._chains.setdefault(key, key)


@dataclass(frozen=True, slots=True)
class _KnownRecord:
    """What is remembered of one record, so that a second look at the log reads only what is new."""

    state: LiveVersion
    digest: str
    follows: tuple[int, str]
    side_objects: tuple[str, ...]


class LogScan:
    """Reads one log, again and again; records that it knows are not read twice.

    ``despite_damage``: a live version whose record cannot be read is given up, and nothing else about it is known.
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
        """Return the log as it is now: the head by a few GETs, and one GET per live version that is new.

        Nothing of a closed log is needed: if it is damaged its view just has no versions to give up.

        Raises
        ------
        CorruptRecord
            The record of a live version is damaged, or the digest chain breaks: what the store needs is not known.
        CorruptStore
            A position is empty.
        StorageFailure
        """
        entry = self.log.latest()
        self._known[entry.record.v] = self._remember(entry)
        is_closed = entry.record.kind == "close"
        # Of a branch that has ended nothing is live; what was, is what it gives up.
        head = msgspec.structs.replace(entry.record, kind="fence") if is_closed else entry.record
        below = sorted({version for version in _named_below(head) if is_live(head, version)})
        unreadable: list[int] = []
        try:
            versions = [
                *self._states(below, unreadable, progress),
                *self._walk(head, entry.digest, unreadable, progress),
            ]
        except CorruptStore:
            if not is_closed:
                raise
            versions = []  # Its segments go as those that nobody names.
        side_objects = {version.version: self._known[version.version].side_objects for version in versions}
        return LogVersions(branch, name, entry, tuple(versions), is_closed, tuple(sorted(unreadable)), side_objects)

    def states(self, versions: Iterable[int]) -> list[LiveVersion]:
        """Return what single versions need, live or not; positions that hold none are left out."""
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
        """From the head down to the floor, each record vouched for by the one behind it.

        One that is damaged vouches for none, and is passed where its version is not live or is given up.
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
                    known = self._vouched(position, fetched, digest)
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

    def _vouched(self, position: int, fetched: dict[int, bytes | None], digest: str | None) -> _KnownRecord:
        """A record, if it is the one that the record behind it names; ``digest`` is None where that one is damaged."""
        known = self._known.get(position) or self._decode(position, fetched[position])
        if digest is not None and known.digest != digest:
            raise CorruptRecord(
                f"commit record {position} is not the one that the record behind it was written behind; run "
                "`cnr verify`, and collect no garbage before it is put right, or give the version up with "
                "despite_damage=True",
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
                    return None  # Superseded: nobody holds what is no version.
                self._known[version] = self._remember(standing)
        return self._known[version]

    def _decode(self, version: int, data: bytes | None) -> _KnownRecord:
        """Without its side objects: only the head's lists count."""
        if data is None:
            raise CorruptStore(
                f"log position {version} is empty although the log goes on behind it; restore it from a backup, or "
                "give the version up with despite_damage=True",
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
        state = LiveVersion(record.v, record.checkpoint, record.ts_ms, self._names.chain_of(record.chain))
        return _KnownRecord(state, entry.digest, parent_of(record), entry.side_objects)

    def _key(self, version: int) -> str:
        return commit_key(version, self.log.prefix)


def _named_below(head: CommitRecord) -> Iterator[int]:
    named = (*head.kept, *head.tags.values(), *head.channels.values(), *(pin.version for pin in head.pins.values()))
    return (version for version in named if version < head.floor)
