"""A consumer that keeps its own copy of a store's tables by moves, and what it must serve by the snapshot alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cnr_store import Store
from cnr_store.consume.folding import fold_into, fold_target
from cnr_store.consume.held import HeldTable, Overlay, ServedTable
from cnr_store.consume.memory import ANONYMOUS, Memory
from cnr_store.consume.mover import Holding, Moved, move_tables
from cnr_store.consume.moving import Compare, Move, plan_move, plan_path
from cnr_store.consume.shards import HashShard, is_in_shard, rows_in_shard
from cnr_store.records import LogEntry, TableSchema
from cnr_store.segment import SegmentReader
from cnr_store.snapshot import Snapshot
from cnr_store.table_codes import EscapeRows
from cnr_store.types import FloatBits, Lattice, RowRange

Array = np.ndarray[Any, Any]

HOLDINGS = (
    Holding(),
    Holding(holds="codes"),
    Holding("float32"),
    Holding("float16"),
    Holding("bfloat16", shard=RowRange(3, 11)),
    Holding(shard=HashShard(1, 3)),
    Holding("float32", "codes", HashShard(0, 2)),
    Holding("bfloat16", "codes", RowRange(2, 7)),
    Holding(shard=RowRange(-4, 5)),
)


@dataclass
class Consumer:
    """Tables held as ``holding`` says, where it can be; ``folds`` draws whether overlays are put into the held rows."""

    holding: Holding
    random: np.random.Generator
    memory: Memory = ANONYMOUS
    tables: dict[str, ServedTable] = field(default_factory=dict)
    stated: dict[str, int | None] = field(default_factory=dict)
    entry: LogEntry | None = None
    known: dict[str, SegmentReader] = field(default_factory=dict)
    moves: list[str] = field(default_factory=list)

    def hold(self, _name: str, schema: TableSchema) -> Holding:
        has_codes = isinstance(schema.encoding, Lattice | FloatBits)
        holds = self.holding.holds if has_codes else "auto"
        return Holding(self.holding.served, holds, self.holding.shard)

    def plan(self, path: Sequence[LogEntry]) -> Move:
        """By way of ``path``, whose last entry is the target; or by the two ends alone."""
        if self.entry is None:
            return Compare()
        return plan_path([self.entry, *path]) if self.random.random() < 0.5 else plan_move(self.entry, path[-1])

    def go(self, store: Store, path: Sequence[LogEntry]) -> Moved:
        """Move to the last entry of ``path``, and look at every row."""
        target = path[-1]
        snapshot = Snapshot(store.storage, target, store.workers, known=self.known, opens=False)
        move = self.plan(path)
        moved = move_tables(snapshot, move, self.tables, self.hold, self.stated, memory=self.memory)
        self.take(moved)
        self.stated, self.entry, self.known = moved.stated, target, snapshot.known_readers
        self.moves.append(type(move).__name__)
        self.check(snapshot)
        return moved

    def take(self, moved: Moved) -> None:
        """What a publisher does with a move, without readers."""
        for name, change in moved.changes.items():
            if change is None:
                del self.tables[name]
            elif isinstance(change, HeldTable):
                self.tables[name] = ServedTable(change, None, moved.escapes.get(name, EscapeRows()))
            else:
                self.tables[name] = self.with_overlay(self.tables[name], change, moved.escapes.get(name, EscapeRows()))

    def with_overlay(self, table: ServedTable, change: Overlay, escapes: EscapeRows) -> ServedTable:
        if table.overlay is not None:
            change = Overlay.merged(table.name, table.overlay, change)
        if self.random.random() < 0.3:
            return ServedTable(table.held, change, escapes)
        target = fold_target(table.held, change, self.memory)
        fold_into(target, change)
        return ServedTable(target.held, None, escapes)

    def check(self, snapshot: Snapshot) -> None:
        """Every row of the shard is the snapshot's, to the bit."""
        assert set(self.tables) == set(snapshot.tables)
        for name, table in self.tables.items():
            ids, values = expected_rows(snapshot, name, self.holding)
            assert table.schema == snapshot.tables[name], name
            out = np.empty((len(ids), table.kind.served_width), table.kind.served_dtype)
            missing = np.empty(len(ids), np.bool_)
            table.read(ids, out, missing)
            expected = np.empty_like(out)
            assert table.kind.serve(values, expected) < 0
            differ = (out.view(np.uint8) != expected.view(np.uint8)).any(axis=1) if len(ids) else np.zeros(0, np.bool_)
            assert not differ.any(), (name, self.holding, ids[differ], out[differ], expected[differ], self.moves)
            if table.schema.keys == "hashed":
                assert not missing.any()
                assert np.array_equal(table.row_ids(), ids)

    def frozen(self) -> dict[str, bytes]:
        """All that lookups can see, to compare with later."""
        found = {}
        for name, table in self.tables.items():
            ids = table.row_ids()
            out = np.empty((len(ids), table.kind.served_width), table.kind.served_dtype)
            table.read(ids, out)
            found[name] = ids.tobytes() + out.tobytes()
        return found


def expected_rows(snapshot: Snapshot, name: str, holding: Holding) -> tuple[Array, Array]:
    """Ids and floats of the rows of a table that a consumer holds."""
    view = snapshot.table(name)
    if view.schema.keys == "hashed":
        keys, arrays = view.read_all()
        mine = is_in_shard(holding.shard, keys)
        return keys[mine], arrays["values"][mine]
    ids = rows_in_shard(holding.shard, np.arange(view.schema.num_rows, dtype=np.int64))
    return ids, view.read()[ids]
