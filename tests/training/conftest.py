"""The backend of the tests of saves; what starts ranks, which files share: that takes seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.launcher import Launcher
from tests.training.faulty_runs import Backend
from tests.training.four_ranks import STEPS, Calm, FourRanks, outputs
from tests.training.ranks_program import noted


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    made.gate.set()
    for manager in made.managers:
        manager.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[FourRanks]:
    with closing(FourRanks()) as started:
        yield started


@pytest.fixture(scope="session")
def calm(four_ranks: FourRanks, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    folder = tmp_path_factory.mktemp("calm")
    codes = four_ranks.run(folder, "calm", STEPS + 1)
    assert codes == [0] * 4, outputs(folder)
    calls = [noted(folder, "calm", rank, "calls")[0] for rank in range(4)]
    assert sum(call.startswith("create commits/") for call in calls[0]) == STEPS + 2
    assert not any(call.startswith("create") for rank in (1, 2, 3) for call in calls[rank])
    return Calm(folder, calls)


@pytest.fixture(scope="session")
def workers() -> Iterator[Launcher]:
    """Runs the ranks of the folders ``ranks`` and ``torchrec``."""
    modules = ["tests.support.warm_training", "tests.training.ranks.worker"]
    if importlib.util.find_spec("torchrec") is not None:
        modules += ["tests.training.torchrec.survivors", "tests.training.torchrec.worker"]
    with closing(Launcher(*modules)) as started:
        yield started
