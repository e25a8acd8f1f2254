"""Which writer has which rectangle of which table. Pure.

Several ranks write one segment, so their rectangles must tile every table. Rows in a gap would not be saved; rows in
an overlap could be saved with two different values.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.digest import splitmix64
from cnr_store.errors import BadInput, BadRowIds
from cnr_store.format.records import TableSchema
from cnr_store.types import KeyRule, Rectangle, RowIds


class Shard(NamedTuple):
    """One rectangle of one table, as a writer holds it; ``rectangle`` None is the whole table, whatever its size."""

    table: str
    rectangle: Rectangle | None = None

    def rectangle_in(self, schema: TableSchema) -> Rectangle:
        """Return the rectangle, for a table that looks so now."""
        return whole_of(schema) if self.rectangle is None else self.rectangle

    def is_whole(self, schema: TableSchema) -> bool:
        """Return whether it is all of a dense table that looks so now."""
        return schema.keys == "dense" and self.rectangle in (None, whole_of(schema))

    def __str__(self) -> str:
        if self.rectangle is None:
            return repr(self.table)
        (a, b), (c, d) = self.rectangle.rows, self.rectangle.columns
        return f"{self.table!r} (rows {a} to {b}, columns {c} to {d})"


def key_owners(keys: RowIds, count: int, rule: KeyRule = "modulo") -> npt.NDArray[np.int64]:
    """Return which of ``count`` ranks each key (int64, any) belongs to, (n,) int64. Pure.

    >>> key_owners(np.asarray([-1, 0, 5]), 3, "modulo").tolist()
    [2, 0, 2]
    """
    keys = np.ascontiguousarray(keys, np.int64)
    if rule == "modulo":
        return keys % count
    return (splitmix64(keys.view(np.uint64)) % np.uint64(count)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class KeyShare:
    """The keys of hashed tables that rank ``index`` of ``count`` owns, by a rule that all of them follow."""

    index: int
    count: int
    rule: KeyRule = "modulo"

    def holds(self, keys: RowIds) -> npt.NDArray[np.bool_]:
        """Return which of the keys (int64, any order) are owned, bool of their shape. Pure."""
        return np.asarray(key_owners(keys, self.count, self.rule) == self.index)

    def check(self, table: str, keys: RowIds) -> None:
        """Refuse keys of other ranks: with two ranks' rows of one key, nothing would tell which is meant. Pure.

        Raises
        ------
        BadRowIds
            Names the first such key and its owner.
        """
        others = keys[~self.holds(keys)] if self.count > 1 else keys[:0]
        if len(others):
            owner = int(key_owners(others[:1], self.count, self.rule)[0])
            raise BadRowIds(
                f"key {int(others[0])} of table {table!r} (and {len(others) - 1} more) was given to rank {self.index}, "
                f"but rank {owner} of {self.count} owns it by the rule {self.rule!r}; give each key to its owner "
                "(key_owners), or open the writers with the rule that your ranks follow (key_rule=)",
                table=table, expected=owner, found=int(others[0]),
            )  # fmt: skip


Placement = Mapping[str, Sequence[Rectangle]]
"""Table to the rectangles that one rank holds of it."""


def whole_of(schema: TableSchema) -> Rectangle:
    """Return the rectangle of a whole dense table."""
    return _whole_of(schema.num_rows, schema.dim)


@lru_cache(maxsize=1 << 14)
def _whole_of(num_rows: int, dim: int) -> Rectangle:
    return Rectangle((0, num_rows), (0, dim))


@lru_cache(maxsize=1 << 14)
def whole_shard_of(table: str) -> tuple[Shard]:
    """Return the one shard of a table that a writer holds whole."""
    return (Shard(table),)


def check_placements(placements: Sequence[Placement]) -> dict[str, tuple[int, int]]:
    """Return the shape (num_rows, dim) of every table, if the ranks' rectangles tile it.

    Parameters
    ----------
    placements
        What each rank holds, by rank.

    Raises
    ------
    BadInput
        Naming the table, and the rectangles that overlap or the elements that no rank has.
    """
    held: dict[str, list[tuple[Rectangle, int]]] = {}
    for rank, placement in enumerate(placements):
        for table, rectangles in placement.items():
            held.setdefault(table, []).extend((rectangle, rank) for rectangle in rectangles)
    return {table: _check_tiling(table, found) for table, found in sorted(held.items()) if found}


def column_cuts(placements: Sequence[Placement]) -> dict[str, set[tuple[int, int]]]:
    """Return the column ranges that the ranks hold of each table."""
    cuts: dict[str, set[tuple[int, int]]] = {}
    for placement in placements:
        for table, rectangles in placement.items():
            cuts.setdefault(table, set()).update(rectangle.columns for rectangle in rectangles if rectangle.num_rows)
    return cuts


def _check_tiling(table: str, held: list[tuple[Rectangle, int]]) -> tuple[int, int]:
    for rectangle, rank in held:
        (a, b), (c, d) = rectangle.rows, rectangle.columns
        if not (0 <= a <= b and 0 <= c < d):
            raise BadInput(
                f"table {table!r}: rank {rank} holds rows {a} to {b} and columns {c} to {d}, which is no rectangle",
                table=table, found=(rectangle.rows, rectangle.columns),
            )  # fmt: skip
    if len(held) == 1 and held[0][0].rows[0] == held[0][0].columns[0] == 0:  # a whole table
        return held[0][0].rows[1], held[0][0].columns[1]
    num_rows = max(rectangle.rows[1] for rectangle, _ in held)
    dim = max(rectangle.columns[1] for rectangle, _ in held)
    filled = [(rectangle, rank) for rectangle, rank in held if rectangle.num_rows]
    active: list[tuple[Rectangle, int]] = []
    for rectangle, rank in sorted(filled):
        active = [(other, its) for other, its in active if other.rows[1] > rectangle.rows[0]]
        for other, its in active:
            if other.columns[0] < rectangle.columns[1] and rectangle.columns[0] < other.columns[1]:
                raise BadInput(
                    f"table {table!r}: ranks {its} and {rank} both hold row {rectangle.rows[0]} of columns "
                    f"{max(other.columns[0], rectangle.columns[0])} on; give each element to one rank (a table that "
                    "several ranks have copies of is written by its owner alone)",
                    table=table, found=[(its, other.rows, other.columns), (rank, rectangle.rows, rectangle.columns)],
                )  # fmt: skip
        active.append((rectangle, rank))
    area = sum(rectangle.area for rectangle, _ in filled)
    if area != num_rows * dim:
        raise BadInput(
            f"table {table!r} of {num_rows} rows and {dim} columns: the ranks hold {area} of its {num_rows * dim} "
            "elements; a shard is missing, and a checkpoint without it could not be restored",
            table=table, expected=num_rows * dim, found=area,
        )  # fmt: skip
    return num_rows, dim


def assign_owners(sizes: Mapping[str, int], world: int, held: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the rank that writes each replicated table: owned tables stay, the others go largest first. Pure.

    Parameters
    ----------
    sizes
        Table to its size, in any unit.
    world
        Number of ranks.
    held
        Table to the rank that owns it already and keeps its mirror; owners beyond ``world`` are forgotten.

    Notes
    -----
    Longest processing time first: the largest load is at most 4/3 of the best possible one when nothing is held
    (Graham 1969). Ties go to the table that sorts first and the lowest rank, so every rank decides alike.

    Examples
    --------
    >>> assign_owners({"a": 5, "b": 4, "c": 3, "d": 3}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    owners = {table: rank for table, rank in (held or {}).items() if table in sizes and rank < world}
    loads = [0] * world
    for table, rank in owners.items():
        loads[rank] += sizes[table]
    lightest = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(lightest)
    for table in sorted(sizes.keys() - owners.keys(), key=lambda name: (-sizes[name], name)):
        load, rank = heapq.heappop(lightest)
        owners[table] = rank
        heapq.heappush(lightest, (load + sizes[table], rank))
    return owners


def shards_of(
    placement: Placement | None, tables: Iterable[str], hashed: Collection[str] = ()
) -> dict[str, tuple[Shard, ...]]:
    """Return a writer's shards of ``tables``: those of its placement, or each table whole without one.

    Of a table that is ``hashed`` a writer has one, without a rectangle: its share of the keys.
    """
    if placement is None:
        return {table: whole_shard_of(table) for table in tables}
    return {
        table: whole_shard_of(table)
        if table in hashed
        else tuple(Shard(table, one) for one in sorted(placement.get(table, ())))
        for table in tables
    }
