"""A loader follows a table through deltas and compactions, in every form in which it keeps rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import CompactionPolicy, Store, TableOptions
from cnr_store.maintenance.compaction import compact_run
from tests.support.loader_checks import opened_loader
from tests.support.store_oracle import same_bits

ROWS, DIM, STEP = 4000, 18, 0.25
WAYS: list[dict[str, Any]] = [
    {},
    {"kept_as": "codes"},
    {"served": "float16"},
    {"served": "bfloat16"},
    {"served": "int8"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_loader_follows_a_table_through_deltas_and_compactions(
    tmp_path: Path, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 1000 * DIM)
    rng, url = np.random.default_rng(1), str(tmp_path / "store")
    values = (rng.standard_normal((ROWS, DIM)) * 3.5 * STEP).astype(np.float32)
    every = np.arange(ROWS)
    with Store.create(url, fsync=False, threads=2) as store, store.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("t", values, options=TableOptions(scale=STEP))
        with opened_loader(url, threads=2, **way) as loader:

            def held() -> Any:
                assert loader.poll().error is None
                with opened_loader(url, threads=2, **way) as fresh:
                    same = same_bits(loader.lookup("t", every), fresh.lookup("t", every))
                return same and loader.version == store.latest_version()

            assert held()
            for step in (2, 3):
                rows = np.sort(rng.choice(ROWS, 300, replace=False))
                values[rows] += (rng.standard_normal((300, DIM)) * STEP).astype(np.float32)
                with writer.begin(step) as txn:
                    txn.write_rows("t", rows, values[rows])
                assert held()
            compact_run(store, policy=CompactionPolicy(max_chain=1))
            assert held()
            if way in ({}, {"kept_as": "codes"}):
                assert same_bits(loader.lookup("t", every), store.snapshot().table("t").read())
