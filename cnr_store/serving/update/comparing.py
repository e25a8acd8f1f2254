"""Find what differs between a consumer's own copy of a table and a version, where no delta says it; blocks.

What is compared is content as it is held, bit for bit, and each row's status, so the result is right whatever happened
in between: rollbacks, new baselines, compactions, segments that are gone.
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
from cnr_store.read.table_reader import read_codes, rows_since
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED, Array, EscapeRows
from cnr_store.segment.reader import SegmentReader
from cnr_store.serving.rows import gather
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.served_table import HeldTable, Overlay, RowKind, ServedTable
from cnr_store.serving.rows.shards import dense_range, is_in_shard, rows_in_shard
from cnr_store.serving.update.content import CodesTooWide, Content, ContentBuilder, escapes_after, read_content
from cnr_store.serving.update.keys import KeyedRows, newest_rows
from cnr_store.serving.update.loading import load_table
from cnr_store.types import RowIds, RowRange

READ_BYTES = 32 * 1024 * 1024
"""Codes of rows that are read again at once; as much again of floats, and of rows that are held, is in memory."""

COMPARED_ROWS = 1 << 16

LEAST_LIMIT = 1024
"""A table where fewer rows differ is never loaded anew for that."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What makes the copy that is held the version: an overlay, or the table anew.

    Attributes
    ----------
    change
        An overlay to be read over what is held, or a table that replaces it.
    escapes
        All escape rows of the version; only where codes are held.
    """

    change: Overlay | HeldTable
    escapes: EscapeRows


def reread_rows(
    readers: Sequence[ChunkReader],
    served: ServedTable,
    rows: RowIds,
    workers: Workers,
    *,
    memory: Memory = ANONYMOUS,
) -> Difference:
    """Return an overlay of ``rows`` (sorted, unique, of the shard) as the chain's last segment leaves them; blocks.

    Rows that the version does not have become absent. The table has as many rows as ``served`` where rows are held by
    position. Memory: the overlay, and three times `READ_BYTES`.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject, NonFiniteValues
    CodesTooWide
        Codes are held in int16, and no longer fit it.
    """
    kind, schema = served.kind, readers[-1].manifest.tables[served.name]
    found = _Differing(served, workers)
    with memory.attempt():
        if schema.keys == "hashed":
            plan = plan_table([reader.manifest for reader in readers], served.name)
            missing = np.ones(len(rows), np.bool_)
            for one in newest_rows(
                readers, plan, kind, workers, shard=served.held.shard, wanted=rows, dtype=served.held.rows.dtype
            ):
                found.put_keyed(one)
                missing[np.searchsorted(rows, one.keys)] = False
            found.put_absent(rows[missing])
        else:
            for low, high in blocks(len(rows), max(1, READ_BYTES // (4 * kind.dim))):
                part = rows[low:high]
                content = read_content(readers, served.name, part, kind, workers, dtype=served.held.rows.dtype)
                found.put(part, content)
        return found.difference(schema, memory)


def compare_table(
    readers: Sequence[ChunkReader], served: ServedTable, kind: RowKind, workers: Workers, *, memory: Memory = ANONYMOUS
) -> Difference:
    """Return what makes the copy that is held the state of the chain's last segment, having read all of it; blocks.

    Where more than half of the rows differ, or rows are held in another way (``kind`` is that of the version), or other
    rows by position, the table is loaded anew, beside the one held.

    Memory: what differs, and a window of the table (`restore.WINDOW_BYTES` of codes, and the same of floats).

    Raises
    ------
    TableNotFound, CorruptStore, CorruptObject, MissingObject, NonFiniteValues
    """
    held = served.held
    schema = readers[-1].manifest.tables[served.name]
    if kind == served.kind and schema.keys == served.schema.keys and not has_other_rows(held, schema):
        found = _Differing(served, workers, limit=max(LEAST_LIMIT, held.num_rows // 2))
        try:
            with memory.attempt():
                if schema.keys == "hashed":
                    _compare_hashed(readers, served, workers, found)
                else:
                    _compare_dense(readers, served, workers, found)
                return found.difference(schema, memory)
        except (CodesTooWide, _TooMany):
            del found  # half of the table, which is no longer wanted
    anew = load_table(readers, served.name, kind, workers, shard=held.shard, memory=memory)
    return Difference(anew.held, anew.escapes)


def has_other_rows(held: HeldTable, schema: TableSchema) -> bool:
    """Return whether a table of ``schema`` has other rows at the positions that are held than it had. Pure."""
    return not held.is_keyed and dense_range(held.shard, schema.num_rows) != RowRange(held.start, held.stop)


class _TooMany(Exception):
    """So many rows differ that the table is better loaded anew."""


@dataclass(slots=True)
class _Differing:
    """Collects the rows of a version that are not what is held."""

    served: ServedTable
    workers: Workers
    limit: int | None = None
    _ids: list[RowIds] = field(default_factory=list)
    _rows: list[Array] = field(default_factory=list)
    _status: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    _exact: list[tuple[RowIds, Array]] = field(default_factory=list)
    _count: int = 0

    def put(self, ids: RowIds, content: Content) -> None:
        """Take those of a window's rows (sorted) that differ."""
        found = self.workers.run(
            partial(self._find, ids, content, low, high) for low, high in blocks(len(ids), COMPARED_ROWS)
        )
        for at in found:
            status = np.zeros(len(at), np.uint8) if content.status is None else content.status[at]
            self._keep(ids[at], content.rows[at], status)
            if len(content.escapes.rows):
                mine, theirs = matching(at, content.escapes.rows)
                self._exact.append((ids[at][mine], content.escapes.values["codes"][theirs]))

    def put_keyed(self, one: KeyedRows) -> None:
        """Take those keys of a hashed table that differ."""
        if one.status == ABSENT:
            self.put_absent(one.keys)
            return
        self.put(one.keys, one.content)

    def put_absent(self, ids: RowIds) -> None:
        """Take those of the rows that are held; the version does not have them."""
        out = np.empty((len(ids), self.served.kind.width), self.served.held.rows.dtype)
        gone = ids[self.served.gather_held(ids, out) != ABSENT]
        self._keep(gone, out[: len(gone)], np.full(len(gone), ABSENT, np.uint8))

    def difference(self, schema: TableSchema, memory: Memory) -> Difference:
        """Return the rows that were taken as an overlay."""
        served = self.served
        overlay = Overlay.allocate(served.name, schema, self._count, served.kind.width, served.held.rows.dtype, memory)
        high = self._count
        while self._ids:  # each block goes as soon as it is copied
            ids, rows, status = self._ids.pop(), self._rows.pop(), self._status.pop()
            into = slice(high - len(ids), high)
            overlay.ids[into], overlay.rows[into], overlay.status[into] = ids, rows, status
            high = into.start
        overlay.fill_index()
        return Difference(overlay, escapes_after(served, overlay, self._exact))

    def _find(self, ids: RowIds, content: Content, low: int, high: int) -> RowIds:
        """Positions in [low, high) of the rows that differ."""
        served = self.served
        held = np.empty((high - low, served.kind.width), served.held.rows.dtype)
        before = served.gather_held(ids[low:high], held)
        after = np.zeros(high - low, np.uint8) if content.status is None else content.status[low:high]
        differs = (gather.as_words(held) != gather.as_words(content.rows[low:high])).any(axis=1)
        if served.kind.holds == "codes":
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


def _compare_dense(readers: Sequence[ChunkReader], served: ServedTable, workers: Workers, found: _Differing) -> None:
    held, kind = served.held, served.kind
    schema = readers[-1].manifest.tables[served.name]
    start, stop = (0, schema.num_rows) if held.is_keyed else (held.start, held.stop)
    plan = plan_table([reader.manifest for reader in readers], served.name, start, stop)
    window = np.empty((0, kind.width), held.rows.dtype)

    def place(low: int, high: int) -> Array:
        nonlocal window
        if len(window) < high - low:
            window = np.empty((high - low, kind.width), held.rows.dtype)
        return window[: high - low]

    def compare(low: int, high: int, content: Content) -> None:
        ids = np.arange(low, high, dtype=np.int64)
        if held.is_keyed:
            at = np.flatnonzero(is_in_shard(held.shard, ids)).astype(np.int64)
            status = None if content.status is None else content.status[at]
            mine, theirs = matching(at, content.escapes.rows)
            values = {name: values[theirs] for name, values in content.escapes.values.items()}
            ids, content = ids[at], Content(content.rows[at], status, EscapeRows(mine, values))
        found.put(ids, content)

    read_codes(readers, plan, workers, ContentBuilder(plan, kind, workers, place, compare).take)
    if held.is_keyed:
        found.put_absent(vanished_rows(served, schema))


def vanished_rows(served: ServedTable, schema: TableSchema) -> RowIds:
    """Return the rows held by key that a dense table of ``schema`` is too short for."""
    ids = served.row_ids()
    return ids[np.searchsorted(ids, schema.num_rows) :]


def _compare_hashed(readers: Sequence[ChunkReader], served: ServedTable, workers: Workers, found: _Differing) -> None:
    plan = plan_table([reader.manifest for reader in readers], served.name)
    ours = served.row_ids()
    named = np.zeros(len(ours), np.bool_)
    for one in newest_rows(readers, plan, served.kind, workers, shard=served.held.shard, dtype=served.held.rows.dtype):
        found.put_keyed(one)
        named[matching(ours, one.keys)[0]] = True
    found.put_absent(ours[~named])


def rows_that_may_differ(
    common: SegmentReader, segments: Sequence[SegmentReader], served: ServedTable, schema: TableSchema
) -> RowIds:
    """Return the rows of the shard whose state the segments behind a common one changed: sorted, unique. Blocks.

    Reads row ids alone. The table is of one generation all along; rows that ``schema`` is too short for do not count.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    """
    rows = rows_in_shard(served.held.shard, rows_since([common, *segments], served.name, schema))
    if served.held.is_keyed:
        return rows
    return rows[(rows >= served.held.start) & (rows < served.held.stop)]
