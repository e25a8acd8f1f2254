"""Chunks that several chunks of a result need: decoded once, bounded in memory, dropped after their last use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cnr_store import TableOptions
from cnr_store.maintenance.compaction.counted_chunks import CountedChunks
from cnr_store.read.plan import Step, plan_table
from cnr_store.segment.decoded import Scratch
from cnr_store.segment.reader import SegmentReader
from tests.support.memory import store_in_memory


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arrays that were decoded."""
    found: list[str] = []
    decode = SegmentReader._decode

    def slowly(self: SegmentReader, entry: Any, index: int, scratch: Scratch) -> Any:
        found.append(entry.path.rpartition(".")[2])
        time.sleep(0.002)
        return decode(self, entry, index, scratch)

    monkeypatch.setattr(SegmentReader, "_decode", slowly)
    return found


@pytest.fixture
def chunk() -> Iterator[tuple[SegmentReader, Step]]:
    """A chunk of rows 0, 2, 4 of a delta."""
    with store_in_memory() as store:
        with store.writer() as writer:
            with writer.begin(0) as txn:
                txn.write_table("t", np.ones((6, 2), np.float32), options=TableOptions(scale=1.0))
            with writer.begin(1) as txn:
                txn.write_rows("t", np.asarray([0, 2, 4]), np.full((3, 2), 5, np.float32))
        reader = store.snapshot().readers[1]
        yield reader, plan_table([reader.manifest], "t").batches[0].steps[0]


def codes(cache: CountedChunks, step: Step) -> Any:
    return cache.readers[0].read_chunk(step.row_list.arrays["codes"], step.chunk, Scratch())


def test_threads_that_want_a_chunk_wait_for_the_one_that_decodes_it(
    chunk: tuple[SegmentReader, Step], decoded: list[str]
) -> None:
    reader, step = chunk
    cache = CountedChunks([reader], [(step, 8)], 1 << 20)
    start = threading.Barrier(8)

    def use() -> tuple[Any, Any]:
        start.wait()
        rows = cache.readers[0].read_rows(step.row_list, step.chunk, Scratch())
        return rows.tolist(), codes(cache, step).tolist()

    with ThreadPoolExecutor(8) as pool:
        found = [future.result() for future in [pool.submit(use) for _ in range(8)]]

    assert found == [([0, 2, 4], [[4, 4]] * 3)] * 8
    assert sorted(decoded) == ["codes", "rows"]


def test_a_chunk_is_dropped_after_its_last_use(chunk: tuple[SegmentReader, Step], decoded: list[str]) -> None:
    reader, step = chunk
    cache = CountedChunks([reader], [(step, 2)], 12)

    for _ in range(2):
        codes(cache, step)
        cache.release(step)
    codes(cache, step)

    assert decoded == ["codes", "codes"]


@pytest.mark.parametrize(("uses", "limit_bytes"), [(1, 1 << 20), (5, 11)])
def test_what_is_used_once_or_does_not_fit_is_not_kept(
    chunk: tuple[SegmentReader, Step], decoded: list[str], uses: int, limit_bytes: int
) -> None:
    reader, step = chunk
    cache = CountedChunks([reader], [(step, uses)], limit_bytes)

    found = [codes(cache, step).tolist() for _ in range(3)]

    assert found == [[[4, 4]] * 3] * 3
    assert decoded == ["codes"] * 3
