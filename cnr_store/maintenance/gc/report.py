"""What a garbage collection decided and did: plain records. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

ProgressCallback = Callable[[str, int, int], None]
"""Called as (stage, done, total): ``records`` read, ``expire`` records committed, ``segments`` deleted."""

Outcome = Literal["clean", "planned", "collected", "stopped", "incomplete"]
"""``clean``: nothing to do. ``planned``: a dry run found something. ``collected``: all that was due is done.
``stopped``: the time was up. ``incomplete``: some objects could not be deleted, or writers were always faster."""

SegmentState = Literal["stays", "young", "named", "waiting", "due", "deleted", "failed"]
"""``stays``: a version that stays has it. ``young``: nobody refers to it, but it may be a save under way. ``named``:
this run gives it up. ``waiting``: an earlier run did, and its time is not over, or a reader holds it. ``due``: may be
deleted now. ``deleted``: this run did. ``failed``: this run tried."""


@dataclass(frozen=True, slots=True)
class VersionReport:
    """What becomes of one live version of one log; ``branch`` is the branch's name, None for the store's own log."""

    branch: str | None
    version: int
    stays: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """What becomes of one segment.

    Attributes
    ----------
    size_bytes
        Its bytes; None where nobody had to count them.
    delete_after_ms
        From when its objects may be deleted (ms since 1970), where it is given up.
    """

    name: str
    state: SegmentState
    reason: str
    size_bytes: int | None = None
    delete_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class GcReport:
    """A whole run, or with ``is_dry_run`` what one would do.

    Attributes
    ----------
    url
        The store, without credentials.
    outcome
        How it ended.
    versions
        Every version that was live, log by log, ascending.
    segments
        Every segment that was referred to or listed, by name.
    records
        ``expire`` records committed.
    deleted_segments, deleted_objects, deleted_bytes
        What is gone from storage by this run.
    failures
        Why objects could not be deleted; the next run tries again.
    side_objects, side_object_bytes
        Lists in ``state/`` that no record needs any more: the keys of those that this run deleted, or with
        ``is_dry_run`` would delete; and their bytes, which are in ``deleted_bytes`` once they are gone.
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

    @property
    def expired(self) -> int:
        """How many versions go."""
        return sum(not version.stays for version in self.versions)

    @property
    def named(self) -> int:
        """How many segments this run gives up."""
        return sum(segment.state == "named" for segment in self.segments)

    @property
    def pending_delete_bytes(self) -> int:
        """Bytes of the segments that are given up and not deleted yet, as far as they are known."""
        states = ("named", "waiting", "due", "failed")
        return sum(segment.size_bytes or 0 for segment in self.segments if segment.state in states)
