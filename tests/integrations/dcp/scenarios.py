"""What ranks save and load together through DCP: every placement, other numbers of ranks, and a fault at every hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from cnr_store import Store, TableOptions
from cnr_store.errors import BadInput
from cnr_store.integrations.dcp import CnrStorageReader, CnrStorageWriter
from cnr_store.integrations.dcp.folder import load_dcp
from cnr_store_gpu import RowTracker

ROWS = 1101


@dataclass(frozen=True)
class Place:
    """This rank of so many, in which turn, and a folder that all processes share."""

    rank: int
    world: int
    turn: int
    folder: Path

    def store(self, name: str, world: int | None = None, turn: int | None = None) -> Path:
        """The store of a scenario that so many ranks saved in a turn; by default these ranks, now."""
        return self.folder / f"{name}-{world or self.world}-{self.turn if turn is None else turn}"

    def earlier(self, name: str) -> list[Path]:
        """The stores of the turns before, and of this one."""
        return [path for turn in range(self.turn + 1) for path in sorted(self.folder.glob(f"{name}-*-{turn}"))]


Scenario = Callable[[Place], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(run: Scenario) -> Scenario:
    """Register a scenario under its name."""
    SCENARIOS[run.__name__] = run
    return run


ACROSS: dict[str, Scenario] = {}
"""Those of `SCENARIOS` that load what other numbers of ranks have saved."""


def across(run: Scenario) -> Scenario:
    """Register a scenario that uses `Place.earlier`: it runs in each turn, others once with each number of ranks."""
    ACROSS[run.__name__] = run
    return scenario(run)


def whole_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every kind, the same on every rank."""
    make = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(ROWS, 12, generator=make),
        "columns": torch.randn(ROWS, 12, generator=make),
        "half": torch.randn(ROWS, 6, generator=make).to(torch.bfloat16),
        "bias": torch.randn(37, generator=make),
        "flags": torch.randint(0, 2, (11,), generator=make).to(torch.bool),
        "ids": torch.randint(0, 99, (ROWS, 2), generator=make),
        "cube": torch.randn(5, 6, 7, generator=make),
        "few": torch.randn(3, 4, generator=make),
        "scalar": torch.randn((), generator=make),
    }


def spread(
    whole: dict[str, torch.Tensor], mesh: DeviceMesh, placement: Callable[[torch.Tensor], list[Placement]]
) -> dict[str, torch.Tensor]:
    """The tensors as DTensors of the mesh."""
    return {name: distribute_tensor(one, mesh, placement(one)) for name, one in whole.items()}


def by_dimension(dimension: int) -> Callable[[torch.Tensor], list[Placement]]:
    """Cut along a dimension that a tensor has, the last one otherwise."""
    return lambda one: [Shard(min(dimension, one.ndim - 1))] if one.ndim else [Replicate()]


def replicated(_: torch.Tensor) -> list[Placement]:
    """A copy on every rank."""
    return [Replicate()]


def line_of(place: Place) -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("cpu", (place.world,))


def empty_like(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The same placements, other numbers."""
    return {name: torch.zeros_like(one) for name, one in state.items()}


def assert_whole(state: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    """Every tensor is the expected one, bit for bit, over all ranks."""
    for name, one in state.items():
        found = one.full_tensor() if isinstance(one, DTensor) else one
        assert torch.equal(found, expected[name]), name


def newest(path: Path) -> tuple[int, str]:
    """Version and kind of the newest record."""
    with Store.open(str(path)) as store:
        record = store.head().record
        return record.v, record.kind


# ---- placements, and numbers of ranks


@across
def rows_are_saved_and_loaded_as_rows_columns_and_copies(place: Place) -> None:
    mesh = line_of(place)
    path = place.store("placed")
    with CnrStorageWriter(path) as writer:
        dcp.save(spread(whole_state(), mesh, by_dimension(0)), storage_writer=writer)
    for stored in place.earlier("placed"):
        for placement in (by_dimension(0), by_dimension(1), replicated):
            state = empty_like(spread(whole_state(), mesh, placement))
            dcp.load(state, storage_reader=CnrStorageReader(stored))
            assert_whole(state, whole_state())
        plain = {name: torch.zeros_like(one) for name, one in whole_state().items()}
        dcp.load(plain, storage_reader=CnrStorageReader(stored))
        assert_whole(plain, whole_state())


@scenario
def folders_of_dcp_itself_are_read_whole(place: Place) -> None:
    mesh = line_of(place)
    for name, placement in (
        ("own-rows", by_dimension(0)),
        ("own-columns", by_dimension(1)),
        ("own-copies", replicated),
    ):
        folder = place.store(name)
        state = {"nested": [spread(whole_state(), mesh, placement)], "step": 3}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
        dist.barrier()

        found = load_dcp(folder)

        assert found["step"] == 3
        assert_whole(found["nested"][0], whole_state())
        assert all(one.dtype == whole_state()[key].dtype for key, one in found["nested"][0].items())


@scenario
def columns_and_copies_are_saved_with_deltas(place: Place) -> None:
    mesh = line_of(place)
    for name, placement in (("columns", by_dimension(1)), ("copies", replicated)):
        path, whole = place.store(name), whole_state()
        with CnrStorageWriter(path) as writer:
            for changed in (0, 3, 1000):
                whole["rows"][changed] += 1
                whole["bias"][0] += 1
                dcp.save(spread(whole, mesh, placement), storage_writer=writer)
        with Store.open(str(path)) as store:
            rows = [[part.rows for part in manifest.parts] for manifest in store.snapshot().manifests]
            assert len(rows) == 3
            assert store.snapshot().record.chain[-1].rows <= place.world
        state = empty_like(spread(whole, mesh, by_dimension(0)))
        dcp.load(state, storage_reader=CnrStorageReader(path))
        assert_whole(state, whole)


@scenario
def plain_tensors_and_values_are_saved_once(place: Place) -> None:
    path, whole = place.store("plain"), whole_state()
    state: dict[str, Any] = {"tensors": whole, "epoch": 3, f"reader{place.rank}": {"at": place.rank, "raw": b"x"}}
    with CnrStorageWriter(path) as writer:
        dcp.save(state, storage_writer=writer)
    found: dict[str, Any] = {
        "tensors": empty_like(whole), "epoch": 0, f"reader{place.rank}": {"at": None, "raw": None},
    }  # fmt: skip
    dcp.load(found, storage_reader=CnrStorageReader(path))
    assert_whole(found["tensors"], whole)
    assert found["epoch"] == 3
    assert found[f"reader{place.rank}"] == {"at": place.rank, "raw": b"x"}


@scenario
def two_dimensional_meshes_are_saved(place: Place) -> None:
    if place.world < 4:
        return
    mesh = init_device_mesh("cpu", (2, 2))
    whole = {name: one for name, one in whole_state().items() if one.ndim == 2}
    for number, placements in enumerate(([Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(1)])):
        path = place.store(f"mesh{number}")
        with CnrStorageWriter(path) as writer:
            for _ in range(2):
                whole["rows"][7] += 1
                dcp.save({n: distribute_tensor(t, mesh, placements) for n, t in whole.items()}, storage_writer=writer)
        assert newest(path)[1] == "delta"
        state = empty_like(spread(whole, line_of(place), by_dimension(1)))
        dcp.load(state, storage_reader=CnrStorageReader(path))
        assert_whole(state, whole)


def sharded(place: Place, whole: torch.Tensor, dimension: int) -> Any:
    """A ShardedTensor, cut along a dimension; two shards on each rank."""
    pieces = torch.tensor_split(torch.arange(whole.shape[dimension]), 2 * place.world)
    shards = []
    for number, piece in enumerate(pieces):
        if number % place.world != place.rank or not len(piece):
            continue
        part = whole.narrow(dimension, int(piece[0]), len(piece)).clone()
        offsets = [0] * whole.ndim
        offsets[dimension] = int(piece[0])
        where = ShardMetadata(offsets, list(part.shape), placement=f"rank:{place.rank}/cpu")
        shards.append(sharded_tensor.Shard(part, where))
    return sharded_tensor.init_from_local_shards(shards, *whole.shape)


@across
def sharded_tensors_are_saved_and_cut_anew(place: Place) -> None:
    path, whole = place.store("sharded"), {n: t for n, t in whole_state().items() if n in ("rows", "ids", "bias")}
    with CnrStorageWriter(path) as writer:
        dcp.save({name: sharded(place, one, 0) for name, one in whole.items()}, storage_writer=writer)
        whole["rows"][5] += 1
        dcp.save({name: sharded(place, one, 0) for name, one in whole.items()}, storage_writer=writer)
    assert newest(path)[1] == "delta"
    for stored in place.earlier("sharded"):
        state = {name: sharded(place, torch.zeros_like(one), one.ndim - 1) for name, one in whole.items()}
        dcp.load(state, storage_reader=CnrStorageReader(stored))
        for name, one in whole.items():
            expected = sharded(place, one, one.ndim - 1)
            for mine, other in zip(state[name].local_shards(), expected.local_shards(), strict=True):
                assert torch.equal(mine.tensor, other.tensor), name
        plain = empty_like(whole)
        dcp.load(plain, storage_reader=CnrStorageReader(stored))
        assert_whole(plain, whole)


def cut_by(place: Place, whole: torch.Tensor, plan: list[tuple[int, int, int]]) -> Any:
    """A ShardedTensor of rows [start, stop), each of them on a rank."""
    shards = []
    for start, stop, owner in plan:
        if owner % place.world == place.rank:
            where = ShardMetadata([start, 0], [stop - start, whole.shape[1]], placement=f"rank:{place.rank}/cpu")
            shards.append(sharded_tensor.Shard(whole[start:stop].clone(), where))
    return sharded_tensor.init_from_local_shards(shards, *whole.shape)


PLANS = [
    [(0, 550, 0), (550, ROWS, 1)],
    [(0, 300, 0), (300, 600, 1), (600, 900, 1), (900, ROWS, 0)],
    [(0, 200, 0), (200, 201, 1), (201, 700, 0), (700, 1100, 1), (1100, ROWS, 0)],
    [(0, 1000, 1), (1000, ROWS, 0)],
]


@scenario
def every_plan_of_shards_loads_what_every_other_one_saved(place: Place) -> None:
    path = place.store("plans")
    with CnrStorageWriter(path) as writer:
        for seed, saved in enumerate(PLANS):
            whole = whole_state(seed)["rows"]
            dcp.save({"rows": cut_by(place, whole, saved)}, storage_writer=writer)
            for loaded in PLANS:
                state = {"rows": cut_by(place, torch.zeros_like(whole), loaded)}
                dcp.load(state, storage_reader=CnrStorageReader(path))
                for mine, other in zip(
                    state["rows"].local_shards(), cut_by(place, whole, loaded).local_shards(), strict=True
                ):
                    assert torch.equal(mine.tensor, other.tensor), (saved, loaded)
            plain = {"rows": torch.zeros_like(whole)}
            dcp.load(plain, storage_reader=CnrStorageReader(path))
            assert_whole(plain, {"rows": whole})
        dcp.save({"rows": whole}, storage_writer=writer)
        state = {"rows": cut_by(place, torch.zeros_like(whole), PLANS[2])}
        dcp.load(state, storage_reader=CnrStorageReader(path))
        for mine in state["rows"].local_shards():
            start = mine.metadata.shard_offsets[0]
            assert torch.equal(mine.tensor, whole[start : start + len(mine.tensor)])


# ---- trainings


def fsdp(place: Place, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose parameters, biases too, are sharded by FSDP2."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(ROWS, 12), nn.Linear(12, 7), nn.Linear(7, 1))
    fully_shard(model, mesh=line_of(place))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    """One step on ten rows."""
    optimizer.zero_grad()
    model(torch.arange(first, first + 10)).square().sum().backward()
    optimizer.step()


def full(state: Any) -> dict[str, torch.Tensor]:
    """Whole tensors of nested dicts, by name."""
    if isinstance(state, dict):
        return {f"{key}.{name}": one for key, value in state.items() for name, one in full(value).items()}
    if isinstance(state, DTensor):
        return {"": state.full_tensor()}
    return {"": state.clone()} if isinstance(state, torch.Tensor) else {}


@across
def fsdp2_resumes_on_other_ranks_with_its_optimizer(place: Place) -> None:
    path = place.store("fsdp")
    model, optimizer = fsdp(place, seed=0)
    with CnrStorageWriter(path) as writer:
        for first in (0, 30):
            train(model, optimizer, first)
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optim": state}, storage_writer=writer)
    saved = full({"model": weights, "optim": state["state"]})
    torch.save(saved, place.folder / f"{path.name}.{place.rank}.pt")
    with Store.open(str(path)) as store:
        (table,) = store.snapshot().tables.values()
        assert sorted(table.slots) == ["exp_avg", "exp_avg_sq"]
    for stored in place.earlier("fsdp"):
        other, its = fsdp(place, seed=1)
        train(other, its, 0)
        weights, state = get_state_dict(other, its)
        dcp.load({"model": weights, "optim": state}, storage_reader=CnrStorageReader(stored))
        set_state_dict(other, its, model_state_dict=weights, optim_state_dict=state)
        weights, state = get_state_dict(other, its)
        expected = torch.load(place.folder / f"{stored.name}.0.pt", weights_only=True)
        found = full({"model": weights, "optim": state["state"]})
        assert found.keys() == expected.keys()
        for name, one in expected.items():
            assert torch.equal(found[name], one), name


@scenario
def async_saves_of_tracked_shards(place: Place) -> None:
    path, mesh = place.store("tracked"), line_of(place)
    torch.manual_seed(0)
    model = nn.Embedding(400, 8)  # this rank's rows of the table
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    tracker = RowTracker(model, optimizers=[optimizer])
    size = (400 * place.world, 8)

    def placed(local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False)

    def state() -> dict[str, Any]:
        return {"emb": placed(model.weight), "state": {"emb": {"sum": placed(optimizer.state[model.weight]["sum"])}}}

    expected = []
    with CnrStorageWriter(path, tracker=tracker, min_rows=100) as writer:
        for first in (0, 50, 100, 150):
            model(torch.arange(first, first + 10)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append({name: one.clone() for name, one in full(state()).items()})
            future = dcp.async_save(state(), storage_writer=writer)
            model(torch.arange(300, 310)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            future.result()
    for version, whole in enumerate(expected, start=2):
        found = {"emb": torch.zeros(size), "state": {"emb": {"sum": torch.zeros(size)}}}
        dcp.load(found, storage_reader=CnrStorageReader(path, version=version))
        for name, one in full(found).items():
            assert torch.equal(one, whole[name]), name


# ---- faults


class Planted(RuntimeError):
    """What the hooks raise."""


def failing(name: str, rank: int) -> Callable[..., Any]:
    """Raise in a hook on one rank, before it has done anything."""

    def hook(self: Any, *given: Any, **named: Any) -> Any:
        base = CnrStorageWriter if isinstance(self, CnrStorageWriter) else DefaultSavePlanner
        if dist.get_rank() == rank and self.fails:
            raise Planted(name)
        return getattr(base, name)(self, *given, **named)

    return hook


ON_ANY_RANK = {
    "writer": ("storage_meta", "set_up_storage_writer", "prepare_local_plan", "write_data"),
    "planner": ("set_up_planner", "create_local_plan", "finish_plan", "resolve_data"),
}
ON_THE_COORDINATOR = {"writer": ("prepare_global_plan", "finish"), "planner": ("create_global_plan",)}


@scenario
def a_fault_at_any_hook_leaves_the_version_before(place: Place) -> None:
    path, whole, mesh = place.store("faults"), whole_state(), line_of(place)
    ranks = sorted({0, place.world - 1})
    cases = [(part, name, rank) for part, names in ON_ANY_RANK.items() for name in names for rank in ranks]
    cases += [(part, name, 0) for part, names in ON_THE_COORDINATOR.items() for name in names]
    with CnrStorageWriter(path) as writer:
        dcp.save(spread(whole, mesh, by_dimension(0)), storage_writer=writer)
        version = newest(path)
        for number, (part, name, rank) in enumerate(cases):
            whole["rows"][number] += 1
            planner = DefaultSavePlanner()
            target: Any = writer if part == "writer" else planner
            kind = type(target)
            target.__class__ = type(f"Failing{kind.__name__}", (kind,), {name: failing(name, rank), "fails": True})
            with pytest.raises(CheckpointException, match=name):
                dcp.save(spread(whole, mesh, by_dimension(0)), storage_writer=writer, planner=planner)
            target.__class__ = kind
            dist.barrier()
            assert newest(path) == version, name
            if number % 3 == 0:
                dcp.save(spread(whole, mesh, by_dimension(0)), storage_writer=writer)
                version = newest(path)
                assert version[1] == "delta", (name, rank)
        dcp.save(spread(whole, mesh, by_dimension(0)), storage_writer=writer)
    state = empty_like(spread(whole, mesh, by_dimension(0)))
    dcp.load(state, storage_reader=CnrStorageReader(path))
    assert_whole(state, whole)


@scenario
def a_fault_in_reset_leaves_the_version_before(place: Place) -> None:
    path = place.store("reset")
    with CnrStorageWriter(path) as writer:
        dcp.save({"x": torch.ones(2)}, checkpoint_id="step-1", storage_writer=writer)
        version = newest(path)
        with pytest.raises(BadInput, match="no number"):
            dcp.save({"x": torch.zeros(2)}, checkpoint_id="no number", storage_writer=writer)
        assert newest(path) == version
        dist.barrier()
        dcp.save({"x": torch.zeros(2)}, checkpoint_id="step-2", storage_writer=writer)
    assert newest(path)[0] == version[0] + 1


@scenario
def what_one_rank_cannot_write_no_rank_has_saved(place: Place) -> None:
    path, mesh, whole = place.store("refused"), line_of(place), whole_state()
    with CnrStorageWriter(path, options=TableOptions()) as writer:
        dcp.save(spread(whole, mesh, by_dimension(0)), storage_writer=writer)
        version = newest(path)
        bad = whole | {"rows": whole["rows"].clone()}
        bad["rows"][-1, 0] = torch.nan  # the last rank has it
        with pytest.raises(CheckpointException, match=f"row {ROWS - 1} of table 'rows'"):
            dcp.save(spread(bad, mesh, by_dimension(0)), storage_writer=writer)
        dist.barrier()
        assert newest(path) == version
        dcp.save(spread(whole, mesh, by_dimension(0)), storage_writer=writer)
        assert newest(path) == (version[0] + 1, "delta")
