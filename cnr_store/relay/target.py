"""The target of a relay: its marker, records, hint and notes. Creates positions; deletes nothing."""

from __future__ import annotations

import random
import time

from cnr_store.errors import CorruptRecord, CorruptStore, StorageFailure, StoreExists
from cnr_store.format import arrays, layout
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.documents import canonical_json, decode_document, sha256
from cnr_store.format.identity import decode_identity, decode_relay_marker
from cnr_store.format.limits import MAX_LISTS_BYTES, MAX_RECORD_BYTES, MAX_SMALL_BYTES
from cnr_store.format.records import Hint, RelayMarker, RelayTrims
from cnr_store.log.author import LIBRARY
from cnr_store.log.log_reader import LogReader, position_bytes
from cnr_store.relay.mirroring import RawRecord
from cnr_store.storage import CreateOutcome, Storage
from cnr_store.store import Store

_CREATE_ATTEMPTS = 6
_FIRST_PAUSE_S = 0.05


class RelayTarget:
    """Reads and creates the objects of a relay at its target. All relays of one log create the same bytes.

    Calls block and raise the errors of the log and the storage.

    Attributes
    ----------
    first
        The first version of the relay; 0 before it is created, because no relay has version 0.
    head
        The relay's newest record; None if it has none.
    """

    def __init__(self, storage: Storage, source: Store) -> None:
        self.storage = storage
        self.log = LogReader(storage, source.uuid)
        self.first = 0
        self.head: LogEntry | None = None
        self._source = source

    def has_begun(self, identity: bytes) -> bool:
        """Return whether the target has the ``cnr.json`` of the source, so that it can be opened. One or two GETs.

        Raises
        ------
        StoreExists
            The target has a store, or a relay of another log.
        CorruptStore, StorageFailure
        """
        found = self.storage.read_document(layout.IDENTITY, MAX_SMALL_BYTES)
        marker = self.read_marker()
        if found is not None and (marker is None or found != identity):
            decode_identity(found, f"{self.storage.url}/{layout.IDENTITY}")  # raises if the reply was cut off
            raise StoreExists(
                f"{self.storage.url} contains a store that is not a relay of {self._source.url}; give an empty place",
                path=self.storage.url,
            )
        self.first = 0 if marker is None else marker.first
        return found is not None

    def read_marker(self) -> RelayMarker | None:
        """Return the relay marker of the target; None if it has none. One GET."""
        data = self.storage.read_document(layout.RELAY, MAX_SMALL_BYTES)
        if data is None:
            return None
        marker = decode_relay_marker(data, self._source.uuid, f"{self.storage.url}/{layout.RELAY}")
        branch = self._source.internals.branch_uuid
        if marker.branch != branch:
            raise StoreExists(
                f"{self.storage.url} is a relay of another log of the store (branch {marker.branch or 'none'!r}); give "
                "an empty place",
                path=self.storage.url, expected=branch, found=marker.branch,
            )  # fmt: skip
        return marker

    def create_marker(self, first: int, now_ms: int) -> None:
        """Create a relay at version ``first``, or use the one that another process has created meanwhile."""
        if self.storage.is_exclusive:
            self.storage.probe()
        marker = RelayMarker(
            store_uuid=self._source.uuid, branch=self._source.internals.branch_uuid, first=first,
            source=self._source.url, library=LIBRARY, created_ms=now_ms,
        )  # fmt: skip
        if self.storage.create(layout.RELAY, canonical_json(marker)) is not CreateOutcome.CREATED:
            found = self.read_marker()  # written by another relay, or by this one
            if found is None:
                raise StorageFailure(f"{self.storage.url} did not take {layout.RELAY}; try again", path=layout.RELAY)
            marker = found
        self.first = marker.first

    def put_root(self, root: bytes | None, identity: bytes) -> None:
        """Write the Zarr groups, then create ``cnr.json``. Before that the target cannot be opened."""
        if root is not None:
            self.storage.put(layout.ROOT_GROUP, root)
            self.storage.put(layout.DATA_GROUP, arrays.group_document({}))
            self.storage.sync_folders([layout.ROOT_GROUP, layout.DATA_GROUP])
        self._create(layout.IDENTITY, identity)

    def find_head(self) -> LogEntry:
        """Return the last record before the first gap. An exponential search could skip a gap that is being filled.

        The hint is written after a gap is filled. So the search starts there, with one GET per position.
        """
        version = self.first
        try:
            data = self.storage.read_document(layout.hint_key(), MAX_SMALL_BYTES)
            hint = 0 if data is None else decode_document(data, Hint, layout.hint_key()).version
        except CorruptStore:
            hint = 0
        if hint > version and self.is_occupied(hint):
            version = hint
        if not self.is_occupied(version):
            raise CorruptStore(
                f"position {version} of the relay {self.storage.url}, its first one, is empty: part of it was deleted; "
                "start a new relay in an empty place",
                version=version, path=layout.commit_key(version),
            )  # fmt: skip
        while self.is_occupied(version + 1):
            version += 1
        self.head = self.log.read(version)
        assert self.head is not None
        return self.head

    def is_occupied(self, version: int) -> bool:
        """Return whether a position has an object. A small GET."""
        return version <= 10**18 and self.storage.read(layout.commit_key(version), stop=1) is not None

    def read_record(self, version: int) -> LogEntry | None:
        """Return the record at a position; None if it is empty or was superseded. One GET."""
        try:
            return self.log.read(version)
        except CorruptRecord:
            return None

    def create_position(self, raw: RawRecord) -> None:
        """Create a position with the bytes of the source; the next record has their digest.

        Raises
        ------
        CorruptStore
            The position exists with other bytes.
        StorageFailure
        """
        key = layout.commit_key(raw.version)
        if len(raw.data) <= MAX_RECORD_BYTES:
            self._create(key, raw.data)
            return
        # Torn, superseded, and too long for an exclusive create. Every relay writes the same bytes, so order is free.
        found = position_bytes(self.storage, raw.version)
        if found is not None and found != raw.data:
            raise self._other_bytes(key, raw.data, found)
        self.storage.put(key, raw.data)
        self.storage.sync_folders([key])

    def set_head(self, entry: LogEntry) -> None:
        """Make an entry, whose position exists, the newest one, and write the hint. One PUT."""
        self.head = entry
        self.storage.put(layout.hint_key(), canonical_json(Hint(entry.record.v)))

    def read_notes(self) -> RelayTrims:
        """Return the notes about kept versions and segments that are pending delete. One GET."""
        data = self.storage.read_document(layout.RELAY_TRIMS, MAX_LISTS_BYTES)
        if data is None:
            return RelayTrims()
        return decode_document(data, RelayTrims, f"{self.storage.url}/{layout.RELAY_TRIMS}")

    def put_notes(self, notes: RelayTrims) -> None:
        """Write the notes; durable when this returns."""
        self.storage.put_document(layout.RELAY_TRIMS, canonical_json(notes), MAX_LISTS_BYTES)
        self.storage.sync_folders([layout.RELAY_TRIMS])

    def _create(self, key: str, data: bytes) -> None:
        """Create an object; succeed if another relay of this log created it with the same bytes."""
        pause_s, found = _FIRST_PAUSE_S, None
        for attempt in range(_CREATE_ATTEMPTS):
            if attempt:
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s *= 2
            try:
                if self.storage.create(key, data) is CreateOutcome.CREATED:
                    return
            except StorageFailure:
                if attempt == _CREATE_ATTEMPTS - 1:
                    raise
            found = self.storage.read(key, stop=len(data) + 1)
            if found == data:
                return
        if found is None:
            raise StorageFailure(f"{self.storage.url} did not take {key}; try again", path=key)
        raise self._other_bytes(key, data, found)

    def _other_bytes(self, key: str, expected: bytes, found: bytes) -> CorruptStore:
        return CorruptStore(
            f"{key} at the relay {self.storage.url} has other bytes than at its source: two stores were mixed, or it "
            "was altered; start a new relay in an empty place",
            path=key, expected=sha256(expected), found=sha256(found),
        )  # fmt: skip
