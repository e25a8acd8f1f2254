"""Find the version at a time: the last one whose record is not later (spec, CNR-LOG-22).

Times increase from record to record, so a binary search finds the version. The exception: a wrong clock stamped a
record ahead, and a later repair corrected the time. So the time of a version is defined as the minimum over its own
record and all later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cnr_store.format.commit_record import LogEntry


def newest_at(
    time_ms: int,
    head: LogEntry,
    first: int,
    read: Callable[[int], LogEntry],
    walk: Callable[[LogEntry], Iterable[LogEntry]],
) -> LogEntry | None:
    """Return the last version whose time is at or before ``time_ms``; None if there is none.

    Parameters
    ----------
    head, first
        The newest record of the log, and the log's first position.
    read
        Returns the record at a position, or the one that superseded it. Called O(log distance) times.
    walk
        Yields a record and all before it, newest first. Used only if a record has a later time than the newest.
    """
    low, high, found = first, head.record.v, None
    while low <= high:
        middle = (low + high) // 2
        entry = head if middle == head.record.v else read(middle)
        if entry.record.ts_ms > head.record.ts_ms:
            return _newest_by_walk(time_ms, walk(head))
        if entry.record.ts_ms <= time_ms:
            low, found = entry.record.v + 1, entry
        else:
            high = middle - 1
    return found


def _newest_by_walk(time_ms: int, newest_first: Iterable[LogEntry]) -> LogEntry | None:
    least: int | None = None
    for entry in newest_first:
        least = entry.record.ts_ms if least is None else min(least, entry.record.ts_ms)
        if least <= time_ms:
            return entry
    return None
