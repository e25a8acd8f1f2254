"""What a manager refuses of TorchRec's models, on two ranks: by name, and before anything is saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

with warnings.catch_warnings():  # fbgemm's own modules warn while they are imported
    warnings.simplefilter("ignore")
    import torchrec
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
    from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardedModule, ShardingEnv2D, ShardingPlan
    from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
    from torchrec.modules.itep_modules import GenericITEPModule
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    import tests.training.torchrec.collisions as collisions
    import tests.training.torchrec.kinds as kinds

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _remote_device
from torch.distributed.device_mesh import DeviceMesh

from cnr_store import TableOptions
from cnr_store.errors import MemoryMoved, UnsupportedModule
from cnr_store.training import CheckpointManager, TrackingOptions
from tests.training.runs import assert_same

Refusal = Callable[[Path, int], None]
REFUSALS: dict[str, Refusal] = {}
FUSED = {"optimizer": kinds.ROW_WISE, "learning_rate": 0.1}
TABLES = [
    torchrec.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[feature])
    for (name, rows), feature in zip(kinds.ROWS.items(), kinds.FEATURES, strict=True)
]


def refusal(function: Refusal) -> Refusal:
    REFUSALS[function.__name__] = function
    return function


def bags() -> torchrec.EmbeddingBagCollection:
    return torchrec.EmbeddingBagCollection(device=kinds.CPU, tables=TABLES)


def sharded(module: nn.Module, sharder: Any, **options: Any) -> DistributedModelParallel:
    """The module under the name ``sparse``, row-wise on all ranks."""
    ways: Any = {name: row_wise(compute_kernel="fused") for name in sharder.shardable_parameters(module)}
    plan = construct_module_sharding_plan(
        module, ways, local_size=2, world_size=2, device_type="cpu", sharder=sharder
    )  # fmt: skip
    return DistributedModelParallel(
        nn.ModuleDict({"sparse": module}), device=kinds.CPU, plan=ShardingPlan({"sparse": plan}), sharders=[sharder],
        **options,
    )  # fmt: skip


def check_refused(folder: Path, model: nn.Module, found: str, advice: str) -> None:
    """The error names it, says what to do, has a stable kind, and no store was made."""
    with pytest.raises(UnsupportedModule, match="sparse") as raised:
        CheckpointManager(str(folder / "store"), model=model, optimizer=[])
    assert (raised.value.kind, raised.value.found) == ("unsupported_module", found)
    assert advice in str(raised.value), str(raised.value)
    dist.barrier()
    assert not (folder / "store").exists()


def say_kernel(training: kinds.KindTraining, kernel: EmbeddingComputeKernel) -> None:
    for lookup in training.dmp.module.sparse._lookups:
        for group in lookup.grouped_configs:
            for config in group.embedding_tables:
                config.compute_kernel = kernel


@refusal
def key_value_kernels(folder: Path, rank: int) -> None:
    """TorchRec makes no such kernel without a GPU, so the configuration alone says so here."""
    training = kinds.build_kind("fused_uvm", 2)
    for name in (
        "KEY_VALUE",
        "SSD_VIRTUAL_TABLE",
        "DRAM_VIRTUAL_TABLE",
        "DRAM_SSD_VIRTUAL_TABLE",
        "FUSED_TRITON",
        "QUANT",
    ):
        kernel = EmbeddingComputeKernel[name]
        say_kernel(training, kernel)
        check_refused(folder, training.dmp, kernel.value, "use fused")


@refusal
def a_uvm_cache_on_a_device(folder: Path, rank: int) -> None:
    """FBGEMM makes no cache without a GPU, so the placement alone says so here."""
    training = kinds.build_kind("fused_uvm_caching", 2)
    say_kernel(training, EmbeddingComputeKernel.FUSED_UVM_CACHING)
    for lookup in training.dmp.module.sparse._lookups:
        for holder in lookup._emb_modules:
            placements = holder.emb_module.weights_physical_placements
            placements[0] = EmbeddingLocation.MANAGED_CACHING.value
    check_refused(folder, training.dmp, "fused_uvm_caching", "use fused_uvm")


@refusal
def a_managed_collision_collection(folder: Path, rank: int) -> None:
    plain = bags()
    collision = {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings, device=kinds.CPU, eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        for table in TABLES
    }  # fmt: skip
    module = ManagedCollisionEmbeddingBagCollection(
        plain, ManagedCollisionCollection(dict(collision), plain.embedding_bag_configs())
    )
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params=dict(FUSED)))
    model = sharded(module, sharder)
    check_refused(folder, model, "ShardedManagedCollisionEmbeddingBagCollection", "use an unsharded")


@refusal
def a_pruned_collection(folder: Path, rank: int) -> None:
    """Not trained: the operators of pruning are in FBGEMM's builds for GPUs alone, so one is declared here."""
    operators = torch.library.Library("fbgemm", "FRAGMENT")
    operators.define("init_address_lookup(Tensor(a!) lookup, Tensor offsets, Tensor sizes) -> ()")
    operators.impl("init_address_lookup", lambda _lookup, _offsets, _sizes: None, "CPU")
    module = ITEPEmbeddingBagCollection(bags(), GenericITEPModule({"t": 60}, enable_pruning=False))
    sharder = ITEPEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params=dict(FUSED)))
    check_refused(folder, sharded(module, sharder), "ShardedITEPEmbeddingBagCollection", "use a plain collection")


@refusal
def a_single_embedding_bag(folder: Path, rank: int) -> None:
    model = sharded(nn.EmbeddingBag(20, 8, mode="sum"), EmbeddingBagSharder(fused_params=dict(FUSED)))
    check_refused(folder, model, "ShardedEmbeddingBag", "EmbeddingBagCollection of one table")


@refusal
def two_dimensions(folder: Path, rank: int) -> None:
    """As DMPCollection shards, which itself takes no CPU: two replicas of one shard each."""
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))
    world = dist.group.WORLD
    assert world is not None
    env = ShardingEnv2D(mesh.get_group("shard"), mesh.get_group("replicate"), world, mesh)
    sharder = EmbeddingBagCollectionSharder(fused_params=dict(FUSED))
    module = bags()
    ways: Any = {table.name: row_wise(compute_kernel="fused") for table in TABLES}
    plan = construct_module_sharding_plan(
        module, ways, local_size=1, world_size=1, device_type="cpu", sharder=sharder
    )  # fmt: skip
    for placed in plan.values():  # each replica is placed on the ranks of its own group
        placed.ranks = [rank]
        for shard in placed.sharding_spec.shards:
            shard.placement = _remote_device(f"rank:{rank}/cpu")
    model = DistributedModelParallel(
        nn.ModuleDict({"sparse": module}), env=env, device=kinds.CPU, plan=ShardingPlan({"sparse": plan}),
        sharders=[sharder], init_data_parallel=False,
    )  # fmt: skip
    check_refused(folder, model, "DMPCollection", "use DistributedModelParallel")


class NewerModule(ShardedModule):  # type: ignore[type-arg]
    """What a later TorchRec may have."""


NewerModule.__abstractmethods__ = frozenset()


@refusal
def an_unknown_module(folder: Path, rank: int) -> None:
    check_refused(folder, nn.ModuleDict({"sparse": NewerModule()}), "NewerModule", "does not know")


@refusal
def stashed_memory(folder: Path, rank: int) -> None:
    """As TorchRec's MemoryStashingManager does it, on one rank, while a batch is between forward and backward."""
    training = kinds.build_kind("fused_uvm", 2)
    store = str(folder / "stashed")
    manager = CheckpointManager(
        store, model=training.dmp, optimizer=training.optimizer, options=TableOptions.exact(),
        tracking=TrackingOptions(in_flight="remark"),
    )  # fmt: skip
    (lookup,) = training.dmp.module.sparse._lookups
    (kernel,) = [holder.emb_module for holder in lookup._emb_modules]
    for number, name in enumerate(("weights_host", "momentum1_host", "weights_host")):
        training.train(2 * number, rank)
        manager.step()
        training.optimizer.zero_grad()
        loss = training.run(kinds.batch_of(2 * number + 1, rank))
        tensor = getattr(kernel, name)
        own, kept = tensor.data, tensor.detach().clone()
        if rank == 1:
            tensor.data = torch.zeros_like(kept)
            if not number:  # later numpy has it, and torch resizes it no more
                own.untyped_storage().resize_(0)
        versions = manager.all_steps()
        with pytest.raises(MemoryMoved, match="memory of"):  # on both ranks
            manager.save()
        assert manager.all_steps() == versions
        if rank == 1:
            if not number:
                own.untyped_storage().resize_(kept.untyped_storage().nbytes())
                own.copy_(kept)
            tensor.data = own
        loss.backward()
        training.optimizer.step()
        manager.step()
        manager.save()
    manager.close()
    expected = kinds.whole_state(training)
    restored = kinds.build_kind("fused_uvm", 2, seed=5)
    manager = CheckpointManager(store, model=restored.dmp, optimizer=restored.optimizer, options=TableOptions.exact())
    manager.restore()
    assert_same(kinds.whole_state(restored), expected)
    manager.close()


@refusal
def managed_collision_on_several_ranks(folder: Path, rank: int) -> None:
    model = collisions.Collided(DistanceLFU_EvictionPolicy(), 0)
    check_refused(folder, model, "MCHManagedCollisionModule", "it on one")
