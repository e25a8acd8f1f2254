"""One of four ranks killed, damaged or asleep in a save: what was acknowledged is there, and the training goes on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import Store, TableOptions, verify_store
from cnr_store.runtime.ranks import OneRank
from cnr_store.training import CheckpointManager, StoreOptions, TrackingOptions
from tests.training.four_ranks import STEPS, Calm, FourRanks, outputs
from tests.training.ranks_program import RankTraining, When, logged_state, noted

pytestmark = pytest.mark.slow

KILLS: dict[str, tuple[int, str, int, When, int]] = {
    "chunk": (2, ".add-0.codes/c.", 1, "before", 1),
    "receipt": (2, ".receipt.json.zst", 2, "after", 1),
    "commit": (0, "create commits/", 4, "before", 2),
    "committed": (0, "create commits/", 3, "after", 2),
}
"""Rank, storage call, which of those calls, killed before or after its effect, and the step that is there then.

The first commit is the fence of the first step.
"""


def same(found: Any, expected: Any, what: str) -> None:
    assert np.array_equal(np.asarray(found).view(np.uint8), np.asarray(expected).view(np.uint8)), what


def check_what_is_stored(folder: Path, run: str) -> int:
    """The last version is what the training had at its step, and holds what was acknowledged; returns the step."""
    acknowledged = [tuple(one) for rank in range(4) for one in noted(folder, run, rank, "acknowledged")]
    with Store.open(str(folder / "store")) as store:
        assert verify_store(store, deep=True).problems == ()
        last = store.snapshot()
        if last.is_empty:
            assert not acknowledged
            return 0
        for version, step in acknowledged:
            assert store.snapshot(version).step == step
        assert last.step >= max((step for _, step in acknowledged), default=0)
    training = RankTraining(0, 1)
    manager = CheckpointManager(
        str(folder / "store"),
        model=training.model,
        optimizer=training.optimizers,
        options=TableOptions.exact(),
        tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
        store_options=StoreOptions(ranks=OneRank()),
    )
    restored = manager.restore(redistribute=lambda states: states[:1])
    manager.close()
    assert restored is not None
    assert (restored.version, restored.step) == (last.version, last.step)
    assert restored.reader_state == {"next": last.step}
    ranks = [logged_state(folder, run, rank, last.step) for rank in range(4)]
    found = training.state()
    for name in ("user.weight", "user.momentum1"):
        same(found[name], np.concatenate([state[name] for state in ranks]), name)
    for name in ranks[0].keys() - {"user.weight", "user.momentum1"}:
        same(found[name], ranks[0][name], name)
    return last.step


def check_resumed(four_ranks: FourRanks, folder: Path, calm: Calm, step: int) -> None:
    """Four new processes go on and end where the run ended that nobody disturbed."""
    codes = four_ranks.run(folder, "resumed", STEPS + 1)
    assert codes == [0] * 4, outputs(folder)
    for rank in range(4):
        assert noted(folder, "resumed", rank, "restored") == [step]
        expected = logged_state(calm.folder, "calm", rank, STEPS + 1)
        found = logged_state(folder, "resumed", rank, STEPS + 1)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            same(found[name], array, f"rank {rank}, {name}")


def check_survivors(folder: Path, run: str, ranks: set[int], *, is_saved: bool = False) -> None:
    """Each was told what happened and what to do, and closed its manager.

    ``is_saved``: the save was over for them, so that they may have heard of it from their training first.
    """
    for rank in ranks:
        told = str([*noted(folder, run, rank, "error"), *noted(folder, run, rank, "close")])
        if not (is_saved and "RuntimeError" in told):
            assert "RankLost" in told, f"rank {rank}: {told}"
            assert "restart the training from the last checkpoint" in told
        assert noted(folder, run, rank, "calls")  # it came to its end


def killed(four_ranks: FourRanks, folder: Path, calm: Calm, rank: int, index: int, when: When) -> tuple[str, int]:
    """Kill a rank at a storage call and check everything; returns the call and the step that was restored."""
    codes = four_ranks.run(folder, "killed", kill=[rank, index, when])
    assert codes == [-9 if one == rank else 1 for one in range(4)], outputs(folder)
    is_saved = rank > 0 and calm.calls[rank][index].startswith("read")  # the record that rank 0 says it has written
    check_survivors(folder, "killed", set(range(4)) - {rank}, is_saved=is_saved)
    step = check_what_is_stored(folder, "killed")
    check_resumed(four_ranks, folder, calm, step)
    return calm.calls[rank][index], step


@pytest.mark.parametrize("name", KILLS)
def test_a_rank_killed_in_a_save_leaves_the_last_version_whole(
    four_ranks: FourRanks, calm: Calm, tmp_path: Path, name: str
) -> None:
    rank, part, occurrence, when, expected = KILLS[name]

    _, step = killed(four_ranks, tmp_path, calm, rank, calm.index(rank, part, occurrence), when)

    assert step == expected


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_rank_killed_at_any_of_fifty_calls_leaves_the_last_version_whole(
    four_ranks: FourRanks, calm: Calm, tmp_path: Path
) -> None:
    places: list[tuple[int, int, When]] = []
    for rank, count in ((0, 30), (2, 20)):
        ways: list[tuple[int, int, When]] = [
            (rank, index, when) for index in range(calm.of_saves(rank)) for when in ("before", "after")
        ]
        places += [ways[int(place)] for place in np.linspace(0, len(ways) - 1, count)]
    assert len(set(places)) == 50
    failures, steps, calls = [], Counter[int](), Counter[str]()
    for number, (rank, index, when) in enumerate(places):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            call, step = killed(four_ranks, folder, calm, rank, index, when)
        except AssertionError as error:
            failures.append(f"rank {rank} {when} call {index} ({calm.calls[rank][index]}): {error}")
            continue
        steps[step] += 1
        verb, path = call.split(" ", 1)
        calls[f"rank {rank}: {verb} {path.rsplit('/', 1)[-1]}"] += 1
    counts = [
        f"{len(places)} kills, {len(failures)} failures; by restored step {dict(steps)}",
        *map(str, calls.items()),
    ]
    report = "\n".join([*counts, *failures])
    print(report)  # noqa: T201  shown with -rA
    assert not failures, report


@pytest.mark.parametrize("policy", ["consecutive", "baseline"])
def test_a_damaged_mirror_of_one_rank_is_refused_on_all_until_a_restore(
    four_ranks: FourRanks, calm: Calm, tmp_path: Path, policy: str
) -> None:
    codes = four_ranks.run(tmp_path, "damaged", damage=2, policy=policy)

    assert codes == [0] * 4, outputs(tmp_path)
    for rank in range(4):
        (refused,) = noted(tmp_path, "damaged", rank, "refused")
        assert refused[:2] == ["BackgroundSaveFailed", "DoesNotApply"]
        assert "table 'user.weight'" in refused[2]
        assert "rank 2" in refused[2] or (rank == 2 and policy == "baseline")
        assert "restore" in refused[2]
        ((before, after),) = noted(tmp_path, "damaged", rank, "versions")
        assert before == after
        assert [step for _, step in noted(tmp_path, "damaged", rank, "acknowledged")] == [1, 2, 3, 4]
    assert check_what_is_stored(tmp_path, "damaged") == STEPS
    check_resumed(four_ranks, tmp_path, calm, STEPS)


def test_a_rank_that_is_too_slow_ends_the_save_on_all_ranks(four_ranks: FourRanks, calm: Calm, tmp_path: Path) -> None:
    index = calm.index(3, ".receipt.json.zst", 2)

    codes = four_ranks.run(tmp_path, "slow", slow=[3, index, "before"], sleep_s=13, timeout_s=6)

    assert codes == [1] * 4, outputs(tmp_path)
    check_survivors(tmp_path, "slow", {0, 1, 2, 3})
    (woke,) = noted(tmp_path, "slow", 3, "woke")
    for rank in range(3):
        assert all(when < woke for when, *_ in noted(tmp_path, "slow", rank, "error"))
    assert check_what_is_stored(tmp_path, "slow") == 1
    check_resumed(four_ranks, tmp_path, calm, 1)


def test_ranks_not_next_to_a_lost_one_hear_of_it_at_once_on_every_line(four_ranks: FourRanks, tmp_path: Path) -> None:
    codes = four_ranks.run(tmp_path, "lines", lines=True)

    assert codes == [0, -9, 0, 0], outputs(tmp_path)
    for rank in (0, 2, 3):
        (error,) = noted(tmp_path, "lines", rank, "error")
        assert "restart the training" in error
