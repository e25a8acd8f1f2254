"""A mirror follows what was committed, block by block, and widens where int16 is too narrow."""

from __future__ import annotations

import numpy as np
import pytest

from cnr_store import TableOptions
from cnr_store.segment.shards import Shard
from cnr_store.write import delta_rows, encode, mirrors
from tests.support.memory import store_in_memory


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("outliers", [[], [0], [3, 4], [0, 5, 11, 19], list(range(20))])
def test_codes_beyond_int16_in_any_block_widen_the_mirror_once(
    monkeypatch: pytest.MonkeyPatch, threads: int, outliers: list[int]
) -> None:
    for module in (delta_rows, encode, mirrors):
        monkeypatch.setattr(module, "ENCODE_ROWS", 4)
    store = store_in_memory(threads=threads)
    values = np.arange(40, dtype=np.float32).reshape(20, 2)
    rows = np.arange(20, dtype=np.int64)
    with store.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("t", values, options=TableOptions(scale=1.0))

        for step, shift in ((2, 40_000), (3, -7)):
            values[outliers] += shift
            values += 1
            with writer.begin(step) as txn:
                txn.write_rows("t", rows, values)
            mirror = writer.mirrors.get(Shard("t"))

            assert mirror is not None
            assert np.array_equal(mirror.arrays["codes"], values.astype(np.int32))
            assert mirror.arrays["codes"].dtype == (np.int32 if outliers else np.int16)
            assert mirror.digest() == writer.mirrors.digest(Shard("t"))
            assert np.array_equal(store.snapshot().table("t").read(), values)
