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
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, Literal, get_args

import torch
from torch import nn

from cnr_store.errors import (
    BackgroundSaveFailed,
    BadInput,
    CnrStoreError,
    CommitStateUnknown,
    Conflict,
    CorruptStore,
    Fenced,
    RankLost,
    SaveInProgress,
    TransactionAborted,
)
from cnr_store.format import document_tree
from cnr_store.runtime.arguments import checked_choice
from cnr_store.runtime.ranks import Ranks, rank_zero, together
from cnr_store.store import Store
from cnr_store.training.arguments import (  # fmt: skip
    FirstFull,
    Moves,
    OnError,
    Schedule,
    WhenBusy,
    catch_sigterm,
    check_choices,
    check_numbers,
    check_table_options,
    movements_of,
    open_or_create,
    options_by_table,
)
from cnr_store.training.background import (
    WEIGHT,
    BackgroundSave,
    Finished,
    Outcome,
    SaveJob,
    SaveReport,
    TouchedRows,
    WholeShard,
)
from cnr_store.training.capture import put_dense_state, rank_document, rows_to_write, trainer_document
from cnr_store.training.continuing import Succession
from cnr_store.training.devices import compile_kernels, rows_as_codes, wait_for_streams
from cnr_store.training.document import RateDocument, trainer_name
from cnr_store.training.failures import failure_message
from cnr_store.training.fallback import go_back
from cnr_store.training.history import sizes_since_baseline
from cnr_store.training.lineage import Lineage
from cnr_store.training.loading import (
    Planned,
    RestoredState,
    check_extras,
    choose_start,
    looking_again,
    plan_loading,
    stored_rng,
)
from cnr_store.training.matching import Resize
from cnr_store.training.precision.calibrating import QualityTarget
from cnr_store.training.precision.rate_control import RateControl
from cnr_store.training.precision.rate_status import RateStatus
from cnr_store.training.ranks import ranks_of_this_training
from cnr_store.training.reader import (
    IntervalReader,
    Redistribute,
    Stateful,
    check_stateful,
    reader_document,
    reader_name,
    stored_reader_state,
)
from cnr_store.training.replicated_rows import taken_words, union_of, words_of
from cnr_store.training.resizing import Growing, check_resizable, fill_new_rows
from cnr_store.training.restoring import Loaded, Targets, apply_dense, finish_tables, read_dense, restore_targets
from cnr_store.training.resuming import resume
from cnr_store.training.rng import restore_rng
from cnr_store.training.shard_ownership import Holding, check_alike, find_local_shards, hold
from cnr_store.training.shards import (
    Handle,
    LocalShard,
    Slots,
    follow_lookups,
    plain_optimizers,
    unwrapped,
    watched_shard,
)
from cnr_store.training.state import (
    StatePlan,
    fused_documents,
    live_slots,
    mirror_estimate,
    needs_new_schema,
    plan_state,
    slot_documents,
    stepped_documents,
)
from cnr_store.training.tensors import leaf_of, table_dtype_name, tensor_of
from cnr_store.types import RowIds, SlotsRule
from cnr_store.write.mirrors import MirrorMode, check_mirror_folder
from cnr_store.write.policy import CheckpointSize, Decision, Policy, decide
from cnr_store.write.table_options import TableOptions
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer
from cnr_store_gpu import Cumulative, RowRequest, RowTracker, StagingBuffers, Taken, warmup
from cnr_store_gpu.tracker import InFlight

_SIGTERM_EXIT = 128 + signal.SIGTERM
_STEPS_BETWEEN_SIGNALS = 16
"""How often several ranks ask each other whether one was told to stop; asking costs a message to all of them."""
_STEPS_UNTIL_WARNING = 8
"""Steps for which a save may be overdue in silence; micro-batches that are counted one by one make it wait too."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """What a restore reads before the tables, and where those go."""

    loaded: Loaded
    reader_state: Any
    rng: dict[str, Any] | None
    sizes: list[CheckpointSize]
    changed: Mapping[str, RowIds]
    targets: Targets


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
    branch
        With a URL: train on the branch of that name (`Store.fork`).
    model, optimizer
        What is trained; ``optimizer`` is one or several, in an order that stays.
    reader
        Where batches come from, if it has a state: its ``state_dict()`` is taken at `step`.
    tables
        Names of parameters that are tables besides every ``nn.Embedding`` and ``nn.EmbeddingBag``.
    options
        How tables are stored: for all, or by table name.
    policy
        ``full``, ``consecutive``, ``one_shot`` or ``intermittent`` (`cnr_store.write.policy`).
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
        On SIGTERM the next `step` saves and raises SystemExit(143); with ``"flag"`` it saves and returns True. Several
        ranks do so together, at the next step that is a multiple of 16 after one of them got it.
    ranks
        The ranks that train together; by default all of ``torch.distributed``, or this process alone.
    redistribute
        What becomes of the ranks' reader states when another number of ranks resumes: a function from the list of
        saved states to a list with one for each rank. Without it such a restore is refused.
    in_flight
        As for `cnr_store_gpu.RowTracker`: ``remark`` where a pipeline always has batches between lookup and step.
    quantize_on_device
        Turn the touched rows of tables that are stored as a lattice (``bits=``, ``max_error=``, ``scale=``) into codes
        before they leave the device: 2 bytes per element cross to the host instead of 4, and the background has
        divisions less to do. What is stored is the same. For tables on an accelerator; those with
        ``nonfinite="escape"`` and rows with a code beyond 16 bits cross as floats as before.
    schedule
        ``loss``: lattices become finer as the loss that is given to `report_loss` falls, in powers of two, in the
        first save after a restore, as far as codes have room (``mirror="none"`` has none); ``bits=``, ``max_error=`` or
        ``scale=`` say how exact they begin.
    target_bytes_per_checkpoint
        What a delta is to come to (a full, with ``policy="full"``), of all ranks: fewer rows go out of tables with a
        `Threshold`, then scales become coarser, down to 2-bit quality. `rate` says whether that is enough. A threshold
        is then chosen anew in every save, whatever its ``refresh_every``.
    max_quality_loss, validate
        Choose the scales by `calibrate` before the first save, unless something was restored: ``validate()`` may become
        so much larger, as a share. It must not train; it is called some ten times, while that save blocks the training,
        with the model in evaluation mode and a host copy of the tables beside it.

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
        branch: str | None = None,
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
        ranks: Ranks | None = None,
        redistribute: Redistribute | None = None,
        in_flight: InFlight = "refuse",
        quantize_on_device: bool = False,
        schedule: Schedule = "constant",
        target_bytes_per_checkpoint: int | None = None,
        max_quality_loss: float | None = None,
        validate: Callable[[], float] | None = None,
    ) -> None:
        check_choices(
            policy=policy, first_full=first_full, when_busy=when_busy, on_error=on_error, mirror=mirror,
            on_bypass=on_bypass, in_flight=in_flight, schedule=schedule, save_on_sigterm=save_on_sigterm,
        )  # fmt: skip
        check_numbers(every_steps, every_seconds, bytes_per_s, threads, verify_rows)
        if branch is not None and isinstance(store, Store):
            raise BadInput("branch= goes with a URL; open the store on its branch instead", found=branch)
        if reader is not None:
            check_stateful("reader", reader)
        for name, extra in (extras or {}).items():
            check_stateful(f"extras[{name!r}]", extra)
        self.history: list[SaveReport] = []
        self.current_step = 0
        self.should_stop = False
        self._ranks = ranks_of_this_training() if ranks is None else ranks
        if every_seconds is not None and self._ranks.world > 1:
            raise BadInput(
                "every_seconds= is for one rank: the clocks of several differ, and they must save at the same step; "
                "give every_steps="
            )
        self._model = model = unwrapped(model)
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._optimizers = plain_optimizers(given)
        self._reader, self._extras, self._saves_rng = reader, dict(extras or {}), rng
        self._intervals = reader if isinstance(reader, IntervalReader) else None
        self._redistribute = redistribute
        found: list[tuple[dict[str, nn.Parameter], list[LocalShard]]] = []
        declared = list(tables)
        # Where one rank cannot go on the others hear of it now, rather than wait for it.
        together(self._ranks, lambda: found.append(find_local_shards(model, self._optimizers, declared, self._ranks)))
        plain, shards = found[0]
        self._holdings = hold(shards, self._ranks)
        self._options = options_by_table(options, self._holdings.tables)
        self._rate = RateControl(self._options, self._holdings, schedule, policy, target_bytes_per_checkpoint)
        others = {"schedule": schedule != "constant", "target_bytes_per_checkpoint": bool(target_bytes_per_checkpoint)}
        self._quality = QualityTarget.of(
            max_quality_loss, validate, self._options, others, declared, shards, self._ranks
        )
        self._policy: Policy = policy
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._copies_whole = first_full == "copy"
        self._when_busy, self._on_error = when_busy, on_error
        check_alike(self._plan_state, self._optimizers, self._ranks)  # refuses what cannot be saved, too
        self._log_memory(mirror)
        self._lookups: list[Handle] = []
        trackers: list[RowTracker] = []

        def attach() -> None:
            check_mirror_folder(mirror, mirror_folder)
            dtypes = {shard.table: table_dtype_name(shard.weight, shard.table) for shard in shards}
            check_table_options(self._options, dtypes, mirror=mirror, policy=policy)
            trackers.append(
                RowTracker(
                    model, dict(plain), optimizers=self._optimizers, allow_dense=allow_dense,
                    assume=movements_of(assume or {}), on_bypass=on_bypass, verify_rows=verify_rows,
                    in_flight=in_flight,
                    shards=[watched_shard(shard) for shard in shards if shard.table not in plain],
                )
            )  # fmt: skip
            self._lookups = follow_lookups(model, trackers[0])
            compile_kernels(shards)

        try:
            together(self._ranks, attach)
        except BaseException:
            for handle in self._lookups:
                handle.remove()
            for tracker in trackers:
                tracker.detach()
            raise
        self._tracker = trackers[0]
        warmup()  # compiled code is loaded now, rather than in the stall of the first save
        self._buffers = StagingBuffers()
        self._codes_on_device = quantize_on_device
        self._background = BackgroundSave()
        self._lineage = Lineage(Cumulative({shard.name: shard.rows[1] - shard.rows[0] for shard in shards}))
        self._whole_next: set[str] = set()
        self._growing = Growing()
        self._held: Finished | None = None
        self._untold: BaseException | None = None  # a failure that waits for the step at which all ranks are asked
        self._fenced: BaseException | None = None
        self._stops_together = False
        self._reader_state: Any = None
        self._restored_reader_state: Any = None  # what a save commits until the next step
        self._steps_taken = 0
        self._hears_sigterm = save_on_sigterm is not False
        self._is_overdue = False
        self._steps_off_boundary, self._has_warned = 0, False
        self._last_save_step, self._last_save_s = 0, time.monotonic()
        self._is_closed = False
        self._writer: Writer | None = None
        self._takes_over = False  # in the next step, behind a restore
        self._open_writer_with: Callable[[Store, Succession | None], Writer] = lambda opened, succession: opened.writer(
            mirror=mirror, mirror_folder=mirror_folder, bytes_per_s=bytes_per_s, ranks=self._ranks,
            shards=self._holdings.placement, succession=succession,
        )  # fmt: skip
        self._owns_store = not isinstance(store, Store)
        try:
            self._control = self._ranks.another()
            self._store = self._open_store(store, branch, storage_options, threads)
            self._exits_on_sigterm = save_on_sigterm is True
            self._previous_handler: Any = None
            if save_on_sigterm:
                self._previous_handler = catch_sigterm(self._on_sigterm)
        except BaseException:
            self._detach()
            raise

    def _open_store(
        self, store: str | Store, branch: str | None, storage_options: Mapping[str, Any] | None, threads: int | None
    ) -> Store:
        if isinstance(store, Store):
            return store
        opened: list[Store] = []

        def open_here() -> None:
            opened.append(open_or_create(store, storage_options, threads, branch))

        rank_zero(self._control, open_here)  # it may have to create it, which only one can
        if not opened:
            open_here()
        return opened[0]

    # ---- the loop

    def step(self, step: int | None = None, *, reader_state: Any = None) -> bool:
        """Count a trained step and save if one is due; call it after ``optimizer.step()``.

        Blocks for the copy of touched rows when a save is due; else for microseconds. The first one behind a `restore`
        takes over the store as well: a training that is still at work on it can save no more (a few requests).

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
            An earlier save failed, once; its rows are saved with the next one. Several ranks raise at the same step:
            that of the next save.
        BadInput
            Without a reader, no ``reader_state`` although an earlier step had one; the step is not counted.
        Conflict
            In the first step behind a restore: another training has gone on from the same store since. It says which
            host and process, and when. Nothing was written.
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
        self._reader_state, self._restored_reader_state = reader_state, None
        self._steps_taken += 1
        if self._takes_over:
            self._go_on()
        if self._shall_stop():
            if self._some_rank_waits():
                return False
            self._save_last()
            if self._exits_on_sigterm:
                raise SystemExit(_SIGTERM_EXIT)
            return True
        error = self._take_finished(wait=False)
        if self._ranks.world == 1:
            self._report_failure(error)
        else:
            self._untold = error  # another rank may not know of it yet
        if self._is_overdue or self._is_due():
            self._is_overdue = True
            if not self._some_rank_waits():
                self._save_due()
        return False

    def save(self, *, wait: bool = True, flush: bool = True) -> SaveReport | None:
        """Save now, whether one is due or not; waits for a save that is under way.

        Parameters
        ----------
        wait
            Until the save is committed; its report is returned. Else it goes on in the background.
        flush
            Every changed row, also of tables with a threshold; without it rows may wait, as in the saves of `step`.

        Raises
        ------
        BackgroundSaveFailed
            With its cause; whatever ``on_error`` says. The rows stay dirty.
        BadInput
            Between forward and optimizer step.
        """
        self._check_open()
        self._raise_together(self._take_finished(wait=True))
        together(self._control, self._tracker.check_boundary)
        self._begin_save(wait_s=0.0, flush=flush)
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
        self._raise_together(self._take_finished(wait=True))
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
    def rate(self) -> RateStatus:
        """How exact tables are stored, and what becomes of that at the next save."""
        return self._rate.status

    def report_loss(self, loss: float | torch.Tensor) -> None:
        """Tell the loss of a step, for ``schedule="loss"``; of several ranks, that of rank 0 counts.

        The mean of about the last hundred is kept, also over restarts. Losses that are 0 or not finite do not count;
        without a schedule, nor those below 0. Of a tensor its one number is read, which waits for its device.

        Raises
        ------
        BadInput
            It is negative, and ``schedule="loss"`` follows it.
        """
        self._rate.report_loss(float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss))

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
        resize: Resize | None = None,
        slots_rule: SlotsRule = "exact",
        fallback: bool = False,
    ) -> RestoredState | None:
        """Put a checkpoint into the model, the optimizers, the reader and the generators, in place. Blocks.

        Nothing is written, and a training that is at work on the store goes on: also an evaluation may call this (or
        `load`, which needs no manager). The first `step` or `save` behind it takes the store over, and if that was not
        the head, commits a rollback record, so that the log says what the run continued from. What was trained since
        the last save is given up.

        Parameters
        ----------
        version, step, tag
            Which one; the head if none is given.
        tables
            Stored name to mine, for tables that are named differently.
        strict
            Refuse when the checkpoint and the model differ in tables, dense tensors or optimizers, or the number of
            reader states and ranks; else restore what both have, and return what was ``missing`` and ``unexpected``.
            The next save is then a full one.
        resize
            Take tables that have more rows than the stored ones (new ids came): the new rows get the stored table's
            ``fill``, or stay as the ``model`` has them, and so does their optimizer state. The next save says so. For
            trainings of one process that holds its tables whole.
        slots_rule
            For tables sharded by column, and slots with one value per row and shard, where the shards are cut
            otherwise than in the checkpoint: refuse, take the ``mean`` over a row's shards, or ``drop`` them (they stay
            as they are).
        fallback
            Where the head is damaged, look for the newest version that is whole (that reads it once more) and go on
            from there, behind a rollback record, with a warning. What is damaged stays in the store. Only for the head.

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
        if resize is not None:
            checked_choice("resize", resize, get_args(Resize))
        is_head = version is None and step is None and tag is None
        if fallback and not is_head:
            raise BadInput("fallback= is for the head: leave out version=, step= and tag=, or fallback=")
        self._report_together(self._take_finished(wait=True))
        self._settle()

        def load() -> RestoredState | None:
            chosen = rank_zero(self._control, lambda: choose_start(self._store, version, step, tag))
            succession = Succession(self._store, chosen["version"], chosen["newest"])
            return self._load(succession, tables, strict, slots_rule, resize, is_empty=chosen["is_empty"])

        try:
            return looking_again(load, is_head=is_head)
        except RankLost:
            raise
        except Exception as error:
            if not fallback:
                if is_head and isinstance(error, CorruptStore):
                    error.message += "; restore(fallback=True) goes on from the newest version that is whole"
                raise
            back = go_back(self._control, self._store, error)
        warnings.warn(str(back), RuntimeWarning, stacklevel=2)
        succession = Succession(self._store, back.target, back.newest, back.torn)
        restored = self._load(succession, tables, strict, slots_rule, resize)
        return None if restored is None else replace(restored, fallback_from=back.damaged, problem=back.problem)

    def _load(
        self,
        succession: Succession,
        tables: Mapping[str, str] | None,
        strict: bool,
        slots_rule: SlotsRule,
        resize: Resize | None,
        *,
        is_empty: bool = False,
    ) -> RestoredState | None:
        """Put a version in place, and go on from it at the next step or save; nothing is written before that."""
        if is_empty:
            self._writer, self._takes_over = self._new_writer(succession), True
            return None
        planned: list[Planned] = []
        # On every rank before anything is changed on one.
        together(
            self._control,
            lambda: planned.append(self._plan_loading(succession.version, tables, strict, slots_rule, resize)),
        )
        restored = self._restore(self._new_writer(succession), planned[0], strict, slots_rule, resize)
        if not strict or slots_rule != "exact":
            self._whole_next |= self._holdings.tables.keys()  # what was left out is not what the mirrors hold
        return restored

    def _plan_loading(
        self,
        version: int,
        tables: Mapping[str, str] | None,
        strict: bool,
        slots_rule: SlotsRule,
        resize: Resize | None,
    ) -> Planned:
        planned = plan_loading(
            self._store, version, self._plan_state(), self._holdings, self._optimizers, tables=tables, strict=strict,
            slots_rule=slots_rule, resize=resize,
        )  # fmt: skip
        check_resizable(planned.plan, self._holdings)
        if strict:
            check_extras(planned.trainer, self._extras)
        return planned

    def _restore(
        self, writer: Writer, planned: Planned, strict: bool, slots_rule: SlotsRule, resize: Resize | None
    ) -> RestoredState:
        read: list[_Read] = []
        together(self._control, lambda: read.append(self._read_all_but_tables(planned, strict)))
        filled = writer.restore(read[0].targets.outputs, slots_rule=slots_rule)
        restored: list[RestoredState] = []

        def apply() -> None:
            finish_tables(filled, read[0].targets, self._optimizers, slots_rule)
            fill_new_rows(planned.plan, resize)
            restored.append(self._apply(writer, planned, read[0]))

        together(self._control, apply)
        self._writer, self._takes_over, self._fenced = writer, True, None
        document = RateDocument() if planned.trainer is None else planned.trainer.rate
        kept = self._holdings.tables.keys() - self._whole_next
        self._rate.restored(self._control, writer, document, kept)
        self._quality = None
        if self._saves_rng and read[0].rng is not None:
            restore_rng(read[0].rng)  # last: nothing that restores may draw from what it set
        return restored[0]

    def _read_all_but_tables(self, planned: Planned, strict: bool) -> _Read:
        snapshot, plan = planned.snapshot, planned.plan
        reader_state = stored_reader_state(snapshot, self._ranks, self._redistribute, strict=strict)
        loaded = read_dense(snapshot, plan)
        rng = stored_rng(planned, self._ranks.rank)
        if self._policy in ("one_shot", "intermittent"):
            sizes = sizes_since_baseline(self._policy, self._store.log(snapshot.version))
            mine = {holding.table for holding in self._holdings.by_name.values()}
            changed = {
                name: snapshot.table(stored).changed_rows() for name, stored in plan.renamed.items() if name in mine
            }
        else:
            sizes, changed = sizes_since_baseline(self._policy, [snapshot.record]), {}
        return _Read(loaded, reader_state, rng, sizes, changed, restore_targets(plan, self._optimizers))

    def _apply(self, writer: Writer, planned: Planned, read: _Read) -> RestoredState:
        snapshot, plan, state, trainer = planned.snapshot, planned.plan, planned.state, planned.trainer
        reader_state, loaded = read.reader_state, read.loaded
        apply_dense(plan, loaded, snapshot.dense, state, self._optimizers)
        for name, extra in self._extras.items():
            if trainer is not None and name in trainer.extras:
                extra.load_state_dict(trainer.extras[name])
        if self._reader is not None and reader_state is not None:
            resume(self._reader, reader_state)
        self._tracker.reset()
        writer.mirrors.options.update(self._options)
        self._lineage.restored(read.sizes, read.changed, self._holdings.by_name)
        self._whole_next = {name for name in self._holdings.tables if plan.renamed.get(name) != name}
        self._whole_next |= self._growing.restored(plan, self._holdings, self._policy, self._tracker)
        self.current_step = self._last_save_step = snapshot.step
        self._last_save_s, self._is_overdue = time.monotonic(), False
        self._reader_state, self._restored_reader_state = None, reader_state
        logger.info("restored step %d from version %d of %s", snapshot.step, snapshot.version, self._store.url)
        return RestoredState(
            snapshot.step, snapshot.version, reader_state, tuple(plan.renamed), plan.missing, plan.unexpected
        )

    # ---- one save

    def _plan_state(self) -> StatePlan:
        return plan_state(self._model, self._optimizers, self._holdings.shards, self._holdings.tables)

    def _shall_stop(self) -> bool:
        """Whether SIGTERM has come, to any rank: all ranks hear of it at the same step."""
        if self._ranks.world > 1 and self._hears_sigterm and self._steps_taken % _STEPS_BETWEEN_SIGNALS == 0:
            self._stops_together = any(together(self._control, lambda: self.should_stop))
            self.should_stop = self.should_stop or self._stops_together
        return self.should_stop and (self._ranks.world == 1 or self._stops_together)

    def _is_due(self) -> bool:
        if self._every_steps is not None and self.current_step - self._last_save_step >= self._every_steps:
            return True
        return self._every_seconds is not None and time.monotonic() - self._last_save_s >= self._every_seconds

    def _save_due(self) -> None:
        """Begin the save that is due, as ``when_busy`` and ``on_error`` say."""
        started = time.perf_counter()
        # What one rank cannot save now no rank can; with "wait" nobody needs to ask.
        is_busy = self._when_busy != "wait" and any(together(self._control, lambda: self._background.is_running))
        if is_busy:
            if self._when_busy == "refuse":
                raise SaveInProgress(
                    f"the save before step {self.current_step} is still under way; save less often, or choose "
                    'when_busy="wait" or "skip"'
                )
            if self._when_busy == "skip":
                self._mark_saved()
                return
        self._report_together(self._take_finished(wait=True))
        try:
            is_over = self._begin_save(wait_s=time.perf_counter() - started)
        except CnrStoreError as error:
            if self._on_error == "raise":
                raise
            self._mark_saved()
            warnings.warn(f"no checkpoint at step {self.current_step}: {error}", RuntimeWarning, stacklevel=3)
            return
        if self._ranks.world == 1 and is_over:  # a first full that stalled: its failure is news of this step
            self._report_failure(self._take_finished(wait=False))

    def _some_rank_waits(self) -> bool:
        """Whether a save that is due must wait on some rank, and so on all."""
        waits = any(together(self._control, self._waits_for_boundary))
        if waits and self._intervals is not None:
            self._intervals.prepare()  # where the reader is ready already, it stays so for the others
        return waits

    def _waits_for_boundary(self) -> bool:
        """Whether a save must wait for reader or optimizer step; warns, once, if that step does not seem to come."""
        if self._intervals is not None and self._reader_state is None and not self._intervals.is_ready:
            self._intervals.prepare()
            if not self._intervals.is_ready:
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

    def _begin_save(self, *, wait_s: float, flush: bool = False) -> bool:
        """Copy what is to be saved and hand it to the background; the only part that holds the training up.

        Returns whether the save is over, because it read live tables.
        """
        started = time.perf_counter()
        self._settle()
        writer = self._ready_writer()
        if self._quality is not None:
            self._rate.calibrated(self._quality.scales(self._model, self._options, self._control))
            self._quality = None
        plan, slots, decision, tables = self._decide_together(writer)
        transaction = writer.begin(self.current_step, decision.kind, base=decision.base, flush=flush)
        job: SaveJob | None = None
        try:
            job = self._stage(transaction, decision, writer, plan, slots, tables)
            job.wait_s = wait_s
            job.stall_s = time.perf_counter() - started
            self._start(job)
            self._mark_saved()
            if self._reads_live(job):
                self._background.wait()
                job.stall_s = time.perf_counter() - started
        except BaseException:
            if self._ranks.world > 1:
                self._mark_saved()  # others may have begun theirs: the next save must be due on all at the same step
            if job is None:
                transaction.abort()
            elif not self._background.has(job):
                transaction.abort()
                self._lost(job, None)
            elif self._reads_live(job):
                # Training that went on now would tear what is being read.
                self._background.wait_to_the_end()
            raise
        return self._reads_live(job)

    def _reads_live(self, job: SaveJob) -> bool:
        return bool(job.whole) and not self._copies_whole

    def _start(self, job: SaveJob) -> None:
        try:
            self._background.start(job)
        except Exception as error:  # no thread, no memory: the training may go on
            raise BackgroundSaveFailed(failure_message(error)) from error

    def _decide_together(self, writer: Writer) -> tuple[StatePlan, dict[str, Slots], Decision, dict[str, Any]]:
        """Return this rank's state and its slots by shard, and of all ranks: what they save now, their tables.

        The tables are what the ranks know of them between them: ``slots``, ``fused`` and ``stepped``.
        """
        found: list[tuple[StatePlan, dict[str, Slots], Decision]] = []

        def share() -> dict[str, Any]:
            plan = self._plan_state()
            slots = {name: live_slots(shard) for name, shard in plan.shards.items()}
            mine = self._decide(writer, plan, slots)
            found.append((plan, slots, mine))
            known = {
                "slots": slot_documents(plan.shards, slots), "fused": fused_documents(plan.shards.values()),
                "stepped": stepped_documents(plan, self._optimizers),
            }  # fmt: skip
            return {
                "kind": mine.kind, "base": mine.base, "whole": sorted(self._whole_next),
                "tables": document_tree.encode(known, leaf_of),
                "rate": self._rate.proposal(self._lineage.sizes, len(writer.head.record.chain)),
            }  # fmt: skip

        answers = together(self._control, share)
        self._whole_next.update(*(answer["whole"] for answer in answers))
        known: dict[str, Any] = {"slots": {}, "fused": {}, "stepped": {}}
        for answer in reversed(answers):
            given = document_tree.decode(answer["tables"], tensor_of)
            for name, of_tables in known.items():
                of_tables.update(given[name])
        plan, slots, decision = found[0]
        if any(answer["kind"] == "full" for answer in answers):
            decision = Decision("full", "baseline", "a rank needs it")
        decision = self._rate.follow_target(self._control, writer, decision, answers[0]["rate"], self._whole_next)
        if decision.kind == "full":
            self._whole_next |= self._rate.waits_for_full()
            self._whole_next |= self._rate.too_fine(self._control, writer, self._whole_next)
        return plan, slots, decision, known

    def _decide(self, writer: Writer, plan: StatePlan, slots: Mapping[str, Slots]) -> Decision:
        schemas = self._growing.applied_to(writer.snapshot.tables) if writer.is_synced else {}
        self._whole_next |= self._rate.waits_for_full()
        self._whole_next |= {
            shard.table
            for name, shard in plan.shards.items()
            if needs_new_schema(schemas.get(shard.table), shard, slots[name], self._options[shard.table])
        }
        if not writer.is_synced:
            self._whole_next |= self._holdings.tables.keys()  # also those of other ranks, which forget them with us
            return Decision("full", "baseline", "the writer does not know the head's state")
        if self._whole_next or schemas.keys() - self._holdings.tables.keys():
            return Decision("full", "baseline", f"tables {sorted(self._whole_next)} must be written whole")
        length = len(writer.head.record.chain)
        return self._rate.decide(decide(self._policy, self._lineage.sizes, chain_length=length), length)

    def _stage(
        self,
        transaction: Transaction,
        decision: Decision,
        writer: Writer,
        plan: StatePlan,
        slots: Mapping[str, Slots],
        tables: Mapping[str, Any],
    ) -> SaveJob:
        schemas = writer.snapshot.tables if writer.is_synced else {}
        mine = self._holdings.tables.keys()
        self._whole_next |= self._rate.anew_in(transaction)
        drops = tuple(sorted((schemas.keys() | set(transaction.needs_whole_tables)) - mine))
        whole = set(self._whole_next) | (set(transaction.needs_whole_tables) & mine)
        whole |= self._growing.stage(transaction, whole)
        taken: dict[str, Taken] = {}
        staged = None

        def share() -> dict[str, str]:
            self._rate.stage(transaction, writer, self._whole_next)
            self._put_state(transaction, writer, plan, tables)
            taken.update(self._tracker.take())
            return words_of(taken, self._holdings.replicated)

        try:
            # Here, so that a rank that cannot take part is known to the others before they stage anything.
            marked = union_of(together(self._control, share))
            rows: dict[str, TouchedRows] = {}
            requests: dict[str, RowRequest] = {}
            for name, holding in self._holdings.owned.items():
                if holding.table in marked:
                    taken[name] = taken_words(name, taken[name].num_rows, marked[holding.table])
                if holding.table in whole:
                    continue
                local = rows_to_write(taken[name], decision, self._lineage.changed)
                threshold = self._rate.threshold_for(holding.table)
                rows[name] = TouchedRows(holding.key, local + holding.shard.rows[0], threshold)
                own = taken[name].device_rows if local is taken[name].row_ids else None
                requests[name] = RowRequest(local, {WEIGHT: holding.shard.weight, **slots[name]}, own)
            if self._codes_on_device:
                coming = {name: self._holdings.owned[name].shard for name in requests}
                self._buffers.quantize = dict(rows_as_codes(coming, transaction.tables, self._options))
            try:
                staged = self._buffers.gather(requests)
            except RuntimeError as error:  # no thread, no memory of the device: the training may go on
                raise BackgroundSaveFailed(failure_message(error)) from error
            written = {
                name: self._whole_shard(holding, slots[name])
                for name, holding in self._holdings.owned.items()
                if holding.table in whole
            }
            wait_for_streams(tensor for one in written.values() for tensor in (one.weight, *one.slots.values()))
        except BaseException:
            self._tracker.give_back(taken)
            if staged is not None:
                staged.release()
            raise
        declares = self._holdings.placement is not None and bool(self._whole_next)
        return SaveJob(transaction, taken, staged, rows, written, drops, declares)

    def _put_state(self, transaction: Transaction, writer: Writer, plan: StatePlan, tables: Mapping[str, Any]) -> None:
        """Hand over what is no row of a table: rank 0 says it for all, but for generators and readers."""
        rank = self._ranks.rank
        given = self._restored_reader_state if self._reader_state is None else self._reader_state
        reader = reader_document(self._reader, given)  # before the generators: a loader may draw for its first state
        if rank == 0:
            put_dense_state(transaction, writer.snapshot.dense if writer.is_synced else (), plan, self._optimizers)
            transaction.put_scalars({"step": self.current_step})
            document = trainer_document(
                plan, self._optimizers, tables, self._extras, self._rate.document(), with_rng=self._saves_rng
            )
        else:
            document = rank_document(with_rng=self._saves_rng)
        transaction.put_document(trainer_name(rank), document, leaf_of)
        if reader is not None:
            transaction.put_document(reader_name(rank), reader, leaf_of)

    def _whole_shard(self, holding: Holding, slots: Slots) -> WholeShard:
        weight = holding.shard.weight.detach()
        if self._copies_whole:
            weight, slots = weight.clone(), {name: slot.detach().clone() for name, slot in slots.items()}
        is_new = holding.table in self._whole_next
        return WholeShard(holding.key, weight, slots, self._rate.options_for(holding.table) if is_new else None)

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
        if self._untold is not None:
            error, self._untold = self._untold, None
            return error
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
        self._tracker.give_back(job.waiting)  # by the owner alone: marks of copies are united at the next save
        # What ranks write anew they write on all of them, in one save.
        whole = {one.key.table for one in job.whole.values()}
        self._whole_next -= self._holdings.tables.keys() if job.declares else whole
        self._lineage.add(job)
        self._growing.won()
        if error is not None:
            # What the mirrors hold is not known then, and the next save asks the writer (`_decide`).
            logger.warning("version %d is committed, but then failed (%r); the next save is a full", version, error)
        changes = self._rate.won(job.transaction)
        report = job.report(version, changes, self._rate.status.target)
        self.history.append(report)
        logger.info(
            "version %d: %s of step %d, %d rows, %d bytes, stall %.4f s, background %.3f s",
            report.version, report.kind, report.step, report.rows, report.size_bytes, report.stall_s,
            report.encode_s + report.commit_s,
        )  # fmt: skip

    def _lost(self, job: SaveJob, error: BaseException | None) -> None:
        job.staged.release()
        self._rate.lost()
        self._tracker.give_back(job.taken)
        if isinstance(error, Fenced):
            self._fenced = error
        elif isinstance(error, TransactionAborted) and self._ranks.world > 1:
            pass  # a rank gave up before anything was appended: the mirrors are the head's, on all ranks
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
        warnings.warn(failure_message(error), RuntimeWarning, stacklevel=3)

    def _report_together(self, error: BaseException | None) -> None:
        """As `_report_failure`, on all ranks what one has to tell: they save next, or not, together."""
        try:
            self._raise_together(error)
        except BackgroundSaveFailed as failure:
            if self._on_error == "raise":
                raise
            warnings.warn(str(failure), RuntimeWarning, stacklevel=3)

    def _raise_together(self, error: BaseException | None) -> None:
        together(self._control, lambda: self._raise_failure(error))

    def _raise_failure(self, error: BaseException | None) -> None:
        if error is None:
            return
        if not isinstance(error, Exception):
            raise error
        raise BackgroundSaveFailed(failure_message(error)) from error

    # ---- the writer

    def _ready_writer(self) -> Writer:
        if self._fenced is not None:
            raise Fenced(f"this training can no longer save to {self._store.url}: {self._fenced}") from self._fenced
        if self._writer is None:
            self._writer = self._new_writer(None)
            if self._writer.head.record.chain:
                logger.warning(
                    "%s holds checkpoints that were not restored; the next save is a full one of the live state",
                    self._store.url,
                )
                self._whole_next |= self._holdings.tables.keys()
        self._writer.take_over()
        return self._writer

    def _new_writer(self, succession: Succession | None) -> Writer:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._takes_over = None, False
        return self._open_writer_with(self._store, succession)

    def _go_on(self) -> None:
        """In the first step behind a restore: become the committer, so that a training that this one follows stops."""
        self._takes_over = False
        try:
            self._ready_writer()
        except CnrStoreError as error:
            if self._on_error == "raise":
                raise
            warnings.warn(
                f"this training has not taken over {self._store.url} yet: {error}", RuntimeWarning, stacklevel=3
            )

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
            self._detach()
            self._buffers.free()
            if self._writer is not None:
                self._writer.close()
            if self._owns_store:
                self._store.close()

    def _detach(self) -> None:
        self._tracker.detach()
        while self._lookups:
            self._lookups.pop().remove()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        # Only a flag: the signal may come in the middle of an optimizer step.
        self.should_stop = True
        if callable(self._previous_handler):
            self._previous_handler(number, frame)

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadInput("the checkpoint manager is closed; make another one")

    def _log_memory(self, mirror: MirrorMode) -> None:
        owned = [holding.shard for holding in self._holdings.owned.values()]
        total = sum(mirror_estimate(one.weight, live_slots(one), self._options[one.table]) for one in owned)
        where = {"memory": "in memory", "mmap": "on disk", "none": "not kept"}[mirror]
        logger.info("%d shards of tables, code mirrors of about %.1f MiB (%s)", len(owned), total / 2**20, where)
