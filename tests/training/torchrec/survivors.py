"""A killed rank of a sharded model is replaced: the others build their models anew, and keep their live rows.

Sharded modules hold the process groups that they were built with, so survivors need new modules.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tests.training.torchrec.kinds as kinds
from cnr_store.integrations.torchrec import forget_process_groups
from tests.training.runs import assert_same
from tests.training.torchrec.kinds_worker import LAST, assert_stored, join, manager_of, prepare, train

BEFORE = LAST + 1
"""The step before which the rank is killed, one behind the last save."""


def main(rank: int, folder: str, kind: str, lost: int, is_new: bool) -> None:
    """Train as a rank; ``is_new``: as the process that takes the place of the lost one.

    The dense layer is under DistributedDataParallel, with an optimizer of its own.
    """
    prepare()
    place = Path(folder)
    survivor, before = None, kinds.State()
    if is_new:
        deadline = time.monotonic() + 200
        while not (place / "lost").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    else:
        join(rank, 4, place)
        training = kinds.build_kind(kind, 4)
        manager = manager_of(place, "survived", training)
        train(training, 0, BEFORE, manager)
        manager.wait_until_finished()
        dist.barrier()
        if rank == lost:
            (place / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            train(training, BEFORE, BEFORE + 1, manager)
        except RuntimeError:
            survivor = manager.survivor()
        assert survivor is not None
        before = kinds.state_of(training)
        torch.save(before, place / f"before.{rank}.pt")
        dist.destroy_process_group()
        forget_process_groups()

    join(rank, 4, place, meeting="again")
    drawn = torch.get_rng_state()
    training = kinds.build_kind(kind, 4, seed=3)
    torch.set_rng_state(drawn)
    manager = manager_of(place, "survived", training)
    restored = manager.restore(survivor=survivor)
    assert restored is not None
    assert (restored.step, restored.lost_ranks, restored.stale_steps) == (BEFORE, (lost,), BEFORE - LAST)

    found = kinds.state_of(training)
    if is_new:
        # Its rows are of the last save; what all ranks have alike is of a survivor: compared with a run of its own.
        source = torch.load(place / f"before.{min({0, 1, 2, 3} - {lost})}.pt", weights_only=False)
        before = {name: source[name] for name in found if name.startswith("dense.") or name.endswith("/iter")}
        found = {name: found[name] for name in before}
        assert {"dense.weight@0,0", "dense.weight/sum@0,0"} <= before.keys()
    assert_same(found, before)
    train(training, BEFORE, BEFORE + 2, manager)
    report = manager.save()
    assert report.kind == "delta"
    assert_stored(manager, kinds.whole_state(training))
    manager.close()
    dist.barrier()
    if rank == 0:
        (place / "recovered").touch()
    os._exit(0)
