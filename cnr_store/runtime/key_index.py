"""Maps int64 keys to positions: an open-addressing hash table that can be read while one writer changes it.

A slot is two words: the key, and 0 if it was never used, 1 if the key was removed, else 2 + the position. Keys never
move and slots are never freed, so a search during an insertion finds every key that was there before.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cnr_store.runtime.fences import AHEAD, load_fence, prefetch, store_fence
from cnr_store.runtime.jit import njit

MISSING = -1
"""What stands for the position of a key that is not there."""

_REMOVED, _FIRST = 1, 2
_LEAST_SLOTS = 8
_SLOTS_PER_KEY = 1.5

# Hash shards take splitmix64 of the id itself; a shard's keys would then share their low bits here.
_SALT = np.uint64(0x2545F4914F6CDD1D)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)


class IndexMemory(Protocol):
    """Where an index is."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a C-contiguous array of zeros; ``name`` is for people."""


class _OwnMemory:
    """Memory of this process."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        del name
        return np.zeros(shape, dtype)


_OWN = _OwnMemory()

Keys = npt.NDArray[np.int64]

Slots = npt.NDArray[np.int64]
"""(slots, 2), slots a power of two: what an index is made of."""


@njit(nogil=True, inline="always")
def _home(key: Any, mask: Any) -> Any:
    """The slot where the search for a key begins: the last rounds of splitmix64."""
    x = np.uint64(key) ^ _SALT
    x = (x ^ (x >> _SHIFT_30)) * _MIX_1
    x = (x ^ (x >> _SHIFT_27)) * _MIX_2
    return np.int64((x ^ (x >> _SHIFT_31)) & np.uint64(mask))


@njit(nogil=True)
def insert_keys(slots: Slots, keys: Keys, positions: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Insert until a key is there already; return (its index or -1, slots that were never used before)."""
    mask = len(slots) - 1
    fresh = 0
    for i in range(len(keys)):
        key = keys[i]
        at = _home(key, mask)
        while slots[at, 1] != 0 and slots[at, 0] != key:
            at = (at + 1) & mask
        if slots[at, 1] > _REMOVED:
            return i, fresh
        if slots[at, 1] == 0:
            fresh += 1
            slots[at, 0] = key
            store_fence()
        slots[at, 1] = positions[i] + _FIRST
    return -1, fresh


@njit(nogil=True)
def find_keys(slots: Slots, keys: Keys, out: npt.NDArray[np.int64]) -> int:
    """Write the position of each key, or -1; return how many are missing."""
    mask = len(slots) - 1
    missing = 0
    count = len(keys)
    for i in range(count):
        if i + AHEAD < count:
            prefetch(slots, _home(keys[i + AHEAD], mask))
        key = keys[i]
        home = _home(key, mask)
        at, place = home, slots[home, 1]
        # The key is written before its position is; read the other way round, it is the key of this position.
        load_fence()
        while place != 0 and slots[at, 0] != key:
            at = (at + 1) & mask
            # Only slots that their owner rewrites meanwhile are all taken.
            place = 0 if at == home else slots[at, 1]
            load_fence()
        out[i] = place - _FIRST if place > _REMOVED else MISSING
        missing += 1 if place <= _REMOVED else 0
    return missing


@njit(nogil=True)
def _remove(slots: Slots, keys: Keys, out: npt.NDArray[np.int64]) -> int:
    """Remove keys, writing the position each had, or -1; return how many were there."""
    mask = len(slots) - 1
    removed = 0
    for i in range(len(keys)):
        at = _home(keys[i], mask)
        while slots[at, 1] != 0 and slots[at, 0] != keys[i]:
            at = (at + 1) & mask
        if slots[at, 1] > _REMOVED:
            out[i] = slots[at, 1] - _FIRST
            slots[at, 1] = _REMOVED
            removed += 1
        else:
            out[i] = MISSING
    return removed


@njit(nogil=True)
def _entries(slots: Slots, keys: Keys, positions: npt.NDArray[np.int64]) -> int:
    """Write the keys that are there, and their positions, in the order of their slots; return how many."""
    count = 0
    for at in range(len(slots)):
        if slots[at, 1] > _REMOVED:
            keys[count] = slots[at, 0]
            positions[count] = slots[at, 1] - _FIRST
            count += 1
    return count


class KeyIndex:
    """Positions of int64 keys, any of them, in a table of fixed room.

    One thread may change it at a time; any number may `find` meanwhile, and find the keys that are not being changed.

    Attributes
    ----------
    slots
        int64 (slots, 2), a power of two of them: all that another process needs to read the index.
    count
        Keys that are there.
    used
        Slots in use, those of removed keys among them; what `room` is counted from.
    """

    __slots__ = ("count", "slots", "used")

    def __init__(self, slots: Slots, *, count: int = 0, used: int = 0) -> None:
        self.slots = slots
        self.count = count
        self.used = used

    @classmethod
    def allocate(cls, capacity: int, memory: IndexMemory = _OWN, name: str = "index") -> KeyIndex:
        """Return an empty index with room for ``capacity`` keys; 24 to 48 bytes per key."""
        return cls(memory.allocate(name, (slots_for(capacity), 2), np.int64))

    @property
    def room(self) -> int:
        """How many keys that were never there may still be inserted."""
        return int(len(self.slots) / _SLOTS_PER_KEY) - self.used

    def insert_many(self, keys: Keys, positions: npt.NDArray[np.int64]) -> int:
        """Insert ``keys`` (n,) at ``positions`` (n,) >= 0; return -1, or the index of the first that is there already.

        That key and what follows it are not inserted. Releases the GIL; may be called chunk by chunk.

        Raises
        ------
        ValueError
            There may be no room for them: ask `room`, and take a `grown` index.
        """
        if len(keys) > self.room:
            raise ValueError(f"an index with room for {self.room} keys was given {len(keys)}")
        stopped, fresh = insert_keys(self.slots, keys, positions)
        self.used += int(fresh)
        self.count += len(keys) if stopped < 0 else int(stopped)
        return int(stopped)

    def find(self, keys: Keys, out: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """Return the position of each key (n,), `MISSING` for those that are not there. Releases the GIL."""
        found = np.empty(len(keys), np.int64) if out is None else out
        find_keys(self.slots, keys, found)
        return found

    def remove_many(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Remove keys; return the position that each had, `MISSING` for those that were not there."""
        positions = np.empty(len(keys), np.int64)
        self.count -= int(_remove(self.slots, keys, positions))
        return positions

    def entries(self) -> tuple[Keys, npt.NDArray[np.int64]]:
        """Return all keys and their positions, in no order that means anything."""
        keys, positions = np.empty(self.count, np.int64), np.empty(self.count, np.int64)
        _entries(self.slots, keys, positions)
        return keys, positions

    def grown(self, capacity: int, memory: IndexMemory = _OWN, name: str = "index") -> KeyIndex:
        """Return a new index of the same keys with room for ``capacity`` in all; removed keys take none there."""
        larger = KeyIndex.allocate(max(capacity, self.count), memory, name)
        larger.insert_many(*self.entries())
        return larger


@lru_cache(maxsize=1 << 12)
def slots_for(capacity: int) -> int:
    """Return how many slots an index with room for ``capacity`` keys has: a power of two. Pure."""
    wanted = max(_LEAST_SLOTS, math.ceil((capacity + 1) * _SLOTS_PER_KEY))
    return 1 << (wanted - 1).bit_length()
