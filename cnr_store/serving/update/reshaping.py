"""A copy of held rows in another shape: another number of rows, codes of a finer unit, or codes in more bits.

What cannot be said by an overlay needs a second copy for a while: the old one goes when no view has it any more.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from cnr_store.encodings import row_kernels
from cnr_store.format.records import TableSchema
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import ABSENT, CODED, Array, EscapeRows
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.served_table import HeldTable, RowKind, ServedTable
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
    """Return a copy of a table, overlay put in, as a table of ``schema`` with the same rows holds them; blocks.

    Rows that the new size adds are absent, and rows that it has no place for are dropped.

    Parameters
    ----------
    schema, kind
        Of the same generation: other numbers of rows and a larger ``shift`` are all that may differ.
    wide
        Hold codes in int32.

    Raises
    ------
    CodesTooWide
        Codes are to be held in int16 and do not fit it.
    """
    halvings = schema.shift - served.schema.shift if kind.holds == "codes" else 0
    assert halvings >= 0, "codes are not made coarser: half of them would be lost"
    dtype = np.dtype(np.int32) if wide else kind.dtype
    if served.held.is_keyed:
        ids = served.row_ids()
        if schema.keys == "dense":
            ids = ids[: np.searchsorted(ids, schema.num_rows)]
        held = HeldTable.allocate(
            served.name, schema, kind, shard=served.held.shard, num_keys=len(ids), dtype=dtype, memory=memory
        )
        assert held.index is not None
        held.index.insert_many(ids, np.arange(len(ids), dtype=np.int64))
        first, states = 0, np.full(len(ids), CODED, np.uint8)
    else:
        held = HeldTable.allocate(served.name, schema, kind, shard=served.held.shard, dtype=dtype, memory=memory)
        start, stop = max(held.start, served.held.start), min(held.stop, served.held.stop)
        ids = np.arange(start, max(start, stop), dtype=np.int64)
        first, states = start - held.start if len(ids) else 0, np.full(len(held.rows), ABSENT, np.uint8)
        held.rows[...] = kind.absent_row
    copy = partial(_copy, served, held.rows[first:], ids, states[first:], halvings)
    workers.run(partial(copy, low, high) for low, high in blocks(len(ids), COPY_ROWS))
    if states.any():
        held = held.with_status(memory)
        assert held.status is not None
        held.status[: len(states)] = states
    inside = np.ones(len(served.escapes.rows), np.bool_)
    if schema.keys == "dense":
        inside = served.escapes.rows < schema.num_rows
    values = {name: values[inside] for name, values in served.escapes.values.items()}
    return ServedTable(held, escapes=EscapeRows(served.escapes.rows[inside], values))


def _copy(served: ServedTable, rows: Array, ids: RowIds, states: Array, halvings: int, low: int, high: int) -> None:
    before = np.empty((high - low, served.kind.width), served.held.rows.dtype)
    status = served.gather_held(ids[low:high], before)
    states[low:high] = status
    into = rows[low:high]
    if before.dtype == into.dtype and halvings == 0:
        into[...] = before
        return
    before[status != CODED] = 0
    if row_kernels.put_block(into, before, halvings) >= 0:
        raise CodesTooWide
