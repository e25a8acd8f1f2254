"""Which ranks keep copies of what a rank saves, and which of them gives them back. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cnr_store.errors import BadInput


def place_copies(hosts: Sequence[str], copies: int) -> tuple[tuple[int, ...], ...]:
    """Return, by rank, the ranks that keep its copies: ``copies`` of them, each on another host, none on its own.

    As in Gemini (Wang et al., SOSP 2023, section 4): hosts are cut into groups of ``copies + 1``, in each of which all
    keep copies of all. If they do not divide evenly, the last group is a larger one, in which each host keeps those of
    the ``copies`` before it. So every host keeps as much, and a loss of hosts loses copies only if they are neighbours
    in a group. Ranks that share the only host count as hosts.

    Parameters
    ----------
    hosts
        The name of each rank's host, by rank.

    Raises
    ------
    BadInput
        There are not so many other hosts (or ranks, on one host).
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    places = list(by_host.values()) if len(by_host) > 1 else [[rank] for rank in range(len(hosts))]
    size = copies + 1
    if len(places) < size:
        what = "hosts" if len(by_host) > 1 else "ranks"
        raise BadInput(
            f"PeerCopies(copies={copies}) needs {size} {what}; found {len(places)}", expected=size, found=len(places)
        )
    whole = len(places) // size - (len(places) % size > 0)
    found: dict[int, tuple[int, ...]] = {}
    for at, ranks in enumerate(places):
        start = min(at // size, whole) * size
        length = size if at // size < whole else len(places) - whole * size
        for number, rank in enumerate(ranks):
            others = (places[start + (at - start + step) % length] for step in range(1, size))
            found[rank] = tuple(other[number % len(other)] for other in others)
    return tuple(found[rank] for rank in range(len(hosts)))


def choose_givers(lost: Sequence[int], kept_bytes: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return which rank gives each lost rank its objects: the first of those that have most of their bytes.

    Parameters
    ----------
    kept_bytes
        By rank: how many bytes it keeps, by the rank whose they are. Lost ranks of which nobody has any are left out.
    """
    found = {}
    for owner in lost:
        most = max(kept.get(owner, 0) for kept in kept_bytes)
        if most:
            found[owner] = next(rank for rank, kept in enumerate(kept_bytes) if kept.get(owner, 0) == most)
    return found


def fit(sizes: Mapping[tuple[int, str], int], room_bytes: int) -> list[tuple[int, str]]:
    """Return which objects of so many bytes are taken, in their order: each that there is still room for."""
    found = []
    for key, size in sizes.items():
        if size <= room_bytes:
            room_bytes -= size
            found.append(key)
    return found
