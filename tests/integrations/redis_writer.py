"""A process that writes one batch to Redis and is killed at one of its commands: SIGKILL, not an exception.

``python redis_writer.py <url> <prefix> <version> <full: 0 or 1> <commands until it dies> <before or after>``
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import redis

from cnr_store.integrations.redis import RedisSink
from cnr_store.serving.sinks import SinkState, SinkTable

TABLES = {"user": SinkTable(4, 60), "item": SinkTable(2, None)}
CHUNK_ROWS = 20


class CountingRedis(redis.Redis):  # type: ignore[type-arg,unused-ignore]  # generic in the stubs of some versions only
    """A client that ends at the k-th command: before it is sent, or after its reply came."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.commands: list[tuple[Any, ...]] = []
        self.ends_at: int | None = None
        self.ends_after = False
        self.end: Callable[[], None] = kill_self

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command, unless this is where the process ends."""
        self.commands.append(args)
        ends = len(self.commands) == self.ends_at
        if ends and not self.ends_after:
            self.end()
        reply = super().execute_command(*args, **options)
        if ends:
            self.end()
        return reply


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def state(version: int) -> SinkState:
    return SinkState("store", "", version, 10 * version)


def user_rows(version: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which dense rows a version changes: some of those that the one before changed, and others."""
    return np.flatnonzero((np.arange(60) + version) % 3 != 0)


def item_rows(version: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which keys a version has: some leave and some come with each."""
    return np.array([key for key in range(-20, 20) if (key + version) % 4], np.int64)


def write(sink: RedisSink, version: int, *, full: bool) -> None:
    """Write the version, after any other; `expected` says what a reader then finds."""
    sink.begin(TABLES, full=full)
    ids = np.arange(60) if full else user_rows(version)
    sink.put("user", ids, np.full((len(ids), 4), version, np.float32))
    if not full:
        sink.put("user", np.setdiff1d(np.arange(60), ids), np.full((60 - len(ids), 4), version, np.float32))
    keys = item_rows(version)
    sink.put("item", keys, np.full((len(keys), 2), version, np.float32))
    if not full:
        sink.delete("item", np.setdiff1d(np.arange(-20, 20), keys))
    sink.commit(state(version))


def main(arguments: list[str]) -> None:
    """Write as the module says."""
    url, prefix, version, full, ends_at, when = arguments
    from cnr_store.integrations.redis import sink as module

    module.CHUNK_ROWS = CHUNK_ROWS
    client = CountingRedis.from_url(url)
    client.ends_at, client.ends_after = int(ends_at), when == "after"
    sink = RedisSink(client, prefix)
    sink.open()
    write(sink, int(version), full=full == "1")


if __name__ == "__main__":
    main(sys.argv[1:])
