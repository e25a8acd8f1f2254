"""Which worker compacts what: planned from manifests only, so every planner gets the same tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from cnr_store.errors import CorruptStore
from cnr_store.format.arrays import CHUNK_BYTES
from cnr_store.format.records import ArrayEntry, ChainEntry, Manifest, PartEntry, RowListEntry, TableSchema
from cnr_store.maintenance.compaction import tasks as planning
from cnr_store.maintenance.compaction.plan import Run
from cnr_store.maintenance.compaction.tasks import (
    PIECE_BYTES,
    CompactionTask,
    MergePiece,
    check_pieces,
    check_states,
    compactable_run,
    plan_digest,
    plan_tasks,
)
from cnr_store.segment.shards import check_placements
from cnr_store.types import Affine, Lattice, Raw, Rectangle

PIECE_CHUNKS = PIECE_BYTES // CHUNK_BYTES
Tile = tuple[tuple[int, int], tuple[int, int]]


def schema_of(
    num_rows: int, dim: int, *, keys: Any = "dense", encoding: Any = None, generation: int = 1
) -> TableSchema:
    return TableSchema(
        num_rows=num_rows, dim=dim, dtype="float32", keys=keys, encoding=encoding or Lattice(0.1), generation=generation
    )


def row_list(chunks: int) -> RowListEntry:
    array = ArrayEntry(path="x", dtype="int64", shape=(chunks,), chunk_rows=1, codec="bytes", start=0, count=chunks)
    return RowListEntry(
        count=chunks, first=tuple(range(chunks)), last=tuple(range(chunks)), group={"rows": array}, start=0
    )


def part_of(table: str, tile: Tile, digest: int | None = None, *, chunks: int = 0) -> PartEntry:
    return PartEntry(
        table=table, rows=tile[0], columns=tile[1],
        state_digest=None if digest is None else f"{digest:016x}", add=row_list(chunks) if chunks else None,
    )  # fmt: skip


def manifest_of(index: int, tables: dict[str, TableSchema], parts: Sequence[PartEntry]) -> Manifest:
    return Manifest(
        format=1, txn="0" * 32, base=0, kind="delta" if index else "baseline", l0=index,
        l1=index + 1, step=index, tables=tables, recorded=tuple(tables), parts=tuple(parts), objects=(),
    )  # fmt: skip


def chain_of(tables: dict[str, TableSchema], *cuttings: dict[str, list[Tile]]) -> list[Manifest]:
    """A baseline of all rows and empty deltas of the same tables, each cut differently."""
    chain = []
    for index, cutting in enumerate(cuttings):
        parts = [part_of(table, tile) for table, tiles in cutting.items() for tile in tiles]
        chain.append(manifest_of(index, tables, parts if index else [full(part) for part in parts]))
    return chain


def full(part: PartEntry) -> PartEntry:
    """The part with all of its rows set, in one chunk."""
    start, stop = part.rows
    if start == stop:
        return part
    array = ArrayEntry(
        path="x",
        dtype="int64",
        shape=(stop - start,),
        chunk_rows=stop - start,
        codec="bytes",
        start=0,
        count=stop - start,
    )
    rows = RowListEntry(count=stop - start, first=(start,), last=(stop - 1,), group={"rows": array}, start=0)
    return msgspec.structs.replace(part, set=rows)


def everything(manifests: Sequence[Manifest]) -> Run:
    return Run(0, len(manifests), "baseline", "asked for")


def pieces_of(tasks: Sequence[CompactionTask]) -> dict[str, list[Rectangle]]:
    pieces: dict[str, list[Rectangle]] = {}
    for piece in (piece for task in tasks for piece in task.pieces):
        pieces.setdefault(piece.table, []).append(piece.rectangle)
    return pieces


def whole(num_rows: int, dim: int) -> list[Tile]:
    return [((0, num_rows), (0, dim))]


def test_small_tables_share_a_task_however_many_they_are() -> None:
    """With a chunk each for their measure, 300 tables had 5 tasks in a baseline and 47 in a delta of ten."""
    names = sorted(f"table {k}" for k in range(300))
    tables = {name: schema_of(10, 4) for name in names}
    parts = [part_of(name, ((0, 10), (0, 4)), chunks=2) for name in names]
    first = chain_of(tables, {name: whole(10, 4) for name in names})
    manifests = [*first, *(manifest_of(index, tables, parts) for index in (1, 2))]
    pieces = tuple(MergePiece(name, Rectangle((0, 10), (0, 4))) for name in names)

    assert plan_tasks(manifests, everything(manifests)) == (CompactionTask(0, pieces, 300 * 10 * 4 * 2),)
    assert plan_tasks(manifests, Run(1, 3, "delta", "")) == (CompactionTask(0, pieces, 300 * 2 * 2 * 4 * 2),)


def test_a_large_table_is_cut_at_chunks_into_pieces_of_about_the_same_size() -> None:
    rows_per_chunk = CHUNK_BYTES // (2 * 128)
    num_rows = rows_per_chunk * (3 * PIECE_CHUNKS + 2)
    tables = {"t": schema_of(num_rows, 128)}
    manifests = chain_of(tables, {"t": whole(num_rows, 128)}, {"t": whole(num_rows, 128)})

    tasks = plan_tasks(manifests, everything(manifests))

    pieces = pieces_of(tasks)["t"]
    assert len(tasks) == len(pieces) == 4
    assert [piece.rows[1] % rows_per_chunk for piece in pieces] == [0] * 4
    sizes = [piece.num_rows // rows_per_chunk for piece in pieces]
    assert sum(sizes) == 3 * PIECE_CHUNKS + 2
    assert max(sizes) <= PIECE_CHUNKS
    assert max(sizes) - min(sizes) <= 3


@pytest.mark.parametrize(
    ("encoding", "row_bytes"), [(Lattice(0.1), 32), (Raw(), 64), (Affine(bits=4), 8)], ids=["lattice", "raw", "affine"]
)
def test_pieces_are_measured_by_the_codes_as_they_are_stored(encoding: Any, row_bytes: int) -> None:
    num_rows = 40_000_000
    tables = {"t": schema_of(num_rows, 16, encoding=encoding)}
    manifests = chain_of(tables, {"t": whole(num_rows, 16)}, {"t": whole(num_rows, 16)})

    tasks = plan_tasks(manifests, everything(manifests))

    chunks = -(-num_rows // min(1 << 20, CHUNK_BYTES // row_bytes))
    assert len(tasks) == -(-chunks // PIECE_CHUNKS)


def test_a_new_baseline_is_cut_where_the_last_writers_shards_ended() -> None:
    tables = {"t": schema_of(100, 4)}
    shards: list[Tile] = [((0, 30), (0, 4)), ((30, 30), (0, 4)), ((30, 100), (0, 4))]
    manifests = chain_of(tables, {"t": whole(100, 4)}, {"t": [((0, 55), (0, 4)), ((55, 100), (0, 4))]}, {"t": shards})

    pieces = pieces_of(plan_tasks(manifests, everything(manifests)))["t"]

    assert pieces == [Rectangle((0, 30), (0, 4)), Rectangle((30, 100), (0, 4))]


def test_a_new_baseline_has_the_columns_of_all_cuts_of_its_life() -> None:
    tables = {"t": schema_of(10, 6)}
    manifests = chain_of(
        tables,
        {"t": whole(10, 6)},
        {"t": [((0, 10), (0, 2)), ((0, 10), (2, 6))]},
        {"t": [((0, 4), (0, 3)), ((0, 10), (3, 6)), ((4, 10), (0, 3))]},
    )

    pieces = pieces_of(plan_tasks(manifests, everything(manifests)))["t"]

    columns = [(0, 2), (2, 3)]
    cut = [Rectangle(rows, one) for one in columns for rows in ((0, 4), (4, 10))]
    assert pieces == [*cut, Rectangle((0, 10), (3, 6))]
    check_placements([{"t": pieces}])


def test_a_new_delta_has_the_parts_of_the_runs_last_segment() -> None:
    tables = {"t": schema_of(100, 4)}
    shards: list[Tile] = [((0, 30), (0, 4)), ((30, 30), (0, 4)), ((30, 30), (0, 4)), ((30, 100), (0, 4))]
    manifests = chain_of(tables, {"t": whole(100, 4)}, {"t": whole(100, 4)}, {"t": shards}, {"t": whole(100, 4)})

    pieces = pieces_of(plan_tasks(manifests, Run(1, 3, "delta", "")))["t"]

    assert pieces == [Rectangle(*tile) for tile in dict.fromkeys(shards)]


def test_large_parts_of_a_delta_get_tasks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = 4 * 2
    monkeypatch.setattr(planning, "PIECE_BYTES", 64 * row_bytes)
    tables = {"t": schema_of(100, 4), "u": schema_of(100, 4)}
    shards: list[Tile] = [((0, 30), (0, 4)), ((30, 100), (0, 4))]
    large = [part_of("t", tile, chunks=32) for tile in shards]
    manifests = [
        *chain_of(tables, {"t": whole(100, 4), "u": whole(100, 4)}),
        manifest_of(1, tables, [*large, part_of("u", shards[0], chunks=1)]),
        manifest_of(2, tables, [*large, *(part_of("u", tile, chunks=1) for tile in shards)]),
    ]

    tasks = plan_tasks(manifests, Run(1, 3, "delta", ""))

    assert [[piece.table for piece in task.pieces] for task in tasks] == [["t"], ["t"], ["u", "u"]]


def test_hashed_tables_and_tables_without_rows_are_one_piece() -> None:
    tables = {"h": schema_of(0, 4, keys="hashed"), "e": schema_of(0, 3)}
    parts: list[Tile] = [((0, 0), (0, 4))]
    empty: list[Tile] = [((0, 0), (0, 3))]
    manifests = chain_of(tables, {"h": parts, "e": empty}, {"h": parts, "e": empty}, {"h": parts, "e": empty})

    for run in (everything(manifests), Run(1, 3, "delta", "")):
        assert pieces_of(plan_tasks(manifests, run)) == {
            "h": [Rectangle((0, 0), (0, 4))], "e": [Rectangle((0, 0), (0, 3))]
        }  # fmt: skip


def test_tables_that_are_gone_at_the_end_of_the_run_are_not_compacted() -> None:
    tables = {"a": schema_of(10, 4), "b": schema_of(10, 4)}
    manifests = chain_of(tables, {"a": whole(10, 4), "b": whole(10, 4)}, {"a": whole(10, 4)})
    manifests[1] = msgspec.structs.replace(manifests[1], tables={"a": tables["a"]})

    assert set(pieces_of(plan_tasks(manifests, everything(manifests)))) == {"a"}


CUT_IN_TWO: list[Tile] = [((0, 10), (0, 3)), ((0, 10), (3, 6))]


def test_deltas_of_other_columns_are_compacted_apart() -> None:
    tables = {"t": schema_of(10, 6)}
    same, other = {"t": whole(10, 6)}, {"t": CUT_IN_TWO}
    manifests = chain_of(tables, same, same, same, other, other, other)

    found = compactable_run(manifests, Run(1, 6, "delta", "why"))

    assert (found.start, found.stop, found.kind) == (3, 6, "delta")
    assert compactable_run(manifests, Run(1, 3, "delta", "why")) == Run(1, 3, "delta", "why")
    assert compactable_run(manifests, everything(manifests)) == everything(manifests)


def test_deltas_that_are_all_cut_differently_go_into_the_baseline() -> None:
    tables = {"t": schema_of(10, 6)}
    manifests = chain_of(tables, {"t": whole(10, 6)}, {"t": whole(10, 6)}, {"t": CUT_IN_TWO}, {"t": whole(10, 6)})

    found = compactable_run(manifests, Run(1, 3, "delta", "why"))

    assert (found.start, found.stop, found.kind) == (0, 3, "baseline")


def test_deltas_that_cut_other_columns_in_other_rows_go_into_the_baseline() -> None:
    """Both have the same column ranges, but for different rows."""
    tables = {"t": schema_of(10, 6)}
    mixed: list[Tile] = [((0, 5), (0, 6)), ((5, 10), (0, 3)), ((5, 10), (3, 6))]
    turned: list[Tile] = [((5, 10), (0, 6)), ((0, 5), (0, 3)), ((0, 5), (3, 6))]
    manifests = chain_of(tables, {"t": whole(10, 6)}, {"t": mixed}, {"t": turned})

    found = compactable_run(manifests, Run(1, 3, "delta", "why"))

    assert (found.start, found.stop, found.kind) == (0, 3, "baseline")


def test_deltas_whose_parts_do_not_make_the_table_up_go_into_the_baseline() -> None:
    tables = {"t": schema_of(10, 4)}
    manifests = chain_of(tables, *[{"t": whole(10, 4)}] * 3, {"t": [((0, 5), (0, 4))]}, {})

    runs = [compactable_run(manifests, Run(1, stop, "delta", "asked for")) for stop in (3, 4, 5)]

    assert [(run.start, run.stop, run.kind) for run in runs] == [(1, 3, "delta")] * 3
    assert compactable_run(manifests, Run(2, 4, "delta", "asked for")).kind == "baseline"
    assert pieces_of(plan_tasks(manifests, everything(manifests)))["t"] == [Rectangle((0, 10), (0, 4))]


def test_parts_without_rows_do_not_stand_in_the_way() -> None:
    tables = {"t": schema_of(10, 6)}
    manifests = chain_of(
        tables, {"t": whole(10, 6)}, {"t": whole(10, 6)}, {"t": [*whole(10, 6), ((10, 10), (0, 3))]}
    )  # fmt: skip

    assert compactable_run(manifests, Run(1, 3, "delta", "why")) == Run(1, 3, "delta", "why")


def test_a_table_that_begins_anew_may_be_cut_anew() -> None:
    tables, later = {"t": schema_of(10, 6)}, {"t": schema_of(10, 6, generation=2)}
    manifests = chain_of(tables, {"t": whole(10, 6)}, {"t": whole(10, 6)}, {"t": CUT_IN_TWO})
    manifests[2] = msgspec.structs.replace(manifests[2], tables=later)

    assert compactable_run(manifests, Run(1, 3, "delta", "why")) == Run(1, 3, "delta", "why")


def test_a_table_life_like_the_one_before_the_run_is_not_put_after_it() -> None:
    tables: dict[str, TableSchema] = {"t": schema_of(10, 6)}
    manifests = chain_of(tables, {"t": whole(10, 6)}, {}, {"t": whole(10, 6)})
    manifests[1] = msgspec.structs.replace(manifests[1], tables={})

    found = compactable_run(manifests, Run(1, 3, "delta", "why"))

    assert (found.start, found.stop, found.kind) == (0, 3, "baseline")


def entry(name: str, sha256: str = "0" * 64) -> ChainEntry:
    return ChainEntry(seg=name, sha256=sha256, kind="delta", l0=0, l1=1, size_bytes=1, rows=1)


def test_a_plan_is_named_by_its_inputs_and_its_tasks() -> None:
    tasks = (CompactionTask(0, (MergePiece("t", Rectangle((0, 1), (0, 2))),), 1),)
    plan = ([entry("a"), entry("b")], tasks)
    digests = [
        plan_digest(*plan),
        plan_digest([entry("a")], tasks),
        plan_digest([entry("a"), entry("b", "1" * 64)], tasks),
        plan_digest([entry("a"), entry("b")], (replace(tasks[0], pieces=tasks[0].pieces * 2),)),
        plan_digest([entry("a"), entry("b")], (*tasks, replace(tasks[0], index=1))),
    ]

    assert len(set(digests)) == len(digests)
    assert plan_digest(*plan) == digests[0]


def test_parts_that_were_not_planned_are_refused() -> None:
    task = CompactionTask(
        3, (MergePiece("t", Rectangle((0, 4), (0, 2))), MergePiece("t", Rectangle((4, 8), (0, 2)))), 2
    )
    parts = [part_of("t", ((0, 4), (0, 2))), part_of("t", ((4, 8), (0, 2)))]

    check_pieces(task, parts)
    for wrong in (parts[:1], [parts[0], part_of("t", ((4, 9), (0, 2)))], [parts[0], part_of("u", ((4, 8), (0, 2)))]):
        with pytest.raises(CorruptStore, match="task 3"):
            check_pieces(task, wrong)


def test_a_baseline_of_another_state_is_refused() -> None:
    ends = [part_of("t", ((0, 4), (0, 6)), 5), part_of("t", ((4, 8), (0, 6)), 7), part_of("raw", ((0, 9), (0, 1)))]
    last = manifest_of(1, {"t": schema_of(8, 6), "raw": schema_of(9, 1)}, ends)
    halves = [(0, 3), (3, 6)]
    above = [
        part_of("t", (rows, columns), digest)
        for rows, columns, digest in [
            ((0, 2), halves[0], 2),
            ((0, 2), halves[1], 1),
            ((2, 4), halves[0], 1),
            ((2, 4), halves[1], 1),
        ]
    ]
    good = [*above, part_of("t", ((4, 8), halves[0]), (1 << 64) - 1), part_of("t", ((4, 8), halves[1]), 8)]

    check_states([*good, part_of("raw", ((0, 9), (0, 1)))], last)
    wrong = [*good[:-1], part_of("t", ((4, 8), (3, 6)), 9)]
    without = [*good[:-1], part_of("t", ((4, 8), (3, 6)))]
    for parts in (wrong, without, good[:-1]):
        with pytest.raises(CorruptStore, match=r"'t', rows \(4, 8\)"):
            check_states(parts, last)


def test_row_pieces_leave_no_row_out() -> None:
    for num_rows in (1, 7, 1_000_001, 90_000_000):
        tables = {"t": schema_of(num_rows, 64)}
        manifests = chain_of(tables, {"t": whole(num_rows, 64)}, {"t": whole(num_rows, 64)})

        pieces = pieces_of(plan_tasks(manifests, everything(manifests)))["t"]

        assert (pieces[0].rows[0], pieces[-1].rows[1]) == (0, num_rows)
        assert all(a.rows[1] == b.rows[0] for a, b in pairwise(pieces))
