"""Embedding tables that grow in a library of their own, saved and restored by key: the contract, and its saves.

Why this module exists: NVIDIA dynamicemb, HierarchicalKV, TorchEasyRec's dynamic tables and the like keep rows by key
in memory that they alone know, and evict by score. They have in common that rows go out and in by key. `DynamicTable`
says just that; a store then has them as a table of hashed keys, written by all ranks together (`docs/growing.md`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cnr_store.changes import changes
from cnr_store.errors import DoesNotApply
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.shards import KeyShare
from cnr_store.store.store import Store
from cnr_store.types import RowIds
from cnr_store.write.table_options import TableOptions
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer

Array = npt.NDArray[Any]
_SAMPLE_ROWS = 4096
_SCORE_BITS = (22, 21, 21)
"""A score has 64 bits, a slot's number 24: three slots have it exactly. Parts that are alike cost next to nothing."""
_SCORES = tuple(f"score{part}" for part in range(len(_SCORE_BITS)))


@dataclass(frozen=True, slots=True, eq=False)
class KeyedRows:
    """Rows of a table by key: ``keys`` int64 (n,), ascending, unique; ``values`` float32 (n, dim).

    ``slots``: optimizer state by name, float32 (n,) or (n, dim). ``scores``: uint64 (n,), what evictions go by.
    """

    keys: RowIds
    values: Array
    slots: Mapping[str, Array]
    scores: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class KeyChanges:
    """Keys whose rows were admitted or changed, and keys that were evicted; int64, ascending, unique, disjoint."""

    touched: RowIds
    evicted: RowIds


class DynamicTable(Protocol):
    """A table of one rank, as the library that trains it shows it. Called between two steps, by one thread."""

    dim: int
    slot_kinds: Mapping[str, Literal["row", "element"]]
    """Optimizer state of each row: one number, or one for each element."""

    def keys(self) -> RowIds:
        """Return all keys, ascending."""

    def rows(self, keys: RowIds) -> KeyedRows:
        """Return rows that are there, copied: values, slots and scores of one instant."""

    def take_changes(self) -> KeyChanges:
        """Return what changed since the last call, and forget it."""

    def give_back(self, changes: KeyChanges) -> None:
        """Count changes again: the save that took them failed. Some may have changed since."""

    def replay(self, rows: KeyedRows, evicted: RowIds) -> None:
        """Put rows with their scores, replacing those that are there, and remove evicted keys. These are no changes."""

    def clear(self) -> None:
        """Forget all rows, and what changed."""


@dataclass(frozen=True, slots=True)
class DynamicTables:
    """The dynamic tables of one rank by name, saved and restored together.

    Examples
    --------
    ``with tables.saving(writer, step) as txn: txn.put_dense(dense)`` is one commit of all of them.
    """

    tables: Mapping[str, DynamicTable]
    options: TableOptions = field(default_factory=TableOptions)

    @contextmanager
    def saving(self, writer: Writer, step: int, kind: Literal["baseline", "delta"] = "delta") -> Iterator[Transaction]:
        """Save at the end of the block, in one commit with what the block gives; all ranks together. Blocks.

        A delta has the rows of changed keys and a tombstone for each evicted one; a baseline has all rows. What a save
        that fails has taken counts as changed again, also where its outcome is unknown.

        Raises
        ------
        BadRowIds
            A table has a key that another rank owns by the writer's ``key_rule``.
        CnrStoreError
            As `Writer.begin` and `Transaction.commit`.
        """
        taken: dict[str, KeyChanges] = {}
        try:
            with writer.begin(step, kind) as txn:
                for name, table in sorted(self.tables.items()):
                    taken[name] = table.take_changes()
                    self._stage(txn, name, table, taken[name])
                yield txn
        except BaseException:
            for name, changed in taken.items():
                self.tables[name].give_back(changed)
            raise

    def _stage(self, txn: Transaction, name: str, table: DynamicTable, changed: KeyChanges) -> None:
        is_new = name not in txn.tables
        is_whole = is_new or txn.kind == "baseline"
        rows = table.rows(table.keys() if is_whole else changed.touched)
        slots = {**rows.slots, **dict(zip(_SCORES, _split(rows.scores), strict=True))}
        if is_new:
            kinds = {**table.slot_kinds, **dict.fromkeys(_SCORES, "row")}
            sample = rows.values[:: max(1, len(rows.values) // _SAMPLE_ROWS)]
            txn.create_table(name, dim=table.dim, options=self._options(table), slots=kinds, sample=sample)  # type: ignore[arg-type]
        txn.write_rows(name, rows.keys, rows.values, slots=slots)
        if not is_whole:
            txn.delete_rows(name, changed.evicted)

    def _options(self, table: DynamicTable) -> TableOptions:
        """The caller's options, with exact scores."""
        given = self.options.slot_bits
        by_name = dict(given) if isinstance(given, Mapping) else dict.fromkeys(table.slot_kinds, given)
        known = {name: bits for name, bits in by_name.items() if bits is not None}
        return replace(self.options, slot_bits={**known, **dict.fromkeys(_SCORES, "exact")})

    def restore(self, snapshot: Snapshot, keys: KeyShare) -> None:
        """Replace the tables by a state's rows that this rank owns: any number of ranks may have saved it. Blocks.

        Raises
        ------
        DoesNotApply
            The store's table has another width or other slots. Nothing was replaced.
        TableNotFound
        """
        found = {name: _restored(snapshot, name, table, keys) for name, table in self.tables.items()}
        for name, rows in found.items():
            self.tables[name].clear()
            self.tables[name].replay(rows, np.empty(0, np.int64))

    def replay(self, store: Store, since: int, keys: KeyShare | None = None) -> int:
        """Bring tables that have the state of version ``since`` to the newest one; return that version. Blocks.

        For replicas: every changed row comes whole, with slots and scores; evicted keys go. Any number of ranks, any
        capacity. Nothing that an interrupted run left can be replayed: only commits are read.

        Raises
        ------
        CursorExpired
            The changes since then are not kept any more: `restore`.
        """
        stream = changes(store, since, tables=list(self.tables), slots=True)
        for batch in stream:
            name = batch.column("table")[0].as_py()
            is_evicted = np.asarray([word == "delete" for word in batch.column("op").to_pylist()])
            ids = batch.column("row_id").to_numpy()
            mine = np.ones(len(ids), np.bool_) if keys is None else keys.holds(ids)
            table = self.tables[name]
            chosen = mine & ~is_evicted
            arrays = {
                column.removeprefix("slot_"): _floats_of(batch.column(column))[chosen]
                for column in batch.schema.names
                if column == "values" or column.startswith("slot_")
            }
            table.replay(_keyed(ids[chosen], arrays), ids[mine & is_evicted])
        return since if stream.cursor is None else stream.cursor.version


def _split(scores: npt.NDArray[np.uint64]) -> list[Array]:
    """Return scores as float32 slots that have every bit of them."""
    parts, rest = [], scores.astype(np.uint64)
    for bits in _SCORE_BITS:
        parts.append((rest & np.uint64((1 << bits) - 1)).astype(np.float32))
        rest = rest >> np.uint64(bits)
    return parts


def _joined(parts: list[Array]) -> npt.NDArray[np.uint64]:
    """Return what `_split` was given."""
    scores = np.zeros(len(parts[0]), np.uint64)
    for bits, part in zip(reversed(_SCORE_BITS), reversed(parts), strict=True):
        scores = scores << np.uint64(bits) | part.astype(np.uint64)
    return scores


def _keyed(keys: RowIds, arrays: Mapping[str, Array]) -> KeyedRows:
    slots = {name: array for name, array in arrays.items() if name not in ("values", *_SCORES)}
    return KeyedRows(keys, arrays["values"], slots, _joined([arrays[name] for name in _SCORES]))


def _restored(snapshot: Snapshot, name: str, table: DynamicTable, share: KeyShare) -> KeyedRows:
    view = snapshot.table(name)
    schema = view.schema
    stored = {slot: one.kind for slot, one in schema.slots.items() if slot not in _SCORES}
    expected, found = (table.dim, dict(table.slot_kinds)), (schema.dim, stored)
    if schema.keys != "hashed" or found != expected or not set(_SCORES) <= schema.slots.keys():
        raise DoesNotApply(
            f"table {name!r} is stored with {schema.keys} keys, width {schema.dim} and slots {sorted(schema.slots)}, "
            f"but the training's has width {table.dim} and slots {sorted(table.slot_kinds)}; give it a table that "
            "DynamicTables has saved",
            table=name, expected=expected, found=found,
        )  # fmt: skip
    return _keyed(*view.read_all(slots=True, share=share))


def _floats_of(column: pa.Array) -> Array:
    """Return a column of a change batch, (n,) or (n, width); undefined where it is null."""
    if pa.types.is_fixed_size_list(column.type):
        flat: Array = column.values.to_numpy(zero_copy_only=False)
        return flat[column.offset * column.type.list_size :][: len(column) * column.type.list_size].reshape(
            len(column), -1
        )
    return np.asarray(column.to_numpy(zero_copy_only=False))
