"""`CheckpointManager`: saves a training behind its back and puts it back in place after a crash.

It decides when; `state` says what goes where, `background` writes, `restoring` reads. The rule that it must never
break: rows stay dirty until the commit that holds them has won (design, section 4, rule 3).
"""

from __future__ import annotations

import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Literal

import torch
from torch import nn

from cnr_store.errors import (
    BackgroundSaveFailed,
    BadInput,
    CnrStoreError,
    CommitStateUnknown,
    Conflict,
    Fenced,
    SaveInProgress,
    VersionNotFound,
)
from cnr_store.mirrors import MirrorMode
from cnr_store.policy import CheckpointSize, Decision, Policy, decide
from cnr_store.snapshot import Snapshot
from cnr_store.store import Store
from cnr_store.training.arguments import (
    FirstFull,
    Moves,
    OnError,
    WhenBusy,
    catch_sigterm,
    check_one_of,
    movements_of,
    open_or_create,
    options_by_table,
)  # fmt: skip
from cnr_store.training.background import (
    WEIGHT,
    BackgroundSave,
    Finished,
    Outcome,
    SaveJob,
    SaveReport,
    WholeTable,
)
from cnr_store.training.capture import put_dense_state, rows_to_write, trainer_document
from cnr_store.training.document import TRAINER, TrainerDocument, trainer_of
from cnr_store.training.history import sizes_since_baseline
from cnr_store.training.reader import (
    READER,
    IntervalReader,
    Stateful,
    check_stateful,
    reader_document,
    stored_reader_state,
)
from cnr_store.training.restoring import RestorePlan, apply_dense, plan_restore, read_dense, restore_tables
from cnr_store.training.rng import restore_rng
from cnr_store.training.state import (
    StatePlan,
    live_slots,
    mirror_estimate,
    needs_new_schema,
    plan_state,
    table_parameters,
)
from cnr_store.training.tensors import leaf_of, tensor_of
from cnr_store.transaction import Transaction
from cnr_store.types import TableOptions
from cnr_store.writer import Writer
from cnr_store_gpu import Cumulative, RowRequest, RowTracker, StagingBuffers, warmup

_SIGTERM_EXIT = 128 + signal.SIGTERM
_STEPS_UNTIL_WARNING = 8
"""Steps for which a save may be overdue in silence; micro-batches that are counted one by one make it wait too."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What was restored, for the caller's loop.

    Attributes
    ----------
    step, version
        Training step of the state, and the version that it continues from.
    reader_state
        State of the reader, already given to the manager's ``reader`` if there is one; None if none was saved.
    tables
        Names of the tables that were filled.
    """

    step: int
    version: int
    reader_state: Any
    tables: tuple[str, ...]


@dataclass(slots=True)
class _Lineage:
    """What the manager knows of the checkpoints it continues: sizes, and rows changed since the baseline."""

    changed: Cumulative
    sizes: list[CheckpointSize] = field(default_factory=list)

    def add(self, job: SaveJob) -> None:
        size = CheckpointSize(job.transaction.kind, job.transaction.size_bytes)
        if size.kind == "full":
            self.sizes = [size]
            self.changed.clear()
        else:
            self.sizes.append(size)
            self.changed.add(job.taken)


class CheckpointManager:
    """Saves the training state of a model to a store and restores it in place.

    Call it from the thread that trains. One save at a time runs in the background; the training stalls for one copy
    of the touched rows.

    Parameters
    ----------
    store
        URL (created if there is no store) or an open `Store`.
    model, optimizer
        What is trained; ``optimizer`` is one or several, in an order that stays.
    reader
        Where batches come from, if it has a state: its ``state_dict()`` is taken at `step`.
    tables
        Names of parameters that are tables besides every ``nn.Embedding`` and ``nn.EmbeddingBag``.
    options
        How tables are stored: for all, or by table name.
    policy
        ``full``, ``consecutive``, ``one_shot`` or ``intermittent`` (`cnr_store.policy`).
    every_steps, every_seconds
        When a save is due; neither saves only by `save`.
    first_full
        ``stall`` or ``copy``: how tables are read that must be written whole (the first save, or a new slot).
    when_busy, on_error
        See `WhenBusy` and `OnError`.
    mirror, mirror_folder, bytes_per_s, threads, storage_options
        As for `Store.writer` and `Store.open`; ``threads`` and ``storage_options`` only with a URL.
    allow_dense, on_bypass, verify_rows
        As for `cnr_store_gpu.RowTracker`.
    assume
        What optimizers of your own do, by class name: ``touched``, ``ever_touched`` or ``all`` rows move in a step.
    extras
        Name to anything else with a state: learning rate schedulers, a GradScaler.
    rng
        Whether the random generators of Python, numpy and torch are saved and restored.
    save_on_sigterm
        On SIGTERM the next `step` saves and raises SystemExit(143); with ``"flag"`` it saves and returns True.

    Attributes
    ----------
    history
        Reports of the committed saves, oldest first.
    current_step
        Steps trained, counted by `step`.
    should_stop
        Whether SIGTERM has come.

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
    [(2, 'full'), (4, 'delta')]
    """

    def __init__(
        self,
        store: str | Store,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        reader: Stateful | None = None,
        tables: Iterable[str] = (),
        options: TableOptions | Mapping[str, TableOptions] | None = None,
        policy: Policy = "consecutive",
        every_steps: int | None = None,
        every_seconds: float | None = None,
        first_full: FirstFull = "stall",
        when_busy: WhenBusy = "wait",
        on_error: OnError = "raise",
        mirror: MirrorMode = "memory",
        mirror_folder: str | None = None,
        bytes_per_s: float | None = None,
        threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        allow_dense: bool = False,
        assume: Mapping[str, Moves] | None = None,
        on_bypass: Literal["warn", "raise"] = "warn",
        verify_rows: int = 0,
        extras: Mapping[str, Stateful] | None = None,
        rng: bool = True,
        save_on_sigterm: bool | Literal["flag"] = False,
    ) -> None:
        check_one_of("first_full", first_full, ("stall", "copy"))
        check_one_of("when_busy", when_busy, ("wait", "skip", "refuse"))
        check_one_of("on_error", on_error, ("raise", "warn"))
        decide(policy, [])
        if (every_steps is not None and every_steps < 1) or (every_seconds is not None and every_seconds <= 0):
            raise BadInput(
                f"saves must be due after something: every_steps={every_steps}, every_seconds={every_seconds}"
            )
        if reader is not None:
            check_stateful("reader", reader)
        for name, extra in (extras or {}).items():
            check_stateful(f"extras[{name!r}]", extra)
        self.history: list[SaveReport] = []
        self.current_step = 0
        self.should_stop = False
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._reader, self._extras, self._saves_rng = reader, dict(extras or {}), rng
        self._intervals = reader if isinstance(reader, IntervalReader) else None
        self._tables = table_parameters(model, tables)
        self._options = options_by_table(options, self._tables)
        self._policy: Policy = policy
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._copies_whole = first_full == "copy"
        self._when_busy, self._on_error = when_busy, on_error
        self._log_memory(plan_state(model, self._optimizers, self._tables), mirror)
        self._tracker = RowTracker(
            model, dict(self._tables), optimizers=self._optimizers, allow_dense=allow_dense,
            assume=movements_of(assume or {}), on_bypass=on_bypass, verify_rows=verify_rows,
        )  # fmt: skip
        warmup()  # compiled code is loaded now, rather than in the stall of the first save
        self._buffers = StagingBuffers()
        self._background = BackgroundSave()
        self._lineage = _Lineage(Cumulative({name: weight.shape[0] for name, weight in self._tables.items()}))
        self._whole_next: set[str] = set()
        self._held: Finished | None = None
        self._fenced: BaseException | None = None
        self._reader_state: Any = None
        self._is_overdue = False
        self._steps_off_boundary, self._has_warned = 0, False
        self._last_save_step, self._last_save_s = 0, time.monotonic()
        self._is_closed = False
        self._writer: Writer | None = None
        self._open_writer_with: Callable[[Store], Writer] = lambda opened: opened.writer(
            mirror=mirror, mirror_folder=mirror_folder, bytes_per_s=bytes_per_s
        )
        self._owns_store = not isinstance(store, Store)
        try:
            self._store = store if isinstance(store, Store) else open_or_create(store, storage_options, threads)
            self._exits_on_sigterm = save_on_sigterm is True
            self._previous_handler: Any = None
            if save_on_sigterm:
                self._previous_handler = catch_sigterm(self._on_sigterm)
        except BaseException:
            self._tracker.detach()
            raise

    # ---- the loop

    def step(self, step: int | None = None, *, reader_state: Any = None) -> bool:
        """Count a trained step and save if one is due; call it after ``optimizer.step()``.

        Blocks for the copy of touched rows when a save is due; else for microseconds.

        Parameters
        ----------
        step
            The number of the step; by default one more than the last.
        reader_state
            State of the reader after the batch that was trained, when batches are fetched ahead of training. It is
            that of this step alone: without one the ``reader`` is asked, and without a reader it must be given again.

        Returns
        -------
        bool
            Whether SIGTERM has come, the state was saved, and the loop should end.

        Raises
        ------
        BackgroundSaveFailed
            An earlier save failed, once; its rows are saved with the next one.
        BadInput
            Without a reader, no ``reader_state`` although an earlier step had one; the step is not counted.
        SaveInProgress
            With ``when_busy="refuse"``.
        SystemExit
            After SIGTERM, with ``save_on_sigterm=True``.
        """
        self._check_open()
        if reader_state is None and self._reader is None and self._reader_state is not None:
            raise BadInput(
                f"the step after {self.current_step} has no reader_state, but an earlier one had; give it at every "
                "step, or give the manager a reader: a checkpoint would name batches that it has not seen"
            )
        if self._intervals is not None:
            self._intervals.trained()
        self.current_step = self.current_step + 1 if step is None else step
        self._reader_state = reader_state
        if self.should_stop:
            if self._waits_for_boundary():
                return False
            self._save_last()
            if self._exits_on_sigterm:
                raise SystemExit(_SIGTERM_EXIT)
            return True
        self._report_failure(self._take_finished(wait=False))
        if self._is_overdue or self._is_due():
            self._is_overdue = True
            if not self._waits_for_boundary():
                self._save_due()
        return False

    def save(self, *, wait: bool = True) -> SaveReport | None:
        """Save now, whether one is due or not; waits for a save that is under way.

        Parameters
        ----------
        wait
            Until the save is committed; its report is returned. Else it goes on in the background.

        Raises
        ------
        BackgroundSaveFailed
            With its cause; whatever ``on_error`` says. The rows stay dirty.
        BadInput
            Between forward and optimizer step.
        """
        self._check_open()
        self._raise_failure(self._take_finished(wait=True))
        self._begin_save(wait_s=0.0)
        if not wait:
            return None
        self._raise_failure(self._take_finished(wait=True))
        return self.history[-1]

    def wait(self) -> SaveReport | None:
        """Wait for the save under way, if there is one; returns the report of the newest committed save.

        Raises
        ------
        BackgroundSaveFailed
            It failed; whatever ``on_error`` says.
        """
        self._check_open()
        self._raise_failure(self._take_finished(wait=True))
        return self.last_save

    @property
    def last_save(self) -> SaveReport | None:
        """The report of the newest committed save that the training thread has taken notice of."""
        return self.history[-1] if self.history else None

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way in the background."""
        return self._background.is_running

    @property
    def store(self) -> Store:
        """The store that is written to."""
        return self._store

    @property
    def tracker(self) -> RowTracker:
        """The row tracker: `mark` rows that other code than a known optimizer writes."""
        return self._tracker

    @property
    def mirror_nbytes(self) -> int:
        """Bytes that the code mirrors take now."""
        return 0 if self._writer is None else self._writer.mirror_nbytes

    # ---- restoring

    def restore(
        self,
        *,
        version: int | None = None,
        step: int | None = None,
        tag: str | None = None,
        tables: Mapping[str, str] | None = None,
        strict: bool = True,
    ) -> RestoredState | None:
        """Put a checkpoint into the model, the optimizers, the reader and the generators, in place. Blocks.

        Anything but the head first commits a rollback record, so that the log says what the run continued from.
        What was trained since the last save is given up.

        Parameters
        ----------
        version, step, tag
            Which one; the head if none is given.
        tables
            Stored name to mine, for tables that are named differently.
        strict
            Refuse when the checkpoint and the model differ in tables, dense tensors or optimizers; else restore what
            both have. The next save is then a full one.

        Returns
        -------
        RestoredState or None
            None if the store is empty.

        Raises
        ------
        BadInput, BadShape, BadDtype, VersionNotFound, TagNotFound
            Before anything is changed.
        CorruptStore, StorageFailure
            Weights may be half restored: restore again, another version if need be.
        """
        self._check_open()
        self._report_failure(self._take_finished(wait=True))
        self._settle()
        snapshot = self._store.snapshot(version, step=step, tag=tag)
        if snapshot.is_empty:
            if version is not None or tag is not None:
                raise VersionNotFound(f"version {snapshot.version} holds no checkpoint", version=snapshot.version)
            self._ready_writer()  # now, rather than in the stall of the first save
            return None
        plan, state, trainer = self._plan_restore(snapshot, tables, strict)
        if snapshot.record.chain != self._store.head().record.chain:
            self._store.rollback(snapshot.version)
        writer = self._new_writer()
        if writer.head.record.chain != snapshot.record.chain:
            # Somebody committed between our look and the fence that keeps everybody else out.
            snapshot = self._store.snapshot(writer.head.record.v)
            plan, state, trainer = self._plan_restore(snapshot, tables, strict)
        restored = self._restore(writer, snapshot, plan, state, trainer)
        if not strict:
            self._whole_next |= self._tables.keys()  # what was left out is not what the mirrors hold
        return restored

    def _plan_restore(
        self, snapshot: Snapshot, tables: Mapping[str, str] | None, strict: bool
    ) -> tuple[RestorePlan, StatePlan, TrainerDocument | None]:
        trainer = None
        if TRAINER in snapshot.documents:
            trainer = trainer_of(snapshot.read_document(TRAINER, tensor_of))
        state = plan_state(self._model, self._optimizers, self._tables)
        plan = plan_restore(
            snapshot.tables, snapshot.dense, trainer, state, self._optimizers, name_map=tables, strict=strict
        )
        if strict and trainer is not None and set(trainer.extras) != set(self._extras):
            raise BadInput(
                f"the checkpoint has extras {sorted(trainer.extras)}, the manager {sorted(self._extras)}",
                expected=sorted(trainer.extras), found=sorted(self._extras),
            )  # fmt: skip
        return plan, state, trainer

    def _restore(
        self, writer: Writer, snapshot: Snapshot, plan: RestorePlan, state: StatePlan, trainer: TrainerDocument | None
    ) -> RestoredState:
        loaded = read_dense(snapshot, plan)
        reader = snapshot.read_document(READER, tensor_of) if READER in snapshot.documents else None
        reader_state = stored_reader_state(reader)
        if self._policy in ("one_shot", "intermittent"):
            records = self._store.log()
            sizes = sizes_since_baseline(self._policy, records)
            changed = {name: snapshot.table(stored).changed_rows() for name, stored in plan.renamed.items()}
        else:
            sizes, changed = sizes_since_baseline(self._policy, [snapshot.record]), {}
        restore_tables(writer, plan, self._optimizers)
        apply_dense(plan, loaded, snapshot.dense, state, self._optimizers)
        for name, extra in self._extras.items():
            if trainer is not None and name in trainer.extras:
                extra.load_state_dict(trainer.extras[name])
        if self._reader is not None and reader_state is not None:
            self._reader.load_state_dict(reader_state)
        self._tracker.reset()
        writer.mirrors.options.update(self._options)
        self._writer, self._fenced = writer, None
        self._lineage.sizes = sizes
        self._lineage.changed.clear()
        for table, rows in changed.items():
            self._lineage.changed.add_rows(table, rows)
        self._whole_next = {name for name in self._tables if plan.renamed.get(name) != name}
        self.current_step = self._last_save_step = snapshot.step
        self._last_save_s, self._is_overdue, self._reader_state = time.monotonic(), False, None
        if self._saves_rng and trainer is not None:
            restore_rng(trainer.rng)  # last: nothing that restores may draw from what it set
        logger.info("restored step %d from version %d of %s", snapshot.step, snapshot.version, self._store.url)
        return RestoredState(snapshot.step, snapshot.version, reader_state, tuple(plan.renamed))

    # ---- one save

    def _is_due(self) -> bool:
        if self._every_steps is not None and self.current_step - self._last_save_step >= self._every_steps:
            return True
        return self._every_seconds is not None and time.monotonic() - self._last_save_s >= self._every_seconds

    def _save_due(self) -> None:
        """Begin the save that is due, as ``when_busy`` and ``on_error`` say."""
        started = time.perf_counter()
        if self._background.is_running:
            if self._when_busy == "refuse":
                raise SaveInProgress(
                    f"the save before step {self.current_step} is still under way; save less often, or choose "
                    'when_busy="wait" or "skip"'
                )
            if self._when_busy == "skip":
                self._mark_saved()
                return
        self._report_failure(self._take_finished(wait=True))
        try:
            self._begin_save(wait_s=time.perf_counter() - started)
        except CnrStoreError as error:
            if self._on_error == "raise":
                raise
            self._mark_saved()
            warnings.warn(f"no checkpoint at step {self.current_step}: {error}", RuntimeWarning, stacklevel=3)
            return
        if not self._background.is_running:  # a first full that stalled: its failure is news of this step
            self._report_failure(self._take_finished(wait=False))

    def _waits_for_boundary(self) -> bool:
        """Whether a save must wait for reader or optimizer step; warns, once, if that step does not seem to come."""
        if self._intervals is not None and self._reader_state is None and not self._intervals.is_ready:
            self._intervals.prepare()
            return True
        if self._tracker.at_step_boundary:
            self._steps_off_boundary = 0
            return False
        self._steps_off_boundary += 1
        if self._steps_off_boundary >= _STEPS_UNTIL_WARNING and not self._has_warned:
            self._has_warned = True
            try:
                self._tracker.check_boundary()
            except BadInput as error:
                warnings.warn(
                    f"no checkpoint for {self._steps_off_boundary} steps although one is due: {error}",
                    RuntimeWarning, stacklevel=3,
                )  # fmt: skip
        return True

    def _begin_save(self, *, wait_s: float) -> None:
        """Copy what is to be saved and hand it to the background; the only part that holds the training up."""
        started = time.perf_counter()
        self._settle()
        self._tracker.check_boundary()
        writer = self._ready_writer()
        plan = plan_state(self._model, self._optimizers, self._tables)
        slots = {table: live_slots(plan, self._optimizers, table) for table in self._tables}
        decision = self._decide(writer, slots)
        transaction = writer.begin(self.current_step, decision.kind, base=decision.base)
        job: SaveJob | None = None
        try:
            job = self._stage(transaction, decision, writer, plan, slots)
            job.wait_s = wait_s
            job.stall_s = time.perf_counter() - started
            self._start(job)
            self._mark_saved()
            if self._reads_live(job):
                self._background.wait()
                job.stall_s = time.perf_counter() - started
        except BaseException:
            if job is None:
                transaction.abort()
            elif not self._background.has(job):
                transaction.abort()
                self._lost(job, None)
            elif self._reads_live(job):
                # Training that went on now would tear what is being read.
                self._background.wait_to_the_end()
            raise

    def _reads_live(self, job: SaveJob) -> bool:
        return bool(job.whole) and not self._copies_whole

    def _start(self, job: SaveJob) -> None:
        try:
            self._background.start(job)
        except Exception as error:  # no thread, no memory: the training may go on
            raise BackgroundSaveFailed(_failure_message(error)) from error

    def _decide(self, writer: Writer, slots: Mapping[str, Mapping[str, torch.Tensor]]) -> Decision:
        schemas = writer.snapshot.tables if writer.is_synced else {}
        whole = {
            table
            for table, weight in self._tables.items()
            if needs_new_schema(schemas.get(table), weight, slots[table], self._options[table])
        }
        self._whole_next |= whole
        if not writer.is_synced:
            return Decision("full", "baseline", "the writer does not know the head's state")
        if self._whole_next or schemas.keys() - self._tables.keys():
            return Decision("full", "baseline", f"tables {sorted(self._whole_next)} must be written whole")
        return decide(self._policy, self._lineage.sizes, chain_length=len(writer.head.record.chain))

    def _stage(
        self,
        transaction: Transaction,
        decision: Decision,
        writer: Writer,
        plan: StatePlan,
        slots: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> SaveJob:
        schemas = writer.snapshot.tables if writer.is_synced else {}
        drops = tuple(sorted((schemas.keys() | set(transaction.needs_whole_tables)) - self._tables.keys()))
        whole = set(self._whole_next) | (set(transaction.needs_whole_tables) & set(self._tables))
        put_dense_state(transaction, writer.snapshot.dense if writer.is_synced else (), plan, self._optimizers)
        transaction.put_scalars({"step": self.current_step})
        trainer = trainer_document(plan, self._optimizers, slots, self._extras, with_rng=self._saves_rng)
        transaction.put_document(TRAINER, trainer, leaf_of)
        reader = reader_document(self._reader, self._reader_state)
        if reader is not None:
            transaction.put_document(READER, reader, leaf_of)
        taken, staged = self._tracker.take(), None
        try:
            rows = {
                t: rows_to_write(one, decision, self._lineage.changed) for t, one in taken.items() if t not in whole
            }
            staged = self._buffers.gather(
                {t: RowRequest(ids, {WEIGHT: self._tables[t], **slots[t]}) for t, ids in rows.items()}
            )
            written = {t: self._whole_table(t, slots[t], is_new=t in self._whole_next) for t in sorted(whole)}
        except BaseException:
            self._tracker.give_back(taken)
            if staged is not None:
                staged.release()
            raise
        return SaveJob(transaction, taken, staged, rows, written, drops)

    def _whole_table(self, table: str, slots: Mapping[str, torch.Tensor], *, is_new: bool) -> WholeTable:
        weight: torch.Tensor = self._tables[table].detach()
        if self._copies_whole:
            weight, slots = weight.clone(), {name: slot.detach().clone() for name, slot in slots.items()}
        return WholeTable(weight, slots, self._options[table] if is_new else None)

    def _save_last(self) -> None:
        """Save because the process is about to be ended; a failure before this one must not prevent it."""
        error = self._take_finished(wait=True)
        if error is not None:
            logger.error("the save before the last one failed, its rows are in the last one: %s", error)
        self.save()

    def _mark_saved(self) -> None:
        self._is_overdue = False
        self._last_save_step, self._last_save_s = self.current_step, time.monotonic()

    # ---- what became of it

    def _take_finished(self, *, wait: bool) -> BaseException | None:
        """Take notice of a save that is over; returns its error if it is not known to be committed."""
        finished = self._background.collect(wait=wait)
        if finished is None:
            return None
        if finished.outcome is Outcome.WON:
            version = finished.job.transaction.version
            assert version is not None  # a commit that won has one
            self._won(finished.job, version, finished.error)
            if isinstance(finished.error, Exception):
                return None
        elif finished.outcome is Outcome.UNKNOWN:
            self._held = finished
        else:
            self._lost(finished.job, finished.error)
        return finished.error

    def _won(self, job: SaveJob, version: int, error: BaseException | None = None) -> None:
        """``error``: what failed behind the commit, which nothing takes back."""
        job.staged.release()
        self._whole_next -= job.whole.keys()
        self._lineage.add(job)
        if error is not None:
            # The mirrors may be half moved, so nothing can be a delta against them.
            self._whole_next |= self._tables.keys()
            logger.warning("version %d is committed, but then failed (%r); the next save is a full", version, error)
        report = job.report(version)
        self.history.append(report)
        logger.info(
            "version %d: %s of step %d, %d rows, %d bytes, stall %.4f s, background %.3f s",
            report.version, report.kind, report.step, report.rows, report.size_bytes, report.stall_s,
            report.encode_s + report.commit_s,
        )  # fmt: skip

    def _lost(self, job: SaveJob, error: BaseException | None) -> None:
        job.staged.release()
        self._tracker.give_back(job.taken)
        # A whole table's old mirror is given up before the new one is written, so only a whole one can follow.
        self._whole_next |= job.whole.keys()
        if isinstance(error, Fenced):
            self._fenced = error
        elif isinstance(error, Conflict) and self._writer is not None:
            # The head is not what our mirrors are: the next save is a full one behind a fence of its own.
            self._writer.close()
            self._writer = None

    def _settle(self) -> None:
        """Learn what became of a save whose outcome is unknown; blocks.

        Raises
        ------
        CommitStateUnknown
            Still unknown. Its rows are kept apart until it is known.
        """
        if self._writer is None:
            return
        if self._held is None:
            # A commit may be unknown to the writer although its save ended in another error; its rows are dirty again.
            self._writer.settle()
            return
        before, failed = self._writer.head.record.v, None
        try:
            entry = self._writer.settle()
        except Exception as error:
            if self._writer.head.record.v == before:
                raise
            entry, failed = self._writer.head, error  # it had won before that failed
        held, self._held = self._held, None
        if entry is None:
            self._lost(held.job, Conflict("another record took the log position"))
        else:
            self._won(held.job, entry.record.v, failed)

    def _report_failure(self, error: BaseException | None) -> None:
        if error is None:
            return
        if self._on_error == "raise" or not isinstance(error, Exception):
            self._raise_failure(error)
        warnings.warn(_failure_message(error), RuntimeWarning, stacklevel=3)

    def _raise_failure(self, error: BaseException | None) -> None:
        if error is None:
            return
        if not isinstance(error, Exception):
            raise error
        raise BackgroundSaveFailed(_failure_message(error)) from error

    # ---- the writer

    def _ready_writer(self) -> Writer:
        if self._fenced is not None:
            raise Fenced(
                f"another writer has taken over {self._store.url}; this training can no longer save to it"
            ) from self._fenced
        if self._writer is None:
            self._writer = self._new_writer()
            if self._writer.head.record.chain:
                logger.warning(
                    "%s holds checkpoints that were not restored; the next save is a full one of the live state",
                    self._store.url,
                )
                self._whole_next |= self._tables.keys()
        return self._writer

    def _new_writer(self) -> Writer:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        return self._open_writer_with(self._store)

    # ---- beginning and end

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
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
        try:
            error = self._take_finished(wait=True)
            if self._held is not None:
                try:
                    self._settle()
                    error = None
                except CommitStateUnknown as unknown:
                    error = unknown
            self._report_failure(error)
        finally:
            self._background.close()
            self._tracker.detach()
            self._buffers.free()
            if self._writer is not None:
                self._writer.close()
            if self._owns_store:
                self._store.close()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        # Only a flag: the signal may come in the middle of an optimizer step.
        self.should_stop = True
        if callable(self._previous_handler):
            self._previous_handler(number, frame)

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadInput("the checkpoint manager is closed; make another one")

    def _log_memory(self, plan: StatePlan, mirror: MirrorMode) -> None:
        total = sum(
            mirror_estimate(weight, live_slots(plan, self._optimizers, table), self._options[table])
            for table, weight in self._tables.items()
        )
        where = {"memory": "in memory", "mmap": "on disk", "none": "not kept"}[mirror]
        logger.info("%d tables, code mirrors of about %.1f MiB (%s)", len(self._tables), total / 2**20, where)


def _failure_message(error: BaseException) -> str:
    if isinstance(error, CommitStateUnknown):
        return f"whether a checkpoint was committed is not known yet ({error}); it is looked up before the next save"
    return f"a checkpoint was not saved ({error}); its rows are saved with the next one"
