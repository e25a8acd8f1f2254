"""One save in the background: one thread encodes, writes and commits it. There are never two saves.

The thread uses copies and the store, nothing of the model. When the training thread collects the outcome, it decides
what happens to the dirty rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from itertools import compress
from typing import Literal, TypeVar

import numpy as np
import torch

from cnr_store.errors import (
    BackgroundSaveFailed,
    CommitStateUnknown,
    Conflict,
    Fenced,
    RankLost,
    TransactionAborted,
)
from cnr_store.format.document_tree import EncodedTree
from cnr_store.runtime.notebook import ShownReport
from cnr_store.runtime.threads import background_cpu_s
from cnr_store.segment.codes import Array
from cnr_store.segment.shards import Shard
from cnr_store.training.dense_staging import StagedDense
from cnr_store.training.dynamic_tables import StagedKeys
from cnr_store.training.precision.rate_control import ScaleChange
from cnr_store.training.tensors import WEIGHT, TensorRows, as_array, flat_rows
from cnr_store.types import RowIds
from cnr_store.write.encode import RowUpdate
from cnr_store.write.joined_rows import JoinedRows
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.table_options import TableOptions
from cnr_store.write.transaction import Transaction
from cnr_store.write.whole_tables import TableValues
from cnr_store_gpu import Staged, Taken
from cnr_store_gpu.bitmap import RowLists

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class SaveOutcome(Enum):
    """What became of a save."""

    WON = "won"
    """It is committed."""
    LOST = "lost"
    """Nothing became visible; its rows are to be saved again."""
    UNKNOWN = "unknown"
    """The commit's reply was lost; the store must be asked before the next save."""


@dataclass(frozen=True, slots=True)
class SaveReport(ShownReport):
    """What one committed save was and cost.

    Attributes
    ----------
    version, step, kind
        Position in the log, training step, ``baseline`` or ``delta``.
    rows
        Touched rows that this rank wrote, of all tables; all rows of tables that were written whole. A later baseline
        also has the rows that did not change, from the mirror: they are not counted, but in the commit record they are.
    size_bytes
        Bytes of the segment, of all ranks.
    stall_s
        Seconds for which the training thread copied rows (and encoded and wrote, if it was asked to stall), agreed with
        other ranks, and had dense tensors copied before its next optimizer step.
    wait_s
        Seconds for which it waited for the save before.
    encode_s, commit_s
        Seconds in the background: rows to codes, and objects and commit record to the store.
    cpu_s
        CPU seconds of the library's threads in that time (off Linux, of one of them).
    scales
        By table, what became of the scales that this save chose or changed.
    """

    version: int
    step: int
    kind: Literal["baseline", "delta"]
    rows: int
    size_bytes: int
    stall_s: float
    wait_s: float
    encode_s: float
    commit_s: float
    cpu_s: float
    scales: Mapping[str, ScaleChange] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class WholeShard:
    """A shard to be written whole; tensors are live. ``options`` None keeps those that the table has."""

    key: Shard
    weight: torch.Tensor
    slots: Mapping[str, torch.Tensor]
    options: TableOptions | None
    _rows: tuple[TensorRows, dict[str, TensorRows]] | None = None

    def rows(self) -> tuple[TensorRows, dict[str, TensorRows]]:
        """Return weights and slots as a transaction takes them; what is dense only here is made once."""
        if self._rows is None:
            slots = {name: TensorRows(flat_rows(slot.detach())) for name, slot in self.slots.items()}
            self._rows = TensorRows(self.weight), slots
        return self._rows


@dataclass(slots=True, eq=False)
class LiveRead:
    """Shards that are read into their mirrors while the training continues, before the save that they are part of.

    Attributes
    ----------
    whole, taken
        By name of the shard: what is read, and its marks of the instant at which that began. Rows marked since then are
        given to the save.
    drops
        Tables that end with this save.
    unread
        Names of shards that have no full mirror; the save writes them whole while the training waits. Known once it
        is over.
    stall_s, read_s, cpu_s
        Seconds for which it held the training up at its beginning, that it took, and CPU seconds of these.
    """

    transaction: Transaction
    whole: Mapping[str, WholeShard]
    taken: Mapping[str, Taken]
    drops: tuple[str, ...]
    unread: set[str] = field(default_factory=set)
    stall_s: float = 0.0
    read_s: float = 0.0
    cpu_s: float = 0.0

    def run(self) -> None:
        """Declare the tables and read them; blocks. Errors are those of `Transaction`."""
        started, cpu_s = time.perf_counter(), background_cpu_s()
        declare(self.transaction, self.whole.values(), self.drops)
        for name, one in self.whole.items():
            values, slots = one.rows()
            if not self.transaction.read_live(one.key.table, values, slots=slots, rectangle=one.key.rectangle):
                self.unread.add(name)
        self.read_s, self.cpu_s = time.perf_counter() - started, background_cpu_s() - cpu_s


@dataclass(slots=True, eq=False)
class SaveJob:
    """Everything that one save needs, as of one instant; the transaction has the documents already.

    ``fixed`` encodes the documents that no training step changes, by name: the background has time for it.
    ``shards`` are those that this rank writes; ``taken``, ``row_ids`` (of the whole table), ``whole`` and the staging
    go by their names, too. ``declares``: whether tables, of any rank, are stored anew. ``read``: what was read of them
    before. ``keyed``: what is written of dynamic tables. ``dense``: the dense tensors that this rank writes, which are
    still being copied.
    """

    transaction: Transaction
    shards: Mapping[str, Shard]
    taken: Mapping[str, Taken]
    staged: Staged
    row_ids: Mapping[str, RowIds]
    whole: Mapping[str, WholeShard]
    drops: tuple[str, ...]
    fixed: Mapping[str, Callable[[], EncodedTree]] = field(default_factory=dict)
    declares: bool = False
    read: LiveRead | None = None
    keyed: Sequence[StagedKeys] = ()
    dense: StagedDense | None = None
    stall_s: float = 0.0
    wait_s: float = 0.0
    encode_s: float = 0.0
    commit_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def row_count(self) -> int:
        """Rows that this rank writes."""
        read = self.read_shards
        if isinstance(self.row_ids, RowLists) and not read:
            touched = len(self.row_ids.row_ids)
        else:
            touched = sum(len(self.row_ids[name]) for name in self.row_ids if name not in read)
        whole = {**self.read_shards, **self.whole}
        by_key = sum(len(one.rows.keys) for one in self.keyed)
        return touched + by_key + sum(one.weight.shape[0] for one in whole.values())

    @property
    def read_shards(self) -> Mapping[str, WholeShard]:
        """What was read before the save, by name of the shard."""
        return {} if self.read is None else self.read.whole

    @property
    def dense_wait_s(self) -> float:
        """Seconds for which the training waited for copies of dense tensors before its next step."""
        return 0.0 if self.dense is None else self.dense.waited_s

    def report(self, version: int, scales: Mapping[str, ScaleChange]) -> SaveReport:
        """Return the report of this save, committed as ``version``."""
        return SaveReport(
            version=version, step=self.transaction.step, kind=self.transaction.kind, rows=self.row_count,
            size_bytes=self.transaction.size_bytes, stall_s=self.stall_s + self.dense_wait_s, wait_s=self.wait_s,
            encode_s=self.encode_s, commit_s=self.commit_s, cpu_s=self.cpu_s, scales=scales,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Finished:
    """A save that is over: its job, what became of it, and its error if there was one."""

    job: SaveJob
    outcome: SaveOutcome
    error: BaseException | None = None


def run_save(job: SaveJob, then: Callable[[Transaction], None] | None = None) -> None:
    """Write a job's tables and commit, and call ``then`` whatever became of it; blocks.

    Errors are those of `Transaction`.
    """
    try:
        _write_and_commit(job)
    finally:
        if then is not None:
            then(job.transaction)


def _write_and_commit(job: SaveJob) -> None:
    started, cpu_s = time.perf_counter(), background_cpu_s()
    transaction = job.transaction
    with transaction:
        if job.dense is not None:
            job.dense.copy_rest()
            transaction.put_dense(job.dense.copies, job.dense.dtypes, check=job.dense.check)
        for name, encoded in job.fixed.items():
            transaction.put_document(name, encoded())
        if job.read is None:
            declare(transaction, job.whole.values() if job.declares else None, job.drops)
        if job.whole:
            transaction.write_tables(
                [TableValues(one.key.table, *one.rows(), rectangle=one.key.rectangle) for one in job.whole.values()]
            )
        updates, joined = given_rows(job)
        transaction.write_many(updates, joined=joined)
        for one_table in job.keyed:
            one_table.put(transaction)
        job.encode_s = time.perf_counter() - started + (job.read.read_s if job.read else 0.0)
        # For whole tables the training is still waiting.
        waited_s = job.stall_s + job.dense_wait_s + (job.encode_s if job.whole else 0.0)
        transaction.note({"timing": {"stall_s": round(waited_s, 6), "encode_s": round(job.encode_s, 6)}})
        started = time.perf_counter()
        transaction.commit()
    job.commit_s = time.perf_counter() - started
    job.staged.make_room()
    job.cpu_s = background_cpu_s() - cpu_s + (job.read.cpu_s if job.read else 0.0)


def given_rows(job: SaveJob) -> tuple[list[RowUpdate], list[JoinedRows]]:
    """Return the touched rows: of small tables those that are alike end to end, of the others table by table."""
    joined: list[JoinedRows] = []
    together: set[str] = set()
    for one in job.staged.joined(as_array):
        filled = (one.counts > 0).tolist()
        names, arrays = [*compress(one.tables, filled)], one.arrays
        if names:
            row_ids = rows_of_tables(job.row_ids, names)
            keys = [*map(job.shards.__getitem__, names)]
            counts = one.counts[filled]
            joined.append(JoinedRows(keys, counts, row_ids, arrays.pop(WEIGHT), _stored_slots(arrays)))
            together.update(names)
    codes, updates = job.staged.codes, []
    for name in [name for name in job.row_ids if name not in together]:
        shard, row_ids = job.shards[name], job.row_ids[name]
        if len(row_ids):
            copies = job.staged.arrays(name, as_array)
            values = as_array(codes[name]) if name in codes else copies.pop(WEIGHT)
            updates.append(RowUpdate(shard.table, row_ids, values, _stored_slots(copies), rectangle=shard.rectangle))
    return updates, joined


def rows_of_tables(row_ids: Mapping[str, RowIds], names: Sequence[str]) -> RowIds:
    """Return the row ids of some tables, end to end."""
    if isinstance(row_ids, RowLists):
        return row_ids.joined(names)
    return np.concatenate([*map(row_ids.__getitem__, names)])


def _stored_slots(copies: Mapping[str, Array]) -> dict[str, Array]:
    """Slots as they are stored: of one number per row without a second dimension."""
    return {slot: array[:, 0] if array.shape[1:] == (1,) else array for slot, array in copies.items()}


def declare(transaction: Transaction, whole: Iterable[WholeShard] | None, drops: Iterable[str]) -> None:
    """Declare which tables end, and how new tables and those with other options are stored; None: no rank has any.

    Blocks; all ranks call it.
    """
    for table in drops:
        transaction.drop_table(table)
    if whole is None:
        return
    declared: dict[str, list[Declaration]] = {}
    for one in whole:
        if one.options is not None:
            shard = Declaration(*one.rows(), one.options)
            declared.setdefault(one.key.table, []).append(shard)
    transaction.declare_tables(declared)


def _fulfil(future: Future[None], run: Callable[[SaveJob], None], job: SaveJob) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        run(job)
    except BaseException as error:  # noqa: BLE001 (raised where the save is collected)
        future.set_exception(error)
    else:
        future.set_result(None)


@dataclass(slots=True)
class BackgroundSave:
    """The one thread and the one save that may be under way. Call it from one thread only."""

    _run: Callable[[SaveJob], None] = run_save
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="cnr-save"))
    _job: SaveJob | None = None
    _future: Future[None] | None = None
    _reading: Future[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a save is under way."""
        return self._future is not None and not self._future.done()

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Do something else, behind what is under way."""
        return self._pool.submit(work)

    def read(self, read: LiveRead) -> None:
        """Begin to read tables; nothing else may be under way."""
        self._reading = self._pool.submit(read.run)

    @property
    def is_read(self) -> bool:
        """Whether the tables that `read` began with are read, or that has failed."""
        return self._reading is not None and self._reading.done()

    def read_error(self) -> BaseException | None:
        """Return what went wrong in the last `read`; blocks until it is over."""
        return None if self._reading is None else self._reading.exception()

    def start(self, job: SaveJob) -> None:
        """Hand a job over; the one before must have been collected. After an error ask `has` whose it is."""
        future: Future[None] = Future()
        try:
            self._job, self._future = job, future
            self._pool.submit(_fulfil, future, self._run, job)
        except BaseException:
            # What could not be cancelled runs already. A pool without a thread keeps the rest queued; it is void now.
            if future.cancel():
                self._job = self._future = None
            raise

    def has(self, job: SaveJob) -> bool:
        """Whether a job is under way or to be collected; else it is still its maker's."""
        return self._job is job

    def wait(self) -> None:
        """Block until the save under way is over; it is still to be collected."""
        if self._future is not None:
            self._future.exception()

    def wait_to_the_end(self) -> None:
        """Block as `wait`, also after Ctrl-C, because the save reads what the caller would change next."""
        while self.is_running:
            try:
                self.wait()
            except BaseException:  # noqa: BLE001 (the caller raises the first one)
                logger.warning("a save is reading the live tables; waiting until it is over")

    def collect(self, *, wait: bool) -> Finished | None:
        """Return the save that is over, once; None if there is none. Blocks only with ``wait``."""
        if self._future is None or self._job is None or not (wait or self._future.done()):
            return None
        error = self._future.exception()
        job, self._job, self._future = self._job, None, None
        if job.transaction.version is not None:
            # Also if something failed after the commit: committed rows are not saved again.
            return Finished(job, SaveOutcome.WON, error)
        unknown = isinstance(error, CommitStateUnknown)
        return Finished(job, SaveOutcome.UNKNOWN if unknown else SaveOutcome.LOST, error)

    def close(self) -> None:
        """Wait for the thread and end it."""
        self._pool.shutdown(wait=True)


def failure_message(error: BaseException) -> str:
    """Return what a failed save means for the training. Pure."""
    if isinstance(error, CommitStateUnknown):
        return f"whether a checkpoint was committed is not known yet ({error}); it is looked up before the next save"
    if isinstance(error, RankLost):
        return f"this rank has lost the others, and does not know whether the last checkpoint was committed ({error})"
    if isinstance(error, Fenced):
        return f"a checkpoint was not saved, nor will a later one of this training be: {error}"
    if isinstance(error, Conflict) and not isinstance(error, TransactionAborted):
        return (
            f"a checkpoint was not saved ({error}). If this training goes on, its next save is a baseline of all rows"
        )
    return f"a checkpoint was not saved ({error}); its rows are saved with the next one"


def raise_failure(error: BaseException | None) -> None:
    """Raise the error of a failed save; return if there is no error.

    Raises
    ------
    BackgroundSaveFailed
        With its cause. An error that is not an `Exception` (Ctrl-C) is raised unchanged.
    """
    if error is None:
        return
    if not isinstance(error, Exception):
        raise error
    raise BackgroundSaveFailed(failure_message(error)) from error
