"""Rows of the newest state, kept up to date in memory: what an inference server looks up.

One thread at a time moves the loader on: it reads the next commit records, puts what changed beside the rows that are
served, and makes it visible by a pointer swap; lookups never wait for it. Whatever is wrong with the store, the version
that is served stays, and the reason is told by `Poll.error`, the metrics and the log.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from random import random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy.typing as npt

from cnr_store.errors import (
    BadInput,
    CnrStoreError,
    CorruptStore,
    NotFound,
    StorageFailure,
    TableNotFound,
    VersionRefused,
)
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.layout import branch_of, check_name
from cnr_store.format.records import DenseEntry, TableSchema
from cnr_store.log.clock import wall_ms
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.arguments import checked_choice, checked_number
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Array
from cnr_store.serving.background import Repeating
from cnr_store.serving.candidate import Check, pass_gate
from cnr_store.serving.following import Target, pause_s, plan_between, repeats, wanted_version
from cnr_store.serving.holds import FollowingCursor, leased
from cnr_store.serving.log_tail import LogTail
from cnr_store.serving.metrics import LoaderMetrics, Poll, Tally
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.served_table import Holds, Served
from cnr_store.serving.rows.shards import Shard, check_shard
from cnr_store.serving.rows.shared_memory import SharedMemory
from cnr_store.serving.rows.views import MIN_VIEW_S, Batch, Lookups, Publisher, as_array
from cnr_store.serving.serving import Serving, State
from cnr_store.serving.sinks import RowSink
from cnr_store.serving.sinks.sink_feed import SinkFeed
from cnr_store.serving.sources import LoaderSource, scope_of
from cnr_store.serving.trouble import Trouble
from cnr_store.serving.update.update_plan import Apply, Compare, Move, Same
from cnr_store.serving.update.update_tables import Holding, move_tables
from cnr_store.store import Store

if TYPE_CHECKING:
    import torch

    from cnr_store.serving.binding import ModuleBinding
    from cnr_store.serving.rows.views import View

MOST_RECORDS = 8
"""So many records are followed one by one; a loader that is further behind goes to the newest state in one step."""

_TROUBLE = (CnrStoreError, OSError, MemoryError)
"""What may go wrong with a store, or for want of memory, while a version is served that can go on being served."""


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
    Conflict
        Another loader owns the folder ``shared``.
    VersionRefused
        By ``validate`` or ``warm_up``: there is nothing else to serve.

    Examples
    --------
    >>> import numpy as np
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
        for names, argument in ((tables, "tables"), (dense, "dense")):
            if isinstance(names, str):
                raise BadInput(f"{argument} takes a list of names, found {names!r}; give [{names!r}]", found=names)
        for by_table, argument in ((shard, "shard"), (served, "served"), (holds, "holds")):
            strange = sorted(by_table.keys() - set(tables)) if tables and isinstance(by_table, Mapping) else []
            if strange:
                raise BadInput(
                    f"{argument} names {strange[0]!r}, not one of the tables to hold: {sorted(set(tables or ()))}",
                    found=strange[0],
                )
        for one in shard.values() if isinstance(shard, Mapping) else (shard,):
            check_shard(one)
        self._shard = shard
        checked_choice("publish", publish, ("poll", "apply"))
        checked_number("poll_interval_s", poll_interval_s, above=0)
        if cursor is not None:
            check_name(cursor)
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
        try:
            self._shared = None if shared is None else SharedMemory(os.fspath(shared))
        except BaseException:
            if self._owns_store:
                self._store.close()
            raise
        self._own_workers = Workers(threads) if threads is not None and not self._owns_store else None
        self._memory: Memory = ANONYMOUS if self._shared is None else self._shared
        # A bound parameter has changed when `apply` returns, so nothing waits for lookups that began before.
        make = Publisher if self._shared is None else self._shared.publisher
        publisher = make(min_view_s=0.0 if publish == "apply" else MIN_VIEW_S)
        self._lookups = Lookups(publisher)
        self._source = LoaderSource(
            publisher, store=self._store.uuid, branch=branch_of(self._store.internals.log.prefix),
            scope=scope_of(self._tables, shard, served), opened=self._store,
        )  # fmt: skip
        self._tally = Tally()
        self._lookups_done = 0
        self._serving = Serving(publisher, self._source, self._tally, waits=publish == "apply")
        self._trouble = Trouble(self._store.url, poll_interval_s, self._tally)
        self._lock = threading.RLock()
        """Held while the loader looks or moves, however long that takes."""
        self._refusal: _Refusal | None = None
        self._pinned: int | None = None
        self._wanted: int | None = None
        self._behind_since_ms: int | None = None
        self._next_look_s = 0.0
        self._thread: Repeating | None = None
        self._is_closed = False
        _OPEN.add(self)
        self._cursor = None if cursor is None else FollowingCursor(self._store, cursor)
        try:
            self._tail = LogTail(self._store)
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
        VersionNotFound
            The loader is closed.
        """
        into = None if out is None else {table: as_array(out)}
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
        VersionNotFound
            The loader is closed.
        """
        self._lookups_done += 1
        return self._lookups.lookup(row_ids, dense, None if out is None else {t: as_array(o) for t, o in out.items()})

    @property
    def version(self) -> int:
        """The version that lookups see."""
        return self._serving.view.version

    @property
    def step(self) -> int:
        """The training step of it."""
        return self._serving.view.step

    @property
    def tables(self) -> dict[str, TableSchema]:
        """Table name to schema, of that version."""
        return {name: table.schema for name, table in self._serving.view.tables.items()}

    @property
    def dense(self) -> Mapping[str, Array]:
        """Dense tensors by name, of that version (bfloat16 as uint16, bool as uint8); not to be written."""
        return self._serving.view.dense

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
        tally, trouble = self._tally, self._trouble.error
        return LoaderMetrics(
            version=self.version,
            step=self.step,
            staged=self._serving.staged_version,
            staleness_s=self.staleness_s,
            age_s=max(0.0, (wall_ms() - self._serving.states[0].entry.record.ts_ms) / 1000),
            checked_s=time.monotonic() - self._tail.checked_s,
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
            error=None if trouble is None else f"{type(trouble).__name__}: {trouble}",
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
        self._serving.try_show()
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
                self._serving.drop_staged()
                self._pinned = self.version
            else:
                if version > self._tail.seen.record.v:
                    self._see(self._read_newest())
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
            self._check_open()
            if not 0 <= version < self.version:
                raise BadInput(
                    f"version {version} is none before {self.version}, which is served; use pin() to go ahead",
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
        module. Rows of any other are copied there. Both change in `apply` alone, and take no gradients any more
        (``requires_grad`` is False): what is served is not trained.

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
        from cnr_store.serving.binding import ModuleBinding

        if self._publish != "apply":
            raise BadInput("a module's parameters change in apply(): open the loader with publish='apply'")
        if self._shared is not None:
            raise BadInput("a loader that shares its tables has no module; look rows up, or open another loader")

        def make(view: View, state: State) -> ModuleBinding:
            return ModuleBinding(module, names, view.tables, state.dense)

        with self._lock:
            self._check_open()
            if self._serving.is_bound:
                raise BadInput("the loader has a module already; open another loader for this one")
            self._serving.bind(make)

    def add_sink(self, sink: RowSink, *, start: bool = True) -> SinkFeed:
        """Push each version that is published to a sink as well, behind serving; return the feed that does so.

        A sink that fails delays nobody: its feed tries again, and `SinkFeed.metrics` tells. It ends with the loader.

        Parameters
        ----------
        start
            Push on a thread of its own; with False only in `SinkFeed.push`.
        """
        with self._lock:
            self._check_open()
            feed = SinkFeed(self._source, sink)
            self._serving.add_feed(feed)
        if start:
            feed.start()
        return feed

    def close(self) -> None:
        """End the thread and release memory and, if the loader opened it, the store. A second call does nothing."""
        self.stop()
        with self._lock:
            if not self._is_closed:
                self._check_open()
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
                    failures = self._tally.failures if self._tail.is_unreachable else 0
                    self._next_look_s = time.monotonic() + pause_s(self._interval_s, failures, random())
                if self._serving.publisher.fold_due_in_s() == 0:
                    self._serving.fold(wait=False)
        except Exception as error:  # noqa: BLE001  a bug, ours or a callback's: serving goes on, and the log has it
            self._trouble.note(error, self.version)
        rest = self._next_look_s - time.monotonic()
        due = self._serving.publisher.fold_due_in_s()
        return max(0.0, rest if due is None else min(rest, max(due, 0.01)))

    def _look(self, *, is_patient: bool) -> Poll:
        self._check_open()
        tally, serving = self._tally, self._serving
        before, rows, size, began = serving.newest.version, tally.rows, tally.bytes, time.monotonic()
        tally.polls += 1
        error: Exception | None = None
        try:
            if self._follow(is_patient=is_patient):
                error = self._trouble.error
            else:
                self._trouble.note(None, self.version)
        except _TROUBLE as trouble:
            error = trouble
            self._trouble.note(trouble, self.version)
        self._note_wanted()
        if self._cursor is not None:
            self._cursor.move(self.version)
        moved = serving.newest.version != before
        if moved:
            tally.apply_s = time.monotonic() - began
        return Poll(
            version=self.version,
            step=self.step,
            staged=serving.staged_version,
            moved=moved,
            rows=tally.rows - rows,
            bytes=tally.bytes - size,
            apply_s=tally.apply_s if moved else 0.0,
            error=error,
        )

    def _follow(self, *, is_patient: bool) -> bool:
        """Read what is new in the log and go there, record by record; returns whether it rests from a failure."""
        tail = self._tail
        news, trouble = tail.read_news(MOST_RECORDS + 1)
        if len(news) > MOST_RECORDS:
            for entry in news:
                self._see(entry)
            self._see(self._read_newest())
            news = [tail.seen]
        elif self._publish == "apply" or not self._aim.is_newest:
            for entry in news[:-1]:
                self._see(entry)
            news = news[-1:]
        if is_patient and not news and trouble is None and self._trouble.rests:
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
            # What it needs may have been folded, expired and deleted since: the newest state does not need it.
            self._go(self._aim)
            failure = None
        if failure is not None:
            raise failure
        if trouble is not None:
            raise trouble
        return False

    def _read_newest(self) -> LogEntry:
        entry, torn = self._tail.read_newest()
        if torn is not None:
            self._trouble.say(torn, f"version {entry.record.v} is the newest that can be read")
        return entry

    def _see(self, entry: LogEntry) -> bool:
        is_newer = self._tail.see(entry)
        if is_newer and self._behind_since_ms is None:
            with suppress(CnrStoreError):
                if wanted_version(self._aim, entry.record) != self.version:
                    self._behind_since_ms = entry.record.ts_ms
        return is_newer

    @property
    def _aim(self) -> Target:
        return self._target if self._pinned is None else Target(version=self._pinned)

    def _note_wanted(self) -> None:
        seen = self._tail.seen.record
        with suppress(CnrStoreError):
            self._wanted = wanted_version(self._aim, seen)
        if self._wanted == self.version:
            self._behind_since_ms = None
        elif self._behind_since_ms is None:
            self._behind_since_ms = seen.ts_ms

    # How it moves.

    def _load(self) -> None:
        """The first state; where it is folded and deleted while it is loaded, a newer one."""
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
        self._tally.load_s = time.monotonic() - began

    def _go(self, target: Target, *, insists: bool = False) -> None:
        """Serve, or stage, what the target means by the newest record that is known."""
        serving = self._serving
        if self._publish == "poll":
            serving.show()  # does nothing, unless other processes could not be told before
        version = wanted_version(target, self._tail.seen.record)
        newest = serving.newest
        if version == newest.version:
            return
        entry = self._tail.entry(version)
        refusal = self._refusal
        if refusal is not None and not insists and repeats(entry, refusal.entry):
            if entry.record.v > refusal.entry.record.v:
                refusal.entry = entry
            raise refusal.error
        move = plan_between(newest.entry, entry, self._tail.path)
        if isinstance(move, Same):
            serving.stage_same(entry)
        else:
            with nullcontext() if isinstance(move, Apply) else leased(self._store, version):
                self._take(entry, move, insists=insists)
        self._tail.forget(version)

    def _take(self, entry: LogEntry, move: Move, *, insists: bool = False) -> None:
        """Read what makes the newest state that of ``entry``, everything if there is none, and stage it.

        A refusal is remembered unless the caller ``insists`` on just this version.
        """
        serving, memory = self._serving, self._memory
        last = serving.newest if serving.states else None
        snapshot = Snapshot(
            self._store.storage, entry, self._workers, known={} if last is None else last.readers,
            if_missing=partial(self._store.internals.tell_of_expiry, entry.record.v),
        )  # fmt: skip
        self._check_tables(snapshot)
        serving.fold()
        dense, changed_dense = self._read_dense(snapshot, last)
        newest = serving.publisher.newest
        held = {} if newest is None else newest.tables
        move_there = partial(
            move_tables, snapshot, tables=held, hold=self._hold, stated=None if last is None else last.stated,
            memory=memory,
        )  # fmt: skip
        try:
            moved = move_there(move)
        except CorruptStore as error:
            if isinstance(move, Compare) or type(error) is not CorruptStore:
                raise
            moved = move_there(Compare())  # the segments go on from another state than the one held
        state = State(
            entry, snapshot.known_readers, self._held_dense(snapshot), moved.stated, changed_dense=changed_dense
        )  # fmt: skip
        gate = partial(
            pass_gate, validate=self._validate, warm_up=self._warm_up if last is None or self._warms_each else None
        )
        try:
            serving.stage(state, moved.changes, moved.escapes, dense, gate)
        except VersionRefused as error:
            if not insists:
                self._refusal = _Refusal(entry, error)
            self._tally.refused += 1
            raise
        if last is not None:
            self._tally.rows += moved.rows
            self._tally.bytes += moved.bytes

    def _hold(self, table: str, schema: TableSchema) -> Holding | None:
        del schema
        if self._tables is not None and table not in self._tables:
            return None
        served = self._served.get(table) if isinstance(self._served, Mapping) else self._served
        holds = self._holds.get(table, "auto") if isinstance(self._holds, Mapping) else self._holds
        shard = self._shard.get(table) if isinstance(self._shard, Mapping) else self._shard
        return Holding(served, holds, shard, is_asked=self._tables is not None)

    def _check_tables(self, snapshot: Snapshot) -> None:
        """Refuse a version that lacks a table; one before anything was saved lacks none."""
        missing = [] if snapshot.is_empty else [name for name in self._tables or () if name not in snapshot.tables]
        if missing:
            raise TableNotFound(
                f"version {snapshot.version} has no table {missing[0]!r}; it has {sorted(snapshot.tables)}",
                table=missing[0], version=snapshot.version,
            )  # fmt: skip

    def _held_dense(self, snapshot: Snapshot) -> dict[str, DenseEntry]:
        return {
            name: entry for name, entry in snapshot.dense.items() if self._dense is None or name in self._dense
        }  # fmt: skip

    def _read_dense(self, snapshot: Snapshot, last: State | None) -> tuple[dict[str, Array] | None, frozenset[str]]:
        """All dense tensors, of which those that changed are read, or None if none did; and which changed."""
        entries = self._held_dense(snapshot)
        before = {} if last is None else last.dense
        changed = frozenset(name for name, entry in entries.items() if not _is_same(entry, before.get(name)))
        newest = self._serving.publisher.newest
        if newest is not None and not changed and entries.keys() == before.keys():
            return None, changed
        return {
            n: snapshot.read_dense(n) if n in changed or newest is None else newest.dense[n] for n in entries
        }, changed

    @property
    def _workers(self) -> Workers:
        return self._store.internals.workers if self._own_workers is None else self._own_workers

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadInput("the loader is closed, or is that of the process that forked this one; open another")
        if self._serving.is_asking:
            raise BadInput("a loader is not moved by its own validate or warm_up; answer with what they return")

    def _release(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._serving.close()
        if self._shared is not None:
            self._shared.close()
        if self._own_workers is not None:
            self._own_workers.close()
        if self._owns_store:
            self._store.close()


def _is_same(entry: DenseEntry, before: DenseEntry | None) -> bool:
    return before is not None and (entry.digest, entry.dtype, entry.shape) == (
        before.digest,
        before.dtype,
        before.shape,
    )


_OPEN: weakref.WeakSet[Loader] = weakref.WeakSet()


def _leave_to_parent() -> None:
    # The threads that read and decode are not in the child, and a lock that one of them held stays held.
    for loader in list(_OPEN):
        loader._lock = threading.RLock()
        loader._is_closed = True
        loader._thread = None


os.register_at_fork(after_in_child=_leave_to_parent)
