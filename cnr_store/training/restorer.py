"""Puts a checkpoint into the live training, and makes the saver continue from it. Nothing is written to the store.

Where the head of the store is damaged, the ranks find the newest version that is whole together (`go_back`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from cnr_store.communication.state import RankState
from cnr_store.errors import (
    BadInput,
    CorruptRecord,
    CorruptStore,
    DoesNotApply,
    RankLost,
    VersionExpired,
    VersionNotFound,
)
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import DenseEntry
from cnr_store.maintenance.repair import read_end
from cnr_store.maintenance.verify import find_newest_whole
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.arguments import checked_choice
from cnr_store.runtime.caller import warn_caller
from cnr_store.runtime.ranks import Ranks, described, rank_zero, together
from cnr_store.store import Store
from cnr_store.training.communication_state import check_saved, stored_communication
from cnr_store.training.document import RateDocument
from cnr_store.training.live_training import LiveTraining
from cnr_store.training.loading import (
    Planned,
    RestoredState,
    check_extras,
    looking_again,
    plan_loading,
    stored_rng,
)
from cnr_store.training.matching import Resize
from cnr_store.training.options import SavePolicy
from cnr_store.training.reader import Redistribute, restore_rng, resume, stored_reader_state
from cnr_store.training.restoring import (
    Targets,
    apply_dense,
    check_resizable,
    fill_new_rows,
    finish_tables,
    read_dense,
    restore_targets,
)
from cnr_store.training.save_plan import ChainState, sizes_since_baseline
from cnr_store.training.saver import Saver
from cnr_store.training.schedule import TrainingPosition
from cnr_store.training.survivor import Recovery, SharedState, Survivor, plan_recovery, share_live_state
from cnr_store.training.tensors import Array
from cnr_store.training.training_writer import TakeOver
from cnr_store.types import Lattice, RowIds, SlotsRule
from cnr_store.write.policy import CheckpointSize
from cnr_store.write.writer import Writer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What the caller of `CheckpointManager.restore` asks for; see there.

    Raises
    ------
    BadInput
    """

    version: int | None
    step: int | None
    tag: str | None
    channel: str | None
    tables: Mapping[str, str] | None
    strict: bool
    resize: Resize | None
    slots_rule: SlotsRule
    fallback: bool
    redistribute: Redistribute | None
    survivor: Survivor | None = None

    def __post_init__(self) -> None:
        if self.resize is not None:
            checked_choice("resize", self.resize, get_args(Resize))
        if self.fallback and not self.is_head:
            raise BadInput("fallback= is for the head: leave out version=, step=, tag= and channel=, or fallback=")
        changes = (self.tables, self.resize, self.redistribute)
        is_plain = self.is_head and self.strict and not self.fallback and self.slots_rule == "exact"
        if self.survivor is not None and not (is_plain and all(one is None for one in changes)):
            raise BadInput("survivor= continues the live training from the head: leave out all other arguments")

    @property
    def is_head(self) -> bool:
        """Whether the newest checkpoint is meant."""
        return self.version is None and self.step is None and self.tag is None and self.channel is None


def choose_start(store: Store, request: RestoreRequest) -> tuple[Snapshot, int]:
    """Return what to restore, by at most one of version, step, tag and channel, and the newest version.

    The snapshot is empty if nothing was saved yet. A few GETs.

    Raises
    ------
    BadInput, VersionNotFound, VersionExpired, TagNotFound, ChannelNotFound, CorruptStore, StorageFailure
    """
    newest = store.head().record.v
    if request.is_head:
        snapshot = store.snapshot(newest)
    else:
        snapshot = store.snapshot(request.version, step=request.step, tag=request.tag, channel=request.channel)
        if snapshot.is_empty and request.step is None:
            raise VersionNotFound(f"version {snapshot.version} holds no checkpoint", version=snapshot.version)
    return snapshot, newest


@dataclass(frozen=True, slots=True, eq=False)
class _ReadState:
    """What a restore reads before the tables, and where those go."""

    dense: Mapping[str, Array]
    entries: Mapping[str, DenseEntry]
    reader_state: Any
    rng: dict[str, Any] | None
    sizes: list[CheckpointSize]
    changed: Mapping[str, RowIds]
    targets: Targets
    communication: Mapping[str, RankState]


@dataclass(slots=True, eq=False)
class Restorer:
    """Restores checkpoints in place. Call it from the thread that trains, on all ranks."""

    training: LiveTraining
    chain: ChainState
    position: TrainingPosition
    saver: Saver
    store: Store
    policy: SavePolicy

    def restore(self, request: RestoreRequest) -> RestoredState | None:
        """See `CheckpointManager.restore`."""
        control = self.training.control
        self.saver.reports.report_together(self.saver.collect(wait=True))
        self.saver.writer.wait()
        self.saver.settle()

        steps = together(control, lambda: None if request.survivor is None else request.survivor.step)
        recovery = plan_recovery(steps)

        def load() -> RestoredState | None:
            opened: list[Snapshot] = []  # on rank 0

            def choose() -> dict[str, int | bool]:
                snapshot, newest = choose_start(self.store, request)
                opened.append(snapshot)
                return {"version": snapshot.version, "newest": newest, "is_empty": snapshot.is_empty}

            chosen = rank_zero(control, choose)
            take_over = TakeOver(self.store, chosen["version"], chosen["newest"])
            if recovery is not None and chosen["is_empty"]:
                raise VersionNotFound(
                    f"{self.store.url} has no checkpoint, so the rows of ranks {list(recovery.lost)} are lost; restart "
                    "the training on all ranks"
                )
            if recovery is not None:
                return self._recover(take_over, request, recovery, opened)
            if chosen["is_empty"]:
                with self.saver.continuing(take_over):
                    return None
            return self._load(take_over, request, opened)

        try:
            return looking_again(load, is_head=request.is_head)
        except RankLost:
            raise
        except Exception as error:
            if not request.fallback:
                if request.is_head and isinstance(error, CorruptStore):
                    error.message += "; restore(fallback=True) goes on from the newest version that is whole"
                raise
            back = go_back(control, self.store, error)
        warn_caller(str(back))
        restored = self._load(TakeOver(self.store, back.target, back.newest, back.torn), request)
        return replace(restored, fallback_from=back.damaged, problem=back.problem)

    def _load(
        self, take_over: TakeOver, request: RestoreRequest, opened: Sequence[Snapshot] = ()
    ) -> RestoredState:  # fmt: skip
        """Put a version in place, and continue from it at the next step or save; nothing is written before that.

        ``opened``: its snapshot, where this rank has it already.
        """
        planned: list[Planned] = []
        # On every rank before anything is changed on one.
        together(self.training.control, lambda: planned.append(self._plan(take_over.version, request, opened)))
        restored = self._put_in_place(take_over, planned[0], request)
        if not request.strict or request.slots_rule != "exact":
            self.chain.whole_next |= self.training.tables  # what was left out is not what the mirrors hold
        return restored

    def _recover(
        self, take_over: TakeOver, request: RestoreRequest, recovery: Recovery, opened: Sequence[Snapshot]
    ) -> RestoredState:  # fmt: skip
        """Put the rows of lost ranks in place, and continue with those of the others (`survivor`)."""
        training, survivor = self.training, request.survivor
        planned: list[Planned] = []

        def plan() -> None:
            if survivor is not None:
                survivor.check_newest(self.store, take_over.version)
                survivor.check_shards(training)
            planned.append(self._plan(take_over.version, request, opened))

        together(training.control, plan)
        shared = share_live_state(training, planned[0], recovery, survivor)
        peers, snapshot, peer_bytes = self.saver.writer.peers, planned[0].snapshot, 0
        if peers is not None:
            copies = None if survivor is None else survivor.copies
            peers.lend(training.control, recovery.lost, copies, snapshot.record.chain)
        try:
            restored = self._put_in_place(
                take_over, planned[0] if shared is None else shared.planned, request, shared, recovery.step
            )
        finally:
            if peers is not None:
                peer_bytes = peers.take_back()
        stale_steps = recovery.step - snapshot.step
        return replace(restored, lost_ranks=recovery.lost, stale_steps=stale_steps, peer_bytes=peer_bytes)

    def _plan(self, version: int, request: RestoreRequest, opened: Sequence[Snapshot]) -> Planned:
        training, snapshot = self.training, opened[0] if opened else self.store.snapshot(version)
        planned = plan_loading(
            snapshot, training.plan.state_plan(), training.holdings, training.optimizers,
            tables=request.tables, strict=request.strict, slots_rule=request.slots_rule, resize=request.resize,
            dynamic=training.dynamic,
        )  # fmt: skip
        check_resizable(planned.plan, training.holdings)
        if request.strict:
            check_extras(planned.trainer, training.extras)
            check_saved(planned.snapshot, training.communication)
        return planned

    def _put_in_place(
        self, take_over: TakeOver, planned: Planned, request: RestoreRequest, shared: SharedState | None = None,
        live_step: int | None = None,
    ) -> RestoredState:  # fmt: skip
        """``shared``: what this rank takes from another; ``live_step``: the step of a training that goes on."""
        training, chain, survivor = self.training, self.chain, request.survivor
        step = planned.snapshot.step if live_step is None else live_step
        with self.saver.continuing(take_over) as writer:
            found: list[_ReadState] = []
            together(training.control, lambda: found.append(self._read_all_but_tables(planned, request, shared)))
            read = found[0]
            held = None if survivor is None else survivor.mirrors
            filled = writer.restore(
                read.targets.outputs, slots_rule=request.slots_rule, held=held, opened=planned.snapshot.known_readers
            )

            def apply() -> None:
                if survivor is None:
                    try:
                        finish_tables(filled, read.targets, training.optimizers, request.slots_rule)
                        planned.dynamic.restore(filled, writer.keys)
                    except DoesNotApply as error:  # compacted, and its segments deleted, since the writer read it
                        raise VersionExpired(str(error), version=planned.snapshot.version) from error
                    fill_new_rows(planned.plan, request.resize)
                elif survivor.is_renewed(training):
                    restore_targets(planned.plan, training.optimizers)  # makes state where an optimizer has none yet
                    survivor.move_rows(training)
                if survivor is None or shared is not None:
                    self._apply_state(planned, read)
                if survivor is None and training.reader is not None and read.reader_state is not None:
                    resume(training.reader, read.reader_state)
                if shared is not None:
                    shared.apply_copies(training)
                self._begin_anew(writer, planned, read, step)
                if survivor is not None:
                    training.tracker.give_back(survivor.marks)
                    chain.whole_next |= survivor.whole_next

            together(training.control, apply)
        document = RateDocument() if planned.trainer is None else planned.trainer.rate
        chain.rate.restored(training.control, writer, document, training.tables - chain.whole_next)
        chain.quality = None
        if self.policy.rng and read.rng is not None:
            restore_rng(read.rng)  # last: nothing that restores may draw from what it set
        plan, snapshot = planned.plan, planned.snapshot
        by_key = planned.dynamic.tables
        missing = (*plan.missing, *sorted(training.dynamic.tables.keys() - by_key.keys()))
        return RestoredState(
            step, snapshot.version, read.reader_state, (*plan.renamed, *by_key), missing, plan.unexpected
        )

    def _read_all_but_tables(
        self, planned: Planned, request: RestoreRequest, shared: SharedState | None
    ) -> _ReadState:  # fmt: skip
        snapshot, plan, ranks = planned.snapshot, planned.plan, self.training.ranks
        if self.policy.policy in ("one_shot", "intermittent"):
            sizes = sizes_since_baseline(self.policy.policy, self.store.log(snapshot.version))
            mine = {own.key.table for own in self.training.holdings.by_name.values()}
            changed = {
                name: snapshot.table(stored).changed_rows() for name, stored in plan.renamed.items() if name in mine
            }
        else:
            sizes, changed = sizes_since_baseline(self.policy.policy, [snapshot.record]), {}
        if request.survivor is not None:
            dense, entries = (shared.dense, shared.entries) if shared else ({}, {})
            return _ReadState(
                dense, entries, request.survivor.reader_state, None, sizes, changed, Targets({}, [], []), {}
            )  # fmt: skip
        reader_state = stored_reader_state(snapshot, ranks, request.redistribute, strict=request.strict)
        communication = stored_communication(snapshot, self.training.communication, ranks)
        rng = stored_rng(planned, ranks.rank)
        targets = restore_targets(plan, self.training.optimizers)
        if shared is not None:  # of other tables a rank that survived gives its copy
            targets = targets.only({own.key for own in self.training.holdings.owned.values()})
            dense, entries = shared.dense, shared.entries
        else:  # last: it writes live tensors
            dense, entries = read_dense(snapshot, plan, self.training.optimizers), snapshot.dense
        return _ReadState(dense, entries, reader_state, rng, sizes, changed, targets, communication)

    def _apply_state(self, planned: Planned, read: _ReadState) -> None:
        """Give dense tensors, optimizers, extras and communication what was read."""
        training, trainer = self.training, planned.trainer
        apply_dense(planned.plan, read.dense, read.entries, planned.state, training.optimizers)
        for name, extra in training.extras.items():
            if trainer is not None and name in trainer.extras:
                try:
                    extra.load_state_dict(trainer.extras[name])
                except Exception as error:
                    error.add_note(
                        f"extras[{name!r}], a {type(extra).__name__}, does not take its state of version "
                        f"{planned.snapshot.version}. To restore all but this state, give it another name in extras= "
                        "of a new manager, and restore(strict=False)"
                    )
                    raise
        for one in training.communication:
            if one.name in read.communication:
                one.load_rank_state(read.communication[one.name])

    def _begin_anew(self, writer: Writer, planned: Planned, read: _ReadState, step: int) -> None:
        """Forget what was trained and saved so far: what is known of the chain is what was restored."""
        training, chain, plan, snapshot = self.training, self.chain, planned.plan, planned.snapshot
        training.tracker.reset()
        writer.mirrors.options.update(training.options)
        chain.lineage.restored(read.sizes, read.changed, training.holdings.by_name)
        chain.whole_next = {name for name in training.tables if plan.renamed.get(name) != name}
        chain.whole_next |= chain.growing.restored(plan, training.holdings, self.policy.policy, training.tracker)
        if planned.trainer is None:  # weights that were imported: which bits their scales are for is not recorded
            kept = training.tables - chain.whole_next
            lattices = {name for name in kept if isinstance(snapshot.tables[name].encoding, Lattice)}
            chain.whole_next |= lattices
            if lattices:
                logger.info("version %d was not saved by a training; the next save is a baseline", snapshot.version)
        self.position.restored(step, read.reader_state)
        self.saver.schedule.mark(step, time.monotonic())
        logger.info("restored step %d from version %d of %s", snapshot.step, snapshot.version, self.store.url)


@dataclass(frozen=True, slots=True)
class WentBack:
    """What a training continues from, the same on all ranks.

    Attributes
    ----------
    damaged
        The version that should have been restored.
    target
        The newest version that is whole.
    newest, torn
        The newest record that could be read, and the sha256 of each later position that could not.
    problem
        What is wrong, and which object it is.
    """

    damaged: int
    target: int
    newest: int
    torn: tuple[str, ...]
    problem: str

    def __str__(self) -> str:
        return (
            f"version {self.damaged} cannot be restored ({self.problem}); continuing from version {self.target}, the "
            "newest undamaged one; a rollback record will precede the first save after it"
        )


def go_back(ranks: Ranks, store: Store, error: Exception) -> WentBack:
    """Return the newest version that is whole. All ranks call it with what their restore raised. Blocks.

    Rank 0 reads the candidates, every object of them.

    Raises
    ------
    Exception
        ``error``, if that is no damage on some rank, or no version is whole.
    StorageFailure, AccessDenied
    """
    answers = together(ranks, lambda: _damage_here(error))
    if not all(one["is_damage"] for one in answers):
        raise error
    problem = next((one["message"] for one in answers if one["segment"]), answers[0]["message"])
    segments = {one["segment"] for one in answers if one["segment"]}
    answer = rank_zero(ranks, lambda: _find_whole(store, segments, answers[0]["kind"]))
    if answer is None:
        raise error
    return WentBack(problem=problem, **{**answer, "torn": tuple(answer["torn"])})


def _damage_here(error: Exception) -> dict[str, Any]:
    """What this rank knows of the damage, as plain JSON: an error of another rank has lost its path."""
    path = getattr(error, "path", None) or ""
    folder, _, rest = path.partition("data/")
    return {
        **described(error), "is_damage": isinstance(error, CorruptStore),
        "segment": rest.partition("/")[0] if not folder else "",
    }  # fmt: skip


def _find_whole(store: Store, damaged: Collection[str], kind: str) -> dict[str, Any] | None:
    """On rank 0: find the newest whole version; None if there is none."""
    tail = read_end(store)
    if tail.last is None:
        return None
    last = tail.last.record
    if not damaged and kind != CorruptRecord.kind and last.chain and tail.lost is None:
        damaged = {last.chain[-1].seg}  # a state that is wrong, and no object that is
    found = find_newest_whole(store, avoid=damaged)
    if found.entry is None:
        return None
    return {
        "damaged": tail.newest if tail.torn else _checkpoint(store, tail.last), "target": found.entry.record.v,
        "newest": last.v, "torn": tail.torn,
    }  # fmt: skip


def _checkpoint(store: Store, head: LogEntry) -> int:
    """Return the version that saved the head's state: later fences and tags only repeat its chain."""
    version = head.record.v
    try:
        for entry in store.internals.log.walk(head):
            if entry.record.chain != head.record.chain:
                break
            version = entry.record.v
    except CorruptStore:
        pass  # Only for the message: damage of older records does not matter here.
    return version
