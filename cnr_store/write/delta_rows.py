"""Turn rows of a table into the row lists of a part: differences to the mirror, absolute codes, escapes.

Pure computation on threads, no I/O. Nothing here moves a mirror: `StagedRows.apply` does, once the commit has won
(design, section 4, rule 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.encodings import digest, float_bits, kernels, row_kernels, widths
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED, Array, ArraySpec, TableCodes, escape_bits
from cnr_store.types import Lattice, RowIds
from cnr_store.write.encode import (
    ENCODE_ROWS,
    FoundBadRows,
    Given,
    OnBadRows,
    StagedList,
    columns_of,
    encode_absolute,
    encode_rows,
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
    base_digest
        Digest of that state.
    on_bad_rows
        Rows with NaN, Inf or codes beyond the range: raise, or keep them as exact rows.
    """

    table: str
    specs: Mapping[str, ArraySpec]
    mirror: TableCodes | None
    given: Given
    base_digest: int | None
    on_bad_rows: OnBadRows


_BAD = kernels.BAD_ROW
_WIDTHS = ((np.dtype(np.int16), 2**15 - 1), (np.dtype(np.int32), 2**31 - 1))
"""What differences are stored in, and the largest of each."""


class StagedRows(msgspec.Struct, eq=False, gc=False):
    """What one save does to a table's rows: lists by operation, and the state digest they lead to.

    ``specs``: the arrays of the rows. ``digest`` is None for tables without a mirror. ``run``: the ``add`` lists of
    several tables end to end, among them the one that this has, from row ``start`` on.
    """

    specs: Mapping[str, ArraySpec]
    lists: dict[str, StagedList] = {}
    digest: int | None = None
    run: StagedList | None = None
    start: int = 0

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
                values = {"codes" if n == "values" else n: columns_of(a) for n, a in staged.arrays.items()}
                mirror.escapes.put(staged.rows, {name: values[name] for name in mirror.arrays})


def stage_rows(touched: TouchedTable, *, absolute: bool, workers: Workers) -> StagedRows:
    """Encode touched rows against the mirror: ``add`` where it has codes, else ``set``; unchanged rows leave.

    Parameters
    ----------
    absolute
        Write ``set`` rows although there is a mirror (one_shot deltas apply to the baseline, not to the mirror).

    Raises
    ------
    NonFiniteValues
        Names the table and the first row.
    """
    specs, given = touched.specs, touched.given
    try:
        return _stage(StagedRows(specs), touched, given, absolute, workers)
    except FoundBadRows:
        bad = _find_bad(specs, given, workers)
    rows = given.rows[bad]
    if touched.on_bad_rows == "refuse":
        raise refused_rows(touched.table, int(rows[0]), len(rows))
    staged = StagedRows(specs, {"escape": escape_list(specs, given.take(bad))})
    return _stage(staged, touched, given.take(~bad), absolute, workers)


def _stage(staged: StagedRows, touched: TouchedTable, given: Given, absolute: bool, workers: Workers) -> StagedRows:
    specs, mirror, base_digest = touched.specs, touched.mirror, touched.base_digest
    change = _leaving(mirror, staged.lists["escape"].rows) if "escape" in staged.lists and mirror is not None else 0
    coded = mirror.is_coded(given.rows) if mirror is not None and not absolute else np.zeros(len(given.rows), np.bool_)
    if coded.all() and len(given.rows) and mirror is not None:
        change += _stage_add(staged, mirror, given, workers)
    else:
        if coded.any() and mirror is not None:
            change += _stage_add(staged, mirror, given.take(coded), workers)
            given = given.take(~coded)
        if len(given.rows):
            if mirror is not None:
                change += _leaving(mirror, given.rows)
            staged.lists["set"] = encode_rows(specs, given, workers)
            if mirror is not None:
                change += _arriving(specs, staged.lists["set"])
    if mirror is not None and base_digest is not None:
        if "escape" in staged.lists:
            change += _escaped(specs, staged.lists["escape"])
        staged.digest = digest.add_digests(base_digest, change & ((1 << 64) - 1))
    return staged


def stage_delete(mirror: TableCodes | None, rows: RowIds, base_digest: int | None) -> StagedRows:
    """Stage the deletion of sorted ``rows``; rows that are absent already stay in the list, harmless."""
    change = 0 if mirror is None else _leaving(mirror, rows)
    after = None if base_digest is None else digest.add_digests(base_digest, change & ((1 << 64) - 1))
    return StagedRows({}, {"delete": StagedList(rows, {})}, after)


def _find_bad(specs: Mapping[str, ArraySpec], given: Given, workers: Workers) -> npt.NDArray[np.bool_]:
    """Which rows some array cannot encode: one pass over what was given."""
    bad = np.zeros(len(given.rows), np.bool_)

    def check(start: int, stop: int) -> None:
        for name, spec in specs.items():
            bad[start:stop] |= unencodable(spec, given.values[name][start:stop])

    workers.run_blocks(check, len(given.rows), ENCODE_ROWS)
    return bad


def _stage_add(
    staged: StagedRows,
    mirror: TableCodes,
    given: Given,
    workers: Workers,
) -> int:
    """Stage ``add`` rows; returns the change of the digest. Rows whose every code is unchanged leave."""
    specs = staged.specs
    count = len(given.rows)
    flags = np.zeros(count, np.uint8)
    if not all(spec.is_additive for spec in specs.values()):
        flags |= 1
    arrays: dict[str, Array] = {}
    change = 0
    for name, spec in specs.items():
        if not spec.is_additive:
            arrays |= encode_absolute(spec, given.values[name], workers)
            continue
        arrays[name], changed = _differences(spec, mirror, given, flags, workers)
        change += changed
    if (flags == _BAD).any():
        raise FoundBadRows
    rows = given.rows
    keep = flags == 1
    if not keep.all():
        kept = np.flatnonzero(keep)
        rows = rows[kept]
        arrays = {name: array.take(kept, axis=0) for name, array in arrays.items()}
    if len(rows):
        staged.lists["add"] = StagedList(rows, {n: stored_shape(specs[n], a) for n, a in arrays.items()})
    return change


def _differences(
    spec: ArraySpec,
    mirror: TableCodes,
    given: Given,
    flags: npt.NDArray[np.uint8],
    workers: Workers,
) -> tuple[Array, int]:
    """Return the differences to the mirror in the narrowest of int16 and int32, and the digest's change."""
    values = given.values[spec.name]
    multipliers = spec.multipliers
    held = mirror.arrays[spec.name]

    def encode(out: Array, start: int, stop: int) -> tuple[int, int]:
        block = np.ascontiguousarray(values[start:stop])
        rows = given.rows[start:stop]
        if isinstance(spec.encoding, Lattice):
            is_coded = holds_codes(spec, block)
            given_rows, scale = (
                (block, np.float32(1)) if is_coded else (widths.to_float32(block, spec.dtype), spec.scale)
            )
            largest, _, _, change = kernels.lattice_delta(
                given_rows, rows, held, mirror.start, scale, multipliers, out[start:stop], flags[start:stop]
            )
        else:
            flag_not_finite(block, spec, flags[start:stop])
            bits = float_bits.as_bits(block, spec.dtype)
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


def _arriving(specs: Mapping[str, ArraySpec], staged: StagedList) -> int:
    """What ``set`` rows add to the digest."""
    total = 0
    for name, spec in specs.items():
        if spec.is_additive:
            total += digest.digest_of_rows(
                np.ascontiguousarray(staged.arrays[name]), staged.rows, spec.multipliers, spec.presence()
            )
    return total


def _escaped(specs: Mapping[str, ArraySpec], staged: StagedList) -> int:
    """What ``escape`` rows add to the digest."""
    total = 0
    for name, spec in specs.items():
        if spec.is_additive:
            values = columns_of(staged.arrays["values" if name == "codes" else name])
            bits = escape_bits(values, spec.dtype)
            total += digest.digest_of_rows(bits, staged.rows, spec.multipliers, spec.presence(escape=True))
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


def _move(mirror: TableCodes, name: str, staged: StagedList, workers: Workers, *, adds: bool) -> None:
    codes = np.ascontiguousarray(columns_of(staged.arrays[name]))
    held = mirror.arrays[name]
    kernel: Callable[..., int] = row_kernels.add_codes if adds else row_kernels.put_codes
    is_wrapping = adds and wraps(mirror, name)

    def move(start: int, stop: int) -> int:
        """Return the position that an int16 mirror cannot hold, or ``stop``."""
        rows, block = staged.rows[start:stop], codes[start:stop]
        if is_wrapping:
            row_kernels.add_codes_wrapping(held, rows, mirror.start, block)
            return stop
        done = int(kernel(held, rows, mirror.start, block, 0))
        return stop if done < 0 else start + done

    ranges = blocks(len(codes), ENCODE_ROWS)
    reached = workers.run_blocks(move, len(codes), ENCODE_ROWS)
    rest = [(done, stop) for done, (_, stop) in zip(reached, ranges, strict=True) if done < stop]
    if rest:
        finish_move(mirror, name, staged, rest, adds=adds)


def wraps(mirror: TableCodes, name: str) -> bool:
    """Return whether differences of an array are modulo 2^32, so that a sum never leaves its mirror's range."""
    return mirror.arrays[name].dtype == np.int32 and not isinstance(mirror.specs[name].encoding, Lattice)


def finish_move(
    mirror: TableCodes, name: str, staged: StagedList, rest: Sequence[tuple[int, int]], *, adds: bool
) -> None:
    """Widen a mirror's array and move positions ``(start, stop)`` of a list, at whose first the kernel stopped."""
    codes = np.ascontiguousarray(columns_of(staged.arrays[name]))
    held = mirror.arrays[name]
    for done, _ in rest if adds else []:
        # The kernel stopped after it wrapped this row in int16; wrapping back restores it.
        held[staged.rows[done] - mirror.start] -= codes[done].astype(np.int16)
    mirror.widen(name)
    kernel: Callable[..., int] = row_kernels.add_codes if adds else row_kernels.put_codes
    for start, stop in rest:
        kernel(mirror.arrays[name], staged.rows[start:stop], mirror.start, codes[start:stop], 0)


def options_on_bad_rows(options: TableOptions | None) -> OnBadRows:
    """Return the options' rule for rows that cannot be encoded; ``refuse`` without options."""
    return "refuse" if options is None else options.nonfinite
