"""Turn rows of a table into the row lists of a part: differences to the mirror, absolute codes, escapes.

Pure computation on threads, no I/O. Nothing here moves a mirror: `StagedRows.apply` does, once the commit has won
(design, section 4, rule 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import affine, digest, float_bits, kernels, packing, widths
from cnr_store.errors import NonFiniteValues
from cnr_store.records import TableSchema
from cnr_store.segment import Blocks, RowList
from cnr_store.table_codes import ABSENT, CODED, ESCAPED, Allocate, Array, ArraySpec, TableCodes, array_specs
from cnr_store.types import MAX_CODE, Affine, Lattice, RowIds, TableOptions
from cnr_store.workers import Workers, blocks

ENCODE_ROWS = 16_384
"""Rows per encoding task."""

OnBadRows = Literal["refuse", "escape"]
_BAD = kernels.BAD_ROW
_INT16_MAX = 32767


@dataclass(slots=True)
class StagedList:
    """One row list in memory: sorted rows and per array its stored form (n,) or (n, width)."""

    rows: RowIds
    arrays: dict[str, Array]

    def row_list(self) -> RowList:
        """Return the list as chunks to write: slices, nothing copied."""
        widths_of = {"rows": (np.dtype(np.int64), None)} | {
            name: (array.dtype, None if array.ndim == 1 else array.shape[1]) for name, array in self.arrays.items()
        }

        def produce(start: int, stop: int) -> Blocks:
            return {"rows": self.rows[start:stop]} | {n: a[start:stop] for n, a in self.arrays.items()}

        return RowList(len(self.rows), widths_of, produce)


@dataclass(slots=True)
class StagedRows:
    """What one save does to a table's rows: lists by operation, and the state digest they lead to.

    ``digest`` is None for tables without a mirror.
    """

    schema: TableSchema
    lists: dict[str, StagedList] = field(default_factory=dict)
    digest: int | None = None

    def apply(self, mirror: TableCodes, workers: Workers) -> None:
        """Move the mirror to what was staged; call once, after the commit has won. Blocks; runs on ``workers``."""
        for operation, staged in self.lists.items():
            status = {"add": CODED, "set": CODED, "delete": ABSENT, "escape": ESCAPED}[operation]
            if operation in ("add", "set"):
                for name in mirror.arrays:
                    _move(mirror, name, staged, workers, adds=operation == "add")
            if operation != "add":
                mirror.mark(staged.rows, status)
            if operation == "escape":
                values = {"codes" if n == "values" else n: _columns(a) for n, a in staged.arrays.items()}
                mirror.escapes.put(staged.rows, {name: values[name] for name in mirror.arrays})


@dataclass(frozen=True, slots=True)
class Given:
    """Rows as the caller gives them: sorted ids, and per array (n, width) floats in its own dtype."""

    rows: RowIds
    values: dict[str, Array]

    def take(self, chosen: npt.NDArray[np.bool_]) -> Given:
        """Return the chosen rows (copied)."""
        return Given(self.rows[chosen], {name: array[chosen] for name, array in self.values.items()})


def stage_rows(
    table: str,
    schema: TableSchema,
    mirror: TableCodes | None,
    given: Given,
    *,
    base_digest: int | None,
    absolute: bool,
    on_bad_rows: OnBadRows,
    workers: Workers,
) -> StagedRows:
    """Encode touched rows against the mirror: ``add`` where it has codes, else ``set``; unchanged rows leave.

    Parameters
    ----------
    mirror
        The codes of the state the delta starts from; None writes ``set`` rows only.
    base_digest
        Digest of that state.
    absolute
        Write ``set`` rows although there is a mirror (one_shot deltas apply to the baseline, not to the mirror).
    on_bad_rows
        Rows with NaN, Inf or codes beyond the range: raise, or keep them as escape rows.

    Raises
    ------
    NonFiniteValues
        Names the table and the first row.
    """
    specs = array_specs(schema)
    staged = StagedRows(schema)
    try:
        return _stage(staged, specs, mirror, given, base_digest, absolute, workers)
    except _FoundBadRows:
        bad = _find_bad(specs, given, workers)
    rows = given.rows[bad]
    if on_bad_rows == "refuse":
        raise _refused(table, int(rows[0]), len(rows))
    staged = StagedRows(schema, {"escape": _escape_list(specs, given.take(bad))})
    return _stage(staged, specs, mirror, given.take(~bad), base_digest, absolute, workers)


def _stage(
    staged: StagedRows,
    specs: Mapping[str, ArraySpec],
    mirror: TableCodes | None,
    given: Given,
    base_digest: int | None,
    absolute: bool,
    workers: Workers,
) -> StagedRows:
    schema = staged.schema
    change = _leaving(mirror, staged.lists["escape"].rows) if "escape" in staged.lists and mirror is not None else 0
    coded = mirror.is_coded(given.rows) if mirror is not None and not absolute else np.zeros(len(given.rows), np.bool_)
    if coded.all() and len(given.rows) and mirror is not None:
        change += _stage_add(staged, specs, mirror, given, workers)
    else:
        if coded.any() and mirror is not None:
            change += _stage_add(staged, specs, mirror, given.take(coded), workers)
            given = given.take(~coded)
        if len(given.rows):
            if mirror is not None:
                change += _leaving(mirror, given.rows)
            staged.lists["set"] = encode_rows(schema, given, workers)
            if mirror is not None:
                change += _arriving(specs, staged.lists["set"])
    if mirror is not None and base_digest is not None:
        if "escape" in staged.lists:
            change += _escaped(specs, staged.lists["escape"])
        staged.digest = digest.add_digests(base_digest, change & ((1 << 64) - 1))
    return staged


def stage_delete(schema: TableSchema, mirror: TableCodes | None, rows: RowIds, base_digest: int | None) -> StagedRows:
    """Stage the deletion of sorted ``rows``; rows that are absent already stay in the list, harmless."""
    change = 0 if mirror is None else _leaving(mirror, rows)
    after = None if base_digest is None else digest.add_digests(base_digest, change & ((1 << 64) - 1))
    return StagedRows(schema, {"delete": StagedList(rows, {})}, after)


def encode_rows(schema: TableSchema, given: Given, workers: Workers) -> StagedList:
    """Return rows in their absolute stored form (a ``set`` list); the rows are known to be encodable."""
    specs = array_specs(schema)
    arrays: dict[str, Array] = {}
    for name, spec in specs.items():
        arrays |= _encode_absolute(spec, schema, given.values[name], workers)
    return StagedList(given.rows, arrays)


@dataclass(slots=True)
class StagedTable:
    """A whole table ready to be written: its new mirror (None without one), the chunks of its rows, its digest."""

    schema: TableSchema
    mirror: TableCodes | None
    rows: RowList | None
    escape: StagedList | None
    digest: int | None


def stage_table(
    table: str,
    schema: TableSchema,
    values: Mapping[str, Any],
    *,
    allocate: Allocate | None,
    on_bad_rows: OnBadRows,
    workers: Workers,
) -> StagedTable:
    """Encode all rows of a dense table, for a baseline or a new table.

    Parameters
    ----------
    values
        Array name to anything with ``[start:stop]`` giving (rows, width) or (rows,) floats; read twice at most.
    allocate
        Memory for the new mirror; None keeps none, and rows are encoded while they are written.

    Raises
    ------
    NonFiniteValues
    """
    specs = array_specs(schema)
    flags = np.zeros(schema.num_rows, np.uint8)
    mirror = None
    if allocate is not None and any(spec.is_additive for spec in specs.values()):
        names = tuple(name for name, spec in specs.items() if spec.is_additive)
        mirror = TableCodes.allocate(schema, 0, schema.num_rows, names=names, mirror=True, allocate=allocate)
    dtypes = {name: _scan(spec, values[name], mirror, flags, workers) for name, spec in specs.items()}
    bad = flags == _BAD
    escape = None
    rows = np.empty(0, np.int64)
    if bad.any():
        rows = np.flatnonzero(bad).astype(np.int64)
        if on_bad_rows == "refuse":
            raise _refused(table, int(rows[0]), len(rows))
        escape = _escape_list(specs, Given(rows, {name: _rows_of(values[name], rows) for name in specs}))
    if mirror is not None and escape is not None:
        held = {"codes" if n == "values" else n: _columns(a) for n, a in escape.arrays.items()}
        mirror.mark(rows, ESCAPED)
        mirror.escapes.put(rows, {name: held[name] for name in mirror.arrays})
    coded = None if escape is None else np.flatnonzero(~bad).astype(np.int64)
    row_list = _table_rows(schema, specs, values, mirror, dtypes, coded)
    return StagedTable(schema, mirror, row_list, escape, None if mirror is None else mirror.digest(workers))


def stage_mirror(schema: TableSchema, mirror: TableCodes, staged: StagedRows | None) -> StagedTable:
    """Return a baseline of the mirror with ``staged`` laid over it, chunk by chunk; the mirror does not move.

    Only for tables whose every array is mirrored.
    """
    status = None if mirror.status is None else mirror.status.copy()
    escapes = type(mirror.escapes)(mirror.escapes.rows, dict(mirror.escapes.values))
    for operation, change in (staged.lists if staged else {}).items():
        if operation != "add":
            if status is None and operation != "set":
                status = np.zeros(mirror.num_rows, np.uint8)
            if status is not None:
                status[change.rows - mirror.start] = {"set": CODED, "delete": ABSENT, "escape": ESCAPED}[operation]
            escapes.drop(change.rows)
        if operation == "escape":
            values = {"codes" if n == "values" else n: _columns(a) for n, a in change.arrays.items()}
            escapes.put(change.rows, {name: values[name] for name in mirror.arrays})
    coded = None if status is None else np.flatnonzero(status == CODED).astype(np.int64) + mirror.start
    dtypes = {name: _overlaid_dtype(name, held, staged) for name, held in mirror.arrays.items()}
    count = mirror.num_rows if coded is None else len(coded)

    def produce(start: int, stop: int) -> Blocks:
        rows = np.arange(start, stop, dtype=np.int64) + mirror.start if coded is None else coded[start:stop]
        made: Blocks = {"rows": rows}
        for name, held in mirror.arrays.items():
            block = held[rows - mirror.start].astype(np.int32)
            for operation in ("add", "set"):
                if staged and operation in staged.lists:
                    _overlay(block, rows, staged.lists[operation], name, adds=operation == "add")
            made[name] = _stored_shape(mirror.specs[name], block.astype(dtypes[name]))
        return made

    kinds = {n: (dtypes[n], None if mirror.specs[n].is_vector else mirror.specs[n].width) for n in mirror.arrays}
    row_list = RowList(count, {"rows": (np.dtype(np.int64), None), **kinds}, produce) if count else None
    escape = None
    if len(escapes.rows):
        escape = StagedList(
            escapes.rows,
            {
                "values" if name == "codes" else name: _stored_shape(mirror.specs[name], values)
                for name, values in escapes.values.items()
            },
        )
    return StagedTable(schema, None, row_list, escape, staged.digest if staged else None)


def is_fully_mirrored(schema: TableSchema) -> bool:
    """Whether a baseline of the table can be written from the mirror alone."""
    return all(spec.is_additive for spec in array_specs(schema).values())


class _FoundBadRows(Exception):
    """Rows that cannot be encoded turned up while the others were; the caller sorts them out and starts again."""


def _find_bad(specs: Mapping[str, ArraySpec], given: Given, workers: Workers) -> npt.NDArray[np.bool_]:
    """Which rows some array cannot encode: one pass over the floats."""
    bad = np.zeros(len(given.rows), np.bool_)

    def check(start: int, stop: int) -> None:
        for name, spec in specs.items():
            bad[start:stop] |= _unencodable(spec, given.values[name][start:stop])

    workers.run(partial(check, a, b) for a, b in blocks(len(given.rows), ENCODE_ROWS))
    return bad


def _unencodable(spec: ArraySpec, values: Array) -> npt.NDArray[np.bool_]:
    if isinstance(spec.encoding, Affine):
        block = widths.to_float32(np.ascontiguousarray(values), spec.dtype)
        return np.logical_not(affine.codable_rows(block, param_dtype=spec.encoding.param_dtype))
    flags = np.zeros(len(values), np.uint8)
    scan_block(spec, values, None, flags)
    return np.asarray(flags == _BAD)


def scan_block(spec: ArraySpec, values: Array, out: Array | None, flags: npt.NDArray[np.uint8]) -> int:
    """Encode a block into ``out`` (or nowhere), flag bad rows and return the largest |code| (0 for floats)."""
    block = _columns(np.ascontiguousarray(values))
    if isinstance(spec.encoding, Lattice):
        floats = widths.to_float32(block, spec.dtype)
        out = np.empty(floats.shape, np.int32) if out is None else out
        return int(kernels.lattice_encode(floats, spec.scale, out, flags)[0])
    flags |= _not_finite(block, spec)
    if out is not None and spec.is_integer:
        kernels.float_bits_encode(float_bits.as_bits(block, spec.dtype), spec.bit_shift, out, np.zeros_like(flags))
    return 0


def _not_finite(block: Array, spec: ArraySpec) -> npt.NDArray[np.uint8]:
    """`BAD_ROW` for rows with NaN or Inf, which float_bits could keep but a checkpoint should not hide."""
    finite = np.isfinite(widths.to_float32(block, spec.dtype)).all(axis=1)
    return np.where(finite, 0, _BAD).astype(np.uint8)


def _scan(
    spec: ArraySpec, values: Any, mirror: TableCodes | None, flags: npt.NDArray[np.uint8], workers: Workers
) -> np.dtype[Any]:
    """First pass over a whole array: bad rows, the mirror's codes, and the dtype that stores them."""
    held = mirror.arrays.get(spec.name) if mirror is not None else None

    def scan(start: int, stop: int) -> int:
        target = None if held is None else mirror.arrays[spec.name][start:stop]  # type: ignore[union-attr]
        if isinstance(spec.encoding, Affine):
            flags[start:stop] |= np.where(_unencodable(spec, _block_of(values, start, stop)), _BAD, 0).astype(np.uint8)
            return 0
        return scan_block(spec, _block_of(values, start, stop), target, flags[start:stop])

    ranges = blocks(len(flags), ENCODE_ROWS)
    largest = max(workers.run(partial(scan, a, b) for a, b in ranges), default=0)
    if not isinstance(spec.encoding, Lattice):
        return spec.held_dtype
    if held is not None and held.dtype == np.int16 and largest > _INT16_MAX and mirror is not None:
        mirror.widen(spec.name)
        workers.run(partial(scan, a, b) for a, b in ranges)
    return widths.narrowest(min(largest, MAX_CODE))


def _table_rows(
    schema: TableSchema,
    specs: Mapping[str, ArraySpec],
    values: Mapping[str, Any],
    mirror: TableCodes | None,
    dtypes: Mapping[str, np.dtype[Any]],
    coded: RowIds | None,
) -> RowList | None:
    count = schema.num_rows if coded is None else len(coded)
    if count == 0:
        return None

    def produce(start: int, stop: int) -> Blocks:
        rows = np.arange(start, stop, dtype=np.int64) if coded is None else coded[start:stop]
        made: Blocks = {"rows": rows}
        for name, spec in specs.items():
            if mirror is not None and name in mirror.arrays:
                held = mirror.arrays[name]
                block = held[start:stop] if coded is None else held[rows]
                made[name] = _stored_shape(spec, block.astype(dtypes[name], copy=False))
            else:
                floats = _block_of(values[name], start, stop) if coded is None else _rows_of(values[name], rows)
                made |= _encode_block(spec, schema, _columns(np.ascontiguousarray(floats)), dtypes[name])
        return made

    return RowList(count, {"rows": (np.dtype(np.int64), None), **_stored_widths(schema, specs, dtypes)}, produce)


def _stored_widths(
    schema: TableSchema, specs: Mapping[str, ArraySpec], dtypes: Mapping[str, np.dtype[Any]]
) -> dict[str, tuple[np.dtype[Any], int | None]]:
    kinds: dict[str, tuple[np.dtype[Any], int | None]] = {}
    for name, spec in specs.items():
        if isinstance(spec.encoding, Affine):
            param = np.dtype(spec.encoding.param_dtype)
            kinds["codes"] = (np.dtype(np.uint8), packing.packed_width(schema.dim, spec.encoding.bits))
            kinds["scale"] = kinds["zero_point"] = (param, None)
        else:
            kinds[name] = (dtypes[name], None if spec.is_vector else spec.width)
    return kinds


def _encode_absolute(spec: ArraySpec, schema: TableSchema, values: Array, workers: Workers) -> dict[str, Array]:
    """Encode (n, width) floats into their stored arrays, on threads."""
    ranges = blocks(len(values), ENCODE_ROWS)
    dtype = spec.held_dtype
    pieces = workers.run(partial(_encode_block, spec, schema, values[a:b], dtype) for a, b in ranges)
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    if isinstance(spec.encoding, Lattice):
        joined[spec.name] = widths.narrowed(joined[spec.name])
    return joined


def _encode_block(spec: ArraySpec, schema: TableSchema, values: Array, dtype: np.dtype[Any]) -> dict[str, Array]:
    """Encode a block of (n, width) floats, all encodable, into fresh stored arrays."""
    if isinstance(spec.encoding, Affine):
        encoding = spec.encoding
        codes = np.empty((len(values), packing.packed_width(schema.dim, encoding.bits)), np.uint8)
        scale = np.empty(len(values), encoding.param_dtype)
        zero_point = np.empty(len(values), encoding.param_dtype)
        bad = affine.encode(
            widths.to_float32(np.ascontiguousarray(values), spec.dtype),
            bits=encoding.bits, search=encoding.search, param_dtype=encoding.param_dtype,
            num_bins=encoding.num_bins, ratio=encoding.ratio,
            out_codes=codes, out_scale=scale, out_zero_point=zero_point,
        )  # fmt: skip
        if bad >= 0:
            raise _FoundBadRows
        return {"codes": codes, "scale": scale, "zero_point": zero_point}
    if not spec.is_integer:
        if _not_finite(np.ascontiguousarray(values), spec).any():
            raise _FoundBadRows
        return {spec.name: _stored_shape(spec, values)}
    out = np.empty(values.shape, dtype)
    flags = np.zeros(len(values), np.uint8)
    scan_block(spec, values, out, flags)
    if (flags == _BAD).any():
        raise _FoundBadRows
    return {spec.name: _stored_shape(spec, out)}


def _stage_add(
    staged: StagedRows, specs: Mapping[str, ArraySpec], mirror: TableCodes, given: Given, workers: Workers
) -> int:
    """Stage ``add`` rows; returns the change of the digest. Rows whose every code is unchanged leave."""
    count = len(given.rows)
    flags = np.zeros(count, np.uint8)
    if not all(spec.is_additive for spec in specs.values()):
        flags |= 1
    arrays: dict[str, Array] = {}
    change = 0
    for name, spec in specs.items():
        if not spec.is_additive:
            arrays |= _encode_absolute(spec, staged.schema, given.values[name], workers)
            continue
        arrays[name], changed = _differences(spec, mirror, given, flags, workers)
        change += changed
    if (flags == _BAD).any():
        raise _FoundBadRows
    rows = given.rows
    keep = flags == 1
    if not keep.all():
        rows = rows[keep]
        arrays = {name: array[keep] for name, array in arrays.items()}
    if len(rows):
        staged.lists["add"] = StagedList(rows, {n: _stored_shape(specs[n], a) for n, a in arrays.items()})
    return change


def _differences(
    spec: ArraySpec, mirror: TableCodes, given: Given, flags: npt.NDArray[np.uint8], workers: Workers
) -> tuple[Array, int]:
    """Return the differences to the mirror in the narrowest of int16 and int32, and the digest's change."""
    values = given.values[spec.name]
    multipliers = spec.multipliers((0, mirror.schema.dim))
    held = mirror.arrays[spec.name]

    def encode(out: Array, start: int, stop: int) -> tuple[int, int]:
        block = np.ascontiguousarray(values[start:stop])
        rows = given.rows[start:stop]
        if isinstance(spec.encoding, Lattice):
            floats = widths.to_float32(block, spec.dtype)
            largest, _, _, change = kernels.lattice_delta(
                floats, rows, held, mirror.start, spec.scale, multipliers, out[start:stop], flags[start:stop]
            )
        else:
            flags[start:stop] |= _not_finite(block, spec)
            bits = float_bits.as_bits(block, spec.dtype)
            largest, _, _, change = kernels.float_bits_delta(
                bits, rows, held, mirror.start, spec.bit_shift, multipliers, out[start:stop], flags[start:stop]
            )
        return int(largest), int(change)

    for dtype in (np.int16, np.int32):
        out: Array = np.empty(values.shape, dtype)
        results = workers.run(partial(encode, out, a, b) for a, b in blocks(len(values), ENCODE_ROWS))
        if max(largest for largest, _ in results) <= np.iinfo(dtype).max:
            break
    return out, sum(change for _, change in results)


def _arriving(specs: Mapping[str, ArraySpec], staged: StagedList) -> int:
    """What ``set`` rows add to the digest."""
    total = 0
    for name, spec in specs.items():
        if spec.is_additive:
            presence = digest.PRESENCE_CODED if name == "codes" else digest.NO_PRESENCE
            multipliers = spec.multipliers((0, specs["codes"].width))
            total += digest.digest_of_rows(
                np.ascontiguousarray(staged.arrays[name]), staged.rows, multipliers, presence
            )
    return total


def _escaped(specs: Mapping[str, ArraySpec], staged: StagedList) -> int:
    """What ``escape`` rows add to the digest."""
    total = 0
    for name, spec in specs.items():
        if spec.is_additive:
            from cnr_store.table_codes import escape_bits

            values = _columns(staged.arrays["values" if name == "codes" else name])
            presence = digest.PRESENCE_ESCAPE if name == "codes" else digest.NO_PRESENCE
            multipliers = spec.multipliers((0, specs["codes"].width))
            total += digest.digest_of_rows(escape_bits(values, spec.dtype), staged.rows, multipliers, presence)
    return total


def _leaving(mirror: TableCodes, rows: RowIds) -> int:
    """What ``rows`` stop to add to the digest: minus their present contribution."""
    total = 0
    columns = (0, mirror.schema.dim)
    coded = rows[mirror.is_coded(rows)]
    multipliers = {name: mirror.specs[name].multipliers(columns) for name in mirror.arrays}
    for name, held in mirror.arrays.items():
        presence = digest.PRESENCE_CODED if name == "codes" else digest.NO_PRESENCE
        total += int(kernels.digest_gathered(held, coded, mirror.start, multipliers[name], presence))
    if len(mirror.escapes.rows):
        leaving = np.isin(mirror.escapes.rows, rows, assume_unique=True)
        gone = type(mirror.escapes)(
            mirror.escapes.rows[leaving], {n: v[leaving] for n, v in mirror.escapes.values.items()}
        )
        total += mirror.escape_digest(gone, multipliers)
    return -total


def _escape_list(specs: Mapping[str, ArraySpec], given: Given) -> StagedList:
    return StagedList(
        given.rows,
        {"values" if n == "codes" else n: _stored_shape(specs[n], array) for n, array in given.values.items()},
    )


def _move(mirror: TableCodes, name: str, staged: StagedList, workers: Workers, *, adds: bool) -> None:
    codes = np.ascontiguousarray(_columns(staged.arrays[name]))
    held = mirror.arrays[name]
    wraps = adds and held.dtype == np.int32 and not isinstance(mirror.specs[name].encoding, Lattice)
    kernel: Callable[..., int] = kernels.add_codes if adds else kernels.put_codes

    def move(start: int, stop: int) -> int:
        """Return the position that an int16 mirror cannot hold, or ``stop``."""
        rows, block = staged.rows[start:stop], codes[start:stop]
        if wraps:
            kernels.add_codes_wrapping(held, rows, mirror.start, block)
            return stop
        done = int(kernel(held, rows, mirror.start, block, 0))
        return stop if done < 0 else start + done

    ranges = blocks(len(codes), ENCODE_ROWS)
    reached = workers.run(partial(move, start, stop) for start, stop in ranges)
    rest = [(done, stop) for done, (_, stop) in zip(reached, ranges, strict=True) if done < stop]
    if rest:
        for done, _ in rest if adds else []:
            # The kernel stopped after it wrapped this row in int16; wrapping back restores it.
            held[staged.rows[done] - mirror.start] -= codes[done].astype(np.int16)
        mirror.widen(name)
        for start, stop in rest:
            kernel(mirror.arrays[name], staged.rows[start:stop], mirror.start, codes[start:stop], 0)


def _overlaid_dtype(name: str, held: Array, staged: StagedRows | None) -> np.dtype[Any]:
    """int16 unless the mirror or what is laid over it may need int32."""
    if held.dtype == np.int32:
        return np.dtype(np.int32)
    lists = [] if staged is None else [staged.lists[op] for op in ("add", "set") if op in staged.lists]
    if any(item.arrays[name].dtype == np.int32 for item in lists):
        return np.dtype(np.int32)
    limit = 0
    for item in lists:
        codes = _columns(item.arrays[name]).astype(np.int32)
        base = held[item.rows].astype(np.int32) if item is staged.lists.get("add") else 0  # type: ignore[union-attr]
        limit = max(limit, int(np.abs(codes + base).max(initial=0)))
    return widths.narrowest(limit)


def _overlay(block: Array, rows: RowIds, staged: StagedList, name: str, *, adds: bool) -> None:
    low, high = np.searchsorted(staged.rows, [rows[0], rows[-1] + 1])
    if low == high:
        return
    at = np.searchsorted(rows, staged.rows[low:high])
    codes = _columns(staged.arrays[name])[low:high].astype(np.int32)
    block[at] = block[at] + codes if adds else codes


def _stored_shape(spec: ArraySpec, block: Array) -> Array:
    return block.reshape(-1) if spec.is_vector else block


def _columns(block: Array) -> Array:
    return block.reshape(-1, 1) if block.ndim == 1 else block


def _block_of(values: Any, start: int, stop: int) -> Array:
    return np.asarray(values[start:stop])


def _rows_of(values: Any, rows: RowIds) -> Array:
    return np.asarray(values[rows])


def _refused(table: str, row: int, count: int) -> NonFiniteValues:
    return NonFiniteValues(
        f"row {row} of table {table!r} (and {count - 1} more) holds NaN, Inf or a value beyond the range of the "
        'table\'s codes; nothing was written. Find where training diverged, or pass nonfinite="escape" to keep such '
        "rows exactly",
        table=table, expected="finite, within the code range", found=row,
    )  # fmt: skip


def options_on_bad_rows(options: TableOptions | None) -> OnBadRows:
    """Return what the options say about rows that cannot be encoded; ``refuse`` without options."""
    return "refuse" if options is None else options.nonfinite
