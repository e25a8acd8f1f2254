"""Finds the rows that this rank has of tables that `cnr_store.communication.SplitTable` splits among ranks.

Their lookups are not followed: the gradient that the optimizer steps by shows which rows change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from cnr_store.communication import SplitTable
from cnr_store.training.shards import (
    Handle,
    LocalShard,
    ShardingLibrary,
    register_library,
    unwrapped,
    whole_shard,
)
from cnr_store_gpu import RowTracker


def _find(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[LocalShard]:
    found = []
    for owner, module in unwrapped(model).named_modules():
        if isinstance(module, SplitTable):
            shard = whole_shard(f"{owner}.weight" if owner else "weight", module.weight, optimizers)
            found.append(replace(shard, num_rows=module.num_rows, rows=module.rows))
    return found


def _follow(_model: nn.Module, _tracker: RowTracker) -> list[Handle]:
    return []


def _unwrap(_optimizer: torch.optim.Optimizer) -> None:
    return None


register_library("cnr_store.communication", ShardingLibrary(find=_find, follow=_follow, unwrap=_unwrap))
