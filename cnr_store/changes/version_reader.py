"""Reads the changes of one version as Arrow record batches: from the store, or from a copy in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from cnr_store.changes.arrow import RowBlock, change_batches
from cnr_store.changes.differences import Nothing, are_comparable, compared_rows, listed_rows
from cnr_store.changes.stream_copy import StreamCopy
from cnr_store.changes.stream_path import StreamPath
from cnr_store.changes.table_rows import TableRows
from cnr_store.errors import MissingObject
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.layout import DATA
from cnr_store.format.records import ChainEntry, Manifest, TableSchema
from cnr_store.read.changed_rows import plan_row_change
from cnr_store.read.replay import ChunkReader
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.chunk_cache import ChunkCache
from cnr_store.segment.reader import SegmentReader, open_chain
from cnr_store.serving.update.update_plan import Apply, Reread, UpdatePlan, open_plan
from cnr_store.store import Store
from cnr_store.types import SlotsRule


class VersionReader:
    """Reads versions one after another; keeps the segments of the last one open. For one thread.

    Parameters
    ----------
    tables
        The tables to report; None is all.
    slots, slots_rule, max_batch_rows
        As in `changes`.
    cache_bytes
        Bound on decoded chunks that are kept; 0 keeps none.
    has_copy
        Whether a copy of the tables is kept in memory, from which values come.
    """

    def __init__(
        self,
        store: Store,
        tables: frozenset[str] | None,
        *,
        slots: bool,
        slots_rule: SlotsRule,
        max_batch_rows: int,
        cache_bytes: int,
        has_copy: bool,
    ) -> None:
        self._store = store
        self.only = tables
        self.has_slots, self._slots_rule = slots, slots_rule
        self._max_batch_rows = max_batch_rows
        self._cache = ChunkCache(cache_bytes) if cache_bytes else None
        self._copy = StreamCopy(self._is_wanted, is_named=tables is not None) if has_copy else None
        self._readers: dict[str, SegmentReader] = {}

    def batches(self, path: StreamPath, target: LogEntry) -> Iterator[pa.RecordBatch]:
        """Yield the changes from the consumed state to the target's; blocks for reads.

        Raises
        ------
        MissingObject, TableNotFound, CorruptStore, StorageFailure, Unsupported
        """
        after = self._snapshot(target)
        copy = self._prepared_copy(path, after, target)
        tables_before = self._tables_before(path) if copy is None else copy.schemas
        for table in sorted(tables_before.keys() | after.tables.keys()):
            if not self._is_wanted(table):
                continue
            schema = after.tables.get(table) or tables_before[table]
            slots = sorted(schema.slots) if self.has_slots else []
            before = tables_before.get(table)
            blocks = self._blocks(table, before, after, path, target) if copy is None else copy.changed(table)
            for block in blocks:
                yield from change_batches(
                    table, schema, slots, block, target.record.v, target.record.step, self._max_batch_rows
                )

    def tables_of(self, entry: LogEntry) -> frozenset[str]:
        """Return the names of the tables of an entry's state. A GET for each manifest that is not known yet."""
        return frozenset(self._end_of(entry.record.chain).tables if entry.record.chain else ())

    def follow(self, consumed: LogEntry, entry: LogEntry) -> None:
        """Record that ``entry`` has the state of ``consumed``."""
        if self._copy is not None and self._copy.has(consumed):
            self._copy.follow(entry)

    def settle(self, target: LogEntry) -> None:
        """Record that the consumer has the target, and forget segments that it does not have."""
        if self._copy is not None:
            self._copy.settle()
        chain = names_of(target)
        self._readers = {name: reader for name, reader in self._readers.items() if name in chain}

    def _is_wanted(self, table: str) -> bool:
        return self.only is None or table in self.only

    def _tables_before(self, path: StreamPath) -> dict[str, TableSchema]:
        consumed = path.consumed.record.chain if path else ()
        return dict(self._end_of(consumed).tables) if consumed else {}

    def _prepared_copy(self, path: StreamPath, after: Snapshot, target: LogEntry) -> StreamCopy | None:
        """Return the copy with the version's changes prepared; None if there is no copy of the consumed state."""
        if self._copy is None:
            return None
        if path and not self._copy.has(path.consumed):
            try:
                self._copy.load(self._snapshot(path.consumed))
            except MissingObject:
                self._copy.load(after)  # for the next version; this one is reported from the store
                return None
        self._copy.prepare(after, path.plans_to(target)[0])
        return self._copy

    def _blocks(
        self, table: str, before: TableSchema | None, after: Snapshot, path: StreamPath, target: LogEntry
    ) -> Iterator[RowBlock]:
        """Yield the rows of a table that may differ. If a compacted delta is deleted meanwhile, use the next plan.

        That continues after the rows that were reported: they are complete up to there.
        """
        plans, last = path.plans_to(target), None
        while True:
            plan = plans.pop(0)
            try:
                for block in self._blocks_by(plan, table, before, after, path, target):
                    rest = (
                        block
                        if last is None
                        else block.take(slice(int(np.searchsorted(block.rows, last, side="right")), None))
                    )
                    if len(rest.rows):
                        yield rest
                        last = int(rest.rows[-1])
                return
            except MissingObject as missing:
                if not plans or segment_of(missing) in names_of(target):
                    raise

    def _blocks_by(
        self,
        plan: UpdatePlan,
        table: str,
        before: TableSchema | None,
        after: Snapshot,
        path: StreamPath,
        target: LogEntry,
    ) -> Iterator[RowBlock]:
        schema = after.tables.get(table)
        names = [] if schema is None else self._names(schema)
        if schema is not None and self.only is None and (before is None or before.num_rows < schema.num_rows):
            after.table(table).check_stored("name the table in tables=", slots=self.has_slots)
        new_rows: TableRows | Nothing = (
            Nothing() if schema is None else TableRows(after, table, names, self._slots_rule)
        )
        if before is None:
            return compared_rows(Nothing(), new_rows)
        if schema is not None and isinstance(new_rows, TableRows) and isinstance(plan, Apply | Reread):
            opened = open_plan(plan, self._open)
            old, new = ([self._cached(one) for one in side] for side in (opened.old, opened.new))
            change = plan_row_change(table, opened.common, old, new)
            if change is not None:
                return listed_rows(new_rows, change, _since(plan, target), self._store.internals.workers)
        consumed = self._snapshot(path.consumed)
        is_comparable = schema is not None and are_comparable(before, schema) and self._names(before) == names
        old_rows = TableRows(consumed, table, names if is_comparable else [], self._slots_rule)
        return compared_rows(old_rows, new_rows)

    def _names(self, schema: TableSchema) -> list[str]:
        """The arrays that are reported."""
        return ["codes", *(f"slots/{slot}" for slot in sorted(schema.slots) if self.has_slots)]

    # ---- segments, opened once

    def _snapshot(self, entry: LogEntry) -> Snapshot:
        snapshot = Snapshot(
            self._store.storage, entry, self._store.internals.workers, known=self._readers, cache=self._cache
        )
        self._readers.update(snapshot.known_readers)
        return snapshot

    def _end_of(self, chain: Sequence[ChainEntry]) -> Manifest:
        return self._open(chain)[-1].manifest

    def _open(self, chain: Sequence[ChainEntry]) -> tuple[SegmentReader, ...]:
        readers = open_chain(self._store.storage, chain, self._store.internals.workers, known=self._readers)
        self._readers.update({one.name: one for one in readers})
        return readers

    def _cached(self, reader: SegmentReader) -> ChunkReader:
        return reader if self._cache is None else reader.with_cache(self._cache)


def _since(plan: Apply | Reread, target: LogEntry) -> int:
    """The position in the target's chain of the first segment after the common one.

    0 if the plan applies deltas that were compacted meanwhile: they are not in the target's chain.
    """
    chain = target.record.chain
    return len(chain) - len(plan.new) if chain[len(chain) - len(plan.new) :] == plan.new else 0


def segment_of(missing: MissingObject) -> str:
    """Return the segment that the object was of."""
    return (missing.path or "").removeprefix(DATA).partition("/")[0]


def names_of(entry: LogEntry) -> set[str]:
    """Return the segments of a version."""
    return {link.seg for link in entry.record.chain}
