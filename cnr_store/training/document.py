"""The documents of a trainer: how they are made, and read back checked in full before anything is done with them.

A document that is read may hold anything; after the check its form is known. A delta stores only documents that
changed, so what changes with a step (``progress/0``) is separate from what does not (``trainer/0``), and each generator
has a document (``rng/<rank>/<generator>``).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch

from cnr_store.errors import CorruptStore, NewerFormat
from cnr_store.format.document_tree import EncodedTree, encode
from cnr_store.format.documents import canonical_json
from cnr_store.runtime.addresses import are_equal
from cnr_store.runtime.records import converter
from cnr_store.training.kept_plan import Entries, are_counters
from cnr_store.training.reader import Stateful, capture_rng
from cnr_store.training.shards import LocalShard
from cnr_store.training.state import OtherState, StatePlan
from cnr_store.training.tensors import leaf_of
from cnr_store.write.schema_choice import asked_bits
from cnr_store.write.table_options import SlotBits, TableOptions

TRAINER = "trainer/0"
PROGRESS = "progress/0"
FORMAT = 1

Size = Annotated[int, msgspec.Meta(ge=0)]
Loss = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Scale = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


class GroupDocument(msgspec.Struct, frozen=True):
    """A parameter group: names of its parameters, and its hyperparameters."""

    parameters: list[str]
    options: dict[str, Any]


class OptimizerDocument(msgspec.Struct, frozen=True, rename={"kind": "class"}):
    """An optimizer: the name of its class, its groups, and small state by parameter and key.

    The name is empty if the checkpoint was imported: files of other programs do not have it.
    """

    kind: str
    groups: list[GroupDocument]
    state: dict[str, dict[str, Any]]


class SlotDocument(msgspec.Struct, frozen=True):
    """The shape and layout in which an optimizer keeps a slot."""

    shape: tuple[Size, ...]
    layout: Literal["strided", "sparse"]


class TableRates(msgspec.Struct, frozen=True):
    """What the next process needs to know of how exact single tables are stored: it does not change in every step.

    ``bits``: by table, the width that its scale is for, if options named one. ``given``: tables whose scale was given,
    by ``scale=`` or ``max_error=``. ``slot_bits``: by table, what options gave for its slots. ``halved``: by table, how
    often the schedule has halved its scale. ``calibrated``: by table, the scale that a validation chose.
    """

    bits: dict[str, int] = {}
    halved: dict[str, Size] = {}
    calibrated: dict[str, Scale] = {}
    given: list[str] = []
    slot_bits: dict[str, SlotBits | dict[str, SlotBits]] = {}

    @classmethod
    def by(cls, options: Mapping[str, TableOptions]) -> TableRates:
        """Return what to say of tables that are stored anew by these options, by table."""
        return cls(
            bits={table: asked_bits(one) for table, one in options.items() if one.bits is not None},
            given=sorted(table for table, one in options.items() if (one.max_error, one.scale) != (None, None)),
            slot_bits=slot_bits_by(options),
        )


class RunRates(msgspec.Struct, frozen=True):
    """What the next process needs to know of the run, to decide how exact tables are stored.

    ``restores``: how often the state was restored on its way here. ``first_loss``, ``loss``: the mean loss at the first
    save and now, of ``losses`` that were reported.
    """

    restores: Size = 0
    first_loss: Loss | None = None
    loss: Loss | None = None
    losses: Size = 0


class RateDocument(msgspec.Struct, frozen=True):
    """What the next process needs to know of how exact tables are stored: of the run, and of its tables."""

    run: RunRates = RunRates()
    tables: TableRates = TableRates()


def slot_bits_by(options: Mapping[str, TableOptions]) -> dict[str, SlotBits | dict[str, SlotBits]]:
    """Return what options, by table, give for slots: `TableRates.slot_bits`."""
    given = ((table, one.slot_bits) for table, one in options.items())
    return {table: dict(bits) if isinstance(bits, Mapping) else bits for table, bits in given if bits is not None}


class TrainerDocument(msgspec.Struct, frozen=True):
    """Everything of a training state that is no tensor of its own, but for the generators.

    ``slots``: by table and slot name. ``fused``: by table, state of optimizers that are fused into backward.
    """

    format: int
    optimizers: list[OptimizerDocument]
    slots: dict[str, dict[str, SlotDocument]]
    extras: dict[str, Any]
    fused: dict[str, dict[str, Any]] = {}
    rate: RateDocument = RateDocument()


class StoredOptimizer(msgspec.Struct, frozen=True, rename={"kind": "class"}):
    """What of an optimizer stays as it is: its class, and the names of the parameters of each group."""

    kind: str
    groups: list[list[str]]


class StoredTrainer(msgspec.Struct, frozen=True):
    """``trainer/0``: what of a `TrainerDocument` no step changes. It has the names of all parameters."""

    format: int
    optimizers: list[StoredOptimizer]
    slots: dict[str, dict[str, SlotDocument]]
    rates: TableRates = TableRates()


_stored_trainer = converter(StoredTrainer)


class EqualState(msgspec.Struct, frozen=True):
    """Small state that several parameters of an optimizer have; they are [start, stop) of all its names."""

    value: dict[str, Any]
    parameters: list[tuple[Size, Size]]


class StoredProgress(msgspec.Struct, frozen=True):
    """``progress/0``: the rest of a `TrainerDocument`.

    ``options`` (by group) and ``state`` are lists with an item for each optimizer.
    """

    options: list[list[dict[str, Any]]]
    state: list[list[EqualState]]
    extras: dict[str, Any]
    fused: dict[str, dict[str, Any]] = {}
    rate: RunRates = RunRates()


_stored_progress = converter(StoredProgress)


def rng_name(rank: int, generator: str = "") -> str:
    """Return the name of the document of one of a rank's generators; without one, what all these names begin with."""
    return f"rng/{rank}/{generator}"


def equal_states(states: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the small state of an optimizer's parameters as lists of `EqualState`; ``names`` in the groups' order."""
    if isinstance(states, Entries) and not states.places.positions:
        return []
    if _are_one_step(states, names):
        return [{"value": states[names[0]], "parameters": [[0, len(names)]]}]
    found: dict[Hashable, dict[str, Any]] = {}
    for index, value in enumerate(map(states.get, names)):
        if value:
            key = _counters(value)
            if key is None:
                key = canonical_json(encode(value, leaf_of))
            equal = found.get(key)
            if equal is None:
                equal = found[key] = {"value": value, "parameters": []}
            ranges = equal["parameters"]
            if ranges and ranges[-1][1] == index:
                ranges[-1][1] = index + 1
            else:
                ranges.append([index, index + 1])
    return list(found.values())


def _are_one_step(states: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> bool:
    """Return whether all have one entry of one name, whole numbers or host tensors of one number, with the same bits.

    So it is with the step counters of torch's optimizers where all tables are stepped: told by calls that take them
    all. False says nothing.
    """
    if len(names) < 2:
        return False
    if isinstance(states, Entries):
        if not states.places.is_one_each() or states.places.names != names:
            return False
        values = states.all()
    else:
        own = [one for name in names if (one := states.get(name))]
        if len(own) < len(names) or len({*map(tuple, own)}) > 1 or len(own[0]) != 1:
            return False
        values = [value for one in own for value in one.values()]
    if {*map(type, values)} == {int}:
        return len({*values}) == 1
    if not (states.places.are_counters(values) if isinstance(states, Entries) else are_counters(values)):
        return False
    addresses = np.array([*map(torch.Tensor.data_ptr, values)], np.int64)
    if not addresses.all() or any(map(torch.Tensor.is_neg, values)):
        return False
    return are_equal(addresses, values[0].itemsize)


def _counters(state: Mapping[str, Any]) -> Hashable | None:
    """Return what is equal for small states with the same bits; None of one that has other values than plain numbers.

    There is one for each table, and to encode it takes the training thread longer than to copy a table's rows.
    """
    found: list[Hashable] = []
    for key, value in state.items():
        is_tensor = type(value) is torch.Tensor and value.numel() == 1
        number = value.item() if is_tensor else value
        if type(number) is float and number == number:
            number = number.hex()  # which keeps the sign of zero
        elif type(number) is not int:
            return None
        found += (key, number, value.dtype, value.dim()) if is_tensor else (key, number, None, None)
    return tuple(found)


def trainer_of(trainer: Any, progress: Any) -> TrainerDocument:
    """Return the document of a trainer from its two stored ones, decoded.

    Raises
    ------
    CorruptStore
        They are not what a trainer writes; the message names the document and the place.
    NewerFormat
    """
    found = trainer.get("format") if isinstance(trainer, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise NewerFormat(
            f"document {TRAINER} has format {found}, this library reads {FORMAT}; use a newer release",
            path=TRAINER, expected=FORMAT, found=found,
        )  # fmt: skip
    path = TRAINER
    try:
        fixed = _stored_trainer(trainer)
        path = PROGRESS
        moved = _stored_progress(progress)
        optimizers = _optimizers_of(fixed, moved)
    except msgspec.ValidationError as error:
        raise CorruptStore(
            f"document {path} is not what a trainer writes: {error}; restore another version", path=path
        ) from error
    rate = RateDocument(moved.rate, fixed.rates)
    return TrainerDocument(fixed.format, optimizers, fixed.slots, moved.extras, moved.fused, rate)


def _optimizers_of(trainer: StoredTrainer, progress: StoredProgress) -> list[OptimizerDocument]:
    if not len(trainer.optimizers) == len(progress.options) == len(progress.state):
        raise msgspec.ValidationError("it has options or state of other optimizers")
    found = []
    for one, options, states in zip(trainer.optimizers, progress.options, progress.state, strict=True):
        if len(one.groups) != len(options):
            raise msgspec.ValidationError(f"{one.kind} has options of other groups")
        if any("params" in own for own in options):
            raise msgspec.ValidationError(f"{one.kind} has parameters among its options")
        names = [name for group in one.groups for name in group]
        state: dict[str, dict[str, Any]] = {name: {} for name in names}
        is_given = [False] * len(names)  # by position: shards of one table on a rank have one name
        for equal in states:
            for start, stop in equal.parameters:
                if not start < stop <= len(names) or any(is_given[start:stop]):
                    raise msgspec.ValidationError(f"{one.kind} has state of parameters [{start}, {stop})")
                is_given[start:stop] = [True] * (stop - start)
                state |= dict.fromkeys(names[start:stop], equal.value)
        groups = [GroupDocument(group, own) for group, own in zip(one.groups, options, strict=True)]
        found.append(OptimizerDocument(one.kind, groups, state))
    return found


def optimizer_documents(
    plan: StatePlan, optimizers: Sequence[torch.optim.Optimizer], other: OtherState
) -> list[dict[str, Any]]:
    """Return per optimizer: its class, its groups with hyperparameters and parameter names, its step counters."""
    return [
        {
            "class": type(optimizer).__name__,
            "groups": [
                {"parameters": [*names], "options": {key: value for key, value in group.items() if key != "params"}}
                for group, names in zip(optimizer.param_groups, groups, strict=True)
            ],
            "state": state,
        }
        for optimizer, groups, state in zip(optimizers, plan.groups, other.inline, strict=True)
    ]


def stepped_documents(plan: StatePlan, other: OtherState) -> dict[str, dict[str, Any]]:
    """Return of each table here that an optimizer steps: whose it is (``optimizer``, ``group``), its step counters."""
    return {
        one.name: {"optimizer": one.optimizer, "group": one.group, "state": other.inline[one.optimizer][one.name]}
        for one in plan.optimized
        if one.is_table
    }


def add_stepped(documents: Sequence[dict[str, Any]], stepped: Mapping[str, Mapping[str, Any]]) -> None:
    """Add to `optimizer_documents` the tables of `stepped_documents` that only other ranks have."""
    others: dict[int, dict[str, Any]] = {}
    for table, given in stepped.items():
        document = documents[given["optimizer"]]
        if table not in document["state"]:
            document["groups"][given["group"]]["parameters"].append(table)
            others.setdefault(given["optimizer"], {})[table] = given["state"]
    for optimizer, states in others.items():
        documents[optimizer]["state"] = {**documents[optimizer]["state"], **states}


def fused_documents(shards: Iterable[LocalShard]) -> dict[str, dict[str, Any]]:
    """Return per table the state of optimizers that are fused into backward, without what travels by row."""
    return {shard.table: shard.scalars() for shard in shards if shard.parameter is None}


def trainer_documents(
    plan: StatePlan,
    optimizers: Sequence[torch.optim.Optimizer],
    other: OtherState,
    tables: Mapping[str, Mapping[str, Any]],
    extras: Mapping[str, Stateful],
    rate: RateDocument,
) -> dict[str, dict[str, Any]]:
    """Return, by name, the documents of all that is no tensor of its own: hyperparameters, step counters, extras; live.

    ``tables``: ``slots``, ``fused`` and ``stepped`` of the tables on all ranks.
    """
    found = optimizer_documents(plan, optimizers, other)
    add_stepped(found, tables["stepped"])
    states = {name: extra.state_dict() for name, extra in extras.items()}
    return documents_of(found, tables["slots"], tables["fused"], states, rate)


def documents_of(
    optimizers: Sequence[Mapping[str, Any]],
    slots: Mapping[str, Any],
    fused: Mapping[str, Any],
    extras: Mapping[str, Any],
    rate: RateDocument,
) -> dict[str, dict[str, Any]]:
    """Return `TRAINER` and `PROGRESS`; ``optimizers`` as `optimizer_documents` gives them."""
    groups = [[group["parameters"] for group in one["groups"]] for one in optimizers]
    return {
        TRAINER: {
            "format": FORMAT,
            "optimizers": [{"class": one["class"], "groups": own} for one, own in zip(optimizers, groups, strict=True)],
            "slots": slots,
            "rates": msgspec.to_builtins(rate.tables),
        },
        PROGRESS: {
            "options": [[group["options"] for group in one["groups"]] for one in optimizers],
            "state": [
                equal_states(one["state"], [*chain.from_iterable(own)])
                for one, own in zip(optimizers, groups, strict=True)
            ],
            "fused": fused,
            "extras": extras,
            "rate": msgspec.to_builtins(rate.run),
        },
    }


class KeptDocument:
    """A document that hardly ever changes, of dicts with text as keys, lists, text and numbers: encoded when it has.

    It is compared as JSON text, in which the order of keys counts.
    """

    def __init__(self) -> None:
        self._text: bytes | None = None
        self._encoded = EncodedTree(None)

    def encoded(self, document: Mapping[str, Any]) -> EncodedTree:
        """Return it as `Transaction.put_document` takes it; raises as `document_tree.encode`."""
        text = msgspec.json.encode(document)
        if text != self._text:
            self._encoded, self._text = EncodedTree(encode(document)), text
        return self._encoded


def rng_documents(rank: int) -> dict[str, Any]:
    """Return, by name, the documents of the generators of a rank's process."""
    return {rng_name(rank, generator): state for generator, state in capture_rng().items()}
