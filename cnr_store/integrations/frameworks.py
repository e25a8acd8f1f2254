"""What the adapters of training frameworks share: the arguments that they pass on, and the last save of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from cnr_store.communication import CommunicationState
from cnr_store.training import (
    CheckpointManager,
    PrecisionPolicy,
    RestoredState,
    SavePolicy,
    StoreOptions,
    TrackingOptions,
)
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


def save_last(manager: CheckpointManager, restored: RestoredState | None) -> None:
    """Save the last step of a training, unless it was saved or restored. Blocks; all ranks call it.

    Raises
    ------
    BackgroundSaveFailed
    """
    report = manager.wait_until_finished()
    if report is not None:
        saved = report.step
    else:
        saved = 0 if restored is None else restored.step
    if manager.current_step != saved:
        manager.save()
