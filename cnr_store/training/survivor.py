"""Partial recovery: ranks that outlive a lost one keep their rows; the rank in its place reads its own from the store.

As in CPR (Maeng et al., MLSys 2021): the rows that come back are as old as the last save, all others are live. Of what
every rank has a copy (dense tensors, their optimizer state, replicated tables) all take that of one rank that survived:
survivors may differ, because some had done the last step and some had not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

from cnr_store.errors import BadInput, Conflict, Unsupported
from cnr_store.format import document_tree
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.fields import TensorDtype
from cnr_store.format.records import DenseEntry
from cnr_store.log.rebase import leaves_state
from cnr_store.runtime.ranks import together
from cnr_store.runtime.records import converter
from cnr_store.storage.copies import Objects
from cnr_store.store import Store
from cnr_store.training.document import (
    GroupDocument,
    OptimizerDocument,
    TrainerDocument,
    fused_documents,
    optimizer_documents,
)
from cnr_store.training.live_training import LiveTraining
from cnr_store.training.loading import Planned
from cnr_store.training.matching import plan_restore
from cnr_store.training.saver import Saver
from cnr_store.training.state import live_slots, other_state
from cnr_store.training.tensors import Array, as_array, dense_dtype_name, leaf_of, tensor_of
from cnr_store.write.mirrors import HeldMirrors
from cnr_store_gpu import Taken


@dataclass(frozen=True, slots=True, eq=False)
class Survivor:
    """What a rank has, beside its model and optimizers, after another rank was lost.

    Attributes
    ----------
    step
        The last step that it counted.
    reader_state
        The state that the caller gave with that step; None if a reader is asked.
    known
        The newest log entry that it knows; None if it has neither saved nor restored.
    mirrors
        Its code mirrors, the state of that entry; empty if they are not.
    marks
        By name of the shard: rows that changed since then.
    whole_next
        Tables that the next save must write whole.
    copies
        What it keeps for other ranks, by rank (`PeerCopies`).
    training
        What it trained, a `LiveTraining`, which no user is meant to hold. A library that shards tables may need new
        models for new process groups; they get its state.
    """

    step: int
    reader_state: Any
    known: LogEntry | None
    mirrors: HeldMirrors
    marks: Mapping[str, Taken]
    whole_next: frozenset[str]
    copies: Mapping[int, Objects]
    training: Any

    def is_renewed(self, training: LiveTraining) -> bool:
        """Whether it goes on with another model, or with other optimizers of the same one."""
        now, before = ([one.model, *one.optimizers] for one in (training, self.training))
        return [id(one) for one in now] != [id(one) for one in before]

    def check_shards(self, training: LiveTraining) -> None:
        """Return if this rank has the shards that it had.

        Raises
        ------
        BadInput
        """
        had, has = (
            {name: own.rectangle for name, own in one.holdings.by_name.items()} for one in (self.training, training)
        )
        if had != has:
            name = min(name for name in had.keys() | has.keys() if had.get(name) != has.get(name))
            raise BadInput(
                f"this rank survived with {had.get(name, 'nothing')} of {name!r} and has {has.get(name, 'nothing')} of "
                "it now; build the model with the plan that it had, or restore without survivor= on all ranks",
                table=name, expected=had.get(name), found=has.get(name),
            )  # fmt: skip

    @torch.no_grad()
    def move_rows(self, training: LiveTraining) -> None:
        """Copy this rank's rows and row state to the shards of a new model; no I/O."""
        for name, own in training.holdings.by_name.items():
            known, new = self.training.holdings.by_name[name].shard, own.shard
            new.weight.copy_(known.weight)
            slots = live_slots(known)
            for slot, tensor in live_slots(new).items():
                tensor.copy_(slots[slot])

    def check_newest(self, store: Store, version: int) -> None:
        """Return if the state of ``version`` is the one that this rank knows. Blocks: a GET for each record since.

        Raises
        ------
        BadInput, Conflict
            The live rows cannot be continued from it.
        """
        if self.known is None:
            raise BadInput(
                "this rank survived without a checkpoint that it has saved or restored; if a restore was interrupted, "
                "give its survivor= again, else restore without survivor= on all ranks"
            )
        for number in range(self.known.record.v + 1, version + 1):
            entry = store.internals.log.read(number)
            # A fence changes no row; it is this training's own where a rank was lost soon after a restore.
            if entry is None or not (entry.record.kind == "fence" or leaves_state(entry.record)):
                raise Conflict(
                    f"version {number} was committed after version {self.known.record.v}, the last that this rank "
                    "knows, so its rows do not follow the newest checkpoint; restore without survivor= on all ranks",
                    version=number, expected=self.known.record.v,
                )  # fmt: skip


def survivor_of(saver: Saver) -> Survivor:
    """End a training's saves after a rank was lost, and return what this rank has. Blocks for a running save.

    Raises
    ------
    BadInput, BadRowIds
        Which rows changed is not known; the other ranks can still recover without this one.
    Unsupported
        There are dynamic tables.
    """
    writer = saver.leave()
    if saver.training.dynamic.tables:
        raise Unsupported("dynamic tables are not recovered in part; restore without survivor= on all ranks")
    tracker = saver.training.tracker
    tracker.declare_boundary()  # rows that the interrupted step has looked up are marked
    marks = tracker.take()
    position = saver.position
    given = position.restored_state if position.given_state is None else position.given_state
    peers = saver.writer.peers
    return Survivor(
        position.step, given, None if writer is None else writer.head,
        {} if writer is None or not writer.is_synced else writer.mirrors.held(), marks,
        frozenset(saver.chain.whole_next), {} if peers is None else peers.kept, saver.training,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recovery:
    """Who survived: the same on all ranks.

    Attributes
    ----------
    step
        The last step of those that survived.
    source
        The first of them that had done it, whose copies all ranks take.
    lost
        The ranks that get their rows from the store, in order.
    """

    step: int
    source: int
    lost: tuple[int, ...]


def plan_recovery(steps: Sequence[int | None]) -> Recovery | None:
    """Return how ranks recover, by the last step of each that survived, in rank order; None if none did. Pure."""
    alive = [step for step in steps if step is not None]
    if not alive:
        return None
    return Recovery(max(alive), steps.index(max(alive)), tuple(rank for rank, step in enumerate(steps) if step is None))


@dataclass(frozen=True, slots=True, eq=False)
class SharedState:
    """What every rank has a copy of, as a rank that survived has it, and the plan that puts it in place.

    Attributes
    ----------
    planned
        The stored tables, and the live dense tensors, hyperparameters, step counters and extras.
    entries, dense
        The dense tensors, by name: dtype and shape, and elements in host memory.
    copies
        By table and slot (the weights: ``""``): replicated tables.
    """

    planned: Planned
    entries: Mapping[str, DenseEntry]
    dense: Mapping[str, Array]
    copies: Mapping[tuple[str, str], torch.Tensor]

    @torch.no_grad()
    def apply_copies(self, training: LiveTraining) -> None:
        """Put the replicated tables in place; no I/O."""
        live = _live_copies(training)
        for key, tensor in self.copies.items():
            live[key].copy_(tensor)


class _Sent(msgspec.Struct, frozen=True):
    """A tensor that is sent: a dense one by its ``name``, or ``slot`` of the replicated table of that name."""

    name: str
    slot: str | None
    dtype: TensorDtype
    shape: tuple[int, ...]


_sent_tensors = converter(list[_Sent])


def share_live_state(
    training: LiveTraining, planned: Planned, recovery: Recovery, survivor: Survivor | None
) -> SharedState | None:
    """Send what every rank has a copy of to all ranks; returned on those that take it. Blocks; all ranks call it.

    ``survivor``: this rank's.

    Raises
    ------
    BadInput
        The checkpoint has no state of a training, or the live state does not fit this rank's model.
    Unsupported
        A replicated table has a sparse slot.
    """
    is_source = survivor is not None and training.ranks.rank == recovery.source
    source: LiveTraining | None = survivor.training if survivor is not None and is_source else None
    tensors: list[torch.Tensor] = []

    def describe() -> dict[str, Any] | None:
        if source is None:
            return None
        state = source.plan.state_plan()
        other = other_state(state, source.optimizers)
        named: dict[tuple[str, str | None], torch.Tensor] = {
            (name, None): tensor for name, tensor in (state.dense | other.dense).items()
        }
        named |= _live_copies(source)
        tensors.extend(named.values())
        documents = {
            "optimizers": optimizer_documents(state, source.optimizers, other),
            "fused": fused_documents(state.shards.values()),
            "extras": {name: extra.state_dict() for name, extra in source.extras.items()},
        }
        return {
            "documents": document_tree.encode(documents, leaf_of),
            "tensors": [
                {"name": name, "slot": slot, "dtype": dense_dtype_name(tensor, name), "shape": [*tensor.shape]}
                for (name, slot), tensor in named.items()
            ],
        }

    told = together(training.control, describe)[recovery.source]
    sent = _sent_tensors(told["tensors"])
    if source is None:
        tensors = [torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="cpu") for one in sent]
    for tensor in tensors:
        if tensor.numel():
            training.control.broadcast(as_array(tensor).reshape(-1).view(np.uint8), recovery.source)
    shared: list[SharedState] = []

    def plan() -> None:
        if survivor is None or source is None or survivor.is_renewed(training):
            documents = document_tree.decode(told["documents"], tensor_of)
            shared.append(_planned_anew(training, planned, documents, dict(zip(sent, tensors, strict=True))))

    together(training.control, plan)
    return shared[0] if shared else None


def _planned_anew(
    training: LiveTraining, planned: Planned, documents: Mapping[str, Any], received: Mapping[_Sent, torch.Tensor]
) -> SharedState:
    if planned.trainer is None:
        raise BadInput("the newest checkpoint has no state of a training; restore without survivor= on all ranks")
    trainer = _with_live(planned.trainer, documents)
    dense = {one.name: tensor for one, tensor in received.items() if one.slot is None}
    entries = {
        one.name: DenseEntry(path="", offset=0, dtype=one.dtype, shape=one.shape, digest="", segment="")
        for one in received
        if one.slot is None
    }
    copies = {(one.name, one.slot): tensor for one, tensor in received.items() if one.slot is not None}
    plan = plan_restore(
        planned.snapshot.tables, entries, trainer, planned.state, training.holdings, training.optimizers
    )
    held = {(one.holding.key.table, slot) for one in plan.shards for slot in ("", *one.slots)}
    if missing := sorted(copies.keys() - held):
        raise BadInput(f"this rank has no copy of {missing}, which rank(s) that survived have", found=missing)
    return SharedState(
        replace(planned, plan=plan, trainer=trainer),
        entries, {name: as_array(tensor) for name, tensor in dense.items()}, copies,
    )  # fmt: skip


def _with_live(stored: TrainerDocument, live: Mapping[str, Any]) -> TrainerDocument:
    """Return the stored document with a rank's live hyperparameters, counters and extras. Pure."""
    optimizers = [
        OptimizerDocument(
            one.kind,
            [
                GroupDocument(group.parameters, own["options"])
                for group, own in zip(one.groups, given["groups"], strict=True)
            ],
            {**one.state, **given["state"]},
        )
        for one, given in zip(stored.optimizers, live["optimizers"], strict=True)
    ]
    return msgspec.structs.replace(
        stored, optimizers=optimizers, fused={**stored.fused, **live["fused"]}, extras=live["extras"]
    )


def _live_copies(training: LiveTraining) -> dict[tuple[str, str | None], torch.Tensor]:
    """Return the tensors of this rank's replicated tables, by table and slot; live.

    Raises
    ------
    Unsupported
    """
    found: dict[tuple[str, str | None], torch.Tensor] = {}
    for table in training.holdings.replicated:
        for holding in training.holdings.by_name.values():
            if holding.key.table != table:
                continue
            tensors = {"": holding.shard.weight.detach(), **live_slots(holding.shard)}
            for slot, tensor in tensors.items():
                if tensor.layout is not torch.strided:
                    raise Unsupported(
                        f"slot {slot!r} of table {table!r}, which every rank has a copy of, is sparse and cannot be "
                        "sent; restore without survivor= on all ranks",
                        table=table,
                    )  # fmt: skip
                found[table, slot] = tensor
    return found
