"""Tables that several writers hold: which bytes a rectangle costs, what is compared, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cnr_store import BadInput, CorruptStore, Store, Unsupported, verify_store
from cnr_store.encodings.digest import add_digests
from cnr_store.errors import BadShape
from cnr_store.format.chain_checks import chain_problems
from cnr_store.format.documents import pack
from cnr_store.format.manifest import decode_manifest, recorded_digest
from cnr_store.format.records import Manifest, PartEntry
from cnr_store.read import plan as read_plan
from cnr_store.read.plan import TablePlan, by_columns, digests_of_whole_parts, expected_digest, plan_table
from cnr_store.storage import storage_from_filesystem
from cnr_store.transfer.exporting import export_snapshot
from cnr_store.types import Rectangle
from tests.support.documents import document_of
from tests.support.faulty import FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.rectangles import TABLE, Model, Parts, schema_of

HALVES = ((0, 4), (4, 8))


def row_wise(rows: int, dim: int, shards: int) -> list[Rectangle]:
    cuts = np.linspace(0, rows, shards + 1).astype(int).tolist()
    return [Rectangle((a, b), (0, dim)) for a, b in pairwise(cuts)]


def column_wise(rows: int, ranges: Any = HALVES) -> list[Rectangle]:
    return [Rectangle((0, rows), columns) for columns in ranges]


def new_parts(
    files: IsolatedMemoryFileSystem, rows: int = 40, *, row_slot: bool = False, ranges: Any = ((0, 8),)
) -> Parts:
    store = Store.create_on(storage_from_filesystem(files, "/root"), threads=1)
    return Parts(store, Model(schema_of(rows, ranges[-1][1], row_slot=row_slot), ranges), 7)


def bytes_read(files: IsolatedMemoryFileSystem, rectangle: Rectangle | None) -> int:
    """Bytes of the chunks that reading a rectangle (None: everything) fetches."""
    counting = FaultyFileSystem(files)
    store = Store.open_on(storage_from_filesystem(counting, "/root"), threads=1)
    view = store.snapshot().table(TABLE)
    before = len(counting.paths("read"))
    view.read_rectangle(rectangle or Rectangle((0, view.shape[0]), (0, view.shape[1])), slots={"v": None})
    paths = counting.paths("read")[before:]
    store.close()
    assert len(paths) == len(set(paths))
    return sum(len(files.cat_file(path)) for path in paths)


def test_a_rank_reads_the_chunks_of_its_rows_alone() -> None:
    files = IsolatedMemoryFileSystem()
    parts = new_parts(files, 400)
    tiles = row_wise(400, 8, 4)
    parts.save(tiles, full=True)
    parts.save(tiles)

    costs = [bytes_read(files, tile) for tile in tiles]

    assert sum(costs) == bytes_read(files, None)
    assert max(costs) < 0.35 * sum(costs)


def test_a_rank_reads_the_chunks_of_its_columns_alone() -> None:
    files = IsolatedMemoryFileSystem()
    parts = new_parts(files, 400)
    parts.save(column_wise(400), full=True)
    parts.save(column_wise(400))

    halves = [bytes_read(files, tile) for tile in column_wise(400)]

    assert sum(halves) == bytes_read(files, None)
    assert bytes_read(files, Rectangle((0, 400), (1, 3))) == halves[0]


def test_within_a_part_only_chunks_of_the_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 128)
    monkeypatch.setattr("cnr_store.format.arrays.SHARD_CHUNKS", 1000)  # so that an object is a chunk
    files = IsolatedMemoryFileSystem()
    parts = new_parts(files, 1000)
    parts.save(row_wise(1000, 8, 1), full=True)

    assert bytes_read(files, Rectangle((500, 520), (0, 8))) < 0.1 * bytes_read(files, None)


def test_one_dimensional_slots_are_read_by_columns_averaged_or_left_out() -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 6, row_slot=True, ranges=HALVES)
    parts.save(column_wise(6), full=True)
    parts.save(column_wise(6))
    view, held = parts.store.snapshot().table(TABLE), parts.model.row_slots()

    assert view.column_cuts == HALVES
    for index, columns in enumerate(HALVES):
        found = view.read_rectangle(Rectangle((1, 5), columns), slots={"m": None})
        assert np.array_equal(found["m"], held[1:5, index])
    with pytest.raises(Unsupported, match=r"\[\(0, 4\), \(4, 8\)\]"):
        view.read(slot="m")
    assert np.array_equal(
        view.read(slot="m", slots_rule="mean"), held.astype(np.float64).mean(axis=1).astype(np.float32)
    )
    rows = np.asarray([4, 0, 4])
    weighted = view.read_rectangle(Rectangle((0, 6), (1, 5)), slots={"m": None}, slots_rule="mean")
    expected = (held.astype(np.float64) @ [3, 1] / 4).astype(np.float32)
    assert np.array_equal(weighted["m"], expected)
    means = view.read(slot="m", slots_rule="mean")
    assert np.array_equal(view.read_rows(rows, slot="m", slots_rule="mean"), means[rows])
    with pytest.raises(Unsupported):
        view.read_rows(rows, slot="m")
    untouched = np.full(6, np.float32(3))
    filled = view.read_rectangle(Rectangle((0, 6), (0, 8)), slots={"m": untouched, "v": None}, slots_rule="drop")
    assert set(filled) == {"v"}
    assert (untouched == 3).all()


def test_a_mirror_of_other_columns_needs_every_one_dimensional_slot() -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 6, row_slot=True, ranges=HALVES)
    parts.save(column_wise(6), full=True)
    view = parts.store.snapshot().table(TABLE)

    with pytest.raises(Unsupported, match="slots_rule='mean' or 'drop'"):
        view.load({}, allocate=np.zeros)
    assert view.load({}, allocate=np.zeros, slots_rule="drop") is None
    slot = np.empty(6, np.float32)
    assert view.load({"slots/m": slot}, allocate=np.zeros, slots_rule="mean") is None
    assert np.array_equal(slot, view.read(slot="m", slots_rule="mean"))
    mirror = view.load({}, Rectangle((0, 6), (4, 8)), allocate=np.zeros)
    assert mirror is not None
    assert mirror.digest() == parts.model.digest(Rectangle((0, 6), (4, 8)))


def test_one_dimensional_slots_cut_differently_in_a_chain_are_corrupt() -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 6, row_slot=True, ranges=HALVES)
    parts.save(column_wise(6), full=True)
    parts.model.ranges = ((0, 8),)
    parts.save(row_wise(6, 8, 2), states_digest=False)

    with pytest.raises(CorruptStore, match=r"cut at \(0, 4\) and at \(0, 8\)"):
        parts.store.snapshot().table(TABLE).read()
    report = verify_store(parts.store, deep=True, threads=1)
    assert any("within one chain" in problem.message for problem in report.problems)


def with_digest_of(manifest: Manifest, index: int, digest: str | None) -> Manifest:
    changed = [
        msgspec.structs.replace(part, state_digest=digest) if k == index else part
        for k, part in enumerate(manifest.parts)
    ]
    return msgspec.structs.replace(manifest, parts=tuple(changed))


@pytest.mark.parametrize("cut_before", [((0, 8),), HALVES, ((0, 2), (2, 6), (6, 8))])
def test_a_wrong_digest_is_found_by_whoever_reads_the_whole_part(cut_before: Any) -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 10)
    parts.save(column_wise(10, cut_before), full=True)
    tiles = [Rectangle(rows, columns) for rows in ((0, 5), (5, 10)) for columns in HALVES]
    parts.save(tiles)
    snapshot = parts.store.snapshot()
    reader = snapshot.readers[-1]
    reader.manifest = with_digest_of(reader.manifest, 1, "0123456789abcdef")
    view = snapshot.table(TABLE)

    def read_all(one: Rectangle) -> None:
        view.read_rectangle(one, values=np.empty((one.num_rows, one.width), np.float32), slots={"v": None})

    wrong = [tiles[1], Rectangle((0, 10), (0, 8)), Rectangle((0, 5), (0, 8)), Rectangle((0, 10), (4, 8))]
    unknown = [Rectangle((0, 5), (4, 7)), Rectangle((0, 4), (4, 8))]
    for rectangle in (*wrong, Rectangle((0, 5), (3, 8))):
        with pytest.raises(CorruptStore, match="state digest"):
            read_all(rectangle)
    for rectangle in (*unknown, tiles[0], tiles[2], tiles[3], Rectangle((5, 10), (0, 8)), Rectangle((0, 10), (0, 4))):
        read_all(rectangle)


def test_digests_are_expected_of_unions_of_whole_parts_alone() -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 10)
    tiles = [
        Rectangle((0, 5), (0, 8)),
        *(Rectangle((5, 10), columns) for columns in HALVES),
        Rectangle((10, 10), (0, 8)),
    ]
    parts.save(tiles, full=True)
    manifests = parts.store.snapshot().manifests

    def expected(rectangle: Rectangle, names: frozenset[str] = frozenset({"codes", "slots/v"})) -> int | None:
        plan = plan_table(manifests, TABLE, *rectangle.rows, columns=rectangle.columns)
        return expected_digest(plan, set(names))

    for rectangle in (*tiles, Rectangle((0, 10), (0, 8)), Rectangle((5, 10), (0, 8))):
        assert expected(rectangle) == parts.model.digest(rectangle)
    for rectangle in (Rectangle((0, 10), (0, 4)), Rectangle((5, 10), (0, 6)), Rectangle((0, 9), (0, 8))):
        assert expected(rectangle) is None
    assert expected(tiles[0], frozenset({"slots/v"})) is None
    unknown = [*manifests[:-1], with_digest_of(manifests[-1], 1, None)]
    assert expected_digest(plan_table(unknown, TABLE), {"codes", "slots/v"}) is None


def cut(random: np.random.Generator, rectangle: Rectangle, times: int) -> list[Rectangle]:
    """Cut a rectangle at a random row or column, and its pieces again."""
    if not times:
        return [rectangle]
    by_row = bool(random.integers(2))
    low, high = rectangle.rows if by_row else rectangle.columns
    at = int(random.integers(low, high + 1))
    halves = [one for one in ((low, at), (at, high)) if one[0] < one[1]]
    pairs = [Rectangle(one, rectangle.columns) if by_row else Rectangle(rectangle.rows, one) for one in halves]
    return [piece for one in pairs for piece in cut(random, one, times - 1)]


@settings(max_examples=300)
@given(st.integers(0, 2**32))
@example(186)  # a part that ends inside the columns of the one before it, as one of 160 drawn layouts has
@example(266)
def test_digests_are_compared_over_the_fewest_intervals_of_whole_parts(seed: int) -> None:
    """The reference tries each run of neighbouring intervals."""
    random = np.random.default_rng(seed)
    tiles = cut(random, Rectangle((0, 6), (0, 9)), 4)
    known = [None if random.random() < 0.2 else f"{random.integers(2**63):016x}" for _ in tiles]
    parts = [
        PartEntry(table=TABLE, rows=tile.rows, columns=tile.columns, state_digest=one)
        for tile, one in zip(tiles, known, strict=True)
    ]
    rows, columns = [sorted(random.choice(high + 1, 2, replace=False).tolist()) for high in (6, 9)]
    if random.random() < 0.5:
        rows = [0, 6]
    cuts = sorted({0, 9, *columns, *(one for tile in tiles for one in tile.columns), int(random.integers(1, 9))})
    stored = tuple(pairwise(cuts))
    plan = TablePlan(TABLE, schema_of(6, 9, row_slot=False), *rows, tuple(columns), (), False, tuple(parts), stored)
    found = [(piece.columns, int(random.integers(2**63))) for piece in by_columns(plan)]
    if random.random() < 0.2:
        found = [(plan.columns, 5)]

    expected, begin = [], 0
    while begin < len(found):
        for end in range(begin + 1, len(found) + 1):
            span = replace(plan, columns=(found[begin][0][0], found[end - 1][0][1]))
            if (wanted := expected_digest(span, {"codes", "slots/v"})) is not None:
                total = add_digests(*(one for _, one in found[begin:end]))
                expected.append((span.columns, total, wanted))
                begin = end - 1
                break
        begin += 1

    compared = digests_of_whole_parts(plan, found, {"codes", "slots/v"})
    assert [(span.columns, total, wanted) for span, total, wanted in compared] == expected


def test_each_part_is_looked_at_once_for_the_digests_of_many_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of intervals looked through all parts: 800 columns took 5 s, 1,600 would have taken 40."""
    looked_at = []

    def counted(parts: Sequence[PartEntry], rectangle: Rectangle) -> int | None:
        looked_at.append(len(parts))
        return recorded_digest(parts, rectangle)

    monkeypatch.setattr(read_plan, "recorded_digest", counted)
    columns = list(pairwise(range(301)))
    parts = tuple(PartEntry(table=TABLE, rows=(0, 4), columns=one) for one in reversed(columns))
    plan = TablePlan(TABLE, schema_of(4, 300, row_slot=False), 0, 4, (0, 300), (), False, parts, tuple(columns))

    assert not list(digests_of_whole_parts(plan, [(one, 0) for one in columns], {"codes", "slots/v"}))
    assert sum(looked_at) == 300


def test_an_interval_has_the_chunks_of_the_parts_that_meet_it() -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 10, ranges=((0, 8),))
    parts.save(column_wise(10, ((0, 3), (3, 8))), full=True)
    parts.save([Rectangle((0, 10), (0, 8))])
    parts.save([Rectangle((0, 5), (0, 8)), *(Rectangle((5, 10), columns) for columns in HALVES)])
    plan = plan_table(parts.store.snapshot().manifests, TABLE, columns=(1, 7))

    pieces = by_columns(plan)

    assert [piece.columns for piece in pieces] == [(1, 3), (3, 4), (4, 7)]
    for piece in pieces:
        low, high = piece.columns
        for batch, whole in zip(piece.batches, plan.batches, strict=True):
            own = [step for step in whole.steps if step.part.columns[0] < high and low < step.part.columns[1]]
            assert (batch.segment, batch.num_rows, list(batch.steps)) == (whole.segment, whole.num_rows, own)


def test_a_table_of_one_column_range_is_read_in_one_piece() -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 10)
    parts.save(row_wise(10, 8, 3), full=True)
    parts.save(row_wise(10, 8, 2))
    plan = plan_table(parts.store.snapshot().manifests, TABLE)

    assert by_columns(plan) == (plan,)
    assert [piece.columns for piece in by_columns(plan_table([*parts.store.snapshot().manifests], TABLE))] == [(0, 8)]


def test_rectangles_that_do_not_fit_are_refused() -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 6)
    parts.save(row_wise(6, 8, 1), full=True)
    view = parts.store.snapshot().table(TABLE)

    for rectangle in (
        Rectangle((0, 7), (0, 8)), Rectangle((-1, 2), (0, 8)), Rectangle((0, 6), (0, 9)), Rectangle((0, 6), (3, 3)),
    ):  # fmt: skip
        with pytest.raises(BadInput):
            view.read_rectangle(rectangle)
    with pytest.raises(BadShape):
        view.read_rectangle(Rectangle((0, 6), (0, 4)), values=np.empty((6, 8), np.float32))
    assert view.read_rectangle(Rectangle((3, 3), (0, 4)))["values"].shape == (0, 4)


def test_an_export_refuses_slots_that_have_no_one_value_per_row(tmp_path: Any) -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 6, row_slot=True, ranges=HALVES)
    parts.save(column_wise(6), full=True)
    snapshot = parts.store.snapshot()

    with pytest.raises(Unsupported, match="slot 'm'"):
        export_snapshot(snapshot, tmp_path / "all.safetensors")
    assert list(tmp_path.iterdir()) == []
    report = export_snapshot(snapshot, tmp_path / "weights.safetensors", slots=False)
    assert [tensor.name for tensor in report.tensors] == [TABLE]


def test_parts_that_overlap_or_cut_a_hashed_table_are_refused() -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 10)
    parts.save(column_wise(10), full=True)
    manifest = parts.store.snapshot().manifests[-1]
    moved = [
        msgspec.structs.replace(part, columns=(part.columns[0] // 2, part.columns[0] // 2 + 4))
        for part in manifest.parts
    ]
    schema = msgspec.structs.replace(manifest.tables[TABLE], keys="hashed", num_rows=0)

    decode_manifest(pack(document_of(manifest)), "manifest")
    with pytest.raises(CorruptStore, match="overlap"):
        decode_manifest(pack(document_of(msgspec.structs.replace(manifest, parts=tuple(moved)))), "manifest")
    hashed = msgspec.structs.replace(manifest, tables={TABLE: schema})
    with pytest.raises(CorruptStore, match="of a hashed table"):
        decode_manifest(pack(document_of(hashed)), "manifest")


def test_ranks_without_rows_cut_nothing() -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 6, row_slot=True, ranges=HALVES)
    parts.save(column_wise(6), full=True)
    parts.save(column_wise(6))
    reader = (snapshot := parts.store.snapshot()).readers[-1]
    empty = msgspec.structs.replace(
        reader.manifest.parts[0], rows=(6, 6), columns=(0, 8), state_digest=None, add=None, set=None, delete=None,
        escape=None,
    )  # fmt: skip
    reader.manifest = msgspec.structs.replace(reader.manifest, parts=(*reader.manifest.parts, empty))
    view = snapshot.table(TABLE)

    assert view.column_cuts == HALVES
    assert np.array_equal(view.read(), parts.model.values(), equal_nan=True)
    plan = plan_table(snapshot.manifests, TABLE)
    assert expected_digest(plan, {"codes", "slots/v", "slots/m"}) == sum(map(parts.model.digest, column_wise(6))) % (
        1 << 64
    )
    assert list(chain_problems(snapshot.manifests)) == []


def test_a_check_names_a_part_of_another_state_however_it_was_cut() -> None:
    parts = new_parts(IsolatedMemoryFileSystem(), 10)
    parts.save([Rectangle(rows, columns) for rows in ((0, 5), (5, 10)) for columns in HALVES], full=True)
    whole, below = parts.model.digest(Rectangle((0, 10), (0, 8))), parts.model.digest(Rectangle((5, 10), (0, 8)))
    parts.save(row_wise(10, 8, 1))
    before, after = parts.store.snapshot().manifests

    def contradictions(rows: tuple[int, int], num_rows: int, digest: int) -> int:
        part = msgspec.structs.replace(after.parts[0], rows=rows, base_digest=f"{digest:016x}")
        schema = msgspec.structs.replace(after.tables[TABLE], num_rows=num_rows)
        moved = msgspec.structs.replace(after, parts=(part,), tables={TABLE: schema})
        return len(list(chain_problems([before, moved])))

    assert contradictions((0, 10), 10, whole) == contradictions((5, 10), 10, below) == 0
    assert contradictions((0, 10), 10, whole ^ 1) == contradictions((5, 10), 10, whole) == 1
    for num_rows in (8, 13):  # the table was resized: its last rows start from what the last rows ended with
        assert contradictions((0, num_rows), num_rows, whole) == contradictions((5, num_rows), num_rows, below) == 0
        assert contradictions((0, num_rows), num_rows, below) == contradictions((5, num_rows), num_rows, whole) == 1
    assert contradictions((3, 10), 10, 1) == 0  # of no union of parts, so nothing is known
