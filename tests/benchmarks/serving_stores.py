"""Stores that the serving benchmarks read, and the processes that write them.

Deltas are 1 % of a table of 5,000,000 x 64 rows; those of the torn reads write their version into every row that is
looked up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from drifting import DriftingTable, saves
from partners import Told

from cnr_store import Store, TableOptions
from cnr_store.types import AffineBits

DELTA_SHARE = 0.01
BITS: AffineBits = 8

STEP_TABLES = ("one", "other")
STEP_ROWS, STEP_DIM = 20_000, 16
STEP_CHANGED = STEP_ROWS // 4
"""Rows that each delta rewrites, and that are looked up: a quarter, so that they are an overlay."""
WHOLE_EVERY = 16
"""Every so many-th delta rewrites all rows, so that the table is replaced instead."""


def write_deltas(url: str, rows: int, deltas: int, *, storage_options: Mapping[str, Any] | None = None) -> list[int]:
    """Write a baseline and deltas of 1 %; returns the versions, the baseline's first."""
    return [version for version, _ in _saves(url, rows, deltas, storage_options)]


def publish(
    told: Told, url: str, rows: int, deltas: int, least_pause_s: float, most_pause_s: float,
    storage_options: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a baseline; after an order, deltas at random times, and tell when each was acknowledged (monotonic)."""
    chance = random.Random(1)
    for version, at_s in _saves(url, rows, deltas, storage_options):
        told.tell(version=version, at_s=at_s)
        if version <= 2:
            told.order()
        time.sleep(chance.uniform(least_pause_s, most_pause_s))


def _saves(url: str, rows: int, deltas: int, storage_options: Mapping[str, Any] | None) -> Iterator[tuple[int, float]]:
    table = DriftingTable(rows, share=DELTA_SHARE)
    with Store.create(url, storage_options=storage_options) as store, store.writer() as writer:
        for version in saves(writer, table, TableOptions(bits=BITS), deltas):
            yield version, time.monotonic()


def write_steps(told: Told, url: str) -> None:
    """Write deltas as fast as they can be written, each row its step, until an order comes; tell how many."""
    with Store.create(url, fsync=False) as store, store.writer() as writer:
        with writer.begin(0, "baseline") as txn:
            for table in STEP_TABLES:
                txn.write_table(table, _steps(STEP_ROWS, 0), options=TableOptions(scale=1.0))
        told.tell(version=writer.head.record.v)
        step = 0
        while not told.has_order:
            step += 1
            changed = STEP_ROWS if step % WHOLE_EVERY == 0 else STEP_CHANGED
            with writer.begin(step) as txn:
                for table in STEP_TABLES:
                    txn.write_rows(table, np.arange(changed), _steps(changed, step))
        told.tell(step=step)


def _steps(rows: int, step: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.full((rows, STEP_DIM), step, np.float32)
