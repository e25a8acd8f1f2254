"""Random interleavings of a store's whole life over the real code, with faults: 0 violations.

Trainers that restart and trainers that outlive their time, a tagger, a reader. Each safety rule, switched off, is
caught by the same schedules.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from random import Random
from typing import Any

import pytest

from cnr_store.errors import CommitStateUnknown, CorruptStore, StorageFailure
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.layout import commit_key
from cnr_store.format.records import ChainEntry, CommitRecord
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.rebase import _COMMUTING_KINDS
from cnr_store.maintenance.gc import GcReport, collect_garbage
from cnr_store.maintenance.gc.plan import CollectionPlan, due_segments, plan_collection, unexplained
from cnr_store.store import Store
from cnr_store.write.commit import Commit
from tests.support.life import (
    Life,
    Violation,
    World,
    alone,
    check,
    check_no_orphans,
    collector,
    compactor,
    deterministic,
    mover,
    reader,
    restarting,
    tagger,
    trainer,
)
from tests.support.schedule import run_schedule

LIVES = (trainer, compactor, collector, tagger, mover, reader)
BLOCK = 250
SOAK = int(os.environ.get("CNR_SOAK_SCHEDULES", "100000"))
MOST_SEEDS = 1000
"""Within how many schedules a rule that is switched off must be missed."""


def cast(random: Random) -> list[Life]:
    """Who takes part: always two trainers, and some of those who maintain and read the store."""
    lives: list[Life] = [trainer, trainer]
    for life, chances in (
        (compactor, (0.9,)),
        (collector, (0.7, 0.5)),
        (tagger, (0.4,)),
        (mover, (0.4,)),
        (reader, (0.6,)),
    ):
        lives += [life for chance in chances if random.random() < chance]
    return lives


def run_world(seed: int, lives: Sequence[Life] | None = None) -> World:
    """Run one schedule and look at what is left. ``lives`` says who takes part where that is not left to chance.

    Raises
    ------
    Violation, CorruptStore
    """
    world = World(Random(seed))
    with deterministic(Random(~seed)):
        world.create()
        actors = [restarting(world, life) for life in lives or cast(world.random)]
        run_schedule(actors, seed, speeds=[world.random.choice((0.1, 1.0, 4.0)) for _ in actors])
        check(world)
        if world.deliver_delayed():
            check(world)
        if seed % 4 == 0:
            alone(world, world.random.choice(LIVES))
            check(world)
            check_no_orphans(world)
            check(world)
    return world


def run_worlds(seeds: Iterable[int]) -> Counter[str]:
    """Run schedules; returns how often what happened in them."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = run_world(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        counts.update(world.counts)
        counts["calls"] += world.calls
    return counts


def counted(seeds: range) -> tuple[Counter[str], list[str]]:
    """Run schedules in a process of the soak; returns what happened, and each violation with its seed."""
    counts: Counter[str] = Counter()
    violations = []
    for seed in seeds:
        try:
            counts += run_worlds([seed])
        except AssertionError as error:
            violations.append(str(error)[:300])
    return counts, violations


def test_no_schedule_of_a_life_breaks_a_law() -> None:
    began = time.perf_counter()
    counts = run_worlds(range(BLOCK))
    sys.stdout.write(f"{BLOCK} schedules, {time.perf_counter() - began:.1f} s, 0 violations: {dict(counts)}\n")

    # The schedules do collide.
    least = {
        "acknowledged": 500, "fenced": 100, "crash": 50, "commit_state_unknown": 10, "transaction_aborted": 10,
        "compaction committed": 15, "compaction abandoned": 1, "gc collected": 80, "read": 80, "tagged": 30,
        "channel": 8, "rollback": 2, "stale": 2,
    }  # fmt: skip
    assert {kind: counts[kind] for kind in least if counts[kind] < least[kind]} == {}


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_none_of_a_hundred_thousand_schedules_does(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    blocks = [range(first, first + BLOCK) for first in range(10**6, 10**6 + SOAK, BLOCK)]
    counts: Counter[str] = Counter()
    violations: list[str] = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, (seen, broken) in enumerate(pool.map(counted, blocks), 1):
            counts += seen
            violations += broken
            with capsys.disabled():
                sys.stdout.write(
                    f"{number * BLOCK} of {SOAK} schedules, {time.perf_counter() - began:.0f} s, "
                    f"{len(violations)} violations {violations[:3]}\n"
                )
    with capsys.disabled():
        sys.stdout.write(f"{SOAK} schedules, {len(violations)} violations: {dict(counts)}\n")

    assert not violations, violations[:20]


def test_a_seed_is_a_schedule() -> None:
    def story(seed: int) -> tuple[object, ...]:
        world = run_world(seed)
        told = [re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "now", line) for line in world.told]  # who fenced it says when
        return told, [[(call.operation, call.path) for call in view.calls] for view in world.views]

    for seed in range(10):
        assert story(seed) == story(seed)


# ---- each rule, switched off


def violated_within(*lives: Life) -> int:
    """The number of schedules until one breaks a law, of those who meet the rule most often."""
    for number in range(1, MOST_SEEDS + 1):
        try:
            run_world(number, lives)
        except (Violation, CorruptStore) as error:
            sys.stdout.write(f"found in schedule {number}: {str(error)[:300]}\n")
            return number
    raise AssertionError(f"no violation in {MOST_SEEDS} schedules")


def test_appending_across_epochs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.log.rebase._check_epoch", lambda draft, record: None)
    monkeypatch.setattr("cnr_store.log.rebase._COMMUTING_KINDS", _COMMUTING_KINDS | {"fence"})

    assert violated_within(trainer, trainer)


def test_taking_a_lost_reply_for_a_failure_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(log: CommitLog, attempt: object) -> LogEntry | None:
        log._unresolved = None
        raise StorageFailure(f"no clean success of {attempt}")

    monkeypatch.setattr(CommitLog, "_read_back", gives_up)

    assert violated_within(trainer, trainer)


def test_cleaning_up_after_an_unknown_outcome_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Commit._append

    def cleans_up(commit: Commit, draft: CommitRecord) -> LogEntry:
        try:
            return append(commit, draft)
        except CommitStateUnknown:
            storage, segment = commit._state.setup.storage, commit._staged.draft.segment
            storage.delete([stat.key for stat in storage.list_objects(f"data/{segment}")])
            raise

    monkeypatch.setattr(Commit, "_append", cleans_up)

    assert violated_within(trainer, trainer)


def test_saving_from_a_mirror_of_another_state_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.write.commit_checks._check_digests", lambda receipts, base: None)

    assert violated_within(trainer, trainer)


def test_a_mirror_of_another_state_gives_wrong_values_not_just_digests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cnr_store.write.commit_checks._check_digests", lambda receipts, base: None)
    for room in ("plan", "table_reader"):
        monkeypatch.setattr(f"cnr_store.read.{room}.compare_digest", lambda plan, found, wanted: None)

    assert violated_within(trainer, trainer)


def test_deleting_log_positions_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def collects_records_too(store: Store, **options: Any) -> GcReport:
        report = collect_garbage(store, **options)
        store.storage.delete([commit_key(version) for version in range(1, store.head().record.floor)])
        return report

    monkeypatch.setattr("tests.support.life.collect_garbage", collects_records_too)

    assert violated_within(trainer, trainer, compactor, collector)


def test_deleting_orphans_that_no_record_names_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def names_none(logs: Any, folders: Any, *, ages: Any, **others: Any) -> CollectionPlan:
        return plan_collection(logs, folders, ages={}, **others)

    def takes_orphans(logs: Any, folders: Any, held: Any, now_ms: int) -> list[str]:
        return [*due_segments(logs, folders, held, now_ms), *unexplained(logs, folders)]

    monkeypatch.setattr("cnr_store.maintenance.gc.run.plan_collection", names_none)
    monkeypatch.setattr("cnr_store.maintenance.gc.run.due_segments", takes_orphans)

    assert violated_within(trainer, trainer, collector, collector)


def test_splicing_without_looking_at_what_segments_apply_to_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def splice(head: CommitRecord, merged: ChainEntry, run: Sequence[str]) -> tuple[ChainEntry, ...]:
        names = [entry.seg for entry in head.chain]
        there = [names.index(name) for name in run if name in names]
        kept = [entry for entry in head.chain if entry.seg not in run]
        place = there[0] if there else 0 if merged.kind == "baseline" else len(kept)
        return (*kept[:place], merged, *kept[place:])

    monkeypatch.setattr("cnr_store.log.rebase.replace_run", splice)
    monkeypatch.setattr("cnr_store.maintenance.compaction.run.replace_run", splice)
    monkeypatch.setattr("cnr_store.log.rebase._chain_up_to", lambda record, own: record.chain)
    monkeypatch.setattr("cnr_store.format.commit_record.check_statements", lambda record: None)
    monkeypatch.setattr("cnr_store.log.sent_record.check_statements", lambda record: None)

    assert violated_within(trainer, trainer, compactor, compactor, mover)
