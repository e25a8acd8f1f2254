from __future__ import annotations

import numpy as np
import pytest

from cnr_store.encodings import kernels, lattice, row_kernels, widths
from cnr_store.encodings.digest import column_multipliers
from cnr_store.errors import BadDtype, BadInput
from cnr_store.runtime.fences import AHEAD
from cnr_store.types import MAX_CODE, TableDtype
from tests.support import encoding_reference as reference
from tests.support.encoders import lattice_codes, lattice_floats
from tests.support.ties import SCALES, lattice_ties

SHAPES = [(0, 4), (1, 1), (1, 64), (3, 7), (17, 15), (33, 16), (5, 65)]


def random_values(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_encode_kernel_equals_reference(shape: tuple[int, int], dtype: type) -> None:
    values = random_values(shape)
    out, flags = np.full(shape, 99, dtype), np.zeros(shape[0], np.uint8)

    max_abs, first_bad = kernels.lattice_encode(values, np.float32(0.003), out, flags)

    expected, _ = reference.lattice_codes(values, 0.003)
    np.testing.assert_array_equal(out, expected)
    assert max_abs == np.abs(expected).max(initial=0)
    assert first_bad == -1
    assert not flags.any()


def test_ties_round_to_even() -> None:
    values = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], np.float32)
    np.testing.assert_array_equal(lattice_codes(values, 1.0), [[0, 2, 2, 0, -2, -2]])


@pytest.mark.parametrize("dim", [1, 8, 13])
@pytest.mark.parametrize("scale", SCALES)
def test_every_kernel_rounds_exact_ties_to_the_even_code(scale: np.float32, dim: int) -> None:
    for largest, dtype in ((32_767, np.int16), (MAX_CODE, np.int32)):
        values, expected = lattice_ties(scale, dim, largest=largest)
        rows = np.arange(len(values), dtype=np.int64)
        multipliers = column_multipliers(0, dim)
        out, flags = np.empty(values.shape, dtype), np.zeros(len(values), np.uint8)

        kernels.lattice_encode(values, scale, out, flags)
        by_reference, bad = reference.lattice_codes(values, float(scale))

        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(by_reference, expected)
        np.testing.assert_array_equal(lattice_codes(values, float(scale)), expected)
        assert not flags.any()
        for mirror_dtype in (np.int16, np.int32):
            mirror = np.random.default_rng(dim).integers(-300, 300, values.shape).astype(mirror_dtype)
            mirror[::3] = np.clip(expected[::3], -32_768, 32_767)
            differences, flags = np.empty(values.shape, np.int32), np.zeros(len(values), np.uint8)

            *_, first_bad, change = kernels.lattice_delta(
                values, rows, mirror, 0, scale, multipliers, differences, flags
            )

            wanted = reference.delta(by_reference, bad, rows, mirror, 0, multipliers)
            np.testing.assert_array_equal(mirror + differences, expected)
            np.testing.assert_array_equal(flags, wanted.flags)
            assert (int(change), first_bad) == (wanted.digest_change, -1)


def test_division_is_true_fp32_division() -> None:
    # Multiplying by the reciprocal gives another code for some of these; the definition divides.
    scale = np.float32(0.37)
    codes = np.arange(1 << 18)
    values = ((codes + 0.5) * np.float64(scale)).astype(np.float32).reshape(-1, 8)
    by_reciprocal = np.rint(values * (np.float32(1) / scale)).astype(np.int32)

    found = lattice_codes(values, float(scale))

    np.testing.assert_array_equal(found, np.rint(values / scale).astype(np.int32))
    assert (found != by_reciprocal).any()


def test_bad_rows_are_flagged_zeroed_and_left_out_of_the_maximum() -> None:
    values = np.ones((5, 3), np.float32)
    values[1, 2] = np.nan
    values[2, 0] = -np.inf
    values[4, 1] = np.float32(MAX_CODE + 1)
    out, flags = np.full((5, 3), 7, np.int32), np.zeros(5, np.uint8)

    max_abs, first_bad = kernels.lattice_encode(values, np.float32(1), out, flags)

    assert first_bad == 1
    assert max_abs == 1
    np.testing.assert_array_equal(flags, [0, 255, 255, 0, 255])
    np.testing.assert_array_equal(out, [[1] * 3, [0] * 3, [0] * 3, [1] * 3, [0] * 3])


def test_the_largest_code_is_stored_and_the_next_is_refused() -> None:
    out, flags = np.zeros((2, 1), np.int32), np.zeros(2, np.uint8)

    _, first_bad = kernels.lattice_encode(np.array([[MAX_CODE], [MAX_CODE + 1]], np.float32), np.float32(1), out, flags)

    assert out[0, 0] == MAX_CODE
    assert first_bad == 1
    assert flags.tolist() == [0, 255]


def test_int16_output_that_overflows_is_reported_by_the_maximum() -> None:
    values = np.array([[32768.0]], np.float32)
    out = np.zeros((1, 1), np.int16)

    max_abs, _ = kernels.lattice_encode(values, np.float32(1), out, np.zeros(1, np.uint8))

    assert max_abs == 32768
    assert widths.narrowest(max_abs) == np.int32
    assert lattice_codes(values, 1.0).dtype == np.int32
    assert lattice_codes(values - 1, 1.0).dtype == np.int16


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mirror_dtype", [np.int16, np.int32])
@pytest.mark.parametrize("out_dtype", [np.int16, np.int32])
def test_delta_kernel_equals_reference(shape: tuple[int, int], mirror_dtype: type, out_dtype: type) -> None:
    n, d = shape
    rng = np.random.default_rng(n * 100 + d)
    values = random_values(shape, seed=n)
    rows = np.sort(rng.choice(3 * n + 1, n, replace=False)).astype(np.int64) + 1000
    mirror = rng.integers(-500, 500, (3 * n + 1, d)).astype(mirror_dtype)
    if n > 1:
        values[1] = mirror[rows[1] - 1000] * np.float32(0.01)
    if n > 4:
        values[3, d // 2] = np.nan
    multipliers = column_multipliers(0, d)
    out, flags = np.full(shape, 99, out_dtype), np.zeros(n, np.uint8)
    before = mirror.copy()

    max_difference, max_code, first_bad, change = kernels.lattice_delta(
        values, rows, mirror, 1000, np.float32(0.01), multipliers, out, flags
    )

    codes, bad = reference.lattice_codes(values, 0.01)
    expected = reference.delta(codes, bad, rows, mirror, 1000, multipliers)
    np.testing.assert_array_equal(out, expected.differences)
    np.testing.assert_array_equal(flags, expected.flags)
    assert int(change) == expected.digest_change
    assert max_difference == np.abs(expected.differences).max(initial=0)
    assert max_code == np.abs(expected.codes).max(initial=0)
    assert first_bad == (3 if n > 4 else -1)
    np.testing.assert_array_equal(mirror, before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codes_dtype", [np.int16, np.int32])
@pytest.mark.parametrize("mirror_dtype", [np.int16, np.int32])
def test_delta_of_codes_equals_reference_and_the_delta_of_their_values(
    shape: tuple[int, int], codes_dtype: type, mirror_dtype: type
) -> None:
    n, d = shape
    rng = np.random.default_rng(n * 100 + d)
    limit = np.iinfo(codes_dtype)
    codes = rng.integers(max(limit.min, -MAX_CODE), min(limit.max, MAX_CODE) + 1, shape).astype(codes_dtype)
    rows = np.sort(rng.choice(3 * n + 1, n, replace=False)).astype(np.int64) + 1000
    mirror = rng.integers(-500, 500, (3 * n + 1, d)).astype(mirror_dtype)
    if n > 1:
        codes[1] = mirror[rows[1] - 1000]
    if n > 4 and codes_dtype == np.int32:
        codes[2, 0], codes[3, d // 2], codes[4, d - 1] = MAX_CODE + 1, limit.min, limit.max
    multipliers = column_multipliers(0, d)
    out, flags = np.full(shape, 99, np.int32), np.zeros(n, np.uint8)
    before = codes.copy()

    found = kernels.lattice_delta(codes, rows, mirror, 1000, np.float32(1), multipliers, out, flags)

    good, bad = reference.storable_codes(codes)
    expected = reference.delta(good, bad, rows, mirror, 1000, multipliers)
    np.testing.assert_array_equal(out, expected.differences)
    np.testing.assert_array_equal(flags, expected.flags)
    assert int(found[3]) == expected.digest_change
    assert found[0] == np.abs(expected.differences).max(initial=0)
    assert found[1] == np.abs(expected.codes).max(initial=0)
    assert found[2] == (int(np.argmax(bad)) if bad.any() else -1)
    np.testing.assert_array_equal(codes, before)
    values = np.float32(0.25) * codes.astype(np.float32)
    of_values, flags_of_values = np.full(shape, 99, np.int32), np.zeros(n, np.uint8)
    assert found == kernels.lattice_delta(
        values, rows, mirror, 1000, np.float32(0.25), multipliers, of_values, flags_of_values
    )
    np.testing.assert_array_equal(out, of_values)
    np.testing.assert_array_equal(flags, flags_of_values)


def test_delta_flags_only_add_to_what_another_array_of_the_row_found() -> None:
    rows = np.arange(3, dtype=np.int64)
    flags = np.array([0, 1, 255], np.uint8)
    out = np.zeros((3, 1), np.int16)

    kernels.lattice_delta(
        np.array([[1], [0], [1]], np.float32),
        rows,
        np.zeros((3, 1), np.int16),
        0,
        np.float32(1),
        column_multipliers(0, 1),
        out,
        flags,
    )

    np.testing.assert_array_equal(flags, [1, 1, 255])


def test_delta_reports_a_row_outside_the_mirror() -> None:
    flags, out = np.zeros(2, np.uint8), np.zeros((2, 1), np.int16)

    result = kernels.lattice_delta(
        np.ones((2, 1), np.float32),
        np.array([4, 9], np.int64),
        np.zeros((5, 1), np.int16),
        4,
        np.float32(1),
        column_multipliers(0, 1),
        out,
        flags,
    )

    assert result[2] == 1
    np.testing.assert_array_equal(flags, [1, 255])


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_decode_kernel_equals_reference(dtype: type) -> None:
    codes = np.random.default_rng(2).integers(-30000, 30000, (33, 15)).astype(dtype)
    out = np.empty(codes.shape, np.float32)

    kernels.lattice_decode(codes, np.float32(0.37), out)

    np.testing.assert_array_equal(out.view(np.int32), reference.lattice_values(codes, 0.37).view(np.int32))


def test_decode_in_the_memory_of_the_codes() -> None:
    codes = np.random.default_rng(3).integers(-MAX_CODE, MAX_CODE, (129, 31)).astype(np.int32)
    expected = reference.lattice_values(codes, 0.37)
    first, second = codes.copy().view(np.float32), codes.copy().view(np.float32)

    kernels.lattice_decode(first.view(np.int32), np.float32(0.37), first)
    kernels.lattice_decode_in_place(second, np.float32(0.37))

    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, expected)


def test_decoding_takes_the_scale_as_fp32() -> None:
    codes = np.arange(-1000, 1000, dtype=np.int16).reshape(-1, 8)
    np.testing.assert_array_equal(lattice_floats(codes, 0.1), np.float32(0.1) * codes.astype(np.float32))


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-40, 1e35])
def test_unusable_scales_are_refused(scale: float) -> None:
    with pytest.raises(BadInput, match="lattice scale"):
        lattice.check_scale(scale)


def test_every_code_at_the_largest_scale_decodes_to_a_finite_value() -> None:
    codes = np.array([[MAX_CODE, -MAX_CODE]], np.int32)
    assert np.isfinite(lattice_floats(codes, lattice.LARGEST_SCALE)).all()


def test_empty_blocks_keep_their_shape() -> None:
    codes = lattice_codes(np.empty((0, 8), np.float32), 0.1)
    assert codes.shape == (0, 8)
    assert lattice_floats(codes, 0.1).shape == (0, 8)


# ---- scatter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acc_dtype", [np.int16, np.int32])
@pytest.mark.parametrize("codes_dtype", [np.int16, np.int32])
@pytest.mark.parametrize("left_shift", [0, 3])
def test_scatter_kernels_equal_reference(acc_dtype: type, codes_dtype: type, left_shift: int) -> None:
    rng = np.random.default_rng(4)
    acc = rng.integers(-900, 900, (40, 9)).astype(acc_dtype)
    rows = np.sort(rng.choice(40, 13, replace=False)).astype(np.int64)
    codes = rng.integers(-900, 900, (13, 9)).astype(codes_dtype)
    added, put = acc.copy(), acc.copy()

    assert row_kernels.add_codes(added, rows + 77, 77, codes, left_shift) == -1
    assert row_kernels.put_codes(put, rows + 77, 77, codes, left_shift) == -1

    np.testing.assert_array_equal(added, reference.add(acc, rows, codes, left_shift))
    expected = acc.astype(np.int64)
    expected[rows] = codes.astype(np.int64) << left_shift
    np.testing.assert_array_equal(put, expected)


@pytest.mark.parametrize("acc_dtype", [np.int16, np.int32])
def test_block_kernels_equal_reference(acc_dtype: type) -> None:
    rng = np.random.default_rng(5)
    acc = rng.integers(-900, 900, (21, 5)).astype(acc_dtype)
    codes = rng.integers(-900, 900, (21, 5)).astype(np.int16)
    added, put, shifted = acc.copy(), acc.copy(), acc.copy()

    assert row_kernels.add_block(added, codes, 2) == -1
    assert row_kernels.put_block(put, codes, 2) == -1
    assert row_kernels.put_block(shifted, shifted, 1) == -1

    np.testing.assert_array_equal(added, acc.astype(np.int64) + (codes.astype(np.int64) << 2))
    np.testing.assert_array_equal(put, codes.astype(np.int64) << 2)
    np.testing.assert_array_equal(shifted, acc.astype(np.int64) * 2)


@pytest.mark.parametrize(("dtype", "top"), [(np.int16, 32767), (np.int32, 2**31 - 1)])
def test_overflow_names_the_row_position_and_is_never_silent(dtype: type, top: int) -> None:
    rows = np.array([0, 2], np.int64)
    codes = np.array([[1], [1]], np.int16)

    assert row_kernels.add_codes(np.array([[0], [0], [top]], dtype), rows, 0, codes, 0) == 1
    assert row_kernels.add_block(np.array([[0], [top]], dtype), codes, 0) == 1
    assert row_kernels.put_codes(np.zeros((3, 1), dtype), rows, 0, codes, 31) == 0
    assert row_kernels.put_block(np.zeros((2, 1), dtype), np.array([[1], [top]], dtype), 1) == 1


def test_wrapping_add_is_modulo_two_to_the_width() -> None:
    acc = np.array([[2**31 - 1], [5]], np.int32)

    assert row_kernels.add_codes_wrapping(acc, np.array([0], np.int64), 0, np.array([[1]], np.int16)) == -1

    np.testing.assert_array_equal(acc, [[-(2**31)], [5]])


@pytest.mark.parametrize("row", [-1, 3, 2**62, -(2**62)])
def test_rows_outside_the_target_are_reported_and_nothing_is_written(row: int) -> None:
    rows, codes = np.array([row], np.int64), np.ones((1, 2), np.int32)
    acc = np.zeros((3, 2), np.int32)

    assert row_kernels.add_codes(acc, rows, 0, codes, 0) == 0
    assert row_kernels.put_codes(acc, rows, 0, codes, 0) == 0
    assert row_kernels.add_codes_wrapping(acc, rows, 0, codes) == 0
    assert not acc.any()


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (np.arange(0, 300, 3), 1, False),  # 12 bytes apart
        (np.arange(0, 3000, 30), 1, True),
        (np.arange(0, 300, 3), 16, True),
        (np.random.default_rng(0).permutation(100), 1, True),
        (np.arange(0, 300, 3)[:3], 16, False),
        (np.arange(0), 1, False),
    ],
)
def test_memory_is_asked_for_where_rows_share_no_cache_lines(rows: np.ndarray, columns: int, expected: bool) -> None:
    assert kernels.are_far_apart(np.zeros((3000, columns), np.int32), rows.astype(np.int64)) == expected


@pytest.mark.parametrize("row", [-(1 << 62), 1 << 62])
def test_a_row_that_memory_is_asked_for_may_lie_anywhere(row: int) -> None:
    count = AHEAD + 4
    rows, codes = np.arange(count, dtype=np.int64), np.ones((count, 2), np.int32)
    rows[-1] = row
    acc, flags, out = np.zeros((count, 2), np.int32), np.zeros(count, np.uint8), np.zeros((count, 2), np.int32)
    multipliers = column_multipliers(0, 2)

    delta = kernels.lattice_delta(np.ones((count, 2), np.float32), rows, acc, 0, np.float32(1), multipliers, out, flags)

    assert delta[2] == count - 1
    assert row_kernels.put_codes(acc, rows, 0, codes, 0) == count - 1
    assert row_kernels.add_codes(acc, rows, 0, codes, 0) == count - 1
    assert row_kernels.add_codes_wrapping(acc, rows, 0, codes) == count - 1
    np.testing.assert_array_equal(acc, [[3, 3]] * (count - 1) + [[0, 0]])


def test_narrowed_takes_the_narrowest_width() -> None:
    assert widths.narrowed(np.array([32767, -32768], np.int32)).dtype == np.int16
    assert widths.narrowed(np.array([32768], np.int32)).dtype == np.int32
    assert widths.narrowed(np.array([-32769], np.int32)).dtype == np.int32
    assert widths.narrowed(np.empty(0, np.int32)).dtype == np.int16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_float_survives_widening_and_back(dtype: TableDtype) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    block = patterns.view(np.float16) if dtype == "float16" else patterns
    wide = widths.to_float32(block, dtype)

    back = widths.from_float32(wide, dtype).view(np.uint16)

    numbers = ~np.isnan(wide)
    np.testing.assert_array_equal(back[numbers], patterns[numbers])
    assert np.isnan(widths.to_float32(widths.from_float32(wide[~numbers], dtype), dtype)).all()


def test_bfloat16_rounding_equals_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the reference for bfloat16")
    bits = np.random.default_rng(6).integers(0, 2**32, 100_000, dtype=np.uint32)
    bits = bits[(bits & 0x7FFFFFFF) <= 0x7F7F7FFF]
    ties = (np.arange(0x3F80, 0x3FA0, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties]).view(np.float32)

    found = widths.from_float32(values, "bfloat16")

    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("bfloat16", 3.3895314e38)])
def test_a_finite_value_never_narrows_to_infinity(dtype: TableDtype, largest: float) -> None:
    top = np.finfo(np.float32).max
    values = np.array([top, -top, np.inf, -np.inf], np.float32)

    back = widths.to_float32(widths.from_float32(values, dtype), dtype)

    np.testing.assert_array_equal(back, np.array([largest, -largest, np.inf, -np.inf], np.float32))


def test_widening_refuses_the_wrong_carrier() -> None:
    with pytest.raises(BadDtype, match="uint16"):
        widths.to_float32(np.zeros(3, np.float16), "bfloat16")


def test_widening_into_a_given_block() -> None:
    block = np.array([0x3F80, 0xC000], np.uint16)
    out = np.empty(2, np.float32)
    assert widths.to_float32(block, "bfloat16", out) is out
    np.testing.assert_array_equal(out, [1.0, -2.0])
