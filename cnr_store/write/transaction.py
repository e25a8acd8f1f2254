"""An open segment: rows are encoded and written when they are given; `commit` makes them visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal

from cnr_store.encodings.scale import ScaleChoice
from cnr_store.errors import BadInput
from cnr_store.format import document_tree
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import TableSchema
from cnr_store.segment.codes import Array
from cnr_store.types import JsonValue, Rectangle, RowIds
from cnr_store.write.commit import Commit
from cnr_store.write.encode import RowUpdate
from cnr_store.write.joined_rows import JoinedRows
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.staged_segment import StagedSegment
from cnr_store.write.table_options import TableOptions
from cnr_store.write.whole_tables import TableValues
from cnr_store.write.writer_state import CommitKind, SegmentDraft, WriterState


@contextmanager
def _ending_on_all_ranks(transaction: Transaction, commit: Commit) -> Iterator[None]:
    """End a transaction where its ranks do not agree."""
    try:
        yield
    except BaseException:
        # Every rank is here, or has sent that it gave up: no rank waits for an answer any more.
        commit.leave()
        transaction.abort()
        raise


class Transaction:
    """An open segment. Use as a context manager: it commits at the end, or aborts on an exception.

    Rows are encoded and written when they are given; nothing is visible before `commit` returns.

    Attributes
    ----------
    kind
        ``baseline`` or ``delta``.
    step, txn
        The training step that is saved, and the name of the transaction.

    Notes
    -----
    Where several ranks write together each has a transaction for its own shards, begun and committed by all of them.
    ``rectangle=`` names the shard; leave it out if this rank holds one shard of the table.
    """

    def __init__(self, state: WriterState, draft: SegmentDraft) -> None:
        self.kind: CommitKind = draft.kind
        self.step = draft.step
        self.txn = draft.txn
        self._state = state
        self._staged = StagedSegment(state, draft)
        self._commit = Commit(state, self._staged)
        self._ended = False
        self._notes: dict[str, JsonValue] = {}

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
        """The committed version; None until it is known."""
        return self._commit.version

    @property
    def undecided(self) -> LogEntry | None:
        """The record that rank 0 sent, if `commit` could not find out whether the log has it."""
        return self._commit.undecided

    @property
    def size_bytes(self) -> int:
        """Bytes of the segment, of all ranks, once it was written."""
        return self._commit.size_bytes

    @property
    def tables(self) -> Mapping[str, TableSchema]:
        """Every table as it will be after the commit."""
        return self._staged.schemas.tables

    @property
    def scale_choices(self) -> Mapping[str, ScaleChoice]:
        """How the scales were measured of tables that this transaction stores as a new lattice, over all ranks."""
        return self._staged.schemas.choices

    @property
    def needs_whole_tables(self) -> list[str]:
        """Tables of the head that this rank cannot write its shards of from the mirror, in a ``baseline``.

        Give dense ones to `write_table` and all rows of hashed ones to `write_rows`, or drop them.
        """
        return self._staged.tables.missing_tables

    def declare_tables(self, tables: Mapping[str, Sequence[Declaration]]) -> None:
        """Agree with all ranks on how tables are stored that `write_table` will write. Blocks; all ranks call it.

        Scales are chosen here, of many tables at a time. Writers with a placement need it for new tables and new
        encodings: one scale must hold for all shards of a table (`cnr_store.write.schema_agreement`).

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
        with _ending_on_all_ranks(self, self._commit):
            self._staged.schemas.agree(tables, self._staged.tables.written)

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
        """Add a table with hashed int64 keys; its rows are always ``set``. Of several ranks, all call it; blocks.

        ``sample`` (n, dim): what a scale is chosen on. ``bits=`` needs some rows on one rank; each rank gives its own.

        Raises
        ------
        BadInput, BadName, BadShape, BadDtype
            Where several ranks write, the transaction is over on every rank.
        """
        self._check_open()
        create = self._staged.schemas.create
        with nullcontext() if self._state.setup.ranks.world == 1 else _ending_on_all_ranks(self, self._commit):
            create(table, dim=dim, options=options, dtype=dtype, slots=slots or {}, sample=sample)

    def write_table(
        self, table: str, values: Any, *, slots: Mapping[str, Any] | None = None, options: TableOptions | None = None,
        rectangle: Rectangle | None = None,
    ) -> None:  # fmt: skip
        """Write every row of a table: in a ``baseline``, or as a new table of a delta. Blocks until it is written.

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
            Nothing of the table was written; the transaction stays open.
        StorageFailure
            The transaction is over, as after `abort`.
        """
        self.write_tables([TableValues(table, values, slots or {}, options, rectangle)])

    def write_tables(self, tables: Sequence[TableValues]) -> None:
        """Write every row of many tables, each as by `write_table`; small ones are encoded together. Blocks.

        After `NonFiniteValues` other tables of the call may be written; after other kinds of `BadInput` none is.
        """
        self._check_open()
        for encoded in self._staged.tables.encode_tables(tables):
            try:
                self._staged.tables.put_tables(encoded)
            except BaseException:
                # Some of their objects are there and some are not: nothing can be put in their place.
                self.abort()
                raise

    def read_live(
        self, table: str, values: Any, *, slots: Mapping[str, Any] | None = None, rectangle: Rectangle | None = None
    ) -> bool:
        """Read every row of a declared table into its mirror, while the training may write them. Blocks.

        Puts no object: `commit` writes the table from the mirror, with the rows of `write_rows` laid over it. For a
        baseline. Every row that was written since this call began must be given to `write_rows`, with its values at the
        step of the commit (`move_to`). Then no object has what was read of such a row, which may be half written.

        Parameters are those of `write_table`.

        Returns
        -------
        bool
            False if the table has no mirror of all its arrays (``mirror="none"``, affine rows): nothing was read. Give
            it to `write_table`, while nothing writes its rows.

        Raises
        ------
        BadInput and its kinds
            Nothing of the table was read; the transaction stays open.
        """
        self._check_open()
        return self._staged.tables.read_live(table, values, slots or {}, rectangle)

    def move_to(self, step: int) -> None:
        """Set another training step for the rows; every rank sets the same one, before `commit`."""
        self._check_open()
        self.step = self._staged.draft.step = step

    def write_rows(
        self,
        table: str,
        row_ids: RowIds,
        values: Array,
        *,
        slots: Mapping[str, Array] | None = None,
        nonfinite: Literal["refuse", "escape"] | None = None,
        rectangle: Rectangle | None = None,
    ) -> int:
        """Write touched rows of a table; returns how many the segment will have, without unchanged ones. Blocks.

        They are encoded now, against the mirror; `commit` puts them.

        Parameters
        ----------
        row_ids
            int64 (n,), sorted, unique, in range; rows of the whole table; not kept. For hashed tables any int64 that
            this rank owns (`Writer.keys`).
        values
            (n, dim) in the table's dtype, not kept; the shard's columns of it where it is sharded by column. Of a
            lattice also its codes, int16 or int32: ``rint(x / scale)`` at the scale that the table has now, ``scale *
            2^-shift`` of its schema, which is the same for every shard. What is stored is that of the floats.
        slots
            Every slot of the table: (n,) or (n, dim).
        nonfinite
            What to do with rows that hold NaN, Inf or values beyond the code range. None follows the table's options;
            a writer that has restored the table has none, and refuses. Rows that are given as codes become exact rows
            of the values that the codes mean.

        Raises
        ------
        BadInput, BadRowIds, BadShape, BadDtype, NonFiniteValues, TableNotFound
            Nothing of the table was written.
        """
        return self.write_many([RowUpdate(table, row_ids, values, slots or {}, nonfinite, rectangle)])[0]

    def write_many(self, updates: Sequence[RowUpdate], *, joined: Sequence[JoinedRows] = ()) -> list[int]:
        """Write touched rows of many tables, all or none, as `write_rows`; small ones are encoded together. Blocks.

        ``joined`` are rows of other tables, end to end, of which nothing is counted in what is returned. Their ids are
        kept until `commit`.
        """
        self._check_open()
        return self._staged.tables.stage_rows(updates, joined)

    def changed_rows(
        self, table: str, first_row: int, values: Array, *, slots: Mapping[str, Array] | None = None,
        rectangle: Rectangle | None = None,
    ) -> RowIds:  # fmt: skip
        """Return which of the rows from ``first_row`` on differ in a code from what is stored; int64, ascending.

        For callers that do not know what they changed: pass the result to `write_rows`. It compares with the mirror, so
        it returns all rows if there is none (``mirror="none"``; the encodings affine and raw). Stages nothing. Blocks.

        Parameters are those of `write_rows`, for ``len(values)`` consecutive rows.

        Raises
        ------
        BadInput, BadRowIds, BadShape, BadDtype, NonFiniteValues, TableNotFound
        """
        self._check_open()
        return self._staged.tables.changed_rows(table, first_row, values, slots or {}, rectangle)

    def delete_rows(self, table: str, row_ids: RowIds, *, rectangle: Rectangle | None = None) -> None:
        """Delete rows: a dense table reads them as its fill, a hashed table no longer has them.

        Of a table that is sharded by column every shard must delete them.

        Raises
        ------
        BadRowIds, TableNotFound
        """
        self._check_open()
        self._staged.tables.stage_delete(table, row_ids, rectangle)

    def resize_table(self, table: str, num_rows: int) -> None:
        """Change a dense table's number of rows; new rows read as the fill until they are ``set``.

        Must come before the table's rows.

        Raises
        ------
        TableNotFound, BadShape, BadInput
        """
        self._check_open()
        self._staged.schemas.resize(table, num_rows, self._staged.tables.written)

    def refine_scale(self, table: str, halvings: int = 1) -> None:
        """Halve a lattice's step ``halvings`` times, from this delta on: later saves are that much more exact.

        Only in the first save after `Writer.restore`: then the live values are those of the mirror, and every code is
        converted exactly (design, section 4). The manifest records it as ``shift``. Give the table's rows after this
        call, best all touched ones. Blocks; memory: a second copy of the table's codes until the commit.

        Raises
        ------
        TableNotFound
        BadInput
            Not the first save after a restore, no lattice with a mirror, or codes would leave their range: those that
            the table has, or, after more than 8 halvings since the chain's baseline, those that it had.
        """
        self._check_open()
        self._staged.schemas.refine(table, halvings, self._staged.tables.written)

    def drop_table(self, table: str) -> None:
        """Drop a table: it is absent from this version on.

        Raises
        ------
        TableNotFound
        """
        self._check_open()
        self._staged.schemas.drop(table, self._staged.tables.written)

    def put_dense(
        self, tensors: Mapping[str, Array], dtypes: Mapping[str, str] | None = None,
        *, check: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Save dense tensors; those whose bytes did not change are referenced, not written again.

        Tensors that are not given keep their last value, as tables do; `drop_dense` ends one. Of several ranks only
        rank 0 saves them: they are the same everywhere. But each rank saves its own under names that begin with
        ``rank/<rank>/``; one that is not given is no part of the new state, as with documents.
        ``dtypes`` names the logical dtype where numpy has none (``bfloat16`` as uint16, ``bool`` as uint8). Arrays are
        kept until `commit`, which calls ``check`` once they are put, and gives the save up with what that raises.

        Raises
        ------
        BadName, BadDtype, BadInput
            Nothing of the call was stored.
        """
        self._check_open()
        self._staged.documents.put_dense(tensors, dtypes or {})
        if check is not None:
            self._staged.documents.checks.append(check)

    def drop_dense(self, name: str) -> None:
        """Drop a dense tensor: it is absent from this version on. Raises `TableNotFound` if there is none."""
        self._check_open()
        self._staged.documents.drop_dense(name)

    def put_scalars(self, scalars: Mapping[str, JsonValue]) -> None:
        """Save step counters and other plain JSON values. Like documents they belong to this version alone.

        Of several ranks rank 0 saves them.

        Raises
        ------
        BadInput
            A value that JSON cannot hold, NaN and Inf included, or that nests deeper than 32 levels.
        """
        self._check_open()
        self._staged.documents.put_scalars(scalars)

    def put_document(self, name: str, value: Any, default: document_tree.Default | None = None) -> None:
        """Save nested plain data (reader state, RNG state): dicts, lists, tuples, bytes, numbers, numpy arrays.

        ``value`` is encoded now and not kept. ``default`` maps leaves of other kinds (tensors) to arrays. Every
        rank may save documents, under names of its own. A document that is not given is no part of the new state; of
        one that is given and has not changed, a delta stores only the name.

        Raises
        ------
        BadInput
            A leaf is not plain data; the message names it.
        """
        self._check_open()
        self._staged.documents.put_document(name, value, default)

    def note(self, notes: Mapping[str, JsonValue]) -> None:
        """Record notes with the commit, as `cnr_store.format.notes.checked_notes` returns them; later ones win."""
        self._check_open()
        self._notes.update(notes)

    def abort(self) -> None:
        """Abort the transaction; garbage collection deletes its objects. A second call does nothing.

        It informs the other ranks, so it blocks until they commit or abort too.
        """
        if self._ended:
            return
        self._ended = True
        self._state.lost(RuntimeError("aborted"))
        self._commit.refuse()

    def commit(self, *, user: Mapping[str, JsonValue] | None = None) -> int:
        """Make the segment durable and visible; returns the version. Blocks.

        Raises
        ------
        BadInput
            Tables or rows that the commit needs were not written, or ``user`` is no JSON of at most 32 levels; the
            transaction stays open.
        Fenced, Conflict, DoesNotApply, TransactionAborted, StorageFailure
            Nothing became visible; the rows are still to be saved.
        CommitStateUnknown
            Neither won nor lost: `Writer.settle` finds out. Or the store's log has an unknown record of another
            operation, such as a tag: then nothing was sent, `undecided` is None, and the rows are still to be saved.
        RankFailed, RankLost
            Another rank failed, or does not answer. Nothing became visible, unless this is rank 0 and has a `version`
            after a RankLost. Errors of this library keep their kind on every rank.
        """
        self._check_open()
        user = {**self._notes, **(user or {})}
        if self._state.setup.ranks.world == 1:
            self._commit.check_alone(user)  # it can go on after that
        self._ended = True
        return self._commit.run(user)

    def _check_open(self) -> None:
        if self._ended or self._state.open is not self:
            raise BadInput("the transaction has ended; begin another one")
