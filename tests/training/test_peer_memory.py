"""What ranks pass on to their peers, keep, and give back; each rank is a thread here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from cnr_store.errors import BadInput
from cnr_store.format.records import ChainEntry
from cnr_store.storage import Storage, object_digest, open_storage, read_verified
from cnr_store.training import PeerCopies
from cnr_store.training.peers import PeerMemory, peers_of
from tests.support.ranks import ThreadRank, thread_ranks


def entry(number: int) -> ChainEntry:
    return ChainEntry(
        seg=f"{number:020d}-{'0' * 32}", sha256="0" * 64, kind="delta", l0=number, l1=number + 1, size_bytes=1, rows=1
    )  # fmt: skip


def key(rank: int, number: int) -> str:
    return f"data/{entry(number).seg}/r{rank:05d}-00000000.add-0.codes/c.0.0"


def data(rank: int, number: int) -> bytes:
    return bytes([rank, number]) * 50


@dataclass
class Place:
    """One rank: its line, its storage, which has nothing of the others, and what it keeps."""

    ranks: ThreadRank
    storage: Storage
    peers: PeerMemory

    def save(self, number: int, chain: list[int], *, wins: bool = True) -> None:
        self.storage.put(key(self.ranks.rank, number), data(self.ranks.rank, number))
        self.peers.saved([entry(one) for one in chain] if wins else None)

    def keeps(self) -> set[tuple[int, int]]:
        """Whose objects it keeps, and of which save."""
        return {
            (owner, found[1])
            for owner, objects in self.peers.kept.items()
            for found in (one.tobytes() for one in objects.values())
        }


def on_places(world: int, options: PeerCopies, run: Callable[[Place], object]) -> list[object]:
    lines = thread_ranks(world)

    def one(rank: int) -> object:
        storage = open_storage(f"memory://peers-{id(lines)}-{rank}")
        peers = peers_of(options, lines[rank], lines[rank], storage)
        assert peers is not None
        return run(Place(lines[rank], storage, peers))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def test_committed_objects_of_the_chain_are_kept_and_others_are_not() -> None:
    def run(place: Place) -> list[set[tuple[int, int]]]:
        found = []
        for number, chain, wins in (
            (1, [1], True),
            (2, [1, 2], True),
            (3, [], False),
            (4, [2, 4], True),
            (5, [5], True),
        ):
            place.save(number, chain, wins=wins)
            found.append(place.keeps())
        return found

    for rank, found in enumerate(on_places(4, PeerCopies(memory_bytes=1000), run)):
        other = rank ^ 1
        assert found == [
            {(other, 1)}, {(other, 1), (other, 2)}, {(other, 1), (other, 2)}, {(other, 2), (other, 4)}, {(other, 5)},
        ]  # fmt: skip


def test_objects_of_no_committed_chain_are_not_passed_on() -> None:
    def run(place: Place) -> set[tuple[int, int]]:
        place.storage.put(key(place.ranks.rank, 7), data(place.ranks.rank, 7))  # what another save left behind
        place.save(1, [1])
        return place.keeps()

    assert on_places(2, PeerCopies(memory_bytes=1000), run) == [{(1, 1)}, {(0, 1)}]


@pytest.mark.parametrize(("memory_bytes", "copies"), [(250, 1), (350, 2), (99, 1)])
def test_no_rank_keeps_more_than_its_memory(memory_bytes: int, copies: int) -> None:
    def run(place: Place) -> list[int]:
        found = []
        for number in range(1, 5):
            place.save(number, [*range(1, number + 1)])
            found.append(place.peers.nbytes)
        return found

    for found in on_places(4, PeerCopies(memory_bytes=memory_bytes, copies=copies), run):
        assert isinstance(found, list)
        assert max(found) == memory_bytes // 100 * 100


def test_lost_ranks_read_what_was_kept_for_them_until_it_is_taken_back() -> None:
    """Of the four ranks 1 and 2 begin anew; objects that are no more of the chain are not given."""
    kept = on_places(
        4, PeerCopies(memory_bytes=1000), lambda place: (place.save(1, [1]), place.save(2, [1, 2]), place)[-1]
    )

    def run(place: Place) -> bool:
        rank = place.ranks.rank
        before = kept[rank]
        assert isinstance(before, Place)
        place.peers.lend(place.ranks, [1, 2], None if rank in (1, 2) else before.peers.kept, [entry(2), entry(3)])
        wanted = {"size_bytes": 100, "digest": object_digest(data(rank, 2))}
        if rank in (1, 2):
            assert read_verified(place.storage, key(rank, 2), **wanted) == data(rank, 2)  # type: ignore[arg-type]
            assert place.storage.copies is not None
            assert place.storage.copies.read(key(rank, 1), 0, 100) is None
        assert place.peers.take_back() == (100 if rank in (1, 2) else 0)
        assert place.storage.copies is not None
        assert place.storage.copies.read(key(rank, 2), 0, 100) is None
        return place.keeps() == (set() if rank in (1, 2) else {(rank ^ 1, 2)})

    assert on_places(4, PeerCopies(memory_bytes=1000), run) == [True] * 4


def test_options_of_copies_are_checked() -> None:
    for options in ({"memory_bytes": 0}, {"memory_bytes": 10, "copies": 0}):
        with pytest.raises(BadInput):
            PeerCopies(**options)
    with pytest.raises(BadInput, match="needs 3 ranks"):
        on_places(2, PeerCopies(memory_bytes=1, copies=2), lambda _: None)
