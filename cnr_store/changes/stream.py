"""What changes in a store, version by version, as Arrow record batches: for online training and analytics.

Pulled by its consumer: nothing is read before it is asked for, and what is held is bounded by windows. A version's
batches come together, and the cursor moves behind them when the consumer comes back for more, so a consumer that goes
on from its cursor misses nothing and sees at most one version twice. Values are absolute, so that does no harm.
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
from cnr_store.changes.stream_hold import StreamHold
from cnr_store.changes.stream_path import StreamPath
from cnr_store.changes.version_reader import VersionReader, names_of, segment_of
from cnr_store.errors import BadInput, BranchNotFound, CursorExpired, MissingObject, TableNotFound, VersionNotFound
from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.runtime.arguments import checked_count, checked_number
from cnr_store.runtime.repeating import pause_s
from cnr_store.store import Store

MAX_BATCH_ROWS = 65_536
CACHE_BYTES = 256 * 1024 * 1024


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
    """Return what changed behind a version, as a stream of `pyarrow.RecordBatch`; no I/O before the first is asked for.

    Each batch holds rows of one table at one version, sorted by row id, in the columns of `change_schema`. The batches
    of a version come together, tables in order. Every version that is live is told; what happened in versions that
    have expired comes with the next live one. A compaction tells nothing, a rollback the rows that differ.

    Parameters
    ----------
    store
        The store, or a branch of it.
    since
        Where the consumer is: only what changed behind it comes. None begins with the whole latest snapshot, every row
        an ``upsert``: begin that one with an empty copy.
    tables
        Those to tell of; None is all.
    follow
        Wait for more at the end, until `ChangeStream.close`. Otherwise the stream ends with the version that is the
        newest when it begins.
    slots
        Whether slots come too, as columns ``slot_<name>``. Rows of which slots alone changed come in either case.
    slots_rule
        For one-dimensional slots stored per column range: ``exact`` refuses, ``mean`` averages (`TableView`).
    poll_interval_s
        How long to wait between two looks when following. A look that finds nothing costs one request.
    cursor
        The name to register in the store (`Store.register_cursor`), so that expiry and collection wait: at ``since`` or
        the first snapshot when the stream begins, and behind each version that was consumed. Needs write access.
    ttl_s
        For how long a registered cursor holds without being moved or renewed; None is until `Store.drop_cursor`. It is
        renewed between batches and looks, so give more than a consumer takes for a batch.
    max_batch_rows
        Most rows in a batch.
    mirror
        Where the values of changed rows come from. ``none``: the store. ``memory``: a copy of the tables as of the
        version consumed, to which deltas are added; it is loaded at the first version, and then a version costs what
        it changes wherever the rows lie. Without slots.
    cache_bytes
        Bound on decoded chunks kept for the values of the next versions' rows; not needed with a mirror.

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
    return ChangeStream(
        store, since, tables=tables, follow=follow, slots=slots, slots_rule=slots_rule,
        poll_interval_s=poll_interval_s, cursor=cursor, ttl_s=ttl_s, max_batch_rows=max_batch_rows,
        mirror=mirror, cache_bytes=cache_bytes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class VersionChanges:
    """What one version changes.

    Attributes
    ----------
    version, step
        The log position, and the training step of its state.
    batches
        To be taken to the end before the next version is asked for; may be empty.
    """

    version: int
    step: int
    batches: Iterator[pa.RecordBatch]


class _TargetGone(Exception):
    """The version expired, and is gone, before anything of it was told."""


class ChangeStream:
    """An iterator of record batches; see `changes`. One thread iterates; `close` may be called from any.

    After an error the next call tries again: it begins the version anew that was not consumed to its end.
    """

    def __init__(
        self,
        store: Store,
        since: ChangeCursor | int | None,
        *,
        tables: Collection[str] | None,
        follow: bool,
        slots: bool,
        slots_rule: Literal["exact", "mean"],
        poll_interval_s: float,
        cursor: str | None,
        ttl_s: float | None,
        max_batch_rows: int,
        mirror: Literal["none", "memory"],
        cache_bytes: int,
    ) -> None:
        if not isinstance(store, Store):
            raise BadInput(f"changes() takes an open store, found {store!r}; give Store.open(url)", found=str(store))
        if isinstance(tables, str):
            raise BadInput(f"tables takes a list of names, found {tables!r}; give [{tables!r}]", found=tables)
        checked_count("max_batch_rows", max_batch_rows, least=1)
        checked_number("poll_interval_s", poll_interval_s, above=0, most=1e9)
        if mirror not in ("none", "memory") or (slots and mirror != "none"):
            raise BadInput(f"mirror is {mirror!r}; give 'none', or 'memory' without slots", found=mirror)
        if isinstance(since, ChangeCursor):
            since.check_of(store)
        elif since is not None:
            if isinstance(since, bool) or not isinstance(since, int | np.integer):
                raise BadInput(
                    f"since takes a version or a ChangeCursor, found {since!r}; of a text that was kept give "
                    "ChangeCursor.from_json(...)",
                    found=str(since),
                )
            since = ChangeCursor.at(store, int(since))
        if slots_rule not in ("exact", "mean"):
            raise BadInput(f"slots_rule is 'exact' or 'mean', found {slots_rule!r}", found=slots_rule)
        self._store = store
        self._cursor = since
        self._only = None if tables is None else frozenset(tables)
        self._follow, self._poll_interval_s = follow, poll_interval_s
        self._slots = slots
        self._hold = StreamHold(store, cursor, ttl_s)
        self._reader = VersionReader(
            store, self._only, slots=slots, slots_rule=slots_rule, max_batch_rows=max_batch_rows,
            cache_bytes=cache_bytes, has_copy=mirror == "memory",
        )  # fmt: skip
        self._closed = threading.Event()
        self._is_over = False
        self._flat: Iterator[pa.RecordBatch] | None = None
        self._path = StreamPath()
        self._begun: LogEntry | None = None
        self._head: LogEntry | None = None

    @property
    def cursor(self) -> ChangeCursor | None:
        """How far everything was consumed: a version whose last batch was followed by another call. None: nowhere."""
        return self._cursor

    @property
    def tables(self) -> tuple[str, ...] | None:
        """The tables that are told of, sorted; None is all."""
        return None if self._only is None else tuple(sorted(self._only))

    @property
    def has_slots(self) -> bool:
        """Whether slots are told too."""
        return self._slots

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
        names = sorted(tables) if self._only is None else sorted(self._only)
        if len(names) != 1 or names[0] not in tables:
            raise BadInput(
                f"an Arrow stream has one table, because the columns of tables differ; this one has {names}: name one "
                "that the store has in tables=",
                found=names,
            )
        schema = tables[names[0]]
        columns = change_schema(names[0], schema, sorted(schema.slots) if self._slots else ())
        return pa.RecordBatchReader.from_batches(columns, self).__arrow_c_stream__(requested_schema)

    def __enter__(self) -> ChangeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the stream: whoever waits in it comes back. A registered cursor stays where it is.

        The iteration over batches ends at once. `versions` ends behind the version under way, whose batches still come:
        who applies versions as a whole never takes a part of one for all of it.
        """
        self._closed.set()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        """Return the next batch; blocks for reads, and when following for the next version.

        Raises
        ------
        CursorExpired
            What changed since the cursor cannot be told any more; `catch_up` compares with your own copy.
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

        The cursor moves behind a version when the next one is asked for. Use this or the iteration over batches.
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
            told = _VersionBatches(batches)
            yield VersionChanges(target.record.v, target.record.step, told)
            if told.is_open:
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
        """Learn where the log and the consumer are; does nothing once that is known."""
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
                "changed between them cannot be told here; compare your copy with a snapshot (catch_up), or read from "
                "the source",
                version=version, expected=relay.first,
            )  # fmt: skip
        if entry is None or entry.record.v != version:
            raise VersionNotFound(
                f"{self._store.url} has no version {version} to go on from; the newest is {self._head.record.v}",
                version=version,
            )
        self._check_tables(entry, self._head)
        self._hold.put(version)
        self._path.restart(entry)

    def _check_tables(self, *entries: LogEntry) -> None:
        """Refuse names that no entry has as a table, as far as that can be read; a GET for each, if any was named."""
        if not self._only:
            return
        try:
            known = {table for entry in entries for table in self._reader.tables_of(entry)}
        except MissingObject:
            return  # what the cursor's version had was folded and collected
        missing = sorted(self._only - known)
        if missing:
            raise TableNotFound(f"no table {missing[0]!r}; there are {sorted(known)}", table=missing[0])

    def _next_target(self) -> LogEntry | None:
        """The next record whose changes are to be told; None at the end."""
        if self._begun is not None:
            return self._begun
        assert self._head is not None
        if not self._path:
            first = self._head
            self._check_tables(first)
            if first.record.chain:
                return first
            self._arrive(first)  # Nothing was saved yet: there is no state to tell.
        last = self._head.record.v
        while not self._closed.is_set():
            newest = self._path.newest
            if not self._follow and newest.record.v >= last:
                self._settle_hold()
                return None
            entry = self._store.poll(newest)
            if entry is None:
                if newest.record.v < last and not (self._follow and self._store.relay):
                    self._store.internals.log.check_no_hole(newest)
                self._settle_hold()
                self._closed.wait(pause_s(self._poll_interval_s, 0, random.random()))
                continue
            if entry.record.kind == "close":
                raise BranchNotFound(f"the branch of this stream was dropped at version {entry.record.v}")
            if entry.record.v > self._head.record.v:
                self._head = entry
            held = self._path.held
            step = self._path.take(entry, self._head.record)
            if step == "told":
                return entry
            if step == "same":
                self._reader.follow(held, entry)
            if not self._path.has_changed:
                self._cursor = ChangeCursor.at(self._store, entry.record.v)
        return None

    def _pass_by(self, entry: LogEntry) -> None:
        """Go past a version that expired before it was told."""
        if self._path:
            self._path.pass_by(entry)
        else:
            self._head = None  # The first one: begin again with the newest.
            self._begin()

    def _arrive(self, target: LogEntry) -> None:
        """The consumer has everything up to ``target``."""
        self._begun = None
        self._path.restart(target)
        self._reader.settle(target)
        self._cursor = ChangeCursor.at(self._store, target.record.v)
        self._settle_hold()

    def _settle_hold(self) -> None:
        if self._cursor is not None:
            self._hold.settle(self._cursor.version)

    # ---- what a version changes

    def _open_version(self, target: LogEntry) -> Iterator[pa.RecordBatch]:
        """The batches of a version, of which the first is read here, so that what is gone is noticed before it is told.

        Raises
        ------
        _TargetGone
            The version expired before anything of it was told.
        """
        was_begun = self._begun is not None
        if not self._hold.is_registered and not self._hold.put(target.record.v):
            self._refuse_begun(was_begun, target, None)
            raise _TargetGone
        batches = self._guarded(self._reader.batches(self._path, target), target, is_begun=was_begun)
        first = next(batches, None)
        self._begun = target
        return chained([] if first is None else [first], batches)

    def _guarded(
        self, batches: Iterator[pa.RecordBatch], target: LogEntry, *, is_begun: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yield the batches; what is missing because a version has expired is no damage, and is told as what it is."""
        try:
            for batch in batches:
                yield batch
                is_begun = True
                self._hold.renew()
        except MissingObject as missing:
            newest = self._store.head()
            self._head = newest
            segment = segment_of(missing)
            if segment in names_of(target):
                if is_live(newest.record, target.record.v):
                    raise
                self._refuse_begun(is_begun, target, missing)
                raise _TargetGone from missing
            held = self._path.held
            if is_live(newest.record, held.record.v):
                raise
            raise CursorExpired(
                f"what changed between version {held.record.v} and version {target.record.v} of {self._store.url} "
                f"cannot be told any more: version {held.record.v} has expired, and segment {segment} is gone; compare "
                "your copy with a snapshot (catch_up), or start over without a cursor; a registered cursor "
                "(cursor=) makes expiry wait",
                version=held.record.v, path=missing.path,
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
