"""Makes an independent store of versions of another one: the same segments below new records (spec, section 7.12).

Position 0 comes first and names the source, so that the next run continues an interrupted copy. Then come all
segments, each object checked, then the records, then ``cnr.json``: before it nobody can open the copy. Nothing is
written to the source.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cnr_store.errors import (
    BadInput,
    Conflict,
    CorruptStore,
    MissingObject,
    StoreExists,
    VersionExpired,
    VersionNotFound,
)
from cnr_store.format import layout
from cnr_store.format.commit_record import LogEntry, check_writer_features, decode_record, is_live
from cnr_store.format.documents import canonical_json, sha256
from cnr_store.format.records import ChainEntry, CommitRecord, Identity
from cnr_store.log.author import writer_info
from cnr_store.log.clock import wall_ms
from cnr_store.log.commit_log import CommitLog, RetryPolicy
from cnr_store.log.log_reader import position_bytes
from cnr_store.log.rebase import draft_init
from cnr_store.runtime.notebook import ShownReport
from cnr_store.runtime.records import converter
from cnr_store.runtime.threads import Throttle
from cnr_store.segment.copying import copy_segment, has_segment
from cnr_store.storage import Storage, open_storage
from cnr_store.store import Store
from cnr_store.store.creation import new_identity, put_data_group, put_identity, put_root_group
from cnr_store.transfer.copy_plan import CopiedState, PlannedRecord, distinct_states, plan_records, record_times

CopyProgress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""

_NOTE = "copied_from"
"""The key of `_Origin` in ``user`` of position 0."""


@dataclass(slots=True)
class StoreCopyReport(ShownReport):
    """What a copy did. The numbers of objects are 0 if the copy was complete before.

    Attributes
    ----------
    store_uuid, version
        The new store's uuid, and its newest version.
    source_version
        The newest version of the source that was copied, or that has the state which was.
    states
        Number of states that the new store has.
    skipped
        Versions that expired while they were copied, or that a relay no longer has.
    segments, objects, size_bytes, reused_objects
        What was written; objects that an interrupted run had written.
    """

    store_uuid: str = ""
    version: int = 0
    source_version: int = 0
    states: int = 0
    skipped: int = 0
    segments: int = 0
    objects: int = 0
    size_bytes: int = 0
    reused_objects: int = 0


class _Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy is made of: the log, its newest version then, the chosen version (None: all), how it was chosen."""

    store_uuid: str
    branch: str
    url: str
    head: int
    version: int | None
    asked: str
    identity: Identity


_origin_of = converter(_Origin)


def copy_store(
    source: Store,
    target: str | os.PathLike[str] | Storage,
    *,
    all_versions: bool = False,
    version: int | None = None,
    step: int | None = None,
    tag: str | None = None,
    channel: str | None = None,
    bytes_per_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    fsync: bool = True,
    unsafe_single_writer: bool = False,
    progress: CopyProgress | None = None,
    retry: RetryPolicy | None = None,
) -> StoreCopyReport:
    """Make an independent, writable store with a new uuid of versions of ``source``. Blocks.

    The copied versions keep tables, slots, dense tensors and documents bit for bit, and their step, time, message and
    metrics; tags and channels that name them are copied. Their numbers start from 1. Branches, leases and cursors
    are not copied. May be called again after any error or kill: it continues, with the versions of the first call. Uses
    memory for one object per thread, the manifests' and the records.

    Parameters
    ----------
    source
        The store, opened on the branch to copy; it may be a relay. Its threads do the work.
    target
        An empty place, or one with an interrupted copy.
    all_versions
        Copy every live version; a relay's: every one that it still has. Else one version: that of ``version``,
        ``step``, ``tag`` or ``channel`` (at most one of them), the newest if none is given.
    bytes_per_s
        Maximum rate of copying.
    storage_options, fsync, unsafe_single_writer
        For a target that is a URL; see `Store.create`.
    retry
        How long an append whose outcome is unknown is retried; None is `RetryPolicy()`.

    Raises
    ------
    StoreExists
        The target has something else, or a complete copy of an older state of the source.
    Conflict
        Another process makes the same copy.
    BadInput, VersionNotFound, VersionExpired, TagNotFound, ChannelNotFound
        There is no such version, or it expired while it was copied.
    CorruptStore
        The source is damaged; the error names the object, and the target cannot be opened.
    WrongClock, AccessDenied, UnsafeBackend, CommitStateUnknown, StorageFailure

    Examples
    --------
    >>> import numpy as np
    >>> store = Store.create("memory://doctest-copied")
    >>> with store.writer() as writer, writer.begin(step=10) as txn:
    ...     txn.write_table("user", np.ones((4, 2), np.float32))
    >>> report = copy_store(store, "memory://doctest-copy")
    >>> report.version, report.segments
    (1, 1)
    >>> copy = Store.open("memory://doctest-copy")
    >>> copy.uuid == store.uuid, copy.snapshot().table("user").read().shape
    (False, (4, 2))
    """
    if not isinstance(source, Store):
        raise BadInput(f"a copy is made of an open store, found {source!r}; give Store.open(url)", found=str(source))
    chosen = {"version": version, "step": step, "tag": tag, "channel": channel}
    given = [f"{word} {value}" for word, value in chosen.items() if value is not None]
    if len(given) + all_versions > 1:
        raise BadInput("give at most one of version, step, tag, channel and all_versions", found=len(given))
    throttle = Throttle(bytes_per_s)
    if not isinstance(target, Storage):
        target = open_storage(
            target, storage_options=storage_options, fsync=fsync, unsafe_single_writer=unsafe_single_writer
        )
    if target.url == source.url:
        raise BadInput(f"source and target are both {source.url}; give another place", found=source.url)
    asked = "all versions" if all_versions else given[0] if given else "the newest version"
    begun = _read_begun(target)
    if begun is None:
        identity = new_identity(target)
        head = source.internals.readable_head()
        if not given:
            version = head.record.v
        only = None if all_versions else source.snapshot(version, step=step, tag=tag, channel=channel).record.v
        origin = _Origin(
            store_uuid=source.uuid, branch=source.internals.branch_uuid, url=source.url, head=head.record.v,
            version=only, asked=asked, identity=identity,
        )  # fmt: skip
    else:
        origin = _checked_origin(begun, source, target, asked)
        if target.read(layout.IDENTITY, stop=1) is not None:
            return _finished(source, target, origin)
        head = source.internals.entry(origin.head)
        if head.record.state is not None:
            raise VersionExpired(
                f"the lists of version {origin.head} of {source.url}, from which the copy in {target.url} was begun, "
                "were deleted since; copy to another, empty place",
                version=origin.head,
            )
    return _CopyRun(source, target, origin, head, throttle, retry or RetryPolicy()).run(begun, progress)


class _CopyRun:
    """One run of a copy. Blocks; runs on the source's threads."""

    def __init__(
        self, source: Store, target: Storage, origin: _Origin, head: LogEntry, throttle: Throttle, retry: RetryPolicy
    ) -> None:
        self._source, self._target, self._origin, self._head = source, target, origin, head
        self._throttle = throttle
        self._log = CommitLog(
            target, origin.identity.store_uuid, is_exclusive=origin.identity.exclusive_create == "verified", retry=retry
        )
        self._report = StoreCopyReport(store_uuid=origin.identity.store_uuid)

    def run(self, begun: LogEntry | None, progress: CopyProgress | None) -> StoreCopyReport:
        """Copy segments, then records, then ``cnr.json``."""
        self._log.check_exclusive()
        check_writer_features(self._head.record, self._source.url)
        states = distinct_states(self._entries())
        if not states:
            raise VersionNotFound(f"nothing was saved to {self._source.url}, so there is nothing to copy")
        first = self._begin(record_times(states, wall_ms())[0] - 1) if begun is None else begun
        copied = self._copy_segments(states, progress)
        times_ms = record_times(copied, wall_ms())
        report = self._report
        report.version = self._append(first, plan_records(copied, times_ms, self._head.record, writer_info()))
        report.states, report.skipped = len(copied), len(states) - len(copied)
        report.source_version = copied[-1].versions[-1]
        put_root_group(self._target)
        put_data_group(self._target)
        put_identity(self._target, self._origin.identity)
        return report

    def _entries(self) -> list[LogEntry]:
        """Return the versions to copy, ascending: all live ones, or the chosen one after those with its state."""
        log, head, only = self._source.internals.log, self._head.record, self._origin.version
        entries: list[LogEntry] = []
        if only is None:
            oldest = min([head.floor, *head.kept, *head.tags.values(), *head.channels.values(), head.v])
            for entry in log.walk(self._head, self._source.internals.read_workers):
                if entry.record.v < oldest:
                    break
                if is_live(head, entry.record.v):
                    entries.append(entry)
            return entries[::-1]
        chosen = self._head if only == head.v else self._source.internals.entry(only)
        try:
            for entry in log.walk(chosen):
                if entry.record.chain != chosen.record.chain:
                    break
                if is_live(head, entry.record.v):
                    entries.append(entry)
        except (CorruptStore, VersionNotFound):
            pass  # Records before the chosen one give only names of the same state, and they are damaged or absent.
        return entries[::-1] or [chosen]

    def _begin(self, time_ms: int) -> LogEntry:
        """Create position 0, which names what is copied."""
        origin = self._origin
        user = {_NOTE: msgspec.to_builtins(origin)}
        draft = draft_init(writer_info(), sha256(canonical_json(origin.identity)))
        first = self._log.append_first(msgspec.structs.replace(draft, ts_ms=max(0, time_ms), user=user))
        if first.record.user != user:
            raise _another_copy(self._target)
        return first

    def _copy_segments(self, states: list[CopiedState], progress: CopyProgress | None) -> list[CopiedState]:
        """Copy what is missing; return the states of which all was there."""
        sizes = {item.seg: item.size_bytes for state in states for item in state.entry.record.chain}
        total = sum(sizes.values())
        done: set[str] = set()
        done_bytes = 0
        copied = []
        for state in states:
            try:
                for item in state.entry.record.chain:
                    if item.seg in done:
                        continue
                    if not has_segment(self._target, item):
                        self._copy_segment(item)
                    done.add(item.seg)
                    done_bytes += item.size_bytes
                    if progress is not None:
                        progress(done_bytes, total)
            except MissingObject as missing:
                self._check_expired(state, missing, is_needed=state is states[-1])
            else:
                copied.append(state)
        return copied

    def _copy_segment(self, item: ChainEntry) -> None:
        written = copy_segment(
            self._source.storage, self._target, item, self._source.internals.read_workers, self._throttle
        )
        self._report.segments += 1
        self._report.objects += written.objects
        self._report.size_bytes += written.size_bytes
        self._report.reused_objects += written.reused

    def _check_expired(self, state: CopiedState, missing: MissingObject, *, is_needed: bool) -> None:
        """Return if a version expired that the copy can be without; else raise why its object is missing."""
        expired: VersionExpired | None = None
        for version in state.versions:
            try:
                self._source.internals.tell_of_expiry(version, missing)
            except VersionExpired as error:
                expired = error
            else:
                raise missing
        if is_needed and expired is not None:
            raise expired

    def _append(self, first: LogEntry, planned: list[PlannedRecord]) -> int:
        """Append the records that are missing; return the newest version."""
        entry = first
        for version, record in enumerate(planned, start=1):
            found = self._log.read(version)
            if found is None:
                parent = dataclasses.replace(entry, extra=record.extra)
                found = self._log.append(parent, record.draft, _refuse)
            elif not record.is_like(found.record):
                raise _another_copy(self._target)
            entry = found
        if self._log.read(entry.record.v + 1) is not None:
            raise _another_copy(self._target)
        return entry.record.v


def _read_begun(target: Storage) -> LogEntry | None:
    """Return position 0 of an interrupted or complete copy; None of a root without a log."""
    data = position_bytes(target, 0)
    if data is None:
        return None
    return decode_record(data, 0)


def _checked_origin(begun: LogEntry, source: Store, target: Storage, asked: str) -> _Origin:
    """Return what the copy in the target is made of, if it is what is to be copied."""
    try:
        origin = _origin_of(begun.record.user.get(_NOTE))
    except msgspec.ValidationError:
        raise StoreExists(
            f"{target.url} already contains a store, or parts of one; copy to another, empty place", path=target.url
        ) from None
    if sha256(canonical_json(origin.identity)) != begun.record.parent_digest:
        raise CorruptStore(f"position 0 of {target.url} names another identity than its own", path=layout.commit_key(0))
    if (origin.store_uuid, origin.branch) != (source.uuid, source.internals.branch_uuid) or origin.asked != asked:
        raise StoreExists(
            f"{target.url} has a copy of {origin.asked} of {origin.url}; give that source and those versions to "
            "continue it, or another, empty place",
            path=target.url, expected=asked, found=origin.asked,
        )  # fmt: skip
    return origin


def _finished(source: Store, target: Storage, origin: _Origin) -> StoreCopyReport:
    """Return the report of a complete copy, after making it durable; raise if the source has newer versions."""
    target.sync_folders([layout.IDENTITY])
    newest = source.internals.readable_head().record.v
    if newest != origin.head and origin.asked != f"version {origin.version}":
        raise StoreExists(
            f"{target.url} is a complete copy of version {origin.head} of {origin.url}, which has version {newest} "
            "now. A copy does not follow its source: copy to another, empty place, or run a relay",
            path=target.url, expected=newest, found=origin.head,
        )  # fmt: skip
    with Store.open_on(target, threads=1) as copy:
        return StoreCopyReport(
            store_uuid=copy.uuid, version=copy.latest_version(), source_version=origin.version or origin.head
        )


def _another_copy(target: Storage) -> StoreExists:
    return StoreExists(
        f"{target.url} has another copy than this one would be; copy to another, empty place", path=target.url
    )


def _refuse(_: CommitRecord, intervening: LogEntry) -> CommitRecord:
    raise Conflict(
        f"another process wrote record {intervening.record.v} of this copy; let it finish, then run the copy again",
        version=intervening.record.v, found=intervening.record.kind,
    )  # fmt: skip
