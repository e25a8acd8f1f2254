"""The code mirror of a table of hashed keys: what a writer keeps of its keys, so that it can write differences.

Rows are in no order in the arrays of a `TableCodes`; an index has where. A key that is not there, because it is new or
was deleted or exact, is written as a ``set`` row, so a mirror may lack any key. Memory: the codes of the keys (as of a
dense table), 25 to 75 bytes per key for the index and statuses, and half as many codes again as room to grow. With a
limit, keys that come when it is reached stay out. A mirror that is complete has the state digest of its keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from cnr_store.encodings import digest
from cnr_store.encodings.widths import as_columns
from cnr_store.format.records import TableSchema
from cnr_store.runtime.key_index import MISSING, KeyIndex, slots_for
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import ABSENT, CODED, TASK_ROWS, Allocate, ExactRows, TableCodes, array_specs
from cnr_store.types import RowIds
from cnr_store.write.delta_rows import EncodedRows, arriving, escaping
from cnr_store.write.encode import EncodedList, put_escapes

_LEAST_ROWS = 1024
_SLOT_BYTES, _FREE_BYTES = 16, 8


class KeyedMirror:
    """Codes of keys.

    Attributes
    ----------
    codes
        Rows by place; those of no key are absent. Places from ``_unused`` on never had one, ``_free`` ones had.
    digest
        The state digest of all keys that the writer owns; None once some are not here, because of a limit.
    """

    def __init__(self, codes: TableCodes, keys: RowIds, digest: int | None) -> None:
        """Take ``codes``, of which row i is that of ``keys[i]``; absent ones are free places."""
        self.codes = codes
        self.digest = digest
        status = codes.track_status(CODED)
        there = np.flatnonzero(status == CODED)
        status[status != CODED] = ABSENT
        self._exact = ExactRows(keys[codes.escapes.rows], codes.escapes.values)
        codes.escapes = ExactRows()
        self._index = KeyIndex.allocate(len(there))
        self._index.insert_many(keys[there], there)
        self._free = np.flatnonzero(status == ABSENT)
        self._unused = codes.num_rows

    @classmethod
    def empty(cls, schema: TableSchema, allocate: Allocate) -> KeyedMirror:
        """Return a mirror of a table without keys."""
        return cls(_allocated(schema, 0, allocate), np.empty(0, np.int64), 0)

    def emptied(self, allocate: Allocate) -> KeyedMirror:
        """Return a mirror without keys of a table that has some, whose codes are as wide as here."""
        codes = _allocated(self.codes.schema, 0, allocate)
        _widen_as(codes, self.codes)
        return KeyedMirror(codes, np.empty(0, np.int64), None)

    @property
    def nbytes(self) -> int:
        """Memory held: codes, index, free places."""
        return self.codes.nbytes + self._index.slots.nbytes + self._free.nbytes

    def places(self, keys: RowIds) -> RowIds:
        """Return where the codes of each key are, -1 for those that are not here."""
        return self._index.find(keys)

    def digest_after(self, changes: Sequence[EncodedRows], workers: Workers) -> int | None:
        """Return the state digest after encoded rows that `move` has not taken yet; None if there is none. Blocks."""
        if self.digest is None:
            return None
        totals = [self.digest]
        for encoded in changes:
            for operation, one in encoded.lists.items():
                if operation == "add":
                    totals.append(self._moving(one, workers))
                    continue
                totals.append(-self._held(one.row_ids, workers))
                if operation != "delete":
                    totals.append((arriving if operation == "set" else escaping)(encoded.specs, one))
        return digest.add_digests(*totals)

    def _moving(self, one: EncodedList, workers: Workers) -> int:
        """Return how differences change the digest: it is linear, but where codes are modulo 2^32 it needs them."""
        specs = {name: self.codes.specs[name] for name in self.codes.arrays}
        places = self.places(one.row_ids) if any(spec.wraps for spec in specs.values()) else one.row_ids

        def change(start: int, stop: int) -> int:
            total, rows = 0, one.row_ids[start:stop]
            for name, spec in specs.items():
                moves = as_columns(one.arrays[name][start:stop])
                if not spec.wraps:
                    total += digest.digest_of_rows(moves, rows, spec.multipliers, digest.NO_PRESENCE)
                    continue
                before = self.codes.arrays[name][places[start:stop]]
                after = before + moves.astype(np.int32)
                total += digest.digest_of_rows(after, rows, spec.multipliers, digest.NO_PRESENCE)
                total -= digest.digest_of_rows(before, rows, spec.multipliers, digest.NO_PRESENCE)
            return total

        return sum(workers.run_blocks(change, len(one.row_ids), TASK_ROWS))

    def _held(self, keys: RowIds, workers: Workers) -> int:
        """Return what keys add to the digest now."""
        places = self.places(keys)
        there = places != MISSING
        leaving = np.isin(self._exact.rows, keys, assume_unique=True)
        exact = ExactRows(self._exact.rows[leaving], {n: v[leaving] for n, v in self._exact.values.items()})
        return self.codes.digest_by_key(keys[there], workers, places[there], exact)

    def move(
        self, changes: Sequence[EncodedRows], allocate: Allocate, after: int | None, limit: int | None
    ) -> Iterator[EncodedRows]:
        """Yield encoded rows by place, to be put into ``codes``; keys come and go. Once, after the commit has won.

        Parameters
        ----------
        after
            What `digest_after` returned.
        limit
            Bytes that may be held: new keys that do not fit stay out, and from then on there is no digest.
        """
        self.digest = after
        for encoded in changes:
            for operation, one in encoded.lists.items():
                if operation != "add":
                    self._exact.drop(one.row_ids)
                if operation in ("delete", "escape"):
                    self._forget(one.row_ids)
                if operation == "escape":
                    put_escapes(self._exact, one, self.codes.arrays)
        for encoded in changes:
            lists = encoded.lists
            if "set" in lists:
                self._admit(lists["set"].row_ids, allocate, limit)
            moved = {operation: self._here(one) for operation, one in lists.items() if operation in ("add", "set")}
            yield EncodedRows(encoded.specs, moved)

    def _here(self, one: EncodedList) -> EncodedList:
        """Return rows by place, without those of keys that stay out."""
        places = self.places(one.row_ids)
        if self.digest is not None:
            return EncodedList(places, one.arrays)
        here = places != MISSING
        return EncodedList(places[here], {name: array[here] for name, array in one.arrays.items()})

    def _forget(self, keys: RowIds) -> None:
        places = self._index.remove_many(keys)
        gone = places[places != MISSING]
        self.codes.mark(gone, ABSENT)
        self._free = np.concatenate([self._free, gone])

    def _admit(self, keys: RowIds, allocate: Allocate, limit: int | None) -> None:
        new = keys[self.places(keys) == MISSING]
        if limit is not None and (fitting := self._fitting(len(new), limit)) < len(new):
            new, self.digest = new[:fitting], None
        left = max(0, len(self._free) - len(new))
        places, self._free = self._free[left:], self._free[:left]
        fresh = np.arange(self._unused, self._unused + len(new) - len(places), dtype=np.int64)
        self._unused += len(fresh)
        if len(new) > self._index.room:
            self._index = self._index.grown(self._index_room(len(new), limit))
        if self._unused > self.codes.num_rows:
            self._grow(self._unused, allocate, limit)
        self._index.insert_many(new, np.concatenate([places, fresh]))

    def _fitting(self, new: int, limit: int) -> int:
        """Return how many of ``new`` keys fit into ``limit`` bytes."""

        def size_with(keys: int) -> int:
            rows = max(self.codes.num_rows, self._unused + keys - len(self._free))
            slots = len(self._index.slots) if keys <= self._index.room else slots_for(self._index.count + keys)
            return rows * row_bytes(self.codes) + slots * _SLOT_BYTES

        return max(0, bisect_right(range(new + 1), limit, key=size_with) - 1)

    def _index_room(self, new: int, limit: int | None) -> int:
        """Return the room of the next index: twice that of what it is to have, if that fits."""
        least = self._index.count + new
        rows = max(self.codes.num_rows, self._unused)
        fits = limit is None or rows * row_bytes(self.codes) + slots_for(2 * least) * _SLOT_BYTES <= limit
        return 2 * least if fits else least

    def _grow(self, rows: int, allocate: Allocate, limit: int | None) -> None:
        """Make room for so many rows, and for half as many as there are, or as many as fit."""
        old = self.codes
        size = max(rows, old.num_rows + old.num_rows // 2, _LEAST_ROWS)
        if limit is not None:
            size = max(rows, min(size, (limit - self._index.slots.nbytes) // row_bytes(old)))
        codes = _allocated(old.schema, size, allocate)
        _widen_as(codes, old)
        for name, held in old.arrays.items():
            codes.arrays[name][: len(held)] = held
        status = codes.track_status(ABSENT)
        status[: old.num_rows] = old.track_status(CODED)
        self.codes = codes


def _widen_as(codes: TableCodes, other: TableCodes) -> None:
    for name, held in other.arrays.items():
        if held.dtype != codes.arrays[name].dtype:
            codes.widen(name)


def fitting_rows(schema: TableSchema, limit: int) -> int:
    """Return how many keys of a table fit into ``limit`` bytes. Pure."""
    each = row_bytes(_allocated(schema, 0, np.zeros))

    def size_of(keys: int) -> int:
        return keys * each + slots_for(keys) * _SLOT_BYTES

    most = max(0, limit // (each + _SLOT_BYTES))
    return max(0, bisect_right(range(most + 1), limit, key=size_of) - 1)


def row_bytes(codes: TableCodes) -> int:
    """Return the bytes that a place takes: its codes, its status, and its number if it is free."""
    return sum(int(held.shape[1]) * held.itemsize for held in codes.arrays.values()) + 1 + _FREE_BYTES


def _allocated(schema: TableSchema, rows: int, allocate: Allocate) -> TableCodes:
    names = mirrored_arrays(schema)
    codes = TableCodes.allocate(schema, 0, rows, names=names, mirror=True, allocate=allocate)
    codes.track_status(ABSENT)
    return codes


def mirrored_arrays(schema: TableSchema) -> tuple[str, ...]:
    """Return the arrays of a table that differences are taken of; none if not of its weights. Pure."""
    specs = array_specs(schema)
    return tuple(specs) if specs.are_additive else ()
