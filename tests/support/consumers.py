"""A consumer that keeps its own copy of a store's tables by moves, and what it must serve by the snapshot alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cnr_store import Store
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import Manifest, TableSchema
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.codes import ExactRows
from cnr_store.segment.reader import SegmentReader
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.merging import merge_into, merge_target
from cnr_store.serving.rows.served_table import BaseTable, Overlay, ServedTable
from cnr_store.serving.rows.shards import HashShard, is_in_shard, rows_in_shard
from cnr_store.serving.update.update_plan import Compare, UpdatePlan, plan_path, plan_update
from cnr_store.serving.update.update_tables import ServeAs, TableUpdates, update_tables
from cnr_store.types import FloatBits, Lattice, RowRange

Array = np.ndarray[Any, Any]

HOLDINGS = (
    ServeAs(),
    ServeAs(kept_as="codes"),
    ServeAs("float32"),
    ServeAs("float16"),
    ServeAs("bfloat16", shard=RowRange(3, 11)),
    ServeAs(shard=HashShard(1, 3)),
    ServeAs("float32", "codes", HashShard(0, 2)),
    ServeAs("bfloat16", "codes", RowRange(2, 7)),
    ServeAs(shard=RowRange(-4, 5)),
)


class TrackedMemory(Memory):
    """Memory whose blocks are told apart, and kept until they are released."""

    def __init__(self) -> None:
        self.live: dict[int, Array] = {}
        self._next = 0
        self._attempts: list[list[int]] = []

    def allocate(self, name: str, shape: Any, dtype: Any, *, used_rows: int | None = None) -> Array:
        return self._kept(np.zeros(shape, dtype))

    def allocate_together(self, name: str, arrays: Any) -> tuple[Array, ...]:
        whole = self._kept(np.zeros(sum(64 + int(np.prod(s)) * np.dtype(d).itemsize for s, d in arrays), np.uint8))
        parts, low = [], 0
        for shape, dtype in arrays:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            parts.append(whole[low : low + size].view(dtype).reshape(shape))
            low += -(-max(size, 1) // 64) * 64
        return tuple(parts)

    def reserve(self, array: Array, used_rows: int) -> None:
        pass

    def block_of(self, array: Array) -> int | None:
        address = array.ctypes.data
        for number, block in self.live.items():
            if block.ctypes.data <= address < block.ctypes.data + max(1, block.nbytes):
                return number
        return None

    def release(self, block: int) -> None:
        self.live.pop(block, None)

    def blocks_of(self, arrays: Iterable[Array]) -> set[int]:
        blocks = {self.block_of(array) for array in arrays}
        assert None not in blocks
        return {block for block in blocks if block is not None}

    def keep_only(self, blocks: set[int]) -> None:
        """What a publisher does when a view is gone."""
        self.live = {number: block for number, block in self.live.items() if number in blocks}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        taken: list[int] = []
        self._attempts.append(taken)
        try:
            yield
        except BaseException:
            for block in taken:
                self.release(block)
            raise
        finally:
            self._attempts = [one for one in self._attempts if one is not taken]

    def _kept(self, array: Array) -> Array:
        self._next += 1
        self.live[self._next] = array
        for taken in self._attempts:
            taken.append(self._next)
        return array


@dataclass
class Consumer:
    """Tables held as ``holding`` says, where it can be; ``merges`` draws whether overlays go into the held rows."""

    holding: ServeAs
    random: np.random.Generator
    memory: Memory = ANONYMOUS
    tables: dict[str, ServedTable] = field(default_factory=dict)
    recorded: Manifest | None = None
    entry: LogEntry | None = None
    known: dict[str, SegmentReader] = field(default_factory=dict)
    plans: list[str] = field(default_factory=list)

    def hold(self, _name: str, schema: TableSchema) -> ServeAs:
        has_codes = isinstance(schema.encoding, Lattice | FloatBits)
        kept_as = self.holding.kept_as if has_codes else "auto"
        return ServeAs(self.holding.served, kept_as, self.holding.shard)

    def plan(self, path: Sequence[LogEntry]) -> UpdatePlan:
        """By way of ``path``, whose last entry is the target; or by the two ends alone."""
        if self.entry is None:
            return Compare()
        return plan_path([self.entry, *path]) if self.random.random() < 0.5 else plan_update(self.entry, path[-1])

    def go(self, store: Store, path: Sequence[LogEntry]) -> TableUpdates:
        """Move to the last entry of ``path``, and look at every row."""
        target = path[-1]
        snapshot = Snapshot(store.storage, target, store.internals.workers, known=self.known, opens=False)
        move = self.plan(path)
        known = set(self.memory.live) if isinstance(self.memory, TrackedMemory) else set()
        updates = update_tables(snapshot, move, self.tables, self.hold, self.recorded, memory=self.memory)
        if isinstance(self.memory, TrackedMemory):
            assert set(self.memory.live) - known == self.memory.blocks_of(
                array for change in updates.changes.values() for array in arrays_of(change)
            )
        self.take(updates)
        if isinstance(self.memory, TrackedMemory):
            tables = self.tables.values()
            held = [array for table in tables for one in (table.base, table.overlay) for array in arrays_of(one)]
            self.memory.keep_only(self.memory.blocks_of(held))
        self.recorded, self.entry, self.known = updates.recorded, target, snapshot.known_readers
        self.plans.append(type(move).__name__)
        self.check(snapshot)
        return updates

    def take(self, updates: TableUpdates) -> None:
        """What a publisher does with a move, without readers."""
        for name, change in updates.changes.items():
            if change is None:
                del self.tables[name]
            elif isinstance(change, BaseTable):
                self.tables[name] = ServedTable(change, None, updates.exact_rows.get(name, ExactRows()))
            else:
                self.tables[name] = self.with_overlay(
                    self.tables[name], change, updates.exact_rows.get(name, ExactRows())
                )

    def with_overlay(self, table: ServedTable, change: Overlay, exact_rows: ExactRows) -> ServedTable:
        if table.overlay is not None:
            change = Overlay.merged(table.name, table.overlay, change, self.memory)
        if self.random.random() < 0.3:
            return ServedTable(table.base, change, exact_rows)
        target = merge_target(table.base, change, self.memory)
        merge_into(target, change)
        return ServedTable(target.base, None, exact_rows)

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
            assert not differ.any(), (name, self.holding, ids[differ], out[differ], expected[differ], self.plans)
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


def arrays_of(part: BaseTable | Overlay | None) -> list[Array]:
    """The arrays of a table that come from its memory."""
    if part is None:
        return []
    if isinstance(part, Overlay):
        return [part.ids, part.rows, part.status, part.index.slots]
    found = [part.rows, part.status, None if part.index is None else part.index.slots]
    return [array for array in found if array is not None]


def expected_rows(snapshot: Snapshot, name: str, holding: ServeAs) -> tuple[Array, Array]:
    """Ids and floats of the rows of a table that a consumer holds."""
    view = snapshot.table(name)
    if view.schema.keys == "hashed":
        keys, arrays = view.read_all()
        mine = is_in_shard(holding.shard, keys)
        return keys[mine], arrays["values"][mine]
    ids = rows_in_shard(holding.shard, np.arange(view.schema.num_rows, dtype=np.int64))
    return ids, view.read()[ids]
