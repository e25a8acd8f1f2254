"""Two versions are compared row by row; the command prints the figures of the arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store, TableOptions
from cnr_store.read import compare
from cnr_store.read.compare import compare_tables
from tests.tools.cli_runner import cnr


@pytest.mark.parametrize("window_bytes", [1, 1 << 20])
def test_differences_are_those_of_the_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int
) -> None:
    monkeypatch.setattr(compare, "WINDOW_BYTES", window_bytes)
    values = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
    store = Store.create(str(tmp_path / "s"), fsync=False)
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            txn.write_table("user", values, options=TableOptions.exact())
            txn.write_table("same", values[:3])
            txn.create_table("hashed", dim=2, options=TableOptions(scale=2**-10))
            txn.write_rows("hashed", np.asarray([-7, 5]), np.ones((2, 2), np.float32))
        with writer.begin(step=2) as txn:
            txn.write_rows("user", np.asarray([7, 39]), np.full((2, 4), 9.5, np.float32))
            txn.write_rows("hashed", np.asarray([5, 10**17]), np.full((2, 2), 2, np.float32))
            txn.drop_table("same")
    before, after = store.snapshot(2), store.snapshot(3)

    hashed, same, user = compare_tables(before, after)

    new = after.table("user").read()
    assert (user.changed, user.added, user.removed, user.rows_before, user.rows_after) == (2, 0, 0, 40, 40)
    assert user.norm_before == pytest.approx(np.linalg.norm(values))
    assert user.norm_after == pytest.approx(np.linalg.norm(new))
    assert user.norm_difference == pytest.approx(np.linalg.norm(new - values))
    assert user.largest_difference == pytest.approx(np.abs(new - values).max())
    assert (hashed.changed, hashed.added, hashed.removed, hashed.norm_difference) == (1, 1, 0, pytest.approx(2**0.5))
    assert (same.rows_before, same.rows_after, same.removed) == (3, 0, 3)
    found = cnr("diff", store.url, 2, 3, "--json").document
    assert [item["changed"] for item in found["tables"]] == [1, 0, 2]
    assert found["stored_bytes"] == after.record.chain[-1].size_bytes
    assert "norm of change" in cnr("diff", store.url, 2, 3).out
