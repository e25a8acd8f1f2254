"""Brings a loader to the version to serve, record by record or straight to the newest. Its caller holds the lock."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from cnr_store.errors import CnrStoreError, CorruptStore, NotFound, StorageFailure, VersionExpired, VersionRefused
from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.log.clock import wall_ms
from cnr_store.serving.candidate import pass_gate
from cnr_store.serving.following import ServeTarget, plan_between, repeats, wanted_version
from cnr_store.serving.loader_options import LoaderOptions
from cnr_store.serving.log_tail import LogTail
from cnr_store.serving.metrics import LoaderMetrics, PollResult
from cnr_store.serving.poll_errors import PollErrors
from cnr_store.serving.protection import FollowingCursor, leased
from cnr_store.serving.state_builder import StateBuilder
from cnr_store.serving.update.update_plan import Apply, Compare, Same, UpdatePlan
from cnr_store.serving.version_queue import VersionQueue
from cnr_store.store import Store

logger = logging.getLogger(__name__)

MOST_RECORDS = 8
"""Maximum number of records that are followed one by one; with more new records a loader goes to the newest state."""


_EXPECTED = (CnrStoreError, OSError, MemoryError)
"""Errors of a poll after which the present version stays."""


@dataclass(slots=True)
class _Refusal:
    """A refused state: its newest record, and the error."""

    entry: LogEntry
    error: VersionRefused


class VersionFollower:
    """Follows a store's log and stages the version that is wanted in a queue. Not safe for several threads.

    Parameters
    ----------
    target
        What to serve.
    options
        Their ``validate`` and ``warm_up`` are asked about a version.
    queue, builder
        Where versions are staged, and what reads them.
    metrics
        Where it counts.

    Attributes
    ----------
    errors
        The error of the last poll, and what was logged.
    tail
        The newest records that were read.

    Raises
    ------
    CorruptStore, StorageFailure
        The newest record cannot be read.
    """

    def __init__(
        self,
        store: Store,
        target: ServeTarget,
        options: LoaderOptions,
        queue: VersionQueue,
        builder: StateBuilder,
        metrics: LoaderMetrics,
    ) -> None:
        self._store = store
        self._target = target
        self._options = options
        self._queue = queue
        self._builder = builder
        self._metrics = metrics
        self.errors = PollErrors(store.url, options.poll_interval_s, metrics)
        self._cursor = None if options.cursor is None else FollowingCursor(store, options.cursor)
        self._refusal: _Refusal | None = None
        self._pinned: int | None = None
        self._expired: int | None = None
        self._wanted: int | None = None
        self._behind_since_ms: int | None = None
        self.tail = LogTail(store)

    @property
    def staleness_s(self) -> float:
        """Seconds since a newer state than the served one was committed, as far as is known; see `LoaderMetrics`."""
        since, wanted = self._behind_since_ms, self._wanted
        if since is None or wanted == self._queue.view.version:
            return 0.0
        return max(0.0, (wall_ms() - since) / 1000)

    @property
    def is_expired(self) -> bool:
        """Whether the served version is not live any more, by the newest record that was read."""
        return not is_live(self.tail.seen.record, self._queue.view.version)

    @property
    def cursor_version(self) -> int | None:
        """The version of the registered cursor in the store; None without one, or if it could not be written."""
        return None if self._cursor is None else self._cursor.version

    def load(self) -> None:
        """Serve the first state; if that is compacted and deleted during the load, a newer one."""
        began = time.monotonic()
        while True:
            try:
                version = wanted_version(self._target, self.tail.seen.record)
                entry = self.tail.entry(version)
                with leased(self._store, version):
                    self._take(entry, Compare())
                break
            except (CorruptStore, NotFound):
                if not self.tail.see(self._read_newest()):
                    raise
        self._note_wanted()
        self._metrics.load_s = time.monotonic() - began
        self._move_cursor()

    def look(self, *, is_patient: bool) -> PollResult:
        """Look for new versions, serve or stage them, and return the result, with an error of the store.

        With ``is_patient`` a failure is not retried before its pause is over.
        """
        metrics, queue = self._metrics, self._queue
        before, rows, size, began = queue.newest.version, metrics.rows, metrics.size_bytes, time.monotonic()
        metrics.polls += 1
        error: Exception | None = None
        try:
            if self._follow(is_patient=is_patient):
                error = self.errors.error
            else:
                self.errors.record(None, queue.view.version)
        except _EXPECTED as caught:
            error = caught
            self.errors.record(caught, queue.view.version)
        self._note_wanted()
        self._move_cursor()
        is_updated = queue.newest.version != before
        if is_updated:
            metrics.apply_s = time.monotonic() - began
        view = queue.view
        return PollResult(
            version=view.version,
            step=view.step,
            staged=queue.staged_version,
            is_updated=is_updated,
            rows=metrics.rows - rows,
            size_bytes=metrics.size_bytes - size,
            apply_s=metrics.apply_s if is_updated else 0.0,
            error=error,
        )

    def pin(self, version: int) -> None:
        """Go to a version and stay at it until `unpin`; changes nothing if it is refused or cannot be served."""
        target = ServeTarget(version=version)
        if version > self.tail.seen.record.v:
            self._see(self._read_newest())
        self._go(target, insists=True)
        self._pinned = version
        self._note_wanted()

    def stay(self) -> None:
        """Drop what is staged, and stay at the served version until `unpin`."""
        self._queue.drop_staged()
        self._pinned = self._queue.view.version
        self._note_wanted()

    def unpin(self) -> None:
        """Follow the target again."""
        self._pinned = None

    @property
    def _aim(self) -> ServeTarget:
        return self._target if self._pinned is None else ServeTarget(version=self._pinned)

    def _follow(self, *, is_patient: bool) -> bool:
        """Read new records and go to them, one by one; return whether it pauses after a failure."""
        tail = self.tail
        news, read_error = tail.read_news(MOST_RECORDS + 1)
        if len(news) > MOST_RECORDS:
            for entry in news:
                self._see(entry)
            self._see(self._read_newest())
            news = [tail.seen]
        elif self._queue.waits or not self._aim.is_newest:
            for entry in news[:-1]:
                self._see(entry)
            news = news[-1:]
        if is_patient and not news and read_error is None and self.errors.is_paused:
            return True
        failure: CnrStoreError | None = None
        for entry in news or [tail.seen]:
            self._see(entry)
            try:
                self._go(self._aim)
                failure = None
            except StorageFailure:
                raise
            except CnrStoreError as error:
                failure = error  # the next record may lead past it
        if isinstance(failure, CorruptStore | NotFound) and read_error is None and self._see(self._read_newest()):
            # What it needs may have been compacted, expired and deleted since: the newest state does not need it.
            self._go(self._aim)
            failure = None
        if failure is not None:
            raise failure
        if read_error is not None:
            raise read_error
        return False

    def _note_wanted(self) -> None:
        """Note which version should be served, and since when it is not."""
        seen = self.tail.seen.record
        with suppress(CnrStoreError):
            self._wanted = wanted_version(self._aim, seen)
        if self._wanted == self._queue.view.version:
            self._behind_since_ms = None
        elif self._behind_since_ms is None:
            self._behind_since_ms = seen.ts_ms

    def _move_cursor(self) -> None:
        if self._cursor is not None:
            self._cursor.move(self._queue.view.version)

    def _read_newest(self) -> LogEntry:
        entry, torn = self._store.internals.log.newest_readable()
        if torn is not None:
            self.errors.log(torn, f"version {entry.record.v} is the newest that can be read")
        return entry

    def _see(self, entry: LogEntry) -> bool:
        is_newer = self.tail.see(entry)
        if is_newer and self._behind_since_ms is None:
            with suppress(CnrStoreError):
                if wanted_version(self._aim, entry.record) != self._queue.view.version:
                    self._behind_since_ms = entry.record.ts_ms
        return is_newer

    def _go(self, target: ServeTarget, *, insists: bool = False) -> None:
        """Serve or stage the version of a target, by the newest known record."""
        queue = self._queue
        if not queue.waits:
            queue.show()  # does nothing, unless other processes could not be informed before
        newest = queue.newest
        try:
            version = wanted_version(target, self.tail.seen.record)
        except VersionExpired as error:
            if target.version != newest.version:
                raise
            self._note_expired(error)
            return
        if version == newest.version:
            return
        entry = self.tail.entry(version)
        refusal = self._refusal
        if refusal is not None and not insists and repeats(entry, refusal.entry):
            if entry.record.v > refusal.entry.record.v:
                refusal.entry = entry
            raise refusal.error
        plan = plan_between(newest.entry, entry, self.tail.path)
        if isinstance(plan, Same):
            queue.stage_same(entry)
        else:
            with nullcontext() if isinstance(plan, Apply) else leased(self._store, version):
                self._take(entry, plan, insists=insists)
        self.tail.forget(version)

    def _note_expired(self, error: VersionExpired) -> None:
        """Log once that the version to stay at has expired: nothing is read of it any more, so no poll fails."""
        if self._expired != error.version:
            self._expired = error.version
            logger.warning("%s: %s; it is served from memory, and cannot be loaded again", self._store.url, error)

    def _take(self, entry: LogEntry, plan: UpdatePlan, *, insists: bool = False) -> None:
        """Read the changes from the newest state to ``entry``, or all rows if there is none, and stage them.

        A refusal is remembered unless the caller ``insists`` on this version.
        """
        queue, options = self._queue, self._options
        last = queue.newest if queue.states else None
        snapshot = self._builder.open(entry, last)
        queue.merge()
        built = self._builder.build(entry, snapshot, plan, last, queue.publisher.newest)
        warms = last is None or options.warm_up_each
        gate = partial(pass_gate, validate=options.validate, warm_up=options.warm_up if warms else None)
        try:
            queue.stage(built.state, built.tables.changes, built.tables.exact_rows, built.dense, gate)
        except VersionRefused as error:
            if not insists:
                self._refusal = _Refusal(entry, error)
            self._metrics.refused += 1
            raise
        if last is not None:
            self._metrics.rows += built.tables.rows
            self._metrics.size_bytes += built.tables.size_bytes
