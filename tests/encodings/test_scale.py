from __future__ import annotations

import numpy as np
import pytest

from cnr_store.encodings import kernels, scale
from cnr_store.encodings.lattice import SMALLEST_SCALE
from cnr_store.errors import BadInput
from cnr_store.types import MAX_CODE, AffineBits, Precision
from tests.support.encoders import affine_mse, lattice_codes, lattice_floats


def normal_rows(n: int = 512, d: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d), dtype=np.float32) * np.float32(0.1)


def test_a_given_scale_is_taken_as_fp32() -> None:
    assert scale.choose_scale(normal_rows(), Precision(scale=0.1)) == float(np.float32(0.1))


@pytest.mark.parametrize("max_error", [0.01, 1e-3, 3e-5, 1 / 3])
def test_no_element_errs_by_more_than_max_error(max_error: float) -> None:
    rows = normal_rows()

    step = scale.choose_scale(rows, Precision(max_error=max_error))

    assert step <= 2 * max_error < float(np.nextafter(np.float32(step), np.float32(np.inf)))
    assert step == float(np.float32(step))
    errors = np.abs(lattice_floats(lattice_codes(rows, step), step).astype(np.float64) - rows)
    assert errors.max() <= max_error + np.abs(rows).max() * 2.0**-23


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("unit", [1.0, 1e-12, 1e15])
def test_bits_meets_the_error_of_check_n_run_rows_within_half_a_percent(bits: AffineBits, unit: float) -> None:
    rows = normal_rows() * np.float32(unit)
    target = affine_mse(rows, bits)

    found = scale.lattice_mse(rows, scale.choose_scale(rows, Precision(bits=bits)))

    assert 0.995 * target <= found <= target


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("unit", [1e-36, 1e-40, 1e-44])
def test_rows_that_need_a_finer_scale_than_there_is_get_the_finest(bits: AffineBits, unit: float) -> None:
    """A regression: the search for a scale of such rows had no end, and so had the save."""
    rows = (normal_rows().astype(np.float64) * unit).astype(np.float32)

    step = scale.choose_scale(rows, Precision(bits=bits))

    assert step >= SMALLEST_SCALE
    assert step == SMALLEST_SCALE or scale.lattice_mse(rows, step) <= affine_mse(rows, bits)


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (37, 7), (64, 130)])
@pytest.mark.parametrize("step", [1e-4, 0.03, 5.0])
def test_row_errors_of_a_lattice_are_those_of_what_is_decoded(shape: tuple[int, int], step: float) -> None:
    rows = normal_rows(*shape)
    decoded = lattice_floats(lattice_codes(rows, step), step)
    expected = np.square(decoded.astype(np.float64) - rows).sum(axis=1)
    np.testing.assert_allclose(scale.lattice_row_errors(rows, step), expected, rtol=1e-12)
    np.testing.assert_allclose(kernels.lattice_squared_error(rows, step), expected.sum(), rtol=1e-12)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(3, 16), (512, 16), (37, 130)])
def test_a_search_by_the_kernel_finds_the_scale_of_decoded_rows(
    bits: AffineBits, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(1).standard_t(2.0, shape).astype(np.float32)
    found = scale.choose_scale(rows, Precision(bits=bits))

    def decoded_mse(sample: np.ndarray, step: float) -> float:
        return float(np.mean(np.square(lattice_floats(lattice_codes(sample, step), step).astype(np.float64) - sample)))

    monkeypatch.setattr(scale, "_mse", decoded_mse)

    assert found == scale.choose_scale(rows, Precision(bits=bits))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["normal", "student", "few values", "mostly zero"])
def test_corrections_find_about_the_scale_that_a_bisection_finds(bits: AffineBits, kind: str) -> None:
    rows = normal_rows()
    if kind == "student":
        rows = np.random.default_rng(1).standard_t(2.0, (512, 16)).astype(np.float32)
    elif kind == "few values":
        rows = np.random.default_rng(2).choice(np.float32([-0.3, 0.0, 0.1, 0.7]), (300, 16))
    elif kind == "mostly zero":
        rows[8:] = 0.0
    target = affine_mse(rows, bits)
    largest = float(np.abs(rows).max())

    found = scale.choose_scale(rows, Precision(bits=bits))
    searched = scale._searched_scale(rows, target, (12 * target) ** 0.5, largest / MAX_CODE, largest)

    assert scale.lattice_mse(rows, found) <= target
    assert scale.lattice_mse(rows, found) >= 0.995 * min(target, scale.lattice_mse(rows, searched))


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (37, 7)])
@pytest.mark.parametrize("spoiled", [None, np.inf, -np.inf, np.nan])
def test_the_largest_magnitude_is_that_of_numpy(shape: tuple[int, int], spoiled: float | None) -> None:
    rows = -np.abs(normal_rows(*shape))
    if spoiled is not None:
        rows[-1:, -1] = spoiled
    found = np.uint32(kernels.largest_magnitude(rows.view(np.uint32))).view(np.float32)

    np.testing.assert_equal(found, np.max(np.abs(rows), initial=np.float32(0)))


def test_more_bits_give_a_finer_scale() -> None:
    rows = normal_rows(n=256)
    scales = [scale.choose_scale(rows, Precision(bits=bits)) for bits in (2, 3, 4, 8)]
    assert scales == sorted(scales, reverse=True)


def test_the_scale_follows_the_unit_of_the_values_exactly_by_powers_of_two() -> None:
    rows = normal_rows(n=256)
    one, other = (scale.choose_scale(rows * np.float32(f), Precision(bits=4)) for f in (1.0, 2.0**-20))
    assert other == one * 2.0**-20


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_min_max_rows_ask_for_no_finer_a_scale_than_greedy_ones(bits: AffineBits) -> None:
    rows = normal_rows()
    rough = scale.minmax_scale(rows, bits)
    assert (
        scale.choose_scale(rows, Precision(bits=bits))
        <= rough * 1.02
        <= 2.5 * scale.choose_scale(rows, Precision(bits=bits))
    )
    assert scale.minmax_scale(rows[:0], bits) == 0.0


def test_heavy_tailed_rows_are_met_too() -> None:
    rows = np.random.default_rng(1).standard_t(2.0, (512, 16)).astype(np.float32)
    target = affine_mse(rows, 2)
    assert 0.995 * target <= scale.lattice_mse(rows, scale.choose_scale(rows, Precision(bits=2))) <= target


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (np.empty((0, 8), np.float32), 1 / scale.FALLBACK_STEPS),
        (np.zeros((10, 8), np.float32), 1 / scale.FALLBACK_STEPS),
        (np.full((10, 8), 0.5, np.float32), 0.5 / scale.FALLBACK_STEPS),
    ],
    ids=["empty", "zeros", "constant"],
)
def test_a_sample_that_says_nothing_gives_the_documented_scale(rows: np.ndarray, expected: float) -> None:
    assert scale.choose_scale(rows, Precision(bits=8)) == expected


def test_rows_that_are_not_finite_do_not_count() -> None:
    rows = normal_rows(n=256)
    spoiled = np.concatenate([rows, np.full((2, 32), np.nan, np.float32), np.full((1, 32), np.inf, np.float32)])
    assert scale.choose_scale(spoiled, Precision(bits=4)) == scale.choose_scale(rows, Precision(bits=4))


@pytest.mark.parametrize("precision", [Precision(), Precision(bits=4, scale=0.1)])
def test_exactly_one_target_is_asked_for(precision: Precision) -> None:
    with pytest.raises(BadInput, match="exactly one"):
        scale.choose_scale(normal_rows(), precision)


@pytest.mark.parametrize("precision", [Precision(scale=0.0), Precision(max_error=-1.0), Precision(max_error=np.nan)])
def test_targets_that_are_no_positive_numbers_are_refused(precision: Precision) -> None:
    with pytest.raises(BadInput, match="lattice scale"):
        scale.choose_scale(normal_rows(), precision)


def test_values_beyond_the_codes_are_refused_with_the_scale_to_use() -> None:
    rows = np.array([[1.0, 3.0 * MAX_CODE]], np.float32)

    with pytest.raises(BadInput, match="at least 3 ") as caught:
        scale.choose_scale(rows, Precision(scale=1.0))

    assert caught.value.found == 3.0 * MAX_CODE
    assert scale.choose_scale(rows, Precision(scale=3.0)) == 3.0
