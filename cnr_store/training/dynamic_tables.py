"""Embedding tables that grow in a library of their own, saved and restored by key: the contract, and its saves.

Why this module exists: NVIDIA dynamicemb, HierarchicalKV, TorchEasyRec's dynamic tables and the like keep rows by key
in memory that they alone know, and evict by score. They have in common that rows go out and in by key. `DynamicTable`
says just that; a store then has them as a table of hashed keys, written by all ranks together (`docs/growing.md`). A
`CheckpointManager` saves them beside a model; `DynamicTables.saving` saves them without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadDtype, BadRowIds, DoesNotApply
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.shards import KeyShare
from cnr_store.store.store import Store
from cnr_store.types import RowIds
from cnr_store.write.table_options import TableOptions
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer

if TYPE_CHECKING:
    import pyarrow as pa

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
        """Return the rows of exactly these keys, copied: values, slots and scores of one instant.

        They are keys that `keys` or `take_changes` has just returned, so each has a row.
        """

    def take_changes(self) -> KeyChanges:
        """Return what changed since the last call, and forget it. What counts is whether a key has a row now.

        So a key that was evicted and admitted again is touched, and one that was admitted and evicted again is evicted.
        """

    def give_back(self, changes: KeyChanges) -> None:
        """Count changes again: the save that took them failed. Some may have changed since."""

    def replay(self, rows: KeyedRows, evicted: RowIds) -> None:
        """Put rows with their scores, replacing those that are there, and remove evicted keys. These are no changes.

        What has to go because there is no room for all rows is one: `take_changes` names it as evicted.
        """

    def clear(self) -> None:
        """Forget all rows, and what changed."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedKeys:
    """What one save writes of a dynamic table: changed rows, or all of them if it ``is_whole``; copies of one instant.

    ``kinds``: the slots that are stored. ``is_new``: the store does not have the table yet.
    """

    table: str
    dim: int
    kinds: Mapping[str, Literal["row", "element"]]
    options: TableOptions
    rows: KeyedRows
    changed: KeyChanges
    is_new: bool
    is_whole: bool

    def put(self, txn: Transaction) -> None:
        """Write it; blocks. All ranks put the same tables in the same order. Errors are those of `Transaction`."""
        rows = self.rows
        if self.is_new:
            sample = rows.values[:: max(1, len(rows.values) // _SAMPLE_ROWS)]
            txn.create_table(self.table, dim=self.dim, options=self.options, slots=self.kinds, sample=sample)
        slots = {**rows.slots, **dict(zip(_SCORES, _split(rows.scores), strict=True))}
        txn.write_rows(self.table, rows.keys, rows.values, slots=slots)
        if not self.is_whole:
            txn.delete_rows(self.table, self.changed.evicted)


@dataclass(frozen=True, slots=True)
class DynamicTables:
    """The dynamic tables of one rank by name, saved and restored together; ``options`` for all, or by name.

    Examples
    --------
    ``with tables.saving(writer, step) as txn: txn.put_dense(dense)`` is one commit of all of them.
    """

    tables: Mapping[str, DynamicTable]
    options: TableOptions | Mapping[str, TableOptions] = field(default_factory=TableOptions)

    def forms(self) -> dict[str, list[Any]]:
        """Return width and slots by table, as plain JSON: what all ranks must have alike."""
        return {name: [table.dim, dict(table.slot_kinds)] for name, table in sorted(self.tables.items())}

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
        staged: list[StagedKeys] = []
        try:
            with writer.begin(step, kind) as txn:
                staged += stage_changes(self, txn)
                for one in staged:
                    one.put(txn)
                yield txn
        except BaseException:
            give_back_changes(self, staged)
            raise

    def options_of(self, name: str, table: DynamicTable) -> TableOptions:
        """Return the caller's options of a table, with exact scores."""
        options = self.options if isinstance(self.options, TableOptions) else self.options[name]
        given = options.slot_bits
        by_name = dict(given) if isinstance(given, Mapping) else dict.fromkeys(table.slot_kinds, given)
        known = {name: bits for name, bits in by_name.items() if bits is not None}
        return replace(options, slot_bits={**known, **dict.fromkeys(_SCORES, "exact")})

    def found_in(self, snapshot: Snapshot, *, strict: bool = True) -> DynamicTables:
        """Return the tables that a state has: with ``strict`` all, or it raises. No I/O.

        Raises
        ------
        DoesNotApply
            A table has another width or other slots.
        TableNotFound
        """
        found = {name: one for name, one in self.tables.items() if strict or name in snapshot.tables}
        for name, table in found.items():
            _check_form(snapshot, name, table)
        return replace(self, tables=found)

    def restore(self, snapshot: Snapshot, keys: KeyShare) -> None:
        """Replace the tables by a state's rows that this rank owns: any number of ranks may have saved it. Blocks.

        Memory: all rows that it owns, until the tables have them.

        Raises
        ------
        DoesNotApply
            The store's table has another width or other slots. Nothing was replaced.
        TableNotFound
        """
        self.found_in(snapshot)
        found = {name: _keyed(*snapshot.table(name).read_all(slots=True, share=keys)) for name in self.tables}
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
        DoesNotApply
            The store's table has another width or other slots. Nothing was replayed.
        TableNotFound
        """
        from cnr_store.changes import changes  # brings pyarrow, which no other part of a training needs

        self.found_in(store.snapshot(), strict=False)
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


def stage_changes(dynamic: DynamicTables, txn: Transaction) -> list[StagedKeys]:
    """Take what changed, and copy what the transaction is to have of it. If it raises, nothing is taken.

    Raises
    ------
    BadRowIds
        A table names a key as touched and as evicted, or gives rows of other keys than it was asked for.
    BadDtype
        Scores are not uint64.
    """
    staged: list[StagedKeys] = []
    try:
        for name, table in sorted(dynamic.tables.items()):
            is_new = name not in txn.tables
            is_whole = is_new or txn.kind == "baseline"
            changed = table.take_changes()
            try:
                _check_changes(name, changed)
                keys = table.keys() if is_whole else changed.touched
                rows = table.rows(keys)
                _check_rows(name, keys, rows)
            except BaseException:
                table.give_back(changed)
                raise
            kinds = {**table.slot_kinds, **dict.fromkeys(_SCORES, "row")}
            staged.append(StagedKeys(
                name, table.dim, kinds, dynamic.options_of(name, table), rows, changed, is_new, is_whole,  # type: ignore[arg-type]
            ))  # fmt: skip
    except BaseException:
        give_back_changes(dynamic, staged)
        raise
    return staged


def give_back_changes(dynamic: DynamicTables, staged: Iterable[StagedKeys]) -> None:
    """Count as changed again what a save has taken that is not known to be committed."""
    for one in staged:
        dynamic.tables[one.table].give_back(one.changed)


def _check_changes(name: str, changed: KeyChanges) -> None:
    ends = (np.searchsorted(changed.touched, changed.evicted, side) for side in ("left", "right"))
    both = changed.evicted[np.not_equal(*ends)]  # both ascend; an intersection that sorts takes seconds for millions
    if len(both):
        raise BadRowIds(
            f"dynamic table {name!r} names key {both[0]} as touched and as evicted; its take_changes() has to name it "
            "once: as touched if it has a row now, else as evicted",
            table=name, found=int(both[0]),
        )  # fmt: skip


def _check_rows(name: str, keys: RowIds, rows: KeyedRows) -> None:
    """Raise if a table left out a row, which would be a change that no save has, or if its scores are no scores."""
    if not np.array_equal(rows.keys, keys):
        raise BadRowIds(
            f"dynamic table {name!r} was asked for the rows of {len(keys)} keys and gave rows of {len(rows.keys)}, or "
            "of other keys, or in another order; its rows() has to give exactly those that it is asked for, and may "
            "evict nothing while a save copies",
            table=name, expected=len(keys), found=len(rows.keys),
        )  # fmt: skip
    found = getattr(rows.scores, "dtype", type(rows.scores).__name__)
    if found != np.uint64:
        raise BadDtype(
            f"scores of dynamic table {name!r} are {found}, expected a uint64 array; a table that has none gives zeros",
            table=name, expected="uint64", found=str(found),
        )  # fmt: skip


def _split(scores: npt.NDArray[np.uint64]) -> list[Array]:
    """Return scores as float32 slots that have every bit of them."""
    parts, rest = [], scores
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


def _check_form(snapshot: Snapshot, name: str, table: DynamicTable) -> None:
    schema = snapshot.table(name).schema
    stored = {slot: one.kind for slot, one in schema.slots.items() if slot not in _SCORES}
    expected, found = (table.dim, dict(table.slot_kinds)), (schema.dim, stored)
    if schema.keys != "hashed" or found != expected or not set(_SCORES) <= schema.slots.keys():
        raise DoesNotApply(
            f"table {name!r} is stored with {schema.keys} keys, width {schema.dim} and slots {sorted(schema.slots)}, "
            f"but the training's has width {table.dim} and slots {sorted(table.slot_kinds)}; give it a table that "
            "DynamicTables has saved",
            table=name, expected=expected, found=found,
        )  # fmt: skip


def _floats_of(column: pa.Array) -> Array:
    """Return a column of a change batch, (n,) or (n, width); undefined where it is null."""
    if hasattr(column.type, "list_size"):
        flat: Array = column.values.to_numpy(zero_copy_only=False)
        return flat[column.offset * column.type.list_size :][: len(column) * column.type.list_size].reshape(
            len(column), -1
        )
    return np.asarray(column.to_numpy(zero_copy_only=False))
