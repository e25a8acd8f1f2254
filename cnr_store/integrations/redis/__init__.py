"""Writes the rows of a loader to Redis, reads them in processes without tables, and tells of commits (`news`).

```python
sink = RedisSink.connect("redis://cache:6379/0", "ctr")
loader.add_sink(sink)                     # from now on each published version is also pushed
rows = RedisRows.connect("redis://cache:6379/0", "ctr")
batch = rows.read_many({"user": [17, 4], "item": [9]})   # one version, whatever is written meanwhile
```
"""

from __future__ import annotations

from cnr_store.integrations.redis.news import RedisNews
from cnr_store.integrations.redis.rows import RedisBatch, RedisRows
from cnr_store.integrations.redis.sink import RedisSink

__all__ = ["RedisSink", "RedisRows", "RedisBatch", "RedisNews"]
