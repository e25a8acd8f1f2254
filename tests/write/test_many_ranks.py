"""Lives of a store that several ranks write, on placements that change, against plain numpy and a single writer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import CnrStoreError, Store, verify_store
from cnr_store.errors import (
    BadInput,
    CommitStateUnknown,
    DoesNotApply,
    NonFiniteValues,
    RankFailed,
    RankLost,
    TransactionAborted,
)
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.codes import TableCodes
from cnr_store.segment.shards import Shard
from cnr_store.storage import storage_from_filesystem
from cnr_store.types import Rectangle
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer
from format_spec.reader.compare import compare
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.ranks import ThreadRank, thread_ranks
from tests.support.store_oracle import ABSENT, KINDS, TableModel, same_bits, training_slots, training_values

Array = np.ndarray[Any, Any]
Placed = dict[str, list[Rectangle]]
QUICK = RetryPolicy(deadline_s=0.02, first_delay_s=0.001, max_delay_s=0.002)

TABLES = {
    "plain": ("lattice_wide", 23, 6),
    "exact": ("coarse_bits", 9, 4),
    "rows": ("lattice", 14, 5),
    "raw": ("raw", 6, 3),
}
"""Name to kind, rows and columns; tables with one-dimensional slots keep all columns on one rank."""
WHOLE_ROWS = {name for name, (kind, _, _) in TABLES.items() if "row" in KINDS[kind].slots}


def on_ranks(world: int, work: Callable[[ThreadRank], Any], *, timeout_s: float = 20) -> list[Any]:
    """What each rank returned or raised."""

    def body(rank: ThreadRank) -> Any:
        try:
            return work(rank)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            rank.leave()
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(body, thread_ranks(world, timeout_s=timeout_s)))


def all_well(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def open_store(files: Any) -> Store:
    if isinstance(files, Path):
        return Store.open(str(files), fsync=False, threads=1)
    return Store.open_on(storage_from_filesystem(files, "/root"), threads=1, retry=QUICK)


def new_files() -> IsolatedMemoryFileSystem:
    files = IsolatedMemoryFileSystem()
    Store.create_on(storage_from_filesystem(files, "/root"), threads=1, retry=QUICK).close()
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


@settings(max_examples=12, deadline=None)
@given(st.data(), st.integers(0, 10**6), st.sampled_from(["memory", "mmap"]))
def test_ranks_store_what_one_writer_stores(data: st.DataObject, seed: int, mirror: Any) -> None:
    files, single = new_files(), new_files()
    life = Life(seed)
    alone = open_store(single)
    one = alone.writer()
    whole: dict[str, list[Rectangle | None]] = {table: [None] for table in TABLES}
    with one.begin(0) as txn:
        declare(txn, whole, life.models)
    is_first = True
    for world in data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3)):
        placements = draw_placement(data.draw, world)
        saves = data.draw(st.lists(SAVES, min_size=1, max_size=3))
        culprit = data.draw(st.integers(0, world - 1))
        plan: list[tuple[Change, dict[str, TableModel], dict[str, TableModel]]] = []
        initial = life.copy()
        for kind, base in saves:
            before = life.copy()
            change = life.train(*((kind, base) if kind != "abort" else ("delta", "head")))
            if kind == "abort":
                change.kind = "abort"
                plan.append((change, before, life.copy()))
                change = Change("delta", "head", change.written, change.deleted)
                before = life.copy()
            plan.append((change, before, life.copy()))

        def work(rank: ThreadRank) -> None:
            mine = placements[rank.rank]  # noqa: B023
            shards: dict[str, list[Rectangle | None]] = {table: list(tiles) for table, tiles in mine.items()}
            with open_store(files) as store, store.writer(ranks=rank, shards=mine, mirror=mirror) as writer:
                if is_first:  # noqa: B023
                    with writer.begin(0) as txn:
                        declare(txn, shards, initial)  # noqa: B023
                else:
                    restore_exactly(writer, mine, initial)  # noqa: B023
                for number, (change, _, after) in enumerate(plan):  # noqa: B023
                    if change.kind == "abort":
                        give_up(writer, shards, change, after, is_culprit=rank.rank == culprit)  # noqa: B023
                        continue
                    with writer.begin(number + 1, change.kind, base=change.base) as txn:  # type: ignore[arg-type]
                        give(txn, shards, after, change)
                    if number == len(plan) - 1:  # noqa: B023
                        restore_exactly(writer, mine, after)

        all_well(on_ranks(world, work))
        is_first = False
        for number, (change, _, after) in enumerate(plan):
            if change.kind != "abort":
                with one.begin(number + 1, change.kind, base=change.base) as txn:  # type: ignore[arg-type]
                    give(txn, whole, after, change)
                if txn.kind == "baseline":
                    life.changed = {table: set() for table in TABLES}
                    continue
                for table in TABLES:  # of saves behind a baseline too
                    life.changed[table].update(change.written[table].tolist(), change.deleted[table].tolist())
        with open_store(files) as store:
            check_state(store.snapshot(), life.models)
            check_state(alone.snapshot(), life.models)
            assert digest_sums(store.snapshot()) == digest_sums(alone.snapshot())
            report = verify_store(store, deep=True)
            assert report.is_sound, report
    alone.close()


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


def give_up(
    writer: Writer,
    shards: dict[str, list[Rectangle | None]],
    change: Change,
    after: dict[str, TableModel],
    *,
    is_culprit: bool,
) -> None:
    """One rank fails in the middle of a save: all of them end it, see nothing of it, and can save the next one."""
    version = writer.head.record.v
    error = ZeroDivisionError("training failed")

    def save_half() -> None:
        with writer.begin(99) as txn:
            give(txn, shards, after, change)
            if is_culprit:
                raise error

    with pytest.raises((ZeroDivisionError, TransactionAborted)) as ended:
        save_half()
    assert (ended.value is error) == is_culprit
    assert writer.head.record.v == version
    assert writer.is_synced


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

    all_well(on_ranks(len(placements), work))


def save(writer: Writer, mine: Placed, models: dict[str, TableModel], change: Change, step: int, **wish: Any) -> int:
    with writer.begin(step, **wish) as txn:
        give(txn, shards_of(mine), models, change)
        return txn.commit()


def test_rows_over_four_ranks_go_on_as_tables_of_two_and_end_in_one_process(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "s"), fsync=False, threads=1).close()
    models = one_table()
    tables: list[Placed] = [{"t": [Rectangle((0, ROWS), (0, DIM))]}, {}]
    whole: list[Placed] = [tables[0]]
    started(tmp_path / "s", row_wise(4), models)
    for step, placements in enumerate((row_wise(4), tables, whole), 1):
        before = {"t": models["t"].copy()}
        change = touch(models, step)

        def work(rank: ThreadRank) -> None:
            mine = placements[rank.rank]  # noqa: B023
            with open_store(tmp_path / "s") as store:
                writer = store.writer(ranks=rank, shards=mine)
                restore_exactly(writer, mine, before)  # noqa: B023
                save(writer, mine, models, change, step)  # noqa: B023

        all_well(on_ranks(len(placements), work))
        with open_store(tmp_path / "s") as store:
            check_state(store.snapshot(), models)

    assert compare(tmp_path / "s") > 3


def test_on_restore_each_rank_reads_the_chunks_of_its_rectangle_alone() -> None:
    # No lattice with wide codes: where a narrow mirror turns out too narrow its chunks are read a second time.
    files, models = new_files(), one_table("coarse_bits")
    started(files, row_wise(4), models)
    for placements, share in ((row_wise(4), 1 / 4), (row_wise(2), 1 / 2), (row_wise(1), 1)):
        views = [FaultyFileSystem(files) for _ in placements]

        def work(rank: ThreadRank) -> list[str]:
            mine, view = placements[rank.rank], views[rank.rank]  # noqa: B023
            with open_store(view) as store:
                writer = store.writer(ranks=rank, shards=mine)
                before = len(view.calls)
                restore_exactly(writer, mine, models)
                return [call.path for call in view.calls[before:] if call.operation == "read"]

        paths = all_well(on_ranks(len(placements), work))
        chunks = [[path for path in of_rank if "/c/" in path] for of_rank in paths]
        sizes = [sum(files.size(path) for path in of_rank) for of_rank in chunks]
        others = [path for of_rank in paths for path in of_rank if "/c/" not in path and "/commits/" not in path]
        assert sum(sizes) > 0
        assert all(count == 1 for count in Counter(path for of_rank in chunks for path in of_rank).values())
        assert max(sizes) <= 1.1 * share * sum(sizes)
        assert Counter(path.rsplit("/", 1)[1] for path in others).keys() <= {"_segment.json.zst"}
        assert len(others) == len(placements)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_mirror_of_another_state_is_refused_on_every_rank_and_helped_by_a_restore(culprit: int) -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    change = touch(models, 1)

    def work(rank: ThreadRank) -> tuple[type, int, int]:
        mine = placements[rank.rank]
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards=mine)
            writer.restore()
            if rank.rank == culprit:
                shard = Shard("t", mine["t"][0])
                codes = writer.mirrors.get(shard)
                assert isinstance(codes, TableCodes)
                codes.arrays["codes"][3, 2] += 1
                writer.mirrors.put(shard, codes, codes.digest(store.internals.workers))
            with pytest.raises(DoesNotApply) as refused:
                save(writer, mine, models, change, 1)
            version = store.latest_version()
            rank.exchange(b"")
            with pytest.raises(DoesNotApply):
                writer.begin(1)
            writer.restore()
            return type(refused.value), version, save(writer, mine, models, change, 1)

    outcomes = all_well(on_ranks(2, work))

    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] == outcomes[0][1] + 1
    with open_store(files) as store:
        check_state(store.snapshot(), models)


@pytest.mark.parametrize("kind", ["delta", "baseline"])
def test_a_rank_that_missed_a_commit_may_not_go_on_from_its_mirror(kind: Any) -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    first, second = touch(models, 1), touch(models, 2)

    def work(rank: ThreadRank) -> None:
        mine = placements[rank.rank]
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards=mine)
            writer.restore()
            state = writer._state
            head, snapshot = state.head, state.snapshot
            shard = Shard("t", mine["t"][0])
            mirror = writer.mirrors.get(shard)
            assert mirror is not None
            codes, digest = mirror.arrays["codes"].copy(), writer.mirrors.digest(shard)
            save(writer, mine, models, first, 1)
            if rank.rank == 1:  # as if this rank had not heard of the commit
                state.head, state.snapshot = head, snapshot
                mirror.arrays["codes"] = codes
                writer.mirrors.put(shard, mirror, digest)
            if kind == "delta":
                with pytest.raises(DoesNotApply, match="missed a commit"):
                    writer.begin(2)
                writer.restore()
            with writer.begin(2, kind) as txn:
                assert txn.needs_whole_tables == (["t"] if kind == "baseline" else [])
                if kind == "baseline":
                    tile = mine["t"][0]
                    txn.declare_tables({"t": [Declaration(of(models["t"].values, tile), {}, KIND.options)]})
                    txn.write_table("t", of(models["t"].values, tile), rectangle=tile)
                else:
                    give(txn, shards_of(mine), models, second)

    all_well(on_ranks(2, work))

    with open_store(files) as store:
        check_state(store.snapshot(), models)
        assert verify_store(store, deep=True).is_sound


def _write_badly(txn: Transaction, values: Array, tile: Rectangle, moment: str) -> None:
    if moment == "before declaring":
        raise ZeroDivisionError
    table = "other" if moment == "while declaring" else "t"
    txn.declare_tables({table: [Declaration(values, {}, KIND.options)]})
    if moment == "after declaring":
        raise ZeroDivisionError
    if moment == "while writing":
        txn._staged.schemas.options.clear()  # as a writer that was told of no escapes
        values = np.where(values == values[0, 0], np.float32(np.inf), values)
    txn.write_table("t", values, rectangle=tile)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("moment", ["before declaring", "while declaring", "after declaring", "while writing"])
def test_a_save_that_one_rank_gives_up_ends_on_all_and_they_save_again(culprit: int, moment: str) -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)

    def work(rank: ThreadRank) -> int:
        mine = placements[rank.rank]
        tile, fails = mine["t"][0], rank.rank == culprit
        values = of(models["t"].values, tile)
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards=mine)
            version = writer.head.record.v
            expected: Any = CnrStoreError
            if fails:
                expected = {"while declaring": BadInput, "while writing": NonFiniteValues}.get(
                    moment, ZeroDivisionError
                )
            with pytest.raises(expected), writer.begin(1) as txn:
                _write_badly(txn, values, tile, moment if fails else "")
            assert store.latest_version() == version
            rank.exchange(b"")
            with writer.begin(1) as txn:
                declare(txn, shards_of(mine), models)
            assert txn.version is not None
            return txn.version

    assert len(set(all_well(on_ranks(2, work)))) == 1
    with open_store(files) as store:
        check_state(store.snapshot(), models)


def test_numbers_of_numpy_are_shards_too() -> None:
    files, models = new_files(), one_table()
    cut = np.int64(ROWS // 2)
    started(files, [{"t": [Rectangle((0, cut), (0, DIM))]}, {"t": [Rectangle((cut, ROWS), (0, DIM))]}], models)  # type: ignore[arg-type]

    with open_store(files) as store:
        check_state(store.snapshot(), models)


def test_ranks_that_write_one_document_or_leave_a_table_to_nobody_are_refused_together() -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)

    def twice(rank: ThreadRank) -> None:
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards=placements[rank.rank])
            writer.restore()
            with pytest.raises(BadInput, match="both saved 'reader'"), writer.begin(1) as txn:
                txn.put_document("reader", 1)
            with pytest.raises(BadInput, match="another way than rank 0"), writer.begin(1) as txn:
                _ = [txn.drop_table(table) for table in ["t"] * rank.rank]
            with pytest.raises(BadInput, match="want to save steps"):
                writer.begin(rank.rank)

    def nobody(rank: ThreadRank) -> None:
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards={"u": [Rectangle((0, 0), (0, 1))]})
            writer.restore()
            with pytest.raises(BadInput, match="must be dropped"), writer.begin(1):
                pass

    all_well(on_ranks(2, twice))
    all_well(on_ranks(2, nobody))


def last_record_put(files: Any, placements: list[Placed], models: dict[str, TableModel], change: Change) -> int:
    """The index of rank 0's call that puts the commit record, in a run that restores and saves."""
    view = FaultyFileSystem(files.fork())
    restored_and_saved(view, placements, models, change)
    return max(call.index for call in view.calls if call.operation == "create" and "/commits/" in call.path)


def restored_and_saved(
    view: FaultyFileSystem, placements: list[Placed], models: dict[str, TableModel], change: Change,
    after: Callable[[ThreadRank, Writer, BaseException | None], Any] | None = None,
) -> list[Any]:  # fmt: skip
    """Rank 0 writes through ``view``, the others beside it; ``after`` gets what became of the save."""

    def work(rank: ThreadRank) -> Any:
        mine = placements[rank.rank]
        with open_store(view if rank.rank == 0 else view.inner) as store:
            writer = store.writer(ranks=rank, shards=mine)
            writer.restore()
            error: BaseException | None = None
            try:
                save(writer, mine, models, change, 1)
            except CnrStoreError as raised:
                error = raised
            return None if after is None else after(rank, writer, error)

    return all_well(on_ranks(len(placements), work, timeout_s=5))


def test_a_lost_reply_of_the_record_is_read_back_and_acknowledged_by_all() -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    change = touch(models, 1)
    at = last_record_put(files, placements, models, change)

    view = FaultyFileSystem(files, fault=Fault(FaultKind.LOST_REPLY, at))
    outcomes = restored_and_saved(view, placements, models, change, lambda rank, w, error: (error, w.head.record.v))

    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] is None
    with open_store(files) as store:
        assert store.latest_version() == outcomes[0][1]
        check_state(store.snapshot(), models)


@pytest.mark.parametrize("landed", [True, False])
def test_an_unknown_outcome_is_settled_by_all_ranks_together(landed: bool) -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    change = touch(models, 1)
    at = last_record_put(files, placements, models, change)
    # A reply is lost, or the put fails, and no read back comes through before the deadline.
    is_dark = [True]

    class Dark(FaultyFileSystem):
        cachable = False

        def _hit(self, call: Any) -> Any:
            if not is_dark[0] or call.index < at:
                return None
            if call.index == at:
                return FaultKind.FAIL_AFTER if landed else FaultKind.FAIL_BEFORE
            return FaultKind.FAIL_BEFORE

    def after(rank: ThreadRank, writer: Writer, error: BaseException | None) -> Any:
        assert isinstance(error, CommitStateUnknown), error
        with pytest.raises(CommitStateUnknown):
            writer.begin(2)
        with pytest.raises(CommitStateUnknown):
            writer.settle()
        if rank.rank == 0:
            is_dark[0] = False
        rank.exchange(b"")
        entry = writer.settle()
        assert entry is not None  # the same bytes were sent again where they had not landed
        assert writer.settle() is None
        mine = placements[rank.rank]
        return entry.record.v, save(writer, mine, again, later, 2)

    again = {"t": models["t"].copy()}
    later = touch(again, 2)
    outcomes = restored_and_saved(Dark(files), placements, models, change, after)

    assert outcomes[0] == outcomes[1]
    with open_store(files) as store:
        check_state(store.snapshot(version=outcomes[0][0]), models)
        check_state(store.snapshot(), again)


class Deaf:
    """A rank whose line breaks at its n-th message, after it was sent or before."""

    def __init__(self, inner: ThreadRank, at: Callable[[], bool], *, sends: bool) -> None:
        self.rank, self.world = inner.rank, inner.world
        self._inner, self._at, self._sends = inner, at, sends

    def exchange(self, message: bytes) -> list[bytes]:
        if self._at():
            if self._sends:
                self._inner.exchange(message)
            self._inner.leave()
            raise RankLost("cut")
        return self._inner.exchange(message)

    def another(self) -> Deaf:
        return Deaf(self._inner.another(), self._at, sends=self._sends)


def test_ranks_that_hear_no_more_of_a_commit_find_it_in_the_log() -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    change = touch(models, 1)
    with open_store(files) as store:
        before = store.latest_version()

    def work(rank: ThreadRank) -> Any:
        mine = placements[rank.rank]
        with open_store(files) as store:
            # Rank 0 is cut off when the record is in the log, before it can say so.
            line = rank if rank.rank else Deaf(rank, lambda: store.latest_version() == before + 2, sends=False)
            writer = store.writer(ranks=line, shards=mine)
            writer.restore()
            txn = writer.begin(1)
            give(txn, shards_of(mine), models, change)
            with pytest.raises(RankLost):
                txn.commit()
            known = txn.version
            settled = writer.settle()
            return known, None if settled is None else settled.record.v, txn.version, writer.is_synced

    zero, one = all_well(on_ranks(2, work))

    assert zero == (before + 2, None, before + 2, True)
    assert one == (None, before + 2, before + 2, True)
    with open_store(files) as store:
        check_state(store.snapshot(), models)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_save_with_a_rank_that_is_too_slow_is_lost_on_all_and_nothing_is_visible(slow: int) -> None:
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    old = {"t": models["t"].copy()}
    change = touch(models, 1)
    lost = threading.Event()

    def work(rank: ThreadRank) -> Any:
        mine = placements[rank.rank]
        with open_store(files) as store:
            writer = store.writer(ranks=rank, shards=mine)
            writer.restore()
            txn = writer.begin(1)
            give(txn, shards_of(mine), models, change)
            if rank.rank == slow:
                lost.wait(20)
            try:
                txn.commit()
            except RankFailed as error:
                if rank.rank:
                    with pytest.raises(CommitStateUnknown):
                        writer.settle()
                return type(error), txn.version
            finally:
                lost.set()
            return None

    assert all_well(on_ranks(2, work, timeout_s=0.5)) == [(RankLost, None)] * 2
    with open_store(files) as store:
        check_state(store.snapshot(), old)


def test_a_commit_of_four_ranks_costs_their_objects_and_a_receipt_of_each_that_does_not_commit() -> None:
    files, models, placements = new_files(), one_table(), row_wise(4)
    started(files, placements, models)
    rows = np.arange(3, ROWS // 2, 7)  # of two ranks
    values = training_values("lattice_wide", np.random.default_rng(9), len(rows), DIM)
    models["t"].write(rows, values, {})
    change = Change("delta", "head", {"t": rows}, {"t": rows[:0]})
    views = [FaultyFileSystem(files) for _ in placements]

    def work(rank: ThreadRank) -> Iterator[Any]:
        mine, view = placements[rank.rank], views[rank.rank]
        with open_store(view) as store:
            writer = store.writer(ranks=rank, shards=mine)
            writer.restore()
            at = len(view.calls)
            save(writer, mine, models, change, 1)
            return [(call.operation, call.path.rsplit("/", 1)[1]) for call in view.calls[at:]]  # type: ignore[return-value]

    calls: list[list[tuple[str, str]]] = all_well(on_ranks(4, work))

    with open_store(files) as store:
        version = store.latest_version()
        check_state(store.snapshot(), models)
        segment = store.snapshot().manifests[-1]
    record = f"{version:020d}.json"
    puts = [[name for operation, name in of_rank if operation in ("write", "create")] for of_rank in calls]
    reads = [[name for operation, name in of_rank if operation == "read"] for of_rank in calls]
    per_writer = 1 + 2 * 2  # its Zarr group; metadata and a chunk of the rows and of the codes
    assert [len(of_rank) for of_rank in puts] == [per_writer + 1 + 1 + 1 + 1, per_writer + 1, 1, 1]
    assert len(segment.objects) == 2 * per_writer + 1
    assert [of_rank.count("_receipt.json.zst") for of_rank in puts] == [0, 1, 1, 1]
    assert {record, "_segment.json.zst", "latest.json"} <= set(puts[0])
    assert sorted(reads[0]) == ["_receipt.json.zst"] * 3
    assert [sorted(of_rank) for of_rank in reads[1:]] == [sorted([record, "_segment.json.zst"])] * 3


def test_rank_zero_learns_alone_that_its_commit_lost() -> None:
    """It raised that the outcome is unknown, because the others could not be told."""
    files, models, placements = new_files(), one_table(), row_wise(2)
    started(files, placements, models)
    change = touch(models, 1)
    at = last_record_put(files, placements, models, change)
    rival = open_store(files)

    class Beaten(FaultyFileSystem):
        """Another record takes the position, and the storage is dark until the test says so."""

        cachable = False
        is_dark = True

        def _hit(self, call: Any) -> Any:
            if call.index == at:
                rival.tag("rival", rival.latest_version())
            return FaultKind.FAIL_BEFORE if self.is_dark and call.index >= at else None

    view = Beaten(files)

    def after(rank: ThreadRank, writer: Writer, error: BaseException | None) -> Any:
        assert isinstance(error, CommitStateUnknown), error
        if rank.rank:
            rank.leave()
            with pytest.raises(CommitStateUnknown):
                writer.settle()
            return None
        view.is_dark = False
        return writer.settle(), writer._state.pending

    assert restored_and_saved(view, placements, models, change, after)[0] == (None, None)
    rival.close()
