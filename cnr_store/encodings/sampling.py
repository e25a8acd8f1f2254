"""Rows of one table, evenly random: what a scale is measured on. Reads, decides nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_store.encodings.choose import sample_rows
from cnr_store.encodings.widths import FloatBlock, carrier
from cnr_store.types import TableDtype

SAMPLE_ROWS = 2_048
SAMPLE_ELEMENTS = 65_536
LEAST_ROWS = 64
"""A sample has so many rows at most, or as many as have so many elements, if that is fewer; but no fewer than these.

A scale then takes 0.1 to 0.8 ms whatever the table (`measure_scale`); for normal rows its error is known to 2 %."""


class RowSample:
    """A sample of rows without replacement, read when `rows` is first asked. One thread at a time.

    Equal tables and seeds give equal rows (under one version of numpy).

    Parameters
    ----------
    values
        (num_rows, dim), anything that can be indexed by an int64 array. Read only.
    dtype
        Of the table; bfloat16 is carried as uint16.
    is_all
        Whether ``values`` is the whole table; False where it is a sample of one itself.

    Attributes
    ----------
    size, dim
        Rows that there are to sample, and their columns.
    count
        Rows of the sample.
    dtype
        As given.
    is_all
        As given.
    """

    def __init__(self, values: Any, dtype: TableDtype, *, is_all: bool = True, seed: int = 0) -> None:
        self.size, self.dim = int(values.shape[0]), int(values.shape[1])
        self.count = min(self.size, SAMPLE_ROWS, max(LEAST_ROWS, SAMPLE_ELEMENTS // max(1, self.dim)))
        self.dtype = dtype
        self.is_all = is_all
        self._values, self._seed = values, seed
        self._rows: FloatBlock | None = None

    def rows(self) -> FloatBlock:
        """Return the sampled rows (n, dim), ascending, in the table's carrier; the first call blocks for the read."""
        if self._rows is None:
            chosen = slice(0, self.size) if self.size == self.count else sample_rows(self.size, self.count, self._seed)
            rows: FloatBlock = np.ascontiguousarray(self._values[chosen], dtype=carrier(self.dtype))
            self._rows = rows
        return self._rows
