"""Touched rows of many tables: encoded, and moved into their mirrors, by one call for all tables that are alike.

A delta of a few rows in each of a thousand tables costs what its rows do: a call of numpy or a kernel takes longer to
begin than a hundred rows take (`format_spec/decisions/0027`). What is not small or plain goes table by table, through
`delta_rows`, which defines what each of these calls does. Pure computation on threads, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import digest, table_kernels
from cnr_store.runtime.addresses import address_of
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Array, ArraySpec, TableCodes
from cnr_store.types import FloatBits, Lattice
from cnr_store.write.delta_rows import StagedRows, TouchedTable, finish_move, stage_rows, wraps
from cnr_store.write.encode import ENCODE_ROWS, StagedList, columns_of

_MOST = 2**15 - 1


class _Differences(NamedTuple):
    """One array of tables that are encoded together: ``shift`` of float_bits, None of a lattice."""

    name: str
    width: int
    is_vector: bool
    shift: int | None
    columns: tuple[int, int]


def stage_tables(touched: Sequence[TouchedTable], *, absolute: bool, workers: Workers) -> list[StagedRows]:
    """Return what `delta_rows.stage_rows` does of each table. Blocks; raises what that raises."""
    together: dict[tuple[_Differences, ...], list[int]] = {}
    for number, one in enumerate(touched):
        arrays = None if absolute else _differences_of(one)
        if arrays is not None:
            together.setdefault(arrays, []).append(number)
    runs = [
        (arrays, run)
        for arrays, numbers in together.items()
        if len(numbers) > 1
        for run in _runs(numbers, [len(touched[number].given.rows) for number in numbers])
    ]
    results = workers.run(partial(_stage_run, arrays, [touched[k] for k in run]) for arrays, run in runs)
    staged: list[StagedRows | None] = [None] * len(touched)
    for (_, run), found in zip(runs, results, strict=True):
        for number, rows in zip(run, found, strict=True):
            staged[number] = rows
    return [
        stage_rows(one, absolute=absolute, workers=workers) if rows is None else rows
        for one, rows in zip(touched, staged, strict=True)
    ]


def _runs(items: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Cut into runs of about `ENCODE_ROWS` rows: tasks of a thread."""
    runs: list[list[int]] = []
    left = 0
    for item, count in zip(items, counts, strict=True):
        if left <= 0:
            runs.append([])
            left = ENCODE_ROWS
        runs[-1].append(item)
        left -= count
    return runs


def _differences_of(one: TouchedTable) -> tuple[_Differences, ...] | None:
    """The arrays of a table whose rows can be encoded with others; None where they go alone."""
    mirror = one.mirror
    if mirror is None or mirror.status is not None or not 0 < len(one.given.rows) < ENCODE_ROWS:
        return None
    arrays = []
    for name, spec in one.specs.items():
        values, held, encoding = one.given.values[name], mirror.arrays.get(name), spec.encoding
        if not spec.is_additive or spec.dtype != "float32" or values.dtype != np.float32 or held is None:
            return None
        if not (values.flags.c_contiguous and held.flags.c_contiguous):
            return None
        shift = spec.bit_shift if isinstance(encoding, FloatBits) else None
        arrays.append(_Differences(name, spec.width, spec.is_vector, shift, spec.columns))
    return tuple(arrays)


def _stage_run(arrays: Sequence[_Differences], run: Sequence[TouchedTable]) -> list[StagedRows | None]:
    """Encode tables with the same arrays; None for one that has to go alone: bad rows, or differences beyond int16."""
    rows = np.concatenate([one.given.rows for one in run])
    mirrors = [one.mirror for one in run if one.mirror is not None]
    counts = np.array([len(one.given.rows) for one in run], np.int64)
    starts = np.cumsum(counts) - counts
    flags = np.zeros(len(rows), np.uint8)
    change, most = np.zeros(len(run), np.uint64), np.zeros(len(run), np.int64)
    coded: dict[str, Array] = {}
    for array in arrays:
        name = array.name
        values = [address_of(one.given.values[name]) for one in run]
        parts = _lines(starts, counts, values, name, mirrors)
        out, found = np.empty((len(rows), array.width), np.int16), np.empty((len(run), 2), np.int64)
        multipliers = run[0].specs[name].multipliers
        if array.shift is None:
            scales = np.array([_scale(one.specs[name]) for one in run], np.float32)
            table_kernels.lattice_deltas(parts, rows, scales, multipliers, out, flags, found)
        else:
            table_kernels.float_bits_deltas(parts, rows, array.shift, multipliers, out, flags, found)
        change += found[:, 1].view(np.uint64)
        np.maximum(most, found[:, 0], out=most)
        coded[name] = out.reshape(-1) if array.is_vector else out
    alone = (most > _MOST) | (np.maximum.reduceat(flags, starts) > 1)
    is_kept = (flags == 1) & ~np.repeat(alone, counts)
    if not is_kept.all():
        kept = np.flatnonzero(is_kept)
        counts = np.add.reduceat(is_kept, starts, dtype=np.int64)
        rows, coded = rows[kept], {name: array[kept] for name, array in coded.items()}
    joined = StagedList(rows, coded)
    staged: list[StagedRows | None] = []
    start = 0
    for one, stop, goes_alone, changed in zip(
        run, np.cumsum(counts).tolist(), alone.tolist(), change.tolist(), strict=True
    ):
        if goes_alone:
            staged.append(None)
        else:
            after = None if one.base_digest is None else digest.add_digests(one.base_digest, changed)
            lists = {"add": joined.between(start, stop)} if stop > start else {}
            staged.append(StagedRows(one.specs, lists, after, joined, start))
        start = stop
    return staged


def _lines(
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: Sequence[int] | int,
    name: str,
    mirrors: Sequence[TableCodes],
) -> npt.NDArray[np.int64]:
    """The ``parts`` of `table_kernels` for an array of the mirrors."""
    parts = np.empty((len(mirrors), table_kernels.PART_FIELDS), np.int64)
    parts[:, 0], parts[:, 1], parts[:, 2] = starts, counts, values
    parts[:, 3:] = [mirror.place_of(name) for mirror in mirrors]
    return parts


def _scale(spec: ArraySpec) -> float:
    assert isinstance(spec.encoding, Lattice)
    return spec.encoding.scale


def apply_tables(changes: Iterable[tuple[StagedRows, TableCodes]], workers: Workers) -> None:
    """Move mirrors to what was staged, as `StagedRows.apply` does for each; call once, after the commit has won.

    Blocks; runs on ``workers``. Of one mirror all changes are in other rows.
    """
    together: dict[int, list[tuple[StagedRows, TableCodes]]] = {}
    for staged, mirror in changes:
        if staged.run is None or not all(_can_take(mirror, name) for name in mirror.arrays):
            staged.apply(mirror, workers)
        elif staged.lists:
            together.setdefault(id(staged.run), []).append((staged, mirror))
    for own in together.values():
        _add_together(own)


def _can_take(mirror: TableCodes, name: str) -> bool:
    return mirror.arrays[name].flags.c_contiguous and not wraps(mirror, name)


def _add_together(own: Sequence[tuple[StagedRows, TableCodes]]) -> None:
    """Move mirrors to their rows of one run."""
    run = own[0][0].run
    assert run is not None  # asked before
    mirrors = [mirror for _, mirror in own]
    starts = np.array([staged.start for staged, _ in own], np.int64)
    counts = np.array([len(staged.lists["add"].rows) for staged, _ in own], np.int64)
    reached = np.empty(len(own), np.int64)
    for name in mirrors[0].arrays:
        codes = columns_of(run.arrays[name])
        table_kernels.add_to_mirrors(_lines(starts, counts, 0, name, mirrors), run.rows, codes, reached)
        for number in np.flatnonzero(reached >= 0).tolist():
            added, mirror = own[number][0].lists["add"], mirrors[number]
            finish_move(mirror, name, added, [(int(reached[number]), len(added.rows))], adds=True)
