"""The few numbers that a publisher of views and its readers share: nothing else is written by both sides.

A reader takes the newest view, copies rows, and then asks whether the view was still whole: `Board.is_whole`. Nobody
registers, nobody waits. Three rules make the answer right (``fence`` orders everything before it before everything
after it, on every CPU):

- `begin_merge` says that views before ``epoch`` are no longer whole, then fences, and only then held rows are written;
- `is_whole` fences behind the copied rows before it looks, so a reader that copied one such row sees what was said;
- `announce` fences before the new epoch is seen, so whoever sees it sees all that its view is made of.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from cnr_store.runtime.jit import njit
from cnr_store.serving.rows.fences import fence

CELL_WORDS = 8
"""int64 words per number: a cache line each."""

CELLS = 8
BOARD_BYTES = CELLS * CELL_WORDS * 8

LONGEST_HOLD_S = 2.0
"""How long readers may put a merge off, all of them together."""

Cells = npt.NDArray[np.int64]

_EPOCH, _WHOLE_FROM, _HOLD_UNTIL_NS, _ENDED = 0, 1, 2, 3


@njit(nogil=True)
def _store(cells: Cells, cell: int, value: int) -> None:
    fence()
    cells[cell * CELL_WORDS] = value
    fence()


@njit(nogil=True)
def _load(cells: Cells, cell: int) -> int:
    fence()
    value = cells[cell * CELL_WORDS]
    fence()
    return int(value)


class Board:
    """Numbers on cache lines of their own, in this process or in a file that all map.

    Times are ``time.monotonic_ns``, which on Linux is one clock for all processes since the machine started.
    """

    def __init__(self, cells: Cells | None = None) -> None:
        """Take ``cells``, int64 (BOARD_BYTES / 8,), or new ones of zeros."""
        self._cells = np.zeros(BOARD_BYTES // 8, np.int64) if cells is None else cells

    @property
    def epoch(self) -> int:
        """The newest view that readers may take; 0 before the first."""
        return int(_load(self._cells, _EPOCH))

    @property
    def has_ended(self) -> bool:
        """Whether no view will come any more: the publisher closed, or another took over."""
        return bool(_load(self._cells, _ENDED))

    def announce(self, epoch: int) -> None:
        """Let readers take view ``epoch``; all that it is made of was written before."""
        _store(self._cells, _EPOCH, epoch)

    def begin_merge(self, epoch: int) -> None:
        """Say that views before ``epoch`` are not whole any more; from here on held rows may be written."""
        _store(self._cells, _WHOLE_FROM, epoch)

    def is_whole(self, epoch: int) -> bool:
        """Return whether all that was read of view ``epoch`` before this call was of that view alone."""
        return bool(_load(self._cells, _WHOLE_FROM) <= epoch)

    def end(self) -> None:
        """Say that no view will come any more."""
        _store(self._cells, _ENDED, 1)

    def hold(self, seconds: float) -> None:
        """Ask that nothing is merged for so long, at most `LONGEST_HOLD_S`; does nothing where it may not write."""
        if self._cells.flags.writeable:
            until = time.monotonic_ns() + int(min(seconds, LONGEST_HOLD_S) * 1e9)
            # Two readers may overwrite each other here; the one that loses fails once more and asks again.
            if until > _load(self._cells, _HOLD_UNTIL_NS):
                _store(self._cells, _HOLD_UNTIL_NS, until)

    def held_for_s(self) -> float:
        """Return for how many seconds more readers ask that nothing is merged."""
        left = (_load(self._cells, _HOLD_UNTIL_NS) - time.monotonic_ns()) / 1e9
        return float(min(max(left, 0.0), LONGEST_HOLD_S))
