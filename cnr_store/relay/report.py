"""The report of one round of a relay."""

from __future__ import annotations

from dataclasses import dataclass

from cnr_store.runtime.notebook import ShownReport


@dataclass(slots=True)
class RelayReport(ShownReport):
    """What one round did. Its numbers grow during the round.

    Attributes
    ----------
    version, source_version
        The newest version at the relay and at the source; None if there is none.
    versions
        Number of versions that were copied with all their objects.
    skipped
        Number of positions of which only the record was copied: the version had expired at the source, was superseded,
        or is damaged there.
    segments, objects, size_bytes, reused_objects
        What was written, including segments of versions that channels name; objects that an interrupted copy wrote.
    trimmed_segments, trimmed_bytes
        What was deleted at the relay.
    delay_s
        Seconds from the commit of the newest copied version until its record was at the relay, by the clocks of both
        machines; None if none was copied.
    staleness_s
        Seconds since the relay had everything that the source had; 0 at the end of a round that reached this.
    problem
        Why the round ended early, why nothing could be trimmed, or which damaged version was skipped. None
        if there was no problem.
    """

    version: int | None = None
    source_version: int | None = None
    versions: int = 0
    skipped: int = 0
    segments: int = 0
    objects: int = 0
    size_bytes: int = 0
    reused_objects: int = 0
    trimmed_segments: int = 0
    trimmed_bytes: int = 0
    delay_s: float | None = None
    staleness_s: float | None = None
    problem: str | None = None
