"""Read a checkpoint into a model: what a restore reads and plans, and `load`. Writes nothing to the store."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

import torch
from torch import nn

from cnr_store.errors import BadInput, VersionExpired, VersionNotFound
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.arguments import checked_choice
from cnr_store.runtime.ranks import Ranks, rank_zero, together
from cnr_store.store import Store
from cnr_store.training.communication_state import without_communication
from cnr_store.training.document import PROGRESS, TRAINER, TrainerDocument, rng_name, trainer_of
from cnr_store.training.dynamic_tables import DynamicTables
from cnr_store.training.matching import Resize, RestorePlan, plan_restore, without_optimizers
from cnr_store.training.ranks import ranks_of_this_training
from cnr_store.training.restoring import (
    apply_dense,
    check_columns,
    fill_new_rows,
    finish_tables,
    read_dense,
    read_tables,
    restore_targets,
)
from cnr_store.training.shards import Holdings, LocalShard, find_shards, hold, plain_optimizers, unwrapped
from cnr_store.training.state import StatePlan, find_local_shards, plan_state
from cnr_store.training.tensors import tensor_of
from cnr_store.types import SlotsRule

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")

_LOOKS = 3
"""How often a load is tried, if the head is compacted and deleted while it is loaded."""


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What was restored, or loaded by `load`.

    Attributes
    ----------
    step, version
        Training step of the state, and the version that it was read from.
    reader_state
        State of the reader, already given to the manager's ``reader`` if there is one; None if none was saved, and of
        `load`, which reads none.
    tables
        Names of the tables that were filled.
    missing, unexpected
        With ``strict=False``: what the training has and the checkpoint has not, and the other way round. Names of
        tables and dense tensors, ``optimizer/<number>``, and ``<table>/<slot>`` for optimizer state of rows.
    fallback_from
        The version that should have been restored and is damaged; None if there was no need to go back.
    problem
        What is wrong with that one.
    lost_ranks, stale_steps
        After a partial recovery: the ranks whose rows come from ``version``, and how many steps older those are than
        ``step``.
    peer_bytes
        How many bytes of this rank's rows were read from another rank's memory instead of the store (`PeerCopies`).
    """

    step: int
    version: int
    reader_state: Any
    tables: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    fallback_from: int | None = None
    problem: str | None = None
    lost_ranks: tuple[int, ...] = ()
    stale_steps: int = 0
    peer_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """What one rank will load, and where it goes.

    ``state``: everything of the live model and its optimizers. ``dynamic``: dynamic tables that will be replaced.
    """

    snapshot: Snapshot
    plan: RestorePlan
    state: StatePlan
    trainer: TrainerDocument | None
    dynamic: DynamicTables = field(default_factory=lambda: DynamicTables({}))


def plan_loading(
    snapshot: Snapshot,
    state: StatePlan,
    holdings: Holdings,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    tables: Mapping[str, str] | None,
    strict: bool,
    slots_rule: SlotsRule = "exact",
    resize: Resize | None = None,
    weights_only: bool = False,
    dynamic: DynamicTables | None = None,
) -> Planned:
    """Compare a version with the live training; changes nothing. Blocks: a document is read.

    ``weights_only``: as if the checkpoint had no optimizers.

    Raises
    ------
    BadInput, BadShape, BadDtype, DoesNotApply, TableNotFound, Unsupported, CorruptStore, VersionExpired, StorageFailure
    """
    dynamic = (dynamic or DynamicTables({})).found_in(snapshot, strict=strict)
    trainer = None
    if TRAINER in snapshot.documents:
        trainer = trainer_of(
            snapshot.read_document(TRAINER, tensor_of),
            snapshot.read_document(PROGRESS, tensor_of) if PROGRESS in snapshot.documents else None,
        )
    schemas = {name: schema for name, schema in snapshot.tables.items() if name not in dynamic.tables}
    dense = without_communication(snapshot.dense)
    if weights_only:
        (schemas, dense), trainer = without_optimizers(schemas, dense), None
    plan = plan_restore(
        schemas, dense, trainer, state, holdings, optimizers, name_map=tables, strict=strict, resize=resize
    )
    if slots_rule == "exact":
        check_columns(snapshot, plan)
    return Planned(snapshot, plan, state, trainer, dynamic)


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
    """Return the generators of a rank; None if the ranks that saved were fewer, or saved none. Blocks: a GET each."""
    snapshot, prefix = planned.snapshot, rng_name(rank)
    if planned.trainer is None:
        return None
    found = [name for name in snapshot.documents if name.startswith(prefix)]
    if not found and any(name.startswith(rng_name(0)) for name in snapshot.documents):
        logger.warning("version %d: rank %d had no random generators when this was saved", snapshot.version, rank)
    return {name.removeprefix(prefix): snapshot.read_document(name, tensor_of) for name in found} or None


def looking_again(load: Callable[[], Loaded], *, is_head: bool) -> Loaded:
    """Return what ``load`` returns; call it again where the head was compacted, and deleted, while it was loaded.

    Raises
    ------
    VersionExpired
        Again and again; or what expired is no head.
    """
    for _ in range(_LOOKS - 1 if is_head else 0):
        try:
            return load()
        except VersionExpired as error:
            logger.warning("the head was compacted while it was loaded (%s); looking at the new one", error)
    return load()


def load(
    store: str | os.PathLike[str] | Store,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    version: int | None = None,
    step: int | None = None,
    tag: str | None = None,
    channel: str | None = None,
    branch: str | None = None,
    tables: Mapping[str, str] | None = None,
    strict: bool = True,
    resize: Resize | None = None,
    ranks: Ranks | None = None,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
) -> RestoredState:
    """Read a checkpoint into a model, in place: to evaluate it, also beside the training that writes the store. Blocks.

    Writes nothing to the store and does not fence writers: read-only credentials are enough. Not for a model that a
    `CheckpointManager` saves: its `CheckpointManager.restore` does that. Where several ranks hold the model all of them
    call this, and each reads what it holds.

    Parameters
    ----------
    store
        URL or an open `Store`.
    optimizer
        Optimizers whose state is read as well, in the order in which they were saved; None reads weights alone.
    version, step, tag, channel
        Which one, at most one of them; the newest if none is given.
    branch
        With a URL: the branch that it is on.
    tables
        Stored name to mine, for tables that are named differently.
    strict
        Refuse when model and checkpoint differ in tables or dense tensors; else load what both have. Dynamic tables are
        no part of a model: leave them out so, and read them with `DynamicTables.restore`.
    resize
        As of `CheckpointManager.restore`, on any number of ranks.
    ranks
        The ranks that hold the model together; by default all of ``torch.distributed``, or this process alone.
    storage_options, threads
        As for `Store.open`, with a URL.

    Raises
    ------
    NotAStore, VersionNotFound, VersionExpired, TagNotFound, ChannelNotFound, BranchNotFound
    BadInput, BadShape, BadDtype, Unsupported
        Before anything is changed; also where nothing of the checkpoint fits.
    CorruptStore, StorageFailure
        The model may be half loaded.

    Examples
    --------
    >>> from cnr_store.training import CheckpointManager
    >>> trained = nn.Embedding(10, 2)
    >>> with CheckpointManager("memory://doctest-load", model=trained) as manager:
    ...     _ = manager.save()
    >>> load("memory://doctest-load", nn.Embedding(10, 2)).tables
    ('weight',)
    """
    if resize is not None:
        checked_choice("resize", resize, get_args(Resize))
    ranks = ranks_of_this_training() if ranks is None else ranks
    if isinstance(store, Store):
        if branch is not None:
            raise BadInput("branch= goes with a URL; open the store on its branch instead", found=branch)
        reading = _Reading(store, unwrapped(model), optimizer, tables, strict, resize, ranks)
        return reading.read(version, step, tag, channel)
    opened: list[Store] = []
    together(
        ranks,
        lambda: opened.append(Store.open(store, branch=branch, storage_options=storage_options, threads=threads)),
    )
    with opened[0] as here:
        reading = _Reading(here, unwrapped(model), optimizer, tables, strict, resize, ranks)
        return reading.read(version, step, tag, channel)


class _Reading:
    """One `load` from an open store."""

    def __init__(
        self,
        store: Store,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        tables: Mapping[str, str] | None,
        strict: bool,
        resize: Resize | None,
        ranks: Ranks,
    ) -> None:
        self._store, self._model, self._ranks = store, model, ranks
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
        self._optimizers, self._weights_only = plain_optimizers(given), optimizer is None
        self._tables, self._strict, self._resize = tables or {}, strict, resize

    def read(self, version: int | None, step: int | None, tag: str | None, channel: str | None) -> RestoredState:
        """Choose a version on rank 0 and read it on all."""

        def read() -> RestoredState:
            opened: list[Snapshot] = []

            def choose() -> int:
                opened.append(self._store.snapshot(version, step=step, tag=tag, channel=channel))
                return opened[0].version

            chosen = rank_zero(self._ranks, choose)
            found: list[list[LocalShard]] = []

            def find() -> None:
                if not opened:
                    opened.append(self._store.snapshot(chosen))
                found.append(self._find_shards(opened[0]))

            together(self._ranks, find)
            holdings, planned = hold(found[0], self._ranks), list[Planned]()
            together(self._ranks, lambda: planned.append(self._plan(opened[0], holdings)))
            together(self._ranks, lambda: self._put(planned[0]))
            snapshot, plan = planned[0].snapshot, planned[0].plan
            return RestoredState(
                snapshot.step, snapshot.version, None, tuple(plan.renamed), plan.missing, plan.unexpected
            )

        return looking_again(read, is_head=version is None and step is None and tag is None and channel is None)

    def _find_shards(self, snapshot: Snapshot) -> list[LocalShard]:
        """This rank's; a parameter is a table if it is stored as one."""
        if snapshot.is_empty:
            raise VersionNotFound(
                f"{self._store.url} holds no checkpoint at version {snapshot.version}", version=snapshot.version
            )
        sharded = {shard.table for shard in find_shards(self._model, self._optimizers)}
        mine = {self._tables.get(name, name) for name in snapshot.tables} - sharded
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        return find_local_shards(self._model, self._optimizers, sorted(mine & parameters.keys()), self._ranks)[1]

    def _plan(self, snapshot: Snapshot, holdings: Holdings) -> Planned:
        state = plan_state(self._model, self._optimizers, holdings.shards, holdings.tables)
        return plan_loading(
            snapshot, state, holdings, self._optimizers, tables=self._tables, strict=self._strict,
            resize=self._resize, weights_only=self._weights_only,
        )  # fmt: skip

    def _put(self, planned: Planned) -> None:
        plan, snapshot = planned.plan, planned.snapshot
        targets = restore_targets(plan, self._optimizers)
        dense = read_dense(snapshot, plan, self._optimizers)
        read_tables(snapshot, targets)
        finish_tables(snapshot, targets, self._optimizers, "exact")
        apply_dense(plan, dense, snapshot.dense, planned.state, self._optimizers)
        fill_new_rows(plan, self._resize)
