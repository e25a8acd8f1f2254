"""When the next checkpoint is a full one and what a delta is relative to: Check-N-Run's policies as pure functions.

A policy reads the sizes of the checkpoints so far and nothing else, so it can be judged, tested and replayed without
a store. Check-N-Run (NSDI'22), section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from cnr_store.errors import BadInput
from cnr_store.types import MAX_CHAIN

Policy = Literal["full", "consecutive", "one_shot", "intermittent"]


@dataclass(frozen=True, slots=True)
class CheckpointSize:
    """What one committed checkpoint cost to store, in bytes; all sizes of a history in the same measure."""

    kind: Literal["full", "delta"]
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
        chain) or the last full one ("baseline", the chain becomes the baseline and this delta). A full
        one is its own baseline.
    reason
        One clause for logs.
    """

    kind: Literal["full", "delta"]
    base: Literal["head", "baseline"]
    reason: str


def decide(
    policy: Policy, history: Sequence[CheckpointSize], *, chain_length: int | None = None, max_chain: int = MAX_CHAIN
) -> Decision:
    """Return what the next checkpoint is, given the committed ones, oldest first. Pure.

    ``chain_length`` is the head's number of segments, when compaction has made it less than the history tells.

    Examples
    --------
    >>> decide("consecutive", [CheckpointSize("full", 100), CheckpointSize("delta", 8)])
    Decision(kind='delta', base='head', reason='rows changed since the last checkpoint')

    Raises
    ------
    BadInput
        Unknown policy, or a negative size.
    """
    if policy not in get_args(Policy):
        raise BadInput(f"policy {policy!r} is unknown; choose one of {', '.join(get_args(Policy))}", found=policy)
    if any(size.size_bytes < 0 for size in history):
        raise BadInput("a checkpoint in the history has a negative size")
    if policy == "full":
        return _full("the policy writes full checkpoints only")
    last_full = max((index for index, size in enumerate(history) if size.kind == "full"), default=None)
    if last_full is None:
        return _full("no full checkpoint yet")
    full_bytes = history[last_full].size_bytes
    delta_bytes = [size.size_bytes for size in history[last_full + 1 :]]
    if policy == "consecutive":
        length = 1 + len(delta_bytes) if chain_length is None else chain_length
        if length >= max_chain:
            return _full(f"the chain has {length} segments, at most {max_chain} are allowed")
        return Decision("delta", "head", "rows changed since the last checkpoint")
    if policy == "intermittent" and is_full_cheaper(full_bytes, delta_bytes):
        return _full(f"going on would cost more than a full checkpoint after {len(delta_bytes)} deltas")
    return Decision("delta", "baseline", "rows changed since the last full checkpoint")


def is_full_cheaper(full_bytes: int, delta_bytes: Sequence[int]) -> bool:
    """Say whether Check-N-Run's predictor wants a full checkpoint after these deltas since the last full one. Pure.

    With S_i the size of delta i as a fraction of the full one: a full one now, then the same deltas again, costs
    ``F = 1 + S_1 + ... + S_i``; going on costs ``I = (i + 1) * S_i`` at least. Full iff ``F <= I``. Deltas are
    cumulative (``base="baseline"``). Counted in bytes, so without rounding.

    >>> is_full_cheaper(100, [25, 33, 39, 44, 48]), is_full_cheaper(100, [25, 33, 39, 44, 48, 51])
    (False, True)
    """
    if not delta_bytes:
        return False
    return full_bytes + sum(delta_bytes) <= (len(delta_bytes) + 1) * delta_bytes[-1]


def _full(reason: str) -> Decision:
    return Decision("full", "baseline", reason)
