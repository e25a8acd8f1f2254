"""A Lightning training with the callback is killed and goes on as if nobody had killed it, bit for bit."""

from __future__ import annotations

import importlib.util
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cnr_store import Store
from tests.integrations.frameworks.trained import programs, run, run_killed
from tests.support.launcher import Launcher

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
PROGRAM = "lightning_program.py"


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with closing(Launcher("tests.support.warm_training", "cnr_store.integrations.lightning")) as started:
        yield started


def test_a_lightning_training_killed_with_sigkill_resumes_bit_equal(launcher: Launcher, tmp_path: Path) -> None:
    (expected,) = run(launcher, tmp_path, PROGRAM, store=str(tmp_path / "calm"))
    store = str(tmp_path / "store")

    codes = run_killed(launcher, tmp_path, PROGRAM, store=store, every=1, kill_at=7, how="SIGKILL")
    (resumed,) = run(launcher, tmp_path, PROGRAM, store=store)

    assert codes == [-signal.SIGKILL]
    assert resumed["restored"] in (6, 7)
    assert {**resumed, "restored": None} == expected


def test_lightning_resumes_bit_equal_around_epochs_and_validations(launcher: Launcher, tmp_path: Path) -> None:
    sweep = [
        {"after": [4, 5, 6], "validate": 1.0},
        {"after": [2, 5], "validate": 0.4, "seeded": True},
        {"after": [3, 5], "max_steps": 8},
        {"after": [2, 3], "accumulate": 2},
        {"after": [5], "workers": 1},
    ]

    assert run(launcher, tmp_path, PROGRAM, sweep=sweep) == [[[]] * len(sweep)]


def test_two_ranks_of_lightning_resume_bit_equal(launcher: Launcher, tmp_path: Path) -> None:
    expected = run(launcher, tmp_path, PROGRAM, ranks=2, store=str(tmp_path / "calm"))
    store = str(tmp_path / "store")

    run_killed(launcher, tmp_path, PROGRAM, ranks=2, store=store, every=1, kill_at=7, how="SIGKILL")
    resumed = run(launcher, tmp_path, PROGRAM, ranks=2, store=store)

    assert resumed[0]["restored"] in (6, 7)
    assert [{**one, "restored": None} for one in resumed] == expected


def test_lightning_saves_when_sigterm_ends_it(launcher: Launcher, tmp_path: Path) -> None:
    expected = run(launcher, tmp_path, PROGRAM, store=str(tmp_path / "calm"))
    store = str(tmp_path / "store")

    run_killed(launcher, tmp_path, PROGRAM, store=store, kill_at=6, how="SIGTERM")
    resumed = run(launcher, tmp_path, PROGRAM, store=store)

    assert resumed == [{**expected[0], "restored": 7}]


def test_a_lightning_training_that_ended_can_go_on_longer(launcher: Launcher, tmp_path: Path) -> None:
    expected = run(launcher, tmp_path, PROGRAM, store=str(tmp_path / "calm"), epochs=3)
    store = str(tmp_path / "store")

    run(launcher, tmp_path, PROGRAM, store=store, epochs=2)
    resumed = run(launcher, tmp_path, PROGRAM, store=store, epochs=3)

    assert resumed == [{**expected[0], "restored": 10}]
    with Store.open(store) as opened:
        assert opened.steps() == [10, 15]


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (1, {"strange": True, "every": 1}, r"callbacks.*Counting.*seen.* is a builtins\.set, which cannot be stored"),
        (1, {"loader": "plain"}, r"the train dataloader is a DataLoader, which has no state_dict\(\)"),
        (2, {"wrapped": True}, r"Lightning has wrapped the sampler"),
    ],
)
def test_lightning_refuses_what_would_be_in_no_checkpoint(
    launcher: Launcher, tmp_path: Path, ranks: int, arguments: dict[str, Any], message: str
) -> None:
    given = {"store": str(tmp_path / "store"), "ranks": str(tmp_path / "ranks"), **arguments}

    for ended in launcher.run(*programs(PROGRAM, given, ranks), folder=tmp_path):
        assert ended.returncode == 1
        assert re.search(message, ended.stderr), ended.stderr
