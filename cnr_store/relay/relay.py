"""A relay: one process that copies a store's newest versions to another place for many readers (spec, section 7.11).

The copy has the same bytes at the same versions. A record is created at the target only after all objects that it
references are there, durable, and checked against their digests. So a relay may be killed at any point: the newest
version of its copy is complete, and the next relay continues from there. Nothing is ever written to the source.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cnr_store.errors import BadInput, CorruptStore, StorageFailure, VersionExpired, VersionNotFound
from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.log.announcers import Announcers
from cnr_store.log.clock import wall_ms
from cnr_store.log.retention import RetentionPolicy
from cnr_store.relay.copied_versions import CopiedVersions
from cnr_store.relay.copier import Copier
from cnr_store.relay.mirroring import first_version, versions_of_channels
from cnr_store.relay.report import RelayReport
from cnr_store.relay.source import BATCH, RelaySource
from cnr_store.relay.target import RelayTarget
from cnr_store.relay.trimming import Trimmer
from cnr_store.runtime.arguments import checked_count, checked_number
from cnr_store.runtime.repeating import pause_s
from cnr_store.runtime.threads import Throttle, blocks
from cnr_store.storage import Storage, open_storage
from cnr_store.store import Store

_MANY = 64
"""Versions that one round copies between two trims (the target may not have room for all of them), and before it ends
although the source has newer ones."""

_LOOK_BACK = 60
"""Rounds in a row without a new version before one checks that the source still has the copied log."""


class Relay:
    """Copies the newest versions of a store, or of a branch, to another place. For one thread at a time.

    Two relays with one target are safe, because they write the same bytes; they do the work twice.

    Parameters
    ----------
    source
        The store to copy, opened on the branch to copy; it may be a relay. Its threads do the work.
    target
        An empty place, or one with a relay of this log.
    start
        The first version of a new relay. None: the newest, and those that channels name. An existing relay continues
        from its newest version.
    policy
        Which of the source's live versions the relay keeps. None is ``RetentionPolicy()``. It also keeps versions that
        channels, tags, and leases and cursors at the relay name.
    grace_s
        Seconds between noting a segment as pending delete and deleting it: the time for a reader of the relay.
    trims
        Whether this process deletes anything at the relay.
    bytes_per_s
        Maximum rate of copying.
    storage_options, fsync, unsafe_single_writer
        For a target that is a URL; with the last, no other relay may ever write there.
    clock_ms, monotonic_s
        Clocks, for tests.

    Examples
    --------
    >>> import numpy as np
    >>> store = Store.create("memory://doctest-far")
    >>> with store.writer() as writer, writer.begin(step=10) as txn:
    ...     txn.write_table("user", np.ones((4, 2), np.float32))
    >>> report = Relay(store, "memory://doctest-near").advance()
    >>> report.version == store.latest_version(), report.segments
    (True, 1)
    >>> near = Store.open("memory://doctest-near")
    >>> near.uuid == store.uuid, near.snapshot().table("user").read().shape
    (True, (4, 2))
    """

    def __init__(
        self,
        source: Store,
        target: str | os.PathLike[str] | Storage,
        *,
        start: int | None = None,
        policy: RetentionPolicy | None = None,
        grace_s: float = 86_400.0,
        trims: bool = True,
        bytes_per_s: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
        unsafe_single_writer: bool = False,
        clock_ms: Callable[[], int] = wall_ms,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(source, Store):
            raise BadInput(f"a relay takes an open store, found {source!r}; give Store.open(url)", found=str(source))
        checked_number("grace_s", grace_s, least=0, most=1e9)
        if start is not None:
            checked_count("start, a version of the source,", start)
        if not isinstance(target, Storage):
            target = open_storage(
                target, storage_options=storage_options, fsync=fsync, unsafe_single_writer=unsafe_single_writer
            )
        if target.url == source.url:
            raise BadInput(f"source and target are both {source.url}; give another place", found=source.url)
        self._source = RelaySource(source)
        self._target = RelayTarget(target, source)
        self._start = start
        self._trims = trims
        self._clock_ms, self._monotonic_s = clock_ms, monotonic_s
        self._throttle = Throttle(bytes_per_s)
        self._copied = CopiedVersions()
        self._copier = Copier(self._source, self._target, self._copied, self._throttle, clock_ms)
        self._trimmer = Trimmer(
            self._target, self._copied, self._copier, RetentionPolicy() if policy is None else policy,
            int(grace_s * 1000), clock_ms,
        )  # fmt: skip
        self._announcers = Announcers()
        self._woken = threading.Event()
        self._is_stopped = False
        self._is_open = False
        self._level_s: float | None = None
        self._idle_looks = 0

    @property
    def version(self) -> int | None:
        """The newest version that this object found or wrote at the relay; None if there is none."""
        head = self._target.head
        return None if head is None else head.record.v

    @property
    def staleness_s(self) -> float | None:
        """Seconds since the relay had everything that the source had; None if it never had."""
        return None if self._level_s is None else self._monotonic_s() - self._level_s

    def advance(self) -> RelayReport:
        """Copy every new version of the source, then trim. Blocks; one GET if there is no new version.

        If the source grows faster than the relay copies, a round ends after the version that was the newest at its
        start. May be called again after any error: copied objects are not copied again.

        Raises
        ------
        StoreExists
            The target has something else.
        VersionNotFound, VersionExpired
            ``start`` is not a live version of the source.
        CorruptStore
            The source is damaged, or the target is not a copy of it. Nothing damaged becomes visible.
        AccessDenied, UnsafeBackend, StorageFailure
            A request to either failed.
        """
        report = RelayReport()
        self._copier.forget_damage()
        if not self._is_open:
            self._is_open = self._open(report)
        if not self._is_open:
            self._level_s = self._monotonic_s()
            return self._closed(report, is_level=True)
        try:
            is_level = self._catch_up(report)
        except StorageFailure:
            self._trim(report)  # The target may be full, and only this frees space.
            raise
        untrimmed = self._trim(report)
        if untrimmed is not None:
            report.problem = untrimmed
        return self._closed(report, is_level=is_level)

    def announce_to(self, announce: Callable[[int], object]) -> None:
        """Call ``announce(version)`` for each version that becomes visible at the relay, once it is durable there.

        It runs on the thread that copies, and should return at once. Its errors are logged.
        """
        self._announcers.add(announce)

    def wake(self) -> None:
        """Let `run` begin a round now; if one is running, another one after it. Does not block; any thread.

        For whatever hears of a commit at the source before the next round, as `Loader.wake`.
        """
        self._woken.set()

    def stop(self) -> None:
        """Let `run` return after its present round, and at once when it is called again. Does not block; any thread."""
        self._is_stopped = True
        self._woken.set()

    def run(
        self, *, poll_interval_s: float = 5.0, on_report: Callable[[RelayReport], None] | None = None
    ) -> None:  # fmt: skip
        """Run a round every ``poll_interval_s``, less often after failures, until `stop`. Blocks.

        Failures of either backend and damage at the source end a round, not the run: the report has the message, and
        the relay keeps its versions.

        Raises
        ------
        BadInput, StoreExists, Unsupported, VersionNotFound, VersionExpired
            Another round would not succeed.
        """
        checked_number("poll_interval_s", poll_interval_s, above=0, most=1e9)
        failures = 0
        while True:
            self._woken.clear()  # before the round, which may not see what is announced during it
            if self._is_stopped:
                return
            try:
                report = self.advance()
            except (StorageFailure, CorruptStore) as error:
                report = self._closed(RelayReport(problem=error.message))
            if on_report is not None:
                on_report(report)
            if report.problem is None and self._target.head is not None and report.version != report.source_version:
                continue  # The source has newer versions already.
            failures = 0 if report.problem is None else failures + 1
            self._woken.wait(pause_s(poll_interval_s, failures, random.random()))

    def _open(self, report: RelayReport) -> bool:
        """Load the state of the target, or create the relay; return whether it has a version."""
        identity = self._source.read_identity()
        if not self._target.has_begun(identity):
            return self._begin(identity, report)
        head = self._target.find_head()
        self._source.check_history(head, self._target.storage.url)
        self._load_copied(head)
        self._copier.mend(head, report)
        return True

    def _begin(self, identity: bytes, report: RelayReport) -> bool:
        """Copy the first version, then create ``cnr.json``. Before that the target cannot be opened."""
        source, target = self._source, self._target
        head = source.look().record
        target.head = None
        if target.first == 0:
            first = first_version(head, self._start, source.log.first)
            if first is None:
                return False
            if first > head.v:
                raise VersionNotFound(f"{source.store.url} has no version {first} yet, only {head.v}", version=first)
            if self._start is not None and not is_live(head, first):
                raise VersionExpired(f"version {first} of {source.store.url} has expired; start later", version=first)
            target.create_marker(first, self._clock_ms())
        self._copy_version(head.v if self._start is None else target.first, report)
        target.put_root(source.read_root(), identity)
        return True

    def _load_copied(self, head: LogEntry) -> None:
        """Load the versions that earlier processes copied and kept, for trimming. One GET for each."""
        versions: list[int] = []
        if self._trims:
            notes = self._target.read_notes()
            versions += (one for one in notes.kept if one < notes.floor)
            versions += range(max(notes.floor, self._target.first), head.record.v)
        for start, stop in blocks(len(versions), BATCH):
            reads = [partial(self._target.read_record, version) for version in versions[start:stop]]
            for entry in self._source.workers.run(reads):
                if entry is not None and is_live(head.record, entry.record.v):
                    self._copied.remember(entry)
        self._copied.remember(head)

    def _catch_up(self, report: RelayReport) -> bool:
        """Copy up to the newest version of the source at the start; return whether there is none newer at the end."""
        goal: int | None = None
        assert self._target.head is not None
        head = self._target.head
        while (entry := self._source.store.poll(head)) is not None:
            self._idle_looks = 0
            newest = self._source.look_behind(entry)
            if goal is None:
                goal = newest.record.v
            elif head.record.v >= goal and report.versions >= _MANY:
                return False
            head = self._copy_version(entry.record.v, report)
            if report.versions % _MANY == 0:
                self._trim(report)
        self._idle_looks += 1
        if self._idle_looks >= _LOOK_BACK:
            # If the source was replaced by one with a shorter log, polls would never find a new version.
            self._source.check_history(head, self._target.storage.url)
            self._idle_looks = 0
        self._source.newest = head
        self._level_s = self._monotonic_s()
        return True

    def _copy_version(self, version: int, report: RelayReport) -> LogEntry:
        entry = self._copier.copy_version(version, report)
        needed = (*versions_of_channels(entry.record, self._target.first), entry.record.v)
        self._copied.trust_only(needed)
        if not self._trims:
            self._copied.keep_only(needed)
        self._target.set_head(entry)
        self._announcers.tell(version)
        return entry

    def _trim(self, report: RelayReport) -> str | None:
        return self._trimmer.trim_if_due(report) if self._trims else None

    def _closed(self, report: RelayReport, *, is_level: bool = False) -> RelayReport:
        """Complete and return the report at the end of a round."""
        newest = self._source.newest
        report.version = self.version
        report.source_version = None if newest is None else newest.record.v
        report.staleness_s = 0.0 if is_level else self.staleness_s
        return report
