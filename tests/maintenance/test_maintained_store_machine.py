"""The lives of `test_store_machine`, maintained meanwhile: names, branches, compactions, collections, holds.

Maintenance comes as other processes do: from stores of its own, beside writers that hold mirrors, and in the middle of
saves. Which versions stay is said by `tests.support.retention_model`; what they hold, by the training. After every
collection the listed objects are those that these versions need, no more and no less.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from cnr_store import CompactionPolicy, RetentionPolicy, StorageFailure, collect_garbage
from cnr_store.errors import CommitStateUnknown, DoesNotApply, TransactionAborted
from cnr_store.maintenance.compaction import compact_run
from tests.maintenance.maintained_lines import Hold, Line, MaintainedLines
from tests.store.test_store_machine import Flaky, beginning, run
from tests.support.faulty import Fault, FaultKind
from tests.support.retention_model import Rules

HOUR_MS = 3_600_000
MOST_BRANCHES = 2
SOAK_LIVES = 1_500


class MaintainedStoreMachine(MaintainedLines):
    """The rules of a training, on any branch, and those of maintenance."""

    @beginning
    def create(self, mirror: Any, seed: int) -> None:
        self.line = Line()
        self.lines = [self.line]
        self.leases: list[Hold] = []
        self.cursors: dict[str, Hold] = {}
        self.ahead_ms = 0
        self.was_killed = False
        self.is_saving = False
        super().create(mirror, seed)

    # Names.

    @precondition(lambda self: bool(self.by_version))
    @rule(data=st.data())
    def tag(self, data: Any) -> None:
        version = data.draw(st.sampled_from(sorted(self.by_version)))
        name = f"tag{next(self.names)}"
        self.store.tag(name, version)
        self.tagged[name] = self.by_version[version].copy()
        self.line.log.tags[name] = version

    @precondition(lambda self: bool(self.tagged))
    @rule(data=st.data())
    def untag(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.tagged)))
        self.store.untag(name)
        del self.tagged[name], self.line.log.tags[name]

    @precondition(lambda self: bool(self.by_version))
    @rule(data=st.data(), name=st.sampled_from(["serving", "canary"]))
    def set_channel(self, data: Any, name: str) -> None:
        version = data.draw(st.sampled_from(sorted(self.by_version)))
        self.store.set_channel(name, version)
        self.line.log.channels[name] = version

    @precondition(lambda self: bool(self.line.log.channels))
    @rule(data=st.data())
    def drop_channel(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.line.log.channels)))
        self.store.drop_channel(name)
        del self.line.log.channels[name]

    # Branches.

    @precondition(lambda self: len(self.lines) <= MOST_BRANCHES and bool(self.main.by_version))
    @rule(data=st.data(), hours=st.none() | st.integers(1, 3), mirror=st.sampled_from(["memory", "none"]))
    def fork(self, data: Any, hours: int | None, mirror: Any) -> None:
        """Start a branch, and continue the training there."""
        self.follow(self.main)
        version = data.draw(st.sampled_from(sorted(self.main.by_version)))
        name = f"branch{next(self.names)}"
        ttl_s = None if hours is None else self.ahead_ms / 1000 + 3600.0 * hours
        self.main.store.fork(name, version, ttl_s=ttl_s).close()
        self.main.log.pins[name] = version

        line = Line(name, self.main.store.branches()[name].expires_ms, state=self.main.states[version].copy())
        line.fs = Flaky(self.inner)
        line.store = self.open_line(line, line.fs)
        line.log.begin_branch(self.main.log.versions[version], line.store.record(0).ts_ms)
        line.states.append(line.state.copy())
        line.writer = line.store.writer(mirror=mirror)
        self.lines.append(line)
        self.line = line
        self.follow(line)
        self.restored(line.writer, False)

    @precondition(lambda self: len(self.lines) > 1)
    @rule(data=st.data())
    def go_to_another_branch(self, data: Any) -> None:
        self.line = self.lines[data.draw(st.integers(0, len(self.lines) - 1))]

    @precondition(lambda self: len(self.lines) > 1)
    @rule(data=st.data())
    def drop_branch(self, data: Any) -> None:
        line = self.lines[data.draw(st.integers(1, len(self.lines) - 1))]
        self.note_what_holds_save(line)
        self.main.store.drop_branch(line.name)
        self.leave(line)
        self.check_ended(line)

    # Holds.

    @rule(data=st.data(), hours=st.integers(1, 3))
    def take_lease(self, data: Any, hours: int) -> None:
        version = data.draw(st.sampled_from(sorted(self.line.log.live())))
        lease = self.store.lease(version, ttl_s=self.ahead_ms / 1000 + 3600.0 * hours)
        self.leases.append(Hold(self.line, version, lease.expires_ms, lease))

    @precondition(lambda self: bool(self.leases))
    @rule(data=st.data())
    def release_lease(self, data: Any) -> None:
        hold = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        assert hold.lease is not None
        hold.lease.release()

    @rule(data=st.data(), hours=st.none() | st.integers(1, 3), number=st.integers(0, 1))
    def move_cursor(self, data: Any, hours: int | None, number: int) -> None:
        """A consumer follows; its cursor may also go back to a version that is still there."""
        name = f"cursor{number}.{self.line.name}"
        version = data.draw(st.sampled_from(sorted(self.line.log.live())))
        ttl_s = None if hours is None else self.ahead_ms / 1000 + 3600.0 * hours
        cursor = self.store.register_cursor(name, version, ttl_s=ttl_s)
        self.cursors[name] = Hold(self.line, version, cursor.expires_ms)

    @precondition(lambda self: bool(self.cursors))
    @rule(data=st.data())
    def drop_cursor(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.cursors)))
        self.main.store.drop_cursor(name)
        del self.cursors[name]

    @rule(hours=st.integers(1, 3))
    def time_passes(self, hours: int) -> None:
        """Leases, cursors and branches end; the next collection finds that they have ended."""
        self.ahead_ms += hours * HOUR_MS

    # Compaction.

    @rule(max_chain=st.integers(1, 5), fanout=st.integers(2, 4), ratio=st.sampled_from([1.01, 1.5, 1e6]))
    def compact_by_policy(self, max_chain: int, fanout: int, ratio: float) -> None:
        """Compact until nothing is left to do; then the chain satisfies the policy."""
        policy = CompactionPolicy(max_chain=max_chain, max_restore_ratio=ratio, fanout=fanout)
        with self.open_line(self.line) as store:
            longest = len(store.head().record.chain)
            for _ in range(longest + 1):
                report = compact_run(store, policy=policy, force=True)
                if report.outcome == "nothing":
                    break
                assert report.outcome == "committed"
            assert report.outcome == "nothing"
            chain = store.head().record.chain
            assert len(chain) <= max_chain
            sizes = [entry.size_bytes for entry in chain]
            assert sum(sizes[1:]) <= (ratio - 1) * sum(sizes[:1])
        self.go_on()

    @rule(data=st.data(), killed_at=st.none() | st.integers(0, 60), force=st.booleans())
    def compact_a_run(self, data: Any, killed_at: int | None, force: bool) -> None:
        """Compact any run; a compaction that fails is resumed by the next one, or collected."""
        with self.open_line(self.line) as store:
            before = [entry.seg for entry in store.head().record.chain]
        if len(before) < 2:
            return
        start = data.draw(st.integers(0, len(before) - 2))
        stop = data.draw(st.integers(start + 2, len(before)))
        if killed_at is not None:
            self.compact_with_a_failure((start, stop), killed_at)
            return
        with self.open_line(self.line) as store:
            report = compact_run(store, run=(start, stop), force=force)
            after = [entry.seg for entry in store.head().record.chain]
        if report.outcome == "busy":
            assert self.was_killed
            assert not force
            return
        assert report.outcome == "committed"
        assert report.run == tuple(before[start:stop])
        assert after[:start] + after[start + 1 :] == before[:start] + before[stop:]
        self.go_on()

    def compact_with_a_failure(self, where: tuple[int, int], killed_at: int) -> None:
        fs = Flaky(self.inner)
        with self.open_line(self.line, fs) as store:
            fs.arm(Fault(FaultKind.FAIL_BEFORE, len(fs.calls) + killed_at))
            with suppress(StorageFailure, CommitStateUnknown):
                compact_run(store, run=where, force=True)
            fs.arm(None)
        self.was_killed = True

    # Collections.

    @rule(
        keep_last=st.integers(1, 4),
        keep_every=st.none() | st.integers(2, 3),
        keep_newest=st.none() | st.integers(0, 6),
        batch=st.sampled_from([1, 2, 1000]),
        fails_at=st.none() | st.none() | st.integers(0, 80),
    )
    def collect(
        self, keep_last: int, keep_every: int | None, keep_newest: int | None, batch: int, fails_at: int | None
    ) -> None:
        """Collect without a grace period; the next collection continues one that fails."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("cnr_store.maintenance.gc.run._BATCH", batch)
            self.collect_in_batches(keep_last, keep_every, keep_newest, fails_at)

    def collect_in_batches(
        self, keep_last: int, keep_every: int | None, keep_newest: int | None, fails_at: int | None
    ) -> None:
        """Collect with as many segments in a record as is set."""
        now_ms = self.now_ms()
        self.follow(self.main)
        since_ms = None
        if keep_newest is not None:
            versions = self.main.log.versions
            since_ms = versions[max(0, len(versions) - 1 - keep_newest)].ts_ms - 0.5
        rules = Rules(keep_last, keep_every, since_ms)
        policy = RetentionPolicy(keep_last, None if since_ms is None else (now_ms - since_ms) / 1000, keep_every)
        options: dict[str, Any] = {
            "policy": policy, "grace_s": 0.0, "orphan_age_s": 0.0, "dry_run": False, "force": True,
            "clock_ms": lambda: now_ms,
        }  # fmt: skip
        ending = [line for line in self.lines if line.expires_ms is not None and line.expires_ms <= now_ms]
        for line in ending:
            self.note_what_holds_save(line)
        if fails_at is not None and not ending:
            self.collect_with_a_failure(fails_at, rules, now_ms, options)
        for line in self.lines:
            self.follow(line)
        with self.open_line(self.lines[int(self.rng.integers(len(self.lines)))]) as store:
            said = collect_garbage(store, **{**options, "dry_run": True})
            report = collect_garbage(store, **options)
        assert report.outcome in ("collected", "clean")
        assert not report.failures
        for line in ending:
            self.leave(line)
        for line in self.lines:
            self.expire(line, line.log, rules, now_ms)
            for explained in (said, report):
                stays = {one.version for one in explained.versions if one.branch == line.name and one.stays}
                missing = line.log.live() ^ stays
                # Records of this collection's own, at the end.
                assert all(version > max(stays) for version in missing), (line.name, missing)
            self.follow(line)
        self.was_killed = False
        self.check_storage(now_ms)
        self.check_versions()
        self.compared = None
        self.check_mirrors()
        for line in ending:
            self.check_ended(line)
        self.go_on()

    def collect_with_a_failure(self, fails_at: int, rules: Rules, now_ms: int, options: dict[str, Any]) -> None:
        """Some of the objects to delete may be deleted then, and no others."""
        before, after = {}, {}
        for line in self.lines:
            self.follow(line)
            before[line] = line.log.live()
            done = deepcopy(line.log)
            self.expire(line, done, rules, now_ms)
            after[line] = done.live()
        fs = Flaky(self.inner)
        with self.open_line(self.main, fs) as store:
            fs.arm(Fault(FaultKind.FAIL_BEFORE, len(fs.calls) + fails_at))
            with suppress(StorageFailure, CommitStateUnknown):
                collect_garbage(store, **options)
            fs.arm(None)
        for line in self.lines:
            with self.open_line(line) as store:
                head = store.head().record
            line.log.floor, line.log.kept = head.floor, set(head.kept)
            assert after[line] <= line.log.live() <= before[line]

    def go_on(self) -> None:
        """A writer that was opened before the maintenance can still save."""
        if self.writer.is_synced and not self.is_saving and self.rng.random() < 0.5:
            self.delta()

    @rule(what=st.lists(st.sampled_from(["compact", "compact all", "collect"]), min_size=2, max_size=4))
    def maintenance(self, what: list[str]) -> None:
        """Maintain as a cron job does; every collection keeps only the newest and the named versions."""
        self.maintain([*what, "collect"])
        self.go_on()

    # Saves that maintenance meets.

    @precondition(lambda self: self.writer.is_synced and not self.has_expired())
    @rule(
        maintenance=st.lists(st.sampled_from(["compact", "compact all", "collect"]), min_size=1, max_size=3),
        at=st.none() | st.integers(0, 40),
        is_one_shot=st.booleans(),
        in_outputs=st.booleans(),
    )
    def save_during_maintenance(
        self, maintenance: list[str], at: int | None, is_one_shot: bool, in_outputs: bool
    ) -> None:
        """The save wins unless its segment was marked, or its base was compacted into something later.

        ``at`` counts storage calls of the commit; None is between staging and commit.
        """
        state = self.state.copy()
        state.step = next(self.steps)
        changed: dict[str, set[int]] = {}
        begun = self.store.latest_version()
        txn = self.writer.begin(state.step, base="baseline" if is_one_shot else "head")
        chain = self.writer.head.record.chain
        self.fill_delta(txn, state, changed, 5, None, "rows", is_one_shot)
        self.is_saving = True
        try:
            with self.meeting(self.fs, at, partial(self.maintain, maintenance)):
                txn.commit()
        except TransactionAborted:
            assert self.is_given_up(txn.txn, begun)
        except DoesNotApply as error:
            # What a one-shot delta replaces was compacted and is gone: it says which rows must be given. Or the dense
            # tensors that any save compares with were, while it was open.
            is_gone = "were compacted since it began" in str(error)
            assert is_one_shot or is_gone
            assert self.store.head().record.chain[: len(chain)] != chain
        else:
            assert not self.is_given_up(txn.txn, begun)
            if is_one_shot:
                self.changed = {name: rows | self.changed.get(name, set()) for name, rows in self.changed.items()}
            self.won(state, changed)
        finally:
            txn.abort()
            self.is_saving = False
        if not self.writer.is_synced:
            self.follow(self.line)
            self.restored(self.writer, in_outputs)

    def maintain(self, what: list[str]) -> None:
        for one in what:
            if one == "collect":
                self.collect(keep_last=1, keep_every=None, keep_newest=None, batch=1000, fails_at=None)
                continue
            with self.open_line(self.line) as store:
                segments = len(store.head().record.chain)
                first = 0 if one == "compact all" else 1
                if segments - first >= 2:
                    assert compact_run(store, run=(first, segments), force=True).outcome == "committed"

    # Invariants.

    @invariant()
    def the_log_is_the_model(self) -> None:
        if not hasattr(self, "line"):
            return
        self.follow(self.line)
        assert self.store.tags() == self.line.log.tags
        assert self.store.channels() == self.line.log.channels


def test_a_maintained_store_is_what_the_training_saved() -> None:
    run(examples=16, steps=22, machine=MaintainedStoreMachine)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_a_maintained_store_is_what_the_training_saved_over_long_lives(capsys: pytest.CaptureFixture[str]) -> None:
    run(examples=SOAK_LIVES, steps=40, machine=MaintainedStoreMachine)
    with capsys.disabled():
        sys.stdout.write(f"{SOAK_LIVES} maintained lives, 0 failures\n")
