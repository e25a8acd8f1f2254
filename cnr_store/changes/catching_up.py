"""Updates a consumer's own copy to the newest version by comparing all of it, after its cursor expired.

Copy and snapshot are read window by window and compared bit by bit. Only rows that differ are reported.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cnr_store.changes.arrow import RowBlock, change_batches
from cnr_store.changes.cursor import ChangeCursor
from cnr_store.changes.differences import Nothing, compared_rows
from cnr_store.changes.stream import MAX_BATCH_ROWS
from cnr_store.changes.table_rows import Span, TableRows, rows_of
from cnr_store.encodings.widths import as_columns
from cnr_store.errors import BadInput, BadShape, VersionExpired
from cnr_store.format.records import TableSchema
from cnr_store.read.changed_rows import Window
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.arguments import checked_count
from cnr_store.runtime.threads import blocks
from cnr_store.store import Store
from cnr_store.types import Raw, RowIds

Array = npt.NDArray[Any]
CopyArrays = Array | Mapping[str, Array]
"""Values (rows, dim), or ``values`` and slots by name."""

CopyRows = CopyArrays | Callable[[int, int], CopyArrays]
"""A dense table: its arrays, or a function that returns rows [start, stop); fewer at the end of the copy."""

CopyKeys = tuple[Array, CopyArrays] | Callable[[int, int], tuple[Array, CopyArrays]]
"""A hashed table: keys and arrays, or a function that returns those from a first to a last key, inclusive."""

ConsumerTable = CopyRows | CopyKeys

_PIECE_ROWS = 65_536
_TRIES = 5
_MOST_ROWS = 1 << 48


def catch_up(
    store: Store,
    copies: Mapping[str, ConsumerTable],
    *,
    tables: Collection[str] | None = None,
    cursor: str | None = None,
    ttl_s: float | None = None,
    max_batch_rows: int = MAX_BATCH_ROWS,
) -> CatchUp:
    """Return the rows in which the newest version differs from a consumer's copy, in the batches of `changes`.

    Use it after `CursorExpired`: apply the batches to the copy, then continue with a stream from ``.cursor``. The copy
    is then equal to the snapshot bit by bit. Reads every row of the snapshot, and asks for every row of the copy.

    Parameters
    ----------
    store
        The store, or a branch of it.
    copies
        The consumer's copy by table. Dense tables: an array (rows, dim), or a function of (start, stop) that returns
        those rows, or fewer at the end of the copy. Hashed tables: (keys, array), or a function of (first, last),
        inclusive, that returns both. bfloat16 as float32 or as its bits (uint16). Instead of an array, a mapping of
        ``values`` and slots by name; then slots are compared and reported too. All rows are reported of a table without
        a copy.
    tables
        The tables to compare; None is all tables of the snapshot and of ``copies``.
    cursor, ttl_s
        The cursor to register in the store before anything is read, as for `changes`.
    max_batch_rows
        Maximum number of rows in a batch.

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
    checked_count("max_batch_rows", max_batch_rows, least=1)
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
    names = sorted({*copies, *snapshot.tables} if tables is None else tables)
    return CatchUp(snapshot, copies, names, ChangeCursor.at(store, snapshot.version), max_batch_rows)


class CatchUp:
    """An iterator of record batches; see `catch_up`.

    Attributes
    ----------
    version
        The version that the copy is compared with.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        copies: Mapping[str, ConsumerTable],
        tables: Sequence[str],
        end: ChangeCursor,
        max_batch_rows: int,
    ) -> None:
        self.version = snapshot.version
        self._end = end
        self._is_done = False
        self._batches = self._compare(snapshot, copies, tables, max_batch_rows)

    @property
    def cursor(self) -> ChangeCursor | None:
        """The position from which `changes` continues; None until every batch was taken."""
        return self._end if self._is_done else None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        """Return the next batch.

        Raises
        ------
        VersionExpired
            The version expired while it was read: call `catch_up` again. A registered cursor prevents this.
        BadShape, BadInput, CorruptStore, StorageFailure
        """
        return next(self._batches)

    def _compare(
        self, snapshot: Snapshot, copies: Mapping[str, ConsumerTable], tables: Sequence[str], max_batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        for table in tables:
            copy = _ConsumerCopy(table, copies[table]) if table in copies else None
            schema = snapshot.tables.get(table)
            after: TableRows | Nothing = Nothing()
            names: list[str] = []
            if schema is not None:
                known = {"codes"} if copy is None else copy.names
                names = ["codes", *(f"slots/{slot}" for slot in sorted(schema.slots) if f"slots/{slot}" in known)]
                after = TableRows(snapshot, table, names)
            elif copy is not None:
                schema = copy.schema
            else:
                continue
            if copy is not None:
                copy.compared = tuple(names) if copy.names >= set(names) else ()
            slots = [name.removeprefix("slots/") for name in names[1:]]
            for block in compared_rows(copy or Nothing(), after):
                yield from change_batches(table, schema, slots, block, snapshot.version, snapshot.step, max_batch_rows)
        self._is_done = True


class _ConsumerCopy:
    """A consumer's copy of one table, in any of the forms that `catch_up` takes; a `Copy`.

    Attributes
    ----------
    names
        The arrays that it has: ``codes``, ``slots/<name>``.
    compared
        Those that are compared; without any, every row differs.
    schema
        A schema for rows that only the copy has: they are reported as deleted.
    """

    def __init__(self, table: str, given: ConsumerTable) -> None:
        self._table = table
        sample: Any = given(0, 0) if callable(given) else given
        self._is_hashed = isinstance(sample, tuple)
        self._read: Callable[[int, int], Any] | None = given if callable(given) else None
        if self._is_hashed:
            self._keys, self._arrays = _keys_and_arrays(table, *sample)
        else:
            self._keys, self._arrays = np.empty(0, np.int64), _arrays_of(table, sample, None)
        self.names = frozenset(self._arrays)
        self.compared: tuple[str, ...] = ()
        self.schema = TableSchema(
            num_rows=0, dim=self._arrays["codes"].shape[1], dtype="float32",
            keys="hashed" if self._is_hashed else "dense", encoding=Raw(),
        )  # fmt: skip
        self._size = len(self._arrays["codes"]) if self._read is None else 0
        if self._read is not None and not self._is_hashed:
            self._size = self._find_size(self._read)

    def spans(self) -> list[Span]:
        """See `Copy`."""
        keys = self._keys if self._is_hashed else range(self._size)
        pieces = blocks(len(keys) if self._read is None or not self._is_hashed else 0, _PIECE_ROWS)
        return [(int(keys[low]), int(keys[high - 1]), high - low) for low, high in pieces]

    def read_window(self, window: Window) -> RowBlock:
        """See `Copy`."""
        first, last = window
        if not self._is_hashed:
            start, stop = rows_of(window, self._size)
            rows, cut, arrays = np.arange(start, stop, dtype=np.int64), slice(start, stop), self._arrays
            if self._read is not None:
                cut, arrays = slice(None), _arrays_of(self._table, self._read(start, stop), stop - start)
        elif self._read is not None:
            rows, arrays = _keys_and_arrays(self._table, *self._read(first, last))
            cut = slice(None)
        else:
            cut = slice(int(np.searchsorted(self._keys, first)), int(np.searchsorted(self._keys, last, side="right")))
            rows, arrays = self._keys[cut], self._arrays
        return RowBlock(rows, {name: arrays[name][cut] for name in self.compared})

    def _find_size(self, rows: Callable[[int, int], Any]) -> int:
        """The number of rows of a dense copy on demand, by asking for single rows."""

        def has(row: int) -> bool:
            return len(_arrays_of(self._table, rows(row, row + 1), None)["codes"]) > 0

        high = 1 if has(0) else 0
        while has(high):
            high *= 2
            if high > _MOST_ROWS:
                raise BadInput(
                    f"the copy of table {self._table!r} has no end: its function returns row {high // 2}; let it "
                    "return fewer rows than it is asked for where the copy ends",
                    table=self._table, found=high // 2,
                )  # fmt: skip
        between = range(high // 2 + 1, high)
        return high and between.start + bisect.bisect_left(between, True, key=lambda row: not has(row))


def _keys_and_arrays(table: str, keys: Array, given: CopyArrays) -> tuple[RowIds, dict[str, Array]]:
    """The keys in ascending order, and the arrays of their rows by name."""
    keys = np.asarray(keys)
    if keys.ndim != 1 or (keys.dtype.kind not in "iu" and len(keys)):
        raise BadInput(
            f"the copy of table {table!r} has keys of dtype {keys.dtype} and shape {keys.shape}; they are integers in "
            "one dimension",
            table=table, found=str(keys.dtype),
        )  # fmt: skip
    keys = keys.astype(np.int64)
    arrays = _arrays_of(table, given, len(keys))
    if np.all(keys[1:] > keys[:-1]):
        return keys, arrays
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    if np.any(keys[1:] == keys[:-1]):
        raise BadInput(f"the copy of table {table!r} has a key twice", table=table)
    return keys, {name: array[order] for name, array in arrays.items()}


def _arrays_of(table: str, given: CopyArrays, rows: int | None) -> dict[str, Array]:
    """The arrays by name, each (rows, width)."""
    named = given if isinstance(given, Mapping) else {"values": given}
    if "values" not in named:
        raise BadInput(f"the copy of table {table!r} has no 'values'; it has {sorted(named)}", table=table)
    arrays = {
        "codes" if name == "values" else f"slots/{name}": as_columns(np.asarray(array)) for name, array in named.items()
    }
    rows = arrays["codes"].shape[0] if rows is None and arrays["codes"].ndim else rows
    for name, array in arrays.items():
        if array.ndim != 2 or len(array) != rows:
            raise BadShape(
                f"the copy of table {table!r} has {name} of shape {array.shape}, expected {rows} rows",
                table=table, expected=rows, found=array.shape,
            )  # fmt: skip
    return arrays
