"""Publishes a training's store into a store for servers, with a limit on the bytes of an update.

The checkpoints keep every changed row: what a row would lose by waiting would be lost to whoever restores
(`format_spec/decisions/0023`). What waits here waits for servers only. The published store is a store like any other.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cnr_store.changes.cursor import ChangeCursor
from cnr_store.changes.priority import WaitingRows, choose_rows
from cnr_store.changes.stream import ChangeStream, changes
from cnr_store.encodings.widths import from_float32, to_float32
from cnr_store.errors import BadInput, CursorExpired, StoreExists, Unsupported
from cnr_store.format.manifest_state import is_same_tensor
from cnr_store.format.records import TableSchema
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.arguments import check_not_one, checked_count, checked_number
from cnr_store.runtime.closing import Closing
from cnr_store.runtime.notebook import ShownReport
from cnr_store.segment.codes import (
    ABSENT,
    CODED,
    Array,
    ArraySpec,
    TableCodes,
    array_specs,
    decode_block,
    fill_value,
)
from cnr_store.segment.shards import Shard
from cnr_store.store import Store
from cnr_store.types import Lattice, RowIds
from cnr_store.write.table_options import TableOptions
from cnr_store.write.transaction import Transaction

FIRST_BYTES_PER_ELEMENT = 1.0
"""The expected bytes of an element before the first update was measured."""

_LEAST_FOR_ROWS = 1 / 8
"""The share of the limit that rows get however large the dense tensors are."""

_NOTE = "published"
"""The entry of a record's ``user`` that names the store and the version that were published."""

_OF_TRAINING = ("optimizer/", "rank/", "communication/")
"""What the names of dense tensors begin with that only a training needs."""


@dataclass(frozen=True, slots=True)
class PublishReport(ShownReport):
    """What one version of the published store has.

    Attributes
    ----------
    version, source_version, step
        The version that was written, the version of the source that was newest then, and its training step.
    kind
        ``delta`` within the limit, or ``baseline`` with all rows: the first one, where a table is new or stored in
        another way, and every 64th update of a target that is not compacted meanwhile.
    rows, waiting_rows
        Rows that were written (of whole tables all), and rows that differ from the source's and wait.
    oldest_updates
        For how many updates the longest of them has waited; 0 if none waits.
    size_bytes
        Bytes of the segment.
    """

    version: int
    source_version: int
    step: int
    kind: Literal["baseline", "delta"]
    rows: int
    waiting_rows: int
    oldest_updates: int
    size_bytes: int


class PriorityPublisher(Closing):
    """Writes a store for servers that follows a training's store within a limit of bytes. For one thread at a time.

    Each version of the source becomes one version of the target. Of the rows that differ from the target's, those that
    changed most go first, by the norm of the change; the others wait. `priority.OLDEST_SHARE` of the bytes is for
    the rows that have waited longest, which bounds the wait. Each row of the target has the bits of the source's row,
    or of an older version of it. Slots and documents are not published.

    Nothing but the target is state: a new publisher compares the target with the source once, and goes on.

    Memory: a copy of the source's tables (`changes` with a mirror), the target's code mirrors, and the waiting rows.

    Parameters
    ----------
    source
        The store that is published; an open `Store`, read only.
    target
        The store to write: empty (`Store.create`), or published before from this source. The publisher is its only
        writer.
    bytes_per_update
        The limit for the segment of an update, on average. Bytes of rows are estimated from the updates before; what
        one update takes too much, later ones leave, and what it leaves, they take, up to once the limit. Dense tensors
        that changed count, and go out whole; rows get at least an eighth of the limit beside them, and an update has at
        least one row. Its documents take 2 kB. A `baseline` has no limit.
    tables
        The tables to publish; None is all. Dense tables of a lattice or of ``float_bits``.
    dense
        Names of dense tensors to publish; None is all but the optimizers' state.

    Raises
    ------
    BadInput
    StoreExists
        The target has a state that is not published from this source.
    ReadOnlyStore, Conflict, StorageFailure
        The target cannot be written.

    Examples
    --------
    >>> import numpy as np
    >>> source = Store.create("memory://doctest-training")
    >>> target = Store.create("memory://doctest-published")
    >>> values = np.zeros((1000, 8), np.float32)
    >>> with source.writer() as writer, PriorityPublisher(source, target, bytes_per_update=4_000) as publisher:
    ...     with writer.begin(1) as txn:
    ...         txn.write_table("user", values, options=TableOptions(scale=0.01))
    ...     first = publisher.advance()
    ...     with writer.begin(2) as txn:
    ...         _ = txn.write_rows("user", np.arange(1000), values + 1)
    ...     for report in first + publisher.advance():
    ...         report.kind, report.rows, report.waiting_rows
    ('baseline', 1000, 0)
    ('delta', 500, 500)
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        bytes_per_update: int,
        tables: Collection[str] | None = None,
        dense: Collection[str] | None = None,
    ) -> None:
        check_not_one("tables", tables)
        check_not_one("dense", dense)
        self.bytes_per_update = checked_count("bytes_per_update", bytes_per_update, least=1)
        if source.uuid == target.uuid:
            raise BadInput(f"source and target are both {source.url}; give another store", found=source.url)
        self._source = source
        self._tables = None if tables is None else frozenset(tables)
        self._dense = None if dense is None else frozenset(dense)
        _check_published(target, source)
        self._writer = target.writer()
        self._writer.restore()
        self._cursor: ChangeCursor | None = None
        self._waiting: dict[str, WaitingRows] = {}
        self._updates = 0
        self._bytes_per_element = FIRST_BYTES_PER_ELEMENT
        self._credit = 0.0

    @property
    def waiting_rows(self) -> int:
        """Rows that differ from the source's last published version and wait."""
        return sum(map(len, self._waiting.values()))

    def close(self) -> None:
        """Release the target's mirrors. Idempotent."""
        self._writer.close()

    def advance(self) -> list[PublishReport]:
        """Publish each new version of the source, and return a report of each. Blocks.

        Without a new version it publishes rows that wait, if there are any. After an error the next call goes on,
        except after `Fenced`. If it was away for so long that the source has deleted what changed since, or if the
        target was rolled back, it compares both stores once, as a new publisher does.

        Raises
        ------
        Unsupported
            A table is hashed, or stored without differences (affine, raw): leave it out by ``tables``.
        Fenced, Conflict
            Another process writes the target.
        CorruptStore, StorageFailure
        """
        try:
            return self._advanced()
        except CursorExpired:
            self._cursor = None
            return self._advanced()

    def follow(self, *, poll_interval_s: float = 0.5, quiet_s: float = 60.0) -> Iterator[PublishReport]:
        """Publish each version of the source as it comes, and yield a report of each; close the iterator to end.

        Errors are those of `advance`. Memory: a copy of the source's tables.

        Parameters
        ----------
        poll_interval_s
            Seconds between two looks for a new version.
        quiet_s
            Seconds without an update after which rows that wait go out without a new version, within the limit of an
            update each time. Give about the time between two saves.
        """
        checked_number("poll_interval_s", poll_interval_s, above=0, most=1e9)
        checked_number("quiet_s", quiet_s, above=0, most=1e9)
        while True:
            try:
                with self._opened("memory") as stream:
                    yield from self._followed(stream, poll_interval_s, quiet_s)
            except CursorExpired:
                self._cursor = None

    def _advanced(self) -> list[PublishReport]:
        with self._opened("none") as stream:
            return list(self._publish(stream)) or self._publish_waiting()

    def _followed(self, stream: ChangeStream, poll_interval_s: float, quiet_s: float) -> Iterator[PublishReport]:
        updated_s = time.monotonic()
        while True:
            for report in self._publish(stream):
                yield report
                updated_s = time.monotonic()
            if time.monotonic() - updated_s >= quiet_s:
                yield from self._publish_waiting()
                updated_s = time.monotonic()
            time.sleep(poll_interval_s)

    def _opened(self, mirror: Literal["none", "memory"]) -> ChangeStream:
        """Return a stream of what is newer at the source; of its whole state if the target's is not known."""
        self._writer.settle()
        if not self._writer.is_synced:
            self._writer.restore()
            self._cursor, self._waiting = None, {}
        return changes(self._source, self._cursor, tables=self._tables, mirror=mirror)

    def _publish_waiting(self) -> list[PublishReport]:
        if not self.waiting_rows or self._cursor is None:
            return []
        return [self._write(self._source.snapshot(self._cursor.version), set())]

    def _publish(self, stream: ChangeStream) -> Iterator[PublishReport]:
        for version in stream.versions():
            snapshot = self._source.snapshot(version.version)
            anew = {name for name, schema in self._wanted(snapshot).items() if not self._has(name, schema)}
            for batch in version.batches:
                table = str(batch["table"][0])
                if table in snapshot.tables and table not in anew:
                    self._take(table, snapshot.tables[table], batch)
            report = self._write(snapshot, anew)
            self._cursor = ChangeCursor.at(self._source, version.version)
            yield report

    def _wanted(self, snapshot: Snapshot) -> dict[str, TableSchema]:
        """Return the tables to publish."""
        return {name: one for name, one in snapshot.tables.items() if self._tables is None or name in self._tables}

    def _has(self, table: str, schema: TableSchema) -> bool:
        """Whether the target stores a table as the source does."""
        spec = array_specs(schema)["codes"]
        if schema.keys == "hashed" or not spec.is_additive:
            raise Unsupported(
                f"table {table!r} cannot be published by priority: it is "
                f"{'hashed' if schema.keys == 'hashed' else 'stored without differences'}; leave it out by tables=",
                table=table,
            )
        held = self._writer.mirrors.get(Shard(table))
        return held is not None and held.num_rows == schema.num_rows and held.specs["codes"] == spec

    def _take(self, table: str, schema: TableSchema, batch: pa.RecordBatch) -> None:
        """Let rows wait that differ from what the target has."""
        held = self._writer.mirrors.get(Shard(table))
        assert held is not None  # it is not written anew
        row_ids = batch["row_id"].to_numpy()
        values = batch["values"].flatten().to_numpy(zero_copy_only=False).reshape(len(row_ids), schema.dim)
        if schema.dtype == "bfloat16":
            values = from_float32(values, "bfloat16")
        change = change_norms(held, row_ids, values)
        newer = WaitingRows(row_ids, values, change, np.full(len(row_ids), self._updates, np.int64))
        waiting = self._waiting.get(table)
        self._waiting[table] = newer.take(change > 0) if waiting is None else waiting.with_newer(newer)

    def _write(self, snapshot: Snapshot, anew: set[str]) -> PublishReport:
        """Write one version of the target: whole tables if some are stored ``anew``, else rows within the limit."""
        tables = self._wanted(snapshot)
        waiting = {name: rows for name, rows in self._waiting.items() if name in tables and name not in anew}
        with self._writer.begin(snapshot.step, "baseline" if anew else "delta") as txn:
            dense_bytes = self._put_dense(snapshot, txn)
            is_whole = txn.kind == "baseline"
            for table in set(txn.tables) - tables.keys():
                txn.drop_table(table)
            rows = 0
            for table in sorted(anew):
                rows += tables[table].num_rows
                txn.write_table(table, snapshot.table(table).read(), options=_options(tables[table]))
            chosen = {name: np.ones(len(one), np.bool_) for name, one in waiting.items()}
            if not is_whole:
                chosen = choose_rows(waiting, self._row_bytes(tables), self._allowed(dense_bytes))
            elements = 0
            for name, one in waiting.items():
                sent = one.take(chosen[name])
                if len(sent):
                    rows += txn.write_rows(name, sent.row_ids, sent.values, nonfinite="escape")
                    elements += len(sent) * tables[name].dim
            txn.commit(user={_NOTE: {"store": self._source.uuid, "version": snapshot.version}})
        assert txn.version is not None
        self._waiting = {name: one.take(~chosen[name]) for name, one in waiting.items()}
        self._updates += 1
        if not is_whole:
            self._settle(txn.size_bytes, dense_bytes, elements)
        oldest = min((int(one.since.min()) for one in self._waiting.values() if len(one)), default=self._updates)
        return PublishReport(
            txn.version, snapshot.version, snapshot.step, "baseline" if is_whole else "delta", rows, self.waiting_rows,
            self._updates - oldest, txn.size_bytes,
        )  # fmt: skip

    def _row_bytes(self, tables: dict[str, TableSchema]) -> dict[str, float]:
        return {name: self._bytes_per_element * schema.dim for name, schema in tables.items()}

    def _room(self, dense_bytes: int) -> float:
        """Return the bytes that rows may take on average."""
        return max(self.bytes_per_update - dense_bytes, _LEAST_FOR_ROWS * self.bytes_per_update)

    def _allowed(self, dense_bytes: int) -> float:
        """Return the bytes for rows of the next update."""
        return max(self._room(dense_bytes) + self._credit, _LEAST_FOR_ROWS * self.bytes_per_update)

    def _settle(self, size_bytes: int, dense_bytes: int, elements: int) -> None:
        """Learn from the size of an update what rows take, and carry what it took too much or left."""
        taken = size_bytes - dense_bytes
        if elements:
            self._bytes_per_element = max(taken, elements / 64) / elements
        left = self._credit + self._room(dense_bytes) - taken
        self._credit = min(left, float(self.bytes_per_update) if self.waiting_rows else 0.0)

    def _put_dense(self, snapshot: Snapshot, txn: Transaction) -> int:
        """Put the dense tensors that the target does not have so, which alone are read; returns their bytes."""
        wanted = {
            name: entry
            for name, entry in snapshot.dense.items()
            if (name in self._dense if self._dense is not None else not name.startswith(_OF_TRAINING))
        }
        held = self._writer.snapshot.dense if self._writer.is_synced else {}
        changed = [name for name, one in wanted.items() if name not in held or not is_same_tensor(held[name], one)]
        arrays = snapshot.read_many_dense(changed)
        txn.put_dense(arrays, {name: wanted[name].dtype for name in changed})
        for name in held.keys() - wanted.keys():
            txn.drop_dense(name)
        return sum(array.nbytes for array in arrays.values())


def _check_published(target: Store, source: Store) -> None:
    """Refuse a target with a state that was not published from the source. A GET per record, newest first.

    Raises
    ------
    StoreExists
    """
    head = target.head()
    if not head.record.chain:
        return
    for entry in target.internals.log.walk(head):
        if entry.record.kind in ("baseline", "delta"):
            note = entry.record.user.get(_NOTE)
            if isinstance(note, dict) and note.get("store") == source.uuid:
                return
            break
    raise StoreExists(
        f"{target.url} has tables that were not published from {source.url}, and would lose them; give an empty store "
        "as the target (source first, target second)",
        found=target.url,
    )


def change_norms(held: TableCodes, row_ids: RowIds, values: Array) -> npt.NDArray[np.float64]:
    """Return the norms of rows minus what a mirror has of them, float64 (n,); 0 only where all bits are equal.

    A row that is not finite, now or before, counts as changed without limit. ``values``: (n, dim) in the table's dtype.
    """
    spec: ArraySpec = held.specs["codes"]
    codes = held.arrays["codes"][row_ids - held.start]
    before = np.empty(values.shape, values.dtype)
    decode_block(spec, codes, before)
    if held.status is not None:
        status = held.status[row_ids - held.start]
        before[status == ABSENT] = fill_value(spec)
        for at in np.flatnonzero((status != ABSENT) & (status != CODED)):
            before[at] = held.escapes.values["codes"][np.searchsorted(held.escapes.rows, row_ids[at])]
    bits = np.dtype(f"u{values.itemsize}")
    differs = (np.ascontiguousarray(values).view(bits) != before.view(bits)).any(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        moved = to_float32(values, spec.dtype).astype(np.float64) - to_float32(before, spec.dtype)
    norms = np.linalg.norm(moved, axis=1)
    norms[~np.isfinite(norms)] = np.inf
    return np.where(differs, np.maximum(norms, np.finfo(np.float64).tiny), 0.0)


def _options(schema: TableSchema) -> TableOptions:
    """Return the options by which a table is stored as ``schema`` is, without its slots."""
    encoding = array_specs(schema)["codes"].encoding
    common: dict[str, Any] = {"nonfinite": "escape", "fill": schema.fill}
    if isinstance(encoding, Lattice):
        return TableOptions(scale=encoding.scale, **common)
    return TableOptions(encoding="float_bits", mantissa_bits=getattr(encoding, "mantissa_bits", None), **common)
