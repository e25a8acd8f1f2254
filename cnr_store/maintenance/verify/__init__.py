"""Check a store against everything that it says about itself, object by object, without stopping at the first error.

Nothing is repaired, and nothing but reads is sent. `report` has the records, `log` reads one commit log and `logs` the
others of the store, `references` compares what they name, `segments` reads the objects, `chains` and `states` what
segments say about each other; `whole` looks for the newest state without damage.
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
