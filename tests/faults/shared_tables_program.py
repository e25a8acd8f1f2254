"""Processes for the tests of shared tables: an owner that may kill itself at a given call, and counting readers.

A launcher forks them: `own` and `read` are what they do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cnr_store.errors import VersionNotFound
from cnr_store.format.records import TableSchema
from cnr_store.runtime.key_index import KeyIndex
from cnr_store.serving.rows import gather
from cnr_store.serving.rows.attached import AttachedTables
from cnr_store.serving.rows.board import Board
from cnr_store.serving.rows.lookups import LookupBatch, Lookups, ViewSource
from cnr_store.serving.rows.memory import Memory
from cnr_store.serving.rows.served_table import BaseTable, Overlay, row_kind
from cnr_store.serving.rows.shared_memory import SharedMemory
from cnr_store.serving.rows.views import Publisher
from cnr_store.types import Lattice, RowIds

ROWS = 3000
DIM = 5
KEYS_PER_VERSION = 400

DENSE = TableSchema(num_rows=ROWS, dim=DIM, dtype="float32", encoding=Lattice(scale=1.0))
HASHED = TableSchema(num_rows=0, dim=DIM, dtype="float32", encoding=Lattice(scale=1.0), keys="hashed")
CODES = "codes"
"""A third table: dense, served as bfloat16, so that codes are held and decoded. Versions above 256 are rounded."""


def hashed_keys(version: int) -> RowIds:
    """The keys of a version: half of the version before it, and new ones, so that keys are added and removed."""
    return np.arange(KEYS_PER_VERSION, dtype=np.int64) + version * (KEYS_PER_VERSION // 2)


def first_tables(version: int, memory: Memory) -> dict[str, BaseTable]:
    """The tables at a version; every element of every row is the version."""
    dense = BaseTable.allocate("dense", DENSE, row_kind(DENSE), memory=memory)
    dense.rows[:] = version
    codes = BaseTable.allocate(CODES, DENSE, row_kind(DENSE, "bfloat16"), memory=memory)
    codes.rows[:] = version % 256
    keys = hashed_keys(version)
    hashed = BaseTable.allocate("hashed", HASHED, row_kind(HASHED), num_keys=len(keys), memory=memory)
    hashed.rows[: len(keys)] = version
    assert hashed.index is not None
    hashed.index.insert_many(keys, np.arange(len(keys)))
    return {"dense": dense, CODES: codes, "hashed": hashed}


def overlays(version: int, before: int, publisher: Publisher, memory: Memory) -> dict[str, Overlay]:
    """The change from version ``before`` to ``version``: all rows, in an order that depends on the version."""
    view = publisher.newest_view()[0]
    order = np.random.default_rng(version).permutation(ROWS).astype(np.int64)
    made = {}
    for name, number in (("dense", version), (CODES, version % 256)):
        held = view.tables[name].base
        overlay = made[name] = Overlay.allocate(name, DENSE, ROWS, DIM, held.rows.dtype, memory)
        overlay.ids[:] = order
        overlay.rows[:] = number
    keys = hashed_keys(version)
    gone = np.setdiff1d(hashed_keys(before), keys)
    overlay = made["hashed"] = Overlay.allocate("hashed", HASHED, len(keys) + len(gone), DIM, np.float32, memory)
    overlay.ids[:] = np.concatenate([gone, keys])
    overlay.status[: len(gone)] = 1
    overlay.rows[:] = version
    for overlay in made.values():
        assert overlay.fill_index() < 0
    return made


def publish(publisher: Publisher, memory: Memory, version: int, before: int) -> None:
    publisher.merge()
    dense = {"version": np.full(4, version)}
    publisher.publish(version, version, overlays(version, before, publisher, memory), dense)


def is_mixed(batch: LookupBatch) -> bool:
    """Return whether a batch has a value of another version than its own."""
    version = batch.version
    bfloat16 = np.uint16(np.float32(version % 256).view(np.uint32) >> 16)
    return not (
        (batch.rows["dense"] == version).all()
        and (batch.rows[CODES] == bfloat16).all()
        and (batch.dense["version"] == version).all()
        and hashed_are_of(batch, version)
    )


def hashed_are_of(batch: LookupBatch, version: int) -> bool:
    """Return whether exactly the keys of this version are found, among keys of several versions."""
    keys = batch.rows["asked"][:, 0] if "asked" in batch.rows else None
    missing = batch.missing["hashed"]
    rows = batch.rows["hashed"]
    there = np.ones(len(rows), np.bool_) if missing is None else ~missing
    if keys is not None and not np.array_equal(there, np.isin(keys, hashed_keys(version))):
        return False
    return bool((rows[there] == version).all() and (rows[~there] == 0).all())


LEAST_VERSIONS = 6
"""How many versions a reader sees before it ends."""


class Counts:
    """Lookups of random rows, counted."""

    def __init__(self, source: ViewSource, seed: int) -> None:
        self.lookups = Lookups(source)
        self.source = source
        self.random = np.random.default_rng(seed)
        self.done = 0
        self.mixed = 0
        self.versions: set[int] = set()
        self.went_back = 0

    def look(self) -> int:
        """Look up once; return the version."""
        near = self.source.newest_view()[0].version
        low = int(hashed_keys(near)[0])
        keys = self.random.integers(low - KEYS_PER_VERSION, low + 2 * KEYS_PER_VERSION, 60)
        ids = {"dense": self.random.integers(0, ROWS, 120), CODES: self.random.integers(0, ROWS, 60), "hashed": keys}
        batch = self.lookups.lookup(ids, dense=["version"])
        asked = LookupBatch(
            batch.version, batch.step, batch.epoch, {**batch.rows, "asked": keys[:, None]}, batch.dense, batch.missing
        )
        self.done += 1
        self.mixed += is_mixed(asked)
        self.versions.add(batch.version)
        return batch.version

    def look_often(self, lookups: int) -> None:
        """Look up so often, and until some versions were seen: on a busy machine all lookups may see one version."""
        last = 0
        while self.done < lookups or len(self.versions) < LEAST_VERSIONS:
            version = self.look()
            self.went_back += version < last
            last = version


def counted(counts: Counts) -> dict[str, int]:
    return {
        "done": counts.done, "mixed": counts.mixed, "versions": len(counts.versions), "went_back": counts.went_back,
        "retries": counts.lookups.retries,
    }  # fmt: skip


# ---- an owner that is killed ------------------------------------------------------------------------------------


class KillAt:
    """Counts the calls whose effect other processes see, and kills the process before one of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0

    def __call__(self, half: Callable[[], object] | None = None) -> None:
        self.calls += 1
        if self.calls == self.at:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self()
            return original(*args, **kwargs)

        setattr(owner, name, watched)

    def watch_scatter(self) -> None:
        """Kill the process when half of the rows are written, or before the call."""
        original = gather.scatter

        def watched(held: Any, positions: Any, rows: Any) -> None:
            self()
            half = len(rows) // 2
            self(partial(original, held, positions[:half], rows[:half]))
            original(held, positions, rows)

        setattr(gather, "scatter", watched)  # noqa: B010 - a kernel is no attribute that mypy lets be replaced


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def own(folder: str, first: int, kill_at: int, versions: int) -> None:
    kill = KillAt(kill_at)
    for name in ("allocate", "allocate_together", "reserve", "release", "put_view", "drop_views", "_supersede"):
        kill.watch(SharedMemory, name)
    for name in ("announce", "begin_merge", "end"):
        kill.watch(Board, name)
    for name in ("insert_many", "remove_many"):
        kill.watch(KeyIndex, name)
    kill.watch_scatter()
    memory = SharedMemory(folder)
    publisher = memory.publisher(min_view_s=0.0)
    publisher.publish(first, first, dict(first_tables(first, memory)), {"version": np.full(4, first)})
    say(first)
    for version in range(first + 1, first + versions):
        publish(publisher, memory, version, version - 1)
        say(version)
    publisher.merge()
    publisher.close()
    memory.close()
    say(f"calls {kill.calls}")


def read(folder: str, lookups: int, seed: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            tables = AttachedTables(folder)
            break
        except VersionNotFound:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    counts = Counts(tables, seed)
    say("attached")
    counts.look_often(lookups)
    say(json.dumps(counted(counts)))
