"""A consumer's own copy brought to the newest version by comparing all of it: where a cursor has expired.

Both are read window by window and compared by their bits, so only rows that differ are told, and the copy is then what
the snapshot is, whatever it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cnr_store.changes.arrow import RowBlock, change_batches
from cnr_store.changes.cursor import ChangeCursor
from cnr_store.changes.differences import Copy, Nothing, compared_rows
from cnr_store.changes.stream import MAX_BATCH_ROWS
from cnr_store.changes.table_rows import Span, TableRows, Window, rows_of
from cnr_store.encodings.widths import as_columns, to_float32
from cnr_store.errors import BadInput, BadShape, VersionExpired
from cnr_store.format.records import TableSchema
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.threads import blocks
from cnr_store.segment.codes import array_specs
from cnr_store.store import Store
from cnr_store.types import Raw, RowIds

Array = npt.NDArray[Any]
HeldArrays = Array | Mapping[str, Array]
"""Values (rows, dim), or ``values`` and slots by name."""

HeldRows = HeldArrays | Callable[[int, int], HeldArrays]
"""A dense table: its arrays, or rows [start, stop) of them on demand; fewer where the copy ends before."""

HeldKeys = tuple[Array, HeldArrays] | Callable[[int, int], tuple[Array, HeldArrays]]
"""A hashed table: keys and arrays, or those of the keys from a first to a last, inclusive, on demand."""

ConsumerTable = HeldRows | HeldKeys

_PIECE_ROWS = 65_536
_TRIES = 5
_MOST_ROWS = 1 << 48


def catch_up(
    store: Store,
    held: Mapping[str, ConsumerTable],
    *,
    tables: Collection[str] | None = None,
    cursor: str | None = None,
    ttl_s: float | None = None,
    max_batch_rows: int = MAX_BATCH_ROWS,
) -> CatchUp:
    """Return the rows in which the newest version differs from a consumer's copy, as `changes` would tell them.

    What to do after `CursorExpired`: apply the batches to the copy, and go on with a stream behind ``.cursor``. Exact,
    bit for bit, whatever the copy holds; reads every row of the snapshot, and asks for every row of the copy.

    Parameters
    ----------
    store
        The store, or a branch of it.
    held
        Table to what the consumer has of it. Dense tables: an array (rows, dim), or a function of (start, stop) that
        returns those rows, or fewer where the copy ends. Hashed tables: (keys, array), or a function of (first, last),
        inclusive, that returns both. bfloat16 as float32 or as its bits (uint16). Instead of an array a mapping of
        ``values`` and slots by name, which then are compared and told too. A table that is not here is told whole.
    tables
        Those to look at; None is all that the snapshot has, and all of ``held``.
    cursor, ttl_s
        The name to register in the store, as for `changes`; before anything is read.
    max_batch_rows
        Most rows in a batch.

    Raises
    ------
    BadInput, AccessDenied, StorageFailure, CorruptStore

    Examples
    --------
    >>> store = Store.create("memory://doctest-catch-up")
    >>> with store.writer() as writer, writer.begin(step=10) as txn:
    ...     txn.write_table("user", np.array([[1.0], [2.0], [3.0]], np.float32))
    >>> differences = catch_up(store, {"user": np.array([[1.0], [5.0]], np.float32)})
    >>> [batch["row_id"].to_pylist() for batch in differences], differences.cursor.version
    ([[1, 2]], 2)
    """
    if not isinstance(store, Store):
        raise BadInput(f"catch_up() takes an open store, found {store!r}; give Store.open(url)", found=str(store))
    if max_batch_rows < 1:
        raise BadInput(f"max_batch_rows is {max_batch_rows}; give 1 or more", found=max_batch_rows)
    for _ in range(_TRIES - 1):
        snapshot = store.snapshot()
        if cursor is None:
            break
        try:
            store.register_cursor(cursor, snapshot.version, ttl_s=ttl_s)
            break
        except VersionExpired:
            continue  # between two requests
    else:
        snapshot = store.snapshot()
        store.register_cursor(cursor or "", snapshot.version, ttl_s=ttl_s)
    names = sorted({*held, *snapshot.tables} if tables is None else tables)
    return CatchUp(snapshot, held, names, ChangeCursor.at(store, snapshot.version), max_batch_rows)


class CatchUp:
    """An iterator of record batches; see `catch_up`.

    Attributes
    ----------
    version
        What the copy is compared with.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        held: Mapping[str, ConsumerTable],
        tables: Sequence[str],
        end: ChangeCursor,
        max_batch_rows: int,
    ) -> None:
        self.version = snapshot.version
        self._end = end
        self._is_done = False
        self._batches = self._compare(snapshot, held, tables, max_batch_rows)

    @property
    def cursor(self) -> ChangeCursor | None:
        """Where `changes` goes on, once every batch was taken; None before."""
        return self._end if self._is_done else None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        """Return the next batch.

        Raises
        ------
        VersionExpired
            The version expired while it was read: catch up again. A registered cursor prevents it.
        BadShape, BadInput, CorruptStore, StorageFailure
        """
        return next(self._batches)

    def _compare(
        self, snapshot: Snapshot, held: Mapping[str, ConsumerTable], tables: Sequence[str], max_batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        for table in tables:
            copy = _copy_of(table, held.get(table))
            schema = snapshot.tables.get(table)
            after: _Widened | Nothing = Nothing()
            names: list[str] = []
            if schema is None:
                schema = _schema_of_nothing(copy)
            else:
                names = ["codes", *(f"slots/{slot}" for slot in sorted(schema.slots) if f"slots/{slot}" in copy.names)]
                after = _Widened(TableRows(snapshot, table, names))
            slots = [name.removeprefix("slots/") for name in names[1:]]
            for block in compared_rows(copy.of(names), after):
                yield from change_batches(table, schema, slots, block, snapshot.version, snapshot.step, max_batch_rows)
        self._is_done = True


class _Widened:
    """Rows of a table with bfloat16 as float32: the copy may hold either."""

    def __init__(self, rows: TableRows) -> None:
        self._rows = rows
        self._dtypes = {name: spec.dtype for name, spec in array_specs(rows.schema).items()}

    def spans(self) -> list[Span]:
        """See `Copy`."""
        return self._rows.spans()

    def read_window(self, window: Window) -> RowBlock:
        """See `Copy`."""
        block = self._rows.read_window(window)
        arrays = {
            name: to_float32(array, "bfloat16") if self._dtypes[name] == "bfloat16" else array
            for name, array in block.arrays.items()
        }
        return RowBlock(block.rows, arrays, block.is_present)


@dataclass(frozen=True, slots=True)
class _ReadableCopy:
    """What a consumer holds of one table, whichever way it was given.

    Attributes
    ----------
    names
        The arrays that there are: ``codes``, ``slots/<name>``.
    dim
        Columns of the values.
    is_hashed
        Whether rows are found by key rather than by position.
    pieces
        Where its rows are.
    read
        First and last row, inclusive, to the rows and their arrays.
    """

    names: frozenset[str]
    dim: int
    is_hashed: bool
    pieces: tuple[Span, ...]
    read: Callable[[int, int], tuple[RowIds, dict[str, Array]]]

    def of(self, names: Sequence[str]) -> Copy:
        """Return the copy as it is compared: these arrays, or the rows alone where one of them is not held."""
        return _HeldCopy(self, tuple(names) if self.names >= set(names) else ())


@dataclass(frozen=True, slots=True)
class _HeldCopy:
    held: _ReadableCopy
    names: tuple[str, ...]

    def spans(self) -> list[Span]:
        """See `Copy`."""
        return list(self.held.pieces)

    def read_window(self, window: Window) -> RowBlock:
        """See `Copy`."""
        rows, arrays = self.held.read(*window)
        return RowBlock(rows, {name: arrays[name] for name in self.names})


def _copy_of(table: str, held: ConsumerTable | None) -> _ReadableCopy:
    if held is None:
        nothing = np.empty(0, np.int64)
        return _ReadableCopy(frozenset(), 1, False, (), lambda _first, _last: (nothing, {}))
    if callable(held):
        sample = held(0, 0)
        if isinstance(sample, tuple):
            return _keys_on_demand(table, held, sample)
        return _rows_on_demand(table, held, sample)
    return _keys_at_hand(table, *held) if isinstance(held, tuple) else _rows_at_hand(table, held)


def _rows_at_hand(table: str, given: HeldArrays) -> _ReadableCopy:
    arrays = _arrays_of(table, given, None)
    size = len(arrays["codes"])

    def read(first: int, last: int) -> tuple[RowIds, dict[str, Array]]:
        start, stop = rows_of((first, last), size)
        return np.arange(start, stop, dtype=np.int64), _cut(arrays, slice(start, stop))

    return _ReadableCopy(frozenset(arrays), arrays["codes"].shape[1], False, _pieces(size), read)


def _rows_on_demand(table: str, held: Callable[[int, int], Any], sample: HeldArrays) -> _ReadableCopy:
    arrays = _arrays_of(table, sample, None)

    def has(row: int) -> bool:
        return len(_arrays_of(table, held(row, row + 1), None)["codes"]) > 0

    size = _size(table, has)

    def read(first: int, last: int) -> tuple[RowIds, dict[str, Array]]:
        start, stop = rows_of((first, last), size)
        return np.arange(start, stop, dtype=np.int64), _arrays_of(table, held(start, stop), stop - start)

    return _ReadableCopy(frozenset(arrays), arrays["codes"].shape[1], False, _pieces(size), read)


def _keys_at_hand(table: str, keys: Array, given: HeldArrays) -> _ReadableCopy:
    keys = np.asarray(keys)
    if keys.ndim != 1 or (keys.dtype.kind not in "iu" and len(keys)):
        raise BadInput(
            f"the copy of table {table!r} has keys of dtype {keys.dtype} and shape {keys.shape}; they are integers in "
            "one dimension",
            table=table, found=str(keys.dtype),
        )  # fmt: skip
    keys = keys.astype(np.int64)
    arrays = _arrays_of(table, given, len(keys))
    order = np.argsort(keys, kind="stable")
    rows = keys[order]
    if np.any(rows[1:] == rows[:-1]):
        raise BadInput(f"the copy of table {table!r} has a key twice", table=table)
    pieces = [(int(rows[low]), int(rows[high - 1]), high - low) for low, high in blocks(len(rows), _PIECE_ROWS)]

    def read(first: int, last: int) -> tuple[RowIds, dict[str, Array]]:
        low, high = np.searchsorted(rows, first, side="left"), np.searchsorted(rows, last, side="right")
        return rows[low:high], _cut(arrays, order[low:high])

    return _ReadableCopy(frozenset(arrays), arrays["codes"].shape[1], True, tuple(pieces), read)


def _keys_on_demand(table: str, held: Callable[[int, int], Any], sample: tuple[Array, HeldArrays]) -> _ReadableCopy:
    arrays = _arrays_of(table, sample[1], len(sample[0]))

    def read(first: int, last: int) -> tuple[RowIds, dict[str, Array]]:
        found = _keys_at_hand(table, *held(first, last))
        return found.read(first, last)

    return _ReadableCopy(frozenset(arrays), arrays["codes"].shape[1], True, (), read)


def _arrays_of(table: str, given: HeldArrays, rows: int | None) -> dict[str, Array]:
    """The arrays by their names in the store, each (rows, width)."""
    named = given if isinstance(given, Mapping) else {"values": given}
    if "values" not in named:
        raise BadInput(f"the copy of table {table!r} has no 'values'; it has {sorted(named)}", table=table)
    arrays = {
        "codes" if name == "values" else f"slots/{name}": _widened(as_columns(np.asarray(array)))
        for name, array in named.items()
    }
    rows = arrays["codes"].shape[0] if rows is None and arrays["codes"].ndim else rows
    for name, array in arrays.items():
        if array.ndim != 2 or len(array) != rows:
            raise BadShape(
                f"the copy of table {table!r} has {name} of shape {array.shape}, expected {rows} rows",
                table=table, expected=rows, found=array.shape,
            )  # fmt: skip
    return arrays


def _widened(array: Array) -> Array:
    return to_float32(array, "bfloat16") if array.dtype == np.uint16 else array


def _cut(arrays: Mapping[str, Array], chosen: Any) -> dict[str, Array]:
    return {name: array[chosen] for name, array in arrays.items()}


def _pieces(size: int) -> tuple[Span, ...]:
    return tuple((start, stop - 1, stop - start) for start, stop in blocks(size, _PIECE_ROWS))


def _size(table: str, has: Callable[[int], bool]) -> int:
    """How many rows there are, where only single ones can be asked for."""
    if not has(0):
        return 0
    high = 1
    while has(high):
        high *= 2
        if high > _MOST_ROWS:
            raise BadInput(
                f"the copy of table {table!r} has no end: its function returns row {high // 2}; let it return fewer "
                "rows than it is asked for where the copy ends",
                table=table, found=high // 2,
            )  # fmt: skip
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if has(middle) else (low, middle)
    return high


def _schema_of_nothing(copy: _ReadableCopy) -> TableSchema:
    """A table that the snapshot does not have: only its rows can be told, as deleted."""
    return TableSchema(
        num_rows=0, dim=copy.dim, dtype="float32", keys="hashed" if copy.is_hashed else "dense", encoding=Raw()
    )
