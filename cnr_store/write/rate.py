"""How exact a table is stored, decided from what a run shows: restores, the loss, sizes. Pure; records in, records out.

A scale may change in two places (design, section 4): by halvings in the first save after a restore, and to anything
in a ``full``. What is decided here waits for one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    Raises
    ------
    BadInput
        A number is negative or NaN.
    """
    if restores < 0:
        raise BadInput(f"a run was restored {restores} times", found=restores)
    return expected_bits(max(expected, restores))


def halvings_to(scale: float, wanted: float) -> int:
    """Return how often ``scale`` must be halved to be at most ``wanted``; 0 if it is that already.

    At most `MAX_SHIFT`, which is as fine as a generation can become.

    >>> halvings_to(1.0, 1.0), halvings_to(1.0, 0.9), halvings_to(1.0, 0.5), halvings_to(0.1, 7.0)
    (0, 1, 1, 0)

    Raises
    ------
    BadInput
        A scale is not positive and finite.
    """
    for one in (scale, wanted):
        if not (math.isfinite(one) and one > 0):
            raise BadInput(f"a scale is positive and finite, found {one!r}", found=one)
    halvings = max(0, math.ceil(math.log2(scale) - math.log2(wanted)))
    # The logarithm is rounded: exact powers of two must not cost a halving, nor anything else lack one.
    if halvings and math.ldexp(scale, -(halvings - 1)) <= wanted:
        halvings -= 1
    elif math.ldexp(scale, -halvings) > wanted:
        halvings += 1
    return min(halvings, MAX_SHIFT)


DRIFT = 2.0
"""A full chooses a scale anew that has become so many times finer than what was asked for."""


def is_too_fine(scale: float, target: float) -> bool:
    """Say whether a table's scale is finer by `DRIFT` than the one that its options ask for now. Pure.

    Training widens rows, so a scale that is kept becomes finer than asked, by about a bit an element for each doubling.
    One that is too coarse is left to refinements, which cost no full.

    >>> is_too_fine(0.1, 0.19), is_too_fine(0.1, 0.2), is_too_fine(0.1, 0.01)
    (False, True, False)
    """
    return target >= DRIFT * scale


LOSS_TOLERANCE = 0.05
"""A loss that is within this share of where it was counts as the same."""

LOSSES_IN_MEAN = 100
"""Losses that `smoothed` takes the mean of, about."""


def halvings_for_loss(first: float, loss: float) -> int:
    """Return how much finer the lattice should be than it was when the loss was ``first``, in halvings of the scale.

    Levels grow as ``sqrt(first / loss)``, here to the next power of two: coarse while the loss is high, since then a
    rounding harms little against what is still to be learned (AdaQuantFL, Jhunjhunwala et al., ICASSP 2021). At most
    `MAX_SHIFT`; 0 for a loss that rose, or fell by less than `LOSS_TOLERANCE`.

    >>> [halvings_for_loss(1.0, loss) for loss in (2.0, 1.0, 0.96, 0.7, 0.25, 0.24, 0.01)]
    [0, 0, 0, 1, 1, 2, 4]

    Raises
    ------
    BadInput
        A loss is not positive and finite.
    """
    for one in (first, loss):
        if not (math.isfinite(one) and one > 0):
            raise BadInput(f"the schedule follows a loss that is positive and finite, found {one!r}", found=one)
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
    """What becomes of a table's scale.

    Attributes
    ----------
    how
        ``refine``: halve it ``halvings`` times in the first save after the restore. ``anew``: choose it in a full.
        ``keep``: it is fine enough, for ``bits`` too.
    bits
        The width that the scale is for from then on.
    reason
        One clause for logs and reports.
    """

    how: Literal["refine", "anew", "keep"]
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
        return Refinement("anew", 0, wanted, reason)
    halvings = halvings_to(scale, target * (1.0 + TOLERANCE))
    if halvings == 0:
        return Refinement("keep", 0, wanted, reason)
    return Refinement("refine" if halvings <= most_halvings else "anew", halvings, wanted, reason)


def known_bits(stored: Mapping[str, int], table: str, expected: float) -> AffineBits:
    """Return the width that a table's scale is for: as a checkpoint says, else what ``expected`` restores ask for."""
    found = stored.get(table)
    return next((bits for bits in (2, 3, 4, 8) if bits == found), expected_bits(expected))


# ---- a target of bytes

LEAST_SHARE = 0.05
"""A threshold's ``keep`` is lowered to this share of what the user gave, and no further."""

PAYBACK_SAVES = 48
"""Saves within which a coarser scale must win back the bytes of the full that it needs."""

_AIM, _ROOM = 0.9, 0.75
"""Parts of a target: what a change aims at, and below what there is room for more."""
_SMOOTHED = 3
"""Saves whose mean size is compared with the target."""
_LARGEST_CUT, _LARGEST_RISE = 0.25, 1.5
"""Factors by which a share changes at most from one save to the next."""
_GRIP = 0.1
"""Part of the bytes that a lower share would save if they were all rows; with less, scales are turned to at once."""
_SAVES_BEFORE_SCALE = 2
"""Saves that must be over the target, with the same share and scale, before another scale is wanted."""

TargetState = Literal["learning", "met", "adjusting", "waiting", "unreachable"]
"""``learning``: no save has told a size yet. ``adjusting``: the next save changes something. ``waiting``: a coarser
scale is due, but a full for it would cost more than it saves, so it comes with the next one. ``unreachable``: nothing
is left to change, or it would not be enough."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What one committed save cost, and how it was made.

    Attributes
    ----------
    size_bytes
        Bytes of the segment, of all ranks.
    elements, code_bytes
        Of the tables whose scale may become coarser: elements in the segment, and bytes that their codes take.
    share, doublings
        What was in force (`Steering`).
    """

    size_bytes: int
    elements: int
    code_bytes: int
    share: float
    doublings: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What `steer` may do.

    Attributes
    ----------
    has_thresholds
        Whether some table has a `Threshold`, so that a share means something.
    settles
        Saves until a changed share shows its whole effect: rows that wait come back within the longest ``max_wait``.
    most_doublings
        How much coarser than the options ask for the scales can become.
    full_bytes
        Bytes of a full, as far as known.
    saves_to_full
        Saves until there is a full anyway: 0 if the next one is, None if none is foreseen.
    """

    has_thresholds: bool
    settles: int
    most_doublings: int
    full_bytes: int | None = None
    saves_to_full: int | None = None


@dataclass(frozen=True, slots=True)
class Steering:
    """What the next save is to be like, for checkpoints to come to a target of bytes.

    Attributes
    ----------
    share
        Part of every threshold's ``keep`` that is used, from `LEAST_SHARE` to 1.
    doublings
        How often scales are doubled against what the options ask for; a full may change that.
    asks_full
        Whether a full should be made for it now.
    state, reason
        Where this stands, and one clause for logs.
    size_bytes
        Mean size of the saves that it was decided on; None without any.
    """

    share: float
    doublings: int
    asks_full: bool
    state: TargetState
    reason: str
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """How a run stands to ``target_bytes_per_checkpoint``, as known when the newest save began.

    Attributes
    ----------
    target_bytes
        What was asked for.
    state, reason, size_bytes, share
        See `Steering`.
    doublings
        By table, how much coarser its scale is than its options ask for, in powers of two.
    """

    target_bytes: int
    state: TargetState
    reason: str
    size_bytes: int | None
    share: float
    doublings: Mapping[str, int] = field(default_factory=dict)


def steer(target_bytes: int, costs: Sequence[SaveCost], share: float, doublings: int, limits: Limits) -> Steering:
    """Return what the next save is to be like for its bytes to come to a target. Pure.

    First fewer of the changed rows go out: the share falls in proportion to the bytes, at once, and rises again only
    when all saves since it had its whole effect left room. Then, or where half the share made saves no smaller, scales
    become coarser, by whole doublings. A scale becomes finer again only in a full that comes anyway. Between 0.75 and 1
    times the target nothing changes.

    Parameters
    ----------
    costs
        Saves so far that the target is for, oldest first.
    share, doublings
        What is in force.

    Examples
    --------
    >>> limits = Limits(has_thresholds=True, settles=5, most_doublings=4)
    >>> steer(900, [SaveCost(1800, 8000, 1000, 1.0, 0)], 1.0, 0, limits).share
    0.45
    """
    run: list[SaveCost] = []
    for cost in reversed(costs):
        if (cost.share, cost.doublings) != (share, doublings):
            break
        run.insert(0, cost)
    if not run:
        return Steering(share, doublings, False, "learning", "no save has told a size yet")
    recent = run[-_SMOOTHED:]
    size = sum(cost.size_bytes for cost in recent) / len(recent)
    if size <= target_bytes:
        return _with_room(target_bytes, run, round(size), limits)
    if limits.has_thresholds and share > LEAST_SHARE:
        if not _has_grip(costs, run):
            found = _coarser(target_bytes, run, round(size), limits)
            if found.state == "adjusting":
                return found
        lower = max(LEAST_SHARE, share * max(_AIM * target_bytes / size, _LARGEST_CUT))
        return Steering(lower, doublings, False, "adjusting", f"{round(size)} bytes: fewer rows go out", round(size))
    return _coarser(target_bytes, run, round(size), limits)


def _has_grip(costs: Sequence[SaveCost], run: Sequence[SaveCost]) -> bool:
    """Whether fewer rows make saves smaller, as far as it shows: since the share was twice what it is, or more.

    They do not where a lattice is so coarse that most changed rows moved by one step: none of them may wait then.
    """
    share, doublings = run[-1].share, run[-1].doublings
    larger = [cost for cost in costs if cost.doublings == doublings and cost.share >= 2 * share]
    before = larger[-_SMOOTHED:]  # older ones may be of other times: how many rows a save touches changes
    if not before:
        return True
    usual = sum(cost.size_bytes for cost in before) / len(before)
    hoped = usual * (1.0 - share * len(before) / sum(cost.share for cost in before))
    return min(cost.size_bytes for cost in run) <= usual - _GRIP * hoped


def _with_room(target_bytes: int, run: Sequence[SaveCost], size: int, limits: Limits) -> Steering:
    """What to do with saves that are within the target: nothing, unless they have been far within it for long."""
    share, doublings = run[-1].share, run[-1].doublings
    settled = run[-max(_SMOOTHED, limits.settles) :]
    most = max(cost.size_bytes for cost in settled)
    if len(settled) < max(_SMOOTHED, limits.settles) or most > _ROOM * target_bytes:
        return Steering(share, doublings, False, "met", f"{size} bytes", size)
    if limits.has_thresholds and share < 1.0:
        higher = min(1.0, share * min(_LARGEST_RISE, _AIM * target_bytes / max(1, most)))
        return Steering(higher, doublings, False, "met", f"{size} bytes leave room: more rows go out", size)
    # A halving costs a bit per element at most.
    bits = max(cost.elements for cost in settled) / 8
    finer = 0
    while finer < doublings and most + (finer + 1) * bits <= _ROOM * target_bytes:
        finer += 1
    reason = f"{size} bytes leave room: the next full has finer scales" if finer else f"{size} bytes"
    return Steering(share, doublings - finer, False, "met", reason, size)


def _coarser(target_bytes: int, run: Sequence[SaveCost], size: int, limits: Limits) -> Steering:
    """What to do with saves that are over the target although no fewer rows can go out."""
    share, doublings = run[-1].share, run[-1].doublings
    most = max(doublings, limits.most_doublings)
    if doublings >= most:
        reason = f"{size} bytes, and scales are as coarse as may be"
        return Steering(share, doublings, False, "unreachable", reason, size)
    if len(run) < _SAVES_BEFORE_SCALE and limits.saves_to_full != 0:
        return Steering(share, doublings, False, "adjusting", f"{size} bytes, of one save yet", size)
    wanted = doublings + 1
    while wanted < most and size - saved_bytes(run[-1], wanted - doublings) > _AIM * target_bytes:
        wanted += 1
    saves = PAYBACK_SAVES if limits.saves_to_full is None else min(PAYBACK_SAVES, limits.saves_to_full)
    saved = saved_bytes(run[-1], wanted - doublings)
    if limits.saves_to_full != 0 and limits.full_bytes is not None and saved * saves < limits.full_bytes:
        reason = f"{size} bytes; in {saves} saves coarser scales win back less than the full that they need"
        is_enough = size - saved_bytes(run[-1], most - doublings) <= target_bytes
        return Steering(share, wanted, False, "waiting" if is_enough else "unreachable", reason, size)
    return Steering(share, wanted, True, "adjusting", f"{size} bytes: scales become coarser", size)


def saved_bytes(cost: SaveCost, doublings: int) -> float:
    """Return what doubling the scales so often would save of such a save's bytes, roughly.

    A bit per element for each doubling while codes take more than two; half of what they take, below that.

    >>> cost = SaveCost(5000, elements=8000, code_bytes=4000, share=1.0, doublings=0)
    >>> saved_bytes(cost, 1), saved_bytes(cost, 4)
    (1000.0, 3500.0)
    """
    if cost.elements == 0:
        return 0.0
    before = left = 8 * cost.code_bytes / cost.elements
    for _ in range(doublings):
        left -= min(1.0, left / 2)
    return (before - left) * cost.elements / 8
