"""A source of versions and a sink that fails on demand, with a feed between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cnr_store.errors import StorageFailure
from cnr_store.serving.sinks import Published, SinkFeed, SinkState, SinkTable, SourceRows
from cnr_store.types import Float32s, RowIds

Rows = dict[str, dict[int, float]]
DIM = 3
TABLES = {"dense": SinkTable(DIM, 30), "hashed": SinkTable(DIM, None)}


def state(version: int, store: str = "store") -> SinkState:
    return SinkState(store, "", version, 10 * version)


@dataclass
class Source:
    """A loader of versions that are all remembered; the n-th read may be preceded by publications."""

    tables: dict[str, SinkTable] = field(default_factory=lambda: dict(TABLES))
    history: dict[int, Rows] = field(default_factory=dict)
    shown: int = -1
    newest: int = -1
    feeds: list[SinkFeed] = field(default_factory=list)
    before_reads: list[Callable[[], object]] = field(default_factory=list)
    tells_changes: bool = True
    lock: threading.RLock = field(default_factory=threading.RLock)
    read: int = 0

    def published(self) -> Published | None:
        with self.lock:
            return None if self.shown < 0 else Published(state(self.shown), dict(self.tables))

    def row_ids(self, table: str) -> Sequence[int] | RowIds:
        with self.lock:
            num_rows = self.tables[table].num_rows
            return range(num_rows) if num_rows else np.array(sorted(self.history[self.shown][table]), np.int64)

    def read_rows(self, row_ids: Mapping[str, RowIds]) -> SourceRows:
        if self.before_reads:
            self.before_reads.pop(0)()
        with self.lock:
            rows, version = self.history[self.shown], self.shown
        found = {}
        for table, ids in row_ids.items():
            self.read += len(ids)
            values = [rows[table].get(int(row_id)) for row_id in ids]
            array = np.array([[np.nan if value is None else value] * DIM for value in values], np.float32)
            found[table] = (array.reshape(len(ids), DIM), np.array([value is not None for value in values], bool))
        return SourceRows(version, found)

    def changed_since(self, state: SinkState) -> Mapping[str, RowIds] | None:
        with self.lock:
            if not self.tells_changes or state.version not in self.history:
                return None
            return differences(self.history[state.version], self.history[self.shown])

    def publish(self, changes: Mapping[str, Mapping[int, float | None]]) -> int:
        """Publish a new version with these rows changed, and notify the feeds."""
        with self.lock:
            before = self.history.get(self.shown, {name: {} for name in self.tables})
            rows = {name: dict(before.get(name, {})) for name in self.tables}
            for table, changed in changes.items():
                for row_id, value in changed.items():
                    if value is None:
                        rows[table].pop(row_id, None)
                    else:
                        rows[table][row_id] = value
            self.newest += 1
            self.history[self.newest] = rows
            return self.show(self.newest)

    def show(self, version: int, *, says_which: bool = True) -> int:
        with self.lock:
            before = self.history.get(self.shown, {name: {} for name in self.tables})
            self.shown = version
            changed: dict[str, RowIds | None] = dict(differences(before, self.history[version]))
            if not says_which:
                changed = dict.fromkeys(self.tables)
            for feed in self.feeds:
                feed.notice(Published(state(version), dict(self.tables)), changed)
            return version


def differences(a: Rows, b: Rows) -> dict[str, RowIds]:
    return {
        table: np.array(
            sorted(i for i in {**a.get(table, {}), **b[table]} if a.get(table, {}).get(i) != b[table].get(i)), np.int64
        )
        for table in b
    }


class Died(Exception):
    """An error of a user's own sink."""


@dataclass
class Sink:
    """A model of a sink: rows in memory, and failures before or after a call takes effect."""

    source: Source
    rows: Rows = field(default_factory=dict)
    state: SinkState | None = None
    batch: Rows | None = None
    fails: dict[int, tuple[str, Exception]] = field(default_factory=dict)  # call number -> "before" or "after", what
    calls: int = 0
    log: list[str] = field(default_factory=list)
    name: str = "model"

    def _do(self, what: str, act: Callable[[], None]) -> None:
        self.calls += 1
        self.log.append(what)
        when, error = self.fails.pop(self.calls, ("", Died()))
        if when != "before":
            act()
        if when:
            raise error

    def open(self) -> SinkState | None:
        self._do("open", lambda: setattr(self, "batch", None))
        return self.state

    def begin(self, tables: Mapping[str, SinkTable], *, full: bool) -> None:
        if not full and self.state is None:
            raise StorageFailure("it was emptied")
        kept = {} if full else self.rows
        self._do(
            "begin full" if full else "begin",
            lambda: setattr(self, "batch", {table: dict(kept.get(table, {})) for table in tables}),
        )

    def put(self, table: str, row_ids: RowIds, values: Float32s) -> None:
        assert len(row_ids)
        assert (np.diff(row_ids) > 0).all()
        assert np.isfinite(values).all()
        assert (values == values[:, :1]).all()
        assert self.batch is not None
        fresh = dict(zip(row_ids.tolist(), values[:, 0].tolist(), strict=True))
        self._do("put", lambda target=self.batch[table]: target.update(fresh))  # type: ignore[misc]

    def delete(self, table: str, row_ids: RowIds) -> None:
        assert self.batch is not None
        target = self.batch[table]
        self._do("delete", lambda: [target.pop(row_id, None) for row_id in row_ids.tolist()] and None)

    def commit(self, state: SinkState) -> None:
        assert self.batch is not None
        batch = self.batch

        def act() -> None:
            self.rows, self.state, self.batch = batch, state, None
            assert self.rows == self.source.history[state.version], f"not version {state.version} whole"

        self._do("commit", act)

    def abort(self) -> None:
        self.batch = None


def filled(**options: Any) -> tuple[Source, SinkFeed, Sink]:
    """A source with one version, and a feed of it."""
    source = filled_source()
    return source, *connected(source, **options)


def connected(source: Source, **options: Any) -> tuple[SinkFeed, Sink]:
    sink = Sink(source)
    feed = SinkFeed(source, sink, **options)
    source.feeds.append(feed)
    return feed, sink


def filled_source() -> Source:
    source = Source()
    source.publish({"dense": {i: float(i) for i in range(30)}, "hashed": {-7: 1.0, 5: 2.0}})
    return source
