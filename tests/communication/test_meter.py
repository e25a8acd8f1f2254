"""A metered group counts the bytes of every collective, and changes nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cnr_store.communication import Meter
from tests.communication.conftest import RunRanks

N = 8
"""Floats of a tensor: 32 bytes."""


def _calls(group: dist.ProcessGroup) -> dict[str, Any]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    one = torch.full((N,), float(rank + 1))
    parts = [one.clone() for _ in range(world)]
    lists = [torch.empty(N) for _ in range(world)]

    def fresh() -> torch.Tensor:
        return torch.empty(N)

    def uneven() -> None:  # rank r sends 1 float to itself and 3 to each other rank
        sizes = [1 if other == rank else 3 for other in range(world)]
        dist.all_to_all_single(torch.empty(sum(sizes)), torch.ones(sum(sizes)), sizes, sizes, group=group)

    def point_to_point() -> None:
        if rank < 2:
            dist.send(one, 1, group=group) if rank == 0 else dist.recv(fresh(), 0, group=group)

    at_root = rank == 0
    return {
        "all_reduce": lambda: dist.all_reduce(one.clone(), group=group),
        "all_gather": lambda: dist.all_gather(lists, one, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(N * world), one, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(fresh(), parts, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(N // world), one, group=group),
        "all_to_all": lambda: dist.all_to_all(lists, parts, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(fresh(), one, group=group),
        "all_to_all_uneven": uneven,
        "broadcast": lambda: dist.broadcast(one.clone(), 0, group=group),
        "reduce": lambda: dist.reduce(one.clone(), 0, group=group),
        "gather": lambda: dist.gather(one, lists if at_root else None, 0, group=group),
        "scatter": lambda: dist.scatter(fresh(), parts if at_root else None, 0, group=group),
        "send": point_to_point,
        "barrier": lambda: dist.barrier(group=group),
        "functional all_reduce": lambda: functional.all_reduce(one, "sum", group).sum(),
        "functional all_gather": lambda: functional.all_gather_tensor(one, 0, group).sum(),
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(one, "sum", 0, group).sum(),
        "functional all_to_all": lambda: functional.all_to_all_single(one, None, None, group).sum(),
    }


def count_each() -> dict[str, list[int]]:
    meter = Meter()
    found = {}
    for name, call in _calls(meter.group()).items():
        meter.reset()
        call()
        total = meter.total
        found[name] = [total.calls, total.pushed_bytes, total.received_bytes]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_each_collective_is_counted_once_with_its_bytes(run_ranks: RunRanks, world: int) -> None:
    found = run_ranks(world, count_each)

    size, others = 4 * N, world - 1
    reduced = [1, size, 2 * size * others // world]
    gathered = [1, size, size * others]
    share = [1, size, size * others // world]
    exchanged = [1, size * others // world, size * others // world]
    for rank, counts in enumerate(found):
        root = rank == 0
        assert counts == {
            "all_reduce": reduced,
            "all_gather": gathered,
            "all_gather_into_tensor": gathered,
            "reduce_scatter": [1, size * world, size * others],
            "reduce_scatter_tensor": share,
            "all_to_all": [1, size * others, size * others],
            "all_to_all_single": exchanged,
            "all_to_all_uneven": [1, 12 * others, 12 * others],
            "broadcast": [1, size, 0] if root else [1, 0, size],
            "reduce": [1, 0, size] if root else [1, size, 0],
            "gather": [1, 0, size * others] if root else [1, size, 0],
            "scatter": [1, size * others, 0] if root else [1, 0, size],
            "send": [1, size, 0] if root else [1, 0, size] if rank == 1 else [0, 0, 0],
            "barrier": [1, 0, 0],
            "functional all_reduce": reduced,
            "functional all_gather": gathered,
            "functional reduce_scatter": share,
            "functional all_to_all": exchanged,
        }


def train_with_ddp() -> list[Any]:
    meter = Meter()
    losses = []
    for group in (meter.group(), None):
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(10, 3), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank())
        meter.reset()
        losses.append([])
        for _ in range(3):
            loss = model(torch.randn(4, 10)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        if group is not None:
            counted = meter.by_collective["all_reduce"].pushed_bytes
    return [losses[0] == losses[1], counted]


def test_the_gradients_of_ddp_are_counted_and_stay_the_same(run_ranks: RunRanks) -> None:
    assert run_ranks(2, train_with_ddp) == [[True, 3 * 33 * 4]] * 2


def group_of_two() -> list[int]:
    pair = dist.new_group([1, 2], backend="gloo", use_local_synchronization=True) if dist.get_rank() in (1, 2) else None
    if pair is None:
        return []
    meter = Meter()
    value = torch.ones(1)
    dist.all_reduce(value, group=meter.group(pair))
    return [int(value), meter.total.pushed_bytes]


def test_a_group_of_some_ranks_is_counted_too(run_ranks: RunRanks) -> None:
    assert run_ranks(4, group_of_two) == [[], [2, 4], [2, 4], []]
