"""The newer end of a commit log as a consumer knows it: what it saw last, and how it came there. Decides nothing."""

from __future__ import annotations

import time

from cnr_store.errors import CnrStoreError, CorruptRecord, VersionNotFound
from cnr_store.format.commit_record import LogEntry
from cnr_store.store import Store

LONGEST_PATH = 256
"""Records that are remembered, for what they tell of the way from one version to another."""


class LogTail:
    """Reads a store's log forward from its newest record. Not safe for several threads.

    Attributes
    ----------
    seen
        The newest record that is known.
    path
        Records that were seen one after another, oldest first; `forget` shortens it.
    is_unreachable
        Whether the last look could not learn which record is the newest.
    checked_s
        When that was learned last, by the monotonic clock.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.path: list[LogEntry] = []
        self.is_unreachable = False
        self.checked_s = time.monotonic()
        self.seen = self.read_newest()[0]

    def read_news(self, most: int) -> tuple[list[LogEntry], Exception | None]:
        """Return the records behind the newest that is known, at most ``most``, and why no more could be read.

        One request, and one more for each record. What comes back is not seen yet: call `see` for each.
        """
        news: list[LogEntry] = []
        self.is_unreachable = True
        try:
            while len(news) < most:
                entry = self._store.poll(news[-1] if news else self.seen)
                if entry is None:
                    break
                news.append(entry)
        except (CnrStoreError, OSError) as error:
            return news, error
        self.is_unreachable = False
        self.checked_s = time.monotonic()
        return news, None

    def read_newest(self) -> tuple[LogEntry, CorruptRecord | None]:
        """Return the newest record that can be read, and what is wrong with one behind it; a few GETs.

        A torn newest record is nobody's acknowledged state (spec, section 7).

        Raises
        ------
        CorruptStore, StorageFailure
        """
        return self._store.internals.log.newest_readable()

    def see(self, entry: LogEntry) -> bool:
        """Take a record as the newest that is known; returns whether it is newer than what was."""
        if entry.record.v <= self.seen.record.v:
            return False
        self.seen = entry
        self.path = [*self.path[-LONGEST_PATH:], entry]
        return True

    def forget(self, version: int) -> None:
        """Forget the way up to a version."""
        self.path = [entry for entry in self.path if entry.record.v > version]

    def entry(self, version: int) -> LogEntry:
        """Return the record of a version; one GET if it is none of those remembered.

        Raises
        ------
        VersionNotFound, CorruptStore, StorageFailure
        """
        for known in (self.seen, *self.path):
            if known.record.v == version:
                return known
        found = self._store.internals.log.read(version)
        if found is None:
            raise VersionNotFound(f"{self._store.url} has no version {version}", version=version)
        return found
