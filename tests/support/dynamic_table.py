"""The reference of `DynamicTable`: a hash table on the CPU that trains, and evicts by score in each bucket."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_store.encodings.digest import splitmix64
from cnr_store.training.dynamic_tables import KeyChanges, KeyedRows

BUCKET = 4
NO_KEYS = np.empty(0, np.int64)


class HashTable:
    """``buckets`` of four rows each; a key has its bucket by hash, and takes the place of the lowest score there."""

    def __init__(self, buckets: int, dim: int) -> None:
        self.dim = dim
        self.slot_kinds = {"sum": "row"}
        self.buckets = buckets
        self.clear()

    def clear(self) -> None:
        size = self.buckets * BUCKET
        self._keys, self._is_held = np.zeros(size, np.int64), np.zeros(size, np.bool_)
        self._values, self._sum = np.zeros((size, self.dim), np.float32), np.zeros(size, np.float32)
        self._scores = np.zeros(size, np.uint64)
        self._touched: set[int] = set()
        self._evicted: set[int] = set()
        self.evictions = 0

    # ---- the training

    def train(self, keys: Any, clock: int) -> None:
        """Admit keys, move their rows by a gradient of their own, and their scores to the clock."""
        for key in keys.tolist():
            at = self._admit(key)
            gradient = np.cos(self._values[at] + np.float32(key % 17))
            self._sum[at] += np.float32(np.mean(gradient * gradient))
            self._values[at] -= np.float32(0.1) * gradient / np.sqrt(self._sum[at])
            self._scores[at] = clock
            self._touched.add(key)

    def _admit(self, key: int) -> int:
        at = self._find(key)
        if at is None:
            at = self._place(key)
            random = np.random.default_rng(abs(key))
            self._values[at], self._sum[at] = random.normal(size=self.dim).astype(np.float32), 0
        return at

    def _bucket(self, key: int) -> slice:
        code = splitmix64(np.asarray([key], np.int64).view(np.uint64))
        start = int(code[0] % np.uint64(self.buckets)) * BUCKET
        return slice(start, start + BUCKET)

    def _find(self, key: int) -> int | None:
        place = self._bucket(key)
        hits = np.flatnonzero(self._is_held[place] & (self._keys[place] == key))
        return place.start + int(hits[0]) if len(hits) else None

    def _place(self, key: int) -> int:
        """A place of the key's bucket: a free one, or that of the lowest score, which is evicted."""
        place = self._bucket(key)
        free = np.flatnonzero(~self._is_held[place])
        at = place.start + int(free[0] if len(free) else np.argmin(self._scores[place]))
        if self._is_held[at]:
            self._forget(int(self._keys[at]))
            self.evictions += 1
        self._keys[at], self._is_held[at] = key, True
        self._evicted.discard(key)
        return at

    def _forget(self, key: int) -> None:
        self._touched.discard(key)
        self._evicted.add(key)

    # ---- the contract

    def keys(self) -> Any:
        return np.sort(self._keys[self._is_held])

    def rows(self, keys: Any) -> KeyedRows:
        found = [self._find(key) for key in keys.tolist()]
        assert None not in found, "a key that is not there"
        at = np.asarray(found, np.int64)
        return KeyedRows(keys, self._values[at], {"sum": self._sum[at]}, self._scores[at])

    def take_changes(self) -> KeyChanges:
        changes = KeyChanges(*(np.asarray(sorted(keys), np.int64) for keys in (self._touched, self._evicted)))
        self._touched, self._evicted = set(), set()
        return changes

    def give_back(self, changes: KeyChanges) -> None:
        both = {*changes.touched.tolist(), *changes.evicted.tolist()}
        held = {key for key in both if self._find(key) is not None}
        self._touched |= held
        self._evicted |= both - held

    def replay(self, rows: KeyedRows, evicted: Any) -> None:
        touched, evicted_before, evictions = self._touched, self._evicted, self.evictions
        self._touched, self._evicted = set(), set()
        for key in evicted.tolist():
            at = self._find(key)
            if at is not None:
                self._is_held[at] = False
        for number, key in enumerate(rows.keys.tolist()):
            at = self._find(key)
            at = self._place(key) if at is None else at
            self._values[at], self._sum[at] = rows.values[number], rows.slots["sum"][number]
            self._scores[at] = rows.scores[number]
        without_room = {key for key in self._evicted if self._find(key) is None}
        self._touched, self._evicted = touched - without_room, evicted_before | without_room
        self.evictions = evictions

    def content(self) -> dict[int, Any]:
        """Every row by key, as bytes."""
        held = self.rows(self.keys())
        together = zip(held.values, held.slots["sum"], held.scores, strict=True)
        return {
            int(key): (values.tobytes(), slot.tobytes(), int(score))
            for key, (values, slot, score) in zip(held.keys, together, strict=True)
        }
