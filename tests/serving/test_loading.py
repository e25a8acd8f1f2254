"""Loading a table or a shard: every row as the chain has it, in one copy."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import CorruptStore, Store, TableOptions
from cnr_store.errors import NonFiniteValues
from cnr_store.format.records import TableSchema
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED
from cnr_store.segment.reader import SegmentReader
from cnr_store.serving.rows.memory import Memory
from cnr_store.serving.rows.served_table import ServedTable, row_kind
from cnr_store.serving.rows.shards import HashShard, rows_in_shard
from cnr_store.serving.update.loading import load_table, load_together
from cnr_store.serving.update.update_tables import ServeAs
from cnr_store.types import FloatBits, Lattice, RowRange
from tests.support.consumers import HOLDINGS, Consumer, expected_rows
from tests.support.memory import store_in_memory
from tests.support.store_oracle import KINDS, training_slots, training_values

ROWS, DIM = 50, 3
Array = np.ndarray[Any, Any]
OPERATIONS = ("keep", "write", "delete")


def spoiled(kind: str, values: Array, rows: Array) -> Array:
    values[rows, 0] = {"bfloat16": 0x7FC0}.get(KINDS[kind].dtype, np.nan)
    return values


def load(snapshot: Snapshot, holding: ServeAs, table: str = "t") -> ServedTable:
    schema = snapshot.tables[table]
    kept_as = holding.kept_as if isinstance(schema.encoding, Lattice | FloatBits) else "auto"
    kind = row_kind(schema, holding.served, kept_as)
    return load_table(snapshot.readers, table, kind, snapshot.workers, shard=holding.shard)


def check(snapshot: Snapshot, served: ServedTable, holding: ServeAs, status: Array | None = None) -> None:
    ids, values = expected_rows(snapshot, served.name, holding)
    out = np.empty((len(ids), served.kind.served_width), served.kind.served_dtype)
    expected = np.empty_like(out)
    served.read(ids, out)
    served.kind.serve(values, expected)
    assert out.tobytes() == expected.tobytes()
    if status is not None:
        held = np.empty((len(ids), served.kind.width), served.base.rows.dtype)
        assert served.gather_stored(ids, held).tolist() == status[ids].tolist()


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), holding=st.sampled_from(HOLDINGS), window_bytes=st.sampled_from([50, 1 << 20]))
def test_a_table_is_loaded_as_it_is_with_every_status(
    kind: str, seed: int, holding: ServeAs, window_bytes: int
) -> None:
    rng = np.random.default_rng(seed)
    store = store_in_memory(threads=2)
    status = np.zeros(ROWS, np.uint8)
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            values, slots = training_values(kind, rng, ROWS, DIM), training_slots(kind, rng, ROWS, DIM)
            txn.write_table("t", values, slots=slots, options=KINDS[kind].options)
        for step in range(2, int(rng.integers(2, 5))):
            with writer.begin(step) as txn:
                fate = rng.choice(OPERATIONS, ROWS, p=[0.5, 0.4, 0.1])
                written, gone = np.flatnonzero(fate == "write"), np.flatnonzero(fate == "delete")
                escaped = rng.random(len(written)) < 0.2
                values = spoiled(kind, training_values(kind, rng, len(written), DIM), escaped)
                txn.write_rows(
                    "t", written, values, slots=training_slots(kind, rng, len(written), DIM), nonfinite="escape"
                )
                txn.delete_rows("t", gone)
                status[written], status[gone] = np.where(escaped, ESCAPED, CODED), ABSENT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cnr_store.read.table_reader.WINDOW_BYTES", window_bytes)
        served = load(store.snapshot(), holding)
    # NaN is a code like any other where every bit is kept.
    has_escapes = not isinstance(served.schema.encoding, FloatBits) or served.schema.encoding.mantissa_bits == 7
    is_exact_16 = served.schema.dtype != "float32" and isinstance(served.schema.encoding, FloatBits)
    check(store.snapshot(), served, holding, status if has_escapes and not is_exact_16 else None)
    store.close()


def test_hash_shards_are_the_table_together() -> None:
    store = store_in_memory(threads=2)
    rng = np.random.default_rng(1)
    values = rng.standard_normal((300, DIM)).astype(np.float32)
    with store.writer() as writer, writer.begin(1, "baseline") as txn:
        txn.write_table("t", values, options=TableOptions.exact())

    shards = [load(store.snapshot(), ServeAs(shard=HashShard(index, 4))) for index in range(4)]

    ids = [shard.row_ids() for shard in shards]
    assert np.array_equal(np.sort(np.concatenate(ids)), np.arange(300))
    assert all(60 < len(mine) < 90 for mine in ids)
    for shard, mine in zip(shards, ids, strict=True):
        out = np.empty((len(mine), DIM), np.float32)
        shard.read(mine, out)
        assert out.tobytes() == values[mine].tobytes()


@pytest.mark.parametrize(
    "holding", [ServeAs(kept_as="codes"), ServeAs("bfloat16"), ServeAs("float16", shard=HashShard(0, 2))]
)
def test_codes_beyond_int16_are_held_in_int32(holding: ServeAs) -> None:
    store = store_in_memory(threads=2)
    values = np.full((20, DIM), 3, np.float32)
    values[7] = 50_000
    with store.writer() as writer, writer.begin(1, "baseline") as txn:
        txn.write_table("t", values, options=TableOptions(scale=1.0))

    served = load(store.snapshot(), holding)

    is_in = 7 in rows_in_shard(holding.shard, np.arange(20))
    assert served.base.rows.dtype == np.int32 or not is_in
    check(store.snapshot(), served, holding)


def test_a_hashed_table_has_each_key_once_as_its_newest_segment_has_it() -> None:
    store = store_in_memory(threads=2)
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            txn.create_table("h", dim=2, options=TableOptions(scale=0.5))
            txn.write_rows("h", np.array([-(2**63), -4, 7, 9, 2**63 - 1]), np.full((5, 2), 1, np.float32))
        with writer.begin(2) as txn:
            txn.write_rows("h", np.array([-4, 8]), np.array([[2, 2], [np.inf, 0]], np.float32), nonfinite="escape")
            txn.delete_rows("h", np.array([7, 1000]))
        with writer.begin(3) as txn:
            txn.write_rows("h", np.array([7]), np.full((1, 2), 3, np.float32))
            txn.delete_rows("h", np.array([9]))

    for holding in (
        ServeAs(),
        ServeAs(kept_as="codes"),
        ServeAs("bfloat16", shard=HashShard(1, 2)),
        ServeAs(shard=RowRange(-9, 9)),
    ):
        served = load(store.snapshot(), holding, "h")
        keys = rows_in_shard(holding.shard, np.array([-(2**63), -4, 7, 8, 2**63 - 1]))
        assert served.row_ids().tolist() == keys.tolist()
        assert served.base.num_rows == len(keys)
        check(store.snapshot(), served, holding)


def test_int8_rows_of_a_set_only_table_are_fused_and_must_be_finite() -> None:
    store = store_in_memory(threads=2)
    values = np.arange(40, dtype=np.float32).reshape(10, 4)
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            txn.write_table("t", values, options=TableOptions(encoding="raw", nonfinite="escape"))
        consumer = Consumer(ServeAs("int8"), np.random.default_rng(0))
        consumer.go(store, [store.head()])
        assert consumer.tables["t"].base.rows.shape == (10, 12)
        with writer.begin(2) as txn:
            txn.write_rows("t", np.array([2, 5]), values[[5, 2]] * 3)
        consumer.go(store, [store.head()])
        before = consumer.frozen()
        with writer.begin(3) as txn:
            txn.write_rows("t", np.array([4]), np.full((1, 4), np.inf, np.float32), nonfinite="escape")

    with pytest.raises(NonFiniteValues, match="no int8 form"):
        consumer.go(store, [store.head()])
    assert consumer.frozen() == before
    with pytest.raises(NonFiniteValues, match="row 4 of table 't'"):
        load(store.snapshot(), ServeAs("int8"))


@pytest.mark.parametrize("kept_as", ["values", "codes"])
@pytest.mark.parametrize("settled", [True, False])
def test_the_state_digest_is_checked(kept_as: Any, settled: bool) -> None:
    store = store_in_memory(threads=2)
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            txn.write_table("t", np.ones((20, DIM), np.float32), options=TableOptions(scale=0.5))
        if not settled:
            with writer.begin(2) as txn:
                txn.delete_rows("t", np.array([3]))
    snapshot = store.snapshot()
    *before, last = snapshot.readers
    (part,) = last.manifest.parts
    parts = (msgspec.structs.replace(part, state_digest=f"{5:016x}"),)
    wrong = SegmentReader(store.storage, last.name, msgspec.structs.replace(last.manifest, parts=parts))
    kind = row_kind(snapshot.tables["t"], None, kept_as)

    with pytest.raises(CorruptStore, match="state digest"):
        load_table([*before, wrong], "t", kind, store.internals.workers)
    load_table([*before, wrong], "t", kind, store.internals.workers, shard=RowRange(0, 5))  # of a part nothing is known


def test_an_empty_table_is_a_table() -> None:
    store = store_in_memory(threads=2)
    with store.writer() as writer, writer.begin(1, "baseline") as txn:
        txn.write_table("t", np.ones((0, DIM), np.float32), options=TableOptions(scale=0.5))
        txn.create_table("h", dim=DIM, options=TableOptions(scale=0.5))
    for holding in HOLDINGS:
        for table in ("t", "h"):
            assert len(load(store.snapshot(), holding, table).row_ids()) == 0


@pytest.mark.parametrize(
    "holding", [ServeAs(), ServeAs(kept_as="codes"), ServeAs("bfloat16"), ServeAs("float16", "codes")]
)
@pytest.mark.parametrize("deltas", [0, 2])
def test_a_load_takes_one_copy_and_what_is_in_flight(
    holding: ServeAs, deltas: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 1 << 18)
    rows, dim = 60_000, 32
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=1)
    rng = np.random.default_rng(3)
    values = rng.standard_normal((rows, dim)).astype(np.float32)
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            txn.write_table("t", values, options=TableOptions(scale=0.01))
        for step in range(2, 2 + deltas):
            with writer.begin(step) as txn:
                changed = np.sort(rng.choice(rows, 2_000, replace=False))
                txn.write_rows("t", changed, values[changed] + 1)
                txn.delete_rows("t", np.setdiff1d(np.arange(0, rows, 997), changed))
    snapshot = store.snapshot()
    load(snapshot, holding)  # what is compiled on first use

    tracemalloc.start()
    served = load(snapshot, holding)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    parts = [served.base.rows, served.base.status, None if served.base.index is None else served.base.index.slots]
    size = sum(one.nbytes for one in parts if one is not None)
    assert kept < size + 500_000
    # Chunks in flight on the one thread; the statuses of a replay.
    assert peak - size < 1_500_000
    check(snapshot, served, holding)
    store.close()


def test_slots_that_count_in_the_digest_leave_it_unchecked() -> None:
    """They are not read; what is read is checked object by object all the same."""
    store = store_in_memory(threads=2)
    with store.writer() as writer, writer.begin(1, "baseline") as txn:
        slots = {"m": np.ones(20, np.float32)}
        txn.write_table("t", np.ones((20, DIM), np.float32), slots=slots, options=TableOptions.exact())
    check(store.snapshot(), load(store.snapshot(), ServeAs()), ServeAs())


def test_schemas_are_those_of_the_last_segment() -> None:
    store = store_in_memory(threads=2)
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            txn.write_table("t", np.ones((20, DIM), np.float32), options=TableOptions(scale=0.5, fill=7.0))
        with writer.begin(2) as txn:
            txn.resize_table("t", 30)
    served = load(store.snapshot(), ServeAs("bfloat16", "codes"))
    schema: TableSchema = store.snapshot().tables["t"]

    assert served.schema == schema
    assert schema.num_rows == 30
    check(store.snapshot(), served, ServeAs("bfloat16", "codes"), np.r_[np.zeros(20), np.ones(10)].astype(np.uint8))


class CountedMemory(Memory):
    """Memory that counts what is allocated."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def allocate(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, used_rows: int | None = None
    ) -> Array:
        self.names.append(name)
        return super().allocate(name, shape, dtype, used_rows=used_rows)


def saved_tables(options: TableOptions) -> Store:
    """A store with five tables, whose delta has some rows of each."""
    store = store_in_memory()
    random = np.random.default_rng(3)
    tables = {f"t{k}": random.normal(size=(ROWS, DIM)).astype(np.float32) for k in range(5)}
    with store.writer() as writer:
        with writer.begin(0) as txn:
            for name, values in tables.items():
                txn.write_table(name, values, options=options)
        with writer.begin(1) as txn:
            for k, (name, values) in enumerate(tables.items()):
                rows = np.arange(k, ROWS, 7)
                txn.write_rows(name, rows, values[rows] * 2)
    return store


@pytest.mark.parametrize("options", [TableOptions(scale=0.25), TableOptions.exact()])
def test_tables_that_are_loaded_together_are_those_that_are_loaded_alone(options: TableOptions) -> None:
    with saved_tables(options) as store:
        snapshot = store.snapshot()
        kinds = {name: (schema, row_kind(schema, "float32", "values")) for name, schema in snapshot.tables.items()}
        together = load_together(snapshot.readers, kinds, snapshot.workers)
        assert together.keys() == kinds.keys()
        for name, (served, _) in together.items():
            assert served.base.rows.tobytes() == load(snapshot, ServeAs(kept_as="values"), name).base.rows.tobytes()


@pytest.mark.parametrize("is_few", [True, False])
def test_no_memory_is_taken_for_tables_that_are_not_loaded_together(
    is_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tables were allocated to find out: shared memory of large ones was taken twice, one after the other."""
    if not is_few:
        monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 20 * DIM * 2)
    with saved_tables(TableOptions(scale=0.25)) as store:
        snapshot = store.snapshot()
        kinds = {name: (schema, row_kind(schema, "float32", "values")) for name, schema in snapshot.tables.items()}
        chosen = {name: kinds[name] for name in sorted(kinds)[: 3 if is_few else 5]}
        memory = CountedMemory()
        assert load_together(snapshot.readers, chosen, snapshot.workers, memory=memory) == {}
        assert memory.names == []
