"""Assigns shards to relays: balanced by size, deterministic, with few changes to a former assignment. Pure.

Servers of a shard read it through one relay, so a larger shard is a larger load. Longest processing time first
(R. L. Graham, 1969) gives every relay at most 4/3 of the best possible largest load. A former assignment changes only
as far as this bound requires.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from cnr_store.errors import BadInput

Shard = TypeVar("Shard", bound=Hashable)

_SLACK = 1.05
"""A kept assignment may exceed the mean by this factor. Then the remaining shards nearly always fit."""


def assign_shards(
    sizes: Mapping[Shard, int], relays: Sequence[str], *, before: Mapping[str, Sequence[Shard]] | None = None
) -> dict[str, tuple[Shard, ...]]:
    """Return each relay's shards. No I/O; the order of the arguments does not matter.

    The largest load is at most 4/3 of the best possible one. With ``before``, shards keep their relay as far as the
    balance allows: if a relay is removed, only its shards change; if one is added, about as many as it takes over.

    Parameters
    ----------
    sizes
        Shard to its bytes, or any measure of its traffic.
    relays
        Names.
    before
        The assignment in use; it may contain other relays and shards. None: no assignment is in use.

    Raises
    ------
    BadInput
        No relay, a duplicate relay, or a size below 0.

    Examples
    --------
    >>> first = assign_shards({0: 50, 1: 40, 2: 30, 3: 30}, ["a", "b"])
    >>> first
    {'a': (0, 3), 'b': (1, 2)}
    >>> assign_shards({0: 50, 1: 40, 2: 30, 3: 30}, ["a", "b", "c"], before=first)
    {'a': (0,), 'b': (1,), 'c': (2, 3)}
    """
    names = sorted(relays)
    if not names or len(set(names)) != len(names):
        raise BadInput(f"relays are {names[:10]}; give at least one, with distinct names", found=names[:10])
    wrong = next((shard for shard, size in sizes.items() if not size >= 0), None)
    if wrong is not None:
        raise BadInput(f"shard {wrong!r} has size {sizes[wrong]}; give 0 or more", found=sizes[wrong])
    order = sorted(sizes, key=lambda shard: (-sizes[shard], *_name(shard)))
    fresh = _largest_first(order, sizes, {name: [] for name in names})
    if before is not None:
        limit = _load(fresh, sizes)
        allowed = max(limit, _SLACK * _lower_bound(order, sizes, len(names)))
        same = _kept(order, sizes, names, before, allowed)
        if before.keys() >= set(names) and _is_as_before(same, before):
            return _sorted(same)
        kept = _kept(order, sizes, names, before, limit)
        if _load(kept, sizes) <= allowed:
            return _sorted(kept)
        fresh = _renamed(fresh, sizes, before)
    return _sorted(fresh)


def _kept(
    order: Sequence[Shard],
    sizes: Mapping[Shard, int],
    names: Sequence[str],
    before: Mapping[str, Sequence[Shard]],
    limit: float,
) -> dict[str, list[Shard]]:
    """Return the former assignment with the loads above ``limit`` reduced, and unassigned shards placed."""
    owner = {shard: name for name in sorted(before, reverse=True) for shard in before[name]}
    kept: dict[str, list[Shard]] = {name: [] for name in names}
    for shard in order:
        if owner.get(shard) in kept:
            kept[owner[shard]].append(shard)
    for shards in kept.values():
        excess = sum(sizes[shard] for shard in shards) - limit
        while excess > 0:
            # Remove just the excess, in as few shards as possible; a larger one could overload another relay.
            excessive = next((shard for shard in shards if sizes[shard] <= excess), shards[-1])
            shards.remove(excessive)
            excess -= sizes[excessive]
    placed = {shard for shards in kept.values() for shard in shards}
    return _largest_first([shard for shard in order if shard not in placed], sizes, kept)


def _is_as_before(found: Mapping[str, Sequence[Shard]], before: Mapping[str, Sequence[Shard]]) -> bool:
    """Return whether every shard keeps its relay."""
    return all(set(shards) <= set(before[name]) for name, shards in found.items())


def _largest_first(
    order: Sequence[Shard], sizes: Mapping[Shard, int], start: Mapping[str, Sequence[Shard]]
) -> dict[str, list[Shard]]:
    """Assign each shard in turn to the relay with the least load; the first by name if several have it."""
    found = {name: list(shards) for name, shards in start.items()}
    loads = [(sum(sizes[shard] for shard in shards), name) for name, shards in found.items()]
    heapq.heapify(loads)
    for shard in order:
        load, name = loads[0]
        found[name].append(shard)
        heapq.heapreplace(loads, (load + sizes[shard], name))
    return found


def _lower_bound(order: Sequence[Shard], sizes: Mapping[Shard, int], count: int) -> float:
    """Return a lower bound of the largest load: the mean, the largest shard, and two that must share a relay."""
    ranked = [sizes[shard] for shard in order]
    pair = ranked[count - 1] + ranked[count] if len(ranked) > count else 0
    return max(sum(ranked) / count, ranked[0] if ranked else 0, pair)


def _renamed(
    fresh: Mapping[str, Sequence[Shard]], sizes: Mapping[Shard, int], before: Mapping[str, Sequence[Shard]]
) -> dict[str, list[Shard]]:
    """Return the same groups, each assigned to the free relay that already has most of it."""
    owner = {shard: name for name in sorted(before, reverse=True) for shard in before[name]}
    groups = [list(fresh[name]) for name in sorted(fresh)]
    shared = sorted(
        (
            (-sum(1 + sizes[shard] for shard in group if owner.get(shard) == name), index, name)
            for index, group in enumerate(groups)
            for name in fresh
        ),
        key=lambda item: item,
    )
    named: dict[str, list[Shard]] = {}
    taken: set[int] = set()
    for _, index, name in shared:
        if name not in named and index not in taken:
            named[name] = groups[index]
            taken.add(index)
    return named


def _load(assignment: Mapping[str, Sequence[Shard]], sizes: Mapping[Shard, int]) -> int:
    """Return the largest load."""
    return max(sum(sizes[shard] for shard in shards) for shards in assignment.values())


def _name(shard: Hashable) -> tuple[str, str]:
    return type(shard).__name__, f"{shard:020d}" if isinstance(shard, int) else repr(shard)


def _sorted(assignment: Mapping[str, Sequence[Shard]]) -> dict[str, tuple[Shard, ...]]:
    return {name: tuple(sorted(assignment[name], key=_name)) for name in sorted(assignment)}
