"""Touched rows of many tables end to end: which rows go together, their differences, lists, parts and mirrors.

A delta of a few rows in each of a thousand tables costs what its rows do: a call of numpy or a kernel takes longer to
begin than a hundred rows take (`format_spec/decisions/0027`), so one call takes about `ENCODE_ROWS` of them.
`delta_rows.encode_alone` defines what is done for each table, and does it where that cannot be done together.
`staged_tables` asks here first, and raises what is wrong with rows: those that are refused here are only left to it.

Computation on threads, no I/O. Nothing here moves a mirror but `StagedRuns.move`, once the commit has won.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter, itemgetter

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import table_kernels
from cnr_store.encodings.widths import as_columns
from cnr_store.format.records import ListLine, Manifest, PartLine, TableSchema
from cnr_store.runtime.addresses import address_of
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Array, ArraySpecs, Differences, TableCodes
from cnr_store.segment.shards import Shard
from cnr_store.types import Lattice, RowIds
from cnr_store.write.alike_shards import FoundLines, Key
from cnr_store.write.delta_rows import EncodedRows
from cnr_store.write.encode import ENCODE_ROWS, EncodedList, OnBadRows, RowUpdate
from cnr_store.write.mirrors import Mirrors, finish_move

_FLOAT32, _INT64 = np.dtype(np.float32), np.dtype(np.int64)
_INT16_MAX = 2**15 - 1


@dataclass(frozen=True, slots=True, eq=False)
class JoinedRows:
    """New values of some rows of tables with the same arrays, end to end, table by table.

    Attributes
    ----------
    keys
        Table and rectangle, as of `RowUpdate`.
    counts
        int64 (m,): the rows of each.
    row_ids
        int64 (n,), ascending in each table.
    values
        (n, dim), as for `RowUpdate`; C-contiguous.
    slots
        By name (n,) or (n, dim).
    nonfinite
        By table; empty: None for each.
    """

    keys: Sequence[Key]
    counts: npt.NDArray[np.int64]
    row_ids: RowIds
    values: Array
    slots: Mapping[str, Array]
    nonfinite: Sequence[OnBadRows | None] = ()

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where the rows of each table begin."""
        return np.cumsum(self.counts) - self.counts

    def updates(self, chosen: Iterable[int]) -> list[RowUpdate]:
        """Return the rows of some tables, table by table, not copied."""
        starts, counts, found = self.starts.tolist(), self.counts.tolist(), []
        for number in chosen:
            rows = slice(starts[number], starts[number] + counts[number])
            slots = {name: array[rows] for name, array in self.slots.items()}
            table, rectangle = self.keys[number]
            nonfinite = self.nonfinite[number] if self.nonfinite else None
            found.append(RowUpdate(table, self.row_ids[rows], self.values[rows], slots, nonfinite, rectangle))
        return found

    def take(self, chosen: Sequence[int]) -> JoinedRows:
        """Return the rows of some tables, in this order."""
        if [*chosen] == [*range(len(self.keys))]:
            return self
        starts = self.starts
        at = np.concatenate([np.arange(starts[k], starts[k] + self.counts[k]) for k in chosen] or [starts[:0]])
        return JoinedRows(
            [self.keys[k] for k in chosen], self.counts[[*chosen]], self.row_ids[at], self.values[at],
            {name: array[at] for name, array in self.slots.items()},
            [self.nonfinite[k] for k in chosen] if self.nonfinite else (),
        )  # fmt: skip

    def arrays(self, kinds: Sequence[Differences]) -> dict[str, Array] | None:
        """Return the float32 arrays (n, width) by name; None if they are others than these."""
        given = {"codes": self.values, **{f"slots/{name}": slot for name, slot in self.slots.items()}}
        if given.keys() != {one.name for one in kinds}:
            return None
        for one in kinds:
            array, shape = given[one.name], (len(self.row_ids),) if one.is_vector else (len(self.row_ids), one.width)
            if array.shape != shape or array.dtype != _FLOAT32 or not array.flags.c_contiguous:
                return None
            given[one.name] = as_columns(array)
        return given


def joined(updates: Sequence[RowUpdate], keys: Sequence[Key], kinds: Sequence[Differences]) -> JoinedRows | None:
    """Return rows of tables with these arrays end to end, copied; None if that is not what is given."""
    counts = _lengths_of([*map(attrgetter("row_ids"), updates)], _INT64)
    if counts is None:
        return None
    given = [*map(attrgetter("slots"), updates)]
    names = [one.name.removeprefix("slots/") for one in kinds if one.name != "codes"]
    if [*map(len, given)].count(len(names)) < len(given):
        return None
    try:
        columns = {name: [*map(itemgetter(name), given)] for name in names}
        values = [*map(attrgetter("values"), updates)]
        if any(_lengths_of(column, _FLOAT32) != counts for column in (values, *columns.values())):
            return None
        return JoinedRows(
            keys, np.array(counts, np.int64), np.concatenate([*map(attrgetter("row_ids"), updates)]),
            np.concatenate(values), {name: np.concatenate(column) for name, column in columns.items()},
            [*map(attrgetter("nonfinite"), updates)],
        )  # fmt: skip
    except (KeyError, ValueError):  # another slot, arrays of other widths
        return None


def _lengths_of(arrays: Sequence[Array], dtype: np.dtype[np.generic]) -> list[int] | None:
    """The length of each array, if all are arrays of this dtype with a dimension."""
    if {*map(type, arrays)} != {np.ndarray} or [*map(attrgetter("dtype"), arrays)].count(dtype) < len(arrays):
        return None
    return None if 0 in map(attrgetter("ndim"), arrays) else [*map(len, arrays)]


def rows_are_in_ranges(rows: JoinedRows, found: FoundLines) -> bool:
    """Whether the ids are ascending and unique in each table, and rows that the writer holds; no count may be 0."""
    ids = rows.row_ids
    if ids.ndim != 1 or ids.dtype != _INT64 or len(ids) != rows.counts.sum():
        return False
    ascending = ids[1:] > ids[:-1]
    starts, columns = rows.starts, found.alike.columns
    ascending[starts[1:] - 1] = True  # from one table to the next
    first, last = ids[starts], ids[starts + rows.counts - 1]
    inside = (first >= columns.first_row[found.lines]) & (last < columns.stop_row[found.lines])
    return bool(ascending.all() and inside.all())


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRun:
    """``add`` lists of shards with the same arrays, end to end: all that one save does to their rows.

    Attributes
    ----------
    at
        `FoundLines.at` of each.
    shards, codes, specs
        Of each; ``codes`` are the mirrors.
    rows
        The lists.
    starts, stops
        int64 (m,): where that of each begins and ends in ``rows``; some are empty.
    before, after
        The state digests that the rows start from, and that they lead to.
    """

    at: list[int]
    shards: list[Shard]
    codes: list[TableCodes]
    specs: list[ArraySpecs]
    rows: EncodedList
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    before: list[int]
    after: list[int]
    _positions: dict[Shard, int] = field(default_factory=dict)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Rows of each."""
        return self.stops - self.starts

    def of(self, shard: Shard) -> EncodedRows | None:
        """Return what is done to the rows of one shard, cut out; None if it is not here."""
        if not self._positions:
            self._positions.update(zip(self.shards, range(len(self.shards)), strict=True))
        at = self._positions.get(shard)
        if at is None:
            return None
        start, stop = int(self.starts[at]), int(self.stops[at])
        lists = {"add": self.rows.between(start, stop)} if stop > start else {}
        return EncodedRows(self.specs[at], lists, self.after[at])


def encode_joined(
    rows: JoinedRows, arrays: Mapping[str, Array], found: FoundLines, workers: Workers
) -> tuple[list[EncodedRun], list[int]]:
    """Encode rows against the mirrors of their lines, as `encode_alone` does for each. Blocks.

    Returns the runs, and the positions of those tables that have to go alone: bad rows, or differences beyond int16.
    """
    numbers = rows.starts // ENCODE_ROWS
    cuts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
    results = workers.run(partial(_encode_run, rows, arrays, found, a, b) for a, b in pairwise(cuts))
    return [run for run, _ in results if run is not None], [k for _, alone in results for k in alone]


def _encode_run(
    rows: JoinedRows, arrays: Mapping[str, Array], found: FoundLines, a: int, b: int
) -> tuple[EncodedRun | None, list[int]]:
    """Encode the tables at positions [a, b)."""
    alike, lines = found.alike, found.lines[a:b]
    counts = rows.counts[a:b]
    starts = np.cumsum(counts) - counts
    first = int(rows.starts[a])
    ids = rows.row_ids[first : first + int(counts.sum())]
    flags = np.zeros(len(ids), np.uint8)
    change, most = np.zeros(len(lines), np.uint64), np.zeros(len(lines), np.int64)
    coded: dict[str, Array] = {}
    for array in alike.arrays:
        name = array.name
        values = arrays[name][first : first + len(ids)]
        addresses = address_of(values) + starts * values.itemsize * array.width
        parts = table_kernels.parts_of(starts, counts, addresses, alike.columns.places[name][lines])
        out, told = np.empty((len(ids), array.width), np.int16), np.empty((len(lines), 2), np.int64)
        multipliers = alike.specs[lines[0]][name].multipliers
        if array.shift is None:
            scales = alike.columns.scales[name][lines]
            table_kernels.lattice_deltas(parts, ids, scales, multipliers, out, flags, told)
        else:
            table_kernels.float_bits_deltas(parts, ids, array.shift, multipliers, out, flags, told)
        change += told[:, 1].view(np.uint64)
        np.maximum(most, told[:, 0], out=most)
        coded[name] = out.reshape(-1) if array.is_vector else out
    alone = (most > _INT16_MAX) | (np.maximum.reduceat(flags, starts) > 1)
    is_kept = (flags == 1) & ~np.repeat(alone, counts)
    if not is_kept.all():
        kept = np.flatnonzero(is_kept)
        counts = np.add.reduceat(is_kept, starts, dtype=np.int64)
        ids, coded = ids[kept], {name: array[kept] for name, array in coded.items()}
    stops = np.cumsum(counts)
    before = found.digests[a:b]
    after = (np.array(before, np.uint64) + change).tolist()  # modulo 2^64, as `add_digests`
    chosen = np.flatnonzero(~alone).tolist()
    if not chosen:
        return None, [*range(a, b)]
    at, lines, before, after = ([*map(one.__getitem__, chosen)] for one in (found.at[a:b], lines, before, after))
    run = EncodedRun(
        at, [*map(alike.shards.__getitem__, lines)], [*map(alike.codes.__getitem__, lines)],
        [*map(alike.specs.__getitem__, lines)], EncodedList(ids, coded), (stops - counts)[chosen], stops[chosen],
        before, after,
    )  # fmt: skip
    return run, (np.flatnonzero(alone) + a).tolist()


def move_run(run: EncodedRun) -> None:
    """Move mirrors to their rows of a run, as `apply_alone` does for each; call once, after the commit has won."""
    at = np.flatnonzero(run.stops > run.starts)
    mirrors = [*map(run.codes.__getitem__, at.tolist())]
    if not mirrors:
        return
    starts, counts = run.starts[at], run.counts[at]
    for name in mirrors[0].arrays:
        places = np.array([mirror.place_of(name) for mirror in mirrors], np.int64)
        parts = table_kernels.parts_of(starts, counts, 0, places)
        moves = np.full(len(mirrors), table_kernels.ADD, np.int8)
        if not isinstance(mirrors[0].specs[name].encoding, Lattice):
            moves[parts[:, table_kernels.CODE_BYTES] == np.dtype(np.int32).itemsize] = table_kernels.ADD_WRAPPING
        reached = np.empty(len(mirrors), np.int64)
        table_kernels.move_mirrors(parts, moves, run.rows.row_ids, as_columns(run.rows.arrays[name]), reached)
        for number in np.flatnonzero(reached >= 0).tolist():
            added = run.rows.between(int(starts[number]), int(starts[number] + counts[number]))
            finish_move(mirrors[number], name, added, [(int(reached[number]), len(added.row_ids))], adds=True)


# ---- the rows of a transaction

Find = Callable[[Sequence[Key]], Sequence[FoundLines]]
"""The lines of keys, of those that have some (`ShardLines.find`)."""


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """Checked rows that are encoded together, and the lines of their shards.

    ``found.at``: which of the updates they are, as in `RowPlan.rest`.
    """

    rows: JoinedRows
    arrays: Mapping[str, Array]
    found: FoundLines

    def updates(self) -> list[RowUpdate]:
        """Return the rows of each table."""
        return self.rows.updates(range(len(self.rows.keys)))


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """What is encoded together, and the rest: which of the updates it is, -1 of rows that were given end to end."""

    groups: list[RowGroup]
    rest: list[tuple[int, RowUpdate]]

    @property
    def shards(self) -> list[Shard]:
        """The shards of all groups."""
        return [shard for group in self.groups for shard in group.found.shards]


def plan_rows(updates: Sequence[RowUpdate], given: Iterable[JoinedRows], find: Find | None) -> RowPlan:
    """Return which rows are encoded together. Pure.

    Those of at least two shards that are alike, each with some rows and fewer than a task of its own would take, and
    nothing wrong with them. None without ``find``: then each row is written as it is.
    """
    plan = RowPlan([], [])
    keys = [*zip(map(attrgetter("table"), updates), map(attrgetter("rectangle"), updates), strict=True)]
    together: set[int] = set()
    for found in find(keys) if find is not None and len(keys) > 1 else ():
        small = _small([updates[at].row_ids for at in found.at])
        own = found if len(small) == len(found.at) else found.take(small)
        rows = joined([*map(updates.__getitem__, own.at)], [*map(keys.__getitem__, own.at)], own.alike.arrays)
        if rows is not None and _add_group(plan, rows, own):
            together.update(own.at)
    if len(together) < len(updates):
        plan.rest.extend((at, update) for at, update in enumerate(updates) if at not in together)
    for rows in given:
        together = set()
        for found in find(rows.keys) if find is not None else ():
            counts = rows.counts[found.at]
            small = np.flatnonzero((counts > 0) & (counts < ENCODE_ROWS)).tolist()
            own = found if len(small) == len(found.at) else found.take(small)
            if _add_group(plan, rows.take(own.at), replace(own, at=[-1] * len(own.at))):
                together.update(own.at)
        if len(together) < len(rows.keys):
            alone = (at for at in range(len(rows.keys)) if at not in together)
            plan.rest.extend((-1, update) for update in rows.updates(alone))
    return plan


def _small(row_ids: Sequence[object]) -> list[int]:
    if {*map(type, row_ids)} != {np.ndarray} or 0 in map(attrgetter("ndim"), row_ids):
        return []
    return [at for at, one in enumerate(row_ids) if 0 < len(one) < ENCODE_ROWS]  # type: ignore[arg-type]


def _add_group(plan: RowPlan, rows: JoinedRows, found: FoundLines) -> bool:
    """Add a group if its rows can go together."""
    arrays = rows.arrays(found.alike.arrays) if len(rows.keys) > 1 else None
    if arrays is None or not rows_are_in_ranges(rows, found):
        return False
    plan.groups.append(RowGroup(rows, arrays, found))
    return True


class StagedRuns:
    """The runs of a transaction. A shard is in one of them at most."""

    def __init__(self) -> None:
        self._runs: list[EncodedRun] = []

    def __iter__(self) -> Iterator[EncodedRun]:
        return iter(self._runs)

    @property
    def shards(self) -> list[Shard]:
        """Those that have rows here."""
        return [shard for run in self._runs for shard in run.shards]

    def add(self, runs: Iterable[EncodedRun]) -> None:
        """Keep runs."""
        self._runs.extend(runs)

    def of(self, shard: Shard) -> list[EncodedRows]:
        """Return what is done to the rows of a shard: nothing, or one change."""
        return [found for run in self._runs if (found := run.of(shard)) is not None]

    def parts(
        self,
        base: Manifest,
        tables: Mapping[str, TableSchema],
        entries: Mapping[Shard, Mapping[str, ListLine]],
        digests: Mapping[Shard, int | None],
    ) -> dict[Shard, PartLine]:
        """Return the parts of shards whose table is stored as in ``base``, whose state their mirrors are. Pure."""
        found: dict[Shard, PartLine] = {}
        for run in self._runs:
            digests_of = _texts_of(run.before), _texts_of([*map(digests.__getitem__, run.shards)])
            for shard, before, after in zip(run.shards, *digests_of, strict=True):
                schema = tables[shard.table]
                if base.tables.get(shard.table) is schema:
                    rectangle, own = shard.rectangle_in(schema), entries.get(shard, _NO_LISTS)
                    found[shard] = PartLine(
                        table=shard.table, rows=rectangle.rows, columns=rectangle.columns,
                        base_digest=before, state_digest=after, **own,
                    )  # fmt: skip
        return found

    def move(self, mirrors: Mirrors, digests: Mapping[Shard, int | None]) -> None:
        """Move the mirrors to these rows; the commit has won."""
        for run in self._runs:
            move_run(run)
            mirrors.put_many(run.shards, run.codes, [*map(digests.get, run.shards)])


_NO_LISTS: dict[str, ListLine] = {}


def _texts_of(digests: Sequence[int | None]) -> list[str]:
    """Return digests as 16 hexadecimal digits each."""
    text = np.array(digests, ">u8").tobytes().hex()
    return [text[at : at + 16] for at in range(0, len(text), 16)]


def encode_groups(
    groups: Iterable[RowGroup], workers: Workers
) -> tuple[list[EncodedRun], list[tuple[int, RowUpdate]]]:  # fmt: skip
    """Encode groups; returns their runs, and the rows that have to be encoded by themselves, as `RowPlan.rest`."""
    runs: list[EncodedRun] = []
    alone: list[tuple[int, RowUpdate]] = []
    for group in groups:
        own, left = encode_joined(group.rows, group.arrays, group.found, workers)
        runs += own
        alone += zip(map(group.found.at.__getitem__, left), group.rows.updates(left), strict=True)
    return runs, alone
