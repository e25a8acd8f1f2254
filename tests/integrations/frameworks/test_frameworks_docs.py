"""The examples of docs/frameworks.md run as they stand, in a folder in place of the bucket, and leave checkpoints."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launcher import REPOSITORY, Launcher, Program
from tests.support.pages import python_blocks

EXAMPLES = python_blocks(REPOSITORY / "docs" / "frameworks.md")
LOADER = """
import warnings
warnings.simplefilter("ignore")
from torchdata.stateful_dataloader import StatefulDataLoader
from tests.integrations.frameworks.trained import Samples, loss_of as compute_loss, new_model
loader = StatefulDataLoader(Samples(), batch_size=8)
"""
MODULE = "from tests.integrations.frameworks.lightning_program import Module; module = Module(-1, '')"
TRAINER = (
    "from tests.integrations.frameworks.transformers_program import Net, Records; model, dataset = Net(), Records()"
)
READERS_OWN = {
    "lightning": MODULE,
    "accelerate": "import torch; model = new_model(); optimizer = torch.optim.Adam(model.parameters())",
    "transformers": TRAINER,
    "torchtnt": "from tests.integrations.frameworks.torchtnt_program import Unit; unit = Unit(1)",
    "evaluation": MODULE,
}
"""What an example takes from the reader's own program; the last one reads what the first one left."""
STEPS = "from cnr_store import Store; print(Store.open('run-7').steps())"


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher("cnr_store.training", "torchdata.stateful_dataloader")
    yield launcher
    launcher.close()


def example(name: str) -> Program:
    at = -1 if name == "evaluation" else list(READERS_OWN).index(name)
    text = EXAMPLES[at].replace("s3://bucket/", "").replace("every_steps=100", "every_steps=5")
    return Program(["-c", "\n".join([LOADER, READERS_OWN[name], text, STEPS])])


@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers", "torchtnt"])
def test_the_example_of_a_framework(launcher: Launcher, tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")

    (ended,) = launcher.run(example(name), folder=tmp_path)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[5, 10, 15]"


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_the_example_of_an_evaluation_reads_what_a_training_left(launcher: Launcher, tmp_path: Path) -> None:
    launcher.run(example("lightning"), folder=tmp_path)
    (ended,) = launcher.run(example("evaluation"), folder=tmp_path)

    assert ended.stdout == "15\n[5, 10, 15]\n", ended.stderr
