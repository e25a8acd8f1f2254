"""Copies in peers' memory (Gemini, SOSP 2023): a replaced rank reads its rows from a neighbour instead of the store.

Each rank keeps for some others the objects with rows that they put, as they are stored: encoded, and no older than the
chain of the newest version. They are passed on when their version is committed, so a copy never shows anything else.
Manifests and records are read from the store, and their digests decide whether a copy is used.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.errors import RankLost
from cnr_store.format.layout import segment_of_rows
from cnr_store.format.records import ChainEntry
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.storage import Storage
from cnr_store.storage.copies import ObjectCopies, Objects
from cnr_store.training.options import PeerCopies
from cnr_store.training.peer_placement import choose_givers, fit, place_copies

logger = logging.getLogger(__name__)

_Bytes = npt.NDArray[np.uint8]


class PeerMemory:
    """What this rank keeps for others, and what it passes on to them. Its calls block, and all ranks make them.

    Attributes
    ----------
    kept
        Objects with rows, by the rank that put them.
    """

    def __init__(self, options: PeerCopies, ranks: Ranks, line: Ranks, storage: Storage) -> None:
        """``line``: for the thread that saves; ``ranks``: for the one that trains."""
        hosts = together(ranks, socket.gethostname)
        holders = place_copies(hosts, options.copies)
        self._holders = holders[ranks.rank]
        self._wards = [rank for rank, others in enumerate(holders) if ranks.rank in others]
        self._line, self._limit_bytes = line, options.memory_bytes
        self._copies = storage.copies = ObjectCopies(lambda key: segment_of_rows(key) is not None, options.memory_bytes)
        self._storage = storage
        self.kept: dict[int, dict[str, _Bytes]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps for other ranks."""
        return sum(data.nbytes for objects in list(self.kept.values()) for data in list(objects.values()))

    def close(self) -> None:
        """Record no more of what is put."""
        self._storage.copies = None

    def saved(self, chain: Sequence[ChainEntry] | None) -> None:
        """Pass on what this rank put of a chain that was just committed; None if nothing was, and then no rank does."""
        written = self._copies.take_written()
        if chain is None:
            return
        segments = {entry.seg for entry in chain}
        self._keep(self.kept, segments)
        mine = {key: data for key, data in written.items() if segment_of_rows(key) in segments}
        try:
            found = trade(self._line, dict.fromkeys(self._holders, mine), self._wards, self._limit_bytes - self.nbytes)
        except RankLost as error:  # the training hears of it by itself, and the version is committed
            logger.warning("copies of the last save did not reach all peers: %s", error)
            return
        for owner, objects in found.items():
            self.kept.setdefault(owner, {}).update(objects)

    def lend(
        self, ranks: Ranks, lost: Sequence[int], kept: Mapping[int, Objects] | None, chain: Sequence[ChainEntry]
    ) -> None:
        """Give lost ranks what was kept for them of a chain, for the reads of their restore, until `take_back`.

        ``kept``: what this rank has kept, if it survived.
        """
        if kept is not None:
            self._keep(kept, {entry.seg for entry in chain})
        sizes = {str(owner): sum(data.nbytes for data in objects.values()) for owner, objects in self.kept.items()}
        told = together(ranks, lambda: sizes)
        givers = choose_givers(lost, [{int(owner): size for owner, size in one.items()} for one in told])
        sent = {owner: self.kept[owner] for owner, giver in givers.items() if giver == ranks.rank}
        sources = [givers[ranks.rank]] if ranks.rank in givers else []
        for objects in trade(ranks, sent, sources, self._limit_bytes).values():
            self._copies.give(objects)

    def take_back(self) -> int:
        """Read from the store again; returns how many bytes were read from what was lent."""
        read_bytes = self._copies.read_bytes
        self._copies.give({})
        return read_bytes

    def _keep(self, kept: Mapping[int, Objects], segments: Collection[str]) -> None:
        """Keep of these objects only those of such segments, and as many as there is room for."""
        sizes = {
            (owner, key): data.nbytes
            for owner, objects in kept.items()
            for key, data in objects.items()
            if segment_of_rows(key) in segments
        }
        taken = fit(sizes, self._limit_bytes)
        self.kept = {owner: {key: kept[owner][key] for one, key in taken if one == owner} for owner in kept}


def peers_of(options: PeerCopies | None, ranks: Ranks, control: Ranks, storage: Storage) -> PeerMemory | None:
    """Return what copies in peers' memory need, None without the option. Blocks; all ranks call it.

    Raises
    ------
    BadInput
        There are not enough hosts or ranks.
    """
    return None if options is None else PeerMemory(options, control, ranks.another(), storage)


def trade(ranks: Ranks, sent: Mapping[int, Objects], sources: Sequence[int], room_bytes: int) -> dict[int, Objects]:
    """Send objects to ranks; return what this rank took of those that ``sources`` offer it, by rank. Blocks.

    All ranks call it, each with the ranks that send to it. A rank takes what fits into ``room_bytes``, in the order in
    which it is offered, and nothing if it gets no memory.
    """
    offered = _swap(ranks, {to: [(key, len(data)) for key, data in one.items()] for to, one in sent.items()}, sources)
    sizes = {(source, key): size for source in sources for key, size in offered[source]}
    try:
        taken = {one: np.empty(sizes[one], np.uint8) for one in fit(sizes, room_bytes)}
    except MemoryError:  # the others wait for an answer
        logger.warning("no memory for copies of other ranks; they are read from the store")
        taken = {}
    answers = {source: [key for one, key in taken if one == source] for source in sources}
    wanted = _swap(ranks, answers, list(sent))
    ranks.transfer(
        [(to, sent[to][key]) for to, keys in wanted.items() for key in keys],
        [(source, data) for (source, _), data in taken.items()],
    )
    return {source: {key: data for (one, key), data in taken.items() if one == source} for source in sources}


def _swap(ranks: Ranks, documents: Mapping[int, Any], sources: Sequence[int]) -> dict[int, Any]:
    """Send a document to each of some ranks, and return those of ``sources``."""
    sent = {to: np.frombuffer(bytearray(msgspec.json.encode(one)), np.uint8) for to, one in documents.items()}
    lengths = {source: np.zeros(8, np.uint8) for source in sources}
    ranks.transfer([(to, np.array([len(data)]).view(np.uint8)) for to, data in sent.items()], [*lengths.items()])
    found = {source: np.zeros(int(length.view(np.int64)[0]), np.uint8) for source, length in lengths.items()}
    ranks.transfer([*sent.items()], [*found.items()])
    return {source: msgspec.json.decode(data.tobytes()) for source, data in found.items()}
