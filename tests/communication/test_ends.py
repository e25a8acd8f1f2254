"""A group whose models are gone is really destroyed: a thread of gloo that is left can abort the interpreter's end."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cnr_store.communication import ThresholdedGradients
from tests.communication.models import Clicks
from tests.support.launcher import Launcher, Program

_RUN = "import sys; from tests.communication.test_ends import main; main(sys.argv[1])"


def train() -> None:
    """A backward pass of a model that ends in a reference cycle."""
    model = DistributedDataParallel(Clicks().layers)
    hook = ThresholdedGradients()
    hook.register(model)
    model(torch.randn(4, 20)).sum().backward()
    cycle: list[object] = [model, hook]
    cycle.append(cycle)


def main(meeting: str) -> None:
    """Print the number of threads with a group, and after it is destroyed."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    train()
    with_group = len(list(Path("/proc/self/task").iterdir()))
    gc.collect()
    dist.destroy_process_group()
    print(with_group, len(list(Path("/proc/self/task").iterdir())))  # noqa: T201


def test_no_thread_of_gloo_is_left_without_the_group(launcher: Launcher, tmp_path: Path) -> None:
    (ended,) = launcher.run(Program(["-c", _RUN, str(tmp_path / "meeting")]), folder=tmp_path)

    assert ended.returncode == 0, ended.stderr
    with_group, without = map(int, ended.stdout.split())
    assert with_group > 1
    assert without == 1
