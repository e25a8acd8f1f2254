"""Copies in peers' memory: a replaced rank reads its rows from a neighbour that lives, else from the store."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import Store
from tests.training.four_ranks import Calm, FourRanks, outputs
from tests.training.ranks_program import logged_state, noted
from tests.training.test_partial_recovery import SHARDED, STEPS, check_codes, check_recovered, reads_of_tables
from tests.training.test_ranks_killed import check_what_is_stored, same

PLENTY = {"memory_bytes": 1 << 20}
ALL = {0, 1, 2, 3}

pytestmark = pytest.mark.slow


def recovered(four_ranks: FourRanks, folder: Path, lost: set[int], **job: Any) -> None:
    """Run a training whose ranks are lost after the save of step 4, and check that rows and log are whole."""
    codes = four_ranks.run(
        folder, "partial", STEPS, recovers=True, dies=sorted(lost), dies_before=4, every_steps=2, **job
    )
    assert codes == [0] * 4, outputs(folder)
    if len(lost) < 4:
        assert check_recovered(folder, lost) == (4, 4)
    assert check_what_is_stored(folder, "partial") == STEPS


def from_peer(folder: Path, rank: int) -> int:
    return int(noted(folder, "partial", rank, "from a peer")[0])


def kept(folder: Path) -> list[list[int]]:
    """What each rank kept for others after each step."""
    return [noted(folder, "partial", rank, "kept") for rank in range(4)]


@pytest.mark.parametrize(("lost", "alone"), [({1, 2}, set()), ({2, 3}, {2, 3}), ({0, 1, 2}, {0, 1})], ids=str)
def test_lost_ranks_read_from_a_neighbour_that_lives_else_from_the_store(
    four_ranks: FourRanks, tmp_path: Path, lost: set[int], alone: set[int]
) -> None:
    recovered(four_ranks, tmp_path, lost, peers=PLENTY)

    for rank in range(4):
        assert (from_peer(tmp_path, rank) > 0) == (rank in lost - alone)
        assert bool(reads_of_tables(tmp_path, rank)) == (rank in alone)
        assert {*noted(tmp_path, "partial", rank, "kinds")[0]} == {"delta"}


def test_when_all_ranks_are_lost_all_read_from_the_store(four_ranks: FourRanks, tmp_path: Path) -> None:
    recovered(four_ranks, tmp_path, {0, 1, 2, 3}, peers=PLENTY)

    for rank in range(4):
        assert noted(tmp_path, "partial", rank, "recovered") == [[4, 3, [], 0]]
        assert from_peer(tmp_path, rank) == 0
        assert reads_of_tables(tmp_path, rank)
        for name in SHARDED:
            before, after = (logged_state(tmp_path, "partial", rank, step)[name] for step in (4, -2))
            same(after, before, f"rank {rank}, {name}")


def test_two_copies_outlive_a_loss_of_two_of_three_that_have_them(four_ranks: FourRanks, tmp_path: Path) -> None:
    recovered(four_ranks, tmp_path, {2, 3}, peers=PLENTY | {"copies": 2})

    for rank in (2, 3):
        assert from_peer(tmp_path, rank) > 0
        assert not reads_of_tables(tmp_path, rank)


@pytest.mark.parametrize("mirror", ["memory", "none"])
def test_rows_from_a_peer_are_bit_for_bit_those_of_the_store(
    four_ranks: FourRanks, tmp_path: Path, mirror: str
) -> None:
    folders = {}
    for name, peers in (("peer", {"peers": PLENTY}), ("store", {})):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        codes = four_ranks.run(
            folders[name], "partial", STEPS, recovers=True, dies=[2], dies_before=5, every_steps=2, is_coded=True,
            mirror=mirror, **peers,
        )  # fmt: skip
        assert codes == [0] * 4, outputs(folders[name])

    assert (from_peer(folders["peer"], 2) > 0, from_peer(folders["store"], 2)) == (True, 0)
    for rank in range(4):
        assert noted(folders["peer"], "partial", rank, "kinds") == noted(folders["store"], "partial", rank, "kinds")
        for step in (-2, STEPS):
            found, expected = (logged_state(folders[name], "partial", rank, step) for name in ("peer", "store"))
            for name, array in expected.items():
                same(found[name], array, f"rank {rank}, step {step}, {name}")
    states = []
    for folder in folders.values():
        with Store.open(str(folder / "store")) as store:
            table = store.snapshot().table("user.weight")
            states.append([table.read(), *(table.read(slot=slot) for slot in sorted(table.schema.slots))])
    for found, expected in zip(*states, strict=True):
        same(found, expected, "stored")
    check_codes(folders["peer"])


def test_copies_that_were_damaged_are_refused_and_the_store_is_read(four_ranks: FourRanks, tmp_path: Path) -> None:
    recovered(four_ranks, tmp_path, {2}, peers=PLENTY, spoils=True)

    assert from_peer(tmp_path, 2) == 0
    assert reads_of_tables(tmp_path, 2)
    assert "the stored object is read instead" in outputs(tmp_path)


def test_a_rank_keeps_no_more_than_its_memory_and_the_store_has_the_rest(four_ranks: FourRanks, tmp_path: Path) -> None:
    recovered(four_ranks, tmp_path, {2}, peers={"memory_bytes": 300})

    assert 0 < max(max(one) for one in kept(tmp_path)) <= 300
    assert from_peer(tmp_path, 2) > 0
    assert reads_of_tables(tmp_path, 2)


def test_only_objects_of_the_newest_chain_are_kept(four_ranks: FourRanks, tmp_path: Path) -> None:
    recovered(four_ranks, tmp_path, {2}, peers=PLENTY, policy="baseline")

    assert from_peer(tmp_path, 2) > 0
    assert not reads_of_tables(tmp_path, 2)
    for _, first, second, third in [one for one in kept(tmp_path) if len(one) == 4]:
        assert 0 < third < 2 * first == 2 * second


def check_nothing_acknowledged_was_lost(folder: Path, lost: set[int]) -> int:
    """The ranks go on from a save that is no older than any that a rank had heard of; returns its step."""
    if len(lost) < 4:
        _, saved = check_recovered(folder, lost)
    else:
        (saved,) = {noted(folder, "partial", rank, "recovered")[0][0] for rank in range(4)}
        for rank in range(4):
            before, after = (logged_state(folder, "partial", rank, step) for step in (saved, -2))
            for name, array in before.items():
                same(after[name], array, f"rank {rank}, {name}")
    with Store.open(str(folder / "store")) as store:
        for rank in range(4):
            # What it heard of before the loss, and while it found out about it.
            for reports in (*noted(folder, "partial", rank, "saved"), *noted(folder, "partial", rank, "known")):
                for version, step in reports:
                    assert store.snapshot(version).step == step <= saved
    return saved


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_acknowledged_is_lost_in_fifty_kills(four_ranks: FourRanks, calm: Calm, tmp_path: Path) -> None:
    """One of four ranks, two that keep each other's copies, two that do not, three, all; at calls drawn with a seed."""
    random = np.random.default_rng(0)
    losses = [
        *[{0}, {1}, {2}, {3}] * 6,
        *[{0, 1}, {2, 3}, {1, 2}, {0, 3}] * 3,
        *[{0, 1, 2}, {1, 2, 3}] * 2,
        *[ALL] * 10,
    ]
    counts: Counter[str] = Counter()
    for number, lost in enumerate(losses):
        first, *along = random.permutation(sorted(lost)).tolist()
        begins = calm.index(0, "create commits/", 2) + 1 if first == 0 else calm.index(first, ".receipt.json.zst", 2)
        index, when = int(random.integers(begins, calm.of_saves(first))), str(random.choice(["before", "after"]))
        what = f"number {number}: {first} {when} call {index} ({calm.calls[first][index]}), along with {along}"
        folder = tmp_path / str(number)
        folder.mkdir()

        codes = four_ranks.run(
            folder, "partial", STEPS, recovers=True, kill=[first, index, when], along=along, peers=PLENTY
        )

        assert codes == [0] * 4, what + outputs(folder)
        saved = check_nothing_acknowledged_was_lost(folder, lost)
        assert check_what_is_stored(folder, "partial") == STEPS, what
        counts[f"{len(lost)} lost"] += 1
        counts[f"from step {saved}"] += 1
        counts["ranks that read from a peer"] += sum(from_peer(folder, rank) > 0 for rank in lost)
    assert len(losses) == 50
    assert counts["ranks that read from a peer"] > 24
    print(counts)  # noqa: T201 - the soak's result


@pytest.mark.parametrize(("rank", "part", "occurrence", "when", "peers", "saved"), [
    (2, ".receipt.json.zst", 2, "after", PLENTY, 1), (0, "create commits/", 3, "before", None, 1),
    (0, "create commits/", 3, "after", PLENTY, 2),
])  # fmt: skip
def test_survivors_of_a_loss_in_a_save_know_whether_it_was_committed(
    four_ranks: FourRanks, calm: Calm, tmp_path: Path, rank: int, part: str, occurrence: int, when: str,
    peers: dict[str, int] | None, saved: int,
) -> None:  # fmt: skip
    """The rank that was lost gets the committed rows; of a version that had not been passed on, from the store."""
    job = {} if peers is None else {"peers": peers}
    index = calm.index(rank, part, occurrence)

    codes = four_ranks.run(tmp_path, "partial", STEPS, recovers=True, kill=[rank, index, when], **job)

    assert codes == [0] * 4, outputs(tmp_path)
    assert check_recovered(tmp_path, {rank}) == (2, saved)
    assert (from_peer(tmp_path, rank) > 0) == (peers is not None)
    assert bool(reads_of_tables(tmp_path, rank)) == (peers is None or saved == 2)
    assert check_what_is_stored(tmp_path, "partial") == STEPS
