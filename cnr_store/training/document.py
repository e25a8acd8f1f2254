"""The document ``trainer/0`` as it is read back: checked in full before anything is done with it.

It comes from the store, so it may hold anything; what follows may rely on its form.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import msgspec

from cnr_store.errors import CorruptStore, NewerFormat

TRAINER = "trainer/0"
FORMAT = 1

Size = Annotated[int, msgspec.Meta(ge=0)]
Loss = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Scale = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


class GroupDocument(msgspec.Struct, frozen=True):
    """A parameter group: names of its parameters, and its hyperparameters."""

    parameters: list[str]
    options: dict[str, Any]


class OptimizerDocument(msgspec.Struct, frozen=True, rename={"kind": "class"}):
    """An optimizer: the name of its class, its groups, and small state by parameter and key."""

    kind: str
    groups: list[GroupDocument]
    state: dict[str, dict[str, Any]]


class SlotDocument(msgspec.Struct, frozen=True):
    """The shape and layout in which an optimizer keeps a slot."""

    shape: tuple[Size, ...]
    layout: Literal["strided", "sparse"]


class RateDocument(msgspec.Struct, frozen=True):
    """What the next process needs to know of how exact tables are stored.

    ``restores``: how often the state was restored on its way here. ``bits``: by table, the width that its scale is for.
    ``first_loss``, ``loss``: the mean loss at the first save and now, of ``losses`` that were reported. ``halved``: by
    table, how often the schedule has halved its scale. ``calibrated``: by table, the scale that a validation chose.
    """

    restores: Size = 0
    bits: dict[str, int] = {}
    first_loss: Loss | None = None
    loss: Loss | None = None
    losses: Size = 0
    halved: dict[str, Size] = {}
    calibrated: dict[str, Scale] = {}


class TrainerDocument(msgspec.Struct, frozen=True):
    """Everything of a training state that is no tensor of its own. ``slots``: by table and slot name.

    Rank 0 says it for all, but for the generators: ``trainer/<rank>`` of the other ranks hold theirs. ``fused``: by
    table, state of optimizers that are fused into backward.
    """

    format: int
    optimizers: list[OptimizerDocument]
    slots: dict[str, dict[str, SlotDocument]]
    rng: dict[str, Any]
    extras: dict[str, Any]
    fused: dict[str, dict[str, Any]] = {}
    rate: RateDocument = RateDocument()


def trainer_name(rank: int) -> str:
    """Return the name of a rank's document."""
    return f"trainer/{rank}"


def trainer_of(value: Any) -> TrainerDocument:
    """Return the document that a store's ``trainer/0`` is, decoded.

    Raises
    ------
    CorruptStore
        It is not what a trainer writes; says where.
    NewerFormat
    """
    found = value.get("format") if isinstance(value, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise NewerFormat(
            f"document {TRAINER} has format {found}, this library reads {FORMAT}; use a newer release",
            path=TRAINER, expected=FORMAT, found=found,
        )  # fmt: skip
    try:
        document = msgspec.convert(value, TrainerDocument)
    except msgspec.ValidationError as error:
        raise CorruptStore(
            f"document {TRAINER} is not what a trainer writes: {error}; restore another version", path=TRAINER
        ) from error
    for optimizer in document.optimizers:
        if any("params" in group.options for group in optimizer.groups):
            raise CorruptStore(
                f"document {TRAINER} has parameters among the options of {optimizer.kind}; restore another version",
                path=TRAINER,
            )
    return document
