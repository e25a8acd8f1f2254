"""A consumer's own copy, moved from version to version, is the snapshot bit for bit: whatever happened to the store.

The lives are those of `test_maintained_store_machine`: trainings with every encoding, escape rows, resizes, refined
scales, hashed tables, one-shot deltas and new baselines; rollbacks, branches, merges, and collections without a grace.
Consumers hold the tables in different ways and shards, follow at their own pace, and jump.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from cnr_store.format.commit_record import LogEntry
from cnr_store.maintenance.compaction import compact_run
from tests.maintenance.maintained_lines import Line
from tests.maintenance.test_maintained_store_machine import MaintainedStoreMachine
from tests.store.test_store_machine import beginning, run
from tests.support.consumers import HOLDINGS, Consumer, TrackedMemory
from tests.support.memory import store_in_memory
from tests.support.rectangles import Model, Parts, schema_of, tiling

CONSUMERS = 3
SOAK_LIVES = 400


class ConsumedStoreMachine(MaintainedStoreMachine):
    """The rules of a maintained training, and consumers that look on."""

    @beginning
    def create(self, mirror: Any, seed: int) -> None:
        self.random = np.random.default_rng(seed + 1)
        chosen = self.random.choice(len(HOLDINGS), CONSUMERS, replace=False)
        self.consumers = [Consumer(HOLDINGS[index], self.random, TrackedMemory()) for index in chosen]
        self.places: dict[int, Line] = {}
        super().create(mirror, seed)

    def go_to(self, consumer: Consumer, line: Line, version: int) -> None:
        """One consumer with its own store object; it has read the records between its version and the next."""
        with self.open_line(line) as store:
            path: list[LogEntry] = []
            before = consumer.entry
            if before is not None and self.places.get(id(consumer)) is line and before.record.v < version:
                for between in range(before.record.v + 1, version):
                    entry = store.internals.log.read(between)
                    assert entry is not None
                    path.append(entry)
            target = store.internals.log.read(version)
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


ROWS, DIM = 9, 6
SPLITS = [((0, 6),), ((0, 3), (3, 6)), ((0, 1), (1, 2), (2, 6))]


@pytest.mark.parametrize("additive", [True, False])
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32 - 1), chunk_bytes=st.sampled_from([16, 1 << 20]), window_bytes=st.sampled_from([1, 99])
)
def test_consumers_follow_tables_cut_by_rows_and_columns(
    additive: bool, seed: int, chunk_bytes: int, window_bytes: int
) -> None:
    """Each save cuts the table differently, so that a row may have different states in its columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cnr_store.format.arrays.CHUNK_BYTES", chunk_bytes)
        patch.setattr("cnr_store.read.table_reader.WINDOW_BYTES", window_bytes)
        follow_parts(np.random.default_rng(seed), seed, additive=additive)


def follow_parts(rng: np.random.Generator, seed: int, *, additive: bool) -> None:
    store = store_in_memory()
    row_slot = bool(rng.random() < 0.3)
    ranges = SPLITS[rng.integers(len(SPLITS))] if row_slot else ((0, DIM),)
    parts = Parts(store, Model(schema_of(ROWS, DIM, additive=additive, row_slot=row_slot), ranges), seed)
    consumers = [Consumer(holding, rng, TrackedMemory()) for holding in HOLDINGS]
    for index in range(int(rng.integers(2, 6))):
        if index and rng.random() < 0.3:
            parts.model.resize(int(rng.integers(0, ROWS + 4)))
        tiles = tiling(rng, parts.model.schema.num_rows, ranges, free=not row_slot and rng.random() < 0.8)
        is_full = index == 0 or bool(rng.random() < 0.1)
        if is_full:
            parts.model.__post_init__()  # rows that a baseline does not name are absent
        parts.save(tiles, full=is_full, states_digest=bool(rng.random() < 0.8))
        if rng.random() < 0.3 and len(store.head().record.chain) > 1:
            compact_run(store, run=(0, int(rng.integers(2, len(store.head().record.chain) + 1))), force=True)
            parts._head = store.head()
        for consumer in consumers:
            if rng.random() < 0.6:
                first = 0 if consumer.entry is None else consumer.entry.record.v + 1
                path = [store.internals.log.read(version) for version in range(first, store.latest_version() + 1)]
                if path:
                    consumer.go(store, [entry for entry in path if entry is not None])
    parts.close()
    store.close()


def test_consumers_are_the_snapshot() -> None:
    run(examples=8, steps=16, machine=ConsumedStoreMachine)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_consumers_are_the_snapshot_over_long_lives(capsys: pytest.CaptureFixture[str]) -> None:
    run(examples=SOAK_LIVES, steps=40, machine=ConsumedStoreMachine)
    with capsys.disabled():
        sys.stdout.write(f"{SOAK_LIVES} consumed lives, 0 failures\n")
