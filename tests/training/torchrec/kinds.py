"""Models as people run them with TorchRec: a kind for each kernel, sharding, wrapper and way to communicate.

Every kind is one small model whose state is read from TorchRec's own state dicts. Build on all ranks with the same
arguments: placing tables is a collective act.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

State = dict[str, Any]
CPU = torch.device("cpu")
ROW_WISE, ADAGRAD = EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD
FEATURES = ("f", "g")
ROWS = {"t": 30, "u": 11}
BATCH = 4
Way = Callable[..., Any]


def as_type(generator: Way, *, kernel: str = "fused", sharding: str | None = None) -> Way:
    """A way to shard whose generator takes no kernel."""

    def placed(*args: Any, **kwargs: Any) -> Any:
        placement = generator(*args, **kwargs)
        placement.compute_kernel = kernel
        placement.sharding_type = sharding or placement.sharding_type
        return placement

    return placed


@dataclass(frozen=True)
class Kind:
    """How the tables ``t`` and ``u`` are sharded on four ranks of two hosts, and what the model has beside.

    On two ranks each of them is whole on a rank of its own, whatever the kind.
    """

    ways: Callable[[], Mapping[str, Way]]
    optimizer: EmbOptimType = ROW_WISE
    dim: int = 8
    collection: str = "bags"
    codecs: QCommsConfig | None = None
    compiles: bool = False
    world: int = 4
    """How many ranks save it; with four, two restore it."""


def both(way: Callable[[], Way]) -> Callable[[], Mapping[str, Way]]:
    return lambda: {"t": way(), "u": way()}


def rows_and_tables() -> Mapping[str, Way]:
    return {"t": row_wise(compute_kernel="fused"), "u": table_wise(rank=1, compute_kernel="fused")}


def whole_tables() -> Mapping[str, Way]:
    return {"t": table_wise(rank=1, compute_kernel="fused"), "u": table_wise(rank=0, compute_kernel="fused")}


KINDS: dict[str, Kind] = {
    "fused_uvm": Kind(both(lambda: row_wise(compute_kernel="fused_uvm"))),
    "fused_uvm_caching": Kind(both(lambda: table_wise(rank=2, compute_kernel="fused_uvm_caching"))),
    "grid": Kind(both(lambda: as_type(grid_shard(host_indexes=[1, 0]))), ADAGRAD, dim=256),
    "table_row_wise": Kind(
        lambda: {"t": as_type(table_row_wise(host_index=1)), "u": as_type(table_row_wise(host_index=0))}
    ),
    "table_column_wise": Kind(
        both(lambda: as_type(column_wise(ranks=[2, 3], compute_kernel="fused"), sharding="table_column_wise")), ADAGRAD
    ),
    "fp16": Kind(rows_and_tables, codecs=QCommsConfig(CommType.FP16, CommType.FP16, backward_loss_scale=4.0)),
    "int8": Kind(both(lambda: table_wise(rank=3, compute_kernel="fused")), codecs=QCommsConfig(CommType.INT8)),
    "processed": Kind(rows_and_tables, collection="processed"),
    "fused_collection": Kind(both(lambda: table_wise(rank=1, compute_kernel="fused")), ADAGRAD, collection="fused"),
    "sequence": Kind(both(lambda: row_wise(compute_kernel="fused")), collection="sequence"),
    "dense": Kind(
        lambda: {"t": table_wise(rank=1, compute_kernel="dense"), "u": table_wise(rank=0, compute_kernel="dense")},
        world=2,
    ),
    "compiled": Kind(
        both(lambda: row_wise(compute_kernel="fused")), compiles=True, world=2
    ),  # a rank compiles for 20 seconds
}
"""By name; `tests/training/torchrec/test_kinds.py` runs each."""


class KindModel(nn.Module):
    """One collection and a dense layer; every row that is looked up gets a gradient."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        bags = [torchrec.EmbeddingBagConfig(**config) for config in configs(kind)]
        width = 2 * kind.dim
        self.is_sequence = kind.collection == "sequence"
        match kind.collection:
            case "sequence":
                rows = [torchrec.EmbeddingConfig(**config) for config in configs(kind)]
                self.sparse: nn.Module = torchrec.EmbeddingCollection(device=CPU, tables=rows)
                width = kind.dim
            case "processed":
                weighted = torchrec.EmbeddingBagCollection(device=CPU, tables=bags, is_weighted=True)
                processors = {name: PositionWeightedModule(max_feature_length=5) for name in FEATURES}
                self.sparse = FeatureProcessedEmbeddingBagCollection(weighted, cast("dict[str, nn.Module]", processors))
            case "fused":
                self.sparse = FusedEmbeddingBagCollection(
                    tables=bags, optimizer_type=torch.optim.Adagrad, optimizer_kwargs={"lr": 0.1}, device=CPU
                )
            case _:
                self.sparse = torchrec.EmbeddingBagCollection(device=CPU, tables=bags)
        self.dense = nn.Linear(width, 3)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        found = self.sparse(batch).values()
        rows = torch.cat([jagged.values() for jagged in found]) if self.is_sequence else found
        result: torch.Tensor = self.dense(rows).sin().sum()
        return result


def configs(kind: Kind) -> list[dict[str, Any]]:
    return [
        {"name": table, "num_embeddings": rows, "embedding_dim": kind.dim, "feature_names": [feature]}
        for (table, rows), feature in zip(ROWS.items(), FEATURES, strict=True)
    ]


def sharder_of(kind: Kind) -> Any:
    fused = {"optimizer": kind.optimizer, "learning_rate": 0.1}
    codecs = None if kind.codecs is None else get_qcomm_codecs_registry(kind.codecs, device=CPU)
    match kind.collection:
        case "sequence":
            return EmbeddingCollectionSharder(fused_params=fused)
        case "fused":
            return FusedEmbeddingBagCollectionSharder()
    bags = EmbeddingBagCollectionSharder(fused_params=fused, qcomm_codecs_registry=codecs)
    return FeatureProcessedEmbeddingBagCollectionSharder(bags) if kind.collection == "processed" else bags


@dataclass(frozen=True)
class KindTraining:
    """A model of a kind under DistributedModelParallel and its optimizers."""

    kind: Kind
    dmp: DistributedModelParallel
    run: Callable[[KeyedJaggedTensor], torch.Tensor]
    dense: KeyedOptimizerWrapper
    optimizer: CombinedOptimizer

    def train(self, number: int, rank: int) -> None:
        """Train on batch ``number`` of this rank."""
        torch.rand(1 + rank)  # the generators move
        self.optimizer.zero_grad()
        self.run(batch_of(number, rank)).backward()
        self.optimizer.step()


def batch_of(number: int, rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=generator)
    values = [
        torch.randint(0, rows, (int(lengths[at * BATCH : (at + 1) * BATCH].sum()),), generator=generator)
        for at, rows in enumerate(ROWS.values())
    ]
    return KeyedJaggedTensor.from_lengths_sync(keys=list(FEATURES), values=torch.cat(values), lengths=lengths)


def build_kind(name: str, world: int, seed: int = 0) -> KindTraining:
    """Return a model whose weights the seed decides, sharded as its kind where it is saved, else as `whole_tables`."""
    kind = KINDS[name]
    torch.manual_seed(seed)
    model = KindModel(kind)
    sharder = sharder_of(kind)
    ways = kind.ways() if world == kind.world else whole_tables()
    plan = construct_module_sharding_plan(
        model.sparse, dict(ways), local_size=min(2, world), world_size=world, device_type="cpu", sharder=sharder
    )
    dmp = DistributedModelParallel(
        model, device=CPU, plan=ShardingPlan({"sparse": plan}), sharders=[sharder]
    )  # fmt: skip
    fill(dmp, seed)
    parameters = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda given: torch.optim.Adagrad(given, lr=0.1))
    run: Any = torch.compile(dmp, backend="aot_eager", dynamic=True) if kind.compiles else dmp
    return KindTraining(kind, dmp, run, dense, CombinedOptimizer([dmp.fused_optimizer, dense]))


@torch.no_grad()
def fill(dmp: DistributedModelParallel, seed: int) -> None:
    """Give every weight a value that its name and the seed decide, whatever the sharding."""
    for number, (_, value) in enumerate(sorted(dmp.state_dict().items())):
        whole = torch.randn(tuple(value.shape), generator=torch.Generator().manual_seed(1000 * seed + number))
        for _, row, column, part in parts("", value):
            part.copy_(
                whole[row : row + part.shape[0], column : column + part.shape[1]]
                if hasattr(value, "local_shards")
                else whole
            )


def parts(name: str, value: Any) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """The pieces of a tensor of a state dict on this rank: name, first row, first column, live tensor."""
    if not hasattr(value, "local_shards"):
        yield name, 0, 0, value
        return
    for shard in value.local_shards():
        row, *columns = shard.metadata.shard_offsets
        yield name, row, columns[0] if columns else 0, shard.tensor


def state_of(training: KindTraining) -> State:
    """Everything that training depends on, as this rank has it, copied; by TorchRec's own state dicts."""
    found: State = {}
    tensors = {**training.dmp.state_dict()}
    for table, slots in training.dmp.fused_optimizer.state_dict()["state"].items():
        tensors |= {f"{table}/{slot.rpartition('.')[2]}": value for slot, value in slots.items()}
    for name, parameter in training.dmp.named_parameters():
        own = training.dense._optimizer.state.get(parameter, {}) if parameter.numel() else {}  # of a table elsewhere
        tensors |= {f"{name}/{key}": value for key, value in own.items()}
    for name, value in tensors.items():
        for _, row, column, part in parts(name, value):
            found[f"{name}@{row},{column}"] = part.detach().clone()
    for name, module in training.dmp.named_modules():
        if hasattr(module, "iter_cpu"):
            found[f"{name}/iter"] = int(module.iter.item())
    return found | {"rng": torch.get_rng_state()}


def whole_state(training: KindTraining) -> State:
    """Weights, dense parameters and slots of all ranks, each in one piece."""
    world = dist.get_world_size()
    gathered: list[State] = [{}] * world
    own = {name: value for name, value in state_of(training).items() if "@" in name and value.ndim}
    dist.all_gather_object(gathered, own)
    pieces: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for of_rank in gathered:
        for name, value in of_rank.items():
            table, _, corner = name.rpartition("@")
            row, column = map(int, corner.split(","))
            pieces.setdefault(table, {})[row, column] = value
    return {name: joined(given) for name, given in pieces.items()}


def joined(given: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    shape = [max(row + len(value) for (row, _), value in given.items())]
    if next(iter(given.values())).ndim == 2:
        shape.append(max(column + value.shape[1] for (_, column), value in given.items()))
    whole = torch.full(shape, float("nan"))
    for (row, column), value in given.items():
        rows = slice(row, row + len(value))
        if value.ndim == 2:
            whole[rows, column : column + value.shape[1]] = value
        else:
            whole[rows] = value
    return whole
