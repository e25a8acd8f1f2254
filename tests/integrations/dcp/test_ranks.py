"""Saves and loads of DCP on 1, 2 and 4 ranks: real processes, started once, which run all scenarios."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.dcp.scenarios import SCENARIOS

REPOSITORY = Path(__file__).resolve().parents[3]
PROCESSES = 4
PATIENCE_S = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 60)]  # the first test waits for all scenarios


def run_all(folder: Path) -> list[dict[str, str]]:
    """Results of all processes: scenario to what failed."""
    paths = os.pathsep.join(str(REPOSITORY / part) for part in ("", "gpu", "tools"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.dcp.worker", str(rank), str(folder)],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        outputs = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    files = [folder / f"rank{rank}.json" for rank in range(PROCESSES)]
    return [
        json.loads(file.read_text()) if file.exists() else {"": output}
        for file, output in zip(files, outputs, strict=True)
    ]


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The results; workers of pytest-xdist share one run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dcp"
    folder.mkdir(exist_ok=True)
    results = folder / "results.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            results.write_text(json.dumps(run_all(folder)))
    return json.loads(results.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks(name: str, reports: list[dict[str, str]]) -> None:
    told = [text for report in reports for text in report.values() if text]
    problems = [report[name] for report in reports if report.get(name)]

    assert not problems, "\n".join(problems)
    assert any(name in report for report in reports), "not run: " + "\n".join(told)
