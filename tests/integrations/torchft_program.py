"""A replica group of one process under torchft, which trains with another one; group 0 saves.

A group that begins anew takes its state from the other one, and does not restore.
"""

from __future__ import annotations

import datetime as dt
import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from cnr_store import TableOptions
from cnr_store.runtime.ranks import OneRank
from cnr_store.training import CheckpointManager, StoreOptions

ROWS, DIM, WAIT_S = 50, 4, 60


class Model(nn.Module):
    """A table and a layer, different in each process before torchft has copied it."""

    def __init__(self, group: int) -> None:
        super().__init__()
        torch.manual_seed(group)
        self.table = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.out = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.table(ids))
        return found


def train(folder: Path, group: int, steps: int, dies: int) -> None:
    """Train to a step, and write the steps and the end; killed after ``dies`` steps with the other group."""
    torchft: Any = importlib.import_module("torchft")
    model = Model(group)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    limit = dt.timedelta(seconds=WAIT_S)
    replicas = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit), min_replica_size=1, replica_id=f"group{group}",
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        timeout=limit, quorum_timeout=limit, use_async_quorum=False,
        load_state_dict=load, state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    )  # fmt: skip
    ddp, stepper = torchft.DistributedDataParallel(replicas, model), torchft.Optimizer(replicas, optimizer)
    saver = None
    if group == 0:
        saver = CheckpointManager(
            str(folder / "store"), model=model, optimizer=optimizer, options=TableOptions.exact(),
            store_options=StoreOptions(threads=1, ranks=OneRank()),
        )  # fmt: skip
    shared = 0
    while (step := replicas.current_step()) < steps:
        if shared == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        stepper.zero_grad()  # the quorum: a group that begins anew gets its state here
        ids = torch.randint(0, ROWS, (8, 3), generator=torch.Generator().manual_seed(2 * step + group))
        ddp(ids).sum().backward()
        stepper.step()
        with open(folder / f"{group}.txt", "a") as file:
            file.write(f"{replicas.current_step()} {replicas.num_participants()}\n")
        if saver is not None:
            saver.step(replicas.current_step())
            saver.save()
        shared += replicas.num_participants() == 2
        time.sleep(1.0 if replicas.num_participants() == 1 else 0.0)  # so that the other one is back before the end
    np.savez(folder / f"{group}.npz", **{name: tensor.numpy() for name, tensor in model.state_dict().items()})
    if saver is not None:
        saver.close()
    replicas.shutdown()


def train_twice(folder: Path, group: int, steps: int, dies: int) -> None:
    """Train in a process that is killed after ``dies`` steps with the other group, then anew in this one."""
    first = os.fork()
    if first == 0:
        train(folder, group, steps, dies)
        os._exit(1)  # it was not killed
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == -signal.SIGKILL
    (folder / "before.txt").write_text((folder / f"{group}.txt").read_text())
    train(folder, group, steps, -1)
