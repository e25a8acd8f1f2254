"""Checkpoints of a PyTorch training in about six lines.

Never decides how rows become bytes, and never forgets a changed row before the commit that holds it has won. Open
`checkpoint_manager` first, then `saver` (one save, and what became of it) and `restorer`.

```python
manager = CheckpointManager("s3://bucket/run-7", model=model, optimizer=optimizer, reader=loader, every_steps=100)
manager.restore()                     # in place; None when the store is empty
for batch in loader:
    train_step(model, optimizer, batch)
    manager.step()                    # saves in the background when one is due
manager.close()
```
"""

from __future__ import annotations

from cnr_store.training.background import SaveReport
from cnr_store.training.carrying_reader import CarriedBatch, CarryingReader
from cnr_store.training.checkpoint_manager import CheckpointManager
from cnr_store.training.dynamic_tables import DynamicTable, DynamicTables, KeyChanges, KeyedRows
from cnr_store.training.granted_reader import GrantedReader
from cnr_store.training.loading import RestoredState, load
from cnr_store.training.options import PeerCopies, PrecisionPolicy, SavePolicy, StoreOptions, TrackingOptions
from cnr_store.training.precision.calibrating import Calibration, Trial, calibrate
from cnr_store.training.precision.rate_control import RateStatus, ScaleChange, TableRate
from cnr_store.training.ranks import ProcessRanks
from cnr_store.training.reader import IntervalReader, reader_states_for
from cnr_store.training.reader_shares import share_evenly
from cnr_store.training.save_interval import SaveInterval, SaveMeasure
from cnr_store.training.survivor import Survivor

__all__ = [
    "CheckpointManager",
    "SavePolicy",
    "TrackingOptions",
    "PrecisionPolicy",
    "StoreOptions",
    "PeerCopies",
    "DynamicTable",
    "DynamicTables",
    "KeyedRows",
    "KeyChanges",
    "RestoredState",
    "Survivor",
    "load",
    "SaveReport",
    "ScaleChange",
    "RateStatus",
    "TableRate",
    "SaveInterval",
    "SaveMeasure",
    "calibrate",
    "Calibration",
    "Trial",
    "ProcessRanks",
    "CarriedBatch",
    "CarryingReader",
    "GrantedReader",
    "IntervalReader",
    "reader_states_for",
    "share_evenly",
]
