"""Plans which parts of a checkpoint are restored to which live tensors, or raises an error that names the difference.

Pure: it reads nothing from the store and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import msgspec
import torch

from cnr_store.errors import BadDtype, BadInput, BadShape, CorruptStore
from cnr_store.format.records import DenseEntry, SlotSchema, TableSchema
from cnr_store.runtime.arguments import some_of
from cnr_store.segment.shards import Shard
from cnr_store.training.document import TRAINER, OptimizerDocument, SlotDocument, TrainerDocument
from cnr_store.training.shards import Holdings, LocalShard, RankShard
from cnr_store.training.state import Optimized, StatePlan, live_slots, optimizer_tensor_name, other_state
from cnr_store.training.tensors import table_dtype_name
from cnr_store.types import Rectangle
from cnr_store_gpu.memory import check_held

Resize = Literal["fill", "model"]
"""Content of rows that only the live table has: the stored table's fill value, or the model's present values."""

_OF_SCHEDULERS = frozenset(("base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr"))
"""Options that torch's schedulers add to an optimizer's groups: they say nothing of its class."""

_OTHER_NAME = "to restore the rest, give it another name in the model and pass strict=False"


@dataclass(frozen=True, slots=True, eq=False)
class ShardRestore:
    """One shard of a stored table and the live shard that it is restored to.

    ``slots``: stored schema, shape on this rank, and layout of each slot to fill.
    """

    stored: str
    holding: RankShard
    schema: TableSchema
    owner: Optimized | None
    slots: dict[str, tuple[SlotSchema, tuple[int, ...], str]]

    @property
    def shard(self) -> LocalShard:
        """The live shard."""
        return self.holding.shard

    @property
    def key(self) -> Shard:
        """The shard under the table's stored name, without rows that the stored table does not have."""
        return Shard(self.stored, None if self.holding.key.rectangle is None else self.rectangle)

    @property
    def num_stored(self) -> int:
        """How many of the shard's rows, from its first, the stored table has."""
        first, stop = self.shard.rows
        return max(0, min(stop, self.schema.num_rows) - first)

    @property
    def rectangle(self) -> Rectangle:
        """The rectangle of the stored table that is read into the shard."""
        first = min(self.shard.rows[0], self.schema.num_rows)
        return Rectangle((first, first + self.num_stored), self.shard.columns)


@dataclass(frozen=True, slots=True, eq=False)
class RestorePlan:
    """What a restore does.

    Attributes
    ----------
    shards
        Shards of tables with their slots.
    fused
        Shards, and the state besides slots that their fused optimizers get back.
    dense
        Stored dense tensors to the model's parameters and buffers.
    optimizer_dense
        Stored dense tensors to (parameter, key) of optimizer state.
    optimizer_documents
        Per optimizer its stored document, None if it does not fit (only without ``strict``).
    renamed
        My name to the stored name of each table that is restored.
    missing, unexpected
        Names that only the model has, and names that only the checkpoint has (only without ``strict``): tables, dense
        tensors, ``optimizer/<number>``, and ``<table>/<slot>``. Sorted.
    """

    shards: tuple[ShardRestore, ...]
    fused: tuple[tuple[LocalShard, dict[str, Any]], ...]
    dense: dict[str, torch.Tensor]
    optimizer_dense: dict[str, tuple[Optimized, str]]
    optimizer_documents: tuple[OptimizerDocument | None, ...]
    renamed: dict[str, str]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def resized(self) -> dict[str, int]:
        """Tables that have more rows than the stored ones, and how many those have."""
        return {
            one.holding.key.table: one.schema.num_rows
            for one in self.shards
            if one.shard.num_rows > one.schema.num_rows
        }


def without_optimizers(
    schemas: Mapping[str, TableSchema], dense: Mapping[str, DenseEntry]
) -> tuple[dict[str, TableSchema], dict[str, DenseEntry]]:
    """Return tables and dense tensors of a checkpoint without the state of its optimizers."""
    prefix = optimizer_tensor_name(0, "", "").partition("/")[0] + "/"
    return (
        {name: msgspec.structs.replace(schema, slots={}) for name, schema in schemas.items()},
        {name: entry for name, entry in dense.items() if not name.startswith(prefix)},
    )


def plan_restore(
    schemas: Mapping[str, TableSchema],
    stored_dense: Mapping[str, DenseEntry],
    trainer: TrainerDocument | None,
    plan: StatePlan,
    holdings: Holdings,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    name_map: Mapping[str, str] | None = None,
    strict: bool = True,
    resize: Resize | None = None,
) -> RestorePlan:
    """Return the plan of a restore.

    Parameters
    ----------
    trainer
        The documents ``trainer/0`` and ``progress/0``; None if the checkpoint was not written by a trainer.
    name_map
        Stored table name to mine; others keep their names.
    strict
        Raise if a table, dense tensor, slot or optimizer is missing on either side; else restore what both have.
    resize
        Accept tables that have more rows than the stored ones.

    Raises
    ------
    BadInput, BadShape, BadDtype
        Also where nothing would be restored.
    CorruptStore
        The document gives a slot a shape that its table does not have.
    """
    if strict:
        _refuse_other_roles(stored_dense.keys() & holdings.tables.keys(), schemas.keys() & plan.dense.keys())
    names = _names(schemas, holdings.tables, name_map or {}, strict)
    documents = _match_optimizers(trainer, optimizers, plan, schemas, strict)
    layouts = {} if trainer is None else trainer.slots
    held = [
        (stored, holding)
        for stored, mine in names.items()
        for holding in holdings.by_name.values()
        if holding.key.table == mine
    ]
    shards = tuple(
        _plan_shard(schemas[stored], stored, holding, plan, documents, layouts.get(stored, {}), strict, resize)
        for stored, holding in held
    )
    fused = tuple(
        (holding.shard, trainer.fused[stored])
        for stored, holding in held
        if trainer is not None and holding.shard.parameter is None and stored in trainer.fused
    )
    wanted = plan.dense | other_state(plan, optimizers).dense
    dense = {name: plan.dense[name] for name in stored_dense if name in plan.dense}
    for name, tensor in dense.items():
        _check_dense(name, stored_dense[name], tensor)
    if (schemas or stored_dense) and not names and not dense:
        raise BadInput(
            f"nothing of the checkpoint fits this model: it has tables {some_of(schemas)} and dense tensors "
            f"{some_of(stored_dense)}, the model has tables {some_of(holdings.tables)} and dense tensors "
            f"{some_of(plan.dense)}; map tables with tables={{stored: mine}}",
            expected=sorted(schemas), found=sorted(holdings.tables),
        )  # fmt: skip
    state = _plan_optimizer_dense(stored_dense, plan, documents, names, _places(trainer))
    missing = sorted(name for name in plan.dense if name not in stored_dense)
    known = plan.dense.keys() | state.keys() | wanted.keys() | plan.second_names
    extra = sorted(name for name in stored_dense if name not in known)
    if strict:
        _refuse_unmatched("dense tensors", missing, extra)
    renamed = {mine: stored for stored, mine in names.items()}
    missing += [table for table in holdings.tables if table not in renamed]
    extra += [stored for stored in schemas if stored not in names]
    missing += [f"optimizer/{number}" for number, document in enumerate(documents) if document is None]
    kept = {number for number, document in enumerate(documents) if document is not None}
    stored_optimizers = () if trainer is None else trainer.optimizers
    extra += [f"optimizer/{number}" for number in range(len(stored_optimizers)) if number not in kept]
    for one in shards:
        missing += [f"{one.holding.key.table}/{slot}" for slot in live_slots(one.shard).keys() - one.slots.keys()]
        extra += [f"{one.stored}/{slot}" for slot in one.schema.slots.keys() - one.slots.keys()]
    return RestorePlan(
        shards, fused, dense, state, documents, renamed,
        () if strict else tuple(sorted(set(missing))), () if strict else tuple(sorted(set(extra))),
    )  # fmt: skip


def _names(
    schemas: Mapping[str, TableSchema], tables: Collection[str], name_map: Mapping[str, str], strict: bool
) -> dict[str, str]:
    for stored, mine in name_map.items():
        if stored not in schemas:
            raise BadInput(
                f"tables= names stored table {stored!r}, the store has {some_of(schemas, stored)}", table=stored
            )
        if mine not in tables:
            raise BadInput(f"tables= names {mine!r}, the model has tables {some_of(tables, mine)}", table=mine)
    names = {stored: name_map.get(stored, stored) for stored in schemas}
    matched = {stored: mine for stored, mine in names.items() if mine in tables}
    if len(set(matched.values())) < len(matched):
        raise BadInput(f"two stored tables would go to one of mine: {matched}; check tables=", found=matched)
    if strict:
        missing = sorted(set(tables) - set(matched.values()))
        extra = sorted(set(schemas) - set(matched))
        _refuse_unmatched("tables", missing, extra)
    return matched


def _refuse_other_roles(now_tables: Collection[str], now_dense: Collection[str]) -> None:
    for names, was, now in ((now_tables, "dense tensors", "tables"), (now_dense, "tables", "dense tensors")):
        if names:
            raise BadInput(
                f"{some_of(names)} are {was} in the checkpoint and {now} here: give PrecisionPolicy(dense=, "
                "dense_above_bytes=) and TrackingOptions(tables=) as the training did that saved, or import them as "
                f"{now} (--table); with strict=False they are not restored",
                found=sorted(names),
            )  # fmt: skip


def _refuse_unmatched(what: str, missing: list[str], extra: list[str]) -> None:
    if missing or extra:
        raise BadInput(
            f"the checkpoint and the model have different {what}: missing in the checkpoint {some_of(missing)}, "
            f"missing in the model {some_of(extra)}; map tables with tables={{stored: mine}}, or restore what both "
            "have with strict=False",
            expected=missing, found=extra,
        )  # fmt: skip


def _match_optimizers(
    trainer: TrainerDocument | None,
    optimizers: Sequence[torch.optim.Optimizer],
    plan: StatePlan,
    tables: Collection[str],
    strict: bool,
) -> tuple[OptimizerDocument | None, ...]:
    """Return the stored document of each optimizer, None where class or parameters are not the same.

    ``tables``: those of the checkpoint.
    """
    stored = [] if trainer is None else _divided(trainer.optimizers, optimizers)
    # Tables are left out: another sharding may move their update between an optimizer and the backward pass.
    mine = {id(one.parameter): one.name for one in plan.optimized if not one.is_table}
    matched: list[OptimizerDocument | None] = []
    for index, optimizer in enumerate(optimizers):
        document = stored[index] if index < len(stored) else None
        groups = [[mine[id(p)] for p in group["params"] if id(p) in mine] for group in optimizer.param_groups]
        was = [[p for p in group.parameters if p not in tables] for group in document.groups] if document else []
        fits = document is not None and _is_of(document, optimizer) and was == groups
        if not fits and strict:
            found = _summary(document.kind or "one", was) if document else "none"
            if document and (options := _foreign_options(document, optimizer)):
                found += f", with options {options} that {type(optimizer).__name__} does not have"
            expected = _summary(type(optimizer).__name__, groups)
            raise BadInput(
                f"optimizer {index} is {expected}; the checkpoint has {found}. Give optimizers and their parameters in "
                "the order in which they were saved, or restore without this optimizer's state with strict=False",
                expected=expected, found=found,
            )  # fmt: skip
        matched.append(document if fits else None)
    if strict and len(stored) > len(optimizers):
        raise BadInput(
            f"the checkpoint has {len(stored)} optimizers, the manager {len(optimizers)}; give all of them, or restore "
            "without their state with strict=False"
        )
    return tuple(matched)


def _summary(kind: str, groups: Sequence[Sequence[str]]) -> str:
    """An optimizer in words: its class, and the parameters of its groups that are no tables."""
    if not any(groups):
        return f"{kind} of tables only{f', in {len(groups)} groups' * (len(groups) > 1)}"
    return f"{kind} with {len(groups)} groups of parameters besides tables: {'; '.join(map(some_of, groups)) or 'none'}"


def _is_of(document: OptimizerDocument, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a document can be that optimizer's: by its class, or by its options if it was imported."""
    if document.kind:
        return document.kind == type(optimizer).__name__
    return not _foreign_options(document, optimizer)


def _foreign_options(document: OptimizerDocument, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return which options an imported optimizer has and the live one has not, without those that schedulers add."""
    if document.kind:
        return []
    pairs = zip(document.groups, optimizer.param_groups, strict=False)
    return sorted({key for saved, group in pairs for key in saved.options.keys() - group.keys()} - _OF_SCHEDULERS)


def _places(trainer: TrainerDocument | None) -> dict[str, int]:
    """Return by parameter which of the optimizers in the checkpoint has it, if they were imported."""
    stored = enumerate(() if trainer is None else trainer.optimizers)
    return {name: number for number, one in stored if not one.kind for group in one.groups for name in group.parameters}


def _divided(
    documents: Sequence[OptimizerDocument], optimizers: Sequence[torch.optim.Optimizer]
) -> Sequence[OptimizerDocument]:
    """Return imported optimizers as the live ones: ``get_state_dict`` made one of all, with their groups in order."""
    groups = [group for document in documents for group in document.groups]
    counts = [len(optimizer.param_groups) for optimizer in optimizers]
    if any(document.kind for document in documents) or len(groups) != sum(counts):
        return documents
    state = {name: values for document in documents for name, values in document.state.items()}
    rest = iter(groups)
    own = [[*islice(rest, count)] for count in counts]
    return [
        OptimizerDocument("", part, {name: state[name] for group in part for name in group.parameters}) for part in own
    ]


def _plan_shard(
    schema: TableSchema,
    stored: str,
    holding: RankShard,
    plan: StatePlan,
    documents: Sequence[OptimizerDocument | None],
    layouts: Mapping[str, SlotDocument],
    strict: bool,
    resize: Resize | None,
) -> ShardRestore:
    shard, mine = holding.shard, holding.key.table
    shape = (shard.num_rows, shard.dim)
    if schema.keys == "hashed":
        raise BadInput(f"stored table {stored!r} has hashed keys and fits no parameter", table=stored)
    is_larger = shard.num_rows > schema.num_rows and shard.dim == schema.dim
    if shape != (schema.num_rows, schema.dim) and not (is_larger and resize):
        advice = 'say what its new rows hold: resize="fill" or resize="model"' if is_larger else _OTHER_NAME
        raise BadShape(
            f"table {mine!r} has shape {shape}, stored {stored!r} has {(schema.num_rows, schema.dim)}; {advice}",
            table=mine, expected=(schema.num_rows, schema.dim), found=shape,
        )  # fmt: skip
    if table_dtype_name(shard.weight, mine) != schema.dtype:
        raise BadDtype(
            f"table {mine!r} is {shard.weight.dtype}, stored {stored!r} is {schema.dtype}; use a model of that dtype",
            table=mine, expected=schema.dtype, found=str(shard.weight.dtype),
        )  # fmt: skip
    owner = None if shard.parameter is None else plan.owner(shard.parameter)
    live = live_slots(shard)
    for name, tensor in {"weight": shard.weight, **live}.items():
        check_held(tensor, f"{mine}, {name}")  # it is written by address
    is_fused = shard.parameter is None
    fits = owner is not None and has_parameter(documents[owner.optimizer], stored)
    # An optimizer of the stored class makes slots that it does not have yet; of another one only what is there counts.
    chosen = schema.slots if fits else {name: slot for name, slot in schema.slots.items() if name in live}
    if strict and not fits and schema.slots.keys() - live.keys():
        has = "no optimizer has it" if owner is None and not is_fused else f"its optimizer has {sorted(live)}"
        raise BadInput(
            f"stored table {stored!r} has slots {sorted(schema.slots)}; of {mine!r}, {has}. Give the parameter to an "
            "optimizer of the class that saved it, or restore without these slots, as of a table that is frozen now, "
            "with strict=False",
            table=mine,
        )
    slots = {}
    for name, slot in chosen.items():
        whole, layout = _slot_layout(schema, stored, name, layouts.get(name))
        local = (shard.rows[1] - shard.rows[0], *whole[1:])
        if slot.kind == "element":
            local = (local[0], shard.columns[1] - shard.columns[0])
        held = live.get(name)
        fits_slot = held is None or (held.numel(), table_dtype_name(held, name)) == (math.prod(local), slot.dtype)
        if held is not None and not fits_slot:
            raise BadShape(
                f"slot {name!r} of table {mine!r} is {tuple(held.shape)} {held.dtype}, stored {local} {slot.dtype}",
                table=mine, expected=local, found=tuple(held.shape),
            )  # fmt: skip
        slots[name] = (slot, local, layout)
    return ShardRestore(stored, holding, schema, owner, slots)


def has_parameter(document: OptimizerDocument | None, name: str) -> bool:
    """Return whether the optimizer that the document describes had a parameter."""
    return document is not None and any(name in group.parameters for group in document.groups)


def _slot_layout(
    schema: TableSchema, stored: str, name: str, found: SlotDocument | None
) -> tuple[tuple[int, ...], str]:
    """Return shape and layout of a slot to fill. Memory is allocated by them, so they must fit the table."""
    rows = schema.num_rows
    allowed = ((rows,), (rows, 1)) if schema.slots[name].kind == "row" else ((rows, schema.dim),)
    if found is None:
        return allowed[0], "strided"
    if found.shape not in allowed:
        raise CorruptStore(
            f"document {TRAINER} says that slot {name!r} of table {stored!r} has shape {found.shape}, its table has "
            f"{allowed[0]}; restore another version",
            path=TRAINER, table=stored, expected=allowed[0], found=found.shape,
        )  # fmt: skip
    return found.shape, found.layout


def _check_dense(name: str, entry: DenseEntry, tensor: torch.Tensor) -> None:
    if tuple(entry.shape) != tuple(tensor.shape):
        raise BadShape(
            f"tensor {name!r} has shape {tuple(tensor.shape)}, the checkpoint's has {entry.shape}; {_OTHER_NAME}",
            path=name, expected=tuple(entry.shape), found=tuple(tensor.shape),
        )  # fmt: skip
    if str(tensor.dtype) != f"torch.{entry.dtype}":
        raise BadDtype(
            f"tensor {name!r} is {tensor.dtype}, the checkpoint's is {entry.dtype}",
            path=name, expected=entry.dtype, found=str(tensor.dtype),
        )  # fmt: skip


def _plan_optimizer_dense(
    stored_dense: Mapping[str, DenseEntry],
    plan: StatePlan,
    documents: Sequence[OptimizerDocument | None],
    names: Mapping[str, str],
    places: Mapping[str, int],
) -> dict[str, tuple[Optimized, str]]:
    stored_name = {mine: stored for stored, mine in names.items()}
    found: dict[str, tuple[Optimized, str]] = {}
    for one in plan.optimized:
        if documents[one.optimizer] is None:
            continue
        name = stored_name.get(one.name, one.name) if one.is_table else one.name
        prefix = optimizer_tensor_name(places.get(name, one.optimizer), name, "")
        for stored in stored_dense:
            if stored.startswith(prefix) and "/" not in stored[len(prefix) :]:
                found[stored] = (one, stored[len(prefix) :])
    return found
