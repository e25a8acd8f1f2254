"""Saves and restores once when it is imported: loads what optimizers import and the compiled kernels, before forks."""

from __future__ import annotations

import tempfile

import torch

from cnr_store import TableOptions
from cnr_store.training import CheckpointManager, StoreOptions, TrackingOptions
from tests.training.runs import Training


def save_and_restore() -> None:
    """Without a backward pass: torch refuses it in the forks of a process that had one."""
    training = Training()
    with tempfile.TemporaryDirectory() as folder:
        for options in (TableOptions(), TableOptions.exact()):
            for _ in range(2):
                manager = CheckpointManager(
                    f"{folder}/{options.encoding}", model=training.model, optimizer=training.optimizers,
                    options=options, store_options=StoreOptions(threads=1),
                    tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
                )  # fmt: skip
                manager.restore()
                for table in ("user.weight", "item.weight"):
                    manager.tracker.mark(table, torch.tensor([1, 2]))
                    with torch.no_grad():
                        training.model.get_parameter(table)[1] += 1
                manager.save()
                manager.close()


torch.set_num_threads(1)
save_and_restore()
