"""The tables of a change stream as of the version consumed, kept in memory: deltas are added to it.

What a version changes is then told at the cost of what changed, wherever its rows lie, and what the state consumed was
need not be there any more in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from cnr_store.changes import table_rows
from cnr_store.changes.arrow import RowBlock
from cnr_store.changes.differences import Nothing, are_comparable, compared_rows
from cnr_store.changes.table_rows import Span, Window, rows_of
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import TableSchema
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.threads import blocks
from cnr_store.serving.rows.memory import ANONYMOUS
from cnr_store.serving.rows.merging import merge_into, merge_target
from cnr_store.serving.rows.served_table import HeldTable, Overlay, ServedTable
from cnr_store.serving.update.update_plan import Compare, UpdatePlan
from cnr_store.serving.update.update_tables import HeldAs, TableUpdates, update_tables
from cnr_store.types import RowIds

Wanted = Callable[[str], bool]


class StreamCopy:
    """One copy of the wanted tables; `prepare` builds what a version changes beside it, `settle` takes that in."""

    def __init__(self, is_wanted: Wanted, *, is_asked: bool) -> None:
        self._is_wanted = is_wanted
        self._is_asked = is_asked
        self._tables: dict[str, ServedTable] = {}
        self._stated: dict[str, int | None] = {}
        self._version: int | None = None
        self._next: tuple[int, TableUpdates] | None = None

    def has(self, entry: LogEntry) -> bool:
        """Whether this is the state of ``entry``; `follow` says so of a version without changes."""
        return self._version == entry.record.v

    @property
    def schemas(self) -> dict[str, TableSchema]:
        """The tables held."""
        return {name: served.schema for name, served in self._tables.items()}

    def follow(self, entry: LogEntry) -> None:
        """Take ``entry`` for the version held: its state is the same."""
        self._version = entry.record.v

    def load(self, snapshot: Snapshot) -> None:
        """Hold the state of a snapshot, whatever was held. Blocks; memory as `update_tables`.

        Raises
        ------
        MissingObject, CorruptStore, StorageFailure
        """
        self._tables, self._stated, self._version = {}, {}, None
        self.prepare(snapshot, Compare())
        self.settle()

    def prepare(self, snapshot: Snapshot, plan: UpdatePlan) -> None:
        """Build what makes the copy that of the snapshot; a second call for the same version does nothing. Blocks.

        Raises
        ------
        MissingObject, CorruptStore, StorageFailure
            The copy is what it was.
        """
        if self._next is None or self._next[0] != snapshot.version:
            self._next = None
            updates = update_tables(snapshot, plan, self._tables, self._hold, self._stated)
            self._next = snapshot.version, updates

    def changed(self, table: str) -> Iterator[RowBlock]:
        """Yield the rows of a table that differ in the version prepared, in order, as they are there."""
        assert self._next is not None
        changes, escapes = self._next[1].changes, self._next[1].escapes
        if table not in changes:
            return iter(())
        before, change = self._tables.get(table), changes[table]
        if change is None:
            return iter(()) if before is None else compared_rows(_HeldRows(before, has_values=False), Nothing())
        if isinstance(change, HeldTable):
            after = ServedTable(change) if table not in escapes else ServedTable(change, None, escapes[table])
            if before is None:
                return compared_rows(Nothing(), _HeldRows(after))
            is_comparable = are_comparable(before.schema, after.schema)
            return compared_rows(_HeldRows(before, has_values=is_comparable), _HeldRows(after))
        assert before is not None
        return _overlaid_rows(ServedTable(before.held, change, escapes.get(table, before.escapes)), change)

    def settle(self) -> None:
        """Make the version prepared the one that is held."""
        if self._next is None:
            return
        version, updates = self._next
        for table, change in updates.changes.items():
            if change is None:
                self._tables.pop(table, None)
                continue
            escapes = updates.escapes.get(table)
            if isinstance(change, HeldTable):
                held = change
            else:
                target = merge_target(self._tables[table].held, change, ANONYMOUS)
                merge_into(target, change)
                held = target.held
            self._tables[table] = ServedTable(held) if escapes is None else ServedTable(held, None, escapes)
        self._stated, self._version, self._next = updates.stated, version, None

    def _hold(self, table: str, schema: TableSchema) -> HeldAs | None:
        del schema
        return HeldAs(is_asked=self._is_asked) if self._is_wanted(table) else None


class _HeldRows:
    """Rows of a held table, as `TableRows` gives those of a snapshot; a `Copy`."""

    def __init__(self, served: ServedTable, *, has_values: bool = True, knows_keys: bool = True) -> None:
        self.schema = served.schema
        self._served = served
        self._has_values = has_values
        # All of them, sorted: not for a few rows that are listed.
        self._keys: RowIds | None = served.row_ids() if served.held.is_keyed and knows_keys else None

    @property
    def most_rows(self) -> int:
        """Rows that are read at once."""
        kind = self._served.kind
        return max(
            table_rows.LEAST_ROWS, table_rows.WINDOW_BYTES // max(8, kind.served_width * kind.served_dtype.itemsize)
        )

    def spans(self) -> list[Span]:
        """See `Copy`."""
        if self._keys is None:
            return [(a, b - 1, b - a) for a, b in blocks(self.schema.num_rows, self.most_rows)]
        keys = self._keys
        return [(int(keys[a]), int(keys[b - 1]), b - a) for a, b in blocks(len(keys), self.most_rows)]

    def read_window(self, window: Window) -> RowBlock:
        """See `Copy`."""
        if self._keys is None:
            rows = np.arange(*rows_of(window, self.schema.num_rows), dtype=np.int64)
        else:
            low, high = np.searchsorted(self._keys, window[0]), np.searchsorted(self._keys, window[1], side="right")
            rows = self._keys[low:high]
        return self.read(rows) if self._has_values else RowBlock(rows, {})

    def read(self, rows: RowIds) -> RowBlock:
        """Return rows (sorted, unique) with those marked that the table does not have."""
        kind, is_dense = self._served.kind, self.schema.keys == "dense"
        values = np.zeros((len(rows), kind.served_width), kind.served_dtype)
        missing = np.zeros(len(rows), np.bool_)
        inside = int(np.searchsorted(rows, self.schema.num_rows)) if is_dense else len(rows)
        self._served.read(np.ascontiguousarray(rows[:inside]), values[:inside], missing[:inside])
        if is_dense:
            # A row that was deleted from a dense table is there: it reads as the fill.
            missing[:inside], missing[inside:] = False, True
        return RowBlock(rows, {"codes": values}, ~missing if missing.any() else None)


def _overlaid_rows(after: ServedTable, overlay: Overlay) -> Iterator[RowBlock]:
    rows = np.sort(overlay.ids)
    source = _HeldRows(after, knows_keys=False)
    for start in range(0, len(rows), source.most_rows):
        yield source.read(rows[start : start + source.most_rows])
