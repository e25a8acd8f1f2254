"""Trainings on 4, 2 and 1 ranks, on real processes: saved together, ended, restored on as many ranks or on others."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.launcher import Launcher, Program

PROCESSES = {1: 4, 2: 2, 3: 4}
"""By round; the first one trains and ends, the second one restores, the third one is the soak."""
SHARDED = {
    "row_wise_on_four_ranks": 1,
    "table_wise_on_two_ranks": 2,
    "one_process_reads_what_ranks_have_saved": 2,
    "an_unsharded_model_takes_what_ranks_have_saved": 2,
    "trainings_end_behind_their_last_save": 1,
    "resumed_is_uninterrupted": 2,
    "quantized_trainings_resume_alike": 2,
    "other_columns_are_refused_before_anything_changes": 2,
    "columns_cut_anew_are_averaged": 2,
}
"""What runs on models of TorchRec, by round."""
PLAIN = {
    "copies_are_saved_once": 1,
    "copies_resume_on_the_same_ranks": 2,
    "one_process_takes_what_copies_have_saved": 2,
    "a_table_of_one_rank_alone": 1,
    "a_table_of_one_rank_alone_resumes": 2,
    "ranks_without_anything_to_save_take_part": 1,
    "readers_that_fetch_ahead_differently_save_at_the_same_step": 1,
    "readers_end_with_their_process": 1,
    "readers_go_on_with_the_next_sample": 2,
    "what_ranks_draw_ends_with_their_process": 1,
    "each_rank_draws_as_if_it_had_not_ended": 2,
    "another_number_of_readers_is_the_callers_matter": 2,
    "what_one_rank_cannot_write_no_rank_has_saved": 1,
    "a_failure_behind_the_training_is_told_to_all_at_the_same_step": 1,
    "no_step_of_a_rank_waits_for_the_storage": 1,
    "what_one_rank_cannot_stage_no_rank_has_saved": 1,
    "a_rank_that_cannot_take_part_is_named": 1,
    "a_save_is_skipped_by_all_or_by_none": 1,
    "tables_are_read_on_all_ranks_while_they_train": 1,
    "a_table_that_one_rank_cannot_read_is_saved_by_the_next_save": 1,
    "ranks_that_are_told_to_end_save_together": 1,
    "what_one_rank_cannot_read_no_rank_goes_on_with": 1,
    "clocks_of_several_ranks_are_no_measure": 1,
    "ranks_with_different_models_are_refused": 1,
    "what_is_divided_among_ranks_is_refused": 1,
    "copies_of_a_table_that_differ_are_told_of": 1,
    "dynamic_tables_evict_while_they_are_saved": 1,
    "fewer_ranks_go_on_with_dynamic_tables": 2,
}
HAS_TORCHREC = importlib.util.find_spec("torchrec") is not None

PATIENCE_S = 600
"""For a round: half a minute alone, minutes where four processes compile all kernels beside other tests."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S + 60)]  # the first test waits for both rounds
needs_torchrec = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec and fbgemm-gpu are not installed")

Reports = dict[int, list[dict[str, str]]]


def run_round(stage: int, folder: Path, workers: Launcher) -> list[dict[str, str]]:
    """Results of all processes of a round: scenario to what failed."""
    run = "import sys, tests.training.ranks.worker as worker; worker.main(*map(int, sys.argv[1:3]), sys.argv[3])"
    ranks = [
        Program(["-c", run, str(stage), str(rank), str(folder)], {"PYTHONFAULTHANDLER": "1"})
        for rank in range(PROCESSES[stage])
    ]
    files = [folder / f"round{stage}-rank{rank}.json" for rank in range(PROCESSES[stage])]
    for ended, file in zip(workers.run(*ranks, folder=folder, timeout_s=PATIENCE_S), files, strict=True):
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert file.exists(), ended.stdout + ended.stderr
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, workers: Launcher) -> Reports:
    """Results by round."""
    folder = tmp_path_factory.mktemp("ranks")
    return {stage: run_round(stage, folder, workers) for stage in (1, 2)}


def check(name: str, reports: list[dict[str, str]]) -> None:
    told = [text for report in reports for text in report.values() if text]
    problems = [report[name] for report in reports if report.get(name)]

    assert not problems, "\n".join(problems)
    assert any(name in report for report in reports), "not run: " + "\n".join(told)


@needs_torchrec
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_models(name: str, reports: Reports) -> None:
    check(name, reports[SHARDED[name]])


@pytest.mark.parametrize("name", PLAIN)
def test_models_that_every_rank_has(name: str, reports: Reports) -> None:
    check(name, reports[PLAIN[name]])


def test_every_scenario_is_reported(reports: Reports) -> None:
    run = {(name, stage) for stage, of_round in reports.items() for report in of_round for name in report}

    assert run == {*PLAIN.items(), *(SHARDED.items() if HAS_TORCHREC else ())}


@needs_torchrec
@pytest.mark.soak
@pytest.mark.timeout(0)
def test_every_sharding_is_restored_as_every_other(tmp_path: Path, workers: Launcher) -> None:
    reports = run_round(3, tmp_path, workers)

    assert reports[0].keys() == {"saved_in_every_way", "restored_in_every_other_way"}
    for name in reports[0]:
        check(name, reports)
