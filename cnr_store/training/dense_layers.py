"""Large dense layers that are stored like tables: how they are selected, and how a tracker gets their changed rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from cnr_store.training.shards import LocalShard, find_shards
from cnr_store.training.state import table_parameters
from cnr_store_gpu import WatchedShard

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def large_layers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tables: Iterable[str], above_bytes: int
) -> tuple[str, ...]:
    """Return the names of two-dimensional parameters of at least ``above_bytes`` that are no tables. Changes nothing.

    Parameters
    ----------
    tables
        Parameters that the caller names as tables.

    Raises
    ------
    TableNotFound, Unsupported
    """
    known = {id(table) for table in table_parameters(model, tables).values()}
    sharded = {shard.table for shard in find_shards(model, optimizers)}
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in known
        and name not in sharded
        and parameter.dim() == 2
        and parameter.dtype in _DTYPES
        and type(parameter.data) is torch.Tensor
        and parameter.nbytes >= above_bytes
    )


class EveryRow:
    """A source of changes for a table of which every row changes in each step."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def take(self) -> torch.Tensor:
        """Return all rows."""
        return torch.arange(self._num_rows)


def watched_layer(shard: LocalShard) -> WatchedShard:
    """Return a dense layer for a tracker: no hook follows its steps, `EveryRow` reports the changed rows."""
    return WatchedShard(shard.name, shard.rows[1] - shard.rows[0])
