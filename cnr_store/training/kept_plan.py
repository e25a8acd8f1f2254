"""The plan of a training's state, kept from save to save while model and optimizers have the same objects.

Why this module exists: to go through the names, slots and step counters of a thousand tables takes longer than to copy
their rows, and a training hardly ever changes them. Whether they changed is found by comparing objects by identity, in
calls that take all tables at once. What cannot be compared so is planned anew for each save. Requests for the rows of
all tables are kept by the same rule (`OwnedTables`). Changes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, compress
from operator import attrgetter, is_, methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from cnr_store.errors import BadInput
from cnr_store.format.records import TableSchema
from cnr_store.training.shards import Holdings, RankShard, Slots
from cnr_store.training.state import (
    OtherState,
    StatePlan,
    live_slots,
    needs_new_schema,
    optimizer_tensor_name,
    other_state,
    plan_state,
    slot_documents,
)
from cnr_store.training.tensors import WEIGHT
from cnr_store.write.table_options import TableOptions
from cnr_store_gpu.bitmap import RowLists
from cnr_store_gpu.host_copies import RowRequests, TensorLists

_WALKS = ("named_parameters", "named_buffers", "named_modules", "state_dict")
"""Methods of a module that decide what its state is; where a class has its own, the plan is not kept."""

_HOOKS = tuple(attrgetter(name) for name in ("_state_dict_hooks", "_state_dict_pre_hooks"))
"""Hooks of a module that may leave buffers out of its state, of others at each call; with one the plan is not kept."""

_CHILDREN = attrgetter("_parameters", "_buffers", "_modules")
_KINDS = (attrgetter("dtype"), attrgetter("layout"), attrgetter("is_cpu"), torch.Tensor.dim, torch.Tensor.numel)
"""What decides how a slot is stored, in lists of numbers and singletons: shapes of thousands of tensors would set off
the garbage collector. A shape that changed in place, and has as many dimensions and elements, has other rows, which no
copy of rows takes."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalState:
    """What this rank has to save now; tensors are live.

    Attributes
    ----------
    state, slots, other
        Where each part belongs, the slots by name of the shard, and the rest of the optimizers' state.
    documents
        `slot_documents` of them.
    like
        The same object for states whose slots have the same names, and are the same tensors of the same kind. None:
        that is not known.
    """

    state: StatePlan
    slots: Mapping[str, Slots]
    other: OtherState
    documents: Mapping[str, Any]
    like: object = None


@dataclass(frozen=True, slots=True, eq=False)
class _Objects:
    """Objects to compare with others: ``same`` by identity, ``equal`` by their values."""

    same: Sequence[object]
    equal: Sequence[object]

    def are(self, known: _Objects | None) -> bool:
        """Whether ``known`` has the same objects and equal values, in one order."""
        if known is None or len(self.same) != len(known.same) or self.equal != known.equal:
            return False
        return all(map(is_, self.same, known.same))


def _structure(modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> _Objects:
    """What `plan_state` reads: names and objects of parameters, buffers and modules, and the parameter groups."""
    all_own = [*chain.from_iterable(map(_CHILDREN, modules))]
    own_lengths = [*map(len, all_own)]
    own = [*compress(all_own, own_lengths)]
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    values = chain(chain.from_iterable(map(methodcaller("values"), own)), chain.from_iterable(groups))
    buffered = compress(modules, own_lengths[1::3])
    unsaved = [frozenset(module._non_persistent_buffers_set) for module in buffered]
    lengths = [len(optimizer.param_groups) for optimizer in optimizers]
    return _Objects([*values], [[*chain.from_iterable(own)], own_lengths, [*map(len, groups)], unsaved, lengths])


class _StateEntries:
    """Every entry of the state of all optimizers, in order; ``values`` are live."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.outer = [optimizer.state for optimizer in optimizers]
        self.inner: list[Any] = [*chain.from_iterable(state.values() for state in self.outer)]
        self.values: list[Any] = [*chain.from_iterable(map(methodcaller("values"), self.inner))]

    def objects(self) -> _Objects:
        """What slots and other state are made of: parameters, names, tensors and their kind; of others the type."""
        types, tensors = [*map(type, self.values)], self.values
        if {*types} != {torch.Tensor}:
            tensors = [value for value in self.values if isinstance(value, torch.Tensor)]
        sizes = [*map(len, self.outer), *map(len, self.inner)]
        names, kinds = [*chain.from_iterable(self.inner)], [[*map(kind, tensors)] for kind in _KINDS]
        return _Objects([*chain.from_iterable(self.outer), *tensors], [names, sizes, kinds, types])

    def positions(self) -> dict[tuple[int, str], int] | None:
        """Return the position of each entry by (id of the parameter, key); None if one may not stand for another.

        Entries are found again by their position as long as `objects` are the same. Of subclasses of tensors and of
        sparse ones slots are no entries, but views.
        """
        tensors = [value for value in self.values if isinstance(value, torch.Tensor)]
        if not all(type(one) is torch.Tensor and one.layout is torch.strided for one in tensors):
            return None
        if not all(isinstance(one, dict) for one in self.inner):
            return None
        keys = [(id(owner), key) for state in self.outer for owner, inner in state.items() for key in inner]
        found = {key: position for position, key in enumerate(keys)}
        return found if len(found) == len(keys) else None


def are_counters(values: Sequence[Any]) -> bool:
    """Return whether all are plain tensors on the host of one number each, without a dimension, and of one dtype."""
    if {*map(type, values)} != {torch.Tensor}:
        return False
    kinds = {*map(attrgetter("dtype", "layout", "is_cpu", "ndim"), values)}
    return kinds == {(values[0].dtype, torch.strided, True, 0)}


@dataclass(slots=True, eq=False)
class Places:
    """Entries of shards or parameters: names, the keys of each, and the position of each entry of all."""

    names: Sequence[str]
    keys: Sequence[Sequence[str]]
    positions: Sequence[int]
    _starts: dict[str, tuple[int, Sequence[str]]] = field(default_factory=dict)
    _is_one_each: bool | None = None
    _are_counters: bool | None = None

    @classmethod
    def of(cls, found: Mapping[str, Mapping[str, int]]) -> Places:
        """Return the places of positions by name and key."""
        return cls([*found], [[*own] for own in found.values()], [at for own in found.values() for at in own.values()])

    def place(self, name: str) -> tuple[int, Sequence[str]]:
        """Return where the entries of a name begin among `positions`, and their keys; raises KeyError."""
        if not self._starts:
            starts = accumulate(map(len, self.keys), initial=0)
            self._starts.update(zip(self.names, zip(starts, self.keys), strict=True))  # noqa: B905 (a start more)
        return self._starts[name]

    def is_one_each(self) -> bool:
        """Whether each name has one entry, all under one key; told once."""
        if self._is_one_each is None:
            self._is_one_each = len({*map(tuple, self.keys)}) == 1 and len(self.keys[0]) == 1
        return self._is_one_each

    def are_counters(self, values: Sequence[Any]) -> bool:
        """Return `are_counters` of the entries; told once."""
        if self._are_counters is None:
            self._are_counters = are_counters(values)
        return self._are_counters


@dataclass(frozen=True, slots=True, eq=False)
class Entries(Mapping[str, dict[str, Any]]):
    """Entries of the optimizers' state by name and key, made where a name is looked up.

    Attributes
    ----------
    places
        Which they are. While these stay, so do the kinds of the entries.
    live
        Every entry of all optimizers.
    """

    places: Places
    live: Sequence[Any]

    def __getitem__(self, name: str) -> dict[str, Any]:
        start, keys = self.places.place(name)
        positions = self.places.positions[start : start + len(keys)]
        return {key: self.live[at] for key, at in zip(keys, positions, strict=True)}

    def __iter__(self) -> Iterator[str]:
        return iter(self.places.names)

    def __len__(self) -> int:
        return len(self.places.names)

    def all(self) -> list[Any]:
        """Return the entries of all names, one name after the other."""
        return [*map(self.live.__getitem__, self.places.positions)]


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What the state of the last save was made of, and where its entries stood; keeps no tensor alive."""

    same: Sequence[weakref.ref[Any]]
    equal: Sequence[object]
    plan: StatePlan
    slots: Places
    inline: Sequence[Places]
    dense: list[tuple[str, int]]
    documents: Mapping[str, Any]

    def is_made_of(self, plan: StatePlan, objects: _Objects) -> bool:
        """Whether another state would have its entries at the same positions."""
        return plan is self.plan and objects.are(_Objects([one() for one in self.same], self.equal))

    def state_of(self, values: Sequence[Any]) -> LocalState:
        """Return the state that has these entries."""
        inline = [Entries(places, values) for places in self.inline]
        other = OtherState(inline, {name: values[at] for name, at in self.dense})
        return LocalState(self.plan, Entries(self.slots, values), other, self.documents, self)


def _kept(local: LocalState, entries: _StateEntries, objects: _Objects) -> _Kept | None:
    """What to keep of a state; None if it has something that is no entry of an optimizer's state."""
    at, shards = entries.positions(), local.state.shards
    if at is None or any(shard.parameter is None for shard in shards.values()):
        return None  # what an optimizer that is fused into backward has is not seen here
    owners = [(one, id(one.parameter), local.other.inline[one.optimizer][one.name]) for one in local.state.optimized]
    slots = {name: {key: at[id(shards[name].parameter), key] for key in own} for name, own in local.slots.items()}
    inline: list[dict[str, dict[str, int]]] = [{} for _ in entries.outer]
    for one, owner, values in owners:
        inline[one.optimizer][one.name] = {key: at[owner, key] for key in values}
    dense = [
        (name, at[owner, key])
        for one, owner, _ in owners
        for key in entries.outer[one.optimizer].get(one.parameter, {})
        if (name := optimizer_tensor_name(one.optimizer, one.name, key)) in local.other.dense
    ]
    same = [*map(weakref.ref, objects.same)]
    places = [*map(Places.of, inline)]
    return _Kept(same, objects.equal, local.state, Places.of(slots), places, dense, local.documents)


@dataclass(slots=True, eq=False)
class KeptPlan:
    """Plans the state of one training. It keeps parameters and buffers of the last plan alive, no optimizer's state.

    Call it from one thread.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    holdings: Holdings
    _modules: list[nn.Module] = field(default_factory=list)
    _structure: _Objects | None = None
    _plan: StatePlan | None = None
    _kept: _Kept | None = None
    _judged: _Objects | None = None
    _anew: frozenset[str] = frozenset()

    def state_plan(self) -> StatePlan:
        """Return where each part of the state is now.

        Raises
        ------
        BadInput
            As `plan_state`; an embedding is new since the training was attached, or its weights are.
        """
        if self._plan is not None and self._is_as_before():
            return self._plan
        self._plan = self._structure = self._kept = None
        plan = plan_state(self.model, self.optimizers, self.holdings.shards, self.holdings.tables)
        self._modules = [*self.model.modules()]
        _refuse_new_tables(self._modules, plan)
        if all(_is_plain(kind) for kind in {*map(type, self._modules)}) and not _has_hooks(self._modules):
            self._structure, self._plan = _structure(self._modules, self.optimizers), plan
        return plan

    def _is_as_before(self) -> bool:
        modules = self._modules
        return not _has_hooks(modules) and _structure(modules, self.optimizers).are(self._structure)

    def local_state(self) -> LocalState:
        """Return what this rank has to save now; raises as `state_plan`."""
        plan, entries = self.state_plan(), _StateEntries(self.optimizers)
        objects = entries.objects()
        if self._kept is not None and self._kept.is_made_of(plan, objects):
            return self._kept.state_of(entries.values)
        slots = {name: live_slots(shard) for name, shard in plan.shards.items()}
        local = LocalState(plan, slots, other_state(plan, self.optimizers), slot_documents(plan.shards, slots))
        self._kept = _kept(local, entries, objects)
        return replace(local, like=self._kept)

    def tables_anew(
        self, local: LocalState, schemas: Mapping[str, TableSchema], options: Mapping[str, TableOptions]
    ) -> frozenset[str]:
        """Return the tables of this rank that `needs_new_schema` finds: new ones, and those stored in another way."""
        shards = local.state.shards
        dtypes = [(one.view if one.parameter is None else one.parameter).dtype for one in shards.values()]
        tables = [shard.table for shard in shards.values()]
        # By table, as the order of stored tables differs from save to save.
        judged = _Objects([local.documents, *map(schemas.get, tables), *map(options.get, tables)], [tables, dtypes])
        if not judged.are(self._judged):
            self._judged = judged
            self._anew = frozenset(
                shard.table
                for name, shard in shards.items()
                if needs_new_schema(schemas.get(shard.table), shard, local.slots[name], options[shard.table])
            )
        return self._anew


@dataclass(frozen=True, slots=True, eq=False)
class _Tensors:
    """The tensors of all tables, for states with the same ``like``.

    ``order``: of weights and slots behind them. ``weights``: where among all the weights are.
    """

    like: object
    lists: TensorLists
    order: list[int]
    weights: npt.NDArray[np.int64]


def _refuse_new_tables(modules: Sequence[nn.Module], plan: StatePlan) -> None:
    """Return if each embedding is a table: a new one would be saved as a dense tensor, one in place of it not at all.

    TorchRec has an empty one where another rank holds the table.
    """
    held = {id(shard.parameter) for shard in plan.shards.values()}
    weights = [one._parameters.get("weight") for one in modules if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
    strange = {id(one) for one in weights if one is not None and one.numel()} - held
    if found := sorted(name for name, one in modules[0].named_parameters() if id(one) in strange) if strange else []:
        raise BadInput(
            f"{found[:5]} ({len(found)} embeddings) were added to the model, or got other weights, after this manager "
            "was made, which follows the tables of that time; close it and make a new one, whose next save is a "
            "baseline of the live state",
            found=found,
        )  # fmt: skip


class OwnedTables:
    """Shards by name, which stay the same; ``owned``: as `Holdings.owned`."""

    def __init__(self, owned: Mapping[str, RankShard]) -> None:
        shards = [one.shard for one in owned.values()]
        self._names = [*owned]
        self._views = [one.view for one in shards]
        self._addresses = [one.view.data_ptr() for one in shards]
        self._strides = [one.view.stride() for one in shards]
        self._are_contiguous = np.array([one.view.is_contiguous() for one in shards], bool)
        self._parameters = [one.parameter for one in shards if one.parameter is not None and one.memory is None]
        self._begin_at_zero = not any(one.rows[0] for one in shards)
        self._tensors: _Tensors | None = None

    def are_in_place(self) -> bool:
        """Whether the weight of each is its view: told in a few calls of C for all, False says nothing of one alone."""
        held, views = self._parameters, self._views
        if len(held) < len(views):
            return False
        addresses = [*map(torch.Tensor.data_ptr, held)]
        if addresses != self._addresses:  # a storage may have been freed and allocated again
            self._addresses = [*map(torch.Tensor.data_ptr, views)]
        return addresses == self._addresses and [*map(torch.Tensor.stride, held)] == self._strides

    def requests(self, like: object, slots: Entries, rows: RowLists) -> RowRequests | None:
        """Return requests for the weights and slots of all tables, right after `are_in_place` was true.

        Parameters
        ----------
        like, slots
            Of a `LocalState`.
        rows
            What to copy of each table, by the name of its shard, counted from its first row.

        Returns
        -------
        RowRequests or None
            None where that has to be told table by table: shards begin within tables, or the rows are of others.
        """
        if not self._begin_at_zero or [*rows.tables] != self._names:
            return None
        if self._tensors is None or self._tensors.like is not like:
            self._tensors = self._listed(like, slots)
        kept = self._tensors
        tensors = [*map([*self._views, *slots.all()].__getitem__, kept.order)]
        addresses = np.zeros(len(tensors), np.int64)
        addresses[kept.weights] = np.array(self._addresses, np.int64) * self._are_contiguous
        return RowRequests(kept.lists, tensors, rows, addresses)

    def _listed(self, like: object, slots: Entries) -> _Tensors:
        names: list[str] = []
        lengths: list[int] = []
        order: list[int] = []
        for number, name in enumerate(self._names):
            start, keys = slots.places.place(name)
            names += (WEIGHT, *keys)
            lengths.append(1 + len(keys))
            first = len(self._views) + start
            order += (number, *range(first, first + len(keys)))
        return _Tensors(like, TensorLists(self._names, names, lengths), order, np.cumsum([0, *lengths[:-1]]))


def _is_plain(kind: type[nn.Module]) -> bool:
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _WALKS)


def _has_hooks(modules: Sequence[nn.Module]) -> bool:
    return any(any(map(hooks, modules)) for hooks in _HOOKS)
