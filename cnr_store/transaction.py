"""One segment in the making: rows are encoded and written as they are given, and made visible by `commit`.

The order of a commit (spec, section 7.2): objects, receipt, manifest, log position, and only then the mirror. A
failure before the log position leaves orphans and nothing else; an unknown outcome freezes the writer until the
position has been read.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from cnr_store import tree
from cnr_store.assembly import Assembly, DenseTensors
from cnr_store.baseline import StagedTable, is_fully_mirrored, stage_mirror, stage_table
from cnr_store.changes import StagedRows, options_on_bad_rows, stage_delete, stage_rows
from cnr_store.encode import Given
from cnr_store.encodings.widths import carrier
from cnr_store.errors import (
    BadDtype,
    BadInput,
    BadRowIds,
    BadShape,
    CommitStateUnknown,
    StorageFailure,
    TableNotFound,
)
from cnr_store.inputs import check_arrays, check_json, checked_size, needs_sample, own_row_ids
from cnr_store.layout import check_name, segment_name, writer_folder
from cnr_store.mirrors import Mirrors
from cnr_store.options import sample_of, table_dtype, table_schema
from cnr_store.planning import check_receipts, generations, next_chain
from cnr_store.rebase import draft_after, rebase_data
from cnr_store.records import (
    MAJOR,
    MAX_SHIFT,
    MIN_SCALE,
    ChainEntry,
    CommitRecord,
    LogEntry,
    Manifest,
    PartEntry,
    TableSchema,
)
from cnr_store.restore import rows_since
from cnr_store.segment import SegmentReader, SegmentWriter, check_dense_dtype, merge_receipts, write_manifest
from cnr_store.session import Session
from cnr_store.table_codes import Array
from cnr_store.types import JsonValue, Lattice, RowIds, TableDtype, TableOptions

CommitKind = Literal["full", "delta"]


class Transaction:
    """One segment in the making. Use as a context manager: it commits at the end, or aborts on an exception.

    Rows are encoded and written when they are given; nothing is visible before `commit` returns.

    Attributes
    ----------
    kind
        ``full`` or ``delta``.
    version
        The committed version, once committed.
    undecided
        The record it sent, if `commit` could not learn whether that stands in the log.
    """

    def __init__(self, session: Session, step: int, kind: CommitKind, keep: int) -> None:
        self.kind: CommitKind = kind
        self.step = step
        self.txn = uuid.uuid4().hex
        self.version: int | None = None
        self.undecided: LogEntry | None = None
        self.size_bytes = 0
        self._session = session
        self._keep = keep
        self._before = session.snapshot.tables if session.snapshot is not None else {}
        self._tables: dict[str, TableSchema] = {} if session.snapshot is None else dict(self._before)
        record = session.head.record
        self._l0 = 0 if kind == "full" else record.chain[keep - 1].l1
        self._segment = segment_name(record.v, self.txn)
        self._attempt = self.txn[:8]
        out = SegmentWriter(
            session.storage, self._segment, profile=session.profile, folder=writer_folder(0, self._attempt),
            workers=session.workers, throttle=session.throttle,
        )  # fmt: skip
        self._assembly = Assembly(out)
        self._rows: dict[str, list[StagedRows]] = {}
        self._whole: dict[str, StagedTable] = {}
        self._digests: dict[str, int | None] = {}
        self._bad_rows: dict[str, TableOptions] = {}
        self._dense = DenseTensors()
        self._created: set[str] = set()
        self._refined: set[str] = set()
        self._dropped: set[str] = set()
        self._scalars: dict[str, JsonValue] = {}
        self._documents: dict[str, Any] = {}
        self._manifest: Manifest | None = None
        self._ended = False

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._ended:
                self.commit()
        finally:
            self.abort()

    @property
    def needs_whole_tables(self) -> list[str]:
        """Tables of the head that this ``full`` cannot write from the mirror.

        Give dense ones to `write_table` and all rows of hashed ones to `write_rows`, or drop them.
        """
        if self.kind == "delta":
            return []
        mirrors = self._session.mirrors
        known = [
            name
            for name, schema in self._tables.items()
            if name not in self._whole
            and not (name in mirrors and is_fully_mirrored(schema))
            and not (schema.keys == "hashed" and (name in self._rows or name in self._created))
        ]
        if self._session.snapshot is not None:
            return known
        # Without a restore the head's tables are known by name alone; one that is left out must be dropped aloud.
        head = self._session.head.record.tables
        return [*known, *(name for name in head if name not in self._tables and name not in self._dropped)]

    def create_table(
        self,
        table: str,
        *,
        dim: int,
        options: TableOptions | None = None,
        dtype: str = "float32",
        slots: Mapping[str, Literal["row", "element"]] | None = None,
        sample: Array | None = None,
    ) -> None:
        """Add a table with hashed int64 keys; its rows are always ``set``.

        ``sample`` (n, dim) is what a scale is chosen on; lattices with ``bits=`` need it.

        Raises
        ------
        BadInput, BadName, BadShape, BadDtype
        """
        self._check_open()
        check_name(table)
        if table in self._tables:
            raise BadInput(f"table {table!r} exists", table=table)
        if dtype not in get_args(TableDtype):
            raise BadDtype(
                f"table {table!r} has dtype {dtype!r}; use one of {get_args(TableDtype)}",
                table=table, expected=list(get_args(TableDtype)), found=dtype,
            )  # fmt: skip
        dim = checked_size(table, "dim", dim, least=1)
        rows = np.zeros((0, dim), carrier(dtype)) if sample is None else np.asarray(sample)  # type: ignore[arg-type]
        if rows.ndim != 2 or rows.shape[1] != dim or rows.dtype != carrier(dtype):  # type: ignore[arg-type]
            raise BadShape(
                f"the sample of table {table!r} is {rows.dtype} of shape {rows.shape}, expected {dtype} (n, {dim})",
                table=table, expected=["n", dim], found=rows.shape,
            )  # fmt: skip
        for name, slot_kind in (slots or {}).items():
            check_name(name)
            if slot_kind not in ("row", "element"):
                raise BadInput(f"slot {name!r} of table {table!r} is {slot_kind!r}; use row or element", table=table)
        kinds = {
            name: np.zeros(0, np.float32) if kind == "row" else np.zeros((0, dim), np.float32)
            for name, kind in (slots or {}).items()
        }
        chosen = options or TableOptions()
        if rows.shape[0] == 0 and needs_sample(chosen, dtype):
            raise BadInput(
                f"table {table!r}: a scale for bits= is chosen on a sample; give sample= or scale=", table=table
            )
        self._tables[table] = table_schema(
            table, chosen, num_rows=0, dim=dim, dtype=dtype, sample=rows, slots=kinds, keys="hashed",  # type: ignore[arg-type]
            generation=self._next_generation(table), has_mirror=False,
        )  # fmt: skip
        self._bad_rows[table] = chosen
        self._created.add(table)

    def write_table(
        self,
        table: str,
        values: Any,
        *,
        slots: Mapping[str, Any] | None = None,
        options: TableOptions | None = None,
    ) -> None:
        """Write every row of a table: in a ``full``, or as a new table of a delta. Blocks until it is written.

        Parameters
        ----------
        values
            (num_rows, dim) float32, float16 or uint16 (bits of bfloat16); anything that slices like an array. Not kept.
        slots
            Slot name to (num_rows,) or (num_rows, dim).
        options
            None keeps the encoding and scale that the table has; else a new generation begins.

        Raises
        ------
        BadInput and its kinds
            Nothing of the table was written; the transaction goes on.
        StorageFailure
            The transaction is over, as after `abort`.
        """
        self._check_open()
        check_name(table)
        slots = slots or {}
        for name, array in slots.items():
            check_name(name)
            if len(array.shape) not in (1, 2):
                raise BadShape(
                    f"slot {name!r} of table {table!r} has shape {tuple(array.shape)}; a slot has 1 or 2 dimensions",
                    table=table, found=tuple(array.shape),
                )  # fmt: skip
        if self.kind == "delta" and table in self._before:
            raise BadInput(
                f"table {table!r} exists; a delta takes its changed rows by write_rows(), or begin a full", table=table
            )
        self._check_first(table)
        dtype = table_dtype(values, table)
        if len(values.shape) != 2 or values.shape[1] < 1:
            raise BadShape(f"table {table!r} has shape {tuple(values.shape)}; expected (num_rows, dim)", table=table)
        checked_size(table, "rows", values.shape[0], dim=values.shape[1])
        schema = self._schema_for(table, values, dtype, slots, options)
        arrays = check_arrays(table, schema, values.shape[0], values, slots)
        staged = self._stage_whole(table, schema, arrays)
        try:
            self._tables[table], self._digests[table] = staged.schema, staged.digest
            self._whole[table] = staged
            self._assembly.write_table(table, staged)
        except BaseException:
            # Some of its objects are there and some are not: nothing can be put in their place.
            self.abort()
            raise

    def write_rows(
        self,
        table: str,
        row_ids: RowIds,
        values: Array,
        *,
        slots: Mapping[str, Array] | None = None,
        nonfinite: Literal["refuse", "escape"] | None = None,
    ) -> int:
        """Write touched rows of a table; returns how many the segment holds (unchanged rows leave). Blocks.

        They are encoded now, against the mirror, and put by `commit`.

        Parameters
        ----------
        row_ids
            int64 (n,), sorted, unique, in range (any int64 for hashed tables); not kept.
        values
            (n, dim) in the table's dtype, not kept.
        slots
            Every slot of the table: (n,) or (n, dim).
        nonfinite
            What to do with rows that hold NaN, Inf or values beyond the code range. None does as the table's options
            say; a writer that has restored the table knows no options, and refuses.

        Raises
        ------
        BadRowIds, BadShape, BadDtype, NonFiniteValues, TableNotFound
            Nothing of the table was written.
        """
        self._check_open()
        schema = self._schema(table)
        hashed = schema.keys == "hashed"
        row_ids = own_row_ids(table, row_ids, None if hashed else schema.num_rows)
        arrays = check_arrays(table, schema, len(row_ids), values, slots or {})
        self._check_first(table, "add", "set", "escape")
        self._check_disjoint(table, row_ids)
        mirror = self._session.mirrors.get(table)
        if self.kind == "full" and not hashed and (mirror is None or not is_fully_mirrored(schema)):
            raise BadInput(
                f"table {table!r} has no full mirror, so a full needs all its rows: use write_table()", table=table
            )
        if len(row_ids) == 0:
            self._rows.setdefault(table, [])
            return 0
        options = self._bad_rows.get(table) or self._session.mirrors.options.get(table)
        given = Given(row_ids, {name: np.asarray(array).reshape(len(row_ids), -1) for name, array in arrays.items()})
        staged = stage_rows(
            table, schema, mirror, given,
            base_digest=self._session.mirrors.digest(table),
            absolute=self.kind == "delta" and self._keep < len(self._session.head.record.chain),
            on_bad_rows=nonfinite or options_on_bad_rows(options),
            workers=self._session.workers,
        )  # fmt: skip
        self._keep_rows(table, staged)
        return sum(len(item.rows) for item in staged.lists.values())

    def delete_rows(self, table: str, row_ids: RowIds) -> None:
        """Delete rows: a dense table reads them as its fill, a hashed table no longer has them.

        Raises
        ------
        BadRowIds, TableNotFound
        """
        self._check_open()
        schema = self._schema(table)
        hashed = schema.keys == "hashed"
        row_ids = own_row_ids(table, row_ids, None if hashed else schema.num_rows)
        self._check_first(table, "delete")
        self._check_disjoint(table, row_ids)
        if self.kind == "full" and not (table in self._session.mirrors and is_fully_mirrored(schema)):
            raise BadInput(
                f"table {table!r} has no full mirror, so a full needs all its rows: delete them in a delta", table=table
            )
        if len(row_ids) == 0:
            return
        mirrors = self._session.mirrors
        self._keep_rows(table, stage_delete(schema, mirrors.get(table), row_ids, mirrors.digest(table)))

    def resize_table(self, table: str, num_rows: int) -> None:
        """Change a dense table's number of rows; new rows read as the fill until they are ``set``.

        Must come before the table's rows.

        Raises
        ------
        TableNotFound, BadShape, BadInput
        """
        self._check_open()
        schema = self._schema(table)
        num_rows = checked_size(table, "rows", num_rows, dim=schema.dim)
        if schema.keys == "hashed":
            raise BadInput(f"table {table!r} has hashed keys and no number of rows", table=table)
        if self.kind == "full":
            raise BadInput(f"a full takes the new size from write_table(); resize {table!r} in a delta", table=table)
        if table in self._rows or table in self._whole or table in self._refined:
            raise BadInput(f"resize table {table!r} before writing its rows", table=table)
        self._tables[table] = msgspec.structs.replace(schema, num_rows=num_rows)
        self._session.mirrors.stage_resize(table, self._tables[table], self._session.workers)

    def refine_scale(self, table: str, halvings: int = 1) -> None:
        """Halve a lattice's step ``halvings`` times, from this delta on: later saves are that much more exact.

        Only in the first save after `Writer.restore`, when the live values are those of the mirror, so that every code
        goes over exactly (design, section 4); the record says so in ``shift``. Rows of the table come after it, and are
        best all touched ones. Blocks; memory: a second copy of the table's codes until the commit.

        Raises
        ------
        TableNotFound
        BadInput
            Not the first save after a restore, no lattice with a mirror, or codes would leave their range.
        """
        self._check_open()
        schema = self._schema(table)
        session = self._session
        is_first = self.kind == "delta" and session.is_restored and self._keep == len(session.head.record.chain)
        if not is_first:
            raise BadInput(
                f"the scale of table {table!r} can be refined only in the first delta after a restore", table=table
            )
        if not isinstance(schema.encoding, Lattice) or session.mirrors.get(table) is None:
            raise BadInput(f"table {table!r} is no lattice with a mirror; nothing to refine", table=table)
        if table in self._rows or table in self._whole or table in self._refined:
            raise BadInput(f"refine table {table!r} once, before writing its rows", table=table)
        halvings = checked_size(table, "halvings", halvings, least=1)
        finer = msgspec.structs.replace(schema, shift=schema.shift + halvings)
        smallest = schema.encoding.scale * 0.5**finer.shift
        if (
            finer.shift > MAX_SHIFT
            or smallest < MIN_SCALE
            or not session.mirrors.stage_refine(table, finer, halvings, session.workers)
        ):
            raise BadInput(
                f"table {table!r} cannot be refined by {halvings} halvings to a scale of {smallest:g}: codes or the "
                "scale would leave their range",
                table=table, found=halvings,
            )  # fmt: skip
        self._tables[table] = finer
        self._refined.add(table)

    def drop_table(self, table: str) -> None:
        """Drop a table: from this version on it is not there.

        Raises
        ------
        TableNotFound
        """
        self._check_open()
        if table in self._dropped or table not in self._session.head.record.tables:
            self._schema(table)
        if table in self._rows or table in self._whole:
            raise BadInput(f"table {table!r} was written in this transaction", table=table)
        self._tables.pop(table, None)
        self._created.discard(table)
        self._dropped.add(table)

    def put_dense(self, tensors: Mapping[str, Array], dtypes: Mapping[str, str] | None = None) -> None:
        """Save dense tensors; those whose bytes did not change are referenced, not written again.

        Tensors that are not given keep their last value, as tables do; `drop_dense` ends one.
        ``dtypes`` names the logical dtype where numpy has none (``bfloat16`` as uint16, ``bool`` as uint8). Arrays are
        kept until `commit`.

        Raises
        ------
        BadName, BadDtype, BadInput
            Nothing of the call was taken.
        """
        self._check_open()
        taken: dict[str, Array] = {}
        for name, tensor in tensors.items():
            check_name(name)
            if name in self._dense.given or name in self._dense.dropped:
                raise BadInput(f"dense tensor {name!r} was given twice, or dropped and given", found=name)
            # Not ascontiguousarray, which turns a tensor without dimensions into one of shape (1,).
            array = np.asarray(tensor, order="C")
            taken[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
            check_dense_dtype(name, taken[name].dtype, (dtypes or {}).get(name))
        self._dense.given.update(taken)
        self._dense.dtypes.update({name: dtype for name, dtype in (dtypes or {}).items() if name in taken})

    def drop_dense(self, name: str) -> None:
        """End a dense tensor: from this version on it is not there.

        Raises
        ------
        TableNotFound
        """
        self._check_open()
        snapshot = self._session.snapshot
        if snapshot is None or name not in snapshot.dense:
            raise TableNotFound(f"no dense tensor {name!r}", table=name)
        if name in self._dense.given:
            raise BadInput(f"dense tensor {name!r} was given in this transaction", found=name)
        self._dense.dropped.add(name)

    def put_scalars(self, scalars: Mapping[str, JsonValue]) -> None:
        """Save step counters and other plain JSON values. Like documents they belong to this version alone.

        Raises
        ------
        BadInput
            A value that JSON cannot hold, NaN and Inf included.
        """
        self._check_open()
        check_json("scalars", scalars)
        self._scalars.update(scalars)

    def put_document(self, name: str, value: Any, default: tree.Default | None = None) -> None:
        """Save nested plain data (reader state, RNG state): dicts, lists, tuples, bytes, numbers, numpy arrays.

        ``value`` is encoded now and not kept. ``default`` maps leaves of other kinds (tensors) to arrays.

        Raises
        ------
        BadInput
            Naming the leaf that is not plain data.
        """
        self._check_open()
        for part in name.split("/"):
            check_name(part)
        self._documents[name] = tree.encode(value, default)

    def abort(self) -> None:
        """Give the transaction up; its objects are orphans for garbage collection. A second call is harmless."""
        if not self._ended:
            self._ended = True
            self._session.lost(RuntimeError("aborted"))

    def commit(self, *, user: Mapping[str, JsonValue] | None = None) -> int:
        """Make the segment durable and visible; returns the version. Blocks.

        Raises
        ------
        BadInput
            A full lacks tables, a one-shot delta lacks rows, or ``user`` is no JSON; the transaction can go on.
        Fenced, Conflict, DoesNotApply, TransactionAborted
            Nothing became visible; the rows are still to be saved.
        CommitStateUnknown
            Neither won nor lost: `Writer.settle` finds out. Or the store's log still has an unknown record of something
            else (a tag, say): then nothing of this was sent, `undecided` is None, and the rows are still to be saved.
        StorageFailure
            Nothing became visible.
        """
        self._check_open()
        session = self._session
        missing = self.needs_whole_tables
        if missing:
            raise BadInput(
                f"a full needs every row of tables {missing}: they have no mirror; use write_table() "
                "(write_rows() for hashed keys) or drop_table()",
                table=missing[0],
            )
        check_json("user", user or {})
        self._check_one_shot()
        try:
            entry = self._write_segment()
            record = session.head.record
            draft = draft_after(
                record, self.kind, session.info,
                chain=next_chain(record, entry, keep=self._keep), logical=entry.l1, step=self.step,
                tables=generations(self._tables), user=dict(user or {}),
            )  # fmt: skip
            committed = self._append(draft)
        except BaseException as error:
            self._ended = True
            if self.undecided is not None:
                session.pending = self
            elif isinstance(error, CommitStateUnknown):
                # Of a record that is not ours: the mirrors are still the state of the head that this writer knows.
                session.lost(StorageFailure(str(error)))
            else:
                session.lost(error)
            raise
        self._ended = True
        self.version = committed.record.v
        session.won(self, committed)
        return self.version

    def _append(self, draft: CommitRecord) -> LogEntry:
        """Append the record, and note it in `undecided` if its fate stays open."""
        log = self._session.log
        with log.exclusive():
            leftover = log.unresolved_entry
            try:
                return log.append(self._session.head, draft, partial(rebase_data, txn=self.txn))
            except BaseException:
                if log.unresolved_entry is not leftover:
                    self.undecided = log.unresolved_entry
                raise

    def written_reader(self) -> dict[str, SegmentReader]:
        """A reader of the segment this transaction wrote, by name; no I/O."""
        assert self._manifest is not None  # the commit has won
        return {self._segment: SegmentReader(self._session.storage, self._segment, self._manifest)}

    def move_mirrors(self, mirrors: Mirrors) -> None:
        """Apply what was staged to the mirrors; the commit has won."""
        mirrors.commit_resizes()
        for table, whole in self._whole.items():
            if whole.mirror is not None and whole.digest is not None:
                mirrors.put(table, whole.mirror, whole.digest)
            else:
                mirrors.forget(table)
        for table, changes in self._rows.items():
            mirror = mirrors.get(table)
            if mirror is not None:
                for staged in changes:
                    staged.apply(mirror, self._session.workers)
                mirrors.put(table, mirror, self._digests.get(table, mirrors.digest(table)))
        mirrors.options.update(self._bad_rows)
        mirrors.keep_only(self._tables)

    def _write_segment(self) -> ChainEntry:
        session, out = self._session, self._assembly.out
        if self.kind == "full":
            for table in [name for name in self._tables if name not in self._whole]:
                if self._tables[table].keys == "dense":
                    self._write_from_mirror(table)
        for table, changes in self._rows.items():
            # The rows given of a hashed table are all it has in a full: it has no mirror to lay them over.
            if self.kind == "delta" or self._tables[table].keys == "hashed":
                for staged in changes:
                    self._assembly.write_lists(table, self._tables[table], staged)
        base = self._base_manifest()
        parts = tuple(self._part(table, base) for table in self._tables)
        kept = {entry.seg for entry in session.head.record.chain[: self._keep]} if self.kind == "delta" else set()
        self._assembly.write_dense(self._dense, session.snapshot, kept)
        for name, document in self._documents.items():
            out.write_document(name, document)
        receipt = out.finish(
            txn=self.txn, rank=0, world=1, attempt=self._attempt, base=session.head.record.v, l0=self._l0, parts=parts
        )
        check_receipts([receipt], world=1, l0=self._l0, base=base)
        l1 = max(session.head.record.logical, self._l0) + 1
        self._manifest = Manifest(
            format=MAJOR, profile=session.profile, txn=self.txn, base=session.head.record.v,
            kind="baseline" if self.kind == "full" else "delta", l0=self._l0, l1=l1, step=self.step,
            tables=self._tables, scalars=self._scalars, **merge_receipts([receipt]),
        )  # fmt: skip
        digest, size = write_manifest(session.storage, self._segment, self._manifest)
        self.size_bytes = size + out.size_bytes
        return ChainEntry(
            seg=self._segment, sha256=digest, kind=self._manifest.kind, l0=self._l0, l1=l1,
            bytes=self.size_bytes, rows=self._manifest.changed_rows,
        )  # fmt: skip

    def _check_one_shot(self) -> None:
        """Refuse a one-shot delta that lacks a row of the deltas it replaces, which would fall back to the baseline."""
        session = self._session
        if self.kind == "full" or session.snapshot is None or self._keep == len(session.head.record.chain):
            return
        readers = session.snapshot.readers[self._keep - 1 :]
        for table, schema in self._tables.items():
            if table in self._whole or table not in self._before:
                continue
            given = [item.rows for staged in self._rows.get(table, []) for item in staged.lists.values()]
            missing = np.setdiff1d(rows_since(readers, table, schema), np.concatenate([np.empty(0, np.int64), *given]))
            if len(missing):
                raise BadInput(
                    f"row {int(missing[0])} of table {table!r} (and {len(missing) - 1} more) changed since the "
                    "baseline and was not given; a one-shot delta replaces the deltas since then, give all their rows",
                    table=table, found=int(missing[0]),
                )  # fmt: skip

    def _part(self, table: str, base: Manifest | None) -> PartEntry:
        schema = self._tables[table]
        mirrors = self._session.mirrors
        before = None
        if base is not None and table in base.tables and base.tables[table].generation == schema.generation:
            before = mirrors.committed_digest(table) if self._keep == len(self._session.head.record.chain) else None
        return self._assembly.part(table, schema, before, self._digests.get(table, mirrors.digest(table)))

    def _base_manifest(self) -> Manifest | None:
        if self.kind == "full" or self._session.snapshot is None:
            return None
        return self._session.snapshot.manifests[self._keep - 1]

    def _schema(self, table: str) -> TableSchema:
        if table not in self._tables:
            raise TableNotFound(f"no table {table!r}; there are {sorted(self._tables)}", table=table)
        return self._tables[table]

    def _schema_for(
        self, table: str, values: Any, dtype: Any, slots: Mapping[str, Any], options: TableOptions | None
    ) -> TableSchema:
        """The schema of a whole table: as it was, unless it is new, its shape changed kind, or options are given."""
        num_rows, dim = values.shape
        old = self._tables.get(table)
        kinds = {name: "row" if len(array.shape) == 1 else "element" for name, array in slots.items()}
        if old is not None and options is None:
            same = (old.dim, old.dtype, {n: s.kind for n, s in old.slots.items()}) == (dim, dtype, kinds)
            if same:
                return msgspec.structs.replace(old, num_rows=num_rows)
        chosen = options or self._session.mirrors.options.get(table) or TableOptions()
        self._bad_rows[table] = chosen
        return table_schema(
            table, chosen, num_rows=num_rows, dim=dim, dtype=dtype, sample=sample_of(values, dtype),
            slots={name: array[0:1] for name, array in slots.items()}, generation=self._next_generation(table),
            has_mirror=self._session.mirrors.mode != "none",
        )  # fmt: skip

    def _next_generation(self, table: str) -> int:
        """One above every generation in the chain: a one-shot delta may put two lives of a table side by side."""
        snapshot = self._session.snapshot
        known = [m.tables[table].generation for m in (snapshot.manifests if snapshot else ()) if table in m.tables]
        head = self._session.head.record.tables.get(table)
        return 1 + max([0, *known, head.generation if head else 0])

    def _stage_whole(self, table: str, schema: TableSchema, arrays: Mapping[str, Any]) -> StagedTable:
        mirrors = self._session.mirrors
        if table in mirrors and self._session.is_synced and table in self._before:
            # The new codes take the old mirror's place in memory only if the old ones can be given up.
            mirrors.release_for_full(table)
        return stage_table(
            table, schema, arrays,
            allocate=None if mirrors.mode == "none" else mirrors.allocator(),
            on_bad_rows=options_on_bad_rows(self._bad_rows.get(table) or mirrors.options.get(table)),
            workers=self._session.workers,
        )  # fmt: skip

    def _write_from_mirror(self, table: str) -> None:
        mirror = self._session.mirrors.get(table)
        assert mirror is not None  # needs_whole_tables has refused the others
        merged = StagedRows(self._tables[table], digest=self._digests.get(table, self._session.mirrors.digest(table)))
        for staged in self._rows.get(table, []):
            merged.lists |= staged.lists
        whole = stage_mirror(self._tables[table], mirror, merged)
        self._digests[table] = whole.digest
        self._assembly.write_table(table, whole)

    def _keep_rows(self, table: str, staged: StagedRows) -> None:
        before = self._digests.get(table)
        base = self._session.mirrors.digest(table)
        if before is not None and staged.digest is not None and base is not None:
            # Both changes were computed from the mirror's state; they touch disjoint rows, so they add up.
            staged.digest = (before + staged.digest - base) % (1 << 64)
        self._digests[table] = staged.digest
        self._rows.setdefault(table, []).append(staged)

    def _check_first(self, table: str, *operations: str) -> None:
        wanted = set(operations)
        done = {op for staged in self._rows.get(table, []) for op in staged.lists} | set(
            self._assembly.entries.get(table, {})
        )
        if table in self._whole or (done & wanted if wanted else done):
            raise BadInput(
                f"table {table!r} was written in this transaction already; give its rows at once", table=table
            )

    def _check_disjoint(self, table: str, row_ids: RowIds) -> None:
        for staged in self._rows.get(table, []):
            for item in staged.lists.values():
                both = np.intersect1d(item.rows, row_ids, assume_unique=True)
                if len(both):
                    raise BadRowIds(
                        f"row {int(both[0])} of table {table!r} is both written and deleted in one transaction",
                        table=table, found=int(both[0]),
                    )  # fmt: skip

    def _check_open(self) -> None:
        if self._ended or self._session.open is not self:
            raise BadInput("the transaction has ended; begin another one")
