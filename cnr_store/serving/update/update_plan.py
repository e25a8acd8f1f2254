"""How a consumer's own copy of a state becomes another version's: decided from two commit records. Pure, no I/O.

Segments are immutable and their names are never used again, so chains that begin with the same segments begin with the
same state. Checkpoint numbers alone say nothing: after a rollback they are given out once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cnr_store.format.commit_record import LogEntry, parent_of
from cnr_store.format.records import ChainEntry
from cnr_store.log.rebase import leaves_state


@dataclass(frozen=True, slots=True)
class Same:
    """The target's state is the one held: nothing is read."""


@dataclass(frozen=True, slots=True)
class Apply:
    """The target's state is the one held with these deltas put on it, in order.

    ``behind`` is the chain held, which they are opened behind.
    """

    segments: tuple[ChainEntry, ...]
    behind: tuple[ChainEntry, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Reread:
    """Both states go on from a common one: only rows that ``old`` or ``new`` deltas name can differ.

    Attributes
    ----------
    common
        The segments that both chains begin with, baseline first; never empty.
    old
        The rest of the chain held. Its objects may be gone by now.
    new
        The rest of the target's chain.
    """

    common: tuple[ChainEntry, ...]
    old: tuple[ChainEntry, ...]
    new: tuple[ChainEntry, ...]


@dataclass(frozen=True, slots=True)
class Compare:
    """The records do not tell how the states are related: any row may differ."""


UpdatePlan = Same | Apply | Reread | Compare


def is_directly_behind(held: LogEntry, target: LogEntry) -> bool:
    """Return whether ``target`` is the log's next record behind ``held``; torn positions between them do not count."""
    return held.record.store_uuid == target.record.store_uuid and parent_of(target.record) == (
        held.record.v,
        held.digest,
    )


def plan_update(held: LogEntry, target: LogEntry) -> UpdatePlan:
    """Return how the state of ``held`` becomes that of ``target``: any two records of one store and its branches.

    A record that leaves the training state alone (compaction, a tag, an expiry) is `Same` even where it has another
    chain, but only for a consumer that comes from the record directly before it.
    """
    before, after = held.record.chain, target.record.chain
    if _names(before) == _names(after) or (is_directly_behind(held, target) and leaves_state(target.record)):
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
        At least one; each directly behind the one before, or the plan is that of the first and the last alone. Knowing
        them all tells more than the two ends do: deltas that were compacted on the way can still be applied one by one,
        as long as their objects are there. Where they are not, `plan_update` of the two ends is the way.
    """
    known = 0  # The last record that is known to have the state held.
    deltas: list[ChainEntry] = []
    for index, (held, target) in enumerate(pairwise(entries), start=1):
        plan = plan_update(held, target)
        if isinstance(plan, Apply):
            deltas.extend(plan.segments)
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
