"""Rows of the newest state, kept up to date in memory: what an inference server looks up.

One thread at a time moves the loader on: it reads the next commit records, puts what changed beside the rows that are
served, and makes it visible by a pointer swap; lookups never wait for it. Whatever is wrong with the store, the version
that is served stays, and the reason is told by `Poll.error`, the metrics and the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from cnr_store.consume.background import Repeating
from cnr_store.consume.candidate import Candidate, Check, pass_gate
from cnr_store.consume.following import Target, pause_s, plan_between, repeats, wanted_version
from cnr_store.consume.held import Holds, Overlay, RowKind, Served, row_kind
from cnr_store.consume.holds import FollowingCursor, leased
from cnr_store.consume.loading import load_table
from cnr_store.consume.memory import ANONYMOUS, Memory
from cnr_store.consume.metrics import LoaderMetrics, Poll, Tally
from cnr_store.consume.moving import Apply, Compare, Reread, Same
from cnr_store.consume.shards import Shard, check_shard
from cnr_store.consume.shared_memory import SharedMemory
from cnr_store.consume.sinks import RowSink
from cnr_store.consume.sinks.feed import SinkFeed
from cnr_store.consume.sources import LoaderSource
from cnr_store.consume.views import MIN_VIEW_S, Batch, Lookups, Publisher, TableChange, View
from cnr_store.errors import (
    BadInput,
    CnrStoreError,
    CorruptRecord,
    CorruptStore,
    NotFound,
    StorageFailure,
    TableNotFound,
    VersionNotFound,
    VersionRefused,
)
from cnr_store.layout import branch_of
from cnr_store.log import wall_ms
from cnr_store.records import DenseEntry, LogEntry, TableSchema
from cnr_store.segment import SegmentReader
from cnr_store.snapshot import Snapshot
from cnr_store.store import Store
from cnr_store.table_codes import Array, EscapeRows
from cnr_store.types import RowIds
from cnr_store.workers import Workers

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MOST_RECORDS = 8
"""So many records are followed one by one; a loader that is further behind goes to the newest state in one step."""

LONGEST_PATH = 256
"""Records behind the version served that are kept, for what they tell of the way to a newer one."""

MOST_COMPLAINTS = 64
"""Distinct errors that are logged before they are told again."""

_TROUBLE = (CnrStoreError, OSError, MemoryError)
"""What may go wrong with a store, or for want of memory, while a version is served that can go on being served."""


@dataclass(frozen=True, slots=True)
class _State:
    """What is known of a version that was staged or is served.

    ``changed`` are its changed rows by table (None: any row), ``changed_dense`` its changed dense tensors.
    """

    entry: LogEntry
    readers: Mapping[str, SegmentReader] = field(default_factory=dict)
    dense: Mapping[str, DenseEntry] = field(default_factory=dict)
    changed: Mapping[str, RowIds | None] = field(default_factory=dict)
    changed_dense: frozenset[str] = frozenset()

    @property
    def version(self) -> int:
        return self.entry.record.v


@dataclass(slots=True)
class _Refusal:
    """A state that was turned down, as the newest record that has it, and why."""

    entry: LogEntry
    error: VersionRefused


class Loader:
    """Tables of a store in memory, at one version for every lookup, following the store by `poll`.

    The constructor loads the state and blocks. Afterwards lookups come from any thread, as many as there are; they
    neither wait for each other nor for a poll. `poll`, `apply` and the others that move it are safe from any thread.

    Parameters
    ----------
    store
        A `Store`, on a branch or not, or where one is; then ``branch`` and ``storage_options`` belong to it.
    tables
        Names of the tables to hold; None holds all, new ones too.
    dense
        Names of the dense tensors to hold, where the version has them; None holds all.
    shard
        Which rows: a `RowRange`, a `HashShard`, or one of them (None for all rows) by table.
    served
        What lookups return: ``float32``, ``float16``, ``bfloat16`` (its bits, uint16) or ``int8`` (fused 8-bit rows);
        None is each table's own dtype. One for all tables, or by table.
    holds
        ``values`` or ``codes``; ``auto`` holds values wherever differences can be applied to them. Codes of a float32
        lattice table take half the memory and are decoded as they are looked up. One for all tables, or by table.
    version, tag, channel
        What to serve, at most one of them; without, the newest state.
    follow
        False stays at the version that was loaded, as `pin` does.
    shared
        A folder of a file system in memory (``/dev/shm/ctr``) for the tables, from which other processes serve too, by
        `AttachedTables`.
    publish
        ``poll`` makes versions visible as they come, one by one. With ``apply`` they wait for `apply`.
    validate
        Called with a `Candidate` before a version is published; False or an exception refuses it for good.
    warm_up
        Called with the `Candidate` of the first version, or with ``warm_up_each`` of every one, after ``validate``.
    cursor
        Name of a registered cursor that is moved along: expiry and folding leave what this loader still needs. It
        counts for a day after its last move.
    poll_interval_s
        How often the thread of `start` looks, in seconds.
    threads
        For reading and decoding; None takes those of a store that is given, else the CPUs, at most 8.

    Raises
    ------
    BadInput, NotFound, CorruptStore, StorageFailure, Unsupported
        The state cannot be loaded.
    VersionRefused
        By ``validate`` or ``warm_up``: there is nothing else to serve.

    Examples
    --------
    >>> store = Store.create("memory://doctest-loader")
    >>> with store.writer() as writer, writer.begin(step=10) as txn:
    ...     txn.write_table("user", np.ones((4, 2), np.float32))
    >>> with Loader(store) as loader:
    ...     loader.lookup("user", [3, 1]).tolist(), loader.step
    ([[1.0, 1.0], [1.0, 1.0]], 10)
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        tables: Sequence[str] | None = None,
        *,
        dense: Sequence[str] | None = None,
        shard: Shard | Mapping[str, Shard | None] | None = None,
        served: Served | Mapping[str, Served | None] | None = None,
        holds: Literal["auto"] | Holds | Mapping[str, Literal["auto"] | Holds] = "auto",
        version: int | None = None,
        tag: str | None = None,
        channel: str | None = None,
        branch: str | None = None,
        follow: bool = True,
        shared: str | os.PathLike[str] | None = None,
        publish: Literal["poll", "apply"] = "poll",
        validate: Check | None = None,
        warm_up: Check | None = None,
        warm_up_each: bool = False,
        cursor: str | None = None,
        poll_interval_s: float = 0.5,
        threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._target = Target(version, tag, channel)
        self._shard = shard if isinstance(shard, Mapping) else check_shard(shard)
        if publish not in ("poll", "apply"):
            raise BadInput(f"publish is 'poll' or 'apply', found {publish!r}", found=publish)
        if not poll_interval_s > 0:
            raise BadInput(f"poll_interval_s is above 0, found {poll_interval_s}", found=poll_interval_s)
        self._tables = None if tables is None else tuple(dict.fromkeys(tables))
        self._dense = None if dense is None else frozenset(dense)
        self._served, self._holds, self._publish = served, holds, publish
        self._validate, self._warm_up, self._warms_each = validate, warm_up, warm_up_each
        self._interval_s = poll_interval_s
        self._owns_store = not isinstance(store, Store)
        if isinstance(store, Store):
            if branch is not None or storage_options is not None:
                raise BadInput("branch and storage_options belong to a URL; this store is open already")
            self._store = store
        else:
            self._store = Store.open(
                os.fspath(store), branch=branch, storage_options=storage_options, threads=threads
            )  # fmt: skip
        self._own_workers = Workers(threads) if threads is not None and not self._owns_store else None
        # A bound parameter has changed when `apply` returns, so nothing may wait for lookups that began before.
        min_view_s = 0.0 if publish == "apply" else MIN_VIEW_S
        self._shared = None if shared is None else SharedMemory(os.fspath(shared))
        self._memory: Memory = ANONYMOUS if self._shared is None else self._shared
        if self._shared is None:
            self._publisher = Publisher(min_view_s=min_view_s)
        else:
            self._publisher = self._shared.publisher(min_view_s=min_view_s)
        self._lookups = Lookups(self._publisher)
        self._source = LoaderSource(
            self._publisher, store=self._store.uuid, branch=branch_of(self._store.commit_log.prefix),
            scope="" if tables is None and shard is None else f"{sorted(self._tables or ['*'])} {shard}",
        )  # fmt: skip
        self._lock = threading.RLock()
        """Held while the loader moves, however long that takes."""
        self._swap = threading.RLock()
        """Held while something is staged, checked or made visible; what holds it never reads the store."""
        self._tally = Tally()
        self._lookups_done = 0
        self._complaints: set[str] = set()
        self._refusal: _Refusal | None = None
        self._pinned: int | None = None
        self._behind_since_ms: int | None = None
        self._wanted: int | None = None
        self._trouble: Exception | None = None
        self._is_unreachable = False
        self._retry_at_s = 0.0
        self._next_look_s = 0.0
        self._checked_s = time.monotonic()
        self._binding: Any = None
        self._thread: Repeating | None = None
        self._feeds: list[SinkFeed] = []
        self._is_closed = False
        self._states: list[_State] = []
        """What is served, and behind it what is staged, in order."""
        self._path: list[LogEntry] = []
        """Records read behind the newest state, in order."""
        self._cursor = None if cursor is None else FollowingCursor(self._store, cursor)
        try:
            self._seen = self._newest_entry()
            self._load()
            if self._cursor is not None:
                self._cursor.move(self.version)
        except BaseException:
            self._release()
            raise
        if not follow:
            self._pinned = self.version

    # What is looked up.

    def lookup(self, table: str, row_ids: npt.ArrayLike, out: Array | torch.Tensor | None = None) -> Any:
        """Return rows of a table: (n, dim), in the order asked for, as `served` says; absent rows are the fill.

        Parameters
        ----------
        row_ids
            int64 (n,), repeats allowed; anything that numpy takes for that.
        out
            (n, dim) of the served dtype, an array or a CPU tensor, filled and returned; without, a new array.

        Raises
        ------
        TableNotFound, BadRowIds, BadShape, BadDtype
        """
        into = None if out is None else {table: _as_array(out)}
        self._lookups_done += 1
        rows = self._lookups.lookup({table: row_ids}, (), into).rows[table]
        return rows if out is None else out

    def lookup_many(
        self,
        row_ids: Mapping[str, npt.ArrayLike],
        dense: Sequence[str] = (),
        out: Mapping[str, Array] | None = None,
    ) -> Batch:
        """Return rows of several tables, and dense tensors, all of one version.

        Raises
        ------
        TableNotFound, BadRowIds, BadShape, BadDtype
        """
        self._lookups_done += 1
        return self._lookups.lookup(row_ids, dense, None if out is None else {t: _as_array(o) for t, o in out.items()})

    @property
    def version(self) -> int:
        """The version that lookups see."""
        return self._view.version

    @property
    def step(self) -> int:
        """The training step of it."""
        return self._view.step

    @property
    def tables(self) -> dict[str, TableSchema]:
        """Table name to schema, of that version."""
        return {name: table.schema for name, table in self._view.tables.items()}

    @property
    def dense(self) -> Mapping[str, Array]:
        """Dense tensors by name, of that version (bfloat16 as uint16, bool as uint8); not to be written."""
        return self._view.dense

    @property
    def store(self) -> Store:
        """The store that is followed."""
        return self._store

    @property
    def staleness_s(self) -> float:
        """For how long a newer state than the one served has been there, as far as is known; see `LoaderMetrics`."""
        since, wanted = self._behind_since_ms, self._wanted
        if since is None or wanted == self.version:
            return 0.0
        return max(0.0, (wall_ms() - since) / 1000)

    def metrics(self) -> LoaderMetrics:
        """Return counts and the state now. No I/O, no lock: the numbers may be of slightly different moments."""
        tally = self._tally
        return LoaderMetrics(
            version=self.version,
            step=self.step,
            staged=self._staged_version(),
            staleness_s=self.staleness_s,
            age_s=max(0.0, (wall_ms() - self._states[0].entry.record.ts_ms) / 1000),
            checked_s=time.monotonic() - self._checked_s,
            cursor=None if self._cursor is None else self._cursor.version,
            load_s=tally.load_s,
            apply_s=tally.apply_s,
            polls=tally.polls,
            moves=tally.moves,
            rows=tally.rows,
            bytes=tally.bytes,
            errors=tally.errors,
            failures=tally.failures,
            refused=tally.refused,
            lookups=self._lookups_done,
            retries=self._lookups.retries,
            error=None if self._trouble is None else f"{type(self._trouble).__name__}: {self._trouble}",
        )

    # What moves it.

    def poll(self) -> Poll:
        """Look for new versions and serve them, each atomically for lookups. One request when there is nothing new.

        Blocks until what is new is decoded; lookups go on meanwhile. An error of the store, or of a version, is told in
        `Poll.error` and nothing else happens: the version that was served stays, and the next call tries again.

        Raises
        ------
        BadInput
            The loader is closed.
        """
        with self._lock:
            return self._look(is_patient=False)

    async def poll_async(self) -> Poll:
        """As `poll`, on a thread of its own: the event loop goes on."""
        return await asyncio.to_thread(self.poll)

    def apply(self) -> int:
        """Make what was staged visible (``publish="apply"``) and return the version served. Never reads the store.

        Parameters of a module that was bound change here and nowhere else. Does not wait for a poll that is at work on
        another thread: what that is about to stage is visible with the next call.
        """
        if self._swap.acquire(blocking=False):
            try:
                self._show()
            finally:
                self._swap.release()
        return self.version

    def pin(self, version: int | None = None) -> None:
        """Serve a version, the one served now if None, and stay there until `unpin`. Blocks while it is loaded.

        With ``publish="apply"`` it waits for `apply` as any other.

        Raises
        ------
        VersionNotFound, VersionExpired, VersionRefused, CorruptStore, StorageFailure
            It cannot be served: nothing has changed.
        """
        with self._lock:
            self._check_open()
            if version is None:
                self._drop_staged()
                self._pinned = self.version
            else:
                if version > self._seen.record.v:
                    self._see(self._newest_entry())
                self._go(Target(version=version), insists=True)
                self._pinned = version
            self._note_wanted()

    def rollback(self, version: int) -> None:
        """Serve an older version, and stay there until `unpin`: for the case that the newest is bad. As `pin`.

        The store is not changed: `Store.rollback` does that for all.

        Raises
        ------
        BadInput
            The version is not older than the one served.
        VersionNotFound, VersionExpired, VersionRefused, CorruptStore, StorageFailure
            It cannot be served: nothing has changed.
        """
        with self._lock:
            if not 0 <= version < self.version:
                raise BadInput(
                    f"version {version} is not older than {self.version}, which is served; use pin() to go ahead",
                    found=version,
                )
            self.pin(version)

    def unpin(self) -> None:
        """Follow again what the loader was opened for; the next poll goes there."""
        with self._lock:
            self._pinned = None

    def start(self) -> None:
        """Poll on a thread of its own every ``poll_interval_s``, less often while that fails. One thread at most.

        The thread ends with `stop`, `close`, or when nobody has the loader any more.
        """
        with self._lock:
            self._check_open()
            if self._thread is None or not self._thread.is_running:
                self._thread = Repeating(self, Loader._look_again, name="cnr-loader")

    def stop(self) -> None:
        """End the thread of `start` and wait for a poll that runs. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    def bind(self, module: torch.nn.Module, *, names: Mapping[str, str] | None = None) -> None:
        """Let a module's tensors show the tables and dense tensors of the version served, from now on.

        A parameter on the CPU in the dtype that is held takes the held rows as its memory: one copy for lookups and the
        module. Rows of any other are copied there. Both change in `apply` alone.

        Parameters
        ----------
        module
            Its ``state_dict`` names its tensors.
        names
            Name in the module to name in the store, where they differ.

        Raises
        ------
        BadInput
            The loader publishes as it polls, shares its memory, has a module already, or holds a bound table by key or
            as int8.
        TableNotFound, BadShape, BadDtype
        """
        from cnr_store.consume.binding import ModuleBinding

        if self._publish != "apply":
            raise BadInput("a module's parameters change in apply(): open the loader with publish='apply'")
        if self._shared is not None:
            raise BadInput("a loader that shares its tables has no module; look rows up, or open another loader")
        with self._lock, self._swap:
            if self._binding is not None:
                raise BadInput("the loader has a module already; open another loader for this one")
            self._publisher.fold()
            view, state = self._view, self._states[0]
            binding = ModuleBinding(module, names, view.tables, state.dense)
            binding.show(view.tables, dict.fromkeys(view.tables), view.dense, state.dense, view.dense)
            self._binding = binding

    def add_sink(self, sink: RowSink, *, start: bool = True) -> SinkFeed:
        """Push each version that is published to a sink as well, behind serving; return the feed that does so.

        A sink that fails delays nobody: its feed tries again, and `SinkFeed.metrics` tells. It ends with the loader.

        Parameters
        ----------
        start
            Push on a thread of its own; with False only in `SinkFeed.push`.
        """
        with self._lock, self._swap:
            self._check_open()
            feed = SinkFeed(self._source, sink)
            self._feeds.append(feed)
            feed.notice(self._source.described(self._view), dict.fromkeys(self._view.tables))
        if start:
            feed.start()
        return feed

    def close(self) -> None:
        """End the thread and release memory and, if the loader opened it, the store. A second call does nothing."""
        self.stop()
        for feed in self._feeds:
            feed.stop()
        with self._lock, self._swap:
            self._release()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Loader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # How it looks.

    def _look_again(self) -> float:
        """Do what is due in the background, a look or a fold; return how long to rest."""
        try:
            with self._lock:
                if self._is_closed:
                    return self._interval_s
                now = time.monotonic()
                if now >= self._next_look_s:
                    self._next_look_s = now + self._interval_s  # stands if the look raises
                    self._look(is_patient=True)
                    failures = self._tally.failures if self._is_unreachable else 0
                    self._next_look_s = time.monotonic() + pause_s(self._interval_s, failures, random())
                else:
                    with self._swap:
                        self._publisher.fold(wait=False)
        except Exception as error:  # noqa: BLE001  a bug, ours or a callback's: serving goes on, and the log has it
            self._tally.errors += 1
            self._complain(error)
        rest = self._next_look_s - time.monotonic()
        due = self._publisher.fold_due_in_s()
        return max(0.0, rest if due is None else min(rest, max(due, 0.01)))

    def _look(self, *, is_patient: bool) -> Poll:
        self._check_open()
        tally = self._tally
        before, rows, size, began = self._states[-1].version, tally.rows, tally.bytes, time.monotonic()
        tally.polls += 1
        error: Exception | None = None
        try:
            if self._follow(is_patient=is_patient):
                error = self._trouble
            else:
                self._judge(None)
        except _TROUBLE as trouble:
            error = trouble
            self._judge(trouble)
        self._note_wanted()
        if self._cursor is not None:
            self._cursor.move(self.version)
        moved = self._states[-1].version != before
        if moved:
            tally.apply_s = time.monotonic() - began
        return Poll(
            version=self.version,
            step=self.step,
            staged=self._staged_version(),
            moved=moved,
            rows=tally.rows - rows,
            bytes=tally.bytes - size,
            apply_s=tally.apply_s if moved else 0.0,
            error=error,
        )

    def _follow(self, *, is_patient: bool) -> bool:
        """Read what is new in the log and go there, record by record; whether it rests from an earlier failure."""
        news, trouble = self._read_news()
        if len(news) > MOST_RECORDS:
            self._see(self._newest_entry())
            news = [self._seen]
        elif self._publish == "apply" or not self._aim.is_newest:
            for entry in news[:-1]:
                self._see(entry)
            news = news[-1:]
        if is_patient and not news and trouble is None and time.monotonic() < self._retry_at_s:
            return True
        failure: CnrStoreError | None = None
        for entry in news or [self._seen]:
            self._see(entry)
            try:
                self._go(self._aim)
                failure = None
            except StorageFailure:
                raise
            except CnrStoreError as error:
                failure = error  # the next record may lead past it
        if isinstance(failure, CorruptStore | NotFound) and trouble is None and self._see(self._newest_entry()):
            # What it needs may have been folded, expired and deleted since: the newest state does not need it.
            self._go(self._aim)
            failure = None
        if failure is not None:
            raise failure
        if trouble is not None:
            raise trouble
        return False

    def _read_news(self) -> tuple[list[LogEntry], Exception | None]:
        """The records behind the newest that is known, at most one more than are followed, and why no more came."""
        news: list[LogEntry] = []
        self._is_unreachable = True
        try:
            while len(news) <= MOST_RECORDS:
                entry = self._store.poll(news[-1] if news else self._seen)
                if entry is None:
                    break
                news.append(entry)
        except (CnrStoreError, OSError) as error:
            return news, error
        self._is_unreachable = False
        self._checked_s = time.monotonic()
        return news, None

    def _newest_entry(self) -> LogEntry:
        """The newest record that can be read: a torn one is nobody's acknowledged state."""
        log = self._store.commit_log
        for _ in range(2):  # a reply may have been cut short on its way
            try:
                return log.latest()
            except CorruptRecord as error:
                torn = error
        entry, _ = log.tail()
        self._complain(torn)
        return entry

    def _see(self, entry: LogEntry) -> bool:
        """Take a record as the newest that is known; whether it is newer than what was."""
        if entry.record.v <= self._seen.record.v:
            return False
        self._seen = entry
        self._path = [*self._path[-LONGEST_PATH:], entry]
        if self._behind_since_ms is None:
            with suppress(CnrStoreError):
                if wanted_version(self._aim, entry.record) != self.version:
                    self._behind_since_ms = entry.record.ts_ms
        return True

    @property
    def _aim(self) -> Target:
        return self._target if self._pinned is None else Target(version=self._pinned)

    def _note_wanted(self) -> None:
        with suppress(CnrStoreError):
            self._wanted = wanted_version(self._aim, self._seen.record)
        if self._wanted == self.version:
            self._behind_since_ms = None
        elif self._behind_since_ms is None:
            self._behind_since_ms = self._seen.record.ts_ms

    def _judge(self, error: Exception | None) -> None:
        """Take the outcome of a look into counts, log and the time of the next attempt."""
        tally = self._tally
        if error is None:
            if self._trouble is not None:
                logger.info("%s is served at version %d again without trouble", self._store.url, self.version)
            self._trouble = None
            self._complaints.clear()
        else:
            # Without the frames, which would keep the arrays of a failed move alive.
            self._trouble = error.with_traceback(None)
            self._complain(error)
        if error is None or isinstance(error, VersionRefused):
            tally.failures, self._retry_at_s = 0, 0.0
            return
        tally.errors += 1
        tally.failures += 1
        self._retry_at_s = time.monotonic() + pause_s(self._interval_s, tally.failures, random())

    def _complain(self, error: Exception) -> None:
        """Log an error once, until all is well again."""
        said = f"{type(error).__name__}: {error}"
        if said in self._complaints:
            return
        if len(self._complaints) >= MOST_COMPLAINTS:
            self._complaints.clear()
        self._complaints.add(said)
        served = f"version {self.version} stays" if self._states else "nothing is served yet"
        logger.warning("%s: %s; %s", self._store.url, said, served)

    # How it moves.

    def _load(self) -> None:
        """The first state; where it is folded and deleted while it is loaded, a newer one."""
        began = time.monotonic()
        while True:
            version = wanted_version(self._target, self._seen.record)
            try:
                entry = self._entry_of(version)
                with leased(self._store, version):
                    self._take(entry, None)
                break
            except (CorruptStore, NotFound):
                newest = self._newest_entry()
                if newest.record.v <= self._seen.record.v:
                    raise
                self._seen = newest
        self._note_wanted()
        self._tally.load_s = time.monotonic() - began

    def _go(self, target: Target, *, insists: bool = False) -> None:
        """Serve, or stage, what the target means by the newest record that is known."""
        if self._publish == "poll" and len(self._states) > 1:
            with self._swap:
                self._show()  # it could not be told to other processes before
        version = wanted_version(target, self._seen.record)
        newest = self._states[-1]
        if version == newest.version:
            return
        entry = self._entry_of(version)
        refusal = self._refusal
        if refusal is not None and not insists and repeats(entry, refusal.entry):
            if entry.record.v > refusal.entry.record.v:
                refusal.entry = entry
            raise refusal.error
        move = plan_between(newest.entry, entry, self._path)
        if isinstance(move, Same):
            with self._swap:
                self._publisher.stage(version, entry.record.step, {})
                self._states.append(replace(newest, entry=entry, changed={}, changed_dense=frozenset()))
                if self._publish == "poll":
                    self._show()
        elif isinstance(move, Apply):
            self._take(entry, move)
        else:
            with leased(self._store, version):
                self._take(entry, move)
        self._path = [known for known in self._path if known.record.v > version]

    def _entry_of(self, version: int) -> LogEntry:
        for entry in (self._seen, *self._path, *(state.entry for state in self._states)):
            if entry.record.v == version:
                return entry
        found = self._store.commit_log.read(version)
        if found is None:
            raise VersionNotFound(f"{self._store.url} has no version {version}", version=version)
        return found

    def _take(self, entry: LogEntry, move: Apply | Reread | Compare | None) -> None:
        """Read what makes the newest state that of ``entry``, everything if there is none, and stage or publish it."""
        last = self._states[-1] if self._states else None
        store = self._store
        readers = {} if last is None else last.readers
        snapshot = Snapshot(store.storage, entry, self._workers, known=readers)
        names = self._names_in(snapshot)
        if self._publisher.candidate is None:
            with self._swap:
                self._publisher.fold()
        entries = {name: dense for name, dense in snapshot.dense.items() if self._dense is None or name in self._dense}
        changed_dense = frozenset(
            name for name, dense in entries.items() if last is None or not _is_same(dense, last.dense.get(name))
        )
        dense: dict[str, Array] | None = None
        if last is None or changed_dense or entries.keys() != last.dense.keys():
            kept = {} if self._publisher.newest is None else self._publisher.newest.dense
            dense = {n: snapshot.read_dense(n) if n in changed_dense else kept[n] for n in entries}
        # Only around what is read: folding takes memory too, and keeps it whatever becomes of this.
        with self._memory.attempt():
            changes, escapes, rows, size = self._read_changes(snapshot, names, move)
        state = _State(
            entry, snapshot.known_readers, entries, {name: _rows_of(change) for name, change in changes.items()},
            changed_dense,
        )  # fmt: skip
        self._admit(state, changes, escapes, dense)
        if last is not None:
            self._tally.rows += rows
            self._tally.bytes += size

    def _read_changes(
        self, snapshot: Snapshot, names: Sequence[str], move: Apply | Reread | Compare | None
    ) -> tuple[dict[str, TableChange], dict[str, EscapeRows], int, int]:
        del move
        changes: dict[str, TableChange] = {}
        escapes: dict[str, EscapeRows] = {}
        rows = size = 0
        newest = self._publisher.newest
        for name in () if newest is None else newest.tables:
            if name not in names:
                changes[name] = None
        for name in names:
            schema = snapshot.tables[name]
            kind = self._kind_of(name, schema)
            table = load_table(
                snapshot.readers, name, kind, self._workers, shard=self._shard_of(name), memory=self._memory
            )
            changes[name], escapes[name] = table.held, table.escapes
            rows += table.held.num_rows
            size += table.held.num_rows * kind.dim * 4
        return changes, escapes, rows, size

    def _kind_of(self, table: str, schema: TableSchema) -> RowKind:
        served = self._served.get(table) if isinstance(self._served, Mapping) else self._served
        holds = self._holds.get(table, "auto") if isinstance(self._holds, Mapping) else self._holds
        return row_kind(schema, served, holds)

    def _shard_of(self, table: str) -> Shard | None:
        return self._shard.get(table) if isinstance(self._shard, Mapping) else self._shard

    def _names_in(self, snapshot: Snapshot) -> list[str]:
        """The tables of a version that are held here."""
        if self._tables is None or snapshot.is_empty:
            return list(snapshot.tables)
        missing = [name for name in self._tables if name not in snapshot.tables]
        if missing:
            raise TableNotFound(
                f"version {snapshot.version} has no table {missing[0]!r}; it has {sorted(snapshot.tables)}",
                table=missing[0], version=snapshot.version,
            )  # fmt: skip
        return list(self._tables)

    def _admit(
        self,
        state: _State,
        changes: Mapping[str, TableChange],
        escapes: Mapping[str, EscapeRows],
        dense: Mapping[str, Array] | None,
    ) -> None:
        """Stage a version, let the caller's checks look at it, and publish it if that is done at once."""
        record = state.entry.record
        is_first = not self._states
        with self._swap:
            view = self._publisher.stage(record.v, record.step, changes, dense, escapes)
            try:
                if self._binding is not None:
                    self._check_binding(view, state)
                pass_gate(
                    Candidate(view, None if is_first else self.version),
                    validate=self._validate,
                    warm_up=self._warm_up if is_first or self._warms_each else None,
                )
            except VersionRefused as error:
                self._publisher.unstage()
                self._refusal = _Refusal(state.entry, error)
                self._tally.refused += 1
                raise
            except BaseException:
                self._publisher.unstage()
                raise
            self._states.append(state)
            if is_first or self._publish == "poll":
                self._show()

    def _check_binding(self, view: View, state: _State) -> None:
        try:
            self._binding.check(view.tables, state.dense)
        except CnrStoreError as error:
            raise VersionRefused(
                f"the bound module cannot show version {state.version}: {error}", version=state.version
            ) from error

    def _show(self) -> None:
        """Make what is staged visible. With ``_swap`` held."""
        view = self._publisher.reveal()
        if self._states[-1].version != view.version or len(self._states) == 1:
            return
        shown, self._states = self._states[1:], self._states[-1:]
        self._tally.moves += len(shown)
        changed = _union(shown)
        for feed in self._feeds:
            feed.notice(self._source.described(view), changed)
        if self._binding is not None:
            self._publisher.fold()
            state = self._states[0]
            moved = frozenset[str]().union(*(one.changed_dense for one in shown))
            self._binding.show(self._view.tables, changed, self._view.dense, state.dense, moved)

    def _drop_staged(self) -> None:
        with self._swap:
            while self._publisher.candidate is not None:
                self._publisher.unstage()
            del self._states[1:]

    def _staged_version(self) -> int | None:
        states = self._states
        return states[-1].version if len(states) > 1 else None

    @property
    def _view(self) -> View:
        return self._publisher.newest_view()[0]

    @property
    def _workers(self) -> Workers:
        return self._store.workers if self._own_workers is None else self._own_workers

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadInput("the loader is closed; open another")

    def _release(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._publisher.close()
        if self._shared is not None:
            self._shared.close()
        if self._own_workers is not None:
            self._own_workers.close()
        if self._owns_store:
            self._store.close()


def _as_array(out: Any) -> Array:
    if isinstance(out, np.ndarray):
        return out
    from cnr_store.consume.binding import array_of

    return array_of(out)


def _is_same(entry: DenseEntry, before: DenseEntry | None) -> bool:
    return before is not None and (entry.digest, entry.dtype, entry.shape) == (
        before.digest,
        before.dtype,
        before.shape,
    )


def _rows_of(change: TableChange) -> RowIds | None:
    return np.sort(change.ids) if isinstance(change, Overlay) else None


def _union(states: Sequence[_State]) -> dict[str, RowIds | None]:
    """The changed rows of versions that become visible together."""
    union: dict[str, RowIds | None] = {}
    for state in states:
        for table, rows in state.changed.items():
            before = union.get(table, rows)
            union[table] = None if rows is None or before is None else np.union1d(before, rows)
    return union
