"""The state of compressed communication in a checkpoint: each rank's residuals, and what all ranks share.

A rank's tensors are dense tensors of its own, ``rank/<rank>/communication/<object>/<tensor>``; what is the same on all
ranks is rank 0's, ``communication/<object>/<tensor>``. Document ``communication/<rank>`` says how each is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec
import torch

from cnr_store.communication.state import CommunicationState, RankState, Rule, StateTensor, reshard
from cnr_store.errors import BadInput, CorruptStore
from cnr_store.format.layout import is_rank_tensor, rank_tensor
from cnr_store.format.notes import checked_notes
from cnr_store.format.records import DenseEntry
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.ranks import Ranks
from cnr_store.runtime.records import converter
from cnr_store.training.tensors import Array, as_array, as_tensor, dense_dtype_name, host_copy, tensor_of
from cnr_store.types import JsonValue

_PREFIX = "communication/"


@runtime_checkable
class _Counting(Protocol):
    def metrics(self) -> Mapping[str, float]: ...


class SavedTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one tensor is stored: exactly, or as integers that ``scale`` turns into values of ``dtype``."""

    rule: Rule
    scale: Annotated[float, msgspec.Meta(gt=0)] | None = None
    dtype: str = ""


class SavedObject(msgspec.Struct, frozen=True):
    """What a rank has saved of one object."""

    tensors: dict[str, SavedTensor]
    scalars: dict[str, Any]


_objects_of = converter(dict[str, SavedObject])


@dataclass(frozen=True, slots=True, eq=False)
class CapturedCommunication:
    """What a rank saves. ``own``: its dense tensors, copied, and their dtypes; ``shared``: rank 0's for all, live."""

    own: tuple[dict[str, Array], dict[str, str]] = field(default_factory=lambda: ({}, {}))
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    documents: dict[str, Any] = field(default_factory=dict)


NO_COMMUNICATION = CapturedCommunication()
"""What is saved where there are no such objects; nobody changes it."""


def checked_communication(objects: Sequence[CommunicationState]) -> tuple[CommunicationState, ...]:
    """Return the objects if each can be saved under its own name.

    Raises
    ------
    BadInput
    """
    for one in objects:
        if not isinstance(one, CommunicationState):
            raise BadInput(
                f"communication= takes hooks, optimizers and meters of cnr_store.communication; {type(one).__name__} "
                "has no rank_state() and load_rank_state()",
                found=type(one).__name__,
            )
    names = [one.name for one in objects]
    if len(set(names)) < len(names) or any("/" in name or not name for name in names):
        raise BadInput(f"objects of communication= need different names without '/'; found {names}", found=names)
    return tuple(objects)


def without_communication(dense: Mapping[str, DenseEntry]) -> dict[str, DenseEntry]:
    """Return the dense tensors of a checkpoint that are no state of communication."""
    return {name: one for name, one in dense.items() if not is_rank_tensor(name) and not name.startswith(_PREFIX)}


def capture_communication(objects: Sequence[CommunicationState], rank: int, bits: int | None) -> CapturedCommunication:
    """Return copies of what a rank saves of its objects, at least one. Blocks.

    ``bits``: per value of what is held back; None for exact.
    """
    found = CapturedCommunication()
    document: dict[str, Any] = {}
    for one in objects:
        state = one.rank_state()
        stored = {}
        for name, tensor in state.tensors.items():
            key = f"{_PREFIX}{one.name}/{name}"
            if tensor.rule == "same":
                found.shared[key] = tensor.value
                stored[name] = SavedTensor("same")
                continue
            value, stored[name] = _coded(host_copy(tensor.value), tensor.rule, bits)
            own = rank_tensor(rank, key)
            found.own[0][own], found.own[1][own] = as_array(value), dense_dtype_name(value, own)
        document[one.name] = msgspec.to_builtins(SavedObject(stored, dict(state.scalars)))
    found.documents[f"{_PREFIX}{rank}"] = document
    return found


def _coded(value: torch.Tensor, rule: Rule, bits: int | None) -> tuple[torch.Tensor, SavedTensor]:
    """Return what is stored of a tensor, and how; exact where it is small, no float, or not finite."""
    largest = value.abs().amax().item() if value.numel() > 1 and value.is_floating_point() else 0.0
    if bits is None or not 0 < largest < float("inf"):
        return value, SavedTensor(rule)
    scale = largest / (2 ** (bits - 1) - 1)
    codes = (value.double() / scale).round().to(torch.int8 if bits <= 8 else torch.int16)
    return codes, SavedTensor(rule, scale, dense_dtype_name(value, "a residual"))


def with_metrics(notes: Mapping[str, JsonValue], objects: Sequence[CommunicationState]) -> dict[str, JsonValue]:
    """Return the notes of a save with the figures of hooks and meters of this rank; the caller's metrics come first."""
    found = {
        f"{one.name}/{key}": value
        for one in objects
        if isinstance(one, _Counting)
        for key, value in one.metrics().items()
    }
    given = notes.get("metrics", {})
    assert isinstance(given, dict)
    return {**notes, **checked_notes(None, found | given, None)} if found else dict(notes)


def check_saved(snapshot: Snapshot, objects: Sequence[CommunicationState]) -> None:
    """Return if a checkpoint has the state of the same objects as the manager. Blocks: reads a document.

    Raises
    ------
    BadInput, CorruptStore
    """
    saved = set(_document(snapshot, 0)) if f"{_PREFIX}0" in snapshot.documents else set()
    names = {one.name for one in objects}
    if saved != names:
        raise BadInput(
            f"the checkpoint has the communication state of {sorted(saved)}, the manager of {sorted(names)}; give "
            "communication= the same objects, or restore with strict=False",
            expected=sorted(saved), found=sorted(names),
        )  # fmt: skip


def stored_communication(
    snapshot: Snapshot, objects: Sequence[CommunicationState], ranks: Ranks
) -> dict[str, RankState]:
    """Return by object what a rank gets of a checkpoint, by the rules of its tensors. Blocks; reads what it needs.

    Raises
    ------
    CorruptStore, StorageFailure
    """
    saved = sum(name.startswith(_PREFIX) for name in snapshot.documents)
    if not saved or not objects:
        return {}
    # As many ranks: each reads its own document alone.
    own = {ranks.rank: _document(snapshot, ranks.rank)} if saved == ranks.world else {}
    documents = own or {rank: _document(snapshot, rank) for rank in range(saved)}
    found = {}
    for one in objects:
        if all(one.name in document for document in documents.values()):
            states = {rank: _state_of(snapshot, rank, one.name, document) for rank, document in documents.items()}
            lone = states.get(ranks.rank) if own else None
            state = lone or reshard([states[rank] for rank in range(saved)], ranks.rank, ranks.world)
            read = {name: state.tensors[name] for name in state.tensors}
            found[one.name] = RankState(read, state.scalars)
    return found


def _document(snapshot: Snapshot, rank: int) -> dict[str, SavedObject]:
    name = f"{_PREFIX}{rank}"
    try:
        if name not in snapshot.documents:
            raise msgspec.ValidationError("it is missing")
        return _objects_of(snapshot.read_document(name, tensor_of))
    except msgspec.ValidationError as error:
        raise CorruptStore(
            f"document {name} is not what a training writes: {error}; restore another version", path=name
        ) from error


def _state_of(snapshot: Snapshot, rank: int, name: str, document: Mapping[str, SavedObject]) -> RankState:
    stored = document[name]
    return RankState(_StoredTensors(snapshot, rank, name, stored.tensors), stored.scalars)


@dataclass(frozen=True, slots=True, eq=False)
class _StoredTensors(Mapping[str, StateTensor]):
    """The tensors of one rank and object; each is read when it is looked up."""

    snapshot: Snapshot
    rank: int
    object: str
    stored: Mapping[str, SavedTensor]

    def __len__(self) -> int:
        return len(self.stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __getitem__(self, name: str) -> StateTensor:
        stored = self.stored[name]
        key = f"{_PREFIX}{self.object}/{name}"
        path = key if stored.rule == "same" else rank_tensor(self.rank, key)
        if path not in self.snapshot.dense:
            raise CorruptStore(f"the checkpoint has no dense tensor {path!r}; restore another version", path=path)
        value = as_tensor(self.snapshot.read_dense(path), self.snapshot.dense[path].dtype)
        if stored.scale is not None:
            dtype = getattr(torch, stored.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise CorruptStore(f"tensor {path!r} is of {stored.dtype!r}, which is no dtype", path=path)
            value = (value.double() * stored.scale).to(dtype)
        return StateTensor(value, stored.rule)
