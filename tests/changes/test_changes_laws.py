"""Consumers that follow change streams through maintained lives of a store have what its snapshots have, to the bit.

They come and go while trainers save, roll back and fork, and while maintenance compacts, expires and collects without
grace. A consumer whose version is still live is never told that its cursor has expired.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from cnr_store import Store
from cnr_store.changes import ChangeCursor, ChangeStream, catch_up, changes
from cnr_store.errors import CursorExpired, DoesNotApply, MissingObject
from cnr_store.format.commit_record import is_live
from cnr_store.segment.reader import open_chain
from tests.maintenance.maintained_lines import Line
from tests.maintenance.test_maintained_store_machine import MaintainedStoreMachine
from tests.store.test_store_machine import run
from tests.support.change_copy import ChangeCopy, content_of

MOST_CONSUMERS = 3


@dataclass(eq=False)
class Consumer:
    """One that applies a version as a whole, and keeps its cursor with what it has."""

    line: Line
    slots: bool
    max_batch_rows: int
    only: frozenset[str] | None
    mirror: Literal["none", "memory"] = "none"
    content: ChangeCopy = field(default_factory=ChangeCopy)
    cursor: ChangeCursor | None = None

    def stream(self, store: Store) -> ChangeStream:
        return changes(
            store, self.cursor, slots=self.slots, max_batch_rows=self.max_batch_rows,
            tables=self.only, cache_bytes=1 << 20, mirror=self.mirror,
        )  # fmt: skip


class FollowedStoreMachine(MaintainedStoreMachine):
    """The lives of a maintained store, and consumers of them."""

    @invariant()
    def consumers_come_and_follow(self) -> None:
        """After every rule, by the seed's chances: rules of their own would come too seldom among so many."""
        if not self.by_version:
            return
        consumers: list[Consumer] = self.__dict__.setdefault("consumers", [])
        if len(consumers) < MOST_CONSUMERS and self.rng.random() < 0.5:
            only = frozenset(sorted(self.state.tables)[:1]) if self.rng.random() < 0.2 else None
            most = int(self.rng.choice([1, 3, 1000]))
            slots = bool(self.rng.random() < 0.4)
            mirror: Any = "none" if slots or self.rng.random() < 0.4 else "memory"
            consumers.append(Consumer(self.line, slots, most, only or None, mirror))
        for consumer in list(consumers):
            if consumer.line not in self.lines:
                consumers.remove(consumer)
            elif self.rng.random() < 0.4:
                versions = None if self.rng.random() < 0.4 else int(self.rng.integers(4))
                self.consume(consumer, versions, int(self.rng.integers(4)))

    @precondition(lambda self: all(line.expires_ms is None for line in self.lines))
    @rule(hours=st.integers(1, 3))
    def time_passes(self, hours: int) -> None:
        """Of branches without an end: one that ends in the middle of a save on it is for those lives to test."""
        super().time_passes(hours)

    def go_on(self) -> None:
        """As the training does; a save whose chain was compacted and deleted beneath it is refused."""
        try:
            super().go_on()
        except DoesNotApply:
            self.restored(self.writer, False)

    def consume(self, consumer: Consumer, versions: int | None, batches: int) -> None:
        """Some versions, or all; the process is killed in the middle of the next one."""
        with self.open_line(consumer.line) as store:
            try:
                self.replay(store, consumer, versions, batches)
            except CursorExpired:
                assert consumer.cursor is not None
                assert not is_live(store.head().record, consumer.cursor.version)
                self.begin_anew(store, consumer)

    def replay(self, store: Store, consumer: Consumer, versions: int | None, batches: int) -> None:
        if consumer.only is not None:
            chain = () if consumer.cursor is None else store.record(consumer.cursor.version).chain
            with suppress(MissingObject):  # folded and collected: then no name is refused
                segments = open_chain(store.storage, chain, store.internals.workers)
                known = {name for last in segments[-1:] for name in last.manifest.tables}
                consumer.only &= known | store.snapshot().tables.keys()
        stream = consumer.stream(store)
        last = -1 if consumer.cursor is None else consumer.cursor.version
        told = stream.versions()
        for version in islice(told, versions):
            assert version.version > last
            last = version.version
            after = consumer.content.copy()
            names = []
            for batch in version.batches:
                names.append((batch["table"][0].as_py(), batch["row_id"][0].as_py()))
                assert batch.num_rows <= consumer.max_batch_rows
                assert set(batch["version"].to_pylist()) == {last}
                assert set(batch["step"].to_pylist()) == {version.step}
                after.apply(batch)
            assert names == sorted(names)
            assert stream.cursor == consumer.cursor or stream.cursor is not None
            consumer.content, consumer.cursor = after, ChangeCursor.at(store, last)
            self.check_copy(store, consumer)
        if versions is None:
            consumer.cursor = stream.cursor
            assert stream.cursor == ChangeCursor.at(store, store.latest_version())
            self.check_copy(store, consumer)
            return
        killed = next(told, None)
        if killed is not None:
            for _ in islice(killed.batches, batches):
                pass

    def check_copy(self, store: Store, consumer: Consumer) -> None:
        assert consumer.cursor is not None
        snapshot = store.snapshot(consumer.cursor.version)
        expected = content_of(snapshot, slots=consumer.slots, only=consumer.only)
        assert consumer.content.tables == expected

    def begin_anew(self, store: Store, consumer: Consumer) -> None:
        """Compare the whole copy, then continue the stream."""
        held = {name: _held(store, name, rows) for name, rows in consumer.content.tables.items()}
        if consumer.slots or any(one is None for one in held.values()):
            consumer.content, consumer.cursor = ChangeCopy(), None
            return
        differences = catch_up(store, held, tables=consumer.only, max_batch_rows=consumer.max_batch_rows)
        for batch in differences:
            consumer.content.apply(batch)
        consumer.cursor = differences.cursor
        self.check_copy(store, consumer)


def _held(store: Store, name: str, rows: dict[int, bytes]) -> Any:
    """A consumer's copy in the form that `catch_up` takes; None if the dtype of its bytes is unknown."""
    schema = store.snapshot().tables.get(name)
    if schema is None:
        dtype, dim, keys = "float32", len(next(iter(rows.values()))) // 4, "hashed" if min(rows) < 0 else "dense"
    else:
        dtype, dim, keys = schema.dtype, schema.dim, schema.keys
    numpy_dtype = np.dtype("float16" if dtype == "float16" else "float32")
    order = sorted(rows)
    if any(len(rows[row]) != dim * numpy_dtype.itemsize for row in order):
        return None
    values = np.frombuffer(b"".join(rows[row] for row in order), numpy_dtype).reshape(len(order), dim)
    if keys == "hashed" or order != list(range(len(order))):
        return np.asarray(order, np.int64), values
    return lambda start, stop: values[start:stop]


@pytest.fixture(params=[(1, 1), (1024, 1 << 20)], ids=["small windows", "whole tables"])
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    least_rows, listed_rows = request.param
    monkeypatch.setattr("cnr_store.changes.table_rows.LEAST_ROWS", least_rows)
    monkeypatch.setattr("cnr_store.changes.table_rows.WINDOW_BYTES", 1)
    monkeypatch.setattr("cnr_store.changes.differences.LISTED_ROWS", listed_rows)


@pytest.mark.usefixtures("windows")
def test_consumers_have_what_the_snapshots_have() -> None:
    run(examples=6, steps=24, machine=FollowedStoreMachine)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
@pytest.mark.usefixtures("windows")
def test_consumers_have_what_the_snapshots_have_over_long_lives() -> None:
    run(examples=600, steps=50, machine=FollowedStoreMachine)
