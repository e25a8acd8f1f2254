"""Keeps one sink at the version of its source; an error of a sink does not affect others.

A feed stores *which* rows changed and reads their *values* from the source when it pushes. So a slow sink costs row
ids, not rows, and skips versions. This is correct because values are absolute, a batch is visible only after its
commit, and rows count as read only if they are of the last noticed version (`notice`): later changes of them come with
later notices. Rows that change during a large batch are written again in it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from cnr_store.errors import CnrStoreError, Fenced, StorageFailure, TableNotFound
from cnr_store.runtime.arguments import checked_count, checked_number
from cnr_store.runtime.repeating import Repeating, pause_s
from cnr_store.serving.sinks.protocol import Published, RowSink, SinkSource, SinkState, SinkTable, SourceRows
from cnr_store.types import RowIds

logger = logging.getLogger(__name__)

CHUNK_ROWS = 65_536
"""Rows that a feed reads from its source at a time where all rows of a table are pushed."""

MOST_ROWS_AT_ONCE = 1 << 20
"""Changed rows that a feed reads in one piece, so that they are of one version whatever is published meanwhile."""

CHECK_INTERVAL_S = 30.0
"""Seconds after which an idle feed checks that its sink still serves what was pushed last."""

MOST_WAITING_KEYS = 1 << 24
"""Changed keys of a hashed table that a feed remembers, 8 bytes each; beyond, the sink gets everything when it is back.

Rows of a dense table need no such bound: they are no more than the table has.
"""

_CHASES = 4
_RESTARTS = 3
_MOST_WAITING = 16
_NOTICE_TIMEOUT_S = 30.0
_FIRST_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class PushResult:
    """The result of one push.

    Attributes
    ----------
    state
        The state that the sink serves now.
    rows, deleted
        Number of rows written and made absent; a row that changed during the push counts each time.
    is_full
        Whether all rows were pushed.
    """

    state: SinkState
    rows: int
    deleted: int
    is_full: bool


@dataclass(slots=True)
class SinkMetrics:
    """State and counts of a sink. A feed counts in its own object, and returns copies.

    Attributes
    ----------
    name
        The sink's name.
    version, published_version
        The version of the sink and of the source; None if it has none.
    staleness_s
        Seconds since the sink was last at the version of the source; 0 if it is.
    pushes, full_pushes, failures
        Counts since the feed was created.
    rows, deleted
        Sums over the pushes.
    error
        The error of the last push, if it failed.
    is_fenced
        Whether another process opened the sink; then this feed pushes no more.
    """

    name: str
    version: int | None = None
    published_version: int | None = None
    staleness_s: float = 0.0
    pushes: int = 0
    full_pushes: int = 0
    failures: int = 0
    rows: int = 0
    deleted: int = 0
    error: CnrStoreError | None = None
    is_fenced: bool = False


class SinkFeed:
    """Drives one sink from one source.

    `notice` is for the source, after each version it publishes. `push` brings the sink up to date on the caller's
    thread; `start` does so repeatedly on a thread, with growing pauses after failures.

    Parameters
    ----------
    source
        The loader.
    sink
        Opened by the feed; nothing else may open it meanwhile.
    chunk_rows, max_rows_at_once
        See `CHUNK_ROWS` and `MOST_ROWS_AT_ONCE`; memory is about that many rows as float32.
    max_waiting_keys, check_interval_s
        See `MOST_WAITING_KEYS` and `CHECK_INTERVAL_S`.
    """

    def __init__(
        self,
        source: SinkSource,
        sink: RowSink,
        *,
        chunk_rows: int = CHUNK_ROWS,
        max_rows_at_once: int = MOST_ROWS_AT_ONCE,
        max_waiting_keys: int = MOST_WAITING_KEYS,
        check_interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        self.sink = sink
        self._source = source
        self._chunk_rows = checked_count("chunk_rows", chunk_rows, least=1)
        self._max_rows_at_once = checked_count("max_rows_at_once", max_rows_at_once, least=1)
        self._max_waiting_keys = max_waiting_keys
        self._check_interval_s = checked_number("check_interval_s", check_interval_s, above=0)
        self._pushing = threading.Lock()  # one batch at a time
        self._changed = threading.Condition()  # guards what follows; notified by notices and by stop
        self._published: Published | None = None
        self._notices = 0
        self._due = _Due()  # since `_shown`, and what `_attempt` took of it
        self._is_open = False
        self._shown: SinkState | None = None
        self._attempt: _PushAttempt | None = None  # the batch on its way, or the one that failed
        self._behind_since: float | None = None
        self._metrics = SinkMetrics(sink.name)
        self._stops = False
        self._failures = 0
        self._retry_at_s = 0.0
        self._check_at_s = 0.0
        self._thread: Repeating | None = None

    def notice(self, published: Published, changed: Mapping[str, RowIds | None]) -> None:
        """Report that the source serves another version, and the rows that may differ from the last reported one.

        Call it after lookups see the version, for each version in turn, also for rollbacks. Does not block or raise.

        Parameters
        ----------
        changed
            By table the ids of rows that were added, changed or deleted, int64 (n,); None if they are not known, also
            for tables that appear, vanish or change their width: then the sink gets all rows.
        """
        with self._changed:
            before, self._published = self._published, published
            self._notices += 1
            other_tables = before is not None and before.tables != published.tables
            if other_tables or any(row_ids is None for row_ids in changed.values()):
                self._due.everything = True
            self._due.add(changed)
            hashed = [table for table, shape in published.tables.items() if shape.num_rows is None]
            if sum(map(self._due.count, hashed)) > self._max_waiting_keys:
                self._due.everything = True
                self._due.add({})
            if self._behind_since is None and self._shown != published.state:
                self._behind_since = time.monotonic()
            self._changed.notify_all()
            if self._thread is not None:
                self._thread.wake()

    def push(self) -> PushResult | None:
        """Bring the sink to the version of the source; return None if it has it, or the source has none. Blocks.

        Raises
        ------
        Fenced
            Another process opened the sink; this feed pushes no more.
        StorageFailure
            The sink failed. It serves its former version, or, after a lost reply, the whole new one; the next push
            finds out which.
        CnrStoreError
            The sink refused rows, for example by `NonFiniteValues`.
        """
        return self._guarded(until_stop=False)

    def start(self) -> None:
        """Keep the sink up to date on a daemon thread until `stop`. Idempotent."""
        with self._changed:
            if self._thread is None:
                self._stops = False
                self._check_at_s = time.monotonic() + self._check_interval_s
                self._thread = Repeating(self, SinkFeed._push_again, name=f"feed {self.sink.name}")

    def stop(self, timeout_s: float | None = 30.0) -> None:
        """End the thread after its current push. Idempotent."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._stops = True
            self._changed.notify_all()
        if thread is not None:
            thread.stop(timeout_s)

    def metrics(self) -> SinkMetrics:
        """Return state and counts of the sink; no I/O."""
        with self._changed:
            return replace(
                self._metrics,
                version=None if self._shown is None else self._shown.version,
                published_version=None if self._published is None else self._published.state.version,
                staleness_s=0.0 if self._behind_since is None else time.monotonic() - self._behind_since,
            )

    def _push_again(self) -> float | None:
        """Push what is due, or ask an idle sink what it shows; return how long to rest, None where it is over."""
        now = time.monotonic()
        with self._changed:
            if self._stops or self._metrics.is_fenced:
                return None
            if now < self._retry_at_s:
                return self._retry_at_s - now
            is_due = self._metrics.error is not None or not self._is_current()
            if not is_due and now < self._check_at_s:
                return self._check_at_s - now
        try:
            self._guarded(until_stop=True, checks=not is_due)
        except CnrStoreError:  # in metrics(); serving continues, and the next attempt opens the sink again
            self._failures += 1
            # Jitter: the sinks of a hundred servers must not come back to a cache in step.
            rest_s = pause_s(_FIRST_PAUSE_S / 2, self._failures, random.random())
            self._retry_at_s = time.monotonic() + rest_s
            return rest_s
        self._failures, self._retry_at_s = 0, 0.0
        self._check_at_s = time.monotonic() + self._check_interval_s
        return 0.0  # there may be a newer notice

    def _is_current(self) -> bool:
        return self._published is None or (self._is_open and self._shown == self._published.state)

    def _guarded(self, *, until_stop: bool, checks: bool = False) -> PushResult | None:
        """Push; count and keep what it fails with.

        ``until_stop`` gives a long batch up when `stop` is called. With ``checks`` a sink that should be current is
        asked whether it is.
        """
        with self._pushing:
            if self._metrics.is_fenced:
                raise Fenced(f"another process took {self.sink.name} over; make a new sink and feed to take it back")
            try:
                if checks:
                    self._check()
                result = self._push(until_stop)
            except _Stopped:
                self._give_up()
                return None
            except CnrStoreError as error:
                self._fail(error)
                raise
            except Exception as error:
                # A sink of the user's may raise anything: that must not end the thread, nor leave a batch half counted.
                failure = StorageFailure(f"pushing to {self.sink.name} failed ({type(error).__name__})")
                self._fail(failure)
                raise failure from error
            with self._changed:
                was_failing, self._metrics.error = self._metrics.error is not None, None
            if was_failing:
                logger.info("%s: all is well again", self.sink.name)
            return result

    def _check(self) -> None:
        """Begin a batch and drop it: a sink that lost what it showed, or was taken over, refuses."""
        with self._changed:
            published = self._published
            if published is None or self._due.everything or not self._is_current():
                return
        self.sink.begin(published.tables, full=False)
        self.sink.abort()

    def _push(self, until_stop: bool) -> PushResult | None:
        for _ in range(_RESTARTS):
            if not self._is_open:
                self._open()
            with self._changed:
                if self._published is None or self._is_current():
                    return None
                published = self._published
                full = self._shown is None or self._due.everything
                self._attempt = attempt = _PushAttempt(published.tables, full, until_stop)
                if full:
                    self._due = _Due()
            self.sink.begin(published.tables, full=full)
            try:
                attempt.state = self._write(attempt)
            except _TablesChanged:
                self.sink.abort()
                continue
            self.sink.commit(attempt.state)
            with self._changed:
                self._shown, self._attempt = attempt.state, None
                self._metrics.pushes += 1
                self._metrics.full_pushes += attempt.full
                self._metrics.rows += attempt.rows
                self._metrics.deleted += attempt.deleted
                self._behind_since = None if self._is_current() else attempt.taken_at
            return PushResult(attempt.state, attempt.rows, attempt.deleted, attempt.full)
        raise StorageFailure(f"the tables for {self.sink.name} changed {_RESTARTS} times while they were pushed")

    def _open(self) -> None:
        """Ask the sink what it has, and find out which rows it lacks."""
        served = self.sink.open()
        # Not under the lock: the source may hold a lock of its own while it gives a notice.
        published = self._source.published()
        with self._changed:
            self._published = self._published or published
            published, attempt, self._attempt = self._published, self._attempt, None
            if attempt is not None and served is not None and served == attempt.state:
                self._shown, self._is_open = served, True  # the commit succeeded: what is due came after it
                return
            if attempt is not None and served is not None and served == self._shown:
                self._due.everything |= attempt.full
                for changed in attempt.taken:
                    self._due.add(changed)
                self._is_open = True
                return
            self._shown = served
            # `changed_since` includes all notices until now; later notices add to it.
            self._due = _Due()
            if published is None:
                return
            if self._behind_since is None and served != published.state:
                self._behind_since = time.monotonic()
            if served is None or not served.continues(published.state):
                self._due.everything = True
        if served is not None and served.continues(published.state) and served != published.state:
            lacking = self._source.changed_since(served)
            with self._changed:
                self._due.everything |= lacking is None
                self._due.add(lacking or {})
        self._is_open = True

    def _write(self, attempt: _PushAttempt) -> SinkState:
        """Write the batch, and return the state that it is."""
        if attempt.full:
            for table in attempt.tables:
                row_ids = self._row_ids(attempt, table)
                for start in range(0, len(row_ids), self._chunk_rows):
                    chunk = np.asarray(row_ids[start : start + self._chunk_rows], np.int64)
                    self._put(attempt, self._read(attempt, {table: chunk})[0])
        while True:
            # A batch that is written for long would otherwise be chased by new versions: what is left is read at once.
            changed, notice = self._take(attempt)
            if _count(changed) > self._max_rows_at_once and attempt.chases < _CHASES:
                attempt.chases += 1
                for piece in _pieces(changed, self._chunk_rows):
                    self._put(attempt, self._read(attempt, piece)[0])
                continue
            pieces = []
            while changed:
                rows, seen = self._read(attempt, changed)
                pieces.append(rows)
                if seen.notices == notice.notices:
                    break
                changed, notice = self._take(attempt)
            for rows in pieces:
                self._put(attempt, rows)
            return notice.state

    def _take(self, attempt: _PushAttempt) -> tuple[dict[str, RowIds], _Notice]:
        """Take what is due, and which state it leads to."""
        with self._changed:
            notice = self._last_notice(attempt)
            changed = self._due.joined()
            self._due = _Due()
            attempt.taken.append(changed)
            attempt.taken_at = time.monotonic()
            return changed, notice

    def _last_notice(self, attempt: _PushAttempt) -> _Notice:
        """Return the last notice; end the batch if its tables differ from the batch's. The caller holds the lock."""
        assert self._published is not None
        if self._due.everything or self._published.tables != attempt.tables:
            self._due.everything = True
            raise _TablesChanged
        return _Notice(self._notices, self._published.state)

    def _row_ids(self, attempt: _PushAttempt, table: str) -> Sequence[int] | RowIds:
        try:
            return self._source.row_ids(table)
        except TableNotFound:
            self._await_other_tables(attempt)
            raise

    def _read(self, attempt: _PushAttempt, row_ids: Mapping[str, RowIds]) -> tuple[_Rows, _Notice]:
        """Read rows of the last noticed state, so that all later changes of them come with later notices."""
        deadline = time.monotonic() + _NOTICE_TIMEOUT_S
        while True:
            with self._changed:
                notice = self._last_notice(attempt)
            try:
                found = self._source.read_rows(row_ids)
            except TableNotFound:
                self._await_other_tables(attempt)
                raise
            if found.version == notice.state.version:
                return _Rows(row_ids, found), notice
            with self._changed:
                # The source serves a version without a notice so far.
                left_s = deadline - time.monotonic()
                if not self._changed.wait_for(partial(self._has_notice_after, notice), left_s):
                    raise StorageFailure(
                        f"the source of {self.sink.name} serves version {found.version}, and gave no notice after "
                        f"{notice.state.version}: call notice() after each version",
                        version=found.version, expected=notice.state.version, found=found.version,
                    )  # fmt: skip

    def _await_other_tables(self, attempt: _PushAttempt) -> None:
        """Wait for the notice of a version without a table of the batch; that ends the batch."""
        with self._changed:
            if self._changed.wait_for(
                lambda: self._published is not None and self._published.tables != attempt.tables, _NOTICE_TIMEOUT_S
            ):
                self._due.everything = True
                raise _TablesChanged

    def _has_notice_after(self, notice: _Notice) -> bool:
        return self._notices > notice.notices

    def _put(self, attempt: _PushAttempt, rows: _Rows) -> None:
        if attempt.until_stop and self._stops:
            raise _Stopped
        for table, row_ids in rows.row_ids.items():
            values, present = rows.found.tables[table]
            if present.all():
                self.sink.put(table, row_ids, values)
            else:
                if present.any():
                    self.sink.put(table, row_ids[present], values[present])
                if not attempt.full or attempt.taken:  # a full batch has none of them, unless it put them meanwhile
                    self.sink.delete(table, row_ids[~present])
                    attempt.deleted += int((~present).sum())
            attempt.rows += int(present.sum())

    def _fail(self, error: CnrStoreError) -> None:
        with self._changed:
            before, self._metrics.error = self._metrics.error, error
            self._metrics.failures += 1
            self._metrics.is_fenced = isinstance(error, Fenced)
        if str(before) != str(error):  # once, not for each attempt
            logger.warning("%s: %s: %s", self.sink.name, type(error).__name__, error)
        self._give_up()

    def _give_up(self) -> None:
        self._is_open = False  # the next attempt opens the sink, which returns its state
        try:
            self.sink.abort()
        except Exception:  # noqa: BLE001 - the push has ended already; `open` undoes what is left
            return


class _Stopped(Exception):
    """The feed is stopped in the middle of a batch."""


class _TablesChanged(Exception):
    """The batch has to be started again, as a full one."""


class _Notice(NamedTuple):
    """The number of notices so far, and the state of the last one."""

    notices: int
    state: SinkState


class _Rows(NamedTuple):
    row_ids: Mapping[str, RowIds]
    found: SourceRows


@dataclass(slots=True)
class _Due:
    """Rows that the sink lacks, by the notices; with ``everything`` it lacks all."""

    everything: bool = False
    row_ids: dict[str, list[RowIds]] = field(default_factory=dict)

    def add(self, changed: Mapping[str, RowIds | None]) -> None:
        for table, row_ids in changed.items():
            if row_ids is not None and len(row_ids) and not self.everything:
                waiting = self.row_ids.setdefault(table, [])
                waiting.append(np.array(row_ids, np.int64))
                if len(waiting) > _MOST_WAITING:  # a sink that is away for long costs the ids once
                    self.row_ids[table] = [np.unique(np.concatenate(waiting))]
        if self.everything:
            self.row_ids.clear()

    def count(self, table: str) -> int:
        """Return the number of remembered rows of a table; a repeated row may count twice."""
        return sum(map(len, self.row_ids.get(table, ())))

    def joined(self) -> dict[str, RowIds]:
        return {table: np.unique(np.concatenate(waiting)) for table, waiting in self.row_ids.items()}


@dataclass(slots=True)
class _PushAttempt:
    """One batch: what it took of what was due, and what became of it."""

    tables: Mapping[str, SinkTable]
    full: bool
    until_stop: bool
    taken_at: float = 0.0
    taken: list[dict[str, RowIds]] = field(default_factory=list)
    state: SinkState | None = None
    chases: int = 0
    rows: int = 0
    deleted: int = 0


def _count(changed: Mapping[str, RowIds]) -> int:
    return sum(len(row_ids) for row_ids in changed.values())


def _pieces(changed: Mapping[str, RowIds], chunk_rows: int) -> Iterator[dict[str, RowIds]]:
    for table, row_ids in changed.items():
        for start in range(0, len(row_ids), chunk_rows):
            yield {table: row_ids[start : start + chunk_rows]}
