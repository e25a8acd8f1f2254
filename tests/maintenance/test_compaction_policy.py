"""Laws of the compaction planner, by simulated trainings: the limits of a chain, and the bytes that are rewritten."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.format.records import ChainEntry
from cnr_store.maintenance.compaction.plan import CompactionPolicy, Run, choose_run
from cnr_store.types import MAX_CHAIN


@dataclass
class Life:
    """A store of segment sizes. ``kept`` is the least share of a run's bytes that its compacted segment has."""

    policy: CompactionPolicy
    random: np.random.Generator
    kept: float
    baseline: int
    arrived: int = 0
    compacted_deltas: int = 0
    compacted_baselines: int = 0
    chain: list[ChainEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chain = [self.segment("baseline", 0, 1, self.baseline)]

    def segment(self, kind: str, l0: int, l1: int, size: int) -> ChainEntry:
        return ChainEntry(
            seg=f"{l0:020d}-{l1:032x}", sha256="0" * 64, kind=kind, l0=l0, l1=l1, size_bytes=size, rows=size  # type: ignore[arg-type]
        )  # fmt: skip

    def save(self, size: int) -> None:
        l0 = self.chain[-1].l1
        self.chain.append(self.segment("delta", l0, l0 + 1, size))
        self.arrived += size

    def replace(self, run: Run) -> None:
        """Replace the run by a possible result: a baseline of about the same size, or the union of deltas."""
        members = self.chain[run.start : run.stop]
        total, most = sum(one.size_bytes for one in members), max(one.size_bytes for one in members)
        least = max(1, most if run.kind == "baseline" else int(self.kept * total))
        size = int(self.random.integers(least, max(least, total) + 1))
        if run.kind == "baseline":
            self.compacted_baselines += size
        else:
            self.compacted_deltas += size
        self.chain[run.start : run.stop] = [self.segment(run.kind, members[0].l0, members[-1].l1, size)]

    def compact(self) -> int:
        """Compact until nothing is left to do; return the number of compactions."""
        compactions = 0
        while (run := choose_run(self.chain, self.policy)) is not None:
            assert len(run) >= 2
            assert run.kind == ("delta" if run.start else "baseline")
            assert 0 <= run.start < run.stop <= len(self.chain) <= MAX_CHAIN
            self.replace(run)
            compactions += 1
        return compactions


policies = st.builds(
    CompactionPolicy,
    max_chain=st.integers(1, MAX_CHAIN),
    max_restore_ratio=st.floats(1.01, 4, allow_nan=False),
    fanout=st.integers(2, 8),
)
size_of_deltas = st.sampled_from(["equal", "wild", "falling", "alternating"])


def sizes(kind: str, count: int, random: np.random.Generator) -> list[int]:
    if kind == "equal":
        return [int(random.integers(90, 111)) for _ in range(count)]
    if kind == "wild":
        return [int(2 ** random.uniform(0, 16)) for _ in range(count)]
    if kind == "falling":
        return [max(1, 100_000 >> index % 18) for index in range(count)]
    return [1000 if index % 2 else 1 for index in range(count)]


@given(policies, size_of_deltas, st.integers(0, 10**6), st.integers(1, 20), st.sampled_from([0.1, 0.7, 1.0]))
@settings(max_examples=150)
def test_a_compacted_chain_is_short_and_small(
    policy: CompactionPolicy, kind: str, baseline: int, every: int, kept: float
) -> None:
    random = np.random.default_rng([every, baseline])
    life = Life(policy, random, kept, baseline)

    for count, size in enumerate(sizes(kind, 120, random)):
        life.save(size)
        if count % every:
            continue
        before = len(life.chain)
        compactions = life.compact()

        assert compactions < before
        assert len(life.chain) <= policy.max_chain
        held = sum(one.size_bytes for one in life.chain)
        assert held <= policy.max_restore_ratio * life.chain[0].size_bytes + 1e-6 * held
        assert [one.l0 for one in life.chain[1:]] == [one.l1 for one in life.chain[:-1]]


@given(st.integers(2, 8), size_of_deltas, st.integers(1, 9), st.sampled_from([0.1, 0.7, 1.0]), st.integers(0, 9))
@settings(max_examples=100)
def test_each_byte_is_rewritten_once_per_tier_and_each_baseline_pays_off(
    fanout: int, kind: str, every: int, kept: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    policy = CompactionPolicy(max_chain=MAX_CHAIN, fanout=fanout, max_restore_ratio=1.5)
    life = Life(policy, random, kept, baseline=5_000_000)

    for count, size in enumerate(sizes(kind, 600, random)):
        life.save(size)
        if count % every == 0:
            life.compact()

    tiers = 1 + np.log(life.arrived) / np.log(fanout)
    assert life.compacted_deltas <= (fanout + 1) * tiers * life.arrived
    assert life.compacted_baselines <= policy.max_restore_ratio / (policy.max_restore_ratio - 1) * life.arrived


def test_equal_deltas_are_written_again_once_per_tier() -> None:
    """An example: 4 ** 5 saves of one size, without common rows, are rewritten five times each."""
    life = Life(CompactionPolicy(max_chain=MAX_CHAIN, max_restore_ratio=1000), np.random.default_rng(0), 1.0, 10**6)

    for _ in range(4**5):
        life.save(1024)
        life.compact()

    assert life.compacted_deltas == 5 * life.arrived
    assert len(life.chain) == 2
