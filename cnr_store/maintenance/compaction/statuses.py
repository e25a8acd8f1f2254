"""Determine the outcome of each row of a piece, and thus the row list of the result it belongs to.

Memory: one byte per row of the piece, or 9 per changed row if those are few. The ids of a row list are computed one
chunk at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cnr_store.read.plan import Step, TablePlan
from cnr_store.read.replay import Replay, named_rows
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import ABSENT, CODED, UNTOUCHED, TableCodes
from cnr_store.segment.reader import SegmentReader
from cnr_store.types import RowIds

_BLOCK = 1 << 16


class Statuses:
    """The final status of each row of a piece.

    Parameters
    ----------
    status
        uint8 per row; None means that all rows are coded.
    start, stop
        The row ids [start, stop), if they are contiguous.
    keys
        The sorted row ids, if they are not.
    """

    def __init__(self, status: npt.NDArray[np.uint8] | None, start: int, stop: int, keys: RowIds | None = None) -> None:
        self._status = status
        self._start = start
        self._stop = stop
        self._keys = keys
        # Per status: number of rows with it before each block.
        self._before: dict[int, npt.NDArray[np.int64]] = {}

    def count(self, status: int) -> int:
        """Return how many rows have the status."""
        if self._status is None:
            return self._stop - self._start if status == CODED else 0
        return int(self._counts(self._status, status)[-1])

    def rows(self, status: int, start: int, stop: int) -> RowIds:
        """Return the sorted ids of the rows with the status, at positions [start, stop) among them."""
        if self._status is None:
            return np.arange(self._start + start, self._start + stop, dtype=np.int64)
        before = self._counts(self._status, status)
        first = int(np.searchsorted(before, start, side="right")) - 1
        last = int(np.searchsorted(before, stop, side="left"))
        at = np.flatnonzero(self._status[first * _BLOCK : last * _BLOCK] == status) + first * _BLOCK
        at = at[start - before[first] : stop - before[first]]
        return at.astype(np.int64) + self._start if self._keys is None else self._keys[at]

    def _counts(self, statuses: npt.NDArray[np.uint8], status: int) -> npt.NDArray[np.int64]:
        # Two threads may compute the same counts at once; both results are equal.
        if status not in self._before:
            ranges = blocks(len(statuses), _BLOCK)
            counts = [0, *(int(np.count_nonzero(statuses[low:high] == status)) for low, high in ranges)]
            self._before[status] = np.cumsum(counts, dtype=np.int64)
        return self._before[status]


def replay_statuses(
    readers: Sequence[SegmentReader], plan: TablePlan, before: int | None, workers: Workers
) -> Statuses:
    """Return the final status of each row of the plan's rectangle. Blocks; reads only row ids.

    Parameters
    ----------
    readers
        The segments that the plan's numbers refer to.
    before
        The table's number of rows before the first segment. None if the table begins in them: then a row that none of
        them sets is absent.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    """
    if not plan.tracks_status and before is None:
        return Statuses(None, plan.start, plan.stop)
    hashed = plan.schema.keys == "hashed"
    keys = None
    if hashed or _is_sparse(plan, before):
        keys = named_rows(readers, plan)
    count = plan.stop - plan.start if keys is None else len(keys)
    start = plan.start if keys is None else 0
    codes = TableCodes(plan.schema, start, start + count, {}, columns=plan.columns)
    status = codes.track_status(ABSENT if before is None else UNTOUCHED)
    cut = count
    if before is not None and not hashed:
        cut = max(0, before - plan.start) if keys is None else int(np.searchsorted(keys, before))
        status[cut:] = ABSENT
    Replay(readers, workers).run(replace(plan, tracks_status=True), codes, keys)
    if before is not None:
        # A row that exists neither before nor after the run needs no delete.
        grown = status[cut:]
        grown[grown == ABSENT] = UNTOUCHED
    return Statuses(status, plan.start, plan.stop, keys)


def _is_sparse(plan: TablePlan, before: int | None) -> bool:
    """Return whether the ids of the changed rows take less memory than a status for every row.

    Not if the table shrinks within a run of deltas: that removes rows that no list names.
    """
    changed = sum(step.num_rows for step in _steps(plan))
    return 9 * changed < plan.stop - plan.start and (
        before is None or all(batch.num_rows >= before for batch in plan.batches)
    )


def _steps(plan: TablePlan) -> Iterator[Step]:
    return (step for batch in plan.batches for step in batch.steps)
