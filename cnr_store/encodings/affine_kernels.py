"""Compiled loops of the affine encoding: parameter searches, codes from parameters, decoding.

The searches work on *normalised* rows, ``u = (x - min) / (max - min)``, so candidate ranges and their
reciprocals are constants of the table and squared errors neither overflow nor underflow. `LANES` rows are
transposed into a tile, and every inner loop runs over the rows of the tile: it vectorizes without
reassociating a sum, so the parameters (not only the codes) are the same on every machine, and bit-equal to
its reference in the tests (`tests/support/affine_reference.py`).

No function here checks its input, allocates more than a tile, or may get ``reassoc`` or ``contract``:
``reassoc`` folds a quantizer away, ``contract`` would make codes depend on the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.runtime.jit import njit

LANES = 64
"""Rows that are searched together. 64 was the fastest of 16 to 256 (dim 16 to 512), by 10 to 20 % over 32."""

# Only for values that are known to be finite; the check is `first_bad_row`, on integers.
_FINITE: Any = {"nnan", "ninf", "nsz"}
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
# 1 / x overflows from 2**-128 down; such a width or scale counts as zero, because 0 * inf would be NaN.
_NOT_INVERTIBLE = np.float32(2.0**-128)
# In units of the row's width: over-relaxed steps must not reach a scale of zero or less.
_SMALLEST_SCALE = np.float32(1e-6)
# Of an error that float32 may have summed up to d / 2**24 too large.
_MARGIN = np.float32(0.999)
_STEPS_BETWEEN_BOUNDS = 4
# Rows of the lane workspace.
_LOW, _WIDTH, _INVERSE, _BEST_ERROR, _BEST_ZERO, _BEST_SCALE, _ERROR, _ERROR_HIGH = range(8)
_SUM_Q, _SUM_QQ, _SUM_QU, _MEAN_U, _RAISED, _ZERO_LOW, _ZERO_HIGH, _CLIPPED = range(8, 16)
_LANE_ROWS = 16


@njit(nogil=True)
def first_bad_row(bits: npt.NDArray[np.uint32], limit: np.uint32) -> int:
    """Return the first row with a value whose float bits without sign exceed `limit` (NaN and Inf do), or -1."""
    num_rows, dim = bits.shape
    for row in range(num_rows):
        largest = np.uint32(0)
        for d in range(dim):
            magnitude = np.uint32(bits[row, d] & np.uint32(0x7FFFFFFF))
            largest = magnitude if magnitude > largest else largest
        if largest > limit:
            return row
    return -1


@njit(nogil=True)
def row_ranges(
    values: npt.NDArray[np.float32], out_low: npt.NDArray[np.float32], out_high: npt.NDArray[np.float32]
) -> None:
    """Write minimum and maximum of each row (-0.0 counts as less than 0.0); the values must be finite.

    Compares integer images of the floats: float minima do not vectorize without reassociation, integer ones
    do (138 against 15 ns for a row of 128).
    """
    bits = values.view(np.int32)
    low_bits, high_bits = out_low.view(np.int32), out_high.view(np.int32)
    num_rows, dim = bits.shape
    mask = np.int32(0x7FFFFFFF)
    for row in range(num_rows):
        low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for d in range(dim):
            x = bits[row, d]
            image = np.int32(x ^ ((x >> np.int32(31)) & mask))
            low = min(low, image)
            high = max(high, image)
        low_bits[row] = low ^ ((low >> np.int32(31)) & mask)
        high_bits[row] = high ^ ((high >> np.int32(31)) & mask)


@njit(nogil=True)
def minmax_params(
    values: npt.NDArray[np.float32],
    max_code: np.float32,
    out_scale: npt.NDArray[np.float32],
    out_zero_point: npt.NDArray[np.float32],
) -> None:
    """Write scale and zero_point of the rows' own ranges."""
    row_ranges(values, out_zero_point, out_scale)
    for row in range(values.shape[0]):
        out_scale[row] = (out_scale[row] - out_zero_point[row]) / max_code


@njit(nogil=True, fastmath=_FINITE)
def _load_tile(
    values: npt.NDArray[np.float32], first: int, tile: npt.NDArray[np.float32], lane: npt.NDArray[np.float32]
) -> int:
    """Transpose and normalise up to LANES rows from `first`; return how many. Lanes without a row hold zeros."""
    num_rows, dim = values.shape
    count: int = min(LANES, num_rows - first)
    row_ranges(values[first : first + count], lane[_LOW, :count], lane[_WIDTH, :count])
    for r in range(count):
        low = lane[_LOW, r]
        width = lane[_WIDTH, r] - low
        inverse = _ONE / width if width > _NOT_INVERTIBLE else _ZERO
        lane[_WIDTH, r] = width
        for d in range(dim):
            tile[d, r] = (values[first + r, d] - low) * inverse
    for r in range(count, LANES):
        for d in range(dim):
            tile[d, r] = _ZERO
    return count


@njit(nogil=True, fastmath=_FINITE)
def _range_error(
    tile: npt.NDArray[np.float32],
    low: np.float32,
    inverse: np.float32,
    max_code: np.float32,
    error: npt.NDArray[np.float32],
) -> None:
    """Write each lane's squared error, in steps, of one candidate range that is the same for all lanes."""
    dim = tile.shape[0]
    for r in range(LANES):
        error[r] = _ZERO
    for d in range(dim):
        for r in range(LANES):
            t = (tile[d, r] - low) * inverse
            q = np.rint(t)
            q = q if q > _ZERO else _ZERO
            q = q if q < max_code else max_code
            e = t - q
            error[r] += e * e


@njit(nogil=True, fastmath=_FINITE)
def _sum_codes(tile: npt.NDArray[np.float32], max_code: np.float32, lane: npt.NDArray[np.float32]) -> None:
    """Write the sums that the least-squares step needs, over the codes of the lanes' best parameters."""
    for r in range(LANES):
        lane[_SUM_Q, r] = _ZERO
        lane[_SUM_QQ, r] = _ZERO
        lane[_SUM_QU, r] = _ZERO
        lane[_INVERSE, r] = _ONE / lane[_BEST_SCALE, r]
    for d in range(tile.shape[0]):
        for r in range(LANES):
            u = tile[d, r]
            t = (u - lane[_BEST_ZERO, r]) * lane[_INVERSE, r]
            q = np.rint(t)
            q = q if q > _ZERO else _ZERO
            q = q if q < max_code else max_code
            lane[_SUM_Q, r] += q
            lane[_SUM_QQ, r] += q * q
            lane[_SUM_QU, r] += q * (u - lane[_MEAN_U, r])


@njit(nogil=True, fastmath=_FINITE)
def _least_squares_step(dim: np.float32, relax: np.float32, lane: npt.NDArray[np.float32]) -> None:
    """Move the lanes' parameters to (or, with `relax` > 1, beyond) the best line through their present codes.

    The error is a quadratic of the parameters, so for `relax` below 2 it cannot grow, and choosing new codes
    cannot make it grow either: there is nothing to compare with.
    """
    for r in range(LANES):
        mean_q = lane[_SUM_Q, r] / dim
        variance = lane[_SUM_QQ, r] - lane[_SUM_Q, r] * mean_q
        # All codes equal: no line through them. The bound covers what rounding leaves of a zero variance.
        if variance > np.float32(1e-6) * lane[_SUM_QQ, r]:
            scale, zero_point = lane[_BEST_SCALE, r], lane[_BEST_ZERO, r]
            fitted = lane[_SUM_QU, r] / variance
            moved = scale + relax * (fitted - scale)
            if moved > _SMALLEST_SCALE:
                offset = lane[_MEAN_U, r] - fitted * mean_q
                lane[_BEST_SCALE, r] = moved
                lane[_BEST_ZERO, r] = zero_point + relax * (offset - zero_point)


@njit(nogil=True, fastmath=_FINITE)
def _store_best(
    first: int,
    count: int,
    lane: npt.NDArray[np.float32],
    out_scale: npt.NDArray[np.float32],
    out_zero_point: npt.NDArray[np.float32],
) -> None:
    for r in range(count):
        out_scale[first + r] = lane[_WIDTH, r] * lane[_BEST_SCALE, r]
        out_zero_point[first + r] = lane[_LOW, r] + lane[_WIDTH, r] * lane[_BEST_ZERO, r]


@njit(nogil=True, fastmath=_FINITE)
def grid_params(
    values: npt.NDArray[np.float32],
    max_code: np.float32,
    candidates: npt.NDArray[np.float32],
    fit_steps: int,
    relax: np.float32,
    out_scale: npt.NDArray[np.float32],
    out_zero_point: npt.NDArray[np.float32],
) -> None:
    """Write the best parameters of a grid of ranges followed by least-squares steps.

    `candidates` has the columns low, scale, 1 / scale in units of the row's width; the first row is min-max.
    """
    num_rows, dim = values.shape
    tile = np.empty((dim, LANES), np.float32)
    lane = np.empty((_LANE_ROWS, LANES), np.float32)
    error = lane[_ERROR]
    for first in range(0, num_rows, LANES):
        count = _load_tile(values, first, tile, lane)
        for c in range(candidates.shape[0]):
            low, scale, inverse = candidates[c, 0], candidates[c, 1], candidates[c, 2]
            _range_error(tile, low, inverse, max_code, error)
            squared = scale * scale
            if c == 0:
                for r in range(LANES):
                    lane[_BEST_ERROR, r] = error[r] * squared
                    lane[_BEST_ZERO, r] = low
                    lane[_BEST_SCALE, r] = scale
            else:
                for r in range(LANES):
                    if error[r] * squared < lane[_BEST_ERROR, r]:
                        lane[_BEST_ERROR, r] = error[r] * squared
                        lane[_BEST_ZERO, r] = low
                        lane[_BEST_SCALE, r] = scale
        for r in range(LANES):
            lane[_MEAN_U, r] = _ZERO
        for d in range(dim):
            for r in range(LANES):
                lane[_MEAN_U, r] += tile[d, r]
        for r in range(LANES):
            lane[_MEAN_U, r] /= np.float32(dim)
        for _ in range(fit_steps):
            _sum_codes(tile, max_code, lane)
            _least_squares_step(np.float32(dim), relax, lane)
        _store_best(first, count, lane, out_scale, out_zero_point)


@njit(nogil=True, fastmath=_FINITE)
def _shrink_errors(
    tile: npt.NDArray[np.float32],
    bin_width: np.float32,
    inverse: np.float32,
    max_code: np.float32,
    lane: npt.NDArray[np.float32],
) -> None:
    """Write both errors of one greedy step: raise the low end by a bin, or lower the high end by one."""
    dim = tile.shape[0]
    for r in range(LANES):
        lane[_ERROR, r] = _ZERO
        lane[_ERROR_HIGH, r] = _ZERO
        lane[_ZERO_LOW, r] = (lane[_RAISED, r] + _ONE) * bin_width
        lane[_ZERO_HIGH, r] = lane[_RAISED, r] * bin_width
    for d in range(dim):
        for r in range(LANES):
            u = tile[d, r]
            t = (u - lane[_ZERO_LOW, r]) * inverse
            q = np.rint(t)
            q = q if q > _ZERO else _ZERO
            q = q if q < max_code else max_code
            e = t - q
            lane[_ERROR, r] += e * e
            t = (u - lane[_ZERO_HIGH, r]) * inverse
            q = np.rint(t)
            q = q if q > _ZERO else _ZERO
            q = q if q < max_code else max_code
            e = t - q
            lane[_ERROR_HIGH, r] += e * e


@njit(nogil=True, fastmath=_FINITE)
def _cannot_improve(
    tile: npt.NDArray[np.float32], low_of: npt.NDArray[np.float32], width: np.float32, lane: npt.NDArray[np.float32]
) -> bool:
    """Return whether no range inside of each lane's present one, from `low_of` on, can have an error below the best.

    What lies outside of a range is at least as far from each range inside of it. The margin is far more than float32
    loses in a sum.
    """
    for r in range(LANES):
        lane[_CLIPPED, r] = _ZERO
    for d in range(tile.shape[0]):
        for r in range(LANES):
            below = low_of[r] - tile[d, r]
            above = -width - below
            outside = below if below > above else above
            outside = outside if outside > _ZERO else _ZERO
            lane[_CLIPPED, r] += outside * outside
    possible = 0
    for r in range(LANES):
        possible += 1 if lane[_CLIPPED, r] * _MARGIN < lane[_BEST_ERROR, r] else 0
    return possible == 0


@njit(nogil=True, fastmath=_FINITE)
def _walk_greedily(
    tile: npt.NDArray[np.float32],
    max_code: np.float32,
    path: npt.NDArray[np.float32],
    bin_width: np.float32,
    lane: npt.NDArray[np.float32],
) -> None:
    """Find each lane's best parameters on its greedy path."""
    _range_error(tile, _ZERO, path[0, 1], max_code, lane[_ERROR])
    for r in range(LANES):
        lane[_BEST_ERROR, r] = lane[_ERROR, r] * (path[0, 0] * path[0, 0])
        lane[_BEST_SCALE, r] = path[0, 0]
        lane[_BEST_ZERO, r] = _ZERO
        lane[_RAISED, r] = _ZERO
        lane[_ZERO_LOW, r] = _ZERO
    for k in range(1, path.shape[0]):
        if k % _STEPS_BETWEEN_BOUNDS == 0:
            for r in range(LANES):
                lane[_ZERO_LOW, r] = lane[_RAISED, r] * bin_width
            if _cannot_improve(tile, lane[_ZERO_LOW], path[k - 1, 0] * max_code, lane):
                return
        scale = path[k, 0]
        squared = scale * scale
        _shrink_errors(tile, bin_width, path[k, 1], max_code, lane)
        for r in range(LANES):
            raise_low = lane[_ERROR, r] < lane[_ERROR_HIGH, r]
            error = (lane[_ERROR, r] if raise_low else lane[_ERROR_HIGH, r]) * squared
            low = lane[_ZERO_LOW, r] if raise_low else lane[_ZERO_HIGH, r]
            lane[_RAISED, r] += _ONE if raise_low else _ZERO
            if error < lane[_BEST_ERROR, r]:
                lane[_BEST_ERROR, r] = error
                lane[_BEST_SCALE, r] = scale
                lane[_BEST_ZERO, r] = low


@njit(nogil=True, fastmath=_FINITE)
def greedy_params(
    values: npt.NDArray[np.float32],
    max_code: np.float32,
    path: npt.NDArray[np.float32],
    bin_width: np.float32,
    out_scale: npt.NDArray[np.float32],
    out_zero_point: npt.NDArray[np.float32],
) -> None:
    """Write the best parameters met on each row's greedy path (quantization reference, section 4.3).

    `path` has the columns scale, 1 / scale, one row per step from min-max on: after k steps every lane has
    the same width, only its low end differs. `lane[_RAISED]` counts how often the low end was raised.
    """
    num_rows, dim = values.shape
    tile = np.empty((dim, LANES), np.float32)
    lane = np.empty((_LANE_ROWS, LANES), np.float32)
    for first in range(0, num_rows, LANES):
        count = _load_tile(values, first, tile, lane)
        _walk_greedily(tile, max_code, path, bin_width, lane)
        _store_best(first, count, lane, out_scale, out_zero_point)


@njit(nogil=True)
def codes_from_params(
    values: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
    zero_point: npt.NDArray[np.float32],
    max_code: np.float32,
    out: npt.NDArray[np.uint8],
) -> None:
    """Write the codes that the stored parameters define (quantization reference, section 4.1) into `out[:, :dim]`.

    A quotient may overflow to Inf for parameters that no search gives; it is clamped like any other.
    """
    num_rows, dim = values.shape
    for row in range(num_rows):
        base = zero_point[row]
        inverse = _ONE / scale[row] if scale[row] > _NOT_INVERTIBLE else _ZERO
        for d in range(dim):
            t = (values[row, d] - base) * inverse
            q = np.rint(t)
            q = q if q > _ZERO else _ZERO
            q = q if q < max_code else max_code
            out[row, d] = np.uint8(np.int32(q))


@njit(nogil=True)
def values_from_codes(
    codes: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    zero_point: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
) -> None:
    """Write ``zero_point + scale * code`` for the first dim codes of each row, rounding twice."""
    num_rows, dim = out.shape
    for row in range(num_rows):
        step = scale[row]
        base = zero_point[row]
        for d in range(dim):
            out[row, d] = base + step * np.float32(codes[row, d])


@njit(nogil=True)
def squared_errors(
    values: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
    zero_point: npt.NDArray[np.float32],
    max_code: np.float32,
    out: npt.NDArray[np.float64],
) -> None:
    """Write each row's squared error, as of `codes_from_params` and `values_from_codes`, summed in float64."""
    num_rows, dim = values.shape
    differences = np.empty(dim, np.float64)
    for row in range(num_rows):
        step = scale[row]
        base = zero_point[row]
        inverse = _ONE / step if step > _NOT_INVERTIBLE else _ZERO
        for d in range(dim):
            t = (values[row, d] - base) * inverse
            q = np.rint(t)
            q = q if q > _ZERO else _ZERO
            q = q if q < max_code else max_code
            differences[d] = np.float64(base + step * q) - np.float64(values[row, d])
        error = 0.0
        for d in range(dim):
            error += differences[d] * differences[d]
        out[row] = error
