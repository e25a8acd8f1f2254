"""Fetches chunks of a remote store before a replay reads them, so that network and decoders work in parallel.

A thread that fetches a chunk, decodes it and then fetches the next leaves the network idle while it decodes, and the
decoder while it waits. Here threads of their own fetch, in the order in which the plan will ask, a bounded number of
bytes ahead. What was not fetched ahead is read when it is asked for, so order and bound can never stop a read.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from cnr_store.format.records import ArrayEntry, ChunkPlace
from cnr_store.read.plan import TablePlan
from cnr_store.read.replay import ChunkReader
from cnr_store.runtime.threads import Workers
from cnr_store.segment.reader import SegmentReader

FETCH_THREADS = 8
MIN_FETCHES = 2
PREFETCH_BYTES = 64 * 1024 * 1024
"""Bound on chunks in memory that were fetched, or are being fetched, and were not asked for yet."""

FETCH_BYTES = 8 * 1024 * 1024
"""Most bytes of neighbouring chunks of a shard that one request fetches."""


@dataclass(slots=True)
class FetchRequest:
    """Adjacent chunks of one object that a plan reads: their segment, places, and number of reads each."""

    segment: int
    places: list[ChunkPlace]
    times: list[int]
    size_bytes: int

    def join(self, place: ChunkPlace, times: int) -> bool:
        """Add a chunk if it is adjacent and the request stays within `FETCH_BYTES`; returns whether it was added."""
        last = self.places[-1]
        is_next = (last.path, last.start + last.size) == (place.path, place.start)
        if is_next and self.size_bytes + place.size <= FETCH_BYTES:
            self.places.append(place)
            self.times.append(times)
            self.size_bytes += place.size
            return True
        return False


class WantedChunk(NamedTuple):
    """A chunk of the arrays ``entries`` (by name) of a segment, of which a replay wants ``names``.

    ``has_gaps``: row ids that have to be read.
    """

    segment: int
    entries: Mapping[str, ArrayEntry]
    number: int
    has_gaps: bool
    names: Collection[str]


def fetch_requests(readers: Sequence[SegmentReader], chunks: Iterable[WantedChunk]) -> list[FetchRequest]:
    """Return the requests by which a replay of ``chunks`` gets them, in its order. No I/O.

    Without those that it may leave out: row ids of chunks whose rows have no gap, and chunks that are decoded already.
    The array in whose order others are stored is read for each of them, and again for itself.
    """
    arrays_of_codes = ("codes", "values", "scale", "zero_point")
    seen: set[tuple[int, str, int]] = set()
    found: list[FetchRequest] = []
    last: dict[tuple[int, str], FetchRequest] = {}
    for segment, entries, number, has_gaps, names in chunks:
        reader = readers[segment]
        chosen = {"rows", *names, *(arrays_of_codes if "codes" in names else ())}
        asked = {
            name: entry
            for name, entry in entries.items()
            if name in chosen and (has_gaps or name != "rows") and not reader.is_cached(entry, number)
        }
        orders = Counter(entry.order for entry in asked.values())
        # Asked for before those that lie in its order.
        for name, entry in sorted(entries.items(), key=lambda item: item[1].path not in orders):
            times = (name in asked) + orders[entry.path]
            place = reader.place_of(entry, number)
            key = segment, place.path
            # A chunk in which the table has two lists is decoded once.
            if not times or (*key, place.start) in seen:
                continue
            seen.add((*key, place.start))
            if key not in last or not last[key].join(place, times):
                last[key] = FetchRequest(segment, [place], [times], place.size)
                found.append(last[key])
    return found


def chunks_of(plan: TablePlan, names: Collection[str]) -> Iterator[WantedChunk]:
    """Yield the chunks of a plan, in its order, for a replay into arrays ``names``."""
    for step in (step for batch in plan.batches for step in batch.steps):
        has_gaps = step.last - step.first + 1 != step.num_rows
        yield WantedChunk(step.segment, step.row_list.arrays, step.chunk, has_gaps, names)


@contextlib.contextmanager
def prefetching(
    readers: Sequence[ChunkReader], chunks: Iterable[WantedChunk], workers: Workers
) -> Iterator[Sequence[ChunkReader]]:
    """Yield the segments for one replay of ``chunks``, their objects on their way if the store is remote.

    Where ``workers`` have no threads, nothing has: reads keep the order of the code.

    What is still being fetched at the end is waited for, and nothing else is begun.
    """
    segments = [reader for reader in readers if isinstance(reader, SegmentReader) and reader.is_remote]
    helps = not workers.is_inline and len(segments) == len(readers)
    wanted = fetch_requests(segments, chunks) if helps else []
    if len(wanted) < 2:
        yield readers
        return
    ahead = Prefetcher(segments, wanted)
    try:
        yield [reader.with_chunk_source(partial(ahead.take, at)) for at, reader in enumerate(segments)]
    finally:
        ahead.close()


_Key = tuple[int, str, int]


class Prefetcher:
    """Fetches chunks in the given order before they are taken: at most ``limit_bytes``, and one request at least.

    Those that are fetched at once share the network and arrive together. So fewer are when few are left: else the last
    ones would all be decoded when nothing is left to fetch.
    """

    def __init__(
        self, readers: Sequence[SegmentReader], wanted: Iterable[FetchRequest], *, limit_bytes: int = PREFETCH_BYTES
    ) -> None:
        self._readers = readers
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._waiting = deque(wanted)
        self._passed: set[_Key] = set()
        self._begun: dict[_Key, tuple[int, Future[bytes | memoryview]]] = {}
        self._left: dict[_Key, int] = {}
        self._begun_bytes = 0
        self._in_flight = 0
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="cnr-fetch")
        with self._lock:
            self._begin()

    def take(self, segment: int, place: ChunkPlace) -> bytes | memoryview | None:
        """Return a chunk as often as it is wanted; None if it was not begun, and then it never is.

        Blocks while it is fetched.

        Raises
        ------
        MissingObject, CorruptObject, StorageFailure
            As `SegmentReader.read_places`.
        """
        key = segment, place.path, place.start
        with self._lock:
            begun = self._begun.get(key)
            if begun is None:
                self._passed.add(key)
                return None
            self._left[key] -= 1
            if not self._left[key]:
                # Its bytes are the taker's from here on, so the next may be begun, also while this one is still coming.
                del self._begun[key], self._left[key]
                self._begun_bytes -= begun[0]
                self._begin()
        return begun[1].result()

    def close(self) -> None:
        """Start no more requests, wait for the running ones, and release chunks that were not taken.

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
            if is_full or self._in_flight >= max(MIN_FETCHES, min(FETCH_THREADS, len(self._waiting))):
                return
            self._waiting.popleft()
            keys = [(one.segment, place.path, place.start) for place in one.places]
            left = [k for k, key in enumerate(keys) if key not in self._passed]
            if not left:
                continue
            begun: dict[int, Future[bytes | memoryview]] = {k: Future() for k in left}
            try:  # its end waits for the lock that is held here
                self._pool.submit(self._fetch, one, range(left[0], left[-1] + 1), begun)
            except RuntimeError:  # the interpreter is ending, and no thread starts: chunks are read when asked for
                self._waiting.clear()
                return
            self._in_flight += 1
            for k, future in begun.items():
                self._left[keys[k]] = one.times[k]
                self._begun[keys[k]] = one.places[k].size, future
                self._begun_bytes += one.places[k].size

    def _fetch(self, one: FetchRequest, span: range, begun: Mapping[int, Future[bytes | memoryview]]) -> None:
        """``span``: which of the chunks lie between the first and the last that somebody waits for."""
        try:
            pieces = self._readers[one.segment].read_places(one.places[span.start : span.stop])
            for k, future in begun.items():
                future.set_result(pieces[k - span.start])
        except BaseException as error:  # noqa: BLE001 - it goes to whoever takes the chunk
            for future in begun.values():
                future.set_exception(error)
        finally:
            with self._lock:
                self._in_flight -= 1
                self._begin()
