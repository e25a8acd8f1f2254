"""Garbage collection: expire versions, then delete what no live version needs (spec, annex F).

`collect_garbage` deletes a segment only after every log has marked it for deletion, and never deletes a log position.
"""

from __future__ import annotations

from cnr_store.maintenance.gc.deleting import with_sizes
from cnr_store.maintenance.gc.report import (
    GcReport,
    Outcome,
    ProgressCallback,
    SegmentReport,
    SegmentState,
    VersionReport,
)
from cnr_store.maintenance.gc.run import check_arguments, collect_garbage

__all__ = [
    "GcReport",
    "Outcome",
    "ProgressCallback",
    "SegmentReport",
    "SegmentState",
    "VersionReport",
    "check_arguments",
    "collect_garbage",
    "with_sizes",
]
