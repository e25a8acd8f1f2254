"""The rows that a transaction was given: encoded, and put as row lists: whole tables, changed rows, deleted rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

import numpy as np

from cnr_store.encodings.digest import add_digests
from cnr_store.encodings.widths import as_columns
from cnr_store.errors import BadInput, BadRowIds, BadShape, DoesNotApply
from cnr_store.format.layout import check_name
from cnr_store.format.records import ListLine, Manifest, PartLine, TableSchema
from cnr_store.read.changed_rows import rows_since
from cnr_store.segment.codes import Array, ArraySpec, TableCodes, array_specs
from cnr_store.segment.groups import RowList, order_of
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import KeyShare, Shard
from cnr_store.segment.writer import SegmentWriter
from cnr_store.types import Rectangle, RowIds
from cnr_store.write.baseline_rows import EncodedTable, encode_mirror, scan_table
from cnr_store.write.delta_rows import EncodedRows, TouchedTable, encode_alone, encode_delete, options_on_bad_rows
from cnr_store.write.encode import EncodedList, RowUpdate, check_arrays, own_row_ids, refused_rows
from cnr_store.write.joined_rows import EncodedRun, JoinedRows, StagedRuns, encode_groups, plan_rows
from cnr_store.write.keyed_mirrors import KeyedMirror
from cnr_store.write.mirrors import Mirrors, apply_rows
from cnr_store.write.schema_changes import SchemaChanges
from cnr_store.write.schema_choice import checked_shape, table_dtype
from cnr_store.write.whole_tables import EncodedTables, TableValues, WholeTable, encode_tables
from cnr_store.write.writer_state import SegmentDraft, WriterState


class PartWriter:
    """Puts the row lists of tables into a segment, and keeps their entries for the manifest.

    Attributes
    ----------
    out
        The segment's writer.
    entries
        Shard to operation to the row list that was written; in this order the segment has the parts.
    """

    def __init__(self, out: SegmentWriter) -> None:
        self.out = out
        self.entries: dict[Shard, dict[str, ListLine]] = {}

    def write_table(self, shard: Shard, whole: EncodedTable) -> None:
        """Write all rows of a shard: coded rows as ``set``, exact ones as ``escape``."""
        entries = self.entries.setdefault(shard, {})
        lists = {"set": whole.rows, "escape": None if whole.escape is None else whole.escape.row_list()}
        for operation, row_list in lists.items():
            if row_list is not None:
                entries[operation] = self.out.write_row_list(operation, row_list)

    def write_joined(self, tables: EncodedTables, joined: EncodedList) -> None:
        """Write all rows of tables that were encoded together, ``joined``."""
        counts = [one.rectangle.num_rows for one in tables.tables]
        written = self.out.write_small_lists("set", joined.row_list(), counts) if counts else ()
        self.entries.update({one.shard: {"set": line} for one, line in zip(tables.tables, written, strict=True)})

    def write_lists(self, changed: Mapping[Shard, Sequence[EncodedRows]], runs: Iterable[EncodedRun] = ()) -> None:
        """Write the row lists of a delta; a shard without any gets no object.

        Parts stand in the order of their rows in each group, so lists of one shard are written one after the other.
        """
        together: list[tuple[EncodedRun, RowList]] = []
        changes_of = {shard: [*changes] for shard, changes in changed.items()}
        for run in runs:
            joined = _row_list("add", run.specs[0], run.rows)
            has_others = not changes_of.keys().isdisjoint(run.shards)
            if has_others or run.counts.max() >= joined.full_chunk_rows:
                for shard in run.shards:
                    changes_of.setdefault(shard, []).extend(one for one in [run.of(shard)] if one is not None)
            elif joined.count:
                together.append((run, joined))
        for shard, changes in changes_of.items():
            entries = self.entries.setdefault(shard, {})
            for encoded in changes:
                for operation, item in encoded.lists.items():
                    row_list = _row_list(operation, encoded.specs, item)
                    entries[operation] = self.out.write_row_list(operation, row_list)
        for run, joined in together:
            counts = run.counts.tolist()
            filled = [*map(bool, counts)]
            written = self.out.write_small_lists("add", joined, [*compress(counts, filled)])
            lines = ({"add": one} for one in written)
            self.entries.update(zip(compress(run.shards, filled), lines, strict=True))


def _row_list(operation: str, specs: Mapping[str, ArraySpec], item: EncodedList) -> RowList:
    dtypes = {name: array.dtype for name, array in item.arrays.items()}
    return item.row_list(order_of(operation, specs, dtypes))


class StagedTables:
    """The rows of tables that a transaction was given on this rank. Errors are those of `Transaction`.

    Whole tables are put when they are given, row lists by `write_parts`. Mirrors move by `move_mirrors` alone.
    """

    def __init__(self, state: WriterState, draft: SegmentDraft, schemas: SchemaChanges, out: SegmentWriter) -> None:
        self._state = state
        self._draft = draft
        self._schemas = schemas
        self._parts = PartWriter(out)
        self._rows: dict[Shard, list[EncodedRows]] = {}
        self._runs = StagedRuns()
        self._whole: dict[Shard, EncodedTable] = {}
        self._live: dict[Shard, RowIds] = {}
        """Shards whose mirror was read live, and their rows that could not be encoded then."""
        self._digests: dict[Shard, int | None] = {}

    @property
    def written(self) -> set[str]:
        """Tables that rows were given of."""
        return {shard.table for shard in (*self._rows, *self._runs.shards, *self._whole, *self._live)}

    # ---- what the caller gives

    def encode_tables(self, given: Sequence[TableValues]) -> Iterator[EncodedTables]:
        """Encode every row of tables, or of one shard of each, which are checked before; nothing is put yet."""
        tables = [self._begin_whole(one) for one in given]
        shards = [one.shard for one in tables]
        if len({*shards}) < len(shards):
            twice = next(shard for shard in shards if shards.count(shard) > 1)
            raise BadInput(f"table {twice} is given twice in one call; give its rows at once", table=twice.table)
        mirrors = self._state.mirrors
        allocate = None if mirrors.mode == "none" else mirrors.allocator()
        return encode_tables(tables, allocate=allocate, workers=self._state.setup.workers)

    def read_live(self, table: str, values: Any, slots: Mapping[str, Any], rectangle: Rectangle | None) -> bool:
        """Read every row of a declared table, or of one shard of it, into its mirror; False if it has no baseline."""
        if table not in self._schemas.declared:
            raise BadInput(f"declare table {table!r} before it is read live: declare_tables()", table=table)
        mirrors = self._state.mirrors
        if mirrors.mode == "none" or not array_specs(self._schemas.tables[table]).are_additive:
            return False
        one = self._begin_whole(TableValues(table, values, slots, None, rectangle))
        workers = self._state.setup.workers
        scan = scan_table(
            one.schema, one.arrays, allocate=mirrors.allocator(), workers=workers, rectangle=one.rectangle
        )  # fmt: skip
        assert scan.mirror is not None  # it is mirrored
        mirrors.stage(one.shard, scan.mirror, scan.mirror.digest(workers))
        self._live[one.shard] = scan.bad_rows
        return True

    def _begin_whole(self, given: TableValues) -> WholeTable:
        """Check what is given of a whole table, and let its old mirror go."""
        table, values, slots = given.table, given.values, given.slots
        check_name(table)
        for name, array in slots.items():
            check_name(name)
            if len(array.shape) not in (1, 2):
                raise BadShape(
                    f"slot {name!r} of table {table!r} has shape {tuple(array.shape)}; a slot has 1 or 2 dimensions",
                    table=table, found=tuple(array.shape),
                )  # fmt: skip
        if self._draft.kind == "delta" and table in self._schemas.before:
            raise BadInput(
                f"table {table!r} exists; a delta takes its changed rows by write_rows(), or begin a baseline",
                table=table,
            )
        shard = self._state.setup.held.one_of(table, None, given.rectangle)
        self._check_first(shard)
        dtype = table_dtype(values, table)
        checked_shape(values, table)
        schema = self._schemas.whole(table, values, dtype, slots, given.options)
        place = shard.rectangle_in(schema)
        specs = array_specs(schema, place.columns)
        arrays = check_arrays(table, specs, place.num_rows, values, slots)
        mirrors = self._state.mirrors
        if shard in mirrors and self._state.is_synced and table in self._schemas.before:
            # The new codes take the old mirror's place in memory only if the old ones can be given up.
            mirrors.release_for_baseline(shard)
        return WholeTable(shard, schema, place, specs, arrays, options_on_bad_rows(self._schemas.options_of(table)))

    def put_tables(self, tables: EncodedTables) -> None:
        """Put encoded tables. Blocks. After an error some of their objects are there: the transaction must end."""
        for one, whole in zip(tables.tables, tables.encoded, strict=True):
            self._schemas.tables[one.shard.table], self._digests[one.shard] = whole.schema, whole.digest
            self._whole[one.shard] = whole
            if tables.joined is None:
                self._parts.write_table(one.shard, whole)
        if tables.joined is not None:
            self._parts.write_joined(tables, tables.joined)

    def stage_rows(self, updates: Sequence[RowUpdate], joined: Sequence[JoinedRows] = ()) -> list[int]:
        """Encode touched rows of tables against their mirrors; returns how many of each update the segment will hold.

        ``joined`` are rows of other tables.
        """
        workers, mirrors, held = self._state.setup.workers, self._state.mirrors, self._state.setup.held
        find = partial(
            mirrors.lines.find, tables=self._schemas.tables, mirrors_of=mirrors.of_many, shard_of=held.one_of
        )  # fmt: skip
        plan = plan_rows(updates, joined, None if self._draft.is_one_shot else find)
        given = self._given([update for _, update in plan.rest])
        together, shards = plan.shards, [shard for shard, _ in given]
        if len({*shards, *together}) < len(shards) + len(together):
            every = [*shards, *together]
            twice = next(shard for shard in every if every.count(shard) > 1)
            raise BadInput(f"table {twice} is given twice in one call; give its rows at once", table=twice.table)
        self._check_touched(given)
        if not self._begun.isdisjoint(together):
            self._check_touched([one for group in plan.groups for one in self._given(group.updates())])
        runs, alone = encode_groups(plan.groups, workers)
        given += self._given([update for _, update in alone])
        rows = [encode_alone(touched, absolute=self._draft.is_one_shot, workers=workers) for _, touched in given]
        counts = dict.fromkeys(range(-1, len(updates)), 0)
        for (number, _), (shard, _), encoded in zip((*plan.rest, *alone), given, rows, strict=True):
            counts[number] = encoded.count
            if encoded.count:
                self._keep_rows(shard, encoded)
            else:
                self._rows.setdefault(shard, [])
        for run in runs:
            self._digests.update(zip(run.shards, run.after, strict=True))
            counts.update(zip(run.at, run.counts.tolist(), strict=True))
        self._runs.add(runs)
        return [*map(counts.__getitem__, range(len(updates)))]

    @property
    def _begun(self) -> set[Shard]:
        """Shards of which the transaction was given something."""
        return {*self._rows, *self._runs.shards, *self._parts.entries, *self._whole}

    def _changes(self, shard: Shard) -> list[EncodedRows]:
        """What was given of the rows of a shard."""
        return [*self._runs.of(shard), *self._rows.get(shard, [])]

    def changed_rows(
        self, table: str, first_row: int, values: Array, slots: Mapping[str, Array], rectangle: Rectangle | None
    ) -> RowIds:
        """Return which of the rows from ``first_row`` on are not in the mirror as they are given; all without one."""
        row_ids = np.arange(first_row, first_row + len(values), dtype=np.int64)
        [(_, touched)] = self._given([RowUpdate(table, row_ids, values, slots, rectangle=rectangle)])
        if touched.mirror is None or len(row_ids) == 0:
            return row_ids
        encoded = encode_alone(touched, absolute=False, workers=self._state.setup.workers)
        return np.sort(np.concatenate([np.empty(0, np.int64), *(item.row_ids for item in encoded.lists.values())]))

    def _given(self, updates: Sequence[RowUpdate]) -> list[tuple[Shard, TouchedTable]]:
        """Check rows of shards, and find what they are encoded against; their arrays are by name, (n, width) each."""
        schemas = [self._schemas.schema(one.table) for one in updates]
        mine = self._state.setup.held
        shards = [mine.one_of(one.table, schema, one.rectangle) for one, schema in zip(updates, schemas, strict=True)]
        places = [shard.rectangle_in(schema) for shard, schema in zip(shards, schemas, strict=True)]
        held = [None if schema.keys == "hashed" else place.rows for schema, place in zip(schemas, places, strict=True)]
        row_ids = own_row_ids([one.row_ids for one in updates], held, [one.table for one in updates])
        given = []
        options_of, mirrors = self._schemas.options_of, self._state.mirrors
        for update, schema, shard, place, rows in zip(updates, schemas, shards, places, row_ids, strict=True):
            mirror, base, at = None, None, None
            if schema.keys == "dense":
                mirror, base = mirrors.with_digest(shard)
            else:
                mine.keys.check(update.table, rows)
                keyed = self._keyed(shard)
                if keyed is not None:
                    mirror, at = keyed.codes, keyed.places(rows)
            specs = array_specs(schema, place.columns) if mirror is None else mirror.specs_in(schema)
            arrays = check_arrays(update.table, specs, len(rows), update.values, update.slots)
            for name, array in arrays.items():
                if array.__class__ is not np.ndarray or array.ndim != 2:
                    arrays[name] = as_columns(np.asarray(array))
            on_bad_rows = update.nonfinite or options_on_bad_rows(options_of(update.table))
            given.append((shard, TouchedTable(update.table, specs, mirror, rows, arrays, base, on_bad_rows, at)))
        return given

    def _check_touched(self, given: Sequence[tuple[Shard, TouchedTable]]) -> None:
        """Refuse rows that this transaction has already, or a baseline of touched rows alone."""
        for shard, touched in given if self._begun else ():
            self._check_first(shard, "add", "set", "escape")
            _check_disjoint(shard, self._changes(shard), touched.row_ids)
        for shard, touched in given if self._draft.kind == "baseline" else ():
            schema = self._schemas.tables[shard.table]
            if schema.keys == "dense" and (touched.mirror is None or not array_specs(schema).are_additive):
                raise BadInput(
                    f"table {shard.table!r} has no full mirror, so a baseline needs all its rows: use write_table()",
                    table=shard.table,
                )

    def stage_delete(self, table: str, row_ids: RowIds, rectangle: Rectangle | None) -> None:
        """Take note of rows that are deleted."""
        schema = self._schemas.schema(table)
        hashed = schema.keys == "hashed"
        shard = self._state.setup.held.one_of(table, schema, rectangle)
        [row_ids] = own_row_ids([row_ids], [None if hashed else shard.rectangle_in(schema).rows], [table])
        if hashed:
            self._state.setup.held.keys.check(table, row_ids)
        self._check_first(shard, "delete")
        _check_disjoint(shard, self._changes(shard), row_ids)
        mirror, base = self._mirror(shard)
        if self._draft.kind == "baseline" and (mirror is None or not array_specs(schema).are_additive):
            raise BadInput(
                f"table {table!r} has no full mirror, so a baseline needs all its rows: delete them in a delta",
                table=table,
            )
        if len(row_ids) == 0:
            return
        self._keep_rows(shard, encode_delete(mirror, row_ids, base))

    def _mirror(self, shard: Shard) -> tuple[TableCodes | None, int | None]:
        """The mirror that rows of a shard are laid over, and its digest; none of a hashed table, its name may have."""
        if self._schemas.tables[shard.table].keys == "hashed":
            return None, None
        return self._state.mirrors.with_digest(shard)

    def _keyed(self, shard: Shard) -> KeyedMirror | None:
        """The mirror of a hashed table that a delta may write differences to."""
        is_other = shard.table in self._schemas.created or self._draft.kind == "baseline"
        return None if is_other else self._state.mirrors.keyed(shard)

    def _keep_rows(self, shard: Shard, encoded: EncodedRows) -> None:
        before = self._digests.get(shard)
        if before is not None and encoded.digest is not None and (base := self._mirror(shard)[1]) is not None:
            # Both changes were computed from the mirror's state; they touch disjoint rows, so they add up.
            encoded.digest = add_digests(before, encoded.digest, -base)
        self._digests[shard] = encoded.digest
        self._rows.setdefault(shard, []).append(encoded)

    def _check_first(self, shard: Shard, *operations: str) -> None:
        changes, entries = self._changes(shard), self._parts.entries.get(shard, {})
        if not changes and not entries and shard not in self._whole:
            return
        wanted = set(operations)
        done = {op for encoded in changes for op in encoded.lists} | set(entries)
        if shard in self._whole or (done & wanted if wanted else done):
            raise BadInput(
                f"table {shard} was written in this transaction already; give its rows at once", table=shard.table
            )

    # ---- is it all there

    @property
    def missing_tables(self) -> list[str]:
        """Tables of the head that this rank cannot write its shards of, in a ``baseline``."""
        if self._draft.kind == "delta":
            return []
        tables, state = self._schemas.tables, self._state
        known = [
            name
            for name, shards in state.setup.held.shards(tables).items()
            if not all(self._can_write(shard) for shard in shards)
        ]
        if state.snapshot is not None:
            return known
        # A table of the head that is left out must be dropped explicitly.
        return [*known, *(n for n in state.head_tables if n not in tables and n not in self._schemas.dropped)]

    def _can_write(self, shard: Shard) -> bool:
        """Whether a baseline has all rows of a shard: given, or in the mirror under the schema that it will have."""
        schema = self._schemas.tables[shard.table]
        if schema.keys == "hashed":
            return shard in self._rows or shard.table in self._schemas.created
        mirror = self._state.mirrors.get(shard)
        is_current = mirror is not None and mirror.schema.generation == schema.generation
        return shard in self._whole or (is_current and array_specs(schema).are_additive)

    def check_complete(self) -> None:
        """Raise `BadInput` if rows are missing that a commit needs."""
        missing = self.missing_tables
        if missing:
            raise BadInput(
                f"a baseline needs every row of tables {missing}: they have no mirror; use write_table() "
                "(write_rows() for hashed keys) or drop_table()",
                table=missing[0],
            )
        names = sorted(self._schemas.declared & self._schemas.tables.keys())
        declared = self._state.setup.held.shards({name: self._schemas.tables[name] for name in names})
        given = self._whole.keys() | self._live.keys()
        unwritten = [shard for shards in declared.values() for shard in shards if shard not in given]
        if unwritten:
            raise BadInput(
                f"table {unwritten[0]} was declared and not written: its rows would be gone; use write_table()",
                table=unwritten[0].table,
            )
        if self._draft.is_one_shot and self._state.snapshot is not None:
            replaced = self._state.snapshot.readers[self._draft.keep - 1 :]
            held = self._state.setup.held
            known = {name: schema for name, schema in self._schemas.tables.items() if name in self._schemas.before}
            for table, shards in held.shards(known).items():
                given_of = {shard: self._changes(shard) for shard in shards if shard not in self._whole}
                _check_one_shot(table, known[table], replaced, given_of, held.keys)

    # ---- what becomes of it

    def write_parts(self, base: Manifest | None) -> tuple[PartLine, ...]:
        """Put what is not there yet, and return the parts of this rank's shards, as their lists were written. Blocks.

        ``base``: the manifest that the segment is a delta to.
        """
        tables = self._schemas.tables
        shards = dict.fromkeys(shard for held in self._state.setup.held.shards(tables).values() for shard in held)
        for shard in shards if self._draft.kind == "baseline" else ():
            if shard not in self._whole and tables[shard.table].keys == "dense":
                self._write_from_mirror(shard)
        # The rows given of a hashed table are all it has in a baseline: it has no mirror to lay them over.
        kept = {
            shard: changes
            for shard, changes in self._rows.items()
            if self._draft.kind == "delta" or tables[shard.table].keys == "hashed"
        }
        self._parts.write_lists(kept, self._runs if self._draft.kind == "delta" else ())
        written = [shard for shard in self._parts.entries if shard in shards]
        parts = {} if base is None else self._runs.parts(base, tables, self._parts.entries, self._digests)
        return tuple(parts.get(shard) or self._part(shard, base) for shard in dict.fromkeys([*written, *shards]))

    def _part(self, shard: Shard, base: Manifest | None) -> PartLine:
        table, schema = shard.table, self._schemas.tables[shard.table]
        mirrors, is_hashed = self._state.mirrors, schema.keys == "hashed"
        before = None
        known = None if base is None or self._draft.is_one_shot else base.tables.get(table)
        if known is not None and known.generation == schema.generation:
            keyed = mirrors.keyed(shard) if is_hashed else None
            before = mirrors.committed_digest(shard) if keyed is None else keyed.digest
        if is_hashed:
            is_anew = self._draft.kind == "baseline" or table in self._schemas.created
            rows = self._rows.setdefault(shard, [])  # a new table without rows gets its mirror, too
            self._digests[shard] = mirrors.keyed_digest(shard, schema, rows, self._state.setup.workers, anew=is_anew)
        after = self._digests[shard] if shard in self._digests else self._mirror(shard)[1]
        rectangle = shard.rectangle_in(schema)
        return PartLine(
            table=table, rows=rectangle.rows, columns=rectangle.columns,
            base_digest=None if before is None else f"{before:016x}",
            state_digest=None if after is None else f"{after:016x}",
            **self._parts.entries.get(shard, {}),
        )  # fmt: skip

    def _write_from_mirror(self, shard: Shard) -> None:
        schema, mirror = self._schemas.tables[shard.table], self._state.mirrors.get(shard)
        assert mirror is not None  # missing_tables has named the others
        known = self._state.mirrors.digest(shard)
        # One pass over memory, far cheaper than the compression that follows: a baseline must not carry on what a
        # fault of the memory, or a stray write, has changed.
        if known is not None and (found := mirror.digest(self._state.setup.workers)) != known:
            self._state.mirrors.is_complete = False  # nor may a delta build on it
            raise DoesNotApply(
                f"the mirror of table {shard} has state digest {found:016x}, expected {known:016x}: its "
                "memory was changed, but not by the writer; restore first, or write the table whole",
                table=shard.table, expected=f"{known:016x}", found=f"{found:016x}",
            )  # fmt: skip
        merged = EncodedRows(mirror.specs, digest=self._digests.get(shard, known))
        for encoded in self._changes(shard):
            merged.lists |= encoded.lists
        if options_on_bad_rows(self._schemas.options_of(shard.table)) == "refuse":
            given = [item.row_ids for item in merged.lists.values()]
            bad = np.setdiff1d(self._live.get(shard, np.empty(0, np.int64)), np.concatenate([np.empty(0, int), *given]))
            if len(bad):
                raise refused_rows(shard.table, int(bad[0]), len(bad))
        whole = encode_mirror(schema, mirror, merged)
        self._digests[shard] = whole.digest
        self._parts.write_table(shard, whole)

    def move_mirrors(self, mirrors: Mirrors) -> None:
        """Apply what was staged to the mirrors; the commit has won."""
        mirrors.commit_staged()
        is_same = self._schemas.before.keys() == self._schemas.tables.keys() and not self._schemas.created
        if not is_same:  # a new hashed table has none, though its name may have had
            mirrors.keep_only(self._schemas.tables.keys() - self._schemas.created)
        for shard, whole in self._whole.items():
            if whole.mirror is not None and whole.digest is not None:
                mirrors.put(shard, whole.mirror, whole.digest)
            else:
                mirrors.forget(shard)
        self._runs.move(mirrors, self._digests)
        changes: list[tuple[EncodedRows, TableCodes]] = []
        for shard, rows in self._rows.items():
            mirror, digest = mirrors.with_digest(shard)
            schema = self._schemas.tables[shard.table]
            if schema.keys == "hashed":
                workers, is_baseline = self._state.setup.workers, self._draft.kind == "baseline"
                mirrors.move_keyed(shard, schema, rows, workers, digest=self._digests[shard], anew=is_baseline)
            if mirror is not None:
                changes += [(encoded, mirror) for encoded in rows]
                mirrors.put(shard, mirror, self._digests.get(shard, digest))
        apply_rows(changes, self._state.setup.workers)
        mirrors.options.update(self._schemas.options)
        if not is_same:
            mirrors.keep_only(self._schemas.tables)


def _check_one_shot(
    table: str, schema: TableSchema, replaced: Sequence[SegmentReader],
    given_of: Mapping[Shard, Sequence[EncodedRows]], keys: KeyShare,
) -> None:  # fmt: skip
    """Refuse a one-shot delta that lacks a row of the deltas it replaces, which would fall back to the baseline."""
    changed = rows_since(replaced, table, schema) if given_of else np.empty(0, np.int64)
    for shard, changes in given_of.items():
        given = [item.row_ids for encoded in changes for item in encoded.lists.values()]
        missing = np.setdiff1d(changed, np.concatenate([np.empty(0, np.int64), *given]))
        if schema.keys == "dense":
            start, stop = shard.rectangle_in(schema).rows
            missing = missing[(missing >= start) & (missing < stop)]
        else:
            missing = missing[keys.holds(missing)]
        if len(missing):
            raise BadInput(
                f"row {int(missing[0])} of table {table!r} (and {len(missing) - 1} more) changed since the "
                "baseline and was not given; a one-shot delta replaces the deltas since then, give all their rows",
                table=table, found=int(missing[0]),
            )  # fmt: skip


def _check_disjoint(shard: Shard, changes: Sequence[EncodedRows], row_ids: RowIds) -> None:
    """Refuse rows of which the transaction has another change."""
    for item in (item for encoded in changes for item in encoded.lists.values()):
        both = np.intersect1d(item.row_ids, row_ids, assume_unique=True)
        if len(both):
            raise BadRowIds(
                f"row {int(both[0])} of table {shard.table!r} is both written and deleted in one transaction",
                table=shard.table, found=int(both[0]),
            )  # fmt: skip
