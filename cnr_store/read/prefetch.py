"""Objects of a remote store on their way before a replay asks for them: the network and the decoders work at once.

A thread that fetches a chunk, decodes it and then fetches the next leaves the network idle while it decodes, and the
decoder while it waits. Here threads of their own fetch, in the order in which the plan will ask, a bounded number of
bytes ahead. What was not fetched ahead is read when it is asked for, so order and bound can never stop a read.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from cnr_store.format import arrays
from cnr_store.read.plan import TablePlan
from cnr_store.read.replay import ChunkReader
from cnr_store.runtime.threads import Workers
from cnr_store.segment.reader import SegmentReader

FETCH_THREADS = 8
LAST_FETCHES = 2
AHEAD_BYTES = 64 * 1024 * 1024
"""Bound on objects in memory that were fetched, or are being fetched, and were not asked for yet."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object that a plan needs: which segment of the chain, path in it, bytes, and how often it is asked for."""

    segment: int
    path: str
    size_bytes: int
    times: int = 1


def wanted_objects(readers: Sequence[SegmentReader], plan: TablePlan, names: Iterable[str]) -> list[Wanted]:
    """Return the chunks that a replay of ``plan`` into arrays ``names`` reads, in its order. No I/O.

    Without those that it may leave out: row ids of chunks whose rows have no gap, and chunks that are decoded already.
    The slot in whose order codes are stored is read for them, and again for itself.
    """
    arrays_of_codes = ("codes", "values", "scale", "zero_point")
    found: dict[tuple[int, str], Wanted] = {}
    chosen = {"rows", *names, *(arrays_of_codes if "codes" in names else ())}
    for step in (step for batch in plan.batches for step in batch.steps):
        reader, entries = readers[step.segment], step.row_list.arrays
        has_gaps = step.last - step.first + 1 != step.num_rows
        asked = {
            name: entry
            for name, entry in entries.items()
            if name in chosen and (has_gaps or name != "rows") and not reader.is_kept(entry, step.chunk)
        }
        orders = {entry.order for entry in asked.values()}
        # Asked for before the codes that lie in its order.
        for name, entry in sorted(entries.items(), key=lambda item: item[1].path not in orders):
            times = (name in asked) + (entry.path in orders)
            if times:
                path = arrays.chunk_path(entry, step.chunk)
                # A chunk in which the table has two lists is decoded once.
                found.setdefault((step.segment, path), Wanted(step.segment, path, reader.size_of(path), times))
    return list(found.values())


@contextlib.contextmanager
def reading_ahead(
    readers: Sequence[ChunkReader], plan: TablePlan, names: Sequence[str], workers: Workers
) -> Iterator[Sequence[ChunkReader]]:
    """Yield the segments for one replay of ``plan``, their objects on their way if the store is remote.

    Where ``workers`` have no threads, nothing has: reads keep the order of the code.

    What is still being fetched at the end is waited for, and nothing else is begun.
    """
    segments = [reader for reader in readers if isinstance(reader, SegmentReader) and reader.is_remote]
    helps = not workers.is_inline and len(segments) == len(readers)
    wanted = wanted_objects(segments, plan, names) if helps else []
    if len(wanted) < 2:
        yield readers
        return
    ahead = ReadAhead(segments, wanted)
    try:
        yield [reader.fetched_by(partial(ahead.take, at)) for at, reader in enumerate(segments)]
    finally:
        ahead.close()


class ReadAhead:
    """Fetches objects in the given order, at most ``limit_bytes`` of them, and one at least, before they are taken.

    Those that are fetched at once share the network and arrive together. So fewer are when few are left: else the last
    ones would all be decoded when nothing is left to fetch.
    """

    def __init__(
        self, readers: Sequence[SegmentReader], wanted: Iterable[Wanted], *, limit_bytes: int = AHEAD_BYTES
    ) -> None:
        self._readers = readers
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._waiting = deque(wanted)
        self._passed: set[tuple[int, str]] = set()
        self._begun: dict[tuple[int, str], tuple[Wanted, Future[bytes]]] = {}
        self._taken: dict[tuple[int, str], int] = {}
        self._begun_bytes = 0
        self._in_flight = 0
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="cnr-fetch")
        with self._lock:
            self._begin()

    def take(self, segment: int, path: str) -> bytes | None:
        """Return an object as often as it is wanted; None if it was not begun, and then it never is.

        Blocks while it is fetched.

        Raises
        ------
        MissingObject, CorruptObject, StorageFailure
            As `SegmentReader.read_object`.
        """
        key = segment, path
        with self._lock:
            begun = self._begun.get(key)
            if begun is None:
                self._passed.add(key)
                return None
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] >= begun[0].times:
                # Its bytes are the taker's from here on, so the next may be begun, also while this one is still coming.
                del self._begun[key], self._taken[key]
                self._begun_bytes -= begun[0].size_bytes
                self._begin()
        return begun[1].result()

    def close(self) -> None:
        """Begin nothing more, wait for what is being fetched, and give up what nobody took.

        An error that is still being looked at keeps this object, and need not keep the bytes.
        """
        with self._lock:
            self._waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._begun.clear()
            self._begun_bytes = 0

    def _begin(self) -> None:
        while self._waiting:
            one = self._waiting[0]
            is_full = self._begun and self._begun_bytes + one.size_bytes > self._limit_bytes
            if is_full or self._in_flight >= max(LAST_FETCHES, min(FETCH_THREADS, len(self._waiting))):
                return
            self._waiting.popleft()
            key = one.segment, one.path
            if key not in self._passed:
                self._in_flight += 1
                self._begun_bytes += one.size_bytes
                self._begun[key] = one, self._pool.submit(self._fetch, one)

    def _fetch(self, one: Wanted) -> bytes:
        try:
            return self._readers[one.segment].read_object(one.path)
        finally:
            with self._lock:
                self._in_flight -= 1
                self._begin()
