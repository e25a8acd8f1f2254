"""Updates served tables to another version by an `UpdatePlan`. Publishes nothing.

Served tables are only read. The result goes to `views.Publisher`, or is dropped; after an error there is nothing to
undo.
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
from cnr_store.read.changed_rows import plan_row_change
from cnr_store.read.plan import plan_table
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.key_index import KeyIndex
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import ABSENT, ExactRows
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import whole_of
from cnr_store.serving.rows import gather
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.merging import merge_into, merge_target
from cnr_store.serving.rows.served_table import BaseTable, KeptAs, Overlay, RowKind, Served, ServedTable, row_kind
from cnr_store.serving.rows.shards import Shard, is_keyed, rows_in_shard
from cnr_store.serving.update.applying import apply_segment, check_base
from cnr_store.serving.update.comparing import (
    Difference,
    compare_table,
    has_other_rows,
    reread_rows,
    vanished_rows,
)
from cnr_store.serving.update.content import CodesTooWide, check_exact_rows, exact_rows_after
from cnr_store.serving.update.joined_deltas import JoinedDelta, apply_together
from cnr_store.serving.update.loading import load_table, load_together
from cnr_store.serving.update.reshaping import reshaped
from cnr_store.serving.update.update_plan import (
    Apply,
    OpenedPlan,
    Reread,
    Same,
    UpdatePlan,
    open_plan,
)
from cnr_store.types import RowIds


@dataclass(frozen=True, slots=True)
class ServeAs:
    """How a table is served.

    Attributes
    ----------
    served, kept_as
        See `served_table.row_kind`.
    shard
        Which rows; None means all.
    is_named
        Whether the caller named the table, and so accepts memory for all rows that it declares.
    """

    served: Served | None = None
    kept_as: Literal["auto"] | KeptAs = "auto"
    shard: Shard | None = None
    is_named: bool = False


ServeTable = Callable[[str, TableSchema], ServeAs | None]
"""Returns how a version's table is served; None: not at all."""

TableChange = Overlay | BaseTable | None


@dataclass(frozen=True, slots=True)
class TableUpdates:
    """The changes from the served tables to a version, for `Publisher.stage`.

    Attributes
    ----------
    changes
        By table: an overlay, a table that is new or replaces the present one, or None for a removed table. Tables
        without changes are not in it.
    exact_rows
        Of tables that keep codes and appear in ``changes``: all their exact rows.
    recorded
        The version's manifest, with its state. Pass it to the next update, which detects segments of another chain by
        its state digests.
    rows
        Number of rows that were changed or loaded.
    size_bytes
        Stored bytes of the chunks that were needed.
    """

    changes: dict[str, TableChange] = field(default_factory=dict)
    exact_rows: dict[str, ExactRows] = field(default_factory=dict)
    recorded: Manifest | None = None
    rows: int = 0
    size_bytes: int = 0


def update_tables(
    snapshot: Snapshot,
    plan: UpdatePlan,
    tables: Mapping[str, ServedTable],
    serve_as: ServeTable,
    recorded: Manifest | None = None,
    *,
    memory: Memory = ANONYMOUS,
) -> TableUpdates:
    """Return the changes from ``tables`` to the snapshot; loads new tables. Blocks; runs on its workers.

    Memory: the overlays and new tables that are returned, and as much again of the overlays where several segments are
    put one on another; chunks in flight; 256 MiB at most beside. A table that several segments of one update resize is
    there a third time while it is copied.

    Parameters
    ----------
    snapshot
        The target version. Pass it the segments of the version before as ``known``, so that they are not opened again.
    plan
        How its state follows from the present one: `plan_update`, or `Compare`, which is always right. With no
        table served, any plan loads.
    tables
        The tables of the newest view. An overlay that is not merged yet is read, not changed.
    recorded
        Result of the update before; None checks nothing.
    memory
        Allocates new tables and overlays.

    Raises
    ------
    MissingObject, CorruptObject, CorruptStore, StorageFailure
        The version's data was deleted or is damaged. Deleted segments of the present state alone are no error.
    BadInput
        A table cannot be served as requested.
    NonFiniteValues
        A row that is not finite has no int8 form.
    """
    if isinstance(plan, Same) and tables:
        return TableUpdates(recorded=recorded)
    with memory.attempt():
        updater = _Updater(snapshot, plan, recorded, memory)
        result = TableUpdates(recorded=None if snapshot.is_empty else snapshot.manifests[-1])
        rows = bytes_read = 0
        schemas = snapshot.tables
        wanted = {name: how for name, schema in schemas.items() if (how := serve_as(name, schema)) is not None}
        together = updater.together(wanted, tables)
        loaded = updater.load_together(wanted, tables)
        for name in sorted({*tables, *wanted}):
            options = wanted.get(name)
            if options is None:
                result.changes[name] = None
                continue
            if name in together:
                overlay, size = together[name]
                bytes_read += size
                if overlay is not None:
                    result.changes[name] = overlay
                    rows += len(overlay)
                continue
            schema = schemas[name]
            found = loaded.get(name) or updater.update(name, schema, options, tables.get(name))
            bytes_read += updater.size_bytes
            updater.size_bytes = 0
            if found is None:
                continue
            result.changes[name] = found.change
            rows += found.change.num_rows if isinstance(found.change, BaseTable) else len(found.change)
            kind = row_kind(schema, options.served, options.kept_as)
            if kind.kept_as == "codes":
                check_exact_rows(kind, found.exact_rows, name)
                result.exact_rows[name] = found.exact_rows
        return replace(result, rows=rows, size_bytes=bytes_read)


def whole_digest(manifest: Manifest, table: str) -> int | None:
    """Return a segment's state digest of a whole table, None if it has none. Pure."""
    schema = manifest.tables.get(table)
    if schema is None or schema.keys == "hashed":
        return None
    return recorded_digest(manifest.parts_of.get(table, ()), whole_of(schema))


class _GoneSegment(Exception):
    """A segment that the version does not need was deleted or is damaged."""


class _Updater:
    """One update, table by table."""

    def __init__(self, snapshot: Snapshot, plan: UpdatePlan, recorded: Manifest | None, memory: Memory) -> None:
        self.size_bytes = 0
        self._snapshot = snapshot
        self._readers = snapshot.readers
        self._workers: Workers = snapshot.workers
        self._recorded = recorded
        self._memory = memory
        self._is_reread = isinstance(plan, Reread)
        self._plan = self._opened(plan)

    def update(self, name: str, schema: TableSchema, options: ServeAs, served: ServedTable | None) -> Difference | None:
        """Return the changes of a table, None if there are none."""
        if served is None or served.schema.num_rows < schema.num_rows:
            self._check_stored(name, options)
        kind = row_kind(schema, options.served, options.kept_as)
        if served is None or _is_served_otherwise(served, schema, kind, options.shard):
            return self._load(name, kind, options.shard)
        if self._plan is not None and self._is_one_life(self._plan, served, schema):
            try:
                with self._memory.attempt():
                    if self._is_reread:
                        return self._reread(self._plan, served, schema, kind)
                    return self._apply(self._plan.new, served, schema, options)
            except (CodesTooWide, _GoneSegment):
                pass
        return self._compare(served, schema, kind)

    def together(self, wanted: Mapping[str, ServeAs], tables: Mapping[str, ServedTable]) -> dict[str, JoinedDelta]:
        """Return the changes of the tables to which a segment can be applied together."""
        plan = self._plan
        if plan is None or self._is_reread or len(plan.new) != 1:
            return {}
        [reader] = plan.new
        schemas, there = self._snapshot.tables, reader.manifest.tables
        chosen = {
            name: served
            for name, options in wanted.items()
            if (served := tables.get(name)) is not None
            and _is_same(served.schema, schemas[name])
            and _is_same(schemas[name], there.get(name))
            and served.kind == row_kind(schemas[name], options.served, options.kept_as)
            and served.base.shard == options.shard
        }
        with self._memory.attempt():
            return apply_together(reader, chosen, self._recorded, self._workers, self._memory)

    def load_together(self, wanted: Mapping[str, ServeAs], tables: Mapping[str, ServedTable]) -> dict[str, Difference]:
        """Return those of the tables that are not served yet that can be loaded together."""
        schemas = self._snapshot.tables
        chosen: dict[str, tuple[TableSchema, RowKind]] = {}
        for name, options in wanted.items():
            if name not in tables and options.shard is None:
                self._check_stored(name, options)
                chosen[name] = schemas[name], row_kind(schemas[name], options.served, options.kept_as)
        with self._memory.attempt():
            found = load_together(self._readers, chosen, self._workers, memory=self._memory)
        self.size_bytes += sum(size for _, size in found.values())
        return {name: Difference(one.base, one.exact_rows) for name, (one, _) in found.items()}

    def _check_stored(self, name: str, options: ServeAs) -> None:
        if not options.is_named:
            self._snapshot.table(name).check_stored("name the table in tables=")

    def _opened(self, plan: UpdatePlan) -> OpenedPlan | None:
        """The segments of the plan; None if all rows are to be compared, also because a segment was deleted."""
        if not isinstance(plan, Apply | Reread):
            return None
        try:
            return open_plan(plan, self._snapshot.open_chain)
        except (CorruptStore, VersionExpired):
            # A segment that is not in the version's chain; those in its chain were opened before.
            return None

    def _is_one_life(self, plan: OpenedPlan, served: ServedTable, schema: TableSchema) -> bool:
        """Whether all segments of the plan have the table in the generation that is served.

        The last scale must not be coarser: codes of a halved scale have no codes of the scale before.
        """
        if served.kind.kept_as == "codes" and schema.shift < served.schema.shift:
            return False
        readers = [*plan.old, *plan.new, *([plan.common] if self._is_reread else [])]
        tables = [reader.manifest.tables.get(served.name) for reader in readers]
        return all(one is not None and is_one_life(served.schema, one) for one in tables)

    def _load(self, name: str, kind: RowKind, shard: Shard | None) -> Difference:
        loaded = load_table(self._readers, name, kind, self._workers, shard=shard, memory=self._memory)
        self._count(self._readers, name)
        return Difference(loaded.base, loaded.exact_rows)

    def _compare(self, served: ServedTable, schema: TableSchema, kind: RowKind) -> Difference | None:
        known = _with_schema(served, schema) if served.base.is_keyed else served
        found = compare_table(self._readers, known, kind, self._workers, memory=self._memory)
        self._count(self._readers, served.name)
        return _if_any(found, served, self._memory)

    def _reread(self, plan: OpenedPlan, served: ServedTable, schema: TableSchema, kind: RowKind) -> Difference | None:
        build = _TableBuild(served, self._workers, self._memory)
        build.take_schema(schema, kind)
        change = plan_row_change(served.name, plan.common, plan.old, plan.new)
        assert change is not None, "the table has one generation in all segments of the plan"
        try:
            rows, _ = change.row_ids(self._workers)
        except (CorruptStore, VersionExpired) as error:
            # Segments of the present state alone may be deleted. Damage of the version is found by comparing.
            raise _GoneSegment from error
        self._read_again(build, rows)
        return build.difference(schema)

    def _apply(
        self, segments: Sequence[SegmentReader], served: ServedTable, schema: TableSchema, options: ServeAs
    ) -> Difference | None:
        name = served.name
        build = _TableBuild(served, self._workers, self._memory)
        recorded = None if self._recorded is None else whole_digest(self._recorded, name)
        unknown: RowIds = np.empty(0, np.int64)
        for reader in segments:
            there = reader.manifest.tables[name]
            build.take_schema(there, row_kind(there, options.served, options.kept_as))
            try:
                check_base(reader.manifest.parts_of.get(name, ()), name, recorded, reader.name)
                unknown = np.union1d(unknown, build.apply(reader, is_only=len(segments) == 1))
            except (CorruptStore, VersionExpired) as error:
                if reader.name in {one.name for one in self._readers}:
                    raise
                raise _GoneSegment from error  # compacted on the way, and the version does without it
            recorded = whole_digest(reader.manifest, name)
            self._count([reader], name)
        build.take_schema(schema, row_kind(schema, options.served, options.kept_as))
        self._read_again(build, unknown)
        return build.difference(schema)

    def _read_again(self, build: _TableBuild, rows: RowIds) -> None:
        base = build.now.base
        rows = rows_in_shard(base.shard, rows)
        if not base.is_keyed:
            rows = rows[(rows >= base.start) & (rows < base.stop)]
        elif build.now.schema.keys == "dense":
            rows = rows[rows < build.now.schema.num_rows]
        if len(rows):
            build.take(reread_rows(self._readers, build.now, rows, self._workers))
            self._count(self._readers, build.now.name, rows)

    def _count(self, readers: Sequence[SegmentReader], table: str, rows: RowIds | None = None) -> None:
        plan = plan_table([reader.manifest for reader in readers], table, rows=rows)
        for batch in plan.batches:
            for step in batch.steps:
                for array in step.row_list.group:
                    if not array.startswith("slots/"):
                        self.size_bytes += readers[step.segment].chunk_bytes(step.row_list.array(array), step.chunk)


class _TableBuild:
    """A table during an update: the served one with the overlays so far, or an unpublished copy."""

    def __init__(self, served: ServedTable, workers: Workers, memory: Memory) -> None:
        self.now = served
        self._before = served
        self._workers = workers
        self._memory = memory
        self._overlay: Overlay | None = None
        self._merged: _MergedOverlay | None = None
        self._is_copy = False

    def take_schema(self, schema: TableSchema, kind: RowKind) -> None:
        """Change the table's size or scale."""
        base = self.now.base
        if has_other_rows(base, schema) or kind != base.kind:
            self._copy(schema, kind, wide=base.rows.dtype == np.int32)
            return
        gone = np.empty(0, np.int64)
        if base.is_keyed and schema.keys == "dense" and schema.num_rows < self.now.schema.num_rows:
            gone = vanished_rows(self.now, schema)
        if self.now.schema is not schema:
            self.now = _with_schema(self.now, schema)
        if len(gone):
            # Otherwise they would be back if a later segment makes the table longer.
            overlay = Overlay.allocate(base.name, schema, len(gone), base.kind.width, base.rows.dtype)
            overlay.ids[...], overlay.status[...] = gone, ABSENT
            overlay.fill_index()
            self._put(overlay, exact_rows_after(self.now, overlay, []))

    def apply(self, reader: SegmentReader, *, is_only: bool) -> RowIds:
        """Apply a segment; return the rows that must be read again."""
        memory = self._memory if is_only and not self._is_copy else ANONYMOUS
        try:
            applied = apply_segment(reader, self.now, self._workers, memory=memory)
        except CodesTooWide:
            self._copy(self.now.schema, self.now.kind, wide=True)
            applied = apply_segment(reader, self.now, self._workers)
        self._put(applied.overlay, applied.exact_rows)
        return applied.unknown

    def take(self, difference: Difference) -> None:
        """Add rows that were read again."""
        assert isinstance(difference.change, Overlay)
        self._put(difference.change, difference.exact_rows)

    def difference(self, schema: TableSchema) -> Difference | None:
        """Return the changes, None if there are none."""
        if self._is_copy:
            return Difference(replace(self.now.base, schema=schema), self.now.exact_rows)
        overlay = self._overlay
        if overlay is None:
            overlay = Overlay.allocate(
                self.now.name, schema, 0, self.now.kind.width, self.now.base.rows.dtype, self._memory
            )
        placed = self._placed(replace(overlay, schema=schema))
        return _if_any(Difference(placed, self.now.exact_rows), self._before, self._memory)

    def _copy(self, schema: TableSchema, kind: RowKind, *, wide: bool) -> None:
        old = self.now.base if self._is_copy else self._overlay
        try:
            with self._memory.attempt():
                self.now = reshaped(self.now, schema, kind, self._workers, wide=wide, memory=self._memory)
        except CodesTooWide:
            self.now = reshaped(self.now, schema, kind, self._workers, wide=True, memory=self._memory)
        self._is_copy, self._overlay, self._merged = True, None, None
        if old is not None:
            _release(old, self._memory)

    def _put(self, overlay: Overlay, exact_rows: ExactRows) -> None:
        base = self.now.base
        if self._is_copy:
            target = merge_target(base, overlay, self._memory)
            merge_into(target, overlay)
            self.now = ServedTable(target.base, exact_rows=exact_rows)
            _release(base, self._memory, but=target.base)
            return
        if self._overlay is None:
            merged = overlay
        else:
            if self._merged is None:
                self._merged = _MergedOverlay(self._overlay)
                _release(self._overlay, self._memory)
            merged = self._merged.put(overlay)
            _release(overlay, self._memory)
        self._overlay = merged
        beside = self._before.overlay
        shown = merged if beside is None else Overlay.merged(base.name, beside, merged)
        self.now = ServedTable(base, shown, exact_rows)

    def _placed(self, overlay: Overlay) -> Overlay:
        """Return the overlay in the memory that readers use."""
        if self._memory is ANONYMOUS or self._memory.block_of(overlay.rows) is not None:
            return overlay
        kept = Overlay.allocate(
            self.now.name, overlay.schema, len(overlay), overlay.rows.shape[1], overlay.rows.dtype, self._memory
        )
        kept.ids[...], kept.rows[...], kept.status[...] = overlay.ids, overlay.rows, overlay.status
        kept.fill_index()
        return kept


class _MergedOverlay:
    """Overlays of several segments merged in order; the cost of each is its own rows. Only the update reads it."""

    def __init__(self, first: Overlay) -> None:
        self._ids = np.empty(0, np.int64)
        self._rows = np.empty((0, first.rows.shape[1]), first.rows.dtype)
        self._status = np.empty(0, np.uint8)
        self._index = KeyIndex.allocate(len(first))
        self._count = 0
        self.put(first)

    def put(self, overlay: Overlay) -> Overlay:
        """Add an overlay, and return the merged one, which is valid until the next call."""
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


def _is_served_otherwise(served: ServedTable, schema: TableSchema, kind: RowKind, shard: Shard | None) -> bool:
    base, before = served.base, served.kind
    return (base.shard, base.is_keyed, before.kept_as, before.served) != (
        shard, is_keyed(shard, schema), kind.kept_as, kind.served,
    )  # fmt: skip


def _is_same(a: TableSchema, b: TableSchema | None) -> bool:
    return a is b or a == b


def _with_schema(served: ServedTable, schema: TableSchema) -> ServedTable:
    overlay = None if served.overlay is None else replace(served.overlay, schema=schema)
    return ServedTable(replace(served.base, schema=schema), overlay, served.exact_rows)


def _if_any(found: Difference, before: ServedTable, memory: Memory) -> Difference | None:
    change = found.change
    if isinstance(change, Overlay) and len(change) == 0 and change.schema == before.schema:
        _release(change, memory)
        return None
    return found


def _release(part: BaseTable | Overlay, memory: Memory, *, but: BaseTable | None = None) -> None:
    """Release memory that is not published, except that of ``but``: shared memory is not freed by itself."""
    for block in _blocks_of(part, memory) - (set() if but is None else _blocks_of(but, memory)):
        memory.release(block)


def _blocks_of(part: BaseTable | Overlay, memory: Memory) -> set[int]:
    arrays = (part.rows, part.status, None if part.index is None else part.index.slots)
    blocks = (memory.block_of(array) for array in arrays if array is not None)
    return {block for block in blocks if block is not None}
