"""A training with a framework and its adapter is killed and goes on as if nobody had killed it, bit for bit."""

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
from tests.integrations.frameworks.trained import continued, programs, run, run_killed
from tests.support.launcher import REPOSITORY, Launcher, Program
from tests.support.pages import python_blocks

MODULES = {
    "accelerate": ("cnr_store.integrations.accelerate",),
    "lightning": ("cnr_store.integrations.lightning",),
    "torchtnt": ("torchtnt.framework", "torchdata.stateful_dataloader"),
    "transformers": ("transformers.trainer", "accelerate"),
}
"""What the programs of a framework import."""
SWEEPS: dict[str, list[dict[str, Any]]] = {
    "accelerate": [
        {"after": [4, 5, 6]},
        {"after": [2, 3], "accumulate": 2},
        {"after": [4, 5], "seedable": True},
        {"after": [5], "workers": 1},
    ],
    "lightning": [
        {"after": [4, 5, 6], "validate": 1.0},
        {"after": [2, 5], "validate": 0.4, "seeded": True},
        {"after": [3, 5], "max_steps": 8},
        {"after": [2, 3], "accumulate": 2},
        {"after": [2, 5], "averages": True, "validate": 1.0},
        {"after": [5, 6, 7], "scheduled": True},
        {"after": [5], "workers": 1},
    ],
    "torchtnt": [
        {"after": [4, 5, 6], "evaluate": 2},
        {"after": [4, 5]},
        {"after": [3], "epochs": None, "max_steps": 8},
        {"after": [5], "workers": 1},
        {"after": [4, 5, 6], "kind": "auto"},
        {"after": [2, 4, 5], "kind": "auto", "accumulate": 2},
        {"after": [3, 5], "kind": "pipeline"},
    ],
    "transformers": [
        {"after": [4, 5, 6], "evaluate": 2},
        {"after": [2, 3, 4], "accumulate": 2},
        {"after": [3, 5], "max_steps": 8, "seedable": False},
        {"after": [5, 6], "workers": 1},
    ],
}
"""Trainings that are killed after these steps: around ends of epochs, validations and accumulated batches."""
EXAMPLES = python_blocks(REPOSITORY / "docs" / "frameworks.md")
LOADER = """
import warnings
warnings.simplefilter("ignore")
from torchdata.stateful_dataloader import StatefulDataLoader
from tests.integrations.frameworks.trained import Samples, loss_of as compute_loss, new_model
loader = StatefulDataLoader(Samples(), batch_size=8)
"""
READERS_OWN = {
    "lightning": "from tests.integrations.frameworks.lightning_program import Module; module = Module(-1, '')",
    "accelerate": "import torch; model = new_model(); optimizer = torch.optim.Adam(model.parameters())",
    "transformers": "from tests.integrations.frameworks.transformers_program import Net, Records; "
    "model, dataset = Net(), Records()",
    "torchtnt": "from tests.integrations.frameworks.torchtnt_program import Unit; unit = Unit(1)",
}
"""What the example of a framework takes from the reader's own program, in the order of docs/frameworks.md."""
STEPS = "from cnr_store import Store; print(Store.open('run-7').steps())"
NO_STATE = r"the train dataloader is a DataLoader, which has no state_dict\(\)"


@pytest.fixture(params=list(MODULES))
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """One for the programs of all frameworks: most of what these import is the same, and takes 4 to 9 s of CPU each."""
    there = [module for name, modules in MODULES.items() if importlib.util.find_spec(name) for module in modules]
    with closing(Launcher("tests.support.warm_training", *there)) as started:
        yield started


def program_of(framework: str) -> str:
    return f"{framework}_program.py"


def cases(**found: list[Any]) -> pytest.MarkDecorator:
    """Each framework with each of its cases."""
    pairs = [(name, case) for name, ones in found.items() for case in ones]
    return pytest.mark.parametrize(("framework", "case"), pairs, indirect=["framework"])


@cases(accelerate=[{}], lightning=[{}], torchtnt=[{"kind": "unit"}, {"kind": "auto"}], transformers=[{}])
def test_a_training_killed_with_sigkill_resumes_bit_equal(
    launcher: Launcher, framework: str, case: dict[str, Any], tmp_path: Path
) -> None:
    program, store = program_of(framework), str(tmp_path / "store")
    (expected,) = run(launcher, tmp_path, program, store=str(tmp_path / "calm"), **case)

    codes = run_killed(launcher, tmp_path, program, store=store, every=1, kill_at=7, how="SIGKILL", **case)
    (resumed,) = run(launcher, tmp_path, program, store=store, **case)

    assert codes == [-signal.SIGKILL]
    assert resumed["restored"] in (6, 7)
    assert resumed == continued(expected, resumed["restored"])
    assert list(resumed.get("losses", ["10"]))[-1] == "10"


def test_a_training_resumes_bit_equal_around_epochs(launcher: Launcher, framework: str, tmp_path: Path) -> None:
    sweep = SWEEPS[framework]

    assert run(launcher, tmp_path, program_of(framework), sweep=sweep) == [[[]] * len(sweep)]


@cases(accelerate=[{"seedable": True}], lightning=[{}], torchtnt=[{}], transformers=[{}])
def test_two_ranks_resume_bit_equal(launcher: Launcher, framework: str, case: dict[str, Any], tmp_path: Path) -> None:
    program, store = program_of(framework), str(tmp_path / "store")
    expected = run(launcher, tmp_path, program, ranks=2, store=str(tmp_path / "calm"), **case)

    run_killed(launcher, tmp_path, program, ranks=2, store=store, every=1, kill_at=7, how="SIGKILL", **case)
    resumed = run(launcher, tmp_path, program, ranks=2, store=store, **case)

    assert resumed[0]["restored"] in (6, 7)
    assert resumed == [continued(one, resumed[0]["restored"]) for one in expected]


# The signal comes in step 7; a transformers.Trainer ends behind the next one.
@cases(lightning=[7], transformers=[8])
def test_a_training_saves_when_sigterm_ends_it(launcher: Launcher, framework: str, case: int, tmp_path: Path) -> None:
    program, store = program_of(framework), str(tmp_path / "store")
    expected = run(launcher, tmp_path, program, store=str(tmp_path / "calm"))

    run_killed(launcher, tmp_path, program, store=store, kill_at=6, how="SIGTERM")
    resumed = run(launcher, tmp_path, program, store=store)

    assert resumed == [continued(expected[0], case)]


@cases(
    # Lightning replaces the weights by averages when a training ends: what it trains must be saved before.
    lightning=[({"epochs": 2}, {}, 10), ({"epochs": 2}, {"averages": True}, 10)],
    torchtnt=[
        ({"epochs": 2}, {}, 10),
        ({"epochs": None, "max_steps": 8}, {}, 8),
        ({"epochs": 3, "stop_at": 7}, {}, 7),
    ],
    transformers=[({"epochs": 2}, {"lr_scheduler_type": "constant"}, 10)],
)
def test_a_training_that_ended_can_go_on_longer(
    launcher: Launcher, framework: str, case: tuple[dict[str, Any], dict[str, Any], int], tmp_path: Path
) -> None:
    (first, given, step), program, store = case, program_of(framework), str(tmp_path / "store")
    expected = run(launcher, tmp_path, program, store=str(tmp_path / "calm"), epochs=3, **given)

    run(launcher, tmp_path, program, store=store, **first, **given)
    resumed = run(launcher, tmp_path, program, store=store, epochs=3, **given)

    assert resumed == [continued(expected[0], step)]
    with Store.open(store) as opened:
        assert opened.steps() == [step, 15]


@cases(
    accelerate=[(1, {"stateful": False}, r"the loader has no state.*use_stateful_dataloader=True")],
    lightning=[
        (1, {"strange": True, "every": 1}, r"callbacks.*Counting.*seen.* is a builtins\.set, which cannot be stored"),
        (1, {"loader": "plain"}, NO_STATE),
        (2, {"wrapped": True}, r"Lightning has wrapped the sampler"),
    ],
    torchtnt=[(1, {"loader": "plain"}, NO_STATE)],
    transformers=[
        (1, {"direct": True}, r"call CnrTrainerCheckpoint\.train\(trainer\)"),
        (1, {"endless": True, "max_steps": 8}, r"the train dataset has no length"),
        (1, {"auto_find_batch_size": True}, r"auto_find_batch_size=True: .*; leave it out"),
        (1, {"ignore_data_skip": True}, r"ignore_data_skip=True: a resumed training would begin the epoch again"),
        (1, {"stop_epoch_at": 3}, r"a callback ended an epoch at step 3"),
    ],
)
def test_what_would_be_in_no_checkpoint_is_refused(
    launcher: Launcher, framework: str, case: tuple[int, dict[str, Any], str], tmp_path: Path
) -> None:
    ranks, arguments, message = case
    given = {"store": str(tmp_path / "store"), "ranks": str(tmp_path / "ranks"), **arguments}

    for ended in launcher.run(*programs(program_of(framework), given, ranks), folder=tmp_path):
        assert ended.returncode == 1
        assert re.search(message, ended.stderr), ended.stderr


def example(framework: str, at: int) -> Program:
    """An example of docs/frameworks.md as it stands, in a folder in place of the bucket."""
    text = EXAMPLES[at].replace("s3://bucket/", "").replace("every_steps=100", "every_steps=5")
    return Program(["-c", "\n".join([LOADER, READERS_OWN[framework], text, STEPS])])


def test_the_example_of_a_framework(launcher: Launcher, framework: str, tmp_path: Path) -> None:
    (ended,) = launcher.run(example(framework, list(READERS_OWN).index(framework)), folder=tmp_path)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[5, 10, 15]"
    if framework == "lightning":  # the last example evaluates what this training left
        (ended,) = launcher.run(example(framework, -1), folder=tmp_path)

        assert ended.stdout == "15\n[5, 10, 15]\n", ended.stderr
