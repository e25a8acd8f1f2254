"""The online training: another model that starts from a snapshot's rows and keeps up through the change stream.

Its tables are its own copy of the store's, moved by the change stream alone; its other layers are trained here. Copy
and cursor are kept in one file, so a life that is killed goes on where it was; where the stream no longer reaches back
that far, it starts from the newest snapshot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from cnr_store import CursorExpired, NotFound, Snapshot, Store
from cnr_store.changes import ChangeStream, changes
from cnr_store_tools.demo.batches import Batch, TimeOrderedBatches
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.serve_demo.channel import Channel
from cnr_store_tools.serve_demo.clicks import BATCH_SIZE, make_clicks, make_model_config
from cnr_store_tools.serve_demo.comparing import different_rows
from cnr_store_tools.serve_demo.saving import endless
from cnr_store_tools.serve_demo.tables import make_tables

PAUSE_S = 0.05
KEEP_EVERY_S = 1.0
LEARNING_RATE = 0.01
CURSOR = "online-training"
CURSOR_TTL_S = 60.0
CATCH_UP_S = 60.0
STEPS_PER_TELL = 10


@dataclass(frozen=True, slots=True)
class Start:
    """Where a life starts: the tables by parameter name, the version that they are, and where they are from."""

    tables: Mapping[str, npt.NDArray[np.float32]]
    version: int
    how: Literal["snapshot", "cursor"]


def play(order: Mapping[str, Any], channel: Channel) -> None:
    """Follow and train until an order comes; then reach the version that it names, and compare the copy with it."""
    torch.set_num_threads(1)
    tables = make_tables(order["rows"])
    model = SmallDLRM(make_model_config(tables, order["seed"]))
    with Store.open(order["store"]) as store:
        follower = Follower(store, model, Path(order["folder"], "online-training.npz"), channel)
        follower.start()
        channel.tell("ready")
        batches = endless(TimeOrderedBatches(make_clicks(tables, order["seed"]), BATCH_SIZE))
        dense = torch.optim.Adagrad([weight for _, weight in model.dense_parameters()], lr=LEARNING_RATE)
        steps = 0
        while True:
            last = channel.order(PAUSE_S)
            follower.check()
            if last is not None:
                break
            with follower.lock:
                train_dense(model, dense, next(batches))
            steps += 1
            if steps == STEPS_PER_TELL:
                channel.tell("learned", steps=steps)
                steps = 0
        channel.tell("learned", steps=steps)
        follower.reach(last["version"], CATCH_UP_S)
        follower.finish()


class Follower:
    """Moves a model's tables to each version of the store, all rows of a version under one lock."""

    def __init__(self, store: Store, model: SmallDLRM, kept: Path, channel: Channel) -> None:
        self.lock = threading.Lock()
        self._store, self._model, self._kept, self._channel = store, model, kept, channel
        self._weights = {name: weight.detach().numpy() for name, weight in model.table_parameters()}
        self._stream: ChangeStream | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: BaseException | None = None
        self._kept_at_s = 0.0

    def start(self) -> None:
        """Put the tables where the stream begins, and follow from there in a thread."""
        snapshot = self._store.snapshot()
        start = read_kept(self._kept, self._weights.keys()) or read_snapshot(snapshot)
        read_dense(snapshot, self._model)
        self._begin(start)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the thread, if something did."""
        if self._error is not None:
            raise self._error

    def reach(self, version: int, timeout_s: float) -> None:
        """Wait until everything up to ``version`` is in the tables, or the time is over; then end the stream."""
        deadline = time.monotonic() + timeout_s
        while self.version < version and time.monotonic() < deadline:
            self.check()
            time.sleep(0.02)
        assert self._stream is not None
        self._stream.close()
        self._thread.join()
        self.check()

    @property
    def version(self) -> int:
        """Everything up to here is in the tables."""
        cursor = None if self._stream is None else self._stream.cursor
        return -1 if cursor is None else cursor.version

    def finish(self) -> None:
        """Compare the tables with the snapshot of the version that they are at, bit for bit."""
        snapshot = self._store.snapshot(self.version)
        found = {name: different_rows(held, snapshot.table(name).read()) for name, held in self._weights.items()}
        rows = sum(len(held) for held in self._weights.values())
        self._channel.tell("finished", version=self.version, rows=rows, different=sum(found.values()))

    def _begin(self, start: Start) -> None:
        with self.lock:
            for name, values in start.tables.items():
                self._weights[name][:] = values
        self._channel.tell("opened", how=start.how, version=start.version)
        self._stream = changes(self._store, start.version, follow=True)
        self._keep(start.version)

    def _run(self) -> None:
        try:
            while True:
                assert self._stream is not None
                try:
                    return self._follow(self._stream)
                except CursorExpired:
                    self._begin(read_snapshot(self._store.snapshot()))
        except Exception as error:  # noqa: BLE001 - the thread that trains raises it
            self._error = error

    def _follow(self, stream: ChangeStream) -> None:
        for version in stream.versions():
            batches = rows = 0
            with self.lock:
                for batch in version.batches:
                    # Nobody deletes rows in this demonstration: every operation is an upsert.
                    values = batch.column("values").flatten().to_numpy()
                    table = batch.schema.metadata[b"cnr.table"].decode()
                    held = self._weights[table]
                    held[batch.column("row_id").to_numpy()] = values.reshape(-1, held.shape[1])
                    batches, rows = batches + 1, rows + batch.num_rows
            self._channel.tell("moved", version=version.version, batches=batches, rows=rows)
            if time.monotonic() - self._kept_at_s > KEEP_EVERY_S:
                self._keep(version.version)

    def _keep(self, version: int) -> None:
        """Keep tables and version in one file, then let the store know that it must hold changes from here on."""
        fresh = self._kept.with_suffix(".new.npz")
        kept: dict[str, Any] = {"version": np.array(version), **self._weights}
        np.savez(fresh, **kept)
        fresh.replace(self._kept)
        try:
            self._store.register_cursor(CURSOR, version, ttl_s=CURSOR_TTL_S)
        except NotFound:
            pass  # It expired before it was registered. The stream says so if its changes are gone, too.
        self._kept_at_s = time.monotonic()


def read_kept(path: Path, names: Any) -> Start | None:
    """Return what an earlier life kept; None without one."""
    try:
        with np.load(path) as found:
            return Start({name: found[name] for name in names}, int(found["version"]), "cursor")
    except FileNotFoundError:
        return None


def read_snapshot(snapshot: Snapshot) -> Start:
    """Return the tables of a snapshot."""
    return Start({name: snapshot.table(name).read() for name in snapshot.tables}, snapshot.version, "snapshot")


def read_dense(snapshot: Snapshot, model: SmallDLRM) -> None:
    """Start the other layers from the snapshot's."""
    with torch.no_grad():
        for name, weight in model.dense_parameters():
            weight.copy_(torch.from_numpy(snapshot.read_dense(name)))


def train_dense(model: SmallDLRM, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Train the layers that are not tables on one batch."""
    optimizer.zero_grad(set_to_none=True)
    functional.binary_cross_entropy_with_logits(model(batch.ids, batch.dense), batch.labels).backward()
    optimizer.step()
