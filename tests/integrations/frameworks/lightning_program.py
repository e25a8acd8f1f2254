"""Trains with Lightning and the callback, perhaps killed, and prints what is left: ``lightning_program.py '{...}'``."""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from cnr_store import TableOptions
from cnr_store.integrations.lightning import CnrCheckpoint
from tests.integrations.frameworks.trained import Samples, digests, kill, loss_of, main, new_model

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(LightningModule):
    """Two tables; is killed before the step behind ``kill_at``."""

    def __init__(self, kill_at: int, how: str) -> None:
        super().__init__()
        self.net, self.kill_at, self.how = new_model(), kill_at, how
        self.validated = 0

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if self.global_step == self.kill_at:
            self.kill_at = -1
            kill(self.how)
        return loss_of(self.net, batch)

    def validation_step(self, batch: Any, number: int) -> None:
        self.validated += not self.trainer.sanity_checking
        self.log("loss", loss_of(self.net, batch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["validated"] = self.validated

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.validated = checkpoint["validated"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Counting(Callback):
    """A callback with a state; ``strange`` is one that no document holds."""

    def __init__(self, strange: bool) -> None:
        self.batches, self.strange = 0, strange

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, **({"seen": {1, 2}} if self.strange else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


def train(
    store: str, *, ranks: str = "", epochs: int = 2, max_steps: int = -1, every: int | None = None, kill_at: int = -1,
    how: str = "raise", accumulate: int = 1, validate: float = 0.0, workers: int = 0, seeded: bool = False,
    strange: bool = False, loader: str = "stateful", wrapped: bool = False,
    averages: bool = False, scheduled: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train until the end, or until it is killed; returns digests and counts."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    module, counting = Module(kill_at, how), Counting(strange)
    callback = CnrCheckpoint(store, every_steps=every, options=TableOptions.exact())
    callbacks = [callback, counting]
    callbacks += [EMAWeightAveraging(decay=0.9)] if averages else []
    callbacks += [GradientAccumulationScheduler({0: 1, 1: 2})] if scheduled else []
    trainer = Trainer(
        max_epochs=epochs if max_steps < 0 else None, max_steps=max_steps, callbacks=callbacks, logger=False,
        accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", accumulate_grad_batches=accumulate,
        val_check_interval=validate or 1.0, limit_val_batches=1.0 if validate else 0, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5) if seeded else None
    made = StatefulDataLoader if loader == "stateful" else torch.utils.data.DataLoader
    sampler = StatefulDistributedSampler(Samples(world)) if world > 1 and not wrapped else None
    trainer.fit(
        module,
        made(
            Samples(world),
            batch_size=8,
            shuffle=sampler is None,
            sampler=sampler,
            num_workers=workers,
            generator=generator,
        ),
        StatefulDataLoader(Samples(world), batch_size=20),
    )
    return {
        **digests(module, trainer.optimizers[0], step=trainer.global_step, epoch=trainer.current_epoch),
        "validated": module.validated, "batches": counting.batches,
        "restored": None if callback.restored is None else callback.restored.step,
    }  # fmt: skip


if __name__ == "__main__":
    main(train)
