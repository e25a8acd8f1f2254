"""Read a table into memory: where the codes live while a chain is replayed, window by window.

fp32 outputs hold their own codes (int32 of the same memory), a mirror holds them for a trainer, anything else goes
through windows of bounded size. So restoring needs the target, the mirror if asked for, and chunks in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.digest import add_digests
from cnr_store.encodings.widths import carrier, from_float32, to_float32
from cnr_store.read.direct_load import is_direct, load_directly
from cnr_store.read.plan import (
    Columns,
    TablePlan,
    by_columns,
    check_digest,
    check_row_slots,
    clip,
    compare_digest,
    expected_digest,
)
from cnr_store.read.prefetch import chunks_of, prefetching
from cnr_store.read.replay import ChunkReader, Holds, finish, named_rows, replay
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import ABSENT, CODED, Allocate, Array, ArraySpec, TableCodes, array_specs
from cnr_store.segment.decoded import Scratch
from cnr_store.segment.reader import SegmentReader
from cnr_store.types import RowIds, SlotsRule

WINDOW_BYTES = 64 * 1024 * 1024
"""Codes held at once when an output cannot hold its own."""


def read_range(
    readers: Sequence[SegmentReader],
    plan: TablePlan,
    outputs: Mapping[str, Array],
    workers: Workers,
    slots_rule: SlotsRule = "exact",
) -> list[str]:
    """Read the plan's rectangle into ``outputs``: array name to (rows, width) of the array's float dtype.

    Blocks. The state digest is checked when the range covers whole parts and every mirrored array is read. Returns
    the names of the arrays that were read: ``slots_rule`` may leave some out.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
        ``outputs`` then hold undefined values.
    Unsupported
        One-dimensional slots of columns that were not saved together, unless ``slots_rule`` says what to do.
    """
    wanted = {name: outputs[name] for name in check_row_slots(plan, outputs, slots_rule)}
    if len(by_columns(plan)) > 1:
        _read_intervals(readers, plan, wanted, workers)
        return list(wanted)
    if is_direct(plan):
        check_digest(plan, [(plan.columns, load_directly(readers, plan, wanted, workers))], set(wanted))
        return list(wanted)
    specs = array_specs(plan.schema, plan.columns)
    apart = [specs[name] for name, out in wanted.items() if not _codes_fit(specs[name], out)]

    def hold(_: TablePlan, start: int, stop: int) -> dict[str, Array]:
        return {
            name: out[start - plan.start : stop - plan.start].view(specs[name].memory_dtype)
            if _codes_fit(specs[name], out)
            else np.empty((stop - start, out.shape[1]), specs[name].memory_dtype)
            for name, out in wanted.items()
        }

    total = 0
    for _, codes in _replayed(readers, plan, _windows(plan, apart), hold, workers):
        pieces = {name: out[codes.start - plan.start : codes.stop - plan.start] for name, out in wanted.items()}
        total = add_digests(total, finish(codes, pieces, workers, with_digest=True))
    check_digest(plan, [(plan.columns, total)], set(wanted))
    return list(wanted)


def read_mirror(
    readers: Sequence[SegmentReader],
    plan: TablePlan,
    outputs: Mapping[str, Array],
    workers: Workers,
    allocate: Allocate,
    slots_rule: SlotsRule = "exact",
) -> TableCodes | None:
    """Read the plan's rectangle and keep its codes: returns the mirror, fills ``outputs`` (may be empty).

    None, with ``outputs`` filled all the same, when no delta could add to the codes: a row is in another state in one
    column interval than in the next, or one-dimensional slots are of columns that were not saved together.

    Memory beyond the outputs: the mirror, in ``allocate``'s memory.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    Unsupported
        As `read_range`; also for slots that are not among ``outputs``, because a mirror holds every slot.
    """
    if plan.row_slots and not plan.has_own_row_slots:
        check_row_slots(plan, [f"slots/{slot}" for slot in plan.row_slots], slots_rule)
        if outputs:
            read_range(readers, plan, outputs, workers, slots_rule)
        return None
    if len(by_columns(plan)) > 1:
        joined = _JoinedMirror(plan, allocate)
        _read_intervals(readers, plan, outputs, workers, mirror=joined)
        return joined.codes
    specs = array_specs(plan.schema, plan.columns)
    names = tuple(specs) if specs.are_additive else ()
    codes = TableCodes.allocate(
        plan.schema, plan.start, plan.stop, names=names, mirror=True, allocate=allocate, columns=plan.columns
    )
    with prefetching(readers, chunks_of(plan, list(codes.arrays)), workers) as sources:
        replay(sources, plan, codes, workers)
    mirrored = {name: out for name, out in outputs.items() if name in codes.arrays}
    total = finish(codes, mirrored, workers, with_digest=True)
    check_digest(plan, [(plan.columns, total)], set(codes.arrays))
    rest = {name: out for name, out in outputs.items() if name not in codes.arrays}
    if rest:
        read_range(readers, plan, rest, workers)
    return codes


def read_rows(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    rows: RowIds,
    outputs: Mapping[str, Array],
    workers: Workers,
    slots_rule: SlotsRule = "exact",
) -> None:
    """Read ``rows`` (sorted, unique) into ``outputs`` (len(rows), width); only chunks that hold one are read."""
    wanted = {name: outputs[name] for name in check_row_slots(plan, outputs, slots_rule)}
    _read_intervals(readers, plan, wanted, workers, rows=rows)


def read_keyed(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    names: Sequence[str],
    workers: Workers,
    wanted: RowIds | None = None,
    holds: Holds | None = None,
) -> tuple[RowIds, dict[str, Array]]:
    """Return the keys that a hashed table has, sorted, and their values in the arrays ``names``. Blocks.

    Of the keys ``wanted`` (sorted, unique) alone if they are given, or of those that ``holds`` returns True for. The
    state digest is checked if all keys and every mirrored array are read. Memory: the values of what is returned,
    twice, and those of deleted keys.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    """
    specs = array_specs(plan.schema)
    keys, codes = replay_keyed(readers, plan, names, workers, wanted, holds)
    if wanted is None and holds is None:
        check_keyed_digest(plan, keys, codes, workers)
    floats = {
        name: held.view(carrier(specs[name].dtype))
        if held.itemsize == carrier(specs[name].dtype).itemsize
        else np.empty(held.shape, carrier(specs[name].dtype))
        for name, held in codes.arrays.items()
    }
    finish(codes, floats, workers, with_digest=False)
    there = np.flatnonzero(codes.track_status(CODED) != ABSENT)
    return keys[there], {name: array[there] for name, array in floats.items()}


def check_keyed_digest(plan: TablePlan, keys: RowIds, codes: TableCodes, workers: Workers) -> None:
    """Compare the state digest of all keys of a hashed table with the version's, if it names one.

    Raises
    ------
    CorruptStore
    """
    expected = expected_digest(plan, set(codes.arrays))
    if expected is not None:
        compare_digest(plan, codes.digest_by_key(keys, workers), expected)


def replay_keyed(
    readers: Sequence[ChunkReader], plan: TablePlan, names: Sequence[str], workers: Workers,
    wanted: RowIds | None = None, holds: Holds | None = None, *, mirror_in: Allocate | None = None,
) -> tuple[RowIds, TableCodes]:  # fmt: skip
    """Return the keys that the chain of a hashed table names, sorted, and their codes: deleted ones are absent. Blocks.

    Parameters are those of `read_keyed`. ``mirror_in``: memory for codes as narrow as a mirror's.
    """
    keys = named_rows(readers, plan, holds) if wanted is None else wanted
    codes = TableCodes.allocate(
        plan.schema, 0, len(keys), names=tuple(names), mirror=mirror_in is not None, allocate=mirror_in or np.zeros
    )  # fmt: skip
    replay(readers, plan, codes, workers, keys)
    return keys, codes


def read_codes(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    workers: Workers,
    take: Callable[[TableCodes, bool], int],
    *,
    memory: Callable[[Columns], Array] | None = None,
    rows: RowIds | None = None,
) -> None:
    """Replay the weights of the plan's rectangle, without slots, and hand out their codes a window at a time; blocks.

    Of a window of rows one elementary column interval comes after the other: in one of them a row has one status.

    Parameters
    ----------
    take
        Gets the codes of a window, with their status and escape rows, and whether their state digest is wanted; returns
        that digest, or anything.
    memory
        Columns of an elementary interval to where the codes of all its rows go: C-contiguous, of the array's held
        dtype, or int16 where codes are expected to fit; its content does not matter. There is one window then, of all
        rows. What ``take`` gets is another array, of int32, where int16 was too narrow.

        Left out, codes are in memory of this function's own, at most `WINDOW_BYTES`, which goes with ``take``.
    rows
        Sorted, unique: position i of the codes is row ``rows[i]``. The plan was made for them; there is one window, and
        no digest is wanted.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
        Also for a wrong state digest, after the last window: it is known where the rectangle is a union of whole parts,
        and no slot counts in it.
    """
    specs = {piece.columns: array_specs(plan.schema, piece.columns)["codes"] for piece in by_columns(plan)}
    with_digest = rows is None and expected_digest(plan, {"codes"}) is not None
    totals = dict.fromkeys(specs, 0)
    scratch = Scratch()
    windows = [(plan.start, plan.stop)]
    if memory is None and rows is None:
        windows = _windows(plan, [max(specs.values(), key=lambda spec: spec.width)])

    def hold(piece: TablePlan, start: int, stop: int) -> dict[str, Array]:
        if memory is not None:
            return {"codes": memory(piece.columns)}
        spec = specs[piece.columns]
        held = scratch.take((stop - start, spec.width), spec.memory_dtype)
        held[...] = 0
        return {"codes": held}

    for piece, codes in _replayed(readers, plan, windows, hold, workers, rows):
        totals[piece.columns] = add_digests(totals[piece.columns], take(codes, with_digest))
    if with_digest:
        check_digest(plan, list(totals.items()), {"codes"})


def _replayed(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    windows: Sequence[tuple[int, int]],
    hold: Callable[[TablePlan, int, int], dict[str, Array]],
    workers: Workers,
    rows: RowIds | None = None,
) -> Iterator[tuple[TablePlan, TableCodes]]:
    """Replay the plan a window of rows at a time, and of that one elementary column interval after the other.

    Gives each interval's plan and codes; ``hold`` says where these are. With ``rows`` (sorted, unique) there is one
    window: position i of the codes is row ``rows[i]``.
    """
    for start, stop in windows if rows is None else [(0, len(rows))]:
        for piece in by_columns(plan):
            codes = TableCodes(plan.schema, start, stop, hold(piece, start, stop), columns=piece.columns)
            is_whole = rows is not None or (start, stop) == (plan.start, plan.stop)
            chosen = piece if is_whole else clip(piece, start, stop)
            with prefetching(readers, chunks_of(chosen, list(codes.arrays)), workers) as sources:
                replay(sources, chosen, codes, workers, rows)
            yield piece, codes


def _read_intervals(
    readers: Sequence[ChunkReader],
    plan: TablePlan,
    outputs: Mapping[str, Array],
    workers: Workers,
    *,
    mirror: _JoinedMirror | None = None,
    rows: RowIds | None = None,
) -> None:
    """Read a rectangle, or ``rows`` of it, that may have several column intervals."""
    pieces = by_columns(plan)
    specs = {piece.columns: array_specs(plan.schema, piece.columns) for piece in pieces}
    names = set(outputs) if mirror is None else {*outputs, *mirror.names}
    widest = max(pieces, key=lambda piece: piece.columns[1] - piece.columns[0])
    totals = dict.fromkeys((piece.columns for piece in pieces), 0)
    first_row = plan.start if rows is None else 0

    def hold(piece: TablePlan, start: int, stop: int) -> dict[str, Array]:
        kinds = {name: specs[piece.columns][name] for name in names}
        return {name: np.zeros((stop - start, spec.width), spec.memory_dtype) for name, spec in kinds.items()}

    windows = _windows(plan, [specs[widest.columns][name] for name in names])
    for piece, codes in _replayed(readers, plan, windows, hold, workers, rows):
        if piece.columns == pieces[0].columns:
            window = _Window(
                plan, {name: out[codes.start - first_row : codes.stop - first_row] for name, out in outputs.items()}
            )
        if mirror is not None:
            mirror.take(codes)
        targets = window.outputs(piece)
        found = finish(codes, targets, workers, with_digest=rows is None)
        totals[piece.columns] = add_digests(totals[piece.columns], found)
        window.count(piece, targets)
        if piece.columns == pieces[-1].columns:
            window.finish()
    if rows is None:
        check_digest(plan, list(totals.items()), names)


class _Window:
    """The outputs of a window of rows, filled column interval by column interval; one-dimensional slots are averaged.

    The mean is over the stored ranges that the plan's columns meet, each weighted by how many of its columns they are.
    """

    def __init__(self, plan: TablePlan, outputs: Mapping[str, Array]) -> None:
        self._plan = plan
        self._outputs = outputs
        self._specs = array_specs(plan.schema, plan.columns)
        several = len(by_columns(plan)) > 1
        self._sums: dict[str, npt.NDArray[np.float64]] = {
            name: np.zeros(out.shape) for name, out in outputs.items() if several and self._specs[name].is_vector
        }

    def outputs(self, piece: TablePlan) -> dict[str, Array]:
        """Return where an interval's values go: columns of the outputs, or fresh memory for what is averaged."""
        low, high = (column - self._plan.columns[0] for column in piece.columns)
        return {
            name: np.empty_like(out)
            if name in self._sums
            else (out if self._specs[name].is_vector else out[:, low:high])
            for name, out in self._outputs.items()
        }

    def count(self, piece: TablePlan, filled: Mapping[str, Array]) -> None:
        """Take the slots of an interval into the mean."""
        width = piece.columns[1] - piece.columns[0]
        with np.errstate(invalid="ignore"):
            for name, total in self._sums.items():
                total += to_float32(filled[name], self._specs[name].dtype) * np.float64(width)

    def finish(self) -> None:
        """Write the means."""
        width = self._plan.columns[1] - self._plan.columns[0]
        for name, total in self._sums.items():
            self._outputs[name][...] = from_float32((total / width).astype(np.float32), self._specs[name].dtype)


class _JoinedMirror:
    """A mirror put together from column intervals, while every row is in the same state in all of them.

    ``codes`` is None from the first difference on.
    """

    def __init__(self, plan: TablePlan, allocate: Allocate) -> None:
        specs = array_specs(plan.schema, plan.columns)
        self.names = tuple(specs)
        self.codes: TableCodes | None = TableCodes.allocate(
            plan.schema, plan.start, plan.stop, names=self.names, mirror=True, allocate=allocate, columns=plan.columns
        )
        self._window: list[TableCodes] = []

    def take(self, codes: TableCodes) -> None:
        """Copy the codes of a window and column interval; those of one window come in the order of their columns."""
        wide = self.codes
        if wide is None:
            return
        if codes.columns[0] == wide.columns[0]:
            self._window = []
        elif not _same_states(self._window[0], codes):
            self.codes = None
            return
        rows = slice(codes.start - wide.start, codes.stop - wide.start)
        columns = slice(codes.columns[0] - wide.columns[0], codes.columns[1] - wide.columns[0])
        for name in self.names:
            held = codes.arrays[name]
            limits = np.iinfo(wide.arrays[name].dtype)
            if held.size and not limits.min <= held.min() <= held.max() <= limits.max:
                wide.widen(name)
            wide.arrays[name][rows, columns] = held
        # What later intervals are compared with: states and escape rows, not the codes.
        self._window.append(_without_codes(codes))
        if codes.columns[1] == wide.columns[1]:
            self._settle(wide, rows)

    def _settle(self, wide: TableCodes, rows: slice) -> None:
        first = self._window[0]
        if first.status is not None and first.status.any():
            wide.track_status(CODED)[rows] = first.status
        if len(first.escapes.rows):
            values = {name: np.hstack([one.escapes.values[name] for one in self._window]) for name in self.names}
            wide.escapes.put(first.escapes.rows, values)


def _without_codes(codes: TableCodes) -> TableCodes:
    states = TableCodes(codes.schema, codes.start, codes.stop, {}, columns=codes.columns)
    states.status, states.escapes = codes.status, codes.escapes
    return states


def _same_states(a: TableCodes, b: TableCodes) -> bool:
    rows = np.zeros(0, np.uint8)
    left, right = (rows if one.status is None or not one.status.any() else one.status for one in (a, b))
    return bool(np.array_equal(left, right))


def _windows(plan: TablePlan, apart: Iterable[ArraySpec]) -> list[tuple[int, int]]:
    """Row ranges whose codes fit the window: a chunk that crosses windows is decoded in each, so they are large."""
    row_bytes = sum(spec.memory_dtype.itemsize * spec.width for spec in apart)
    span = max(1, WINDOW_BYTES // row_bytes) if row_bytes else max(1, plan.stop - plan.start)
    ranges = blocks(plan.stop - plan.start, span) or [(0, 0)]
    return [(plan.start + low, plan.start + high) for low, high in ranges]


def _codes_fit(spec: ArraySpec, out: Array) -> bool:
    """Whether the codes fit the output's own memory; the others are held apart, a window at a time."""
    return bool(out.itemsize == spec.memory_dtype.itemsize and out.flags.c_contiguous)
