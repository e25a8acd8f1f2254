"""The union of taken rows on the host: what changed since a baseline, or ever.

Why this module exists: a delta against a baseline needs the rows of all intervals since then, and momentum moves
rows of any earlier interval. The words that each interval hands out are enough, so the device keeps no second bitmap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cnr_store.errors import BadRowIds, TableNotFound
from cnr_store.runtime.arguments import some_of
from cnr_store.types import RowIds
from cnr_store_gpu import words as packed
from cnr_store_gpu.bitmap import Ids, Place, Taken, TakenRows, check_words, flat_ids
from cnr_store_gpu.words import Words


class Cumulative:
    """The union of taken rows, kept on the host: what changed since a baseline, or ever.

    Parameters
    ----------
    table_rows
        Rows of each table, by name. Memory is one bit per row of the tables that were ever added to.

    Adding is idempotent and commutes. Not for use from two threads at once.

    Examples
    --------
    >>> bitmap, since_baseline = RowBitmap({"t": 10}), Cumulative({"t": 10})
    >>> for ids in ([1, 2], [2, 5]):
    ...     bitmap.mark("t", ids)
    ...     since_baseline.add(bitmap.take_all())
    >>> since_baseline.row_ids("t")
    array([1, 2, 5])
    """

    def __init__(self, table_rows: Mapping[str, int]) -> None:
        self._rows = dict(table_rows)
        self._words: dict[str, Words] = {}
        self._together: Words | None = None  # of which all words are views, in the places of the taken ones
        self._places: Mapping[str, Place] = {}

    def add(self, taken: Taken | Mapping[str, Taken]) -> None:
        """Add taken rows; where they are always those of a whole bitmap, by one call."""
        if isinstance(taken, TakenRows) and self._together is not None and taken.places is self._places:
            np.bitwise_or(self._together, taken.words, out=self._together)
            return
        if isinstance(taken, TakenRows) and not self._words and self._has_rows_of(taken.places):
            self._together, self._places = taken.words.copy(), taken.places
            self._words = {table: taken.words_in(table, self._together) for table in taken}
            return
        for one in (taken,) if isinstance(taken, Taken) else taken.values():
            self.add_words(one.table, one.words)

    def add_words(self, table: str, words: npt.NDArray[Any] | torch.Tensor) -> None:
        """Add the rows whose bits are set; shape and errors as in ``RowBitmap.or_words``."""
        bits = check_words(table, words, self._num_rows(table))
        known = self._words.get(table)
        if known is None:
            self._words[table] = bits.copy()
        else:
            np.bitwise_or(known, bits, out=known)

    def add_rows(self, table: str, ids: Ids) -> None:
        """Add row ids.

        Raises
        ------
        BadRowIds
            Ids that are no integers, or outside the table; the ids inside it are added all the same.
        """
        num_rows = self._num_rows(table)
        flat = flat_ids(table, ids)
        array = flat.cpu().numpy() if isinstance(flat, torch.Tensor) else flat
        words = self._words.setdefault(table, np.zeros(packed.words_of_rows(num_rows), np.uint32))
        outside = packed.mark_words(words, array, 0, num_rows)
        if outside:
            raise BadRowIds(
                f"table {table!r} has rows 0 to {num_rows - 1}, but {outside} of the ids to add are outside",
                table=table,
                expected=num_rows,
                found=outside,
            )

    def row_ids(self, table: str) -> RowIds:
        """Return the rows added so far, int64, sorted."""
        return packed.rows_of(self.words(table))

    def words(self, table: str) -> Words:
        """Return a copy of the table's words, uint32 ``(ceil(num_rows / 32),)``."""
        num_words = packed.words_of_rows(self._num_rows(table))
        known = self._words.get(table)
        return np.zeros(num_words, np.uint32) if known is None else known.copy()

    def count(self, table: str) -> int:
        """Return how many rows were added."""
        return int(packed.count_bits(self.words(table)))

    def clear(self, table: str | None = None) -> None:
        """Forget one table's rows, or all (a new baseline)."""
        self._together = None
        if table is None:
            self._words.clear()
        else:
            self._num_rows(table)
            self._words.pop(table, None)

    def _has_rows_of(self, places: Mapping[str, Place]) -> bool:
        return all(self._rows.get(table) == place.num_rows for table, place in places.items())

    def _num_rows(self, table: str) -> int:
        try:
            return self._rows[table]
        except KeyError:
            raise TableNotFound(
                f"no table {table!r} here; there are {some_of(self._rows, table)}", table=table
            ) from None
