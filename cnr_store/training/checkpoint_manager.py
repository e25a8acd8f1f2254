"""`CheckpointManager`: saves a training in the background and restores it after a crash.

It decides when: `saver` saves, `restorer` restores, `live_training` holds what is trained.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from cnr_store.errors import BadInput, CnrStoreError, SaveInProgress
from cnr_store.format.notes import checked_notes
from cnr_store.runtime.arguments import checked_count
from cnr_store.runtime.ranks import together
from cnr_store.store import Store
from cnr_store.training.background import SaveReport, raise_failure
from cnr_store.training.chain_state import new_chain_state
from cnr_store.training.live_training import watch_training
from cnr_store.training.loading import RestoredState
from cnr_store.training.matching import Resize
from cnr_store.training.options import PrecisionPolicy, SavePolicy, StoreOptions, TrackingOptions
from cnr_store.training.precision.rate_control import RateStatus
from cnr_store.training.ranks import ranks_of_this_training
from cnr_store.training.reader import Redistribute, Stateful, check_stateful
from cnr_store.training.restorer import Restorer, RestoreRequest
from cnr_store.training.save_staging import SaveStager
from cnr_store.training.saver import FailureReports, Saver
from cnr_store.training.schedule import EXIT_CODE, SaveBoundary, SaveSchedule, StopSignal, TrainingPosition
from cnr_store.training.training_writer import TrainingWriter, open_or_create
from cnr_store.types import JsonValue, SlotsRule
from cnr_store.write.table_options import TableOptions
from cnr_store_gpu import RowTracker, warmup

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves the training state of a model to a store and restores it in place.

    Call it from the thread that trains. One save at a time runs in the background; the training stalls for one copy
    of the touched rows.

    Where several ranks train under ``torch.distributed`` every rank makes one, with the same arguments, and calls its
    methods at the same steps: each saves what it holds, all in one checkpoint, and each save wins or fails on all of
    them. Tables that all ranks hold (DistributedDataParallel) are saved by one.

    Parameters
    ----------
    store
        URL (created if there is no store) or an open `Store`, which may be on a branch.
    model, optimizer
        What is trained; ``optimizer`` is one or several, in an order that stays.
    reader
        Where batches come from, if it has a state: its ``state_dict()`` is taken at `step`.
    extras
        Name to anything else with a state: learning rate schedulers, a GradScaler.
    tables
        Names of parameters that are tables besides every ``nn.Embedding`` and ``nn.EmbeddingBag``.
    options
        How tables are stored: for all, or by table name.
    every_steps
        A save is due after so many steps; without it, and without ``SavePolicy.every_seconds``, only `save` saves.
    save_policy, tracking, precision, store_options
        When and how much is saved, and what a failure does; how changed rows are found and copied; how exact tables are
        stored as the run goes on; how the store is opened and written, and by which ranks.

    Raises
    ------
    BadInput, TableNotFound, BadDtype
        The model or its optimizers cannot be saved so; nothing was written.

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
        store: str | Store,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        reader: Stateful | None = None,
        extras: Mapping[str, Stateful] | None = None,
        tables: Iterable[str] = (),
        options: TableOptions | Mapping[str, TableOptions] | None = None,
        every_steps: int | None = None,
        save_policy: SavePolicy = SavePolicy(),  # noqa: B008 (frozen)
        tracking: TrackingOptions = TrackingOptions(),  # noqa: B008 (frozen)
        precision: PrecisionPolicy = PrecisionPolicy(),  # noqa: B008 (frozen)
        store_options: StoreOptions = StoreOptions(),  # noqa: B008 (frozen)
    ) -> None:
        if every_steps is not None:
            checked_count("every_steps", every_steps, least=1)
        if store_options.branch is not None and isinstance(store, Store):
            raise BadInput("branch= goes with a URL; open the store on its branch instead", found=store_options.branch)
        if reader is not None:
            check_stateful("reader", reader)
        for name, extra in (extras or {}).items():
            check_stateful(f"extras[{name!r}]", extra)
        ranks = ranks_of_this_training() if store_options.ranks is None else store_options.ranks
        if save_policy.every_seconds is not None and ranks.world > 1:
            raise BadInput(
                "every_seconds= is for one rank: the clocks of several differ, and they must save at the same step; "
                "give every_steps="
            )
        self._policy, self._is_closed = save_policy, False
        self._training = training = watch_training(
            model, optimizer, reader, extras or {}, tables, options, ranks,
            tracking=tracking, precision=precision, store_options=store_options,
        )  # fmt: skip
        warmup()  # compiled code is loaded now, rather than in the stall of the first save
        try:
            chain = new_chain_state(training, precision)
            self._position = position = TrainingPosition(reader)
            schedule = SaveSchedule(every_steps, save_policy.every_seconds, time.monotonic())
            self._boundary = SaveBoundary(training.control, training.tracker, position, training.intervals)
            self._reports = FailureReports(training.control, save_policy.on_error)
            self._owns_store = not isinstance(store, Store)
            self._store = store if isinstance(store, Store) else open_or_create(store, store_options, training.control)
            self._stop = StopSignal(training.control, is_caught=save_policy.save_on_sigterm is not False)
        except BaseException:
            training.detach()
            raise
        self._saver = Saver(
            training, chain, position, schedule,
            SaveStager(
                training, chain, position, codes_on_device=tracking.quantize_on_device, saves_rng=save_policy.rng,
            ),
            TrainingWriter(self._store, store_options, ranks, training.holdings.placement), save_policy, self._reports,
        )  # fmt: skip
        self._restorer = Restorer(training, chain, position, self._saver, self._store, save_policy)

    def step(self, step: int | None = None, *, reader_state: Any = None) -> bool:
        """Count a trained step and save if one is due; call it after ``optimizer.step()``.

        Blocks for the copy of touched rows when a save is due, else for microseconds. The first one after a `restore`
        also takes over the store, so that an earlier training can save no more (a few requests).

        Parameters
        ----------
        step
            The number of the step; by default one more than the last.
        reader_state
            State of the reader after the trained batch, when batches are fetched ahead. It is that of this step alone:
            without one the ``reader`` is asked, and without a reader it must be given again.

        Returns
        -------
        bool
            Whether SIGTERM has come, the state was saved, and the loop should end.

        Raises
        ------
        BackgroundSaveFailed
            An earlier save failed; its rows are saved with the next one. Several ranks raise at the next save.
        BadInput
            Without a reader, no ``reader_state`` although an earlier step had one; the step is not counted.
        Conflict
            In the first step after a restore: another training (it is named) has saved since. Nothing was written.
        SaveInProgress
            With ``when_busy="refuse"``.
        SystemExit
            After SIGTERM, with ``save_on_sigterm=True``.
        """
        self._check_open()
        self._position.check_given(reader_state)
        if self._training.intervals is not None:
            self._training.intervals.trained()
        self._position.advance(step, reader_state)
        self._saver.go_on()
        if self._stop.asks_at_step():
            if self._boundary.must_wait():
                return False
            self._save_last()
            if self._policy.save_on_sigterm is True:
                raise SystemExit(EXIT_CODE)
            return True
        self._saver.collect_at_step(self._boundary.must_wait)
        if self._saver.schedule.is_due(self.current_step, time.monotonic()) and not self._boundary.must_wait():
            self._save_due()
        return False

    def save(
        self, *, wait: bool = True, message: str | None = None, metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, JsonValue] | None = None,
    ) -> SaveReport | None:  # fmt: skip
        """Save now, whether one is due or not; waits for a save that is under way.

        Parameters
        ----------
        wait
            Until the save is committed; its report is returned. Else it goes on in the background.
        message, metrics, metadata
            Recorded with the save: a text (1 KiB), finite numbers by name (64; see `Store.best`), JSON (8 KiB).

        Raises
        ------
        BackgroundSaveFailed
            With its cause; whatever ``on_error`` says. The rows stay dirty.
        BadInput
            Between forward and optimizer step; a note is too long, or no number or JSON.
        """
        self._check_open()
        notes = checked_notes(message, metrics, metadata)
        self._reports.raise_together(self._saver.collect(wait=True))
        together(self._training.control, self._training.tracker.check_boundary)
        self._saver.begin(wait_s=0.0, notes=notes)
        if not wait:
            return None
        raise_failure(self._saver.collect(wait=True))
        return self.last_save

    def wait_until_finished(self) -> SaveReport | None:
        """Wait for the save under way, if there is one; returns the report of the newest committed save.

        Raises
        ------
        BackgroundSaveFailed
            It failed; whatever ``on_error`` says.
        """
        self._check_open()
        self._reports.raise_together(self._saver.collect(wait=True))
        return self.last_save

    def report_loss(self, loss: float | torch.Tensor) -> None:
        """Report the loss of a step, for ``schedule="loss"``; of several ranks, that of rank 0 counts.

        The mean of about the last hundred is kept, also over restarts; losses that are 0 or not finite do not count,
        nor, without a schedule, negative ones. Reading a tensor waits for its device.

        Raises
        ------
        BadInput
            It is negative, and ``schedule="loss"`` follows it.
        """
        number = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
        self._saver.chain.rate.report_loss(number)

    def restore(
        self,
        *,
        version: int | None = None,
        step: int | None = None,
        tag: str | None = None,
        tables: Mapping[str, str] | None = None,
        strict: bool = True,
        resize: Resize | None = None,
        slots_rule: SlotsRule = "exact",
        fallback: bool = False,
        redistribute: Redistribute | None = None,
    ) -> RestoredState | None:
        """Put a checkpoint into the model, the optimizers, the reader and the generators, in place. Blocks.

        Nothing is written, and a training that is at work on the store goes on: also an evaluation may call this (or
        `load`, which needs no manager). The first `step` or `save` behind it takes the store over, and if that was not
        the head, commits a rollback record. What was trained since the last save is given up.

        Parameters
        ----------
        version, step, tag
            Which one; else the head.
        tables
            Stored name to mine, for tables that are named differently.
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
            Where the head is damaged, warn and go on from the newest version that is whole (which is read once more),
            behind a rollback record. What is damaged stays in the store. Only for the head.
        redistribute
            Makes one reader state per rank of the list of saved ones, where another number of ranks resumes. Without it
            such a restore is refused.

        Returns
        -------
        RestoredState or None
            None if the store is empty.

        Raises
        ------
        BadInput, BadShape, BadDtype, Unsupported, VersionNotFound, VersionExpired, TagNotFound
            Before anything is changed; also where nothing of the checkpoint fits the training.
        CorruptStore, StorageFailure
            Weights may be half restored: restore again, another version if need be.
        """
        self._check_open()
        request = RestoreRequest(
            version=version, step=step, tag=tag, tables=tables, strict=strict, resize=resize, slots_rule=slots_rule,
            fallback=fallback, redistribute=redistribute,
        )  # fmt: skip
        return self._restorer.restore(request)

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
        """Whether a save is under way in the background."""
        return self._saver.is_saving

    @property
    def rate(self) -> RateStatus:
        """How exact tables are stored, and what becomes of that at the next save."""
        return self._saver.chain.rate.status

    @property
    def store(self) -> Store:
        """The store that is written to."""
        return self._store

    @property
    def tracker(self) -> RowTracker:
        """The row tracker: `mark` rows that other code than a known optimizer writes."""
        return self._training.tracker

    @property
    def mirror_nbytes(self) -> int:
        """Bytes that the code mirrors take now."""
        return self._saver.writer.mirror_nbytes

    def _save_due(self) -> None:
        """Begin the save that is due, as ``when_busy`` and ``on_error`` say."""
        started = time.perf_counter()
        control, policy = self._training.control, self._policy
        # What one rank cannot save now no rank can; with "wait" nobody needs to ask.
        if policy.when_busy != "wait" and any(together(control, lambda: self.is_saving)):
            if policy.when_busy == "refuse":
                raise SaveInProgress(
                    f"the save before step {self.current_step} is still under way; save less often, or choose "
                    'when_busy="wait" or "skip"'
                )
            self._saver.mark_saved()
            return
        self._reports.report_together(self._saver.collect(wait=True))
        try:
            is_over = self._saver.begin(wait_s=time.perf_counter() - started)
        except CnrStoreError as error:
            if policy.on_error == "raise":
                raise
            self._saver.mark_saved()
            warnings.warn(f"no checkpoint at step {self.current_step}: {error}", RuntimeWarning, stacklevel=3)
            return
        if self._training.ranks.world == 1 and is_over:  # a first baseline that stalled failed in this step
            self._reports.report(self._saver.collect(wait=False))

    def _save_last(self) -> None:
        """Save because the process is about to be ended; a failure before this one must not prevent it."""
        if (error := self._saver.collect(wait=True)) is not None:
            logger.error("the save before the last one failed, its rows are in the last one: %s", error)
        self.save()

    def __enter__(self) -> CheckpointManager:
        return self

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
        """Wait for the save under way, and let go of model and store. Saves nothing more; a second call is harmless.

        Raises
        ------
        BackgroundSaveFailed
            The last save failed, or its outcome could not be learned.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._stop.close()
        try:
            self._saver.close()
        finally:
            self._training.detach()
            if self._owns_store:
                self._store.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadInput("the checkpoint manager is closed; make another one")
