"""Decides what a relay expires and deletes (`plan_trim`, pure), and does it (`Trimmer`).

The source decides which versions are live. Of those a relay keeps the newest ones, by its own retention policy, and the
versions that channels, tags, leases and cursors at the relay name. A segment that no kept version needs is first noted
as pending delete, and deleted after the grace period of readers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cnr_store.errors import CorruptStore, StorageFailure
from cnr_store.format import layout
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import CommitRecord, RelayTrims
from cnr_store.log.clock import check_clock, wall_ms
from cnr_store.log.leases import delete_ended_holds, holds_on, read_held
from cnr_store.log.retention import Holds, LiveVersion, RetentionPolicy, plan_retention
from cnr_store.log.side_objects import delete_found, find_unneeded
from cnr_store.relay.copied_versions import CopiedVersions
from cnr_store.relay.copier import Copier
from cnr_store.relay.report import RelayReport
from cnr_store.relay.target import RelayTarget
from cnr_store.storage import Storage

_TIDY_EVERY_MS = 86_400_000
_LEFTOVER_S = 3600.0
"""An incomplete file of this age in seconds has no writer any longer, and may be deleted."""


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


class Trimmer:
    """Trims a target by `plan_trim`. Blocks.

    Parameters
    ----------
    copier
        Copies deleted segments again if another relay of the target needs them.
    """

    def __init__(
        self,
        target: RelayTarget,
        copied: CopiedVersions,
        copier: Copier,
        policy: RetentionPolicy,
        grace_ms: int,
        clock_ms: Callable[[], int],
    ) -> None:
        self._target = target
        self._copied = copied
        self._copier = copier
        self._policy = policy
        self._grace_ms = grace_ms
        self._clock_ms = clock_ms
        self._next_trim_ms: int | None = 0
        self._next_tidy_ms = 0

    def trim_if_due(self, report: RelayReport) -> str | None:
        """Trim if due; return the message of a failure, or None. Copied data is kept; the next round retries."""
        is_due = self._next_trim_ms is not None and self._next_trim_ms <= self._clock_ms()
        if not (report.versions or is_due):
            return None
        try:
            self._trim(report)
        except (StorageFailure, CorruptStore) as error:
            self._next_trim_ms = 0
            return error.message
        return None

    def _trim(self, report: RelayReport) -> None:
        """Expire versions, and delete the segments whose grace period is over."""
        assert self._target.head is not None
        entry = self._target.head
        head, storage = entry.record, self._target.storage
        if head.kind == "close":
            self._next_trim_ms = None
            return
        now_ms = self._clock_ms()
        if self._next_tidy_ms <= now_ms:
            self._tidy(entry, now_ms)
        versions = self._copied.live(head)
        notes = self._target.read_notes()
        holds, leased = self._read_holds(now_ms)
        listed = [name for name in storage.list_folders(layout.DATA) if layout.is_segment_name(name)]
        plan = plan_trim(head, versions, self._policy, holds, notes, listed, leased, now_ms, self._grace_ms)
        if plan.notes != notes:
            # Before any delete, so that a restarted relay knows since when a segment is pending delete.
            self._target.put_notes(plan.notes)
        self._copied.drop(plan.going)
        self._next_trim_ms = min(
            (due_ms for due_ms in plan.notes.pending_delete.values() if due_ms > now_ms), default=None
        )
        if plan.due:
            if self._clock_ms is wall_ms:
                check_clock(storage, now_ms)
            self._delete(plan.due, head.v + 1, report)

    def _tidy(self, head: LogEntry, now_ms: int) -> None:
        """Delete the remains of readers and relays that were killed; garbage collection does not run at a relay."""
        storage = self._target.storage
        delete_ended_holds(storage, now_ms)
        unneeded = find_unneeded(
            storage, head.side_objects, age_ms=max(self._grace_ms, int(_LEFTOVER_S * 1000)),
            is_left=lambda _, version: version <= head.record.v,
        )  # fmt: skip
        delete_found(storage, unneeded)
        for folder in (layout.DATA, layout.COMMITS, layout.STATE, layout.LEASES):
            storage.sweep(folder, older_than_s=max(self._grace_ms / 1000, _LEFTOVER_S))
        self._next_tidy_ms = now_ms + _TIDY_EVERY_MS

    def _delete(self, due: tuple[str, ...], following: int, report: RelayReport) -> None:
        """Delete segments, unless another relay of this target has newer versions, which may need them."""
        if self._target.is_occupied(following):
            self._next_trim_ms = 0
            return
        for name in due:
            size_bytes = delete_segment(self._target.storage, name, self._clock_ms() - self._grace_ms)
            if size_bytes is None:
                continue
            report.trimmed_bytes += size_bytes
            report.trimmed_segments += 1
        # Another relay may have added records meanwhile: copy the deleted segments that they need again.
        while (entry := self._target.log.read_standing(following)) is not None:
            self._copier.mend(entry, report)
            following = entry.record.v + 1

    def _read_holds(self, now_ms: int) -> tuple[Holds, set[str]]:
        """Return the leases and cursors at the relay, and the segments of leased versions that it has expired."""
        holds = holds_on("", *read_held(self._target.storage, now_ms))
        leased: set[str] = set()
        for version in holds.leases:
            if version not in self._copied:
                entry = self._target.read_record(version)
                leased |= set() if entry is None else {item.seg for item in entry.record.chain}
        return holds, leased


def delete_segment(target: Storage, name: str, written_before_ms: int) -> int | None:
    """Delete a segment's objects, its manifest first, and return their bytes. One listing. May be repeated.

    If it has no manifest and an object newer than ``written_before_ms``, another relay is copying it. Then nothing is
    deleted, and this returns None.

    Raises
    ------
    AccessDenied, StorageFailure
    """
    manifest = layout.segment_key(name, layout.MANIFEST)
    found = list(target.list_objects(layout.segment_prefix(name)))
    is_whole = any(stat.key == manifest for stat in found)
    if not is_whole and any((stat.modified_ms or 0) > written_before_ms for stat in found):
        return None
    target.delete([manifest])
    target.delete(stat.key for stat in found if stat.key != manifest)
    return sum(stat.size_bytes for stat in found)
