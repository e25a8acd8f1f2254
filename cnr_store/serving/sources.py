"""What a sink's feed reads: the views of a loader, as the `SinkSource` that it asks for.

Values never come from the store; the row ids of what changed before the loader was there do, once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from cnr_store.encodings.widths import to_float32
from cnr_store.errors import CorruptStore, NotFound
from cnr_store.format.records import TableSchema
from cnr_store.segment.codes import Array
from cnr_store.serving.rows.fused_reference import values_of_rows
from cnr_store.serving.rows.served_table import RowKind
from cnr_store.serving.rows.shards import rows_in_shard
from cnr_store.serving.rows.views import Lookups, Publisher, View
from cnr_store.serving.sinks import Published, SinkState, SinkTable, SourceRows
from cnr_store.serving.update.comparing import rows_that_may_differ
from cnr_store.serving.update.update_plan import Apply, Compare, Same, plan_path, plan_update
from cnr_store.store import Store
from cnr_store.types import Float32s, RowIds

MOST_RECORDS = 256
"""Records that are read to tell how one version became another; further apart, the two ends alone must tell."""


class LoaderSource:
    """Rows of a publisher's newest view as float32, with the state that they are of.

    Values are as exact as what is served: of bfloat16 or int8 rows they are what those say. A deleted row of a dense
    table has its fill; only keys of hashed tables can be absent.

    Parameters
    ----------
    store, branch, scope
        As in `SinkState`.
    opened
        The store, for `changed_since`; without it that is never known.
    """

    def __init__(
        self, publisher: Publisher, *, store: str, branch: str, scope: str, opened: Store | None = None
    ) -> None:
        self._publisher = publisher
        self._opened = opened
        self._store, self._branch, self._scope = store, branch, scope

    def published(self) -> Published | None:
        """See `SinkSource.published`."""
        view = self._publisher.view
        return None if view is None else self.described(view)

    def described(self, view: View) -> Published:
        """Return what a view shows."""
        state = SinkState(self._store, self._branch, view.version, view.step, self._scope)
        tables = {
            name: SinkTable(table.kind.dim, None if table.schema.keys == "hashed" else table.schema.num_rows)
            for name, table in view.tables.items()
        }
        return Published(state, tables)

    def row_ids(self, table: str) -> Sequence[int] | RowIds:
        """See `SinkSource.row_ids`."""
        while True:
            view, board = self._publisher.newest_view()
            served = view.table(table)
            if not served.held.is_keyed:
                return range(served.held.start, served.held.stop)
            if served.schema.keys != "hashed":  # deleted rows have the fill, and no key
                return rows_in_shard(served.held.shard, np.arange(served.schema.num_rows, dtype=np.int64))
            ids = served.row_ids()
            if board.is_whole(view.epoch):
                return ids

    def read_rows(self, row_ids: Mapping[str, RowIds]) -> SourceRows:
        """See `SinkSource.read_rows`."""
        lookups = _LookupsOfAView(self._publisher)
        batch = lookups.lookup(row_ids)
        view = lookups.view  # not the newest one, whose tables may be others by now
        assert view is not None
        tables = {}
        for name, rows in batch.rows.items():
            missing = batch.missing[name]
            hashed = view.table(name).schema.keys == "hashed"
            absent = missing if hashed and missing is not None else np.zeros(len(rows), np.bool_)
            tables[name] = (_floats(rows, view.table(name).kind), ~absent)
        return SourceRows(batch.version, tables)

    def changed_since(self, held: SinkState) -> Mapping[str, RowIds] | None:
        """See `SinkSource.changed_since`: reads the row ids of the segments between the two, and no values."""
        view = self._publisher.view
        return None if view is None or self._opened is None else rows_between(self._opened, held.version, view)


class _LookupsOfAView(Lookups):
    """A lookup that says which view its rows are of."""

    view: View | None = None

    def _gathered(self, view: View) -> None:
        self.view = view


def scope_of(
    tables: Collection[str] | None, shard: object | Mapping[str, object], served: str | Mapping[str, str | None] | None
) -> str:
    """Return the `SinkState.scope` of a choice of tables, rows and dtype: "" for all rows of all tables as they are.

    What is chosen in other words, or in another order, has the same scope.
    """
    chosen = {"tables": None if tables is None else sorted(tables), "shard": _plain(shard), "served": _plain(served)}
    return "" if all(choice is None for choice in chosen.values()) else json.dumps(chosen, sort_keys=True)


def _plain(choice: object) -> object:
    """One choice for all tables as its text, or those by table; None where nothing is chosen."""
    if isinstance(choice, Mapping):
        return {table: str(chosen) for table, chosen in choice.items() if chosen is not None} or None
    return None if choice is None else str(choice)


def rows_between(store: Store, held: int, view: View) -> dict[str, RowIds] | None:
    """Return which rows of a view's tables may differ between version ``held`` and the view's; blocks.

    None where the segments of the two do not tell, or are gone: another baseline, another life of a table, a version
    that has expired.

    Raises
    ------
    StorageFailure
    """
    log = store.internals.log
    try:
        versions = range(held, view.version + 1) if 0 <= view.version - held <= MOST_RECORDS else (held, view.version)
        entries = [entry for entry in map(log.read_standing, versions) if entry is not None]
        if len(entries) < 1 or (entries[0].record.v, entries[-1].record.v) != (held, view.version):
            return None
        plan = plan_path(entries) if held <= view.version else plan_update(entries[0], entries[-1])
        if isinstance(plan, Same):
            return {}
        if isinstance(plan, Compare):
            return None
        snapshot = store.snapshot(view.version)
        begin = plan.behind if isinstance(plan, Apply) else plan.common
        ends = (plan.segments,) if isinstance(plan, Apply) else (plan.old, plan.new)
        chains = [snapshot.open_chain((*begin, *end)) for end in ends]
        common, sides = chains[0][len(begin) - 1], [chain[len(begin) :] for chain in chains]
        shapes = {name: _shape(snapshot.tables[name]) for name in snapshot.tables}
        for reader in (common, *(reader for side in sides for reader in side)):
            if {name: _shape(schema) for name, schema in reader.manifest.tables.items()} != shapes:
                return None  # rows of a table that grew, shrank or began anew stand in no list
        changed: dict[str, RowIds] = {}
        for name, served in view.tables.items():
            found = [rows_that_may_differ(common, side, served, snapshot.tables[name]) for side in sides]
            changed[name] = np.unique(np.concatenate(found))
        return changed
    except (NotFound, CorruptStore):
        return None  # what only the older version was made of may be gone; the sink gets everything


def _shape(schema: TableSchema) -> tuple[object, ...]:
    return schema.generation, schema.num_rows, schema.dim, schema.keys


def _floats(rows: Array, kind: RowKind) -> Float32s:
    if kind.served == "int8":
        return values_of_rows(rows, kind.dim, 8)
    return rows if kind.served == "float32" else to_float32(rows, kind.served)
