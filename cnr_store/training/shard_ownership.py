"""Which shards of the model's tables this rank has, which of them it saves, and as which rectangles of the store.

A table that every rank has a copy of is saved by one rank, its owner, which also keeps the code mirror. Owners are
chosen so that all ranks write about the same number of elements. They do not change while the training runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cnr_store.errors import BadInput
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.segment.shards import Placement, Shard, assign_owners
from cnr_store.training.shards import LocalShard, find_shards, whole_shard
from cnr_store.training.state import StatePlan, table_parameters
from cnr_store.training.tensors import table_dtype_name
from cnr_store.types import Rectangle


@dataclass(frozen=True, slots=True, eq=False)
class RankShard:
    """One shard on this rank. ``is_owner``: this rank saves it, and has its mirror."""

    shard: LocalShard
    key: Shard
    is_owner: bool

    @property
    def table(self) -> str:
        """The table's name."""
        return self.shard.table

    @property
    def rectangle(self) -> Rectangle:
        """The shard's place in the table."""
        return Rectangle(self.shard.rows, self.shard.columns)


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """All shards of this rank.

    Attributes
    ----------
    by_name
        `LocalShard.name` to the shard; names are this rank's own.
    tables
        Table to its shape, over all ranks.
    replicated
        Tables that several ranks have copies of, sorted; the same on every rank.
    placement
        The rectangles that this rank's writer saves; None if it has every table whole.
    """

    by_name: Mapping[str, RankShard]
    tables: Mapping[str, tuple[int, int]]
    replicated: tuple[str, ...]
    placement: Placement | None

    @property
    def owned(self) -> dict[str, RankShard]:
        """The shards that this rank saves, by name."""
        return {name: holding for name, holding in self.by_name.items() if holding.is_owner}

    @property
    def shards(self) -> tuple[LocalShard, ...]:
        """Every shard on this rank."""
        return tuple(holding.shard for holding in self.by_name.values())


def find_local_shards(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], declared: Sequence[str], ranks: Ranks
) -> tuple[dict[str, nn.Parameter], list[LocalShard]]:
    """Return the plain tables of a model by name, and every shard on this rank: those tables and sharded ones.

    Raises
    ------
    TableNotFound, BadDtype, Unsupported
    """
    plain = table_parameters(model, declared)
    several = ranks.world > 1
    shards = [whole_shard(name, table, optimizers, is_replicated=several) for name, table in plain.items()]
    shards += find_shards(model, optimizers)
    for shard in shards:
        table_dtype_name(shard.weight, shard.table)
    return plain, shards


def hold(shards: Sequence[LocalShard], ranks: Ranks) -> Holdings:
    """Agree with all ranks on the owner of each shard, and return this rank's shards. Blocks; all ranks call it.

    Raises
    ------
    BadInput
        Copies of a table have different shapes.
    """
    answers = together(ranks, lambda: [_described(shard) for shard in shards])
    known = [[_ShardInfo(**item) for item in answer] for answer in answers]
    shapes: dict[str, tuple[int, int]] = {}
    copies: dict[str, list[int]] = {}
    loads = [0] * ranks.world
    for rank, items in enumerate(known):
        for item in items:
            if shapes.setdefault(item.table, (item.num_rows, item.dim)) != (item.num_rows, item.dim):
                raise BadInput(
                    f"table {item.table!r} is {(item.num_rows, item.dim)} on rank {rank}, {shapes[item.table]} on a "
                    "rank before; every rank must build the same model",
                    table=item.table, expected=shapes[item.table], found=(item.num_rows, item.dim),
                )  # fmt: skip
            if item.is_replicated:
                copies.setdefault(item.table, []).append(rank)
            else:
                loads[rank] += item.elements
    owners = _owners(shapes, copies, loads)
    needs_place = ranks.world > 1 or not all(shard.is_whole for shard in shards)
    held: dict[str, RankShard] = {}
    for shard in shards:
        rectangle = Rectangle(shard.rows, shard.columns)
        is_owner = not shard.is_replicated or owners[shard.table] == ranks.rank
        held[shard.name] = RankShard(shard, Shard(shard.table, rectangle if needs_place else None), is_owner)
    placement: dict[str, list[Rectangle]] = {}
    for holding in held.values():
        if holding.is_owner:
            placement.setdefault(holding.table, []).append(holding.rectangle)
    replicated = tuple(sorted(table for table, holders in copies.items() if len(holders) > 1))
    return Holdings(held, dict(sorted(shapes.items())), replicated, placement if needs_place else None)


def check_alike(plan: Callable[[], StatePlan], optimizers: Sequence[torch.optim.Optimizer], ranks: Ranks) -> None:
    """Return if all ranks have the dense tensors and optimizers of rank 0, which saves them. Blocks; all ranks call it.

    Raises
    ------
    BadInput
        Names the first difference; or what ``plan`` raised on a rank.
    """
    answers = together(
        ranks,
        lambda: {
            "dense tensors": {name: list(tensor.shape) for name, tensor in plan().dense.items()},
            "optimizers": {
                str(number): [type(optimizer).__name__, len(optimizer.param_groups)]
                for number, optimizer in enumerate(optimizers)
            },
        },
    )
    for rank, answer in enumerate(answers):
        for what, given in answer.items():
            expected = answers[0][what]
            differ = sorted(name for name in given.keys() | expected.keys() if given.get(name) != expected.get(name))
            if differ:
                raise BadInput(
                    f"rank {rank} has other {what} than rank 0, which saves them for all: {differ[0]!r} is "
                    f"{given.get(differ[0], 'not there')}, on rank 0 {expected.get(differ[0], 'not there')}; only "
                    "tables may be on some ranks alone",
                    expected=expected.get(differ[0]), found=given.get(differ[0]),
                )  # fmt: skip


def _owners(
    shapes: Mapping[str, tuple[int, int]], copies: Mapping[str, Sequence[int]], loads: Sequence[int]
) -> dict[str, int]:
    """Return the rank that saves each replicated table: the least loaded one if all ranks have it, else the lowest."""
    world = len(loads)
    everywhere = {table: math.prod(shapes[table]) for table, holders in copies.items() if len(holders) == world}
    # The sharded tables that a rank saves count as one more table, which it already owns.
    anyway = {f"\0rank {rank}": rank for rank in range(world)}
    sizes = everywhere | {name: loads[rank] for name, rank in anyway.items()}
    owners = assign_owners(sizes, world, anyway)
    return {table: owners[table] if table in everywhere else min(holders) for table, holders in copies.items()}


@dataclass(frozen=True, slots=True)
class _ShardInfo:
    """What other ranks need to know of a shard."""

    table: str
    num_rows: int
    dim: int
    elements: int
    is_replicated: bool


def _described(shard: LocalShard) -> dict[str, Any]:
    elements = (shard.rows[1] - shard.rows[0]) * (shard.columns[1] - shard.columns[0])
    return {
        "table": shard.table, "num_rows": shard.num_rows, "dim": shard.dim, "elements": elements,
        "is_replicated": shard.is_replicated,
    }  # fmt: skip
