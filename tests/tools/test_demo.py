"""`cnr demo`: killed during a save, restored, finished; in exact mode the weights are equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from cnr_store import Store
from cnr_store.errors import StoreExists
from cnr_store_tools.commands.demonstration import demo_parts
from cnr_store_tools.demo import processes
from cnr_store_tools.demo.kill import KilledSave
from cnr_store_tools.demo.run import (
    DEMO_TAG,
    DemoCheckpoint,
    DemoOptions,
    DemoReport,
    FinishedRun,
    make_store,
    run_demo,
)
from cnr_store_tools.output import emit, to_document
from format_spec.reader.compare import compare
from tests.support.forks import forked_interpreters


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    with forked_interpreters(processes, "tests.support.warm_training", "cnr_store_tools.demo.trainer"):
        yield


def checked(options: DemoOptions) -> DemoReport:
    """Run the demonstration and check what every run must show."""
    report = run_demo(options)
    store = Store.open(options.store)
    record = store.snapshot().record
    assert report.kill.objects > 0
    assert report.kill.segment not in {item.seg for one in store.log() for item in one.chain}
    assert not Path(options.store, "data", report.kill.segment, "_segment.json.zst").exists()
    assert report.kill.committed_step == report.restored_step
    assert report.checkpoints[0].kind == "baseline"
    assert [one.step for one in report.checkpoints] == sorted({one.step for one in report.checkpoints})
    assert report.checkpoints[-1].step == report.resumed.steps == report.uninterrupted.steps == record.step
    assert store.tags() == {DEMO_TAG: report.checkpoints[-1].version}
    assert compare(options.store) > 0
    store.close()
    return report


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_quantized_demonstration_on_generated_clicks(tmp_path: Path) -> None:
    report = checked(DemoOptions(store=str(tmp_path / "store"), steps=27))

    assert report.max_weight_difference > 0
    assert abs(report.resumed.auc - report.uninterrupted.auc) < 0.01


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_exact_demonstration_differs_by_nothing(tmp_path: Path) -> None:
    report = checked(DemoOptions(store=str(tmp_path / "store"), is_exact=True, policy="one_shot", steps=27))

    assert report.max_weight_difference == 0
    assert report.resumed == report.uninterrupted


def test_a_store_that_no_demonstration_left_is_not_replaced(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "mine")).close()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "thesis.txt").write_text("years of work")

    with pytest.raises(StoreExists, match="--force"):
        make_store(str(tmp_path / "mine"), force=False)
    with pytest.raises(StoreExists, match="other files"):
        make_store(str(tmp_path / "files"), force=True)

    assert (tmp_path / "files" / "thesis.txt").exists()
    make_store(str(tmp_path / "mine"), force=True).close()


def test_the_store_of_an_earlier_demonstration_is_replaced(tmp_path: Path) -> None:
    first = make_store(str(tmp_path / "store"), force=False)
    first.close()

    second = make_store(str(tmp_path / "store"), force=False)

    assert second.uuid != first.uuid
    second.close()


def test_the_report_shows_everything(capsys: pytest.CaptureFixture[str]) -> None:
    report = DemoReport(
        options=DemoOptions(is_exact=True), num_samples=434_718, table_rows=85_000, dim=16,
        checkpoints=(
            DemoCheckpoint(3, 40, "baseline", 85_000, 4_728_119, 1.2, 0.0311),
            DemoCheckpoint(4, 80, "delta", 26_576, 355_263, 16.5, None),
            DemoCheckpoint(6, 120, "delta", 26_576, 355_264, 16.5, 0.0311),
        ),
        kill=KilledSave("0" * 20 + "-" + "0" * 32, 19, 944_123, 80), restored_step=80, restored_version=4,
        restore_s=1.25, fp32_bytes=5_850_000, uninterrupted=FinishedRun(120, 0.7318, 0.5592),
        resumed=FinishedRun(120, math.nan, 0.5593),
        max_weight_difference=0.0, seconds=61.0,
    )  # fmt: skip

    emit(to_document(report), demo_parts(report), as_json=False)

    out = capsys.readouterr().out
    lines = out.splitlines()
    for words in (
        ["baseline", "85000", "4.51 MiB", "1.2x", "31.1 ms"], ["delta", "16.5x"], ["during a save", "19 objects"],
        ["restored version 4", "step 80", "1.25 s"], ["delta", "120"], ["uninterrupted", "0.7318"],
        ["killed, restored, finished", "0.5593"], ["largest difference of a weight: 0", "equal bit for bit"],
    ):  # fmt: skip
        found = next(number for number, line in enumerate(lines) if all(word in line for word in words))
        lines = lines[found + 1 :]
    assert "cnr show ./demo-store" in out
    assert to_document(report)["checkpoints"][1]["stall_s"] is None
    assert to_document(report)["resumed"]["auc"] is None
