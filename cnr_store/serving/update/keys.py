"""Reads the rows of a shard of a table as they are served: of a hashed table each key once, its newest row.

Memory: a window of rows; for a hashed table an index of the keys (`KeyIndex`) and chunks in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import row_kernels
from cnr_store.encodings.widths import carrier
from cnr_store.read.plan import Step, TablePlan
from cnr_store.read.replay import ChunkReader, Replay, matching
from cnr_store.read.table_reader import read_codes
from cnr_store.runtime.threads import Inline, Workers, blocks
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED, Array, ExactRows, array_specs, decode_block
from cnr_store.segment.decoded import Scratch
from cnr_store.serving.rows.key_index import KeyIndex
from cnr_store.serving.rows.served_table import RowKind
from cnr_store.serving.rows.shards import HashShard, Shard, is_in_shard, rows_in_shard
from cnr_store.serving.update.content import CodesTooWide, Content, ContentBuilder, in_two_lists, serve
from cnr_store.types import RowIds

LEAST_KEYS = 1024
INLINE = Inline()
_STATUS = {"set": CODED, "escape": ESCAPED, "delete": ABSENT}


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
) -> Iterator[tuple[RowIds, Content]]:
    """Yield each key of a chain once with its newest row, chunk by chunk: sorted keys, and their content. Blocks.

    Keys that were deleted are yielded too, as `ABSENT`.

    Parameters
    ----------
    wanted
        Keys to read (sorted, unique); None reads all of the shard.
    dtype
        The dtype of the rows if it is not ``kind.dtype``: int32 for codes that exceed int16.
    only_ids
        Read no values: the content has a status only.

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
            raise in_two_lists(plan, readers[step.segment], int(chosen[np.argmax(known == step.segment)]))
        fresh = chosen[known < 0].copy()
        if only_ids or step.operation == "delete" or len(fresh) == 0:
            rows = np.zeros((len(fresh), 0 if only_ids else kind.width), memory_dtype)
            return fresh, Content(rows, np.full(len(fresh), _STATUS[step.operation], np.uint8), ExactRows())
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
                    raise in_two_lists(plan, readers[step.segment], int(keys[repeated]))
                if len(keys):
                    yield keys, content


def read_shard(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    kind: RowKind,
    workers: Workers,
    shard: Shard | None,
    dtype: npt.DTypeLike,
    take: Callable[[RowIds, Content], None],
) -> None:
    """Pass the plan's rows of a shard to ``take``, a window or chunk at a time: sorted row ids, and content. Blocks.

    The content is valid during the call. Parameters and errors are those of `newest_rows`.
    """
    if plan.schema.keys == "hashed":
        for keys, content in newest_rows(readers, plan, kind, workers, shard=shard, dtype=dtype):
            take(keys, content)
        return
    window = np.empty((0, kind.width), dtype)

    def place(start: int, stop: int) -> Array:
        nonlocal window
        if len(window) < stop - start:
            window = np.empty((stop - start, kind.width), dtype)
        return window[: stop - start]

    def done(start: int, stop: int, content: Content) -> None:
        ids = np.arange(start, stop, dtype=np.int64)
        if isinstance(shard, HashShard):
            at = np.flatnonzero(is_in_shard(shard, ids)).astype(np.int64)
            ids, content = ids[at], content.take(at)
        take(ids, content)

    read_codes(readers, plan, workers, ContentBuilder(plan, kind, workers, place, done).take)


def _content(engine: Replay, plan: TablePlan, step: Step, kind: RowKind, dtype: np.dtype[Any], at: RowIds) -> Content:
    """Decode the rows of a chunk at positions ``at`` in the form in which they are kept."""
    spec = array_specs(plan.schema)["codes"]
    values = np.ascontiguousarray(engine.values(step, plan, spec)[at])
    rows = np.zeros((len(at), kind.width), dtype)
    status = np.full(len(at), _STATUS[step.operation], np.uint8)
    if kind.kept_as == "codes" and step.operation == "escape":
        return Content(rows, status, ExactRows(np.arange(len(at), dtype=np.int64), {"codes": values}))
    if kind.kept_as == "codes":
        if row_kernels.put_block(rows, values, 0) >= 0:
            raise CodesTooWide
        return Content(rows, None, ExactRows())
    if step.operation == "set":
        floats = np.empty(values.shape, carrier(spec.dtype))
        decode_block(spec, values, floats)
        values = floats
    serve(kind, values, rows, plan.table, 0, INLINE)
    return Content(rows, status, ExactRows())
