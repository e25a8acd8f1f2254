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
from cnr_store.format.records import ArrayEntry, Manifest, PartEntry, RowListEntry
from cnr_store.runtime.addresses import address_of, float32s_at
from cnr_store.runtime.jit import njit
from cnr_store.runtime.key_index import KeyIndex, insert_keys, slots_for
from cnr_store.runtime.threads import Workers
from cnr_store.segment.decoded import Scratch
from cnr_store.segment.reader import SegmentReader
from cnr_store.serving.rows.memory import Memory
from cnr_store.serving.rows.served_table import Overlay, ServedTable
from cnr_store.serving.update.adding import lattice_add
from cnr_store.types import Lattice

LEAST_TABLES = 4
"""Fewer in one chunk are applied one by one."""

_FIELDS = 9


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
    reader: SegmentReader, tables: Mapping[str, tuple[ServedTable, int | None]], workers: Workers, memory: Memory
) -> dict[str, JoinedDelta]:
    """Return the changes by a delta segment of those tables that it can be applied to together. Blocks.

    Parameters
    ----------
    tables
        By name: served tables whose schemas are those of the segment, and the state digest that each is known to have.

    Raises
    ------
    StorageFailure
        There is not enough memory.
    """
    found, chunks = _planned(reader.manifest, tables)
    applied = workers.run(partial(_applied, reader, chunk, memory) for chunk in chunks)
    return found | {name: delta for deltas in applied for name, delta in deltas.items()}


def _planned(
    manifest: Manifest, tables: Mapping[str, tuple[ServedTable, int | None]]
) -> tuple[dict[str, JoinedDelta], list[_Chunk]]:
    """Return which tables have no rows in the segment, and the chunks with rows of the others. Pure."""
    untouched: dict[str, JoinedDelta] = {}
    chunks: dict[tuple[int, int], _Chunk] = {}
    for name, (served, recorded) in tables.items():
        parts = manifest.parts_of.get(name, ())
        if len(parts) != 1 or not _is_whole(parts[0], served, recorded):
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


def _is_whole(part: PartEntry, served: ServedTable, recorded: int | None) -> bool:
    """Whether a part of the whole table has differences or nothing, and starts from the state that is served."""
    schema = served.base.schema
    if part.set is not None or part.delete is not None or part.escape is not None:
        return False
    if part.rows != (0, schema.num_rows) or part.columns != (0, schema.dim):
        return False
    return recorded is None or part.base_digest is None or int(part.base_digest, 16) == recorded


def _is_plain(served: ServedTable) -> bool:
    """Whether all rows of a float32 lattice are found by position, as values, and without an overlay."""
    base, kind = served.base, served.base.kind
    return (
        served.overlay is None and base.index is None and base.shard is None and base.status is None
        and kind.kept_as == "values" and kind.served == "float32" and isinstance(base.schema.encoding, Lattice)
    )  # fmt: skip


def _applied(reader: SegmentReader, chunk: _Chunk, memory: Memory) -> dict[str, JoinedDelta]:
    """Return the overlays of the tables of a chunk, as pieces of joined arrays; without those that may be wrong."""
    group, number = chunk.group, chunk.number
    counts = np.array([one.count for one in chunk.lists], np.int64)
    try:
        rows = reader.read_chunk(group["rows"], number, Scratch(), asked=int(counts.sum()))
        codes = reader.read_chunk(group["codes"], number, Scratch(), asked=int(counts.sum()))
    except CnrStoreError:
        return {}
    slots = np.array([slots_for(one.count) for one in chunk.lists], np.int64)
    count, begin = int(counts.sum()), number * group["rows"].chunk_rows
    ids, values, status, index = memory.allocate_together(
        "joined.overlays",
        [
            ((count,), np.int64), ((count, codes.shape[1]), np.float32), ((count,), np.uint8),
            ((int(slots.sum()), 2), np.int64),
        ],
    )  # fmt: skip
    ends, slot_ends = np.cumsum(counts), np.cumsum(slots)
    lines = np.empty((len(counts), _FIELDS), np.int64)
    lines[:, 0] = [address_of(table.base.rows) for table in chunk.tables]
    lines[:, 1] = [len(table.base.rows) for table in chunk.tables]
    lines[:, 2] = [one.start - begin for one in chunk.lists]
    lines[:, 3] = counts
    lines[:, 4] = [one.first[0] for one in chunk.lists]
    lines[:, 5] = [one.last[0] for one in chunk.lists]
    lines[:, 6], lines[:, 7], lines[:, 8] = ends - counts, slot_ends - slots, slots
    scales = np.array([_scale(table) for table in chunk.tables], np.float32)
    are_sound = np.empty(len(counts), np.bool_)
    positions = np.arange(counts.max(), dtype=np.int64)
    add_together(lines, scales, rows, codes, positions, ids, values, status, index, are_sound)
    if not are_sound.any() and (block := memory.block_of(ids)) is not None:
        memory.release(block)
    sizes = [reader.place_of(entry, number).size for name, entry in group.items() if not name.startswith("slots/")]
    stored = (np.multiply.outer(counts, sizes) // len(rows)).sum(axis=1)
    columns = (are_sound, lines[:, 6], ends, lines[:, 7], slot_ends, stored)
    deltas: dict[str, JoinedDelta] = {}
    for table, is_sound, low, high, first, stop, size in zip(
        chunk.tables, *(column.tolist() for column in columns), strict=True
    ):
        if is_sound:
            own = KeyIndex(index[first:stop], count=high - low, used=high - low)
            base = table.base
            deltas[base.name] = Overlay(base.schema, ids[low:high], values[low:high], status[low:high], own), size
    return deltas


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
