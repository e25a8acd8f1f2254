"""Finds the shards of a model sharded by TorchRec on this rank, and the lookup that reads each shard.

Why this module exists: ``state_dict()`` has the shards but not their lookups. TorchRec's feature names are ambiguous
(two tables may share a feature), and two modules may have tables of the same name. The lookups have both, by position.
This module attaches and changes nothing.

It does not find tables of an unsharded ``EmbeddingBagCollection`` or ``EmbeddingCollection``: those collections contain
plain ``nn.EmbeddingBag`` and ``nn.Embedding`` modules, which `RowTracker` finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cnr_store.integrations.torchrec.names import (
    SHARDED_COLLECTIONS,
    EmbeddingComputeKernel,
    get_unwrapped_module,
    private,
)
from cnr_store.integrations.torchrec.refusals import check_kernel, check_module, check_weight
from cnr_store.integrations.torchrec.views import (
    fused_movement,
    fused_scalars,
    fused_slots,
    kernel_memory,
    put_fused_scalars,
)
from cnr_store.training.shards import LocalShard, whole_shard


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """One FBGEMM module of a lookup, which reads several shards at once.

    Attributes
    ----------
    slices
        Positions, first (inclusive) to last (exclusive), among the lookup's slices that it reads.
    """

    module: nn.Module
    slices: tuple[int, int]
    is_fused: bool


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """One lookup module of a sharded collection.

    Attributes
    ----------
    collection
        Its ``training`` is the mode to use: TorchRec does not pass the mode on to lookups.
    module
        The module that gets the features, without DistributedDataParallel around it.
    slices
        For each slice of its features, in order, the name of the shard that the rows belong to.
    """

    collection: nn.Module
    module: nn.Module
    slices: tuple[str, ...]
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """All shards in a fixed order, and the lookups that read them."""

    shards: tuple[LocalShard, ...]
    lookups: tuple[Lookup, ...]


@dataclass(slots=True, eq=False)
class _ShardPiece:
    """A shard before its number is set, which needs all shards of the table."""

    shard: LocalShard
    num_slices: int
    lookup: int
    kernel: int


def find_sharded(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Sharded:
    """Return the shards of a model on this rank and their lookups. Pure: reads names, metadata and views.

    Parameters
    ----------
    model
        Wrapped in ``DistributedModelParallel`` or not.
    optimizers
        Plain torch optimizers, for tables whose optimizer is not fused.

    Raises
    ------
    UnsupportedModule
        A module, kernel or sharding that a checkpoint could not have right (`refusals`).
    Unsupported
        A private name that this version of TorchRec does not have.
    """
    pieces: list[_ShardPiece] = []
    found: list[tuple[nn.Module, nn.Module, list[tuple[nn.Module, bool]]]] = []
    for owner, collection in _collections(model):
        for wrapped in private(collection, "_lookups"):
            lookup = getattr(wrapped, "module", wrapped)  # data-parallel lookups are inside DDP
            kernels: list[tuple[nn.Module, bool]] = []
            for group, holder in zip(private(lookup, "grouped_configs"), private(lookup, "_emb_modules"), strict=True):
                shards = list(_shards_of(owner, collection, group, holder, optimizers))
                pieces += [_ShardPiece(shard, count, len(found), len(kernels)) for shard, count in shards]
                kernels.append((private(holder, "emb_module"), all(shard.parameter is None for shard, _ in shards)))
            found.append((collection, lookup, kernels))
    _number(pieces)
    lookups = tuple(
        _lookup_of(collection, module, kernels, [piece for piece in pieces if piece.lookup == number])
        for number, (collection, module, kernels) in enumerate(found)
    )
    shards_in_order = sorted((piece.shard for piece in pieces), key=lambda shard: (shard.table, shard.index))
    return Sharded(tuple(shards_in_order), lookups)


def _collections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for owner, module in get_unwrapped_module(model).named_modules():
        check_module(owner, module)
        if isinstance(module, SHARDED_COLLECTIONS):
            yield owner, module


def _shards_of(
    owner: str, collection: nn.Module, group: Any, holder: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[LocalShard, int]]:
    """Yield the shards of one kernel in its order, each with the number of features that read it."""
    tables = private(group, "embedding_tables")
    prefix = "embedding_bags" if hasattr(collection, "embedding_bags") else "embeddings"
    names = [".".join(part for part in (owner, prefix, config.name, "weight") if part) for config in tables]
    kernel = private(holder, "emb_module")
    for position, (table, config) in enumerate(zip(names, tables, strict=True)):
        check_kernel(table, config, kernel, position)
    weights = private(kernel, "split_embedding_weights")()
    memory = kernel_memory(kernel)
    for position, (table, config, weight) in enumerate(zip(names, tables, weights, strict=True)):
        check_weight(table, config, weight, [one.name for one in tables])
        if group.compute_kernel is EmbeddingComputeKernel.DENSE:
            parameter = private(collection, prefix)[config.name].weight
            is_replicated = config.local_metadata is None
            shard = whole_shard(table, parameter, optimizers, weight=weight, is_replicated=is_replicated)
            shard = replace(shard, memory=memory)
        else:
            optimizer = private(holder, "fused_optimizer")
            shard = LocalShard(
                table, 0, config.num_embeddings, config.embedding_dim, (0, 0), (0, 0), weight, False, None,
                fused_movement(kernel), fused_slots(kernel, position), fused_scalars(kernel, optimizer),
                put_fused_scalars(kernel, optimizer), memory,
            )  # fmt: skip
        yield _placed(shard, config, weight), len(config.feature_names)


def _placed(shard: LocalShard, config: Any, weight: torch.Tensor) -> LocalShard:
    first_row, first_column = (0, 0) if config.local_metadata is None else config.local_metadata.shard_offsets
    rows, columns = (first_row, first_row + weight.shape[0]), (first_column, first_column + weight.shape[1])
    return replace(shard, num_rows=config.num_embeddings, dim=config.embedding_dim, rows=rows, columns=columns)


def _number(pieces: list[_ShardPiece]) -> None:
    by_table: dict[str, list[_ShardPiece]] = {}
    for piece in pieces:
        by_table.setdefault(piece.shard.table, []).append(piece)
    for mine in by_table.values():
        mine.sort(key=lambda piece: (piece.shard.rows[0], piece.shard.columns[0]))
        for index, piece in enumerate(mine):
            piece.shard = replace(piece.shard, index=index)


def _lookup_of(
    collection: nn.Module, module: nn.Module, modules: list[tuple[nn.Module, bool]], pieces: list[_ShardPiece]
) -> Lookup:
    slices: list[str] = []
    kernels: list[Kernel] = []
    for number, (kernel, is_fused) in enumerate(modules):
        start = len(slices)
        slices += [p.shard.name for p in pieces if p.kernel == number for _ in range(p.num_slices)]
        kernels.append(Kernel(kernel, (start, len(slices)), is_fused))
    return Lookup(collection, module, tuple(slices), tuple(kernels))
