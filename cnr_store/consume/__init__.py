"""Consumers of a store: rows served from memory and kept up to date, and a stream of what changes.

::

    from cnr_store.consume import Loader

    with Loader("s3://bucket/run-7", ["user", "item"], channel="prod") as loader:
        loader.start()                                              # follows on a thread of its own
        batch = loader.lookup_many({"user": [17, 4], "item": [9]})  # one version, whatever lands meanwhile
"""

from __future__ import annotations

from cnr_store.consume.relay.assigning import assign_shards
from cnr_store.consume.relay.relay import Relay, RelayReport
from cnr_store.consume.rows.attached import AttachedTables
from cnr_store.consume.rows.shards import HashShard
from cnr_store.consume.rows.views import Batch
from cnr_store.consume.serve.candidate import Candidate
from cnr_store.consume.serve.loader import Loader
from cnr_store.consume.serve.metrics import LoaderMetrics, Poll
from cnr_store.consume.stream.arrow import change_schema
from cnr_store.consume.stream.catching_up import CatchUp, catch_up
from cnr_store.consume.stream.cursor import ChangeCursor
from cnr_store.consume.stream.recording import (
    RecordedVersion,
    RecordingReport,
    recorded_cursor,
    write_ipc,
    write_parquet,
)
from cnr_store.consume.stream.stream import ChangeStream, VersionChanges, changes
from cnr_store.types import RowRange

__all__ = [
    # Rows in memory.
    "Loader",
    "AttachedTables",
    "Candidate",
    "Poll",
    "LoaderMetrics",
    "Batch",
    "RowRange",
    "HashShard",
    # What changes, as Arrow record batches.
    "changes",
    "ChangeStream",
    "VersionChanges",
    "ChangeCursor",
    "change_schema",
    "catch_up",
    "CatchUp",
    # The same as files.
    "write_parquet",
    "write_ipc",
    "recorded_cursor",
    "RecordedVersion",
    "RecordingReport",
    # Copies that many read.
    "Relay",
    "RelayReport",
    "assign_shards",
]
