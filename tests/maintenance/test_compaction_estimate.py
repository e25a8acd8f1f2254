"""The size that a dry run of a compaction estimates, compared with the size of the written segment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store, TableOptions, compact
from cnr_store.maintenance.compaction import CompactionReport, compact_run

ROWS, DIM = 5_000, 16


def foretold_and_made(
    folder: Path, run: tuple[int, int], *, deltas: int = 4, touched: int = 1_000, skew: int = 1
) -> tuple[CompactionReport, CompactionReport]:
    """Save a baseline of two tables and deltas of touched rows, then compact a run of the chain, first as a dry run."""
    random = np.random.default_rng(3)
    weights = random.normal(0, 0.1, (ROWS, DIM)).astype(np.float32)
    sums = {"user": np.full((ROWS, DIM), 0.1, np.float32), "item": np.full(ROWS, 0.1, np.float32)}
    with Store.create(str(folder), fsync=False, threads=2) as store:
        with store.writer() as writer:
            with writer.begin(0) as txn:
                for name, sum_ in sums.items():
                    txn.write_table(name, weights, slots={"sum": sum_}, options=TableOptions(bits=8))
                txn.put_dense({"mlp": random.normal(size=(40, 40))})
            for step in range(1, deltas + 1):
                rows = np.unique((random.random(touched) ** skew * ROWS).astype(np.int64))
                change = random.normal(0, 0.02, (len(rows), DIM)).astype(np.float32)
                with writer.begin(step) as txn:
                    for name, sum_ in sums.items():
                        sum_[rows] += (change**2 if sum_.ndim == 2 else (change**2).mean(axis=1)) * 50
                        txn.write_rows(name, rows, weights[rows] + step * change, slots={"sum": sum_[rows]})
                    txn.put_dense({"mlp": random.normal(size=(40, 40))})
        return compact_run(store, run=run, dry_run=True), compact_run(store, run=run)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("skew", [1, 4])
@pytest.mark.parametrize("touched", [50, 1_000, 5_000])
def test_the_estimate_is_near_what_the_compaction_writes(tmp_path: Path, start: int, skew: int, touched: int) -> None:
    foretold, made = foretold_and_made(tmp_path / "store", (start, 5), touched=touched, skew=skew)

    assert (foretold.outcome, foretold.bytes_out, made.estimated_bytes) == ("planned", 0, 0)
    assert foretold.estimated_bytes == pytest.approx(made.bytes_out, rel=0.15)


def test_the_estimate_says_when_compacting_makes_more_bytes(tmp_path: Path) -> None:
    """A baseline of constants is nearly free; rows that change cost more in it than in a delta."""
    random = np.random.default_rng(0)
    rows = np.sort(random.choice(20_000, 1_500, replace=False))
    with Store.create(str(tmp_path / "store"), fsync=False, threads=2) as store:
        with store.writer() as writer:
            with writer.begin(0) as txn:
                txn.write_table("user", np.zeros((20_000, DIM), np.float32), options=TableOptions(scale=1e-3))
            with writer.begin(1) as txn:
                txn.write_rows("user", rows, random.normal(0, 0.02, (len(rows), DIM)).astype(np.float32))
        foretold, made = compact_run(store, run=(0, 2), dry_run=True), compact_run(store, run=(0, 2))

    assert made.bytes_out > made.bytes_in
    assert foretold.estimated_bytes > foretold.bytes_in


def test_hashed_tables_are_estimated(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with Store.create(str(tmp_path / "store"), fsync=False, threads=2) as store:
        with store.writer() as writer:
            for step in range(4):
                keys = np.unique(random.integers(-(10**12), 10**12, 800))
                values = random.normal(size=(len(keys), DIM)).astype(np.float32)
                with writer.begin(step) as txn:
                    if not step:
                        txn.create_table("user", dim=DIM, options=TableOptions(scale=0.01))
                    txn.write_rows("user", keys, values)
        reports = compact(store, dry_run=True)
        foretold, made = compact_run(store, run=(0, 4), dry_run=True), compact_run(store, run=(0, 4))

    assert reports[0].estimated_bytes > 0
    assert foretold.estimated_bytes == pytest.approx(made.bytes_out, rel=0.15)
