"""Refuses, by name, what TorchRec does with rows that a checkpoint could not have right; changes nothing.

Why this module exists: a module that is not known here may write rows that no hook sees, look rows up under other ids,
or have state of each rank beside them. Saved as if it were known it would give a checkpoint that looks whole and is
wrong. So what is supported is listed, and everything else is refused before anything is saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cnr_store.errors import UnsupportedModule
from cnr_store.integrations.torchrec.names import (
    SHARDED_COLLECTIONS,
    EmbeddingComputeKernel,
    EmbeddingLocation,
    ManagedCollisionModule,
    ShardedFeatureProcessedEmbeddingBagCollection,
    ShardedModule,
    ShardingEnv2D,
    private,
)

_IN_BACKWARD = {
    EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING,
}  # fmt: skip
_KEY_VALUE = (
    "its rows are in a key-value store behind a cache, and its table has no memory to read; use fused or fused_uvm"
)
_KERNELS = {
    "key_value": _KEY_VALUE,
    "ssd_virtual_table": _KEY_VALUE,
    "dram_virtual_table": _KEY_VALUE,
    "dram_ssd_virtual_table": _KEY_VALUE,
}
_MANAGED_COLLISION = (
    "each rank has its own map of ids to rows, and evictions rewrite rows that no lookup shows; use an unsharded "
    "ManagedCollisionCollection with extras={'collisions': ManagedCollisionState(model)}, or plain collections"
)
_PRUNING = (
    "pruning resets rows that no lookup shows, and each rank has its own map of ids to rows; use a plain collection"
)
_POOL = "its rows are written by update(), which no hook sees; save it with torch.distributed.checkpoint"
_MODULES = {
    "ShardedManagedCollisionEmbeddingBagCollection": _MANAGED_COLLISION,
    "ShardedManagedCollisionEmbeddingCollection": _MANAGED_COLLISION,
    "ShardedManagedCollisionCollection": _MANAGED_COLLISION,
    "ShardedITEPEmbeddingBagCollection": _PRUNING,
    "ShardedITEPEmbeddingCollection": _PRUNING,
    "ShardedTensorPool": _POOL,
    "ShardedKeyedJaggedTensorPool": _POOL,
    "ShardedEmbeddingBag": "use an EmbeddingBagCollection of one table",
    "ShardedEmbeddingTower": "some ranks alone have its interaction; shard its EmbeddingBagCollection by itself",
    "ShardedEmbeddingTowerCollection": "some ranks alone have its interactions; shard its collections by themselves",
}


def check_module(name: str, module: nn.Module) -> None:
    """Return if a module of the model is none that TorchRec sharded, or one whose rows can be saved and followed.

    Raises
    ------
    UnsupportedModule
    """
    kind = type(module).__name__
    if isinstance(module, ManagedCollisionModule) and dist.is_initialized() and dist.get_world_size() > 1:
        raise UnsupportedModule(
            f"module {name!r} is a {kind}, which several ranks cannot save: each has its own map of ids to rows; train "
            "it on one",
            path=name, found=kind,
        )  # fmt: skip
    if not isinstance(module, ShardedModule):
        return
    if not isinstance(module, (*SHARDED_COLLECTIONS, ShardedFeatureProcessedEmbeddingBagCollection)):
        reason = _MODULES.get(kind, "cnr_store does not know how it looks rows up and writes them")
        raise UnsupportedModule(f"module {name!r} is a {kind}, which cannot be saved: {reason}", path=name, found=kind)
    if isinstance(private(module, "_env"), ShardingEnv2D):
        raise UnsupportedModule(
            f"module {name!r} is sharded in two dimensions (DMPCollection), which cannot be saved: the replicas of a "
            "table differ until sync(), which rewrites rows that no lookup shows; use DistributedModelParallel",
            path=name, found="DMPCollection",
        )  # fmt: skip


def check_kernel(table: str, config: Any, module: nn.Module, position: int) -> None:
    """Return if the rows of table number ``position`` of an FBGEMM kernel can be read in place. Asks for no weights.

    Raises
    ------
    UnsupportedModule
    """
    kernel = config.compute_kernel
    found = kernel.value
    places = getattr(module, "weights_physical_placements", None)  # a dense kernel has one place
    if kernel not in _IN_BACKWARD and kernel is not EmbeddingComputeKernel.DENSE:
        reason = _KERNELS.get(found, "its rows cannot be read in place; use fused, fused_uvm or dense")
    elif places is not None and int(places[position]) == EmbeddingLocation.MANAGED_CACHING.value:
        reason = "on a device the newest values of its rows may be in the cache alone; use fused_uvm"
    else:
        return
    raise UnsupportedModule(
        f"table {table!r} has the kernel {found}, which cannot be saved: {reason}", table=table, found=found
    )


def check_weight(table: str, config: Any, weight: torch.Tensor, names: list[str]) -> None:
    """Return if these can be a shard's weights; ``names``: of all tables of its kernel.

    Raises
    ------
    UnsupportedModule
    """
    if config.compute_kernel is EmbeddingComputeKernel.DENSE and names.count(config.name) > 1:
        raise UnsupportedModule(
            f"table {table!r} has several shards on this rank and the kernel dense, in which they share a gradient; "
            "shard it with a fused kernel",
            table=table, found="dense",
        )  # fmt: skip
    if not weight.dtype.is_floating_point:
        raise UnsupportedModule(
            f"table {table!r} has weights of {weight.dtype}, expected a floating point type",
            table=table, found=str(weight.dtype),
        )  # fmt: skip
