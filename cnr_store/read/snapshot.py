"""One committed state of the training, read-only: tables, slots, dense tensors, scalars, documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.widths import carrier
from cnr_store.errors import BadDtype, BadInput, BadRowIds, BadShape, TableNotFound
from cnr_store.format import document_tree
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import (
    ChainEntry,
    CommitRecord,
    DenseEntry,
    Manifest,
    TableSchema,
)
from cnr_store.read.changed_rows import rows_since
from cnr_store.read.plan import UNCONFIRMED_BYTES, TablePlan, check_stored, plan_table
from cnr_store.read.replay import ChunkReader, matching
from cnr_store.read.table_reader import read_keyed, read_mirror, read_range, read_rows
from cnr_store.runtime.notebook import html_table
from cnr_store.runtime.threads import Inline, Workers
from cnr_store.segment.chunk_cache import ChunkCache
from cnr_store.segment.codes import Allocate, Array, ArraySpec, TableCodes, array_specs, fill_value
from cnr_store.segment.packs import read_tensors
from cnr_store.segment.reader import IfMissing, SegmentReader, check_record, open_chain
from cnr_store.segment.rows import check_row_ids
from cnr_store.segment.shards import KeyShare, whole_of
from cnr_store.storage import Storage
from cnr_store.types import JsonValue, Rectangle, RowIds, SlotsRule


class Snapshot:
    """The state at one version. Opening reads one manifest per segment of the chain and nothing else.

    Attributes
    ----------
    record
        The commit record: version ``record.v``, ``step``, ``checkpoint``, chain.
    """

    def __init__(
        self,
        storage: Storage,
        entry: LogEntry,
        workers: Workers,
        *,
        known: Mapping[str, SegmentReader] | None = None,
        opens: bool = True,
        if_missing: IfMissing | None = None,
        cache: ChunkCache | None = None,
    ) -> None:
        """Open the state; with ``opens=False`` `open` or the first use does. ``known``: segments that are open.

        ``if_missing``: see `SegmentReader`. ``cache`` keeps what `TableView.read_rows` decodes, and nothing else: a
        read of ranges would push out what is looked up again.
        """
        self.record: CommitRecord = entry.record
        self._storage = storage
        self._workers = workers
        # What was opened for another version is missed as part of this one.
        self._known = {name: reader.with_if_missing(if_missing) for name, reader in (known or {}).items()}
        self._if_missing = if_missing
        self._cache = cache
        self._readers: tuple[SegmentReader, ...] | None = None
        if opens:
            self.open()

    def open(self) -> None:
        """Read the manifests that are not known yet; a second call does nothing.

        Raises
        ------
        MissingObject, CorruptObject, CorruptStore, StorageFailure
        """
        if self._readers is None:
            chain = self.record.chain
            readers = open_chain(
                self._storage, chain, self._workers, known=self._known, if_missing=self._if_missing
            )  # fmt: skip
            if readers:
                check_record(self.record, readers[-1])
            self._readers = readers

    def open_chain(self, chain: Sequence[ChainEntry]) -> tuple[SegmentReader, ...]:
        """Return the segments of another chain: a GET for each that neither this state nor ``known`` has.

        Raises
        ------
        MissingObject, CorruptObject, CorruptStore, StorageFailure
        """
        return open_chain(self._storage, chain, self._workers, known=self._known | self.known_readers)

    @property
    def known_readers(self) -> dict[str, SegmentReader]:
        """The segments that are open by now, by name; no I/O."""
        return dict(self._known) if self._readers is None else {reader.name: reader for reader in self._readers}

    @property
    def readers(self) -> tuple[SegmentReader, ...]:
        """The segments of the chain, baseline first."""
        if self._readers is None:
            self.open()
        assert self._readers is not None
        return self._readers

    @cached_property
    def lookup_readers(self) -> Sequence[ChunkReader]:
        """The segments of the chain through the cache, if there is one."""
        return self.readers if self._cache is None else [reader.with_cache(self._cache) for reader in self.readers]

    @property
    def version(self) -> int:
        """The log position this snapshot was opened at."""
        return self.record.v

    @property
    def step(self) -> int:
        """The training step of the state."""
        return self.record.step

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever saved."""
        return not self.readers

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The manifests of the chain, baseline first."""
        return tuple([reader.manifest for reader in self.readers])

    @property
    def tables(self) -> dict[str, TableSchema]:
        """Table name to schema."""
        return dict(self.readers[-1].manifest.tables) if self.readers else {}

    def __repr__(self) -> str:
        count = len(self.tables) if self._readers is not None else None
        names = "not opened" if count is None else f"{count} table{'s' if count != 1 else ''}"
        return f"<Snapshot version {self.version}, step {self.step}, {names}>"

    def _repr_html_(self) -> str:
        columns = ("table", "rows", "dim", "dtype", "keys", "encoding", "slots")
        rows = [
            (
                name,
                one.num_rows,
                one.dim,
                one.dtype,
                one.keys,
                one.encoding.__struct_config__.tag,
                ", ".join(sorted(one.slots)),
            )
            for name, one in sorted(self.tables.items())
        ]
        return html_table(f"Snapshot of version {self.version}, step {self.step}", columns, rows)

    def table(self, name: str) -> TableView:
        """Return one table.

        Raises
        ------
        TableNotFound
        """
        if name not in self.tables:
            raise TableNotFound(
                f"version {self.version} has no table {name!r}; it has {sorted(self.tables)}",
                table=name, version=self.version,
            )  # fmt: skip
        return TableView(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    @property
    def dense(self) -> dict[str, DenseEntry]:
        """Dense tensor name to where it is, its dtype and its shape."""
        return dict(self.readers[-1].manifest.dense) if self.readers else {}

    def read_dense(self, name: str) -> npt.NDArray[Any]:
        """Return a dense tensor in its stored dtype (bfloat16 as uint16, bool as uint8); reads just its chunks.

        Raises
        ------
        TableNotFound, CorruptStore
        """
        return read_tensors(self.readers, self._dense_entries([name]), Inline())[name]

    def _dense_entries(self, names: Iterable[str]) -> dict[str, DenseEntry]:
        held, found = self.dense, dict[str, DenseEntry]()
        for name in names:
            if name not in held:
                raise TableNotFound(
                    f"version {self.version} has no dense tensor {name!r}", table=name, version=self.version
                )
            found[name] = held[name]
        return found

    def read_many_dense(
        self, names: Iterable[str], into: Mapping[str, npt.NDArray[Any]] = MappingProxyType({})
    ) -> dict[str, npt.NDArray[Any]]:
        """Return dense tensors by name, as `read_dense`; chunks are read on the store's threads.

        ``into``: memory by name that some of them are read into, C-contiguous, of their stored dtype and shape; after
        an error it holds anything.

        Raises
        ------
        TableNotFound, CorruptStore
        BadShape, BadDtype
            Memory of another shape or dtype, or not in one piece; nothing was read.
        """
        return read_tensors(self.readers, self._dense_entries(names), self.workers, into)

    @property
    def scalars(self) -> dict[str, JsonValue]:
        """Step counters and other plain values saved with the state."""
        return dict(self.readers[-1].manifest.scalars) if self.readers else {}

    @property
    def documents(self) -> list[str]:
        """Names of the documents saved with the state (``reader/0``, ``trainer/0``, ``rng/0/torch`` ...)."""
        return sorted(self.readers[-1].manifest.documents) if self.readers else []

    def read_document(self, name: str, tensor_hook: document_tree.TensorHook | None = None) -> Any:
        """Return a document as the nested plain data that was saved (tuples, bytes and arrays included).

        ``tensor_hook`` makes what it likes of tensors, which are arrays without it.

        Raises
        ------
        TableNotFound
        """
        entry = self.readers[-1].manifest.documents.get(name) if self.readers else None
        if entry is None:
            raise TableNotFound(f"version {self.version} has no document {name!r}", path=name, version=self.version)
        holder = next(one for one in self.readers if one.name == entry.segment)
        return document_tree.decode(holder.read_document(name), tensor_hook)

    def plan(
        self,
        table: str,
        start: int = 0,
        stop: int | None = None,
        rows: RowIds | None = None,
        columns: tuple[int, int] | None = None,
    ) -> TablePlan:
        """Return which chunks a read of ``table``, or of some of its columns, needs; no I/O."""
        return plan_table(self.manifests, table, start, stop, rows, columns)

    @property
    def workers(self) -> Workers:
        """The threads that reads run on."""
        return self._workers


class TableView:
    """One table of a snapshot. Reads block; bfloat16 values are uint16 arrays of their bits.

    A table whose columns several writers held has its one-dimensional slots once per column range (`column_cuts`). Read
    at other columns, the whole table for one, such a slot is `Unsupported` unless a ``slots_rule`` is given: ``mean``
    of the ranges that are met, weighted by their columns in the read, or ``drop``, which leaves the output as it is.
    """

    def __init__(self, snapshot: Snapshot, name: str) -> None:
        self.name = name
        self.schema = snapshot.tables[name]
        self._snapshot = snapshot
        self._specs = array_specs(self.schema)

    def __repr__(self) -> str:
        rows, dim = self.shape
        slots = f", slots {', '.join(sorted(self.schema.slots))}" if self.schema.slots else ""
        keys = f"{rows:,} rows" if self.schema.keys == "dense" else "hashed rows"
        encoding = self.schema.encoding.__struct_config__.tag
        return f"<TableView {self.name!r}: {keys} x {dim}, {self.schema.dtype} as {encoding}{slots}>"

    def _repr_html_(self) -> str:
        count = min(5, self.schema.num_rows) if self.schema.keys == "dense" else 0
        first = self.read(0, count) if count else ()
        rows = [(row, np.array2string(values, precision=4, threshold=8)) for row, values in enumerate(first)]
        return html_table(repr(self), ("row_id", "values"), rows)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Give the table to DuckDB, polars, pandas or pyarrow (`cnr_store.read.arrow_stream`); rows are read as asked.

        Raises
        ------
        Unsupported
            A slot with one value per row is stored per column range (`read_rectangle`).
        """
        from cnr_store.read.arrow_stream import table_stream

        return table_stream(self).__arrow_c_stream__(requested_schema)

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, dim)."""
        return self.schema.num_rows, self.schema.dim

    @property
    def column_cuts(self) -> tuple[tuple[int, int], ...]:
        """The column ranges that the table's present life is stored in, (start, stop) each, in order."""
        return self._plan(0, None).stored

    def check_stored(self, consent: str, *, slots: bool = False) -> None:
        """Refuse a whole table of which far more rows are declared than stored; see `plan.check_stored`. No I/O.

        Raises
        ------
        BadInput
        """
        row_bytes = sum(spec.row_bytes for name, spec in self._specs.items() if slots or name == "codes")
        size_bytes = self.schema.num_rows * row_bytes
        if size_bytes > UNCONFIRMED_BYTES:
            check_stored(self._plan(0, None), size_bytes, consent)

    def read(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        slot: str | None = None,
        out: Array | None = None,
        slots_rule: Literal["exact", "mean"] = "exact",
    ) -> Array:
        """Return rows [start, stop) of the values as (rows, dim), or of a slot as (rows,) or (rows, dim).

        They are in the stored dtype, in ``out`` if given. `read_rectangle` reads values and slots in one pass.

        Raises
        ------
        TableNotFound, BadInput, BadShape, BadDtype, CorruptStore
        Unsupported
            The slot is stored per column range; see `read_rectangle`.
        """
        name = "codes" if slot is None else self._slot_array(slot)
        outputs = self._outputs(start, stop, {name: out})
        read_range(self._snapshot.readers, self._plan(start, stop), outputs, self._snapshot.workers, slots_rule)
        return self._shaped(name, outputs[name]) if out is None else out

    def read_rectangle(
        self,
        rectangle: Rectangle | None = None,
        *,
        values: Array | None = None,
        slots: Mapping[str, Array | None] | None = None,
        slots_rule: SlotsRule = "exact",
    ) -> dict[str, Array]:
        """Read a rectangle in one pass over the chain; reads only chunks of parts that meet it.

        Parameters
        ----------
        rectangle
            Rows and columns, inside the table; None is all of it. When whole parts and every slot are read, the state
            digest is checked too.
        values
            (rows, columns) of the rectangle, filled in place; any strides, so columns of a larger array will do. Left
            out together with ``slots``, the values are allocated.
        slots
            Slot name to (rows,) or (rows, columns), filled in place; None allocates.
        slots_rule
            For one-dimensional slots where the columns are no stored range (`column_cuts`): ``exact`` refuses,
            ``mean`` averages the ranges met by the width of the overlap (for a row-wise Adagrad that is the exact
            state of the row as a whole), ``drop`` leaves the output as it is.

        Returns
        -------
        dict
            What was read: ``values`` and slots by name. Dropped slots are not in it.

        Raises
        ------
        BadInput, BadShape, BadDtype, TableNotFound
        Unsupported
            One-dimensional slots of such columns are not stored, and the rule is ``exact``.
        CorruptStore
            The outputs are then undefined.
        """
        given: dict[str, Array | None] = {self._slot_array(slot): out for slot, out in (slots or {}).items()}
        if values is not None or slots is None:
            given["codes"] = values
        place = rectangle or whole_of(self.schema)
        outputs = self._outputs(*place.rows, given, place.columns)
        plan = self._plan(*place.rows, place.columns)
        filled = read_range(self._snapshot.readers, plan, outputs, self._snapshot.workers, slots_rule)

        def result(name: str) -> Array:
            out = given[name]
            return self._shaped(name, outputs[name]) if out is None else out

        return {"values" if name == "codes" else name.removeprefix("slots/"): result(name) for name in filled}

    def read_rows(
        self,
        row_ids: RowIds | Sequence[int],
        *,
        slot: str | None = None,
        slots_rule: Literal["exact", "mean"] = "exact",
        missing: npt.NDArray[np.bool_] | None = None,
    ) -> Array:
        """Return the given rows, (len(row_ids), dim): any order, repeats allowed; reads only chunks that hold one.

        Of a hashed table the ids are keys, and the chunks those whose range of keys holds one. With a cache given to
        the snapshot, a chunk is read and decoded once.

        Parameters
        ----------
        missing
            bool (len(row_ids),), filled: True where a hashed table has no such key; the row is then the table's fill.
            Without it such a key is an error. A dense table has every row in its range, so all become False.

        Raises
        ------
        BadRowIds
            Ids that are no integers, or outside a dense table; or keys that a hashed table does not have.
        """
        name = "codes" if slot is None else self._slot_array(slot)
        given = np.asarray(row_ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise BadRowIds(
                f"row ids of table {self.name!r} must be integers in one dimension, found {given.dtype} of shape "
                f"{given.shape}",
                table=self.name, expected="int64 (n,)", found=f"{given.dtype} {given.shape}",
            )  # fmt: skip
        if missing is not None and (missing.shape != given.shape or missing.dtype != np.bool_):
            raise BadShape(
                f"missing must be bool of shape {given.shape}, found {missing.dtype} of shape {missing.shape}",
                table=self.name, expected=given.shape, found=missing.shape,
            )  # fmt: skip
        unique, inverse = np.unique(given.astype(np.int64, copy=False), return_inverse=True)
        inverse = inverse.reshape(-1)
        if self.schema.keys == "hashed":
            values, absent = self._read_keys(unique, name)
        else:
            check_row_ids(unique, self.schema.num_rows, table=self.name)
            values, absent = np.empty((len(unique), self._specs[name].width), carrier(self._specs[name].dtype)), None
            plan = self._snapshot.plan(self.name, rows=unique)
            workers = self._snapshot.workers
            read_rows(self._snapshot.lookup_readers, plan, unique, {name: values}, workers, slots_rule)
        if missing is not None:
            missing[...] = False if absent is None else absent[inverse]
        elif absent is not None and absent.any():
            key = int(unique[np.argmax(absent)])
            raise BadRowIds(
                f"table {self.name!r} has no key {key} at version {self._snapshot.version}, nor {absent.sum() - 1} "
                "more of the given keys; pass missing= to get a mask of them",
                table=self.name, version=self._snapshot.version, found=key,
            )  # fmt: skip
        return self._shaped(name, values[inverse])

    def _read_keys(self, unique: RowIds, name: str) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Return the values of the keys (sorted, unique) of a hashed table, and which of them it does not have."""
        plan = self._snapshot.plan(self.name, rows=unique)
        readers, workers = self._snapshot.lookup_readers, self._snapshot.workers
        keys, arrays = read_keyed(readers, plan, [name], workers, unique)
        spec = self._specs[name]
        values = np.full((len(unique), spec.width), fill_value(spec), carrier(spec.dtype))
        at, found = matching(unique, keys)
        values[at] = arrays[name][found]
        absent = np.ones(len(unique), np.bool_)
        absent[at] = False
        return values, absent

    def changed_rows(self) -> RowIds:
        """Return the rows that the deltas of the chain hold: sorted, unique. Reads row ids only, no values."""
        return rows_since(self._snapshot.readers, self.name, self.schema)

    def read_all(self, *, slots: bool = False, share: KeyShare | None = None) -> tuple[RowIds, dict[str, Array]]:
        """Return a hashed table: its sorted keys, and ``values`` plus each slot by name.

        ``share``: only the keys of one rank (`Writer.keys`). Memory: the rows asked for, twice.
        """
        if self.schema.keys != "hashed":
            raise BadInput(f"table {self.name!r} has dense rows; use read()", table=self.name)
        names = list(self._specs) if slots else ["codes"]
        holds = None if share is None else share.holds
        plan, workers = self._plan(0, None), self._snapshot.workers
        keys, arrays = read_keyed(self._snapshot.readers, plan, names, workers, holds=holds)
        renamed = {
            "values" if n == "codes" else n.removeprefix("slots/"): self._shaped(n, a) for n, a in arrays.items()
        }
        return keys, renamed

    def check_outputs(self, outputs: Mapping[str, Array], rectangle: Rectangle | None = None) -> dict[str, Array]:
        """Return preallocated arrays of a rectangle (of all rows if None), by array name, if a read could fill them.

        Raises
        ------
        TableNotFound, BadShape, BadDtype, BadInput
        """
        for name in outputs:
            if name != "codes":
                self._slot_array(name.removeprefix("slots/"))
        place = rectangle or whole_of(self.schema)
        self._outputs(*place.rows, dict(outputs), place.columns)
        return dict(outputs)

    def load(
        self,
        outputs: Mapping[str, Array],
        rectangle: Rectangle | None = None,
        slots_rule: SlotsRule = "exact",
        *,
        allocate: Allocate | None = None,
    ) -> TableCodes | None:
        """Fill the arrays of a rectangle (the whole table if None) in one pass; return its codes for a writer's mirror.

        None, with ``outputs`` filled all the same, without ``allocate``, and where no difference can be taken: a row is
        escaped or absent in some columns of the rectangle only, or one-dimensional slots were averaged or dropped.

        Parameters
        ----------
        outputs
            ``codes`` and ``slots/<name>`` to preallocated arrays of the rectangle, any of them; as `read_rectangle`.
        allocate
            Where the mirror's memory comes from: (shape, dtype) to an array.

        Raises
        ------
        BadInput, BadShape, BadDtype, Unsupported, CorruptStore
            As `read_rectangle`; Unsupported for a mirror also where slots are not read, because it holds every slot.
        """
        place = rectangle or whole_of(self.schema)
        prepared = self._outputs(*place.rows, dict(outputs), place.columns)
        plan = self._plan(*place.rows, place.columns)
        readers, workers = self._snapshot.readers, self._snapshot.workers
        if allocate is not None:
            return read_mirror(readers, plan, prepared, workers, allocate, slots_rule)
        read_range(readers, plan, prepared, workers, slots_rule)
        return None

    def _plan(self, start: int, stop: int | None, columns: tuple[int, int] | None = None) -> TablePlan:
        return self._snapshot.plan(self.name, start, stop, columns=columns)

    def _slot_array(self, slot: str) -> str:
        if slot not in self.schema.slots:
            raise TableNotFound(
                f"table {self.name!r} has no slot {slot!r}; it has {sorted(self.schema.slots)}", table=self.name
            )
        return f"slots/{slot}"

    def _outputs(
        self,
        start: int,
        stop: int | None,
        given: Mapping[str, Array | None],
        columns: tuple[int, int] | None = None,
    ) -> dict[str, Array]:
        """Check or allocate outputs and present each as (rows, width)."""
        self._refuse_hashed("read")
        stop = self.schema.num_rows if stop is None else stop
        if not 0 <= start <= stop <= self.schema.num_rows:
            raise BadInput(
                f"rows [{start}, {stop}) are outside table {self.name!r} of {self.schema.num_rows} rows",
                table=self.name,
            )
        low, high = columns or (0, self.schema.dim)
        if not 0 <= low < high <= self.schema.dim:
            raise BadInput(
                f"columns [{low}, {high}) are outside table {self.name!r} of {self.schema.dim} columns, or none",
                table=self.name,
            )
        specs = self._specs if columns is None else array_specs(self.schema, columns)
        row_bytes = sum(specs[name].row_bytes for name, out in given.items() if out is None)
        if (stop - start) * row_bytes > UNCONFIRMED_BYTES:
            check_stored(self._plan(start, stop, columns), (stop - start) * row_bytes, "give the memory (out=)")
        return {name: self._output(specs[name], stop - start, out) for name, out in given.items()}

    def _output(self, spec: ArraySpec, rows: int, out: Array | None) -> Array:
        if out is None:
            return np.empty((rows, spec.width), carrier(spec.dtype))
        expected = (rows,) if spec.is_vector else (rows, spec.width)
        if out.shape != expected and out.shape != (rows, spec.width):
            raise BadShape(
                f"{spec.name} of table {self.name!r} needs an array of shape {expected}, found {out.shape}",
                table=self.name, expected=expected, found=out.shape,
            )  # fmt: skip
        if out.dtype != carrier(spec.dtype):
            raise BadDtype(
                f"{spec.name} of table {self.name!r} is {spec.dtype}, kept as {carrier(spec.dtype)}, found {out.dtype}",
                table=self.name, expected=str(carrier(spec.dtype)), found=str(out.dtype),
            )  # fmt: skip
        return out.reshape(rows, spec.width) if out.ndim == 1 else out

    def _shaped(self, name: str, array: Array) -> Array:
        return array.reshape(-1) if self._specs[name].is_vector else array

    def _refuse_hashed(self, verb: str) -> None:
        if self.schema.keys == "hashed":
            raise BadInput(f"table {self.name!r} has hashed keys; use read_all() instead of {verb}()", table=self.name)
