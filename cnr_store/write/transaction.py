"""One segment in the making: rows are encoded and written as they are given; `commit` makes them visible."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from cnr_store.encodings.sampling import RowSample
from cnr_store.encodings.scale import ScaleChoice
from cnr_store.encodings.widths import carrier
from cnr_store.errors import BadDtype, BadInput, BadRowIds, BadShape, DoesNotApply, TableNotFound, Unsupported
from cnr_store.format import document_tree
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.layout import check_name, segment_name, writer_folder
from cnr_store.format.limits import MAX_SHIFT, MAX_SHIFT_IN_CHAIN, MIN_SCALE
from cnr_store.format.records import Manifest, PartEntry, Receipt, TableSchema, WaitingEntry
from cnr_store.read.table_reader import rows_since
from cnr_store.runtime.ranks import together
from cnr_store.segment.codes import Array, TableCodes
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import Shard
from cnr_store.segment.writer import SegmentWriter, check_dense_dtype
from cnr_store.types import JsonValue, Lattice, Rectangle, RowIds, TableDtype
from cnr_store.write.argument_checks import check_arrays, check_json, checked_size, needs_sample, own_row_ids
from cnr_store.write.baseline_rows import StagedTable, is_fully_mirrored, stage_mirror, stage_table
from cnr_store.write.commit import Commit, CommitKind, Draft
from cnr_store.write.deferred_rows import Hold, check_threshold
from cnr_store.write.delta_rows import StagedRows, options_on_bad_rows, stage_delete, stage_rows
from cnr_store.write.encode import Given
from cnr_store.write.mirrors import Mirrors
from cnr_store.write.part_layout import Assembly, DenseTensors
from cnr_store.write.schema_agreement import Proposal, agree, agreed_choice, propose
from cnr_store.write.schema_choice import choose_table_scale, table_dtype, table_schema
from cnr_store.write.table_options import TableOptions, Threshold
from cnr_store.write.writer_state import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One shard that will be written whole: what `Transaction.write_table` will get, and how it shall be stored.

    ``options`` None keeps what was asked for before.
    """

    values: Any
    slots: Mapping[str, Any] = field(default_factory=dict)
    options: TableOptions | None = None


class Transaction:
    """One segment in the making. Use as a context manager: it commits at the end, or aborts on an exception.

    Rows are encoded and written when they are given; nothing is visible before `commit` returns.

    Attributes
    ----------
    kind
        ``full`` or ``delta``.

    Notes
    -----
    Where several ranks write together each has a transaction for its own shards, begun and committed by all of them.
    ``rectangle=`` says which shard is meant; it can be left out where this rank holds one shard of the table.
    """

    def __init__(
        self, session: Session, step: int, kind: CommitKind, keep: int, txn: str, *, may_wait: bool = False
    ) -> None:
        self.kind: CommitKind = kind
        self._may_wait = may_wait and kind == "delta"
        self.step = step
        self.txn = txn
        self._session = session
        self._keep = keep
        self._before = session.snapshot.tables if session.snapshot is not None else {}
        self._tables: dict[str, TableSchema] = {} if session.snapshot is None else dict(self._before)
        record = session.head.record
        l0 = 0 if kind == "full" else record.chain[keep - 1].l1
        self._draft = Draft(kind, step, txn, segment_name(record.v, txn), keep, l0)
        self._commit = Commit(session, self._draft, self)
        self._attempt = self.txn[:8]
        out = SegmentWriter(
            session.storage, self._draft.segment, profile=session.profile,
            folder=writer_folder(session.ranks.rank, self._attempt), workers=session.workers, throttle=session.throttle,
        )  # fmt: skip
        self._assembly = Assembly(out)
        self._rows: dict[Shard, list[StagedRows]] = {}
        self._whole: dict[Shard, StagedTable] = {}
        self._digests: dict[Shard, int | None] = {}
        self._declared: set[str] = set()
        self._bad_rows: dict[str, TableOptions] = {}
        self._choices: dict[str, ScaleChoice] = {}
        self._dense = DenseTensors()
        self._created: set[str] = set()
        self._refined: set[str] = set()
        self._dropped: set[str] = set()
        self._scalars: dict[str, JsonValue] = {}
        self._documents: dict[str, Any] = {}
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
    def version(self) -> int | None:
        """The committed version, once committed."""
        return self._commit.version

    @property
    def undecided(self) -> LogEntry | None:
        """The record that rank 0 sent, if `commit` could not learn whether that stands in the log."""
        return self._commit.undecided

    @property
    def size_bytes(self) -> int:
        """Bytes of the segment, of all ranks, once it was written."""
        return self._commit.size_bytes

    @property
    def manifest(self) -> Manifest | None:
        """The segment's manifest, of all ranks, once it was written; on rank 0 alone."""
        return self._commit.manifest

    @property
    def may_wait(self) -> bool:
        """Whether rows of tables with a threshold may wait in it for a later save."""
        return self._may_wait

    @property
    def tables(self) -> Mapping[str, TableSchema]:
        """Every table as it will be."""
        return self._tables

    @property
    def scale_choices(self) -> Mapping[str, ScaleChoice]:
        """How the scales were measured of tables that this transaction stores as a new lattice, over all ranks."""
        return self._choices

    @property
    def scalars(self) -> Mapping[str, JsonValue]:
        """What `put_scalars` was given."""
        return self._scalars

    @property
    def waiting(self) -> Mapping[Shard, RowIds]:
        """The rows given to `write_rows` that wait for a later save, by shard, sorted; shards without any are left out.

        Once the commit has won they are to be given again, with what changed meanwhile, in the next save: they are in
        no segment.
        """
        found = ((shard, staged.waiting) for shard, changes in self._rows.items() for staged in changes)
        return {shard: rows for shard, rows in found if len(rows)}

    def settle(self) -> LogEntry | None:
        """Learn an outcome that was left unknown; see `Writer.settle`."""
        return self._commit.settle()

    @property
    def needs_whole_tables(self) -> list[str]:
        """Tables of the head that this rank cannot write its shards of from the mirror, in a ``full``.

        Give dense ones to `write_table` and all rows of hashed ones to `write_rows`, or drop them.
        """
        if self.kind == "delta":
            return []
        known = [
            name
            for name, shards in self._session.shards(self._tables).items()
            if not all(self._can_write(shard) for shard in shards)
        ]
        if self._session.snapshot is not None:
            return known
        # Without a restore the head's tables are known by name alone; one that is left out must be dropped aloud.
        head = self._session.head.record.tables
        return [*known, *(name for name in head if name not in self._tables and name not in self._dropped)]

    def _can_write(self, shard: Shard) -> bool:
        """Whether a ``full`` has all rows of a shard: given, or in the mirror under the schema that it will have."""
        schema = self._tables[shard.table]
        if schema.keys == "hashed":
            return shard in self._rows or shard.table in self._created
        mirror = self._session.mirrors.get(shard)
        is_current = mirror is not None and mirror.schema.generation == schema.generation
        return shard in self._whole or (is_current and is_fully_mirrored(schema))

    def declare_tables(self, tables: Mapping[str, Sequence[Declaration]]) -> None:
        """Agree with all ranks on how tables are stored that `write_table` will write anew. Blocks; all ranks call it.

        Only for writers with a placement, which need it for new tables and new encodings: one scale must hold for all
        shards of a table (`cnr_store.write.schema_agreement`).

        Parameters
        ----------
        tables
            What this rank holds: per table its shards, in any order. A rank without a shard of a table leaves it out.

        Raises
        ------
        BadInput
            The ranks disagree, or an option is wrong; the transaction is over on every rank.
        """
        self._check_open()
        session = self._session
        if session.placement is None:
            raise BadInput("this writer holds whole tables; give options to write_table()")
        try:
            answers = together(session.ranks, partial(self._propose, tables))
            proposals: dict[str, list[Proposal]] = {}
            for answer in answers:
                for table, given in answer.items():
                    proposals.setdefault(table, []).extend(
                        Proposal(
                            msgspec.convert(schema, TableSchema), elements, options,
                            None if choice is None else msgspec.convert(choice, ScaleChoice),
                        )
                        for schema, elements, options, choice in given
                    )  # fmt: skip
            for table, given_by_all in sorted(proposals.items()):
                self._tables[table] = agree(table, given_by_all)
                self._chose(table, agreed_choice(given_by_all))
                self._declared.add(table)
        except BaseException:
            # Every rank is here, or has told the others that it gave up: nobody waits for an answer any more.
            self._commit.leave()
            self.abort()
            raise

    def _propose(self, tables: Mapping[str, Sequence[Declaration]]) -> dict[str, list[tuple[Any, int, str, Any]]]:
        session = self._session
        made: dict[str, list[tuple[Any, int, str, Any]]] = {}
        for table, declarations in tables.items():
            check_name(table)
            if table not in session.shapes:
                raise BadInput(f"table {table!r} has no shard in the writer's placement", table=table)
            if self.kind == "delta" and table in self._before:
                raise BadInput(f"table {table!r} exists; a delta cannot store it anew, begin a full", table=table)
            if self._is_written(table) or table in self._refined:
                raise BadInput(f"declare table {table!r} once, before writing its rows", table=table)
            for one in declarations:
                chosen = one.options or session.mirrors.options.get(table) or TableOptions()
                self._bad_rows[table] = chosen
                proposal = propose(
                    table, one.values, one.slots, chosen, shape=session.shapes[table],
                    generation=self._next_generation(table), has_mirror=session.mirrors.mode != "none",
                    held=self._held_scale(table),
                )  # fmt: skip
                schema = msgspec.to_builtins(proposal.schema)
                choice = None if proposal.choice is None else msgspec.to_builtins(proposal.choice)
                made.setdefault(table, []).append((schema, proposal.elements, proposal.options, choice))
        return made

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
        self._refuse_placed("create_table")
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
        sampled = RowSample(rows, dtype, is_all=False)  # type: ignore[arg-type]
        choice = choose_table_scale(chosen, dtype, sampled)  # type: ignore[arg-type]
        self._tables[table] = table_schema(
            table, chosen, num_rows=0, dim=dim, dtype=dtype, sample=sampled, slots=kinds, keys="hashed",  # type: ignore[arg-type]
            generation=self._next_generation(table), has_mirror=False, choice=choice,
        )  # fmt: skip
        self._chose(table, choice)
        self._bad_rows[table] = chosen
        self._created.add(table)

    def write_table(
        self,
        table: str,
        values: Any,
        *,
        slots: Mapping[str, Any] | None = None,
        options: TableOptions | None = None,
        rectangle: Rectangle | None = None,
    ) -> None:
        """Write every row of a table: in a ``full``, or as a new table of a delta. Blocks until it is written.

        With a placement: every row of one shard of it, whose table was declared or stays stored as it was.

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
        shard = self._shard(table, rectangle)
        self._check_first(shard)
        dtype = table_dtype(values, table)
        if len(values.shape) != 2 or values.shape[1] < 1:
            raise BadShape(f"table {table!r} has shape {tuple(values.shape)}; expected (num_rows, dim)", table=table)
        checked_size(table, "rows", values.shape[0], dim=values.shape[1])
        if self._session.placement is None:
            schema = self._schema_for(table, values, dtype, slots, options)
        else:
            schema = self._agreed_schema(table, options)
        place = shard.rectangle_in(schema)
        arrays = check_arrays(table, schema, place.num_rows, values, slots, place.columns)
        staged = self._stage_whole(shard, schema, arrays)
        try:
            self._tables[table], self._digests[shard] = staged.schema, staged.digest
            self._whole[shard] = staged
            self._assembly.write_table(shard, staged)
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
        threshold: Threshold | None = None,
        rectangle: Rectangle | None = None,
    ) -> int:
        """Write touched rows of a table; returns how many the segment holds (unchanged rows leave). Blocks.

        They are encoded now, against the mirror, and put by `commit`. Of a table with a threshold, rows that changed
        little wait: see `waiting`.

        Parameters
        ----------
        row_ids
            int64 (n,), sorted, unique, in range (any int64 for hashed tables); rows of the whole table; not kept.
        values
            (n, dim) in the table's dtype, not kept; the shard's columns of it where it is sharded by column. Of a
            lattice also its codes, int16 or int32: ``rint(x / scale)`` at the scale that the table has now, ``scale *
            2^-shift`` of its schema, which is the same for every shard. What is stored is that of the floats.
        slots
            Every slot of the table: (n,) or (n, dim).
        nonfinite
            What to do with rows that hold NaN, Inf or values beyond the code range. None does as the table's options
            say; a writer that has restored the table knows no options, and refuses. Rows given as codes can escape only
            as what their codes stand for.
        threshold
            Which rows may wait. None does as the table's options say; a writer that has restored the table knows none.
            Of no effect in a full, in one-shot deltas, after `refine_scale`, and with ``flush``.

        Raises
        ------
        BadInput, BadRowIds, BadShape, BadDtype, NonFiniteValues, TableNotFound
            Nothing of the table was written.
        """
        self._check_open()
        schema = self._schema(table)
        hashed = schema.keys == "hashed"
        shard = self._shard(table, rectangle)
        place = shard.rectangle_in(schema)
        row_ids = own_row_ids(table, row_ids, None if hashed else place.rows)
        arrays = check_arrays(table, schema, len(row_ids), values, slots or {}, place.columns)
        self._check_first(shard, "add", "set", "escape")
        self._check_disjoint(shard, row_ids)
        mirror, base = self._mirror(shard)
        if self.kind == "full" and not hashed and (mirror is None or not is_fully_mirrored(schema)):
            raise BadInput(
                f"table {table!r} has no full mirror, so a full needs all its rows: use write_table()", table=table
            )
        if len(row_ids) == 0:
            self._rows.setdefault(shard, [])
            return 0
        options = self._bad_rows.get(table) or self._session.mirrors.options.get(table)
        hold = self._hold(shard, mirror, threshold or (None if options is None else options.threshold))
        floats = {name: np.asarray(array).reshape(len(row_ids), -1) for name, array in arrays.items()}
        given = Given(row_ids, floats, None if hashed else place.columns)
        staged = stage_rows(
            table, schema, mirror, given,
            base_digest=base,
            absolute=self.kind == "delta" and self._keep < len(self._session.head.record.chain),
            on_bad_rows=nonfinite or options_on_bad_rows(options),
            workers=self._session.workers,
            hold=hold,
        )  # fmt: skip
        self._keep_rows(shard, staged)
        return sum(len(item.rows) for item in staged.lists.values())

    def delete_rows(self, table: str, row_ids: RowIds, *, rectangle: Rectangle | None = None) -> None:
        """Delete rows: a dense table reads them as its fill, a hashed table no longer has them.

        Of a table that is sharded by column every shard must delete them.

        Raises
        ------
        BadRowIds, TableNotFound
        """
        self._check_open()
        schema = self._schema(table)
        hashed = schema.keys == "hashed"
        shard = self._shard(table, rectangle)
        row_ids = own_row_ids(table, row_ids, None if hashed else shard.rectangle_in(schema).rows)
        self._check_first(shard, "delete")
        self._check_disjoint(shard, row_ids)
        mirror, base = self._mirror(shard)
        if self.kind == "full" and (mirror is None or not is_fully_mirrored(schema)):
            raise BadInput(
                f"table {table!r} has no full mirror, so a full needs all its rows: delete them in a delta", table=table
            )
        if len(row_ids) == 0:
            return
        self._keep_rows(shard, stage_delete(schema, mirror, row_ids, base))

    def resize_table(self, table: str, num_rows: int) -> None:
        """Change a dense table's number of rows; new rows read as the fill until they are ``set``.

        Must come before the table's rows.

        Raises
        ------
        TableNotFound, BadShape, BadInput
        """
        self._check_open()
        self._refuse_placed("resize_table")
        schema = self._schema(table)
        num_rows = checked_size(table, "rows", num_rows, dim=schema.dim)
        if schema.keys == "hashed":
            raise BadInput(f"table {table!r} has hashed keys and no number of rows", table=table)
        if self.kind == "full":
            raise BadInput(f"a full takes the new size from write_table(); resize {table!r} in a delta", table=table)
        if self._is_written(table) or table in self._refined:
            raise BadInput(f"resize table {table!r} before writing its rows", table=table)
        self._tables[table] = msgspec.structs.replace(schema, num_rows=num_rows)
        self._session.mirrors.stage_resize(Shard(table), self._tables[table], self._session.workers)

    def refine_scale(self, table: str, halvings: int = 1) -> None:
        """Halve a lattice's step ``halvings`` times, from this delta on: later saves are that much more exact.

        Only in the first save after `Writer.restore`, when the live values are those of the mirror, so that every code
        goes over exactly (design, section 4); the record says so in ``shift``. Rows of the table come after it, and are
        best all touched ones. Blocks; memory: a second copy of the table's codes until the commit.

        Raises
        ------
        TableNotFound
        BadInput
            Not the first save after a restore, no lattice with a mirror, or codes would leave their range: those that
            the table has, or, after more than 8 halvings since the chain's baseline, those that it had.
        """
        self._check_open()
        schema = self._schema(table)
        session = self._session
        is_first = self.kind == "delta" and session.is_restored and self._keep == len(session.head.record.chain)
        if not is_first:
            raise BadInput(
                f"the scale of table {table!r} can be refined only in the first delta after a restore", table=table
            )
        shards = session.shards([table])[table]
        if not isinstance(schema.encoding, Lattice) or any(session.mirrors.get(shard) is None for shard in shards):
            raise BadInput(f"table {table!r} is no lattice with a mirror; nothing to refine", table=table)
        if self._is_written(table) or table in self._refined:
            raise BadInput(f"refine table {table!r} once, before writing its rows", table=table)
        halvings = checked_size(table, "halvings", halvings, least=1)
        finer = msgspec.structs.replace(schema, shift=schema.shift + halvings)
        assert session.snapshot is not None  # a restored writer has one
        begin = session.snapshot.plan(table).batches[0].segment
        coarsest = session.snapshot.manifests[begin].tables[table].shift
        if finer.shift - coarsest > MAX_SHIFT_IN_CHAIN:
            raise BadInput(
                f"table {table!r} cannot be refined by {halvings} halvings: its chain would hold codes of scales "
                f"{finer.shift - coarsest} halvings apart, at most {MAX_SHIFT_IN_CHAIN} fit 32 bits; fold the chain "
                "into its baseline first (compact), or choose a scale in a full",
                table=table, expected=MAX_SHIFT_IN_CHAIN, found=finer.shift - coarsest,
            )  # fmt: skip
        smallest = schema.encoding.scale * 0.5**finer.shift
        is_in_range = finer.shift <= MAX_SHIFT and smallest >= MIN_SCALE
        refined: list[Shard] = []
        for shard in shards if is_in_range else ():
            if not session.mirrors.stage_refine(shard, finer, halvings, session.workers):
                break
            refined.append(shard)
        if not is_in_range or len(refined) < len(shards):
            for shard in refined:  # the table stays as it was, and the transaction may go on
                session.mirrors.drop_staged(shard)
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
        if self._is_written(table):
            raise BadInput(f"table {table!r} was written in this transaction", table=table)
        self._tables.pop(table, None)
        self._created.discard(table)
        self._dropped.add(table)

    def put_dense(self, tensors: Mapping[str, Array], dtypes: Mapping[str, str] | None = None) -> None:
        """Save dense tensors; those whose bytes did not change are referenced, not written again.

        Tensors that are not given keep their last value, as tables do; `drop_dense` ends one. Of several ranks only
        rank 0 saves them: they are the same everywhere.
        ``dtypes`` names the logical dtype where numpy has none (``bfloat16`` as uint16, ``bool`` as uint8). Arrays are
        kept until `commit`.

        Raises
        ------
        BadName, BadDtype, BadInput
            Nothing of the call was taken.
        """
        self._check_open()
        self._refuse_unless_first("dense tensors")
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
        self._refuse_unless_first("dense tensors")
        snapshot = self._session.snapshot
        if snapshot is None or name not in snapshot.dense:
            raise TableNotFound(f"no dense tensor {name!r}", table=name)
        if name in self._dense.given:
            raise BadInput(f"dense tensor {name!r} was given in this transaction", found=name)
        self._dense.dropped.add(name)

    def put_scalars(self, scalars: Mapping[str, JsonValue]) -> None:
        """Save step counters and other plain JSON values. Like documents they belong to this version alone.

        Of several ranks rank 0 saves them.

        Raises
        ------
        BadInput
            A value that JSON cannot hold, NaN and Inf included, or that nests deeper than 32 levels.
        """
        self._check_open()
        self._refuse_unless_first("scalars")
        check_json("scalars", scalars)
        self._scalars.update(scalars)

    def put_document(self, name: str, value: Any, default: document_tree.Default | None = None) -> None:
        """Save nested plain data (reader state, RNG state): dicts, lists, tuples, bytes, numbers, numpy arrays.

        ``value`` is encoded now and not kept. ``default`` maps leaves of other kinds (tensors) to arrays. Every
        rank may save documents, under names of its own.

        Raises
        ------
        BadInput
            Naming the leaf that is not plain data.
        """
        self._check_open()
        for part in name.split("/"):
            check_name(part)
        self._documents[name] = document_tree.encode(value, default)

    def abort(self) -> None:
        """Give the transaction up; its objects are orphans for garbage collection. A second call is harmless.

        The other ranks are told, so it blocks until they commit or abort too.
        """
        if self._ended:
            return
        self._ended = True
        self._session.lost(RuntimeError("aborted"))
        self._commit.refuse()

    def commit(self, *, user: Mapping[str, JsonValue] | None = None) -> int:
        """Make the segment durable and visible; returns the version. Blocks.

        Raises
        ------
        BadInput
            A full lacks tables, a declared table was not written, a one-shot delta lacks rows, or ``user`` is no JSON,
            or nests deeper than 32 levels; the transaction can go on.
        Fenced, Conflict, DoesNotApply, TransactionAborted
            Nothing became visible; the rows are still to be saved.
        CommitStateUnknown
            Neither won nor lost: `Writer.settle` finds out. Or the store's log still has an unknown record of something
            else (a tag, say): then nothing of this was sent, `undecided` is None, and the rows are still to be saved.
        StorageFailure
            Nothing became visible.
        RankFailed, RankLost
            With several ranks: another one failed, and nothing became visible (errors of this library keep their
            kind on every rank); or one does not answer, and nothing became visible unless this is rank 0 and
            `version` is set. The transaction is over on every rank.
        """
        self._check_open()
        if self._session.ranks.world == 1:
            self.check_complete(user)  # it can go on after that
        self._ended = True
        return self._commit.run(user)

    def check_complete(self, user: Mapping[str, JsonValue] | None) -> None:
        """See `cnr_store.write.commit.Share`."""
        missing = self.needs_whole_tables
        if missing:
            raise BadInput(
                f"a full needs every row of tables {missing}: they have no mirror; use write_table() "
                "(write_rows() for hashed keys) or drop_table()",
                table=missing[0],
            )
        declared = self._session.shards(sorted(self._declared & self._tables.keys()))
        unwritten = [shard for shards in declared.values() for shard in shards if shard not in self._whole]
        if unwritten:
            raise BadInput(
                f"table {unwritten[0]} was declared and not written: its rows would be gone; use write_table()",
                table=unwritten[0].table,
            )
        check_json("user", user or {})
        self._check_one_shot()

    def written_reader(self) -> dict[str, SegmentReader]:
        """A reader of the segment, by name, where this rank wrote its manifest; no I/O."""
        return self._commit.written_reader()

    def move_mirrors(self, mirrors: Mirrors) -> None:
        """Apply what was staged to the mirrors; the commit has won."""
        mirrors.commit_staged()
        mirrors.keep_only(self._tables.keys() - self._created)  # no hashed table has one, though its name may have had
        for shard, whole in self._whole.items():
            if whole.mirror is not None and whole.digest is not None:
                mirrors.put(shard, whole.mirror, whole.digest)
                mirrors.hold_back(shard, None)
            else:
                mirrors.forget(shard)
        for shard, changes in self._rows.items():
            mirror = mirrors.get(shard)
            if mirror is not None:
                for staged in changes:
                    staged.apply(mirror, self._session.workers)
                mirrors.put(shard, mirror, self._digests.get(shard, mirrors.digest(shard)))
                mirrors.hold_back(shard, next((one.held.after for one in changes if one.held is not None), None))
        mirrors.options.update(self._bad_rows)
        mirrors.keep_only(self._tables)

    def write_parts(self) -> tuple[Receipt, str | None]:
        """See `cnr_store.write.commit.Share`."""
        session, out = self._session, self._assembly.out
        shards = session.shards(self._tables)
        if self.kind == "full":
            for shard in (shard for table in self._tables for shard in shards[table]):
                if shard not in self._whole and self._tables[shard.table].keys == "dense":
                    self._write_from_mirror(shard)
        for shard, changes in self._rows.items():
            # The rows given of a hashed table are all it has in a full: it has no mirror to lay them over.
            if self.kind == "delta" or self._tables[shard.table].keys == "hashed":
                for staged in changes:
                    self._assembly.write_lists(shard, self._tables[shard.table], staged)
        base = self.base_manifest()
        parts = tuple(self._part(shard, base) for table in self._tables for shard in shards[table])
        if session.ranks.rank == 0:
            kept = {entry.seg for entry in session.head.record.chain[: self._keep]} if self.kind == "delta" else set()
            self._assembly.write_dense(self._dense, session.snapshot, kept)
        for name, document in self._documents.items():
            out.write_document(name, document)
        receipt = out.finish(
            txn=self.txn, rank=session.ranks.rank, world=session.ranks.world, attempt=self._attempt,
            base=session.head.record.v, l0=self._draft.l0, parts=parts,
        )  # fmt: skip
        # Rank 0 commits and would be the only reader of its own: the manifest says all of it.
        return receipt, out.put_receipt(receipt) if session.ranks.rank > 0 else None

    def _check_one_shot(self) -> None:
        """Refuse a one-shot delta that lacks a row of the deltas it replaces, which would fall back to the baseline."""
        session = self._session
        if self.kind == "full" or session.snapshot is None or self._keep == len(session.head.record.chain):
            return
        readers = session.snapshot.readers[self._keep - 1 :]
        for table, schema in self._tables.items():
            shards = [shard for shard in session.shards([table])[table] if shard not in self._whole]
            if not shards or table not in self._before:
                continue
            changed = rows_since(readers, table, schema)
            for shard in shards:
                given = [item.rows for staged in self._rows.get(shard, []) for item in staged.lists.values()]
                missing = np.setdiff1d(changed, np.concatenate([np.empty(0, np.int64), *given]))
                if schema.keys == "dense":
                    start, stop = shard.rectangle_in(schema).rows
                    missing = missing[(missing >= start) & (missing < stop)]
                if not len(missing):
                    continue
                raise BadInput(
                    f"row {int(missing[0])} of table {table!r} (and {len(missing) - 1} more) changed since the "
                    "baseline and was not given; a one-shot delta replaces the deltas since then, give all their rows",
                    table=table, found=int(missing[0]),
                )  # fmt: skip

    def _part(self, shard: Shard, base: Manifest | None) -> PartEntry:
        table, schema = shard.table, self._tables[shard.table]
        mirrors = self._session.mirrors
        before = None
        if base is not None and table in base.tables and base.tables[table].generation == schema.generation:
            before = mirrors.committed_digest(shard) if self._keep == len(self._session.head.record.chain) else None
        held = next((one.held for one in self._rows.get(shard, []) if one.held is not None), None)
        waiting: WaitingEntry | msgspec.UnsetType = msgspec.UNSET
        if held is not None and len(held.after.rows):
            waiting = WaitingEntry(count=len(held.after.rows), max_error=held.max_error, oldest=held.oldest)
        digest = self._digests.get(shard, self._mirror(shard)[1])
        return self._assembly.part(shard, schema, before, digest, waiting)

    def base_manifest(self) -> Manifest | None:
        """See `cnr_store.write.commit.Share`."""
        if self.kind == "full" or self._session.snapshot is None:
            return None
        return self._session.snapshot.manifests[self._keep - 1]

    def _schema(self, table: str) -> TableSchema:
        if table not in self._tables:
            raise TableNotFound(f"no table {table!r}; there are {sorted(self._tables)}", table=table)
        return self._tables[table]

    def _shard(self, table: str, rectangle: Rectangle | None) -> Shard:
        """Return which of this rank's shards of a table is meant.

        Raises
        ------
        BadInput
        """
        if self._session.placement is None:
            if rectangle is not None:
                raise BadInput(
                    f"this writer holds table {table!r} whole; open it with shards= to write rectangles", table=table
                )
            return Shard(table)
        held = self._session.shards([table])[table]
        chosen = [shard for shard in held if rectangle is None or shard.rectangle == rectangle]
        if len(chosen) != 1:
            raise BadInput(
                f"rank {self._session.ranks.rank} holds {[str(shard) for shard in held]} of table {table!r}; "
                f"found rectangle={rectangle}, name one of them",
                table=table, expected=[shard.rectangle for shard in held], found=rectangle,
            )  # fmt: skip
        return chosen[0]

    def _agreed_schema(self, table: str, options: TableOptions | None) -> TableSchema:
        """The schema of a table that ranks write together: as they declared it, or as it was."""
        if table not in self._declared and (options is not None or table not in self._tables):
            raise BadInput(
                f"table {table!r} is new or gets other options, and ranks write it together: all of them must call "
                "declare_tables() first, which finds one scale for all rows",
                table=table,
            )
        return self._tables[table]

    def _refuse_placed(self, verb: str) -> None:
        if self._session.placement is not None:
            raise Unsupported(
                f"{verb}() is not there for writers that hold shards; use a writer of whole tables on one rank"
            )

    def _refuse_unless_first(self, what: str) -> None:
        if self._session.ranks.rank > 0:
            raise BadInput(
                f"{what} are the same on every rank and saved by rank 0; this is rank {self._session.ranks.rank}"
            )

    def _is_written(self, table: str) -> bool:
        return any(shard.table == table for shard in (*self._rows, *self._whole))

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
        sample = RowSample(values, dtype)
        choice = choose_table_scale(chosen, dtype, sample, held=self._held_scale(table))
        schema = table_schema(
            table, chosen, num_rows=num_rows, dim=dim, dtype=dtype, sample=sample, choice=choice,
            slots={name: array[0:1] for name, array in slots.items()}, generation=self._next_generation(table),
            has_mirror=self._session.mirrors.mode != "none",
        )  # fmt: skip
        self._chose(table, choice)
        return schema

    def _held_scale(self, table: str) -> float | None:
        """The lattice step that a table has at the head: rows that were restored from it, and not moved, lie on it."""
        schema = self._before.get(table)
        if schema is None or not isinstance(schema.encoding, Lattice):
            return None
        return schema.encoding.scale * 0.5**schema.shift

    def _chose(self, table: str, choice: ScaleChoice | None) -> None:
        if choice is None:
            self._choices.pop(table, None)
            return
        self._choices[table] = choice
        logger.info(
            "table %s: scale %.6g chosen on %d rows; mean squared error %.3g, known within %.1f %% at %.0f %%",
            table, choice.scale, choice.sample_rows, choice.mse, 100 * choice.relative_half_width,
            100 * choice.confidence,
        )  # fmt: skip

    def _next_generation(self, table: str) -> int:
        """One above every generation in the chain: a one-shot delta may put two lives of a table side by side."""
        snapshot = self._session.snapshot
        known = [m.tables[table].generation for m in (snapshot.manifests if snapshot else ()) if table in m.tables]
        head = self._session.head.record.tables.get(table)
        return 1 + max([0, *known, head.generation if head else 0])

    def _stage_whole(self, shard: Shard, schema: TableSchema, arrays: Mapping[str, Any]) -> StagedTable:
        table, mirrors = shard.table, self._session.mirrors
        if shard in mirrors and self._session.is_synced and table in self._before:
            # The new codes take the old mirror's place in memory only if the old ones can be given up.
            mirrors.release_for_full(shard)
        return stage_table(
            table, schema, arrays,
            allocate=None if mirrors.mode == "none" else mirrors.allocator(),
            on_bad_rows=options_on_bad_rows(self._bad_rows.get(table) or mirrors.options.get(table)),
            workers=self._session.workers,
            rectangle=shard.rectangle_in(schema),
        )  # fmt: skip

    def _write_from_mirror(self, shard: Shard) -> None:
        schema, mirror = self._tables[shard.table], self._session.mirrors.get(shard)
        assert mirror is not None  # needs_whole_tables has refused the others
        known = self._session.mirrors.digest(shard)
        # One pass over memory, far cheaper than the compression that follows: a baseline must not carry on what a
        # fault of the memory, or a stray write, has changed.
        if known is not None and (found := mirror.digest(self._session.workers)) != known:
            self._session.mirrors.is_complete = False  # nor may a delta build on it
            raise DoesNotApply(
                f"the mirror of table {shard} has state digest {found:016x}, kept up to date it was {known:016x}: its "
                "memory was changed behind the writer; restore first, or write the table whole",
                table=shard.table, expected=f"{known:016x}", found=f"{found:016x}",
            )  # fmt: skip
        merged = StagedRows(schema, digest=self._digests.get(shard, known))
        for staged in self._rows.get(shard, []):
            merged.lists |= staged.lists
        whole = stage_mirror(schema, mirror, merged)
        self._digests[shard] = whole.digest
        self._assembly.write_table(shard, whole)

    def _mirror(self, shard: Shard) -> tuple[TableCodes | None, int | None]:
        """The mirror that rows of a shard are laid over, and its digest: a hashed table has none, its name may have."""
        if self._tables[shard.table].keys == "hashed":
            return None, None
        return self._session.mirrors.get(shard), self._session.mirrors.digest(shard)

    def _hold(self, shard: Shard, mirror: TableCodes | None, threshold: Threshold | None) -> Hold | None:
        """What decides which rows of a shard wait; None where none may in this transaction."""
        if threshold is None:
            return None
        schema = self._tables[shard.table]
        is_lattice = isinstance(schema.encoding, Lattice)
        check_threshold(shard.table, threshold, is_lattice=is_lattice, has_mirror=mirror is not None)
        if not self._may_wait or shard.table in self._refined or mirror is None:
            return None
        before = self._session.mirrors.waiting(shard, (schema.generation, schema.shift))
        return Hold(threshold, before, float(mirror.specs["codes"].scale))

    def _keep_rows(self, shard: Shard, staged: StagedRows) -> None:
        before, base = self._digests.get(shard), self._mirror(shard)[1]
        if before is not None and staged.digest is not None and base is not None:
            # Both changes were computed from the mirror's state; they touch disjoint rows, so they add up.
            staged.digest = (before + staged.digest - base) % (1 << 64)
        self._digests[shard] = staged.digest
        self._rows.setdefault(shard, []).append(staged)

    def _check_first(self, shard: Shard, *operations: str) -> None:
        wanted = set(operations)
        changes = self._rows.get(shard, [])
        done = {op for staged in changes for op in staged.lists} | set(self._assembly.entries.get(shard, {}))
        if any(len(staged.waiting) for staged in changes):
            done.add("add")  # they are in no list, and were given all the same
        if shard in self._whole or (done & wanted if wanted else done):
            raise BadInput(
                f"table {shard} was written in this transaction already; give its rows at once", table=shard.table
            )

    def _check_disjoint(self, shard: Shard, row_ids: RowIds) -> None:
        table = shard.table
        for staged in self._rows.get(shard, []):
            for rows in (*(item.rows for item in staged.lists.values()), staged.waiting):
                both = np.intersect1d(rows, row_ids, assume_unique=True)
                if len(both):
                    raise BadRowIds(
                        f"row {int(both[0])} of table {table!r} is both written and deleted in one transaction",
                        table=table, found=int(both[0]),
                    )  # fmt: skip

    def _check_open(self) -> None:
        if self._ended or self._session.open is not self:
            raise BadInput("the transaction has ended; begin another one")
