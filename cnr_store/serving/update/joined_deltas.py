"""Adds the differences of many tables to their served rows, by one compiled call per stored chunk.

Why this module exists: a delta has a few rows of each of a thousand tables, and these rows lie end to end in shared
chunks. To plan, read and add them table by table takes much longer than to add them. `applying.apply_segment` is the
definition. Tables that are not served in the plainest way are left to it, as is everything that could be wrong, so it
raises the errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from cnr_store.errors import CnrStoreError
from cnr_store.format.chain_checks import continues
from cnr_store.format.records import ArrayEntry, Manifest, PartEntry, RowListEntry
from cnr_store.runtime.addresses import address_of, float32s_at
from cnr_store.runtime.jit import njit
from cnr_store.runtime.key_index import KeyIndex, insert_keys, slots_for
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Array
from cnr_store.segment.decoded import Scratch
from cnr_store.segment.reader import SegmentReader
from cnr_store.serving.rows.memory import Memory
from cnr_store.serving.rows.served_table import Overlay, ServedTable
from cnr_store.serving.update.adding import lattice_add
from cnr_store.types import Lattice

LEAST_TABLES = 4
"""Fewer in one chunk are applied one by one."""

JoinedDelta = tuple[Overlay | None, int]
"""The changed rows of a table, None if there are none, and the stored bytes that they were read from."""

_UNTOUCHED: JoinedDelta = None, 0


@dataclass(slots=True, eq=False)
class _Chunk:
    """Row lists in one stored chunk, of tables that are added to by one call."""

    group: Mapping[str, ArrayEntry]
    number: int
    tables: list[ServedTable] = field(default_factory=list)
    lists: list[RowListEntry] = field(default_factory=list)


def apply_together(
    reader: SegmentReader,
    tables: Mapping[str, ServedTable],
    recorded: Manifest | None,
    workers: Workers,
    memory: Memory,
) -> dict[str, JoinedDelta]:
    """Return the changes by a delta segment of those tables that it can be applied to together. Blocks.

    Parameters
    ----------
    tables
        By name: served tables whose schemas are those of the segment.
    recorded
        The manifest of the version that they are at, with its state; None if it is not known.

    Raises
    ------
    StorageFailure
        There is not enough memory.
    """
    found, chunks = _planned(reader.manifest, tables, recorded)
    # What is done for each table is done on one thread: two would wait for each other's turns of the interpreter.
    decoded = workers.run(partial(_read, reader, chunk) for chunk in chunks)
    work = [_Addition(reader, chunk, *arrays, memory) for chunk, arrays in zip(chunks, decoded, strict=True) if arrays]
    workers.run(one.add for one in work)
    for one in work:
        found |= one.deltas()
    return found


def _planned(
    manifest: Manifest, tables: Mapping[str, ServedTable], recorded: Manifest | None
) -> tuple[dict[str, JoinedDelta], list[_Chunk]]:
    """Return which tables have no rows in the segment, and the chunks with rows of the others. Pure."""
    untouched: dict[str, JoinedDelta] = {}
    chunks: dict[tuple[int, int], _Chunk] = {}
    parts_of, ends = manifest.parts_of, {} if recorded is None else recorded.parts_of
    for name, served in tables.items():
        parts = parts_of.get(name, ())
        if len(parts) != 1 or not _is_whole(parts[0], served):
            continue
        if recorded is not None and not continues(ends.get(name, ()), parts):
            continue
        own = parts[0].add
        if own is None:
            untouched[name] = _UNTOUCHED
        elif len(own.first) == 1 and _is_plain(served):
            number = own.start // own.group["rows"].chunk_rows
            chunk = chunks.get((id(own.group), number))
            if chunk is None:
                chunk = chunks[id(own.group), number] = _Chunk(own.group, number)
            chunk.tables.append(served)
            chunk.lists.append(own)
    return untouched, [chunk for chunk in chunks.values() if len(chunk.lists) >= LEAST_TABLES]


def _is_whole(part: PartEntry, served: ServedTable) -> bool:
    """Whether a part of the whole table has differences or nothing."""
    schema = served.base.schema
    if part.set is not None or part.delete is not None or part.escape is not None:
        return False
    return part.rows == (0, schema.num_rows) and part.columns == (0, schema.dim)


def _is_plain(served: ServedTable) -> bool:
    """Whether all rows of a float32 lattice are found by position, as values, and without an overlay."""
    base, kind = served.base, served.base.kind
    return (
        served.overlay is None and base.index is None and base.shard is None and base.status is None
        and kind.kept_as == "values" and kind.served == "float32" and isinstance(base.schema.encoding, Lattice)
    )  # fmt: skip


def _read(reader: SegmentReader, chunk: _Chunk) -> tuple[Array, Array] | None:
    """Return the row ids and codes of a stored chunk, None if it is damaged."""
    group, number = chunk.group, chunk.number
    asked = sum(one.count for one in chunk.lists)
    try:
        rows = reader.read_chunk(group["rows"], number, Scratch(), asked=asked)
        return rows, reader.read_chunk(group["codes"], number, Scratch(), asked=asked)
    except CnrStoreError:
        return None


class _Addition:
    """The addition of a decoded chunk, and what it makes: the overlays of its tables, as pieces of joined arrays."""

    def __init__(self, reader: SegmentReader, chunk: _Chunk, rows: Array, codes: Array, memory: Memory) -> None:
        group, number = chunk.group, chunk.number
        self._tables, self._memory, self._rows, self._codes = chunk.tables, memory, rows, codes
        counts = np.array([one.count for one in chunk.lists], np.int64)
        slots = np.array([slots_for(one.count) for one in chunk.lists], np.int64)
        ends, slot_ends = np.cumsum(counts), np.cumsum(slots)
        count = int(ends[-1])
        self._arrays = memory.allocate_together(
            "joined.overlays",
            [
                ((count,), np.int64), ((count, codes.shape[1]), np.float32), ((count,), np.uint8),
                ((int(slot_ends[-1]), 2), np.int64),
            ],
        )  # fmt: skip
        places = [(table.base.line[0], len(table.base.rows)) for table in chunk.tables]
        begin = number * group["rows"].chunk_rows
        lists = [(one.start - begin, one.count, one.first[0], one.last[0]) for one in chunk.lists]
        starts = ends - counts, slot_ends - slots
        self._lines = np.column_stack((np.array(places, np.int64), np.array(lists, np.int64), *starts, slots))
        self._scales = np.array([_scale(table) for table in chunk.tables], np.float32)
        self._are_sound = np.empty(len(counts), np.bool_)
        sizes = [reader.place_of(entry, number).size for name, entry in group.items() if not name.startswith("slots/")]
        self._stored = (np.multiply.outer(counts, sizes) // len(rows)).sum(axis=1)

    def add(self) -> None:
        """Fill the overlays. Releases the GIL."""
        positions = np.arange(self._lines[:, 3].max(), dtype=np.int64)
        add_together(
            self._lines, self._scales, self._rows, self._codes, positions, *self._arrays, self._are_sound
        )  # fmt: skip

    def deltas(self) -> dict[str, JoinedDelta]:
        """Return the changes of those tables whose rows are not wrong."""
        ids, values, status, index = self._arrays
        if not self._are_sound.any() and (block := self._memory.block_of(ids)) is not None:
            self._memory.release(block)
        counts, lows, firsts, slots = self._lines[:, [3, 6, 7, 8]].T
        places = np.stack(
            (
                address_of(ids) + 8 * lows,
                address_of(values) + values.itemsize * values.shape[1] * lows,
                address_of(status) + lows,
                address_of(index) + 16 * firsts,
                slots,
                counts,
            ),
            axis=1,
        )
        found: dict[str, JoinedDelta] = {}
        columns = (self._are_sound, lows, firsts, self._stored, places)
        for table, is_sound, low, first, size, line in zip(
            self._tables, *(column.tolist() for column in columns), strict=True
        ):
            if is_sound:
                base, high = table.base, low + line[5]
                own = KeyIndex(index[first : first + line[4]], count=line[5], used=line[5])
                overlay = Overlay(base.schema, ids[low:high], values[low:high], status[low:high], own, tuple(line))
                found[base.name] = overlay, size
        return found


def _scale(table: ServedTable) -> float:
    schema = table.base.schema
    assert isinstance(schema.encoding, Lattice)
    return schema.encoding.scale * 0.5**schema.shift


@njit(nogil=True, error_model="numpy")
def add_together(
    lines: Any, scales: Any, rows: Any, codes: Any, positions: Any, ids: Any, values: Any, status: Any, index: Any,
    are_sound: Any,
) -> None:  # fmt: skip
    """`lattice_add` to the rows of many tables, and the index of each overlay.

    Parameters
    ----------
    lines
        int64 ``(num_tables, 9)``: the address of the served rows and how many these are; the first of the table's rows
        in the chunk, and their number; the first and last row id; the first row in the overlays; the first slot of the
        index, and how many it has.
    scales
        float32 ``(num_tables,)``.
    rows, codes
        int64 ``(n,)``, int16 or int32 ``(n, d)``: the chunk.
    positions
        int64: 0, 1 and so on, as many as a table has rows.
    ids, values, status, index
        int64 ``(m,)``, float32 ``(m, d)``, uint8 ``(m,)``, int64 ``(slots, 2)``, overwritten: the overlays.
    are_sound
        bool ``(num_tables,)``, overwritten: False where ids are not those that the line says, or codes leave their
        range; the table's overlay is undefined then.
    """
    d = codes.shape[1]
    for k in range(len(lines)):
        start, count, first, last = lines[k, 2], lines[k, 3], lines[k, 4], lines[k, 5]
        into, slot, size = lines[k, 6], lines[k, 7], lines[k, 1]
        own = rows[start : start + count]
        is_sound = len(own) == count and own[0] == first and own[-1] == last and first >= 0 and last < size
        for i in range(1, len(own)):
            is_sound &= own[i] > own[i - 1]
        if is_sound:
            base = carray(float32s_at(lines[k, 0]), (size, d))
            out = values[into : into + count]
            is_sound = lattice_add(base, own, codes[start : start + count], scales[k], out) < 0
        if is_sound:
            ids[into : into + count] = own
            status[into : into + count] = 0
            slots = index[slot : slot + lines[k, 8]]
            slots[...] = 0
            insert_keys(slots, own, positions[:count])
        are_sound[k] = is_sound
