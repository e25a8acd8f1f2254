"""Merge a run of segments into one part of the result, exactly, one chunk of the result at a time.

Codes are added as integers or copied, and never decoded to floats and encoded again, so the result decodes to the same
bits as a replay of the run. First the row ids determine the outcome of each row. Then each row list is written, and
each of its chunks is replayed when it is written. Memory: one byte per row of the piece (or 9 per changed row), the
chunks in flight on each thread, and the chunks that several chunks of the result share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cnr_store.encodings.digest import add_digests
from cnr_store.format.manifest import recorded_digest, started_digest
from cnr_store.format.records import OPERATIONS, ListLine, Manifest, Operation, PartLine, TableSchema
from cnr_store.maintenance.compaction.merged_rows import MergedRows, write_merged
from cnr_store.maintenance.compaction.statuses import replay_statuses
from cnr_store.maintenance.compaction.tasks import MergePiece
from cnr_store.read.joined_replay import MergedTogether, merge_together
from cnr_store.read.plan import TablePlan, by_columns, plan_table
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import array_specs
from cnr_store.segment.groups import Blocks, RowList, order_of
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import Shard
from cnr_store.segment.writer import SegmentWriter
from cnr_store.write.encode import stored_shape

CACHE_BYTES = 256 * 1024 * 1024
"""Limit on the cached decoded chunks: usually enough for the chunks of 16 deltas at one place of the table."""

TOGETHER_BYTES = 64 * 1024 * 1024
"""About how many bytes of codes of small tables are merged at once."""

_BASELINE: tuple[Operation, ...] = ("set", "escape")


def merge_pieces(
    readers: Sequence[SegmentReader], run: tuple[int, int], pieces: Sequence[MergePiece], out: SegmentWriter,
    workers: Workers,
) -> tuple[PartLine, ...]:  # fmt: skip
    """Write parts of what the run merges to, as `merge_piece` does each, and return them in order. Blocks.

    Small tables are merged together. Memory: as `merge_piece`; of a baseline about `TOGETHER_BYTES`, of a delta what
    the pieces merge to, and 24 bytes for each row of the run.
    """
    start, stop = run
    manifests = [reader.manifest for reader in readers[:stop]]
    schemas = manifests[-1].tables
    parts: list[PartLine] = []
    for some in _at_once(pieces, schemas) if start == 0 else [pieces]:
        whole = [one.table for one in some if Shard(one.table, one.rectangle).is_whole(schemas[one.table])]
        together = merge_together(readers[:stop], start, whole, workers)
        for piece in some:
            merged = together.get(piece.table)
            if merged is None:
                parts.append(merge_piece(readers, run, piece, out, workers))
                continue
            line = out.write_row_list(merged.operation, _list_of(merged))
            parts.append(_part_of(manifests, start, piece, {merged.operation: line}, merged.digest))
    return tuple(parts)


def _at_once(pieces: Sequence[MergePiece], schemas: Mapping[str, TableSchema]) -> Iterator[list[MergePiece]]:
    """Yield the pieces of a baseline, so many at once that their codes take about `TOGETHER_BYTES`."""
    some: list[MergePiece] = []
    size = 0
    for piece in pieces:
        schema = schemas[piece.table]
        some.append(piece)
        size += schema.num_rows * sum(4 * spec.width for spec in array_specs(schema).values())
        if size >= TOGETHER_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _list_of(merged: MergedTogether) -> RowList:
    """Return the row list to write."""
    stored = {name: stored_shape(merged.specs[name], array) for name, array in merged.codes.items()}

    def produce(start: int, stop: int) -> Blocks:
        rows = np.arange(start, stop, dtype=np.int64) if merged.rows is None else merged.rows[start:stop]
        return {"rows": rows, **{name: array[start:stop] for name, array in stored.items()}}

    kinds = {name: (array.dtype, None if array.ndim == 1 else array.shape[1]) for name, array in stored.items()}
    order = order_of(merged.operation, merged.specs, {name: array.dtype for name, array in stored.items()})
    widths = {"rows": (np.dtype(np.int64), None), **kinds}
    return RowList(len(stored["codes"]), widths, produce, order, is_fixed=True)


def merge_piece(
    readers: Sequence[SegmentReader],
    run: tuple[int, int],
    piece: MergePiece,
    out: SegmentWriter,
    workers: Workers,
) -> PartLine:
    """Write one part of what the run merges to, and return it. Blocks.

    Parameters
    ----------
    readers
        The chain's segments up to the end of the run, the baseline first. Segments before the run are needed for their
        manifests only.
    run
        The segments [start, stop) to merge. With start 0 the result is part of a baseline, else of a delta.
    piece
        Its columns are inside one stored interval of the table (baseline), or equal those of the run's parts (delta).
    out
        Writes the part's objects; a part without rows has none.

    Returns
    -------
    PartLine
        Its state digest is recomputed from the codes (baseline), or copied from the run's last segment (delta).

    Raises
    ------
    ValueError
        The piece's columns do not satisfy the condition above.
    CorruptStore, CorruptObject, MissingObject
        The objects written so far belong to no segment.
    """
    start, stop = run
    manifests = [reader.manifest for reader in readers[:stop]]
    schema = manifests[-1].tables[piece.table]
    lists: dict[str, ListLine] = {}
    found = 0
    if schema.keys == "hashed" or piece.rectangle.num_rows:
        plan = _plan(manifests, start, piece)
        before = _rows_before(manifests, start, plan)
        statuses = replay_statuses(readers, plan, before, workers)
        for operation in _BASELINE if before is None else OPERATIONS:
            rows = MergedRows(readers, plan, operation, statuses, is_delta=start > 0)
            if rows.count:
                lists[operation], added = write_merged(out, rows, CACHE_BYTES)
                found = add_digests(found, added)
    return _part_of(manifests, start, piece, lists, found)


def _part_of(
    manifests: Sequence[Manifest], start: int, piece: MergePiece, lists: Mapping[str, ListLine], found: int
) -> PartLine:
    """Return a part with its row lists and state digests; ``found``: that of a baseline's codes."""
    base, state = None, None
    if array_specs(manifests[-1].tables[piece.table]).are_additive:
        base = _base_digest(manifests, start, piece) if start > 0 else None
        recorded = recorded_digest(manifests[-1].parts_of.get(piece.table, ()), piece.rectangle)
        state = _hex(recorded if start > 0 else found)
    return PartLine(
        table=piece.table, rows=piece.rectangle.rows, columns=piece.rectangle.columns, base_digest=base,
        state_digest=state, **lists,
    )  # fmt: skip


def _plan(manifests: Sequence[Manifest], start: int, piece: MergePiece) -> TablePlan:
    """Return the read plan of the piece in the run; its segment numbers are positions in the chain."""
    first, stop = piece.rectangle.rows
    plan = _counted_from(
        start, plan_table(manifests[start:], piece.table, first, stop, columns=piece.rectangle.columns)
    )
    cuts = {step.part.columns for batch in plan.batches for step in batch.steps}
    lacks_row_slots = plan.row_slots and not plan.has_own_row_slots
    if len(by_columns(plan)) > 1 or lacks_row_slots or (start > 0 and cuts - {piece.rectangle.columns}):
        raise ValueError(
            f"columns {piece.rectangle.columns} of table {piece.table!r} cannot be merged as one piece: the run has "
            f"parts of columns {sorted(cuts)}"
        )
    return plan


def _counted_from(start: int, plan: TablePlan) -> TablePlan:
    batches = (
        replace(
            batch,
            segment=start + batch.segment,
            steps=tuple(replace(step, segment=start + step.segment) for step in batch.steps),
        )
        for batch in plan.batches
    )
    return replace(plan, batches=tuple(batches))


def _rows_before(manifests: Sequence[Manifest], start: int, plan: TablePlan) -> int | None:
    """Return the table's number of rows before the run; None if its generation begins inside the run."""
    held = manifests[start - 1].tables.get(plan.table) if start > 0 else None
    if held is None or held.generation != plan.schema.generation:
        return None
    return held.num_rows


def _base_digest(manifests: Sequence[Manifest], start: int, piece: MergePiece) -> str | None:
    """Return the base digest of a piece of a run of deltas, from the run's first segment; None if unknown.

    It is known only if generation, scale and number of rows do not change over the run, and the rectangle has rows: at
    the end of a resized table, a base contains all earlier rows (spec, CNR-DOC-10).
    """
    before, first, last = (manifests[at].tables.get(piece.table) for at in (start - 1, start, -1))
    if before is None or first is None or last is None or (last.keys == "dense" and not piece.rectangle.num_rows):
        return None
    if (before.generation, first.shift, first.num_rows) != (last.generation, last.shift, last.num_rows):
        return None
    return _hex(started_digest(manifests[start].parts_of.get(piece.table, ()), piece.rectangle))


def _hex(found: int | None) -> str | None:
    return None if found is None else f"{found:016x}"
