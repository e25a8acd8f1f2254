"""The logs of a maintained store with a model of each: the expected content, and checks against it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from cnr_store import Lease, Store, verify_store
from cnr_store.errors import BranchNotFound, DoesNotApply, Fenced, VersionExpired
from cnr_store.format.layout import DATA, DATA_GROUP, MANIFEST, RECEIPT, segment_key
from cnr_store.log.leases import CLOCK_TOLERANCE_MS
from cnr_store.segment.shards import Shard
from tests.store.test_store_machine import Flaky, State, StoreMachine, compare
from tests.support.faulty import Call
from tests.support.memory import opened
from tests.support.retention_model import NOTHING_SAVED, LogModel, Rules
from tests.support.store_oracle import CODED


@dataclass(eq=False)
class Line:
    """One log (the store's own or a branch) and its training."""

    name: str | None = None
    expires_ms: int | None = None
    log: LogModel = field(default_factory=LogModel)
    states: list[State] = field(default_factory=list)
    """By version, expired ones too."""

    fs: Any = None
    store: Any = None
    writer: Any = None
    state: State = field(default_factory=State)
    is_fresh: bool = False
    by_version: dict[int, State] = field(default_factory=dict)
    """What may be tagged and rolled back to: live versions with a checkpoint."""
    tagged: dict[str, State] = field(default_factory=dict)
    changed: dict[str, set[int]] = field(default_factory=dict)


@dataclass(eq=False)
class Hold:
    """A lease or a cursor, and the segments that it protects after its branch has ended."""

    line: Line
    version: int
    expires_ms: int | None
    lease: Lease | None = None
    left: set[str] = field(default_factory=set)

    def counts(self, now_ms: int) -> bool:
        return self.expires_ms is None or now_ms < self.expires_ms + CLOCK_TOLERANCE_MS


def of_the_line(name: str) -> Any:
    """An attribute of the machine that is stored separately for each line."""
    return property(lambda self: getattr(self.line, name), lambda self, value: setattr(self.line, name, value))


class MaintainedLines(StoreMachine):
    """A training on several logs of one store, with a model of each; `test_maintained_store_machine` has the rules."""

    fs: Any = of_the_line("fs")
    store: Any = of_the_line("store")
    writer: Any = of_the_line("writer")
    state: Any = of_the_line("state")
    is_fresh: Any = of_the_line("is_fresh")
    by_version: Any = of_the_line("by_version")
    tagged: Any = of_the_line("tagged")
    changed: Any = of_the_line("changed")
    line: Line
    lines: list[Line]
    leases: list[Hold]
    cursors: dict[str, Hold]
    ahead_ms: int
    is_saving: bool

    def teardown(self) -> None:
        for line in getattr(self, "lines", []):
            line.writer.close()
            line.store.close()

    # The model follows the logs.

    def open_store(self, fs: Any) -> Store:
        return self.open_line(self.line, fs)

    def open_line(self, line: Line, fs: Any = None) -> Store:
        """A line, opened again as by another process."""
        return opened(self.inner if fs is None else fs, branch=line.name)

    @property
    def main(self) -> Line:
        return self.lines[0]

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.ahead_ms

    def has_expired(self) -> bool:
        """Whether the next collection ends the branch, so that a save on it fails."""
        return self.line.expires_ms is not None and self.line.expires_ms <= self.now_ms()

    def follow(self, line: Line) -> None:
        """Add the records that were committed to the model."""
        log = line.log
        with self.open_line(line) as store:
            for version in range(len(log.versions), store.latest_version() + 1):
                record = store.record(version)
                log.add(record.kind, record.target, record.ts_ms)
                if record.kind in ("baseline", "delta", "rollback"):
                    line.states.append(line.by_version[version])
                else:
                    line.states.append(line.states[-1] if line.states else State())
        self.forget_expired(line)

    def forget_expired(self, line: Line) -> None:
        line.by_version = {
            version: line.states[version]
            for version in sorted(line.log.live())
            if line.log.versions[version].content != NOTHING_SAVED
        }

    def note_what_holds_save(self, line: Line) -> None:
        """The holds on a branch that ends still protect their segments."""
        self.follow(line)
        for hold in [*self.leases, *self.cursors.values()]:
            if hold.line is line:
                last = hold.version if hold.lease else line.log.head
                held = line.log.live() & set(range(hold.version, last + 1))
                hold.left = {entry.seg for version in held for entry in line.store.record(version).chain}

    def leave(self, line: Line) -> None:
        self.lines.remove(line)
        del self.main.log.pins[str(line.name)]
        self.follow(self.main)
        if self.line is line:
            self.line = self.main

    def check_ended(self, line: Line) -> None:
        """No process can commit or read there any more; the objects of a late save are orphans."""
        if line.writer.is_synced:
            with pytest.raises((Fenced, DoesNotApply)):  # the latter where its chain was compacted and collected
                line.writer.begin(next(self.steps)).commit()
        for call in (line.store.snapshot, line.store.writer, partial(line.store.tag, "late")):
            with pytest.raises(BranchNotFound):
                call()
        with pytest.raises(BranchNotFound):
            self.open_line(line)
        line.writer.close()
        line.store.close()

    def expire(self, line: Line, log: LogModel, rules: Rules, now_ms: int) -> None:
        leased = [hold.version for hold in self.leases if hold.line is line and hold.counts(now_ms)]
        cursors = [hold.version for hold in self.cursors.values() if hold.line is line and hold.counts(now_ms)]
        log.expire(rules, leased, cursors)

    def check_storage(self, now_ms: int) -> None:
        """The objects under ``data/`` are those that live versions and holds on ended branches need."""
        needed: dict[str, set[str]] = {}
        for line in self.lines:
            # A store of its own: the writer's only thread may be in the save that this collection meets.
            with self.open_line(line) as store:
                for version in line.log.live():
                    for reader in store.snapshot(version).readers:
                        if reader.name not in needed:
                            paths = {MANIFEST, *(entry.path for entry in reader.manifest.objects)}
                            needed[reader.name] = {segment_key(reader.name, path) for path in paths}
        held = {seg for hold in [*self.leases, *self.cursors.values()] if hold.counts(now_ms) for seg in hold.left}
        listed = {stat.key for stat in self.main.store.storage.list_objects(DATA)} - {DATA_GROUP}
        found = {key for key in listed if key.split("/")[1] not in held - needed.keys()}
        # A writer without objects is named nowhere but in its receipt; a committer has none.
        receipts = {key for key in found if key.endswith(f".{RECEIPT}") and key.split("/")[1] in needed}
        wanted = {key for keys in needed.values() for key in keys}
        assert found == wanted | receipts
        assert held <= {key.split("/")[1] for key in listed}

    def check_versions(self) -> None:
        """Every live version can be opened by number and by name; every other version is refused."""
        for line in self.lines:
            with self.open_line(line) as store:
                self.check_versions_of(line, store)
        assert {name: pin.version for name, pin in self.main.store.branches().items()} == self.main.log.pins

    def check_versions_of(self, line: Line, store: Store) -> None:
        log = line.log
        assert (store.tags(), store.channels()) == (log.tags, log.channels)
        gone = [one.number for one in log.versions if not log.is_live(one.number)]
        for version in gone:
            with pytest.raises(VersionExpired):
                store.snapshot(version)
        if gone:
            self.check_refused(store, gone[int(self.rng.integers(len(gone)))])
        for version in self.rng.permutation(sorted(log.live()))[:3].tolist():
            compare(store, store.snapshot(version), line.states[version], self.rng)
        for name, version in log.channels.items():
            compare(store, store.snapshot(channel=name), line.states[version], self.rng)
        for name, version in log.tags.items():
            compare(store, store.snapshot(tag=name), line.states[version], self.rng)
        if self.rng.random() < 0.3:
            report = verify_store(store, all_versions=True, deep=True, threads=1)
            assert report.is_sound, report.problems

    def check_refused(self, store: Store, version: int) -> None:
        calls: list[Callable[[], Any]] = [
            partial(store.tag, "late", version),
            partial(store.set_channel, "late", version),
            partial(store.lease, version),
            partial(store.register_cursor, "late", version),
            partial(store.rollback, version),
        ]
        if store.branch is None:
            calls.append(partial(store.fork, "late", version))
        for call in calls:
            with pytest.raises(VersionExpired):
                call()

    def check_mirrors(self) -> None:
        """A process that restores now gets mirrors equal to the writer's."""
        if not self.writer.is_synced or self.is_saving:  # refined scales wait in the mirror for their outcome
            return
        with self.open_line(self.line, self.inner.fork()) as store, store.writer() as fresh:
            fresh.restore()
            for name in self.state.tables:
                mine, theirs = self.writer.mirrors.get(Shard(name)), fresh.mirrors.get(Shard(name))
                if mine is None or theirs is None:
                    continue
                assert mine.arrays.keys() == theirs.arrays.keys()
                coded = self.state.tables[name].status == CODED  # of other rows the codes are nobody's
                for array, codes in mine.arrays.items():
                    held, found = np.asarray(codes)[coded], np.asarray(theirs.arrays[array])[coded]
                    assert np.array_equal(held, found), (name, array, held, found)  # in integers of any width
                assert mine.digest() == theirs.digest()

    def is_given_up(self, txn: str, since: int) -> bool:
        records = (self.store.record(version) for version in range(since, self.store.latest_version() + 1))
        return any(txn in record.aborted for record in records)

    @contextmanager
    def meeting(self, fs: Flaky, at: int | None, action: Callable[[], None]) -> Iterator[None]:
        """Run ``action`` at storage call ``number`` of the block, at the latest before its commit record."""
        if at is None:
            action()
            yield
            return
        start, failures = len(fs.calls), list[BaseException]()

        def on_call(call: Call) -> None:
            if call.index >= start + at or (call.operation == "create" and "/commits/" in call.path):
                fs.meet(None)
                try:
                    action()
                except BaseException as failure:
                    failures.append(failure)  # it is no failure of the call
                    raise

        fs.meet(on_call)
        try:
            yield
        finally:
            fs.meet(None)
            if failures:
                raise failures[0]
