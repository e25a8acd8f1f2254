"""Checks and errors of a relay: a read-only copy of the newer end of a log (spec, section 7.11)."""

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
    """Distinguishes what a relay has not copied, or has deleted, from damage."""

    def __init__(self, storage: Storage, marker: RelayMarker) -> None:
        self.marker = marker
        self._storage = storage

    def read_only(self) -> ReadOnlyStore:
        """Return the error of an operation that changes a store."""
        return ReadOnlyStore(
            f"{self._storage.url} is a relay, a read-only copy of {self.marker.source}; do this at the source, "
            "or, if that is lost, in an independent store made of the relay: cnr promote RELAY TARGET",
            path=self._storage.url,
            found=self.marker.source,
        )

    def no_branches(self) -> ReadOnlyStore:
        """Return the error of an operation that needs a branch of the source."""
        return ReadOnlyStore(
            f"{self._storage.url} is a relay of one log of {self.marker.source}, without its branches; open the branch "
            "at the source, or run a relay of it",
            path=self._storage.url,
        )

    def not_held(self, version: int) -> VersionExpired:
        """Return the error of a version that the relay does not have."""
        return VersionExpired(
            f"the relay {self._storage.url} does not have version {version}, or has deleted it; it copies "
            f"{self.marker.source} from version {self.marker.first} on and keeps the newest ones: open a newer version "
            "here, or this one at the source",
            version=version,
        )

    def check_same(self, seen: LogEntry) -> None:
        """Raise `CorruptStore` if the relay was created again since ``seen`` was read there. One GET."""
        version = seen.record.v
        data = position_bytes(self._storage, version)
        if data is None or sha256(data) != seen.digest:
            raise CorruptStore(
                f"the relay {self._storage.url} no longer has record {version}, which was read there: it was created "
                "again; open it again",
                version=version, path=layout.commit_key(version), expected=seen.digest,
            )  # fmt: skip

    def has_segments(self, chain: Iterable[ChainEntry]) -> bool:
        """Return whether the relay has every segment of a chain. One small GET each."""
        return all(self._has_segment(item.seg) for item in chain)

    def has_let_go(self, missing: MissingObject) -> bool:
        """Return whether the relay lacks the whole segment of a missing object: no damage. One GET."""
        segment = (missing.path or "").removeprefix(layout.DATA).partition("/")[0]
        try:
            return layout.is_segment_name(segment) and not self._has_segment(segment)
        except CnrStoreError:
            return False  # The caller reports the missing object.

    def _has_segment(self, segment: str) -> bool:
        """Return whether the relay has a segment: its manifest is written last and deleted first."""
        return self._storage.read(layout.segment_key(segment, layout.MANIFEST), stop=1) is not None
