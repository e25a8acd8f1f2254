"""Rows of many tables that one transaction encodes together: which of those given, their lists, parts and mirrors.

`staged_tables` asks for them first; what cannot go together it takes table by table, and it raises what is wrong with
it: rows that are refused here are only left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from cnr_store.format.records import ListLine, Manifest, PartLine, TableSchema
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Array
from cnr_store.segment.shards import Shard
from cnr_store.write.alike_shards import FoundLines, Key
from cnr_store.write.delta_rows import EncodedRows
from cnr_store.write.encode import ENCODE_ROWS, RowUpdate
from cnr_store.write.joined_rows import (
    EncodedRun,
    JoinedRows,
    encode_joined,
    joined,
    move_run,
    rows_are_in_ranges,
)
from cnr_store.write.mirrors import Mirrors

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
                        base_digest=before, state_digest=after,
                        add=own.get("add"), set=own.get("set"), delete=own.get("delete"), escape=own.get("escape"),
                    )  # fmt: skip
        return found

    def move(self, mirrors: Mirrors, digests: Mapping[Shard, int | None], workers: Workers) -> None:
        """Move the mirrors to these rows; the commit has won."""
        for run in self._runs:
            move_run(run, workers)
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
