"""What `make gpu` runs and writes. The run itself needs a GPU; its parts do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.kernels.checks import CHECKS
from tests.gpu.run import CHECKED, MINUTES, ON_THE_DEVICE, ROOT, Outcome, Step, page, plan, result, run

GPU = torch.cuda.is_available()


@pytest.mark.skipif(GPU, reason="this machine has a GPU: `make gpu` would run")
def test_without_a_gpu_nothing_is_run_and_it_is_said(tmp_path: Path) -> None:
    out = tmp_path / "page"

    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.run", "--out", out], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 1
    assert re.search(r"make gpu: no GPU here: torch .* Nothing was run, and no page was written", ended.stderr)
    assert not out.exists()


def test_all_steps_together_keep_the_limit(tmp_path: Path) -> None:
    steps = plan("python", tmp_path, "/usr/bin/compute-sanitizer")

    assert sum(step.minutes for step in steps) <= MINUTES - 1
    assert "memory-checker" in {step.name for step in steps}
    assert "memory-checker" not in {step.name for step in plan("python", tmp_path, None)}


def test_the_steps_name_what_is_there(tmp_path: Path) -> None:
    for step in plan("python", tmp_path, "compute-sanitizer"):
        files = [part for part in step.command if part.startswith("tests/") or part == "tests"]
        assert files
        assert all((ROOT / file).exists() for file in files)
    assert all((ROOT / file).exists() for file in ON_THE_DEVICE)
    assert set(CHECKED) <= CHECKS.keys()
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^gpu:\n\t.*-m tests\.gpu\.run", makefile, re.MULTILINE)


@pytest.fixture
def outcomes(tmp_path: Path) -> list[Outcome]:
    """Of a test that fails, a check that fails, and a command that takes too long and has a child."""
    (tmp_path / "test_two.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'no device memory'\n"
        "@pytest.mark.skip(reason='needs two devices')\n"
        "def test_other(): pass\n"
    )
    report = f"--junitxml={tmp_path / 'tests.xml'}"
    tests = Step("tests", [sys.executable, "-m", "pytest", "-q", report, "-c", os.devnull, str(tmp_path)], 1)
    printed = '{"triton_ran": true, "failures": {"good": null, "bad": "Traceback"}}'
    checks = Step("checks", [sys.executable, "-c", f"print('noise ' + {printed!r})"], 1)
    child = f"import pathlib, time; time.sleep(3); pathlib.Path({str(tmp_path / 'alive')!r}).touch()"
    slow = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    last = Step("slow", [sys.executable, "-c", slow], 1)
    return [run(tests, tmp_path, 60), run(checks, tmp_path, 60), run(last, tmp_path, 1)]


def test_the_page_says_what_failed_and_why(outcomes: list[Outcome], tmp_path: Path) -> None:
    written = page("1 x GPU", outcomes, ["compute-sanitizer is not here."], tmp_path)

    assert "| tests | failed (1): 1 passed, 1 failed, 1 skipped |" in written
    assert re.search(r"- failed: `test_two::test_bad`: .*no device memory", written)
    assert "- 1 skipped: needs two devices" in written
    assert "| checks | failed: bad |" in written
    assert "| slow | out of time |" in written
    assert "compute-sanitizer is not here." in written
    assert str(tmp_path) not in written.split("## ")[0]
    assert [result(one, tmp_path).split(":")[0] for one in outcomes] == ["failed (1)", "failed", "out of time"]


def test_a_step_out_of_time_ends_with_its_children(outcomes: list[Outcome], tmp_path: Path) -> None:
    assert outcomes[-1].code is None
    assert outcomes[-1].seconds < 3
    time.sleep(3)
    assert not (tmp_path / "alive").exists()
