"""Plans where each part of a model and its optimizers is stored in a checkpoint. Changes nothing.

Tables and their slots are stored by row. Every other tensor is stored as a dense tensor. Numbers, hyperparameters and
the layout of the optimizers are stored in the documents ``trainer/0`` and ``progress/0``.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cnr_store.encodings import widths
from cnr_store.errors import BadInput, TableNotFound, Unsupported
from cnr_store.format.records import TableSchema
from cnr_store.runtime.arguments import some_of
from cnr_store.runtime.ranks import Ranks
from cnr_store.training.shards import (
    LocalShard,
    Slots,
    find_shards,
    whole_shard,
)
from cnr_store.training.tensors import slot_kind, table_dtype_name
from cnr_store.types import Affine, FloatBits, Lattice, Raw
from cnr_store.write.schema_choice import asked_bits, encoding_name, keeps_exactness, slot_bits_of
from cnr_store.write.table_options import TableOptions
from cnr_store_gpu import plan_tables, scalar_state

INLINE_ELEMENTS = 1
"""Optimizer tensors of at most so many elements (step counters) are stored in the document ``progress/0``."""

_BY_DCP = "save it through torch.distributed.checkpoint, with cnr_store.integrations.dcp"
_DIVIDED = (
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", _BY_DCP),
    ("torch.distributed.tensor", "DTensor", _BY_DCP),
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer", "use the optimizer it divides"),
)
"""Classes of torch that divide dense tensors or their optimizer state among ranks: module, name, what to do."""


class Optimized(msgspec.Struct, frozen=True, eq=False):
    """One parameter of one optimizer, under the model's name for it."""

    name: str
    parameter: torch.Tensor
    optimizer: int
    group: int
    is_table: bool


@dataclass(frozen=True, slots=True, eq=False)
class StatePlan:
    """Where each part of a training state is stored; tensors are live.

    Attributes
    ----------
    shards
        This rank's shards of tables, by name of the shard.
    dense
        Name to parameter or persistent buffer that is no table.
    optimized
        Every parameter that an optimizer has.
    groups
        By optimizer and group: the names of the group's parameters.
    second_names
        Further names of parameters that the model has under several: they are stored under the first one.
    """

    shards: dict[str, LocalShard]
    dense: dict[str, torch.Tensor]
    optimized: tuple[Optimized, ...]
    groups: Sequence[Sequence[Sequence[str]]]
    second_names: frozenset[str]

    def owner(self, parameter: torch.Tensor) -> Optimized | None:
        """Return the optimizer's entry of a table's parameter, None if no optimizer has it."""
        return next((one for one in self.optimized if one.parameter is parameter), None)


def table_parameters(model: nn.Module, declared: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    """Return the tables of a model by name: every embedding, and the parameters that the caller names.

    Raises
    ------
    TableNotFound
        A declared name is no parameter of the model.
    """
    found = {plan.table: plan.weight for plan in plan_tables(model)}
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in declared:
        if name not in named:
            raise TableNotFound(f"the model has no parameter {name!r}; it has {some_of(named, name)}", table=name)
        if all(named[name] is not weight for weight in found.values()):
            found[name] = named[name]
    return found


def plan_state(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    shards: Iterable[LocalShard],
    tables: Collection[str],
) -> StatePlan:
    """Return where the model's and the optimizers' state belongs. Reads names and identities only.

    Parameters
    ----------
    tables
        Names of all tables, also those that this rank holds nothing of.

    Raises
    ------
    BadInput
        A parameter with two optimizers, an optimizer's parameter that the model does not have, or one without memory.
    """
    parameters = dict(model.named_parameters())
    held = {shard.name: shard for shard in shards}
    is_table = {id(shard.parameter): shard.table for shard in held.values() if shard.parameter is not None}
    dense: dict[str, torch.Tensor] = {
        name: parameter
        for name, parameter in parameters.items()
        if id(parameter) not in is_table and name not in tables
    }
    if buffers := dict(model.named_buffers()):
        persistent = set(model.state_dict(keep_vars=True))
        dense |= {name: buffer for name, buffer in buffers.items() if name in persistent}
    _refuse_without_memory(parameters | dense)
    # TorchRec has an empty parameter in place of a table that another rank holds whole, and gives it to the optimizer.
    elsewhere = {id(one) for name, one in parameters.items() if name in tables and not one.numel()} - is_table.keys()
    names = {id(tensor): name for name, tensor in dense.items()} | is_table
    optimized: dict[int, Optimized] = {}
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) in elsewhere:
                    continue
                if id(parameter) not in names:
                    raise BadInput(
                        f"optimizer {index} ({type(optimizer).__name__}) has a parameter {tuple(parameter.shape)} that "
                        "is not the model's; give the manager the model that it trains"
                    )
                if id(parameter) in optimized:
                    raise BadInput(f"parameter {names[id(parameter)]!r} is in two optimizers; it can have one state")
                name = names[id(parameter)]
                optimized[id(parameter)] = Optimized(name, parameter, index, number, id(parameter) in is_table)
    groups = [
        [[names[id(one)] for one in group["params"] if id(one) not in elsewhere] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    every = model.named_parameters(remove_duplicate=False)
    second = frozenset(name for name, _ in every if name not in parameters)
    return StatePlan(held, dense, tuple(optimized.values()), groups, second)


def _refuse_without_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Return if all tensors have memory: what is put into a meta tensor is lost without an error.

    Raises
    ------
    BadInput
    """
    if found := sorted(name for name, tensor in tensors.items() if is_lazy(tensor) or tensor.is_meta):
        raise BadInput(
            f"{found[:5]} have no memory yet ({len(found)} tensors, on the meta device or of lazy modules); give them "
            "some first: model.to_empty(device=...), or a forward of lazy modules",
            found=found,
        )  # fmt: skip


def optimizer_tensor_name(optimizer: int, parameter: str, key: str) -> str:
    """Return the name of a dense tensor that holds optimizer state."""
    return f"optimizer/{optimizer}/{parameter}/{key}"


def is_inline(value: Any) -> bool:
    """Return whether a piece of optimizer state is stored in the document ``progress/0``, not in a dense tensor."""
    return not isinstance(value, torch.Tensor) or value.numel() <= INLINE_ELEMENTS


def live_slots(shard: LocalShard) -> dict[str, torch.Tensor]:
    """Return the row state that a shard has now, by the optimizer's names; live tensors in the optimizer's shapes."""
    slots = shard.slots()
    for name, slot in slots.items():
        table_dtype_name(slot, f"{shard.table}, slot {name}")
    return slots


@dataclass(frozen=True, slots=True, eq=False)
class OtherState:
    """Optimizer state that does not travel with rows, looked up once for a save; live.

    Attributes
    ----------
    inline
        By optimizer, parameter name and key: what the trainer document holds, as step counters.
    dense
        By name in the store: tensors that are saved whole.
    """

    inline: Sequence[Mapping[str, Mapping[str, Any]]]
    dense: dict[str, torch.Tensor]


def other_state(plan: StatePlan, optimizers: Sequence[torch.optim.Optimizer]) -> OtherState:
    """Return the optimizer state as it is now, of tables without their slots, of dense parameters all of it."""
    inline: list[dict[str, dict[str, Any]]] = [{} for _ in optimizers]
    dense: dict[str, torch.Tensor] = {}
    for one in plan.optimized:
        inline[one.optimizer][one.name] = of_parameter = {}
        for key, value in _other_state(one, optimizers).items():
            if is_inline(value):
                of_parameter[key] = value
            else:
                dense[optimizer_tensor_name(one.optimizer, one.name, key)] = value
    return OtherState(inline, dense)


def needs_new_schema(
    schema: TableSchema | None, shard: LocalShard, slots: Mapping[str, torch.Tensor], options: TableOptions
) -> bool:
    """Return whether a table must be saved in full: it is new, or its slots or requested encoding changed.

    A lattice keeps its scale, even if the options request another precision now: the scale is chosen once.
    """
    if schema is None or (schema.num_rows, schema.dim) != (shard.num_rows, shard.dim):
        return True
    if slots.keys() != schema.slots.keys():
        return True
    for name, stored in schema.slots.items():
        if (slot_kind(slots[name]), table_dtype_name(slots[name], name)) != (stored.kind, stored.dtype):
            return True
    dtype = table_dtype_name(shard.weight, shard.table)
    if schema.dtype != dtype or _wants_other_slots(schema, options):
        return True
    match encoding_name(options, dtype):
        case "raw":
            return not isinstance(schema.encoding, Raw)
        case "affine":
            return not isinstance(schema.encoding, Affine)
        case "float_bits":
            wanted = options.mantissa_bits or widths.EXACT_MANTISSA_BITS[schema.dtype]
            return schema.encoding != FloatBits(mantissa_bits=wanted)
        case _:
            return not isinstance(schema.encoding, Lattice)


def mirror_estimate(weight: torch.Tensor, slots: Mapping[str, torch.Tensor], options: TableOptions) -> int:
    """Return about how many bytes the code mirror of a table takes: 2 per element, 4 in exact mode."""
    dtype = table_dtype_name(weight, "table")
    match encoding_name(options, dtype):
        case "lattice":
            per_element = 2
        case "float_bits":
            bits = options.mantissa_bits or widths.EXACT_MANTISSA_BITS[dtype]
            per_element = widths.code_dtype(bits, dtype).itemsize
        case _:
            return 0
    held = {name: slot.numel() for name, slot in slots.items() if slot.layout is torch.strided}
    bits = asked_bits(options)
    wide = sum(count for name, count in held.items() if slot_bits_of(options, name, bits) == "exact")
    return weight.numel() * per_element + 2 * sum(held.values()) + 2 * wide


def _wants_other_slots(schema: TableSchema, options: TableOptions) -> bool:
    bits = asked_bits(options)
    return not all(keeps_exactness(slot, slot_bits_of(options, name, bits)) for name, slot in schema.slots.items())


def _other_state(one: Optimized, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Optimizer state of a parameter that does not travel with rows; all of it for a dense parameter."""
    optimizer = optimizers[one.optimizer]
    if one.is_table:
        return scalar_state(optimizer, one.parameter)
    # .get: `state` is a defaultdict, and asking it for a parameter would add an empty entry.
    state: Mapping[str, Any] = optimizer.state.get(one.parameter, {})
    return {key: value for key, value in state.items() if value is not None}


def slot_documents(shards: Mapping[str, LocalShard], slots: Mapping[str, Slots]) -> dict[str, Any]:
    """Return per table and slot the shape that it has for the whole table, and the layout, as the optimizer keeps it.

    ``slots``: by name of the shard.
    """
    return {
        shards[name].table: {
            slot: {
                # Keys in order, so that it is stored as an object, not as pairs: a model may have thousands.
                "layout": "strided" if tensor.layout is torch.strided else "sparse",
                "shape": [shards[name].num_rows, *_row_shape(tensor, shards[name].dim)],
            }
            for slot, tensor in named.items()
        }
        for name, named in slots.items()
    }


def _row_shape(slot: torch.Tensor, dim: int) -> list[int]:
    """The shape of one row of a slot of the whole table."""
    return list(slot.shape[1:]) if slot_kind(slot) == "row" else [dim]


def find_local_shards(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], declared: Sequence[str], ranks: Ranks
) -> tuple[dict[str, nn.Parameter], list[LocalShard]]:
    """Return the plain tables of a model by name, and every shard on this rank: those tables and sharded ones.

    Raises
    ------
    TableNotFound, BadDtype, Unsupported
    """
    _refuse_divided(model, optimizers)
    plain = table_parameters(model, declared)
    several = ranks.world > 1
    shards = [whole_shard(name, table, optimizers, is_replicated=several) for name, table in plain.items()]
    shards += find_shards(model, optimizers)
    for shard in shards:
        table_dtype_name(shard.weight, shard.table)
    return plain, shards


def _refuse_divided(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Return if each rank has dense tensors and their optimizer state whole: rank 0 saves them for all.

    Raises
    ------
    Unsupported
    """
    numbered = ((f"optimizer {index}", one) for index, one in enumerate(optimizers))
    named = [*model.named_modules(), *model.named_parameters(), *model.named_buffers(), *numbered]
    for module, kind, remedy in _DIVIDED:
        # A process that has not imported a class has no object of it, and importing these takes up to a second.
        divided = getattr(sys.modules.get(module), kind, ())
        if found := next((name or "the model" for name, one in named if isinstance(one, divided)), None):
            raise Unsupported(
                f"{found!r} is a {kind}: each rank has only a part, and a manager saves dense tensors and their "
                f"optimizer state whole, from rank 0; {remedy}",
                found=found,
            )
