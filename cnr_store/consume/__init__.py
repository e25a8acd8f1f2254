"""Consumers of a store: what serves its rows, follows its changes, and carries them on."""

from __future__ import annotations

from cnr_store.consume.arrow import change_schema
from cnr_store.consume.assigning import assign_shards
from cnr_store.consume.catching_up import CatchUp, catch_up
from cnr_store.consume.cursor import ChangeCursor
from cnr_store.consume.recording import RecordedVersion, RecordingReport, recorded_cursor, write_ipc, write_parquet
from cnr_store.consume.relay import Relay, RelayReport
from cnr_store.consume.stream import ChangeStream, VersionChanges, changes

__all__ = [
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
