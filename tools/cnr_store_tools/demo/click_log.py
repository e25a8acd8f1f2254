"""Click samples in time order, and their split into past and future. Never shuffled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadInput


@dataclass(frozen=True, slots=True)
class ClickLog:
    """Samples in time order: one row id per table, dense features and a label.

    Attributes
    ----------
    ids
        int64 (num_samples, num_tables): the row of table ``j`` that sample ``i`` looks up.
    dense
        float32 (num_samples, num_dense), finite; num_dense may be 0.
    labels
        float32 (num_samples,), 0 or 1.
    table_rows
        Number of rows of each table; every id is in ``[0, table_rows[j])``.
    names
        Name of each table, unique, without a dot (they become module names).
    """

    ids: npt.NDArray[np.int64]
    dense: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    table_rows: list[int]
    names: list[str]

    def __post_init__(self) -> None:
        num_samples, num_tables = self.ids.shape
        lengths = (num_samples, len(self.dense), len(self.labels)), (num_tables, len(self.table_rows), len(self.names))
        if any(len(set(found)) > 1 for found in lengths):
            raise BadInput(
                f"a click log needs as many dense rows and labels as ids, and sizes and names as tables: {lengths}"
            )

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        return int(self.dense.shape[1])

    def part(self, start: int, stop: int) -> ClickLog:
        """Return samples ``[start, stop)`` as a view: no copy, same tables."""
        return replace(self, ids=self.ids[start:stop], dense=self.dense[start:stop], labels=self.labels[start:stop])


def split_by_time(log: ClickLog, test_share: float = 0.15) -> tuple[ClickLog, ClickLog]:
    """Return the past to train on, and the last ``test_share`` of samples to evaluate on.

    Dense features of both are standardised with mean and deviation of the past. Ids and labels are views of ``log``.

    Raises
    ------
    BadInput
        Either part would be empty.
    """
    start = len(log) - round(len(log) * test_share)
    if not 0 < start < len(log):
        raise BadInput(f"a test share of {test_share} of {len(log)} samples: a part would be empty", found=test_share)
    past, future = log.part(0, start), log.part(start, len(log))
    mean = past.dense.mean(axis=0, dtype=np.float64)
    deviation = past.dense.std(axis=0, dtype=np.float64)
    deviation[deviation == 0] = 1.0
    parts = (replace(part, dense=((part.dense - mean) / deviation).astype(np.float32)) for part in (past, future))
    return next(parts), next(parts)
