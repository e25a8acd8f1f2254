"""The step of a lattice from what users ask for: b-bit Check-N-Run quality, a largest error, or the step.

Pure computation on a sample: all ranks must agree on one scale, so one of them chooses and the others are
told.
"""

from __future__ import annotations

import math

import numpy as np

from cnr_store.encodings import kernels
from cnr_store.encodings.choose import choose_greedy, sample_mse
from cnr_store.encodings.lattice import LARGEST_SCALE, SMALLEST_SCALE, check_scale
from cnr_store.encodings.widths import as_columns
from cnr_store.errors import BadInput
from cnr_store.types import MAX_CODE, Affine, AffineBits, Float32s, Precision

FALLBACK_STEPS = 1 << 16
"""Without anything to measure (a sample that is empty, all zero, or constant rows), the scale is the sample's
largest value, or 1 where that is 0, rounded down to a power of two, over this: finer than 8-bit rows, and
codes have room for values 32 times larger."""

MSE_TOLERANCE = 0.005
"""The lattice's error on the sample is at most the target, and at least (1 - this) times it where that can be met."""

_BISECTIONS = 40
_LARGEST_USABLE = float(np.nextafter(np.float32(LARGEST_SCALE), np.float32(0)))


def choose_scale(sample: Float32s, precision: Precision) -> float:
    """Return the lattice scale for a table, as a number that float32 holds exactly.

    Parameters
    ----------
    sample
        float32 (n, d): rows of the table, a few thousand are enough. Read only. Rows with NaN or Inf are left
        out (they are refused, or escape, when they are written).
    precision
        ``scale``: taken as it is, rounded to float32. ``max_error``: twice it, rounded down. ``bits``: the
        largest scale found whose mean squared error on the sample is at most that of b-bit affine rows
        (greedy search with its settings chosen on the sample, fp16 parameters), within 0.5 %; see
        quantization reference, 5.4.

    Returns
    -------
    float
        The scale. Blocks for the computation alone: milliseconds for given scales, about a second for
        ``bits``.

    Raises
    ------
    BadInput
        If not exactly one target is set, the target is no positive finite number, or the sample holds values
        that would need codes beyond MAX_CODE at this scale.
    """
    targets = [name for name in ("bits", "max_error", "scale") if getattr(precision, name) is not None]
    if len(targets) != 1:
        raise BadInput(
            f"a precision names exactly one of bits, max_error and scale, found {targets or 'none'}",
            expected="one of bits, max_error, scale",
            found=targets,
        )
    finite = sample[np.isfinite(sample).all(axis=1)] if sample.size else sample[:0]
    if precision.scale is not None:
        scale = float(check_scale(precision.scale))
    elif precision.max_error is not None:
        scale = float(check_scale(_rounded_down(2.0 * precision.max_error)))
    else:
        assert precision.bits is not None
        scale = _scale_for_bits(finite, precision.bits)
    _check_range(finite, scale)
    return scale


def lattice_mse(sample: Float32s, scale: float) -> float:
    """Return the mean squared error of lattice codes on a finite sample (n, d); 0 for an empty one.

    Raises
    ------
    BadInput
        If a value needs a code beyond MAX_CODE.
    """
    if sample.size == 0:
        return 0.0
    step = check_scale(scale)
    block = as_columns(np.ascontiguousarray(sample))
    codes, flags = np.empty(block.shape, np.int32), np.zeros(len(block), np.uint8)
    _, first_bad = kernels.lattice_encode(block, step, codes, flags)
    if first_bad >= 0:
        _check_range(sample, scale)
    values = codes.view(np.float32)
    kernels.lattice_decode_in_place(values, step)
    return float(np.mean(np.square(values.astype(np.float64) - block)))


def affine_mse(sample: Float32s, bits: AffineBits) -> float:
    """Return the mean squared error of b-bit Check-N-Run rows on a finite sample (n, d).

    Greedy search with settings chosen on the sample, fp16 parameters. The sample is brought to a largest value
    between 1 and 2 by a power of two first, so that fp16 parameters neither overflow nor vanish: the target then
    depends on the shape of the rows, not on their unit.
    """
    largest = float(np.max(np.abs(sample), initial=0.0))
    if largest == 0.0:
        return 0.0
    exponent = math.frexp(largest)[1] - 1
    rows = np.ascontiguousarray(np.ldexp(sample, -exponent), dtype=np.float32)
    num_bins, ratio = choose_greedy(rows, bits)
    rows_encoding = Affine(bits, search="greedy", param_dtype="float16", num_bins=num_bins, ratio=ratio)
    return math.ldexp(sample_mse(rows, rows_encoding), 2 * exponent)


def _scale_for_bits(sample: Float32s, bits: AffineBits) -> float:
    largest = float(np.max(np.abs(sample), initial=0.0))
    target = affine_mse(sample, bits) if largest > 0.0 else 0.0
    start = math.sqrt(12.0 * target)
    # Below this the sample itself would come near the end of the code range.
    finest = largest / (MAX_CODE // 4)
    if start <= finest:
        return _usable(math.ldexp(1.0, math.frexp(largest or 1.0)[1] - 1) / FALLBACK_STEPS)
    fits, misses = _bracket(sample, target, start, finest, largest)
    for _ in range(_BISECTIONS):
        if misses is None or lattice_mse(sample, fits) >= (1.0 - MSE_TOLERANCE) * target:
            break
        middle = _usable(math.sqrt(fits * misses))
        if lattice_mse(sample, middle) <= target:
            fits = middle
        else:
            misses = middle
    return fits


def _bracket(
    sample: Float32s, target: float, start: float, finest: float, largest: float
) -> tuple[float, float | None]:
    """Return (a scale that meets the target, a larger one that misses it or None if none does)."""
    fits = _usable(start)
    misses: float | None = None
    while lattice_mse(sample, fits) > target and fits > finest:
        fits, misses = _usable(max(fits / 1.25, finest)), fits
    while misses is None and fits < 4.0 * largest and fits < _LARGEST_USABLE:
        coarser = _usable(fits * 1.25)
        if lattice_mse(sample, coarser) > target:
            misses = coarser
        else:
            fits = coarser
    return fits, misses


def _check_range(sample: Float32s, scale: float) -> None:
    largest = float(np.max(np.abs(sample), initial=0.0))
    if largest > scale * MAX_CODE:
        raise BadInput(
            f"the sample holds values up to {largest:.6g}, which at scale {scale:.6g} need codes beyond 2^21; ask for "
            f"a scale of at least {largest / MAX_CODE:.3g} (max_error {largest / MAX_CODE / 2:.3g}), or use float_bits "
            "for values of such a range",
            expected=f"at most {scale * MAX_CODE:.6g}",
            found=largest,
        )


def _rounded_down(scale: float) -> float:
    if not 0.0 < scale <= LARGEST_SCALE:
        return scale
    rounded = np.float32(scale)
    return float(np.nextafter(rounded, np.float32(0)) if float(rounded) > scale else rounded)


def _usable(scale: float) -> float:
    """Return the nearest scale that `check_scale` takes and float32 holds, rounded down where there is a choice."""
    return _rounded_down(min(max(scale, SMALLEST_SCALE), _LARGEST_USABLE))
