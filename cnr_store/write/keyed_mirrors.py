"""The code mirror of a table of hashed keys: what a writer keeps of its keys, so that it can write differences.

Rows are in no order in the arrays of a `TableCodes`; an index has where. A key that is not there, because it is new or
was deleted or exact, is written as a ``set`` row, so a mirror may lack any key. Memory: the codes of the keys (as of a
dense table), 25 to 75 bytes per key for the index and statuses, and half as many codes again as room to grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cnr_store.format.records import TableSchema
from cnr_store.runtime.key_index import MISSING, KeyIndex
from cnr_store.segment.codes import ABSENT, CODED, Allocate, TableCodes, array_specs
from cnr_store.types import RowIds
from cnr_store.write.delta_rows import EncodedRows
from cnr_store.write.encode import EncodedList

_LEAST_ROWS = 1024


class KeyedMirror:
    """Codes of keys.

    Attributes
    ----------
    codes
        Rows by place; those of no key are absent. Places from ``_unused`` on never had one, ``_free`` ones had.
    """

    def __init__(self, codes: TableCodes, keys: RowIds) -> None:
        """Take ``codes``, of which row i is that of ``keys[i]``; absent ones are free places."""
        self.codes = codes
        status = codes.track_status(CODED)
        there = np.flatnonzero(status == CODED)
        status[status != CODED] = ABSENT
        codes.escapes.drop(codes.escapes.rows)
        self._index = KeyIndex.allocate(len(there))
        self._index.insert_many(keys[there], there)
        self._free = np.flatnonzero(status == ABSENT)
        self._unused = codes.num_rows

    @classmethod
    def empty(cls, schema: TableSchema, allocate: Allocate) -> KeyedMirror:
        """Return a mirror without keys."""
        return cls(_allocated(schema, 0, allocate), np.empty(0, np.int64))

    @property
    def nbytes(self) -> int:
        """Memory held: codes, index, free places."""
        return self.codes.nbytes + self._index.slots.nbytes + self._free.nbytes

    def places(self, keys: RowIds) -> RowIds:
        """Return where the codes of each key are, -1 for those that are not here."""
        return self._index.find(keys)

    def move(self, changes: Sequence[EncodedRows], allocate: Allocate) -> Iterator[EncodedRows]:
        """Yield encoded rows by place, to be put into ``codes``; keys come and go. Once, after the commit has won."""
        for encoded in changes:
            for operation, one in encoded.lists.items():
                if operation in ("delete", "escape"):
                    self._forget(one.row_ids)
        for encoded in changes:
            lists = encoded.lists
            if "set" in lists:
                self._admit(lists["set"].row_ids, allocate)
            moved = {
                operation: EncodedList(self.places(one.row_ids), one.arrays)
                for operation, one in lists.items()
                if operation in ("add", "set")
            }
            yield EncodedRows(encoded.specs, moved)

    def _forget(self, keys: RowIds) -> None:
        places = self._index.remove_many(keys)
        gone = places[places != MISSING]
        self.codes.mark(gone, ABSENT)
        self._free = np.concatenate([self._free, gone])

    def _admit(self, keys: RowIds, allocate: Allocate) -> None:
        new = keys[self.places(keys) == MISSING]
        left = max(0, len(self._free) - len(new))
        places, self._free = self._free[left:], self._free[:left]
        fresh = np.arange(self._unused, self._unused + len(new) - len(places), dtype=np.int64)
        self._unused += len(fresh)
        if self._unused > self.codes.num_rows:
            self._grow(self._unused, allocate)
        if len(new) > self._index.room:
            self._index = self._index.grown(2 * (self._index.count + len(new)))
        self._index.insert_many(new, np.concatenate([places, fresh]))

    def _grow(self, rows: int, allocate: Allocate) -> None:
        """Make room for so many rows, and for half as many as there are."""
        old = self.codes
        size = max(rows, old.num_rows + old.num_rows // 2, _LEAST_ROWS)
        codes = _allocated(old.schema, size, allocate)
        for name, held in old.arrays.items():
            if held.dtype != codes.arrays[name].dtype:
                codes.widen(name)
            codes.arrays[name][: len(held)] = held
        status = codes.track_status(ABSENT)
        status[: old.num_rows] = old.track_status(CODED)
        self.codes = codes


def _allocated(schema: TableSchema, rows: int, allocate: Allocate) -> TableCodes:
    names = mirrored_arrays(schema)
    codes = TableCodes.allocate(schema, 0, rows, names=names, mirror=True, allocate=allocate)
    codes.track_status(ABSENT)
    return codes


def mirrored_arrays(schema: TableSchema) -> tuple[str, ...]:
    """Return the arrays of a table that differences are taken of; none if not of its weights. Pure."""
    specs = array_specs(schema)
    return tuple(name for name, spec in specs.items() if spec.is_additive) if specs["codes"].is_additive else ()
