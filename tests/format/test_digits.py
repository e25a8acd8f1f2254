"""Integers as planes of digits: the kernels are the reference, and every value comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.format import digit_kernels, digits
from tests.support import encoding_reference as reference

DTYPES = [np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.int64)]


@st.composite
def integers(draw: st.DrawFn) -> npt.NDArray[Any]:
    """Some values of a dtype, small or as large as it has them."""
    dtype = draw(st.sampled_from(DTYPES))
    info = np.iinfo(dtype)
    most = draw(st.sampled_from([0, 1, 2, 7, 100, 2000, info.max]))
    low, high = (info.min, info.max) if most == info.max else (-most, most)
    return np.array(draw(st.lists(st.integers(low, high), max_size=70)), dtype)


def room(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.full(values.nbytes + 7, 77, np.uint8)


@given(values=integers(), begin=st.none() | st.integers(-128, digits.LARGEST_BEGIN))
def test_every_packing_that_a_writer_may_choose_equals_the_reference(
    values: npt.NDArray[Any], begin: int | None
) -> None:
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for packing in digits.choices(low, high, values.dtype, begin):
        planes, back = room(values), np.empty_like(values)

        used = digits.pack(values, packing, planes)
        digits.unpack(planes, packing, values.size, 0, back)

        assert used == sum(digits.plane_bytes(packing.bases, values.size)) <= planes.size
        assert planes[:used].tolist() == reference.digit_planes(values, packing.bases, packing.middle).tolist()
        assert back.tolist() == values.tolist()


@given(
    bases=st.lists(st.integers(2, 256), max_size=8).map(tuple),
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    middle=st.integers(-128, 127),
)
def test_any_planes_unpack_as_the_reference(
    bases: digits.Bases, seed: int, count: int, dtype: np.dtype[Any], middle: int
) -> None:
    size = sum(digits.plane_bytes(bases, count))
    planes = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    out = np.empty(count, dtype)

    digits.unpack(planes, digits.Packing(bases, middle), count, 0, out)

    assert out.tolist() == (reference.digit_values(planes, bases, out) + dtype.type(middle)).tolist()


@pytest.mark.parametrize("bases", [(256,), (256, 3), (16, 16), (16, 256, 5)])
@pytest.mark.parametrize("count", [1, digit_kernels.BLOCK - 1, digit_kernels.BLOCK + 1, 3 * digit_kernels.BLOCK + 5])
def test_any_stretch_of_the_values_can_be_unpacked_alone(bases: digits.Bases, count: int) -> None:
    low, high = digits.reach(bases)
    values = np.random.default_rng(count).integers(low, high, count, np.int16, endpoint=True)
    planes = np.empty(sum(digits.plane_bytes(bases, count)), np.uint8)
    packing = digits.Packing(bases)
    digits.pack(values, packing, planes)

    for start, stop in ((0, count), (count // 3, count), (count // 2, count // 2 + count // 4), (count - 1, count)):
        out = np.empty(stop - start, np.int16)
        digits.unpack(planes, packing, count, start, out)
        assert np.array_equal(out, values[start:stop])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choices_hold_the_values_and_take_no_more_bytes_than_they_do(dtype: np.dtype[Any]) -> None:
    info = np.iinfo(dtype)
    for low, high in ((0, 0), (-1, 1), (-9, 7), (-129, 0), (-3000, 3000), (info.min, info.max)):
        found = digits.choices(low, high, dtype)
        assert found
        for bases, _ in found:
            least, most = digits.reach(bases)
            assert (least <= low and high <= most) or most - least + 1 >= 2 ** (8 * dtype.itemsize)
            assert len(bases) <= digits.MOST_DIGITS
            assert sum(digits.plane_bytes(bases, 1000)) <= 1000 * dtype.itemsize
