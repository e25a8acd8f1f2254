"""One rank of the tests of TorchRec models: runs every check in one process group and writes what failed.

A process group of four takes seconds to start, so each rank runs all checks and the test file reports them one by
one::

    python -m tests.training.torchrec.worker RANK WORLD RENDEZVOUS_FILE RESULT_FILE
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

with warnings.catch_warnings():  # fbgemm's own modules warn while they are imported
    warnings.simplefilter("ignore")
    import torchrec  # noqa: F401

import torch
import torch.distributed as dist

from cnr_store.training.shards import LocalShard, find_shards, follow_lookups
from cnr_store_gpu import RowBitmap
from tests.training.torchrec.models import SHARDINGS, Built, Piece, Sharding, build_model, pieces

Check = Callable[[int, int], None]
CHECKS: dict[str, Check] = {}
SEEDS = {1: 3, 2: 3, 4: 2}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


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
    for seed in range(SEEDS[world]):
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


for _sharding in (*SHARDINGS, "table_row_wise"):

    def _property(rank: int, world: int, sharding: Sharding = _sharding) -> None:
        hook_rows_are_changed_rows(sharding, rank, world)

    CHECKS[f"hook_rows_are_changed_rows_{_sharding}"] = _property


@check
def shards_are_the_memory_of_the_state_dict(rank: int, world: int) -> None:
    for number, sharding in enumerate((*SHARDINGS, "table_row_wise")):
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
    problems = dict.fromkeys(CHECKS, "not run: an earlier check failed")
    try:
        for name, function in CHECKS.items():
            function(rank, world)
            problems[name] = ""
    except Exception:  # noqa: BLE001 - whatever it is, it is the result
        problems[name] = f"rank {rank} of {world}:\n{traceback.format_exc()}"
    Path(result).write_text(json.dumps(problems))
    if problems[name]:
        os._exit(0)  # the other ranks may wait in a collective act: they see at once that this one is gone
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
