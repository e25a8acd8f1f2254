"""Many tables that are read together: the same values, mirrors and errors as table by table."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import CorruptStore, Store, TableOptions
from cnr_store.errors import BadInput, CorruptObject, StorageFailure
from cnr_store.format import layout
from cnr_store.maintenance.compaction import merge
from cnr_store.maintenance.compaction.plan import Run
from cnr_store.maintenance.compaction.tasks import compactable_run, plan_tasks
from cnr_store.maintenance.verify import states
from cnr_store.read import joined_replay
from cnr_store.read.joined_replay import LEAST_TABLES
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.threads import Throttle
from cnr_store.segment.codes import Allocate, TableCodes
from cnr_store.segment.writer import SegmentWriter
from cnr_store.serving.rows.served_table import BaseTable
from cnr_store.serving.update.update_plan import Compare
from cnr_store.serving.update.update_tables import ServeAs, update_tables
from cnr_store.storage import storage_from_filesystem
from cnr_store.types import Rectangle
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.transaction import Transaction
from tests.support.consumers import TrackedMemory
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.memory import created, opened, store_in_memory

Array = np.ndarray[Any, Any]
OPTIONS = {
    "lattice": TableOptions(scale=0.25, nonfinite="escape"),
    "exact": TableOptions(encoding="float_bits"),
    "affine": TableOptions(encoding="affine", bits=4),
    "8 bits": TableOptions(bits=8, nonfinite="escape"),
}


@dataclass
class Table:
    """A table as a training has it."""

    name: str
    options: TableOptions
    values: Array
    slots: dict[str, Array]
    cut: bool = False

    @property
    def tiles(self) -> list[Rectangle]:
        rows, dim = self.values.shape
        cuts = [0, dim // 2, dim] if self.cut else [0, dim]
        return [Rectangle((0, rows), (a, b)) for a, b in pairwise(cuts)]

    def slots_of(self, tile: Rectangle, rows: Any = slice(None)) -> dict[str, Array]:
        columns = slice(*tile.columns)
        return {name: one[rows] if one.ndim == 1 else one[rows][:, columns] for name, one in self.slots.items()}


def drawn_table(data: st.DataObject, number: int) -> Table:
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    rows, dim = data.draw(st.sampled_from([(1, 4), (12, 2), (12, 4), (40, 4), (3, 6)]))
    values = random.normal(size=(rows, dim)).astype(np.float32)
    slots = {
        "row": np.abs(random.normal(size=rows)).astype(np.float32),
        "element": np.abs(random.normal(size=(rows, dim))).astype(np.float32),
    }
    kind = data.draw(st.sampled_from(["lattice"] * 4 + sorted(OPTIONS)))
    chosen = data.draw(st.sampled_from([(), (), ("element",), ("row", "element")]))
    cut = data.draw(st.integers(0, 9)) == 0
    return Table(f"t{number}", OPTIONS[kind], values, {name: slots[name] for name in chosen}, cut)


def begin(txn: Transaction, tables: list[Table]) -> None:
    declared = {
        one.name: [
            Declaration(one.values[:, slice(*tile.columns)], one.slots_of(tile), one.options) for tile in one.tiles
        ]
        for one in tables
    }
    txn.declare_tables(declared)
    for one in tables:
        for tile in one.tiles:
            values = one.values[:, slice(*tile.columns)]
            txn.write_table(one.name, values, slots=one.slots_of(tile), rectangle=tile)


def change(data: st.DataObject, txn: Transaction, one: Table, random: np.random.Generator) -> None:
    """Write what a drawn step does to a table."""
    kind = data.draw(st.sampled_from(["rows"] * 6 + ["nothing", "delete", "far", "exact row", "anew"]))
    rows = np.flatnonzero(random.random(len(one.values)) < 0.4).astype(np.int64)
    if kind == "nothing" or not len(rows):
        return
    if kind == "delete":
        for tile in one.tiles:
            txn.delete_rows(one.name, rows, rectangle=tile)
        return
    factor = np.float32(1e5 if kind == "far" and one.options.encoding is None else 1.5)
    one.values[rows] = one.values[rows] * factor + 1
    if kind == "exact row" and one.options.nonfinite == "escape":
        one.values[rows[0], :] = np.nan
    for slot in one.slots.values():
        slot[rows] *= np.float32(1.25)
    for tile in one.tiles:
        written = one.values[rows][:, slice(*tile.columns)]
        txn.write_rows(one.name, rows, written, slots=one.slots_of(tile, rows), rectangle=tile)
    one.values[np.isnan(one.values)] = 0


def outputs_of(snapshot: Snapshot, chosen: Collection[str], with_slots: bool) -> dict[str, dict[str, Array]]:
    """Memory for each table, in which nothing is right."""
    found = {}
    for name in chosen:
        schema = snapshot.tables[name]
        found[name] = {"codes": np.full((schema.num_rows, schema.dim), -9, np.float32)}
        for slot, one in schema.slots.items() if with_slots else ():
            shape = (schema.num_rows,) if one.kind == "row" else (schema.num_rows, schema.dim)
            found[name][f"slots/{slot}"] = np.full(shape, -9, np.float32)
    return found


def mirror_of(codes: TableCodes | None) -> Any:
    if codes is None:
        return None
    arrays = {name: (array.dtype, array.shape, array.tobytes()) for name, array in codes.arrays.items()}
    status = None if codes.status is None else codes.status.tolist()
    return codes.schema, codes.start, codes.stop, codes.columns, arrays, status, codes.escapes.rows.tolist()


def bits(outputs: Mapping[str, Mapping[str, Array]]) -> Any:
    return {table: {name: one.tobytes() for name, one in arrays.items()} for table, arrays in outputs.items()}


def check_equal(snapshot: Snapshot, chosen: Collection[str], *, mirrors: bool, with_slots: bool) -> Collection[str]:
    """Compare what is read together with what is read alone; returns the tables that were read together."""
    allocate = np.zeros if mirrors else None
    together = outputs_of(snapshot, chosen, with_slots)
    found = snapshot.load_together(together, allocate=allocate)
    alone = outputs_of(snapshot, found, with_slots)
    for name, codes in found.items():
        expected = snapshot.table(name).load(alone[name], allocate=allocate)
        assert mirror_of(codes) == mirror_of(expected)
    assert bits({name: together[name] for name in found}) == bits(alone)
    return found.keys()


@contextmanager
def drawn_store(data: st.DataObject, tables: Sequence[Table], versions: int) -> Iterator[Store]:
    """A store of so many versions of some tables, while it is open with chunks of a drawn size."""
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    with (
        pytest.MonkeyPatch.context() as patched, store_in_memory(threads=data.draw(st.sampled_from([1, None]))) as store
    ):  # fmt: skip
        patched.setattr("cnr_store.format.arrays.CHUNK_BYTES", data.draw(st.sampled_from([1 << 20, 160])))
        with store.writer(shards={one.name: one.tiles for one in tables}) as writer:
            with writer.begin(0) as txn:
                begin(txn, tables)
            for step in range(1, versions):
                with writer.begin(step) as txn:
                    for one in tables:
                        change(data, txn, one, random)
        yield store


@settings(deadline=None)
@given(data=st.data())
def test_values_and_mirrors_are_those_of_each_table_alone(data: st.DataObject) -> None:
    tables = [drawn_table(data, number) for number in range(data.draw(st.integers(LEAST_TABLES, 9)))]
    with drawn_store(data, tables, data.draw(st.integers(1, 4))) as store:
        snapshot = store.snapshot()
        chosen = data.draw(st.permutations([one.name for one in tables]))
        check_equal(snapshot, chosen, mirrors=data.draw(st.booleans()), with_slots=data.draw(st.booleans()))
        values = snapshot.read_many()
        whole = [one.name for one in tables if not one.cut or "row" not in one.slots]
        assert bits({name: {"codes": values[name]} for name in whole}) == bits(
            {name: {"codes": snapshot.table(name).read()} for name in whole}
        )


NAMES = [f"narrow {k}" for k in range(5)] + [f"wide {k}" for k in range(5)]
ROWS = 20


@pytest.fixture
def store() -> Iterator[Store]:
    with store_in_memory() as made:
        yield made


def values(rows: int, dim: int, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)


def save(store: Store, *, deltas: int = 2, rows: int = ROWS, names: Collection[str] = NAMES) -> None:
    """A baseline of small tables with a slot, and deltas of a few rows of each."""
    with store.writer() as writer:
        for step in range(deltas + 1):
            with writer.begin(step) as txn:
                for seed, name in enumerate(names):
                    dim = 2 if name.startswith("narrow") else 3
                    slots = {"sum": np.abs(values(rows, dim, 9 + seed + step))}
                    if step == 0:
                        txn.write_table(name, values(rows, dim, seed), slots=slots, options=OPTIONS["lattice"])
                        continue
                    ids = np.arange(seed % 3, rows, 4)
                    new = values(rows, dim, 100 * step + seed)[ids]
                    txn.write_rows(name, ids, new, slots={"sum": slots["sum"][ids]})


@pytest.mark.parametrize("mirrors", [True, False])
@pytest.mark.parametrize("with_slots", [True, False])
def test_small_tables_are_read_together(store: Store, mirrors: bool, with_slots: bool) -> None:
    save(store)
    snapshot = store.snapshot()
    assert {*check_equal(snapshot, NAMES, mirrors=mirrors, with_slots=with_slots)} == {*NAMES}


def test_each_chunk_is_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is for: requests and kernels per chunk, however many tables there are."""
    save(store)
    calls = []
    real = joined_replay.table_kernels.move_mirrors
    monkeypatch.setattr(joined_replay.table_kernels, "move_mirrors", lambda *given: (calls.append(given), real(*given)))
    snapshot = store.snapshot()
    snapshot.load_together(outputs_of(snapshot, NAMES, with_slots=True))
    segments, widths, arrays = 3, 2, 2
    assert len(calls) == segments * widths * arrays


def test_arrays_that_no_table_of_a_chunk_wants_are_not_fetched() -> None:
    """A remote store was asked for those that a table of another chunk wants."""
    fs = FaultyFileSystem(IsolatedMemoryFileSystem())
    save(created(fs))
    with Store.open_on(storage_from_filesystem(fs, "/root"), threads=3) as store:
        snapshot = store.snapshot()
        outputs = outputs_of(snapshot, NAMES, with_slots=True)
        for name in NAMES:
            if name.startswith("wide"):
                del outputs[name]["slots/sum"]
        before = len(fs.calls)
        assert snapshot.load_together(outputs).keys() == {*NAMES}
        slots = [call.path for call in fs.calls[before:] if "slots.sum" in call.path]
        segments = 3
        assert len(slots) == len({*slots}) == segments


def test_few_tables_are_read_one_by_one(store: Store) -> None:
    save(store)
    assert not check_equal(store.snapshot(), NAMES[: LEAST_TABLES - 1], mirrors=True, with_slots=True)


def test_codes_that_fit_no_output_are_held_a_few_tables_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_replay, "APART_BYTES", 100)
    save(store)
    assert len(check_equal(store.snapshot(), NAMES, mirrors=False, with_slots=True)) == len(NAMES)


def test_codes_that_fit_no_output_are_freed_before_others_are_held(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed until the last table was read: as much memory as all of them take."""
    monkeypatch.setattr(joined_replay, "APART_BYTES", 1)
    save(store)
    held: list[weakref.ref[Array]] = []
    counts = []
    real = joined_replay._SmallTable.hold

    def hold(table: joined_replay._SmallTable, allocate: Allocate | None) -> int:
        size = real(table, allocate)
        held.extend(weakref.ref(codes) for codes in table.held.values())
        counts.append(sum(one() is not None for one in held))
        return size

    monkeypatch.setattr(joined_replay._SmallTable, "hold", hold)
    snapshot = store.snapshot()
    assert len(snapshot.load_together(outputs_of(snapshot, NAMES, with_slots=True))) == len(NAMES)
    assert counts == [2] * len(NAMES)


def test_rows_over_two_chunks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of a shared group go on in the next chunk."""
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 30 * 2 * 2)
    save(store)
    snapshot = store.snapshot()
    parts = snapshot.manifests[0].parts
    assert any(part.set is not None and len(part.set.first) == 2 for part in parts)
    assert check_equal(snapshot, NAMES, mirrors=True, with_slots=True)


def test_outputs_that_are_columns_of_a_wider_array_are_left_to_their_table(store: Store) -> None:
    save(store)
    snapshot = store.snapshot()
    outputs = outputs_of(snapshot, NAMES, with_slots=False)
    outputs[NAMES[0]]["codes"] = np.zeros((ROWS, 4), np.float32)[:, :2]
    assert {*snapshot.load_together(outputs)} == {*NAMES[1:]}


def test_read_only_memory_is_refused(store: Store) -> None:
    """It was written, by its address: bytes objects changed, and a file mapped for reading ended the process."""
    save(store)
    snapshot = store.snapshot()
    outputs = outputs_of(snapshot, NAMES, with_slots=False)
    content = bytes(ROWS * 2 * 4)
    outputs[NAMES[0]]["codes"] = np.frombuffer(content, np.float32).reshape(ROWS, 2)
    for read in (snapshot.load_together, lambda given: snapshot.table(NAMES[0]).load(given[NAMES[0]])):
        with pytest.raises(BadInput, match="read-only"):
            read(outputs)
    assert content == bytes(ROWS * 2 * 4)


def test_an_outage_is_raised_by_the_first_read() -> None:
    """Each chunk was asked for, with all retries of the storage's client, before the error was raised."""
    fs = FaultyFileSystem(IsolatedMemoryFileSystem())
    save(created(fs))
    with opened(fs) as store:
        snapshot = store.snapshot()
        fs.arm(Fault(FaultKind.FAIL_BEFORE, len(fs.calls), calls=1000, only="read"))
        with pytest.raises(StorageFailure):
            snapshot.read_many()
        assert fs.hits == 1


def test_a_damaged_chunk_is_an_error_of_its_tables(store: Store) -> None:
    save(store)
    damage(store, "codes")
    snapshot = store.snapshot()
    wide = [name for name in NAMES if name.startswith("wide")]
    assert {*check_equal(snapshot, NAMES, mirrors=True, with_slots=True)} == {*wide}
    with pytest.raises(CorruptObject):
        snapshot.read_many()


def damage(store: Store, array: str) -> None:
    """Flip a bit of an array of the narrow tables in the first delta."""
    reader = store.snapshot().readers[1]
    [part] = reader.manifest.parts_of[NAMES[0]]
    assert part.add is not None
    entry = part.add.group[array]
    place = reader.place_of(entry, 0)
    key = layout.segment_key(reader.name, place.path)
    data = bytearray(store.storage.read(key) or b"")
    data[place.start + place.size // 2] ^= 1
    store.storage.delete([key])
    store.storage.put(key, bytes(data))


def test_a_wrong_digest_is_an_error_of_its_table(store: Store) -> None:
    save(store)
    snapshot = store.snapshot()
    manifest = snapshot.manifests[-1]
    part = manifest.parts_of[NAMES[3]][0]
    manifest.parts_of[NAMES[3]] = (msgspec.structs.replace(part, state_digest="0" * 16),)
    outputs = outputs_of(snapshot, NAMES, with_slots=True)
    assert {*snapshot.load_together(outputs)} == {*NAMES} - {NAMES[3]}
    with pytest.raises(CorruptStore, match="state digest"):
        snapshot.table(NAMES[3]).load(outputs[NAMES[3]])


def test_a_shard_without_rows_beside_a_whole_table_has_its_own_mirror(store: Store) -> None:
    """It got the codes of the whole table."""
    save(store)
    tables = {name: [Rectangle((0, ROWS), (0, 2 if "narrow" in name else 3))] for name in NAMES}
    tables[NAMES[0]].append(Rectangle((ROWS, ROWS), (0, 2)))
    with store.writer(shards=tables) as writer:
        writer.restore()
        held = {
            shard.rectangle: codes for shard, (codes, _) in writer.mirrors.held().items() if shard.table == NAMES[0]
        }
    assert [(held[one].start, held[one].stop) for one in tables[NAMES[0]]] == [(0, ROWS), (ROWS, ROWS)]


def test_a_writer_restores_the_same_mirrors(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store)
    found = []
    for least in (LEAST_TABLES, 1000):
        monkeypatch.setattr(joined_replay, "LEAST_TABLES", least)
        with store.writer() as writer:
            outputs = {name: {"values": np.zeros((ROWS, 2 if "narrow" in name else 3), np.float32)} for name in NAMES}
            writer.restore(outputs)
            held = {shard.table: (mirror_of(codes), digest) for shard, (codes, digest) in writer.mirrors.held().items()}
            found.append((held, bits(outputs)))
    assert found[0] == found[1]


def test_a_loader_serves_the_same_rows_from_as_many_bytes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store)
    with store.writer() as writer:
        writer.restore()
        with writer.begin(9) as txn:
            txn.delete_rows(NAMES[2], np.array([4]))  # so that it is not among the others
    found = []
    for least in (LEAST_TABLES, 1000):
        monkeypatch.setattr(joined_replay, "LEAST_TABLES", least)
        memory, snapshot = TrackedMemory(), store.snapshot()
        updates = update_tables(snapshot, Compare(), {}, lambda *_: ServeAs(), memory=memory)
        rows = {name: one.rows.tobytes() for name, one in updates.changes.items() if isinstance(one, BaseTable)}
        found.append((rows, updates.recorded, updates.rows, updates.size_bytes, len(memory.live)))
    assert found[0] == found[1]


def test_a_compaction_writes_the_same_objects(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store)
    with store.writer() as writer:
        writer.restore()
        with writer.begin(9) as txn:
            txn.delete_rows(NAMES[2], np.array([4]))
            far, slots = np.full((1, 3), 1e4, np.float32), {"sum": np.ones((1, 3), np.float32)}
            txn.write_rows(NAMES[7], np.array([3]), far, slots=slots)  # codes beyond int16
    alone: list[str] = []
    real = merge.merge_piece
    monkeypatch.setattr(merge, "merge_piece", lambda *given: (alone.append(given[2].table), real(*given))[1])
    readers = store.snapshot().readers
    run = Run(0, len(readers), "baseline", "test")
    together = merged_objects(store, run)
    assert {*alone} == {NAMES[2]}
    monkeypatch.setattr(joined_replay, "LEAST_TABLES", 1000)
    assert merged_objects(store, run) == together
    assert {*alone} == {*NAMES}


def merged_objects(store: Store, run: Run) -> Any:
    """Parts and receipt of what a run merges to, with the digest of each object; nothing is committed."""
    readers = store.snapshot().readers
    workers = store.internals.workers
    with store_in_memory() as other:
        out = SegmentWriter(other.storage, readers[0].name, writer="0", workers=workers, throttle=Throttle(None))
        parts = [
            part
            for task in plan_tasks([reader.manifest for reader in readers], run)
            for part in merge.merge_pieces(readers, (run.start, run.stop), task.pieces, out, workers)
        ]
        return parts, out.finish(txn="0" * 32, rank=0, world=1, attempt="0" * 8, base=0, l0=0, parts=parts)


def merged_alone(store: Store, run: Run) -> Any:
    """The same table by table."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(joined_replay, "LEAST_TABLES", 1000)
        return merged_objects(store, run)


@pytest.mark.parametrize("mirrors", [("memory",) * 3, ("none",) * 3, ("memory", "memory", "none")])
def test_a_compaction_of_deltas_writes_the_same_objects(
    store: Store, monkeypatch: pytest.MonkeyPatch, mirrors: tuple[Literal["memory", "none"], ...]
) -> None:
    """Of differences, of absolute rows, of both. Of tables with codes beyond int16, one has no difference beyond it."""
    save(store)
    for mirror, step, steep, wide in zip(mirrors, (9, 10, 11), (6e3, 12e3, 12e3), (12e3, 0, 0), strict=True):
        far = {NAMES[7]: steep, NAMES[8]: wide}
        with store.writer(mirror=mirror) as writer:
            writer.restore()
            with writer.begin(step) as txn:
                if step == 9:
                    txn.resize_table(NAMES[6], ROWS + 4)
                if step == 10:
                    txn.resize_table(NAMES[1], ROWS - 4)
                    txn.delete_rows(NAMES[2], np.array([0]))
                if step == 10 and mirror == "memory":
                    txn.refine_scale(NAMES[3])
                for seed, name in enumerate(NAMES):
                    dim = 2 if name.startswith("narrow") else 3
                    ids = np.arange(seed % 4, ROWS - 4, 3 if name in far else 3 + step % 2)
                    new = values(ROWS, dim, 100 * step + seed)[ids] + np.float32(far.get(name, 0))
                    txn.write_rows(name, ids, new, slots={"sum": np.abs(values(ROWS, dim, step))[ids]})
    alone: list[str] = []
    real = merge.merge_piece
    monkeypatch.setattr(merge, "merge_piece", lambda *given: (alone.append(given[2].table), real(*given))[1])
    run = Run(3, len(store.snapshot().readers), "delta", "test")
    together = merged_objects(store, run)
    others = {"memory": {NAMES[3], NAMES[7]}, "none": set()}
    expected = {NAMES[1], NAMES[2], NAMES[6], *others[mirrors[0]]}
    assert {*alone} == (expected if len({*mirrors}) == 1 else {*NAMES})
    assert merged_alone(store, run) == together


@settings(deadline=None)
@given(data=st.data())
def test_any_run_merges_to_the_same_objects(data: st.DataObject) -> None:
    tables = [drawn_table(data, number) for number in range(data.draw(st.integers(LEAST_TABLES, 9)))]
    with drawn_store(data, tables, data.draw(st.integers(2, 5))) as store:
        manifests = [reader.manifest for reader in store.snapshot().readers]
        start = data.draw(st.integers(0, len(manifests) - 1))
        run = compactable_run(manifests, Run(start, len(manifests), "delta" if start else "baseline", "test"))
        assert merged_objects(store, run) == merged_alone(store, run)


def test_a_damaged_chunk_of_a_run_of_deltas_is_an_error(store: Store) -> None:
    """The rows of its tables are not taken for others."""
    save(store)
    damage(store, "rows")
    with pytest.raises(CorruptObject):
        merged_objects(store, Run(1, 3, "delta", "test"))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_deep_check_finds_the_same(store: Store, monkeypatch: pytest.MonkeyPatch, is_damaged: bool) -> None:
    """A digest that only a segment within the chain states wrongly, and chunks that cannot be read."""
    save(store, deltas=3)
    if is_damaged:
        damage(store, "codes")
    readers = store.snapshot().readers
    parts_of = readers[1].manifest.parts_of
    parts_of[NAMES[8]] = (msgspec.structs.replace(parts_of[NAMES[8]][0], state_digest="0" * 16),)
    alone: list[str] = []
    real = states._check_run
    monkeypatch.setattr(states, "_check_run", lambda *given: (alone.append(given[1]), real(*given))[1])
    found = []
    for least in (LEAST_TABLES, 1000):
        monkeypatch.setattr(joined_replay, "LEAST_TABLES", least)
        rows: list[int] = []
        problems = [str(one) for one in states.check_states(readers, store.internals.workers, rows.append)]
        found.append((problems, rows, [*alone]))
        alone.clear()
    (together, rows_together, left), (expected, rows, _) = found
    narrow = [name for name in NAMES if name.startswith("narrow")]
    assert left == [*(narrow if is_damaged else []), NAMES[8]]
    assert (together, rows_together) == (expected, rows)
    assert len(together) == len(left)
