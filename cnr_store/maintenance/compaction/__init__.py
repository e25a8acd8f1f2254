"""Compact a contiguous run of a chain into one segment, exactly, beside live writers.

A *run* is a contiguous stretch of a chain's segments, a *piece* is one part of the result, a *task* is what one worker
merges and writes. Deciding is pure (`plan`, `tasks`); merging streams, one chunk of the result at a time (`merge`);
`run` carries one compaction out.
"""

from __future__ import annotations

from cnr_store.maintenance.compaction.engines import ENGINES, Engine, WorkerPool, check_engine
from cnr_store.maintenance.compaction.plan import DEFAULT_POLICY, CompactionPolicy
from cnr_store.maintenance.compaction.run import LEASE_S, CompactionReport, compact_run

__all__ = [
    "DEFAULT_POLICY",
    "ENGINES",
    "LEASE_S",
    "CompactionPolicy",
    "CompactionReport",
    "Engine",
    "WorkerPool",
    "check_engine",
    "compact_run",
]
