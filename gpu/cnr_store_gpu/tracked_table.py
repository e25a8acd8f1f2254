"""What the tracker knows of its tables, and of lookups whose update has not been made yet.

Why this module exists: tables of the model and shards of the caller differ in who looks rows up and who reports
writes; everything else about them is the same, and is here.

Forward marks rows that the optimizer writes later. A save between the two would clear the mark and miss the write. So
lookups are counted until their update is made; a training that always has batches in flight also keeps their ids, to
mark them again after each save. The operator ``note_lookup`` adds to the counts, a small tensor on the host, so they
are right in compiled models too. Nothing here waits for a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import torch

from cnr_store.errors import BadInput, TableNotFound
from cnr_store.runtime.arguments import some_of
from cnr_store.runtime.caller import warn_caller
from cnr_store.types import RowIds
from cnr_store_gpu import operators
from cnr_store_gpu import words as packed
from cnr_store_gpu.bitmap import RowBitmap
from cnr_store_gpu.memory import TableMemory
from cnr_store_gpu.operators import NO_LEDGER, register_keeper
from cnr_store_gpu.optimizers import Movement, RowMovement
from cnr_store_gpu.shards import Slices


@dataclass(frozen=True, slots=True, eq=False)
class KeptLookup:
    """The ids of one lookup: of one table, or slices of several.

    Attributes
    ----------
    ids
        As they were looked up, not copied where they belong to the caller.
    ends
        Ends of the slices with a leading 0, or None for one table.
    places
        The table of each slice, by its number in the ledger.
    skip_row
        The row that was not marked, or -1.
    version
        Version of ``ids`` when they were looked up; None if no other code can write them, or they have none.
    """

    ids: torch.Tensor
    ends: torch.Tensor | None
    places: tuple[int, ...]
    skip_row: int
    version: int | None

    @property
    def is_overwritten(self) -> bool:
        """Whether the caller has written the ids since."""
        return self.version is not None and self.ids._version != self.version


NOTED = 1 << 12
"""Lookups that wait to be counted, if nothing asks for the counts."""


@dataclass(slots=True)
class _Table:
    is_followed: bool = True
    in_flight: deque[tuple[int, KeptLookup]] = field(default_factory=deque)  # (updates at that time, ids)


class LookupLedger:
    """Lookups by table that wait for their update.

    Parameters
    ----------
    tables
        Names; a table's place is its position.
    keeps_ids
        Whether the ids are kept as long as the lookup waits.
    steps_ahead
        With ``keeps_ids``: how many updates may come between a lookup and its own. A lookup is settled by the update
        after those; without ``keeps_ids`` by the next.
    """

    def __init__(self, tables: Sequence[str], *, keeps_ids: bool = False, steps_ahead: int = 1) -> None:
        # On the host, whatever torch's default device is.
        self.counts = torch.zeros(max(len(tables), 1), dtype=torch.int64, device="cpu")
        """Lookups ever made, by place: written by ``note_lookup``."""
        self._counts = self.counts.numpy()
        self._settled = self._counts.copy()  # at the last update of each
        self._at_take = self._counts.copy()  # when the interval began
        self.updates = np.zeros_like(self._counts)
        """Updates ever made, by place."""
        self.noted: list[int] = []
        """Places of lookups that `counts` does not have yet: hooks append to it, which needs no lock."""
        self._tables = [_Table() for _ in tables]
        self.keeps_ids, self._steps_ahead = keeps_ids, steps_ahead
        self.key = register_keeper(self) if keeps_ids else NO_LEDGER

    def note(
        self, ids: torch.Tensor, ends: torch.Tensor | None, places: Sequence[int], skip_row: int, *, is_copy: bool
    ) -> None:
        """Count a lookup, and keep its ids if ids are kept: what ``note_lookup`` does, for eager code."""
        self.noted += places
        if self.keeps_ids:
            self.keep(ids, ends, places, skip_row, is_copy)
        self.count(above=NOTED)

    def count(self, *, above: int = 0) -> None:
        """Add to `counts` what eager hooks noted, if that is more than ``above``."""
        if len(self.noted) > above:
            with packed.LOCK:
                noted = self.noted[:]
                self._counts += np.bincount(noted, minlength=len(self._counts))
                del self.noted[: len(noted)]  # not what was noted meanwhile

    def keep(
        self, ids: torch.Tensor, ends: torch.Tensor | None, places: Sequence[int], skip_row: int, is_copy: bool
    ) -> None:
        """Keep the ids of a lookup until it is settled: called by ``note_lookup``."""
        version = None if is_copy or ids.is_inference() else ids._version
        lookup = KeptLookup(ids, ends, tuple(places), skip_row, version)
        with packed.LOCK:
            for place in dict.fromkeys(places):
                table = self._tables[place]
                if table.is_followed:
                    table.in_flight.append((int(self.updates[place]), lookup))

    def follow(self, place: int, *, is_followed: bool) -> None:
        """Set whether something will settle the table's lookups; otherwise their ids are not kept."""
        table = self._tables[place]
        table.is_followed = is_followed
        if not is_followed:
            table.in_flight.clear()

    def pending(self, place: int) -> int:
        """Return how many lookups of the table wait for their update."""
        table = self._tables[place]
        if self.keeps_ids and table.is_followed:
            return len(table.in_flight)
        self.count()
        return int(self._counts[place] - self._settled[place])

    def waiting(self) -> list[int]:
        """Return the places of the tables with a pending lookup."""
        if self.keeps_ids:
            return [place for place in range(len(self._tables)) if self.pending(place)]
        self.count()
        return np.flatnonzero(self._counts != self._settled).tolist()

    def in_flight(self) -> list[KeptLookup]:
        """Return the lookups whose ids are kept, each once."""
        with packed.LOCK:
            return list(dict.fromkeys(lookup for table in self._tables for _, lookup in table.in_flight))

    def settle(self, places: list[int]) -> None:
        """Record that an update of each of these tables has been made."""
        with packed.LOCK:
            self.count()
            self._settled[places] = self._counts[places]
            self.updates[places] += 1
            for place in places if self.keeps_ids else ():
                table = self._tables[place]
                while table.in_flight and self.updates[place] - table.in_flight[0][0] > self._steps_ahead:
                    table.in_flight.popleft()

    def settle_all(self) -> None:
        """Record that no update of any table is outstanding."""
        with packed.LOCK:
            self.count()
            self._settled[:] = self._counts
            for table in self._tables:
                table.in_flight.clear()

    def begin_interval(self) -> None:
        """Forget which tables were looked up."""
        self.count()
        self._at_take[:] = self._counts

    def saw(self, place: int) -> bool:
        """Return whether the table was looked up in this interval."""
        self.count()
        return bool(self._counts[place] != self._at_take[place])


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
    memory: TableMemory | None = None  # of a weight that has some
    stamp: tuple[int, int] | None = field(default=None, init=False)
    mates: tuple[TrackedTable, ...] = field(
        default=(), init=False
    )  # shards in the same memory: a write to one counts as a version of all
    optimizer: torch.optim.Optimizer | None = field(default=None, init=False)
    is_stepped: bool = field(default=False, init=False)  # whether a step will read the gradients of lookups made now
    group_key: tuple[object, ...] = field(default=(), init=False)  # what `movement` was decided from
    movement: RowMovement | None = field(default=None, init=False)
    declared: bool = field(
        default=False, init=False
    )  # the caller marked rows, so a change of version until the next step or take is theirs
    marked: bool = field(default=False, init=False)  # rows were marked in this interval by other than a lookup
    reports_updates: bool = field(default=False, init=False)  # the caller calls `updated`
    has_source: bool = field(default=False, init=False)
    reach: Movement = field(
        default=Movement.TOUCHED, init=False
    )  # the furthest that a step reached since the last take
    followed: RowMovement | None = field(default=None, init=False)  # the movement that `reach` already has
    keeps_ever: bool = field(default=False, init=False)


def restamp(tables: Sequence[TrackedTable]) -> None:
    """Take the present weights as known, and the memory that they were put in: their owner has written them."""
    for one, now in zip(tables, stamps_of([one.weight for one in tables]), strict=True):
        before, one.stamp = one.stamp, now
        if (now is None or before is None or now[1] != before[1]) and one.memory is not None:
            one.memory.accept()


def written(tables: Sequence[TrackedTable]) -> list[TrackedTable]:
    """Return the tables whose weights are not as they were stamped."""
    stamps = stamps_of([one.weight for one in tables])
    if stamps == [one.stamp for one in tables]:
        return []
    return [one for one, now in zip(tables, stamps, strict=True) if now != one.stamp]


def named(tables: Sequence[TrackedTable]) -> str:
    """Return what a message calls these tables: how many, and the names of a few."""
    names = [one.table for one in tables]
    return f"table {names[0]!r}" if len(names) == 1 else f"{len(names)} tables, {some_of(names)}"


def stamp_of(weight: torch.Tensor | None) -> tuple[int, int] | None:
    """Return what changes with in-place writes (but those through ``.data``) and with another storage.

    None for no weight, and for one that counts no versions. Reads the host's bookkeeping only.
    """
    if weight is None or weight.is_inference():
        return None
    return weight._version, weight.data_ptr()


def stamps_of(weights: Sequence[torch.Tensor | None]) -> list[tuple[int, int] | None]:
    """Return `stamp_of` each of many weights."""
    try:
        return [*zip(map(attrgetter("_version"), weights), map(torch.Tensor.data_ptr, weights), strict=True)]  # type: ignore[arg-type]
    except (AttributeError, RuntimeError):  # there is none, or it counts no versions
        return [*map(stamp_of, weights)]


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

    def at(self, place: int) -> TrackedTable:
        """Return the table of a place in the ledger."""
        return self._tables[place]

    def begin_interval(self) -> None:
        """Forget what steps and writers did to each table in the last one."""
        touched = Movement.TOUCHED  # told once: it takes longer than all else here
        for one in self._tables:
            one.reach, one.followed, one.marked = touched, None, False

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

    def mark_again(self, lookups: Iterable[KeptLookup]) -> None:
        """Mark the rows of lookups whose update is still to come, for the next interval."""
        overwritten: dict[TrackedTable, None] = {}
        for lookup in lookups:
            tables = [self._tables[place] for place in lookup.places]
            for one in tables:
                one.marked = True
            if lookup.is_overwritten:
                overwritten |= dict.fromkeys(tables)
            elif lookup.ends is None:
                one = tables[0]
                operators.mark(one.bitmap.words, lookup.ids, one.first_word, one.num_rows, lookup.skip_row)
            else:
                slices = self.slices_of(tuple(one.table for one in tables))
                operators.mark_slices(slices.words, lookup.ids, lookup.ends, slices.first_words, slices.num_rows)
        for one in overwritten:
            one.bitmap.mark_all(one.table)
        if overwritten:
            warn_caller(
                f"{named(list(overwritten))}: ids of a lookup were overwritten before its update; all rows count as "
                "changed. Give ids that stay as they are"
            )

    def _join_mates(self) -> None:
        by_memory: dict[int, list[TrackedTable]] = {}
        for one in self._tables:
            if one.is_shard and one.weight is not None and one.num_rows:
                by_memory.setdefault(one.weight.untyped_storage().data_ptr(), []).append(one)
        for mates in by_memory.values():
            for one in mates:
                one.mates = tuple(other for other in mates if other is not one)


class OvertakenLookups:
    """Lookups that wait although their tables were updated since: they were made with gradients, and nothing follows.

    Parameters
    ----------
    waiting
        Returns the tables with a lookup that waits.
    """

    def __init__(self, ledger: LookupLedger, waiting: Callable[[], list[TrackedTable]]) -> None:
        self._ledger, self._waiting = ledger, waiting
        self._seen = ledger.updates.copy()
        self._unmarked: list[TrackedTable] = []

    def are_all(self) -> bool:
        """Whether each table with a lookup that waits was updated since the last call."""
        updates = self._ledger.updates.copy()
        is_newer, self._seen = updates > self._seen, updates
        return all(is_newer[one.place] for one in self._waiting())

    def settle(self) -> None:
        """Settle the lookups that wait, so that rows can be taken; an update that is still to come is in the next take.

        The step of an attached optimizer marks its rows by their gradients. Where another code makes the update, all
        rows of the table are marked after the next take.
        """
        self._unmarked += [one for one in self._waiting() if one.optimizer is None]
        self._ledger.settle_all()

    def mark_again(self) -> None:
        """Mark what `settle` left unmarked: rows were taken."""
        for one in self._unmarked:
            one.marked = True
            one.bitmap.mark_all(one.table)
        self._unmarked.clear()


class RowProbe:
    """Copies of a few random rows per table, compared at the next check: a spot check of rows without a mark.

    An unknown optimizer, or code that writes weights without a hook, can change rows that have no mark. To compare all
    rows would cost a second copy of the table; a sample at each save finds such a writer within a few saves.

    Parameters
    ----------
    weights
        The tables ``(num_rows, dim)`` by name; live, never written.
    rows_per_table
        Size of the sample; ``rows_per_table * dim`` elements of memory per table.
    seed
        Seed of the sample: the same seed watches the same rows.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], *, rows_per_table: int, seed: int = 0) -> None:
        self._weights = dict(weights)
        self._rows_per_table = rows_per_table
        self._random = np.random.default_rng(seed)
        self._sample: dict[str, tuple[RowIds, torch.Tensor]] = {}
        self.resample()

    def resample(self) -> None:
        """Draw new rows and copy them as they are now (call it where the marks are cleared)."""
        for table, weight in self._weights.items():
            wanted = min(self._rows_per_table, weight.shape[0])
            rows = np.sort(self._random.choice(weight.shape[0], wanted, replace=False)).astype(np.int64)
            self._sample[table] = (rows, self._read(table, rows))

    def silent_changes(self, table: str, marked: RowIds) -> RowIds:
        """Return the sampled rows that changed although they are not in ``marked`` (sorted, int64)."""
        rows, before = self._sample[table]
        # Bytes rather than values: NaN is equal to itself here, and -0.0 differs from 0.0.
        differs = (self._read(table, rows).view(torch.uint8) != before.view(torch.uint8)).any(dim=1).cpu().numpy()
        changed: RowIds = rows[differs]
        unmarked: RowIds = changed[~np.isin(changed, marked)]
        return unmarked

    def _read(self, table: str, rows: RowIds) -> torch.Tensor:
        weight = self._weights[table].detach()
        return weight.index_select(0, torch.from_numpy(rows).to(weight.device))
