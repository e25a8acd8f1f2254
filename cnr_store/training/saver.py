"""Begins the saves of one training on the training thread, runs them in the background, and handles their outcomes.

The rule that it must never break: rows stay dirty until the commit that has them succeeds (design, section 4, rule 3).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial

from cnr_store.errors import (
    BackgroundSaveFailed,
    CnrStoreError,
    CommitStateUnknown,
    Conflict,
    Fenced,
    SaveInProgress,
    TransactionAborted,
)
from cnr_store.runtime.caller import warn_caller
from cnr_store.runtime.git_commit import git_commit
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.training.background import (
    BackgroundSave,
    Finished,
    LiveRead,
    SaveJob,
    SaveOutcome,
    SaveReport,
    failure_message,
    raise_failure,
    run_save,
)
from cnr_store.training.communication_state import with_metrics
from cnr_store.training.live_training import LiveTraining
from cnr_store.training.options import OnError, SavePolicy
from cnr_store.training.save_plan import ChainState, SavePlan, plan_save
from cnr_store.training.save_staging import SaveStager
from cnr_store.training.schedule import SaveSchedule, TrainingPosition
from cnr_store.training.training_writer import TakeOver, TrainingWriter
from cnr_store.types import JsonValue
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer


@dataclass(frozen=True, slots=True)
class FailureReports:
    """Raises or warns about failed saves, as ``on_error`` selects."""

    ranks: Ranks
    on_error: OnError

    def report(self, error: BaseException | None) -> None:
        """Raise or warn on this rank alone."""
        try:
            raise_failure(error)
        except BackgroundSaveFailed as failure:
            self._raise_or_warn(failure)

    def report_together(self, error: BaseException | None) -> None:
        """As `report`, but an error of one rank is reported on all, so that they all save next or all do not."""
        try:
            self.raise_together(error)
        except BackgroundSaveFailed as failure:
            self._raise_or_warn(failure)

    def raise_together(self, error: BaseException | None) -> None:
        """Raise an error of one rank on all ranks, independently of ``on_error``."""
        together(self.ranks, lambda: raise_failure(error))

    def report_opening(self, ready: Callable[[], Writer]) -> None:
        """Raise or warn if no writer is ``ready``, which is so on all ranks; the next save tries again."""
        try:
            ready()
        except CnrStoreError as error:
            if self.on_error == "raise":
                raise
            warn_caller(f"this training has not taken its store over yet: {error}")

    def _raise_or_warn(self, failure: BackgroundSaveFailed) -> None:
        if self.on_error == "raise":
            raise failure
        warn_caller(str(failure))


class SaveState(Enum):
    """Whether and how the next save of a training may begin."""

    IDLE = "idle"
    """Nothing: a save may begin."""
    UNTRAINED = "untrained"
    """Nothing was trained since a checkpoint was restored, or at all; the next step or save takes the store over."""
    READING = "reading"
    """Tables are read while the training continues; a later step adds the rows changed since and is saved."""
    RUNNING = "running"
    """A save is running, or over and not yet collected."""
    UNKNOWN = "unknown"
    """A commit's reply was lost. Its rows are kept separately, and the next save first looks up the commit."""
    FENCED = "fenced"
    """Another training has taken the store over: no save is possible before another restore."""


class SaveEvent(Enum):
    """What happens to a training's saves."""

    WRITER_OPENED = "writer opened"
    """A restore begins: a new writer replaces the old one."""
    IN_PLACE = "in place"
    """The live state is that of a checkpoint, or of an empty store."""
    STEPPED = "stepped"
    """A step was trained after a state was put in place."""
    READ = "read"
    """Tables began to be read while the training continues."""
    STARTED = "started"
    """A save was handed to the background."""
    WON = "won"
    """It is committed."""
    LOST = "lost"
    """It is not committed; its rows are dirty again."""
    FENCED = "fenced"
    """It is not committed, because another training has taken the store over."""
    NO_REPLY = "no reply"
    """Whether it is committed is not known."""


_NEXT: dict[tuple[SaveState, SaveEvent], SaveState] = {
    (SaveState.IDLE, SaveEvent.WRITER_OPENED): SaveState.IDLE,
    (SaveState.UNTRAINED, SaveEvent.WRITER_OPENED): SaveState.IDLE,
    (SaveState.FENCED, SaveEvent.WRITER_OPENED): SaveState.FENCED,
    (SaveState.IDLE, SaveEvent.IN_PLACE): SaveState.UNTRAINED,
    (SaveState.FENCED, SaveEvent.IN_PLACE): SaveState.UNTRAINED,
    (SaveState.UNTRAINED, SaveEvent.STEPPED): SaveState.IDLE,
    (SaveState.IDLE, SaveEvent.READ): SaveState.READING,
    (SaveState.UNTRAINED, SaveEvent.READ): SaveState.READING,
    (SaveState.READING, SaveEvent.STARTED): SaveState.RUNNING,
    (SaveState.READING, SaveEvent.LOST): SaveState.IDLE,
    (SaveState.IDLE, SaveEvent.STARTED): SaveState.RUNNING,
    (SaveState.UNTRAINED, SaveEvent.STARTED): SaveState.RUNNING,
    # A save that could not be handed to the background was never running.
    (SaveState.IDLE, SaveEvent.LOST): SaveState.IDLE,
    (SaveState.UNTRAINED, SaveEvent.LOST): SaveState.UNTRAINED,
    (SaveState.RUNNING, SaveEvent.WON): SaveState.IDLE,
    (SaveState.RUNNING, SaveEvent.LOST): SaveState.IDLE,
    (SaveState.RUNNING, SaveEvent.FENCED): SaveState.FENCED,
    (SaveState.RUNNING, SaveEvent.NO_REPLY): SaveState.UNKNOWN,
    (SaveState.UNKNOWN, SaveEvent.WON): SaveState.IDLE,
    (SaveState.UNKNOWN, SaveEvent.LOST): SaveState.IDLE,
}


def next_state(state: SaveState, event: SaveEvent) -> SaveState:
    """Return the state after an event. Pure.

    Raises
    ------
    AssertionError
        The event cannot happen in this state: an error of this library.
    """
    found = _NEXT.get((state, event))
    assert found is not None, f"{event} cannot happen in {state}"
    return found


logger = logging.getLogger(__name__)


class Saver:
    """Begins saves and handles their outcomes. Call it from the thread that trains.

    Attributes
    ----------
    history
        Reports of the committed saves, oldest first.
    state
        The state that decides whether the next save may begin; only `_move` changes it.
    """

    def __init__(
        self,
        training: LiveTraining,
        chain: ChainState,
        position: TrainingPosition,
        schedule: SaveSchedule,
        stager: SaveStager,
        writer: TrainingWriter,
        policy: SavePolicy,
        reports: FailureReports,
    ) -> None:
        self.training, self.chain, self.position, self.schedule = training, chain, position, schedule
        self.stager, self.writer, self.policy, self.reports = stager, writer, policy, reports
        self.background = BackgroundSave(partial(run_save, then=writer.after_save))
        commit = git_commit() if policy.git else None
        self._about: dict[str, JsonValue] = {} if commit is None else {"git": commit}
        self._notes: Mapping[str, JsonValue] | None = None  # of the newest save
        self.history: list[SaveReport] = []
        self.state = SaveState.UNTRAINED
        self._unknown: Finished | None = None  # in the state UNKNOWN
        self._fenced_by: Fenced | None = None  # in the state FENCED
        self._reading: LiveRead | None = None  # in the state READING
        self._unreported: BaseException | None = None  # waits for the step at which all ranks are asked

    # ---- beginning a save

    def begin(self, *, wait_s: float, notes: Mapping[str, JsonValue] | None = None) -> bool:
        """Copy the state to save and hand it to the background. Only this part of a save blocks the training.

        ``notes`` are recorded with it.

        Returns True if the save is already over, because the training waited until tables were written.
        """
        started = time.perf_counter()
        self.settle()
        writer = self.ready_writer()
        if self.chain.quality is not None:
            training = self.training
            scales = self.chain.quality.scales(training.model, training.options, training.control)
            self.chain.rate.calibrated(scales)
            self.chain.quality = None
        plan = self._plan(writer)
        transaction = writer.begin(self.position.step, plan.decision.kind, base=plan.decision.base)
        about: Mapping[str, JsonValue] = {**self._about, **(notes or {})}
        communication = self.training.communication
        transaction.note(with_metrics(about, communication) if communication else about)
        self._notes = notes
        if self.policy.first_baseline == "live":
            try:
                read = self.stager.begin_reading(transaction, writer, plan)
                if read is not None:
                    self._read(read, started)
                    return False
            except BaseException:
                transaction.abort()
                raise
        return self._save(transaction, writer, plan, started, wait_s=wait_s)

    def _plan(self, writer: Writer) -> SavePlan:
        auto = self.schedule.auto
        plan = plan_save(self.training, self.chain, self.policy.policy, writer, None if auto is None else auto.measure)
        if auto is not None:
            auto.agree(plan.measures)
        return plan

    def _read(self, read: LiveRead, started: float) -> None:
        """Read tables in the background; the save continues in `finish`, at the first step after the read."""
        try:
            together(self.training.control, lambda: self.background.read(read))
        except BaseException:  # no thread, no memory, here or on another rank
            self.background.read_error()
            self.training.tracker.give_back(read.taken)
            raise
        self._reading = read
        self._move(SaveEvent.READ)
        self.mark_saved()
        read.stall_s = time.perf_counter() - started

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._reading is not None or self.background.is_running

    def finish(self) -> BaseException | None:
        """Continue a save whose tables are read: copy the rows that changed since. Waits until the read is over.

        Call it between optimizer steps, on all ranks. Returns the error if the save was aborted.
        """
        read, writer, control = self._reading, self.writer.current, self.training.control
        assert read is not None  # the caller has asked
        assert writer is not None  # a save has begun
        failed = self.background.read_error()
        started = time.perf_counter()

        def share() -> bool:
            if failed is not None:
                raise failed
            self.training.tracker.check_boundary()
            return self.stager.is_outdated(read, plan)

        try:
            plan = self._plan(writer)
            is_outdated = any(together(control, share))
        except Exception as error:  # noqa: BLE001 (raised where the save is collected)
            self._give_up(read)
            return error
        if is_outdated:  # an optimizer made its state meanwhile, which belongs to the save
            self._give_up(read)
            self.begin(wait_s=0.0, notes=self._notes)
            return None
        self._reading = None
        read.transaction.move_to(self.position.step)
        self._save(read.transaction, writer, plan, started, read=read)
        return None

    def _give_up(self, read: LiveRead) -> None:
        self._reading = None
        read.transaction.abort()
        self.chain.rate.lost()
        self.training.tracker.give_back(read.taken)
        self._move(SaveEvent.LOST)

    def _save(
        self, transaction: Transaction, writer: Writer, plan: SavePlan, started: float, *, wait_s: float = 0.0,
        read: LiveRead | None = None,
    ) -> bool:  # fmt: skip
        """Stage a save and hand it to the background; return True if it is over, because it reads live tables."""
        job: SaveJob | None = None
        try:
            job = self.stager.stage(transaction, writer, plan, read)
            stalled = 0.0 if read is None else read.stall_s
            job.wait_s = wait_s
            job.stall_s = stalled + time.perf_counter() - started
            self._start(job)
            self.mark_saved()
            if job.whole:
                self.background.wait()
                job.stall_s = stalled + time.perf_counter() - started
        except BaseException:
            if self.training.ranks.world > 1:
                self.mark_saved()  # others may have begun theirs: the next save must be due on all at the same step
            if job is None:
                transaction.abort()
                if read is not None:
                    self.training.tracker.give_back(read.taken)
                    self._move(SaveEvent.LOST)
            elif not self.background.has(job):
                transaction.abort()
                self._lost(job, None)
            elif job.whole:
                # A training step now would change rows while they are read.
                self.background.wait_to_the_end()
            raise
        return bool(job.whole)

    def mark_saved(self) -> None:
        """Count from this step until the next save is due."""
        self.schedule.mark(self.position.step, time.monotonic())

    def _start(self, job: SaveJob) -> None:
        try:
            self.background.start(job)
        except Exception as error:  # no thread, no memory: the training may go on
            raise BackgroundSaveFailed(failure_message(error)) from error
        finally:
            if self.background.has(job):
                self._move(SaveEvent.STARTED)

    # ---- what became of it

    @property
    def last_save(self) -> SaveReport | None:
        """The report of the newest committed save that the training thread has collected."""
        return self.history[-1] if self.history else None

    def collect(self, *, wait: bool) -> BaseException | None:
        """Collect a save that is over; return its error if it is not known to be committed.

        With ``wait``, a save whose tables are being read becomes a save of the present step; then all ranks call it.
        """
        self.stager.dense.settle()  # the caller may write dense tensors next
        if self._unreported is not None:
            unreported, self._unreported = self._unreported, None
            return unreported
        while wait and self._reading is not None:
            error = self.finish()
            if error is not None:
                return error
        finished = self.background.collect(wait=wait)
        if finished is None:
            return None
        if finished.outcome is SaveOutcome.WON:
            version = finished.job.transaction.version
            assert version is not None  # a commit that won has one
            self._won(finished.job, version, finished.error)
            if isinstance(finished.error, Exception):
                return None
        elif finished.outcome is SaveOutcome.UNKNOWN:
            self._unknown = finished
            self._move(SaveEvent.NO_REPLY)
        else:
            self._lost(finished.job, finished.error)
        return finished.error

    def collect_at_step(self, must_wait: Callable[[], bool]) -> None:
        """Collect a save that is over, or continue one whose tables are read, unless it ``must_wait``.

        With several ranks the error is kept until all of them call `collect`. All ranks call this.
        """
        if self._reading is not None:
            self.mark_saved()  # what comes due meanwhile is this save
            is_read = all(together(self.training.control, lambda: self.background.is_read))
            error = self.finish() if is_read and not must_wait() else None
        else:
            error = self.collect(wait=False)
        if self.training.ranks.world == 1:
            self.reports.report(error)
        else:
            self._unreported = error  # another rank may not know of it yet

    def settle(self) -> None:
        """Look up in the store whether a save with an unknown outcome was committed. Blocks.

        Raises
        ------
        CommitStateUnknown
            Still unknown. Its rows are kept separately until it is known.
        """
        writer, unknown = self.writer.current, self._unknown
        if writer is None:
            return
        if unknown is None:
            # A commit may be unknown to the writer although its save ended in another error; its rows are dirty again.
            writer.settle()
            return
        before, failed = writer.head.record.v, None
        try:
            entry = writer.settle()
        except Exception as error:
            if writer.head.record.v == before:
                raise
            entry, failed = writer.head, error  # it had won before that failed
        self._unknown = None
        if entry is None:
            self._lost(unknown.job, Conflict("another record took the log position"))
        else:
            self._won(unknown.job, entry.record.v, failed)

    def _won(self, job: SaveJob, version: int, error: BaseException | None = None) -> None:
        """Handle a committed save. ``error``: what failed after the commit; the commit stays valid."""
        started = time.perf_counter()
        self._move(SaveEvent.WON)
        job.staged.release()
        changes = self.chain.won(job, self.training)
        if error is not None:
            # What the mirrors hold is not known then, and the next save asks the writer (`plan_save`).
            logger.warning("version %d is committed, but then failed (%r); the next save is a baseline", version, error)
        report = job.report(version, changes)
        self.history.append(report)
        stall_s = report.stall_s + time.perf_counter() - started
        self.schedule.saved(report.kind, stall_s=stall_s, write_s=report.encode_s + report.commit_s)
        logger.info(
            "version %d: %s of step %d, %d rows, %d bytes, stall %.4f s, background %.3f s",
            report.version, report.kind, report.step, report.rows, report.size_bytes, report.stall_s,
            report.encode_s + report.commit_s,
        )  # fmt: skip
        if self.policy.on_save is not None:
            try:
                self.policy.on_save(report)
            except Exception:
                logger.exception("on_save raised for version %d, which is committed; the training continues", version)

    def _lost(self, job: SaveJob, error: BaseException | None) -> None:
        job.staged.release()
        self.chain.rate.lost()
        self.training.give_back(job.taken, job.keyed)
        if job.read is not None:
            self.training.tracker.give_back(job.read.taken)
        if isinstance(error, Fenced):
            self._fenced_by = error
            self._move(SaveEvent.FENCED)
            return
        self._move(SaveEvent.LOST)
        if isinstance(error, TransactionAborted) and self.training.ranks.world > 1:
            pass  # a rank gave up before anything was appended: the mirrors are the head's, on all ranks
        elif isinstance(error, Conflict):
            # The mirrors do not match the head: the next save commits a fence and then a baseline.
            self.writer.close()

    def _move(self, event: SaveEvent) -> None:
        self.state = next_state(self.state, event)

    # ---- the writer

    def ready_writer(self) -> Writer:
        """Return the writer after its takeover of the store. Waits for it, if the first step has not long begun it.

        Raises
        ------
        Fenced
            Another training has taken the store over.
        Conflict
            Another training has committed after the restored version.
        """
        store = self.writer.store
        if self.state is SaveState.FENCED:
            raise Fenced(f"this training can no longer save to {store.url}: {self._fenced_by}") from self._fenced_by
        writer, is_new = self.writer.current, self.writer.current is None
        if writer is None or not writer.is_committer or self.writer.opening is not None:
            writer = self.writer.ready(self.background.call)
        if is_new and writer.head.record.chain:
            logger.warning(
                "%s holds checkpoints that were not restored; the next save is a baseline of the live state", store.url
            )
            self.chain.whole_next |= self.training.tables
        return writer

    @contextmanager
    def continuing(self, take_over: TakeOver) -> Iterator[Writer]:
        """As `TrainingWriter.continuing`; after the block a save may begin."""
        self._move(SaveEvent.WRITER_OPENED)
        with self.writer.continuing(take_over) as writer:
            yield writer
        self._fenced_by = None
        self._move(SaveEvent.IN_PLACE)

    def stepped(self) -> None:
        """Count a step; the first one, also after a restore, begins to take the store over, in the background.

        Then an earlier training stops. The first step at which that is over raises what went wrong. All ranks call it.
        """
        was_beside = self.state in (SaveState.READING, SaveState.RUNNING)  # `is_saving` is False once it is written
        self.schedule.trained(self.position.step, time.monotonic(), is_saving=was_beside)
        if self.state is SaveState.UNTRAINED:
            self._move(SaveEvent.STEPPED)
            self.writer.prepare(self.background.call)
        elif (opening := self.writer.opening) is not None and all(together(self.training.control, opening.done)):
            self.reports.report_opening(self.ready_writer)

    # ---- the end

    def leave(self) -> Writer | None:
        """End after a rank was lost; rows of saves that are not known to be committed are dirty again. Blocks.

        Returns the writer, open: its mirrors are another's from now on.
        """
        self._unreported = None
        self.collect(wait=True)
        self.writer.wait()
        try:
            self.settle()
        except CnrStoreError as error:
            logger.warning("whether the last save is committed is not known: %s", error)
        if self._unknown is not None:
            unknown, self._unknown = self._unknown, None
            self._lost(unknown.job, None)
        self.background.close()
        self.stager.free()
        return self.writer.current

    def close(self) -> None:
        """Wait for the running save and end the thread. Later saves are not possible.

        Raises
        ------
        BackgroundSaveFailed
            The last save failed, or its outcome could not be learned.
        """
        if self.schedule.is_never_due and not self.history and self.position.step > self.schedule.last_step:
            logger.warning(
                "%s: step %d is the last, and nothing was saved: without every_steps= and SavePolicy(every_seconds=) "
                "only save() saves", self.writer.store.url, self.position.step,
            )  # fmt: skip
        try:
            error = self.collect(wait=True)
            if self.state is SaveState.UNKNOWN:
                try:
                    self.settle()
                    error = None
                except CommitStateUnknown as unknown:
                    error = unknown
            self.reports.report(error)
            if self.writer.opening is not None:
                self.reports.report_opening(self.ready_writer)
        finally:
            self.background.close()
            self.stager.free()
            self.writer.close()


def save_due(saver: Saver) -> None:
    """Begin the save that is due at this step, by the rules of ``when_busy`` and ``on_error``. All ranks call it."""
    started = time.perf_counter()
    policy, reports, step = saver.policy, saver.reports, saver.position.step
    # If one rank cannot save now, no rank can; with "wait" no rank asks.
    when_busy = policy.when_busy if saver.schedule.auto is None else "later"
    control = saver.training.control
    if when_busy != "wait" and any(together(control, lambda: saver.is_saving or not saver.schedule.has_rested)):
        if when_busy == "refuse":
            raise SaveInProgress(
                f'the save before step {step} is still under way; save less often, or choose when_busy="later"'
            )
        if when_busy == "skip":
            saver.mark_saved()
        return
    reports.report_together(saver.collect(wait=True))
    try:
        is_over = saver.begin(wait_s=time.perf_counter() - started)
    except CnrStoreError as error:
        if policy.on_error == "raise":
            raise
        saver.mark_saved()
        warn_caller(f"no checkpoint at step {step}: {error}")
        return
    if saver.training.ranks.world == 1 and is_over:  # a first baseline that stalled failed in this step
        reports.report(saver.collect(wait=False))
