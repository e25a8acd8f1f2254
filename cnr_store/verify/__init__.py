"""Check a store against everything that it says about itself, object by object, without stopping at the first error.

Nothing is repaired, and nothing but reads is sent. `report` has the records, `log` reads the commit log, `segments`
the objects, `chains` and `states` what segments say about each other.
"""

from __future__ import annotations

from cnr_store.verify.report import Problem, ProgressCallback, VerifyReport
from cnr_store.verify.run import verify_store

__all__ = ["Problem", "ProgressCallback", "VerifyReport", "verify_store"]
