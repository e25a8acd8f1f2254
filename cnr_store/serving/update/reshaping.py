"""Copies a served table to another shape: another number of rows, codes of a finer scale, or wider codes.

An overlay cannot express these, so there are two copies until no view uses the old one.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from cnr_store.encodings import row_kernels
from cnr_store.format.records import TableSchema
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import ABSENT, CODED, Array, ExactRows
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.served_table import BaseTable, RowKind, ServedTable
from cnr_store.serving.update.content import CodesTooWide
from cnr_store.types import RowIds

COPY_ROWS = 1 << 14


def reshaped(
    served: ServedTable,
    schema: TableSchema,
    kind: RowKind,
    workers: Workers,
    *,
    wide: bool = False,
    memory: Memory = ANONYMOUS,
) -> ServedTable:
    """Return a copy of a table, with its overlay merged, in the form of ``schema``; blocks.

    Rows that a new size adds are absent; rows outside it are dropped.

    Parameters
    ----------
    schema, kind
        Of the same generation: only the number of rows and a larger ``shift`` may differ.
    wide
        Keep codes as int32.

    Raises
    ------
    CodesTooWide
        Codes are kept as int16 and do not fit.
    """
    shift_change = schema.shift - served.schema.shift if kind.kept_as == "codes" else 0
    assert shift_change >= 0, "codes are not made coarser: half of them would be lost"
    dtype = np.dtype(np.int32) if wide else kind.dtype
    if served.base.is_keyed:
        ids = served.row_ids()
        if schema.keys == "dense":
            ids = ids[: np.searchsorted(ids, schema.num_rows)]
        base = BaseTable.allocate(
            served.name, schema, kind, shard=served.base.shard, num_keys=len(ids), dtype=dtype, memory=memory
        )
        assert base.index is not None
        base.index.insert_many(ids, np.arange(len(ids), dtype=np.int64))
        first, states = 0, np.full(len(ids), CODED, np.uint8)
    else:
        base = BaseTable.allocate(served.name, schema, kind, shard=served.base.shard, dtype=dtype, memory=memory)
        start, stop = max(base.start, served.base.start), min(base.stop, served.base.stop)
        ids = np.arange(start, max(start, stop), dtype=np.int64)
        first, states = start - base.start if len(ids) else 0, np.full(len(base.rows), ABSENT, np.uint8)
        base.rows[...] = kind.absent_row
    copy = partial(_copy, served, base.rows[first:], ids, states[first:], shift_change)
    workers.run(partial(copy, low, high) for low, high in blocks(len(ids), COPY_ROWS))
    if states.any():
        base = base.with_status(memory)
        assert base.status is not None
        base.status[: len(states)] = states
    inside = np.ones(len(served.exact_rows.rows), np.bool_)
    if schema.keys == "dense":
        inside = served.exact_rows.rows < schema.num_rows
    values = {name: values[inside] for name, values in served.exact_rows.values.items()}
    return ServedTable(base, exact_rows=ExactRows(served.exact_rows.rows[inside], values))


def _copy(served: ServedTable, rows: Array, ids: RowIds, states: Array, shift_change: int, low: int, high: int) -> None:
    before = np.empty((high - low, served.kind.width), served.base.rows.dtype)
    status = served.gather_stored(ids[low:high], before)
    states[low:high] = status
    into = rows[low:high]
    if before.dtype == into.dtype and shift_change == 0:
        into[...] = before
        return
    before[status != CODED] = 0
    if row_kernels.put_block(into, before, shift_change) >= 0:
        raise CodesTooWide
