"""Stores that the serving benchmarks read, and the processes that write them.

Deltas are 1 % of a table of 5,000,000 x 64 rows; those of the torn reads write their version into every row that is
looked up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from drifting import DriftingTable, saves
from partners import Told

from cnr_store import Store, TableOptions
from cnr_store.integrations.redis import RedisNews
from cnr_store.types import AffineBits

DELTA_SHARE = 0.01
BITS: AffineBits = 8

NEWS = "serving"
"""The name by which versions are announced."""

STEP_TABLES = ("one", "other")
STEP_ROWS, STEP_DIM = 20_000, 16
STEP_CHANGED = STEP_ROWS // 4
"""Rows that each delta rewrites, and that are looked up: a quarter, so that they are an overlay."""
WHOLE_EVERY = 16
"""Every so many-th delta rewrites all rows, so that the table is replaced instead."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything.

    Attributes
    ----------
    fan_rows, fan_processes, fan_each
        The table that every loader behind the relay serves whole; processes, and loaders in each.
    """

    rows: int
    published: int
    least_pause_s: float
    most_pause_s: float
    rounds: int
    round_deltas: int
    applied: int
    torn_lookups: int
    fan_rows: int
    fan_processes: int
    fan_each: int


FULL = Size(5_000_000, 40, 0.4, 1.4, 6, 8, 12, 1_000_000, 100_000, 20, 5)
QUICK = Size(200_000, 6, 0.2, 0.8, 2, 4, 4, 60_000, 20_000, 2, 2)


def write_deltas(url: str, rows: int, deltas: int, *, storage_options: Mapping[str, Any] | None = None) -> list[int]:
    """Write a baseline and deltas of 1 %; returns the versions, the baseline's first."""
    return [version for version, _ in _saves(url, rows, deltas, storage_options)]


def publish(
    told: Told, url: str, rows: int, deltas: int, least_pause_s: float, most_pause_s: float,
    storage_options: Mapping[str, Any] | None = None, redis_url: str | None = None,
) -> None:  # fmt: skip
    """Write a baseline; after an order, deltas at random times, and tell when each was acknowledged (monotonic).

    With ``redis_url`` each is announced there too, by the name `NEWS`.
    """
    chance = random.Random(1)
    for version, at_s in _saves(url, rows, deltas, storage_options, redis_url):
        told.tell(version=version, at_s=at_s)
        if version <= 2:
            told.order()
        time.sleep(chance.uniform(least_pause_s, most_pause_s))


def _saves(
    url: str, rows: int, deltas: int, storage_options: Mapping[str, Any] | None, redis_url: str | None = None
) -> Iterator[tuple[int, float]]:
    table = DriftingTable(rows, share=DELTA_SHARE)
    with Store.create(url, storage_options=storage_options) as store, store.writer() as writer:
        if redis_url is not None:
            store.announce_to(RedisNews.connect(redis_url, NEWS).announce)
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
