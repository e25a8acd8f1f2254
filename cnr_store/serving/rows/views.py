"""Publishes versions of tables one at a time, so that no lookup mixes two versions.

A view is base rows plus an overlay of the rows that its version changed. A publisher builds the overlay first, then
swaps the view. Later it merges the overlay into the base rows. Lookups in older views notice this by the `Board` and
read again. Readers do not register, so a reader that ends needs no clean-up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from cnr_store.errors import TableNotFound, VersionNotFound
from cnr_store.runtime.arguments import some_of
from cnr_store.segment.codes import Array, ExactRows
from cnr_store.serving.rows.board import LONGEST_DEFERRAL_S, Board
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.merging import Merge
from cnr_store.serving.rows.served_table import BaseTable, Overlay, ServedTable

MERGE_AFTER_S = 0.05
"""Seconds after its publication at which a view's overlays are merged, if there is no newer view."""

MIN_VIEW_S = 0.01
"""Seconds before which they are never merged, so that lookups in the former view have ended."""

TableChange = Overlay | BaseTable | None
"""An overlay of changed rows; a new or reloaded table; or None for a removed table."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class View:
    """One version as readers see it. ``epoch`` counts views and only grows; versions may go back.

    ``dense`` tensors are in their stored dtypes (bfloat16 as uint16) and not to be written.
    """

    epoch: int
    version: int
    step: int
    tables: Mapping[str, ServedTable]
    dense: Mapping[str, Array]

    def table(self, name: str) -> ServedTable:
        """Return a table.

        Raises
        ------
        TableNotFound
        """
        try:
            return self.tables[name]
        except KeyError:
            raise TableNotFound(
                f"version {self.version} serves no table {name!r}; it serves {some_of(self.tables, name)}",
                table=name, version=self.version,
            ) from None  # fmt: skip

    @property
    def has_overlays(self) -> bool:
        """Whether there is anything to merge."""
        return any(table.overlay is not None for table in self.tables.values())


class Publisher:
    """Publishes views. One thread at a time builds and publishes; any number of threads read.

    Changes are always built against `newest`. What is handed over (arrays of changes, dense tensors, exact rows) is
    not to be changed afterwards.
    """

    def __init__(
        self,
        memory: Memory = ANONYMOUS,
        *,
        board: Board | None = None,
        merge_after_s: float = MERGE_AFTER_S,
        min_view_s: float = MIN_VIEW_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Publish views of arrays in ``memory``; ``board`` is given if other processes read it too."""
        self.board = Board() if board is None else board
        self._memory = memory
        self._merge_after_s = merge_after_s
        self._min_view_s = min_view_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.RLock()
        self._view: View | None = None
        self._staged: View | None = None
        self._staged_before: View | None = None
        self._can_unstage = False
        self._no_view_reason = "yet: the first version has not been loaded"
        self._published_at = 0.0
        self._blocks: set[int] = set()

    @property
    def view(self) -> View | None:
        """The published view; None before the first."""
        return self._view

    @property
    def candidate(self) -> View | None:
        """The staged view, which `reveal` publishes; None if nothing is staged."""
        return self._staged

    @property
    def newest(self) -> View | None:
        """The staged or else the published view: the next changes are changes to it."""
        return self._view if self._staged is None else self._staged

    def newest_view(self) -> tuple[View, Board]:
        """Return the published view, and the board that shows whether it stayed whole during a lookup.

        Raises
        ------
        VersionNotFound
            Nothing was published yet, or it is closed.
        """
        view = self._view
        if view is None:
            raise VersionNotFound(f"nothing is served {self._no_view_reason}")
        return view, self.board

    def publish(
        self,
        version: int,
        step: int,
        changes: Mapping[str, TableChange],
        dense: Mapping[str, Array] | None = None,
        exact_rows: Mapping[str, ExactRows] | None = None,
    ) -> View:
        """Stage a version and publish it at once; see `stage` and `reveal`."""
        with self._lock:
            self.stage(version, step, changes, dense, exact_rows)
            return self.reveal()

    def stage(
        self,
        version: int,
        step: int,
        changes: Mapping[str, TableChange],
        dense: Mapping[str, Array] | None = None,
        exact_rows: Mapping[str, ExactRows] | None = None,
    ) -> View:
        """Return the next view, which `reveal` publishes; several staged versions become visible together.

        Merges the present overlays first, and may wait for that (see `merge`).

        Parameters
        ----------
        changes
            What differs from `newest`, by table.
        dense
            All dense tensors of the version; None leaves them as they are.
        exact_rows
            All exact rows of tables that keep codes, if they changed; a `BaseTable` starts with none.

        Raises
        ------
        StorageFailure
            There is not enough memory; nothing was staged.
        """
        exact_rows = exact_rows or {}
        with self._lock:
            given = self._blocks_of(_arrays_of_changes(changes, dense, exact_rows))
            try:
                if self._staged is None:
                    self.merge()
                with self._memory.attempt():
                    candidate = self._candidate(version, step, changes, dense, exact_rows)
                given |= self._blocks_of(_arrays_of(candidate))
                self._staged_before, self._staged, self._can_unstage = self._staged, candidate, True
            finally:
                self._blocks |= given
                # Also of what was handed over and is in no view: it was merged into something else, or failed.
                self._sweep()
            return candidate

    def unstage(self) -> None:
        """Drop the version that was staged last. Versions staged before it stay.

        Raises
        ------
        ValueError
            Nothing was staged since the last call, or it was revealed.
        """
        with self._lock:
            if not self._can_unstage:
                raise ValueError("only what was staged last can be unstaged, once")
            self._staged, self._staged_before, self._can_unstage = self._staged_before, None, False
            self._sweep()

    def discard(self) -> None:
        """Drop everything that is staged. Idempotent."""
        with self._lock:
            self._forget_staged()
            self._sweep()

    def reveal(self) -> View:
        """Publish what is staged by swapping one pointer, and return the view.

        Raises
        ------
        StorageFailure
            Other processes could not be informed; the new view is not visible, and stays staged.
        VersionNotFound
            Nothing was ever staged.
        """
        with self._lock:
            if self._staged is None:
                return self.newest_view()[0]
            view = self._staged
            self._memory.put_view(view)
            self._swap(view)
            self._forget_staged()
            self._sweep()
            return view

    def merge(self, *, wait: bool = True) -> bool:
        """Merge the overlays of the view into its base rows; return whether the view has none now.

        Readers of this view are not affected, those of earlier ones read again. Waits until the view is ``min_view_s``
        old, and at most 2 s for readers that asked for it; with ``wait=False`` does nothing instead.

        Raises
        ------
        StorageFailure
            There is no memory for new rows; the view stays as it is.
        """
        with self._lock:
            view = self._view
            if view is None or not view.has_overlays:
                return True
            if self._staged is not None or not self._may_merge(wait):
                return False
            with self._memory.attempt():
                merge = Merge(view.tables.values(), self._memory)
                tables = {
                    name: table if table.overlay is None else ServedTable(merge.bases[name], None, table.exact_rows)
                    for name, table in view.tables.items()
                }
                after = replace(view, epoch=view.epoch + 1, tables=MappingProxyType(tables))
                # Whatever can fail is done before the first row is written. Other processes continue with the view and
                # its overlay until the board has the next epoch.
                self._memory.put_view(after)
            self.board.begin_merge(view.epoch)
            merge.write()
            self._swap(after, is_merge=True)
            self._blocks |= self._blocks_of(_arrays_of(after))
            overlays = (array for table in view.tables.values() for array in _arrays_of_change(table.overlay))
            self._sweep(merged=self._blocks_of(overlays))
            return True

    def merge_due_in_s(self) -> float | None:
        """Return the seconds until the view should be merged; None if there is nothing to merge."""
        view = self._view
        if view is None or not view.has_overlays or self._staged is not None:
            return None
        return max(0.0, self._published_at + self._merge_after_s - self._clock())

    def close(self) -> None:
        """End publishing, and serve no view in this process. Idempotent.

        The arrays of the last view stay in the memory: readers in other processes continue with it.
        """
        with self._lock:
            self.board.end()
            self._forget_staged()
            self._sweep()
            self._no_view_reason = "any more: the loader is closed"
            self._view = None
            self._blocks = set()

    def leave(self) -> None:
        """Serve no view in this process from now on, without informing others: for a forked child of the owner."""
        self._no_view_reason = (
            "here: the loader is that of the process that forked this one; open one after the fork, or attach to the "
            "folder of one that shares its tables, with AttachedTables"
        )
        self._view = None
        self._forget_staged()

    def _candidate(
        self,
        version: int,
        step: int,
        changes: Mapping[str, TableChange],
        dense: Mapping[str, Array] | None,
        exact_rows: Mapping[str, ExactRows],
    ) -> View:
        base = self.newest
        tables = dict(base.tables) if base is not None else {}
        for name, change in changes.items():
            before = tables.pop(name, None)
            rows = exact_rows.get(name)
            after = self._changed(name, before, change, None if rows is None else self._kept_exact_rows(rows))
            if after is not None:
                tables[name] = after
        tensors = self._kept_dense(dense) if dense is not None else dict(base.dense) if base is not None else {}
        epoch = 1 if self._view is None else self._view.epoch + 1
        return View(epoch, version, step, MappingProxyType(tables), MappingProxyType(tensors))

    def _forget_staged(self) -> None:
        self._staged = self._staged_before = None
        self._can_unstage = False

    def _swap(self, view: View, *, is_merge: bool = False) -> None:
        self._view = view
        self.board.announce(view.epoch, is_merge=is_merge)
        self._published_at = self._clock()
        self._memory.drop_views(view.epoch)

    def _may_merge(self, wait: bool) -> bool:
        """Wait until the view may be merged, or return whether it may be."""
        too_young = self._published_at + self._min_view_s - self._clock()
        deferred_for = self.board.deferred_for_s()
        if not wait:
            return too_young <= 0 and deferred_for <= 0
        if too_young > 0:
            self._sleep(too_young)
        deadline = self._clock() + LONGEST_DEFERRAL_S
        # Readers may ask again and again; all together they are waited for once.
        while (deferred_for := min(self.board.deferred_for_s(), deadline - self._clock())) > 0:
            self._sleep(deferred_for)
        return True

    def _changed(
        self, name: str, table: ServedTable | None, change: TableChange, exact_rows: ExactRows | None
    ) -> ServedTable | None:
        if change is None:
            return None
        if isinstance(change, BaseTable):
            return ServedTable(change, None, ExactRows() if exact_rows is None else exact_rows)
        if table is None:
            raise ValueError(f"table {name!r} is not served, so no rows of it can change")
        if change.rows.dtype != table.base.rows.dtype or change.rows.shape[1] != table.base.rows.shape[1]:
            raise ValueError(
                f"an overlay of table {name!r} is {change.rows.dtype} {change.rows.shape}, "
                f"its base rows are {table.base.rows.dtype} {table.base.rows.shape}"
            )
        exact_rows = table.exact_rows if exact_rows is None else exact_rows
        if len(change) == 0 and table.overlay is None:
            return ServedTable(replace(table.base, schema=change.schema), None, exact_rows)
        if len(change) == 0:
            assert table.overlay is not None
            return ServedTable(table.base, replace(table.overlay, schema=change.schema), exact_rows)
        if table.overlay is not None:
            change = Overlay.merged(name, table.overlay, change, self._memory)
        return ServedTable(table.base, change, exact_rows)

    def _kept_dense(self, dense: Mapping[str, Array]) -> dict[str, Array]:
        tensors = dict(zip(dense, self._kept_arrays("dense", list(dense.values())), strict=True))
        for tensor in tensors.values():
            tensor.flags.writeable = False
        return tensors

    def _kept_exact_rows(self, exact_rows: ExactRows) -> ExactRows:
        if len(exact_rows.rows) == 0:
            return ExactRows()
        rows, codes = self._kept_arrays("exact_rows", [exact_rows.rows, exact_rows.values["codes"]])
        return ExactRows(rows, {"codes": codes})

    def _kept_arrays(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays where readers of other processes find them too."""
        if not self._memory.is_shared or not arrays:
            return [np.asarray(array, order="C").view() for array in arrays]
        kept = self._memory.allocate_together(name, [(array.shape, array.dtype) for array in arrays])
        for into, array in zip(kept, arrays, strict=True):
            into[...] = array
        return list(kept)

    def _blocks_of(self, arrays: Iterable[Array]) -> set[int]:
        if self._memory is ANONYMOUS:  # which has no blocks: nothing is proportional to the tables here
            return set()
        blocks = (self._memory.block_of(array) for array in arrays)
        return {block for block in blocks if block is not None}

    def _sweep(self, merged: Set[int] = frozenset()) -> None:
        """Release the blocks that no view uses; of them, ``merged`` have the next overlays."""
        views = (self._view, self._staged, self._staged_before)
        live = self._blocks_of(array for view in views if view is not None for array in _arrays_of(view))
        for block in self._blocks - live:
            (self._memory.recycle if block in merged else self._memory.release)(block)
        self._blocks = live


def _arrays_of(view: View) -> Iterator[Array]:
    for table in view.tables.values():
        yield from (*_arrays_of_change(table.base), *_arrays_of_change(table.overlay))
        yield from (table.exact_rows.rows, *table.exact_rows.values.values())
    yield from view.dense.values()


def _arrays_of_change(change: TableChange) -> list[Array]:
    if change is None:
        return []
    if isinstance(change, Overlay):
        return [change.ids, change.rows, change.status, change.index.slots]
    arrays: list[Array] = [change.rows]
    if change.index is not None:
        arrays.append(change.index.slots)
    return arrays if change.status is None else [*arrays, change.status]


def _arrays_of_changes(
    changes: Mapping[str, TableChange], dense: Mapping[str, Array] | None, exact_rows: Mapping[str, ExactRows]
) -> Iterator[Array]:
    for change in changes.values():
        yield from _arrays_of_change(change)
    for rows in exact_rows.values():
        yield from (rows.rows, *rows.values.values())
    yield from (dense or {}).values()
