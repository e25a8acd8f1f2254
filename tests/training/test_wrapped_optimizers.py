"""Optimizers inside the wrappers of other libraries are followed as if they were passed themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cnr_store import BadInput, TableOptions
from cnr_store.training import CheckpointManager, load
from tests.training.runs import ROWS, Training, assert_same, go_on

EXACT = TableOptions.exact()
Wrap = Callable[[torch.optim.Optimizer], Any]


class AcceleratedOptimizer(torch.optim.Optimizer):
    """The shape of Accelerate's: an optimizer that never ran the base class's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class LightningOptimizer:
    """The shape of Lightning's: it takes on a class that inherits from the optimizer's, and has a public property."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (self.__class__, type(optimizer)), {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)


def of_accelerate(optimizer: torch.optim.Optimizer) -> Any:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    return accelerate.Accelerator(cpu=True).prepare(optimizer)


def of_fabric(optimizer: torch.optim.Optimizer) -> Any:
    found = pytest.importorskip("lightning.fabric", reason="lightning is not installed")
    return found.Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer)


@pytest.mark.parametrize("wrap", [AcceleratedOptimizer, LightningOptimizer, of_accelerate, of_fabric])
def test_a_run_with_wrapped_optimizers_saves_deltas_and_resumes(wrap: Wrap) -> None:
    url = f"memory://wrapped-{wrap.__name__}"
    training = Training("sparse_adam")
    wrapped = [wrap(one) for one in training.optimizers]
    plain, training.optimizers = training.optimizers, wrapped
    with CheckpointManager(url, model=training.model, optimizer=wrapped, every_steps=1, options=EXACT) as manager:
        go_on(training, manager, 0, 3)
        manager.wait_until_finished()
        kinds = [report.kind for report in manager.history]
    training.optimizers = plain

    other = Training("sparse_adam")
    load(url, other.model, optimizer=[wrap(one) for one in other.optimizers])

    assert kinds == ["baseline", "delta", "delta"]
    expected = {name: value for name, value in training.state().items() if name != "rng"}
    assert_same({name: value for name, value in other.state().items() if name != "rng"}, expected)


def test_lightning_trains_with_its_own_optimizers_and_saves_deltas() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    training = Training("sparse_adam")
    managers: list[CheckpointManager] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.tables = False, training.model

        def configure_optimizers(self) -> Any:
            return training.optimizers

        def on_train_start(self) -> None:
            training.optimizers = self.optimizers()
            manager = CheckpointManager(
                "memory://wrapped-lightning", model=training.model, optimizer=training.optimizers, every_steps=1
            )
            managers.append(manager)

        def training_step(self, batch: Any, number: int) -> None:
            training.train(number)
            managers[0].step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its advice about loaders and loggers
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader(list(range(3))))
    managers[0].close()

    assert type(training.optimizers[0]).__name__ == "LightningSparseAdam"
    assert [report.kind for report in managers[0].history] == ["baseline", "delta", "delta"]


def test_an_unknown_wrapper_is_refused_with_the_remedy() -> None:
    model = nn.Embedding(ROWS, 4)

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.inner = optimizer

    wrapped = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(BadInput, match=r"Lookahead wraps another optimizer.*pass the optimizer that it wraps"):
        CheckpointManager("memory://never-made", model=model, optimizer=wrapped)
    assert not model._forward_pre_hooks


def test_what_is_no_optimizer_is_refused_with_its_class() -> None:
    model = nn.Embedding(ROWS, 4)

    with pytest.raises(BadInput, match="Embedding is no torch"):
        CheckpointManager("memory://never-made", model=model, optimizer=[model])  # type: ignore[list-item]
