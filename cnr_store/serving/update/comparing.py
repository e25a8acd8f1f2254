"""Finds the rows in which a served table differs from a version when no delta gives them; blocks.

Rows are compared as they are served, bit by bit, with their status. So the result is right after rollbacks, new
baselines, compactions, and deletions of segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from cnr_store.format.records import TableSchema
from cnr_store.read.plan import plan_table
from cnr_store.read.replay import ChunkReader, matching
from cnr_store.runtime.threads import Workers, blocks, windows
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED, Array, ExactRows
from cnr_store.serving.rows import gather
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.served_table import BaseTable, Overlay, RowKind, ServedTable
from cnr_store.serving.rows.shards import dense_range
from cnr_store.serving.update.content import CodesTooWide, Content, exact_rows_after, read_content
from cnr_store.serving.update.keys import read_shard
from cnr_store.serving.update.loading import load_table
from cnr_store.types import RowIds, RowRange

READ_BYTES = 32 * 1024 * 1024
"""Bytes of codes that are read at once; floats and served rows take as much again each."""

COMPARED_ROWS = 1 << 16

LEAST_LIMIT = 1024
"""A table with fewer differing rows is never loaded again."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The changes from a served table to a version: an overlay, or a new table.

    Attributes
    ----------
    change
        An overlay for the served table, or a table that replaces it.
    exact_rows
        All exact rows of the version; only if codes are kept.
    """

    change: Overlay | BaseTable
    exact_rows: ExactRows


def reread_rows(readers: Sequence[ChunkReader], served: ServedTable, rows: RowIds, workers: Workers) -> Difference:
    """Return an overlay of ``rows`` (sorted, unique, of the shard) as of the chain's last segment; blocks.

    Rows that the version does not have become absent. If rows are found by position, the table has as many as
    ``served``. Memory: the overlay, in this process, and three times `READ_BYTES`.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject, NonFiniteValues
    CodesTooWide
        Codes are kept as int16, and no longer fit.
    """
    kind, schema = served.kind, readers[-1].manifest.tables[served.name]
    found = _Differing(served, workers)
    plan = plan_table([reader.manifest for reader in readers], served.name, rows=rows)
    for low, high in windows(len(rows), 4 * kind.dim, READ_BYTES):
        part = rows[low:high]
        out = np.empty((len(part), kind.width), served.base.rows.dtype)
        found.put(part, read_content(readers, plan, part, kind, workers, out))
    return found.difference(schema, ANONYMOUS)


def compare_table(
    readers: Sequence[ChunkReader], served: ServedTable, kind: RowKind, workers: Workers, *, memory: Memory = ANONYMOUS
) -> Difference:
    """Return the changes from a served table to the state of the chain's last segment; reads all of it. Blocks.

    If more than half of the rows differ, or they are kept in another form (``kind`` is the version's) or at other
    positions, the table is loaded again, next to the present one.

    Memory: the rows that differ, and a window of the table (`table_reader.WINDOW_BYTES` of codes, and as much of
    floats).

    Raises
    ------
    TableNotFound, CorruptStore, CorruptObject, MissingObject, NonFiniteValues
    """
    base = served.base
    schema = readers[-1].manifest.tables[served.name]
    if kind == served.kind and schema.keys == served.schema.keys and not has_other_rows(base, schema):
        found = _Differing(served, workers, limit=max(LEAST_LIMIT, base.num_rows // 2))
        try:
            with memory.attempt():
                _compare(readers, served, workers, found)
                return found.difference(schema, memory)
        except (CodesTooWide, _TooMany):
            del found  # half of the table, which is no longer needed
    loaded = load_table(readers, served.name, kind, workers, shard=base.shard, memory=memory)
    return Difference(loaded.base, loaded.exact_rows)


def has_other_rows(base: BaseTable, schema: TableSchema) -> bool:
    """Return whether a table of ``schema`` has other rows at its positions than ``base``. Pure."""
    return not base.is_keyed and dense_range(base.shard, schema.num_rows) != RowRange(base.start, base.stop)


class _TooMany(Exception):
    """So many rows differ that loading the table is cheaper."""


@dataclass(slots=True)
class _Differing:
    """Collects the rows of a version that differ from the served ones."""

    served: ServedTable
    workers: Workers
    limit: int | None = None
    _ids: list[RowIds] = field(default_factory=list)
    _rows: list[Array] = field(default_factory=list)
    _status: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    _exact: list[tuple[RowIds, Array]] = field(default_factory=list)
    _count: int = 0

    def put(self, ids: RowIds, content: Content) -> None:
        """Add the differing rows of a window (sorted ids)."""
        found = self.workers.run(
            partial(self._find, ids, content, low, high) for low, high in blocks(len(ids), COMPARED_ROWS)
        )
        for at in found:
            status = np.zeros(len(at), np.uint8) if content.status is None else content.status[at]
            self._keep(ids[at], content.rows[at], status)
            if len(content.exact_rows.rows):
                mine, theirs = matching(at, content.exact_rows.rows)
                self._exact.append((ids[at][mine], content.exact_rows.values["codes"][theirs]))

    def put_absent(self, ids: RowIds) -> None:
        """Add the served ones of rows that the version does not have."""
        out = np.empty((len(ids), self.served.kind.width), self.served.base.rows.dtype)
        gone = ids[self.served.gather_stored(ids, out) != ABSENT]
        self._keep(gone, out[: len(gone)], np.full(len(gone), ABSENT, np.uint8))

    def difference(self, schema: TableSchema, memory: Memory) -> Difference:
        """Return the collected rows as an overlay."""
        served = self.served
        overlay = Overlay.allocate(served.name, schema, self._count, served.kind.width, served.base.rows.dtype, memory)
        high = self._count
        while self._ids:  # each block goes as soon as it is copied
            ids, rows, status = self._ids.pop(), self._rows.pop(), self._status.pop()
            into = slice(high - len(ids), high)
            overlay.ids[into], overlay.rows[into], overlay.status[into] = ids, rows, status
            high = into.start
        overlay.fill_index()
        return Difference(overlay, exact_rows_after(served, overlay, self._exact))

    def _find(self, ids: RowIds, content: Content, low: int, high: int) -> RowIds:
        """Positions in [low, high) of the rows that differ."""
        served = self.served
        base = np.empty((high - low, served.kind.width), served.base.rows.dtype)
        before = served.gather_stored(ids[low:high], base)
        after = np.zeros(high - low, np.uint8) if content.status is None else content.status[low:high]
        differs = (gather.as_words(base) != gather.as_words(content.rows[low:high])).any(axis=1)
        if served.kind.kept_as == "codes":
            differs &= after == CODED
            differs |= after == ESCAPED  # few, and their floats are elsewhere
        else:
            differs &= after != ABSENT
        differs |= before != after
        return np.flatnonzero(differs).astype(np.int64) + low

    def _keep(self, ids: RowIds, rows: Array, status: npt.NDArray[np.uint8]) -> None:
        if len(ids) == 0:
            return
        self._ids.append(ids)
        self._rows.append(rows)
        self._status.append(status)
        self._count += len(ids)
        if self.limit is not None and self._count > self.limit:
            raise _TooMany


def _compare(readers: Sequence[ChunkReader], served: ServedTable, workers: Workers, found: _Differing) -> None:
    base = served.base
    schema = readers[-1].manifest.tables[served.name]
    is_hashed = schema.keys == "hashed"
    start, stop = (0, schema.num_rows) if base.is_keyed else (base.start, base.stop)
    plan = plan_table([reader.manifest for reader in readers], served.name, start, stop)
    ours = served.row_ids() if is_hashed else np.empty(0, np.int64)
    is_named = np.zeros(len(ours), np.bool_)

    def take(ids: RowIds, content: Content) -> None:
        found.put(ids, content)
        is_named[matching(ours, ids)[0]] = True

    read_shard(readers, plan, served.kind, workers, base.shard, base.rows.dtype, take)
    if is_hashed:
        found.put_absent(ours[~is_named])
    elif base.is_keyed:
        found.put_absent(vanished_rows(served, schema))


def vanished_rows(served: ServedTable, schema: TableSchema) -> RowIds:
    """Return the rows found by key that a dense table of ``schema`` is too short for."""
    ids = served.row_ids()
    return ids[np.searchsorted(ids, schema.num_rows) :]
