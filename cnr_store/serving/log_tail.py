"""The newest records of a log that a loader has read. Decides nothing."""

from __future__ import annotations

import time

from cnr_store.errors import CnrStoreError
from cnr_store.format.commit_record import LogEntry
from cnr_store.store import Store

LONGEST_PATH = 256
"""Maximum number of remembered records; they are used to plan an update from one version to another."""


class LogTail:
    """Reads a store's log forward from its newest record. Not safe for several threads.

    Attributes
    ----------
    seen
        The newest known record.
    path
        Records that were read one after another, oldest first; `forget` shortens it.
    is_unreachable
        Whether the last poll could not find the newest record.
    checked_s
        When the newest record was last found, by the monotonic clock.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.path: list[LogEntry] = []
        self.is_unreachable = False
        self.checked_s = time.monotonic()
        self.seen = store.internals.log.newest_readable()[0]

    def read_news(self, most: int) -> tuple[list[LogEntry], Exception | None]:
        """Return at most ``most`` records after the newest known one, and the error that ended the read.

        One request, and one more per record. Call `see` for each returned record.
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

    def see(self, entry: LogEntry) -> bool:
        """Record the newest known record; return whether it is newer than the last one."""
        if entry.record.v <= self.seen.record.v:
            return False
        self.seen = entry
        self.path = [*self.path[-LONGEST_PATH:], entry]
        return True

    def forget(self, version: int) -> None:
        """Forget the records up to a version."""
        self.path = [entry for entry in self.path if entry.record.v > version]

    def entry(self, version: int) -> LogEntry:
        """Return the record of a version; one GET if it is not remembered.

        Raises
        ------
        VersionNotFound, CorruptStore, StorageFailure
        VersionExpired
            The store is a relay that begins after it.
        """
        for known in (self.seen, *self.path):
            if known.record.v == version:
                return known
        return self._store.internals.entry(version, newest=self.seen.record)
