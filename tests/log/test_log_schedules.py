"""Random interleavings of two restarting writers, a tagger and a compactor over the real log code, with faults.

Laws: an acknowledged append is in the log exactly once, one that was refused is not, every training state follows
the state it was made from, no tag is lost, epochs never go back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest

from cnr_store.errors import CommitStateUnknown, Conflict, CorruptStore, StorageFailure
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.layout import segment_name
from cnr_store.format.records import ChainEntry, CommitRecord, WriterInfo
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.rebase import (
    draft_after,
    draft_init,
    rebase_compact,
    rebase_data,
    rebase_fence,
    rebase_tag,
    replace_run,
)
from tests.support.faulty_world import FaultyWorld, restarting, run_worlds
from tests.support.schedule import run_schedule

WRITER = WriterInfo(host="h", lib="0.1.0", run_id="r")
GIVES_UP = (Conflict, StorageFailure)
State = tuple[int, ...]


@dataclass
class World(FaultyWorld):
    """What the actors were told.

    Attributes
    ----------
    content
        Which deltas a segment holds; a merged one holds several.
    trained
        The state each delta was trained from.
    """

    content: dict[str, State] = field(default_factory=dict)
    trained: dict[int, State] = field(default_factory=dict)
    acknowledged: dict[int, LogEntry] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    tagged: dict[str, int] = field(default_factory=dict)

    def state(self, record: CommitRecord) -> State:
        return tuple(number for entry in record.chain for number in self.content[entry.seg])


def writer_life(world: World, log: CommitLog) -> None:
    head = log.latest()
    head = log.append(head, draft_after(head.record, "fence", WRITER, epoch=head.record.epoch + 1), rebase_fence)
    epoch, base = head.record.epoch, world.state(head.record)
    for _ in range(4):
        number = world.number()
        seg = segment_name(head.record.v, f"{number:032x}")
        world.content[seg], world.trained[number] = (number,), base
        chain, start = head.record.chain, head.record.checkpoint
        own = ChainEntry(
            seg=seg,
            sha256="0" * 64,
            kind="delta" if chain else "baseline",
            l0=start,
            l1=start + 1,
            bytes=1,
            rows=1,
        )
        draft = draft_after(
            head.record,
            "delta" if chain else "baseline",
            WRITER,
            chain=(*chain, own),
            checkpoint=start + 1,
            step=number,
            epoch=epoch,
        )
        try:
            entry = log.append(head, draft, partial(rebase_data, txn=f"{number:032x}"))
        except CommitStateUnknown:
            resolved = log.resolve()  # a second CommitStateUnknown ends this life
            if resolved is None:
                world.refused.add(number)
                return
            entry = resolved
        except (Conflict, StorageFailure, CorruptStore):
            world.refused.add(number)
            raise
        world.acknowledged[number] = entry
        head, base = entry, (*base, number)


def tagger_life(world: World, log: CommitLog) -> None:
    for _ in range(4):
        head = log.latest()
        name, target = f"tag {world.number()}", head.record.v
        draft = draft_after(
            head.record, "tag", WRITER, name=name, target=target, tags={**head.record.tags, name: target}
        )
        log.append(head, draft, rebase_tag)
        world.tagged[name] = target


def compactor_life(world: World, log: CommitLog) -> None:
    for _ in range(4):
        head = log.latest()
        if len(head.record.chain) < 2:
            continue
        start = world.random.randrange(len(head.record.chain) - 1)
        compacted = head.record.chain[start : start + world.random.choice((2, 3))]
        seg = segment_name(head.record.v, f"{world.number():032x}")
        world.content[seg] = tuple(number for entry in compacted for number in world.content[entry.seg])
        merged = ChainEntry(
            seg=seg,
            sha256="0" * 64,
            kind=compacted[0].kind,
            l0=compacted[0].l0,
            l1=compacted[-1].l1,
            bytes=1,
            rows=1,
        )
        run = [entry.seg for entry in compacted]
        draft = draft_after(head.record, "compact", WRITER, chain=replace_run(head.record, merged, run))
        log.append(head, draft, partial(rebase_compact, merged=merged, run=run))


def run_world(seed: int) -> World:
    world = World(Random(seed))
    world.log().append_first(draft_init(WRITER))
    lives = (writer_life, writer_life, tagger_life, compactor_life)

    run_schedule([restarting(world, life, within=30, ends=GIVES_UP) for life in lives], seed)
    check(world)
    if world.deliver_delayed():
        check(world)
    return world


def check(world: World) -> None:
    log = world.log()
    newest = log.latest()
    entries = {entry.record.v: entry for entry in log.walk(newest)}
    assert sorted(entries) == list(range(newest.record.v + 1))
    data = [entry for entry in entries.values() if entry.record.kind in ("baseline", "delta")]
    numbers = [entry.record.step for entry in data]
    assert len(numbers) == len(set(numbers)), "an append is in the log twice"
    for number, entry in world.acknowledged.items():
        assert entries.get(entry.record.v) == entry, f"acknowledged append {number} is lost"
    assert not world.refused & set(numbers), "a refused append is in the log"
    for entry in data:
        number = entry.record.step
        assert world.state(entry.record) == (*world.trained[number], number), "an append sits on another state"
    for version in range(1, newest.record.v + 1):
        before, record = entries[version - 1].record, entries[version].record
        assert record.epoch == before.epoch + (record.kind == "fence")
        assert record.ts_ms > before.ts_ms
        if record.kind in ("tag", "compact", "fence"):
            assert world.state(record) == world.state(before), f"{record.kind} changed the state"
    assert world.tagged.items() <= newest.record.tags.items(), "a tag is lost"


@pytest.mark.parametrize("block", range(8))
def test_no_interleaving_loses_or_repeats_an_acknowledged_append(block: int) -> None:
    worlds = run_worlds(run_world, range(25 * block, 25 * block + 25))

    # The schedules do collide: work is acknowledged, refused and compacted in the same block.
    assert sum(len(world.acknowledged) for world in worlds) > 150
    assert sum(len(world.refused) for world in worlds) > 10
    assert any(len(state) > 1 for world in worlds for state in world.content.values())


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_none_of_thousands_of_interleavings_does() -> None:
    run_worlds(run_world, range(10_000, 15_000))


def test_a_seed_is_a_schedule() -> None:
    first, second = run_world(3), run_world(3)

    assert list(first.acknowledged) == list(second.acknowledged)
    assert [len(view.calls) for view in first.views] == [len(view.calls) for view in second.views]


def test_rebasing_over_other_epochs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.log.rebase._check_epoch", lambda draft, record: None)
    monkeypatch.setattr("cnr_store.log.rebase._check_commutes", lambda draft, record: None)

    with pytest.raises(AssertionError):
        run_worlds(run_world, range(100))


def test_taking_an_unclear_outcome_for_a_failure_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(log: CommitLog, attempt: object) -> LogEntry | None:
        log._unresolved = None
        raise StorageFailure(f"no clean success of {attempt}")

    monkeypatch.setattr(CommitLog, "_read_back", gives_up)

    with pytest.raises(AssertionError, match="refused append"):
        run_worlds(run_world, range(100))
