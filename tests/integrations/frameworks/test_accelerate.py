"""A training with Accelerate and its manager is killed and goes on as if nobody had killed it, bit for bit."""

from __future__ import annotations

import importlib.util
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.integrations.frameworks.trained import programs, run, run_killed
from tests.support.launcher import Launcher

pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
PROGRAM = "accelerate_program.py"


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with closing(Launcher("tests.support.warm_training", "cnr_store.integrations.accelerate")) as started:
        yield started


def test_an_accelerate_training_killed_with_sigkill_resumes_bit_equal(launcher: Launcher, tmp_path: Path) -> None:
    (expected,) = run(launcher, tmp_path, PROGRAM, store=str(tmp_path / "calm"))
    store = str(tmp_path / "store")

    codes = run_killed(launcher, tmp_path, PROGRAM, store=store, every=1, kill_at=7, how="SIGKILL")
    (resumed,) = run(launcher, tmp_path, PROGRAM, store=store)

    assert codes == [-signal.SIGKILL]
    assert resumed["restored"] in (6, 7)
    assert {**resumed, "restored": None} == expected


def test_accelerate_resumes_bit_equal_around_epochs(launcher: Launcher, tmp_path: Path) -> None:
    sweep = [
        {"after": [4, 5, 6]},
        {"after": [2, 3], "accumulate": 2},
        {"after": [4, 5], "seedable": True},
        {"after": [5], "workers": 1},
    ]

    assert run(launcher, tmp_path, PROGRAM, sweep=sweep) == [[[]] * len(sweep)]


def test_two_ranks_of_accelerate_resume_bit_equal(launcher: Launcher, tmp_path: Path) -> None:
    expected = run(launcher, tmp_path, PROGRAM, ranks=2, store=str(tmp_path / "calm"), seedable=True)
    store = str(tmp_path / "store")

    run_killed(launcher, tmp_path, PROGRAM, ranks=2, store=store, every=1, kill_at=7, how="SIGKILL", seedable=True)
    resumed = run(launcher, tmp_path, PROGRAM, ranks=2, store=store, seedable=True)

    assert resumed[0]["restored"] in (6, 7)
    assert [{**one, "restored": None} for one in resumed] == expected


def test_a_loader_without_a_state_is_refused_with_the_setting(launcher: Launcher, tmp_path: Path) -> None:
    (ended,) = launcher.run(*programs(PROGRAM, {"store": str(tmp_path), "stateful": False}), folder=tmp_path)

    assert ended.returncode == 1
    assert re.search(r"the loader has no state.*use_stateful_dataloader=True", ended.stderr), ended.stderr
