"""One rank of the tests of TorchRec models: runs every check in one process group and writes what failed.

A process group of four takes seconds to start, so each rank runs all checks and the test file reports them one by
one.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

with warnings.catch_warnings():  # fbgemm's own modules warn while they are imported
    warnings.simplefilter("ignore")
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.keyed import CombinedOptimizer
    from torchrec.optim.warmup import WarmupOptimizer, WarmupStage

    import tests.training.torchrec.collisions as collisions

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn

from cnr_store.communication import Meter, TopKActivations
from cnr_store.errors import BadInput, BadShape, Unsupported
from cnr_store.integrations.torchrec import find_sharded, top_k_codecs
from cnr_store.training.shards import LocalShard, find_shards, follow_lookups, plain_optimizers, watched_shard
from cnr_store_gpu import Movement, RowBitmap, RowTracker
from tests.training.torchrec.models import (
    SHARDINGS,
    Built,
    Model,
    ModelSpec,
    Piece,
    Sharding,
    TableSpec,
    build_model,
    pieces,
    pooled,
    random_batch,
    random_spec,
)

Check = Callable[[int, int], None]
CHECKS: dict[str, tuple[Check, tuple[int, ...]]] = {}
"""Each check by name, with the numbers of ranks that it is run on."""
MODELS = "CNR_TEST_MODELS"
"""The variable that says on how many random models each sharding's marks are checked; without it, one."""
ALL_WAYS: tuple[Sharding, ...] = (*SHARDINGS, "table_row_wise")
WAYS: dict[int, tuple[Sharding, ...]] = {1: ALL_WAYS, 2: ALL_WAYS, 4: ("row_wise", "mixed")}
"""Shardings by number of ranks, where one of each is enough: starting models on four ranks takes long."""


def check(*worlds: int) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS[function.__name__] = (function, worlds)
        return function

    return register


class Recorder:
    """Marks rows and counts lookups that wait for their backward: the smallest thing that can follow lookups."""

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        self.bitmap = RowBitmap({shard.name: shard.rows[1] - shard.rows[0] for shard in shards})
        self.pending = dict.fromkeys(self.bitmap.table_rows, 0)

    def lookup_slices(self, names: Sequence[str], ids: torch.Tensor, ends: Sequence[int]) -> None:
        starts = [0, *ends[:-1]]
        for name, start, end in zip(names, starts, ends, strict=True):
            self.bitmap.mark(name, ids[start:end])
        for name in set(names):
            self.pending[name] += 1

    def updated(self, name: str) -> None:
        self.pending[name] = 0


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def found_and_said(built: Built) -> list[tuple[LocalShard, Piece]]:
    """Each shard found next to what the state dict says of it; the numbers of both agree."""
    said = {(one.table, one.row, one.column): one for one in pieces(built)}
    shards = find_shards(built.dmp, [built.optimizer])
    assert {(one.table, one.rows[0], one.columns[0]) for one in shards} == said.keys()
    assert len(shards) == len(said)
    return [(shard, said[shard.table, shard.rows[0], shard.columns[0]]) for shard in shards]


def changed_rows(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[int]:
    rows: set[int] = set()
    for name, now in after.items():
        old = before.get(name, torch.zeros_like(now))
        rows |= set((now != old).reshape(now.shape[0], now[:1].numel() or 1).any(dim=1).nonzero().flatten().tolist())
    return rows


def copies(piece: Piece) -> dict[str, torch.Tensor]:
    return {"weight": piece.weight.clone(), **{name: slot.clone() for name, slot in piece.slots.items()}}


def evaluate(built: Built, number: int, rank: int) -> None:
    built.dmp.eval()
    with torch.no_grad():
        built.dmp(built.batch(number, rank))
    built.dmp(built.batch(number + 1, rank))  # without no_grad, and nobody asks for its gradient
    built.dmp.train()


def hook_rows_are_changed_rows(sharding: Sharding, rank: int, world: int) -> None:
    for seed in range(int(os.environ.get(MODELS, 1))):
        built = build_model(sharding, world, seed)
        shards = find_shards(built.dmp, [built.optimizer])
        recorder = Recorder(shards)
        handles = follow_lookups(built.dmp, recorder)
        for interval in range(3):
            before = {(p.table, p.row, p.column): copies(p) for p in pieces(built)}
            for step in range(1 + interval):
                built.step(built.batch(10 * interval + step, rank))
                evaluate(built, 1000 + 10 * interval + step, rank)
            for shard, piece in found_and_said(built):
                changed = changed_rows(before[piece.table, piece.row, piece.column], copies(piece))
                marked = set(recorder.bitmap.take(shard.name).tolist())
                if shard.is_replicated:
                    everywhere: list[set[int]] = [set()] * world
                    dist.all_gather_object(everywhere, marked)
                    marked = set().union(*everywhere)
                assert marked == changed, f"seed {seed}, {shard.name}, rows {shard.rows}: {marked} != {changed}"
                if shard.parameter is None:
                    assert recorder.pending[shard.name] == 0, (shard.name, recorder.pending)
        for handle in handles:
            handle.remove()


for _sharding in ALL_WAYS:

    def _property(rank: int, world: int, sharding: Sharding = _sharding) -> None:
        hook_rows_are_changed_rows(sharding, rank, world)

    CHECKS[f"hook_rows_are_changed_rows_{_sharding}"] = (_property, (1, 2, 4))


@check(1, 2, 4)
def shards_are_the_memory_of_the_state_dict(rank: int, world: int) -> None:
    for number, sharding in enumerate(WAYS[world]):
        built = build_model(sharding, world, number)
        built.step(built.batch(0, rank))
        for shard, piece in found_and_said(built):
            assert same_memory(shard.weight, piece.weight)
            slots = shard.slots()
            assert slots.keys() == piece.slots.keys()
            assert slots, "these optimizers have state"
            assert all(same_memory(slots[name], piece.slots[name]) for name in slots)
            rows, columns = (end - start for start, end in (shard.rows, shard.columns))
            assert shard.weight.shape == (rows, columns)
            assert all(tuple(slot.shape) in {(rows,), (rows, columns)} for slot in slots.values())
            whole = built.dmp.state_dict()[shard.table]
            assert tuple(whole.shape) == (shard.num_rows, shard.dim)
            assert shard.is_replicated == (not piece.is_sharded)
            assert (shard.parameter is None) == (shard.movement is not None)


def tracked(built: Built, **options: Any) -> tuple[RowTracker, list[LocalShard]]:
    """A row tracker that follows everything of a model, as the manager attaches it."""
    shards = find_shards(built.dmp, [built.optimizer])
    tracker = RowTracker(
        built.dmp.module,
        optimizers=plain_optimizers([built.optimizer]),
        shards=[watched_shard(shard) for shard in shards],
        on_bypass="raise",
        **options,
    )
    follow_lookups(built.dmp, tracker)
    return tracker, shards


@check(1, 2, 4)
def tracker_takes_changed_rows(rank: int, world: int) -> None:
    for seed, sharding in enumerate(WAYS[world]):
        built = build_model(sharding, world, 20 + seed)
        tracker, shards = tracked(built)
        for interval in range(3):
            before = {(p.table, p.row, p.column): copies(p) for p in pieces(built)}
            for step in range(interval):  # nothing at all in the first interval
                built.step(built.batch(10 * interval + step, rank))
                evaluate(built, 1000 + 10 * interval + step, rank)
            taken = tracker.take()
            assert taken.keys() == {shard.name for shard in shards}
            for shard, piece in found_and_said(built):
                changed = changed_rows(before[piece.table, piece.row, piece.column], copies(piece))
                # The gradient of a replicated table is that of all ranks, so each rank has the union.
                assert set(taken[shard.name].row_ids.tolist()) == changed, (seed, interval, shard.name)


@check(1, 2)
def rows_wait_for_the_update_that_writes_them(rank: int, world: int) -> None:
    built = build_model("mixed", world, 2)
    tracker, shards = tracked(built)
    names = {shard.name for shard in shards}
    stepped = {shard.name for shard in shards if shard.parameter is not None}
    assert names - stepped or rank
    built.optimizer.zero_grad()
    first = built.dmp(built.batch(0, rank))
    assert tracker.pending
    with pytest.raises(BadInput, match="wait"):
        tracker.take()
    first.backward()
    assert tracker.pending == sum(tracker._waiting()[name] for name in stepped)
    built.optimizer.step()
    assert tracker.at_step_boundary


@check(2)
def an_update_settles_only_its_own_forward(rank: int, world: int) -> None:
    built = build_model("row_wise", world, 1)
    tracker, _ = tracked(built)
    one, other = (built.dmp(built.batch(number, rank)) for number in range(2))
    other.backward()
    assert tracker.pending, "the first forward still waits"
    with pytest.raises(BadInput, match="wait"):
        tracker.take()
    one.backward()
    assert tracker.at_step_boundary
    kept = built.dmp(built.batch(2, rank))
    kept.backward(retain_graph=True)
    tracker.take()
    before = {(p.table, p.row, p.column): copies(p) for p in pieces(built)}
    kept.backward()  # the same graph writes once more
    taken = tracker.take()
    for shard, piece in found_and_said(built):
        changed = changed_rows(before[piece.table, piece.row, piece.column], copies(piece))
        assert set(taken[shard.name].row_ids.tolist()) == changed


@check(2)
def a_forward_that_is_dropped_holds_nothing_up(rank: int, world: int) -> None:
    built = build_model("row_wise", world, 3)
    tracker, _ = tracked(built)
    dropped = built.dmp(built.batch(0, rank))
    assert tracker.pending
    del dropped
    tracker.declare_boundary()
    assert tracker.at_step_boundary
    for number in range(10, 14):
        built.step(built.batch(number, rank))
    assert tracker.at_step_boundary
    before = {(p.table, p.row, p.column): copies(p) for p in pieces(built)}
    tracker.take()
    built.dmp.eval()
    built.dmp(built.batch(2, rank)).backward()  # in eval mode a fused optimizer writes all the same
    taken = tracker.take()
    for shard, piece in found_and_said(built):
        changed = changed_rows(before[piece.table, piece.row, piece.column], copies(piece))
        assert set(taken[shard.name].row_ids.tolist()) == changed, shard.name


@check(2)
def batches_in_flight_are_marked_again(rank: int, world: int) -> None:
    built = build_model("column_wise", world, 4)
    tracker, _ = tracked(built, in_flight="remark")
    waiting = built.dmp(built.batch(0, rank))
    rows: dict[str, set[int]] = {}
    before = {(p.table, p.row, p.column): copies(p) for p in pieces(built)}
    for number in range(1, 4):
        following = built.dmp(built.batch(number, rank))
        waiting.backward()
        waiting = following
        taken = tracker.take()
        for shard, piece in found_and_said(built):
            place = piece.table, piece.row, piece.column
            changed = changed_rows(before[place], copies(piece))
            assert changed <= set(taken[shard.name].row_ids.tolist()), (shard.name, number)
            before[place] = copies(piece)
        rows = {name: set(one.row_ids.tolist()) for name, one in taken.items()}
    assert rows


@check(1)
def fused_optimizers_move_the_rows_of_the_batch_only(rank: int, world: int) -> None:
    kinds: list[tuple[EmbOptimType, dict[str, Any]]] = [
        (EmbOptimType.EXACT_SGD, {}),
        (EmbOptimType.EXACT_ADAGRAD, {}),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {}),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2}),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.DECOUPLE}),
    ]
    for optimizer, options in kinds:
        built = build_model("row_wise", world, 0, optimizer=optimizer, **options)
        tracker, shards = tracked(built)
        assert all(shard.movement and shard.movement.rows is Movement.TOUCHED for shard in shards)
        for number in range(6):  # rows of earlier batches must not move on
            before = {(p.table, p.row, p.column): copies(p) for p in pieces(built)}
            built.step(built.batch(number, rank))
            taken = tracker.take()
            for shard, piece in found_and_said(built):
                changed = changed_rows(before[piece.table, piece.row, piece.column], copies(piece))
                assert set(taken[shard.name].row_ids.tolist()) == changed, (optimizer, options, shard.name)


@check(1)
def an_optimizer_that_rewrites_tables_needs_consent(rank: int, world: int) -> None:
    built = build_model("row_wise", world, 0, optimizer=EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD)
    with pytest.raises(BadInput, match="allow_dense"):
        tracked(built)


def put_state(source: Built, target: Built) -> None:
    """Copy everything from one model into another of the same sharding, through the live views."""
    ours = {shard.name: shard for shard in find_shards(source.dmp, [source.optimizer])}
    for shard in find_shards(target.dmp, [target.optimizer]):
        other = ours[shard.name]
        shard.weight.copy_(other.weight)
        theirs = other.slots()
        for name, slot in shard.slots().items():
            slot.copy_(theirs[name])
        shard.put_scalars(json.loads(json.dumps({k: float(v) for k, v in other.scalars().items()})))


def copy_dense(source: Built, target: Built) -> None:
    """Copy what is no table: parameters and the state of their optimizer."""
    ours, theirs = (dict(one.dmp.module.named_parameters()) for one in (source, target))
    for name in sorted(name for name in ours if not name.startswith("sparse.")):
        theirs[name].data.copy_(ours[name].data)
        state = target.dense._optimizer.state[theirs[name]]
        for key, value in source.dense._optimizer.state[ours[name]].items():
            state[key].copy_(value)


@check(1, 2, 4)
def a_model_filled_through_the_views_trains_on_bit_for_bit(rank: int, world: int) -> None:
    for seed, sharding in enumerate(WAYS[world]):
        first, second = (build_model(sharding, world, 30 + seed) for _ in range(2))
        for number in range(3):
            first.step(first.batch(number, rank))
            second.step(second.batch(50 + number, rank))  # goes another way
        copy_dense(first, second)
        for shard in find_shards(second.dmp, [second.optimizer]):
            shard.weight.fill_(7.0)
        with torch.no_grad():
            lost = second.dmp(second.batch(8, rank))
            assert not torch.equal(lost, first.dmp(first.batch(8, rank))), "the next forward reads what was written"
        put_state(first, second)
        for number in range(60, 63):
            first.step(first.batch(number, rank))
            second.step(second.batch(number, rank))
        for one, other in zip(pieces(first), pieces(second), strict=True):
            assert torch.equal(one.weight, other.weight), one.table
            assert all(torch.equal(one.slots[name], other.slots[name]) for name in one.slots), one.table
        for mine, yours in zip(find_shards(first.dmp), find_shards(second.dmp), strict=True):
            assert mine.scalars() == yours.scalars()


@check(1)
def counters_and_learning_rate_go_back(rank: int, world: int) -> None:
    built = build_model("row_wise", world, 0)
    for number in range(3):
        built.step(built.batch(number, rank))
    shard = find_shards(built.dmp)[0]
    assert shard.scalars()["iter"] == 3
    assert abs(shard.scalars()["learning_rate"] - 0.1) < 1e-6
    shard.put_scalars({"iter": 40, "learning_rate": 0.25, "unheard_of": 1})
    kernels = [holder.emb_module for lookup in find_sharded(built.dmp).lookups for holder in lookup.module._emb_modules]
    assert 40 in [int(kernel.iter_cpu) for kernel in kernels], "what Adam's bias correction counts with"
    built.step(built.batch(9, rank))
    assert shard.scalars() == {"iter": 41, "learning_rate": 0.25}, shard.scalars()


@check(1)
def wrapped_optimizers_show_the_plain_ones_inside(rank: int, world: int) -> None:
    built = build_model("mixed", world, 0)
    inner = built.dense._optimizer
    warm = WarmupOptimizer(built.dense, [WarmupStage()])
    assert plain_optimizers([built.optimizer]) == [inner]
    assert plain_optimizers([built.dense, built.dmp.fused_optimizer]) == [inner]
    assert plain_optimizers([CombinedOptimizer([built.dmp.fused_optimizer, warm]), built.dense]) == [inner]
    assert plain_optimizers([inner]) == [inner]


@check(2)
def torchrecs_own_tracker_works_beside(rank: int, world: int) -> None:
    alone, joint, ours_alone = (build_model("row_wise", world, 5) for _ in range(3))
    theirs = [ModelDeltaTrackerTrec(one.dmp._dmp_wrapped_module) for one in (alone, joint)]
    ours = [tracked(one)[0] for one in (joint, ours_alone)]
    for built in (alone, joint, ours_alone):
        built.step(built.batch(0, rank))
    said, said_too = (one.get_unique_ids() for one in theirs)
    assert any(len(ids) for ids in said.values())
    assert said.keys() == said_too.keys()
    assert all(torch.equal(said[table], said_too[table]) for table in said)
    taken, taken_too = (one.take() for one in ours)
    assert any(len(rows) for rows in taken.values())
    assert all(taken[name].row_ids.tolist() == taken_too[name].row_ids.tolist() for name in taken)


@check(1)
def hooks_that_are_removed_tell_nothing(rank: int, world: int) -> None:
    built = build_model("mixed", world, 0)
    recorder = Recorder(find_shards(built.dmp))
    for handle in follow_lookups(built.dmp, recorder):
        handle.remove()
    built.step(built.batch(0, rank))
    assert not recorder.bitmap.any()


@check(1)
def a_missing_private_name_is_told_with_the_version(rank: int, world: int) -> None:
    built = build_model("row_wise", world, 0)
    collection = built.dmp.module.sparse.pooled
    lookups = collection._lookups
    del collection._lookups
    with pytest.raises(Unsupported, match=f"torchrec {torchrec.__version__} has no '_lookups'"):
        find_shards(built.dmp)
    collection._lookups = lookups


@check(1)
def several_shards_behind_a_dense_kernel_are_refused(rank: int, world: int) -> None:
    table = TableSpec("t", 10, 8, ("f0",))
    bags = pooled([table])
    plan = construct_module_sharding_plan(
        bags,
        {"t": column_wise(ranks=[0, 0], compute_kernel="dense")},
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        nn.ModuleDict({"bags": bags}), device=torch.device("cpu"), plan=ShardingPlan({"bags": plan})
    )
    with pytest.raises(Unsupported, match=r"bags\.embedding_bags\.t\.weight.*several shards.*fused"):
        find_shards(dmp)


@check(1)
def unsharded_collections_are_plain_models(rank: int, world: int) -> None:
    model = Model(random_spec(6))
    assert find_shards(model) == []
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    tracker = RowTracker(model, optimizers=[optimizer], on_bypass="raise")
    names = {name for name in model.state_dict() if name.startswith("sparse.")}
    assert set(tracker.weights) == names
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(random_batch(random_spec(6), 1, rank=rank)).backward()
    optimizer.step()
    taken = tracker.take()
    for name in names:
        changed = changed_rows({"weight": before[name]}, {"weight": model.state_dict()[name]})
        assert set(taken[name].row_ids.tolist()) == changed


@check(1)
def unsharded_managed_collision_resumes(rank: int, world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        collisions.check(Path(folder))


@check(1)
def rows_are_found_by_raw_id(rank: int, world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        collisions.check_raw_ids(Path(folder))


TOP_K_TABLES = (TableSpec("t0", 30, 8, ("f0",)), TableSpec("t1", 20, 16, ("f1",)), TableSpec("t2", 9, 16, ("f0",)))


def sharded_bags(codecs: Any, world: int, group: dist.ProcessGroup) -> tuple[nn.Module, nn.Module]:
    """A collection whose tables are on one rank each, or on two by columns; the same without shards."""
    generator = torch.Generator().manual_seed(3)
    whole = pooled(TOP_K_TABLES)
    for parameter in whole.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    ways = {
        "t0": table_wise(0, compute_kernel="fused"),
        "t1": table_wise(world - 1, compute_kernel="fused"),
        "t2": column_wise([0, world - 1], compute_kernel="fused"),
    }
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused, qcomm_codecs_registry=codecs)
    plan = construct_module_sharding_plan(
        whole, ways, local_size=world, world_size=world, device_type="cpu", sharder=sharder
    )
    sharded = DistributedModelParallel(
        nn.ModuleDict({"bags": pooled(TOP_K_TABLES)}), env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"), plan=ShardingPlan({"bags": plan}), sharders=[sharder],
    ).module["bags"]  # fmt: skip
    for shard, part in parts_of_shards(sharded, dict(whole.named_parameters())):
        shard.copy_(part)
    return sharded, whole


def parts_of_shards(
    sharded: nn.Module, whole: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each shard of this rank beside the same part of the whole table."""
    for name, table in sharded.state_dict().items():
        for shard in table.local_shards():
            row, column = shard.metadata.shard_offsets
            rows, columns = shard.tensor.shape
            yield shard.tensor, whole[name].detach()[row : row + rows, column : column + columns]


@check(2, 4)
def only_the_largest_pooled_values_are_exchanged(rank: int, world: int) -> None:
    width, dim = sum(table.dim for table in TOP_K_TABLES), 8
    batch = random_batch(ModelSpec({"bags": TOP_K_TABLES}, ("f0", "f1")), 5, rank=rank)
    upstream = torch.randn(4, width, generator=torch.Generator().manual_seed(rank))
    pushed = {}
    for keep, mode in ((1.0, "own"), (0.25, "own"), (0.25, "whole"), (None, "own")):
        layer = TopKActivations(keep or 1.0, mode)
        meter = Meter()
        sharded, whole = sharded_bags(top_k_codecs(layer, dim) if keep else None, world, meter.group())
        reference, found = whole(batch), sharded(batch)
        outputs = torch.cat([found[key] for key in reference.keys()], dim=1)  # noqa: SIM118
        meter.reset()
        expected = layer(reference.values().view(-1, dim)).view(-1, width)
        torch.testing.assert_close(outputs, expected)
        outputs.backward(upstream)
        expected.backward(upstream)
        pushed[keep, mode] = meter.by_collective["all_to_all"].pushed_bytes
        trained = {}
        for name, parameter in whole.named_parameters():
            dist.all_reduce(parameter.grad)
            trained[name] = parameter - 0.5 * parameter.grad / world
        for shard, part in parts_of_shards(sharded, trained):
            torch.testing.assert_close(shard, part)
    dense = pushed[None, "own"]
    assert pushed[1.0, "own"] * 4 == dense * 5  # 5 bytes for each of all values
    assert pushed[0.25, "own"] * 16 == dense * 5
    assert pushed[0.25, "whole"] == dense


@check(1)
def codecs_of_largest_values_refuse_what_they_cannot_do(rank: int, world: int) -> None:
    with pytest.raises(BadInput, match="use 'own' or 'whole'"):
        top_k_codecs(TopKActivations(0.5, "mask"), 8)
    (codecs,) = top_k_codecs(TopKActivations(0.5), 8).values()
    with pytest.raises(BadShape, match="dim=8 must divide"):
        codecs.forward.padded_size(torch.zeros(2, 8), [8, 12], 0, None)


def main(rank: int, world: int, rendezvous: str, result: str) -> None:
    warnings.simplefilter("ignore")  # TorchRec uses what torch calls deprecated
    warnings.filterwarnings("error", module="cnr_store")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=dt.timedelta(seconds=60),
    )
    mine = {name: function for name, (function, worlds) in CHECKS.items() if world in worlds}
    problems = dict.fromkeys(mine, "not run: an earlier check failed")
    try:
        for name, function in mine.items():
            function(rank, world)
            problems[name] = ""
    except Exception:  # noqa: BLE001 - whatever it is, it is the result
        problems[name] = f"rank {rank} of {world}:\n{traceback.format_exc()}"
    Path(result).write_text(json.dumps(problems))
    if problems[name]:
        os._exit(0)  # the other ranks may wait in a collective act: they see at once that this one is gone
    dist.destroy_process_group()
