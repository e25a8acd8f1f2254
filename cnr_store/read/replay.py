"""Replay a chain into the codes of a table: what was planned is read, decoded and applied on threads.

Row operations follow the algebra of the design (spec, section 4.4): segments in chain order, later set, delete or
escape wins, an ``add`` is only legal on a row that has codes. Memory: the caller's arrays, and one chunk of each
array per thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import affine, digest, packing, row_kernels
from cnr_store.errors import CorruptStore
from cnr_store.format.arrays import DigitChunk
from cnr_store.format.records import ArrayEntry, Manifest, RowListEntry
from cnr_store.read.plan import SegmentSteps, Step, TablePlan, by_columns
from cnr_store.runtime.threads import Workers, blocks, windows
from cnr_store.segment.codes import (
    ABSENT,
    ADDED,
    BLOCK_ROWS,
    CODED,
    ESCAPED,
    TASK_ROWS,
    Array,
    ArraySpec,
    TableCodes,
    decode_block,
)
from cnr_store.segment.decoded import InPlace, Scratch
from cnr_store.types import Affine, RowIds

Holds = Callable[[RowIds], npt.NDArray[np.bool_]]
"""Returns which of sorted row ids are meant."""

_MERGED_KEYS = 1 << 20
CUT_ROWS = 16_384
"""Rows of packed codes unpacked at a time when some of their columns are cut out."""

PIECE_BYTES = 1 << 20
"""Bytes of codes unpacked at a time: they stay in the cache of a core until they are floats."""


class ChunkReader(Protocol):
    """What a replay needs of a segment: `SegmentReader`, or one that keeps chunks for a while."""

    @property
    def name(self) -> str:
        """The segment's name."""

    @property
    def manifest(self) -> Manifest:
        """The manifest, with the state of its chain."""

    def read_chunk(self, entry: ArrayEntry, index: int, scratch: Scratch) -> Array:
        """See `SegmentReader.read_chunk`; the caller only reads what it gets."""

    def open_chunk(self, entry: ArrayEntry, index: int, scratch: Scratch) -> DigitChunk | None:
        """See `SegmentReader.open_chunk`."""

    def read_rows(self, row_list: RowListEntry, index: int, scratch: Scratch) -> RowIds:
        """See `SegmentReader.read_rows`."""


class Replay:
    """Executes plans over opened segments; shares decode memory between chunks, one set per thread."""

    def __init__(self, readers: Sequence[ChunkReader], workers: Workers) -> None:
        self._readers = readers
        self._workers = workers
        self._local = threading.local()

    def run(self, plan: TablePlan, codes: TableCodes, rows: RowIds | None = None) -> None:
        """Replay ``plan`` into ``codes``; blocks. With ``rows`` (sorted), position i of the arrays is row ``rows[i]``.

        The plan's columns are those of ``codes``, and lie in one elementary interval. Where ``codes`` holds no arrays
        only row ids are read and the status of each row is set. If ``codes`` already has a status, the replay
        continues from it: the content of `UNTOUCHED` rows is that of an earlier state, which is not in ``codes``.

        Raises
        ------
        CorruptStore, CorruptObject, MissingObject
        NarrowCodes
            An int16 array is too narrow. The contents of ``codes`` are undefined after each of these.
        """
        if len(by_columns(plan)) != 1 or plan.columns != codes.columns:
            raise ValueError(f"a replay is of one column interval, found {plan.columns} for codes of {codes.columns}")
        target = _RowTarget(codes, rows)
        if plan.tracks_status:
            codes.track_status(ABSENT)
        for batch in plan.batches:
            target.begin(batch)
            # Escapes of a row must leave before a later set: both are in one batch only if rows are disjoint.
            overflowed = self._workers.run(partial(self._apply, plan, step, target) for step in batch.steps)
            too_narrow = {name for names in overflowed for name in names}
            if too_narrow:
                raise NarrowCodes(too_narrow)
        target.finish()

    def _apply(self, plan: TablePlan, step: Step, target: _RowTarget) -> list[str]:
        reader = self._readers[step.segment]
        rows = reader.read_rows(step.row_list, step.chunk, self.scratch("rows"))
        index, positions = target.select(rows)
        if len(index) == 0:
            return []
        target.claim(index, step)
        if step.operation == "delete":
            target.mark(index, ABSENT)
            return []
        if step.operation == "add":
            index, positions = target.add(index, positions, plan, step)
            if len(index) == 0:
                return []
        overflowed = []
        if step.operation == "escape" and target.codes.status is not None:
            specs = [target.codes.specs[name] for name in target.codes.arrays]
            target.escape(index, {s.name: self.values(step, plan, s)[positions].copy() for s in specs})
        else:
            # Without a status all rows are of one kind: where that is escape, the arrays are of exact floats.
            for name in target.codes.arrays:
                if not self._store(plan, step, name, target, index, positions):
                    overflowed.append(name)
            if step.operation == "set":
                target.mark(index, CODED)
        return overflowed

    def _store(self, plan: TablePlan, step: Step, name: str, target: _RowTarget, index: RowIds, positions: Any) -> bool:
        """Put or add one array's chunk; False when an int16 mirror is too narrow."""
        spec = target.codes.specs[name]
        held = target.codes.arrays[name]
        shift = step.left_shift if name == "codes" else 0
        adds = step.operation == "add"
        contiguous = index[-1] - index[0] + 1 == len(index)
        block = held[index[0] : index[-1] + 1] if contiguous else None
        is_plain = step.operation == "set" and spec.is_integer and shift == 0 and held.flags.c_contiguous
        into = block if is_plain else None
        values = self.values(step, plan, spec, into)[positions]
        if into is not None and np.may_share_memory(values, into):
            return True
        if not spec.is_integer:
            held[index] = values
            return True
        values = np.ascontiguousarray(values).reshape(len(values), -1)
        if adds and held.dtype == np.int32 and spec.wraps:
            return checked_codes(row_kernels.add_codes_wrapping(held, index, 0, values), plan, step)
        if block is not None:
            bad = row_kernels.add_block(block, values, shift) if adds else row_kernels.put_block(block, values, shift)
        else:
            bad = (
                row_kernels.add_codes(held, index, 0, values, shift)
                if adds
                else row_kernels.put_codes(held, index, 0, values, shift)
            )
        if bad >= 0 and target.codes.can_widen(name):
            return False
        return checked_codes(bad, plan, step)

    def values(self, step: Step, plan: TablePlan, spec: ArraySpec, into: Array | None = None) -> Array:
        """Decode the plan's columns of one array of the step's chunk: integer codes, or floats of other rows.

        (rows, columns), in memory that the calling thread's next call overwrites; in ``into``, whose rows are those of
        the step, if the chunk has these rows and no others, in that dtype.
        """
        reader, row_list = self._readers[step.segment], step.row_list
        stored = "values" if step.operation == "escape" and spec.name == "codes" else spec.name
        if stored not in row_list.group:
            raise CorruptStore(
                f"{step.operation} rows of table {step.part.table!r} in segment {reader.name} lack array {stored!r}",
                table=step.part.table,
            )
        scratch = self.scratch(stored)
        if into is not None:
            scratch = InPlace(into, scratch)
        chunk = reader.read_chunk(row_list.array(stored), step.chunk, scratch)
        width = step.part.columns[1] - step.part.columns[0]
        low, high = (column - step.part.columns[0] for column in plan.columns)
        if spec.packed_bits:
            return (
                chunk if step.part.columns == plan.columns else _cut_packed(chunk, spec.packed_bits, width, low, high)
            )
        schema = reader.manifest.tables[step.part.table]
        if isinstance(schema.encoding, Affine) and spec.name == "codes" and step.operation != "escape":
            scale = reader.read_chunk(row_list.array("scale"), step.chunk, self.scratch("scale"))
            zero = reader.read_chunk(row_list.array("zero_point"), step.chunk, self.scratch("zero_point"))
            out = self.scratch("affine").take((len(chunk), width), np.dtype(np.float32))
            affine.decode(chunk, scale, zero, bits=schema.encoding.bits, dim=width, out=out)
            chunk = out
        if chunk.ndim == 1:
            return chunk.reshape(-1, 1)
        return chunk if step.part.columns == plan.columns else chunk[:, low:high]

    def pieces(
        self, step: Step, plan: TablePlan, spec: ArraySpec, start: int, stop: int
    ) -> Iterator[tuple[int, Array]]:  # fmt: skip
        """Yield rows [start, stop) of what `values` returns, a piece at a time: its first row, and (rows, columns).

        The next piece overwrites it. Integers are unpacked piece by piece, where their chunk can be.
        """
        entry, scratch = step.row_list.arrays.get(spec.name), self.scratch(spec.name)
        chunk = None
        if entry is not None and step.operation == "set" and step.part.columns == plan.columns:
            chunk = self._readers[step.segment].open_chunk(entry, step.chunk, scratch)
        if entry is None or chunk is None:
            yield start, self.values(step, plan, spec)[start:stop]
            return
        width, dtype = math.prod(entry.shape[1:]), np.dtype(entry.dtype)
        for low, high in windows(stop - start, width * dtype.itemsize, PIECE_BYTES):
            piece = scratch.take((high - low, width), dtype)
            chunk.unpack((start + low) * width, piece.reshape(-1))
            yield start + low, piece

    def scratch(self, name: str) -> Scratch:
        """Return the calling thread's memory of that name."""
        memory: dict[str, Scratch] = self._local.__dict__.setdefault("memory", {})
        return memory.setdefault(name, Scratch())


class NarrowCodes(Exception):
    """An int16 array is too narrow for what it would hold; the caller starts again with int32."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(*sorted(names))
        self.names = names


def _cut_packed(packed: Array, bits: int, dim: int, low: int, high: int) -> Array:
    """Return columns [low, high) of packed rows of ``dim`` codes, packed."""
    cut = np.empty((len(packed), packing.packed_width(high - low, bits)), np.uint8)
    for start, stop in blocks(len(packed), CUT_ROWS):
        codes = np.empty((stop - start, packing.padded_dim(dim)), np.uint8)
        packing.unpack(packed[start:stop], bits=bits, out=codes)
        chosen = np.zeros((stop - start, packing.padded_dim(high - low)), np.uint8)
        chosen[:, : high - low] = codes[:, low:high]
        packing.pack(chosen, bits=bits, out=cut[start:stop])
    return cut


def replay(
    readers: Sequence[ChunkReader], plan: TablePlan, codes: TableCodes, workers: Workers, rows: RowIds | None = None
) -> None:
    """Replay into ``codes``, widening int16 arrays and starting over in the rare case that codes outgrow them."""
    engine = Replay(readers, workers)
    try:
        engine.run(plan, codes, rows)
    except NarrowCodes as narrow:
        for name in narrow.names:
            codes.widen(name)
        codes.status = None
        codes.escapes = type(codes.escapes)()
        for array in codes.arrays.values():
            array[...] = 0
        replay(readers, plan, codes, workers, rows)


class _RowTarget:
    """Maps row ids to positions in the arrays: of a contiguous range, or of a sorted list of rows."""

    def __init__(self, codes: TableCodes, rows: RowIds | None) -> None:
        self.codes = codes
        self._rows = rows
        self._lock = threading.Lock()
        self._escaped: dict[int, dict[str, Array]] = {}
        self._claimed: dict[tuple[int, int], npt.NDArray[np.bool_]] | None = None

    def begin(self, batch: SegmentSteps) -> None:
        """Prepare for a segment: rows beyond its size go, and rows are remembered if two of its lists may share one."""
        self.truncate(batch.num_rows)
        self._claimed = {} if _may_overlap(batch.steps) else None

    def claim(self, index: RowIds, step: Step) -> None:
        """Refuse a row that another list of the same segment has too: their order is undefined."""
        if self._claimed is None:
            return
        with self._lock:
            size = self.codes.num_rows if self._rows is None else len(self._rows)
            claimed = self._claimed.setdefault(step.part.columns, np.zeros(size, np.bool_))
            twice = index[claimed[index]]
            claimed[index] = True
        if len(twice):
            row = int(twice[0]) + self.codes.start if self._rows is None else int(self._rows[twice[0]])
            raise _in_two_lists(step, row)

    def select(self, rows: RowIds) -> tuple[RowIds, Any]:
        """Return (indexes into the arrays, which positions of ``rows`` they are)."""
        if self._rows is None:
            low, high = np.searchsorted(rows, [self.codes.start, self.codes.stop])
            return rows[low:high] - self.codes.start, slice(int(low), int(high))
        return matching(self._rows, rows)

    def truncate(self, num_rows: int) -> None:
        """Mark rows from ``num_rows`` on as absent."""
        status = self.codes.status
        if status is None or self.codes.schema.keys == "hashed":
            return
        cut = num_rows - self.codes.start if self._rows is None else int(np.searchsorted(self._rows, num_rows))
        if cut < len(status):
            status[max(cut, 0) :] = ABSENT

    def mark(self, index: RowIds, status: int) -> None:
        if self.codes.status is not None:
            self.codes.status[index] = status

    def add(self, index: RowIds, positions: Any, plan: TablePlan, step: Step) -> tuple[RowIds, Any]:
        """Refuse differences to rows without codes; return the rows whose codes are here, as `select` does.

        An `UNTOUCHED` row becomes `ADDED`: the codes that the difference applies to are not known.
        """
        status = self.codes.status
        if status is None:
            return index, positions
        before = status[index]
        wrong = np.flatnonzero((before == ABSENT) | (before == ESCAPED))
        if len(wrong):
            row = int(index[wrong[0]]) + self.codes.start if self._rows is None else int(self._rows[index[wrong[0]]])
            raise CorruptStore(
                f"row {row} of table {plan.table!r} has an add in the chain's segment {step.segment} after it was "
                "deleted, escaped or never set; run `cnr verify`",
                table=plan.table,
                found=row,
            )
        known = before == CODED
        if known.all():
            return index, positions
        status[index[~known]] = ADDED
        return index[known], _positions_of(positions, known)

    def escape(self, index: RowIds, values: dict[str, Array]) -> None:
        self.mark(index, ESCAPED)
        if not values:
            return
        with self._lock:
            for position, row in enumerate(index):
                self._escaped[int(row)] = {name: block[position] for name, block in values.items()}

    def finish(self) -> None:
        """Keep the escape rows that nothing later replaced."""
        status = self.codes.status
        alive = sorted(row for row in self._escaped if status is not None and status[row] == ESCAPED)
        if alive:
            rows = np.asarray(alive, np.int64)
            values = {n: np.stack([self._escaped[r][n] for r in alive]) for n in self.codes.arrays}
            self.codes.escapes.put(rows + self.codes.start, values)


def named_rows(readers: Sequence[ChunkReader], plan: TablePlan, holds: Holds | None = None) -> RowIds:
    """Return the keys, or rows of the plan's range, that its chunks have: sorted, unique. Reads row ids alone; blocks.

    ``holds``: which of sorted row ids are meant, if not all. Memory: 8 bytes for each row that is returned.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    """
    known = np.empty(0, np.int64)
    pending: list[RowIds] = []
    count = 0
    scratch = Scratch()
    for step in (step for batch in plan.batches for step in batch.steps):
        rows = readers[step.segment].read_rows(step.row_list, step.chunk, scratch)
        if plan.schema.keys == "dense":
            rows = rows[slice(*np.searchsorted(rows, [plan.start, plan.stop]))]
        pending.append(rows.copy() if holds is None else rows[holds(rows)])
        count += len(pending[-1])
        if count > max(_MERGED_KEYS, len(known)):
            known, pending, count = np.unique(np.concatenate([known, *pending])), [], 0
    return np.unique(np.concatenate([known, *pending]))


def matching(wanted: RowIds, rows: RowIds) -> tuple[RowIds, RowIds]:
    """Return where two sorted lists of unique rows have the same: positions in the first, and in the second. Pure.

    The shorter list is searched for in the longer one, so a few rows cost little against a large chunk.
    """
    if len(wanted) > len(rows):
        second, first = matching(rows, wanted)
        return first, second
    at = np.searchsorted(rows, wanted)
    found = np.flatnonzero(at < len(rows))
    found = found[rows[at[found]] == wanted[found]]
    return found.astype(np.int64), at[found].astype(np.int64)


def _positions_of(positions: Any, chosen: npt.NDArray[np.bool_]) -> RowIds:
    """The chosen of the positions, which may be a slice."""
    at = np.arange(positions.start, positions.stop) if isinstance(positions, slice) else positions
    return np.asarray(at[chosen], np.int64)


def _may_overlap(steps: Sequence[Step]) -> bool:
    """Whether the row ranges of two chunks intersect; chunks of one list never do."""
    spans = sorted((step.part.columns, step.first, step.last) for step in steps)
    return any(a[0] == b[0] and b[1] <= a[2] for a, b in pairwise(spans))


def _in_two_lists(step: Step, row: int) -> CorruptStore:
    return CorruptStore(
        f"row {row} of table {step.part.table!r} is in two row lists of segment {step.segment} of the chain; "
        "run `cnr verify`",
        table=step.part.table, found=row,
    )  # fmt: skip


def checked_codes(bad: int, plan: TablePlan, step: Step) -> bool:
    """Refuse what a put or add kernel returned, unless that is -1: then True."""
    if bad >= 0:
        raise CorruptStore(
            f"codes of table {plan.table!r} leave their range in chunk {step.chunk} of segment {step.segment}; "
            "run `cnr verify`",
            table=plan.table,
        )
    return True


def finish(codes: TableCodes, outputs: Mapping[str, Array], workers: Workers, *, with_digest: bool) -> int:
    """Decode into ``outputs`` and return the state digest of ``codes`` (0 without ``with_digest``).

    Block by block, so that both passes share the cache. An output may be the memory of its codes.
    """
    names = [name for name, spec in codes.specs.items() if spec.is_additive and name in codes.arrays]
    multipliers = {name: codes.specs[name].multipliers for name in names if with_digest}

    def of_range(start: int, stop: int) -> int:
        total = 0
        for low, high in ((start + a, start + b) for a, b in blocks(stop - start, BLOCK_ROWS)):
            for name, held in codes.arrays.items():
                if name in multipliers:
                    total += codes.block_digest(name, low, high, multipliers[name])
                if name in outputs:
                    decode_block(codes.specs[name], held[low:high], outputs[name][low:high])
        return total

    totals = workers.run(partial(of_range, low, high) for low, high in blocks(codes.num_rows, TASK_ROWS))
    escaped = codes.escape_digest(codes.escapes, multipliers)
    for name, output in outputs.items():
        codes.overlay(name, output)
    return digest.add_digests(*totals, escaped)
