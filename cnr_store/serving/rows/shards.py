"""The rows of a table that a loader serves: all, a range, or those with a given hash. Pure, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadInput
from cnr_store.format.records import TableSchema
from cnr_store.segment.shards import key_owners
from cnr_store.types import RowIds, RowRange


@dataclass(frozen=True, slots=True)
class HashShard:
    """The rows with ``splitmix64(row id) % count == index``: even shares of dense ids and of hashed keys alike."""

    index: int
    count: int


Shard = RowRange | HashShard
"""None, if a shard is asked for, means all rows."""


def check_shard(shard: Shard | None) -> Shard | None:
    """Return the shard if it is valid.

    Raises
    ------
    BadInput
    """
    if shard is not None and not isinstance(shard, RowRange | HashShard):
        raise BadInput(
            f"a shard is RowRange(start, stop) or HashShard(index, count), found {shard!r}", found=str(shard)
        )
    if isinstance(shard, RowRange) and shard.start > shard.stop:
        raise BadInput(
            f"a row range must end at or after its start; found [{shard.start}, {shard.stop})", found=str(shard)
        )
    if isinstance(shard, HashShard) and not 0 <= shard.index < shard.count:
        raise BadInput(
            f"hash shard {shard.index} of {shard.count}: the index is from 0 to the count, exclusive", found=str(shard)
        )
    return shard


def hash_shard_of(row_ids: RowIds, count: int) -> npt.NDArray[np.int64]:
    """Return the index of the `HashShard` of ``count`` that each row (int64, any) is in: what a router asks.

    >>> hash_shard_of(np.arange(6), 3).tolist()
    [1, 2, 1, 0, 1, 2]
    """
    return key_owners(row_ids, count, "hash")


def is_in_shard(shard: Shard | None, row_ids: RowIds) -> npt.NDArray[np.bool_]:
    """Return which of the rows (int64, any order) are in the shard, bool of their shape."""
    if shard is None:
        return np.ones(row_ids.shape, np.bool_)
    if isinstance(shard, RowRange):
        inside: npt.NDArray[np.bool_] = (row_ids >= shard.start) & (row_ids < shard.stop)
        return inside
    return np.asarray(hash_shard_of(row_ids, shard.count) == shard.index)


def rows_in_shard(shard: Shard | None, row_ids: RowIds) -> RowIds:
    """Return the sorted rows that are in the shard; a view if they are consecutive in the list."""
    if shard is None:
        return row_ids
    if isinstance(shard, RowRange):
        low, high = np.searchsorted(row_ids, [shard.start, shard.stop])
        return row_ids[low:high]
    return row_ids[is_in_shard(shard, row_ids)]


def dense_range(shard: Shard | None, num_rows: int) -> RowRange:
    """Return the rows [start, stop) of a dense table of ``num_rows`` that the shard's rows lie in."""
    if not isinstance(shard, RowRange):
        return RowRange(0, num_rows)
    start = min(max(shard.start, 0), num_rows)
    return RowRange(start, max(start, min(shard.stop, num_rows)))


def meets_shard(shard: Shard | None, first: int, last: int) -> bool:
    """Return whether a chunk of rows from ``first`` to ``last``, inclusive, may have a row of the shard."""
    return not isinstance(shard, RowRange) or (first < shard.stop and last >= shard.start)


def is_keyed(shard: Shard | None, schema: TableSchema) -> bool:
    """Return whether the shard's rows are found by key: consecutive rows of a dense table are found by position."""
    return schema.keys == "hashed" or isinstance(shard, HashShard)
