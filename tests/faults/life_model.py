"""A small training in numpy whose store gets faults: the values that a save writes and that a reader must return."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cnr_store import Store, Transaction
from cnr_store.format.commit_record import is_live
from cnr_store.format.layout import DATA_GROUP, segment_key
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.reader import SegmentReader
from tests.support.store_oracle import (
    ABSENT,
    CODED,
    KINDS,
    Array,
    TableModel,
    same_bits,
    training_slots,
    training_values,
)

ROWS, DIM = 96, 4
TABLES = {"user": "lattice", "item": "exact", "small": "affine"}
"""Table to its kind (`tests.support.store_oracle.KINDS`)."""

State = dict[str, Array]
"""The values that a reader must return, by ``table/array`` and ``dense/name``."""


@dataclass
class LifeModel:
    """The values of the training, and the rows that are not saved yet."""

    tables: dict[str, TableModel]
    dense: Array
    dirty: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in TABLES})

    @classmethod
    def fresh(cls, seed: int = 0, rows: int = ROWS) -> LifeModel:
        """A training before its first step."""
        rng = np.random.default_rng([seed, 0])
        tables = {}
        for name, kind in TABLES.items():
            values, slots = training_values(kind, rng, rows, DIM), training_slots(kind, rng, rows, DIM)
            tables[name] = TableModel(kind, values, slots, np.full(rows, CODED, np.uint8))
        return cls(tables, rng.standard_normal(5).astype(np.float32))

    def copy(self) -> LifeModel:
        """Return the same state after a save: no row is left to write."""
        return LifeModel({name: table.copy() for name, table in self.tables.items()}, self.dense.copy())

    def train(self, *seed: int) -> None:
        """Change some rows of each table and delete a few, chosen by the seed alone."""
        rng = np.random.default_rng(seed)
        for name, table in self.tables.items():
            chosen = rng.permutation(table.num_rows)[: max(2, table.num_rows // 8)].astype(np.int64)
            rows, gone = np.sort(chosen[1:]), chosen[:1]
            values = training_values(table.kind, rng, len(rows), DIM)
            table.write(rows, values, training_slots(table.kind, rng, len(rows), DIM))
            table.status[gone] = ABSENT
            self.dirty[name].update(int(row) for row in chosen)
        self.dense = self.dense + np.float32(1)

    def revive(self) -> None:
        """Restore the last values of every deleted row: a table that is written completely has all its rows."""
        for name, table in self.tables.items():
            self.dirty[name].update(int(row) for row in np.flatnonzero(table.status == ABSENT))
            table.status[:] = CODED

    def write(self, txn: Transaction) -> None:
        """Write the rows that changed since the last acknowledged save; in a baseline, also tables without a mirror."""
        if txn.kind == "baseline":
            self.revive()
        whole = [name for name in self.tables if txn.kind == "baseline" and not _is_mirrored(txn, name)]
        for name, table in self.tables.items():
            if name in whole:
                txn.write_table(name, table.values, slots=table.slots, options=KINDS[table.kind].options)
                continue
            rows = np.asarray(sorted(self.dirty[name]), np.int64)
            is_gone = table.status[rows] == ABSENT
            there = rows[~is_gone]
            slots = {slot: array[there] for slot, array in table.slots.items()}
            txn.write_rows(name, there, table.values[there], slots=slots)
            txn.delete_rows(name, rows[is_gone])
        txn.put_dense({"dense": self.dense})

    def saved(self) -> None:
        """A save was acknowledged."""
        self.dirty = {name: set() for name in TABLES}

    def expected(self) -> State:
        """Return the values that a reader of a save of this state gets."""
        state = {
            f"{name}/{array}": values
            for name, table in self.tables.items()
            for array, values in table.expected().items()
        }
        state["dense"] = self.dense.copy()
        return state


def _is_mirrored(txn: Transaction, name: str) -> bool:
    return name in txn.tables and name not in txn.needs_whole_tables


def read_state(snapshot: Snapshot) -> State:
    """Read everything."""
    state: State = {"dense": snapshot.read_dense("dense")}
    for name, kind in TABLES.items():
        view = snapshot.table(name)
        rows = view.schema.num_rows
        values = np.empty((rows, DIM), np.float32)
        slots = {slot: np.empty(rows, np.float32) for slot in KINDS[kind].slots if slot == "row"}
        slots |= {slot: np.empty((rows, DIM), np.float32) for slot in KINDS[kind].slots if slot == "element"}
        view.read_rectangle(values=values, slots=slots)
        state |= {f"{name}/values": values, **{f"{name}/{slot}": array for slot, array in slots.items()}}
    return state


def same_state(left: State, right: State) -> bool:
    """Equal to the bit."""
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)


def differing(left: State, right: State) -> list[str]:
    """Return the names of values that differ."""
    return sorted(
        name
        for name in left.keys() | right.keys()
        if name not in left or name not in right or not same_bits(left[name], right[name])
    )


def unreferenced(store: Store) -> list[str]:
    """The objects below ``data/`` that no live version of a store without branches needs, and those it lacks."""
    head = store.head().record
    named = {*range(head.floor, head.v + 1), *head.kept, *head.tags.values(), *head.channels.values()}
    chains = [store.record(version).chain for version in named if is_live(head, version)]
    listed = {stat.key for stat in store.storage.list_objects("data")} - {DATA_GROUP}
    wanted: set[str] = set()
    for entry in {entry.seg: entry for chain in chains for entry in chain}.values():
        paths = {one.path for one in SegmentReader.open(store.storage, entry).manifest.objects}
        receipts = {f"{path.partition('.')[0]}.receipt.json.zst" for path in paths}
        wanted |= {segment_key(entry.seg, path) for path in {"_segment.json.zst"} | paths}
        wanted |= listed & {segment_key(entry.seg, path) for path in receipts}
    return [
        *(f"orphan {key}" for key in sorted(listed - wanted)),
        *(f"missing {key}" for key in sorted(wanted - listed)),
    ]
