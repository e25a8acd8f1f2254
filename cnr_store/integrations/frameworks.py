"""What the adapters of training frameworks share: arguments, and the manager from a training's start to its end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, Unpack

from cnr_store.communication import CommunicationState
from cnr_store.errors import MissingDependency
from cnr_store.store import Store
from cnr_store.training import (
    CheckpointManager,
    PrecisionPolicy,
    RestoredState,
    SavePolicy,
    StoreOptions,
    TrackingOptions,
)
from cnr_store.training.reader import Stateful
from cnr_store.write.table_options import TableOptions


class ManagerOptions(TypedDict, total=False):
    """What a `CheckpointManager` takes besides what a framework knows: model, optimizers, reader, extras."""

    communication: Sequence[CommunicationState]
    options: TableOptions | Mapping[str, TableOptions] | None
    every_steps: int | Literal["auto"] | None
    save_policy: SavePolicy
    tracking: TrackingOptions
    precision: PrecisionPolicy
    store_options: StoreOptions


class TrainingInStore:
    """A callback's part that is the same for each framework. A subclass calls these methods at the events it gets.

    Parameters
    ----------
    store
        URL (created if there is no store) or an open `Store`.
    extras
        As for `CheckpointManager`, besides what the framework has.
    **options
        ``every_steps``, ``options``, ``save_policy`` and what else a `CheckpointManager` takes.

    Attributes
    ----------
    manager
        The `CheckpointManager` while a training runs, else None.
    restored
        What the last training continued from, None where the store was empty.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        *,
        extras: Mapping[str, Stateful] | None = None,
        **options: Unpack[ManagerOptions],
    ) -> None:
        self.manager: CheckpointManager | None = None
        self.restored: RestoredState | None = None
        self._store, self._extras, self._options = store, dict(extras or {}), options

    def _begin(self, manager: CheckpointManager) -> None:
        """Restore the newest checkpoint, if there is one. Blocks; all ranks call it."""
        self.manager = manager
        self.restored = manager.restore()

    def _count(self, step: int) -> bool:
        """Count the step that the optimizers have made, unless it is counted; returns whether the training must end."""
        manager = self.manager
        return manager is not None and step != manager.current_step and manager.step(step)

    def _save_last(self) -> None:
        """Save the last step, unless it was saved or restored. Blocks; all ranks call it.

        Raises
        ------
        BackgroundSaveFailed
        """
        if self.manager is not None and not self._is_saved(self.manager):
            self.manager.save()

    def _is_saved(self, manager: CheckpointManager) -> bool:
        """Whether the last counted step was saved or restored. Waits for a running save."""
        report = manager.wait_until_finished()
        if report is not None:
            return report.step == manager.current_step
        return manager.current_step == (0 if self.restored is None else self.restored.step)

    def _let_go(self, error: BaseException | None = None) -> None:
        """Wait for a running save, and release the model; after an ``error`` the last step is not saved."""
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.__exit__(None if error is None else type(error), error, None)


def missing_framework(adapter: str, package: str) -> MissingDependency:
    """Return the error of an adapter whose framework cannot be imported."""
    return MissingDependency(
        f'the {adapter} needs a package that is not installed; pip install "cnr-store[frameworks]"', found=package
    )
