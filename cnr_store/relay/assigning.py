"""Which relay serves which shard: balanced by size, the same wherever it is computed, and few moves. Pure.

Servers of a shard read it through one relay; the larger the shard, the more the relay has to send. Longest processing
time first (R. L. Graham, 1969) gives every relay at most 4/3 of the best possible largest load. A former assignment is
changed only as far as that needs.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from cnr_store.errors import BadInput

Shard = TypeVar("Shard", bound=Hashable)

_SLACK = 1.05
"""A kept assignment may be so much above the mean: then what is left over nearly always finds a place."""


def assign_shards(
    sizes: Mapping[Shard, int], relays: Sequence[str], *, before: Mapping[str, Sequence[Shard]] | None = None
) -> dict[str, tuple[Shard, ...]]:
    """Return each relay's shards. No I/O; the order of the arguments does not matter.

    The largest load is at most 4/3 of the best possible one. With ``before`` shards stay where they are as far as the
    balance allows: when a relay leaves, its own move; when one joins, about as many as it takes over.

    Parameters
    ----------
    sizes
        Shard to its bytes, or any measure of its traffic.
    relays
        Names.
    before
        An assignment that is in use: of other relays and shards, it may be. None: a new one.

    Raises
    ------
    BadInput
        No relay, one twice, or a size below 0.

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
        raise BadInput(f"relays are {names[:10]}; give one name for each, and at least one", found=names[:10])
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
    """The former assignment, relieved where a relay has more than ``limit``, and what is free then placed anew."""
    owner = {shard: name for name in sorted(before, reverse=True) for shard in before[name]}
    kept: dict[str, list[Shard]] = {name: [] for name in names}
    for shard in order:
        if owner.get(shard) in kept:
            kept[owner[shard]].append(shard)
    for shards in kept.values():
        excess = sum(sizes[shard] for shard in shards) - limit
        while excess > 0:
            # Just what is too much, in as few as that takes; a larger one would be too much for another relay.
            going = next((shard for shard in shards if sizes[shard] <= excess), shards[-1])
            shards.remove(going)
            excess -= sizes[going]
    placed = {shard for shards in kept.values() for shard in shards}
    return _largest_first([shard for shard in order if shard not in placed], sizes, kept)


def _is_as_before(found: Mapping[str, Sequence[Shard]], before: Mapping[str, Sequence[Shard]]) -> bool:
    """Whether every shard stays with the relay that had it."""
    return all(set(shards) <= set(before[name]) for name, shards in found.items())


def _largest_first(
    order: Sequence[Shard], sizes: Mapping[Shard, int], start: Mapping[str, Sequence[Shard]]
) -> dict[str, list[Shard]]:
    """Give each shard in turn to the relay with the least load; of several to the first by name."""
    found = {name: list(shards) for name, shards in start.items()}
    loads = [(sum(sizes[shard] for shard in shards), name) for name, shards in found.items()]
    heapq.heapify(loads)
    for shard in order:
        load, name = loads[0]
        found[name].append(shard)
        heapq.heapreplace(loads, (load + sizes[shard], name))
    return found


def _lower_bound(order: Sequence[Shard], sizes: Mapping[Shard, int], count: int) -> float:
    """What no assignment can be below: the mean, the largest shard, and two that must share a relay."""
    ranked = [sizes[shard] for shard in order]
    pair = ranked[count - 1] + ranked[count] if len(ranked) > count else 0
    return max(sum(ranked) / count, ranked[0] if ranked else 0, pair)


def _renamed(
    fresh: Mapping[str, Sequence[Shard]], sizes: Mapping[Shard, int], before: Mapping[str, Sequence[Shard]]
) -> dict[str, list[Shard]]:
    """The same groups, each given to the relay that has most of it already, as far as that one is free."""
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
    """The largest load."""
    return max(sum(sizes[shard] for shard in shards) for shards in assignment.values())


def _name(shard: Hashable) -> tuple[str, str]:
    return type(shard).__name__, f"{shard:020d}" if isinstance(shard, int) else repr(shard)


def _sorted(assignment: Mapping[str, Sequence[Shard]]) -> dict[str, tuple[Shard, ...]]:
    return {name: tuple(sorted(assignment[name], key=_name)) for name in sorted(assignment)}
