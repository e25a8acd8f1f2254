"""Which run of a chain to compact: decided from the sizes that a record states, before anything is read. Pure.

Deltas are ordered into tiers of bytes, each ``fanout`` times the one below. A tier that holds ``fanout`` deltas is
merged into one, which belongs to the next tier, so a byte is written again once or so per tier on its way up: O(log n)
times. When all deltas together outgrow their share of the baseline, they are merged into it: that writes the baseline
again, and has been paid for by the bytes that arrived since the last time.
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
    """How much may be read at a restore, and how much is written again to keep it so.

    Attributes
    ----------
    max_chain
        Most segments of a chain, 1 to 64. Each costs a restore one manifest more, and a row up to one lookup more.
    max_restore_ratio
        Most bytes of a chain, in multiples of those of its baseline; above 1. A smaller one writes the baseline more
        often: ``ratio / (ratio - 1)`` bytes of baseline for each byte of deltas, at most.
    fanout
        How many deltas of similar size are compacted into one, 2 to 64.
    """

    max_chain: int = 16
    max_restore_ratio: float = 1.5
    fanout: int = 4

    def __post_init__(self) -> None:
        for name, least, most in (("max_chain", 1, MAX_CHAIN), ("fanout", 2, MAX_CHAIN)):
            checked_count(name, getattr(self, name), least=least, most=most)
        checked_number("max_restore_ratio, of which the baseline alone is 1,", self.max_restore_ratio, above=1)


DEFAULT_POLICY = CompactionPolicy()


@dataclass(frozen=True, slots=True)
class Run:
    """Positions [start, stop) of a chain that become one segment.

    Attributes
    ----------
    kind
        Of the result: ``baseline`` where the run begins with the chain's baseline.
    reason
        Why, in words, for a report.
    """

    start: int
    stop: int
    kind: SegmentKind
    reason: str

    def __len__(self) -> int:
        return self.stop - self.start


def choose_run(chain: Sequence[ChainEntry], policy: CompactionPolicy) -> Run | None:
    """Return the run to compact next, or None when the chain is as the policy wants it. Pure, deterministic.

    Compacting what it returns until that is None ends after at most ``len(chain) - 1`` runs, and leaves a chain of at
    most ``max_chain`` segments and at most ``max_restore_ratio`` times the bytes of its baseline.
    """
    if len(chain) < 2:
        return None
    held, allowed = sum(entry.bytes for entry in chain[1:]), (policy.max_restore_ratio - 1) * chain[0].bytes
    if held > allowed:
        share = f"{held / chain[0].bytes:.0%} of" if chain[0].bytes else "more than"
        reason = f"the deltas have {share} the baseline's bytes; the policy keeps {policy.max_restore_ratio - 1:.0%}"
        return Run(0, len(chain), "baseline", reason)
    too_long = len(chain) > policy.max_chain
    for least in range(policy.fanout, 1 if too_long else policy.fanout - 1, -1):
        tier = _fullest_tier(chain, policy.fanout, least)
        if tier is not None:
            start, stop = tier
            return Run(start, stop, "delta", f"{stop - start} deltas of similar size, or between such")
    if not too_long:
        return None
    reason = f"the chain has {len(chain)} segments; the policy keeps {policy.max_chain}"
    start = policy.max_chain - 1
    # The newest are the smallest ones here: every tier holds at most one delta.
    return Run(start, len(chain), "delta" if start else "baseline", reason)


def run_between(chain: Sequence[ChainEntry], start: int, stop: int, *, reason: str = "asked for") -> Run:
    """Return the run of the positions [start, stop) of a chain.

    Raises
    ------
    BadInput
        They are no run of at least two segments of the chain. Of a chain of a baseline alone, that is none.
    """
    if not (0 <= start < stop <= len(chain) and stop - start >= 2):
        raise BadInput(
            f"a run has at least two neighbouring segments of the chain, found [{start}, {stop}) of {len(chain)}",
            expected=(0, len(chain)), found=(start, stop),
        )  # fmt: skip
    return Run(start, stop, chain[start].kind, reason)


def _fullest_tier(chain: Sequence[ChainEntry], fanout: int, least: int) -> tuple[int, int] | None:
    """The deltas of the highest tier that has at least ``least`` of them: half-open positions, or None.

    A delta counts to the tier of the largest one behind it, so tiers never rise along the chain and are contiguous: a
    small delta that is followed by a large one is compacted when the large one is.
    """
    tiers: list[int] = []
    for entry in reversed(chain[1:]):
        tiers.append(max(_tier(entry.bytes, fanout), tiers[-1] if tiers else 0))
    tiers.reverse()
    for tier in sorted(set(tiers), reverse=True):
        if tiers.count(tier) >= least:
            start = 1 + tiers.index(tier)
            return start, start + tiers.count(tier)
    return None


def _tier(size_bytes: int, fanout: int) -> int:
    """The largest k with fanout ** k <= size_bytes, in integers: the same everywhere."""
    tier = 0
    while size_bytes >= fanout:
        size_bytes //= fanout
        tier += 1
    return tier
