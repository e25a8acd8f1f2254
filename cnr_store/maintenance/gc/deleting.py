"""Delete the objects of given segments, one listing per segment; find side objects that no log needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from cnr_store.errors import AccessDenied, CorruptStore, StorageFailure, VersionNotFound
from cnr_store.format.layout import branch_prefix, segment_prefix
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.side_objects import find_unneeded
from cnr_store.maintenance.gc.logs import LogVersions
from cnr_store.maintenance.gc.report import ProgressCallback, SegmentReport
from cnr_store.storage import ObjectStat, Storage

logger = logging.getLogger(__name__)


class Deletion:
    """Deletes segments and counts what it deleted.

    Attributes
    ----------
    deleted
        Names of the deleted segments.
    objects, size_bytes
        Number and size of the deleted objects.
    failures
        Error messages of failed deletions; the next run retries them.
    was_stopped
        Whether the deadline passed before the last segment.
    """

    def __init__(self, storage: Storage) -> None:
        self.deleted: set[str] = set()
        self.objects = 0
        self.size_bytes = 0
        self.failures: list[str] = []
        self.was_stopped = False
        self._storage = storage

    def run(
        self,
        due: Sequence[str],
        reports: dict[str, SegmentReport],
        is_late: Callable[[], bool],
        progress: ProgressCallback | None,
    ) -> None:
        """Delete every object listed below each segment, and update its entry in ``reports``.

        Raises
        ------
        AccessDenied
            Ends the run: further deletions would fail, too. Any other storage failure is collected in `failures`.
        """
        for done, name in enumerate(due):
            if is_late():
                self.was_stopped = True
                return
            report = reports.get(name) or SegmentReport(name, "due", "its grace period is over")
            try:
                size_bytes = self._delete(name)
            except AccessDenied:
                raise
            except StorageFailure as error:
                self.failures.append(error.message)
                reports[name] = replace(report, state="failed", reason=error.message)
            else:
                self.deleted.add(name)
                reports[name] = replace(report, state="deleted", size_bytes=size_bytes)
                logger.info("%s: deleted segment %s, %d bytes: %s", self._storage.url, name, size_bytes, report.reason)
            if progress is not None:
                progress("segments", done + 1, len(due))

    def _delete(self, name: str) -> int:
        found = list(self._storage.list_objects(segment_prefix(name)))
        self._storage.delete(stat.key for stat in found)
        size_bytes = sum(stat.size_bytes for stat in found)
        self.objects += len(found)
        self.size_bytes += size_bytes
        return size_bytes


def with_sizes(storage: Storage, segments: Iterable[SegmentReport]) -> tuple[SegmentReport, ...]:
    """Return the reports with the sizes of segments marked for deletion. Blocks: one listing for each."""

    def measured(segment: SegmentReport) -> SegmentReport:
        if segment.state not in ("due", "waiting") or segment.size_bytes is not None:
            return segment
        found = storage.list_objects(segment_prefix(segment.name))
        return replace(segment, size_bytes=sum(stat.size_bytes for stat in found))

    return tuple(measured(segment) for segment in segments)


def unneeded_lists(
    storage: Storage, main: CommitLog, logs: Sequence[LogVersions], *, older_than_ms: int, now_ms: int | None = None
) -> Iterator[ObjectStat]:
    """Yield the side objects that no log needs, including those of branches that were dropped earlier.

    Parameters
    ----------
    main, logs
        The store's own log, and all logs as they were read, the store's own first.
    now_ms
        Passed to `find_unneeded`.

    Raises
    ------
    StorageFailure
    """
    newest = {log.branch: log.head.v for log in logs if not log.is_closed}
    named = (
        names for log in logs if not log.is_closed for names in (log.entry.side_objects, *log.side_objects.values())
    )
    needed = {name for names in named for name in names}
    pins = logs[0].head.pins
    ended = {log.branch for log in logs if log.is_closed and log.branch not in pins}

    @cache
    def has_ended(branch: str) -> bool:
        if branch in ended or branch in pins:
            return branch in ended  # A branch with a pin: its log was not read, or this run closes it.
        try:
            return main.below(branch_prefix(branch)).latest().record.kind == "close"
        except (CorruptStore, VersionNotFound):
            return False  # The fork is unfinished or its log is lost: keep its side objects.

    def is_left(branch: str, version: int) -> bool:
        return version <= newest[branch] if branch in newest else has_ended(branch)

    return find_unneeded(storage, needed, age_ms=older_than_ms, is_left=is_left, now_ms=now_ms)
