"""A training with a Trainer and the callback is killed and goes on as if nobody had killed it, bit for bit."""

from __future__ import annotations

import importlib.util
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cnr_store import Store
from tests.integrations.frameworks.trained import continued, programs, run, run_killed
from tests.support.launcher import Launcher

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
PROGRAM = "transformers_program.py"


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher("transformers.trainer", "cnr_store.training", "accelerate")
    yield launcher
    launcher.close()


def test_a_trainer_killed_with_sigkill_resumes_bit_equal(launcher: Launcher, tmp_path: Path) -> None:
    (expected,) = run(launcher, tmp_path, PROGRAM, store=str(tmp_path / "calm"))
    store = str(tmp_path / "store")

    codes = run_killed(launcher, tmp_path, PROGRAM, store=store, every=1, kill_at=7, how="SIGKILL")
    (resumed,) = run(launcher, tmp_path, PROGRAM, store=store)

    assert codes == [-signal.SIGKILL]
    assert resumed["restored"] in (6, 7)
    assert resumed == continued(expected, resumed["restored"])
    assert list(resumed["losses"])[-1] == "10"


def test_a_trainer_resumes_bit_equal_around_epochs_and_evaluations(launcher: Launcher, tmp_path: Path) -> None:
    sweep = [
        {"after": [4, 5, 6], "evaluate": 2},
        {"after": [2, 3, 4], "accumulate": 2},
        {"after": [3, 5], "max_steps": 8, "seedable": False},
        {"after": [5, 6], "workers": 1},
    ]

    assert run(launcher, tmp_path, PROGRAM, sweep=sweep) == [[[]] * len(sweep)]


def test_two_ranks_of_a_trainer_resume_bit_equal(launcher: Launcher, tmp_path: Path) -> None:
    expected = run(launcher, tmp_path, PROGRAM, ranks=2, store=str(tmp_path / "calm"))
    store = str(tmp_path / "store")

    run_killed(launcher, tmp_path, PROGRAM, ranks=2, store=store, every=1, kill_at=7, how="SIGKILL")
    resumed = run(launcher, tmp_path, PROGRAM, ranks=2, store=store)

    assert resumed[0]["restored"] in (6, 7)
    assert resumed == [continued(one, resumed[0]["restored"]) for one in expected]


def test_a_trainer_saves_when_sigterm_ends_it(launcher: Launcher, tmp_path: Path) -> None:
    expected = run(launcher, tmp_path, PROGRAM, store=str(tmp_path / "calm"))
    store = str(tmp_path / "store")

    run_killed(launcher, tmp_path, PROGRAM, store=store, kill_at=6, how="SIGTERM")
    resumed = run(launcher, tmp_path, PROGRAM, store=store)

    assert resumed == [continued(expected[0], 8)]  # the signal comes in step 7, and the trainer ends behind the next


def test_a_training_of_a_trainer_that_ended_can_go_on_longer(launcher: Launcher, tmp_path: Path) -> None:
    given = {"lr_scheduler_type": "constant"}
    expected = run(launcher, tmp_path, PROGRAM, store=str(tmp_path / "calm"), epochs=3, **given)
    store = str(tmp_path / "store")

    run(launcher, tmp_path, PROGRAM, store=store, epochs=2, **given)
    resumed = run(launcher, tmp_path, PROGRAM, store=store, epochs=3, **given)

    assert resumed == [continued(expected[0], 10)]
    with Store.open(store) as opened:
        assert opened.steps() == [10, 15]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"direct": True}, r"call CnrTrainerCheckpoint\.train\(trainer\)"),
        ({"endless": True, "max_steps": 8}, r"the train dataset has no length"),
        ({"auto_find_batch_size": True}, r"auto_find_batch_size=True: .*; leave it out"),
        ({"ignore_data_skip": True}, r"ignore_data_skip=True: a resumed training would begin the epoch again"),
        ({"stop_epoch_at": 3}, r"a callback ended an epoch at step 3"),
    ],
)
def test_a_trainer_that_could_not_resume_is_refused(
    launcher: Launcher, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    (ended,) = launcher.run(*programs(PROGRAM, {"store": str(tmp_path / "store"), **arguments}), folder=tmp_path)

    assert ended.returncode == 1
    assert re.search(message, ended.stderr), ended.stderr
