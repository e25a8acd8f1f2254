"""Read a table into memory: where the codes live while a chain is replayed, window by window.

fp32 outputs hold their own codes (int32 of the same memory), a mirror holds them for a trainer, anything else goes
through windows of bounded size. So restoring needs the target, the mirror if asked for, and chunks in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cnr_store.encodings.digest import add_digests
from cnr_store.records import TableSchema
from cnr_store.replay import TablePlan, check_digest, finish, replay
from cnr_store.segment import Scratch, SegmentReader
from cnr_store.table_codes import Allocate, Array, ArraySpec, TableCodes, array_specs
from cnr_store.types import RowIds
from cnr_store.workers import Workers, blocks

WINDOW_BYTES = 64 * 1024 * 1024
"""Codes held at once when an output cannot hold its own."""


def read_range(
    readers: Sequence[SegmentReader], plan: TablePlan, outputs: Mapping[str, Array], workers: Workers
) -> None:
    """Read rows [plan.start, plan.stop) into ``outputs``: array name to (rows, width) of the array's float dtype.

    Blocks. The state digest is checked when the range covers whole parts and every mirrored array is read.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
        ``outputs`` then hold undefined values.
    """
    specs = array_specs(plan.schema)
    apart = [specs[name] for name, out in outputs.items() if not _holds_its_codes(specs[name], out)]
    row_bytes = sum(spec.held_dtype.itemsize * spec.width for spec in apart)
    # A chunk that crosses windows is decoded in each, so a window is as large as the codes held apart allow.
    span = max(1, WINDOW_BYTES // row_bytes) if row_bytes else max(1, plan.stop - plan.start)
    ranges = blocks(plan.stop - plan.start, span) or [(0, 0)]
    windows = [(plan.start + low, plan.start + high) for low, high in ranges]
    names = set(outputs)
    total = 0
    for start, stop in windows:
        window = _clip(plan, start, stop)
        pieces = {name: out[start - plan.start : stop - plan.start] for name, out in outputs.items()}
        held = {
            name: _codes_in(out, specs[name])
            if _holds_its_codes(specs[name], out)
            else np.empty(out.shape, specs[name].held_dtype)
            for name, out in pieces.items()
        }
        codes = TableCodes(plan.schema, start, stop, held)
        replay(readers, window, codes, workers)
        total = add_digests(total, finish(codes, pieces, workers, with_digest=True))
    check_digest(plan, total, names)


def read_mirror(
    readers: Sequence[SegmentReader],
    plan: TablePlan,
    outputs: Mapping[str, Array],
    workers: Workers,
    allocate: Allocate,
) -> TableCodes:
    """Read rows [plan.start, plan.stop) and keep their codes: returns the mirror, fills ``outputs`` (may be empty).

    Memory beyond the outputs: the mirror, in ``allocate``'s memory.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    """
    specs = array_specs(plan.schema)
    shape = {name: (plan.stop - plan.start, spec.width) for name, spec in specs.items()}
    held = {name: allocate(shape[name], spec.mirror_dtype) for name, spec in specs.items() if spec.is_additive}
    codes = TableCodes(plan.schema, plan.start, plan.stop, held, allocate)
    replay(readers, plan, codes, workers)
    mirrored = {name: out for name, out in outputs.items() if name in held}
    total = finish(codes, mirrored, workers, with_digest=True)
    check_digest(plan, total, set(held))
    rest = {name: out for name, out in outputs.items() if name not in held}
    if rest:
        read_range(readers, plan, rest, workers)
    return codes


def read_rows(
    readers: Sequence[SegmentReader], plan: TablePlan, rows: RowIds, outputs: Mapping[str, Array], workers: Workers
) -> None:
    """Read ``rows`` (sorted, unique) into ``outputs`` (len(rows), width); only chunks that hold one are read."""
    specs = array_specs(plan.schema)
    held = {name: np.empty(out.shape, specs[name].held_dtype) for name, out in outputs.items()}
    codes = TableCodes(plan.schema, 0, len(rows), held)
    replay(readers, plan, codes, workers, rows)
    finish(codes, outputs, workers, with_digest=False)


def rows_since(readers: Sequence[SegmentReader], table: str, schema: TableSchema) -> RowIds:
    """Return the rows of a table whose state the segments behind the first one changed: sorted, unique.

    ``schema`` is the table as it will be; rows beyond its size do not count. A row that a shrinking cut and a growing
    brought back counts too. Reads row ids alone; blocks.
    """
    life = [reader for reader in readers[1:] if _is_life(reader, table, schema)]
    found: list[RowIds] = [np.empty(0, np.int64)]
    for reader in life:
        for part in reader.manifest.parts:
            lists = (part.add, part.set, part.delete, part.escape) if part.table == table else ()
            for row_list in (entry for entry in lists if entry is not None):
                scratch = Scratch()
                found.extend(reader.read_rows(row_list, k, scratch).copy() for k in range(len(row_list.first)))
    if _is_life(readers[0], table, schema) and schema.keys == "dense":
        before = readers[0].manifest.tables[table].num_rows
        least = min((reader.manifest.tables[table].num_rows for reader in life), default=before)
        found.append(np.arange(least, min(before, schema.num_rows), dtype=np.int64))
    rows = np.unique(np.concatenate(found))
    return rows if schema.keys == "hashed" else rows[rows < schema.num_rows]


def _is_life(reader: SegmentReader, table: str, schema: TableSchema) -> bool:
    held = reader.manifest.tables.get(table)
    return held is not None and held.generation == schema.generation


def _clip(plan: TablePlan, start: int, stop: int) -> TablePlan:
    batches = tuple(
        replace(batch, steps=tuple(step for step in batch.steps if step.last >= start and step.first < stop))
        for batch in plan.batches
    )
    return replace(plan, start=start, stop=stop, batches=batches)


def _holds_its_codes(spec: ArraySpec, out: Array) -> bool:
    """Whether the codes fit the output's own memory; the others are held apart, a window at a time."""
    return bool(out.itemsize == spec.held_dtype.itemsize and out.flags.c_contiguous)


def _codes_in(out: Array, spec: ArraySpec) -> Array:
    return out.view(spec.held_dtype)
