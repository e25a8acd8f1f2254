"""The few numbers that a publisher of views and its readers share; both sides write nothing else.

A reader copies rows of the newest view, and then checks that the view was still whole: `Board.is_whole`. It neither
registers nor waits. Three rules make the check right (``fence`` orders all accesses before it before all after it, on
every CPU):

- `begin_merge` marks views before ``epoch`` as not whole, then fences; only then base rows are written;
- `is_whole` fences after the rows were copied, so a reader that copied a merged row sees the mark;
- `announce` fences before it writes the new epoch, so a reader of the epoch sees the complete view.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from cnr_store.runtime.fences import fence
from cnr_store.runtime.jit import njit

CELL_WORDS = 8
"""int64 words per number: a cache line each."""

CELLS = 8
BOARD_BYTES = CELLS * CELL_WORDS * 8

LONGEST_DEFERRAL_S = 2.0
"""Maximum seconds for which readers, all together, may defer a merge."""

Cells = npt.NDArray[np.int64]

_EPOCH, _WHOLE_FROM, _DEFERRED_UNTIL_NS, _ENDED, _SHOWN = 0, 1, 2, 3, 4


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
        """The epoch of the newest view; 0 before the first."""
        return int(_load(self._cells, _EPOCH))

    @property
    def has_ended(self) -> bool:
        """Whether the publisher has closed, or another one has taken over."""
        return bool(_load(self._cells, _ENDED))

    @property
    def shown(self) -> int:
        """The first epoch that reads as the newest does: views from it on differ in what is merged alone."""
        return int(_load(self._cells, _SHOWN))

    def announce(self, epoch: int, *, is_merge: bool = False) -> None:
        """Publish view ``epoch``; its arrays were written before. With ``is_merge`` it reads as the one before it."""
        _store(self._cells, _EPOCH, epoch)
        if not is_merge:
            _store(self._cells, _SHOWN, epoch)

    def begin_merge(self, epoch: int) -> None:
        """Mark views before ``epoch`` as not whole; from here on base rows, and overlays of theirs, may be written."""
        _store(self._cells, _WHOLE_FROM, max(epoch, int(_load(self._cells, _WHOLE_FROM))))

    def is_whole(self, epoch: int) -> bool:
        """Return whether everything read from view ``epoch`` before this call belongs to that view."""
        return bool(_load(self._cells, _WHOLE_FROM) <= epoch)

    def end(self) -> None:
        """Record that there will be no newer view."""
        _store(self._cells, _ENDED, 1)

    def defer_merges(self, seconds: float) -> None:
        """Ask the publisher not to merge for ``seconds``, at most `LONGEST_DEFERRAL_S`; needs write access."""
        if self._cells.flags.writeable:
            until = time.monotonic_ns() + int(min(seconds, LONGEST_DEFERRAL_S) * 1e9)
            # Two readers may overwrite each other here; the one that loses fails once more and asks again.
            if until > _load(self._cells, _DEFERRED_UNTIL_NS):
                _store(self._cells, _DEFERRED_UNTIL_NS, until)

    def deferred_for_s(self) -> float:
        """Return the seconds for which readers ask the publisher not to merge."""
        left = (_load(self._cells, _DEFERRED_UNTIL_NS) - time.monotonic_ns()) / 1e9
        return float(min(max(left, 0.0), LONGEST_DEFERRAL_S))
