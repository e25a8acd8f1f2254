"""When a writer may go on from its mirrors: only while they are the state that a delta would be put on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store, TableOptions, Writer
from cnr_store.errors import BadInput, BadShape, DoesNotApply
from cnr_store.maintenance.compaction import compact_run

ROWS = np.array([1, 3], np.int64)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"), fsync=False, threads=1)


def fill(writer: Writer) -> None:
    """Two tables, and a delta of one of them."""
    with writer.begin(step=1) as txn:
        for table in ("a", "b"):
            txn.write_table(table, np.zeros((5, 2), np.float32), options=TableOptions(scale=1.0))
    with writer.begin(step=2) as txn:
        txn.write_rows("a", ROWS, np.ones((2, 2), np.float32))


def test_a_full_that_failed_half_way_leaves_no_state_to_go_on_from(store: Store) -> None:
    with store.writer() as writer:
        fill(writer)
        txn = writer.begin(step=3, kind="baseline")
        txn.write_table("a", np.ones((5, 2), np.float32))
        txn.abort()

        with pytest.raises(DoesNotApply):
            writer.begin(step=4)

        writer.restore()
        with writer.begin(step=4) as txn:
            txn.write_rows("a", ROWS, np.full((2, 2), 7, np.float32))
    assert store.snapshot().table("a").read()[:, 0].tolist() == [0, 7, 0, 7, 0]


def test_a_failed_restore_of_another_chain_leaves_no_state_to_continue(store: Store) -> None:
    with store.writer() as writer:
        fill(writer)
        assert compact_run(store, run=(0, 2)).outcome == "committed"

        with pytest.raises(BadShape):
            writer.restore({"a": {"values": np.empty((4, 2), np.float32)}})
        with pytest.raises(DoesNotApply):
            writer.begin(step=3)


def test_a_closed_writer_says_so(store: Store) -> None:
    """It said that its mirrors are not the head's state; a baseline was written all the same."""
    with store.writer() as writer:
        fill(writer)

    with pytest.raises(BadInput, match="the writer is closed"):
        writer.begin(step=3, kind="baseline")
    with pytest.raises(BadInput, match="the writer is closed"):
        writer.restore()
