"""`Transaction.changed_rows` finds the rows that `write_rows` would store."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import TableOptions
from tests.support.memory import store_in_memory

ROWS = 40


@settings(max_examples=25)
@given(
    changed=st.sets(st.integers(0, ROWS - 1)),
    touched=st.sets(st.integers(0, ROWS - 1)),
    cut=st.integers(0, ROWS),
    options=st.sampled_from([TableOptions(), TableOptions.exact(), TableOptions(encoding="raw")]),
)
def test_it_finds_the_rows_that_a_save_of_all_rows_stores(
    changed: set[int], touched: set[int], cut: int, options: TableOptions
) -> None:
    values = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    sums = np.ones(ROWS, np.float32)
    with store_in_memory(threads=None) as store, store.writer() as writer:
        with writer.begin(0) as txn:
            txn.write_table("t", values, slots={"sum": sums}, options=options)
        values[sorted(changed)] += 1
        sums[sorted(touched)] += 1
        with writer.begin(1) as txn:
            found = [
                *txn.changed_rows("t", 0, values[:cut], slots={"sum": sums[:cut]}),
                *txn.changed_rows("t", cut, values[cut:], slots={"sum": sums[cut:]}),
            ]
            stored = txn.write_rows("t", np.arange(ROWS), values, slots={"sum": sums})

    assert len(found) == stored
    assert found == (list(range(ROWS)) if options.encoding == "raw" else sorted(changed | touched))


def test_rows_that_cannot_be_encoded_count_as_changed() -> None:
    values = np.zeros((4, 2), np.float32)
    with store_in_memory(threads=None) as store, store.writer() as writer:
        with writer.begin(0) as txn:
            txn.write_table("t", values, options=TableOptions.exact(nonfinite="escape"))
        values[2, 1] = np.nan
        with writer.begin(1) as txn:
            assert txn.changed_rows("t", 0, values).tolist() == [2]
