"""Random interleavings of forks, writers, drops and an expiry over the real logs, with faults.

Laws: what was acknowledged on a branch is in its log and before its end; a branch has its log from its pin on; a log
that no pin names has ended, or holds its first record alone; a fork point is live as long as it is pinned; no two pins
have one name; a dropped branch stays dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest

from cnr_store.errors import CommitStateUnknown, Conflict, NotFound, StorageFailure
from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.format.layout import BRANCHES, branch_prefix
from cnr_store.format.records import ChainEntry, CommitRecord, WriterInfo
from cnr_store.log import branches
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.rebase import draft_after, draft_init, rebase_data, rebase_expire, rebase_fence
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import FaultyFileSystem, SimulatedCrash
from tests.support.faulty_world import FaultyWorld, restarting, run_worlds
from tests.support.schedule import run_schedule

WRITER = WriterInfo(host="h", lib="0.1.0", run_id="r")
NAMES = ("trial", "other")
GIVES_UP = (Conflict, NotFound, StorageFailure)


@dataclass
class World(FaultyWorld):
    """What the actors were told."""

    acknowledged: list[tuple[str, LogEntry]] = field(default_factory=list)
    refused: list[tuple[str, int]] = field(default_factory=list)
    forked: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def forks(world: World, main: CommitLog) -> None:
    head = main.latest()
    branch = branches.fork(main, head, head, world.random.choice(NAMES), WRITER)
    world.forked.append(branch.uuid)


def writes(world: World, main: CommitLog) -> None:
    """Open the branch, fence and save, twice: the second time without a look whether it is still pinned."""
    branch = branches.find_branch(main.latest().record, world.random.choice(NAMES))
    log = branches.log_of(main, branch)
    for _ in range(2):
        head = log.latest()
        head = log.append(head, draft_after(head.record, "fence", WRITER, epoch=head.record.epoch + 1), rebase_fence)
        for _ in range(2):
            number = world.number()
            try:
                head = log.append(head, delta(head.record, number), partial(rebase_data, txn=txn(number)))
            except (CommitStateUnknown, SimulatedCrash):
                raise
            except Exception:
                world.refused.append((branch.uuid, number))
                raise
            world.acknowledged.append((branch.uuid, head))


def txn(number: int) -> str:
    return f"{number:032x}"


def delta(head: CommitRecord, number: int) -> CommitRecord:
    """A save of step ``number``; what is in its segment is of no matter here."""
    own = ChainEntry(
        seg=f"{head.v:020d}-{txn(number)}", sha256="0" * 64, kind="baseline", l0=0, l1=head.checkpoint + 1,
        size_bytes=1, rows=1,
    )  # fmt: skip
    return draft_after(head, "baseline", WRITER, chain=(own,), checkpoint=head.checkpoint + 1, step=number)


def drops(world: World, main: CommitLog) -> None:
    branch = branches.find_branch(main.latest().record, world.random.choice(NAMES))
    branches.close_branch(main, branch.uuid, WRITER)
    world.dropped.append(branch.uuid)


def expires(world: World, main: CommitLog) -> None:
    """All versions that nothing names are gone."""
    head = main.latest()
    main.append(head, draft_after(head.record, "expire", WRITER, floor=head.record.v), rebase_expire)


def run_world(seed: int) -> World:
    world = World(Random(seed))
    world.log().append_first(draft_init(WRITER))
    lives = (forks, forks, writes, writes, drops, drops, expires)
    run_schedule([restarting(world, life, within=40, ends=GIVES_UP) for life in lives], seed)
    check(world)
    if world.deliver_delayed():
        check(world)
    return world


def check(world: World) -> None:
    main = world.log()
    newest = main.latest()
    records = {entry.record.v: entry for entry in main.walk(newest)}
    pins = newest.record.pins
    assert len({pin.name for pin in pins.values()}) == len(pins), "two branches have one name"
    assert not pins.keys() & set(world.dropped), "a dropped branch is pinned"
    for pin in pins.values():
        assert is_live(newest.record, pin.version), "a fork point is gone"
    logs = {uuid: entries_of(main, uuid) for uuid in branch_folders(world)}
    assert {*world.dropped, *pins} <= logs.keys(), "a branch has no log"
    for uuid, entries in logs.items():
        first, kinds = entries[0], [entry.record.kind for entry in entries]
        assert (first.record.kind, first.record.name) == ("fork", uuid)
        assert first.record.parent_digest == records[first.record.target or 0].digest
        assert "fork" not in kinds[1:]
        assert "close" not in kinds[:-1], "something follows the end of a branch"
        assert uuid in pins or kinds == ["fork"] or kinds[-1] == "close", "a log that nothing pins goes on"
    for uuid, entry in world.acknowledged:
        assert logs[uuid][entry.record.v] == entry, "an acknowledged save is lost"
    for uuid, number in world.refused:
        assert number not in [entry.record.step for entry in logs.get(uuid, [])], "a refused save is in the log"


def branch_folders(world: World) -> list[str]:
    return storage_from_filesystem(FaultyFileSystem(world.files), "/root").list_folders(BRANCHES)


def entries_of(main: CommitLog, uuid: str) -> list[LogEntry]:
    log = main.below(branch_prefix(uuid))
    return list(log.walk(log.latest()))[::-1]


@pytest.mark.parametrize("block", range(8))
def test_no_interleaving_loses_or_leaks_a_save_of_a_branch(block: int) -> None:
    worlds = run_worlds(run_world, range(25 * block, 25 * block + 25))

    # The schedules do collide: branches are forked, written and dropped in the same block.
    assert sum(len(world.forked) for world in worlds) > 25
    assert sum(len(world.acknowledged) for world in worlds) > 25
    assert sum(len(world.dropped) for world in worlds) > 10
    assert sum(len(world.refused) for world in worlds) > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_none_of_thousands_of_interleavings_does() -> None:
    run_worlds(run_world, range(10_000, 15_000))


def test_unpinning_before_closing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    close = branches._close_log
    monkeypatch.setattr(branches, "_close_log", lambda log, writer: None)
    unpin = branches.close_branch

    def wrong_way_round(main: CommitLog, branch: str, writer: WriterInfo) -> None:
        log = main.below(branch_prefix(branch))
        unpin(main, branch, writer)
        close(log, writer)

    monkeypatch.setattr(branches, "close_branch", wrong_way_round)

    with pytest.raises(AssertionError, match="nothing pins"):
        run_worlds(run_world, range(100))


def test_a_fence_in_the_place_of_an_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def fence(log: CommitLog, writer: WriterInfo) -> None:
        head = log.latest()
        log.append(head, draft_after(head.record, "fence", writer, epoch=head.record.epoch + 1), rebase_fence)

    monkeypatch.setattr(branches, "_close_log", fence)

    with pytest.raises(AssertionError, match="nothing pins"):
        run_worlds(run_world, range(100))


def test_an_end_that_something_may_follow_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.log.rebase._check_goes_on", lambda record: None)

    with pytest.raises(AssertionError, match="follows the end"):
        run_worlds(run_world, range(100))
