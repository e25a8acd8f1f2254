"""A consumer's own copy, moved from version to version, is the snapshot bit for bit: whatever happened to the store.

The lives are those of `test_maintained_store_machine`: trainings with every encoding, escape rows, resizes, refined
scales, hashed tables, one-shot deltas and new baselines; rollbacks, branches, folds, and collections without a grace.
Consumers hold the tables in different ways and shards, follow at their own pace, and jump.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from cnr_store.records import LogEntry
from tests.consumers import HOLDINGS, Consumer
from tests.property.test_maintained_store_machine import Line, MaintainedStoreMachine
from tests.property.test_store_machine import run

CONSUMERS = 3
SOAK_LIVES = 400


class ConsumedStoreMachine(MaintainedStoreMachine):
    """The rules of a maintained training, and consumers that look on."""

    @initialize(
        profile=st.sampled_from(["compact", "portable"]),
        mirror=st.sampled_from(["memory", "memory", "mmap", "none"]),
        seed=st.integers(0, 2**32 - 1),
    )
    def create(self, profile: Any, mirror: Any, seed: int) -> None:
        self.random = np.random.default_rng(seed + 1)
        chosen = self.random.choice(len(HOLDINGS), CONSUMERS, replace=False)
        self.consumers = [Consumer(HOLDINGS[index], self.random) for index in chosen]
        self.places: dict[int, Line] = {}
        super().create(profile, mirror, seed)

    def go_to(self, consumer: Consumer, line: Line, version: int) -> None:
        """One consumer, from a store of its own; it has seen the records on the way, if it comes from behind."""
        with self.open_line(line) as store:
            path: list[LogEntry] = []
            before = consumer.entry
            if before is not None and self.places.get(id(consumer)) is line and before.record.v < version:
                for between in range(before.record.v + 1, version):
                    entry = store.commit_log.read(between)
                    assert entry is not None
                    path.append(entry)
            target = store.commit_log.read(version)
            assert target is not None
            consumer.go(store, [*path, target])
            self.places[id(consumer)] = line

    @rule(data=st.data())
    def a_consumer_jumps(self, data: Any) -> None:
        """To any live version of any branch."""
        line = data.draw(st.sampled_from(self.lines))
        self.follow(line)
        version = data.draw(st.sampled_from(sorted(line.log.live())))
        self.go_to(data.draw(st.sampled_from(self.consumers)), line, version)

    @invariant()
    def consumers_serve_the_newest_version(self) -> None:
        for consumer in getattr(self, "consumers", []):
            if hasattr(self, "line") and self.by_version and self.random.random() < 0.5:
                self.go_to(consumer, self.line, self.store.latest_version())

    def delta(self) -> None:
        """Some consumers see each delta of a run, some only the last."""
        super().delta()
        for consumer in self.consumers:
            if self.random.random() < 0.3:
                self.go_to(consumer, self.line, self.store.latest_version())


def test_consumers_are_the_snapshot() -> None:
    run(examples=8, steps=16, machine=ConsumedStoreMachine)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_consumers_are_the_snapshot_over_long_lives(capsys: pytest.CaptureFixture[str]) -> None:
    run(examples=SOAK_LIVES, steps=40, machine=ConsumedStoreMachine)
    with capsys.disabled():
        sys.stdout.write(f"{SOAK_LIVES} consumed lives, 0 failures\n")
