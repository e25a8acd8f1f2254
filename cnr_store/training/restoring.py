"""Put a committed state into a live model and its optimizers, in place, by a plan of `matching`.

Tables and dense tensors are read into the live tensors, where these lie in host memory; everything else is read before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cnr_store.encodings.widths import carrier
from cnr_store.errors import Unsupported
from cnr_store.format.records import DenseEntry, SlotSchema
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.shards import Shard
from cnr_store.training.matching import Resize, RestorePlan, ShardRestore, has_parameter
from cnr_store.training.shards import Holdings
from cnr_store.training.state import Optimized, StatePlan
from cnr_store.training.tensors import Array, as_array, as_tensor, dense_dtype_name, windows, writable_array
from cnr_store.types import Rectangle, SlotsRule
from cnr_store_gpu.memory import check_held


@torch.no_grad()
def read_dense(snapshot: Snapshot, plan: RestorePlan, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Array]:
    """Read every dense tensor of a plan, optimizer state among them: into the live ones, where they can be. Blocks.

    After an error live tensors hold anything. Returns those that `apply_dense` must put in place.
    """
    names, live = (*plan.dense, *plan.optimizer_dense), dict(plan.dense)
    for name, (one, key) in plan.optimizer_dense.items():
        held = optimizers[one.optimizer].state.get(one.parameter, {}).get(key)
        if type(held) is torch.Tensor:
            live[name] = held
    into = {}
    dense = snapshot.dense
    for name, tensor in live.items():
        check_held(tensor, name)
        entry = dense[name]
        array = writable_array(tensor) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None
        if array is not None and (dense_dtype_name(tensor, name), array.shape) == (entry.dtype, entry.shape):
            into[name] = array
    found = snapshot.read_many_dense(names, into)
    return {name: array for name, array in found.items() if name not in into}


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Where tables are read to: host memory in one pass, other tensors by windows of rows, sparse slots in the end."""

    outputs: dict[Shard, dict[str, Array]]
    windowed: list[tuple[ShardRestore, dict[str, torch.Tensor]]]
    sparse: list[tuple[ShardRestore, str, torch.Tensor]]

    def only(self, shards: Collection[Shard]) -> Targets:
        """Return those of such shards."""
        return Targets(
            {key: arrays for key, arrays in self.outputs.items() if key in shards},
            [one for one in self.windowed if one[0].key in shards],
            [one for one in self.sparse if one[0].key in shards],
        )


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
        if one.num_stored < one.shard.rows[1] - one.shard.rows[0]:
            targets = {name: tensor[: one.num_stored] for name, tensor in targets.items()}
            if not one.num_stored:
                continue
        arrays = {name: writable_array(tensor) for name, tensor in targets.items()}
        held = {name: array for name, array in arrays.items() if array is not None}
        if "values" in held:
            outputs[one.key] = held
            rest = {name: tensor for name, tensor in targets.items() if name not in held}
        else:
            rest = targets
        if rest:
            windowed.append((one, rest))
    return Targets(outputs, windowed, sparse)


def read_tables(snapshot: Snapshot, targets: Targets) -> None:
    """Fill the ``outputs``, as ``Writer.restore`` does, without a writer. Blocks."""
    named = {
        shard: {"codes" if name == "values" else f"slots/{name}": array for name, array in arrays.items()}
        for shard, arrays in targets.outputs.items()
    }
    schemas = snapshot.tables
    whole = {shard.table: arrays for shard, arrays in named.items() if shard.is_whole(schemas[shard.table])}
    together = snapshot.load_together(whole)
    for shard, arrays in named.items():
        if shard.table not in together:
            view = snapshot.table(shard.table)
            view.load(arrays, shard.rectangle_in(view.schema), "exact")


def finish_tables(
    snapshot: Snapshot, targets: Targets, optimizers: Sequence[torch.optim.Optimizer], slots_rule: SlotsRule
) -> None:
    """Read what is not among the ``outputs``. Blocks."""
    for one, tensors in targets.windowed:
        _restore_windows(snapshot, one, tensors, slots_rule)
    for one, slot, target in targets.sparse:
        _state_of(one, optimizers)[slot] = _sparse_rows(target)


@torch.no_grad()
def apply_dense(
    plan: RestorePlan,
    dense: Mapping[str, Array],
    entries: Mapping[str, DenseEntry],
    state: StatePlan,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Put dense tensors that are not there yet, step counters and hyperparameters in place; no I/O."""
    for name, tensor in ((name, tensor) for name, tensor in plan.dense.items() if name in dense):
        tensor.copy_(as_tensor(dense[name], entries[name].dtype).reshape(tensor.shape))
    for one in state.optimized:
        document = plan.optimizer_documents[one.optimizer]
        if document is None:
            continue
        stored = plan.renamed.get(one.name, one.name) if one.is_table else one.name
        if one.is_table and not has_parameter(document, stored):
            continue  # it was stepped inside backward, or not at all: there is nothing to put back
        _put_inline(one, document.state.get(stored, {}), plan, optimizers[one.optimizer])
    for name, (one, key) in ((name, at) for name, at in plan.optimizer_dense.items() if name in dense):
        value = as_tensor(dense[name], entries[name].dtype)
        optimizer = optimizers[one.optimizer]
        _put_tensor(optimizer.state[one.parameter], key, value, one.parameter, optimizer.param_groups[one.group])
    for shard, scalars in plan.fused:
        shard.put_scalars(scalars)
    for optimizer, document in zip(optimizers, plan.optimizer_documents, strict=True):
        for group, saved in zip(optimizer.param_groups, () if document is None else document.groups, strict=False):
            group.update(saved.options)


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
    (first, _), columns = one.rectangle.rows, one.shard.columns
    specs = {name: view.schema.dtype if name == "values" else view.schema.slots[name].dtype for name in tensors}
    flat = {name: _as_matrix(tensor) for name, tensor in tensors.items()}
    row_bytes = sum(tensor.shape[1] * tensor.element_size() for tensor in flat.values())
    for start, stop in windows(one.num_stored, row_bytes):
        for name, tensor in flat.items():
            array = np.empty((stop - start, tensor.shape[1]), carrier(specs[name]))
            if slots_rule == "drop" and name != "values":
                array[...] = as_array(tensor[start:stop])  # what is not read stays
            stored = "codes" if name == "values" else f"slots/{name}"
            view.load({stored: array}, Rectangle((first + start, first + stop), columns), slots_rule)
            tensor[start:stop].copy_(as_tensor(array, specs[name]))


def _sparse_rows(dense: torch.Tensor) -> torch.Tensor:
    rows = _as_matrix(dense != 0).any(dim=1).nonzero().squeeze(1)
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), dense[rows], dense.shape, is_coalesced=True, check_invariants=False
    )


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A view with one row per row; `reshape` fails where there is no row."""
    return tensor.unsqueeze(1) if tensor.ndim == 1 else tensor.flatten(1)


def _put_inline(one: Optimized, saved: Mapping[str, Any], plan: RestorePlan, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's small state of a parameter what was saved: nothing more and nothing less."""
    row_state = next((set(shard.slots) for shard in plan.shards if shard.owner is one), set())
    dense_keys = {key for owner, key in plan.optimizer_dense.values() if owner is one}
    if not saved and not row_state and not dense_keys:
        # Saved before the optimizer's first step: it must create its state again.
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


def check_resizable(plan: RestorePlan, holdings: Holdings) -> None:
    """Return if a training that has more rows than the checkpoint can save them.

    Raises
    ------
    Unsupported
        Several ranks, or shards: no process holds the whole table.
    """
    if plan.resized and holdings.placement is not None:
        table = min(plan.resized)
        raise Unsupported(
            f"table {table!r} has more rows than the stored one, and resize= is for trainings of one process that "
            "holds its tables whole; resize it in such a one, save, and go on from that checkpoint",
            table=table, expected=plan.resized[table], found=holdings.tables[table][0],
        )  # fmt: skip


@torch.no_grad()
def fill_new_rows(plan: RestorePlan, resize: Resize | None) -> None:
    """Set rows beyond the stored tables to the tables' fill, if the caller wants it; no I/O."""
    if resize == "fill":
        for one in plan.shards:
            one.shard.weight.detach()[one.num_stored :].fill_(one.schema.fill)
