"""One table of a committed state, read-only: rows, slots, rectangles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.widths import carrier
from cnr_store.errors import BadDtype, BadInput, BadRowIds, BadShape, TableNotFound
from cnr_store.format.records import TableSchema
from cnr_store.read.changed_rows import rows_since
from cnr_store.read.plan import UNCONFIRMED_BYTES, TablePlan, check_stored
from cnr_store.read.replay import matching
from cnr_store.read.table_reader import read_keyed, read_mirror, read_range, read_rows
from cnr_store.runtime.closing import ProcessBound
from cnr_store.runtime.notebook import html_table
from cnr_store.segment.codes import Allocate, Array, ArraySpec, TableCodes, array_specs, fill_value
from cnr_store.segment.rows import check_row_ids
from cnr_store.segment.shards import KeyShare, whole_of
from cnr_store.types import Rectangle, RowIds, SlotsRule

if TYPE_CHECKING:
    from cnr_store.read.snapshot import Snapshot


class TableView(ProcessBound):
    """One table of a snapshot. Reads block; bfloat16 values are uint16 arrays of their bits.

    A table whose columns several writers held has its one-dimensional slots once per column range (`column_cuts`). Read
    at other columns, the whole table for one, such a slot is `Unsupported` unless a ``slots_rule`` is given: ``mean``
    of the ranges that are met, weighted by their columns in the read, or ``drop``, which leaves the output as it is.
    """

    def __init__(self, snapshot: Snapshot, name: str, schema: TableSchema) -> None:
        self.name = name
        self.schema = schema
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
            key, more = int(unique[np.argmax(absent)]), int(absent.sum()) - 1
            others = f", nor {more} more of the given keys" * (more > 0)
            raise BadRowIds(
                f"table {self.name!r} has no key {key} at version {self._snapshot.version}{others}; pass missing= to "
                "get a mask of them",
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
        """Return a hashed table: its sorted keys (n,) int64, and ``values`` (n, dim) plus each slot by name. Blocks.

        ``share``: only the keys of one rank (`Writer.keys`). Memory: the rows asked for, twice.

        Raises
        ------
        BadInput
            The table has dense rows.
        CorruptStore, StorageFailure
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
        """Return preallocated arrays of a rectangle (of all rows if None) as (rows, width), if a read could fill them.

        Raises
        ------
        TableNotFound, BadShape, BadDtype, BadInput
        """
        for name in outputs:
            if name != "codes":
                self._slot_array(name.removeprefix("slots/"))
        place = rectangle or whole_of(self.schema)
        return self._outputs(*place.rows, dict(outputs), place.columns)

    def allocated(self) -> Array:
        """Return new memory for all values of the table, unless it is far sparser than it says. No I/O.

        Raises
        ------
        BadInput
        """
        return self._outputs(0, None, {"codes": None})["codes"]

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
        if self.schema.keys == "hashed":
            raise BadInput(f"table {self.name!r} has hashed keys; use read_all() instead of read()", table=self.name)
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
        found = {name: self._output(specs[name], stop - start, out) for name, out in given.items()}
        self._refuse_overlaps([out for name, out in found.items() if given[name] is not None])
        return found

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
                f"the array for {spec.name} of table {self.name!r} must be {carrier(spec.dtype)}, found {out.dtype}",
                table=self.name, expected=str(carrier(spec.dtype)), found=str(out.dtype),
            )  # fmt: skip
        if not out.flags.writeable:  # kernels write by address, which nothing would stop
            raise BadInput(f"the array for {spec.name} of table {self.name!r} is read-only", table=self.name)
        return out.reshape(rows, spec.width) if out.ndim == 1 else out

    def _refuse_overlaps(self, outputs: Sequence[Array]) -> None:
        """Elements that share memory would overwrite each other, and not every read has a digest that would show it."""
        for index, out in enumerate(outputs):
            if _has_overlaps(out) or any(np.shares_memory(out, other) for other in outputs[:index]):
                raise BadInput(f"the arrays given for table {self.name!r} overlap in memory", table=self.name)

    def _shaped(self, name: str, array: Array) -> Array:
        return array.reshape(-1) if self._specs[name].is_vector else array


def _has_overlaps(array: Array) -> bool:
    """Return whether elements of an array may be in one place: never of a slice or a transpose of plain memory."""
    end = array.itemsize
    for step, count in sorted((abs(step), count) for step, count in zip(array.strides, array.shape, strict=True)):
        if count > 1 and step < end:
            return array.size > 0
        end += step * (count - 1)
    return False
