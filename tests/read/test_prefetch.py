"""Objects of a remote store are fetched ahead of the decoders: each once, in order, within a bound, errors and all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from cnr_store import Store, TableOptions
from cnr_store.errors import CorruptObject, MissingObject
from cnr_store.format.records import ChunkPlace
from cnr_store.read.prefetch import (
    FETCH_THREADS,
    MIN_FETCHES,
    PREFETCH_BYTES,
    FetchRequest,
    Prefetcher,
    chunks_of,
    fetch_requests,
    prefetching,
)
from cnr_store.segment.reader import SegmentReader
from cnr_store.storage.local import LocalStorage
from cnr_store.types import Float32s
from tests.support.store_oracle import same_bits

ROWS, DIM, CHUNK_ROWS = 600, 4, 20


class FarStorage(LocalStorage):
    """Files that count as remote; records which chunks were read, and how many at the same time."""

    is_remote: ClassVar[bool] = True

    def __init__(self, root: str) -> None:
        super().__init__(root, fsync=False)
        self.chunks: list[str] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def _read(self, key: str, start: int, stop: int | None) -> bytes | None:
        if "/c." not in key:
            return super()._read(key, start, stop)
        with self.lock:
            self.chunks.append(key)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return super()._read(key, start, stop)
        finally:
            with self.lock:
                self.at_once -= 1


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FarStorage:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", CHUNK_ROWS * DIM * 2)
    monkeypatch.setattr("cnr_store.format.arrays.SHARD_CHUNKS", ROWS)  # so that an object is a chunk
    return FarStorage(str(tmp_path / "store"))


@pytest.fixture
def store(storage: FarStorage) -> Iterator[tuple[Store, list[Float32s]]]:
    """A table of thirty chunks and two deltas, and what it held at each version."""
    rng = np.random.default_rng(1)
    values = np.round(rng.standard_normal((ROWS, DIM)) * 8).astype(np.float32) / 4 + np.float32(0)
    states = [values.copy()]
    with Store.create_on(storage, threads=2) as store:
        with store.writer() as writer:
            with writer.begin(0) as txn:
                txn.write_table("t", values, options=TableOptions(scale=0.25))
            for step in (1, 2):
                rows = np.arange(step, ROWS, 7)
                values[rows] = np.round(rng.standard_normal((len(rows), DIM)) * 8).astype(np.float32) / 4
                values += np.float32(0)
                states.append(values.copy())
                with writer.begin(step) as txn:
                    txn.write_rows("t", rows, values[rows])
        storage.chunks.clear()
        yield store, states


def versions(store: Store) -> list[int]:
    return sorted(record.v for record in store.log() if record.chain and record.kind in ("baseline", "delta"))


@pytest.mark.parametrize("limit_bytes", [1, 500, PREFETCH_BYTES])
def test_every_way_to_read_gives_the_same_and_reads_each_object_once(
    store: tuple[Store, list[Float32s]], storage: FarStorage, limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, states = store
    monkeypatch.setattr("cnr_store.read.prefetch.PREFETCH_BYTES", limit_bytes)

    for version, expected in zip(versions(opened), states, strict=True):
        view = opened.snapshot(version=version).table("t")
        storage.chunks.clear()
        assert same_bits(view.read(), expected)
        assert len(storage.chunks) == len(set(storage.chunks))
        if version == versions(opened)[0]:
            assert len(storage.chunks) == ROWS // CHUNK_ROWS, "codes, and no row ids"
        assert same_bits(view.read(33, 77), expected[33:77])
        assert same_bits(view.read_rows(np.asarray([599, 3])), expected[[599, 3]])
        mirror = view.load({}, allocate=np.zeros)
        assert mirror is not None
        assert np.array_equal(mirror.arrays["codes"] * np.float32(0.25), expected)
    assert storage.most_at_once <= FETCH_THREADS + 2, "the fetchers, and two threads that read what was not begun"


def test_no_more_is_fetched_than_the_bound_before_it_is_taken(
    store: tuple[Store, list[Float32s]], storage: FarStorage
) -> None:
    readers, wanted = begun(store[0])
    limit = sum(one.size_bytes for one in wanted[:3])

    ahead = Prefetcher(readers, wanted, limit_bytes=limit)
    wait_until_idle(ahead)
    assert {key.rpartition(".set-")[2] for key in storage.chunks} == {
        one.places[0].path.rpartition(".set-")[2] for one in wanted[:3]
    }

    assert ahead.take(0, wanted[0].places[0]) == readers[0].read_object(wanted[0].places[0].path)
    wait_until_idle(ahead)
    assert ahead._begun_bytes <= limit
    ahead.close()
    assert ahead._begun == {}, "bytes that nobody took would live as long as an error that names their reader"


def test_an_object_not_begun_is_left_to_whoever_asks_for_it(
    store: tuple[Store, list[Float32s]], storage: FarStorage
) -> None:
    readers, wanted = begun(store[0])
    ahead = Prefetcher(readers, wanted, limit_bytes=1)

    assert ahead.take(0, wanted[-1].places[0]) is None
    for one in wanted[:-1]:
        ahead.take(0, one.places[0])
    wait_until_idle(ahead)
    ahead.close()

    assert not any(key.endswith(wanted[-1].places[0].path) for key in storage.chunks)
    assert ahead.take(0, wanted[0].places[0]) is None, "once"


def test_few_are_fetched_at_once_when_few_are_left(store: tuple[Store, list[Float32s]]) -> None:
    _, wanted = begun(store[0])
    may_arrive = {one.places[0].path: threading.Event() for one in wanted}
    in_flight = []

    class Held:
        """A segment whose objects arrive when they are let go."""

        def read_places(self, places: Sequence[ChunkPlace]) -> list[bytes]:
            assert may_arrive[places[0].path].wait(60)
            return [place.path.encode() for place in places]

    ahead = Prefetcher([Held()], wanted)  # type: ignore[list-item]
    for one in wanted:
        in_flight.append(ahead._in_flight)
        (place,) = one.places
        may_arrive[place.path].set()
        assert ahead._begun[0, place.path, 0][1].result(60) == place.path.encode()
    ahead.close()

    assert in_flight[:3] == [FETCH_THREADS] * 3
    assert sorted(in_flight, reverse=True) == in_flight
    assert in_flight[-4:] == [MIN_FETCHES] * 3 + [1]


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damage_is_raised_by_the_read_that_meets_it_and_leaves_no_thread(
    store: tuple[Store, list[Float32s]], storage: FarStorage, damage: str
) -> None:
    path = sorted(Path(storage.root).glob("data/*/*set-0.codes/c.7.0"))[0]
    if damage == "flip":
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    else:
        path.unlink()

    with pytest.raises(CorruptObject if damage == "flip" else MissingObject):
        store[0].snapshot().table("t").read()
    assert not any(thread.name.startswith("cnr-fetch") for thread in threading.enumerate())


def test_a_local_store_is_read_without_it(store: tuple[Store, list[Float32s]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FarStorage, "is_remote", False)
    snapshot = store[0].snapshot()
    plan = snapshot.plan("t")

    with prefetching(snapshot.readers, chunks_of(plan, ["codes"]), snapshot.workers) as sources:
        assert sources is snapshot.readers


def begun(store: Store) -> tuple[list[SegmentReader], list[FetchRequest]]:
    snapshot = store.snapshot(version=versions(store)[0])
    readers = list(snapshot.readers)
    return readers, fetch_requests(readers, chunks_of(snapshot.plan("t"), ["codes"]))


def wait_until_idle(ahead: Prefetcher) -> None:
    """Wait for everything that was begun; what a done one begins is begun by then."""
    while pending := [future for _, future in list(ahead._begun.values()) if not future.done()]:
        for future in pending:
            future.result(60)
