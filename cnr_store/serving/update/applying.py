"""Applies one delta segment to a served table; the result is an overlay of the changed rows.

If all parts of the segment have the table's whole width, threads decode chunks directly into the overlay and add the
differences to the served rows in the same pass. Parts with fewer columns go through `Replay` over the union of their
rows, which is the definition. Slots are not read. Served rows are not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import kernels, row_kernels, widths
from cnr_store.encodings.widths import carrier
from cnr_store.errors import BadRowIds, CorruptStore
from cnr_store.format.records import PartEntry
from cnr_store.read.plan import Step, TablePlan, by_columns, plan_table
from cnr_store.read.replay import ChunkReader, Replay, matching
from cnr_store.runtime.threads import Inline, Workers, blocks
from cnr_store.segment.codes import (
    ABSENT,
    ADDED,
    BLOCK_ROWS,
    CODED,
    ESCAPED,
    UNTOUCHED,
    Array,
    ArraySpec,
    ExactRows,
    TableCodes,
    array_specs,
    decode_block,
)
from cnr_store.segment.decoded import Scratch
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.served_table import Overlay, RowKind, ServedTable
from cnr_store.serving.rows.shards import HashShard, meets_shard, rows_in_shard
from cnr_store.serving.update.adding import LARGEST_CODE, add_to_codes, add_to_values
from cnr_store.serving.update.content import CodesTooWide, exact_rows_after, in_two_lists, serve
from cnr_store.types import Lattice, RowIds

_INLINE = Inline()


@dataclass(frozen=True, slots=True)
class Applied:
    """The changes of a table by one segment.

    Attributes
    ----------
    overlay
        The changed rows after the segment.
    exact_rows
        All exact rows of the table after it; only if codes are kept.
    unknown
        Rows of the overlay (sorted) that cannot be computed from the served ones: a difference to an absent or exact
        row, or a row with different states in its columns. They are read from the version's chain, which also shows
        damage. They are marked `ESCAPED`, so that no later difference is added to them.
    """

    overlay: Overlay
    exact_rows: ExactRows
    unknown: RowIds


def apply_segment(
    reader: ChunkReader, served: ServedTable, workers: Workers, *, memory: Memory = ANONYMOUS, reference: bool = False
) -> Applied:
    """Return the changes of a served table, or shard, by a delta segment. Blocks; changes nothing.

    Parameters
    ----------
    reader
        The segment. Its table has the generation of ``served``, its number of rows if rows are found by position, and
        its scale if codes are kept.
    reference
        Use `Replay` over the union of rows, whatever the parts are.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    NonFiniteValues
        A row that is not finite has no int8 form.
    CodesTooWide
        Codes are kept as int16, and no longer fit.
    """
    base = served.base
    schema = reader.manifest.tables[served.name]
    start, stop = (base.start, base.stop) if base.index is None else (0, schema.num_rows)
    plan = plan_table([reader.manifest], served.name, start, stop)
    with memory.attempt():
        if _is_whole(plan) and not reference:
            return _Application(reader, plan, served, workers, memory).run()
        return _apply_by_replay(reader, plan, served, workers, memory)


def check_base(parts: Sequence[PartEntry], table: str, recorded: int | None, segment: str) -> None:
    """Refuse a segment that starts from another state of a table than the present one. Pure.

    Parameters
    ----------
    parts
        The segment's.
    recorded
        The present state's digest of the whole table, None if it has none.

    Raises
    ------
    CorruptStore
    """
    mine = [part.base_digest for part in parts if part.table == table]
    if recorded is None or not mine or None in mine:
        return
    base = sum(int(digest or "0", 16) for digest in mine) % (1 << 64)
    if base != recorded:
        raise CorruptStore(
            f"segment {segment} starts from state digest {base:016x} of table {table!r}, the state that it is put on "
            f"has {recorded:016x}: it belongs to another chain; run `cnr verify`",
            table=table, expected=f"{recorded:016x}", found=f"{base:016x}",
        )  # fmt: skip


def _is_whole(plan: TablePlan) -> bool:
    whole = (0, plan.schema.dim)
    return all(step.part.columns == whole for batch in plan.batches for step in batch.steps)


@dataclass(frozen=True, slots=True)
class _PlacedChunk:
    """A chunk's rows in the overlay: positions [start, stop); ``ids`` and their positions in the chunk, if not all."""

    step: Step
    start: int
    stop: int
    ids: RowIds | None
    at: RowIds | None


class _Application:
    """One segment applied to one table, chunk by chunk on threads."""

    def __init__(
        self, reader: ChunkReader, plan: TablePlan, served: ServedTable, workers: Workers, memory: Memory
    ) -> None:
        self._reader = reader
        self._plan = plan
        self._served = served
        self._kind = served.kind
        self._workers = workers
        self._spec = array_specs(plan.schema)["codes"]
        self._engine = Replay([reader], workers)
        self._chunks = self._selected()
        count = self._chunks[-1].stop if self._chunks else 0
        self._overlay = Overlay.allocate(
            plan.table, plan.schema, count, self._kind.width, served.base.rows.dtype, memory
        )

    def run(self) -> Applied:
        """Apply every chunk, then find rows by id."""
        overlay = self._overlay
        found = self._workers.run(partial(self._apply, chunk) for chunk in self._chunks)
        duplicate = overlay.fill_index()
        if duplicate >= 0:
            raise in_two_lists(self._plan, self._reader, int(overlay.ids[duplicate]))
        unknown = np.sort(np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in found)]))
        exact = [(rows, values) for _, (rows, values) in found if len(rows)]
        return Applied(overlay, exact_rows_after(self._served, overlay, exact), unknown)

    def _selected(self) -> list[_PlacedChunk]:
        """Return the chunks with rows of the shard, and where their rows go; reads ids if not all rows are in it."""
        shard, base = self._served.base.shard, self._served.base
        steps = [step for batch in self._plan.batches for step in batch.steps]
        steps = [step for step in steps if meets_shard(shard, step.first, step.last)]

        def ids_of(step: Step) -> tuple[RowIds, RowIds] | None:
            is_inside = base.index is None and base.start <= step.first and step.last < base.stop
            if shard is None or (is_inside and not isinstance(shard, HashShard)):
                return None
            rows = self._reader.read_rows(step.row_list, step.chunk, Scratch())
            chosen = rows_in_shard(shard, rows)
            return chosen.copy(), matching(chosen, rows)[1]

        chunks, stop = [], 0
        for step, chosen in zip(steps, self._workers.run(partial(ids_of, step) for step in steps), strict=True):
            start = stop
            stop += step.num_rows if chosen is None else len(chosen[0])
            if stop > start:
                ids, at = (None, None) if chosen is None else chosen
                chunks.append(_PlacedChunk(step, start, stop, ids, at))
        return chunks

    def _apply(self, chunk: _PlacedChunk) -> tuple[RowIds, tuple[RowIds, Array]]:
        """Write a chunk's rows; return the unknown ones, and exact rows with their floats."""
        step, into = chunk.step, slice(chunk.start, chunk.stop)
        ids, rows, status = self._overlay.ids[into], self._overlay.rows[into], self._overlay.status[into]
        if chunk.ids is None:
            ids[...] = self._reader.read_rows(step.row_list, step.chunk, self._engine.scratch("rows"))
        else:
            ids[...] = chunk.ids
        none = np.empty(0, np.int64)
        if step.operation == "delete":
            status[...] = ABSENT
            return none, (none, rows)
        values = self._engine.values(step, self._plan, self._spec)
        if chunk.at is not None:
            values = values[chunk.at]
        values = np.ascontiguousarray(values)
        if step.operation == "escape":
            status[...] = ESCAPED
            if self._kind.kept_as == "codes":
                return none, (ids.copy(), values.copy())
            serve(self._kind, values, rows, self._plan.table, 0, _INLINE)
            return none, (none, rows)
        if step.operation == "set":
            self._set(values, rows, step)
            return none, (none, rows)
        base = self._served.base
        if base.index is None and self._served.overlay is None:
            return self._add(ids, values, rows, status, step), (none, rows)
        # Rows that are found by key are gathered first, as many as stay in the cache.
        unknown = [
            self._add(ids[low:high], values[low:high], rows[low:high], status[low:high], step)
            for low, high in blocks(len(ids), BLOCK_ROWS)
        ]
        return np.concatenate([none, *unknown]), (none, rows)

    def _set(self, values: Array, rows: Array, step: Step) -> None:
        kind = self._kind
        if kind.kept_as == "codes":
            self._checked(int(row_kernels.put_block(rows, values, 0)), rows, step)
        elif kind.served == kind.table_dtype:
            decode_block(self._spec, values, rows)
        else:
            for low, high in blocks(len(values), BLOCK_ROWS):
                floats = np.empty(values[low:high].shape, carrier(kind.table_dtype))
                decode_block(self._spec, values[low:high], floats)
                serve(kind, floats, rows[low:high], self._plan.table, 0, _INLINE)

    def _add(self, ids: RowIds, values: Array, rows: Array, status: Array, step: Step) -> RowIds:
        """Add differences to served rows, and write them to ``rows``; return rows to which nothing can be added."""
        source, positions, before = self._before(ids)
        if before is None or not before.any():
            self._add_differences(source, positions, values, rows, step)
            return ids[:0]
        at = np.flatnonzero(before == CODED)
        added = np.empty((len(at), rows.shape[1]), rows.dtype)
        self._add_differences(source, positions[at], np.ascontiguousarray(values[at]), added, step)
        rows[at] = added
        unknown = before != CODED
        status[unknown] = ESCAPED
        return np.asarray(ids[unknown], np.int64)

    def _before(self, ids: RowIds) -> tuple[Array, RowIds, npt.NDArray[np.uint8] | None]:
        """Return where sorted rows are: an array, positions in it, and their status (None: all are coded)."""
        base = self._served.base
        if base.index is None and self._served.overlay is None:
            if ids[0] < base.start or ids[-1] >= base.stop:
                raise self._outside(int(ids[0] if ids[0] < base.start else ids[-1]))
            positions = ids - base.start
            return base.rows, positions, None if base.status is None else base.status[positions]
        source = self._engine.scratch("before").take((len(ids), base.rows.shape[1]), base.rows.dtype)
        try:
            before = self._served.gather_stored(ids, source)
        except BadRowIds as error:
            raise self._outside(int(error.found)) from error
        return source, np.arange(len(ids), dtype=np.int64), before

    def _outside(self, row: int) -> CorruptStore:
        return CorruptStore(
            f"segment {self._reader.name} adds to row {row} of table {self._plan.table!r}, which has "
            f"{self._plan.schema.num_rows} rows; run `cnr verify`",
            table=self._plan.table, found=row,
        )  # fmt: skip

    def _add_differences(self, source: Array, positions: RowIds, values: Array, rows: Array, step: Step) -> None:
        if self._kind.kept_as == "codes":
            self._checked(add_to_codes(self._spec, source, positions, values, rows), rows, step)
        else:
            self._checked(add_to_values(self._spec, source, positions, values, rows), rows, step)

    def _checked(self, bad: int, rows: Array, step: Step) -> None:
        if bad < 0:
            return
        if self._kind.kept_as == "codes" and rows.dtype == np.int16 and self._spec.memory_dtype == np.int32:
            raise CodesTooWide
        raise CorruptStore(
            f"codes of table {self._plan.table!r} leave their range in chunk {step.chunk} of segment "
            f"{self._reader.name}; run `cnr verify`",
            table=self._plan.table,
        )  # fmt: skip


def _apply_by_replay(
    reader: ChunkReader, plan: TablePlan, served: ServedTable, workers: Workers, memory: Memory
) -> Applied:
    """The definition: `Replay` changes the codes of all rows that the segment lists, interval by interval."""
    kind, base = served.kind, served.base
    steps = [step for batch in plan.batches for step in batch.steps]
    named = [reader.read_rows(step.row_list, step.chunk, Scratch()).copy() for step in steps]
    rows = rows_in_shard(base.shard, np.unique(np.concatenate([np.empty(0, np.int64), *named])))
    if base.index is None:
        rows = rows[(rows >= base.start) & (rows < base.stop)]
    overlay = Overlay.allocate(plan.table, plan.schema, len(rows), kind.width, base.rows.dtype, memory)
    overlay.ids[...] = rows
    overlay.fill_index()
    before = served.gather_stored(rows, overlay.rows)
    known = _codes_of(array_specs(plan.schema)["codes"], kind, overlay.rows, before)
    added = [_replayed(reader, piece, rows, known, before, workers) for piece in by_columns(plan)]
    states = np.array([one.states for one in added])
    touched = np.array([one.touched for one in added])
    is_same = (states == states[0]).all(axis=0)
    is_known = is_same & (states[0] != ADDED) & ((states[0] != ESCAPED) | touched.all(axis=0))
    if kind.served == "int8" and len(added) > 1:
        is_known &= states[0] == ABSENT  # a fused row is of all its columns
    coded, escaped = is_known & (states[0] == CODED), is_known & (states[0] == ESCAPED)
    for one in added:
        _put_interval(overlay, kind, plan, one, np.flatnonzero(coded & one.touched))
    overlay.status[...] = np.where(is_known, states[0], ESCAPED)
    exact = np.hstack([one.exact for one in added])[escaped]
    if kind.kept_as == "values":
        exact_rows = np.empty((len(exact), kind.width), overlay.rows.dtype)
        serve(kind, exact, exact_rows, plan.table, 0, workers)
        overlay.rows[escaped] = exact_rows
    return Applied(overlay, exact_rows_after(served, overlay, [(rows[escaped], exact)]), rows[~is_known])


@dataclass(frozen=True, slots=True)
class _ColumnRows:
    """One column interval of the rows after a segment; ``touched`` marks the rows whose columns it lists."""

    codes: TableCodes
    touched: npt.NDArray[np.bool_]
    states: npt.NDArray[np.uint8]
    exact: Array


def _replayed(
    reader: ChunkReader, piece: TablePlan, rows: RowIds, known: Array, before: Array, workers: Workers
) -> _ColumnRows:
    low, high = piece.columns
    spec = array_specs(piece.schema, piece.columns)["codes"]
    codes = TableCodes(
        piece.schema, 0, len(rows), {"codes": known[:, low:high].astype(spec.memory_dtype)}, columns=piece.columns
    )
    codes.status = np.where(before == CODED, CODED, UNTOUCHED).astype(np.uint8)
    Replay([reader], workers).run(piece, codes, rows)
    touched = np.zeros(len(rows), np.bool_)
    for step in (step for batch in piece.batches for step in batch.steps):
        touched[matching(rows, reader.read_rows(step.row_list, step.chunk, Scratch()))[0]] = True
    exact = np.zeros((len(rows), high - low), carrier(spec.dtype))
    if len(codes.escapes.rows):
        exact[codes.escapes.rows] = codes.escapes.values["codes"]
    return _ColumnRows(codes, touched, np.where(touched, codes.status, before).astype(np.uint8), exact)


def _put_interval(overlay: Overlay, kind: RowKind, plan: TablePlan, one: _ColumnRows, at: RowIds) -> None:
    """Write the columns of an interval of coded rows, in the form in which they are kept."""
    low, high = one.codes.columns
    spec, codes = one.codes.specs["codes"], one.codes.arrays["codes"][at]
    if kind.kept_as == "codes":
        limits = np.iinfo(overlay.rows.dtype)
        if codes.size and not limits.min <= codes.min() <= codes.max() <= limits.max:
            raise CodesTooWide
        overlay.rows[at, low:high] = codes
        return
    if isinstance(spec.encoding, Lattice) and codes.size and np.abs(codes.astype(np.int64)).max() > LARGEST_CODE:
        raise CorruptStore(f"codes of table {plan.table!r} leave their range; run `cnr verify`", table=plan.table)
    floats = np.empty(codes.shape, carrier(spec.dtype))
    decode_block(spec, codes, floats)
    if kind.served == kind.table_dtype:
        overlay.rows[at, low:high] = floats
        return
    rows = np.empty((len(at), kind.width if kind.served == "int8" else high - low), overlay.rows.dtype)
    serve(kind, floats, rows, plan.table, 0, _INLINE)
    if kind.served == "int8":
        overlay.rows[at] = rows
    else:
        overlay.rows[at, low:high] = rows


def _codes_of(spec: ArraySpec, kind: RowKind, rows: Array, status: Array) -> Array:
    """Return the codes of served rows, (n, dim); zeros for rows that are not coded, and if nothing is ever added."""
    codes = np.zeros((len(rows), kind.dim), spec.memory_dtype)
    coded = np.ascontiguousarray(rows[status == CODED])
    if not spec.is_additive:
        return codes
    if kind.kept_as == "codes":
        codes[status == CODED] = coded
    elif isinstance(spec.encoding, Lattice):
        codes[status == CODED] = np.rint(coded / spec.scale)
    else:
        known = np.empty(coded.shape, spec.memory_dtype)
        kernels.float_bits_encode(
            widths.as_bits(coded, spec.dtype), spec.bit_shift, known, np.zeros(len(coded), np.uint8)
        )
        codes[status == CODED] = known
    return codes
