"""Trains a unit of torchtnt, perhaps killed, and prints what is left: ``torchtnt_program.py '{...}'``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of pkg_resources, which torchtnt imports
    from torchtnt.framework import AutoUnit, EvalUnit, TrainUnit, fit
    from torchtnt.framework.callback import Callback

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from cnr_store import TableOptions
from cnr_store.integrations.torchtnt import CnrUnitCheckpoint
from tests.integrations.frameworks.trained import Samples, digests, kill, loss_of, main, new_model


class Unit(TrainUnit[Any], EvalUnit[Any]):
    """Two tables, a schedule by epoch, a count of evaluations as a state of its own."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.loss = torch.nn.MSELoss()  # a module without a state
        self.module: Any = new_model()
        if world > 1:
            self.module = torch.nn.parallel.DistributedDataParallel(self.module)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.losses: dict[int, float] = {}

    def train_step(self, state: Any, data: Any) -> None:
        self.optimizer.zero_grad()
        loss = loss_of(self.module, data)
        loss.backward()
        self.optimizer.step()
        self.losses[self.train_progress.num_steps_completed + 1] = loss.item()

    def eval_step(self, state: Any, data: Any) -> None:
        loss_of(self.module, data)

    def on_train_epoch_end(self, state: Any) -> None:
        self.schedule.step()


class Pipeline(Unit):
    """A unit that fetches by itself, two batches ahead of training."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.queue: list[Any] = []

    def get_next_train_batch(self, state: Any, data_iter: Iterator[Any]) -> Any:
        return data_iter

    def train_step(self, state: Any, data: Iterator[Any]) -> None:
        self.queue += [batch for _ in range(3 - len(self.queue)) if (batch := next(data, None)) is not None]
        if not self.queue:
            raise StopIteration
        super().train_step(state, self.queue.pop(0))


class Auto(AutoUnit[Any]):
    """An `AutoUnit`: fetches a batch ahead, accumulates gradients."""

    def __init__(self, accumulate: int) -> None:
        super().__init__(
            module=new_model(), device=torch.device("cpu"), gradient_accumulation_steps=accumulate,
            step_lr_interval="step", clip_grad_norm=1.0,
        )  # fmt: skip
        self.losses: dict[int, float] = {}

    def configure_optimizers_and_lr_scheduler(self, module: Any) -> Any:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def compute_loss(self, state: Any, data: Any) -> Any:
        loss = loss_of(self.module, data)
        if self.module.training:
            self.losses[self.train_progress.num_steps_completed + 1] = loss.item()
        return loss, None


class Killer(Callback):
    """Kills the training before the step behind ``kill_at``, or stops it there."""

    def __init__(self, kill_at: int, how: str, stop_at: int) -> None:
        self.kill_at, self.how, self.stop_at = kill_at, how, stop_at

    def on_train_step_start(self, state: Any, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == self.kill_at:
            kill(self.how)

    def on_train_step_end(self, state: Any, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == self.stop_at:
            state.stop()


def train(
    store: str, *, ranks: str = "", epochs: int | None = 2, max_steps: int | None = None, every: int | None = None,
    kill_at: int = -1, how: str = "raise", stop_at: int = -1, kind: str = "unit", accumulate: int = 1,
    evaluate: int | None = None, workers: int = 0, loader: str = "stateful",
) -> dict[str, Any]:  # fmt: skip
    """Train until the end, or until it is killed; returns digests, counts and the loss of each step."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    unit: Any = {"unit": lambda: Unit(world), "pipeline": lambda: Pipeline(world), "auto": lambda: Auto(accumulate)}[
        kind
    ]()
    checkpoint = CnrUnitCheckpoint(store, every_steps=every, options=TableOptions.exact())
    made: Any = StatefulDataLoader if loader == "stateful" else torch.utils.data.DataLoader
    sampler = StatefulDistributedSampler(Samples(world)) if world > 1 else None
    fit(
        unit, made(Samples(world), batch_size=8, shuffle=sampler is None, sampler=sampler, num_workers=workers),
        StatefulDataLoader(Samples(world), batch_size=20), max_epochs=epochs, max_steps=max_steps,
        evaluate_every_n_steps=evaluate, evaluate_every_n_epochs=None if evaluate else 1,
        callbacks=[Killer(kill_at, how, stop_at), checkpoint],
    )  # fmt: skip
    progress = {name: one.state_dict() for name, one in unit.tracked_progress().items()}
    return {
        **digests(unit.module, unit.optimizer, progress=progress),
        "losses": {str(step): loss for step, loss in unit.losses.items()},
        "restored": None if checkpoint.restored is None else checkpoint.restored.step,
    }  # fmt: skip


if __name__ == "__main__":
    main(train)
