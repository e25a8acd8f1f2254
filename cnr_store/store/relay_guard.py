"""What a store refuses because its root is a relay: a copy of the newer end of a log, to read from (spec, 7.11)."""

from __future__ import annotations

from collections.abc import Iterable

from cnr_store.errors import CnrStoreError, CorruptStore, MissingObject, ReadOnlyStore, VersionExpired
from cnr_store.format import layout
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.documents import sha256
from cnr_store.format.records import ChainEntry, RelayMarker
from cnr_store.log.log_reader import position_bytes
from cnr_store.storage import Storage


class RelayGuard:
    """Tells what a relay has not got, or not any more, from damage."""

    def __init__(self, storage: Storage, marker: RelayMarker) -> None:
        self.marker = marker
        self._storage = storage

    def read_only(self) -> ReadOnlyStore:
        """Return the error of whatever changes a store."""
        return ReadOnlyStore(
            f"{self._storage.url} is a relay, a copy of {self.marker.source} to read from; do this at the source",
            path=self._storage.url,
            found=self.marker.source,
        )

    def no_branches(self) -> ReadOnlyStore:
        """Return the error of whatever needs a branch of the source."""
        return ReadOnlyStore(
            f"{self._storage.url} is a relay of one log of {self.marker.source}, without its branches; open the branch "
            "there, or run a relay of it",
            path=self._storage.url,
        )

    def not_held(self, version: int) -> VersionExpired:
        """Return the error of a version that the relay is without."""
        return VersionExpired(
            f"the relay {self._storage.url} does not hold version {version} (any more); it copies {self.marker.source} "
            f"from version {self.marker.first} on and keeps the newest ones: take a newer one here, or this one at the "
            "source",
            version=version,
        )

    def check_same(self, seen: LogEntry) -> None:
        """Refuse a relay that was begun anew since ``seen`` was read there. One GET."""
        version = seen.record.v
        data = position_bytes(self._storage, version)
        if data is None or sha256(data) != seen.digest:
            raise CorruptStore(
                f"the relay {self._storage.url} has not got record {version} any more that was read there: it was "
                "begun anew; open it again",
                version=version, path=layout.commit_key(version), expected=seen.digest,
            )  # fmt: skip

    def has_segments(self, chain: Iterable[ChainEntry]) -> bool:
        """Return whether every segment of a chain is here. A small GET for each."""
        return all(self._has_segment(item.seg) for item in chain)

    def has_let_go(self, missing: MissingObject) -> bool:
        """Return whether the relay lacks the whole segment of a missing object, so that this is no damage. One GET."""
        segment = (missing.path or "").removeprefix(layout.DATA).partition("/")[0]
        try:
            return layout.is_segment_name(segment) and not self._has_segment(segment)
        except CnrStoreError:
            return False  # What is missing is the error to tell.

    def _has_segment(self, segment: str) -> bool:
        """Whether the segment is here: its manifest is put last, and deleted first."""
        return self._storage.read(layout.segment_key(segment, layout.MANIFEST), stop=1) is not None
