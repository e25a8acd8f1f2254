"""Replays the chains of many small tables together, by one compiled call per stored chunk and array.

Why this module exists: the rows of small tables lie end to end in shared chunks. To plan, read and add them table by
table takes much longer than to add them. `table_reader.read_range` and `read_mirror` are the definition, of what a
compaction merges `merge_piece`. Tables in any other than the plainest form are left to them, as is everything that
could be wrong, so they raise the errors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import table_kernels
from cnr_store.encodings.table_kernels import ADD, ADD_WRAPPING, PUT
from cnr_store.encodings.widths import as_columns
from cnr_store.errors import CorruptStore
from cnr_store.format.arrays import real_rows
from cnr_store.format.manifest import recorded_digest
from cnr_store.format.records import ArrayEntry, Manifest, RowListEntry, TableSchema
from cnr_store.read.prefetch import WantedChunk, prefetching
from cnr_store.read.replay import ChunkReader
from cnr_store.runtime.addresses import address_of
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Allocate, Array, ArraySpec, TableCodes, array_specs, stored_specs
from cnr_store.segment.decoded import Scratch
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import whole_of
from cnr_store.types import FloatBits, Lattice, RowIds

LEAST_TABLES = 4
"""Fewer are read one by one."""

MOST_CHUNKS = 2
"""In how many chunks each row list of a table may have rows: larger tables gain nothing."""

APART_BYTES = 64 * 1024 * 1024
"""About how many bytes of codes are held at once that fit neither an output nor a mirror."""

_FINISHED_ELEMENTS = 1 << 20
"""About how many elements one thread decodes at a time."""

_CodedOperation = Literal["add", "set"]
_PlacedList = tuple[int, _CodedOperation, RowListEntry]
"""A row list, with its segment's place in the chain."""


class ReadTogether(NamedTuple):
    """What `read_mirror` returns of a table, and the stored bytes of its rows in the arrays that were wanted."""

    codes: TableCodes | None
    stored_bytes: int


@dataclass(slots=True, eq=False)
class _SmallTable:
    """A table whose chain has the plainest form; ``held`` are the codes of the arrays ``names``.

    ``digest``: what these must have, None if it is not known or not all that count are among them. ``rows``: the ids of
    the rows that are held, None if all are; ``first`` is the place of the first of them among those of all tables.
    """

    name: str
    schema: TableSchema
    specs: Mapping[str, ArraySpec]
    names: Sequence[str]
    outputs: Mapping[str, Array]
    lists: Sequence[_PlacedList]
    digest: int | None
    held: dict[str, Array] = field(default_factory=dict)
    rows: RowIds | None = None
    first: int = 0

    def hold(self, allocate: Allocate | None) -> int:
        """Take memory for the codes; returns how many bytes of it are neither outputs nor a mirror."""
        apart = 0
        for name in self.names:
            spec, out = self.specs[name], self.outputs.get(name)
            if allocate is not None:
                self.held[name] = allocate((self.schema.num_rows, spec.width), spec.mirror_dtype)
            elif out is None:
                count, make = self.schema.num_rows, np.empty
                if self.rows is not None:  # differences are added to zero
                    count, make = len(self.rows), np.zeros
                self.held[name] = make((count, spec.width), self._narrowest(name))
                apart += self.held[name].nbytes
            elif spec.memory_dtype == np.int32:
                self.held[name] = out.view(np.int32)
            else:
                self.held[name] = np.empty(out.shape, spec.memory_dtype)
                apart += self.held[name].nbytes
        return apart

    def _narrowest(self, name: str) -> np.dtype[Any]:
        """Return the dtype of an array's codes: int16 unless a stored array is int32."""
        is_wide = any(own.group[name].dtype == "int32" for _, _, own in self.lists)
        return self.specs[name].memory_dtype if is_wide else np.dtype(np.int16)

    def mirror(self, allocate: Allocate) -> TableCodes:
        """Return the codes as a mirror."""
        return TableCodes(self.schema, 0, self.schema.num_rows, {**self.held}, allocate)


@dataclass(slots=True, eq=False)
class _ListsInChunk:
    """A stored chunk of a group with row lists of one operation.

    ``lines``: of each list the table's number, where its rows begin in the chunk, how many they are, first and last id.
    ``ids``: once they were read, the ids of these rows in all tables end to end (`_TablesAtOnce.hold_named`).
    """

    segment: int
    operation: _CodedOperation
    group: Mapping[str, ArrayEntry]
    number: int
    lines: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    ids: RowIds | None = None


def read_together(
    readers: Sequence[SegmentReader],
    outputs: Mapping[str, Mapping[str, Array]],
    workers: Workers,
    allocate: Allocate | None = None,
) -> dict[str, ReadTogether]:
    """Read those of some whole tables that can be read together: as `read_range`, with ``allocate`` as `read_mirror`.

    Blocks. Memory beyond outputs and mirrors: decoded chunks, one of each array per thread and those that other tables
    share (`SegmentReader`), and about `APART_BYTES` of codes.

    Parameters
    ----------
    outputs
        By table: array name to (rows, width) of the array's float dtype, writable; may be empty with ``allocate``.

    Returns
    -------
    dict
        By table, of those that were read; no codes without ``allocate``. Outputs of all others hold anything.

    Raises
    ------
    StorageFailure, VersionExpired
        Outputs hold anything. A `CorruptStore` is left to those who read its table by itself.
    """
    manifests = [reader.manifest for reader in readers]
    tables = []
    for name, arrays in outputs.items():
        specs = array_specs(manifests[-1].tables[name])
        names = [key for key in specs if key in arrays or (allocate is not None and specs.are_additive)]
        tables += _plain_tables(manifests, 0, name, names, arrays)
    done: dict[str, ReadTogether] = {}
    for batch in _batches(tables, allocate) if len(tables) >= LEAST_TABLES else ():
        for table, _, size in _TablesAtOnce(batch, readers, workers).read():
            done[table.name] = ReadTogether(None if allocate is None else table.mirror(allocate), size)
        for table in batch:
            table.held.clear()  # memory for those of the next batch
    return done


def small_tables(readers: Sequence[SegmentReader], names: Iterable[str]) -> list[str]:
    """Return those of some tables for which `read_together` is worth memory for outputs. Pure."""
    manifests = [reader.manifest for reader in readers]
    found = [name for name in names if _plain_lists(manifests, 0, name, manifests[-1].tables[name]) is not None]
    return found if len(found) >= LEAST_TABLES else []


@dataclass(frozen=True, slots=True, eq=False)
class MergedTogether:
    """A row list of a table: its codes (rows, width) by array, as narrow as they are stored, and what the arrays are.

    ``rows``: the ids of a delta's rows; None of a baseline, which has all rows, and their state digest.
    """

    operation: _CodedOperation
    rows: RowIds | None
    codes: Mapping[str, Array]
    specs: Mapping[str, ArraySpec]
    digest: int


def merge_together(
    readers: Sequence[SegmentReader], start: int, names: Iterable[str], workers: Workers
) -> dict[str, MergedTogether]:
    """Return what the segments from ``start`` on merge to, of those of some tables that can be merged together. Blocks.

    Memory beyond what is returned: as `read_together`, and of a delta 24 bytes for each row of a list that is merged.
    """
    manifests = [reader.manifest for reader in readers]
    tables: list[_SmallTable] = []
    for name in names:
        tables += _plain_tables(manifests, start, name, [*array_specs(manifests[-1].tables[name])], {})
    if len(tables) < LEAST_TABLES:
        return {}
    at_once = _TablesAtOnce(tables, readers, workers)
    if start and not at_once.hold_named():
        return {}
    for table in tables:
        table.hold(None)
    return {
        table.name: MergedTogether(table.lists[0][1], table.rows, table.held, table.specs, total)
        for table, total, _ in at_once.read()
    }


def right_states(readers: Sequence[SegmentReader], names: Iterable[str], workers: Workers) -> set[str]:
    """Return those of some tables that are replayed together and have, after each segment, the digest that it states.

    Blocks. Memory: decoded chunks as `read_together`, and about `APART_BYTES` of codes.
    """
    manifests = [reader.manifest for reader in readers]
    tables: list[_SmallTable] = []
    for name in names:
        tables += _plain_tables(manifests, 0, name, [*array_specs(manifests[-1].tables[name])], {})
    found: set[str] = set()
    for batch in _batches(tables, None) if len(tables) >= LEAST_TABLES else ():
        found.update(table.name for table, _, _ in _TablesAtOnce(batch, readers, workers).read(is_checked=True))
        for table in batch:
            table.held.clear()  # memory for those of the next batch
    return found


def _plain_tables(
    manifests: Sequence[Manifest], start: int, name: str, names: Sequence[str], outputs: Mapping[str, Array]
) -> list[_SmallTable]:
    """Return a table, if its chain from ``start`` on, and the arrays ``names`` of it, have the plainest form. Pure."""
    schema = manifests[-1].tables[name]
    lists = _plain_lists(manifests, start, name, schema)
    specs = array_specs(schema)
    if lists is None or not names or not specs.are_additive:
        return []
    if not all(specs[key].is_integer and specs[key].dtype == "float32" for key in names):
        return []
    if not all(out.flags.c_contiguous for out in outputs.values()):
        return []
    if start:
        stored = stored_specs(schema, (0, schema.dim), lists[0][1])
        return [_SmallTable(name, schema, stored, names, outputs, lists, None)]
    is_whole = set(names) == set(specs)
    digest = recorded_digest(manifests[-1].parts_of.get(name, ()), whole_of(schema)) if is_whole else None
    return [_SmallTable(name, schema, specs, names, outputs, lists, digest)]


def _plain_lists(manifests: Sequence[Manifest], start: int, name: str, schema: TableSchema) -> list[_PlacedList] | None:
    """Return the row lists of a table's life, oldest first; None if a row may be other than coded, or lists are large.

    Its first segment sets all rows. Later ones have one part, of the whole table, which sets some or adds to some. With
    a ``start`` behind the first segment, those from there on: the table was the same before, and all set or all add.
    """
    if schema.keys == "hashed":
        return None
    rows, columns = (0, schema.num_rows), (0, schema.dim)
    found: list[_PlacedList] = []
    begin = len(manifests)
    for segment in range(len(manifests) - 1, max(start - 2, -1), -1):
        here = manifests[segment].tables.get(name)
        if here is not schema:
            if here is None or here.generation != schema.generation:
                break
            if here != schema:
                return None
        begin = segment
        parts = manifests[segment].parts_of.get(name, ()) if segment >= start else ()
        if not parts:
            continue
        part = parts[0]
        if len(parts) > 1 or part.rows != rows or part.columns != columns:
            return None
        if part.delete is not None or part.escape is not None or (part.set is not None and part.add is not None):
            return None
        if part.set is not None:
            found.append((segment, "set", part.set))
        elif part.add is not None:
            found.append((segment, "add", part.add))
        if found and len(found[-1][2].first) > MOST_CHUNKS:
            return None
    if not found:
        return None
    segment, operation, first = found[-1]
    if start:
        is_complete = begin == start - 1 and all(own == operation for _, own, _ in found)
    else:
        is_complete = segment == begin and operation == "set" and first.count == schema.num_rows
    return found[::-1] if is_complete else None


def _batches(tables: Iterable[_SmallTable], allocate: Allocate | None) -> Iterator[list[_SmallTable]]:
    """Yield the tables, with memory for their codes, so many at once that this takes about `APART_BYTES`."""
    batch: list[_SmallTable] = []
    apart = 0
    for table in tables:
        apart += table.hold(allocate)
        batch.append(table)
        if apart >= APART_BYTES:
            yield batch
            batch, apart = [], 0
    if batch:
        yield batch


class _TablesAtOnce:
    """Tables that are read at once, which of them have had nothing that may be wrong, and their stored bytes."""

    def __init__(self, tables: Sequence[_SmallTable], readers: Sequence[SegmentReader], workers: Workers) -> None:
        self._tables = tables
        self._readers = readers
        self._workers = workers
        self._local = threading.local()
        self._sound = np.ones(len(tables), np.bool_)
        self._bytes = np.zeros(len(tables), np.int64)
        self._arrays: dict[str, _HeldCodes] = {}
        self._tasks: list[_AlikeCodes] = []
        self._named: RowIds = np.empty(0, np.int64)
        self._chunks = self._listed()

    def hold_named(self) -> bool:
        """Have each table hold the rows that its lists name, and no others. False if anything may be wrong."""
        firsts = np.cumsum([0, *(table.schema.num_rows for table in self._tables)])
        chunks = [chunk for own in self._chunks for chunk in own]
        try:
            if not all(self._workers.run(partial(self._find_ids, chunk, firsts) for chunk in chunks)):
                return False
        except CorruptStore:
            return False
        self._named = np.unique(np.concatenate([chunk.ids for chunk in chunks if chunk.ids is not None]))
        cuts = np.searchsorted(self._named, firsts).tolist()
        for table, base, (low, high) in zip(self._tables, firsts, pairwise(cuts), strict=False):
            table.rows, table.first = self._named[low:high] - base, low
        return True

    def _find_ids(self, chunk: _ListsInChunk, firsts: npt.NDArray[np.int64]) -> bool:
        """Read the row ids of a chunk; ``firsts``: where each table begins. False if its lists have others."""
        lines = np.array(chunk.lines, np.int64)
        rows, is_sound = self._rows(self._readers[chunk.segment], chunk, lines)
        if not is_sound.all():
            return False
        chunk.ids = rows[_ranges(lines[:, 1], lines[:, 2])] + np.repeat(firsts[lines[:, 0]], lines[:, 2])
        return True

    def read(self, *, is_checked: bool = False) -> list[tuple[_SmallTable, int, int]]:
        """Replay and decode; returns the tables that were read, with their state digests and stored bytes.

        ``is_checked``: the digest that any segment states of a table is compared, not only the last one.
        """
        for name in dict.fromkeys(name for table in self._tables for name in table.held):
            self._arrays[name] = _HeldCodes.of(name, self._tables)
        self._tasks = [task for name in self._arrays for task in _finishes(name, self._tables)]
        wanted = (self._wanted(chunk) for own in self._chunks for chunk in own)
        with prefetching(self._readers, wanted, self._workers) as sources:
            for segment, own in enumerate(self._chunks):
                for chunk in own:
                    self._count(self._readers[chunk.segment], chunk)
                self._workers.run(partial(self._apply, sources[chunk.segment], chunk) for chunk in own)
                if is_checked:
                    self._check_states(segment)
        columns = self._sound.tolist(), self._finished(), self._bytes.tolist()
        return [
            (table, total, size)
            for table, is_sound, total, size in zip(self._tables, *columns, strict=True)
            if is_sound and table.digest in (None, total)
        ]

    def _listed(self) -> list[list[_ListsInChunk]]:
        """Return the chunks of each segment."""
        found: list[dict[tuple[_CodedOperation, int, int], _ListsInChunk]] = [{} for _ in self._readers]
        for at, table in enumerate(self._tables):
            for segment, operation, own in table.lists:
                size = own.group["rows"].chunk_rows
                number, begin = divmod(own.start, size)
                left = own.count
                for first, last in zip(own.first, own.last, strict=True):
                    key = operation, id(own.group), number
                    chunk = found[segment].get(key)
                    if chunk is None:
                        chunk = found[segment][key] = _ListsInChunk(segment, operation, own.group, number)
                    count = min(left, size - begin)
                    chunk.lines.append((at, begin, count, first, last))
                    number, begin, left = number + 1, 0, left - count
        return [[*own.values()] for own in found]

    def _wanted(self, chunk: _ListsInChunk) -> WantedChunk:
        """Return what a read of it fetches."""
        tables = [line[0] for line in chunk.lines]
        names = [name for name, held in self._arrays.items() if held.has[tables].any()]
        has_gaps = chunk.ids is None and any(last - first + 1 != count for _, _, count, first, last in chunk.lines)
        return WantedChunk(chunk.segment, chunk.group, chunk.number, has_gaps, names)

    def _count(self, reader: SegmentReader, chunk: _ListsInChunk) -> None:
        """Count the bytes of each list, its share of the chunk."""
        lines = np.array([line[:3] for line in chunk.lines], np.int64)
        for name, entry in chunk.group.items():
            if name != "rows" and name not in self._arrays:
                continue
            own = lines if name == "rows" else lines[self._arrays[name].has[lines[:, 0]]]
            size = reader.place_of(entry, chunk.number).size
            self._bytes[own[:, 0]] += size * own[:, 2] // real_rows(entry, chunk.number)

    def _apply(self, reader: ChunkReader, chunk: _ListsInChunk) -> None:
        """Put or add the rows of a chunk in the codes of their tables."""
        lines = np.array(chunk.lines, np.int64)
        tables, starts, counts = lines[:, 0], lines[:, 1], lines[:, 2]
        try:
            rows, is_sound = self._rows(reader, chunk, lines)
            reached = np.empty(len(lines), np.int64)
            for name, held in self._arrays.items():
                own = held.has[tables]
                codes = self._read(reader, chunk, name, counts[own]) if own.any() else None
                if codes is None:
                    continue
                moves = held.adds[tables[own]] if chunk.operation == "add" else np.full(own.sum(), PUT, np.int8)
                parts = table_kernels.parts_of(starts[own], counts[own], 0, held.places[tables[own]])
                reached[...] = -1
                moved = np.empty(len(parts), np.int64)
                table_kernels.move_mirrors(parts, moves, rows, as_columns(codes), moved)
                reached[own] = moved
                is_sound &= reached < 0
            self._sound[tables[~is_sound]] = False
        except CorruptStore:
            self._sound[tables] = False

    def _rows(self, reader: ChunkReader, chunk: _ListsInChunk, lines: Array) -> tuple[RowIds, npt.NDArray[np.bool_]]:
        """Return the rows of a chunk, by their ids or their places among those held, and whether each list's are right.

        No ids are read if the lists show that they are contiguous.
        """
        is_sound = np.ones(len(lines), np.bool_)
        starts, counts, ends = lines[:, 1], lines[:, 2], lines[:, 3:]
        if chunk.ids is None and (ends[:, 1] - ends[:, 0] + 1 != counts).any():
            rows = self._read(reader, chunk, "rows", counts)
        else:
            known = _ranges(ends[:, 0], counts) if chunk.ids is None else np.searchsorted(self._named, chunk.ids)
            rows = np.empty((starts + counts).max(), np.int64)
            rows[_ranges(starts, counts)] = known
        if chunk.ids is None:
            parts = table_kernels.parts_of(starts, counts, 0, np.zeros((len(lines), 4), np.int64))
            table_kernels.are_ascending(parts, ends, rows, is_sound)
        return rows, is_sound

    def _read(self, reader: ChunkReader, chunk: _ListsInChunk, name: str, counts: Array) -> Array:
        assert isinstance(reader, SegmentReader)
        memory: dict[str, Scratch] = self._local.__dict__.setdefault("memory", {})
        scratch = memory.setdefault(name, Scratch())
        return reader.read_chunk(chunk.group[name], chunk.number, scratch, asked=int(counts.sum()))

    def _check_states(self, segment: int) -> None:
        """Give up the tables of which the segment states another digest than their codes have."""
        parts_of = self._readers[segment].manifest.parts_of
        for at, (table, found) in enumerate(zip(self._tables, self._finished(), strict=True)):
            if table.lists[0][0] <= segment:
                stated = recorded_digest(parts_of.get(table.name, ()), whole_of(table.schema))
                self._sound[at] &= stated in (None, found)

    def _finished(self) -> list[int]:
        """Decode the codes into the outputs; returns the digest of each table."""
        totals = np.zeros(len(self._tables), np.uint64)
        for task, found in zip(self._tasks, self._workers.run(task.run for task in self._tasks), strict=True):
            totals[task.tables] += found
        return [int(total) for total in totals.tolist()]


def _ranges(begins: Array, counts: Array) -> RowIds:
    """Return the ranges [begin, begin + count), one behind the other."""
    found: RowIds = np.arange(counts.sum()) + np.repeat(begins - np.cumsum(counts) + counts, counts)
    return found


@dataclass(slots=True, eq=False)
class _HeldCodes:
    """One array of the tables of a batch: which have it, what an ``add`` list does there, where its codes are."""

    has: npt.NDArray[np.bool_]
    adds: npt.NDArray[np.int8]
    places: npt.NDArray[np.int64]

    @classmethod
    def of(cls, name: str, tables: Sequence[_SmallTable]) -> _HeldCodes:
        """Collect them."""
        has = np.array([name in table.held for table in tables], np.bool_)
        adds, places = np.zeros(len(tables), np.int8), np.zeros((len(tables), 4), np.int64)
        for at in np.flatnonzero(has).tolist():
            held, spec = tables[at].held[name], tables[at].specs[name]
            wraps = isinstance(spec.encoding, FloatBits) and held.dtype == np.int32
            adds[at] = ADD_WRAPPING if wraps else ADD
            places[at] = address_of(held), held.itemsize, len(held), tables[at].first
        return cls(has, adds, places)


@dataclass(slots=True, eq=False)
class _AlikeCodes:
    """Codes of tables that one call decodes: ``spec`` is that of each, but for the scale."""

    spec: ArraySpec
    tables: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]
    scales: npt.NDArray[np.float32]

    def run(self) -> npt.NDArray[np.uint64]:
        """Return the digest of each."""
        spec, found = self.spec, np.empty(len(self.tables), np.uint64)
        shift = spec.bit_shift if isinstance(spec.encoding, FloatBits) else -1
        table_kernels.finish_mirrors(self.parts, self.scales, shift, spec.multipliers, spec.presence(), found)
        return found


def _finishes(name: str, tables: Sequence[_SmallTable]) -> Iterator[_AlikeCodes]:
    """Yield what finishes one array of the tables: alike ones together, as much at once as a thread should take.

    Not of those that hold a delta's rows: these are neither values nor part of a digest.
    """
    alike: dict[tuple[int, int | None], list[int]] = {}
    for at, table in enumerate(tables):
        if name in table.held and table.rows is None:
            spec = table.specs[name]
            shift = spec.bit_shift if isinstance(spec.encoding, FloatBits) else None
            alike.setdefault((spec.width, shift), []).append(at)
    for numbers in alike.values():
        own = [tables[at] for at in numbers]
        held = [table.held[name] for table in own]
        places = np.array([(address_of(codes), codes.itemsize, len(codes), 0) for codes in held], np.int64)
        outputs = [table.outputs.get(name) for table in own]
        values = np.array([0 if out is None else address_of(out) for out in outputs], np.int64)
        none = np.zeros(len(own), np.int64)
        parts = table_kernels.parts_of(none, none, values, places)
        scales = np.array([_scale(table.specs[name]) for table in own], np.float32)
        sizes = np.cumsum([codes.size for codes in held]) // _FINISHED_ELEMENTS
        cuts = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(own)]
        for a, b in pairwise(cuts):
            yield _AlikeCodes(own[a].specs[name], np.array(numbers[a:b], np.int64), parts[a:b], scales[a:b])


def _scale(spec: ArraySpec) -> float:
    return spec.encoding.scale if isinstance(spec.encoding, Lattice) else 0.0
