"""One record for every source of click data, in time order, and its split into past and future.

Generated traffic and files end up in the same :class:`ClickLog`, so the model, the loader and the metrics
never ask where a row came from. A log is never shuffled: row order is arrival order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadInput


@dataclass(frozen=True, slots=True)
class ClickLog:
    """Samples in arrival order: one row id per table, dense features and a label.

    Attributes
    ----------
    ids
        int64, (num_samples, num_tables): the row of table ``j`` that sample ``i`` looks up.
    dense
        float32, (num_samples, num_dense), finite; num_dense may be 0.
    labels
        float32, (num_samples,), 0 or 1.
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
        if self.dense.shape[:1] != (num_samples,) or self.dense.ndim != 2 or self.labels.shape != (num_samples,):
            raise BadInput(
                f"a click log needs as many dense rows and labels as ids: found ids {self.ids.shape}, "
                f"dense {self.dense.shape}, labels {self.labels.shape}"
            )
        if not len(self.table_rows) == len(self.names) == len(set(self.names)) == num_tables:
            raise BadInput(f"a click log with {num_tables} id columns needs as many unique names and table sizes")

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
    """Return the past to train on and the last ``test_share`` of samples to judge by.

    Dense features of both parts are standardised with the mean and deviation of the past alone, so nothing
    of the future reaches training. Ids and labels are views of ``log``; dense features are copies.

    Raises
    ------
    BadInput
        If either part would be empty.
    """
    start = len(log) - round(len(log) * test_share)
    if not 0 < start < len(log):
        raise BadInput(
            f"cannot split {len(log)} samples with a test share of {test_share}: a part would be empty",
            expected="a share in (0, 1) and enough samples",
            found=test_share,
        )
    past, future = log.part(0, start), log.part(start, len(log))
    mean = past.dense.mean(axis=0, dtype=np.float64)
    deviation = past.dense.std(axis=0, dtype=np.float64)
    deviation[deviation == 0] = 1.0

    def standardised(part: ClickLog) -> ClickLog:
        return replace(part, dense=((part.dense - mean) / deviation).astype(np.float32))

    return standardised(past), standardised(future)
