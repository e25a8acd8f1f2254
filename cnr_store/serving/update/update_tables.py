"""Make a consumer's own copies of tables those of another version: what `update_plan` decides, done. Publishes nothing.

The copies that are served are only read. What comes out is handed to `views.Publisher`, or dropped; after an error
there is nothing to undo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from cnr_store.errors import CorruptStore, VersionExpired
from cnr_store.format.chain_checks import is_one_life
from cnr_store.format.manifest import recorded_digest
from cnr_store.format.records import Manifest, TableSchema
from cnr_store.read.plan import plan_table
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import ABSENT, EscapeRows
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import whole_of
from cnr_store.serving.rows import gather
from cnr_store.serving.rows.key_index import KeyIndex
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.merging import merge_into, merge_target
from cnr_store.serving.rows.served_table import HeldTable, Holds, Overlay, RowKind, Served, ServedTable, row_kind
from cnr_store.serving.rows.shards import Shard, is_keyed, rows_in_shard
from cnr_store.serving.update.applying import apply_segment, check_base
from cnr_store.serving.update.comparing import (
    Difference,
    compare_table,
    has_other_rows,
    reread_rows,
    rows_that_may_differ,
    vanished_rows,
)
from cnr_store.serving.update.content import CodesTooWide, check_escapes, escapes_after
from cnr_store.serving.update.loading import load_table
from cnr_store.serving.update.reshaping import reshaped
from cnr_store.serving.update.update_plan import Apply, Compare, Reread, Same, UpdatePlan
from cnr_store.types import RowIds


@dataclass(frozen=True, slots=True)
class HeldAs:
    """How a consumer wants a table.

    Attributes
    ----------
    served, holds
        See `held.row_kind`.
    shard
        Which rows; None means all.
    is_asked
        Whether the caller named the table, and so means all the rows that it declares.
    """

    served: Served | None = None
    holds: Literal["auto"] | Holds = "auto"
    shard: Shard | None = None
    is_asked: bool = False


Hold = Callable[[str, TableSchema], HeldAs | None]
"""Says of a version's table how it is held; None: not at all."""

TableChange = Overlay | HeldTable | None


@dataclass(frozen=True, slots=True)
class TableUpdates:
    """What makes the tables that are held those of a version: for `Publisher.stage`.

    Attributes
    ----------
    changes
        By table: rows to be read over those held, a table that replaces the one held or is new, or None for one that
        is no longer held. Tables that stay as they are do not appear.
    escapes
        Of tables that hold codes and appear in ``changes``: all their escape rows.
    stated
        By table: the state digest that the version names for it as a whole, None where it names none. To be given to
        the next update: it tells a segment of another chain.
    rows
        Rows that were changed, or loaded.
    bytes
        Stored bytes of the chunks that were wanted for that.
    """

    changes: dict[str, TableChange] = field(default_factory=dict)
    escapes: dict[str, EscapeRows] = field(default_factory=dict)
    stated: dict[str, int | None] = field(default_factory=dict)
    rows: int = 0
    bytes: int = 0


def update_tables(
    snapshot: Snapshot,
    plan: UpdatePlan,
    tables: Mapping[str, ServedTable],
    hold: Hold,
    stated: Mapping[str, int | None] | None = None,
    *,
    memory: Memory = ANONYMOUS,
) -> TableUpdates:
    """Return what makes ``tables`` the snapshot's; loads tables that are not held yet. Blocks; runs on its workers.

    Memory: the overlays and new tables that are returned, and as much again of the overlays where several segments are
    put one on another; chunks in flight; 256 MiB at most beside. A table that several segments of one update resize is
    there a third time while it is copied.

    Parameters
    ----------
    snapshot
        The version to go to. It opens segments that are not ``known`` to it, so pass on those of the version before.
    plan
        How its state follows from the one held: `plan_update`, or `Compare`, which is always right. With no
        table held any plan loads.
    tables
        What is held now: the newest view's. An overlay that is not merged yet is read over, and not taken in.
    stated
        What the update before returned; None checks nothing.
    memory
        Where new tables and overlays go.

    Raises
    ------
    MissingObject, CorruptObject, CorruptStore, StorageFailure
        The version's data is gone, or damaged. Segments of the state held that are gone do no harm.
    BadInput
        A table cannot be held as wanted.
    NonFiniteValues
        A row that is not finite has no int8 form.
    """
    if isinstance(plan, Same) and tables:
        return TableUpdates(stated=dict(stated or {}))
    with memory.attempt():
        updater = _Updater(snapshot, plan, stated or {}, memory)
        result = TableUpdates()
        rows = bytes_read = 0
        for name in sorted({*tables, *snapshot.tables}):
            schema = snapshot.tables.get(name)
            holding = None if schema is None else hold(name, schema)
            if schema is None or holding is None:
                if name in tables:
                    result.changes[name] = None
                continue
            result.stated[name] = stated_whole(snapshot.manifests[-1], name)
            found = updater.update(name, schema, holding, tables.get(name))
            bytes_read += updater.bytes
            if found is None:
                continue
            result.changes[name] = found.change
            rows += found.change.num_rows if isinstance(found.change, HeldTable) else len(found.change)
            kind = row_kind(schema, holding.served, holding.holds)
            if kind.holds == "codes":
                check_escapes(kind, found.escapes, name)
                result.escapes[name] = found.escapes
        return replace(result, rows=rows, bytes=bytes_read)


def stated_whole(manifest: Manifest, table: str) -> int | None:
    """Return the state digest that a segment names for a table as a whole, None where it names none. Pure."""
    schema = manifest.tables.get(table)
    if schema is None or schema.keys == "hashed":
        return None
    return recorded_digest(manifest.parts_of.get(table, ()), whole_of(schema))


class _GoneSegment(Exception):
    """A segment is gone or damaged that the version does not need."""


class _Updater:
    """One update, table by table."""

    def __init__(self, snapshot: Snapshot, plan: UpdatePlan, stated: Mapping[str, int | None], memory: Memory) -> None:
        self.bytes = 0
        self._snapshot = snapshot
        self._readers = snapshot.readers
        self._workers: Workers = snapshot.workers
        self._stated = stated
        self._memory = memory
        self._plan, self._segments = self._opened(plan)

    def update(self, name: str, schema: TableSchema, holding: HeldAs, served: ServedTable | None) -> Difference | None:
        """Return what changes a table, None where it stays as it is."""
        self.bytes = 0
        if not holding.is_asked and (served is None or served.schema.num_rows < schema.num_rows):
            self._snapshot.table(name).check_stored("name the table in tables=")
        kind = row_kind(schema, holding.served, holding.holds)
        if served is None or _is_held_otherwise(served, schema, kind, holding.shard):
            return self._load(name, kind, holding.shard)
        if not isinstance(self._plan, Compare) and self._is_one_life(served, schema):
            try:
                with self._memory.attempt():
                    if isinstance(self._plan, Reread):
                        return self._reread(served, schema, kind)
                    return self._apply(served, schema, holding)
            except (CodesTooWide, _GoneSegment):
                pass
        return self._compare(served, schema, kind)

    def _opened(self, plan: UpdatePlan) -> tuple[UpdatePlan, tuple[list[SegmentReader], list[SegmentReader]]]:
        """The segments that the plan is about: (to apply or old, new). Where they are gone, all is compared."""
        known = {reader.name: reader for reader in self._readers}
        try:
            if isinstance(plan, Apply):
                return plan, (list(self._snapshot.open_chain((*plan.behind, *plan.segments))[len(plan.behind) :]), [])
            if isinstance(plan, Reread):
                old = self._snapshot.open_chain((*plan.common, *plan.old))[len(plan.common) :]
                return plan, (list(old), [known[e.seg] for e in plan.new])
        except (CorruptStore, VersionExpired):
            # Of segments that the version does not have in its chain; what it has was opened before.
            return Compare(), ([], [])
        return plan, ([], [])

    def _is_one_life(self, served: ServedTable, schema: TableSchema) -> bool:
        """Whether the table is there in all segments of the plan, under the generation that is held.

        And in no coarser unit at its end: codes of a refined scale have no codes before it was.
        """
        if served.kind.holds == "codes" and schema.shift < served.schema.shift:
            return False
        readers = [*self._segments[0], *self._segments[1]]
        if isinstance(self._plan, Reread):
            readers.append(self._common)
        tables = [reader.manifest.tables.get(served.name) for reader in readers]
        return all(one is not None and is_one_life(served.schema, one) for one in tables)

    @property
    def _common(self) -> SegmentReader:
        assert isinstance(self._plan, Reread)
        return self._readers[len(self._plan.common) - 1]

    def _load(self, name: str, kind: RowKind, shard: Shard | None) -> Difference:
        loaded = load_table(self._readers, name, kind, self._workers, shard=shard, memory=self._memory)
        self._count(self._readers, name)
        return Difference(loaded.held, loaded.escapes)

    def _compare(self, served: ServedTable, schema: TableSchema, kind: RowKind) -> Difference | None:
        known = _with_schema(served, schema) if served.held.is_keyed else served
        found = compare_table(self._readers, known, kind, self._workers, memory=self._memory)
        self._count(self._readers, served.name)
        return _if_any(found, served, self._memory)

    def _reread(self, served: ServedTable, schema: TableSchema, kind: RowKind) -> Difference | None:
        old, new = self._segments
        building = _Building(served, self._workers, self._memory)
        building.take_schema(schema, kind)
        try:
            rows = rows_that_may_differ(self._common, old, building.now, schema)
        except (CorruptStore, VersionExpired) as error:
            raise _GoneSegment from error  # nobody promised to keep what only the state held is made of
        rows = np.union1d(rows, rows_that_may_differ(self._common, new, building.now, schema))
        self._read_again(building, rows)
        return building.difference(schema)

    def _apply(self, served: ServedTable, schema: TableSchema, holding: HeldAs) -> Difference | None:
        name = served.name
        building = _Building(served, self._workers, self._memory)
        stated = self._stated.get(name)
        unsure: RowIds = np.empty(0, np.int64)
        segments = self._segments[0]
        for reader in segments:
            there = reader.manifest.tables[name]
            building.take_schema(there, row_kind(there, holding.served, holding.holds))
            try:
                check_base(reader.manifest.parts_of.get(name, ()), name, stated, reader.name)
                unsure = np.union1d(unsure, building.apply(reader, is_only=len(segments) == 1))
            except (CorruptStore, VersionExpired) as error:
                if reader.name in {one.name for one in self._readers}:
                    raise
                raise _GoneSegment from error  # compacted on the way, and the version does without it
            stated = stated_whole(reader.manifest, name)
            self._count([reader], name)
        building.take_schema(schema, row_kind(schema, holding.served, holding.holds))
        self._read_again(building, unsure)
        return building.difference(schema)

    def _read_again(self, building: _Building, rows: RowIds) -> None:
        held = building.now.held
        rows = rows_in_shard(held.shard, rows)
        if not held.is_keyed:
            rows = rows[(rows >= held.start) & (rows < held.stop)]
        elif building.now.schema.keys == "dense":
            rows = rows[rows < building.now.schema.num_rows]
        if len(rows):
            building.take(reread_rows(self._readers, building.now, rows, self._workers))
            self._count(self._readers, building.now.name, rows)

    def _count(self, readers: Sequence[SegmentReader], table: str, rows: RowIds | None = None) -> None:
        plan = plan_table([reader.manifest for reader in readers], table, rows=rows)
        for batch in plan.batches:
            for step in batch.steps:
                for array in step.row_list.arrays:
                    if not array.startswith("slots/"):
                        self.bytes += readers[step.segment].chunk_bytes(step.row_list.arrays[array], step.chunk)


class _Building:
    """A table on its way: what is held with the overlays of the update so far, or a copy that is nobody's yet."""

    def __init__(self, served: ServedTable, workers: Workers, memory: Memory) -> None:
        self.now = served
        self._before = served
        self._workers = workers
        self._memory = memory
        self._overlay: Overlay | None = None
        self._several: _Several | None = None
        self._is_copy = False

    def take_schema(self, schema: TableSchema, kind: RowKind) -> None:
        """Give the table another size or unit."""
        held = self.now.held
        if has_other_rows(held, schema) or kind != held.kind:
            self._copy(schema, kind, wide=held.rows.dtype == np.int32)
            return
        gone = np.empty(0, np.int64)
        if held.is_keyed and schema.keys == "dense" and schema.num_rows < self.now.schema.num_rows:
            gone = vanished_rows(self.now, schema)
        if self.now.schema is not schema:
            self.now = _with_schema(self.now, schema)
        if len(gone):
            # They would be there again where a later segment makes the table longer.
            overlay = Overlay.allocate(held.name, schema, len(gone), held.kind.width, held.rows.dtype)
            overlay.ids[...], overlay.status[...] = gone, ABSENT
            overlay.fill_index()
            self._put(overlay, escapes_after(self.now, overlay, []))

    def apply(self, reader: SegmentReader, *, is_only: bool) -> RowIds:
        """Put a segment on it; returns the rows that must be read again."""
        memory = self._memory if is_only and not self._is_copy else ANONYMOUS
        try:
            applied = apply_segment(reader, self.now, self._workers, memory=memory)
        except CodesTooWide:
            self._copy(self.now.schema, self.now.kind, wide=True)
            applied = apply_segment(reader, self.now, self._workers)
        self._put(applied.overlay, applied.escapes)
        return applied.unsure

    def take(self, difference: Difference) -> None:
        """Put rows that were read again on it."""
        assert isinstance(difference.change, Overlay)
        self._put(difference.change, difference.escapes)

    def difference(self, schema: TableSchema) -> Difference | None:
        """Return what came of it, None where that is what was held."""
        if self._is_copy:
            return Difference(replace(self.now.held, schema=schema), self.now.escapes)
        overlay = self._overlay
        if overlay is None:
            overlay = Overlay.allocate(
                self.now.name, schema, 0, self.now.kind.width, self.now.held.rows.dtype, self._memory
            )
        placed = self._placed(replace(overlay, schema=schema))
        return _if_any(Difference(placed, self.now.escapes), self._before, self._memory)

    def _copy(self, schema: TableSchema, kind: RowKind, *, wide: bool) -> None:
        old = self.now.held if self._is_copy else self._overlay
        try:
            with self._memory.attempt():
                self.now = reshaped(self.now, schema, kind, self._workers, wide=wide, memory=self._memory)
        except CodesTooWide:
            self.now = reshaped(self.now, schema, kind, self._workers, wide=True, memory=self._memory)
        self._is_copy, self._overlay, self._several = True, None, None
        if old is not None:
            _release(old, self._memory)

    def _put(self, overlay: Overlay, escapes: EscapeRows) -> None:
        held = self.now.held
        if self._is_copy:
            target = merge_target(held, overlay, self._memory)
            merge_into(target, overlay)
            self.now = ServedTable(target.held, escapes=escapes)
            _release(held, self._memory, but=target.held)
            return
        if self._overlay is None:
            merged = overlay
        else:
            if self._several is None:
                self._several = _Several(self._overlay)
                _release(self._overlay, self._memory)
            merged = self._several.put(overlay)
            _release(overlay, self._memory)
        self._overlay = merged
        beside = self._before.overlay
        shown = merged if beside is None else Overlay.merged(held.name, beside, merged)
        self.now = ServedTable(held, shown, escapes)

    def _placed(self, overlay: Overlay) -> Overlay:
        """The overlay in the memory where readers look for it."""
        if self._memory is ANONYMOUS or self._memory.block_of(overlay.rows) is not None:
            return overlay
        kept = Overlay.allocate(
            self.now.name, overlay.schema, len(overlay), overlay.rows.shape[1], overlay.rows.dtype, self._memory
        )
        kept.ids[...], kept.rows[...], kept.status[...] = overlay.ids, overlay.rows, overlay.status
        kept.fill_index()
        return kept


class _Several:
    """Overlays of a run of segments put one on another, at the cost of each alone: nobody reads them but the run."""

    def __init__(self, first: Overlay) -> None:
        self._ids = np.empty(0, np.int64)
        self._rows = np.empty((0, first.rows.shape[1]), first.rows.dtype)
        self._status = np.empty(0, np.uint8)
        self._index = KeyIndex.allocate(len(first))
        self._count = 0
        self.put(first)

    def put(self, overlay: Overlay) -> Overlay:
        """Put another over those before, and return what they are together; it goes with the next call."""
        positions = self._index.find(overlay.ids)
        new = np.flatnonzero(positions < 0)
        positions[new] = self._count + np.arange(len(new))
        self._make_room(self._count + len(new))
        self._ids[positions] = overlay.ids
        self._status[positions] = overlay.status
        gather.scatter(gather.as_words(self._rows), positions, gather.as_words(overlay.rows))
        self._index.insert_many(overlay.ids[new], positions[new])
        self._count += len(new)
        count = self._count
        return Overlay(overlay.schema, self._ids[:count], self._rows[:count], self._status[:count], self._index)

    def _make_room(self, count: int) -> None:
        if count > len(self._ids):
            # Twice what is needed: zeros that are not written take no memory.
            for name in ("_ids", "_rows", "_status"):
                before = getattr(self, name)
                grown = np.zeros((2 * count, *before.shape[1:]), before.dtype)
                grown[: self._count] = before[: self._count]
                setattr(self, name, grown)
        if self._index.room < count - self._count:
            self._index = self._index.grown(2 * count)


def _is_held_otherwise(served: ServedTable, schema: TableSchema, kind: RowKind, shard: Shard | None) -> bool:
    held, before = served.held, served.kind
    return (held.shard, held.is_keyed, before.holds, before.served) != (
        shard, is_keyed(shard, schema), kind.holds, kind.served,
    )  # fmt: skip


def _with_schema(served: ServedTable, schema: TableSchema) -> ServedTable:
    overlay = None if served.overlay is None else replace(served.overlay, schema=schema)
    return ServedTable(replace(served.held, schema=schema), overlay, served.escapes)


def _if_any(found: Difference, before: ServedTable, memory: Memory) -> Difference | None:
    change = found.change
    if isinstance(change, Overlay) and len(change) == 0 and change.schema == before.schema:
        _release(change, memory)
        return None
    return found


def _release(part: HeldTable | Overlay, memory: Memory, *, but: HeldTable | None = None) -> None:
    """Give back the memory of what is handed to nobody, ``but`` what goes on in a table: shared, it would stay."""
    for block in _blocks_of(part, memory) - (set() if but is None else _blocks_of(but, memory)):
        memory.release(block)


def _blocks_of(part: HeldTable | Overlay, memory: Memory) -> set[int]:
    arrays = (part.rows, part.status, None if part.index is None else part.index.slots)
    blocks = (memory.block_of(array) for array in arrays if array is not None)
    return {block for block in blocks if block is not None}
