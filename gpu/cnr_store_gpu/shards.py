"""Tables, or pieces of them, that are looked up by other code than an embedding module of torch.

Why this module exists: sharded models, embedding servers and a user's own kernels have rows too. They report their
lookups and updates to the tracker; here is what it must know of each before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import nn

from cnr_store.errors import BadInput, BadRowIds, BadShape
from cnr_store_gpu.bitmap import Ids
from cnr_store_gpu.memory import Tensors
from cnr_store_gpu.optimizers import RowMovement


class ChangeSource(Protocol):
    """Something that knows itself which rows changed: a hash table with scores, another tracker."""

    def take(self) -> Ids:
        """Return the rows that changed since the last call, integers in any order, and forget them."""


@dataclass(frozen=True, slots=True, eq=False)
class WatchedShard:
    """Rows that the caller looks up and reports with ``RowTracker.lookup`` and ``updated``; no hook sees them.

    Attributes
    ----------
    name
        Its name in ``take``; no other table or shard has it.
    num_rows
        Rows of this shard: ids are local to it.
    weight
        A live view ``(num_rows, dim)``, for the check of unreported writes and for ``verify_rows``. A
        parameter of an attached optimizer is followed by its steps. None, or a tensor without a version: not checked.
    movement
        What its optimizer moves at each ``updated``; None for the rows looked up. An attached optimizer overrules it.
    device
        Where its rows are marked. None: where ``weight`` is, else the CPU.
    memory
        Returns the tensors that hold its rows and row state, as they are now, if ``weight`` is a view of another tensor
        whose memory may be replaced. None: ``weight`` holds them.
    """

    name: str
    num_rows: int
    weight: torch.Tensor | None = None
    movement: RowMovement | None = None
    device: torch.device | str | None = None
    memory: Tensors | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """Where the slices of one ``lookup_slices`` go."""

    words: torch.Tensor
    first_words: torch.Tensor
    num_rows: torch.Tensor
    places: tuple[int, ...]


def check_shards(shards: Iterable[WatchedShard], tables: Iterable[str], weights: Iterable[torch.Tensor]) -> None:
    """Check shards against each other and against a model's tables.

    Raises
    ------
    BadInput
        A name that is taken, or a weight that is a table of the model already.
    BadShape
        A weight that has not ``num_rows`` rows.
    """
    names, known = set(tables), {id(weight) for weight in weights}
    for shard in shards:
        if shard.name in names:
            raise BadInput(
                f"shard {shard.name!r}: another table has this name; give each shard one of its own", table=shard.name
            )
        names.add(shard.name)
        if shard.weight is None:
            continue
        if id(shard.weight) in known:
            raise BadInput(
                f"shard {shard.name!r}: its weight is tracked under another name; leave it out of the tables "
                f"(tables={{}} tracks shards only)",
                table=shard.name,
            )
        known.add(id(shard.weight))
        if shard.weight.ndim != 2 or shard.weight.shape[0] != shard.num_rows:
            raise BadShape(
                f"shard {shard.name!r}: expected a weight of ({shard.num_rows}, dim), found "
                f"{tuple(shard.weight.shape)}",
                table=shard.name,
                expected=(shard.num_rows, "dim"),
                found=tuple(shard.weight.shape),
            )


def tensor_of(name: str, ids: Ids) -> torch.Tensor:
    """Return row ids as a tensor, where they are; raises BadRowIds if they are no integers."""
    tensor = ids if isinstance(ids, torch.Tensor) else torch.from_numpy(np.array(ids, ndmin=1))
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        if tensor.numel() == 0 and not isinstance(ids, torch.Tensor):
            return tensor.to(torch.int64)
        raise BadRowIds(
            f"row ids of table {name!r}: expected integers, found {tensor.dtype}; pass row numbers, not a mask",
            table=name,
            expected="int64",
            found=str(tensor.dtype),
        )
    return tensor.detach()


def bounds_of(ends: Sequence[int] | torch.Tensor, num_slices: int, num_ids: int, device: torch.device) -> torch.Tensor:
    """Return the ends with a leading 0, int64, on the device."""
    if len(ends) != num_slices:
        raise BadShape(
            f"{num_slices} names need as many ends of slices, found {len(ends)}", expected=num_slices, found=len(ends)
        )
    if isinstance(ends, torch.Tensor):
        return nn.functional.pad(ends.to(device, torch.int64), (1, 0))
    bounds = [0, *ends]
    if any(start > stop for start, stop in pairwise(bounds)) or bounds[-1] > num_ids:
        raise BadShape(
            f"ends of slices {list(ends)[:8]} of {num_ids} ids: expected ascending numbers up to {num_ids}",
            expected=num_ids,
            found=list(ends)[:8],
        )
    return torch.tensor(bounds, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
