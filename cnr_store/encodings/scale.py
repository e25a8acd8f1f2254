"""The step of a lattice from what users ask for: b-bit Check-N-Run quality, a largest error, or the step.

Pure computation on a sample: all ranks must agree on one scale, so one of them chooses
for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.encodings import kernels
from cnr_store.encodings.affine import row_errors
from cnr_store.encodings.choose import REFERENCE_SETTINGS
from cnr_store.encodings.lattice import LARGEST_SCALE, SMALLEST_SCALE, check_scale
from cnr_store.encodings.sampling import RowSample
from cnr_store.encodings.widths import as_columns, to_float32
from cnr_store.errors import BadInput
from cnr_store.runtime.records import converter
from cnr_store.types import MAX_CODE, Affine, AffineBits, Float32s, Precision, TableDtype

FALLBACK_STEPS = 1 << 16
"""Without anything to measure (a sample that is empty, all zero, or constant rows), the scale is the sample's
largest value, or 1 where that is 0, rounded down to a power of two, over this: finer than 8-bit rows, and
codes have room for values 32 times larger."""

MSE_TOLERANCE = 0.005
"""The lattice's error on the sample is at most the target, and at least (1 - this) times it where that can be met."""

_CORRECTIONS = 4
_BISECTIONS = 40
_LARGEST_EXPONENT = 127  # of a power of two in float32
_LARGEST_USABLE = float(np.nextafter(np.float32(LARGEST_SCALE), np.float32(0)))


TOLERANCE = 0.02
"""How far, as a share, the error of a measured scale may be from the one asked for: that of a table of normal rows."""

CONFIDENCE = 0.95
"""Probability with which the interval of a measured scale holds."""


class ScaleChoice(msgspec.Struct, frozen=True):
    """A lattice scale and how sure it is.

    Attributes
    ----------
    scale
        The step, as a number that float32 holds exactly.
    sample_rows
        Rows that it was measured on; those with NaN or Inf do not count.
    mse
        Mean squared error per element of the lattice on them.
    relative_half_width
        With probability `CONFIDENCE`, the lattice's mean squared error on the whole table is within this share of that
        of the rows asked for (b-bit Check-N-Run rows). 0 where every row was looked at, or the scale was given.
    zeroed
        Share of the sample's rows that have values and that the scale rounds to zero; 0 if the scale was given.
    """

    scale: float
    sample_rows: int
    mse: float
    relative_half_width: float
    zeroed: float = 0.0


scale_choice = converter(ScaleChoice)
"""A choice from plain data, as ranks send it to each other."""


def measure_scale(
    sample: RowSample,
    dtype: TableDtype,
    precision: Precision,
    *,
    held: float | None = None,
    may_escape: bool = False,
) -> ScaleChoice:
    """Return the lattice scale for a table, from a sample of its rows.

    Parameters
    ----------
    sample
        Rows of the table.
    precision
        ``scale``: taken as it is, rounded to float32. ``max_error``: twice it, rounded down. ``bits``: a
        scale whose mean squared error on the sample is at most that of b-bit affine rows (greedy search with
        `REFERENCE_SETTINGS`, fp16 parameters), and within 0.5 % of it; see quantization reference, 5.4.
    held
        The scale that the table had when it was last restored, if it was; see `spread_over_cells`.
    may_escape
        Whether rows beyond the code range of a given scale, or of the largest one, escape: they do not count, and
        do not refuse it.

    Returns
    -------
    ScaleChoice
        Blocks for the read and the computation: 0.1 to 0.8 ms for ``bits``, whatever the rows are like.

    Raises
    ------
    BadInput
        As `choose_scale`.

    Notes
    -----
    Rows are the sampling unit, since elements of a row share its parameters. The interval is that of a ratio of two
    means by the delta method: residuals ``l_i - R a_i`` of the rows' lattice and affine errors, with the correction
    for a finite table (Cochran, Sampling Techniques, 3rd ed., 6.4). A bootstrap gives the same where both can be
    trusted, for many times the work. Neither sees rows that are rare, large and not in the sample: of tables whose
    error is that of a few rows the interval is too narrow.
    """
    _check_one_target(precision)
    bits = precision.bits
    if bits is None:
        rows = _finite(to_float32(sample.rows(), dtype))
        given = choose_scale(rows[:0], precision)
        if may_escape:
            rows = _within(rows, given * MAX_CODE)
        _check_range(rows, given)
        return ScaleChoice(given, len(rows), lattice_mse(rows, given), 0.0)
    return measure_scales([sample], dtype, bits, held=[held], may_escape=may_escape)[0]


def measure_scales(
    samples: Sequence[RowSample], dtype: TableDtype, bits: AffineBits, *, held: Sequence[float | None],
    may_escape: bool = False,
) -> list[ScaleChoice]:  # fmt: skip
    """Return the choices of `measure_scale` for ``bits``, for several tables with as many columns each.

    The errors that small tables ask for are found by one call, since it takes longer to begin than their rows do.
    """
    rows = [_measurable(sample, dtype, step, may_escape) for sample, step in zip(samples, held, strict=True)]
    targets = _targets_of(rows, bits)
    return [_choice_for(sample, own, target) for sample, own, target in zip(samples, rows, targets, strict=True)]


def _measurable(sample: RowSample, dtype: TableDtype, held: float | None, may_escape: bool) -> Float32s:
    """Return the rows of a sample that a scale is measured on, as float32 (n, dim)."""
    rows = _finite(to_float32(sample.rows(), dtype))
    if held is not None:
        rows = spread_over_cells(rows, held)
    return _within(rows, _LARGEST_USABLE * MAX_CODE) if may_escape else rows


def _choice_for(sample: RowSample, rows: Float32s, target: _AffineError) -> ScaleChoice:
    scale = _scale_for_error(rows, target)
    errors = lattice_row_errors(rows, scale)
    half_width = ratio_half_width(errors, target.row_errors, sample.size if sample.is_all else None)
    mse = float(np.mean(errors)) / rows.shape[1] if errors.size else 0.0
    zeroed = kernels.zeroed_rows(rows.view(np.uint32), np.float32(scale / 2).view(np.uint32))
    return ScaleChoice(scale, len(rows), mse, half_width, zeroed / max(len(rows), 1))


def choose_scale(sample: Float32s, precision: Precision) -> float:
    """Return the lattice scale that fits these rows, as a number that float32 holds exactly; looks at all of them.

    Parameters
    ----------
    sample
        float32 (n, d). Read only. Rows with NaN or Inf are left out (they are refused, or escape, when they are
        written).
    precision
        As for `measure_scale`.

    Raises
    ------
    BadInput
        If not exactly one target is set, the target is no positive finite number, or the sample holds values
        that would need codes beyond MAX_CODE at this scale.
    """
    _check_one_target(precision)
    finite = _finite(sample)
    if precision.scale is not None:
        scale = float(check_scale(precision.scale))
    elif precision.max_error is not None:
        scale = float(check_scale(_rounded_down(2.0 * precision.max_error)))
    else:
        assert precision.bits is not None
        scale = _scale_for_error(finite, _targets_of([finite], precision.bits)[0])
    _check_range(finite, scale)
    return scale


def warmup() -> None:
    """Compile (or load) the kernels of `measure_scale` now: seconds, once per machine. Blocks."""
    rows = np.eye(2, dtype=np.float32)
    measure_scales([RowSample(rows, "float32")], "float32", 8, held=[None])


def spread_over_cells(rows: Float32s, scale: float) -> Float32s:
    """Return rows as they may have been before a lattice of this scale rounded them; others as they are.

    A restored row lies on the lattice, and so says nothing about what a finer one would cost: affine rows with as many
    levels as it has points hold it exactly. Each of its values was somewhere in its cell: evenly, as far as is known.
    Rows of zeros stay: most were never anything else.

    Parameters
    ----------
    rows
        float32 (n, d), finite. Not changed.
    """
    if rows.size == 0:
        return rows
    step = check_scale(scale)
    on_lattice = (rows == step * np.rint(rows / step)).all(axis=1) & rows.any(axis=1)
    spread = rows.copy()
    moved = np.random.default_rng(0).random((int(on_lattice.sum()), rows.shape[1]), np.float32) - np.float32(0.5)
    spread[on_lattice] += step * moved
    return spread


def pooled(choices: Sequence[ScaleChoice], elements: Sequence[int]) -> ScaleChoice:
    """Return one choice for a table from those of its shards, of so many elements each. Pure.

    The scale is the root of the mean of the squared scales, weighted by elements: its square is 12 times the mean
    squared error that was asked for, so this is the scale that the rows of all shards together ask for. Their
    samples are independent, so the squares of the half-widths add up.
    """
    if len(choices) == 1:
        return choices[0]
    if len({choice.scale for choice in choices}) == 1:
        scale = choices[0].scale
    else:
        measured = [(c.scale, n) for c, n in zip(choices, elements, strict=True) if n] or [
            (c.scale, 1) for c in choices
        ]
        total = sum(n for _, n in measured)
        scale = float(np.float32(math.sqrt(sum(scale**2 * n for scale, n in measured) / total)))
    weights = [choice.mse * n for choice, n in zip(choices, elements, strict=True)]
    error = sum(weights)
    half_width = math.hypot(*(w * c.relative_half_width for w, c in zip(weights, choices, strict=True)))
    return ScaleChoice(
        scale,
        sum(choice.sample_rows for choice in choices),
        error / sum(elements) if sum(elements) else 0.0,
        half_width / error if error else 0.0,
        sum(c.zeroed * n for c, n in zip(choices, elements, strict=True)) / sum(elements) if sum(elements) else 0.0,
    )


def ratio_half_width(errors: npt.NDArray[np.float64], targets: npt.NDArray[np.float64], num_rows: int | None) -> float:
    """Return half the width of the interval of ``mean(errors) / mean(targets)`` at `CONFIDENCE`, relative to it. Pure.

    Parameters
    ----------
    errors, targets
        float64 (n,): two figures of each sampled row. `measure_scale` says how, and when not to trust it.
    num_rows
        Rows of the table that they are a sample of; None if that is not known, or large.

    Returns
    -------
    float
        0 for a sample of all rows, or of none; 1 for one row of several, which has no spread.
    """
    count = len(errors)
    left_out = 1.0 if num_rows is None else max(0.0, 1.0 - count / max(num_rows, 1))
    if count == 0 or left_out == 0.0:
        return 0.0
    total, of_targets = float(np.sum(errors)), float(np.sum(targets))
    if total == 0.0 or of_targets == 0.0:
        return 0.0
    if count == 1:
        return 1.0
    residuals = errors - (total / of_targets) * targets
    deviation = math.sqrt(float(np.sum(np.square(residuals))) / (count - 1))
    return NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * deviation * math.sqrt(left_out * count) / total


def minmax_scale(sample: Float32s, bits: AffineBits) -> float:
    """Return about the scale that ``bits`` asks for, or more: that of min-max rows, which no greedy search makes worse.

    In microseconds, for a check that a scale is not too fine. float32 (n, d); rows with NaN or Inf
    do not count; 0 for none.
    """
    rows = _finite(sample)
    if rows.size == 0:
        return 0.0
    widths = (rows.max(axis=1) - rows.min(axis=1)).astype(np.float64)
    return math.sqrt(float(np.mean(np.square(widths)))) / (2**bits - 1)


def lattice_mse(sample: Float32s, scale: float) -> float:
    """Return the mean squared error of lattice codes on a finite sample (n, d); 0 for an empty one.

    Raises
    ------
    BadInput
        If a value needs a code beyond MAX_CODE.
    """
    return float(np.sum(lattice_row_errors(sample, scale))) / sample.size if sample.size else 0.0


def lattice_row_errors(sample: Float32s, scale: float) -> npt.NDArray[np.float64]:
    """Return each row's squared error, summed over its elements: float64 (n,), of a finite sample (n, d).

    Raises
    ------
    BadInput
        If a value needs a code beyond MAX_CODE.
    """
    if sample.size == 0:
        return np.zeros(len(sample))
    _check_range(sample, scale)
    errors = np.empty(len(sample))
    kernels.lattice_squared_errors(as_columns(np.ascontiguousarray(sample)), check_scale(scale), errors)
    return errors


def _mse(sample: Float32s, scale: float) -> float:
    """As `lattice_mse`, of a contiguous sample (n, d) that is known to be within the code range."""
    return float(kernels.lattice_squared_error(sample, check_scale(scale))) / sample.size


@dataclass(frozen=True, slots=True, eq=False)
class _AffineError:
    """The error of affine rows: their mean, and each row's; and the largest absolute value of the rows."""

    mse: float
    row_errors: npt.NDArray[np.float64]
    largest: float


def _targets_of(samples: Sequence[Float32s], bits: AffineBits) -> list[_AffineError]:
    """Return the errors of b-bit Check-N-Run rows on finite samples (n, d) with one d: greedy search, fp16 parameters.

    Each sample is first scaled by a power of two, so that fp16 parameters neither overflow nor vanish: the error then
    depends on the shape of the rows, not on their unit.
    """
    largest = [*map(_largest, samples)]
    exponents = [max(math.frexp(one)[1] - 1, -_LARGEST_EXPONENT) for one in largest]
    stops = [*accumulate(map(len, samples))]
    parts = [slice(stop - len(sample), stop) for sample, stop in zip(samples, stops, strict=True)]
    joined = np.empty((stops[-1], samples[0].shape[1]), np.float32)
    for sample, part, exponent in zip(samples, parts, exponents, strict=True):
        np.multiply(sample, np.float32(2.0**-exponent), out=joined[part])
    num_bins, ratio = REFERENCE_SETTINGS[bits]
    errors = row_errors(joined, Affine(bits, search="greedy", param_dtype="float16", num_bins=num_bins, ratio=ratio))
    assert len(errors) == len(joined)  # of finite rows none is left out
    found = []
    for sample, part, exponent, most in zip(samples, parts, exponents, largest, strict=True):
        own = errors[part]
        own *= 4.0**exponent
        found.append(_AffineError(float(np.sum(own)) / sample.size if sample.size else 0.0, own, most))
    return found


def _largest(sample: Float32s) -> float:
    """Return the largest absolute value of a sample (n, d), 0 for an empty one; Inf or NaN where it is not finite."""
    bits = kernels.largest_magnitude(np.ascontiguousarray(sample).view(np.uint32))
    return float(np.uint32(bits).view(np.float32))


def _finite(sample: Float32s) -> Float32s:
    """Return the rows without NaN and Inf: the sample itself where it has no others."""
    return sample if math.isfinite(_largest(sample)) else sample[np.isfinite(sample).all(axis=1)]


def _within(rows: Float32s, limit: float) -> Float32s:
    """Return the finite rows (n, d) without values beyond the limit: the array itself where there are none."""
    return rows if _largest(rows) <= limit else rows[np.abs(rows).max(axis=1) <= limit]


def _check_one_target(precision: Precision) -> None:
    targets = [name for name in ("bits", "max_error", "scale") if getattr(precision, name) is not None]
    if len(targets) != 1:
        raise BadInput(
            f"a precision names exactly one of bits, max_error and scale, found {targets or 'none'}",
            expected="one of bits, max_error, scale",
            found=targets,
        )


def _scale_for_error(sample: Float32s, wanted: _AffineError) -> float:
    """Return a scale whose error on the sample is at most that wanted: within `MSE_TOLERANCE`, or the largest found.

    The error of values that are spread over many cells is a twelfth of the squared step, so one or two
    corrections by that law are enough for nearly all tables; others are searched.
    """
    target, largest = wanted.mse, wanted.largest
    start = math.sqrt(12.0 * target)
    # Below this the sample itself would come near the end of the code range.
    finest = largest / (MAX_CODE // 4)
    if start <= finest:
        return _usable(math.ldexp(1.0, math.frexp(largest or 1.0)[1] - 1) / FALLBACK_STEPS)
    scale, sample = _usable(start), np.ascontiguousarray(sample)
    for _ in range(_CORRECTIONS):
        error = _mse(sample, scale)
        if (1.0 - MSE_TOLERANCE) * target <= error <= target:
            return scale
        if error == 0.0:
            break
        scale = _usable(scale * math.sqrt((1.0 - MSE_TOLERANCE / 2) * target / error))
        if not finest < scale < 4.0 * largest:
            break
    return _searched_scale(sample, target, start, finest, largest)


def _searched_scale(sample: Float32s, target: float, start: float, finest: float, largest: float) -> float:
    """Return the largest scale found whose error on the sample is at most ``target``, by bisection."""
    fits, misses = _bracket(sample, target, start, finest, largest)
    error = _mse(sample, fits)
    for _ in range(_BISECTIONS):
        if misses is None or error >= (1.0 - MSE_TOLERANCE) * target:
            break
        middle = _usable(math.sqrt(fits * misses))
        found = _mse(sample, middle)
        if found <= target:
            fits, error = middle, found
        else:
            misses = middle
    return fits


def _bracket(
    sample: Float32s, target: float, start: float, finest: float, largest: float
) -> tuple[float, float | None]:
    """Return (a scale that meets the target, a larger one that misses it or None if none does)."""
    fits = _usable(start)
    misses: float | None = None
    finest = max(finest, SMALLEST_SCALE)
    while _mse(sample, fits) > target and fits > finest:
        fits, misses = _usable(max(fits / 1.25, finest)), fits
    while misses is None and fits < 4.0 * largest and fits < _LARGEST_USABLE:
        coarser = _usable(fits * 1.25)
        if _mse(sample, coarser) > target:
            misses = coarser
        else:
            fits = coarser
    return fits, misses


def _check_range(sample: Float32s, scale: float) -> None:
    largest = _largest(sample)
    if largest > scale * MAX_CODE:
        least = largest / MAX_CODE
        coarser = f"ask for a scale of at least {least:.3g} (max_error {least / 2:.3g}), or "
        raise BadInput(
            f"the sample holds values up to {largest:.6g}, which at scale {scale:.6g} need codes beyond 2^21; "
            f"{coarser if least < _LARGEST_USABLE else ''}use float_bits (TableOptions.exact()) for values of such a "
            "range",
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
