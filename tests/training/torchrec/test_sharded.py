"""Models under TorchRec's DistributedModelParallel, on 1, 2 and 4 ranks: rows read are rows changed, views are live."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
WORLDS = (1, 2, 4)
CHECKS = (
    "hook_rows_are_changed_rows_row_wise",
    "hook_rows_are_changed_rows_table_wise",
    "hook_rows_are_changed_rows_column_wise",
    "hook_rows_are_changed_rows_data_parallel",
    "hook_rows_are_changed_rows_mixed",
    "hook_rows_are_changed_rows_table_row_wise",
    "shards_are_the_memory_of_the_state_dict",
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None, reason="torchrec and fbgemm-gpu are not installed"
)


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory):
    """Results by world size; each group of ranks is started when its first test asks."""

    @cache
    def of_world(world: int) -> list[dict[str, str]]:
        folder = tmp_path_factory.mktemp(f"world{world}")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in ("", "gpu", "tools"))
        }
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.training.torchrec.worker", str(rank), str(world)),
                    *(str(folder / "rendezvous"), str(folder / f"rank{rank}.json")),
                ],
                cwd=REPOSITORY,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for rank, output in zip(ranks, outputs, strict=True):
            assert rank.returncode == 0, output
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]

    return of_world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", CHECKS)
def test_sharded_models(check: str, world: int, reports) -> None:
    problems = [report[check] for report in reports(world) if report[check]]

    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("world", WORLDS)
def test_every_check_of_the_worker_is_reported(world: int, reports) -> None:
    assert all(report.keys() == set(CHECKS) for report in reports(world))
