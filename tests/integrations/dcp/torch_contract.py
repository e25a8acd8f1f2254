"""What PyTorch's own tests ask of its file and fsspec storage, asked of a store: their cases, in other words.

Tables have 1,024 rows or more by default; the tensors of those tests are smaller, so each case runs with both kinds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType

from cnr_store.integrations.dcp import CnrStorageReader, CnrStorageWriter
from tests.integrations.dcp.scenarios import Place, scenario

AS_TABLES, AS_DENSE = 1, 1024  # min_rows
HEIGHT, WIDTH = 10, 20

Cut = list[tuple[int, int, int, int, int]] | None
"""Row, column, height and width of each shard, and its rank; None: a plain tensor, which all ranks have."""

CUTS: dict[str, Cut] = {
    "one each": [(0, 0, 5, 20, 0), (5, 0, 5, 20, 1)],
    "two each": [(0, 0, 3, 20, 0), (3, 0, 3, 20, 1), (6, 0, 3, 20, 1), (9, 0, 1, 20, 0)],
    "uneven": [(0, 0, 2, 20, 0), (2, 0, 1, 20, 1), (3, 0, 3, 20, 0), (6, 0, 3, 20, 1), (9, 0, 1, 20, 1)],
    "other way round": [(0, 0, 8, 20, 1), (8, 0, 2, 20, 0)],
    "columns": [(0, 0, 10, 10, 0), (0, 10, 10, 10, 1)],
    "not at all": None,
}


def numbers(seed: int) -> torch.Tensor:
    """A small tensor, the same on every rank."""
    return torch.randn(HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed))


def cut(place: Place, whole: torch.Tensor, how: Cut) -> Any:
    """A ShardedTensor of copies; with fewer ranks than the cut has, they have several shards."""
    if how is None:
        return whole.clone()
    shards = [
        sharded_tensor.Shard(
            whole[row : row + height, column : column + width].clone(),
            ShardMetadata([row, column], [height, width], placement=f"rank:{place.rank}/cpu"),
        )
        for row, column, height, width, owner in how
        if owner % place.world == place.rank
    ]
    return sharded_tensor.init_from_local_shards(shards, *whole.shape)


def assert_same_shards(found: Any, expected: Any, note: object) -> None:
    """What this rank has of two tensors is equal, bit for bit."""
    pairs = [(found, expected)]
    if isinstance(expected, sharded_tensor.ShardedTensor):
        shards = zip(found.local_shards(), expected.local_shards(), strict=True)
        pairs = [(mine.tensor, other.tensor) for mine, other in shards]
    for mine, other in pairs:
        assert torch.equal(mine, other), note


def writers(place: Place, name: str) -> Iterator[tuple[Path, CnrStorageWriter]]:
    """A writer that stores small tensors as tables, and one that stores them as dense tensors."""
    for min_rows in (AS_TABLES, AS_DENSE):
        path = place.store(f"{name}-{min_rows}")
        with CnrStorageWriter(path, min_rows=min_rows) as writer:
            yield path, writer


class Blob:
    """A ``Stateful`` whose state is bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        """Return the bytes."""
        return {"blob": self.content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the bytes."""
        self.content = state["blob"]


@scenario
def torch_contract_module_and_stateful_blob(place: Place) -> None:
    for path, writer in writers(place, "blob"):
        torch.manual_seed(1)
        saved = nn.ModuleDict({"top": nn.Linear(5, 5), "emb": nn.EmbeddingBag(5, 10)}).state_dict()
        dcp.save({**saved, "own": Blob(b"some bytes")}, storage_writer=writer)
        found, blob = {name: torch.zeros_like(one) for name, one in saved.items()}, Blob(b"")
        dcp.load({**found, "own": blob}, storage_reader=CnrStorageReader(path))
        assert blob.content == b"some bytes"
        for name, one in saved.items():
            assert torch.equal(found[name], one), name


@scenario
def torch_contract_any_cut_and_a_plain_tensor_load_what_any_other_saved(place: Place) -> None:
    for path, writer in writers(place, "cuts"):
        for seed, saved in enumerate(CUTS):
            whole = numbers(seed)
            dcp.save({"one": cut(place, whole, CUTS[saved])}, storage_writer=writer)
            for loaded in CUTS:
                if loaded != saved:
                    state = {"one": cut(place, torch.zeros_like(whole), CUTS[loaded])}
                    dcp.load(state, storage_reader=CnrStorageReader(path))
                    assert_same_shards(state["one"], cut(place, whole, CUTS[loaded]), (saved, loaded))


@scenario
def torch_contract_bytes_and_tensors_side_by_side(place: Place) -> None:
    for path, writer in writers(place, "bytes"):
        whole = numbers(0)
        dcp.save({"one": cut(place, whole, CUTS["uneven"]), "text": "any", "list": [1, 2]}, storage_writer=writer)
        state: dict[str, Any] = {"one": torch.zeros_like(whole), "text": "", "list": [0, 0]}
        dcp.load(state, storage_reader=CnrStorageReader(path))
        assert torch.equal(state["one"], whole)
        assert (state["text"], state["list"]) == ("any", [1, 2])


@scenario
def torch_contract_a_second_save_is_what_a_load_finds(place: Place) -> None:
    for path, writer in writers(place, "again"):
        first, second = numbers(0), numbers(1)
        before = dcp.save({"one": first}, storage_writer=writer).storage_data["version"]
        dcp.save({"one": second}, storage_writer=writer)
        for version, expected in ((None, second), (before, first)):
            state = {"one": torch.zeros_like(first)}
            dcp.load(state, storage_reader=CnrStorageReader(path, version=version))
            assert torch.equal(state["one"], expected)


def wrapped(seed: int) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    """Four layers in FSDP's older wrapper, and Adam."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 32), nn.Linear(32, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


@scenario
def torch_contract_fsdp_with_sharded_optimizer_state(place: Place) -> None:
    if place.world < 2:  # FSDP shards nothing on one rank
        return
    for path, writer in writers(place, "fsdp1"):
        model, optimizer = wrapped(0)
        model(torch.rand(8, 8)).sum().backward()
        optimizer.step()
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
            dcp.save(state, storage_writer=writer)

        other, its = wrapped(1)
        with FullyShardedDataParallel.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
            weights = {"model": other.state_dict()}
            dcp.load(weights, storage_reader=CnrStorageReader(path))
            other.load_state_dict(weights["model"])
            moments = load_sharded_optimizer_state_dict(
                model_state_dict=weights["model"], optimizer_key="optim", storage_reader=CnrStorageReader(path)
            )
            its.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, its, moments["optim"]))

        for mine, expected in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, expected)
        for found, want in zip(its.state.values(), optimizer.state.values(), strict=True):
            assert torch.equal(found["exp_avg"], want["exp_avg"])
            assert torch.equal(found["exp_avg_sq"], want["exp_avg_sq"])
        dist.barrier()
