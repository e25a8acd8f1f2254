"""Decides what a relay expires and deletes, from records, leases, cursors and a listing. Pure.

The source decides which versions are live. Of those a relay keeps the newest ones, by its own retention policy, and the
versions that channels, tags, leases and cursors at the relay name. A segment that no kept version needs is first noted
as pending delete, and deleted after the grace period of readers.
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
        The new content of ``relay/trims.json``: kept versions, and when segments may be deleted.
    due
        Segments to delete now, in order.
    going
        Versions that this plan expires.
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
    """Return what a relay expires and deletes now. Pure; time grows with its versions and segments.

    Parameters
    ----------
    head
        The relay's newest record.
    versions
        The live versions that the relay has, ascending, the head's last.
    policy, holds
        Which versions are kept.
    notes
        The former notes.
    listed
        Names of the segments that have objects at the relay.
    leased
        Segments of leased versions that are not live any longer.
    """
    kept = plan_retention(head, versions, policy, holds, now_ms)
    staying = {verdict.version for verdict in kept.verdicts if verdict.stays}
    needed = {name for one in versions if one.version in staying for name in one.chain} | set(leased)
    # A segment that was begun at or above the oldest kept version may be needed by a record that is copied next.
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
    """Return the version from which a segment was begun, parsed from its name. Pure.

    >>> base_of("00000000000000000012-0123456789abcdef0123456789abcdef")
    12
    """
    return int(segment.partition("-")[0])
