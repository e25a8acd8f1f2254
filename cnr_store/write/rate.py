"""Decide how exactly a table is stored, from a run's restores and its loss. Pure; records in, records out.

A scale may change in two places (design, section 4): by halvings in the first save after a restore, and to anything
in a ``baseline``. A decision made here is applied at the next of the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cnr_store.encodings.choose import expected_bits
from cnr_store.encodings.scale import TOLERANCE
from cnr_store.errors import BadInput
from cnr_store.format.limits import MAX_SHIFT
from cnr_store.types import AffineBits


def expected_restores(run_hours: float, mean_hours_between_failures: float) -> float:
    """Return how often a run will be restored, for ``TableOptions(bits="auto", expected_restores=...)``.

    Failures come at a constant rate, and each costs one restore, so their mean number is the run's length over the
    mean time between them. Of a job on many machines that is the mean time between failures of one of them, divided by
    how many there are.

    Raises
    ------
    BadInput
        A negative or infinite length, or a time between failures that is not positive.

    Examples
    --------
    >>> expected_restores(run_hours=72, mean_hours_between_failures=24)
    3.0
    >>> expected_restores(72, mean_hours_between_failures=5000 / 128)  # 128 machines, each fails every 5,000 hours
    1.8432
    """
    if not (math.isfinite(run_hours) and run_hours >= 0):
        raise BadInput(f"run_hours is a number of hours, at least 0, found {run_hours!r}", found=run_hours)
    if not mean_hours_between_failures > 0:
        raise BadInput(
            f"mean_hours_between_failures is a positive number of hours, found {mean_hours_between_failures!r}",
            found=mean_hours_between_failures,
        )
    return run_hours / mean_hours_between_failures


def bits_after(expected: float, restores: int) -> AffineBits:
    """Return the width for a run that expected so many restores and has had ``restores``.

    The paper's, of the larger number: never coarser than was asked for.

    >>> [bits_after(3, restores) for restores in (0, 3, 4, 21)]
    [3, 3, 4, 8]
    """
    return expected_bits(max(expected, restores))


def halvings_to(scale: float, wanted: float) -> int:
    """Return how often ``scale`` must be halved to be at most ``wanted``; 0 if it already is. Both are positive.

    At most `MAX_SHIFT`, which is as fine as a generation can become.

    >>> halvings_to(1.0, 1.0), halvings_to(1.0, 0.9), halvings_to(1.0, 0.5), halvings_to(0.1, 7.0)
    (0, 1, 1, 0)
    """
    halvings = max(0, math.ceil(math.log2(scale) - math.log2(wanted)))
    # The logarithm is rounded: exact powers of two must not cost a halving, nor anything else lack one.
    if halvings and math.ldexp(scale, -(halvings - 1)) <= wanted:
        halvings -= 1
    elif math.ldexp(scale, -halvings) > wanted:
        halvings += 1
    return min(halvings, MAX_SHIFT)


DRIFT = 2.0
"""A baseline chooses a new scale if the present one is this many times finer than the requested one."""


def is_too_fine(scale: float, target: float) -> bool:
    """Say whether a table's scale is finer by `DRIFT` than the one that its options ask for now. Pure.

    Training widens rows, so a scale that is kept becomes finer than asked, by about a bit an element for each doubling.
    One that is too coarse is left to refinements, which cost no baseline.

    >>> is_too_fine(0.1, 0.19), is_too_fine(0.1, 0.2), is_too_fine(0.1, 0.01)
    (False, True, False)
    """
    return target >= DRIFT * scale


LOSS_TOLERANCE = 0.05
"""A loss counts as unchanged within this share."""

LOSSES_IN_MEAN = 100
"""Losses that `smoothed` takes the mean of, about."""


def halvings_for_loss(first: float, loss: float) -> int:
    """Return how much finer the lattice should be than it was when the loss was ``first``, in halvings of the scale.

    Levels grow as ``sqrt(first / loss)``, here to the next power of two: coarse while the loss is high, since then a
    rounding harms little against what is still to be learned (AdaQuantFL, Jhunjhunwala et al., ICASSP 2021). At most
    `MAX_SHIFT`; 0 for a loss that rose, or fell by less than `LOSS_TOLERANCE`. Losses are positive and finite.

    >>> [halvings_for_loss(1.0, loss) for loss in (2.0, 1.0, 0.96, 0.7, 0.25, 0.24, 0.01)]
    [0, 0, 0, 1, 1, 2, 4]
    """
    if loss >= first * (1.0 - LOSS_TOLERANCE):
        return 0
    return halvings_to(math.sqrt(first), math.sqrt(loss))


def smoothed(mean: float | None, count: int, loss: float) -> float:
    """Return the mean of the losses so far, of which there were ``count``: of all, later of about the last hundred.

    >>> smoothed(None, 0, 3.0), smoothed(3.0, 1, 1.0)
    (3.0, 2.0)
    """
    return loss if mean is None else mean + (loss - mean) / min(count + 1, LOSSES_IN_MEAN)


@dataclass(frozen=True, slots=True)
class Refinement:
    """How a table's scale becomes finer.

    Attributes
    ----------
    how
        ``halve``: halve it ``halvings`` times in the first save after the restore. ``baseline``: choose a scale in the
        next baseline. ``keep``: the scale is fine enough for ``bits``.
    bits
        The width that the scale is for from then on.
    reason
        One clause for logs and reports.
    """

    how: Literal["halve", "baseline", "keep"]
    halvings: int
    bits: AffineBits
    reason: str


def refinement(
    bits: AffineBits, wanted: AffineBits, scale: float | None, target: float | None, most_halvings: int, reason: str
) -> Refinement | None:
    """Return what to do with a table whose scale is for ``bits`` and should be for ``wanted``; None if nothing. Pure.

    Parameters
    ----------
    scale, target
        The lattice scale that it has, and the one that ``wanted`` asks for; None where it is no lattice. The latter is
        measured, so a scale that is larger by up to `TOLERANCE` is fine enough: a halving costs a bit per element.
    most_halvings
        How often the scale can be halved before codes leave their range.
    """
    if wanted <= bits:
        return None
    if scale is None or target is None:
        return Refinement("baseline", 0, wanted, reason)
    halvings = halvings_to(scale, target * (1.0 + TOLERANCE))
    if halvings == 0:
        return Refinement("keep", 0, wanted, reason)
    return Refinement("halve" if halvings <= most_halvings else "baseline", halvings, wanted, reason)


def known_bits(stored: Mapping[str, int], table: str, expected: float) -> AffineBits:
    """Return the width that a table's scale is for: the checkpoint's, else that of ``expected`` restores."""
    found = stored.get(table)
    return next((bits for bits in (2, 3, 4, 8) if bits == found), expected_bits(expected))
