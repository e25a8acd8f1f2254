from __future__ import annotations

import numpy as np
import pytest

from cnr_store.encodings import kernels, row_kernels, widths
from cnr_store.encodings.digest import column_multipliers
from cnr_store.errors import BadDtype, BadInput
from cnr_store.types import TableDtype
from tests.support import encoding_reference as reference
from tests.support.encoders import float_bits_codes, float_bits_floats

LARGEST = np.finfo(np.float32).max
SPECIAL = np.array(
    [
        0,
        0x80000000,
        1,
        0x80000001,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x3F808000,
        0x3F818000,
        0xBF808000,
        0x007FFFFF,
    ],
    np.uint32,
)
NANS = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FABCDEF], np.uint32)


def random_bits(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)


def test_23_mantissa_bits_keep_every_bit_of_nans_and_signed_zeros_too() -> None:
    values = np.concatenate([SPECIAL, NANS, random_bits(10_000)]).view(np.float32)

    back = float_bits_floats(float_bits_codes(values, 23), 23)

    np.testing.assert_array_equal(back.view(np.uint32), values.view(np.uint32))


def test_23_mantissa_bits_are_the_ordered_image_of_the_bits() -> None:
    bits = np.concatenate([SPECIAL, NANS, random_bits(1000)]).view(np.int32)

    codes = float_bits_codes(bits.view(np.float32), 23)

    np.testing.assert_array_equal(codes, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    assert float_bits_codes(np.array([-0.0, 0.0], np.float32), 23).tolist() == [-1, 0]


@pytest.mark.parametrize("mantissa_bits", [0, 1, 7, 12, 22, 23])
def test_codes_are_ordered_as_the_floats(mantissa_bits: int) -> None:
    values = np.concatenate([SPECIAL, random_bits(10_000)]).view(np.float32)
    values = np.sort(values[~np.isnan(values)])

    codes = float_bits_codes(values, mantissa_bits).astype(np.int64)

    # Zeros of both signs compare equal, so their codes may come in any order.
    steps = np.diff(codes)[np.diff(values) > 0]
    assert (steps >= 0).all()


@pytest.mark.parametrize("mantissa_bits", [0, 1, 7, 8, 22])
def test_a_finite_value_never_becomes_infinite_and_infinity_stays(mantissa_bits: int) -> None:
    values = np.array([LARGEST, -LARGEST, np.nextafter(LARGEST, np.float32(0)), np.inf, -np.inf], np.float32)

    back = float_bits_floats(float_bits_codes(values, mantissa_bits), mantissa_bits)

    assert np.isfinite(back[:3]).all()
    assert back[0] == -back[1] > 0
    np.testing.assert_array_equal(back[3:], [np.inf, -np.inf])


def test_seven_bits_are_the_nearest_bfloat16() -> None:
    torch = pytest.importorskip("torch", reason="torch is the reference for bfloat16")
    bits = np.concatenate([SPECIAL, random_bits(50_000)])
    bits = bits[((bits & 0x7FFFFFFF) <= 0x7F7F7FFF) | ((bits & 0x7FFFFFFF) == 0x7F800000)]
    values = bits.view(np.float32)

    back = float_bits_floats(float_bits_codes(values, 7), 7)

    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(back.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("mantissa_bits", [0, 1, 7, 15, 22])
def test_relative_error_is_half_a_step(mantissa_bits: int) -> None:
    values = np.random.default_rng(1).lognormal(0, 10, 10_000).astype(np.float32)

    back = float_bits_floats(float_bits_codes(values, mantissa_bits), mantissa_bits)

    assert np.max(np.abs(back - values) / values) <= 2.0 ** -(mantissa_bits + 1)


@pytest.mark.parametrize("mantissa_bits", [0, 1, 2, 4, 7])
def test_nothing_but_a_subnormal_becomes_zero_and_zero_stays(mantissa_bits: int) -> None:
    """A second moment that a restore turned into zero would let Adam divide by its epsilon."""
    normal = 2.0 ** np.arange(-126, 128, dtype=np.float64)
    values = np.concatenate([normal, np.nextafter(normal.astype(np.float32), np.float32(np.inf))]).astype(np.float32)
    subnormal = (np.float32(2.0**-149) * np.arange(1, 1 << 12, dtype=np.float32) * np.float32(2048)).astype(np.float32)

    back = float_bits_floats(float_bits_codes(values, mantissa_bits), mantissa_bits)
    small = float_bits_floats(float_bits_codes(subnormal, mantissa_bits), mantissa_bits)

    assert (back >= 2.0**-126).all()
    assert (small <= 2.0**-126).all()
    assert float_bits_floats(float_bits_codes(np.zeros(1, np.float32), mantissa_bits), mantissa_bits)[0] == 0.0


def test_rounding_ties_go_to_even_and_are_symmetric() -> None:
    # One and three half steps of m = 7 above 1.
    values = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)

    codes = float_bits_codes(values, 7)

    np.testing.assert_array_equal(codes, [0x3F80, 0x3F82])
    np.testing.assert_array_equal(float_bits_codes(-values, 7), -1 - codes.astype(np.int32))


def test_codes_of_seven_bits_fit_int16_and_of_eight_do_not() -> None:
    values = np.array([np.inf, -np.inf], np.float32)

    assert float_bits_codes(values, 7).dtype == np.int16
    np.testing.assert_array_equal(float_bits_floats(float_bits_codes(values, 7), 7), values)
    assert widths.code_dtype(8) == np.int32


def test_nan_is_marked_with_its_row_below_23_bits() -> None:
    values = np.ones((4, 2), np.float32)
    values[2, 1] = np.nan
    flags = np.zeros(4, np.uint8)

    _, first_bad = kernels.float_bits_encode(values.view(np.int32), 16, np.empty((4, 2), np.int32), flags)

    assert first_bad == 2
    assert flags.tolist() == [0, 0, 255, 0]


@pytest.mark.parametrize(("dtype", "mantissa_bits"), [("float16", 10), ("bfloat16", 7)])
def test_every_16_bit_pattern_is_kept_exactly(dtype: TableDtype, mantissa_bits: int) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    block = patterns.view(np.float16) if dtype == "float16" else patterns

    codes = float_bits_codes(block, mantissa_bits, dtype=dtype)

    assert codes.dtype == np.int16
    assert len(np.unique(codes)) == 1 << 16
    back = float_bits_floats(codes, mantissa_bits, dtype=dtype)
    np.testing.assert_array_equal(back.view(np.uint16), patterns)


def test_bfloat16_codes_equal_the_seven_bit_codes_of_the_widened_floats() -> None:
    patterns = np.arange(0x7F81, dtype=np.uint16)
    wide = (patterns.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(float_bits_codes(patterns, 7, dtype="bfloat16"), float_bits_codes(wide, 7))


@pytest.mark.parametrize(
    ("mantissa_bits", "dtype"), [(-1, "float32"), (24, "float32"), (7, "float16"), (23, "bfloat16")]
)
def test_mantissa_bits_that_the_dtype_has_not_are_refused(mantissa_bits: int, dtype: TableDtype) -> None:
    with pytest.raises(BadInput, match="mantissa_bits"):
        widths.bit_shift(mantissa_bits, dtype)


def test_the_wrong_carrier_is_refused() -> None:
    with pytest.raises(BadDtype, match="float32"):
        float_bits_codes(np.zeros(3, np.float16), 23)


@pytest.mark.parametrize("shift", [0, 1, 11, 16, 22])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 5), (33, 17)])
def test_encode_and_decode_kernels_equal_reference(shape: tuple[int, int], shift: int) -> None:
    bits = random_bits(shape[0] * shape[1], seed=shift).reshape(shape).view(np.int32)
    out, flags = np.full(shape, 99, np.int32), np.zeros(shape[0], np.uint8)

    max_fold, first_bad = kernels.float_bits_encode(bits, shift, out, flags)

    expected, bad = reference.float_codes(bits, shift)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(flags == 255, bad)
    assert first_bad == (int(np.argmax(bad)) if bad.any() else -1)
    fold = int(np.where(expected < 0, -1 - expected.astype(np.int64), expected).max(initial=0))
    assert (max_fold <= 32767) == (fold <= 32767)
    back = np.empty(shape, np.int32)
    kernels.float_bits_decode(out, shift, back)
    np.testing.assert_array_equal(back, reference.float_patterns(expected, shift, 32))


@pytest.mark.parametrize("shift", [0, 16])
@pytest.mark.parametrize("mirror_dtype", [np.int16, np.int32])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 5), (33, 17)])
def test_delta_kernel_equals_reference(shape: tuple[int, int], shift: int, mirror_dtype: type) -> None:
    n, d = shape
    rng = np.random.default_rng(n)
    bits = random_bits(n * d, seed=7).reshape(shape).view(np.int32)
    rows = np.sort(rng.choice(2 * n + 1, n, replace=False)).astype(np.int64) + 50
    limits = np.iinfo(mirror_dtype)
    mirror = rng.integers(limits.min, limits.max, (2 * n + 1, d), endpoint=True).astype(mirror_dtype)
    multipliers = column_multipliers(5, 5 + d)
    out, flags = np.zeros(shape, np.int32), np.zeros(n, np.uint8)

    max_fold, max_code, _, change = kernels.float_bits_delta(bits, rows, mirror, 50, shift, multipliers, out, flags)

    codes, bad = reference.float_codes(bits, shift)
    expected = reference.delta(codes, bad, rows, mirror, 50, multipliers)
    np.testing.assert_array_equal(out, reference.wrapped(expected.differences))
    np.testing.assert_array_equal(flags, expected.flags)
    assert int(change) == expected.digest_change
    assert (max_fold <= 32767) == bool((np.abs(out.astype(np.int64) + 0.5) < 32768).all())
    assert (max_code <= 32767) == bool((np.abs(expected.codes.astype(np.int64) + 0.5) < 32768).all())


def test_wrapped_differences_add_back_to_the_new_codes() -> None:
    old = float_bits_codes(np.array([[-LARGEST], [np.inf]], np.float32), 23)
    new_values = np.array([[LARGEST], [-np.inf]], np.float32)
    out, rows = np.zeros((2, 1), np.int32), np.arange(2, dtype=np.int64)

    kernels.float_bits_delta(
        new_values.view(np.int32), rows, old, 0, 0, column_multipliers(0, 1), out, np.zeros(2, np.uint8)
    )
    row_kernels.add_codes_wrapping(old, rows, 0, out)

    np.testing.assert_array_equal(float_bits_floats(old, 23), new_values)


def test_16_bit_delta_kernel_equals_reference() -> None:
    rng = np.random.default_rng(8)
    bits = rng.integers(-(2**15), 2**15, (40, 3)).astype(np.int16)
    mirror = rng.integers(-(2**15), 2**15, (40, 3)).astype(np.int16)
    rows = np.arange(40, dtype=np.int64)
    out, flags = np.zeros((40, 3), np.int32), np.zeros(40, np.uint8)

    max_fold, *_ = kernels.float_bits_delta(bits, rows, mirror, 0, 0, column_multipliers(0, 3), out, flags)

    codes, bad = reference.float_codes(bits, 0)
    expected = reference.delta(codes, bad, rows, mirror, 0, column_multipliers(0, 3))
    np.testing.assert_array_equal(out, expected.differences)
    assert max_fold > 32767


def test_decode_in_the_memory_of_the_codes() -> None:
    values = random_bits(300, seed=9).view(np.float32)
    codes = float_bits_codes(values, 23).reshape(-1, 3)

    kernels.float_bits_decode(codes, 0, codes)

    np.testing.assert_array_equal(codes.reshape(-1), values.view(np.int32))
