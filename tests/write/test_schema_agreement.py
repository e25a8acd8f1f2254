"""One schema from what several ranks propose: as if one rank had seen all rows, and the same on every rank."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import BadInput, TableOptions
from cnr_store.encodings.sampling import RowSample
from cnr_store.types import Lattice
from cnr_store.write.schema_agreement import NewShard, Proposal, agree, alike, propose
from cnr_store.write.schema_choice import table_dtype

Array = np.ndarray[Any, Any]


def proposals(pieces: list[Array], options: TableOptions | list[TableOptions], **more: Any) -> list[Proposal]:
    """What ranks propose that hold ``pieces`` of one table, row-wise."""
    chosen = options if isinstance(options, list) else [options] * len(pieces)
    shape = (sum(len(piece) for piece in pieces), pieces[0].shape[1])
    given = {"slots": {}, "shape": shape, "generation": 1} | more
    slots, generation = given["slots"], given["generation"]
    shards = [
        NewShard("t", RowSample(piece, table_dtype(piece, "t")), slots, one, given["shape"], generation)
        for piece, one in zip(pieces, chosen, strict=True)
    ]
    return [one for shard in shards for one in propose([shard])]


def test_shards_are_proposed_together_as_each_by_itself() -> None:
    rng = np.random.default_rng(5)
    made = [rng.standard_normal((n, dim)).astype(np.float32) for n, dim in [(9, 4), (70, 4), (3, 8), (300, 4), (0, 4)]]
    shards = [
        NewShard(f"t{number}", RowSample(rows, "float32"), {}, TableOptions(bits=4), rows.shape, 1)
        for number, rows in enumerate(made)
    ]

    runs = alike(shards)

    assert runs == [[0, 1, 3, 4], [2]]
    for run in runs:
        own = [shards[number] for number in run]
        assert propose(own) == [one for shard in own for one in propose([shard])]


def test_shards_with_a_full_sample_or_other_options_are_proposed_apart() -> None:
    full, small = np.zeros((3000, 64), np.float32), np.zeros((10, 64), np.float32)
    shards = [
        NewShard("t", RowSample(rows, "float32"), {}, TableOptions(bits=bits), rows.shape, 1)
        for rows, bits in [(full, 4), (small, 4), (small, 8), (full, 4), (small, 4)]
    ]
    assert alike(shards) == [[0], [1, 3], [2], [4]]


def test_a_shard_that_is_refused_among_others_is_named() -> None:
    made = [np.ones((4, 2), np.float32), np.full((4, 2), 3e38, np.float32) * np.float32([1, 0])]
    shards = [
        NewShard(name, RowSample(rows, "float32"), {}, TableOptions(bits=8), rows.shape, 1)
        for name, rows in zip("ab", made, strict=True)
    ]
    with pytest.raises(BadInput, match="table 'b'"):
        propose(shards)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("spreads", "finer"), [((1.0, 1.0, 1.0), 0.03), ((0.1, 1.0, 4.0), 0.3)])
def test_the_scale_of_shards_is_the_scale_of_all_rows(bits: Any, spreads: tuple[float, ...], finer: float) -> None:
    """Never coarser; finer for few bits where a shard's rows are smaller than the common step and cost less error."""
    rng = np.random.default_rng(3)
    spread = np.repeat(spreads, [400, 300, 200])[:, None]
    table = (rng.standard_normal((900, 16)) * spread).astype(np.float32)
    pieces = [table[:400], table[400:700], table[700:]]
    options = TableOptions(bits=bits)

    whole = agree("t", proposals([table], options)).encoding
    agreed = agree("t", proposals(pieces, options)).encoding

    assert isinstance(whole, Lattice)
    assert isinstance(agreed, Lattice)
    assert (1 - finer) * whole.scale <= agreed.scale <= 1.03 * whole.scale
    assert agreed.scale == float(np.float32(agreed.scale))


def test_every_rank_agrees_on_the_same_whatever_it_proposed() -> None:
    rng = np.random.default_rng(4)
    pieces = [(rng.standard_normal((n, 8)) * (n + 1)).astype(np.float32) for n in (30, 0, 7, 100)]
    given = proposals(pieces, TableOptions(bits=4))
    sent = [
        Proposal(msgspec.convert(msgspec.to_builtins(p.schema), type(p.schema)), p.elements, p.options) for p in given
    ]

    first = agree("t", given)

    assert agree("t", sent) == first
    assert (
        agree("t", proposals([pieces[0]], TableOptions(bits=4)))
        == proposals([pieces[0]], TableOptions(bits=4))[0].schema
    )
    assert first.num_rows == 137


def test_a_shard_without_rows_has_no_say_in_the_scale() -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((50, 8)).astype(np.float32)
    empty = np.zeros((0, 8), np.float32)

    alone = agree("t", proposals([rows], TableOptions(bits=8))).encoding

    assert agree("t", proposals([empty, rows, empty], TableOptions(bits=8))).encoding == alone
    assert isinstance(agree("t", proposals([empty, empty], TableOptions(bits=8))).encoding, Lattice)


@pytest.mark.parametrize(
    "options",
    [TableOptions(scale=0.1), TableOptions(max_error=0.25), TableOptions.exact(), TableOptions(encoding="raw")],
)
def test_what_does_not_depend_on_rows_is_what_each_rank_proposed(options: TableOptions) -> None:
    rng = np.random.default_rng(6)
    pieces = [(rng.standard_normal((20, 4)) * k).astype(np.float32) for k in (1, 50)]
    given = proposals(pieces, options)

    assert agree("t", given) == given[0].schema == given[1].schema


def test_affine_rows_get_wide_parameters_if_one_shard_needs_them() -> None:
    small = np.random.default_rng(7).standard_normal((20, 4)).astype(np.float32)
    large = small * np.float32(1e6)
    options = TableOptions(encoding="affine", bits=4)

    for pieces in ([small, large], [large, small]):
        assert agree("t", proposals(pieces, options)).encoding.param_dtype == "float32"  # type: ignore[union-attr]
    assert agree("t", proposals([small, small], options)).encoding.param_dtype == "float16"  # type: ignore[union-attr]


def test_the_generation_is_the_newest_that_a_rank_knows() -> None:
    rows = np.ones((3, 2), np.float32)
    options = TableOptions(scale=1.0)
    given = [*proposals([rows], options, generation=2), *proposals([rows], options, generation=5)]

    assert agree("t", given).generation == 5


ROWS = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(proposals([ROWS.astype(np.float16)], TableOptions(scale=1.0, encoding="lattice")), id="dtype"),
        pytest.param(proposals([ROWS], TableOptions.exact()), id="encoding"),
        pytest.param(proposals([ROWS], TableOptions(scale=2.0)), id="scale"),
        pytest.param(proposals([ROWS], TableOptions(scale=1.0, fill=1.0)), id="fill"),
        pytest.param(proposals([ROWS], TableOptions(scale=1.0, nonfinite="escape")), id="nonfinite"),
        pytest.param(proposals([ROWS], TableOptions(scale=1.0), slots={"m": ROWS[:, 0]}), id="slots"),
        pytest.param(proposals([ROWS], TableOptions(scale=1.0), shape=(5, 2)), id="shape"),
    ],
)
def test_ranks_that_disagree_are_refused_in_either_order(other: list[Proposal]) -> None:
    mine = proposals([ROWS], TableOptions(scale=1.0))

    for both in ([*mine, *other], [*other, *mine]):
        if mine[0].schema == other[0].schema and mine[0].options == other[0].options:
            pytest.fail("the case is no disagreement")
        with pytest.raises(BadInput, match="'t'"):
            agree("t", both)


def test_a_scale_that_cannot_be_chosen_names_its_table() -> None:
    """A regression: of a model with many tables, the error did not say which one has the values."""
    with pytest.raises(BadInput, match=r"table .t.: .* need codes beyond") as caught:
        proposals([np.full((4, 2), 1e9, np.float32)], TableOptions(scale=0.01))
    assert caught.value.table == "t"
