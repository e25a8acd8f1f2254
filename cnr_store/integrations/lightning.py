"""Lightning: a callback that saves and restores a `Trainer`'s training in a store.

```python
from lightning.pytorch import Trainer
from cnr_store.integrations.lightning import CnrCheckpoint

Trainer(callbacks=[CnrCheckpoint("s3://bucket/run-7", every_steps=100)]).fit(module, loader)
```

It never pickles, and changes nothing of a training but where it starts. Needs lightning; importing this module without
it raises `MissingDependency`.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from cnr_store.errors import BadInput, Unsupported
from cnr_store.integrations.frameworks import TrainingInStore, missing_framework
from cnr_store.training import CheckpointManager
from cnr_store.training.reader import check_stateful, resume

try:
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler
    from lightning.pytorch.loops.utilities import _is_max_limit_reached
    from lightning.pytorch.utilities.exceptions import SIGTERMException
except ImportError as error:
    raise missing_framework("callback for Lightning", "lightning") from error

__all__ = ["CnrCheckpoint"]

logger = logging.getLogger(__name__)

_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
_LOADERS = "combined_loader"
"""Where the state of the fit loop has the loaders' states; they differ by rank, the rest does not."""


class CnrCheckpoint(TrainingInStore, Checkpoint):
    """Saves a Lightning training to a store, and goes on from what the store holds when `Trainer.fit` begins.

    A checkpoint has the module with optimizers and table slots, the position of the loops and of the loaders, learning
    rate schedulers, the scaler of mixed precision, random generators of each rank, the states of other callbacks and of
    a data module, and what ``on_save_checkpoint`` of module and callbacks adds. A step is counted when the optimizers
    have stepped, so accumulated batches count once. The end of a training saves, too, and SIGTERM as Lightning handles
    it. Parameters and attributes are those of `TrainingInStore`.

    Raises
    ------
    BadInput
        In `Trainer.fit`: what a `CheckpointManager` refuses; a loader without a length, which Lightning reads a batch
        ahead; ``ckpt_path``; a callback whose state is not plain data (in a save).
    Unsupported
        In `Trainer.fit`: a strategy that shards the model (FSDP, DeepSpeed); use `cnr_store.integrations.dcp`.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the model and restore; optimizers exist, and the loops have not begun."""
        if trainer.fast_dev_run:
            return
        if type(trainer.strategy).__name__ in _SHARDED:
            raise Unsupported(
                f"{type(trainer.strategy).__name__} shards parameters of the model; save through "
                "torch.distributed.checkpoint, with cnr_store.integrations.dcp",
                found=type(trainer.strategy).__name__,
            )
        if trainer.ckpt_path is not None:
            raise BadInput(
                f"fit() was given ckpt_path={trainer.ckpt_path!r}, and the callback restores from its store; leave "
                "ckpt_path out",
                found=trainer.ckpt_path,
            )
        self._loaders = _TrainLoaders(trainer)
        manager = CheckpointManager(
            self._store, model=pl_module, optimizer=trainer.optimizers, reader=self._loaders,
            extras={"lightning": _TrainerState(trainer, self), **self._extras}, **self._options,
        )  # fmt: skip
        self._begin(manager)

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Check the loaders, which Lightning has made by now."""
        if self.manager is None:
            return
        for one in trainer.callbacks:
            if isinstance(one, GradientAccumulationScheduler):
                one.on_train_epoch_start(trainer)  # Lightning does not call it again within a resumed epoch.
        if math.isinf(trainer.num_training_batches):
            raise BadInput(
                "the loader has no length, so Lightning reads one batch ahead, which a resumed training would miss; "
                "give its dataset a __len__, or set limit_train_batches= to a number of batches"
            )
        self._loaders.check()

    def on_train_epoch_start(self, *_: Any) -> None:
        """Go on with the loaders where the restored epoch was over."""
        if self.manager is not None:
            self._loaders.begin_epoch()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count a step if the optimizers have stepped in this batch, unless a validation or the epoch's end follows.

        Lightning does not repeat these in a training that goes on from before them.
        """
        epoch = trainer.fit_loop.epoch_loop
        if not (epoch._num_ready_batches_reached() or epoch._should_check_val_fx(trainer.fit_loop._data_fetcher)):
            self._count_step(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        """Count the step before a validation within an epoch."""
        if self.manager is None or trainer.sanity_checking:
            return
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self._count_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count the last step of an epoch; save it if SIGTERM has come, for Lightning cannot go on from behind here.

        Save the last step of the training, too: behind it callbacks may replace the weights, by averages.
        """
        self._count_step(trainer)
        if _is_over(trainer) or (trainer.received_sigterm and trainer.world_size == 1):
            self._save_last()

    def _count_step(self, trainer: Trainer) -> None:
        if self._count(trainer.global_step):
            trainer.should_stop = True

    def on_train_end(self, *_: Any) -> None:
        """Save the last state, unless it is saved."""
        self._save_last()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Save if Lightning ends the training because of SIGTERM; let go of the model."""
        manager = self.manager
        if manager is None:
            return
        try:
            if isinstance(exception, SIGTERMException):
                self._save_at_signal(trainer, manager)
        finally:
            self._let_go(exception)

    def _save_at_signal(self, trainer: Trainer, manager: CheckpointManager) -> None:
        epoch = trainer.fit_loop.epoch_loop
        if epoch._should_accumulate() or (epoch._num_ready_batches_reached() and not trainer.validating):
            if manager.last_save is None or manager.last_save.step != trainer.global_step:
                logger.warning("SIGTERM came where no training can go on: step %d is not saved", trainer.global_step)
            return
        self._count_step(trainer)
        self._save_last()

    def teardown(self, *_: Any, **__: Any) -> None:
        """Wait for the save under way, and let go of the model."""
        self._let_go()


def _is_over(trainer: Trainer) -> bool:
    """Whether the training ends with this epoch, as the fit loop finds it behind the hooks of the epoch's end."""
    loop = trainer.fit_loop
    return bool(
        _is_max_limit_reached(trainer.global_step, loop.max_steps)
        or _is_max_limit_reached(loop.epoch_progress.current.processed, loop.max_epochs or -1)
        or (trainer.should_stop and loop._can_stop_early)
    )


class _TrainerState:
    """What a trainer knows beside model, optimizers and loaders: the same on every rank."""

    def __init__(self, trainer: Trainer, without: Checkpoint) -> None:
        self._trainer = trainer
        self._callbacks = {one.state_key: one for one in trainer.callbacks if one is not without}

    def state_dict(self) -> dict[str, Any]:
        trainer, whole = self._trainer, self._trainer.lightning_module.state_dict()
        added = {"state_dict": whole}
        for one in self._callbacks.values():
            one.on_save_checkpoint(trainer, trainer.lightning_module, added)
        trainer.lightning_module.on_save_checkpoint(added)
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"] = {name: value for name, value in loops["state_dict"].items() if name != _LOADERS}
        return {
            "loops": loops,
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": {key: state for key, one in self._callbacks.items() if (state := one.state_dict())},
            "data": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            # What hooks have added. The module's own state is saved by the manager.
            "added": {key: value for key, value in added.items() if value is not whole},
            "whole": [key for key, value in added.items() if value is whole],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state_dict["loops"])
        for config, state in zip(trainer.lr_scheduler_configs, state_dict["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        trainer.precision_plugin.load_state_dict(state_dict["precision"])
        module = trainer.lightning_module
        added = {**dict.fromkeys(state_dict["whole"], module.state_dict()), **state_dict["added"]}
        module.on_load_checkpoint(added)
        for one in self._callbacks.values():
            one.on_load_checkpoint(trainer, module, added)
        for key, state in state_dict["callbacks"].items():
            if key in self._callbacks:
                self._callbacks[key].load_state_dict(state)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state_dict["data"])


class _TrainLoaders:
    """The loaders of this rank, in the trainer's order."""

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop
        self._begins_epoch = False

    def _each(self) -> list[Any]:
        return list(self._loop._combined_loader.flattened)

    def check(self) -> None:
        for loader in self._each():
            check_stateful("the train dataloader", loader)
            sampler = getattr(getattr(loader, "batch_sampler", loader), "sampler", None)
            if type(sampler).__name__ == "DistributedSamplerWrapper":
                raise BadInput(
                    "for several ranks Lightning has wrapped the sampler of the train dataloader, whose order is in no "
                    "checkpoint then; make the loader with sampler=StatefulDistributedSampler(dataset), of "
                    "torchdata.stateful_dataloader.sampler",
                    found=type(sampler).__name__,
                )

    def state_dict(self) -> list[Any]:
        return [loader.state_dict() for loader in self._each()]

    def load_state_dict(self, state_dict: list[Any]) -> None:
        """Make the loaders now, behind the state of the loops, so that their iterators begin where they were."""
        self._loop.setup_data()
        for loader, state in zip(self._each(), state_dict, strict=True):
            _set_sampler_epoch(loader, self._loop.epoch_progress.current.processed)
            resume(loader, state)
        iter(self._loop._data_fetcher)
        self._begins_epoch = not self._loop.restarting

    def begin_epoch(self) -> None:
        """Make the iterators of the epoch that begins, if the restored one was over: Lightning keeps those it has."""
        if self._begins_epoch:
            iter(self._loop._data_fetcher)
            self._begins_epoch = False
