"""What a hook or optimizer that compresses communication must save, per rank, and what other ranks make of it. Pure.

Error feedback is state: what a rank held back is sent later. It differs from rank to rank, so each rank saves its own,
and another number of ranks gets what keeps the sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch

from cnr_store.errors import BadInput, CorruptStore
from cnr_store.types import JsonValue

Rule = Literal["mean", "concatenate", "same"]
"""What another number of ranks makes of a tensor.

``mean``: each rank's own share of a mean over ranks (worker errors, residuals). A new rank gets the mean of its group
of old ones, or of all where neither number divides the other, so that the mean over ranks stays.
``concatenate``: the ranks' chunks of one vector (server errors), cut by `chunk`. They are joined and cut anew.
``same``: equal on all ranks (frozen variances). A new rank gets that of rank 0.
"""


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """One tensor of a rank's state: any dtype and device; ``concatenate`` needs one dimension."""

    value: torch.Tensor
    rule: Rule


@dataclass(frozen=True, slots=True, eq=False)
class RankState:
    """The state of one rank.

    ``tensors``, by name: all ranks have the same names, rules and dtypes, and but for ``concatenate`` the same shapes.
    Name one by its parameter, never by a bucket of DDP: buckets change. ``scalars``: plain JSON, at most 64 kB, such as
    counters and schedules. On another number of ranks all get those of rank 0.
    """

    tensors: Mapping[str, StateTensor]
    scalars: Mapping[str, JsonValue] = field(default_factory=dict)


@runtime_checkable
class CommunicationState(Protocol):
    """A hook or optimizer whose state a manager saves and restores."""

    @property
    def name(self) -> str:
        """A name that no other one of the training has; part of names in the store."""

    def rank_state(self) -> RankState:
        """Return this rank's state; live tensors. The caller copies them before it trains on. Does not block."""

    def load_rank_state(self, state: RankState) -> None:
        """Take over a state of `rank_state`, copying its tensors, also before the first step.

        The state of other parameters or settings raises `BadInput`, and changes nothing.
        """


def chunk(length: int, rank: int, world: int, *, multiple: int = 8) -> tuple[int, int]:
    """Return the half-open range of a vector that a rank owns: equal shares, rounded up to ``multiple``.

    No element is padding: the ranges cover the vector and nothing else. The last one is shorter, and ranks
    behind the end own an empty one.

    Examples
    --------
    >>> [chunk(20, rank, 3) for rank in range(3)]
    [(0, 8), (8, 16), (16, 20)]
    """
    size = -(-length // (world * multiple)) * multiple
    return min(rank * size, length), min((rank + 1) * size, length)


def reshard(states: Sequence[RankState], rank: int, world: int) -> RankState:
    """Return the state of one of ``world`` ranks, made of the states of all ranks that saved, by the tensors' rules.

    On as many ranks it is the saved one itself. Tensors are looked up one by one, so ``tensors`` may read them lazily.
    Means are computed in float64 and rounded once. A rank that does not exist raises `BadInput`, different tensors of
    the ranks that saved `CorruptStore`.
    """
    if not states or not 0 <= rank < world:
        raise BadInput(f"rank {rank} of {world} cannot get the state of {len(states)} ranks", found=rank)
    if world == len(states):
        return states[rank]
    first = states[0]
    for number, other in enumerate(states):
        if other.tensors.keys() != first.tensors.keys():
            expected, found = sorted(first.tensors), sorted(other.tensors)
            raise CorruptStore(
                f"rank {number} saved communication state {found}, rank 0 {expected}; restore another version",
                expected=expected, found=found,
            )  # fmt: skip
    tensors = {}
    for name, held in first.tensors.items():
        value = held.value
        if held.rule == "concatenate":
            whole = torch.cat([state.tensors[name].value.flatten() for state in states])
            value = whole[slice(*chunk(len(whole), rank, world))]
        elif held.rule == "mean":
            value = _mean(states, name, _group(len(states), rank, world))
        tensors[name] = StateTensor(value, held.rule)
    return RankState(tensors, first.scalars)


def _group(saved: int, rank: int, world: int) -> range:
    """The old ranks whose mean a new rank gets."""
    if saved % world == 0:
        size = saved // world
        return range(rank * size, (rank + 1) * size)
    if world % saved == 0:
        at = rank * saved // world
        return range(at, at + 1)
    return range(saved)


def _mean(states: Sequence[RankState], name: str, group: range) -> torch.Tensor:
    first = states[group[0]].tensors[name].value
    if len(group) == 1:
        return first
    total = first.to(torch.float64)
    for number in group[1:]:
        other = states[number].tensors[name].value
        if other.shape != first.shape:
            raise CorruptStore(
                f"communication state {name!r} has shape {tuple(other.shape)} on rank {number}, "
                f"{tuple(first.shape)} on rank {group[0]}; restore another version",
                expected=tuple(first.shape), found=tuple(other.shape),
            )  # fmt: skip
        total = total + other
    return (total / len(group)).to(first.dtype)
