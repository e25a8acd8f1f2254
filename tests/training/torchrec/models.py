"""Small sharded models, random but the same in every run, and a reading of their state that is not the code under test.

Build on all ranks with the same arguments: placing tables is a collective act.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Sharding = Literal["row_wise", "table_wise", "column_wise", "data_parallel", "table_row_wise", "mixed"]
SHARDINGS: tuple[Sharding, ...] = ("row_wise", "table_wise", "column_wise", "data_parallel", "mixed")
CPU = torch.device("cpu")
SEQUENCE_DIM = 8
TINY = 3
"""Rows of a table that leaves the last of four ranks without any, if it is sharded by rows."""


@dataclass(frozen=True)
class TableSpec:
    """One table of a collection, with the features that read it."""

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...]


@dataclass(frozen=True)
class ModelSpec:
    """Tables by the path of their collection; those under ``sequence`` are an EmbeddingCollection."""

    collections: dict[str, tuple[TableSpec, ...]]
    features: tuple[str, ...]

    def ids_below(self, feature: str) -> int:
        """How many ids every table that the feature reads has."""
        return min(t.num_rows for tables in self.collections.values() for t in tables if feature in t.features)


@dataclass(frozen=True)
class Built:
    """A model under DistributedModelParallel and its optimizers."""

    dmp: DistributedModelParallel
    dense: KeyedOptimizerWrapper
    optimizer: CombinedOptimizer
    spec: ModelSpec
    single: frozenset[str]
    """Features that must have one id per example: a data-parallel sequence on a CPU returns one row per example."""

    def batch(self, number: int, rank: int = 0) -> KeyedJaggedTensor:
        """Return batch ``number`` of this rank."""
        return random_batch(self.spec, number, rank=rank, single=self.single)

    def step(self, batch: KeyedJaggedTensor) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        self.dmp(batch).backward()
        self.optimizer.step()


def pooled(tables: Sequence[TableSpec]) -> torchrec.EmbeddingBagCollection:
    """Return an unsharded collection."""
    configs = [
        torchrec.EmbeddingBagConfig(
            name=t.name, num_embeddings=t.num_rows, embedding_dim=t.dim, feature_names=list(t.features)
        )
        for t in tables
    ]
    return torchrec.EmbeddingBagCollection(device=CPU, tables=configs)


class Sparse(nn.Module):
    """Two kinds of collections."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.pooled = pooled(spec.collections["sparse.pooled"])
        self.sequence = torchrec.EmbeddingCollection(
            device=CPU,
            tables=[
                torchrec.EmbeddingConfig(
                    name=t.name, num_embeddings=t.num_rows, embedding_dim=t.dim, feature_names=list(t.features)
                )
                for t in spec.collections["sparse.sequence"]
            ],
        )


class Model(nn.Module):
    """Every row that is looked up gets a gradient that is hardly ever zero."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.sparse = Sparse(spec)
        width = sum(t.dim * len(t.features) for t in spec.collections["sparse.pooled"])
        self.dense = nn.Linear(width, 3)
        self.head = nn.Linear(SEQUENCE_DIM, 2)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.dense(self.sparse.pooled(batch).values()).sin().sum()
        rows = torch.cat([jagged.values() for jagged in self.sparse.sequence(batch).values()])
        result: torch.Tensor = pooled + self.head(rows).sin().sum()
        return result


def random_spec(seed: int) -> ModelSpec:
    """Tables of random sizes; features may be shared, and a bare name stands in both collections."""
    draw = random.Random(seed)
    features = tuple(f"f{number}" for number in range(draw.randint(2, 4)))

    def tables(names: list[str], dims: list[int]) -> tuple[TableSpec, ...]:
        return tuple(
            TableSpec(
                name,
                draw.choice([4, 7, 8, *range(10, 40)]),
                draw.choice(dims),
                tuple(sorted(draw.sample(features, draw.randint(1, min(2, len(features)))))),
            )
            for name in names
        )

    names = [f"t{number}" for number in range(draw.randint(1, 3))]
    return ModelSpec(
        {
            "sparse.pooled": (
                *tables(names, [8, 16]),
                TableSpec("t_tiny", TINY, 8, features[:1]),  # not last: FBGEMM fails on an empty last table
                TableSpec("t_all", draw.choice([4, 7, 8]), 8, features),
            ),
            "sparse.sequence": tables(names, [SEQUENCE_DIM]),
        },
        features,
    )


def _placement(sharding: Sharding, table: TableSpec, world: int, draw: random.Random) -> tuple[str, Any]:
    kind = draw.choice(SHARDINGS[:-1]) if sharding == "mixed" else sharding
    if table.num_rows == TINY and (sharding, kind) != ("row_wise", "row_wise") and kind.endswith("row_wise"):
        kind = "table_wise"  # FBGEMM runs no kernel whose tables are all empty; under row_wise another shares it
    match kind:
        case "row_wise":
            return kind, row_wise(compute_kernel="fused")
        case "table_wise":
            return kind, table_wise(rank=draw.randrange(world), compute_kernel="fused")
        case "column_wise":  # a rank may get several shards of a table
            return kind, column_wise(ranks=[draw.randrange(world) for _ in range(2)], compute_kernel="fused")
        case "table_row_wise" if table.dim != SEQUENCE_DIM:  # sequences cannot be sharded so
            return kind, _with_kernel(table_row_wise(host_index=0), draw.choice(["fused", "dense"]))
        case "table_row_wise":
            return "row_wise", row_wise(compute_kernel="fused")
        case _:
            return "data_parallel", data_parallel()


def _with_kernel(generator: Callable[..., Any], kernel: str) -> Callable[..., Any]:
    def placed(*args: Any, **kwargs: Any) -> Any:
        placement = generator(*args, **kwargs)
        placement.compute_kernel = kernel
        return placement

    return placed


def build_model(
    sharding: Sharding, world: int, seed: int, *, optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    dense: Callable[[Any], torch.optim.Optimizer] | None = None, **fused: Any,
) -> Built:  # fmt: skip
    """Return a random model, sharded at random in the given way; weights are filled by name."""
    draw = random.Random(1000 + seed)
    spec = random_spec(seed)
    torch.manual_seed(seed)
    model = Model(spec)
    fused_params = {"optimizer": optimizer, "learning_rate": 0.1, **fused}
    sharders = [
        EmbeddingBagCollectionSharder(fused_params=dict(fused_params)),
        EmbeddingCollectionSharder(fused_params=dict(fused_params)),
    ]
    placed = {
        path: {t.name: _placement(sharding, t, world, draw) for t in tables}
        for path, tables in spec.collections.items()
    }
    plan = {
        path: construct_module_sharding_plan(
            model.get_submodule(path),
            {name: generator for name, (_, generator) in placed[path].items()},
            local_size=world,
            world_size=world,
            device_type="cpu",
            sharder=sharders[path == "sparse.sequence"],
        )
        for path in spec.collections
    }
    single = {
        feature
        for table in spec.collections["sparse.sequence"]
        if placed["sparse.sequence"][table.name][0] == "data_parallel"
        for feature in table.features
    }
    dmp = DistributedModelParallel(model, device=CPU, plan=ShardingPlan(plan), sharders=sharders)
    fill(dmp, seed)
    parameters = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    wrapped = KeyedOptimizerWrapper(parameters, dense or (lambda params: torch.optim.Adagrad(params, lr=0.1)))
    return Built(dmp, wrapped, CombinedOptimizer([dmp.fused_optimizer, wrapped]), spec, frozenset(single))


def random_batch(
    spec: ModelSpec, seed: int, *, rank: int = 0, single: frozenset[str] = frozenset()
) -> KeyedJaggedTensor:
    """Return a batch of this rank: bags of 0 to 3 ids, of one id for features in ``single``."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    size = 4
    lengths, values = [], []
    for feature in spec.features:
        drawn = torch.randint(0, 4, (size,), generator=generator)
        lengths.append(torch.ones_like(drawn) if feature in single else drawn)
        count = int(lengths[-1].sum())
        values.append(torch.randint(0, spec.ids_below(feature), (count,), generator=generator))
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(spec.features), values=torch.cat(values), lengths=torch.cat(lengths)
    )


@dataclass(frozen=True)
class Piece:
    """A rectangle of a table on this rank as ``state_dict`` shows it; tensors are live."""

    table: str
    row: int
    column: int
    weight: torch.Tensor
    slots: dict[str, torch.Tensor]
    is_sharded: bool


def pieces(built: Built) -> Iterator[Piece]:
    """The slow reference: what TorchRec's own state dicts say that this rank holds."""
    state = built.dmp.state_dict()
    fused = built.dmp.fused_optimizer.state_dict()["state"]
    live = dict(built.dmp.named_parameters())
    for path, tables in built.spec.collections.items():
        folder = "embedding_bags" if path == "sparse.pooled" else "embeddings"
        for table in tables:
            name = f"{path}.{folder}.{table.name}.weight"
            whole = dict(built.dense._optimizer.state.get(live[name], {})) if name in live else {}
            own = {key: slot for key, slot in whole.items() if slot.ndim}
            if not hasattr(state[name], "local_shards"):
                yield Piece(name, 0, 0, state[name], own, False)
                continue
            for number, shard in enumerate(state[name].local_shards()):
                row, column = shard.metadata.shard_offsets
                slots = {
                    key.removeprefix(f"{table.name}."): slot.local_shards()[number].tensor
                    for key, slot in fused.get(name, {}).items()
                }
                yield Piece(name, row, column, shard.tensor, slots or own, True)


@torch.no_grad()
def fill(dmp: DistributedModelParallel, seed: int) -> None:
    """Give every weight a value that its name and the seed alone decide, whatever the sharding."""
    for number, (_, value) in enumerate(sorted(dmp.state_dict().items())):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        whole = torch.randn(tuple(value.shape), generator=generator)
        if not hasattr(value, "local_shards"):
            value.copy_(whole)
            continue
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(whole[row : row + rows, column : column + columns])
