"""One test per bug that was found: named for what the user saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store, TableOptions


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"), fsync=False, threads=1)


def test_shrinking_a_table_with_a_mirror_commits(store: Store) -> None:
    """A delta that cut rows was refused as DoesNotApply: its digest was compared after the cut, not before."""
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            txn.write_table("t", values, options=TableOptions(scale=1.0))

        with writer.begin(step=2) as txn:
            txn.resize_table("t", 4)

        with writer.begin(step=3) as txn:
            txn.resize_table("t", 5)
            txn.write_rows("t", np.asarray([0, 4]), values[[1, 2]])

    assert np.array_equal(store.snapshot(version=3).table("t").read(), values[:4])
    assert np.array_equal(store.snapshot().table("t").read(), values[[1, 1, 2, 3, 2]])


def test_a_dense_tensor_without_dimensions_keeps_its_shape(store: Store) -> None:
    """A scalar parameter came back with shape (1,)."""
    with store.writer() as writer, writer.begin(step=1) as txn:
        txn.put_dense({"temperature": np.asarray(0.5, np.float32)})

    found = store.snapshot().read_dense("temperature")

    assert found.shape == ()
    assert found == np.float32(0.5)
