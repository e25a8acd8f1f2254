"""Rows of one table, evenly random, read as they are asked for: what a scale is measured on. Reads, decides nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.choose import sample_rows
from cnr_store.encodings.widths import FloatBlock, carrier
from cnr_store.types import TableDtype

SAMPLE_ROWS = 2_048
"""Rows that a scale or the greedy search's settings are chosen on, if that is enough: it is for most tables."""

MOST_SAMPLE_ROWS = 131_072
"""Rows that are read at most, however wide the error of the estimate still is."""


class RowSample:
    """A growing sample without replacement: `rows` of a larger count begins with those of a smaller one.

    Memory: the rows read so far. Equal tables and seeds give equal rows (under one version of numpy).

    Parameters
    ----------
    values
        (num_rows, dim), anything that can be indexed by an int64 array. Read only, and only where `rows` asks.
    dtype
        Of the table; bfloat16 is carried as uint16.
    is_all
        Whether ``values`` is the whole table; False where it is a sample of one itself.

    Attributes
    ----------
    size
        Rows that there are to sample.
    """

    def __init__(self, values: Any, dtype: TableDtype, *, is_all: bool = True, seed: int = 0) -> None:
        self.size = int(values.shape[0])
        self.is_all = is_all
        self._values, self._carrier = values, carrier(dtype)
        most = min(self.size, MOST_SAMPLE_ROWS)
        if self.size <= SAMPLE_ROWS:
            self._order = np.arange(self.size, dtype=np.int64)
        else:
            # Mixed, because the rows come in ascending order and every beginning of them must be random too.
            self._order = np.random.default_rng(seed).permutation(sample_rows(self.size, most, seed))
        self._read: list[npt.NDArray[Any]] = []
        self._count = 0

    @property
    def most(self) -> int:
        """Rows that can be read of it."""
        return len(self._order)

    def rows(self, count: int = SAMPLE_ROWS) -> FloatBlock:
        """Return the first ``count`` rows of the sample (fewer if there are no more) in the table's carrier; blocks."""
        count = min(count, self.most)
        if count > self._count or not self._read:
            # Ascending: storage and caches like it, and within one step of growth the order means nothing.
            wanted = np.sort(self._order[self._count : count])
            taken = slice(self._count, count) if self.size <= SAMPLE_ROWS else wanted
            self._read.append(np.ascontiguousarray(self._values[taken], dtype=self._carrier))
            self._count = count
        whole = self._read[0] if len(self._read) == 1 else np.concatenate(self._read)
        self._read = [whole]
        first: FloatBlock = whole[:count]
        return first
