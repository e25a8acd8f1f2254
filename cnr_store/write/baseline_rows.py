"""Whole tables ready to be written: encoded from live values, or from a mirror with a save's changes laid over it.

Pure computation on threads, no I/O: rows are encoded, or read from the mirror, chunk by chunk while they are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import kernels, packing, widths
from cnr_store.encodings.widths import as_columns
from cnr_store.format.records import TableSchema
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import (
    ABSENT,
    CODED,
    ESCAPED,
    Allocate,
    Array,
    ArraySpec,
    TableCodes,
    array_specs,
)
from cnr_store.segment.groups import Blocks, RowList
from cnr_store.segment.shards import whole_of
from cnr_store.types import MAX_CODE, Affine, Lattice, Rectangle, RowIds
from cnr_store.write.delta_rows import EncodedRows
from cnr_store.write.encode import (
    ENCODE_ROWS,
    EncodedList,
    OnBadRows,
    encode_block,
    escape_list,
    put_escapes,
    refused_rows,
    scan_block,
    stored_shape,
    unencodable,
)

_BAD = kernels.BAD_ROW
_INT16_MAX = 32767


@dataclass(slots=True)
class EncodedTable:
    """A whole table ready to be written: its new mirror (None without one), the chunks of its rows, its digest."""

    schema: TableSchema
    mirror: TableCodes | None
    rows: RowList | None
    escape: EncodedList | None
    digest: int | None


def encode_table(
    table: str,
    schema: TableSchema,
    values: Mapping[str, Any],
    *,
    allocate: Allocate | None,
    on_bad_rows: OnBadRows,
    workers: Workers,
    rectangle: Rectangle | None = None,
) -> EncodedTable:
    """Encode all rows of a dense table, or of a rectangle of it, for a baseline or a new table.

    Parameters
    ----------
    values
        Array name to anything with ``[start:stop]`` giving (rows, width) or (rows,) floats of the rectangle's rows,
        counted from its first; read twice at most.
    allocate
        Memory for the new mirror; None keeps none, and rows are encoded while they are written.

    Raises
    ------
    NonFiniteValues
    """
    scan = scan_table(schema, values, allocate=allocate, workers=workers, rectangle=rectangle)
    mirror, specs, first = scan.mirror, scan.specs, scan.rectangle.rows[0]
    at = scan.bad_rows - first
    if len(at) and on_bad_rows == "refuse":
        raise refused_rows(table, int(scan.bad_rows[0]), len(at))
    coded = None
    if len(at):
        coded = np.setdiff1d(np.arange(scan.rectangle.num_rows, dtype=np.int64), at, assume_unique=True)
    row_list = _table_rows(scan.rectangle, specs, values, mirror, scan.dtypes, coded)
    return EncodedTable(schema, mirror, row_list, scan.escape, None if mirror is None else mirror.digest(workers))


@dataclass(slots=True)
class TableScan:
    """A first pass over a whole table, or a rectangle of it.

    Attributes
    ----------
    mirror
        Its codes, with the rows that have none as escapes; None where none was to be kept.
    bad_rows, escape
        Rows of the table that cannot be encoded, int64 ascending, and their exact form (None without any).
    dtypes
        By array, what stores its codes.
    """

    rectangle: Rectangle
    specs: Mapping[str, ArraySpec]
    mirror: TableCodes | None
    bad_rows: RowIds
    escape: EncodedList | None
    dtypes: Mapping[str, np.dtype[Any]]


def scan_table(
    schema: TableSchema,
    values: Mapping[str, Any],
    *,
    allocate: Allocate | None,
    workers: Workers,
    rectangle: Rectangle | None = None,
) -> TableScan:
    """Read all rows of a table into a new mirror; parameters as of `encode_table`.

    Rows that the training writes during this pass get any code, or are exact rows, until they are laid over the mirror.
    """
    rectangle = rectangle or whole_of(schema)
    first, stop = rectangle.rows
    specs = array_specs(schema, rectangle.columns)
    flags = np.zeros(rectangle.num_rows, np.uint8)
    mirror = None
    if allocate is not None and specs.are_additive:
        mirror = TableCodes.allocate(
            schema, first, stop, names=tuple(specs), mirror=True, allocate=allocate, columns=rectangle.columns
        )
    dtypes = {name: _scan(spec, values[name], mirror, flags, workers) for name, spec in specs.items()}
    at = np.flatnonzero(flags == _BAD).astype(np.int64)
    bad_rows = at + first
    escape = escape_list(specs, bad_rows, {name: _rows_of(values[name], at) for name in specs}) if len(at) else None
    if mirror is not None and escape is not None:
        mirror.mark(bad_rows, ESCAPED)
        put_escapes(mirror.escapes, escape, mirror.arrays)
    return TableScan(rectangle, specs, mirror, bad_rows, escape, dtypes)


def encode_mirror(schema: TableSchema, mirror: TableCodes, changes: EncodedRows) -> EncodedTable:
    """Return a baseline of the mirror with ``changes`` laid over it, chunk by chunk; the mirror does not move.

    Only for tables whose every array is mirrored.
    """
    status = None if mirror.status is None else mirror.status.copy()
    escapes = type(mirror.escapes)(mirror.escapes.rows, dict(mirror.escapes.values))
    for operation, change in changes.lists.items():
        if operation != "add":
            if status is None and operation != "set":
                status = np.zeros(mirror.num_rows, np.uint8)
            if status is not None:
                status[change.row_ids - mirror.start] = {"set": CODED, "delete": ABSENT, "escape": ESCAPED}[operation]
            escapes.drop(change.row_ids)
        if operation == "escape":
            put_escapes(escapes, change, mirror.arrays)
    coded = None if status is None else np.flatnonzero(status == CODED).astype(np.int64) + mirror.start
    dtypes = {name: _overlaid_dtype(name, mirror, changes) for name in mirror.arrays}
    count = mirror.num_rows if coded is None else len(coded)

    def produce(start: int, stop: int) -> Blocks:
        rows = np.arange(start, stop, dtype=np.int64) + mirror.start if coded is None else coded[start:stop]
        made: Blocks = {"rows": rows}
        for name, held in mirror.arrays.items():
            block = held[rows - mirror.start].astype(np.int32)
            for operation in ("add", "set"):
                if operation in changes.lists:
                    _overlay(block, rows, changes.lists[operation], name, adds=operation == "add")
            made[name] = stored_shape(mirror.specs[name], block.astype(dtypes[name]))
        return made

    kinds = {n: (dtypes[n], None if mirror.specs[n].is_vector else mirror.specs[n].width) for n in mirror.arrays}
    row_list = RowList(count, {"rows": (np.dtype(np.int64), None), **kinds}, produce) if count else None
    escape = None
    if len(escapes.rows):
        escape = escape_list(mirror.specs, escapes.rows, escapes.values)
    return EncodedTable(schema, None, row_list, escape, changes.digest)


def _scan(
    spec: ArraySpec, values: Any, mirror: TableCodes | None, flags: npt.NDArray[np.uint8], workers: Workers
) -> np.dtype[Any]:
    """First pass over a whole array: bad rows, the mirror's codes, and the dtype that stores them."""
    held = mirror.arrays.get(spec.name) if mirror is not None else None

    def scan(start: int, stop: int) -> int:
        target = None if held is None else mirror.arrays[spec.name][start:stop]  # type: ignore[union-attr]
        if isinstance(spec.encoding, Affine):
            flags[start:stop] |= np.where(unencodable(spec, _block_of(values, start, stop)), _BAD, 0).astype(np.uint8)
            return 0
        return scan_block(spec, _block_of(values, start, stop), target, flags[start:stop])

    largest = max(workers.run_blocks(scan, len(flags), ENCODE_ROWS), default=0)
    if not isinstance(spec.encoding, Lattice):
        return spec.memory_dtype
    if held is not None and held.dtype == np.int16 and largest > _INT16_MAX and mirror is not None:
        mirror.widen(spec.name)
        workers.run_blocks(scan, len(flags), ENCODE_ROWS)
    return widths.narrowest(min(largest, MAX_CODE))


def _table_rows(
    rectangle: Rectangle,
    specs: Mapping[str, ArraySpec],
    values: Mapping[str, Any],
    mirror: TableCodes | None,
    dtypes: Mapping[str, np.dtype[Any]],
    coded: RowIds | None,
) -> RowList | None:
    count = rectangle.num_rows if coded is None else len(coded)
    first = rectangle.rows[0]
    if count == 0:
        return None

    def produce(start: int, stop: int) -> Blocks:
        """Positions of the list; ``coded`` holds positions in the rectangle."""
        at = np.arange(start, stop, dtype=np.int64) if coded is None else coded[start:stop]
        made: Blocks = {"rows": at + first}
        for name, spec in specs.items():
            if mirror is not None and name in mirror.arrays:
                held = mirror.arrays[name]
                block = held[start:stop] if coded is None else held[at]
                made[name] = stored_shape(spec, block.astype(dtypes[name], copy=False))
            else:
                floats = _block_of(values[name], start, stop) if coded is None else _rows_of(values[name], at)
                made |= encode_block(spec, as_columns(np.ascontiguousarray(floats)), dtypes[name])
        return made

    return RowList(count, {"rows": (np.dtype(np.int64), None), **_stored_widths(specs, dtypes)}, produce)


def _stored_widths(
    specs: Mapping[str, ArraySpec], dtypes: Mapping[str, np.dtype[Any]]
) -> dict[str, tuple[np.dtype[Any], int | None]]:
    kinds: dict[str, tuple[np.dtype[Any], int | None]] = {}
    for name, spec in specs.items():
        if isinstance(spec.encoding, Affine):
            param = np.dtype(spec.encoding.param_dtype)
            kinds["codes"] = (np.dtype(np.uint8), packing.packed_width(spec.width, spec.encoding.bits))
            kinds["scale"] = kinds["zero_point"] = (param, None)
        else:
            kinds[name] = (dtypes[name], None if spec.is_vector else spec.width)
    return kinds


def _overlaid_dtype(name: str, mirror: TableCodes, changes: EncodedRows) -> np.dtype[Any]:
    """What the mirror with what is laid over it needs, at most."""
    held = mirror.arrays[name]
    if held.dtype == np.int32:
        return np.dtype(np.int32)
    lists = [changes.lists[operation] for operation in ("add", "set") if operation in changes.lists]
    if any(item.arrays[name].dtype == np.int32 for item in lists):
        return np.dtype(np.int32)
    limit = 0
    for item in lists:
        codes = as_columns(item.arrays[name]).astype(np.int32)
        base = held[item.row_ids - mirror.start].astype(np.int32) if item is changes.lists.get("add") else 0
        limit = max(limit, int(np.abs(codes + base).max(initial=0)))
    return widths.narrowest(limit)


def _overlay(block: Array, rows: RowIds, change: EncodedList, name: str, *, adds: bool) -> None:
    low, high = np.searchsorted(change.row_ids, [rows[0], rows[-1] + 1])
    if low == high:
        return
    at = np.searchsorted(rows, change.row_ids[low:high])
    codes = as_columns(change.arrays[name])[low:high].astype(np.int32)
    block[at] = block[at] + codes if adds else codes


def _block_of(values: Any, start: int, stop: int) -> Array:
    return np.asarray(values[start:stop])


def _rows_of(values: Any, rows: RowIds) -> Array:
    return np.asarray(values[rows])
