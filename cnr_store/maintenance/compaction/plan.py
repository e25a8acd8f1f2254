"""Choose which run of a chain to compact, from the sizes recorded in a commit record. Pure.

Deltas are sorted into size tiers, each ``fanout`` times the one below. ``fanout`` deltas of one tier are merged into
one delta of the next tier, so a byte is rewritten about once per tier: O(log n) times. When the deltas together exceed
their allowed share of the baseline, they are merged into it. That rewrites the baseline; its cost is proportional to
the bytes that arrived since the last such merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cnr_store.errors import BadInput
from cnr_store.format.records import ChainEntry, SegmentKind
from cnr_store.runtime.arguments import checked_count, checked_number
from cnr_store.types import MAX_CHAIN


@dataclass(frozen=True, slots=True)
class CompactionPolicy:
    """Limits on what a restore reads; tighter limits make compaction write more.

    Attributes
    ----------
    max_chain
        Most segments of a chain, 1 to 64. Each costs a restore one more manifest, and a row up to one more lookup.
    max_restore_ratio
        Most bytes of a chain divided by the bytes of its baseline; above 1. A smaller ratio rewrites the baseline more
        often: at most ``ratio / (ratio - 1)`` bytes of baseline for each byte of deltas.
    fanout
        Number of deltas of similar size that are compacted into one, 2 to 64.
    """

    max_chain: int = 16
    max_restore_ratio: float = 1.5
    fanout: int = 4

    def __post_init__(self) -> None:
        for name, least, most in (("max_chain", 1, MAX_CHAIN), ("fanout", 2, MAX_CHAIN)):
            checked_count(name, getattr(self, name), least=least, most=most)
        checked_number("max_restore_ratio (1 is the baseline alone)", self.max_restore_ratio, above=1)


DEFAULT_POLICY = CompactionPolicy()


@dataclass(frozen=True, slots=True)
class Run:
    """Positions [start, stop) of a chain that become one segment.

    Attributes
    ----------
    kind
        Kind of the result: ``baseline`` if the run begins with the chain's baseline.
    reason
        Why the run was chosen, as text for a report.
    """

    start: int
    stop: int
    kind: SegmentKind
    reason: str

    def __len__(self) -> int:
        return self.stop - self.start


def choose_run(chain: Sequence[ChainEntry], policy: CompactionPolicy) -> Run | None:
    """Return the run to compact next, or None if the chain satisfies the policy. Pure, deterministic.

    Repeated compaction of the returned run ends after at most ``len(chain) - 1`` runs. The chain then has at most
    ``max_chain`` segments and at most ``max_restore_ratio`` times the bytes of its baseline.
    """
    if len(chain) < 2:
        return None
    held, allowed = sum(entry.size_bytes for entry in chain[1:]), (policy.max_restore_ratio - 1) * chain[0].size_bytes
    if held > allowed:
        share = f"{held / chain[0].size_bytes:.0%} of" if chain[0].size_bytes else "more than"
        reason = f"the deltas have {share} the baseline's bytes; the policy allows {policy.max_restore_ratio - 1:.0%}"
        return Run(0, len(chain), "baseline", reason)
    too_long = len(chain) > policy.max_chain
    for least in range(policy.fanout, 1 if too_long else policy.fanout - 1, -1):
        tier = _fullest_tier(chain, policy.fanout, least)
        if tier is not None:
            start, stop = tier
            return Run(start, stop, "delta", f"{stop - start} deltas of similar size, or smaller ones between them")
    if not too_long:
        return None
    reason = f"the chain has {len(chain)} segments; the policy allows {policy.max_chain}"
    start = policy.max_chain - 1
    # Every tier has at most one delta here, so the newest deltas are the smallest.
    return Run(start, len(chain), "delta" if start else "baseline", reason)


def run_between(chain: Sequence[ChainEntry], start: int, stop: int) -> Run:
    """Return the run of the positions [start, stop) of a chain.

    Raises
    ------
    BadInput
        The positions are not at least two segments of the chain. A chain of one segment has no run.
    """
    if not (0 <= start < stop <= len(chain) and stop - start >= 2):
        raise BadInput(
            f"a run needs at least two segments of the chain, found positions [{start}, {stop}) of {len(chain)}",
            expected=(0, len(chain)), found=(start, stop),
        )  # fmt: skip
    return Run(start, stop, chain[start].kind, "asked for")


def _fullest_tier(chain: Sequence[ChainEntry], fanout: int, least: int) -> tuple[int, int] | None:
    """Return the positions [start, stop) of the highest tier with at least ``least`` deltas, or None.

    A delta has the tier of the largest delta from it to the end of the chain. So tiers are contiguous and never rise
    along the chain: a small delta before a large one is compacted with the large one.
    """
    tiers: list[int] = []
    for entry in reversed(chain[1:]):
        tiers.append(max(_tier(entry.size_bytes, fanout), tiers[-1] if tiers else 0))
    tiers.reverse()
    for tier in sorted(set(tiers), reverse=True):
        if tiers.count(tier) >= least:
            start = 1 + tiers.index(tier)
            return start, start + tiers.count(tier)
    return None


def _tier(size_bytes: int, fanout: int) -> int:
    """Return the largest k with fanout ** k <= size_bytes, in integers: equal on every machine."""
    tier = 0
    while size_bytes >= fanout:
        size_bytes //= fanout
        tier += 1
    return tier
