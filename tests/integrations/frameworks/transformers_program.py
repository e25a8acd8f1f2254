"""Trains with a Trainer, perhaps killed, and prints what is left: ``transformers_program.py '{...}'``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState, PrinterCallback
from transformers.utils import logging

from cnr_store import TableOptions
from cnr_store.integrations.transformers import CnrTrainerCheckpoint
from cnr_store.training import SavePolicy
from tests.integrations.frameworks.trained import Samples, digests, kill, loss_of, main, new_model

logging.set_verbosity_error()


class Net(torch.nn.Module):
    """The model as a trainer calls it: by names, and it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = new_model()

    def forward(self, users: Any, items: Any, labels: Any) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.net, (users, items, labels))}


class Watch(TrainerCallback, ExportableState):
    """Notes losses, counts evaluations as a state of its own, and is killed before the step behind ``kill_at``."""

    def __init__(self, kill_at: int = -1, how: str = "raise", stop_epoch_at: int = -1) -> None:
        self.kill_at, self.how, self.stop_epoch_at = kill_at, how, stop_epoch_at
        self.losses: dict[int, float] = {}
        self.evaluated = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"evaluated": self.evaluated}}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A regression: a training that was killed left the folder from which the trainer reads its step.
        assert not list(Path(args.output_dir).glob("cnr-trainer-*"))
        if state.global_step == self.kill_at:
            self.kill_at = -1
            kill(self.how)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == self.stop_epoch_at

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.evaluated += 1


class Records(Samples):
    """The samples by name, as trainers take them."""

    def __getitem__(self, index: int) -> Any:
        users, items, labels = super().__getitem__(index)
        return {"users": users, "items": items, "labels": labels}


class Endless(torch.utils.data.IterableDataset[Any]):
    """The samples without a length."""

    def __iter__(self) -> Any:
        samples = Records()
        return (samples[index] for index in range(len(samples)))


def train(
    store: str, *, ranks: str = "", epochs: int = 2, max_steps: int = -1, every: int | None = None, kill_at: int = -1,
    how: str = "raise", accumulate: int = 1, evaluate: float = 0, workers: int = 0, seedable: bool = True,
    stop_epoch_at: int = -1, endless: bool = False, direct: bool = False, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train until the end, or until it is killed; returns digests, counts and the loss of each step."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    policy = SavePolicy(save_on_sigterm="flag" if how == "SIGTERM" else False)
    checkpoint = CnrTrainerCheckpoint(store, every_steps=every, options=TableOptions.exact(), save_policy=policy)
    watch = Watch(kill_at, how, stop_epoch_at)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
        arguments = TrainingArguments(
            folder, num_train_epochs=epochs, max_steps=max_steps, use_cpu=True, report_to="none", save_strategy="no",
            disable_tqdm=True, logging_steps=1, per_device_train_batch_size=8, learning_rate=0.01,
            gradient_accumulation_steps=accumulate, eval_strategy="steps" if evaluate else "no",
            eval_steps=evaluate or None, dataloader_num_workers=workers,
            accelerator_config={"use_seedable_sampler": seedable}, **more,
        )  # fmt: skip
        trainer = Trainer(
            Net(), arguments, train_dataset=Endless() if endless else Records(world), eval_dataset=Records(world),
            callbacks=[checkpoint, watch],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        if direct:
            trainer.train()
        checkpoint.train(trainer)
    return {
        **digests(trainer.model, trainer.optimizer, step=trainer.state.global_step, epoch=trainer.state.epoch),
        "evaluated": watch.evaluated, "schedule": trainer.lr_scheduler.state_dict()["_last_lr"],
        "losses": {str(step): loss for step, loss in watch.losses.items()},
        "restored": None if checkpoint.restored is None else checkpoint.restored.step,
    }  # fmt: skip


if __name__ == "__main__":
    main(train)
