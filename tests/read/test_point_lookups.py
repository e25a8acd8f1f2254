"""Rows by their ids without loading a table: only the chunks that hold one are read, and a cache reads each once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import BadInput, CacheCounts, ChunkCache, Store, TableOptions, TableView
from cnr_store.errors import BadRowIds, BadShape, CorruptObject
from cnr_store.segment.decoded import Scratch
from cnr_store.segment.reader import SegmentReader
from cnr_store.storage.local import LocalStorage
from cnr_store.types import Float32s, RowIds
from tests.support.store_oracle import same_bits

ROWS, DIM, CHUNK_ROWS = 1000, 4, 100
CODE_BYTES = CHUNK_ROWS * DIM * 2


class CountingStorage(LocalStorage):
    """Records which chunks were read."""

    def __init__(self, root: str) -> None:
        super().__init__(root, fsync=False)
        self.chunks: list[str] = []

    def _read(self, key: str, start: int, stop: int | None) -> bytes | None:
        if "/c." in key:
            self.chunks.append(key)
        return super()._read(key, start, stop)

    def codes_read(self) -> list[int]:
        """The chunks of codes of the baseline that were read since the last call, in order."""
        found = sorted(int(key.split("/c.")[1].split(".")[0]) for key in self.chunks if "codes/c." in key)
        self.chunks.clear()
        return found


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingStorage:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", CODE_BYTES)
    monkeypatch.setattr("cnr_store.format.arrays.SHARD_CHUNKS", ROWS)  # so that an object is a chunk
    return CountingStorage(str(tmp_path / "store"))


@pytest.fixture
def store(storage: CountingStorage) -> Iterator[Store]:
    """A dense table in ten chunks, and three versions: a baseline, few rows, few others."""
    rng = np.random.default_rng(1)
    with Store.create_on(storage, threads=3) as store:
        with store.writer() as writer:
            with writer.begin(0) as txn:
                values = rng.standard_normal((ROWS, DIM)).astype(np.float32)
                txn.write_table("t", values, options=TableOptions(scale=0.25))
            for step in (1, 2):
                rows = np.arange(step, 300, 7)
                with writer.begin(step) as txn:
                    txn.write_rows("t", rows, rng.standard_normal((len(rows), DIM)).astype(np.float32))
        storage.chunks.clear()
        yield store


def baseline_only(store: Store, cache: ChunkCache | None = None) -> TableView:
    return store.snapshot(version=first_data_version(store), cache=cache).table("t")


def first_data_version(store: Store) -> int:
    return min(record.v for record in store.log() if record.chain)


# Costs.


@pytest.mark.parametrize(
    ("rows", "chunks"),
    [([5], [0]), ([5, 99, 0, 5], [0]), ([100, 5], [0, 1]), ([999, 250, 251, 0], [0, 2, 9]), ([], [])],
)
def test_a_lookup_reads_one_object_for_each_chunk_that_it_hits(
    store: Store, storage: CountingStorage, rows: list[int], chunks: list[int]
) -> None:
    view = baseline_only(store)
    expected = view.read()[rows]
    storage.chunks.clear()

    found = view.read_rows(np.asarray(rows, np.int64))

    assert same_bits(found, expected)
    assert storage.codes_read() == chunks


def test_a_cache_reads_each_chunk_once(store: Store, storage: CountingStorage) -> None:
    cache = ChunkCache(1 << 20)
    view = baseline_only(store, cache)

    for rows in ([5, 250], [299, 0], [0, 999]):
        view.read_rows(np.asarray(rows))

    assert storage.codes_read() == [0, 2, 9]
    assert cache.counts == CacheCounts(hits=3, misses=3, passed=0)
    assert cache.nbytes == 3 * CODE_BYTES


def test_snapshots_of_one_store_share_what_their_chains_share(store: Store, storage: CountingStorage) -> None:
    cache = ChunkCache(1 << 20)
    rows = np.asarray([1, 2, 8, 640])
    expected = [store.snapshot(version=v).table("t").read()[rows] for v in versions(store)]
    storage.chunks.clear()

    found = [store.snapshot(version=v, cache=cache).table("t").read_rows(rows) for v in versions(store)]

    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
    read = list(storage.chunks)
    assert len(read) == len(set(read)), "no object was read twice"
    assert len([key for key in read if "codes/c." in key]) == 4, "two of the baseline, one of each delta"


def versions(store: Store) -> list[int]:
    return sorted(record.v for record in store.log() if record.chain and record.kind in ("baseline", "delta"))


def test_reads_of_ranges_leave_the_cache_alone(store: Store) -> None:
    cache = ChunkCache(1 << 20)

    store.snapshot(cache=cache).table("t").read()

    assert cache.counts == CacheCounts(0, 0, 0)


# The bound.


def test_the_chunk_that_was_used_longest_ago_is_given_up(store: Store, storage: CountingStorage) -> None:
    cache = ChunkCache(2 * CODE_BYTES)
    view = baseline_only(store, cache)

    for row in (0, 100, 0, 200, 0, 100):
        view.read_rows(np.asarray([row]))

    assert storage.chunks, "something was read"
    assert storage.codes_read() == [0, 1, 1, 2], "chunk 0 was used again and stayed; 1 left for 2"
    assert cache.nbytes == 2 * CODE_BYTES


def test_a_chunk_larger_than_the_bound_is_read_and_not_kept(store: Store, storage: CountingStorage) -> None:
    cache = ChunkCache(CODE_BYTES - 1)
    view = baseline_only(store, cache)

    found = [view.read_rows(np.asarray([3])) for _ in range(2)]

    assert same_bits(*found)
    assert storage.codes_read() == [0, 0]
    assert (cache.nbytes, cache.counts) == (0, CacheCounts(0, 0, 2))


@pytest.mark.parametrize("limit_bytes", [0, -1])
def test_a_cache_of_nothing_is_refused(limit_bytes: int) -> None:
    with pytest.raises(BadInput, match="1 or more"):
        ChunkCache(limit_bytes)


# Threads and errors.


@pytest.fixture
def reader(store: Store) -> SegmentReader:
    return baseline_only(store)._snapshot.readers[0]


def codes_entry(reader: SegmentReader) -> Any:
    row_list = reader.manifest.parts[0].set
    assert row_list is not None
    return row_list.arrays["codes"]


def test_threads_that_want_a_chunk_wait_for_the_one_that_decodes_it(reader: SegmentReader) -> None:
    cache, entry = ChunkCache(1 << 20), codes_entry(reader)
    is_decoding, may_go_on = threading.Event(), threading.Event()
    decoded = []

    def decode(scratch: Scratch) -> Any:
        decoded.append(1)
        is_decoding.set()
        assert may_go_on.wait(60)
        return reader.read_chunk(entry, 0, scratch)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(cache.read, reader.name, entry, 0, Scratch(), decode)
        assert is_decoding.wait(60)
        others = [pool.submit(cache.read, reader.name, entry, 0, Scratch(), decode) for _ in range(3)]
        may_go_on.set()

    assert decoded == [1]
    assert all(other.result() is first.result() for other in others)


def test_an_error_is_not_kept_and_those_who_waited_try_for_themselves(reader: SegmentReader) -> None:
    cache, entry = ChunkCache(CODE_BYTES), codes_entry(reader)
    is_decoding, may_fail = threading.Event(), threading.Event()

    def fails(scratch: Scratch) -> Any:
        is_decoding.set()
        assert may_fail.wait(60)
        raise CorruptObject("a flipped bit")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.read, reader.name, entry, 0, Scratch(), fails)
        assert is_decoding.wait(60)
        second = pool.submit(cache.read, reader.name, entry, 0, Scratch(), lambda s: reader.read_chunk(entry, 0, s))
        may_fail.set()

    with pytest.raises(CorruptObject, match="flipped"):
        first.result()
    assert second.result().shape == (CHUNK_ROWS, DIM)
    assert cache.nbytes == CODE_BYTES


def test_many_threads_in_a_small_cache_read_right_rows_within_the_bound(store: Store) -> None:
    cache = ChunkCache(3 * CODE_BYTES)
    expected = store.snapshot().table("t").read()
    view = store.snapshot(cache=cache).table("t")
    too_much: list[int] = []

    def look_up(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        is_right = True
        for _ in range(60):
            rows = rng.integers(0, ROWS, 3)
            is_right = is_right and same_bits(view.read_rows(rows), expected[rows])
            if cache.nbytes > cache.limit_bytes:
                too_much.append(cache.nbytes)
        return is_right

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(look_up, range(6)))
    finally:
        sys.setswitchinterval(interval)
    assert too_much == []


def test_a_damaged_chunk_is_an_error_with_a_cache_and_read_anew_when_whole(
    store: Store, storage: CountingStorage
) -> None:
    view = baseline_only(store, ChunkCache(1 << 20))
    expected = baseline_only(store).read()[[150]]
    path = next(Path(storage.root).glob("data/*/*set-0.codes/c.1.0"))
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])

    with pytest.raises(CorruptObject):
        view.read_rows(np.asarray([150]))
    path.write_bytes(whole)

    assert same_bits(view.read_rows(np.asarray([150])), expected)


# Keys of hashed tables.


@pytest.fixture
def hashed(storage: CountingStorage) -> Iterator[tuple[Store, dict[int, Float32s]]]:
    """Keys in ten chunks, of which later some were replaced and some deleted; and what should be found."""
    rng = np.random.default_rng(2)
    keys = np.sort(rng.choice(np.arange(-(10**6), 10**6), ROWS, replace=False)).astype(np.int64)
    keys[[0, -1]] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    options = TableOptions(scale=0.25, nonfinite="escape")
    with Store.create_on(storage, threads=3) as store:
        with store.writer() as writer:
            with writer.begin(0) as txn:
                declared = np.round(rng.standard_normal((ROWS, DIM)) * 4).astype(np.float32) / 4 + np.float32(0)
                txn.create_table("t", dim=DIM, options=options)
                txn.write_rows("t", keys, declared)
            fresh = keys[3:200:5]
            values = np.round(rng.standard_normal((len(fresh), DIM)) * 4).astype(np.float32) / 4 + np.float32(0)
            values[1, 2] = np.inf
            with writer.begin(1) as txn:
                txn.write_rows("t", fresh, values)
                txn.delete_rows("t", keys[4:200:5])
        expected = {int(key): row for key, row in zip(keys, declared, strict=True)}
        expected |= {int(key): row for key, row in zip(fresh, values, strict=True)}
        for key in keys[4:200:5]:
            del expected[int(key)]
        storage.chunks.clear()
        yield store, expected


@pytest.mark.parametrize("cached", [False, True])
def test_keys_of_a_hashed_table_are_looked_up(
    hashed: tuple[Store, dict[int, Float32s]], storage: CountingStorage, cached: bool
) -> None:
    store, expected = hashed
    view = store.snapshot(cache=ChunkCache(1 << 20) if cached else None).table("t")
    wanted = np.asarray([*list(expected)[::37], *list(expected)[:3], max(expected), min(expected)], np.int64)
    wanted = np.random.default_rng(3).permutation(wanted)

    for _ in range(2):
        assert same_bits(view.read_rows(wanted), np.stack([expected[int(key)] for key in wanted]))
    if cached:
        assert len(storage.chunks) == len(set(storage.chunks))


def test_a_key_costs_the_chunks_whose_range_holds_it(
    hashed: tuple[Store, dict[int, Float32s]], storage: CountingStorage
) -> None:
    store, expected = hashed
    keys = sorted(expected)
    view = store.snapshot().table("t")
    storage.chunks.clear()

    view.read_rows(np.asarray([keys[-2]]))

    assert len([key for key in storage.chunks if "codes/c." in key]) == 1
    assert len([key for key in storage.chunks if "rows/c." in key]) == 1


def test_keys_that_are_not_there_are_an_error_or_told(hashed: tuple[Store, dict[int, Float32s]]) -> None:
    store, expected = hashed
    view = store.snapshot().table("t")
    keys = np.asarray([next(iter(expected)), 10**7, max(expected), 10**7], np.int64)
    missing = np.ones(4, np.bool_)

    with pytest.raises(BadRowIds, match="no key 10000000") as caught:
        view.read_rows(keys)
    values = view.read_rows(keys, missing=missing)

    assert caught.value.found == 10**7
    assert missing.tolist() == [False, True, False, True]
    assert same_bits(values[[0, 2]], np.stack([expected[int(key)] for key in keys[[0, 2]]]))
    assert (values[[1, 3]] == 0).all()


def test_a_deleted_key_is_not_there(hashed: tuple[Store, dict[int, Float32s]]) -> None:
    store, expected = hashed
    baseline, _ = baseline_only(store).read_all()
    gone = np.asarray(sorted({int(key) for key in baseline} - set(expected)), np.int64)
    missing = np.zeros(len(gone), np.bool_)

    store.snapshot().table("t").read_rows(gone, missing=missing)

    assert len(gone) == 40
    assert missing.all()


def test_no_row_of_a_dense_table_is_missing(store: Store) -> None:
    missing = np.ones(2, np.bool_)

    store.snapshot().table("t").read_rows(np.asarray([3, 3]), missing=missing)

    assert not missing.any()


def ids_of(*values: Any) -> RowIds:
    return np.asarray(values)


@pytest.mark.parametrize(
    ("error", "row_ids", "missing"),
    [
        (BadRowIds, ids_of([1, 2]), None),
        (BadRowIds, ids_of(ROWS), None),
        (BadShape, ids_of(1, 2), np.zeros(3, np.bool_)),
        (BadShape, ids_of(1, 2), np.zeros(2, np.uint8)),
    ],
)
def test_what_does_not_fit_is_refused(store: Store, error: type[Exception], row_ids: RowIds, missing: Any) -> None:
    with pytest.raises(error):
        store.snapshot().table("t").read_rows(row_ids, missing=missing)
