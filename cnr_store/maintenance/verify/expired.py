"""What was compacted and deleted while it was read is no damage, but a reason to look again (spec, CNR-GC-12)."""

from __future__ import annotations

from cnr_store.errors import Conflict, MissingObject
from cnr_store.format.layout import DATA, STATE
from cnr_store.log.expiry import expired_by
from cnr_store.log.log_reader import LogReader
from cnr_store.maintenance.verify.report import Findings

MOST_LOOKS = 3
"""A look takes minutes, what was compacted stays for the readers' grace: one is rarely overtaken, two hardly ever."""


def was_overtaken(log: LogReader, findings: Findings) -> bool:
    """Return whether something is missing of a version that has expired meanwhile. A few GETs if anything is."""
    missing = [
        problem.versions
        for problem in findings.problems
        if problem.kind == MissingObject.kind and problem.path.startswith((DATA, STATE))
    ]
    return any(expired_by(log, version) is not None for versions in missing for version in versions[-1:])


def overtaken(url: str) -> Conflict:
    """Return the error of who looked again and again."""
    return Conflict(
        f"others compacted and deleted what was read of {url} in each of {MOST_LOOKS} looks at it; try again, or let "
        "garbage collection wait longer"
    )
