"""Rows of the newest version, served from memory and kept up to date.

Never writes to a store beyond the cursor that protects what it reads, and never shows half a version. Open `loader`
first, then `update` (how base rows become those of another version) and `rows` (what lookups read).

```python
from cnr_store.serving import Loader

with Loader("s3://bucket/run-7", ["user", "item"], channel="prod") as loader:
    loader.start()                                              # follows the store on a thread
    batch = loader.lookup_many({"user": [17, 4], "item": [9]})  # one version, whatever lands meanwhile
```
"""

from __future__ import annotations

from cnr_store.serving.candidate import Candidate
from cnr_store.serving.loader import Loader
from cnr_store.serving.loader_options import LoaderOptions
from cnr_store.serving.loader_process import LoaderProcess
from cnr_store.serving.metrics import LoaderMetrics, PollResult
from cnr_store.serving.rows.attached import AttachedTables
from cnr_store.serving.rows.lookups import LookupBatch
from cnr_store.serving.rows.shards import HashShard
from cnr_store.types import RowRange

__all__ = [
    "Loader",
    "LoaderOptions",
    "LoaderProcess",
    "AttachedTables",
    "Candidate",
    "PollResult",
    "LoaderMetrics",
    "LookupBatch",
    "RowRange",
    "HashShard",
]
