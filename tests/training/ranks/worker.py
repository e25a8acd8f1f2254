"""One process of the tests of several ranks: runs the scenarios of one round and writes what failed.

A group of processes takes seconds to start, so each runs many scenarios, first with all ranks, then with fewer.
"""

from __future__ import annotations

import datetime as dt
import importlib
import importlib.util
import json
import logging
import os
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.ranks.scenarios import SCENARIOS, Place

WORLDS = {1: (4, 2), 2: (2, 1), 3: (4, 2)}
"""By round: the numbers of ranks, one after the other; the first is how many processes there are. 3 is the soak."""
MODULES = ("sharded", "copies", "failing", "readers", "growing")


def load() -> None:
    for name in MODULES:
        if name != "sharded" or importlib.util.find_spec("torchrec") is not None:
            importlib.import_module(f"tests.training.ranks.{name}")
    assert SCENARIOS.keys() <= {(number, world) for number, worlds in WORLDS.items() for world in worlds}


def join(stage: int, place: Place) -> None:
    """Become a rank of so many; a training of one knows nothing of others."""
    world, rank = str(place.world), str(place.rank)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    if place.world > 1:
        rendezvous = f"file://{place.folder}/round{stage}-of{world}"
        patience = dt.timedelta(seconds=60)
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=place.rank, world_size=place.world, timeout=patience
        )


def main(stage: int, rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")  # TorchRec uses what torch calls deprecated
    warnings.filterwarnings("error", module="cnr_store")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    problems: dict[str, str] = {}
    for world in WORLDS[stage]:
        if rank >= world:
            break
        place = Place(rank, world, Path(folder))
        join(stage, place)
        for name, run in SCENARIOS.get((stage, world), {}).items():
            problems[name] = ""
            try:
                run(place)
            except BaseException:  # noqa: BLE001 - whatever it is, it is the result
                problems[name] = f"round {stage}, rank {rank} of {world}:\n{traceback.format_exc()}"
                finish(problems, stage, rank, Path(folder))
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
    finish(problems, stage, rank, Path(folder))


def finish(problems: dict[str, str], stage: int, rank: int, folder: Path) -> None:
    """End at once, whatever is under way: the others see that this one is gone, and the second round resumes it."""
    (folder / f"round{stage}-rank{rank}.json").write_text(json.dumps(problems))
    os._exit(0)


load()
