import json
import math
import sys
from dataclasses import replace
from functools import cache

import bench_quality
import numpy as np
import pytest
from click_cases import Source, load
from quality_points import (
    FLOOR_MARGIN,
    Estimate,
    Limits,
    Point,
    bytes_at,
    estimate,
    floor_of,
    point_of,
    smallest,
)  # fmt: skip
from quality_tables import compare
from restored_runs import Order, Setting, cross_entropy, options_of, prepared, run, schedule

from cnr_store import TableOptions
from cnr_store.training import CheckpointManager, TrackingOptions
from cnr_store.types import Lattice
from cnr_store_tools.demo.train import train_step

TINY = Source("generated", samples=16_000)
ran = cache(run)
"""Several tests compare with one run."""


def point(family, row_bytes, loss, *, moved=1e-4):
    lost = Estimate(loss, 0.0)
    return Point(Setting(family, 4), 3, row_bytes, row_bytes / 4, 10.0, 100.0, 5.0, lost, lost, lost, moved, 5)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", ["rowwise", "adagrad", "adam"])
def test_exact_mode_changes_nothing_however_often_it_is_restored(optimizer):
    reference = ran(Order(TINY, 0, None, 0, optimizer))
    restored = ran(Order(TINY, 0, Setting("exact"), 3, optimizer))
    assert restored.trained == restored.served == reference.trained
    assert reference.trained.moved == 0.0


def test_coarse_rows_change_the_outcome_and_take_fewer_bytes():
    exact, coarse = (ran(Order(TINY, 0, setting, 3)) for setting in (Setting("exact"), Setting("lattice", 2)))
    assert coarse.trained.moved > 0.0
    assert coarse.served.moved > 0.0
    assert 0 < coarse.row_bytes < exact.row_bytes
    assert 0 < coarse.baseline_bytes < exact.baseline_bytes
    assert coarse.rows == exact.rows > 0
    assert coarse.deltas == exact.deltas == 21


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_coarse_slots_take_fewer_bytes_and_leave_weights_exact(optimizer):
    exact = ran(Order(TINY, 0, Setting("exact"), 3, optimizer))
    fine, coarse = (run(Order(TINY, 0, Setting("slots", mantissa=m, step=1.0), 3, optimizer)) for m in (7, 0))
    assert coarse.trained.moved > 0.0
    assert 0 < coarse.slot_bytes < fine.slot_bytes < exact.slot_bytes
    assert coarse.rows == exact.rows


def test_the_suite_keeps_runs_and_writes_json(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(bench_quality, "run", lambda order, folder: seen.append(order) or run(order, folder))
    monkeypatch.setattr(bench_quality, "QUICK", (Setting("affine", 4), Setting("lattice", 4)))
    keep, found = tmp_path / "runs.jsonl", tmp_path / "quality.json"
    arguments = f"bench_quality.py --quick --sections generated --rows 16000 --repeats 1 --workers 1 --keep {keep}"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), "--json", str(found)])

    bench_quality.main()
    document = json.loads(found.read_text())
    first = len(seen)
    bench_quality.main()

    assert len(seen) == first == len(keep.read_text().splitlines()) == 7
    again = json.loads(found.read_text())
    assert again["tables"] == document["tables"]
    exact = next(line for line in document["lines"] if "exact mode" in line["name"])
    assert (exact["value"], exact["met"]) == (0.0, True)
    for table in document["tables"][:2]:
        sizes = {row[0]: row[1] for row in table["rows"]}
        assert 0 < sizes["lattice 4"] < sizes["affine 4"] < sizes["exact"]
    assert "fewest row bytes that hold" in capsys.readouterr().out


def test_true_probabilities_are_those_that_labels_were_drawn_with():
    case = load(replace(TINY, samples=60_000))
    assert case.truth is not None
    assert abs(case.truth.mean() - case.future.labels.mean()) < 0.02
    bayes = cross_entropy(case.truth, case.truth)
    observed = cross_entropy(case.future.labels.astype(np.float64), case.truth)
    assert observed == pytest.approx(bayes, rel=0.03)
    assert bayes < cross_entropy(case.truth, np.full_like(case.truth, case.past.labels.mean())) * 0.8


def test_scales_are_those_that_bits_chooses_in_the_first_save():
    model, optimizers, batches = prepared(load(TINY), 0)
    for step in range(schedule(len(batches), 1)[0][0]):
        train_step(model, optimizers, batches.batch(step))
    manager = CheckpointManager(
        "memory://quality-scales",
        model=model,
        optimizer=optimizers,
        options=TableOptions(bits=4),
        tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
    )
    manager.save()
    stored = {name: schema.encoding for name, schema in manager.store.snapshot().tables.items()}
    manager.close()

    plain, finer = (options_of(TINY, 0, Setting("lattice", 4, factor)) for factor in (1.0, 2.0))

    assert stored == {name: Lattice(option.scale) for name, option in plain.items()}
    assert {name: option.scale for name, option in finer.items()} == {
        name: encoding.scale / 2 for name, encoding in stored.items()
    }


@pytest.mark.parametrize("restores", [1, 3, 20, 100])
def test_restores_are_spread_evenly_over_the_saves(restores):
    saves, restored = schedule(400, restores)
    assert len(restored) == len(set(restored)) == restores
    assert set(restored) <= set(saves[1:-1])
    assert saves[-1] == 400
    gaps = np.diff([saves[0], *restored, 400])
    assert gaps[1:-1].max(initial=0) - gaps[1:-1].min(initial=400) <= 400 / min(restores, 20)
    with pytest.raises(ValueError, match="cannot hold"):
        schedule(10, restores)


def test_a_coarse_point_that_holds_by_luck_does_not_count():
    lucky = [point("affine", 400, 0.0), point("affine", 300, 0.5), point("affine", 200, 0.0)]
    assert smallest(lucky, Limits(0.1, 0.1)) == lucky[0]
    assert smallest(lucky[1:], Limits(0.1, 0.1)) is None


def test_a_finer_point_that_misses_by_noise_does_not_refuse_coarser_ones():
    finer, coarser = point("lattice", 400, 0.15), point("lattice", 300, 0.0)
    noisy = replace(finer, auc=Estimate(0.15, 0.1), logloss=Estimate(0.15, 0.1))
    assert smallest([noisy, coarser], Limits(0.1, 0.1)) == coarser
    assert smallest([finer, coarser], Limits(0.1, 0.1)) is None


def test_exact_mode_is_what_we_fall_back_to():
    points = [point("affine", 400, 0.0), point("lattice", 100, 0.5), replace(point("affine", 900, 0.0))]
    exact = replace(point("lattice", 800, 0.0), setting=Setting("exact"))
    theirs, ours, ratio = compare([*points, exact], Limits(0.1, 0.1))
    assert (theirs, ours, ratio) == (points[0], exact, 2.0)
    assert compare(points[:2], Limits(-1.0, -1.0)) == (None, None, None)


def test_bytes_at_equal_quality_lie_between_two_scales():
    points = [point("lattice", 100.0, 0.0, moved=1e-2), point("lattice", 400.0, 0.0, moved=1e-4)]
    assert bytes_at(points, 1e-3) == pytest.approx(200.0)
    assert bytes_at(points, 1e-5) is None
    assert bytes_at(points, 1e-1) is None
    assert bytes_at([], 1e-2) is None


def test_a_finer_point_that_moves_predictions_more_counts_for_coarser_ones():
    points = [point("lattice", size, 0.0, moved=moved) for size, moved in ((400.0, 1e-4), (300.0, 4e-4), (200.0, 2e-4))]
    points.append(point("lattice", 100.0, 0.0, moved=1e-2))
    assert bytes_at(points, 4e-4) == pytest.approx(200.0)
    assert floor_of(points) == pytest.approx(FLOOR_MARGIN * 1e-4)


def test_losses_are_paired_by_seed():
    reference = {seed: ran(Order(TINY, seed, None, 0)) for seed in (0, 1)}
    same = point_of(Setting("exact"), 1, reference, reference, "trained")
    assert (same.auc, same.logloss) == (Estimate(0.0, 0.0), Estimate(0.0, 0.0))
    assert same.true_logloss.mean == 0.0


def test_the_interval_of_a_mean_is_student_s():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3))
    assert estimate([5.0]) == Estimate(5.0, 0.0)
    unknown = estimate([math.nan, math.nan])  # the true loss of real data
    assert math.isnan(unknown.mean)
    assert unknown.half_width == 0.0
