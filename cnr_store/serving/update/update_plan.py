"""Decides from two commit records how one state becomes the other. Pure, no I/O.

Segments are immutable and their names are never used again, so chains with the same first segments have the same state
after them. Checkpoint numbers do not show this: after a rollback they are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cnr_store.format.commit_record import LogEntry, parent_of
from cnr_store.format.records import ChainEntry
from cnr_store.log.rebase import leaves_state
from cnr_store.segment.reader import SegmentReader


@dataclass(frozen=True, slots=True)
class Same:
    """The target's state is the present one: nothing is read."""


@dataclass(frozen=True, slots=True)
class Apply:
    """The target's state is the present one plus the deltas ``new``, in order. ``common`` is the present chain."""

    new: tuple[ChainEntry, ...]
    common: tuple[ChainEntry, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Reread:
    """Both states continue from a common one: only rows that ``old`` or ``new`` list can differ.

    Attributes
    ----------
    common
        The segments that both chains begin with, baseline first; never empty.
    old
        The other segments of the present chain. Their objects may be deleted.
    new
        The other segments of the target's chain.
    """

    common: tuple[ChainEntry, ...]
    old: tuple[ChainEntry, ...]
    new: tuple[ChainEntry, ...]


@dataclass(frozen=True, slots=True)
class Compare:
    """The records do not show how the states are related: any row may differ."""


UpdatePlan = Same | Apply | Reread | Compare


@dataclass(frozen=True, slots=True)
class OpenedPlan:
    """The open segments of a plan: the last common one, and those after it in the present and in the target's state."""

    common: SegmentReader
    old: tuple[SegmentReader, ...]
    new: tuple[SegmentReader, ...]


def open_plan(
    plan: Apply | Reread, open_chain: Callable[[Sequence[ChainEntry]], Sequence[SegmentReader]]
) -> OpenedPlan:
    """Open the segments of a plan by ``open_chain``, which is called once per state. Raises its errors."""
    count = len(plan.common)
    old = open_chain((*plan.common, *plan.old)) if isinstance(plan, Reread) else ()
    new = open_chain((*plan.common, *plan.new))
    return OpenedPlan(new[count - 1], tuple(old[count:]), tuple(new[count:]))


def follows_directly(present: LogEntry, target: LogEntry) -> bool:
    """Return whether ``target`` is the next record after ``present`` in its log, torn positions left out."""
    return present.record.store_uuid == target.record.store_uuid and parent_of(target.record) == (
        present.record.v,
        present.digest,
    )


def plan_update(present: LogEntry, target: LogEntry) -> UpdatePlan:
    """Return how the state of ``present`` becomes that of ``target``: any two records of one store and its branches.

    A record that leaves the training state alone (compaction, a tag, an expiry) is `Same` even where it has another
    chain, but only for a consumer that comes from the record directly before it.
    """
    before, after = present.record.chain, target.record.chain
    if _names(before) == _names(after) or (follows_directly(present, target) and leaves_state(target.record)):
        return Same()
    count = _common(before, after)
    if count == 0:
        return Compare()
    if count == len(before) and all(entry.kind == "delta" for entry in after[count:]):
        return Apply(after[count:], before)
    return Reread(after[:count], before[count:], after[count:])


def plan_path(entries: Sequence[LogEntry]) -> UpdatePlan:
    """Return how the state of the first record becomes that of the last, by way of those between them.

    Parameters
    ----------
    entries
        At least one; each directly after the one before, or the plan is that of the first and the last alone. Knowing
        them all shows more than the two ends: deltas that were compacted between them can still be applied one by one,
        as long as their objects are there. Where they are not, `plan_update` of the two ends is the way.
    """
    known = 0  # The last record that is known to have the present state.
    deltas: list[ChainEntry] = []
    for index, (present, target) in enumerate(pairwise(entries), start=1):
        plan = plan_update(present, target)
        if isinstance(plan, Apply):
            deltas.extend(plan.new)
        elif not isinstance(plan, Same):
            return plan_update(entries[known], entries[-1])
        elif not deltas:
            known = index
    return Apply(tuple(deltas), entries[0].record.chain) if deltas else Same()


def _names(chain: Sequence[ChainEntry]) -> list[tuple[str, str]]:
    # With the digest of the manifest: a segment of the same name and other content is damage, and not shared.
    return [(entry.seg, entry.sha256) for entry in chain]


def _common(before: Sequence[ChainEntry], after: Sequence[ChainEntry]) -> int:
    count = 0
    for a, b in zip(_names(before), _names(after), strict=False):
        if a != b:
            break
        count += 1
    return count
