"""Check a store against its own digests and references, object by object, past the first error.

A check only reads, and repairs nothing. `report` has the records. `log` reads one commit log, `logs` the others of the
store. `checking` reads chains, with `segments` (objects) and `states`
(replay). `whole` finds the newest intact state.
"""

from __future__ import annotations

from cnr_store.maintenance.verify.report import LogReport, Problem, ProgressCallback, VerifyReport
from cnr_store.maintenance.verify.run import verify_store
from cnr_store.maintenance.verify.whole import NewestWhole, find_newest_whole

__all__ = [
    "LogReport",
    "NewestWhole",
    "Problem",
    "ProgressCallback",
    "VerifyReport",
    "find_newest_whole",
    "verify_store",
]
