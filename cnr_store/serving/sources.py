"""The views of a loader as the `SinkSource` that a sink's feed reads.

Values never come from the store. Row ids that changed before the loader was opened are read from it once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from cnr_store.encodings.widths import to_float32
from cnr_store.errors import CorruptStore, NotFound
from cnr_store.read.changed_rows import plan_row_change
from cnr_store.segment.codes import Array
from cnr_store.serving.rows.fused_kernels import values_of_rows
from cnr_store.serving.rows.lookups import Lookups
from cnr_store.serving.rows.served_table import RowKind
from cnr_store.serving.rows.shards import rows_in_shard
from cnr_store.serving.rows.views import Publisher, View
from cnr_store.serving.sinks import Published, SinkState, SinkTable, SourceRows
from cnr_store.serving.update.update_plan import Compare, Same, open_plan, plan_path, plan_update
from cnr_store.store import Store
from cnr_store.types import Float32s, RowIds

MOST_RECORDS = 256
"""Maximum number of records that are read to plan from one version to another; beyond, only the two ends are used."""


class LoaderSource:
    """Rows of a publisher's newest view as float32, with the state that they are of.

    Values are the served ones: those of bfloat16 or int8 rows are rounded. A deleted row of a dense
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
            if not served.base.is_keyed:
                return range(served.base.start, served.base.stop)
            if served.schema.keys != "hashed":  # deleted rows have the fill, and no key
                return rows_in_shard(served.base.shard, np.arange(served.schema.num_rows, dtype=np.int64))
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

    def changed_since(self, state: SinkState) -> Mapping[str, RowIds] | None:
        """See `SinkSource.changed_since`: reads the row ids of the segments between the two, and no values."""
        view = self._publisher.view
        return None if view is None or self._opened is None else rows_between(self._opened, state.version, view)


class _LookupsOfAView(Lookups):
    """A lookup that states which view its rows are of."""

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


def rows_between(store: Store, since: int, view: View) -> dict[str, RowIds] | None:
    """Return which rows of a view's tables may differ between version ``since`` and the view's; blocks.

    None if their segments do not show it or were deleted: another baseline, another generation of a table, an expired
    version.

    Raises
    ------
    StorageFailure
    """
    log = store.internals.log
    try:
        versions = (
            range(since, view.version + 1) if 0 <= view.version - since <= MOST_RECORDS else (since, view.version)
        )
        entries = [entry for entry in map(log.read_standing, versions) if entry is not None]
        if len(entries) < 1 or (entries[0].record.v, entries[-1].record.v) != (since, view.version):
            return None
        plan = plan_path(entries) if since <= view.version else plan_update(entries[0], entries[-1])
        if isinstance(plan, Same):
            return {}
        if isinstance(plan, Compare):
            return None
        snapshot = store.snapshot(view.version)
        opened = open_plan(plan, snapshot.open_chain)
        tables = snapshot.tables.keys()
        if any(one.manifest.tables.keys() != tables for one in (opened.common, *opened.old, *opened.new)):
            return None
        changed: dict[str, RowIds] = {}
        for name, served in view.tables.items():
            change = plan_row_change(name, opened.common, opened.old, opened.new)
            if change is None or change.start < change.stop:  # a new generation, or a resize
                return None
            changed[name] = rows_in_shard(served.base.shard, change.row_ids(snapshot.workers)[0])
        return changed
    except (NotFound, CorruptStore):
        return None  # segments of the older version alone may be deleted; the sink gets everything


def _floats(rows: Array, kind: RowKind) -> Float32s:
    if kind.served == "int8":
        return values_of_rows(rows, kind.dim, 8)
    return rows if kind.served == "float32" else to_float32(rows, kind.served)
