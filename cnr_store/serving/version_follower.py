"""Brings a loader to the version that it is to serve, record by record. Its caller holds the loader's lock."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from cnr_store.errors import CnrStoreError, CorruptStore, NotFound, StorageFailure, VersionRefused
from cnr_store.format.commit_record import LogEntry
from cnr_store.log.clock import wall_ms
from cnr_store.serving.candidate import pass_gate
from cnr_store.serving.following import ServeTarget, plan_between, repeats, wanted_version
from cnr_store.serving.holds import FollowingCursor, leased
from cnr_store.serving.loader_options import LoaderOptions
from cnr_store.serving.log_tail import LogTail
from cnr_store.serving.metrics import LoaderMetrics, PollResult
from cnr_store.serving.state_builder import StateBuilder
from cnr_store.serving.trouble import Trouble
from cnr_store.serving.update.update_plan import Apply, Compare, Same, UpdatePlan
from cnr_store.serving.version_queue import VersionQueue
from cnr_store.store import Store

MOST_RECORDS = 8
"""So many records are followed one by one; a loader that is further behind goes to the newest state in one step."""


_EXPECTED = (CnrStoreError, OSError, MemoryError)
"""What may go wrong with a store, or for want of memory, while a version is served that can go on being served."""


@dataclass(slots=True)
class _Refusal:
    """A state that was turned down, as the newest record that has it, and why."""

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
    trouble
        Why the last look left things as they are.

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
        self.trouble = Trouble(store.url, options.poll_interval_s, metrics)
        self._cursor = None if options.cursor is None else FollowingCursor(store, options.cursor)
        self._refusal: _Refusal | None = None
        self._pinned: int | None = None
        self._wanted: int | None = None
        self._behind_since_ms: int | None = None
        self._tail = LogTail(store)

    @property
    def checked_s(self) -> float:
        """When it was learned last which version is the newest, by the monotonic clock."""
        return self._tail.checked_s

    @property
    def is_unreachable(self) -> bool:
        """Whether the last look could not learn which record is the newest."""
        return self._tail.is_unreachable

    @property
    def staleness_s(self) -> float:
        """For how long a newer state than the one served has been there, as far as is known; see `LoaderMetrics`."""
        since, wanted = self._behind_since_ms, self._wanted
        if since is None or wanted == self._queue.view.version:
            return 0.0
        return max(0.0, (wall_ms() - since) / 1000)

    @property
    def cursor_version(self) -> int | None:
        """Where the registered cursor stands in the store; None without one, or where it could not be written."""
        return None if self._cursor is None else self._cursor.version

    def load(self) -> None:
        """Serve the first state; where it is compacted and deleted while it is loaded, a newer one."""
        began = time.monotonic()
        while True:
            try:
                version = wanted_version(self._target, self._tail.seen.record)
                entry = self._tail.entry(version)
                with leased(self._store, version):
                    self._take(entry, Compare())
                break
            except (CorruptStore, NotFound):
                if not self._tail.see(self._read_newest()):
                    raise
        self._note_wanted()
        self._metrics.load_s = time.monotonic() - began
        self._tell_cursor()

    def look(self, *, is_patient: bool) -> PollResult:
        """Look for new versions, serve or stage them, and return what came of it; an error of the store is in it.

        With ``is_patient`` what failed before is not tried again before its pause is over.
        """
        metrics, queue = self._metrics, self._queue
        before, rows, size, began = queue.newest.version, metrics.rows, metrics.bytes, time.monotonic()
        metrics.polls += 1
        error: Exception | None = None
        try:
            if self._follow(is_patient=is_patient):
                error = self.trouble.error
            else:
                self.trouble.note(None, queue.view.version)
        except _EXPECTED as trouble:
            error = trouble
            self.trouble.note(trouble, queue.view.version)
        self._note_wanted()
        self._tell_cursor()
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
            bytes=metrics.bytes - size,
            apply_s=metrics.apply_s if is_updated else 0.0,
            error=error,
        )

    def pin(self, version: int) -> None:
        """Go to a version, and stay there until `unpin`; what is refused or cannot be served changes nothing."""
        if version > self._tail.seen.record.v:
            self._see(self._read_newest())
        self._go(ServeTarget(version=version), insists=True)
        self._pinned = version
        self._note_wanted()

    def stay(self) -> None:
        """Drop what is staged, and stay at the version served until `unpin`."""
        self._queue.drop_staged()
        self._pinned = self._queue.view.version
        self._note_wanted()

    def unpin(self) -> None:
        """Go after the target again."""
        self._pinned = None

    @property
    def _aim(self) -> ServeTarget:
        return self._target if self._pinned is None else ServeTarget(version=self._pinned)

    def _follow(self, *, is_patient: bool) -> bool:
        """Read what is new in the log and go there, record by record; return whether it rests from a failure."""
        tail = self._tail
        news, trouble = tail.read_news(MOST_RECORDS + 1)
        if len(news) > MOST_RECORDS:
            for entry in news:
                self._see(entry)
            self._see(self._read_newest())
            news = [tail.seen]
        elif self._queue.waits or not self._aim.is_newest:
            for entry in news[:-1]:
                self._see(entry)
            news = news[-1:]
        if is_patient and not news and trouble is None and self.trouble.rests:
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
        if isinstance(failure, CorruptStore | NotFound) and trouble is None and self._see(self._read_newest()):
            # What it needs may have been compacted, expired and deleted since: the newest state does not need it.
            self._go(self._aim)
            failure = None
        if failure is not None:
            raise failure
        if trouble is not None:
            raise trouble
        return False

    def _note_wanted(self) -> None:
        """Note which version should be served, and since when it is not."""
        seen = self._tail.seen.record
        with suppress(CnrStoreError):
            self._wanted = wanted_version(self._aim, seen)
        if self._wanted == self._queue.view.version:
            self._behind_since_ms = None
        elif self._behind_since_ms is None:
            self._behind_since_ms = seen.ts_ms

    def _tell_cursor(self) -> None:
        if self._cursor is not None:
            self._cursor.move(self._queue.view.version)

    def _read_newest(self) -> LogEntry:
        entry, torn = self._tail.read_newest()
        if torn is not None:
            self.trouble.say(torn, f"version {entry.record.v} is the newest that can be read")
        return entry

    def _see(self, entry: LogEntry) -> bool:
        is_newer = self._tail.see(entry)
        if is_newer and self._behind_since_ms is None:
            with suppress(CnrStoreError):
                if wanted_version(self._aim, entry.record) != self._queue.view.version:
                    self._behind_since_ms = entry.record.ts_ms
        return is_newer

    def _go(self, target: ServeTarget, *, insists: bool = False) -> None:
        """Serve, or stage, what the target means by the newest record that is known."""
        queue = self._queue
        if not queue.waits:
            queue.show()  # does nothing, unless other processes could not be told before
        version = wanted_version(target, self._tail.seen.record)
        newest = queue.newest
        if version == newest.version:
            return
        entry = self._tail.entry(version)
        refusal = self._refusal
        if refusal is not None and not insists and repeats(entry, refusal.entry):
            if entry.record.v > refusal.entry.record.v:
                refusal.entry = entry
            raise refusal.error
        plan = plan_between(newest.entry, entry, self._tail.path)
        if isinstance(plan, Same):
            queue.stage_same(entry)
        else:
            with nullcontext() if isinstance(plan, Apply) else leased(self._store, version):
                self._take(entry, plan, insists=insists)
        self._tail.forget(version)

    def _take(self, entry: LogEntry, plan: UpdatePlan, *, insists: bool = False) -> None:
        """Read what makes the newest state that of ``entry``, everything if there is none, and stage it.

        A refusal is remembered unless the caller ``insists`` on just this version.
        """
        queue, options = self._queue, self._options
        last = queue.newest if queue.states else None
        snapshot = self._builder.open(entry, last)
        queue.merge()
        built = self._builder.build(entry, snapshot, plan, last, queue.publisher.newest)
        warms = last is None or options.warm_up_each
        gate = partial(pass_gate, validate=options.validate, warm_up=options.warm_up if warms else None)
        try:
            queue.stage(built.state, built.tables.changes, built.tables.escapes, built.dense, gate)
        except VersionRefused as error:
            if not insists:
                self._refusal = _Refusal(entry, error)
            self._metrics.refused += 1
            raise
        if last is not None:
            self._metrics.rows += built.tables.rows
            self._metrics.bytes += built.tables.bytes
