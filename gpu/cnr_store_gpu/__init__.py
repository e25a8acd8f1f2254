"""Finds the rows that changed, and copies them at one instant.

It needs torch, and does not depend on the store.

    tracker = RowTracker(model, optimizers=[optimizer])
    buffers = StagingBuffers()
    ...                                            # train; after optimizer.step():
    taken = tracker.take()
    staged = buffers.gather({
        table: RowRequest(rows.row_ids, {"weight": tracker.weights[table], **tracker.slots(table)})
        for table, rows in taken.items()
    })
    ...                                            # save; then staged.release(), or tracker.give_back(taken)
"""

from __future__ import annotations

from cnr_store_gpu.bitmap import DeviceBitmaps, RowBitmap, Taken
from cnr_store_gpu.gather import RowRequest
from cnr_store_gpu.host_copies import JoinedCopies
from cnr_store_gpu.optimizers import Movement, RowMovement, row_movement, row_slots, rows_with_state, scalar_state
from cnr_store_gpu.quantize import LatticeCodes
from cnr_store_gpu.row_union import Cumulative
from cnr_store_gpu.shards import ChangeSource, WatchedShard
from cnr_store_gpu.staging import Staged, StagingBuffers
from cnr_store_gpu.tables import ModelTable, plan_tables
from cnr_store_gpu.tracker import RowTracker
from cnr_store_gpu.words import warmup

__all__ = [
    "Cumulative",
    "DeviceBitmaps",
    "JoinedCopies",
    "LatticeCodes",
    "Movement",
    "RowBitmap",
    "RowMovement",
    "RowRequest",
    "ChangeSource",
    "RowTracker",
    "Staged",
    "StagingBuffers",
    "ModelTable",
    "Taken",
    "WatchedShard",
    "plan_tables",
    "row_movement",
    "row_slots",
    "rows_with_state",
    "scalar_state",
    "warmup",
]
