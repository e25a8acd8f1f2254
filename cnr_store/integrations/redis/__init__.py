"""Rows of a loader in Redis, and readers of them that hold no tables.

::

    sink = RedisSink.connect("redis://cache:6379/0", "ctr")
    loader.add_sink(sink)                     # from now on each published version is pushed behind serving
    rows = RedisRows.connect("redis://cache:6379/0", "ctr")
    batch = rows.read_many({"user": [17, 4], "item": [9]})   # one version, whatever lands meanwhile
"""

from __future__ import annotations

from cnr_store.integrations.redis.rows import RedisBatch, RedisRows
from cnr_store.integrations.redis.sink import RedisSink

__all__ = ["RedisSink", "RedisRows", "RedisBatch"]
