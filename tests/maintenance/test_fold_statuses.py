"""Which rows go into which row list: from positions in a list to row ids, chunk by chunk."""

from __future__ import annotations

import numpy as np
import pytest

from cnr_store.maintenance.compaction.statuses import Statuses
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED


@pytest.mark.parametrize("keyed", [False, True])
def test_any_range_of_positions_gives_the_rows_of_that_status(monkeypatch: pytest.MonkeyPatch, keyed: bool) -> None:
    monkeypatch.setattr("cnr_store.maintenance.compaction.statuses._BLOCK", 4)
    rng = np.random.default_rng(0)
    for size in (0, 1, 4, 5, 23):
        status = rng.choice(np.asarray([CODED, CODED, ABSENT], np.uint8), size)
        keys = np.unique(rng.integers(-(2**62), 2**62, size)) if keyed else None
        statuses = Statuses(status, 100, 100 + size, keys)
        for kind in (CODED, ABSENT, ESCAPED):
            at = np.flatnonzero(status == kind)
            rows = at + 100 if keys is None else keys[at]

            assert statuses.count(kind) == len(rows)
            for start in range(len(rows)):
                for stop in range(start + 1, len(rows) + 1):
                    assert statuses.rows(kind, start, stop).tolist() == rows[start:stop].tolist()


def test_rows_without_statuses_are_all_coded() -> None:
    statuses = Statuses(None, 7, 12)

    assert (statuses.count(CODED), statuses.count(ESCAPED), statuses.count(ABSENT)) == (5, 0, 0)
    assert statuses.rows(CODED, 1, 3).tolist() == [8, 9]
