"""The newest record that can be read: a torn last record is nobody's acknowledged state (spec, section 7.1)."""

from __future__ import annotations

from cnr_store.errors import CorruptRecord
from cnr_store.format.commit_record import LogEntry
from cnr_store.log.commit_log import CommitLog


def newest_readable(log: CommitLog) -> tuple[LogEntry, CorruptRecord | None]:
    """Return the newest record of a log that can be read, and what is wrong with those behind it; a few GETs.

    Raises
    ------
    VersionNotFound, CorruptStore, UnknownFeature, StorageFailure
        As `CommitLog.latest` and `CommitLog.tail`.
    """
    try:
        return log.latest(), None
    except CorruptRecord:
        pass  # A reply may have been cut short on its way: ask once more before calling the record torn.
    try:
        return log.latest(), None
    except CorruptRecord as torn:
        return log.tail()[0], torn


def check_no_hole(log: CommitLog, after: LogEntry) -> None:
    """Refuse a log that goes on behind an empty position: who reads forward would wait there for ever. Some GETs.

    Raises
    ------
    CorruptStore
        A position between ``after`` and the newest record is empty: something deleted part of the log.
    VersionNotFound, StorageFailure
    """
    any(entry.record.v <= after.record.v for entry in log.walk(newest_readable(log)[0]))
