"""A rank of the tests that dies together with its storage, as a process does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cnr_store.runtime.ranks import Parcels
from tests.support.faulty import FaultyFileSystem, SimulatedCrash
from tests.support.ranks import ThreadRank


class Process:
    """One rank as a process: it stops communicating when its file system has died."""

    def __init__(self, fs: FaultyFileSystem, rank: ThreadRank) -> None:
        self.fs = fs
        self.rank, self.world = rank.rank, rank.world
        self._inner = rank
        self.exchanges = 0
        self.dies_at_exchange: int | None = None

    def exchange(self, message: bytes) -> list[bytes]:
        self.exchanges += 1
        if self.exchanges == self.dies_at_exchange:
            self.fs.is_crashed = True
        if self.fs.is_crashed:
            self._inner.leave()
            raise SimulatedCrash("this process is dead")
        return self._inner.exchange(message)

    def broadcast(self, data: npt.NDArray[np.uint8], source: int) -> None:
        self._inner.broadcast(data, source)

    def transfer(self, sent: Parcels, received: Parcels) -> None:
        self._inner.transfer(sent, received)

    def another(self) -> Process:
        return Process(self.fs, self._inner.another())
