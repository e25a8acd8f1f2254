"""The tables of a change stream in memory, as of the version that was consumed; deltas are added to them.

With them the cost of reporting a version grows with its changed rows, wherever they are, and the consumed version may
be deleted from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from cnr_store.changes import table_rows
from cnr_store.changes.arrow import RowBlock
from cnr_store.changes.differences import Nothing, are_comparable, compared_rows
from cnr_store.changes.table_rows import Span, rows_of
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import Manifest, TableSchema
from cnr_store.read.changed_rows import Window
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.threads import blocks
from cnr_store.serving.rows.memory import ANONYMOUS
from cnr_store.serving.rows.merging import merge_into, merge_target
from cnr_store.serving.rows.served_table import BaseTable, Overlay, ServedTable
from cnr_store.serving.update.update_plan import Compare, UpdatePlan
from cnr_store.serving.update.update_tables import ServeAs, TableUpdates, update_tables
from cnr_store.types import RowIds

Wanted = Callable[[str], bool]


class StreamCopy:
    """A copy of the wanted tables. `prepare` reads the changes of a version, `settle` adds them to the copy."""

    def __init__(self, is_wanted: Wanted, *, is_named: bool) -> None:
        self._is_wanted = is_wanted
        self._is_named = is_named
        self._tables: dict[str, ServedTable] = {}
        self._recorded: Manifest | None = None
        self._version: int | None = None
        self._next: tuple[int, TableUpdates] | None = None

    def has(self, entry: LogEntry) -> bool:
        """Return whether the copy has the state of ``entry``."""
        return self._version == entry.record.v

    @property
    def schemas(self) -> dict[str, TableSchema]:
        """The tables of the copy."""
        return {name: served.schema for name, served in self._tables.items()}

    def follow(self, entry: LogEntry) -> None:
        """Record that ``entry`` has the same state as the copy."""
        self._version = entry.record.v

    def load(self, snapshot: Snapshot) -> None:
        """Replace the copy by the state of a snapshot. Blocks; memory as `update_tables`.

        Raises
        ------
        MissingObject, CorruptStore, StorageFailure
        """
        self._tables, self._recorded, self._version = {}, None, None
        self.prepare(snapshot, Compare())
        self.settle()

    def prepare(self, snapshot: Snapshot, plan: UpdatePlan) -> None:
        """Read the changes from the copy to the snapshot. Idempotent for one version. Blocks.

        Raises
        ------
        MissingObject, CorruptStore, StorageFailure
            The copy is what it was.
        """
        if self._next is None or self._next[0] != snapshot.version:
            self._next = None
            updates = update_tables(snapshot, plan, self._tables, self._serve_as, self._recorded)
            self._next = snapshot.version, updates

    def changed(self, table: str) -> Iterator[RowBlock]:
        """Yield the rows of a table that differ in the prepared version, in order, with its values."""
        assert self._next is not None
        changes, exact_rows = self._next[1].changes, self._next[1].exact_rows
        if table not in changes:
            return iter(())
        before, change = self._tables.get(table), changes[table]
        if change is None:
            return iter(()) if before is None else compared_rows(_ServedRows(before, has_values=False), Nothing())
        if isinstance(change, BaseTable):
            after = ServedTable(change) if table not in exact_rows else ServedTable(change, None, exact_rows[table])
            if before is None:
                return compared_rows(Nothing(), _ServedRows(after))
            is_comparable = are_comparable(before.schema, after.schema)
            return compared_rows(_ServedRows(before, has_values=is_comparable), _ServedRows(after))
        assert before is not None
        return _overlaid_rows(ServedTable(before.base, change, exact_rows.get(table, before.exact_rows)), change)

    def settle(self) -> None:
        """Add the prepared changes to the copy."""
        if self._next is None:
            return
        version, updates = self._next
        for table, change in updates.changes.items():
            if change is None:
                self._tables.pop(table, None)
                continue
            exact_rows = updates.exact_rows.get(table)
            if isinstance(change, BaseTable):
                base = change
            else:
                target = merge_target(self._tables[table].base, change, ANONYMOUS)
                merge_into(target, change)
                base = target.base
            self._tables[table] = ServedTable(base) if exact_rows is None else ServedTable(base, None, exact_rows)
        self._recorded, self._version, self._next = updates.recorded, version, None

    def _serve_as(self, table: str, schema: TableSchema) -> ServeAs | None:
        del schema
        return ServeAs(is_named=self._is_named) if self._is_wanted(table) else None


class _ServedRows:
    """Rows of a base table, as `TableRows` gives those of a snapshot; a `Copy`."""

    def __init__(self, served: ServedTable, *, has_values: bool = True, knows_keys: bool = True) -> None:
        self.schema = served.schema
        self._served = served
        self._has_values = has_values
        # All of them, sorted: not for a few rows that are listed.
        self._keys: RowIds | None = served.row_ids() if served.base.is_keyed and knows_keys else None

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
    source = _ServedRows(after, knows_keys=False)
    for start in range(0, len(rows), source.most_rows):
        yield source.read(rows[start : start + source.most_rows])
