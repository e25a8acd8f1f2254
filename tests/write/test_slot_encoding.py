"""How slots are stored: by what they are, by the table's bits, by what users ask of one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cnr_store import BadInput, Store, TableOptions
from cnr_store.encodings.sampling import RowSample
from cnr_store.format.records import SlotSchema
from cnr_store.types import FloatBits, Lattice
from cnr_store.write.schema_agreement import NewShard, agree, propose
from cnr_store.write.schema_choice import (
    OTHER_MANTISSA_BITS,
    ROW_MANTISSA_BITS,
    SLOT_PRECISION,
    keeps_exactness,
    root_mean_square,
    table_schema,
)

RANDOM = np.random.default_rng(3)
WEIGHTS = RANDOM.normal(0, 0.1, (400, 8)).astype(np.float32)
MEAN = RANDOM.normal(0, 1e-3, (400, 8)).astype(np.float32)
SQUARE = np.square(RANDOM.normal(0, 1e-3, (400, 8))).astype(np.float32)


def stored(options: TableOptions, **slots: Any) -> dict[str, SlotSchema]:
    schema = table_schema("t", options, num_rows=400, dim=8, dtype="float32", sample=WEIGHTS, slots=slots)
    return schema.slots


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_slots_follow_the_bits_of_their_table(bits: Any) -> None:
    found = stored(TableOptions(bits=bits), exp_avg=MEAN, exp_avg_sq=SQUARE)
    size = float(np.sqrt(np.mean(np.square(MEAN.astype(np.float64)))))
    assert found["exp_avg_sq"].encoding == FloatBits(mantissa_bits=SLOT_PRECISION[bits].mantissa_bits)
    assert found["exp_avg"].encoding == Lattice(scale=float(np.float32(SLOT_PRECISION[bits].step * size)))


def test_more_bits_are_never_less_exact() -> None:
    ordered = [SLOT_PRECISION[bits] for bits in (2, 3, 4, 8)]
    assert [one.mantissa_bits for one in ordered] == sorted(one.mantissa_bits for one in ordered)
    assert [one.step for one in ordered] == sorted((one.step for one in ordered), reverse=True)


def test_momentum1_is_a_mean_beside_a_second_moment_and_else_a_square_sum() -> None:
    """TorchRec calls the first slot of every fused optimizer so."""
    adam = stored(TableOptions(bits=4), momentum1=MEAN, exp_avg_sq=SQUARE)
    assert isinstance(adam["momentum1"].encoding, Lattice)
    assert isinstance(stored(TableOptions(bits=4), momentum1=SQUARE)["momentum1"].encoding, FloatBits)


def test_a_number_per_row_and_a_slot_of_another_name_stay_finer() -> None:
    found = stored(TableOptions(bits=2), momentum1=SQUARE[:, 0], prev_iter=SQUARE[:, 0], ax=WEIGHTS)
    assert found["momentum1"].encoding == FloatBits(mantissa_bits=ROW_MANTISSA_BITS)
    assert found["prev_iter"].encoding == found["ax"].encoding == FloatBits(mantissa_bits=OTHER_MANTISSA_BITS)


def test_slot_bits_say_it_for_all_slots_or_for_some() -> None:
    squares = {"sum": SQUARE, "mine": SQUARE}
    every = stored(TableOptions(bits=2, slot_bits="exact"), **squares)
    assert {slot.encoding for slot in every.values()} == {FloatBits(mantissa_bits=23)}
    some = stored(TableOptions(bits=2, slot_bits={"mine": 4}), **squares)
    assert some["mine"].encoding == FloatBits(mantissa_bits=SLOT_PRECISION[4].mantissa_bits)
    assert some["sum"].encoding == FloatBits(mantissa_bits=SLOT_PRECISION[2].mantissa_bits)


def test_means_that_no_step_has_touched_say_nothing_of_a_step() -> None:
    half = MEAN.copy()
    half[::2] = 0.0
    assert root_mean_square(RowSample(half, "float32")) == pytest.approx(float(np.sqrt(np.mean(MEAN[1::2] ** 2))))
    assert stored(TableOptions(bits=4), exp_avg=np.zeros_like(MEAN))["exp_avg"].encoding == FloatBits(
        mantissa_bits=SLOT_PRECISION[4].mantissa_bits
    )


def test_ranks_agree_on_one_step_and_one_without_a_mean_has_no_say() -> None:
    options = TableOptions(scale=0.01, slot_bits=4)
    shards = [
        NewShard("t", RowSample(WEIGHTS, "float32"), {"exp_avg": mean}, options, (1200, 8), 1)
        for mean in (np.zeros_like(MEAN), MEAN, 3 * MEAN)
    ]
    given = propose(shards)
    agreed = agree("t", given).slots["exp_avg"].encoding
    one = given[1].schema.slots["exp_avg"].encoding
    assert isinstance(agreed, Lattice)
    assert isinstance(one, Lattice)
    assert agreed.scale == pytest.approx(one.scale * np.sqrt(5.0))
    assert agree("t", given[::-1]).slots["exp_avg"].encoding == agreed


def test_a_slot_is_stored_anew_only_if_its_exactness_changes() -> None:
    coarse, exact = (
        stored(TableOptions(bits=4, slot_bits=bits), sum=SQUARE)["sum"]
        for bits in (4, "exact")  # type: ignore[arg-type]  # a literal in a loop
    )
    assert keeps_exactness(coarse, 8)
    assert not keeps_exactness(coarse, "exact")
    assert keeps_exactness(exact, "exact")
    assert not keeps_exactness(exact, None)


def test_a_delta_of_slots_reads_as_the_rounded_values_of_the_training() -> None:
    store = Store.create("memory://slots-as-differences")
    mean, square = MEAN.copy(), SQUARE.copy()
    square[5] = 0.0
    with store, store.writer() as writer:
        with writer.begin(step=1) as txn:
            slots = {"exp_avg": mean, "exp_avg_sq": square}
            txn.write_table("t", WEIGHTS, slots=slots, options=TableOptions(bits=4))
        for step in (2, 3):
            rows = np.sort(RANDOM.choice(400, 100, replace=False)).astype(np.int64)
            mean[rows] *= np.float32(-0.5)
            square[rows] *= np.float32(1.7)
            with writer.begin(step=step) as txn:
                txn.write_rows("t", rows, WEIGHTS[rows], slots={"exp_avg": mean[rows], "exp_avg_sq": square[rows]})
        snapshot = store.snapshot()
        assert [part.add is not None for manifest in snapshot.manifests for part in manifest.parts] == [
            False,
            True,
            True,
        ]
        encoding = snapshot.tables["t"].slots["exp_avg"].encoding
        assert isinstance(encoding, Lattice)
        found = {name: np.empty_like(mean) for name in ("exp_avg", "exp_avg_sq")}
        snapshot.table("t").read_rectangle(values=np.empty_like(WEIGHTS), slots=found)
    step_size = np.float32(encoding.scale)
    np.testing.assert_array_equal(found["exp_avg"], step_size * np.rint(mean / step_size))
    assert not found["exp_avg_sq"][5].any()
    kept = square > 0
    assert (np.abs(found["exp_avg_sq"][kept] / square[kept] - 1) <= 2.0 ** -(SLOT_PRECISION[4].mantissa_bits + 1)).all()


@pytest.mark.parametrize("slot_bits", [5, True, {"sum": 1}, {"sum": None}])
def test_bits_that_no_slot_has_are_refused(slot_bits: Any) -> None:
    with pytest.raises(BadInput, match="slot_bits"):
        TableOptions(slot_bits=slot_bits)
