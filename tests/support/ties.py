"""Values whose quotient by a scale lies exactly half-way between two codes, and what must become of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_store.types import MAX_CODE

SCALES = tuple(np.float32(scale) for scale in (1.0, 0.25, 2.0**-30, 0.37, 0.003, 1.7e-5, 3e7))
"""Powers of two, where every half is a float, and scales for which only some are."""


def lattice_ties(scale: np.float32, dim: int, *, largest: int = MAX_CODE) -> tuple[Any, Any]:
    """Return rows (n, dim) of float32 values, and their codes: exact ties of both signs, the floats beside them too.

    The codes are Python's ``round`` of the float32 quotient: half to even, without numpy.
    """
    rng = np.random.default_rng(dim)
    steps = np.unique(
        np.concatenate([np.arange(-40, 40), rng.integers(-largest, largest, 400), [-largest, largest - 1]])
    )
    ties = ((steps + 0.5) * np.float64(scale)).astype(np.float32)
    ties = ties[(ties / scale).astype(np.float64) == steps + 0.5]
    assert (ties > 0).sum() > 20
    assert (ties < 0).sum() > 20
    up, down = np.float32(np.inf), np.float32(-np.inf)
    values = rng.permutation(np.concatenate([ties, np.nextafter(ties, up), np.nextafter(ties, down)]))
    values = values[: len(values) // dim * dim].reshape(-1, dim)
    codes = [[round(float(quotient)) for quotient in row] for row in values / scale]
    return values, np.asarray(codes, np.int32)


def affine_ties(bits: int) -> tuple[Any, Any]:
    """Return rows (n, 2^bits + 1) and their codes: the least and largest code's value, and every tie between codes.

    The parameters of a row that `minmax` finds are exact in float16: a power of two, and a small whole number.
    """
    levels = 2**bits
    codes = np.asarray([0.0, levels - 1, *(code + 0.5 for code in range(levels - 1))])
    scale, zero_point = np.meshgrid([1.0, 0.25, 2.0**-6, 2.0], [0.0, -8.0, 3.0, -(levels - 1) / 2])
    values = zero_point.reshape(-1, 1) + scale.reshape(-1, 1) * codes
    assert (values.astype(np.float32) == values).all()
    expected = np.asarray([round(code) for code in codes], np.uint8)
    return values.astype(np.float32), np.repeat(expected[None], len(values), axis=0)
