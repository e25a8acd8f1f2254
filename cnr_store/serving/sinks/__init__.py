"""Places outside a loader that serve its rows: tables on a device, fused row-wise tensors, remote caches.

A `RowSink` takes absolute values in batches, one batch per version, and shows none of a batch before it is committed.
A `SinkFeed` brings one sink to the version that a `SinkSource` (a loader) has published, and keeps it there. Nothing
here is ever an increment: a batch that is written twice, or begun again, ends in the same rows.

```python
sink = FusedRows(bits=8)
loader.add_sink(sink)                     # from now on each published version is pushed, after it is served
```
"""

from __future__ import annotations

from cnr_store.serving.sinks.device import DeviceBatch, DeviceTables
from cnr_store.serving.sinks.fused import FusedRows
from cnr_store.serving.sinks.protocol import Published, RowSink, SinkSource, SinkState, SinkTable, SourceRows
from cnr_store.serving.sinks.sink_feed import PushResult, SinkFeed, SinkMetrics

__all__ = [
    # Sinks.
    "FusedRows",
    "DeviceTables",
    "DeviceBatch",
    # What keeps them up to date.
    "SinkFeed",
    "PushResult",
    "SinkMetrics",
    # What a sink of one's own is made of.
    "RowSink",
    "SinkSource",
    "Published",
    "SinkState",
    "SinkTable",
    "SourceRows",
]
