"""Compact a contiguous run of a chain into one segment, bit for bit, while writers continue.

A *run* is a contiguous range of a chain's segments. A *piece* is one part of the result. A *task* is the work of one
worker. Planning is pure (`plan`, `tasks`). Merging produces one chunk of the result at a time (`merge`). `run` executes
one compaction.
"""

from __future__ import annotations

from cnr_store.maintenance.compaction.engines import ENGINES, Engine, WorkerPool, check_engine
from cnr_store.maintenance.compaction.plan import DEFAULT_POLICY, CompactionPolicy
from cnr_store.maintenance.compaction.run import CompactionReport, compact_run

__all__ = [
    "DEFAULT_POLICY",
    "ENGINES",
    "CompactionPolicy",
    "CompactionReport",
    "Engine",
    "WorkerPool",
    "check_engine",
    "compact_run",
]
