"""Sparse, quantized, incremental checkpoints of embedding tables, on any object store.

```python
store = Store.create("s3://bucket/run-7")
with store.writer() as writer:
    with writer.begin(step=100, kind="baseline") as txn:
        txn.write_table("user", weights, slots={"momentum1": state})
    with writer.begin(step=200) as txn:
        txn.write_rows("user", row_ids, weights[row_ids], slots={"momentum1": state[row_ids]})
weights = store.snapshot().table("user").read()
```

What is not in ``__all__`` may change without notice. Importing this package loads no torch.
"""

from __future__ import annotations

from cnr_store.encodings.scale import ScaleChoice
from cnr_store.errors import (
    BackgroundSaveFailed,
    BadInput,
    CnrStoreError,
    Conflict,
    CorruptStore,
    NotFound,
    RankFailed,
    StorageFailure,
    Unsupported,
    VersionRefused,
)
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import (
    ChainEntry,
    CommitRecord,
    Cursor,
    DenseEntry,
    Pin,
    RelayMarker,
    TableSchema,
    WriterInfo,
)
from cnr_store.format.sizes import SegmentSizes, fp32_bytes, segment_sizes, total_sizes
from cnr_store.log.leases import Lease
from cnr_store.log.retention import KeepBest, RetentionPolicy
from cnr_store.maintenance.compaction import CompactionPolicy, CompactionReport
from cnr_store.maintenance.gc import GcReport, SegmentReport, VersionReport, collect_garbage
from cnr_store.maintenance.maintain import MaintenanceReport, Stage, StageReport, compact, maintain
from cnr_store.maintenance.repair import LostState, RepairAction, RepairReport, repair_store
from cnr_store.maintenance.status import HeadStatus, LastMaintenance, StoreStatus, read_status
from cnr_store.maintenance.verify import LogReport, Problem, VerifyReport, verify_store
from cnr_store.read.compare import TableDifference, compare_tables
from cnr_store.read.id_maps import IdMap, read_id_map
from cnr_store.read.snapshot import Snapshot
from cnr_store.read.table_view import TableView
from cnr_store.runtime.ranks import Ranks
from cnr_store.segment.chunk_cache import CacheCounts, ChunkCache
from cnr_store.segment.shards import KeyShare, Shard, key_owners
from cnr_store.store import Store
from cnr_store.transfer.copying import StoreCopyReport, copy_store
from cnr_store.transfer.exporting import ExportedTensor, ExportReport, export_snapshot
from cnr_store.transfer.importing import ImportReport, check_import, import_tensors
from cnr_store.transfer.safetensors_file import TensorFile, TensorSpec
from cnr_store.types import Rectangle
from cnr_store.write.encode import RowUpdate
from cnr_store.write.rate import expected_restores
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.table_options import TableOptions
from cnr_store.write.transaction import Transaction
from cnr_store.write.whole_tables import TableValues
from cnr_store.write.writer import Writer

__all__ = [
    # Keeping a store fast and small.
    "maintain",
    "MaintenanceReport",
    "StageReport",
    "Stage",
    "compact",
    "CompactionPolicy",
    "CompactionReport",
    "collect_garbage",
    "KeepBest",
    "TableDifference",
    "IdMap",
    "read_id_map",
    "compare_tables",
    "RetentionPolicy",
    "GcReport",
    "Lease",
    # Looking at stores, and tensors in and out.
    "verify_store",
    "VerifyReport",
    "Problem",
    "LogReport",
    "repair_store",
    "RepairReport",
    "RepairAction",
    "read_status",
    "StoreStatus",
    "HeadStatus",
    "LastMaintenance",
    "segment_sizes",
    "total_sizes",
    "fp32_bytes",
    "SegmentSizes",
    "export_snapshot",
    "ExportReport",
    "ExportedTensor",
    "check_import",
    "import_tensors",
    "ImportReport",
    "copy_store",
    "StoreCopyReport",
    # The store.
    "Writer",
    "Transaction",
    "TableView",
    "TableOptions",
    "expected_restores",
    "ScaleChoice",
    "Store",
    "Snapshot",
    "ChunkCache",
    "CacheCounts",
    # Several ranks that write one store together.
    "Ranks",
    "Shard",
    "KeyShare",
    "key_owners",
    "Rectangle",
    "Declaration",
    "RowUpdate",
    "TableValues",
    # What they return: documents of the format (spec, section 3), and lines of reports.
    "LogEntry",
    "CommitRecord",
    "ChainEntry",
    "WriterInfo",
    "TableSchema",
    "DenseEntry",
    "Pin",
    "Cursor",
    "RelayMarker",
    "SegmentReport",
    "VersionReport",
    "LostState",
    "TensorFile",
    "TensorSpec",
    # The families of errors; `cnr_store.errors` has all.
    "CnrStoreError",
    "NotFound",
    "BadInput",
    "Conflict",
    "CorruptStore",
    "StorageFailure",
    "Unsupported",
    "BackgroundSaveFailed",
    "VersionRefused",
    "RankFailed",
]
