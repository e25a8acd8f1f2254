"""`cnr demo`: killed in the middle of a save, restored, finished; exact mode differs from nothing."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from cnr_store import NotFound, Store, StoreExists
from cnr_store_tools.demo.records import DEMO_TAG, Checkpoint, DemoOptions, DemoReport, Kill, RunQuality
from cnr_store_tools.demo.report import render
from cnr_store_tools.demo.run import make_store, run_demo
from format_spec.reader.compare import compare

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def data_file(name: str) -> Path:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path


def checked(options: DemoOptions) -> DemoReport:
    """Run the demonstration and check what holds for every one of them."""
    report = run_demo(options)
    store = Store.open(options.store)
    record = store.snapshot().record
    assert report.kill.objects > 0
    assert report.kill.segment not in {item.seg for one in store.log() for item in one.chain}
    assert not Path(options.store, "data", report.kill.segment, "_segment.json").exists()
    assert report.kill.committed_step == report.restored_step
    assert report.checkpoints[0].kind == "full"
    assert [one.step for one in report.checkpoints] == sorted({one.step for one in report.checkpoints})
    assert report.checkpoints[-1].step == report.resumed.steps == report.uninterrupted.steps == record.step
    assert store.tags() == {DEMO_TAG: report.checkpoints[-1].version}
    assert compare(options.store) > 0
    store.close()
    return report


@pytest.mark.slow
def test_quantized_demonstration_on_generated_clicks(tmp_path: Path) -> None:
    report = checked(DemoOptions(store=str(tmp_path / "store"), steps=27))

    assert report.max_weight_difference > 0
    assert abs(report.resumed.auc - report.uninterrupted.auc) < 0.01


@pytest.mark.slow
def test_exact_demonstration_on_generated_clicks_differs_by_nothing(tmp_path: Path) -> None:
    report = checked(DemoOptions(store=str(tmp_path / "store"), is_exact=True, steps=27))

    assert report.max_weight_difference == 0
    assert report.resumed == report.uninterrupted


@pytest.mark.slow
def test_quantized_demonstration_on_movielens(tmp_path: Path) -> None:
    options = DemoOptions(data=data_file("ml-100k.inter"), store=str(tmp_path / "store"), bits=8, steps=45)

    report = checked(options)

    assert 0 < report.max_weight_difference < 0.05
    assert abs(report.resumed.auc - report.uninterrupted.auc) < 0.01
    assert report.checkpoints[-1].ratio > 2


@pytest.mark.slow
def test_exact_one_shot_demonstration_on_criteo(tmp_path: Path) -> None:
    options = DemoOptions(
        data=data_file("criteo_kaggle_tiny_train.csv"), store=str(tmp_path / "store"), is_exact=True,
        policy="one_shot", steps=45,
    )  # fmt: skip

    report = checked(options)

    assert report.max_weight_difference == 0


def test_a_store_that_no_demonstration_left_is_not_replaced(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "mine")).close()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "thesis.txt").write_text("years of work")

    with pytest.raises(StoreExists, match="--force"):
        make_store(DemoOptions(store=str(tmp_path / "mine")))
    with pytest.raises(StoreExists, match="other files"):
        make_store(DemoOptions(store=str(tmp_path / "files"), force=True))

    assert (tmp_path / "files" / "thesis.txt").exists()
    make_store(DemoOptions(store=str(tmp_path / "mine"), force=True)).close()


def test_the_store_of_an_earlier_demonstration_is_replaced(tmp_path: Path) -> None:
    options = DemoOptions(store=str(tmp_path / "store"))
    first = make_store(options)
    first.close()

    second = make_store(options)

    assert second.uuid != first.uuid
    second.close()


def test_a_missing_file_is_said_before_a_store_is_touched(tmp_path: Path) -> None:
    store = tmp_path / "store"
    make_store(DemoOptions(store=str(store))).close()
    before = Store.open(str(store)).uuid

    with pytest.raises(NotFound, match=r"nothing\.inter"):
        run_demo(DemoOptions(data=tmp_path / "nothing.inter", store=str(store)))

    assert Store.open(str(store)).uuid == before


def test_the_table_fits_a_terminal_and_says_everything() -> None:
    report = DemoReport(
        options=DemoOptions(is_exact=True), num_samples=434_718, table_rows=85_000, dim=16,
        checkpoints=(
            Checkpoint(3, 40, "full", 85_000, 4_728_119, 1.2, 0.0311),
            Checkpoint(4, 80, "delta", 26_576, 355_263, 16.5, None),
            Checkpoint(6, 120, "delta", 26_576, 355_264, 16.5, 0.0311),
        ),
        kill=Kill("0" * 20 + "-" + "0" * 32, 19, 944_123, 80), restored_step=80, restored_version=4, restore_s=1.25,
        fp32_bytes=5_850_000, uninterrupted=RunQuality(120, 0.7318, 0.5592), resumed=RunQuality(120, math.nan, 0.5593),
        max_weight_difference=0.0, seconds=61.0,
    )  # fmt: skip
    out = io.StringIO()

    render(report, Console(file=out, width=100))

    lines = out.getvalue().splitlines()
    for words in (
        ["v3 full", "4,728,119", "1.2x", "31.1 ms"], ["v4 delta", "16.5x", "-"], ["killed in a save", "19 objects"],
        ["restored v4", "80", "1.25 s"], ["v6 delta"], ["uninterrupted", "0.7318"],
        ["killed, finished", "-", "0.5593", "0"],
    ):  # fmt: skip
        found = next(number for number, line in enumerate(lines) if words[0] in line)
        assert all(word in lines[found] for word in words)
        lines = lines[found:]
    assert "equal bit for bit" in out.getvalue()
    assert "cnr show ./demo-store" in out.getvalue()
    assert report.to_document()["checkpoints"][1]["stall_s"] is None
    assert report.to_document()["resumed"]["auc"] is None
