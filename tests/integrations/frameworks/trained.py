"""What the trainings of all frameworks train, how one is killed, and what is left of it, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from tests.support.launcher import Launcher, Program
from tests.training.runs import ROWS, TwoTables

HERE = Path(__file__).parent
PER_EPOCH, BATCH = 5, 8


class Killed(Exception):
    """Ends a training in the middle of its loop, without anything being saved."""


class Samples(Dataset[Any]):
    """A user, three items, a label."""

    def __init__(self, ranks: int = 1) -> None:
        self.length = PER_EPOCH * BATCH * ranks

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        items = torch.tensor([index % 7, index % 5, index % 3])
        return index % ROWS, items, torch.tensor([float(index % 2)])


def new_model() -> TwoTables:
    torch.manual_seed(1)
    return TwoTables(sparse=False)


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    users, items, labels = batch
    loss: torch.Tensor = (model(users, items) - labels).square().mean()
    return loss


def kill(how: str) -> None:
    """End this process, or this training."""
    if how == "raise":
        raise Killed
    os.kill(os.getpid(), getattr(signal, how))


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, str]:
    """What a training depends on, as one digest for each part."""
    found = {"rng": torch.get_rng_state(), "groups": [{**one, "params": ()} for one in optimizer.param_groups], **more}
    found |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    return {name: _digest(value) for name, value in found.items()}


def _digest(value: Any) -> str:
    digest = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, dict):
            for key in sorted(one, key=str):
                digest.update(str(key).encode())
                add(one[key])
        elif isinstance(one, list | tuple):
            for item in one:
                add(item)
        elif isinstance(one, torch.Tensor):
            digest.update(one.detach().contiguous().numpy().tobytes())
        else:
            digest.update(one.tobytes() if hasattr(one, "tobytes") else repr(one).encode())

    add(value)
    return digest.hexdigest()[:12]


def join_ranks(folder: str) -> None:
    """Initialise ``torch.distributed`` from the environment, over a file instead of a port; nothing for one rank."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}", rank=int(os.environ["RANK"]), world_size=world)


def continued(expected: dict[str, Any], step: int) -> dict[str, Any]:
    """What a training prints that resumed at a step, if it continued as the ``expected`` one, which nobody killed."""
    later = {**expected, "restored": step}
    if "losses" in expected:
        later["losses"] = {at: loss for at, loss in expected["losses"].items() if int(at) > step}
    return later


def differing(train: Callable[..., dict[str, Any]], after: list[int], **options: Any) -> list[Any]:
    """Which trainings that are killed after such a step and resumed differ from one that nobody killed; [] is right."""
    expected = train(f"memory://{uuid.uuid4()}", **options)
    found = []
    for kill_at in after:
        store = f"memory://{uuid.uuid4()}"
        try:
            train(store, every=1, kill_at=kill_at, **options)
        except Killed:
            pass
        resumed, right = train(store, **options), continued(expected, kill_at)
        if resumed != right:
            found.append([kill_at, resumed["restored"], [name for name in right if right[name] != resumed[name]]])
    return found


def main(train: Callable[..., dict[str, Any]]) -> None:
    """Train as the JSON document asks that this program was given, and print what ``train`` returns.

    With ``sweep``, a list of the arguments of `differing`, print what that returns for each.
    """
    given = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")  # advice of the frameworks about workers, loggers and short epochs
    torch.set_num_threads(1)
    join_ranks(given.get("ranks", ""))
    if "sweep" in given:
        result: Any = [differing(train, **one) for one in given["sweep"]]
    else:
        result = train(**given)
    print(json.dumps(result))  # noqa: T201


def programs(file: str, arguments: dict[str, Any], ranks: int = 1) -> list[Program]:
    """A program of this folder, which takes one JSON document, on some ranks as ``torchrun`` starts them."""
    return [
        Program(
            [str(HERE / file), json.dumps(arguments)],
            {} if ranks == 1 else {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test",
            },
        )
        for rank in range(ranks)
    ]  # fmt: skip


def run(launcher: Launcher, folder: Path, file: str, *, ranks: int = 1, **arguments: Any) -> list[Any]:
    """Run a program to its end; what each rank printed last, which is JSON."""
    given = {"ranks": str(folder / f"ranks-{len(list(folder.iterdir()))}"), **arguments}
    ended = launcher.run(*programs(file, given, ranks), folder=folder)
    for one in ended:
        assert one.returncode == 0, (one.stdout, one.stderr)
    return [json.loads(one.stdout.splitlines()[-1]) for one in ended]


def run_killed(launcher: Launcher, folder: Path, file: str, *, ranks: int = 1, **arguments: Any) -> list[int]:
    """Run a program that is killed; the exit code of each rank."""
    given = {"ranks": str(folder / f"ranks-{len(list(folder.iterdir()))}"), **arguments}
    return [one.returncode for one in launcher.run(*programs(file, given, ranks), folder=folder)]
