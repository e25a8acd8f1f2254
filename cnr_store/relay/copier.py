"""Copies versions in order: segments first, then side objects, then records from the newest downwards."""

from __future__ import annotations

from collections.abc import Callable

from cnr_store.errors import CorruptStore, MissingObject
from cnr_store.format import layout
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.documents import sha256
from cnr_store.format.limits import MAX_LISTS_BYTES
from cnr_store.format.records import ChainEntry, CommitRecord
from cnr_store.relay.copied_versions import CopiedVersions
from cnr_store.relay.mirroring import Descent, next_live, versions_of_channels
from cnr_store.relay.report import RelayReport
from cnr_store.relay.source import RelaySource
from cnr_store.relay.target import RelayTarget
from cnr_store.runtime.threads import Throttle
from cnr_store.segment.copying import copy_segment, has_segment
from cnr_store.storage import Storage


class Copier:
    """Copies from a source to a target. Blocks; runs on the source's threads. Raises the errors of both.

    Every method that copies adds its counts to the report that it gets.
    """

    def __init__(
        self,
        source: RelaySource,
        target: RelayTarget,
        copied: CopiedVersions,
        throttle: Throttle,
        clock_ms: Callable[[], int],
    ) -> None:
        self._source = source
        self._target = target
        self._copied = copied
        self._throttle = throttle
        self._clock_ms = clock_ms
        self._damaged: dict[str, CorruptStore] = {}

    def forget_damage(self) -> None:
        """Forget which segments were damaged at the source, so that this round tries them again."""
        self._damaged.clear()

    def copy_version(self, version: int, report: RelayReport) -> LogEntry:
        """Copy the first version from ``version`` on that is still available, and the records up to it; return it.

        Raises
        ------
        CorruptStore
            The source is damaged and has no newer version. Nothing of this version becomes visible.
        AccessDenied, StorageFailure
        """
        entry = self._copy_next_live(version, report)
        head = self._target.head
        bottom = self._target.first if head is None else head.record.v + 1
        self._copy_records(entry, bottom)
        report.skipped += entry.record.v - bottom
        report.versions += 1
        report.delay_s = (self._clock_ms() - entry.record.ts_ms) / 1000
        self._copied.remember(entry)
        return entry

    def mend(self, entry: LogEntry, report: RelayReport) -> None:
        """Copy what the target lacks of a version, and of those that its channels name. One GET per segment.

        From then on these versions are known to be copied: another relay may have done that.
        """
        if entry.record.kind == "close":
            return
        try:
            self._copy_segments(entry.record.chain, report)
        except MissingObject:
            if not self._source.is_gone(entry.record.v):
                raise
        self._copy_named(entry.record, report)

    def copy_segment(self, item: ChainEntry, report: RelayReport) -> None:
        """Copy one segment, even if the target has parts of it."""
        if item.seg in self._damaged:
            raise self._damaged[item.seg]
        try:
            copied = copy_segment(
                self._source.store.storage, self._target.storage, item, self._source.workers, self._throttle
            )
        except CorruptStore as error:
            self._damaged[item.seg] = error
            raise
        report.segments += 1
        report.objects += copied.objects
        report.size_bytes += copied.size_bytes
        report.reused_objects += copied.reused

    def _copy_next_live(self, version: int, report: RelayReport) -> LogEntry:
        """Copy the segments of the first live version from ``version`` on, and of the versions its channels name."""
        while True:
            newest = self._source.newest
            assert newest is not None
            version = next_live(newest.record, version)
            entry = newest if version >= newest.record.v else self._source.entry(version)
            try:
                if entry.record.state is not None:
                    raise MissingObject(f"the side objects of commit record {version} were collected", version=version)
                reused = self._copy_segments(entry.record.chain, report) if newest.record.kind != "close" else []
                reused += self._copy_named(entry.record, report)
            except CorruptStore as error:
                version = self._next_after_failure(entry.record.v, error, report)
                continue
            # Check again: another relay of this target may have deleted a segment that no version needed before.
            for item in reused:
                if not has_segment(self._target.storage, item):
                    self.copy_segment(item, report)
            return entry

    def _copy_named(self, record: CommitRecord, report: RelayReport) -> list[ChainEntry]:
        """Copy the segments of the unexpired versions that a record's channels name."""
        reused = []
        for named in versions_of_channels(record, self._target.first):
            try:
                if named not in self._copied:
                    self._copied.remember(self._source.entry(named))
                reused += self._copy_segments(self._copied.chain_of(named), report)
            except MissingObject:
                if not self._source.is_gone(named):
                    raise
        return reused

    def _next_after_failure(self, version: int, error: CorruptStore, report: RelayReport) -> int:
        """Return the version to continue with after an unavailable one; raise ``error`` if there is no newer one."""
        if not (isinstance(error, MissingObject) and self._source.is_gone(version)):
            newest = self._source.look()
            if version >= newest.record.v or any(item.seg in self._damaged for item in newest.record.chain):
                raise error
            # A repair or a new baseline has made the damaged segment unnecessary: skip it.
            report.problem = error.message
        if self._source.store.relay is None:
            return version + 1
        # A source that is a relay expires versions that its records list as live.
        assert self._source.newest is not None
        return self._source.newest.record.v

    def _copy_segments(self, chain: tuple[ChainEntry, ...], report: RelayReport) -> list[ChainEntry]:
        """Copy the missing segments of a chain; return those that an earlier round or another relay copied."""
        reused = []
        for item in (one for one in chain if one.seg not in self._copied.present):
            if has_segment(self._target.storage, item):
                reused.append(item)
            else:
                self.copy_segment(item, report)
            self._copied.present.add(item.seg)
        return reused

    def _copy_records(self, newest: LogEntry, bottom: int) -> None:
        """Create the positions from ``newest`` down to ``bottom``, after the side objects of ``newest``.

        In ascending order, a reader could find a record at the end of the log without its segments. In descending order
        a reader finds either the record before ``bottom`` or ``newest``. Only these two need their side objects.
        """
        head = self._target.head
        there = () if head is None else head.side_objects
        for digest in newest.side_objects:
            if digest not in there:
                copy_side_object(self._source.store.storage, self._target.storage, digest, self._throttle)
        descent = Descent(newest)
        for raw in self._source.records_down(newest.record.v, bottom, descent):
            if raw.version == bottom:
                descent.check_meets(head)
            self._target.create_position(raw)


def copy_side_object(source: Storage, target: Storage, digest: str, throttle: Throttle) -> None:
    """Copy the side object with this sha256. Durable when this returns.

    Raises
    ------
    MissingObject, CorruptStore
        The source is damaged.
    AccessDenied, StorageFailure
        A request to either failed.
    """
    key = layout.state_key(digest)
    data = source.read_document(key, MAX_LISTS_BYTES)
    if data is None:
        raise MissingObject(f"{key} is missing in {source.url}; run `cnr verify` there", path=key)
    if sha256(data) != digest:
        raise CorruptStore(f"{key} in {source.url} does not match its name; run `cnr verify` there", path=key)
    throttle.take(len(data))
    target.put(key, data)
    target.sync_folders([key])
