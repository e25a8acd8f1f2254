"""The changes of a store, version by version, as Arrow record batches: for online training and analytics.

The consumer pulls: nothing is read before it asks, and memory is bounded by windows. The batches of a version come
together. The cursor advances when the consumer asks for the next version. A consumer that continues from its cursor
misses nothing and gets at most one version twice, which does no harm because values are absolute.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain as chained
from typing import Literal

import numpy as np
import pyarrow as pa

from cnr_store.changes.arrow import change_schema
from cnr_store.changes.cursor import ChangeCursor
from cnr_store.changes.stream_path import StreamPath
from cnr_store.changes.version_reader import VersionReader, names_of, segment_of
from cnr_store.errors import BadInput, BranchNotFound, CursorExpired, MissingObject, TableNotFound, VersionNotFound
from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.runtime.arguments import check_not_one, checked_choice, checked_count, checked_number, some_of
from cnr_store.runtime.closing import Closing
from cnr_store.runtime.repeating import pause_s
from cnr_store.serving.protection import RegisteredCursor
from cnr_store.store import Store

MAX_BATCH_ROWS = 65_536
CACHE_BYTES = 256 * 1024 * 1024

_WAIT_S = 0.5
"""Seconds between polls of a stream that does not follow, for a version that its relay has not copied yet."""


def changes(
    store: Store,
    since: ChangeCursor | int | None = None,
    *,
    tables: Collection[str] | None = None,
    follow: bool = False,
    slots: bool = False,
    slots_rule: Literal["exact", "mean"] = "exact",
    poll_interval_s: float = 0.5,
    cursor: str | None = None,
    ttl_s: float | None = None,
    max_batch_rows: int = MAX_BATCH_ROWS,
    mirror: Literal["none", "memory"] = "none",
    cache_bytes: int = CACHE_BYTES,
) -> ChangeStream:
    """Return the changes after a version as a stream of `pyarrow.RecordBatch`; no I/O before the first is requested.

    Each batch has rows of one table at one version, sorted by row id, in the columns of `change_schema`. The batches of
    a version come together, tables in order. Every live version is reported; the changes of expired versions come with
    the next live one. A compaction has no changes, a rollback has the rows that differ.

    Parameters
    ----------
    store
        The store, or a branch of it.
    since
        The version that the consumer has; only later changes are reported. None starts with the whole latest snapshot,
        every row an ``upsert``: apply it to an empty copy.
    tables
        The tables to report; None is all.
    follow
        Wait for new versions until `ChangeStream.close`. Otherwise the stream ends with the version that is the newest
        at its start.
    slots
        Whether slots are reported too, as columns ``slot_<name>``. Rows of which only slots changed are always
        reported.
    slots_rule
        For one-dimensional slots stored per column range: ``exact`` raises, ``mean`` averages (`TableView`).
    poll_interval_s
        Seconds between two polls when following. A poll without a new version costs one request.
    cursor
        The cursor to register in the store (`Store.register_cursor`), which protects what is still needed from expiry:
        at ``since`` or the first snapshot at the start, then at each version that was consumed. Needs write access.
    ttl_s
        Seconds until a registered cursor expires if it is not renewed; None is never (`Store.drop_cursor`). It is
        renewed between batches and polls, so give more than a consumer takes for a batch.
    max_batch_rows
        Most rows in a batch.
    mirror
        The source of the values of changed rows. ``none``: the store. ``memory``: a copy of the tables as of the
        consumed version, to which deltas are added. It is loaded at the first version; then the cost of a version grows
        with its changed rows. Without slots.
    cache_bytes
        Maximum size of the cache of decoded chunks; not needed with a mirror.

    Raises
    ------
    BadInput
        The cursor is of another store or branch, or an argument is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> store = Store.create("memory://doctest-changes")
    >>> with store.writer() as writer:
    ...     with writer.begin(step=10) as txn:
    ...         txn.write_table("user", np.zeros((4, 2), np.float32))
    ...     for step in (20, 30):
    ...         with writer.begin(step=step) as txn:
    ...             _ = txn.write_rows("user", np.array([1, 3]), np.full((2, 2), step / 10, np.float32))
    >>> for batch in changes(store, since=3):
    ...     batch["version"][0].as_py(), batch["row_id"].to_pylist(), batch["values"].to_pylist()
    (4, [1, 3], [[3.0, 3.0], [3.0, 3.0]])
    """
    if not isinstance(store, Store):
        raise BadInput(f"changes() takes an open store, found {store!r}; give Store.open(url)", found=str(store))
    check_not_one("tables", tables)
    checked_count("max_batch_rows", max_batch_rows, least=1)
    checked_number("poll_interval_s", poll_interval_s, above=0, most=1e9)
    checked_choice("slots_rule", slots_rule, ("exact", "mean"))
    if mirror not in ("none", "memory") or (slots and mirror != "none"):
        raise BadInput(f"mirror is {mirror!r}; give 'none', or 'memory' without slots", found=mirror)
    only = None if tables is None else frozenset(tables)
    reader = VersionReader(
        store, only, slots=slots, slots_rule=slots_rule, max_batch_rows=max_batch_rows, cache_bytes=cache_bytes,
        has_copy=mirror == "memory",
    )  # fmt: skip
    return ChangeStream(
        store, _start_of(store, since), reader, RegisteredCursor(store, cursor, ttl_s),
        poll_interval_s=poll_interval_s if follow else None,
    )  # fmt: skip


def _start_of(store: Store, since: ChangeCursor | int | None) -> ChangeCursor | None:
    if since is None:
        return None
    if isinstance(since, ChangeCursor):
        since.check_of(store)
        return since
    if isinstance(since, bool) or not isinstance(since, int | np.integer):
        raise BadInput(
            f"since takes a version or a ChangeCursor, found {since!r}; for a stored text give "
            "ChangeCursor.from_json(...)",
            found=str(since),
        )
    return ChangeCursor.at(store, int(since))


@dataclass(frozen=True, slots=True)
class VersionChanges:
    """What one version changes.

    Attributes
    ----------
    version, step
        The log position, and the training step of its state.
    batches
        Take all of them before you request the next version; may be empty.
    """

    version: int
    step: int
    batches: Iterator[pa.RecordBatch]


class _TargetGone(Exception):
    """The version expired and was deleted before a batch of it was reported."""


class ChangeStream(Closing):
    """An iterator of record batches; see `changes`. One thread iterates; `close` may be called from any.

    After an error the next call retries: it starts the version again that was not consumed completely.
    """

    def __init__(
        self,
        store: Store,
        start: ChangeCursor | None,
        reader: VersionReader,
        registered: RegisteredCursor,
        *,
        poll_interval_s: float | None,
    ) -> None:
        """Without ``poll_interval_s`` the stream ends at the newest version of its start."""
        self._store = store
        self._cursor = start
        self._reader = reader
        self._registered = registered
        self._poll_interval_s = poll_interval_s
        self._closed = threading.Event()
        self._is_over = False
        self._flat: Iterator[pa.RecordBatch] | None = None
        self._path = StreamPath()
        self._begun: LogEntry | None = None
        self._head: LogEntry | None = None

    @property
    def cursor(self) -> ChangeCursor | None:
        """The last version that was consumed: its last batch was followed by another call. None before the first."""
        return self._cursor

    @property
    def tables(self) -> tuple[str, ...] | None:
        """The reported tables, sorted; None is all."""
        return None if self._reader.only is None else tuple(sorted(self._reader.only))

    @property
    def has_slots(self) -> bool:
        """Whether slots are reported too."""
        return self._reader.has_slots

    @property
    def store(self) -> Store:
        """The store whose changes these are."""
        return self._store

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Give the changes of one table to DuckDB, polars, pandas or pyarrow; batches are read as they are asked for.

        Raises
        ------
        BadInput
            The stream has several tables, whose columns differ: name one in ``tables=``.
        """
        tables = self._store.snapshot().tables
        names = sorted(tables) if self._reader.only is None else sorted(self._reader.only)
        if len(names) != 1 or names[0] not in tables:
            raise BadInput(
                f"an Arrow stream has one table, because the columns of tables differ; this one has {names}: name one "
                "that the store has in tables=",
                found=names,
            )
        schema = tables[names[0]]
        columns = change_schema(names[0], schema, sorted(schema.slots) if self._reader.has_slots else ())
        return pa.RecordBatchReader.from_batches(columns, self).__arrow_c_stream__(requested_schema)

    def close(self) -> None:
        """End the stream, and a wait in it. A registered cursor stays at its version.

        The iteration over batches ends at once. `versions` ends after all batches of the current version, so that a
        consumer that applies whole versions never gets a part of one.
        """
        self._closed.set()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        """Return the next batch; blocks for reads, and when following for the next version.

        Raises
        ------
        CursorExpired
            The changes since the cursor were deleted; `catch_up` compares with your own copy.
        VersionNotFound, TableNotFound, BranchNotFound, CorruptStore, AccessDenied, StorageFailure
        Unsupported
            One-dimensional slots that ``slots_rule`` refuses.
        """
        if self._is_over:
            raise StopIteration
        if self._flat is None:
            self._flat = (batch for version in self.versions() for batch in version.batches)
        try:
            batch = next(self._flat)
        except StopIteration:
            self._is_over = True
            raise
        except BaseException:
            self._flat = None
            raise
        if self._closed.is_set():
            self._is_over = True
            raise StopIteration
        return batch

    def versions(self) -> Iterator[VersionChanges]:
        """Yield the changes version by version, for a consumer that applies a version as a whole; errors as `next`.

        The cursor moves to a version when the next one is requested. Use either this or the iteration over batches.

        Raises
        ------
        BadInput
            The batches of a version were not taken to the end before the next version was asked for.
        """
        self._begin()
        while not self._closed.is_set():
            target = self._next_target()
            if target is None:
                return
            try:
                batches = self._open_version(target)
            except _TargetGone:
                self._pass_by(target)
                continue
            opened = _VersionBatches(batches)
            yield VersionChanges(target.record.v, target.record.step, opened)
            if opened.is_open:
                if self._closed.is_set():
                    return
                raise BadInput(
                    f"the batches of version {target.record.v} were not taken to the end before the next version was "
                    "asked for",
                    version=target.record.v,
                )
            self._arrive(target)

    # ---- which version is next

    def _begin(self) -> None:
        """Read the newest record and the consumer's; does nothing if they are known."""
        if self._head is None:
            self._head = self._store.head()
        if self._cursor is None or self._path:
            return
        version = self._cursor.version
        entry = self._store.internals.log.read_standing(version)
        relay = self._store.relay
        if entry is None and relay is not None and version < relay.first:
            raise CursorExpired(
                f"relay {self._store.url} holds no version before {relay.first}, the cursor is at {version}: what "
                "changed between them is unknown here; compare your copy with a snapshot (catch_up), or read from "
                "the source",
                version=version, expected=relay.first,
            )  # fmt: skip
        if entry is None or entry.record.v != version:
            raise VersionNotFound(
                f"{self._store.url} has no version {version} to go on from; the newest is {self._head.record.v}",
                version=version,
            )
        self._check_tables(entry, self._head)
        self._registered.put(version)
        self._path.restart(entry)

    def _check_tables(self, *entries: LogEntry) -> None:
        """Refuse names that no entry has as a table, as far as that can be read; a GET for each, if any was named."""
        if not self._reader.only:
            return
        try:
            known = {table for entry in entries for table in self._reader.tables_of(entry)}
        except MissingObject:
            return  # the segments of the cursor's version were compacted and deleted
        missing = sorted(self._reader.only - known)
        if missing:
            raise TableNotFound(f"no table {missing[0]!r}; there are {some_of(known, missing[0])}", table=missing[0])

    def _next_target(self) -> LogEntry | None:
        """Return the next record whose changes are reported; None at the end."""
        if self._begun is not None:
            return self._begun
        assert self._head is not None
        if not self._path:
            first = self._head
            self._check_tables(first)
            if first.record.chain:
                return first
            self._arrive(first)  # Nothing was saved yet: there is no state to report.
        last = self._head.record.v
        while not self._closed.is_set():
            newest = self._path.newest
            if self._poll_interval_s is None and newest.record.v >= last:
                self._move_registered()
                self._head = None  # whoever asks for versions again gets those that are newer then
                return None
            entry = self._store.poll(newest)
            if entry is None:
                if newest.record.v < last and (self._poll_interval_s is None or self._store.relay is None):
                    self._store.internals.log.check_no_hole(newest)
                self._move_registered()
                self._closed.wait(pause_s(self._poll_interval_s or _WAIT_S, 0, random.random()))
                continue
            if entry.record.kind == "close":
                raise BranchNotFound(f"the branch of this stream was dropped at version {entry.record.v}")
            if entry.record.v > self._head.record.v:
                self._head = entry
            consumed = self._path.consumed
            step = self._path.take(entry, self._head.record)
            if step == "report":
                return entry
            if step == "same":
                self._reader.follow(consumed, entry)
            if not self._path.has_changed:
                self._cursor = ChangeCursor.at(self._store, entry.record.v)
        return None

    def _pass_by(self, entry: LogEntry) -> None:
        """Skip a version that expired before it was reported."""
        if self._path:
            self._path.pass_by(entry)
        else:
            self._head = None  # The first one: begin again with the newest.
            self._begin()

    def _arrive(self, target: LogEntry) -> None:
        """Record that the consumer has ``target``."""
        self._begun = None
        self._path.restart(target)
        self._reader.settle(target)
        self._cursor = ChangeCursor.at(self._store, target.record.v)
        self._move_registered()

    def _move_registered(self) -> None:
        if self._cursor is not None:
            self._registered.move(self._cursor.version)

    # ---- what a version changes

    def _open_version(self, target: LogEntry) -> Iterator[pa.RecordBatch]:
        """Return the batches of a version; the first one is read here, so that a deleted version is found before it.

        Raises
        ------
        _TargetGone
            The version expired before a batch of it was reported.
        """
        was_begun = self._begun is not None
        if self._registered.version is None and not self._registered.put(target.record.v):
            self._refuse_begun(was_begun, target, None)
            raise _TargetGone
        batches = self._guarded(self._reader.batches(self._path, target), target, is_begun=was_begun)
        first = next(batches, None)
        self._begun = target
        return chained([] if first is None else [first], batches)

    def _guarded(
        self, batches: Iterator[pa.RecordBatch], target: LogEntry, *, is_begun: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yield the batches. If an object was deleted because a version expired, report that instead of damage."""
        try:
            for batch in batches:
                yield batch
                is_begun = True
                self._registered.renew()
        except MissingObject as missing:
            newest = self._store.head()
            self._head = newest
            segment = segment_of(missing)
            if segment in names_of(target):
                if is_live(newest.record, target.record.v):
                    raise
                self._refuse_begun(is_begun, target, missing)
                raise _TargetGone from missing
            consumed = self._path.consumed
            if is_live(newest.record, consumed.record.v):
                raise
            raise CursorExpired(
                f"the changes from version {consumed.record.v} to {target.record.v} of {self._store.url} cannot be "
                f"read: version {consumed.record.v} has expired and segment {segment} was deleted; compare your "
                "copy with a snapshot (catch_up), or start without a cursor; a registered cursor prevents this",
                version=consumed.record.v, path=missing.path,
            ) from missing  # fmt: skip

    def _refuse_begun(self, is_begun: bool, target: LogEntry, missing: MissingObject | None) -> None:
        if is_begun:
            raise CursorExpired(
                f"version {target.record.v} of {self._store.url} expired while it was being read; what came of it is "
                "part of a state: drop it and go on from the stream's cursor with a new stream, or, if it is applied, "
                "compare your copy with a snapshot (catch_up); a registered cursor (cursor=) makes expiry wait",
                version=target.record.v,
            ) from missing


class _VersionBatches:
    """The batches of a version, and whether its consumer has seen that there are no more."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self.is_open = True
        self._batches = batches

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            return next(self._batches)
        except StopIteration:
            self.is_open = False
            raise
