"""A training with torchtnt and the callback is killed and goes on as if nobody had killed it, bit for bit."""

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

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchtnt") is None, reason="torchtnt is not installed")
PROGRAM = "torchtnt_program.py"


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher("torchtnt.framework", "cnr_store.training", "torchdata.stateful_dataloader")
    yield launcher
    launcher.close()


@pytest.mark.parametrize("kind", ["unit", "auto"])
def test_a_unit_killed_with_sigkill_resumes_bit_equal(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    (expected,) = run(launcher, tmp_path, PROGRAM, store=str(tmp_path / "calm"), kind=kind)
    store = str(tmp_path / "store")

    codes = run_killed(launcher, tmp_path, PROGRAM, store=store, every=1, kill_at=7, how="SIGKILL", kind=kind)
    (resumed,) = run(launcher, tmp_path, PROGRAM, store=store, kind=kind)

    assert codes == [-signal.SIGKILL]
    assert resumed["restored"] in (6, 7)
    assert resumed == continued(expected, resumed["restored"])
    assert list(resumed["losses"])[-1] == "10"


def test_units_resume_bit_equal_around_epochs_and_evaluations(launcher: Launcher, tmp_path: Path) -> None:
    sweep = [
        {"after": [4, 5, 6], "evaluate": 2},
        {"after": [4, 5]},
        {"after": [3], "epochs": None, "max_steps": 8},
        {"after": [5], "workers": 1},
        {"after": [4, 5, 6], "kind": "auto"},
        {"after": [2, 4, 5], "kind": "auto", "accumulate": 2},
        {"after": [3, 5], "kind": "pipeline"},
    ]

    assert run(launcher, tmp_path, PROGRAM, sweep=sweep) == [[[]] * len(sweep)]


def test_two_ranks_of_a_unit_resume_bit_equal(launcher: Launcher, tmp_path: Path) -> None:
    expected = run(launcher, tmp_path, PROGRAM, ranks=2, store=str(tmp_path / "calm"))
    store = str(tmp_path / "store")

    run_killed(launcher, tmp_path, PROGRAM, ranks=2, store=store, every=1, kill_at=7, how="SIGKILL")
    resumed = run(launcher, tmp_path, PROGRAM, ranks=2, store=store)

    assert resumed[0]["restored"] in (6, 7)
    assert resumed == [continued(one, resumed[0]["restored"]) for one in expected]


@pytest.mark.parametrize(
    ("first", "step"), [({"epochs": 2}, 10), ({"epochs": None, "max_steps": 8}, 8), ({"epochs": 3, "stop_at": 7}, 7)]
)
def test_a_training_of_a_unit_that_ended_can_go_on_longer(
    launcher: Launcher, tmp_path: Path, first: dict[str, Any], step: int
) -> None:
    expected = run(launcher, tmp_path, PROGRAM, store=str(tmp_path / "calm"), epochs=3)
    store = str(tmp_path / "store")

    run(launcher, tmp_path, PROGRAM, store=store, **first)
    resumed = run(launcher, tmp_path, PROGRAM, store=store, epochs=3)

    assert resumed == [continued(expected[0], step)]
    with Store.open(store) as opened:
        assert opened.steps() == [step, 15]


def test_a_unit_with_a_loader_without_a_state_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    (ended,) = launcher.run(*programs(PROGRAM, {"store": str(tmp_path), "loader": "plain"}), folder=tmp_path)

    assert ended.returncode == 1
    assert re.search(r"the train dataloader is a DataLoader, which has no state_dict\(\)", ended.stderr), ended.stderr
