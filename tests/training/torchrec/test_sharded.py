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
CHECKS: dict[str, tuple[int, ...]] = {
    "hook_rows_are_changed_rows_row_wise": (1, 2, 4),
    "hook_rows_are_changed_rows_table_wise": (1, 2, 4),
    "hook_rows_are_changed_rows_column_wise": (1, 2, 4),
    "hook_rows_are_changed_rows_data_parallel": (1, 2, 4),
    "hook_rows_are_changed_rows_mixed": (1, 2, 4),
    "hook_rows_are_changed_rows_table_row_wise": (1, 2, 4),
    "shards_are_the_memory_of_the_state_dict": (1, 2, 4),
    "tracker_takes_changed_rows": (1, 2, 4),
    "rows_wait_for_the_update_that_writes_them": (1, 2),
    "an_update_settles_only_its_own_forward": (2,),
    "a_forward_that_is_dropped_holds_nothing_up": (2,),
    "batches_in_flight_are_marked_again": (2,),
    "fused_optimizers_move_the_rows_of_the_batch_only": (1,),
    "an_optimizer_that_rewrites_tables_needs_consent": (1,),
    "a_model_filled_through_the_views_trains_on_bit_for_bit": (1, 2, 4),
    "counters_and_learning_rate_go_back": (1,),
    "wrapped_optimizers_show_the_plain_ones_inside": (1,),
    "torchrecs_own_tracker_works_beside": (2,),
    "hooks_that_are_removed_tell_nothing": (1,),
    "a_missing_private_name_is_told_with_the_version": (1,),
    "several_shards_behind_a_dense_kernel_are_refused": (1,),
    "unsharded_collections_are_plain_models": (1,),
}
"""What the worker checks, and on how many ranks."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchrec") is None, reason="torchrec and fbgemm-gpu are not installed"
    ),
]


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


@pytest.mark.parametrize(("check", "world"), [(check, world) for check, worlds in CHECKS.items() for world in worlds])
def test_sharded_models(check: str, world: int, reports) -> None:
    problems = [report[check] for report in reports(world) if report[check]]

    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_check_of_the_worker_is_reported(world: int, reports) -> None:
    assert all(
        report.keys() == {name for name, worlds in CHECKS.items() if world in worlds} for report in reports(world)
    )
