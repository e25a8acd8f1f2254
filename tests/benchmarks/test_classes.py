import bench_classes
import harness
import numpy as np
import pytest
from bench_classes import FACTORS, Point
from click_cases import Source, load


def test_rows_keep_their_class_until_they_are_far_from_it() -> None:
    values = np.float32([[1, 1], [0.5, 0.5], [1e-9, 0], [0, 0]])

    first = bench_classes.octaves_of(values)
    moved = bench_classes.octaves_of(values * np.float32([[1.6], [1.8], [1], [1]]), first)

    assert first.tolist() == [0, -1, -7, -7]
    assert moved.tolist()[:2] == [0, 0]


def test_rows_that_change_their_step_are_stored_whole() -> None:
    random = np.random.default_rng(0)
    before = random.normal(0, 40, (400, 8)).astype(np.float32)
    after = before + random.normal(0, 1, before.shape).astype(np.float32)
    rows, ones = np.arange(400), np.ones(400, np.float32)
    halved = np.where(rows % 2, 1.0, 0.5).astype(np.float32)

    same = bench_classes.delta_bytes(before, after, rows, (ones, ones))

    assert bench_classes.delta_bytes(before, after, rows, (ones, halved)) > 1.5 * same
    assert bench_classes.delta_bytes(before, after, rows[:200], (ones, ones)) < same


def test_curves_are_compared_at_the_change_of_the_first() -> None:
    one = [Point(1000 / factor, 1e-3 * factor**2, 1e-3 * factor**2) for factor in FACTORS]
    finer = [Point(700 / factor, 1e-3 * factor**2, 1e-3 * factor**2) for factor in FACTORS]

    assert bench_classes.bytes_at_equal_quality(one, one, "auc") == pytest.approx(1)
    assert bench_classes.bytes_at_equal_quality(one, finer, "logloss") == pytest.approx(0.7)


def test_a_small_run_has_a_curve_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench_classes.curves(load(Source("generated", samples=8000)), 1)
    report = harness.Report("classes")

    bench_classes.print_curves(report, "generated", found)

    assert {kind for _, kind in found} == {"one", "by class"}
    for points in found.values():
        sizes = [point.size for point in points]
        assert sizes == sorted(sizes)
    assert len(report.tables[0].rows) == len(found) * len(FACTORS)
    assert len(report.lines) == 2 * len(bench_classes.BITS)
