"""The confidence of a measured scale: intervals hold as often as stated, and samples have a fixed size."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.encodings import scale
from cnr_store.encodings.affine import row_errors
from cnr_store.encodings.choose import REFERENCE_SETTINGS
from cnr_store.encodings.sampling import LEAST_ROWS, SAMPLE_ELEMENTS, SAMPLE_ROWS, RowSample
from cnr_store.encodings.scale import (
    ScaleChoice,
    measure_scale,
    measure_scales,
    pooled,
    ratio_half_width,
    spread_over_cells,
)
from cnr_store.errors import BadInput
from cnr_store.types import Affine, AffineBits, Float32s, Precision
from tests.support.encoders import lattice_codes, lattice_floats

POPULATION, DIM = 30_000, 8


def normal(seed: int = 0, rows: int = POPULATION) -> Float32s:
    return np.random.default_rng(seed).standard_normal((rows, DIM), dtype=np.float32)


def zipf_norms(seed: int = 0, rows: int = POPULATION, exponent: float = 0.3) -> Float32s:
    """Norms fall with a power of the rank, in an order that means nothing."""
    ranks = np.random.default_rng(seed).permutation(rows) + 1.0
    return normal(seed, rows) * (30.0 * ranks**-exponent)[:, None].astype(np.float32)


def student(seed: int = 0, rows: int = POPULATION) -> Float32s:
    return np.random.default_rng(seed).standard_t(5.0, (rows, DIM)).astype(np.float32)


def coverage(rows: Float32s, bits: AffineBits, count: int, tries: int) -> tuple[float, float]:
    """How often the whole table's ratio is inside the interval of a sample of so many rows, and its median width."""
    rng = np.random.default_rng(7)
    first = rows[rng.choice(len(rows), 2000, replace=False)]
    num_bins, ratio = REFERENCE_SETTINGS[bits]
    targets = row_errors(rows, Affine(bits, search="greedy", num_bins=num_bins, ratio=ratio))
    errors = scale.lattice_row_errors(rows, scale.choose_scale(first, Precision(bits=bits)))
    truth = errors.sum() / targets.sum()
    held, widths = 0, []
    for _ in range(tries):
        sample = rng.choice(len(rows), count, replace=False)
        ratio = errors[sample].sum() / targets[sample].sum()
        widths.append(ratio_half_width(errors[sample], targets[sample], len(rows)))
        held += abs(truth - ratio) <= widths[-1] * ratio
    return held / tries, float(np.median(widths))


@pytest.mark.parametrize(
    ("table", "at_least"), [(normal, 0.92), (student, 0.9), (zipf_norms, 0.86)], ids=["normal", "student", "zipf"]
)
@pytest.mark.parametrize("bits", [2, 4])
def test_the_interval_holds_about_as_often_as_it_says(
    table: Callable[[], Float32s], bits: AffineBits, at_least: float
) -> None:
    held, width = coverage(table(), bits, count=1000, tries=400)
    assert at_least <= held <= 0.99
    assert 0 < width < 0.3


def test_the_interval_is_wide_but_too_narrow_where_few_rows_have_the_error() -> None:
    """The limit that the docstring names: a sample gives no information about rows outside it."""
    held, width = coverage(zipf_norms(exponent=0.5), 4, count=4000, tries=200)
    assert 0.6 < held < 0.93
    assert width > 0.1


@pytest.mark.parametrize("table", [normal, zipf_norms], ids=["normal", "zipf"])
def test_a_bootstrap_says_the_same_as_the_delta_method(table: Callable[[], Float32s]) -> None:
    rows = table()[:2000]
    target = row_errors(rows, Affine(4, search="greedy", num_bins=45, ratio=0.2))
    errors = scale.lattice_row_errors(rows, scale.choose_scale(rows, Precision(bits=4)))
    rng = np.random.default_rng(3)

    drawn = rng.integers(0, len(rows), (2000, len(rows)))
    ratios = errors[drawn].sum(axis=1) / target[drawn].sum(axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))

    by_bootstrap = (high - low) / 2 / (errors.sum() / target.sum())
    assert ratio_half_width(errors, target, None) == pytest.approx(by_bootstrap, rel=0.15)


def test_a_table_that_was_looked_at_in_whole_is_known() -> None:
    rows = zipf_norms(rows=SAMPLE_ROWS)

    choice = measure_scale(RowSample(rows, "float32"), "float32", Precision(bits=4))

    assert choice.relative_half_width == 0.0
    assert choice.sample_rows == SAMPLE_ROWS
    assert choice.scale == scale.choose_scale(rows, Precision(bits=4))
    assert choice.mse == pytest.approx(scale.lattice_mse(rows, choice.scale))


def test_rows_of_a_table_without_a_known_size_are_never_all() -> None:
    choice = measure_scale(RowSample(normal(rows=5000), "float32", is_all=False), "float32", Precision(bits=4))
    assert 0.0 < choice.relative_half_width < 0.05


class Counted:
    """A table of which is known what was read."""

    def __init__(self, values: Float32s) -> None:
        self.values, self.shape, self.reads = values, values.shape, [np.empty(0, np.int64)]

    def __getitem__(self, rows: np.ndarray) -> Float32s:
        self.reads.append(rows)
        return self.values[rows]


@pytest.mark.parametrize("table", [normal, zipf_norms], ids=["normal", "zipf"])
def test_a_sample_is_read_once_and_is_as_large_for_rows_of_all_kinds(table: Callable[..., Float32s]) -> None:
    counted = Counted(table(rows=200_000))
    sample = RowSample(counted, "float32")

    choice = measure_scale(sample, "float32", Precision(bits=2))
    sample.rows()

    read = np.concatenate(counted.reads)
    assert choice.sample_rows == len(read) == len(np.unique(read)) == SAMPLE_ROWS


@pytest.mark.parametrize(
    ("dim", "count"), [(1, SAMPLE_ROWS), (128, SAMPLE_ELEMENTS // 128), (4 * SAMPLE_ELEMENTS, LEAST_ROWS)]
)
def test_wide_rows_are_sampled_less(dim: int, count: int) -> None:
    table = np.broadcast_to(np.float32(0), (3 * SAMPLE_ROWS, dim))
    assert RowSample(table, "float32").rows().shape == (count, dim)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_scales_of_tables_measured_together_are_those_of_each(bits: AffineBits) -> None:
    rng = np.random.default_rng(2)
    spoiled = normal(rows=90)
    spoiled[3, 1], spoiled[70, 0] = np.nan, np.inf
    tables = [
        normal(rows=1), normal(rows=63) * np.float32(1e-20), student(rows=200) * np.float32(1e15), spoiled,
        np.zeros((5, DIM), np.float32), np.full((7, DIM), -0.25, np.float32), np.empty((0, DIM), np.float32),
        zipf_norms(rows=5_000), rng.choice(np.float32([-0.3, 0.0, 0.1]), (130, DIM)),
    ]  # fmt: skip
    samples = [RowSample(rows, "float32") for rows in tables]
    held = [None, None, 1e14, None, 0.5, None, None, 0.01, 0.1]

    found = measure_scales(samples, "float32", bits, held=held)

    assert found == [
        measure_scale(one, "float32", Precision(bits=bits), held=step) for one, step in zip(samples, held, strict=True)
    ]


def test_what_cannot_be_known_better_is_said() -> None:
    """Where rows differ much the half-width is above the tolerance, and the caller sees it."""
    choice = measure_scale(RowSample(zipf_norms(rows=150_000), "float32"), "float32", Precision(bits=2))
    assert choice.relative_half_width > 2 * scale.TOLERANCE


@pytest.mark.parametrize("table", [normal, student, zipf_norms], ids=["normal", "student", "zipf"])
def test_a_measured_scale_meets_the_tables_error_within_its_interval(
    table: Callable[..., Float32s],
) -> None:
    rows = table(rows=120_000)
    choice = measure_scale(RowSample(rows, "float32", seed=1), "float32", Precision(bits=4))
    settings = REFERENCE_SETTINGS[4]
    target = row_errors(rows, Affine(4, search="greedy", num_bins=settings[0], ratio=settings[1])).mean() / DIM

    ratio = scale.lattice_mse(rows, choice.scale) / target

    assert abs(ratio - 1) <= 2 * choice.relative_half_width + 0.03  # 3 %: greedy settings of another sample


def test_an_empty_table_is_known() -> None:
    choice = measure_scale(RowSample(np.empty((0, 4), np.float32), "float32"), "float32", Precision(bits=8))
    assert (choice.sample_rows, choice.mse, choice.relative_half_width) == (0, 0.0, 0.0)


@pytest.mark.parametrize("precision", [Precision(scale=0.01), Precision(max_error=0.005)])
def test_a_given_scale_is_no_estimate(precision: Precision) -> None:
    rows = normal(rows=100)
    choice = measure_scale(RowSample(rows, "float32"), "float32", precision)
    assert choice == ScaleChoice(float(np.float32(0.01)), 100, scale.lattice_mse(rows, 0.01), 0.0)


def test_rows_that_escape_do_not_count() -> None:
    rows = normal(rows=100)
    rows[7] = 1e30
    sample = RowSample(rows, "float32")
    assert measure_scale(sample, "float32", Precision(scale=0.5), may_escape=True).sample_rows == 99
    with pytest.raises(BadInput, match="2\\^21"):
        measure_scale(sample, "float32", Precision(scale=0.5))


def test_rows_that_a_scale_rounds_to_zero_are_counted() -> None:
    rows = normal(rows=100)
    rows[3] = 0.0
    assert measure_scale(RowSample(rows, "float32"), "float32", Precision(bits=2)).zeroed == 0.0
    rows[7] = 1e6
    assert measure_scale(RowSample(rows, "float32"), "float32", Precision(bits=8)).zeroed == 0.98


def test_rows_beyond_every_scale_do_not_count_if_they_escape() -> None:
    """A regression: with bits= such a row was refused although it was to escape."""
    rows = normal(rows=100)
    rows[7] = 3e38
    sample = RowSample(rows, "float32")
    assert measure_scale(sample, "float32", Precision(bits=8), may_escape=True).sample_rows == 99
    with pytest.raises(BadInput, match=r"need codes beyond 2\^21; use float_bits"):
        measure_scale(sample, "float32", Precision(bits=8))


def test_half_precision_tables_are_measured_as_the_numbers_they_are() -> None:
    rows = normal(rows=500).astype(np.float16)
    halves = measure_scale(RowSample(rows, "float16"), "float16", Precision(bits=4))
    assert halves.scale == scale.choose_scale(rows.astype(np.float32), Precision(bits=4))


def test_shards_are_pooled_by_their_elements() -> None:
    one, other = ScaleChoice(0.1, 100, 1.0, 0.1), ScaleChoice(0.3, 50, 4.0, 0.2)

    both = pooled([one, other], [300, 100])

    assert both.scale == pytest.approx(math.sqrt((0.01 * 300 + 0.09 * 100) / 400))
    assert both.sample_rows == 150
    assert both.mse == pytest.approx((300 + 400) / 400)
    assert both.relative_half_width == pytest.approx(math.hypot(300 * 0.1, 400 * 0.2) / 700)
    assert pooled([one], [300]) == one
    assert pooled([one, ScaleChoice(0.7, 0, 0.0, 0.0)], [300, 0]).scale == pytest.approx(0.1)


@given(st.floats(1e-12, 1e6), st.integers(0, 2**40))
def test_one_shard_alone_keeps_its_choice_to_the_last_bit(mse: float, elements: int) -> None:
    """Its mean error was multiplied and divided by its elements, which changes the last bit of every fourth number."""
    choice = ScaleChoice(0.1, 500, mse, 0.02)
    assert pooled([choice], [elements]) == choice


@pytest.mark.parametrize("table", [normal, student, zipf_norms], ids=["normal", "student", "zipf"])
@pytest.mark.parametrize(("bits", "finer"), [(2, 3), (3, 4), (4, 8)])
def test_a_restored_table_gives_the_next_scale_if_spread_over_its_cells(
    table: Callable[..., Float32s], bits: AffineBits, finer: AffineBits
) -> None:
    rows = table(rows=4000)
    held = scale.choose_scale(rows, Precision(bits=bits))
    wanted = scale.choose_scale(rows, Precision(bits=finer))
    restored = lattice_floats(lattice_codes(rows, held), held)

    spread = measure_scale(RowSample(restored, "float32"), "float32", Precision(bits=finer), held=held).scale
    as_it_is = scale.choose_scale(restored, Precision(bits=finer))

    assert abs(math.log2(spread / wanted)) < 0.3
    assert bits == 4 or abs(math.log2(spread / wanted)) < abs(math.log2(as_it_is / wanted))


def test_rows_off_the_lattice_and_rows_of_zeros_are_not_spread() -> None:
    rows = np.array([[0.5, 1.0], [0.3, 1.0], [0.0, 0.0]], np.float32)

    spread = spread_over_cells(rows, 0.5)

    assert (spread[0] != rows[0]).all()
    assert np.abs(spread[0] - rows[0]).max() <= 0.25
    np.testing.assert_array_equal(spread[1:], rows[1:])
    np.testing.assert_array_equal(spread, spread_over_cells(rows, 0.5))
