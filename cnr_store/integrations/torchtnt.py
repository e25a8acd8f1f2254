"""torchtnt: a callback that saves and restores the training of a unit in a store.

```python
from torchtnt.framework import train
from cnr_store.integrations.torchtnt import CnrUnitCheckpoint

train(unit, loader, max_epochs=3, callbacks=[CnrUnitCheckpoint("s3://bucket/run-7", every_steps=100)])
```

It never pickles. Needs torchtnt; importing this module without it raises `MissingDependency`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from cnr_store.errors import BadInput, Unsupported
from cnr_store.integrations.frameworks import TrainingInStore, missing_framework
from cnr_store.training import CheckpointManager
from cnr_store.training.reader import check_stateful, resume
from cnr_store.training.shards import unwrapped

try:
    from torchtnt.framework.callback import Callback
    from torchtnt.framework.state import State
    from torchtnt.framework.unit import TrainUnit
except ImportError as error:
    raise missing_framework("callback for torchtnt", "torchtnt") from error

__all__ = ["CnrUnitCheckpoint"]

logger = logging.getLogger(__name__)

_FETCHED_AHEAD = 16
"""Batches that a unit may have fetched and not trained: pipelines fetch two or three."""


class CnrUnitCheckpoint(TrainingInStore, Callback):
    """Saves the training of a unit to a store, and goes on from what the store holds when ``train`` or ``fit`` begins.

    A checkpoint has what the unit tracks (modules with optimizers and table slots, learning rate schedulers, progress,
    other objects with a state), the position of the loader of each rank, and random generators of each rank. A step is
    one ``train_step``; between accumulated batches a save that is due waits for the optimizer. The end of a training
    saves, too. Put it behind callbacks that may stop the training. Parameters and attributes are those of
    `TrainingInStore`.

    Raises
    ------
    BadInput
        When the training begins: what a `CheckpointManager` refuses; a unit without a module; a loader without a state.
    Unsupported
        When the training begins: a module that FSDP shards; use `cnr_store.integrations.dcp`. In a save: a unit that
        has fetched more than 16 batches ahead.
    """

    def on_train_start(self, state: State, unit: TrainUnit[Any]) -> None:
        """Attach to the unit's modules and restore; no batch is read."""
        self._batches = _TrainBatches(unit, state.train_state.dataloader)
        extras = unit.tracked_lr_schedulers() | unit.tracked_progress() | unit.tracked_misc_statefuls()
        extras = {name: one for name, one in extras.items() if one is not self._batches.loader}
        manager = CheckpointManager(
            self._store, model=_model_of(unit), optimizer=list(unit.tracked_optimizers().values()),
            reader=self._batches, extras={**extras, **self._extras}, **self._options,
        )  # fmt: skip
        self._begin(manager)

    def on_train_step_end(self, state: State, unit: TrainUnit[Any]) -> None:
        """Count the step, unless an evaluation follows, which is not repeated; save it if the training stops here."""
        every = state.eval_state.evaluate_every_n_steps if state.eval_state else None
        if every and unit.train_progress.num_steps_completed % every == 0:
            return
        self._count_step(state, unit)

    def on_eval_end(self, state: State, unit: Any) -> None:
        """Count the step before an evaluation within an epoch."""
        if state.train_state is not None and self._batches.is_within_epoch:
            self._count_step(state, unit)

    def on_train_epoch_end(self, state: State, unit: TrainUnit[Any]) -> None:  # noqa: ARG002
        """Forget the batches of the epoch; its last step is counted."""
        self._batches.end_epoch()

    def on_train_end(self, state: State, unit: TrainUnit[Any]) -> None:  # noqa: ARG002
        """Save the last state, unless it is saved, and release the unit."""
        if self._batches.ended_early and self.manager is not None and not self._is_saved(self.manager):
            logger.warning(
                "the training was stopped within an epoch, which torchtnt counts as ended: step %d is not saved; put "
                "CnrUnitCheckpoint behind the callback that stops", self.manager.current_step,
            )  # fmt: skip
        else:
            self._save_last()
        self._release()

    def on_exception(self, state: State, unit: Any, exc: BaseException) -> None:  # noqa: ARG002
        """Release the unit; the last step is not saved."""
        self._release(exc)

    def _count_step(self, state: State, unit: TrainUnit[Any]) -> None:
        step, last = unit.train_progress.num_steps_completed, state.train_state.max_steps
        if self._count(step):
            state.stop()
        if state.should_stop or (last is not None and step >= last):
            self._save_last()  # here: the loop counts the epoch as ended next

    def _release(self, error: BaseException | None = None) -> None:
        if self.manager is not None:
            self._batches.close()
        self._let_go(error)


def _model_of(unit: TrainUnit[Any]) -> nn.Module:
    """Return the one module of a unit that has a state, or all of them under their names."""
    found = {name: unwrapped(one) for name, one in unit.tracked_modules().items() if one.state_dict()}
    if not found:
        raise BadInput("the unit tracks no module with parameters; set it as an attribute, as self.module = model")
    return next(iter(found.values())) if len(found) == 1 else nn.ModuleDict(found)


class _TrainBatches:
    """The train loader, and its states after the last batches: an `AutoUnit` fetches one ahead, pipelines more."""

    def __init__(self, unit: TrainUnit[Any], loader: Any) -> None:
        check_stateful("the train dataloader", loader)
        self.loader, self._unit = loader, unit
        self._get = unit.get_next_train_batch
        self._fetching: _Fetching | None = None
        self.ended_early = False
        unit.get_next_train_batch = self._get_recorded

    @property
    def is_within_epoch(self) -> bool:
        """Whether batches of this epoch were fetched."""
        return self._fetching is not None

    def close(self) -> None:
        """Let the unit fetch by itself again."""
        del self._unit.get_next_train_batch

    def end_epoch(self) -> None:
        """Take the loader's own state from here on."""
        fetching, self._fetching = self._fetching, None
        self.ended_early = fetching is not None and not fetching.is_exhausted

    def state_dict(self) -> Any:
        if self._fetching is None:
            return self.loader.state_dict()
        return self._fetching.state_after(self._unit.train_progress.num_steps_completed_in_epoch)

    def load_state_dict(self, state_dict: Any) -> None:
        resume(self.loader, state_dict)

    def _get_recorded(self, state: State, data_iter: Iterator[Any]) -> Any:
        if self._fetching is None or self._fetching.batches is not data_iter:
            self._fetching = _Fetching(data_iter, self.loader, self._unit.train_progress.num_steps_completed_in_epoch)
        return self._get(state, self._fetching)


class _Fetching:
    """An iterator of a loader that keeps the loader's state after each of the last batches."""

    def __init__(self, batches: Iterator[Any], loader: Any, trained: int) -> None:
        self.batches, self.is_exhausted = batches, False
        self._loader, self._fetched = loader, trained
        self._states: deque[Any] = deque(maxlen=_FETCHED_AHEAD + 1)

    def __iter__(self) -> _Fetching:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self.batches)
        except StopIteration:
            self.is_exhausted = True
            raise
        self._fetched += 1
        self._states.append(self._loader.state_dict())
        return batch

    def state_after(self, trained: int) -> Any:
        """Return the loader's state after so many batches of the epoch.

        Raises
        ------
        Unsupported
        """
        ahead = self._fetched - trained
        if ahead >= len(self._states):
            raise Unsupported(
                f"the unit has fetched {ahead} batches that it has not trained; the position after the last trained "
                f"one is kept for {_FETCHED_AHEAD}. Prefetch in the loader's workers instead",
                expected=_FETCHED_AHEAD, found=ahead,
            )  # fmt: skip
        return self._states[-1 - ahead]
