"""Decides how what the ranks' plans hold is stored: as tables, as their slots, as dense tensors or as values. Pure.

A table and its slots must come from one rank, shard by shard, and from the same rank in every save: the mirror that a
delta is compared with is there. So items of which several ranks have copies may go to another rank than DCP chose.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from cnr_store.errors import BadInput
from cnr_store.format.limits import MAX_DIM, MAX_SLOTS
from cnr_store.types import Rectangle

TABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLAG = ".state."


@dataclass(frozen=True, slots=True)
class TableRule:
    """Which two-dimensional float tensors are stored as tables: by patterns of names, or from ``min_rows`` on."""

    names: tuple[str, ...] | None
    min_rows: int

    def takes(self, name: str, size: torch.Size, dtype: torch.dtype) -> bool:
        """Return whether a tensor is stored as a table.

        Raises
        ------
        BadInput
            Its name is one of the patterns, without a wildcard, and it cannot be a table.
        """
        can_be = len(size) == 2 and dtype in TABLE_DTYPES and min(size) > 0 and size[1] <= MAX_DIM
        if self.names is None:
            return can_be and size[0] >= self.min_rows
        if not can_be and name in self.names:
            raise BadInput(
                f"tensor {name!r} is named in tables= and is {dtype} of shape {tuple(size)}; a table has two "
                f"dimensions, at most {MAX_DIM} columns, and float32, float16 or bfloat16 values",
                table=name, expected="(rows, columns) of floats", found=tuple(size),
            )  # fmt: skip
        return can_be and any(fnmatchcase(name, pattern) for pattern in self.names)


@dataclass(frozen=True, slots=True)
class ShardItems:
    """One shard of a table as one rank writes it: which items have its values and its slots."""

    table: str
    rectangle: Rectangle
    values: MetadataIndex
    slots: Mapping[str, MetadataIndex] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatheredTensor:
    """A dense tensor that rank 0 does not have as a whole: the ranks send it their pieces."""

    name: str
    size: torch.Size
    dtype: torch.dtype
    pieces: tuple[tuple[int, MetadataIndex, ChunkStorageMetadata], ...]
    """Rank, item, and where the piece lies."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank does in one save.

    Attributes
    ----------
    save
        The number of the save, from the coordinator.
    layout
        Names the tables, slots and shards of all ranks: another layout needs another writer.
    tables
        The names of all tables.
    shards, values
        What this rank writes: shards of tables, and items that are no tensors.
    dense
        Items that are dense tensors; of rank 0 alone.
    gathered
        The same on every rank.
    slots
        Name of the tensor to the table and slot as which it is stored; the same on every rank.
    """

    save: int
    layout: str
    tables: tuple[str, ...]
    shards: tuple[ShardItems, ...]
    dense: tuple[MetadataIndex, ...]
    gathered: tuple[GatheredTensor, ...]
    values: tuple[MetadataIndex, ...]
    slots: Mapping[str, tuple[str, str]]


Owners = dict[MetadataIndex, int]
"""Which rank writes an item."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the state dict and its pieces."""

    name: str
    size: torch.Size
    dtype: torch.dtype
    pieces: Mapping[MetadataIndex, ChunkStorageMetadata]


def share_out(
    plans: Sequence[SavePlan], copies: Sequence[Sequence[WriteItem]], rule: TableRule, owners: Owners, save: int
) -> list[SavePlan]:
    """Return the plans of the ranks with their `RankShare` as storage data. Pure but for ``owners``, which it updates.

    Parameters
    ----------
    plans
        What DCP lets each rank write.
    copies
        By rank, the items that it could write: its plan before DCP has removed what another rank writes.
    owners
        Who wrote which piece of a table in the save before.

    Raises
    ------
    BadInput
        Pieces of a tensor are missing, or ``tables=`` names what cannot be a table.
    """
    held: dict[MetadataIndex, list[int]] = {}
    for rank, could_write in enumerate(copies):
        for item in could_write:
            held.setdefault(item.index, []).append(rank)
    chosen = {item.index: rank for rank, plan in enumerate(plans) for item in plan.items}
    items = {item.index: item for plan in plans for item in plan.items}
    tensors = _tensors(items.values())
    tables = {name: one for name, one in tensors.items() if rule.takes(name, one.size, one.dtype)}
    chosen |= {
        index: owners[index]
        for one in tables.values()
        for index in one.pieces
        if owners.get(index) in held.get(index, ())
    }
    slots = _slots(tensors, tables, chosen, held)
    tables = {name: one for name, one in tables.items() if name not in slots}
    shards = _shards(tables, tensors, slots, chosen)
    dense = [one for name, one in tensors.items() if name not in tables and name not in slots]
    owners.clear()
    owners |= {index: chosen[index] for name in (*tables, *slots) for index in tensors[name].pieces}
    gathered: list[GatheredTensor] = []
    at_zero: list[MetadataIndex] = []
    for one in dense:
        [first, *others] = one.pieces
        if not others and 0 in held.get(first, (chosen[first],)):
            chosen[first] = 0
            at_zero.append(first)
        else:
            pieces = tuple((chosen[index], index, chunk) for index, chunk in one.pieces.items())
            gathered.append(GatheredTensor(one.name, one.size, one.dtype, pieces))
    values = [index for index, item in items.items() if item.type is WriteItemType.BYTE_IO]
    chosen |= {index: 0 for index in values if 0 in held.get(index, ())}
    layout = _fingerprint(tables, tensors, slots, shards)
    shares = (
        RankShare(
            save, layout, tuple(sorted(tables)), tuple(shards.get(rank, ())),
            dense=tuple(at_zero) if rank == 0 else (),
            gathered=tuple(gathered),
            values=tuple(index for index in values if chosen[index] == rank),
            slots=slots,
        )
        for rank in range(len(plans))
    )  # fmt: skip
    return [
        replace(plan, items=[one for index, one in items.items() if chosen[index] == rank], storage_data=share)
        for rank, (plan, share) in enumerate(zip(plans, shares, strict=True))
    ]


def _tensors(items: Iterable[WriteItem]) -> dict[str, PlannedTensor]:
    """Return the tensors of all plans; each has at least one piece.

    Raises
    ------
    BadInput
    """
    found: dict[str, PlannedTensor] = {}
    pieces: dict[str, dict[MetadataIndex, ChunkStorageMetadata]] = {}
    for item in items:
        data = item.tensor_data
        if data is None:
            continue
        name = item.index.fqn
        pieces.setdefault(name, {})[item.index] = data.chunk
        found.setdefault(name, PlannedTensor(name, torch.Size(data.size), data.properties.dtype, pieces[name]))
    for name, one in found.items():
        there = sum(math.prod(chunk.sizes) for chunk in one.pieces.values())
        if there != math.prod(one.size):
            raise BadInput(
                f"tensor {name!r} of shape {tuple(one.size)}: the ranks hold {there} of its {math.prod(one.size)} "
                "elements; a shard is missing, or two ranks hold the same one at different offsets",
                table=name, expected=math.prod(one.size), found=there,
            )  # fmt: skip
    return found


def _slots(
    tensors: Mapping[str, PlannedTensor],
    tables: Mapping[str, PlannedTensor],
    chosen: Owners,
    held: Mapping[MetadataIndex, list[int]],
) -> dict[str, tuple[str, str]]:
    """Return which tensors are slots of which table, by the names of `get_optimizer_state_dict`.

    ``....state.<name of the parameter>.<slot>``, of the table's shape and cut as the table is, or (rows,) of a table
    that is not cut by columns. Gives the pieces of the slot to the ranks that write the table's.
    """
    by_suffix: dict[str, list[str]] = {}
    for name in tables:
        if _FLAG not in f".{name}":
            for suffix in _suffixes(name):
                by_suffix.setdefault(suffix, []).append(name)
    slots: dict[str, tuple[str, str]] = {}
    taken: dict[str, set[str]] = {}
    for name, one in sorted(tensors.items()):
        table, slot = _named_slot(name, by_suffix)
        if table is None or one.dtype not in TABLE_DTYPES:
            continue
        beside = _beside(one, tables[table])
        names = taken.setdefault(table, set())
        if beside is None or slot in names or len(names) >= MAX_SLOTS:
            continue
        if all(chosen[mine] in held.get(index, (chosen[index],)) for index, mine in beside.items()):
            chosen |= {index: chosen[mine] for index, mine in beside.items()}
            names.add(slot)
            slots[name] = (table, slot)
    return slots


def _named_slot(name: str, by_suffix: Mapping[str, list[str]]) -> tuple[str | None, str]:
    """Return the table and slot that the name of a tensor says it is; (None, ...) for others, and if in doubt."""
    path, _, slot = name.rpartition(".")
    at = f".{path}".find(_FLAG)
    while at >= 0:
        found = by_suffix.get(path[at + len(_FLAG) - 1 :], [])
        if len(found) == 1:
            return found[0], slot
        at = f".{path}".find(_FLAG, at + 1)
    return None, slot


def _suffixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _beside(slot: PlannedTensor, table: PlannedTensor) -> dict[MetadataIndex, MetadataIndex] | None:
    """Return which piece of the table each piece of a slot lies beside; None if they are cut differently."""
    if slot.size not in (table.size, table.size[:1]):
        return None
    depth = len(slot.size)
    if depth == 1 and any(chunk.sizes[1] != table.size[1] for chunk in table.pieces.values()):
        return None
    mine = {(tuple(one.offsets[:depth]), tuple(one.sizes[:depth])): index for index, one in table.pieces.items()}
    beside = {index: mine.get((tuple(one.offsets), tuple(one.sizes))) for index, one in slot.pieces.items()}
    found = {index: piece for index, piece in beside.items() if piece is not None}
    return found if len(found) == len(beside) == len(mine) else None


def _shards(
    tables: Mapping[str, PlannedTensor],
    tensors: Mapping[str, PlannedTensor],
    slots: Mapping[str, tuple[str, str]],
    chosen: Owners,
) -> dict[int, list[ShardItems]]:
    """Return the shards of each rank; empty ones are left out."""
    of_table: dict[str, dict[str, str]] = {}
    for name, (table, slot) in slots.items():
        of_table.setdefault(table, {})[slot] = name
    shards: dict[int, list[ShardItems]] = {}
    for name, one in sorted(tables.items()):
        beside = {
            slot: {mine: index for index, mine in (_beside(tensors[full], one) or {}).items()}
            for slot, full in of_table.get(name, {}).items()
        }
        for index, chunk in one.pieces.items():
            if not math.prod(chunk.sizes):
                continue
            (row, column), (rows, columns) = chunk.offsets, chunk.sizes
            rectangle = Rectangle((row, row + rows), (column, column + columns))
            items = {slot: pieces[index] for slot, pieces in beside.items()}
            shards.setdefault(chosen[index], []).append(ShardItems(name, rectangle, index, items))
    return shards


def _fingerprint(
    tables: Mapping[str, PlannedTensor],
    tensors: Mapping[str, PlannedTensor],
    slots: Mapping[str, tuple[str, str]],
    shards: Mapping[int, Sequence[ShardItems]],
) -> str:
    """Return a digest of all that a writer is opened for."""
    known = [
        sorted((name, tuple(one.size), str(one.dtype)) for name, one in tables.items()),
        sorted((name, *slot, len(tensors[name].size), str(tensors[name].dtype)) for name, slot in slots.items()),
        sorted((rank, one.table, one.rectangle) for rank, held in shards.items() for one in held),
    ]
    return hashlib.sha256(repr(known).encode()).hexdigest()
