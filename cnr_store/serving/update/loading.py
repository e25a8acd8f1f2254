"""Loads a table, or a shard of it, into the memory from which it is served, without a second copy.

Besides that memory a load takes at most a window of codes (`table_reader.WINDOW_BYTES`) and one of floats, chunks in
flight, and a byte per row if some row is absent or exact. Two cases take more: codes that exceed int16 are read again
as int32, and the keys of a hashed table are counted before its rows are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cnr_store.format.records import TableSchema
from cnr_store.read.direct_load import is_direct, load_directly
from cnr_store.read.joined_replay import read_together, small_tables
from cnr_store.read.plan import Columns, TablePlan, check_digest, plan_table
from cnr_store.read.replay import ChunkReader
from cnr_store.read.table_reader import read_codes
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED, TASK_ROWS, Array, ExactRows, array_specs
from cnr_store.segment.reader import SegmentReader
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.served_table import BaseTable, RowKind, ServedTable
from cnr_store.serving.rows.shards import Shard, dense_range, is_in_shard, is_keyed
from cnr_store.serving.update.content import CodesTooWide, Content, ContentBuilder, holds_codes_in_place
from cnr_store.serving.update.keys import count_keys, read_shard
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
    """Return a table, or the shard's rows of it, as of the chain's last segment; blocks.

    The state digest is checked if all rows are read and it includes no slot.

    Parameters
    ----------
    readers
        The chain's segments, baseline first.
    kind
        How rows are kept, for the table's schema in the last segment.

    Raises
    ------
    TableNotFound, CorruptStore, CorruptObject, MissingObject
    NonFiniteValues
        A row that is not finite has no int8 form.
    """
    manifests = [reader.manifest for reader in readers]
    schema = manifests[-1].tables[table]
    load = _load_keyed if is_keyed(shard, schema) else _load_range
    rows = dense_range(shard, schema.num_rows)
    plan = plan_table(manifests, table, rows.start, rows.stop)
    try:
        with memory.attempt():
            return load(readers, plan, kind, workers, shard, memory, kind.dtype)
    except CodesTooWide:
        with memory.attempt():
            return load(readers, plan, kind, workers, shard, memory, np.dtype(np.int32))


def load_together(
    readers: Sequence[SegmentReader],
    tables: Mapping[str, tuple[TableSchema, RowKind]],
    workers: Workers,
    *,
    memory: Memory = ANONYMOUS,
) -> dict[str, tuple[ServedTable, int]]:
    """Return those of some whole tables that can be loaded together, as `load_table` does, and their stored bytes.

    Blocks. That costs much less than to load them one by one. What is wrong with a table is left to `load_table`.

    Parameters
    ----------
    tables
        By name: the schema in the last segment, and how rows are kept.
    """
    as_stored = (
        name
        for name, (schema, kind) in tables.items()
        if schema.keys == "dense" and kind.kept_as == "values" and kind.served == kind.table_dtype == "float32"
    )
    # Shared memory is taken as soon as it is allocated: only of tables that will most likely be read.
    bases = {
        name: BaseTable.allocate(name, *tables[name], memory=memory) for name in small_tables(readers, as_stored)
    }  # fmt: skip
    done = read_together(readers, {name: {"codes": base.rows} for name, base in bases.items()}, workers)
    for name in bases.keys() - done.keys():
        block = memory.block_of(bases[name].rows)
        if block is not None:
            memory.release(block)
    return {name: (ServedTable(bases[name]), one.stored_bytes) for name, one in done.items()}


@dataclass(slots=True)
class _States:
    """Collects statuses and exact rows of a table by position, window by window."""

    base: BaseTable
    memory: Memory
    exact_rows: ExactRows

    def put(self, start: int, stop: int, content: Content) -> None:
        """Add those of rows [start, stop)."""
        at = slice(start - self.base.start, stop - self.base.start)
        if content.status is not None:
            self.base = self.base.with_status(self.memory)
            assert self.base.status is not None
            self.base.status[at] = content.status
        if len(content.exact_rows.rows):
            self.exact_rows.put(content.exact_rows.rows + start, content.exact_rows.values)


def _load_range(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    kind: RowKind,
    workers: Workers,
    shard: Shard | None,
    memory: Memory,
    dtype: np.dtype[Any],
) -> ServedTable:
    base = BaseTable.allocate(plan.table, plan.schema, kind, shard=shard, dtype=dtype, memory=memory)
    states = _States(base, memory, ExactRows())
    if _is_decoded_once(plan, kind):
        total = load_directly(readers, plan, {"codes": base.rows}, workers)
        check_digest(plan, [(plan.columns, total)], {"codes"})
        return ServedTable(base)

    def place(start: int, stop: int) -> Array:
        return base.rows[start - base.start : stop - base.start]

    def in_place(_columns: Columns) -> Array:
        # Values become their codes' memory: integers of the same width, or floats that are stored as such.
        return base.rows if kind.spec is not None else base.rows.view(array_specs(plan.schema)["codes"].memory_dtype)

    builder = ContentBuilder(plan, kind, workers, place, states.put)
    is_in_place = holds_codes_in_place(plan, kind) and len(base.rows) > 0
    read_codes(readers, plan, workers, builder.take, memory=in_place if is_in_place else None)
    return ServedTable(states.base, exact_rows=states.exact_rows)


def _is_decoded_once(plan: TablePlan, kind: RowKind) -> bool:
    return kind.kept_as == "values" and kind.served == kind.table_dtype and len(plan.stored) == 1 and is_direct(plan)


def _load_keyed(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    kind: RowKind,
    workers: Workers,
    shard: Shard | None,
    memory: Memory,
    dtype: np.dtype[Any],
) -> ServedTable:
    """Load rows that are found by key: first count them, then read them.

    All windows of a dense table are read for a hash shard. The row ids of a hashed table are read twice.
    """

    def chosen(low: int, high: int) -> int:
        return int(np.count_nonzero(is_in_shard(shard, np.arange(low, high, dtype=np.int64))))

    if plan.schema.keys == "hashed":
        room = count_keys(readers, plan, workers, shard)
    else:
        ranges = [(plan.start + low, plan.start + high) for low, high in blocks(plan.stop - plan.start, TASK_ROWS)]
        room = sum(workers.run(partial(chosen, low, high) for low, high in ranges))
    keyed = _Keyed(plan, kind, shard, room, memory, dtype)
    read_shard(readers, plan, kind, workers, shard, dtype, keyed.put)
    return keyed.table()


class _Keyed:
    """A table by key while it is filled."""

    def __init__(
        self, plan: TablePlan, kind: RowKind, shard: Shard | None, room: int, memory: Memory, dtype: np.dtype[Any]
    ) -> None:
        self._base = BaseTable.allocate(
            plan.table, plan.schema, kind, shard=shard, num_keys=room, dtype=dtype, memory=memory
        )
        self._memory = memory
        self._escapes = ExactRows()
        self._count = 0

    def put(self, keys: RowIds, content: Content) -> None:
        """Add the rows that are not absent; their keys are new."""
        if content.status is not None and (content.status == ABSENT).any():
            at = np.flatnonzero(content.status != ABSENT).astype(np.int64)
            keys, content = keys[at], content.take(at)
        into = slice(self._count, self._count + len(keys))
        self._base.rows[into] = content.rows
        if content.status is not None and (content.status == ESCAPED).any():
            self._base = self._base.with_status(self._memory)
        if self._base.status is not None:
            self._base.status[into] = CODED if content.status is None else content.status
        assert self._base.index is not None
        self._base.index.insert_many(keys, np.arange(into.start, into.stop, dtype=np.int64))
        self._count = into.stop
        if len(content.exact_rows.rows):
            self._escapes.put(keys[content.exact_rows.rows], dict(content.exact_rows.values))

    def table(self) -> ServedTable:
        """Return the table."""
        return ServedTable(replace(self._base, num_rows=self._count), exact_rows=self._escapes)
