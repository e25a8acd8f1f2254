"""Places outside a loader that serve its rows: fused row-wise tensors, remote caches.

A `RowSink` takes absolute values in batches, one batch per version, and shows none of a batch before it is committed.
A `SinkFeed` brings one sink to the version that a `RowSource` (a loader) has published, and keeps it there. Nothing
here is ever an increment: a batch that is written twice, or begun anew, ends in the same rows.

::

    sink = RedisSink.connect("redis://cache:6379/0", "ctr")
    loader.add_sink(sink)                     # from now on each published version is pushed behind serving
    rows = RedisRows.connect("redis://cache:6379/0", "ctr")
    batch = rows.read_many({"user": [17, 4], "item": [9]})   # one version, whatever lands meanwhile
"""

from __future__ import annotations

from cnr_store.serving.sinks.fused import FusedRows
from cnr_store.serving.sinks.protocol import Published, RowSink, RowSource, SinkState, SinkTable, SourceRows
from cnr_store.serving.sinks.redis import RedisSink
from cnr_store.serving.sinks.redis_rows import RedisBatch, RedisRows
from cnr_store.serving.sinks.sink_feed import PushResult, SinkFeed, SinkMetrics

__all__ = [
    # Sinks.
    "FusedRows",
    "RedisSink",
    "RedisRows",
    "RedisBatch",
    # What keeps them up to date.
    "SinkFeed",
    "PushResult",
    "SinkMetrics",
    # What a sink of one's own is made of.
    "RowSink",
    "RowSource",
    "Published",
    "SinkState",
    "SinkTable",
    "SourceRows",
]
