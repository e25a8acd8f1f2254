"""What the tracker knows of its tables.

Why this module exists: model tables and shards of the caller differ in who looks them up and who says that they were
written; everything else about them is the same, and is here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from cnr_store.errors import BadInput, TableNotFound
from cnr_store_gpu import operators
from cnr_store_gpu.bitmap import RowBitmap
from cnr_store_gpu.lookup_ledger import KeptLookup
from cnr_store_gpu.optimizers import Movement, RowMovement
from cnr_store_gpu.shards import Slices


@dataclass(slots=True, eq=False)
class TrackedTable:
    """What the hooks know of one table; everything changes in eager code only, never in what dynamo traces."""

    table: str
    num_rows: int
    weight: torch.Tensor | None
    bitmap: RowBitmap
    first_word: int  # in the bitmap
    place: int  # in the ledger
    is_shard: bool
    stamp: tuple[int, int] | None = field(default=None, init=False)
    mates: tuple[TrackedTable, ...] = field(
        default=(), init=False
    )  # shards in the same memory: a write to one counts as a version of all
    optimizer: torch.optim.Optimizer | None = field(default=None, init=False)
    is_stepped: bool = field(default=False, init=False)  # whether there is an optimizer, for code that dynamo traces
    group_key: tuple[object, ...] = field(default=(), init=False)  # what `movement` was decided from
    movement: RowMovement | None = field(default=None, init=False)
    declared: bool = field(
        default=False, init=False
    )  # the caller marked rows, so a change of version until the next step or take is theirs
    marked: bool = field(default=False, init=False)  # rows were marked in this interval by other than a lookup
    says_updated: bool = field(default=False, init=False)  # the caller tells of its updates
    has_source: bool = field(default=False, init=False)
    reach: Movement = field(
        default=Movement.TOUCHED, init=False
    )  # the furthest that a step reached since the last take
    followed: RowMovement | None = field(default=None, init=False)  # the movement that `reach` already has
    keeps_ever: bool = field(default=False, init=False)
    stepped: bool = field(default=False, init=False)  # the running step has a gradient for it

    def begin_interval(self) -> None:
        """Forget what steps and writers did in the last one."""
        self.reach, self.followed, self.marked = Movement.TOUCHED, None, False

    def restamp(self) -> None:
        """Take the present weights as known."""
        self.stamp = stamp_of(self.weight)


def stamp_of(weight: torch.Tensor | None) -> tuple[int, int] | None:
    """Return what changes with in-place writes (but those through ``.data``) and with another storage.

    None for no weight, and for one that counts no versions. Reads the host's bookkeeping only.
    """
    if weight is None or weight.is_inference():
        return None
    return weight._version, weight.data_ptr()


class TrackedTables:
    """The tables and shards of a tracker, in the order of the ledger; ``aliases``: other names of tied weights."""

    def __init__(self, tables: Iterable[TrackedTable], aliases: Mapping[str, str]) -> None:
        self._tables = list(tables)
        by_name = {one.table: one for one in self._tables}
        self._by_name = {**{alias: by_name[table] for alias, table in aliases.items()}, **by_name}
        self._slices: dict[tuple[str, ...], Slices] = {}
        self._join_mates()

    def __iter__(self) -> Iterator[TrackedTable]:
        return iter(self._tables)

    def find(self, name: str) -> TrackedTable:
        """Return the table or shard of that name.

        Raises
        ------
        TableNotFound
        """
        found = self._by_name.get(name)
        if found is None:
            known = sorted(one.table for one in self._tables)
            raise TableNotFound(f"no table {name!r} is tracked; there are {known}", table=name)
        return found

    def slices_of(self, names: tuple[str, ...]) -> Slices:
        """Return where slices of these shards go, one after the other.

        Raises
        ------
        TableNotFound
        BadInput
            Shards on several devices.
        """
        known = self._slices.get(names)
        if known is not None:
            return known
        tables = [self.find(name) for name in names]
        bitmaps = {id(one.bitmap): one.bitmap for one in tables}
        if len(bitmaps) != 1:
            raise BadInput(
                f"slices of {len(bitmaps)} devices in one lookup: {sorted(set(names))}; give at least one slice, and "
                f"call it once per device",
                found=[str(bitmap.device) for bitmap in bitmaps.values()],
            )
        words = tables[0].bitmap.words
        first_words = torch.tensor([one.first_word for one in tables], dtype=torch.int64, device=words.device)
        num_rows = torch.tensor([one.num_rows for one in tables], dtype=torch.int64, device=words.device)
        found = Slices(words, first_words, num_rows, tuple(one.place for one in tables))
        self._slices[names] = found
        return found

    def mark_again(self, lookup: KeptLookup) -> None:
        """Mark the rows of a lookup whose update is still to come, for the next interval."""
        tables = [self._tables[place] for place in lookup.places]
        for one in tables:
            one.marked = True
        if lookup.is_overwritten:
            for one in dict.fromkeys(tables):
                one.bitmap.mark_all(one.table)
            warnings.warn(
                f"the ids of a lookup in {', '.join(one.table for one in tables)} were overwritten before its update; "
                f"all rows count as changed. Give ids that stay as they are",
                RuntimeWarning,
                stacklevel=3,
            )
        elif lookup.ends is None:
            one = tables[0]
            operators.mark(one.bitmap.words, lookup.ids, one.first_word, one.num_rows, lookup.skip_row)
        else:
            slices = self.slices_of(tuple(one.table for one in tables))
            operators.mark_slices(slices.words, lookup.ids, lookup.ends, slices.first_words, slices.num_rows)

    def _join_mates(self) -> None:
        by_memory: dict[int, list[TrackedTable]] = {}
        for one in self._tables:
            if one.is_shard and one.weight is not None and one.num_rows:
                by_memory.setdefault(one.weight.untyped_storage().data_ptr(), []).append(one)
        for mates in by_memory.values():
            for one in mates:
                one.mates = tuple(other for other in mates if other is not one)
