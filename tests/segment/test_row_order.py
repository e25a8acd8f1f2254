"""Differences in the order of a slot or of classes: which lists have it, what it saves, and that all reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from cnr_store import CorruptStore, Store, TableOptions, verify_store
from cnr_store.encodings import row_kernels
from cnr_store.format import arrays
from cnr_store.format.documents import pack
from cnr_store.format.manifest import decode_manifest
from cnr_store.format.records import RowListEntry, TableSchema
from cnr_store.maintenance.compaction import compact_run
from cnr_store.read.prefetch import chunks_of, fetch_requests
from cnr_store.segment.codes import array_specs
from cnr_store.segment.decoded import Scratch
from cnr_store.segment.groups import CLASSES, LEAST_CODES, GroupShape, classes_of, into_order, order_of, out_of_order
from cnr_store.segment.reader import SegmentReader
from cnr_store.types import Float32s, Lattice, Rectangle
from format_spec.reader.compare import compare
from tests.support import encoding_reference as reference
from tests.support.documents import segment_document
from tests.support.loader_checks import opened_loader
from tests.support.store_oracle import same_bits

ROWS, DIM, STEP = 6000, 16, 0.25
INT16 = np.dtype(np.int16)


# Rows into an order and back.


@pytest.mark.parametrize("count", [0, 1, 2, 255, 3000])
@pytest.mark.parametrize("largest", [0, 1, 60, 32767])
@pytest.mark.parametrize(("width", "dtype"), [(5, np.int16), (8, np.int16), (2, np.int32), (3, np.int32)])
def test_rows_come_back_from_the_order_of_a_stable_sort(
    count: int, largest: int, width: int, dtype: type[np.integer[Any]]
) -> None:
    random = np.random.default_rng(count + largest)
    keys = random.integers(-largest - 1, largest + 1, count).astype(np.int16)
    block = random.integers(-99, 99, (count, width)).astype(dtype)

    ordered = into_order(block, keys)
    back = np.full_like(block, -1)
    out_of_order(ordered, keys, back)

    assert np.array_equal(ordered, block[np.argsort(keys, kind="stable")])
    assert np.array_equal(ordered[reference.sorted_places(keys)], block)
    assert np.array_equal(back, block)


# The choice.


def schema(**slots: Any) -> TableSchema:
    fields = {"dtype": "float32", "encoding": {"encoding": "float_bits", "mantissa_bits": 7}}
    given = {name: {"kind": "row", **fields, **changes} for name, changes in slots.items()}
    document = {"num_rows": 10**6, "dim": DIM, "dtype": "float32", "encoding": Lattice(STEP), "slots": given}
    return msgspec.convert(msgspec.to_builtins(document), TableSchema)


def chosen(table: TableSchema, *, operation: str = "add", **wide: Any) -> str | None:
    specs = array_specs(table)
    return order_of(operation, specs, {name: wide.get(name[6:], INT16) for name in specs})


def test_differences_follow_the_first_slot_of_one_value_per_row() -> None:
    assert chosen(schema(momentum1={})) == "slots/momentum1"
    assert chosen(schema(average={"kind": "element"}, second={}, third={})) == "slots/second"
    assert chosen(schema(first={}, second={}), first=np.dtype(np.int32)) == "slots/second"


def test_differences_follow_classes_where_slots_have_a_value_per_element() -> None:
    assert chosen(schema(average={"kind": "element"})) == CLASSES
    assert chosen(schema(average={"kind": "element"}, first={}), first=np.dtype(np.int32)) == CLASSES
    assert chosen(schema(average={"kind": "element"}), operation="set") is None


def test_other_lists_stay_in_the_order_of_their_ids() -> None:
    table = schema(momentum1={})

    assert chosen(schema()) is None
    assert chosen(table, operation="set") is None
    assert chosen(table, operation="delete") is None
    assert chosen(table, momentum1=np.dtype(np.int32)) is None


@pytest.mark.parametrize(("rows", "has_order"), [(LEAST_CODES // DIM - 1, False), (LEAST_CODES // DIM, True)])
def test_arrays_of_few_codes_stay_in_the_order_of_their_ids(rows: int, has_order: bool) -> None:
    widths = (("codes", INT16, DIM), ("rows", np.dtype(np.int64), None), ("slots/momentum1", INT16, None))

    arrays_of = GroupShape("add", widths, "slots/momentum1").arrays_at("r.add-0", rows, rows)

    assert (arrays_of["codes"].order == "r.add-0.slots.momentum1") == has_order


def test_classes_are_quarters_of_the_rows_by_the_size_of_their_differences() -> None:
    random = np.random.default_rng(2)
    order = random.permutation(400)
    large = np.arange(400)[order][:, None]
    blocks = [
        random.integers(-1, 2, (400, 8)).astype(np.int16) * large.astype(np.int16),
        random.integers(20, 30, (400, 8), np.int32) * large.astype(np.int32),
    ]

    classes = classes_of(blocks)

    assert classes.dtype == np.int16
    by_size = classes[np.argsort(order)]
    assert [np.bincount(by_size[k * 100 + 10 : k * 100 + 90], minlength=4).argmax() for k in range(4)] == [0, 1, 3, 2]
    assert np.bincount(classes).tolist() == [100] * 4


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_sizes_of_differences_equal_those_of_numpy(dtype: type[np.integer[Any]]) -> None:
    info, logs = np.iinfo(dtype), np.log2(1 + np.arange(256)).astype(np.float32)
    block = np.random.default_rng(4).integers(-300, 300, (50, 7)).astype(dtype)
    block[0, :2] = info.min, info.max
    sums = np.ones(50, np.float32)

    row_kernels.add_log_sizes(block, logs, sums)

    sizes = np.log2(1 + np.minimum(np.abs(block.astype(np.int64)), 255))
    assert np.allclose(sums, 1 + sizes.sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_few_rows_and_rows_that_are_alike_have_classes_too(rows: int) -> None:
    assert classes_of([np.zeros((rows, 4), np.int16)]).shape == (rows,)


# A store of them.


class Table:
    """Rows that drift as far as their slot grows, and what a store holds of them."""

    def __init__(self, seed: int = 0, num_rows: int = ROWS, *, by_element: bool = False) -> None:
        self.random = np.random.default_rng(seed)
        self.values = self.random.normal(0, 3, (num_rows, DIM)).astype(np.float32)
        self.slots = self.random.uniform(0.5, 1, (num_rows, DIM) if by_element else num_rows).astype(np.float32)

    def step(self) -> npt.NDArray[np.int64]:
        rows = np.flatnonzero(self.random.random(len(self.slots)) < 0.9).astype(np.int64)
        grown = self.random.uniform(0.05, 2, len(rows)).astype(np.float32)
        self.values[rows] += self.random.normal(0, 0.5, (len(rows), DIM)).astype(np.float32) * grown[:, None]
        self.slots[rows] += np.square(grown) if self.slots.ndim == 1 else np.square(grown)[:, None]
        return rows

    @property
    def stored(self) -> Float32s:
        return np.float32(STEP) * (np.rint(self.values / np.float32(STEP)) + np.float32(0))


def save(writer: Any, table: Table, rows: npt.NDArray[np.int64] | None = None) -> None:
    with writer.begin(1) as txn:
        if rows is None:
            txn.write_table("t", table.values, slots={"momentum1": table.slots}, options=TableOptions(scale=STEP))
        else:
            txn.write_rows("t", rows, table.values[rows], slots={"momentum1": table.slots[rows]})


def saved(store: Store, deltas: int = 0, *, by_element: bool = False) -> Table:
    """A table after its baseline and so many deltas."""
    table = Table(by_element=by_element)
    with store.writer() as writer:
        save(writer, table)
        for _ in range(deltas):
            save(writer, table, table.step())
    return table


def add_list(store: Store, segment: int = -1) -> RowListEntry:
    found = store.snapshot().manifests[segment].parts[0].add
    assert found is not None
    return found


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 2 * DIM * 2000)
    with Store.create(str(tmp_path / "store"), fsync=False, threads=2) as store:
        yield store


@pytest.mark.parametrize("by_element", [False, True])
def test_a_delta_in_order_reads_as_ever(by_element: bool, store: Store) -> None:
    table = saved(store, deltas=2, by_element=by_element)

    own = add_list(store).arrays
    codes = own["codes"]
    assert codes.order == own[CLASSES if by_element else "slots/momentum1"].path
    assert own["slots/momentum1"].order == (codes.order if by_element else msgspec.UNSET)
    assert arrays.chunk_count(codes) == 3
    view = store.snapshot().table("t")
    assert same_bits(view.read(), table.stored)
    assert same_bits(view.read(100, 2345), table.stored[100:2345])
    assert same_bits(view.read_rows(np.asarray([7, 5999])), table.stored[[7, 5999]])
    cut = view.read_rectangle(Rectangle((100, 2345), (3, 9)))["values"]
    assert same_bits(cut, np.ascontiguousarray(table.stored[100:2345, 3:9]))
    assert verify_store(store, deep=True).problems == ()
    assert compare(Path(store.url)) > 0


@pytest.mark.parametrize(("by_element", "most"), [(False, 0.95), (True, 0.97)])
def test_codes_in_order_are_smaller(
    by_element: bool, most: float, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 1 << 20)
    table = Table(num_rows=50_000, by_element=by_element)
    with store.writer() as writer:
        save(writer, table)
        save(writer, table, table.step())

    reader, codes = store.snapshot().readers[-1], add_list(store).arrays["codes"]
    plain = msgspec.structs.replace(codes, order=msgspec.UNSET)
    chunks = range(arrays.chunk_count(codes))
    by_id = sum(len(arrays.encode_chunk(plain, reader.read_chunk(codes, k, Scratch()))) for k in chunks)
    classes = add_list(store).arrays.get(CLASSES)
    beside = 0 if classes is None else sum(reader.chunk_bytes(classes, k) for k in chunks)
    assert sum(reader.chunk_bytes(codes, k) for k in chunks) + beside < most * by_id


@pytest.mark.parametrize("by_element", [False, True])
def test_the_row_order_survives_a_restore_and_a_compaction_of_deltas(by_element: bool, store: Store) -> None:
    table = saved(store, deltas=1, by_element=by_element)
    for _ in range(3):
        with store.writer() as writer:
            writer.restore()
            save(writer, table, table.step())

    compact_run(store, run=(1, 4))

    assert [entry.kind for entry in store.snapshot().record.chain] == ["baseline", "delta", "delta"]
    assert add_list(store, 1).arrays["codes"].order is not msgspec.UNSET
    assert same_bits(store.snapshot().table("t").read(), table.stored)
    assert verify_store(store, deep=True).problems == ()
    assert compare(Path(store.url)) > 0


def test_what_is_read_ahead_names_the_slot_for_the_codes_and_for_itself(store: Store) -> None:
    saved(store, deltas=1)
    snapshot = store.snapshot()
    plan = snapshot.plan("t")

    codes_alone = fetch_requests(snapshot.readers, chunks_of(plan, ["codes"]))
    both = fetch_requests(snapshot.readers, chunks_of(plan, ["codes", "slots/momentum1"]))

    def times(wanted: Any) -> set[int]:
        return {one.times[0] for one in wanted if one.segment == 1 and "momentum1" in one.places[0].path}

    assert (times(codes_alone), times(both)) == ({1}, {2})
    assert len([one for one in codes_alone if "momentum1" in one.places[0].path]) == 3


def test_classes_are_read_ahead_for_each_array_that_lies_in_their_order(store: Store) -> None:
    saved(store, deltas=1, by_element=True)
    snapshot = store.snapshot()
    plan = snapshot.plan("t")

    for names in (["codes"], ["codes", "slots/momentum1"]):
        wanted = fetch_requests(snapshot.readers, chunks_of(plan, names))
        assert {one.times[0] for one in wanted if one.segment == 1 and CLASSES in one.places[0].path} == {len(names)}


def test_the_slot_is_fetched_before_the_codes_that_wait_for_it(store: Store) -> None:
    """It was begun behind them; who asked for it first fetched it by himself, and then once more."""
    saved(store, deltas=1)
    snapshot = store.snapshot()

    wanted = fetch_requests(snapshot.readers, chunks_of(snapshot.plan("t"), ["codes", "slots/momentum1"]))

    at = {one.places[0].path: number for number, one in enumerate(wanted) if one.segment == 1}
    arrays_of = add_list(store).arrays
    for chunk in range(3):
        slot, codes = (arrays.chunk_path(arrays_of[name], chunk) for name in ("slots/momentum1", "codes"))
        assert at[slot] < at[codes]


@pytest.mark.parametrize(
    "damage",
    [
        {"codes": {"order": "nowhere"}},
        {"codes": {"order": "rows"}},
        {"codes": {"order": "codes"}},
        {"slots/momentum1": {"order": "slots/momentum1"}},
        {"rows": {"order": "slots/momentum1"}},
    ],
)
def test_an_order_that_cannot_be_one_is_refused(store: Store, damage: dict[str, dict[str, str]]) -> None:
    saved(store, deltas=1)
    document = segment_document(store)
    found = document["groups"][0]["arrays"]
    for name, changes in damage.items():
        found[name] |= changes

    with pytest.raises(CorruptStore, match="lie in the order of"):
        decode_manifest(pack(document), "here")


def test_an_order_of_another_length_reaches_no_kernel(store: Store) -> None:
    """Also where nobody has checked the manifest."""
    saved(store, deltas=1)
    manifest = store.snapshot().manifests[-1]
    shorter = tuple(
        msgspec.structs.replace(array, shape=(array.shape[0] - 1,)) if "momentum1" in array.path else array
        for array in manifest.arrays
    )
    segment = store.snapshot().record.chain[-1].seg
    reader = SegmentReader(store.storage, segment, msgspec.structs.replace(manifest, arrays=shorter))

    with pytest.raises(CorruptStore, match="cannot lie in the order of"):
        reader.read_chunk(add_list(store).arrays["codes"], 2, Scratch())


def test_a_set_list_has_no_order(store: Store) -> None:
    saved(store)
    document = segment_document(store, 0)
    document["groups"][0]["arrays"]["codes"]["order"] = "slots/momentum1"

    with pytest.raises(CorruptStore, match="lie in the order of"):
        decode_manifest(pack(document), "here")


def test_the_slot_that_gives_the_order_may_be_damaged_and_is_named(store: Store) -> None:
    saved(store, deltas=1)
    segment = store.snapshot().record.chain[-1].seg
    path = f"data/{segment}/{arrays.chunk_path(add_list(store).arrays['slots/momentum1'], 1)}"
    file = Path(store.url) / path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))

    problems = verify_store(store).problems

    assert [problem.path for problem in problems] == [path]


@pytest.mark.parametrize("by_element", [False, True])
@pytest.mark.parametrize("way", [{}, {"kept_as": "codes"}, {"served": "float16"}], ids=str)
def test_a_loader_follows_deltas_in_order(store: Store, way: dict[str, Any], by_element: bool) -> None:
    table, every = Table(by_element=by_element), np.arange(ROWS)
    with store.writer() as writer:
        save(writer, table)
        with opened_loader(store.url, threads=2, **way) as loader:
            save(writer, table, table.step())
            assert add_list(store).arrays["codes"].order is not msgspec.UNSET

            assert loader.poll().error is None

            with opened_loader(store.url, threads=2, **way) as fresh:
                assert loader.version == fresh.version == store.latest_version()
                assert same_bits(loader.lookup("t", every), fresh.lookup("t", every))
            if "served" not in way:
                assert same_bits(loader.lookup("t", every), table.stored)


def test_int32_codes_have_an_order_too(store: Store) -> None:
    table = Table()
    with store.writer() as writer:
        save(writer, table)
        rows = table.step()
        table.values[rows[0]] += np.float32(40_000 * STEP)
        save(writer, table, rows)

    codes = add_list(store).arrays["codes"]
    assert (codes.dtype, codes.order is msgspec.UNSET) == ("int32", False)
    assert same_bits(store.snapshot().table("t").read(), table.stored)
    assert math.isclose(float(table.stored.max()), 40_000 * STEP, rel_tol=0.01)
