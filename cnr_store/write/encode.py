"""Check rows that a transaction is given, and turn blocks of floats into their stored arrays, on threads. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.encodings import affine, kernels, packing, widths
from cnr_store.encodings.widths import CODE_DTYPES, as_columns, carrier
from cnr_store.errors import BadDtype, BadInput, BadShape, NonFiniteValues
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Array, ArraySpec, ExactRows, decode_block
from cnr_store.segment.groups import Blocks, RowList
from cnr_store.segment.rows import check_row_ids
from cnr_store.types import MAX_CODE, Affine, Lattice, Rectangle, RowIds


class RowUpdate(msgspec.Struct, frozen=True, eq=False, gc=False):
    """New values of some rows of a table: what `Transaction.write_many` takes of each.

    Attributes
    ----------
    table
        Name of the table.
    row_ids, values, slots, nonfinite, rectangle
        As for `Transaction.write_rows`.
    """

    table: str
    row_ids: RowIds
    values: Array
    slots: Mapping[str, Array] = {}
    nonfinite: Literal["refuse", "escape"] | None = None
    rectangle: Rectangle | None = None


ENCODE_ROWS = 16_384
"""Rows per encoding task."""

OnBadRows = Literal["refuse", "escape"]
_BAD = kernels.BAD_ROW


class FoundBadRows(Exception):
    """Some rows cannot be encoded; the caller separates them and encodes again."""


class EncodedList(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One row list in memory: sorted row ids and per array its stored form (n,) or (n, width)."""

    row_ids: RowIds
    arrays: dict[str, Array]

    def between(self, start: int, stop: int) -> EncodedList:
        """Return rows [start, stop), not copied."""
        return EncodedList(self.row_ids[start:stop], {name: array[start:stop] for name, array in self.arrays.items()})

    def row_list(self, order: str | None = None) -> RowList:
        """Return the list as chunks to write, for `RowList.order`: slices, nothing copied, nor written to any more."""
        widths_of = {"rows": (np.dtype(np.int64), None)} | {
            name: (array.dtype, None if array.ndim == 1 else array.shape[1]) for name, array in self.arrays.items()
        }

        def produce(start: int, stop: int) -> Blocks:
            own = self.between(start, stop)
            return {"rows": own.row_ids, **own.arrays}

        return RowList(len(self.row_ids), widths_of, produce, order, is_fixed=True)


def encode_absolute(spec: ArraySpec, values: Array, workers: Workers) -> dict[str, Array]:
    """Encode (n, width) floats, or codes, into their stored arrays, on threads."""
    dtype = values.dtype if holds_codes(spec, values) else spec.memory_dtype
    pieces = workers.run_blocks(lambda a, b: encode_block(spec, values[a:b], dtype), len(values), ENCODE_ROWS)
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    if isinstance(spec.encoding, Lattice):
        joined[spec.name] = widths.narrowed(joined[spec.name])
    return joined


def encode_block(spec: ArraySpec, values: Array, dtype: np.dtype[Any]) -> dict[str, Array]:
    """Encode a block of (n, width) floats or codes, all encodable, into fresh stored arrays."""
    if isinstance(spec.encoding, Affine):
        encoding = spec.encoding
        codes = np.empty((len(values), packing.packed_width(spec.width, encoding.bits)), np.uint8)
        scale = np.empty(len(values), encoding.param_dtype)
        zero_point = np.empty(len(values), encoding.param_dtype)
        bad = affine.encode(
            widths.to_float32(np.ascontiguousarray(values), spec.dtype), encoding,
            out_codes=codes, out_scale=scale, out_zero_point=zero_point,
        )  # fmt: skip
        if bad >= 0:
            raise FoundBadRows
        return {"codes": codes, "scale": scale, "zero_point": zero_point}
    flags = np.zeros(len(values), np.uint8)
    if not spec.is_integer:
        flag_not_finite(np.ascontiguousarray(values), spec, flags)
        if flags.any():
            raise FoundBadRows
        return {spec.name: stored_shape(spec, values)}
    out = np.empty(values.shape, dtype)
    scan_block(spec, values, out, flags)
    if (flags == _BAD).any():
        raise FoundBadRows
    return {spec.name: stored_shape(spec, out)}


def unencodable(spec: ArraySpec, values: Array) -> npt.NDArray[np.bool_]:
    """Return which rows of a block hold NaN, Inf or values beyond the code range."""
    if isinstance(spec.encoding, Affine):
        block = widths.to_float32(np.ascontiguousarray(values), spec.dtype)
        return np.logical_not(affine.codable_rows(block, param_dtype=spec.encoding.param_dtype))
    flags = np.zeros(len(values), np.uint8)
    scan_block(spec, values, None, flags)
    return np.asarray(flags == _BAD)


def scan_block(spec: ArraySpec, values: Array, out: Array | None, flags: npt.NDArray[np.uint8]) -> int:
    """Encode a block into ``out`` (or nowhere), flag bad rows and return the largest |code| (0 for floats)."""
    block = as_columns(np.ascontiguousarray(values))
    if holds_codes(spec, block):
        beyond = (block > MAX_CODE) | (block < -MAX_CODE)
        flags[beyond.any(axis=1)] = _BAD
        if out is not None:
            np.copyto(out, block)
        return int(max(block.max(initial=0), -int(block.min(initial=0))))
    if isinstance(spec.encoding, Lattice):
        floats = widths.to_float32(block, spec.dtype)
        out = np.empty(floats.shape, np.int32) if out is None else out
        return int(kernels.lattice_encode(floats, spec.scale, out, flags)[0])
    flag_not_finite(block, spec, flags)
    if out is not None and spec.is_integer:
        kernels.float_bits_encode(widths.as_bits(block, spec.dtype), spec.bit_shift, out, np.zeros_like(flags))
    return 0


def holds_codes(spec: ArraySpec, values: Array) -> bool:
    """Return whether rows are given as lattice codes (int16, int32) rather than floats; pure."""
    return isinstance(spec.encoding, Lattice) and values.dtype in widths.CODE_DTYPES


def flag_not_finite(block: Array, spec: ArraySpec, flags: npt.NDArray[np.uint8]) -> None:
    """Flag rows with NaN or Inf as `BAD_ROW`, which float_bits could keep but a checkpoint should not hide."""
    finite = np.isfinite(widths.to_float32(block, spec.dtype))
    if not finite.all():
        flags[~finite.all(axis=1)] = _BAD


def escape_list(specs: Mapping[str, ArraySpec], row_ids: RowIds, values: Mapping[str, Array]) -> EncodedList:
    """Return rows in their exact stored form: ``values`` and the slots, as floats; codes as what they stand for."""
    arrays: dict[str, Array] = {}
    for name, array in values.items():
        spec, floats = specs[name], array
        if holds_codes(spec, array):
            floats = np.empty(array.shape, widths.carrier(spec.dtype))
            decode_block(spec, np.ascontiguousarray(array), floats)
        arrays["values" if name == "codes" else name] = stored_shape(spec, floats)
    return EncodedList(row_ids, arrays)


def put_escapes(escapes: ExactRows, exact: EncodedList, names: Iterable[str]) -> None:
    """Add what `escape_list` returned to the exact rows of a mirror that has the arrays ``names``."""
    values = {"codes" if name == "values" else name: as_columns(array) for name, array in exact.arrays.items()}
    escapes.put(exact.row_ids, {name: values[name] for name in names})


def refused_rows(table: str, row: int, count: int) -> NonFiniteValues:
    """Return the error for ``count`` rows that cannot be encoded, the first of them ``row``."""
    return NonFiniteValues(
        f"row {row} of table {table!r}{f' and {count - 1} more' * (count > 1)}: NaN, Inf or a value beyond the range "
        "of its codes, in the weights or a slot; nothing was written. Find where training diverged, or keep such rows "
        'exactly: TableOptions(nonfinite="escape"), `cnr import --nonfinite escape`',
        table=table, expected="finite, within the code range", found=row,
    )  # fmt: skip


def stored_shape(spec: ArraySpec, block: Array) -> Array:
    """Return a (n, width) block as it is stored: (n,) for one-dimensional slots."""
    return block.reshape(-1) if spec.is_vector else block


def check_arrays(
    table: str,
    specs: Mapping[str, ArraySpec],
    rows: int,
    values: Any,
    slots: Mapping[str, Any],
) -> dict[str, Any]:
    """Check values and slots of ``rows`` rows of a table against its arrays; return array name to each.

    Values are floats in the table's dtype or, of a lattice, its codes as int16 or int32.

    Raises
    ------
    BadInput, BadShape, BadDtype
    """
    given = {"codes": values}
    for name, array in slots.items():
        given["slots/" + name] = array
    if given.keys() != specs.keys():
        expected = sorted(name.removeprefix("slots/") for name in specs.keys() - {"codes"})
        raise BadInput(
            f"table {table!r} has slots {expected}, found {sorted(slots)}; give every slot with the rows",
            table=table, expected=expected, found=sorted(slots),
        )  # fmt: skip
    for name, array in given.items():
        spec = specs[name]
        shape = (rows,) if spec.is_vector else (rows, spec.width)
        if isinstance(array, np.ndarray) and array.shape == shape and array.dtype == carrier(spec.dtype):
            continue  # nearly all
        what = "values" if name == "codes" else f"slot {name.removeprefix('slots/')!r}"
        if not hasattr(array, "shape") or type(array).__module__.startswith("torch"):
            raise BadDtype(
                f"{what} of table {table!r}: {type(array).__module__}.{type(array).__name__}, expected a numpy array; "
                "give np.asarray() of a list, and the .numpy() of a tensor",
                table=table, expected="numpy array", found=type(array).__name__,
            )  # fmt: skip
        if tuple(array.shape) != shape:
            raise BadShape(
                f"{what} of table {table!r}: shape {tuple(array.shape)}, expected {shape}",
                table=table, expected=shape, found=tuple(array.shape),
            )  # fmt: skip
        takes_codes = name == "codes" and isinstance(spec.encoding, Lattice)
        if np.dtype(array.dtype) != carrier(spec.dtype) and not (takes_codes and np.dtype(array.dtype) in CODE_DTYPES):
            expected_dtype = f"{carrier(spec.dtype)}{', or its codes as int16 or int32' if takes_codes else ''}"
            raise BadDtype(
                f"{what} of table {table!r}: dtype {array.dtype}, expected {expected_dtype}",
                table=table, expected=expected_dtype, found=str(array.dtype),
            )  # fmt: skip
    return given


def own_row_ids(given: Sequence[Any], ranges: Sequence[tuple[int, int] | None], tables: Sequence[str]) -> list[RowIds]:
    """Return copies of the row ids of several tables, checked as `check_row_ids` does, all of them at once.

    Parameters
    ----------
    given
        Row ids, one array for each table.
    ranges
        The rows that the caller holds of each table, half-open; None for hashed tables.

    Raises
    ------
    BadRowIds
        As `check_row_ids` of the first table whose ids are wrong.
    """
    is_plain = all(isinstance(rows, np.ndarray) and rows.dtype == np.int64 and rows.ndim == 1 for rows in given)
    if is_plain and given:
        joined: RowIds = np.concatenate(given)
        ends = np.cumsum([len(rows) for rows in given])
        bounds = ends.tolist()
        if _are_in_ranges(joined, ends, ranges):
            return [joined[start:stop] for start, stop in zip([0, *bounds], bounds, strict=False)]
    return [
        check_row_ids(
            rows, None if held is None else held[1], first_row=0 if held is None else held[0], table=table
        ).copy()
        for rows, held, table in zip(given, ranges, tables, strict=True)
    ]


def _are_in_ranges(joined: RowIds, ends: RowIds, ranges: Sequence[tuple[int, int] | None]) -> bool:
    """Whether ids that stand end to end are ascending and unique in each range, and inside it."""
    if not len(joined):
        return True
    ascending = joined[1:] > joined[:-1]
    ascending[ends[(ends > 0) & (ends < len(joined))] - 1] = True  # from one table to the next
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    any_key = np.iinfo(np.int64)
    lowest = np.array([any_key.min if one is None else one[0] for one in ranges], np.int64)
    highest = np.array([any_key.max if one is None else one[1] - 1 for one in ranges], np.int64)
    filled = ends > starts
    first, last = joined[starts[filled]], joined[ends[filled] - 1]
    inside = (first >= lowest[filled]) & (last <= highest[filled])
    return bool(ascending.all() and inside.all())
