"""One delta segment applied to a served table: both ways give equal rows, damage is an error, served rows stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import CorruptStore, Store, TableOptions
from cnr_store.errors import MissingObject
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.documents import pack, sha256
from cnr_store.format.layout import MANIFEST, segment_key, segment_prefix
from cnr_store.format.records import ChainEntry, PartEntry, TableSchema
from cnr_store.read.snapshot import Snapshot
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED, array_specs, decode_block
from cnr_store.segment.reader import SegmentReader
from cnr_store.serving.rows.served_table import BaseTable, Overlay, ServedTable, row_kind
from cnr_store.serving.rows.shards import HashShard
from cnr_store.serving.update.adding import LARGEST_CODE, add_to_codes, add_to_values
from cnr_store.serving.update.applying import Applied, apply_segment, check_base
from cnr_store.serving.update.content import CodesTooWide
from cnr_store.serving.update.loading import load_table
from cnr_store.serving.update.update_plan import Apply, Reread, plan_update
from cnr_store.serving.update.update_tables import ServeAs, update_tables
from cnr_store.storage import storage_from_filesystem
from cnr_store.types import FloatBits, Lattice, RowRange
from tests.support.consumers import HOLDINGS, Consumer, TrackedMemory
from tests.support.documents import document_of
from tests.support.faulty import FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.memory import store_in_memory
from tests.support.serving_reference import add_reference
from tests.support.store_oracle import KINDS, training_slots, training_values

ROWS, DIM = 60, 4
Array = np.ndarray[Any, Any]
SCHEMAS = {
    "lattice": ("float32", Lattice(0.37)),
    "exact": ("float32", FloatBits(23)),
    "middling": ("float32", FloatBits(12)),
    "coarse": ("float32", FloatBits(7)),
    "float16": ("float16", FloatBits(10)),
    "bfloat16": ("bfloat16", FloatBits(7)),
}


def spec_of(name: str) -> Any:
    dtype, encoding = SCHEMAS[name]
    schema = TableSchema(num_rows=1, dim=DIM, dtype=dtype, encoding=encoding)  # type: ignore[arg-type]
    return array_specs(schema)["codes"]


# Adding to rows that are held as values.


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 5), large=st.booleans())
def test_adding_to_values_is_decoding_the_sum_of_the_codes(name: str, seed: int, rows: int, large: bool) -> None:
    spec, rng = spec_of(name), np.random.default_rng(seed)
    limit = 2**21 if name == "lattice" else int(np.iinfo(spec.memory_dtype).max)
    # Of a 16-bit float, or one of few bits, every code within the exponents is a number.
    limit = min(limit, {"coarse": 0x7F7F, "float16": 0x7BFF, "middling": 0x7F7FFFFF >> 11}.get(name, limit))
    before = rng.integers(-limit, limit + 1, (rows, DIM))
    after = (
        rng.integers(-limit, limit + 1, (rows, DIM)) if large else np.clip(before + rng.integers(-9, 9), -limit, limit)
    )
    values, expected = (np.zeros((rows, DIM), decoded_dtype(spec)) for _ in range(2))
    decode_block(spec, before.astype(spec.memory_dtype), values)
    decode_block(spec, after.astype(spec.memory_dtype), expected)
    differences = (after - before).astype(np.int64).astype(np.int32)

    positions = rng.permutation(rows).astype(np.int64)
    out = np.ones_like(values)

    plain = add_reference(spec, values, differences)
    bad = add_to_values(spec, values, positions, differences[positions], out)

    assert bad == -1
    assert out.tobytes() == expected[positions].tobytes()
    assert plain is not None
    assert plain.tobytes() == expected.tobytes()


def decoded_dtype(spec: Any) -> Any:
    return {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[spec.dtype]


@pytest.mark.parametrize("difference", [LARGEST_CODE, -LARGEST_CODE - 1, 2**31 - 1, -(2**31)])
def test_lattice_codes_that_could_not_be_had_back_are_reported(difference: int) -> None:
    spec = spec_of("lattice")
    values = np.full((3, DIM), spec.scale * np.float32(1 if difference > 0 else -1), np.float32)
    differences = np.zeros((3, DIM), np.int32)
    differences[1, 2] = difference

    assert add_reference(spec, values, differences) is None
    assert add_to_values(spec, values, np.arange(3), differences, np.empty_like(values)) == 1


def test_16_bit_codes_that_leave_their_range_are_reported() -> None:
    spec = spec_of("float16")
    values = np.full((3, DIM), 1.0, np.float16)
    differences = np.zeros((3, DIM), np.int32)
    differences[2, 0] = 30_000
    assert add_reference(spec, values, differences) is None
    assert add_to_values(spec, values, np.arange(3), differences, np.empty_like(values)) == 2


def test_codes_are_added_to_as_a_replay_adds() -> None:
    spec = spec_of("exact")
    at, ones = np.array([1, 0]), np.ones((2, DIM), np.int16)
    codes, out = np.full((2, DIM), 2**31 - 1, np.int32), np.zeros((2, DIM), np.int32)
    assert add_to_codes(spec, codes, at, ones, out) == -1
    assert (out == -(2**31)).all()

    codes = np.array([[4] * DIM, [9] * DIM], np.int32)
    assert add_to_codes(spec_of("lattice"), codes, at, ones, out) == -1
    assert out[:, 0].tolist() == [10, 5]

    narrow = np.full((2, DIM), 32_767, np.int16)
    assert add_to_codes(spec_of("lattice"), narrow, at, ones, np.zeros_like(narrow)) == 0


# One segment.


def train(store: Store, kind: str, seed: int, *, deltas: int = 1) -> None:
    """A table of that kind with escape rows, and deltas with rows of every operation."""
    rng = np.random.default_rng(seed)

    def rows_of(count: int) -> tuple[Array, dict[str, Array]]:
        values = training_values(kind, rng, count, DIM)
        for row in np.flatnonzero(rng.random(count) < 0.15):
            values[row, 0] = {"bfloat16": 0x7F80}.get(KINDS[kind].dtype, np.inf)
        return values, training_slots(kind, rng, count, DIM)

    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            values, slots = rows_of(ROWS)
            txn.write_table("t", values, slots=slots, options=KINDS[kind].options)
        for step in range(2, 2 + deltas):
            with writer.begin(step) as txn:
                fate = rng.random(ROWS)
                written, gone = np.flatnonzero(fate < 0.5), np.flatnonzero(fate > 0.8)
                values, slots = rows_of(len(written))
                txn.write_rows("t", written, values, slots=slots, nonfinite="escape")
                txn.delete_rows("t", gone)


def held_before(store: Store, holding: ServeAs, *, last: int = -1) -> tuple[ServedTable, SegmentReader]:
    """The table before the last segment of the head's chain, and that segment."""
    snapshot = store.snapshot()
    readers = snapshot.readers[: len(snapshot.readers) + last]
    schema = readers[-1].manifest.tables["t"]
    has_codes = isinstance(schema.encoding, Lattice | FloatBits)
    kind = row_kind(schema, holding.served, holding.kept_as if has_codes else "auto")
    return load_table(readers, "t", kind, store.internals.workers, shard=holding.shard), snapshot.readers[last]


def content(applied: Applied) -> Any:
    """The content of an overlay by id, without undefined content."""
    overlay, order = applied.overlay, np.argsort(applied.overlay.ids)
    sure = ~np.isin(overlay.ids[order], applied.unknown)
    status = np.where(sure, overlay.status[order], ESCAPED)
    means = status == CODED if applied.exact_rows.values else (status != ABSENT)
    means &= sure
    return (
        overlay.ids[order].tolist(), status.tolist(), overlay.rows[order][means].tobytes(), applied.unknown.tolist(),
        applied.exact_rows.rows.tolist(),
        {name: values.tobytes() for name, values in applied.exact_rows.values.items()},
    )  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), holding=st.sampled_from(HOLDINGS), chunk_bytes=st.sampled_from([64, 1 << 20]))
def test_the_quick_way_is_the_plain_way(kind: str, seed: int, holding: ServeAs, chunk_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cnr_store.format.arrays.CHUNK_BYTES", chunk_bytes)
        store = store_in_memory(threads=2)
        train(store, kind, seed, deltas=2)
        served, reader = held_before(store, holding)

        quick = apply_segment(reader, served, store.internals.workers)
        plain = apply_segment(reader, served, store.internals.workers, reference=True)

        if served.kind.kept_as == "values":
            assert not quick.exact_rows.rows.size
        assert content(quick) == content(plain)
        store.close()


def test_differences_to_rows_that_are_not_coded_here_are_left_to_the_chain() -> None:
    store = store_in_memory(threads=2)
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            txn.write_table("t", np.ones((6, 2), np.float32), options=TableOptions(scale=0.5))
        with writer.begin(2) as txn:
            txn.write_rows("t", np.arange(6), np.full((6, 2), 2, np.float32))
    served, reader = held_before(store, ServeAs())
    held = served.base.with_status()
    assert held.status is not None
    held.status[[2, 4]] = ABSENT, ESCAPED

    for reference in (False, True):
        applied = apply_segment(reader, ServedTable(held), store.internals.workers, reference=reference)
        assert applied.unknown.tolist() == [2, 4]
        assert applied.overlay.status[applied.overlay.index.find(np.array([2, 4]))].tolist() == [ESCAPED, ESCAPED]


def test_codes_that_outgrow_int16_are_told() -> None:
    store = store_in_memory(threads=2)
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            txn.write_table("t", np.ones((6, 2), np.float32), options=TableOptions(scale=0.5))
        with writer.begin(2) as txn:
            txn.write_rows("t", np.array([3]), np.full((1, 2), 32_000, np.float32))
    served, reader = held_before(store, ServeAs(kept_as="codes"))
    for reference in (False, True):
        with pytest.raises(CodesTooWide):
            apply_segment(reader, served, store.internals.workers, reference=reference)


def altered(reader: SegmentReader, **lists: Any) -> SegmentReader:
    """The segment with other row lists in its only part."""
    (part,) = reader.manifest.parts
    manifest = msgspec.structs.replace(reader.manifest, parts=(msgspec.structs.replace(part, **lists),))
    return SegmentReader(reader._storage, reader.name, manifest)


@pytest.mark.parametrize("shard", [None, RowRange(2, 5), HashShard(0, 1)])
def test_a_row_in_two_lists_is_corrupt(shard: Any) -> None:
    store = store_in_memory(threads=2)
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            txn.write_table("t", np.ones((6, 2), np.float32), options=TableOptions(encoding="raw"))
        with writer.begin(2) as txn:
            txn.write_rows("t", np.array([1, 3, 4]), np.full((3, 2), 2, np.float32))
    served, reader = held_before(store, ServeAs(shard=shard))
    (part,) = reader.manifest.parts
    row_list = part.set or part.add
    twice = altered(reader, set=row_list, delete=row_list)

    for reference in (False, True):
        with pytest.raises(CorruptStore, match=r"row \d of table 't' is in two row lists"):
            apply_segment(twice, served, store.internals.workers, reference=reference)


# Whole moves.


@pytest.fixture
def store() -> Iterator[Store]:
    with store_in_memory(threads=2) as store:
        yield store


def entries(store: Store) -> list[LogEntry]:
    found = [store.internals.log.read(version) for version in range(store.latest_version() + 1)]
    return [entry for entry in found if entry is not None]


def consumer_at(store: Store, entry: LogEntry, holding: ServeAs = ServeAs()) -> Consumer:  # noqa: B008 (frozen)
    consumer = Consumer(holding, np.random.default_rng(0))
    consumer.go(store, [entry])
    return consumer


def with_chain(entry: LogEntry, *segments: Any) -> LogEntry:
    return LogEntry(msgspec.structs.replace(entry.record, chain=segments), entry.digest)


def test_a_segment_of_another_chain_is_refused(store: Store) -> None:
    train(store, "lattice", 1, deltas=2)
    base, _, last = store.head().record.chain
    log = entries(store)
    consumer = consumer_at(store, next(entry for entry in log if len(entry.record.chain) == 1))
    strange = with_chain(log[-1], base, last)
    before = consumer.frozen()

    with pytest.raises(CorruptStore, match="starts from state digest"):
        consumer.go(store, [strange])
    assert consumer.frozen() == before


def test_a_segment_is_put_on_the_state_that_its_parts_start_from() -> None:
    def parts(*bases: str | None) -> list[PartEntry]:
        return [PartEntry(table="t", rows=(0, 4), columns=(0, 2), base_digest=base) for base in bases]

    check_base(parts("0" * 15 + "3", "0" * 15 + "4"), "t", 7, "segment")
    check_base(parts("0" * 15 + "3", None), "t", 7, "segment")  # one of them says nothing
    check_base(parts("0" * 15 + "3"), "other", 7, "segment")
    with pytest.raises(CorruptStore, match="it belongs to another chain"):
        check_base(parts("0" * 15 + "3", "0" * 15 + "5"), "t", 7, "segment")


def test_a_difference_to_a_deleted_row_is_corrupt_and_names_it(store: Store) -> None:
    """Two deltas of one state, the second applied after the first: without a recorded digest this is not found."""
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            txn.write_table("t", np.ones((6, 2), np.float32), options=TableOptions(scale=0.5))
        version = txn.version
        with writer.begin(2) as txn:
            txn.delete_rows("t", np.array([3]))
        deleting = store.head()
        store.rollback(version or 0)
        writer.restore()
        with writer.begin(2) as txn:
            txn.write_rows("t", np.array([2, 3]), np.full((2, 2), 4, np.float32))
    consumer = consumer_at(store, deleting)
    consumer.recorded = None
    strange = with_chain(store.head(), *deleting.record.chain, starting_from_anything(store))
    before = consumer.frozen()

    with pytest.raises(CorruptStore, match=r"row 3 of table 't' has an add"):
        consumer.go(store, [strange])
    assert consumer.frozen() == before


def starting_from_anything(store: Store) -> ChainEntry:
    """The head's own segment without the state digests that it starts from."""
    entry = store.head().record.chain[-1]
    manifest = store.snapshot().manifests[-1]
    parts = tuple(msgspec.structs.replace(part, base_digest=None) for part in manifest.parts)
    data = pack(document_of(msgspec.structs.replace(manifest, parts=parts)))
    store.storage.put(segment_key(entry.seg, MANIFEST), data)
    return msgspec.structs.replace(entry, sha256=sha256(data))


@contextmanager
def lacking(store: Store, key: str, data: bytes | None) -> Iterator[None]:
    """The object is gone for a while, or other bytes are."""
    kept = store.storage.read(key)
    assert kept is not None
    store.storage.delete([key])
    if data is not None:
        store.storage.put(key, data)
    yield
    store.storage.put(key, kept)


def failure_of(consumer: Consumer, store: Store, target: LogEntry) -> CorruptStore | None:
    try:
        consumer.go(store, [target])
    except CorruptStore as error:
        return error
    return None


@pytest.mark.parametrize("holding", [ServeAs(), ServeAs(kept_as="codes"), ServeAs("bfloat16", shard=HashShard(1, 2))])
def test_objects_that_are_gone_or_damaged_leave_what_is_held_alone(store: Store, holding: ServeAs) -> None:
    train(store, "lattice", 3, deltas=2)
    log = entries(store)
    memory = TrackedMemory()
    consumer = Consumer(holding, np.random.default_rng(0), memory)
    consumer.go(store, [next(entry for entry in log if len(entry.record.chain) == 2)])
    held, recorded, before = dict(consumer.tables), consumer.recorded, consumer.frozen()
    live, failures = dict(memory.live), 0
    prefix = segment_prefix(store.head().record.chain[-1].seg)
    for key in sorted(stat.key for stat in store.storage.list_objects(prefix)):
        for data in (None, b"", b"\x00" * 40):
            with lacking(store, key, data):
                found = failure_of(consumer, store, log[-1])
            if found is not None:
                assert isinstance(found, MissingObject) == (data is None)
                assert memory.live.keys() == live.keys()
                failures += 1
            consumer.tables, consumer.recorded, consumer.entry = dict(held), recorded, log[-2]
            memory.live = dict(live)
            if found is not None:
                assert consumer.frozen() == before
                continue
            # It did not need the object, and went on: from the start again.
            consumer.tables, consumer.recorded, consumer.entry = {}, None, None
            consumer.go(store, [log[-2]])
            held, recorded, live = dict(consumer.tables), consumer.recorded, dict(memory.live)

    assert failures >= 9  # manifest, row ids, codes; slots and Zarr's documents are not read
    consumer.go(store, [log[-1]])


def test_old_segments_may_be_gone(store: Store) -> None:
    """What only the state held is made of is not needed: all is compared then."""
    train(store, "lattice", 4, deltas=3)
    log = entries(store)
    target = next(entry for entry in log if len(entry.record.chain) == 2)
    consumer = consumer_at(store, log[-1])
    assert isinstance(plan_update(log[-1], target), Reread)
    last = segment_prefix(log[-1].record.chain[-1].seg)
    rows = [stat.key for stat in store.storage.list_objects(last) if "/rows/c." in stat.key]
    store.storage.delete(rows)
    consumer.go(store, [target])

    consumer = consumer_at(store, target)
    consumer.go(store, [store.internals.log.read(0) or target])
    assert consumer.tables == {}


def test_only_what_is_needed_is_read() -> None:
    files = FaultyFileSystem(IsolatedMemoryFileSystem())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 64)  # 4 rows of int32 codes
        patch.setattr("cnr_store.format.arrays.SHARD_CHUNKS", 1000)  # so that an object is a chunk
        store = Store.create_on(storage_from_filesystem(files, "/root"), threads=1)
        with store.writer() as writer:
            with writer.begin(1, "baseline") as txn:
                slots = {"m": np.ones(400, np.float32)}
                txn.write_table("t", np.ones((400, 4), np.float32), slots=slots, options=TableOptions.exact())
            with writer.begin(2) as txn:
                rows = np.arange(0, 400, 2)
                txn.write_rows("t", rows, np.full((200, 4), 2, np.float32), slots={"m": np.ones(200, np.float32)})
    log = entries(store)
    before = next(entry for entry in log if len(entry.record.chain) == 1)
    reads = {}
    for holding in (ServeAs(), ServeAs(shard=RowRange(100, 120))):
        consumer = consumer_at(store, before, holding)
        start = len(files.calls)
        snapshot = Snapshot(store.storage, log[-1], store.internals.workers, known=consumer.known, opens=False)
        move = plan_update(before, log[-1])
        assert isinstance(move, Apply)
        updates = update_tables(snapshot, move, consumer.tables, consumer.hold, consumer.recorded)
        paths = [call.path for call in files.calls[start:] if call.operation == "read"]
        reads[holding] = paths
        sizes = [len(store.storage.read(path.split("/root/", 1)[1]) or b"") for path in paths]
        assert sum("_segment.json.zst" in path for path in paths) == 1
        assert not any("slots" in path for path in paths)
        assert updates.rows == (200 if holding.shard is None else 10)
        if holding.shard is None:
            assert updates.size_bytes == sum(sizes) - sizes[0]
            assert len(paths) == 1 + 2 * 50
        else:
            # Chunks with rows of the range, and no others.
            assert len(paths) <= 1 + 3 * 4
    store.close()


@pytest.mark.parametrize(
    "holding", [ServeAs(), ServeAs(kept_as="codes"), ServeAs(kept_as="codes", shard=HashShard(0, 2))]
)
def test_a_finer_unit_and_wider_codes_are_followed(store: Store, holding: ServeAs) -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal((40, DIM)).astype(np.float32)
    with store.writer() as writer:
        with writer.begin(1, "baseline") as txn:
            txn.write_table("t", values, options=TableOptions(scale=0.25))
        consumer = consumer_at(store, store.head(), holding)
        writer.restore()
        with writer.begin(2) as txn:
            txn.refine_scale("t", 3)
            txn.write_rows("t", np.arange(0, 40, 3), values[::3] + np.float32(0.1))
        updates = consumer.go(store, [store.head()])
        is_anew = holding.kept_as == "codes"
        assert isinstance(updates.changes["t"], BaseTable if is_anew else Overlay)
        with writer.begin(3) as txn:
            txn.write_rows("t", np.arange(1, 40, 3), values[1::3] * np.float32(9_000))
        updates = consumer.go(store, [store.head()])
        assert isinstance(updates.changes["t"], BaseTable if is_anew else Overlay)
        assert consumer.tables["t"].base.rows.dtype == (np.int32 if is_anew else np.float32)
        with writer.begin(4) as txn:
            txn.write_rows("t", np.arange(2, 40, 3), values[2::3])
        assert isinstance(consumer.go(store, [store.head()]).changes["t"], Overlay)
    assert consumer.plans == ["Compare", "Apply", "Apply", "Apply"]
