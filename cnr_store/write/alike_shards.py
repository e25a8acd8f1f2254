"""Shards whose rows are encoded together: what their rows are encoded against, in columns.

Why this module exists: a delta touches a few rows in each of a thousand tables, save after save. What a kernel needs of
each (addresses of mirrors, scales, ranges of rows) stays as it is between saves; to collect it again takes longer than
to encode the rows. Here it is kept, and found to be as it was by comparing objects, in calls that take all tables at
once. Nothing here is a state: what is kept is always that of the schemas and mirrors that are given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, call, is_, itemgetter

import numpy as np
import numpy.typing as npt

from cnr_store.errors import CnrStoreError
from cnr_store.format.records import TableSchema
from cnr_store.segment.codes import Array, ArraySpecs, Differences, TableCodes
from cnr_store.segment.shards import Shard
from cnr_store.types import Rectangle

Key = tuple[str, Rectangle | None]
"""A table, and the rectangle that a caller names of it: None where he holds one."""

Held = tuple[TableCodes | None, int | None]
"""A mirror and its digest."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A line per shard.

    Attributes
    ----------
    first_row, stop_row
        int64 (n,): the rows that the writer holds.
    places
        By array int64 (n, 4), what `table_kernels` need of its mirror.
    scales
        By array of a lattice float32 (n,).
    """

    first_row: npt.NDArray[np.int64]
    stop_row: npt.NDArray[np.int64]
    places: Mapping[str, npt.NDArray[np.int64]]
    scales: Mapping[str, npt.NDArray[np.float32]]


@dataclass(slots=True, eq=False)
class AlikeShards:
    """Shards with the same arrays, of which every row has codes in a mirror: a line each.

    Attributes
    ----------
    arrays
        What they have in common.
    shards, schemas, codes, specs
        Of each line; ``codes`` are the mirrors.
    """

    arrays: tuple[Differences, ...]
    shards: list[Shard] = field(default_factory=list)
    schemas: list[TableSchema] = field(default_factory=list)
    codes: list[TableCodes] = field(default_factory=list)
    specs: list[ArraySpecs] = field(default_factory=list)
    _held: dict[str, list[weakref.ref[Array]]] = field(default_factory=dict)
    """The arrays of the mirrors: one that was replaced, by a wider one say, is not kept in memory."""
    _columns: Columns | None = None

    def put(self, line: int, shard: Shard, schema: TableSchema, codes: TableCodes) -> None:
        """Set a line, or add the next one."""
        lists: list[list[object]] = [self.shards, self.schemas, self.codes, self.specs]  # type: ignore[list-item]
        lists += [self._held.setdefault(one.name, []) for one in self.arrays]  # type: ignore[misc]
        made = (
            shard,
            schema,
            codes,
            codes.specs_in(schema),
            *(weakref.ref(codes.arrays[one.name]) for one in self.arrays),
        )
        for column, value in zip(lists, made, strict=True):
            column[line : line + 1] = [value]
        self._columns = None

    def are_current(self, lines: Sequence[int], schemas: Sequence[object], mirrors: Sequence[object]) -> bool:
        """Whether these are the schemas and mirrors of the lines, and the mirrors have the arrays that they had."""
        own, known = [*map(self.codes.__getitem__, lines)], map(self.schemas.__getitem__, lines)
        if not (all(map(is_, schemas, known)) and all(map(is_, mirrors, own))):
            return False
        if not all(map(is_, map(attrgetter("status"), own), repeat(None))):
            return False
        return all(
            all(
                map(is_, map(itemgetter(name), map(attrgetter("arrays"), own)), map(call, map(held.__getitem__, lines)))
            )
            for name, held in self._held.items()
        )

    @property
    def columns(self) -> Columns:
        """What kernels need of all lines."""
        if self._columns is None:
            ranges = [shard.rectangle_in(schema).rows for shard, schema in zip(self.shards, self.schemas, strict=True)]
            bounds = np.array(ranges, np.int64).reshape(-1, 2)
            lattices = [one.name for one in self.arrays if one.shift is None]
            self._columns = Columns(
                bounds[:, 0], bounds[:, 1],
                {one.name: np.array([codes.place_of(one.name) for codes in self.codes], np.int64)
                 for one in self.arrays},
                {name: np.array([specs[name].scale for specs in self.specs], np.float32) for name in lattices},
            )  # fmt: skip
        return self._columns


ALONE = -1
"""In place of a line: the rows are encoded by themselves."""


class ShardLines:
    """The lines of all shards of a writer, found by the key that rows are given with."""

    def __init__(self) -> None:
        self._kinds: list[AlikeShards] = []
        self._kind_of: dict[int, int] = {}
        self._numbers: dict[Key, tuple[int, int]] = {}

    def clear(self) -> None:
        """Forget all of them, and their mirrors: these may change without being asked for."""
        self._kinds.clear()
        self._kind_of.clear()
        self._numbers.clear()

    def find(
        self,
        keys: Sequence[Key],
        tables: Mapping[str, TableSchema],
        mirrors_of: Callable[[Sequence[Shard]], Sequence[Held]],
        shard_of: Callable[[str, TableSchema, Rectangle | None], Shard],
    ) -> list[FoundLines]:
        """Return the lines of those shards whose rows can be encoded with those of others; the rest is left out.

        Parameters
        ----------
        keys
            Of rows that are given.
        tables, mirrors_of, shard_of
            The schemas as they are now, mirrors with their digests, and which shard is meant.
        """
        numbers = [*map(self._numbers.get, keys, repeat((ALONE, ALONE)))]
        found = self._found(numbers)
        schemas = [*map(tables.get, map(itemgetter(0), keys))]
        current: list[FoundLines] = []
        for one in found:
            own = mirrors_of([*map(one.alike.shards.__getitem__, one.lines)])
            known = map(schemas.__getitem__, one.at)
            digests = [*map(itemgetter(1), own)]
            if one.alike.are_current(one.lines, [*known], [*map(itemgetter(0), own)]) and None not in digests:
                current.append(one.starting_from(digests))
        missing = {*range(len(keys))}.difference(*(one.at for one in current))
        if not missing:
            return current
        for at in sorted(missing):
            schema = schemas[at]
            numbers[at] = (ALONE, ALONE) if schema is None else self._renewed(keys[at], schema, mirrors_of, shard_of)
        return [
            one.starting_from([*map(itemgetter(1), mirrors_of([*map(one.alike.shards.__getitem__, one.lines)]))])
            for one in self._found(numbers)
        ]

    def _found(self, numbers: Sequence[tuple[int, int]]) -> list[FoundLines]:
        kinds = [*map(itemgetter(0), numbers)]
        lines = [*map(itemgetter(1), numbers)]
        found = []
        for number in {*kinds} - {ALONE}:
            at = [*range(len(kinds))] if kinds.count(number) == len(kinds) else [
                k for k, kind in enumerate(kinds) if kind == number
            ]  # fmt: skip
            found.append(FoundLines(self._kinds[number], at, [*map(lines.__getitem__, at)]))
        return found

    def _renewed(
        self, key: Key, schema: TableSchema, mirrors_of: Callable[[Sequence[Shard]], Sequence[Held]],
        shard_of: Callable[[str, TableSchema, Rectangle | None], Shard],
    ) -> tuple[int, int]:  # fmt: skip
        """Set the line of a key, and return kind and line."""
        if schema.keys == "hashed":
            return ALONE, ALONE
        try:
            shard = shard_of(key[0], schema, key[1])
        except CnrStoreError:  # raised where the rows are looked at by themselves
            return ALONE, ALONE
        [(codes, digest)] = mirrors_of([shard])
        if codes is None or digest is None or codes.status is not None:
            return ALONE, ALONE
        arrays = codes.specs_in(schema).differences
        if arrays is None or not all(_is_plain(codes.arrays.get(one.name)) for one in arrays):
            return ALONE, ALONE
        if id(arrays) not in self._kind_of:
            self._kind_of[id(arrays)] = len(self._kinds)
            self._kinds.append(AlikeShards(arrays))
        kind = self._kind_of[id(arrays)]
        known, line = self._numbers.get(key, (ALONE, ALONE))
        if known != kind:
            line = len(self._kinds[kind].shards)
        self._kinds[kind].put(line, shard, schema, codes)
        self._numbers[key] = kind, line
        return kind, line


def _is_plain(held: Array | None) -> bool:
    return held is not None and held.flags.c_contiguous


@dataclass(frozen=True, slots=True, eq=False)
class FoundLines:
    """Lines of alike shards: ``at``, where their keys were among those asked for; ``digests`` of their mirrors."""

    alike: AlikeShards
    at: list[int]
    lines: list[int]
    digests: Sequence[int] = ()

    def starting_from(self, digests: Sequence[int | None]) -> FoundLines:
        """Return the lines with the digests that their mirrors have now."""
        known = [digest for digest in digests if digest is not None]
        assert len(known) == len(digests)  # a mirror without a digest has no line
        return FoundLines(self.alike, self.at, self.lines, known)

    def take(self, chosen: Sequence[int]) -> FoundLines:
        """Return some of the lines, by their position here."""
        return FoundLines(
            self.alike, [self.at[k] for k in chosen], [self.lines[k] for k in chosen],
            [self.digests[k] for k in chosen],
        )  # fmt: skip

    @property
    def shards(self) -> list[Shard]:
        """The shard of each line."""
        return [*map(self.alike.shards.__getitem__, self.lines)]
