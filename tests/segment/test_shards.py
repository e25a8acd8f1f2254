"""Who holds what: rectangles that tile each table, and owners of the tables that every rank has."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import BadInput
from cnr_store.format.records import TableSchema
from cnr_store.segment.shards import Shard, assign_owners, check_placements, column_cuts, shards_of
from cnr_store.types import FloatBits, Rectangle

LAW = settings(max_examples=60)


def box(rows: tuple[int, int], columns: tuple[int, int] = (0, 8)) -> Rectangle:
    return Rectangle(rows, columns)


def test_rectangles_that_tile_a_table_give_its_shape() -> None:
    placements = [
        {"rows": [box((0, 5))], "grid": [box((0, 3), (0, 4)), box((3, 9), (4, 8))], "one": []},
        {"rows": [box((5, 9))], "grid": [box((0, 3), (4, 8)), box((3, 9), (0, 4))]},
        {"one": [box((0, 2), (0, 1))]},
    ]

    assert check_placements(placements) == {"rows": (9, 8), "grid": (9, 8), "one": (2, 1)}
    assert column_cuts(placements)["grid"] == {(0, 4), (4, 8)}


def test_shards_without_rows_and_tables_without_rows_are_fine() -> None:
    assert check_placements([{"t": [box((0, 0))]}, {"t": [box((0, 2))]}, {"t": [box((2, 2))]}]) == {"t": (2, 8)}
    assert check_placements([{"t": [box((0, 0))]}, {"t": [box((0, 0))]}, {}]) == {"t": (0, 8)}
    assert check_placements([{}, {"t": []}]) == {}
    assert column_cuts([{"t": [box((0, 0), (0, 3)), box((0, 2))]}]) == {"t": {(0, 8)}}


@pytest.mark.parametrize(
    ("shards", "what"),
    [
        ([box((0, 4)), box((5, 9))], "a shard is missing"),
        ([box((1, 9))], "a shard is missing"),
        ([box((0, 9), (1, 8))], "a shard is missing"),
        ([box((0, 9), (0, 4)), box((0, 8), (4, 8))], "a shard is missing"),
        ([box((0, 5)), box((4, 9))], "ranks 0 and 1 both hold row 4 of columns 0"),
        ([box((0, 9)), box((0, 9))], "both hold row 0"),
        ([box((0, 9), (0, 5)), box((3, 4), (4, 8))], "both hold row 3 of columns 4"),
        ([box((0, 9)), box((9, 8))], "rank 1 holds rows 9 to 8"),
        ([box((0, 9)), box((9, 9), (3, 3))], "no rectangle"),
        ([box((-1, 9))], "no rectangle"),
    ],
)
def test_gaps_overlaps_and_what_is_no_rectangle_are_refused(shards: list[Rectangle], what: str) -> None:
    with pytest.raises(BadInput, match=what) as refused:
        check_placements([{"t": [shard]} for shard in shards])

    assert refused.value.table == "t"


@st.composite
def cut_tables(draw: st.DrawFn) -> tuple[int, int, list[Rectangle]]:
    """A table, cut again and again by straight lines through one of its pieces."""
    num_rows, dim = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    pieces = [Rectangle((0, num_rows), (0, dim))]
    for _ in range(draw(st.integers(0, 8))):
        one = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        (a, b), (c, d) = one.rows, one.columns
        if draw(st.booleans()) and d - c > 1:
            cut = draw(st.integers(c + 1, d - 1))
            pieces += [Rectangle((a, b), (c, cut)), Rectangle((a, b), (cut, d))]
        else:
            cut = draw(st.integers(a, b))
            pieces += [Rectangle((a, cut), (c, d)), Rectangle((cut, b), (c, d))]
    return num_rows, dim, draw(st.permutations(pieces))


@LAW
@given(cut_tables(), st.data())
def test_any_cut_of_a_table_tiles_it_and_no_piece_may_lack_or_repeat(
    table: tuple[int, int, list[Rectangle]], data: st.DataObject
) -> None:
    num_rows, dim, pieces = table
    world = data.draw(st.integers(1, 4))
    placements: list[dict[str, list[Rectangle]]] = [{"t": []} for _ in range(world)]
    for piece in pieces:
        placements[data.draw(st.integers(0, world - 1))]["t"].append(piece)

    assert check_placements(placements) == {"t": (num_rows, dim)}
    filled = [piece for piece in pieces if piece.num_rows]
    chosen = data.draw(st.sampled_from(filled))
    with pytest.raises(BadInput):
        check_placements([*placements, {"t": [chosen]}])
    rest = [piece for piece in pieces if piece is not chosen]
    inner = chosen.rows[1] < num_rows or chosen.columns[1] < dim
    if inner and any(piece.num_rows for piece in rest) and _spans(rest, num_rows, dim):
        with pytest.raises(BadInput, match="a shard is missing"):
            check_placements([{"t": rest}])


def _spans(pieces: list[Rectangle], num_rows: int, dim: int) -> bool:
    return max(p.rows[1] for p in pieces) == num_rows and max(p.columns[1] for p in pieces) == dim


def test_a_writers_shards_are_its_rectangles_or_whole_tables() -> None:
    placement = {"t": [box((5, 9)), box((0, 5))]}
    schema = TableSchema(num_rows=9, dim=8, dtype="float32", encoding=FloatBits(23))

    assert shards_of(None, ["t", "u"]) == {"t": (Shard("t"),), "u": (Shard("u"),)}
    assert shards_of(placement, ["t", "u"]) == {"t": (Shard("t", box((0, 5))), Shard("t", box((5, 9)))), "u": ()}
    assert Shard("t").rectangle_in(schema) == box((0, 9))
    assert str(Shard("t", box((5, 9)))) == "'t' (rows 5 to 9, columns 0 to 8)"


SIZES = st.dictionaries(st.text("abcdefg", min_size=1, max_size=2), st.integers(0, 50), max_size=7)


@LAW
@given(SIZES, st.integers(1, 3))
def test_owners_of_new_tables_are_within_four_thirds_of_the_best(sizes: dict[str, int], world: int) -> None:
    owners = assign_owners(sizes, world)

    names = sorted(sizes)
    loads = [sum(sizes[name] for name in names if owners[name] == rank) for rank in range(world)]
    best = min(
        max(sum(sizes[name] for name, rank in zip(names, chosen, strict=True) if rank == k) for k in range(world))
        for chosen in product(range(world), repeat=len(names))
    )
    assert owners.keys() == sizes.keys()
    assert 3 * max(loads) <= 4 * best


@LAW
@given(
    SIZES,
    st.integers(1, 4),
    st.dictionaries(st.text("abcdefg", min_size=1, max_size=2), st.integers(0, 6)),
    st.randoms(),
)
def test_what_is_held_stays_and_every_rank_decides_alike(
    sizes: dict[str, int], world: int, held: dict[str, int], random: object
) -> None:
    owners = assign_owners(sizes, world, held)

    names = list(sizes)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert assign_owners({name: sizes[name] for name in names}, world, dict(reversed(held.items()))) == owners
    assert assign_owners(sizes, world, owners) == owners
    assert owners.keys() == sizes.keys()
    assert set(owners.values()) <= set(range(world))
    assert all(owners[name] == rank for name, rank in held.items() if name in sizes and rank < world)


def test_without_tables_there_are_no_owners() -> None:
    assert assign_owners({}, 3) == {}
    assert assign_owners({}, 1, {"gone": 0}) == {}
