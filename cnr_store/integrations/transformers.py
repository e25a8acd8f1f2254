"""Hugging Face Trainer: a callback that saves and restores a `transformers.Trainer`'s training in a store.

```python
from transformers import Trainer
from cnr_store.integrations.transformers import CnrTrainerCheckpoint

trainer = Trainer(model, arguments, train_dataset=dataset)
CnrTrainerCheckpoint("s3://bucket/run-7", every_steps=100).train(trainer)
```

It never pickles, and leaves nothing in the trainer's output folder. Needs transformers and accelerate; importing this
module without them raises `MissingDependency`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from cnr_store.errors import BadInput, Unsupported
from cnr_store.integrations.frameworks import TrainingInStore, missing_framework
from cnr_store.store import Store
from cnr_store.training import StoreOptions
from cnr_store.training.ranks import ranks_of_this_training
from cnr_store.training.reader import capture_rng, restore_rng
from cnr_store.training.training_writer import open_or_create

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState

    from cnr_store.integrations.accelerate import manager_of
except ImportError as error:
    raise missing_framework("callback for transformers", "transformers") from error

__all__ = ["CnrTrainerCheckpoint"]

_PROGRESS = (
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of a `TrainerState` that go on; the others follow from the arguments, but for the history of logs."""


class CnrTrainerCheckpoint(TrainingInStore, TrainerCallback):
    """Saves a `transformers.Trainer`'s training to a store; `train` goes on from what the store holds.

    A checkpoint has the model with optimizer and table slots, the learning rate schedule, the scaler of mixed
    precision, the trainer's progress, the position in the epoch, random generators of each rank, and the states of
    other callbacks. A step is one of the optimizer, so accumulated batches count once. It is counted when the next one
    begins or the epoch is over, because a resumed trainer does not repeat the logs and the evaluation that follow a
    step. The end of a training saves, too. With ``SavePolicy(save_on_sigterm="flag")`` SIGTERM ends the training behind
    the next step. Parameters and attributes are those of `TrainingInStore`.

    Raises
    ------
    BadInput
        In `train`: what a `CheckpointManager` refuses; a loader without a length; ``auto_find_batch_size`` and
        ``ignore_data_skip``. In ``Trainer.train``, if it is called directly.
    Unsupported
        In `train`: a model that is sharded (FSDP, DeepSpeed); use `cnr_store.integrations.dcp`. An epoch that a
        callback ends before its last step.
    """

    _trainer: Trainer | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def train(self, trainer: Trainer) -> Any:
        """Call ``trainer.train()`` with this callback, and return its output. Blocks; all ranks call it.

        The trainer resumes at a step that it reads from a folder. This gives it a folder that has the step alone: what
        belongs to that step is restored in `on_train_begin`.
        """
        _check_arguments(trainer.args)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        given, options = self._store, self._options.get("store_options", StoreOptions())
        store = given if isinstance(given, Store) else open_or_create(given, options, ranks_of_this_training())
        self._store, self._trainer = store, trainer
        trainer._load_from_checkpoint = _nothing_to_load
        try:
            record = store.head().record
            self._folder = tempfile.TemporaryDirectory(prefix="cnr-trainer-")
            with self._folder as folder:
                if record.chain:
                    _state_at(record.step, trainer.args).save_to_json(str(Path(folder, TRAINER_STATE_NAME)))
                output = trainer.train(resume_from_checkpoint=folder if record.chain else None)
        except BaseException as error:
            self._let_go(error)
            raise
        finally:
            del trainer._load_from_checkpoint
            if store is not given:
                store.close()
            self._store, self._trainer, self._folder = given, None, None
        return output

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, _: TrainerControl, **given: Any) -> None:
        """Attach to the model and restore; optimizer and schedule exist, and no batch is read."""
        trainer = self._trainer
        if trainer is None or self._folder is None:
            raise BadInput(
                "Trainer.train() cannot go on from a store by itself; call CnrTrainerCheckpoint.train(trainer)"
            )
        self._folder.cleanup()  # its step has been read: a training that is killed leaves nothing behind
        try:
            len(given["train_dataloader"])
        except TypeError as error:
            raise BadInput(
                "the train dataset has no length, so the trainer does not know in which epoch a step is; give it a "
                "__len__"
            ) from error
        self._position = _EpochPosition(state)
        extras = {"scheduler": trainer.lr_scheduler, "trainer": _TrainerProgress(trainer), **self._extras}
        self._begin(manager_of(trainer.accelerator, self._store, self._position, extras, self._options))
        restored = 0 if self.restored is None else self.restored.step
        if restored != state.global_step:
            raise BadInput(
                f"the store was at step {state.global_step} when this training began, and is at step {restored} now: "
                "another training saves to it; stop that one, or give this one a store of its own",
                expected=state.global_step, found=restored,
            )  # fmt: skip
        state.compute_steps(args, state.max_steps)
        self._generators = capture_rng() if restored else None

    def on_epoch_begin(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        """Count the last step of the epoch before; the order of this epoch is drawn after this."""
        if self.manager is None:
            return
        if self.manager.current_step != state.global_step and self._position.is_within():
            raise Unsupported(
                f"a callback ended an epoch at step {state.global_step}, before its last batch; a trainer cannot go on "
                "from there. End the training instead, with control.should_training_stop"
            )
        self._count_step(state, control)
        if self._generators is not None and self._position.is_within():
            restore_rng(self._position.at_begin)  # the same order is drawn again
            return
        if self._generators is not None:
            restore_rng(self._generators)
        self._generators, self._position.at_begin = None, capture_rng()

    def on_step_begin(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        """Count the step before, if it was of this epoch."""
        if self._generators is not None:  # the iterator that goes on has drawn by now
            restore_rng(self._generators)
            self._generators = None
        self._count_step(state, control)

    def on_train_end(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        """Save the last step, and release the model."""
        self._count_step(state, control)
        self._save_last()
        self._let_go()

    def _count_step(self, state: TrainerState, control: TrainerControl) -> None:
        if self._count(state.global_step):
            control.should_training_stop = True


def _check_arguments(args: TrainingArguments) -> None:
    for name, reason in (
        ("auto_find_batch_size", "a batch size that is found by trial changes which batches a step has trained"),
        ("ignore_data_skip", "a resumed training would begin the epoch again"),
    ):
        if getattr(args, name):
            raise BadInput(f"{name}=True: {reason}; leave it out", expected=False, found=True)


def _state_at(step: int, args: TrainingArguments) -> TrainerState:
    """Return what a trainer reads to resume at a step."""
    return TrainerState(
        global_step=step, train_batch_size=args.train_batch_size, logging_steps=args.logging_steps,
        eval_steps=args.eval_steps, save_steps=args.save_steps,
    )  # fmt: skip


def _nothing_to_load(*_: Any, **__: Any) -> None:
    """In place of the trainer's own: it looks for weights in the folder that has the step."""


class _EpochPosition:
    """The generators from which the order of this epoch was drawn. Which batch is next, follows from the step."""

    def __init__(self, state: TrainerState) -> None:
        self._state = state
        self.at_begin: dict[str, Any] = capture_rng()

    def is_within(self) -> bool:
        """Whether the last step was not the last one of its epoch."""
        return not float(self._state.epoch).is_integer()

    def state_dict(self) -> dict[str, Any]:
        return {"at_begin": self.at_begin}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at_begin = state_dict["at_begin"]


class _TrainerProgress:
    """What a trainer knows beside model, optimizer and schedule: the same on every rank."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def _callbacks(self) -> dict[str, ExportableState]:
        found = [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
        return {f"{number}/{type(one).__name__}": one for number, one in enumerate(found)}

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        return {
            **{name: getattr(state, name) for name in _PROGRESS},
            "callbacks": {name: one.state()["attributes"] for name, one in self._callbacks().items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in _PROGRESS:
            setattr(self._trainer.state, name, state_dict[name])
        for name, one in self._callbacks().items():
            for attribute, value in state_dict["callbacks"].get(name, {}).items():
                setattr(one, attribute, value)
