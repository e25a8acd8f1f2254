"""Two processes race for the same log positions: one winner each, and nothing acknowledged is lost or doubled."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store, TableOptions
from cnr_store.format.commit_record import DATA_KINDS
from tests.faults.life_program import noted
from tests.support.launcher import Server
from tests.support.servers import Place

COMMITS = 100
CI_ON_SERVERS = {"tags": 40, "saves": 24}
"""Commits take milliseconds of CPU there, saves and fences more; `make soak` makes them all."""
BACKENDS = [
    "local",
    pytest.param("s3", marks=pytest.mark.servers),
    pytest.param("azure", marks=pytest.mark.servers),
]
KINDS = ["tags", "saves"]

pytestmark = pytest.mark.slow


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "store"), {})
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


def race(lives: Server, place: Place, folder: Path, kind: str, commits: int) -> str:
    """Race, and compare the log with what each process was told; returns what there was to see.

    Until one of the two is done with its commits, both go for each position, so at least as many are lost.
    """
    with Store.create(place.url, storage_options=place.storage_options) as store, store.writer() as writer:
        with writer.begin(0) as txn:
            txn.write_table("t", np.zeros((4, 2), np.float32), options=TableOptions(scale=1.0))
        assert txn.version == 2
    racers = [
        {
            "kind": kind, "url": place.url, "options": place.storage_options, "name": name, "count": commits // 2,
            "notes": str(folder / f"{name}.jsonl"),
        }
        for name in ("a", "b")
    ]  # fmt: skip
    codes = lives.ask(job="race", racers=racers)["codes"]
    assert codes == [0, 0], "\n".join(path.read_text() for path in folder.glob("*.txt"))

    told = {version: what for name in ("a", "b") for version, what in noted(folder / f"{name}.jsonl")}
    assert len(told) == commits, "a position was given to both, or a commit was not acknowledged"
    with Store.open(place.url, storage_options=place.storage_options) as store:
        log = list(store.log())
        records = {record.v: record for record in log if record.v > 2}
        assert sorted(records) == list(range(3, 3 + len(records)))
        committed = {v: record for v, record in records.items() if record.kind != "fence"}
        assert committed.keys() == told.keys()
        for version, record in committed.items():
            if kind == "tags":
                assert record.name == told[version]
            else:
                assert record.kind in DATA_KINDS
                assert told[version].endswith(f" {record.step}")
        for version in sorted(committed)[:: max(1, commits // 40)] if kind == "saves" else []:
            snapshot = store.snapshot(version)
            assert f"{snapshot.scalars['by']} {snapshot.step}" == told[version]
            assert (snapshot.table("t").read() == snapshot.step).all()
        assert max(Counter(record.commit_uuid for record in log).values()) == 1
        assert store.tags() == {}
    lost = sum(noted(folder / f"{name}.jsonl.lost")[0] for name in ("a", "b"))
    assert lost >= commits // 2, "they did not race"
    owners = [told[version].replace("-", " ").split(" ")[0] for version in sorted(told)]
    changes = sum(owner != after for owner, after in itertools.pairwise(owners))
    return (
        f"{place.url.split(':')[0]}, {kind}: {commits} commits, {len(records)} records, {lost} positions lost to the "
        f"other, the winner changed {changes} times\n"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", BACKENDS, indirect=True)
def test_two_processes_race_and_each_position_has_one_winner(
    lives: Server, place: Place, tmp_path: Path, kind: str
) -> None:
    commits = CI_ON_SERVERS[kind] if place.storage_options else COMMITS

    sys.stdout.write(race(lives, place, tmp_path, kind, commits))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", BACKENDS, indirect=True)
def test_two_processes_race_two_hundred_commits_each(lives: Server, place: Place, tmp_path: Path, kind: str) -> None:
    sys.stdout.write(race(lives, place, tmp_path, kind, 4 * COMMITS))
