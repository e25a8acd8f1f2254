"""Find a version by number, step, tag, channel or time; open its snapshot; lease it for a reader."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from functools import partial

from cnr_store.errors import BadInput, ChannelNotFound, TagNotFound, VersionNotFound
from cnr_store.format.commit_record import DATA_KINDS, LogEntry, is_live
from cnr_store.format.notes import metrics_of
from cnr_store.format.records import CommitRecord, Cursor
from cnr_store.log.at_time import newest_at
from cnr_store.log.author import writer_info
from cnr_store.log.clock import ms_of, text_of
from cnr_store.log.leases import Lease, put_cursor, take_lease
from cnr_store.log.retention import KeepBest
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.arguments import checked_count, checked_text
from cnr_store.segment.chunk_cache import ChunkCache
from cnr_store.store.internals import StoreInternals


class Versions:
    """The versions of one log: finds, opens and leases them. A ``head`` argument decides what is live.

    Calls block, and raise what `Store.snapshot` raises.
    """

    def __init__(self, internals: StoreInternals) -> None:
        self._internals = internals

    def find(
        self,
        head: LogEntry,
        *,
        version: int | None = None,
        step: int | None = None,
        tag: str | None = None,
        channel: str | None = None,
        time: dt.datetime | None = None,
    ) -> LogEntry:
        """Return the requested entry, the head if nothing is requested; see `Store.snapshot`."""
        given = [value for value in (version, step, tag, channel, time) if value is not None]
        if len(given) > 1:
            raise BadInput("give at most one of version, step, tag, channel and time", found=len(given))
        if step is not None:
            return self.by_step(head, step)
        if time is not None:
            return self.by_time(head, ms_of(time))
        if tag is not None:
            version = version_of_tag(head.record, tag)
        if channel is not None:
            version = version_of_channel(head.record, channel)
        return self.by_number(head, version)

    def by_number(self, head: LogEntry, version: int | None) -> LogEntry:
        """Return the entry of a version, the head if None. One GET."""
        if version is None:
            return head
        version = checked_count("a version", version, least=None)
        if 0 <= version < head.record.v:
            self._internals.check_live(head.record, version)  # before the GET: its record may be damaged
        return head if version == head.record.v else self._internals.entry(version, newest=head.record)

    def best(self, head: CommitRecord, rule: KeepBest) -> int:
        """Return the live version with the best value of a metric."""
        newest = self._internals.entry(head.v)
        records = (entry.record for entry in self._walk(newest))
        versions = [(record.v, metrics_of(record)) for record in records if is_live(head, record.v)]
        found = rule.chosen(versions)
        if not found:
            there_are = sorted({name for _, metrics in versions for name in metrics})
            raise VersionNotFound(
                f"no version of {self._internals.place} has the metric {rule.metric!r}; the metrics are {there_are}",
                found=rule.metric,
            )
        return found[0]

    def by_step(self, head: LogEntry, step: int) -> LogEntry:
        """Return the newest live version of the newest checkpoint with this step, else its newest version."""
        step = checked_count("a step", step, least=None)
        newest: LogEntry | None = None
        others: set[int] = set()
        for entry in self._walk(head):
            record = entry.record
            if not _has_state(record):
                continue
            if record.step != step:
                if is_live(head.record, record.v):
                    others.add(record.step)
                continue
            newest = newest or entry
            if record.checkpoint == newest.record.checkpoint:
                if is_live(head.record, record.v):
                    return entry
                if record.kind in ("baseline", "delta"):
                    break
        if newest is None:
            relay = self._internals.relay
            since = "" if relay is None else f"; it is a relay that begins at version {relay.marker.first}"
            raise VersionNotFound(
                f"{self._internals.place} has no checkpoint of step {step}; {_nearest(others, step)}{since}", found=step
            )
        return newest

    def steps(self, head: LogEntry) -> list[int]:
        """Return the steps whose checkpoints are live, ascending. One GET per record of the log."""
        records = (entry.record for entry in self._walk(head))
        return sorted({one.step for one in records if _has_state(one) and is_live(head.record, one.v)})

    def _walk(self, newest: LogEntry) -> Iterator[LogEntry]:
        return self._internals.log.walk(newest, self._internals.read_workers)

    def by_time(self, head: LogEntry, time_ms: int) -> LogEntry:
        """Return the last version committed at or before a time in milliseconds since 1970."""
        log, relay = self._internals.log, self._internals.relay
        found = newest_at(time_ms, head, log.first, partial(self._internals.entry, or_superseding=True), log.walk)
        if found is None:
            if relay is not None and log.first > 0:
                raise relay.not_held(log.first - 1)
            raise VersionNotFound(
                f"{self._internals.place} has no version at or before {text_of(time_ms)}", found=time_ms
            )
        return found

    def live(self, head: LogEntry, version: int | None) -> LogEntry:
        """Return the entry of a version, the head if None, after opening its segments."""
        entry = self.by_number(head, version)
        self.open(head.record, entry)
        return entry

    def open(self, head: CommitRecord, entry: LogEntry, cache: ChunkCache | None = None) -> Snapshot:
        """Open the snapshot of an entry; raise if it is not live by the newest record."""
        internals, version = self._internals, entry.record.v
        internals.check_live(head, version)
        if_missing = partial(internals.tell_of_expiry, version)
        return Snapshot(internals.storage, entry, internals.read_workers, if_missing=if_missing, cache=cache)

    def lease(self, version: int | None, ttl_s: float) -> Lease:
        """See `Store.lease`."""
        internals = self._internals
        if version is not None:
            version = checked_count("a version", version, least=None)
        lease = take_lease(internals.storage, internals.log, version, ttl_s=ttl_s, holder=writer_info().host)
        try:
            internals.check_held(lease.version)
        except BaseException:
            lease.release()
            raise
        return lease

    def register_cursor(self, name: str, version: int, ttl_s: float | None) -> Cursor:
        """See `Store.register_cursor`."""
        internals = self._internals
        version = checked_count("a version", version, least=None)
        internals.check_held(version)
        return put_cursor(internals.storage, internals.log, name, version, ttl_s=ttl_s, holder=writer_info().host)


def version_of_tag(head: CommitRecord, name: str) -> int:
    """Return the version that a tag names. Pure."""
    if checked_text("a tag", name) not in head.tags:
        raise TagNotFound(f"no tag {name!r}; the tags are {sorted(head.tags)}", found=name)
    return head.tags[name]


def version_of_channel(head: CommitRecord, name: str) -> int:
    """Return the version that a channel points to. Pure."""
    if checked_text("a channel", name) not in head.channels:
        raise ChannelNotFound(f"no channel {name!r}; the channels are {sorted(head.channels)}", found=name)
    return head.channels[name]


def _nearest(steps: set[int], step: int) -> str:
    """Return a text of the steps just before and after one. Pure."""
    below = max((one for one in steps if one < step), default=None)
    above = min((one for one in steps if one > step), default=None)
    found = [str(one) for one in (below, above) if one is not None]
    return f"the nearest {'is' if len(found) == 1 else 'are'} {' and '.join(found)}" if found else "it has none at all"


def _has_state(record: CommitRecord) -> bool:
    """Return whether a record has a checkpoint: a save, the first state of a branch, or a compacted one."""
    return bool(record.chain) and (record.kind in DATA_KINDS or record.kind == "compact" or record.v == 0)
