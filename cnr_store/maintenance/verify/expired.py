"""Detect objects deleted because their version expired during a check: no damage (spec, CNR-GC-12)."""

from __future__ import annotations

from cnr_store.errors import Conflict, MissingObject
from cnr_store.format.layout import DATA, STATE
from cnr_store.log.expiry import expired_by
from cnr_store.log.log_reader import LogReader
from cnr_store.maintenance.verify.report import Findings

MOST_LOOKS = 3
"""Most attempts of one check. An attempt takes minutes and compacted segments are kept for the grace period."""


def was_overtaken(log: LogReader, findings: Findings) -> bool:
    """Return whether an object of a version expired since is missing. A few GETs if any is missing."""
    missing = [
        problem.versions
        for problem in findings.problems
        if problem.kind == MissingObject.kind and problem.path.startswith((DATA, STATE))
    ]
    return any(expired_by(log, version) is not None for versions in missing for version in versions[-1:])


def overtaken(url: str) -> Conflict:
    """Return the error of a check whose attempts were all disturbed by deletions."""
    return Conflict(
        f"other processes compacted and deleted what was read of {url} during each of {MOST_LOOKS} attempts; retry, or "
        "use a longer grace period for garbage collection"
    )
