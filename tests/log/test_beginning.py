"""A log that is lost, one that lost its beginning, one that was never begun: what reads writes nothing, ever."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cnr_store import CorruptStore, Store, TableOptions, collect_garbage, maintain, repair_store, verify_store
from cnr_store.changes import changes
from cnr_store.errors import StoreExists, VersionNotFound
from cnr_store.format.documents import sha256
from cnr_store.format.layout import COMMITS, DATA_GROUP, HINT, IDENTITY, RELAY, commit_key
from cnr_store.maintenance.compaction import compact_run
from cnr_store.relay import Relay
from cnr_store.serving import Loader
from cnr_store.storage import Storage
from cnr_store.training import CheckpointManager

READS: dict[str, Callable[[Store], object]] = {
    "head": Store.head,
    "log": lambda store: list(store.log()),
    "snapshot": Store.snapshot,
    "by step": lambda store: store.snapshot(step=1),
    "by time": lambda store: store.snapshot(time=dt.datetime.now(dt.UTC)),
    "tags": Store.tags,
    "channels": Store.channels,
    "branches": Store.branches,
    "on_branch": lambda store: store.on_branch("b"),
    "lease": Store.lease,
    "loader": lambda store: Loader(store).start(),
    "changes": lambda store: list(changes(store)),
    "relay": lambda store: Relay(store, f"{store.url}-near").advance(),
}
WRITES: dict[str, Callable[[Store], object]] = {
    "writer": Store.writer,
    "tag": lambda store: store.tag("now"),
    "untag": lambda store: store.untag("later"),
    "channel": lambda store: store.set_channel("serving"),
    "rollback": lambda store: store.rollback(0),
    "fork": lambda store: store.fork("trial"),
}
MAINTENANCE: dict[str, Callable[[Store], object]] = {
    "compact": lambda store: compact_run(store, run=(0, 2)),
    "collect": lambda store: collect_garbage(store, dry_run=False),
    "collect, dry run": collect_garbage,
    "drop a branch": lambda store: store.drop_branch("b"),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two checkpoints, a baseline of ones and a delta, a tag and a branch."""
    made = Store.create(str(tmp_path / "store"))
    with made.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
        with writer.begin(2) as txn:
            txn.write_rows("t", np.array([1]), np.full((1, 2), 3, np.float32))
    made.tag("later")
    made.fork("b")
    return made


@pytest.fixture
def unbegun(tmp_path: Path) -> Store:
    """A store whose creator died before the first record."""
    made = Store.create(str(tmp_path / "store"))
    made.storage.delete([commit_key(0), HINT, DATA_GROUP])
    return Store.open(made.url)


def without(store: Store, *prefixes: str) -> Store:
    """The store opened anew, once everything below these prefixes is gone."""
    store.storage.delete([key for key in contents(store.storage) if key.startswith(prefixes)])
    return Store.open(store.url)


def contents(storage: Storage) -> dict[str, bytes | None]:
    return {stat.key: storage.read(stat.key) for stat in storage.list_objects("")}


@pytest.mark.parametrize("use", [*READS, *WRITES, *MAINTENANCE])
def test_whatever_is_done_to_a_store_that_lost_its_log_writes_nothing(store: Store, use: str) -> None:
    """A reader began it anew, and two maintenance runs deleted all that had been saved."""
    lost = without(store, COMMITS, HINT)
    before = contents(lost.storage)

    with pytest.raises(CorruptStore, match="position 0") as refused:
        (READS | WRITES | MAINTENANCE)[use](lost)

    assert refused.value.found == ["branches", "data"]
    assert contents(lost.storage) == before


def test_maintenance_and_a_training_refuse_a_store_that_lost_its_log(store: Store) -> None:
    lost = without(store, COMMITS, HINT)
    before = contents(lost.storage)

    with pytest.raises(CorruptStore, match="position 0"):
        maintain(lost, grace_s=0, orphan_age_s=0, force=True)
    with pytest.raises(CorruptStore, match="position 0"):
        CheckpointManager(lost.url, model=torch.nn.Linear(2, 2))

    assert contents(lost.storage) == before


@pytest.mark.parametrize("gone", [(COMMITS, HINT), (COMMITS,)], ids=["all of it", "all but the hint"])
def test_verify_and_repair_say_that_the_log_is_lost(store: Store, gone: tuple[str, ...]) -> None:
    lost = without(store, *gone)
    before = contents(lost.storage)

    found = verify_store(lost)
    repaired = repair_store(lost, dry_run=False)

    assert (COMMITS, "corrupt_store") in {(problem.path, problem.kind) for problem in found.problems}
    assert (found.head, found.restorable, found.unreferenced) == (None, (), 0)
    assert (repaired.has_log, repaired.actions, repaired.target) == (False, (), None)
    assert COMMITS in {problem.path for problem in repaired.remaining}
    assert contents(lost.storage) == before


@pytest.mark.parametrize("gone", [[0], [0, 1], [0, 1, 2]])
def test_a_log_that_lost_its_beginning_is_read_from_the_hint_alone(store: Store, gone: list[int]) -> None:
    """Opening wrote another position 0 and reset the hint, so that the store looked empty."""
    opened = without(store, *map(commit_key, gone))

    assert opened.snapshot().table("t").read().sum() == 12, "what is left can be read"
    with pytest.raises(CorruptStore) as hole:
        list(opened.log())
    assert hole.value.version == gone[-1]
    with pytest.raises(CorruptStore, match="position 0"):
        without(store, HINT).snapshot()


@pytest.mark.parametrize("use", [*WRITES, *MAINTENANCE])
def test_nothing_is_written_to_a_log_that_lost_its_beginning(store: Store, use: str) -> None:
    """It was appended to, and collected."""
    opened = without(store, commit_key(0))
    before = contents(opened.storage)

    with pytest.raises(CorruptStore, match="position 0"):
        (WRITES | MAINTENANCE)[use](opened)
    with pytest.raises(CorruptStore, match="position 0"):
        maintain(opened, grace_s=0, orphan_age_s=0, force=True)

    assert contents(opened.storage) == before


def test_no_record_repairs_a_log_that_lost_its_beginning(store: Store) -> None:
    torn = store.latest_version() + 1
    store.storage.put(commit_key(torn), b'{"v":')
    opened = without(store, commit_key(0))
    before = contents(opened.storage)

    report = repair_store(opened, dry_run=False)

    assert (report.has_log, report.actions) == (False, ())
    assert report.target is not None, "there is a state to copy elsewhere"
    assert contents(opened.storage) == before


@pytest.mark.parametrize("use", [*READS, *MAINTENANCE])
def test_who_reads_a_store_without_its_first_record_is_told_so(unbegun: Store, use: str) -> None:
    before = contents(unbegun.storage)

    with pytest.raises(VersionNotFound, match="nothing was saved"):
        (READS | MAINTENANCE)[use](unbegun)

    assert contents(unbegun.storage) == before


def test_a_store_without_its_first_record_is_sound(unbegun: Store) -> None:
    found, repaired = verify_store(unbegun), repair_store(unbegun, dry_run=False)

    assert found.is_sound
    assert (repaired.has_log, repaired.actions, repaired.remaining) == (True, (), ())


@pytest.mark.parametrize("use", sorted(WRITES.keys() - {"untag"}))
def test_whoever_writes_finishes_a_creation_that_died(unbegun: Store, use: str) -> None:
    WRITES[use](unbegun)

    first = unbegun.record(0)
    assert (first.kind, first.parent_digest) == ("init", sha256(unbegun.storage.read(IDENTITY) or b""))
    assert list(Store.open(unbegun.url).log())[-1] == first


def test_a_training_finishes_a_creation_that_died(unbegun: Store) -> None:
    CheckpointManager(unbegun.url, model=torch.nn.Linear(2, 2)).close()

    assert Store.open(unbegun.url).snapshot().is_empty


def test_a_creation_that_another_process_finished_meanwhile_is_no_damage(unbegun: Store) -> None:
    Store.open(unbegun.url).tag("first")

    unbegun.tag("second")

    assert unbegun.tags() == {"first": 0, "second": 1}


@pytest.mark.parametrize("gone", [(IDENTITY,), (IDENTITY, COMMITS, HINT)], ids=["identity", "identity and log"])
def test_nothing_is_created_over_what_is_left_of_a_store(store: Store, gone: tuple[str, ...]) -> None:
    store.storage.delete([key for key in contents(store.storage) if key.startswith(gone)])
    before = contents(store.storage)

    with pytest.raises(StoreExists, match="data/"):
        Store.create(store.url)

    assert contents(store.storage) == before


@pytest.fixture
def near(store: Store, tmp_path: Path) -> Store:
    """A relay of the store."""
    url = str(tmp_path / "near")
    Relay(store, url).advance()
    return Store.open(url)


def test_a_relay_that_lost_its_log_says_so_and_is_not_begun_anew(store: Store, near: Store) -> None:
    lost = without(near, COMMITS, HINT)
    before = contents(lost.storage)

    with pytest.raises(CorruptStore, match="its first one, is empty"):
        lost.snapshot()
    assert [(one.path, one.kind) for one in verify_store(lost).problems] == [(COMMITS, "corrupt_store")]
    with pytest.raises(CorruptStore, match="its first one, is empty"):
        Relay(store, lost.url).advance()

    assert contents(lost.storage) == before


def test_a_relay_that_lost_its_marker_is_only_read(store: Store, near: Store) -> None:
    """It looked like a store that anybody may write to."""
    lost = without(near, RELAY)
    before = contents(lost.storage)

    assert lost.snapshot().table("t").read().sum() == 12
    for write in (*WRITES.values(), collect_garbage):
        with pytest.raises(CorruptStore, match=RELAY):
            write(lost)
    with pytest.raises(StoreExists):
        Relay(store, lost.url).advance()

    assert contents(lost.storage) == before
