"""When the next checkpoint is a baseline and what a delta is relative to: Check-N-Run's policies as pure functions.

A policy reads the sizes of the checkpoints so far and nothing else, so it can be judged, tested and replayed without
a store. Check-N-Run (NSDI'22), section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cnr_store.types import MAX_CHAIN

Policy = Literal["baseline", "consecutive", "one_shot", "intermittent"]


@dataclass(frozen=True, slots=True)
class CheckpointSize:
    """What one committed checkpoint cost to store, in bytes; all sizes of a history in the same measure."""

    kind: Literal["baseline", "delta"]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What to write next.

    Attributes
    ----------
    kind
        A whole checkpoint, or the rows that changed.
    base
        What a delta's rows have changed since: the last checkpoint ("head", its segment is added to the
        chain) or the last baseline ("baseline", the chain becomes the baseline and this delta). A
        baseline is its own.
    reason
        One clause for logs.
    """

    kind: Literal["baseline", "delta"]
    base: Literal["head", "baseline"]
    reason: str


def decide(policy: Policy, history: Sequence[CheckpointSize], *, chain_length: int | None = None) -> Decision:
    """Return what the next checkpoint is, given the committed ones, oldest first. Pure.

    ``chain_length`` is the head's number of segments, if compaction has made it smaller than the history suggests.

    Examples
    --------
    >>> decide("consecutive", [CheckpointSize("baseline", 100), CheckpointSize("delta", 8)])
    Decision(kind='delta', base='head', reason='rows changed since the last checkpoint')
    """
    if policy == "baseline":
        return _baseline("the policy writes baselines only")
    last_baseline = max((index for index, size in enumerate(history) if size.kind == "baseline"), default=None)
    if last_baseline is None:
        return _baseline("no baseline yet")
    baseline_bytes = history[last_baseline].size_bytes
    delta_bytes = [size.size_bytes for size in history[last_baseline + 1 :]]
    if policy == "consecutive":
        length = 1 + len(delta_bytes) if chain_length is None else chain_length
        if length >= MAX_CHAIN:
            return _baseline(f"the chain has {length} segments, at most {MAX_CHAIN} are allowed")
        return Decision("delta", "head", "rows changed since the last checkpoint")
    if policy == "intermittent" and is_baseline_cheaper(baseline_bytes, delta_bytes):
        return _baseline(f"going on would cost more than a baseline after {len(delta_bytes)} deltas")
    return Decision("delta", "baseline", "rows changed since the last baseline")


def is_baseline_cheaper(baseline_bytes: int, delta_bytes: Sequence[int]) -> bool:
    """Return whether Check-N-Run's predictor chooses a baseline after these deltas since the last baseline. Pure.

    With S_i the size of delta i as a fraction of the baseline: a baseline now, then the same deltas again, costs
    ``F = 1 + S_1 + ... + S_i``; another delta costs ``I = (i + 1) * S_i`` at least. A baseline iff ``F <= I``. Deltas
    are cumulative (``base="baseline"``). Counted in bytes, so without rounding.

    >>> is_baseline_cheaper(100, [25, 33, 39, 44, 48]), is_baseline_cheaper(100, [25, 33, 39, 44, 48, 51])
    (False, True)
    """
    if not delta_bytes:
        return False
    return baseline_bytes + sum(delta_bytes) <= (len(delta_bytes) + 1) * delta_bytes[-1]


def _baseline(reason: str) -> Decision:
    return Decision("baseline", "baseline", reason)
