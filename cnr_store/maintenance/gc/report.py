"""Records of what a garbage collection decided and did. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cnr_store.runtime.notebook import ShownReport

ProgressCallback = Callable[[str, int, int], None]
"""Called as (stage, done, total): ``records`` read, ``expire`` records committed, ``segments`` deleted."""

Outcome = Literal["clean", "planned", "collected", "stopped", "incomplete"]
"""``clean``: nothing to do. ``planned``: a dry run found something to do. ``collected``: the run did everything due.
``stopped``: the deadline passed. ``incomplete``: some deletions failed, or every retry met a conflict."""

SegmentState = Literal["stays", "young", "marked", "waiting", "due", "deleted", "failed"]
"""``stays``: a kept version needs it. ``young``: no version references it, but its save may be in progress. ``marked``:
this run marks it for deletion. ``waiting``: an earlier run marked it, and its grace period is not over or a lease or
cursor protects it. ``due``: may be deleted now. ``deleted``: this run deleted it. ``failed``: its deletion failed."""


@dataclass(frozen=True, slots=True)
class VersionReport(ShownReport):
    """The decision for one live version; ``branch`` is the branch's name, None for the store's own log."""

    branch: str | None
    version: int
    stays: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SegmentReport(ShownReport):
    """The decision for one segment.

    Attributes
    ----------
    size_bytes
        Its bytes; None if unknown.
    delete_after_ms
        Time from which its objects may be deleted, in ms since 1970; None unless it is marked for deletion.
    """

    name: str
    state: SegmentState
    reason: str
    size_bytes: int | None = None
    delete_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class GcReport(ShownReport):
    """The result of a run, or with ``is_dry_run`` of the run that it would be.

    Attributes
    ----------
    url
        The store, without credentials.
    outcome
        How the run ended.
    versions
        Every version that was live, log by log, ascending.
    segments
        Every segment that a live version references or that was listed, by name.
    records
        Number of ``expire`` records committed.
    deleted_segments, deleted_objects, deleted_bytes
        What this run deleted.
    failures
        Error messages of failed deletions; the next run retries them.
    side_objects, side_object_bytes
        Keys and bytes of the lists in ``state/`` that this run deleted, or with ``is_dry_run`` would delete, because
        no record needs them. ``deleted_bytes`` includes the bytes of deleted ones.
    warnings
        What the user should know: that no version has the metric of ``keep_best``, so all checkpoints are kept.
    """

    url: str
    is_dry_run: bool
    outcome: Outcome
    versions: tuple[VersionReport, ...]
    segments: tuple[SegmentReport, ...]
    records: int = 0
    deleted_segments: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0
    failures: tuple[str, ...] = ()
    side_objects: tuple[str, ...] = ()
    side_object_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def expired(self) -> int:
        """Number of versions that expire."""
        return sum(not version.stays for version in self.versions)

    @property
    def marked(self) -> int:
        """Number of segments that this run marks for deletion."""
        return sum(segment.state == "marked" for segment in self.segments)

    @property
    def pending_delete_bytes(self) -> int:
        """Bytes of the segments that are marked and not yet deleted; unknown sizes count as 0."""
        states = ("marked", "waiting", "due", "failed")
        return sum(segment.size_bytes or 0 for segment in self.segments if segment.state in states)
