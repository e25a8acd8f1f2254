"""What a relay did in one look at its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RelayReport:
    """What one look at the source came to. Its numbers grow while the look goes on.

    Attributes
    ----------
    version, source_version
        The newest at the relay and at the source; None while there is nothing to read.
    versions
        Versions that were copied with all that they name.
    skipped
        Positions that were copied as records alone: their versions had expired at the source, were superseded, or are
        damaged there.
    segments, objects, bytes, reused_objects
        What was put, segments of versions that channels name included; objects that an interrupted copy had put.
    trimmed_segments, trimmed_bytes
        What was deleted at the relay.
    delay_s
        From the commit of the newest version copied to its record standing here, by the clocks of both machines; None
        if none was.
    staleness_s
        How long ago the relay had all that the source had: 0 at the end of a look that found it so.
    problem
        Why the look ended early, what could not be trimmed, or which damage at the source was passed over for a newer
        version. None if all went well.
    """

    version: int | None = None
    source_version: int | None = None
    versions: int = 0
    skipped: int = 0
    segments: int = 0
    objects: int = 0
    bytes: int = 0
    reused_objects: int = 0
    trimmed_segments: int = 0
    trimmed_bytes: int = 0
    delay_s: float | None = None
    staleness_s: float | None = None
    problem: str | None = None
