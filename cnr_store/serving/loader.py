"""Opens a store, keeps tables of its newest state in memory, and follows it: an inference server looks rows up in it.

One thread at a time polls for new versions: it reads the next commit records, stores the changed rows next to the
served ones, and publishes them by swapping a pointer. Lookups never wait for it. After an error the present version
stays; `PollResult.error`, the metrics and the log report the error.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import random
from typing import TYPE_CHECKING, Any, Literal

from cnr_store.errors import BadInput
from cnr_store.format.layout import branch_of
from cnr_store.log.clock import wall_ms
from cnr_store.runtime.arguments import check_not_one, checked_choice
from cnr_store.runtime.closing import Closing
from cnr_store.runtime.repeating import Repeating, pause_s
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Array
from cnr_store.serving.following import ServeTarget
from cnr_store.serving.loader_options import LoaderOptions, check_by_table
from cnr_store.serving.metrics import LoaderMetrics, PollResult
from cnr_store.serving.rows.lookups import Lookups, TableLookups
from cnr_store.serving.rows.memory import ANONYMOUS
from cnr_store.serving.rows.shared_memory import SharedMemory
from cnr_store.serving.rows.views import MIN_VIEW_S, Publisher
from cnr_store.serving.sinks import RowSink
from cnr_store.serving.sinks.sink_feed import SinkFeed
from cnr_store.serving.sources import LoaderSource, scope_of
from cnr_store.serving.state_builder import StateBuilder
from cnr_store.serving.version_follower import VersionFollower
from cnr_store.serving.version_queue import VersionQueue, VersionState
from cnr_store.store import Store

if TYPE_CHECKING:
    import torch

    from cnr_store.serving.binding import ModuleBinding
    from cnr_store.serving.rows.views import View


class Loader(TableLookups, Closing):
    """Tables of a store in memory, at one version for every lookup; `poll` follows the store.

    The constructor loads the state and blocks. Lookups may come from any number of threads; they wait neither for each
    other nor for a poll. All other methods are thread-safe too.

    Parameters
    ----------
    store
        A `Store`, or a URL; ``branch`` and ``storage_options`` are for a URL.
    tables
        Names of the tables to serve; None serves all, also new ones.
    options
        How tables are served, what is asked before a version is served, how often to look.
    version, tag, channel
        What to serve, at most one of them; without one, the newest state.
    follow
        If False, stay at the loaded version, as after `pin`.
    shared
        A folder of a file system in memory (``/dev/shm/ctr``) for the tables, from which other processes serve too, by
        `AttachedTables`.
    publish
        ``poll``: versions become visible in `poll`. ``apply``: they become visible in `apply`.
    threads
        Number of threads for reading and decoding; None uses those of the given store, else one per CPU, at most 8.

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
        options: LoaderOptions = LoaderOptions(),  # noqa: B008  frozen
        *,
        version: int | None = None,
        tag: str | None = None,
        channel: str | None = None,
        follow: bool = True,
        publish: Literal["poll", "apply"] = "poll",
        shared: str | os.PathLike[str] | None = None,
        branch: str | None = None,
        threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        target = ServeTarget(version, tag, channel)
        check_not_one("tables", tables)
        if tables:
            check_by_table(options, tables)
        checked_choice("publish", publish, ("poll", "apply"))
        tables = None if tables is None else tuple(dict.fromkeys(tables))
        self._owns_store = not isinstance(store, Store)
        self._store = _opened(store, branch, threads, storage_options)
        try:
            self._shared = None if shared is None else SharedMemory(os.fspath(shared))
        except BaseException:
            if self._owns_store:
                self._store.close()
            raise
        self._own_workers = Workers(threads) if threads is not None and not self._owns_store else None
        # A bound parameter has changed when `apply` returns, so nothing waits for lookups that began before.
        make = Publisher if self._shared is None else self._shared.publisher
        publisher = make(min_view_s=0.0 if publish == "apply" else MIN_VIEW_S)
        self._lookups = Lookups(publisher)
        self._source = LoaderSource(
            publisher, store=self._store.uuid, branch=branch_of(self._store.internals.log.prefix),
            scope=scope_of(tables, options.shard, options.served), opened=self._store,
        )  # fmt: skip
        self._interval_s = options.poll_interval_s
        self._metrics = LoaderMetrics()
        self._queue = VersionQueue(publisher, self._source, self._metrics, waits=publish == "apply")
        memory = ANONYMOUS if self._shared is None else self._shared
        builder = StateBuilder(self._store, self._own_workers, tables, options, memory)
        self._lock = threading.RLock()
        """Taken during polls and updates, however long they take."""
        self._next_look_s = 0.0
        self._is_woken = False
        self._thread: Repeating | None = None
        self._is_closed = False
        _OPEN.add(self)
        try:
            self._follower = VersionFollower(self._store, target, options, self._queue, builder, self._metrics)
            self._follower.load()
        except BaseException:
            self._release()
            raise
        if not follow:
            self._follower.stay()

    # What lookups see.

    @property
    def dense(self) -> Mapping[str, Array]:
        """Dense tensors by name, of the version that lookups see (bfloat16 as uint16, bool as uint8); read only."""
        return self._view().dense

    def _view(self) -> View:
        return self._queue.view

    @property
    def store(self) -> Store:
        """The store that is followed."""
        return self._store

    @property
    def staleness_s(self) -> float:
        """Seconds since a newer state than the served one was committed, as far as is known; see `LoaderMetrics`."""
        return self._follower.staleness_s

    def metrics(self) -> LoaderMetrics:
        """Return counts and the state now. No I/O, no lock: the numbers may be of slightly different moments."""
        follower = self._follower
        error = follower.errors.error
        return replace(
            self._metrics,
            version=self.version,
            step=self.step,
            staged=self._queue.staged_version,
            is_expired=follower.is_expired,
            staleness_s=self.staleness_s,
            age_s=max(0.0, (wall_ms() - self._queue.states[0].entry.record.ts_ms) / 1000),
            checked_s=time.monotonic() - follower.tail.checked_s,
            cursor_version=follower.cursor_version,
            lookups=self._lookups.count,
            retries=self._lookups.retries,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )

    # What brings it to another version.

    def poll(self) -> PollResult:
        """Look for new versions and serve them, each atomically for lookups. One request if there is none.

        Blocks until new versions are decoded; lookups continue meanwhile. An error of the store or of a version is
        returned in `PollResult.error`: then the present version stays, and the next call retries.

        Raises
        ------
        BadInput
            The loader is closed.
        """
        with self._lock:
            self._check_open()
            return self._follower.look(is_patient=False)

    async def poll_async(self) -> PollResult:
        """As `poll`, on another thread: the event loop continues."""
        return await asyncio.to_thread(self.poll)

    def apply(self) -> int:
        """Publish what was staged (``publish="apply"``) and return the served version. Never reads the store.

        Parameters of a bound module change only here. Does not wait for a poll on another thread: what that stages
        becomes visible with the next call.
        """
        self._queue.try_show()
        return self.version

    def pin(self, version: int | None = None) -> None:
        """Serve a version, the present one if None, and stay at it until `unpin`. Blocks while it is loaded.

        With ``publish="apply"`` it becomes visible in `apply`.

        Raises
        ------
        VersionNotFound, VersionExpired, VersionRefused, CorruptStore, StorageFailure
            It cannot be served: nothing has changed.
        """
        with self._lock:
            self._check_open()
            if version is None:
                self._follower.stay()
            else:
                self._follower.pin(version)

    def rollback(self, version: int) -> None:
        """Serve an older version, for example because the newest is bad, and stay at it until `unpin`. As `pin`.

        Does not change the store; `Store.rollback` does, for all readers.

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
        """Follow the original target again, from the next poll on."""
        with self._lock:
            self._follower.unpin()

    def start(self) -> None:
        """Poll on a thread every ``poll_interval_s``, less often after failures. Idempotent.

        The thread ends with `stop`, `close`, or when the loader is garbage-collected.
        """
        with self._lock:
            self._check_open()
            if self._thread is None or not self._thread.is_running:
                self._thread = Repeating(self, Loader._look_again, name="cnr-loader")

    def wake(self) -> None:
        """Let the thread of `start` poll now; if a poll is running, once more after it. Does not block.

        For whatever hears of a commit before the next poll (`FolderWatch`, `RedisNews`): it changes only when the
        loader looks, so a call too many costs a request, and a missing one a poll interval.
        """
        self._is_woken = True
        thread = self._thread
        if thread is not None:
            thread.wake()

    def stop(self) -> None:
        """End the thread of `start` and wait for a poll that runs. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    def bind(self, module: torch.nn.Module, *, names: Mapping[str, str] | None = None) -> None:
        """Serve tables and dense tensors in a module's tensors from now on.

        A parameter on the CPU with the served dtype adopts the base rows as its memory: one copy for lookups and the
        module. For other parameters rows are copied. Both change only in `apply`, and need no gradients
        (``requires_grad`` becomes False), because they are not trained.

        Parameters
        ----------
        module
            Its ``state_dict`` names its tensors.
        names
            Name in the module to name in the store, where they differ.

        Raises
        ------
        BadInput
            The loader publishes in `poll`, shares its memory, has a module already, or a bound table is found by key or
            served as int8.
        TableNotFound, BadShape, BadDtype
        """
        from cnr_store.serving.binding import ModuleBinding

        if not self._queue.waits:
            raise BadInput("a module's parameters change in apply(): open the loader with publish='apply'")
        if self._shared is not None:
            raise BadInput("a loader that shares its tables has no module; look rows up, or open another loader")

        def make(view: View, state: VersionState) -> ModuleBinding:
            return ModuleBinding(module, names, view.tables, state.dense)

        with self._lock:
            self._check_open()
            if self._queue.is_bound:
                raise BadInput("the loader has a module already; open another loader for this one")
            self._queue.bind(make)

    def add_sink(self, sink: RowSink, *, start: bool = True) -> SinkFeed:
        """Push each published version to a sink as well; return the feed that does this.

        A failing sink delays nothing else: its feed retries, and `SinkFeed.metrics` has the error. The feed ends with
        the loader.

        Parameters
        ----------
        start
            Push on a thread; if False, only in `SinkFeed.push`.
        """
        with self._lock:
            self._check_open()
            feed = SinkFeed(self._source, sink)
            self._queue.add_feed(feed)
        if start:
            feed.start()
        return feed

    def close(self) -> None:
        """End the thread and release memory and, if the loader opened it, the store. Idempotent."""
        self.stop()
        with self._lock:
            if not self._is_closed:
                self._check_open()
                self._release()

    async def __aenter__(self) -> Loader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # How it looks.

    def _look_again(self) -> float:
        """Do what is due in the background, a look or a merge; return how long to rest."""
        try:
            with self._lock:
                if self._is_closed:
                    return self._interval_s
                now = time.monotonic()
                if self._is_woken or now >= self._next_look_s:
                    self._is_woken = False  # before the look, which may not see what is announced during it
                    self._next_look_s = now + self._interval_s  # stands if the look raises
                    self._check_open()
                    self._follower.look(is_patient=True)
                    failures = self._metrics.failures if self._follower.tail.is_unreachable else 0
                    self._next_look_s = time.monotonic() + pause_s(self._interval_s, failures, random())
                if self._queue.publisher.merge_due_in_s() == 0:
                    self._queue.merge(wait=False)
        except Exception as error:  # noqa: BLE001  a bug, ours or a callback's: serving continues, and the log has it
            self._follower.errors.record(error, self.version)
        rest = self._next_look_s - time.monotonic()
        due = self._queue.publisher.merge_due_in_s()
        return max(0.0, rest if due is None else min(rest, max(due, 0.01)))

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadInput("the loader is closed, or is that of the process that forked this one; open another")
        if self._queue.is_asking:
            raise BadInput("a loader is not moved by its own validate or warm_up; answer with what they return")

    def _release(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.close()
        if self._shared is not None:
            self._shared.close()
        if self._own_workers is not None:
            self._own_workers.close()
        if self._owns_store:
            self._store.close()


def _opened(
    store: Store | str | os.PathLike[str],
    branch: str | None,
    threads: int | None,
    storage_options: Mapping[str, Any] | None,
) -> Store:
    if not isinstance(store, Store):
        return Store.open(os.fspath(store), branch=branch, storage_options=storage_options, threads=threads)
    if branch is not None or storage_options is not None:
        raise BadInput("branch and storage_options belong to a URL; this store is open already")
    return store


_OPEN: weakref.WeakSet[Loader] = weakref.WeakSet()


def _leave_to_parent() -> None:
    # The threads that read and decode are not in the child, and a lock that one of them held stays held. Nor is the
    # thread that follows: the rows that a child was forked with would be served for ever, as if they were the newest.
    for loader in list(_OPEN):
        if loader._thread is not None or not loader._lock.acquire(blocking=False):
            loader._queue.publisher.leave()
        loader._lock = threading.RLock()
        loader._is_closed = True
        loader._thread = None


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_leave_to_parent)
