"""Ranks as threads of one process: real agreement without processes, for sweeps over many runs.

Each thread gets its own `ThreadRank`. A rank that dies is played by `ThreadRank.leave`, or by a thread that ends
without answering: the others get `RankLost`, as with a broken connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.errors import RankLost
from cnr_store.runtime.ranks import Parcels


@dataclass(slots=True)
class _Line:
    world: int
    timeout_s: float
    lock: threading.Condition = field(default_factory=threading.Condition)
    messages: dict[int, dict[int, bytes]] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    is_broken: bool = False
    has_left: bool = False
    others: list[_Line] = field(default_factory=list)


class ThreadRank:
    """One rank of `thread_ranks`."""

    def __init__(self, rank: int, line: _Line) -> None:
        self.rank = rank
        self._line = line
        self._round = 0
        self._lines = 0

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self._line.world

    def exchange(self, message: bytes) -> list[bytes]:
        """See `cnr_store.runtime.ranks.Ranks.exchange`."""
        line, number = self._line, self._round
        self._round += 1
        with line.lock:
            if line.is_broken:
                raise RankLost("other ranks have given this line up; restart the training from the last checkpoint")
            given = line.messages.setdefault(number, {})
            given[self.rank] = message
            line.lock.notify_all()
            arrived = line.lock.wait_for(lambda: len(given) == line.world or line.is_broken, line.timeout_s)
            if len(given) < line.world:
                line.is_broken = True
                line.lock.notify_all()
                missing = sorted(set(range(line.world)) - given.keys())
                why = "left" if arrived else f"did not answer within {line.timeout_s} s"
                raise RankLost(f"ranks {missing} {why}; restart the training from the last checkpoint", found=missing)
            line.read[number] = line.read.get(number, 0) + 1
            if line.read[number] == line.world:
                del line.messages[number], line.read[number]
            return [given[rank] for rank in range(line.world)]

    def broadcast(self, data: npt.NDArray[np.uint8], source: int) -> None:
        """See `cnr_store.runtime.ranks.Ranks.broadcast`."""
        data[:] = np.frombuffer(self.exchange(data.tobytes())[source], np.uint8)

    def transfer(self, sent: Parcels, received: Parcels) -> None:
        """See `cnr_store.runtime.ranks.Ranks.transfer`."""
        given = self.exchange(msgspec.msgpack.encode([(rank, data.tobytes()) for rank, data in sent]))
        coming = {
            source: iter([data for rank, data in msgspec.msgpack.decode(message) if rank == self.rank])
            for source, message in enumerate(given)
        }
        for source, out in received:
            out[:] = np.frombuffer(next(coming[source]), np.uint8)
        assert [rank for rank, rest in coming.items() for _ in rest] == []

    def another(self) -> ThreadRank:
        """See `cnr_store.runtime.ranks.Ranks.another`."""
        with self._line.lock:
            if self._lines == len(self._line.others):
                line = _Line(self._line.world, self._line.timeout_s, is_broken=self._line.has_left)
                self._line.others.append(line)
            line = self._line.others[self._lines]
            self._lines += 1
        return ThreadRank(self.rank, line)

    def leave(self) -> None:
        """Die: the others stop waiting for this rank, on every line."""
        with self._line.lock:
            self._line.has_left = True
            lines = [self._line, *self._line.others]
        for line in lines:
            with line.lock:
                line.is_broken = True
                line.lock.notify_all()


def thread_ranks(world: int, *, timeout_s: float = 60.0) -> list[ThreadRank]:
    """Return ``world`` ranks that hear each other; give each to a thread of its own."""
    line = _Line(world, timeout_s)
    return [ThreadRank(rank, line) for rank in range(world)]


def on_ranks(world: int, work: Callable[[ThreadRank], Any], *, timeout_s: float = 60.0) -> list[Any]:
    """Return what ``work`` returned on each rank, or raise what the first one raised. One that raises is dead."""

    def body(rank: ThreadRank) -> Any:
        try:
            return work(rank)
        except BaseException:
            rank.leave()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(body, thread_ranks(world, timeout_s=timeout_s)))


def outcomes(world: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """Return what ``work`` returned or raised on each rank."""

    def body(rank: ThreadRank) -> Any:
        try:
            return work(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    return on_ranks(world, body)
