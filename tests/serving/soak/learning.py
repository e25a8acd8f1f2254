"""The online training: another model whose tables follow the store through the change stream.

Only the stream changes its copy of the store's tables; it trains its other layers itself. Copy and cursor are in one
file, so a killed process continues from there. If the cursor has expired, it starts from the newest snapshot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from cnr_store import NotFound, Store
from cnr_store.changes import ChangeStream, changes
from cnr_store.errors import CursorExpired
from cnr_store_tools.demo.batches import ClickBatch
from cnr_store_tools.demo.model import SmallDLRM
from cnr_store_tools.demo.worker import Channel
from tests.serving.soak.saving import make_batches, make_model, repeated
from tests.serving.soak.witness import different_rows, make_tables

PAUSE_S = 0.05
KEEP_EVERY_S = 1.0
LEARNING_RATE = 0.01
CURSOR = "online-training"
CURSOR_TTL_S = 60.0
CATCH_UP_S = 60.0


def play(task: Mapping[str, Any], channel: Channel) -> None:
    """Follow and train until an order arrives; then reach its version, and compare the copy with the store."""
    torch.set_num_threads(1)
    rows = make_tables(task["rows"])
    model = make_model(rows, task["seed"])
    batches = repeated(make_batches(rows, task["seed"]))
    dense = torch.optim.Adagrad([weight for _, weight in model.dense_parameters()], lr=LEARNING_RATE)
    with Store.open(task["store"]) as store:
        tables = FollowingTables(store, model, Path(task["folder"], "online-training.npz"), channel)
        tables.start()
        channel.report("ready")
        while (last := channel.order(PAUSE_S)) is None:
            with tables.lock:
                train_dense(model, dense, next(batches))
        tables.reach(last["version"], CATCH_UP_S)
        tables.compare()


def train_dense(model: SmallDLRM, optimizer: torch.optim.Optimizer, batch: ClickBatch) -> None:
    """Train the layers that are not tables on one batch."""
    optimizer.zero_grad(set_to_none=True)
    functional.binary_cross_entropy_with_logits(model(batch.ids, batch.dense), batch.labels).backward()
    optimizer.step()


class FollowingTables:
    """Updates a model's tables to each version of the store in a thread, all rows of a version under one lock."""

    def __init__(self, store: Store, model: SmallDLRM, kept: Path, channel: Channel) -> None:
        self.lock = threading.Lock()
        self._store, self._kept, self._channel = store, kept, channel
        self._weights: dict[str, npt.NDArray[np.float32]] = {
            name: weight.detach().numpy() for name, weight in model.table_parameters()
        }
        self._kept_at_s = 0.0
        self._stream: ChangeStream | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def version(self) -> int:
        """The last version whose changes are in the tables."""
        cursor = None if self._stream is None else self._stream.cursor
        return -1 if cursor is None else cursor.version

    def start(self) -> None:
        """Load the tables of an earlier process, or of the newest snapshot, and follow from there."""
        try:
            with np.load(self._kept) as found:
                version = int(found["version"])
                for name, weight in self._weights.items():
                    weight[:] = found[name]
            self._begin(version, "cursor")
        except FileNotFoundError:
            self._begin_from_snapshot()
        self._thread.start()

    def reach(self, version: int, timeout_s: float) -> None:
        """Wait until the tables have ``version``, or the timeout is over; then end the stream."""
        deadline_s = time.monotonic() + timeout_s
        while self.version < version and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert self._stream is not None  # `start` was called
        self._stream.close()
        self._thread.join()

    def compare(self) -> None:
        """Compare the tables with the snapshot of their version, bit for bit."""
        snapshot = self._store.snapshot(self.version)
        different = sum(different_rows(held, snapshot.table(name).read()) for name, held in self._weights.items())
        rows = sum(len(held) for held in self._weights.values())
        self._channel.report("finished", version=self.version, rows=rows, different=different)

    def _begin_from_snapshot(self) -> None:
        snapshot = self._store.snapshot()
        with self.lock:
            for name, weight in self._weights.items():
                weight[:] = snapshot.table(name).read()
        self._begin(snapshot.version, "snapshot")

    def _begin(self, version: int, how: str) -> None:
        self._channel.report("opened", how=how, version=version)
        self._stream = changes(self._store, version, follow=True)
        self._keep(version)

    def _run(self) -> None:
        while True:
            assert self._stream is not None  # `start` created it
            try:
                return self._follow(self._stream)
            except CursorExpired:
                self._begin_from_snapshot()

    def _follow(self, stream: ChangeStream) -> None:
        for version in stream.versions():
            rows = 0
            with self.lock:
                for batch in version.batches:
                    # No rows are deleted in this demonstration: every operation is an upsert.
                    values = batch.column("values").flatten().to_numpy()
                    held = self._weights[batch.schema.metadata[b"cnr.table"].decode()]
                    held[batch.column("row_id").to_numpy()] = values.reshape(-1, held.shape[1])
                    rows += batch.num_rows
            self._channel.report("moved", version=version.version, rows=rows)
            if time.monotonic() - self._kept_at_s > KEEP_EVERY_S:
                self._keep(version.version)

    def _keep(self, version: int) -> None:
        """Write tables and version to one file, then register the cursor, so that later versions are kept."""
        fresh = self._kept.with_suffix(".new.npz")
        kept: dict[str, Any] = {"version": np.array(version), **self._weights}
        np.savez(fresh, **kept)
        fresh.replace(self._kept)
        try:
            self._store.register_cursor(CURSOR, version, ttl_s=CURSOR_TTL_S)
        except NotFound:
            pass  # The version has expired. If its changes are deleted too, the stream raises.
        self._kept_at_s = time.monotonic()
