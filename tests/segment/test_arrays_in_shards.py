"""Large arrays lie in shards: as few objects, read by range, and nothing that is read is another for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import Store, TableOptions, verify_store
from cnr_store.errors import BadInput, CorruptObject, CorruptStore, MissingObject
from cnr_store.format import arrays
from cnr_store.format.documents import pack
from cnr_store.format.layout import MANIFEST, segment_key, segment_name
from cnr_store.format.manifest import decode_manifest
from cnr_store.format.records import ArrayEntry
from cnr_store.maintenance.compaction import compact_run
from cnr_store.runtime.threads import Throttle, Workers
from cnr_store.segment.copying import copy_segment
from cnr_store.segment.groups import Blocks, RowList
from cnr_store.segment.writer import SegmentWriter
from cnr_store.storage.local import LocalStorage
from cnr_store.types import Float32s
from tests.support.documents import segment_document
from tests.support.launcher import REPOSITORY
from tests.support.memory import store_in_memory
from tests.support.store_oracle import same_bits
from tests.support.zarr_values import integers_of

DIM, CHUNK_ROWS, IN_SHARD = 4, 10, 4


class FarStorage(LocalStorage):
    """Files that count as remote; remembers which bytes of objects with chunks were read."""

    is_remote: ClassVar[bool] = True

    def __init__(self, root: str) -> None:
        super().__init__(root, fsync=False)
        self.reads: list[tuple[str, int, int | None]] = []
        self.lock = threading.Lock()

    def _read(self, key: str, start: int, stop: int | None) -> bytes | None:
        if "/c." in key:
            with self.lock:
                self.reads.append((key, start, stop))
        return super()._read(key, start, stop)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, CHUNK_ROWS)


def small(monkeypatch: pytest.MonkeyPatch, chunk_rows: int) -> None:
    """Chunks of so many rows, shards of four chunks of codes; two chunks make a shard."""
    monkeypatch.setattr(arrays, "CHUNK_BYTES", chunk_rows * DIM * 2)
    monkeypatch.setattr(arrays, "SHARD_BYTES", IN_SHARD * chunk_rows * DIM * 2)
    monkeypatch.setattr(arrays, "SHARD_CHUNKS", 2)


def values_of(rows: int, seed: int = 0) -> Float32s:
    return np.random.default_rng(seed).integers(-100, 100, (rows, DIM)).astype(np.float32) / 4


def save(store: Store, rows: int, *, changes: int = 0) -> list[Float32s]:
    """A table, eight small ones and a dense tensor; ``changes`` deltas of the table. What it held at each version."""
    values, states = values_of(rows), []
    with store.writer() as writer:
        with writer.begin(0) as txn:
            slots = {"m": np.arange(rows, dtype=np.float32)}
            txn.write_table("t", values, slots=slots, options=TableOptions(scale=0.25))
            for k in range(8):
                txn.write_table(f"small{k}", values_of(7, k), options=TableOptions(scale=0.25))
            txn.put_dense({"w": np.arange(200, dtype=np.float32)})
        states.append(values.copy())
        for step in range(1, changes + 1):
            ids = np.arange(step, rows, 3)
            values[ids] += 1
            with writer.begin(step) as txn:
                txn.write_rows("t", ids, values[ids], slots={"m": np.full(len(ids), step, np.float32)})
            states.append(values.copy())
    return states


def entries_of(store: Store, segment: int = 0) -> dict[str, ArrayEntry]:
    manifest = store.snapshot().readers[segment].manifest
    return {one.path.partition(".")[2]: one for one in (*manifest.arrays, *manifest.dense_arrays)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create_on(FarStorage(str(tmp_path / "store")), threads=2) as store:
        yield store


def storage_of(store: Store) -> FarStorage:
    assert isinstance(store.storage, FarStorage)
    return store.storage


def test_all_that_is_read_is_what_it_would_be_without_shards(store: Store, tmp_path: Path) -> None:
    states = save(store, 173, changes=3)
    with Store.create(str(tmp_path / "plain"), fsync=False) as plain, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "SHARD_BYTES", 0)
        assert all(same_bits(one, other) for one, other in zip(save(plain, 173, changes=3), states, strict=True))
        assert all(one.shards is msgspec.UNSET for one in entries_of(plain).values())

        for name in ("t", *(f"small{k}" for k in range(8))):
            mine, theirs = store.snapshot().table(name), plain.snapshot().table(name)
            assert same_bits(mine.read(), theirs.read())
            assert same_bits(mine.read_rows(np.asarray([6, 0])), theirs.read_rows(np.asarray([6, 0])))
        assert same_bits(store.snapshot().read_dense("w"), plain.snapshot().read_dense("w"))
        assert same_bits(store.snapshot().table("t").read(33, 121), states[-1][33:121])

    assert verify_store(store, deep=True).problems == ()
    compact_run(store, run=(0, 4))
    assert same_bits(store.snapshot().table("t").read(), states[-1])
    assert arrays.shard_chunks(entries_of(store)["set-0.codes"]) == IN_SHARD
    assert verify_store(store, deep=True).problems == ()


@settings(max_examples=20)
@given(rows=st.integers(1, 130), chunk_rows=st.integers(1, 12), threads=st.integers(1, 3), seed=st.integers(0, 9))
def test_any_table_comes_back_from_shards(rows: int, chunk_rows: int, threads: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small(patch, chunk_rows)
        store = store_in_memory(threads=threads)
        with store, store.writer() as writer:
            tables = {f"t{k}": values_of(rows // (k + 1), seed + k) for k in range(5) if rows // (k + 1)}
            with writer.begin(0) as txn:
                for name, values in tables.items():
                    txn.write_table(name, values, options=TableOptions(scale=0.25))
            for name, values in tables.items():
                assert same_bits(store.snapshot().table(name).read(), values)


def test_a_table_has_an_object_for_each_shard_and_small_ones_share_them(store: Store) -> None:
    save(store, 173)
    found = {name: (arrays.chunk_count(one), arrays.object_count(one)) for name, one in entries_of(store).items()}

    assert found["set-0.codes"] == (18, 5)
    assert found["set-0.rows"] == (18, 5)
    assert found["set-0.slots.m"] == (18, 2)
    assert found["set-1.codes"] == (6, 2), "eight tables of seven rows"
    assert found["dense.float32"] == (10, 3)


def test_a_whole_table_is_one_request_for_each_shard_of_neighbours(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All begin at once: under load a decoder overtook two that waited, and read their chunks one by one."""
    monkeypatch.setattr("cnr_store.read.prefetch.MIN_FETCHES", 5)
    states = save(store, 173)
    view = store.snapshot().table("t")
    storage_of(store).reads.clear()

    assert same_bits(view.read(), states[0])
    assert len(storage_of(store).reads) == 5, "codes, and no row ids"


def test_a_table_is_read_while_the_interpreter_ends(tmp_path: Path) -> None:
    """A loader that was left open logged an error of its last poll: pools of threads take nothing more."""
    program = f"""
import atexit, pytest
from tests.segment.test_arrays_in_shards import FarStorage, Store, same_bits, save, small
small(pytest.MonkeyPatch(), 10)
store = Store.create_on(FarStorage({str(tmp_path)!r}), threads=2)
states = save(store, 173)
atexit.register(lambda: print(same_bits(store.snapshot().table("t").read(), states[0])))
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=REPOSITORY)

    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
def test_what_is_not_fetched_ahead_is_read_when_it_is_asked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    states = save(store, 173, changes=2)
    monkeypatch.setattr("cnr_store.read.prefetch.PREFETCH_BYTES", limit)
    monkeypatch.setattr("cnr_store.read.prefetch.FETCH_BYTES", 150)

    assert same_bits(store.snapshot().table("t").read(), states[-1])


def test_a_row_is_looked_up_by_the_bytes_of_its_chunk_alone(store: Store) -> None:
    states = save(store, 173)
    entry = entries_of(store)["set-0.codes"]
    place = store.snapshot().readers[0].place_of(entry, 6)
    view = store.snapshot().table("t")
    storage_of(store).reads.clear()

    assert same_bits(view.read_rows(np.asarray([63])), states[0][[63]])

    ((key, start, stop),) = storage_of(store).reads
    assert key.endswith("set-0.codes/c.1.0")
    assert (start, stop) == (place.start, place.start + place.size)
    assert place.start > 0


def test_plain_zarr_reads_them_without_a_warning(store: Store) -> None:
    states = save(store, 173)

    documents = [path.parent for path in array_documents(store)]
    opened = {path.name.partition(".")[2]: zarr.open_array(str(path), mode="r") for path in documents}

    assert same_bits(integers_of(opened["set-0.codes"]).astype(np.float32) * np.float32(0.25), states[0])
    assert integers_of(opened["set-0.rows"]).tolist() == list(range(173))
    assert opened["dense.float32"][:].tolist() == list(range(200))
    assert opened["set-0.codes"].shards == (IN_SHARD, opened["set-0.codes"].chunks[1])


def array_documents(store: Store) -> list[Path]:
    return [path for path in Path(store.url).glob("data/*/*/zarr.json") if "." in path.parent.name]


def damaged(store: Store, name: str, change: Callable[[bytes], bytes]) -> None:
    (path,) = Path(store.url).glob(f"data/*/r*.{name}")
    data = change(path.read_bytes())
    if data:
        path.write_bytes(data)
    else:
        path.unlink()


def swapped(sizes: tuple[int, ...]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        a, b = sizes[0], sizes[1]
        return data[a : a + b] + data[:a] + data[a + b :]

    return change


@pytest.mark.parametrize("damage", ["flip", "swap", "short", "remove"])
def test_damage_in_a_shard_is_an_error_that_names_it(store: Store, damage: str) -> None:
    save(store, 173)
    entry = entries_of(store)["set-0.codes"]
    assert entry.shards is not msgspec.UNSET
    change: dict[str, Callable[[bytes], bytes]] = {
        "flip": lambda data: bytes([data[0] ^ 1]) + data[1:],
        "swap": swapped(entry.shards.sizes),
        "short": lambda data: data[:9],
        "remove": lambda data: b"",
    }
    damaged(store, "set-0.codes/c.0.0", change[damage])

    for read in (lambda view: view.read(), lambda view: view.read_rows(np.asarray([3]))):
        with pytest.raises(MissingObject if damage == "remove" else CorruptObject) as raised:
            read(store.snapshot().table("t"))
        assert str(raised.value.path).endswith("set-0.codes/c.0.0")
    assert [problem.path.rpartition(".set-")[2] for problem in verify_store(store).problems] == ["0.codes/c.0.0"]


def test_swapped_chunks_under_a_true_digest_are_found_by_a_shallow_check(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 173)
    shards = entries_of(store)["set-0.codes"].shards
    assert shards is not msgspec.UNSET
    change, put = swapped(shards.sizes), SegmentWriter._put
    monkeypatch.setattr(
        SegmentWriter,
        "_put",
        lambda self, path, data: put(self, path, change(data) if path.endswith("set-0.codes/c.0.0") else data),
    )

    with Store.create_on(FarStorage(str(tmp_path / "other"))) as other:
        save(other, 173)

        assert [problem.path.rpartition(".set-")[2] for problem in verify_store(other).problems] == ["0.codes/c.0.0"]


def test_an_index_of_other_chunks_is_found_by_verify_and_never_read(store: Store) -> None:
    """It is for plain Zarr readers; ours go by the manifest."""
    states = save(store, 173)
    damaged(store, "set-0.codes/c.1.0", lambda data: data[:-68] + data[-52:-36] + data[-68:-52] + data[-36:])

    assert same_bits(store.snapshot().table("t").read(), states[0])
    (problem,) = verify_store(store).problems
    assert problem.path.endswith("set-0.codes/c.1.0")


def test_a_wrong_shard_index_under_a_true_digest_is_found_by_verify(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = arrays.shard_index
    with monkeypatch.context() as patch:
        patch.setattr(arrays, "shard_index", lambda sizes, chunks: bytes(len(right(sizes, chunks))))
        states = save(store, 173)

    assert same_bits(store.snapshot().table("t").read(), states[0])
    problems = verify_store(store).problems
    assert problems
    assert all("another index" in one.message for one in problems)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shards: shards["sizes"].append(9), "chunks in shards, expected"),
        (lambda shards: shards.update(digests=shards["digests"][32:]), "chunks in shards, expected"),
        (lambda shards: shards.update(chunks=5), "objects, expected a document and"),
        (lambda shards: shards["sizes"].reverse(), "what is inside takes"),
        (lambda shards: shards["sizes"].__setitem__(0, shards["sizes"][0] + 1), "what is inside takes"),
        (lambda shards: shards.update(chunks=1), "chunks"),
        (lambda shards: shards.update(digests="x"), "digests"),
    ],
)
def test_a_manifest_that_contradicts_itself_about_shards_is_refused(
    store: Store, change: Callable[[Any], None], message: str
) -> None:
    save(store, 173)
    document = segment_document(store)
    group = next(one for one in document["groups"] if one["path"].endswith("set-0"))
    change(group["arrays"]["codes"]["shards"])

    with pytest.raises(CorruptStore, match=message):
        decode_manifest(pack(document), "manifest")


def test_a_list_that_failed_is_written_again_and_nothing_of_it_stays(store: Store) -> None:
    values = values_of(173)
    with store.writer() as writer, writer.begin(0) as txn:
        with pytest.raises(BadInput):
            txn.write_table("t", np.where(values == values[170, 0], np.nan, values), options=TableOptions(scale=0.25))
        txn.write_table("t", values, options=TableOptions(scale=0.25))

    assert same_bits(store.snapshot().table("t").read(), values)
    assert verify_store(store, deep=True).problems == ()


def test_objects_of_a_list_that_failed_half_way_are_deleted_and_not_listed(store: Store) -> None:
    rows = np.arange(40, dtype=np.int64)

    def produce(start: int, stop: int, *, most: int = 40) -> Blocks:
        if stop > most:
            raise BadInput("a value that cannot be stored")
        return {"rows": rows[start:stop], "values": np.zeros((stop - start, DIM), np.float32)}

    widths: dict[str, tuple[np.dtype[Any], int | None]] = {
        "rows": (np.dtype(np.int64), None), "values": (np.dtype(np.float32), DIM)
    }  # fmt: skip
    name, folder = segment_name(0, "a" * 32), "r00001-0123abcd"
    writer = SegmentWriter(store.storage, name, writer=folder, workers=Workers(1), throttle=Throttle(None))
    with pytest.raises(BadInput):
        writer.write_row_list("escape", RowList(40, widths, partial(produce, most=30)))
    left = {stat.key for stat in store.storage.list_objects(f"data/{name}/")}

    written = writer.write_row_list("escape", RowList(40, widths, produce))
    receipt = writer.finish(txn="a" * 32, rank=1, world=2, attempt="0123abcd", base=0, l0=0, parts=())

    assert left
    assert [group.path for group in receipt.groups] == [written.group]
    assert receipt.objects == ()
    assert not left & {stat.key for stat in store.storage.list_objects(f"data/{name}/")}


def test_a_copy_has_the_shards(store: Store, tmp_path: Path) -> None:
    save(store, 173)
    target = LocalStorage(str(tmp_path / "copy"), fsync=False)
    (entry,) = store.head().record.chain

    copied = copy_segment(store.storage, target, entry, store.internals.workers, Throttle(None))

    listed = {stat.key: target.read(stat.key) for stat in target.list_objects("data")}
    assert copied.objects == len(listed)
    assert segment_key(entry.seg, MANIFEST) in listed
    assert all(store.storage.read(key) == data for key, data in listed.items())
