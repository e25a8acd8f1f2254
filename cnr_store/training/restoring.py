"""Put a committed state into a live model and its optimizers, in place.

Everything is compared before anything is changed: the plan names what goes where, or the error names what does not
fit. Everything but the tables is read into host memory before the first tensor is written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cnr_store.encodings.widths import carrier
from cnr_store.errors import BadDtype, BadInput, BadShape, CorruptStore, Unsupported
from cnr_store.placement import Shard
from cnr_store.records import DenseEntry, SlotSchema, TableSchema
from cnr_store.snapshot import Snapshot
from cnr_store.training.document import TRAINER, OptimizerDocument, SlotDocument, TrainerDocument
from cnr_store.training.holdings import Holding, Holdings
from cnr_store.training.shards import LocalShard
from cnr_store.training.state import (
    Optimized,
    StatePlan,
    dense_tensors,
    live_slots,
    optimizer_tensor_name,
)
from cnr_store.training.tensors import Array, as_array, as_tensor, table_dtype_name, windows, writable_array
from cnr_store.types import Rectangle, SlotsRule


@dataclass(frozen=True, slots=True, eq=False)
class ShardRestore:
    """One shard of a stored table and where it goes.

    ``slots``: stored schema, shape on this rank, and layout of each slot to fill.
    """

    stored: str
    holding: Holding
    schema: TableSchema
    owner: Optimized | None
    slots: dict[str, tuple[SlotSchema, tuple[int, ...], str]]

    @property
    def shard(self) -> LocalShard:
        """Where it goes."""
        return self.holding.shard

    @property
    def key(self) -> Shard:
        """The shard under the table's stored name."""
        return Shard(self.stored, self.holding.key.rectangle)


@dataclass(frozen=True, slots=True, eq=False)
class RestorePlan:
    """What a restore does.

    Attributes
    ----------
    shards
        Shards of tables with their slots.
    fused
        Shards and what their fused optimizers get back besides slots.
    dense
        Stored dense tensors to the model's parameters and buffers.
    optimizer_dense
        Stored dense tensors to (parameter, key) of optimizer state.
    optimizer_documents
        Per optimizer its stored document, None if it does not fit (only without ``strict``).
    renamed
        My name to the stored name of each table that is restored.
    """

    shards: tuple[ShardRestore, ...]
    fused: tuple[tuple[LocalShard, dict[str, Any]], ...]
    dense: dict[str, torch.Tensor]
    optimizer_dense: dict[str, tuple[Optimized, str]]
    optimizer_documents: tuple[OptimizerDocument | None, ...]
    renamed: dict[str, str]


@dataclass(slots=True)
class Loaded:
    """What was read before anything is written: dense tensors and optimizer state."""

    dense: dict[str, Array] = field(default_factory=dict)


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
) -> RestorePlan:
    """Return what to put where. Pure: nothing is read from the store and nothing changed.

    Parameters
    ----------
    trainer
        The document ``trainer/0``; None if the checkpoint was not written by a trainer.
    name_map
        Stored table name to mine; others keep their names.
    strict
        Refuse when a table, dense tensor, slot or optimizer is missing on either side; else restore what both have.

    Raises
    ------
    BadInput, BadShape, BadDtype
    CorruptStore
        The document gives a slot a shape that its table does not have.
    """
    names = _names(schemas, holdings.tables, name_map or {}, strict)
    documents = _match_optimizers(trainer, optimizers, plan, names, strict)
    layouts = {} if trainer is None else trainer.slots
    held = [
        (stored, holding)
        for stored, mine in names.items()
        for holding in holdings.by_name.values()
        if holding.table == mine
    ]
    shards = tuple(
        _plan_shard(schemas[stored], stored, holding, plan, documents, layouts.get(stored, {}), strict)
        for stored, holding in held
    )
    fused = tuple(
        (holding.shard, trainer.fused[stored])
        for stored, holding in held
        if trainer is not None and holding.shard.parameter is None and stored in trainer.fused
    )
    wanted = dense_tensors(plan, optimizers)
    dense = {name: plan.dense[name] for name in stored_dense if name in plan.dense}
    for name, tensor in dense.items():
        _check_dense(name, stored_dense[name], tensor)
    state = _plan_optimizer_dense(stored_dense, plan, documents, names)
    if strict:
        missing = sorted(name for name in plan.dense if name not in stored_dense)
        extra = sorted(n for n in stored_dense if n not in plan.dense and n not in state and n not in wanted)
        _refuse_unmatched("dense tensors", missing, extra)
    return RestorePlan(shards, fused, dense, state, documents, {mine: stored for stored, mine in names.items()})


def read_dense(snapshot: Snapshot, plan: RestorePlan) -> Loaded:
    """Read every dense tensor of a plan into host memory. Blocks."""
    return Loaded({name: snapshot.read_dense(name) for name in (*plan.dense, *plan.optimizer_dense)})


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Where tables are read to: host memory in one pass, other tensors by windows of rows, sparse slots in the end."""

    outputs: dict[Shard, dict[str, Array]]
    windowed: list[tuple[ShardRestore, dict[str, torch.Tensor]]]
    sparse: list[tuple[ShardRestore, str, torch.Tensor]]


def check_columns(snapshot: Snapshot, plan: RestorePlan) -> None:
    """Return if every shard's columns are stored as they are held, where slots have one value per row. Reads nothing.

    Raises
    ------
    Unsupported
        They are cut otherwise: such a slot can only be averaged or left out.
    """
    for one in plan.shards:
        rows, columns = one.shard.rows, one.shard.columns
        per_row = sorted(name for name, slot in one.schema.slots.items() if slot.kind == "row")
        if not per_row or rows[0] == rows[1]:
            continue
        cuts = snapshot.table(one.stored).column_cuts
        if columns not in cuts:
            raise Unsupported(
                f"table {one.stored!r} has slots {per_row} once per row and column shard, for columns {list(cuts)}; "
                f"this rank holds columns {columns}. Restore with slots_rule='mean' or 'drop'",
                table=one.stored, expected=cuts, found=columns,
            )  # fmt: skip


def restore_targets(plan: RestorePlan, optimizers: Sequence[torch.optim.Optimizer]) -> Targets:
    """Return where everything of the tables is read to; makes optimizer state that is not there yet."""
    outputs: dict[Shard, dict[str, Array]] = {}
    windowed: list[tuple[ShardRestore, dict[str, torch.Tensor]]] = []
    sparse: list[tuple[ShardRestore, str, torch.Tensor]] = []
    for one in plan.shards:
        targets = {"values": one.shard.weight.detach()}
        for slot, (schema, shape, layout) in one.slots.items():
            target = _slot_target(one, slot, schema, shape, layout, optimizers)
            targets[slot] = target
            if layout == "sparse":
                sparse.append((one, slot, target))
        arrays = {name: writable_array(tensor) for name, tensor in targets.items()}
        held = {name: _as_rows(array) for name, array in arrays.items() if array is not None}
        if "values" in held:
            outputs[one.key] = held
            rest = {name: tensor for name, tensor in targets.items() if name not in held}
        else:
            rest = targets
        if rest:
            windowed.append((one, rest))
    return Targets(outputs, windowed, sparse)


def finish_tables(
    snapshot: Snapshot, targets: Targets, optimizers: Sequence[torch.optim.Optimizer], slots_rule: SlotsRule
) -> None:
    """Read what ``Writer.restore`` with the ``outputs`` has not filled. Blocks."""
    for one, tensors in targets.windowed:
        _restore_windows(snapshot, one, tensors, slots_rule)
    for one, slot, target in targets.sparse:
        _state_of(one, optimizers)[slot] = _sparse_rows(target)


@torch.no_grad()
def apply_dense(
    plan: RestorePlan,
    loaded: Loaded,
    entries: Mapping[str, DenseEntry],
    state: StatePlan,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Put dense tensors, step counters and hyperparameters in place; no I/O."""
    for name, tensor in plan.dense.items():
        tensor.copy_(as_tensor(loaded.dense[name], entries[name].dtype).reshape(tensor.shape))
    for one in state.optimized:
        document = plan.optimizer_documents[one.optimizer]
        if document is None:
            continue
        stored = plan.renamed.get(one.name, one.name) if one.is_table else one.name
        if one.is_table and not _has_parameter(document, stored):
            continue  # it was stepped inside backward, or not at all: there is nothing to put back
        _put_inline(one, document.state.get(stored, {}), plan, optimizers[one.optimizer])
    for name, (one, key) in plan.optimizer_dense.items():
        value = as_tensor(loaded.dense[name], entries[name].dtype)
        optimizer = optimizers[one.optimizer]
        _put_tensor(optimizer.state[one.parameter], key, value, one.parameter, optimizer.param_groups[one.group])
    for shard, scalars in plan.fused:
        shard.put_scalars(scalars)
    for optimizer, document in zip(optimizers, plan.optimizer_documents, strict=True):
        for group, saved in zip(optimizer.param_groups, () if document is None else document.groups, strict=False):
            group.update(saved.options)


def _names(
    schemas: Mapping[str, TableSchema], tables: Collection[str], name_map: Mapping[str, str], strict: bool
) -> dict[str, str]:
    for stored, mine in name_map.items():
        if stored not in schemas:
            raise BadInput(f"tables= names stored table {stored!r}, the store has {sorted(schemas)}", table=stored)
        if mine not in tables:
            raise BadInput(f"tables= names {mine!r}, the model has tables {sorted(tables)}", table=mine)
    names = {stored: name_map.get(stored, stored) for stored in schemas}
    matched = {stored: mine for stored, mine in names.items() if mine in tables}
    if len(set(matched.values())) < len(matched):
        raise BadInput(f"two stored tables would go to one of mine: {matched}; check tables=", found=matched)
    if strict:
        missing = sorted(set(tables) - set(matched.values()))
        extra = sorted(set(schemas) - set(matched))
        _refuse_unmatched("tables", missing, extra)
    return matched


def _refuse_unmatched(what: str, missing: list[str], extra: list[str]) -> None:
    if missing or extra:
        raise BadInput(
            f"the checkpoint and the model have different {what}: missing in the checkpoint {missing}, missing in the "
            f"model {extra}; map tables with tables={{stored: mine}}, or restore what both have with strict=False",
            expected=missing, found=extra,
        )  # fmt: skip


def _match_optimizers(
    trainer: TrainerDocument | None,
    optimizers: Sequence[torch.optim.Optimizer],
    plan: StatePlan,
    names: Mapping[str, str],
    strict: bool,
) -> tuple[OptimizerDocument | None, ...]:
    """Return the stored document of each optimizer, None where class or parameters are not the same."""
    stored = [] if trainer is None else trainer.optimizers
    # Whether a table is stepped by an optimizer or inside backward may change with its sharding.
    mine = {id(one.parameter): one.name for one in plan.optimized if not one.is_table}
    matched: list[OptimizerDocument | None] = []
    for index, optimizer in enumerate(optimizers):
        document = stored[index] if index < len(stored) else None
        groups = [[mine[id(p)] for p in group["params"] if id(p) in mine] for group in optimizer.param_groups]
        fits = (
            document is not None
            and document.kind == type(optimizer).__name__
            and [[p for p in group.parameters if p not in names] for group in document.groups] == groups
        )
        if not fits and strict:
            found = "none" if document is None else f"{document.kind} with {len(document.groups)} groups"
            raise BadInput(
                f"optimizer {index} is {type(optimizer).__name__} with {len(groups)} groups; the checkpoint has "
                f"{found}, or other parameters in it. Give the optimizers in the order in which they were saved, or "
                "restore without optimizer state with strict=False",
                expected=type(optimizer).__name__, found=found,
            )  # fmt: skip
        matched.append(document if fits else None)
    if strict and len(stored) > len(optimizers):
        raise BadInput(f"the checkpoint has {len(stored)} optimizers, the manager {len(optimizers)}; give all of them")
    return tuple(matched)


def _plan_shard(
    schema: TableSchema,
    stored: str,
    holding: Holding,
    plan: StatePlan,
    documents: Sequence[OptimizerDocument | None],
    layouts: Mapping[str, SlotDocument],
    strict: bool,
) -> ShardRestore:
    shard, mine = holding.shard, holding.table
    shape = (shard.num_rows, shard.dim)
    if schema.keys == "hashed":
        raise BadInput(f"stored table {stored!r} has hashed keys and fits no parameter", table=stored)
    if shape != (schema.num_rows, schema.dim):
        raise BadShape(
            f"table {mine!r} has shape {shape}, stored {stored!r} has {(schema.num_rows, schema.dim)}",
            table=mine, expected=(schema.num_rows, schema.dim), found=shape,
        )  # fmt: skip
    if table_dtype_name(shard.weight, mine) != schema.dtype:
        raise BadDtype(
            f"table {mine!r} is {shard.weight.dtype}, stored {stored!r} is {schema.dtype}; use a model of that dtype",
            table=mine, expected=schema.dtype, found=str(shard.weight.dtype),
        )  # fmt: skip
    owner = None if shard.parameter is None else plan.owner(shard.parameter)
    live = live_slots(shard)
    is_fused = shard.parameter is None
    fits = owner is not None and _has_parameter(documents[owner.optimizer], stored)
    # An optimizer of the stored class makes slots that it does not have yet; of another one only what is there counts.
    chosen = schema.slots if fits else {name: slot for name, slot in schema.slots.items() if name in live}
    if strict and not fits and schema.slots.keys() - live.keys():
        has = "no optimizer has it" if owner is None and not is_fused else f"its optimizer has {sorted(live)}"
        raise BadInput(f"stored table {stored!r} has slots {sorted(schema.slots)}; of {mine!r}, {has}", table=mine)
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


def _has_parameter(document: OptimizerDocument | None, name: str) -> bool:
    """Whether the optimizer that the document is of had a parameter."""
    return document is not None and any(name in group.parameters for group in document.groups)


def _slot_layout(
    schema: TableSchema, stored: str, name: str, found: SlotDocument | None
) -> tuple[tuple[int, ...], str]:
    """Shape and layout of a slot to fill. Memory is taken by them, so they must be those of the table."""
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
            f"tensor {name!r} has shape {tuple(tensor.shape)}, the checkpoint's has {tuple(entry.shape)}",
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
) -> dict[str, tuple[Optimized, str]]:
    stored_name = {mine: stored for stored, mine in names.items()}
    found: dict[str, tuple[Optimized, str]] = {}
    for one in plan.optimized:
        if documents[one.optimizer] is None:
            continue
        name = stored_name.get(one.name, one.name) if one.is_table else one.name
        prefix = optimizer_tensor_name(one.optimizer, name, "")
        for stored in stored_dense:
            if stored.startswith(prefix) and "/" not in stored[len(prefix) :]:
                found[stored] = (one, stored[len(prefix) :])
    return found


def _slot_target(
    one: ShardRestore,
    slot: str,
    schema: SlotSchema,
    shape: tuple[int, ...],
    layout: str,
    optimizers: Sequence[torch.optim.Optimizer],
) -> torch.Tensor:
    """The tensor that a slot is read into: the optimizer's own if it can be filled, else a new one in its place."""
    held = one.shard.slots().get(slot)
    if held is not None and held.layout is torch.strided and layout == "strided":
        return held.detach()
    made = torch.zeros(shape, dtype=getattr(torch, schema.dtype), device=one.shard.weight.device)
    if layout == "strided":
        _state_of(one, optimizers)[slot] = made
    return made


def _state_of(one: ShardRestore, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    assert one.owner is not None  # the plan has refused slots without an owner
    state: dict[str, Any] = optimizers[one.owner.optimizer].state[one.owner.parameter]
    return state


def _restore_windows(
    snapshot: Snapshot, one: ShardRestore, tensors: Mapping[str, torch.Tensor], slots_rule: SlotsRule
) -> None:
    """Read a shard that does not lie in host memory, a window of rows at a time."""
    view = snapshot.table(one.stored)
    first, columns = one.shard.rows[0], one.shard.columns
    specs = {name: view.schema.dtype if name == "values" else view.schema.slots[name].dtype for name in tensors}
    flat = {name: _as_matrix(tensor) for name, tensor in tensors.items()}
    row_bytes = sum(tensor.shape[1] * tensor.element_size() for tensor in flat.values())
    for start, stop in windows(one.shard.rows[1] - first, row_bytes):
        for name, tensor in flat.items():
            array = np.empty((stop - start, tensor.shape[1]), carrier(specs[name]))
            if slots_rule == "drop" and name != "values":
                array[...] = as_array(tensor[start:stop])  # what is not read stays
            stored = "codes" if name == "values" else f"slots/{name}"
            view.read_arrays({stored: array}, Rectangle((first + start, first + stop), columns), slots_rule)
            tensor[start:stop].copy_(as_tensor(array, specs[name]))


def _sparse_rows(dense: torch.Tensor) -> torch.Tensor:
    rows = _as_matrix(dense != 0).any(dim=1).nonzero().squeeze(1)
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), dense[rows], dense.shape, is_coalesced=True, check_invariants=False
    )


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A view, one row per row; `reshape` refuses to tell the width of none."""
    return tensor.unsqueeze(1) if tensor.ndim == 1 else tensor.flatten(1)


def _as_rows(array: Array) -> Array:
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array


def _put_inline(one: Optimized, saved: Mapping[str, Any], plan: RestorePlan, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's small state of a parameter what was saved: nothing more and nothing less."""
    row_state = next((set(shard.slots) for shard in plan.shards if shard.owner is one), set())
    dense_keys = {key for owner, key in plan.optimizer_dense.values() if owner is one}
    if not saved and not row_state and not dense_keys:
        # Saved before the optimizer's first step: it must make its state anew.
        optimizer.state.pop(one.parameter, None)
        return
    state = optimizer.state[one.parameter]
    for key in [key for key in state if key not in saved and key not in row_state and key not in dense_keys]:
        if state[key] is not None:
            del state[key]
    for key, value in saved.items():
        if isinstance(value, torch.Tensor):
            _put_tensor(state, key, value, one.parameter, optimizer.param_groups[one.group])
        else:
            state[key] = value


def _put_tensor(
    state: dict[str, Any],
    key: str,
    value: torch.Tensor,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
) -> None:
    held = state.get(key)
    if isinstance(held, torch.Tensor) and held.shape == value.shape and held.dtype == value.dtype:
        held.copy_(value)
        return
    # The step counter stays on the host unless the step itself runs on the device, everything else goes with its
    # parameter, be it one number (torch.optim.Optimizer.load_state_dict).
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    state[key] = value.clone() if on_host else value.to(parameter.device, copy=True)
