"""Reads the log that a relay copies. Never writes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from cnr_store.errors import CorruptRecord, CorruptStore, MissingObject
from cnr_store.format import layout
from cnr_store.format.commit_record import LogEntry, decode_record, is_live
from cnr_store.format.documents import decode_document, sha256
from cnr_store.format.identity import decode_identity
from cnr_store.format.limits import MAX_SMALL_BYTES
from cnr_store.log.log_reader import position_bytes
from cnr_store.relay.mirroring import Descent, RawRecord
from cnr_store.runtime.threads import blocks
from cnr_store.store import Store

BATCH = 64
"""Number of records that are read at once when many positions are copied; at most 4 MiB."""


class RelaySource:
    """Reads records of the source and caches the newest one. Calls block and raise the errors of the log.

    Attributes
    ----------
    newest
        The newest record that was read from the source; None before the first read.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.log = store.internals.log
        # Most of the time is waiting for the network; the objects of a delta are few and small.
        self.workers = store.internals.read_workers
        self.newest: LogEntry | None = None
        self._kept: dict[int, bytes] = {}

    def look(self) -> LogEntry:
        """Read the newest record. A few GETs."""
        self.newest = self.store.head()
        return self.newest

    def look_behind(self, seen: LogEntry) -> LogEntry:
        """Return the newest record, read if the cached one is older than ``seen``; if it is torn, return ``seen``.

        One GET if ``seen`` is the newest, as for a relay that keeps up; else a few.

        Raises
        ------
        CorruptRecord
            The newest record is torn, and ``seen`` no longer has the side objects that list live versions.
        CorruptStore, StorageFailure
        """
        if self.newest is None or self.newest.record.v < seen.record.v:
            try:
                self.newest = seen if seen.record.state is None and self._is_last(seen) else self.store.head()
            except CorruptRecord:
                if seen.record.state is not None:
                    raise
                self.newest = seen
        return self.newest

    def _is_last(self, seen: LogEntry) -> bool:
        """Look for a record after ``seen``, and read the bytes of ``seen`` meanwhile, which are copied next."""

        def is_last() -> bool:
            return self.log.poll(seen) is None

        def keep_bytes() -> bool:
            data = self._bytes_at(seen.record.v)
            # Of a read that was cut short nothing is kept: else every later round would find it damaged again.
            self._kept = {seen.record.v: data} if data is not None and sha256(data) == seen.digest else {}
            return True

        return all(self.workers.run([is_last, keep_bytes]))

    def _kept_or_read(self, version: int) -> bytes | None:
        return self._kept.get(version) or self._bytes_at(version)

    def entry(self, version: int) -> LogEntry:
        """Return the record of a version, or the one that superseded it. One GET."""
        entry = self.log.read_standing(version)
        if entry is None:
            raise self._hole(version)
        return entry

    def _hole(self, version: int) -> CorruptRecord:
        return CorruptRecord(
            f"log position {version} of {self.store.url} is empty, but later positions exist; run `cnr verify` there",
            version=version, path=self._key(version),
        )  # fmt: skip

    def is_gone(self, version: int) -> bool:
        """Return whether the source has deleted a version's data, by its newest record. A few GETs."""
        newest = self.look()
        if version == newest.record.v:
            return newest.record.kind == "close"
        return self.store.relay is not None or not is_live(newest.record, version)

    def records_down(self, top: int, bottom: int, descent: Descent) -> Iterator[RawRecord]:
        """Yield the checked bytes of the positions from ``top`` down to ``bottom``. One GET each, many in parallel."""
        for start, stop in blocks(top + 1 - bottom, BATCH):
            versions = range(top - start, top - stop, -1)
            found = self.workers.run(partial(self._kept_or_read, version) for version in versions)
            for version, data in zip(versions, found, strict=True):
                if data is None:
                    raise self._hole(version)
                yield descent.take(data)

    def check_history(self, head: LogEntry, target_url: str) -> None:
        """Raise if the source does not have the relay's newest record (rewritten or restored log). One GET."""
        version = head.record.v
        data = self._bytes_at(version)
        if data is None or sha256(data) != head.digest:
            raise CorruptStore(
                f"the source {self.store.url} has {'no' if data is None else 'another'} record at position "
                f"{version}, which the relay {target_url} has copied: its log was rewritten or restored from a "
                "backup; start a new relay in an empty place",
                version=version, path=self._key(version), expected=head.digest,
            )  # fmt: skip

    def read_identity(self) -> bytes:
        """Return the source's ``cnr.json``, checked against the digest in record 0 if that record exists."""
        storage, where = self.store.storage, f"{self.store.url}/{layout.IDENTITY}"
        data = storage.read_document(layout.IDENTITY, MAX_SMALL_BYTES)
        if data is None:
            raise MissingObject(f"{where} is missing; restore it from a backup", path=layout.IDENTITY)
        first = position_bytes(storage, 0)
        expected = None if first is None else decode_record(first, 0).record.parent_digest
        if decode_identity(data, where) != self.store.identity or expected not in (None, sha256(data)):
            raise CorruptStore(
                f"{where} is not the one that the store was created with; run `cnr verify` there",
                path=layout.IDENTITY, expected=expected, found=sha256(data),
            )  # fmt: skip
        return data

    def read_root(self) -> bytes | None:
        """Return the source's Zarr group document, if it has one. One GET."""
        root = self.store.storage.read_document(layout.ROOT_GROUP, MAX_SMALL_BYTES)
        if root is not None:
            decode_document(root, dict, f"{self.store.url}/{layout.ROOT_GROUP}")  # raises if the reply was cut off
        return root

    def _bytes_at(self, version: int) -> bytes | None:
        return position_bytes(self.store.storage, version, self.log.prefix)

    def _key(self, version: int) -> str:
        return layout.commit_key(version, self.log.prefix)
