from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cnr_store.encodings import digest, kernels, row_kernels
from cnr_store.types import MAX_CODE
from tests.support import encoding_reference as reference
from tests.support.encoders import digest_of_block, float_bits_codes, float_bits_floats, lattice_codes, lattice_floats

LAWS = settings(max_examples=50)

shapes = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9)
code_widths = st.sampled_from([np.int16, np.int32])
scales = st.floats(2.0**-20, 2.0**10, width=32)
patterns = hnp.arrays(np.uint32, shapes)


@LAWS
@given(st.data(), shapes, scales)
def test_encoding_a_decoded_row_gives_the_same_codes(data: st.DataObject, shape: tuple[int, ...], scale: float) -> None:
    codes = data.draw(hnp.arrays(np.int32, shape, elements=st.integers(-MAX_CODE, MAX_CODE)))
    np.testing.assert_array_equal(lattice_codes(lattice_floats(codes, scale), scale), codes)


def test_encoding_decoded_values_is_stable_for_every_code_at_many_scales() -> None:
    codes = np.arange(-MAX_CODE, MAX_CODE + 1, 3, dtype=np.int32).reshape(-1, 1)
    for scale in np.random.default_rng(0).lognormal(-4, 3, 8).astype(np.float32):
        np.testing.assert_array_equal(lattice_codes(lattice_floats(codes, float(scale)), float(scale)), codes)


@LAWS
@given(hnp.arrays(np.float32, shapes, elements=st.floats(-1e3, 1e3, width=32)), st.floats(2.0**-10, 8.0, width=32))
def test_the_error_is_at_most_half_a_step(values: np.ndarray, scale: float) -> None:
    back = lattice_floats(lattice_codes(values, scale), scale)
    bound = scale / 2 + (float(np.abs(values).max()) + scale) * 2.0**-23
    assert np.abs(back.astype(np.float64) - values).max() <= bound


@LAWS
@given(st.data(), shapes, code_widths, code_widths)
def test_replaying_differences_gives_the_absolute_codes(
    data: st.DataObject, shape: tuple[int, ...], mirror_width: type, out_width: type
) -> None:
    steps = data.draw(
        st.lists(hnp.arrays(np.float32, shape, elements=st.floats(-90, 90, width=32)), min_size=1, max_size=4)
    )
    rows = np.arange(shape[0], dtype=np.int64)
    mirror = np.zeros(shape, mirror_width)
    multipliers = digest.column_multipliers(0, shape[1])
    state = digest_of_block(mirror, 0, multipliers, digest.PRESENCE_CODED)
    for values in steps:
        out, flags = np.empty(shape, out_width), np.zeros(shape[0], np.uint8)
        *_, change = kernels.lattice_delta(values, rows, mirror, 0, np.float32(0.01), multipliers, out, flags)
        assert row_kernels.add_codes(mirror, rows, 0, out, 0) == -1
        state = digest.add_digests(state, int(change))

    np.testing.assert_array_equal(mirror, lattice_codes(steps[-1], 0.01))
    assert state == digest_of_block(mirror, 0, multipliers, digest.PRESENCE_CODED)


@LAWS
@given(hnp.arrays(np.float32, shapes, elements=st.floats(width=32)), scales, code_widths)
def test_lattice_kernel_equals_reference_on_any_floats(values: np.ndarray, scale: float, width: type) -> None:
    out, flags = np.empty(values.shape, width), np.zeros(len(values), np.uint8)

    max_abs, first_bad = kernels.lattice_encode(values, np.float32(scale), out, flags)

    codes, bad = reference.lattice_codes(values, scale)
    np.testing.assert_array_equal(flags == 255, bad)
    assert first_bad == (int(np.argmax(bad)) if bad.any() else -1)
    assert max_abs == np.abs(codes).max(initial=0)
    np.testing.assert_array_equal(out, codes.astype(width))


@LAWS
@given(patterns)
def test_23_bits_are_the_identity_on_any_pattern(bits: np.ndarray) -> None:
    back = float_bits_floats(float_bits_codes(bits.view(np.float32), 23), 23)
    np.testing.assert_array_equal(back.view(np.uint32), bits)


@LAWS
@given(patterns, st.integers(0, 22))
def test_rounded_floats_are_stable_and_symmetric(bits: np.ndarray, mantissa_bits: int) -> None:
    values = bits.view(np.float32)
    assume(not np.isnan(values).any())

    codes = float_bits_codes(values, mantissa_bits)
    back = float_bits_floats(codes, mantissa_bits)

    np.testing.assert_array_equal(float_bits_codes(back, mantissa_bits), codes)
    np.testing.assert_array_equal(float_bits_codes(-values, mantissa_bits), -1 - codes.astype(np.int64))
    np.testing.assert_array_equal(np.isinf(back), np.isinf(values))
    np.testing.assert_array_equal(np.signbit(back), np.signbit(values))


@LAWS
@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False), st.integers(0, 23))
def test_codes_are_monotone(a: float, b: float, mantissa_bits: int) -> None:
    assume(a < b)
    low, high = float_bits_codes(np.array([a, b], np.float32), mantissa_bits).tolist()
    assert low <= high
    if mantissa_bits == 23:
        assert low < high


@LAWS
@given(patterns, st.data())
def test_exact_differences_replay_to_the_bits(bits: np.ndarray, data: st.DataObject) -> None:
    old = data.draw(hnp.arrays(np.uint32, bits.shape))
    mirror = float_bits_codes(old.view(np.float32), 23)
    rows, out = np.arange(len(bits), dtype=np.int64), np.empty(bits.shape, np.int32)
    multipliers = digest.slot_multipliers("exp_avg", 0, bits.shape[1])
    before = digest_of_block(mirror, 0, multipliers, digest.NO_PRESENCE)

    *_, change = kernels.float_bits_delta(
        bits.view(np.int32), rows, mirror, 0, 0, multipliers, out, np.zeros(len(bits), np.uint8)
    )
    row_kernels.add_codes_wrapping(mirror, rows, 0, out)

    np.testing.assert_array_equal(float_bits_floats(mirror, 23).view(np.uint32), bits)
    after = digest_of_block(mirror, 0, multipliers, digest.NO_PRESENCE)
    assert after == digest.add_digests(before, int(change))


@LAWS
@given(st.data(), shapes, code_widths, st.integers(0, 2**40))
def test_digests_of_rectangles_add_up(data: st.DataObject, shape: tuple[int, ...], width: type, row_start: int) -> None:
    codes = data.draw(hnp.arrays(width, shape))
    row_cut = data.draw(st.integers(0, shape[0]))
    column_cut = data.draw(st.integers(0, shape[1]))
    total = 0
    for r0, r1 in ((0, row_cut), (row_cut, shape[0])):
        for c0, c1 in ((0, column_cut), (column_cut, shape[1])):
            if c0 == c1 and c0 == 0:
                continue  # no rectangle: its presence would be counted twice
            block = np.ascontiguousarray(codes[r0:r1, c0:c1])
            part = digest_of_block(block, row_start + r0, digest.column_multipliers(c0, c1), digest.presence(c0))
            total = digest.add_digests(total, part)

    multipliers = digest.column_multipliers(0, shape[1])
    assert total == digest_of_block(codes, row_start, multipliers, digest.PRESENCE_CODED)
    rows = np.arange(row_start, row_start + shape[0], dtype=np.int64)
    assert total == reference.digest(codes, rows, multipliers, int(digest.PRESENCE_CODED))


@LAWS
@given(st.data(), code_widths)
def test_the_digest_follows_set_delete_and_escape_rows(data: st.DataObject, width: type) -> None:
    mirror = data.draw(hnp.arrays(width, (8, 3)))
    multipliers = digest.column_multipliers(0, 3)
    state = digest_of_block(mirror, 0, multipliers, digest.PRESENCE_CODED)
    kinds = data.draw(st.lists(st.sampled_from(["keep", "set", "delete", "escape"]), min_size=8, max_size=8))
    rows = {
        k: np.array([r for r, kind in enumerate(kinds) if kind == k], np.int64)
        for k in ("keep", "set", "delete", "escape")
    }
    new = data.draw(hnp.arrays(width, (len(rows["set"]), 3)))
    floats = data.draw(hnp.arrays(np.uint32, (len(rows["escape"]), 3))).view(np.int32)

    for kind in ("set", "delete", "escape"):
        old = int(kernels.digest_gathered(mirror, rows[kind], 0, multipliers, digest.PRESENCE_CODED))
        state = digest.add_digests(state, -old)
    state = digest.add_digests(
        state,
        digest.digest_of_rows(new, rows["set"], multipliers, digest.PRESENCE_CODED),
        digest.digest_of_rows(floats, rows["escape"], multipliers, digest.PRESENCE_ESCAPE),
    )

    expected = digest.add_digests(
        reference.digest(mirror[rows["keep"]], rows["keep"], multipliers, int(digest.PRESENCE_CODED)),
        reference.digest(new, rows["set"], multipliers, int(digest.PRESENCE_CODED)),
        reference.digest(floats, rows["escape"], multipliers, int(digest.PRESENCE_ESCAPE)),
    )
    assert state == expected


@pytest.mark.parametrize("left_shift", [1, 4])
def test_refining_the_scale_by_a_power_of_two_shifts_the_codes(left_shift: int) -> None:
    codes = np.random.default_rng(1).integers(-5000, 5000, (50, 7)).astype(np.int16)
    finer = codes.astype(np.int32)

    assert row_kernels.put_block(finer, finer, left_shift) == -1

    np.testing.assert_array_equal(lattice_floats(finer, 0.25 / 2**left_shift), lattice_floats(codes, 0.25))
