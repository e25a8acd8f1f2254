"""The rows of a hashed table, from the newest segment of its chain back to the first: each key once, as it is now.

Memory: an index of the keys (`KeyIndex`), and chunks in flight; never the values of a whole chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import row_kernels
from cnr_store.encodings.widths import carrier
from cnr_store.errors import CorruptStore
from cnr_store.read.plan import Step, TablePlan
from cnr_store.read.replay import ChunkReader, Replay, matching
from cnr_store.runtime.threads import Inline, Workers, blocks
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED, EscapeRows, array_specs, decode_block
from cnr_store.segment.decoded import Scratch
from cnr_store.serving.rows.key_index import KeyIndex
from cnr_store.serving.rows.served_table import RowKind
from cnr_store.serving.rows.shards import Shard, rows_in_shard
from cnr_store.serving.update.content import CodesTooWide, Content, serve
from cnr_store.types import RowIds

LEAST_KEYS = 1024
INLINE = Inline()
_STATUS = {"set": CODED, "escape": ESCAPED, "delete": ABSENT}


@dataclass(frozen=True, slots=True)
class KeyedRows:
    """Keys whose newest row is in one chunk, sorted; all of one ``status``.

    ``content``: the rows as they are held, none where keys were deleted, or only ids are read.
    """

    keys: RowIds
    status: int
    content: Content


def newest_rows(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    kind: RowKind,
    workers: Workers,
    *,
    shard: Shard | None = None,
    wanted: RowIds | None = None,
    dtype: npt.DTypeLike | None = None,
    only_ids: bool = False,
) -> Iterator[KeyedRows]:
    """Yield every key that a chain names, chunk by chunk, the newest segment first: a key is yielded once. Blocks.

    Parameters
    ----------
    wanted
        Keys to look for (sorted, unique); None means all of the shard.
    dtype
        What rows are held in, where that is not ``kind.dtype``: int32 for codes that outgrew int16.
    only_ids
        Read no values.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    NonFiniteValues
        A row that is not finite has no int8 form.
    CodesTooWide
        Codes do not fit the dtype.
    """
    memory_dtype = np.dtype(kind.dtype if dtype is None else dtype)
    engine = Replay(readers, workers)
    seen = KeyIndex.allocate(LEAST_KEYS)

    def read(step: Step) -> tuple[RowIds, Content]:
        rows = readers[step.segment].read_rows(step.row_list, step.chunk, Scratch())
        chosen = rows_in_shard(shard, rows)
        if wanted is not None:
            chosen = chosen[matching(wanted, chosen)[1]]
        known = seen.find(np.ascontiguousarray(chosen))
        if (known == step.segment).any():
            raise _in_two_lists(plan, readers[step.segment], int(chosen[np.argmax(known == step.segment)]))
        fresh = chosen[known < 0].copy()
        if only_ids or step.operation == "delete" or len(fresh) == 0:
            return fresh, Content(np.empty((0, kind.width), memory_dtype), None, EscapeRows())
        return fresh, _content(engine, plan, step, kind, memory_dtype, matching(fresh, rows)[1])

    for batch in reversed(plan.batches):
        # Threads look at `seen`; it grows only while none of them is at work.
        for low, high in blocks(len(batch.steps), 2 * workers.threads):
            steps = batch.steps[low:high]
            found = workers.run(partial(read, step) for step in steps)
            for step, (keys, content) in zip(steps, found, strict=True):
                if seen.room < len(keys):
                    seen = seen.grown(2 * (seen.count + len(keys)))
                repeated = seen.insert_many(keys, np.full(len(keys), step.segment, np.int64))
                if repeated >= 0:
                    raise _in_two_lists(plan, readers[step.segment], int(keys[repeated]))
                if len(keys):
                    yield KeyedRows(keys, _STATUS[step.operation], content)


def _content(engine: Replay, plan: TablePlan, step: Step, kind: RowKind, dtype: np.dtype[Any], at: RowIds) -> Content:
    """Decode the rows of a chunk at positions ``at`` as they are held."""
    spec = array_specs(plan.schema)["codes"]
    values = np.ascontiguousarray(engine.values(step, plan, spec)[at])
    rows = np.zeros((len(at), kind.width), dtype)
    status = np.full(len(at), _STATUS[step.operation], np.uint8)
    if kind.holds == "codes" and step.operation == "escape":
        return Content(rows, status, EscapeRows(np.arange(len(at), dtype=np.int64), {"codes": values}))
    if kind.holds == "codes":
        if row_kernels.put_block(rows, values, 0) >= 0:
            raise CodesTooWide
        return Content(rows, None, EscapeRows())
    if step.operation == "set":
        floats = np.empty(values.shape, carrier(spec.dtype))
        decode_block(spec, values, floats)
        values = floats
    serve(kind, values, rows, plan.table, 0, INLINE)
    return Content(rows, status, EscapeRows())


def _in_two_lists(plan: TablePlan, reader: ChunkReader, key: int) -> CorruptStore:
    return CorruptStore(
        f"row {key} of table {plan.table!r} stands in two row lists of segment {reader.name}; run `cnr verify`",
        table=plan.table, found=key,
    )  # fmt: skip
