"""Laws of rows that wait, whatever is saved, lost, restored and folded in between.

The oracle is the training's own values: how far what is stored may be from them, and for how many saves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import CompactionPolicy, Shard, Store, TableOptions, Threshold, compact, verify_store
from cnr_store.storage import storage_from_filesystem
from cnr_store.write.deferred_rows import STEPS_WITHOUT_BOUND
from tests.support.faulty import IsolatedMemoryFileSystem

LAWS = settings(max_examples=40, deadline=None)
ROWS, DIM, SCALE = 24, 3, 0.125
TABLE = Shard("t")

Change = list[tuple[int, float]]
changes = st.lists(st.tuples(st.integers(0, ROWS - 1), st.floats(-1.0, 1.0, width=32)), min_size=2, max_size=12)
endings = st.sampled_from(
    [("save",)] * 6 + [("flush",), ("full",), ("lose",), ("crash",), ("save", "fold"), ("finer",), ("save", "crash")]
)
intervals = st.lists(st.tuples(changes, endings), min_size=1, max_size=12)
"""What is trained, and what comes then."""
thresholds = st.builds(
    Threshold,
    keep=st.sampled_from([0.01, 0.3, 0.7]),
    refresh_every=st.integers(1, 3),
    max_error=st.sampled_from([None, None, 0.01, SCALE, 0.5, 100.0, 100.0]),
    max_wait=st.integers(1, 3),
)


@dataclass
class Training:
    """Live rows, which of them are dirty, and since how many saves each is missing from the store."""

    threshold: Threshold
    live: Any = field(default_factory=lambda: np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32))
    slot: Any = field(default_factory=lambda: np.ones(ROWS, np.float32))
    dirty: set[int] = field(default_factory=set)
    missing: Counter[int] = field(default_factory=Counter)
    scale: float = SCALE
    step: int = 0

    def __post_init__(self) -> None:
        self.store = Store.create_on(storage_from_filesystem(IsolatedMemoryFileSystem(), "/root"), threads=1)
        self.writer = self.store.writer()
        self._begin_with(TableOptions(scale=SCALE, threshold=self.threshold))

    def _begin_with(self, options: TableOptions) -> None:
        with self.writer.begin(0, "full") as txn:
            txn.write_table("t", self.live, slots={"m": self.slot}, options=options)

    def train(self, change: Change) -> None:
        for row, by in change:
            self.live[row] += np.float32(by) * np.linspace(0, 1, DIM, dtype=np.float32)
            self.slot[row] *= np.float32(1.25)
            self.dirty.add(row)

    def save(self, *, wins: bool = True, prepare: Callable[[Any], None] | None = None, **how: Any) -> None:
        rows = np.asarray(sorted(self.dirty), np.int64)
        self.step += 1
        with self.writer.begin(self.step, **how) as txn:
            if prepare is not None:
                prepare(txn)
            txn.write_rows("t", rows, self.live[rows], slots={"m": self.slot[rows]}, threshold=self.threshold)
            if not wins:
                txn.abort()
                return
        waiting = txn.waiting.get(TABLE, np.empty(0, np.int64)).tolist()
        assert set(waiting) <= self.dirty
        self.dirty = set(waiting)
        self.missing = Counter({row: self.missing[row] + 1 for row in waiting})

    def flush(self) -> None:
        self.save(flush=True)

    def full(self) -> None:
        self.save(kind="full")

    def lose(self) -> None:
        self.save(wins=False)

    def crash(self) -> None:
        """The process dies; another one goes on from what is stored."""
        self.writer = self.store.writer()
        self.writer.restore({"t": {"values": self.live, "m": self.slot}})
        self.dirty, self.missing = set(), Counter()

    def finer(self) -> None:
        self.crash()
        if self.scale < SCALE / 8:
            return
        self.scale /= 2
        self.save(prepare=lambda txn: txn.refine_scale("t"))

    def fold(self) -> None:
        compact(self.store, policy=CompactionPolicy(max_chain=2))

    def within(self) -> float:
        """How far a waiting row may be from what is stored."""
        if self.threshold.max_error is None:
            return (STEPS_WITHOUT_BOUND + 0.5) * self.scale
        return self.threshold.max_error

    def check(self) -> None:
        """What the head holds is near the live rows; call it where all of them were given, or taken from there."""
        view = self.store.snapshot().table("t")
        found, slots = view.read(), view.read(slot="m")
        waits = np.isin(np.arange(ROWS), sorted(self.missing))
        errors = np.abs(found.astype(np.float64) - self.live).max(axis=1)
        assert (errors[~waits] <= self.scale / 2 + 1e-6).all()
        assert (errors[waits] <= max(self.within(), self.scale / 2) + 1e-6).all()
        assert (np.abs(slots[~waits] / self.slot[~waits] - 1) <= 2.0**-8).all()

    def check_marks(self) -> None:
        """What the head says of rows that wait is what this training knows."""
        view = self.store.snapshot().table("t")
        errors = np.abs(view.read().astype(np.float64) - self.live).max(axis=1)
        waits = np.isin(np.arange(ROWS), sorted(self.missing))
        assert max(self.missing.values(), default=0) <= self.threshold.max_wait
        marked = self.store.snapshot().waiting.get("t")
        assert (0 if marked is None else marked.count) == waits.sum()
        if marked is not None:
            assert (errors[waits] <= marked.max_error + 1e-6).all()
            assert marked.oldest == max(self.missing.values())


def unthresholded(training: Training) -> Store:
    """A store that was given every row of now, at the same scale, by a writer that lets none wait."""
    store = Store.create_on(storage_from_filesystem(IsolatedMemoryFileSystem(), "/root"), threads=1)
    with store.writer() as writer, writer.begin(0, "full") as txn:
        options = TableOptions(scale=training.scale)
        txn.write_table("t", training.live, slots={"m": training.slot}, options=options)
    return store


@LAWS
@given(threshold=thresholds, script=intervals)
def test_no_row_is_further_off_or_waits_longer_than_stated_and_a_flush_leaves_nothing(
    threshold: Threshold, script: list[tuple[Change, tuple[str, ...]]]
) -> None:
    training = Training(threshold)
    for change, ending in [*script, ([], ("flush",))]:
        training.train(change)
        for name in ending:
            getattr(training, name)()
            if name != "lose":
                training.check()
            if name in ("save", "flush", "full"):
                training.check_marks()

    plain = unthresholded(training)
    found, expected = training.store.snapshot().table("t"), plain.snapshot().table("t")
    assert found.read().tobytes() == expected.read().tobytes()
    assert found.read(slot="m").tobytes() == expected.read(slot="m").tobytes()
    digests = [store.snapshot().manifests[-1].parts[0].state_digest for store in (training.store, plain)]
    assert digests[0] == digests[1]
    assert training.missing == Counter()
    assert verify_store(training.store, deep=True).is_sound


@LAWS
@given(script=intervals)
def test_a_threshold_that_keeps_all_is_none(script: list[tuple[Change, tuple[str, ...]]]) -> None:
    """Every row is at least the least change of its save; refreshed at every save nothing is below."""
    training = Training(Threshold(keep=1.0, refresh_every=1, max_error=100.0))
    for change, ending in script:
        training.train(change)
        for name in ending:
            getattr(training, name)()
            assert training.missing == Counter()
