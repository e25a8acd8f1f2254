"""What is read of a checkpoint before anything of a live model is changed; writes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from cnr_store.errors import BadInput, VersionExpired, VersionNotFound
from cnr_store.snapshot import Snapshot
from cnr_store.store import Store
from cnr_store.training.document import TRAINER, TrainerDocument, trainer_name, trainer_of
from cnr_store.training.holdings import Holdings
from cnr_store.training.restoring import RestorePlan, check_columns, plan_restore
from cnr_store.training.state import StatePlan
from cnr_store.training.tensors import tensor_of
from cnr_store.types import SlotsRule

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")

_LOOKS = 3
"""How often a head is looked at anew that was folded, and deleted, while it was loaded."""


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What was restored, for the caller's loop.

    Attributes
    ----------
    step, version
        Training step of the state, and the version that it was read from.
    reader_state
        State of the reader, already given to the manager's ``reader`` if there is one; None if none was saved.
    tables
        Names of the tables that were filled.
    fallback_from
        The version that should have been restored and is damaged; None if there was no need to go back.
    problem
        What is wrong with that one.
    """

    step: int
    version: int
    reader_state: Any
    tables: tuple[str, ...]
    fallback_from: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """What one rank will load, and where it goes. ``state``: everything of the live model and its optimizers."""

    snapshot: Snapshot
    plan: RestorePlan
    state: StatePlan
    trainer: TrainerDocument | None


def choose_start(store: Store, version: int | None, step: int | None, tag: str | None) -> dict[str, Any]:
    """Return the ``version`` to go on from, by at most one of the three, and the ``newest`` there is, as plain JSON.

    ``is_empty``: nothing was saved yet. A few GETs.

    Raises
    ------
    BadInput, VersionNotFound, VersionExpired, TagNotFound, CorruptStore, StorageFailure
    """
    newest = store.head().record.v
    if version is None and step is None and tag is None:
        snapshot = store.snapshot(newest)
    else:
        snapshot = store.snapshot(version, step=step, tag=tag)
        if snapshot.is_empty and step is None:
            raise VersionNotFound(f"version {snapshot.version} holds no checkpoint", version=snapshot.version)
    return {"version": snapshot.version, "newest": newest, "is_empty": snapshot.is_empty}


def plan_loading(
    store: Store,
    version: int,
    state: StatePlan,
    holdings: Holdings,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    tables: Mapping[str, str] | None,
    strict: bool,
    slots_rule: SlotsRule,
) -> Planned:
    """Compare a version with the live training; changes nothing. Blocks: manifests and a document are read.

    Raises
    ------
    BadInput, BadShape, BadDtype, Unsupported, CorruptStore, VersionExpired, StorageFailure
    """
    snapshot = store.snapshot(version)
    trainer = None
    if TRAINER in snapshot.documents:
        trainer = trainer_of(snapshot.read_document(TRAINER, tensor_of))
    plan = plan_restore(
        snapshot.tables, snapshot.dense, trainer, state, holdings, optimizers, name_map=tables, strict=strict
    )
    if slots_rule == "exact":
        check_columns(snapshot, plan)
    return Planned(snapshot, plan, state, trainer)


def check_extras(trainer: TrainerDocument | None, extras: Mapping[str, Any]) -> None:
    """Return if a checkpoint has the state of the same extras as the manager.

    Raises
    ------
    BadInput
    """
    if trainer is not None and set(trainer.extras) != set(extras):
        raise BadInput(
            f"the checkpoint has extras {sorted(trainer.extras)}, the manager {sorted(extras)}",
            expected=sorted(trainer.extras), found=sorted(extras),
        )  # fmt: skip


def stored_rng(planned: Planned, rank: int) -> dict[str, Any] | None:
    """Return the generators of a rank; None if the ranks that saved were fewer. Blocks."""
    trainer, snapshot = planned.trainer, planned.snapshot
    if rank == 0 or trainer is None:
        return None if trainer is None else trainer.rng
    name = trainer_name(rank)
    if name not in snapshot.documents:
        logger.warning("%s: rank %d had no random generators when this was saved", name, rank)
        return None
    return trainer_of(snapshot.read_document(name, tensor_of)).rng


def looking_again(load: Callable[[], Loaded], *, is_head: bool) -> Loaded:
    """Return what ``load`` returns; call it again where the head was folded, and deleted, while it was loaded.

    Raises
    ------
    VersionExpired
        Again and again; or what expired is no head.
    """
    for _ in range(_LOOKS - 1 if is_head else 0):
        try:
            return load()
        except VersionExpired as error:
            logger.warning("the head was folded while it was loaded (%s); looking at the new one", error)
    return load()
