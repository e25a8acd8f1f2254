from __future__ import annotations

import math

import numpy as np
import pytest

from cnr_store.encodings import affine, choose, packing
from cnr_store.types import Affine, AffineBits, Float32s


def gauss(num_rows: int, dim: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((num_rows, dim)).astype(np.float32)


def sample_mse(sample: np.ndarray, encoding: Affine) -> float:
    errors = affine.row_errors(sample, encoding)
    return float(np.sum(errors)) / (len(errors) * sample.shape[1]) if errors.size else 0.0


def test_a_sample_is_distinct_ascending_and_repeatable() -> None:
    rows = choose.sample_rows(10**9, 5000, seed=3)
    assert (np.diff(rows) > 0).all()
    assert rows[0] >= 0
    assert rows[-1] < 10**9
    np.testing.assert_array_equal(rows, choose.sample_rows(10**9, 5000, seed=3))
    assert not np.array_equal(rows, choose.sample_rows(10**9, 5000, seed=4))


def test_a_sample_is_spread_over_the_table() -> None:
    counts = np.histogram(choose.sample_rows(100_000, 10_000, seed=0), bins=10, range=(0, 100_000))[0]
    assert counts.min() > 800


def test_a_small_table_is_its_own_sample() -> None:
    assert choose.sample_rows(3, 3, seed=0).tolist() == [0, 1, 2]
    assert choose.sample_rows(0, 3, seed=0).tolist() == []


def test_sample_error_falls_by_about_six_decibels_per_bit() -> None:
    errors = [sample_mse(gauss(500, 64), Affine(bits=bits)) for bits in packing.WIDTHS]  # type: ignore[arg-type]
    assert errors[0] == pytest.approx(0.11, rel=0.1)
    assert errors[2] == pytest.approx(10 ** (-21.8 / 10), rel=0.05)
    assert errors[3] < errors[2] / 200


def test_sample_error_leaves_out_rows_that_cannot_be_encoded() -> None:
    sample = gauss(100, 16)
    error = sample_mse(sample[:99], Affine(bits=4))
    sample[99, 3] = np.nan
    assert sample_mse(sample, Affine(bits=4)) == error
    assert sample_mse(sample[99:], Affine(bits=4)) == 0.0


@pytest.mark.parametrize("bits", packing.WIDTHS)
def test_reference_settings_have_about_the_error_of_the_best_tried(bits: AffineBits) -> None:
    samples = [gauss(512, 16), gauss(256, 64), np.random.default_rng(0).uniform(-1, 1, (512, 16)).astype(np.float32)]

    def error(sample: Float32s, num_bins: int, ratio: float) -> float:
        return sample_mse(sample, Affine(bits=bits, search="greedy", num_bins=num_bins, ratio=ratio))

    for one in samples:
        best = min(error(one, bins, share) for bins in (10, 25, 50, 100, 200) for share in (0.1, 0.2, 0.5, 1.0))
        assert error(one, *choose.REFERENCE_SETTINGS[bits]) <= 1.02 * best


@pytest.mark.parametrize(
    ("restores", "bits"), [(0, 2), (1, 2), (1.5, 3), (3, 3), (4, 4), (20, 4), (21, 8), (math.inf, 8)]
)
def test_code_width_follows_expected_restores(restores: float, bits: int) -> None:
    assert choose.expected_bits(restores) == bits
