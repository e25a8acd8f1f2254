"""An inference process: a `Loader` that follows the store, and threads that look rows up and distrust each of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store import MissingObject, NotFound, Store
from cnr_store.serving import AttachedTables, Batch, Loader
from cnr_store_tools.serve_demo.channel import Channel
from cnr_store_tools.serve_demo.comparing import different_rows
from cnr_store_tools.serve_demo.tables import make_tables
from cnr_store_tools.serve_demo.witness import NUM_WITNESSES, read_steps

LOOKUP_ROWS = 256
LOOKUP_WITNESSES = 4
PAUSE_S = 0.001
TICK_S = 0.25
COMPARE_EVERY_S = 1.0
COMPARE_ROWS = 8_192
CATCH_UP_S = 60.0


Find = Callable[[Mapping[str, npt.NDArray[np.int64]]], Batch]
"""Ids by table to rows."""


@dataclass(slots=True)
class Tally:
    """What one lookup thread counted since it was asked last."""

    lookups: int = 0
    rows: int = 0
    torn: int = 0


class LookupThread:
    """Looks up batches of traffic with witnesses among them, and checks that each batch shows one version."""

    def __init__(self, find: Find, rows: Mapping[str, int], channel: Channel, seed: int) -> None:
        self._find, self._rows, self._channel = find, rows, channel
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._tally = Tally()
        self._version = -1
        self.last: tuple[Batch, dict[str, npt.NDArray[np.int64]]] | None = None

    def run(self, ends: threading.Event) -> None:
        """Look up until told to end."""
        while not ends.wait(PAUSE_S):
            self.look_up()

    def look_up(self) -> None:
        """Look up one batch of all tables."""
        ids = {table: self._ids(count) for table, count in self._rows.items()}
        batch = self._find(ids)
        if batch.version != self._version:
            kind = "seen" if batch.version > self._version else "went_back"
            self._channel.tell(kind, version=batch.version, at_ms=time.time() * 1000, before=self._version)
            self._version = batch.version
        torn = describe_tear(batch, ids, self._rows)
        if torn is not None:
            self._channel.tell("torn", version=batch.version, found=torn)
        self.last = batch, ids
        with self._lock:
            self._tally.lookups += 1
            self._tally.rows += sum(len(one) for one in ids.values())
            self._tally.torn += torn is not None

    def take(self) -> Tally:
        """Return what was counted since the last call."""
        with self._lock:
            tally, self._tally = self._tally, Tally()
        return tally

    def _ids(self, count: int) -> npt.NDArray[np.int64]:
        ids = self._random.integers(0, count, LOOKUP_ROWS)
        places = self._random.choice(LOOKUP_ROWS, LOOKUP_WITNESSES, replace=False)
        ids[places] = count + self._random.integers(0, NUM_WITNESSES, LOOKUP_WITNESSES)
        return ids


def describe_tear(batch: Batch, ids: Mapping[str, npt.NDArray[np.int64]], rows: Mapping[str, int]) -> str | None:
    """Return what is torn in a batch, None if nothing is: every witness must show the step that the batch is of."""
    for table, given in ids.items():
        steps = read_steps(np.asarray(batch.rows[table])[given >= rows[table]])
        if not (steps == batch.step).all():
            return f"{table}: a batch of step {batch.step} shows steps {sorted(set(steps.tolist()))}"
    return None


def play(order: Mapping[str, Any], channel: Channel) -> None:
    """Serve lookups until an order comes; then reach the version that it names, and compare the whole copy with it.

    With ``order["shared"]``, a folder, the tables are held there as codes, and one of the threads looks them up as
    another process would.
    """
    rows, shared = make_tables(order["rows"]).parameters, order["shared"]
    with (
        Store.open(order["store"]) as store,
        Loader(
            store, holds="codes" if shared else "values", shared=shared, poll_interval_s=order["poll_interval_s"]
        ) as loader,
        nullcontext() if shared is None else AttachedTables(shared) as attached,
    ):
        finds: list[Find] = [loader.lookup_many, loader.lookup_many if attached is None else attached.lookup_many]
        seed = order["seed"] * 1_000 + 10 * order["index"]
        workers = [LookupThread(find, rows, channel, seed + number) for number, find in enumerate(finds)]
        ends = threading.Event()
        threads = [threading.Thread(target=worker.run, args=(ends,), daemon=True) for worker in workers]
        following = (loader, channel, ends, order["poll_interval_s"])
        threads.append(threading.Thread(target=_follow, args=following, daemon=True))
        for thread in threads:
            thread.start()
        channel.tell("ready", version=loader.version)
        compared_s = time.monotonic()
        retries = 0
        while (last := channel.order(TICK_S)) is None:
            before = retries
            retries = loader.metrics().retries + (0 if attached is None else attached.retries)
            _tell_tick(loader, workers, channel, retries - before)
            if time.monotonic() - compared_s > COMPARE_EVERY_S:
                _compare_last(store, workers[0], channel)
                compared_s = time.monotonic()
        deadline_s = time.monotonic() + CATCH_UP_S
        while loader.version < last["version"] and time.monotonic() < deadline_s:
            time.sleep(0.05)
        ends.set()
        for thread in threads:
            thread.join()
        _tell_tick(loader, workers, channel, 0)
        _finish(store, loader, channel)


def _tell_tick(loader: Loader, workers: Iterable[LookupThread], channel: Channel, retries: int) -> None:
    tallies = [worker.take() for worker in workers]
    channel.tell(
        "tick", lookups=sum(one.lookups for one in tallies), rows=sum(one.rows for one in tallies),
        torn=sum(one.torn for one in tallies), retries=retries, version=loader.version, at_ms=time.time() * 1000,
    )  # fmt: skip


def _follow(loader: Loader, channel: Channel, ends: threading.Event, interval_s: float) -> None:
    while True:
        poll = loader.poll()
        if poll.moved:
            channel.tell(
                "applied", version=poll.version, rows=poll.rows, size_bytes=poll.bytes, seconds=poll.apply_s,
                at_ms=time.time() * 1000,
            )  # fmt: skip
        if poll.error is not None:
            channel.tell("poll_failed", message=str(poll.error))
        if ends.wait(interval_s):
            return


def _compare_last(store: Store, worker: LookupThread, channel: Channel) -> None:
    """Compare the rows of a lookup with the snapshot of the version that it said, bit for bit."""
    if worker.last is None:
        return
    batch, ids = worker.last
    try:
        snapshot = store.snapshot(batch.version)
        different = {
            table: different_rows(np.asarray(batch.rows[table]), snapshot.table(table).read_rows(given))
            for table, given in ids.items()
        }
    except (NotFound, MissingObject):
        return  # It has expired meanwhile: there is nothing left to compare with.
    channel.tell("compared", rows=sum(len(one) for one in ids.values()), different=sum(different.values()))


def _finish(store: Store, loader: Loader, channel: Channel) -> None:
    snapshot = store.snapshot(loader.version)
    rows = different = 0
    for name, schema in snapshot.tables.items():
        for start in range(0, schema.num_rows, COMPARE_ROWS):
            stop = min(start + COMPARE_ROWS, schema.num_rows)
            held = loader.lookup(name, np.arange(start, stop))
            different += different_rows(np.asarray(held), snapshot.table(name).read(start, stop))
        rows += schema.num_rows
    channel.tell("finished", version=loader.version, rows=rows, different=different)
