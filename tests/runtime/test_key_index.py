"""The index of keys against a dict, over any sequence of insertions, removals and growth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cnr_store.runtime.key_index import MISSING, KeyIndex, slots_for
from cnr_store.serving.rows.shards import HashShard, is_in_shard

# Few different keys, so that they meet; the extremes, 0 and -1 among them.
KEYS = st.one_of(st.integers(-20, 20), st.sampled_from([-(2**63), 2**63 - 1]))


class IndexedKeys(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = KeyIndex.allocate(4)
        self.model: dict[int, int] = {}
        self.ever: set[int] = set()
        self.next_position = 0

    @rule(keys=st.lists(KEYS, max_size=8))
    def insert(self, keys: list[int]) -> None:
        array = np.array(keys, np.int64)
        if len(keys) > self.index.room:
            self.index = self.index.grown(2 * (self.index.count + len(keys)))
            self.ever = set(self.model)
        positions = np.arange(len(keys), dtype=np.int64) + self.next_position
        self.next_position += len(keys)

        stopped = self.index.insert_many(array, positions)

        expected = -1
        for at, key in enumerate(keys):
            if key in self.model:
                expected = at
                break
            self.model[key] = int(positions[at])
            self.ever.add(key)
        assert stopped == expected

    @rule(keys=st.lists(KEYS, max_size=8, unique=True))
    def remove(self, keys: list[int]) -> None:
        freed = self.index.remove_many(np.array(keys, np.int64))

        assert freed.tolist() == [self.model.pop(key, MISSING) for key in keys]

    @precondition(lambda self: len(self.model) > 2)
    @rule()
    def grow(self) -> None:
        self.index = self.index.grown(self.index.count + 1)
        self.ever = set(self.model)

    @invariant()
    def finds_what_the_dict_has(self) -> None:
        keys = [*range(-21, 22), -(2**63), 2**63 - 1]
        found = self.index.find(np.array(keys, np.int64))

        assert found.tolist() == [self.model.get(key, MISSING) for key in keys]

    @invariant()
    def counts_and_entries_are_right(self) -> None:
        keys, positions = self.index.entries()

        assert self.index.count == len(self.model)
        assert self.index.used == len(self.ever)
        assert dict(zip(keys.tolist(), positions.tolist(), strict=True)) == self.model


TestIndexedKeys = IndexedKeys.TestCase
TestIndexedKeys.settings = settings(max_examples=60, stateful_step_count=20)


@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=200))
@settings(max_examples=60)
def test_any_unique_keys_are_found_where_they_were_put(keys: list[int]) -> None:
    index = KeyIndex.allocate(len(keys))
    array = np.array(keys, np.int64)

    assert index.insert_many(array, np.arange(len(keys))) == -1

    assert index.find(array).tolist() == list(range(len(keys)))


def test_keys_of_a_hash_shard_spread_over_all_slots() -> None:
    ids = np.arange(200_000, dtype=np.int64)
    keys = ids[is_in_shard(HashShard(3, 16), ids)]
    index = KeyIndex.allocate(len(keys))
    index.insert_many(keys, np.arange(len(keys)))

    used = index.slots[:, 1] != 0
    neighbours = np.add.reduceat(used, np.arange(0, len(used), 16))

    # With the shard's own hash every sixteenth slot would be a home, and runs of full slots would follow.
    assert neighbours.std() < 2.5


def test_a_fuller_index_than_it_was_made_for_is_refused() -> None:
    index = KeyIndex.allocate(10)
    keys = np.arange(index.room + 1, dtype=np.int64)

    with pytest.raises(ValueError, match="room for"):
        index.insert_many(keys, keys)

    assert index.count == 0


def test_slots_leave_a_third_free() -> None:
    for capacity in (0, 1, 5, 1000, 1_000_000):
        slots = slots_for(capacity)

        assert slots & (slots - 1) == 0
        assert capacity <= slots * 2 / 3
