"""A spot check that rows without a mark really did not change.

Why this module exists: an unknown optimizer, or code that writes weights without a hook, can change rows that have no
mark. Comparing all rows would cost a second copy of the table. Comparing a random sample at each save finds such a
writer within a few saves. It only reads the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from cnr_store.types import RowIds


class RowProbe:
    """Copies of a few random rows per table, compared at the next check.

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
