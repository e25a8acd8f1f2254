"""Which rows a shard holds, and that the shards of a table hold each row once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cnr_store import BadInput
from cnr_store.format.records import TableSchema
from cnr_store.serving.rows.shards import (
    HashShard,
    Shard,
    check_shard,
    dense_range,
    hash_shard_of,
    is_in_shard,
    is_keyed,
    meets_shard,
    rows_in_shard,
)
from cnr_store.types import Raw, RowRange

KEYS = arrays(np.int64, st.integers(0, 60), elements=st.integers(-(2**63), 2**63 - 1))
SHARDS: list[Shard | None] = [None, RowRange(-3, 10), RowRange(5, 5), HashShard(0, 1), HashShard(2, 3), HashShard(6, 7)]


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@given(KEYS, st.integers(1, 9))
def test_the_hash_is_splitmix64_of_the_bits_of_the_id(keys: np.ndarray, count: int) -> None:
    expected = [splitmix64(int(key) % 2**64) % count for key in keys]
    assert hash_shard_of(keys, count).tolist() == expected


@given(KEYS, st.integers(1, 9))
def test_each_row_is_in_one_hash_shard(keys: np.ndarray, count: int) -> None:
    held = np.array([is_in_shard(HashShard(index, count), keys) for index in range(count)])
    assert (held.sum(axis=0) == 1).all()


@given(KEYS, st.sampled_from(SHARDS))
def test_the_rows_of_a_sorted_list_are_those_that_are_in_the_shard(keys: np.ndarray, shard: Shard | None) -> None:
    keys = np.unique(keys)
    np.testing.assert_array_equal(rows_in_shard(shard, keys), keys[is_in_shard(shard, keys)])


def test_hash_shards_of_consecutive_ids_are_even() -> None:
    counts = np.bincount(hash_shard_of(np.arange(100_000), 8), minlength=8)
    assert counts.min() > 12_000
    assert counts.max() < 13_000


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        (None, (0, 20)), (RowRange(3, 9), (3, 9)), (RowRange(15, 99), (15, 20)), (RowRange(30, 99), (20, 20)),
        (RowRange(-5, 4), (0, 4)), (RowRange(-5, -2), (0, 0)), (HashShard(1, 2), (0, 20)),
    ],
)  # fmt: skip
def test_the_dense_range_lies_in_the_table(shard: Shard | None, expected: tuple[int, int]) -> None:
    assert dense_range(shard, 20) == RowRange(*expected)


def test_chunks_without_a_row_of_a_range_do_not_meet_it() -> None:
    shard = RowRange(10, 20)
    assert [meets_shard(shard, *span) for span in [(0, 9), (0, 10), (19, 30), (20, 30), (12, 13)]] == [
        False, True, True, False, True,
    ]  # fmt: skip
    assert meets_shard(None, 0, 0)
    assert meets_shard(HashShard(0, 2), 0, 0)


def test_hashed_tables_and_hash_shards_are_held_by_key() -> None:
    dense = TableSchema(num_rows=4, dim=2, dtype="float32", encoding=Raw())
    hashed = TableSchema(num_rows=0, dim=2, dtype="float32", encoding=Raw(), keys="hashed")

    assert [is_keyed(shard, dense) for shard in (None, RowRange(0, 2), HashShard(0, 2))] == [False, False, True]
    assert all(is_keyed(shard, hashed) for shard in (None, RowRange(0, 2), HashShard(0, 2)))


@pytest.mark.parametrize("shard", [RowRange(3, 2), HashShard(2, 2), HashShard(-1, 2), HashShard(0, 0)])
def test_a_shard_that_cannot_be_is_refused(shard: Shard) -> None:
    with pytest.raises(BadInput):
        check_shard(shard)
    for fine in SHARDS:
        assert check_shard(fine) is fine
