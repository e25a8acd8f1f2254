"""What a relay lets go, from records, holds and a listing alone: pure.

The source decides which versions are live; of those a relay keeps the newest ones, by a retention policy of its own,
and what channels, tags, leases and cursors at the relay name. A segment that nothing kept needs is noted
first, and deleted when the grace of readers is over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cnr_store.format.records import CommitRecord, RelayTrims
from cnr_store.log.retention import Holds, LiveVersion, RetentionPolicy, plan_retention


@dataclass(frozen=True, slots=True)
class TrimPlan:
    """What is kept, what will be deleted, and what is deleted now.

    Attributes
    ----------
    notes
        What ``relay/trims.json`` says from now on: versions held, and when objects of segments may be deleted.
    due
        Segments whose time is over, in order.
    going
        Versions that are let go by this plan.
    """

    notes: RelayTrims
    due: tuple[str, ...]
    going: tuple[int, ...]


def plan_trim(
    head: CommitRecord,
    versions: Sequence[LiveVersion],
    policy: RetentionPolicy,
    holds: Holds,
    notes: RelayTrims,
    listed: Collection[str],
    leased: Collection[str],
    now_ms: int,
    grace_ms: int,
) -> TrimPlan:
    """Return what a relay lets go now. Pure; grows with versions and segments that it holds.

    Parameters
    ----------
    head
        The relay's newest record.
    versions
        The live versions that it holds, ascending, the head's last.
    policy, holds
        What stays.
    notes
        What was noted before.
    listed
        Names of the segments that have objects at the relay.
    leased
        Segments of leased versions that are not live any more.
    """
    kept = plan_retention(head, versions, policy, holds, now_ms)
    staying = {verdict.version for verdict in kept.verdicts if verdict.stays}
    needed = {name for one in versions if one.version in staying for name in one.chain} | set(leased)
    # What was begun at or above the oldest version that is kept may be on its way here for a record to come.
    pending_delete = {
        name: notes.pending_delete.get(name, now_ms + grace_ms)
        for name in sorted(listed)
        if name not in needed and (name in notes.pending_delete or base_of(name) < kept.floor)
    }
    return TrimPlan(
        RelayTrims(floor=kept.floor, kept=kept.kept, pending_delete=pending_delete),
        tuple(name for name, due_ms in pending_delete.items() if due_ms <= now_ms),
        kept.going,
    )


def base_of(segment: str) -> int:
    """Return the version that a segment was begun from, by its name. Pure.

    >>> base_of("00000000000000000012-0123456789abcdef0123456789abcdef")
    12
    """
    return int(segment.partition("-")[0])
