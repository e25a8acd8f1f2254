"""Finds the live shards of a model sharded by TorchRec on this rank, and its lookups; codecs of its all-to-all.

```python
dmp = DistributedModelParallel(model, ...)
shards = find_shards(dmp, optimizers)      # cnr_store.training.shards; loads this package by itself
```

Needs torchrec; importing this package without it raises `MissingDependency`. It uses TorchRec's private names where
there are no public ones, and raises `Unsupported` with the version if one is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from cnr_store.integrations.torchrec.collisions import ManagedCollisionState
from cnr_store.integrations.torchrec.groups import forget_process_groups
from cnr_store.integrations.torchrec.lookups import Tracker, follow
from cnr_store.integrations.torchrec.optimizers import unwrap
from cnr_store.integrations.torchrec.shards import Sharded, find_sharded
from cnr_store.integrations.torchrec.top_k import top_k_codecs
from cnr_store.training.shards import Handle, LocalShard, ShardingLibrary, register_library


def _find(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[LocalShard]:
    return list(find_sharded(model, optimizers).shards)


def _follow(model: nn.Module, tracker: Tracker) -> list[Handle]:
    return follow(find_sharded(model), tracker)


register_library("torchrec", ShardingLibrary(find=_find, follow=_follow, unwrap=unwrap))

__all__ = [
    "ManagedCollisionState",
    "Sharded",
    "Tracker",
    "find_sharded",
    "follow",
    "forget_process_groups",
    "top_k_codecs",
    "unwrap",
]
