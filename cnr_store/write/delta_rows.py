"""Turn touched rows into the row lists of a part: differences to the mirror, absolute codes, exact rows.

Small tables that are alike are encoded by one call: a delta of a few rows in each of a thousand tables costs what its
rows do, and a call of numpy or a kernel takes longer to begin than a hundred rows take (`format_spec/decisions/0027`).
What is not small or plain goes table by table, through `encode_alone`, which defines what such a call does.

Pure computation on threads, no I/O. Nothing here moves a mirror: `mirrors` does, once the commit has won (design,
section 4, rule 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.encodings import digest, kernels, widths
from cnr_store.encodings.widths import as_columns
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Array, ArraySpec, ArraySpecs, TableCodes, escape_bits
from cnr_store.types import Lattice, RowIds
from cnr_store.write.encode import (
    ENCODE_ROWS,
    EncodedList,
    FoundBadRows,
    OnBadRows,
    encode_absolute,
    escape_list,
    flag_not_finite,
    holds_codes,
    refused_rows,
    stored_shape,
    unencodable,
)
from cnr_store.write.table_options import TableOptions


class TouchedTable(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Checked rows of one table or shard, and what they are encoded against.

    Attributes
    ----------
    specs
        The arrays of the columns that are given.
    mirror
        The codes of the state that the delta starts from; None writes ``set`` rows only.
    row_ids, values
        int64 (n,), ascending; per array (n, width) floats in its own dtype. The weights of a lattice may be given as
        their codes instead, int16 or int32 (`holds_codes`).
    base_digest
        Digest of that state.
    on_bad_rows
        Rows with NaN, Inf or codes beyond the range: raise, or keep them as exact rows.
    places
        Where the mirror has the codes of the rows, if not by row id; -1 for rows that it has none of. Then there is no
        digest.
    """

    table: str
    specs: ArraySpecs
    mirror: TableCodes | None
    row_ids: RowIds
    values: Mapping[str, Array]
    base_digest: int | None
    on_bad_rows: OnBadRows
    places: RowIds | None = None

    @property
    def mirrored(self) -> RowIds:
        """What the mirror is asked for by: ``places`` or row ids."""
        return self.row_ids if self.places is None else self.places

    def is_coded(self) -> npt.NDArray[np.bool_]:
        """Return which rows have codes that a difference can be taken to."""
        if self.mirror is None:
            return np.zeros(len(self.row_ids), np.bool_)
        if self.places is None:
            return self.mirror.is_coded(self.row_ids)
        return self.places >= 0

    def take(self, chosen: npt.NDArray[np.bool_]) -> TouchedTable:
        """Return the chosen rows (copied)."""
        values = {name: array[chosen] for name, array in self.values.items()}
        places = None if self.places is None else self.places[chosen]
        return msgspec.structs.replace(self, row_ids=self.row_ids[chosen], values=values, places=places)


_BAD = kernels.BAD_ROW
_INT16_MAX = 2**15 - 1
_FLOAT32 = np.dtype(np.float32)
_WIDTHS = ((np.dtype(np.int16), _INT16_MAX), (np.dtype(np.int32), 2**31 - 1))
"""What differences are stored in, and the largest of each."""


class EncodedRows(msgspec.Struct, eq=False, gc=False):
    """What one save does to a table's rows: lists by operation, and the state digest they lead to.

    ``specs``: the arrays of the rows. ``digest`` is None for tables without a mirror.
    """

    specs: Mapping[str, ArraySpec]
    lists: dict[str, EncodedList] = {}
    digest: int | None = None

    @property
    def count(self) -> int:
        """Rows in all lists."""
        return sum(len(item.row_ids) for item in self.lists.values())


def encode_alone(touched: TouchedTable, *, absolute: bool, workers: Workers) -> EncodedRows:
    """Encode touched rows against their mirror: ``add`` where it has codes, else ``set``. Blocks.

    Rows whose every code is unchanged leave.

    Parameters
    ----------
    absolute
        Write ``set`` rows although there is a mirror (one_shot deltas apply to the baseline, not to the mirror).

    Raises
    ------
    NonFiniteValues
        Names the table and the first row.
    """
    try:
        return _encode(EncodedRows(touched.specs), touched, absolute, workers)
    except FoundBadRows:
        bad = _find_bad(touched, workers)
    row_ids = touched.row_ids[bad]
    if touched.on_bad_rows == "refuse":
        raise refused_rows(touched.table, int(row_ids[0]), len(row_ids))
    values = {name: array[bad] for name, array in touched.values.items()}
    encoded = EncodedRows(touched.specs, {"escape": escape_list(touched.specs, row_ids, values)})
    return _encode(encoded, touched.take(~bad), absolute, workers)


def _encode(encoded: EncodedRows, touched: TouchedTable, absolute: bool, workers: Workers) -> EncodedRows:
    """Add lists of rows that can all be encoded, and the digest that all lists lead to."""
    specs, lists, mirror = encoded.specs, encoded.lists, touched.mirror
    digested = mirror if touched.base_digest is not None else None
    change = _leaving(digested, lists["escape"].row_ids) if "escape" in lists and digested is not None else 0
    coded = np.zeros(len(touched.row_ids), np.bool_) if absolute else touched.is_coded()
    if coded.any() and mirror is not None:
        change += _encode_add(encoded, mirror, touched if coded.all() else touched.take(coded), workers)
    if not coded.all():
        rest = touched.take(~coded) if coded.any() else touched
        if digested is not None:
            change += _leaving(digested, rest.row_ids)
        arrays: dict[str, Array] = {}
        for name, spec in specs.items():
            arrays |= encode_absolute(spec, rest.values[name], workers)
        lists["set"] = EncodedList(rest.row_ids, arrays)
        if digested is not None:
            change += arriving(specs, lists["set"])
    if touched.base_digest is not None and digested is not None:
        if "escape" in lists:
            change += escaping(specs, lists["escape"])
        encoded.digest = digest.add_digests(touched.base_digest, change)
    return encoded


def encode_delete(mirror: TableCodes | None, row_ids: RowIds, base_digest: int | None) -> EncodedRows:
    """Return the deletion of sorted rows; those that are absent already stay in the list, harmless."""
    change = 0 if mirror is None else _leaving(mirror, row_ids)
    after = None if base_digest is None else digest.add_digests(base_digest, change)
    return EncodedRows({}, {"delete": EncodedList(row_ids, {})}, after)


def _find_bad(touched: TouchedTable, workers: Workers) -> npt.NDArray[np.bool_]:
    """Which rows some array cannot encode: one pass over what was given."""
    bad = np.zeros(len(touched.row_ids), np.bool_)

    def check(start: int, stop: int) -> None:
        for name, spec in touched.specs.items():
            bad[start:stop] |= unencodable(spec, touched.values[name][start:stop])

    workers.run_blocks(check, len(bad), ENCODE_ROWS)
    return bad


def _encode_add(encoded: EncodedRows, mirror: TableCodes, touched: TouchedTable, workers: Workers) -> int:
    """Add the ``add`` list; returns the change of the digest. Rows whose every code is unchanged leave."""
    specs = encoded.specs
    flags = np.zeros(len(touched.row_ids), np.uint8)
    arrays: dict[str, Array] = {}
    change = 0
    for name, spec in specs.items():
        arrays[name], changed = _differences(spec, mirror, touched, flags, workers)
        change += changed
    if (flags == _BAD).any():
        raise FoundBadRows
    row_ids = touched.row_ids
    keep = flags == 1
    if not keep.all():
        kept = np.flatnonzero(keep)
        row_ids = row_ids[kept]
        arrays = {name: array.take(kept, axis=0) for name, array in arrays.items()}
    if len(row_ids):
        encoded.lists["add"] = EncodedList(row_ids, {n: stored_shape(specs[n], a) for n, a in arrays.items()})
    return change


def _differences(
    spec: ArraySpec, mirror: TableCodes, touched: TouchedTable, flags: npt.NDArray[np.uint8], workers: Workers
) -> tuple[Array, int]:
    """Return the differences to the mirror in the narrowest of int16 and int32, and the digest's change."""
    values = touched.values[spec.name]
    multipliers = spec.multipliers
    held = mirror.arrays[spec.name]

    def encode(out: Array, start: int, stop: int) -> tuple[int, int]:
        block = np.ascontiguousarray(values[start:stop])
        rows = touched.mirrored[start:stop]
        if isinstance(spec.encoding, Lattice):
            is_coded = holds_codes(spec, block)
            floats, scale = (block, np.float32(1)) if is_coded else (widths.to_float32(block, spec.dtype), spec.scale)
            largest, _, _, change = kernels.lattice_delta(
                floats, rows, held, mirror.start, scale, multipliers, out[start:stop], flags[start:stop]
            )
        else:
            flag_not_finite(block, spec, flags[start:stop])
            bits = widths.as_bits(block, spec.dtype)
            largest, _, _, change = kernels.float_bits_delta(
                bits, rows, held, mirror.start, spec.bit_shift, multipliers, out[start:stop], flags[start:stop]
            )
        return int(largest), int(change)

    for dtype, most in _WIDTHS:
        out: Array = np.empty(values.shape, dtype)
        results = workers.run_blocks(partial(encode, out), len(values), ENCODE_ROWS)
        if max(largest for largest, _ in results) <= most:
            break
    return out, sum(change for _, change in results)


def arriving(specs: Mapping[str, ArraySpec], encoded: EncodedList) -> int:
    """What ``set`` rows add to the digest."""
    total = 0
    for name, spec in specs.items():
        if spec.is_additive:
            total += digest.digest_of_rows(
                np.ascontiguousarray(encoded.arrays[name]), encoded.row_ids, spec.multipliers, spec.presence()
            )
    return total


def escaping(specs: Mapping[str, ArraySpec], encoded: EncodedList) -> int:
    """What ``escape`` rows add to the digest."""
    total = 0
    for name, spec in specs.items():
        if spec.is_additive:
            values = as_columns(encoded.arrays["values" if name == "codes" else name])
            bits = escape_bits(values, spec.dtype)
            total += digest.digest_of_rows(bits, encoded.row_ids, spec.multipliers, spec.presence(escape=True))
    return total


def _leaving(mirror: TableCodes, rows: RowIds) -> int:
    """What ``rows`` stop to add to the digest: minus their present contribution."""
    total = 0
    coded = rows[mirror.is_coded(rows)]
    multipliers = {name: mirror.specs[name].multipliers for name in mirror.arrays}
    for name, held in mirror.arrays.items():
        presence = mirror.specs[name].presence()
        total += int(kernels.digest_gathered(held, coded, mirror.start, multipliers[name], presence))
    if len(mirror.escapes.rows):
        leaving = np.isin(mirror.escapes.rows, rows, assume_unique=True)
        gone = type(mirror.escapes)(
            mirror.escapes.rows[leaving], {n: v[leaving] for n, v in mirror.escapes.values.items()}
        )
        total += mirror.escape_digest(gone, multipliers)
    return -total


def options_on_bad_rows(options: TableOptions | None) -> OnBadRows:
    """Return the options' rule for rows that cannot be encoded; ``refuse`` without options."""
    return "refuse" if options is None else options.nonfinite
