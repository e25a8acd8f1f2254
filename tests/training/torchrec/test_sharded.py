"""Models under TorchRec's DistributedModelParallel, on 1, 2 and 4 ranks: rows read are rows changed, views are live."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

import pytest

from tests.support.launcher import Launcher, Program

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
    "unsharded_managed_collision_resumes": (1,),
    "rows_are_found_by_raw_id": (1,),
    "only_the_largest_pooled_values_are_exchanged": (2, 4),
    "codecs_of_largest_values_refuse_what_they_cannot_do": (1,),
}
"""What the worker checks, and on how many ranks."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchrec") is None, reason="torchrec and fbgemm-gpu are not installed"
    ),
]


def run_world(world: int, folder: Path, workers: Launcher, **environment: str) -> list[dict[str, str]]:
    """What each rank reports: check to what failed."""
    run = "import sys, tests.training.torchrec.worker as worker; worker.main(*map(int, sys.argv[1:3]), *sys.argv[3:])"
    files = [folder / f"rank{rank}.json" for rank in range(world)]
    ranks = [
        Program(["-c", run, str(rank), str(world), str(folder / "rendezvous"), str(file)], environment)
        for rank, file in enumerate(files)
    ]
    for ended in workers.run(*ranks, folder=folder, timeout_s=240):
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, workers: Launcher):
    """Results by world size; each group of ranks is started when its first test asks."""

    @cache
    def of_world(world: int) -> list[dict[str, str]]:
        return run_world(world, tmp_path_factory.mktemp(f"world{world}"), workers)

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


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_that_are_read_are_changed_rows_on_more_models(world: int, workers: Launcher, tmp_path: Path) -> None:
    for report in run_world(world, tmp_path, workers, CNR_TEST_MODELS="3"):
        assert not any(report.values()), "\n".join(report.values())
