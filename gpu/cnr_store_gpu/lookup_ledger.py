"""Lookups whose update is still to come: how many, and where asked for their ids.

Why this module exists: forward marks rows that the optimizer writes later. A save in between would clear the mark and
miss the write. So lookups are counted until their update is done; a training that always has batches in flight keeps
their ids as well, to mark them again right after each clear.

Counts live in a small tensor on the host that the operator ``note_lookup`` adds to, so they are right in compiled
models too. Nothing here waits for a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cnr_store_gpu import words as packed
from cnr_store_gpu.operators import NO_LEDGER, register_keeper


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
        Version of ``ids`` when they were looked up; None if nobody else can write them, or it has none.
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


@dataclass(slots=True)
class _Table:
    updates: int = 0
    settled: int = 0  # its count at the last update
    at_take: int = 0  # its count when the interval began
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
        self._tables = [_Table() for _ in tables]
        self._keeps_ids, self._steps_ahead = keeps_ids, steps_ahead
        self.key = register_keeper(self) if keeps_ids else NO_LEDGER

    def note(
        self, ids: torch.Tensor, ends: torch.Tensor | None, places: Sequence[int], skip_row: int, *, is_copy: bool
    ) -> None:
        """Count a lookup, and keep its ids if ids are kept: what ``note_lookup`` does, for eager code."""
        with packed.LOCK:
            for place in places:
                self._counts[place] += 1
        if self._keeps_ids:
            self.keep(ids, ends, places, skip_row, is_copy)

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
                    table.in_flight.append((table.updates, lookup))

    def follow(self, place: int, *, is_followed: bool) -> None:
        """Say whether something will settle the table's lookups; the ids of others are not kept."""
        table = self._tables[place]
        table.is_followed = is_followed
        if not is_followed:
            table.in_flight.clear()

    def pending(self, place: int) -> int:
        """Return how many lookups of the table wait for their update."""
        table = self._tables[place]
        if self._keeps_ids and table.is_followed:
            return len(table.in_flight)
        return int(self._counts[place]) - table.settled

    def in_flight(self) -> list[KeptLookup]:
        """Return the lookups whose ids are kept, each once."""
        with packed.LOCK:
            return list(dict.fromkeys(lookup for table in self._tables for _, lookup in table.in_flight))

    def settle(self, *places: int) -> None:
        """Say that an update of each of these tables has been made."""
        with packed.LOCK:
            for place in places:
                table = self._tables[place]
                table.updates += 1
                table.settled = self._counts.item(place)
                while table.in_flight and table.updates - table.in_flight[0][0] > self._steps_ahead:
                    table.in_flight.popleft()

    def settle_all(self) -> None:
        """Say that no update of any table is outstanding."""
        with packed.LOCK:
            for place, table in enumerate(self._tables):
                table.settled = int(self._counts[place])
                table.in_flight.clear()

    def begin_interval(self) -> None:
        """Forget which tables were looked up."""
        for place, table in enumerate(self._tables):
            table.at_take = int(self._counts[place])

    def saw(self, place: int) -> bool:
        """Return whether the table was looked up in this interval."""
        return int(self._counts[place]) != self._tables[place].at_take
