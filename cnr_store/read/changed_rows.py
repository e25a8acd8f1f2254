"""Decides which rows of a table can differ between two states that continue from a common segment, and reads their ids.

Only rows that the segments after the common one list, and rows that a resize removed or added, can differ. Consumers
of changes, updates of served tables, sinks and writers use this plan; none of them reads values to make it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from cnr_store.format.chain_checks import is_one_life
from cnr_store.format.records import OPERATIONS, Operation, RowListEntry, TableSchema
from cnr_store.read.replay import ChunkReader
from cnr_store.runtime.threads import Inline, Workers
from cnr_store.segment.decoded import Scratch
from cnr_store.types import RowIds

Window = tuple[int, int]
"""First and last row id, inclusive."""

ALL_ROWS: Window = (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class ListedChunk:
    """A chunk of a row list whose rows can differ.

    Attributes
    ----------
    is_final
        Whether the target's segments after the common one define these rows completely: they are set, deleted or
        exact, in all columns.
    """

    reader: ChunkReader
    operation: Operation
    row_list: RowListEntry
    index: int
    is_final: bool

    @property
    def window(self) -> Window:
        """First and last row id of the chunk."""
        return self.row_list.first[self.index], self.row_list.last[self.index]

    @property
    def num_rows(self) -> int:
        """Number of rows in the chunk."""
        return self.row_list.rows_in(self.index)


@dataclass(frozen=True, slots=True)
class RowChange:
    """The rows of ``chunks``, and rows [``start``, ``stop``), can differ.

    Attributes
    ----------
    start, stop
        Rows of a dense table that a resize removed or added.
    size
        A dense table has no row from here on; None for a hashed table.
    """

    chunks: tuple[ListedChunk, ...]
    start: int
    stop: int
    size: int | None

    def row_ids(self, workers: Workers, window: Window = ALL_ROWS) -> tuple[RowIds, npt.NDArray[np.bool_]]:
        """Return the rows in a window, sorted and unique, and for each whether it is final (`ListedChunk`). Blocks.

        Reads row ids only. Memory: the ids of the window, and one chunk of ids per thread.

        Raises
        ------
        CorruptStore, CorruptObject, MissingObject, StorageFailure
        """
        first, last = window
        chunks = [chunk for chunk in self.chunks if chunk.window[0] <= last and chunk.window[1] >= first]

        def read(chunk: ListedChunk) -> RowIds:
            rows = chunk.reader.read_rows(chunk.row_list, chunk.index, Scratch())
            return rows[np.searchsorted(rows, first) : np.searchsorted(rows, last, side="right")].copy()

        found = workers.run(partial(read, chunk) for chunk in chunks)
        start = max(first, self.start)
        resized = np.arange(start, max(start, min(last + 1, self.stop)), dtype=np.int64)
        rows = np.unique(np.concatenate([resized, *found]))
        is_final, is_added = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
        for chunk, ids in zip(chunks, found, strict=True):
            if chunk.is_final or chunk.operation == "add":
                (is_final if chunk.is_final else is_added)[np.searchsorted(rows, ids)] = True
        is_final &= ~is_added
        inside = len(rows) if self.size is None else int(np.searchsorted(rows, self.size))
        return rows[:inside], is_final[:inside]


def plan_row_change(
    table: str, common: ChunkReader, old: Sequence[ChunkReader], new: Sequence[ChunkReader]
) -> RowChange | None:
    """Return which rows of a table can differ between two states; None means any row. Pure, no I/O.

    Parameters
    ----------
    common
        The last segment that both states have.
    old, new
        The segments after it in either state; the table is in the last one of both.
    """
    schemas = [reader.manifest.tables.get(table) for reader in (common, *old, *new)]
    first = schemas[0]
    if first is None or not all(schema is not None and is_one_life(first, schema) for schema in schemas):
        return None
    sizes = [schema.num_rows for schema in schemas if schema is not None]
    least, most = min(sizes), max(sizes[len(old)], sizes[-1] if new else sizes[0])
    chunks = (*_chunks(old, table, is_new=False), *_chunks(new, table, is_new=True))
    return RowChange(chunks, least, most, most if first.keys == "dense" else None)


def rows_since(readers: Sequence[ChunkReader], table: str, schema: TableSchema) -> RowIds:
    """Return the rows of a table that the segments after the first one changed: sorted, unique. Blocks.

    ``schema`` is the table's final one; rows beyond its size are not returned. A row that a resize removed and a later
    one added again is returned too. Reads row ids only.
    """
    return change_since(readers, table, schema).row_ids(Inline())[0]


def change_since(readers: Sequence[ChunkReader], table: str, schema: TableSchema) -> RowChange:
    """Return which rows of a table the segments after the first one changed; see `rows_since`. Pure, no I/O."""
    life = [reader for reader in readers[1:] if _has_generation(reader, table, schema)]
    start = stop = 0
    if _has_generation(readers[0], table, schema) and schema.keys == "dense":
        before = readers[0].manifest.tables[table].num_rows
        start = min((reader.manifest.tables[table].num_rows for reader in life), default=before)
        stop = min(before, schema.num_rows)
    chunks = tuple(_chunks(life, table, is_new=False))
    return RowChange(chunks, start, stop, schema.num_rows if schema.keys == "dense" else None)


def _has_generation(reader: ChunkReader, table: str, schema: TableSchema) -> bool:
    found = reader.manifest.tables.get(table)
    return found is not None and found.generation == schema.generation


def _chunks(readers: Iterable[ChunkReader], table: str, *, is_new: bool) -> Iterator[ListedChunk]:
    for reader in readers:
        dim = reader.manifest.tables[table].dim
        for part in reader.manifest.parts_of.get(table, ()):
            for operation in OPERATIONS:
                row_list: RowListEntry | None = getattr(part, operation)
                if row_list is not None:
                    is_final = is_new and operation != "add" and part.columns == (0, dim)
                    for index in range(len(row_list.first)):
                        yield ListedChunk(reader, operation, row_list, index, is_final)
