"""Tables that ranks on threads write together, and what a store of them must hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cnr_store import Store
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.shards import Shard
from cnr_store.types import Rectangle
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.memory import created, opened
from tests.support.ranks import ThreadRank, on_ranks
from tests.support.store_oracle import ABSENT, KINDS, TableModel, same_bits, training_slots, training_values

Array = np.ndarray[Any, Any]
Placed = dict[str, list[Rectangle]]

TABLES = {
    "plain": ("lattice_wide", 23, 6),
    "exact": ("coarse_bits", 9, 4),
    "rows": ("lattice", 14, 5),
    "raw": ("raw", 6, 3),
}
"""Name to kind, rows and columns; tables with one-dimensional slots keep all columns on one rank."""
WHOLE_ROWS = {name for name, (kind, _, _) in TABLES.items() if "row" in KINDS[kind].slots}


def open_store(files: Any) -> Store:
    if isinstance(files, Path):
        return Store.open(str(files), fsync=False, threads=1)
    return opened(files)


def new_files() -> IsolatedMemoryFileSystem:
    files = IsolatedMemoryFileSystem()
    created(files).close()
    return files


def draw_placement(draw: Any, world: int) -> list[Placed]:
    """Cut each table row-wise, column-wise, both or not at all, and deal the pieces out to the ranks."""
    placements: list[Placed] = [{} for _ in range(world)]
    for table, (_, rows, dim) in TABLES.items():
        pieces = [Rectangle((0, rows), (0, dim))]
        for _ in range(draw(st.integers(0, 4))):
            one = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
            (a, b), (c, d) = one.rows, one.columns
            if table not in WHOLE_ROWS and d - c > 1 and draw(st.booleans()):
                cut = draw(st.integers(c + 1, d - 1))
                pieces += [Rectangle((a, b), (c, cut)), Rectangle((a, b), (cut, d))]
            else:
                cut = draw(st.integers(a, b))
                pieces += [Rectangle((a, cut), (c, d)), Rectangle((cut, b), (c, d))]
        for piece in dict.fromkeys(pieces):
            placements[draw(st.integers(0, world - 1))].setdefault(table, []).append(piece)
    return placements


def of(array: Array, tile: Rectangle, rows: Array | None = None) -> Array:
    """A rectangle of a table or slot, or some of its rows."""
    chosen: Any = slice(*tile.rows) if rows is None else rows
    return array[chosen] if array.ndim == 1 else array[chosen, slice(*tile.columns)]


def within(rows: Array, tile: Rectangle) -> Array:
    return rows[(rows >= tile.rows[0]) & (rows < tile.rows[1])]


@dataclass
class Change:
    """One save: the touched rows with the values they get, the deleted ones."""

    kind: str
    base: str
    written: dict[str, Array]
    deleted: dict[str, Array]


@dataclass
class Life:
    """The training's tables, and what changed since the last baseline."""

    seed: int
    models: dict[str, TableModel] = field(default_factory=dict)
    changed: dict[str, set[int]] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        for table, (kind, rows, dim) in TABLES.items():
            values = training_values(kind, self.random, rows, dim)
            slots = training_slots(kind, self.random, rows, dim)
            self.models[table] = TableModel(kind, values, slots, np.zeros(rows, np.uint8))
            self.changed[table] = set()

    def copy(self) -> dict[str, TableModel]:
        return {table: model.copy() for table, model in self.models.items()}

    def train(self, kind: str, base: str) -> Change:
        """Touch some rows, make some of them impossible to encode, delete others."""
        change = Change(kind, base, {}, {})
        for table, model in self.models.items():
            touched = np.flatnonzero(self.random.random(model.num_rows) < 0.4)
            present = model.status != ABSENT
            dead = self.random.random(model.num_rows) < 0.15
            dead[touched] = False
            if base == "baseline":  # everything that changed since then is given again
                again = np.asarray(sorted(self.changed[table]), np.int64)
                dead[again[~present[again]]] = True
                touched = np.union1d(touched, again[present[again]])
                dead[touched] = False
            values = training_values(model.kind, self.random, len(touched), model.values.shape[1])
            if table == "raw":  # without a mirror a baseline gives all rows anew, deleted ones included
                dead[:] = False
            else:
                values[self.random.random(len(touched)) < 0.2] = np.nan
            model.write(touched, values, training_slots(model.kind, self.random, len(touched), model.values.shape[1]))
            model.status[dead] = ABSENT
            change.written[table], change.deleted[table] = touched, np.flatnonzero(dead)
            self.changed[table] |= {int(row) for row in (*touched, *np.flatnonzero(dead))}
        self.step += 1
        return change


def declare(txn: Transaction, shards: dict[str, list[Rectangle | None]], models: dict[str, TableModel]) -> None:
    """Begin every table anew, all rows given."""
    given: dict[str, list[Declaration]] = {}
    for table, tiles in shards.items():
        model, options = models[table], KINDS[models[table].kind].options
        for tile in tiles:
            if tile is None:
                txn.write_table(table, model.values, slots=model.slots, options=options)
                continue
            slots = {name: of(slot, tile) for name, slot in model.slots.items()}
            given.setdefault(table, []).append(Declaration(of(model.values, tile), slots, options))
    if txn._state.setup.held.placement is not None:
        txn.declare_tables(given)
    for table, tiles in shards.items():
        for tile in (tile for tile in tiles if tile is not None):
            slots = {name: of(slot, tile) for name, slot in models[table].slots.items()}
            txn.write_table(table, of(models[table].values, tile), slots=slots, rectangle=tile)


def give(
    txn: Transaction, shards: dict[str, list[Rectangle | None]], models: dict[str, TableModel], change: Change
) -> None:
    """Write what a save holds of these shards."""
    for table, tiles in shards.items():
        model = models[table]
        for shard in tiles:
            tile = shard or Rectangle((0, model.num_rows), (0, model.values.shape[1]))
            if txn.kind == "baseline" and table in txn.needs_whole_tables:
                slots = {name: of(slot, tile) for name, slot in model.slots.items()}
                txn.write_table(table, of(model.values, tile), slots=slots, rectangle=shard)
                continue
            rows = within(change.written[table], tile)
            slots = {name: of(slot, tile, rows) for name, slot in model.slots.items()}
            txn.write_rows(table, rows, of(model.values, tile, rows), slots=slots, nonfinite="escape", rectangle=shard)
            txn.delete_rows(table, within(change.deleted[table], tile), rectangle=shard)


def check_state(snapshot: Snapshot, models: dict[str, TableModel]) -> None:
    for table, model in models.items():
        view = snapshot.table(table)
        for name, expected in model.expected().items():
            found = view.read(slot=None if name == "values" else name)
            assert same_bits(found, expected), f"{table}, {name}"


def digest_sums(snapshot: Snapshot) -> dict[str, int | None]:
    sums: dict[str, int | None] = {}
    for part in snapshot.manifests[-1].parts:
        if part.state_digest is None or sums.get(part.table, 0) is None:
            sums[part.table] = None
        else:
            sums[part.table] = ((sums.get(part.table) or 0) + int(part.state_digest, 16)) % (1 << 64)
    return sums


SAVES = st.sampled_from(
    [("delta", "head"), ("delta", "head"), ("delta", "baseline"), ("baseline", "head"), ("abort", "head")]
)


ROWS, DIM = 4096, 8
KIND = KINDS["lattice_wide"]


def row_wise(world: int) -> list[Placed]:
    return [
        {"t": [Rectangle(rows, (0, DIM))]} for rows in pairwise(np.linspace(0, ROWS, world + 1).astype(int).tolist())
    ]


def one_table(kind: str = "lattice_wide") -> dict[str, TableModel]:
    values = training_values(kind, np.random.default_rng(0), ROWS, DIM)
    return {"t": TableModel(kind, values, {}, np.zeros(ROWS, np.uint8))}


def touch(models: dict[str, TableModel], seed: int, stride: int = 5) -> Change:
    rows = np.arange(seed % stride, ROWS, stride)
    models["t"].write(rows, training_values("lattice_wide", np.random.default_rng(seed), len(rows), DIM), {})
    return Change("delta", "head", {"t": rows}, {"t": rows[:0]})


def shards_of(mine: Placed) -> dict[str, list[Rectangle | None]]:
    return {table: list(tiles) for table, tiles in mine.items()}


def started(files: Any, placements: list[Placed], models: dict[str, TableModel]) -> None:
    """A store whose first version these ranks have written."""

    def work(rank: ThreadRank) -> None:
        mine = placements[rank.rank]
        with open_store(files) as store, store.writer(ranks=rank, shards=mine).begin(0) as txn:
            declare(txn, shards_of(mine), models)

    on_ranks(len(placements), work)


def save(writer: Writer, mine: Placed, models: dict[str, TableModel], change: Change, step: int, **wish: Any) -> int:
    with writer.begin(step, **wish) as txn:
        give(txn, shards_of(mine), models, change)
        return txn.commit()


def restore_exactly(writer: Writer, mine: Placed, models: dict[str, TableModel]) -> None:
    """Restore this rank's shards; they are those of the training to the bit."""
    outputs: dict[Shard, dict[str, Array]] = {}
    for table, tiles in mine.items():
        for tile in tiles:
            model = models[table]
            arrays = {"values": model.values, **model.slots}
            outputs[Shard(table, tile)] = {name: np.empty_like(of(array, tile)) for name, array in arrays.items()}
    writer.restore(outputs)
    for shard, arrays in outputs.items():
        assert shard.rectangle is not None
        for name, expected in models[shard.table].expected().items():
            assert same_bits(arrays[name], np.ascontiguousarray(of(expected, shard.rectangle))), (shard, name)
