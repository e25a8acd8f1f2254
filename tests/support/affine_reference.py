"""The affine encoding in plain numpy: slow, short, and the oracle of `affine_kernels`.

Same formulas, same float32 roundings, sums in the order of the columns; so results are compared bit for bit,
not by tolerance. Never used to write a store.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cnr_store.types import Float32s

_NOT_INVERTIBLE = np.float32(2.0**-128)


def inverse_of(scale: Float32s) -> Float32s:
    """Return 1 / scale, or 0 where the scale is zero or its reciprocal would overflow."""
    inverse = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=inverse, where=scale > _NOT_INVERTIBLE)
    return inverse


def codes_from_params(values: Float32s, scale: Float32s, zero_point: Float32s, bits: int) -> npt.NDArray[np.uint8]:
    """Return the codes (n, dim) that stored parameters define (quantization reference, section 4.1)."""
    t = (values - zero_point[:, None]) * inverse_of(scale)[:, None]
    codes: npt.NDArray[np.uint8] = np.clip(np.rint(t), 0, 2**bits - 1).astype(np.uint8)
    return codes


def values_from_codes(codes: npt.NDArray[np.uint8], scale: Float32s, zero_point: Float32s) -> Float32s:
    """Return ``zero_point + scale * code`` in float32, two roundings."""
    decoded: Float32s = zero_point[:, None] + scale[:, None] * codes.astype(np.float32)
    return decoded


def minmax_params(values: Float32s, bits: int) -> tuple[Float32s, Float32s]:
    """Return scale and zero_point (n,) of the rows' own ranges."""
    low = values.min(axis=1)
    return (values.max(axis=1) - low) / np.float32(2**bits - 1), low


def grid_params(
    values: Float32s, bits: int, *, points: int, step: float, fit_steps: int, relax: float
) -> tuple[Float32s, Float32s]:
    """Return scale and zero_point (n,) by a grid of ranges followed by least-squares steps (section 4.2)."""
    low, width, u = _normalise(values)
    max_code = 2**bits - 1
    best = _Best(len(values))
    for i in range(points):
        for j in range(points):
            if max(i, j) >= 3 and abs(i - j) > 1:
                continue
            share = 1.0 - (i + j) * step
            best.offer(u, np.float32(i * step), np.float32(share / max_code), np.float32(max_code / share), bits)
    mean_u = _column_sum(u) / np.float32(u.shape[1])
    scale, zero_point = best.scale, best.zero_point
    for _ in range(fit_steps):
        scale, zero_point = _least_squares_step(u, mean_u, scale, zero_point, bits, np.float32(relax))
    return width * scale, low + width * zero_point


def greedy_params(values: Float32s, bits: int, *, num_bins: int, ratio: float) -> tuple[Float32s, Float32s]:
    """Return scale and zero_point (n,) by the paper's greedy search, keeping the best point met (section 4.3)."""
    low, width, u = _normalise(values)
    max_code = 2**bits - 1
    best = _Best(len(values))
    best.offer(u, np.float32(0), np.float32(1 / max_code), np.float32(max_code), bits)
    bin_width = np.float32(1.0 / num_bins)
    raised = np.zeros(len(values), np.float32)
    removed = 0
    while num_bins - removed > (1 - ratio) * num_bins + 1e-9 and removed < num_bins - 1:
        removed += 1
        share = (num_bins - removed) / num_bins
        scale, inverse = np.float32(share / max_code), np.float32(max_code / share)
        if_low = _error(u, (raised + np.float32(1)) * bin_width, inverse, bits)[0]
        if_high = _error(u, raised * bin_width, inverse, bits)[0]
        raised += (if_low < if_high).astype(np.float32)
        best.offer(u, raised * bin_width, scale, inverse, bits)
    return width * best.scale, low + width * best.zero_point


class _Best:
    """Parameters of least error so far, per row, in units of the row's width."""

    def __init__(self, num_rows: int) -> None:
        self.error = np.full(num_rows, np.inf, np.float32)
        self.scale = np.zeros(num_rows, np.float32)
        self.zero_point = np.zeros(num_rows, np.float32)

    def offer(
        self,
        u: Float32s,
        zero_point: Float32s | np.float32,
        scale: Float32s | np.float32,
        inverse: np.float32,
        bits: int,
    ) -> None:
        error = _error(u, zero_point, inverse, bits)[0] * (scale * scale)
        better = error < self.error
        self.error = np.where(better, error, self.error)
        self.scale = np.where(better, scale, self.scale).astype(np.float32)
        self.zero_point = np.where(better, zero_point, self.zero_point).astype(np.float32)


def _normalise(values: Float32s) -> tuple[Float32s, Float32s, Float32s]:
    low = values.min(axis=1)
    width: Float32s = values.max(axis=1) - low
    return low, width, (values - low[:, None]) * inverse_of(width)[:, None]


def _error(
    u: Float32s, zero_point: Float32s | np.float32, inverse: Float32s | np.float32, bits: int
) -> tuple[Float32s, Float32s]:
    t = (u - np.reshape(zero_point, (-1, 1))) * np.reshape(inverse, (-1, 1))
    q = np.clip(np.rint(t), np.float32(0), np.float32(2**bits - 1))
    return _column_sum((t - q) * (t - q)), q


def _least_squares_step(
    u: Float32s, mean_u: Float32s, scale: Float32s, zero_point: Float32s, bits: int, relax: np.float32
) -> tuple[Float32s, Float32s]:
    q = _error(u, zero_point, np.float32(1) / scale, bits)[1]
    sum_q, sum_qq = _column_sum(q), _column_sum(q * q)
    mean_q = sum_q / np.float32(u.shape[1])
    variance = sum_qq - sum_q * mean_q
    fitted = np.zeros_like(variance)
    has_line = variance > np.float32(1e-6) * sum_qq
    np.divide(_column_sum(q * (u - mean_u[:, None])), variance, out=fitted, where=has_line)
    moved = scale + relax * (fitted - scale)
    is_moved = has_line & (moved > np.float32(1e-6))
    offset = mean_u - fitted * mean_q
    return (
        np.where(is_moved, moved, scale),
        np.where(is_moved, zero_point + relax * (offset - zero_point), zero_point),
    )


def _column_sum(matrix: Float32s) -> Float32s:
    """Return the row sums, added in the order of the columns (numpy's own sum is pairwise)."""
    total = np.zeros(len(matrix), np.float32)
    for column in matrix.T:
        total += column
    return total
