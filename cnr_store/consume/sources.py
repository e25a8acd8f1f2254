"""What a sink's feed reads: the views of a loader, as the `RowSource` that it asks for. No store is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cnr_store.consume.fused_reference import values_of_rows
from cnr_store.consume.held import RowKind
from cnr_store.consume.sinks import Published, SinkState, SinkTable, SourceRows
from cnr_store.consume.views import Lookups, Publisher, View
from cnr_store.encodings.widths import to_float32
from cnr_store.table_codes import Array
from cnr_store.types import Float32s, RowIds


class LoaderSource:
    """Rows of a publisher's newest view as float32, with the state that they are of.

    Values are as exact as what is served: of bfloat16 or int8 rows they are what those say. A deleted row of a dense
    table has its fill; only keys of hashed tables can be absent.

    Parameters
    ----------
    store, branch, scope
        As in `SinkState`.
    """

    def __init__(self, publisher: Publisher, *, store: str, branch: str, scope: str) -> None:
        self._publisher = publisher
        self._lookups = Lookups(publisher)
        self._store, self._branch, self._scope = store, branch, scope

    def published(self) -> Published | None:
        """See `RowSource.published`."""
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
        """See `RowSource.row_ids`."""
        while True:
            view, board = self._publisher.newest_view()
            served = view.table(table)
            if not served.held.is_keyed:
                return range(served.held.start, served.held.stop)
            ids = served.row_ids()
            if board.is_whole(view.epoch):
                return ids

    def read_rows(self, row_ids: Mapping[str, RowIds]) -> SourceRows:
        """See `RowSource.read_rows`."""
        batch = self._lookups.lookup(row_ids)
        view = self._publisher.newest_view()[0]
        tables = {}
        for name, rows in batch.rows.items():
            missing = batch.missing[name]
            hashed = view.table(name).schema.keys == "hashed"
            absent = missing if hashed and missing is not None else np.zeros(len(rows), np.bool_)
            tables[name] = (_floats(rows, view.table(name).kind), ~absent)
        return SourceRows(batch.version, tables)

    def changed_since(self, held: SinkState) -> Mapping[str, RowIds] | None:
        """See `RowSource.changed_since`; what changed before this loader was there it does not know."""
        del held
        return None


def _floats(rows: Array, kind: RowKind) -> Float32s:
    if kind.served == "int8":
        return values_of_rows(rows, kind.dim, 8)
    return rows if kind.served == "float32" else to_float32(rows, kind.served)
