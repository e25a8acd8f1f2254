"""The row algebra: what a part's rows mean, how two parts in chain order become one, what they do to a state.

The oracle that writers, compaction and replay are compared with: pure numpy, row by row, as the specification says it.

A part has four disjoint, sorted lists of rows::

    add     differences to the row's codes           set     absolute codes
    delete  the row goes                             escape  exact floats

Composition in chain order (``then`` after ``first``), row by row:

    =========   ==========  ===========  ============  ============  ============
    first       then: none  add          set           delete        escape
    =========   ==========  ===========  ============  ============  ============
    (none)      (none)      add          set           delete        escape
    add         add         add (sum)    set           delete        escape
    set         set         set (sum)    set           delete        escape
    delete      delete      CorruptStore set           delete        escape
    escape      escape      CorruptStore set           delete        escape
    =========   ==========  ===========  ============  ============  ============

It is associative wherever the left-to-right order is defined; an add to an absent row is CorruptStore too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadRowIds, BadShape, CorruptStore
from cnr_store.segment.rows import check_row_ids
from cnr_store.types import RowIds, RowRange

Array: TypeAlias = npt.NDArray[Any]

AddMode = Literal["checked", "wrapping", "replace"]
"""How one array of an ``add`` row meets the row's earlier content.

``checked``: integers that must stay in int32 (lattice). ``wrapping``: integers modulo 2^32 (float_bits).
``replace``: the array holds absolute content even in ``add`` rows (two-dimensional slots without a mirror).
"""

_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class RowArrays:
    """Sorted, unique row ids and the arrays that go with them.

    Attributes
    ----------
    rows
        int64 (n,), ascending.
    arrays
        Name ("codes", "values", a slot's name) to an array of n rows. Not copied; the caller must not change
        them.
    """

    rows: RowIds = field(default_factory=lambda: np.empty(0, np.int64))
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: Array) -> RowArrays:
        """Return the chosen rows (boolean mask, slice or ascending positions)."""
        return RowArrays(self.rows[chosen], {name: array[chosen] for name, array in self.arrays.items()})


@dataclass(frozen=True, slots=True)
class RowOps:
    """One part's operations on the rows of one rectangle; the four row lists are disjoint."""

    add: RowArrays = field(default_factory=RowArrays)
    set: RowArrays = field(default_factory=RowArrays)
    delete: RowIds = field(default_factory=lambda: np.empty(0, np.int64))
    escape: RowArrays = field(default_factory=RowArrays)

    def __len__(self) -> int:
        return len(self.add) + len(self.set) + len(self.delete) + len(self.escape)


@dataclass(frozen=True, slots=True)
class RowContent:
    """What a present row holds: coded (integers) or escaped (exact floats), by array name."""

    escaped: bool
    arrays: Mapping[str, Array]


RowState: TypeAlias = dict[int, RowContent]
"""The present rows of a table by row id; a deleted row is absent."""


def check_ops(ops: RowOps, num_rows: int | None = None, *, table: str | None = None) -> None:
    """Check that each list is valid, that arrays have a row per id, and that the four lists are disjoint.

    Raises
    ------
    BadRowIds, BadShape
        Naming the list and the row.
    """
    for name, part in (("add", ops.add), ("set", ops.set), ("escape", ops.escape)):
        check_row_ids(part.rows, num_rows, table=table)
        for array_name, array in part.arrays.items():
            if len(array) != len(part):
                raise BadShape(
                    f"{name}/{array_name}: expected {len(part)} rows, one per row id, found {len(array)}",
                    table=table,
                    expected=len(part),
                    found=len(array),
                )
    check_row_ids(ops.delete, num_rows, table=table)
    together = np.concatenate([ops.add.rows, ops.set.rows, ops.delete, ops.escape.rows])
    together.sort()
    repeated = together[1:] == together[:-1]
    if repeated.any():
        row = int(together[int(np.argmax(repeated)) + 1])
        raise BadRowIds(
            f"row {row} stands in two of add, set, delete and escape; a part says one thing about a row",
            table=table,
            expected="disjoint lists",
            found=row,
        )


def compose(
    first: RowOps, then: RowOps, modes: Mapping[str, AddMode] | None = None, *, table: str | None = None
) -> RowOps:
    """Return the one part that does what ``first`` and, after it, ``then`` do.

    Parameters
    ----------
    first, then
        Parts of the same rectangle in chain order. Not changed.
    modes
        How the arrays of ``add`` rows add up, by name; an array not named is ``checked``.
    table
        Named in the error.

    Returns
    -------
    RowOps
        Sums are int32; its arrays are new, or shared with the inputs where nothing changed.

    Raises
    ------
    CorruptStore
        If ``then`` adds to a row that ``first`` deletes or escapes, or a checked sum leaves int32.
    """
    _refuse_orphan_adds(then.add.rows, first.delete, "deleted", table)
    _refuse_orphan_adds(then.add.rows, first.escape.rows, "kept as exact floats (escape)", table)
    modes = modes or {}
    overwritten = np.concatenate([then.set.rows, then.delete, then.escape.rows])
    onto_set = np.isin(then.add.rows, first.set.rows, assume_unique=True)
    kept_add = first.add.take(~np.isin(first.add.rows, overwritten, assume_unique=True))
    kept_set = first.set.take(~np.isin(first.set.rows, overwritten, assume_unique=True))
    kept_escape = first.escape.take(~np.isin(first.escape.rows, overwritten, assume_unique=True))
    kept_delete = first.delete[~np.isin(first.delete, overwritten, assume_unique=True)]
    return RowOps(
        add=_summed(kept_add, then.add.take(~onto_set), modes, table),
        set=_merged(_summed(kept_set, then.add.take(onto_set), modes, table), then.set),
        delete=np.sort(np.concatenate([kept_delete, then.delete])),
        escape=_merged(kept_escape, then.escape),
    )


def apply(
    state: RowState, ops: RowOps, modes: Mapping[str, AddMode] | None = None, *, table: str | None = None
) -> RowState:
    """Return the state after ``ops``; ``state`` is not changed. The plain definition, row by row.

    Raises
    ------
    CorruptStore
        If an add meets a row that is absent or escaped, or a checked sum leaves int32.
    """
    modes = modes or {}
    after = dict(state)
    for at, row in enumerate(ops.add.rows.tolist()):
        before = state.get(row)
        if before is None or before.escaped:
            raise _orphan_add(row, "absent" if before is None else "kept as exact floats (escape)", table)
        arrays = {
            name: _sum_of(before.arrays[name], array[at], modes.get(name, "checked"), name, table)
            for name, array in ops.add.arrays.items()
        }
        after[row] = RowContent(False, {**before.arrays, **arrays})
    for escaped, part in ((False, ops.set), (True, ops.escape)):
        for at, row in enumerate(part.rows.tolist()):
            after[row] = RowContent(escaped, {name: array[at] for name, array in part.arrays.items()})
    for row in ops.delete.tolist():
        after.pop(row, None)
    return after


def window(ops: RowOps, rows: RowRange) -> RowOps:
    """Return the operations on the rows ``[rows.start, rows.stop)``, as views."""

    def cut(ids: RowIds) -> slice:
        first, last = np.searchsorted(ids, [rows.start, rows.stop])
        return slice(int(first), int(last))

    def part(arrays: RowArrays) -> RowArrays:
        inside = cut(arrays.rows)
        return RowArrays(arrays.rows[inside], {name: array[inside] for name, array in arrays.arrays.items()})

    return RowOps(part(ops.add), part(ops.set), ops.delete[cut(ops.delete)], part(ops.escape))


def split_unchanged(add: RowArrays, modes: Mapping[str, AddMode] | None = None) -> tuple[RowArrays, RowIds]:
    """Return ``(changed, unchanged_rows)`` of a list of ``add`` rows.

    A row is unchanged if its differences are zero in every array; an array with mode ``replace`` has no
    difference to look at, so where one is present every row counts as changed.
    """
    modes = modes or {}
    changed = np.zeros(len(add), np.bool_)
    for name, array in add.arrays.items():
        columns = tuple(range(1, array.ndim))
        changed |= True if modes.get(name) == "replace" else array.any(axis=columns)
    return add.take(changed), add.rows[~changed]


def _refuse_orphan_adds(added: RowIds, gone: RowIds, why: str, table: str | None) -> None:
    orphans = np.intersect1d(added, gone, assume_unique=True)
    if orphans.size:
        raise _orphan_add(int(orphans[0]), why, table)


def _orphan_add(row: int, why: str, table: str | None) -> CorruptStore:
    of_table = f" of table {table!r}" if table else ""
    return CorruptStore(
        f"row {row}{of_table} is {why}, and a later delta adds to it; a new or re-added row must be a set row. "
        "The chain is damaged: run `cnr verify`",
        table=table,
        expected="set",
        found="add",
    )


def _summed(first: RowArrays, then: RowArrays, modes: Mapping[str, AddMode], table: str | None) -> RowArrays:
    """Union of two lists; rows in both are summed array by array."""
    if len(then) == 0:
        return first
    if len(first) == 0:
        return then
    rows = np.union1d(first.rows, then.rows)
    at_first, at_then = np.searchsorted(rows, first.rows), np.searchsorted(rows, then.rows)
    both = np.isin(rows, first.rows, assume_unique=True) & np.isin(rows, then.rows, assume_unique=True)
    in_first, in_then = np.isin(first.rows, rows[both]), np.isin(then.rows, rows[both])
    arrays: dict[str, Array] = {}
    for name in _same_names(first, then, table):
        left, right = first.arrays[name], then.arrays[name]
        out = np.empty((len(rows), *left.shape[1:]), _sum_dtype(left, right, modes.get(name, "checked")))
        out[at_first] = left
        out[at_then] = right
        out[both] = _sum_of(left[in_first], right[in_then], modes.get(name, "checked"), name, table)
        arrays[name] = out
    return RowArrays(rows, arrays)


def _merged(first: RowArrays, then: RowArrays) -> RowArrays:
    """Union of two disjoint lists."""
    if len(then) == 0:
        return first
    if len(first) == 0:
        return then
    rows = np.concatenate([first.rows, then.rows])
    order = np.argsort(rows, kind="stable")
    arrays = {
        name: np.concatenate([first.arrays[name], then.arrays[name]])[order] for name in _same_names(first, then, None)
    }
    return RowArrays(rows[order], arrays)


def _same_names(first: RowArrays, then: RowArrays, table: str | None) -> list[str]:
    if set(first.arrays) != set(then.arrays):
        raise CorruptStore(
            "two segments of one chain hold different arrays for a row: "
            f"{sorted(first.arrays)} and {sorted(then.arrays)}",
            table=table,
            expected=sorted(first.arrays),
            found=sorted(then.arrays),
        )
    return list(first.arrays)


def _sum_dtype(left: Array, right: Array, mode: AddMode) -> np.dtype[Any]:
    return np.result_type(left, right) if mode == "replace" else np.dtype(np.int32)


def _sum_of(left: Array, right: Array, mode: AddMode, name: str, table: str | None) -> Array:
    if mode == "replace":
        return right
    total: Array = np.asarray(left, np.int64) + np.asarray(right, np.int64)
    if mode == "checked" and total.size and (total.min() < _INT32.min or total.max() > _INT32.max):
        raise CorruptStore(
            f"the codes of array {name!r} add up beyond int32; a delta does not belong to this chain, run `cnr verify`",
            table=table,
            expected="int32",
            found=int(np.abs(total).max()),
        )
    return (total & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
