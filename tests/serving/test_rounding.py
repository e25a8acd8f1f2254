"""The one-pass rounding against its definition, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cnr_store.encodings import widths
from cnr_store.serving.rows.rounding import round_float32

EDGES = np.array(
    [0, 0x80000000, 1, 0x007FFFFF, 0x33000000, 0x33000001, 0x33800000, 0x387FFFFF, 0x38800000, 0x387FE000, 0x387FF000,
     0x477FDFFF, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF],
    np.uint32,
)  # fmt: skip


def same(bits: Any, dtype: Any) -> None:
    values = bits.view(np.float32).reshape(-1, 1)
    out = np.empty(values.shape, widths.carrier(dtype))

    round_float32(values, dtype, out)

    np.testing.assert_array_equal(out.view(np.uint16), widths.from_float32(values, dtype).view(np.uint16))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_any_finite_bits_are_rounded_as_defined(dtype: Any) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
    around = (EDGES[:, None] + np.arange(-3, 4, dtype=np.int64)).astype(np.uint32).reshape(-1)
    ties = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(13)) | np.uint32(0x1000)
    finite = np.concatenate([bits, around, around | np.uint32(0x80000000), ties])
    same(finite[(finite & np.uint32(0x7F800000)) != 0x7F800000], dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_not_finite_is_what_the_definition_makes_of_it(dtype: Any) -> None:
    same(np.array([0x7F800000, 0xFF800000, 0x7FC00001, 0xFF800001, 0x3F800000], np.uint32), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_rows_are_no_trouble(dtype: Any) -> None:
    same(np.empty(0, np.uint32), dtype)
