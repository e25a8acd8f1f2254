"""What changes from version to version, as Arrow record batches, and as files of them.

Never serves rows. Open `stream` first.

```python
from cnr_store.changes import changes

for batch in changes(Store.open("s3://bucket/run-7"), since=3):
    print(batch.num_rows, batch["op"][0])
```
"""

from __future__ import annotations

from cnr_store.changes.arrow import change_schema
from cnr_store.changes.catching_up import CatchUp, catch_up
from cnr_store.changes.cursor import ChangeCursor
from cnr_store.changes.publisher import PriorityPublisher, PublishReport
from cnr_store.changes.recording import RecordedVersion, RecordingReport, recorded_cursor, write_ipc, write_parquet
from cnr_store.changes.stream import ChangeStream, VersionChanges, changes

__all__ = [
    # Changes as Arrow record batches.
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
    # The same as a store for servers, within a limit of bytes.
    "PriorityPublisher",
    "PublishReport",
]
