"""Divide a compaction's result into pieces, and these into tasks of one writer each. Pure.

The plan depends on manifests alone, so every process plans the same tasks for the same run. A killed compaction can
therefore be resumed, and threads, processes and machines write the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cnr_store.encodings.packing import packed_width
from cnr_store.errors import CorruptStore
from cnr_store.format.arrays import chunk_rows_for
from cnr_store.format.documents import canonical_json, sha256
from cnr_store.format.limits import CHUNK_BYTES
from cnr_store.format.manifest import recorded_digest
from cnr_store.format.records import OPERATIONS, ChainEntry, Manifest, PartEntry, PartPlace, TableSchema
from cnr_store.maintenance.compaction.plan import Run
from cnr_store.read.plan import is_sparse, plan_table, stored_rows
from cnr_store.segment.codes import array_specs
from cnr_store.segment.shards import whole_of
from cnr_store.types import Affine, Rectangle

PIECE_BYTES = 64 * CHUNK_BYTES
"""Most bytes of codes in a task and a piece: few enough to distribute and repeat, enough to amortize a task.

Bytes, not chunks: hundreds of small tables share one, and each task has chunks and objects of its own for them.
"""


@dataclass(frozen=True, slots=True)
class MergePiece:
    """One part of the result: a rectangle of a table; for a hashed table the whole table."""

    table: str
    rectangle: Rectangle


@dataclass(frozen=True, slots=True)
class CompactionTask:
    """The pieces that one worker writes under one writer's name, with one receipt; ``index`` is that writer's rank.

    ``size_bytes``: of codes, in the result or in what is merged; a measure of the work, so no part of the plan's
    digest.
    """

    index: int
    pieces: tuple[MergePiece, ...]
    size_bytes: int


def compactable_run(manifests: Sequence[Manifest], run: Run) -> Run:
    """Return the run, or the run to compact instead if its segments do not fit into one delta. Pure.

    A delta holds differences, and a row may have changed in some columns only. So parts that are cut at different
    columns do not fit into one delta, nor do parts that do not cover the whole table. Then the longest range of the
    run without such a change is returned. If that has only one segment, the result is everything from the baseline to
    the end of the run.

    Parameters
    ----------
    manifests
        The manifests of the chain, at least to the end of the run.
    """
    if run.kind == "baseline" or _is_one_delta(manifests, run.start, run.stop):
        return run
    stretches: list[tuple[int, int]] = []
    start = run.start
    while start < run.stop:
        stop = start + 1
        while stop < run.stop and _is_one_delta(manifests, start, stop + 1):
            stop += 1
        stretches.append((start, stop))
        start = stop
    start, stop = max(stretches, key=lambda stretch: (stretch[1] - stretch[0], -stretch[0]))
    if stop - start >= 2:
        return Run(start, stop, "delta", f"{run.reason}; limited to segments with the same column cuts")
    return Run(0, run.stop, "baseline", f"{run.reason}; the column cuts of the tables change at each segment")


def plan_tasks(manifests: Sequence[Manifest], run: Run) -> tuple[CompactionTask, ...]:
    """Return the tasks of a compaction: every part that the result states once, in a fixed order. Pure.

    A new baseline is cut where its chunks end, and where parts of the run's last segment end. So its state digests can
    be compared with that segment's, and the rows of a rank are whole parts. A new delta has the parts of the run's last
    segment, and their state digests.

    Parameters
    ----------
    manifests
        The manifests of the chain, at least to the end of the run.
    """
    upto = manifests[: run.stop]
    weighed: list[tuple[MergePiece, int]] = []
    touched = {table for manifest in upto[run.start :] for table in manifest.recorded}
    for table in sorted(touched & upto[-1].tables.keys()):
        weighed += _baseline_pieces(upto, table) if run.kind == "baseline" else _delta_pieces(upto[run.start :], table)
    dealt: list[list[tuple[MergePiece, int]]] = []
    room = 0
    for piece, size in weighed:
        if not dealt or size > room:
            dealt.append([])
            room = PIECE_BYTES
        dealt[-1].append((piece, size))
        room -= size
    return tuple(
        CompactionTask(index, tuple(piece for piece, _ in held), sum(size for _, size in held))
        for index, held in enumerate(dealt)
    )


def plan_digest(entries: Sequence[ChainEntry], tasks: Sequence[CompactionTask]) -> str:
    """Return the sha256 of a plan. Pure. Equal plans, with equal libraries, write the same bytes."""
    pieces = [[[piece.table, piece.rectangle.rows, piece.rectangle.columns] for piece in task.pieces] for task in tasks]
    inputs = [[entry.seg, entry.sha256] for entry in entries]
    return sha256(canonical_json({"inputs": inputs, "tasks": pieces}))


def check_pieces(task: CompactionTask, parts: Sequence[PartPlace]) -> None:
    """Check that the parts are the task's pieces. Pure.

    Raises
    ------
    CorruptStore
    """
    wanted = [(piece.table, piece.rectangle) for piece in task.pieces]
    found = [(part.table, Rectangle(part.rows, part.columns)) for part in parts]
    if found != wanted:
        raise CorruptStore(
            f"task {task.index} of a compaction has parts {found[:3]}, expected {wanted[:3]}",
            expected=len(wanted), found=len(found),
        )  # fmt: skip


def check_states(parts: Sequence[PartPlace], last: Manifest) -> None:
    """Check a new baseline's state digests against those of the run's last segment, part by part. Pure.

    Raises
    ------
    CorruptStore
        They differ: a delta is wrong or missing.
    """
    made: dict[str, list[PartPlace]] = {}
    for part in parts:
        made.setdefault(part.table, []).append(part)
    for end in last.parts:
        place = Rectangle(end.rows, end.columns)
        is_hashed = last.tables[end.table].keys == "hashed"  # then the parts of all writers are one in the result
        ends = last.parts_of[end.table] if is_hashed else (end,)
        expected = recorded_digest(ends, place) if is_hashed or end.rows[0] < end.rows[1] else None
        if expected is None:
            continue
        found = recorded_digest(made.get(end.table, []), place)
        if found != expected:
            shown = "no state digest" if found is None else f"state digest {found:016x}"
            raise CorruptStore(
                f"table {end.table!r}, rows {end.rows}, columns {end.columns} merges to {shown}, but the run's last "
                f"segment records {expected:016x}; a delta is wrong or missing, run `cnr verify --deep`",
                table=end.table, expected=f"{expected:016x}", found=shown,
            )  # fmt: skip


def _is_one_delta(manifests: Sequence[Manifest], start: int, stop: int) -> bool:
    """Return whether the parts and table generations of the segments [start, stop) fit into one delta."""
    last = manifests[stop - 1]
    for table, schema in last.tables.items():
        begin = stop - 1
        while begin > start and _continues(manifests[begin - 1], table, schema):
            begin -= 1
        if begin > start and _continues(manifests[start - 1], table, schema):
            return False  # a later generation with the number of the one before the run would be confused with it
        areas = (Rectangle(part.rows, part.columns).area for part in last.parts_of.get(table, ()))
        if schema.keys == "dense" and sum(areas) != schema.num_rows * schema.dim:
            return False  # a delta has the parts of its last segment: rows outside of them would be lost
        ranges = sorted({one for manifest in manifests[begin:stop] for one in _column_ranges(manifest, table)})
        if any(right[0] < left[1] for left, right in pairwise(ranges)):
            return False  # the column cuts differ between segments, or between row ranges
    return True


def _continues(before: Manifest, table: str, schema: TableSchema) -> bool:
    held = before.tables.get(table)
    return held is not None and held.generation == schema.generation


def _column_ranges(manifest: Manifest, table: str) -> set[tuple[int, int]]:
    return {part.columns for part in manifest.parts_of.get(table, ()) if part.rows[0] < part.rows[1]}


def _baseline_pieces(manifests: Sequence[Manifest], table: str) -> Iterator[tuple[MergePiece, int]]:
    """Yield the parts of a table in a new baseline with their bytes, by column interval and rows."""
    last = manifests[-1]
    schema = last.tables[table]
    if schema.keys == "hashed" or schema.num_rows == 0:
        yield MergePiece(table, whole_of(schema)), _bytes_of(manifests, table)
        return
    ends = last.parts_of.get(table, ())
    plan = plan_table(manifests, table)
    # Rows in no chunk cost nothing, so a piece of a sparse table may have more rows, in proportion.
    times = schema.num_rows // max(1, stored_rows(plan)) if is_sparse(plan) else 1
    for columns in plan.stored:
        beside = [part for part in ends if part.columns[0] < columns[1] and columns[0] < part.columns[1]]
        cuts = sorted({0, schema.num_rows, *(row for part in beside for row in part.rows)})
        for start, stop in pairwise(cuts):
            yield from _row_pieces(table, schema, columns, (start, stop), times)


def _row_pieces(
    table: str, schema: TableSchema, columns: tuple[int, int], rows: tuple[int, int], times: int
) -> Iterator[tuple[MergePiece, int]]:
    """Yield the rows in pieces of similar size, cut at the chunk ends of a part of all these rows.

    ``times``: number of rows per stored row.
    """
    start, stop = rows
    row_bytes = _code_row_bytes(schema, columns)
    chunk_rows = times * chunk_rows_for(stop - start, row_bytes)
    chunks = -(-(stop - start) // chunk_rows)
    chunks_each = -(-chunks // -(-chunks // max(1, PIECE_BYTES // CHUNK_BYTES)))
    for low in range(start, stop, chunks_each * chunk_rows):
        high = min(low + chunks_each * chunk_rows, stop)
        yield MergePiece(table, Rectangle((low, high), columns)), -(-(high - low) // times) * row_bytes


def _delta_pieces(manifests: Sequence[Manifest], table: str) -> Iterator[tuple[MergePiece, int]]:
    """Yield the parts of a table in a new delta, with the bytes that are merged for each."""
    last = manifests[-1]
    schema = last.tables[table]
    if schema.keys == "hashed":
        yield MergePiece(table, whole_of(schema)), _bytes_of(manifests, table)
        return
    rectangles = [Rectangle(part.rows, part.columns) for part in last.parts_of.get(table, ())]
    for rectangle in dict.fromkeys(rectangles):
        yield MergePiece(table, rectangle), _bytes_of(manifests, table, rectangle)


def _bytes_of(manifests: Sequence[Manifest], table: str, rectangle: Rectangle | None = None) -> int:
    """Return the bytes of codes that the row lists of a table have, as if each had all columns of the table."""
    lists = (
        getattr(part, operation)
        for manifest in manifests
        for part in manifest.parts_of.get(table, ())
        if rectangle is None or _meets(part, rectangle)
        for operation in OPERATIONS
    )
    schema = manifests[-1].tables[table]
    rows: int = sum(row_list.count for row_list in lists if row_list is not None)
    return rows * _code_row_bytes(schema, (0, schema.dim))


def _meets(part: PartEntry, rectangle: Rectangle) -> bool:
    (first, stop), (left, right) = rectangle.rows, rectangle.columns
    return part.rows[0] < stop and first < part.rows[1] and part.columns[0] < right and left < part.columns[1]


def _code_row_bytes(schema: TableSchema, columns: tuple[int, int]) -> int:
    """Return the stored bytes of a row's codes, if they have their usual width."""
    spec = array_specs(schema, columns)["codes"]
    if isinstance(spec.encoding, Affine):
        return packed_width(spec.width, spec.encoding.bits)
    return spec.mirror_dtype.itemsize * spec.width if spec.is_integer else spec.memory_dtype.itemsize * spec.width
