"""`CheckpointManager`: saves a training in the background and restores it after a crash.

It decides when to save. `saver` saves, `restorer` restores, `live_training` has the objects that are trained.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import nn

from cnr_store.communication.state import CommunicationState
from cnr_store.errors import BadInput, CnrStoreError
from cnr_store.format.notes import checked_notes
from cnr_store.runtime.closing import Closing
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.store import Store
from cnr_store.training.background import SaveReport, raise_failure
from cnr_store.training.dense_staging import DenseStaging
from cnr_store.training.live_training import watch_training
from cnr_store.training.loading import RestoredState
from cnr_store.training.matching import Resize
from cnr_store.training.options import PrecisionPolicy, SavePolicy, StoreOptions, TrackingOptions
from cnr_store.training.peers import peers_of
from cnr_store.training.precision.rate_control import RateStatus
from cnr_store.training.ranks import ranks_of_this_training
from cnr_store.training.reader import Redistribute, Stateful, check_stateful
from cnr_store.training.restorer import Restorer, RestoreRequest
from cnr_store.training.save_plan import new_chain_state
from cnr_store.training.save_staging import SaveStager
from cnr_store.training.saver import FailureReports, Saver, save_due
from cnr_store.training.schedule import EXIT_CODE, SaveBoundary, StopSignal, TrainingPosition, new_schedule
from cnr_store.training.survivor import Survivor, survivor_of
from cnr_store.training.training_writer import TrainingWriter, open_or_create
from cnr_store.types import JsonValue, SlotsRule
from cnr_store.write.table_options import TableOptions
from cnr_store_gpu import RowTracker

logger = logging.getLogger(__name__)

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _in_turn(
    method: Callable[Concatenate[CheckpointManager, Given], Result],
) -> Callable[Concatenate[CheckpointManager, Given], Result]:
    """Return a method that needs an open manager and that one thread at a time is in."""

    @functools.wraps(method)
    def call(manager: CheckpointManager, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        if manager._process != os.getpid():  # before the lock, which a thread of the parent may have held
            raise BadInput(
                f"the checkpoint manager belongs to process {manager._process}; this one was forked from it, and has "
                "none of its threads. Call it there, or make a manager here, for another store",
                expected=manager._process, found=os.getpid(),
            )  # fmt: skip
        with manager._turn:
            if manager._is_closed:
                raise BadInput("the checkpoint manager is closed; make another one")
            return method(manager, *args, **kwargs)

    return call


class CheckpointManager(Closing):
    """Saves the training state of a model to a store and restores it in place.

    Call it from the thread that trains: a call of another one waits, and may save half a step. A forked process needs
    its own. One save at a time runs in the background; the training stalls for one copy of the touched rows.

    Under ``torch.distributed`` every rank makes a manager with the same arguments, and calls its methods at the same
    steps. Each rank saves what it holds, all ranks together one checkpoint. A save succeeds on all ranks or fails on
    all. A table that every rank has a copy of (DistributedDataParallel) is saved by one rank.

    Parameters
    ----------
    store
        URL (created if there is no store) or an open `Store`, which may be on a branch.
    model, optimizer
        What is trained; ``optimizer`` is one or several, always in the same order.
    reader
        The source of batches, if it has a state: `step` calls its ``state_dict()``.
    extras
        Other objects with a state, by name: learning rate schedulers, a GradScaler.
    communication
        Hooks, optimizers and meters of `cnr_store.communication`, always in the same order. Each rank's state is saved.
    options
        How tables are stored: for all, or by table name.
    every_steps
        A save is due after this many steps; ``"auto"``: as often as ``SavePolicy.overhead`` allows. Without it, and
        without ``SavePolicy.every_seconds``, only `save` saves.
    save_policy, tracking, precision, store_options
        When and how much is saved, and what a failure does; how changed rows are found and copied; how exactly tables
        are stored during the run; how the store is opened and written, and by which ranks.

    Raises
    ------
    BadInput, TableNotFound, BadDtype
        The model or its optimizers cannot be saved with these options; nothing was written.

    Examples
    --------
    >>> model = nn.Embedding(100, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> manager = CheckpointManager("memory://doctest-manager", model=model, optimizer=optimizer, every_steps=2)
    >>> manager.restore() is None
    True
    >>> for step in range(4):
    ...     loss = model(torch.tensor([step, step + 1])).sum()
    ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
    ...     _ = manager.step()
    >>> manager.close()
    >>> [(report.step, report.kind) for report in manager.history]
    [(2, 'baseline'), (4, 'delta')]
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        reader: Stateful | None = None,
        extras: Mapping[str, Stateful] | None = None,
        communication: Sequence[CommunicationState] = (),
        options: TableOptions | Mapping[str, TableOptions] | None = None,
        every_steps: int | Literal["auto"] | None = None,
        save_policy: SavePolicy = SavePolicy(),  # noqa: B008 (frozen)
        tracking: TrackingOptions = TrackingOptions(),  # noqa: B008 (frozen)
        precision: PrecisionPolicy = PrecisionPolicy(),  # noqa: B008 (frozen)
        store_options: StoreOptions = StoreOptions(),  # noqa: B008 (frozen)
    ) -> None:
        schedule = new_schedule(every_steps, save_policy, time.monotonic())
        ranks = _checked_ranks(store, reader, extras or {}, save_policy, tracking, store_options)
        self._policy, self._is_closed = save_policy, False
        self._turn, self._process = threading.RLock(), os.getpid()
        self._training = training = watch_training(
            model, optimizer, reader, extras or {}, communication, options, ranks,
            tracking=tracking, precision=precision, store_options=store_options,
        )  # fmt: skip
        try:
            chain = new_chain_state(training, precision)
            self._position = position = TrainingPosition(reader)
            self._boundary = SaveBoundary(training.control, training.tracker, position, training.intervals)
            self._reports = FailureReports(training.control, save_policy.on_error)
            self._owns_store = not isinstance(store, Store)
            self._store = store if isinstance(store, Store) else open_or_create(store, store_options, training.control)
            self._peers = peers_of(store_options.peers, training.ranks, training.control, self._store.storage)
            self._stop = StopSignal(training.control, is_caught=save_policy.save_on_sigterm is not False)
        except BaseException:
            training.detach()
            raise
        self._saver = Saver(
            training, chain, position, schedule,
            SaveStager(
                training, chain, position, DenseStaging(is_lazy=save_policy.dense_copies == "lazy"),
                tracking.quantize_on_device, save_policy.rng, precision.residual_bits,
            ),
            TrainingWriter(self._store, store_options, ranks, training.holdings.placement, self._peers), save_policy,
            self._reports,
        )  # fmt: skip
        self._restorer = Restorer(training, chain, position, self._saver, self._store, save_policy)

    @_in_turn
    def step(self, step: int | None = None, *, reader_state: Any = None) -> bool:
        """Count a trained step and save if one is due; call it after ``optimizer.step()``.

        If a save is due, it blocks until its rows are copied, else for microseconds. The first, also after `restore`,
        has the background take over the store: then no earlier training can save; a save that is due waits for that.

        Parameters
        ----------
        step
            The number of the step; by default one more than the last.
        reader_state
            State of the reader after the trained batch, if batches are fetched ahead of training. It counts for this
            step only. Without it the ``reader`` is asked; without a reader, every later step needs it too.

        Returns
        -------
        bool
            Whether SIGTERM has come, the state was saved, and the loop should end.

        Raises
        ------
        BackgroundSaveFailed
            An earlier save failed; its rows are saved with the next one. All ranks raise together, at the next save.
        BadInput
            ``step`` is no number; without a reader, no ``reader_state`` although an earlier step had one. Not counted.
        Conflict
            Another training (it is named) has saved since the restore. Raised by the first call after it is known.
        SaveInProgress
            With ``when_busy="refuse"``.
        SystemExit
            After SIGTERM, with ``save_on_sigterm=True``.
        """
        self._position.check_given(step, reader_state)
        if self._training.intervals is not None:
            self._training.intervals.trained()
        self._position.advance(step, reader_state)
        self._saver.stepped()
        if self._stop.asks_at_step():
            if self._boundary.must_wait():
                return False
            self._save_last()
            if self._policy.save_on_sigterm is True:
                raise SystemExit(EXIT_CODE)
            return True
        self._saver.collect_at_step(self._boundary.must_wait)
        if self._saver.schedule.is_due(self.current_step, time.monotonic()) and not self._boundary.must_wait():
            save_due(self._saver)
        return False

    @_in_turn
    def save(
        self, *, wait: bool = True, message: str | None = None, metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, JsonValue] | None = None,
    ) -> SaveReport | None:  # fmt: skip
        """Save now, whether a save is due or not; waits for a save that is running.

        Parameters
        ----------
        wait
            Block until the save is committed, and return its report. Else return at once: it runs in the background.
        message, metrics, metadata
            Recorded with the save: a text (1 KiB), finite numbers by name (64; see `Store.best`), JSON (8 KiB).

        Raises
        ------
        BackgroundSaveFailed
            With its cause, for each value of ``on_error``. The rows stay dirty.
        BadInput
            Between forward and optimizer step; a note is too long, or no number or JSON.
        """
        notes = checked_notes(message, metrics, metadata)
        self._reports.raise_together(self._saver.collect(wait=True))
        together(self._training.control, self._training.tracker.check_boundary)
        self._saver.begin(wait_s=0.0, notes=notes)
        if wait:
            raise_failure(self._saver.collect(wait=True))
        return self.last_save if wait else None

    @_in_turn
    def wait_until_finished(self) -> SaveReport | None:
        """Wait for a running save, or a takeover of the store; returns the report of the newest committed save.

        Raises
        ------
        BackgroundSaveFailed
            It failed; for each value of ``on_error``. What prevented a takeover is raised as it is.
        """
        self._reports.raise_together(self._saver.collect(wait=True))
        if self._saver.writer.opening is not None:
            self._saver.ready_writer()
        return self.last_save

    def report_loss(self, loss: float | torch.Tensor) -> None:
        """Report the loss of a step, for ``schedule="loss"``; of several ranks, that of rank 0 counts.

        The mean of about the last hundred losses is kept, also across restarts. Losses that are 0 or not finite do not
        count; without a schedule, negative ones do not count either. Reading a tensor waits for its device.

        Raises
        ------
        BadInput
            It is negative, and ``schedule="loss"`` follows it.
        """
        self._saver.chain.rate.report_loss(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))

    @_in_turn
    def restore(
        self,
        *,
        version: int | None = None,
        step: int | None = None,
        tag: str | None = None,
        channel: str | None = None,
        tables: Mapping[str, str] | None = None,
        strict: bool = True,
        resize: Resize | None = None,
        slots_rule: SlotsRule = "exact",
        fallback: bool = False,
        redistribute: Redistribute | None = None,
        survivor: Survivor | None = None,
    ) -> RestoredState | None:
        """Put a checkpoint into the model, the optimizers, the reader and the generators, in place. Blocks.

        Nothing is written: another training may go on with the store, and an evaluation call this, or `load`, which
        needs no manager. The first `step` or `save` then takes over the store, and records a rollback if this is not
        the head. What was trained since the last save is lost.

        Parameters
        ----------
        version, step, tag, channel
            Which one; else the head.
        tables
            Stored name to the model's name, for tables whose names differ.
        strict
            Refuse where checkpoint and model differ in tables, dense tensors, optimizers or the number of ranks; else
            restore what both have and return what was ``missing`` and ``unexpected``; the next save is then a baseline.
        resize
            Take tables that have more rows than the stored ones: the new rows get the stored table's ``fill``, or stay
            as the ``model`` has them, as their optimizer state does. For trainings of one process with whole tables.
        slots_rule
            For slots with one value per row and column shard, where columns are cut otherwise than in the checkpoint:
            refuse, take the ``mean`` over a row's shards, or ``drop`` them (they stay as they are).
        fallback
            If the head is damaged, warn and restore the newest undamaged version instead, which is read once more. The
            next save commits a rollback record first. Damaged objects stay in the store. Only for the head.
        redistribute
            For another number of ranks, refused without it: from the list of saved reader states to one for each rank.
        survivor
            On ranks that outlived a lost one: what `survivor` returned. These ranks keep their rows and state; ranks
            without one read their rows from the head, and get a copy of all else from the first rank that survived.
            Where this manager's model or optimizers are others than those which survived, their state is copied into
            them. Only for the head, with the same shards.

        Returns
        -------
        RestoredState or None
            None if the store is empty.

        Raises
        ------
        BadInput, BadShape, BadDtype, Unsupported, VersionNotFound, VersionExpired, TagNotFound, ChannelNotFound
            Before anything is changed; also where nothing of the checkpoint fits the training.
        Conflict
            With ``survivor``: a checkpoint was committed that this rank does not know. Nothing was changed.
        CorruptStore, StorageFailure, RankLost
            Weights may be half restored: restore again, or restore another version.
        """
        return self._restorer.restore(RestoreRequest(
            version=version, step=step, tag=tag, channel=channel, tables=tables, strict=strict, resize=resize,
            slots_rule=slots_rule, fallback=fallback, redistribute=redistribute, survivor=survivor,
        ))  # fmt: skip

    @_in_turn
    def survivor(self) -> Survivor:
        """Close this manager after another rank was lost, and return what this rank needs to keep its rows. Blocks.

        Call it on each rank that is left, where a step has failed. Then make the process group and a new manager, as
        the process in place of the lost rank does, and give the result to `restore`, once more if it raises RankLost.

        Raises
        ------
        BadInput, BadRowIds, Unsupported
            Which rows changed is not known, or there are dynamic tables: restore without it.
        """
        self._stop.close()
        try:
            return survivor_of(self._saver)
        finally:
            self._end()

    @property
    def history(self) -> list[SaveReport]:
        """Reports of the committed saves, oldest first."""
        return self._saver.history

    def all_steps(self) -> list[int]:
        """Return the steps that can be restored, ascending; reads each record of the log."""
        return self._store.steps()

    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint in the store, None if there is none; a few requests."""
        record = self._store.head().record
        return record.step if record.chain else None

    @property
    def last_save(self) -> SaveReport | None:
        """The report of the newest committed save that the training thread has taken notice of."""
        return self._saver.last_save

    @property
    def current_step(self) -> int:
        """Steps trained, counted by `step`."""
        return self._position.step

    @property
    def should_stop(self) -> bool:
        """Whether SIGTERM has come; the next `step` acts on it. Another handler of your own may set it."""
        return self._stop.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._stop.should_stop = value

    @property
    def is_saving(self) -> bool:
        """Whether a save is running in the background."""
        return self._saver.is_saving

    @property
    def rate(self) -> RateStatus:
        """How exactly tables are stored, what the next save changes, and how often ``every_steps="auto"`` saves."""
        return replace(self._saver.chain.rate.status, interval=self._saver.schedule.interval)

    @property
    def store(self) -> Store:
        """The store that is written to."""
        return self._store

    @property
    def tracker(self) -> RowTracker:
        """The row tracker: `mark` rows that are written by code other than a known optimizer."""
        return self._training.tracker

    @property
    def mirror_bytes(self) -> int:
        """Bytes that the code mirrors take now."""
        return self._saver.writer.mirror_bytes

    @property
    def peer_bytes(self) -> int:
        """Bytes that this rank keeps now for others (`PeerCopies`)."""
        return 0 if self._peers is None else self._peers.nbytes

    def _save_last(self) -> None:
        """Save because the process is about to end; an earlier failure must not prevent it."""
        if (error := self._saver.collect(wait=True)) is not None:
            logger.error("the save before the last one failed, its rows are in the last one: %s", error)
        self.save()

    def __repr__(self) -> str:
        return f"<CheckpointManager {self._store.url}, step {self.current_step}>"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except CnrStoreError as failure:
            # The error that ended the training is the one to see.
            logger.error("a checkpoint failed while the training ended: %s", failure)

    def close(self) -> None:
        """Wait for a running save, remove all hooks, close the store. Saves nothing more; a second call does nothing.

        Raises
        ------
        BackgroundSaveFailed
            The last save failed, or its outcome could not be learned.
        """
        if self._process != os.getpid():
            return
        with self._turn:
            if self._is_closed:
                return
            self._stop.close()
            try:
                self._saver.close()
            finally:
                self._end()

    def _end(self) -> None:
        self._is_closed = True
        self._training.detach()
        if self._peers is not None:
            self._peers.close()
        if self._owns_store:
            self._store.close()


def _checked_ranks(
    store: str | os.PathLike[str] | Store, reader: Stateful | None, extras: Mapping[str, Stateful],
    save_policy: SavePolicy, tracking: TrackingOptions, store_options: StoreOptions,
) -> Ranks:  # fmt: skip
    """Return the ranks of a manager with these options.

    Raises
    ------
    BadInput
        An option alone, or two that contradict each other.
    """
    if store_options.branch is not None and isinstance(store, Store):
        raise BadInput("branch= goes with a URL; open the store on its branch instead", found=store_options.branch)
    if reader is not None:
        check_stateful("reader", reader)
    if not isinstance(extras, Mapping):
        raise BadInput(f"extras= takes a dict of names to objects, found a {type(extras).__name__}", found=extras)
    for name, extra in extras.items():
        check_stateful(f"extras[{name!r}]", extra)
    if tracking.dynamic_tables and save_policy.policy in ("one_shot", "intermittent"):
        raise BadInput(
            f"policy={save_policy.policy!r} needs all keys that changed since the baseline, and dynamic tables know "
            'those since the last save; use "consecutive" or "baseline"',
            found=save_policy.policy,
        )
    ranks = ranks_of_this_training() if store_options.ranks is None else store_options.ranks
    if save_policy.every_seconds is not None and ranks.world > 1:
        raise BadInput(
            "every_seconds= is for one rank: the clocks of several differ, and they must save at the same step; "
            "give every_steps="
        )
    return ranks
