"""The version that a loader serves and those it has staged, and the steps between them. Reads no store.

Staging, checking and publishing take one lock, which is never held during a read of the store, so that `Loader.apply`
does not wait for one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from cnr_store.errors import CnrStoreError, VersionRefused
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import DenseEntry, Manifest
from cnr_store.segment.codes import Array, ExactRows
from cnr_store.segment.reader import SegmentReader
from cnr_store.serving.candidate import Candidate
from cnr_store.serving.metrics import LoaderMetrics
from cnr_store.serving.rows.served_table import Overlay
from cnr_store.serving.rows.views import Publisher, TableChange, View
from cnr_store.serving.sinks.sink_feed import SinkFeed
from cnr_store.serving.sources import LoaderSource
from cnr_store.types import RowIds

if TYPE_CHECKING:
    from cnr_store.serving.binding import ModuleBinding

Gate = Callable[[Candidate], None]
"""Raises `VersionRefused` to keep a version from being staged."""


@dataclass(frozen=True, slots=True)
class VersionState:
    """What is known of a version that is served or staged.

    Attributes
    ----------
    entry
        Its record.
    readers
        The segments of its chain, by name, open.
    dense
        The dense tensors that are served.
    recorded
        Its manifest, with the state of its tables.
    changed, changed_dense
        What differs from the version before: rows by table (in any order; None: any of them), and dense tensors.
    """

    entry: LogEntry
    readers: Mapping[str, SegmentReader] = field(default_factory=dict)
    dense: Mapping[str, DenseEntry] = field(default_factory=dict)
    recorded: Manifest | None = None
    changed: Mapping[str, RowIds | None] = field(default_factory=dict)
    changed_dense: frozenset[str] = frozenset()

    @property
    def version(self) -> int:
        """Its version."""
        return self.entry.record.v

    def at(self, entry: LogEntry) -> VersionState:
        """Return the same state under another record."""
        return replace(self, entry=entry, changed={}, changed_dense=frozenset())


class VersionQueue:
    """The served version, and the staged versions that follow it.

    Attributes
    ----------
    states
        The served version, then the staged ones, in order; empty before the first version.
    lock
        Held while something is staged or shown.
    is_asking
        Whether a gate is asked about a version at this moment; the lock is held then.
    """

    def __init__(self, publisher: Publisher, source: LoaderSource, metrics: LoaderMetrics, *, waits: bool) -> None:
        """With ``waits`` a version stays staged until `show`; else it is shown at once, as the first one always is."""
        self.publisher = publisher
        self.lock = threading.RLock()
        self.states: list[VersionState] = []
        self.is_asking = False
        self._source = source
        self._metrics = metrics
        self.waits = waits
        self._binding: ModuleBinding | None = None
        self._module_lags = False
        self._feeds: list[SinkFeed] = []

    @property
    def view(self) -> View:
        """What lookups see."""
        return self.publisher.newest_view()[0]

    @property
    def newest(self) -> VersionState:
        """What was staged last, or is served."""
        return self.states[-1]

    @property
    def staged_version(self) -> int | None:
        """The newest staged version; None if nothing is staged."""
        states = self.states
        return states[-1].version if len(states) > 1 else None

    def merge(self, *, wait: bool = True) -> None:
        """Merge the served version into the base rows, before changes to them are read; not what is staged."""
        with self.lock:
            if self.publisher.candidate is None:
                self.publisher.merge(wait=wait)

    def stage_same(self, entry: LogEntry) -> None:
        """Stage a version whose state is the newest's."""
        with self.lock:
            self.publisher.stage(entry.record.v, entry.record.step, {})
            self.states.append(self.newest.at(entry))
            self._show_unless_it_waits()

    def stage(
        self,
        state: VersionState,
        changes: Mapping[str, TableChange],
        exact_rows: Mapping[str, ExactRows],
        dense: Mapping[str, Array] | None,
        gate: Gate,
    ) -> None:
        """Stage a version if the gate and the bound module let it pass.

        Raises
        ------
        VersionRefused
            It is staged no more.
        """
        record = state.entry.record
        state = replace(state, changed={name: _rows_of(change) for name, change in changes.items()})
        with self.lock:
            view = self.publisher.stage(record.v, record.step, changes, dense, exact_rows)
            self.is_asking = True
            try:
                if self._binding is not None:
                    self._check_binding(self._binding, view, state)
                gate(Candidate(view, self.view.version if self.states else None))
            except BaseException:
                self.publisher.unstage()
                raise
            finally:
                self.is_asking = False
            self.states.append(state)
            self._show_unless_it_waits()

    def show(self) -> None:
        """Publish what is staged to lookups, the bound module and the sinks; does nothing if nothing is staged.

        Raises
        ------
        StorageFailure
            Other processes could not be informed; the version stays staged.
        """
        with self.lock:
            if len(self.states) < 2 and self.publisher.candidate is None and not self._module_lags:
                return
            view = self.publisher.reveal()
            shown = self.states[1:]
            # Without the ids of what changed: in shared memory they keep all of its overlay.
            self.states = [self.newest.at(self.newest.entry)]
            self._metrics.updates += len(shown)
            # A union of many ids holds the interpreter for milliseconds, and lookups with it.
            changed = _union(shown) if self._binding is not None or self._feeds else {}
            for feed in self._feeds:
                feed.notice(self._source.described(view), changed)
            if self._binding is not None:
                moved = {name for state in shown for name in state.changed_dense}
                self._show_module(self._binding, changed, moved)

    def try_show(self) -> None:
        """As `show`, unless something is being staged at this moment."""
        if self.lock.acquire(blocking=False):
            try:
                if not self.is_asking:
                    self.show()
            finally:
                self.lock.release()

    def drop_staged(self) -> None:
        """Drop what is staged."""
        with self.lock:
            self.publisher.discard()
            del self.states[1:]

    def bind(self, make: Callable[[View, VersionState], ModuleBinding]) -> None:
        """Serve in a module from now on."""
        with self.lock:
            binding = make(self.view, self.states[0])
            self._module_lags = True  # all of it is to be shown
            try:
                self._show_module(binding, {}, ())
            finally:
                self._module_lags = False
            self._binding = binding

    @property
    def is_bound(self) -> bool:
        """Whether a module shows what is served."""
        return self._binding is not None

    def add_feed(self, feed: SinkFeed) -> None:
        """Notify a feed of the served version, and of every later one."""
        with self.lock:
            self._feeds.append(feed)
            feed.notice(self._source.described(self.view), dict.fromkeys(self.view.tables))

    def close(self) -> None:
        """End the feeds and the publisher."""
        for feed in self._feeds:
            feed.stop()
        with self.lock:
            self.publisher.close()

    def _show_unless_it_waits(self) -> None:
        if len(self.states) == 1 or not self.waits:
            self.show()

    def _show_module(
        self, binding: ModuleBinding, changed: Mapping[str, RowIds | None], moved: Iterable[str]
    ) -> None:  # fmt: skip
        view = self.view
        if self._module_lags:  # it was left half way
            changed, moved = dict.fromkeys(view.tables), view.dense
        self._module_lags = True
        self.publisher.merge()  # what a parameter has adopted are the base rows
        view = self.view
        binding.show(view.tables, changed, view.dense, self.states[0].dense, moved)
        self._module_lags = False

    @staticmethod
    def _check_binding(binding: ModuleBinding, view: View, state: VersionState) -> None:
        try:
            binding.check(view.tables, state.dense)
        except CnrStoreError as error:
            raise VersionRefused(
                f"the bound module cannot show version {state.version}: {error}", version=state.version
            ) from error


def _rows_of(change: TableChange) -> RowIds | None:
    return change.ids if isinstance(change, Overlay) else None


def _union(states: Sequence[VersionState]) -> dict[str, RowIds | None]:
    """The changed rows, sorted, of versions that become visible together."""
    union: dict[str, RowIds | None] = {}
    for state in states:
        for table, rows in state.changed.items():
            before = union.get(table, rows)
            if rows is None or before is None:
                union[table] = None
            else:
                union[table] = np.union1d(before, rows) if table in union else np.sort(rows)
    return union
