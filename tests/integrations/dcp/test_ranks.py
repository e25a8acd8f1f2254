"""Saves and loads of DCP on 1, 2 and 4 ranks: real processes, started once, which run all scenarios."""

from __future__ import annotations

import json

import pytest

from tests.integrations.dcp import torch_contract  # noqa: F401 - registers its scenarios
from tests.integrations.dcp.scenarios import SCENARIOS
from tests.support.launcher import Launcher, Program

PROCESSES = 4
PATIENCE_S = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 60)]  # the first test waits for all scenarios


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> list[dict[str, str]]:
    """Results of all processes: scenario to what failed."""
    folder = tmp_path_factory.mktemp("dcp")
    run = "import sys, tests.integrations.dcp.worker as worker; worker.main(int(sys.argv[1]), sys.argv[2])"
    ranks = [Program(["-c", run, str(rank), str(folder)]) for rank in range(PROCESSES)]
    results = []
    for rank, ended in enumerate(launcher.run(*ranks, folder=folder, timeout_s=PATIENCE_S)):
        file = folder / f"rank{rank}.json"
        results.append(json.loads(file.read_text()) if file.exists() else {"": ended.stdout + ended.stderr})
    return results


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks(name: str, reports: list[dict[str, str]]) -> None:
    told = [text for report in reports for text in report.values() if text]
    problems = [report[name] for report in reports if report.get(name)]

    assert not problems, "\n".join(problems)
    assert any(name in report for report in reports), "not run: " + "\n".join(told)
