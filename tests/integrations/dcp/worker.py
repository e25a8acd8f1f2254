"""One process of the tests of several ranks: the scenarios of 1, 2, 4, 2 and 1 ranks, one after the other."""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integrations.dcp import torch_contract  # noqa: F401 - registers its scenarios
from tests.integrations.dcp.scenarios import ACROSS, SCENARIOS, Place

WORLDS = (1, 2, 4, 2, 1)
"""Up and down again, so that what any number of ranks has saved is loaded by any other number.

Scenarios that load nothing of other ranks would do the same on the way down.
"""


def main(rank: int, results: str) -> None:
    """Run the scenarios of every world that has this rank, and write what failed."""
    folder = Path(results)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module="cnr_store")
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    problems: dict[str, str] = {}
    for turn, world in enumerate(WORLDS):
        if rank < world:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
            patience = dt.timedelta(seconds=60)
            place = f"file://{folder}/turn{turn}"
            dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world, timeout=patience)
            for name, run in (ACROSS if world in WORLDS[:turn] else SCENARIOS).items():
                run_one(name, run, Place(rank, world, turn, folder), problems)
            dist.barrier()
            dist.destroy_process_group()
    (folder / f"rank{rank}.json").write_text(json.dumps(problems))
    os._exit(0)


def run_one(name: str, run: object, place: Place, problems: dict[str, str]) -> None:
    """Run a scenario; a rank that fails ends the process, so that the others do not wait for it."""
    problems.setdefault(name, "")
    try:
        run(place)  # type: ignore[operator]
    except BaseException:  # noqa: BLE001 - whatever it is, it is the result
        problems[name] = f"rank {place.rank} of {place.world}:\n{traceback.format_exc()}"
        (place.folder / f"rank{place.rank}.json").write_text(json.dumps(problems))
        os._exit(0)
