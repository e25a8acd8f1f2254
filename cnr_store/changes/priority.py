"""Decides which changed rows an update of a published copy has, and which wait for a later one. Pure, no I/O.

The rows that changed most go first (QuickUpdate, Matam et al., NSDI 2024). A share of each update belongs to the rows
that have waited longest, so that every row goes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cnr_store.segment.codes import Array
from cnr_store.types import RowIds

OLDEST_SHARE = 1 / 8
"""The share of an update's bytes for the rows that have waited longest. If rows of B bytes wait when a row begins to
wait, it goes out at the latest after ``B / (OLDEST_SHARE * bytes for rows in an update)`` updates, rounded up."""


@dataclass(frozen=True, slots=True)
class WaitingRows:
    """Rows of one table that differ from the published ones.

    Attributes
    ----------
    row_ids
        int64 (n,), ascending.
    values
        (n, dim) in the table's dtype: the newest.
    change
        float64 (n,), above 0: the Euclidean norm of newest minus published values.
    since
        int64 (n,): the number of the update in which the row began to wait.
    """

    row_ids: RowIds
    values: Array
    change: npt.NDArray[np.float64]
    since: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_ids)

    def take(self, chosen: npt.NDArray[np.bool_]) -> WaitingRows:
        """Return the chosen rows (copied)."""
        return WaitingRows(self.row_ids[chosen], self.values[chosen], self.change[chosen], self.since[chosen])

    def with_newer(self, newer: WaitingRows) -> WaitingRows:
        """Return these rows with newer ones in their places. A row that waits keeps its `since`.

        A newer row without a change waits no longer: it is what is published.
        """
        since = newer.since.copy()
        at = np.minimum(np.searchsorted(self.row_ids, newer.row_ids), max(len(self) - 1, 0))
        if len(self):
            is_known = self.row_ids[at] == newer.row_ids
            since[is_known] = self.since[at[is_known]]
        kept = self.take(~np.isin(self.row_ids, newer.row_ids, assume_unique=True))
        moved = replace(newer, since=since).take(newer.change > 0)
        order = np.argsort(np.concatenate([kept.row_ids, moved.row_ids]), kind="stable")
        return WaitingRows(
            *(
                np.concatenate([getattr(kept, name), getattr(moved, name)])[order]
                for name in ("row_ids", "values", "change", "since")
            )
        )


def choose_rows(
    waiting: Mapping[str, WaitingRows], row_bytes: Mapping[str, float], budget_bytes: float
) -> dict[str, npt.NDArray[np.bool_]]:
    """Return which waiting rows of each table go out with an update of ``budget_bytes``, bool (n,).

    `OLDEST_SHARE` of the bytes is for the rows that have waited longest, of equal ones for those that changed most; the
    rest is for those that changed most. At least one row goes out if any waits.

    Parameters
    ----------
    row_bytes
        By table, the expected bytes of a row; above 0.
    """
    tables = [table for table, rows in waiting.items() if len(rows)]
    if not tables:
        return {table: np.zeros(0, np.bool_) for table in waiting}
    change = np.concatenate([waiting[table].change for table in tables])
    since = np.concatenate([waiting[table].since for table in tables])
    cost = np.concatenate([np.full(len(waiting[table]), row_bytes[table]) for table in tables])
    chosen = np.zeros(len(change), np.bool_)
    by_age = np.lexsort((-change, since))
    count = int(np.searchsorted(np.cumsum(cost[by_age]), OLDEST_SHARE * budget_bytes, side="right"))
    chosen[by_age[: max(count, 1)]] = True
    rest = np.flatnonzero(~chosen)
    by_change = rest[np.argsort(-change[rest], kind="stable")]
    left = budget_bytes - cost[chosen].sum()
    chosen[by_change[: int(np.searchsorted(np.cumsum(cost[by_change]), left, side="right"))]] = True
    ends = np.cumsum([len(waiting[table]) for table in tables])[:-1]
    found = dict(zip(tables, np.split(chosen, ends), strict=True))
    return {table: found.get(table, np.zeros(0, np.bool_)) for table in waiting}
