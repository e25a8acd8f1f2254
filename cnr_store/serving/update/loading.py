"""Load a table, or a shard of it, as a chain leaves it: into the memory in which it is held, and no second copy.

Beyond that memory a load takes at most a window of codes (`restore.WINDOW_BYTES`) and one of floats, chunks in flight,
and a byte per row while some row is absent or escaped. Two cases take more: codes that outgrow int16 are read again
into int32, and the keys of a hashed table are counted before its rows are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cnr_store.read.direct_load import is_direct, load_directly
from cnr_store.read.plan import Columns, TablePlan, check_digest, plan_table
from cnr_store.read.replay import ChunkReader, matching
from cnr_store.read.table_reader import read_codes
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED, TASK_ROWS, Array, EscapeRows, array_specs
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.served_table import HeldTable, RowKind, ServedTable
from cnr_store.serving.rows.shards import HashShard, Shard, dense_range, is_in_shard
from cnr_store.serving.update.content import CodesTooWide, Content, ContentBuilder, holds_codes_in_place
from cnr_store.serving.update.keys import newest_rows
from cnr_store.types import RowIds


def load_table(
    readers: Sequence[ChunkReader],
    table: str,
    kind: RowKind,
    workers: Workers,
    *,
    shard: Shard | None = None,
    memory: Memory = ANONYMOUS,
) -> ServedTable:
    """Return a table, or the shard's rows of it, as the chain's last segment leaves it; blocks.

    The state digest is checked where all rows are read and no slot counts in it.

    Parameters
    ----------
    readers
        The chain's segments, baseline first.
    kind
        How rows are held, made for the schema that the last segment gives the table.

    Raises
    ------
    TableNotFound, CorruptStore, CorruptObject, MissingObject
    NonFiniteValues
        A row that is not finite has no int8 form.
    """
    manifests = [reader.manifest for reader in readers]
    schema = manifests[-1].tables[table]
    load = _load_hash_shard if isinstance(shard, HashShard) else _load_range
    if schema.keys == "hashed":
        plan, load = plan_table(manifests, table), _load_hashed
    else:
        rows = dense_range(shard, schema.num_rows)
        plan = plan_table(manifests, table, rows.start, rows.stop)
    try:
        with memory.attempt():
            return load(readers, plan, kind, workers, shard, memory, kind.dtype)
    except CodesTooWide:
        with memory.attempt():
            return load(readers, plan, kind, workers, shard, memory, np.dtype(np.int32))


@dataclass(slots=True)
class _States:
    """Statuses and escape rows of a table that is held by position, gathered window by window."""

    held: HeldTable
    memory: Memory
    escapes: EscapeRows

    def put(self, start: int, stop: int, content: Content) -> None:
        """Take those of rows [start, stop)."""
        at = slice(start - self.held.start, stop - self.held.start)
        if content.status is not None:
            self.held = self.held.with_status(self.memory)
            assert self.held.status is not None
            self.held.status[at] = content.status
        if len(content.escapes.rows):
            self.escapes.put(content.escapes.rows + start, content.escapes.values)


def _load_range(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    kind: RowKind,
    workers: Workers,
    shard: Shard | None,
    memory: Memory,
    dtype: np.dtype[Any],
) -> ServedTable:
    held = HeldTable.allocate(plan.table, plan.schema, kind, shard=shard, dtype=dtype, memory=memory)
    states = _States(held, memory, EscapeRows())
    if _is_decoded_once(plan, kind):
        total = load_directly(readers, plan, {"codes": held.rows}, workers)
        check_digest(plan, [(plan.columns, total)], {"codes"})
        return ServedTable(held)

    def place(start: int, stop: int) -> Array:
        return held.rows[start - held.start : stop - held.start]

    def in_place(_columns: Columns) -> Array:
        # Values become their codes' memory: integers of the same width, or floats that are stored as such.
        return held.rows if kind.spec is not None else held.rows.view(array_specs(plan.schema)["codes"].memory_dtype)

    builder = ContentBuilder(plan, kind, workers, place, states.put)
    is_in_place = holds_codes_in_place(plan, kind) and len(held.rows) > 0
    read_codes(readers, plan, workers, builder.take, memory=in_place if is_in_place else None)
    return ServedTable(states.held, escapes=states.escapes)


def _is_decoded_once(plan: TablePlan, kind: RowKind) -> bool:
    return kind.holds == "values" and kind.served == kind.table_dtype and len(plan.stored) == 1 and is_direct(plan)


def _load_hash_shard(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    kind: RowKind,
    workers: Workers,
    shard: Shard | None,
    memory: Memory,
    dtype: np.dtype[Any],
) -> ServedTable:
    """All windows are read, and the shard's rows of them kept: a chunk holds rows of every hash shard."""

    def chosen(low: int, high: int) -> int:
        return int(np.count_nonzero(is_in_shard(shard, np.arange(low, high, dtype=np.int64))))

    ranges = [(plan.start + low, plan.start + high) for low, high in blocks(plan.stop - plan.start, TASK_ROWS)]
    room = sum(workers.run(partial(chosen, low, high) for low, high in ranges))
    keyed = _Keyed(plan, kind, shard, room, memory, dtype)
    window = np.empty((0, kind.width), dtype)

    def place(start: int, stop: int) -> Array:
        nonlocal window
        if len(window) < stop - start:
            window = np.empty((stop - start, kind.width), dtype)
        return window[: stop - start]

    def keep(start: int, stop: int, content: Content) -> None:
        mine = is_in_shard(shard, np.arange(start, stop, dtype=np.int64))
        if content.status is not None:
            mine &= content.status != ABSENT
        at = np.flatnonzero(mine).astype(np.int64)
        keyed.put(at + start, content, at)

    read_codes(readers, plan, workers, ContentBuilder(plan, kind, workers, place, keep).take)
    return keyed.table()


class _Keyed:
    """A table that is held by key, while it is filled."""

    def __init__(
        self, plan: TablePlan, kind: RowKind, shard: Shard | None, room: int, memory: Memory, dtype: np.dtype[Any]
    ) -> None:
        self._held = HeldTable.allocate(
            plan.table, plan.schema, kind, shard=shard, num_keys=room, dtype=dtype, memory=memory
        )
        self._memory = memory
        self._escapes = EscapeRows()
        self._count = 0

    def put(self, keys: RowIds, content: Content, at: RowIds) -> None:
        """Take the rows at positions ``at`` (sorted) of ``content``, none of them absent, under keys not there yet."""
        into = slice(self._count, self._count + len(keys))
        np.take(content.rows, at, axis=0, out=self._held.rows[into])
        if content.status is not None and (content.status[at] == ESCAPED).any():
            self._held = self._held.with_status(self._memory)
        if self._held.status is not None:
            self._held.status[into] = CODED if content.status is None else content.status[at]
        assert self._held.index is not None
        self._held.index.insert_many(keys, np.arange(into.start, into.stop, dtype=np.int64))
        self._count = into.stop
        mine, theirs = matching(at, content.escapes.rows)
        if len(mine):
            rows, values = keys[mine], content.escapes.values["codes"][theirs]
            order = np.argsort(rows)
            self._escapes.put(rows[order], {"codes": values[order]})

    def table(self) -> ServedTable:
        """Return what was put."""
        return ServedTable(replace(self._held, num_rows=self._count), escapes=self._escapes)


def _load_hashed(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    kind: RowKind,
    workers: Workers,
    shard: Shard | None,
    memory: Memory,
    dtype: np.dtype[Any],
) -> ServedTable:
    """Row ids are read twice: to count the keys, and to find which chunk has the newest row of each."""
    counted = newest_rows(readers, plan, kind, workers, shard=shard, only_ids=True)
    room = sum(len(one.keys) for one in counted if one.status != ABSENT)
    keyed = _Keyed(plan, kind, shard, room, memory, dtype)
    for one in newest_rows(readers, plan, kind, workers, shard=shard, dtype=dtype):
        if one.status != ABSENT:
            keyed.put(one.keys, one.content, np.arange(len(one.keys), dtype=np.int64))
    return keyed.table()
