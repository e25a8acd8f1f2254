"""What compaction's workers do: the pieces of the result, dealt out to tasks that write one folder each. Pure.

Everything here follows from manifests alone, so whoever plans the same run plans the same tasks: a compaction that was
killed is taken up where it was, and threads, processes and machines write the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cnr_store.encodings.packing import packed_width
from cnr_store.errors import CorruptStore
from cnr_store.format.arrays import chunk_rows_for
from cnr_store.format.documents import canonical_json, sha256
from cnr_store.format.manifest import stated_digest
from cnr_store.format.records import OPERATIONS, ChainEntry, Manifest, PartEntry, PartPlace, TableSchema
from cnr_store.maintenance.compaction.plan import Run
from cnr_store.read.plan import is_sparse, plan_table, stored_rows
from cnr_store.segment.codes import array_specs
from cnr_store.segment.shards import whole_of
from cnr_store.types import Affine, Rectangle

PIECE_CHUNKS = 64
"""Most chunks of codes in a piece, near 8 MiB each: small enough to share out and to do again, large enough to pay."""


@dataclass(frozen=True, slots=True)
class MergePiece:
    """One part of the result: a rectangle of a table. Of a hashed table it is the whole table."""

    table: str
    rectangle: Rectangle


@dataclass(frozen=True, slots=True)
class CompactionTask:
    """Pieces that one worker compacts into one folder with one receipt; ``index`` is the task's rank in the segment."""

    index: int
    pieces: tuple[MergePiece, ...]


def compactable_run(manifests: Sequence[Manifest], run: Run) -> Run:
    """Return the run, or what can be compacted in its place where a table's columns are cut anew within it. Pure.

    A delta holds differences, and a row may have changed in some of its columns only: parts that are cut at other
    columns cannot be put into one delta. Then the longest stretch between two such changes is merged, or, if there is
    none of two segments, everything from the baseline to the end of the run, whose rows are whole. The same where the
    parts of a segment do not make a table up.

    Parameters
    ----------
    manifests
        Those of the chain, to the end of the run at least.
    """
    if run.kind == "baseline":
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
    if (start, stop) == (run.start, run.stop):
        return run
    if stop - start >= 2:
        return Run(start, stop, "delta", f"{run.reason}, as far as the tables' columns are cut alike")
    return Run(0, run.stop, "baseline", f"{run.reason}, and the tables' columns are cut anew at each")


def plan_tasks(manifests: Sequence[Manifest], run: Run) -> tuple[CompactionTask, ...]:
    """Return what is to be compacted, by whom: every part that the result states once, in an order of its own. Pure.

    A new baseline is cut where its chunks end, and also where parts of the run's last segment end, so that the state
    digests which that segment states can be compared, and a rank's rows are whole parts. A new delta has the parts of
    the run's last segment: what they state of the state behind them holds for it too.

    Parameters
    ----------
    manifests
        Those of the chain, to the end of the run at least.
    """
    upto = manifests[: run.stop]
    weighed: list[tuple[MergePiece, int]] = []
    touched = {table for manifest in upto[run.start :] for table in manifest.stated}
    for table in sorted(touched & upto[-1].tables.keys()):
        weighed += _baseline_pieces(upto, table) if run.kind == "baseline" else _delta_pieces(upto[run.start :], table)
    dealt: list[list[MergePiece]] = []
    room = 0
    for piece, chunks in weighed:
        if not dealt or chunks > room:
            dealt.append([])
            room = PIECE_CHUNKS
        dealt[-1].append(piece)
        room -= chunks
    return tuple(CompactionTask(index, tuple(pieces)) for index, pieces in enumerate(dealt))


def plan_digest(entries: Sequence[ChainEntry], tasks: Sequence[CompactionTask]) -> str:
    """Return the sha256 of a plan: two compactions of one digest, by the same libraries, write the same bytes. Pure."""
    pieces = [[[piece.table, piece.rectangle.rows, piece.rectangle.columns] for piece in task.pieces] for task in tasks]
    inputs = [[entry.seg, entry.sha256] for entry in entries]
    return sha256(canonical_json({"inputs": inputs, "tasks": pieces}))


def check_pieces(task: CompactionTask, parts: Sequence[PartPlace]) -> None:
    """Refuse parts that are not the task's pieces. Pure.

    Raises
    ------
    CorruptStore
    """
    wanted = [(piece.table, piece.rectangle) for piece in task.pieces]
    found = [(part.table, Rectangle(part.rows, part.columns)) for part in parts]
    if found != wanted:
        raise CorruptStore(
            f"task {task.index} of a compaction has parts {found[:3]}, its plan has {wanted[:3]}",
            expected=len(wanted), found=len(found),
        )  # fmt: skip


def check_states(parts: Sequence[PartPlace], last: Manifest) -> None:
    """Refuse a new baseline whose state is not the one that the run's last segment states, part by part. Pure.

    Raises
    ------
    CorruptStore
        The run does not lead to the state that its last writer had: a delta is wrong or missing.
    """
    made: dict[str, list[PartPlace]] = {}
    for part in parts:
        made.setdefault(part.table, []).append(part)
    for end in last.parts:
        if end.state_digest is None or end.rows[0] == end.rows[1]:
            continue
        found = stated_digest(made.get(end.table, []), Rectangle(end.rows, end.columns))
        if found is None or found != int(end.state_digest, 16):
            shown = "no state digest" if found is None else f"state digest {found:016x}"
            raise CorruptStore(
                f"table {end.table!r}, rows {end.rows} and columns {end.columns}, merges to {shown}, the run's last "
                f"segment states {end.state_digest}; a delta is wrong or missing, run `cnr verify --deep`",
                table=end.table, expected=end.state_digest, found=shown,
            )  # fmt: skip


def _is_one_delta(manifests: Sequence[Manifest], start: int, stop: int) -> bool:
    """Whether the segments [start, stop) can be one delta: by their parts, and by the lives of the tables."""
    last = manifests[stop - 1]
    for table, schema in last.tables.items():
        begin = stop - 1
        while begin > start and _continues(manifests[begin - 1], table, schema):
            begin -= 1
        if begin > start and _continues(manifests[start - 1], table, schema):
            return False  # a later life that looks like the one before the run would be taken for it
        areas = (Rectangle(part.rows, part.columns).area for part in last.parts_of.get(table, ()))
        if schema.keys == "dense" and sum(areas) != schema.num_rows * schema.dim:
            return False  # a delta has the parts of its last segment: what lies outside of them would be lost
        ranges = sorted({one for manifest in manifests[begin:stop] for one in _column_ranges(manifest, table)})
        if any(right[0] < left[1] for left, right in pairwise(ranges)):
            return False  # cut at other columns from segment to segment, or from rows to rows
    return True


def _continues(before: Manifest, table: str, schema: TableSchema) -> bool:
    held = before.tables.get(table)
    return held is not None and held.generation == schema.generation


def _column_ranges(manifest: Manifest, table: str) -> set[tuple[int, int]]:
    return {part.columns for part in manifest.parts_of.get(table, ()) if part.rows[0] < part.rows[1]}


def _baseline_pieces(manifests: Sequence[Manifest], table: str) -> Iterator[tuple[MergePiece, int]]:
    """The parts of a table in a new baseline and their chunks, by column interval and rows."""
    last = manifests[-1]
    schema = last.tables[table]
    if schema.keys == "hashed" or schema.num_rows == 0:
        yield MergePiece(table, whole_of(schema)), sum(_chunks_of(manifest, table) for manifest in manifests)
        return
    ends = last.parts_of.get(table, ())
    plan = plan_table(manifests, table)
    # Rows that are in no chunk cost nothing, so a piece of a table that has few others may be as much longer.
    times = schema.num_rows // max(1, stored_rows(plan)) if is_sparse(plan) else 1
    for columns in plan.stored:
        beside = [part for part in ends if part.columns[0] < columns[1] and columns[0] < part.columns[1]]
        cuts = sorted({0, schema.num_rows, *(row for part in beside for row in part.rows)})
        for start, stop in pairwise(cuts):
            yield from _row_pieces(table, schema, columns, (start, stop), times)


def _row_pieces(
    table: str, schema: TableSchema, columns: tuple[int, int], rows: tuple[int, int], times: int
) -> Iterator[tuple[MergePiece, int]]:
    """The rows in pieces of about the same size, cut where a part of all these rows would have chunks end.

    ``times``: how many rows there are to one that is stored.
    """
    start, stop = rows
    chunk_rows = times * chunk_rows_for(stop - start, _code_row_bytes(schema, columns))
    chunks = -(-(stop - start) // chunk_rows)
    chunks_each = -(-chunks // -(-chunks // PIECE_CHUNKS))
    for low in range(start, stop, chunks_each * chunk_rows):
        high = min(low + chunks_each * chunk_rows, stop)
        yield MergePiece(table, Rectangle((low, high), columns)), -(-(high - low) // chunk_rows)


def _delta_pieces(manifests: Sequence[Manifest], table: str) -> Iterator[tuple[MergePiece, int]]:
    """The parts of a table in a new delta and, as a measure of the work, the chunks that are read for them."""
    last = manifests[-1]
    schema = last.tables[table]
    if schema.keys == "hashed":
        yield MergePiece(table, whole_of(schema)), sum(_chunks_of(manifest, table) for manifest in manifests)
        return
    rectangles = [Rectangle(part.rows, part.columns) for part in last.parts_of.get(table, ())]
    for rectangle in dict.fromkeys(rectangles):
        yield MergePiece(table, rectangle), sum(_chunks_of(manifest, table, rectangle) for manifest in manifests)


def _chunks_of(manifest: Manifest, table: str, rectangle: Rectangle | None = None) -> int:
    lists = (
        getattr(part, operation)
        for part in manifest.parts_of.get(table, ())
        if rectangle is None or _meets(part, rectangle)
        for operation in OPERATIONS
    )
    return sum(len(row_list.first) for row_list in lists if row_list is not None)


def _meets(part: PartEntry, rectangle: Rectangle) -> bool:
    (first, stop), (left, right) = rectangle.rows, rectangle.columns
    return part.rows[0] < stop and first < part.rows[1] and part.columns[0] < right and left < part.columns[1]


def _code_row_bytes(schema: TableSchema, columns: tuple[int, int]) -> int:
    """Bytes of a row's codes as they are stored, if they fit their usual width."""
    spec = array_specs(schema, columns)["codes"]
    if isinstance(spec.encoding, Affine):
        return packed_width(spec.width, spec.encoding.bits)
    return spec.mirror_dtype.itemsize * spec.width if spec.is_integer else spec.held_dtype.itemsize * spec.width
