"""An inference process: a `Loader` that follows the store, and threads that check every lookup."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store import NotFound, Store
from cnr_store.errors import MissingObject
from cnr_store.serving import AttachedTables, Loader, LoaderOptions, LookupBatch
from cnr_store_tools.demo.worker import Channel
from tests.serving.soak.witness import NUM_WITNESSES, different_rows, make_tables, read_steps

LOOKUP_ROWS = 256
LOOKUP_WITNESSES = 4
TICK_S = 0.25
COMPARE_EVERY_S = 1.0
COMPARE_ROWS = 8_192
CATCH_UP_S = 60.0

Ids = Mapping[str, npt.NDArray[np.int64]]
Find = Callable[[Ids], LookupBatch]
"""Looks up rows by table and ids."""


class LookupThread:
    """Looks up traffic with witness rows in it, and checks that each batch has one version."""

    def __init__(self, find: Find, rows: Mapping[str, int], channel: Channel, seed: int, pause_s: float) -> None:
        self.lookups = 0
        self.last: tuple[LookupBatch, Ids] | None = None
        self._find, self._rows, self._channel = find, rows, channel
        self._random = np.random.default_rng(seed)
        self._pause_s, self._version = pause_s, -1

    def run(self, ends: threading.Event) -> None:
        """Look up rows until ``ends`` is set."""
        while not ends.wait(self._pause_s):
            ids = {table: self._ids(count) for table, count in self._rows.items()}
            batch = self._find(ids)
            if batch.version != self._version:
                if batch.version < self._version:
                    self._channel.report("went_back", version=batch.version)
                self._version = batch.version
            torn = describe_tear(batch, ids, self._rows)
            if torn is not None:
                self._channel.report("torn", version=batch.version, found=torn)
            self.last = batch, ids
            self.lookups += 1

    def _ids(self, count: int) -> npt.NDArray[np.int64]:
        ids = self._random.integers(0, count, LOOKUP_ROWS)
        places = self._random.choice(LOOKUP_ROWS, LOOKUP_WITNESSES, replace=False)
        ids[places] = count + self._random.integers(0, NUM_WITNESSES, LOOKUP_WITNESSES)
        return ids


def describe_tear(batch: LookupBatch, ids: Ids, rows: Mapping[str, int]) -> str | None:
    """Return what is torn in a batch, or None: every witness must have the step of the batch."""
    for table, given in ids.items():
        steps = read_steps(np.asarray(batch.rows[table])[given >= rows[table]])
        if not (steps == batch.step).all():
            return f"{table}: a batch of step {batch.step} shows steps {sorted(set(steps.tolist()))}"
    return None


def play(task: Mapping[str, Any], channel: Channel) -> None:
    """Serve lookups until an order arrives; then load its version, and compare the whole copy with the store.

    With ``task["shared"]``, a folder, the tables are stored there as codes, and one of the threads looks them up as
    another process would.
    """
    rows, shared = make_tables(task["rows"]), task["shared"]
    interval_s = task["poll_interval_s"]
    with (
        Store.open(task["store"]) as store,
        Loader(
            store, shared=shared,
            options=LoaderOptions(kept_as="codes" if shared else "values", poll_interval_s=interval_s),
        ) as loader,
        nullcontext() if shared is None else AttachedTables(shared) as attached,
    ):  # fmt: skip
        finds: list[Find] = [loader.lookup_many, loader.lookup_many if attached is None else attached.lookup_many]
        seed = task["seed"] * 1_000 + 10 * task["index"]
        workers = [
            LookupThread(find, rows, channel, seed + number, task["pause_s"]) for number, find in enumerate(finds)
        ]
        ends = threading.Event()
        threads = [threading.Thread(target=worker.run, args=(ends,), daemon=True) for worker in workers]
        threads.append(threading.Thread(target=_follow, args=(loader, channel, ends, interval_s), daemon=True))
        for thread in threads:
            thread.start()
        channel.report("ready", version=loader.version)
        compared_s = time.monotonic()
        while (last := channel.order(TICK_S)) is None:
            _report_tick(loader, workers, channel)
            if time.monotonic() - compared_s > COMPARE_EVERY_S:
                _compare_last(store, workers[0], channel)
                compared_s = time.monotonic()
        deadline_s = time.monotonic() + CATCH_UP_S
        while loader.version < last["version"] and time.monotonic() < deadline_s:
            time.sleep(0.05)
        ends.set()
        for thread in threads:
            thread.join()
        _report_tick(loader, workers, channel)
        _compare_all(store, loader, channel)


def _report_tick(loader: Loader, workers: Sequence[LookupThread], channel: Channel) -> None:
    """Report the served version, and the lookups of this life."""
    channel.report("tick", lookups=sum(worker.lookups for worker in workers), version=loader.version)


def _follow(loader: Loader, channel: Channel, ends: threading.Event, interval_s: float) -> None:
    while True:
        poll = loader.poll()
        if poll.is_updated:
            channel.report("applied", version=poll.version)
        if ends.wait(interval_s):
            return


def _compare_last(store: Store, worker: LookupThread, channel: Channel) -> None:
    """Compare the rows of a lookup with the snapshot of its version, bit for bit."""
    if worker.last is None:
        return
    batch, ids = worker.last
    try:
        snapshot = store.snapshot(batch.version)
        different = sum(
            different_rows(np.asarray(batch.rows[table]), snapshot.table(table).read_rows(given))
            for table, given in ids.items()
        )
    except (NotFound, MissingObject):
        return  # The version has expired meanwhile, so it cannot be compared.
    channel.report("compared", rows=sum(len(one) for one in ids.values()), different=different)


def _compare_all(store: Store, loader: Loader, channel: Channel) -> None:
    """Compare the whole copy with the snapshot of the served version, bit for bit."""
    snapshot = store.snapshot(loader.version)
    rows = different = 0
    for name, schema in snapshot.tables.items():
        for start in range(0, schema.num_rows, COMPARE_ROWS):
            stop = min(start + COMPARE_ROWS, schema.num_rows)
            served = loader.lookup(name, np.arange(start, stop))
            different += different_rows(np.asarray(served), snapshot.table(name).read(start, stop))
        rows += schema.num_rows
    channel.report("finished", version=loader.version, rows=rows, different=different)
