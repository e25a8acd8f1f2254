"""One rank of the tests of kinds: trains, saves, leaves and resumes a model of each kind, and writes what failed.

Four ranks as two hosts of two first, then two ranks, which alone save what is slow. A group of
processes takes seconds to start, so each runs all kinds.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

with warnings.catch_warnings():  # fbgemm's own modules warn while they are imported
    warnings.simplefilter("ignore")
    import tests.training.torchrec.kinds as kinds
    from tests.training.torchrec.refusals import REFUSALS

import numpy as np
import torch
import torch.distributed as dist

from cnr_store import TableOptions
from cnr_store.training import CheckpointManager
from tests.training.runs import assert_same

LAST, STOP = 4, 7
"""The step of the last save before the training is left, and the last step of the whole training."""


def manager_of(folder: Path, name: str, training: kinds.KindTraining, **options: Any) -> CheckpointManager:
    return CheckpointManager(
        str(folder / f"{name}.store"), model=training.dmp, optimizer=training.optimizer,
        **{"options": TableOptions.exact(), "every_steps": 2} | options,
    )  # fmt: skip


def train(training: kinds.KindTraining, start: int, stop: int, manager: CheckpointManager | None = None) -> None:
    for number in range(start, stop):
        training.train(number, dist.get_rank())
        if manager is not None:
            manager.step()


def assert_stored(manager: CheckpointManager, whole: kinds.State) -> None:
    """The newest version has these tables and slots; `kinds.whole_state` says what there is."""
    snapshot = manager.store.snapshot()
    for name, value in whole.items():
        table, _, slot = name.partition("/")
        if table in snapshot.tables:
            view = snapshot.table(table)
            assert np.array_equal(view.read(slot=slot) if slot else view.read(), value.numpy()), name
    assert {name for name in whole if name in snapshot.tables} == set(snapshot.tables)


def save_and_resume(name: str, folder: Path, rank: int) -> None:
    """Saved, left behind its last save, resumed in a model that has nothing of it: bit for bit as uninterrupted."""
    world = kinds.KINDS[name].world
    first = kinds.build_kind(name, world)
    torch.manual_seed(rank)
    manager = manager_of(folder, name, first)
    train(first, 0, LAST + 1, manager)
    manager.wait_until_finished()
    assert [one.kind for one in manager.history] == ["baseline", "delta"], manager.history

    expected = kinds.build_kind(name, world)
    torch.manual_seed(rank)
    train(expected, 0, LAST)
    saved = kinds.whole_state(expected)
    assert_stored(manager, saved)
    train(expected, LAST, STOP)

    resumed = kinds.build_kind(name, world, seed=1)
    # Its own way, and far enough: DistributedDataParallel sums in another order in its first step than in all others.
    train(resumed, 50, 52)
    manager = manager_of(folder, name, resumed)
    restored = manager.restore()
    assert restored is not None
    assert restored.step == LAST
    assert_same(kinds.whole_state(resumed), saved)
    train(resumed, LAST, STOP, manager)
    assert_same(kinds.state_of(resumed), kinds.state_of(expected))
    report = manager.save()
    assert report.kind == "delta"
    whole = kinds.whole_state(resumed)
    assert_stored(manager, whole)
    torch.save(whole, folder / f"{name}.{rank}.pt")
    manager.close()


def restore_on_fewer(name: str, folder: Path, rank: int) -> None:
    """What four ranks saved is restored in other shards, and goes on."""
    saved = torch.load(folder / f"{name}.{rank}.pt", weights_only=False)
    training = kinds.build_kind(name, 2, seed=2)
    manager = manager_of(folder, name, training)
    restored = manager.restore()
    assert restored is not None
    assert restored.step == STOP
    assert_same(kinds.whole_state(training), saved)
    train(training, STOP, STOP + 2, manager)
    manager.save()
    assert_stored(manager, kinds.whole_state(training))
    manager.close()


def join(rank: int, world: int, folder: Path, *, meeting: str = "meeting") -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % 2), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE="2")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / f'{meeting}-{world}'}", rank=rank, world_size=world,
        timeout=dt.timedelta(seconds=60),
    )  # fmt: skip


def main(rank: int, folder: str, names: str) -> None:
    """Train and resume the kinds of comma-separated ``names``."""
    prepare()
    problems: dict[str, str] = {}
    place = Path(folder)
    for world in (4, 2):
        if rank >= world:
            break
        join(rank, world, place)
        for name in names.split(","):
            if world > kinds.KINDS[name].world:
                continue
            run = save_and_resume if world == kinds.KINDS[name].world else restore_on_fewer
            attempt(partial(run, name, place, rank), f"{name} on {world} ranks", problems, place, rank)
        dist.barrier()
        dist.destroy_process_group()
    finish(problems, place, rank)


def refuse(rank: int, folder: str) -> None:
    """Run what is refused, on two ranks."""
    prepare()
    problems: dict[str, str] = {}
    place = Path(folder)
    join(rank, 2, place)
    for name, run in REFUSALS.items():
        attempt(partial(run, place, rank), name, problems, place, rank)
    dist.barrier()
    finish(problems, place, rank)


def prepare() -> None:
    warnings.simplefilter("ignore")  # TorchRec uses what torch calls deprecated
    warnings.filterwarnings("error", module="cnr_store")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)


def attempt(run: Callable[[], None], name: str, problems: dict[str, str], folder: Path, rank: int) -> None:
    """Run a check; the first that fails ends the rank, which the others see."""
    problems[name] = ""
    try:
        run()
    except BaseException:  # noqa: BLE001 - whatever it is, it is the result
        problems[name] = f"rank {rank} of {dist.get_world_size()}:\n{traceback.format_exc()}"
        finish(problems, folder, rank)


def finish(problems: dict[str, str], folder: Path, rank: int) -> None:
    """End at once: the others may wait in a collective act, and see that this one is gone."""
    (folder / f"rank{rank}.json").write_text(json.dumps(problems))
    os._exit(0)
