"""The rectangles of tables on this rank, from any sharding library; which rank saves them; how lookups are tracked.

Why this module exists: a plain model has whole tables, a sharding library gives each rank rectangles of them, with
optimizers that have no ``step``. Saving and restoring know one record for both. Libraries that shard tables stand
behind the registry `register_library`, each in a module of its own that is loaded only when the caller uses that
library.

A table that every rank has a copy of is saved by one rank, its owner, which also keeps the code mirror. Owners are
chosen so that all ranks write about the same number of elements. They do not change while the training runs.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from cnr_store.communication import SplitTable
from cnr_store.errors import BadInput
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.segment.shards import Placement, Shard, assign_owners
from cnr_store.types import Rectangle
from cnr_store_gpu import RowMovement, RowTracker, WatchedShard, row_slots, scalar_state
from cnr_store_gpu.optimizers import inner_optimizer

Slots = dict[str, torch.Tensor]
Scalars = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """One rectangle of a table on this rank: live views, nothing is copied.

    Attributes
    ----------
    table
        Owner-qualified name of the table, as in the model's ``state_dict()``.
    index
        Number of this shard among the table's shards on this rank, in the order of (first row, first column).
    num_rows, dim
        Shape of the whole table.
    rows, columns
        The rectangle: first (inclusive) and last (exclusive) row and column.
    view
        What `weight` returned when the shard was found.
    is_replicated
        Every rank holds the whole table, and its updates are the same on all of them.
    parameter
        What an optimizer of the caller steps; None when the optimizer is fused into backward.
    movement
        What a fused optimizer changes besides the rows of the batch; None where `parameter` is set.
    slots
        Row state that exists now, live: ``(rows,)`` or ``(rows, columns)`` each, or the optimizer's own
        ``(rows, 1)``. The names do not depend on the sharding. Under column-wise sharding each shard has its own
        vector of a slot with one value per row, and they differ.
    scalars
        Other optimizer state as of now: numbers, and tensors of other shapes (those are live).
    put_scalars
        Writes values of `scalars` back, from this or another process; names that it does not know are left out.
        Shards that share a fused optimizer share its scalars.
    memory
        Returns the tensors that `view` and the row state are views of, as they are now; None if `parameter` has the
        rows itself.
    """

    table: str
    index: int
    num_rows: int
    dim: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    view: torch.Tensor
    is_replicated: bool
    parameter: torch.Tensor | None
    movement: RowMovement | None
    slots: Callable[[], Slots]
    scalars: Callable[[], Scalars]
    put_scalars: Callable[[Mapping[str, Any]], None]
    memory: Callable[[], Sequence[torch.Tensor]] | None = None

    @property
    def weight(self) -> torch.Tensor:
        """``(rows, columns)`` of the rectangle, in the memory that the training uses now: the next forward reads it."""
        now, known = self.parameter, self.view
        if now is None or self.memory is not None:
            return known
        # Equal addresses are the same memory: the view keeps its own from being given to others.
        if now.data_ptr() == known.data_ptr() and now.stride() == known.stride():
            return known
        return now.detach().as_subclass(torch.Tensor)

    @property
    def is_whole(self) -> bool:
        """Whether the rectangle is the table."""
        return self.rows == (0, self.num_rows) and self.columns == (0, self.dim)

    @property
    def name(self) -> str:
        """Name within this rank: the table's if it is whole, else with the number of the shard."""
        return self.table if self.is_whole else f"{self.table}#{self.index}"


def watched_shard(shard: LocalShard) -> WatchedShard:
    """Return a shard as a tracker watches it, under `LocalShard.name`."""
    weight = shard.weight if shard.parameter is None else shard.parameter
    return WatchedShard(shard.name, shard.rows[1] - shard.rows[0], weight, shard.movement, memory=shard.memory)


def whole_shard(
    table: str,
    parameter: torch.Tensor,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    weight: torch.Tensor | None = None,
    is_replicated: bool = False,
) -> LocalShard:
    """Return a table that this rank holds whole, as one parameter that one of the optimizers may step.

    Parameters
    ----------
    parameter
        ``(num_rows, dim)``, the object that the optimizer has.
    weight
        The same memory as a plain tensor; by default ``parameter.detach()``.
    """

    def owner() -> torch.optim.Optimizer | None:
        # Asked each time: a group may be added to an optimizer while training. Who has no state has no slots either.
        return next((one for one in optimizers if parameter in one.state), None)

    def slots() -> Slots:
        optimizer = owner()
        found = {} if optimizer is None else row_slots(optimizer, parameter)
        # Subclasses of Tensor pass on to the state that is made like them; their memory is what counts. A sparse
        # tensor has no such memory.
        return {
            name: slot if type(slot) is torch.Tensor or slot.is_sparse else slot.as_subclass(torch.Tensor)
            for name, slot in found.items()
        }

    def scalars() -> Scalars:
        optimizer = owner()
        return {} if optimizer is None else scalar_state(optimizer, parameter)

    def put_scalars(values: Mapping[str, Any]) -> None:
        optimizer = owner()
        if optimizer is None:
            return
        state = optimizer.state[parameter]
        for name, value in values.items():
            present = state.get(name)
            if isinstance(present, torch.Tensor):
                present.copy_(torch.as_tensor(value))
            elif name in state:
                state[name] = value

    num_rows, dim = parameter.shape
    live = parameter.detach().as_subclass(torch.Tensor) if weight is None else weight
    return LocalShard(
        table, 0, num_rows, dim, (0, num_rows), (0, dim), live, is_replicated, parameter, None, slots, scalars,
        put_scalars,
    )  # fmt: skip


class Handle(Protocol):
    """What undoes a registration, as torch's hooks return."""

    def remove(self) -> None:
        """Undo it."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardingLibrary:
    """How the tables of a library that shards models are found and followed.

    Attributes
    ----------
    find
        Returns the shards that this rank has of a model; empty if the model has none of this library.
    follow
        Makes the lookups of those shards report to a tracker, which watches them under `LocalShard.name`, until the
        returned handles are removed.
    unwrap
        Returns the plain optimizers inside an optimizer of the library, None if it is none of the library's.
    """

    find: Callable[[nn.Module, Sequence[torch.optim.Optimizer]], list[LocalShard]]
    follow: Callable[[nn.Module, RowTracker], list[Handle]]
    unwrap: Callable[[torch.optim.Optimizer], list[torch.optim.Optimizer] | None]


# Package of a library to the module that knows it; that module registers itself.
_KNOWN = {
    "torchrec": "cnr_store.integrations.torchrec",
}


def _find_split_tables(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[LocalShard]:
    """Find the rows that this rank has of tables that `SplitTable` splits among ranks."""
    found = []
    for owner, module in unwrapped(model).named_modules():
        if isinstance(module, SplitTable):
            shard = whole_shard(f"{owner}.weight" if owner else "weight", module.weight, optimizers)
            found.append(replace(shard, num_rows=module.num_rows, rows=module.rows))
    return found


# Lookups of split tables are not followed: the gradient that the optimizer steps by shows which rows change.
_SPLIT_TABLES = ShardingLibrary(_find_split_tables, follow=lambda _model, _tracker: [], unwrap=lambda _optimizer: None)
_REGISTERED: dict[str, ShardingLibrary] = {"cnr_store.communication": _SPLIT_TABLES}


def register_library(package: str, library: ShardingLibrary) -> None:
    """Make a sharding library known under its package name; a second registration replaces the first."""
    _REGISTERED[package] = library


def _libraries() -> list[ShardingLibrary]:
    for package, module in _KNOWN.items():
        # A model of a library that was never imported cannot exist, and importing one may take seconds.
        if package in sys.modules and package not in _REGISTERED:
            importlib.import_module(module)
    return list(_REGISTERED.values())


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile, whose names are the same on every rank."""
    while True:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
        inner = getattr(model, "_orig_mod", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def find_shards(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> list[LocalShard]:
    """Return the shards that this rank has of tables that a sharding library placed. Changes nothing.

    Tables of plain modules are not among them (an unsharded ``EmbeddingBagCollection`` is plain): ``plan_tables``
    finds those.

    Parameters
    ----------
    optimizers
        Those of the caller, wrapped or not: the slots of tables without a fused optimizer are found in them.

    Raises
    ------
    Unsupported
        A kernel or a version of the library that cannot be followed.
    """
    plain = plain_optimizers(optimizers)
    return [shard for library in _libraries() for shard in library.find(model, plain)]


def follow_lookups(model: nn.Module, tracker: RowTracker) -> list[Handle]:
    """Make the lookups of `find_shards`' shards report the rows that they read, until the handles are removed.

    The tracker has to watch each shard under its `LocalShard.name`. Own hooks: trackers of the library keep working.
    """
    return [handle for library in _libraries() for handle in library.follow(model, tracker)]


def plain_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers inside wrappers of other libraries, in order, each once; others as they are.

    Fused optimizers have no ``step`` of their own and are left out: their state belongs to the shards.

    Raises
    ------
    BadInput
        One is no torch optimizer, or a wrapper that cannot be followed.
    """
    found: list[torch.optim.Optimizer] = []
    for wrapped in optimizers:
        inner = next((inside for lib in _libraries() if (inside := lib.unwrap(wrapped)) is not None), None)
        inner = [inner_optimizer(wrapped)] if inner is None else inner
        found += [one for one in inner if all(one is not other for other in found)]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class RankShard:
    """One shard on this rank. ``is_owner``: this rank saves it, and has its mirror."""

    shard: LocalShard
    key: Shard
    is_owner: bool

    @property
    def rectangle(self) -> Rectangle:
        """The shard's place in the table."""
        return Rectangle(self.shard.rows, self.shard.columns)


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """All shards of this rank.

    Attributes
    ----------
    by_name, owned
        `LocalShard.name` to the shard, and of those that this rank saves; names are this rank's own.
    keys
        What the writer calls the owned ones.
    tables
        Table to its shape, over all ranks.
    replicated
        Tables that several ranks have copies of, sorted; the same on every rank.
    placement
        The rectangles that this rank's writer saves; None if it has every table whole.
    """

    by_name: Mapping[str, RankShard]
    owned: Mapping[str, RankShard]
    keys: Mapping[str, Shard]
    tables: Mapping[str, tuple[int, int]]
    replicated: tuple[str, ...]
    placement: Placement | None

    @property
    def shards(self) -> tuple[LocalShard, ...]:
        """Every shard on this rank."""
        return tuple(holding.shard for holding in self.by_name.values())


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
    owned = {name: holding for name, holding in held.items() if holding.is_owner}
    placement: dict[str, list[Rectangle]] = {}
    for holding in owned.values():
        placement.setdefault(holding.key.table, []).append(holding.rectangle)
    replicated = tuple(sorted(table for table, holders in copies.items() if len(holders) > 1))
    keys = {name: holding.key for name, holding in owned.items()}
    return Holdings(held, owned, keys, dict(sorted(shapes.items())), replicated, placement if needs_place else None)


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
