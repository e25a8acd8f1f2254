"""Reads the rows of a shard of a table as they are served: of a hashed table each key once.

Memory: a window of rows; for a hashed table its keys, 8 bytes each, and chunks in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from cnr_store.read.plan import TablePlan
from cnr_store.read.replay import ChunkReader, Replay, named_rows
from cnr_store.read.table_reader import WINDOW_BYTES, read_codes
from cnr_store.runtime.threads import Workers, windows
from cnr_store.segment.codes import ABSENT, Array, TableCodes, array_specs
from cnr_store.serving.rows.served_table import RowKind
from cnr_store.serving.rows.shards import HashShard, Shard, is_in_shard
from cnr_store.serving.update.content import Content, ContentBuilder, read_content
from cnr_store.types import RowIds


def rows_of_keys(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    kind: RowKind,
    workers: Workers,
    *,
    shard: Shard | None,
    dtype: npt.DTypeLike,
) -> Iterator[tuple[RowIds, Content]]:
    """Yield each key of a hashed table that its chain names, ascending, and the rows of a window of them. Blocks.

    Keys that were deleted are yielded too, as `ABSENT`. ``dtype``: of the rows, int32 for codes that exceed int16.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    NonFiniteValues
        A row that is not finite has no int8 form.
    CodesTooWide
        Codes do not fit the dtype.
    """
    keys = _keys_in(readers, plan, shard)
    spec = array_specs(plan.schema)["codes"]
    for low, high in windows(len(keys), spec.width * spec.memory_dtype.itemsize, WINDOW_BYTES):
        window = keys[low:high]
        out = np.empty((len(window), kind.width), dtype)
        yield window, read_content(readers, plan, window, kind, workers, out)


def count_keys(readers: Sequence[ChunkReader], plan: TablePlan, workers: Workers, shard: Shard | None) -> int:
    """Return how many keys of the shard a hashed table has; reads row ids alone. Blocks."""
    keys = _keys_in(readers, plan, shard)
    codes = TableCodes(plan.schema, 0, len(keys), {})
    Replay(readers, workers).run(plan, codes, keys)
    return int(np.count_nonzero(codes.track_status(ABSENT) != ABSENT))


def _keys_in(readers: Sequence[ChunkReader], plan: TablePlan, shard: Shard | None) -> RowIds:
    return named_rows(readers, plan, None if shard is None else partial(is_in_shard, shard))


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

    The content is valid during the call. Parameters and errors are those of `rows_of_keys`.
    """
    if plan.schema.keys == "hashed":
        for keys, content in rows_of_keys(readers, plan, kind, workers, shard=shard, dtype=dtype):
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
