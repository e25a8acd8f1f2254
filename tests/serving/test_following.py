"""Which version a loader serves, by records alone, and how long it pauses after a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from cnr_store import BadInput, CnrStoreError, CompactionPolicy, RetentionPolicy, Store, TableOptions, collect_garbage
from cnr_store.errors import BranchNotFound, ChannelNotFound, TagNotFound, VersionExpired, VersionNotFound
from cnr_store.format.commit_record import LogEntry
from cnr_store.maintenance.compaction import compact_run
from cnr_store.serving.following import ServeTarget, plan_between, repeats, wanted_version
from cnr_store.serving.update.update_plan import Apply, Compare, Same
from tests.support.memory import store_in_memory


@dataclass
class Life:
    """A store, and the record at each position of its log."""

    store: Store
    step: int = 0
    entries: list[LogEntry] = field(default_factory=list)

    def save(self, *, full: bool = False) -> LogEntry:
        with self.store.writer() as writer:
            self.step += 1
            if full or writer.head.record.chain == ():
                with writer.begin(self.step, kind="baseline") as txn:
                    txn.write_table("t", np.full((8, 2), self.step, np.float32), options=TableOptions(scale=1.0))
            else:
                writer.restore()
                with writer.begin(self.step) as txn:
                    txn.write_rows("t", np.array([self.step % 8]), np.full((1, 2), self.step, np.float32))
        return self.look()

    def look(self) -> LogEntry:
        """Read what is new in the log; return its last record."""
        while (entry := self.store.internals.log.read(len(self.entries))) is not None:
            self.entries.append(entry)
        return self.entries[-1]

    def do(self, act: Callable[[Store], object]) -> LogEntry:
        act(self.store)
        return self.look()


@pytest.fixture
def life() -> Life:
    store = store_in_memory()
    return Life(store)


def test_the_newest_is_the_last_record_whatever_it_is(life: Life) -> None:
    saved = life.save()
    assert wanted_version(ServeTarget(), saved.record) == saved.record.v

    tagged = life.do(lambda store: store.tag("a"))

    assert wanted_version(ServeTarget(), tagged.record) == tagged.record.v
    assert wanted_version(ServeTarget(tag="a"), tagged.record) == saved.record.v
    assert wanted_version(ServeTarget(version=1), tagged.record) == 1


def test_a_channel_is_followed_forth_and_back(life: Life) -> None:
    first, second = life.save().record.v, life.save().record.v
    moved = life.do(lambda store: store.set_channel("prod", second))
    assert wanted_version(ServeTarget(channel="prod"), moved.record) == second

    back = life.do(lambda store: store.set_channel("prod", first))

    assert wanted_version(ServeTarget(channel="prod"), back.record) == first


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (ServeTarget(channel="prod"), ChannelNotFound),
        (ServeTarget(tag="prod"), TagNotFound),
        (ServeTarget(version=99), VersionNotFound),
        (ServeTarget(version=-1), VersionNotFound),
    ],
)
def test_what_is_not_there_is_an_error(life: Life, target: ServeTarget, error: type[CnrStoreError]) -> None:
    newest = life.save().record

    with pytest.raises(error):
        wanted_version(target, newest)


def test_a_dropped_channel_is_an_error_until_it_is_back(life: Life) -> None:
    saved = life.save().record.v
    life.do(lambda store: store.set_channel("prod"))
    gone = life.do(lambda store: store.drop_channel("prod"))
    with pytest.raises(ChannelNotFound):
        wanted_version(ServeTarget(channel="prod"), gone.record)

    again = life.do(lambda store: store.set_channel("prod", saved))

    assert wanted_version(ServeTarget(channel="prod"), again.record) == saved


def test_an_expired_pin_is_an_error(life: Life) -> None:
    first = life.save().record.v
    life.save(full=True)
    collect_garbage(
        life.store, policy=RetentionPolicy(keep_last=1), grace_s=0, orphan_age_s=0, dry_run=False, force=True
    )
    newest = life.look().record

    with pytest.raises(VersionExpired):
        wanted_version(ServeTarget(version=first), newest)
    assert wanted_version(ServeTarget(), newest) == newest.v


def test_the_end_of_a_branch_is_an_error(life: Life) -> None:
    life.save()
    branch = life.store.fork("try")
    life.store.drop_branch("try")

    closed = branch.head().record

    assert closed.kind == "close"
    with pytest.raises(BranchNotFound):
        wanted_version(ServeTarget(), closed)


def test_only_one_of_version_tag_and_channel() -> None:
    with pytest.raises(BadInput):
        ServeTarget(version=1, tag="a")
    assert ServeTarget().is_newest
    assert not ServeTarget(channel="prod").is_newest


def test_what_was_refused_is_known_again_when_it_comes_back(life: Life) -> None:
    kept, refused = life.save(), life.save()
    tagged = life.do(lambda store: store.tag("bad"))
    merged = life.do(lambda store: compact_run(store, policy=CompactionPolicy(max_chain=1)))
    rolled = life.do(lambda store: store.rollback(refused.record.v))
    newer = life.save()

    assert repeats(refused, refused)
    assert repeats(tagged, refused)
    assert merged.record.kind == "compact"
    assert repeats(merged, tagged)
    assert repeats(rolled, refused)
    assert not repeats(newer, refused)
    assert not repeats(kept, refused)


def test_records_between_tell_what_the_two_ends_do_not(life: Life) -> None:
    held, delta = life.save(), life.save()
    merged = life.do(lambda store: compact_run(store, policy=CompactionPolicy(max_chain=1)))
    newer = life.save()

    assert plan_between(held, newer, []) == Compare()
    assert plan_between(held, newer, life.entries) == Apply((delta.record.chain[-1], newer.record.chain[-1]))
    assert merged.record.kind == "compact"
    assert plan_between(held, newer, [delta, newer]) == Compare()  # a gap
    assert plan_between(newer, held, life.entries) == Compare()
    assert plan_between(held, held, life.entries) == Same()


def test_a_head_with_unknown_fields_is_read_all_the_same(life: Life) -> None:
    record = msgspec.structs.replace(life.save().record, user={"x": 1})

    assert wanted_version(ServeTarget(), record) == record.v
